"""Every failure that a user can meet: one small tree.

Each class fixes, once, its exit code (see docs/protocol.md), its HTTP status and the `type` of its problem
document (RFC 9457). `what` says what happened and to what; `remedy` says what to do about it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

PROBLEM_BASE = "urn:p2pdist:problem:"

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding untrusted JSON with msgspec may raise: no JSON or of another shape, a string that is not UTF-8, nested too deeply."""


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


class Unavailable(P2PDistError):
    """A tracker, origin or agent that cannot be reached or is overloaded. Trying again may help."""

    slug, title, exit_code, http_status = "unavailable", "A service is unavailable", 5, 503


class Corrupt(P2PDistError):
    """Content that does not match its digest, or a document that breaks its format."""

    slug, title, exit_code, http_status = "corrupt", "Content is corrupt", 6, 502


class DiskFull(P2PDistError):
    """Not enough space. `needed` and `free` are bytes, and so is `capacity`, which is given where what is needed would not fit if nothing
    else were there: then no retry helps, here or on another machine like this one."""

    slug, title, http_status = "disk-full", "Not enough disk space", 507

    def __init__(self, where: str, *, needed: int, free: int, capacity: int | None = None) -> None:
        what = f"{where} lacks space: {needed} bytes needed, {free} bytes free"
        if capacity is None:
            remedy = "Free some space or give the store another disk; what has arrived is kept for a retry"
            super().__init__(what, remedy=remedy, needed=needed, free=free)
            return
        super().__init__(
            f"{what}, at most {capacity} bytes in all",
            remedy="Make it smaller, or give the store a larger --capacity or disk",
            needed=needed,
            free=free,
            capacity=capacity,
        )

    @property
    def never_fits(self) -> bool:
        """Whether freeing space would not help."""
        return "capacity" in self.details


class Conflict(P2PDistError):
    """The request contradicts the present state, such as unmounting what is in use."""

    slug, title, http_status = "conflict", "The request conflicts with the present state", 409


def _tree(root: type[P2PDistError]) -> dict[str, type[P2PDistError]]:
    found = {root.slug: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def from_problem(body: dict[str, Any]) -> P2PDistError:
    """The failure that a problem document describes, whatever is in it; an unknown type becomes the base class."""
    kind = _tree(P2PDistError).get(str(body.get("type", "")).removeprefix(PROBLEM_BASE), P2PDistError)
    what = str(body.get("detail") or body.get("title") or "unknown failure")
    if kind is DiskFull:
        where, capacity = what.split(" lacks space", 1)[0], _count(body, "capacity") or None
        return DiskFull(where, needed=_count(body, "needed"), free=_count(body, "free"), capacity=capacity)
    known = {"type", "title", "status", "detail", "remedy"}
    error = kind(what, remedy=str(body.get("remedy", "")))
    error.details = {key: value for key, value in body.items() if key not in known}
    return error


def _count(body: dict[str, Any], key: str) -> int:
    value = body.get(key)
    return value if isinstance(value, int) else 0
