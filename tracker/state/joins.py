"""Which join token each host came by, for as long as its certificate is valid: so that no other
token takes the name of a host that lives, also when the tracker was started again, or another one
of the fleet with the same database is asked.

All methods wait for the database and may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sqlalchemy as sql
from sqlalchemy.exc import IntegrityError

from p2pdist.credentials.authority import BACKDATED_S, CERTIFICATE_S
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


@dataclass(frozen=True, slots=True)
class JoinEntry:
    """A host has a certificate by the join token of an id until a time, in seconds since the
    epoch."""

    host: str
    token: str
    until: float


def is_valid(until: float, *, now: float) -> bool:
    """Whether a certificate of the fleet that ends then is valid. One that ends later than any that
    could have been made by now was made while the tracker's clock was ahead."""
    return now < until <= now + CERTIFICATE_S + BACKDATED_S


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

    def take(self, entries: Sequence[JoinEntry], *, now: float, holds: Callable[[str], bool]) -> list[str]:
        """Write down, in one transaction, that hosts have certificates; returns for each entry the
        token by which its host is known then: another one, and nothing is written, while the
        certificate by that one is valid at `now` and the token `holds`. Entries of one host count
        one after the other. Raises Unavailable."""
        for _ in range(TRIES_MAX):
            try:
                with self._database.transaction() as connection:
                    return self._take(connection, entries, now, holds)
            except IntegrityError:
                continue  # another tracker was faster
        hosts = ", ".join(entry.host[:100] for entry in entries[:3])
        raise Unavailable(f"the joins of {hosts} cannot be written down", remedy="Try again")

    def _take(
        self, connection: sql.Connection, entries: Sequence[JoinEntry], now: float, holds: Callable[[str], bool]
    ) -> list[str]:
        if self._taken // PURGE_EVERY != (self._taken + len(entries)) // PURGE_EVERY or not self._taken:
            connection.execute(sql.delete(_joins).where(_joins.c.until < now))
        self._taken += len(entries)
        hosts = sorted({entry.host for entry in entries})
        # In one order of rows, so that trackers do not wait for each other in a circle.
        found = connection.execute(_known, {"hosts": hosts}).all()
        known = {row.host: JoinEntry(row.host, row.token, row.until) for row in found}
        before, tokens = dict(known), []
        for entry in entries:
            last = known.get(entry.host, entry)
            if last.token == entry.token or not is_valid(last.until, now=now) or not holds(last.token):
                known[entry.host] = last = entry
            tokens.append(last.token)
        if fresh := [_values(known[host]) for host in hosts if host not in before]:
            connection.execute(sql.insert(_joins), fresh)
        if changed := [_values(known[host]) for host in hosts if host in before and known[host] != before[host]]:
            connection.execute(_change, [{f"the_{name}": value for name, value in row.items()} for row in changed])
        return tokens


_known = (
    sql.select(_joins)
    .where(_joins.c.host.in_(sql.bindparam("hosts", expanding=True)))
    .order_by(_joins.c.host)
    .with_for_update()
)
_change = (
    sql.update(_joins)
    .where(_joins.c.host == sql.bindparam("the_host"))
    .values(token=sql.bindparam("the_token"), until=sql.bindparam("the_until"))
)


def _values(entry: JoinEntry) -> dict[str, object]:
    return {"host": entry.host, "token": entry.token, "until": entry.until}
