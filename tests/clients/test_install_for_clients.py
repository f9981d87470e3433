"""`p2pdist mirror install` for real runtimes, which then ask what it names before the registry: a
second registry stands where the mirror will be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from clients_rig import CLIENTS, Client, Docker, Machine, running_machine
from images_rig import SAYS, Image, make_image, push_image, runs_here
from registry_rig import Registry, needs_registry, running_registry
from watch_rig import Watch, watching

from p2pdist.model.image import path_of_upstream

pytestmark = [pytest.mark.long, pytest.mark.root, needs_registry, pytest.mark.xdist_group("clients")]
REPOSITORY = "public/app"
FOLDERS = ("containerd", "docker", "containers", "p2pdist")


@dataclass
class Place:
    """An upstream, and a stand-in for the mirror that holds the same image by both shapes of
    paths; each with its watch."""

    upstream: Registry
    behind: Registry
    mirror: Watch
    image: Image

    @property
    def name(self) -> str:
        return self.upstream.address


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("registries")
    with running_registry(directory / "up") as upstream, running_registry(directory / "mirror") as behind:
        image = make_image("oci", size=1 << 20)
        docker = make_image("docker", size=1 << 20)
        push_image(upstream, REPOSITORY, "v1", image)
        for repository in (REPOSITORY, f"{path_of_upstream(upstream.address)}/{REPOSITORY}"):
            push_image(behind, repository, "v1", image)
        push_image(behind, "p2pdist/app", "v1", docker)
        with watching(behind.address) as mirror:
            yield Place(upstream, behind, mirror, image)


@pytest.fixture(params=CLIENTS, ids=lambda client: client.name)
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    kind: type[Client] = request.param
    if kind.lacking():
        pytest.skip(kind.lacking())
    with running_machine() as machine:
        client = kind(machine)
        client.start()
        yield client


def state_of(machine: Machine) -> dict[str, str]:
    """The files of runtimes below /etc that differ from the host's."""
    upper = machine.place / "etc" / "upper"
    files = {str(path.relative_to(upper)): path for path in upper.rglob("*") if path.is_file()}
    return {name: path.read_text() for name, path in files.items() if name.partition("/")[0] in FOLDERS}


def test_a_runtime_asks_the_mirror_and_stops_when_that_is_taken_back(client: Client, place: Place) -> None:
    hub = client.docker_hub
    upstream = "docker.io" if hub else place.name
    reference = "docker.io/p2pdist/app:v1" if hub else f"{place.name}/{REPOSITORY}:v1"
    machine, before = client.machine, state_of(client.machine)
    words = (client.runtime, "--upstream", upstream)
    assert machine.mirror("install", *words, "--address", place.mirror.address)["changes"]
    client.reload()
    if isinstance(client, Docker):
        until = time.monotonic() + 30
        while client.mirrors() != [f"http://{place.mirror.address}/"]:
            assert time.monotonic() < until, "the daemon did not read its file again"
            time.sleep(0.1)
    place.mirror.calls.clear()
    logged = place.upstream.requests("GET")
    digest = client.pull(reference)
    assert hub or digest == place.image.manifest.digest
    assert any("/blobs/" in call.path for call in place.mirror.calls)
    assert place.upstream.requests("GET") == logged, "the upstream was asked as well"
    if runs_here() and client.name != "skopeo":
        assert client.run(reference).strip() == SAYS
    client.remove(reference)

    machine.mirror("uninstall", client.runtime)
    assert state_of(machine) == before
    if not hub:
        place.mirror.calls.clear()
        assert client.pull(reference) == place.image.manifest.digest
        assert not place.mirror.calls and place.upstream.requests("GET") > logged
        client.remove(reference)


def test_a_runtime_goes_on_to_the_registry_when_the_mirror_is_gone(client: Client, place: Place) -> None:
    """As with an agent that is being upgraded."""
    if client.docker_hub:
        pytest.skip("the registry behind Docker Hub's name cannot be reached here")
    reference = f"{place.name}/{REPOSITORY}:v1"
    client.machine.mirror("install", client.runtime, "--upstream", place.name, "--address", "127.0.0.1:9")
    assert client.pull(reference) == place.image.manifest.digest


def test_an_old_containerd_takes_settings_that_it_does_not_know(place: Place) -> None:
    """Where the version cannot be told, dial_timeout is written."""
    kind = CLIENTS[0]
    if kind.lacking():
        pytest.skip(kind.lacking())
    with running_machine() as machine:
        client = kind(machine)
        client.start()
        hosts = Path("/etc/containerd/certs.d") / place.name / "hosts.toml"
        text = f'[host."http://{place.mirror.address}"]\ncapabilities = ["pull", "resolve"]\ndial_timeout = "1s"\nnew = true\n'
        machine.run("sh", "-c", f"mkdir -p {hosts.parent} && printf '%s' '{text}' > {hosts}")
        place.mirror.calls.clear()
        client.pull(f"{place.name}/{REPOSITORY}:v1")
        assert place.mirror.calls
