"""A directory as a squashfs image, by mksquashfs(1) of squashfs-tools 4.5 or later.

The image depends on names, contents, modes, symbolic links and modification times below the source
alone. Owners become root; extended attributes, hard-link identity and the source directory's own
mode and time are left out, since they differ between copies of one tree. The version of mksquashfs
and its zstd library also shape the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from p2pdist.model.errors import DiskFull, P2PDistError, UsageError
from p2pdist.package.image.memory import address_limit, memory_limit
from p2pdist.package.source.scan import source_directory

LEVEL = 6
"""zstd level: about 7 % smaller than level 3 at half its speed; a package is packed once and moved
thousands of times."""
LEVEL_MAX = 22
MTIME_MAX = (1 << 32) - 1
POLL_S = 0.2
MEMORY_MIN = 16 << 20
"""Bytes; mksquashfs refuses to plan with less."""
MEMORY_DIVISOR = 4
"""The part of memory that mksquashfs plans with by itself, of the whole machine's."""
PROCESSOR_BYTES = 128 << 20
"""Address space for the threads of one processor: two stacks, and what zstd works in."""
_OUTPUT_KEPT_BYTES = 64 << 10

# Becomes the program whose parent's pid, path and arguments it is given, and which is killed
# (PR_SET_PDEATHSIG, SIGKILL) when that parent ends, however it does. prctl(2) is called here and
# not between fork and exec of the parent, where other threads may hold any lock. The signal follows
# the thread that forked: asyncio forks on the thread of the loop, which stays while the program is
# awaited.
_END_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def check_apart(source: Path, output: Path) -> None:
    """Raises UsageError when `output` lies within `source`, where it would be packed into
    itself."""
    inside, outside = output.resolve(), source.resolve()
    if inside == outside or outside in inside.parents:
        raise UsageError(
            f"the output {output} lies within the source {source}", remedy="Name a directory outside with --layout"
        )


async def build_image(
    source: Path,
    output: Path,
    *,
    level: int = LEVEL,
    mtime: int | None = None,
    processors: int | None = None,
    exclude: Collection[bytes] = (),
    modes: Mapping[bytes, int] | None = None,
    world_readable: bool = False,
    size_estimate: int = 0,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write the image of the directory `source` to the new file `output`.

    `mtime` (seconds since 1970) replaces all modification times. Block devices, sockets, FIFOs and
    setuid/setgid bits are left out; character devices are not, since one that is 0/0 is a whiteout.
    `exclude` holds paths below the source that are left out, of a directory with all that is in it.
    `modes` replace the modes of files and directories, by path below the source; `world_readable`
    is chmod a+rX. `size_estimate` is what DiskFull says is needed. `on_bytes` is called with the
    number of source bytes read. Raises UsageError, DiskFull, or P2PDistError with what mksquashfs
    said.
    """
    check_apart(source, output)
    if not 1 <= level <= LEVEL_MAX:
        raise UsageError(f"{level} is not a zstd level", remedy=f"Choose one from 1 to {LEVEL_MAX}")
    if mtime is not None and not 0 <= mtime <= MTIME_MAX:
        raise UsageError(f"{mtime} is not a modification time", remedy=f"Give seconds since 1970, at most {MTIME_MAX}")
    memory = _memory_arguments(memory_limit(), address_limit(), processors)
    program = shutil.which("mksquashfs")
    if program is None:
        raise P2PDistError("mksquashfs is not installed", remedy="Install the Debian package squashfs-tools")
    stated = modes or {}
    if world_readable:  # whichever of the two mksquashfs does first
        where = os.fsencode(source_directory(source))
        stated = {
            path: mode | (0o555 if mode & 0o111 or os.path.isdir(os.path.join(where, path)) else 0o444)
            for path, mode in stated.items()
        }
    try:
        with _exclude_options(output, exclude) as options, _mode_options(output, stated) as more:
            message, code = await _run(
                [program, *_arguments(source, output, level, mtime, world_readable), *memory, *options, *more], on_bytes
            )
        if code != 0:
            raise _failure(source, output, message, code, size_estimate)
    except BaseException:
        output.unlink(missing_ok=True)
        raise


async def _run(command: list[str | bytes], on_bytes: Callable[[int], None] | None) -> tuple[str, int]:
    """The end of what a program says, and its exit code. It ends with this process, and when this
    call is cancelled."""
    # With SOURCE_DATE_EPOCH set mksquashfs refuses -mkfs-time and would flatten times unasked.
    environment = {key: value for key, value in os.environ.items() if key != "SOURCE_DATE_EPOCH"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, str(os.getpid())),
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        # Threads with heaps of their own would reserve 64 MiB of address space each (mallopt(3)).
        env={**environment, "LC_ALL": "C", **({"MALLOC_ARENA_MAX": "1"} if address_limit() else {})},
    )
    watch = asyncio.create_task(_watch_reads(process.pid, on_bytes)) if on_bytes else None
    try:
        return await _tail(process), await process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    finally:
        if watch:
            watch.cancel()


def _arguments(source: Path, output: Path, level: int, mtime: int | None, world_readable: bool) -> list[str]:
    arguments = [
        str(source_directory(source)),
        str(output.absolute()),
        "-comp",
        "zstd",
        "-Xcompression-level",
        str(level),
    ]
    arguments += ["-b", "131072", "-all-root", "-no-xattrs", "-no-hardlinks", "-noappend", "-reproducible"]
    arguments += ["-mkfs-time", "0", "-root-mode", "755", "-root-time", str(mtime or 0)]
    if mtime is not None:
        arguments += ["-all-time", str(mtime)]
    # Actions see types and modes only, so no name has to be quoted.
    arguments += ["-action", "exclude@type(b)||type(s)||type(p)", "-action", "chmod(ug-s)@type(f)||type(d)"]
    if world_readable:
        arguments += ["-action", "chmod(a+rX)@type(f)||type(d)"]
    return [*arguments, "-exit-on-error", "-no-progress", "-quiet"]


def _memory_arguments(memory: int | None, address_space: int | None, processors: int | None) -> list[str]:
    """By itself mksquashfs plans with a quarter of the machine's memory, whatever this process may
    have of it."""
    arguments = []
    if address_space is not None:
        processors = processors or max(1, min(os.cpu_count() or 1, address_space // PROCESSOR_BYTES))
    limits = [limit for limit in (memory, address_space) if limit is not None]
    if limits:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        planned = max(MEMORY_MIN, min(machine, *limits) // MEMORY_DIVISOR)
        arguments += ["-mem", f"{planned >> 20}M"]
    if processors is not None:
        arguments += ["-processors", str(processors)]
    return arguments


@contextlib.contextmanager
def _exclude_options(output: Path, exclude: Collection[bytes]) -> Iterator[list[str]]:
    """Options that leave out paths, in a file beside the output that lasts as long as the
    block."""
    if not exclude:
        yield []
        return
    file = output.with_name(output.name + ".exclude")
    try:
        file.write_bytes(b"".join(_pattern(path) + b"\n" for path in exclude))
        yield ["-wildcards", "-ef", str(file.absolute())]
    finally:
        file.unlink(missing_ok=True)


def _pattern(path: bytes) -> bytes:
    """A pattern of mksquashfs that fits this path alone. A line cannot hold a newline, but a set of
    all other bytes can be negated. Without patterns it would leave out all names of a file of which
    one is named."""
    escaped = (
        _NEWLINE if char == 10 else bytes((char,)) if chr(char).isalnum() or char in _PLAIN else b"\\%c" % char
        for char in path
    )
    return b"".join(escaped)


@contextlib.contextmanager
def _mode_options(output: Path, modes: Mapping[bytes, int]) -> Iterator[list[str | bytes]]:
    """Options that change modes (pseudo definitions "m"), in a file beside the output
    that lasts as long as the block. A name with a newline, which no line can hold, becomes an
    option of its own."""
    if not modes:
        yield []
        return
    lines = {path: _escaped(path) + b" m %o 0 0" % mode for path, mode in sorted(modes.items())}
    file = output.with_name(output.name + ".modes")
    try:
        file.write_bytes(b"".join(line + b"\n" for path, line in lines.items() if b"\n" not in path))
        others = [line for path, line in lines.items() if b"\n" in path]
        yield ["-pf", str(file.absolute()), *(word for line in others for word in (b"-p", line))]
    finally:
        file.unlink(missing_ok=True)


def _escaped(path: bytes) -> bytes:
    """A name as mksquashfs reads it in a pseudo definition."""
    return b"".join(b"\\%c" % char if char in _SPECIAL else bytes((char,)) for char in path)


_SPECIAL = frozenset(b' \t\n\v\f\r"\\#')
_NEWLINE = b"[!\x01-\x09\x0b-\xff]"
_PLAIN = frozenset([*b"/._-", *range(128, 256)])


async def _watch_reads(pid: int, on_bytes: Callable[[int], None]) -> None:
    """Report what process `pid` has read (proc(5), /proc/[pid]/io), until cancelled or the process
    is gone."""
    seen = 0
    while True:
        await asyncio.sleep(POLL_S)
        try:
            first = Path(f"/proc/{pid}/io").read_text().split("\n", 1)[0]
        except OSError:
            return
        now = int(first.partition(":")[2])
        on_bytes(now - seen)
        seen = now


async def _tail(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    kept = b""
    while chunk := await process.stdout.read(_OUTPUT_KEPT_BYTES):
        kept = (kept + chunk)[-_OUTPUT_KEPT_BYTES:]
    return kept.decode("utf-8", "backslashreplace")


def _failure(source: Path, output: Path, message: str, code: int, size_estimate: int) -> P2PDistError:
    if code < 0 or "Out of memory" in message or "Cannot allocate memory" in message:
        return _without_memory(source, code)
    if "No space left" in message or "Disk quota" in message:
        code = errno.EDQUOT if "Disk quota" in message else errno.ENOSPC
        return DiskFull.on(str(output.parent), os.statvfs(output.parent), needed=size_estimate, code=code, kept=False)
    if "invalid option" in message:
        return P2PDistError("the installed mksquashfs is too old", remedy="Install squashfs-tools 4.5 or later")
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    telling = [line for line in lines if "exit" not in line.lower()] or lines or [f"it ended with exit code {code}"]
    return P2PDistError(
        f"mksquashfs cannot pack {source}: {telling[0][:500]}", remedy="Correct that, or pack with --format tree"
    )


def _without_memory(source: Path, code: int) -> P2PDistError:
    """The failure of mksquashfs that a signal (a negative exit code) or want of memory ended."""
    if code >= 0 or -code == signal.SIGKILL:
        what = (
            "it ran out of memory"
            if code >= 0
            else "signal 9 (SIGKILL) ended it, as the kernel does when memory runs out"
        )
        return P2PDistError(
            f"mksquashfs cannot pack {source}: {what}",
            remedy="Give the job more memory (cgroup, ulimit -v), or pack with --format tree",
        )
    return P2PDistError(
        f"mksquashfs cannot pack {source}: signal {-code} ({signal.strsignal(-code)}) ended it",
        remedy="Pack again, or with --format tree",
    )
