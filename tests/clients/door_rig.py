"""An upstream registry that asks for tokens, a tracker that knows it under two names, and agents
with mirrors: real processes on loopback."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from registry_rig import Realm, Registry, running_registry
from site_rig import Agent, Site, free_port, wait_for

HUB = "docker.io"


class Door(Site):
    """A site whose tracker knows the upstream by its address and as Docker Hub."""

    def __init__(self, directory: Path, upstream: Registry) -> None:
        super().__init__(directory)
        self.upstream = upstream

    def start_tracker(self) -> None:
        words = ["tracker", "--listen", f"127.0.0.1:{self.tracker_port}", "--state", str(self.directory / "state")]
        for name in (self.upstream.address, HUB):
            words += ["--upstream", f"{name}=http://{self.upstream.address}"]
        log = self.directory / "tracker.log"
        self.tracker_process = self.spawn(words, log)
        wait_for(self.tracker_url + "/healthz", self.tracker_process, log)

    def agent(self, name: str, **options: str) -> MirrorAgent:
        """A started agent with a mirror."""
        agent = MirrorAgent(self, name, **options)
        agent.start()
        return agent


class MirrorAgent(Agent):
    """An agent with a mirror on loopback."""

    def __init__(self, site: Site, name: str, **options: str) -> None:
        self.mirror_port = free_port()
        super().__init__(site, name, **{"mirror": f"127.0.0.1:{self.mirror_port}"} | options)

    @property
    def mirror(self) -> str:
        return f"127.0.0.1:{self.mirror_port}"


def blob_bytes(registry: Registry, digest: str) -> int:
    """What the registry's log says it sent of a blob."""
    row = re.compile(rf'"GET /v2/[^ ]*/blobs/{digest}[^"]*" 20[06] (\d+)')
    return sum(int(match[1]) for match in row.finditer(registry.log.read_text()))


@contextlib.contextmanager
def running_door(directory: Path) -> Iterator[Door]:
    with running_registry(directory / "upstream", Realm()) as upstream:
        place = directory / "site"
        place.mkdir()
        door = Door(place, upstream)
        try:
            door.origin.start()
            door.start_tracker()
            yield door
        finally:
            door.close()
