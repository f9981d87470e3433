"""What all hosts of a simulation share.

Hosts and their pulls pass through it unread: the modules that know them import this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from p2pdist.core.pull import Command
from p2pdist.core.transport import Policy
from p2pdist.model.digest import Digest
from p2pdist.simulate.clock import World
from p2pdist.simulate.cluster.nodes import Cluster
from p2pdist.simulate.network import Network, Sender, Stream
from p2pdist.simulate.origin import Origin
from p2pdist.simulate.tracker import Tracker


class Checks(Protocol):
    """Where a host reports what it does, so that a defect ends the run (invariants.py)."""

    def stored(self, pull: Any, piece: int, good: bool) -> None:
        """The host stores a piece."""

    def sending(self, stream: Stream, pull: Any, piece: int, offset: int) -> None:
        """The host's uplink core sends a block."""

    def commanded(self, host: Any, pull: Any, command: Command) -> None:
        """The core of the host's pull commands something."""

    def vouching(self, host: Any, pull: Any, piece: int, right: bool) -> None:
        """The host states the hash of a piece that it has read; `right`: of the blob's bytes."""

    def joining(self, host: Any, pull: Any) -> None:
        """A swarm is about to write into the host's blob."""

    def asking(self, host: Any, pull: Any, piece: int) -> None:
        """The host requests a piece from a peer of a swarm."""

    def feeding(self, host: Any, pull: Any, piece: int) -> None:
        """The host reads a piece from the origin for a swarm."""


class Swarm(Protocol):
    """The BitTorrent swarm of one blob (bittorrent.py)."""

    def join(self, host: Any, pull: Any, names: Iterable[str]) -> Any:
        """Let a host be a member from now on; returns the member."""

    def gone(self, name: str) -> None:
        """A host's process has died."""


@dataclass(frozen=True, slots=True)
class Context:
    """What all hosts of a simulation share."""

    world: World
    network: Network
    origin: Origin
    tracker: Tracker
    checks: Checks
    blocks_per_piece: int
    patience_s: float
    #: The sending ends of all hosts, by name.
    senders: Mapping[str, Sender]
    #: Called with the host and its pull when the pull has completed or given up.
    on_ended: Callable[[Any, Any], None]
    #: How blobs come to a host.
    transport_of: Callable[[str], Policy]
    #: The vouched list of a blob at a host that runs, None when there is none.
    listing_of: Callable[[str, Digest], Any]
    #: The BitTorrent swarms by blob; none where all blobs come by trees.
    meshes: Mapping[Digest, Swarm]
    #: The trackers, where there are several.
    cluster: Cluster | None = None
