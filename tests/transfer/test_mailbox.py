"""The mailbox between receiver threads and the event loop loses nothing and wakes the loop
rarely."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from waits import LoopClock, until

from p2pdist.transfer.stream.events import Mailbox


async def test_every_letter_arrives_once_and_in_its_thread_s_order() -> None:
    got: list[tuple[int, int]] = []
    batches: list[int] = []

    def deliver(batch: list[tuple[int, int]]) -> None:
        got.extend(batch)
        batches.append(len(batch))

    mailbox: Mailbox[tuple[int, int]] = Mailbox(asyncio.get_running_loop(), deliver)

    def post(thread: int) -> None:
        for number in range(2000):
            mailbox.post((thread, number))
            if number % 100 == 0:
                time.sleep(0.001)

    threads = [threading.Thread(target=post, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    await until(lambda: len(got) >= 8000)
    for thread in threads:
        thread.join()
    await asyncio.sleep(0.01)
    for number in range(4):
        assert [letter for thread, letter in got if thread == number] == list(range(2000))
    assert 0 not in batches
    assert len(batches) < 2000


async def test_a_letter_after_a_silence_is_delivered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, got = LoopClock(monkeypatch), list[int]()
    mailbox: Mailbox[int] = Mailbox(asyncio.get_running_loop(), got.extend, pause_s=3600.0)
    for number in range(3):
        await asyncio.to_thread(mailbox.post, number)
        await until(lambda: len(got) > number)  # noqa: B023
        clock.put_forward(3601.0)


async def test_letters_in_quick_succession_are_gathered() -> None:
    batches: list[list[int]] = []
    mailbox: Mailbox[int] = Mailbox(asyncio.get_running_loop(), batches.append, pause_s=0.5)
    mailbox.post(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for number in range(1, 10):
        mailbox.post(number)
        await asyncio.sleep(0)
    assert batches == [[0]]
    await until(lambda: len(batches) == 2)
    assert batches == [[0], list(range(1, 10))]


def test_letters_after_the_loop_has_closed_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    mailbox: Mailbox[int] = Mailbox(loop, lambda batch: None)
    loop.close()
    mailbox.post(1)
