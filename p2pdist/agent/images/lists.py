"""Tags and referrers of images as they were listed last, in the store: while neither tracker nor
registry answers a host gives them as they were."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Unavailable
from p2pdist.model.image import ImageName
from p2pdist.model.image_lists import LIST_TYPE, Listed, decode_list, encode_list
from p2pdist.model.image_manifest import ImageDocument, TagPage
from p2pdist.store.store import BlobStore

Kind = TypeVar("Kind", TagPage, ImageDocument)


class KeptLists:
    """Lists by repository and key. A key has a space, as no tag and no digest has. On the event
    loop."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store

    async def read(
        self, name: ImageName, key: str, kind: type[Kind], ask: Callable[[bool], Awaitable[Kind]]
    ) -> Kind:
        """What `ask` gives, else the list as it was last. `ask` hears whether that is here, so that
        it need not wait for long. Raises what `ask` raises."""
        kept = await asyncio.to_thread(self._find, str(name), key)
        known = kept if isinstance(kept, kind) else None
        try:
            found = await ask(known is not None)
        except Unavailable:
            if known is None:
                raise
            return known
        if found != known:
            await asyncio.to_thread(self._keep, str(name), key, found)
        return found

    def _find(self, name: str, key: str) -> Listed | None:
        record = self._store.images.get(name, key)
        data = self._store.read_document(record.digest) if record is not None else None
        return decode_list(data) if data is not None else None

    def _keep(self, name: str, key: str, found: Listed) -> None:
        if (data := encode_list(found)) is not None:
            self._store.put_document(data)
            self._store.images.record(name, (key,), digest_of(data), LIST_TYPE)
