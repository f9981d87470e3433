"""What a download hears (Event), and what it has its owner do (Command)."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from p2pdist.model.errors import P2PDistError
from p2pdist.model.messages import Reason
from p2pdist.model.plan import Plan, Source


class PieceStored(Struct, frozen=True, gc=False):
    """A piece from `stream` verified and is on disk."""

    stream: int
    piece: int


@dataclass(frozen=True, slots=True)
class Planned:
    """The tracker has planned, or the agent has in its place."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Wanted:
    """A reader waits for these pieces, or with `prefetch` is going to. It is said again until they
    are stored, or no reader waits for them."""

    pieces: tuple[int, ...]
    prefetch: bool = False


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A stream has let go of the file. `reason` is "done" (the source gave everything it was asked
    for), "closed" (as commanded), "failed" (this host's own disk or bug: `error` says which),
    "denied" (the source does not take this host's ticket) or why the source failed; `piece` is the
    one that was wrong."""

    stream: int
    reason: Reason | str
    piece: int | None = None
    error: P2PDistError | None = None


@dataclass(frozen=True, slots=True)
class Quiet:
    """A stream has given no piece so far: whether the source has responded, how many bytes have
    come over the connection, whether the source said that it had none to send, and how long its
    response and the connection took (None: not known)."""

    stream: int
    responded: bool
    received_bytes: int
    waits: bool = False
    response_s: float = 0.0
    connected_s: float | None = None


@dataclass(frozen=True, slots=True)
class TrackerChanged:
    """A tracker answers from now on, or none does."""

    present: bool


@dataclass(frozen=True, slots=True)
class Rejected:
    """The tracker says that the swarm cannot go on."""

    error: P2PDistError


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Paused:
    """Another transport brings the pieces once the streams have ended; or does so no more."""

    paused: bool


@dataclass(frozen=True, slots=True)
class HeldBack:
    """This host reads nothing of this stream for now, since it gives way to others: that says
    nothing of its source."""

    stream: int


@dataclass(frozen=True, slots=True)
class Awaiting:
    """A piece of this stream waits until its hash is listed. Valid until a piece of the stream is
    stored."""

    stream: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Pieces that were stored are no more: they come again, in a plan that is to come."""

    pieces: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WholeMatches:
    """The whole of a vouched blob matches its digest."""


Event = (
    PieceStored
    | Planned
    | Wanted
    | StreamEnded
    | Quiet
    | TrackerChanged
    | Rejected
    | Paused
    | Tick
    | HeldBack
    | Awaiting
    | Lost
    | WholeMatches
)

# -- commands


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Receive a stripe from a source."""

    stream: int
    source: Source
    stripe: int


@dataclass(frozen=True, slots=True)
class OpenDemand:
    """Receive these pieces of a stripe from a source, before what streams bring meanwhile. With
    `prefetch` no reader waits for them yet. A `hedge` is for no reader, and streams that are opened
    meanwhile bring the pieces as well."""

    stream: int
    source: Source
    stripe: int
    pieces: tuple[int, ...]
    prefetch: bool = False
    hedge: bool = False


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Close a stream; `after_piece` lets the piece under way arrive first."""

    stream: int
    after_piece: bool


@dataclass(frozen=True, slots=True)
class Complain:
    """Tell the tracker that a source failed for a stripe, stands still, or is slow."""

    stripe: int
    source: Source
    reason: Reason
    piece: int | None = None


@dataclass(frozen=True, slots=True)
class Starved:
    """Tell the tracker that nothing of the blob has come yet, or has come for a while from any
    source, though the source of a stripe had the time to send. It stays the source until the
    tracker names another. `waits`: it said that it had no piece to send."""

    stripe: int
    source: Source
    waits: bool = False


@dataclass(frozen=True, slots=True)
class AskTicket:
    """Ask the tracker for another ticket: a source did not take the one that this host has."""


@dataclass(frozen=True, slots=True)
class Completed:
    """All pieces are stored."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The pull is hopeless."""

    error: P2PDistError


Command = OpenStream | OpenDemand | CloseStream | Complain | Starved | AskTicket | Completed | GaveUp
