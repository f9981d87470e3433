"""What becomes of a swarm whose hosts say that its blob is missing, or wrong, at the origin.

Theory. The holder of a lease that met this loses the lease, and another host tries. Once two
witnesses say so it may be true, and no host should try in vain; but two machines of strangers may
say it as well. So the tracker looks for itself (LookAtOrigin): whether the blob is there and has
its size, and whether the pieces that hosts named are right. What it sees decides (OriginSeen).
Where the origin has the blob, the hosts that said otherwise do not read it for a while, and receive
from others.

Where no other host may read, as where one host is at a site that reads, no second witness comes.
The tracker looks after the first then, and what it finds ends the swarm; else that host tries
again.

Some things it cannot see: an origin that only hosts reach, a blob of no manifest that it read, a
list that hosts vouch for, which is read from elsewhere. There two witnesses end the swarm. So do
all of its receivers together, whatever the tracker saw: no other host is there to be harmed, and
the way from the hosts to the origin may differ from the tracker's own.
"""

from __future__ import annotations

from collections.abc import Collection

from p2pdist.model.errors import Corrupt, NotFound, P2PDistError
from p2pdist.model.messages import Complaint
from tracker.core.events import LookAtOrigin, OriginSeen
from tracker.core.member import FROM_ORIGIN
from tracker.core.repair.remedies import move_lease
from tracker.core.swarm import OriginFailure, Swarm

DAMNING = frozenset(["corrupt", "missing"])

WITNESSES = 2

LOOK_AGAIN_S = 5.0
"""So long the last look at the origin counts: hosts that lie make the tracker read a few pieces in
this time."""

LOOK_LOST_S = 120.0
"""What a look shows does not come any more: the swarm had another key when it began."""

LOOK_PIECES_MAX = 4
"""Pieces of which one look reads."""

DISBELIEF_S = 60.0
"""So long a host does not read a blob at the origin where the tracker did not see what it said."""


def origin_failed(
    swarm: Swarm,
    host: str,
    complaint: Complaint,
    *,
    witness: str,
    seeing: bool,
    readers: Collection[str],
    now: float,
) -> tuple[bool, P2PDistError | None, list[LookAtOrigin]]:
    """The holder of a lease cannot read the origin. Return whether the lease moves, why the swarm
    must end, and whether the tracker is to look. `witness`: in whose name the host says so;
    `seeing`: whether a look can show anything; `readers`: the receivers that may read."""
    stripe, reason, reads = complaint.stripe, complaint.reason, swarm.origin
    if reason not in DAMNING:
        return move_lease(swarm, stripe, host, now=now, at_once=False), None, []
    piece = complaint.piece if complaint.piece is not None else _next_piece(swarm, host, stripe)
    reads.fail(host, OriginFailure(witness, reason, piece))
    looks = []
    believed, last = _believed(swarm), all(reader in reads.failures for reader in readers)
    if believed and (not seeing or _all_say_so(swarm)):
        return False, _error(swarm, reason), []
    if last and not seeing and reason == "missing":  # the host has given up
        return False, _error(swarm, reason), []
    if (believed or last) and seeing and reads.may_look(now - LOOK_AGAIN_S, now - LOOK_LOST_S):
        reads.look(now)
        looks.append(LookAtOrigin(swarm.key, swarm.blob, swarm.layout, _pieces(swarm)))
    return move_lease(swarm, stripe, host, now=now, at_once=True), None, looks


def origin_seen(swarm: Swarm, seen: OriginSeen, *, now: float) -> P2PDistError | None:
    """The tracker has looked. Return why the swarm must end."""
    reads = swarm.origin
    reads.looked()
    match seen.state:
        case "missing" | "corrupt":
            return _error(swarm, seen.state, seen.what)
        case "unknown" if reads.failures:
            last = next(reversed(reads.failures.values()))
            if _believed(swarm) or last.reason == "missing":
                return _error(swarm, last.reason)
        case "right":
            swarm.record(now, f"the tracker finds the blob at the origin, where {len(reads.failures)} hosts did not")
            if reads.failures and _all_say_so(swarm):
                return _error(swarm, next(reversed(reads.failures.values())).reason)
            if _believed(swarm):  # else no other host could read in their place
                _disbelieve(swarm, now)
    return None


def _believed(swarm: Swarm) -> bool:
    """Whether so many witnesses say so that it may be true."""
    return swarm.origin.witnesses() >= min(WITNESSES, swarm.receivers)


def _disbelieve(swarm: Swarm, now: float) -> None:
    """The hosts that did not find what is there do not read for a while, and the hosts that wait
    for what they would have read wait no longer."""
    edges, failures = swarm.edges, swarm.origin.failures
    for host in filter(swarm.members.__contains__, failures):
        edges.avoid(host, FROM_ORIGIN, now + DISBELIEF_S)
        for stripe, children in enumerate(swarm.members[host].children):
            if not edges.rooted(stripe, host):
                for child in [child for child in children if child not in failures]:
                    edges.detach(stripe, child)


def _all_say_so(swarm: Swarm) -> bool:
    failures = swarm.origin.failures
    return len(failures) >= swarm.receivers and all(
        member.seed or member.host in failures for member in swarm.members.values()
    )


def _next_piece(swarm: Swarm, host: str, stripe: int) -> int:
    """The piece that a host was about to read, where it names none: it reads them in order."""
    held = min(swarm.members[host].counts[stripe], swarm.totals[stripe] - 1)
    return stripe + held * swarm.stripes


def _pieces(swarm: Swarm) -> tuple[int, ...]:
    """The pieces that hosts found wrong, as the last ones said."""
    named = [failure.piece for failure in swarm.origin.failures.values() if failure.reason == "corrupt"]
    valid = (piece for piece in reversed(named) if 0 <= piece < swarm.layout.count)
    return tuple(dict.fromkeys(valid))[:LOOK_PIECES_MAX]


def _error(swarm: Swarm, reason: str, what: str = "") -> P2PDistError:
    if reason == "missing":
        return NotFound(f"the origin does not have {swarm.blob}", remedy="Push it again")
    detail = f": {what}" if what else ""
    return Corrupt(f"the origin's copy of {swarm.blob} is corrupt{detail}", remedy="Push it again")
