"""Loading tensors of a model that still arrives, through a real agent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from late_modules import late_module
from site_rig import Background, Site, running_site

from p2pdist.agent.api.client import AWAY_S_MAX, LocalClient
from p2pdist.load import safetensors
from p2pdist.model.errors import Corrupt, NotFound, Unavailable, UsageError

torch, reference = late_module("torch"), late_module("safetensors.torch")
pytestmark = pytest.mark.slow


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with running_site(tmp_path) as running:
        yield running


def publish(site: Site, name: str, *words: str) -> tuple[str, Path]:
    """A model of 8 MiB at the origin; returns its digest and the file."""
    directory = site.directory / "model"
    directory.mkdir(exist_ok=True)
    file = directory / "model.safetensors"
    reference.save_file({f"layer{number}": torch.rand(1 << 18) for number in range(8)}, file)
    layout = ("--layout", str(site.directory / "layout"))
    code, made, errors = site.command("pack", str(directory), "-t", name, *words, *layout)
    assert code == 0, errors
    code, _, errors = site.command("push", name, *layout, "--origin", f"file://{site.layout}")
    assert code == 0, errors
    return made["layers"][0]["digest"], file


def test_the_first_tensor_is_there_before_the_last_piece(site: Site) -> None:
    digest, file = publish(site, "models/m:v1", "--format", "modelpack")
    (agent,) = site.agents(1)
    expected = reference.load_file(file)
    site.origin.rate_bytes_s = 512 << 10
    loading = safetensors("models/m:v1", socket=agent.socket)
    name, tensor = next(loading)
    here = LocalClient(agent.socket).blob_file(digest, 0, 0).here
    site.origin.rate_bytes_s = 0.0
    assert here < file.stat().st_size, "the rest is on its way"
    assert name == "layer0" and torch.equal(tensor, expected["layer0"])
    rest = dict(loading)
    assert rest.keys() | {"layer0"} == expected.keys()
    assert all(torch.equal(rest[each], expected[each]) for each in rest)
    # Complete: the blob by its digest, from the store's file, which is not read through the agent.
    assert [each for each, _ in safetensors(digest, socket=agent.socket)] == sorted(expected)
    found = LocalClient(agent.socket).blob_file(digest, 0, 0)
    assert found.here == found.size == file.stat().st_size and Path(found.path).read_bytes() == file.read_bytes()


def test_failures_say_what_happened(site: Site) -> None:
    digest, _ = publish(site, "models/tree:v1", "--format", "tree")
    (agent,) = site.agents(1)
    with pytest.raises(UsageError, match="is no model"):
        next(safetensors("models/tree:v1", socket=agent.socket))
    with pytest.raises(NotFound):
        next(safetensors("models/absent:v1", socket=agent.socket))
    with pytest.raises(Corrupt):
        next(safetensors(digest, socket=agent.socket))
    with pytest.raises(UsageError, match="has"):
        LocalClient(agent.socket).blob_file(digest, 0, 1 << 40)


def test_wrong_bytes_of_the_origin_are_no_tensor(site: Site) -> None:
    digest, _ = publish(site, "models/m:v1", "--format", "modelpack")
    (agent,) = site.agents(1)
    site.origin.spoil[digest.removeprefix("sha256:")] = "alter"
    with pytest.raises(Corrupt):
        next(safetensors("models/m:v1", socket=agent.socket))


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_loading_goes_on_over_a_restart_of_the_agent(site: Site, end: str) -> None:
    """As while it is upgraded: what had come is there, the rest comes through the next one."""
    _, file = publish(site, "models/m:v1", "--format", "modelpack")
    (agent,) = site.agents(1)
    expected = reference.load_file(file)
    site.origin.rate_bytes_s = 512 << 10
    loading = safetensors("models/m:v1", socket=agent.socket)
    found = dict([next(loading)])
    rest = Background(lambda: found.update(loading))
    getattr(agent, end)()
    site.origin.rate_bytes_s = 0.0
    agent.start()
    rest.result()
    assert found.keys() == expected.keys() and all(torch.equal(found[each], expected[each]) for each in expected)


def test_without_an_agent_loading_fails_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(Unavailable, match="no agent answers"):
        next(safetensors(f"sha256:{'0' * 64}", socket=tmp_path / "none"))
    assert time.monotonic() - began < AWAY_S_MAX
