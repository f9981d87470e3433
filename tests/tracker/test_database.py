"""The database of a tracker's state, whichever its tables are."""

from __future__ import annotations

import threading
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sql
from click.testing import CliRunner

from p2pdist.cli.verbs.tracker import command
from p2pdist.model.errors import Unavailable, UsageError
from p2pdist.model.history import HistoryFilter
from tracker.state.database import Database
from tracker.state.history import HistoryDatabase
from tracker.state.preseeds import PreseedDatabase


def test_a_transaction_ends_before_a_database_in_memory_is_gone() -> None:
    database = Database("", "any")
    inside, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    answers: list[object] = []

    def ask() -> None:
        with database.transaction() as connection:
            inside.set()
            assert go_on.wait(30)
            answers.append(connection.execute(sql.text("SELECT 7")).scalar_one())

    def close() -> None:
        database.close()
        closed.set()

    threads = [threading.Thread(target=work) for work in (ask, close)]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    early = closed.wait(0.2)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert (early, answers, closed.is_set()) == (False, [7], True)


@pytest.mark.parametrize("where", ["postgres+psycopg://t:secret@db/p2pdist", "mysql://t:secret@db/p2pdist"])
def test_a_url_of_another_database_is_no_directory(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trackers given one such URL would each go on alone, with a directory of its name."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(command, ["--state", where, "--alone", "--networks", "none"])
    assert isinstance(done.exception, UsageError)
    assert "is of no database that trackers use" in done.exception.what
    assert "secret" not in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_a_server_that_takes_no_writes_is_turned_from(postgresql_server: str) -> None:
    """As after a fail-over: the connection to the server before stays, and that one is only read
    from, while new ones lead to another."""
    with psycopg.connect(postgresql_server, autocommit=True) as admin:
        admin.execute("CREATE TABLE IF NOT EXISTS written (number int)")
        admin.execute("ALTER ROLE tracker SET default_transaction_read_only = on")
        try:
            database = Database(postgresql_server, "")
            with pytest.raises(Unavailable, match="read-only"), database.transaction() as connection:
                connection.execute(sql.text("INSERT INTO written VALUES (1)"))
        finally:
            admin.execute("ALTER ROLE tracker RESET default_transaction_read_only")
    with database.transaction() as connection:
        connection.execute(sql.text("INSERT INTO written VALUES (1)"))
    database.close()


def test_what_the_database_cannot_hold_is_a_mistake_of_the_request(postgresql_server: str) -> None:
    """And no reason to look after the database."""
    database = HistoryDatabase(postgresql_server)
    with pytest.raises(UsageError, match="NUL"):
        database.read(HistoryFilter(host="\0"))
    with pytest.raises(UsageError, match="NUL"):
        PreseedDatabase(postgresql_server).change("\0", lambda record: record)
    database.close()
