"""Packages: OCI manifests (image specification 1.0), their descriptors, configs and references, and
the bundle in which a tracker sends the documents of a package.

A package is an OCI manifest whose layers are, bottom to top, the content layers, followed by the
parts that tree layers draw on (catalogs and packs, see catalog.py) and by one piece list for each
layer and part. The descriptor of a layer or part names its piece list in two annotations, so trust
in the manifest extends to every piece. All of it is among the layers, so any OCI tool copies a
package whole. A blob pushed on its own is a package of one layer that is tagged
`blob:sha256-<hex>`.

Documents are the blobs that are read whole: a manifest, its config and its piece lists. A bundle is
one MessagePack map: `digest`, the digest of a manifest, and `documents`, an array of byte strings:
the manifest and its documents, as many as fit BUNDLE_BYTES_MAX. Their digests tell which is which;
agents request by digest what is left out. An agent trusts a tracker for what a tag means, and for
nothing else (`Bundle.verified`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from p2pdist.model.digest import Digest, WireDigest, digest_of, hex_of, is_digest, parse_digest
from p2pdist.model.errors import UNDECODABLE, Corrupt, NotFound, TooLarge, UsageError
from p2pdist.model.pieces import PIECE_SIZE_MAX, PIECE_SIZE_MIN, PieceLayout, encoded_size

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.p2pdist.config.v1+json"
SQUASHFS_TYPE = "application/vnd.p2pdist.layer.v1.squashfs"
TREE_TYPE = "application/vnd.p2pdist.layer.v1.tree"
CATALOG_TYPE = "application/vnd.p2pdist.catalog.v1"
PACK_TYPE = "application/vnd.p2pdist.pack.v1"
SEALED_TYPE = "application/vnd.p2pdist.sealed.v1"
"""An encrypted blob (sealed_package.py)."""

BLOB_TYPE = "application/octet-stream"
PIECES_TYPE = "application/vnd.p2pdist.pieces.v1"

_IMAGE_CONFIG_TYPES = frozenset(
    {"application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"}
)
_PUSH_AGAIN = "Pack and push it again"
_PARTS = frozenset({CATALOG_TYPE, PACK_TYPE, SEALED_TYPE})

TITLE = "org.opencontainers.image.title"
"""The annotation with the name of the file that a blob was."""

PIECES_DIGEST = "org.p2pdist.pieces.digest"
PIECES_SIZE = "org.p2pdist.pieces.piece-size"

BOOTSTRAP = "org.p2pdist.bootstrap"
"""The annotation by which a part of the type of packs is a bootstrap (bootstrap.py); it has the
number of its format."""

ROOT_VARIABLE = "P2PDIST_ROOT"
"""The environment variable that names the directory where a program sees its package."""

LAYERS_MAX = 128
MODEL_LAYERS_MAX = 1000
"""Of a model, each file of which is a layer (modelpack.py)."""
PARTS_MAX = 1024
CATALOGS_MAX = 256
SEALED_MAX = 1 + MODEL_LAYERS_MAX + PARTS_MAX
"""Encrypted blobs of a package: its documents, and each of its layers and parts."""
MANIFEST_BYTES_MAX = 4 << 20
DOCUMENT_BYTES_MAX = 64 << 20
"""Of any one document."""

BUNDLE_TYPE = "application/vnd.p2pdist.bundle.v1+msgpack"
BUNDLE_BYTES_MAX = 8 << 20
"""Of the documents of a bundle together."""

DOCUMENTS_MAX = 1024
"""Documents of a bundle."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Names a blob: media type, digest, size in bytes (OCI "Content Descriptors")."""

    media_type: str
    digest: Digest
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def pieces_digest(self) -> Digest:
        """Digest of the blob's piece list; raises Corrupt when the descriptor names none."""
        digest = self.annotations.get(PIECES_DIGEST, "")
        if not is_digest(digest):
            raise Corrupt(f"the manifest names no piece list for {self.digest}", remedy=_PUSH_AGAIN)
        return Digest(digest)

    @property
    def layout(self) -> PieceLayout:
        """How the blob is cut; raises Corrupt when the descriptor states an impossible piece
        size."""
        text = self.annotations.get(PIECES_SIZE, "")
        piece_size = int(text) if text.isdecimal() and len(text) < 12 else 0
        if piece_size & (piece_size - 1) or not PIECE_SIZE_MIN <= piece_size <= PIECE_SIZE_MAX:
            raise Corrupt(f"the manifest states piece size {text[:20]!r} for {self.digest}", remedy=_PUSH_AGAIN)
        return PieceLayout(self.size, piece_size)


def is_bootstrap(part: Descriptor) -> bool:
    """Whether a part of a package is a bootstrap, of whatever format."""
    return part.media_type == PACK_TYPE and BOOTSTRAP in part.annotations


@dataclass(frozen=True, slots=True)
class Config:
    """What to run: argument lists and environment. `${P2PDIST_ROOT}` in them is replaced by the
    directory where the package is mounted."""

    entrypoint: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    working_dir: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A package: config and content layers, bottom to top, the piece lists, and as parts the
    catalogs and packs that its tree layers draw on, and encrypted blobs (sealed_package.py).
    `artifact_type` is what a package is besides, "" for nothing else."""

    config: Descriptor
    layers: tuple[Descriptor, ...]
    piece_lists: tuple[Descriptor, ...]
    parts: tuple[Descriptor, ...] = ()
    artifact_type: str = ""

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """The blobs that are moved piece by piece: layers and parts, each once."""
        return tuple({blob.digest: blob for blob in (*self.layers, *self.parts)}.values())

    @property
    def encrypted(self) -> tuple[Descriptor, ...]:
        """The encrypted blobs among the parts."""
        return tuple(part for part in self.parts if part.media_type == SEALED_TYPE)

    @property
    def is_sealed(self) -> bool:
        """Whether everything that it names is encrypted."""
        return not self.layers and bool(self.parts) and len(self.encrypted) == len(self.parts)

    def documents(self) -> tuple[Descriptor, ...]:
        """The blobs that are read whole: config and piece lists."""
        return (self.config, *self.piece_lists)


@dataclass(frozen=True, slots=True)
class Reference:
    """`name:tag` or `name@sha256:...`; exactly one of tag and digest is set."""

    name: str
    tag: str = ""
    digest: Digest | None = None

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}" if self.digest else f"{self.name}:{self.tag}"


_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*(?:/[a-z0-9]+(?:[._-][a-z0-9]+)*)*\Z")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
_REMEDY = "A reference reads name:tag or name@sha256:<hex>; names are lower case, such as team/trainer:v3"

_FOREIGN = {
    "docker": "An image of a registry is no package: p2pdist import docker://... -t NAME:TAG makes one of it",
    "oci": "An image of a registry is no package: p2pdist import docker://... -t NAME:TAG makes one of it",
    "hf": "A model or data set of a hub is no package: programs read it with HF_ENDPOINT=http://localhost:7073/hf",
}
"""What to do about a reference of this scheme, which is to what others have, where a package is
meant."""


def parse_reference(text: str) -> Reference:
    """Parse a reference; the tag defaults to `latest`. Raises UsageError."""
    if is_digest(text):  # it would be a tag of a package named sha256
        raise UsageError(
            f"{text} is a digest without the name of a package",
            remedy="Write name@sha256:<hex>; a single blob is brought by p2pdist blob pull",
        )
    name, at, digest = text.partition("@")
    tag = ""
    if not at:
        name, colon, tag = text.rpartition(":")
        if not colon:
            name, tag = text, "latest"
    if not _NAME.match(name) or len(name) > 255 or (not at and not _TAG.match(tag)):
        raise UsageError(f"{text[:200]!r} is not a reference", remedy=_FOREIGN.get(text.partition("://")[0], _REMEDY))
    return Reference(name, tag, parse_digest(digest) if at else None)


BLOB_NAME = "blob"
"""The name of all blobs that were pushed on their own; their tags never move."""


def blob_reference(digest: Digest) -> Reference:
    """The reference of a blob that was pushed on its own."""
    return Reference(BLOB_NAME, f"sha256-{hex_of(digest)}")


class _Descriptor(msgspec.Struct, rename={"media_type": "mediaType"}, omit_defaults=True):
    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] = {}


class _Manifest(msgspec.Struct, rename="camel"):
    schema_version: int
    config: _Descriptor
    layers: list[_Descriptor]
    media_type: str = MANIFEST_TYPE
    artifact_type: str | msgspec.UnsetType = msgspec.UNSET


class _OutlinedConfig(msgspec.Struct, frozen=True, rename="camel"):
    media_type: str = ""


class _Outline(msgspec.Struct):
    """What tells an image from a package."""

    config: _OutlinedConfig = _OutlinedConfig()
    manifests: list[Any] = []


class _Execution(msgspec.Struct, rename="pascal", omit_defaults=True):
    entrypoint: list[str] = []
    env: list[str] = []
    working_dir: str = ""


class _Config(msgspec.Struct):
    config: _Execution = msgspec.field(default_factory=_Execution)
    os: str = "linux"


def _plain(descriptor: Descriptor) -> _Descriptor:
    return _Descriptor(
        descriptor.media_type, descriptor.digest, descriptor.size, dict(sorted(descriptor.annotations.items()))
    )


def _canonical(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def encode_manifest(manifest: Manifest) -> bytes:
    """Canonical bytes of a manifest: equal packages have equal digests. Raises TooLarge for one
    that no host would take."""
    layers = [_plain(layer) for layer in (*manifest.layers, *manifest.parts, *manifest.piece_lists)]
    kind = manifest.artifact_type or msgspec.UNSET
    data = _canonical(_Manifest(2, _plain(manifest.config), layers, artifact_type=kind))
    for what, size in (("manifest", len(data)), ("config", manifest.config.size)):
        if size > MANIFEST_BYTES_MAX:
            raise TooLarge(
                f"the package would have a {what} of {size} bytes, over the limit of {MANIFEST_BYTES_MAX}",
                remedy="Pack fewer files with shorter paths, or a tree; leave long values out of the config",
            )
    return data


def _descriptor(plain: _Descriptor) -> Descriptor:
    if not is_digest(plain.digest) or not 0 <= plain.size < 1 << 62:
        raise Corrupt(f"a manifest holds an impossible descriptor: {plain.digest[:100]!r}, {plain.size} bytes")
    return Descriptor(plain.media_type, Digest(plain.digest), plain.size, plain.annotations)


def decode_manifest(data: bytes) -> Manifest:
    """Parse and check a manifest; raises Corrupt. Every layer and part must have a piece list of
    the right size among the layers."""
    try:
        return _decode_manifest(data)
    except Corrupt as error:
        if _is_image(data):
            what = f"{digest_of(data)} is a container image, and no package"
            raise Corrupt(what, remedy="p2pdist import makes a package of it") from error
        error.remedy = error.remedy or _PUSH_AGAIN
        raise


def _is_image(data: bytes) -> bool:
    """Whether these are the bytes of a container image's manifest, or of an index of manifests,
    which other tools may have copied to where packages are looked for."""
    if len(data) > MANIFEST_BYTES_MAX:
        return False
    try:
        outline = msgspec.json.decode(data, type=_Outline)
    except UNDECODABLE:
        return False
    return bool(outline.manifests) or outline.config.media_type in _IMAGE_CONFIG_TYPES


def _decode_manifest(data: bytes) -> Manifest:
    if len(data) > MANIFEST_BYTES_MAX:
        raise Corrupt(f"a manifest of {len(data)} bytes is over the limit of {MANIFEST_BYTES_MAX}")
    try:
        plain = msgspec.json.decode(data, type=_Manifest)
    except UNDECODABLE as error:
        raise Corrupt(f"{digest_of(data)} is not a manifest: {error}") from error
    if plain.schema_version != 2 or plain.media_type != MANIFEST_TYPE:
        raise Corrupt(f"{digest_of(data)} is not an OCI image manifest")
    listed = [_descriptor(layer) for layer in plain.layers]
    parts = tuple(layer for layer in listed if layer.media_type in _PARTS)
    layers = tuple(layer for layer in listed if layer.media_type not in _PARTS | {PIECES_TYPE})
    piece_lists = {layer.digest: layer for layer in listed if layer.media_type == PIECES_TYPE}
    kind = plain.artifact_type or ""
    if len(layers) > (most := MODEL_LAYERS_MAX if kind else LAYERS_MAX):
        raise Corrupt(f"{digest_of(data)} has {len(layers)} layers, over the limit of {most}")
    _check_parts(digest_of(data), parts)
    for layer in (*layers, *parts):
        pieces = piece_lists.get(layer.pieces_digest)
        if pieces is None or pieces.size != encoded_size(layer.layout) or pieces.size > DOCUMENT_BYTES_MAX:
            raise Corrupt(f"the manifest {digest_of(data)} carries no fitting piece list for layer {layer.digest}")
    config = _descriptor(plain.config)
    if config.size > MANIFEST_BYTES_MAX:
        raise Corrupt(f"the config {config.digest} of {config.size} bytes is over the limit")
    return Manifest(config, layers, tuple(piece_lists.values()), parts, kind)


def _check_parts(digest: Digest, parts: tuple[Descriptor, ...]) -> None:
    """Raises Corrupt for more parts than a package may have."""
    counts = {kind: sum(part.media_type == kind for part in parts) for kind in _PARTS}
    catalogs, packs, encrypted = counts[CATALOG_TYPE], counts[PACK_TYPE], counts[SEALED_TYPE]
    if catalogs + packs > PARTS_MAX or catalogs > CATALOGS_MAX:
        raise Corrupt(
            f"{digest} has {catalogs} catalogs and {packs} packs, over the limits of {CATALOGS_MAX} and {PARTS_MAX} in all"
        )
    if encrypted > SEALED_MAX:
        raise Corrupt(f"{digest} has {encrypted} encrypted blobs, over the limit of {SEALED_MAX}")


def decode_named(data: bytes, reference: Reference) -> Manifest:
    """Parse and check the manifest that a reference names; raises Corrupt for what a tag names and
    is none. Where the reference itself gives the digest of something else, nothing is corrupt:
    raises NotFound."""
    try:
        return decode_manifest(data)
    except Corrupt as error:
        if reference.digest is None:
            raise
        raise NotFound(
            f"there is no package {reference}: {error.what}", remedy="Give the digest of the manifest of a package"
        ) from error


def search_path(value: str) -> str:
    """A package's PATH as its program gets it: first the directories of the package, below
    ${P2PDIST_ROOT}, then the host's. A package that was made as a root, such as a container image,
    names both by one path: /usr/local/bin is in it, and on the host."""
    root = "${" + ROOT_VARIABLE + "}"
    entries = value.split(":")
    packaged = [root + entry if entry.startswith("/") else entry for entry in entries]
    return ":".join(dict.fromkeys((*packaged, *(entry for entry in entries if entry.startswith("/")))))


def encode_config(config: Config) -> bytes:
    """Canonical bytes of a config."""
    return _canonical(_Config(_Execution(list(config.entrypoint), list(config.env), config.working_dir)))


def decode_config(data: bytes) -> Config:
    """Parse a config; raises Corrupt."""
    try:
        plain = msgspec.json.decode(data, type=_Config).config
    except UNDECODABLE as error:
        raise Corrupt(f"{digest_of(data)} is not a package config: {error}", remedy=_PUSH_AGAIN) from error
    if any("=" not in entry or "\0" in entry for entry in plain.env):
        raise Corrupt(f"the config {digest_of(data)} holds an impossible environment entry", remedy=_PUSH_AGAIN)
    if any("\0" in text for text in (*plain.entrypoint, plain.working_dir)):
        what = f"the config {digest_of(data)} holds a zero byte, which no program can be called with"
        raise Corrupt(what, remedy=_PUSH_AGAIN)
    return Config(tuple(plain.entrypoint), tuple(plain.env), plain.working_dir)


class Bundle(msgspec.Struct, frozen=True):
    """A manifest's digest, and the manifest and its documents, unverified."""

    digest: WireDigest
    documents: Annotated[tuple[bytes, ...], Meta(max_length=DOCUMENTS_MAX)] = ()

    def verified(self, stored: Callable[[Digest], bytes | None]) -> list[bytes]:
        """The documents, each of which is the manifest or is named by it. `stored` is called for a
        manifest that is not in the bundle. Raises Corrupt."""
        documents = {digest_of(document): document for document in self.documents}
        data = documents.get(self.digest) or stored(self.digest)
        named = {document.digest for document in decode_manifest(data).documents()} if data is not None else set()
        if not documents.keys() <= named | {self.digest}:
            raise Corrupt(f"documents were sent with {self.digest} that it does not name")
        return list(documents.values())


def bundle_documents(manifest: Manifest, size: int) -> list[Descriptor]:
    """The documents that go into a bundle beside the manifest of `size` bytes: in the manifest's
    order, each one that still fits."""
    room = BUNDLE_BYTES_MAX - size
    chosen: dict[Digest, Descriptor] = {}
    for document in manifest.documents():
        if document.size <= room and document.digest not in chosen and len(chosen) < DOCUMENTS_MAX - 1:
            chosen[document.digest] = document
            room -= document.size
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
