"""What the latest client of model hubs sees of a hub that fails, limits, lies or names files badly:
its own retry works, wrong content is never a snapshot, and no token stands in a log."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from door_rig import MirrorAgent
from hub_clients_rig import ENVIRONMENTS, HubClientSite, call
from hub_rig import Hub, running_hub

VERSIONS = ("2.4.0",)
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("hub-clients")]

CLIENT = """
import json, os, sys
from huggingface_hub import snapshot_download
for name, token in json.loads(sys.argv[1]):
    try:
        place = snapshot_download(name, token=token or False)
        outcome = {path: open(os.path.join(place, path), "rb").read().hex() for path in os.listdir(place)}
    except Exception as error:
        outcome = f"{type(error).__name__}: {error} {error.__cause__}"
    print(json.dumps(outcome))
"""
LARGE = os.urandom(1 << 19)
TOKEN, OTHER = "hf_of-one-that-may", "hf_of-one-that-may-not"


class Kinds:
    """Repositories, each with a kind of failure, and what a client is to see: a text in its error,
    or "" for all files."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.asked: list[tuple[str, str]] = []
        self.expected: list[str] = []

    def add(self, name: str, error: str = "", *, token: str = "", files: dict[str, bytes] | None = None) -> str:
        """A repository, which the client is to ask for; returns its name."""
        path = f"org/{name}"
        repository = self.hub.repository(path)
        if not repository.commits:
            repository.commit(files or self.files(path))
        self.asked.append((path, token))
        self.expected.append(error)
        return path

    def files(self, name: str) -> dict[str, bytes]:
        return {"config.json": f'"{name}"'.encode(), "model.safetensors": name.encode() + LARGE}


@pytest.fixture
def kinds() -> Iterator[Kinds]:
    with running_hub() as hub:
        yield Kinds(hub)


def prepare(kinds: Kinds) -> None:
    """One repository for each kind of failure that a client may meet."""
    hub = kinds.hub
    hub.tokens = {TOKEN: {"org/gated", "org/private"}, OTHER: set()}
    kinds.add("good")
    for token, error in (("", "401"), ("hf_unknown", "401"), (OTHER, "404"), (TOKEN, "")):
        hub.repository(kinds.add("private", error, token=token)).private = True
    for token, error in (("", "gated"), (OTHER, "gated"), (TOKEN, "")):
        hub.repository(kinds.add("gated", error, token=token)).gated = True
    for status in (500, 502, 503, 504):
        for part, place in (("info", "/revision"), ("tree", "/tree"), ("file", "/resolve")):
            name = kinds.add(f"{part}-{status}")
            hub.statuses.append((f"{name}{place}", status, {}))
    hub.always["org/lost/resolve"] = 404
    kinds.add("lost", "404")
    hub.always["org/broken/resolve"] = 500
    kinds.add("broken", "503")
    hub.statuses += [("org/loop/resolve", 302, {"Location": "/org/loop/resolve/main/config.json"})] * 50
    kinds.add("loop", "redirects")
    for name in ("short", "wrong"):
        kinds.add(f"{name}-small", "502")
        kinds.add(f"{name}-large", "")  # see `spoil`
    for name in ("a/../../evil", "a\nb", "a\\b", "/etc/passwd", "a\u202eb"):
        kinds.add(f"name-{len(kinds.asked)}", "is refused", files={"good.json": b"{}", name: b"x"})
    for place in ("tree", "resolve"):
        hub.statuses.append((f"{kinds.add(f'limited-{place}')}/{place}", 429, {"Retry-After": "1"}))
    hub.change = spoil


def spoil(path: str, data: bytes) -> bytes:
    """What the hub sends of a file."""
    if path == "config.json" and b"-small" in data:
        return data[:-3] if b"short" in data else bytes(len(data))
    if path == "model.safetensors" and data[:24].partition(b"-large")[1]:
        return data[:-3] if b"short" in data[:24] else bytes(len(data))
    return data


@pytest.mark.parametrize("version", VERSIONS)
def test_a_client_sees_what_it_expects_of_each_failure(version: str, kinds: Kinds, tmp_path: Path) -> None:
    python = ENVIRONMENTS / version / "bin" / "python"
    if not python.exists():
        pytest.skip(f"needs huggingface_hub {version}: make setup-all")
    prepare(kinds)
    site = HubClientSite(tmp_path, kinds.hub)
    try:
        site.start_tracker()
        agent = MirrorAgent(site, "h1").start()
        words = [str(python), "-c", CLIENT, json.dumps(kinds.asked)]
        printed = call(words, agent, tmp_path / "home", HF_HUB_VERBOSITY="critical")
    finally:
        site.close()
    outcomes = [json.loads(line) for line in printed.splitlines()]
    for (name, token), error, outcome in zip(kinds.asked, kinds.expected, outcomes, strict=True):
        if "-large" in name:
            assert isinstance(outcome, str), f"{name}: wrong content is never a snapshot"
        elif error:
            assert isinstance(outcome, str) and error in outcome, f"{name} with {token!r}: {outcome}"
        else:
            assert outcome == {path: data.hex() for path, data in kinds.files(name).items()}, f"{name}: {outcome}"
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert logs and TOKEN not in logs and OTHER not in logs and "Signature=secret" not in logs
