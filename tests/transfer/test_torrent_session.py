"""The session starts where it is told, ends within seconds whatever is under way, and costs nothing
before."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ports import free_port
from swarm_rig import Events, Peer, sample, seed_of, stopped, stored, wait_until

from p2pdist.model.errors import Unavailable, UsageError
from p2pdist.store.blobs.blob import content_digest
from p2pdist.store.store import BlobStore
from p2pdist.transfer.torrent.seeds import TorrentSeeds
from p2pdist.transfer.torrent.session import TorrentSession
from p2pdist.transfer.torrent.settings import TorrentSettings
from p2pdist.transfer.torrent.swarm import Swarm
from p2pdist.transfer.torrent.transfer import TorrentTransfer


def test_libtorrent_is_not_loaded_before_a_session_starts() -> None:
    """Agents without BitTorrent do not pay for it."""
    program = (
        "import sys, p2pdist.transfer.torrent.seeds, p2pdist.transfer.torrent.transfer as t;"
        "from p2pdist.transfer.torrent.settings import TorrentSettings;"
        "t.TorrentSession(TorrentSettings('127.0.0.1', 0)); sys.exit('libtorrent' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_port_is_the_one_that_was_given_or_none() -> None:
    """Where somebody listens already a session does not move to the next port; it says so."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)), pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
        TorrentSession(TorrentSettings("127.0.0.1", port)).start()
    session = TorrentSession(TorrentSettings("127.0.0.1", port))
    session.start()
    assert session.port == port
    assert session.close()


def test_a_session_that_is_closed_while_it_starts_ends() -> None:
    """As when an agent is told to stop at the moment in which its first peer connects."""
    session = TorrentSession(TorrentSettings("127.0.0.1", 0))
    begins, goes_on, closed = threading.Event(), threading.Event(), []
    start = session._thread.start

    def held() -> None:
        begins.set()
        assert goes_on.wait(60)
        start()

    session._thread.start = held  # type: ignore[method-assign]
    starter = threading.Thread(target=session.start)
    starter.start()
    assert begins.wait(60)
    closer = threading.Thread(target=lambda: closed.append(session.close()))
    closer.start()
    closer.join(0.2)  # enough for one that does not wait to fail
    goes_on.set()
    starter.join(60)
    closer.join(60)
    assert closed == [True]


def test_a_session_that_was_closed_does_not_start() -> None:
    session = TorrentSession(TorrentSettings("127.0.0.1", 0))
    assert session.close()
    with pytest.raises(Unavailable):
        session.start()
    assert session.close()


@pytest.mark.parametrize("network", ["datacenter", "wan"])
def test_a_blob_comes_over_either_kind_of_network(tmp_path: Path, network: str) -> None:
    """From a session set up the same way."""
    found = sample(1, 24)
    settings = TorrentSettings("127.0.0.1", 0, "wan" if network == "wan" else "datacenter")
    sessions = [TorrentSession(settings), TorrentSession(settings)]
    stores = [BlobStore(tmp_path / "0"), BlobStore(tmp_path / "1")]
    try:
        for session in sessions:
            session.start()
        TorrentSeeds(sessions[0]).keep([seed_of(stored(stores[0], found), found.torrent)])
        blob, events = stores[1].begin(found.digest, found.pieces), Events()
        swarm = Swarm(peers=(("127.0.0.1", sessions[0].port),))
        TorrentTransfer(sessions[1], blob, found.torrent, swarm, events).start()
        assert events.closed().reason == "done"
        blob.finish()
        assert content_digest(blob) == found.digest
    finally:
        ended = [session.close() for session in sessions]
        for store in stores:
            store.close()
    assert all(ended)


def test_a_session_that_closes_ends_what_is_under_way(tmp_path: Path) -> None:
    """Transfers are told, files are free, threads are gone; a tracker that never answers does not
    hold it up."""
    found, other = sample(2, 24), sample(3, 4)
    peer = Peer(found.torrent, found.data, pieces_max=8)
    store = BlobStore(tmp_path)
    session = TorrentSession(TorrentSettings("127.0.0.1", 0))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        try:
            session.start()
            tracker = f"http://127.0.0.1:{silent.getsockname()[1]}/announce"
            TorrentSeeds(session).keep([seed_of(stored(store, other), other.torrent, swarm=Swarm((tracker,)))])
            blob, events = store.begin(found.digest, found.pieces), Events()
            TorrentTransfer(session, blob, found.torrent, Swarm((tracker,), (peer.address,)), events).start()
            wait_until(lambda: len(events.pieces) >= 4, "some pieces")
            assert session.close(), "within the time for it"
            assert events.closed().reason == "closed"
            assert not blob.in_use
            assert "bittorrent" not in {thread.name for thread in threading.enumerate()}
            assert session.close(), "once more changes nothing"
        finally:
            peer.stop()
            session.close()
            store.close()


def test_who_comes_too_late_is_told(tmp_path: Path) -> None:
    """A transfer on a session that has closed, or was never started, fails; a seed is forgotten."""
    found = sample(4, 2)
    session = TorrentSession(TorrentSettings("127.0.0.1", 0))
    store = BlobStore(tmp_path)
    try:
        blob, events = store.begin(found.digest, found.pieces), Events()
        transfer = TorrentTransfer(session, blob, found.torrent, Swarm(), events)
        transfer.start()
        closed = events.closed()
        assert closed.reason == "failed"
        assert isinstance(closed.error, Unavailable)
        assert stopped(transfer)
        assert not blob.in_use
        seeds = TorrentSeeds(session)
        seeds.keep([seed_of(blob, found.torrent)])
        assert seeds.digests == set()
        assert session.close()
    finally:
        store.close()


def test_lost_alerts_lose_no_piece(tmp_path: Path) -> None:
    """Where more happened than the queue of alerts holds, members ask how things stand. The pieces
    that are held are told of, too, when a torrent is added: enough to fill a short queue."""
    found = sample(5, 300)
    peer = Peer(found.torrent, found.data)
    store = BlobStore(tmp_path)
    session = TorrentSession(TorrentSettings("127.0.0.1", 0))
    try:
        session.start()
        session.call(lambda: session._apply({"alert_queue_size": 20}))
        blob, events = store.begin(found.digest, found.pieces), Events()
        for piece in range(200):
            assert blob.write(piece, found.piece(piece))
        TorrentTransfer(session, blob, found.torrent, Swarm(peers=(peer.address,)), events).start()
        assert events.closed().reason == "done"
        assert sorted(events.pieces) == list(range(200, 300))
        blob.finish()
        assert content_digest(blob) == found.digest
    finally:
        peer.stop()
        session.close()
        store.close()


def test_limits_hold_for_local_peers_too(tmp_path: Path) -> None:
    """libtorrent would exempt them. At this rate the blob would take minutes; once the limit is
    lifted it comes."""
    found = sample(6, 100)
    peer = Peer(found.torrent, found.data)
    store = BlobStore(tmp_path)
    session = TorrentSession(TorrentSettings("127.0.0.1", 0, download_bytes_s=32 << 10))
    try:
        session.start()
        blob, events = store.begin(found.digest, found.pieces), Events()
        TorrentTransfer(session, blob, found.torrent, Swarm(peers=(peer.address,)), events).start()
        wait_until(lambda: len(peer.sent) > 0, "the first block")
        time.sleep(0.5)
        assert len(events.pieces) < 50
        session.set_limits(0, 0)
        assert events.closed().reason == "done"
    finally:
        peer.stop()
        session.close()
        store.close()


@pytest.mark.parametrize(
    "arguments",
    [("localhost", 1), ("", 0), ("127.0.0.1", -1), ("127.0.0.1", 65536), ("::", 0, "lan"), ("::", 0, "wan", -1)],
)
def test_settings_that_cannot_be(arguments: tuple[str, int]) -> None:
    with pytest.raises(UsageError):
        TorrentSettings(*arguments)
