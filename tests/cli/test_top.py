"""`p2pdist top` as a process against a tracker whose hosts are spoken for: once, as JSON, live in a
terminal, and without a tracker."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import shlex
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import programs
import pytest
from aiohttp import web
from fleet_rig import BLOB, PIECES, Hosts, fleet_of, join_all, tracker_of
from programs import PROGRAM

from p2pdist.cli.fleet_watch import FleetState, follow
from p2pdist.cli.verbs import events, top
from p2pdist.cli.verbs.top import _story, picture
from p2pdist.client import pulse
from p2pdist.model.errors import Unavailable, UsageError
from p2pdist.transfer.server_events import EVENT_BYTES_MAX
from tracker.core.views.fleet_view import GONE_S, View

CELL = "■"


@pytest.fixture
def hosts() -> Hosts:
    """Six hosts in three racks, half through; one is slow, one has gone."""
    made = fleet_of(6, racks_of=2)
    made.open("[bold]odd", zone="z1", rack="r9")
    join_all(made)
    for name in made.sessions:
        made.report(name, (PIECES // 4, PIECES // 4))
    made.fleet.capacities.mark_slow("h1", 0.1, downlink=False, now=made.now)
    return made


async def run(*words: str) -> tuple[int, str, str]:
    done = await asyncio.to_thread(programs.run, "top", *words)
    return done.returncode, done.stdout, done.stderr


async def test_once_as_json_says_all_that_scripts_want(hosts: Hosts) -> None:
    async with tracker_of(hosts) as (_, url):
        code, out, errors = await run("--tracker", url, "--once", "--json", "--swarm", BLOB)
    assert (code, errors) == (0, "")
    found = json.loads(out)
    (swarm,) = found["swarms"]
    assert swarm["digest"] == BLOB and swarm["hosts"] == 7 and swarm["bytes_held"] * 2 == swarm["bytes_wanted"]
    assert swarm["state"] == "running" and "eta_s" in swarm and "rate_bytes_s" in swarm
    by_name = {host["host"]: host for host in found["hosts"]}
    assert by_name["h1"]["slow"] and not by_name["h0"]["slow"] and by_name["h5"]["rack"] == "r2"
    assert {host["done"] for host in found["hosts"]} == {0.5}
    assert found["troubled"] == [{"host": "h1", "why": "slow uplink"}]
    assert found["totals"]["slow"] == 1 and found["totals"]["receiving"] == 7
    assert {row["host"] for row in found["tree"]} == set(by_name)
    assert any(line["event"] == "h3 joins with 0 pieces" for line in found["story"])


async def test_once_for_people_shows_the_same(hosts: Hosts) -> None:
    async with tracker_of(hosts) as (_, url):
        code, out, errors = await run("--tracker", url, "--once", "--swarm", BLOB, "--stripe", "1")
    assert (code, errors) == (0, "")
    assert BLOB.removeprefix("sha256:")[:12] in out and "50.0 %" in out and "0 of 7" in out
    assert re.search(r"z0\s+r0\s+2\s+50 %\s+" + CELL * 2, out)
    assert re.search(r"h1 +slow uplink", out) and "origin\n" in out
    assert "[bold]odd" in out, "names are text, whatever is in them"


async def test_a_picture_that_cannot_be_written_is_a_failure(hosts: Hosts) -> None:
    """On a full disk, in the words of every other verb."""
    async with tracker_of(hosts) as (_, url):
        words = f"{shlex.join(PROGRAM)} top --once --tracker {url} > /dev/full"
        process = await asyncio.create_subprocess_exec("sh", "-c", words, stderr=asyncio.subprocess.PIPE)
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors == b"p2pdist: standard output cannot be written: No space left on device\n"


async def test_json_without_once_is_a_line_a_second(hosts: Hosts) -> None:
    async with tracker_of(hosts) as (_, url):
        process = await asyncio.create_subprocess_exec(
            *PROGRAM, "top", "--tracker", url, "--json", stdout=asyncio.subprocess.PIPE, limit=1 << 24
        )
        assert process.stdout is not None
        try:
            first = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
            hosts.close("h2")
            while not (found := json.loads(await asyncio.wait_for(process.stdout.readline(), 60)))["totals"]["away"]:
                pass
        finally:
            process.send_signal(signal.SIGINT)
            code = await process.wait()
    assert first["totals"]["away"] == 0 and code == 0
    assert [host["host"] for host in found["hosts"] if host["away"]] == ["h2"]


async def test_live_in_a_terminal_it_follows_and_leaves_the_screen_as_it_was(hosts: Hosts) -> None:
    async with tracker_of(hosts) as (_, url):
        terminal, inner = pty.openpty()
        os.set_blocking(terminal, False)
        screen = {"TERM": "xterm-256color", "COLUMNS": "150", "LINES": "60"}
        process = await asyncio.create_subprocess_exec(
            *PROGRAM, "top", "--tracker", url, stdin=inner, stdout=inner, stderr=inner, env={**os.environ, **screen}
        )
        os.close(inner)
        seen = b""
        try:
            async with asyncio.timeout(60):
                told = False
                while b"h4 is away" not in seen:
                    await asyncio.sleep(0.05)
                    try:
                        seen += os.read(terminal, 1 << 20)
                    except BlockingIOError:
                        continue
                    if b"6 hosts" in seen or b"7 hosts" in seen:
                        if not told:
                            hosts.close("h4")
                        told = True
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), 60) == 0
            seen += os.read(terminal, 1 << 20)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            os.close(terminal)
    assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1, "the other screen was taken and given back"


@pytest.mark.parametrize("terminal", ["pipe", "dumb"])
async def test_where_no_picture_can_change_it_says_so(hosts: Hosts, terminal: str) -> None:
    """It printed nothing, for ever."""
    ours, theirs = pty.openpty()
    async with tracker_of(hosts) as (_, url):
        process = await asyncio.create_subprocess_exec(
            *(*PROGRAM, "top", "--tracker", url),
            stdout=theirs if terminal == "dumb" else asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(theirs)
        try:
            async with asyncio.timeout(30):
                _, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            os.close(ours)
    assert (process.returncode, b"Give --once for one picture" in errors) == (2, True), errors


@pytest.mark.slow
async def test_without_a_tracker_it_ends_with_5_and_the_second_one_is_asked(hosts: Hosts) -> None:
    code, out, errors = await run("--tracker", "http://127.0.0.1:9", "--once")
    assert code == 5 and not out and "does not answer" in errors
    async with tracker_of(hosts) as (_, url):
        code, out, _ = await run("--tracker", f"http://127.0.0.1:9,{url}", "--once", "--json")
    assert code == 0 and json.loads(out)["totals"]["hosts"] == 7
    assert (await run("--tracker", "nonsense", "--once"))[0] == 2


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("watched", ["top", "once", "events"])
async def test_of_several_trackers_one_that_hangs_is_left(
    watched: str, begun: bool, hosts: Hosts, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its connections stay open, those that it has begun to answer as well as others. One that is
    late and lives is waited for."""
    monkeypatch.setattr(pulse, "LATE_S", 0.1)
    monkeypatch.setattr(pulse, "LIVES_S_MAX", 0.5)
    never, lived = asyncio.Event(), asyncio.Event()

    async def late(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        if begun:
            await answer.prepare(request)
            await answer.write(b": begun\n\n")
        await never.wait()
        return answer

    async def health(_: web.Request) -> web.Response:
        """It lives when it is asked first, and hangs from then on."""
        if lived.is_set():
            await never.wait()
        lived.set()
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/healthz", health)
    app.router.add_get("/v1/{rest:.*}", late)
    runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    hanging = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with tracker_of(hosts) as (_, url), asyncio.timeout(60):
            if watched == "once":
                await top._once([hanging, url], "", 0, as_json=True)
                assert json.loads(capfd.readouterr().out)["totals"]["hosts"] == 7
                return
            task = asyncio.create_task(
                top._watch([hanging, url], "", 0, as_json=True)
                if watched == "top"
                else events._follow(f"{hanging},{url}", {}, 0.0, 100, as_json=True)
            )
            said = ""
            while f"{hanging} hangs" not in said or (watched == "top" and '"totals"' not in said):
                assert not task.done()
                await asyncio.sleep(0.05)
                said += "".join(capfd.readouterr())
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    finally:
        await runner.cleanup()
    assert lived.is_set()


async def test_what_is_no_tracker_is_told_so(hosts: Hosts) -> None:
    async def anything(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nevent: change\ndata: {}\n\n")
        writer.close()

    server = await asyncio.start_server(anything, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, aiohttp.ClientSession() as http:
        with pytest.raises(Unavailable, match="does not speak as a tracker"):
            await anext(follow(http, url))


async def test_an_event_without_end_is_given_up() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nevent: change\ndata: ")
        block = b"x" * (1 << 20)
        try:
            for _ in range(2 * EVENT_BYTES_MAX // len(block)):
                writer.write(block)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    server = await asyncio.start_server(endless, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, aiohttp.ClientSession() as http:
        with pytest.raises(UsageError, match="more than"):
            await anext(follow(http, url))


async def test_what_is_kept_is_what_the_tracker_sees(hosts: Hosts) -> None:
    async with tracker_of(hosts) as (_, url), aiohttp.ClientSession() as http:
        states: AsyncIterator[FleetState] = follow(http, url, BLOB, 0)
        state = await anext(states)
        hosts.report("h0", (PIECES // 2, PIECES // 2))
        hosts.close("h5")
        state = await anext(states)
        fresh = FleetState()
        view = View(hosts.fleet)
        view.update(now=hosts.now)
        fresh.take(view.since(0, now=hosts.now))
        assert sorted((h.name, h.done, h.flags) for h in state.hosts.values()) == sorted(
            (h.name, h.done, h.flags) for h in fresh.hosts.values()
        )


def test_the_time_of_what_happened_stays_while_it_is_shown(hosts: Hosts) -> None:
    """A tracker says how long ago something was; a second later that is no longer so, and the time
    shown is the same."""
    view, state = View(hosts.fleet), FleetState()
    view.update(now=hosts.now)
    state.take(view.since(0, now=hosts.now + 3600.0))
    happened, shown = [line.at for line in state.story], list(_story(state))
    assert happened and all(abs(time.time() - 3600.0 - at) < 120.0 for at in happened)
    time.sleep(1.1)
    hosts.pass_time(1.0)
    version = view.version
    view.update(now=hosts.now)
    state.take(view.since(version, now=hosts.now))
    assert [line.at for line in state.story] == happened and list(_story(state)) == shown
    ages = [line["age_s"] for line in state.document()["story"]]
    assert all(3601.0 < age < 3720.0 for age in ages), "scripts are told how long ago it is by now"


def test_hosts_that_are_forgotten_go(hosts: Hosts) -> None:
    view, state = View(hosts.fleet), FleetState()
    tree = view.tree(0)

    def look() -> None:
        known = view.version
        view.update(now=hosts.now)
        tree.update(hosts.fleet.swarms.get(BLOB), view.version)
        state.take(view.since(known, now=hosts.now, tree=tree))

    look()
    assert len(state.hosts) == len(state.tree) == 7
    hosts.close("h5")
    look()
    hosts.pass_time(GONE_S + 5)
    look()
    assert "h5" not in {host.name for host in state.hosts.values()} and len(state.hosts) == len(state.tree) == 6


def test_a_large_fleet_fits_a_screen(tmp_path: Path) -> None:
    from rich.console import Console

    hosts = fleet_of(3000)
    join_all(hosts)
    view, state = View(hosts.fleet), FleetState()
    tree = view.tree(0)
    for number in range(0, 3000, 7):
        hosts.fleet.capacities.mark_slow(f"h{number}", 0.1, downlink=False, now=hosts.now)
    view.update(now=hosts.now)
    tree.update(hosts.fleet.swarms[BLOB], view.version)
    state.take(view.since(0, now=hosts.now, tree=tree))
    with (tmp_path / "out").open("w") as file:
        Console(file=file, width=120).print(picture(state))
    lines = (tmp_path / "out").read_text().splitlines()
    assert len(lines) < 90 and all(len(line) <= 120 for line in lines)
    assert sum("more" in line for line in lines) >= 3


async def test_status_asks_a_tracker_where_no_agent_is(hosts: Hosts, tmp_path: Path) -> None:
    """Hosts that are lost are named, in the API as well; a variable that names the tracker does not
    change what the verb is about."""
    hosts.close("h5")
    hosts.pass_time(10.0)

    async def status(*words: str, **more: str) -> tuple[int, str, str]:
        socket = ("--socket", tmp_path / "none")
        done = await asyncio.to_thread(programs.run, "status", *socket, *words, env={**os.environ, **more})
        return done.returncode, done.stdout, done.stderr

    async with tracker_of(hosts) as (_, url), aiohttp.ClientSession() as http:
        code, out, errors = await status("--tracker", f"http://127.0.0.1:9,{url}")
        assert (code, errors) == (0, "") and out.startswith(f"tracker  {url}  version ")
        assert "hosts    6 connected, 1 absent in zones z0, z1\n" in out and re.search(
            r"^absent   h5 for \d+ s$", out, re.M
        )
        assert f"swarm    {BLOB}  512.0 MiB  0 of 6 hosts done, 50.0 %" in out
        code, out, _ = await status("--tracker", url, "--json")
        found = {each["host"]: each for each in json.loads(out)["hosts"]}
        assert code == 0 and not found["h5"]["present"] and found["h5"]["absent_s"] >= 0 and found["h0"]["present"]
        async with http.get(f"{url}/v1/hosts/h5") as answer:
            assert answer.status == 200 and (await answer.json())["zone"] == found["h5"]["zone"]
        async with http.get(f"{url}/v1/hosts/hh1") as answer:
            assert answer.status == 404 and (await answer.json())["remedy"] == "Did you mean h1?"
        code, out, errors = await status(P2PDIST_TRACKER=url)
    assert (code, out) == (5, "") and "no agent answers" in errors and f"p2pdist status --tracker {url}" in errors
    assert (await status("--tracker", "http://127.0.0.1:9"))[0] == 5
