"""Which of two agents that say the same name has it, as the agents at their addresses answer.

A host's name is its own, and any process may say hello with it, or even with the host's address. So
when a hello names a host that has a live session, the tracker asks at both addresses which agent
answers there (GET /healthz with a nonce). An agent proves by its answer that it is the process that
said hello (`messages.instance_proof`). The newcomer gets the name only where its answer proves more
than that of the older session: an agent that was started anew at its old address gets in at once,
and a session at an address that does not answer keeps no agent out. Where both prove the same the
older one stays, or two agents of one name would drive each other out for ever.

An agent of an earlier version proves nothing, but tells its name: that counts for more than silence
and for less than a proof. An agent that speaks TLS answers no client without a certificate: it can
be seen only that one speaks TLS there.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections import Counter
from enum import IntEnum

import aiohttp
import msgspec

from p2pdist.model.address import parse_address
from p2pdist.model.errors import UNDECODABLE, Conflict, Unavailable
from p2pdist.model.messages import Hello, instance_proof
from tracker.core.host import Host
from tracker.reach import ask_health

ANSWER_S = 1.0
"""How long an agent may take to name itself."""

DISPUTES_MAX = 64
DISPUTES_PER_HOST_MAX = 8
"""Newcomers that are being asked at once, in all and from one address."""


class Evidence(IntEnum):
    """What an address shows of an agent that is said to be there; more is better."""

    NONE = 0
    """Nothing answers, or another program or host."""
    NAMED = 1
    """An agent that gives the host's name, or speaks TLS, and proves nothing."""
    PROVED = 2
    """The very process that said hello."""


class Names:
    """Settles disputes about names, a bounded number at a time."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()

    async def resolve(self, holder: Host, hello: Hello, remote: str) -> None:
        """Return when the newcomer, which says hello from the address `remote`, may take the
        session of `holder` over. Raises Conflict when it may not, Unavailable while too many others
        are asked."""
        if hello.instance == holder.instance and (hello.instance or hello.address == holder.address):
            return  # the same process, or versions that cannot prove anything, at the same address
        if self._running.total() >= DISPUTES_MAX or self._running[remote] >= DISPUTES_PER_HOST_MAX:
            raise Unavailable("too many agents with names of others are being asked", remedy="Try again later")
        self._running[remote] += 1
        try:
            fresh, old = await asyncio.gather(
                evidence(hello.host, hello.address, hello.instance, tls=hello.tls, seen_from=remote),
                evidence(holder.name, holder.address, holder.instance, tls=holder.tls, seen_from=holder.source),
            )
        finally:
            self._running[remote] -= 1
            self._running += Counter()  # forgets what is zero
        # At one address one process answers; an agent that ended there leaves its session behind.
        gone = hello.address == holder.address and old < Evidence.PROVED
        if fresh > old or gone:
            return
        raise conflict(holder)


def conflict(holder: Host) -> Conflict:
    """Why an agent cannot have the name of a host that is connected."""
    return Conflict(
        f"another agent named {holder.name} is connected, from {holder.address}",
        remedy="Give each agent its own --name, and --listen or --advertise its own address",
    )


async def evidence(host: str, address: str, instance: str, *, tls: bool, seen_from: str) -> Evidence:
    """What the program at `address` shows of the agent of `host` with this instance, whose session
    comes from the address `seen_from`."""
    nonce = secrets.token_hex(16)
    try:
        parse_address(address)
        status, body = await ask_health(address, tls=tls, timeout_s=ANSWER_S, nonce=nonce, seen_from=seen_from)
        said = msgspec.json.decode(body)
    except (aiohttp.ClientConnectorSSLError, ssl.SSLError):
        return Evidence.NONE
    except (aiohttp.ClientConnectorError, TimeoutError, ValueError, *UNDECODABLE):
        return Evidence.NONE
    except (aiohttp.ClientError, OSError):
        return Evidence.NAMED if tls else Evidence.NONE  # it let the client in and asked for a certificate
    if status != 200 or not isinstance(said, dict) or said.get("host") != host:
        return Evidence.NONE
    if not said.get("proof"):
        return Evidence.NAMED
    proved = instance and said["proof"] == instance_proof(instance, host, nonce)
    return Evidence.PROVED if proved else Evidence.NONE
