"""The page of swarm health in a real browser, over a real tracker and agents: empty, while a
package spreads, at the end, with a dead host, a preseed that lacks it, and without its tracker."""

from __future__ import annotations

import os

import pytest
from browser import CHROMIUM, PHONE_WIDTH, Page, browser
from site_rig import Agent, Background, Site

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian package chromium)")

MIB = 1 << 20
PACKAGE = "team/app:v1"
BUSY = "document.querySelector('#packages tbody .state-running') !== null"
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
    """The page in light, in dark and on a phone, each drawn to the end. The page complains
    of what axe finds."""
    for scheme, suffix in (("dark", "-dark"), ("light", "")):
        await page.dress(scheme)
        await page.until(DRESSED[scheme])
        page.complaints += [f"{name}{suffix}: {violation}" for violation in await page.violations()]
        await page.screenshot(f"health-{name}{suffix}")
    await page.screenshot(f"health-{name}-phone", PHONE_WIDTH)


async def sound(page: Page, site: Site) -> None:
    """The page complained of nothing and asked nobody but the tracker."""
    assert page.complaints == []
    assert page.requested and all(url.startswith((site.tracker_url, "data:")) for url in page.requested)


def publish(site: Site, tag: str, size: int) -> None:
    """Push a package of two layers."""
    source = site.directory / tag.replace(":", "-").replace("/", "-")
    source.mkdir()
    for name in ("weights", "vocabulary"):
        (source / name).write_bytes(os.urandom(size // 2))
    layout = ("--layout", str(site.directory / "layout"))
    code, _, errors = site.command("pack", str(source), "-t", tag, "--format", "tree", *layout)
    assert code == 0, errors
    code, _, errors = site.command("push", tag, "--origin", f"file://{site.layout}", *layout)
    assert code == 0, errors


@pytest.mark.long
async def test_a_broadcast_is_seen_from_its_beginning_to_a_dead_host(site: Site) -> None:
    publish(site, PACKAGE, 24 * MIB)
    site.origin.rate_bytes_s = 4 * MIB
    async with browser(site.tracker_url + "/") as page:
        await page.until(f"/Nothing is wrong/.test({text('#verdict')})")
        await photograph(page, "empty")
        agents = [
            Agent(site, f"h{number}", zone=f"z{number // 4}", rack=f"r{number // 2}", upload_limit="4MB/s").start()
            for number in range(8)
        ]
        await page.until(f"{HOSTS}.length === 8")
        pulls: list[Background] = [agent.start_pull(package=PACKAGE) for agent in agents]
        await page.until(BUSY)
        await page.until(f"/team.app:v1/.test({text('#packages tbody')})")
        await page.until(f"{NODES}.filter((node) => node.parent !== -2).length >= 7")
        await page.until(f"{NODES}.some((node) => node.done > 0)")
        await page.until(f"/MiB\\/s/.test({text('#packages tbody')})")
        await page.until(f"/copies/.test({text('#packages tbody')})")
        assert await page.evaluate(f"{NODES}.some((node) => node.parent === -1)"), "a host has it from the origin"
        await page.until(painted("#hosts canvas") + f" > {8 * 200}")  # a picture follows its data
        await page.until(painted("#tree canvas") + " > 500")
        assert "joins with" in await page.evaluate(text("#story"))
        racks = await page.evaluate(f"{HOSTS}.map((host) => host.zone + host.rack).sort()")
        assert racks == [f"z{n // 4}r{n // 2}" for n in range(8)]
        await photograph(page, "running")

        await page.evaluate("document.querySelector('.fold').click()")
        await page.until("/^#package=[0-9a-f]{12}$/.test(location.hash)")
        await page.until(
            f"document.querySelectorAll('#packages .blob').length >= 1 && {text('#packages .waiting')} !== ''"
        )
        await photograph(page, "unfolded")

        for pull in pulls:
            pull.result()
        await page.until("document.querySelector('#packages tbody .state-seeded') !== null")
        assert "8 of 8" in await page.evaluate(text("#packages tbody"))
        assert "None" in await page.evaluate(text("#troubled"))
        await page.until(f"/team.app:v1/.test({text('#day tbody')})")
        await page.until(f"/Nothing is wrong/.test({text('#verdict')})")
        await photograph(page, "end")

        await a_preseed_and_a_dead_host(page, site, agents)
        await sound(page, site)


async def a_preseed_and_a_dead_host(page: Page, site: Site, agents: list[Agent]) -> None:
    """A preseed waits for a host that was killed; both are named, and the preseed is cancelled."""
    agents[3].kill()
    await page.until(f"/h3/.test({text('#troubled')}) && /away/.test({text('#troubled')})")
    await page.until(f"/h3 is away/.test({text('#story')}) && /h3 is away/.test({text('#verdict')})")
    assert await page.evaluate(f"{HOSTS}.filter((host) => host.flags & 1).map((host) => host.name)") == ["h3"]
    await photograph(page, "failed-host")

    await page.evaluate("document.querySelector('#verdict a').click()")
    await page.until(f"location.hash === '#host=h3' && /away for/.test({text('#host')})")
    await page.until(f"/lost h3/.test({text('#host ol')})")
    await photograph(page, "host")

    order = ("preseed", PACKAGE, "--host", "h1", "--host", "h3", "--id", "night", "--tracker", site.tracker_url)
    assert site.command(*order)[0] == 0
    await page.until(f"/night/.test({text('#preseeds .live')}) && /not connected: h3/.test({text('#preseeds .live')})")
    await photograph(page, "preseed")
    await page.evaluate("document.querySelector('#preseeds .live .act').click()")
    await page.evaluate("document.querySelector('#preseeds .asking .act').click()")
    await page.until(f"/1 ended/.test({text('#preseeds summary')}) && {text('#preseeds .live')} === ''")
    agents[3].start()
    await page.until(f"/None/.test({text('#troubled')})")
    await page.until(f"/is back/.test({text('#host ol')})")


@pytest.mark.slow
async def test_a_tracker_that_went_away_is_told_and_comes_back(site: Site) -> None:
    async with browser(site.tracker_url + "/") as page:
        await page.until("document.querySelector('#connection').innerText === 'live'")
        site.kill_tracker()
        await page.until("document.querySelector('#connection').classList.contains('lost')")
        assert (await page.evaluate(text("#verdict"))).startswith("Wrong: ")
        await photograph(page, "lost")
        site.start_tracker()
        await page.until("document.querySelector('#connection').innerText === 'live'")
