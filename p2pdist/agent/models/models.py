"""Repositories of a hub on one host: their documents, and large files, which come through the swarm
like any other blob.

What a commit names never changes, so what is in the store is answered without a question. What a
branch names is asked of the tracker each time; while none answers, the last known commit is given.
Whether a client may read a repository is the tracker's to say, for a minute. While none answers,
repositories that were open stay so, and all others are closed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from p2pdist.agent.models.tracked_hub import HubBlob, HubStorage, TrackedHub
from p2pdist.agent.pull.blob import BlobPull
from p2pdist.agent.pull.trees import together
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import UNDECODABLE, Corrupt, NotFound, Refused, Unavailable
from p2pdist.model.hub import (
    HubDirectory,
    HubFile,
    HubName,
    HubReference,
    HubRevision,
    check_listing,
    decode_listing,
    failure,
    git_oid,
    is_commit,
)
from p2pdist.model.manifest import Descriptor
from p2pdist.model.messages import Priority
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.index import ImageRecord
from p2pdist.store.store import BlobStore

ADMITTED_S = 60.0
"""So long this host goes by the tracker's word that a client may read a repository."""

FRESH_S = 2.0
"""So long what a branch names is not asked for again: clients ask for it with each file."""

SMALL_AT_ONCE = 8
KEPT_FILES_MAX = 1000
"""Small files are kept here of commits that have no more files: each takes a record."""

LARGE_BYTES = 64 << 10
KEPT_BYTES_MAX = 1 << 30
"""Documents of LARGE_BYTES and more that are kept on disk: what the hub says of one commit may take
many megabytes."""

CLIENTS_MAX = 10_000
REVISIONS_MAX = 1000
REVISIONS_BYTES_MAX = 64 << 20
"""What the hub says of the revisions that are kept in memory: it may be megabytes of each."""

LISTINGS_MAX = 16
LISTED_MAX = 400_000
"""Entries of the commits that are kept in memory."""

ANNOUNCED_MAX = 100_000
DOCUMENT_TYPE = "application/vnd.p2pdist.hub"

Note = Callable[[str], None]
Key = TypeVar("Key")
Value = TypeVar("Value")


class BlobFetcher(Protocol):
    """Fetches blobs that have no piece list."""

    async def fetch_vouched(
        self, digest: Digest, size: int, upstream: HubBlob, priority: Priority
    ) -> tuple[Blob, BlobPull | None]:
        """The blob, not yet held, and its pull, started or joined; None when the blob is
        complete. Hosts with a lease read it from `upstream`."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What is in a commit, by path."""

    name: str
    files: dict[str, HubFile]
    directories: dict[str, HubDirectory]
    paths: tuple[str, ...]
    """Of all of these, in order."""

    @classmethod
    def of(cls, name: HubName, data: bytes) -> Commit:
        """What a listing says; takes a while where there are many files. Raises Corrupt,
        Refused."""
        listing = check_listing(name, decode_listing(data))
        files = {file.path: file for file in listing.files}
        directories = {entry.path: entry for entry in listing.directories}
        return cls(listing.commit, files, directories, tuple(sorted((*files, *directories))))


class Snapshot:
    """A commit whose files are known; see agent.pull.image.HubSnapshot."""

    def __init__(self, models: Models, name: HubName, commit: Commit) -> None:
        self._models, self._name, self._commit = models, name, commit
        self.commit = commit.name
        self._files = {file.digest: file for file in commit.files.values() if file.sha256}

    @property
    def files(self) -> dict[str, HubFile]:
        """All files, by path."""
        return self._commit.files

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """The files that LFS keeps, each content once."""
        return tuple(Descriptor(DOCUMENT_TYPE, digest, file.size) for digest, file in self._files.items())

    async def fetch(self, digest: Digest, priority: Priority) -> tuple[Blob, BlobPull | None]:
        """One of these, not yet held, and its pull; None when the blob is complete."""
        return await self._models.fetch(self._name, self.commit, self._files[digest], priority=priority)

    async def bring_documents(self) -> None:
        """Have the other files in the store, as many as it keeps."""
        if len(self._commit.files) > KEPT_FILES_MAX:
            return
        slots = asyncio.Semaphore(SMALL_AT_ONCE)

        async def bring(file: HubFile) -> None:
            async with slots:
                await self._models.content(self._name, self.commit, file)

        await together([bring(file) for file in self._commit.files.values() if not file.sha256 and file.size])


class Models:
    """The repositories of the fleet's hub on this host. `learn` hears under which name of packages
    a blob is at the hub. `token` is always that of the client, "" for none. Methods raise NotFound
    and Refused, with what the hub says of it, Corrupt and Unavailable. On the event loop."""

    def __init__(
        self,
        store: BlobStore,
        tracked: TrackedHub,
        fetcher: BlobFetcher,
        *,
        learn: Callable[[str, tuple[Digest, ...]], None] = lambda name, parts: None,
        wait_tracker: Callable[[Note], Awaitable[bool]] | None = None,
    ) -> None:
        self._wait_tracker = wait_tracker
        self._store, self._tracked, self._fetcher, self._learn = store, tracked, fetcher, learn
        self._storage = HubStorage()
        self._salt = os.urandom(16)
        self._admitted: OrderedDict[bytes, float] = OrderedDict()
        """By a hash of repository and token until when its bearer may read it."""
        self._fresh: OrderedDict[str, tuple[float, HubRevision]] = OrderedDict()
        """By `name@branch` when it was asked for, and what it named."""
        self._commits: OrderedDict[str, Commit] = OrderedDict()
        self._announced: OrderedDict[str, None] = OrderedDict()
        """Files, by name and digest, for which the tracker lets hosts join a swarm."""
        self._confirmed: OrderedDict[str, None] = OrderedDict()
        """Files that the hub has in the repository."""
        self._reads: dict[str, asyncio.Task[Any]] = {}

    def tracker_changed(self) -> None:
        """Another tracker answers from now on, or none does."""
        self._announced.clear()

    async def close(self) -> None:
        """End what is under way."""
        tasks = list(self._reads.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._storage.close()

    # -- clients

    async def admit(self, name: HubName, token: str) -> None:
        """Raises NotFound or Refused for a repository that a client may not read."""
        keys = [self._client(name, ""), *([self._client(name, token)] if token else [])]
        now = asyncio.get_running_loop().time()
        if any(self._admitted.get(key, 0.0) > now for key in keys):
            return
        was_open = self._record(name, "open") is not None
        try:
            admission = await self._joined(
                f"admit {keys[-1].hex()}", lambda: self._tracked.admission(name, token), known=was_open
            )
        except Unavailable:
            if self._record(name, "open") is None:  # or the tracker has said so meanwhile to another client
                raise
            return
        except (NotFound, Refused):
            await self._forget(name, "open")
            raise
        _remember(self._admitted, keys[0 if admission.open else -1], now + ADMITTED_S, CLIENTS_MAX)
        if admission.open:
            await self._keep(name, "open", b"open")
        else:
            await self._forget(name, "open")

    def _client(self, name: HubName, token: str) -> bytes:
        return hashlib.blake2b(f"{name}\n{token}".encode(), key=self._salt).digest()

    # -- documents

    async def revision(self, name: HubName, revision: str, token: str = "") -> HubRevision:
        """The commit that a branch, tag or commit names, and what the hub says of it."""
        key, now = f"{name}@{revision}", asyncio.get_running_loop().time()
        asked_at, fresh = self._fresh.get(key, (0.0, None))
        if fresh is not None and (now - asked_at < FRESH_S or is_commit(revision)):
            return fresh
        kept = await self._kept(name, f"revision {revision}")
        known = _revision_of(kept) if kept is not None else None
        if known is not None and is_commit(revision):
            found = known
        else:
            try:
                found = await self._joined(
                    f"revision {key}",
                    lambda: self._tracked.revision(name, revision, token),
                    known=known is not None,
                )
            except Unavailable:
                if known is None:
                    raise
                found = known
            if known is None or found.commit != known.commit:
                await self._keep(name, f"revision {revision}", msgspec.json.encode(found))
        _remember(self._fresh, key, (now, found), REVISIONS_MAX)
        while len(self._fresh) > 1 and sum(len(one.info) for _, one in self._fresh.values()) > REVISIONS_BYTES_MAX:
            self._fresh.popitem(last=False)
        return found

    async def commit_of(self, name: HubName, revision: str, token: str = "") -> str:
        """The commit that a branch, tag or commit names."""
        return revision if is_commit(revision) else (await self.revision(name, revision, token)).commit

    async def files(self, name: HubName, commit: str, token: str = "") -> Commit:
        """Everything in a commit."""
        key = f"{name}@{commit}"
        if (found := self._commits.get(key)) is None:
            found = await self._joined(f"files {key}", lambda: self._read_files(name, commit, token))
        _remember(self._commits, key, found, LISTINGS_MAX)
        while len(self._commits) > 1 and sum(len(each.paths) for each in self._commits.values()) > LISTED_MAX:
            self._commits.popitem(last=False)
        return found

    async def _read_files(self, name: HubName, commit: str, token: str) -> Commit:
        data = await self._kept(name, f"files {commit}")
        asked = data is None
        if data is None:
            data = await self._tracked.listing(name, commit, token)
        found = await asyncio.to_thread(Commit.of, name, data)
        if found.name != commit:
            raise Corrupt(f"the tracker sent the files of another commit of {name} than {commit}")
        if asked:
            await self._keep(name, f"files {commit}", data)
        return found

    async def file(self, name: HubName, commit: str, path: str, token: str = "") -> HubFile:
        """A file of a commit."""
        found = (await self.files(name, commit, token)).files.get(path)
        if found is None:
            raise failure(NotFound(f"{name} at {commit} has no file {path[:300]}"), "EntryNotFound", 404)
        return found

    async def content(self, name: HubName, commit: str, file: HubFile, token: str = "") -> bytes:
        """The content of a file that LFS does not keep, verified."""
        return await self._joined(
            f"content {file.oid} {name}",
            lambda: self._with_tracker(lambda: self._content(name, commit, file, token)),
        )

    async def _content(self, name: HubName, commit: str, file: HubFile, token: str) -> bytes:
        data = await self._kept(name, f"content {file.oid}")
        if data is None:
            data = await self._tracked.content(name, commit, file.path, token)
            if git_oid(data) != file.oid:
                raise Corrupt(f"the tracker sent something else for {file.path} of {name}")
            if len((await self.files(name, commit, token)).files) <= KEPT_FILES_MAX:
                await self._keep(name, f"content {file.oid}", data)
        return data

    async def refs(self, name: HubName, token: str = "") -> bytes:
        """The branches and tags of a repository, as the hub lists them; while no tracker answers,
        as it listed them last."""
        known = self._record(name, "refs") is not None
        try:
            data = await self._joined(f"refs {name}", lambda: self._tracked.refs(name, token), known=known)
        except Unavailable:
            kept = await self._kept(name, "refs")
            if kept is None:
                raise
            return kept
        await self._keep(name, "refs", data)
        return data

    async def find(self, reference: HubReference, note: Note = lambda text: None) -> Snapshot:
        """The commit that a reference names, of a repository that is open. `note` gets what is
        waited for, in words for the user."""
        return await self._with_tracker(lambda: self._find(reference), note)

    async def _find(self, reference: HubReference) -> Snapshot:
        name = reference.name
        await self.admit(name, "")
        return Snapshot(self, name, await self.files(name, await self.commit_of(name, reference.revision)))

    async def _with_tracker(self, ask: Callable[[], Awaitable[Value]], note: Note = lambda text: None) -> Value:
        """What `ask` gives. Where it fails while no tracker answers, it asks again once one does: a
        tracker that restarts costs a client nothing but time."""
        try:
            return await ask()
        except (NotFound, Unavailable):
            if self._tracked.connected or self._wait_tracker is None or not await self._wait_tracker(note):
                raise
            return await ask()

    # -- blobs

    async def fetch(
        self, name: HubName, commit: str, file: HubFile, token: str = "", priority: Priority = "start"
    ) -> tuple[Blob, BlobPull | None]:
        """A file of LFS, not yet held, and its pull, started or joined; None when it is complete.
        Raises DiskFull besides."""
        digest = file.digest
        await self._with_tracker(lambda: self._announce(name, commit, file, token))
        self._learn(str(name), (digest,))
        source = HubBlob(self._tracked, self._storage, name, commit, file.path, token)
        try:
            return await self._fetcher.fetch_vouched(digest, file.size, source, priority)
        except Corrupt as error:
            why = f"{file.path} of {name} is not at the hub what its listing says: {error.what}"
            raise Corrupt(why, remedy=error.remedy) from error

    async def _announce(self, name: HubName, commit: str, file: HubFile, token: str) -> None:
        """Have the tracker know how the file is cut, and say whether the hub has its content in
        this repository, as a listing may name content of others that is here already. Raises
        Unavailable where nothing says it."""
        key, target = f"{name} {file.sha256}", f"has {file.sha256}"
        stored = self._store.get(file.digest)
        has = key in self._confirmed or self._record(name, target) is not None
        if has and (key in self._announced or (stored is not None and stored.complete)):
            return
        try:
            await self._joined(f"file {key}", lambda: self._tracked.file(name, commit, file.path, token), known=has)
        except Unavailable:
            if not has:
                raise
            return  # the pull waits for a tracker, or does without
        _remember(self._announced, key, None, ANNOUNCED_MAX)
        _remember(self._confirmed, key, None, ANNOUNCED_MAX)
        if len((await self.files(name, commit, token)).files) <= KEPT_FILES_MAX:
            await self._keep(name, target, b"has")

    # -- keeping

    async def _joined(self, key: str, ask: Callable[[], Awaitable[Value]], *, known: bool = False) -> Value:
        """What `ask` gives, asked once for all that want the same: it goes on when one of these
        goes away. `known`: there is something to give without an answer, so a tracker that hangs is
        not waited for."""
        task = self._reads.get(key)
        if task is None:
            task = self._reads[key] = asyncio.ensure_future(self._tracked.ask(ask) if known else _run(ask))
            task.add_done_callback(lambda done: self._read_ended(key, done))
        value: Value = await asyncio.shield(task)
        return value

    def _read_ended(self, key: str, task: asyncio.Task[Any]) -> None:
        del self._reads[key]
        if not task.cancelled():
            task.exception()  # marks it as seen: the callers may have gone away

    def _record(self, name: HubName, target: str) -> ImageRecord | None:
        """The record of a document. It has a target that no tag and no digest is."""
        return self._store.images.get(str(name), f"hub {target}")

    async def _kept(self, name: HubName, target: str) -> bytes | None:
        """A document that is in the store."""
        record = self._record(name, target)
        return await asyncio.to_thread(self._store.read_document, record.digest) if record is not None else None

    async def _keep(self, name: HubName, target: str, data: bytes) -> None:
        await asyncio.to_thread(_put, self._store, str(name), f"hub {target}", data)

    async def _forget(self, name: HubName, target: str) -> None:
        if self._record(name, target) is not None:
            await asyncio.to_thread(self._store.images.forget, str(name), [f"hub {target}"])


async def _run(ask: Callable[[], Awaitable[Value]]) -> Value:
    return await ask()


def _revision_of(data: bytes) -> HubRevision | None:
    try:
        return msgspec.json.decode(data, type=HubRevision)
    except UNDECODABLE:
        return None


def _put(store: BlobStore, name: str, target: str, data: bytes) -> None:
    """Keep a document unless it is kept. In a thread: it may be megabytes."""
    record, digest = store.images.get(name, target), digest_of(data)
    if record is not None and record.digest == digest:
        return
    store.put_document(data)
    store.images.record(name, (target,), digest, DOCUMENT_TYPE)
    if len(data) >= LARGE_BYTES:
        _forget_oldest(store)


def _forget_oldest(store: BlobStore) -> None:
    """Drop the records of the oldest large documents over KEPT_BYTES_MAX; the store's housekeeping
    removes what no record names."""
    total = 0
    for record in reversed(store.images.list()):
        size = store.document_size(record.digest) if record.media_type == DOCUMENT_TYPE else 0
        if size >= LARGE_BYTES:
            total += size
            if total > KEPT_BYTES_MAX:
                store.images.forget(record.name, [record.target])


def _remember(table: OrderedDict[Key, Value], key: Key, value: Value, limit: int) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > limit:
        table.popitem(last=False)
