"""The blobs of an agent that have no piece list of their own: fetching them, and what a tracker
sends of their lists.

A host that has such a blob whole has made a piece list of it, and tells it to a tracker that lacks
one (Recall), or that would have it read the blob again (Reread).

Repositories are of different owners, and each may name any digest. So what comes for a digest is
held against the repository that gave it here, and another one with the same digest is asked as
ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from p2pdist.agent.pull.blob import BlobPull
from p2pdist.agent.pull.registry import Registry
from p2pdist.agent.pull.vouched_pull import listing_of, statements
from p2pdist.agent.tasks import Tasks
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, Refused
from p2pdist.model.messages import LISTED_MAX, Basis, KnownPieces, Listed, Priority, Recall, Reread, Vouched
from p2pdist.model.pieces import PieceList
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore

SOURCES_MAX = 8
"""Repositories that are tried for one blob."""

WRONG_S = 30.0
"""So long a repository is not asked again for a blob that was wrong there: clients that ask next
hear it at once."""

SUSPECT_S = 5.0
"""So long where nothing was read here: wrong bytes that came from other hosts may be of another
repository."""

WRONG_MAX = 1000

logger = logging.getLogger(__name__)


class RepositorySource(Protocol):
    """A repository from which blobs are read by ranges."""

    @property
    def repository(self) -> str:
        """Its name, with that of its registry or hub."""

    async def read_range(self, digest: Digest, start: int, length: int) -> bytes:
        """`length` bytes of a blob. Raises P2PDistError."""


class Sources:
    """Where one blob can be read: in the repositories under whose names it was asked for. A
    manifest may name a blob that its own repository does not have, so each of them is tried."""

    def __init__(self) -> None:
        self._sources: list[RepositorySource] = []
        """In the order in which they were asked for, but those that refused last come last: which
        repository is asked for later changes nothing for a pull that runs."""
        self._gave: set[str] = set()
        self._refused: set[str] = set()
        """Repositories that gave bytes, and that refused some."""

    def add(self, source: RepositorySource) -> None:
        """Try another one, too; one that is equal to it is known already."""
        if source not in self._sources:
            self._sources.append(source)
            del self._sources[SOURCES_MAX - 1 : -1]

    @property
    def suspects(self) -> set[str]:
        """The repositories whose bytes may be wrong when the whole is; of several that gave bytes,
        those that did not give all."""
        return self._gave & self._refused if len(self._gave) > 1 else set(self._gave)

    @property
    def repositories(self) -> set[str]:
        """All of them."""
        return {source.repository for source in self._sources}

    async def read_range(self, digest: Digest, start: int, length: int) -> bytes:
        """`length` bytes of the blob. Raises P2PDistError, that of the last one tried."""
        tried: list[RepositorySource] = []
        while True:
            source = next(source for source in self._sources if source not in tried)
            try:
                data = await source.read_range(digest, start, length)
                self._gave.add(source.repository)
                return data
            except Corrupt:
                self._gave.add(source.repository)
                raise
            except (NotFound, Refused):
                self._refused.add(source.repository)
                tried.append(source)
                if source in self._sources:
                    self._sources.remove(source)
                    self._sources.append(source)
                if all(other in tried for other in self._sources):
                    raise


class WrongBlobs:
    """Blobs that were wrong at a repository, each for a while."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[tuple[str, Digest, int], tuple[float, str]] = OrderedDict()
        """By repository, digest and stated size until when, in the event loop's time, and what was
        said."""

    def note(self, repositories: Iterable[str], digest: Digest, size: int, why: str, lasts_s: float) -> None:
        """What these repositories have for a blob is wrong."""
        until = asyncio.get_running_loop().time() + lasts_s
        for repository in repositories:
            self._wrong[repository, digest, size] = until, why
        while len(self._wrong) > WRONG_MAX:
            self._wrong.popitem(last=False)

    def require_right(self, repository: str, digest: Digest, size: int) -> None:
        """Raises Corrupt for a blob that was wrong a moment ago."""
        until, why = self._wrong.get((repository, digest, size), (0.0, ""))
        left_s = until - asyncio.get_running_loop().time()
        if left_s > 0:
            raise Corrupt(f"{repository} gave something else: {why}", remedy=f"It is read again in {left_s:.0f} s")

    def forget(self) -> None:
        """Ask every repository again."""
        self._wrong.clear()


class VouchedBlobs:
    """On the event loop. `send` sends a message to the tracker, if one answers."""

    def __init__(self, store: BlobStore, registry: Registry, send: Callable[[Vouched], None]) -> None:
        self._store, self._registry, self._send = store, registry, send
        self._watched: set[Digest] = set()
        """The blobs that are being pulled."""
        self._sources: dict[Digest, Sources] = {}
        """Of the blobs that are being pulled."""
        self._dropping: dict[Digest, asyncio.Event] = {}
        """Set once what came of a blob that turned out wrong is gone: a new pull would begin with
        it otherwise, and nobody reads it once more."""
        self.wrong = WrongBlobs()
        self._tasks = Tasks(logger, "a blob without a piece list could not be looked after")

    async def stop(self) -> None:
        """End what is under way."""
        await self._tasks.stop()

    async def fetch_vouched(
        self, digest: Digest, size: int, upstream: RepositorySource, priority: Priority = "start"
    ) -> tuple[Blob, BlobPull | None]:
        """The blob of `size` bytes, of which nobody has made a piece list, not yet held, and its
        pull, started or joined; None when the blob is complete. Hosts with a lease read it from
        `upstream`. The pull of a package that brings the same blob ends first, as its piece list
        may describe something else, and so does one of another size, as manifests state any. Raises
        Corrupt for what was wrong in this repository a moment ago."""
        stored = self._store.get(digest)
        if stored is None or not stored.complete:
            self.wrong.require_right(upstream.repository, digest, size)
        claim = partial(self._store.begin_vouched, digest, size)
        while True:
            if digest in self._dropping:
                await self._dropping[digest].wait()
            sources = self._sources.setdefault(digest, Sources())
            sources.add(upstream)
            try:
                blob, pull = await self._registry.bring(digest, claim, priority, upstream=sources)
            finally:
                if digest not in self._watched:
                    self._sources.pop(digest, None)
            if pull is None or (blob.size == size and (pull.vouched is not None or blob.whole)):
                break
            await asyncio.wait([pull.done])
            await asyncio.sleep(0)
        if pull is not None and digest not in self._watched:
            self._watched.add(digest)
            self._sources[digest] = sources
            pull.done.add_done_callback(partial(self._ended, digest, size))
        return blob, pull

    def _ended(self, digest: Digest, size: int, done: asyncio.Future[None]) -> None:
        """A pull has ended. Nothing of what is wrong is kept: it would be wrong again."""
        self._watched.discard(digest)
        sources = self._sources.pop(digest, None)
        error = None if done.cancelled() else done.exception()
        if not isinstance(error, Corrupt):
            return
        self._dropping.setdefault(digest, asyncio.Event())
        self._tasks.spawn(self._drop(digest))
        if sources is not None and (suspects := sources.suspects):
            self.wrong.note(suspects, digest, size, error.what, WRONG_S)
        elif sources is not None:
            self.wrong.note(sources.repositories, digest, size, error.what, SUSPECT_S)

    async def _drop(self, digest: Digest) -> None:
        try:
            await self._registry.discard(digest)
        finally:
            if (dropped := self._dropping.pop(digest, None)) is not None:
                dropped.set()

    # -- the tracker

    def receive(self, message: Listed | Reread | Recall) -> None:
        """Take in what the tracker sends of a list, or asks for."""
        pull = self._registry.fetching(message.blob)
        if pull is not None and pull.vouched is not None:
            pull.vouched.receive(message)
        elif isinstance(message, Reread | Recall):
            self._tasks.spawn(self._tell(message.blob, message.round if isinstance(message, Reread) else 0))

    async def _tell(self, digest: Digest, round_: int) -> None:
        """Tell the tracker the piece list of a blob that is here whole."""
        blob = self._store.get(digest)
        if blob is None or not (blob.complete and blob.whole):
            logger.info("blob=%s: the tracker asks for its piece list, which is not here", digest)
            return
        try:
            pieces = await asyncio.to_thread(_list_of, blob)
        except P2PDistError as error:
            logger.warning("blob=%s: the tracker asks for its piece list: %s", digest, error)
            return
        # An arbiter is believed what it has read: this is what it would read.
        basis: Basis = "read" if round_ else "whole"
        for message in statements(digest, listing_of(pieces), basis, round_):
            self._send(message)

    # -- other agents

    async def known(self, digest: Digest, first: int) -> KnownPieces:
        """What is known here of the pieces of a blob from `first` on. Raises NotFound."""
        blob = self._store.get(digest)
        if blob is None or not self._registry.serves(digest):
            raise NotFound(f"this agent neither holds nor fetches {digest}")
        if (vouched := blob.vouched) is not None:
            listing = vouched.view.known(first, LISTED_MAX)
            return KnownPieces(listing.pieces, listing.hashes)
        listing = listing_of(await asyncio.to_thread(_list_of, blob), first, LISTED_MAX)
        return KnownPieces(listing.pieces, listing.hashes, blob.whole and blob.complete)


def _list_of(blob: Blob) -> PieceList:
    """The piece list of a blob; waits for the disk."""
    return blob.pieces
