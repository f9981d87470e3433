"""The policies of packages that trackers stated, as far as they concern this host: rates, transport
and priority of their blobs.

An agent learns a policy whenever it looks up a package, and remembers it in `policies.json` in the
store's directory, so that after a restart, or without a tracker, it follows the last policies that
it learnt. A blob of several packages follows the policy that was learnt last. All packages of one
policy together share its rates; the limits of the agent itself hold besides.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from p2pdist.core.downlink import BURST_S, Downlink, Lane
from p2pdist.core.fair_queue import TokenBucket
from p2pdist.model.digest import Digest, WireDigest
from p2pdist.model.errors import UNDECODABLE, Corrupt, Refused
from p2pdist.model.image import is_image
from p2pdist.model.image_manifest import ImageManifest, decode_image
from p2pdist.model.manifest import Manifest, decode_manifest
from p2pdist.model.messages import Priority
from p2pdist.model.policy import NO_POLICY, PackagePolicy, Transport
from p2pdist.store.store import BlobStore
from p2pdist.transfer.pacer import Pacer

PACKAGES_MAX = 10_000
SELECTIONS_MAX = 10_000
FILE_BYTES_MAX = 16 << 20

logger = logging.getLogger(__name__)


class Remembered(msgspec.Struct, frozen=True):
    """The policy of a package, and the digest of the manifest that the package had then."""

    policy: PackagePolicy
    manifest: WireDigest


_decoder = msgspec.json.Decoder(dict[str, Remembered])


class Policies:
    """The policies of packages and their blobs. `limit` gets each blob whose policy changes, and
    the bucket that it shares with other blobs. On the event loop."""

    def __init__(
        self, store: BlobStore, downlink: Downlink, pacer: Pacer, limit: Callable[[Digest, TokenBucket | None], None]
    ) -> None:
        self._store, self._downlink, self._pacer, self._limit = store, downlink, pacer, limit
        self._file = store.root / "policies.json"
        self._writing = asyncio.Lock()
        self._uploads: dict[str, TokenBucket] = {}
        """What all blobs of a policy share of the uplink, by the policy's pattern."""
        self._lanes: dict[str, tuple[TokenBucket, Pacer]] = {}
        """What all blobs of a policy share of the downlink, by the policy's pattern."""
        self._by_blob: dict[Digest, PackagePolicy] = {}
        self._selections: dict[Digest, Digest] = {}
        """The whole blob of each selection."""
        self._packages = _read(self._file)
        """By reference, in the order in which the policies were learnt."""
        self._blobs = {name: self._blobs_of(name, entry.manifest) for name, entry in self._packages.items()}
        """The blobs of each package, by reference."""
        for reference, entry in self._packages.items():
            self._apply(entry.policy, self._blobs[reference])

    # -- packages

    @property
    def packages(self) -> dict[str, tuple[PackagePolicy, tuple[Digest, ...]]]:
        """The policies and the blobs of packages, by reference."""
        return {reference: (entry.policy, self._blobs[reference]) for reference, entry in self._packages.items()}

    def blobs(self, reference: str) -> tuple[Digest, ...]:
        """The blobs of a package whose policy is remembered."""
        return self._blobs.get(reference, ())

    def lazy(self, reference: str) -> bool | None:
        """Whether a package is shown before its contents are here; None where users say."""
        entry = self._packages.get(reference)
        return entry.policy.lazy if entry is not None else None

    async def learn(self, reference: str, digest: Digest, manifest: Manifest, policy: PackagePolicy) -> PackagePolicy:
        """Remember and apply the policy of a package; returns the policy that it had before."""
        before = self._packages.get(reference)
        now = Remembered(policy, digest)
        previous = before.policy if before is not None else NO_POLICY
        if policy == NO_POLICY:
            await self.forget(reference)
        if policy == NO_POLICY or now == before:
            return previous
        self._packages.pop(reference, None)
        self._packages[reference] = now
        blobs = self._blobs[reference] = tuple(blob.digest for blob in manifest.blobs)
        if len(self._packages) > PACKAGES_MAX:
            self._forget(next(iter(self._packages)))
        self._apply(policy, blobs)
        await self._write()
        return previous

    async def forget(self, reference: str) -> None:
        """Forget the policy of a package that was removed."""
        if reference in self._packages:
            self._forget(reference)
            await self._write()

    def _forget(self, reference: str) -> None:
        del self._packages[reference]
        blobs = self._blobs.pop(reference)
        self._apply(NO_POLICY, blobs)
        for other, others in self._blobs.items():
            self._apply(self._packages[other].policy, set(blobs).intersection(others))

    def _apply(self, policy: PackagePolicy, blobs: Iterable[Digest]) -> None:
        """Apply a policy to blobs."""
        if policy.upload_bytes_s is not None:
            self._uploads.setdefault(policy.match, TokenBucket(None)).limit_bytes_s = policy.upload_bytes_s
        if policy.download_bytes_s is not None:
            self._lane(policy.match)[0].limit_bytes_s = policy.download_bytes_s
        for blob in blobs:
            if policy == NO_POLICY:
                self._by_blob.pop(blob, None)
            else:
                self._by_blob[blob] = policy
            self._limit(blob, self.upload_limit(blob))

    def _lane(self, match: str) -> tuple[TokenBucket, Pacer]:
        lane = self._lanes.get(match)
        if lane is None:
            bucket = TokenBucket(None, BURST_S)
            lane = self._lanes[match] = bucket, self._pacer.beside(Lane(self._downlink, bucket))
        return lane

    # -- blobs

    def of(self, blob: Digest) -> PackagePolicy:
        """The policy of a blob."""
        return self._by_blob.get(self._selections.get(blob, blob), NO_POLICY)

    def selected(self, selection: Digest, blob: Digest) -> None:
        """Apply the policy of `blob` to a selection of its pieces (p2pdist/model/selection.py)."""
        self._selections[selection] = blob
        if len(self._selections) > SELECTIONS_MAX:
            del self._selections[next(iter(self._selections))]

    def transport(self, blob: Digest) -> Transport | None:
        """The transport by which a blob is to come; None where its policy leaves that open."""
        return self.of(blob).transport

    def priority(self, blob: Digest, asked: Priority) -> Priority:
        """The priority of a pull of a blob that was requested with `asked`."""
        return self.of(blob).priority or asked

    def upload_limit(self, blob: Digest) -> TokenBucket | None:
        """The share of the uplink of all blobs with the policy of `blob`; None for no limit."""
        policy = self.of(blob)
        return self._uploads[policy.match] if policy.upload_bytes_s is not None else None

    def pacer(self, blob: Digest) -> Pacer:
        """The pacer for what arrives of a blob."""
        policy = self.of(blob)
        return self._lanes[policy.match][1] if policy.download_bytes_s is not None else self._pacer

    # -- the file

    def _blobs_of(self, reference: str, digest: Digest) -> tuple[Digest, ...]:
        data = self._store.read_document(digest)
        if data is None:
            return ()
        try:
            if is_image(reference):
                image = decode_image(data)
                return tuple(blob.digest for blob in image.blobs) if isinstance(image, ImageManifest) else ()
            return tuple(blob.digest for blob in decode_manifest(data).blobs)
        except (Corrupt, Refused) as error:
            logger.warning("%s", error)
            return ()

    async def _write(self) -> None:
        """Write the file. A host that cannot write it loses the policies when it ends, nothing
        else."""
        async with self._writing:
            try:
                await asyncio.to_thread(_replace, self._file, msgspec.json.encode(self._packages))
            except OSError as error:
                logger.warning("policies are not remembered in %s: %s", self._file, error.strerror)


def _read(path: Path) -> dict[str, Remembered]:
    try:
        with path.open("rb") as file:
            return _decoder.decode(file.read(FILE_BYTES_MAX))
    except FileNotFoundError:
        return {}
    except OSError as error:
        logger.warning("policies that were heard before are not known: %s", error)
    except UNDECODABLE as error:
        logger.warning("%s is damaged, and policies are learnt anew: %s", path, " ".join(str(error).split())[:300])
    return {}


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o640)  # names of packages are not for all users of the host
    fresh.write_bytes(data)
    os.replace(fresh, path)
