"""Tags and referrers as registries listed them last, over restarts too: while a registry does not
answer they are given as they were, like the meanings of tags."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import TypeVar

from p2pdist.model.digest import digest_of
from p2pdist.model.image_lists import LIST_TYPE, Listed, decode_list, encode_list
from p2pdist.model.image_manifest import ImageDocument, TagPage
from p2pdist.model.manifest import Descriptor
from tracker.joined_reads import remember
from tracker.state.documents import Documents

LISTS_MAX = 500
KEPT_MAX = 2_000
"""Of those that outlive the process: clients choose pages and types, and what tags mean, which is
kept beside, is limited as well."""

KIND = "list "
"""Begins the names of lists among documents."""

ListKind = TypeVar("ListKind", TagPage, ImageDocument)


class LastLists:
    """Lists by the keys of their reads. `documents` outlive the process; None: nothing does."""

    def __init__(self, documents: Documents | None) -> None:
        self._documents = documents
        self._lists: OrderedDict[str, tuple[float, Listed]] = OrderedDict()

    async def find(self, key: str, kind: type[ListKind]) -> tuple[float, ListKind | None]:
        """When a list was asked for (time.monotonic), and the list, None when it is not kept. That
        an earlier process asked for it is long ago."""
        asked_at, known = self._lists.get(key, (float("-inf"), None))
        if known is None and self._documents is not None:
            known = await asyncio.to_thread(_recall, self._documents, key)
        return asked_at, known if isinstance(known, kind) else None

    async def keep(self, key: str, found: Listed) -> None:
        """Keep a list that a registry has just sent, if it is not too large."""
        if (data := encode_list(found)) is None:
            return
        known = self._lists.get(key)
        remember(self._lists, key, (time.monotonic(), found), LISTS_MAX)
        if self._documents is not None and (known is None or known[1] != found):
            await asyncio.to_thread(_note, self._documents, key, data)


def _note(documents: Documents, key: str, data: bytes) -> None:
    digest = digest_of(data)
    documents.write(digest, data)
    named = {f"{KIND}{key}": Descriptor(LIST_TYPE, digest, len(data))}
    documents.note(named, kind=KIND, kind_max=KEPT_MAX)


def _recall(documents: Documents, key: str) -> Listed | None:
    named = documents.recall(f"{KIND}{key}")
    data = documents.read(named.digest) if named is not None and named.media_type == LIST_TYPE else None
    return decode_list(data) if data is not None else None
