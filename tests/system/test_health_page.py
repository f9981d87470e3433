"""The page of swarm health in a real browser, over a real tracker and agents: while a blob spreads,
at the end, and with a dead host."""

from __future__ import annotations

import pytest
from browser import CHROMIUM, Page, browser
from site_rig import Agent, Background, Site

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian package chromium)")

MIB = 1 << 20
BUSY = "document.querySelector('#swarms tbody .state-running') !== null"
DRESSED = {
    "light": "getComputedStyle(document.body).backgroundColor === 'rgb(247, 247, 245)'",
    "dark": "getComputedStyle(document.body).backgroundColor === 'rgb(20, 22, 26)'",
}
NODES = "[...swarmHealth.nodes.values()]"
HOSTS = "[...swarmHealth.hosts.values()]"


def text(selector: str) -> str:
    return f"document.querySelector({selector!r}).innerText"


def painted(selector: str) -> str:
    """How many pixels of a canvas are not empty."""
    return (
        f"(() => {{ const c = document.querySelector({selector!r});"
        " const p = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " let n = 0; for (let i = 3; i < p.length; i += 4) n += p[i] > 0; return n; })()"
    )


async def photograph(page: Page, name: str) -> None:
    """The page as it is in light and in dark, both drawn to the end."""
    for scheme, suffix in (("dark", "-dark"), ("light", "")):
        await page.dress(scheme)
        await page.until(DRESSED[scheme])
        await page.screenshot(name + suffix)


async def sound(page: Page, site: Site) -> None:
    """The page complained of nothing and asked nobody but the tracker."""
    assert page.complaints == []
    assert page.requested and all(url.startswith((site.tracker_url, "data:")) for url in page.requested)


@pytest.mark.slow
async def test_a_broadcast_is_seen_from_its_beginning_to_a_dead_host(site: Site) -> None:
    digest = site.publish(24 * MIB)
    site.origin.rate_bytes_s = 4 * MIB
    agents = [
        Agent(site, f"h{number}", zone=f"z{number // 4}", rack=f"r{number // 2}", upload_limit="4MB/s").start()
        for number in range(8)
    ]
    pulls: list[Background] = [agent.start_pull(blob=digest) for agent in agents]
    async with browser(site.tracker_url + "/") as page:
        await page.until(BUSY)
        await page.until(f"{HOSTS}.length === 8 && {NODES}.filter((node) => node.parent !== -2).length >= 7")
        await page.until(f"{NODES}.some((node) => node.done > 0 && node.done < 1000)")
        await page.until(f"/MiB\\/s/.test({text('#swarms tbody')})")
        assert await page.evaluate(f"{NODES}.some((node) => node.parent === -1)"), "somebody has it from the origin"
        await page.until(painted("#hosts canvas") + f" > {8 * 200}")  # a picture follows its data
        await page.until(painted("#tree canvas") + " > 500")
        assert digest.removeprefix("sha256:")[:12] in await page.evaluate(text("#swarms tbody"))
        assert "joins with" in await page.evaluate(text("#story"))
        racks = await page.evaluate(f"{HOSTS}.map((host) => host.zone + host.rack).sort()")
        assert racks == [f"z{n // 4}r{n // 2}" for n in range(8)]
        await photograph(page, "health-running")

        await page.evaluate(
            "(() => { const s = document.querySelector('#tree select'); s.value = '1';"
            " s.dispatchEvent(new Event('change')); })()"
        )
        await page.until(f"performance.getEntriesByType('resource').length > 0 && {NODES}.length === 8")

        for pull in pulls:
            pull.result()
        await page.until("document.querySelector('#swarms tbody .state-seeded') !== null")
        await page.until(f"{NODES}.length === 8 && {NODES}.every((node) => node.done === 1000)")
        assert "8 of 8" in await page.evaluate(text("#swarms tbody"))
        assert "None" in await page.evaluate(text("#troubled"))
        await photograph(page, "health-end")

        agents[3].kill()
        await page.until(f"/h3/.test({text('#troubled')}) && /away/.test({text('#troubled')})")
        await page.until(f"/h3 is away/.test({text('#story')})")
        assert await page.evaluate(f"{HOSTS}.filter((host) => host.flags & 1).map((host) => host.name)") == ["h3"]
        await photograph(page, "health-failed-host")
        agents[3].start()
        await page.until(f"/None/.test({text('#troubled')})")
        await sound(page, site)


@pytest.mark.slow
async def test_a_tracker_that_went_away_is_told_and_comes_back(site: Site) -> None:
    async with browser(site.tracker_url + "/") as page:
        await page.until("document.querySelector('#connection').innerText === 'live'")
        site.kill_tracker()
        await page.until("document.querySelector('#connection').classList.contains('lost')")
        site.start_tracker()
        await page.until("document.querySelector('#connection').innerText === 'live'")
