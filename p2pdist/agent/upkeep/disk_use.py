"""What packages take on the disk of this host, and what nothing keeps.

Packages share blobs and, where they are trees, the contents of files. The bytes of a store are
parts (blobs, trees, and what several trees have in common), each of which some packages need; what
only one package needs becomes free when that package goes.

A package is kept by a tag, a pin, a preseed or a policy (both pin it), a view that shows it, or a
pull of it. What none of these keeps was asked for by digest, or is what a tag meant before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from p2pdist.agent.mounts import Mounts
from p2pdist.agent.pull.pulls import Pulls
from p2pdist.agent.upkeep.maintenance import PIN_PREFIX, Inventory, Maintenance
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, NotFound
from p2pdist.model.manifest import blob_reference
from p2pdist.model.messages import PackageUse, Pruned, PruneRequest, StoreUse
from p2pdist.store.store import BlobStore

Readable = Callable[[str, Digest], bool]
"""Whether the process that asks may know of the package with this reference and digest."""


@dataclass(slots=True)
class _Package:
    """A package, image or single blob here."""

    digest: Digest
    references: list[str]
    """The tags first."""
    blobs: frozenset[Digest]
    last_used: float
    """In seconds since the epoch."""
    pulled: bool = False
    """Whether some of it is being pulled."""


class DiskUse:
    """Says what packages take on the disk, and removes those that nothing keeps. On the event loop;
    what looks at the store does so in a thread."""

    def __init__(
        self, store: BlobStore, pulls: Pulls, mounts: Mounts, inventory: Inventory, maintenance: Maintenance
    ) -> None:
        self._store, self._pulls, self._mounts = store, pulls, mounts
        self._inventory, self._maintenance = inventory, maintenance

    async def use(self, readable: Readable) -> StoreUse:
        """What is on the disk, by package."""
        mounted = self._mounted()
        return await asyncio.to_thread(self._use, self._pulls.parts(), mounted, readable)

    async def prune(self, request: PruneRequest, readable: Readable) -> Pruned:
        """Remove the packages and blobs that nothing keeps and that were not used for a time, or
        with `dry_run` only say which. With `tagged`, a tag alone keeps nothing."""
        before = time.time() - request.unused_s
        listed = (await self.use(readable)).packages
        going = [
            package
            for package in listed
            if package.last_used <= before and (not package.kept_by or (request.tagged and package.kept_by == ("tag",)))
        ]
        if only := frozenset(request.only):
            going = [package for package in going if package.digest in only]
        if request.dry_run:
            return Pruned(True, tuple(going), (), sum(package.bytes_alone for package in going))
        bytes_before = await asyncio.to_thread(self._store.usage)
        gone: list[PackageUse] = []
        stayed: list[str] = []
        for package in going:
            try:
                for reference in package.references:
                    with contextlib.suppress(NotFound):  # another name of it took it along
                        await self._maintenance.remove(reference, package.digest)
            except Conflict as error:  # taken into use meanwhile, or its tag moved to another package
                stayed.append(f"{package.references[0]}: {error.what}")
                continue
            gone.append(package)
        bytes_after = await asyncio.to_thread(self._store.usage)
        freed = max(0, bytes_before.bytes_total - bytes_after.bytes_total)
        return Pruned(False, tuple(gone), tuple(stayed), freed)

    def _mounted(self) -> dict[str, list[str]]:
        """The paths that show a package, by its digest."""
        mounted: dict[str, list[str]] = {}
        for view in self._mounts.list():
            mounted.setdefault(view.digest, []).append(view.path)
        return mounted

    def _use(self, arriving: set[Digest], mounted: dict[str, list[str]], readable: Readable) -> StoreUse:
        packages = self._packages(arriving)
        here, alone = {each.digest: 0 for each in packages}, {each.digest: 0 for each in packages}
        owners: dict[Digest, list[Digest]] = {}
        for each in packages:
            for blob in each.blobs:
                owners.setdefault(blob, []).append(each.digest)
        shared = nameless = 0
        for digests, size in self._parts():
            needing = {package for digest in digests for package in owners.get(digest, ())}
            for package in needing:
                here[package] += size
            if len(needing) == 1:
                alone[needing.pop()] += size
            elif needing:
                shared += size
            else:
                nameless += size
        rows = tuple(
            PackageUse(
                references,
                each.digest,
                here[each.digest],
                alone[each.digest],
                each.last_used,
                self._kept_by(each, mounted.get(each.digest, []), readable),
            )
            for each in packages
            if (references := tuple(name for name in each.references if readable(name, each.digest)))
        )
        usage = self._store.usage()
        documents = usage.bytes_small
        return StoreUse(rows, shared, nameless, documents, usage.bytes_total, usage.capacity, usage.disk_free)

    def _parts(self) -> list[tuple[frozenset[Digest], int]]:
        """Everything in the store that has a size: the blobs and trees that need it, and bytes."""
        candidates, shares = self._store.candidates()
        parts = [(frozenset((candidate.digest,)), candidate.size) for candidate in candidates]
        listed = {candidate.digest for candidate in candidates}
        # Partial blobs that are being written are no candidates.
        parts += [(frozenset((b.digest,)), b.size) for b in self._store.blobs() if b.digest not in listed]
        return parts + [(share.owners, share.size) for share in shares]

    def _packages(self, arriving: set[Digest]) -> list[_Package]:
        """All packages, images and single blobs, by their first name."""
        packages: dict[Digest, _Package] = {}

        def add(reference: str, digest: Digest, blobs: frozenset[Digest], last_used: float) -> None:
            package = packages.setdefault(digest, _Package(digest, [], blobs, last_used))
            package.references.append(reference)
            package.last_used = max(package.last_used, last_used)
            package.pulled = package.pulled or not arriving.isdisjoint(blobs)

        for record in self._store.packages.list():
            manifest = self._inventory.manifest(record.manifest_digest)
            blobs = frozenset(blob.digest for blob in manifest.blobs) if manifest is not None else frozenset()
            add(record.reference, record.manifest_digest, blobs, record.last_used)
        for image in self._inventory.images.images():
            add(image.reference, image.digest, frozenset(blob.digest for blob in image.blobs), image.last_used)
        for blob in self._inventory.single_blobs(arriving):
            add(str(blob_reference(blob.digest)), blob.digest, frozenset((blob.digest,)), blob.last_used)
        for package in packages.values():
            package.references.sort(key=lambda name: ("@" in name, name))
        return sorted(packages.values(), key=lambda package: package.references[0])

    def _kept_by(self, package: _Package, paths: list[str], readable: Readable) -> tuple[str, ...]:
        kept = []
        blob = str(blob_reference(package.digest))
        if any("@" not in reference and reference != blob for reference in package.references):
            kept.append("tag")
        owners = {owner for digest in package.blobs for owner in self._store.pins.owners(digest)}
        kept += sorted({_owner_shown(owner, package.digest, readable) for owner in owners})
        kept += [f"mount {path}" for path in paths]
        if package.pulled:
            kept.append("pull")
        elif not paths and self._in_use(package):
            kept.append("transfer")
        return tuple(kept)

    def _in_use(self, package: _Package) -> bool:
        blobs = (self._store.get(digest) for digest in package.blobs)
        return any(blob is not None and blob.in_use for blob in blobs)


def _owner_shown(owner: str, digest: Digest, readable: Readable) -> str:
    """The owner of a pin, without the name of a package that shares a blob with this one and of
    which the process that asks may not know."""
    name = owner.removeprefix(PIN_PREFIX)
    return owner if name == owner or readable(name, digest) else PIN_PREFIX.rstrip(":")
