"""The page of swarm health in a real browser, in states that no small fleet of processes comes
into, with screenshots for people to look at: trouble, many packages, a tree of 2,600 hosts, a page
that may do nothing; its keys, and its buttons, which ask once."""

from __future__ import annotations

from pathlib import Path

import pytest
from access_rig import access_site
from browser import CHROMIUM, PHONE_WIDTH, Page, browser
from fleet_rig import PIECES, fleet_of, join_all, spread_packages, stripes, tracker_of

from p2pdist.model.digest import digest_of
from tracker.core.events import HostDrained
from tracker.http import pages

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian package chromium)")]

BACKGROUNDS = {"light": "rgb(247, 247, 245)", "dark": "rgb(20, 22, 26)"}
LIVE = "document.querySelector('#connection').innerText === 'live'"


def text(selector: str) -> str:
    return f"document.querySelector({selector!r}).innerText"


def pixel(name: str, inside: int) -> str:
    """The colour of a host's square, so many pixels from its upper left corner."""
    return (
        f"(() => {{ const host = [...swarmHealth.hosts.values()].find((each) => each.name === {name!r});"
        " const pen = document.querySelector('#hosts canvas').getContext('2d');"
        f" return [...pen.getImageData(host.x + {inside}, host.y + {inside}, 1, 1).data]; }})()"
    )


async def photograph(page: Page, name: str, *, judged: bool = True) -> None:
    """The page in light, in dark and on a phone; axe finds nothing, unless there is so much on the
    page that it takes long."""
    for scheme, suffix in (("dark", "-dark"), ("light", "")):
        await page.dress(scheme)
        await page.until(f"getComputedStyle(document.body).backgroundColor === {BACKGROUNDS[scheme]!r}")
        if judged:
            assert await page.violations() == []
        await page.screenshot(f"health-{name}{suffix}")
    await page.screenshot(f"health-{name}-phone", PHONE_WIDTH)


async def press(page: Page, key: str, code: int) -> None:
    for kind in ("keyDown", "keyUp"):
        typed = {"text": key} if kind == "keyDown" and len(key) == 1 else {}
        await page.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **typed)


@pytest.mark.timeout(300)
async def test_many_packages_keys_and_buttons() -> None:
    hosts = fleet_of(120)
    join_all(hosts)
    spread_packages(hosts, 200)
    async with tracker_of(hosts) as (service, url), browser(url + "/") as page:
        await page.until("document.querySelectorAll('#packages tbody').length >= 100")
        await page.until("document.querySelector('#rate .plot canvas') !== null")
        await photograph(page, "many-packages", judged=False)

        await press(page, "j", 74)
        await page.until("location.hash === '#host=h0' && !document.querySelector('#host').hidden")
        await press(page, "j", 74)
        await page.until("location.hash === '#host=h1'")
        await press(page, "k", 75)
        await page.until("location.hash === '#host=h0'")
        # Keys that come before the page has followed the first of them.
        await page.evaluate(
            "'jjk'.split('').forEach((key) => document.body.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true })))"
        )
        await page.until("location.hash === '#host=h1'")
        await press(page, "k", 75)
        await page.until("location.hash === '#host=h0'")
        await page.until(f"/Drain/.test({text('#host .orders')}) && /team-/.test({text('#host .orders')})")
        await press(page, "/", 191)
        await page.until("document.activeElement === document.querySelector('#find input')")
        for key in "h77":
            await press(page, key, ord(key.upper()))
        await press(page, "\r", 13)
        await page.until("location.hash === '#host=h77'")
        await page.until("document.activeElement.matches('#find input')")
        await press(page, "Escape", 27)
        await press(page, "Escape", 27)
        await page.until("location.hash === '' && document.querySelector('#host').hidden")

        await page.evaluate("location.hash = '#host=h5'")
        await page.until("document.querySelector('#host .orders .act') !== null")
        await page.until("!document.querySelector('#host .orders .act').disabled")
        await page.evaluate("document.querySelector('#host .orders .act').click()")
        await page.until(f"/serve no other host\\?/.test({text('#host .asking')})")
        assert not service.fleet.hosts["h5"].drained, "nothing is done before the answer"
        await page.evaluate("document.querySelectorAll('#host .asking .act')[1].click()")
        await page.evaluate("document.querySelector('#host .orders .act').click()")
        await page.evaluate("document.querySelector('#host .asking .act').click()")
        await page.until(f"/serves no other host/.test({text('#host .says')})")
        assert service.fleet.hosts["h5"].drained
        await page.until(f"/Fill/.test({text('#host .orders')}) && /drained/.test({text('#troubled')})")
        await photograph(page, "host-orders", judged=False)
        assert page.complaints == []


@pytest.mark.timeout(300)
async def test_a_row_that_is_out_of_sight_says_what_was_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is filled in its turn; nothing but that keeps rows below the edge of the table from being
    old to people that hear the page, or search it."""
    monkeypatch.setattr(pages, "WATCHED_S", 0.5)
    hosts = fleet_of(40)
    join_all(hosts)
    spread_packages(hosts, 100)
    rows = "[...document.querySelectorAll('#packages tbody')]"
    row = f"{rows}.find((each) => each.textContent.includes('model-090:v0'))"
    async with tracker_of(hosts) as (_, url), browser(url + "/") as page:
        await page.until(f"{rows}.length > 90 && {row}.offsetTop > 800 && {row}.textContent.includes('62.5 %')")
        hosts.report(
            sorted(hosts.sessions)[(90 * 4 + 2) % 40], (PIECES // stripes(),) * stripes(), digest_of(b"blob 90")
        )
        hosts.pass_time(1.0)
        await page.until(f"{row}.textContent.includes('75.0 %') && {row}.textContent.includes('2 of 4')")
        assert await page.evaluate("document.querySelector('#packages .scroll').scrollTop") == 0
        assert page.complaints == []


INTERRUPTED = """(async () => {
    const { Sheet } = await import("/static/canvas.js");
    const canvas = document.createElement("canvas"), sheet = new Sheet(canvas), red = 0xff0000ff;
    sheet.begin(20, 20);
    sheet.show();
    sheet.square(4, 4, 6, red); // and interrupted, as drawing is by a report
    sheet.square(4, 4, 6, red);
    sheet.show();
    const seen = () => [...canvas.getContext("2d").getImageData(6, 6, 1, 1).data].join();
    const shown = [seen()];
    canvas.getContext("2d").clearRect(0, 0, 20, 20);
    sheet.square(4, 4, 6, red);
    sheet.show();
    return [...shown, seen()];
})()"""


async def test_what_an_interrupted_drawing_drew_is_shown_by_the_next() -> None:
    """The next one finds these squares as they are to be; nor is anything shown twice."""
    hosts = fleet_of(2)
    join_all(hosts)
    async with tracker_of(hosts) as (_, url), browser(url + "/") as page:
        await page.until(LIVE)
        assert await page.evaluate(INTERRUPTED) == ["255,0,0,255", "0,0,0,0"]


INTERRUPTED_AT_THE_END = """(async () => {
    const { changedHosts, hosts } = await import("/static/feed.js");
    const { drawHosts } = await import("/static/host_map.js"), { ROWS_PER_STEP } = await import("/static/canvas.js");
    const host = [...hosts.values()][0], canvas = document.querySelector("#hosts canvas"), pen = canvas.getContext("2d");
    const seen = () => [...pen.getImageData((host.x + 1) * devicePixelRatio, (host.y + 1) * devicePixelRatio, 1, 1).data].join();
    for (const _ of drawHosts()); // what is to be drawn already
    const before = seen();
    host.flags = 0;
    for (const each of hosts.values()) changedHosts.add(each);
    if (changedHosts.size !== ROWS_PER_STEP) return `${changedHosts.size} hosts`;
    drawHosts().next(); // it goes on after the last host, unless a report comes
    for (const _ of drawHosts());
    return before !== seen();
})()"""


async def test_squares_are_shown_though_a_report_came_when_the_last_of_them_was_drawn() -> None:
    hosts = fleet_of(1000)
    join_all(hosts)
    async with tracker_of(hosts) as (_, url), browser(url + "/") as page:
        await page.until(LIVE)
        assert await page.evaluate(INTERRUPTED_AT_THE_END) is True


@pytest.mark.timeout(300)
async def test_a_tracker_that_says_nothing_more_is_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs, or to which the network is cut, ends no connection."""
    hosts = fleet_of(3)
    async with tracker_of(hosts) as (_, url), browser(url + "/") as page:
        await page.until(LIVE)
        monkeypatch.setattr(pages, "WATCHED_S", 3600.0)
        await page.until(f"/no answer from the tracker/.test({text('#connection')})")
        assert await page.evaluate(f"/^Wrong: no answer/.test({text('#verdict')})")
        await page.until(LIVE)  # a new connection is reported to at once


@pytest.mark.timeout(300)
async def test_trouble_is_named() -> None:
    hosts = fleet_of(60, racks_of=10)
    join_all(hosts)
    spread_packages(hosts, 4)
    half = PIECES // stripes() // 2
    for name in list(hosts.sessions):
        hosts.report(name, (half,) * stripes())
    for by in ("h11", "h22", "h33"):
        hosts.fleet.reputation.penalise(hosts.fleet.hosts["h7"], by, "corrupt", now=hosts.now)
    hosts.fleet.handle(HostDrained("h5", True), now=hosts.now)
    for name in ("h13", "h44"):
        hosts.close(name)
    hosts.pass_time(1.0)
    async with tracker_of(hosts) as (_, url), browser(url + "/") as page:
        await page.until(f"/h7/.test({text('#troubled')}) && /h13/.test({text('#troubled')})")
        assert (await page.evaluate(text("#verdict"))).startswith("Wrong: ")
        await page.dress("light")
        await page.until(f"getComputedStyle(document.body).backgroundColor === {BACKGROUNDS['light']!r}")
        await page.until("swarmHealth.idle()")
        blamed, away = [163, 39, 143, 255], [198, 40, 40, 255]
        assert await page.evaluate(pixel("h7", 0)) == blamed and await page.evaluate(pixel("h13", 0)) == away
        assert await page.evaluate(pixel("h7", 8)) == await page.evaluate(pixel("h8", 0)), (
            "in its frame it is as others"
        )
        assert await page.evaluate(pixel("h13", 8)) == [0, 0, 0, 0]
        await photograph(page, "trouble")
        assert page.complaints == []


@pytest.mark.timeout(300)
async def test_a_tree_of_two_thousand_six_hundred_hosts_is_legible() -> None:
    hosts = fleet_of(2600, zones=3)
    join_all(hosts)
    async with tracker_of(hosts) as (_, url), browser(url + "/") as page:
        await page.until("swarmHealth.nodes.size === 2600 && swarmHealth.idle()")
        places = await page.evaluate("new Set([...swarmHealth.nodes.values()].map((n) => `${n.x} ${n.y}`)).size")
        assert places == 2600, "no host hides another"
        await photograph(page, "tree-2600")


@pytest.mark.timeout(300)
async def test_a_page_without_the_right_says_so_and_offers_nothing(tmp_path: Path) -> None:
    async with access_site(tmp_path) as site, browser(site.url + "/", "--ignore-certificate-errors") as page:
        await page.until("!document.querySelector('#credential').hidden")
        await photograph(page, "token")
        await page.evaluate(
            f"(() => {{ const form = document.querySelector('#credential'); "
            f"form.querySelector('input').value = {site.token('ops')!r}; form.requestSubmit(); }})()"
        )
        await page.until(LIVE)
        await page.until("!document.querySelector('#order button').disabled")  # ops may preseed
        assert await page.evaluate("document.querySelectorAll('button[data-right=hosts]:enabled').length") == 0
