"""The mailbox between receiver threads and the event loop loses nothing and wakes the loop
rarely."""

from __future__ import annotations

import asyncio
import threading
import time

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
    async with asyncio.timeout(5):
        while len(got) < 8000:
            await asyncio.sleep(0.001)
    for thread in threads:
        thread.join()
    await asyncio.sleep(0.01)
    for number in range(4):
        assert [letter for thread, letter in got if thread == number] == list(range(2000))
    assert 0 not in batches
    assert len(batches) < 2000


async def test_a_letter_after_a_silence_is_delivered_at_once() -> None:
    loop = asyncio.get_running_loop()
    arrived: list[float] = []
    mailbox: Mailbox[int] = Mailbox(loop, lambda batch: arrived.append(time.monotonic()), pause_s=0.2)
    for number in range(3):
        before = time.monotonic()
        await asyncio.to_thread(mailbox.post, number)
        async with asyncio.timeout(2):
            while len(arrived) == number:
                await asyncio.sleep(0.001)
        assert arrived[-1] - before < 0.1
        await asyncio.sleep(0.25)


async def test_letters_in_quick_succession_are_gathered() -> None:
    batches: list[list[int]] = []
    mailbox: Mailbox[int] = Mailbox(asyncio.get_running_loop(), batches.append, pause_s=0.05)
    mailbox.post(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for number in range(1, 10):
        mailbox.post(number)
        await asyncio.sleep(0)
    await asyncio.sleep(0.15)
    assert batches == [[0], list(range(1, 10))]


def test_letters_after_the_loop_has_closed_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    mailbox: Mailbox[int] = Mailbox(loop, lambda batch: None)
    loop.close()
    mailbox.post(1)
