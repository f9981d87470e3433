"""The settings of an agent's BitTorrent session, in libtorrent's words (its settings_pack
reference).

Theory. In a data centre many hosts fetch the same content at once, over short and clean paths. The
settings fill uplinks early and leave no host waiting: TCP, connections opened at once and given up
soon, requests no deeper than a second, little in buffers, where it would fill the queues in front
of other hosts (BUFFER_BYTES), and blocks requested from another peer after seconds. All links are
full, so a host that is choked for a while never makes up for it. Hence a host has few connections
for a torrent that it fetches (FETCH_PEERS_MAX), and more upload slots than that. Each host has as
many, picked by a hash of both addresses (BEP 40), so all get the same share of as many uplinks; and
a host announces its pieces to its few peers only, which saves much of the CPU. Two hosts that
connect to each other close one of the two connections; the caller tries again after two seconds:
sooner would cost CPU all the time, and much later would leave a host that joined early without
peers. Over a WAN the defaults of libtorrent are right; there uTP (BEP 29) yields to other traffic,
and connections are obfuscated where the peer can do so, which keeps middleboxes from slowing them.
That is no security: it authenticates no peer, and pieces are verified anyway.

Nothing is discovered by broadcast or asked of routers: peers come from trackers and from the
caller, from the DHT (BEP 5) only if it is switched on.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Literal

from p2pdist.model.errors import UsageError

if TYPE_CHECKING:
    import libtorrent as lt

Network = Literal["datacenter", "wan"]

ALERTS_MAX = 20_000
"""Alerts that may wait for the session's thread. libtorrent drops the ones beyond it, and says
so."""

QUEUED_DISK_BYTES_MAX = 64 << 20
"""Bytes that may wait for the disk before libtorrent stops reading from peers."""

PEERS_LISTED_MAX = 2000
"""Peers that libtorrent remembers for a torrent, connected or not."""

BUFFER_BYTES = 64 << 10
"""Bytes that wait to be sent to one peer, in libtorrent and once more in the kernel; enough for 5
Gbit/s where a round trip takes 0.1 ms."""

FETCH_PEERS_MAX = 8
"""Connections for one torrent while it is fetched, in a data centre."""

_PLAIN_ONLY, _ENCRYPTION_POSSIBLE = 2, 1  # settings_pack::enc_policy: pe_disabled, pe_enabled
_DATACENTER: lt.settings_pack = {
    "enable_outgoing_utp": False,
    "enable_incoming_utp": False,
    "out_enc_policy": _PLAIN_ONLY,
    "in_enc_policy": _ENCRYPTION_POSSIBLE,
    "connection_speed": 500,
    "torrent_connect_boost": 255,
    "smooth_connects": False,
    "min_reconnect_time": 2,
    "peer_connect_timeout": 3,
    "handshake_timeout": 5,
    "unchoke_slots_limit": 2 * FETCH_PEERS_MAX,
    "unchoke_interval": 1,
    "optimistic_unchoke_interval": 2,
    "peer_timeout": 15,
    "inactivity_timeout": 15,
    "piece_timeout": 5,
    "request_timeout": 5,
    "request_queue_time": 1,
    "max_out_request_queue": 500,
    "send_buffer_watermark": BUFFER_BYTES,
    "send_buffer_low_watermark": 32 << 10,
    "send_socket_buffer_size": BUFFER_BYTES,
    "mixed_mode_algorithm": 0,  # prefer_tcp
    "min_announce_interval": 2,
    "tick_interval": 100,
}
_WAN: lt.settings_pack = {
    "enable_outgoing_utp": True,
    "enable_incoming_utp": True,
    "out_enc_policy": _ENCRYPTION_POSSIBLE,
    "in_enc_policy": _ENCRYPTION_POSSIBLE,
    "prefer_rc4": True,
    "min_announce_interval": 30,
}


CONNECTIONS_MAX, CONNECTIONS_MIN = 500, 8
DESCRIPTORS_SHARE = 1 / 8
"""BitTorrent peers have this part of the descriptors of the process at most."""


def connections_max() -> int:
    """How many BitTorrent peers may be connected, by what this process may have open."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    return max(CONNECTIONS_MIN, min(CONNECTIONS_MAX, int(descriptors * DESCRIPTORS_SHARE)))


@dataclass(frozen=True, slots=True)
class TorrentSettings:
    """Where a session listens (an IP address; port 0: any free port), the network it is for, and
    its limits. Rates are in bytes per second over all torrents; 0 is no limit."""

    listen_address: str
    listen_port: int
    network: Network = "datacenter"
    upload_bytes_s: int = 0
    download_bytes_s: int = 0
    connections_max: int = field(default_factory=connections_max)
    dht: bool = False

    def __post_init__(self) -> None:
        """Raises UsageError for what libtorrent would not understand."""
        try:
            ip_address(self.listen_address)
        except ValueError as error:
            raise UsageError(
                f"BitTorrent cannot listen on {self.listen_address!r}", remedy="Give an IP address, such as 0.0.0.0"
            ) from error
        if not 0 <= self.listen_port < 1 << 16 or self.network not in ("datacenter", "wan"):
            raise UsageError(f"BitTorrent cannot use port {self.listen_port} and network {self.network!r}")
        if min(self.upload_bytes_s, self.download_bytes_s) < 0 or self.connections_max < 2:
            raise UsageError("limits of BitTorrent are no less than zero, and connections no fewer than two")

    @property
    def peers_max(self) -> int:
        """Connections for one torrent while it is fetched; -1 for no limit but
        `connections_max`."""
        return FETCH_PEERS_MAX if self.network == "datacenter" else -1

    def pack(self) -> lt.settings_pack:
        """The settings_pack, without the alert mask."""
        address = f"[{self.listen_address}]" if ":" in self.listen_address else self.listen_address
        return {
            "user_agent": "p2pdist",
            "listen_interfaces": f"{address}:{self.listen_port}",
            "max_retry_port_bind": 0,  # the port that was given or none
            "listen_system_port_fallback": False,
            "listen_queue_size": 128,
            "enable_dht": self.dht,
            "enable_lsd": False,
            "enable_upnp": False,
            "enable_natpmp": False,
            "allow_multiple_connections_per_ip": True,  # many hosts behind one address, or many agents on one host
            "connections_limit": self.connections_max,
            "max_peerlist_size": PEERS_LISTED_MAX,
            "max_queued_disk_bytes": QUEUED_DISK_BYTES_MAX,
            "alert_queue_size": ALERTS_MAX,
            "strict_end_game_mode": True,
            "no_atime_storage": True,
            "aio_threads": 2,
            "hashing_threads": 1,
            "stop_tracker_timeout": 1,
            **limits(self.upload_bytes_s, self.download_bytes_s),
            **(_DATACENTER if self.network == "datacenter" else _WAN),
        }


def limits(upload_bytes_s: int, download_bytes_s: int) -> lt.settings_pack:
    """The settings that limit a session's rates."""
    return {"upload_rate_limit": upload_bytes_s, "download_rate_limit": download_bytes_s}
