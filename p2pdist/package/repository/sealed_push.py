"""Pushing a package encrypted: what the origin gets of it is a sealed package
(p2pdist/model/sealed_package.py).

Each push encrypts by a new key, so the same layer would be another blob each time. The layout keeps
a record: which encrypted blob a blob became, and by the key of which package. A later push takes
the encrypted blobs that are at the origin still, and the wrapped key from the package there, if it
is for the same recipient. The record holds no key.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec

from p2pdist.encryption import check_recipient, encrypted, new_key, wrap
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import UNDECODABLE, Corrupt, DiskFull, NotFound, P2PDistError, UsageError, remedy_of
from p2pdist.model.manifest import (
    DOCUMENT_BYTES_MAX,
    MANIFEST_TYPE,
    PIECES_DIGEST,
    PIECES_SIZE,
    PIECES_TYPE,
    SEALED_TYPE,
    Descriptor,
    Manifest,
    Reference,
    decode_manifest,
    encode_manifest,
    parse_reference,
)
from p2pdist.model.pieces import encoded_size
from p2pdist.model.sealed_package import (
    DOCUMENTS_BYTES_MAX,
    KEYS_MAX,
    SEALED_CONFIG_TYPE,
    SealedConfig,
    WrappedKey,
    decode_sealed_config,
    encode_contents,
    encode_sealed_config,
    opened_manifest,
    sealed_size,
)
from p2pdist.package.repository.contract import LocalRepository, OnProgress, read_content, read_manifest
from p2pdist.package.repository.push import Item, Pushed, Sender, Target, document_item

RECORD = "sealed.json"
RECORD_BYTES_MAX = 64 << 20
WRITE_BYTES = 1 << 20
NOWHERE = Path("/nonexistent")
"""The source of a blob that is at the origin."""


class Encrypted(msgspec.Struct, frozen=True):
    """The encrypted blob that a blob became, by which key, and in which package that is wrapped."""

    digest: Digest
    size: int
    pieces: Digest
    piece_size: int
    key: str
    package: str


def _read_record(layout: LocalRepository) -> dict[Digest, Encrypted]:
    """What was pushed from a layout; nothing where that cannot be read, or is over the limit: then
    all is encrypted anew."""
    try:
        with (layout.directory / RECORD).open("rb") as file:
            data = file.read(RECORD_BYTES_MAX + 1)
        if len(data) > RECORD_BYTES_MAX:
            return {}
        return msgspec.json.decode(data, type=dict[Digest, Encrypted])
    except (OSError, *UNDECODABLE):
        return {}


def _write_record(layout: LocalRepository, pushed: dict[Digest, Encrypted]) -> None:
    """Add what was pushed, as the latest, to what other pushes have written by now; the earlier
    half goes while that is over the limit. Raises OSError."""
    handle = os.open(layout.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    path = layout.directory / RECORD
    temporary = path.with_name(f".{RECORD}.{os.getpid()}")
    try:
        with contextlib.suppress(OSError):  # where there are no locks, pushes at once may lose records
            fcntl.flock(handle, fcntl.LOCK_EX)
        record = _read_record(layout)
        for digest in pushed:
            record.pop(digest, None)
        record |= pushed
        while len(data := msgspec.json.encode(record)) > RECORD_BYTES_MAX:
            record = dict(islice(record.items(), -(-len(record) // 2), None))
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        os.close(handle)


@dataclass(slots=True)
class _Part:
    """An encrypted blob of the package to be: what is said of it, and what is sent."""

    blob: Descriptor
    key: str
    package: str
    items: tuple[Item, ...]


class _Hashed:
    """A file that is read in order, and the SHA-256 of what was read."""

    def __init__(self, source: BinaryIO) -> None:
        self._source, self._hash = source, hashlib.sha256()

    def read(self, length: int) -> bytes:
        data = self._source.read(length)
        self._hash.update(data)
        return data

    def digest(self) -> Digest:
        return Digest(f"sha256:{self._hash.hexdigest()}")


class _Sealing:
    """One push: `key` is its own, `name` that of the key."""

    def __init__(
        self, layout: LocalRepository, origin: Target, recipient: str, scratch: Path, reference: Reference
    ) -> None:
        self._layout, self._origin, self._scratch, self._reference = layout, origin, scratch, reference
        self._recipient = recipient
        self._name, self._key = new_key()
        self._record = _read_record(layout)
        self._wrapped: dict[str, dict[str, WrappedKey]] = {}
        """The wrapped keys of packages at the origin."""
        self.keys = {self._name: wrap(self._key, recipient)}
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End what threads do for this push."""
        self._stopped.set()

    async def part(self, blob: Descriptor, on_bytes: Callable[[int], None]) -> _Part:
        """The encrypted blob of a blob of the layout. Raises NotFound where the layout does not
        have it."""
        known = self._record.get(blob.digest)
        if known is not None and await self._there(known, blob):
            on_bytes(blob.size)
            described = _described(known)
            lists = Descriptor(PIECES_TYPE, known.pieces, encoded_size(described.layout))
            return _Part(described, known.key, known.package, (Item(described, NOWHERE), Item(lists, NOWHERE)))
        path = self._layout.blob_path(blob.digest)
        if not path.exists():
            raise NotFound(
                f"blob {blob.digest} is not in {self._layout.url}, and only what is there can be encrypted",
                remedy="Pack the base package there as well",
            )
        return await asyncio.to_thread(self._encrypt, path, blob.digest, blob.size, on_bytes)

    async def _there(self, known: Encrypted, blob: Descriptor) -> bool:
        """Whether an encrypted blob is at the origin with its piece list, and its key for the
        recipient."""
        if known.size != sealed_size(blob.size):
            return False
        for digest, size in ((known.digest, known.size), (known.pieces, encoded_size(_described(known).layout))):
            if await self._origin.size(digest) != size:
                return False
        wrapped = (await self._keys_at_origin(known.package)).get(known.key)
        if wrapped is None or wrapped.recipient != self._recipient:
            return False
        if known.key not in self.keys and len(self.keys) >= KEYS_MAX:
            return False  # it is encrypted anew, by the key of this push
        self.keys[known.key] = wrapped
        return True

    async def _keys_at_origin(self, package: str) -> dict[str, WrappedKey]:
        if package not in self._wrapped:
            try:
                _, manifest, _ = await read_manifest(parse_reference(package), [self._origin])
                data = await self._origin.read(manifest.config.digest, limit=DOCUMENT_BYTES_MAX)
                self._wrapped[package] = decode_sealed_config(data, manifest).keys
            except P2PDistError:  # it is another package now, or gone
                self._wrapped[package] = {}
        return self._wrapped[package]

    def documents(self, data: bytes) -> _Part:
        """The encrypted blob of the package's documents. Raises UsageError for more than hosts
        take."""
        if sealed_size(len(data)) > DOCUMENTS_BYTES_MAX:
            raise UsageError(
                f"manifest, config and piece lists have {len(data)} bytes, and may have {DOCUMENTS_BYTES_MAX} encrypted",
                remedy="Split the package",
            )
        path = self._scratch / "documents"
        try:
            path.write_bytes(data)
        except OSError as error:
            raise self._failure(error, len(data)) from error
        return self._encrypt(path, digest_of(data), len(data), lambda count: None)

    def _encrypt(self, path: Path, digest: Digest, size: int, on_bytes: Callable[[int], None]) -> _Part:
        """Encrypt a file. Raises Corrupt where it is not what `digest` names: nobody could tell
        from the encrypted blob, and the record would keep the mistake. Raises DiskFull."""
        try:
            return self._encrypt_file(path, digest, size, on_bytes)
        except OSError as error:
            raise self._failure(error, size) from error

    def _failure(self, error: OSError, size: int) -> P2PDistError:
        """What an error means that met the encryption of so many bytes."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            place, needed = self._layout.directory, sealed_size(size)
            return DiskFull.on(str(place), os.statvfs(place), needed=needed, code=error.errno, kept=False)
        return P2PDistError(
            f"cannot encrypt {self._reference} in {self._layout.url}: {error.strerror}", remedy=remedy_of(error)
        )

    def _encrypt_file(self, path: Path, digest: Digest, size: int, on_bytes: Callable[[int], None]) -> _Part:
        output = self._scratch / f"encrypted-{path.name}"
        with path.open("rb") as source, output.open("xb", buffering=WRITE_BYTES) as file:
            read = _Hashed(source)
            for chunk in encrypted(read, size, self._key):
                if self._stopped.is_set():
                    raise P2PDistError("encrypting was cancelled")
                file.write(chunk)
                on_bytes(len(chunk))
        if read.digest() != digest:
            raise Corrupt(f"{digest} was altered in {self._layout.url}", remedy="Pack the package again")
        content = read_content(output, stopped=self._stopped)
        described = content.descriptor(SEALED_TYPE)
        items = (Item(described, output), document_item(content.pieces.encode(), PIECES_TYPE))
        return _Part(described, self._name, str(self._reference), items)

    def note(self, blobs: list[Descriptor], parts: list[_Part]) -> None:
        """Add what was pushed to the record. Raises P2PDistError."""
        pushed = {
            blob.digest: Encrypted(
                part.blob.digest,
                part.blob.size,
                part.blob.pieces_digest,
                part.blob.layout.piece_size,
                part.key,
                str(self._reference),
            )
            for blob, part in zip(blobs, parts, strict=True)
        }
        try:
            _write_record(self._layout, pushed)
        except OSError as error:
            raise P2PDistError(
                f"{self._reference} was pushed, and {self._layout.directory / RECORD} cannot be written: {error.strerror}",
                remedy=f"{remedy_of(error)}; as it is, the next push encrypts and sends everything anew",
            ) from error


def _described(known: Encrypted) -> Descriptor:
    annotations = {PIECES_DIGEST: str(known.pieces), PIECES_SIZE: str(known.piece_size)}
    return Descriptor(SEALED_TYPE, known.digest, known.size, annotations)


async def push_encrypted(
    reference: Reference,
    layout: LocalRepository,
    origin: Target,
    recipient: str,
    *,
    on_progress: OnProgress | None = None,
) -> Pushed:
    """Send a package from the local layout to the origin, encrypted for `recipient`. While it runs,
    what is new lies in the layout encrypted as well. All of the package must be in the layout.

    Raises UsageError for what is no recipient or cannot be encrypted, and what `push` raises.
    """
    started, recipient = time.monotonic(), check_recipient(recipient)
    if not reference.tag:
        raise UsageError(f"{reference} names a digest, which encrypting changes", remedy="Name the package as name:tag")
    if layout.url == origin.url:
        raise UsageError(f"the origin {origin.url} is the layout, which is not encrypted", remedy="Name another origin")
    described, manifest, _ = await read_manifest(reference, [layout])
    if manifest.encrypted:
        raise UsageError(f"{reference} is encrypted already", remedy="Push it as it is, without --encrypt-to")
    blobs, report = list(manifest.blobs), _reporter(on_progress, sum(blob.size for blob in manifest.blobs))
    with layout.temporary_directory() as scratch:
        sealing = _Sealing(layout, origin, recipient, scratch, reference)
        try:
            plain = await layout.read(described.digest)
            named = {document.digest: document for document in manifest.documents()}
            documents = tuple([await layout.read(digest) for digest in named])
            first = await asyncio.to_thread(sealing.documents, encode_contents(plain, documents))
            parts = [first, *[await sealing.part(blob, report) for blob in blobs]]
            sealed, config = _assembled(manifest, parts, sealing.keys)
            items = [item for part in parts for item in part.items] + [config]
            sender = Sender(origin, layout.url, sum(item.blob.size for item in (*items, sealed)), on_progress)
            await sender.deliver(items, sealed, reference)
        finally:
            sealing.stop()
        await asyncio.to_thread(sealing.note, blobs, parts[1:])
    seconds = time.monotonic() - started
    return Pushed(reference, sealed.blob.digest, sealed.blob.size, sender.sent, sender.skipped, seconds)


def _assembled(plain: Manifest, parts: list[_Part], keys: dict[str, WrappedKey]) -> tuple[Item, Item]:
    """The manifest and the config of a sealed package. Raises UsageError where hosts could not
    keep it."""
    used = {part.key for part in parts}
    config = encode_sealed_config(
        SealedConfig({name: key for name, key in keys.items() if name in used}, tuple(part.key for part in parts))
    )
    described = document_item(config, SEALED_CONFIG_TYPE)
    lists = tuple(part.items[1].blob for part in parts)
    manifest = Manifest(described.blob, (), lists, tuple(part.blob for part in parts))
    try:
        decode_manifest(encode_manifest(opened_manifest(plain, manifest)))
    except Corrupt as error:
        raise UsageError(f"hosts could not open the package: {error.what}", remedy="Pack it in fewer blobs") from error
    return document_item(encode_manifest(manifest), MANIFEST_TYPE), described


def _reporter(on_progress: OnProgress | None, total: int) -> Callable[[int], None]:
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done = min(total, done + count)
        if on_progress:
            on_progress("encrypting", done, total)

    return report


async def rewrap(
    reference: Reference, origin: Target, unwrapped: Callable[[WrappedKey], bytes], recipient: str
) -> Digest | None:
    """Wrap the keys of a sealed package at the origin for another recipient: a new config and
    manifest, and the tag on it; blobs stay. Returns the digest of the manifest, None where nothing
    changed. Raises Conflict where the package is pushed meanwhile."""
    recipient = check_recipient(recipient)
    described, manifest, _ = await read_manifest(reference, [origin])
    if not manifest.is_sealed:
        raise UsageError(
            f"{reference} at {origin.url} is not encrypted", remedy="p2pdist push --encrypt-to encrypts it"
        )
    config = decode_sealed_config(await origin.read(manifest.config.digest), manifest)
    if all(key.recipient == recipient for key in config.keys.values()):
        return None
    keys = {name: wrap(unwrapped(key), recipient) for name, key in config.keys.items()}
    new = document_item(encode_sealed_config(SealedConfig(keys, config.parts)), SEALED_CONFIG_TYPE)
    body = document_item(encode_manifest(Manifest(new.blob, (), manifest.piece_lists, manifest.parts)), MANIFEST_TYPE)
    there = [Item(blob, NOWHERE) for blob in (*manifest.blobs, *manifest.piece_lists)]
    sender = Sender(origin, origin.url, sum(item.blob.size for item in (*there, new, body)), None)
    await sender.deliver([*there, new], body, reference, replaces=described.digest)
    return body.blob.digest
