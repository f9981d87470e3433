"""Trees in a store, whatever is done with it in whatever order: pulls, pins, holds, removals,
eviction, rot, crashes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from effort import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from store_rig import flip, pretend_other_boot, sample
from store_tree_rig import CHUNK, Packed, Publisher, bring, noise, text

from p2pdist.core.eviction import choose
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, DiskFull, NotFound
from p2pdist.model.tree import WHOLE_MAX, content_hash
from p2pdist.store import sync
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.missing_contents import Missing

KIB, MIB = 1 << 10, 1 << 20
SHM = Path("/dev/shm")


def _trees() -> list[Packed]:
    """Versions of two packages that have contents in common, in several packs; the second has a
    large file."""
    one, two = Publisher(pack_bytes=60 * KIB), Publisher(pack_bytes=MIB, chunk=CHUNK)
    files = {b"d/%d" % number: noise(number, 20 * KIB + number) for number in range(12)}
    big = text(50, CHUNK) + bytes(WHOLE_MAX) + noise(51, CHUNK)
    return [
        one.pack(files),
        one.pack({**files, b"d/3": noise(100, 9 * KIB), b"e": noise(101, 30 * KIB)}),
        one.pack({b"only": noise(102, 50 * KIB), b"d/1": files[b"d/1"], b"empty": b""}),
        two.pack({b"big": big, b"d/2": files[b"d/2"]}),
        two.pack({b"big": big[: 2 * CHUNK] + noise(103, CHUNK) + big[2 * CHUNK :], b"d/4": files[b"d/4"]}),
    ]


TREES = _trees()
JUNK = [sample(200 + number, size) for number, size in enumerate([300 * KIB, MIB, 3 * MIB])]
CAPACITY = 7 * MIB
NUMBERS = st.integers(0, len(TREES) - 1)


@dataclass
class Pulling:
    """An open missing, and the contents that were here since it began."""

    number: int
    missing: Missing
    here: set[bytes]


class TreesMachine(RuleBasedStateMachine):
    """`complete` are the trees that should be; evictions are taken from the store, after checking
    that each was allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="p2pdist-trees-", dir=SHM if os.access(SHM, os.W_OK) else None))
        self.root = self.base / "0"
        # Nothing is brought to the disk in the background, so that a copy of the directory is what
        # a killed process leaves.
        self.gather_s, sync.GATHER_S = sync.GATHER_S, 3600.0
        self.complete: set[int] = set()
        self.pins: set[int] = set()
        self.holds: dict[int, int] = {}
        self.pulling: list[Pulling] = []
        self.checked: set[tuple[bytes, int]] = set()
        self.store = self.open()

    def open(self) -> BlobStore:
        return BlobStore(self.root, capacity_bytes=CAPACITY, choose=choose)

    def teardown(self) -> None:
        for pulling in self.pulling:
            pulling.missing.close()
        self.store.close()
        sync.GATHER_S = self.gather_s
        shutil.rmtree(self.base)

    @contextmanager
    def eviction(self) -> Iterator[None]:
        """What is done within may evict trees, if they are neither pinned, held nor being
        pulled."""
        try:
            yield
        finally:
            gone = {number for number in self.complete if TREES[number].root not in self.store.trees.records}
            assert not gone & (self.pins | self.holds.keys() | {pulling.number for pulling in self.pulling})
            self.complete -= gone

    def bring(self, number: int, digests: list[Digest]) -> bool:
        with self.eviction():
            try:
                bring(self.store, TREES[number], digests)
            except DiskFull:
                return False
            return True

    # -- pulling

    @precondition(lambda self: len(self.pulling) < 3)
    @rule(number=NUMBERS)
    def begin(self, number: int) -> None:
        packed = TREES[number]
        if not self.bring(number, packed.small):
            return
        with self.eviction():
            try:
                missing = self.store.trees.missing(packed.root, packed.catalogs, packed.packs)
            except (DiskFull, NotFound):  # or a catalog gave way to another
                return
        here = {content for content in packed.contents if content in self.store.objects}
        assert missing.contents == {c: len(data) for c, data in packed.contents.items() if c not in here}
        self.pulling.append(Pulling(number, missing, here))

    @precondition(lambda self: self.pulling)
    @rule(data=st.data())
    def bring_pack(self, data: st.DataObject) -> None:
        pulling = data.draw(st.sampled_from(self.pulling))
        if pulling.missing.needs:
            self.bring(pulling.number, [data.draw(st.sampled_from(pulling.missing.needs)).pack])

    @precondition(lambda self: self.pulling)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        pulling = data.draw(st.sampled_from(self.pulling))
        filled = self.store.trees.fill(pulling.missing)
        assert filled.missing == len(pulling.missing.contents)
        pulling.here |= {content for content in TREES[pulling.number].contents if content in self.store.objects}

    @precondition(lambda self: self.pulling)
    @rule(data=st.data(), close=st.booleans())
    def finish_one(self, data: st.DataObject, close: bool) -> None:
        self.finish(data.draw(st.sampled_from(self.pulling)), close=close)

    def finish(self, pulling: Pulling, *, close: bool) -> None:
        contents = TREES[pulling.number].contents
        try:
            self.store.trees.finish(pulling.missing)
        except Conflict:
            assert any(content not in self.store.objects for content in contents)
        else:
            self.complete.add(pulling.number)
        if close:
            self.pulling.remove(pulling)
            pulling.missing.close()

    @precondition(lambda self: len(self.pulling) < 3)
    @rule(number=NUMBERS)
    def pull(self, number: int) -> None:
        """All of it, as far as there is room."""
        before = len(self.pulling)
        self.begin(number)
        if len(self.pulling) > before:
            pulling = self.pulling[-1]
            for need in pulling.missing.needs:
                if self.bring(number, [need.pack]):
                    self.store.trees.fill(pulling.missing)
            self.finish(pulling, close=True)

    # -- keeping and removing

    @rule(number=NUMBERS, pin=st.booleans())
    def pin(self, number: int, pin: bool) -> None:
        if pin:
            self.store.pins.pin(TREES[number].root, f"owner {number}")
            self.pins.add(number)
        else:
            self.store.pins.unpin(f"owner {number}")
            self.pins.discard(number)

    @rule(number=NUMBERS, hold=st.booleans())
    def hold(self, number: int, hold: bool) -> None:
        root = TREES[number].root
        if not hold:
            if self.holds.get(number):
                self.store.trees.release(root)
                self.holds[number] -= 1
                if not self.holds[number]:
                    del self.holds[number]
            return
        try:
            self.store.trees.hold(root)
        except (NotFound, Conflict):
            assert number not in self.complete
        else:
            assert number in self.complete
            self.holds[number] = self.holds.get(number, 0) + 1

    @rule(number=NUMBERS)
    def remove(self, number: int) -> None:
        used = number in self.holds or any(pulling.number == number for pulling in self.pulling)
        try:
            self.store.trees.remove(TREES[number].root)
        except NotFound:
            assert number not in self.complete
        except Conflict:
            assert used or number in self.pins
        else:
            assert not used and number not in self.pins
            self.complete.discard(number)

    @rule()
    def collect(self) -> None:
        self.store.collect()
        named = set().union(*(TREES[pulling.number].contents for pulling in self.pulling))
        named |= {content for number in self.complete for content in TREES[number].contents}
        sources = set().union(*(pulling.missing.sources for pulling in self.pulling))
        recorded = {tree.root for tree in self.store.trees.list()}
        named |= {content for packed in TREES if packed.root in recorded for content in packed.contents}
        assert set(self.store.objects.contents()) <= named | sources

    @rule(number=st.integers(0, len(JUNK) - 1))
    def other_blob(self, number: int) -> None:
        with self.eviction():
            try:
                blob = self.store.begin(JUNK[number].digest, JUNK[number].pieces)
            except DiskFull:
                return
        for piece in range(JUNK[number].count):
            blob.write(piece, JUNK[number].piece(piece))
        blob.finish()

    @precondition(lambda self: self.complete)
    @rule(data=st.data())
    def draw_image(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.complete)))
        self.store.trees.images.path(TREES[number].root).write_bytes(bytes(1000))

    # -- accidents

    @precondition(lambda self: len(self.store.objects))
    @rule(data=st.data())
    def rot(self, data: st.DataObject) -> None:
        bad = data.draw(st.sampled_from(sorted(self.store.objects.contents())))
        flip(self.store.objects.path(bad), 1000)
        assert [checked.name for checked in self.store.verify() if not checked.ok] == [bad.hex()]
        self.lose(bad)

    def lose(self, content: bytes) -> None:
        self.complete -= {number for number in self.complete if content in TREES[number].contents}
        for pulling in self.pulling:
            pulling.here.discard(content)

    @rule(killed=st.booleans(), lost=st.booleans(), data=st.data())
    def reopen(self, killed: bool, lost: bool, data: st.DataObject) -> None:
        """The agent or, `lost`, the machine starts again, after an orderly end or not."""
        left = self.base / str(int(self.root.name) + 1)
        if killed:
            shutil.copytree(self.root, left)
        for pulling in self.pulling:
            pulling.missing.close()
        self.pulling, self.holds = [], {}
        before = set(self.store.objects.contents())
        self.store.close()
        if killed:
            shutil.rmtree(self.root)
            self.root = left
        torn = b""
        if lost:
            pretend_other_boot(self.root)
            if before:
                torn = data.draw(st.sampled_from([b"", *sorted(before)]))
            if torn:
                os.truncate(self.root / "objects" / torn.hex()[:2] / torn.hex()[2:], 0)
                self.lose(torn)
        self.checked.clear()
        self.store = self.open()
        assert set(self.store.objects.contents()) == before - {torn}

    # -- what always holds

    @initialize()
    def nothing(self) -> None:
        assert len(self.store.objects) == 0

    @invariant()
    def complete_trees_can_be_shown(self) -> None:
        trees = self.store.trees
        assert {n for n, packed in enumerate(TREES) if trees.complete(packed.root)} == self.complete
        for number in self.complete:
            assert TREES[number].contents.keys() <= self.store.objects.contents()

    @invariant()
    def pulls_keep_what_they_count_on(self) -> None:
        for pulling in self.pulling:
            assert pulling.here <= self.store.objects.contents()

    @invariant()
    def objects_are_what_their_names_say(self) -> None:
        """Each file is read once, unless something was done to it since."""
        total, found = 0, set()
        for path in (self.root / "objects").rglob("*"):
            if path.is_file():
                name, status = bytes.fromhex(path.parent.name + path.name), path.stat()
                key = name, status.st_mtime_ns
                if key not in self.checked:
                    assert content_hash(path.read_bytes()) == name
                    self.checked.add(key)
                assert self.store.objects.sizes[name] == status.st_size and status.st_mode & 0o777 == 0o444
                total += status.st_size
                found.add(name)
        assert found == set(self.store.objects.contents())
        assert total == self.store.objects.bytes_total

    @invariant()
    def the_capacity_is_kept(self) -> None:
        usage = self.store.usage()
        assert usage.bytes_total - usage.bytes_images <= CAPACITY
        missing: dict[bytes, int] = {}
        for pulling in self.pulling:
            missing |= {c: len(d) for c, d in TREES[pulling.number].contents.items() if c in pulling.missing.contents}
        expected = sum(size for content, size in missing.items() if content not in self.store.objects)
        assert usage.bytes_expected <= expected


def test_whatever_is_done_with_trees() -> None:
    run_state_machine_as_test(
        TreesMachine,
        settings=settings(max_examples=examples(12), stateful_step_count=40, deadline=None, derandomize=True),
    )


@pytest.mark.long
def test_ten_thousand_operations_on_trees() -> None:
    run_state_machine_as_test(
        TreesMachine, settings=settings(max_examples=examples(100), stateful_step_count=100, deadline=None)
    )
