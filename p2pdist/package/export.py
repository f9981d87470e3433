"""Exporting: a package as a tar, or as one file that mounts itself and runs.

The self-mounting file is a shell script of whole blocks of 4096 bytes, followed by a squashfs image of all layers merged; the idea is
that of XAR (github.com/facebookincubator/xar). It needs neither p2pdist nor an agent: mount(8) for root, or squashfuse, and flock(1),
setsid(1) and mountpoint(1) of util-linux. Runs of one user share a mount in a directory that only this user may enter. Every run
holds a shared lock on a file beside the mount, in a descriptor that the program and its children inherit; one cleaner for each mount
waits for an exclusive lock and unmounts then, so the mount lasts as long as anything that was started from it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
import secrets
import shlex
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from p2pdist.model.errors import DiskFull, P2PDistError, UsageError
from p2pdist.model.package import Config

BLOCK = 4096
HEADER_BYTES_MAX = 1 << 20
CHUNK_BYTES = 1 << 20
_ROOT = "${P2PDIST_ROOT}"

Report = Callable[[str, int, int], None]

_SCRIPT = r"""#!/bin/sh
# A package that mounts itself: behind this script, from byte @OFFSET@ on, lies a squashfs image.
set -u
fail() { echo "$0: $1" >&2; exit 1; }
self=$0
case $self in */*) ;; *) self=$(command -v -- "$self") ;; esac
self=$(readlink -f -- "$self") || fail 'cannot find itself'
for tool in flock setsid mountpoint; do
    command -v $tool >/dev/null || fail "$tool is not installed: install util-linux"
done
user=$(id -u)
place=${XDG_RUNTIME_DIR:-/tmp}
[ -d "$place" ] && [ -w "$place" ] || place=/tmp
place=$place/p2pdist-xar-$user
mkdir -m 700 "$place" 2>/dev/null
{ [ -d "$place" ] && [ ! -L "$place" ] && [ -O "$place" ] && chmod 700 "$place"; } || fail "$place is not a directory of this user"
root=$place/@ID@
lock=$root.lock

attach() {
    if [ "$user" = 0 ] && mount -t squashfs -o ro,nosuid,nodev,loop,offset=@OFFSET@ "$self" "$root" 2>/dev/null 9>&-; then
        return 0
    fi
    for tool in squashfuse_ll squashfuse; do
        command -v $tool >/dev/null && $tool -o ro,nosuid,nodev,offset=@OFFSET@ "$self" "$root" >/dev/null 9>&- && return 0
    done
    return 1
}
detach='umount "$1" 2>/dev/null || fusermount3 -u "$1" 2>/dev/null || fusermount -u "$1" 2>/dev/null'

exec 9>>"$lock" || fail "cannot write $lock"
tries=0
while :; do
    flock -s 9 || fail "cannot lock $lock"
    mountpoint -q "$root" && break
    tries=$((tries + 1))
    [ $tries -le 20 ] || fail "$root does not stay mounted"
    flock 9
    mountpoint -q "$root" && continue
    sh -c "$detach" sh "$root" 9>&-  # a FUSE mount whose process is gone is no mount point
    mkdir -p "$root"
    attach || fail 'cannot mount: install squashfuse, or run it as root'
done
# Whoever takes the cleaner's lock cleans; it is given up before the other one, so that no run is left without a cleaner.
clean='exec 8>>"$1.cleaner" && flock -n 8 || exit 0
exec 7>>"$1.lock"; flock 7
'"$detach"'
rmdir "$1"; exec 8>&-'
(setsid sh -c "$clean" sh "$root" </dev/null >/dev/null 2>&1 9>&- &)

P2PDIST_ROOT=$root
export P2PDIST_ROOT
PATH=$root/bin:${PATH:-/usr/bin:/bin}
@SETTINGS@
exec "$@"
"""


def xar_header(config: Config, identity: str) -> bytes:
    """The script in front of an image, padded to whole blocks. `identity` names the mount: equal packages share it. Raises UsageError
    when the settings are too long, or the working directory is outside the package."""
    lines = []
    for entry in config.env:
        name, _, value = entry.partition("=")
        if not name.isidentifier() or not name.isascii():
            raise UsageError(f"{name[:100]!r} cannot be set by a shell script", remedy="Pack it without this variable")
        lines.append(f"{name}={_quoted(value)}; export {name}")
    # As for p2pdist run, the package's PATH comes after its own bin.
    if any(entry.startswith("PATH=") for entry in config.env):
        lines.append("PATH=$root/bin:$PATH")
    lines.append(
        f'cd "$root"/{shlex.quote(_working_directory(config.working_dir))} || fail "cannot enter the working directory"'
    )
    if config.entrypoint:
        lines.append(f'set -- {" ".join(_quoted(word) for word in config.entrypoint)} "$@"')
    lines.append("""[ $# -gt 0 ] || fail 'the package names no program: give one'""")
    script = _SCRIPT.replace("@ID@", identity).replace("@SETTINGS@", "\n".join(lines))
    size = BLOCK
    while len(script.replace("@OFFSET@", str(size)).encode()) > size:
        size += BLOCK
        if size > HEADER_BYTES_MAX:
            raise UsageError(f"the entrypoint and environment take over {HEADER_BYTES_MAX} bytes")
    return script.replace("@OFFSET@", str(size)).encode().ljust(size, b"\n")


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
            free = os.statvfs(output.parent)
            raise DiskFull(str(output.parent), needed=needed, free=free.f_bavail * free.f_frsize) from error
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
    return '"$root"'.join(shlex.quote(part) if part else "" for part in text.split(_ROOT)) or "''"


def _working_directory(text: str) -> str:
    """Below the root, as p2pdist run has it: `/app` and `app` are the same."""
    path = posixpath.normpath(text.removeprefix(_ROOT).lstrip("/") or ".")
    if path == ".." or path.startswith("../"):
        raise UsageError(f"the package's working directory {text} is outside the package")
    return path
