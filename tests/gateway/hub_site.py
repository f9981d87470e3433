"""A hub, a tracker that reads it, and agents with doors, in this process and over real sockets."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from hub_rig import Hub, running_hub
from image_site import ImageSite, image_site, serve

from p2pdist.agent.agent import Agent
from p2pdist.agent.api.mirror import make_mirror_app

LARGE = 3 << 20


def make_files(large: int = LARGE) -> dict[str, bytes]:
    """A model: two weights, and small files, some of them in a directory."""
    return {
        "config.json": b'{"model_type": "tiny"}\n',
        "README.md": b"# A model\n",
        "nested/deep/vocab.txt": b"a\nb\n",
        "empty.txt": b"",
        "model-1.safetensors": os.urandom(large),
        "nested/model-2.safetensors": os.urandom(large // 2 + 17),
    }


class Answered:
    """An answer, with its whole body."""

    def __init__(self, response: aiohttp.ClientResponse, body: bytes) -> None:
        self.status, self.headers, self.body = response.status, response.headers, body
        self.next = str(response.links["next"]["url"]) if "next" in response.links else ""

    @property
    def code(self) -> str:
        return self.headers.get("X-Error-Code", "")


class HubSite:
    """The hub, and the doors of agents by name."""

    def __init__(self, hub: Hub, site: ImageSite, stack: AsyncExitStack, http: aiohttp.ClientSession) -> None:
        self.hub, self.site, self._stack, self._http = hub, site, stack, http
        self.doors: dict[str, str] = {}

    async def start(self, name: str = "h1") -> Agent:
        """Start an agent with a door."""
        agent = await self.site.agent(name)
        port = await serve(self._stack, make_mirror_app(agent))
        self.doors[name] = f"http://127.0.0.1:{port}/hf"
        return agent

    async def ask(
        self, path: str, method: str = "GET", *, at: str = "h1", headers: Mapping[str, str] | None = None, **more: Any
    ) -> Answered:
        """Ask a door. Raises where the body ends early."""
        url = path if path.startswith("http") else self.doors[at] + path
        async with self._http.request(
            method, url, headers={"Accept-Encoding": "identity", **(headers or {})}, allow_redirects=False, **more
        ) as answer:
            return Answered(answer, await answer.read())

    @property
    def sent(self) -> int:
        """Bytes of files of LFS that the hub's storage has sent."""
        return sum(length for name, length in self.hub.sent.items() if len(name) == 64)


@asynccontextmanager
async def hub_site(directory: Path, *agents: str) -> AsyncIterator[HubSite]:
    """A site with agents of these names."""
    with running_hub() as hub:
        async with (
            image_site(directory, hub=hub.base) as site,
            AsyncExitStack() as stack,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as http,
        ):
            found = HubSite(hub, site, stack, http)
            for name in agents:
                await found.start(name)
            yield found
