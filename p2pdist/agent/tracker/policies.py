"""What the tracker said of packages, as far as it concerns this host: rates, transport and priority
of their blobs.

It is learnt whenever a package is looked up, and remembered in `policies.json` in the store's
directory, so that an agent that was started again, or finds no tracker, goes by what it heard last.
A blob of several packages goes by the policy that was heard last. Of all packages of one policy
together this host sends and receives no more than the policy says; the limits of the agent itself
hold besides.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from p2pdist.core.downlink import BURST_S, Downlink, Lane
from p2pdist.core.token_bucket import TokenBucket
from p2pdist.model.digest import Digest, WireDigest
from p2pdist.model.errors import UNDECODABLE, Corrupt
from p2pdist.model.manifest import Manifest, decode_manifest
from p2pdist.model.messages import Priority
from p2pdist.model.policy import NO_POLICY, PackagePolicy, Transport
from p2pdist.store.store import BlobStore
from p2pdist.transfer.pacer import Pacer

PACKAGES_MAX = 10_000
SELECTIONS_MAX = 10_000
FILE_BYTES_MAX = 16 << 20

_logger = logging.getLogger(__name__)


class Remembered(msgspec.Struct, frozen=True):
    """What holds for a package, and the manifest that it had then."""

    policy: PackagePolicy
    manifest: WireDigest


_decoder = msgspec.json.Decoder(dict[str, Remembered])


class Policies:
    """See the module's text. `relimit` hears of blobs whose rate of sending may have changed. On
    the event loop."""

    def __init__(self, store: BlobStore, downlink: Downlink, pacer: Pacer, relimit: Callable[[Digest], None]) -> None:
        self._store, self._downlink, self._pacer, self._relimit = store, downlink, pacer, relimit
        self._file = store.root / "policies.json"
        self._writing = asyncio.Lock()
        self._uploads: dict[str, TokenBucket] = {}
        self._lanes: dict[str, tuple[TokenBucket, Pacer]] = {}
        self._by_blob: dict[Digest, PackagePolicy] = {}
        self._selections: dict[Digest, Digest] = {}
        self._packages = _read(self._file)
        self._blobs = {reference: self._blobs_of(each.manifest) for reference, each in self._packages.items()}
        for reference, each in self._packages.items():
            self._take(each.policy, self._blobs[reference])

    # -- packages

    @property
    def packages(self) -> dict[str, tuple[PackagePolicy, tuple[Digest, ...]]]:
        """What is remembered, with the blobs of each package, by reference."""
        return {reference: (each.policy, self._blobs[reference]) for reference, each in self._packages.items()}

    def blobs(self, reference: str) -> tuple[Digest, ...]:
        return self._blobs.get(reference, ())

    async def learn(self, reference: str, digest: Digest, manifest: Manifest, policy: PackagePolicy) -> PackagePolicy:
        """A tracker says this of a package; returns what was known of it before."""
        before = self._packages.get(reference)
        now = Remembered(policy, digest)
        known = before.policy if before is not None else NO_POLICY
        if policy == NO_POLICY:
            await self.forget(reference)
        if policy == NO_POLICY or now == before:
            return known
        self._packages.pop(reference, None)
        self._packages[reference] = now
        blobs = self._blobs[reference] = tuple(blob.digest for blob in manifest.blobs)
        if len(self._packages) > PACKAGES_MAX:
            self._forget(next(iter(self._packages)))
        self._take(policy, blobs)
        await self._write()
        return known

    async def forget(self, reference: str) -> None:
        """The package is here no more."""
        if reference in self._packages:
            self._forget(reference)
            await self._write()

    def _forget(self, reference: str) -> None:
        del self._packages[reference]
        blobs = self._blobs.pop(reference)
        self._take(NO_POLICY, blobs)
        for other, others in self._blobs.items():
            self._take(self._packages[other].policy, set(blobs).intersection(others))

    def _take(self, policy: PackagePolicy, blobs: Iterable[Digest]) -> None:
        """These blobs go by this policy from now on."""
        if policy.upload_bytes_s is not None:
            self._uploads.setdefault(policy.match, TokenBucket(None)).limit_bytes_s = policy.upload_bytes_s
        if policy.download_bytes_s is not None:
            self._lane(policy.match)[0].limit_bytes_s = policy.download_bytes_s
        for blob in blobs:
            if policy == NO_POLICY:
                self._by_blob.pop(blob, None)
            else:
                self._by_blob[blob] = policy
            self._relimit(blob)

    def _lane(self, match: str) -> tuple[TokenBucket, Pacer]:
        lane = self._lanes.get(match)
        if lane is None:
            bucket = TokenBucket(None, BURST_S)
            lane = self._lanes[match] = bucket, self._pacer.beside(Lane(self._downlink, bucket))
        return lane

    # -- blobs

    def of(self, blob: Digest) -> PackagePolicy:
        return self._by_blob.get(self._selections.get(blob, blob), NO_POLICY)

    def selected(self, selection: Digest, blob: Digest) -> None:
        """Some pieces of a blob go by its policy, under the name that they have
        (p2pdist/model/selection.py)."""
        self._selections[selection] = blob
        if len(self._selections) > SELECTIONS_MAX:
            del self._selections[next(iter(self._selections))]

    def transport(self, blob: Digest) -> Transport | None:
        """How it is to come."""
        return self.of(blob).transport

    def priority(self, blob: Digest, asked: Priority) -> Priority:
        """How urgent a pull of a blob is that was asked for as `asked`."""
        return self.of(blob).priority or asked

    def upload_limit(self, blob: Digest) -> TokenBucket | None:
        """What all blobs of its policy share of the uplink."""
        policy = self.of(blob)
        return self._uploads[policy.match] if policy.upload_bytes_s is not None else None

    def pacer(self, blob: Digest) -> Pacer:
        """Who holds back what is received of a blob."""
        policy = self.of(blob)
        return self._lanes[policy.match][1] if policy.download_bytes_s is not None else self._pacer

    # -- the file

    def _blobs_of(self, digest: Digest) -> tuple[Digest, ...]:
        data = self._store.read_small(digest)
        try:
            return tuple(blob.digest for blob in decode_manifest(data).blobs) if data is not None else ()
        except Corrupt as error:
            _logger.warning("%s", error)
            return ()

    async def _write(self) -> None:
        """A host that cannot write it forgets policies when it ends, and nothing worse."""
        async with self._writing:
            try:
                await asyncio.to_thread(_replace, self._file, msgspec.json.encode(self._packages))
            except OSError as error:
                _logger.warning("policies are not remembered in %s: %s", self._file, error.strerror)


def _read(path: Path) -> dict[str, Remembered]:
    try:
        with path.open("rb") as file:
            return _decoder.decode(file.read(FILE_BYTES_MAX))
    except FileNotFoundError:
        return {}
    except OSError as error:
        _logger.warning("policies that were heard before are not known: %s", error)
    except UNDECODABLE as error:
        _logger.warning("%s is damaged, and policies are learnt anew: %s", path, " ".join(str(error).split())[:300])
    return {}


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    os.replace(fresh, path)
