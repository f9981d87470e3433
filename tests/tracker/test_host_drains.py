"""Which hosts are drained outlives trackers, and all that share a PostgreSQL drain them alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg
import pytest
from waits import until

from tracker.hosts import drains as drains_module
from tracker.hosts.drains import Drains
from tracker.state.drains import DrainRecords


class Place:
    """A tracker's part in drains: the hosts that its fleet has drained."""

    def __init__(self, where: str) -> None:
        self.drained: dict[str, None] = {}
        self.drains = Drains(DrainRecords(where), self._apply, self.drained)

    def _apply(self, host: str, drained: bool) -> None:
        if drained:
            self.drained[host] = None
        else:
            del self.drained[host]


@asynccontextmanager
async def running(where: str) -> AsyncIterator[Place]:
    place = Place(where)
    await place.drains.load()
    clock = asyncio.create_task(place.drains.run())
    try:
        yield place
    finally:
        clock.cancel()
        await place.drains.close()


@pytest.fixture
def url(postgresql_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(drains_module, "LOOK_S", 0.02)
    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS drained_hosts, elsewhere")
    return postgresql_server


async def test_a_tracker_that_starts_anew_drains_what_was_drained(tmp_path: Path) -> None:
    async with running(str(tmp_path)) as place:
        assert not await place.drains.order("h1", True), "no other tracker shares the file"
        await place.drains.order("h2", True)
        await place.drains.order("h3", True)
        await place.drains.order("h2", False)
    async with running(str(tmp_path)) as place:
        assert set(place.drained) == {"h1", "h3"}


async def test_what_one_tracker_is_told_holds_at_all(url: str) -> None:
    """Also at one that was away when it was said."""
    async with running(url) as one, running(url) as two:
        assert await one.drains.order("h1", True)
        await until(lambda: set(two.drained) == {"h1"}, "the other tracker drains it")
        await two.drains.order("h1", False)
        await two.drains.order("h2", True)
        await until(lambda: set(one.drained) == {"h2"}, "the first one follows")
        async with running(url) as late:
            assert set(late.drained) == {"h2"}


async def test_an_order_holds_while_the_database_is_away_and_is_written_later(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(url) as one, running(url) as two:
        await one.drains.order("h0", True)
        await until(lambda: "h0" in two.drained)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("ALTER TABLE drained_hosts RENAME TO elsewhere")
            assert not await one.drains.order("h1", True)
            assert not await one.drains.order("h0", False)
            assert set(one.drained) == {"h1"} and "h1" in caplog.text and "not written down yet" in caplog.text
            connection.execute("ALTER TABLE elsewhere RENAME TO drained_hosts")
        await until(lambda: set(two.drained) == {"h1"})
        assert set(one.drained) == {"h1"}


async def test_an_order_of_the_moment_is_not_undone_by_what_was_read_before_it(url: str) -> None:
    """Orders and looks take turns in no order that a tracker knows."""
    async with running(url) as one:
        for turn in range(40):
            await one.drains.order("h1", turn % 2 == 0)
            assert ("h1" in one.drained) == (turn % 2 == 0)
            await asyncio.sleep(0)
            assert ("h1" in one.drained) == (turn % 2 == 0)


async def test_a_database_that_hangs_keeps_no_tracker_from_its_end(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though an order is not written yet."""
    monkeypatch.setattr(drains_module, "STOP_S_MAX", 0.1)
    place = Place(url)
    with psycopg.connect(url) as other:
        other.execute("LOCK TABLE drained_hosts IN ACCESS EXCLUSIVE MODE")
        order = asyncio.create_task(place.drains.order("h1", True))
        async with asyncio.timeout(10):
            await until(lambda: "h1" in place.drained)
            await place.drains.close()
    order.cancel()
    await asyncio.gather(order, return_exceptions=True)


async def test_what_the_database_cannot_hold_ends_no_following(url: str) -> None:
    """A name is checked before; a database of another encoding may still not take it."""
    async with running(url) as one, running(url) as two:
        assert not await one.drains.order("h\0", True)
        await two.drains.order("h1", True)
        del one.drains._unwritten["h\0"]
        await until(lambda: "h1" in one.drained)
