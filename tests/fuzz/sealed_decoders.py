"""Decoders for hostile_bytes.py of what sealed packages are made of, and of their keys."""

from __future__ import annotations

import io

from access_decoders import Call

from p2pdist.encryption import (
    check_recipient,
    decrypted,
    encrypted,
    identities_in,
    new_identity,
    recipient_of,
    unwrap,
    wrap,
)
from p2pdist.model import manifest
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, P2PDistError, Refused
from p2pdist.model.pieces import PieceLayout, PieceList
from p2pdist.model.sealed_package import (
    SEALED_CONFIG_TYPE,
    SealedConfig,
    WrappedKey,
    decode_contents,
    decode_sealed_config,
    encode_contents,
    encode_sealed_config,
    encrypted_by,
    opened_manifest,
    sealed_size,
)

SIZE, KEY = 100_000, bytes(32)
IDENTITY, RECIPIENT = new_identity()


def _described(media_type: str, name: bytes, size: int) -> tuple[manifest.Descriptor, bytes]:
    """A blob, and its piece list."""
    pieces = PieceList(PieceLayout(size, 65536), bytes(32 * -(-size // 65536))).encode()
    notes = {manifest.PIECES_DIGEST: digest_of(pieces), manifest.PIECES_SIZE: "65536"}
    return manifest.Descriptor(media_type, digest_of(name), size, notes), pieces


def _contents() -> bytes:
    """The documents of a package of one layer."""
    layer, pieces = _described(manifest.SQUASHFS_TYPE, b"layer", SIZE)
    config = manifest.encode_config(manifest.Config(("sh",)))
    listed = manifest.Descriptor(manifest.PIECES_TYPE, digest_of(pieces), len(pieces))
    described = manifest.Descriptor(manifest.CONFIG_TYPE, digest_of(config), len(config))
    plain = manifest.encode_manifest(manifest.Manifest(described, (layer,), (listed,)))
    return encode_contents(plain, (config, pieces))


CONTENTS = _contents()
PARTS = tuple(
    _described(manifest.SEALED_TYPE, name, sealed_size(size))[0]
    for name, size in ((b"documents", len(CONTENTS)), (b"blob", SIZE))
)
SEALED = manifest.Manifest(manifest.Descriptor(SEALED_CONFIG_TYPE, digest_of(b"c"), 1), (), (), PARTS)
CONFIG = encode_sealed_config(SealedConfig({"ab" * 8: WrappedKey(RECIPIENT, "YWdl")}, ("ab" * 8, "ab" * 8)))
BLOB = b"".join(encrypted(io.BytesIO(bytes(SIZE)), SIZE, KEY))
WRAPPED = wrap(KEY, RECIPIENT).wrapped.encode()


def _open(data: bytes) -> None:
    """Decode contents, and make the manifest by which a host would keep them."""
    contents = decode_contents(data, SEALED)
    assert len(encrypted_by(opened_manifest(contents.manifest, SEALED))) == len(contents.manifest.blobs) == 1


def calls() -> tuple[Call, ...]:
    plain: tuple[type[BaseException], ...] = (P2PDistError,)
    return (
        ("documents of a sealed package", _open, (Corrupt,), (CONTENTS,)),
        ("config of a sealed package", lambda data: decode_sealed_config(data, SEALED), (Corrupt,), (CONFIG,)),
        ("encrypted blob", lambda data: decrypted(data, KEY, "it"), (Corrupt,), (BLOB,)),
        (
            "wrapped key",
            lambda data: unwrap(WrappedKey(RECIPIENT, data.decode("latin-1")), [IDENTITY]),
            (Corrupt, Refused),
            (WRAPPED,),
        ),
        ("recipient of age", lambda data: check_recipient(data.decode("latin-1")), plain, (RECIPIENT.encode(),)),
        (
            "file of identities",
            lambda data: [recipient_of(identity) for identity in identities_in(data.decode("latin-1"))],
            plain,
            (f"# public key: {RECIPIENT}\n{IDENTITY}\n".encode(),),
        ),
    )
