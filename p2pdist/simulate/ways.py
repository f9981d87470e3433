"""The ways of one blob at a simulated host: the cores that decide on the move (core/transport.py,
core/transport.py), and the shell around them as in p2pdist/agent/bittorrent/ways.py. Every blob has
a torrent, of which a host learns while a tracker answers it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pdist.core import download as dl
from p2pdist.core.transport import Begin, CutShort, Handover, Leave, TransportChoice
from p2pdist.model.plan import Plan
from p2pdist.simulate.bittorrent_fetch import SwarmFeed

if TYPE_CHECKING:
    from p2pdist.simulate.bittorrent import Member
    from p2pdist.simulate.context import Surroundings
    from p2pdist.simulate.host import Host, Pull

LOOK_UP_S = (0.3, 2.0)
LOOK_UP_AGAIN_S = (1.0, 2.0)
OPEN_S = 0.2
"""How long a session takes to start, and a transfer in it."""

CLOSE_S = 0.1
"""How long libtorrent takes to let go of the file."""


class Ways:
    """See the module's text. Of one life of a host."""

    def __init__(self, host: Host, pull: Pull, around: Surroundings) -> None:
        self._host, self._pull, self._around = host, pull, around
        self._world, self._mesh = around.world, around.meshes[pull.blob.digest]
        policy = around.transport_of(host.name)
        self._choice = TransportChoice(policy, host.name, pull.blob.digest, self._world.now)
        self._handover = Handover()
        self._names: dict[str, None] = {}
        self._member: Member | None = None
        self._feed: SwarmFeed | None = None
        self._swarm_writes = self._over = self._told = False
        at_once = policy == "swarm"
        self._world.after(0.0 if at_once else self._world.random.uniform(*LOOK_UP_S), self._look_up)

    @property
    def reading(self) -> set[int]:
        """The stripes that are being read from the origin for a swarm."""
        return self._feed.stripes if self._feed is not None else set()

    @property
    def by_swarm(self) -> bool:
        """Whether the blob comes by a swarm, or is to; as the tracker is told."""
        choice = self._choice
        waits = choice.way is None and choice.policy == "swarm" and choice.torrent is not False
        return waits or self._handover.target == "swarm"

    @property
    def changed(self) -> bool:
        """Whether the tracker was told otherwise."""
        return self.by_swarm != self._told

    def tell(self) -> bool:
        """What the tracker is told now."""
        self._told = self.by_swarm
        return self._told

    @property
    def swarm_writes(self) -> bool:
        """Whether a swarm writes into the blob, or is about to, or has not let go of it yet."""
        return self._swarm_writes

    def steer(self) -> None:
        """Leave the present way when it is time for another, and begin that once nothing else
        writes into the blob."""
        host, pull = self._host, self._pull
        if self._over or pull.download is None:
            return
        steps = self._handover.steer(
            self._choice,
            writers=len(pull.incoming) + self._swarm_writes,
            fed=host.fed(pull),
            waited_for=pull.blob.priority == "start",
            now=self._world.now,
        )
        for step in steps:
            match step:
                case Leave("trees", target):
                    pull.moves += target is not None  # else nothing has begun yet
                    host.submit(pull, dl.Paused(True))
                case Leave():
                    pull.moves += 1
                    self._leave()
                case CutShort():
                    for stream in list(pull.incoming.values()):
                        host.closed(stream)
                case Begin("trees"):
                    host.submit(pull, dl.Paused(False))
                case Begin():
                    self._swarm_writes = True
                    self._around.checks.joining(host, pull)
                    self._world.after(OPEN_S, self._open)

    def planned(self, plan: Plan) -> None:
        """The tracker has planned: whom it names are peers."""
        names = [keeper.host for keeper in plan.keepers]
        for stripe in plan.stripes:
            sources = (stripe.parent, *stripe.alternates)
            names += [source.host for source in sources if source is not None and not source.is_origin]
        self._names.update(dict.fromkeys(names))
        if self._member is not None:
            self._member.meet(names, named=True)
        self._choice.planned()

    def tracker_changed(self, present: bool) -> None:
        """Whether a tracker answers from now on."""
        self._choice.tracker_changed(present, now=self._world.now)

    def stored(self, piece: int) -> None:
        """A piece has been stored."""
        if self._member is not None:
            self._member.held(piece)
        if self._feed is not None:
            self._feed.held(piece)
        self._choice.progressed(now=self._world.now)

    def end(self) -> None:
        """The pull has ended. Who took part in a swarm and has everything stays as a seed."""
        self._over = True
        if self._feed is not None:
            self._feed.stop()
        if self._member is not None and not self._pull.have.complete:
            self._member.leave()

    def stop(self) -> None:
        """The process dies, or fetches nothing more."""
        self._over = True
        self._leave()

    def _look_up(self) -> None:
        if self._over:
            return
        if self._host.session.welcomed:
            self._world.after(2 * self._around.network.latency_s, self._found)
        else:
            self._world.after(self._world.random.uniform(*LOOK_UP_AGAIN_S), self._look_up)

    def _found(self) -> None:
        self._choice.torrent = True
        self.steer()

    def _open(self) -> None:
        if self._over:
            return
        if self._handover.way != "swarm":  # it was left before it began
            self._closed()
            return
        self._member = self._mesh.join(self._host, self._pull, self._names)
        self._feed = SwarmFeed(self._host, self._pull, self._member, self._around)

    def _leave(self) -> None:
        if self._feed is not None:
            self._feed.stop()
        if self._member is not None:
            self._member.leave()
            self._world.after(CLOSE_S, self._closed)
        self._member = self._feed = None

    def _closed(self) -> None:
        self._swarm_writes = False
        self.steer()
