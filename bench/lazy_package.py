"""The package of the lazy benchmarks: installed wheels, filled up with generated files to a number
of files and bytes, packed and at a directory that is its origin.

    python -m bench.lazy_package DIR --source SITE_PACKAGES --files 100000 --size-mib 5120

Making it takes long, measuring it is repeated, so it stays below DIR: `source` with the files,
`origin` with the package `app:v1`, and `package.json`, written last, with what it is. The program
imports the modules that its first argument names, and prints `ready`; then it waits until its
standard input ends, so that its view stays until everything has come.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import trees

MIB = 1 << 20
P2PDIST = (sys.executable, "-m", "p2pdist.cli.main")
NAME = "app:v1"
PROGRAM = (
    "import importlib, os, sys; sys.path.insert(0, os.environ['P2PDIST_ROOT']); "
    "[importlib.import_module(name) for name in sys.argv[1].split(',')]; "
    "print('ready', flush=True); sys.stdin.read()"
)
MADE = "package.json"
FILLER = "generated"


@dataclass(frozen=True, slots=True)
class Made:
    """A package that was made: files and bytes of its source, and bytes as they are stored."""

    directory: Path
    files: int
    bytes_source: int
    bytes_stored: int

    @property
    def source(self) -> Path:
        """The files as they were packed."""
        return self.directory / "source"

    @property
    def origin(self) -> str:
        """The URL of the storage that has the package."""
        return f"file://{self.directory / 'origin'}"

    def name(self, alias: str) -> str:
        """Another name of the package at its origin."""
        words = [*P2PDIST, "tag", NAME, f"{alias}:v1", "--origin", self.origin]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return f"{alias}:v1"


def prepared(directory: Path, source: Path, *, files: int = 0, size: int = 0, order: Path | None = None) -> Made:
    """The package in `directory`, made of `source` where none is there: copied, with generated
    files until it has so many files and bytes, packed, in the order of a trace where there is one,
    and pushed. Raises CalledProcessError, OSError."""
    try:
        return Made(directory, **json.loads((directory / MADE).read_text()))
    except FileNotFoundError:
        pass
    directory.mkdir(parents=True, exist_ok=True)
    for left in ("source", "origin", "layout"):  # of an attempt that was interrupted
        shutil.rmtree(directory / left, ignore_errors=True)
    subprocess.run(["cp", "-a", str(source), str(directory / "source")], check=True)
    count, there = trees.files_and_bytes(directory / "source")
    if count < files or there < size:
        missing = max(files - count, 1)
        trees.generated(directory / "source" / FILLER, files=missing, size=max(size - there, missing))
        count, there = trees.files_and_bytes(directory / "source")
    layout, origin = ("--layout", str(directory / "layout")), ("--origin", f"file://{directory / 'origin'}")
    entrypoint = json.dumps([os.path.realpath(sys.executable), "-I", "-S", "-c", PROGRAM])
    words = ("pack", str(directory / "source"), "-t", NAME, "--format", "tree", "--entrypoint", entrypoint)
    words += ("--order", str(order)) if order is not None else ()
    subprocess.run([*P2PDIST, *words, *layout], check=True, stdout=sys.stderr)
    subprocess.run([*P2PDIST, "push", NAME, *layout, *origin], check=True, stdout=sys.stderr)
    shutil.rmtree(directory / "layout")
    words = ("inspect", NAME, *origin, "--json")
    shown = json.loads(subprocess.run([*P2PDIST, *words], check=True, capture_output=True).stdout)
    blobs = [*shown["layers"], *shown["parts"]]
    made = Made(directory, count, there, sum(blob["size"] for blob in blobs))
    told = {name: value for name, value in asdict(made).items() if name != "directory"}
    partial = directory / f"{MADE}.partial"
    partial.write_text(json.dumps(told))
    partial.rename(directory / MADE)
    return made


def add_options(parser: argparse.ArgumentParser) -> None:
    """--source, --files and --size-mib: what a package is made of."""
    parser.add_argument(
        "--source", type=Path, default=Path(sysconfig.get_path("purelib")), help="installed wheels [this project's]"
    )
    parser.add_argument("--files", type=int, default=0, help="fill it up to so many [%(default)s]")
    parser.add_argument("--size-mib", type=int, default=0, help="fill it up to so much [%(default)s]")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.lazy_package",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    add_options(parser)
    parser.add_argument("--order", type=Path, metavar="TRACE", help="pack it by this trace (bench.lazy --trace)")
    chosen = parser.parse_args()
    made = prepared(
        chosen.directory.absolute(), chosen.source, files=chosen.files, size=chosen.size_mib * MIB, order=chosen.order
    )
    print(json.dumps(asdict(made) | {"directory": os.fspath(made.directory)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
