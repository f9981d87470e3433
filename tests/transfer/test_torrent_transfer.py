"""Blobs are fetched from real BitTorrent swarms on loopback, into the store's own file, and nothing
counts before it has verified."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from swarm_rig import PIECE, Aria, Events, Peer, Sample, open_files, sample, stopped, torrent_of, wait_until

from p2pdist.model.bencode import encode
from p2pdist.model.errors import Conflict, P2PDistError, UsageError
from p2pdist.model.torrent import Torrent
from p2pdist.store.blobs.blob import Blob, content_digest
from p2pdist.store.store import BlobStore
from p2pdist.transfer.stream.events import Mailbox, PieceReceived, StreamClosed, StreamEvent
from p2pdist.transfer.torrent.session import TorrentSession
from p2pdist.transfer.torrent.settings import TorrentSettings
from p2pdist.transfer.torrent.swarm import Swarm
from p2pdist.transfer.torrent.transfer import TorrentTransfer

COUNT = 48


@dataclass
class Host:
    """A store and a session of its own, and what is to be stopped at the end."""

    store: BlobStore
    session: TorrentSession
    stack: ExitStack

    def peer(self, torrent: Torrent, data: bytes, *, host: str = "127.0.0.1", pieces_max: int = 1 << 30) -> Peer:
        peer = Peer(torrent, data, host, pieces_max)
        self.stack.callback(peer.stop)
        return peer

    def blob(self, found: Sample) -> Blob:
        return self.store.begin(found.digest, found.pieces)

    def fetch(self, found: Sample, swarm: Swarm, torrent: Torrent | None = None) -> tuple[TorrentTransfer, Events]:
        """Begin to fetch."""
        events = Events()
        transfer = TorrentTransfer(self.session, self.blob(found), torrent or found.torrent, swarm, events)
        transfer.start()
        return transfer, events


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with ExitStack() as stack:
        store = BlobStore(tmp_path / "store")
        stack.callback(store.close)
        session = TorrentSession(TorrentSettings("127.0.0.1", 0))
        session.start()
        stack.callback(lambda: _closed(session))
        yield Host(store, session, stack)


def _closed(session: TorrentSession) -> None:
    assert session.close(), "libtorrent has not ended"


def from_peers(*peers: Peer) -> Swarm:
    return Swarm(peers=tuple(peer.address for peer in peers))


def finished(blob: Blob, found: Sample) -> bool:
    """Make a blob complete, and read it all."""
    blob.finish()
    return content_digest(blob) == found.digest


def test_a_blob_comes_from_an_aria2_seed_into_the_store_s_own_file(host: Host, tmp_path: Path) -> None:
    """Every piece is told of once; the file that libtorrent wrote is the one that becomes the
    blob."""
    found = sample(1, COUNT)
    aria = Aria(tmp_path / "aria", found, seed=True)
    host.stack.callback(aria.stop)
    aria.wait_listening()
    blob = host.blob(found)
    inode = blob.path.stat().st_ino
    _transfer, events = host.fetch(found, Swarm(peers=(aria.address,)), aria.torrent)
    assert events.closed().reason == "done"
    assert sorted(events.pieces) == list(range(COUNT))
    assert not blob.in_use
    assert open_files(blob.path) == 1, "the store's own descriptor"
    assert finished(blob, found)
    assert blob.path.stat().st_ino == inode
    assert list((tmp_path / "store" / "partial").iterdir()) == []


def test_pieces_that_are_held_are_not_asked_for(host: Host) -> None:
    """A stripe came by trees before: the swarm gives the rest, each block of it once."""
    found = sample(2, COUNT)
    blob = host.blob(found)
    for piece in range(0, COUNT, 2):
        assert blob.write(piece, found.piece(piece))
    peer = host.peer(found.torrent, found.data)
    _transfer, events = host.fetch(found, from_peers(peer))
    assert events.closed().reason == "done"
    assert peer.pieces == set(range(1, COUNT, 2))
    assert len(peer.sent) == len(set(peer.sent)) == -(-(len(found.data) - PIECE * COUNT // 2) // (16 << 10))
    assert sorted(events.pieces) == list(range(1, COUNT, 2))
    assert finished(blob, found)


def test_a_stopped_transfer_is_finished_by_trees(host: Host) -> None:
    """After stop() the file is free: what is lacking is written over what was under way."""
    found = sample(3, COUNT)
    peer = host.peer(found.torrent, found.data, pieces_max=COUNT // 2)
    transfer, events = host.fetch(found, from_peers(peer))
    wait_until(lambda: len(events.pieces) >= COUNT // 4, "a part of the pieces")
    blob = host.blob(found)
    assert stopped(transfer)
    assert events.closed().reason == "closed"
    assert open_files(blob.path) == 1, "the store's own descriptor"
    assert set(events.pieces) == set(blob.have)
    assert blob.verify() == []
    for piece in blob.have.missing():
        assert blob.write(piece, found.piece(piece))
    assert finished(blob, found)
    assert stopped(transfer), "once more changes nothing"


def test_trees_then_torrent_then_trees(host: Host) -> None:
    """Transports follow each other as often as one likes."""
    found = sample(4, COUNT)
    blob = host.blob(found)
    for piece in range(10):
        assert blob.write(piece, found.piece(piece))
    peer = host.peer(found.torrent, found.data, pieces_max=10)
    transfer, events = host.fetch(found, from_peers(peer))
    wait_until(lambda: len(events.pieces) >= 5, "some pieces")
    assert stopped(transfer)
    for piece in blob.have.missing()[:10]:
        assert blob.write(piece, found.piece(piece))
    held = set(blob.have)
    last = host.peer(found.torrent, found.data)
    transfer, events = host.fetch(found, from_peers(last))
    assert events.closed().reason == "done"
    assert last.pieces.isdisjoint(held)
    assert finished(blob, found)


def test_a_killed_process_loses_no_piece_that_it_held(host: Host, tmp_path: Path) -> None:
    """The next one opens the store and asks for what is lacking alone."""
    found = sample(5, COUNT)
    peer = host.peer(found.torrent, found.data, pieces_max=COUNT // 2)
    root = tmp_path / "killed"
    child = subprocess.Popen(
        [sys.executable, Path(__file__).parent / "swarm_child.py", root, "5", str(COUNT), str(peer.address[1])],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        told = {int(child.stdout.readline()) for _ in range(COUNT // 4)}
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    host.store = BlobStore(root)
    host.stack.callback(host.store.close)
    blob = host.blob(found)
    held = set(blob.have)
    assert told <= held < set(range(COUNT))
    assert blob.verify() == []
    rest = host.peer(found.torrent, found.data)
    _transfer, events = host.fetch(found, from_peers(rest))
    assert events.closed().reason == "done"
    assert rest.pieces == set(range(COUNT)) - held
    assert finished(blob, found)


@pytest.mark.parametrize("wrong", [range(COUNT), range(7, 8)], ids=["all", "one"])
def test_a_torrent_that_lies_never_becomes_a_blob(host: Host, wrong: range) -> None:
    """Pieces that agree with the torrent and not with the piece list are not held, and the transfer
    ends."""
    found = sample(6, COUNT)
    lie = bytearray(found.data)
    for piece in wrong:
        lie[piece * PIECE + 5] ^= 1
    torrent = torrent_of(bytes(lie))
    peer = host.peer(torrent, bytes(lie))
    _transfer, events = host.fetch(found, from_peers(peer), torrent)
    closed = events.closed()
    assert closed.reason == "corrupt"
    assert [event.piece in wrong for event in events.all if isinstance(event, PieceReceived) and not event.ok] == [True]
    blob = host.blob(found)
    assert set(blob.have).isdisjoint(wrong)
    assert set(blob.have) == set(events.pieces)
    assert blob.verify() == []
    with pytest.raises(Conflict):
        blob.finish()
    for piece in blob.have.missing():
        assert blob.write(piece, found.piece(piece))
    assert finished(blob, found)


def test_a_peer_that_sends_garbage_is_banned(host: Host) -> None:
    """A good seed gives what the bad one spoiled; the bad one is not spoken to again."""
    found = sample(7, COUNT)
    bad = host.peer(found.torrent, bytes(len(found.data)), host="127.0.0.2")
    transfer, events = host.fetch(found, from_peers(bad))
    wait_until(lambda: host.session.peers_banned > 0, "the ban")
    good = host.peer(found.torrent, found.data)
    transfer.add_peers([bad.address, good.address])
    assert events.closed().reason == "done"
    assert bad.sent
    assert bad.connections == 1
    assert sorted(events.pieces) == list(range(COUNT))
    assert finished(host.blob(found), found)


@pytest.mark.slow
def test_pieces_that_came_wrong_and_stay_locked_come_from_a_good_seed(host: Host) -> None:
    """libtorrent 2.1.1 now and then keeps what came wrong locked for ever, as it is here by its
    priority; it begins anew then, and the bad peer is still not spoken to again."""
    found = sample(7, COUNT)
    bad = host.peer(found.torrent, bytes(len(found.data)), host="127.0.0.2")
    transfer, events = host.fetch(found, from_peers(bad))
    wait_until(lambda: host.session.peers_banned > 0, "the ban")
    handle, session = transfer._handle, host.session._session
    assert handle is not None and session is not None
    session.apply_settings({"close_redundant_connections": False})
    handle.prioritize_pieces([0] * COUNT)
    good = host.peer(found.torrent, found.data)
    transfer.add_peers([bad.address, good.address])
    assert events.closed().reason == "done"
    assert bad.connections == 1
    assert good.connections == 2, "before and after"
    assert sorted(events.pieces) == list(range(COUNT))
    assert finished(host.blob(found), found)


class _Web(BaseHTTPRequestHandler):
    """Answers announces of the first version's info hash with `peers`, and ranges of `content`."""

    protocol_version = "HTTP/1.1"
    content = b""
    peers = b""
    info_hash = b""

    def do_GET(self) -> None:
        if self.path.startswith("/announce"):
            asked = parse_qs(urlsplit(self.path).query, encoding="latin-1")
            named = asked["info_hash"] == [self.info_hash.decode("latin-1")]
            self._answer(200, encode({b"interval": 60, b"peers": self.peers if named else b""}))
            return
        start, end = (int(number) for number in self.headers["Range"].removeprefix("bytes=").split("-"))
        self._answer(206, self.content[start : end + 1], f"bytes {start}-{end}/{len(self.content)}")

    def _answer(self, status: int, body: bytes, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def web(host: Host) -> Callable[..., str]:
    """Starts a web server that gives this content, and these peers of a torrent; returns its
    address."""

    def start(content: bytes = b"", peers: bytes = b"", info_hash: bytes = b"") -> str:
        handler = type("Handler", (_Web,), {"content": content, "peers": peers, "info_hash": info_hash})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        host.stack.callback(lambda: (server.shutdown(), thread.join(), server.server_close()))
        return f"http://127.0.0.1:{server.server_port}"

    return start


def test_a_tracker_tells_of_peers(host: Host, web: Callable[..., str]) -> None:
    """Nothing but an announce URL is given (BEP 3, BEP 23)."""
    found = sample(8, COUNT)
    peer = host.peer(found.torrent, found.data)
    compact = bytes((127, 0, 0, 1)) + peer.address[1].to_bytes(2, "big")
    tracker = web(peers=compact, info_hash=found.torrent.info_hash_v1)
    _transfer, events = host.fetch(found, Swarm(trackers=(tracker + "/announce",)))
    assert events.closed().reason == "done"
    assert finished(host.blob(found), found)


def test_a_web_seed_gives_what_no_peer_has(host: Host, web: Callable[..., str]) -> None:
    """Half comes from a peer that then falls silent, the rest from a web seed (BEP 19)."""
    found = sample(9, COUNT)
    peer = host.peer(found.torrent, found.data, pieces_max=COUNT // 2)
    transfer, events = host.fetch(found, from_peers(peer))
    wait_until(lambda: len(events.pieces) >= COUNT // 4, "a part of the pieces")
    assert stopped(transfer)
    blob = host.blob(found)
    lacking = sum(blob.layout.length(piece) for piece in blob.have.missing())
    _transfer, events = host.fetch(found, Swarm(web_seeds=(web(found.data) + "/content",)))
    assert events.closed().reason == "done"
    assert sum(blob.layout.length(piece) for piece in events.pieces) == lacking
    assert finished(blob, found)


async def test_events_reach_the_loop_through_a_mailbox(host: Host) -> None:
    """In the form of streams: pieces, then the end, once."""
    found = sample(10, COUNT)
    peer = host.peer(found.torrent, found.data)
    got: list[StreamEvent] = []
    over = asyncio.Event()

    def deliver(batch: list[StreamEvent]) -> None:
        got.extend(batch)
        if isinstance(got[-1], StreamClosed):
            over.set()

    mailbox: Mailbox[StreamEvent] = Mailbox(asyncio.get_running_loop(), deliver)
    transfer = TorrentTransfer(host.session, host.blob(found), found.torrent, from_peers(peer), mailbox.post, number=7)
    transfer.start()
    async with asyncio.timeout(60):
        await over.wait()
    assert got[-1] == StreamClosed(7, "done")
    assert {event.stream for event in got} == {7}
    assert len(got) == COUNT + 1
    assert transfer.join(60)


class LateBlob:
    """A real blob whose file gets what libtorrent writes a little later: import_piece() looks in
    vain while `late` says so."""

    def __init__(self, blob: Blob, late: Callable[[int], bool]) -> None:
        self.digest, self.layout, self.have = blob.digest, blob.layout, blob.have
        self.path, self.hold, self.release = blob.path, blob.hold, blob.release
        self._blob, self._late = blob, late

    def import_piece(self, piece: int) -> bool:
        return not self._late(piece) and self._blob.import_piece(piece)


def test_pieces_that_reach_the_file_late_are_looked_at_again(host: Host) -> None:
    """libtorrent tells of a piece before it has written it; that is no lie."""
    found = sample(18, COUNT)
    looks: Counter[int] = Counter()

    def late(piece: int) -> bool:
        looks[piece] += 1
        return looks[piece] <= 2

    peer = host.peer(found.torrent, found.data)
    events = Events()
    blob = host.blob(found)
    TorrentTransfer(host.session, LateBlob(blob, late), found.torrent, from_peers(peer), events).start()
    assert events.closed().reason == "done"
    assert sorted(events.pieces) == list(range(COUNT))
    assert finished(blob, found)


def test_pieces_that_reach_the_file_at_the_end_are_held(host: Host) -> None:
    """What libtorrent wrote out when it was stopped counts."""
    found = sample(19, COUNT)
    seen: set[int] = set()

    def late(piece: int) -> bool:
        seen.add(piece)
        return transfer._closed is None

    peer = host.peer(found.torrent, found.data, pieces_max=COUNT // 2)
    events = Events()
    blob = host.blob(found)
    transfer = TorrentTransfer(host.session, LateBlob(blob, late), found.torrent, from_peers(peer), events)
    transfer.start()
    wait_until(lambda: len(seen) >= COUNT // 4, "pieces that libtorrent has")
    transfer.close()
    assert events.closed().reason == "closed"
    assert seen == set(events.pieces) == set(blob.have)


def test_a_file_that_cannot_be_written_ends_the_transfer(host: Host) -> None:
    """The failure says which file; the hold on the blob ends."""
    found = sample(11, COUNT)
    blob, peer = host.blob(found), host.peer(found.torrent, found.data)
    with blob.held():  # else it is begun anew
        blob.path.unlink()
        blob.path.mkdir()
        _transfer, events = host.fetch(found, from_peers(peer))
        closed = events.closed()
        blob.path.rmdir()
    assert closed.reason == "failed"
    assert isinstance(closed.error, P2PDistError)
    assert str(blob.path) in closed.error.what
    assert not blob.in_use
    assert len(blob.have) == 0


def test_a_blob_that_lacks_nothing_is_done_at_once(host: Host) -> None:
    found = sample(12, 3)
    blob = host.blob(found)
    for piece in range(3):
        assert blob.write(piece, found.piece(piece))
    _transfer, events = host.fetch(found, Swarm())
    assert events.closed().reason == "done"
    assert events.pieces == []


def test_a_blob_of_one_piece(host: Host) -> None:
    """It has no bitmap on the disk."""
    found = sample(13, 1)
    peer = host.peer(found.torrent, found.data)
    _transfer, events = host.fetch(found, from_peers(peer))
    assert events.closed().reason == "done"
    assert finished(host.blob(found), found)


def test_one_torrent_is_fetched_once_at_a_time(host: Host) -> None:
    """The second ends, the first goes on."""
    found = sample(14, COUNT)
    peer = host.peer(found.torrent, found.data, pieces_max=COUNT // 2)
    first, first_events = host.fetch(found, from_peers(peer))
    wait_until(lambda: len(first_events.pieces) > 0, "the first piece")
    _second, second_events = host.fetch(found, from_peers(peer))
    assert isinstance(second_events.closed().error, Conflict)
    first.add_peers([host.peer(found.torrent, found.data).address])
    assert first_events.closed().reason == "done"
    assert finished(host.blob(found), found)


def test_a_transfer_that_is_closed_before_it_begins(host: Host) -> None:
    """It ends as closed, and asks nobody."""
    found = sample(15, 3)
    peer = host.peer(found.torrent, found.data)
    events = Events()
    transfer = TorrentTransfer(host.session, host.blob(found), found.torrent, from_peers(peer), events)
    transfer.close()
    transfer.start()
    assert events.closed().reason == "closed"
    assert events.pieces == []


def test_a_torrent_of_other_content_is_refused(host: Host) -> None:
    """By size already; names do not count."""
    found, other = sample(16, 3), sample(17, 4)
    with pytest.raises(UsageError, match="cut otherwise"):
        TorrentTransfer(host.session, host.blob(found), other.torrent, Swarm(), Events())


@pytest.mark.parametrize("peer", [("localhost", 1), ("127.0.0.1", 0), ("127.0.0.1", 65536), ("", 1)])
def test_peers_are_given_by_address(peer: tuple[str, int]) -> None:
    with pytest.raises(UsageError, match="peer"):
        Swarm(peers=(peer,))


@pytest.mark.parametrize(
    "url",
    ["", "localhost/announce", "ftp://host/x", "http://[::1/x", "http://h:0/x", "http://h:99999/x", "http://h/a b\n"],
)
def test_addresses_of_trackers_and_web_seeds_are_checked(url: str) -> None:
    with pytest.raises(UsageError, match="tracker"):
        Swarm(trackers=(url,))
    with pytest.raises(UsageError, match="web seed"):
        Swarm(web_seeds=(url,))


def test_a_swarm_has_limits() -> None:
    Swarm(trackers=("udp://host:1/announce",), web_seeds=("https://host/x",))
    with pytest.raises(UsageError, match="up to"):
        Swarm(trackers=("http://host/announce",) * 65)
    with pytest.raises(UsageError, match="up to"):
        Swarm(peers=(("127.0.0.1", 1),) * 1001)
