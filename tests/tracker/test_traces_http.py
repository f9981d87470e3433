"""Traces over HTTP: what hosts state makes what the next ones get, also after a restart, and only
for identities that may read the package."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psycopg
import pytest
from access_rig import AccessSite, access_site, ask
from aiohttp import web
from waits import until

from p2pdist.model.access import OPEN, Identity
from p2pdist.model.errors import NotFound, Refused, TooLarge, UsageError, from_problem
from p2pdist.model.trace import WANTED_HEADER, Trace, TraceBuilder, decode_trace, encode_trace
from p2pdist.model.tree import content_hash
from tracker import traces as module
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.core.traces.index import Key
from tracker.http.app import make_app
from tracker.http.traces import TraceList, TraceRequest, recorder
from tracker.service import Service
from tracker.state.traces import TraceRecords
from tracker.traces import Traces

A, B, C = (content_hash(name) for name in (b"a", b"b", b"c"))


def trace(*contents: bytes) -> Trace:
    builder = TraceBuilder()
    for at_ms, content in enumerate(contents):
        builder.add(content, 0, 1000 * at_ms)
    return builder.trace({content: b"path/" + content.hex().encode() for content in contents}, 60_000)


def body(given: Trace, entry: str = "train", host: str = "h0", reference: str = "team-a/x:v1") -> Any:
    return TraceRequest(reference, entry, encode_trace(given), host)


class Site:
    """A tracker without access control."""

    def __init__(self, http: aiohttp.ClientSession, state: Path | None) -> None:
        self._http, self._state = http, state
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        service = Service(Fleet(started_at=asyncio.get_running_loop().time()), Content(None))
        service.traces = Traces(TraceRecords(str(self._state)) if self._state is not None else None)
        self._stack.callback(service.traces.close)
        runner = web.AppRunner(make_app(service), access_log=None)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._stack.aclose()

    async def ask(self, method: str, path: str, given: Any = None) -> bytes:
        data = msgspec.json.encode(given) if given is not None else None
        async with self._http.request(method, self.url + path, data=data) as answer:
            content = await answer.read()
            if answer.status >= 400:
                raise from_problem(msgspec.json.decode(content))
            return content

    async def found(self, entry: str = "train", reference: str = "team-a/x:v2") -> bytes:
        return await self.ask("GET", f"/v1/traces?reference={reference}&entry={entry}")

    async def wanted(self, entry: str = "train", starts: str = "1") -> bool:
        """Whether a host that starts is asked to record that."""
        query = {"reference": "team-a/x:v2", "entry": entry, "starts": starts}
        async with self._http.get(f"{self.url}/v1/traces", params=query) as answer:
            assert answer.status == 200
            return WANTED_HEADER in answer.headers


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with aiohttp.ClientSession() as http:
        found = Site(http, tmp_path / "state")
        await found.start()
        yield found
        await found.stop()


def contents(answer: bytes) -> list[bytes]:
    found = decode_trace(answer)
    return [found.contents[span.content].content for span in found.spans]


async def test_a_trace_is_of_all_versions_and_outlives_the_tracker(site: Site) -> None:
    assert await site.found() == b""
    await site.ask("POST", "/v1/traces", body(trace(A, B)))
    assert contents(await site.found()) == [A, B]
    assert await site.found("serve") == b"" == await site.found(reference="team-a/z:v1")
    await site.ask("POST", "/v1/traces", body(trace(A, C), host="h1"))
    await site.ask("POST", "/v1/traces", body(trace(A, C), host="h2"))
    answers = await asyncio.gather(*(site.found() for _ in range(50)))
    assert set(answers) == {answers[0]}
    assert contents(answers[0]) == [A, C]
    await site.stop()
    await site.start()
    assert contents(await site.found()) == [A, C]
    await site.ask("POST", "/v1/traces", body(trace(B), "serve"))
    listed = msgspec.json.decode(await site.ask("GET", "/v1/traces/entries"), type=TraceList).traces
    assert [(row.package, row.entry, row.recordings) for row in listed] == [
        ("team-a/x", "serve", 1),
        ("team-a/x", "train", 3),
    ]
    nothing = await site.ask("GET", "/v1/traces/entries?reference=team-a/z:v1")
    assert msgspec.json.decode(nothing, type=TraceList).traces == []


async def test_metrics_say_what_is_kept_and_how_often_it_was_made(site: Site) -> None:
    async def metrics() -> dict[str, float]:
        lines = (await site.ask("GET", "/metrics")).decode().splitlines()
        samples = (line.partition(" ") for line in lines if line.startswith("p2pdist_tracker_trace"))
        return {name: float(value) for name, _, value in samples}

    found = 'p2pdist_tracker_trace_requests_total{result="found"}'
    before = await metrics()
    assert before[found] == before["p2pdist_tracker_trace_bytes"] == before["p2pdist_tracker_traces_merged_total"] == 0
    first, second = body(trace(A, B)), body(trace(A), "serve")
    for recorded in (first, second, body(trace(A, B), host="h1")):
        await site.ask("POST", "/v1/traces", recorded)
    await asyncio.gather(*(site.found() for _ in range(20)))
    await site.found()
    assert await site.found("other") == b""
    after = await metrics()
    assert (after["p2pdist_tracker_trace_entries"], after["p2pdist_tracker_trace_recordings"]) == (2, 3)
    assert after["p2pdist_tracker_trace_bytes"] == 2 * len(first.trace) + len(second.trace)
    assert after["p2pdist_tracker_traces_merged_total"] == 1
    assert after[found] == 21 and after[found.replace("found", "none")] == 1


async def test_hosts_that_start_are_asked_to_record(site: Site) -> None:
    assert not await site.wanted(starts="")
    starts = [await site.wanted() for _ in range(20)]
    assert starts[0] and 0 < sum(starts) < 20
    assert await site.wanted("serve")


async def test_what_another_release_kept_is_left_out(site: Site, tmp_path: Path) -> None:
    await site.ask("POST", "/v1/traces", body(trace(A)))
    await site.stop()
    records = TraceRecords(str(tmp_path / "state"))
    records.write(("team-a/x", "train", "h1", time.time(), b"of a later release"))
    records.write(("team-a/x", "serve", "h1", time.time(), b"of a later release"))
    records.close()
    await site.start()
    assert contents(await site.found()) == [A]
    assert await site.found("serve") == b""


async def test_what_is_no_trace_is_refused(site: Site) -> None:
    sound = msgspec.to_builtins(body(trace(A)))
    for change, kind in (
        ({"trace": "AAAA"}, UsageError),
        ({"trace": "=="}, UsageError),
        ({"trace": "A" * (900 << 10)}, UsageError),
        ({"trace": "A" * (2 << 20)}, TooLarge),
        ({"entry": "a b"}, UsageError),
        ({"host": ""}, UsageError),
        ({"host": "h\n"}, UsageError),
        ({"host": "h" * 400}, UsageError),
        ({"reference": "::"}, UsageError),
        ({"reference": None}, UsageError),
    ):
        with pytest.raises(kind):
            await site.ask("POST", "/v1/traces", sound | change)
    with pytest.raises(UsageError):
        await site.ask("POST", "/v1/traces", body(Trace()))
    with pytest.raises(UsageError):
        await site.ask("GET", "/v1/traces?reference=team-a/x:v1&entry=%2F")
    assert await site.found() == b""


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[AccessSite]:
    async with access_site(tmp_path) as found:
        yield found


async def test_a_trace_is_for_those_that_may_read_the_package(guarded: AccessSite) -> None:
    everything, agent = await guarded.join("h1"), await guarded.join("h2", "a")
    path, theirs = "/v1/traces?entry=train&reference=", "team-b/y:v1"
    await ask(everything.http, "POST", "/v1/traces", body(trace(A), reference=theirs, host="another"))
    assert contents(await ask(everything.http, "GET", path + theirs)) == [A]
    for name in (theirs, "team-b/none:v1"):
        with pytest.raises(NotFound):
            await ask(agent.http, "GET", path + name)
        with pytest.raises(NotFound):
            await ask(agent.http, "POST", "/v1/traces", body(trace(A), reference=name))
        with pytest.raises(NotFound):
            await ask(agent.http, "GET", f"/v1/traces/entries?reference={name}")
    assert msgspec.json.decode(await ask(agent.http, "GET", "/v1/traces/entries"), type=TraceList).traces == []
    for _ in range(3):  # whatever name they say: a host counts once
        for host in ("x", "y"):
            await ask(agent.http, "POST", "/v1/traces", body(trace(B), host=host))
    await ask(everything.http, "POST", "/v1/traces", body(trace(A)))
    (mine,) = msgspec.json.decode(await ask(agent.http, "GET", "/v1/traces/entries"), type=TraceList).traces
    assert (mine.package, mine.recordings) == ("team-a/x", 2)
    scheduler = await guarded.stranger(guarded.token("slurm"))
    await ask(scheduler, "POST", "/v1/traces", body(trace(C)))
    reader = await guarded.stranger(guarded.token("reader"))
    await ask(reader, "GET", path + "team-a/x:v1")
    with pytest.raises(Refused):
        await ask(reader, "POST", "/v1/traces", body(trace(C)))
    for client, records in ((reader, False), (agent.http, True), (scheduler, True)):
        url = guarded.url + path + "team-a/x:v1&starts=1"
        async with client.get(url) as answer:
            assert answer.status == 200 and (WANTED_HEADER in answer.headers) is records


def test_an_address_records_once_whatever_names_it_gives() -> None:
    """One client that gives eight names would push out what all others have recorded."""
    names = [f"h{number}" for number in range(8)]
    assert {recorder(OPEN, name, "192.0.2.1") for name in names} == {"192.0.2.1"}
    assert {recorder(OPEN, name, f"2001:db8::{name[1:]}") for name in names} == {"2001:db8::"}
    assert [recorder(OPEN, name, "127.0.0.1") for name in names] == names
    assert recorder(Identity("agent", "h9"), "h0", "192.0.2.1") == str(Identity("agent", "h9"))


async def test_a_clock_that_was_ahead_hides_nothing_that_others_record(
    postgresql_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.0)
    ahead, one, two = (Traces(TraceRecords(postgresql_server)) for _ in range(3))
    with monkeypatch.context() as set_ahead:
        now = time.time()
        set_ahead.setattr(module.time, "time", lambda: now + 86400.0)
        await ahead.state(Key("team-a/x", "train"), "h0", encode_trace(trace(A)))
    assert await two.find(Key("team-a/x", "train"))
    await one.state(Key("team-a/y", "train"), "h1", encode_trace(trace(B)))
    assert await two.find(Key("team-a/y", "train"))
    for traces in (ahead, one, two):
        traces.close()


async def test_a_database_that_hangs_keeps_no_other_work_of_the_tracker(postgresql_server: str) -> None:
    traces = Traces(TraceRecords(postgresql_server))
    await traces.find(Key("team-a/x", "train"))
    with psycopg.connect(postgresql_server) as other:
        other.execute("LOCK TABLE trace_recordings IN ACCESS EXCLUSIVE MODE")
        stated = [
            asyncio.create_task(traces.state(Key("team-a/x", "train"), f"h{number}", encode_trace(trace(A))))
            for number in range(40)
        ]
        await until(lambda: traces.counts.recordings >= 8)
        async with asyncio.timeout(10):
            assert await asyncio.to_thread(lambda: "done") == "done"
        assert not any(task.done() for task in stated)
    await asyncio.gather(*stated)
    traces.close()
