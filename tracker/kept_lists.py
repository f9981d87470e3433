"""Vouched piece lists that hosts found to be right, kept for later pulls: with a state directory
over restarts, else as long as LISTS_BYTES_MAX allows.

A kept list is a convenience, and still only vouched for: each host compares the SHA-256 of the
whole."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt
from p2pdist.model.manifest import Descriptor
from p2pdist.model.pieces import PieceList
from tracker.state.documents import Documents

LISTS_BYTES_MAX = 64 << 20
LIST_TYPE = "application/vnd.p2pdist.pieces"

logger = logging.getLogger(__name__)


class KeptLists:
    """Lists by the blob's digest. `documents` outlive the process; None: nothing does."""

    def __init__(self, documents: Documents | None) -> None:
        self._documents = documents
        self._lists: OrderedDict[Digest, PieceList] = OrderedDict()
        self._bytes = 0

    async def keep(self, blob: Digest, pieces: PieceList) -> None:
        """Keep a list, if the disk takes it."""
        if (old := self._lists.pop(blob, None)) is not None:
            self._bytes -= len(old.hashes)
        self._lists[blob] = pieces
        self._bytes += len(pieces.hashes)
        while self._bytes > LISTS_BYTES_MAX:
            _, oldest = self._lists.popitem(last=False)
            self._bytes -= len(oldest.hashes)
        if self._documents is not None:
            await asyncio.to_thread(_write, self._documents, blob, pieces)

    async def find(self, blob: Digest) -> PieceList | None:
        """The list of a blob, None when none is kept."""
        known = self._lists.get(blob)
        if known is not None or self._documents is None:
            return known
        return await asyncio.to_thread(_read, self._documents, blob)


def _write(documents: Documents, blob: Digest, pieces: PieceList) -> None:
    data = pieces.encode()
    documents.write(pieces.digest, data)
    documents.note({f"vouched {blob}": Descriptor(LIST_TYPE, pieces.digest, len(data))})


def _read(documents: Documents, blob: Digest) -> PieceList | None:
    named = documents.recall(f"vouched {blob}")
    data = documents.read(named.digest) if named is not None else None
    if data is None:
        return None
    try:
        return PieceList.decode(data)
    except Corrupt as error:
        logger.warning("the kept list of %s is of no use: %s", blob, error)
        return None
