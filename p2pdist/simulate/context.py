"""What all hosts of a simulation share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from p2pdist.core.pull import Command
from p2pdist.core.transport import Policy
from p2pdist.model.digest import Digest

if TYPE_CHECKING:
    from p2pdist.simulate.bittorrent import Mesh
    from p2pdist.simulate.clock import World
    from p2pdist.simulate.host import Host, Pull
    from p2pdist.simulate.network import Network, Stream
    from p2pdist.simulate.origin import Origin
    from p2pdist.simulate.tracker import Tracker


class Checks(Protocol):
    """Where a host says what it does, so that somebody may object (see invariants.py)."""

    def stored(self, pull: Pull, piece: int, good: bool) -> None:
        """The host took a piece for good."""

    def sending(self, stream: Stream, pull: Pull, piece: int, offset: int) -> None:
        """The host's uplink core sends a block."""

    def commanded(self, host: Host, pull: Pull, command: Command) -> None:
        """The core of the host's pull commands something."""

    def joining(self, host: Host, pull: Pull) -> None:
        """A swarm is about to write into the host's blob."""

    def asking(self, host: Host, pull: Pull, piece: int) -> None:
        """The host asks a peer of a swarm for a piece."""

    def feeding(self, host: Host, pull: Pull, piece: int) -> None:
        """The host reads a piece from the origin for a swarm."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """See the module's text. `meshes` are the BitTorrent swarms, one a blob; `on_settled` is called
    when a pull completes or gives up."""

    world: World
    network: Network
    origin: Origin
    tracker: Tracker
    checks: Checks
    blocks_per_piece: int
    patience_s: float
    hosts: dict[str, Host]
    on_settled: Callable[[Host, Pull], None]
    transport_of: Callable[[str], Policy]
    meshes: dict[Digest, Mesh]
