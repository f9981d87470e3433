"""The form in which lists of a repository, tags and referrers, are kept where they outlive the
process that asked a registry for them."""

from __future__ import annotations

import msgspec

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import UNDECODABLE
from p2pdist.model.image_manifest import ImageDocument, TagPage

LIST_TYPE = "application/vnd.p2pdist.list+json"
LIST_BYTES_MAX = 256 << 10
"""Of a list that is kept; larger ones are asked for each time."""

Listed = TagPage | ImageDocument


class _Kept(msgspec.Struct):
    """The names of tags, or a document."""

    names: tuple[str, ...] = ()
    more: bool = False
    data: bytes | None = None
    media_type: str = ""


def encode_list(found: Listed) -> bytes | None:
    """A list as it is kept; None for one that is too large."""
    match found:
        case TagPage(names, more):
            kept = _Kept(names, more)
        case ImageDocument(data, media_type):
            kept = _Kept(data=data, media_type=media_type)
    encoded = msgspec.json.encode(kept)
    return encoded if len(encoded) <= LIST_BYTES_MAX else None


def decode_list(data: bytes) -> Listed | None:
    """The list that `encode_list` made bytes of; None for what is none."""
    try:
        kept = msgspec.json.decode(data, type=_Kept)
    except UNDECODABLE:
        return None
    if kept.data is None:
        return TagPage(kept.names, kept.more)
    return ImageDocument(kept.data, kept.media_type, digest_of(kept.data))
