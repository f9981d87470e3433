"""The figures of the demo: measured values, claims over them, and their output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any

from rich.console import Console
from rich.table import Table

from p2pdist.cli.verbs.demo.ingredients import Base

ORIGIN_RATIO_MAX = 1.05
ORIGIN_ALLOWANCE = 2 << 20
"""What may leave the origin beyond that: a piece of each layer, for which a host asks the origin as
well when nothing comes to it for a moment. Of a small package that is a large part."""
SECOND_ALLOWANCE = 64 << 10
"""What an agent may receive for a second version beyond its app layer: manifest, config, piece
list."""


@dataclass(frozen=True, slots=True)
class Pull:
    """One agent's pull, as `p2pdist pull --json` tells it; `received` is what the agent's metric
    says arrived meanwhile, in bytes."""

    host: str
    digest: str
    seconds: float
    bytes_origin: int
    bytes_peers: int
    bytes_cached: int
    received: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the program from the merged mount: its own report."""

    host: str
    seconds: float
    version: int
    loss_first: float
    loss_last: float
    program: str
    numpy: str
    shown_as: str = ""

    @property
    def sound(self) -> bool:
        """The loss fell, and program and numpy were started from one merged view."""
        root = PurePath(self.program).parent.parent
        return self.loss_last < self.loss_first and PurePath(self.numpy).is_relative_to(root)


@dataclass(frozen=True, slots=True)
class Round:
    """One version of the package, everywhere. Bytes: the package's layers, its app layer, and what
    the origin's own count says it sent from the first pull's start to the last one's end
    (`makespan_s`)."""

    version: int
    reference: str
    digest: str
    package_bytes: int
    app_bytes: int
    origin_bytes: int
    makespan_s: float
    pulls: tuple[Pull, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that the demo promises: what was measured, and the limit that it keeps."""

    text: str
    held: bool
    measured: str
    limit: str


@dataclass(slots=True)
class Figures:
    """Everything measured in one demo."""

    agents: int
    base: Base
    pack_s: float = 0.0
    push_s: float = 0.0
    mounted_as: str = ""
    rounds: list[Round] = field(default_factory=list)
    untidy: list[str] = field(default_factory=list)


def megabytes(count: float) -> str:
    """Bytes in units of 10^6, or of 10^3 below one of them."""
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _round_claims(one: Round, agents: int) -> list[Claim]:
    complete = [
        pull
        for pull in one.pulls
        if pull.digest == one.digest and pull.bytes_origin + pull.bytes_peers + pull.bytes_cached == one.package_bytes
    ]
    sound = [run for run in one.runs if run.version == one.version and run.sound]
    all_agents = f"{agents} of {agents}"
    return [
        Claim(
            f"version {one.version}: every agent holds the package",
            len(complete) == agents,
            f"{len(complete)} of {agents}",
            all_agents,
        ),
        Claim(
            f"version {one.version}: the program ran from the merged view",
            len(sound) == agents,
            f"{len(sound)} of {agents}",
            all_agents,
        ),
    ]


def claims(figures: Figures) -> list[Claim]:
    """Every promise, held or not. A missing round is a promise not held."""
    checked = [claim for one in figures.rounds for claim in _round_claims(one, figures.agents)]
    if figures.rounds:
        first = figures.rounds[0]
        ratio = first.origin_bytes / first.package_bytes
        most_ratio = ORIGIN_RATIO_MAX + ORIGIN_ALLOWANCE / first.package_bytes
        text = "version 1: origin bytes / package bytes"
        limit_text = f"<= {most_ratio:.3f} ({ORIGIN_RATIO_MAX} and 2 MiB)"
        checked.append(Claim(text, ratio <= most_ratio, f"{ratio:.3f}", limit_text))
    if len(figures.rounds) > 1:
        second = figures.rounds[1]
        limit = second.app_bytes + SECOND_ALLOWANCE
        most = max(max(pull.bytes_origin + pull.bytes_peers, pull.received) for pull in second.pulls)
        checked.append(
            Claim(
                "version 2: bytes received by the agent that received most",
                most <= limit,
                megabytes(most),
                f"<= {megabytes(limit)} (app layer + 64 KiB)",
            )
        )
    else:
        checked.append(Claim("both versions were pulled everywhere", False, f"{len(figures.rounds)} of 2", "2 of 2"))
    tidy = "nothing" if not figures.untidy else "; ".join(figures.untidy)
    checked.append(Claim("left behind: processes, mounts, files", not figures.untidy, tidy, "nothing"))
    return checked


def as_document(figures: Figures, judged: Sequence[Claim]) -> dict[str, Any]:
    """The document that --json prints."""
    base = {**asdict(figures.base), "directory": None}
    return {
        "ok": all(claim.held for claim in judged),
        "agents": figures.agents,
        "base": {key: value for key, value in base.items() if value is not None},
        "pack_s": figures.pack_s,
        "push_s": figures.push_s,
        "mounted_as": figures.mounted_as,
        "rounds": [
            {**asdict(one), "origin_ratio": one.origin_bytes / max(1, one.package_bytes)} for one in figures.rounds
        ],
        "claims": [asdict(claim) for claim in judged],
    }


def _round_table(one: Round) -> Table:
    table = Table(title=f"Version {one.version}: {one.reference}", title_justify="left")
    for name in ("agent", "pull s", "from origin", "from peers", "had", "run s", "loss"):
        table.add_column(name, justify="left" if name == "agent" else "right")
    runs = {run.host: run for run in one.runs}
    for pull in one.pulls:
        run = runs.get(pull.host)
        table.add_row(
            pull.host,
            f"{pull.seconds:.2f}",
            megabytes(pull.bytes_origin),
            megabytes(pull.bytes_peers),
            megabytes(pull.bytes_cached),
            f"{run.seconds:.1f}" if run else "-",
            f"{run.loss_first:.3f} -> {run.loss_last:.3f}" if run else "-",
        )
    return table


def _facts(figures: Figures) -> list[tuple[str, str]]:
    base = figures.base
    facts = [
        (
            "base layer",
            f"{', '.join(base.wheels)}: {base.files} files, {megabytes(base.bytes)}, {base.seconds:.1f} s with pip",
        ),
        ("pack and push", f"{figures.pack_s:.1f} s and {figures.push_s:.1f} s, both versions"),
    ]
    ways = sorted({run.shown_as for one in figures.rounds for run in one.runs if run.shown_as})
    facts += [("programs are shown", way) for way in ways]
    if figures.mounted_as:
        facts.append(("mounts are shown", figures.mounted_as))
    for one in figures.rounds:
        peers = sum(pull.bytes_peers for pull in one.pulls)
        moved = max(max(pull.bytes_origin + pull.bytes_peers, pull.received) for pull in one.pulls)
        facts += [
            (
                f"version {one.version}",
                f"package {megabytes(one.package_bytes)}, app layer {megabytes(one.app_bytes)}, makespan {one.makespan_s:.2f} s",
            ),
            (
                "",
                f"origin sent {megabytes(one.origin_bytes)} ({one.origin_bytes / max(1, one.package_bytes):.3f} x the package), "
                f"peers {megabytes(peers)}, at most {megabytes(moved)} to one agent",
            ),
        ]
    return facts


def show(console: Console, figures: Figures, judged: Sequence[Claim]) -> None:
    """Print the tables, the figures and the claims."""
    for one in figures.rounds:
        console.print(_round_table(one))
    grid = Table.grid(padding=(0, 2))
    for name, value in _facts(figures):
        grid.add_row(name, value)
    console.print(grid)
    show_claims(console, judged)


def show_claims(console: Console, judged: Sequence[Claim]) -> None:
    """Print what was promised, and whether it held."""
    verdicts = Table(title="Claims", title_justify="left")
    for name in ("", "claim", "measured", "limit"):
        verdicts.add_column(name, overflow="fold")
    for claim in judged:
        verdicts.add_row("[green]held[/]" if claim.held else "[red]BROKEN[/]", claim.text, claim.measured, claim.limit)
    console.print(verdicts)
