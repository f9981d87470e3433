"""p2pdist preseed and rank as commands: what they refuse, and what counts as reached. What they do
is tested with a real tracker in tests/system/test_preseed_orders.py and test_rankings.py."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Sequence

import msgspec
import programs
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from p2pdist.cli.verbs.preseed import _package, _waits_for
from p2pdist.client.tracker import is_reached
from p2pdist.model.errors import UsageError
from p2pdist.model.preseed import Failure, PreseedSummary, Progress
from p2pdist.model.units import parse_duration


def progress(
    done: int,
    total: int,
    *,
    settled: bool = True,
    failures: Sequence[Failure] = (),
    waiting: Sequence[str] = (),
    package: str = "a/b@sha256:" + "1" * 64,
    asked: str = "",
) -> Progress:
    return Progress(
        "p1", "running", settled, package, "preseed", total, done, 0, 0, 0, None, list(failures), {}, {}, (), 0.0, None, None,
        waiting=tuple(waiting), asked=asked,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("1d", 86400), ("0.5h", 1800), (" 2m ", 120)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "10 m", "-1m", "0s", "1w", "1m!", "nan"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)


@pytest.mark.parametrize(
    ("done", "total", "share", "settled", "reached"),
    [
        (999, 1000, 0.999, True, True),
        (998, 1000, 0.999, True, False),
        (9, 10, 0.85, True, True),
        (8, 10, 0.85, True, False),
        (0, 0, 1.0, True, False),
        (10, 10, 1.0, False, False),
        (0, 5, 0.0, True, True),
    ],
)
def test_when_a_quorum_is_reached(done: int, total: int, share: float, settled: bool, reached: bool) -> None:
    assert is_reached(progress(done, total, settled=settled), share) is reached


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("preseed",), 2),
        (("preseed", "a:v1", "--cancel", "p1"), 2),
        (("preseed", "a:v1", "--count", "1", "--quorum", "150%"), 2),
        (("preseed", "a:v1", "--count", "1", "--deadline", "soon"), 2),
        (("preseed", "UPPER", "--count", "1"), 2),
        (("preseed", "--list", "--tracker", "nowhere"), 2),
        (("preseed", "--list", "--tracker", "http://127.0.0.1:1"), 5),
        (("evict", "a:v1", "--everywhere", "--seconds", "nan", "--tracker", "http://127.0.0.1:1"), 2),
        (("token", "create", "--role", "operator", "--name", "", "--access", "none.toml"), 2),
        (("rank",), 2),
        (("rank", "a:v1", "--coherent", "zone"), 2),
        (("rank", "a:v1", "--role", "load", "1", "a:v1"), 2),
        (("rank", "--role", "load", "0", "a:v1"), 2),
        (("rank", "--role", "load", "1", "UPPER"), 2),
        (("rank", "a:v1", "--tracker", "http://127.0.0.1:1,http://127.0.0.1:2"), 5),
    ],
)
def test_exit_codes(words: tuple[str, ...], code: int) -> None:
    done = programs.run(*words)
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("preseed", "a:v1", "--count", "1", "--selector", ""),
        ("preseed", "a:v1", "--host", "h1", "--host", ""),
        ("preseed", "a:v1", "--count", "1", "--ttl", ""),
        ("preseed", "a:v1", "--count", "1", "--deadline", ""),
        ("preseed", "a:v1", "--count", "1", "--id", ""),
        ("preseed", "a:v1", "--count", "1", "--callback", ""),
        ("preseed", "--cancel", ""),
        ("preseed", "--cancel", ".."),
        ("rank", "a:v1", "--selector", ""),
        ("evict", "a:v1", "--host", ""),
        ("events", "--host", ""),
        ("events", "--kind", ""),
        ("events", "--package", ""),
        ("events", "--since", ""),
        ("report", ""),
        ("hosts", "drain", ""),
        ("hosts", "show", "."),
        ("trackers", "fill", ".."),
    ],
)
def test_what_a_script_left_empty_is_neither_everything_nor_another_route(words: tuple[str, ...]) -> None:
    done = programs.run(*words, "--tracker", "http://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "does not answer" not in done.stderr and done.stderr.count("\n") == 1


async def test_who_stops_waiting_is_told_that_the_preseed_goes_on() -> None:
    asked = asyncio.Event()

    async def ordered(request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(progress(0, 5)), status=201)

    async def wait(request: web.Request) -> web.Response:
        asked.set()
        await asyncio.sleep(60)
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/preseeds", ordered)
    app.router.add_get("/v1/preseeds/p1", wait)
    words = ("preseed", "a/b:v1", "--count", "5", "--wait", "--tracker")
    async with TestServer(app) as server:
        with programs.running(*words, server.make_url("/"), stderr=subprocess.PIPE, text=True) as program:
            await asked.wait()
            program.send_signal(signal.SIGINT)
            _, errors = await asyncio.to_thread(program.communicate, 60)
    assert "preseed p1 goes on without this command; --cancel p1 ends it" in errors
    assert errors.endswith("p2pdist: interrupted\n") and program.returncode == 130


def test_a_model_of_a_hub_is_not_evicted_as_a_package() -> None:
    done = programs.run("evict", "hf://org/model", "--everywhere", "--tracker", "http://127.0.0.1:1")
    assert done.returncode == 2
    assert "hf://org/model is a model of a hub" in done.stderr and "p2pdist gc" in done.stderr


def test_a_name_that_no_preseed_can_have_is_told_in_plain_words() -> None:
    done = programs.run("preseed", "a:v1", "--count", "1", "--id", "night 42", "--tracker", "http://127.0.0.1:1")
    assert done.returncode == 2
    assert done.stderr == (
        "p2pdist: 'night 42' cannot be the ID of a preseed. "
        "Write up to 128 letters, digits, dots, underscores and hyphens, such as nightly-42\n"
    )


def test_waiting_names_the_hosts_and_their_reasons() -> None:
    """Hosts that failed first, then those that still receive; the rest as a number."""
    found = progress(2, 12, failures=[Failure("h9", "disk-full")], waiting=[f"h{n}" for n in range(9)])
    assert _waits_for(found) == "2 of 12 hosts done; waits for h9 (disk-full), h0, h1, h2, h3 and 5 more"
    assert _waits_for(progress(2, 12)) == "2 of 12 hosts done"


@pytest.mark.parametrize(
    ("package", "asked", "shown"),
    [
        ("a/b@sha256:" + "1" * 64, "a/b:v1", "a/b:v1 111111111111"),
        ("a/b@sha256:" + "1" * 64, "a/b@sha256:" + "1" * 64, "a/b@111111111111"),
        ("a/b@sha256:" + "1" * 64, None, "a/b 111111111111"),
    ],
)
def test_a_package_is_named_by_its_tag_and_some_digits(package: str, asked: str | None, shown: str) -> None:
    if asked is None:
        assert _package(PreseedSummary("p1", "running", package, 1, 0, 0.0)) == shown
    else:
        assert _package(progress(0, 1, package=package, asked=asked)) == shown
