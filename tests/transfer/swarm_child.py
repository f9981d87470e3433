"""A process that fetches a blob by BitTorrent and says which pieces it holds, until it is killed;
run by test_torrent_transfer.

swarm_child.py STORE SEED PIECES PORT
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from swarm_rig import sample

from p2pdist.store.store import BlobStore
from p2pdist.transfer.stream.events import PieceReceived, StreamEvent
from p2pdist.transfer.torrent.session import TorrentSession
from p2pdist.transfer.torrent.settings import TorrentSettings
from p2pdist.transfer.torrent.swarm import Swarm
from p2pdist.transfer.torrent.transfer import TorrentTransfer


def tell(event: StreamEvent) -> None:
    if isinstance(event, PieceReceived) and event.ok:
        os.write(1, f"{event.piece}\n".encode())


if __name__ == "__main__":
    root, seed, pieces, port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    found = sample(seed, pieces)
    session = TorrentSession(TorrentSettings("127.0.0.1", 0))
    session.start()
    blob = BlobStore(root).begin(found.digest, found.pieces)
    TorrentTransfer(session, blob, found.torrent, Swarm(peers=(("127.0.0.1", port),)), tell).start()
    signal.pause()
