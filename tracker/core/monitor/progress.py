"""Progress: which hosts hold others up, judged from what hosts report.

Theory. Reports of a parent and of its child are not of the same moment, so the child is compared
with what its parent had at some earlier time: the pieces that the child lacks of those wait at the
parent for certain. A host that takes part in a swarm reports at every interval, also when nothing
came in.

Silent: a child stands still, and its parent has not reported for SILENT_INTERVALS, or since it was
asked to report often (probing.py). No side hears of a dead link; waiting for the kernel or a
heartbeat to notice would cost the whole subtree many seconds.

Slow: all children of a host in a stripe lag behind it, for LAG_S without a break at less than
SLOW_SHARE of the rate at which others advance, although some of them keep up elsewhere. Then the
parent's uplink is slow. Where a host lags in every stripe that its parents have for it, and other
children of its parents do not, its own downlink is slow, and it is no good as a parent either. But
over a slow uplink acknowledgements wait behind what the host sends, so a host with an uplink that
was just found slow has LAG_S to show otherwise. A stripe that starves higher up says nothing of the
hosts below. A host that takes part in several swarms at once shares its link among them as its
connections have it, and children in one swarm may get next to nothing while others get more than
their share: its link is slow only where all its edges together show it (`share_over_all`). What is
usual was learned when hosts had more than they may have now: where the others, in their middle, get
little of it, as on a machine that is short of processors, only a host that gets little beside them
is slow (`little_beside`). Else one after the other would lose its upload slots, and those that are
left would have to feed all. Where there is no host to compare with, another parent for LAG_S tells.
Where one child
alone lags, in one stripe alone, for EDGE_S, the connection between the two is slow, and another
parent may do better. A root has no parent to lag behind, and reads no faster than its children
follow, so it is compared with the roots of other stripes. Acting on less costs more than it gains:
after a move a host may be at half its rate for a moment. But the more pieces wait at the parent
while they trickle in, the plainer it is.

Between two sites lies a WAN, which has a rate of its own, shared by all stripes, and over which a
new stream needs many round trips until it is as fast as that. So a host that imports a stripe into
its site is never called slow for it, nor is its parent: whatever the WAN does, a site that is as
late as its WAN keeps its upload slots. It is compared with the hosts that import other stripes into
the site, and where it alone gets little for IMPORT_S, the edge is at fault. Streams do not share a
WAN evenly: the last one may have a tenth of it when the others are done, and its window grows by a
segment or so in each round trip, while that of a new stream doubles. So it begins anew then.

A receiver that yields (Advance.yields of p2pdist/model/messages.py) lags in its stripes because its
host's readers come first, and pieces come from the stripes that these need. So its downlink is not
called slow before LAG_S have passed since, few pieces are not plain, and its parents have
YIELDS_TIMES as long to show that they are not slow. A silent parent is found as soon as ever. Any
agent may say that it yields. It gets nothing by that: only what it receives is judged later, which
its own children pay for, and it is believed for a limited time (Member.hear).

Large pieces take longer than the time between two reports of a host that is probed: most of these
show nothing, and one now and then a piece, as if several came in each second. So a rate of large
pieces is counted from the last one on. While none comes, the host's rate is no more than the one
piece that may be under way explains, and it lags for LAG_TURNS usual pieces at least before
anything is held against it or its parents: each change of a parent costs a piece that is half
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import lt
from statistics import median

from tracker.core.host import SITE_END
from tracker.core.member import FROM_ORIGIN, Lag, Member, yields
from tracker.core.swarm import Swarm

SILENT_INTERVALS = 2.5
SILENT_MIN_S = 0.6
STILL_S = 0.4
LAG_PIECES = 6
LAG_S = 0.7
PLAIN_S = 0.2
PLAIN_PIECES = 12
"""Where so many pieces wait, PLAIN_S is enough to see a slow link."""

EDGE_S = 2.0
EDGE_SHARE = 0.25
LAG_TURNS = 3.0
"""Where pieces are large, for how many times as long as a piece of a stripe usually takes a host
must lag at least: in a healthy swarm one comes in nearly each."""

YIELDS_TIMES = 2
"""A child must lag for so many times as long, while it yields, before its parent is taken for
slow."""

IMPORT_S = 6.0
"""Streams over a long path take seconds until they have equal shares of it, and each change of the
parent begins that anew."""

ALONE_S, ALONE_LEFT_S = 1.0, 2.0
"""A stream over a WAN that has it for itself since that time is as fast as that allows, or begins
anew where more is left than comes in the second at that rate."""

SLOW_SHARE = 0.45
OVERLOADED_SHARE = 0.3
GOOD_SHARE = 0.7
FULL_SHARE = 0.85
OTHERS_MIN, OTHERS_MAX = 3, 32
"""A host that is held to be slow is compared with the others of its swarm where there are so many,
and with so many of them at most."""

FAIR_REPORTS = 3
"""A downlink on which more than SLOW_SHARE arrives is not slow. It must arrive in so many reports
in a row, since over a slow one pieces may come in bursts."""

TRICKLE_SHARE = 0.2
REPORT_MIN_S = 0.125
"""Reports that were kept waiting come at once: their pieces are taken to have come over at least so
long."""

TYPICAL_WEIGHT = 1 / 16
"""Weight of one report in the typical rate of a swarm."""


def silent_parents(
    swarm: Swarm, child: Member, asked_at: Mapping[str, float], *, interval_s: float, now: float
) -> list[str]:
    """Parents that are to be taken for absent, since this child of theirs stands still, or left
    them for that, and they do not report. `asked_at`: since when hosts have been asked to report
    often."""
    limit_s = max(SILENT_MIN_S, SILENT_INTERVALS * interval_s)
    silent = []
    moved_at = child.moved_at
    for stripe, name in enumerate(child.parents):
        if not name or (now - moved_at[stripe] < STILL_S and (stripe, child.host) not in swarm.edges.left):
            continue
        parent = swarm.members[name]
        asked = asked_at.get(name, now)
        quiet = now - parent.heard_at > limit_s or (parent.heard_at < asked and now - asked > SILENT_MIN_S)
        if parent.present and not parent.seed and quiet:
            silent.append(name)
    return silent


def note_rates(swarm: Swarm, member: Member, counts: tuple[int, ...], *, now: float) -> None:
    """Note how fast a host advances; to be called before its counts change. Of a host that has not
    spoken itself before, it is not known what it had."""
    passed_s = now - member.heard_at
    if passed_s <= 0 or member.hearsay:
        return
    # A host that has whole stripes may get the others faster than any could while all of them came.
    unfinished = sum(map(lt, member.counts, swarm.totals)) / swarm.stripes
    typical = swarm.typical_rate
    if swarm.large:
        rates, shown_by = _rates_of_large(swarm, member, counts, now=now)
    else:
        passed_s = max(passed_s, REPORT_MIN_S)
        rates = shown_by = [(new - old) / passed_s for old, new in zip(member.counts, counts, strict=True)]
    slow = member.slow_receiver
    for rate in shown_by:
        if rate > (typical if slow else 0.0):
            least = rate * unfinished
            shown = rate if rate <= typical else least if least > typical else typical
            # Slow hosts count for little: in the end no others are left. One host alone moves it by
            # a sixteenth at most.
            weight = TYPICAL_WEIGHT if rate > SLOW_SHARE * typical else TYPICAL_WEIGHT / 16
            typical += weight * ((shown if shown < 2 * typical else 2 * typical) - typical) if typical else rate
    member.set_rates(rates)
    swarm.set_typical_rate(typical)
    # Its downlink is full: what it does not get of one stripe it gets of others.
    full = sum(rates) > FULL_SHARE * typical * swarm.stripes
    for stripe, name in enumerate(member.parents):
        lag = member.lags[stripe]
        if full or name is None or not _lags(swarm, member, stripe, name, counts):
            if lag is not None:
                member.set_lag(stripe, None)
        elif lag is None:
            member.set_lag(stripe, Lag(max(member.heard_at, member.attached_at[stripe]), member.counts[stripe]))


def _rates_of_large(
    swarm: Swarm, member: Member, counts: tuple[int, ...], *, now: float
) -> tuple[list[float], list[float]]:
    """The rates of a host, by stripe, and those of them that show what is usual, where pieces are
    large: each since the last piece that was told of. Without a new one the rate is what it was, or
    the usual one, but no more than one piece in that time. The first piece from a parent may be one
    that was half there, and shows nothing by itself."""
    rates, shown = [], []
    for stripe, (old, new) in enumerate(zip(member.counts, counts, strict=True)):
        moved_at = member.moved_at[stripe]
        passed_s = max(now - min(member.heard_at, moved_at), REPORT_MIN_S)
        gained = new - old - (moved_at == member.attached_at[stripe])
        if gained > 0:
            rates.append(gained / passed_s)
            shown.append(rates[-1])
        elif new == swarm.totals[stripe]:
            rates.append(0.0)
        else:
            rates.append(min(member.rates[stripe] or swarm.typical_rate, 1 / passed_s))
    return rates, shown


def imports(swarm: Swarm, member: Member, stripe: int) -> bool:
    """Whether a host receives a stripe from a host of another site, over a WAN."""
    parent = member.parents[stripe]
    return bool(parent) and SITE_END in member.zone and swarm.members[parent or ""].site != member.site


def _lags(swarm: Swarm, child: Member, stripe: int, name: str, counts: tuple[int, ...]) -> bool:
    """Whether a child lags behind its parent in a stripe, with these new counts."""
    if counts[stripe] >= swarm.totals[stripe]:
        return False
    if name == FROM_ORIGIN or imports(swarm, child, stripe):
        # A root reads no further ahead than its children follow, so it shows nothing but its rate;
        # and that jumps where pieces are few.
        behind = _waiting(swarm, child, stripe) > LAG_PIECES
        return behind and child.rates[stripe] < SLOW_SHARE * _usual_rate(swarm, child, stripe)
    parent = swarm.members[name]
    children = len(parent.children[stripe])
    share = min(1.0, parent.slots / max(1, parent.load)) if parent.slots else 1.0 / max(1, children)
    # A parent that has the whole stripe could give as much as any host gets.
    whole = parent.counts[stripe] == swarm.totals[stripe]
    expected = (swarm.typical_rate if whole else min(parent.rates[stripe], swarm.typical_rate)) * share
    return parent.counts[stripe] - counts[stripe] > LAG_PIECES and child.rates[stripe] < SLOW_SHARE * expected


def receiving_in(swarms: Iterable[Swarm], host: str) -> int:
    """In how many of these swarms a host receives something."""
    return sum(any(swarm.members[host].parents) for swarm in swarms)


def slow_host(swarm: Swarm, member: Member, *, turns: int = 1, now: float) -> tuple[str, float, bool] | None:
    """The host that holds others up, as far as the report of this member shows: its name, the share
    of a typical link that it has, and whether its downlink is slow (else its uplink). None when
    there is none. The member receives in `turns` swarms, which have the links in turns, so each may
    lag for so many times as long. While it yields, and for LAG_S after, it is not slow itself."""
    if not any(member.lags):
        return None
    late = [
        stripe
        for stripe, lag in enumerate(member.lags)
        if lag is not None
        and _lagged_s(member, lag, now) >= max(1, turns) * _patience_s(swarm, member, stripe, now)
        and not imports(swarm, member, stripe)
    ]
    for stripe in late:
        if member.parents[stripe] == FROM_ORIGIN:
            if _other_roots_go_on(swarm, member, stripe):
                return member.host, _rate(member, stripe, now) / max(_usual_rate(swarm, member, stripe), 1e-9), False
            continue
        parent = swarm.members[member.parents[stripe] or ""]
        served = _served(swarm, parent)
        if parent.load > parent.slots > 0 and served >= OVERLOADED_SHARE:
            continue  # it serves too many, and some will be moved away (rebalance/overload.py)
        if _holds_up(swarm, parent, stripe):
            return parent.host, served, False
    if not late or member.slow_receiver or not _holds_itself_up(swarm, member, late):
        return None
    share = sum(_rate(member, stripe, now) for stripe in late) / max(swarm.typical_rate * swarm.stripes, 1e-9)
    since = max(member.relieved_at, member.yielded_at)
    return (member.host, share, True) if now - since >= LAG_S else None


def share_over_all(swarms: Iterable[Swarm], host: str, *, downlink: bool) -> float:
    """The share of what is usual in each of these swarms that a host gets in all of them together,
    or gives its children; 0 where that is under way in one of them at most."""
    share, under_way = _share(swarms, host, downlink=downlink)
    return share if under_way > 1 else 0.0


def little_beside(
    swarms: Iterable[Swarm], host: str, others: Iterable[tuple[str, Iterable[Swarm]]], share: float, *, downlink: bool
) -> bool:
    """Whether a host that takes part in these swarms gets little, or gives little to its children,
    beside what other hosts get now, each named with its own swarms. It does where there are few
    such hosts to compare with. `share`: what it showed while it lagged."""
    levels = [
        level for name, theirs in others for level, under_way in (_share(theirs, name, downlink=True),) if under_way
    ]
    if len(levels) < OTHERS_MIN:
        return True
    now, under_way = _share(swarms, host, downlink=downlink)
    return (max(share, now) if under_way > 1 else share) < SLOW_SHARE * min(1.0, median(levels))


def _share(swarms: Iterable[Swarm], host: str, *, downlink: bool) -> tuple[float, int]:
    """The share that a host gets, or gives, by the last reports, and in how many swarms that is
    under way."""
    got, edges, under_way = 0.0, 0, 0
    for swarm in swarms:
        if swarm.typical_rate <= 0:
            continue
        member = swarm.members[host]
        if downlink:
            rates = [member.rates[stripe] for stripe in _unfinished(swarm, member) if member.parents[stripe]]
        else:
            fed = ((stripe, swarm.members[name]) for stripe, names in enumerate(member.children) for name in names)
            rates = [
                child.rates[stripe]
                for stripe, child in fed
                if not child.slow_receiver and child.counts[stripe] < swarm.totals[stripe]
            ]
        got, edges, under_way = got + sum(rates) / swarm.typical_rate, edges + len(rates), under_way + bool(rates)
    return (got / edges if edges else 0.0), under_way


def limited(swarm: Swarm, member: Member, limit_bytes_s: float) -> tuple[str, float, bool] | None:
    """The member itself, as a host with a slow downlink, where it lets itself receive no more than
    `limit_bytes_s` (0: no limit) and others get far more: it says nothing of its parents then.
    Result as of `slow_host`."""
    if not limit_bytes_s:
        return None
    typical_bytes_s = swarm.typical_rate * swarm.stripes * swarm.layout.piece_size
    if member.slow_receiver or not 0 < limit_bytes_s < SLOW_SHARE * typical_bytes_s:
        return None
    return member.host, limit_bytes_s / typical_bytes_s, True


def _other_roots_go_on(swarm: Swarm, member: Member, stripe: int) -> bool:
    """Whether a root of another stripe was faster in what it reported since this one lags. A root
    that reads several stripes, or feeds more children than it has slots, as in a swarm that is
    still small, has less for each."""
    if member.parents.count(FROM_ORIGIN) > 1 or member.load > member.slots:
        return False
    return any(
        _heard_since(root, member.lags[stripe]) and member.rates[stripe] < SLOW_SHARE * root.rates[each]
        for each, root in _other_roots(swarm, member)
    )


def _other_roots(swarm: Swarm, member: Member) -> list[tuple[int, Member]]:
    """The stripes and hosts that read them from the origin and feed others, without this host."""
    return [
        (stripe, swarm.members[name])
        for stripe, roots in enumerate(swarm.edges.roots)
        for name in roots
        if name != member.host and swarm.members[name].children[stripe]
    ]


def _holds_up(swarm: Swarm, parent: Member, stripe: int) -> bool:
    """Whether the children of a host lag in a stripe because of its uplink: all of them do, and not
    for a reason of their own. A child that lags elsewhere too may have two slow parents, and says
    nothing against the other children; an only child must be seen to keep up elsewhere."""
    children = [
        child
        for name in parent.children[stripe]
        if not (child := swarm.members[name]).slow_receiver and not imports(swarm, child, stripe)
    ]
    if not children or any(child.lags[stripe] is None for child in children):
        return False
    return any(_keeps_up_elsewhere(swarm, child, stripe, sure=len(children) == 1) for child in children)


def _keeps_up_elsewhere(swarm: Swarm, child: Member, stripe: int, *, sure: bool) -> bool:
    """Whether a child lags in no other stripe that it still lacks, or not in every one. `sure`:
    only a stripe that comes well counts, and from another parent, since a slow uplink would be slow
    for both."""
    others = [number for number in _unfinished(swarm, child) if number != stripe]
    if sure and others:
        parent = child.parents[stripe]
        return any(
            child.lags[number] is None and child.parents[number] != parent and not _starves(swarm, child, number)
            for number in others
        )
    return not others or any(child.lags[number] is None for number in others)


def _holds_itself_up(swarm: Swarm, member: Member, late: list[int]) -> bool:
    """Whether the host lags because of its own downlink: it does in every stripe that its parents
    have for it, and other children of these do not, or there are two such parents and no other
    children."""
    if not all(other in late or _starves(swarm, member, other) for other in _unfinished(swarm, member)):
        return False
    sisters = [(stripe, swarm.members[name]) for stripe in late for name in _sisters(swarm, member, stripe)]
    if sisters:
        return any(other.lags[stripe] is None and _heard_since(other, member.lags[stripe]) for stripe, other in sisters)
    return len({parent for stripe in late if (parent := member.parents[stripe])}) > 1


def _heard_since(sister: Member, lag: Lag | None) -> bool:
    """Whether a host has reported since another began to lag: before, it may just not have lagged
    yet."""
    return lag is not None and sister.heard_at > lag.since


def slow_edges(swarm: Swarm, member: Member, *, now: float) -> list[int]:
    """Stripes of which the host has got so little for so long that its parent should be another,
    when no host was found at fault. Where there is no host to compare with, another parent shows
    which is slow, and the sooner the better."""
    return [
        stripe
        for stripe, lag in enumerate(member.lags)
        if lag is not None
        and member.parents[stripe]
        and _lagged_s(member, lag, now) >= _edge_patience_s(swarm, member, stripe)
        and _rate(member, stripe, now) < EDGE_SHARE * _usual_rate(swarm, member, stripe)
    ]


def slow_alone(swarm: Swarm, member: Member, *, now: float) -> list[int]:
    """Stripes that a host imports over a WAN at far less than the WAN gave while other stripes came
    with them, which are whole now: the stream had a small share of it, and takes many round trips
    to fill what became free, where a new one takes few."""
    if SITE_END not in member.zone:  # as most, and this is asked after every report
        return []
    whole = [stripe for stripe, total in enumerate(swarm.totals) if member.counts[stripe] == total]
    late = [stripe for stripe in _unfinished(swarm, member) if imports(swarm, member, stripe)]
    if not whole or not late or member.had or yields(member):
        return []
    ended_at, patience_s = max(member.moved_at[stripe] for stripe in whole), max(ALONE_S, _turns_s(swarm))
    rate = sum(member.counts) / max(now - member.joined_at, IMPORT_S / 2) / (swarm.stripes - len(whole))
    return [
        stripe
        for stripe in late
        if now - ended_at >= patience_s
        and now - member.attached_at[stripe] >= IMPORT_S
        and member.rates[stripe] < GOOD_SHARE * rate
        and swarm.totals[stripe] - member.counts[stripe] > ALONE_LEFT_S * rate
    ]


def _lagged_s(member: Member, lag: Lag, now: float) -> float:
    """How long a host has lagged, for its parents: while it yielded, time counts for less."""
    return now - lag.since - max(0.0, member.yielded_at - lag.since) * (1 - 1 / YIELDS_TIMES)


def _edge_patience_s(swarm: Swarm, member: Member, stripe: int) -> float:
    """How long a host must lag in a stripe before another parent is tried."""
    if imports(swarm, member, stripe):
        return IMPORT_S
    return max(EDGE_S if _sisters(swarm, member, stripe) else LAG_S, _turns_s(swarm))


def _turns_s(swarm: Swarm) -> float:
    """For how long a host must lag at least for it to show; 0 where pieces are not large."""
    return LAG_TURNS / swarm.typical_rate if swarm.large and swarm.typical_rate else 0.0


def keeps_up(swarm: Swarm, member: Member) -> bool:
    """Whether a host gets about what others get in every stripe that it still lacks."""
    unfinished = _unfinished(swarm, member)
    return bool(unfinished) and all(member.rates[stripe] > GOOD_SHARE * swarm.typical_rate for stripe in unfinished)


def gets_fair_share(swarm: Swarm, member: Member) -> bool:
    """Whether so much comes to a host, in all stripes that it still lacks together, that its
    downlink cannot be slow."""
    unfinished = _unfinished(swarm, member)
    return sum(member.rates[stripe] for stripe in unfinished) > SLOW_SHARE * swarm.typical_rate * max(
        1, len(unfinished)
    )


def _served(swarm: Swarm, parent: Member) -> float:
    """The share of a typical uplink that a host's children get of it."""
    rates = [swarm.members[each].rates[stripe] for stripe, names in enumerate(parent.children) for each in names]
    return sum(rates) / max(swarm.typical_rate * swarm.stripes, 1e-9)


def _starves(swarm: Swarm, member: Member, stripe: int) -> bool:
    """Whether a host gets little of a stripe because its parent has no more: that says nothing of
    the host."""
    return member.lags[stripe] is None and member.rates[stripe] < SLOW_SHARE * swarm.typical_rate


def _rate(member: Member, stripe: int, now: float) -> float:
    """Pieces a second since the host began to lag, or between its last two reports."""
    lag = member.lags[stripe]
    return member.rates[stripe] if lag is None else (member.counts[stripe] - lag.count) / max(now - lag.since, 1e-3)


def _patience_s(swarm: Swarm, member: Member, stripe: int, now: float) -> float:
    """How long a host must lag before a host is judged. Not long when pieces trickle in at a rate
    that only a slow link explains: a process that gets no processor time gives nothing. Nor where
    nothing else is in doubt but the downlink of a host that lost its children some time ago."""
    trickles = 0 < _rate(member, stripe, now) < TRICKLE_SHARE * _usual_rate(swarm, member, stripe)
    # A new parent's first piece comes after the one that is under way from the old, which may have
    # been slow. While a host yields, few pieces say nothing of a link.
    trickles = trickles and now - max(member.attached_at[stripe], member.yielded_at) >= LAG_S
    if trickles and _waiting(swarm, member, stripe) >= PLAIN_PIECES:
        return max(PLAIN_S, _turns_s(swarm))
    return max(LAG_S / 2 if trickles or not member.slots else LAG_S, _turns_s(swarm))


def _usual_rate(swarm: Swarm, member: Member, stripe: int) -> float:
    """The rate to compare a host with: the typical one, for a root that of the roots of other
    stripes, and for a host that imports a stripe into its site that of other stripes' imports.
    Should the origin or the WAN be slow, they all are, and no host is at fault."""
    if imports(swarm, member, stripe):
        return max((other.rates[each] for each, other in _other_imports(swarm, member, stripe)), default=0.0)
    if member.parents[stripe] != FROM_ORIGIN:
        return swarm.typical_rate
    return max((root.rates[each] for each, root in _other_roots(swarm, member)), default=0.0)


def _other_imports(swarm: Swarm, member: Member, stripe: int) -> list[tuple[int, Member]]:
    """The other stripes that come to a host over the WAN, and the hosts above it at its site that
    import them."""
    found = []
    for other in range(swarm.stripes):
        above: Member | None = member if other != stripe else None
        while above is not None and not imports(swarm, above, other):
            parent = above.parents[other]
            above = swarm.members[parent] if parent else None
        if above is not None:
            found.append((other, above))
    return found


def _waiting(swarm: Swarm, member: Member, stripe: int) -> int:
    """Pieces of a stripe that wait for a host at its parent; for a root, those by which another
    root is ahead; for an import, no more than those by which another import is."""
    parent, imported = member.parents[stripe], imports(swarm, member, stripe)
    if parent:
        waiting = swarm.members[parent].counts[stripe] - member.counts[stripe]
        ahead = (other.counts[each] for each, other in _other_imports(swarm, member, stripe)) if imported else ()
        return min(waiting, max(ahead, default=0) - member.counts[stripe]) if imported else waiting
    return max((root.counts[each] for each, root in _other_roots(swarm, member)), default=0) - member.counts[stripe]


def _sisters(swarm: Swarm, member: Member, stripe: int) -> list[str]:
    """The other children of the host's parent in a stripe at the parent's site, without slow
    receivers."""
    parent = member.parents[stripe]
    children = swarm.members[parent].children[stripe] if parent else ()
    others = ((name, swarm.members[name]) for name in children if name != member.host)
    return [name for name, other in others if not other.slow_receiver and not imports(swarm, other, stripe)]


def _unfinished(swarm: Swarm, member: Member) -> list[int]:
    return [stripe for stripe, total in enumerate(swarm.totals) if member.counts[stripe] < total]
