"""Vouched piece lists that hosts found to be right, kept for later pulls: with a state directory
over restarts, else as long as LISTS_BYTES_MAX allows.

A kept list is a convenience, and still only vouched for: each host compares the SHA-256 of the
whole. The voters that found it to match are kept with it, so that one host that says otherwise
after a restart has no more weight than before."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt
from p2pdist.model.manifest import Descriptor
from p2pdist.model.pieces import PieceList
from tracker.state.documents import Documents

LISTS_BYTES_MAX = 64 << 20
LIST_TYPE = "application/vnd.p2pdist.pieces"
VOTERS = "voters"
"""The annotation that names them."""

logger = logging.getLogger(__name__)


FoundList = tuple[PieceList, tuple[str, ...]]
"""A list, and some of the voters that found the whole to match it."""


class PieceLists:
    """Lists by the blob's digest. `documents` outlive the process; None: nothing does."""

    def __init__(self, documents: Documents | None) -> None:
        self._documents = documents
        self._lists: OrderedDict[Digest, FoundList] = OrderedDict()
        self._bytes = 0

    async def keep(self, blob: Digest, pieces: PieceList, voters: tuple[str, ...] = ()) -> None:
        """Keep a list, if the disk takes it."""
        if (old := self._lists.pop(blob, None)) is not None:
            self._bytes -= len(old[0].hashes)
        self._lists[blob] = pieces, voters
        self._bytes += len(pieces.hashes)
        while self._bytes > LISTS_BYTES_MAX:
            _, (oldest, _) = self._lists.popitem(last=False)
            self._bytes -= len(oldest.hashes)
        if self._documents is not None:
            await asyncio.to_thread(_write, self._documents, blob, pieces, voters)

    async def find(self, blob: Digest) -> FoundList | None:
        """The list of a blob, None when none is kept."""
        known = self._lists.get(blob)
        if known is not None or self._documents is None:
            return known
        return await asyncio.to_thread(_read, self._documents, blob)


def _write(documents: Documents, blob: Digest, pieces: PieceList, voters: tuple[str, ...]) -> None:
    data = pieces.encode()
    documents.write(pieces.digest, data)
    annotations = {VOTERS: json.dumps(voters)} if voters else {}
    documents.note({f"vouched {blob}": Descriptor(LIST_TYPE, pieces.digest, len(data), annotations)})


def _read(documents: Documents, blob: Digest) -> FoundList | None:
    named = documents.recall(f"vouched {blob}")
    data = documents.read(named.digest) if named is not None else None
    if named is None or data is None:
        return None
    try:
        voters = tuple(map(str, json.loads(named.annotations.get(VOTERS, "[]"))))
        return PieceList.decode(data), voters
    except (Corrupt, ValueError, TypeError) as error:
        logger.warning("the kept list of %s is of no use: %s", blob, error)
        return None
