"""Small text files below the root of a host, which may be mounted elsewhere, as `/host` in a
container.

A file is replaced whole or not at all, and keeps its owner and mode. Nothing is written behind a
symbolic link: it may belong to another program, and below another root it leads out of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from p2pdist.model.errors import Conflict, Corrupt, P2PDistError, Refused, TooLarge, foreseen

FILE_BYTES_MAX = 1 << 20
NEW_MODE = 0o644
BY_HAND = "or write the lines yourself: --dry-run prints them"


class HostFiles:
    """The files of the host whose root is `root`. Paths are the host's own, such as
    `/etc/docker/daemon.json`."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))

    def place(self, path: str) -> Path:
        """Where a path of the host is for this process."""
        return self.root / path.lstrip("/")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other process change files below this root by the same means meanwhile."""
        directory = self.place("/etc")
        try:
            if not self.root.is_dir():
                raise Conflict(
                    f"{self.root} is not the root of a host: there is no such directory", remedy="See --root"
                )
            fd = os.open(directory if directory.is_dir() else self.root, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise refusal("/etc", error, "read") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def read(self, path: str) -> str | None:
        """The text of a file; None where there is none. Raises Conflict for what is no regular
        file, Corrupt for what is no text, TooLarge, Refused, P2PDistError."""
        self._check_way(path)
        place = self.place(path)
        try:
            if not stat.S_ISREG(place.lstat().st_mode):
                raise Conflict(f"{path} is {_kind(place)}", remedy=f"Put a file there, or nothing, {BY_HAND}")
            with place.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise refusal(path, error, "read") from error
        if len(data) > FILE_BYTES_MAX:
            raise TooLarge(
                f"{path} is larger than {FILE_BYTES_MAX} bytes", remedy="It is no configuration: see what it is"
            )
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise Corrupt(f"{path} is not a text in UTF-8", remedy="Mend it or move it away, then try again") from error

    def names(self, path: str) -> list[str]:
        """What is in a directory, sorted; empty where there is none. Raises Refused,
        P2PDistError."""
        try:
            return sorted(os.listdir(self.place(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise refusal(path, error, "read") from error

    def exists(self, path: str) -> bool:
        """Whether there is anything by that name."""
        return os.path.lexists(self.place(path))

    def write(self, path: str, text: str, *, mode: int = NEW_MODE) -> list[str]:
        """Replace a file, or make it with `mode`; returns the directories that had to be made,
        outermost first. Raises Refused, P2PDistError."""
        made: list[str] = []
        place = self.place(path)
        scratch = place.with_name(f".{place.name}.p2pdist")
        try:
            for directory in reversed(place.parents):
                if self.root in directory.parents and not directory.exists():
                    directory.mkdir(mode=0o755)
                    made.append("/" + str(directory.relative_to(self.root)))
            try:
                there = place.lstat()
            except FileNotFoundError:
                there = None
            scratch.unlink(missing_ok=True)
            fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as file:
                file.write(text.encode())
                if there is not None:
                    os.fchown(fd, there.st_uid, there.st_gid)
                os.fchmod(fd, stat.S_IMODE(there.st_mode) if there is not None else mode)
                file.flush()
                os.fsync(fd)
            scratch.replace(place)
        except OSError as error:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)
            self.remove_directories(made)
            raise refusal(path, error, "written") from error
        return made

    def remove(self, path: str) -> None:
        """Remove a file. Raises Refused, P2PDistError."""
        try:
            self.place(path).unlink(missing_ok=True)
        except OSError as error:
            raise refusal(path, error, "removed") from error

    def remove_directories(self, paths: Iterable[str]) -> list[str]:
        """Remove these directories, innermost first, as far as they are empty; returns the others
        that are there, outermost first."""
        left = []
        for path in sorted(set(paths), key=len, reverse=True):
            try:
                self.place(path).rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                left.append(path)
        return left[::-1]

    def _check_way(self, path: str) -> None:
        """Raises Conflict where a path leads over a symbolic link: at its end, or below another
        root than `/` anywhere."""
        place = self.place(path)
        for part in (place, *place.parents):
            if part == self.root:
                return
            if part.is_symlink() and (part == place or self.root != Path("/")):
                where = "/" + str(part.relative_to(self.root))
                raise Conflict(
                    f"{where} is a symbolic link to {os.readlink(part)}, and nothing is written behind links",
                    remedy=f"Put a file there instead of the link, {BY_HAND}",
                )


def refusal(path: str, error: OSError, verb: str) -> P2PDistError:
    """What it means that a file cannot be read, written or removed."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return Refused(f"this user may not use {path}: it cannot be {verb}", remedy="Run the command as root (sudo)")
    if error.errno == errno.EROFS:
        return P2PDistError(
            f"{path} cannot be {verb}: its file system is read-only", remedy=f"Make it writable, {BY_HAND}"
        )
    if error.errno == errno.EBUSY:
        return P2PDistError(f"{path} cannot be {verb}: something is mounted there", remedy=f"Unmount it, {BY_HAND}")
    problem = foreseen(error, path)
    return problem or P2PDistError(f"{path} cannot be {verb}: {error.strerror or error}", remedy="See what is there")


def _kind(place: Path) -> str:
    return "a directory" if place.is_dir() else "neither a file nor a directory"
