"""What a fleet reports to people: scripts of hosts that come, receive, fail and go, and what is
remembered of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import UsageError
from p2pdist.model.history import TEXT_CHARACTERS_MAX, Event, digest_prefix, parse_kinds, parse_since, short_name
from p2pdist.model.manifest import parse_reference
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Advance,
    Complaint,
    FromAgent,
    Hello,
    Holding,
    Leaving,
    Left,
    PullFailed,
    Report,
)
from tracker.core.events import Received, SessionClosed, SessionOpened, Tick
from tracker.core.fleet import Fleet
from tracker.core.history.bound import Links, bound
from tracker.core.history.broadcasts import HOSTS_MIN, QUIET_S, STRAGGLER_FACTOR, STRAGGLERS_MAX
from tracker.core.history.history import CLOCK_OFF_S, FAILURES_MAX, FAILURES_S, FLAPS_MAX, FLAPS_S
from tracker.core.member import FROM_ORIGIN
from tracker.core.monitor.presence import ABSENCE_S

LAYER, PACK = digest_of(b"layer"), digest_of(b"pack")
MANIFEST = digest_of(b"manifest")
PIECE = 1 << 20
PIECES = 8
SIZE = PIECES * PIECE


class Script:
    """Hosts that speak to a fleet, and what it reports."""

    def __init__(self, **more: float) -> None:
        self.fleet = Fleet(-100.0, **more)  # type: ignore[arg-type]
        self.now = 0.0
        self._sessions: dict[str, int] = {}
        self._number = 0

    def open(self, *hosts: str, download_bytes_s: float = 0.0, upload_bytes_s: float = 0.0) -> None:
        for host in hosts:
            self._number += 1
            self._sessions[host] = self._number
            hello = Hello(
                PROTOCOL_VERSION,
                host,
                f"{host}:1",
                "z1",
                upload_bytes_s=upload_bytes_s,
                download_bytes_s=download_bytes_s,
            )
            self.fleet.handle(SessionOpened(self._number, hello), now=self.now)

    def close(self, host: str, why: str = "") -> None:
        self.fleet.handle(SessionClosed(self._sessions[host], why), now=self.now)

    def say(self, host: str, message: FromAgent) -> None:
        self.fleet.handle(Received(self._sessions[host], message), now=self.now)

    def join(self, *hosts: str, count: int = 0, blob: Digest = LAYER) -> None:
        for host in hosts:
            self.say(host, Holding(blob, SIZE, PIECE, (count,)))

    def report(self, host: str, count: int = PIECES, blob: Digest = LAYER) -> None:
        self.say(host, Report((Advance(blob, (count,)),)))

    def wait(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / 0.25))):
            self.now += seconds / max(1, round(seconds / 0.25))
            self.fleet.handle(Tick(), now=self.now)

    def package(self, *blobs: Digest, tag: str = "team/a:v7", manifest: Digest = MANIFEST) -> None:
        self.fleet.policies.note(parse_reference(tag), manifest, blobs)

    def events(self, kind: str = "") -> list[Event]:
        return [event for event in self.fleet.history.take() if kind in ("", event.kind)]


def test_a_broadcast_begins_with_the_first_join_and_ends_with_the_last_host() -> None:
    script = Script()
    script.package(LAYER)
    script.open("a", "b", "c", "d")
    script.join("a", "b", "c", "d")
    script.wait(2.0)
    for host in ("a", "b", "c"):
        script.report(host)
    script.wait(8.0)
    assert script.events() == [], "one of them still receives"
    script.report("d")
    script.wait(QUIET_S + 1.0)
    (event,) = script.events()
    report = event.broadcast
    assert report is not None and (event.kind, event.package, event.digest) == ("broadcast", "team/a:v7", MANIFEST)
    assert (report.hosts, report.complete, report.blobs, report.bytes) == (4, 4, 1, SIZE)
    assert (report.seconds, report.to_50_s, report.to_99_s, report.to_100_s) == (10.0, 2.0, 10.0, 10.0)
    assert report.curve == ((2.0, 1), (2.0, 2), (2.0, 3), (10.0, 4))
    assert report.wanted_bytes == 4 * SIZE
    assert [(each.host, each.seconds) for each in report.stragglers] == [("d", 10.0)]
    assert event.text.startswith("team/a:v7 reached 4 of 4 hosts in 10.0 s")


def test_what_the_root_reads_is_a_copy_from_the_origin() -> None:
    script = Script()
    script.open("a", "b", "c")
    script.join("a", "b", "c")
    script.wait(1.0)
    members = script.fleet.swarms[LAYER].members
    for host in sorted(members, key=lambda name: members[name].parents[0] != FROM_ORIGIN):  # the root first
        script.report(host)
    script.wait(QUIET_S + 1.0)
    (event,) = script.events("broadcast")
    assert event.broadcast is not None and event.broadcast.origin_copies == 1.0
    assert event.package == "" and event.digest == LAYER and f"{LAYER[7:19]} reached" in event.text


def test_only_the_stripes_that_a_root_reads_are_copies() -> None:
    script = Script()
    script.open("a", "b", "c")
    pieces = 512
    for host in ("a", "b", "c"):
        script.say(host, Holding(PACK, pieces * PIECE, PIECE, (0, 0)))
    script.wait(1.0)
    swarm = script.fleet.swarms[PACK]
    for host, member in swarm.members.items():  # what each root reads comes before all else
        read = tuple(swarm.totals[stripe] * (member.parents[stripe] == FROM_ORIGIN) for stripe in range(2))
        script.say(host, Report((Advance(PACK, read),)))
    for host in ("a", "b", "c"):
        script.say(host, Report((Advance(PACK, tuple(swarm.totals)),)))
    script.wait(QUIET_S + 1.0)
    (event,) = script.events("broadcast")
    assert event.broadcast is not None and event.broadcast.origin_copies == 1.0


def test_one_host_makes_no_broadcast_and_seeds_are_no_receivers() -> None:
    script = Script()
    script.open("a", "b")
    script.join("b", count=PIECES)
    script.join("a")
    script.wait(1.0)
    script.report("a")
    script.wait(QUIET_S + 1.0)
    assert HOSTS_MIN == 2 and script.events() == []
    assert not script.fleet.history.broadcasts.running and not script.fleet.history.broadcasts.receivers


def test_the_blobs_of_a_package_are_one_broadcast() -> None:
    """A host takes them one after the other, and lacks nothing for a moment in between."""
    script = Script()
    script.package(LAYER, PACK)
    script.open("a", "b")
    script.join("a", "b")
    script.wait(1.0)
    script.report("a")
    script.report("b")
    script.wait(QUIET_S / 2)
    script.join("a", "b", blob=PACK)
    script.wait(1.0)
    script.report("a", blob=PACK)
    script.report("b", blob=PACK)
    script.wait(QUIET_S + 1.0)
    (event,) = script.events()
    assert event.broadcast is not None
    assert (event.broadcast.blobs, event.broadcast.complete) == (2, 2)
    assert event.broadcast.seconds == pytest.approx(2.0 + QUIET_S / 2)


def test_a_blob_of_two_packages_counts_for_the_one_that_its_host_receives() -> None:
    script = Script()
    other = digest_of(b"other manifest")
    script.package(LAYER, tag="team/a:v1", manifest=MANIFEST)
    script.open("a", "b")
    script.join("a", "b")
    script.package(LAYER, PACK, tag="team/a:v2", manifest=other)
    script.package(PACK, tag="team/a:v1", manifest=MANIFEST)
    script.join("a", "b", blob=PACK)
    assert list(script.fleet.history.broadcasts.running) == [MANIFEST]


def test_hosts_that_go_are_stragglers_with_their_reason() -> None:
    script = Script()
    script.open("a", "b", "c", "d", "e")
    script.join("a", "b", "c", "d", "e")
    script.wait(1.0)
    script.report("a")
    script.report("b")
    script.close("c", "its connection broke")
    script.say("d", Left(LAYER))
    script.say("e", Leaving())
    script.wait(QUIET_S + ABSENCE_S + 1.0)
    events = script.events()
    assert [event.kind for event in events] == ["host-lost", "broadcast"]
    assert (events[0].host, events[0].address, events[0].reason) == ("c", "c:1", "its connection broke")
    assert events[0].began_s >= ABSENCE_S
    report = events[1].broadcast
    assert report is not None and (report.complete, report.hosts, report.to_50_s) == (2, 5, None)
    assert {each.host: each.reason for each in report.stragglers} == {
        "c": "its session broke before it was complete",
        "d": "its pull was given up",
        "e": "it left the fleet before it was complete",
    }
    assert all(each.seconds is None for each in report.stragglers)


def test_a_host_that_is_back_goes_on_in_its_broadcast() -> None:
    script = Script()
    script.open("a", "b")
    script.join("a", "b")
    script.wait(1.0)
    script.report("a")
    script.report("b", 4)
    script.close("b")
    script.wait(ABSENCE_S + 1.0)
    assert [event.kind for event in script.events()] == ["host-lost"]
    script.open("b")
    script.join("b", count=4)
    script.wait(0.5)
    script.report("b")
    script.wait(QUIET_S + 1.0)
    back, ended = script.events()
    assert (back.kind, back.host) == ("host-back", "b") and back.began_s == pytest.approx(ABSENCE_S + 1.0)
    assert ended.broadcast is not None
    assert (ended.broadcast.complete, ended.broadcast.wanted_bytes) == (2, 2 * SIZE)


def test_its_own_limit_is_why_a_host_is_late() -> None:
    script = Script()
    script.open("a", "b", "c")
    script.open("slow", download_bytes_s=1e6)
    script.join("a", "b", "c", "slow")
    script.wait(1.0)
    for host in ("a", "b", "c"):
        script.report(host)
    script.wait(7.5)
    script.report("slow")
    script.wait(QUIET_S + 1.0)
    (event,) = script.events("broadcast")
    assert event.broadcast is not None
    assert [(each.host, each.reason) for each in event.broadcast.stragglers] == [("slow", "its own limit of 1.0 MB/s")]
    assert event.broadcast.bound_s == pytest.approx(SIZE / 1e6, rel=1e-3), "no other rate is known"
    assert event.broadcast.unknown[0] == "the rate of the origin"


def test_the_bound_is_told_as_far_as_rates_are_known() -> None:
    script = Script(origin_bytes_s=2e6)
    script.open("a", "b", upload_bytes_s=3e6)
    script.join("a", "b")
    script.wait(1.0)
    script.report("a")
    script.report("b")
    script.wait(QUIET_S + 1.0)
    (event,) = script.events("broadcast")
    assert event.broadcast is not None and event.broadcast.bound_s == round(SIZE / 2e6, 3)
    assert event.broadcast.ratio == pytest.approx(1.0 / (SIZE / 2e6), abs=1e-3)
    nothing = bound(100, 200, 2, Links(0.0, [], 2, 0.0))
    assert nothing.seconds is None and len(nothing.unknown) == 3
    # What some uplinks, or the origin, might give besides bounds nothing.
    assert bound(0, 300, 3, Links(0.0, [], 2, 30.0)).seconds is None
    assert bound(100, 300, 3, Links(0.0, [], 0, 30.0)).seconds is None
    # Copies are here, and the origin need not be read: uplinks alone bound it.
    assert bound(0, 300, 3, Links(0.0, [(100, 50.0)], 0, 30.0)).seconds == 10.0
    assert bound(100, 300, 1, Links(10.0, [(100, 5.0)], 0, 1000.0)) == bound(
        100, 300, 1, Links(5.0, [(100, 50.0)], 0, 1000.0)
    )


def test_a_host_that_says_goodbye_is_not_lost() -> None:
    script = Script()
    script.open("a", "b")
    script.say("a", Leaving())
    script.close("a")
    script.close("b", "it did not answer for 15 s")
    script.wait(ABSENCE_S + 1.0)
    (event,) = script.events()
    assert event.text == "lost b at b:1 (zone z1): it did not answer for 15 s"


def test_what_a_host_did_not_get_is_told_with_the_loss_that_kept_it_from_it() -> None:
    """It was late to say what it holds, got everything since, and is lost later."""
    script = Script()
    script.package(LAYER)
    script.open("a", "seed")
    script.join("seed", count=PIECES)
    script.join("a")
    script.close("a")
    script.wait(1.0)
    script.open("a")
    script.wait(2 * ABSENCE_S)  # it has a session, and has not said what it holds
    assert "a" not in script.fleet.swarms[LAYER].members
    script.join("a")
    script.report("a")
    script.wait(60.0)
    assert not script.events("host-lost")
    script.close("a", "its connection broke")
    script.wait(2 * ABSENCE_S)
    (event,) = script.events("host-lost")
    assert event.text.endswith(": its connection broke"), event.text


def test_failed_pulls_name_host_package_and_reason() -> None:
    script = Script()
    script.open("a")
    script.say("a", PullFailed("team/a:v7", "disk-full: the store is full", MANIFEST, 3.0))
    script.say("a", PullFailed(LAYER, "not-found: gone"))
    script.say("a", PullFailed("docker://docker.io/library/python:3.12", "failed: no"))
    package, blob, image = script.events()
    assert image.package == "docker.io/library/python:3.12", "as rights to read name it"
    assert (package.host, package.package, package.digest) == ("a", "team/a:v7", MANIFEST)
    assert package.text == "a could not pull team/a:v7: disk-full: the store is full" and package.began_s == 3.0
    assert (blob.package, blob.digest) == ("", LAYER) and LAYER[7:19] in blob.text


def test_one_host_cannot_fill_the_memory() -> None:
    script = Script()
    script.open("a", "b")
    for number in range(1000):
        script.say("a", PullFailed("team/a:v7", f"failed: {number}"))
    for _ in range(3):
        script.say("b", PullFailed("team/a:v7", "failed: the same"))
    assert len(script.events()) == FAILURES_MAX + 1
    assert script.fleet.history.untold == 1000 - FAILURES_MAX + 2
    script.wait(FAILURES_S + 1.0)
    script.say("a", PullFailed("team/a:v7", "failed: again"))
    assert len(script.events()) == 1


def test_text_of_agents_is_fit_for_a_terminal() -> None:
    script = Script()
    script.open("a")
    script.say("a", PullFailed("team/a:v7\x1b[2J", "failed: \x00\x07\u202e" + 400 * "x"))
    (event,) = script.events()
    assert event.text.isprintable() and event.reason.isprintable() and event.package.isprintable()
    assert len(event.text) <= TEXT_CHARACTERS_MAX + 3


def test_a_failed_preseed_names_some_of_its_hosts() -> None:
    script = Script()
    failures = [(f"h{number}", "disk-full: \x1bfull") for number in range(9)]
    script.fleet.history.preseed_failed("p1", f"team/a@{MANIFEST}", 1, 10, failures, 60.0, ordered_at=1234.0)
    (event,) = script.events()
    assert event.text.startswith(f"preseed p1 of team/a@{MANIFEST[7:19]} failed: 1 of 10 hosts hold it; not h0 (")
    assert "and 4 more" in event.text and event.text.isprintable() and event.key == "preseed p1 1234"


def test_names_for_people() -> None:
    assert short_name("team/a:v7", MANIFEST) == "team/a:v7"
    assert short_name("reg:5000/a", MANIFEST) == f"reg:5000/a@{MANIFEST[7:19]}"
    assert short_name("", LAYER) == LAYER[7:19]
    assert short_name(f"blob:sha256-{LAYER[7:]}", "") == f"blob {LAYER[7:19]}"
    assert digest_prefix("abcdef") == "sha256:abcdef" and digest_prefix("team/a") == ""
    assert digest_prefix(f"a@{MANIFEST}") == MANIFEST
    assert parse_kinds("broadcast, host-lost") == ("host-lost", "broadcast")
    assert parse_since("10m", now=1000.0) == 400.0 and parse_since("7", now=0.0) == 7.0
    for wrong in ("hosts", "broadcast,x"):
        with pytest.raises(UsageError):
            parse_kinds(wrong)
    for wrong in ("nan", "inf", "-1", "soon"):
        with pytest.raises(UsageError):
            parse_since(wrong, now=0.0)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from("abcdef"),
        st.sampled_from(
            ["open", "close", "join", "part", "whole", "left", "leaving", "pack", "packed", "wait", "quiet"]
        ),
    ),
    max_size=80,
)


@settings(deadline=None)
@given(ACTIONS)
def test_whatever_hosts_do_the_counts_agree_and_all_ends(actions: list[tuple[str, str]]) -> None:
    script = Script()
    script.package(LAYER, PACK)
    broadcasts = script.fleet.history.broadcasts
    open_hosts: set[str] = set()
    for host, action in actions:
        if action in ("wait", "quiet"):
            script.wait(0.5 if action == "wait" else QUIET_S)
        elif action == "open":
            open_hosts.add(host)
            script.open(host)
        elif host in open_hosts:
            _act(script, host, action)
            open_hosts -= {host} if action == "close" else set()
        for running in broadcasts.running.values():
            assert running.outstanding == sum(bool(each.lacks) for each in running.receivers.values())
            assert all(each.wanted_bytes >= 0 for each in running.receivers.values())
        assert broadcasts.receivers == sum(len(running.receivers) for running in broadcasts.running.values())
    for host in open_hosts:
        script.say(host, Leaving())
        script.close(host)
    script.wait(QUIET_S + ABSENCE_S + 2.0)
    assert not broadcasts.running and broadcasts.receivers == 0 and not broadcasts._of_blob
    for event in script.events("broadcast"):
        report = event.broadcast
        assert report is not None and HOSTS_MIN <= report.hosts <= 6 and report.complete <= report.hosts
        assert len(report.stragglers) <= STRAGGLERS_MAX and STRAGGLER_FACTOR > 1
        assert (report.to_100_s is not None) == (report.complete == report.hosts)
        assert [count for _, count in report.curve] == sorted(count for _, count in report.curve)


def _act(script: Script, host: str, action: str) -> None:
    match action:
        case "close":
            script.close(host)
        case "join":
            script.join(host)
        case "pack":
            script.join(host, blob=PACK)
        case "part":
            script.report(host, 3)
        case "whole":
            script.report(host)
        case "packed":
            script.report(host, blob=PACK)
        case "left":
            script.say(host, Left(LAYER))
        case "leaving":
            script.say(host, Leaving())


# -- signs of trouble


def test_a_host_that_is_lost_again_and_again_is_told_of_seldom() -> None:
    script = Script()
    for _ in range(40):  # 40 losses in about 5 minutes
        script.open("a")
        script.wait(3.0)
        script.close("a", "its connection broke")
        script.wait(ABSENCE_S + 2.0)
    told = [event.kind for event in script.events()]
    assert told.count("host-lost") == FLAPS_MAX and told.count("host-back") == FLAPS_MAX
    assert script.fleet.history.untold == 2 * (40 - FLAPS_MAX) - 1
    script.open("a")
    script.wait(FLAPS_S)
    (event,) = script.events()
    assert event.host == "a" and event.text.startswith("a was lost 40 times within 10 min and is connected now")
    assert "its connection broke" in event.text
    script.close("a")
    script.wait(2 * FLAPS_S)
    assert [event.text.partition(" within")[0] for event in script.events()] == ["a was lost 1 times"]
    script.open("a")
    assert [event.kind for event in script.events()] == ["host-back"], "nothing was lost for long"


def test_losses_of_many_hosts_are_each_told() -> None:
    script = Script()
    names = [f"h{number}" for number in range(20)]
    script.open(*names)
    for name in names:
        script.close(name)
    script.wait(ABSENCE_S + 1.0)
    assert sorted(event.host for event in script.events("host-lost")) == sorted(names)


def test_a_clock_that_is_off_is_told_once() -> None:
    script = Script()
    said = (("h1", CLOCK_OFF_S - 1), ("h0", -200.0), ("h0", -201.0), ("h2", None))
    for number, (host, ahead_s) in enumerate(said):
        hello = Hello(PROTOCOL_VERSION, host, "h:1", "z1", "r1")
        script.fleet.handle(SessionOpened(900 + number, hello, clock_ahead_s=ahead_s), now=script.now)
    (event,) = script.events()
    assert (event.kind, event.host) == ("clock-off", "h0")
    assert event.text.startswith("h0 (zone z1, rack r1): its clock is 200 s behind the tracker's. Run chrony")


def test_a_slow_link_names_host_package_and_limit() -> None:
    script = Script()
    script.package(LAYER)
    script.open("a", upload_bytes_s=1e6)
    script.open("b")
    script.join("a", "b")
    script.wait(1.0)
    swarm, hosts = script.fleet.swarms[LAYER], script.fleet.hosts
    for share in (0.1, 0.05):
        script.fleet.history.slow(hosts["a"], swarm, share, downlink=False, now=script.now)
    script.fleet.history.slow(hosts["b"], swarm, 0.2, downlink=True, now=script.now)
    uplink, downlink = script.events()
    assert uplink.kind == "host-slow" and (uplink.host, uplink.package) == ("a", "team/a:v7")
    assert "a (zone z1) has a slow uplink, about 10 % of what others have, seen with team/a:v7" in uplink.text
    assert "limits itself to 1.0 MB/s: see --upload-limit" in uplink.text
    assert downlink.host == "b" and "slow downlink, about 20 %" in downlink.text and "See its link" in downlink.text


def test_wrong_bytes_name_the_host_that_sent_them() -> None:
    script = Script()
    script.package(LAYER)
    script.open("a", "b")
    script.join("a", count=PIECES)
    script.join("b")
    script.wait(1.0)
    script.say("b", Complaint(LAYER, 0, "a", "corrupt"))
    script.say("b", Complaint(LAYER, 0, "a", "corrupt"))
    (event,) = script.events()
    assert (event.kind, event.host, event.package, event.digest) == ("wrong-bytes", "a", "team/a:v7", MANIFEST)
    assert event.text.startswith("a (zone z1) sent wrong bytes of team/a:v7 to b, which dropped them")


def test_an_origin_that_goes_and_comes_is_told() -> None:
    script = Script()
    script.fleet.history.origin("s3://models", "access denied by s3://models")
    script.fleet.history.origin("s3://models", "")
    away, back = script.events()
    assert away.kind == back.kind == "origin" and away.reason == "access denied by s3://models"
    assert "cannot read the origin: access denied" in away.text and back.text.endswith("s3://models again")


def test_hosts_say_themselves_what_they_read_of_the_origin() -> None:
    """A lease that moves between two reports takes nothing out of the count, and what others sent
    is not in it."""
    script = Script()
    script.open("a", "b", "c")
    script.join("a", "b", "c")
    script.wait(1.0)
    for host, read, count in (("a", 3, 3), ("b", 5, 8), ("a", 3, 8), ("c", 0, 8)):
        script.say(host, Report((Advance(LAYER, (count,), read * PIECE),)))
    script.wait(QUIET_S + 1.0)
    (event,) = script.events("broadcast")
    assert event.broadcast is not None and event.broadcast.origin_copies == 1.0
