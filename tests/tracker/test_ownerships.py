"""Which trackers of a cluster live, and the next ownership: several cores around one database that
takes one proposal an epoch, on a clock of their own."""

from dataclasses import replace

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.ownership import Ownership, Tracker, owner
from tracker.core.ownership.ownerships import (
    BUSY_S,
    DEAD_S,
    DEAF_S,
    EPOCH_AHEAD_MAX,
    FIRST_SHARE,
    FROZEN_S,
    PIN_S,
    STEP_S,
    UNCONFIRMED_S,
    AllowLeases,
    Command,
    EpochHeard,
    Event,
    Follow,
    LoadSeen,
    MembersSeen,
    Ownerships,
    Publish,
    Registered,
    Tick,
)

BEAT_S = 0.5
BLOB = digest_of(b"blob")


class Cluster:
    """Some trackers, the database that they share, and the time. The ones that are `frozen` do
    nothing, the ones that are `cut` do not reach the database, and what the ones that are `stuck`
    count stands still there."""

    def __init__(self, *names: str) -> None:
        self.now = 100.0
        self.cores = {name: Ownerships(name) for name in names}
        self.rows = {name: Registered(name, (f"http://{name}:7070",), "1", 0) for name in names}
        self.stored: Ownership | None = None
        self.frozen: set[str] = set()
        self.cut: set[str] = set()
        self.stuck: set[str] = set()
        self.available = True
        self.published: list[tuple[str, Ownership]] = []
        self.followed: dict[str, list[int]] = {name: [] for name in names}

    def handle(self, name: str, event: Event) -> list[Command]:
        commands = self.cores[name].handle(event, now=self.now)
        for command in commands:
            if isinstance(command, Publish) and command.expected == (self.stored.epoch if self.stored else 0):
                self.stored = command.ownership
                self.published.append((name, command.ownership))
            elif isinstance(command, Follow):
                self.followed[name].append(command.ownership.epoch)
        return commands

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            for name in self.cores:
                if name in self.frozen:
                    continue
                self.handle(name, Tick())
                if self.available and name not in self.cut:
                    progress = self.rows[name].progress + (name not in self.stuck)
                    self.rows[name] = replace(self.rows[name], progress=progress)
                    self.handle(name, MembersSeen(tuple(self.rows.values()), self.stored))

    def restart(self, name: str) -> None:
        self.cores[name] = Ownerships(name)
        self.rows[name] = replace(self.rows[name], instance=self.rows[name].instance + "+", progress=0, draining=False)

    def shares(self) -> dict[str, float]:
        assert self.stored is not None
        return {tracker.id: tracker.share for tracker in self.stored.trackers}


def running(*names: str) -> Cluster:
    cluster = Cluster(*names)
    cluster.run(5)
    assert cluster.shares() == dict.fromkeys(names, 1.0)
    return cluster


def test_trackers_that_start_together_share_all_and_agree() -> None:
    """In the first ownership already; and then nothing changes."""
    cluster = running("a", "b", "c")
    assert cluster.stored is not None and cluster.stored.epoch == 1
    cluster.run(60)
    assert len(cluster.published) == 1
    assert all(core.followed == cluster.stored and core.leases_allowed for core in cluster.cores.values())


def test_a_tracker_alone_owns_all() -> None:
    cluster = running("a")
    cluster.run(60)
    assert cluster.stored is not None and cluster.stored.epoch == 1


@pytest.mark.parametrize("how", ["frozen", "cut"])
def test_a_tracker_without_progress_is_dead_and_comes_back_a_little_at_a_time(how: str) -> None:
    """Whether it stands still or does not reach the database; after it is back its share grows."""
    cluster = running("a", "b", "c")
    getattr(cluster, how).add("b")
    cluster.run(DEAD_S - 2 * BEAT_S)
    assert len(cluster.shares()) == 3
    cluster.run(4 * BEAT_S + 1.0)
    assert cluster.shares() == {"a": 1.0, "c": 1.0}
    getattr(cluster, how).clear()
    cluster.run(2.0)
    assert cluster.shares() == {"a": 1.0, "b": FIRST_SHARE, "c": 1.0}
    seen = []
    for _ in range(round((12 * STEP_S) / BEAT_S)):
        cluster.run(BEAT_S)
        seen.append(cluster.shares()["b"])
    steps = list(dict.fromkeys(seen))
    assert steps == [round(0.1 * number, 1) for number in range(1, 11)]


def test_one_proposal_counts_in_each_epoch_and_every_tracker_follows_it() -> None:
    """Epochs grow by one, and the first of the live trackers proposes."""
    cluster = running("a", "b", "c", "d")
    cluster.frozen.add("a")
    cluster.run(10)
    assert [ownership.epoch for _, ownership in cluster.published] == [1, 2]
    assert cluster.published[-1][0] == "b"
    assert all(cluster.followed[name] == [1, 2] for name in "bcd")


def test_a_database_that_is_away_kills_no_tracker() -> None:
    """Not while it is away, and not in the first look afterwards, when no tracker has beaten yet;
    and leases are granted on."""
    cluster = running("a", "b", "c")
    cluster.available = False
    cluster.run(60)
    cluster.available = True
    cluster.run(30)
    assert len(cluster.published) == 1
    assert all(core.leases_allowed for core in cluster.cores.values())


def test_a_row_of_long_ago_is_no_tracker() -> None:
    """Where nothing but a row is left it is in no ownership."""
    cluster = Cluster("a", "b")
    cluster.rows["old"] = Registered("old", (), "9", 77)
    cluster.run(10)
    assert cluster.shares() == {"a": 1.0, "b": 1.0}
    assert len(cluster.published) == 1


def test_a_tracker_that_drains_owns_nothing_until_it_starts_again() -> None:
    cluster = running("a", "b")
    cluster.rows["b"] = replace(cluster.rows["b"], draining=True)
    cluster.run(2)
    assert cluster.shares() == {"a": 1.0, "b": 0.0}
    cluster.run(3 * STEP_S)
    assert cluster.shares()["b"] == 0.0
    cluster.restart("b")
    cluster.run(2)
    assert cluster.shares() == {"a": 1.0, "b": FIRST_SHARE}


def test_a_quick_restart_moves_nothing() -> None:
    """Agents find the owner at its address again before another one could take over."""
    cluster = running("a", "b")
    cluster.frozen.add("b")
    cluster.run(1.0)
    cluster.restart("b")
    cluster.frozen.clear()
    cluster.run(20)
    assert len(cluster.published) == 1 and cluster.cores["b"].followed == cluster.stored


def test_a_frozen_tracker_grants_no_lease_before_it_has_looked() -> None:
    """When it wakes others may own its blobs."""
    cluster = running("a", "b")
    cluster.frozen.add("a")
    cluster.run(FROZEN_S + BEAT_S)
    assert cluster.handle("a", Tick()) == [AllowLeases(False)]
    cluster.frozen.clear()
    cluster.run(BEAT_S)
    assert cluster.cores["a"].leases_allowed
    # Where the database is away it goes on after a while.
    cluster.available = False
    cluster.frozen.add("a")
    cluster.run(FROZEN_S + BEAT_S)
    cluster.frozen.clear()
    cluster.run(BEAT_S)
    assert not cluster.cores["a"].leases_allowed
    cluster.run(UNCONFIRMED_S)
    assert cluster.cores["a"].leases_allowed


def test_a_tracker_that_is_cut_off_stops_granting_once_two_agents_know_better() -> None:
    """One alone may lie; and the database's word ends it."""
    cluster = running("a", "b")
    cluster.cut.add("a")
    cluster.run(10)
    assert cluster.cores["b"].followed != cluster.cores["a"].followed
    assert cluster.cores["a"].leases_allowed
    assert cluster.handle("a", EpochHeard(2, "10.0.0.1")) == []
    assert cluster.handle("a", EpochHeard(2, "10.0.0.1")) == []
    assert cluster.handle("a", EpochHeard(2, "10.0.0.2")) == [AllowLeases(False)]
    cluster.cut.clear()
    cluster.run(2)
    assert cluster.cores["a"].leases_allowed and cluster.cores["a"].followed == cluster.stored


def test_another_trackers_word_counts_alone() -> None:
    cluster = running("a", "b")
    assert cluster.handle("a", EpochHeard(2, "b", trusted=True)) == [AllowLeases(False)]


def test_lies_of_a_newer_epoch_cost_half_a_second() -> None:
    """The database does not have it: the next epoch is above what was said, and all goes on."""
    cluster = running("a", "b")
    for name in ("10.0.0.1", "10.0.0.2"):
        cluster.handle("a", EpochHeard(500, name))
        cluster.handle("a", EpochHeard(500 + 2 * EPOCH_AHEAD_MAX, name))
    assert not cluster.cores["a"].leases_allowed
    cluster.run(2)
    assert cluster.stored is not None and cluster.stored.epoch == 501
    assert all(core.leases_allowed and core.followed == cluster.stored for core in cluster.cores.values())


def test_lies_that_go_on_cost_one_epoch_a_minute() -> None:
    """Else all hosts would hear of another one at each beat, and half of the time no lease would be
    granted."""
    cluster = running("a", "b")
    for _ in range(round(DEAF_S / BEAT_S)):
        for name in ("10.0.0.1", "10.0.0.2"):
            cluster.handle("a", EpochHeard(cluster.stored.epoch + 500 if cluster.stored else 0, name))
        cluster.run(BEAT_S)
    assert len(cluster.published) <= 3
    assert cluster.cores["a"].leases_allowed


def test_the_only_agent_is_believed_alone() -> None:
    """Of a database from a backup no other one can tell, and it would go by what is no more."""
    cluster = running("a", "b")
    assert cluster.handle("a", EpochHeard(7, "10.0.0.1", alone=True)) == [AllowLeases(False)]
    cluster.run(2)
    assert cluster.stored is not None and cluster.stored.epoch == 8
    assert cluster.handle("a", EpochHeard(9, "10.0.0.1", alone=True)) == [], "not twice in a minute"


def test_a_tracker_that_counts_no_more_does_not_propose_itself_again_and_again() -> None:
    """Its ticks fail and its beats do not: the others leave it out, once."""
    cluster = running("a", "b")
    cluster.stuck.add("a")
    cluster.run(30)
    assert len(cluster.published) == 2 and cluster.shares() == {"b": 1.0}


def test_a_database_from_a_backup_goes_on_above_what_trackers_know() -> None:
    cluster = running("a", "b")
    backup = cluster.stored
    cluster.rows["b"] = replace(cluster.rows["b"], draining=True)
    cluster.run(5)
    assert cluster.stored is not None and cluster.stored.epoch == 2
    cluster.stored = backup
    cluster.run(5)
    assert cluster.stored is not None and cluster.stored.epoch == 3
    assert cluster.shares() == {"a": 1.0, "b": 0.0}
    assert all(core.followed == cluster.stored for core in cluster.cores.values())


def test_an_overloaded_owner_pins_a_swarm_to_a_tracker_with_room() -> None:
    """The largest that fits there, recorded in the ownership; and the next one only when the load
    of this one has shown."""
    cluster = running("a", "b", "c")
    cluster.rows["b"] = replace(cluster.rows["b"], load=0.45)
    cluster.rows["c"] = replace(cluster.rows["c"], load=0.1)
    assert cluster.stored is not None
    blobs = [digest_of(b"%d" % number) for number in range(100)]
    mine = [blob for blob in blobs if owner(cluster.stored, blob).id == "a"]
    load = LoadSeen(0.9, ((mine[0], 800), (mine[1], 300), (mine[2], 100)), 1200)
    cluster.run(BEAT_S)
    cluster.handle("a", load)
    cluster.run(BUSY_S - 1)
    cluster.handle("a", load)
    assert not cluster.stored.pins
    cluster.run(1)
    cluster.handle("a", load)
    cluster.run(1)
    assert cluster.stored.pins == {mine[1]: "c"}
    assert owner(cluster.stored, mine[1]).id == "c"
    cluster.handle("a", load)
    cluster.run(PIN_S / 2)
    assert len(cluster.stored.pins) == 1
    # The pin goes with its tracker.
    cluster.frozen.add("c")
    cluster.run(DEAD_S + 2)
    assert not cluster.stored.pins and owner(cluster.stored, mine[1]).id in ("a", "b")


def test_a_short_load_pins_nothing() -> None:
    cluster = running("a", "b")
    cluster.handle("a", LoadSeen(0.9, ((BLOB, 10),), 10))
    cluster.run(BUSY_S / 2)
    cluster.handle("a", LoadSeen(0.2, ((BLOB, 10),), 10))
    cluster.run(BUSY_S)
    cluster.handle("a", LoadSeen(0.9, ((BLOB, 10),), 10))
    cluster.run(2)
    assert cluster.stored is not None and not cluster.stored.pins


def test_no_ownership_no_leases() -> None:
    """A tracker of a cluster that has not seen the database owns nothing."""
    core = Ownerships("a")
    assert not core.leases_allowed
    assert core.handle(Tick(), now=1.0) == [] and core.followed is None


def test_epochs_that_are_followed_grow() -> None:
    """An older word of the database, as from a replica, takes nothing back."""
    core = Ownerships("a")
    rows = (Registered("a", (), "1", 1),)
    new, old = (Ownership(epoch, (Tracker("a"),)) for epoch in (5, 4))
    assert Follow(new) in core.handle(MembersSeen(rows, new), now=1.0)
    assert not [command for command in core.handle(MembersSeen(rows, old), now=1.5) if isinstance(command, Follow)]
    assert core.followed == new
