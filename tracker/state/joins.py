"""Which join token each host came by, for as long as its certificate is valid: so that no other
token takes the name of a host that lives, also when the tracker was started again, or another one
of the fleet with the same database is asked.

All methods wait for the database and may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sql
from sqlalchemy.exc import IntegrityError

from p2pdist.model.errors import Unavailable
from tracker.state.database import Database

FILE_NAME = "joins.sqlite"
TRIES_MAX = 5
PURGE_EVERY = 1000
"""After so many joins the ones with ended certificates are forgotten."""

_metadata = sql.MetaData()
_joins = sql.Table(
    "joins",
    _metadata,
    sql.Column("host", sql.String(255), primary_key=True),
    sql.Column("token", sql.String(63), nullable=False),
    sql.Column("until", sql.Double, nullable=False),
)


class JoinRecords:
    """The record of joins. `where` is that of a tracker's state (database.py). Raises Unavailable
    and UsageError."""

    def __init__(self, where: str) -> None:
        self._database = Database(where, FILE_NAME, durable=False)
        self._taken = 0
        with self._database.transaction() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(sql.text("SELECT pg_advisory_xact_lock(7071)"))
            _metadata.create_all(connection)

    def close(self) -> None:
        """Disconnect."""
        self._database.close()

    def take(self, host: str, token: str, until: float, *, now: float, holds: Callable[[str], bool]) -> str:
        """Write down that a host has a certificate by a join token until a time, in seconds since
        the epoch; returns the token by which the host is known then: another one, and nothing is
        written, while the certificate by that one is valid and the token `holds`. Raises
        Unavailable."""
        for _ in range(TRIES_MAX):
            try:
                with self._database.transaction() as connection:
                    return self._take(connection, host, token, until, now, holds)
            except IntegrityError:
                continue  # another tracker was faster
        raise Unavailable(f"the join of {host[:100]} cannot be written down", remedy="Try again")

    def _take(
        self,
        connection: sql.Connection,
        host: str,
        token: str,
        until: float,
        now: float,
        holds: Callable[[str], bool],
    ) -> str:
        self._taken += 1
        if self._taken % PURGE_EVERY == 1:
            connection.execute(sql.delete(_joins).where(_joins.c.until < now))
        found = connection.execute(sql.select(_joins).where(_joins.c.host == host).with_for_update()).one_or_none()
        if found is None:
            connection.execute(sql.insert(_joins).values(host=host, token=token, until=until))
            return token
        if found.token != token and found.until > now and holds(found.token):
            return str(found.token)
        values = {"token": token, "until": until}
        connection.execute(sql.update(_joins).where(_joins.c.host == host).values(values))
        return token
