"""Exporting: a package as a tar, or as one file that mounts itself and runs.

The self-mounting file is a shell script of whole blocks of 4096 bytes, followed by a squashfs image
of all layers merged; the idea is that of XAR (github.com/facebookincubator/xar). It needs neither
p2pdist nor an agent: mount(8) for root, or squashfuse, and flock(1), setsid(1) and mountpoint(1) of
util-linux. Runs of one user share a mount in a directory that only this user may enter, at a path
no part of which another user can rename or replace: XDG_RUNTIME_DIR may be that of another
user, where root took over its environment (su, sudo -E).

Every run holds a shared lock on a file beside the mount, in a descriptor that the program and its
children inherit; one cleaner for each mount waits for an exclusive lock. Some programs close
descriptors for their children, as subprocess of Python does, so the cleaner also waits until no
process has P2PDIST_ROOT of the mount in its environment, and tries again where something else keeps
the mount busy. So the mount lasts as long as anything that was started from it.

The script's own variables begin with `_p2pdist_`, so that no other that a program expects is
overwritten, and it sets the variables of the package last.
"""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
import re
import secrets
import shlex
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, cast

from p2pdist.files import own_descriptor
from p2pdist.model.errors import DiskFull, P2PDistError, UsageError, remedy_of
from p2pdist.model.manifest import Config, search_path
from p2pdist.model.tree import HOLE_BYTES, data_ranges

BLOCK = 4096
HEADER_BYTES_MAX = 1 << 20
POLL_S = 3
"""How often the cleaner looks for processes that hold no lock."""
CHUNK_BYTES = 1 << 20
HOLE_BYTES_MIN = 1 << 20
"""Zeros in a row that become a hole of a tar: so ordinary files are ordinary members, which any
tool reads."""
RANGES_MAX = 20_000
"""Parts of a sparse member; its map is kept in memory by the tools that read it."""
_ROOT = "${P2PDIST_ROOT}"
_OF_LIMITS = (errno.EFBIG, errno.EMFILE, errno.ENFILE)
_NO_UNNAMED_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS}
"""What file systems and kernels without O_TMPFILE say of it (open(2))."""
_OWN_FILES = "/proc/self/fd"
"""Through which an unnamed file gets its name."""

Report = Callable[[str, int, int], None]

_SCRIPT = r"""#!/bin/sh
# A package that mounts itself: behind this script, from byte @OFFSET@ on, lies a squashfs image.
set -u
unset P2PDIST_ROOT  # when one such file starts another
fail() { echo "$0: $1" >&2; exit 1; }
_p2pdist_self=$0
# A name without a slash is that of a file in this directory (sh FILE), as shells have it, before one of PATH.
case $_p2pdist_self in */*) ;; *) [ -f "$_p2pdist_self" ] || _p2pdist_self=$(command -v -- "$_p2pdist_self") ;; esac
_p2pdist_self=$(readlink -f -- "$_p2pdist_self") || fail 'cannot find itself'
for _p2pdist_tool in flock setsid mountpoint; do
    command -v $_p2pdist_tool >/dev/null || fail "$_p2pdist_tool is not installed: install util-linux"
done
_p2pdist_user=$(id -u)
# Mode and owner of a file, and not of what a link leads to.
look() {
    read -r _p2pdist_mode _p2pdist_line _p2pdist_owner _p2pdist_line <<LINE
$(ls -ldn -- "$1" 2>/dev/null)
LINE
}
# Whether no other user can rename or replace what this user makes in a directory, whose path holds no link: it and all
# above belong to root or this user, and others may write to none that is not sticky. In a user namespace the owner of /
# has the place of root.
is_safe() {
    look /
    _p2pdist_host=$_p2pdist_owner
    _p2pdist_above=$1
    while look "$_p2pdist_above"; do
        case $_p2pdist_mode in d????-??-* | d????????[tT]*) ;; *) return 1 ;; esac
        case $_p2pdist_owner in
        0 | "$_p2pdist_user") ;;
        "$_p2pdist_host") case $_p2pdist_mode in d????????[tT]*) ;; *) [ "$_p2pdist_above" != "$1" ] || return 1 ;; esac ;;
        *) return 1 ;;
        esac
        [ "$_p2pdist_above" != / ] || return 0
        _p2pdist_above=${_p2pdist_above%/*}
        _p2pdist_above=${_p2pdist_above:-/}
    done
}
_p2pdist_run=/tmp
[ "$_p2pdist_user" != 0 ] || _p2pdist_run=/run
_p2pdist_place=
for _p2pdist_found in ${XDG_RUNTIME_DIR:+"$XDG_RUNTIME_DIR"} "$_p2pdist_run" /tmp; do
    _p2pdist_found=$(readlink -f -- "$_p2pdist_found") && [ -d "$_p2pdist_found" ] && [ -w "$_p2pdist_found" ] || continue
    is_safe "$_p2pdist_found" || continue
    _p2pdist_place=${_p2pdist_found%/}/p2pdist-xar-$_p2pdist_user
    break
done
[ -n "$_p2pdist_place" ] || fail 'other users can change /tmp: set XDG_RUNTIME_DIR to a directory that this user alone can write to'
mkdir -m 700 "$_p2pdist_place" 2>/dev/null
look "$_p2pdist_place"  # at once what it is and whose
case $_p2pdist_mode:$_p2pdist_owner in d*:"$_p2pdist_user") ;; *) fail "$_p2pdist_place is not a directory of this user" ;; esac
chmod 700 "$_p2pdist_place" || fail "cannot use $_p2pdist_place"
_p2pdist_root=$_p2pdist_place/@ID@
_p2pdist_lock=$_p2pdist_root.lock

attach() {
    [ "$_p2pdist_user" = 0 ] &&
        mount -t squashfs -o ro,nosuid,nodev,loop,offset=@OFFSET@ "$_p2pdist_self" "$_p2pdist_root" 2>/dev/null 9>&- && return 0
    for _p2pdist_tool in squashfuse_ll squashfuse; do
        command -v $_p2pdist_tool >/dev/null &&
            $_p2pdist_tool -o ro,nosuid,nodev,offset=@OFFSET@ "$_p2pdist_self" "$_p2pdist_root" >/dev/null 9>&- && return 0
    done
    return 1
}
_p2pdist_detach='umount "$1" 2>/dev/null || fusermount3 -u "$1" 2>/dev/null || fusermount -u "$1" 2>/dev/null'

exec 9>>"$_p2pdist_lock" || fail "cannot write $_p2pdist_lock"
_p2pdist_tries=0
while :; do
    flock -s 9 || fail "cannot lock $_p2pdist_lock"
    mountpoint -q "$_p2pdist_root" && break
    _p2pdist_tries=$((_p2pdist_tries + 1))
    [ $_p2pdist_tries -le 20 ] || fail "$_p2pdist_root does not stay mounted"
    flock 9
    mountpoint -q "$_p2pdist_root" && continue
    sh -c "$_p2pdist_detach" sh "$_p2pdist_root" 9>&-  # a FUSE mount whose process is gone is no mount point
    mkdir -p "$_p2pdist_root"
    attach || fail 'cannot mount: install squashfuse, or run it as root'
done
# The process with the cleaner's lock cleans; it is given up before the other one, so that no run is left without a cleaner.
_p2pdist_clean='exec 8>>"$1.cleaner" && flock -n 8 || exit 0
exec 7>>"$1.lock"
while flock 7; do
    if ! printf "%s/environ\n" /proc/[0-9]* | xargs grep -lszxF -e "P2PDIST_ROOT=$1" | grep -q .; then
        '"$_p2pdist_detach"'
        mountpoint -q "$1" || break
    fi
    flock -u 7
    sleep @POLL_S@
done
rmdir "$1"; exec 8>&-'
(setsid sh -c "$_p2pdist_clean" sh "$_p2pdist_root" </dev/null >/dev/null 2>&1 9>&- &)

@PROGRAM@
[ $# -gt 0 ] || fail 'the package names no program: give one'
@ENVIRONMENT@
PATH=$_p2pdist_root/bin:${PATH:-/usr/bin:/bin}
P2PDIST_ROOT=$_p2pdist_root
export PATH P2PDIST_ROOT

# A shell passes over a program that cannot start and runs this host's of the same name: what the package has is looked up first.
exists() { [ -e "$1" ] || [ -L "$1" ]; }
find_packaged() {
    case $1 in
    "$_p2pdist_root"/*) _p2pdist_found=$1 ;;
    /*) _p2pdist_found=$_p2pdist_root$1 ;;
    */*) _p2pdist_found=$PWD/$1 ;;
    *)
        _p2pdist_found=
        _p2pdist_left=$PATH:
        while [ -n "$_p2pdist_left" ]; do
            _p2pdist_found=${_p2pdist_left%%:*}/$1
            _p2pdist_left=${_p2pdist_left#*:}
            case $_p2pdist_found in "$_p2pdist_root"/*) ! exists "$_p2pdist_found" || break ;; esac
            _p2pdist_found=
        done ;;
    esac
    exists "$_p2pdist_found" || return 1
    for _p2pdist_tries in 1 2 3 4 5; do  # absolute links of a package that was made as a root lead into it
        [ -L "$_p2pdist_found" ] || break
        _p2pdist_target=$(readlink -- "$_p2pdist_found")
        case $_p2pdist_target in /*) exists "$_p2pdist_root$_p2pdist_target" || break ;; *) break ;; esac
        _p2pdist_found=$_p2pdist_root$_p2pdist_target
    done
    [ -e "$_p2pdist_found" ] || fail "$_p2pdist_found is a link to a file that does not exist"
    [ -f "$_p2pdist_found" ] || fail "$_p2pdist_found is not a program"
    [ -x "$_p2pdist_found" ] || fail "$_p2pdist_found may not be executed"
}
if find_packaged "$1"; then
    _p2pdist_program=$_p2pdist_found
    shift
    set -- "$_p2pdist_program" "$@"
    _p2pdist_line=
    { IFS= read -r _p2pdist_line <"$_p2pdist_program"; } 2>/dev/null || :
    case $_p2pdist_line in
    '#!'*)
        _p2pdist_line=${_p2pdist_line#??}
        IFS=' 	' read -r _p2pdist_tool _p2pdist_argument <<LINE
$_p2pdist_line
LINE
        case $_p2pdist_tool:$_p2pdist_argument in
        */env:-S*)  # env splits the words; their program is looked at here
            _p2pdist_argument=${_p2pdist_argument#-S}
            _p2pdist_argument=${_p2pdist_argument# }
            find_packaged "${_p2pdist_argument%% *}" || : ;;
        */env:-* | */env:) ;;
        */env:*) ! find_packaged "$_p2pdist_argument" || set -- "$_p2pdist_found" "$@" ;;
        *)
            if find_packaged "$_p2pdist_tool"; then
                set -- "$_p2pdist_found" ${_p2pdist_argument:+"$_p2pdist_argument"} "$@"
            elif ! [ -e "$_p2pdist_tool" ]; then
                fail "$_p2pdist_program is a script for $_p2pdist_tool, which does not exist"
            fi ;;
        esac ;;
    esac
fi
exec "$@"
"""


def xar_header(config: Config, identity: str) -> bytes:
    """The script in front of an image, padded to whole blocks. `identity` names the mount: equal
    packages share it. Raises UsageError when the settings are too long, or the working directory is
    outside the package."""
    environment = []
    for entry in config.env:
        name, _, value = entry.partition("=")
        if not name.isidentifier() or not name.isascii() or name.startswith("_p2pdist_"):
            raise UsageError(f"{name[:100]!r} cannot be set by a shell script", remedy="Pack it without this variable")
        environment.append(f"{name}={_quoted(search_path(value) if name == 'PATH' else value)}; export {name}")
    directory = shlex.quote(_working_directory(config.working_dir))
    program = f'cd "$_p2pdist_root"/{directory} || fail "cannot enter the working directory"'
    if config.entrypoint:
        program += f'\nset -- {" ".join(_quoted(word) for word in config.entrypoint)} "$@"'
    size = BLOCK
    while len(script := _script(identity, size, program, environment)) > size:
        size += BLOCK
        if size > HEADER_BYTES_MAX:
            raise UsageError(
                f"the entrypoint and environment take over {HEADER_BYTES_MAX} bytes",
                remedy="Pack it with fewer, or have a script in the package set them",
            )
    return script.ljust(size, b"\n")


def _script(identity: str, offset: int, program: str, environment: Sequence[str]) -> bytes:
    """The script, with what the package says put in at once: it may hold the words that stand for
    other parts."""
    parts = {
        "ID": identity,
        "OFFSET": str(offset),
        "POLL_S": str(POLL_S),
        "PROGRAM": program,
        "ENVIRONMENT": "\n".join(environment),
    }
    return re.sub("@([A-Z_]+)@", lambda found: parts[found[1]], _SCRIPT).encode()


def write_xar(image: Path, config: Config, output: Path, *, report: Report = lambda what, done, total: None) -> int:
    """Write the self-mounting file `output`, which appears whole or not at all; returns its size.
    Blocks. Raises UsageError, DiskFull or P2PDistError."""
    hasher = hashlib.sha256(xar_header(config, "0" * 16))
    with image.open("rb") as source:
        total = os.fstat(source.fileno()).st_size
        while chunk := source.read(CHUNK_BYTES):
            hasher.update(chunk)
        header = xar_header(config, hasher.hexdigest()[:16])
        source.seek(0)
        with new_file(output, needed=total + len(header), mode=0o777) as file:
            file.write(header)
            done = 0
            while chunk := source.read(CHUNK_BYTES):
                file.write(chunk)
                done += len(chunk)
                report("exporting", done, total)
    return len(header) + total


def make_readable(tree: Path) -> dict[bytes, int]:
    """Give this user, the owner, the right to read all entries of the directory `tree`. Returns the
    former modes, by path, of the entries that it changed."""
    modes: dict[bytes, int] = {}
    opened: dict[tuple[int, int], int] = {}
    for path, status in _walk(tree, opened):
        if status.st_mode & _needed(status) != _needed(status) or (status.st_dev, status.st_ino) in opened:
            modes[path] = opened.setdefault((status.st_dev, status.st_ino), stat.S_IMODE(status.st_mode))
    return modes


def write_tar(
    tree: Path,
    stream: IO[bytes],
    *,
    modes: Mapping[bytes, int] | None = None,
    linked: Mapping[bytes, bytes] | None = None,
    report: Callable[[int], None] = lambda count: None,
) -> int:
    """Write the directory `tree` as a tar (POSIX.1-2001, pax): entries in the order of names, owned
    by root, so equal trees give equal bytes. Files with long runs of zeros are sparse (GNU tar,
    "Storing Sparse Files", PAX format 1.0), wherever the file system has holes. `modes` replace
    the modes of entries, by path. `linked` says which entries are hard links, and to what, where
    equal files have one inode besides; without it those of one inode are. Returns how many entries
    there are. Blocks; raises OSError from the stream."""
    count = 0
    names: dict[tuple[int, int, bytes], str] = {}
    with tarfile.open(
        fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as archive:
        for path, status in _walk(tree):
            name = os.fsdecode(path)
            member = _member(name, status, (modes or {}).get(path, status.st_mode))
            full = os.path.join(os.fsencode(tree), path)
            file = status.st_dev, status.st_ino, b"" if linked is None else linked.get(path, path)
            first_name = names.setdefault(file, name) if stat.S_ISREG(status.st_mode) else name
            count += 1
            if member is None:
                continue
            member.pax_headers = {**member.pax_headers, **_attributes(full, status)}
            if first_name != name:
                member.type, member.linkname, member.size = tarfile.LNKTYPE, first_name, 0
                archive.addfile(member)
            elif member.issym():
                member.linkname = os.fsdecode(os.readlink(full))
                archive.addfile(member)
            elif member.isreg():
                with open(full, "rb") as content:
                    _add_file(archive, member, content)
                report(status.st_size)
            else:
                archive.addfile(member)
    return count


def _add_file(archive: tarfile.TarFile, member: tarfile.TarInfo, file: BinaryIO) -> None:
    """Add a regular file, as a sparse one where it has holes."""
    size = member.size
    ranges = _ranges(file, size) if size >= HOLE_BYTES_MIN else [(0, size)]
    if ranges == [(0, size)]:
        os.lseek(file.fileno(), 0, os.SEEK_SET)  # looking for holes has moved it, and nothing is buffered yet
        archive.addfile(member, file)
        return
    directory, name = posixpath.split(member.name)
    sparse = {"major": "1", "minor": "0", "name": member.name, "realsize": str(size)}
    member.pax_headers = {**member.pax_headers, **{f"GNU.sparse.{key}": value for key, value in sparse.items()}}
    member.name = posixpath.join(directory, "GNUSparseFile.0", name)
    numbers = [len(ranges) + 1, *(number for begin, end in ranges for number in (begin, end - begin)), size, 0]
    sparse_map = b"".join(b"%d\n" % number for number in numbers)
    sparse_map += bytes(-len(sparse_map) % tarfile.BLOCKSIZE)
    member.size = len(sparse_map) + sum(end - begin for begin, end in ranges)
    archive.addfile(member, cast(IO[bytes], _Parts(sparse_map, file, ranges)))


def _ranges(file: BinaryIO, size: int) -> list[tuple[int, int]]:
    """The (begin, end) of a file between runs of zeros of HOLE_BYTES_MIN and more. What it holds
    decides, not how it is stored."""
    ranges: list[tuple[int, int]] = []
    for begin, end in _stored(file.fileno(), size):
        for at in range(begin, end, CHUNK_BYTES):
            data = os.pread(file.fileno(), min(CHUNK_BYTES, end - at), at)
            for first, last in data_ranges(at, data):
                gap = at + first - (ranges[-1][1] if ranges else 0)
                if gap < HOLE_BYTES_MIN or len(ranges) >= RANGES_MAX:
                    start = ranges.pop()[0] if ranges else 0
                    ranges.append((start, at + last))
                else:
                    ranges.append((at + first, at + last))
    if ranges and size - ranges[-1][1] < HOLE_BYTES_MIN:
        ranges[-1] = (ranges[-1][0], size)
    return ranges


def _stored(handle: int, size: int) -> Iterator[tuple[int, int]]:
    """Whole blocks of a file that are no holes of the file system."""
    at = 0
    while at < size:
        try:
            begin = os.lseek(handle, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        at = min(-(-os.lseek(handle, begin, os.SEEK_HOLE) // HOLE_BYTES) * HOLE_BYTES, size)
        yield begin // HOLE_BYTES * HOLE_BYTES, at


class _Parts:
    """Reads a sparse member on: the map of its parts, then the parts."""

    def __init__(self, sparse_map: bytes, file: BinaryIO, ranges: Sequence[tuple[int, int]]) -> None:
        self._sparse_map, self._file, self._ranges = sparse_map, file, [*reversed(ranges)]

    def read(self, length: int) -> bytes:
        data, self._sparse_map = self._sparse_map[:length], self._sparse_map[length:]
        while len(data) < length and self._ranges:
            begin, end = self._ranges.pop()
            more = os.pread(self._file.fileno(), min(length - len(data), end - begin), begin)
            if not more:
                break
            if begin + len(more) < end:
                self._ranges.append((begin + len(more), end))
            data += more
        return data


@contextmanager
def new_file(output: Path, *, needed: int, mode: int) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `output`, or of the file that a link of this name leads
    to, when the block ends well. `mode` is lessened by the umask. Where the file system has unnamed
    files, nothing is left of one whose process is killed. A FIFO or a device stays what it is and
    is written to; so is a file of which another name cannot take the place, and what a descriptor
    of this process leads to, as /dev/stdout names one. Raises DiskFull or P2PDistError."""
    descriptor = own_descriptor(output)
    if descriptor is not None or is_stream(output) or _is_fixed(output):
        with _stream(output, descriptor) as stream:
            yield stream
        return
    output = Path(os.path.realpath(output))
    partial = output.parent / f".p2pdist-{secrets.token_hex(12)}"
    try:
        handle, is_named = _opened(partial, mode)
        try:
            with os.fdopen(handle, "wb") as file:
                yield cast(IO[bytes], file)
                file.flush()
                os.fsync(handle)
                if not is_named:
                    _name(handle, partial)
            _take_place(partial, output)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            space = os.statvfs(output.parent)
            raise DiskFull.on(str(output.parent), space, needed=needed, code=error.errno, kept=False) from error
        remedy = remedy_of(error) if error.errno in _OF_LIMITS else "Name another file with -o"
        raise P2PDistError(f"cannot write {output}: {error.strerror}", remedy=remedy) from error


def _opened(partial: Path, mode: int) -> tuple[int, bool]:
    """A new file in the directory of `partial`, and whether that is its name. Raises OSError."""
    try:
        if os.path.exists(_OWN_FILES):
            return os.open(partial.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, mode), False
    except OSError as error:
        if error.errno not in _NO_UNNAMED_FILES:
            raise
    return os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), True


def _name(handle: int, path: Path) -> None:
    """Give an unnamed file a name (open(2), O_TMPFILE)."""
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)  # os.link() follows links with a descriptor only
    try:
        os.link(f"{_OWN_FILES[1:]}/{handle}", path, src_dir_fd=root, follow_symlinks=True)
    finally:
        os.close(root)


def _take_place(partial: Path, output: Path) -> None:
    """Give a file the name of another. A mount point, such as a file that a container was given,
    keeps its file, which gets the content. Raises OSError."""
    try:
        partial.replace(output)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        shutil.copyfile(partial, output)


def _is_fixed(output: Path) -> bool:
    """Whether this user may write the file, but no other one beside it."""
    real = Path(os.path.realpath(output))
    return real.is_file() and os.access(real, os.W_OK) and not os.access(real.parent, os.W_OK | os.X_OK)


def is_stream(output: Path) -> bool:
    """Whether `output` is, or leads to, a FIFO, a device or a socket."""
    try:
        mode = output.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


@contextmanager
def _stream(output: Path, descriptor: int | None) -> Iterator[IO[bytes]]:
    """What a path leads to; with `descriptor`, which it is a name of, where that one stands."""
    try:
        with output.open("wb") if descriptor is None else open(os.dup(descriptor), "wb") as file:
            yield file
    except OSError as error:
        raise P2PDistError(f"cannot write {output}: {error.strerror}", remedy="Name another file with -o") from error


def _walk(tree: Path, opened: dict[tuple[int, int], int] | None = None) -> Iterator[tuple[bytes, os.stat_result]]:
    """Everything below `tree`, parents first, in the order of names. With `opened` what its owner
    may not read becomes readable once it was given out."""
    pending = [b""]
    while pending:
        path = pending.pop()
        full = os.path.join(os.fsencode(tree), path)
        status = os.lstat(full)
        if path:
            yield path, status
        if opened is not None and (needed := _needed(status)) & status.st_mode != needed:
            os.chmod(full, stat.S_IMODE(status.st_mode) | needed)
        if stat.S_ISDIR(status.st_mode):
            pending += [os.path.join(path, name) for name in sorted(os.listdir(full), reverse=True)]


def _needed(status: os.stat_result) -> int:
    """The bits of a mode that its owner must have to read an entry."""
    if stat.S_ISDIR(status.st_mode):
        return stat.S_IRUSR | stat.S_IXUSR
    return stat.S_IRUSR if stat.S_ISREG(status.st_mode) else 0


def _member(name: str, status: os.stat_result, mode: int) -> tarfile.TarInfo | None:
    """None for what a tar of a package does not carry."""
    member = tarfile.TarInfo(name)
    member.mode = stat.S_IMODE(mode) & 0o1777
    seconds, rest = divmod(abs(status.st_mtime_ns), 1_000_000_000)
    member.mtime = seconds
    if rest or status.st_mtime_ns < 0:
        sign, fraction = "-" if status.st_mtime_ns < 0 else "", f".{rest:09}" if rest else ""
        member.pax_headers = {"mtime": f"{sign}{seconds}{fraction}"}
    if stat.S_ISREG(status.st_mode):
        member.size = status.st_size
    elif stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.mode = tarfile.SYMTYPE, 0o777
    else:
        return None
    return member


def _attributes(full: bytes, status: os.stat_result) -> dict[str, str]:
    """The extended attributes user.* of a file or directory as records of a pax header, as GNU tar
    (--xattrs) and libarchive write them. Raises OSError."""
    if stat.S_ISLNK(status.st_mode):
        return {}
    try:
        names = sorted(name for name in os.listxattr(full, follow_symlinks=False) if name.startswith("user."))
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return {}
        raise
    return {
        "SCHILY.xattr." + name.replace("%", "%25").replace("=", "%3D"): os.fsdecode(
            os.getxattr(full, name, follow_symlinks=False)
        )
        for name in names
    }


def _quoted(text: str) -> str:
    """A shell word in which `${P2PDIST_ROOT}` stands for the root, and nothing else for
    anything."""
    if "\0" in text:
        raise UsageError(
            "the package's settings hold a zero byte, which no shell script can", remedy="Pack it again without"
        )
    return '"$_p2pdist_root"'.join(shlex.quote(part) if part else "" for part in text.split(_ROOT)) or "''"


def _working_directory(text: str) -> str:
    """Below the root, as p2pdist run has it: `/app` and `app` are the same."""
    path = posixpath.normpath(text.removeprefix(_ROOT).lstrip("/") or ".")
    if path == ".." or path.startswith("../"):
        raise UsageError(
            f"the package's working directory {text} is outside the package",
            remedy="Pack it with a --working-dir that is in it",
        )
    return path
