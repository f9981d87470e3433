"""Work in threads: what one returns for whom nobody waits any more is undone."""

import asyncio
import threading
import time
from contextlib import suppress

import pytest

from p2pdist.agent.tasks import in_thread


async def test_what_a_thread_returns_after_its_caller_was_cancelled_is_undone() -> None:
    go_on, undone = threading.Event(), asyncio.Queue[int]()

    def work() -> int:
        assert go_on.wait(60)
        return 7

    waiting = asyncio.create_task(in_thread(work, undone.put_nowait))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    assert undone.empty()
    go_on.set()
    async with asyncio.timeout(60):
        assert await undone.get() == 7


async def test_what_it_returns_or_raises_in_time_is_given_to_the_caller() -> None:
    undone = list[int]()
    assert await in_thread(lambda: 7, undone.append) == 7
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0, undone.append)
    assert not undone


async def test_a_failure_of_which_nobody_waits_is_no_defect() -> None:
    failures = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    go_on, failed = threading.Event(), threading.Event()

    def work() -> None:
        go_on.wait(60)
        failed.set()
        raise OSError

    waiting = asyncio.create_task(in_thread(work, print))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    go_on.set()
    assert await asyncio.to_thread(failed.wait, 60)
    await asyncio.sleep(0.05)
    del waiting
    assert not failures


def test_the_end_of_the_loop_is_no_defect() -> None:
    """It cancels what waits for the thread as well."""
    failures, undone = list[object](), list[int]()

    def work() -> int:
        time.sleep(0.1)
        return 7

    async def begin() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        waiting.append(asyncio.create_task(in_thread(work, undone.append)))
        await asyncio.sleep(0.01)

    waiting = list[asyncio.Task[int]]()
    asyncio.run(begin())
    assert waiting[0].cancelled() and not failures and not undone
