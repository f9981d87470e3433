"""One pull: which source each stripe comes from, and what happens when one fails."""

import pytest

from p2pdist.core.download.download import DENIALS_MAX, DENIED_S, ORIGIN_CORRUPT_MAX, REOPEN_S, Download
from p2pdist.core.download.events import (
    AskTicket,
    Awaiting,
    CloseStream,
    Command,
    Complain,
    Completed,
    Event,
    GaveUp,
    HeldBack,
    OpenDemand,
    OpenStream,
    Paused,
    PieceStored,
    Planned,
    Quiet,
    Rejected,
    Starved,
    StreamEnded,
    Tick,
    TrackerChanged,
    Wanted,
)
from p2pdist.core.download.stillness import HEDGES_LEAST, STALL_FIRST_S
from p2pdist.core.download.streams import COMING_BYTES, DEMANDS_MAX, PREFETCHES_MAX, PROMISE_MIN_S, WANTED_S
from p2pdist.core.download.stripe import CONNECT_S, first_piece_s
from p2pdist.core.origin_seeding import Readers
from p2pdist.core.sources import (
    FIRST_PIECE_UNKNOWN_S,
    RESPONSE_UNKNOWN_S,
    SETTLED_PACES,
    SETTLED_SPREAD,
    STARVED_BYTES_S,
    STARVED_CONNECTS,
    STARVED_NEAR_S,
    STARVED_UNKNOWN_S,
    Sources,
)
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, DiskFull, NotFound, P2PDistError, Refused, Unavailable, Unsuitable
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.model.plan import ORIGIN, Plan, Source, StripePlan
from p2pdist.model.rendezvous import ranked

BLOB = digest_of(b"blob")
A, B, C, D = (Source(name, f"{name}:7071") for name in "ABCD")


class Pull:
    """A download of `count` pieces in `stripes` stripes, and the time kept."""

    def __init__(
        self,
        count: int = 8,
        stripes: int = 1,
        have: tuple[int, ...] = (),
        patience_s: float = 120.0,
        host: str = "h",
        piece_size: int = 65536,
    ) -> None:
        layout = PieceLayout(count * piece_size, piece_size)
        held = PieceSet(count)
        for piece in have:
            held.add(piece)
        self.core = Download(BLOB, layout, stripes, held, Sources(), 0.0, patience_s=patience_s, host=host)
        self.now = 0.0

    def __call__(self, event: Event, after_s: float = 0.0) -> list[Command]:
        self.now += after_s
        return self.core.handle(event, now=self.now)

    def plan(self, stripe: int, parent: Source | None, *alternates: Source) -> list[Command]:
        return self(Planned(Plan(BLOB, (StripePlan(stripe, parent, alternates),))))

    def alone(self, *keepers: Source) -> None:
        """The tracker names keepers and goes away."""
        self(Planned(Plan(BLOB, (), keepers)))
        self(TrackerChanged(False))

    def until_commands(self) -> list[Command]:
        """Let time pass until the core commands something."""
        while not (commands := self(Tick(), 0.25)):
            assert not self.core.finished
        return commands


def test_a_plan_opens_a_stream_a_stripe_and_the_last_piece_completes() -> None:
    pull = Pull(count=4, stripes=2)
    assert pull.plan(0, A) == [OpenStream(1, A, 0)]
    assert pull.plan(1, B) == [OpenStream(2, B, 1)]
    assert pull.core.parents() == ("A", "B")
    assert pull(PieceStored(1, 0)) == []
    assert pull(PieceStored(2, 1)) == []
    assert pull(PieceStored(1, 2)) == [CloseStream(1, after_piece=True)]
    assert pull(PieceStored(2, 3)) == [CloseStream(2, after_piece=True), Completed()]
    assert pull.core.parents() == (None, None)


def test_a_blob_that_is_there_completes_without_a_stream() -> None:
    pull = Pull(count=3, have=(0, 1, 2))
    assert pull(Tick()) == [Completed()]
    assert pull.plan(0, A) == []


def test_no_stream_is_opened_for_a_stripe_that_lacks_nothing() -> None:
    pull = Pull(count=4, stripes=2, have=(0, 2))
    assert pull.plan(0, A) == []
    assert pull.plan(1, A) == [OpenStream(1, A, 1)]


def test_a_piece_counts_once() -> None:
    pull = Pull(count=4, have=(0,))
    pull.plan(0, A)
    pull(PieceStored(1, 1))
    pull(PieceStored(1, 1))
    pull(PieceStored(1, 0))
    assert pull.core.counts == [2]


def test_nothing_comes_after_the_end() -> None:
    pull = Pull(count=1)
    pull.plan(0, A)
    assert pull(PieceStored(1, 0))[-1] == Completed()
    for event in (Tick(), PieceStored(1, 0), StreamEnded(1, "reset"), Rejected(Corrupt("x")), TrackerChanged(False)):
        assert pull(event, 500.0) == []


def test_a_broken_stream_is_complained_of_and_replaced_by_an_alternate() -> None:
    pull = Pull()
    pull.plan(0, A, B, C)
    assert pull(StreamEnded(1, "reset")) == [Complain(0, A, "reset"), OpenStream(2, B, 0)]
    assert pull(StreamEnded(2, "refused")) == [Complain(0, B, "refused"), OpenStream(3, C, 0)]
    assert pull.core.parents() == ("C",)


def test_with_nobody_left_the_first_who_may_be_tried_again_is() -> None:
    pull = Pull()
    pull.plan(0, A, B)
    pull(StreamEnded(1, "reset"))
    assert pull(StreamEnded(2, "reset"), 0.1) == [Complain(0, B, "reset")]
    assert pull(Tick(), 0.05) == []
    assert pull(Tick(), 0.2) == [OpenStream(3, A, 0)]


def test_a_new_plan_moves_the_stream_after_the_piece_under_way() -> None:
    pull = Pull()
    pull.plan(0, A)
    assert pull.plan(0, B) == [CloseStream(1, after_piece=True), OpenStream(2, B, 0)]
    assert pull(PieceStored(1, 0)) == []
    assert pull.core.counts == [1]
    assert pull(StreamEnded(1, "closed")) == []
    assert pull.plan(0, B, C) == []


def test_a_plan_that_names_who_failed_a_moment_ago_is_answered_with_a_complaint() -> None:
    """Or the tracker would wait for what never comes."""
    pull = Pull()
    pull.plan(0, A, B)
    pull(StreamEnded(1, "corrupt", 3))
    assert pull.plan(0, A, C) == [Complain(0, A, "corrupt")]
    assert pull.core.parents() == ("B",)
    assert pull.plan(0, C) == [CloseStream(2, after_piece=True), OpenStream(3, C, 0)]


def test_wrong_bytes_are_complained_of_and_their_source_is_not_opened_again() -> None:
    pull = Pull()
    pull.plan(0, A, B)
    assert pull(StreamEnded(1, "corrupt", 5)) == [Complain(0, A, "corrupt", 5), OpenStream(2, B, 0)]
    assert pull(StreamEnded(2, "reset")) == [Complain(0, B, "reset")]
    assert pull(Tick(), 1.0) == [OpenStream(3, B, 0)]


def test_a_source_that_gave_everything_and_left_pieces_out_is_asked_again_once() -> None:
    """The piece under way on a closed stream may have been lost. Twice running, it is the source
    that does not keep its word."""
    pull = Pull()
    pull.plan(0, A, B)
    assert pull(StreamEnded(1, "done")) == []
    assert pull(Tick(), REOPEN_S) == [OpenStream(2, A, 0)]
    assert pull(StreamEnded(2, "done")) == [Complain(0, A, "short"), OpenStream(3, B, 0)]


def test_a_source_that_gave_something_is_asked_for_the_rest() -> None:
    pull = Pull()
    pull.plan(0, A)
    for number in range(1, 4):
        pull(PieceStored(number, number))
        assert pull(StreamEnded(number, "done")) == []
        assert pull(Tick(), REOPEN_S) == [OpenStream(number + 1, A, 0)]


def test_standing_still_is_complained_of_with_growing_pauses() -> None:
    """The host stays: only the tracker can tell a slow parent from a starved one."""
    pull = Pull(patience_s=1000.0)
    pull.plan(0, A, B)
    times = []
    for _ in range(400):
        if pull(Tick(), 0.25):
            times.append(pull.now)
    assert times[:5] == [0.75, 2.0, 4.5, 9.5, 19.25]
    assert len(times) <= 8
    assert pull.core.parents() == ("A",)


def test_a_source_is_not_complained_of_while_its_stream_is_held_back_here() -> None:
    """As a preseed's is while a reader has pieces of the same blob come as a start."""
    pull = Pull(count=2)
    pull.plan(0, A)
    pull(PieceStored(1, 0))
    for _ in range(20):
        assert pull(HeldBack(1), 0.25) == []
        assert pull(Tick()) == []
    assert pull(HeldBack(2), 0.25) == [], "an unknown stream"
    assert pull(Tick(), 0.25) == []
    assert pull(Tick(), 2.0) == [Complain(0, A, "stalled")]


def test_a_piece_ends_the_complaints() -> None:
    pull = Pull()
    pull.plan(0, A)
    assert pull(Tick(), 1.0) == [Complain(0, A, "stalled")]
    pull(PieceStored(1, 0))
    assert pull(Tick(), 0.9) == []
    assert pull(Tick(), 0.2) == [Complain(0, A, "stalled")]


def test_where_pieces_take_long_so_does_a_stall() -> None:
    """Over a slow link a piece that takes two seconds is no reason to complain."""
    pull = Pull(count=40)
    pull.plan(0, A)
    for piece in range(10):
        pull(PieceStored(1, piece), 2.0)
    assert pull(Tick(), 5.0) == []
    assert pull(Tick(), 4.0) == [Complain(0, A, "stalled")]


def test_where_pieces_are_large_a_stripe_may_wait_for_its_turn() -> None:
    """Two stripes share a link of 25 MB/s, where a piece of 16 MiB takes 0.67 s: each has one after
    1.34 s."""
    pull = Pull(count=16, stripes=2, piece_size=16 << 20)
    pull.plan(0, A)
    pull.plan(1, B)
    for piece in range(8):
        assert pull(Tick(), 0.33) == []
        assert pull(Tick(), 0.33) == []
        assert pull(PieceStored(1 + piece % 2, piece), 0.01) == []
    assert pull(Tick(), 0.33 + 2 * 1.34) == []
    assert Complain(0, A, "stalled") in pull(Tick(), 3.0)


def test_the_first_large_piece_comes_through_a_tree() -> None:
    """It waits for a turn at each host above. The other stripe shows how long turns take here, so a
    stripe that never comes is found out sooner on a quick link."""
    quick, slow = (Pull(count=16, stripes=2, piece_size=16 << 20) for _ in range(2))
    for pull, piece_s in ((quick, 0.06), (slow, 0.67)):
        pull.plan(0, A)
        pull.plan(1, B)
        assert pull(Tick(), 5.0) == []
        for piece in (0, 2, 4):
            assert pull(PieceStored(1, piece), piece_s) == []
    assert Complain(1, B, "stalled") in quick(Tick(), 1.0)
    assert slow(Tick(), 1.0) == []
    assert Complain(1, B, "stalled") in slow(Tick(), 6.0)


def test_an_alternate_that_stands_still_is_left() -> None:
    """It was this host's own choice, and may receive through this host by now."""
    pull = Pull()
    pull.plan(0, ORIGIN, B)
    assert pull(StreamEnded(1, "unavailable")) == [Complain(0, ORIGIN, "unavailable"), OpenStream(2, B, 0)]
    assert pull(Tick(), 1.0) == [
        Complain(0, B, "stalled"),
        CloseStream(2, after_piece=False),
        OpenStream(3, ORIGIN, 0),
    ]


def test_without_a_tracker_the_host_changes_parents_by_itself() -> None:
    pull = Pull()
    pull.plan(0, A, B)
    pull.alone()
    assert pull.until_commands() == [
        Complain(0, A, "stalled"),
        CloseStream(1, after_piece=False),
        OpenStream(2, B, 0),
    ]
    assert SETTLED_PACES * STALL_FIRST_S <= pull.now <= 0.5 + SETTLED_PACES * (1 + SETTLED_SPREAD) * STALL_FIRST_S
    assert pull.until_commands()[-1] == OpenStream(3, A, 0)


def test_time_before_the_tracker_went_away_does_not_count() -> None:
    """A tracker that restarts while something stands still changes nothing."""
    pull = Pull()
    pull.plan(0, A, B)
    for _ in range(80):
        pull(Tick(), 0.25)
    pull(TrackerChanged(False))
    assert pull(Tick(), 0.5) == []
    pull(TrackerChanged(True))
    assert pull.core.parents() == ("A",)


def test_what_stood_still_without_a_tracker_is_believed_when_a_tracker_names_it() -> None:
    """All below a failure stand still: it is held against nobody."""
    pull = Pull()
    pull.plan(0, A, B)
    pull.alone()
    assert pull.until_commands()[-1] == OpenStream(2, B, 0)
    pull(TrackerChanged(True))
    assert pull.plan(0, A) == [CloseStream(2, after_piece=True), OpenStream(3, A, 0)]


def test_without_sources_and_a_tracker_a_host_asks_the_keepers() -> None:
    """One keeper is dead: the next."""
    order = [Source(name, f"{name}:7071") for name in ranked(f"{BLOB}/0".encode(), "BCD", 3)]
    pull = Pull()
    pull.plan(0, A)
    pull.alone(B, C, D)
    assert pull(StreamEnded(1, "reset")) == [Complain(0, A, "reset"), OpenStream(2, order[0], 0)]
    assert pull(StreamEnded(2, "refused")) == [Complain(0, order[0], "refused"), OpenStream(3, order[1], 0)]


def test_the_first_keeper_reads_the_origin_of_its_own_accord_until_a_tracker_says_otherwise() -> None:
    first = ranked(f"{BLOB}/0".encode(), "BCD", 1)[0]
    pull = Pull(host=first)
    pull.plan(0, A)
    pull.alone(B, C, D)
    assert pull(StreamEnded(1, "reset")) == [Complain(0, A, "reset")]
    assert pull.until_commands() == [OpenStream(2, ORIGIN, 0)]
    assert pull.core.parents() == ("",)
    pull(PieceStored(2, 0))
    pull(TrackerChanged(True))
    assert pull.core.parents() == ("",), "until a plan comes"
    assert pull.plan(0, D) == [CloseStream(2, after_piece=True), OpenStream(3, D, 0)]


def test_with_a_tracker_a_keeper_does_not_read_the_origin() -> None:
    pull = Pull(host="B", patience_s=30.0)
    pull.plan(0, A)
    pull(Planned(Plan(BLOB, (), (B,))))
    pull(StreamEnded(1, "refused"))
    while not pull.core.finished:
        assert not any(isinstance(each, OpenStream) and each.source == ORIGIN for each in pull(Tick(), 0.25))


@pytest.mark.parametrize(
    "error", [NotFound("no such blob"), Refused("no"), Unsuitable("no ranges"), Unavailable("no origin")]
)
def test_what_a_keeper_cannot_read_of_its_own_accord_does_not_end_its_pull(error: P2PDistError) -> None:
    """Others may have it; with a lease all wait for what its holder finds out."""
    reason = {NotFound: "missing", Refused: "refused", Unsuitable: "refused", Unavailable: "failed"}[type(error)]
    pull = Pull(host="B")
    pull.alone(B)
    assert pull.until_commands() == [OpenStream(1, ORIGIN, 0)]
    (complaint,) = pull(StreamEnded(1, reason, error=error))
    assert isinstance(complaint, Complain) and not pull.core.finished
    assert pull.until_commands() == [OpenStream(2, ORIGIN, 0)]
    full = DiskFull("/store", needed=2, free=1)
    assert pull(StreamEnded(2, "failed", error=full))[-1] == GaveUp(full)


def test_who_waits_for_its_parent_asks_the_keepers_as_soon_as_the_tracker_is_gone() -> None:
    pull = Pull()
    pull.plan(0, A)
    for number in range(1, 8):
        pull(StreamEnded(number, "refused"))
        pull.now = pull.core.sources.usable_at(A)
        assert pull(Tick()) == [OpenStream(number + 1, A, 0)]
    pull(StreamEnded(8, "refused"))
    assert pull.core.sources.usable_at(A) > pull.now + 10
    pull.alone(B)
    assert pull(Tick(), 0.25) == [OpenStream(9, B, 0)]


def test_a_list_of_keepers_stays_until_another_comes() -> None:
    pull = Pull()
    pull(Planned(Plan(BLOB, (), (B,))))
    pull.plan(0, A)
    pull(TrackerChanged(False))
    assert pull(StreamEnded(1, "reset"))[-1] == OpenStream(2, B, 0)


def test_nothing_known_of_peers_is_waited_for() -> None:
    """A pull that begins while no tracker answers waits for one, and says so in the end."""
    pull = Pull(patience_s=30.0)
    pull(TrackerChanged(False))
    commands = pull.until_commands()
    assert pull.now > 30.0
    assert isinstance(commands[0], GaveUp) and "no tracker answers" in commands[0].error.what


def test_a_host_that_was_starved_goes_back_to_its_parent() -> None:
    pull = Pull(count=400)
    pull.plan(0, A, B)
    pull.alone(C)
    assert pull.until_commands()[-1] == OpenStream(2, B, 0)
    piece, commands = 0, []
    while not commands:
        pull(PieceStored(2, piece))
        piece, commands = piece + 1, pull(Tick(), 0.25)
    assert commands == [CloseStream(2, after_piece=True), OpenStream(3, A, 0)]
    assert pull.until_commands() == [
        Complain(0, A, "stalled"),
        CloseStream(3, after_piece=False),
        OpenStream(4, B, 0),
    ]


def test_an_origin_with_wrong_content_is_given_up_after_some_tries() -> None:
    pull = Pull()
    pull.plan(0, ORIGIN)
    for number in range(1, ORIGIN_CORRUPT_MAX):
        assert pull(StreamEnded(number, "corrupt", 2)) == [Complain(0, ORIGIN, "corrupt", 2)]
        assert pull(Tick(), 20.0) == [OpenStream(number + 1, ORIGIN, 0)]
    *_, end = pull(StreamEnded(ORIGIN_CORRUPT_MAX, "corrupt", 2))
    assert isinstance(end, GaveUp) and isinstance(end.error, Corrupt)


def test_an_origin_that_lacks_the_blob_ends_the_pull_at_once() -> None:
    pull = Pull()
    pull.plan(0, ORIGIN)
    error = NotFound("no such blob")
    assert pull(StreamEnded(1, "missing", error=error)) == [Complain(0, ORIGIN, "missing"), GaveUp(error)]


def test_an_origin_that_serves_no_ranges_ends_the_pull() -> None:
    """It is unavailable, and stays so until it is set up otherwise: nobody waits for that."""
    pull = Pull()
    pull.plan(0, ORIGIN)
    error = Unsuitable("it does not serve byte ranges")
    assert pull(StreamEnded(1, "refused", error=error)) == [Complain(0, ORIGIN, "refused"), GaveUp(error)]


def test_what_this_host_did_wrong_ends_the_pull_and_blames_nobody() -> None:
    pull = Pull(count=4, stripes=2)
    pull.plan(0, A)
    pull.plan(1, B)
    error = DiskFull("/store", needed=2, free=1)
    assert pull(StreamEnded(1, "failed", error=error)) == [
        CloseStream(1, after_piece=False),
        CloseStream(2, after_piece=False),
        GaveUp(error),
    ]


def test_a_swarm_that_cannot_go_on_ends_the_pull() -> None:
    pull = Pull()
    pull.plan(0, A)
    error = Corrupt("the origin's copy is corrupt")
    assert pull(Rejected(error)) == [CloseStream(1, after_piece=False), GaveUp(error)]


@pytest.mark.parametrize("tracker", [True, False])
def test_patience_ends_and_says_why(tracker: bool) -> None:
    pull = Pull(patience_s=30.0)
    pull.plan(0, A)
    pull(TrackerChanged(tracker))
    pull(StreamEnded(1, "refused"))
    commands: list[Command] = []
    while not pull.core.finished:
        commands = pull(Tick(), 0.25)
    assert 30.0 < pull.now < 30.5
    (end,) = [command for command in commands if isinstance(command, GaveUp)]
    assert isinstance(end.error, Unavailable)
    assert "A: refused" in end.error.what
    assert ("no tracker answers" in end.error.what) is not tracker


def test_a_piece_renews_patience() -> None:
    pull = Pull(patience_s=10.0)
    pull.plan(0, A)
    for piece in range(7):
        pull(PieceStored(1, piece), 9.0)
        pull(Tick())
    assert not pull.core.finished


def test_the_callers_set_is_not_the_cores() -> None:
    """The store's bitmap may change in another thread; the core counts what it has been told."""
    have = PieceSet(4)
    core = Download(BLOB, PieceLayout(4 * 65536, 65536), 1, have, Sources(), 0.0)
    have.add(0)
    assert 0 not in core.have and core.counts == [0]


def test_plans_for_stripes_that_do_not_exist_are_ignored() -> None:
    assert Pull(stripes=2).plan(2, A) == []


def test_while_it_is_paused_another_transport_brings_the_pieces() -> None:
    """Streams end after the pieces under way, none is opened, whatever is planned; then they are
    opened for what is lacking."""
    pull = Pull(count=4, stripes=2)
    pull.plan(0, A)
    pull.plan(1, B)
    assert pull(Paused(True)) == [CloseStream(1, after_piece=True), CloseStream(2, after_piece=True)]
    assert pull.core.parents() == (None, None)
    pull(StreamEnded(1, "closed"))
    assert pull.plan(0, C) == []
    assert pull(Tick(), 30.0) == []
    assert pull(PieceStored(-1, 0)) == []
    assert pull(PieceStored(-1, 2)) == []
    pull(Paused(False))
    assert pull(Tick()) == [OpenStream(3, B, 1)]
    assert pull(PieceStored(3, 1)) == []
    assert pull(PieceStored(3, 3)) == [CloseStream(3, after_piece=True), Completed()]


def test_patience_ends_while_paused_as_well() -> None:
    pull = Pull(patience_s=10.0)
    pull(Paused(True))
    assert isinstance(pull(Tick(), 10.1)[-1], GaveUp)


def test_who_may_read_the_origin() -> None:
    """The holder of a lease; the keepers where the reading is dealt, and while no tracker
    answers."""
    pull = Pull(stripes=2, host="A")
    pull.plan(1, ORIGIN)
    pull(Planned(Plan(BLOB, (), (A, B, C))))
    assert pull.core.readers() == Readers(BLOB, "A", 2, frozenset({1}), ("A", "B", "C"))
    pull(Planned(Plan(BLOB, (), (), dealt=True)))
    assert pull.core.readers() == Readers(BLOB, "A", 2, frozenset({1}), ("A", "B", "C"), shared=True)
    pull(TrackerChanged(False))
    assert pull.core.readers().alone


def test_what_a_pull_waits_for_is_told_while_nothing_comes() -> None:
    """Not for a moment's failure, and not after pieces have come again."""
    pull = Pull(count=4)
    pull.plan(0, ORIGIN)
    pull(Tick(), 9.0)
    assert pull.core.trouble(pull.now) == ""
    pull(StreamEnded(1, "unavailable", error=Unavailable("the origin answered 503")))
    assert pull.core.trouble(pull.now) == "origin: the origin answered 503"
    opened = pull(Tick(), 60.0)
    assert isinstance(opened[0], OpenStream)
    pull(PieceStored(opened[0].stream, 0))
    assert pull.core.trouble(pull.now + 60.0) == ""
    pull(StreamEnded(opened[0].stream, "unavailable", error=Unavailable("the origin answered 500")), 0.5)
    assert pull.core.trouble(pull.now) == ""
    assert pull.core.trouble(pull.now + 2.0) == "origin: the origin answered 500"


class QuietPull(Pull):
    """A download whose first streams give nothing, as the agent says at each tick."""

    def quiet(self, stream: int, *, responded: bool, received_bytes: int = 0, after_s: float = 0.25) -> list[Command]:
        return self(Quiet(stream, responded, received_bytes), after_s)

    def left(self, stream: int, *, responded: bool, received_bytes: int = 0) -> list[Command]:
        """What a quiet moment leads to, but for what a host says that has nothing."""
        commands = self.quiet(stream, responded=responded, received_bytes=received_bytes)
        return [command for command in commands if not isinstance(command, Starved)]

    def until_left(self, stream: int, *, responded: bool, bytes_s: float = 0.0) -> float:
        """How long a silent stream is waited for; it is replaced by one from `B` then."""
        since, received = self.now, 200.0 if responded else 0.0
        while not (commands := self.left(stream, responded=responded, received_bytes=int(received))):
            assert self.now < since + 60.0
            received += bytes_s * 0.25
        assert commands == [
            Complain(0, A, "stalled"),
            CloseStream(stream, after_piece=False),
            OpenStream(stream + 1, B, 0),
        ]
        return self.now - since


@pytest.mark.parametrize(("responded", "bytes_s"), [(False, 0.0), (True, 0.0), (True, 1.0), (True, 1000.0)])
def test_a_source_that_is_silent_is_left(responded: bool, bytes_s: float) -> None:
    """One that does not respond, one that responds and sends nothing, and one that drips."""
    pull = QuietPull()
    pull.plan(0, A, B)
    limit_s = FIRST_PIECE_UNKNOWN_S if responded else RESPONSE_UNKNOWN_S
    assert limit_s <= pull.until_left(1, responded=responded, bytes_s=bytes_s) <= limit_s + 0.5


@pytest.mark.parametrize(("connected_s", "limit_s"), [(0.001, RESPONSE_UNKNOWN_S), (0.4, 1.6), (None, CONNECT_S)])
def test_a_source_has_as_long_to_respond_as_its_connection_explains(connected_s: float | None, limit_s: float) -> None:
    """Where this host's uplink is full, what it asks waits behind what it sends."""
    pull = Pull()
    pull.plan(0, A, B)
    while Complain(0, A, "stalled") not in pull(Quiet(1, False, 0, connected_s=connected_s), 0.05):
        assert pull.now < 10.0
    assert limit_s <= pull.now <= limit_s + 0.2


def test_a_source_that_sends_is_not_left() -> None:
    """A piece may take long over a slow link, and bytes come all the time."""
    pull = QuietPull()
    pull.plan(0, A, B)
    for step in range(100):
        assert pull.left(1, responded=True, received_bytes=20_000 * step) == []
    pull(PieceStored(1, 0))
    for _ in range(100):  # what gave something may stand still: the tracker knows why
        assert pull.quiet(1, responded=True, received_bytes=2_000_000) == []


def test_silence_is_judged_by_what_is_usual() -> None:
    """Where first pieces take five seconds, one second of silence says nothing."""
    pull = QuietPull(count=40)
    for piece in range(8):
        pull.plan(0, (C, D)[piece % 2])
        pull(PieceStored(piece + 1, piece), 5.0)
    pull.plan(0, A, B)
    assert pull.until_left(9, responded=True) >= 5.0


def test_where_there_is_no_other_source_the_host_stays() -> None:
    pull = QuietPull()
    pull.plan(0, A)
    commands = [command for _ in range(40) for command in pull.left(1, responded=False)]
    assert commands[0] == Complain(0, A, "stalled")
    assert set(commands) == {Complain(0, A, "stalled")}
    assert len(commands) < 5, "its complaints come with growing pauses"
    assert pull(PieceStored(1, 0)) == []


def test_hosts_at_an_address_that_was_silent_are_not_tried() -> None:
    """Twenty names of one process cost as much time as one of them."""
    pull = QuietPull()
    pull.plan(0, A, B)
    pull.until_left(1, responded=False)
    for number in range(20):
        other = Source(f"other{number}", A.address)
        assert pull.plan(0, other, B) == [Complain(0, other, "stalled")]
    assert pull.core.parents() == ("B",)


def test_without_a_tracker_silence_has_its_own_rules() -> None:
    """All that receive through a host which died stand still, and must not move at once."""
    pull = QuietPull()
    pull.plan(0, A, B)
    pull.alone()
    assert [command for _ in range(4) for command in pull.quiet(1, responded=False)] == []


def test_a_source_that_takes_no_ticket_is_not_complained_of_and_another_ticket_is_asked_for() -> None:
    pull = Pull()
    pull.plan(0, A, B)
    assert pull(StreamEnded(1, "denied", error=Refused("the ticket has expired"))) == [AskTicket()]
    assert pull(Tick(), DENIED_S / 2) == []
    assert pull(Tick(), DENIED_S / 2) == [OpenStream(2, B, 0)], "another may have a clock that is right"
    assert pull(StreamEnded(2, "denied")) == [AskTicket()]
    assert pull.plan(0, A, B) == [OpenStream(3, A, 0)], "the new ticket comes with a plan, and counts at once"
    assert pull(PieceStored(3, 0)) == []


def test_a_source_that_takes_no_ticket_for_long_is_complained_of() -> None:
    """Until a piece comes from any source."""
    pull = Pull()
    pull.plan(0, A)
    for number in range(1, DENIALS_MAX + 1):
        assert pull(StreamEnded(number, "denied")) == [AskTicket()]
        assert pull(Tick(), DENIED_S) == [OpenStream(number + 1, A, 0)]
    assert pull(StreamEnded(DENIALS_MAX + 1, "denied")) == [Complain(0, A, "refused")]
    pull = Pull()
    pull.plan(0, A)
    for number in range(1, DENIALS_MAX + 1):
        pull(StreamEnded(number, "denied"))
        pull(Tick(), DENIED_S)
    pull(PieceStored(DENIALS_MAX + 1, 0))
    assert pull(StreamEnded(DENIALS_MAX + 1, "denied")) == [AskTicket()]


def test_wanted_pieces_come_by_streams_of_their_own_each_once() -> None:
    """From where their stripes come; a stream that brings them is not doubled."""
    pull = Pull(count=8, stripes=2)
    assert pull(Wanted((6,))) == []  # no source is known yet
    pull.plan(0, A, C)
    pull.plan(1, B)
    assert pull(Wanted((3, 6, 4))) == [OpenDemand(3, A, 0, (4, 6)), OpenDemand(4, B, 1, (3,))]
    assert pull(Wanted((3, 6, 4))) == []
    assert pull(PieceStored(3, 6)) == []
    assert pull(Wanted((6, 2))) == [OpenDemand(5, A, 0, (2,))]
    assert pull(StreamEnded(4, "done")) == []
    assert pull(Wanted((3,))) == []  # it comes over the stream of the stripe
    assert pull(Wanted((3,)), PROMISE_MIN_S) == [OpenDemand(6, B, 1, (3,))]
    assert pull(StreamEnded(6, "short")) == []
    assert pull(Wanted((3,))) == [OpenDemand(7, B, 1, (3,))]


def test_wanted_pieces_are_requested_anew_where_their_stripe_comes_from_elsewhere() -> None:
    """The former source would send them over a connection of its own, beside others."""
    pull = Pull(count=8, stripes=2)
    pull.plan(0, A)
    pull.plan(1, A)
    assert pull(Wanted((2, 3))) == [OpenDemand(3, A, 0, (2,)), OpenDemand(4, A, 1, (3,))]
    assert pull.plan(0, B) == [CloseStream(3, False), CloseStream(1, True), OpenStream(5, B, 0)]
    assert pull(Wanted((2, 3))) == [OpenDemand(6, B, 0, (2,))]
    assert pull(StreamEnded(3, "closed")) == []
    assert pull(Wanted((2, 3))) == []


def test_a_wanted_piece_that_does_not_come_is_requested_from_the_next_source() -> None:
    pull = Pull(count=4)
    pull.plan(0, A, B)
    assert pull(Wanted((2,))) == [OpenDemand(2, A, 0, (2,))]
    assert pull(Wanted((2,)), WANTED_S / 2) == []
    assert pull(Wanted((2,)), WANTED_S / 2) == [OpenDemand(3, B, 0, (2,))]


def test_what_is_prefetched_takes_no_stream_from_readers() -> None:
    """Each has streams of its own; pieces that one of them brings, another does not."""
    pull = Pull(count=16)
    pull.plan(0, A, B)
    for number in range(PREFETCHES_MAX):
        assert pull(Wanted((number,), prefetch=True)) == [OpenDemand(2 + number, A, 0, (number,), True)]
    assert pull(Wanted((8,), prefetch=True)) == []
    assert pull(Wanted((0,))) == [], "it comes"
    for number in range(DEMANDS_MAX):
        assert pull(Wanted((8 + number,))) == [OpenDemand(2 + PREFETCHES_MAX + number, A, 0, (8 + number,))]
    assert pull(Wanted((15,))) == []
    assert pull(StreamEnded(2, "reset")) == []
    assert pull(Wanted((0, 14), prefetch=True)) == [OpenDemand(2 + PREFETCHES_MAX + DEMANDS_MAX, A, 0, (0, 14), True)]


def test_a_reader_waits_behind_nothing_that_is_prefetched_but_the_next_piece() -> None:
    """A reader's piece is requested alone where others come before it, and once."""
    pull = Pull(count=16, piece_size=COMING_BYTES)
    pull.plan(0, A)
    assert pull(Wanted((3, 4, 5, 6), prefetch=True)) == [OpenDemand(2, A, 0, (3, 4, 5, 6), True)]
    assert pull(Wanted((3,))) == [], "it comes next"
    assert pull(Wanted((5,))) == [OpenDemand(3, A, 0, (5,))]
    assert pull(Wanted((5,))) == pull(Wanted((5,), prefetch=True)) == []
    pull(PieceStored(2, 3))
    assert pull(Wanted((4,))) == [], "it comes next now"
    pull(PieceStored(2, 4))
    pull(PieceStored(2, 6))
    assert pull(StreamEnded(2, "done")) == []
    assert pull(StreamEnded(3, "reset")) == []
    assert pull(Wanted((5,))) == [OpenDemand(4, A, 0, (5,))], "the source left it out of the first stream"


def test_a_reader_requests_nothing_anew_that_is_on_its_way() -> None:
    """The next small pieces of a stream have left its source: they come before what is requested
    now, and would come twice."""
    pull = Pull(count=16)
    pull.plan(0, A)
    coming = COMING_BYTES // 65536
    assert coming > 1
    ahead = tuple(range(3, 3 + 2 * coming))
    assert pull(Wanted(ahead, prefetch=True)) == [OpenDemand(2, A, 0, ahead, True)]
    assert pull(Wanted(ahead[:coming])) == []
    assert pull(Wanted((ahead[coming],))) == [OpenDemand(3, A, 0, (ahead[coming],))]
    pull(PieceStored(2, ahead[0]))
    assert pull(Wanted((*ahead[1:coming], ahead[coming + 1]))) == [], "one that comes alone is in the way of none"
    assert pull(Wanted((ahead[coming + 2],))) == [OpenDemand(4, A, 0, (ahead[coming + 2],))]


def test_what_a_reader_asked_for_alone_is_asked_for_again_where_it_does_not_come() -> None:
    """Also while the stream of what comes ahead goes on, out of which the source has left it."""
    pull = Pull(count=16, piece_size=COMING_BYTES)
    pull.plan(0, A)
    pull(Wanted((3, 4, 5, 6), prefetch=True))
    assert pull(Wanted((5,))) == [OpenDemand(3, A, 0, (5,))]
    assert pull(StreamEnded(3, "reset")) == []
    pull(PieceStored(2, 3))
    pull(PieceStored(2, 4))
    assert pull(Wanted((5,))) == [OpenDemand(4, A, 0, (5,))]


def test_what_is_prefetched_last_makes_room_for_what_comes_before_it() -> None:
    """Readers take turns from the lowest piece on, whichever came first."""
    pull = Pull(count=40)
    pull.plan(0, A)
    streams = [pull(Wanted((10 * number,), prefetch=True))[0].stream for number in range(1, 1 + PREFETCHES_MAX)]
    number = streams[-1] + 1
    assert pull(Wanted((30,), prefetch=True)) == []
    assert pull(Wanted((5,), prefetch=True)) == [CloseStream(streams[-1], False), OpenDemand(number, A, 0, (5,), True)]
    assert pull(Wanted((6,), prefetch=True)) == []
    assert pull(StreamEnded(streams[-1], "closed")) == []
    assert pull(PieceStored(number, 5)) == pull(StreamEnded(number, "done")) == []
    (again,) = pull(Wanted((10 * PREFETCHES_MAX,), prefetch=True))
    assert again.pieces == (10 * PREFETCHES_MAX,)


def test_what_is_prefetched_may_take_long_until_a_reader_waits_for_it() -> None:
    pull = Pull(count=4)
    pull.plan(0, A, B)
    assert pull(Wanted((2,), prefetch=True)) == [OpenDemand(2, A, 0, (2,), True)]
    assert pull(Wanted((2,), prefetch=True), WANTED_S) == []
    assert pull(Wanted((2,))) == [OpenDemand(3, B, 0, (2,))]


def test_streams_for_wanted_pieces_end_with_the_download_and_give_way_to_a_swarm() -> None:
    pull = Pull(count=2)
    pull.plan(0, A)
    pull(Wanted((1,)))
    pull(PieceStored(1, 0))
    assert pull(PieceStored(1, 1)) == [CloseStream(1, after_piece=True), CloseStream(2, after_piece=False), Completed()]
    pull = Pull(count=2)
    pull.plan(0, A)
    pull(Wanted((1,)))
    assert CloseStream(2, after_piece=True) in pull(Paused(True))
    assert pull.core.writing == {1, 2}  # until they have ended no swarm begins
    assert pull(Wanted((0,))) == []


class HungryPull(QuietPull):
    """A download in two stripes that has nothing yet, from one source each."""

    def __init__(self, have: tuple[int, ...] = ()) -> None:
        super().__init__(stripes=2, have=have)
        self.plan(0, A)
        self.plan(1, B)
        self.limit_s = STARVED_UNKNOWN_S + 65536 / STARVED_BYTES_S

    def both(self, after_s: float) -> list[Command]:
        """Both sources are quiet."""
        return [*self.quiet(1, responded=False, after_s=after_s), *self.quiet(2, responded=True, after_s=0.0)]


def test_a_host_that_has_nothing_says_so_once_and_stays() -> None:
    """Long before a source is left for its silence, and without accusing it."""
    pull = HungryPull()
    assert pull.limit_s < RESPONSE_UNKNOWN_S / 2
    assert pull.both(pull.limit_s - 0.01) == []
    assert pull.both(0.02) == [Starved(0, A), Starved(1, B)]
    assert pull.both(0.1) == []
    assert pull.core.parents() == ("A", "B")


def test_a_source_that_waits_itself_is_told_of_and_kept() -> None:
    """The tracker may know that it claims pieces. It is not silent, however long it waits."""
    pull = HungryPull()
    assert pull(Quiet(1, True, 200, waits=True), pull.limit_s) == [Starved(0, A, waits=True)]
    assert all(pull(Quiet(1, True, 200, waits=True), 1.0) == [] for _ in range(30))
    assert pull.core.parents() == ("A", "B")


@pytest.mark.parametrize("connected_s", [0.001, 0.008])
def test_a_host_near_its_source_says_so_sooner(connected_s: float) -> None:
    pull = Pull(count=64)
    pull.plan(0, A)
    limit_s = max(STARVED_NEAR_S, STARVED_CONNECTS * connected_s) + 65536 / STARVED_BYTES_S
    quiet = Quiet(1, False, 0, connected_s=connected_s)
    assert pull(quiet, limit_s - 0.01) == [] and pull(quiet, 0.02) == [Starved(0, A)]


def test_a_host_starves_twice_a_stripe_at_most() -> None:
    """Where the tracker cannot help, it is not asked for ever."""
    pull = HungryPull()
    assert Starved(0, A) in pull.both(pull.limit_s)
    pull.plan(0, C)
    assert Starved(0, C) in pull.quiet(3, responded=False, after_s=pull.limit_s)
    pull.plan(0, D)
    assert pull.quiet(4, responded=False, after_s=pull.limit_s) == []


@pytest.mark.parametrize("case", ["a piece", "no tracker", "the origin"])
def test_a_host_that_has_a_piece_of_the_stripe_or_may_be_slow_itself_does_not_starve(case: str) -> None:
    pull = HungryPull((0,) if case == "a piece" else ())
    if case == "no tracker":
        pull.alone()
    elif case == "the origin":
        pull.plan(0, ORIGIN)
        assert pull.quiet(3, responded=False, after_s=pull.limit_s) == []
        return
    assert pull.quiet(1, responded=False, after_s=pull.limit_s) == []


def test_a_host_that_gets_another_stripe_starves_in_this_one() -> None:
    pull = HungryPull()
    pull(PieceStored(2, 1))
    assert pull.quiet(1, responded=False, after_s=pull.limit_s) == [Starved(0, A)]


def test_a_connection_takes_more_round_trips_for_a_larger_first_piece() -> None:
    """TCP sends ten segments in the first one, and twice as much in each that follows."""
    assert first_piece_s(14 << 10, 0.08) == 0.08
    assert first_piece_s(64 << 10, 0.08) == pytest.approx(3 * 0.08)
    assert first_piece_s(1 << 20, 0.08) == pytest.approx(7 * 0.08)
    assert first_piece_s(1 << 20, 0.0) == 0.0


@pytest.mark.parametrize("response_s", [0.0, 0.16])
def test_a_first_piece_over_a_long_path_is_no_stall(response_s: float) -> None:
    """Its source responded late, as everything takes there."""
    pull = Pull(count=8, piece_size=1 << 20)
    pull.plan(0, A)
    pull(Quiet(1, True, 200, response_s=response_s))
    allowed_s = STALL_FIRST_S + first_piece_s(1 << 20, response_s)
    assert pull(Tick(), allowed_s - 0.01) == []
    assert pull(Tick(), 0.02) == [Complain(0, A, "stalled")]


class Steady(Pull):
    """A pull of two stripes that hedges, in which pieces of A and B came every 10 ms so far."""

    def __init__(self, count: int = 64) -> None:
        super().__init__(count=count, stripes=2)
        self.core.hedges = True
        self.plan(0, A, C, D)
        self.plan(1, B, D)
        for piece in range(10):
            assert self(PieceStored(1 + piece % 2, piece), 0.005) == []

    def from_b(self, count: int) -> list[Command]:
        """The commands while B gives so many pieces, and A none."""
        missing = [piece for piece in range(1, 64, 2) if piece not in self.core.have]
        return [each for piece in missing[:count] for each in (*self(PieceStored(2, piece), 0.01), *self(Tick()))]


def test_a_stripe_that_stands_still_is_asked_for_elsewhere_and_comes_from_where_a_piece_comes_first() -> None:
    """The stripe's own stream goes on until the other one has given the piece."""
    pull = Steady()
    assert pull.from_b(14) == []
    assert pull.from_b(2) == [OpenDemand(3, C, 0, (10,), hedge=True)]
    assert pull.from_b(5) == []
    commands = pull(PieceStored(3, 10), 0.01)
    assert commands == [Complain(0, A, "stalled"), CloseStream(1, after_piece=False), OpenStream(4, C, 0)]
    assert pull(StreamEnded(1, "closed")) == [] and pull(StreamEnded(3, "done")) == []
    assert pull.core.parents() == ("C", "B") and pull(PieceStored(4, 12)) == []


def test_a_source_that_gives_again_keeps_its_stripe() -> None:
    pull = Steady()
    assert pull.from_b(16) == [OpenDemand(3, C, 0, (10,), hedge=True)]
    assert pull(PieceStored(1, 10), 0.05) == []
    assert pull(Tick()) == [CloseStream(3, after_piece=False)]
    assert pull(StreamEnded(3, "closed")) == [] and pull(Tick()) == []
    assert pull.core.parents() == ("A", "B")


def test_a_piece_that_comes_twice_moves_no_stripe() -> None:
    """The source had it under way; the other one had sent it as well before its stream closed."""
    pull = Steady()
    pull.from_b(16)
    pull(PieceStored(1, 10), 0.05)
    assert pull(PieceStored(3, 10)) == []
    assert pull.core.parents() == ("A", "B")


def test_others_are_asked_in_turn_and_few_times() -> None:
    """A hedge that gives nothing gives way to the next one; each source is asked once, and a pull
    asks for HEDGES_LEAST pieces so."""
    pull = Steady()
    asked = [each.source for each in pull.from_b(26) if isinstance(each, OpenDemand)]
    assert asked == [C]
    for number in range(200):
        if number % 40 == 0:
            pull.plan(0, (B, A)[number // 40 % 2], C, D)
        asked += [command.source for command in pull(Tick(), 0.05) if isinstance(command, OpenDemand)]
    assert asked[1] == D and len(asked) == HEDGES_LEAST


def test_how_long_a_stripe_may_stand_still_follows_the_gaps_of_all_stripes() -> None:
    """As on a busy machine, where all streams pause now and then."""
    pull = Steady()
    pull(PieceStored(1, 10), 0.3)
    for piece in range(11, 25):
        pull(PieceStored(1 + piece % 2, piece), 0.005)
    assert 0.4 < pull.core.due_s(pull.now) < 0.6
    assert not [each for each in pull(Tick(), 0.4) if isinstance(each, OpenDemand)]
    assert [each.source for each in pull(Tick(), 0.2) if isinstance(each, OpenDemand)] == [C, D]


def test_a_pull_that_stands_still_as_a_whole_says_so_once() -> None:
    pull = Steady()
    assert not [each for each in pull(Tick(), 0.15) if isinstance(each, Starved)]
    assert [each for each in pull(Tick(), 0.02) if isinstance(each, Starved)] == [Starved(0, A), Starved(1, B)]
    assert not [each for each in pull(Tick(), 0.2) if isinstance(each, Starved)]
    pull(PieceStored(1, 10))
    told = [each for _ in range(40) for each in pull(Tick(), 0.05) if isinstance(each, Starved)]
    assert told == [Starved(0, A), Starved(1, B)]


def test_what_stands_still_for_a_reason_is_not_asked_for_elsewhere() -> None:
    """Without a tracker, while the pull is a preseed, at the holder of a lease, and where a piece
    has come and waits for its hash."""
    for change in (
        lambda pull: pull(TrackerChanged(False)),
        lambda pull: setattr(pull.core, "hedges", False),
        lambda pull: (pull.plan(0, ORIGIN, C), pull.plan(1, ORIGIN, C)),
        lambda pull: (pull(Awaiting(1)), pull(Awaiting(2))),
    ):
        pull = Steady()
        change(pull)
        commands = [command for _ in range(8) for command in pull(Tick(), 0.05)]
        assert not [each for each in commands if isinstance(each, OpenDemand | Starved)], commands


def test_a_pull_waits_longer_for_hosts_than_for_a_tracker() -> None:
    pull = Pull()
    pull.core.alone_patience_s = 500.0
    pull.plan(0, A)
    pull(TrackerChanged(False))
    pull(StreamEnded(1, "refused"))
    assert not [each for each in pull(Tick(), 130.0) if isinstance(each, GaveUp)]
    assert "no tracker answers" in pull.core.trouble(pull.now)
    pull(TrackerChanged(True), 300.0)
    assert not pull.core.finished and "no tracker" not in pull.core.trouble(pull.now)
    assert not [each for each in pull(Tick(), 110.0) if isinstance(each, GaveUp)], "it may plan soon"
    assert [each for each in pull(Tick(), 20.0) if isinstance(each, GaveUp)]


def test_a_pull_without_a_tracker_ends_at_last() -> None:
    for hosts, after_s in (((A,), 500.0), ((), 120.0)):
        pull = Pull()
        pull.core.alone_patience_s = 500.0
        if hosts:
            pull.plan(0, *hosts)
        pull(TrackerChanged(False))
        assert not [each for each in pull(Tick(), after_s - 1.0) if isinstance(each, GaveUp)]
        (ended,) = [each for each in pull(Tick(), 2.0) if isinstance(each, GaveUp)]
        assert f"for {after_s:.0f} s; no tracker answers" in ended.error.what


def test_an_empty_blob_is_complete_at_once_though_stripes_that_stand_still_are_looked_for() -> None:
    pull = Pull(count=0)
    pull.core.hedges = True
    assert pull(Tick()) == [Completed()]
