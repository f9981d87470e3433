"""A slow child costs the others nothing: neither while it cannot take its blocks nor later, when it
could."""

from __future__ import annotations

import pytest

from p2pdist.core.uplink import BlockSent, Closed, Command, Event, Held, Opened, Send, Tick, Uplink
from p2pdist.model.digest import digest_of
from p2pdist.model.messages import Priority
from p2pdist.model.pieces import PieceLayout, PieceSet

BLOB = digest_of(b"blob")
LAYOUT = PieceLayout(3000 << 16, 1 << 16)
TICK_S = 0.1
QUICK_S, SLOW_S = 0.001, 0.25
"""What the kernel takes for a block of either child."""

STEP_S, COPY_S = 0.001, 0.00002


class Link:
    """An uplink whose blocks take as long as their stream says."""

    def __init__(self) -> None:
        self.uplink = Uplink()
        self.now = 0.0
        self.sent: dict[int, int] = {}
        self._takes: dict[int, float] = {}
        self._done_at: dict[int, float] = {}
        self(Held(BLOB, LAYOUT, 1, PieceSet.full(LAYOUT.count)))

    def __call__(self, event: Event) -> None:
        self._obey(self.uplink.handle(event, now=self.now))

    def open(self, number: int, takes_s: float, priority: Priority = "start") -> None:
        self._takes[number] = takes_s
        self.sent[number] = 0
        self(Opened(number, BLOB, 0, PieceSet(LAYOUT.count), priority))

    def close(self, number: int) -> None:
        self._done_at.pop(number, None)
        self(Closed(number))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            number, at = min(self._done_at.items(), key=lambda each: each[1], default=(0, end))
            self.now = min(at, self.now + TICK_S, end)
            if at <= self.now and self._done_at.pop(number, None) is not None:
                self.sent[number] += 1
                self(BlockSent(number))
            else:
                self(Tick())

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Send):
                self._done_at[command.stream] = self.now + self._takes[command.stream]


@pytest.mark.parametrize("alone_s", [0.5, 3.0, 30.0])
def test_whoever_comes_when_only_a_slow_child_is_left_does_not_wait_for_it(alone_s: float) -> None:
    """The slow one was given little while a quick one was there. It has no claim to that later, nor
    does it set the pace."""
    link = Link()
    link.open(1, SLOW_S)
    link.open(2, QUICK_S)
    link.run(1.0)
    assert link.sent[2] > 0.6 / QUICK_S
    link.close(2)
    link.run(alone_s)
    assert link.sent[1] > 0.9 * alone_s / SLOW_S
    link.open(3, QUICK_S)
    link.run(1.0)
    assert link.sent[3] > 0.6 / QUICK_S


def test_two_slow_children_take_turns() -> None:
    """Where none is quicker none is slow, and the link is shared evenly."""
    link = Link()
    link.open(1, SLOW_S)
    link.open(2, SLOW_S)
    link.run(10.0)
    assert abs(link.sent[1] - link.sent[2]) <= 1


class Buffered(Link):
    """A link that all streams share evenly, behind a buffer for each that takes a block at once
    when it is empty."""

    def __init__(self, rate: float, buffer: int) -> None:
        self._rate, self._buffer = rate, buffer
        self._taking: dict[int, int] = {}
        self._held: dict[int, float] = {}
        self.moved: dict[int, float] = {}
        super().__init__()

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            going = [number for number, held in self._held.items() if held]
            for number in going:
                moved = min(self._held[number], self._rate * STEP_S / len(going))
                self._held[number] -= moved
                self.moved[number] = self.moved.get(number, 0.0) + moved
            while taken := [number for number in list(self._taking) if self._take(number)]:
                self.now += COPY_S
                for number in taken:
                    self(BlockSent(number))
            self(Tick())

    def _take(self, number: int) -> bool:
        """Whether the whole block is in the buffer now."""
        held = self._held.get(number, 0.0)
        count = min(self._taking[number], int(self._buffer - held))
        self._held[number] = held + count
        self._taking[number] -= count
        return not self._taking[number] and self._taking.pop(number) == 0

    def _obey(self, commands: list[Command]) -> None:
        self._taking.update((command.stream, command.length) for command in commands if isinstance(command, Send))


def test_streams_with_empty_buffers_do_not_make_others_sluggish() -> None:
    """Preseeds seldom have a turn, so their blocks fit the kernel's buffers, and nothing is learnt
    from that about the others."""
    link = Buffered(12.5e6, 64 << 10)
    for number in range(8):
        link.open(number, 0.0, "start" if number < 2 else "preseed")
    link.run(5.0)
    assert sum(link.moved[number] for number in range(2, 8)) < 0.2 * sum(link.moved.values())
