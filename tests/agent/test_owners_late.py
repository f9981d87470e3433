"""Images of several trackers while the owner of a blob is away or hangs, and the home answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from image_rig import Made, Odd, make_image
from image_site import ImageSite, image_site, pulled, serve
from waits import until

from p2pdist.agent.api.mirror import make_mirror_app
from p2pdist.agent.pull import registry as registry_module
from p2pdist.agent.tracker import trackers as trackers_module
from p2pdist.model.digest import Digest
from p2pdist.model.ownership import Ownership, Tracker
from p2pdist.model.upstream import parse_upstream
from tracker.core.events import Followed

WAIT_S = 30.0


@pytest.fixture
async def site(odd: Odd, tmp_path: Path) -> AsyncIterator[ImageSite]:
    """Its tracker is the home."""
    async with image_site(tmp_path, parse_upstream(odd.address)) as running:
        yield running


def follow(site: ImageSite, epoch: int, *others: Tracker, pinned: tuple[Digest, ...] = ()) -> None:
    """The home is `a`, and the first of the others owns what is pinned."""
    assert site.service is not None
    home = Tracker("a", (f"http://127.0.0.1:{site.port}",))
    ownership = Ownership(epoch, (home, *others), dict.fromkeys(pinned, others[0].id if others else ""))
    site.service.submit(Followed(ownership, "a"))


def published(odd: Odd) -> Made:
    image = make_image({"data": bytes(range(256)) * 2000})
    odd.put("team/app", "v1", image)
    return image


async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@pytest.mark.slow
async def test_an_owner_that_is_away_gets_a_successor_before_hosts_read_upstream_by_themselves(
    odd: Odd, site: ImageSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No client waits: else each host would read the blob from its registry, as the trackers
    need some seconds to find that one of them is dead."""
    monkeypatch.setattr(trackers_module, "LATE_S", 0.05)
    image = published(odd)
    blob = next(iter(image.blobs))
    follow(site, 1, Tracker("b", ("http://127.0.0.1:9",)), pinned=(blob,))
    agent = await site.agent("h1")
    await until(lambda: not agent.trackers.answers(blob))
    pull = asyncio.create_task(pulled(agent, f"docker://{odd.address}/team/app:v1"))
    await until(lambda: agent.registry.fetching(blob) is not None)
    await asyncio.sleep(2 * registry_module.PLAN_WAIT_S)
    assert odd.count("GET", f"/blobs/{blob}") == 0
    follow(site, 2)
    await pull
    assert odd.count("GET", f"/blobs/{blob}") == 1


async def test_a_client_does_not_wait_for_an_owner_that_hangs(odd: Odd, site: ImageSite) -> None:
    """Although the home of its host answers."""
    image = published(odd)
    server = await asyncio.start_server(hangs, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    follow(site, 1, Tracker("b", (f"http://127.0.0.1:{port}",)), pinned=tuple(image.blobs))
    async with AsyncExitStack() as stack:
        stack.callback(server.close)
        agent = await site.agent("h1")
        mirror = await serve(stack, make_mirror_app(agent))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{mirror}"))
        async with asyncio.timeout(WAIT_S):
            for target in ("v1", image.digest):
                async with http.get(f"/v2/team/app/manifests/{target}?ns={odd.address}") as answer:
                    assert answer.status == 200
            for digest, data in image.blobs.items():
                async with http.get(f"/v2/team/app/blobs/{digest}?ns={odd.address}") as answer:
                    assert (answer.status, await answer.read()) == (200, data)
