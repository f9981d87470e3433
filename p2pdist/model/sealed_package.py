"""Sealed packages: packages of which storage, trackers and peers see ciphertext alone.

A sealed package is a manifest whose parts are all encrypted blobs. The first holds the documents of
the package that was sealed: its manifest, config and piece lists, so that nobody without its key
learns what files, programs or kinds of layers it has. The others are the blobs of that manifest,
in its order. Digests, pieces, swarms and tickets are those of ciphertext, as of any blob.

An encrypted blob is the payload of an age file with a 32-byte key (C2SP agead): 16 random bytes, by
which HKDF-SHA-256 derives a payload key that no other blob has, then chunks of 64 KiB, each with a
tag of 16 bytes, by ChaCha20-Poly1305. The nonce of a chunk is its number and whether it is the
last, so chunks that are cut, swapped or moved to another blob do not open. A piece of plaintext
begins where a chunk does, since its size is a power of two of 64 KiB or more.

The config says by which key each part opens. Keys are wrapped by age, for the recipient of a
namespace. Wrapping them for another recipient changes config and manifest, and no blob.

A host that has opened a package keeps an opened manifest: that of the package with the encrypted
blobs as further parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import UNDECODABLE, Corrupt
from p2pdist.model.manifest import SEALED_MAX, SEALED_TYPE, Descriptor, Manifest, decode_manifest

SEALED_CONFIG_TYPE = "application/vnd.p2pdist.sealed.config.v1+json"

KEY_BYTES = 32
NONCE_BYTES = 16
TAG_BYTES = 16
CHUNK_BYTES = 64 << 10

RECIPIENT_MAX = 256
WRAPPED_MAX = 1024
"""Characters of a wrapped key: 328 and what age adds at random, but not dozens of recipients, each
of which would cost a tracker a multiplication on the curve."""
KEYS_MAX = 1024
"""Keys of one package: each push adds one at most."""
CONFIG_BYTES_MAX = 2 << 20
"""Of a config: what so many keys and parts take. A decoder counts them when all are in memory."""
DOCUMENTS_BYTES_MAX = 64 << 20
"""Of the documents of a sealed package together."""

_KEY_ID = re.compile(r"[0-9a-f]{16}\Z")


def chunk_count(size: int) -> int:
    """Chunks of `size` bytes of plaintext; an empty one has one, which is empty."""
    return max(1, -(-size // CHUNK_BYTES))


def sealed_size(size: int) -> int:
    """Bytes of the encrypted blob of `size` bytes of plaintext."""
    return NONCE_BYTES + size + TAG_BYTES * chunk_count(size)


class WrappedKey(msgspec.Struct, frozen=True):
    """A key, readable for the holder of an age identity. `recipient` names that; `wrapped` is an
    age file in base64."""

    recipient: Annotated[str, Meta(max_length=RECIPIENT_MAX)]
    wrapped: Annotated[str, Meta(max_length=WRAPPED_MAX)]


class SealedConfig(msgspec.Struct, frozen=True):
    """The config of a sealed package: its keys by id, and the id of the key of each part."""

    keys: Annotated[dict[str, WrappedKey], Meta(max_length=KEYS_MAX)]
    parts: Annotated[tuple[str, ...], Meta(max_length=SEALED_MAX)]


def encode_sealed_config(config: SealedConfig) -> bytes:
    """Canonical bytes."""
    return msgspec.json.encode(config, order="deterministic")


def decode_sealed_config(data: bytes, manifest: Manifest) -> SealedConfig:
    """The config of a sealed package with this manifest. Raises Corrupt."""
    if len(data) > CONFIG_BYTES_MAX:
        raise Corrupt(f"{digest_of(data)} has {len(data)} bytes, more than a config of an encrypted package has")
    try:
        config = msgspec.json.decode(data, type=SealedConfig)
    except UNDECODABLE as error:
        raise Corrupt(f"{digest_of(data)} is no config of an encrypted package: {error}") from error
    if len(config.parts) != len(manifest.parts) or not set(config.parts) <= config.keys.keys():
        raise Corrupt(f"the config {digest_of(data)} does not say by which keys its package opens")
    if not all(map(_KEY_ID.match, config.keys)):
        raise Corrupt(f"the config {digest_of(data)} holds an impossible name of a key")
    return config


class _Documents(msgspec.Struct, array_like=True):
    manifest: bytes
    documents: Annotated[tuple[bytes, ...], Meta(max_length=SEALED_MAX)]
    """A config, and a piece list of each blob at most."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What was sealed: the manifest, its digest, and the documents that it names with itself."""

    digest: Digest
    manifest: Manifest
    documents: tuple[bytes, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Documents)


def encode_contents(manifest: bytes, documents: tuple[bytes, ...]) -> bytes:
    """The plaintext of the first part: a manifest and the documents that it names."""
    return _encoder.encode(_Documents(manifest, documents))


def decode_contents(data: bytes | bytearray, sealed: Manifest) -> Contents:
    """The plaintext of the first part of the package `sealed`. Raises Corrupt, also where the parts
    are not those of what was sealed."""
    try:
        plain = _decoder.decode(data)
    except UNDECODABLE as error:
        raise Corrupt("what an encrypted package holds first are no documents") from error
    manifest, digest = decode_manifest(plain.manifest), digest_of(plain.manifest)
    if manifest.encrypted or not manifest.layers:
        raise Corrupt(f"what was encrypted as the package {digest} is none")
    named = {document.digest for document in manifest.documents()}
    if named != {digest_of(document) for document in plain.documents}:
        raise Corrupt(f"an encrypted package does not hold the documents of {digest}")
    parts = {part.digest for part in sealed.parts}
    if any(blob.digest in parts for blob in manifest.blobs):
        raise Corrupt(f"an encrypted package names its own parts as blobs of {digest}")
    described = {(blob.digest, blob.size, blob.pieces_digest) for blob in (*manifest.layers, *manifest.parts)}
    if len(described) != len(manifest.blobs):
        raise Corrupt(f"an encrypted package names a blob of {digest} twice, as different ones")
    expected = [sealed_size(blob.size) for blob in manifest.blobs]
    if expected != [part.size for part in sealed.parts[1:]]:
        raise Corrupt(f"an encrypted package does not hold the blobs of {digest}")
    return Contents(digest, manifest, (plain.manifest, *plain.documents))


def opened_manifest(contents: Manifest, sealed: Manifest) -> Manifest:
    """The manifest by which a host keeps an opened package."""
    lists = {item.digest: item for item in (*contents.piece_lists, *sealed.piece_lists)}
    parts = (*contents.parts, *sealed.parts)
    return Manifest(contents.config, contents.layers, tuple(lists.values()), parts, contents.artifact_type)


def is_opened_from(manifest: Manifest, sealed: Manifest) -> bool:
    """Whether a manifest of this host is that of the package `sealed`, opened."""
    return bool(manifest.encrypted) and not manifest.is_sealed and manifest.encrypted == sealed.parts


def encrypted_by(manifest: Manifest) -> Mapping[Digest, Descriptor]:
    """The encrypted blob of each layer and part of an opened manifest."""
    plain = [blob for blob in manifest.blobs if blob.media_type != SEALED_TYPE]
    return {blob.digest: part for blob, part in zip(plain, manifest.encrypted[1:], strict=True)}
