"""Where a tracker's state is: PostgreSQL for several trackers, SQLite files of one, or memory.

Files are for the tracker's user alone: they name packages, owners and hosts.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import sqlalchemy as sql
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from p2pdist.model.errors import Unavailable, UsageError
from tracker.state.files import StateDamaged, is_damage, make_private

CONNECT_TIMEOUT_S = 10
STATEMENT_TIMEOUT_MS = 15_000
SILENCE = {"tcp_user_timeout": 10_000, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}
"""Parameters of libpq, ms and s: a connection is given up once its peer has acknowledged nothing
for about ten seconds. The kernel's own limits are a quarter of an hour while something is to be
sent, and hours while an answer is awaited: so long a server that lost its power, or its address to
another one, would keep a tracker from its database."""

MEMORY = "in memory"
"""How a database is called that lasts as long as the object."""

READ_ONLY = "25006"
"""What PostgreSQL calls a write to a server that takes none (read_only_sql_transaction)."""

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Database:
    """A database. `where` is a PostgreSQL URL, a directory for SQLite, in which `name` is its
    file, or empty: then it lasts as long as the object. Thread-safe."""

    def __init__(self, where: str, name: str, *, durable: bool = True) -> None:
        """`durable`: what was written outlives a crash of the machine."""
        self.shared = is_postgresql(where)
        self._lock = threading.RLock()
        self._thread = ThreadPoolExecutor(1, "database")
        self._engine, self._where = _engine(where, name, durable=durable)

    def close(self) -> None:
        """Disconnect. A transaction that runs in another thread ends first where the database is in
        memory: its one connection would be freed below it, and the process would crash. Others it
        gives back later, and they may hang."""
        with nullcontext() if self._where != MEMORY else self._lock:
            self._engine.dispose()

    async def call(self, work: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Result:
        """What `work` returns, which waits for this database: in a thread of its own. Many at once
        that wait for one that hangs would take all threads that the rest of the tracker shares."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *given, **named))

    @contextmanager
    def transaction(self) -> Iterator[sql.Connection]:
        """A transaction, of one thread at a time. Raises IntegrityError, UsageError for a value
        that the database cannot hold, as PostgreSQL no NUL in a text, and Unavailable where it does
        not answer, or StateDamaged where its file is no longer one."""
        try:
            with self._lock, self._engine.begin() as connection:
                yield connection
        except IntegrityError:
            raise
        except DataError as error:
            cause = " ".join(str(error.orig).split())[:300]
            raise UsageError(f"the tracker's database cannot hold that: {cause}") from error
        except SQLAlchemyError as error:
            original = getattr(error, "orig", None)
            if is_damage(original):
                raise StateDamaged(self._where, original) from error
            if getattr(original, "sqlstate", "") == READ_ONLY:
                # Another server may take writes at this address by now, and a connection to the
                # one before it stays what it is.
                self._engine.dispose()
            cause = " ".join(str(original or error).split())[:300]
            if "disk is full" in cause:  # of SQLite; PostgreSQL says that itself
                raise Unavailable(
                    f"the tracker's database {self._where} has no room left: {cause}", remedy="Free some space there"
                ) from error
            raise Unavailable(
                f"the tracker's database {self._where} does not answer: {cause}", remedy="Check it, and --state"
            ) from error


def is_postgresql(where: str) -> bool:
    """Whether the state is in PostgreSQL."""
    return where.startswith(("postgresql://", "postgres://"))


def _engine(where: str, name: str, *, durable: bool) -> tuple[sql.Engine, str]:
    """The engine, and how to call the database where people read it: without its password."""
    if not is_postgresql(where):
        return _sqlite(where, name, durable=durable)
    try:
        url = sql.make_url(where).set(drivername="postgresql+psycopg")
        options = f"-c statement_timeout={STATEMENT_TIMEOUT_MS}"
        engine = sql.create_engine(
            url,
            pool_pre_ping=True,
            pool_size=2,
            connect_args={
                "connect_timeout": CONNECT_TIMEOUT_S,
                "options": options,
                **{name: value for name, value in SILENCE.items() if name not in url.query},
            },
        )
    except SQLAlchemyError as error:
        raise UsageError(
            "the --state is not the URL of a database", remedy="Write postgresql://user@host/name"
        ) from error
    except ImportError as error:
        raise UsageError(
            "psycopg, which talks to PostgreSQL, is not installed", remedy="pip install psycopg"
        ) from error
    shown = url.difference_update_query([name for name in url.query if "password" in name.lower()])
    return engine, shown.render_as_string(hide_password=True).replace("+psycopg", "", 1)


def _sqlite(where: str, name: str, *, durable: bool) -> tuple[sql.Engine, str]:
    if not where:
        return sql.create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}), MEMORY
    path = Path(where) / name
    try:
        make_private(path)
    except OSError as error:
        raise UsageError(f"the tracker cannot keep its state in {where}: {error.strerror}") from error
    engine = sql.create_engine(
        sql.URL.create("sqlite", database=str(path)), connect_args={"timeout": CONNECT_TIMEOUT_S}
    )

    def prepare(connection: Any, _record: object) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")

    sql.event.listen(engine, "connect", prepare)
    return engine, str(path)
