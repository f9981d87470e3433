"""Every failure that a user can meet: one small tree, and text that is fit for a terminal.

Each class fixes, once, its exit code (docs/protocol.md), its HTTP status and the `type` of its
problem document (RFC 9457). `what` says what happened and to what; `remedy` says what to do about
it.
"""

from __future__ import annotations

import errno
import re
from typing import Any, ClassVar, Protocol

import msgspec


def printable(text: str) -> str:
    """`text`, such as a file's name, with escapes for bytes that are not UTF-8 (surrogates, as in
    os.fsdecode), control characters and other characters that print nothing."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


PROBLEM_BASE = "urn:p2pdist:problem:"

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding untrusted JSON with msgspec may raise: for text that is no JSON or has another
shape, for a string that is not UTF-8, and for JSON that is nested too deeply."""


class P2PDistError(Exception):
    """Base of all failures shown to users. Exit code 1 (failed)."""

    slug: ClassVar[str] = "failed"
    title: ClassVar[str] = "The operation failed"
    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, what: str, *, remedy: str = "", **details: Any) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.details = details

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}" if self.remedy else self.what

    def problem(self) -> dict[str, Any]:
        """The RFC 9457 problem document of this failure."""
        body: dict[str, Any] = {
            "type": PROBLEM_BASE + self.slug,
            "title": self.title,
            "status": self.http_status,
            "detail": self.what,
        }
        if self.remedy:
            body["remedy"] = self.remedy
        body.update(self.details)
        return body


class UsageError(P2PDistError):
    """The caller asked for something malformed."""

    slug, title, exit_code, http_status = "bad-request", "The request is malformed", 2, 400


class TooLarge(UsageError):
    """A body, list or file is over its limit."""

    slug, title, http_status = "too-large", "The request is over a limit", 413


class NotFound(P2PDistError):
    """A reference, blob or path that does not exist where it was looked for."""

    slug, title, exit_code, http_status = "not-found", "Not found", 3, 404


class Refused(P2PDistError):
    """Authentication or authorisation failed."""

    slug, title, exit_code, http_status = "refused", "Refused", 4, 403


class Unauthenticated(Refused):
    """Nothing is known of the sender of a request, or its credential is not valid."""

    slug, title, http_status = "unauthenticated", "A credential is needed", 401


class Unavailable(P2PDistError):
    """A tracker, origin or agent that cannot be reached or is overloaded. Trying again may help."""

    slug, title, exit_code, http_status = "unavailable", "A service is unavailable", 5, 503


class Unsuitable(Unavailable):
    """A service that lacks what it is needed for, such as byte ranges. Trying again does not help
    before it is set up otherwise."""

    slug, title = "unsuitable", "A service lacks what it is needed for"


class Damaged(Unavailable):
    """Content of a store that changed on the disk after it had verified. What is wrong was dropped,
    so another pull brings it again. `blob` is the digest of the blob, "" for what is none."""

    def __init__(self, what: str, *, remedy: str = "", blob: str = "") -> None:
        super().__init__(what, remedy=remedy)
        self.blob = blob


class Corrupt(P2PDistError):
    """Content that does not match its digest, or a document that breaks its format."""

    slug, title, exit_code, http_status = "corrupt", "Content is corrupt", 6, 502


class Space(Protocol):
    """The part of statvfs(2)'s result that DiskFull needs."""

    @property
    def f_bavail(self) -> int: ...
    @property
    def f_frsize(self) -> int: ...
    @property
    def f_files(self) -> int: ...
    @property
    def f_favail(self) -> int: ...


FEW_INODES = 20
"""Where less than one of so many inodes is left, and space is not, a write failed for want of
one."""

_KEPT = "; what has arrived is kept for a retry"


class DiskFull(P2PDistError):
    """Not enough space, or no inode for another file. `needed` and `free` are bytes, and so is
    `capacity`, which is given where `needed` would not fit into an empty store: then no retry
    helps, here or on another machine like this one. `short_of` says what is missing. `kept`: it is
    a store, which keeps what has arrived."""

    slug, title, http_status = "disk-full", "Not enough disk space", 507

    def __init__(
        self,
        where: str,
        *,
        needed: int,
        free: int,
        short_of: str = "space",
        capacity: int | None = None,
        kept: bool = True,
    ) -> None:
        if short_of == "inodes":
            what = f"{where} lacks inodes: no more files can be made there, though {free} bytes are free"
            remedy = "Remove files, or take a file system with more inodes (df -i shows them)"
        elif short_of == "quota":
            what = f"{where} lacks quota: {needed} bytes needed, and this user may use no more there"
            remedy = "Have the quota raised, or remove files of this user"
        else:
            what = f"{where} lacks space: {needed} bytes needed, {free} bytes free"
            remedy = "Free some space there or take another disk"
        if kept:
            remedy += _KEPT
        if capacity is not None:
            what += f", at most {capacity} bytes in all"
            remedy = "Make it smaller, or give the store a larger --capacity or disk"
        super().__init__(what, remedy=remedy, needed=needed, free=free)
        if short_of != "space":
            self.details["short_of"] = short_of
        if capacity is not None:
            self.details["capacity"] = capacity

    @classmethod
    def on(
        cls, where: str, space: Space, *, needed: int, code: int | None = errno.ENOSPC, kept: bool = True
    ) -> DiskFull:
        """The failure of a write to `where` that ended with the error `code`; `space` is that of
        its file system."""
        free = space.f_bavail * space.f_frsize
        # Others may have removed files since the write failed, but hardly many.
        few = space.f_files // FEW_INODES if free > needed else 0
        without_inodes = space.f_files and space.f_favail <= few  # 0 of 0 where their number is not fixed
        short_of = "quota" if code == errno.EDQUOT else "inodes" if without_inodes else "space"
        return cls(where, needed=needed, free=free, short_of=short_of, kept=kept)

    def of_stage(self) -> DiskFull:
        """This failure where what has arrived is removed, and not kept for a retry."""
        self.remedy = self.remedy.removesuffix(_KEPT)
        return self

    @property
    def never_fits(self) -> bool:
        """Whether freeing space would not help."""
        return "capacity" in self.details


class Conflict(P2PDistError):
    """The request contradicts the present state, such as unmounting what is in use."""

    slug, title, http_status = "conflict", "The request conflicts with the present state", 409


_DISK = "See dmesg for errors of the disk, check the file system (fsck), and mount it writable again"
_GONE = "See whether its server or process is up, then mount it again"
_FORESEEN = {
    errno.EROFS: ("the file system is read-only", _DISK),
    errno.EIO: ("the disk has an input/output error", "See dmesg for errors of the disk, and replace it if need be"),
    errno.EUCLEAN: ("the file system is damaged", _DISK),
    errno.ENOSPC: ("no space or no inodes are left on the disk", "Free some space (df and df -i show what is left)"),
    errno.EDQUOT: ("the quota of this user is used up", "Have it raised, or remove files of this user"),
    errno.EFBIG: ("the file is too large for the file system or the limit of this process", "See ulimit -f"),
    errno.EMFILE: ("this process has too many files open", "Raise its limit (ulimit -n, LimitNOFILE= of its unit)"),
    errno.ENFILE: ("this machine has too many files open", "Raise fs.file-max, or end what holds them (lsof)"),
    errno.ENOMEM: ("no memory is left", "Give the host, or the control group, more memory"),
    errno.ESTALE: ("the file server knows it no longer", "Mount the file system again"),
    errno.ENOTCONN: ("the file system is not connected any more", _GONE),
    errno.ENODEV: ("the device is gone", _GONE),
    errno.ENXIO: ("the device is gone", _GONE),
    errno.ESHUTDOWN: ("the file system was shut down", _GONE),
    errno.ETIMEDOUT: ("the file server does not answer", _GONE),
    errno.EHOSTDOWN: ("the file server does not answer", _GONE),
    errno.EREMOTEIO: ("the disk or its server has an error", _GONE),
    errno.EACCES: ("permission denied", "Check the owner and the mode, or run as a user that may"),
    errno.EPERM: ("operation not permitted", "Check the owner and the mode, or run as a user that may"),
    errno.ENOENT: ("there is no such file or directory", "Check the path"),
    errno.ENOTDIR: ("a part of the path is no directory", "Check the path"),
    errno.EISDIR: ("it is a directory", "Check the path"),
    errno.EEXIST: ("it exists already", "Remove it, or name another"),
    errno.ENOTEMPTY: ("the directory is not empty", "Empty it, or name another"),
    errno.ELOOP: ("too many symbolic links follow one another", "Check the path"),
    errno.ENAMETOOLONG: ("the name is too long", "Name a shorter one"),
    errno.EBUSY: ("it is in use", "End what uses it, then try again"),
    errno.ETXTBSY: ("it is being run", "End what runs it, then try again"),
    errno.EXDEV: ("it is on another file system", "Name a path on the same file system"),
}
"""What can happen to a file on any machine, and what to do about it."""

_OF_NAMES = frozenset({errno.ELOOP, errno.ENAMETOOLONG})
"""What only a name that a user gave can have wrong with it."""


def remedy_of(error: OSError) -> str:
    """What to do about an OSError, also one that no machine should meet."""
    return _FORESEEN.get(error.errno or 0, ("", "See dmesg, and check the owner, the mode and the disk"))[1]


def foreseen(error: OSError, subject: str = "") -> P2PDistError | None:
    """What an OSError means to a user; None for an error that no machine should meet. `subject` is
    what could not be used; by default the file that the error names."""
    meaning = _FORESEEN.get(error.errno or 0)
    if meaning is None:
        return None
    text, remedy = meaning
    name = error.filename
    if isinstance(name, bytes):
        name = name.decode("utf-8", "backslashreplace")
    subject = subject or (str(name) if isinstance(name, str) else "")
    kind = Conflict if error.errno in _OF_NAMES else P2PDistError
    return kind(f"{subject or 'a file'} cannot be used: {text}", remedy=remedy)


_UNREACHED = {
    errno.ECONNREFUSED: "connection refused",
    errno.ECONNRESET: "it broke the connection",
    errno.ECONNABORTED: "it broke the connection",
    errno.EPIPE: "it broke the connection",
    errno.EHOSTUNREACH: "no route to it",
    errno.ENETUNREACH: "no route to it",
    errno.ETIMEDOUT: "no answer in time",
}
_NUMBER = re.compile(r"\[Errno (\d+)\]")


def unreached(error: BaseException) -> str:
    """Why no answer came from a server, in the words that failures of origins use; the text of the
    error where it is none of these."""
    inner = getattr(error, "os_error", error)  # of an HTTP client, which names its own objects besides
    if type(inner).__name__ == "gaierror":
        return "the host name is unknown"
    if type(error).__name__ in ("ServerDisconnectedError", "ClientPayloadError", "ClientConnectionResetError"):
        return "it broke the connection"
    if type(error).__name__ == "ClientOSError" and isinstance(error.__cause__, ConnectionResetError):
        return "it broke the connection"  # while a body was written
    if type(error).__name__ == "ClientResponseError":
        return "what answers there speaks no HTTP"
    if getattr(inner, "reason", "") == "WRONG_VERSION_NUMBER":  # of an ssl.SSLError
        return "it speaks no TLS"
    number = getattr(inner, "errno", None)
    if number is None and (match := _NUMBER.search(str(inner))):  # several addresses were tried
        number = int(match[1])
    if number not in _UNREACHED and isinstance(error, TimeoutError):
        return "no answer in time"
    return _UNREACHED.get(number or 0) or str(error) or type(error).__name__


def _tree(root: type[P2PDistError]) -> dict[str, type[P2PDistError]]:
    """The kinds of failures by slug. A class without one of its own is its parent elsewhere."""
    kinds = {root.slug: root}
    for child in root.__subclasses__():
        if child.slug != root.slug:
            kinds.update(_tree(child))
    return kinds


def slugs() -> tuple[str, ...]:
    """Those of all kinds of failures."""
    return tuple(_tree(P2PDistError))


def from_problem(body: dict[str, Any]) -> P2PDistError:
    """The failure that a problem document describes, whatever is in it; an unknown type becomes the
    base class."""
    kind = _tree(P2PDistError).get(str(body.get("type", "")).removeprefix(PROBLEM_BASE), P2PDistError)
    what = str(body.get("detail") or body.get("title") or "unknown failure")
    if kind is DiskFull:
        short_of = body.get("short_of")
        return DiskFull(
            what.split(" lacks ", 1)[0],
            needed=_count(body, "needed"),
            free=_count(body, "free"),
            short_of=short_of if isinstance(short_of, str) else "space",
            capacity=_count(body, "capacity") or None,
        )
    members = {"type", "title", "status", "detail", "remedy"}
    error = kind(what, remedy=str(body.get("remedy", "")))
    error.details = {key: value for key, value in body.items() if key not in members}
    return error


def _count(body: dict[str, Any], key: str) -> int:
    value = body.get(key)
    return value if isinstance(value, int) else 0
