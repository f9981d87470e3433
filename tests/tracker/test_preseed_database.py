"""Preseeds in SQLite and in a real PostgreSQL: versions, several trackers at once, what is soft,
and databases that are away."""

from __future__ import annotations

import sqlite3
import stat
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import psycopg
import pytest
from postgresql import binaries, running_server

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Unavailable, UsageError
from p2pdist.model.preseed import PreseedRecord
from p2pdist.mount import kernel
from tracker.state.documents import Documents
from tracker.state.drains import DrainRecords
from tracker.state.history import HistoryDatabase
from tracker.state.joins import JoinEntry, JoinRecords
from tracker.state.preseeds import ENDED_KEPT_S, STALE_BEATS, PreseedDatabase
from tracker.state.traces import TraceRecords

RECORD = PreseedRecord(
    "p1",
    1,
    '{"package":"a:v1","count":2}',
    f"a@{digest_of(b'm')}",
    ((digest_of(b"a"), 1 << 40), (digest_of(b"b"), 0)),
    "running",
    1234567890.123456,
    ("h1", "hôst-2"),
    expires_at=2234567890.5,
    source="10.0.0.1",
)


@pytest.fixture
def postgresql(postgresql_server: str) -> str:
    """An empty database."""
    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS preseeds, trackers, preseed_hosts, joins")
    return postgresql_server


def test_records_come_back_as_they_were(where: str) -> None:
    database = PreseedDatabase(where)
    assert database.read("p1") is None
    assert database.insert(RECORD) == RECORD
    assert database.insert(replace(RECORD, body="{}", version=9)) == RECORD, "the first one stays"
    assert database.read("p1") == RECORD
    changed = replace(RECORD, state="done", done_at=1.5, picked=())
    assert database.replace(changed) == replace(changed, version=2)
    assert database.read_all() == [replace(changed, version=2)]
    if where:
        database.close()
        again = PreseedDatabase(where)
        assert again.read_all() == [replace(changed, version=2)]
        database = again
    database.close()


def test_a_change_of_an_old_version_is_not_made(where: str) -> None:
    database = PreseedDatabase(where)
    database.insert(RECORD)
    mine, theirs = replace(RECORD, picked=("mine",)), replace(RECORD, picked=("theirs",))
    won = database.replace(theirs)
    assert won is not None and won.picked == ("theirs",)
    assert database.replace(mine) == won, "who is late learns what is there"
    changed = database.change("p1", lambda found: replace(found, picked=(*found.picked, "mine")))
    assert changed is not None and (changed.picked, changed.version) == (("theirs", "mine"), 3)
    assert database.change("p1", lambda found: found) == changed, "nothing to change is no new version"
    assert database.change("none", lambda found: found) is None
    assert database.replace(replace(RECORD, id="none")) is None
    database.close()


def test_no_change_is_lost_when_trackers_write_at_once(where: str) -> None:
    """Four trackers (of one process where the database is its own) add their names five times
    each."""
    first = PreseedDatabase(where)
    first.insert(replace(RECORD, picked=()))
    databases = [PreseedDatabase(where) for _ in range(4)] if first.shared else [first] * 4
    failures: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for turn in range(5):
                name = f"{number}.{turn}"
                databases[number].change("p1", lambda found, name=name: replace(found, picked=(*found.picked, name)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    found = first.read("p1")
    assert found is not None
    assert sorted(found.picked) == sorted(f"{number}.{turn}" for number in range(4) for turn in range(5))
    assert found.version == 21
    for database in {id(each): each for each in (first, *databases)}.values():
        database.close()


def test_ended_ones_are_removed_after_a_while(where: str) -> None:
    database = PreseedDatabase(where)
    database.insert(RECORD)
    database.insert(replace(RECORD, id="p2", state="cancelled", ended_at=1000.0))
    database.purge(now=1000.0 + ENDED_KEPT_S - 1)
    assert len(database.read_all()) == 2
    database.purge(now=1000.0 + ENDED_KEPT_S + 1)
    assert [record.id for record in database.read_all()] == ["p1"]
    found = database.exchange({"p1": 1, "p2": 1}, {})
    assert (found.records, found.ids, found.reports) == ((), {"p1"}, {})
    database.close()


def test_trackers_hear_of_each_other(postgresql: str) -> None:
    one, two = PreseedDatabase(postgresql), PreseedDatabase(postgresql)
    one.insert(RECORD)
    found = two.exchange({}, {"p1": '{"h2":["done",1,"",""]}'})
    assert (found.records, found.ids, found.reports) == ((RECORD,), {"p1"}, {})
    [said] = one.exchange({"p1": 1}, {"p1": "{}"}).reports.values()
    assert said == {"p1": '{"h2":["done",1,"",""]}'}
    two.exchange({"p1": 1}, {"p1": '{"h3":["done",1,"",""]}'})
    [said] = one.exchange({"p1": 1}, {"p1": "{}"}).reports.values()
    assert said == {"p1": '{"h3":["done",1,"",""]}'}
    two.exchange({"p1": 1}, {})
    assert list(one.exchange({"p1": 1}, {"p1": "{}"}).reports.values()) == [{}]
    two.exchange({"p1": 1}, {"p1": "{}"})
    two.close()
    assert one.exchange({"p1": 1}, {}).reports == {}, "who stops takes back what it said"
    one.close()


def test_a_tracker_that_beats_no_more_is_taken_for_gone_and_may_return(postgresql: str) -> None:
    one, two = PreseedDatabase(postgresql), PreseedDatabase(postgresql)
    two.exchange({}, {"p1": "{}"})
    heard = [len(one.exchange({}, {}).reports) for _ in range(STALE_BEATS + 2)]
    assert heard == [1] * STALE_BEATS + [0, 0]
    two.exchange({}, {"p1": "{}"})
    assert list(one.exchange({}, {}).reports.values()) == [{"p1": "{}"}], "it says everything again"
    one.close()
    two.close()


def test_a_database_that_goes_away_is_a_failure_that_says_so_and_passes() -> None:
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    with running_server() as url:
        database = PreseedDatabase(url)
        database.insert(RECORD)
        with psycopg.connect(url, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        assert database.read("p1") == RECORD, "a connection that broke is opened again"
    with pytest.raises(Unavailable, match="does not answer") as failure:
        database.read("p1")
    assert failure.value.exit_code == 5
    with pytest.raises(Unavailable):
        database.exchange({}, {})
    database.close()  # a tracker that ends meanwhile has still to leave the rest of its state


class Closable(Protocol):
    def close(self) -> None: ...


def _documents(where: str) -> Documents:
    return Documents(Path(where))


@pytest.mark.parametrize("damage", ["no database", "cut"])
@pytest.mark.parametrize(
    "opened", [PreseedDatabase, DrainRecords, HistoryDatabase, TraceRecords, JoinRecords, _documents]
)
def test_a_damaged_file_of_the_state_is_called_so(
    tmp_path: Path, opened: Callable[[str], Closable], damage: str
) -> None:
    """Not a database that does not answer, nor a directory that cannot be used: another one would
    have no preseeds. A tracker that runs meanwhile takes it for a database that is away."""
    opened(str(tmp_path)).close()
    (path,) = tmp_path.glob("*.sqlite")
    path.write_bytes(path.read_bytes()[:4096] if damage == "cut" else bytes(range(256)) * 32)
    with pytest.raises(Unavailable, match=f"{path.name}, of the tracker's state, is damaged") as failure:
        opened(str(tmp_path))
    assert failure.value.exit_code == 6 and "backup" in failure.value.remedy


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("body", b"\0\xff"),
        ("body", '{"count":"all"}'),
        ("blobs", '{"of": "a later release"}'),
        ("picked", -1e300),
        ("state", "paused"),
        ("call", "[]"),
    ],
)
def test_a_record_that_cannot_be_read_keeps_no_tracker_from_the_others(
    tmp_path: Path, column: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left as it is, for a release that can read it."""
    database = PreseedDatabase(str(tmp_path))
    for name in ("p1", "p2"):
        database.insert(replace(RECORD, id=name))
    with closing(sqlite3.connect(tmp_path / "preseeds.sqlite")) as file, file:
        file.execute(f"UPDATE preseeds SET {column} = ? WHERE id = 'p1'", (value,))
    for _ in range(2):
        assert [record.id for record in database.read_all()] == ["p2"]
        found = database.exchange({}, {})
        assert [record.id for record in found.records] == ["p2"] and found.ids == {"p1", "p2"}
    assert caplog.text.count("the preseed p1 in the tracker's state cannot be read") == 1
    for ask in (lambda: database.read("p1"), lambda: database.insert(RECORD)):
        with pytest.raises(Unavailable, match="cannot be read"):
            ask()
    database.close()


@pytest.mark.root
def test_a_disk_that_is_full_is_said_and_passes(tmp_path: Path) -> None:
    kernel.mount("state", tmp_path, "tmpfs", 0, "size=400k")
    try:
        database = PreseedDatabase(str(tmp_path))
        with suppress(OSError):
            (tmp_path / "others").write_bytes(bytes(1 << 20))
        with pytest.raises(Unavailable, match="has no room left") as failure:
            for number in range(100):
                database.insert(replace(RECORD, id=f"p{number}", body=f'"{"x" * 4096}"'))
        assert failure.value.remedy == "Free some space there"
        (tmp_path / "others").unlink()
        assert database.insert(replace(RECORD, id="later")).id == "later"
        database.close()
    finally:
        kernel.unmount(tmp_path)


def test_a_password_is_not_told() -> None:
    with pytest.raises(Unavailable) as failure:
        PreseedDatabase("postgresql://me:secret@127.0.0.1:1/none")
    assert "secret" not in str(failure.value) and "postgresql://me:***@127.0.0.1:1/none" in str(failure.value)
    with pytest.raises(Unavailable) as failure:
        PreseedDatabase("postgresql://me@127.0.0.1:1/none?password=secret&sslpassword=secret&sslmode=disable")
    assert "secret" not in str(failure.value) and "127.0.0.1:1/none?sslmode=disable" in str(failure.value)


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot keep its state"):
        PreseedDatabase(str(tmp_path / "file" / "state"))


def test_the_state_is_for_the_trackers_user_alone(tmp_path: Path) -> None:
    """Also what an earlier release made; a directory that others use, and what a link leads to,
    stay as they are."""
    own, shared, linked = tmp_path / "own", tmp_path / "shared", tmp_path / "linked"
    for directory in (own, shared, linked):
        directory.mkdir()
        directory.chmod(0o755)
    (own / "preseeds.sqlite").touch()
    (own / "preseeds.sqlite").chmod(0o644)
    (shared / "another").touch()
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o644)
    (linked / "preseeds.sqlite").symlink_to(tmp_path / "file")
    for directory in (own, shared, linked, tmp_path / "new"):
        PreseedDatabase(str(directory)).close()
        Documents(directory).close()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (own, shared, tmp_path / "new")}
    assert modes == {"own": 0o700, "shared": 0o755, "new": 0o700}
    for path in (*own.iterdir(), *(tmp_path / "new").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


def test_trackers_that_share_a_database_share_the_record_of_joins(where: str) -> None:
    if not where:
        pytest.skip("each has a memory of its own")
    first, second = JoinRecords(where), JoinRecords(where)
    assert first.take([JoinEntry("h1", "a", 100.0)], now=0.0, holds=bool) == ["a"]
    assert second.take([JoinEntry("h1", "b", 100.0)], now=50.0, holds=bool) == ["a"]
    assert second.take([JoinEntry("h1", "b", 200.0)], now=150.0, holds=bool) == ["b"]
    assert first.take([JoinEntry("h1", "a", 300.0)], now=160.0, holds=bool) == ["b"]
    first.close()
    second.close()
