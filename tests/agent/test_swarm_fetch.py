"""A pull that takes part in a swarm: when it begins, what follows when BitTorrent fails, and how it
ends."""

from __future__ import annotations

import asyncio
import io
import os
import random
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from formats_rig import torrent_info
from waits import until

from p2pdist.agent.bittorrent import service
from p2pdist.agent.pull import streams
from p2pdist.agent.pull.blob import TICK_S, BlobPull
from p2pdist.agent.uplink import Uplink
from p2pdist.core.pull import SWARM
from p2pdist.core.sources import Sources
from p2pdist.model.address import Vicinity
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Unavailable
from p2pdist.model.messages import Holding
from p2pdist.model.pieces import PieceLayout, PieceList
from p2pdist.model.plan import Plan, Source, StripePlan
from p2pdist.model.torrent import Torrent, decode_torrent
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore
from p2pdist.transfer.stream.client import IncomingStream
from p2pdist.transfer.stream.events import StreamClosed

DATA = random.Random(1).randbytes(20 * 65536)


class Torrents:
    """Finds the torrent of the blob as soon as the test lets it."""

    def __init__(self) -> None:
        self.answering = asyncio.Event()
        self.torrent: Torrent | None = decode_torrent(torrent_info(io.BytesIO(DATA), len(DATA), "x"))
        self.forgotten: list[Digest] = []

    async def find(self, digest: Digest, layout: PieceLayout) -> Torrent | None:
        await self.answering.wait()
        return self.torrent

    async def count_peers(self, torrent: Torrent) -> int:
        return 0

    def forget(self, digest: Digest) -> None:
        self.forgotten.append(digest)


class Swarming:
    """An agent whose BitTorrent does not start."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.torrents = Torrents()
        self.opened = 0
        self.answering = asyncio.Event()
        self.answering.set()

    def policy_of(self, blob: Digest) -> str:
        return self.policy

    async def open(self) -> Any:
        self.opened += 1
        await self.answering.wait()
        raise Unavailable("it does not listen")

    def left(self, blob: Blob, peers: object, done: object) -> None: ...


class Context:
    """An agent that notes what its pull does."""

    host, tls, kept, peer_wait_s = "h1", None, None, 0.0
    vicinity = Vicinity("127.0.0.1")

    def __init__(self, policy: str) -> None:
        self.uplink, self.sources, self.writers = Uplink(), Sources(), Counter[Digest]()
        self.swarming = Swarming(policy)
        self.story: list[str] = []
        self.holdings: list[bool] = []

    def pacer_of(self, blob: Digest) -> None:
        return None

    def proof(self, blob: Digest) -> tuple[str, None]:
        return "", None

    def ask_ticket(self, blob: Digest, holding: object, *, refused: bool = False) -> None:
        pass

    def is_revoked(self, host: str) -> bool:
        return False

    def send_to_tracker(self, message: object) -> None:
        if isinstance(message, Holding):
            self.holdings.append(message.swarm)


class Rig:
    """A pull of a blob, and its agent."""

    def __init__(self, store: BlobStore, policy: str) -> None:
        pieces = PieceList.of_stream(io.BytesIO(DATA), len(DATA))
        self.context: Any = Context(policy)
        self.blob = store.begin(digest_of(DATA), pieces)
        self.plan = Plan(self.blob.digest, (StripePlan(0, Source("h2", "h2:1")),))

    @property
    def swarming(self) -> Swarming:
        swarming: Swarming = self.context.swarming
        return swarming

    def begin(self) -> BlobPull:
        pull = BlobPull(self.blob, self.context, tracker_present=True)
        pull.start()
        return pull


@pytest.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[str], Rig]]:
    store = BlobStore(tmp_path)
    made: list[Rig] = []
    pulls: list[BlobPull] = []

    def rig(policy: str) -> Rig:
        made.append(Rig(store, policy))
        context = made[-1].context

        class Incoming(IncomingStream):
            """An open stream that gives nothing: it never connects."""

            quiet = False

            def __init__(self, source: Source, request: Any, layout: Any, write: Any, post: Any, **rest: Any) -> None:
                super().__init__(source, request, layout, write, post, **rest)
                self._post = post

            def start(self) -> None:
                context.story.append(f"stream from {self.source.host}")

            def close(self) -> None:
                context.story.append("closed")
                self._post(StreamClosed(self.number, "closed"))

            finish_piece_and_close = close

        monkeypatch.setattr(streams, "IncomingStream", Incoming)
        begin = made[-1].begin
        made[-1].begin = lambda: pulls.append(begin()) or pulls[-1]  # type: ignore[method-assign, func-returns-value]
        return made[-1]

    yield rig
    for pull in pulls:
        pull.reject(Unavailable("the agent stops"))
    await asyncio.sleep(0.01)
    store.close()


async def test_a_swarm_waits_for_a_writer_of_an_earlier_pull(make: Callable[[str], Rig]) -> None:
    rig = make("swarm")
    rig.context.writers[rig.blob.digest] = 1
    rig.swarming.torrents.answering.set()
    pull = rig.begin()
    await asyncio.sleep(2 * TICK_S)
    assert rig.swarming.opened == 0
    rig.context.writers[rig.blob.digest] -= 1
    await until(lambda: rig.swarming.opened == 1)
    assert not pull.done.done()


async def test_where_bittorrent_fails_the_trees_go_on(make: Callable[[str], Rig]) -> None:
    """And stay: it is not tried again for this blob."""
    rig = make("swarm")
    pull = rig.begin()
    pull.planned(rig.plan)
    assert rig.context.story == []
    rig.swarming.torrents.answering.set()
    await until(lambda: rig.context.story == ["stream from h2"])
    assert rig.swarming.opened == 1
    assert rig.context.writers == {rig.blob.digest: 1}
    await asyncio.sleep(2 * TICK_S)
    assert rig.swarming.opened == 1


async def test_the_tracker_learns_that_no_swarm_brings_the_blob(make: Callable[[str], Rig]) -> None:
    rig = make("swarm")
    pull = rig.begin()
    assert pull.holding().swarm
    rig.swarming.torrents.torrent = None
    rig.swarming.torrents.answering.set()
    await until(lambda: rig.context.holdings[-1:] == [False])
    assert not pull.holding().swarm


async def test_without_a_torrent_nothing_is_broken_off(make: Callable[[str], Rig]) -> None:
    rig = make("auto")
    rig.swarming.torrents.torrent = None
    rig.swarming.torrents.answering.set()
    pull = rig.begin()
    pull.planned(rig.plan)
    pull.tracker_changed(False)
    await asyncio.sleep(2 * TICK_S)
    assert rig.context.story == ["stream from h2"]


async def test_a_torrent_of_another_blob_is_forgotten(make: Callable[[str], Rig]) -> None:
    rig = make("auto")
    pull = rig.begin()
    rig.context.writers[rig.blob.digest] += 1
    pull._mail.post(StreamClosed(SWARM, "corrupt", "another blob"))
    await until(lambda: rig.swarming.torrents.forgotten == [rig.blob.digest])


async def test_a_pull_that_ends_waits_for_its_transfer(make: Callable[[str], Rig]) -> None:
    rig = make("swarm")
    rig.swarming.torrents.answering.set()
    rig.swarming.answering.clear()
    pull = rig.begin()
    await until(lambda: rig.swarming.opened == 1)
    pull.reject(Unavailable("the agent stops"))
    await asyncio.sleep(0.05)
    assert not pull.done.done()
    assert rig.context.writers == {rig.blob.digest: 1}
    rig.swarming.answering.set()
    with pytest.raises(Unavailable, match="the agent stops"):
        await asyncio.wait_for(pull.done, 60)
    assert not rig.context.writers, "nothing is begun any more"


async def test_a_peer_that_cannot_be_taken_for_want_of_descriptors_is_taken_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else listens at the port before BitTorrent runs."""
    monkeypatch.setattr(service, "ACCEPT_PAUSE_S", 0.05)
    listener, started = service.LazyListener("127.0.0.1", 0), asyncio.Event()

    async def start() -> None:
        listener.close()
        started.set()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as peer:
        taken = os.dup(0)
        os.close(taken)
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken, hard))
        try:
            listener.wait(start)
            peer.setblocking(False)
            await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", listener.port))
            await asyncio.sleep(0.2)
            assert not started.is_set()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        async with asyncio.timeout(30):
            await started.wait()
    await listener.stop()
    assert [record.levelname for record in caplog.records] == ["WARNING"], "it is said once"
