"""A small agent with one package in its store: the local API's mounts and pulls on a Unix socket,
over real mounts.

`python mount_agent.py SOCKET DIRECTORY SCRIPT IMAGE...` serves until SIGTERM; SCRIPT is the
package's program, a shell script.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import msgspec
from aiohttp import web

from p2pdist.agent.caller import Caller
from p2pdist.agent.mounts import Mounts
from p2pdist.model.digest import Digest
from p2pdist.model.errors import NotFound, P2PDistError
from p2pdist.model.manifest import Config
from p2pdist.model.messages import MountRequest, PullRequest, PullStatus
from p2pdist.mount.layers import SquashfsLayer

DIGEST = Digest("sha256:" + "ab" * 32)


def answer(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


@web.middleware
async def problems(request: web.Request, handler: web.RequestHandler) -> web.StreamResponse:  # type: ignore[type-arg]
    try:
        return await handler(request)  # type: ignore[operator,no-any-return]
    except P2PDistError as error:
        return answer(error.problem(), error.http_status)


class MountAgent:
    """Its package is `app:v1`; a pull of it takes three questions."""

    def __init__(self, work: Path, images: list[Path], script: str) -> None:
        self.mounts = Mounts(work)
        self.images = images
        self.config = Config(("sh", "-c", script, "program"), ("GREETING=from ${P2PDIST_ROOT}",), "")
        self.held = 0
        self.asked = 0

    def hold(self):  # type: ignore[no-untyped-def]
        self.held += 1

        def release() -> None:
            self.held -= 1

        return release

    def status(self) -> PullStatus:
        state = "done" if self.asked >= 3 else "running"
        return PullStatus("p1", state, "app:v1", DIGEST, 900, 300 * self.asked, 100, 200 * self.asked, 0, 0.5)

    async def pull(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=PullRequest)
        if wanted.package != "app:v1":
            raise NotFound(
                f"{wanted.package} is not at file:///origin", remedy="Push it first", origin="file:///origin"
            )
        self.asked = 0
        return answer(self.status(), 202)

    async def pulled(self, request: web.Request) -> web.Response:
        self.asked += 1
        return answer(self.status())

    async def mount(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=MountRequest)
        layers = [SquashfsLayer(image) for image in self.images]
        assert request.transport is not None
        caller = Caller.of(request.transport.get_extra_info("socket"))
        return answer(await self.mounts.mount("app:v1", DIGEST, layers, self.config, wanted, self.hold, caller))

    async def unmount(self, request: web.Request) -> web.Response:
        query = request.query
        sees = (int(query["device"]), int(query["inode"])) if "device" in query else None
        return answer(await self.mounts.unmount(query["path"], query.get("force") == "1", caller_sees=sees))

    async def shown(self, request: web.Request) -> web.Response:
        return answer({"mounts": self.mounts.list()})

    async def packages(self, request: web.Request) -> web.Response:
        return answer({"packages": [{"reference": "app:v1", "digest": DIGEST, "size": 900, "complete": True}]})

    async def about(self, request: web.Request) -> web.Response:
        tracker = {"url": "http://tracker:1", "connected": True}
        store = {"used_bytes": 900, "capacity_bytes": 9000}
        return answer(
            {"host": "h1", "address": "h1:7000", "tracker": tracker, "store": store, "pulls": [self.status()]}
        )

    def app(self) -> web.Application:
        app = web.Application(middlewares=[problems])
        app.add_routes(
            [
                web.post("/v1/pulls", self.pull),
                web.get("/v1/pulls/p1", self.pulled),
                web.post("/v1/mounts", self.mount),
                web.get("/v1/mounts", self.shown),
                web.delete("/v1/mounts", self.unmount),
                web.get("/v1/packages", self.packages),
                web.get("/v1/status", self.about),
            ]
        )
        return app


async def serve(socket: Path, agent: MountAgent) -> None:
    """Until SIGTERM; then a clean stop."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    runner = web.AppRunner(agent.app())
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    agent.mounts.start()
    print("ready", flush=True)
    await stop.wait()
    await runner.cleanup()
    await agent.mounts.close()
    assert agent.held == 0, "a claim on blobs was not given up"


if __name__ == "__main__":
    asyncio.run(
        serve(Path(sys.argv[1]), MountAgent(Path(sys.argv[2]), [Path(name) for name in sys.argv[4:]], sys.argv[3]))
    )
