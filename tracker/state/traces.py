"""Recordings of starts in a database, so that traces outlive a tracker, and trackers with one
database share them: SQLite for one tracker, PostgreSQL for several.

All methods wait for the database and may be called from any thread; they raise Unavailable when it
does not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import sqlalchemy as sql
from sqlalchemy.exc import IntegrityError

from p2pdist.model.errors import Unavailable
from tracker.state.database import Database, Given, Result

FILE_NAME = "traces.sqlite"
READ_MAX = 1 << 15
"""Recordings that are read at once, the newest: as many as a tracker keeps."""

TRIES_MAX = 5

Row = tuple[str, str, str, float, bytes]
"""Package, entry point, host, when it was stated in seconds since the epoch, and the encoded
trace."""

_metadata = sql.MetaData()
_recordings = sql.Table(
    "trace_recordings",
    _metadata,
    sql.Column("package", sql.String(512), primary_key=True),
    sql.Column("entry", sql.String(128), primary_key=True),
    sql.Column("host", sql.String(320), primary_key=True),
    sql.Column("stated_at", sql.Double, nullable=False),
    sql.Column("data", sql.LargeBinary, nullable=False),
)


class TraceRecords:
    """The recordings that are kept. `where` is that of a tracker's state (database.py). Raises
    Unavailable and UsageError."""

    def __init__(self, where: str) -> None:
        self._database = Database(where, FILE_NAME, durable=False)
        self.shared = self._database.shared
        with self._database.transaction() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(sql.text("SELECT pg_advisory_xact_lock(7072)"))
            _metadata.create_all(connection)

    def close(self) -> None:
        """Disconnect."""
        self._database.close()

    async def call(self, work: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Result:
        """What `work`, one of these methods, returns; on the event loop (Database.call)."""
        return await self._database.call(work, *given, **named)

    def read(self, since: float = 0.0) -> list[Row]:
        """The recordings that were stated from a time on, the newest READ_MAX of them."""
        columns = _recordings.c
        newest = sql.select(_recordings).where(columns.stated_at >= since).order_by(columns.stated_at.desc())
        with self._database.transaction() as connection:
            rows = connection.execute(newest.limit(READ_MAX)).all()
        return [(row.package, row.entry, row.host, row.stated_at, bytes(row.data)) for row in rows]

    def write(self, row: Row, forgotten: Iterable[tuple[str, str, str]] = ()) -> None:
        """Write a recording over that of the same host, and remove others, by package, entry point
        and host."""
        for _ in range(TRIES_MAX):
            try:
                with self._database.transaction() as connection:
                    for gone in (row[:3], *forgotten):
                        self._delete(connection, gone)
                    connection.execute(
                        sql.insert(_recordings).values(
                            dict(zip(("package", "entry", "host", "stated_at", "data"), row, strict=True))
                        )
                    )
                return
            except IntegrityError:
                continue  # another tracker was faster
        raise Unavailable(f"a trace of {row[0][:100]} cannot be written down", remedy="Try again")

    def remove(self, forgotten: Iterable[tuple[str, str, str]]) -> None:
        """Remove recordings, by package, entry point and host."""
        with self._database.transaction() as connection:
            for gone in forgotten:
                self._delete(connection, gone)

    @staticmethod
    def _delete(connection: sql.Connection, gone: tuple[str, str, str]) -> None:
        columns = _recordings.c
        same = (columns.package == gone[0], columns.entry == gone[1], columns.host == gone[2])
        connection.execute(sql.delete(_recordings).where(*same))
