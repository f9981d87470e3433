"""Traces: which files below a directory, and which Python modules among them, a run really used.

A trace is JSON: {"version": 1, "root", "files", "modules"}. Files are relative to the root:
whatever was opened, executed, asked for its status or listed, and the symbolic links on the way; a
directory stands for itself, not for what is in it. Names that are not UTF-8 carry their bytes as
lone surrogates. Packing only what was used takes these, the directories above them, and the
METADATA of every distribution of which something was used.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from p2pdist.files import read_content
from p2pdist.model.errors import UNDECODABLE, Corrupt, NotFound, TooLarge, UsageError
from p2pdist.package.source.scan import with_parents
from p2pdist.package.source.split import SITE_NAMES, distributions
from p2pdist.package.source.strace import Used

VERSION = 1
TRACE_BYTES_MAX = 1 << 30
LINKS_MAX = 40

_MODULE = re.compile(
    rb"(?:(?P<cached>__pycache__/[^/]+?)\.[^/.]+(?:\.opt-\d)?\.pyc|(?P<plain>[^/]+?)(?:\.pyc?|\.(?:cpython|abi|pypy)[^/.]*\.so))\Z",
    re.DOTALL,
)
_LIBRARY = re.compile(rb"(?:.*/)?(?:site-packages|dist-packages|lib-dynload|lib/python\d[\d.]*)/", re.DOTALL)


class Trace(msgspec.Struct, frozen=True):
    """What a run used. `root` is where the files were then."""

    version: int
    root: str
    files: tuple[str, ...]
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a source is to be packed: paths relative to it, directories included. `missing` files
    of the traces are not in it."""

    paths: frozenset[bytes]
    missing: int


def make_trace(root: Path, used: Used) -> Trace:
    """The trace of what was used below `root`, which must still be there."""
    real = os.fsencode(os.path.realpath(root))
    ways = _Ways(real)
    files = {path for absolute in used.paths for path in ways.below(absolute)}
    opened = {path for absolute in used.opened for path in ways.below(absolute)}
    modules = {name for path in opened if (name := _module(real, path))}
    return Trace(VERSION, os.fsdecode(real), _sorted(files), tuple(sorted(modules)))


def merge(traces: Sequence[Trace]) -> Trace:
    """What was used in one run or another; the root is that of the first."""
    files = {file for trace in traces for file in trace.files}
    modules = {module for trace in traces for module in trace.modules}
    return Trace(VERSION, traces[0].root, _sorted(map(os.fsencode, files)), tuple(sorted(modules)))


def encode_trace(trace: Trace) -> bytes:
    """The bytes of a trace file."""
    return json.dumps(msgspec.to_builtins(trace), indent=0).encode() + b"\n"


def read_trace(file: Path) -> Trace:
    """Read and check a trace file; raises NotFound, TooLarge or Corrupt."""
    try:
        data = read_content(file, TRACE_BYTES_MAX).data
    except FileNotFoundError as error:
        raise NotFound(f"there is no trace {file}", remedy="Make one with p2pdist trace") from error
    except OSError as error:
        raise UsageError(
            f"cannot read the trace {file}: {error.strerror}", remedy="Name a file that this user may read"
        ) from error
    if len(data) > TRACE_BYTES_MAX:
        raise TooLarge(f"the trace {file} is over {TRACE_BYTES_MAX} bytes", remedy="Make it again with p2pdist trace")
    try:
        trace = msgspec.convert(json.loads(data), Trace)
    except (ValueError, *UNDECODABLE) as error:
        raise Corrupt(f"{file} is not a trace: {error}", remedy="Make it again with p2pdist trace") from error
    if trace.version != VERSION:
        raise UsageError(f"the trace {file} has version {trace.version}", remedy="Use a newer release")
    if wrong := next((name for name in trace.files if not _is_inside(name)), None):
        raise Corrupt(
            f"the trace {file} names {wrong[:200]!r}, which is no path within its root",
            remedy="Make it again with p2pdist trace",
        )
    return trace


def select(source: Path, trace: Trace) -> Selection:
    """What of `source` was used. Raises UsageError when nothing was."""
    top = os.fsencode(source)
    used = {os.fsencode(name) for name in trace.files}
    paths = {path for path in used if os.path.lexists(os.path.join(top, path))}
    if not paths:
        raise UsageError(
            f"nothing in {source} was used in the trace of {trace.root}",
            remedy="Trace with --root at the directory that is packed, or where its package is mounted",
        )
    return Selection(with_parents(paths | set(_metadata(source, paths))), len(used) - len(paths))


def _metadata(source: Path, used: Collection[bytes]) -> Iterator[bytes]:
    sites = set()
    for path in used:
        parts = path.split(b"/")
        sites |= {b"/".join(parts[: at + 1]) for at, part in enumerate(parts) if part in SITE_NAMES}
    for site in sorted(sites):
        for distribution in distributions(source, site):
            if not (distribution.files or frozenset()).isdisjoint(used):
                yield os.path.join(distribution.info, b"METADATA")


def _is_inside(name: str) -> bool:
    return bool(name) and "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))


def _sorted(paths: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(os.fsdecode(path) for path in sorted(paths))


class _Ways:
    """Follows absolute paths as the kernel does, and says what lies below the root on the way:
    symbolic links and the end."""

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._kinds: dict[bytes, tuple[int, bytes]] = {}

    def below(self, path: bytes) -> Iterator[bytes]:
        """Relative to the root."""
        place, parts, links = b"/", path.split(b"/")[::-1], 0
        while parts:
            part = parts.pop()
            if part in (b"", b"."):
                continue
            if part == b"..":
                place = os.path.dirname(place)
                continue
            here = os.path.join(place, part)
            kind, target = self._look(here)
            if kind == 0:
                return
            if stat.S_ISLNK(kind):
                yield from self._relative(here)
                links += 1
                if links > LINKS_MAX:
                    return
                place = b"/" if target.startswith(b"/") else place
                parts += target.split(b"/")[::-1]
            else:
                place = here
        yield from self._relative(place)

    def _relative(self, path: bytes) -> Iterator[bytes]:
        prefix = self._root.rstrip(b"/") + b"/"
        if path.startswith(prefix):
            yield path[len(prefix) :]

    def _look(self, path: bytes) -> tuple[int, bytes]:
        """The mode of a path, 0 when there is nothing, and where it points."""
        kind = self._kinds.get(path)
        if kind is None:
            try:
                mode = os.lstat(path).st_mode
                kind = mode, os.readlink(path) if stat.S_ISLNK(mode) else b""
            except OSError:
                kind = 0, b""
            self._kinds[path] = kind
        return kind


def _module(root: bytes, path: bytes) -> str:
    """The dotted name of the module in a file, "" when it is none. It begins below the library
    directory that the file is in, else at the topmost directory with an __init__.py."""
    directory, name = os.path.split(path)
    if os.path.basename(directory) == b"__pycache__":
        directory, name = os.path.dirname(directory), b"__pycache__/" + name
    match = _MODULE.match(name)
    if match is None or not os.path.isfile(os.path.join(root, path)):
        return ""
    stem = match["plain"] or match["cached"].removeprefix(b"__pycache__/")
    library = _LIBRARY.match(directory + b"/")
    if library:
        parts = (directory + b"/")[library.end() :].split(b"/")[:-1]
    else:
        parts = []
        while directory and os.path.isfile(os.path.join(root, directory, b"__init__.py")):
            directory, last = os.path.split(directory)
            parts.insert(0, last)
    if stem != b"__init__":
        parts.append(stem)
    words = [os.fsdecode(part) for part in parts]
    return ".".join(words) if words and all(word.isidentifier() for word in words) else ""
