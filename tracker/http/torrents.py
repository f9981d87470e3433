"""Torrents of blobs and packages, for any BitTorrent client: `.torrent` files, or magnet links in
JSON (`?format=magnet`).

The tracker's own address in them is the one under which it was asked. It says what the torrent is
about (`/announce?blob=<digest>`, or `?package=` with the manifest's digest), so that a tracker that
was started again can look it up when somebody announces himself; clients keep a query in that
address as it is. `?version=1` leaves out version 2 of the protocol, see p2pdist/model/torrent.py.

Agents that hold the whole blob are its web seeds (BEP 19), the nearest ones first, and so is
`Service.web_origin`. A client asks for a file of a package by its path, which only the latter
understands.
"""

from __future__ import annotations

import re
import time
from random import getrandbits
from urllib.parse import quote

from aiohttp import web

from p2pdist.model.digest import Digest, hex_of, parse_digest
from p2pdist.model.errors import UsageError
from p2pdist.model.manifest import parse_reference
from p2pdist.model.torrent import Torrent
from tracker.core.bittorrent.addresses import ip_of
from tracker.http.keys import SERVICE
from tracker.service import Service

TORRENT_FILE_TYPE = "application/x-bittorrent"
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::[0-9]{1,5})?\Z")


async def register_blob(service: Service, digest: Digest) -> Torrent:
    """Let the torrent of a blob be tracked from now on. Raises NotFound, Corrupt, Unavailable."""
    torrent = await service.content.torrent(digest)
    _register(service, torrent, (digest,))
    return torrent


async def register_package(service: Service, digest: Digest) -> Torrent:
    """The same for the package with this manifest."""
    torrent, manifest = await service.content.package_torrent(digest)
    _register(service, torrent, tuple(blob.digest for blob in manifest.blobs))
    return torrent


def _register(service: Service, torrent: Torrent, blobs: tuple[Digest, ...]) -> None:
    service.announces.register((torrent.info_hash_v1, torrent.info_hash_v2[:20]), blobs)
    # Another torrent to its peers: they greet each other with the info hash.
    service.announces.register((torrent.v1_only().info_hash_v1,))


async def blob(request: web.Request) -> web.Response:
    """GET /v1/blobs/{digest}/torrent"""
    service = request.app[SERVICE]
    digest = parse_digest(request.match_info["digest"])
    torrent = await register_blob(service, digest)
    ip = ip_of(f"{request.remote}:0") or b""
    holders = service.announces.web_seeds(digest, ip, now=time.monotonic(), chance=getrandbits(64))
    seeds = [f"http://{address}/v1/blobs/{digest}" for address in holders]
    if service.web_origin:
        seeds.append(f"{service.web_origin}/blobs/sha256/{hex_of(digest)}")
    return _answer(request, torrent, "blob", digest, seeds)


async def package(request: web.Request) -> web.Response:
    """GET /v1/packages/{reference}/torrent"""
    service = request.app[SERVICE]
    digest = (await service.content.resolve(parse_reference(request.match_info["reference"]))).digest
    torrent = await register_package(service, digest)
    seeds = [f"{service.web_origin}/blobs/"] if service.web_origin else []
    return _answer(request, torrent, "package", digest, seeds)


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
    body = {"magnet": magnet(wanted, tracker, seeds), "name": wanted.name, "size": wanted.size}
    body["info_hash_v1"] = wanted.info_hash_v1.hex()
    if wanted.layers:
        body["info_hash_v2"] = wanted.info_hash_v2.hex()
    return web.json_response(body)


def magnet(torrent: Torrent, tracker: str, web_seeds: list[str]) -> str:
    """The magnet link (BEP 9; BEP 52 for `btmh`, a multihash: 12 for SHA-256, 20 for 32 bytes)."""
    parts = [f"xt=urn:btih:{torrent.info_hash_v1.hex()}"]
    if torrent.layers:
        parts.append(f"xt=urn:btmh:1220{torrent.info_hash_v2.hex()}")
    parts += [f"dn={quote(torrent.name, safe='')}", f"xl={torrent.size}", f"tr={quote(tracker, safe='')}"]
    return "magnet:?" + "&".join(parts + [f"ws={quote(url, safe='')}" for url in web_seeds])
