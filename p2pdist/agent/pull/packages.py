"""Finding a package: from a reference to a verified manifest, its config and its piece lists, in
the store, at the tracker, or at the agent's own origin."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from p2pdist.agent.sealed_packages import ask_keys
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, Refused, Unavailable, Unsuitable
from p2pdist.model.image import ImageReference
from p2pdist.model.manifest import (
    BLOB_NAME,
    BLOB_TYPE,
    PIECES_DIGEST,
    PIECES_SIZE,
    Bundle,
    Config,
    Descriptor,
    Manifest,
    Reference,
    blob_reference,
    decode_config,
    decode_manifest,
    decode_named,
)
from p2pdist.model.pieces import PieceList
from p2pdist.model.policy import PackagePolicy
from p2pdist.origin.contract import Origin
from p2pdist.store.store import BlobStore, stored_manifest

WAIT_S = 60.0
"""How long a new pull waits for a tracker before it fails."""

PAUSE_FIRST_S = 0.2
PAUSE_MAX_S = 3.0
"""Between two requests to a tracker that cannot answer now; thousands of agents may be asking."""

STALE_TAG_S = 7 * 86400.0
"""What a tag was last said to name counts for so long while neither a tracker nor the origin
answers."""

STALE_WAIT_S = 5.0
"""How long a pull waits for a tracker where it could go by that: a tracker that starts anew is back
within this time, and may know better."""

POLICY_WAIT_S = 2.0
"""How long a pull waits for the policy of a package that the store has; without an answer the
policy that the agent remembers holds."""

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
Learn = Callable[[str, Digest, Manifest, PackagePolicy], Awaitable[None]]


async def _nothing(reference: str, digest: Digest, manifest: Manifest, policy: PackagePolicy) -> None:
    """Ignore the policy of a package."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package whose documents are all in the store, or a model of a registry."""

    reference: Reference | ImageReference
    digest: Digest
    manifest: Manifest
    config: Config
    as_of: float | None = None
    """When it was last said that the tag names this manifest, in seconds since the epoch, where
    neither a tracker nor the origin says so now; None where one does, or there is no tag."""
    policy: PackagePolicy | None = None
    """What a tracker said of how to move and keep it; None where none did."""


class Packages:
    """Finds packages. Documents come from the store, else from the tracker, else from the agent's
    own origin, if it has one. What a tag names is remembered in the store, and counts for
    `stale_tag_s` while neither answers. `learn` gets the policy of each package that is found:
    reference, digest, manifest and policy; `found` gets all that are found, before. `opened` gives
    the opened manifest of a sealed package that was opened here by this name, and blocks. `wait_s`
    is how long a pull waits for a tracker."""

    def __init__(
        self,
        store: BlobStore,
        session: TrackerSession,
        own_origin: Origin | None,
        *,
        wait_s: float = WAIT_S,
        stale_tag_s: float = STALE_TAG_S,
        learn: Learn = _nothing,
        found: Callable[[str, Digest, Manifest], None] = lambda reference, digest, manifest: None,
        opened: Callable[[Digest, Manifest, str], tuple[Digest, Manifest] | None] = lambda digest, manifest, name: None,
    ) -> None:
        self._store, self._session, self._own_origin = store, session, own_origin
        self._wait_s, self._stale_tag_s, self._learn, self._found = wait_s, stale_tag_s, learn, found
        self._opened = opened

    async def find(self, reference: Reference, note: Callable[[str], None]) -> Package:
        """The package that a reference names. `note` gets what the pull waits for, in words for the
        user. Raises NotFound, Refused, Corrupt, Unavailable."""
        here = await self._last_known(reference)
        if here is not None and reference.digest is not None:
            return await self._learned(here, await self._policy(reference))
        stale = self._stale(here)
        try:
            bundle, policy = await self._bundle(reference, here.digest if here is not None else None, stale, note)
        except (NotFound, Refused):
            await asyncio.to_thread(self._store.tags.forget, str(reference))
            raise
        except Unavailable as error:
            if stale is None:
                raise
            logger.warning("package=%s digest=%s as of %s: %s", reference, stale.digest, _utc(stale.as_of), error.what)
            return await self._learned(stale, None)
        package: Package | None = here
        if here is None or here.digest != bundle.digest:
            package = await asyncio.to_thread(self._keep, reference, bundle)
        if package is None:
            package = await self._one_by_one(reference, bundle.digest, note)
        if reference.name != BLOB_NAME and self._store.tags.due(str(reference), package.digest):
            await asyncio.to_thread(self._store.tags.record, str(reference), package.digest)
        return await self._learned(package, policy)

    def _stale(self, here: Package | None) -> Package | None:
        """A package that the store has the documents of, by what its tag was last said to name;
        None where that was too long ago, or the clock has been set back since."""
        record = self._store.tags.get(str(here.reference)) if here is not None else None
        if here is None or record is None or record.digest != here.digest:
            return None
        return replace(here, as_of=record.told) if 0 <= time.time() - record.told < self._stale_tag_s else None

    async def _learned(self, package: Package, policy: PackagePolicy | None) -> Package:
        """Apply the policy of a package before anything of it is fetched."""
        self._found(str(package.reference), package.digest, package.manifest)
        sealed = package.manifest.is_sealed
        of = (package.digest, package.manifest, str(package.reference.name))
        opened = await asyncio.to_thread(self._opened, *of) if sealed else None
        if policy is not None and opened is None:
            await self._learn(str(package.reference), package.digest, package.manifest, policy)
        package = replace(package, policy=policy)
        if opened is not None:
            await self.learn_opened(package, *opened)
        return package

    async def learn_opened(self, package: Package, digest: Digest, manifest: Manifest) -> None:
        """Apply the policy of a sealed package to what is opened of it: `digest` and `manifest`."""
        self._found(str(package.reference), digest, manifest)
        if package.policy is not None:
            await self._learn(str(package.reference), digest, manifest, package.policy)

    async def keys(self, package: Package, note: Callable[[str], None]) -> Mapping[str, bytes]:
        """The keys of a sealed package, by id. Raises NotFound, Refused, Unavailable."""
        assert isinstance(package.reference, Reference), "an image of a registry is not sealed"
        reference = Reference(package.reference.name, digest=package.digest)
        return await self._ask(lambda: ask_keys(self._session, reference), None, note)

    async def _policy(self, reference: Reference) -> PackagePolicy | None:
        """The policy of a package; None where no tracker answers in time. Raises Refused,
        Corrupt."""
        if not self._session.connected:
            return None
        try:
            async with asyncio.timeout(POLICY_WAIT_S):
                return await self._session.policy(reference)
        except (TimeoutError, NotFound, Unavailable):
            return None

    async def _last_known(self, reference: Reference) -> Package | None:
        """The package as this host last found it, if the store has all its documents. The tag may
        name another manifest since."""
        digest = reference.digest
        if digest is None:
            if (told := self._store.tags.get(str(reference))) is not None:
                digest = told.digest
            elif (used := self._store.packages.get(str(reference))) is not None:
                digest = used.manifest_digest
            else:
                return None
        with suppress(Corrupt):  # the tracker or the origin reports what is wrong with it
            return await asyncio.to_thread(_assembled, reference, digest, self._store.read_document)
        return None

    def _keep(self, reference: Reference, bundle: Bundle) -> Package | None:
        """Verify and store the documents that a tracker sent; the package, if they are complete.
        Raises Corrupt."""
        documents = bundle.verified(self._store.read_document)
        fresh = dict(zip(self._store.put_documents(documents), documents, strict=True))
        return _assembled(
            reference, bundle.digest, lambda digest: fresh.get(digest) or self._store.read_document(digest)
        )

    async def _one_by_one(self, reference: Reference, digest: Digest, note: Callable[[str], None]) -> Package:
        """Fetch each document by itself: those that were too large for a bundle, or all of them
        where only the own origin can answer."""
        manifest = decode_named(await self._small(digest, note, manifest=True), reference)
        if manifest.encrypted and not manifest.is_sealed:
            raise Corrupt(f"{reference} is encrypted in part, as no package is", remedy="Push the package again")
        config = decode_config(await self._small(manifest.config.digest, note))
        for layer in manifest.blobs:
            await self._small(layer.pieces_digest, note)
        return Package(reference, digest, manifest, config)

    async def find_blob(self, digest: Digest, note: Callable[[str], None]) -> Descriptor:
        """The descriptor, with its piece list in the store, of a blob that was pushed alone or is a
        layer of a package seen here."""
        if digest in self._store.opened:
            raise NotFound(f"{digest} comes encrypted, as a part of a package", remedy="Pull the package")
        if self._store.get(digest) is not None:
            stored = await asyncio.to_thread(self._find_here, digest)
            if stored is not None:
                return stored
        try:
            package = await self.find(blob_reference(digest), note)
        except NotFound as missing:
            try:
                layer = await self._session.layer(digest)
            except P2PDistError:
                raise missing from None
            await self._small(layer.pieces_digest, note)
            return layer
        layer = package.manifest.layers[0]
        if layer.digest != digest:
            raise Corrupt(f"{package.reference} holds another blob, {layer.digest}", remedy="Push the blob again")
        return layer

    def _find_here(self, digest: Digest) -> Descriptor | None:
        """The descriptor of a blob that is in the store, from a package that was used here; of one
        that is there in part, and came by itself, from the store while no tracker can be asked."""
        for record in self._store.packages.list():
            manifest = stored_manifest(self._store, record.manifest_digest)
            for layer in manifest.blobs if manifest is not None else ():
                if layer.digest == digest:
                    return layer
        blob = self._store.get(digest)
        if blob is None or blob.vouched is not None or self._session.connected:
            return None
        if self._store.read_document(blob.pieces_digest) is None:
            return None
        pieces = {PIECES_DIGEST: str(blob.pieces_digest), PIECES_SIZE: str(blob.layout.piece_size)}
        return Descriptor(BLOB_TYPE, digest, blob.size, pieces)

    def lost(self, package: Package) -> bool:
        """Whether the store lacks a piece list of a package that was found, or of what was opened
        of it: a piece list goes when its blob is evicted. Raises Corrupt."""
        manifest = stored_manifest(self._store, package.digest) or package.manifest
        return any(self._store.read_document(blob.pieces_digest) is None for blob in manifest.blobs)

    def pieces(self, layer: Descriptor) -> PieceList:
        """The piece list of a layer whose package was found. Raises Corrupt."""
        data = self._store.read_document(layer.pieces_digest)
        if data is None:
            raise Corrupt(f"the piece list of {layer.digest} is gone from the store", remedy="Pull again")
        pieces = PieceList.decode(data)
        if pieces.layout != layer.layout:
            raise Corrupt(f"the piece list of {layer.digest} is for a blob of another size")
        return pieces

    async def _bundle(
        self, reference: Reference, known: Digest | None, stale: Package | None, note: Callable[[str], None]
    ) -> tuple[Bundle, PackagePolicy | None]:
        own = self._own_origin

        async def from_origin(origin: Origin) -> tuple[Bundle, PackagePolicy | None]:
            return Bundle(reference.digest or (await origin.resolve(reference)).digest), None

        async def from_tracker() -> tuple[Bundle, PackagePolicy | None]:
            return await self._session.bundle(reference, known)

        alone_s = self._wait_s if stale is None else min(self._wait_s, STALE_WAIT_S)
        return await self._ask(from_tracker, (lambda: from_origin(own)) if own else None, note, alone_s)

    async def _small(self, digest: Digest, note: Callable[[str], None], *, manifest: bool = False) -> bytes:
        data = await asyncio.to_thread(self._store.read_document, digest)
        if data is not None:
            return data
        own = self._own_origin
        data = await self._ask(
            lambda: self._session.content(digest, manifest=manifest), (lambda: own.read(digest)) if own else None, note
        )
        await asyncio.to_thread(self._store.put_document, data)
        return data

    async def _ask(
        self,
        tracker: Callable[[], Awaitable[Value]],
        origin: Callable[[], Awaitable[Value]] | None,
        note: Callable[[str], None],
        alone_s: float | None = None,
    ) -> Value:
        """Ask the tracker; where none answers, ask the own origin; without an origin, wait for a
        tracker up to the limit, or for `alone_s` while none is connected."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        pause = PAUSE_FIRST_S
        while True:
            waiting, failure = self.no_tracker()
            if self._session.connected:
                try:
                    return await tracker()
                except Unavailable as error:
                    if isinstance(error, Unsuitable) and origin is None:
                        raise
                    waiting, failure = f"{error.what}; trying again", error
            if origin is not None:
                return await origin()
            limit_s = self._wait_s if self._session.connected or alone_s is None else alone_s
            if loop.time() - began >= limit_s or not (self._session.urls or self._session.searching):
                raise failure
            note(waiting)
            await asyncio.sleep(pause)
            pause = min(PAUSE_MAX_S, pause * 1.5)
            await self._session.wait_connected(1.0)

    async def wait_tracker(self, note: Callable[[str], None]) -> bool:
        """Wait until a tracker answers, for as long as a pull may; `note` gets what is waited for.
        Returns whether one does."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_s
        while not self._session.connected:
            if loop.time() >= deadline or not (self._session.urls or self._session.searching):
                return False
            note(self.no_tracker()[0])
            await self._session.wait_connected(min(1.0, max(0.0, deadline - loop.time())))
        return True

    def no_tracker(self) -> tuple[str, Unavailable]:
        """What a pull waits for while no tracker answers, and its failure when none did in time."""
        if not self._session.urls and self._session.searching:
            return "looking for a tracker on this network", Unavailable(
                f"no tracker was found on this network within {self._wait_s:.0f} s",
                remedy="Start one with the same --network-id, or give --tracker or --origin",
            )
        if not self._session.urls:
            return "", Unavailable("this agent knows no tracker", remedy="Give it --tracker")
        why = f": {self._session.problem}" if self._session.problem else ""
        trackers = ", ".join(self._session.urls) + why
        return f"waiting for a tracker ({trackers})", Unavailable(
            f"no tracker answered for {self._wait_s:.0f} s ({trackers})",
            remedy="Start the tracker or correct --tracker; what runs already goes on without it",
        )


def _utc(told: float | None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(told))


def _assembled(reference: Reference, digest: Digest, read: Callable[[Digest], bytes | None]) -> Package | None:
    """A package whose documents `read` finds, None where one is missing. Raises Corrupt."""
    data = read(digest)
    if data is None:
        return None
    manifest = decode_manifest(data)
    if manifest.encrypted and not manifest.is_sealed:
        return None  # it is this host's own, of what it opened
    config = read(manifest.config.digest)
    if config is None or any(read(blob.pieces_digest) is None for blob in manifest.blobs):
        return None
    return Package(reference, digest, manifest, decode_config(config))
