"""Membership: the trackers of a cluster in their PostgreSQL database, and the ownership that they
agreed on.

Each tracker has a row, which it alone writes, but for `draining`. It beats by counting up
`progress`, and an event loop that hangs does not count; `beat_at` is the database's clock, for
people. A process that starts under the id of another one takes over its row, and the other one
finds out with its next beat. The ownership is one row, written by compare-and-set on its epoch.

A fleet has one authority: a tracker whose access directory shares none with that of a tracker which
beats is refused, since agents of one would be strangers to the other. Directories are rotated one
after the other, and old and new authorities overlap meanwhile.

All methods wait for the database and may be called from any thread; they raise Unavailable when it
does not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sql
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError

from p2pdist.model.errors import UNDECODABLE, Conflict, Corrupt, NotFound
from p2pdist.model.ownership import TRACKERS_MAX, URLS_MAX, Ownership, Tracker
from tracker.core.ownership.ownerships import MembersSeen, Registered
from tracker.state.database import Database

FORGOTTEN_S = 3600.0
"""After so long without a beat the row of a tracker is removed."""

ALIVE_S = 30.0
"""A tracker that has beaten within this time has a say in which authority the fleet has."""

FORGET_EVERY_BEATS = 120
"""Then old rows are removed, and this tracker's authorities are written anew."""

ROWS_MAX = 4 * TRACKERS_MAX
_LOCK = 7071
_ONLY = 1

_metadata = sql.MetaData()
_trackers = sql.Table(
    "cluster_trackers",
    _metadata,
    sql.Column("id", sql.String(63), primary_key=True),
    sql.Column("urls", sql.Text, nullable=False),
    sql.Column("instance", sql.String(64), nullable=False),
    sql.Column("progress", sql.BigInteger, nullable=False),
    sql.Column("draining", sql.Boolean, nullable=False),
    sql.Column("load", sql.Double, nullable=False),
    sql.Column("hosts", sql.Integer, nullable=False),
    sql.Column("swarms", sql.Integer, nullable=False),
    sql.Column("lag_s", sql.Double, nullable=False),
    sql.Column("started_at", sql.DateTime(timezone=True), nullable=False),
    sql.Column("beat_at", sql.DateTime(timezone=True), nullable=False),
)
_ownership = sql.Table(
    "cluster_ownership",
    _metadata,
    sql.Column("only", sql.Integer, primary_key=True),
    sql.Column("epoch", sql.BigInteger, nullable=False),
    sql.Column("body", sql.Text, nullable=False),
)
_authorities = sql.Table(
    "cluster_authorities",
    _metadata,
    sql.Column("id", sql.String(63), primary_key=True),
    sql.Column("fingerprints", sql.Text, nullable=False),
)
_fingerprints_decoder = msgspec.json.Decoder(frozenset[str])
_urls_decoder = msgspec.json.Decoder(tuple[str, ...])
_ownership_decoder = msgspec.json.Decoder(Ownership)


@dataclass(frozen=True, slots=True)
class Beat:
    """What a tracker says of itself: `progress` counts up while its event loop turns; the rest is
    for the other trackers and for people."""

    progress: int
    load: float = 0.0
    hosts: int = 0
    swarms: int = 0
    lag_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """A tracker as the database has it, and how long ago it beat and started."""

    registered: Registered
    beat_s: float
    started_s: float
    hosts: int
    swarms: int
    lag_s: float


@dataclass(frozen=True, slots=True)
class Look:
    """What the database has at one moment. `replaced`: another process has taken over the row of
    this tracker."""

    rows: tuple[Row, ...]
    stored: Ownership | None
    replaced: bool

    @property
    def seen(self) -> MembersSeen:
        """The same for the core."""
        return MembersSeen(tuple(row.registered for row in self.rows), self.stored)


class MembershipDatabase:
    """The row of the tracker `me`, and those of the others. `where` is a PostgreSQL URL; `instance`
    names this process; `authorities` says the fingerprints of those that it trusts now, none
    without access control."""

    def __init__(
        self,
        where: str,
        me: str,
        urls: tuple[str, ...],
        instance: str,
        authorities: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._database, self._fingerprints = Database(where, ""), authorities
        self.me, self.instance, self._urls = me, instance, urls[:URLS_MAX]
        self._beats = 0
        with self._database.transaction() as connection:
            connection.execute(sql.text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
            _metadata.create_all(connection)

    def close(self) -> None:
        """Disconnect."""
        self._database.close()

    def register(self) -> None:
        """Take the row of this tracker, from another process if that has it. Raises Conflict where
        the trackers that beat have another authority."""
        now = sql.func.clock_timestamp()
        values = {
            "urls": msgspec.json.encode(self._urls).decode(),
            "instance": self.instance,
            "progress": 0,
            "draining": False,
            "load": 0.0,
            "hosts": 0,
            "swarms": 0,
            "lag_s": 0.0,
            "started_at": now,
            "beat_at": now,
        }
        taken = insert(_trackers).values(id=self.me, **values)
        with self._database.transaction() as connection:
            connection.execute(sql.text(f"SELECT pg_advisory_xact_lock({_LOCK})"))  # of two only one is the first
            self._check_authorities(connection)
            self._write_authorities(connection)
            connection.execute(taken.on_conflict_do_update(index_elements=["id"], set_=values))

    def beat(self, beat: Beat) -> Look:
        """Write what this tracker says of itself, and read what the others say."""
        now = sql.func.clock_timestamp()
        mine = _trackers.c.id == self.me, _trackers.c.instance == self.instance
        values = {
            "progress": beat.progress,
            "load": beat.load,
            "hosts": beat.hosts,
            "swarms": beat.swarms,
            "lag_s": beat.lag_s,
            "beat_at": now,
        }
        with self._database.transaction() as connection:
            written = connection.execute(sql.update(_trackers).where(*mine).values(**values)).rowcount == 1
            if self._beats % FORGET_EVERY_BEATS == 0:
                age_s = sql.extract("epoch", now - _trackers.c.beat_at)
                connection.execute(sql.delete(_trackers).where(age_s > FORGOTTEN_S))
                gone = _authorities.c.id.not_in(sql.select(_trackers.c.id))
                connection.execute(sql.delete(_authorities).where(gone))
                if written:
                    self._write_authorities(connection)
            self._beats += 1
            rows = _rows(connection)
            stored = _stored(connection)
        return Look(rows, stored, not written)

    def _check_authorities(self, connection: sql.Connection) -> None:
        age_s = sql.extract("epoch", sql.func.clock_timestamp() - _trackers.c.beat_at)
        others = (
            sql.select(_authorities)
            .join(_trackers, _trackers.c.id == _authorities.c.id)
            .where(_trackers.c.id != self.me, age_s < ALIVE_S)
            .order_by(_authorities.c.id)
            .limit(ROWS_MAX)
        )
        mine = frozenset(self._fingerprints())
        for row in connection.execute(others):
            theirs = _fingerprints_decoder.decode(row.fingerprints)
            if mine & theirs or mine == theirs:
                continue
            if mine and theirs:
                what = f"its access directory has another authority than that of the tracker {row.id}"
            else:
                with_access, without = (self.me, row.id) if mine else (row.id, self.me)
                what = f"the tracker {with_access} has an --access file, and the tracker {without} has none"
            raise Conflict(
                f"the tracker {self.me} cannot share a database with others: {what}",
                remedy="Give all trackers of a fleet copies of one access directory, or this one another --state",
            )

    def _write_authorities(self, connection: sql.Connection) -> None:
        body = msgspec.json.encode(sorted(self._fingerprints())).decode()
        row = insert(_authorities).values(id=self.me, fingerprints=body)
        connection.execute(row.on_conflict_do_update(index_elements=["id"], set_={"fingerprints": body}))

    def publish(self, ownership: Ownership, expected: int) -> bool:
        """Put an ownership in the place of the one of the epoch `expected`, 0 for none; returns
        whether it was still that one."""
        values = {"epoch": ownership.epoch, "body": msgspec.json.encode(ownership).decode()}
        former = _ownership.c.only == _ONLY, _ownership.c.epoch == expected
        try:
            with self._database.transaction() as connection:
                if connection.execute(sql.update(_ownership).where(*former).values(**values)).rowcount == 1:
                    return True
                if expected:
                    return False
                connection.execute(sql.insert(_ownership).values(only=_ONLY, **values))
        except IntegrityError:
            return False
        return True

    def drain(self, tracker: str, draining: bool) -> None:
        """Have a tracker give all its blobs to others, or take some again. Raises NotFound."""
        with self._database.transaction() as connection:
            changed = sql.update(_trackers).where(_trackers.c.id == tracker).values(draining=draining)
            if connection.execute(changed).rowcount != 1:
                raise NotFound(f"no tracker is called {tracker[:63]!r}", remedy="p2pdist trackers names them")

    def leave(self) -> None:
        """Remove the row of this tracker, which ends."""
        mine = _trackers.c.id == self.me, _trackers.c.instance == self.instance
        with self._database.transaction() as connection:
            connection.execute(sql.delete(_trackers).where(*mine))


def _rows(connection: sql.Connection) -> tuple[Row, ...]:
    now = sql.func.clock_timestamp()
    read = sql.select(
        _trackers,
        sql.cast(sql.extract("epoch", now - _trackers.c.beat_at), sql.Double).label("beat_s"),
        sql.cast(sql.extract("epoch", now - _trackers.c.started_at), sql.Double).label("started_s"),
    )
    latest = read.order_by(_trackers.c.beat_at.desc()).limit(ROWS_MAX)
    rows = map(_row, connection.execute(latest))
    return tuple(row for row in rows if row is not None)


def _row(row: Any) -> Row | None:
    """A row, unless no tracker of this version wrote it."""
    try:
        tracker = msgspec.convert({"id": row.id, "urls": _urls_decoder.decode(row.urls)}, Tracker)
    except UNDECODABLE:
        return None
    registered = Registered(tracker.id, tracker.urls, row.instance, row.progress, row.draining, row.load)
    return Row(registered, max(0.0, row.beat_s), max(0.0, row.started_s), row.hosts, row.swarms, row.lag_s)


def _stored(connection: sql.Connection) -> Ownership | None:
    row = connection.execute(sql.select(_ownership).where(_ownership.c.only == _ONLY)).one_or_none()
    if row is None:
        return None
    try:
        stored = _ownership_decoder.decode(row.body)
        if stored.epoch != row.epoch:  # no proposal would ever be taken
            raise ValueError(f"its epoch is {stored.epoch} and {row.epoch}")
        return stored
    except (*UNDECODABLE, ValueError) as error:
        raise Corrupt(
            f"the ownership in the trackers' database is no ownership: {' '.join(str(error).split())[:200]}",
            remedy="Delete the row of cluster_ownership",
        ) from error
