"""Progress: who is held up by whom, judged from what hosts report.

Theory. Reports of a parent and of its child are not of the same moment, so the child is compared with what its parent had at some earlier
time: what the child lacks of that is waiting at the parent for certain. A host that takes part in a swarm reports at every interval,
also when nothing came in.

Silent: a child stands still, and its parent has not reported for SILENT_INTERVALS, or since it was asked to report often
(close_watch.py). A dead link tells nobody anything; waiting for the kernel or a heartbeat to notice would cost the whole subtree many
seconds.

Slow: all children of a host in a stripe lag behind it, for LAG_S without a break at less than SLOW_SHARE of the pace at which others
advance, although some of them keep up elsewhere. Then it is the parent's uplink. Where a host lags in every stripe, and other children of
its parents do not, it is its own downlink, and it is no good as a parent either. Where one child alone lags, in one stripe alone, for
EDGE_S, it is the connection between the two, and another parent may do better. Acting on less costs more than it gains: after a move a
host may be at half pace for a moment.
"""

from __future__ import annotations

from collections.abc import Mapping

from tracker.core.swarm import Lag, Member, Swarm

SILENT_INTERVALS = 2.5
SILENT_MIN_S = 0.6
STILL_S = 0.4
LAG_PIECES = 6
LAG_S = 0.7
EDGE_S = 2.0
EDGE_SHARE = 0.25
SLOW_SHARE = 0.45
GOOD_SHARE = 0.7
TRICKLE_SHARE = 0.2
PACE_MIN_S = 0.125
"""Reports that were kept waiting come at once: pieces are taken to have come over at least so long."""

TYPICAL_WEIGHT = 1 / 16
"""Weight of one report in the typical pace of a swarm."""


def silent_parents(
    swarm: Swarm, child: Member, asked_at: Mapping[str, float], *, interval_s: float, now: float
) -> list[str]:
    """Parents that are to be taken for absent, since this child of theirs stands still and they say nothing. `asked_at`: since when
    hosts have been asked to report often."""
    limit_s = max(SILENT_MIN_S, SILENT_INTERVALS * interval_s)
    found = []
    for stripe, name in enumerate(child.parents):
        if not name or now - child.moved_at[stripe] < STILL_S:
            continue
        parent = swarm.members[name]
        asked = asked_at.get(name, now)
        quiet = now - parent.heard_at > limit_s or (parent.heard_at < asked and now - asked > SILENT_MIN_S)
        if parent.present and not parent.seed and quiet:
            found.append(name)
    return found


def note_pace(swarm: Swarm, member: Member, counts: list[int], *, now: float) -> None:
    """Take in how fast a host advances; call it before its counts are changed."""
    passed_s = now - member.heard_at
    if passed_s <= 0:
        return
    passed_s = max(passed_s, PACE_MIN_S)
    for stripe, (old, new) in enumerate(zip(member.counts, counts, strict=True)):
        pace = member.pace[stripe] = (new - old) / passed_s
        if pace > 0:
            typical = swarm.typical_pace
            # Those who are slow count for little: in the end nobody else is left. One host alone moves it by a sixteenth at most.
            weight = TYPICAL_WEIGHT if pace > SLOW_SHARE * typical else TYPICAL_WEIGHT / 16
            swarm.typical_pace += weight * (min(pace, 2 * typical) - typical) if typical else pace
    for stripe, name in enumerate(member.parents):
        if not name or not _lags(swarm, member, stripe, name, counts):
            member.lags[stripe] = None
        elif member.lags[stripe] is None:
            member.lags[stripe] = Lag(member.heard_at, member.counts[stripe])


def _lags(swarm: Swarm, child: Member, stripe: int, name: str, counts: list[int]) -> bool:
    parent = swarm.members[name]
    if counts[stripe] >= swarm.totals[stripe]:
        return False
    children = len(parent.children[stripe])
    share = min(1.0, parent.budget / max(1, parent.load)) if parent.budget else 1.0 / max(1, children)
    # Who has the whole stripe could give as much as anybody gets.
    whole = parent.counts[stripe] == swarm.totals[stripe]
    expected = (swarm.typical_pace if whole else min(parent.pace[stripe], swarm.typical_pace)) * share
    return parent.counts[stripe] - counts[stripe] > LAG_PIECES and child.pace[stripe] < SLOW_SHARE * expected


def slow_host(swarm: Swarm, member: Member, *, now: float) -> tuple[str, float, bool] | None:
    """Who holds others up in what this host has just reported: a parent's uplink, or (True) its own downlink, and the share of a typical
    one that it has; None when there is nobody."""
    late = [
        stripe
        for stripe, lag in enumerate(member.lags)
        if lag is not None and now - lag.since >= _patience_s(swarm, member, stripe, now)
    ]
    for stripe in late:
        parent = swarm.members[member.parents[stripe] or ""]
        if parent.load > parent.budget > 0:
            continue  # it carries too many, and some will be taken from it (balance.py)
        children = [swarm.members[each] for each in parent.children[stripe]]
        # One that lags elsewhere too may have two slow parents, and says nothing against its sisters.
        if all(each.lags[stripe] is not None for each in children) and any(
            _held_up(swarm, each, stripe) for each in children
        ):
            served = sum(
                swarm.members[each].pace[number] for number, children in enumerate(parent.children) for each in children
            )
            return parent.host, served / max(swarm.typical_pace * swarm.stripes, 1e-9), False
    if late and not member.light and len(late) == len(_unfinished(swarm, member)):
        alone = [
            all(swarm.members[each].lags[stripe] is not None for each in _sisters(swarm, member, stripe))
            for stripe in late
        ]
        if not all(alone) or not any(_sisters(swarm, member, stripe) for stripe in late):
            return (
                member.host,
                sum(_pace(member, stripe, now) for stripe in late) / max(swarm.typical_pace * swarm.stripes, 1e-9),
                True,
            )
    return None


def slow_edges(swarm: Swarm, member: Member, *, now: float) -> list[int]:
    """Stripes of which the host has got so little for so long that its parent should be another, when nobody was found to be at fault."""
    return [
        stripe
        for stripe, lag in enumerate(member.lags)
        if lag is not None
        and now - lag.since >= EDGE_S
        and _pace(member, stripe, now) < EDGE_SHARE * swarm.typical_pace
    ]


def keeps_up(swarm: Swarm, member: Member) -> bool:
    """Whether a host gets about what others get, in every stripe that it still lacks."""
    unfinished = _unfinished(swarm, member)
    return bool(unfinished) and all(member.pace[stripe] > GOOD_SHARE * swarm.typical_pace for stripe in unfinished)


def _feeds_badly(swarm: Swarm, member: Member) -> bool:
    """Whether a host has children, and all of them lag behind it."""
    below = [(stripe, swarm.members[name]) for stripe, names in enumerate(member.children) for name in names]
    return bool(below) and all(child.lags[stripe] is not None for stripe, child in below)


def _pace(member: Member, stripe: int, now: float) -> float:
    """Pieces a second since the host began to lag, or of late."""
    lag = member.lags[stripe]
    return member.pace[stripe] if lag is None else (member.counts[stripe] - lag.count) / max(now - lag.since, 1e-3)


def _patience_s(swarm: Swarm, member: Member, stripe: int, now: float) -> float:
    """How long a host must lag before somebody is judged. Not long when pieces trickle in at a rate that only a slow link explains: a
    process that gets no time gives nothing. Nor where nothing else is in doubt but the downlink of a host that lost its children."""
    trickles = 0 < _pace(member, stripe, now) < TRICKLE_SHARE * swarm.typical_pace
    return LAG_S / 2 if trickles or not member.budget else LAG_S


def _sisters(swarm: Swarm, member: Member, stripe: int) -> list[str]:
    """The other children of the host's parent in a stripe."""
    return [each for each in swarm.members[member.parents[stripe] or ""].children[stripe] if each != member.host]


def _unfinished(swarm: Swarm, member: Member) -> list[int]:
    return [stripe for stripe, total in enumerate(swarm.totals) if member.counts[stripe] < total]


def _held_up(swarm: Swarm, child: Member, stripe: int) -> bool:
    """Whether a child lags in this stripe and not in every other one too."""
    if child.lags[stripe] is None:
        return False
    others = [number for number in _unfinished(swarm, child) if number != stripe]
    return not others or any(child.lags[number] is None for number in others)
