"""Superpeers read the origin, each its share, where all receivers of a blob use BitTorrent."""

from __future__ import annotations

from collections import defaultdict

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Assign, Complaint, FromAgent, Hello, Holding
from p2pdist.model.plan import Plan
from tracker.core.events import Received, Send, SessionClosed, SessionOpened, Tick
from tracker.core.fleet import Fleet
from tracker.core.monitor.presence import ABSENCE_S
from tracker.core.origin.superpeers import READERS

BLOB = digest_of(b"a blob")
PIECE = 65536
COUNTS = (0, 0)


class Control:
    """A fleet and the plans that its hosts were told last."""

    def __init__(self, **more: int) -> None:
        self.fleet = Fleet(-100.0, **more)
        self.sessions: dict[str, int] = {}
        self.now = 0.0
        self.plans: dict[str, list[Plan]] = defaultdict(list)

    def join(
        self, *hosts: str, swarm: bool = True, zone: str = "", counts: tuple[int, ...] = COUNTS, blob: Digest = BLOB
    ) -> None:
        for host in hosts:
            if host not in self.sessions:
                self.sessions[host] = len(self.sessions) + 1
                hello = Hello(PROTOCOL_VERSION, host, f"{host}:1", zone)
                self.take(SessionOpened(self.sessions[host], hello))
            self.say(host, Holding(blob, 64 * PIECE, PIECE, counts, swarm=swarm))

    def say(self, host: str, message: FromAgent) -> None:
        self.take(Received(self.sessions[host], message))

    def take(self, event: Received | SessionOpened | SessionClosed | Tick) -> None:
        names = {session: host for host, session in self.sessions.items()}
        for command in self.fleet.handle(event, now=self.now):
            if isinstance(command, Send) and isinstance(command.message, Assign):
                self.plans[names[command.session]].append(command.message.plan)

    def pass_time(self, seconds: float = 1.0) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.25
            self.take(Tick())

    def keepers_of(self, host: str) -> tuple[str, ...]:
        """Those that the host knows."""
        told = [plan.keepers for plan in self.plans[host] if plan.keepers]
        return tuple(superpeer.host for superpeer in told[-1])

    def dealt(self, host: str) -> bool:
        return self.plans[host][-1].dealt


def names(count: int, letter: str = "h") -> list[str]:
    return [f"{letter}{number}" for number in range(count)]


def test_all_are_told_the_same_superpeers_and_each_counts_as_a_lease() -> None:
    control = Control()
    for host in names(40):
        control.join(host)
        control.pass_time(0.25)
    assert all(control.dealt(host) for host in names(40))
    assert len({control.keepers_of(host) for host in names(40)}) == 1
    assert len(control.keepers_of("h0")) == READERS == control.fleet.leases()


def test_each_zone_reads_for_itself() -> None:
    control = Control()
    control.join(*names(12), zone="a")
    control.join(*names(3, "i"), zone="b")
    control.pass_time()
    assert set(control.keepers_of("i0")) == set(names(3, "i"))
    assert set(control.keepers_of("h0")) <= set(names(12))
    assert control.fleet.leases() == 12 + 3


def test_one_that_receives_by_trees_ends_it_and_all_hear_of_it() -> None:
    control = Control()
    control.join(*names(6))
    control.pass_time()
    assert all(control.dealt(host) for host in names(6))
    control.join("t0", swarm=False)
    control.pass_time()
    assert not any(control.dealt(host) for host in [*names(6), "t0"])
    assert control.fleet.leases() <= 2
    control.join("t0", swarm=True)
    control.pass_time()
    assert all(control.dealt(host) for host in names(6))


WHOLE = (32, 32)


def test_no_host_reads_once_somebody_has_the_whole_by_trees() -> None:
    """None of the superpeers' peers has it, and yet they do not read it again: they get it by
    trees."""
    control = Control()
    control.join(*names(3))
    control.join("t0", swarm=False)
    control.pass_time()
    control.join("t0", swarm=False, counts=WHOLE)
    control.pass_time()
    swarm = control.fleet.swarms[BLOB]
    assert len(swarm.swarming) == swarm.receivers == 3
    assert not any(control.dealt(host) for host in names(3))
    assert control.fleet.leases() == 0
    assert all(swarm.edges.rooted(stripe, host) for stripe in range(2) for host in names(3))


def test_who_comes_when_others_are_done_reads_nothing() -> None:
    """Whatever way these received it: a late host has yet to hear what they have."""
    control = Control()
    control.join(*names(3))
    control.pass_time()
    for host in names(3):
        control.join(host, counts=WHOLE)
    control.pass_time()
    control.join("late")
    control.pass_time()
    assert not control.dealt("late") and control.fleet.leases() == 0
    for host in names(3):
        control.take(SessionClosed(control.sessions[host]))
    control.pass_time(ABSENCE_S + 1)
    assert control.dealt("late"), "now nobody has it"


def test_it_is_shared_again_when_the_whole_copy_is_gone_or_lost() -> None:
    for how in ("gone", "lost"):
        control = Control()
        control.join(*names(6))
        control.join("t0", swarm=False, counts=WHOLE)
        control.pass_time()
        assert not any(control.dealt(host) for host in names(6))
        if how == "gone":
            control.take(SessionClosed(control.sessions["t0"]))
            control.pass_time(ABSENCE_S + 1)
        else:
            control.join("t0", swarm=True)
            control.pass_time()
        assert all(control.dealt(host) for host in names(6)), how


def test_who_becomes_whole_in_the_swarm_ends_nothing_and_no_host_is_told() -> None:
    control = Control()
    control.join(*names(6))
    control.pass_time()
    before = {host: len(control.plans[host]) for host in names(6)}
    for host in names(2):
        control.join(host, counts=WHOLE)
    control.join("h2", counts=WHOLE, swarm=False)  # as it says once all is there
    control.pass_time()
    left = names(6)[3:]
    assert all(control.dealt(host) for host in left)
    assert not any(plan.keepers for host in left for plan in control.plans[host][before[host] :])


def test_where_leases_are_short_their_holders_read() -> None:
    control = Control(origin_streams_max=3)
    control.join(*names(6))
    control.pass_time()
    assert not any(control.dealt(host) for host in names(6))
    assert 0 < control.fleet.leases() <= 3


def test_leases_stay_within_their_number_when_what_was_shared_is_not_any_more() -> None:
    """Blobs that one host each wants: one superpeer reads each of them, and two stripes would have
    a holder of a lease each."""
    control = Control(origin_streams_max=4)
    for swarm in (True, False):
        for number in range(4):
            control.join(f"h{number}", swarm=swarm, blob=digest_of(bytes([number])))
        control.pass_time()
        roots = [root for each in control.fleet.swarms.values() for roots in each.edges.roots for root in roots]
        assert 0 < len(roots) <= 4 and control.fleet.leases() <= 4


def test_a_superpeer_that_goes_is_replaced_everywhere() -> None:
    control = Control()
    control.join(*names(40))
    control.pass_time()
    gone = control.keepers_of("h0")[0]
    control.take(SessionClosed(control.sessions[gone]))
    control.pass_time(ABSENCE_S + 1)
    left = [host for host in names(40) if host != gone]
    assert len({control.keepers_of(host) for host in left}) == 1
    assert gone not in control.keepers_of(left[0])
    assert len(control.keepers_of(left[0])) == READERS


def test_all_are_told_once_of_who_reads_in_the_place_of_a_superpeer_that_went() -> None:
    """Also where the swarm is planned after it is missed and before it is given up."""
    control = Control()
    control.join(*names(60))
    control.pass_time()
    gone, *others = control.keepers_of("h0")
    left = [host for host in names(60) if host != gone]
    before = {host: len(control.plans[host]) for host in left}
    control.take(SessionClosed(control.sessions[gone]))
    control.join(left[0])
    control.pass_time()
    successors = {control.keepers_of(host)[len(others) :] for host in left}
    assert len(successors) == 1 and len(*successors) == 1
    control.pass_time(ABSENCE_S + 1)
    assert gone not in control.fleet.swarms[BLOB].members
    for host in left:
        told = [plan for plan in control.plans[host][before[host] :] if plan.keepers]
        assert [[superpeer.host for superpeer in plan.keepers] for plan in told] == [[*others, *next(iter(successors))]]
    assert control.fleet.leases() == READERS


def test_a_superpeer_that_finds_the_origin_wrong_leaves_it_to_the_holders_of_leases() -> None:
    control = Control()
    control.join(*names(12))
    control.pass_time()
    roots = {root for roots in control.fleet.swarms[BLOB].edges.roots for root in roots}
    superpeer = next(host for host in control.keepers_of("h0") if host not in roots)
    control.say(superpeer, Complaint(BLOB, 0, "", "corrupt"))
    control.pass_time()
    assert not any(control.dealt(host) for host in names(12))


def test_no_host_is_called_slow_in_a_swarm() -> None:
    """Its hosts receive from many, and what they have says nothing of those whom the plan calls
    their parents."""
    control = Control()
    control.join(*names(6))
    control.pass_time()
    for step in range(40):
        for number, host in enumerate(names(6)):
            counts = min(32, step * number)
            control.join(host, counts=(counts, counts))
        control.pass_time(0.25)
    story = [text for _, text in control.fleet.swarms[BLOB].story]
    assert not any("keeps" in text or "too little" in text for text in story)
