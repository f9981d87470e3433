"""Manifests of container images and their indexes, as upstream registries serve them (OCI image
specification 1.1; Docker's image manifest version 2, schema 2).

An index lists the manifests of one image for several platforms. A manifest names a config and
layers, which are blobs. A document that could be read as either is refused: two programs would see
two images in it (CVE-2021-41190). Blobs with digests of another kind than SHA-256 are no blobs of
ours, and layers that a registry need not have itself (foreign, nondistributable) are kept apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from p2pdist.model.digest import EMPTY_DIGEST, Digest, digest_of, is_digest
from p2pdist.model.errors import UNDECODABLE, Corrupt, NotFound, Refused
from p2pdist.model.image import ImageReference
from p2pdist.model.manifest import MANIFEST_BYTES_MAX, MANIFEST_TYPE, Descriptor
from p2pdist.model.platform import Platform, platform_of

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX_TYPE = "application/vnd.docker.distribution.manifest.list.v2+json"
MANIFEST_TYPES = (MANIFEST_TYPE, DOCKER_MANIFEST_TYPE)
INDEX_TYPES = (INDEX_TYPE, DOCKER_INDEX_TYPE)
ACCEPTED_TYPES = (*INDEX_TYPES, *MANIFEST_TYPES)
"""What a client that takes every image asks a registry for."""

BLOBS_MAX = 4096
"""Config and layers of one image; artifacts have more of them than images."""

ENTRIES_MAX = 1024
"""Manifests of one index."""

INDEX_DEPTH_MAX = 4
"""So many indexes, one in the other, lead to an image at most."""

SIZE_MAX = 1 << 50
MEDIA_TYPE_CHARACTERS_MAX = 255
EMPTY_INDEX = b'{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[]}'

_MEDIA_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]*/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]*\Z")
_FOREIGN = ("nondistributable", "foreign")
_ATTESTED = "vnd.docker.reference.type"
"""An annotation of what belongs to an image and is none."""


@dataclass(frozen=True, slots=True)
class ImageDocument:
    """A manifest or index as its registry serves it: the media type belongs to it."""

    data: bytes
    media_type: str
    digest: Digest


@dataclass(frozen=True, slots=True)
class TagPage:
    """Some tags of a repository, in the registry's order; `more`: further ones follow."""

    names: tuple[str, ...]
    more: bool


class _Descriptor(msgspec.Struct, rename={"media_type": "mediaType"}):
    digest: str
    size: int
    media_type: str = ""
    annotations: dict[str, str] | None = None
    platform: dict[str, Any] | None = None


class _Document(msgspec.Struct, rename="camel"):
    schema_version: int
    media_type: str = ""
    config: _Descriptor | None = None
    layers: list[_Descriptor] | None = None
    manifests: list[_Descriptor] | None = None
    fs_layers: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class ImageManifest:
    """A manifest: what one image consists of."""

    media_type: str
    blobs: tuple[Descriptor, ...]
    """Config and layers, each once, the config first."""
    foreign: tuple[Descriptor, ...] = ()
    """Layers that the registry need not have."""
    unnamed: tuple[str, ...] = ()
    """Digests of another kind than SHA-256, of blobs that are not among `blobs`."""


@dataclass(frozen=True, slots=True)
class ImageEntry:
    """A manifest in an index. `platform` is None where the index does not say it; `image` is False
    for what belongs to an image and is none, such as an attestation."""

    descriptor: Descriptor
    platform: Platform | None
    image: bool


@dataclass(frozen=True, slots=True)
class ImageIndex:
    """An index: the manifests of one image, by platform."""

    media_type: str
    entries: tuple[ImageEntry, ...]

    def choose(self, target: Platform, *, exact: bool = True) -> Descriptor:
        """The first manifest that a machine of platform `target` runs, as container runtimes do it:
        of several the one for the highest level. With `exact` False, as where no variant was named,
        one of another level will do. Raises NotFound."""
        images = [entry for entry in self.entries if entry.image]
        fitting = [entry for entry in images if entry.platform is None or target.runs(entry.platform)]
        if not fitting and not exact:
            fitting = [
                entry
                for entry in images
                if entry.platform is not None
                and (entry.platform.os, entry.platform.architecture) == (target.os, target.architecture)
            ]
        if not fitting:
            offered = ", ".join(dict.fromkeys(str(entry.platform) for entry in images if entry.platform)) or "nothing"
            raise NotFound(
                f"there is no image for {target} in the index; there is: {offered[:500]}",
                remedy="Choose another one with --platform",
            )
        return max(fitting, key=lambda entry: entry.platform.level if entry.platform else (-1, -1)).descriptor


@dataclass(frozen=True, slots=True)
class Image:
    """An image whose documents are here: what its reference names (`digest`), the documents from
    there to the manifest of one platform, and the blobs of that manifest, which are to be had."""

    reference: ImageReference
    digest: Digest
    documents: tuple[Digest, ...]
    blobs: tuple[Descriptor, ...]


def decode_image(data: bytes, media_type: str = "") -> ImageManifest | ImageIndex:
    """Parse and check a manifest or index of an upstream registry. `media_type` is what the
    registry calls it, "" where it does not say. Raises Corrupt, and Refused for schema 1."""
    name = digest_of(data)
    if len(data) > MANIFEST_BYTES_MAX:
        raise Corrupt(f"a manifest of {len(data)} bytes is over the limit of {MANIFEST_BYTES_MAX}")
    try:
        plain = msgspec.json.decode(data, type=_Document)
    except UNDECODABLE as error:
        raise Corrupt(f"{name} is no manifest of an image: {' '.join(str(error).split())[:200]}") from error
    if plain.fs_layers is not None or plain.schema_version == 1:
        raise Refused(
            f"{name} is a manifest of schema 1, which registries gave up in 2019",
            remedy="Push the image again with a current client",
        )
    is_index = plain.manifests is not None
    if plain.schema_version != 2 or is_index == (plain.config is not None or plain.layers is not None):
        raise Corrupt(f"{name} is neither a manifest of an image nor an index")
    stated = {kind for kind in (media_type, plain.media_type) if kind in ACCEPTED_TYPES}
    if len(stated) > 1 or any((kind in INDEX_TYPES) != is_index for kind in stated):
        raise Corrupt(f"{name} is called {' and '.join(sorted(stated))}, and is not both")
    kind = next(iter(stated), "") or (INDEX_TYPE if is_index else MANIFEST_TYPE)
    if plain.manifests is not None:
        return _index(name, kind, plain.manifests)
    if plain.config is None:
        raise Corrupt(f"the manifest {name} names no config")
    return _manifest(name, kind, [plain.config, *(plain.layers or [])])


def _manifest(name: Digest, kind: str, listed: list[_Descriptor]) -> ImageManifest:
    if len(listed) > BLOBS_MAX:
        raise Corrupt(f"{name} has {len(listed)} blobs, over the limit of {BLOBS_MAX}")
    blobs: dict[str, Descriptor] = {}
    foreign: dict[str, Descriptor] = {}
    unnamed: list[str] = []
    for plain in listed:
        if not is_digest(plain.digest):
            unnamed.append(plain.digest[:200])
            continue
        found = _descriptor(name, plain)
        if (found.size == 0) != (found.digest == EMPTY_DIGEST):
            raise Corrupt(f"{name} states {found.size} bytes for {found.digest}, which it cannot have")
        kept = foreign if any(word in plain.media_type for word in _FOREIGN) else blobs
        if kept.setdefault(found.digest, found).size != found.size:
            raise Corrupt(f"{name} states two sizes for {found.digest}")
    if any(digest in blobs and blobs[digest].size != entry.size for digest, entry in foreign.items()):
        raise Corrupt(f"{name} states two sizes for one blob")
    return ImageManifest(
        kind,
        tuple(blobs.values()),
        tuple(entry for digest, entry in foreign.items() if digest not in blobs),
        tuple(unnamed),
    )


def _index(name: Digest, kind: str, listed: list[_Descriptor]) -> ImageIndex:
    if len(listed) > ENTRIES_MAX:
        raise Corrupt(f"{name} has {len(listed)} manifests, over the limit of {ENTRIES_MAX}")
    entries = []
    for plain in listed:
        if is_digest(plain.digest):
            platform = _platform(plain.platform)
            unknown = platform is not None and platform.architecture == "unknown"
            image = not unknown and _ATTESTED not in (plain.annotations or {})
            entries.append(ImageEntry(_descriptor(name, plain), platform, image))
    return ImageIndex(kind, tuple(entries))


def _descriptor(name: Digest, plain: _Descriptor) -> Descriptor:
    if not 0 <= plain.size <= SIZE_MAX:
        raise Corrupt(f"{name} states an impossible size of {plain.digest}: {plain.size}")
    return Descriptor(plain.media_type[:MEDIA_TYPE_CHARACTERS_MAX], Digest(plain.digest), plain.size)


def _platform(stated: dict[str, Any] | None) -> Platform | None:
    if not stated or not stated.get("architecture"):
        return None
    return platform_of(stated.get("os"), stated["architecture"], stated.get("variant"))


def clean_media_type(text: str) -> str:
    """A media type without its parameters (RFC 9110, 8.3.1); "" for what is none."""
    kind = text.partition(";")[0].strip()
    return kind if len(kind) <= MEDIA_TYPE_CHARACTERS_MAX and _MEDIA_TYPE.match(kind) else ""
