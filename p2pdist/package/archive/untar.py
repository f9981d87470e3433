"""Applies a tar to a directory as an OCI layer is applied to the ones below (image specification,
"Image Layer Filesystem Changeset"): an entry replaces the one below, `.wh.NAME` removes NAME, and
`.wh..wh..opq` removes the entries of lower layers in a directory.

The tar may be hostile. Nothing is written outside the directory: names with ".." are refused.
Symbolic links are made as they are. An entry, a whiteout or the target of a hard link may lie
behind one (lib/x, where a lower layer has lib -> usr/lib): this module follows the link itself, as
if the directory were the root of the file system (chroot(2)), so absolute links and ".." end within
it. It refuses links of the same tar that climb out of the directory or lead to its top, and the
absolute ones of a plain tar: tools write nothing behind them. Devices, FIFOs, set-uid and set-gid
bits are dropped, and so are file capabilities and access control lists; extended attributes user.*
are kept where the package can carry them (`Applied.xattrs`). The filters of tarfile do not serve:
they refuse the absolute links that images are full of, and change modes.

A tar is taken whole or refused. tarfile ends at a broken header as it does at the end of the
archive, so `fromtarfile` tells the two apart. The end is a block of zeros; tools ignore the bytes
behind it. Without the end the archive was cut off, unless a digest vouches for the whole.

The user that imports must be able to read the files. An entry that its owner may not read stays
readable here, and `Applied.closed` keeps the mode that it gets in the package.

tarfile keeps whole headers (long names, pax records, maps of sparse files) in memory, of any stated
length. So the bytes that it may read for one entry besides the content are limited, and pax records
are checked before tarfile parses them: its time is quadratic in the length of some broken ones.
"""

from __future__ import annotations

import errno
import lzma
import os
import re
import stat
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from p2pdist.model.errors import Corrupt, DiskFull, P2PDistError, TooLarge, printable, remedy_of
from p2pdist.model.tree import DEPTH_MAX, ENTRIES_MAX, MODE_MASK, NAME_BYTES_MAX, PATH_BYTES_MAX, TARGET_BYTES_MAX
from p2pdist.package.source.scan import ACCESS_LIST, ATTRIBUTES, CAPABILITIES, Scan
from p2pdist.removal import remove_tree

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
TIMES_NS = (-(1 << 63), (1 << 63) - 1)
TIME_S_MAX = 1 << 34
LINKS_MAX = 40
"""Symbolic links on the way to one entry, as Linux has it (path_resolution(7))."""

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
    """What was applied so far, to be handed from layer to layer. Directories get their modes and
    times at the end."""

    entries: int = 0
    size: int = 0
    seen: Scan = field(default_factory=Scan)
    directories: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    closed: dict[bytes, int] = field(default_factory=dict)
    """Modes of entries that their owner may not read, by path; the entries were made readable.
    Modes of directories are there once finish() has run."""
    specials: dict[bytes, str] = field(default_factory=dict)
    """What the entries are that were left out as devices or FIFOs, by path: a hard link to one is
    left out as well."""
    behind: int = 0
    """Bytes that follow the ends of the archives, zeros apart."""
    xattrs: bool = True
    """Whether the package will carry extended attributes user.*."""
    times_ns: tuple[int, int] = TIMES_NS
    """The earliest and the latest modification time that the package can hold."""
    retimed: int = 0
    """Entries with another modification time than these."""


def apply_tar(
    stream: IO[bytes],
    target: Path,
    applied: Applied,
    *,
    whiteouts: bool = True,
    vouched: bool = False,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Apply the uncompressed tar in `stream` to the directory `target`. Without `whiteouts` files
    of such names are plain files. `vouched`: a digest or check sum over all of the stream shows
    that nothing was cut off, so the end need not be marked, and nothing is an empty archive. Raises
    Corrupt, TooLarge, DiskFull or P2PDistError; then `target` is half done."""
    layer = _Layer(os.fsencode(target), applied, whiteouts, on_bytes)
    limited = cast(IO[bytes], _Limited(stream, vouched))
    try:
        with tarfile.open(
            fileobj=limited, mode="r|", encoding="utf-8", errors="surrogateescape", tarinfo=_limited_by(limited)
        ) as archive:
            for member in archive:
                layer.add(archive, member)
                archive.members = []  # type: ignore[attr-defined] # it would keep all of them
            rest = cast(IO[bytes], archive.fileobj)
            while data := rest.read(CHUNK_BYTES):  # what follows is read too: a check sum may stand at the end
                applied.behind += len(data) - data.count(0)
    except BROKEN as error:
        raise Corrupt(f"the archive is damaged: {error}", remedy="Make it again") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(target, applied.size, error.errno) from error
        if error.errno is None:
            raise Corrupt(f"the archive is damaged: {error}", remedy="Make it again") from error
        raise P2PDistError(
            f"cannot unpack {printable(str(error.filename or target))}: {error.strerror}",
            remedy=remedy_of(error),
        ) from error


def finish(target: Path, applied: Applied) -> None:
    """Give directories their modes and times, once all layers are applied."""
    for path, (mode, time_ns) in sorted(applied.directories.items(), reverse=True):
        full = os.path.join(os.fsencode(target), path)
        os.chmod(full, _readable(path, mode, applied, _SEARCHED))
        os.utime(full, ns=(time_ns, time_ns))


@dataclass(slots=True)
class _Layer:
    target: bytes
    applied: Applied
    whiteouts: bool
    on_bytes: Callable[[int], None]
    own: set[bytes] = field(default_factory=set)
    """What this layer itself has brought, and the directories above: its own whiteouts do not
    remove it."""
    real: set[bytes] = field(default_factory=lambda: {b""})
    """Directories known to be ones, with all above them."""

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self.applied.entries += 1
        if self.applied.entries > ENTRIES_MAX:
            raise TooLarge(f"the archive has more than {ENTRIES_MAX} entries", remedy="Import parts of it")
        path = _checked(member.name)
        directory, name = os.path.split(path)
        directory = self._followed(directory)
        path = _bounded(os.path.join(directory, name))
        if self.whiteouts and name != OPAQUE and any(part.startswith(WHITEOUT * 2) for part in path.split(b"/")):
            return  # a union file system's own affairs
        if self.whiteouts and name.startswith(WHITEOUT):
            self._white_out(directory, name)
        elif not path:  # the top directory itself
            if member.isreg() or member.issym() or member.islnk():
                raise _wrong(path, "is a file without a name")
        elif _is_directory(member):
            self._make_directory(path, member)
        elif member.isreg() or member.issym() or member.islnk():
            self._parents(directory)
            if member.islnk():
                self._link(member, path)
            else:
                self._clear(path)
                self._make(archive, member, path)
            self._own(path)
        elif member.type == _CONTINUED:
            raise Corrupt(
                f"the archive is a part of one in several volumes: {printable(member.name)!r} begins in the one before",
                remedy="Make one archive of all volumes, by tar -xM and tar -c; nothing was imported",
            )
        else:
            self._leave_out(path, member.type)

    def _leave_out(self, path: bytes, kind: bytes) -> None:
        """Note an entry that a package does not carry. A device or FIFO replaces what was there."""
        what = _KINDS.get(kind, "special file")
        self.applied.seen.drop(os.fsdecode(path), what)
        if kind in _SPECIALS:
            if os.path.lexists(self._full(path)):
                self._clear(path)
            self.applied.specials[path] = what

    def _full(self, path: bytes) -> bytes:
        return os.path.join(self.target, path)

    def _own(self, path: bytes) -> None:
        while path and path not in self.own:
            self.own.add(path)
            path = os.path.dirname(path)

    def _followed(self, directory: bytes) -> bytes:
        """Where a directory is once the symbolic links on the way are followed within the root;
        what is missing counts as directories. Raises Corrupt."""
        if directory in self.real:
            return directory
        reached, rest, links = b"", directory.split(b"/"), 0
        while rest:
            part, *rest = rest
            if part in (b"", b".", b".."):
                reached = os.path.dirname(reached) if part == b".." else reached
                continue
            path = os.path.join(reached, part)
            target = b"" if path in self.real else _target_of(self._full(path))
            if not target:
                reached = path
                continue
            links += 1
            if links > LINKS_MAX:
                raise _wrong(directory, "lies behind too many symbolic links")
            if path in self.own and _leads_out(path, target, rooted=self.whiteouts):
                raise _wrong(path, "is a symbolic link that leads outside, and something shall lie behind it")
            reached, rest = b"" if target.startswith(b"/") else reached, [*target.split(b"/"), *rest]
        return reached

    def _parents(self, directory: bytes) -> None:
        """Make the directories above an entry where they are missing; raises Corrupt when one is
        something else."""
        missing = []
        while directory not in self.real:
            missing.append(directory)
            directory = os.path.dirname(directory)
        for path in reversed(missing):
            try:
                if not stat.S_ISDIR(os.lstat(self._full(path)).st_mode):
                    raise _wrong(path, "is no directory, and something shall lie in it")
            except FileNotFoundError:
                os.mkdir(self._full(path), 0o700)
                self.applied.directories[path] = (0o755, 0)
            self.real.add(path)

    def _clear(self, path: bytes) -> None:
        """Remove what an entry replaces."""
        full = self._full(path)
        try:
            mode = os.lstat(full).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(mode):
            self.applied.closed.pop(path, None)
            os.unlink(full)
            return
        self._forget(path)
        remove_tree(full)

    def _forget(self, path: bytes) -> None:
        """Drop what is known of a directory and of all that is in it. It looks at what is there,
        and not at all that is known: many directories may go, one after the other."""
        pending = [path]
        while pending:
            directory = pending.pop()
            self.real.discard(directory)
            for modes in (self.applied.directories, self.applied.closed):
                modes.pop(directory, None)
            with os.scandir(self._full(directory)) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(os.path.join(directory, entry.name))
                    else:
                        self.applied.closed.pop(os.path.join(directory, entry.name), None)

    def _make_directory(self, path: bytes, member: tarfile.TarInfo) -> None:
        self._parents(os.path.dirname(path))
        full = self._full(path)
        if not (os.path.isdir(full) and not os.path.islink(full)):
            self._clear(path)
            os.mkdir(full, 0o700)
        self.applied.directories[path] = (self._mode(path, member), self._time_ns(member))
        self._attributes(path, member)
        self.real.add(path)
        self._own(path)

    def _make(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: bytes) -> None:
        full = self._full(path)
        if member.issym():
            link = os.fsencode(member.linkname)
            if not 0 < len(link) <= TARGET_BYTES_MAX:
                raise _wrong(path, f"is a symbolic link to a name of {len(link)} bytes")
            os.symlink(link, full)
        else:
            self._write(archive, member, full)
            self._attributes(path, member)
            os.chmod(full, _readable(path, self._mode(path, member), self.applied, stat.S_IRUSR))
        time_ns = self._time_ns(member)
        os.utime(full, ns=(time_ns, time_ns), follow_symlinks=False)

    def _link(self, member: tarfile.TarInfo, path: bytes) -> None:
        """Make a hard link, to a file or, as `cp -al` does, to a symbolic link. One to a device or
        FIFO is left out like these."""
        directory, name = os.path.split(_checked(member.linkname))
        other = _bounded(os.path.join(self._followed(directory), name))
        self._parents(os.path.dirname(other))
        mode = _mode_of(self._full(other))
        if not mode and (what := self.applied.specials.get(other)):
            self._clear(path)
            self.applied.seen.drop(os.fsdecode(path), what)
            self.applied.specials[path] = what
            return
        target = _target_of(self._full(other)) if stat.S_ISLNK(mode) else b""
        if not stat.S_ISREG(mode) and not target:
            raise _wrong(path, "is a hard link to no file")
        if not target.startswith(b"/") and _leads_out(other, target, rooted=True):
            raise _wrong(path, "is a hard link to a symbolic link that leads outside")
        if other == path:
            return
        self._clear(path)
        os.link(self._full(other), self._full(path), follow_symlinks=False)
        if other in self.applied.closed:
            self.applied.closed[path] = self.applied.closed[other]

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, full: bytes) -> None:
        """Write the content of a file; the holes of a sparse one stay holes."""
        ranges = _ranges(archive, member)
        needed = sum(length for _, length in ranges)
        self.applied.size += member.size
        free = os.statvfs(self.target)
        if self.applied.size > BYTES_MAX:
            raise TooLarge(f"the files of the archive are larger than {BYTES_MAX} bytes", remedy="Import parts of it")
        if needed > free.f_bavail * free.f_frsize:
            raise _full(Path(os.fsdecode(self.target)), needed)
        content = cast(IO[bytes], archive.fileobj)  # what the archive holds of the file comes next, without its holes
        handle = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            for begin, length in ranges:
                file.seek(begin)
                end = begin + length
                while (at := file.tell()) < end:
                    chunk = content.read(min(end - at, CHUNK_BYTES))
                    if not chunk:
                        raise EOFError("it ends within a file")
                    file.write(chunk)
                    self.on_bytes(len(chunk))
            file.truncate(member.size)

    def _mode(self, path: bytes, member: tarfile.TarInfo) -> int:
        for bit, what in ((stat.S_ISUID, "setuid bit"), (stat.S_ISGID, "setgid bit")):
            if member.mode & bit:
                self.applied.seen.drop(os.fsdecode(path), what)
        return member.mode & MODE_MASK

    def _time_ns(self, member: tarfile.TarInfo) -> int:
        """The nearest to that of the entry that the package can hold; 1970 for what is no time."""
        time_ns = _time_ns(member)
        earliest, latest = self.applied.times_ns
        kept = min(max(time_ns or 0, earliest), latest)
        self.applied.retimed += time_ns != kept
        return kept

    def _attributes(self, path: bytes, member: tarfile.TarInfo) -> None:
        """Keep the extended attributes of an entry that the package carries, and note the others
        that say what users may do."""
        drop = self.applied.seen.drop
        for key, value in member.pax_headers.items():
            name = key.removeprefix(_ATTRIBUTE)
            if key == name:
                if key.startswith(_ACCESS_LIST):
                    drop(os.fsdecode(path), ACCESS_LIST)
            elif name == "security.capability":
                drop(os.fsdecode(path), CAPABILITIES)
            elif name.startswith("system.posix_acl"):
                drop(os.fsdecode(path), ACCESS_LIST)
            elif name.startswith("user."):
                try:
                    if self.applied.xattrs:
                        plain = name.replace("%3D", "=").replace("%25", "%")
                        os.setxattr(self._full(path), plain, os.fsencode(value))
                        continue
                except OSError:  # too large, or not on this file system
                    pass
                drop(os.fsdecode(path), ATTRIBUTES)

    def _white_out(self, directory: bytes, name: bytes) -> None:
        if not os.path.lexists(self._full(directory)):
            return
        self._parents(directory)
        names = os.listdir(self._full(directory)) if name == OPAQUE else [name[len(WHITEOUT) :]]
        for hidden in names:
            if hidden in (b"", b".", b".."):
                raise _wrong(directory, "holds a whiteout of nothing")
            self._hide(os.path.join(directory, hidden))

    def _hide(self, path: bytes) -> None:
        """Remove what lower layers have at a path; what this layer has brought there stays."""
        pending = [path]
        while pending:
            entry = pending.pop()
            full = self._full(entry)
            if entry not in self.own:
                self._clear(entry)
            elif os.path.isdir(full) and not os.path.islink(full):
                pending += [os.path.join(entry, name) for name in os.listdir(full)]


class _Limited:
    """Reads on from a stream, no further than `left` bytes while an entry's header is read (None:
    as far as it goes)."""

    def __init__(self, stream: IO[bytes], vouched: bool) -> None:
        self._stream, self.vouched = stream, vouched
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
    """A TarInfo for tarfile.open that reads its headers within the limit of `stream`, a
    _Limited."""

    class Header(tarfile.TarInfo):
        @classmethod
        def fromtarfile(cls, archive: tarfile.TarFile) -> Header | None:  # type: ignore[override] # None is the end to it
            if stream.left is not None:  # a header that tells more of the next one
                return super().fromtarfile(archive)
            stream.left = HEADER_BYTES_MAX
            try:
                return super().fromtarfile(archive)
            except (tarfile.HeaderError, IndexError) as error:
                _check_end(archive, error, stream.vouched)
                return None
            finally:
                stream.left = None
                if len(archive.pax_headers) > GLOBAL_RECORDS_MAX:
                    raise Corrupt(f"the archive has over {GLOBAL_RECORDS_MAX} global pax records", remedy=_REMEDY)

        def _proc_pax(self, archive: Any) -> Header:
            source = archive.fileobj
            data = source.read(-(-self.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)
            _check_records(data)
            archive.fileobj = _Again(archive, data)
            member = cast(Any, super()._proc_pax(archive))  # type: ignore[misc] # typeshed keeps silent about it
            records = member.pax_headers
            # A sparse file may have another size and name in the archive. Where records tell these,
            # tarfile takes whichever comes last.
            if member.sparse is not None and "GNU.sparse.name" in records:
                member.name = records["GNU.sparse.name"]
            if member.sparse is not None and "size" in records:
                member.size = int(records.get("GNU.sparse.realsize") or records.get("GNU.sparse.size") or 0)
                archive.offset = member.offset_data + _blocks(sum(length for _, length in member.sparse))
            return cast(Header, member)

    return Header


def _check_end(archive: Any, error: Exception, vouched: bool) -> None:
    """See that an archive ends where reading a header failed with `error`. Raises Corrupt, also
    where a single block of zeros stands between entries, as archive/tar of Go does."""
    if isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
        if any(archive.fileobj.read(tarfile.BLOCKSIZE)):
            raise Corrupt("the archive is damaged: zeros are in the place of a header", remedy=_DAMAGED)
    elif not isinstance(error, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]
        if not archive.offset:
            raise Corrupt(
                "the archive is no tar, and not compressed with gzip, zstd, xz or bzip2, or it is damaged from its first byte on",
                remedy="Make a tar of it, or copy it here again; nothing was imported",
            )
        raise Corrupt(f"the archive is damaged in the header at byte {archive.offset}: {error}", remedy=_DAMAGED)
    elif not vouched:
        what = "it is cut off, or not finished" if archive.offset else "it is empty"
        raise Corrupt(f"the archive is damaged: {what}", remedy=_DAMAGED)


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
    """See that pax records ("LENGTH KEYWORD=VALUE\n", LENGTH that of all of it) lie one behind the
    other. Raises Corrupt."""
    if any(len(digits) > DIGITS_MAX for digits in re.findall(rb"\d+", data)):
        raise Corrupt(f"the archive has a pax header with over {DIGITS_MAX} digits in a row", remedy=_REMEDY)
    position = 0
    while data[position : position + 1].isdigit():
        record = _RECORD.match(data, position)
        end = position + int(record[1]) if record else 0
        equals = data.find(b"=", record.end(), end) if record else 0
        if not record or data[end - 1 : end] != b"\n" or equals <= record.end():
            raise Corrupt("the archive has a pax header that is none", remedy=_REMEDY)
        if data[record.end() : equals] in _NUMBERS and not data[equals + 1 : end - 1].isdigit():
            raise Corrupt("the archive has a pax header with a size that is no number", remedy=_REMEDY)
        position = end


def _checked(text: str) -> bytes:
    """The name of an entry as a path below the target; b"" is the target itself."""
    parts = [part for part in os.fsencode(text).split(b"/") if part not in (b"", b".")]
    path = b"/".join(parts)
    if b".." in parts or b"\0" in path:
        raise _wrong(path, "lies outside the archive")
    return _bounded(path)


def _bounded(path: bytes) -> bytes:
    """The path, if a package can have it. Raises Corrupt."""
    parts = path.split(b"/")
    if len(path) > PATH_BYTES_MAX or len(parts) > DEPTH_MAX or any(len(part) > NAME_BYTES_MAX for part in parts):
        raise _wrong(path, "is too long or nested too deeply")
    return path


def _is_directory(member: tarfile.TarInfo) -> bool:
    """Also one of an incremental archive of GNU tar, and a file whose name ends like that of a
    directory, as old tools wrote them."""
    return member.isdir() or member.type == _DUMPED or (member.isreg() and member.name.endswith("/"))


def _ranges(archive: Any, member: Any) -> list[tuple[int, int]]:
    """The (offset, length) of a file's content that the archive holds; the rest are holes. Raises
    Corrupt."""
    pieces = [(0, member.size)] if member.sparse is None else [piece for piece in member.sparse if piece[1]]
    end = 0
    for begin, length in pieces:
        if begin < end or length < 0:
            raise _wrong(os.fsencode(member.name), "is a sparse file whose parts overlap")
        end = begin + length
    stored = archive.offset - member.offset_data
    if end > member.size or stored != _blocks(sum(length for _, length in pieces)):
        raise _wrong(os.fsencode(member.name), "does not have the size that the archive tells")
    return pieces


def _blocks(size: int) -> int:
    """Bytes that content of a size takes in an archive."""
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _readable(path: bytes, mode: int, applied: Applied, needed: int) -> int:
    """The mode with the bits that its owner must have to read it; where that is another one, the
    mode is noted."""
    if mode & needed != needed:
        applied.closed[path] = mode
    return mode | needed


def _target_of(full: bytes) -> bytes:
    """What a symbolic link leads to; b"" where there is none."""
    try:
        return os.readlink(full)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
            return b""
        raise


def _leads_out(path: bytes, target: bytes, *, rooted: bool) -> bool:
    """Whether a symbolic link at `path` by itself leads out of the directory. An absolute one does;
    where / is the root of an image (`rooted`) only one to / itself does."""
    absolute = target.startswith(b"/")
    depth = 0 if absolute else path.count(b"/")
    for part in target.split(b"/"):
        depth += 0 if part in (b"", b".") else -1 if part == b".." else 1
        if depth < 0:
            return True
    return absolute and (depth == 0 or not rooted)


def _mode_of(full: bytes) -> int:
    try:
        return os.lstat(full).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _time_ns(member: tarfile.TarInfo) -> int | None:
    """To the nanosecond where a pax header says it so; None for what is no time."""
    records = member.pax_headers.get("mtime", member.mtime)
    if isinstance(records, str) and len(records) > TIME_CHARACTERS_MAX:
        return None
    try:
        time_s = Decimal(records)
        # An exponent may be huge: only a number that is not may become an int.
        time_ns = int(time_s.scaleb(9)) if abs(time_s) < TIME_S_MAX else None
    except (ArithmeticError, ValueError):
        return None
    return time_ns if time_ns is not None and TIMES_NS[0] <= time_ns <= TIMES_NS[1] else None


def _wrong(path: bytes, what: str) -> Corrupt:
    shown = printable(os.fsdecode(path[:200]))
    return Corrupt(f"the archive is not safe to unpack: {shown!r} {what}", remedy=_REMEDY)


def _full(target: Path, needed: int, code: int | None = errno.ENOSPC) -> DiskFull:
    return DiskFull.on(str(target), os.statvfs(target), needed=needed, code=code, kept=False)


_ATTRIBUTE, _ACCESS_LIST = "SCHILY.xattr.", "SCHILY.acl."
_REMEDY = "Make it again; nothing was imported"
_DAMAGED = "Make it, or copy it here, again; nothing was imported"
_SEARCHED = stat.S_IRUSR | stat.S_IXUSR
_DUMPED, _CONTINUED = b"D", b"M"
_NUMBERS = frozenset(
    [b"size", b"GNU.sparse.size", b"GNU.sparse.realsize", b"GNU.sparse.offset", b"GNU.sparse.numbytes"]
)
_SPECIALS = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
_KINDS = {
    tarfile.CHRTYPE: "character device",
    tarfile.BLKTYPE: "block device",
    tarfile.FIFOTYPE: "FIFO",
    b"V": "label of the archive",
}
