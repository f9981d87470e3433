"""Preseeds in a database: SQLite for one tracker, PostgreSQL for several.

Orders must outlive trackers, so a record is in the database before a host or caller hears of it.
Several trackers change records without locks: each names the version that it read, and a change
whose version is no longer there is not made (optimistic concurrency control, Kung and Robinson,
1981); the caller gets what is there instead.

The database also holds soft state: each tracker counts its beats, and reports how far its own hosts
are. A tracker that does not beat for STALE_BEATS exchanges of another is taken for gone by that
one, whatever the clocks of the two say. Deadlines are compared by the database's clock.

All methods wait for the database and may be called from any thread; they raise Unavailable when it
does not answer.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import sqlalchemy as sql
from sqlalchemy.exc import IntegrityError

from p2pdist.model.digest import Digest
from p2pdist.model.errors import UNDECODABLE, Conflict, Unavailable, printable
from p2pdist.model.preseed import Call, PreseedRecord, PreseedRequest, PreseedState
from tracker.state.database import Database, Given, Result

FILE_NAME = "preseeds.sqlite"
ENDED_KEPT_S = 86400.0
"""How long it can be asked how a preseed ended."""

STALE_BEATS = 10
TRIES_MAX = 20
"""Times that a change is made anew because another tracker was faster."""

FETCHED_AT_ONCE = 500

logger = logging.getLogger(__name__)

_metadata = sql.MetaData()
_preseeds = sql.Table(
    "preseeds",
    _metadata,
    sql.Column("id", sql.String(128), primary_key=True),
    sql.Column("version", sql.Integer, nullable=False),
    sql.Column("body", sql.Text, nullable=False),
    sql.Column("package", sql.Text, nullable=False),
    sql.Column("blobs", sql.Text, nullable=False),
    sql.Column("state", sql.String(16), nullable=False),
    sql.Column("picked", sql.Text, nullable=False),
    sql.Column("created_at", sql.Double, nullable=False),
    sql.Column("deadline_at", sql.Double),
    sql.Column("expires_at", sql.Double),
    sql.Column("done_at", sql.Double),
    sql.Column("ended_at", sql.Double),
    sql.Column("owner", sql.String(320)),
    sql.Column("call", sql.Text),
    sql.Column("source", sql.String(64)),
)
_trackers = sql.Table(
    "trackers",
    _metadata,
    sql.Column("tracker", sql.String(64), primary_key=True),
    sql.Column("beat", sql.BigInteger, nullable=False),
)
_reports = sql.Table(
    "preseed_hosts",
    _metadata,
    sql.Column("tracker", sql.String(64), primary_key=True),
    sql.Column("id", sql.String(128), primary_key=True),
    sql.Column("revision", sql.BigInteger, nullable=False),
    sql.Column("hosts", sql.Text, nullable=False),
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """News of the database: records that differ from the known ones, the ids of all, and the
    reports (JSON) of the other trackers that live, by tracker and preseed. `epoch_s`: when this
    process's monotonic clock began, in seconds since the epoch by the database's clock; None where
    no other tracker has the database."""

    records: tuple[PreseedRecord, ...]
    ids: frozenset[str]
    reports: Mapping[str, Mapping[str, str]]
    epoch_s: float | None = None


class PreseedDatabase:
    """Records of preseeds and reports of trackers. `where` is a PostgreSQL URL, a directory for
    SQLite, or empty: then the database lasts as long as the object."""

    def __init__(self, where: str) -> None:
        self._database = Database(where, FILE_NAME)
        self.shared = self._database.shared
        self._tracker = secrets.token_hex(8)
        self._beat = 0
        self._exchanges = 0
        self._heard: dict[str, tuple[int, int]] = {}
        self._theirs: dict[tuple[str, str], tuple[int, str]] = {}
        self._ours: dict[str, str] = {}
        self._unreadable: set[str] = set()
        """Ids of records that were told of."""
        with self._database.transaction() as connection:
            _create_tables(connection)

    def close(self) -> None:
        """Remove the reports of this tracker, if the database answers, and disconnect."""
        try:
            if self.shared:
                with self._database.transaction() as connection:
                    connection.execute(sql.delete(_reports).where(_reports.c.tracker == self._tracker))
                    connection.execute(sql.delete(_trackers).where(_trackers.c.tracker == self._tracker))
        except Unavailable as error:
            logger.warning("the other trackers notice by themselves that this one ends: %s", error)
        finally:
            self._database.close()

    async def call(self, work: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Result:
        """What `work`, one of these methods, returns; on the event loop (Database.call)."""
        return await self._database.call(work, *given, **named)

    def epoch_s(self) -> float | None:
        """When this process's monotonic clock began, by the database's clock (Exchange)."""
        if not self.shared:
            return None
        with self._database.transaction() as connection:
            return _epoch_s(connection)

    # -- records

    def read(self, identifier: str) -> PreseedRecord | None:
        with self._database.transaction() as connection:
            return _read(connection, identifier)

    def read_all(self) -> list[PreseedRecord]:
        with self._database.transaction() as connection:
            return self._readable(connection.execute(sql.select(_preseeds)))

    def insert(self, record: PreseedRecord) -> PreseedRecord:
        """Add a record, of version 1, unless there is one with its id; returns what is there
        then."""
        record = replace(record, version=1)
        try:
            with self._database.transaction() as connection:
                connection.execute(sql.insert(_preseeds).values(_row(record)))
            return record
        except IntegrityError:
            found = self.read(record.id)
            return found if found is not None else self.insert(record)

    def replace(self, record: PreseedRecord) -> PreseedRecord | None:
        """Write a record over the version that it was made from. Returns what is there then: the
        record with its new version, or that of a faster tracker; None when it was removed."""
        written = replace(record, version=record.version + 1)
        change = sql.update(_preseeds).where(_preseeds.c.id == record.id, _preseeds.c.version == record.version)
        with self._database.transaction() as connection:
            if connection.execute(change.values(_row(written))).rowcount == 1:
                return written
            return _read(connection, record.id)

    def change(self, identifier: str, make: Callable[[PreseedRecord], PreseedRecord]) -> PreseedRecord | None:
        """Write what `make` makes of a record, anew whenever another tracker was faster; None when
        there is no such record."""
        found = self.read(identifier)
        for _ in range(TRIES_MAX):
            if found is None:
                return None
            wanted = make(found)
            if wanted == found:
                return found
            version = found.version
            found = self.replace(wanted)
            if found is not None and found == replace(wanted, version=version + 1):
                return found
        raise Conflict(f"the preseed {identifier} is being changed all the time", remedy="Try again")

    def purge(self, *, now: float) -> None:
        """Remove records of preseeds that ended ENDED_KEPT_S ago."""
        with self._database.transaction() as connection:
            connection.execute(sql.delete(_preseeds).where(_preseeds.c.ended_at < now - ENDED_KEPT_S))

    # -- several trackers

    def exchange(self, versions: Mapping[str, int], ours: Mapping[str, str]) -> Exchange:
        """Report how far our hosts are (JSON by preseed), and find out what is new. `versions` are
        those of the known records."""
        try:
            return self._exchange(versions, ours)
        except Unavailable:
            self._ours = {}  # what was written of it is not known
            raise

    def _exchange(self, versions: Mapping[str, int], ours: Mapping[str, str]) -> Exchange:
        with self._database.transaction() as connection:
            epoch_s = _epoch_s(connection) if self.shared else None
            if self.shared:
                self._report(connection, ours)
            present = {
                row.id: row.version for row in connection.execute(sql.select(_preseeds.c.id, _preseeds.c.version))
            }
            fresh = [identifier for identifier, version in present.items() if versions.get(identifier) != version]
            records: list[PreseedRecord] = []
            for start in range(0, len(fresh), FETCHED_AT_ONCE):
                wanted = _preseeds.c.id.in_(fresh[start : start + FETCHED_AT_ONCE])
                records += self._readable(connection.execute(sql.select(_preseeds).where(wanted)))
            reports = self._read_reports(connection) if self.shared else {}
        return Exchange(tuple(records), frozenset(present), reports, epoch_s)

    def _readable(self, rows: Iterable[Any]) -> list[PreseedRecord]:
        """The records that this release can read. Another one is left as it is, for a release that
        can, and told of once: one order must not keep a tracker from all others."""
        records = []
        for row in rows:
            try:
                records.append(_record(row))
            except Unavailable as error:
                if row.id not in self._unreadable:
                    logger.error("%s", error)
                self._unreadable.add(row.id)
        return records

    def _report(self, connection: sql.Connection, ours: Mapping[str, str]) -> None:
        self._beat += 1
        values = {"tracker": self._tracker, "beat": self._beat}
        if not self._put(connection, _trackers, ("tracker",), values):
            self._ours = {}  # another tracker took this one for gone, and removed its reports
        for identifier, hosts in ours.items():
            if self._ours.get(identifier) != hosts:
                values = {"tracker": self._tracker, "id": identifier, "revision": time.time_ns(), "hosts": hosts}
                self._put(connection, _reports, ("tracker", "id"), values)
        mine = _reports.c.tracker == self._tracker
        for identifier in self._ours.keys() - ours.keys():
            connection.execute(sql.delete(_reports).where(mine, _reports.c.id == identifier))
        self._ours = dict(ours)

    @staticmethod
    def _put(connection: sql.Connection, table: sql.Table, keys: tuple[str, ...], values: dict[str, Any]) -> bool:
        """Write a row that only this tracker writes; returns whether it was there."""
        same = [table.c[key] == values[key] for key in keys]
        if connection.execute(sql.update(table).where(*same).values(values)).rowcount:
            return True
        connection.execute(sql.insert(table).values(values))
        return False

    def _read_reports(self, connection: sql.Connection) -> dict[str, dict[str, str]]:
        self._exchanges += 1
        beats = {
            row.tracker: row.beat for row in connection.execute(sql.select(_trackers)) if row.tracker != self._tracker
        }
        for tracker, beat in beats.items():
            known = self._heard.get(tracker)
            if known is None or known[0] != beat:
                self._heard[tracker] = beat, self._exchanges
        self._heard = {tracker: heard for tracker, heard in self._heard.items() if tracker in beats}
        stale = [name for name, (_, beat_at) in self._heard.items() if self._exchanges - beat_at >= STALE_BEATS]
        for tracker in stale:
            connection.execute(sql.delete(_reports).where(_reports.c.tracker == tracker))
            connection.execute(sql.delete(_trackers).where(_trackers.c.tracker == tracker))
            del self._heard[tracker]
        revisions = sql.select(_reports.c.tracker, _reports.c.id, _reports.c.revision).where(
            _reports.c.tracker != self._tracker
        )
        theirs: dict[tuple[str, str], tuple[int, str]] = {}
        for row in connection.execute(revisions).all():
            key = row.tracker, row.id
            if row.tracker not in self._heard:
                continue
            known_text = self._theirs.get(key)
            if known_text is None or known_text[0] != row.revision:
                wanted = sql.select(_reports.c.revision, _reports.c.hosts).where(
                    _reports.c.tracker == key[0], _reports.c.id == key[1]
                )
                found = connection.execute(wanted).one_or_none()
                known_text = (found.revision, found.hosts) if found is not None else None
            if known_text is not None:
                theirs[key] = known_text
        self._theirs = theirs
        reports: dict[str, dict[str, str]] = {tracker: {} for tracker in self._heard}
        for (tracker, identifier), (_, hosts) in theirs.items():
            reports[tracker][identifier] = hosts
        return reports


def _epoch_s(connection: sql.Connection) -> float:
    asked_at = time.monotonic()
    database_s = connection.execute(
        sql.text("SELECT CAST(extract(epoch FROM clock_timestamp()) AS float8)")
    ).scalar_one()
    return float(database_s) - (asked_at + time.monotonic()) / 2


def _create_tables(connection: sql.Connection) -> None:
    """Several trackers may come first at the same moment."""
    if connection.dialect.name == "postgresql":
        connection.execute(sql.text("SELECT pg_advisory_xact_lock(7070)"))
    _metadata.create_all(connection)
    present = {column["name"] for column in sql.inspect(connection).get_columns(_preseeds.name)}
    for name, kind in (("owner", "VARCHAR(320)"), ("call", "TEXT"), ("source", "VARCHAR(64)")):
        if name not in present:  # made by an earlier version
            connection.execute(sql.text(f'ALTER TABLE preseeds ADD COLUMN "{name}" {kind}'))


def _row(record: PreseedRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "version": record.version,
        "body": record.body,
        "package": record.package,
        "blobs": msgspec.json.encode(record.blobs).decode(),
        "state": record.state,
        "picked": msgspec.json.encode(record.picked).decode(),
        "created_at": record.created_at,
        "deadline_at": record.deadline_at,
        "expires_at": record.expires_at,
        "done_at": record.done_at,
        "ended_at": record.ended_at,
        "owner": record.owner,
        "call": msgspec.json.encode(record.call).decode() if record.call is not None else None,
        "source": record.source,
    }


def _record(row: Any) -> PreseedRecord:
    """The record of a row. Raises Unavailable for one that is damaged, or of a later release."""
    try:
        msgspec.json.decode(row.body, type=PreseedRequest)
        msgspec.convert(row.state, PreseedState)
        return _decoded(row)
    except (*UNDECODABLE, TypeError) as error:
        raise Unavailable(
            f"the preseed {printable(str(row.id))} in the tracker's state cannot be read: {error}",
            remedy="Run the release that wrote it, or order what it is for anew",
        ) from error


def _decoded(row: Any) -> PreseedRecord:
    return PreseedRecord(
        row.id,
        row.version,
        row.body,
        row.package,
        msgspec.json.decode(row.blobs, type=tuple[tuple[Digest, int], ...]),
        row.state,
        row.created_at,
        msgspec.json.decode(row.picked, type=tuple[str, ...]),
        row.deadline_at,
        row.expires_at,
        row.done_at,
        row.ended_at,
        row.owner or "",
        msgspec.json.decode(row.call, type=Call) if row.call else None,
        row.source or "",
    )


def _read(connection: sql.Connection, identifier: str) -> PreseedRecord | None:
    row = connection.execute(sql.select(_preseeds).where(_preseeds.c.id == identifier)).one_or_none()
    return _record(row) if row is not None else None
