"""The ways to distribute a file that are measured side by side, each as words that start the
yardstick."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from bench.cases import WIRE_EFFICIENCY, Case, Links

HERE = Path(__file__).resolve().parent
OURS = "p2pdist"
LONG_S = 180.0
"""A method that is run once gets a smaller blob when it would take longer than this."""


@dataclass(frozen=True)
class Method:
    """A row of the table. `options` are the yardstick's; `programs` are the ones that must be
    there, `torrent` says that libtorrent must be, too. `once`: from the origin to everyone, so slow
    that it is run once, and with a smaller blob where that is still too long."""

    name: str
    title: str
    options: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    torrent: bool = False
    once: bool = False

    def words(self, yardstick: Path, python: str) -> list[str]:
        """What to run, without the case's options."""
        if self.name == OURS:
            return [str(HERE / "yardstick" / "run.sh"), str(yardstick)]
        return [python, str(yardstick), "--label", self.name, *self.options]

    def missing(self, python: str) -> str:
        """What this machine lacks for the method, or nothing."""
        absent = [program for program in ("ip", "tc", *self.programs) if not shutil.which(program)]
        if (
            self.torrent
            and subprocess.run([python, "-c", "import libtorrent"], capture_output=True, check=False).returncode
        ):
            absent.append(f"libtorrent in {Path(sys.prefix).name}")
        return ", ".join(absent)

    def adapted(self, case: Case) -> Case:
        """The case as this method is given it: with a smaller blob, if it would take longer than
        LONG_S."""
        if not self.once:
            return case
        size_mib = min(case.links.size_mib, max(1, int(case.links.size_mib * LONG_S / one_by_one_s(case.links))))
        return replace(case, links=replace(case.links, size_mib=size_mib))


def one_by_one_s(links: Links) -> float:
    """Seconds that the origin takes to send a copy to every host by itself."""
    return links.hosts * links.size * 8 / (links.origin_mbit * 1e6) / WIRE_EFFICIENCY


_TORRENT = ("--method", "libtorrent", "--piece-kib", "64", "--lt-preset", "tuned")
METHODS = (
    Method(OURS, "p2pdist", programs=("nginx", "curl")),
    Method("libtorrent", "libtorrent, 64 KiB pieces", _TORRENT, torrent=True),
    Method("libtorrent4", "libtorrent, 4 slots", (*_TORRENT, "--lt-set", "unchoke_slots_limit=4"), torrent=True),
    Method("aria2", "aria2", ("--method", "aria2"), ("aria2c",), torrent=True),
    Method("chain", "socat chains (practical ideal)", ("--method", "chain"), ("socat", "tee")),
    Method("http", "plain HTTP from the origin", ("--method", "http"), ("nginx", "curl"), once=True),
)
USUAL = ("p2pdist", "libtorrent", "aria2", "chain", "http")
