"""How much of a torrent comes from its web seeds (BEP 19)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from p2pdist.model.torrent import BLOCK_SIZE
from p2pdist.transfer.torrent_swarm import Address, Swarm

if TYPE_CHECKING:
    import libtorrent as lt

ENDPOINTS_MAX = 4096
_PORTS = {"http": 80, "https": 443}


class WebSeeds:
    """Remembers which blocks web seeds were asked for. Whoever was asked last is taken for the one
    that gave a block: when one has come libtorrent does not say so reliably. A web seed is known by
    its address, or by what libtorrent says of the connection."""

    def __init__(self, swarm: Swarm) -> None:
        self._addresses = {(url.hostname, url.port or _PORTS.get(url.scheme)) for url in map(urlsplit, swarm.web_seeds)}
        self._endpoints: dict[Address, bool] = {}
        self._blocks: dict[int, set[int]] = {}

    def asked(self, lt: Any, block: lt.block_downloading_alert) -> None:
        """Somebody was asked for a block."""
        asked = self._blocks.setdefault(block.piece_index, set())
        (asked.add if self._is_one(lt, block) else asked.discard)(block.block_index)

    def came(self, piece: int, length: int) -> int:
        """A piece of `length` bytes has come; returns how many of them web seeds gave."""
        return sum(min(BLOCK_SIZE, length - block * BLOCK_SIZE) for block in self._blocks.pop(piece, ()))

    def _is_one(self, lt: Any, block: lt.block_downloading_alert) -> bool:
        endpoint = block.endpoint
        found = self._endpoints.get(endpoint)
        if found is None:
            found = endpoint in self._addresses
            if not found and block.handle.is_valid():
                ordinary = lt.peer_info.standard_bittorrent
                connections = block.handle.get_peer_info()
                found = any(each.ip == endpoint and each.connection_type != ordinary for each in connections)
            if len(self._endpoints) >= ENDPOINTS_MAX:
                self._endpoints.clear()
            self._endpoints[endpoint] = found
        return found
