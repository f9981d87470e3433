"""Asking other agents for what they know of a vouched list, while no tracker sends it.

What a host says is believed provisionally: only the SHA-256 of the whole decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp
import msgspec

from p2pdist.agent.access.service import AgentAccess
from p2pdist.model.access import TICKET_HEADER
from p2pdist.model.address import Vicinity, parse_address
from p2pdist.model.digest import Digest
from p2pdist.model.errors import UNDECODABLE
from p2pdist.model.messages import KNOWN_PIECES_BYTES_MAX, KnownPieces
from p2pdist.model.plan import Source
from p2pdist.model.request_id import passed_on
from p2pdist.store.blobs.vouched_pieces import Listing, VouchedPieces
from p2pdist.transfer.names import NAMES, Resolver

ASK_S = 2.0
ASKED_AT_ONCE = 16

logger = logging.getLogger(__name__)


class PeerLists:
    """On the event loop."""

    def __init__(self, access: AgentAccess, vicinity: Callable[[], Vicinity]) -> None:
        self._access, self._vicinity = access, vicinity
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """End the connections."""
        if self._http is not None:
            await self._http.close()

    async def ask(self, source: Source, blob: Digest, known: VouchedPieces) -> Listing | None:
        """What a host knows of the list beyond `known`; None where it does not say."""
        first = known.view.first_unlisted()
        if first is None:
            return None
        if self._http is None:
            connector = aiohttp.TCPConnector(
                limit=ASKED_AT_ONCE, resolver=Resolver(NAMES, self._vicinity), use_dns_cache=False
            )
            self._http = aiohttp.ClientSession(connector=connector)
        host = parse_address(source.address)[0]
        if problem := self._vicinity().problem(host, host):
            logger.debug("%s is not asked: %s", source.host, problem)
            return None
        tls, ticket = self._access.tls, self._access.tickets.get(blob)
        name = tls.peer_name(source.host, host) if tls is not None else None
        headers = passed_on() | ({TICKET_HEADER: ticket} if ticket else {})
        url = f"{'https' if tls is not None else 'http'}://{source.address}/v1/blobs/{blob}/pieces"
        try:
            async with (
                asyncio.timeout(ASK_S),
                self._http.get(
                    url,
                    params={"first": str(first)},
                    ssl=tls.client if tls is not None else True,
                    server_hostname=name,
                    headers=headers,
                ) as answer,
            ):
                body = bytearray()
                async for chunk in answer.content.iter_chunked(1 << 16):
                    body += chunk
                    if answer.status != 200 or len(body) > KNOWN_PIECES_BYTES_MAX:
                        return None
                told = msgspec.msgpack.decode(body, type=KnownPieces)
                return Listing(known.round, told.pieces, told.hashes)
        except (aiohttp.ClientError, TimeoutError, OSError, *UNDECODABLE) as error:
            logger.debug("%s at %s does not say what it knows of %s: %r", source.host, source.address, blob, error)
            return None
