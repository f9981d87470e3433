"""Encrypted blobs: what was written opens, and nothing else does."""

from __future__ import annotations

import io
import os
import tracemalloc
from itertools import cycle, islice

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdist.encryption import (
    EncryptedBlob,
    check_recipient,
    decrypted,
    decrypted_from,
    encrypted,
    identities_in,
    new_identity,
    new_key,
    recipient_of,
    unwrap,
    wrap,
)
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, Refused, UsageError
from p2pdist.model.manifest import Descriptor, Manifest
from p2pdist.model.sealed_package import (
    CHUNK_BYTES,
    CONFIG_BYTES_MAX,
    KEYS_MAX,
    NONCE_BYTES,
    RECIPIENT_MAX,
    SEALED_MAX,
    TAG_BYTES,
    WRAPPED_MAX,
    SealedConfig,
    WrappedKey,
    decode_contents,
    decode_sealed_config,
    encode_contents,
    encode_sealed_config,
    sealed_size,
)

STORED = CHUNK_BYTES + TAG_BYTES
_, KEY = new_key()


def seal(data: bytes, key: bytes = KEY) -> bytes:
    return b"".join(encrypted(io.BytesIO(data), len(data), key))


def opened(blob: bytes, size: int, key: bytes = KEY) -> EncryptedBlob:
    return EncryptedBlob(lambda start, length: blob[start : start + length], size, key, "the blob")


@pytest.mark.parametrize(
    "size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 3 * CHUNK_BYTES + 7]
)
def test_what_was_encrypted_opens(size: int) -> None:
    data = os.urandom(size)
    blob = seal(data)
    assert len(blob) == sealed_size(size)
    assert decrypted(blob, KEY, "x") == data
    assert len(data) < 32 or data[:32] not in blob


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 4 * CHUNK_BYTES), st.integers(0, 4), st.integers(1, 4 * CHUNK_BYTES))
def test_any_stretch_of_chunks_opens_alone(size: int, first: int, length: int) -> None:
    data = os.urandom(size)
    start = first * CHUNK_BYTES
    length = min(length, size - start)
    length -= length % CHUNK_BYTES if start + length != size else 0
    if length > 0:
        assert opened(seal(data), size).plain(start, length) == data[start : start + length]


def test_a_slow_reading_of_the_specification_agrees() -> None:
    """C2SP agead, written out: 16 bytes of nonce, a payload key by HKDF, chunks with a counter."""
    data = os.urandom(2 * CHUNK_BYTES + 5)
    blob = seal(data)
    cipher = ChaCha20Poly1305(HKDF(SHA256(), 32, salt=blob[:16], info=b"payload").derive(KEY))
    chunks = [blob[16 + at : 16 + at + STORED] for at in range(0, len(blob) - 16, STORED)]
    nonces = [b"\0" * 11 + b"\0", b"\0" * 10 + b"\1\0", b"\0" * 10 + b"\2\1"]
    plain = [cipher.decrypt(nonce, chunk, None) for nonce, chunk in zip(nonces, chunks, strict=True)]
    assert b"".join(plain) == data


def test_the_same_bytes_are_never_the_same_blob() -> None:
    data = os.urandom(1000)
    blobs = {seal(data) for _ in range(50)}
    assert len(blobs) == len({blob[:NONCE_BYTES] for blob in blobs}) == 50


def _flip(blob: bytes, at: int) -> bytes:
    return blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :]


def _chunks(blob: bytes) -> list[bytes]:
    return [blob[at : at + STORED] for at in range(NONCE_BYTES, len(blob), STORED)]


DATA = os.urandom(3 * CHUNK_BYTES)
BLOB, OTHER = seal(DATA), seal(os.urandom(3 * CHUNK_BYTES))
HEAD = BLOB[:NONCE_BYTES]
A, B, C = _chunks(BLOB)


@pytest.mark.parametrize(
    ("what", "blob"),
    [
        ("a bit of the nonce", _flip(BLOB, 0)),
        ("a bit of the first chunk", _flip(BLOB, NONCE_BYTES)),
        ("a bit of the last tag", _flip(BLOB, len(BLOB) - 1)),
        ("cut after a chunk", HEAD + A + B),
        ("cut within a chunk", BLOB[:-5]),
        ("a chunk twice", HEAD + A + A + C),
        ("two chunks swapped", HEAD + B + A + C),
        ("the last one first", HEAD + C + A + B),
        ("a chunk of another blob", HEAD + A + _chunks(OTHER)[1] + C),
        ("chunks of another blob under this nonce", HEAD + b"".join(_chunks(OTHER))),
        ("more behind the end", BLOB + A),
        ("nothing", b""),
        ("the nonce alone", HEAD),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # the bytes are others each time
)
def test_nothing_else_opens(what: str, blob: bytes) -> None:
    with pytest.raises(Corrupt):
        decrypted(blob, KEY, what)


def test_a_cut_blob_does_not_open_by_its_old_size() -> None:
    with pytest.raises(Corrupt):
        opened(HEAD + A + B, 2 * CHUNK_BYTES).plain(CHUNK_BYTES, CHUNK_BYTES)


def test_another_key_does_not_open_it() -> None:
    with pytest.raises(Corrupt, match="does not open by its key at byte 0"):
        decrypted(BLOB, new_key()[1], "x")


def test_a_source_that_shrinks_is_told() -> None:
    with pytest.raises(Corrupt, match="shorter"):
        list(encrypted(io.BytesIO(b"abc"), 4, KEY))


# -- keys


def test_the_holder_of_the_identity_alone_unwraps_a_key() -> None:
    identity, recipient = new_identity()
    other, _ = new_identity()
    wrapped = wrap(KEY, recipient)
    assert recipient_of(identity) == recipient == wrapped.recipient
    assert KEY not in wrapped.wrapped.encode()
    assert unwrap(wrapped, [other, identity]) == KEY
    with pytest.raises(Refused):
        unwrap(wrapped, [other])
    with pytest.raises(Refused):
        unwrap(wrap(KEY, recipient).__class__(recipient, "not base64!"), [identity])
    with pytest.raises(Corrupt):
        unwrap(wrap(KEY + b"x", recipient), [identity])


@pytest.mark.parametrize("text", ["", "age1x", "AGE-SECRET-KEY-1X", "ssh-ed25519 AAAA", "age1" + "q" * 58])
def test_what_is_no_recipient_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no recipient"):
        check_recipient(text)


def test_an_identity_is_in_no_message() -> None:
    identity, recipient = new_identity()
    wrong = identity[:-1] + ("Q" if identity[-1] != "Q" else "P")
    with pytest.raises(UsageError) as caught:
        unwrap(wrap(KEY, recipient), [wrong])
    assert wrong not in str(caught.value)


def test_files_of_age_keygen_are_read() -> None:
    identity, recipient = new_identity()
    assert identities_in(f"# created: today\n# public key: {recipient}\n{identity}\n\n") == (identity,)


def test_a_whole_blob_is_in_memory_once() -> None:
    size = 8 << 20
    stored = b"".join(encrypted(io.BytesIO(bytes(size)), size, KEY))
    tracemalloc.start()
    try:
        plain = decrypted_from(lambda start, length: stored[start : start + length], len(stored), KEY, "x")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert plain == bytes(size) and peak < 1.5 * size


NOTHING = Descriptor("x", digest_of(b""), 0)


def test_documents_are_counted_before_they_are_decoded() -> None:
    """So many of a few bytes would take a host a hundred times their bytes."""
    data = encode_contents(b"", tuple(number.to_bytes(3, "big") for number in range(200_000)))
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            decode_contents(data, Manifest(NOTHING, (), ()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < len(data)


def test_a_config_has_no_more_bytes_than_its_keys_may_take() -> None:
    wrapped = WrappedKey("r" * RECIPIENT_MAX, "w" * WRAPPED_MAX)
    keys = {f"{number:016x}": wrapped for number in range(KEYS_MAX)}
    full = encode_sealed_config(SealedConfig(keys, tuple(islice(cycle(keys), SEALED_MAX))))
    manifest = Manifest(NOTHING, (), (), (NOTHING,) * SEALED_MAX)
    assert len(decode_sealed_config(full, manifest).keys) == KEYS_MAX
    with pytest.raises(Corrupt, match="more than a config"):
        decode_sealed_config(full + b" " * CONFIG_BYTES_MAX, manifest)
