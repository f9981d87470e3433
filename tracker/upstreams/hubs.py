"""A hub of models and data sets, read once for the whole fleet: what branches name, the files of
commits, small files, and where large ones are read.

Theory. A fleet that starts a model asks for the same few documents at one moment, and hubs limit
how often they are asked. So reads of one thing are joined into one. What a commit consists of
never changes: it is kept by the commit, over restarts too. What a branch names is taken for known
for a while, and holds while the hub does not answer. A hub that asks to be left alone is left alone
by the whole fleet, as far as it was shown no token or the same one: a client whose account has
asked for too much keeps the hub from nobody else.

A repository is **open** when the hub gives it to a client that shows nothing. Of any other one each
client shows a token, and the hub is asked once for each token and repository; the answer counts for
some minutes, and of the token only a hash is kept. What was read for one client is given to another
only after the hub has admitted that one as well.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import NotFound, P2PDistError, Refused, Unavailable
from p2pdist.model.hub import (
    LISTING_BYTES_MAX,
    HubFile,
    HubListing,
    HubLocation,
    HubName,
    HubReference,
    HubRevision,
    decode_listing,
    failure,
    is_commit,
)
from p2pdist.model.manifest import Descriptor
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.vouched_list import vouched_layout
from p2pdist.origin.huggingface.hub import UpstreamHub
from tracker.joined_reads import DocumentCache, JoinedReads, remember
from tracker.state.documents import Documents
from tracker.upstreams.pauses import Pause

REVISION_TTL_S = 30.0
"""So long a branch is taken to name the same commit."""

ADMITTED_S, DENIED_S = 300.0, 20.0
"""How long the hub's answer about a client counts."""

ABSENT_S = 5.0
WAIT_S = 2.0
"""So long the hub may take to say what a branch names whose last meaning is known."""

AWAY_S = 5.0
"""So long a hub that did not answer is not asked for branches whose last meaning is known."""

LOCATION_S = 1800.0
"""So long an address of storage is given to hosts, unless they find it stale; hubs sign them for an
hour."""

ANSWERS_MAX = 20_000
PAUSES_MAX = 10_000
REVISIONS_MAX = 20_000
LOCATIONS_MAX = 50_000
DESCRIPTORS_MAX = 50_000
CACHE_BYTES_MAX = 64 << 20
LISTINGS_MAX = 64
LISTED_MAX = 400_000
"""Files of the listings that are kept in memory."""

JSON_TYPE = "application/json"
BYTES_TYPE = "application/octet-stream"

_Value = TypeVar("_Value")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the hub said of a client and a repository, and until when that counts."""

    until: float
    refusal: P2PDistError | None


class Listings:
    """Listings of commits, the most lately used ones, by name and commit."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[bytes, dict[str, HubFile]]] = OrderedDict()

    def get(self, key: str) -> tuple[bytes, dict[str, HubFile]] | None:
        """A listing as agents get it, and its files by path."""
        if (found := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: str, data: bytes, listing: HubListing) -> tuple[bytes, dict[str, HubFile]]:
        """Keep a listing; others go."""
        found = self._kept[key] = data, {file.path: file for file in listing.files}
        while len(self._kept) > 1 and (
            len(self._kept) > LISTINGS_MAX or sum(len(files) for _, files in self._kept.values()) > LISTED_MAX
        ):
            self._kept.popitem(last=False)
        return found


class Hubs:
    """The hub of a tracker, None where it has none. `documents` outlive the tracker. `learned`
    hears how files are cut that agents are about to fetch."""

    def __init__(self, url: str = "", documents: Documents | None = None, *, ttl_s: float = REVISION_TTL_S) -> None:
        self.url = url
        self.asked: Counter[str] = Counter()
        """Questions by what became of them: ok, or the slug of the failure."""
        self.learned: Callable[[tuple[tuple[Digest, PieceLayout], ...]], None] = lambda layouts: None
        self._hub = UpstreamHub(url) if url else None
        self._documents, self._ttl_s = documents, ttl_s
        self._reads = JoinedReads(f"the hub {url}", absent_s=ABSENT_S)
        self._cache: DocumentCache[bytes] = DocumentCache(CACHE_BYTES_MAX)
        self._descriptors: OrderedDict[str, Descriptor] = OrderedDict()
        """What keys of documents name, as in `documents`."""
        self._listings = Listings()
        self._revisions: OrderedDict[str, tuple[float, str]] = OrderedDict()
        """By `name@branch` when it was asked for, and the commit that it names."""
        self._locations: OrderedDict[str, tuple[float, HubLocation]] = OrderedDict()
        self._salt = os.urandom(16)
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        """By a hash of repository and token."""
        self._away_until = 0.0
        """Until when the hub is taken not to answer."""
        self._pauses: OrderedDict[bytes, Pause] = OrderedDict()
        """By a hash of the token that was shown whether the hub asked to be left alone."""

    async def close(self) -> None:
        """End the connections."""
        if self._hub is not None:
            await self._hub.close()

    # -- clients

    async def admit(self, name: HubName, token: str = "") -> bool:
        """Whether a repository is open; else the bearer of `token` may read it. Raises NotFound and
        Refused as the hub does, Unavailable."""
        refusal = await self._refusal(name, "")
        if refusal is None:
            return True
        if token:
            refusal = await self._refusal(name, token)
        if refusal is not None:
            raise type(refusal)(refusal.what, remedy=refusal.remedy, **refusal.details)
        return False

    async def _refusal(self, name: HubName, token: str) -> P2PDistError | None:
        key = self._hash(f"{name}\n{token}")
        answer = self._answers.get(key)
        if answer is not None and time.monotonic() < answer.until:
            return answer.refusal

        async def ask(hub: UpstreamHub) -> P2PDistError | None:
            refusal: P2PDistError | None = None
            try:
                await hub.admit(name, token)
            except (NotFound, Refused) as error:
                refusal = error
            lasts_s = ADMITTED_S if refusal is None else DENIED_S
            remember(self._answers, key, _Answer(time.monotonic() + lasts_s, refusal), ANSWERS_MAX)
            return refusal

        try:
            return await self._ask(f"admit {key.hex()}", ask, token)
        except Unavailable:
            if answer is None or answer.refusal is not None or token:
                raise
            return None  # it was open, and what was said last holds

    # -- documents

    async def revision(self, name: HubName, revision: str, token: str = "") -> HubRevision:
        """The commit that a branch, tag or commit names, and what the hub says of it. Raises
        NotFound, Refused, Corrupt, Unavailable."""
        shown = await self._shown(name, token)
        commit = revision if is_commit(revision) else await self._meaning(name, revision, shown)
        data = await self._document(
            f"info {name}@{commit}", lambda hub: _info(hub, name, commit, shown), shown, media_type=JSON_TYPE
        )
        return HubRevision(commit, msgspec.Raw(data))

    async def _meaning(self, name: HubName, revision: str, token: str) -> str:
        """The commit that a branch or tag names; while the hub does not answer, the last one."""
        key, now = f"{name}@{revision}", time.monotonic()
        asked_at, commit = self._revisions.get(key, (float("-inf"), ""))
        if commit and now - asked_at < self._ttl_s:
            return commit
        if not commit and (named := await self._recall(f"hub ref {key}")) is not None:
            commit = named.media_type
        if commit and now < max(self._away_until, self._pause(token).until):
            return commit

        async def ask(hub: UpstreamHub) -> str:
            found = await hub.revision(name, revision, token)
            self._away_until = 0.0
            remember(self._revisions, key, (time.monotonic(), found.commit), REVISIONS_MAX)
            await self._keep(f"hub info {name}@{found.commit}", bytes(found.info), JSON_TYPE)
            if found.commit != commit:
                # The commit stands as the type: what a descriptor names is the document.
                await self._note({f"hub ref {key}": Descriptor(found.commit, digest_of(bytes(found.info)), 0)})
            return found.commit

        try:
            async with asyncio.timeout(WAIT_S if commit else None):
                return await self._ask(f"revision {key}", ask, token)
        except (Unavailable, TimeoutError) as error:
            if not commit:
                raise
            self._away_until = time.monotonic() + AWAY_S
            logger.warning("%s: the last known commit of %s is given", error or "no answer in time", key)
            return commit
        except NotFound:
            self._revisions.pop(key, None)
            raise

    async def listing(self, name: HubName, commit: str, token: str = "") -> bytes:
        """Everything in a commit, as agents take it. Raises what `revision` raises."""
        shown = await self._shown(name, token)
        return (await self._listed(name, commit, shown))[0]

    async def _listed(self, name: HubName, commit: str, token: str) -> tuple[bytes, dict[str, HubFile]]:
        key = f"{name}@{commit}"
        if (kept := self._listings.get(key)) is not None:
            return kept
        data = await self._document(
            f"files {key}", lambda hub: _listing(hub, name, commit, token), token, media_type=JSON_TYPE
        )
        return self._listings.put(key, data, await asyncio.to_thread(decode_listing, data))

    async def file(self, name: HubName, commit: str, path: str, token: str = "") -> HubFile:
        """A file of a commit; `learned` hears how it is cut. Of a file of LFS the hub is asked
        first where it is read: a listing may name content that this repository does not have, and
        hosts may have it from another one. Raises what `revision` raises."""
        shown = await self._shown(name, token)
        found = await self._file(name, commit, path, shown)
        if found.sha256 and found.size:
            await self.location(name, commit, path, token)
            self.learned(((found.digest, vouched_layout(found.size)),))
        return found

    async def _file(self, name: HubName, commit: str, path: str, token: str) -> HubFile:
        _, files = await self._listed(name, commit, token)
        if (found := files.get(path)) is None:
            raise failure(NotFound(f"{name} at {commit} has no file {path[:300]}"), "EntryNotFound", 404)
        return found

    async def blobs(self, reference: HubReference) -> tuple[str, dict[Digest, int]]:
        """The commit that a reference to an open repository names, and the files of LFS in it,
        with their sizes; `learned` hears how they are cut. Raises what `revision` raises."""
        name = reference.name
        commit = (await self.revision(name, reference.revision)).commit
        _, files = await self._listed(name, commit, "")
        parts = {file.digest: file.size for file in files.values() if file.sha256 and file.size}
        self.learned(tuple((digest, vouched_layout(size)) for digest, size in parts.items()))
        return commit, parts

    async def content(self, name: HubName, commit: str, path: str, token: str = "") -> bytes:
        """The content of a file that LFS does not keep. Raises what `revision` raises."""
        shown = await self._shown(name, token)
        file = await self._file(name, commit, path, shown)
        if file.sha256:
            raise Refused(f"{path[:300]} of {name} is a blob: {file.digest}")
        # By name: that another repository has this content says nothing of whether this one does.
        key = f"content {name} {file.oid}"
        return await self._document(key, lambda hub: hub.plain_file(name, commit, file, shown), shown)

    async def location(self, name: HubName, commit: str, path: str, token: str = "", *, stale: str = "") -> HubLocation:
        """Where a file of LFS is read. `stale`: the address that was given last, and is not taken
        any more. Raises what `revision` raises."""
        shown = await self._shown(name, token)
        file = await self._file(name, commit, path, shown)
        key, now = f"{name}@{commit}/{path}", time.monotonic()
        found_at, found = self._locations.get(key, (float("-inf"), None))
        if found is not None and now - found_at < LOCATION_S and found.url != stale:
            return found

        async def ask(hub: UpstreamHub) -> HubLocation:
            found = await hub.location(name, commit, file, shown)
            remember(self._locations, key, (time.monotonic(), found), LOCATIONS_MAX)
            return found

        return await self._ask(f"location {key}", ask, shown)

    async def refs(self, name: HubName, token: str = "") -> bytes:
        """The branches and tags of a repository. Raises what `revision` raises."""
        shown = await self._shown(name, token)
        return await self._ask(f"refs {name}", lambda hub: hub.refs(name, shown), shown)

    # -- asking

    async def _shown(self, name: HubName, token: str) -> str:
        """The token to show to the hub for what is read: none for an open repository."""
        return "" if await self.admit(name, token) else token

    def _hash(self, text: str) -> bytes:
        return hashlib.blake2b(text.encode(), key=self._salt).digest()

    def _pause(self, token: str) -> Pause:
        """What the hub asked of what shows `token`."""
        return self._pauses.get(self._hash(token)) or Pause(f"the hub {self.url}", "Try again then")

    async def _ask(self, key: str, ask: Callable[[UpstreamHub], Awaitable[_Value]], token: str) -> _Value:
        """Ask the hub, once for all that want the same, unless it wants to be left alone by what
        shows `token`. `ask` also notes the answer: what asks next finds either the note or this
        question."""
        if (hub := self._hub) is None:
            raise NotFound("this fleet has no hub", remedy="Start the tracker with --hub https://huggingface.co")
        pause = self._pause(token)
        pause.require_over()

        async def asking() -> _Value:
            async with pause.question():
                try:
                    found = await ask(hub)
                except P2PDistError as error:
                    self.asked[error.slug] += 1
                    self._note_failure(error, token)
                    raise
            self.asked["ok"] += 1
            return found

        return await self._reads.read(key, asking)

    def _note_failure(self, error: P2PDistError, token: str) -> None:
        pause = self._pause(token)
        if asked_s := pause.note(error):
            remember(self._pauses, self._hash(token), pause, PAUSES_MAX)
            waits = "what shows the same token" if token else "the whole fleet"
            logger.warning("%s; %s waits for %.0f s", error.what, waits, asked_s)

    # -- what outlives the tracker

    async def _document(
        self, key: str, ask: Callable[[UpstreamHub], Awaitable[bytes]], token: str, *, media_type: str = BYTES_TYPE
    ) -> bytes:
        """A document that never changes, kept by its key."""
        kept = f"hub {key}"
        named = self._descriptors.get(kept) or await self._recall(kept)
        data = await self._held(named.digest) if named is not None else None
        if data is not None:
            return data

        async def read(hub: UpstreamHub) -> bytes:
            data = await ask(hub)
            await self._keep(kept, data, media_type)
            return data

        return await self._ask(key, read, token)

    async def _keep(self, key: str, data: bytes, media_type: str) -> None:
        named = Descriptor(media_type, await asyncio.to_thread(digest_of, data), len(data))
        self._cache.put(named.digest, data)
        remember(self._descriptors, key, named, DESCRIPTORS_MAX)
        if self._documents is not None:
            await asyncio.to_thread(self._documents.write, named.digest, data)
            await self._note({key: named})

    async def _held(self, digest: Digest) -> bytes | None:
        data = self._cache.get(digest)
        if data is None and self._documents is not None:
            data = await asyncio.to_thread(self._documents.read, digest)
            if data is not None:
                self._cache.put(digest, data)
        return data

    async def _note(self, named: dict[str, Descriptor]) -> None:
        if self._documents is not None:
            await asyncio.to_thread(self._documents.note, named)

    async def _recall(self, name: str) -> Descriptor | None:
        return await asyncio.to_thread(self._documents.recall, name) if self._documents is not None else None


async def _info(hub: UpstreamHub, name: HubName, commit: str, token: str) -> bytes:
    return bytes((await hub.revision(name, commit, token)).info)


async def _listing(hub: UpstreamHub, name: HubName, commit: str, token: str) -> bytes:
    data = await asyncio.to_thread(msgspec.json.encode, await hub.listing(name, commit, token))
    if len(data) > LISTING_BYTES_MAX:
        raise Refused(f"the files of {name} at {commit} have {len(data)} bytes of names, which is over the limit")
    return data
