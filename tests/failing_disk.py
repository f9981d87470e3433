"""Disks that lose what was written to them and say so once, when it is synchronised: a path to
storage that is gone for a moment, a thin volume that is full for a while.

A directory is on an ext4 whose image lies on a tmpfs, which has no room left while blocks are
written that the image does not have yet. The kernel reports that at one syncfs(2) or fsync(2),
takes the pages for clean and gives them as they were for as long as it keeps them."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waits import wait_until

from p2pdist.store.disk import boot_id

MIB = 1 << 20
OTHER_BOOT = "00000000-1111-2222-3333-444444444444"


class Disk:
    """A file system at `target` over an image on the tmpfs at `backing`."""

    def __init__(self, backing: Path, target: Path) -> None:
        self._filler, self._image, self._target = backing / "filler", backing / "image", target
        with self._image.open("wb") as file:
            file.truncate(16 * MIB)
        options = ["-O", "^has_journal", "-E", "lazy_itable_init=0,discard"]
        subprocess.run(["mkfs.ext4", "-q", "-F", *options, self._image], check=True)
        self.mount()

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop,errors=continue", self._image, self._target], check=True)

    def unmount(self) -> None:
        subprocess.run(["umount", self._target], check=True)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Blocks that were never written cannot be within a `with` block."""
        os.sync()
        with self._filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(MIB)) == MIB:
                    pass
            except OSError:
                pass
        yield
        self._filler.unlink()

    def zero(self, path: Path) -> None:
        """Write zeros into all of a file, and have none of these blocks in the image: what is
        written there then changes nothing else of the file system."""
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
            file.flush()
            os.fsync(file.fileno())
        os.sync()
        subprocess.run(["fallocate", "--dig-holes", self._image], check=True)

    def lose_machine(self, root: Path) -> None:
        """What the kernel's memory alone held is gone, and all was written under another boot."""
        self.forget()
        boots = (str(boot_id()), OTHER_BOOT)
        with sqlite3.connect(root / "index.sqlite") as database:
            for table in ("objects_state", "blobs"):
                database.execute(f"UPDATE {table} SET boot=replace(boot, ?, ?)", boots)
        database.close()

    def forget(self) -> None:
        """What the kernel's memory alone held is gone."""
        self.unmount()
        self.mount()


@contextmanager
def failing_disks(directory: Path) -> Iterator[Callable[[Path], Disk]]:
    """Makes such file systems, each at a directory; they are gone behind the `with` block."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    backing, made = directory / "backing", list[Disk]()
    backing.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", backing], check=True)

    def make(target: Path) -> Disk:
        made.append(Disk(backing, target))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.unmount()
        wait_until(lambda: subprocess.run(["umount", backing], check=False).returncode == 0)  # loop devices go late
