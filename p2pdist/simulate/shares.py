"""Faults that strike a share of the hosts, chosen by the seed."""

from __future__ import annotations

from random import Random

from p2pdist.simulate.faults import Crash, Partition, Slow
from p2pdist.simulate.network import Cut
from p2pdist.simulate.scenario import Scenario


def slow_share(scenario: Scenario, share: float, factor: float, *, both: bool = False) -> tuple[Slow, ...]:
    """That share of the hosts has an uplink (with `both` also a downlink) of `factor` times its
    rate, from the start on."""
    return tuple(Slow(name, 0.0, factor, both) for name in _some(scenario, share, Random(f"slow {scenario.seed}")))


def crash_share(scenario: Scenario, share: float) -> tuple[Crash, ...]:
    """That share of the hosts dies for good, each somewhere between its start and the bound: every
    other one with its process, whose peers are told so by the kernel, the rest with their power,
    which nobody is told."""
    scenario = scenario.filled()
    random = Random(f"crash {scenario.seed}")
    parties = scenario.parties()
    end_s = scenario.bound_s(parties)
    starts = dict(zip(scenario.host_names(), (party.starts_at for party in parties), strict=True))
    return tuple(
        Crash(name, random.uniform(starts[name], max(end_s, starts[name])), None, bool(number % 2))
        for number, name in enumerate(_some(scenario, share, random))
    )


def cut_half(scenario: Scenario, at: float, for_s: float | None) -> Partition:
    """Half of the hosts are cut off from the others and from the tracker for a while, or for
    good."""
    group = _some(scenario, 0.5, Random(f"half {scenario.seed}"))
    return Partition(Cut(frozenset(group), peers=True, tracker=True), at, for_s)


def _some(scenario: Scenario, share: float, random: Random) -> list[str]:
    """At least one host when the share is not nothing."""
    count = min(scenario.hosts, max(1, round(share * scenario.hosts))) if share else 0
    return random.sample(scenario.host_names(), count)
