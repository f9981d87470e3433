"""Metadata images of trees as files of a store: images/<hex of the root>. The agent writes them;
the store counts and removes them.

Room for the image of a tree that is being pulled is kept as that for its objects is. How long an
image will be is known when it has been laid out; until then it counts with a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from p2pdist.model.digest import Digest, is_digest
from p2pdist.store.disk import failures

BYTES_MIN_MAX = 8192
"""An image without entries takes no more."""

ENTRY_BYTES = 204
"""An entry takes so much in an image, and its name, attributes and target. Blocks that are not
filled up take less than all that is in them again."""


def image_bytes_max(entries: int, encoded: int) -> int:
    """Bytes that the image of so many entries takes at most; `encoded` is the length of the pages
    that carry them."""
    return BYTES_MIN_MAX + 2 * (ENTRY_BYTES * entries + encoded)


class Images:
    """The images of all trees. The caller holds the store's lock, but where it only looks. Methods
    raise P2PDistError when the disk fails."""

    def __init__(self, directory: Path, path: Callable[[Digest], Path]) -> None:
        self._directory, self.path = directory, path
        self._expected: dict[Digest, list[int]] = {}

    def size(self, root: Digest) -> int:
        """Bytes of an image; 0 when there is none."""
        with failures(self._directory), suppress(FileNotFoundError):
            return self.path(root).stat().st_size
        return 0

    def remove(self, root: Digest) -> None:
        """Remove the image of a tree, if there is one."""
        with failures(self._directory):
            self.path(root).unlink(missing_ok=True)

    def expect(self, root: Digest, most: int) -> None:
        """Count `most` bytes for an image until it is there, or until `unexpect`."""
        self._expected.setdefault(root, []).append(most)

    def unexpect(self, root: Digest, most: int) -> None:
        """Undo one `expect` of `most` bytes."""
        claims = self._expected[root]
        claims.remove(most)
        if not claims:
            del self._expected[root]

    def expected(self, root: Digest) -> bool:
        """Whether room is kept for the image of a tree."""
        return root in self._expected

    def bytes_total(self, roots: Iterable[Digest]) -> int:
        """Bytes of the images of these trees, and of those that are expected."""
        expected = {root: max(claims, default=0) for root, claims in list(self._expected.items())}
        return sum(self.size(root) or expected.get(root, 0) for root in {*roots, *expected})

    def sweep(self, needed: Callable[[Digest], bool], *, opening: bool = False, everything: bool = False) -> None:
        """Remove images that are not needed, at opening also what has any other name."""
        with failures(self._directory):
            for path in self._directory.iterdir():
                root = Digest(f"sha256:{path.name}")
                if everything or (not needed(root) and (opening or is_digest(root))):
                    path.unlink(missing_ok=True)
