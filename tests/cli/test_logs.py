"""What daemons log: three forms of a line, requests by name from the command to the peer, no
secrets, and reading again at SIGHUP."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import programs
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st
from ports import free_port
from programs import Program

from p2pdist.cli import daemon as daemon_module
from p2pdist.cli.daemon import FORMATS, _Lines, _note_request
from p2pdist.model.errors import NotFound
from p2pdist.model.request_id import CHARACTERS_MAX, REQUEST_ID, is_sane, passed_on
from p2pdist.model.url import HIDDEN, without_secrets
from p2pdist.transfer.problems import name_request, problems


def logged(form: str, write: Callable[[logging.Logger], None]) -> str:
    """What a logger of our set-up writes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Lines(form))  # type: ignore[arg-type]
    handler.addFilter(_note_request)
    logger = logging.Logger("p2pdist.test")
    logger.addHandler(handler)
    write(logger)
    return stream.getvalue()


def unquoted(line: str) -> dict[str, str]:
    """A line of logfmt taken apart."""
    found = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s"=]+)(?: |$)', line)
    assert " ".join(f"{key}={value}" for key, value in found) == line, line
    return {key: json.loads(value) if value.startswith('"') else value for key, value in found}


def test_text_is_for_people() -> None:
    line = logged("text", lambda log: log.warning("host=%s is slow", "h1"))
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=WARNING logger=p2pdist.test host=h1 is slow\n", line
    )


@pytest.mark.parametrize(("form", "parse"), [("json", json.loads), ("logfmt", unquoted)])
def test_fields(form: str, parse: Callable[[str], dict[str, str]]) -> None:
    before = REQUEST_ID.set("r-1")
    try:
        found = parse(logged(form, lambda log: log.info('a "word" = %d', 1)).rstrip("\n"))
    finally:
        REQUEST_ID.reset(before)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found == {"level": "info", "logger": "p2pdist.test", "message": 'a "word" = 1', "request_id": "r-1"}


@given(st.text())
def test_whatever_is_logged_is_one_line_and_comes_back(text: str) -> None:
    for form, parse in (("json", json.loads), ("logfmt", unquoted)):
        lines = logged(form, lambda log: log.info("%s", text))
        assert len(lines.splitlines()) == 1
        assert parse(lines.rstrip("\n"))["message"] == without_secrets(text)
    assert len(logged("text", lambda log: log.info("%s", text)).splitlines()) == 1


def test_a_traceback_stays_with_its_line() -> None:
    def fail(log: logging.Logger) -> None:
        try:
            raise ValueError("http://me:hidden@origin/x is broken")
        except ValueError:
            log.exception("it failed")

    found = json.loads(logged("json", fail))
    assert found["message"] == "it failed"
    assert found["exception"].startswith("Traceback") and "origin/x is broken" in found["exception"]
    assert len(logged("logfmt", fail).splitlines()) == 1
    assert "hidden" not in logged("json", fail) + logged("logfmt", fail) + logged("text", fail)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("http://me:sesame@origin:80/x?y=1", "http://***@origin:80/x?y=1"),
        ("postgresql+psycopg://u:sesame@db/p2p", "postgresql+psycopg://***@db/p2p"),
        ("s3://sesame@bucket", "s3://***@bucket"),
        ("Authorization: Bearer sesame", "Authorization: Bearer ***"),
        ("{'Authorization': 'Basic sesame'}", "{'Authorization': 'Basic ***'}"),
        ("https://b/x?X-Amz-Signature=sesame&X-Amz-Date=1", "https://b/x?X-Amz-Signature=***&X-Amz-Date=1"),
        ("https://b/x?sv=1&sig=sesame", "https://b/x?sv=1&sig=***"),
        ("aws_secret_access_key=sesame aws_region=x", "aws_secret_access_key=*** aws_region=x"),
        ('{"password": "sesame"}', '{"password": "***"}'),
        ("token: sesame", "token: ***"),
        ("bearer sesame-and-more", "bearer ***"),
    ],
)
@pytest.mark.parametrize("form", FORMATS)
def test_secrets_stay_out(text: str, kept: str, form: str) -> None:
    assert without_secrets(text) == kept
    assert "sesame" not in logged(form, lambda log: log.error("%s", text))
    assert HIDDEN in kept


@pytest.mark.parametrize(
    "text", ["http://host:7070/v1/x", "mail a@b", "stripe=1 source=h1", "sha256:00", "the token is old", "a basic rule"]
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert without_secrets(text) == text


@pytest.mark.parametrize("text", ["a", "token", "://", "authorization ", "access-"])
def test_what_strangers_send_costs_no_more_than_its_length(text: str) -> None:
    """Looking for secrets in a long line must not stop the event loop: with a look at each pair of
    its characters this takes hours."""
    script = (
        f"from p2pdist.model.url import without_secrets; text = {text!r} * 20_000; assert without_secrets(text) == text"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_an_exception_makes_no_lines_of_its_own() -> None:
    def fail(log: logging.Logger) -> None:
        try:
            raise ValueError("x\n2026-01-01T00:00:00.000Z level=ERROR logger=p2pdist.agent forged\x1b[2J")
        except ValueError:
            log.exception("it failed")

    first, *more = logged("text", fail).splitlines()
    assert first.endswith("it failed") and more
    assert all(line.startswith("  ") and line.isprintable() for line in more)


# -- requests


def test_names_of_requests() -> None:
    assert is_sane("a") and is_sane("A-Z_0.9") and is_sane("x" * CHARACTERS_MAX)
    assert not any(map(is_sane, ["", "x" * (CHARACTERS_MAX + 1), "a b", "a\n", "é", "a/b", '"']))
    assert passed_on() == {}


async def test_answers_say_which_request_they_answer() -> None:
    """Plain ones, those that a handler begins itself, problem documents; and tasks inherit it."""
    seen: list[str] = []

    async def plain(request: web.Request) -> web.Response:
        async def note() -> None:
            seen.append(passed_on()["X-Request-ID"])

        await asyncio_create(note())
        return web.Response(text="ok")

    async def begun(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write_eof(b"ok")
        return response

    async def failing(request: web.Request) -> web.Response:
        raise NotFound("nothing is here")

    app = web.Application(middlewares=[problems])
    app.on_response_prepare.append(name_request)
    app.add_routes([web.get("/plain", plain), web.get("/begun", begun), web.get("/failing", failing)])
    async with TestClient(TestServer(app)) as client:
        for path in ("/plain", "/begun", "/failing", "/nowhere"):
            answer = await client.get(path, headers={"X-Request-ID": "job-7"})
            assert answer.headers["X-Request-ID"] == "job-7"
            if answer.status == 404:
                assert (await answer.json())["request_id"] == "job-7"
        for given_name in ("", "a b", "x" * 65, "<script>"):
            answer = await client.get("/plain", headers={"X-Request-ID": given_name} if given_name else {})
            made = answer.headers["X-Request-ID"]
            assert is_sane(made) and made != given_name
        assert seen[0] == "job-7" and len(set(seen)) == 5
        assert REQUEST_ID.get() == ""


async def asyncio_create(work: object) -> None:
    import asyncio

    await asyncio.create_task(work)  # type: ignore[arg-type]


# -- daemons


@contextmanager
def daemon(directory: Path, name: str, *words: str) -> Iterator[tuple[Program, Path]]:
    """A daemon whose log goes to a file; it ends with the block."""
    log = directory / f"{name}.log"
    with log.open("wb") as output, programs.running(*words, stdout=output, stderr=output) as process:
        yield process, log


def until(condition: Callable[[], object], log: Path) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="p2pd-") as directory:  # short: a Unix socket lies in it
        yield Path(directory)


def port_of(log: Path) -> int:
    found = re.search(r"listening on 127\.0\.0\.1:(\d+)", log.read_text())
    assert found is not None
    return int(found[1])


@pytest.fixture
def empty_origin(place: Path) -> Iterator[int]:
    """The port of a web server that has nothing."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    (place / "nothing").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(place / "nothing"))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.slow
def test_a_request_is_followed_from_the_command_to_the_tracker_and_no_secret_is_told(
    place: Path, empty_origin: int
) -> None:
    """The agent's log and the tracker's, both as JSON and down to debug, name the same request; the
    password in the tracker's URL and that of the origin stand in neither."""
    port = free_port()
    tracker = (
        "tracker",
        "--listen",
        f"127.0.0.1:{port}",
        "--origin",
        f"http://me:sesame@127.0.0.1:{empty_origin}",
        "--log-format",
        "json",
    )
    agent = (
        "agent",
        "--listen",
        f"127.0.0.1:{free_port()}",
        "--store",
        str(place / "store"),
        "--socket",
        str(place / "sock"),
    )
    agent += (
        "--tracker",
        f"http://me:sesame@127.0.0.1:{port}",
        "--name",
        "h",
        "--log-format",
        "json",
        "--transport",
        "trees",
    )
    with (
        daemon(place, "tracker", *tracker, "--log-level", "debug") as (_, tracker_log),
        daemon(place, "agent", *agent, "--log-level", "debug") as (_, agent_log),
    ):
        until(lambda: "answers" in agent_log.read_text(), agent_log)
        done = programs.run("pull", "no/such:package", "--socket", place / "sock", "--json")
        assert done.returncode != 0
        agents = [json.loads(line) for line in agent_log.read_text().splitlines()]
        (failure,) = [line for line in agents if line["message"].startswith("pull=") and "failed" in line["message"]]
        assert is_sane(failure["request_id"])
        trackers = [json.loads(line) for line in tracker_log.read_text().splitlines()]
        assert failure["request_id"] in [line.get("request_id") for line in trackers]
        assert all(set(line) >= {"time", "level", "logger", "message"} for line in agents + trackers)
        assert "sesame" not in agent_log.read_text() + tracker_log.read_text() + done.stdout + done.stderr


def agent_words(place: Path, port: int, *more: str) -> tuple[str, ...]:
    return (
        *("agent", "--no-discovery", "--transport", "trees", "--listen", f"127.0.0.1:{port}"),
        *(
            "--store",
            str(place / "store"),
            "--socket",
            str(place / "sock"),
            "--config",
            str(place / "p2pdist.toml"),
            *more,
        ),
    )


def answers_logged(port: int, log: Path) -> bool:
    """Whether one more request makes one more line."""
    before = log.read_text().count("/healthz is answered")
    urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60).read()
    return log.read_text().count("/healthz is answered") > before


def test_sighup_reads_the_level_again(place: Path) -> None:
    """From the configuration file; what it cannot mean changes nothing."""
    config, port = place / "p2pdist.toml", free_port()
    config.write_text('[agent]\nlog-level = "info"\n')
    with daemon(place, "agent", *agent_words(place, port)) as (process, log):
        until(lambda: "listening" in log.read_text(), log)
        assert not answers_logged(port, log)
        for level, shown in (("debug", True), ("error", False), ("debug", True), ("debgu", True)):
            config.write_text(f'[agent]\nlog-level = "{level}"\n')
            os.kill(process.pid, signal.SIGHUP)
            until(lambda wanted=shown: answers_logged(port, log) == wanted, log)
        until(lambda: "the level of the log stays as it was" in log.read_text(), log)
        config.unlink()
        os.kill(process.pid, signal.SIGHUP)
        until(lambda: "there is no configuration file" in log.read_text(), log)
        assert answers_logged(port, log)
        assert process.poll() is None


def test_sighup_ends_no_tracker_that_has_nothing_to_read_again(place: Path) -> None:
    words = ("tracker", "--no-discovery", "--listen", f"127.0.0.1:{free_port()}")
    with daemon(place, "tracker", *words) as (process, log):
        until(lambda: "listening" in log.read_text(), log)
        os.kill(process.pid, signal.SIGHUP)
        until(lambda: "SIGHUP: there are no files" in log.read_text(), log)
        assert process.poll() is None


def test_a_flag_wins_at_sighup_as_well(place: Path) -> None:
    config, port = place / "p2pdist.toml", free_port()
    config.write_text('[agent]\nlog-level = "error"\n')
    with daemon(place, "agent", *agent_words(place, port, "--log-level", "info")) as (process, log):
        until(lambda: "listening" in log.read_text(), log)
        for count in (1, 2):
            os.kill(process.pid, signal.SIGHUP)
            until(lambda wanted=count: log.read_text().count("SIGHUP") == wanted, log)


def test_a_line_with_the_digest_of_a_blob_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """People know packages by their tags, logs know blobs."""
    known, unknown = f"sha256:{1:064x}", f"sha256:{2:064x}"
    monkeypatch.setattr(daemon_module, "_NAMERS", [])
    daemon_module.name_packages(lambda digest: "team/a:v1" if digest == known else "")
    found = json.loads(logged("json", lambda log: log.info("%s, then %s evicted", unknown, known)))
    assert found["package"] == "team/a:v1"
    assert " package=team/a:v1 " in logged("text", lambda log: log.info("blob=%s", known))
    assert "package" not in json.loads(logged("json", lambda log: log.info("blob=%s", unknown)))
    assert "package" not in json.loads(logged("json", lambda log: log.info("team/a:v1 is %s", known)))
