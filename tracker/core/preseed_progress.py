"""How far a preseed is, for whoever asked for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from p2pdist.model.messages import KeptState
from p2pdist.model.preseed import ENDED, Failure
from tracker.core.affinity import Affinity
from tracker.core.host import Host
from tracker.core.preseed import HostSaid, Preseed, ShownState
from tracker.core.selectors import NAMES_TOLD_MAX, near, nobody_fits

FAILURES_SHOWN_MAX = 1000


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a preseed is. While it is not `settled` hosts may be on their way back to a tracker
    that was started again, and are not in `hosts_total`. `hosts_absent` are those that it is for
    and that are connected nowhere: members, and lost hosts that its selector means. Bytes count
    layers, over all its hosts. `failures` stand by reason, at most FAILURES_SHOWN_MAX of them.
    `notes` say, for people, for what it waits that may never come."""

    id: str
    state: ShownState
    settled: bool
    package: str
    priority: str
    hosts_total: int
    hosts_done: int
    hosts_absent: int
    bytes_total: int
    bytes_done: int
    eta_s: float | None
    failures: list[Failure]
    failures_by_reason: dict[str, int]
    replicas: dict[str, int]
    picked: tuple[str, ...]
    created_at: float
    deadline_at: float | None
    expires_at: float | None
    notes: tuple[str, ...] = ()


def progress(preseed: Preseed, affinity: Affinity, lost: Mapping[str, Host], *, settled: bool, now: float) -> Progress:
    """How far a preseed is. `settled`: who its hosts are is known; `lost`: hosts that ended without
    a word."""
    record, request, hosts = preseed.record, preseed.request, affinity.hosts
    members, others = preseed.members(hosts), dict(preseed.others())
    ended = record.state in ("cancelled", "expired")
    states = {name: preseed.state_of(name, hosts, others) for name in members}
    done = [name for name, state in states.items() if state == "done" and not ended]
    asked = [name for name in members if name not in preseed.lost] if not ended else []
    found = [preseed.failure(name, hosts, others) for name in asked]
    failures = [*(each for each in found if each is not None), *preseed.lost.values()]
    failures.sort(key=lambda each: (each.reason, each.host))
    tally = preseed.count(states, settled=settled)
    bytes_total = preseed.size * tally.hosts_total
    bytes_done = _bytes_done(preseed, affinity, states, others)
    return Progress(
        record.id,
        tally.state,
        settled,
        record.package,
        request.priority,
        tally.hosts_total,
        tally.hosts_done,
        len(_absent(preseed, states, lost)) if not ended else 0,
        bytes_total,
        bytes_done,
        preseed.seconds_left(bytes_done, bytes_total, now=now) if not ended else None,
        failures[:FAILURES_SHOWN_MAX],
        dict(Counter(each.reason for each in failures)),
        dict(Counter(preseed.zone_of(name, hosts, others) for name in done)),
        record.picked,
        record.created_at,
        record.deadline_at,
        record.expires_at,
        tuple(_notes(preseed, states, hosts, lost)) if record.state not in ENDED and tally.state != "done" else (),
    )


def _absent(preseed: Preseed, states: Mapping[str, KeptState | None], lost: Mapping[str, Host]) -> list[str]:
    """The hosts that a preseed is for and that are connected nowhere."""
    found = [name for name, state in states.items() if state is None]
    if preseed.selector is not None and preseed.request.count is None:
        found += [name for name, host in lost.items() if name not in states and preseed.selector.matches(host)]
    return found


def _notes(
    preseed: Preseed, states: Mapping[str, KeptState | None], hosts: Mapping[str, Host], lost: Mapping[str, Host]
) -> Iterator[str]:
    request, selector = preseed.request, preseed.selector
    choosy = selector is not None or preseed.picks
    pool = [host for host in hosts.values() if host.available and preseed.in_pool(host)] if choosy else []
    if selector is not None and not pool and not states:
        yield nobody_fits(selector, hosts.values())
    absent = _absent(preseed, states, lost)
    unknown = [name for name in absent if name not in lost and name not in hosts]
    for name in unknown[:NAMES_TOLD_MAX]:
        guess = near(name, hosts)
        yield f"no host called {name} is connected" + (f"; did you mean {guess}?" if guess else "")
    if len(unknown) > NAMES_TOLD_MAX:
        yield f"{len(unknown) - NAMES_TOLD_MAX} more names that no connected host has"
    away = [name for name in absent if name in lost or name in hosts]
    if away:
        more = f" and {len(away) - NAMES_TOLD_MAX} more" if len(away) > NAMES_TOLD_MAX else ""
        yield f"not connected: {', '.join(away[:NAMES_TOLD_MAX])}{more}"
    if request.count is not None and len(pool) < request.count and (pool or selector is None):
        yield f"{request.count} hosts are wanted, {len(pool)} that may be taken are connected"
    zones = Counter(host.zone for host in pool)
    for zone in sorted(zone for zone, number in zones.items() if number < (request.replicas or 0)):
        yield f"{request.replicas} copies are wanted in each zone, {zone or 'the one without a name'} has {zones[zone]}"


def _bytes_done(
    preseed: Preseed, affinity: Affinity, states: Mapping[str, KeptState | None], others: Mapping[str, HostSaid]
) -> int:
    """What the members say, or what swarms know of them if that is more; who is connected nowhere
    counts for nothing."""
    size = preseed.size
    missing = affinity.missing(dict(preseed.record.blobs), states)
    bytes_done = 0
    for name, state in states.items():
        if state == "done":
            bytes_done += size
        elif state is not None:
            holder, other = preseed.holders.get(name), others.get(name)
            said = max(holder.bytes_done if holder else 0, other.bytes_done if other else 0)
            bytes_done += min(size, max(said, size - missing[name]))
    return bytes_done
