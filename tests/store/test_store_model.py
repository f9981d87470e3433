"""The store against an obvious model of it: any sequence of uses, under a capacity, with
reopenings."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from effort import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_rig import KIB, PIECE, Sample, files, flip, pretend_other_boot, read_piece, sample

from p2pdist.core.eviction import choose
from p2pdist.model.errors import Conflict, DiskFull, NotFound
from p2pdist.model.pieces import encoded_size
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore

SAMPLES = [sample(80 + number, size) for number, size in enumerate([0, 1, PIECE, PIECE + 1, 3 * PIECE, 200 * KIB])]
CAPACITY = 500 * KIB
NUMBERS = st.integers(0, len(SAMPLES) - 1)
OWNERS = st.sampled_from(["one", "two"])


@dataclass
class Expected:
    """What the store should know of one blob."""

    held: set[int] = field(default_factory=set)
    complete: bool = False
    holds: int = 0


class StoreMachine(RuleBasedStateMachine):
    """`expected` says what should be there; evictions are taken from the store, after checking that
    each was allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="p2pdist-store-"))
        self.expected: dict[int, Expected] = {}
        self.pins: set[tuple[int, str]] = set()
        self.open()

    def open(self) -> None:
        self.store = BlobStore(self.root, capacity_bytes=CAPACITY, choose=choose)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.root)

    def blob(self, number: int) -> Blob:
        blob = self.store.get(SAMPLES[number].digest)
        assert blob is not None
        return blob

    def pinned(self, number: int) -> bool:
        return any(number == pinned for pinned, _ in self.pins)

    def reserved(self) -> int:
        """Bytes that the blobs should take, with their piece lists."""
        return sum(self.cost(SAMPLES[number]) for number in self.expected)

    @staticmethod
    def cost(found: Sample) -> int:
        return len(found.data) + encoded_size(found.pieces.layout)

    def note_evictions(self) -> None:
        """Forget what the store evicted; only complete blobs that are neither pinned nor held may
        have gone."""
        for number in list(self.expected):
            if self.store.get(SAMPLES[number].digest) is None:
                gone = self.expected.pop(number)
                assert gone.complete and not gone.holds and not self.pinned(number)

    @rule(number=NUMBERS)
    def begin(self, number: int) -> None:
        found = SAMPLES[number]
        before = self.reserved()
        # An empty blob frees nothing and stays.
        could = sum(
            len(SAMPLES[other].data)
            for other, item in self.expected.items()
            if item.complete and not item.holds and not self.pinned(other)
        )
        try:
            blob = self.store.begin(found.digest, found.pieces)
        except DiskFull:
            assert number not in self.expected
            assert before - could + self.cost(found) > CAPACITY, "there was room"
            self.note_evictions()
            assert self.reserved() == before, "nothing may be evicted in vain"
            return
        assert number in self.expected or before - could - 2000 + self.cost(found) <= CAPACITY
        if number in self.expected:
            assert self.reserved() == before
        else:
            self.note_evictions()
            self.expected[number] = Expected()
        assert blob.digest == found.digest

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), good=st.booleans())
    def write(self, data: st.DataObject, good: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.expected)))
        found, item = SAMPLES[number], self.expected[number]
        if found.count == 0:
            return
        piece = data.draw(st.integers(0, found.count - 1))
        content = bytearray(found.piece(piece))
        if not good:
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        assert self.blob(number).write(piece, content) == (good or piece in item.held)
        if good:
            item.held.add(piece)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.expected)))
        for piece in range(SAMPLES[number].count):
            assert self.blob(number).write(piece, SAMPLES[number].piece(piece))
            self.expected[number].held.add(piece)
        self.finish(number)

    @rule(number=NUMBERS)
    def finish(self, number: int) -> None:
        if number not in self.expected:
            return
        item = self.expected[number]
        try:
            self.blob(number).finish()
            assert len(item.held) == SAMPLES[number].count
            item.complete = True
        except Conflict:
            assert len(item.held) < SAMPLES[number].count

    @rule(number=NUMBERS, owner=OWNERS)
    def pin(self, number: int, owner: str) -> None:
        self.store.pins.pin(SAMPLES[number].digest, owner)
        self.pins.add((number, owner))

    @rule(owner=OWNERS)
    def unpin(self, owner: str) -> None:
        self.store.pins.unpin(owner)
        self.pins = {pin for pin in self.pins if pin[1] != owner}

    @rule(number=NUMBERS, take=st.booleans())
    def hold(self, number: int, take: bool) -> None:
        item = self.expected.get(number)
        if item is not None and take:
            self.blob(number).hold()
            item.holds += 1
        elif item is not None and item.holds:
            self.blob(number).release()
            item.holds -= 1

    @rule(number=NUMBERS)
    def remove(self, number: int) -> None:
        try:
            self.store.remove(SAMPLES[number].digest)
        except NotFound:
            assert number not in self.expected
        except Conflict:
            assert self.pinned(number) or self.expected[number].holds
        else:
            assert not self.pinned(number) and not self.expected.pop(number).holds

    @rule(number=NUMBERS)
    def drop_partial(self, number: int) -> None:
        item = self.expected.get(number)
        try:
            self.store.drop_partial(SAMPLES[number].digest)
        except Conflict:
            assert item is not None and (item.complete or item.holds)
        else:
            assert item is None or not (self.expected.pop(number).complete or item.holds)

    @precondition(lambda self: any(item.held for item in self.expected.values()))
    @rule(data=st.data())
    def rot(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([number for number, item in sorted(self.expected.items()) if item.held]))
        item = self.expected[number]
        piece = data.draw(st.sampled_from(sorted(item.held)))
        flip(self.blob(number).path, SAMPLES[number].pieces.layout.offset(piece))
        assert self.blob(number).verify(drop=True) == [piece]
        item.held.discard(piece)
        item.complete = False

    @rule(lost=st.booleans())
    def reopen(self, lost: bool) -> None:
        """A restart of the agent or, `lost`, of the machine. What is whole becomes complete."""
        self.store.close()
        if lost:
            pretend_other_boot(self.root)
        self.open()
        for number, item in self.expected.items():
            item.holds = 0
            item.complete = len(item.held) == SAMPLES[number].count

    @invariant()
    def the_store_is_as_expected(self) -> None:
        assert {blob.digest for blob in self.store.blobs()} == {SAMPLES[number].digest for number in self.expected}
        names = set()
        for number, item in self.expected.items():
            found, blob = SAMPLES[number], self.blob(number)
            assert set(blob.have) == item.held
            assert blob.complete == item.complete
            assert blob.in_use == bool(item.holds)
            for piece in item.held:
                assert read_piece(blob, piece) == found.piece(piece)
            assert self.store.pins.owners(found.digest) == {owner for pinned, owner in self.pins if pinned == number}
            names.add(blob.path.relative_to(self.root).as_posix())
            if not item.complete and found.count > 1:
                names.add(f"partial/{found.digest[7:]}.have")
        assert files(self.root) == names
        usage = self.store.usage()
        assert usage.bytes_total == self.reserved() <= CAPACITY
        assert usage.bytes_complete == sum(len(SAMPLES[n].data) for n, item in self.expected.items() if item.complete)


StoreMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
TestStoreAgainstModel = StoreMachine.TestCase
