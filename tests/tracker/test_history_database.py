"""The history in SQLite and in a real PostgreSQL: what is kept, in which order, for how long."""

from __future__ import annotations

import stat
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sql
from hypothesis import given, settings
from hypothesis import strategies as st
from waits import until

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Unavailable, UsageError
from p2pdist.model.history import KINDS, Broadcast, Event, HistoryFilter, HistoryKind, HistoryRecord, Straggler
from tracker.core.fleet import Fleet
from tracker.core.history.history import WAITING_MAX
from tracker.history import recorder as module
from tracker.history.recorder import HistoryRecorder
from tracker.state import history as state
from tracker.state.history import KEPT_S, HistoryDatabase, name_of

MANIFEST = digest_of(b"manifest")
REPORT = Broadcast(
    2, 1 << 40, 4, 3, 9.5, to_50_s=1.0, origin_copies=1.0, curve=((1.0, 3),), stragglers=(Straggler("h1", "unknown"),)
)
ENDED = Event("broadcast", "team/a:v7 reached 3 of 4 hosts", "team/a:v7", MANIFEST, began_s=9.5, broadcast=REPORT)
LOST = Event("host-lost", "lost h1", host="h1", zone="z1", address="h1:1", reason="its connection broke")
FAILED = Event("pull-failed", "h2 could not pull team/b:v1", "team/b:v1", host="h2", reason="disk-full: full")


@pytest.fixture
def postgresql(postgresql_server: str) -> str:
    """An empty database."""
    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS history")
    return postgresql_server


def texts(records: list[HistoryRecord]) -> list[str]:
    return [record.event.text for record in records]


def test_records_come_back_as_they_were_the_newest_first(where: str) -> None:
    database = HistoryDatabase(where, "t1")
    database.add([(100.0, ENDED), (101.5, LOST), (102.0, FAILED)], now=102.0)
    found = database.read(HistoryFilter())
    assert [record.event for record in found] == [FAILED, LOST, ENDED]
    assert [(record.at, record.since, record.tracker) for record in found][2] == (100.0, 90.5, "t1")
    assert database.last() == found[0].number > found[1].number
    if where:
        database.close()
        again = HistoryDatabase(where, "t2")
        assert again.read(HistoryFilter()) == found
        again.add([(103.0, LOST)], now=103.0)
        assert again.last() > found[0].number
        again.close()


def test_filters(where: str) -> None:
    database = HistoryDatabase(where)
    database.add([(100.0, ENDED), (101.5, LOST), (102.0, FAILED)], now=102.0)

    def kinds(**wanted: object) -> list[str]:
        return [record.event.kind for record in database.read(HistoryFilter(**wanted))]  # type: ignore[arg-type]

    assert kinds(kinds=("host-lost", "broadcast")) == ["host-lost", "broadcast"]
    assert kinds(host="h2") == ["pull-failed"]
    assert kinds(since=101.5) == ["pull-failed", "host-lost"]
    assert kinds(limit=1) == ["pull-failed"]
    assert kinds(before=database.last()) == ["host-lost", "broadcast"]
    for package in ("team/a:v7", "team/a", MANIFEST, MANIFEST[7:19], f"team/a@{MANIFEST}"):
        assert kinds(package=package) == ["broadcast"], package
    for package in ("team/a:v8", "team", "t%", "______", "sha256:", "'; DROP TABLE history"):
        assert kinds(package=package) == [], package
    database.close()


def test_each_kind_keeps_its_newest(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(state.KEPT_MAX, "host-lost", 3)
    passed_s = 0.0
    database = HistoryDatabase(where, clock=lambda: passed_s)
    database.add([(1.0, ENDED)], now=1.0)
    for number in range(10):
        database.add([(2.0, Event("host-lost", f"lost h{number}", host=f"h{number}"))], now=2.0)
    database.prune(now=3.0)
    kept = database.read(HistoryFilter())
    assert texts(kept) == ["lost h9", "lost h8", "lost h7", ENDED.text]
    passed_s += KEPT_S
    database.prune(now=1.5 + KEPT_S)
    assert len(database.read(HistoryFilter())) == 3, "the broadcast is too old"
    database.close()


def test_a_clock_that_jumps_ahead_empties_nothing(where: str) -> None:
    """Neither while it is ahead, nor after a restart meanwhile; what is too old goes in time."""
    year_s, passed_s = 365 * 86400.0, 0.0
    database = HistoryDatabase(where, clock=lambda: passed_s)
    database.add([(1000.0, ENDED)], now=1000.0)
    database.add([(1010.0 + year_s, LOST)], now=1010.0 + year_s)
    database.prune(now=1010.0 + year_s)
    assert texts(database.read(HistoryFilter())) == [LOST.text, ENDED.text]
    if where:
        database.close()
        database = HistoryDatabase(where, clock=lambda: passed_s)
    database.prune(now=1020.0 + year_s)
    assert texts(database.read(HistoryFilter())) == [LOST.text, ENDED.text]
    passed_s += year_s
    database.prune(now=1020.0 + year_s)
    assert texts(database.read(HistoryFilter())) == [LOST.text]
    database.close()


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from(KINDS), max_size=60), st.integers(1, 4))
def test_no_kind_pushes_another_out(kinds: list[HistoryKind], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for kind in KINDS:
            patch.setitem(state.KEPT_MAX, kind, most)
        database = HistoryDatabase("")
        for number, kind in enumerate(kinds):
            database.add([(1.0, Event(kind, str(number)))], now=1.0)
        database.prune(now=1.0)
        kept = database.read(HistoryFilter(limit=1000))
        newest = {kind: [str(n) for n, each in enumerate(kinds) if each == kind][-most:] for kind in KINDS}
        assert {kind: texts([r for r in kept if r.event.kind == kind])[::-1] for kind in KINDS} == newest
        database.close()


def test_what_several_trackers_report_is_kept_once(postgresql: str) -> None:
    first, second = HistoryDatabase(postgresql, "t1"), HistoryDatabase(postgresql, "t2")
    failed = Event("preseed-failed", "preseed p1 failed", key="preseed p1")
    first.add([(1.0, failed), (1.0, LOST)], now=1.0)
    second.add([(2.0, failed), (2.0, LOST)], now=2.0)
    found = second.read(HistoryFilter())
    assert [(record.event.kind, record.tracker) for record in found] == [
        ("host-lost", "t2"),
        ("preseed-failed", "t1"),
        ("host-lost", "t1"),
    ] or [record.event.kind for record in found].count("preseed-failed") == 1
    for database in (first, second):
        database.close()


def test_records_of_a_later_release_are_left_out(where: str) -> None:
    database = HistoryDatabase(where)
    database.add([(1.0, LOST), (2.0, LOST)], now=2.0)
    with database._database.transaction() as connection:
        body = {"body": '{"kind":"of a later release","text":"x"}'}
        connection.execute(sql.update(state._records).where(state._records.c.at == 1.0).values(body))
    assert [record.at for record in database.read(HistoryFilter())] == [2.0]
    database.close()


def test_records_of_a_later_release_do_not_end_a_page(where: str) -> None:
    database = HistoryDatabase(where)
    database.add([(float(number), LOST) for number in range(6)], now=6.0)
    later = sql.text("UPDATE history SET body = '{}' WHERE number > 3")
    with database._database.transaction() as connection:
        connection.execute(later)
    assert [record.at for record in database.read(HistoryFilter(limit=2))] == [2.0, 1.0]


def test_nothing_is_kept_twice_where_old_records_cannot_be_removed(where: str) -> None:
    """A caller that hears of a failure gives the same events again."""
    database = HistoryDatabase(where)
    made = {
        True: "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$;"
        "CREATE TRIGGER stays BEFORE DELETE ON history FOR EACH ROW EXECUTE FUNCTION refuse()",
        False: "CREATE TRIGGER stays BEFORE DELETE ON history BEGIN SELECT RAISE(ABORT, 'no'); END",
    }
    with database._database.transaction() as connection:
        connection.execute(sql.text(made[database.shared]))
    old = Event("change", "old", key="old")
    database.add([(0.0, old)], now=1.0)
    database.add([(0.0, old), (2.0, LOST)] * state.PRUNED_EVERY, now=10 * KEPT_S)
    assert len(database.read(HistoryFilter(limit=1000))) == 1 + state.PRUNED_EVERY
    with database._database.transaction() as connection:
        connection.execute(sql.text("DROP TRIGGER stays" + (" ON history" if database.shared else "")))
        if database.shared:
            connection.execute(sql.text("DROP FUNCTION refuse"))


def test_its_file_is_for_the_tracker_alone(tmp_path: Path) -> None:
    HistoryDatabase(str(tmp_path / "state")).close()
    assert stat.S_IMODE((tmp_path / "state" / state.FILE_NAME).stat().st_mode) == 0o600


def test_names_that_rights_go_by() -> None:
    assert name_of("team/a:v7") == name_of(f"team/a@{MANIFEST}") == "team/a"
    assert name_of("reg.example:5000/a:v1") == "reg.example:5000/a" and name_of("") == ""


class Away(HistoryDatabase):
    """A database that does not answer while it is told to; what it is given otherwise is kept."""

    away = True

    def add(self, events, *, now):  # type: ignore[no-untyped-def]
        if self.away:
            raise Unavailable("the database does not answer")
        super().add(events, now=now)


async def test_events_wait_for_a_database_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    monkeypatch.setattr(module, "RETRY_S", 0.01)
    history, database = Fleet(0.0).history, Away("")
    recorder = HistoryRecorder(history, database)
    running = asyncio.create_task(recorder.run())
    for number in range(5):
        history.changed(f"change {number}")
    recorder.collect()
    await asyncio.sleep(0.05)
    assert (await recorder.page(HistoryFilter())).records == []
    database.away = False
    await until(lambda: not recorder._waiting)
    assert len((await recorder.page(HistoryFilter())).records) == 5
    database.away = True
    for _ in range(2):
        for number in range(WAITING_MAX):
            history.changed(f"more {number}")
        recorder.collect()
    assert recorder.given_up == WAITING_MAX
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    database.away = False
    await recorder.stop()


async def test_a_slow_database_keeps_no_other_work_of_the_tracker(postgresql: str) -> None:
    """Beats of a cluster and documents go through the threads that all share."""
    import asyncio

    recorder = HistoryRecorder(Fleet(0.0).history, HistoryDatabase(postgresql))
    with psycopg.connect(postgresql) as other:
        other.execute("LOCK TABLE history IN ACCESS EXCLUSIVE MODE")
        pages = [
            asyncio.create_task(recorder.page(HistoryFilter(), remote=f"192.0.2.{number}"))
            for number in range(module.READERS_MAX)
        ]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="too many"):
            await recorder.page(HistoryFilter())
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(lambda: "done") == "done"
        assert not any(page.done() for page in pages)
    assert [page.records for page in await asyncio.gather(*pages)] == [[]] * module.READERS_MAX
    await recorder.stop()


async def test_two_trackers_of_one_database_are_followed_at_either(postgresql: str) -> None:
    import asyncio

    fleets = [Fleet(0.0), Fleet(0.0)]
    recorders = [HistoryRecorder(fleet.history, HistoryDatabase(postgresql, f"t{n}")) for n, fleet in enumerate(fleets)]
    fleets[0].history.changed("before")
    recorders[0].collect()
    tasks = [asyncio.create_task(recorder.run()) for recorder in recorders]
    async with asyncio.timeout(60):
        while not (await recorders[1].page(HistoryFilter())).records:
            await asyncio.sleep(0.01)
    following = recorders[1].follow()
    assert await anext(following) is None
    for fleet, recorder in zip(fleets, recorders, strict=True):
        fleet.history.changed("after")
        recorder.collect()
    async with asyncio.timeout(30):
        heard = [await anext(following), await anext(following)]
    assert {(record.tracker, record.event.text) for record in heard if record} == {("t0", "after"), ("t1", "after")}
    for recorder in recorders:
        recorder.end()
    with pytest.raises(StopAsyncIteration):
        await anext(following)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for recorder in recorders:
        await recorder.stop()


def test_an_id_that_is_given_again_fails_again(where: str) -> None:
    """A preseed's id is free a day after its end, and the history is kept for longer."""
    history, database = Fleet(0.0).history, HistoryDatabase(where)
    for ordered_at in (1000.0, 200_000.0, 200_000.0):  # the last time another tracker says the same
        history.preseed_failed("nightly", "team/a:v1", 0, 1, (), 60.0, ordered_at=ordered_at)
        database.add([(ordered_at, event) for event in history.take()], now=ordered_at)
    assert [record.at for record in database.read(HistoryFilter())] == [200_000.0, 1000.0]
    database.close()


async def test_what_the_database_cannot_hold_ends_no_tracker_badly(caplog: pytest.LogCaptureFixture) -> None:
    """It is given up with the tracker: all else is still to be left well."""

    class Narrow(HistoryDatabase):
        def add(self, events, *, now):  # type: ignore[no-untyped-def]
            raise UsageError("the tracker's database cannot hold that")

    history = Fleet(0.0).history
    recorder = HistoryRecorder(history, Narrow(""))
    history.changed("a change")
    recorder.collect()
    await recorder.stop()
    assert "1 events of the history are not kept" in caplog.text
