"""Importing: a directory, a tar, or an image of containers becomes a directory tree and what to run in it.

An image is an OCI image layout (image specification 1.0) or what `docker save` writes, as a directory or as a tar of it. Its blobs are
compared with their digests, and the layers with the `diff_ids` of the config, before anything is packed. Compression (gzip, zstd, xz,
bzip2) is told from the first bytes. The program is the image's entrypoint followed by its command.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import gzip
import hashlib
import io
import lzma
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import msgspec
import zstandard

from p2pdist.model.digest import is_digest
from p2pdist.model.errors import UNDECODABLE, Corrupt, NotFound, P2PDistError, UsageError
from p2pdist.model.package import LAYERS_MAX, MANIFEST_BYTES_MAX, Config
from p2pdist.package.regular import NotRegular, open_regular
from p2pdist.package.scan import Scan
from p2pdist.package.untar import Applied, apply_tar, finish

CHUNK_BYTES = 1 << 20
INDEX_DEPTH_MAX = 4
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_NAMES = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
_NO_NAMES = (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)
"""What opening by a name fails with that no file of an image can have."""
_LAYER_ENDS = (".tar", ".tar+gzip", ".tar.gzip", ".tar+zstd")

Report = Callable[[str, int, int], None]
Document = TypeVar("Document")


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The tree at `root`, what to run in it, and what was left out. `kind` is directory, tar, OCI image or docker archive; `user` is
    the one that an image names for its program, which a package cannot."""

    root: Path
    kind: str
    config: Config = field(default_factory=Config)
    seen: Scan = field(default_factory=Scan)
    user: str = ""


class _Descriptor(msgspec.Struct, rename={"media_type": "mediaType"}):
    digest: str
    size: int = 0
    media_type: str = ""
    annotations: dict[str, str] | None = None
    platform: dict[str, Any] | None = None


class _Index(msgspec.Struct):
    manifests: list[_Descriptor]


class _Manifest(msgspec.Struct):
    config: _Descriptor
    layers: list[_Descriptor]


class _Saved(msgspec.Struct, rename="pascal"):
    """An image in the manifest.json of a docker archive."""

    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


class _Execution(msgspec.Struct, rename="pascal"):
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    env: list[str] | None = None
    user: str | None = None
    working_dir: str | None = None


class _RootFiles(msgspec.Struct):
    diff_ids: list[str] = []


class _Image(msgspec.Struct):
    config: _Execution | None = None
    rootfs: _RootFiles = msgspec.field(default_factory=_RootFiles)


def unpack_source(
    source: Path, work: Path, *, image: str = "", report: Report = lambda what, done, total: None
) -> Unpacked:
    """Unpack `source` below the empty directory `work`; a plain directory stays where it is. `image` chooses among several. Blocks.
    Raises NotFound, UsageError, Corrupt, TooLarge, DiskFull or P2PDistError."""
    if source.is_dir():
        return _image(source, work, image, report) or Unpacked(source, "directory")
    if not source.is_file():
        raise NotFound(f"there is no directory or archive {source}")
    outer = work / "archive"
    outer.mkdir()
    applied = Applied()
    with _opened(source, report) as stream:
        apply_tar(stream, outer, applied, whiteouts=False)
    finish(outer, applied)
    return _image(outer, work, image, report) or Unpacked(outer, "tar", seen=applied.seen)


def _image(place: Path, work: Path, wanted: str, report: Report) -> Unpacked | None:
    """What an image in the directory `place` unpacks to; None where there is no image."""
    images = _Images(place, work, wanted, report)
    if (place / "oci-layout").is_file() and (place / "index.json").is_file():
        return images.from_layout()
    return images.from_saved() if _is_saved(place) else None


@dataclass(frozen=True, slots=True)
class _Images:
    """The images in the directory `place`."""

    place: Path
    work: Path
    wanted: str
    report: Report

    def from_layout(self) -> Unpacked:
        """From an OCI image layout."""
        index = _decoded(self._small(self.place / "index.json"), _Index, "index.json")
        manifest = self._manifest(index, self.wanted, INDEX_DEPTH_MAX)
        config = _decoded(self._blob_bytes(manifest.config), _Image, "the image's config")
        for layer in manifest.layers:
            if not layer.media_type.endswith(_LAYER_ENDS):
                raise UsageError(
                    f"a layer of type {layer.media_type[:100]!r} is no tar and cannot be imported",
                    remedy="A package of p2pdist needs no import: push it",
                )
        return self._apply([self._blob(layer) for layer in manifest.layers], config, "OCI image")

    def from_saved(self) -> Unpacked:
        """From what `docker save` wrote."""
        saved = _decoded(self._small(self.place / "manifest.json"), list[_Saved], "manifest.json")
        named = {name: each for each in saved for name in each.repo_tags or []}
        found = [named[self.wanted]] if self.wanted in named else saved if not self.wanted else []
        if len(found) != 1:
            raise _ambiguous(self.wanted, list(named))
        config = _decoded(self._small(self._inside(found[0].config)), _Image, "the image's config")
        return self._apply([self._inside(layer) for layer in found[0].layers], config, "docker archive")

    def _manifest(self, index: _Index, wanted: str, depth: int) -> _Manifest:
        """The manifest of the wanted image, for this machine."""
        found = [each for each in index.manifests if not wanted or wanted in _names_of(each)]
        if len(found) > 1:
            found = [each for each in found if _fits(each)]
        if len(found) != 1 or not depth:
            raise _ambiguous(wanted, [name for each in index.manifests for name in _names_of(each)])
        data = self._blob_bytes(found[0])
        if b'"manifests"' in data and b'"layers"' not in data:
            return self._manifest(_decoded(data, _Index, found[0].digest), "", depth - 1)
        return _decoded(data, _Manifest, found[0].digest)

    def _apply(self, layers: list[Path], image: _Image, kind: str) -> Unpacked:
        if len(layers) > LAYERS_MAX or len(image.rootfs.diff_ids) != len(layers):
            raise Corrupt(f"the image has {len(layers)} layers and names {len(image.rootfs.diff_ids)} of them")
        root = self.work / "root"
        root.mkdir()
        applied = Applied()
        for path, expected in zip(layers, image.rootfs.diff_ids, strict=True):
            with _opened(path, self.report) as stream:
                hashing = _Hashing(stream)
                apply_tar(cast(IO[bytes], hashing), root, applied)
            if "sha256:" + hashing.hasher.hexdigest() != expected:
                raise Corrupt(f"the layer {path.name} is not the one that the image's config names: {expected[:100]}")
        finish(root, applied)
        run = image.config or _Execution()
        program = (*(run.entrypoint or ()), *(run.cmd or ()))
        config = Config(program, tuple(run.env or ()), run.working_dir or "")
        return Unpacked(root, kind, config, applied.seen, run.user or "")

    def _blob(self, descriptor: _Descriptor) -> Path:
        """Where a blob lies, once its bytes were compared with its digest."""
        if not is_digest(descriptor.digest):
            raise Corrupt(f"{descriptor.digest[:100]!r} is not a SHA-256 digest")
        path = self._inside(f"blobs/sha256/{descriptor.digest[7:]}")
        hasher = hashlib.sha256()
        with _regular(path) as file:
            while chunk := file.read(CHUNK_BYTES):
                hasher.update(chunk)
        if "sha256:" + hasher.hexdigest() != descriptor.digest:
            raise Corrupt(f"blob {descriptor.digest} in {self.place} was altered")
        return path

    def _blob_bytes(self, descriptor: _Descriptor) -> bytes:
        return self._small(self._blob(descriptor))

    def _small(self, path: Path) -> bytes:
        with _regular(path) as file:
            data = file.read(MANIFEST_BYTES_MAX + 1)
        if len(data) > MANIFEST_BYTES_MAX:
            raise Corrupt(f"{path.name} is over the limit of {MANIFEST_BYTES_MAX} bytes")
        return data

    def _inside(self, name: str) -> Path:
        """A file of the image. Docker archives name layers by links to others, so links count when they stay inside."""
        path = Path(os.path.realpath(self.place / name)) if "\0" not in name else Path("/")
        if Path(os.path.realpath(self.place)) not in path.parents:
            raise Corrupt(f"the image names {name[:200]!r}, which lies outside of it")
        return path


def _is_saved(place: Path) -> bool:
    try:
        with _regular(place / "manifest.json") as file:
            msgspec.json.decode(file.read(MANIFEST_BYTES_MAX), type=list[_Saved])
    except (P2PDistError, *UNDECODABLE):
        return False
    return True


def _names_of(descriptor: _Descriptor) -> list[str]:
    return [name for key in _NAMES if (name := (descriptor.annotations or {}).get(key))]


def _fits(descriptor: _Descriptor) -> bool:
    """Whether an image is for this machine, or does not say."""
    said = descriptor.platform or {}
    machine = _MACHINES.get(platform.machine(), platform.machine())
    return bool(said.get("architecture", machine) == machine and said.get("os", "linux") == "linux")


def _ambiguous(wanted: str, names: list[str]) -> P2PDistError:
    shown = ", ".join(dict.fromkeys(names)) or "they have no names"
    if wanted:
        return NotFound(f"there is no image {wanted!r} for this machine in it; there is: {shown[:500]}")
    return UsageError(
        f"it does not hold exactly one image for this machine: {shown[:500]}", remedy="Choose with --image"
    )


def _decoded(data: bytes, kind: type[Document], what: str) -> Document:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise Corrupt(f"{what} is not what it should be: {error}") from error


@contextlib.contextmanager
def _regular(path: Path) -> Iterator[IO[bytes]]:
    """A regular file, open for reading; raises NotFound, Corrupt or P2PDistError."""
    try:
        file = open_regular(path, follow=False)
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {path}") from error
    except OSError as error:
        if isinstance(error, NotRegular) or error.errno in _NO_NAMES:
            raise Corrupt(f"{path} is not a regular file") from error
        raise P2PDistError(f"cannot read {path}: {error.strerror}") from error
    with file:
        yield file


@contextlib.contextmanager
def _opened(path: Path, report: Report) -> Iterator[IO[bytes]]:
    """The decompressed bytes of an archive."""
    with _regular(Path(os.path.realpath(path))) as file:
        head = file.read(6)
        file.seek(0)
        counted = cast(
            IO[bytes], io.BufferedReader(_Counted(file, os.fstat(file.fileno()).st_size, report), CHUNK_BYTES)
        )
        if head.startswith(b"\x1f\x8b"):
            yield cast(IO[bytes], gzip.GzipFile(fileobj=counted, mode="rb"))
        elif head.startswith(b"\x28\xb5\x2f\xfd"):
            yield cast(IO[bytes], zstandard.ZstdDecompressor().stream_reader(counted, read_across_frames=True))
        elif head.startswith(b"\xfd7zXZ\0"):
            yield cast(IO[bytes], lzma.LZMAFile(counted))  # noqa: SIM115
        elif head.startswith(b"BZh"):
            yield cast(IO[bytes], bz2.BZ2File(counted))
        else:
            yield counted


class _Counted(io.RawIOBase):
    """Reads on from a file and reports how far it is."""

    def __init__(self, file: IO[bytes], total: int, report: Report) -> None:
        self._file, self._total, self._report, self._done = file, total, report, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = cast(io.BufferedReader, self._file).readinto(buffer)
        self._done += count
        self._report("unpacking", self._done, self._total)
        return count


class _Hashing:
    """Reads on and hashes what comes by."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.hasher = stream, hashlib.sha256()

    def read(self, length: int) -> bytes:
        data = self._stream.read(length)
        self.hasher.update(data)
        return data
