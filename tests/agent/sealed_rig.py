"""A fleet with sealed packages: the tracker itself with an access file, over real TLS, a real
origin directory, and agents that join. Packages are packed and pushed encrypted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from joined_rig import Running, free_port

from p2pdist.agent.agent import AgentSettings
from p2pdist.agent.pull.pulls import Pull
from p2pdist.model.access import TICKET_S, Ticket, encode_ticket
from p2pdist.model.digest import Digest
from p2pdist.model.manifest import Reference, parse_reference
from p2pdist.model.messages import PullRequest
from p2pdist.origin.drivers import open_origin
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.pack import pack
from p2pdist.package.repository.push import Pushed
from p2pdist.package.repository.sealed_push import push_encrypted
from tracker.access.control import AccessControl
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.http.app import make_app
from tracker.preseed_service import PreseedService
from tracker.service import Service
from tracker.state.preseeds import PreseedDatabase
from tracker.upstreams.hubs import Hubs
from tracker.upstreams.upstreams import Upstreams

ACCESS = """
fleet = "prod"
public = ["public/*"]

[join.default]
read = ["*"]

[join.a]
read = ["team-a/*"]

[join.b]
read = ["team-b/*"]

[sealed."team-a/*"]
key = "team-a"

[sealed."team-b/*"]
key = "team-b"
"""

MARK = b"a secret that nobody without the key may see"
"""In every file that is packed, and in the name of one."""


class SealedSite:
    """The tracker, its origin and layout, and agents. `recipients` by key."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self.directory, self.stack = directory, stack
        path = directory / "access" / "access.toml"
        path.parent.mkdir(mode=0o700)
        path.write_text(ACCESS)
        path.chmod(0o600)
        self.control = AccessControl(path, ["127.0.0.1", "localhost"])
        self.recipients = {
            key: self.control.directory.new_identity(key, now=time.time()) for key in ("team-a", "team-b")
        }
        self.origin_path = directory / "origin"
        (self.origin_path / "blobs" / "sha256").mkdir(parents=True)
        self.origin = open_origin(self.origin_path.as_uri())
        self.layout = LocalLayout(directory / "layout")
        self.layout.scratch()
        self.port = free_port()
        self._runner: web.AppRunner | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    async def start_tracker(self) -> None:
        self.service = Service(
            Fleet(started_at=time.monotonic(), origin=self.origin_path.as_uri()),
            Content(open_origin(self.origin_path.as_uri())),
            access=self.control,
            upstreams=Upstreams(()),
            hubs=Hubs(""),
        )
        preseeds = self.preseeds = self.service.listener = PreseedService(self.service, PreseedDatabase(""))
        await preseeds.load()
        self._runner = web.AppRunner(make_app(self.service, preseeds), access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self.control.tls.context).start()
        runs = (self.service.run(), preseeds.run(), self.control.watch())
        self._tasks = [asyncio.create_task(run) for run in runs]

    async def stop_tracker(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def agent(self, name: str, join: str = "default", **more: Any) -> Running:
        token = self.control.directory.join_token(join)
        url = f"https://127.0.0.1:{self.port}"
        more = {"tracker_wait_s": 1.0, "store": self.directory / name} | more
        running = Running(AgentSettings((url,), name, f"127.0.0.1:{free_port()}", join_file=token, **more))
        await running.start()
        self.stack.push_async_callback(running.stop)
        return running

    def write_access(self, text: str) -> None:
        """Replace the access file."""
        path = self.control.directory.path
        draft = path.with_name(".draft")
        draft.write_text(text)
        draft.chmod(0o600)
        draft.replace(path)

    def source(self, name: str = "source", size: int = 300_000) -> Path:
        """A directory with a marked file of about `size` bytes, which no compression shrinks."""
        directory = self.directory / name
        directory.mkdir()
        marked = directory / MARK.decode().replace(" ", "-")
        marked.write_bytes(MARK + _noise(name, size) + MARK)
        (directory / "small").write_bytes(MARK)
        return directory

    async def push(self, reference: str, source: Path, *, key: str = "team-a", **more: Any) -> Pushed:
        """Pack a directory, and push it encrypted."""
        parsed: Reference = parse_reference(reference)
        await pack(source, parsed, self.layout, level=1, **more)
        return await push_encrypted(parsed, self.layout, self.origin, self.recipients[key])

    def ticket(self, blob: Digest, host: str) -> str:
        """A ticket of this fleet for one host."""
        key = self.control.state.signing[0]
        return encode_ticket(Ticket(key.name, blob, host, "start", time.time() + TICKET_S), key.sign)

    async def pull(self, running: Running, reference: str) -> Pull:
        """Pull a package, and wait."""
        pull = running.agent.pulls.start(PullRequest(package=reference))
        assert pull.task is not None
        async with asyncio.timeout(60):
            await asyncio.wait([pull.task])
        return pull


def _noise(seed: str, size: int) -> bytes:
    import random

    return random.Random(seed).randbytes(size)


def holds_mark(directory: Path) -> list[Path]:
    """The files below a directory whose bytes or name hold the mark."""
    found = []
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            name = path.name.encode()
            if MARK in path.read_bytes() or MARK.replace(b" ", b"-") in name:
                found.append(path)
    return found


@asynccontextmanager
async def sealed_site(directory: Path) -> AsyncIterator[SealedSite]:
    async with AsyncExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tracker.access.control.POLL_S", 0.05)
            site = SealedSite(directory, stack)
            stack.push_async_callback(site.origin.close)
            stack.push_async_callback(site.layout.close)
            await site.start_tracker()
            stack.push_async_callback(site.stop_tracker)
            yield site


@pytest.fixture(name="site")
async def site_with_keys(tmp_path: Path) -> AsyncIterator[SealedSite]:
    """Modules of tests import it, as the parameter `site`."""
    async with sealed_site(tmp_path) as made:
        yield made
