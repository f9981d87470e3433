"""The limit on what a host receives: shared by its streams, kept over time, and no obstacle to closing one."""

from __future__ import annotations

import time

from stream_rig import Receiver, SampleBlob, Server

from p2pdist.transfer.pacer import BURST_S, Pacer


def test_what_was_received_too_fast_is_slept_off() -> None:
    pacer = Pacer(1000.0)
    time.sleep(0.01)
    assert 2.0 - BURST_S - 0.001 <= pacer.pause_s(2000) <= 2.0
    assert 4.9 - BURST_S <= pacer.pause_s(3000) <= 5.0, "the debt is everybody's"


def test_silence_is_not_saved_up() -> None:
    pacer = Pacer(1e6)
    time.sleep(4 * BURST_S)
    assert pacer.pause_s(int(2 * BURST_S * 1e6)) > 0.9 * BURST_S


async def test_streams_share_a_limit(receiver: Receiver, server: Server, blob: SampleBlob) -> None:
    limit = len(blob.data) / 0.5
    pacer = Pacer(limit)
    began = time.monotonic()
    streams = [receiver.open(server.port, stripe=stripe, stripes=2, pacer=pacer) for stripe in (0, 1)]
    for stream in streams:
        assert (await receiver.closed(stream)).reason == "done"
    assert receiver.copy.path.read_bytes() == blob.data
    assert time.monotonic() - began > 0.35


async def test_a_stream_that_sleeps_is_closed_at_once(receiver: Receiver, server: Server) -> None:
    stream = receiver.open(server.port, pacer=Pacer(1000.0))
    await receiver.until(lambda: receiver.received(stream) == [0])
    began = time.monotonic()
    stream.close()
    assert (await receiver.closed(stream)).reason == "closed"
    assert time.monotonic() - began < 8
