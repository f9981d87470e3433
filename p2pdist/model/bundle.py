"""Bundles: everything small that a pull of one reference needs, in one answer of a tracker.

A bundle is one MessagePack map: `digest`, the digest of the manifest, and `documents`, an array of
byte strings: the manifest, its config and its piece lists, as many as fit BUNDLE_BYTES_MAX. Which
is which follows from their digests, so nothing else is stated; what is left out is asked for by
digest. The reader trusts a tracker for what a tag means, as always, and for nothing else
(`Bundle.verified`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdist.model.digest import Digest, WireDigest, digest_of
from p2pdist.model.errors import UNDECODABLE, Corrupt
from p2pdist.model.package import Descriptor, Manifest, decode_manifest

BUNDLE_TYPE = "application/vnd.p2pdist.bundle.v1+msgpack"
BUNDLE_BYTES_MAX = 8 << 20
"""Bytes of the documents of a bundle, together."""

DOCUMENTS_MAX = 1024


class Bundle(msgspec.Struct, frozen=True):
    """See the module's text. `documents` are unverified."""

    digest: WireDigest
    documents: Annotated[tuple[bytes, ...], Meta(max_length=DOCUMENTS_MAX)] = ()

    def verified(self, stored: Callable[[Digest], bytes | None]) -> list[bytes]:
        """The documents, each found to be the manifest or one that the manifest names. `stored` is
        asked for a manifest that was not sent. Raises Corrupt."""
        found = {digest_of(document): document for document in self.documents}
        data = found.get(self.digest) or stored(self.digest)
        named = {small.digest for small in decode_manifest(data).small_blobs()} if data is not None else set()
        if not found.keys() <= named | {self.digest}:
            raise Corrupt(f"documents were sent with {self.digest} that it does not name")
        return list(found.values())


def fitting(manifest: Manifest, size: int) -> list[Descriptor]:
    """The documents that go into a bundle beside the manifest of `size` bytes: in the manifest's
    order, whichever still fits."""
    room = BUNDLE_BYTES_MAX - size
    chosen: dict[Digest, Descriptor] = {}
    for small in manifest.small_blobs():
        if small.size <= room and small.digest not in chosen and len(chosen) < DOCUMENTS_MAX - 1:
            chosen[small.digest] = small
            room -= small.size
    return list(chosen.values())


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Bundle] = msgspec.msgpack.Decoder(Bundle)


def encode_bundle(bundle: Bundle) -> bytes:
    return _encoder.encode(bundle)


def decode_bundle(data: bytes) -> Bundle:
    """Raises Corrupt when `data` is no bundle."""
    try:
        return _decoder.decode(data)
    except UNDECODABLE as error:
        raise Corrupt(f"what was sent is no bundle: {' '.join(str(error).split())[:300]}") from error
