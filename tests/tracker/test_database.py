"""The database of a tracker's state, whichever its tables are."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sql
from click.testing import CliRunner
from postgresql import server

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


_FORWARD = """
import socket, sys, threading
listener = socket.create_server(("10.79.0.1", 5432))
def copy(source, sink):
    while data := source.recv(65536):
        sink.sendall(data)
while True:
    client = listener.accept()[0]
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    for pair in ((client, server), (server, client)):
        threading.Thread(target=copy, args=pair, daemon=True).start()
"""
_ASK = """
import sys, time
import sqlalchemy as sql
from p2pdist.model.errors import Unavailable
from tracker.state.database import Database
database = Database("postgresql://tracker@10.79.0.1/postgres", "")
for number in range(2):
    began_at = time.monotonic()
    try:
        with database.transaction() as connection:
            connection.execute(sql.text("SELECT 7"))
            answer = "right"
    except Unavailable:
        answer = "unavailable"
    print(answer, round(time.monotonic() - began_at), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.root
@pytest.mark.slow
def test_a_server_that_is_cut_off_without_a_word_is_given_up_soon() -> None:
    """As one that lost its power. A tracker waited for the kernel, a quarter of an hour, also where
    another server had its address by then."""
    here, there = (f"pddb-{os.getpid()}-{side}" for side in ("tracker", "server"))
    processes: list[subprocess.Popen[str]] = []

    def spawn(namespace: str, *words: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", namespace, sys.executable, "-c", *words]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    with server() as postgresql:
        try:
            for namespace in (here, there):
                ip("netns", "add", namespace)
            ip("-n", here, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", there)
            for namespace, address in ((here, "10.79.0.2/24"), (there, "10.79.0.1/24")):
                ip("-n", namespace, "address", "add", address, "dev", "eth0")
                ip("-n", namespace, "link", "set", "eth0", "up")
            spawn(there, _FORWARD, str(postgresql.socket))
            asking = spawn(here, _ASK)
            assert asking.stdin is not None and asking.stdout is not None
            for _ in range(100):
                if (answer := asking.stdout.readline()).startswith("right"):
                    break
                time.sleep(0.05)
                asking = spawn(here, _ASK)
                assert asking.stdin is not None and asking.stdout is not None
            assert answer.startswith("right")
            ip("-n", there, "link", "set", "eth0", "down")
            answer, _ = asking.communicate("\n\n", timeout=120)
            assert answer.startswith("unavailable")
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for namespace in (here, there):
                subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def test_what_the_database_cannot_hold_is_a_mistake_of_the_request(postgresql_server: str) -> None:
    """And no reason to look after the database."""
    database = HistoryDatabase(postgresql_server)
    with pytest.raises(UsageError, match="NUL"):
        database.read(HistoryFilter(host="\0"))
    with pytest.raises(UsageError, match="NUL"):
        PreseedDatabase(postgresql_server).change("\0", lambda record: record)
    database.close()
