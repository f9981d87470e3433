"""`p2pdist mirror check`, and `doctor` with it: runtimes that ask the mirror, and others."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clients_rig import P2PDIST, Client, Containerd, Docker, Podman, running_machine
from door_rig import HUB, Door, MirrorAgent, running_door
from images_rig import make_image, push_image
from registry_rig import needs_registry

pytestmark = [pytest.mark.slow, pytest.mark.root, needs_registry, pytest.mark.xdist_group("clients")]


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with tempfile.TemporaryDirectory(prefix="p2pdist-") as directory, running_door(Path(directory)) as running:
        push_image(running.upstream, "public/app", "v1", make_image("docker", size=1000))
        yield running


@pytest.fixture(scope="module")
def agent(door: Door) -> MirrorAgent:
    return door.agent("h1")


@pytest.fixture(params=[Containerd, Docker, Podman], ids=lambda kind: kind.name)
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    kind: type[Client] = request.param
    if kind.lacking():
        pytest.skip(kind.lacking())
    with running_machine() as machine:
        yield kind(machine)


def checked(client: Client, agent: MirrorAgent, image: str = "") -> dict[str, Any]:
    """The finding, and that doctor has the same."""
    words = ["--socket", str(agent.socket), *(["--image", image] if image else [])]
    document = client.machine.mirror("check", *words, check=False)
    doctor = client.machine.run(*P2PDIST, "doctor", *words, "--json", check=False, timeout_s=120)
    [finding] = document["checks"]
    states = [check["state"] for check in json.loads(doctor.stdout)["checks"] if check["name"] == finding["name"]]
    assert states == [finding["state"]]
    assert document["ok"] == (finding["state"] != "failed")
    return dict(finding)


def test_a_runtime_that_asks_is_found_to(client: Client, door: Door, agent: MirrorAgent) -> None:
    upstream = HUB if client.docker_hub else door.upstream.address
    client.machine.mirror("install", client.runtime, "--upstream", upstream, "--socket", str(agent.socket))
    client.start()
    asked = checked(client, agent, f"{upstream}/public/app:v1")
    assert asked["state"] == "ok" and "asks the mirror" in asked["detail"]
    missing = checked(client, agent, f"{upstream}/public/none:v1")
    assert missing["state"] == "failed" and "did not come" in missing["detail"] and missing["remedy"]


def test_without_an_image_one_is_asked_for_that_is_nowhere(door: Door, agent: MirrorAgent) -> None:
    """That the mirror was asked is seen all the same."""
    if Podman.lacking():
        pytest.skip(Podman.lacking())
    with running_machine() as machine:
        machine.mirror("install", "podman", "--upstream", door.upstream.address, "--socket", str(agent.socket))
        assert checked(Podman(machine), agent)["state"] == "ok"


def test_a_runtime_that_does_not_ask_is_found_to(client: Client, door: Door, agent: MirrorAgent) -> None:
    """Its files name another address than the agent's."""
    upstream = HUB if client.docker_hub else door.upstream.address
    client.machine.mirror("install", client.runtime, "--upstream", upstream, "--address", "127.0.0.1:9")
    client.start()
    finding = checked(client, agent)
    assert finding["state"] == "failed" and "did not ask the mirror" in finding["detail"] and finding["remedy"]


def test_a_runtime_that_was_not_set_up_is_said_to_be_none(agent: MirrorAgent) -> None:
    with running_machine() as machine:
        document = machine.mirror("check", "docker", "--socket", str(agent.socket), check=False)
        assert "mirror install docker" in document["checks"][0]["remedy"]
        assert machine.mirror("check", "--socket", str(agent.socket))["checks"] == []


def test_without_an_agent_the_check_says_so(agent: MirrorAgent) -> None:
    with running_machine() as machine:
        installed = machine.mirror("install", "podman", "--upstream", HUB, "--address", "127.0.0.1:9")
        assert any("nothing answers at http://127.0.0.1:9" in note for note in installed["notes"])
        [finding] = machine.mirror("check", "--socket", "/nowhere", check=False)["checks"]
        assert finding["state"] == "failed" and finding["remedy"]


def test_the_agent_says_address_and_upstreams(door: Door, agent: MirrorAgent) -> None:
    """Without options, `install` asks it."""
    with running_machine() as machine:
        machine.mirror("install", "containerd", "--socket", str(agent.socket))
        [row] = machine.mirror("status")["runtimes"]
        assert row["address"] == f"http://{agent.mirror}"
        assert sorted(row["upstreams"]) == sorted([HUB, door.upstream.address])
