"""A Btrfs of its own for a benchmark, on a loop device, and what is spent on it."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from bench.packers import call
from p2pdist.store.disk import sync_filesystem

SECTOR = 512
"""Bytes that the kernel counts in (Documentation/block/stat.rst)."""

KERNEL_THREADS = 2
"""The parent of all threads of the kernel."""

IMAGE_BYTES = 256 << 30
"""Of the sparse image: more than any tree takes, and above the 50 GB from which on Btrfs allots
metadata as on large disks."""

LOOK_S = 0.25
"""So often the threads of the kernel are looked at: what one took that ends between two looks is
lost."""


Lies = Literal["memory", "file"]


@contextlib.contextmanager
def device_image(place: Path, lies: Lies) -> Iterator[Path]:
    """What stands for the disk: a sparse file without a name, in memory or below `place`, and the
    path by which other programs reach it as long as this process holds it (proc_pid_fd(5)). It goes
    with the process that holds it, however that ends.

    What one filesystem wrote stays allotted for the next, as the sectors of a disk do, so the first
    run over an image pays for its pages or for the extents below it, and later ones do not: that
    one should not count."""
    with _memory_file() if lies == "memory" else tempfile.TemporaryFile(dir=place) as file:
        file.truncate(IMAGE_BYTES)
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def _memory_file() -> IO[bytes]:
    # mkfs.btrfs takes a device for a mounted one when a mounted one's image has the same name.
    return os.fdopen(os.memfd_create(f"btrfs-image-{secrets.token_hex(4)}"), "r+b")


class Btrfs:
    """A new Btrfs on an image, mounted on `place`, a directory that is made. At the end the mount,
    its loop device and the directory are gone, also when it failed. The mount takes the loop device
    with it, so unmounting it cleans up."""

    def __init__(self, place: Path, image: Path, compress: str) -> None:
        self.directory = place
        self._image, self._compress = image, compress
        self.device = ""

    def __enter__(self) -> Btrfs:
        self.directory.mkdir(parents=True)
        try:
            self._mount()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _mount(self) -> None:
        self.device = call("losetup", "--find", "--show", str(self._image)).strip()
        # Nothing is discarded: a disk does not have to find room for a sector that was written
        # before.
        options = ["noatime", "nodiscard", *([] if self._compress == "none" else [f"compress={self._compress}"])]
        try:
            call("mkfs.btrfs", "--quiet", "--force", "--nodiscard", self.device)
            call("mount", "-t", "btrfs", "-o", ",".join(options), self.device, str(self.directory))
        finally:
            call("losetup", "--detach", self.device)  # a mounted one goes when it is unmounted

    def __exit__(self, *_: object) -> None:
        if self.directory.is_mount():
            call("umount", str(self.directory))
        self.directory.rmdir()

    def used_bytes(self) -> int:
        found = os.statvfs(self.directory)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def written_bytes(self) -> int:
        """That the device was given."""
        return int(Path("/sys/block", Path(self.device).name, "stat").read_text().split()[6]) * SECTOR


@dataclass(frozen=True)
class Spent:
    """Seconds on the clock and of the processors, bytes that the device was given, and that are
    used more than before."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    written_bytes: int = 0
    used_bytes: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.seconds + other.seconds,
            self.cpu_s + other.cpu_s,
            self.written_bytes + other.written_bytes,
            self.used_bytes + other.used_bytes,
        )


class Meter:
    """Adds up what is spent within `running()`, each time until the filesystem is synchronised."""

    def __init__(self, disk: Btrfs) -> None:
        self._disk = disk
        self.spent = Spent()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        sync_filesystem(self._disk.directory)
        written, used = self._disk.written_bytes(), self._disk.used_bytes()
        with KernelClock() as kernel:
            cpu, started = time.process_time(), time.monotonic()
            yield
            sync_filesystem(self._disk.directory)
            seconds, cpu = time.monotonic() - started, time.process_time() - cpu
        self.spent += Spent(
            seconds,
            max(0.0, cpu - kernel.own_s) + kernel.seconds,
            self._disk.written_bytes() - written,
            self._disk.used_bytes() - used,
        )


class KernelClock:
    """Processor time of all threads of the kernel within a `with` block; `own_s` is what the
    looking took of this process."""

    def __init__(self) -> None:
        self.seconds = self.own_s = 0.0
        self._seen: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_again, name="kernel-clock", daemon=True)

    def __enter__(self) -> KernelClock:
        self._seen = _kernel_threads_ns()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _look_again(self) -> None:
        while not self._ended.wait(LOOK_S):
            before = time.thread_time()
            self._look()
            self.own_s += time.thread_time() - before

    def _look(self) -> None:
        found = _kernel_threads_ns()
        self.seconds += sum(max(0, spent - self._seen.get(thread, 0)) for thread, spent in found.items()) / 1e9
        self._seen = found


def _kernel_threads_ns() -> dict[str, int]:
    """Nanoseconds that each took of the processors (Documentation/scheduler/sched-stats.rst)."""
    found = {}
    for thread in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(Path("/proc", thread, "stat").read_text().rpartition(")")[2].split()[1]) == KERNEL_THREADS:
                found[thread] = int(Path("/proc", thread, "schedstat").read_text().split()[0])
    return found
