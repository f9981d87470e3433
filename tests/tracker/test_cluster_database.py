"""The trackers of a cluster in their database, on a real PostgreSQL."""

from __future__ import annotations

import socket

import programs
import psycopg
import pytest

from p2pdist.model.errors import Conflict, Corrupt, NotFound
from p2pdist.model.ownership import Ownership, Tracker
from tracker.cluster.membership import Beat, MembershipDatabase


@pytest.fixture
def url(postgresql_server: str) -> str:
    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS cluster_trackers, cluster_ownership, cluster_authorities")
    return postgresql_server


def member(url: str, name: str, instance: str = "") -> MembershipDatabase:
    made = MembershipDatabase(url, name, (f"http://{name}:7070",), instance or f"process-{name}")
    made.register()
    return made


def with_authorities(url: str, name: str, *fingerprints: str) -> MembershipDatabase:
    return MembershipDatabase(url, name, (f"http://{name}:7070",), f"process-{name}", lambda: fingerprints)


def ownership(epoch: int, *names: str) -> Ownership:
    return Ownership(epoch, tuple(Tracker(name, (f"http://{name}:7070",)) for name in names))


def test_trackers_see_each_other_and_how_far_each_has_counted(url: str) -> None:
    """What one writes with a beat the other reads with its next; one that leaves is gone."""
    one, two = member(url, "a"), member(url, "b")
    one.beat(Beat(5, load=0.5, hosts=3, swarms=2, lag_s=0.25))
    look = two.beat(Beat(7))
    rows = {row.registered.id: row for row in look.rows}
    assert {name: row.registered.progress for name, row in rows.items()} == {"a": 5, "b": 7}
    assert (rows["a"].hosts, rows["a"].swarms, rows["a"].lag_s) == (3, 2, 0.25)
    assert rows["a"].registered.urls == ("http://a:7070",) and rows["a"].registered.load == 0.5
    assert not look.replaced and look.stored is None
    one.leave()
    assert [row.registered.id for row in two.beat(Beat(8)).rows] == ["b"]


def test_one_proposal_an_epoch_is_taken(url: str) -> None:
    """Of two trackers that propose over the same epoch one succeeds, the first time and later."""
    one, two = member(url, "a"), member(url, "b")
    assert one.publish(ownership(1, "a"), 0)
    assert not two.publish(ownership(1, "b"), 0), "there is one since"
    assert two.publish(ownership(2, "a", "b"), 1)
    assert not one.publish(ownership(2, "a"), 1)
    assert one.beat(Beat(1)).stored == two.beat(Beat(1)).stored == ownership(2, "a", "b")


def test_a_process_that_starts_under_the_same_id_takes_the_row_over(url: str) -> None:
    """The former process hears of it with its next beat, and neither its beats nor its end undo
    what the new one wrote."""
    former, successor = member(url, "a", "first"), member(url, "a", "second")
    successor.beat(Beat(3))
    assert former.beat(Beat(100)).replaced
    former.leave()
    look = successor.beat(Beat(4))
    assert not look.replaced and [row.registered.progress for row in look.rows] == [4]


def test_a_tracker_that_is_started_twice_leaves_the_one_that_runs_its_place(url: str) -> None:
    """The second cannot listen, and would have taken the row before it knew."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        runs = member(url, f"127.0.0.1-{port}")
        words = ("--listen", f"127.0.0.1:{port}", "--state", url, "--no-discovery")
        done = programs.run("tracker", *words)
        assert done.returncode == 1 and "address already in use" in done.stderr
        assert not runs.beat(Beat(1)).replaced


def test_a_tracker_drains_until_it_starts_anew(url: str) -> None:
    """Any tracker may have any other drain."""
    one, two = member(url, "a"), member(url, "b")
    one.drain("b", True)
    assert [row.registered.draining for row in two.beat(Beat(1)).rows if row.registered.id == "b"] == [True]
    two.register()
    assert [row.registered.draining for row in two.beat(Beat(1)).rows if row.registered.id == "b"] == [False]
    with pytest.raises(NotFound):
        one.drain("c", True)


def test_what_no_tracker_of_this_version_wrote_is_left_out_or_told(url: str) -> None:
    """A row with an id or a URL that cannot be is skipped; an ownership that is none is an error
    that says what to do."""
    one, two = member(url, "a"), member(url, "b")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("""UPDATE cluster_trackers SET urls = '["file:///etc/passwd"]' WHERE id = 'b'""")
        assert [row.registered.id for row in one.beat(Beat(1)).rows] == ["a"]
        connection.execute("UPDATE cluster_trackers SET urls = '{' WHERE id = 'b'")
        assert [row.registered.id for row in one.beat(Beat(2)).rows] == ["a"]
        two.register()
        connection.execute("INSERT INTO cluster_ownership VALUES (1, 5, '{}')")
        with pytest.raises(Corrupt, match="cluster_ownership"):
            one.beat(Beat(3))
        connection.execute("DELETE FROM cluster_ownership")
        assert one.publish(Ownership(1, (Tracker("a"),)), 0)
        connection.execute("UPDATE cluster_ownership SET epoch = 7")
    with pytest.raises(Corrupt, match="its epoch is 1 and 7"):
        one.beat(Beat(4))


def test_rows_of_trackers_that_are_long_gone_are_removed(url: str) -> None:
    """A tracker that was killed leaves its row behind."""
    one, two = member(url, "a"), member(url, "b")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE cluster_trackers SET beat_at = beat_at - interval '2 hours' WHERE id = 'b'")
        assert [row.registered.id for row in one.beat(Beat(1)).rows] == ["a"]
        assert two.beat(Beat(1)).replaced, "it has to register again"


def test_a_tracker_with_another_authority_is_refused(url: str) -> None:
    """Two access directories on one database would make two fleets of one: agents of either would
    be strangers to the other."""
    with_authorities(url, "a", "one").register()
    stranger = with_authorities(url, "b", "two")
    with pytest.raises(Conflict, match="another authority than that of the tracker a"):
        stranger.register()
    with pytest.raises(Conflict, match="the tracker a has an --access file, and the tracker c has none"):
        member(url, "c")
    assert [row.registered.id for row in with_authorities(url, "a", "one").beat(Beat(1)).rows] == ["a"]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE cluster_trackers SET beat_at = beat_at - interval '1 minute'")
    stranger.register()
    with pytest.raises(Conflict, match="authority than that of the tracker b"):
        with_authorities(url, "a", "one").register()


def test_a_rotation_reaches_the_trackers_one_after_the_other(url: str) -> None:
    """Old and new authorities overlap; what a tracker trusts is written again while it runs, so
    what it trusted at its start does not count."""
    trusted = {"a": ("old",), "b": ("old",)}
    one, two = (
        MembershipDatabase(url, name, (f"http://{name}:7070",), name, lambda name=name: trusted[name])  # type: ignore[misc]
        for name in ("a", "b")
    )
    one.register()
    two.register()
    for name in ("a", "b"):
        trusted[name] = ("new", "old")
    one.register()
    two.beat(Beat(1))
    for name in ("a", "b"):
        trusted[name] = ("newest", "new")
    one.register()
    two.register()


def test_trackers_without_access_control_share_a_database(url: str) -> None:
    member(url, "a")
    member(url, "b").register()
