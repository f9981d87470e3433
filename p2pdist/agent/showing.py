"""Showing packages: from a reference to a directory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from p2pdist.agent.mounts import Mounts
from p2pdist.agent.pulls import Pulls
from p2pdist.model.errors import NotFound
from p2pdist.model.messages import MountRequest, MountStatus
from p2pdist.model.package import TREE_TYPE, Descriptor
from p2pdist.mount.layers import Layer, SquashfsLayer, TreeLayer
from p2pdist.store.blob import Blob
from p2pdist.store.blobs import BlobStore


class Showing:
    """Joins pulls, store and mounts."""

    def __init__(self, store: BlobStore, pulls: Pulls, mounts: Mounts) -> None:
        self._store, self._pulls, self._mounts = store, pulls, mounts

    async def mount(self, request: MountRequest) -> MountStatus:
        """Pull a package and show it. Raises what pulling and showing raise."""
        package = await self._pulls.package(request.package)
        layers = [self._layer(layer) for layer in package.manifest.layers]

        def hold() -> Callable[[], None]:
            claims = ExitStack()
            try:
                for layer in package.manifest.layers:
                    claims.enter_context(self._held(layer))
            except BaseException:
                claims.close()
                raise
            return claims.close

        return await self._mounts.show(str(package.reference), package.digest, layers, package.config, request, hold)

    def _layer(self, layer: Descriptor) -> Layer:
        if layer.media_type != TREE_TYPE:
            return SquashfsLayer(self._complete(layer).path)
        trees = self._store.trees
        return TreeLayer(lambda: trees.entries(layer.digest), trees.image(layer.digest), self._store.objects.directory)

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
