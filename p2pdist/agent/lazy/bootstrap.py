"""Brings the bootstrap of a package (model/bootstrap.py), by which a lazy view is mounted before
the package's lists of files are here.

It is of use where it is smaller than what is missing of these lists: not for a version of which
most is here. What does not come, or is wrong, costs a view a moment: it waits for the lists.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from p2pdist.agent.lazy.chunks import Fetcher
from p2pdist.agent.pull.blob import BlobPull
from p2pdist.agent.pull.trees import together
from p2pdist.model.bootstrap import Bootstrap, bootstrap_of, decode_bootstrap
from p2pdist.model.device import ARRANGEMENT
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Conflict, Corrupt, NotFound, P2PDistError, Unavailable
from p2pdist.model.manifest import CATALOG_TYPE, TREE_TYPE, Descriptor, Manifest
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.damage import drop_wrong

STILL_S = 2.0
"""When nothing of it has come for so long, the view waits for the lists instead: hosts that pulled
the package have these, and no bootstrap."""

STEP_BYTES = 4 << 20

logger = logging.getLogger(__name__)


def useful_bootstrap(store: BlobStore, manifest: Manifest) -> Descriptor | None:
    """The bootstrap of a package, None where it has none, or is shown as soon without."""
    part = bootstrap_of(manifest)
    if part is None or all(layer.media_type != TREE_TYPE or _is_whole(store, layer) for layer in manifest.layers):
        return None
    return part if part.size < sum(blob.size for blob in _missing_lists(store, manifest)) else None


def _is_whole(store: BlobStore, layer: Descriptor) -> bool:
    with ExitStack() as hold, suppress(NotFound, Conflict):
        hold.enter_context(store.trees.held(layer.digest))
        return True
    return False


async def bring_bootstrap(
    fetcher: Fetcher, part: Descriptor, layers: Sequence[Descriptor], come: Callable[[], None]
) -> Bootstrap | None:
    """The bootstrap of a package with these `layers`; None where it does not come, which the log
    tells. `come` is called when all its bytes are here."""
    try:
        blob, pull = await fetcher.fetch(part, "start", None)  # else what a trace names would come before it
        with blob.held():
            if pull is not None:
                await _come(blob, pull)
            come()
            bootstrap = await asyncio.to_thread(_read, blob)
        if bootstrap.layers != tuple(layer.digest for layer in layers):
            raise Corrupt(f"{part.digest} is the bootstrap of other layers")
        if bootstrap.arrangement != ARRANGEMENT:
            raise Unavailable(f"{part.digest} is for devices that this version does not arrange")
    except (P2PDistError, OSError) as error:
        logger.warning("a view is shown without its bootstrap: %s", error)
        return None
    return bootstrap


async def bring_lists(store: BlobStore, fetcher: Fetcher, manifest: Manifest) -> None:
    """Have the roots and catalogs of a package come, behind what readers wait for and before all
    else that a preseed brings; they are complete then. Raises P2PDistError."""

    async def bring(part: Descriptor) -> None:
        blob, pull = await fetcher.fetch(part, "preseed", None)
        if pull is not None:
            with blob.held():
                await pull.demand(range(blob.layout.count), prefetch=True)
                await asyncio.shield(pull.done)  # the store takes it for whole from then on

    await together(bring(part) for part in _missing_lists(store, manifest))


def _missing_lists(store: BlobStore, manifest: Manifest) -> list[Descriptor]:
    lists = [blob for blob in (*manifest.layers, *manifest.parts) if blob.media_type in (TREE_TYPE, CATALOG_TYPE)]
    return [blob for blob in lists if (held := store.get(blob.digest)) is None or not held.complete]


async def _come(blob: Blob, pull: BlobPull) -> None:
    """Return once all of a blob is here. Raises Unavailable where nothing comes, and the pull's
    failure."""
    demand = asyncio.ensure_future(pull.demand(range(blob.layout.count)))
    try:
        before = -1
        while not demand.done():
            if len(blob.have) == before:
                raise Unavailable(f"nothing of {blob.digest} has come for {STILL_S:g} s")
            before = len(blob.have)
            await asyncio.wait([demand], timeout=STILL_S)
        demand.result()
    finally:
        demand.cancel()


def _read(blob: Blob) -> Bootstrap:
    """In a thread. Raises Corrupt, OSError."""
    steps = range(0, blob.size, STEP_BYTES)
    data = b"".join(blob.read_range(start, min(STEP_BYTES, blob.size - start)) for start in steps)
    if digest_of(data) != blob.digest:
        drop_wrong(blob, 0, blob.size)
        raise Corrupt(f"{blob.digest} has changed on the disk")
    return decode_bootstrap(data)
