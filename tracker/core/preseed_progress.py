"""How far a preseed is, for whoever asked for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from p2pdist.model.messages import KeptState
from p2pdist.model.preseed import Failure
from tracker.core.affinity import Affinity
from tracker.core.preseed import HostSaid, Preseed, ShownState

FAILURES_SHOWN_MAX = 1000


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a preseed is. While it is not `settled` hosts may be on their way back to a tracker that was started again, and
    are not in `hosts_total`. Bytes count layers, over all its hosts. `failures` stand by reason, at most FAILURES_SHOWN_MAX of them."""

    id: str
    state: ShownState
    settled: bool
    package: str
    priority: str
    hosts_total: int
    hosts_done: int
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


def progress(preseed: Preseed, affinity: Affinity, *, settled: bool, now: float) -> Progress:
    """How far a preseed is. `settled`: who its hosts are is known."""
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
    )


def _bytes_done(
    preseed: Preseed, affinity: Affinity, states: Mapping[str, KeptState | None], others: Mapping[str, HostSaid]
) -> int:
    """What the members say, or what swarms know of them if that is more; who is connected nowhere counts for nothing."""
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
