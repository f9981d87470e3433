"""Showing packages: from a reference to a directory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial

from p2pdist.agent.caller import Caller
from p2pdist.agent.mounts import Mounts
from p2pdist.agent.packages import Package
from p2pdist.agent.pulls import Pulls
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, Corrupt, NotFound, P2PDistError
from p2pdist.model.manifest import TREE_TYPE, Descriptor, Manifest, decode_manifest
from p2pdist.model.messages import MountRequest, MountStatus
from p2pdist.mount.erofs.patch import is_intact
from p2pdist.mount.layers import Layer, SquashfsLayer, TreeLayer
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore

ATTEMPTS = 3
"""At pulling a package that is evicted again before it can be claimed."""

_logger = logging.getLogger(__name__)


def _drop_damaged(layers: Sequence[Layer]) -> bool:
    """Remove images of trees that are not what was written; they are made again when they are
    needed. Returns whether there were any."""
    damaged = [layer.image for layer in layers if isinstance(layer, TreeLayer) and not is_intact(layer.image)]
    for image in damaged:
        _logger.warning("the image %s is damaged and is made again", image)
        image.unlink(missing_ok=True)
    return bool(damaged)


class Showing:
    """Joins pulls, store and mounts."""

    def __init__(self, store: BlobStore, pulls: Pulls, mounts: Mounts) -> None:
        self._store, self._pulls, self._mounts = store, pulls, mounts
        mounts.adopt(self._hold_again)

    async def mount(self, request: MountRequest, caller: Caller | None = None) -> MountStatus:
        """Pull a package and show it for `caller`, or the agent itself. Raises what pulling and
        showing raise."""
        if caller is not None and request.path:
            caller.require_able(f"show a package at {request.path}")
        package, release = await self._pulled(request.package)
        try:
            return await self._show(package, request, caller)
        finally:
            release()

    async def _pulled(self, reference: str) -> tuple[Package, Callable[[], None]]:
        """A package that is here and kept, and what gives it up. Between the end of a pull and the
        claim others may take its place."""
        for _ in range(ATTEMPTS - 1):
            package = await self._pulls.package(reference)
            with suppress(NotFound, Conflict):
                return package, self._hold(package.manifest)
        package = await self._pulls.package(reference)
        return package, self._hold(package.manifest)

    async def _show(self, package: Package, request: MountRequest, caller: Caller | None) -> MountStatus:
        layers = [self._layer(layer) for layer in package.manifest.layers]

        def hold() -> Callable[[], None]:
            return self._hold(package.manifest)

        about = (str(package.reference), package.digest, layers, package.config)
        show = partial(self._mounts.show, *about, request, hold, caller)
        try:
            return await show()
        except Corrupt:
            if not await asyncio.to_thread(_drop_damaged, layers):
                raise
            return await show()

    def _hold(self, manifest: Manifest) -> Callable[[], None]:
        """Keep all layers of a package; returns what gives them up. Raises NotFound, Conflict."""
        claims = ExitStack()
        try:
            for layer in manifest.layers:
                claims.enter_context(self._held(layer))
        except BaseException:
            claims.close()
            raise
        return claims.close

    def _hold_again(self, digest: Digest) -> Callable[[], None]:
        """Keep what a package is shown from that an earlier agent showed: its programs read on, and
        the kernel looks objects up late."""
        data = self._store.read_small(digest)
        try:
            if data is None:
                raise NotFound(f"the manifest {digest} is not in the store")
            return self._hold(decode_manifest(data))
        except P2PDistError as error:
            _logger.error("a package that is still in use cannot be kept from eviction: %s", error)
            return lambda: None

    def _layer(self, layer: Descriptor) -> Layer:
        if layer.media_type != TREE_TYPE:
            return SquashfsLayer(self._complete(layer).path)
        trees, root = self._store.trees, layer.digest
        variants = partial(trees.keep_variants, root)
        return TreeLayer(lambda: trees.entries(root), trees.image(root), self._store.objects.directory, variants)

    def _held(self, layer: Descriptor) -> AbstractContextManager[object]:
        """Keeps what a layer is shown from."""
        if layer.media_type == TREE_TYPE:
            return self._store.trees.held(layer.digest)
        return self._complete(layer).held()

    def _complete(self, layer: Descriptor) -> Blob:
        blob = self._store.get(layer.digest)
        if blob is None or not blob.complete:
            raise NotFound(f"the layer {layer.digest} was evicted", remedy="Give the store more capacity")
        return blob
