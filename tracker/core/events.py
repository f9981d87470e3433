"""Events go into the tracker's core, commands come out."""

from __future__ import annotations

from dataclasses import dataclass

from p2pdist.model.digest import Digest
from p2pdist.model.messages import FromAgent, FromTracker, Hello
from p2pdist.model.pieces import PieceLayout

# -- events


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """An agent has connected and said hello."""

    session: int
    hello: Hello
    source: str = ""
    """The address that the connection came from; empty where it is not known."""


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """An agent's connection has ended."""

    session: int


@dataclass(frozen=True, slots=True)
class Received:
    """An agent has sent a message."""

    session: int
    message: FromAgent


@dataclass(frozen=True, slots=True)
class Tick:
    """Comes often and regularly."""


@dataclass(frozen=True, slots=True)
class Due:
    """The time has come at which the core wants to be called (Schedule.wake_at)."""


@dataclass(frozen=True, slots=True)
class Described:
    """A manifest says how blobs are cut."""

    layouts: tuple[tuple[Digest, PieceLayout], ...]


Event = SessionOpened | SessionClosed | Received | Tick | Due | Described

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


Command = Send | Drop
