"""When a fleet as a whole is late with its reports."""

from __future__ import annotations

from p2pdist.model.digest import digest_of
from tracker.core.host import Host
from tracker.core.monitor.lateness import COUNT_S, HELD_MAX_S, Lateness

INTERVAL_S = 0.25


class Fleet:
    def __init__(self, hosts: int) -> None:
        self.hosts = {name: Host(name, session=number) for number, name in enumerate(f"h{n}" for n in range(hosts))}
        for host in self.hosts.values():
            host.receiving[digest_of(b"x")] = None
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
    for host in list(fleet.hosts.values())[3:]:
        host.receiving.clear()
    list(fleet.hosts.values())[2].session = None
    fleet.now += COUNT_S
    fleet.lateness.count(interval_s=INTERVAL_S, now=fleet.now)
    assert not fleet.go(3.0, 2)
