"""Which hosts operators drain, so that a tracker that starts anew, or one of the fleet with the
same database that did not hear of it, drains them as well.

All methods wait for the database and may be called from any thread; they raise Unavailable when it
does not answer.
"""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sql
from sqlalchemy.dialects import postgresql, sqlite

from tracker.state.database import Database

FILE_NAME = "drains.sqlite"

_metadata = sql.MetaData()
_hosts = sql.Table("drained_hosts", _metadata, sql.Column("host", sql.String(255), primary_key=True))


class DrainRecords:
    """Names of drained hosts. `where` is that of a tracker's state (database.py). Raises
    Unavailable and UsageError."""

    def __init__(self, where: str) -> None:
        self._database = Database(where, FILE_NAME)
        self.shared = self._database.shared
        with self._database.transaction() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(sql.text("SELECT pg_advisory_xact_lock(7075)"))
            _metadata.create_all(connection)

    def close(self) -> None:
        """Disconnect."""
        self._database.close()

    def names(self, most: int) -> set[str]:
        """The drained hosts, at most so many, the first ones by name."""
        with self._database.transaction() as connection:
            return set(connection.execute(sql.select(_hosts.c.host).order_by(_hosts.c.host).limit(most)).scalars())

    def write(self, orders: Iterable[tuple[str, bool]]) -> None:
        """Note of hosts whether they are drained, all or none."""
        with self._database.transaction() as connection:
            insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
            for host, drained in orders:
                if drained:
                    connection.execute(insert(_hosts).values(host=host).on_conflict_do_nothing())
                else:
                    connection.execute(sql.delete(_hosts).where(_hosts.c.host == host))
