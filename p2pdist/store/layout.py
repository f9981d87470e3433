"""The files of a store directory: their paths, and the lock by which one process uses it at a time.

Names are made from checked digests alone, so no name can leave the directory.

What is in a store is for its user and group alone, which are the agent's: the group is that of its
socket, whose members may read every package anyway, and some show images themselves. Other users
pass through the root to views that are shown below it (agent/mounts.py) and find nothing else open:
objects keep the mode of plain files, as hard links to them are views, so their directory is closed.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from p2pdist.model.digest import Digest, hex_of, parse_digest
from p2pdist.model.errors import Conflict
from p2pdist.store.disk import Reserve

ROOT_MODE, CONTENT_MODE, FILE_MODE = 0o751, 0o750, 0o640


def lock_directory(paths: Paths) -> int:
    """Lock the store for this process; returns the descriptor that holds the lock, which the kernel
    drops when the process ends.

    Raises Conflict naming the process that has it, OSError.
    """
    fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Reserve(paths.root).use()  # a store is opened on a full disk, too
        line = f"{os.getpid()}\n".encode()
        os.pwrite(fd, line, 0)  # in place: there may be no other block
        os.ftruncate(fd, len(line))
    except BlockingIOError as error:
        holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise Conflict(
            f"the store {paths.root} is in use by process {holder}",
            remedy="Stop that agent, or give this one another store directory",
            pid=holder,
        ) from error
    except OSError:
        os.close(fd)
        raise
    return fd


class Paths:
    """The files below `root`. The directories are joined once: that is most of what a path costs,
    and a blob of one piece takes a dozen."""

    __slots__ = ("blobs", "documents", "images", "index", "lock", "objects", "partial", "root", "temporary", "variants")

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = root / "lock"
        self.index = root / "index.sqlite"
        self.blobs = root / "blobs" / "sha256"
        self.partial = root / "partial"
        self.documents = root / "small" / "sha256"
        self.objects = root / "objects"
        self.images = root / "images"
        self.variants = root / "variants"
        self.temporary = root / "tmp"

    def complete(self, digest: Digest) -> Path:
        """The content of a complete blob, read-only."""
        return self.blobs / hex_of(parse_digest(digest))

    def data(self, digest: Digest) -> Path:
        """The content of a partial blob, as long as the whole."""
        return self.partial / f"{hex_of(parse_digest(digest))}.data"

    def bitmap(self, digest: Digest) -> Path:
        """Which pieces of a partial blob are verified."""
        return self.partial / f"{hex_of(parse_digest(digest))}.have"

    def hashes(self, digest: Digest) -> Path:
        """The hashes of the pieces of a partial blob that has no piece list."""
        return self.partial / f"{hex_of(parse_digest(digest))}.hashes"

    def document(self, digest: Digest) -> Path:
        """A manifest, config or piece list that is no row of the index."""
        return self.documents / hex_of(parse_digest(digest))

    def object(self, content: bytes) -> Path:
        """The content of a regular file of trees, read-only. `content` is its BLAKE3, 32 bytes."""
        name = content.hex()
        return self.objects / name[:2] / name[2:]

    def image(self, root: Digest) -> Path:
        """The metadata image of a tree."""
        return self.images / hex_of(parse_digest(root))

    def make(self) -> None:
        """Create the directories, and take from other users what earlier releases let them read;
        raises OSError."""
        blobs, shown = (self.blobs, self.partial, self.documents), (self.objects, self.images, self.variants)
        for directory in (*blobs, *shown, self.temporary):
            directory.mkdir(parents=True, exist_ok=True)
        _tighten(self.root, ROOT_MODE)
        for directory in (self.blobs.parent, self.partial, self.documents.parent, *shown, self.temporary):
            _tighten(directory, CONTENT_MODE)
        for name in ("", "-wal", "-shm"):
            _tighten(self.index.with_name(self.index.name + name), FILE_MODE)


def _tighten(path: Path, mode: int) -> None:
    """Take from a file or directory the rights that are not in `mode`, and give it to this
    process's group. What belongs to another user stays as it is, what is missing, missing, and what
    a link leads to, as it is: the link may be another's."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        found, itself = os.fstat(descriptor), f"/proc/self/fd/{descriptor}"
        if found.st_uid != os.geteuid() or stat.S_ISLNK(found.st_mode):
            return
        if found.st_gid != os.getegid():
            os.chown(itself, -1, os.getegid())
        if found.st_mode & 0o7777 & ~mode:
            os.chmod(itself, found.st_mode & mode)
    finally:
        os.close(descriptor)
