"""Named byte strings: the little that an image layout needs of the storage under it.

All methods block and are called from worker threads, several at a time. Failures are Refused,
Unavailable, DiskFull, or NotFound when the whole storage (directory, bucket) is missing; an absent
key is None, not an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Stored:
    """A value as a listing shows it: its key, its size in bytes, and when it was written, in
    seconds since 1970 by the storage's clock."""

    key: str
    size: int
    modified_s: float


class Objects(Protocol):
    """Byte strings by key, such as `blobs/sha256/<hex>`."""

    @property
    def url(self) -> str:
        """Where this is, for messages; without credentials."""

    @property
    def writable(self) -> bool:
        """Whether a first write may make what is missing; False where this is only read."""

    def read(self, key: str, limit: int) -> bytes | None:
        """The whole value; raises TooLarge when it is over `limit` bytes."""

    def read_range(self, key: str, start: int, length: int) -> bytes | None:
        """At most `length` bytes from `start`; fewer when the value ends before, none when `start`
        is past the end."""

    def size(self, key: str) -> int | None:
        """Size of the value in bytes; None also where the whole storage is missing, since a first
        write may make it."""

    def write(self, key: str, chunks: Iterator[bytes], size: int) -> None:
        """Store the chunks, `size` bytes in all, whole or not at all: if `chunks` raises, nothing
        appears and it is raised on."""

    def update(self, key: str, limit: int, edit: Callable[[bytes | None], bytes]) -> None:
        """Replace the value by `edit(value)` such that no concurrent update is lost; `edit` may be
        called more than once."""

    def list(self, folder: str) -> Iterator[Stored]:
        """All values whose key is `folder`, a slash and a name without one, in no order."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete these values; one that is not there is passed over."""

    def lock(self, *, alone: bool) -> Callable[[], None] | None:
        """Take a lock that many can hold at once, or one `alone`. Returns what releases it, None
        while others are in the way. It ends with the process. Buckets have no locks: there it
        always succeeds."""

    def abandoned(self, *, remove: bool) -> Iterator[tuple[str, int]]:
        """Name and size of what writers left unfinished that are certainly gone; it is deleted if
        `remove`."""
