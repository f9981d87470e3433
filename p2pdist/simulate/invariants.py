"""What must hold at every moment of a simulation; the first breach ends the run with its seed and
time.

Cheap checks follow each event: what hosts store, send and open, and what the tracker plans. The
trees are checked along the paths that an event may have changed, and as a whole every FULL_CHECK_S
(more seldom where hosts are more than 2,500) and at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from p2pdist.core.download import events as dl
from p2pdist.core.pull import Command as PullCommand
from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError
from p2pdist.model.messages import Assign, Holding, Holdings
from p2pdist.model.plan import KEEPERS_MAX
from p2pdist.simulate.clock import World
from p2pdist.simulate.cluster.checks import LeaseChecks
from p2pdist.simulate.host import Host, Pull
from p2pdist.simulate.network import Stream
from p2pdist.simulate.tracker import Session, Tracker
from p2pdist.simulate.vouching.checks import ListChecks
from tracker.core.events import Command as FleetCommand
from tracker.core.events import Event, Received, Send
from tracker.core.fleet import Fleet
from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.origin.superpeers import SUPERPEERS
from tracker.core.swarm import Swarm


class InvariantBroken(Exception):
    """An invariant does not hold: a defect of ours."""


class GaveUp(InvariantBroken):
    """A pull failed, though no fault makes that certain. `failure` is what its host says."""

    def __init__(self, text: str, host: str, failure: P2PDistError) -> None:
        super().__init__(text)
        self.host, self.failure = host, failure


class Invariants:
    """The checks of one run. `origin_streams_max` is the cap on leases that fleets are given."""

    def __init__(self, world: World, seed: int, origin_streams_max: int) -> None:
        self._world, self._seed = world, seed
        #: What must hold of the leases of all trackers.
        self.leases = LeaseChecks(self.require, origin_streams_max)
        #: Hosts that a plan has named as superpeers of a blob to themselves.
        self._named: dict[tuple[Digest, str], None] = {}
        #: What must hold of vouched lists.
        self.lists = ListChecks(self.require)

    def require(self, condition: bool, what: str) -> None:
        """End the run, with the text `what`, unless the condition holds."""
        if not condition:
            self.broken(what)

    def broken(self, what: str) -> None:
        """End the run: what is said does not hold."""
        raise InvariantBroken(self._placed(what))

    def _placed(self, what: str) -> str:
        return f"seed {self._seed}, at {self._world.now:.6f} s: {what}"

    # -- hosts

    def stored(self, pull: Pull, piece: int, good: bool) -> None:
        """A host stores a piece: only good ones may be."""
        if not good:
            self.broken(f"wrong bytes of piece {piece} were stored")
        pull.proof[piece] = 1

    def vouching(self, host: Host, pull: Pull, piece: int, right: bool) -> None:
        """A host states a hash."""
        self.lists.stated(host.name, right)

    def sending(self, stream: Stream, pull: Pull, piece: int, offset: int) -> None:
        """A host sends a block: the piece has verified there, and it is the stream's only block in
        flight."""
        if not pull.proof[piece] and not (pull.listing is not None and offset):  # it was lost under way
            self.broken(f"{stream} forwards piece {piece} before it has verified")
        if stream.sending >= 0:
            self.broken(f"{stream} has two blocks in flight")
        if piece % pull.blob.stripes != stream.stripe:
            self.broken(f"{stream} carries piece {piece}")

    def commanded(self, host: Host, pull: Pull, command: PullCommand) -> None:
        """A pull's core commands something: streams only for what is missing, one a stripe, one
        end, and nothing after it."""
        if pull.ended:
            self.broken(f"{host.name} does {command} after its pull has ended")
        match command:
            case dl.OpenStream(_, source, stripe):
                self._opening(host, pull, stripe)
                if pull.core is not None and pull.core.swarm_writes:
                    self.broken(f"{host.name} opens a stream while a swarm writes into the blob")
                if source.host == host.name:
                    self.broken(f"{host.name} opens a stream to itself")
                if source.is_origin:
                    self.lists.reading(host, stripe)
                if source.is_origin and (pull.blob.digest, stripe, host.name) not in self.leases.ever:
                    self._reading_unasked(host, pull, stripe)
            case dl.Completed():
                missing = pull.proof.count(0)
                if missing or not pull.have.complete:
                    self.broken(f"{host.name} takes itself for complete and lacks {missing} pieces")
                if pull.listing is not None:
                    self.lists.completed(host.name, pull.listing)
            case dl.GaveUp() if not pull.proof.count(0) and pull.listing is None:
                self.broken(f"{host.name} gives up though it has all pieces")

    def _reading_unasked(self, host: Host, pull: Pull, stripe: int) -> None:
        """Without a lease only a superpeer may read the origin, while no tracker answers it."""
        what = f"{host.name} reads stripe {stripe} from the origin, never had the lease and"
        if (pull.blob.digest, host.name) not in self._named:
            self.broken(f"{what} is no superpeer")
        if host.session.answers(pull.blob.digest):
            self.broken(f"{what} has a tracker to ask")

    def _opening(self, host: Host, pull: Pull, stripe: int) -> None:
        stripes = pull.blob.stripes
        if all(pull.proof[stripe::stripes]):
            self.broken(f"{host.name} opens a stream for stripe {stripe}, of which it lacks nothing")
        if any(stream.stripe == stripe and stream.finishing < 0 for stream in pull.incoming.values()):
            self.broken(f"{host.name} opens a second stream for stripe {stripe}")

    def joining(self, host: Host, pull: Pull) -> None:
        """A swarm begins to write into a blob: nothing else does, and something is lacking."""
        if pull.incoming:
            self.broken(f"{host.name} joins a swarm and still has {len(pull.incoming)} streams")
        if pull.ended:
            self.broken(f"{host.name} joins a swarm after its pull has ended")

    def asking(self, host: Host, pull: Pull, piece: int) -> None:
        """A member of a swarm requests a piece: it holds it not, and has no streams."""
        if pull.proof[piece]:
            self.broken(f"{host.name} asks a swarm for piece {piece}, which it holds")
        if pull.incoming:
            self.broken(f"{host.name} asks a swarm for piece {piece} and still has streams")

    def feeding(self, host: Host, pull: Pull, piece: int) -> None:
        """A host that reads a piece for a swarm lacks it, and has a lease, or is a superpeer while
        superpeers share the origin or no tracker answers."""
        self.asking(host, pull, piece)
        blob, stripe = pull.blob.digest, piece % pull.blob.stripes
        if (blob, stripe, host.name) in self.leases.ever:
            return
        assert pull.download is not None
        if not pull.download.readers().shared or (blob, host.name) not in self._named:
            self._reading_unasked(host, pull, stripe)

    def counted(self, pull: Pull) -> None:
        """Pieces are counted once, and only after they have verified."""
        proven = len(pull.proof) - pull.proof.count(0)
        if len(pull.have) != proven or sum(pull.counts()) != proven:
            self.broken(f"{len(pull.have)} pieces are counted and {proven} have verified")

    # -- the tracker

    def fleet_handled(
        self, fleet: Fleet, event: Event, commands: list[FleetCommand], sessions: Mapping[int, Session]
    ) -> None:
        """A fleet core has handled an event: look at what may have changed."""
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, Assign):
                self._assigned(fleet, command.message, sessions[command.session].host)
            self.lists.commanded(command)
        if isinstance(event, Received) and isinstance(event.message, Holding | Holdings):
            message = event.message
            holdings = message.blobs if isinstance(message, Holdings) else (message,)
            name = sessions[event.session].host
            for holding in holdings:
                self._paths(fleet.swarms.get(holding.blob), name)
        if self.leases.full_check_due(fleet, now=self._world.now):
            self.check_fleet(fleet)

    def _assigned(self, fleet: Fleet, message: Assign, name: str) -> None:
        swarm = fleet.swarms[message.plan.blob]
        member = swarm.members[name]
        self.leases.planned(fleet, message)
        self._superpeers(swarm, member, [superpeer.host for superpeer in message.plan.keepers])
        for plan in message.plan.stripes:
            parent = plan.parent
            planned = parent.host if parent is not None else None
            self.require(planned == member.parents[plan.stripe], f"{name} is told another parent than it has")
            self._climb(swarm, plan.stripe, name)
            if parent is not None and parent.is_origin:
                self.leases.granted(fleet, swarm.blob, plan.stripe, name)

    def _superpeers(self, swarm: Swarm, named: Member, names: list[str]) -> None:
        """A host is named of a few others at its site that are there, of more where they read for a
        swarm; it may then be one of them."""
        most = KEEPERS_MAX if named.site in swarm.origin.shares else SUPERPEERS
        self.require(len({*names}) == len(names) <= most, f"{named.host} is told of the superpeers {names}")
        for name in names:
            superpeer = swarm.members.get(name)
            fits = superpeer is not None and superpeer.present and superpeer.site == named.site
            self.require(fits, f"{named.host} is told of the superpeer {name}, which is away or at another site")
        if named.host in names:
            self._named[swarm.blob, named.host] = None

    def _paths(self, swarm: Swarm | None, name: str) -> None:
        if swarm is None or name not in swarm.members:
            return
        for stripe in range(swarm.stripes):
            self._climb(swarm, stripe, name)

    def _climb(self, swarm: Swarm, stripe: int, host: str) -> None:
        """The way up from a host ends."""
        steps, at = 0, swarm.members[host].parents[stripe]
        while at:
            steps += 1
            if steps > len(swarm.members):
                self.broken(f"stripe {stripe} has a cycle through {host}")
            at = swarm.members[at].parents[stripe]

    def check_fleet(self, fleet: Fleet) -> None:
        """Everything about a fleet's swarms."""
        for swarm in fleet.swarms.values():
            receivers = sum(1 for member in swarm.members.values() if not member.seed)
            self.require(
                swarm.receivers == receivers, f"{swarm.receivers} receivers are counted, {receivers} are there"
            )
            for member in swarm.members.values():
                self._check_member(fleet, swarm, member)
            for stripe in range(swarm.stripes):
                self._check_tree(swarm, stripe)
            for stripe, name in swarm.edges.unplanned:
                member = swarm.members[name]
                lacks = member.counts[stripe] < swarm.totals[stripe]
                self.require(
                    lacks and member.parents[stripe] is None, f"{name} waits for a parent that it needs not ({stripe})"
                )

    def _check_member(self, fleet: Fleet, swarm: Swarm, member: Member) -> None:
        name = member.host
        host = fleet.hosts[name]
        self.require(swarm.key in host.swarms, f"{name} is in a swarm that it does not know of")
        self.require(not member.present or host.session is not None, f"{name} has no session and is not absent")
        self.require(member.seed == (member.counts == swarm.totals), f"{name} is wrongly taken for a seed, or is not")
        self.require(sum(member.allotted) <= max(member.slots, 0), f"{name} has allotted more upload slots than it has")
        for stripe in range(swarm.stripes):
            parent = member.parents[stripe]
            complete = member.counts[stripe] == swarm.totals[stripe]
            if parent is None:
                waits = complete or (stripe, name) in swarm.edges.unplanned
                self.require(waits, f"{name} has no parent in stripe {stripe} and waits for none")
                continue
            self.require(not complete, f"{name} has a parent in stripe {stripe}, of which it lacks nothing")
            if parent != FROM_ORIGIN:
                attached = parent in swarm.members and name in swarm.members[parent].children[stripe]
                self.require(attached, f"{name} receives from {parent}, which does not know it")
            self.require(
                (name in swarm.edges.roots[stripe]) == (parent == FROM_ORIGIN), f"the roots are wrong about {name}"
            )
            for child in member.children[stripe]:
                listed = child in swarm.members and swarm.members[child].parents[stripe] == name
                self.require(listed, f"{name} lists {child}, which receives from another")

    def _check_tree(self, swarm: Swarm, stripe: int) -> None:
        """No cycles: every way up ends. Each host is climbed from once."""
        safe: dict[str, None] = {}
        for host in swarm.members:
            path: dict[str, None] = {}
            at: str | None = host
            while at and at not in safe:
                if at in path:
                    self.broken(f"stripe {stripe} has a cycle through {at}")
                path[at] = None
                at = swarm.members[at].parents[stripe]
            safe.update(path)

    # -- the end

    def check_end(
        self,
        trackers: Iterable[Tracker],
        hosts: Iterable[Host],
        failures: tuple[type[P2PDistError], ...],
    ) -> None:
        """What must hold once all is quiet: every host's books agree with its trackers', and only
        such failures happened as had to."""
        for tracker in trackers:
            if tracker.fleet is not None:
                self.check_fleet(tracker.fleet)
        for host in hosts:
            for pull in host.pulls.values():
                self.counted(pull)
                if pull.error is not None and not isinstance(pull.error, failures):
                    text = self._placed(f"{host.name} gave up for no good reason: {pull.error}")
                    raise GaveUp(text, host.name, pull.error)
                spoken_to = host.session.tracker_of(pull.blob.digest) if host.running else None
                fleet = spoken_to.fleet if spoken_to is not None else None
                if spoken_to is None or fleet is None or pull.error is not None:
                    continue
                if not host.network.paths.reachable(host.name, spoken_to.name):
                    continue
                swarm = fleet.swarms.get(pull.blob.digest)
                member = swarm.members.get(host.name) if swarm is not None else None
                self.require(member is not None, f"the tracker does not know what {host.name} holds")
                assert member is not None
                self.require(
                    tuple(member.counts) == pull.counts(),
                    f"the tracker takes {host.name} to hold {member.counts}, it holds {pull.counts()}",
                )
