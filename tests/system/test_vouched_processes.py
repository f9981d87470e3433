"""An image that nobody prepared, pulled by agent processes from a registry whose rate is limited:
hosts and trackers are killed on the way."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from site_rig import Agent, Background, Site, WebOrigin, running_site, until, wait_for

from p2pdist.model.digest import Digest, digest_of, hex_of
from p2pdist.model.manifest import MANIFEST_TYPE

LAYER = random.Random(5).randbytes(24 << 20)
LAYER_DIGEST = digest_of(LAYER)
CONFIG = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}}).encode()
RATE_BYTES_S = 8e6

pytestmark = pytest.mark.slow


class FileRegistry(WebOrigin):
    """A registry with one image, as files."""

    async def _file(self, request: web.Request) -> web.Response:
        response = await super()._file(request)
        if "/manifests/" in request.path:
            response.content_type = MANIFEST_TYPE
        return response

    def put_image(self) -> None:
        def described(media_type: str, data: bytes) -> dict[str, object]:
            return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}

        config_type = "application/vnd.oci.image.config.v1+json"
        layer_type = "application/vnd.oci.image.layer.v1.tar"
        layers = [described(layer_type, LAYER)]
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": described(config_type, CONFIG)}
        encoded = json.dumps({**manifest, "layers": layers}).encode()
        repository = self.directory / "v2" / "team" / "app"
        for kind in ("blobs", "manifests"):
            (repository / kind).mkdir(parents=True)
        for blob in (LAYER, CONFIG):
            (repository / "blobs" / digest_of(blob)).write_bytes(blob)
        for name in ("v1", digest_of(encoded)):
            (repository / "manifests" / name).write_bytes(encoded)

    @property
    def copies(self) -> float:
        return self.sent.get(LAYER_DIGEST, 0) / len(LAYER)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[FileRegistry]:
    directory = tmp_path / "registry"
    directory.mkdir()
    made = FileRegistry(directory)
    made.put_image()
    made.start()
    made.rate_bytes_s = RATE_BYTES_S
    yield made
    made.stop()


@pytest.fixture
def site(tmp_path: Path, registry: FileRegistry) -> Iterator[Site]:
    with running_site(tmp_path, tracker=False) as running:
        start_tracker(running, registry)
        yield running


def start_tracker(site: Site, registry: FileRegistry) -> None:
    """Start a tracker that keeps nothing of what another one knew of swarms."""
    log = site.directory / "tracker.log"
    words = ["tracker", "--listen", f"127.0.0.1:{site.tracker_port}"]
    site.tracker_process = site.spawn([*words, "--upstream", f"127.0.0.1:{registry.port}={registry.url}"], log)
    wait_for(site.tracker_url + "/readyz", site.tracker_process, log)


def pull(agent: Agent, registry: FileRegistry) -> Background:
    return agent.start_pull(package=f"docker://127.0.0.1:{registry.port}/team/app:v1", wait=True)


def stored(agent: Agent, digest: Digest = LAYER_DIGEST) -> bytes:
    path = agent.store / "blobs" / "sha256" / hex_of(digest)
    return path.read_bytes() if path.exists() else b""


def test_a_reader_that_is_killed_costs_what_it_had_not_passed_on(site: Site, registry: FileRegistry) -> None:
    agents = site.agents(4)
    pulls = {agent.name: pull(agent, registry) for agent in agents}
    until(lambda: registry.copies > 0.3)
    reader = max(agents, key=lambda agent: agent.metric('p2pdist_agent_received_bytes_total{source="origin"}'))
    reader.kill()
    rest = [agent for agent in agents if agent is not reader]
    for agent in rest:
        pulls[agent.name].result(120)
        assert stored(agent) == LAYER
    assert registry.copies < 1.5
    reader.start()
    pull(reader, registry).result(120)
    assert stored(reader) == LAYER and registry.copies < 1.5, "what it had is good, and others have the rest"


def test_a_tracker_that_is_killed_comes_back_without_knowing_anything(site: Site, registry: FileRegistry) -> None:
    agents = site.agents(3)
    pulls = [pull(agent, registry) for agent in agents]
    until(lambda: registry.copies > 0.3)
    site.kill_tracker()
    start_tracker(site, registry)
    for agent, pulling in zip(agents, pulls, strict=True):
        pulling.result(120)
        assert stored(agent) == LAYER
    assert registry.copies < 1.8
    newcomer = Agent(site, "h9").start()
    before = registry.copies
    pull(newcomer, registry).result(120)
    assert stored(newcomer) == LAYER and registry.copies == before, "hosts that have it tell the list"


def test_agents_that_are_killed_together_go_on_from_what_they_had(site: Site, registry: FileRegistry) -> None:
    agents = site.agents(2)
    for agent in agents:
        pull(agent, registry)
    until(lambda: registry.copies > 0.5)
    for agent in agents:
        agent.kill()
    before = registry.copies
    for agent in agents:
        agent.start()
    for pulling in [pull(agent, registry) for agent in agents]:
        pulling.result(120)
    assert all(stored(agent) == LAYER for agent in agents)
    assert registry.copies - before < 0.9, "not all of it was read again"
