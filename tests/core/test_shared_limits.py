"""Limits that several blobs share beside those of the whole host: what is sent, by tokens counted,
and what is received."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pdist.core.downlink import BURST_S, Downlink, Lane
from p2pdist.core.fair_queue import TokenBucket
from p2pdist.core.uplink import BlockSent, Dropped, End, Held, Limited, Opened, Send, Tick, Uplink
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.messages import Priority
from p2pdist.model.pieces import PieceLayout, PieceSet

PIECE = 65536
LAYOUT = PieceLayout(64 * PIECE, PIECE)
A, B, FREE = (digest_of(each) for each in (b"a", b"b", b"free"))
SECOND = 8 * PIECE
"""Bytes a second of the shared limit."""


class Sender:
    """An uplink with blobs held whole, whose kernel takes a block in a millisecond."""

    def __init__(self, *blobs: Digest) -> None:
        self.uplink, self.now = Uplink(), 0.0
        self.sent: list[tuple[float, int]] = []
        for blob in blobs:
            have = PieceSet(LAYOUT.count)
            for piece in range(LAYOUT.count):
                have.add(piece)
            self.uplink.handle(Held(blob, LAYOUT, 1, have), now=0.0)
        self._flying: list[int] = []

    def limit(self, blob: Digest, limit: TokenBucket | None) -> None:
        self._run(Limited(blob, limit))

    def open(self, stream: int, blob: Digest, priority: Priority = "start") -> None:
        self._run(Opened(stream, blob, 0, PieceSet(LAYOUT.count), priority))

    def pass_time(self, seconds: float) -> None:
        """Blocks are taken, and ticks come when they are due."""
        until = self.now + seconds
        while True:
            wait_s = self.uplink.wait_s(self.now)
            step_s = 0.001 if self._flying else wait_s if wait_s is not None else 0.1
            if self.now + step_s > until:
                self.now = until
                return
            self.now += step_s
            self._run(BlockSent(self._flying.pop()) if self._flying else Tick())

    def count(self, stream: int) -> int:
        """Bytes that a stream was given."""
        return PIECE * sum(each == stream for _, each in self.sent)

    def _run(self, event: BlockSent | Dropped | Limited | Opened | Tick) -> None:
        for command in self.uplink.handle(event, now=self.now):
            match command:
                case Send(stream, _, _, length):
                    assert length == PIECE
                    self.sent.append((self.now, stream))
                    self._flying.append(stream)
                case End():
                    pass


def test_blobs_of_one_limit_share_it_and_others_do_not_wait_for_it() -> None:
    line, limit = Sender(A, B, FREE), TokenBucket(SECOND)
    for blob in (A, B):
        line.limit(blob, limit)
    for number, blob in enumerate((A, B, FREE)):
        line.open(number, blob)
    line.pass_time(2.0)
    together = line.count(0) + line.count(1)
    assert 2 * SECOND <= together <= 2.02 * SECOND + 2 * PIECE
    assert abs(line.count(0) - line.count(1)) <= PIECE, "and share it evenly"
    assert line.count(2) == LAYOUT.size, "the rest of the uplink is for the others"


def test_a_limit_may_change_while_it_holds() -> None:
    line, limit = Sender(A), TokenBucket(SECOND)
    line.limit(A, limit)
    line.open(1, A)
    line.pass_time(1.0)
    before = line.count(1)
    limit.limit_bytes_s = 2.0 * SECOND
    line.pass_time(1.0)
    assert line.count(1) - before >= 2 * SECOND - 2 * PIECE
    line.limit(A, None)
    line.pass_time(1.0)
    assert line.count(1) == LAYOUT.size


def test_a_start_that_its_limit_holds_back_leaves_the_uplink_to_preseeds() -> None:
    line, limit = Sender(A, FREE), TokenBucket(SECOND)
    line.limit(A, limit)
    line.open(1, A, "start")
    line.open(2, FREE, "preseed")
    line.pass_time(1.0)
    assert line.count(2) == LAYOUT.size
    assert SECOND <= line.count(1) <= 1.02 * SECOND + 2 * PIECE


def test_time_in_which_only_a_shared_limit_is_waited_for_does_not_measure_the_uplink() -> None:
    line, limit = Sender(A), TokenBucket(SECOND)
    line.limit(A, limit)
    for number in (1, 2):  # one waits while the kernel takes the other's block
        line.open(number, A)
    line.pass_time(1.0)
    sent, busy_s = line.uplink.take_sample(line.now)
    assert sent == 0 or sent / busy_s > 10 * SECOND
    assert line.count(1) + line.count(2) >= SECOND


def test_a_limit_of_a_blob_that_is_not_here_says_nothing() -> None:
    line = Sender(A)
    line.limit(B, TokenBucket(1.0))
    line.open(1, A)
    line.pass_time(1.0)
    assert line.count(1) == LAYOUT.size


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.booleans()), min_size=1, max_size=100))
def test_what_shares_a_lane_is_received_no_faster_than_its_limit(pieces: list[tuple[int, bool]]) -> None:
    """Bytes over time, with every pause kept, whatever comes beside."""
    downlink = Downlink()
    lane = Lane(downlink, TokenBucket(1e6, BURST_S))
    now = taken = last = 0.0
    for length, shared in pieces:
        pause_s = (lane if shared else downlink).received("start", length, now)
        if shared:
            taken, last = taken + length, length
            now += pause_s
            assert taken <= 1e6 * (now + BURST_S) + 1
        else:
            assert pause_s == 0.0, "others do not wait for it"
    assert last <= taken


def test_a_lane_keeps_to_the_hosts_own_limits_too() -> None:
    lane = Lane(Downlink(1e6), TokenBucket(1e9, BURST_S))
    assert lane.received("start", 10**6, 0.0) > 0.9
    slow = Lane(Downlink(1e9), TokenBucket(1e6, BURST_S))
    assert slow.received("preseed", 10**6, 0.0) > 0.9
