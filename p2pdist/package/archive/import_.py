"""Imports: a directory, a tar, or a container image becomes a directory tree and the config of
its program.

An image is an OCI image layout (image specification 1.0), the output of `docker save`, or what
skopeo and podman write to `dir:PATH` (containers-transports(5)), as a directory or as a tar of it.
Blobs are compared with their digests, and layers with the `diff_ids`
of the config, before anything is packed. The first bytes say which compression a file has (gzip,
zstd, xz, bzip2). The program is the image's entrypoint followed by its command.

Of an index the images of another name or platform are left out. The rest differ by their variants;
the first one that this machine runs is taken (image specification, "Image Index": the first
matching entry).
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
import posixpath
import re
import select
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal, TypeVar, cast

import msgspec
import zstandard

from p2pdist.files import NotRegular, open_regular, own_descriptor
from p2pdist.model.digest import Digest, is_digest
from p2pdist.model.errors import UNDECODABLE, Corrupt, NotFound, P2PDistError, TooLarge, UsageError, remedy_of
from p2pdist.model.image_manifest import INDEX_DEPTH_MAX
from p2pdist.model.manifest import (
    LAYERS_MAX,
    MANIFEST_BYTES_MAX,
    MODEL_LAYERS_MAX,
    PIECES_TYPE,
    Config,
    Descriptor,
)
from p2pdist.model.modelpack import ARTIFACT_TYPE, ModelLayer, model_layers
from p2pdist.model.modelpack import CONFIG_TYPE as MODEL_CONFIG_TYPE
from p2pdist.model.platform import Platform, machine_platform, parse_platform, platform_of
from p2pdist.package.archive.untar import Applied, apply_tar, finish
from p2pdist.package.image.squashfs import MTIME_MAX
from p2pdist.package.source.scan import Scan

CHUNK_BYTES = 1 << 20
PIPE_LOOK_S = 0.2
"""How often it is looked whether the reading of a pipe is to end."""

WINDOW_BYTES_MAX = 128 << 20
"""Of memory that decompressing zstd may take: the default of its library, and of zstd(1)."""
COMPRESSED_BYTES = 4096
"""Read of an xz or zstd file at a time: zstd makes up to 128 KiB of four bytes."""
_NAMES = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
_NO_NAMES = (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)
"""What opening by a name fails with that no file of an image can have."""
_ATTESTED = "vnd.docker.reference.type"
"""An annotation of what belongs to an image and is none."""
_BLOBS_OF_DIRECTORY = ("{}", "{}.manifest.json")
_VERSION_OF_DIRECTORY = b"Directory Transport Version: "
"""What the file "version" of an image directory begins with."""
_LAYER_ENDS = (".tar", ".tar+gzip", ".tar.gzip", ".tar+zstd", ".tar.zstd")

Report = Callable[[str, int, int], None]
Document = TypeVar("Document")


@dataclass(frozen=True, slots=True)
class Unpacked:
    """An unpacked source."""

    root: Path
    kind: str
    """directory, tar, OCI image, docker archive, image directory or model."""
    config: Config = field(default_factory=Config)
    seen: Scan = field(default_factory=Scan)
    """Counts, and the entries that were left out."""
    modes: dict[bytes, int] = field(default_factory=dict)
    """Modes by path for the package, of entries that would be unreadable with them here."""
    notes: tuple[str, ...] = ()
    """For the user."""
    user: str = ""
    """The user that an image names for its program; a package has none."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which image of several: its name, tag or digest, and its platform; "" leaves it to what there
    is and to this machine."""

    image: str = ""
    platform: str = ""
    form: Literal["squashfs", "tree"] = "tree"
    """What it will be packed as."""

    def applied(self) -> Applied:
        """For what such a package can hold."""
        if self.form == "tree":
            return Applied()
        return Applied(xattrs=False, times_ns=(0, MTIME_MAX * 1_000_000_000))


class _Descriptor(msgspec.Struct, rename={"media_type": "mediaType"}):
    digest: str
    size: int = 0
    media_type: str = ""
    annotations: dict[str, str] | None = None
    platform: dict[str, Any] | None = None


class _Index(msgspec.Struct):
    manifests: list[_Descriptor]


class _Manifest(msgspec.Struct, rename={"artifact_type": "artifactType"}):
    config: _Descriptor
    layers: list[_Descriptor] | None
    """None, as programs in Go write it, where there are none."""
    artifact_type: str = ""


class _Saved(msgspec.Struct, rename="pascal"):
    """An image in the manifest.json of a docker archive."""

    config: str
    layers: list[str] | None
    repo_tags: list[str] | None = None


class _Execution(msgspec.Struct, rename="pascal"):
    entrypoint: list[str] | str | None = None
    cmd: list[str] | str | None = None
    env: list[str] | None = None
    user: str | None = None
    working_dir: str | None = None


class _RootFiles(msgspec.Struct):
    diff_ids: list[str] | None = None


class _Image(msgspec.Struct):
    config: _Execution | None = None
    os: str = ""
    architecture: str = ""
    variant: str = ""
    rootfs: _RootFiles = msgspec.field(default_factory=_RootFiles)


def unpack_source(
    source: Path,
    work: Path,
    *,
    image: str = "",
    platform: str = "",
    form: Literal["squashfs", "tree"] = "tree",
    report: Report = lambda what, done, total: None,
) -> Unpacked:
    """Unpack `source` below the empty directory `work`; a plain directory stays where it is.
    `image` (a name, a tag or a digest) and `platform` (OS/ARCH[/VARIANT]) choose among several
    images; `form` is what it will be packed as. Blocks. Raises NotFound, UsageError, Corrupt,
    TooLarge, DiskFull or P2PDistError."""
    choice = Choice(image, platform, form)
    if platform:
        parse_platform(platform)
    if source.is_dir():
        return _image(source, work, choice, report) or Unpacked(source, "directory")
    if not (source.is_file() or source.is_fifo() or (source.is_socket() and own_descriptor(source) is not None)):
        raise NotFound(
            f"there is no directory or archive {source}" + (": it is a device" * source.exists()),
            remedy="Check the path",
        )
    outer = work / "archive"
    outer.mkdir()
    applied = choice.applied()
    with _opened(_readable(source), report) as (stream, compressed):
        apply_tar(stream, outer, applied, whiteouts=False, vouched=compressed)
    finish(outer, applied)
    plain = Unpacked(outer, "tar", seen=applied.seen, modes=applied.closed, notes=_notes(applied))
    return _image(outer, work, choice, report) or _image_within(plain, work, choice, report)


def _image(place: Path, work: Path, choice: Choice, report: Report) -> Unpacked | None:
    """What an image in the directory `place` unpacks to; None where there is no image."""
    images = _Images(place, work, choice, report)
    if (place / "oci-layout").is_file() and (place / "index.json").is_file():
        return images.from_layout()
    if _is_directory_of_blobs(place):
        return replace(images, blobs=_BLOBS_OF_DIRECTORY).from_directory()
    return images.from_saved() if _is_saved(place) else None


def _image_within(plain: Unpacked, work: Path, choice: Choice, report: Report) -> Unpacked:
    """The image in the one folder of which an archive consists, as `tar c DIRECTORY` makes it; else
    the archive as it is, with a note of images in its folders."""
    entries = sorted(plain.root.iterdir())
    folders = [entry for entry in entries if not entry.is_symlink() and _holds_image(entry)]
    if folders and len(entries) == 1:
        image = _image(folders[0], work, choice, report)
        assert image is not None
        return image
    note = "{} in it holds a container image, which is packed as plain files; unpack the archive and import that folder for the image"
    return replace(plain, notes=(*plain.notes, *(note.format(folder.name) for folder in folders[:1])))


def _holds_image(place: Path) -> bool:
    is_layout = (place / "oci-layout").is_file() and (place / "index.json").is_file()
    return is_layout or _is_directory_of_blobs(place) or _is_saved(place)


def _notes(applied: Applied) -> tuple[str, ...]:
    """Notes of what follows the end of an archive, and of times that a package cannot hold."""
    notes = []
    if applied.behind:
        notes.append(f"{applied.behind} bytes behind the end of the archive were left out")
    if applied.retimed:
        entries = "1 entry has" if applied.retimed == 1 else f"{applied.retimed} entries have"
        notes.append(
            f"{entries} a modification time that the package cannot hold, and got the nearest that it can; "
            "images hold 1970 to 2106, trees (--format tree) nearly any"
        )
    return tuple(notes)


@dataclass(frozen=True, slots=True)
class _Images:
    """The images in the directory `place`."""

    place: Path
    work: Path
    choice: Choice
    report: Report
    blobs: tuple[str, ...] = ("blobs/sha256/{}",)
    """Where the blob with these digits of its digest may be."""

    def from_layout(self) -> Unpacked:
        """From an OCI image layout."""
        index = _decoded(self._small(self.place / "index.json"), _Index, "index.json")
        return self._unpacked(self._manifest(index, self.choice.image, INDEX_DEPTH_MAX), "OCI image")

    def from_directory(self) -> Unpacked:
        """From what skopeo and podman write to dir:PATH, whose images have no names."""
        data = self._small(self.place / "manifest.json")
        if _is_index(data):
            manifest = self._manifest(_decoded(data, _Index, "manifest.json"), self.choice.image, INDEX_DEPTH_MAX)
        elif self.choice.image:
            raise _ambiguous(self.choice.image, [])
        else:
            manifest = _decoded(data, _Manifest, "manifest.json")
        return self._unpacked(manifest, "image directory")

    def _unpacked(self, manifest: _Manifest, kind: str) -> Unpacked:
        if manifest.artifact_type == ARTIFACT_TYPE or manifest.config.media_type == MODEL_CONFIG_TYPE:
            return self._from_model(manifest)
        config = _decoded(self._blob_bytes(manifest.config), _Image, "the image's config")
        layers = manifest.layers or []
        for layer in layers:
            if not layer.media_type.endswith(_LAYER_ENDS):
                raise UsageError(
                    f"a layer of type {layer.media_type[:100]!r} is no tar and cannot be imported",
                    remedy="A package of p2pdist needs no import: push it",
                )
        return self._apply([self._blob(layer) for layer in layers], config, kind)

    def _from_model(self, manifest: _Manifest) -> Unpacked:
        """From a model: files as they are, and tars without whiteouts, one over the other."""
        listed = [layer for layer in manifest.layers or [] if layer.media_type != PIECES_TYPE]
        if len(listed) > MODEL_LAYERS_MAX:
            raise Corrupt(
                f"the model has {len(listed)} layers, over the limit of {MODEL_LAYERS_MAX}",
                remedy="Make it of fewer files, with tars of many",
            )
        described = [
            Descriptor(layer.media_type, Digest(layer.digest), layer.size, layer.annotations or {}) for layer in listed
        ]
        layers = [(layer, self._blob(plain)) for layer, plain in zip(model_layers(described), listed, strict=True)]
        root, applied = self.work / "root", self.choice.applied()
        root.mkdir()
        for layer, path in layers:
            if layer.form == "raw":
                with _regular(path) as file:
                    stream = _OneFile(layer, file)
                    apply_tar(cast(IO[bytes], stream), root, applied, whiteouts=False, vouched=True)
                continue
            with _opened(_regular(path), self.report) as (unpacked, _):
                apply_tar(unpacked, root, applied, whiteouts=False, vouched=True)
        finish(root, applied)
        return Unpacked(root, "model", Config(), applied.seen, applied.closed, _notes(applied))

    def from_saved(self) -> Unpacked:
        """From what `docker save` wrote."""
        saved = _decoded(self._small(self.place / "manifest.json"), list[_Saved], "manifest.json")
        name = self.choice.image
        images = {image.config: image for image in saved if not name or _is_called(name, image.repo_tags or [], "")}
        if len(images) != 1:
            raise _ambiguous(name, [tag for image in saved for tag in image.repo_tags or []], len(saved))
        (chosen,) = images.values()
        config = _decoded(self._small(self._inside(chosen.config)), _Image, "the image's config")
        return self._apply([self._inside(layer) for layer in chosen.layers or []], config, "docker archive")

    def _manifest(self, index: _Index, name: str, depth: int) -> _Manifest:
        """The manifest of the image `name`, for the chosen platform or this machine."""
        images = [manifest for manifest in index.manifests if _ATTESTED not in (manifest.annotations or {})]
        named = {
            manifest.digest: manifest
            for manifest in images
            if not name or _is_called(name, _names_of(manifest), manifest.digest)
        }
        if not named or not depth:
            raise _ambiguous(name, [other for manifest in images for other in _names_of(manifest)], len(images))
        chosen = _chosen(list(named.values()), self.choice.platform, name)
        data = self._blob_bytes(chosen)
        if _is_index(data):
            return self._manifest(_decoded(data, _Index, chosen.digest), "", depth - 1)
        return _decoded(data, _Manifest, chosen.digest)

    def _note_platform(self, image: _Image) -> tuple[str, ...]:
        """What to say of an image that this machine does not run. Raises NotFound when another
        platform was asked for."""
        if not image.architecture:
            return ()
        platform = platform_of(image.os, image.architecture, image.variant)
        if self.choice.platform:
            choice, exact = parse_platform(self.choice.platform)
            if (choice.os, choice.architecture) != (platform.os, platform.architecture) or (
                exact and not choice.runs(platform)
            ):
                raise NotFound(
                    f"there is no image for {choice} in it, only one for {platform}",
                    remedy="Leave --platform away, or save that image",
                )
        here = this_platform()
        return () if here.runs(platform) else (f"the image is for {platform}; this machine is {here}",)

    def _apply(self, layers: list[Path], image: _Image, kind: str) -> Unpacked:
        if len(layers) > LAYERS_MAX:
            raise TooLarge(
                f"the image has {len(layers)} layers, over the limit of {LAYERS_MAX}", remedy="Build it with fewer"
            )
        diff_ids = image.rootfs.diff_ids or []
        if len(diff_ids) != len(layers):
            what = f"the image has {len(layers)} layers, and its config names {len(diff_ids)} (diff_ids)"
            raise Corrupt(what, remedy="Save it anew, by skopeo copy or docker save")
        notes = self._note_platform(image)
        root = self.work / "root"
        root.mkdir()
        applied = self.choice.applied()
        for path, expected in zip(layers, diff_ids, strict=True):
            with _opened(_regular(path), self.report) as (stream, _):
                hashing = _Hashing(stream)
                apply_tar(cast(IO[bytes], hashing), root, applied, vouched=True)
            if "sha256:" + hashing.hasher.hexdigest() != expected:
                raise Corrupt(
                    f"the layer {path.name} is not the one that the image's config names: {expected[:100]}",
                    remedy="Save it anew, by skopeo copy or docker save",
                )
        finish(root, applied)
        run = image.config or _Execution()
        program = (*_words(run.entrypoint), *_words(run.cmd))
        env = [entry for entry in run.env or () if entry.partition("=")[0] and "=" in entry]
        if impossible := [entry for entry in run.env or () if entry not in env]:
            notes += (f"the image's environment entries without name or value are left out: {impossible[:5]}"[:500],)
        config = Config(program, tuple(env), _cleaned(run.working_dir or ""))
        notes += _notes(applied)
        return Unpacked(root, kind, config, applied.seen, applied.closed, tuple(notes), run.user or "")

    def _blob(self, descriptor: _Descriptor) -> Path:
        """Where a blob lies, once its bytes were compared with its digest."""
        if not is_digest(descriptor.digest):
            raise Corrupt(
                f"{descriptor.digest[:100]!r} is not a SHA-256 digest",
                remedy="Save it anew, by skopeo copy or docker save",
            )
        paths = [self._inside(name.format(descriptor.digest[7:])) for name in self.blobs]
        path = next((path for path in paths if path.is_file()), paths[0])
        hasher = hashlib.sha256()
        with _regular(path) as file:
            while chunk := file.read(CHUNK_BYTES):
                hasher.update(chunk)
        if "sha256:" + hasher.hexdigest() != descriptor.digest:
            raise Corrupt(
                f"blob {descriptor.digest} in {self.place} was altered or cut off", remedy="Copy the image here again"
            )
        return path

    def _blob_bytes(self, descriptor: _Descriptor) -> bytes:
        return self._small(self._blob(descriptor))

    def _small(self, path: Path) -> bytes:
        with _regular(path) as file:
            data = file.read(MANIFEST_BYTES_MAX + 1)
        if len(data) > MANIFEST_BYTES_MAX:
            raise Corrupt(
                f"{path.name} is over the limit of {MANIFEST_BYTES_MAX} bytes",
                remedy="Save it anew, by skopeo copy or docker save",
            )
        return data

    def _inside(self, name: str) -> Path:
        """A file of the image. Docker archives name layers by links to others, so links count when
        they stay inside."""
        path = Path(os.path.realpath(self.place / name)) if "\0" not in name else Path("/")
        if Path(os.path.realpath(self.place)) not in path.parents:
            raise Corrupt(
                f"the image names {name[:200]!r}, which lies outside of it",
                remedy="Save it anew, by skopeo copy or docker save",
            )
        return path


def _words(command: list[str] | str | None) -> tuple[str, ...]:
    """The words of a command. Old images have one that is a single word as a plain string, as
    docker takes it (strslice)."""
    return (command,) if isinstance(command, str) else tuple(command or ())


def _cleaned(working_dir: str) -> str:
    """A working directory as runtimes of containers take it: ".." does not lead above the root."""
    return posixpath.normpath(working_dir) if working_dir.startswith("/") else working_dir


def _is_index(data: bytes) -> bool:
    return b'"manifests"' in data and b'"layers"' not in data


def _is_directory_of_blobs(place: Path) -> bool:
    """Whether skopeo or podman wrote it as dir:PATH."""
    try:
        with _regular(place / "version") as file:
            return file.read(len(_VERSION_OF_DIRECTORY)) == _VERSION_OF_DIRECTORY
    except P2PDistError:
        return False


def _is_saved(place: Path) -> bool:
    """Whether it is what `docker save` wrote, which lists one image at least: other programs have a
    manifest.json, too, and an empty list says nothing."""
    try:
        with _regular(place / "manifest.json") as file:
            return bool(msgspec.json.decode(file.read(MANIFEST_BYTES_MAX), type=list[_Saved]))
    except (P2PDistError, *UNDECODABLE):
        return False


def _names_of(descriptor: _Descriptor) -> list[str]:
    return [name for key in _NAMES if (name := (descriptor.annotations or {}).get(key))]


def _is_called(image_name: str, names: list[str], digest: str) -> bool:
    """Whether `image_name` is one of the names, as it stands or as docker and podman write it out,
    or the digest. A name that has neither a slash nor a colon is a tag alone."""
    full = _written_out(image_name)
    meant = (full, full.replace("docker.io/library/", "localhost/", 1))
    written = (_written_out(name) for name in names if "/" in name or ":" in name)
    return image_name in (digest, *names) or any(name in meant for name in written)


def _written_out(name: str) -> str:
    """team/app as docker.io/team/app:latest (distribution, reference.ParseNormalizedNamed)."""
    first, slash, rest = name.partition("/")
    if not slash:
        name = f"docker.io/library/{name}"
    elif first == "index.docker.io":
        name = f"docker.io/{rest}"
    elif not re.search(r"[.:]|^localhost$", first):
        name = f"docker.io/{name}"
    return name if ":" in name.rpartition("/")[2] or "@" in name else f"{name}:latest"


def _chosen(images: list[_Descriptor], platform: str, image_name: str) -> _Descriptor:
    """One of images that have the wanted name. Raises NotFound, or UsageError where they differ by
    more than their platform."""
    platforms = [_platform_of(image) for image in images]
    images = [
        image
        for image, offered in zip(images, platforms, strict=True)
        if not offered or offered.architecture != "unknown"
    ]
    platforms = [_platform_of(image) for image in images]
    if len(images) == 1:
        return images[0]  # what its config says of its platform is looked at before it is unpacked
    if platform:
        target, exact = parse_platform(platform)
        fitting = [
            image for image, offered in zip(images, platforms, strict=True) if not offered or target.runs(offered)
        ]
        fitting.sort(key=_level_of, reverse=True)
        if not fitting and not exact:
            same = target.os, target.architecture
            fitting = [
                i
                for i, offered in zip(images, platforms, strict=True)
                if offered and (offered.os, offered.architecture) == same
            ]
    else:
        target = this_platform()
        fitting = [
            image for image, offered in zip(images, platforms, strict=True) if not offered or target.runs(offered)
        ]
    if not fitting:
        shown = ", ".join(dict.fromkeys(str(offered) for offered in platforms if offered))
        raise NotFound(
            f"there is no image for {target} in it; there is: {shown[:500]}", remedy="Choose with --platform"
        )
    first, *others = fitting
    for other in others:
        alike = _platform_of(first) in (None, _platform_of(other)) or _platform_of(other) is None
        if alike or (not image_name and _names_of(first) != _names_of(other)):
            raise _ambiguous("", [name for image in images for name in _names_of(image) or [image.digest]])
    return first


def _platform_of(descriptor: _Descriptor) -> Platform | None:
    """None where an index does not say what an image is for."""
    stated = descriptor.platform
    return (
        platform_of(stated.get("os"), stated["architecture"], stated.get("variant"))
        if stated and stated.get("architecture")
        else None
    )


def _level_of(descriptor: _Descriptor) -> tuple[int, int]:
    platform = _platform_of(descriptor)
    return platform.level if platform else (0, 0)


def this_platform() -> Platform:
    """The platform of this machine: which images it runs."""
    try:
        cpu = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        cpu = ""  # the least of its architecture
    return machine_platform(platform.machine(), cpu)


def _ambiguous(name: str, names: list[str], images: int = 1) -> P2PDistError:
    """The failure of choosing one of so many `images` by a name; "" for any."""
    shown = ", ".join(dict.fromkeys(names)) or "they have no names"
    if name:
        others = f"; there is: {shown[:500]}" if names else ": its images have no names"
        return NotFound(f"there is no image {name!r} in it{others}", remedy="Choose with --image")
    if not images:
        return NotFound(
            "there is no image in it: its list of images is empty", remedy="Save it anew, by skopeo copy or docker save"
        )
    return UsageError(
        f"it does not hold exactly one image for this machine: {shown[:500]}", remedy="Choose with --image"
    )


def _decoded(data: bytes, kind: type[Document], what: str) -> Document:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise Corrupt(
            f"{what} is not what it should be: {error}", remedy="Save it anew, by skopeo copy or docker save"
        ) from error


@contextlib.contextmanager
def _regular(path: Path) -> Iterator[IO[bytes]]:
    """A regular file, open for reading; raises NotFound, Corrupt or P2PDistError."""
    try:
        file = open_regular(path, follow=False)
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {path}", remedy="Copy the image here again, all of it") from error
    except OSError as error:
        if isinstance(error, NotRegular) or error.errno in _NO_NAMES:
            raise Corrupt(f"{path} is not a regular file", remedy="Copy the image here again") from error
        raise P2PDistError(
            f"cannot read {path}: {error.strerror}",
            remedy=remedy_of(error),
        ) from error
    with file:
        yield file


@contextlib.contextmanager
def _opened(archive: contextlib.AbstractContextManager[IO[bytes]], report: Report) -> Iterator[tuple[IO[bytes], bool]]:
    """The decompressed bytes of an archive, and whether it is compressed: then reading them to
    their end shows that they are whole."""
    with archive as file:
        counted = io.BufferedReader(_Counted(file, os.fstat(file.fileno()).st_size, report), CHUNK_BYTES)
        head = counted.peek(6)[:6]
        stream: Any = None
        if head.startswith(b"\x1f\x8b"):
            stream = gzip.GzipFile(fileobj=counted, mode="rb")
        elif head.startswith(b"\x28\xb5\x2f\xfd") or head[1:4] == b"\x2a\x4d\x18":
            stream = _Frames(counted, zstandard.ZstdDecompressor().decompressobj)
        elif head.startswith(b"\xfd7zXZ\0"):
            stream = _Frames(counted, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), padding=b"\0")
        elif head.startswith(b"BZh"):
            stream = bz2.BZ2File(counted)
        if stream is None:
            yield counted, False
        else:
            yield cast(IO[bytes], io.BufferedReader(stream, CHUNK_BYTES)), True


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[IO[bytes]]:
    """A file or a pipe, open for reading. What a descriptor of this process leads to, as /dev/stdin
    names one, is read from where that stands: opened by its name it would begin anew, and may not
    be there, or belong to another user. Raises as _regular does."""
    if (descriptor := own_descriptor(path)) is not None:
        with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file:
            yield cast(IO[bytes], file)
        return
    if not path.is_fifo():
        with _regular(Path(os.path.realpath(path))) as regular:
            yield regular
        return
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            yield cast(IO[bytes], file)
    except OSError as error:
        if error.filename is None:
            raise
        raise P2PDistError(
            f"cannot read {path}: {error.strerror}",
            remedy=remedy_of(error),
        ) from error


class _Frames(io.RawIOBase):
    """Decompresses frames, one behind the other, each to its end. The readers of the libraries end
    without a word where one is cut off (zstandard) or where something else follows (lzma). `start`
    makes a decompressor of one frame; `padding` may stand between them."""

    def __init__(self, file: IO[bytes], start: Callable[[], Any], padding: bytes = b"") -> None:
        self._file, self._start, self._padding = file, start, padding
        self._frame: Any = None
        self._input, self._output = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output and self._go_on():
            pass
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _go_on(self) -> bool:
        """Decompress a little more; False at the end. Raises EOFError and what the library
        raises."""
        if self._frame is None or getattr(self._frame, "needs_input", True):
            self._input = self._input or self._file.read(COMPRESSED_BYTES)
            if self._frame is None and self._padding:
                self._input = self._input.lstrip(self._padding)
                if not self._input:
                    self._input = self._file.read(COMPRESSED_BYTES)
                    return bool(self._input)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the compressed data is cut off")
                return False
        self._frame = self._frame or self._start()
        limit = () if hasattr(self._frame, "unconsumed_tail") else (CHUNK_BYTES,)
        try:
            self._output = memoryview(self._frame.decompress(self._input, *limit))
        except zstandard.ZstdError as error:
            if "too much memory" not in str(error):
                raise
            raise TooLarge(
                f"the archive is compressed with a window of over {WINDOW_BYTES_MAX >> 20} MiB, as zstd --long=31 makes it",
                remedy="Compress it again with --long=27 at most, or import what zstd -d --long=31 -c FILE writes, from -",
            ) from error
        self._input = b""
        if self._frame.eof:
            self._input, self._frame = self._frame.unused_data, None
        return True


class _Counted(io.RawIOBase):
    """Reads on from a file and reports how far it is, also while nothing comes through a pipe: a
    report may end the reading."""

    def __init__(self, file: IO[bytes], total: int, report: Report) -> None:
        self._file, self._total, self._report, self._done = file, total, report, 0
        self._poll = select.poll()
        self._poll.register(file, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = None
        while count is None:  # nothing in a pipe, after all
            while not self._poll.poll(1000 * PIPE_LOOK_S):
                self._report("unpacking", self._done, self._total)
            try:
                count = cast(io.FileIO, self._file).readinto(buffer)
            except OSError as error:
                raise P2PDistError(
                    f"cannot read the archive on: {error.strerror}",
                    remedy="Begin again; where it comes through a pipe or socket, see what ended its writer",
                ) from error
        self._done += count
        self._report("unpacking", self._done, self._total)
        return count


class _OneFile:
    """A tar of one file of a model, so that it is written as members of tars are: behind no link
    that leads out."""

    def __init__(self, layer: ModelLayer, file: IO[bytes]) -> None:
        member = tarfile.TarInfo(layer.path.decode())
        member.mode, member.size = layer.mode, os.fstat(file.fileno()).st_size
        self._head = member.tobuf(tarfile.PAX_FORMAT)
        self._file, self._tail = file, bytes(-member.size % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE)

    def read(self, length: int) -> bytes:
        data, self._head = self._head[:length], self._head[length:]
        if not data and not (data := self._file.read(length)):
            data, self._tail = self._tail[:length], self._tail[length:]
        return data


class _Hashing:
    """Reads on and hashes what comes by."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.hasher = stream, hashlib.sha256()

    def read(self, length: int) -> bytes:
        data = self._stream.read(length)
        self.hasher.update(data)
        return data
