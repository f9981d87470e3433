"""Frames from a socket: nothing that has come is kept waiting, nothing beyond a frame is taken."""

from __future__ import annotations

import random
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from p2pdist.model.messages import STREAM_END
from p2pdist.transfer.stream import frames
from p2pdist.transfer.stream.frames import FRAME, ROOM, STEP_BYTES, CutShort, FrameReader, Rate

PIECE = 64 << 10
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ends of a TCP connection; neither waits longer than a test may."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right, _ = listener.accept()
    left.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with left, right:
        yield left, right


def in_thread(behave: object, *arguments: object) -> threading.Thread:
    assert callable(behave)
    thread = threading.Thread(target=behave, args=arguments, daemon=True)
    thread.start()
    return thread


def take(reader: FrameReader, shortest: int) -> tuple[int, bytes]:
    piece, length = reader.head(shortest)
    data = bytes(reader.data(length))
    reader.done()
    return piece, data


@pytest.mark.parametrize("piece_size", [PIECE, 3 * STEP_BYTES + 5], ids=["small", "in steps"])
@pytest.mark.parametrize("pause_s", [0.0, 0.002], ids=["at once", "bit by bit"])
def test_frames_come_out_as_they_went_in(pair: Pair, piece_size: int, pause_s: float) -> None:
    """Cut anywhere, slowly or as fast as they go; frames of the full length and a short one."""
    sender, receiver = pair
    chance = random.Random(7)
    frames = [(number, chance.randbytes(piece_size)) for number in range(6)] + [(6, b"short")]
    wire = b"".join(FRAME.pack(number, len(data)) + data for number, data in frames)

    def send() -> None:
        rest = memoryview(wire)
        while rest:
            count = chance.choice([1, 7, 8, 1500, piece_size, piece_size + 8, 2 * piece_size])
            sender.sendall(rest[:count])
            rest = rest[count:]
            time.sleep(pause_s)

    sending = in_thread(send)
    reader = FrameReader(receiver, piece_size)
    assert [take(reader, 5) for _ in frames] == frames
    sending.join(60)


def finishes(behave: object, *arguments: object) -> bool:
    thread = in_thread(behave, *arguments)
    thread.join(60)
    return not thread.is_alive()


def test_a_piece_that_nothing_follows_is_there_at_once(pair: Pair) -> None:
    """A short piece out of its order, then silence; full pieces, then silence; then the end, and
    the connection stays open."""
    sender, receiver = pair
    reader = FrameReader(receiver, PIECE)
    frames: list[tuple[int, bytes]] = []

    def expect(shortest: int) -> None:
        frames.append(take(reader, shortest))

    for number, data, shortest in [
        (0, b"x" * PIECE, 5),
        (9, b"short", 5),
        (1, b"y" * PIECE, PIECE),
        (STREAM_END, b"", 0),
    ]:
        sender.sendall(FRAME.pack(number, len(data)) + data)
        assert finishes(expect, shortest), f"piece {number} has come and is not seen"
        assert frames[-1] == (number, data)


def test_a_fast_frame_whose_end_comes_late_is_there_with_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though an event loop had the connection be readable only with much of a frame before."""
    monkeypatch.setattr(frames, "RATE_BYTES", 1)
    monkeypatch.setattr(frames, "FAST_BYTES_S", 0.0)
    sender, receiver = pair
    reader = FrameReader(receiver, PIECE)
    sender.sendall(FRAME.pack(0, PIECE) + bytes(PIECE))
    take(reader, PIECE)
    reader.expect(PIECE)
    sender.sendall(FRAME.pack(1, PIECE) + bytes(1000))
    taking = in_thread(take, reader, PIECE)
    time.sleep(0.05)
    sender.sendall(bytes(PIECE - 1000))
    taking.join(10)
    assert not taking.is_alive(), "it waits for what comes only with the next frame"


@pytest.mark.parametrize("sleeps", [True, False], ids=["while a thread sleeps", "before"])
def test_an_end_that_nobody_promised_is_there_at_once_after_shorten(pair: Pair, sleeps: bool) -> None:
    sender, receiver = pair
    reader, frames = FrameReader(receiver, PIECE), list[tuple[int, int]]()

    def head() -> None:
        frames.append(reader.head(PIECE))

    if not sleeps:
        reader.shorten()
    taking = in_thread(head)
    if sleeps:
        time.sleep(0.05)
        reader.shorten()
    sender.sendall(FRAME.pack(STREAM_END, 0))
    taking.join(10)
    assert frames == [(STREAM_END, 0)]


def test_a_connection_is_readable_with_the_frame_whose_beginning_was_taken(pair: Pair) -> None:
    """An event loop may be woken before much is there, as when memory is short."""
    sender, receiver = pair
    reader, waiting = FrameReader(receiver, PIECE), select.poll()
    waiting.register(receiver, select.POLLIN)
    for taken in range(1, FRAME.size):
        reader.expect(PIECE)
        frame = FRAME.pack(taken, PIECE) + bytes(PIECE)
        sender.sendall(frame[:taken])
        while reader._taken < taken:
            assert reader.head_if_there(PIECE) is None
        sender.sendall(frame[taken:])
        head = data = None
        while data is None:
            assert waiting.poll(10_000), "it waits for what comes only with the next frame"
            head = reader.head_if_there(PIECE)
            data = reader.data_if_there(PIECE) if head is not None else None
        assert head == (taken, PIECE)
        reader.done()


def test_the_piece_under_way_is_known_before_it_is_whole(pair: Pair) -> None:
    sender, receiver = pair
    reader = FrameReader(receiver, PIECE)
    assert reader.receiving() is None
    sender.sendall(FRAME.pack(5, PIECE)[:6])
    assert reader.receiving() is None
    waiting = in_thread(take, reader, PIECE)
    sender.sendall(FRAME.pack(5, PIECE)[6:] + b"z")
    deadline = time.monotonic() + 60
    while reader.receiving() != 5 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert reader.receiving() == 5
    sender.sendall(b"z" * (PIECE - 1))
    waiting.join(60)
    assert reader.receiving() is None
    sender.sendall(FRAME.pack(STREAM_END, 0))
    time.sleep(0.05)
    assert reader.receiving() is None, "the end is no piece"


def test_a_sender_goes_on_while_a_frame_waits_to_be_taken(pair: Pair) -> None:
    """With room for one frame only, it would wait for the next one's window a round trip long, time
    and again."""
    sender, receiver = pair
    FrameReader(receiver, 1 << 20).expect(1 << 20)
    assert receiver.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= ROOM * STEP_BYTES
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE)
    sender.settimeout(60)
    sender.sendall(bytes(2 * STEP_BYTES))  # and nobody takes any of it


def test_an_end_in_the_middle_is_seen(pair: Pair) -> None:
    sender, receiver = pair
    reader = FrameReader(receiver, PIECE)
    sender.sendall(FRAME.pack(0, PIECE) + b"half")
    sender.close()
    reader.head(PIECE)
    with pytest.raises(CutShort) as caught:
        reader.data(PIECE)
    assert caught.value.missing == PIECE - 4


def test_the_thread_sleeps_while_a_piece_arrives(pair: Pair) -> None:
    """A piece in 44 segments, and the kernel wakes the thread for it once or a few times, not 44
    times."""
    sender, receiver = pair
    reader = FrameReader(receiver, PIECE)
    wake_ups: list[int] = []

    def receive() -> None:
        before = voluntary_switches()
        take(reader, PIECE)
        wake_ups.append(voluntary_switches() - before)

    thread = in_thread(receive)
    time.sleep(0.05)
    wire = FRAME.pack(0, PIECE) + b"p" * PIECE
    for start in range(0, len(wire), 1500):
        sender.sendall(wire[start : start + 1500])
        time.sleep(0.002)
    thread.join(60)
    assert wake_ups and wake_ups[0] <= 15


LATE_S = 0.005
"""sys.getswitchinterval: for so long another thread may keep the interpreter."""


def rates(gaps_s: list[float]) -> list[bool]:
    """Whether frames come fast, after each of those that are done with after such gaps."""
    rate, now = Rate(7.0, 100e6), 7.0
    return [rate.count(PIECE, now := now + gap_s) for gap_s in gaps_s]


@pytest.mark.parametrize("mbit", [40, 100, 400])
def test_bursts_do_not_make_a_stream_fast(mbit: int) -> None:
    """A token bucket lets 256 KiB through at once, and so does a thread that was late: after each
    such gap come four frames at the speed of memory."""
    gap_s = 4 * PIECE * 8 / (mbit * 1e6)
    assert not any(rates([gap_s, 1e-5, 1e-5, 1e-5] * 100))


def test_late_frames_do_not_make_a_fast_stream_slow() -> None:
    """Four streams share the interpreter at 1.6 GB/s in all, and one frame in 16 waits for it."""
    frame_s = PIECE / 0.4e9
    came = rates(([LATE_S] + [frame_s] * 15) * 10)
    assert not any(came[:15]) and all(came[15:])


def test_a_stream_that_slows_down_is_fast_no_longer() -> None:
    came = rates([PIECE / 1e9] * 32 + [PIECE / 5e6] * 32)
    assert all(came[16:47]) and not any(came[47:])


def voluntary_switches() -> int:
    """How often this thread has gone to sleep (proc(5), status)."""
    with open(f"/proc/self/task/{threading.get_native_id()}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))
