"""What is broadcast, over which links, and what goes wrong meanwhile: the same case as options of
the yardstick and as a Scenario.

Rates are on the wire: a frame of 1,514 bytes carries 1,448 of payload, so a simulated link, which
knows no headers, has 1448/1514 of the rate, and the bound of a case is in these payload bytes. A
ratio to it of 1.00 is what the links allow, headers counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from p2pdist.simulate.faults import Crash, Fault, Late, Slow
from p2pdist.simulate.scenario import Scenario

WIRE_EFFICIENCY = 1448 / 1514
RACK_HOSTS = 8
RACK_NICS = 2.0
"""A rack's uplink over one host's."""

SLOW_FACTOR = 0.1
KILLED_AT = 0.5
RESTARTED_AT = 0.5
SPREAD = 0.5
"""Over which part of the bound the hosts' joins are spread."""


@dataclass(frozen=True)
class Links:
    """The network: hosts with equal links of `rate_mbit` each way, an origin of `origin_mbit`, and
    the size of the blob."""

    hosts: int = 24
    size_mib: int = 64
    rate_mbit: float = 40.0
    origin_mbit: float = 80.0

    @property
    def size(self) -> int:
        """Bytes of the blob."""
        return self.size_mib << 20

    def __str__(self) -> str:
        return f"{self.hosts} hosts, {self.size_mib} MiB, {self.rate_mbit:g} Mbit/s, origin {self.origin_mbit:g} Mbit/s"


def payload_bytes_s(rate_mbit: float) -> float:
    """Payload bytes per second that a link of so many Mbit/s on the wire carries."""
    return rate_mbit * 1e6 / 8 * WIRE_EFFICIENCY


@dataclass(frozen=True)
class Case:
    """One way that a broadcast can go. `name` is what it is asked for by, `label` tells its
    variants apart. `slow` and `killed` are numbers of hosts; a killed host is lost for good,
    silently, once the hosts hold half of the blob on average. `spread_s`: host i of N joins at i/N
    of this time. With `restart` the tracker is killed at half and started again a second later.
    With `warm_mib` all hosts first pull another blob of that size, which does not count."""

    name: str
    label: str
    links: Links
    slow: tuple[int, ...] = ()
    killed: tuple[int, ...] = ()
    racks: int = 0
    spread_s: float = 0.0
    restart: bool = False
    warm_mib: int = 0

    @property
    def rack_mbit(self) -> float:
        return RACK_NICS * self.links.rate_mbit if self.racks else 0.0

    def options(self) -> list[str]:
        """The case as options of the yardstick."""
        links = self.links
        words = ["--hosts", str(links.hosts), "--size-mib", str(links.size_mib)]
        words += ["--rate-mbit", f"{links.rate_mbit:g}", "--origin-mbit", f"{links.origin_mbit:g}"]
        if self.slow:
            words += ["--slow-host", *map(str, self.slow), "--slow-factor", f"{SLOW_FACTOR:g}"]
        if self.killed:
            words += ["--kill-host", *map(str, self.killed), "--kill-at", f"{KILLED_AT:g}", "--kill-mode", "link+proc"]
        if self.racks:
            words += ["--racks", str(self.racks), "--rack-mbit", f"{self.rack_mbit:g}"]
        if self.spread_s:
            words += ["--join-spread", f"{self.spread_s:.3f}"]
        if self.restart:
            words += ["--restart-ctl-at", f"{RESTARTED_AT:g}", "--restart-after", "1"]
        return words

    def scenario(self, seed: int = 1, killed_at_s: float | None = None) -> Scenario:
        """The case for the simulator. Hosts are killed only when it is said when."""
        links = self.links
        names = Scenario(links.hosts, links.size, 1.0).host_names()
        faults: list[Fault] = [Slow(names[host], 0.0, SLOW_FACTOR) for host in self.slow]
        if killed_at_s is not None:
            faults += [Crash(names[host], killed_at_s, None, power=True) for host in self.killed]
        if self.spread_s:
            faults += [Late(name, self.spread_s * host / links.hosts) for host, name in enumerate(names) if host]
        return Scenario(
            links.hosts,
            links.size,
            payload_bytes_s(links.rate_mbit),
            seed=seed,
            origin_bytes_s=payload_bytes_s(links.origin_mbit),
            racks=self.racks,
            rack_bytes_s=payload_bytes_s(self.rack_mbit),
            faults=tuple(faults),
        ).filled()

    @property
    def bound_s(self) -> float:
        """Seconds from the first join that nothing can beat for the hosts that are not lost."""
        scenario = self.scenario()
        names = scenario.host_names()
        return scenario.bound_s(scenario.parties(without={names[host] for host in self.killed}))


NAMES = ("uniform", "slow", "known", "killed", "racks", "spread", "big", "few", "many", "restart")
SIMULATED = ("uniform", "slow", "killed", "racks", "spread")
"""Those that are compared with the simulator."""


def cases(name: str, links: Links) -> list[Case]:
    """The variants of a case of NAMES on these links; ValueError for another name."""
    middle, last = links.hosts // 2, links.hosts - 1
    match name:
        case "uniform" | "restart":
            return [Case(name, name, links, restart=name == "restart")]
        case "slow":
            return [Case(name, f"slow host {host}", links, slow=(host,)) for host in dict.fromkeys((0, middle, last))]
        case "known":
            label = f"slow host {middle}, known"
            return [Case(name, label, links, slow=(middle,), warm_mib=links.size_mib // 2)]
        case "killed":
            return [Case(name, f"killed host {middle}", links, killed=(middle,))]
        case "racks":
            racks = min(links.hosts, max(2, -(-links.hosts // RACK_HOSTS)))
            return [Case(name, f"{racks} racks", links, racks=racks)]
        case "spread":
            spread_s = SPREAD * Case(name, name, links).bound_s
            return [Case(name, f"spread {spread_s:.1f} s", links, spread_s=spread_s)]
        case "big":
            return [Case(name, f"big, {4 * links.size_mib} MiB", replace(links, size_mib=4 * links.size_mib))]
        case "few":
            hosts = max(2, links.hosts // 3)
            return [Case(name, f"few, {hosts} hosts", replace(links, hosts=hosts))]
        case "many":
            hosts = links.hosts * 5 // 3
            return [Case(name, f"many, {hosts} hosts", replace(links, hosts=hosts))]
    raise ValueError(f"there is no case {name!r}")
