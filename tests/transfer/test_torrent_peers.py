"""A host has few neighbours for a torrent that it fetches, and more when those give nothing."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import libtorrent
import pytest
from swarm_rig import Events, Peer, sample, wait_until

from p2pdist.store.store import BlobStore
from p2pdist.transfer.torrent.session import TorrentSession
from p2pdist.transfer.torrent.settings import FETCH_PEERS_MAX, TorrentSettings
from p2pdist.transfer.torrent.swarm import Swarm
from p2pdist.transfer.torrent.transfer import STILL_S, TorrentTransfer, WrongPieces


def test_pieces_are_locked_where_no_peer_that_would_give_one_is_asked_for_any() -> None:
    wrong, choked = WrongPieces(), libtorrent.peer_info.remote_choked

    def locked(now: float, *peers: tuple[int, list[bool], int]) -> bool:
        known = [SimpleNamespace(flags=flags, pieces=has, download_queue_length=asked) for flags, has, asked in peers]
        handle: Any = SimpleNamespace(get_peer_info=lambda: known)
        return wrong.locked(libtorrent, handle, now)

    giver, idle = (0, [False, True], 0), STILL_S
    assert not locked(0.0, giver), "nothing came wrong"
    wrong.failed(1, 0.0)
    assert not locked(idle - 0.1, giver), "too early"
    assert locked(idle, giver)
    assert not locked(2 * idle, giver, (0, [False, True], 1)), "it is asked for"
    assert locked(3 * idle, giver, (0, [True, False], 1)), "it is asked for another piece"
    assert not locked(4 * idle, (choked, [False, True], 0), (0, [True, False], 0), (0, [], 0)), "none would give it"
    wrong.passed(1, 4 * idle)
    assert not locked(6 * idle, giver), "it has come"


@pytest.mark.slow
def test_silent_neighbours_are_few_at_first_and_keep_nobody_waiting_for_long(tmp_path: Path) -> None:
    """Of thirty peers that answer nothing it meets no more than its share; then it meets more,
    among them the one that gives."""
    found = sample(9, 48)
    with ExitStack() as stack:
        store = BlobStore(tmp_path / "store")
        stack.callback(store.close)
        session = TorrentSession(TorrentSettings("127.0.0.1", 0))
        session.start()
        stack.callback(session.close)
        silent = [Peer(found.torrent, found.data, f"127.0.0.{number}", pieces_max=0) for number in range(2, 32)]
        for peer in silent:
            stack.callback(peer.stop)
        events = Events()
        transfer = TorrentTransfer(
            session,
            store.begin(found.digest, found.pieces),
            found.torrent,
            Swarm(peers=tuple(peer.address for peer in silent)),
            events,
        )
        transfer.start()
        wait_until(lambda: sum(peer.connections for peer in silent) == FETCH_PEERS_MAX, "neighbours")
        giver = Peer(found.torrent, found.data, "127.0.0.77")
        stack.callback(giver.stop)
        transfer.add_peers([giver.address])
        assert not transfer.join(0.5), "there is a place for it at once"
        assert sum(peer.connections for peer in silent) == FETCH_PEERS_MAX
        assert events.closed().reason == "done"
        assert giver.pieces == set(range(48))
