"""A torrent and where its peers are found, in libtorrent's form."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from p2pdist.model.errors import NotFound, P2PDistError, UsageError
from p2pdist.model.torrent import Torrent

if TYPE_CHECKING:
    from libtorrent import add_torrent_params

Address = tuple[str, int]
"""IP address and port."""

PEERS_MAX = 1000
URLS_MAX = 64
URL_CHARACTERS_MAX = 2000


@dataclass(frozen=True, slots=True)
class Swarm:
    """Where peers are found: the announce URLs of trackers (BEP 3, BEP 15), peers, the URLs of web
    seeds (BEP 19)."""

    trackers: tuple[str, ...] = ()
    peers: tuple[Address, ...] = ()
    web_seeds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises UsageError."""
        if len(self.trackers) + len(self.web_seeds) > URLS_MAX:
            raise UsageError(f"a swarm is given with up to {URLS_MAX} trackers and web seeds")
        for url in self.trackers:
            _check_url(url, "tracker", ("http", "https", "udp"))
        for url in self.web_seeds:
            _check_url(url, "web seed", ("http", "https"))
        check_peers(self.peers)


class OpenFile:
    """A file that libtorrent opens even after it was renamed, by way of a descriptor of this
    process (/proc/self/fd, proc(5))."""

    def __init__(self) -> None:
        self._fd = -1

    def open(self, path: Path) -> Path:
        """A path that names this file until `close`. Raises NotFound and P2PDistError."""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFound(f"{path} is gone") from error
        except OSError as error:
            raise P2PDistError(f"{path} cannot be opened: {error.strerror}", remedy="Check its permissions") from error
        return Path(f"/proc/self/fd/{self._fd}")

    def close(self) -> None:
        """Close the descriptor, once libtorrent has closed the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _check_url(url: str, kind: str, schemes: tuple[str, ...]) -> None:
    try:
        parts = urlsplit(url)
        fine = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine or len(url) > URL_CHARACTERS_MAX or not url.isascii() or not url.isprintable():
        raise UsageError(f"a BitTorrent {kind} cannot have the address {url[:200]!r}")


def check_peers(peers: Sequence[Address]) -> None:
    """Raises UsageError for too many peers, and for a peer without an IP address and port."""
    if len(peers) > PEERS_MAX:
        raise UsageError(f"a swarm is given with up to {PEERS_MAX} peers")
    for host, port in peers:
        try:
            ip_address(host)
        except ValueError as error:
            raise UsageError(f"a BitTorrent peer is given by IP address, not as {host[:100]!r}") from error
        if not 0 < port < 1 << 16:
            raise UsageError(f"a BitTorrent peer cannot have port {port}")


def priorities(count: int) -> list[int]:
    """libtorrent's priority of each piece of a blob, from 7 at the beginning to 4 at the end: the
    scarcest piece still comes first, among equals the earlier one. Content that comes roughly in
    order can be hashed as a whole while it comes."""
    return [7 - 4 * piece // count for piece in range(count)]


def torrent_parameters(lt: Any, torrent: Torrent, path: Path, swarm: Swarm) -> add_torrent_params:
    """What libtorrent is to add: a torrent of one file, which is at `path` whatever the torrent
    calls it. It starts at once; libtorrent believes which pieces are there, and reads nothing to
    check that."""
    params: add_torrent_params = lt.load_torrent_buffer(torrent.metainfo(""))
    params.save_path = str(path.parent)
    params.renamed_files = {0: path.name}
    params.flags &= ~(lt.torrent_flags.auto_managed | lt.torrent_flags.paused)
    params.flags |= lt.torrent_flags.no_verify_files | lt.torrent_flags.duplicate_is_error
    params.trackers = list(swarm.trackers)
    params.url_seeds = list(swarm.web_seeds)
    params.peers = list(swarm.peers)
    return params
