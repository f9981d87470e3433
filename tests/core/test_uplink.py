"""The uplink: verified pieces only, in turn, each once, few blocks in flight."""

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdist.core.stream_slots import Peer
from p2pdist.core.uplink import (
    BLOCK_MIN,
    PACED_MIN_BYTES_S,
    BlockSent,
    Closed,
    Command,
    Diverted,
    Dropped,
    End,
    Event,
    Held,
    Lost,
    Opened,
    Send,
    Tick,
    Uplink,
    Urgency,
    Verified,
)
from p2pdist.model.digest import digest_of
from p2pdist.model.pieces import PieceLayout, PieceSet

BLOB = digest_of(b"blob")
PIECE = 65536
LAYOUT = PieceLayout(8 * PIECE, PIECE)
URGENCIES: list[Urgency] = ["none", "soon waited for", "waited for"]


def pieces(*numbers: int, layout: PieceLayout = LAYOUT) -> PieceSet:
    found = PieceSet(layout.count)
    for number in numbers:
        found.add(number)
    return found


class Line:
    """An uplink with its blob held, and the time kept."""

    def __init__(
        self, *have: int, stripes: int = 1, in_flight: int = 2, blocks: int = 1, limit_bytes_s: float | None = None
    ) -> None:
        self.uplink = Uplink(blocks_in_flight=in_flight, blocks_per_piece=blocks, limit_bytes_s=limit_bytes_s)
        self.now = 0.0
        assert self(Held(BLOB, LAYOUT, stripes, pieces(*have))) == []

    def __call__(self, event: Event, after_s: float = 0.0) -> list[Command]:
        self.now += after_s
        return self.uplink.handle(event, now=self.now)


def send(stream: int, piece: int) -> Send:
    return Send(stream, piece, 0, PIECE)


def test_pieces_go_out_in_the_order_in_which_they_verified_each_once() -> None:
    line = Line(3)
    assert line(Opened(1, BLOB, 0, pieces(0, 1, 2, 7))) == [send(1, 3)]
    assert line(Verified(BLOB, 6)) == []
    assert line(Verified(BLOB, 4)) == []
    assert line(Verified(BLOB, 4)) == []
    assert line(BlockSent(1)) == [send(1, 6)]
    assert line(BlockSent(1)) == [send(1, 4)]
    assert line(BlockSent(1)) == []
    assert line(Verified(BLOB, 5)) == [send(1, 5)]
    assert line(BlockSent(1)) == [End(1)]


def test_nothing_is_offered_before_it_verified() -> None:
    line = Line()
    assert line(Opened(1, BLOB, 0, pieces())) == []
    assert line(Tick(), 10.0) == []
    assert line(Verified(BLOB, 2)) == [send(1, 2)]


def test_a_child_that_lacks_nothing_is_done_at_once() -> None:
    line = Line(0, 1, 2)
    assert line(Opened(1, BLOB, 0, pieces(*range(8)))) == [End(1)]


def test_a_child_gets_only_its_stripe() -> None:
    line = Line(*range(8), stripes=4)
    assert line(Opened(1, BLOB, 1, pieces())) == [send(1, 1)]
    assert line(BlockSent(1)) == [send(1, 5)]
    assert line(BlockSent(1)) == [End(1)]


def test_a_stream_has_one_block_in_flight_and_the_host_two() -> None:
    line = Line(*range(8))
    assert line(Opened(1, BLOB, 0, pieces())) == [send(1, 0)]
    assert line(Opened(2, BLOB, 0, pieces())) == [send(2, 0)]
    assert line(Opened(3, BLOB, 0, pieces())) == []
    assert line.uplink.in_flight == 2
    assert line(BlockSent(1), 0.01) == [send(3, 0)]
    assert line(BlockSent(3), 0.01) == [send(1, 1)]


def test_children_take_turns_by_progress() -> None:
    """Three children of equal claim get equal shares, whoever came first."""
    line = Line(*range(8), in_flight=1)
    for stream in (1, 2, 3):
        line(Opened(stream, BLOB, 0, pieces()))
    order = [1]
    for _ in range(8):
        (command,) = line(BlockSent(order[-1]), 0.01)
        order.append(command.stream)
    assert order == [1, 2, 3] * 3


def test_a_child_that_comes_late_cannot_claim_the_past() -> None:
    """It starts at the present virtual time: from now on equal shares, no catching up at the
    others' cost."""
    line = Line(*range(8), in_flight=1)
    line(Opened(1, BLOB, 0, pieces()))
    for _ in range(4):
        line(BlockSent(1), 0.01)
    line(Opened(2, BLOB, 0, pieces()))
    order = []
    stream = 1
    for _ in range(6):
        (command,) = [each for each in line(BlockSent(stream), 0.01) if isinstance(each, Send)]
        stream = command.stream
        order.append(stream)
    assert order[:4] in ([2, 1, 2, 1], [1, 2, 1, 2])


def test_blocks_of_a_piece_follow_each_other() -> None:
    """Cut in two, a piece of one stream is never interrupted by another piece of it; other streams
    may come between."""
    line = Line(0, 1, blocks=2, in_flight=1)
    assert line(Opened(1, BLOB, 0, pieces())) == [Send(1, 0, 0, PIECE // 2)]
    assert line(Opened(2, BLOB, 0, pieces())) == []
    assert line(BlockSent(1)) == [Send(2, 0, 0, PIECE // 2)]
    assert line(BlockSent(2)) == [Send(1, 0, PIECE // 2, PIECE // 2)]
    assert line(BlockSent(1)) == [Send(2, 0, PIECE // 2, PIECE // 2)]
    assert line(BlockSent(2)) == [Send(1, 1, 0, PIECE // 2)]


def test_a_stuck_block_does_not_hold_up_the_others() -> None:
    """Two children whose kernels take nothing: after a while a third is served all the same."""
    line = Line(*range(8))
    for stream in (1, 2, 3):
        line(Opened(stream, BLOB, 0, pieces()))
    assert line(Tick(), 0.04) == []
    assert line(Tick(), 0.2) == [send(3, 0)]


def test_a_closed_child_frees_its_place() -> None:
    line = Line(*range(8))
    for stream in (1, 2, 3):
        line(Opened(stream, BLOB, 0, pieces()))
    assert line(Closed(1)) == [send(3, 0)]
    assert line(BlockSent(1)) == []
    assert line(Closed(2)) == []
    assert line(Closed(2)) == []
    assert line(Verified(BLOB, 5)) == []
    assert line.uplink.streams == 1


def test_closing_a_child_that_waits_takes_it_out_of_the_queue() -> None:
    line = Line(*range(8), in_flight=1)
    for stream in (1, 2, 3):
        line(Opened(stream, BLOB, 0, pieces()))
    line(Closed(2))
    assert line(BlockSent(1)) == [send(3, 0)]


def test_a_dropped_blob_is_forgotten() -> None:
    line = Line(0)
    assert line(Dropped(BLOB)) == []
    assert line(Verified(BLOB, 1)) == []


def test_capacity_is_bytes_over_the_time_in_which_somebody_waited() -> None:
    line = Line(0, 1)
    line.now = 5.0
    for stream in (1, 2, 3):
        line(Opened(stream, BLOB, 0, pieces()))
    for stream in (1, 2, 3, 1):
        line(BlockSent(stream), 0.1)
    assert line.uplink.take_sample(line.now) == (4 * PIECE, pytest.approx(0.4))
    for stream in (2, 3):
        line(BlockSent(stream), 0.1)
    assert line.uplink.take_sample(line.now + 4.0) == (0, 0.0), "nobody waited: their speed is not this host's"


def test_a_child_that_is_gone_does_not_make_its_parent_slow() -> None:
    """While nobody waits behind what is stuck, the uplink is not busy: its capacity says nothing
    about this host."""
    line = Line(0)
    line(Opened(1, BLOB, 0, pieces()))
    for _ in range(50):
        line(Tick(), 0.1)
    assert line.uplink.take_sample(line.now) == (0, 0.0)
    assert line.uplink.take_sample(line.now + 5.0) == (0, 0.0)


def limited(*have: int, pieces_s: float) -> Line:
    return Line(*have, in_flight=1, limit_bytes_s=pieces_s * PIECE)


def test_a_limit_spaces_the_blocks_of_all_streams() -> None:
    """Ten pieces a second: each block waits until those before it are paid for, whoever they went
    to, and turns stay fair."""
    line = limited(*range(8), pieces_s=10)
    assert line(Opened(1, BLOB, 0, pieces())) == [send(1, 0)]
    assert line(Opened(2, BLOB, 0, pieces())) == []
    assert line.uplink.wait_s(line.now) is None, "it waits for the kernel"
    assert line(BlockSent(1), 0.01) == []
    assert line.uplink.wait_s(line.now) == pytest.approx(0.07, abs=1e-6)
    assert line(Tick(), 0.06) == []
    assert line(Tick(), 0.0101) == [send(2, 0)]
    assert line(BlockSent(2), 0.01) == []
    assert line(Tick(), 0.09) == [send(1, 1)]
    line(Closed(1))
    line(Closed(2))
    assert line.uplink.wait_s(line.now) is None, "nobody waits"


def test_a_limit_is_what_is_measured_as_capacity() -> None:
    line = limited(*range(8), pieces_s=10)
    todo = line(Opened(1, BLOB, 0, pieces())) + line(Opened(2, BLOB, 0, pieces()))
    sent = 0
    while sent < 12:
        for command in todo:
            assert isinstance(command, Send)
            sent += 1
            assert line(BlockSent(command.stream), 0.001) == [], "the next is not paid for"
        todo = line(Tick(), 0.005)
    sent_bytes, busy_s = line.uplink.take_sample(line.now)
    assert sent_bytes / busy_s == pytest.approx(10 * PIECE, rel=0.15)


def test_an_idle_time_is_not_saved_up_against_the_limit() -> None:
    line = limited(*range(8), pieces_s=10)
    line.now = 1000.0
    line(Opened(1, BLOB, 0, pieces()))
    given_out = 1
    for _ in range(5):
        given_out += len(line(BlockSent(1), 0.001))
    assert given_out == 1


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_every_child_is_given_what_it_lacks_once_and_nothing_else(data: st.DataObject) -> None:
    """Whatever the order of verifying, opening, sending and closing."""
    stripes = data.draw(st.sampled_from([1, 2, 4]))
    line = Line(stripes=stripes, blocks=data.draw(st.sampled_from([1, 2])))
    unverified = data.draw(st.permutations(range(8)))
    lacking: dict[int, set[int]] = {}
    given_to: dict[int, list[int]] = {}
    flying: dict[int, Send] = {}
    ended: set[int] = set()
    verified: set[int] = set()

    def take(commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, End):
                ended.add(command.stream)
                continue
            assert command.stream not in flying and command.piece in verified
            flying[command.stream] = command
            if command.offset == 0:
                given_to[command.stream].append(command.piece)

    for number in range(1, 5):
        stripe = data.draw(st.integers(0, stripes - 1))
        have = data.draw(st.sets(st.integers(0, 7)))
        lacking[number] = set(range(stripe, 8, stripes)) - have
        given_to[number] = []
        take(line(Opened(number, BLOB, stripe, pieces(*have))))
        for _ in range(data.draw(st.integers(0, 2))):
            if unverified:
                verified.add(unverified[0])
                take(line(Verified(BLOB, unverified.pop(0)), 1e-4))
    while unverified or flying:
        if flying and (not unverified or data.draw(st.booleans())):
            stream = data.draw(st.sampled_from(sorted(flying)))
            del flying[stream]
            take(line(BlockSent(stream), 1e-4))
        else:
            verified.add(unverified[0])
            take(line(Verified(BLOB, unverified.pop(0)), 1e-4))
        assert len(flying) <= 2
    for number, lacked in lacking.items():
        assert sorted(given_to[number]) == sorted(lacked)
        assert number in ended


def test_a_sluggish_child_does_not_take_the_turns_of_the_others() -> None:
    """One child's link takes a block in a second, the other's in ten milliseconds: the quick one
    goes on meanwhile."""
    line = Line(*range(8))
    line.uplink.blocks_in_flight = 1
    line(Opened(1, BLOB, 0, pieces()))
    assert line(BlockSent(1), 1.0) == [send(1, 1)]
    assert line(Opened(2, BLOB, 0, pieces())) == []
    assert line(Tick(), 1.1) == [send(2, 0)]
    line(BlockSent(2), 0.01)
    assert line(BlockSent(1), 0.01) == []
    sent = [line(BlockSent(2), 0.01) for _ in range(4)]
    assert any(send(1, 2) in commands for commands in sent)  # it gets its turns
    assert [any(command.stream == 2 for command in commands) for commands in sent] == [True] * 4


def test_a_child_that_came_late_is_not_waited_for_but_one_that_falls_behind_is() -> None:
    line = Line(0, 1, 2, 3, in_flight=1)
    assert line.uplink.lead(BLOB, 0) == 0, "nobody receives from here"
    line(Opened(1, BLOB, 0, pieces()))
    assert line.uplink.lead(BLOB, 0) == 0, "what was there before it came is none of its fault"
    line(Verified(BLOB, 4))
    assert line.uplink.lead(BLOB, 0) == 1
    for _ in range(5):
        line(BlockSent(1))
    assert line.uplink.lead(BLOB, 0) == 0, "it has caught up"
    line(Verified(BLOB, 5))
    line(Verified(BLOB, 6))
    line(Verified(BLOB, 7))
    assert line.uplink.lead(BLOB, 0) == 2, "one is on its way"
    line(Opened(2, BLOB, 0, pieces()))
    assert line.uplink.lead(BLOB, 0) == 0, "the one that lags least counts"


def test_what_another_stream_brings_is_left_out_and_waited_for_no_more() -> None:
    line = Line(0, 2, stripes=2, in_flight=1)
    assert line(Opened(1, BLOB, 0, pieces())) == [send(1, 0)]
    assert line(Diverted(1, (0, 2, 4))) == []  # the first is on its way
    assert line(BlockSent(1)) == []
    assert line(Verified(BLOB, 4)) == []
    assert line(Verified(BLOB, 6)) == [send(1, 6)]
    assert line(BlockSent(1)) == [End(1)]


def test_a_stream_all_of_which_another_one_brings_ends() -> None:
    line = Line()
    assert line(Opened(1, BLOB, 0, pieces(*range(7)))) == []
    assert line(Diverted(1, (7,))) == [End(1)]
    assert line(Diverted(1, (7,))) == line(Verified(BLOB, 7)) == []
    assert line(Diverted(9, (7,))) == []  # it is gone


def test_a_stream_with_a_limit_of_its_own_sends_evenly_and_holds_up_no_other() -> None:
    """Half a piece a second: blocks of a quarter of a second, at least BLOCK_MIN."""
    line = Line(*range(8), in_flight=1)
    sent = {1: 0, 2: 0}
    commands = line(Opened(1, BLOB, 0, pieces(), bytes_s=PIECE / 2))
    commands += line(Opened(2, BLOB, 0, pieces()))
    while line.now < 20.0:
        for command in commands:
            if isinstance(command, Send):
                sent[command.stream] += command.length
        flying = next((command.stream for command in commands if isinstance(command, Send)), None)
        if flying is not None:
            commands = line(BlockSent(flying), 0.001)
        else:
            wait_s = line.uplink.wait_s(line.now)
            commands = line(Tick(), wait_s if wait_s is not None else 0.5)
        if flying == 2 and sent[2] == 8 * PIECE:
            assert line.now < 1.0
    assert sent == {1: 8 * PIECE, 2: 8 * PIECE}


def test_a_stream_is_never_so_slow_that_it_keeps_its_slot_for_good() -> None:
    line = Line(0, in_flight=1)
    [first] = line(Opened(1, BLOB, 0, pieces(), bytes_s=1e-9))
    assert isinstance(first, Send) and first.length >= BLOCK_MIN
    line(BlockSent(1))
    wait_s = line.uplink.wait_s(line.now)
    assert wait_s is None or wait_s <= first.length / PACED_MIN_BYTES_S


CHILD, OTHER = Peer("a", "h1"), Peer("b", "h2")


def opened(
    stream: int,
    *lacks: int,
    peer: Peer = CHILD,
    urgency: Urgency = "none",
    stripe: int = 0,
    rides: bool | None = None,
) -> Opened:
    have = pieces(*set(range(8)).difference(lacks))
    return Opened(stream, BLOB, stripe, have, "start", peer, urgency, urgency != "none" if rides is None else rides)


def order_of(line: Line, stream: int, count: int) -> list[tuple[int, int]]:
    """What is sent after a block of `stream`: stream and piece of each block."""
    sent = []
    for _ in range(count):
        commands = [command for command in line(BlockSent(stream), 0.01) if isinstance(command, Send)]
        if not commands:
            break
        stream = commands[0].stream
        sent.append((stream, commands[0].piece))
    return sent


def test_what_a_reader_waits_for_comes_first_over_the_stream_of_the_stripe() -> None:
    """Lowest first, what a reader waits for before what it soon will, and only then the rest."""
    line = Line(*range(7), in_flight=1)
    assert line(opened(1, *range(7))) == [send(1, 0)]
    assert line(opened(2, 4, 3, urgency="soon waited for")) == []
    assert line(opened(3, 6, 5, urgency="waited for")) == []
    assert order_of(line, 1, 9) == [(1, 5), (1, 6), (1, 3), (1, 4), (1, 1), (1, 2)]


def test_a_rider_ends_with_its_last_piece() -> None:
    line = Line(*range(6), in_flight=1)
    line(opened(1, *range(7)))
    assert line(opened(2, 0, 3, 6, urgency="waited for")) == [], "the first has begun over the other stream"
    assert line(BlockSent(1)) == [send(1, 3)]
    assert line(Verified(BLOB, 6)) == []
    assert line(BlockSent(1)) == [End(2), send(1, 6)]


def test_of_what_is_alike_urgent_the_lowest_goes_first() -> None:
    """Of many parts that a client asks for at once, the first is to be whole first."""
    line = Line(*range(8), in_flight=1)
    line(opened(1, *range(8)))
    line(opened(2, 5, 6, urgency="waited for"))
    line(opened(3, 1, 2, 6, urgency="waited for"))
    assert [piece for _, piece in order_of(line, 1, 7)] == [1, 2, 5, 6, 3, 4, 7]


def test_a_stream_goes_on_while_what_is_urgent_is_not_here() -> None:
    line = Line(0, 1, in_flight=1)
    line(opened(1, 0, 1, 2, 3))
    line(opened(2, 3, urgency="waited for"))
    assert line(BlockSent(1)) == [send(1, 1)]
    assert line(Verified(BLOB, 2)) == []
    assert line(Verified(BLOB, 3)) == []
    assert order_of(line, 1, 3) == [(1, 3), (1, 2)]


def test_what_is_urgent_to_one_child_takes_nothing_from_another() -> None:
    """Both get as many pieces as without."""
    line = Line(*range(8), in_flight=1)
    line(opened(1, *range(8), peer=OTHER))
    line(opened(2, *range(8)))
    line(opened(3, 6, 7, urgency="soon waited for"))
    line(opened(4, 5, urgency="waited for"))
    sent = order_of(line, 1, 9)
    assert [peer for peer, _ in sent] == [2, 1] * 4 + [2]
    assert [piece for peer, piece in sent if peer == 2] == [0, 5, 6, 7, 1]


def test_a_rider_sends_what_its_carrier_may_not() -> None:
    """The child had said that piece 6 comes otherwise."""
    line = Line(*range(8), stripes=2, in_flight=1)
    line(opened(1, 0, 2, 4))
    line(opened(2, 4, 6, urgency="waited for"))
    assert sorted(order_of(line, 1, 4)) == [(1, 2), (1, 4), (2, 6)]


def test_a_rider_goes_on_by_itself_when_its_carrier_is_gone() -> None:
    line = Line(*range(8), stripes=2, in_flight=1)
    line(opened(1, 0, 2, 4, 6))
    line(opened(2, 2, 6, urgency="waited for"))
    assert line(Closed(1)) == [send(2, 2)]
    assert line(BlockSent(2)) == [send(2, 6)]
    assert line(BlockSent(2)) == [End(2)]


def test_without_a_stream_to_ride_on_it_sends_the_lowest_first() -> None:
    """Streams of other stripes and of other children carry none of it."""
    line = Line(stripes=2, in_flight=1)
    assert line(opened(1, 1, 3, 5, 7, stripe=1)) == line(opened(2, 0, 2, 4, 6, peer=OTHER)) == []
    line(opened(3, 0, 2, 4, urgency="waited for"))
    line(Verified(BLOB, 6))
    for piece in (4, 2, 0):
        line(Verified(BLOB, piece))
    # A piece that was next when a lower one came goes first.
    assert [piece for stream, piece in order_of(line, 2, 12) if stream == 3] == [4, 0, 2]


def test_what_is_lost_or_comes_otherwise_is_not_sent_for_a_reader() -> None:
    line = Line(0, 2, 4, 6, stripes=2, in_flight=1)
    assert line(opened(1, 0, 2, 4, 6, urgency="waited for")) == [send(1, 0)]
    line(Lost(BLOB, (4,)))
    line(Diverted(1, (6,)))
    assert order_of(line, 1, 3) == [(1, 2)]
    assert line(Verified(BLOB, 4)) == [send(1, 4)]
    assert line(BlockSent(1)) == [End(1)]


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_riders_starve_no_one_and_end(data: st.DataObject) -> None:
    """Whatever is urgent to whom, and whichever streams close: each stream that stays is given what
    it lacked, once, a rider by itself or by a stream of the same child; a stream that carries
    nothing is given what it lacked and nothing else."""
    line = Line(in_flight=1, blocks=data.draw(st.sampled_from([1, 2])))
    unverified = data.draw(st.permutations(range(8)))
    lacking: dict[int, set[int]] = {}
    peers: dict[int, Peer] = {}
    urgencies: dict[int, Urgency] = {}
    given_to: dict[int, list[int]] = {}
    flying: list[Send] = []
    ended: set[int] = set()
    closed: set[int] = set()

    def take(commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, End):
                assert command.stream not in ended
                ended.add(command.stream)
            else:
                flying.append(command)
                if command.offset == 0:
                    given_to[command.stream].append(command.piece)

    for number in range(1, 7):
        lacking[number], given_to[number] = data.draw(st.sets(st.integers(0, 7))), []
        peers[number], urgency = data.draw(st.sampled_from([CHILD, OTHER])), data.draw(st.sampled_from(URGENCIES))
        urgencies[number] = urgency
        take(line(opened(number, *lacking[number], peer=peers[number], urgency=urgency)))
        for _ in range(data.draw(st.integers(0, 2))):
            if unverified:
                take(line(Verified(BLOB, unverified.pop(0)), 1e-4))
        if data.draw(st.integers(0, 3)) == 0:
            gone = data.draw(st.integers(1, number))
            closed.add(gone)
            flying = [block for block in flying if block.stream != gone]
            take(line(Closed(gone)))
    while unverified or flying:
        assert len(flying) <= 1
        if flying and (not unverified or data.draw(st.booleans())):
            take(line(BlockSent(flying.pop().stream), 1e-4))
        else:
            take(line(Verified(BLOB, unverified.pop(0)), 1e-4))
    assert ended | closed == set(lacking)
    for number in set(lacking) - closed:
        given = given_to[number]
        assert len(given) == len(set(given)) and set(given) <= lacking[number]
        if urgencies[number] == "none":
            assert set(given) == lacking[number]
        alike = [other for other in lacking if peers[other] == peers[number]]
        if not closed.intersection(alike):  # a child that ends its stream asks anew for what was on its way
            assert lacking[number] <= set().union(*(given_to[other] for other in alike))
