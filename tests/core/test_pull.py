"""One pull and its transport: when a swarm begins and ends, what waits for what, and what the
tracker is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.core.download.download import Download
from p2pdist.core.download.events import (
    CloseStream,
    Complain,
    Completed,
    GaveUp,
    OpenStream,
    PieceStored,
    Planned,
    Rejected,
    StreamEnded,
    Tick,
    TrackerChanged,
)
from p2pdist.core.pull import (
    PEERS_V1_S,
    SWARM,
    BeginSwarm,
    Command,
    EndSwarm,
    Event,
    FindPeers,
    PeersKnown,
    PriorityChanged,
    PullCore,
    ReportTransport,
    SwarmClosed,
    Switched,
    TorrentKnown,
    WriterGone,
)
from p2pdist.core.sources import Sources
from p2pdist.core.transport import AWAY_S, DOCUMENT_S, LEAVE_S, STUCK_S, SWARM_STILL_S, CutShort, Policy
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Unavailable
from p2pdist.model.messages import Priority
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.model.plan import ORIGIN, Plan, Source, StripePlan

BLOB = digest_of(b"blob")
A, B = Source("A", "A:7071"), Source("B", "B:7071")
COUNT = 8


class Pull:
    """A pull of COUNT pieces in one stripe, and the time kept."""

    def __init__(self, policy: Policy, *, priority: Priority = "start", other_writers: int = 0, held: int = 0) -> None:
        layout = PieceLayout(COUNT * 65536, 65536)
        have = PieceSet(COUNT)
        for piece in range(held):
            have.add(piece)
        download = Download(BLOB, layout, 1, have, Sources(), 0.0, patience_s=600.0, host="h")
        self.core = PullCore(download, policy, priority=priority, other_writers=other_writers)
        self.now = 0.0

    def __call__(self, event: Event, after_s: float = 0.0) -> list[Command]:
        self.now += after_s
        return [*self.core.handle(event, now=self.now)]

    def plan(self, parent: Source) -> list[Command]:
        return self(Planned(Plan(BLOB, (StripePlan(0, parent),))))


def in_swarm(policy: Policy = "swarm") -> Pull:
    pull = Pull(policy)
    commands = pull(TorrentKnown(True))
    if policy == "auto":
        pull(TrackerChanged(False))
        commands = pull(Tick(), 2 * STUCK_S)
    assert BeginSwarm("swarm") in commands
    return pull


@pytest.mark.parametrize("policy", ["trees", "swarm", "auto"])
def test_a_pull_that_lacks_nothing_is_complete_at_the_first_tick(policy: Policy) -> None:
    """As after a pull whose last step failed on a full disk."""
    assert Pull(policy, held=COUNT)(Tick())[-1:] == [Completed()]


def test_a_pull_by_trees_never_leaves_them() -> None:
    pull = Pull("trees")
    assert pull.plan(A) == [OpenStream(1, A, 0)]
    pull(TrackerChanged(False))
    assert not {type(command) for _ in range(100) for command in pull(Tick(), 1.0)} & {BeginSwarm, ReportTransport}


def test_under_the_policy_swarm_no_stream_is_opened_before_the_torrent_is_known() -> None:
    pull = Pull("swarm")
    assert pull.plan(A) == []
    assert pull(TorrentKnown(True)) == [BeginSwarm("swarm")]
    assert pull.plan(B) == []


def test_without_a_torrent_the_pull_comes_by_trees() -> None:
    pull = Pull("swarm")
    assert pull.plan(A) == []
    assert pull(TorrentKnown(False)) == []
    assert pull(Tick()) == [OpenStream(1, A, 0)]


def test_a_torrent_that_nothing_knows_is_not_waited_for_long() -> None:
    """Once it is known the swarm takes over, after the piece under way."""
    pull = Pull("swarm")
    pull.core.report_swarm()
    pull.plan(A)
    assert pull(Tick(), DOCUMENT_S - 0.1) == []
    assert pull(Tick(), 0.2) == [ReportTransport(), OpenStream(1, A, 0)]
    assert pull(TorrentKnown(True)) == [Switched("trees", "swarm"), CloseStream(1, after_piece=True)]
    assert pull(PieceStored(1, 0)) == []
    assert pull(StreamEnded(1, "closed")) == [BeginSwarm("swarm")]


def test_streams_that_do_not_end_are_cut_short() -> None:
    pull = Pull("auto")
    pull.plan(A)
    pull(TorrentKnown(True))
    switched = pull(Tick(), 2 * STUCK_S)
    assert switched[:2] == [Switched("trees", "swarm"), CloseStream(1, after_piece=True)]
    assert ReportTransport() in switched
    assert pull(Tick(), LEAVE_S / 2) == []
    assert pull(Tick(), LEAVE_S / 2) == [CutShort()]
    assert pull(StreamEnded(1, "closed")) == [BeginSwarm("swarm")]


def test_a_writer_of_an_earlier_pull_delays_the_swarm() -> None:
    pull = Pull("swarm", other_writers=2)
    assert pull(TorrentKnown(True)) == []
    assert pull(WriterGone()) == []
    assert pull(WriterGone()) == [BeginSwarm("swarm")]
    assert pull.core.swarm_writes


@pytest.mark.parametrize("reason", ["failed", "corrupt"])
@pytest.mark.parametrize("policy", ["swarm", "auto"])
def test_after_a_swarm_that_failed_the_trees_go_on_for_good(policy: Policy, reason: str) -> None:
    pull = in_swarm(policy)
    pull(TrackerChanged(True))
    pull.core.report_swarm()
    pull.plan(A)
    assert pull(SwarmClosed(reason)) == [Switched("swarm", "trees")]
    assert pull(Tick()) == [ReportTransport(), OpenStream(1, A, 0)]
    commands = [command for _ in range(100) for command in pull(Tick(), 1.0)]
    assert not any(isinstance(command, BeginSwarm) for command in commands)


def test_a_swarm_that_stands_still_is_left_and_streams_wait_for_its_end() -> None:
    pull = in_swarm("auto")
    pull(TrackerChanged(True))
    pull.plan(A)
    left = pull(Tick(), 2 * SWARM_STILL_S)
    assert left[:2] == [Switched("swarm", "trees"), EndSwarm()]
    assert not any(isinstance(command, OpenStream) for command in left)
    assert not any(isinstance(command, OpenStream) for command in pull(Tick(), 0.25))
    assert pull(SwarmClosed("closed")) == []
    assert pull(Tick()) == [OpenStream(1, A, 0)]


def test_the_tracker_is_told_when_the_blob_comes_otherwise_and_not_else() -> None:
    pull = Pull("auto")
    pull.plan(A)
    pull(TorrentKnown(True))
    assert not pull.core.report_swarm()
    pull(PieceStored(1, 0), 0.1)
    assert pull(Tick(), 0.1) == []
    assert pull(Tick(), 2 * STUCK_S).count(ReportTransport()) == 1
    assert pull.core.by_swarm, "it is to come by the swarm, which waits for the stream's end"
    pull(StreamEnded(1, "closed"))
    assert ReportTransport() not in pull(Tick(), 0.1)
    pull(SwarmClosed("failed"))
    assert pull(Tick(), 0.1).count(ReportTransport()) == 1
    assert ReportTransport() not in pull(Tick(), 0.1)
    assert not pull.core.by_swarm


def test_a_holding_that_is_sent_anyway_tells_the_tracker() -> None:
    pull = in_swarm("auto")
    pull(SwarmClosed("failed"))
    assert not pull.core.report_swarm()
    assert ReportTransport() not in pull(Tick())


def test_the_swarm_of_version_1_is_a_swarm_for_the_tracker() -> None:
    pull = in_swarm("auto")
    assert pull.core.report_swarm()
    pull(PeersKnown(True))
    assert pull(Tick(), 2 * SWARM_STILL_S)[:2] == [Switched("swarm", "swarm-v1"), EndSwarm()]
    assert pull(SwarmClosed("closed")) == [BeginSwarm("swarm-v1")]
    assert ReportTransport() not in pull(Tick())


def test_peers_of_version_1_are_looked_for_while_the_swarm_gives_nothing() -> None:
    """One question at a time, and a pause after each answer."""
    pull = in_swarm()
    pull(Tick())
    pull(PieceStored(SWARM, 0))
    assert pull(Tick(), PEERS_V1_S) == []
    assert pull(Tick(), 0.1) == [FindPeers()]
    assert pull(Tick(), PEERS_V1_S) == []
    pull(PeersKnown(False))
    assert pull(Tick(), PEERS_V1_S / 2) == []
    assert pull(Tick(), PEERS_V1_S / 2) == [FindPeers()]


def test_a_preseed_stays_in_the_trees_until_a_start_waits_for_it() -> None:
    pull = Pull("auto", priority="preseed")
    pull.plan(A)
    pull(TorrentKnown(True))
    pull(TrackerChanged(False))
    assert not any(isinstance(command, Switched) for command in pull(Tick(), 2 * STUCK_S))
    pull(PriorityChanged("start"))
    assert Switched("trees", "swarm") in pull(Tick(), AWAY_S)


def test_pieces_of_a_swarm_complete_the_blob() -> None:
    pull = in_swarm()
    commands = [command for piece in range(COUNT) for command in pull(PieceStored(SWARM, piece))]
    assert commands == [Completed()]
    assert pull.core.swarm_writes, "the pull ends when it has let go of the file"
    assert pull(SwarmClosed("done")) == []
    assert not pull.core.swarm_writes


def test_after_the_end_nothing_is_commanded() -> None:
    pull = in_swarm()
    error = Unavailable("the agent stops")
    assert pull(Rejected(error)) == [GaveUp(error)]
    for event in (SwarmClosed("failed"), Tick(), TorrentKnown(True), WriterGone(), PeersKnown(True)):
        assert pull(event, 100.0) == []


EVENTS = (
    "tick", "piece", "away", "back", "plan", "torrent", "no torrent", "stream ended", "stream failed", "swarm closed", "swarm failed",
    "writer gone", "peers", "preseed", "start",
)  # fmt: skip


@given(
    st.sampled_from(["auto", "swarm"]),
    st.integers(0, 2),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from([0.0, 0.25, 3.0, 12.0])), max_size=80),
)
def test_whatever_happens_two_transports_never_write(
    policy: Policy, others: int, events: list[tuple[str, float]]
) -> None:
    """Nor one beside a writer of an earlier pull, as long as that is a swarm. The shell ends what
    it is told to end, sooner or later."""
    pull = Pull(policy, other_writers=others)
    streams: dict[int, None] = {}
    swarm, ended, parent = False, False, 0
    for name, after_s in events:
        event: Event = Tick()
        match name:
            case "piece":
                event = PieceStored(SWARM if swarm else next(iter(streams), 0), len(pull.core.download.have) % 7)
            case "away" | "back":
                event = TrackerChanged(name == "back")
            case "plan":
                parent += 1
                event = Planned(Plan(BLOB, (StripePlan(0, Source(f"p{parent}", "p:1")),)))
            case "torrent" | "no torrent":
                event = TorrentKnown(name == "torrent")
            case "stream ended" | "stream failed" if streams:
                number = next(iter(streams))
                del streams[number]
                event = StreamEnded(number, "closed" if name == "stream ended" else "reset")
            case "swarm closed" | "swarm failed" if swarm:
                swarm = False
                event = SwarmClosed("closed" if name == "swarm closed" else "failed")
            case "writer gone" if others:
                others -= 1
                event = WriterGone()
            case "peers":
                event = PeersKnown(True)
            case "preseed" | "start":
                event = PriorityChanged(name)  # type: ignore[arg-type]
        for command in pull(event, after_s):
            assert not ended
            match command:
                case OpenStream(number):
                    assert not swarm
                    streams[number] = None
                case BeginSwarm():
                    assert not swarm and not streams and not others
                    swarm = True
                case EndSwarm():
                    assert swarm
                case CutShort():
                    assert streams or others or swarm
                case Completed() | GaveUp():
                    ended = True
        assert pull.core.swarm_writes == swarm


def test_a_plan_of_an_older_epoch_is_not_carried_out() -> None:
    """The tracker that made it owns the blob no more, and its lease may be another host's by now;
    epoch 0 is a tracker that is alone, or the agent itself."""
    pull = Pull("trees")

    def plan(parent: Source, epoch: int) -> list[Command]:
        return pull(Planned(Plan(BLOB, (StripePlan(0, parent),), epoch=epoch)), 1.0)

    assert plan(A, 5) == [OpenStream(1, A, 0)]
    assert plan(ORIGIN, 4) == []
    assert [type(command) for command in plan(B, 5)] == [CloseStream, OpenStream]
    assert [type(command) for command in plan(ORIGIN, 6)] == [CloseStream, OpenStream]
    assert plan(A, 5) == []
    assert [type(command) for command in plan(A, 0)] == [CloseStream, OpenStream]
    assert plan(B, 5) == []


def held(pull: Pull, why: str, *stripes: StripePlan) -> list[Command]:
    return pull(Planned(Plan(BLOB, stripes, held=why)))


def test_a_pull_whose_site_waits_neither_gives_up_nor_complains_nor_turns_to_a_swarm() -> None:
    """Its stream ends after the piece under way, and it says why it waits. When the site goes on
    it has as much patience as ever."""
    pull = Pull("auto")
    pull(TorrentKnown(True))
    assert pull.plan(A) == [OpenStream(1, A, 0)]
    assert held(pull, "site west waits", StripePlan(0, None)) == [CloseStream(1, after_piece=True)]
    assert pull(StreamEnded(1, "closed")) == []
    for _ in range(8000):
        assert pull(Tick(), 0.25) == []
    assert pull.core.download.trouble(pull.now) == "site west waits"
    assert held(pull, "", StripePlan(0, B)) == [OpenStream(2, B, 0)]
    assert pull.core.download.trouble(pull.now) == ""
    assert not [command for command in pull(Tick(), 0.25) if isinstance(command, GaveUp | Switched)]


def test_a_host_that_receives_within_a_site_that_waits_complains_of_nobody() -> None:
    """Its parent waits as well."""
    pull = Pull("trees")
    pull.plan(A)
    pull(PieceStored(1, 0), 1.0)
    held(pull, "site west waits")
    assert [command for _ in range(400) for command in pull(Tick(), 0.25)] == []
    held(pull, "")
    assert any(isinstance(command, Complain) for _ in range(400) for command in pull(Tick(), 0.25))


def test_without_a_tracker_no_site_waits() -> None:
    pull = Pull("trees")
    pull.plan(A)
    held(pull, "site west waits")
    pull(TrackerChanged(False))
    assert pull.core.download.held == ""


def test_a_stripe_with_a_rate_is_given_the_time_that_this_takes() -> None:
    complaints = {}
    for bytes_s in (0.0, 65536 / 20):
        pull = Pull("trees")
        pull(Planned(Plan(BLOB, (StripePlan(0, A, bytes_s=bytes_s),))))
        complaints[bytes_s] = [each for _ in range(120) for each in pull(Tick(), 0.25) if isinstance(each, Complain)]
    assert complaints[0.0] and not complaints[65536 / 20]
