"""Operators' work on the packages of this host: list, pin, remove, collect, verify.

A blob in the store that no package here names is a single blob: it was pulled by its digest, or
belongs to what a tag meant before, or to a package that never came whole. Operators list, pin and
remove it by its digest or as `blob:sha256-<hex>`; collecting removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from p2pdist.agent.caller import Caller
from p2pdist.agent.images.inventory import OWNERS_NAMED, ImageInventory, is_image, require_same, unpinning
from p2pdist.agent.mounts import Mounts
from p2pdist.agent.pull.pulls import Pulls
from p2pdist.model.digest import Digest, is_digest
from p2pdist.model.errors import Conflict, NotFound, P2PDistError, Unavailable
from p2pdist.model.manifest import TREE_TYPE, Descriptor, Manifest, blob_reference, parse_reference
from p2pdist.model.messages import MountStatus, PackageStatus, PinStatus, PullRequest, Removed, Verified
from p2pdist.mount.erofs.patch import is_intact
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore, stored_manifest
from p2pdist.store.verification import Checked

logger = logging.getLogger(__name__)

PIN_PREFIX = "pin:"
"""The owner of an operator's pin is this and the reference."""

BATCH = 256
"""How many files are verified between two reports."""

VERIFICATIONS_MAX = 4
"""Verifications at once. Each has a thread of its own, as it may take days at a low rate; the last
one is for root and the agent's own user."""


class Inventory:
    """Lists what the store holds. Used from the event loop unless a method says that it blocks."""

    def __init__(self, store: BlobStore, pulls: Pulls, images: ImageInventory) -> None:
        self._store, self._pulls, self.images = store, pulls, images

    async def packages(self) -> list[PackageStatus]:
        """The packages that were pulled here, then the images of registries, whose reference begins
        with `docker://`, then the single blobs, whose reference is `blob:sha256-<hex>`; `complete`
        says whether all layers are still in the store."""
        return await asyncio.to_thread(self._packages, self._pulls.parts())

    def _packages(self, arriving: set[Digest]) -> list[PackageStatus]:
        listed: list[PackageStatus] = []
        pinned = {digest for digests in self._store.pins.by_owner().values() for digest in digests}
        for record in self._store.packages.list():
            manifest = self.manifest(record.manifest_digest)
            listed.append(
                PackageStatus(
                    record.reference,
                    record.manifest_digest,
                    sum(blob.size for blob in manifest.blobs) if manifest else 0,
                    manifest is not None and all(map(self.is_here, manifest.layers)),
                    manifest is not None and any(layer.digest in pinned for layer in manifest.layers),
                    record.last_used,
                    manifest is not None and bool(manifest.encrypted),
                )
            )
        for image in self.images.images():
            size, complete = sum(blob.size for blob in image.blobs), self.images.complete(image)
            kept = any(blob.digest in pinned for blob in image.blobs)
            listed.append(PackageStatus(image.reference, image.digest, size, complete, kept, image.last_used))
        for blob in self.single_blobs(arriving):
            listed.append(
                PackageStatus(
                    str(blob_reference(blob.digest)),
                    blob.digest,
                    blob.size,
                    blob.complete,
                    blob.digest in pinned,
                    blob.last_used,
                )
            )
        return listed

    def single_blobs(self, arriving: set[Digest]) -> list[Blob]:
        """The blobs that belong to no package here, to no tree and not to `arriving`, the blobs of
        packages that are being pulled; by digest. Blocks."""
        trees = self._store.trees
        named = arriving | trees.records.needed_by().keys() | trees.pulls.packs() | trees.redundant_packs()
        named |= {tree.root for tree in trees.list()} | self.parts_of_packages()
        named |= {blob.digest for image in self.images.images() for blob in image.blobs}
        return sorted((blob for blob in self._store.blobs() if blob.digest not in named), key=lambda blob: blob.digest)

    def parts_of_packages(self) -> set[Digest]:
        """The blobs of packages that were pulled here. Blocks."""
        manifests = (self.manifest(record.manifest_digest) for record in self._store.packages.list())
        return {blob.digest for manifest in manifests if manifest is not None for blob in manifest.blobs}

    def manifest(self, digest: Digest) -> Manifest | None:
        """The manifest with this digest, None where it is not in the store."""
        return stored_manifest(self._store, digest)

    def is_here(self, layer: Descriptor) -> bool:
        """Whether a layer is complete, so that it can be mounted."""
        if layer.media_type == TREE_TYPE:
            return self._store.trees.complete(layer.digest)
        blob = self._store.get(layer.digest)
        return blob is not None and blob.complete


class Maintenance:
    """Pins and removes packages and single blobs. Used from the event loop."""

    def __init__(self, store: BlobStore, pulls: Pulls, mounts: Mounts, inventory: Inventory) -> None:
        self._store, self._pulls, self._mounts, self._inventory = store, pulls, mounts, inventory

    async def pin(self, reference: str, owner: str = "", caller: Caller | None = None) -> PinStatus:
        """Pull a package for `caller` and pin its layers for `owner`; without an owner, for the
        package's own name. Raises what pulling raises."""
        digest = _blob_named(reference)
        if digest is not None and self._store.packages.get(reference) is None:
            return await self._pin_blob(digest, owner or PIN_PREFIX + str(blob_reference(digest)), caller)
        name = str(parse_reference(reference))
        owner = owner or PIN_PREFIX + name
        package = await self._pulls.package(name, caller)
        pinned = []
        for layer in package.manifest.layers:
            if owner not in self._store.pins.owners(layer.digest):
                pinned.append(layer.digest)
            await asyncio.to_thread(self._store.pins.pin, layer.digest, owner)
        if not all(
            map(self._inventory.is_here, package.manifest.layers)
        ):  # evicted between the pull and the pin; it will not be again
            try:
                await self._pulls.package(name, caller)
            except P2PDistError:
                for digest in pinned:
                    await asyncio.to_thread(self._store.pins.unpin_blob, digest, owner)
                raise
        return PinStatus(owner, tuple(layer.digest for layer in package.manifest.layers))

    async def _pin_blob(self, digest: Digest, owner: str, caller: Caller | None) -> PinStatus:
        pinned = owner in self._store.pins.owners(digest)
        await asyncio.to_thread(self._store.pins.pin, digest, owner)  # it must not be evicted as soon as it has come
        try:
            pull = self._pulls.start(PullRequest(blob=digest), caller)
        except P2PDistError:
            if not pinned:
                await asyncio.to_thread(self._store.pins.unpin_blob, digest, owner)
            raise
        assert pull.task is not None
        await asyncio.wait([pull.task])
        if pull.error is not None:
            if not pinned:
                await asyncio.to_thread(self._store.pins.unpin_blob, digest, owner)
            raise pull.error
        return PinStatus(owner, (digest,))

    async def unpin(self, reference: str = "", owner: str = "") -> PinStatus:
        """Remove a pin that `pin` made. Raises NotFound."""
        digest = _blob_named(reference)
        owner = owner or PIN_PREFIX + str(blob_reference(digest) if digest else parse_reference(reference))
        digests = self._store.pins.by_owner().get(owner)
        if not digests:
            raise NotFound(f"nothing is pinned by {owner}", remedy="p2pdist pin --list says what is")
        await asyncio.to_thread(self._store.pins.unpin, owner)
        return PinStatus(owner, tuple(sorted(digests)))

    def pins(self) -> list[PinStatus]:
        """All pins, by owner."""
        return [
            PinStatus(owner, tuple(sorted(digests))) for owner, digests in sorted(self._store.pins.by_owner().items())
        ]

    # -- removing

    async def remove(self, reference: str, expected: Digest | None = None) -> Removed:
        """Remove a package or an image with what no other one here needs, or a single blob. Raises
        NotFound, Conflict when it is pinned or in use or belongs to a package, or where the
        reference names another package than the `expected` one by now."""
        if is_image(reference):
            return await asyncio.to_thread(self._remove_image, reference, expected)
        digest = _blob_named(reference)
        if digest is not None and self._store.packages.get(reference) is None:
            return await asyncio.to_thread(self._remove_blob, digest, self._pulls.parts())
        name = str(parse_reference(reference))
        self._require_free(name)
        return await asyncio.to_thread(self._remove, name, expected)

    async def evict(self, package: str, digest: str, meaning: str = "") -> int:
        """Remove a package for an operator, under all names that it has here, and return the bytes
        that became free. Without the digest of its manifest the name says which, as it is known
        here and as the tracker knows it (`meaning`). Raises what `remove` raises."""
        if is_image(package):
            return (await self.remove(package, Digest(digest) if digest else None)).bytes_freed
        if _blob_named(package) is not None and self._store.packages.get(package) is None:
            return (await self.remove(package)).bytes_freed
        named = self._store.packages.get(str(parse_reference(package)))
        manifests = {digest} if digest else {named.manifest_digest if named is not None else "", meaning}
        records = [record for record in self._store.packages.list() if record.manifest_digest in manifests]
        if not records:
            raise NotFound(f"{package} is not on this host", remedy="p2pdist ls says what is")
        for record in records:
            self._require_free(record.reference)  # all of it goes, or nothing
        freed = 0
        for record in records:
            if self._store.packages.get(record.reference) is not None:  # the last tag takes names by digest with it
                freed += (await self.remove(record.reference, record.manifest_digest)).bytes_freed
        return freed

    def _remove_image(self, reference: str, expected: Digest | None) -> Removed:
        before = self._store.usage().bytes_total
        removed = self._inventory.images.remove(reference, self._inventory.parts_of_packages(), expected)
        self._store.collect()
        return Removed(removed, max(0, before - self._store.usage().bytes_total))

    def _remove_blob(self, digest: Digest, arriving: set[Digest]) -> Removed:
        records = self._store.packages.list()
        for record in records:
            if record.manifest_digest == digest:
                raise Conflict(f"{digest} is the package {record.reference}", remedy=f"p2pdist rm {record.reference}")
        blob = self._store.get(digest)
        if blob is None:
            raise NotFound(f"the blob {digest} is not on this host", remedy="p2pdist ls says what is")
        if digest not in {single.digest for single in self._inventory.single_blobs(arriving)}:
            manifests = ((record.reference, self._inventory.manifest(record.manifest_digest)) for record in records)
            owners = [name for name, manifest in manifests if manifest and _names(manifest, digest)]
            images = self._inventory.images.images()
            owners += [image.reference for image in images if digest in {blob.digest for blob in image.blobs}]
            whole = f"the package {owners[0]}" if owners else "a package that is being pulled, or a tree that is shown"
            remedy = f"p2pdist rm {owners[0]}" if owners else "Wait for that to end"
            raise Conflict(f"{digest} is a part of {whole}", remedy=remedy)
        if blob.in_use:
            raise Conflict(f"{digest} is in use", remedy="Wait for its pulls and transfers to end")
        if PIN_PREFIX + str(blob_reference(digest)) in self._store.pins.owners(digest):
            raise Conflict(f"{digest} is pinned", remedy=f"p2pdist pin --remove {digest}")
        before = self._store.usage().bytes_total
        self._store.remove(digest)
        return Removed(str(blob_reference(digest)), max(0, before - self._store.usage().bytes_total))

    def _require_free(self, reference: str) -> None:
        """Raises Conflict for a package that is pinned by this name, mounted or being pulled, even
        where another package has all its layers."""
        if self._store.pins.by_owner().get(PIN_PREFIX + reference):
            raise Conflict(
                f"{reference} is pinned by {PIN_PREFIX}{reference}", remedy=f"p2pdist pin --remove {reference}"
            )
        record = self._store.packages.get(reference)
        shown = [mount.path for mount in self._mounts.list() if record and mount.digest == record.manifest_digest]
        if shown:
            raise Conflict(f"{reference} is in use: it is shown at {shown[0]}", remedy=f"p2pdist umount {shown[0]}")
        if any(pull.reference == reference and pull.state in ("waiting", "running") for pull in self._pulls.list()):
            raise Conflict(f"{reference} is in use: it is being pulled", remedy="Wait for that to end")

    def _remove(self, reference: str, expected: Digest | None) -> Removed:
        record = self._store.packages.get(reference)
        if record is None:
            raise NotFound(f"{reference} is not on this host", remedy="p2pdist ls says what is")
        require_same(reference, record.manifest_digest, expected)
        manifest = self._inventory.manifest(record.manifest_digest)
        same = [other for other in self._store.packages.list() if other.manifest_digest == record.manifest_digest]
        before = self._store.usage().bytes_total
        if manifest is not None and all(other.reference == reference or "@" in other.reference for other in same):
            self._remove_blobs(manifest, {other.reference for other in same})
            for other in same:
                self._store.packages.forget(other.reference)
        else:
            self._store.packages.forget(reference)
        self._remove_nameless()
        self._store.collect()
        return Removed(reference, max(0, before - self._store.usage().bytes_total))

    def _remove_blobs(self, manifest: Manifest, names: set[str]) -> None:
        kept: set[Digest] = set()
        for other in self._store.packages.list():
            if other.reference not in names and (named := self._inventory.manifest(other.manifest_digest)):
                kept.update(blob.digest for blob in named.blobs)
        going = [blob for blob in manifest.blobs if blob.digest not in kept]
        trees = self._store.trees.list()
        for blob in going:  # nothing is removed of a package that must stay
            if owners := self._store.pins.owners(blob.digest):
                raise Conflict(
                    f"a package with {blob.digest} is pinned by {', '.join(sorted(owners)[:OWNERS_NAMED])}",
                    remedy=unpinning(owners),
                )
            held = self._store.get(blob.digest)
            if (held is not None and held.in_use) or any(tree.root == blob.digest and tree.in_use for tree in trees):
                raise Conflict(f"{blob.digest} is in use", remedy="Wait for its pulls, unmount what shows it")
        for root in {tree.root for tree in trees} & {blob.digest for blob in going}:
            self._store.trees.remove(root)
        self._remove_nameless()
        for blob in going:
            if self._store.get(blob.digest) is not None and not self._store.trees.records.needing(blob.digest):
                self._store.remove(blob.digest)

    def _remove_nameless(self) -> None:
        """Remove trees that no package here names any more, such as what a tag meant before, except
        trees that are in use or pinned."""
        named: set[Digest] = set()
        for record in self._store.packages.list():
            if manifest := self._inventory.manifest(record.manifest_digest):
                named.update(blob.digest for blob in manifest.blobs)
        trees = self._store.trees
        for tree in trees.list():
            if tree.root in named or tree.in_use or tree.pinned:
                continue
            with contextlib.suppress(Conflict):  # taken into use meanwhile
                trees.remove(tree.root)
                for digest in {tree.root, *tree.catalogs} - named:
                    if self._store.get(digest) is not None and not trees.records.needing(digest):
                        self._store.remove(digest)

    async def collect(self, readable: Callable[[Digest], bool] = lambda digest: True) -> Removed:
        """Remove all that no package names, and of single blobs those that are `readable`, unless
        it is in use or pinned. `readable` is called in a thread."""
        return await asyncio.to_thread(self._collect, self._pulls.parts(), readable)

    def _collect(self, arriving: set[Digest], readable: Callable[[Digest], bool]) -> Removed:
        before = self._store.usage().bytes_total
        self._remove_nameless()
        for blob in self._inventory.single_blobs(arriving):
            if not self._store.pins.owners(blob.digest) and not blob.in_use and readable(blob.digest):
                with contextlib.suppress(Conflict, NotFound):  # taken into use meanwhile, or gone
                    self._store.remove(blob.digest)
        self._store.collect()
        return Removed("", max(0, before - self._store.usage().bytes_total))


class Verification:
    """Reads the store again and repairs what is wrong. Used from the event loop."""

    def __init__(self, store: BlobStore, pulls: Pulls, mounts: Mounts, inventory: Inventory) -> None:
        self._store, self._pulls, self._mounts, self._inventory = store, pulls, mounts, inventory
        self._threads = ThreadPoolExecutor(VERIFICATIONS_MAX, thread_name_prefix="verify")
        self._running = 0

    def require_room(self, *, trusted: bool = True) -> None:
        """Raises Unavailable while as many verifications run as may."""
        if self._running >= (VERIFICATIONS_MAX if trusted else VERIFICATIONS_MAX - 1):
            raise Unavailable(
                f"{self._running} verifications of this store are running", remedy="Wait for one to end, or end one"
            )

    async def verify(self, *, repair: bool, bytes_s: float | None = None) -> AsyncGenerator[Verified]:
        """Read everything that is stored and compare it with its name; yields the result so far now
        and then, and the whole result at the end. The store drops what is wrong; with `repair` the
        packages that lost something are pulled again. Raises Unavailable as `require_room`."""
        self.require_room()
        self._running += 1
        try:
            async with contextlib.aclosing(self._verify(repair=repair, bytes_s=bytes_s)) as results:
                async for result in results:
                    yield result
        finally:
            self._running -= 1

    async def _verify(self, *, repair: bool, bytes_s: float | None) -> AsyncGenerator[Verified]:
        loop, stop = asyncio.get_running_loop(), threading.Event()
        single = {blob.digest for blob in await asyncio.to_thread(self._inventory.single_blobs, self._pulls.parts())}
        batches: asyncio.Queue[list[Checked] | None] = asyncio.Queue(4)

        def put(batch: list[Checked] | None) -> None:
            asyncio.run_coroutine_threadsafe(batches.put(batch), loop).result()

        reading = loop.run_in_executor(self._threads, _read, self._store, bytes_s, stop, put)
        count = size = 0
        wrong: list[str] = []
        try:
            while (batch := await batches.get()) is not None:
                count, size = count + len(batch), size + sum(checked.size for checked in batch)
                wrong += [checked.name for checked in batch if not checked.ok]
                yield Verified(count, size, tuple(wrong))
            await reading
        finally:
            stop.set()
            while not reading.done():  # it may be waiting for room in the queue
                while not batches.empty():
                    batches.get_nowait()
                await asyncio.wait([reading], timeout=0.05)
        wrong += await asyncio.to_thread(self._drop_images)
        mounted = await asyncio.to_thread(self._mounted_from, wrong, self._mounts.list()) if wrong else []
        repaired, failed = await self._repair(sorted(single & set(wrong))) if repair and wrong else ([], [])
        yield Verified(count, size, tuple(wrong), True, tuple(repaired), tuple(failed), tuple(mounted))

    def _drop_images(self) -> list[str]:
        """Remove damaged metadata images, which the next mount of the tree makes again. Returns
        their names."""
        removed = []
        for tree in self._store.trees.list():
            image = self._store.trees.images.path(tree.root)
            if image.exists() and not is_intact(image):
                image.unlink(missing_ok=True)
                removed.append(f"image {tree.root}")
        return removed

    def _mounted_from(self, wrong: Sequence[str], mounts: Sequence[MountStatus]) -> list[str]:
        """The paths of mounted views that read something wrong. A repair makes new files: a mount
        keeps the files that it has opened, and hard links and copies are the old ones. Writing into
        these instead would change them under programs that run."""
        layers = self._layers(wrong)
        pairs = ((mount.path, self._inventory.manifest(Digest(mount.digest))) for mount in mounts)
        return [path for path, manifest in pairs if manifest and any(one.digest in layers for one in manifest.layers)]

    async def repair(self, wrong: Sequence[str]) -> tuple[list[str], list[str]]:
        """Pull again the packages that show something of `wrong`, which the store has dropped, and
        the single blobs among it; pinned packages first. Returns the names of those that are
        complete again, and of the others with the reason."""
        single = {blob.digest for blob in await asyncio.to_thread(self._inventory.single_blobs, self._pulls.parts())}
        hit = await asyncio.to_thread(self._shown_by, wrong)
        mounted = await asyncio.to_thread(self._mounted_from, wrong, self._mounts.list())
        for path in mounted:
            logger.error("%s shows what was damaged: unmount it and mount it again", path)
        return await self._repair(sorted(single & set(wrong)), hit)

    def _shown_by(self, wrong: Sequence[str]) -> set[str]:
        """The packages of which a layer is or has something wrong."""
        layers = self._layers(wrong)
        records = (
            (record.reference, self._inventory.manifest(record.manifest_digest))
            for record in self._store.packages.list()
        )
        return {name for name, manifest in records if manifest and any(one.digest in layers for one in manifest.layers)}

    def _layers(self, wrong: Sequence[str]) -> set[Digest]:
        """The layers that are or have something wrong, such as a catalog of a tree."""
        records = self._store.trees.records
        # Of an image or a variant the last word of the name is its tree.
        blobs = {Digest(name.rpartition(" ")[2]) for name in wrong if ":" in name}
        contents = {bytes.fromhex(name) for name in wrong if ":" not in name}
        return blobs.union(records.with_any(contents), *map(records.needing, blobs))

    async def _repair(self, single: Sequence[Digest], among: set[str] | None = None) -> tuple[list[str], list[str]]:
        """Pull the packages that are incomplete, pinned ones first, or those `among` them, and the
        blobs in `single`. Returns the names of those that are complete again, and of the others
        with the reason."""
        repaired, failed = [], []
        packages = {record.reference for record in self._store.packages.list()}
        rows = sorted(await self._inventory.packages(), key=lambda row: not row.pinned)
        incomplete = [row.reference for row in rows if not row.complete and (among is None or row.reference in among)]
        requests = [PullRequest(package=name) for name in incomplete if name in packages]
        requests += [PullRequest(blob=digest) for digest in single]
        for request in requests:
            name = request.package or request.blob or ""
            pull = self._pulls.start(request)
            assert pull.task is not None
            await asyncio.shield(pull.task)
            if pull.error is None:
                repaired.append(name)
            else:
                failed.append(f"{name}: {pull.error.what}")
        return repaired, failed


def _names(manifest: Manifest, digest: Digest) -> bool:
    return any(blob.digest == digest for blob in manifest.blobs)


def _blob_named(text: str) -> Digest | None:
    """The digest of a single blob: `text` itself, or the digest in its reference."""
    if is_digest(text):
        return Digest(text)
    digest = text.removeprefix("blob:sha256-")
    return Digest(f"sha256:{digest}") if digest != text and is_digest(f"sha256:{digest}") else None


def _read(
    store: BlobStore, bytes_s: float | None, stop: threading.Event, put: Callable[[list[Checked] | None], None]
) -> None:
    """Give `put` the results of verifying in batches, then None; in a thread."""
    batch: list[Checked] = []
    try:
        for checked in store.verify(bytes_s=bytes_s, stop=stop):
            batch.append(checked)
            if stop.is_set():
                break
            if len(batch) == BATCH or not checked.ok or checked.size > 1 << 24:
                put(batch)
                batch = []
    except P2PDistError:
        stop.set()
        raise
    finally:
        put(batch)
        put(None)
