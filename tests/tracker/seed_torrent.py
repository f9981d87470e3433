"""A libtorrent client as a process of its own: `seed_torrent.py TORRENT DIRECTORY` takes part in
the torrent until it is ended, and says goodbye to the tracker then."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import libtorrent


def main(torrent: str, directory: str) -> None:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    settings = {
        "listen_interfaces": "127.0.0.1:0",
        "enable_dht": False,
        "enable_lsd": False,
        "enable_upnp": False,
        "enable_natpmp": False,
        "allow_multiple_connections_per_ip": True,
        "min_reconnect_time": 1,  # a connection that a busy machine did not take at once
        "stop_tracker_timeout": 50,  # seconds; a goodbye may take as long on a busy machine
        "alert_mask": libtorrent.alert.category_t.tracker_notification | libtorrent.alert.category_t.error_notification,
    }
    session = libtorrent.session(settings)
    wanted = libtorrent.load_torrent_buffer(Path(torrent).read_bytes())
    wanted.save_path = directory
    handle = session.add_torrent(wanted)
    while not ended.wait(0.2):
        status = handle.status()
        print(status.state, status.progress, status.num_peers, flush=True)
        for alert in session.pop_alerts():
            print(alert, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
