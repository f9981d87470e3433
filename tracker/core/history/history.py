"""History: what of a fleet's life is reported to people and remembered.

Pure: what happens goes in, events (p2pdist/model/history.py) come out of `take`. Text that an agent
sends is shown with escapes for what does not print, and cut. One host reports so many failed pulls
within a while that its program may retry as it likes; more of them, and the same failure again, are
counted and not reported, so that no host pushes what others report out of the memory. A host that
is lost again and again is reported FLAPS_MAX times within FLAPS_S, and after that once in FLAPS_S,
with how often that was.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from p2pdist.model.digest import Digest, is_digest
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

FLAPS_MAX, FLAPS_S = 3, 600.0
"""So many losses of one host are reported one by one within so long."""

CLOCK_OFF_S = 30.0
"""A host whose clock differs more from the tracker's is reported: tokens, certificates and signed
requests begin to fail."""

HOSTS_MAX = 20_000
"""Hosts whose failures and losses are counted."""

MISSED_S = 10.0
"""A host is lost within so long after it left its swarms, or has gone on since."""

HELD_MAX = 10_000
"""Sites and packages that wait; what is beyond is reported for each of its swarms."""

NAMED_MAX = 5
"""Hosts of a failed preseed that its line names."""

_REASONS = {
    "absent": "its session broke before it was complete",
    "leaving": "it left the fleet before it was complete",
    "left": "its pull was given up",
    "dead": "its session broke before it was complete, and it did not answer other hosts",
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
class _Flaps:
    """The losses of one host within FLAPS_S."""

    since: float
    times: int = 0
    """Losses since then."""
    told: int = 0
    """Those of them that were reported one by one."""
    quiet: bool = False
    """It was lost so often before that none is reported by itself."""
    last: Event | None = None
    """The latest loss that was not reported."""
    back: bool = True
    """Whether it has a session."""


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
    _flaps: OrderedDict[str, _Flaps] = field(default_factory=OrderedDict)
    """By host, the one that is counted for the longest time first."""
    _missed: OrderedDict[str, tuple[float, str]] = field(default_factory=OrderedDict)
    """By host that may be lost: when it left a swarm, and a package of which it lacked something
    then."""
    _held: dict[tuple[str, Digest], dict[Digest, None]] = field(default_factory=dict)
    """By site and package that wait: which swarms do."""
    _looked_at: float = float("-inf")

    def __post_init__(self) -> None:
        self.broadcasts = Broadcasts(self.hosts, self.capacities, self.book, self.origin_bytes_s)

    def take(self) -> list[Event]:
        """What is to be reported since the last call."""
        taken, self._events = self._events, []
        return taken

    def tick(self, *, now: float) -> None:
        """Report the broadcasts that have ended, and hosts that were lost again and again."""
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        self._end_flaps(now)
        for running, report in self.broadcasts.end(now=now):
            self._report(_broadcast_event(running, report, now=now))

    # -- hosts

    def left(self, swarm: Swarm, host: str, reason: str, now: float) -> None:
        """A host is about to leave a swarm, for one of the reasons of Membership.leave."""
        if reason in ("absent", "dead") and not swarm.members[host].seed:
            self._missed[host] = now, short_name(*self._package_of(swarm.blob))
            if len(self._missed) > HOSTS_MAX:
                self._missed.popitem(last=False)
        self.broadcasts.leave(swarm, host, _REASONS.get(reason, reason), now=now)

    def lost(self, host: Host, now: float) -> None:
        """A host has ended without saying so."""
        where = f" at {host.address}" if host.address else ""
        why, ago_s = host.ended or "its session ended", now - (host.absent_since or now)
        missed_at, missed = self._missed.pop(host.name, (now, ""))
        missed = missed if now - missed_at < MISSED_S else ""
        text = f"lost {host.name}{where}{_place(host)}: {why}" + (f"; it did not get all of {missed}" if missed else "")
        event = Event("host-lost", text, "", "", host.name, host.zone, host.address, why, round(ago_s, 3))
        flaps = self._flaps.get(host.name)
        if flaps is None:
            flaps = self._flaps[host.name] = _Flaps(now)
            if len(self._flaps) > HOSTS_MAX:
                self._flaps.popitem(last=False)
        flaps.times += 1
        flaps.back = False
        if flaps.quiet or flaps.told >= FLAPS_MAX:
            flaps.last = event
            self.untold += 1
            return
        flaps.told += 1
        self._report(event)

    def back(self, host: Host, now: float) -> None:
        """A host that was lost has a session again."""
        flaps = self._flaps.get(host.name)
        if flaps is not None:
            flaps.back = True
            if flaps.last is not None:  # the summary of its losses says that it is back
                self.untold += 1
                return
        away_s = now - (host.absent_since or now)
        text = f"{host.name} is back after {away_s:.0f} s{_place(host)}"
        self._report(Event("host-back", text, "", "", host.name, host.zone, host.address, "", round(away_s, 3)))

    def _end_flaps(self, now: float) -> None:
        """Report the hosts that were lost more often than was reported, once their time is over."""
        while self._flaps:
            name, flaps = next(iter(self._flaps.items()))
            if now - flaps.since < FLAPS_S:
                return
            del self._flaps[name]
            if flaps.last is None:
                continue
            last, passed_s = flaps.last, now - flaps.since
            state = "is connected now" if flaps.back else "is away"
            text = (
                f"{name} was lost {flaps.times} times within {passed_s / 60:.0f} min and {state}, the last time:"
                f" {last.reason}. See why its agent ends or its link breaks: journalctl -u p2pdist-agent there"
            )
            began_s = round(passed_s, 3)
            self._report(Event("host-lost", text, "", "", name, last.zone, last.address, last.reason, began_s))
            self._flaps[name] = _Flaps(now, quiet=True, back=flaps.back)

    def connected(self, host: Host, *, now: float) -> None:
        """A host has a new session. Its clock is reported where it is off."""
        ahead_s = host.clock_ahead_s
        if ahead_s is None or abs(ahead_s) <= CLOCK_OFF_S or host.partial:
            return
        side = "ahead of" if ahead_s > 0 else "behind"
        if self._admit(host.name, f"clock {side}", now):
            reason = f"its clock is {abs(ahead_s):.0f} s {side} the tracker's"
            text = f"{host.name}{_place(host)}: {reason}. Run chrony or systemd-timesyncd there and on the tracker"
            self._report(Event("clock-off", text, "", "", host.name, host.zone, host.address, reason))

    def slow(self, host: Host, swarm: Swarm, share: float, *, downlink: bool, now: float) -> None:
        """A host turned out to have so small a share of what a typical link gives."""
        link, limit_bytes_s = "uplink", self.capacities.limit(host.name)
        if downlink:
            link, limit_bytes_s = "downlink", host.download_bytes_s
        if not self._admit(host.name, f"slow {link}", now):
            return
        package, digest = self._package_of(swarm.blob)
        reason = f"slow {link}, about {100 * share:.0f} % of what others have"
        cause = (
            f"It limits itself to {limit_bytes_s / 1e6:.1f} MB/s: see --{'download' if downlink else 'upload'}-limit"
            if limit_bytes_s
            else "See its link, and what else uses it"
        )
        text = f"{host.name}{_place(host)} has a {reason}, seen with {short_name(package, digest)}. {cause}"
        self._report(Event("host-slow", text, package, digest, host.name, host.zone, host.address, reason))

    def sent_wrong_bytes(self, host: Host, receiver: Host, swarm: Swarm, *, now: float) -> None:
        """A host says that another one sent it wrong bytes of a blob."""
        if not self._admit(host.name, f"wrong bytes of {swarm.blob} to {receiver.name}", now):
            return
        package, digest = self._package_of(swarm.blob)
        reason = f"{receiver.name} received wrong bytes from it, and dropped them"
        text = (
            f"{host.name}{_place(host)} sent wrong bytes of {short_name(package, digest)} to {receiver.name}, which"
            f" dropped them. See memory, disk and network card of {host.name}: p2pdist verify and dmesg there"
        )
        self._report(Event("wrong-bytes", text, package, digest, host.name, host.zone, host.address, reason))

    def _package_of(self, blob: Digest) -> tuple[str, Digest]:
        """The package of a blob and its manifest; "" and the blob where no package is known."""
        for package in self.book.packages_of(blob):
            if package.digest is not None:
                return self.book.name_of(package), package.digest
        return "", blob

    def site_waits(self, site: str, swarm: Swarm, why: str | None) -> None:
        """A site waits with a swarm, since its budget says so; goes on, where `why` is empty; or
        has nothing to wait for, None. Of one package it is reported once, whatever its blobs do."""
        package, digest = self._package_of(swarm.blob)
        waiting = self._held.setdefault((site, digest), {})
        before = bool(waiting)
        if why:
            waiting[swarm.key] = None
        else:
            waiting.pop(swarm.key, None)
        if not waiting or len(self._held) > HELD_MAX:
            del self._held[site, digest]
        if before != bool(waiting) and why is not None:
            state = f"has to wait: {why}. It goes on by itself" if why else f"comes to site {site} again"
            self._report(Event("site", f"{short_name(package, digest)} {state}", package, digest, reason=why))

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
        self,
        identifier: str,
        package: str,
        done: int,
        hosts: int,
        failures: Iterable[tuple[str, str]],
        began_s: float,
        notes: Iterable[str] = (),
        *,
        ordered_at: float = 0.0,
    ) -> None:
        """A preseed, ordered at a time in seconds since the epoch, has failed: so many of its hosts
        hold the package, and why some others do not, as far as that is known. `notes` say what it
        waited for in vain."""
        package = package.removeprefix(SCHEME)
        named = [f"{host} ({_line(reason)})" for host, reason in failures]
        more = f" and {len(named) - NAMED_MAX} more" if len(named) > NAMED_MAX else ""
        lacking = f"not {', '.join(named[:NAMED_MAX])}{more}" if named else ""
        reason = "; ".join(filter(None, (f"{done} of {hosts} hosts hold it", lacking, *map(_line, notes))))
        text = f"preseed {identifier} of {short_name(package, '')} failed: {reason}"
        digest = package.partition("@")[2]
        made = Event(
            "preseed-failed", text, package, digest, reason=reason, key=f"preseed {identifier} {ordered_at:.0f}"
        )
        self._report(made, began_s=began_s)

    # -- settings

    def origin(self, url: str, problem: str) -> None:
        """The origin cannot be read, or can again, where `problem` is empty."""
        problem = _line(problem)
        if problem:
            text = f"the tracker cannot read the origin: {problem}. Hosts get what others hold, and nothing new"
        else:
            text = f"the tracker can read the origin {url} again"
        self._report(Event("origin", text, reason=problem))

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
