"""Whether agents can be reached at the addresses that they give out, as this tracker finds by
connecting to them.

An agent behind a firewall, or with an address that means nothing to others, works all the same: it
reads central storage, and so do the hosts that would have received from it. So each agent asks
after its start, and now and then, whether it can be reached. The tracker connects to the address
and looks which agent answers there; a host that several others could not connect to counts as
unreachable, too. What is found changes no plan: others may be able to reach what the tracker
cannot, and what they meet they complain of.

Any process may open a session and name an address. So the tracker goes to no other one, and repeats
nothing of what a stranger says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import msgspec

from p2pdist.model.address import Vicinity, host_part, is_loopback, parse_address
from p2pdist.model.errors import UNDECODABLE, NotFound, Unavailable, printable
from p2pdist.model.messages import Reachability
from p2pdist.transfer.names import NAMES, Resolver, require_near
from p2pdist.transfer.places import Places
from tracker.core.host import BAN_REPORTERS_MIN, Host

CONNECT_S = 2.0
"""As long as agents wait for each other."""

LOOKS_MAX, LOOKS_PER_ADDRESS_MAX = 64, 32
"""Looks at once, in all and for one address."""

AGAIN_S = 1.0
"""The age up to which a look answers further questions."""

ANSWER_BYTES_MAX = 1 << 12


@dataclass(frozen=True, slots=True)
class _Look:
    session: int | None
    at: float
    problem: str


class Reach:
    """Looks whether hosts of the fleet can be reached, and remembers the last look at each."""

    def __init__(self, hosts: Mapping[str, Host]) -> None:
        self._hosts = hosts
        self._looks: dict[str, _Look] = {}
        self._places = Places(LOOKS_MAX, LOOKS_PER_ADDRESS_MAX)

    async def look(self, name: str, seen_from: str) -> Reachability:
        """Whether the host `name` can be reached; `seen_from` is the address from which it, or a
        program on it, asks. Raises NotFound for a host that is not connected, Unavailable while as
        many others are being looked at as may, in all or for that address."""
        host = self._hosts.get(name)
        if host is None or host.session is None:
            raise NotFound(f"no host named {name[:255]!r} is connected here")
        known = self._looks.get(name)
        if known is None or known.session != host.session or time.monotonic() - known.at > AGAIN_S:
            session = host.session
            with self._places.place(seen_from) as room:
                if not room:
                    raise Unavailable(f"{len(self._places)} hosts are being looked at", remedy="Ask again later")
                problem = await self._problem(host, seen_from)
            known = self._looks[name] = _Look(session, time.monotonic(), problem)
            if len(self._looks) > LOOKS_MAX + 2 * len(self._hosts):
                self._forget()
        return Reachability(name, host.address, known.problem or _complained_of(host), seen_from)

    def unreachable(self) -> int:
        """How many of the hosts that are connected could not be reached when they were looked at
        last, or by others since."""
        self._forget()
        return sum(
            host.session is not None and bool(look.problem if look.session == host.session else _complained_of(host))
            for name, look in self._looks.items()
            for host in (self._hosts[name],)
        )

    def _forget(self) -> None:
        """Forget the looks at hosts that are gone."""
        self._looks = {name: look for name, look in self._looks.items() if name in self._hosts}

    async def _problem(self, host: Host, seen_from: str) -> str:
        """Why others cannot be expected to reach a host; empty when the tracker can."""
        try:
            name, port = parse_address(host.address)
            found = await NAMES.find_soon(name)
        except (OSError, ValueError) as error:
            return str(error)
        if all(is_loopback(address) for _, address in found) and (not is_loopback(seen_from) or self._elsewhere(host)):
            which = name if name == found[0][1] else f"{name} stands for {found[0][1]}, which"
            return f"{which} is another machine for each that asks: itself"
        try:
            require_near(name, found, Vicinity(seen_from))
        except OSError as error:
            return str(error)
        asking = ask_health(host.address, tls=host.tls, timeout_s=CONNECT_S, seen_from=seen_from)
        try:
            return _stranger(host, *await asking)
        except aiohttp.ClientConnectorSSLError:
            return f"what listens on port {port} speaks no TLS, as this agent does"
        except aiohttp.ClientConnectorError as error:
            return os.strerror(error.os_error.errno).lower() if error.os_error.errno else str(error.os_error)
        except TimeoutError:
            return f"no answer within {CONNECT_S:.0f} s"
        except (aiohttp.ClientError, OSError) as error:
            # An agent that speaks TLS shows nothing to a client without a certificate, and is
            # there.
            why = f": {str(error)[:200]}" if isinstance(error, aiohttp.ClientConnectionError) else ""
            return "" if host.tls else f"what listens on port {port} is no agent{why}"

    def _elsewhere(self, host: Host) -> bool:
        """Whether some other host that is connected has an address of the network."""
        others = (other for other in self._hosts.values() if other is not host and other.session is not None)
        return any(not is_loopback(host_part(other.address)) for other in others)


async def ask_health(
    address: str, *, tls: bool, timeout_s: float, seen_from: str, nonce: str = ""
) -> tuple[int, bytes]:
    """Status and body of the answer to GET /healthz at an agent's address. A name leads to this
    machine or its links only for an agent that comes from there (`seen_from`), as check_address has
    it of addresses in numbers. Raises aiohttp.ClientError, TimeoutError, OSError."""
    url = f"{'https' if tls else 'http'}://{address}/healthz" + (f"?nonce={nonce}" if nonce else "")
    limits = aiohttp.ClientTimeout(total=timeout_s)
    resolver = Resolver(NAMES, lambda: Vicinity(seen_from))
    connector = aiohttp.TCPConnector(force_close=True, resolver=resolver, use_dns_cache=False, ssl=False)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=limits) as http,
        http.get(url, allow_redirects=False) as answer,
    ):
        return answer.status, await answer.content.read(ANSWER_BYTES_MAX)


def _stranger(host: Host, status: int, body: bytes) -> str:
    """Why what answered is not this host's agent; empty when it is. One of an earlier version does
    not say its name."""
    try:
        said = msgspec.json.decode(body)
    except UNDECODABLE:
        said = None
    if status != 200 or not isinstance(said, dict) or "status" not in said:
        return "what answers there is no agent"
    name = said.get("host", host.name)
    return "" if name == host.name else f"the agent of another host answers there, {printable(str(name)[:255])}"


def _complained_of(host: Host) -> str:
    """What several others met that wanted to receive from a host."""
    by = [name for name, (reason, _) in host.penalties.items() if reason == "refused"]
    return f"{len(by)} hosts could not connect to it" if len(by) >= BAN_REPORTERS_MIN else ""
