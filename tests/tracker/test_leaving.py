"""A host that is about to end says so first: what the tracker's cores do then."""

from __future__ import annotations

from preseed_world import World
from test_fleet import BLOB, OTHER, PIECE, Control, chain

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Assign,
    Hello,
    Holding,
    Leaving,
    Report,
    decode_from_agent,
    encode,
)
from p2pdist.model.pieces import PieceLayout
from tracker.core.affinity import Affinity
from tracker.core.events import Received, Send, SessionOpened
from tracker.core.fleet import Fleet
from tracker.core.member import FROM_ORIGIN
from tracker.core.planning.schedule import JOIN_BATCH_S
from tracker.core.preseeds.picks import REPLACE_S
from tracker.core.preseeds.preseed import Gone

LARGE = digest_of(b"large blob")


def test_the_message_says_nothing_but_that() -> None:
    assert encode(Leaving()) == b'{"type":"leaving"}'
    assert decode_from_agent(b'{"type":"leaving"}') == Leaving()


def test_children_get_other_parents_in_the_same_moment() -> None:
    """Not at the next tick, and not when the session ends: the streams that run are still good."""
    control = chain("h1", "h2", "h3", "h4")
    (told,) = control.say("h3", Leaving())
    assert isinstance(told, Send) and isinstance(told.message, Assign)
    assert control.parents["h4"] in ("h1", "h2")
    assert control.close("h3") == [], "its end is no news"


def test_a_lease_goes_to_a_child_at_once() -> None:
    control = chain("h1", "h2", "h3")
    control.report("h2", 3)
    control.say("h1", Leaving())
    assert (control.parent("h2"), control.parent("h3")) == (FROM_ORIGIN, "h2")
    assert control.fleet.leases() == 1
    assert "h1" not in control.fleet.swarms[BLOB].members


def test_a_seed_that_leaves_is_no_source_any_more() -> None:
    control = Control()
    control.open("h1", "h2", "h3")
    control.join("h1", 8)
    control.join("h2", 8)
    control.say("h1", Leaving())
    control.join("h3")
    (told,) = control.tick(JOIN_BATCH_S)
    assert isinstance(told, Send) and isinstance(told.message, Assign)
    (stripe,) = told.message.plan.stripes
    assert stripe.parent is not None and stripe.parent.host == "h2"
    assert "h1" not in [each.host for each in (*stripe.alternates, *told.message.plan.keepers)]


def test_whatever_it_says_afterwards_brings_it_back_into_no_swarm() -> None:
    control = chain("h1", "h2")
    control.join("h2", 8, blob=OTHER)
    control.say("h2", Leaving())
    assert list(control.fleet.swarms) == [BLOB] and not control.fleet.hosts["h2"].swarms
    assert control.join("h2", 8) == control.join("h2", 8, blob=OTHER) == []
    control.say("h2", Report(sent_bytes=1000, busy_s=1.0))
    control.complain("h1", "h2", "short")
    control.tick(1.0)
    assert "h2" not in control.fleet.swarms[BLOB].members


def test_a_child_that_reconnects_does_not_bring_it_back_as_a_parent() -> None:
    """Its stream from the host that leaves may still run."""
    control = chain("h1", "h2", "h3")
    control.say("h2", Leaving())
    control.open("h3")
    control.join("h3", 2, "h2")
    control.tick(JOIN_BATCH_S)
    assert "h2" not in control.fleet.swarms[BLOB].members
    assert control.parent("h3") == "h1"


def test_who_opens_a_new_session_is_back() -> None:
    control = chain("h1", "h2")
    control.say("h2", Leaving())
    assert not control.fleet.hosts["h2"].available
    control.open("h2")
    assert control.fleet.hosts["h2"].available
    control.join("h2", 1)
    control.tick(JOIN_BATCH_S)
    assert control.parent("h2") == "h1"


def test_the_last_of_a_swarm_leaves_nothing_behind() -> None:
    control = chain("h1")
    control.say("h1", Leaving())
    assert control.fleet.swarms == {}
    assert control.tick(1.0) == []


def test_every_child_in_every_stripe_finds_a_parent() -> None:
    """Half of a fleet leaves, one after the other; all others stay connected to the origin all the
    while, with one lease for each stripe."""
    fleet = Fleet(-100.0)
    names = [f"h{number}" for number in range(40)]
    layout = PieceLayout(256 * PIECE, PIECE)
    for number, name in enumerate(names):
        fleet.handle(SessionOpened(number, Hello(PROTOCOL_VERSION, name, f"{name}:1")), now=0.0)
    for number in range(40):
        fleet.handle(Received(number, Holding(LARGE, layout.size, PIECE, (0,) * layout.stripes)), now=0.0)
    fleet.handle(Received(0, Report()), now=JOIN_BATCH_S)
    swarm = fleet.swarms[LARGE]
    assert swarm.stripes > 1 and not swarm.edges.unplanned
    for number in range(20):
        fleet.handle(Received(number, Leaving()), now=1.0 + number)
        assert not swarm.edges.unplanned
        for stripe in range(swarm.stripes):
            assert len(swarm.edges.roots[stripe]) == 1
            assert all(swarm.edges.rooted(stripe, name) for name in swarm.members)
    assert sorted(swarm.members) == sorted(names[20:])


def test_who_leaves_is_ranked_with_those_who_are_away() -> None:
    control = Control()
    control.open("h1", "h2")
    control.join("h1", 8)
    control.say("h1", Leaving())
    affinity = Affinity(control.fleet.hosts, control.fleet.swarms, control.fleet.capacities)
    ranked = affinity.rank({BLOB: 8 * PIECE}, ["h1", "h2"])
    assert [(each.host, each.present) for each in ranked] == [("h2", True), ("h1", False)]


# -- preseeds


def _leaves(world: World, name: str) -> None:
    """The host says that it leaves; its session stays open."""
    at = world.hosts[name].tracker
    assert at is not None
    at.fleet.handle(Received(at.sessions[name], Leaving()), now=world.now)
    at.handle(Gone(name))


def test_who_leaves_is_not_picked() -> None:
    world = World()
    world.settle()
    world.join("h1", "h2")
    _leaves(world, "h1")
    world.ask("p", count=1)
    assert world.rows["p"].picked == ("h2",)


def test_a_pick_that_leaves_is_going_from_that_moment() -> None:
    """Time to return counts from when it said so, not from the end of its session; an agent that is
    only restarted keeps its place."""
    world = World()
    world.settle()
    world.join("h1", "h2", "h3")
    world.ask("p", count=2)
    picked = world.rows["p"].picked
    world.finish("p")
    _leaves(world, picked[0])
    world.wait(REPLACE_S - 2)
    world.leave(picked[0])
    world.wait(1)
    assert world.rows["p"].picked == picked
    world.wait(2)
    assert sorted(world.rows["p"].picked) == sorted({"h1", "h2", "h3"} - {picked[0]})


def test_a_pick_that_is_restarted_keeps_its_place() -> None:
    world = World()
    world.settle()
    world.join("h1", "h2")
    world.ask("p", count=1)
    (picked,) = world.rows["p"].picked
    world.finish("p")
    _leaves(world, picked)
    world.wait(2)
    world.leave(picked)
    world.wait(1)
    world.join(picked)
    world.wait(REPLACE_S + 2)
    assert (world.rows["p"].picked, world.state("p")) == ((picked,), "done")
