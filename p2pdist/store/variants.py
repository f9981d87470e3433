"""Variants of objects as files of a store: variants/<hex of the root>/<name>, see model/variant.py. Others write them; here they are
counted, found and removed.

They belong to one tree and go with it. How many bytes they will take is said before they are written (`keep`), and counts from then on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from p2pdist.model.digest import Digest, hex_of, is_digest
from p2pdist.model.errors import DiskFull
from p2pdist.model.variant import content_of
from p2pdist.store.disk import failures

SHARE_MAX = 0.25
"""Variants take no more than this part of what the objects of their tree take."""


class Variants:
    """The caller holds the store's lock, but where it only looks. Methods raise P2PDistError when the disk fails."""

    def __init__(self, directory: Path, make_room: Callable[[int], object]) -> None:
        self._directory, self._make_room = directory, make_room
        self._sizes: dict[Digest, int] = {}

    @property
    def bytes_total(self) -> int:
        return sum(list(self._sizes.values()))

    def size(self, root: Digest) -> int:
        """Bytes that count for the variants of a tree."""
        return self._sizes.get(root, 0)

    def keep(self, root: Digest, most: int, objects: int) -> Path | None:
        """A directory for those of a tree whose objects take so many bytes; they take, and count, at most `most`. None when these are too
        many or do not fit."""
        if most > SHARE_MAX * objects:
            return None
        try:
            self._make_room(max(0, most - self.size(root)))
        except DiskFull:
            return None
        self._sizes[root] = max(most, self.size(root))
        path = self._path(root)
        with failures(self._directory):
            path.mkdir(exist_ok=True)
        return path

    def remove(self, root: Digest) -> None:
        self._sizes.pop(root, None)
        with failures(self._directory), suppress(FileNotFoundError):
            shutil.rmtree(self._path(root))

    def open(self, needed: Callable[[Digest], bool]) -> None:
        """Count what there is, and remove what belongs to no tree that is needed."""
        with failures(self._directory):
            for path in self._directory.iterdir():
                root = Digest(f"sha256:{path.name}")
                if not path.is_dir() or path.is_symlink():
                    path.unlink()
                elif is_digest(root) and needed(root):
                    self._sizes[root] = sum(file.lstat().st_size for file in path.iterdir())
                else:
                    shutil.rmtree(path)

    def sweep(self, needed: Callable[[Digest], bool]) -> None:
        """Remove the variants of trees that are not needed."""
        for root in list(self._sizes):
            if not needed(root):
                self.remove(root)

    def files(self) -> Iterator[tuple[Digest, bytes, Path]]:
        """All of them: the tree, the BLAKE3 of what must be in it, the file; b"" for what is no variant."""
        for root in list(self._sizes):
            with suppress(FileNotFoundError):  # removed meanwhile
                for path in sorted(self._path(root).iterdir()):
                    yield root, content_of(path.name) or b"", path

    def _path(self, root: Digest) -> Path:
        return self._directory / hex_of(root)
