"""Sealed packages on this host (p2pdist/model/sealed_package.py): what was encrypted is fetched as
any blob, and opened into the store.

A blob is decrypted while it arrives, piece by piece, into a blob of its own, by the digest and the
piece list that the package had before it was sealed, so every piece verifies twice: the encrypted
one as it arrives, and the plain one as it is written. A pull that was killed goes on with the
pieces that it wrote. The opened blobs are marked in the store before any of them is begun, and no
other host gets them.

Keys come from the tracker, are in memory for as long as the pull that needs them, and are written
nowhere. A package that is open on this host is shown without them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from weakref import WeakValueDictionary

import msgspec

from p2pdist.agent.tasks import in_thread
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.encryption import EncryptedBlob, decrypted_from
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import UNDECODABLE, Corrupt, NotFound, Refused, TooLarge, Unavailable
from p2pdist.model.manifest import Descriptor, Manifest, Reference, decode_manifest, encode_manifest
from p2pdist.model.messages import PackageKeys
from p2pdist.model.pieces import PieceList
from p2pdist.model.sealed_package import (
    DOCUMENTS_BYTES_MAX,
    SealedConfig,
    decode_contents,
    decode_sealed_config,
    encrypted_by,
    is_opened_from,
    opened_manifest,
    sealed_size,
)
from p2pdist.model.selection import Selection
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore, begin_opened
from p2pdist.store.trees.damage import damaged

AT_ONCE = 2
"""Blobs that are decrypted at once, each in a thread."""

STEP_BYTES = 4 << 20
"""So much is decrypted by a thread at a time."""

PLAIN_WAIT_S = 60.0
PLAIN_PAUSE_S = 0.1
"""A blob that a pull brings for a package that is not encrypted is waited for, and looked at."""

Come = Callable[[int], Awaitable[None]]
"""Returns once a piece of a blob is here."""

Follow = Callable[[Blob, Come], Awaitable[None]]
"""Uses a blob while it arrives."""

FetchEncrypted = Callable[[Descriptor, ExitStack, Follow | None], Awaitable[Blob]]
"""Brings an encrypted blob into the store, and holds it by the stack. What follows it is called
unless the blob is complete already."""

AskKeys = Callable[[], Awaitable[Mapping[str, bytes]]]
"""Gives the keys of a package, by id."""


class Sealed:
    """What all openings of one store share. On the event loop."""

    def __init__(self, store: BlobStore) -> None:
        self.store = store
        self.slots = asyncio.Semaphore(AT_ONCE)
        self.bytes_decrypted = 0
        """Of blobs that were opened since the start; a metric."""
        self._locks: WeakValueDictionary[Digest, asyncio.Lock] = WeakValueDictionary()

    def lock(self, digest: Digest) -> asyncio.Lock:
        """Is held while a blob is being opened."""
        lock = self._locks.get(digest)
        if lock is None:
            lock = self._locks[digest] = asyncio.Lock()
        return lock

    def opened(self, digest: Digest, sealed: Manifest, name: str) -> tuple[Digest, Manifest] | None:
        """The opened manifest of the sealed package `digest` that was opened here by this name,
        whatever has been evicted since, with its digest. A package whose keys were wrapped anew is
        the same; the same blobs by another name are not: whether this host may open that, the
        tracker says. Blocks."""
        records = self.store.opened
        for opened, manifest in records.packages().items():
            named = records.was_given(opened, name) and is_opened_from(manifest, sealed)
            if named and self.store.document_size(opened):
                records.record_manifest(digest, opened, name)
                return opened, manifest
        return None

    def whole(self, opened: Manifest) -> bool:
        """Whether all layers of an opened package are here. Blocks."""
        return self.store.opened.is_whole(opened, self.store.trees.complete)


async def ask_keys(session: TrackerSession, reference: Reference) -> Mapping[str, bytes]:
    """The keys of a sealed package, by id, from the tracker of a session. Raises NotFound, Refused,
    Corrupt, Unavailable."""
    if not session.connected:
        raise Unavailable(f"no tracker answers, which gives the keys of {reference}")
    if not session.secured:
        raise Refused(
            f"{reference} is encrypted, and its keys come over TLS alone",
            remedy="Run the fleet with access: p2pdist tracker --access, p2pdist agent --join-file",
        )
    data = await session.get("/v1/keys", {"reference": str(reference), **session.place})
    try:
        return msgspec.json.decode(data, type=PackageKeys).keys
    except UNDECODABLE:  # its words may hold a key
        raise Corrupt(f"the tracker {session.url} sent no keys for {reference}") from None


class Opening:
    """A sealed package that one pull opens by a name. `holds` holds what is opened."""

    def __init__(
        self,
        sealed: Sealed,
        name: str,
        digest: Digest,
        manifest: Manifest,
        fetch: FetchEncrypted,
        ask_keys: AskKeys,
        holds: ExitStack,
    ) -> None:
        """`digest` and `manifest` are those of the sealed package."""
        self._sealed, self._store = sealed, sealed.store
        self._name, self._digest, self._manifest = name, digest, manifest
        self._fetch, self._ask_keys, self._holds = fetch, ask_keys, holds
        self._encrypted: Mapping[Digest, Descriptor] = {}
        """The encrypted blob of each blob of the package."""
        self._keys: Mapping[Digest, bytes | None] | None = None
        """The key of each encrypted blob; None where the tracker gave none."""
        self._asking = asyncio.Lock()
        self._turns = asyncio.Semaphore(1)
        """One blob is opened at a time, where a store has no room for all of them and their
        encrypted forms."""

    async def manifest(self) -> tuple[Digest, Manifest]:
        """The opened manifest, with its digest; its documents are in the store, but for those of
        blobs that nothing needs. Raises what fetching raises, Corrupt, and what asking for keys
        raises."""
        known = await asyncio.to_thread(self._known)
        digest, manifest = known if known is not None else await self._read()
        self._encrypted = encrypted_by(manifest)
        if sum(blob.size for blob in manifest.blobs) <= self._store.capacity:
            self._turns = asyncio.Semaphore(len(manifest.blobs))
        return digest, manifest

    def _known(self) -> tuple[Digest, Manifest] | None:
        """The opened manifest, where nothing must be read to use it. Piece lists go when their
        blobs are evicted."""
        opened = self._sealed.opened(self._digest, self._manifest, self._name)
        if opened is None or self._store.read_document(opened[1].config.digest) is None:
            return None
        lists = (self._store.read_document(blob.pieces_digest) for blob in opened[1].blobs)
        return opened if self._sealed.whole(opened[1]) or all(data is not None for data in lists) else None

    async def _read(self) -> tuple[Digest, Manifest]:
        """Decrypt the documents and store them."""
        part = self._manifest.parts[0]
        if part.size > DOCUMENTS_BYTES_MAX:
            raise Corrupt(f"the documents of an encrypted package have {part.size} bytes, over the limit")
        key = await self._key(part)
        with ExitStack() as hold:
            blob = await self._fetch(part, hold, None)
            async with self._sealed.slots:  # all of them are in memory
                return await asyncio.to_thread(self._store_documents, blob, key)

    def _store_documents(self, blob: Blob, key: bytes) -> tuple[Digest, Manifest]:
        with blob.held():
            plain = decrypted_from(blob.read_range, blob.size, key, blob.digest)
        contents = decode_contents(plain, self._manifest)
        manifest = opened_manifest(contents.manifest, self._manifest)
        try:
            encoded = encode_manifest(manifest)
        except TooLarge as error:  # what was sealed may be within the limits, and this over them
            raise Corrupt(f"when it is open, {error.what}", remedy="Pack it anew, with fewer files") from error
        decode_manifest(encoded)
        documents = [*contents.documents[1:], encoded]
        new = [digest for document in documents if not self._store.document_size(digest := digest_of(document))]
        self._store.opened.record(dict.fromkeys(new, blob.digest))
        self._store.put_documents(documents)
        self._store.opened.record_manifest(self._digest, digest_of(encoded), self._name)
        return digest_of(encoded), manifest

    async def _key(self, part: Descriptor) -> bytes:
        async with self._asking:
            if self._keys is None:
                given, config = await self._ask_keys(), await asyncio.to_thread(self._config)
                parts = zip(self._manifest.parts, config.parts, strict=True)
                self._keys = {described.digest: given.get(name) for described, name in parts}
        key = self._keys.get(part.digest)
        if key is None:
            raise Corrupt(f"the tracker gave no key for {part.digest}", remedy="Push the package again")
        return key

    def _config(self) -> SealedConfig:
        data = self._store.read_document(self._manifest.config.digest)
        if data is None:
            raise NotFound("the config of an encrypted package is gone from the store", remedy="Pull again")
        return decode_sealed_config(data, self._manifest)

    async def blob(self, blob: Descriptor, selection: Selection | None = None) -> Blob:
        """A layer or part, opened and held. Raises what fetching raises, Corrupt, Damaged,
        DiskFull."""
        assert selection is None, "a part of an encrypted pack is not fetched alone"
        async with self._turns:
            return await self._open(blob)

    async def _open(self, blob: Descriptor) -> Blob:
        part, lock = self._encrypted[blob.digest], self._sealed.lock(blob.digest)
        if lock.locked():  # by a pull that may wait longer than this one does
            with ExitStack() as hold:
                await self._fetch(part, hold, None)
        async with lock:
            here = self._store.get(blob.digest)
            if here is not None and here.complete and here.pieces_digest == blob.pieces_digest:
                with suppress(NotFound):  # evicted this very moment
                    self._holds.enter_context(here.held())
                    return here
            key = await self._key(part)  # a host that gets none fetches nothing
            plain = await self._begun(blob, part)
            self._holds.callback(plain.release)
            if plain.complete:  # by the pull that was waited for
                return plain
            with ExitStack() as hold:  # once it is open, the encrypted one may make room
                encrypted = await self._fetch(part, hold, partial(self._follow, plain, key))
                if not plain.complete:  # the encrypted one was here
                    await self._follow(plain, key, encrypted, _is_here)
        return plain

    async def _begun(self, blob: Descriptor, part: Descriptor) -> Blob:
        """The blob that is to be written, held. Raises Unavailable while a pull brings it for a
        package that is not encrypted."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PLAIN_WAIT_S
        while (plain := await in_thread(partial(self._begin, blob, part), _release)) is None:
            if loop.time() >= deadline:
                raise Unavailable(
                    f"{blob.digest} is being pulled for a package that is not encrypted",
                    remedy="Wait for that pull, or cancel it",
                )
            await asyncio.sleep(PLAIN_PAUSE_S)
        return plain

    def _begin(self, blob: Descriptor, part: Descriptor) -> Blob | None:
        data = self._store.read_document(blob.pieces_digest)
        if data is None:
            raise Corrupt(f"the piece list of {blob.digest} is gone from the store", remedy="Pull again")
        pieces = PieceList.decode(data)
        if pieces.layout != blob.layout:
            raise Corrupt(f"the piece list of {blob.digest} is for a blob of another size")
        return begin_opened(self._store, blob.digest, pieces, part.digest)

    async def _follow(self, plain: Blob, key: bytes, encrypted: Blob, piece: Come) -> None:
        """Decrypt a blob while the encrypted one arrives."""
        layout, come, stopped = plain.layout, 0, threading.Event()
        missing, step = plain.have.missing(), max(1, STEP_BYTES // layout.piece_size)
        for first in range(0, len(missing), step):
            pieces = missing[first : first + step]
            end = min(encrypted.size, sealed_size(layout.offset(pieces[-1] + 1)))
            for number in range(come, encrypted.layout.covering(0, end).stop):
                await piece(number)
                come = number + 1
            async with self._sealed.slots:
                working = asyncio.ensure_future(asyncio.to_thread(decrypt, plain, encrypted, key, pieces, stopped))
                try:
                    self._sealed.bytes_decrypted += await asyncio.shield(working)
                except asyncio.CancelledError:
                    stopped.set()
                    await asyncio.wait([working])  # the store may close after this
                    if not working.cancelled():
                        working.exception()
                    raise
        await asyncio.to_thread(plain.finish)


def _release(blob: Blob | None) -> None:
    if blob is not None:
        blob.release()


async def _is_here(piece: int) -> None:
    """Nothing: the blob is complete."""


def decrypt(plain: Blob, encrypted: Blob, key: bytes, pieces: Sequence[int], stopped: threading.Event) -> int:
    """Decrypt these pieces of a blob, unless `stopped`; returns bytes. Raises Damaged where the
    encrypted blob changed on the disk, Corrupt where it does not open or holds something else,
    DiskFull."""
    layout, count = plain.layout, 0
    with plain.held(), encrypted.held():
        try:
            source = EncryptedBlob(encrypted.read_range, plain.size, key, encrypted.digest)
            for piece in pieces:
                if stopped.is_set():
                    break
                if not plain.write(piece, source.plain(layout.offset(piece), layout.length(piece))):
                    raise Corrupt(f"{encrypted.digest} does not hold piece {piece} of {plain.digest}")
                count += layout.length(piece)
        except Corrupt:
            if encrypted.verify(drop=True):
                raise damaged(encrypted) from None
            raise
    return count
