"""Bundles: contents that verify one after the other, and become objects together where that is of
use (see named.py), else one by one.

Of a frame that the filesystem takes as it is only the frame is kept: what it decodes to has
verified and is not needed.
"""

from __future__ import annotations

from operator import attrgetter

from p2pdist.model.catalog import BLOCK_SIZE
from p2pdist.model.tree import content_hash
from p2pdist.store.named import Verified
from p2pdist.store.objects import Objects

HELD_BYTES = 4 << 20
"""So much is held decompressed before it is written."""


class Bundle:
    """Ends with the `with` block, also when it fails: then all that was added are objects. What is
    added must stay as it is until then. Not thread-safe. Methods raise P2PDistError when the disk
    fails."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._contents: list[Verified] = []
        self._held = 0

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()

    def add(self, content: bytes, data: bytes | memoryview, stored: bytes | memoryview = b"") -> bool:
        """Verify `data` and make it an object; see Objects.add. Memory that is used again may hold
        it if it has more than BLOCK_SIZE."""
        if content in self._objects:
            return True
        if content_hash(data) != content:
            return False
        self.put(content, data, stored)
        return True

    def put(self, content: bytes, data: bytes | memoryview, stored: bytes | memoryview = b"") -> None:
        """The same for `data` that has verified, and is not empty. It may be `stored` itself."""
        size = len(data)
        if size > BLOCK_SIZE or not self._objects.named_at_once:
            self._objects.put(content, data, stored)
        elif self._objects.encoded.takes(stored, size):
            self._contents.append(Verified(content, size, stored, None))
        else:
            self._contents.append(Verified(content, size, stored, data))
            self._held += size if data is not stored else 0
            if self._held > HELD_BYTES:
                self._flush()

    def _flush(self) -> None:
        contents, self._contents, self._held = self._contents, [], 0
        contents.sort(key=attrgetter("content"))
        if contents:
            self._objects.put_together(contents)
