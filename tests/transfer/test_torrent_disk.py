"""A disk that fills up while BitTorrent writes to it."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from swarm_rig import PIECE, Events, sample, seed_of, stored

from p2pdist.model.errors import DiskFull
from p2pdist.store.blobs.blob import content_digest
from p2pdist.store.store import BlobStore
from p2pdist.transfer.torrent.seeds import TorrentSeeds
from p2pdist.transfer.torrent.session import TorrentSession
from p2pdist.transfer.torrent.settings import TorrentSettings
from p2pdist.transfer.torrent.swarm import Swarm
from p2pdist.transfer.torrent.transfer import TorrentTransfer

COUNT = 24


@pytest.mark.root
def test_memory_that_others_took_meanwhile_is_a_full_disk(tmp_path: Path) -> None:
    """There space is not reserved: libtorrent hears of it when it writes. What is held by then is
    right, and a transfer goes on when there is space again."""
    found, place = sample(1, COUNT), tmp_path / "small"
    place.mkdir()
    with ExitStack() as stack:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={(COUNT + 40) * PIECE}", "tmpfs", place], check=True)
        stack.callback(lambda: subprocess.run(["umount", place], check=True))
        sessions = [TorrentSession(TorrentSettings("127.0.0.1", 0)) for _ in range(2)]
        for session in sessions:
            session.start()
            stack.callback(session.close)
        stores = [BlobStore(place / "store"), BlobStore(tmp_path / "source")]
        for store in stores:
            stack.callback(store.close)
        TorrentSeeds(sessions[1]).keep([seed_of(stored(stores[1], found), found.torrent)])
        blob, swarm = stores[0].begin(found.digest, found.pieces), Swarm(peers=(("127.0.0.1", sessions[1].port),))
        filler = place / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
            while file.write(bytes(PIECE)):
                pass
        filler.open("r+b").truncate(filler.stat().st_size - COUNT // 2 * PIECE)
        events = Events()
        TorrentTransfer(sessions[0], blob, found.torrent, swarm, events).start()
        assert isinstance(events.closed().error, DiskFull)
        assert len(blob.have) < COUNT
        assert blob.verify() == []
        filler.unlink()
        events = Events()
        TorrentTransfer(sessions[0], blob, found.torrent, swarm, events).start()
        assert events.closed().reason == "done"
        blob.finish()
        assert content_digest(blob) == found.digest
