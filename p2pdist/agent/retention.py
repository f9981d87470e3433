"""Keeps packages in the store as their policies say: pinned, for a time, or not at all
(p2pdist/core/eviction.py).

A package that is pinned by its policy is so for an owner of its own, `policy:<reference>`, before
any of it is fetched.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from p2pdist.agent.maintenance import Housekeeping
from p2pdist.agent.tracker.policies import Policies
from p2pdist.core.eviction import StoredPackage, due, goes_first, lasts_s
from p2pdist.model.candidate import Candidate, Chooser, Share
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, NotFound, P2PDistError
from p2pdist.model.manifest import PACK_TYPE, Manifest, decode_manifest
from p2pdist.model.policy import NO_POLICY, PackagePolicy
from p2pdist.store.store import BlobStore

OWNER = "policy:"
SWEEP_S = 1.0
RETRY_S = 30.0
"""After a package that could not be removed."""

_logger = logging.getLogger(__name__)


class CacheOrder:
    """What is evicted first. Called from any thread."""

    def __init__(self, choose: Chooser) -> None:
        self._choose = choose
        self.first: frozenset[Digest] = frozenset()

    def choose(self, candidates: Sequence[Candidate], needed: int, shares: Sequence[Share] = ()) -> list[Digest] | None:
        """See Chooser."""
        first = self.first
        marked = [replace(each, first=True) if each.digest in first else each for each in candidates]
        return self._choose(marked, needed, shares)


class Caching:
    """See the module's text. On the event loop."""

    def __init__(self, store: BlobStore, policies: Policies, housekeeping: Housekeeping, order: CacheOrder) -> None:
        self._store, self._policies, self._housekeeping, self._order = store, policies, housekeeping, order
        self._retry_at: dict[str, float] = {}
        self._manifests: dict[Digest, tuple[Digest, ...]] = {}

    async def learned(self, reference: str, digest: Digest, manifest: Manifest, policy: PackagePolicy) -> None:
        """A tracker says this of a package that is about to be used."""
        before = await self._policies.learn(reference, digest, manifest, policy)
        if "pin" in (before.cache, policy.cache):
            await asyncio.to_thread(self._pin, OWNER + reference, manifest if policy.cache == "pin" else None)

    def _pin(self, owner: str, manifest: Manifest | None) -> None:
        """Have exactly this package pinned for its owner. Packs are means to make a tree's
        contents, which its root pins."""
        wanted = {blob.digest for blob in manifest.blobs if blob.media_type != PACK_TYPE} if manifest else set()
        pinned = self._store.pins().get(owner, set())
        if pinned - wanted:
            self._store.unpin(owner)
            pinned = set()
        for digest in wanted - pinned:
            self._store.pin(digest, owner)

    async def run(self) -> None:
        """Let go what is to go, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self._sweep()
            except P2PDistError as error:
                _logger.warning("what policies do not keep stays for now: %s", error)
            except Exception:
                _logger.exception("what policies do not keep stays for now")

    async def _sweep(self) -> None:
        heard = self._policies.packages
        if not any(lasts_s(policy) < inf for policy, _ in heard.values()):
            self._order.first = frozenset()
            return
        stored = await asyncio.to_thread(self._stored, heard)
        self._order.first = goes_first(stored)
        now = time.time()
        for reference in due(stored, now=now):
            if self._retry_at.get(reference, 0.0) <= now:
                await self._let_go(reference)

    async def _let_go(self, reference: str) -> None:
        try:
            if self._store.package(reference) is not None:
                freed = (await self._housekeeping.remove(reference)).bytes_freed
            else:  # a blob that was pulled alone leaves no package
                freed = await asyncio.to_thread(self._remove_alone, self._policies.blobs(reference))
        except (Conflict, NotFound) as error:  # or somebody else removes it at this moment
            self._retry_at[reference] = time.time() + RETRY_S
            _logger.debug("%s stays for now: %s", reference, error)
            return
        self._retry_at.pop(reference, None)
        _logger.info("%s is kept no longer, as its policy says: %d bytes are free", reference, freed)
        await self._policies.forget(reference)

    def _remove_alone(self, blobs: Sequence[Digest]) -> int:
        """Remove blobs that no package here needs; returns bytes."""
        needed = {blob for record in self._store.packages() for blob in self._blobs_of(record.manifest_digest)}
        freed = 0
        for digest in set(blobs) - needed:
            blob = self._store.get(digest)
            if blob is not None:
                self._store.remove(digest)
                freed += blob.size
        return freed

    def _blobs_of(self, manifest: Digest) -> tuple[Digest, ...]:
        if manifest not in self._manifests:
            data = self._store.read_small(manifest)
            self._manifests[manifest] = tuple(blob.digest for blob in decode_manifest(data).blobs) if data else ()
        return self._manifests[manifest]

    def _stored(self, heard: Mapping[str, tuple[PackagePolicy, tuple[Digest, ...]]]) -> list[StoredPackage]:
        """The packages that are here, and when each was used last; those of which nothing was heard
        stay."""
        records = {record.reference: record for record in self._store.packages()}
        here = {record.manifest_digest for record in records.values()}
        self._manifests = {manifest: blobs for manifest, blobs in self._manifests.items() if manifest in here}
        trees = {tree.root: tree for tree in self._store.trees.list()}
        found = [
            StoredPackage(record.reference, NO_POLICY, self._blobs_of(record.manifest_digest), None)
            for record in records.values()
            if record.reference not in heard
        ]
        for reference, (policy, blobs) in heard.items():
            record = records.get(reference)
            used = [record.last_used] if record is not None else []
            busy = False
            for digest in blobs:
                blob, tree = self._store.get(digest), trees.get(digest)
                busy = busy or bool(blob and blob.in_use) or bool(tree and tree.in_use)
                busy = busy or bool(self._store.owners(digest))
                used += [each.last_used for each in (blob, tree) if each is not None]
            if used:
                found.append(StoredPackage(reference, policy, blobs, None if busy else max(used)))
        return found
