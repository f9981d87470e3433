"""The figures of the demo's second act: measured values, claims over them, and their output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from p2pdist.cli.verbs.demo.figures import Claim, megabytes, show_claims

HUB_RATIO_MAX = 1.05


@dataclass(frozen=True, slots=True)
class Load:
    """One host: when its snapshot_download began and ended, in seconds of one clock, how long
    loading took and by what, what its agent's metric says arrived meanwhile, in bytes, and the
    BLAKE3 of all tensors."""

    host: str
    began: float
    there: float
    load_s: float
    loader: str
    tensors: int
    digest: str
    bytes_hub: int
    bytes_peers: int


@dataclass(slots=True)
class ModelFigures:
    """Everything measured in the second act. `sent`, `heads`: bytes and HEADs by file, as the hub
    counts them."""

    agents: int
    files: int
    model_bytes: int
    tensors: int
    digest: str
    made_s: float = 0.0
    loads: list[Load] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    untidy: list[str] = field(default_factory=list)

    @property
    def makespan_s(self) -> float:
        """From the first call to the end of the last one."""
        return max(load.there for load in self.loads) - min(load.began for load in self.loads) if self.loads else 0.0

    @property
    def copies(self) -> float:
        """What the hub sent, over the model."""
        return sum(self.sent.values()) / max(1, self.model_bytes)


def model_claims(figures: ModelFigures) -> list[Claim]:
    """Every promise, held or not."""
    all_agents = f"{figures.agents} of {figures.agents}"
    equal = sum(load.digest == figures.digest and load.tensors == figures.tensors for load in figures.loads)
    most = max(figures.heads.values(), default=0)
    tidy = "nothing" if not figures.untidy else "; ".join(figures.untidy)
    return [
        Claim(
            "every host has the model's tensors in memory",
            equal == figures.agents,
            f"{equal} of {figures.agents}",
            all_agents,
        ),
        Claim(
            "bytes that the hub sent / bytes of the model",
            0 < figures.copies <= HUB_RATIO_MAX,
            f"{figures.copies:.3f}",
            f"<= {HUB_RATIO_MAX}",
        ),
        Claim("HEADs of a file that the hub saw, for all hosts", most == 1, str(most), "1"),
        Claim("left behind: processes, mounts, files", not figures.untidy, tidy, "nothing"),
    ]


def model_document(figures: ModelFigures, judged: Sequence[Claim]) -> dict[str, Any]:
    """The document that --json prints."""
    measured = {**asdict(figures), "makespan_s": figures.makespan_s, "hub_ratio": figures.copies}
    return {"ok": all(claim.held for claim in judged), **measured, "claims": [asdict(claim) for claim in judged]}


def show_model(console: Console, figures: ModelFigures, judged: Sequence[Claim]) -> None:
    """Print the table, the figures and the claims."""
    table = Table(title="A model by snapshot_download", title_justify="left")
    for name in ("agent", "download s", "from hub", "from peers", "load s", "tensors"):
        table.add_column(name, justify="left" if name == "agent" else "right")
    for load in figures.loads:
        table.add_row(
            load.host,
            f"{load.there - load.began:.2f}",
            megabytes(load.bytes_hub),
            megabytes(load.bytes_peers),
            f"{load.load_s:.2f}",
            str(load.tensors),
        )
    console.print(table)
    grid = Table.grid(padding=(0, 2))
    size, loaders = megabytes(figures.model_bytes), sorted({load.loader for load in figures.loads})
    grid.add_row("model", f"{figures.files} files, {size}, {figures.tensors} tensors, made in {figures.made_s:.1f} s")
    grid.add_row("all hosts", f"had it after {figures.makespan_s:.2f} s; tensors by {', '.join(loaders)}")
    grid.add_row("hub", f"sent {megabytes(sum(figures.sent.values()))} ({figures.copies:.3f} x the model)")
    console.print(grid)
    show_claims(console, judged)
