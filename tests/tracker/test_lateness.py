"""When a fleet as a whole is late with its reports."""

from __future__ import annotations

import random

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Advance, Hello, Holding, Leaving, Left, Report
from tracker.core.events import Event, Received, SessionClosed, SessionOpened, Tick
from tracker.core.fleet import Fleet as TrackerFleet
from tracker.core.host import Host
from tracker.core.monitor.lateness import COUNT_S, HELD_MAX_S, Lateness

INTERVAL_S = 0.25


class Fleet:
    def __init__(self, hosts: int) -> None:
        self.hosts = {name: Host(name, session=number) for number, name in enumerate(f"h{n}" for n in range(hosts))}
        for host in self.hosts.values():
            host.set_receiving(digest_of(b"x"), True)
        self.lateness, self.now = Lateness(), 0.0

    def go(self, seconds: float, reporting: int) -> bool:
        """So many of the hosts report for a while; whether the fleet is late then."""
        end = self.now + seconds
        while self.now < end:
            self.now += INTERVAL_S
            for host in list(self.hosts.values())[:reporting]:
                self.lateness.reported(host, interval_s=INTERVAL_S, now=self.now)
            self.lateness.count(interval_s=INTERVAL_S, now=self.now)
            self.late()
        return self.late()

    def late(self) -> bool:
        return self.lateness.late(interval_s=INTERVAL_S, now=self.now)


def test_a_fleet_that_reports_in_time_is_not_late_even_at_first() -> None:
    fleet = Fleet(10)
    assert not any(fleet.go(INTERVAL_S, 10) for _ in range(20))


def test_one_of_two_may_fall_silent_and_is_judged() -> None:
    fleet = Fleet(2)
    fleet.go(2.0, 2)
    assert not any(fleet.go(INTERVAL_S, 1) for _ in range(20))


def test_a_fleet_that_falls_silent_is_late_within_three_reports() -> None:
    fleet = Fleet(10)
    fleet.go(2.0, 10)
    fleet.now += 0.7
    assert fleet.late()


def test_what_is_heard_right_after_a_pause_says_nothing_yet() -> None:
    """The tracker was paused as well, say: all that came meanwhile stands in line."""
    fleet = Fleet(10)
    fleet.go(2.0, 10)
    fleet.now += 30.0
    assert fleet.late()
    assert fleet.go(INTERVAL_S, 10)
    assert not fleet.go(2.0, 10)


def test_no_host_is_excused_for_ever() -> None:
    fleet = Fleet(10)
    fleet.go(2.0, 10)
    assert any(fleet.go(INTERVAL_S, 2) for _ in range(12))
    assert not fleet.go(HELD_MAX_S, 2)


def test_hosts_that_are_done_or_gone_are_not_expected_to_report() -> None:
    fleet = Fleet(10)
    fleet.go(2.0, 10)
    for host in list(fleet.hosts.values())[2:]:
        if host.name == "h2":
            host.session = None
        else:
            host.set_receiving(digest_of(b"x"), False)
        fleet.lateness.rests(host)
    fleet.now += COUNT_S
    fleet.lateness.count(interval_s=INTERVAL_S, now=fleet.now)
    assert not fleet.go(3.0, 2)


def test_a_host_that_begins_a_short_pull_right_after_another_is_not_late() -> None:
    """It lacks something whenever hosts are counted, but said so of the first pull alone."""
    fleet = Fleet(1)
    host, lateness = fleet.hosts["h0"], fleet.lateness
    fleet.now = 10.0
    lateness.count(interval_s=INTERVAL_S, now=fleet.now)
    lateness.reported(host, interval_s=INTERVAL_S, now=fleet.now)
    fleet.now += 0.2
    host.set_receiving(digest_of(b"x"), False)
    lateness.rests(host)
    lateness.reported(host, interval_s=INTERVAL_S, now=fleet.now)
    host.set_receiving(digest_of(b"y"), True)
    for _ in range(4):
        fleet.now += COUNT_S
        lateness.count(interval_s=INTERVAL_S, now=fleet.now)
        assert not fleet.late()


def test_a_fleet_that_was_late_is_not_so_once_no_host_lacks_anything() -> None:
    fleet = Fleet(2)
    fleet.go(2.0, 2)
    fleet.now += 1.0
    assert fleet.late()
    for host in fleet.hosts.values():
        host.set_receiving(digest_of(b"x"), False)
        fleet.lateness.rests(host)
    fleet.lateness.count(interval_s=INTERVAL_S, now=fleet.now)
    fleet.now += 1.0
    assert not fleet.late()


@pytest.mark.parametrize("seed", range(4))
def test_the_hosts_that_are_to_report_are_those_that_lack_something_in_a_session(seed: int) -> None:
    """However hosts come, end, leave and lose pieces: each counts from its first report on since it
    last lacked nothing."""
    chance, fleet, now, piece = random.Random(seed), TrackerFleet(0.0), 10.0, 1 << 20
    blobs = [digest_of(b"a"), digest_of(b"b")]
    sessions: dict[str, int] = {}
    spoke: set[str] = set()
    for number in range(600):
        name, blob, now = f"h{chance.randrange(8)}", chance.choice(blobs), now + 0.02
        session = sessions.get(name)
        events: list[Event] = []
        if session is None:
            session = sessions[name] = number
            events.append(SessionOpened(number, Hello(PROTOCOL_VERSION, name, f"{name}:7071", "z")))
            events += [Received(number, Holding(each, piece, piece, (chance.randrange(2),))) for each in blobs]
        else:
            choices: list[Event] = [
                *[Received(session, Report((Advance(blob, (chance.randrange(2),)),), 0, 0.0))] * 6,
                Received(session, Left(blob)),
                Received(session, Holding(blob, piece, piece, (0,))),
                Received(session, Leaving()),
                SessionClosed(session),
            ]
            events.append(chance.choice(choices))
            if isinstance(events[0], SessionClosed):
                del sessions[name]
        for event in events:
            fleet.handle(event, now=now)
            host = fleet.hosts[name]
            if isinstance(event, Received) and isinstance(event.message, Report) and host.receiving:
                spoke.add(name)
            elif not host.receiving:
                spoke.discard(name)
        if number % 20 == 19:
            now += COUNT_S
            fleet.handle(Tick(1e9 + now), now=now)
            spoke = {
                each
                for each in spoke
                if each in fleet.hosts and fleet.hosts[each].session is not None and fleet.hosts[each].receiving
            }
            assert fleet._lateness.expected == len(spoke)
