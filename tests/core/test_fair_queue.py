"""Priorities on the uplink: who waits comes first, preseeds get their share and no more, limits
hold over any time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdist.core.fair_queue import TokenBucket
from p2pdist.core.uplink import BlockSent, Closed, Command, Event, Held, Opened, Ready, Send, Tick, Uplink
from p2pdist.model.digest import digest_of
from p2pdist.model.messages import Priority
from p2pdist.model.pieces import PieceLayout, PieceSet

PIECE = 65536
RATE = 100 * PIECE
PRESEED_SHARE = 1 / 16
"""What is promised."""
BLOBS = {"start": digest_of(b"a job starts"), "preseed": digest_of(b"a job may start some day")}


class Link:
    """An uplink with two blobs, whole, and the kernel below it: it takes blocks one after the other
    at `rate_bytes_s`. Readers of ranges have their next block at once."""

    def __init__(
        self,
        *,
        pieces: int = 400,
        piece_size: int = PIECE,
        limit_bytes_s: float | None = None,
        preseed_limit_bytes_s: float | None = None,
    ) -> None:
        self.uplink = Uplink(limit_bytes_s=limit_bytes_s, preseed_limit_bytes_s=preseed_limit_bytes_s)
        self.now = 0.0
        self.rate_bytes_s = RATE
        self.readers: set[int] = set()
        self.sent: list[tuple[float, int, int]] = []
        self.priorities: dict[int, Priority] = {}
        self._taking: list[Send] = []
        self._taken_at = 0.0
        layout = PieceLayout(pieces * piece_size, piece_size)
        for blob in BLOBS.values():
            self(Held(blob, layout, 1, PieceSet.full(pieces)))
        self._none = PieceSet(pieces)

    def __call__(self, event: Event) -> list[Command]:
        commands = self.uplink.handle(event, now=self.now)
        for command in commands:
            if isinstance(command, Send):
                self.sent.append((self.now, command.stream, command.length))
                if not self._taking:
                    self._taken_at = self.now + command.length / self.rate_bytes_s
                self._taking.append(command)
        return commands

    def open(self, number: int, priority: Priority) -> None:
        self.priorities[number] = priority
        self(Opened(number, BLOBS[priority], 0, self._none, priority))

    def read(self, number: int, length: int) -> None:
        """Somebody reads a range."""
        self.priorities[number] = "start"
        self.readers.add(number)
        self(Ready(number, length))

    def run(self, *, until: float) -> None:
        """Let the kernel take what it is given, and tick when the limits ask for it, or every 0.1
        s."""
        while True:
            wait_s = self.uplink.wait_s(self.now)
            tick_at = self.now + (0.1 if wait_s is None else wait_s)
            taken = bool(self._taking) and self._taken_at <= tick_at
            at = self._taken_at if taken else tick_at
            if at > until:
                self.now = until
                return
            self.now = at
            if not taken:
                self(Tick())
                continue
            done = self._taking.pop(0)
            if self._taking:
                self._taken_at = self.now + self._taking[0].length / self.rate_bytes_s
            self(BlockSent(done.stream))
            if done.stream in self.readers:
                self(Ready(done.stream, done.length))

    def bytes_of(self, priority: Priority, *, after: float = 0.0) -> int:
        return sum(length for at, stream, length in self.sent if at >= after and self.priorities[stream] == priority)


def streams(link: Link, priority: Priority, numbers: Iterable[int]) -> None:
    for number in numbers:
        link.open(number, priority)


@settings(max_examples=examples(60), deadline=None)
@given(
    starts=st.integers(1, 4),
    preseeds=st.integers(1, 40),
    piece_size=st.sampled_from([PIECE, 4 * PIECE]),
    preseeds_first=st.booleans(),
)
def test_preseeds_share_what_is_theirs_however_many_they_are(
    starts: int, preseeds: int, piece_size: int, preseeds_first: bool
) -> None:
    """Starts get at least 15/16 of what goes out, preseeds the rest and never nothing; among
    themselves they are equal."""
    link = Link(piece_size=piece_size)
    order: list[tuple[Priority, range]] = [("start", range(starts)), ("preseed", range(100, 100 + preseeds))]
    for priority, numbers in reversed(order) if preseeds_first else order:
        streams(link, priority, numbers)
    began = link.now
    link.run(until=3.0)
    start, preseed = (link.bytes_of(priority, after=began) for priority in ("start", "preseed"))
    blocks = 2 * piece_size
    assert start + preseed >= 3.0 * RATE - blocks, "the link is never idle"
    assert start >= (1 - PRESEED_SHARE) * (start + preseed) - blocks
    assert preseed >= PRESEED_SHARE * (start + preseed) - blocks
    given_to = [sum(length for _, stream, length in link.sent if stream == number) for number in range(starts)]
    assert max(given_to) - min(given_to) <= piece_size


@pytest.mark.parametrize("priority", ["start", "preseed"])
def test_who_is_alone_gets_everything(priority: Priority) -> None:
    link = Link()
    link.open(1, priority)
    link.run(until=2.0)
    assert link.bytes_of(priority) == pytest.approx(2.0 * RATE, rel=0.01)


def test_a_start_that_comes_late_need_not_wait_for_the_preseeds_before_it() -> None:
    """They had the link for a second, and it is first from now on: it claims nothing of the past,
    and neither do they."""
    link = Link()
    streams(link, "preseed", range(100, 110))
    link.run(until=1.0)
    link.open(1, "start")
    link.run(until=2.0)
    assert link.bytes_of("start", after=1.0) == pytest.approx((1 - PRESEED_SHARE) * RATE, rel=0.03)
    link(Closed(1))
    link.run(until=3.0)
    assert link.bytes_of("preseed", after=2.0) == pytest.approx(RATE, rel=0.02)


def test_preseeds_that_come_late_claim_nothing_of_the_past() -> None:
    link = Link()
    link.open(1, "start")
    link.run(until=2.0)
    streams(link, "preseed", range(100, 104))
    link.run(until=3.0)
    assert link.bytes_of("preseed", after=2.0) <= PRESEED_SHARE * RATE + 2 * PIECE


def test_a_preseed_whose_child_takes_nothing_holds_up_no_start() -> None:
    """It gives way to another pull of its own; the start's blocks follow each other all the
    same."""
    uplink = Uplink()
    none = PieceSet(100)
    for blob in BLOBS.values():
        uplink.handle(Held(blob, PieceLayout(100 * PIECE, PIECE), 1, PieceSet.full(100)), now=0.0)
    assert uplink.handle(Opened(1, BLOBS["preseed"], 0, none, "preseed"), now=0.0) == [Send(1, 0, 0, PIECE)]
    todo = uplink.handle(Opened(2, BLOBS["start"], 0, none), now=0.0)
    for piece in range(40):
        assert todo == [Send(2, piece, 0, PIECE)]
        todo = uplink.handle(BlockSent(2), now=0.0001 * piece)


def test_a_second_preseed_waits_for_the_first() -> None:
    """Among themselves preseeds take turns, one block in flight, as all do."""
    link = Link()
    link.open(1, "preseed")
    link.open(2, "preseed")
    assert [stream for _, stream, _ in link.sent] == [1]
    assert link.uplink.in_flight == 1


@settings(max_examples=examples(60), deadline=None)
@given(
    limit=st.none() | st.floats(0.2, 3.0),
    preseed_limit=st.floats(0.02, 2.0),
    comings=st.lists(
        st.tuples(st.floats(0.0, 3.0), st.sampled_from(["start", "preseed"]), st.floats(0.1, 2.0)),
        min_size=1,
        max_size=8,
    ),
)
def test_no_limit_is_passed_in_any_time(
    limit: float | None, preseed_limit: float, comings: list[tuple[float, Priority, float]]
) -> None:
    """Streams come and go: between any two blocks no more than the limit, a burst and one block;
    preseeds alone keep to theirs too."""
    link = Link(
        limit_bytes_s=None if limit is None else limit * RATE,
        preseed_limit_bytes_s=preseed_limit * RATE,
    )
    plan = [(at, number, priority) for number, (at, priority, _) in enumerate(comings)]
    plan += [(at + stay, number, None) for number, (at, _, stay) in enumerate(comings)]  # type: ignore[misc]
    for at, number, priority in sorted(plan, key=lambda each: (each[0], each[1], each[2] or "")):
        link.run(until=at)
        if priority is None:
            link(Closed(number))
            link._taking = [send for send in link._taking if send.stream != number]
        else:
            link.open(number, priority)
    link.run(until=6.0)
    everything = [(at, length) for at, _, length in link.sent]
    preseeds = [(at, length) for at, stream, length in link.sent if link.priorities[stream] == "preseed"]
    _within(everything, RATE * limit if limit is not None else None)
    _within(preseeds, RATE * preseed_limit)


def _within(sent: list[tuple[float, int]], limit_bytes_s: float | None) -> None:
    if limit_bytes_s is None:
        return
    burst_s = TokenBucket(None).burst_s
    for first, (since, _) in enumerate(sent):
        total = 0
        for at, length in sent[first:]:
            assert total <= limit_bytes_s * (at - since + burst_s) * (1 + 1e-9), "what was sent before is paid for"
            total += length


def test_the_limit_of_preseeds_holds_on_an_idle_link_and_is_reached() -> None:
    link = Link(preseed_limit_bytes_s=RATE / 4)
    streams(link, "preseed", range(100, 105))
    link.run(until=4.0)
    assert link.bytes_of("preseed") == pytest.approx(RATE, rel=0.03)


def test_starts_are_not_held_up_by_the_limit_of_preseeds() -> None:
    """Nor does a preseed get more than its share of a busy link, when its limit would allow it."""
    link = Link(preseed_limit_bytes_s=RATE / 4)
    streams(link, "preseed", range(100, 105))
    link.open(1, "start")
    link.run(until=3.0)
    assert link.bytes_of("start") >= (1 - PRESEED_SHARE) * 3.0 * RATE - 3 * PIECE


def test_a_limit_that_held_preseeds_back_gives_them_no_claim_later() -> None:
    """For seconds their limit was an eighth of their share. When the link becomes slow it is not,
    and they get that share and no more."""
    link = Link(preseed_limit_bytes_s=RATE * PRESEED_SHARE / 8, pieces=1000)
    link.open(1, "start")
    link.open(100, "preseed")
    link.run(until=4.0)
    assert link.bytes_of("preseed") <= RATE * PRESEED_SHARE / 8 * 4.02 + PIECE
    link.rate_bytes_s = RATE / 32
    link.run(until=36.0)
    assert link.bytes_of("preseed", after=4.0) <= PRESEED_SHARE * 32 * RATE / 32 + 2 * PIECE


def test_waiting_for_the_limit_of_preseeds_is_not_being_busy() -> None:
    """The link has room for others meanwhile: what it can do is not measured by this."""
    link = Link(preseed_limit_bytes_s=RATE / 20)
    streams(link, "preseed", (1, 2))
    link.run(until=4.0)
    sent_bytes, busy_s = link.uplink.take_sample(link.now)
    assert busy_s < 0.5 and sent_bytes <= RATE * 0.5


def test_a_tick_is_due_when_the_limit_allows_a_preseed() -> None:
    link = Link(preseed_limit_bytes_s=10 * PIECE)
    link.open(1, "preseed")
    link(BlockSent(1))
    assert link.uplink.wait_s(0.0) == pytest.approx(0.08, abs=1e-6)
    link.open(2, "start")
    assert link.uplink.wait_s(0.0) is None, "a start waits for nothing but its own block"


def test_readers_of_ranges_take_turns_with_streams() -> None:
    """A reader that has its next block ready when the last was sent gets as much as a stream, and
    comes before preseeds as well."""
    link = Link()
    link.open(1, "start")
    link.open(100, "preseed")
    link.read(50, PIECE)
    link.run(until=2.0)
    shares = [sum(length for _, stream, length in link.sent if stream == number) for number in (1, 50)]
    assert shares[1] == pytest.approx(shares[0], rel=0.05)
    assert sum(shares) >= (1 - PRESEED_SHARE) * 2.0 * RATE - 2 * PIECE
    assert all(send.piece == -1 for send in link._taking if send.stream == 50)
    link(Closed(50))
    link(Closed(50))
    assert link.uplink.streams == 2


def test_a_reader_of_little_makes_nobody_look_slow() -> None:
    """The kernel takes a few bytes at once, whatever the link: of the streams it still gets one
    block after the other."""
    uplink, now = Uplink(), 0.0
    uplink.handle(Held(BLOBS["start"], PieceLayout(100 * PIECE, PIECE), 1, PieceSet.full(100)), now=now)
    for number in (1, 2):
        uplink.handle(Opened(number, BLOBS["start"], 0, PieceSet(100)), now=now)
    sender, read, waits = 1, 0, False
    for _ in range(12):
        now += 0.04
        if not waits:
            uplink.handle(Ready(50, 512), now=now)
        (command,) = uplink.handle(BlockSent(sender), now=now)
        waits = command.stream != 50
        if not waits:
            read += 1
            now += 1e-6
            (command,) = uplink.handle(BlockSent(50), now=now)
        sender = command.stream
        assert uplink.handle(Tick(), now=now + 0.02) == []
    assert read >= 4


def test_a_reader_that_goes_away_leaves_its_turn_to_others() -> None:
    link = Link()
    link.open(1, "start")
    link.read(50, PIECE)
    link(Closed(50))
    link.run(until=0.1)
    assert 50 not in [stream for _, stream, _ in link.sent]


@given(st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(1, 10 * PIECE)), min_size=2, max_size=30))
def test_a_bucket_is_never_overdrawn(steps: list[tuple[float, int]]) -> None:
    """Whoever waits for it before each step passes no more than the limit, the burst, and what goes
    last."""
    bucket, now, went = TokenBucket(RATE, 0.05), 0.0, list[tuple[float, int]]()
    for pause_s, length in steps:
        now = max(now + pause_s, bucket.free_at)
        bucket.pay(length, now)
        went.append((now, length))
    for (one, _), (other, _) in pairwise(went):
        assert other >= one
    for first, (since, _) in enumerate(went):
        total = 0
        for at, length in went[first:]:
            assert total <= RATE * (at - since + 0.05) * (1 + 1e-9)
            total += length
