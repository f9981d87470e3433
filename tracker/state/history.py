"""The history of a fleet in a database: SQLite for one tracker, PostgreSQL for several.

Each kind of event keeps its newest KEPT_MAX records, for KEPT_S: what comes often pushes nothing
else out. Records do not age by the wall clock alone, which may jump ahead and would take all of
them out at once: their clock begins at the earliest of the newest records, and catches up with the
wall clock at CATCH_UP times its pace. What several trackers report alike (`Event.key`) is kept
once.

All methods wait for the database and may be called from any thread; they raise Unavailable when it
does not answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import sqlalchemy as sql
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from p2pdist.model.errors import UNDECODABLE, Unavailable
from p2pdist.model.history import KINDS, Event, HistoryFilter, HistoryKind, HistoryRecord, digest_prefix
from tracker.state.database import Database

FILE_NAME = "history.sqlite"
KEPT_MAX: dict[HistoryKind, int] = {
    "host-lost": 10_000,
    "host-back": 10_000,
    "host-slow": 10_000,
    "wrong-bytes": 10_000,
    "clock-off": 10_000,
    "pull-failed": 10_000,
    "broadcast": 2_000,
    "preseed-failed": 2_000,
    "origin": 2_000,
    "site": 2_000,
    "change": 2_000,
}
KEPT_S = 30 * 86400.0
CATCH_UP, NEWEST = 2.0, 100
"""A clock that is an hour ahead for an hour takes an hour's records too many out. So many records
after such a jump are told from those before it."""

PRUNED_EVERY = 200
"""After so many records the ones over the limits are removed, and at the start."""

LATE_NUMBERS = 500
"""A record of another tracker may become visible so many numbers after later ones: a sequence of
PostgreSQL counts up before its transaction ends."""

Written = tuple[float, Event]
"""When an event was reported, in seconds since the epoch, and the event."""

logger = logging.getLogger(__name__)

_metadata = sql.MetaData()
_records = sql.Table(
    "history",
    _metadata,
    sql.Column("number", sql.BigInteger().with_variant(sql.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sql.Column("key", sql.String(160), unique=True),
    sql.Column("at", sql.Double, nullable=False),
    sql.Column("kind", sql.String(16), nullable=False),
    sql.Column("tracker", sql.String(64), nullable=False),
    sql.Column("package", sql.String(512), nullable=False),
    sql.Column("name", sql.String(512), nullable=False),
    sql.Column("digest", sql.String(71), nullable=False),
    sql.Column("host", sql.String(255), nullable=False),
    sql.Column("body", sql.Text, nullable=False),
    sql.Index("history_kind", "kind", "number"),
    sqlite_autoincrement=True,
)


class HistoryDatabase:
    """The records that are kept. `where` is that of a tracker's state (database.py); `tracker` the
    id under which this one reports, empty where it is alone; `clock` one that never jumps. Raises
    Unavailable and UsageError."""

    def __init__(self, where: str, tracker: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._database = Database(where, FILE_NAME, durable=False)
        self.shared = self._database.shared
        self._tracker, self._written = tracker[:64], 0
        self._clock, self._aged_at = clock, 0.0
        self._looked_at: float | None = None
        with self._database.transaction() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(sql.text("SELECT pg_advisory_xact_lock(7073)"))
            _metadata.create_all(connection)

    def close(self) -> None:
        """Disconnect."""
        self._database.close()

    def add(self, events: Sequence[Written], *, now: float) -> None:
        """Keep events, all or none of them, and remove what is over the limits now and then."""
        rows = [_row(at, event, self._tracker) for at, event in events]
        written, self._written = self._written, self._written + len(events)
        with self._database.transaction() as connection:
            if rows:
                insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
                # A key that is there: another tracker reported it, or this one before its restart.
                connection.execute(insert(_records).on_conflict_do_nothing(index_elements=["key"]), rows)
        if written and written // PRUNED_EVERY == self._written // PRUNED_EVERY:
            return
        try:
            self.prune(now=now)
        except (Unavailable, IntegrityError) as error:  # the events are kept: a caller that tries again doubles them
            logger.warning("old events of the history are not removed yet: %s", error)

    def prune(self, *, now: float) -> None:
        """Remove the records over the limits."""
        columns = _records.c
        with self._database.transaction() as connection:
            connection.execute(sql.delete(_records).where(columns.at < self._age(connection, now) - KEPT_S))
            for kind in KINDS:
                newest = sql.select(columns.number).where(columns.kind == kind).order_by(columns.number.desc())
                last = connection.execute(newest.offset(KEPT_MAX[kind]).limit(1)).scalar_one_or_none()
                if last is not None:
                    over = (columns.kind == kind, columns.number <= last)
                    connection.execute(sql.delete(_records).where(*over))

    def _age(self, connection: sql.Connection, now: float) -> float:
        """The time by which records age, in seconds since the epoch: at most `now`."""
        looked_at = self._clock()
        if self._looked_at is not None:
            self._aged_at += CATCH_UP * (looked_at - self._looked_at)
        else:
            newest = sql.select(_records.c.at).order_by(_records.c.number.desc()).limit(NEWEST).subquery()
            self._aged_at = connection.execute(sql.select(sql.func.min(newest.c.at))).scalar_one() or now
        self._looked_at, self._aged_at = looked_at, min(now, self._aged_at)
        return self._aged_at

    def read(self, wanted: HistoryFilter) -> list[HistoryRecord]:
        """The newest records that match, the newest first; fewer than `limit` only where no more
        do."""
        newest, records = _records.c.number.desc(), list[HistoryRecord]()
        while True:
            query = sql.select(_records).where(*_conditions(wanted)).order_by(newest).limit(wanted.limit)
            with self._database.transaction() as connection:
                rows = connection.execute(query).all()
            records += _decoded(rows)
            if len(rows) < wanted.limit or len(records) >= wanted.limit:
                return records[: wanted.limit]
            wanted = msgspec.structs.replace(wanted, before=rows[-1].number)

    def last(self) -> int:
        """The number of the newest record, 0 without any."""
        with self._database.transaction() as connection:
            return connection.execute(sql.select(sql.func.max(_records.c.number))).scalar_one() or 0

    def after(self, number: int, limit: int) -> list[HistoryRecord]:
        """The records after a number, the oldest first, and where others write too, those shortly
        before it again."""
        number -= LATE_NUMBERS if self.shared else 0
        query = sql.select(_records).where(_records.c.number > number).order_by(_records.c.number)
        with self._database.transaction() as connection:
            rows = connection.execute(query.limit(limit + (LATE_NUMBERS if self.shared else 0))).all()
        return list(_decoded(rows))


def _row(at: float, event: Event, tracker: str) -> dict[str, object]:
    return {
        "key": event.key[:160] or None,
        "at": at,
        "kind": event.kind,
        "tracker": tracker,
        "package": event.package,
        "name": name_of(event.package),
        "digest": event.digest,
        "host": event.host[:255],
        "body": msgspec.json.encode(event).decode(),
    }


def name_of(package: str) -> str:
    """The name in a reference, which rights to read go by."""
    name = package.partition("@")[0]
    head, slash, tail = name.rpartition("/")
    return f"{head}{slash}{tail.partition(':')[0]}"


def _conditions(wanted: HistoryFilter) -> Iterable[sql.ColumnElement[bool]]:
    columns = _records.c
    if wanted.kinds:
        yield columns.kind.in_(wanted.kinds)
    if wanted.host:
        yield columns.host == wanted.host
    if wanted.since:
        yield columns.at >= wanted.since
    if wanted.before:
        yield columns.number < wanted.before
    if wanted.package:
        prefix = digest_prefix(wanted.package)
        same = sql.or_(columns.package == wanted.package, columns.name == wanted.package)
        same = sql.or_(same, columns.digest == wanted.meaning) if wanted.meaning else same
        yield sql.or_(same, columns.digest.startswith(prefix, autoescape=True)) if prefix else same


def _decoded(rows: Iterable[sql.Row[tuple[object, ...]]]) -> Iterable[HistoryRecord]:
    for row in rows:
        try:
            event = msgspec.json.decode(row.body, type=Event)
        except UNDECODABLE as error:  # a later release has kinds that this one does not know
            logger.debug("record %s of the history is left out: %s", row.number, error)
            continue
        yield HistoryRecord(row.number, row.at, round(row.at - event.began_s, 3), row.tracker, event)
