"""Bits that flip in a store between the verification of a piece and its use: the disk is blamed and
what is wrong comes again; the package is blamed only for what verifies."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
from store_tree_rig import CHUNK, Packed, Publisher, bring, check, noise, text

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, Damaged
from p2pdist.model.manifest import PACK_TYPE, PIECES_DIGEST, PIECES_SIZE, Descriptor
from p2pdist.model.pieces import PieceList
from p2pdist.model.selection import Selection, pieces_covering
from p2pdist.model.tree import WHOLE_MAX, content_hash
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.assembly import SelectedPack
from p2pdist.store.trees.damage import drop_wrong, read_again

SMALL = {b"n%03d" % seed: noise(seed, 20_000) for seed in range(100)}
BIG = noise(7, WHOLE_MAX + 3 * CHUNK + 77)


def flip(path: Path, at: int) -> None:
    """Flip a bit of a file."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def stored(store: BlobStore, digest: Digest) -> Blob:
    blob = store.get(digest)
    assert blob is not None
    return blob


def come_again(store: BlobStore, packed: Packed, digest: Digest) -> list[int]:
    """Bring the missing pieces of a blob, as a pull does; returns them."""
    data, blob = packed.blobs[digest], stored(store, digest)
    missing = [piece for piece in range(blob.layout.count) if piece not in blob.have]
    for piece in missing:
        start = blob.layout.offset(piece)
        assert blob.write(piece, data[start : start + blob.layout.length(piece)])
    blob.finish()
    return missing


@pytest.mark.parametrize(
    "files", [SMALL, {b"big": BIG}, {b"big": text(3, WHOLE_MAX + CHUNK)}], ids=["small", "big", "packed"]
)
def test_a_pack_that_changed_on_the_disk_comes_again(store: BlobStore, files: dict[bytes, bytes]) -> None:
    """Only the piece that is wrong is dropped; what was made of the others stays."""
    packed = Publisher().pack(files)
    bring(store, packed, [*packed.small, *packed.packs])
    (pack,) = packed.packs
    with store.trees.missing(packed.root, packed.catalogs) as missing:
        (need,) = missing.needs
        at = need.chunks[len(need.chunks) // 2].offset + 11
        flip(stored(store, pack).path, at)
        with pytest.raises(Damaged, match=f"{pack} changed on the disk") as caught:
            store.trees.fill(missing)
        assert caught.value.blob == pack
        assert come_again(store, packed, pack) == [at // stored(store, pack).layout.piece_size]
        assert store.trees.fill(missing).missing == 0
        store.trees.finish(missing)
    check(store, packed)


def test_a_pack_that_was_cut_short_comes_again(store: BlobStore) -> None:
    packed = Publisher().pack(SMALL)
    bring(store, packed, [*packed.small, *packed.packs])
    (pack,) = packed.packs
    path = stored(store, pack).path
    path.chmod(0o644)
    os.truncate(path, len(packed.blobs[pack]) - 70_000)
    with store.trees.missing(packed.root, packed.catalogs) as missing:
        with pytest.raises(Damaged):
            store.trees.fill(missing)
        come_again(store, packed, pack)
        assert store.trees.fill(missing).missing == 0
        store.trees.finish(missing)
    check(store, packed)


def test_pieces_that_another_dropped_meanwhile_are_no_fault_of_the_package(store: BlobStore) -> None:
    packed = Publisher().pack(SMALL)
    bring(store, packed, packed.packs)
    (pack,) = packed.packs
    blob = stored(store, pack)
    blob.drop([1])
    assert drop_wrong(blob, 0, 3 * blob.layout.piece_size) and not drop_wrong(blob, 0, 10)
    with pytest.raises(Damaged):
        read_again(blob, 0, 3 * blob.layout.piece_size)
    assert read_again(blob, 3, 100) == packed.blobs[pack][3:103]


def test_a_selection_that_changed_on_the_disk_comes_again(store: BlobStore) -> None:
    packed = Publisher().pack(SMALL)
    bring(store, packed, packed.small)
    wanted = [SMALL[b"n%03d" % seed] for seed in (3, 4, 40, 99)]
    for data in SMALL.values():
        if data not in wanted:
            store.objects.add(content_hash(data), data)
    (pack,) = packed.packs
    data = packed.blobs[pack]
    pieces = PieceList.of_stream(BytesIO(data), len(data))
    with store.trees.missing(packed.root, packed.catalogs) as missing:
        (need,) = missing.needs
        annotations = {PIECES_DIGEST: pieces.digest, PIECES_SIZE: str(pieces.layout.piece_size)}
        chosen = pieces_covering(pieces.layout, list(need.ranges))
        selection = Selection.of(Descriptor(PACK_TYPE, pack, len(data), annotations), pieces, chosen)
        packed.blobs[selection.digest] = b"".join(
            data[pieces.layout.offset(piece) : pieces.layout.offset(piece) + pieces.layout.length(piece)]
            for piece in chosen
        )
        blob = store.begin(selection.digest, selection.pieces)
        come_again(store, packed, blob.digest)
        missing.selected[pack] = SelectedPack(selection, blob)
        flip(blob.path, selection.position(need.chunks[2].offset, 1) + 5)
        with pytest.raises(Damaged) as caught:
            store.trees.fill(missing)
        assert caught.value.blob == blob.digest
        assert len(come_again(store, packed, blob.digest)) == 1
        assert store.trees.fill(missing).missing == 0
        store.trees.finish(missing)
    check(store, packed)


@pytest.mark.parametrize("place", [0.0, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize(
    "which", [lambda packed: packed.root, lambda packed: packed.catalogs[0]], ids=["root", "catalog"]
)
def test_a_root_and_a_catalog_that_changed_on_the_disk_come_again(
    store: BlobStore, which: Callable[[Packed], Digest], place: float
) -> None:
    """Wherever the bit is: in what is decompressed, and in what would still decode."""
    packed = Publisher().pack({**SMALL, b"big": BIG})
    bring(store, packed, [*packed.small, *packed.packs])
    digest = which(packed)
    flip(stored(store, digest).path, int(place * len(packed.blobs[digest])))
    with pytest.raises(Damaged, match=f"{digest} changed on the disk"):
        store.trees.missing(packed.root, packed.catalogs)
    assert not any(blob.in_use for blob in store.blobs()) and not store.usage().bytes_expected
    come_again(store, packed, digest)
    with store.trees.missing(packed.root, packed.catalogs) as missing:
        assert store.trees.fill(missing).missing == 0
        store.trees.finish(missing)
    check(store, packed)


def test_a_draft_that_changed_on_the_disk_is_begun_again(store: BlobStore) -> None:
    """The end of a content came first, and its bytes changed before all of it was read again."""
    packed = Publisher().pack({b"big": BIG})
    bring(store, packed, packed.small)
    (pack,) = packed.packs
    data = packed.blobs[pack]
    pieces = PieceList.of_stream(BytesIO(data), len(data))
    with store.trees.missing(packed.root, packed.catalogs) as missing:
        blob = store.begin(pack, pieces)
        for piece in range(pieces.layout.count // 2, pieces.layout.count):
            start = pieces.layout.offset(piece)
            assert blob.write(piece, data[start : start + pieces.layout.length(piece)])
        assert store.trees.fill(missing).missing == 1
        (assembly,) = missing.assemblies.values()
        temporary = assembly._temporary
        assert temporary is not None
        os.pwrite(temporary.fd, b"?", len(BIG) - 5)
        come_again(store, packed, pack)
        with pytest.raises(Damaged):
            store.trees.fill(missing)
    with store.trees.missing(packed.root, packed.catalogs) as missing:
        assert store.trees.fill(missing).missing == 0
        store.trees.finish(missing)
    check(store, packed)


def test_what_verifies_and_does_not_match_is_the_fault_of_the_package(store: BlobStore) -> None:
    """A pack that lies keeps its pieces: no pull would bring others."""
    packed = Publisher().pack(SMALL)
    bring(store, packed, packed.small)
    (pack,) = packed.packs
    data = bytearray(packed.blobs[pack])
    data[50] ^= 1
    pieces = PieceList.of_stream(BytesIO(data), len(data))
    blob = store.begin(pack, pieces)
    for piece in range(pieces.layout.count):
        start = pieces.layout.offset(piece)
        assert blob.write(piece, data[start : start + pieces.layout.length(piece)])
    blob.finish()
    missing = store.trees.missing(packed.root, packed.catalogs)
    with missing, pytest.raises(Corrupt, match="does not hold the chunk"):
        store.trees.fill(missing)
    assert blob.complete
