"""The database of a tracker's state, whichever its tables are."""

from __future__ import annotations

import threading

import sqlalchemy as sql

from tracker.state.database import Database


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
