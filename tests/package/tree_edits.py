"""Changes to a directory, for tests of what a next version is."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from p2pdist.model.tree import WHOLE_MAX

WORDS = [b"%d " % number * (37 + 11 * number) for number in range(40)]
"""Contents of files: few enough to come again and again."""


class Edits:
    """Changes to a directory, at random."""

    def __init__(self, source: Path, seed: int) -> None:
        self.source, self.choose, self.count = source, random.Random(seed), 0

    def some(self, count: int) -> list[str]:
        return [self.one() for _ in range(count)]

    def one(self) -> str:
        """One change; what it was."""
        how: Callable[[], object] = self.choose.choice(
            [
                *[self.write] * 10,
                *[self.remove] * 5,
                self.new_directory,
                self.remove_directory,
                self.move_file,
                self.move_directory,
                self.mode,
                self.touch,
                self.link,
                self.symlink,
                self.become_directory,
                self.become_file,
                self.fifo,
                self.setuid,
                self.attribute,
                self.large,
                self.empty,
            ]
        )
        how()
        return how.__name__

    def fresh(self) -> Path:
        self.count += 1
        name = self.choose.choice(["a", "m", "z", "-", "\udcff"])
        return self.directory() / f"{name}{self.count}"

    def paths(self) -> list[Path]:
        # Not rglob, which asks what symbolic links lead to.
        found = os.walk(self.source)
        return sorted(Path(above, name) for above, directories, files in found for name in directories + files)

    def directory(self) -> Path:
        found = [path for path in self.paths() if not path.is_symlink() and path.is_dir()]
        return self.choose.choice([self.source, *found])

    def file(self) -> Path:
        found = [path for path in self.paths() if not path.is_symlink() and path.is_file()]
        return self.choose.choice(found) if found else self.write()

    def content(self) -> bytes:
        return self.choose.choice(WORDS) if self.choose.random() < 0.7 else self.choose.randbytes(300)

    def write(self) -> Path:
        found = [path for path in self.paths() if not path.is_symlink() and path.is_file()]
        path = self.choose.choice(found) if found and self.choose.random() < 0.5 else self.fresh()
        path.write_bytes(self.content())
        return path

    def remove(self) -> None:
        self.file().unlink()

    def new_directory(self) -> None:
        made = self.fresh()
        made.mkdir()
        for number in range(self.choose.randrange(12)):
            (made / f"{number}").write_bytes(self.content())

    def remove_directory(self) -> None:
        if (chosen := self.directory()) != self.source:
            shutil.rmtree(chosen)

    def move_file(self) -> None:
        self.file().rename(self.fresh())

    def move_directory(self) -> None:
        chosen, to = self.directory(), self.fresh()
        if chosen != self.source and chosen not in to.parents:
            chosen.rename(to)

    def mode(self) -> None:
        self.choose.choice([self.file(), self.directory()]).chmod(self.choose.choice([0o700, 0o755, 0o1755]))

    def setuid(self) -> None:
        self.file().chmod(0o4755)

    def touch(self) -> None:
        os.utime(self.file(), (1, self.choose.randrange(2_000_000_000)))

    def link(self) -> None:
        os.link(self.file(), self.fresh())

    def symlink(self) -> None:
        self.fresh().symlink_to("anywhere")

    def become_directory(self) -> None:
        path = self.file()
        path.unlink()
        path.mkdir()
        (path / "inner").write_bytes(self.content())

    def become_file(self) -> None:
        if (chosen := self.directory()) != self.source:
            shutil.rmtree(chosen)
            chosen.write_bytes(self.content())

    def fifo(self) -> None:
        os.mkfifo(self.fresh())

    def attribute(self) -> None:
        os.setxattr(self.file(), "user.some", self.choose.randbytes(4))

    def empty(self) -> None:
        self.file().write_bytes(b"")

    def large(self) -> None:
        """Mostly a hole; there are never many."""
        found = [
            path
            for path in self.paths()
            if not path.is_symlink() and path.is_file() and path.stat().st_size > WHOLE_MAX
        ]
        path = self.choose.choice(found) if len(found) > 1 else self.fresh()
        with path.open("wb") as file:
            file.write(random.Random(self.choose.randrange(2)).randbytes(100_000))
            file.truncate(WHOLE_MAX + self.choose.randrange(1, 3))
