"""Retention: packages stay in the store as their policies say, pinned, for a time, or not at all
(p2pdist/core/eviction.py).

A package that is pinned by its policy has an owner of its own, `policy:<reference>`, before any of
it is fetched.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from p2pdist.agent.tracker.policies import Policies
from p2pdist.agent.upkeep.maintenance import Maintenance
from p2pdist.core.eviction import StoredPackage, due, goes_first, lasts_s
from p2pdist.model.candidate import Candidate, Chooser, Share
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, NotFound, P2PDistError
from p2pdist.model.manifest import PACK_TYPE, SEALED_TYPE, Manifest
from p2pdist.model.policy import NO_POLICY, PackagePolicy
from p2pdist.store.store import BlobStore, stored_manifest

OWNER = "policy:"
SWEEP_S = 1.0
RETRY_S = 30.0
"""After a package that could not be removed."""

_NOT_PINNED = (PACK_TYPE, SEALED_TYPE)

logger = logging.getLogger(__name__)


class EvictionOrder:
    """Has the store evict first what policies do not keep. `choose` may be called from any
    thread."""

    def __init__(self, choose: Chooser) -> None:
        self._choose = choose
        self.first: frozenset[Digest] = frozenset()
        """Blobs to evict before all others; set by Retention."""

    def choose(self, candidates: Sequence[Candidate], needed: int, shares: Sequence[Share] = ()) -> list[Digest] | None:
        """The blobs to evict for `needed` bytes (see Chooser)."""
        first = self.first
        marked = [replace(blob, first=True) if blob.digest in first else blob for blob in candidates]
        return self._choose(marked, needed, shares)


class PolicyPins:
    """Pins packages whose policy says `pin`, each for its own owner."""

    def __init__(self, store: BlobStore, policies: Policies) -> None:
        self._store, self._policies = store, policies

    async def learned(self, reference: str, digest: Digest, manifest: Manifest, policy: PackagePolicy) -> None:
        """Remember the policy that a tracker stated for a package, and pin or unpin the package."""
        before = await self._policies.learn(reference, digest, manifest, policy)
        if "pin" in (before.cache, policy.cache):
            await asyncio.to_thread(self._pin, OWNER + reference, manifest if policy.cache == "pin" else None)

    def _pin(self, owner: str, manifest: Manifest | None) -> None:
        """Pin exactly this package for `owner`, or nothing. Packs are not pinned: they serve to
        make the contents of a tree, which its root pins. Nor are encrypted blobs: what is opened
        is."""
        blobs = {blob.digest for blob in manifest.blobs if blob.media_type not in _NOT_PINNED} if manifest else set()
        pinned = self._store.pins.by_owner().get(owner, set())
        if pinned - blobs:
            self._store.pins.unpin(owner)
            pinned = set()
        for digest in blobs - pinned:
            self._store.pins.pin(digest, owner)


class Retention:
    """Removes packages that their policies keep no longer. On the event loop."""

    def __init__(self, store: BlobStore, policies: Policies, maintenance: Maintenance, order: EvictionOrder) -> None:
        self._store, self._policies, self._maintenance, self._order = store, policies, maintenance, order
        self._retry_at: dict[str, float] = {}
        """When to try again to remove a package, by the monotonic clock, by reference."""
        self._manifests: dict[Digest, tuple[Digest, ...]] = {}
        """The blobs of each manifest that a package in the store has."""
        self._ahead: dict[str, float] = {}
        """Since when packages are known that were used later than now, before the clock was set
        back, by the monotonic clock, by reference."""

    async def run(self) -> None:
        """Remove packages whose time is up, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self._sweep()
            except P2PDistError as error:
                logger.warning("what policies do not keep stays for now: %s", error)
            except Exception:
                logger.exception("what policies do not keep stays for now")

    async def _sweep(self) -> None:
        policies = self._policies.packages
        if not any(lasts_s(policy) < inf for policy, _ in policies.values()):
            self._order.first = frozenset()
            return
        stored = await asyncio.to_thread(self._stored, policies)
        self._order.first = goes_first(stored)
        for reference in due(stored, now=time.time()):
            if self._retry_at.get(reference, 0.0) <= time.monotonic():
                await self._remove(reference)

    async def _remove(self, reference: str) -> None:
        try:
            if self._store.packages.get(reference) is not None:
                freed = (await self._maintenance.remove(reference)).bytes_freed
            else:  # a blob that was pulled alone leaves no package
                freed = await asyncio.to_thread(self._remove_alone, self._policies.blobs(reference))
        except (Conflict, NotFound) as error:  # or another request removes it at this moment
            self._retry_at[reference] = time.monotonic() + RETRY_S
            logger.debug("%s stays for now: %s", reference, error)
            return
        self._retry_at.pop(reference, None)
        logger.info("%s is kept no longer, as its policy says: %d bytes are free", reference, freed)
        await self._policies.forget(reference)

    def _remove_alone(self, blobs: Sequence[Digest]) -> int:
        """Remove blobs that no package here needs; returns bytes."""
        needed = {blob for record in self._store.packages.list() for blob in self._blobs_of(record.manifest_digest)}
        freed = 0
        for digest in set(blobs) - needed:
            blob = self._store.get(digest)
            if blob is not None:
                self._store.remove(digest)
                freed += blob.size
        return freed

    def _blobs_of(self, manifest: Digest) -> tuple[Digest, ...]:
        if manifest not in self._manifests:
            stored = stored_manifest(self._store, manifest)
            self._manifests[manifest] = tuple(blob.digest for blob in stored.blobs) if stored is not None else ()
        return self._manifests[manifest]

    def _stored(self, policies: Mapping[str, tuple[PackagePolicy, tuple[Digest, ...]]]) -> list[StoredPackage]:
        """The packages in the store, and when each was used last; a package without a policy
        stays."""
        records = {record.reference: record for record in self._store.packages.list()}
        here = {record.manifest_digest for record in records.values()}
        self._manifests = {manifest: blobs for manifest, blobs in self._manifests.items() if manifest in here}
        trees = {tree.root: tree for tree in self._store.trees.list()}
        stored = [
            StoredPackage(record.reference, NO_POLICY, self._blobs_of(record.manifest_digest), None)
            for record in records.values()
            if record.reference not in policies
        ]
        for reference, (policy, blobs) in policies.items():
            record = records.get(reference)
            used = [record.last_used] if record is not None else []
            busy = False
            for digest in blobs:
                blob, tree = self._store.get(digest), trees.get(digest)
                busy = busy or bool(blob and blob.in_use) or bool(tree and tree.in_use)
                busy = busy or bool(self._store.pins.owners(digest))
                used += [content.last_used for content in (blob, tree) if content is not None]
            if used:
                last_used = self._last_used(reference, used)
                stored.append(StoredPackage(reference, policy, blobs, None if busy else last_used))
        self._ahead = {reference: since for reference, since in self._ahead.items() if reference in policies}
        return stored

    def _last_used(self, reference: str, used: Sequence[float]) -> float:
        """The last one of the times at which parts of a package were used. One that is yet to come
        counts as that at which it was noticed: the clock may be wrong for a while, as at the start
        of a machine, and nothing that was just used may go for it."""
        now, count = time.time(), time.monotonic()
        past = [at for at in used if at <= now]
        if len(past) == len(used):
            self._ahead.pop(reference, None)
        else:
            past.append(now - (count - self._ahead.setdefault(reference, count)))
        return max(past)
