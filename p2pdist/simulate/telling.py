"""What a simulated host tells the tracker of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pdist.model.messages import Advance, Holding, Report
from p2pdist.simulate.pull import Pull

if TYPE_CHECKING:
    from p2pdist.simulate.host import Host


def holdings(host: Host) -> tuple[Holding, ...]:
    """What a tracker must know of a host."""
    if host.leaving:
        return ()
    return tuple(holding_of(pull) for pull in host.pulls.values() if pull.error is None)


def holding_of(pull: Pull) -> Holding:
    """What it must know of one pull."""
    blob, ways = pull.blob, pull.ways
    pull.reported = pull.counts()
    parents = pull.download.parents() if pull.download is not None else ()
    if ways is not None and parents:
        read = ways.reading
        parents = tuple("" if stripe in read else host for stripe, host in enumerate(parents))
    by_swarm = ways.tell() if ways is not None else False
    layout = blob.layout
    return Holding(blob.digest, layout.size, layout.piece_size, pull.reported, parents, blob.priority, by_swarm)


def report(host: Host) -> Report | None:
    """What is new since the last report, None when nothing is."""
    advances = []
    for pull in host.pulls.values():
        counts = pull.counts() if pull.error is None else pull.reported
        if counts != pull.reported:
            pull.reported = counts
            advances.append(Advance(pull.blob.digest, counts))
    sent_bytes, busy_s = host.uplink.take_sample(host.world.now)
    waiting = any(not pull.settled for pull in host.pulls.values())
    return Report(tuple(advances), sent_bytes, busy_s) if advances or busy_s or waiting else None
