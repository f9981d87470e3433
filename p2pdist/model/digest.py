"""Digests: names of blobs, `sha256:<64 lower-case hex digits>` (OCI image specification,
"Digests")."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, NewType

import msgspec

from p2pdist.model.errors import UsageError

Digest = NewType("Digest", str)

_FORM = re.compile(r"sha256:[0-9a-f]{64}\Z")

WireDigest = Annotated[Digest, msgspec.Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
"""A digest in a message: decoding refuses what does not have the form."""


def parse_digest(text: str) -> Digest:
    """Return `text` as a digest; raises UsageError when it is not one."""
    if not isinstance(text, str) or not _FORM.match(text):
        raise UsageError(
            f"{text[:100]!r} is not a digest",
            remedy="A digest reads sha256: followed by 64 lower-case hexadecimal digits",
        )
    return Digest(text)


def is_digest(text: str) -> bool:
    return bool(_FORM.match(text))


def digest_of(data: bytes) -> Digest:
    """The digest of `data`."""
    return Digest("sha256:" + hashlib.sha256(data).hexdigest())


EMPTY_DIGEST = digest_of(b"")
"""Of the one blob without bytes."""


def hex_of(digest: Digest) -> str:
    """The hexadecimal part of a digest, safe as a file name."""
    return digest[7:]
