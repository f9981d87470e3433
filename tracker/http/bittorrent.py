"""Announces and scrapes of BitTorrent clients (BEP 3, 7, 23, 48). Failures are answered as `failure
reason` with HTTP 200.

Info hashes and peer ids are arbitrary bytes, percent-encoded, so the query is taken apart here and
not by aiohttp, which would read it as text. Where a peer is, its connection says: a client could
name any address in `ip`, and have others send to it. Only a client on the tracker's own machine may
name an address there, as no other reaches it at the loopback address: a private one.

Torrents of blobs and packages, for any BitTorrent client: `.torrent` files, or magnet links in
JSON (`?format=magnet`).

The tracker's own address in them is the one under which it was asked. It says what the torrent is
about (`/announce?blob=<digest>`, or `?package=` with the manifest's digest), so that a tracker that
was started again can look it up when a peer announces itself; clients keep a query in that
address as it is. `?version=1` leaves out version 2 of the protocol, see p2pdist/model/torrent.py.

Agents that hold the whole blob are its web seeds (BEP 19), the nearest ones first, and so is
`Service.web_origin`. A client asks for a file of a package by its path, which only the latter
understands.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from random import getrandbits
from typing import get_args
from urllib.parse import quote, unquote_to_bytes

import msgspec
from aiohttp import web

from p2pdist.model.address import ip_of, without_mapping
from p2pdist.model.bencode import Encodable, encode
from p2pdist.model.digest import Digest, hex_of, parse_digest
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, Unavailable, UsageError
from p2pdist.model.manifest import Descriptor, Reference, parse_reference
from p2pdist.model.torrent import Torrent
from p2pdist.transfer.openapi import Answer, Query, Route
from tracker.core.bittorrent.addresses import packed_ip
from tracker.core.bittorrent.announce import Announce, AnnounceAnswer, AnnounceEvent, Contact
from tracker.http.keys import SERVICE
from tracker.joined_reads import ASKER
from tracker.service import Service

TORRENT_FILE_TYPE = "application/x-bittorrent"
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::[0-9]{1,5})?\Z")


class MagnetLink(msgspec.Struct, frozen=True):
    """A torrent as a magnet link. `info_hash_v2` is left out for a torrent of version 1."""

    magnet: str
    name: str
    size: int
    info_hash_v1: str
    info_hash_v2: str | msgspec.UnsetType = msgspec.UNSET


async def register_blob(service: Service, digest: Digest) -> Torrent:
    """Let the torrent of a blob be tracked from now on. Raises NotFound, also for a blob that is
    not public while access is on, Corrupt, Unavailable."""
    _require_public(service, service.fleet.policies.readers_of(digest), digest)
    torrent = await service.content.torrent(digest)
    _register_torrent(service, torrent, (digest,))
    return torrent


async def register_package(service: Service, digest: Digest) -> Torrent:
    """Let the torrent of the package with this manifest be tracked from now on. Raises NotFound,
    also for a package that is not public while access is on, Corrupt, Unavailable."""
    _require_public(service, service.fleet.policies.readers_of(digest), digest)
    torrent, manifest = await service.content.package_torrent(digest)
    _register_torrent(service, torrent, tuple(blob.digest for blob in manifest.blobs))
    return torrent


def _require_public(service: Service, names: Iterable[str], what: str) -> None:
    """Raises NotFound, while access is on, for what is of no public package."""
    if service.access is not None and not service.access.packages.public(names):
        raise NotFound(f"{what} has no torrent", remedy="Pull it with p2pdist: BitTorrent is for public packages")


def _asked(request: web.Request) -> Service:
    """The tracker, whose content is read on account of the address that asks."""
    ASKER.set(request.remote or "")
    return request.app[SERVICE]


def _register_torrent(service: Service, torrent: Torrent, blobs: tuple[Digest, ...]) -> None:
    service.announces.register((torrent.info_hash_v1, torrent.info_hash_v2[:20]), blobs)
    # Another torrent to its peers: they greet each other with the info hash.
    service.announces.register((torrent.v1_only().info_hash_v1,))


async def blob_torrent(request: web.Request) -> web.Response:
    """Serve the torrent of a blob, or its magnet link."""
    service = _asked(request)
    digest = parse_digest(request.match_info["digest"])
    torrent = await register_blob(service, digest)
    ip = packed_ip(f"{request.remote}:0") or b""
    holders = service.announces.web_seeds(digest, ip, now=time.monotonic(), chance=getrandbits(64))
    seeds = [f"{url}/v1/blobs/{digest}" for url in holders]
    if service.web_origin:
        seeds.append(f"{service.web_origin}/blobs/sha256/{hex_of(digest)}")
    return _answer(request, torrent, "blob", digest, seeds)


async def package_torrent(request: web.Request) -> web.Response:
    """Serve the torrent of a package, or its magnet link."""
    service = _asked(request)
    reference = parse_reference(request.match_info["reference"])
    _require_public(service, [reference.name], str(reference))
    digest = (await _resolved(service, reference)).digest
    torrent = await register_package(service, digest)
    seeds = [f"{service.web_origin}/blobs/"] if service.web_origin else []
    return _answer(request, torrent, "package", digest, seeds)


async def _resolved(service: Service, reference: Reference) -> Descriptor:
    """The manifest of a public package."""
    if service.access is None:
        return await service.content.resolve(reference)
    return await service.access.packages.find(service.access.packages.stranger, reference)


def _answer(request: web.Request, torrent: Torrent, kind: str, digest: Digest, seeds: list[str]) -> web.Response:
    if not _HOST.match(request.host):
        raise UsageError("the request does not say under what address this tracker is reached")
    tracker = f"{request.scheme}://{request.host}/announce?{kind}={digest}"
    version, form = request.query.get("version", "2"), request.query.get("format", "torrent")
    if version not in {"1", "2"} or form not in {"torrent", "magnet"}:
        raise UsageError(
            f"there is no version {version[:20]!r} of a torrent, or no format {form[:20]!r}",
            remedy="Versions are 2 (both in one) and 1, formats torrent and magnet",
        )
    wanted = torrent.v1_only() if version == "1" else torrent
    if form == "torrent":
        disposition = f'attachment; filename="{hex_of(digest)}.torrent"'
        return web.Response(
            body=wanted.metainfo(tracker, seeds),
            content_type=TORRENT_FILE_TYPE,
            headers={"Content-Disposition": disposition},
        )
    v2 = wanted.info_hash_v2.hex() if wanted.layers else msgspec.UNSET
    link = MagnetLink(magnet(wanted, tracker, seeds), wanted.name, wanted.size, wanted.info_hash_v1.hex(), v2)
    return web.Response(body=msgspec.json.encode(link), content_type="application/json", charset="utf-8")


def magnet(torrent: Torrent, tracker: str, web_seeds: list[str]) -> str:
    """The magnet link (BEP 9; BEP 52 for `btmh`, a multihash: 12 for SHA-256, 20 for 32 bytes)."""
    parts = [f"xt=urn:btih:{torrent.info_hash_v1.hex()}"]
    if torrent.layers:
        parts.append(f"xt=urn:btmh:1220{torrent.info_hash_v2.hex()}")
    parts += [f"dn={quote(torrent.name, safe='')}", f"xl={torrent.size}", f"tr={quote(tracker, safe='')}"]
    return "magnet:?" + "&".join(parts + [f"ws={quote(url, safe='')}" for url in web_seeds])


FIELDS_MAX = 100
SCRAPE_MAX = 74
KEY_BYTES_MAX = 64
REASON_MAX = 500
_EVENTS: dict[bytes, AnnounceEvent] = {event.encode(): event for event in get_args(AnnounceEvent)} | {b"empty": ""}
_COUNT = re.compile(rb"[0-9]{1,20}\Z")
_NUMWANT = re.compile(rb"-?[0-9]{1,9}\Z")

Fields = dict[str, list[bytes]]


async def announce(request: web.Request) -> web.Response:
    """Take a BitTorrent peer's announce and name other peers. Failures are bencoded, with HTTP
    200."""
    service = _asked(request)
    try:
        fields = parse_query(request.rel_url.raw_query_string)
        event = announce_of(fields, remote_ip(request))
        if event.info_hash not in service.announces or service.access is not None:
            await _register(service, fields, event.info_hash)
        compact, ids = _one(fields, "compact", b"1") != b"0", _one(fields, "no_peer_id", b"0") != b"1"
        answer = service.announces.announce(event, now=time.monotonic(), chance=getrandbits(64))
    except P2PDistError as error:
        return _failure(error)
    return _bencoded(encode_answer(answer, compact=compact, ids=ids))


async def scrape(request: web.Request) -> web.Response:
    """Count the peers of up to 74 torrents. Torrents that the tracker does not know are left
    out; failures are bencoded, with HTTP 200."""
    try:
        hashes = parse_query(request.rel_url.raw_query_string).get("info_hash", [])
        if not 0 < len(hashes) <= SCRAPE_MAX or any(len(info_hash) != 20 for info_hash in hashes):
            raise UsageError(f"a scrape names 1 to {SCRAPE_MAX} info hashes of 20 bytes")
        found = request.app[SERVICE].announces.scrape(hashes, now=time.monotonic())
    except P2PDistError as error:
        return _failure(error)
    files = {
        each.info_hash: {
            b"complete": each.complete,
            b"downloaded": each.downloaded,
            b"incomplete": each.incomplete,
        }
        for each in found
    }
    return _bencoded({b"files": files})


async def _register(service: Service, fields: Fields, info_hash: bytes) -> None:
    """Learn from an announce, after a restart, what its torrent is about; while access is on at
    each, as a package may be public no longer."""
    if service.access is not None and not (_one(fields, "blob") or _one(fields, "package")):
        raise NotFound("the announce does not say what its torrent is about")
    for name, register in (("blob", register_blob), ("package", register_package)):
        named = _one(fields, name)
        if named:
            torrent = await register(service, parse_digest(named.decode(errors="replace")))
            known = (torrent.info_hash_v1, torrent.info_hash_v2[:20], torrent.v1_only().info_hash_v1)
            if service.access is not None and info_hash not in known:
                raise NotFound("the announce names the subject of another torrent")


def parse_query(raw: str) -> Fields:
    """The fields of a query as bytes, each with all its values. Raises UsageError."""
    parts = raw.split("&", FIELDS_MAX)
    if len(parts) > FIELDS_MAX or not raw.isascii():
        raise UsageError(f"a query is in ASCII and has up to {FIELDS_MAX} fields")
    fields: Fields = {}
    for part in parts:
        name, _, value = part.partition("=")
        fields.setdefault(name, []).append(unquote_to_bytes(value))
    return fields


def announce_of(fields: Fields, ip: bytes) -> Announce:
    """What a peer that connects from `ip` says of itself. Raises UsageError."""
    info_hash, peer_id = _one(fields, "info_hash"), _one(fields, "peer_id")
    if len(info_hash) != 20 or len(peer_id) != 20:
        raise UsageError("info_hash and peer_id have 20 bytes each")
    port = _number(fields, "port")
    if not 0 < port < 1 << 16:
        raise UsageError("port is 1 to 65535")
    event, key, numwant = _one(fields, "event"), _one(fields, "key"), _one(fields, "numwant", b"-1")
    if event not in _EVENTS or len(key) > KEY_BYTES_MAX or not _NUMWANT.match(numwant):
        raise UsageError("event, key or numwant is malformed")
    for count in ("uploaded", "downloaded"):
        _number(fields, count, b"0")  # a peer may say them, and nothing here depends on them
    return Announce(
        info_hash,
        peer_id,
        _private_ip(_one(fields, "ip"), ip),
        port,
        _number(fields, "left"),
        _EVENTS[event],
        int(numwant) if int(numwant) >= 0 else None,
        key,
    )


def remote_ip(request: web.Request) -> bytes:
    """The packed address at the other end of the connection. Raises UsageError where it has
    none."""
    ip = ip_of(request.remote or "")
    if ip is None:
        raise UsageError("a peer announces itself over TCP")
    return ip.packed


def _private_ip(named: bytes, ip: bytes) -> bytes:
    """The private address that a client on this machine gives as its own; else the one that it
    connects from."""
    if not named or not ip_address(ip).is_loopback:
        return ip
    try:
        found = ip_address(named.decode())
    except ValueError:
        return ip
    odd = found.is_unspecified or found.is_reserved or found.is_link_local or found.is_multicast
    return without_mapping(found).packed if found.is_private and not odd else ip


def encode_answer(answer: AnnounceAnswer, *, compact: bool, ids: bool) -> dict[bytes, Encodable]:
    """The answer as BEP 3 has it, or with addresses in 6 and 18 bytes (BEP 23, BEP 7)."""
    body: dict[bytes, Encodable] = {
        b"interval": answer.interval_s,
        b"min interval": answer.min_interval_s,
        b"complete": answer.complete,
        b"incomplete": answer.incomplete,
    }
    if answer.warning:
        body[b"warning message"] = answer.warning.encode()
    if compact:
        body[b"peers"] = _packed(answer.peers, 4)
        peers6 = _packed(answer.peers, 16)
        return body | {b"peers6": peers6} if peers6 else body
    listed: list[Encodable] = []
    for peer in answer.peers:
        known: dict[bytes, Encodable] = {b"peer id": peer.peer_id} if ids and peer.peer_id else {}
        listed.append(known | {b"ip": str(ip_address(peer.ip)).encode(), b"port": peer.port})
    return body | {b"peers": listed}


def _packed(peers: Sequence[Contact], length: int) -> bytes:
    return b"".join(peer.ip + peer.port.to_bytes(2, "big") for peer in peers if len(peer.ip) == length)


def _one(fields: Fields, name: str, otherwise: bytes = b"") -> bytes:
    values = fields.get(name, [otherwise])
    if len(values) > 1:
        raise UsageError(f"{name} is given more than once")
    return values[0]


def _number(fields: Fields, name: str, otherwise: bytes = b"") -> int:
    value = _one(fields, name, otherwise)
    if not _COUNT.match(value):
        raise UsageError(f"{name} is missing or not a number of up to 20 digits")
    return int(value)


def _failure(error: P2PDistError) -> web.Response:
    return _bencoded({b"failure reason": str(error)[:REASON_MAX].encode(errors="replace")})


def _bencoded(body: Encodable) -> web.Response:
    return web.Response(body=encode(body), content_type="text/plain")


_TORRENT = (Answer(media_type=TORRENT_FILE_TYPE), Answer(MagnetLink))
_TORRENT_QUERY = (
    Query("format", "torrent, or magnet for a link as JSON"),
    Query("version", "2 for both versions of the protocol in one, 1 for the first alone"),
)
_TORRENT_ERRORS = (UsageError, NotFound, Corrupt, Unavailable)
_BENCODED = (Answer(media_type="text/plain"),)

ROUTES = (
    Route(
        "GET",
        "/v1/blobs/{digest}/torrent",
        blob_torrent,
        _TORRENT,
        _TORRENT_QUERY,
        errors=_TORRENT_ERRORS,
        right="open",
    ),
    Route(
        "GET",
        "/v1/packages/{reference:.+}/torrent",
        package_torrent,
        _TORRENT,
        _TORRENT_QUERY,
        errors=_TORRENT_ERRORS,
        right="open",
    ),
    Route(
        "GET",
        "/announce",
        announce,
        _BENCODED,
        (
            Query("info_hash", "the torrent, 20 bytes", required=True),
            Query("peer_id", "the peer, 20 bytes", required=True),
            Query("port", "where the peer listens", required=True),
            Query("left", "bytes that it lacks", required=True),
            Query("uploaded", "bytes sent"),
            Query("downloaded", "bytes received"),
            Query("event", "started, completed, stopped, paused or empty"),
            Query("numwant", "how many peers to name"),
            Query("key", "a secret of the peer, by which it is known again at another address"),
            Query("ip", "a private address of the peer, from clients on the tracker's machine"),
            Query("compact", "0: peers as a list of dictionaries"),
            Query("no_peer_id", "1: without their ids"),
            Query("blob", "the digest of the blob that the torrent is of"),
            Query("package", "the digest of the manifest of the package that the torrent is of"),
        ),
        right="open",
    ),
    Route(
        "GET",
        "/scrape",
        scrape,
        _BENCODED,
        (Query("info_hash", "a torrent, 20 bytes; several times", True),),
        right="open",
    ),
)
