"""Exporting: a package as a tar, or as one file that mounts itself and runs.

The self-mounting file is a shell script of whole blocks of 4096 bytes, followed by a squashfs image of all layers merged; the idea is
that of XAR (github.com/facebookincubator/xar). It needs neither p2pdist nor an agent: mount(8) for root, or squashfuse, and flock(1),
setsid(1) and mountpoint(1) of util-linux. Runs of one user share a mount in a directory that only this user may enter. Every run
holds a shared lock on a file beside the mount, in a descriptor that the program and its children inherit; one cleaner for each mount
waits for an exclusive lock. Some programs close descriptors for their children, as subprocess of Python does, so the cleaner also waits
until no process has P2PDIST_ROOT of the mount in its environment, and tries again where something else keeps the mount busy. So the
mount lasts as long as anything that was started from it.

The script's own variables begin with `_p2pdist_`, so that no other that a program expects is overwritten, and those of the package are set
last.
"""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
import re
import secrets
import shlex
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from p2pdist.model.errors import DiskFull, P2PDistError, UsageError
from p2pdist.model.package import Config

BLOCK = 4096
HEADER_BYTES_MAX = 1 << 20
POLL_S = 3
"""How often the cleaner looks for processes that hold no lock."""
CHUNK_BYTES = 1 << 20
_ROOT = "${P2PDIST_ROOT}"

Report = Callable[[str, int, int], None]

_SCRIPT = r"""#!/bin/sh
# A package that mounts itself: behind this script, from byte @OFFSET@ on, lies a squashfs image.
set -u
unset P2PDIST_ROOT  # when one such file starts another
fail() { echo "$0: $1" >&2; exit 1; }
_p2pdist_self=$0
case $_p2pdist_self in */*) ;; *) _p2pdist_self=$(command -v -- "$_p2pdist_self") ;; esac
_p2pdist_self=$(readlink -f -- "$_p2pdist_self") || fail 'cannot find itself'
for _p2pdist_tool in flock setsid mountpoint; do
    command -v $_p2pdist_tool >/dev/null || fail "$_p2pdist_tool is not installed: install util-linux"
done
_p2pdist_user=$(id -u)
_p2pdist_place=${XDG_RUNTIME_DIR:-/tmp}
[ -d "$_p2pdist_place" ] && [ -w "$_p2pdist_place" ] || _p2pdist_place=/tmp
_p2pdist_place=$_p2pdist_place/p2pdist-xar-$_p2pdist_user
mkdir -m 700 "$_p2pdist_place" 2>/dev/null
{ [ -d "$_p2pdist_place" ] && [ ! -L "$_p2pdist_place" ] && [ -O "$_p2pdist_place" ] && chmod 700 "$_p2pdist_place"; } ||
    fail "$_p2pdist_place is not a directory of this user"
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
# Whoever takes the cleaner's lock cleans; it is given up before the other one, so that no run is left without a cleaner.
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
exec "$@"
"""


def xar_header(config: Config, identity: str) -> bytes:
    """The script in front of an image, padded to whole blocks. `identity` names the mount: equal packages share it. Raises UsageError
    when the settings are too long, or the working directory is outside the package."""
    environment = []
    for entry in config.env:
        name, _, value = entry.partition("=")
        if not name.isidentifier() or not name.isascii() or name.startswith("_p2pdist_"):
            raise UsageError(f"{name[:100]!r} cannot be set by a shell script", remedy="Pack it without this variable")
        environment.append(f"{name}={_quoted(value)}; export {name}")
    directory = shlex.quote(_working_directory(config.working_dir))
    program = f'cd "$_p2pdist_root"/{directory} || fail "cannot enter the working directory"'
    if config.entrypoint:
        program += f'\nset -- {" ".join(_quoted(word) for word in config.entrypoint)} "$@"'
    size = BLOCK
    while len(script := _script(identity, size, program, environment)) > size:
        size += BLOCK
        if size > HEADER_BYTES_MAX:
            raise UsageError(f"the entrypoint and environment take over {HEADER_BYTES_MAX} bytes")
    return script.ljust(size, b"\n")


def _script(identity: str, offset: int, program: str, environment: Sequence[str]) -> bytes:
    """The script, with what the package says put in at once: it may hold the words that stand for other parts."""
    parts = {
        "ID": identity,
        "OFFSET": str(offset),
        "POLL_S": str(POLL_S),
        "PROGRAM": program,
        "ENVIRONMENT": "\n".join(environment),
    }
    return re.sub("@([A-Z_]+)@", lambda found: parts[found[1]], _SCRIPT).encode()


def write_xar(image: Path, config: Config, output: Path, *, report: Report = lambda what, done, total: None) -> int:
    """Write the self-mounting file `output`, which appears whole or not at all; returns its size. Blocks. Raises UsageError, DiskFull or
    P2PDistError."""
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


def write_tar(tree: Path, stream: IO[bytes], *, report: Callable[[int], None] = lambda count: None) -> int:
    """Write the directory `tree` as a tar (POSIX.1-2001, pax): entries in the order of names, owned by root, so equal trees give equal
    bytes. Returns how many entries there are. Blocks; raises OSError from the stream."""
    count = 0
    names: dict[tuple[int, int], str] = {}
    with tarfile.open(
        fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as archive:
        for path, status in _walk(tree):
            name = os.fsdecode(path)
            member = _member(name, status)
            full = os.path.join(os.fsencode(tree), path)
            known = names.setdefault((status.st_dev, status.st_ino), name) if stat.S_ISREG(status.st_mode) else name
            count += 1
            if member is None:
                continue
            if known != name:
                member.type, member.linkname, member.size = tarfile.LNKTYPE, known, 0
                archive.addfile(member)
            elif member.issym():
                member.linkname = os.fsdecode(os.readlink(full))
                archive.addfile(member)
            elif member.isreg():
                with open(full, "rb") as file:
                    archive.addfile(member, file)
                report(member.size)
            else:
                archive.addfile(member)
    return count


@contextmanager
def new_file(output: Path, *, needed: int, mode: int) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `output` when the block ends well. `mode` is lessened by the umask. Raises DiskFull or
    P2PDistError."""
    partial = output.parent / f".{output.name}.{secrets.token_hex(6)}"
    try:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(handle, "wb") as file:
                yield cast(IO[bytes], file)
                file.flush()
                os.fsync(handle)
            partial.replace(output)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            space = os.statvfs(output.parent)
            raise DiskFull.on(str(output.parent), space, needed=needed, code=error.errno) from error
        raise P2PDistError(f"cannot write {output}: {error.strerror}", remedy="Name another file with -o") from error


def _walk(tree: Path) -> Iterator[tuple[bytes, os.stat_result]]:
    """Everything below `tree`, parents first, in the order of names."""
    pending = [b""]
    while pending:
        path = pending.pop()
        full = os.path.join(os.fsencode(tree), path)
        status = os.lstat(full)
        if path:
            yield path, status
        if stat.S_ISDIR(status.st_mode):
            pending += [os.path.join(path, name) for name in sorted(os.listdir(full), reverse=True)]


def _member(name: str, status: os.stat_result) -> tarfile.TarInfo | None:
    """None for what a tar of a package does not carry."""
    member = tarfile.TarInfo(name)
    member.mode = stat.S_IMODE(status.st_mode) & 0o1777
    seconds, rest = divmod(max(0, status.st_mtime_ns), 1_000_000_000)
    member.mtime = seconds
    if rest:
        member.pax_headers = {"mtime": f"{seconds}.{rest:09}"}
    if stat.S_ISREG(status.st_mode):
        member.size = status.st_size
    elif stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.mode = tarfile.SYMTYPE, 0o777
    else:
        return None
    return member


def _quoted(text: str) -> str:
    """A shell word in which `${P2PDIST_ROOT}` stands for the root, and nothing else for anything."""
    if "\0" in text:
        raise UsageError("the package's settings hold a zero byte, which no shell script can")
    return '"$_p2pdist_root"'.join(shlex.quote(part) if part else "" for part in text.split(_ROOT)) or "''"


def _working_directory(text: str) -> str:
    """Below the root, as p2pdist run has it: `/app` and `app` are the same."""
    path = posixpath.normpath(text.removeprefix(_ROOT).lstrip("/") or ".")
    if path == ".." or path.startswith("../"):
        raise UsageError(f"the package's working directory {text} is outside the package")
    return path
