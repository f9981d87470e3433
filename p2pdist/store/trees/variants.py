"""Variants of objects as files of a store: variants/<boot id>/<hex of the root>/<name>, see
model/tree.py. Mounting writes them; the store counts, finds and removes them.

They belong to one tree and go with it. How many bytes they will take is said before they are
written (`keep`), and counts from then on. They are not synchronised: those that were written under
another boot of the machine are removed, whatever they look like.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import UUID

from p2pdist.model.digest import Digest, hex_of, is_digest
from p2pdist.model.errors import DiskFull
from p2pdist.model.tree import variant_bytes, variant_content, variant_name
from p2pdist.store.disk import failures
from p2pdist.store.objects.recovery import file_hash

SHARE_MAX = 0.25
"""Variants take no more than this part of what the objects of their tree take."""


class Variants:
    """The variants of all trees. The caller holds the store's lock, but where it only looks.
    Methods raise P2PDistError when the disk fails."""

    def __init__(self, directory: Path, boot: UUID, make_room: Callable[[int], object]) -> None:
        self._all, self._directory, self._make_room = directory, directory / str(boot), make_room
        self._sizes: dict[Digest, int] = {}

    @property
    def bytes_total(self) -> int:
        """Bytes that count for all variants."""
        return sum(list(self._sizes.values()))

    def size(self, root: Digest) -> int:
        """Bytes that count for the variants of a tree."""
        return self._sizes.get(root, 0)

    def files_of(self, root: Digest) -> int:
        """How many variants of a tree there are."""
        with failures(self._directory), suppress(FileNotFoundError):
            return len(os.listdir(self._path(root)))
        return 0

    def keep(self, root: Digest, most: int, objects: int) -> Path | None:
        """A directory for the variants of a tree whose objects take so many bytes; they take, and
        count, at most `most`. None when these are too many or do not fit."""
        if most > SHARE_MAX * objects:
            return None
        path = self._path(root)
        try:
            self._make_room(max(0, most - self.size(root)))
            with failures(self._directory):
                path.mkdir(parents=True, exist_ok=True)
        except DiskFull:
            return None
        self._sizes[root] = max(most, self.size(root))
        return path

    def remove(self, root: Digest) -> None:
        """Remove the variants of a tree."""
        self._sizes.pop(root, None)
        with failures(self._directory):
            _remove(self._path(root))

    def drop(self, root: Digest, contents: Container[bytes | None]) -> None:
        """Remove the variants of some contents, which may be copies of damaged objects."""
        with failures(self._directory), suppress(FileNotFoundError):
            for path in self._path(root).iterdir():
                if variant_content(path.name) in contents:
                    _remove(path)

    def open(self, needed: Callable[[Digest], bool]) -> None:
        """Count what there is, and remove what belongs to another boot, to no tree that is needed,
        or is no variant."""
        with failures(self._all):
            for path in self._all.iterdir():
                if path != self._directory:
                    _remove(path)
            with suppress(FileNotFoundError):
                for path in self._directory.iterdir():
                    root = Digest(f"sha256:{path.name}")
                    if path.is_dir() and is_digest(root) and needed(root):
                        self._sizes[root] = _count(path)
                    else:
                        _remove(path)

    def sweep(self, needed: Callable[[Digest], bool]) -> None:
        """Remove the variants of trees that are not needed."""
        for root in list(self._sizes):
            if not needed(root):
                self.remove(root)

    def verify(self) -> Iterator[tuple[Digest, int, bool]]:
        """Read all of them: of each the tree, its bytes, and whether it is what its name says; else
        it is removed, and made again when its tree is mounted."""
        for root in list(self._sizes):
            with failures(self._directory), suppress(FileNotFoundError):  # the tree was removed meanwhile
                for path in sorted(self._path(root).iterdir()):
                    if path.name.startswith("."):
                        continue  # in the making
                    with suppress(FileNotFoundError):
                        size = path.lstat().st_size
                        good = _is_good(path)
                        if not good:
                            _remove(path)
                        yield root, size, good

    def _path(self, root: Digest) -> Path:
        return self._directory / hex_of(root)


def _is_good(path: Path) -> bool:
    content, found = variant_content(path.name), path.lstat()
    try:
        looks = content is not None and path.name == variant_name(content, found.st_mode & 0o7777, found.st_mtime_ns)
        return looks and path.is_file() and not path.is_symlink() and file_hash(path) == content
    except OSError:
        return False  # it cannot be read


def _count(directory: Path) -> int:
    """Bytes that the variants of a tree count. A file that is no variant is removed: a process was
    killed while it wrote it."""
    total = 0
    for path in directory.iterdir():
        if variant_content(path.name) is None or not path.is_file():
            _remove(path)
        else:
            total += variant_bytes(path.lstat().st_size)
    return total


def _remove(path: Path) -> None:
    """Remove a file or directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
