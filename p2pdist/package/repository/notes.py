"""Notes: push leases and removals, by which writers and garbage collections of one repository know
of each other.

A repository is an image layout in a directory or a bucket. The machines that use it see nothing of
each other but its files. No storage can delete a blob on the condition that no writer has just
relied on it, and no bucket can refresh the age of a blob without copying it (S3 refuses to copy a
value onto itself unchanged, and copies no more than 5 GB at once). So both sides leave notes, small
values beside the blobs:

- a **push lease** (here: lease) names every blob of a package that a writer is about to tag. The
  writer writes it before it looks for blobs that are there already, renews it while it works, and
  removes it after the tag is visible;
- a **removal** names the blobs that a collector is about to delete. The collector writes it before
  it reads leases and tags for the last time, and removes it after the deletion.

Each side writes its own note before it reads the other's (Dekker's rule), and reads what was
written before (S3, Google and Azure buckets and local file systems promise that; NFS does only
without its caches of names and attributes, `lookupcache=none,actimeo=0`):

    writer      lease -> removals -> look, send -> tag -> look again -> lease away
    collector   removal -> leases -> tags -> delete -> removal away

If the lease was written before the collector read leases, the blobs stay. If not, the removal was
there before the writer read removals: either it still is, and the writer waits until it is gone, or
it is gone and the deletion done. In both cases the writer looks at what is there after the
deletion, and sends what is missing. Later removals see the lease, or, when it is gone, the tag,
since leases are read before tags. So a blob that a visible tag names is never missing, whatever age
a collection spares.

Times. A note of a process that was killed stays, so both kinds end by age, by the clock of the
storage alone, against one's own note: a lease is void after LEASE_S, a removal after REMOVAL_S. A
collector begins no deletion later than START_S after its note, which leaves REMOVAL_S - START_S for
the request itself (the drivers give up after 5 minutes); a writer with a lease older than LEASE_S
/ 2 (its process was stopped, or the storage away) takes a new one and looks at everything again
before it tags. Only a process that stands still for long exactly between such a look at its clock
and the request can do harm; for that the writer looks at all blobs once more after the tag and
sends what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol

from p2pdist.model.digest import Digest, is_digest
from p2pdist.model.errors import Corrupt, P2PDistError, Unavailable

LEASE_S = 3600.0
RENEW_S = 600.0
REMOVAL_S = 900.0
START_S = 120.0
POLL_S = (0.05, 1.0)
"""How long a writer waits before it looks again whether a removal is gone, at first and at most."""
LEASE, REMOVAL = "lease-", "removal-"


class NoteBoard(Protocol):
    """A repository that keeps notes. p2pdist/origin/contract.py has the contract of each method."""

    @property
    def url(self) -> str: ...

    async def notes(self) -> list[tuple[str, float]]: ...

    async def read_note(self, name: str) -> bytes | None: ...

    async def write_note(self, name: str, data: bytes) -> None: ...

    async def remove_notes(self, names: Sequence[str]) -> None: ...


def note_name(kind: str) -> str:
    """A new name for a note of a kind, LEASE or REMOVAL."""
    return kind + secrets.token_hex(12)


def clock() -> float:
    """Seconds that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def encode_note(digests: Iterable[Digest]) -> bytes:
    """The text of a note that names these blobs, one a line."""
    return "".join(f"{digest}\n" for digest in digests).encode()


async def read_note(board: NoteBoard, name: str) -> frozenset[Digest]:
    """The blobs that a note names, none when it is gone. Raises Corrupt."""
    data = await board.read_note(name)
    digests = (data or b"").decode("ascii", errors="replace").split()
    if not all(map(is_digest, digests)):
        raise Corrupt(f"the note {name} at {board.url} is malformed", remedy="Delete it at a time when no push runs")
    return frozenset(map(Digest, digests))


class PushLease:
    """Protects the blobs `names` from garbage collections while the block lasts. Entering it waits
    for removals of these blobs; `on_wait` is called at each check of that."""

    def __init__(self, board: NoteBoard, names: Iterable[Digest], *, on_wait: Callable[[], None] | None = None) -> None:
        self._board, self._names, self._on_wait = board, frozenset(names), on_wait
        self._name = ""
        self._renewed = 0.0
        self._renewing: asyncio.Task[None] | None = None
        self._apart: set[str] = set()
        """Removals that name nothing of ours; what a note says never changes."""

    async def __aenter__(self) -> PushLease:
        try:
            await self.take()
        except BaseException:
            await self._leave()
            raise
        self._renewing = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._renewing:
            self._renewing.cancel()
        await self._leave()

    async def _leave(self) -> None:
        # A writer without the right to delete leaves the note; the next collection finds it void.
        with contextlib.suppress(P2PDistError):
            await self._board.remove_notes([self._name] if self._name else [])

    @property
    def in_doubt(self) -> bool:
        """Whether the lease could be void now or soon. Then the writer must take it again, and look
        at all blobs again, before it sets a tag."""
        return clock() - self._renewed > LEASE_S / 2

    async def take(self) -> None:
        """Write the lease, under a new name since the old note may be void, and wait until no
        removal names any of the blobs. A blob that is there then stays there."""
        await self._leave()
        self._name = note_name(LEASE)
        await self._write()
        pause = POLL_S[0]
        while await self._is_threatened():
            if self._on_wait:
                self._on_wait()
            await asyncio.sleep(pause)
            pause = min(2 * pause, POLL_S[1])

    async def _write(self) -> None:
        before = clock()
        await self._board.write_note(self._name, encode_note(sorted(self._names)))
        self._renewed = before

    async def _is_threatened(self) -> bool:
        notes = dict(await self._board.notes())
        if self._name not in notes:
            raise Unavailable(f"{self._board.url} does not list what was just written", remedy="Try again")
        now = notes[self._name] + clock() - self._renewed
        for name, written in notes.items():
            if name.startswith(REMOVAL) and name not in self._apart and now - written <= REMOVAL_S:
                if not self._names.isdisjoint(await read_note(self._board, name)):
                    return True
                self._apart.add(name)
        return False

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            if self.in_doubt:
                return  # it may have been void for a while, which writing it now would hide
            # A failure shows in `in_doubt` in the end, and is raised when the lease is taken again.
            with contextlib.suppress(P2PDistError):
                await self._write()
