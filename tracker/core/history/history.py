"""History: what of a fleet's life is reported to people and remembered.

Pure: what happens goes in, events (p2pdist/model/history.py) come out of `take`. Text that an agent
sends is shown with escapes for what does not print, and cut. One host reports so many failed pulls
within a while that its program may retry as it likes; more of them, and the same failure again, are
counted and not reported, so that no host pushes what others report out of the memory.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from p2pdist.model.digest import is_digest
from p2pdist.model.errors import printable
from p2pdist.model.history import (
    PACKAGE_CHARACTERS_MAX,
    TEXT_CHARACTERS_MAX,
    Broadcast,
    Event,
    HistoryKind,
    short_name,
)
from p2pdist.model.image import SCHEME
from p2pdist.model.messages import PullFailed
from tracker.core.capacity import Capacities
from tracker.core.history.broadcasts import QUIET_S, Broadcasts, Running
from tracker.core.host import Host
from tracker.core.policy.book import PolicyBook
from tracker.core.swarm import Swarm

WAITING_MAX = 10_000
"""Events that wait to be taken."""

LOOK_S = QUIET_S / 10
FAILURES_MAX, FAILURES_S = 20, 600.0
"""So many failed pulls of one host are reported within so long."""

HOSTS_MAX = 20_000
"""Hosts whose failures are counted."""

NAMED_MAX = 5
"""Hosts of a failed preseed that its line names."""

_REASONS = {
    "absent": "its session broke before it was complete",
    "leaving": "it left the fleet before it was complete",
    "left": "its pull was given up",
    "dead": "it did not answer before it was complete",
    "another tracker": "another tracker went on with it",
}
"""By the reason for which a host leaves a swarm (Membership.leave)."""


@dataclass(slots=True)
class _Failures:
    """The failed pulls of one host: when it began to be counted, how many were reported since, and
    which."""

    since: float
    reported: int = 0
    texts: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class History:
    """What a fleet reports. `hosts`, `capacities` and `book` are the fleet's and are only read."""

    hosts: dict[str, Host]
    capacities: Capacities
    book: PolicyBook
    origin_bytes_s: float = 0.0
    broadcasts: Broadcasts = field(init=False)
    counts: Counter[HistoryKind] = field(default_factory=Counter)
    """Events by kind; a metric."""
    untold: int = 0
    """Events that were not reported: a host repeated itself, or none took them; a metric."""
    _events: list[Event] = field(default_factory=list)
    _failures: OrderedDict[str, _Failures] = field(default_factory=OrderedDict)
    """By host, the latest last."""
    _looked_at: float = float("-inf")

    def __post_init__(self) -> None:
        self.broadcasts = Broadcasts(self.hosts, self.capacities, self.book, self.origin_bytes_s)

    def take(self) -> list[Event]:
        """What is to be reported since the last call."""
        taken, self._events = self._events, []
        return taken

    def tick(self, *, now: float) -> None:
        """Report the broadcasts that have ended."""
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        for running, report in self.broadcasts.end(now=now):
            self._report(_broadcast_event(running, report, now=now))

    # -- hosts

    def left(self, swarm: Swarm, host: str, reason: str, now: float) -> None:
        """A host is about to leave a swarm, for one of the reasons of Membership.leave."""
        self.broadcasts.leave(swarm, host, _REASONS.get(reason, reason), now=now)

    def lost(self, host: Host, now: float) -> None:
        """A host has ended without saying so."""
        where = f" at {host.address}" if host.address else ""
        why, ago_s = host.ended or "its session ended", now - (host.absent_since or now)
        text = f"lost {host.name}{where}{_place(host)}: {why}"
        self._report(Event("host-lost", text, "", "", host.name, host.zone, host.address, why, round(ago_s, 3)))

    def back(self, host: Host, now: float) -> None:
        """A host that was lost has a session again."""
        away_s = now - (host.absent_since or now)
        text = f"{host.name} is back after {away_s:.0f} s{_place(host)}"
        self._report(Event("host-back", text, "", "", host.name, host.zone, host.address, "", round(away_s, 3)))

    # -- pulls and preseeds

    def pull_failed(self, host: Host, failed: PullFailed, *, now: float) -> None:
        """A host could not pull something."""
        reason, package = _line(failed.reason), _line(failed.reference).removeprefix(SCHEME)
        digest = package if is_digest(package) else failed.digest
        name = "" if is_digest(package) else package
        text = f"{host.name} could not pull {short_name(name, digest)}: {reason}"
        if self._admit(host.name, text, now):
            known = Event("pull-failed", text, name, digest, host.name, host.zone, host.address, reason)
            self._report(known, began_s=failed.age_s)

    def _admit(self, host: str, text: str, now: float) -> bool:
        failures = self._failures.get(host)
        if failures is None or now - failures.since >= FAILURES_S:
            failures = self._failures[host] = _Failures(now)
            self._failures.move_to_end(host)
            if len(self._failures) > HOSTS_MAX:
                self._failures.popitem(last=False)
        if failures.reported >= FAILURES_MAX or text in failures.texts:
            self.untold += 1
            return False
        failures.reported += 1
        failures.texts[text] = None
        return True

    def preseed_failed(
        self, identifier: str, package: str, done: int, hosts: int, failures: Iterable[tuple[str, str]], began_s: float
    ) -> None:
        """A preseed has failed: so many of its hosts hold the package, and why some others do not,
        as far as that is known."""
        package = package.removeprefix(SCHEME)
        named = [f"{host} ({_line(reason)})" for host, reason in failures]
        more = f" and {len(named) - NAMED_MAX} more" if len(named) > NAMED_MAX else ""
        reason = f"{done} of {hosts} hosts hold it" + (f"; not {', '.join(named[:NAMED_MAX])}{more}" if named else "")
        text = f"preseed {identifier} of {short_name(package, '')} failed: {reason}"
        digest = package.partition("@")[2]
        made = Event("preseed-failed", text, package, digest, reason=reason, key=f"preseed {identifier}")
        self._report(made, began_s=began_s)

    # -- settings

    def changed(self, text: str, *, host: str = "", package: str = "", digest: str = "") -> None:
        """A setting of the tracker is another one from now on, or an operator has a host or package
        go another way."""
        self._report(Event("change", text, package, digest, host))

    def _report(self, event: Event, *, began_s: float | None = None) -> None:
        if len(self._events) >= WAITING_MAX:
            self.untold += 1
            return
        self.counts[event.kind] += 1
        self._events.append(_limited(event, event.began_s if began_s is None else began_s))


def _broadcast_event(running: Running, report: Broadcast, *, now: float) -> Event:
    name = short_name(running.package, running.key)
    parts = [f"{name} reached {report.complete} of {report.hosts} hosts in {report.seconds:.1f} s"]
    if report.ratio is not None:
        parts.append(f"{report.ratio:.2f} times the bound")
    if report.origin_copies is not None:
        parts.append(f"{report.origin_copies:.2f} copies from the origin")
    if stragglers := len(report.stragglers) + report.stragglers_more:
        first = report.stragglers[0]
        parts.append(f"{stragglers} stragglers, such as {first.host}: {first.reason}")
    began_s = round(now - running.began_at, 3)
    return Event("broadcast", ", ".join(parts), running.package, running.key, began_s=began_s, broadcast=report)


def _place(host: Host) -> str:
    names: Mapping[str, str] = {"site": host.site, "zone": host.zone, "rack": host.rack}
    said = [f"{key} {name}" for key, name in names.items() if name]
    return f" ({', '.join(said)})" if said else ""


def _line(text: str) -> str:
    return printable(" ".join(text.split()))[:PACKAGE_CHARACTERS_MAX]


def _limited(event: Event, began_s: float) -> Event:
    """The event as it may be kept: what hosts are called is theirs to say."""
    text = printable(event.text)
    if len(text) > TEXT_CHARACTERS_MAX:
        text = f"{text[:TEXT_CHARACTERS_MAX]}..."
    return Event(
        event.kind,
        text,
        event.package[:PACKAGE_CHARACTERS_MAX],
        event.digest,
        event.host,
        event.zone,
        event.address,
        printable(event.reason)[:TEXT_CHARACTERS_MAX],
        began_s,
        event.broadcast,
        event.key,
    )
