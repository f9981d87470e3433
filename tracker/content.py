"""Small content from central storage, read once and handed to every agent: what references name,
manifests, configs, piece lists.

Thousands of agents ask for the same few documents at the same moment. Reads of one thing are joined
into one, and what the origin does not have is not asked again for a second
(tracker/joined_reads.py). What a digest names is kept, verified, up to CACHE_BYTES_MAX; what a tag
names is asked again after TAG_FRESH_S. While the origin does not answer, the last known meaning of
a tag is given, and a manifest that is here is not asked for: a reference by digest needs no origin
then. With a state directory tags and layers are known after a restart, too. A bundle depends on the
manifest alone, so it is encoded once, for all agents, and kept up to BUNDLES_BYTES_MAX; a torrent
is checked once (p2pdist/model/torrent.py), and kept up to TORRENTS_BYTES_MAX.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from p2pdist.model.digest import Digest, hex_of, is_digest
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, Unavailable
from p2pdist.model.manifest import (
    MANIFEST_TYPE,
    Bundle,
    Descriptor,
    Manifest,
    Reference,
    blob_reference,
    bundle_documents,
    decode_manifest,
    decode_named,
    encode_bundle,
)
from p2pdist.model.pieces import PieceLayout, PieceList
from p2pdist.model.torrent import Torrent, decode_torrent, torrent_reference
from p2pdist.origin.contract import Origin
from tracker.core.events import LookAtOrigin, OriginSeen, OriginState
from tracker.joined_reads import DocumentCache, JoinedReads, remember
from tracker.state.documents import Documents

TAG_FRESH_S = 1.0
TAG_WAIT_S = 3.0
"""So long the origin may take to say what a tag means whose last meaning is known."""

AWAY_S = 5.0
"""So long an origin that did not answer is not asked for tags whose last meaning is known."""

CACHE_BYTES_MAX = 256 << 20
BUNDLES_BYTES_MAX = 64 << 20
TORRENTS_BYTES_MAX = 64 << 20
READS_AT_ONCE = 8
"""Documents of one bundle that are being read from the origin at once."""

WATCH_S, WATCH_ANSWER_S = 15.0, 10.0
"""How often the origin is asked whether it can be read, and how long it may take."""

LOOKS_AT_ONCE = 4
"""Looks for one blob each, which run beside each other: so many pieces are in memory. Others wait:
a look that came too late would let hosts that lie win."""

LOOK_S = 30.0
"""So long a look may take once its turn has come: while hosts pull, an origin is busy."""

LOOK_REST_S, LOOK_BYTES_S = 0.25, 8 << 20
"""After a look its place rests: so long, and the time of what it read at this rate. Together they
cause no more than 16 requests for sizes a second and 32 MiB/s."""

_ASKED_FOR = Reference("p2pdist/is-it-readable", "latest")
"""A reference that need not exist: the index is read, or the registry asked."""

TAGS_MAX = 10_000
LAYERS_MAX = 100_000

logger = logging.getLogger(__name__)


class OriginWatch:
    """Asks the origin now and then whether it can be read, so that operators hear of it before
    agents do. A tracker without its origin is degraded, and no less alive: what was read before is
    given, and hosts go on from each other."""

    def __init__(self, origin: Origin | None) -> None:
        self._origin = origin
        self.problem = ""
        """Why the origin cannot be read; empty while it can, and before the first answer."""
        self.reachable: bool | None = None
        """Whether it answered last; None before the first answer, and without an origin."""
        self.changed: Callable[[str, str], None] = lambda url, problem: None
        """Hears the origin's URL and why it cannot be read, empty where it can be again."""

    async def run(self) -> None:
        """Ask until cancelled."""
        while self._origin is not None:
            await self.ask(self._origin)
            await asyncio.sleep(WATCH_S)

    async def ask(self, origin: Origin) -> None:
        """Ask once, and log what changed. That it has no such tag is an answer."""
        problem = ""
        try:
            async with asyncio.timeout(WATCH_ANSWER_S):
                await origin.resolve(_ASKED_FOR)
        except NotFound:
            pass
        except TimeoutError:
            problem = f"{origin.url} does not answer within {WATCH_ANSWER_S:.0f} s"
        except P2PDistError as error:
            problem = str(error)
        if problem and problem != self.problem:
            logger.warning("the origin cannot be read, which agents will meet as well: %s", problem)
            self.changed(origin.url, problem)
        elif self.problem and not problem:
            logger.info("the origin %s can be read again", origin.url)
            self.changed(origin.url, "")
        self.problem, self.reachable = problem, not problem


class OriginLooks:
    """Looks at the origin where hosts say that a blob is missing or wrong there. Any host may say
    so, and a fleet must neither believe two of them blindly nor let all hosts try in vain. A look
    asks for the size of the blob, and reads the pieces that hosts found wrong, few of them
    (tracker/core/repair/origin_failures.py says how many, and how often)."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._slots = asyncio.Semaphore(LOOKS_AT_ONCE)

    async def look(self, wanted: LookAtOrigin) -> OriginSeen:
        """How a blob is at the origin; `unknown` where that cannot be found out, which the log
        explains."""
        await self._slots.acquire()
        try:
            async with asyncio.timeout(LOOK_S):
                state, what = await self._state(wanted)
        except TimeoutError:
            state, what = "unknown", f"the origin does not answer within {LOOK_S:.0f} s"
        except P2PDistError as error:
            state, what = "unknown", str(error)
        except Exception:
            logger.exception("looking for %s at the origin failed", wanted.blob)
            state, what = "unknown", "an internal failure"
        finally:
            rest_s = LOOK_REST_S + len(wanted.pieces) * wanted.layout.piece_size / LOOK_BYTES_S
            asyncio.get_running_loop().call_later(rest_s, self._slots.release)
        if state == "unknown":
            logger.warning(
                "hosts say that %s is missing or wrong at the origin, and are believed, for the tracker cannot see: %s",
                wanted.blob,
                what,
            )
        elif state == "right":
            logger.warning(
                "hosts say that %s is missing or wrong at the origin, where the tracker finds it: they lie,"
                " or reach the origin by another way",
                wanted.blob,
            )
        return OriginSeen(wanted.swarm, state, what)

    async def _state(self, wanted: LookAtOrigin) -> tuple[OriginState, str]:
        """Raises P2PDistError where a look can say nothing."""
        origin, blob = self._content.need_origin(wanted.blob), wanted.blob
        layer = await self._content.layer(blob)
        size = await origin.size(blob)
        if size is None:
            return "missing", ""
        if size != layer.size:
            return "corrupt", f"it has {size} bytes, not {layer.size}"
        if wanted.pieces:
            pieces = PieceList.decode(await self._content.read(layer.pieces_digest))
            for piece in wanted.pieces if pieces.layout == wanted.layout else ():
                if not await _verified(origin, layer, pieces, piece):
                    return "corrupt", f"piece {piece} does not match its hash"
        return "right", ""


async def _verified(origin: Origin, layer: Descriptor, pieces: PieceList, piece: int) -> bool:
    """Whether a piece at the origin is what the blob's piece list says."""
    start, length = pieces.layout.offset(piece), pieces.layout.length(piece)
    try:
        data = await origin.read_range(layer.digest, start, length)
    except (NotFound, Corrupt):  # it went while this looked, or is shorter than it says
        return False
    return await asyncio.to_thread(pieces.verify, piece, data)


class Content:
    """Small content by reference and digest, read from the origin once."""

    def __init__(self, origin: Origin | None, documents: Documents | None = None) -> None:
        self._origin = origin
        self.watch = OriginWatch(origin)
        self.looks = OriginLooks(self)
        self._documents = documents
        self._cache: DocumentCache[bytes] = DocumentCache(CACHE_BYTES_MAX)
        self._bundles: DocumentCache[bytes] = DocumentCache(BUNDLES_BYTES_MAX)
        self._torrents: DocumentCache[Torrent] = DocumentCache(TORRENTS_BYTES_MAX)
        self._tags: OrderedDict[str, tuple[float, Descriptor]] = OrderedDict()
        self._layers: OrderedDict[Digest, Descriptor] = OrderedDict()
        self._sizes: OrderedDict[Digest, int | None] = OrderedDict()
        self._reads = JoinedReads("central storage")
        self._away_until = 0.0
        self.learned: Callable[[tuple[tuple[Digest, PieceLayout], ...]], None] = lambda layouts: None
        """Hears how the blobs of a manifest that was read here are cut."""

    @property
    def documents(self) -> Documents | None:
        """What outlives this process; None without a state directory."""
        return self._documents

    async def resolve(self, reference: Reference) -> Descriptor:
        """The manifest that `reference` names. Raises NotFound, Corrupt, Unavailable."""
        name = str(reference)
        known = self._tags.get(name)
        if known is not None and (reference.digest or time.monotonic() - known[0] < TAG_FRESH_S):
            return known[1]
        if reference.digest is not None and (data := await self._held(reference.digest)) is not None:
            found = Descriptor(MANIFEST_TYPE, reference.digest, len(data))
        else:
            found = await self._meaning(reference, known[1] if known is not None else None)
        if reference.digest is not None:
            decode_named(await self.read(reference.digest), reference)
        remember(self._tags, name, (time.monotonic(), found), TAGS_MAX)
        return found

    async def last_meaning(self, reference: Reference, wait_s: float = TAG_WAIT_S) -> Digest | None:
        """The manifest that a reference names, or, where the origin does not say within `wait_s`
        or has the tag no longer, what it named last; None where that is not known."""
        try:
            async with asyncio.timeout(wait_s):
                return (await self.resolve(reference)).digest
        except (P2PDistError, TimeoutError):
            remembered = self._tags.get(str(reference))
            known = remembered[1] if remembered is not None else await self._recall(f"tag {reference}")
            return known.digest if known is not None else None

    async def _meaning(self, reference: Reference, known: Descriptor | None) -> Descriptor:
        """What the origin says that a reference names; while it does not answer, what it said
        last."""
        name = str(reference)
        if known is None:
            known = await self._recall(f"tag {name}")
        if known is not None and time.monotonic() < self._away_until:
            return known
        origin = self.need_origin(name)
        asked = self._reads.read(f"tag {name}", lambda: origin.resolve(reference))
        layer = known is None and await self._is_layer(reference)
        try:
            async with asyncio.timeout(TAG_WAIT_S if known is not None or layer else None):
                found = await asked
        except (Unavailable, TimeoutError) as error:
            why = error if isinstance(error, Unavailable) else f"{origin.url} does not answer within {TAG_WAIT_S:.0f} s"
            if layer:
                raise NotFound(f"the package {name} was not read before, and cannot be now: {why}") from error
            if known is None:
                raise
            self._away_until = time.monotonic() + AWAY_S
            logger.warning("%s: the last known meaning of %s is given", why, name)
            return known
        self._away_until = 0.0
        if found != known:
            await self._note({f"tag {name}": found})
        return found

    async def _is_layer(self, reference: Reference) -> bool:
        """Whether a reference asks for a blob alone that is known as a layer of a package: `layer`
        tells all of it without the origin."""
        digest = reference.tag.replace("-", ":", 1)
        if not is_digest(digest) or reference != blob_reference(Digest(digest)):
            return False
        return Digest(digest) in self._layers or await self._recall(f"layer {digest}") is not None

    async def vouch(self, reference: Reference) -> None:
        """Remember over a restart that a package by digest is one of its name."""
        if reference.digest is not None:
            await self._note({f"package {reference}": Descriptor(MANIFEST_TYPE, reference.digest, 0)})

    async def vouched(self, reference: Reference) -> bool:
        """Whether `vouch` was told so."""
        return await self._recall(f"package {reference}") is not None

    async def _note(self, named: dict[str, Descriptor]) -> None:
        if self._documents is not None:
            await asyncio.to_thread(self._documents.note, named)

    async def _recall(self, name: str) -> Descriptor | None:
        return await asyncio.to_thread(self._documents.recall, name) if self._documents is not None else None

    async def read(self, digest: Digest) -> bytes:
        """A small blob, verified. Raises NotFound, Corrupt, TooLarge, Unavailable."""
        data = self._cache.get(digest)
        if data is None:
            data = await self._reads.read(f"blob {digest}", lambda: self._fetch(digest))
            self._cache.put(digest, data)
        return data

    async def _held(self, digest: Digest) -> bytes | None:
        """A document that was read before, by this tracker or by the last one."""
        data, documents = self._cache.get(digest), self._documents
        if data is None and documents is not None:
            data = await asyncio.to_thread(documents.read, digest)
        return data

    async def _fetch(self, digest: Digest) -> bytes:
        """From what outlived the last tracker, else from the origin."""
        documents = self._documents
        data = await self._held(digest)
        if data is None:
            data = await self.need_origin(digest).read(digest)
            if documents is not None:
                await asyncio.to_thread(documents.write, digest, data)
        return data

    async def layer(self, digest: Digest) -> Descriptor:
        """The descriptor of a layer of a manifest that was read here. Raises NotFound."""
        found = self._layers.get(digest) or await self._recall(f"layer {digest}")
        if found is not None:
            self.learned(((digest, found.layout),))
        if found is None:
            raise NotFound(f"no package that was pulled lately has the blob {digest}")
        return found

    async def manifest(self, digest: Digest) -> bytes:
        """A manifest, whose layers can be asked for one by one from then on."""
        data = await self.read(digest)
        blobs = decode_manifest(data).blobs
        fresh: dict[str, Descriptor] = {}
        for layer in blobs:
            if self._layers.get(layer.digest) != layer:
                fresh[f"layer {layer.digest}"] = layer
            remember(self._layers, layer.digest, layer, LAYERS_MAX)
        self.learned(tuple((layer.digest, layer.layout) for layer in blobs))
        if fresh:
            await self._note(fresh)
        return data

    async def bundle(self, digest: Digest) -> bytes:
        """The encoded bundle of the package with this manifest (p2pdist/model/manifest.py). Raises
        NotFound, Corrupt, Unavailable."""
        data = self._bundles.get(digest)
        if data is None:
            data = await self._reads.read(f"bundle {digest}", lambda: self._bundle(digest))
            self._bundles.put(digest, data)
        return data

    async def _bundle(self, digest: Digest) -> bytes:
        manifest = await self.manifest(digest)
        chosen = bundle_documents(decode_manifest(manifest), len(manifest))
        slots = asyncio.Semaphore(READS_AT_ONCE)

        async def read(small: Descriptor) -> bytes | None:
            """None for what is wrong at the origin: a host that has it already does not need it,
            and one that asks for it alone is told what it is."""
            async with slots:
                try:
                    data = await self.read(small.digest)
                except (NotFound, Corrupt):
                    return None
            return data if len(data) == small.size else None

        documents = await asyncio.gather(*map(read, chosen))
        return encode_bundle(Bundle(digest, (manifest, *(data for data in documents if data is not None))))

    async def torrent(self, digest: Digest) -> Torrent:
        """The torrent that was made of a blob. Raises NotFound, Corrupt, Unavailable."""
        torrent = await self._torrent(digest, "the blob")
        if digest not in self._sizes:
            origin = self.need_origin(digest)
            size = await self._reads.read(f"size {digest}", lambda: origin.size(digest))
            remember(self._sizes, digest, size, LAYERS_MAX)
        size = self._sizes[digest]  # None: gone from the origin, and perhaps still with a host
        if len(torrent.files) != 1 or size not in (None, torrent.size):
            raise Corrupt(f"the torrent of {digest} is that of something else", remedy="Make it again: p2pdist torrent")
        return torrent

    async def package_torrent(self, digest: Digest) -> tuple[Torrent, Manifest]:
        """The torrent that was made of the package with this manifest, and the manifest. Raises
        NotFound, Corrupt, Unavailable."""
        manifest = decode_manifest(await self.manifest(digest))
        torrent = await self._torrent(digest, "the package")
        if dict(torrent.files) != {hex_of(blob.digest): blob.size for blob in manifest.blobs}:
            raise Corrupt(f"the torrent of {digest} is that of something else", remedy="Make it again: p2pdist torrent")
        return torrent, manifest

    async def _torrent(self, subject: Digest, kind: str) -> Torrent:
        try:
            described = await self.resolve(torrent_reference(subject))
        except NotFound as error:
            raise NotFound(f"{kind} {subject} has no torrent", remedy="Make one: p2pdist torrent") from error
        torrent = self._torrents.get(described.digest)
        if torrent is None:
            torrent = await self._reads.read(f"torrent {described.digest}", lambda: self._decoded(described.digest))
            self._torrents.put(described.digest, torrent)
        return torrent

    async def _decoded(self, digest: Digest) -> Torrent:
        return await asyncio.to_thread(decode_torrent, await self.read(digest))

    def need_origin(self, wanted: str) -> Origin:
        """Central storage, to look `wanted` up in. Raises Unavailable without any."""
        if self._origin is None:
            raise Unavailable(
                f"this tracker has no origin to look up {wanted} in",
                remedy="Start it with --origin, or give the agent one",
            )
        return self._origin
