"""Encrypting and decrypting: the blobs of sealed packages, and the keys by which they open.

The format stands at p2pdist/model/sealed_package.py. Ciphers come from `cryptography`, and age from
`pyrage`, which hosts that only open blobs do not need.
"""

from __future__ import annotations

import base64
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from p2pdist.model.errors import Corrupt, P2PDistError, Refused, UsageError, printable
from p2pdist.model.sealed_package import (
    CHUNK_BYTES,
    KEY_BYTES,
    NONCE_BYTES,
    TAG_BYTES,
    WrappedKey,
    chunk_count,
    sealed_size,
)

_STORED_BYTES = CHUNK_BYTES + TAG_BYTES
_STEP_BYTES = 8 * CHUNK_BYTES
"""So much of a whole blob is decrypted at a time."""


class Readable(Protocol):
    """What gives bytes in order."""

    def read(self, length: int, /) -> bytes:
        """The next bytes; fewer than `length` at the end."""


def new_key() -> tuple[str, bytes]:
    """A random key, and a random name for it."""
    return secrets.token_hex(8), os.urandom(KEY_BYTES)


def _cipher(key: bytes, nonce: bytes) -> ChaCha20Poly1305:
    assert len(key) == KEY_BYTES and len(nonce) == NONCE_BYTES
    return ChaCha20Poly1305(HKDF(SHA256(), 32, salt=nonce, info=b"payload").derive(key))


def _chunk_nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def encrypted(source: Readable, size: int, key: bytes) -> Iterator[bytes]:
    """The encrypted blob of the next `size` bytes of `source`, chunk by chunk. Raises Corrupt where
    there are fewer."""
    nonce = os.urandom(NONCE_BYTES)
    cipher, count = _cipher(key, nonce), chunk_count(size)
    yield nonce
    for number in range(count):
        length = min(CHUNK_BYTES, size - number * CHUNK_BYTES)
        chunk = source.read(length)
        if len(chunk) != length:
            raise Corrupt("what is being encrypted became shorter meanwhile", remedy="Pack it again")
        yield cipher.encrypt(_chunk_nonce(number, number == count - 1), chunk, None)


class EncryptedBlob:
    """An encrypted blob of `size` bytes of plaintext, read in any order. `read` gives bytes of the
    blob, by offset and length. `name` is for messages."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, key: bytes, name: str) -> None:
        self._read, self._size, self._name = read, size, name
        self._count = chunk_count(size)
        self._cipher = _cipher(key, read(0, NONCE_BYTES))

    def plain(self, start: int, length: int) -> bytes:
        """Plaintext; `start` is that of a chunk, and the end that of one, too. Raises Corrupt for
        what does not open by the key at this place."""
        assert start % CHUNK_BYTES == 0, "plaintext is read by chunks"
        first, after = start // CHUNK_BYTES, -(-(start + length) // CHUNK_BYTES)
        begin = NONCE_BYTES + first * _STORED_BYTES
        stored = memoryview(self._read(begin, length + TAG_BYTES * (after - first)))
        chunks = []
        for number in range(first, after):
            at = (number - first) * _STORED_BYTES
            chunks.append(self._open(number, stored[at : at + _STORED_BYTES]))
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _open(self, number: int, stored: memoryview) -> bytes:
        try:
            return self._cipher.decrypt(_chunk_nonce(number, number == self._count - 1), stored, None)
        except InvalidTag as error:
            raise Corrupt(
                f"{self._name} does not open by its key at byte {number * CHUNK_BYTES}",
                remedy="Push the package again, without the file sealed.json of the layout",
            ) from error


def decrypted(data: bytes, key: bytes, name: str) -> bytes:
    """The plaintext of a whole encrypted blob. Raises Corrupt."""
    return bytes(decrypted_from(lambda start, length: data[start : start + length], len(data), key, name))


def decrypted_from(read: Callable[[int, int], bytes], stored: int, key: bytes, name: str) -> bytearray:
    """The plaintext of an encrypted blob of `stored` bytes, which is in memory once. `read` and
    `name` as of EncryptedBlob. Raises Corrupt."""
    size = stored - NONCE_BYTES - TAG_BYTES * max(1, -(-(stored - NONCE_BYTES) // _STORED_BYTES))
    if size < 0 or sealed_size(size) != stored:
        raise Corrupt(f"{name} is no encrypted blob: no plaintext gives {stored} bytes")
    blob, plain = EncryptedBlob(read, size, key, name), bytearray()
    if not size:
        blob._open(0, memoryview(read(NONCE_BYTES, TAG_BYTES)))
    for start in range(0, size, _STEP_BYTES):
        plain += blob.plain(start, min(_STEP_BYTES, size - start))
    return plain


# -- keys


def _age() -> Any:
    try:
        import pyrage
    except ImportError as error:
        raise P2PDistError(
            f"keys of encrypted packages need the package pyrage, which {socket.gethostname()} lacks",
            remedy="pip install 'p2pdist[age]'",
        ) from error
    return pyrage


def new_identity() -> tuple[str, str]:
    """A new age identity (X25519), and its recipient."""
    identity = _age().x25519.Identity.generate()
    return str(identity), str(identity.to_public())


def recipient_of(identity: str) -> str:
    """The recipient of an identity. Raises UsageError."""
    return str(_identity(identity).to_public())


def check_recipient(recipient: str) -> str:
    """The recipient, without blanks around it. Raises UsageError for what is no recipient of
    age."""
    _recipient(recipient)
    return recipient.strip()


def identities_in(text: str) -> tuple[str, ...]:
    """The identities in a file as age-keygen writes it; lines that begin with # are left out."""
    return tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))


def wrap(key: bytes, recipient: str) -> WrappedKey:
    """A key for the holder of the recipient's identity alone. Raises UsageError."""
    wrapped = _age().encrypt(key, [_recipient(recipient)])
    return WrappedKey(recipient, base64.b64encode(wrapped).decode())


def unwrap(wrapped: WrappedKey, identities: Sequence[str]) -> bytes:
    """The key. Raises Refused where none of the identities opens it."""
    age = _age()
    try:
        key: bytes = age.decrypt(
            base64.b64decode(wrapped.wrapped, validate=True), [_identity(identity) for identity in identities]
        )
    except (ValueError, age.DecryptError) as error:
        raise unopened(wrapped, len(identities)) from error
    if len(key) != KEY_BYTES:
        raise Corrupt(f"a key for {printable(wrapped.recipient[:80])} has {len(key)} bytes")
    return key


def unopened(wrapped: WrappedKey, count: int) -> Refused:
    """That none of so many identities opens a key."""
    return Refused(
        f"none of {count} identities opens a key for {printable(wrapped.recipient[:80])}",
        remedy="Name the namespace's identities, also those from before a rotation, or push the package again",
    )


def _recipient(text: str) -> Any:
    age = _age()
    try:
        return age.x25519.Recipient.from_str(text.strip())
    except (ValueError, age.RecipientError) as error:
        raise UsageError(
            f"{text[:80]!r} is no recipient of age", remedy="p2pdist key list prints them; they begin with age1"
        ) from error


def _identity(text: str) -> Any:
    age = _age()
    try:
        return age.x25519.Identity.from_str(text.strip())
    except (ValueError, age.IdentityError) as error:
        raise UsageError(
            "a namespace's key is no identity of age",
            remedy="It begins with AGE-SECRET-KEY-1; p2pdist key create makes one",
        ) from error
