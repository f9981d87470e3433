"""Events go into the tracker's core, commands come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from p2pdist.model.digest import Digest
from p2pdist.model.messages import FromAgent, FromTracker, Hello
from p2pdist.model.ownership import Ownership
from p2pdist.model.pieces import PieceLayout, PieceList

# -- events


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """An agent has connected and said hello."""

    session: int
    hello: Hello
    source: str = ""
    """The address that the connection came from; empty where it is not known."""
    certified: bool = False
    """Whether a certificate of the fleet names the host."""
    clock_ahead_s: float | None = None
    """The host's clock less the tracker's; None where the agent does not say what it is."""


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """An agent's connection has ended; `why` in words for people, empty where it is not known."""

    session: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Received:
    """An agent has sent a message."""

    session: int
    message: FromAgent


@dataclass(frozen=True, slots=True)
class Tick:
    """Comes often and regularly. `utc_s`: the time of day, in seconds since the epoch; by it go the
    hours of sites alone."""

    utc_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Due:
    """The time has come at which the core wants to be called (Fleet.wake_at)."""


@dataclass(frozen=True, slots=True)
class Described:
    """A manifest says how blobs are cut."""

    layouts: tuple[tuple[Digest, PieceLayout], ...]


@dataclass(frozen=True, slots=True)
class ListFound:
    """A vouched piece list that was held before is at hand (answers ListWanted). `voters` are some
    of those that found the whole to match it."""

    blob: Digest
    pieces: PieceList
    voters: tuple[str, ...] = ()


OriginState = Literal["right", "missing", "corrupt", "unknown"]
"""How the tracker found a blob at the origin: as it is to be, as far as was looked; not there; of
another size, or with a wrong piece; or it cannot tell."""


@dataclass(frozen=True, slots=True)
class OriginSeen:
    """How the blob of a swarm is at the origin (answers LookAtOrigin). `swarm`: its key; `what`:
    more of what is wrong, for people."""

    swarm: Digest
    state: OriginState
    what: str = ""


@dataclass(frozen=True, slots=True)
class Followed:
    """This ownership counts from now on (tracker/core/ownership/ownerships.py); `me` is the id of
    this tracker."""

    ownership: Ownership
    me: str


@dataclass(frozen=True, slots=True)
class LeasesAllowed:
    """From now on this tracker may grant origin leases, or may not."""

    allowed: bool


@dataclass(frozen=True, slots=True)
class HostDrained:
    """An operator drains this host, or ends that; the host may be one that is not known yet."""

    host: str
    drained: bool


Event = (
    SessionOpened
    | SessionClosed
    | Received
    | Tick
    | Due
    | Described
    | ListFound
    | OriginSeen
    | Followed
    | LeasesAllowed
    | HostDrained
)

# -- commands


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to an agent."""

    session: int
    message: FromTracker


@dataclass(frozen=True, slots=True)
class Drop:
    """End a session: the host opened another one, or broke the protocol."""

    session: int


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send one message to many agents; encoding it once is enough."""

    sessions: tuple[int, ...]
    message: FromTracker


@dataclass(frozen=True, slots=True)
class ListWanted:
    """A swarm has no vouched piece list: if one was kept, ListFound gives it back."""

    blob: Digest


@dataclass(frozen=True, slots=True)
class ListMatched:
    """Hosts found the whole to match as this vouched list has it: it may be kept, with some of the
    voters that did, which stated nothing of it. More of them are said once there are."""

    blob: Digest
    pieces: PieceList
    voters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LookAtOrigin:
    """Hosts say that the blob of a swarm, with this key, is missing or wrong at the origin, some of
    them that these pieces are: OriginSeen says how it is."""

    swarm: Digest
    blob: Digest
    layout: PieceLayout
    pieces: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WrongHashes:
    """A host stated hashes for so many pieces that were wrong: it lied, or upstream sent it other
    bytes than other hosts."""

    host: str
    blob: Digest
    pieces: int


Command = Send | Drop | Broadcast | ListWanted | ListMatched | LookAtOrigin | WrongHashes
