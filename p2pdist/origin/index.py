"""The tags of an image layout: index.json (OCI image specification 1.0, "Image Index").

Whatever other tools keep in the index (annotations, platforms, other manifests) is carried over
untouched.
"""

from __future__ import annotations

from typing import Any

import msgspec

from p2pdist.model.digest import Digest, is_digest
from p2pdist.model.errors import UNDECODABLE, Corrupt, NotFound, TooLarge
from p2pdist.model.manifest import MANIFEST_TYPE, TITLE, Descriptor
from p2pdist.origin.contract import Tagged

INDEX_BYTES_MAX = 64 << 20
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
REF_NAME = "org.opencontainers.image.ref.name"
CREATED = "org.opencontainers.image.created"
"""When the tag was set, as RFC 3339 writes it."""

TITLE_CHARACTERS_MAX = 255
_GZIP = b"\x1f\x8b"


class Index:
    """The parsed index.json of the layout at `url`."""

    def __init__(self, data: bytes | None, url: str) -> None:
        """`data` is None where no index exists yet. Raises Corrupt."""
        self._url = url
        empty = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []}
        try:
            self._body: dict[str, Any] = empty if data is None else msgspec.json.decode(data, type=dict[str, Any])
        except UNDECODABLE as error:
            compressed = "it comes compressed (gzip), which was not asked for" if data and data[:2] == _GZIP else ""
            raise self._corrupt(compressed or str(error)) from error
        entries = self._body.get("manifests")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise self._corrupt("`manifests` is not a list of descriptors")
        self._entries: list[dict[str, Any]] = entries

    def find(self, name: str) -> Descriptor | None:
        """The manifest tagged `name`; raises Corrupt when its descriptor is malformed."""
        for entry in reversed(self._entries):
            if _name(entry) == name:
                descriptor = _descriptor(entry)
                if descriptor is None:
                    raise self._corrupt(f"the entry of {name} is malformed")
                return descriptor
        return None

    def tags(self) -> list[tuple[str, Descriptor]]:
        """All tags with a well-formed SHA-256 descriptor, sorted by name."""
        descriptors: dict[str, Descriptor] = {}
        for entry in self._entries:
            name, descriptor = _name(entry), _descriptor(entry)
            if name is not None and descriptor is not None:
                descriptors[name] = descriptor
        return sorted(descriptors.items(), key=lambda item: item[0])

    def listing(self) -> list[Tagged]:
        """All tags with what their entries say of them, sorted by name."""
        notes = {_name(entry): entry.get("annotations") or {} for entry in self._entries}
        return [
            Tagged(name, descriptor, _text(notes[name], CREATED), _text(notes[name], TITLE))
            for name, descriptor in self.tags()
        ]

    def tags_of(self, package: str) -> list[str]:
        """The tags of the package with this name, sorted."""
        parts = (name.rpartition(":") for name, _ in self.tags())
        return [tag for name, _, tag in parts if name == package]

    def roots(self) -> list[tuple[str, Descriptor]]:
        """All entries, with a tag or without, with a name for messages. Raises Corrupt for one
        that cannot be read."""
        entries = []
        for entry in self._entries:
            descriptor = _descriptor(entry)
            if descriptor is None:
                raise self._corrupt(f"the entry of {_name(entry) or str(entry.get('digest'))[:100]} is malformed")
            entries.append((_name(entry) or descriptor.digest, descriptor))
        return entries

    def remove(self, name: str) -> bytes:
        """The bytes of this index without the tag `name`. Raises NotFound."""
        left = [entry for entry in self._entries if _name(entry) != name]
        if len(left) == len(self._entries):
            raise NotFound(f"{name} is not at {self._url}", remedy="Check the name; p2pdist ls --at-origin lists them")
        self._body["manifests"] = left
        return msgspec.json.format(msgspec.json.encode(self._body), indent=1)

    def put(self, name: str, descriptor: Descriptor) -> bytes:
        """The bytes of this index with `name` moved to `descriptor`. Raises TooLarge."""
        entry = {
            "mediaType": descriptor.media_type,
            "digest": descriptor.digest,
            "size": descriptor.size,
            "annotations": {**descriptor.annotations, REF_NAME: name},
        }
        self._body["manifests"] = [*(other for other in self._entries if _name(other) != name), entry]
        data = msgspec.json.format(msgspec.json.encode(self._body), indent=1)
        if len(data) > INDEX_BYTES_MAX:
            raise TooLarge(f"index.json at {self._url} would pass {INDEX_BYTES_MAX} bytes", remedy="Remove old tags")
        return data

    def _corrupt(self, why: str) -> Corrupt:
        return Corrupt(
            f"index.json at {self._url} is malformed: {why}", remedy="Restore it; the blobs are not affected"
        )


def _name(entry: dict[str, Any]) -> str | None:
    annotations = entry.get("annotations")
    name = annotations.get(REF_NAME) if isinstance(annotations, dict) else None
    return name if isinstance(name, str) else None


def _text(annotations: dict[str, Any], key: str) -> str:
    """An annotation that some program wrote; empty where it is none, or too long for a name."""
    value = annotations.get(key)
    return value if isinstance(value, str) and len(value) <= TITLE_CHARACTERS_MAX else ""


def _descriptor(entry: dict[str, Any]) -> Descriptor | None:
    digest, size, media_type = entry.get("digest"), entry.get("size"), entry.get("mediaType", MANIFEST_TYPE)
    if not isinstance(digest, str) or not is_digest(digest) or not isinstance(media_type, str):
        return None
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 62:
        return None
    return Descriptor(media_type, Digest(digest), size)
