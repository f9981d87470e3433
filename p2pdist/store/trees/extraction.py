"""Extraction: objects are made from the packs that are here, whole or in part, and from older
objects.

Contents of one chunk are made run by run: a thread reads neighbours in a pack at once, decodes and
verifies them, and collects them in a Bundle. A bundle makes objects of several contents together
where the filesystem gains by it (objects/btrfs.py), else one by one; most of the time goes into
creating files. Of a frame that the filesystem takes as it is the bundle keeps the frame alone.
Larger contents are assemblies, one thread each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from p2pdist.model.catalog import BLOCK_SIZE, Stored
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, P2PDistError
from p2pdist.model.pieces import PIECE_SIZE_MIN
from p2pdist.model.tree import content_hash
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.disk import failures
from p2pdist.store.objects.btrfs import Verified
from p2pdist.store.objects.files import Objects
from p2pdist.store.trees.assembly import Assembly, Decoder, PackHere, Part, blame_pack, wrong_chunk
from p2pdist.store.trees.missing_contents import Missing

HELD_BYTES = 4 << 20
"""So much is held decompressed before it is written."""


class Bundle:
    """Contents that become objects by the end of the `with` block, also when it fails. What is
    added must not change until then. Not thread-safe. Methods raise P2PDistError when the disk
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
        """Verify `data` and make it an object by the end; False means other bytes. `stored` is its
        form in a pack. Data of more than BLOCK_SIZE may lie in memory that is used again."""
        if content in self._objects:
            return True
        if content_hash(data) != content:
            return False
        self.put(content, data, stored)
        return True

    def put(self, content: bytes, data: bytes | memoryview, stored: bytes | memoryview = b"") -> None:
        """Make `data`, which has verified and is not empty, an object by the end. It may be
        `stored` itself."""
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


RUN_BYTES = 4 << 20
RUN_CHUNKS = 1024
"""A run has at most so many stored bytes and chunks."""

REACH = 4
"""Runs may have so many times as much where objects are named at once: the more names come
together, the more are of one directory (objects/btrfs.py)."""

GAP_BYTES = PIECE_SIZE_MIN // 2
"""What is not needed between two chunks is read with them up to so many bytes. It is less than a
piece, so it lies in pieces that hold one of the two."""

TEMPORARY_MAX = 64
"""So many assemblies are begun before all their parts are here."""

_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Extracted:
    """How many objects a call made, and how many contents are still missing."""

    objects: int
    missing: int


class _Desk:
    """The memory and the decoder with which a thread makes one run after the other. The kernel
    clears new memory first, so it is kept, and no more is taken than a run needs."""

    def __init__(self) -> None:
        self.decoder = Decoder()
        self._memory = memoryview(b"")

    def memory(self, length: int) -> memoryview:
        """`length` bytes of memory, good until the next call."""
        if len(self._memory) < length:
            self._memory = memoryview(bytearray(length))
        return self._memory[:length]


class Extraction:
    """Makes the objects that are missing of one tree. One call at a time for each tree."""

    def __init__(self, missing: Missing, objects: Objects, get: Callable[[Digest], Blob | None]) -> None:
        self._missing, self._objects, self._get = missing, objects, get
        self._sizes = {need.pack: need.size for need in missing.needs}
        self._desks = [_Desk() for _ in range(_THREADS)]

    def run(self) -> Extracted:
        """Make what can be made now. Raises Corrupt, Damaged, DamagedObject, DiskFull; what was
        made stays."""
        missing, objects = self._missing, self._objects
        before = len(missing.contents)
        size = sum(missing.contents.values())
        try:
            with ExitStack() as holds, failures(objects.directory, needed=size):
                packs = dict(self._present())
                for pack in packs.values():
                    holds.enter_context(pack.held())
                with ThreadPoolExecutor(_THREADS, thread_name_prefix="store-extraction") as pool:
                    self._drain(pool, list(self._tasks(packs)))
        finally:
            objects.save()
            for content in missing.contents.keys() & objects.contents():
                del missing.contents[content]
        return Extracted(before - len(missing.contents), len(missing.contents))

    def _present(self) -> Iterator[tuple[Digest, PackHere]]:
        for digest, size in self._sizes.items():
            blob = self._get(digest)
            selected = self._missing.selected.get(digest)
            pack = blob if selected is None or (blob is not None and blob.complete) else selected
            if pack is not None:
                if pack.size != size:
                    raise Corrupt(
                        f"a catalog states another size for {digest}", remedy="Pack and push the package again"
                    )
                yield digest, pack

    @staticmethod
    def _drain(pool: ThreadPoolExecutor, tasks: Iterable[Callable[[], object]]) -> None:
        started = [pool.submit(task) for task in tasks]
        try:
            for future in started:
                future.result()
        finally:
            for future in started:
                future.cancel()

    def _tasks(self, packs: dict[Digest, PackHere]) -> Iterator[Callable[[], object]]:
        missing, objects = self._missing, self._objects
        here: list[tuple[PackHere, list[Stored]]] = []
        for digest, todo in missing.whole.items():
            if (pack := packs.get(digest)) is None:
                continue
            left: list[Stored] = []
            now: list[Stored] = []
            for stored in todo:
                if stored.chunk not in objects:
                    (now if pack.holds(stored.offset, stored.stored) else left).append(stored)
            missing.whole[digest] = [*left, *now]
            here.append((pack, now))
        most_bytes = self._most(RUN_BYTES, sum(stored.stored for _, now in here for stored in now))
        most_chunks = self._most(RUN_CHUNKS, sum(len(now) for _, now in here))
        for pack, now in here:
            for run in _runs(now, most_bytes, most_chunks):
                yield partial(self._make_run, pack, run)

        def available(part: Part) -> bool:
            if part.pack is None:
                return True
            pack = packs.get(part.pack)
            return pack is not None and pack.holds(part.at, part.stored)

        begun = sum(assembly.begun for assembly in missing.assemblies.values())
        for content, assembly in list(missing.assemblies.items()):
            if assembly.begun or assembly.whole(available):
                yield partial(self._advance, content, assembly, packs, available)
            elif begun < TEMPORARY_MAX and assembly.any(available):
                begun += 1
                yield partial(self._advance, content, assembly, packs, available)

    def _most(self, usual: int, whole: int) -> int:
        """How much of the whole a run may be so that there is work for all threads."""
        reach = REACH if self._objects.named_at_once else 1
        return max(usual, min(reach * usual, whole // (2 * _THREADS)))

    def _make_run(self, pack: PackHere, run: list[Stored]) -> None:
        digest, start = pack.digest, run[0].offset
        length = run[-1].offset + run[-1].stored - start
        desk = self._desks.pop()  # there is one for each thread
        try:
            view = desk.memory(length)
            try:
                pack.read_into(start, view)
            except P2PDistError as error:
                raise blame_pack(pack, start, length, error) from error
            with Bundle(self._objects) as bundle:
                for stored in run:
                    found = view[stored.offset - start : stored.offset - start + stored.stored]
                    try:
                        data = desk.decoder.decode(digest, stored.chunk, found, stored.length)
                        right = bundle.add(stored.chunk, data, found)
                    except Corrupt:
                        right = False
                    if not right:
                        failure = wrong_chunk(digest, stored.chunk)
                        raise blame_pack(pack, stored.offset, stored.stored, failure)
        finally:
            self._desks.append(desk)

    def _advance(
        self, content: bytes, assembly: Assembly, packs: dict[Digest, PackHere], available: Callable[[Part], bool]
    ) -> None:
        if assembly.advance(self._objects, packs.__getitem__, available):
            del self._missing.assemblies[content]


def _runs(chunks: list[Stored], most_bytes: int, most_chunks: int) -> Iterator[list[Stored]]:
    """Neighbours, to be read at once; `most_bytes` are no less than a chunk has."""
    chunks.sort(key=lambda stored: stored.offset)
    run: list[Stored] = []
    for stored in chunks:
        if run:
            end = stored.offset + stored.stored
            apart = stored.offset - run[-1].offset - run[-1].stored > GAP_BYTES
            if apart or end - run[0].offset > most_bytes or len(run) == most_chunks:
                yield run
                run = []
        run.append(stored)
    if run:
        yield run
