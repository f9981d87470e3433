"""Applying a tar to a directory, as a layer of an OCI image is applied to those below it (image specification, "Image Layer Filesystem
Changeset"): entries replace what was there, `.wh.NAME` removes NAME, `.wh..wh..opq` removes what lower layers have in a directory.

The tar may be hostile. Nothing is written outside the directory: names with ".." are refused, and so is an entry that lies, or a hard
link whose target lies, beyond a symbolic link. Symbolic links are made as they are and never followed. Devices, FIFOs, set-uid and
set-gid bits are dropped. The filters of tarfile itself are not used: they refuse the absolute links that images are full of, and
change modes.

tarfile keeps whole headers (long names, pax records, maps of sparse files) in memory, of whatever length they are said to be, and follows
them as far as they go. So what may be read for one entry besides its content is limited, and pax records are checked before tarfile
parses them: its time is quadratic in the length of some that are broken.
"""

from __future__ import annotations

import errno
import lzma
import os
import re
import shutil
import stat
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from p2pdist.model.errors import Corrupt, DiskFull, P2PDistError, TooLarge
from p2pdist.model.printable import printable
from p2pdist.model.tree import (
    DEPTH_MAX,
    ENTRIES_MAX,
    MODE_MASK,
    NAME_BYTES_MAX,
    PATH_BYTES_MAX,
    TARGET_BYTES_MAX,
)
from p2pdist.package.scan import Scan

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
CHUNK_BYTES = 1 << 20
BYTES_MAX = 1 << 44
"""Of all files of an archive: 16 TiB."""
HEADER_BYTES_MAX = 1 << 20
"""Of one entry, with the headers in front of it that tell more."""
GLOBAL_RECORDS_MAX = 100
"""Pax records that hold for all entries that follow."""
DIGITS_MAX = 256
"""In a row, in a pax header."""
TIME_CHARACTERS_MAX = 40
TIME_S_MAX = 1 << 34

BROKEN = (
    tarfile.TarError,
    zstandard.ZstdError,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    ValueError,
    OverflowError,
    RecursionError,
)
"""What reading a damaged archive may raise, besides OSError without a number, from gzip and bz2."""


@dataclass(slots=True)
class Applied:
    """What was applied so far, to be handed from layer to layer. Directories get their modes and times at the end."""

    entries: int = 0
    size: int = 0
    seen: Scan = field(default_factory=Scan)
    directories: dict[bytes, tuple[int, int]] = field(default_factory=dict)


def apply_tar(
    stream: IO[bytes],
    target: Path,
    applied: Applied,
    *,
    whiteouts: bool = True,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Apply the uncompressed tar in `stream` to the directory `target`. Without `whiteouts` files of such names are plain files. Raises
    Corrupt, TooLarge, DiskFull or P2PDistError; then `target` is half done."""
    layer = _Layer(os.fsencode(target), applied, whiteouts, on_bytes)
    limited = cast(IO[bytes], _Limited(stream))
    try:
        with tarfile.open(
            fileobj=limited, mode="r|", encoding="utf-8", errors="surrogateescape", tarinfo=_limited_by(limited)
        ) as archive:
            for member in archive:
                layer.add(archive, member)
                archive.members = []  # type: ignore[attr-defined] # it would keep all of them
        while stream.read(CHUNK_BYTES):
            pass  # what follows is read too: a check sum may stand at the end
    except BROKEN as error:
        raise Corrupt(f"the archive is damaged: {error}", remedy="Make it again") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(target, applied.size, error.errno) from error
        if error.errno is None:
            raise Corrupt(f"the archive is damaged: {error}", remedy="Make it again") from error
        raise P2PDistError(f"cannot unpack {printable(str(error.filename or target))}: {error.strerror}") from error


def finish(target: Path, applied: Applied) -> None:
    """Give directories their modes and times, once all layers are applied."""
    for path, (mode, time_ns) in sorted(applied.directories.items(), reverse=True):
        full = os.path.join(os.fsencode(target), path)
        os.chmod(full, mode)
        os.utime(full, ns=(time_ns, time_ns))


@dataclass(slots=True)
class _Layer:
    target: bytes
    applied: Applied
    whiteouts: bool
    on_bytes: Callable[[int], None]
    own: set[bytes] = field(default_factory=set)
    """What this layer itself has brought, and the directories above: its own whiteouts do not remove it."""
    real: set[bytes] = field(default_factory=lambda: {b""})
    """Directories known to be ones, with all above them."""

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self.applied.entries += 1
        if self.applied.entries > ENTRIES_MAX:
            raise TooLarge(f"the archive has more than {ENTRIES_MAX} entries")
        path = _checked(member.name)
        directory, name = os.path.split(path)
        if self.whiteouts and name != OPAQUE and any(part.startswith(WHITEOUT * 2) for part in path.split(b"/")):
            return  # a union file system's own affairs
        if self.whiteouts and name.startswith(WHITEOUT):
            self._white_out(directory, name)
        elif not path:
            return  # the top directory itself
        elif member.isdir():
            self._make_directory(path, member)
        elif member.isreg() or member.issym() or member.islnk():
            self._parents(directory)
            self._clear(path)
            self._make(archive, member, path)
            self._own(path)
        else:
            self.applied.seen.drop(os.fsdecode(path), _KINDS.get(member.type, "special file"))

    def _full(self, path: bytes) -> bytes:
        return os.path.join(self.target, path)

    def _own(self, path: bytes) -> None:
        while path and path not in self.own:
            self.own.add(path)
            path = os.path.dirname(path)

    def _parents(self, directory: bytes) -> None:
        """Make the directories above an entry where they are missing; raises Corrupt when one is something else."""
        missing = []
        while directory not in self.real:
            missing.append(directory)
            directory = os.path.dirname(directory)
        for each in reversed(missing):
            try:
                if not stat.S_ISDIR(os.lstat(self._full(each)).st_mode):
                    raise _wrong(each, "is no directory, and something shall lie in it")
            except FileNotFoundError:
                os.mkdir(self._full(each), 0o700)
                self.applied.directories[each] = (0o755, 0)
            self.real.add(each)

    def _clear(self, path: bytes) -> None:
        """Remove what an entry replaces."""
        full = self._full(path)
        try:
            mode = os.lstat(full).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(mode):
            os.unlink(full)
            return
        shutil.rmtree(full)
        below = path + b"/"
        for known in [each for each in self.applied.directories if each == path or each.startswith(below)]:
            del self.applied.directories[known]
        self.real = {each for each in self.real if each != path and not each.startswith(below)}

    def _make_directory(self, path: bytes, member: tarfile.TarInfo) -> None:
        self._parents(os.path.dirname(path))
        full = self._full(path)
        if not (os.path.isdir(full) and not os.path.islink(full)):
            self._clear(path)
            os.mkdir(full, 0o700)
        self.applied.directories[path] = (self._mode(path, member), _time_ns(member))
        self.real.add(path)
        self._own(path)

    def _make(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: bytes) -> None:
        full = self._full(path)
        if member.issym():
            link = os.fsencode(member.linkname)
            if not 0 < len(link) <= TARGET_BYTES_MAX:
                raise _wrong(path, f"is a symbolic link to a name of {len(link)} bytes")
            os.symlink(link, full)
        elif member.islnk():
            other = _checked(member.linkname)
            self._parents(os.path.dirname(other))
            if not stat.S_ISREG(_mode_of(self._full(other))):
                raise _wrong(path, "is a hard link to no file")
            os.link(self._full(other), full, follow_symlinks=False)
            return
        else:
            self._write(archive, member, full)
            os.chmod(full, self._mode(path, member))
        os.utime(full, ns=(_time_ns(member), _time_ns(member)), follow_symlinks=False)

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, full: bytes) -> None:
        self.applied.size += member.size
        free = os.statvfs(self.target)
        if member.size < 0 or self.applied.size > BYTES_MAX:
            raise TooLarge(f"the files of the archive are larger than {BYTES_MAX} bytes")
        if member.size > free.f_bavail * free.f_frsize:
            raise _full(Path(os.fsdecode(self.target)), member.size)
        content = archive.extractfile(member)
        assert content is not None
        handle = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            while chunk := content.read(CHUNK_BYTES):
                file.write(chunk)
                self.on_bytes(len(chunk))

    def _mode(self, path: bytes, member: tarfile.TarInfo) -> int:
        for bit, what in ((stat.S_ISUID, "setuid bit"), (stat.S_ISGID, "setgid bit")):
            if member.mode & bit:
                self.applied.seen.drop(os.fsdecode(path), what)
        return member.mode & MODE_MASK

    def _white_out(self, directory: bytes, name: bytes) -> None:
        if not os.path.lexists(self._full(directory)):
            return
        self._parents(directory)
        names = os.listdir(self._full(directory)) if name == OPAQUE else [name[len(WHITEOUT) :]]
        for each in names:
            if each in (b"", b".", b".."):
                raise _wrong(directory, "holds a whiteout of nothing")
            self._hide(os.path.join(directory, each))

    def _hide(self, path: bytes) -> None:
        """Remove what lower layers have at a path; what this layer has brought there stays."""
        if path not in self.own:
            self._clear(path)
            return
        full = self._full(path)
        if os.path.isdir(full) and not os.path.islink(full):
            for name in os.listdir(full):
                self._hide(os.path.join(path, name))


class _Limited:
    """Reads on from a stream, no further than `left` bytes while an entry's header is read (None: as far as it goes)."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.left: int | None = None

    def read(self, length: int) -> bytes:
        if self.left is None:
            return self._stream.read(length)
        # What tarfile asks for is a few blocks; what it gathers of them is what counts.
        if self.left <= 0:
            raise Corrupt(f"the archive has an entry whose header is over {HEADER_BYTES_MAX} bytes", remedy=_REMEDY)
        data = self._stream.read(length)
        self.left -= len(data)
        return data


def _limited_by(stream: Any) -> type[tarfile.TarInfo]:
    """A TarInfo for tarfile.open that reads its headers within the limit of `stream`, a _Limited."""

    class Header(tarfile.TarInfo):
        @classmethod
        def fromtarfile(cls, archive: tarfile.TarFile) -> Header:
            if stream.left is not None:  # a header that tells more of the next one
                return super().fromtarfile(archive)
            stream.left = HEADER_BYTES_MAX
            try:
                return super().fromtarfile(archive)
            finally:
                stream.left = None
                if len(archive.pax_headers) > GLOBAL_RECORDS_MAX:
                    raise Corrupt(f"the archive has over {GLOBAL_RECORDS_MAX} global pax records", remedy=_REMEDY)

        def _proc_pax(self, archive: Any) -> Header:
            source = archive.fileobj
            data = source.read(-(-self.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)
            _check_records(data)
            archive.fileobj = _Again(archive, data)
            return cast(Header, super()._proc_pax(archive))  # type: ignore[misc] # typeshed keeps silent about it

    return Header


@dataclass(slots=True)
class _Again:
    """Stands for the stream of an archive until `data` has been read once more."""

    archive: Any
    data: bytes
    stream: Any = field(init=False)

    def __post_init__(self) -> None:
        self.stream = self.archive.fileobj

    def read(self, _length: int) -> bytes:
        self.archive.fileobj = self.stream
        return self.data


_RECORD = re.compile(rb"(\d{1,9}) ")


def _check_records(data: bytes) -> None:
    """See that pax records ("LENGTH KEYWORD=VALUE\n", LENGTH that of all of it) lie one behind the other. Raises Corrupt."""
    if any(len(digits) > DIGITS_MAX for digits in re.findall(rb"\d+", data)):
        raise Corrupt(f"the archive has a pax header with over {DIGITS_MAX} digits in a row", remedy=_REMEDY)
    position = 0
    while data[position : position + 1].isdigit():
        found = _RECORD.match(data, position)
        end = position + int(found[1]) if found else 0
        if not found or data[end - 1 : end] != b"\n" or data.find(b"=", found.end(), end) <= found.end():
            raise Corrupt("the archive has a pax header that is none", remedy=_REMEDY)
        position = end


def _checked(text: str) -> bytes:
    """The name of an entry as a path below the target; b"" is the target itself."""
    parts = [part for part in os.fsencode(text).split(b"/") if part not in (b"", b".")]
    path = b"/".join(parts)
    if b".." in parts or b"\0" in path:
        raise _wrong(path, "lies outside the archive")
    if len(path) > PATH_BYTES_MAX or len(parts) > DEPTH_MAX or any(len(part) > NAME_BYTES_MAX for part in parts):
        raise _wrong(path, "is too long or nested too deeply")
    return path


def _mode_of(full: bytes) -> int:
    try:
        return os.lstat(full).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _time_ns(member: tarfile.TarInfo) -> int:
    """To the nanosecond where a pax header says it so; 0 for an impossible time."""
    told = member.pax_headers.get("mtime", member.mtime)
    if isinstance(told, str) and len(told) > TIME_CHARACTERS_MAX:
        return 0
    try:
        time_s = Decimal(told)
        # An exponent may be huge: only a number that is not may become an int.
        time_ns = int(time_s.scaleb(9)) if 0 <= time_s < TIME_S_MAX else 0
    except (ArithmeticError, ValueError):
        return 0
    return time_ns if time_ns < 1 << 63 else 0


def _wrong(path: bytes, what: str) -> Corrupt:
    shown = printable(os.fsdecode(path[:200]))
    return Corrupt(f"the archive is not safe to unpack: {shown!r} {what}", remedy=_REMEDY)


def _full(target: Path, needed: int, code: int | None = errno.ENOSPC) -> DiskFull:
    return DiskFull.on(str(target), os.statvfs(target), needed=needed, code=code)


_REMEDY = "Make it again; nothing was imported"
_KINDS = {tarfile.CHRTYPE: "character device", tarfile.BLKTYPE: "block device", tarfile.FIFOTYPE: "FIFO"}
