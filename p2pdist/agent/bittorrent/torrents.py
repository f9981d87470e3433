"""The torrents that an agent knows.

A torrent document is found like any document: the tag that p2pdist/model/torrent.py names leads to
it, at the tracker, else at the agent's own origin. The torrents that were used last are remembered,
up to TORRENTS_BYTES_MAX; that a blob has none is remembered for UNKNOWN_S.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Protocol

from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.model.bencode import decode
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, Unavailable
from p2pdist.model.manifest import DOCUMENT_BYTES_MAX, Descriptor
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.torrent import TORRENT_TYPE, Torrent, decode_torrent, torrent_reference
from p2pdist.origin.contract import Origin
from p2pdist.store.store import BlobStore

logger = logging.getLogger(__name__)

TORRENTS_BYTES_MAX = 64 << 20
UNKNOWN_S = 60.0
UNKNOWN_MAX = 1000


class TorrentsContext(Protocol):
    """What Torrents needs of its agent; not all of it is there when Torrents is made."""

    store: BlobStore
    session: TrackerSession
    own_origin: Origin | None


class Torrents:
    """Finds and remembers torrents. Lives on the event loop."""

    def __init__(self, context: TorrentsContext) -> None:
        self._context = context
        self._torrents: OrderedDict[Digest, Torrent] = OrderedDict()
        self._unknown: OrderedDict[Digest, float] = OrderedDict()  # blobs without one, until when

    def known(self, digest: Digest) -> Torrent | None:
        """The torrent of a blob, if it is remembered."""
        return self._torrents.get(digest)

    def open_question(self, digest: Digest) -> bool:
        """Whether it is not known whether a blob has a torrent."""
        now = asyncio.get_running_loop().time()
        return digest not in self._torrents and now >= self._unknown.get(digest, 0.0)

    async def find(self, digest: Digest, layout: PieceLayout, *, at_origin: bool = True) -> Torrent | None:
        """The torrent of a blob; None when it has none that fits. `at_origin`: ask the agent's own
        origin as well. Raises Unavailable when neither can be asked, Corrupt."""
        torrent = self._torrents.get(digest)
        if torrent is not None:
            self._torrents.move_to_end(digest)
            return torrent
        if not self.open_question(digest):
            return None
        try:
            torrent = await self._ask(digest, at_origin)
        except NotFound:
            self.forget(digest)
            return None
        if [size for _, size in torrent.files] != [layout.size] or torrent.piece_size != layout.piece_size:
            logger.warning("the torrent of %s is cut otherwise; it is not used", digest)
            self.forget(digest)
            return None
        self._torrents[digest] = torrent
        while sum(map(len, self._torrents.values())) > TORRENTS_BYTES_MAX:
            self._torrents.popitem(last=False)
        return torrent

    def forget(self, digest: Digest) -> None:
        """Remember that the blob has no torrent, or that of another blob."""
        self._torrents.pop(digest, None)
        self._unknown[digest] = asyncio.get_running_loop().time() + UNKNOWN_S
        while len(self._unknown) > UNKNOWN_MAX:
            self._unknown.popitem(last=False)

    async def count_peers(self, torrent: Torrent) -> int:
        """How many peers the tracker knows for a torrent (BEP 48); 0 when it does not say."""
        info_hash = torrent.info_hash_v1
        try:
            query = "".join(f"%{byte:02X}" for byte in info_hash)
            body = decode(await self._context.session.get(f"/scrape?info_hash={query}", {}))
        except P2PDistError:
            return 0
        files = body.get(b"files") if isinstance(body, dict) else None
        entry = files.get(info_hash) if isinstance(files, dict) else None
        counts = [entry.get(key) for key in (b"complete", b"incomplete")] if isinstance(entry, dict) else []
        return sum(count for count in counts if isinstance(count, int))

    async def _ask(self, digest: Digest, at_origin: bool) -> Torrent:
        reference, missing = torrent_reference(digest), None
        if self._context.session.connected:
            try:
                return await self._document(
                    await self._context.session.resolve(reference), self._context.session.content
                )
            except NotFound as error:
                missing = error
        if at_origin and self._context.own_origin is not None:
            return await self._document(
                await self._context.own_origin.resolve(reference), self._context.own_origin.read
            )
        raise missing or Unavailable("no tracker answers that could know a torrent")

    async def _document(self, described: Descriptor, read: Callable[[Digest], Awaitable[bytes]]) -> Torrent:
        if described.media_type != TORRENT_TYPE or described.size > DOCUMENT_BYTES_MAX:
            raise Corrupt(f"{described.digest} is no torrent document", remedy="Make it again: p2pdist torrent")
        data = await asyncio.to_thread(self._context.store.read_document, described.digest)
        if data is None:
            data = await read(described.digest)
            await asyncio.to_thread(self._context.store.put_document, data)
        return await asyncio.to_thread(decode_torrent, data)
