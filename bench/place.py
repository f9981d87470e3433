"""Where a benchmark keeps files by the million: is there room before it begins, and nothing left
after it ends.

Removing two million files takes minutes, and what is mounted below must not be walked. So removal
unmounts first, has rm(1) remove several directories at once, and ends after a time that is known;
what is left then is named.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from p2pdist.mount.kernel import mounted, unmount

REMOVED_WITHIN_S = 300.0
REMOVERS = 4
SPARE_BYTES = 2 << 30


class NoRoom(Exception):
    """The disk, or the memory, has less room than a benchmark takes."""


def available_memory() -> int:
    """Bytes that could be taken without swapping (proc(5), meminfo)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


@contextlib.contextmanager
def place(prefix: str, *, needed: int) -> Iterator[Path]:
    """A new directory below TMPDIR, removed afterwards, also when this process is told to end by
    SIGTERM. Raises NoRoom at once where there are not `needed` bytes and some to spare."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < needed + SPARE_BYTES:
        raise NoRoom(
            f"{needed / 1e9:.0f} GB are needed in {tempfile.gettempdir()} and some to spare, {free / 1e9:.0f} are free"
        )
    made = Path(tempfile.mkdtemp(prefix=prefix))
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield made
    finally:
        signal.signal(signal.SIGTERM, before)
        if not remove(made):
            print(f"{made} could not be removed within {REMOVED_WITHIN_S:g} s", file=sys.stderr)


def remove(directory: Path, *, within_s: float = REMOVED_WITHIN_S) -> bool:
    """Remove a directory with all that is in it; False where that was not done in time or
    failed."""
    deadline = time.monotonic() + within_s
    root = directory.resolve()
    for mount in reversed(mounted()):
        if root in mount.point.parents:
            with contextlib.suppress(OSError):  # then rm(1) stays out of it, and it is told that something is left
                unmount(mount.point, lazily=True)
    # Below a store are hundreds of directories; dealt out, they are removed side by side.
    parts = [below for above in directory.iterdir() for below in (above.iterdir() if _is_folder(above) else [above])]
    done = _removed([parts[number::REMOVERS] for number in range(REMOVERS)], deadline)
    return done and _removed([[directory]], deadline)


def _removed(shares: list[list[Path]], deadline: float) -> bool:
    """Remove these paths, each share by a process of its own; False where that was not done in time
    or failed."""
    removers = [_remover(share) for share in shares if share]
    try:
        codes = [remover.wait(max(0.0, deadline - time.monotonic())) for remover in removers]
        return not any(codes)
    except subprocess.TimeoutExpired:
        return False
    finally:
        for remover in removers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(remover.pid, signal.SIGKILL)
            remover.wait()


def _remover(paths: list[Path]) -> subprocess.Popen[bytes]:
    words = ["xargs", "--null", "rm", "-rf", "--one-file-system", "--"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(b"\0".join(map(os.fsencode, paths)))
    return process


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
