"""A pull whose piece list other hosts vouch for: when the whole is compared, what the tracker is
told, and how pieces come again that another round lists differently."""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdist.core import uplink as ul
from p2pdist.core.download.download import STALE_S, Download
from p2pdist.core.download.events import (
    Awaiting,
    CloseStream,
    Complain,
    Completed,
    GaveUp,
    OpenStream,
    PieceStored,
    Planned,
    Quiet,
    StreamEnded,
    Tick,
    TrackerChanged,
)
from p2pdist.core.download.stillness import STALL_FIRST_S
from p2pdist.core.download.stripe import STALE_MAX
from p2pdist.core.pull import LIST_ASK_S, LIST_LATE_S, LOSS_REPORT_S, AskList, Command, Event, PullCore, ReportTransport
from p2pdist.core.sources import Sources
from p2pdist.core.vouched.read_ahead import LEAD_MIN, LEAD_SHARE, ReadAhead
from p2pdist.core.vouched.whole import (
    ALONE_WAIT_S,
    ROUND_WAIT_S,
    VERIFY_S,
    CheckWhole,
    Judge,
    ListChanged,
    VerifyPieces,
    WholeChecked,
)
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.model.plan import ORIGIN, Plan, Source, StripePlan

BLOB = digest_of(b"blob")
A, B = Source("A", "A:7071"), Source("B", "B:7071")
COUNT = 8


class Pull:
    """A pull of COUNT pieces in one stripe, and the time kept."""

    def __init__(self, *, held: int = 0) -> None:
        have = PieceSet(COUNT)
        for piece in range(held):
            have.add(piece)
        layout = PieceLayout(COUNT * 65536, 65536)
        self.download = Download(BLOB, layout, 1, have, Sources(), 0.0, patience_s=600.0, host="h")
        self.core = PullCore(self.download, "auto", vouched=True)
        self.now = 0.0

    def __call__(self, event: Event, after_s: float = 0.0) -> list[Command]:
        self.now += after_s
        return [*self.core.handle(event, now=self.now)]

    def plan(self, parent: Source) -> list[Command]:
        return self(Planned(Plan(BLOB, (StripePlan(0, parent),))))

    def store(self, *pieces: int, stream: int = 1) -> list[Command]:
        return [command for piece in pieces for command in self(PieceStored(stream, piece))]

    def filled(self, *, complete: bool = True) -> Pull:
        """All pieces are stored, and the whole is being compared."""
        self.plan(A)
        commands = self.store(*range(COUNT))
        assert CheckWhole(1) in commands
        assert not any(isinstance(command, Completed) for command in commands)
        self(ListChanged(complete))
        return self


def stream_of(commands: list[Command]) -> int:
    return next(command.stream for command in commands if isinstance(command, OpenStream))


# -- the whole


def test_a_pull_is_complete_when_the_whole_matches() -> None:
    """Not before, however many pieces are stored and listed."""
    pull = Pull().filled()
    assert pull(Tick(), 1.0) == []
    assert pull(WholeChecked(True, 1)) == [Judge(True, 0), Completed()]
    assert pull(WholeChecked(True, 1)) == []


def test_a_match_needs_no_list() -> None:
    """Pieces that the host read itself are stored before the tracker lists them."""
    assert Pull().filled(complete=False)(WholeChecked(True, 1)) == [Judge(True, 0), Completed()]


def test_a_pull_that_begins_with_all_pieces_compares_them() -> None:
    assert Pull(held=COUNT)(Tick()) == [CheckWhole(1)]


def test_a_mismatch_is_told_once_the_round_is_complete() -> None:
    """Until then a hash may still be replaced by nothing worse than its confirmation."""
    pull = Pull().filled(complete=False)
    assert pull(WholeChecked(False, 1)) == []
    assert pull(ListChanged(True)) == [Judge(False, 0)]
    assert pull(ListChanged(True)) == [], "once a round"
    assert pull(ListChanged(False, (), 1)) == []
    assert pull(ListChanged(True, (), 1)) == [Judge(False, 1)], "the same bytes, and the round lists them so"


def test_another_round_brings_other_pieces() -> None:
    """What it lists otherwise is lost, comes again from where the tracker says, and the whole is
    compared anew."""
    pull = Pull().filled()
    pull(WholeChecked(False, 1))
    pull(ListChanged(False, (), 1))
    commands = pull(ListChanged(False, (2, 5), 1))
    assert commands == [ReportTransport()], "the tracker hears at once, and has yet to plan"
    assert pull.download.counts == [COUNT - 2]
    assert stream_of(pull.plan(B)) == 2
    assert CheckWhole(2) not in pull(ListChanged(True, (), 1))
    assert CheckWhole(2) in pull.store(2, 5, stream=2)
    assert pull(WholeChecked(True, 2)) == [Judge(True, 1), Completed()]


def test_an_answer_that_comes_too_late_says_nothing() -> None:
    """The bytes that it is about are gone."""
    pull = Pull().filled()
    pull(ListChanged(False, (2,), 1))
    assert pull(WholeChecked(True, 1)) == []
    pull.plan(B)
    assert CheckWhole(2) in pull.store(2, stream=2)
    assert pull(WholeChecked(True, 1)) == []
    assert pull(WholeChecked(True, 2)) == [Judge(True, 1), Completed()]


def test_losses_are_not_told_at_every_message_but_told() -> None:
    """A stripe that had been complete has no parent any more, until the tracker names one again."""
    pull = Pull().filled()
    pull(WholeChecked(False, 1))
    assert ReportTransport() in pull(ListChanged(False, (2,), 1))
    assert ReportTransport() not in pull(ListChanged(False, (3,), 1))
    assert ReportTransport() not in pull(Tick(), LOSS_REPORT_S / 2)
    assert ReportTransport() in pull(Tick(), LOSS_REPORT_S)
    assert ReportTransport() not in pull(Tick(), 10.0)


def test_without_another_round_the_host_doubts_its_disk_and_then_gives_up() -> None:
    pull = Pull().filled()
    assert pull(WholeChecked(False, 1)) == [Judge(False, 0)]
    assert pull(Tick(), VERIFY_S + 0.1) == [VerifyPieces()]
    assert pull(ListChanged(True, (), 0)) == []
    assert pull(Tick(), VERIFY_S + 0.1) == [], "once is enough"
    end = pull(Tick(), ROUND_WAIT_S)
    assert len(end) == 1
    assert isinstance(end[0], GaveUp)
    assert isinstance(end[0].error, Corrupt)


def test_a_piece_that_the_disk_spoiled_comes_again() -> None:
    pull = Pull().filled()
    pull(WholeChecked(False, 1))
    pull(Tick(), VERIFY_S + 0.1)
    assert pull(ListChanged(True, (4,), 0)) == [ReportTransport()]
    pull.plan(B)
    assert CheckWhole(2) in pull.store(4, stream=2)
    assert pull(WholeChecked(True, 2)) == [Judge(True, 0), Completed()]


def test_rounds_in_which_something_happens_are_waited_for() -> None:
    pull = Pull().filled()
    pull(WholeChecked(False, 1))
    for round_ in range(1, 5):
        assert not any(isinstance(each, GaveUp) for each in pull(Tick(), ROUND_WAIT_S - 1))
        pull(ListChanged(False, (), round_))


def test_a_round_is_waited_for_as_long_as_it_grows() -> None:
    """An arbiter reads a large blob for minutes, and what it confirms loses no piece."""
    pull = Pull().filled()
    pull(WholeChecked(False, 1))
    for _ in range(5):
        assert not any(isinstance(each, GaveUp) for each in pull(Tick(), ROUND_WAIT_S - 1))
        assert pull(ListChanged(False, (), 1)) == []
    assert any(isinstance(each, GaveUp) for each in pull(Tick(), ROUND_WAIT_S + 1))


def test_a_new_tracker_hears_the_judgement_again() -> None:
    """It counts its rounds anew, and has heard nothing."""
    pull = Pull().filled()
    pull(ListChanged(False, (), 3))
    pull(WholeChecked(False, 1))
    assert pull(ListChanged(True, (), 3)) == [Judge(False, 3)]
    pull(TrackerChanged(False))
    assert not any(isinstance(each, GaveUp) for each in pull(Tick(), ALONE_WAIT_S - 1))
    pull(TrackerChanged(True))
    assert pull(ListChanged(True, (), 0)) == [Judge(False, 0)]


def test_alone_a_mismatch_ends_the_pull_later() -> None:
    pull = Pull().filled()
    pull(TrackerChanged(False))
    pull(WholeChecked(False, 1))
    end = pull(Tick(), ALONE_WAIT_S + 1)
    assert isinstance(end[-1], GaveUp)
    assert "no tracker" in str(end[-1].error)


# -- waiting for hashes


def test_a_source_is_not_blamed_while_its_piece_waits() -> None:
    """Neither stalled nor silent; once the piece is stored the usual limits hold again."""
    pull = Pull()
    stream = stream_of(pull.plan(A))
    pull(Awaiting(stream))
    for _ in range(20):
        assert not any(isinstance(each, Complain) for each in pull(Tick(), STALL_FIRST_S))
        assert not any(isinstance(each, Complain) for each in pull(Quiet(stream, False, 0)))
    pull(PieceStored(stream, 0))
    assert Complain(0, A, "stalled") in pull(Tick(), 100 * STALL_FIRST_S)


def test_alone_a_host_asks_for_the_list_where_its_pieces_came_from() -> None:
    pull = Pull()
    stream = stream_of(pull.plan(A))
    assert AskList(A) not in pull(Tick())
    assert AskList(A) not in pull(Awaiting(stream)), "the tracker will say"
    assert AskList(A) not in pull(Tick())
    pull(TrackerChanged(False))
    assert AskList(A) in pull(Awaiting(stream)), "at once"
    assert AskList(A) not in pull(Tick(), LIST_ASK_S / 2)
    assert AskList(A) in pull(Tick(), LIST_ASK_S)
    pull(PieceStored(stream, 0))
    assert AskList(A) not in pull(Tick(), LIST_ASK_S)


def test_a_list_that_does_not_grow_is_asked_for_elsewhere() -> None:
    """The host that read the piece may be gone with the tracker that was told."""
    pull = Pull()
    stream = stream_of(pull.plan(A))
    pull(Awaiting(stream))
    assert AskList(A) not in pull(Tick(), LIST_LATE_S - 1)
    pull(ListChanged(False))
    assert AskList(A) not in pull(Tick(), LIST_LATE_S - 1)
    assert AskList(A) in pull(Tick(), 2.0)


def test_a_pull_alone_never_asks_upstream_for_a_list() -> None:
    pull = Pull()
    stream = stream_of(pull.plan(ORIGIN))
    pull(Awaiting(stream))
    pull(TrackerChanged(False))
    assert not any(isinstance(each, AskList) for each in pull(Tick(), LIST_ASK_S))


# -- bytes that differ from the list


def test_what_was_listed_before_is_no_fault_of_its_source_for_a_while() -> None:
    pull = Pull()
    stream = stream_of(pull.plan(A))
    for _ in range(STALE_MAX):
        assert pull(StreamEnded(stream, "stale", 3)) == []
        stream = stream_of(pull(Tick(), STALE_S + 0.01))
    assert Complain(0, A, "missing", 3) in pull(StreamEnded(stream, "stale", 3)), "it does not hear"


def test_what_upstream_sends_otherwise_is_no_reason_to_give_up() -> None:
    """A lying host has stated the hash, for all that this reader knows; it states its own."""
    pull = Pull()
    stream = stream_of(pull.plan(ORIGIN))
    for _ in range(10):
        assert pull(StreamEnded(stream, "corrupt", 3)) == []
        stream = stream_of(pull(Tick(), STALE_S + 0.01))


def test_wrong_bytes_are_forgiven_when_another_round_begins() -> None:
    """The list may have been wrong, not the source: else two hosts would never receive from each
    other again."""
    pull = Pull()
    stream = stream_of(pull.plan(A))
    assert Complain(0, A, "corrupt", 3) in pull(StreamEnded(stream, "corrupt", 3))
    assert not pull.download.sources.usable(A, now=pull.now)
    pull(ListChanged(False, (), 0))
    assert not pull.download.sources.usable(A, now=pull.now)
    pull(ListChanged(False, (), 1))
    assert pull.download.sources.usable(A, now=pull.now)


def test_lost_pieces_leave_an_open_stream_alone() -> None:
    """It goes on with what it has to give; what was lost comes with the next one."""
    pull = Pull()
    stream = stream_of(pull.plan(A))
    pull.store(0, 1)
    assert not any(isinstance(each, CloseStream) for each in pull(ListChanged(False, (0,), 1)))
    pull.store(*range(2, COUNT))
    again = stream_of([*pull(StreamEnded(stream, "done")), *pull(Tick(), 1.0)])
    assert CheckWhole(1) in pull.store(0, stream=again)


STEP = st.one_of(
    st.tuples(st.just("store"), st.integers(0, COUNT - 1)),
    st.tuples(st.just("lose"), st.integers(0, COUNT - 1)),
    st.tuples(st.just("round"), st.integers(1, 2)),
    st.tuples(st.just("list"), st.booleans()),
    st.tuples(st.just("answer"), st.booleans()),
    st.tuples(st.just("tracker"), st.booleans()),
    st.tuples(st.just("tick"), st.integers(1, 20)),
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(STEP, max_size=40))
def test_whatever_happens_the_whole_is_judged_as_it_is(steps: list[tuple[str, int]]) -> None:
    """A pull completes only on a matching comparison of what is stored now; counts follow what is
    stored; no round is judged twice to be wrong; nothing is commanded after the end."""
    pull, stored, round_, check, judged, over = Pull(), set[int](), 0, 0, set[int](), False
    pull.plan(A)
    for what, value in steps:
        lost: tuple[int, ...] = ()
        valid = len(stored) == COUNT
        match what:
            case "store":
                stored.add(value)
                commands = pull(PieceStored(1, value))
            case "lose":
                lost = (value,) if value in stored else ()
                stored -= {value}
                commands = pull(ListChanged(False, lost, round_))
            case "round":
                round_ += value
                commands = pull(ListChanged(False, (), round_))
            case "list":
                commands = pull(ListChanged(bool(value), (), round_))
            case "answer":
                commands = pull(WholeChecked(bool(value), check))
            case "tracker":
                round_, judged = (0, set()) if value else (round_, judged)
                commands = pull(TrackerChanged(bool(value)))
            case _:
                commands = pull(Tick(), float(value))
        assert not (over and commands)
        for command in commands:
            match command:
                case CheckWhole(number):
                    check = number
                    assert len(stored) == COUNT
                case Completed():
                    assert what == "answer"
                    assert value
                    assert valid
                case Judge(False, number):
                    assert number not in judged
                    judged.add(number)
        over = over or any(isinstance(each, Completed | GaveUp) for each in commands)
        assert over or sum(pull.download.counts) == len(stored)


# -- what goes on to children, and how far the reader is ahead


class Sending:
    """An uplink with a blob of four pieces, and what it sends. Blocks are taken one by one."""

    def __init__(self) -> None:
        self.uplink = ul.Uplink()
        self.uplink.handle(ul.Held(BLOB, PieceLayout(4 * 65536, 65536), 1, PieceSet.full(4)), now=0.0)
        self.sent: list[tuple[int, int]] = []
        self.ended: list[int] = []

    def __call__(self, event: ul.Event) -> None:
        for command in self.uplink.handle(event, now=0.0):
            if isinstance(command, ul.Send):
                self.sent.append((command.stream, command.piece))
            else:
                self.ended.append(command.stream)

    def take(self, count: int) -> None:
        for _ in range(count):
            self(ul.BlockSent(self.sent[-1][0]))


def test_a_lost_piece_is_sent_when_it_has_come_again() -> None:
    """A child that had not been sent it waits for it; one that had asks anew."""
    sending = Sending()
    sending(ul.Opened(1, BLOB, 0, PieceSet(4)))
    sending.take(1)
    sending(ul.Lost(BLOB, (0, 3)))
    sending.take(2)
    assert sending.sent == [(1, 0), (1, 1), (1, 2)]
    sending(ul.Verified(BLOB, 0))
    assert len(sending.sent) == 3
    sending(ul.Verified(BLOB, 3))
    sending.take(1)
    assert sending.sent[3:] == [(1, 3)]
    assert sending.ended == [1]
    sending(ul.Opened(2, BLOB, 0, PieceSet(4, bytes([0b1110]))))
    assert sending.sent[4:] == [(2, 0)]


def test_a_lost_piece_that_was_about_to_be_sent_is_not() -> None:
    """It is sent last, in its new form."""
    sending = Sending()
    sending(ul.Opened(1, BLOB, 0, PieceSet(4)))
    sending(ul.Opened(2, BLOB, 0, PieceSet(4)))  # waits for the block of the first
    sending(ul.Closed(1))
    assert sending.sent == [(1, 0), (2, 0)]
    sending(ul.Opened(3, BLOB, 0, PieceSet(4)))
    sending(ul.Lost(BLOB, (0,)))
    sending(ul.Closed(2))
    assert sending.sent[2:] == [(3, 1)]
    sending.take(2)
    sending(ul.BlockSent(3))
    sending(ul.Verified(BLOB, 0))
    sending(ul.BlockSent(3))
    assert sending.sent[2:] == [(3, 1), (3, 2), (3, 3), (3, 0)]
    assert sending.ended == [3]


def test_a_reader_is_ahead_by_what_is_listed_at_once() -> None:
    ahead = ReadAhead(64 * LEAD_SHARE)
    assert ahead.lead_max == 64
    for piece in range(500):
        ahead.read(piece)
    ahead.listed(tuple(range(400)))
    assert ahead.lead_max >= 800
    for _ in range(50):
        ahead.read(900)
        ahead.listed((900,))
    assert ahead.lead_max == 64, "a small fleet's lists come often"


@pytest.mark.parametrize("total", [0, 1, 5])
def test_a_short_stripe_is_read_ahead_as_ever(total: int) -> None:
    assert ReadAhead(total).lead_max == LEAD_MIN
