"""ModelPack: models as OCI artifacts (model-spec of the ModelPack project, docs/spec.md).

The layers of a model are files as they are (`raw`) or tars of files, each with a path below the
model's directory in an annotation. A raw layer is named by the SHA-256 of its file, as files of a
Hugging Face repository are: the same file is the same blob, wherever it comes from.

Models that are packed here are packages besides: their layers name piece lists, which are further
layers. A model of another tool has none, and its blobs come as those of images do.

What an artifact says is untrusted. Paths that lead out of the model's directory, that no file can
have, or that exclude each other are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from p2pdist.model.digest import Digest, digest_of, hex_of, is_digest
from p2pdist.model.errors import UNDECODABLE, Corrupt, UsageError, printable
from p2pdist.model.manifest import MANIFEST_BYTES_MAX, MODEL_LAYERS_MAX, PIECES_TYPE, Descriptor, Manifest
from p2pdist.model.tree import (
    DEPTH_MAX,
    NAME_BYTES_MAX,
    PATH_BYTES_MAX,
    SIZE_MAX,
    Directory,
    Entry,
    File,
    walking_order,
)

ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
CONFIG_TYPE = "application/vnd.cncf.model.config.v1+json"
FILE_PATH = "org.cncf.model.filepath"
FILE_METADATA = "org.cncf.model.file.metadata+json"
TITLE = "org.opencontainers.image.title"
"""By this oras names files."""

METADATA_BYTES_MAX = 64 << 10
MODE = 0o644
WEIGHT_BYTES_MIN = 8 << 20
"""A file of an unknown kind and so many bytes counts as weights."""

_LAYER = re.compile(
    r"application/vnd\.cncf\.model\.(weight|weight\.config|doc|code|dataset)\.v1\.(raw|tar|tar\+gzip|tar\+zstd)\Z"
)
_KINDS: Mapping[str, frozenset[str]] = {
    "weight": frozenset([
        "bin", "ckpt", "ggml", "gguf", "h5", "keras", "msgpack", "nemo", "npz", "onnx", "ot", "pb", "pt", "pth",
        "safetensors", "tflite",
    ]),
    "weight.config": frozenset(
        ["cfg", "conf", "ini", "jinja", "json", "model", "spm", "tiktoken", "toml", "txt", "vocab", "yaml", "yml"]
    ),
    "doc": frozenset(["adoc", "gif", "jpeg", "jpg", "md", "pdf", "png", "rst", "svg", "webp"]),
    "code": frozenset(["c", "cc", "cpp", "cu", "go", "h", "ipynb", "js", "py", "pyi", "rs", "sh", "ts"]),
    "dataset": frozenset(["arrow", "csv", "jsonl", "parquet", "tsv"]),
}  # fmt: skip
_DOCUMENTS = ("license", "readme", "notice", "copying")


class _Metadata(msgspec.Struct):
    mode: int = MODE


class _Descriptor(msgspec.Struct, rename={"media_type": "mediaType"}):
    digest: str
    size: int
    media_type: str = ""
    annotations: dict[str, str] | None = None


class _Manifest(msgspec.Struct, rename="camel"):
    config: _Descriptor
    layers: list[_Descriptor]
    artifact_type: str = ""


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """A layer of a model: its blob, and a file's path below the model's directory and its mode. A
    tar may have no path; `form` is raw, tar, tar+gzip or tar+zstd."""

    blob: Descriptor
    form: str
    path: bytes
    mode: int


def is_model(manifest: Manifest) -> bool:
    """Whether a package is a model."""
    return manifest.artifact_type == ARTIFACT_TYPE


def layer_type(path: str, size: int) -> str:
    """The media type of the raw layer for a file."""
    name = path.lower().rpartition("/")[2]
    ending = name.rpartition(".")[2]
    known = next((kind for kind, endings in _KINDS.items() if ending in endings), "")
    if name.startswith(_DOCUMENTS):
        known = "doc"
    kind = known or ("weight" if size >= WEIGHT_BYTES_MIN else "weight.config")
    return f"application/vnd.cncf.model.{kind}.v1.raw"


def file_annotations(path: str, size: int, mode: int) -> dict[str, str]:
    """What a raw layer says of its file. Times and owners are constant, so that equal files make
    equal models."""
    metadata = {
        "name": path,
        "mode": mode & 0o777,
        "uid": 0,
        "gid": 0,
        "size": size,
        "mtime": "1970-01-01T00:00:00Z",
        "typeflag": ord("0"),
    }
    return {FILE_PATH: path, FILE_METADATA: msgspec.json.encode(metadata).decode(), TITLE: path}


def encode_config(name: str, layers: Iterable[tuple[str, Digest]]) -> bytes:
    """The config of a model of raw layers, (path, digest) each."""
    listed = list(layers)
    form = {"format": "safetensors"} if any(path.endswith(".safetensors") for path, _ in listed) else {}
    filesystem = {"type": "layers", "diffIds": [digest for _, digest in listed]}
    return msgspec.json.encode({"descriptor": {"name": name}, "config": form, "modelfs": filesystem})


def decode_model(data: bytes) -> Manifest | None:
    """The manifest of a model of any tool, without piece lists; None for what is no model. Raises
    Corrupt for a model that breaks the format or is over a limit."""
    if len(data) > MANIFEST_BYTES_MAX:
        raise Corrupt(f"a manifest of {len(data)} bytes is over the limit of {MANIFEST_BYTES_MAX}")
    try:
        plain = msgspec.json.decode(data, type=_Manifest)
    except UNDECODABLE:
        return None
    if plain.artifact_type != ARTIFACT_TYPE and plain.config.media_type != CONFIG_TYPE:
        return None
    layers = tuple(_descriptor(layer) for layer in plain.layers if layer.media_type != PIECES_TYPE)
    if len(layers) > MODEL_LAYERS_MAX:
        raise Corrupt(f"{digest_of(data)} has {len(layers)} layers, over the limit of {MODEL_LAYERS_MAX}")
    return Manifest(_descriptor(plain.config), layers, (), (), ARTIFACT_TYPE)


def _descriptor(plain: _Descriptor) -> Descriptor:
    if not is_digest(plain.digest) or not 0 <= plain.size <= SIZE_MAX:
        raise Corrupt(f"a model holds an impossible descriptor: {printable(plain.digest[:100])}, {plain.size} bytes")
    return Descriptor(plain.media_type, Digest(plain.digest), plain.size, plain.annotations or {})


def model_layers(layers: Sequence[Descriptor]) -> list[ModelLayer]:
    """What the layers of a model are, in their order. Raises Corrupt, naming it, for a layer of
    another kind and for a path that cannot be."""
    found = []
    for layer in layers:
        kind = _LAYER.match(layer.media_type)
        if kind is None:
            raise Corrupt(f"the layer {layer.digest} of a model is of type {printable(layer.media_type[:100])}")
        path = layer.annotations.get(FILE_PATH) or layer.annotations.get(TITLE) or ""
        if kind[2] == "raw" or path:
            check_path(path, f"the layer {layer.digest} of a model")
        found.append(ModelLayer(layer, kind[2], path.encode("utf-8", "surrogateescape"), _mode(layer)))
    return found


def check_path(path: str, subject: str) -> None:
    """Raises Corrupt, saying what `subject` does, for a path that would lead out of the directory
    of a model, or that is none."""
    shown = printable(path[:200])
    what = ""
    if not path:
        what = "names no file"
    elif path.startswith("/"):
        what = f"names the absolute path {shown}"
    elif ".." in path.split("/"):
        what = f"names {shown}, which leads out of the model"
    elif any(part in ("", ".") for part in path.split("/")):
        what = f"names {shown}, which is no plain path"
    elif not path.isprintable():
        what = f"names {shown}, which holds characters that no terminal shows"
    elif len(path.encode()) > PATH_BYTES_MAX or path.count("/") >= DEPTH_MAX:
        what = f"names {shown}..., which is longer than a path may be"
    elif any(len(part.encode()) > NAME_BYTES_MAX for part in path.split("/")):
        what = f"names {shown}..., which no file can be called"
    if what:
        raise Corrupt(f"{subject} {what}", remedy="Give the file another name, and make the model again")


def _mode(layer: Descriptor) -> int:
    """Everybody may read a file, and only root write to it."""
    text = layer.annotations.get(FILE_METADATA, "")
    if len(text) > METADATA_BYTES_MAX:
        raise Corrupt(f"the layer {layer.digest} of a model has metadata of {len(text)} characters")
    try:
        mode = msgspec.json.decode(text, type=_Metadata).mode if text else MODE
    except UNDECODABLE as error:
        raise Corrupt(f"the layer {layer.digest} of a model has metadata that cannot be read") from error
    return mode & 0o755 | 0o444


def model_entries(layers: Sequence[Descriptor]) -> list[Entry]:
    """The files and directories of a model of raw layers, in walking order. The content of a file
    is the SHA-256 of its blob, which `blob_name` leads to. Raises Corrupt, and UsageError where a
    layer is a tar."""
    files: dict[bytes, File] = {}
    for layer in model_layers(layers):
        if layer.form != "raw":
            raise UsageError(
                f"the layer {layer.blob.digest} of the model is a tar, which has to be unpacked",
                remedy="Make a package of it: p2pdist import docker://... -t NAME:TAG",
            )
        file = File(layer.path, layer.mode, 0, layer.blob.size, bytes.fromhex(hex_of(layer.blob.digest)))
        if files.setdefault(layer.path, file) is not file:
            raise Corrupt(f"two layers of the model are called {printable(layer.path.decode()[:200])}")
    directories: dict[bytes, Directory] = {}
    for path in files:
        while path := path.rpartition(b"/")[0]:
            if path in files:
                raise Corrupt(f"{printable(path.decode()[:200])} is a file of the model, and a directory")
            directories[path] = Directory(path, 0o755, 0)
    return sorted([*files.values(), *directories.values()], key=lambda entry: walking_order(entry.path))


def blob_name(content: bytes) -> bytes:
    """Where a content that is a blob lies in a directory of blobs: its SHA-256 in hexadecimal."""
    return content.hex().encode()
