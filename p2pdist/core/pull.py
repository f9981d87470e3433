"""One blob's pull at one host: the sources of its stripes, its transport, and what the tracker
knows of that.

Theory. A pull has two halves. `Download` (download/) receives the stripes by streams down the
tracker's trees and counts the pieces, whichever transport brings them. `TransportChoice` and
`TransportSwitch` (transport.py) say when a BitTorrent swarm takes over, and when the trees do
again; the download is paused while a swarm brings the pieces. The agent and the simulated host
carry out commands and report what became of them.

A tracker plans other parents for hosts that receive by a swarm, so it must know when that changes:
each Holding carries `report_swarm`, and ReportTransport asks for another one.

Of a blob with a vouched piece list the pull also decides when the whole is compared and what the
tracker is told (`Whole` in vouched/whole.py). Such a blob comes by trees alone: a swarm knows its
pieces before it begins. While no tracker answers, or nothing is listed for long, a host with pieces
that wait for their hashes asks the hosts that sent them for their list (AskList).

Where several trackers share the swarms, a plan of an older epoch than the last one is not carried
out: its tracker owns the blob no more, and may grant a lease that another tracker has granted.
Plans of epoch 0 come from a tracker that is alone, or from the agent itself.

Invariants: a swarm begins only when no stream writes into the blob, and a stream is opened only
when no swarm does; writers of an earlier pull count. Between BeginSwarm and SwarmClosed the blob is
the swarm's to write. After Completed or GaveUp nothing is commanded; the shell ends a swarm that
still writes, and waits for its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from p2pdist.core.download import events as dl
from p2pdist.core.download.download import Download
from p2pdist.core.transport import Begin, CutShort, Leave, Policy, Transport, TransportChoice, TransportSwitch
from p2pdist.core.vouched.whole import CheckWhole, Judge, ListChanged, VerifyPieces, Whole, WholeChecked
from p2pdist.model.errors import P2PDistError
from p2pdist.model.messages import Priority
from p2pdist.model.plan import Source

SWARM = -1
"""The number that stands for the swarm where events name a stream; no stream has it."""

PEERS_V1_S = 2.0
"""A swarm that has given nothing for so long is a reason to ask whether version 1 has peers, and
how long after an answer that is asked again."""

LIST_ASK_S = 0.1
"""Pause between two requests for a peer's list, while no tracker answers."""

LIST_LATE_S = 6.0
"""With a tracker peers are asked once no piece was stored and nothing listed for so long: the
tracker, or the host that read the piece, has gone, and its successor does not know the hash."""

LOSS_REPORT_S = 0.5
"""Pieces that are lost are told to the tracker at once, but no more often."""

# -- events, beside the ones of Download and of Whole


@dataclass(frozen=True, slots=True)
class TorrentKnown:
    """The blob has a torrent, or none."""

    exists: bool


@dataclass(frozen=True, slots=True)
class PeersKnown:
    """Answers FindPeers: whether the swarm of version 1 has peers."""

    exist: bool


@dataclass(frozen=True, slots=True)
class SwarmClosed:
    """The swarm has let go of the file: the blob is "done", the swarm was "closed" as commanded, it
    "failed", or its torrent is "corrupt" and not one of this blob."""

    reason: str


@dataclass(frozen=True, slots=True)
class WriterGone:
    """A writer of an earlier pull of the blob has ended."""


@dataclass(frozen=True, slots=True)
class PriorityChanged:
    """A start waits for this preseed, or does so no more."""

    priority: Priority


Event = dl.Event | TorrentKnown | PeersKnown | SwarmClosed | WriterGone | PriorityChanged | ListChanged | WholeChecked

# -- commands, beside the ones of Download and Whole, and CutShort


@dataclass(frozen=True, slots=True)
class BeginSwarm:
    """Take part in the swarm; SwarmClosed follows in any case."""

    transport: Literal["swarm", "swarm-v1"]


@dataclass(frozen=True, slots=True)
class EndSwarm:
    """Leave the swarm; SwarmClosed follows."""


@dataclass(frozen=True, slots=True)
class FindPeers:
    """Ask whether the swarm of version 1 has peers; PeersKnown answers."""


@dataclass(frozen=True, slots=True)
class Switched:
    """The pull leaves one transport for another; the commands beside this one do it."""

    before: Transport
    after: Transport


@dataclass(frozen=True, slots=True)
class ReportTransport:
    """Send the Holding again: the last one said otherwise about the swarm, or pieces were lost."""


@dataclass(frozen=True, slots=True)
class AskList:
    """Ask a host for what it knows of the blob's vouched list; ListChanged says what came of it."""

    source: Source


Command = (
    dl.Command
    | BeginSwarm
    | EndSwarm
    | CutShort
    | FindPeers
    | Switched
    | ReportTransport
    | CheckWhole
    | Judge
    | VerifyPieces
    | AskList
)


class PullCore:
    """Decides for one pull. `other_writers` counts the writers of earlier pulls of the blob;
    `vouched`: it has no piece list but the vouched one; `hedges`: as a start it may ask for pieces
    of stripes that stand still elsewhere as well (a preseed stands still whenever it gives way)."""

    __slots__ = (
        "_accused",
        "_asked_at",
        "_choice",
        "_epoch",
        "_hedges",
        "_loss_told_at",
        "_loss_untold",
        "_moved_at",
        "_other_writers",
        "_peers_due",
        "_priority",
        "_reported",
        "_switch",
        "_whole",
        "download",
        "swarm_writes",
    )

    def __init__(
        self,
        download: Download,
        policy: Policy = "trees",
        *,
        priority: Priority = "start",
        other_writers: int = 0,
        vouched: bool = False,
        hedges: bool = False,
    ) -> None:
        self.download = download
        download.vouched = vouched
        self._hedges = hedges and not vouched
        download.hedges = self._hedges and priority == "start"
        self._whole = Whole(download.blob) if vouched else None
        self._accused: dict[Source, None] = {}  # sources of wrong bytes, by the list of this round
        self._asked_at = self._loss_told_at = -inf
        self._loss_untold = False  # pieces were lost, and no Holding has said so
        self._moved_at = download.started_at  # when a piece was stored or the list grew last
        policy = "trees" if vouched else policy
        self.swarm_writes = False
        """Whether a swarm writes into the blob: from BeginSwarm to SwarmClosed."""
        self._choice = TransportChoice(policy, download.host, download.blob, download.started_at)
        self._switch = TransportSwitch()
        self._priority: Priority = priority
        self._other_writers = other_writers
        self._epoch = 0  # the latest of a plan (p2pdist/model/ownership.py)
        self._reported = False  # what the last Holding said of the swarm
        self._peers_due = 0.0  # when FindPeers may be commanded; never while an answer is to come
        began = self._steer(download.started_at)
        assert not began, "nothing has been opened yet"

    @property
    def by_swarm(self) -> bool:
        """Whether the blob comes by a swarm, or is to."""
        choice = self._choice
        waits = choice.transport is None and choice.policy == "swarm" and choice.torrent is not False
        return waits or self._switch.target in ("swarm", "swarm-v1")

    def report_swarm(self) -> bool:
        """What a Holding that is sent now tells the tracker: whether the blob comes by a swarm."""
        self._reported = self.by_swarm
        return self._reported

    def handle(self, event: Event, *, now: float) -> Sequence[Command]:
        """What to do about an event, in this order."""
        if isinstance(event, dl.PieceStored):  # first: it comes with every piece
            self._choice.progressed(now=now)
            commands = self.download.stored(event, now=now)
            if self._whole is None:
                return commands
            self._moved_at = now
            return [*commands, *self._whole.stored(now=now)] if self.download.have.complete else commands
        if self.download.finished:
            self.swarm_writes = self.swarm_writes and not isinstance(event, SwarmClosed)
            return []
        if self._whole is not None:
            return self._handle_vouched(self._whole, event, now)
        return self._handle(event, now)

    def _handle(self, event: Event, now: float) -> list[Command]:
        match event:
            case dl.StreamEnded():
                return [*self.download.handle(event, now=now), *self._steer(now)]
            case dl.Tick() if self._choice.policy == "trees":
                return [*self.download.handle(event, now=now)]
            case dl.Tick():
                return [*self._steer(now), *self._questions(now), *self.download.handle(event, now=now)]
            case TorrentKnown(exists):
                self._choice.torrent = exists
                return self._steer(now)
            case SwarmClosed(reason):
                self.swarm_writes = False
                if reason in ("failed", "corrupt"):
                    self._choice.torrent = False
                return self._steer(now)
            case WriterGone():
                self._other_writers -= 1
                return self._steer(now)
            case PeersKnown(exist):
                self._choice.peers_v1, self._peers_due = exist, now + PEERS_V1_S
                return []
            case PriorityChanged(priority):
                self._priority = priority
                self.download.hedges = self._hedges and priority == "start"
                return []
            case dl.Planned(plan):
                if 0 < plan.epoch < self._epoch:
                    return []
                self._epoch = max(self._epoch, plan.epoch)
                self._choice.planned()
            case dl.TrackerChanged(present):
                self._choice.tracker_changed(present, now=now)
            case ListChanged() | WholeChecked():
                return []  # of a blob that is not vouched for
        return [*self.download.handle(event, now=now)]

    def _handle_vouched(self, whole: Whole, event: Event, now: float) -> list[Command]:
        """Handle an event of a pull whose list is vouched."""
        download, out = self.download, list[Command]()
        match event:
            case ListChanged(_, lost, _):
                self._moved_at = now
                if whole.list_changed(event, now=now):
                    for source in self._accused:
                        download.sources.forgive(source)
                    self._accused.clear()
                out += download.handle(dl.Lost(lost), now=now) if lost else ()
                self._loss_untold = self._loss_untold or bool(lost)
                out += self._tell_loss(now)
            case WholeChecked():
                if whole.checked(event, now=now) and download.have.complete:
                    return [Judge(True, whole.round), *download.handle(dl.WholeMatches(), now=now)]
            case dl.Awaiting():
                out += download.handle(event, now=now)
                out += self._ask_list(whole, now)
            case _:
                if isinstance(event, dl.TrackerChanged):
                    whole.tracker_changed(event.present, now=now)
                out += self._handle(event, now)
                if isinstance(event, dl.Tick) and not download.finished:
                    out += self._tick_vouched(whole, now)
        self._accused |= {
            each.source: None for each in out if isinstance(each, dl.Complain) and each.reason == "corrupt"
        }
        if download.have.complete and not download.finished:
            out += whole.stored(now=now)
        return out

    def _tick_vouched(self, whole: Whole, now: float) -> list[Command]:
        """What the time asks for: another look at the pieces, the end, or a peer's list."""
        try:
            out: list[Command] = [*whole.tick(now=now)]
        except P2PDistError as error:
            return [*self.download.handle(dl.Rejected(error), now=now)]
        return [*out, *self._tell_loss(now), *self._ask_list(whole, now)]

    def _ask_list(self, whole: Whole, now: float) -> list[Command]:
        """Ask the sources of pieces that wait for the list, where the tracker does not say."""
        patience_s = 0.0 if whole.alone else LIST_LATE_S
        if now - self._asked_at < LIST_ASK_S or now - self._moved_at < patience_s:
            return []
        sources = dict.fromkeys(source for source in self.download.awaiting() if not source.is_origin)
        self._asked_at = now if sources else self._asked_at
        return [*map(AskList, sources)]

    def _tell_loss(self, now: float) -> list[Command]:
        """Say what is held, where pieces were lost and it was not said a moment ago. The answer
        names the parents again: stripes that had been complete have none."""
        if not self._loss_untold or now - self._loss_told_at < LOSS_REPORT_S:
            return []
        self._loss_told_at, self._loss_untold = now, False
        return [ReportTransport()]

    def _steer(self, now: float) -> list[Command]:
        """Leave the present transport when it is time for another, and begin that one once nothing
        else writes into the blob."""
        download, out = self.download, list[Command]()
        if download.held:
            self._choice.held(now=now)
        # A blob that lacks nothing needs no transport: the next Tick completes it.
        if download.finished or download.have.complete or self._choice.policy == "trees":
            return out
        steps = self._switch.steer(
            self._choice,
            writers=len(download.writing) + self.swarm_writes + self._other_writers,
            fed=download.fed,
            priority=self._priority,
            now=now,
        )
        for step in steps:
            match step:
                case Leave(before, after):
                    if after is not None:
                        out.append(Switched(before, after))
                    if before == "trees":
                        out += download.handle(dl.Paused(True), now=now)
                    elif self.swarm_writes:  # it may have failed
                        out.append(EndSwarm())
                case CutShort():
                    out.append(step)
                case Begin("trees"):
                    out += download.handle(dl.Paused(False), now=now)
                case Begin("swarm" | "swarm-v1" as transport):
                    self.swarm_writes = True
                    out.append(BeginSwarm(transport))
        return out

    def _questions(self, now: float) -> list[Command]:
        out: list[Command] = []
        if self.by_swarm != self._reported:
            self.report_swarm()
            out.append(ReportTransport())
        still = self._switch.transport == "swarm" and self._choice.still_s(now=now) > PEERS_V1_S
        if still and now >= self._peers_due:
            self._peers_due = inf
            out.append(FindPeers())
        return out
