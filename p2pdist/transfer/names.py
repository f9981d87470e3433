"""Addresses of hosts by name, from the system's resolver, within a time limit.

Theory. The system's resolver (getaddrinfo(3)) waits for silent name servers for up to minutes, and
cannot be interrupted. So each look-up has a thread of its own, at most LOOKUPS_MAX at a time and
one for each name, and callers wait for it for LOOKUP_S. A name that was not found, or not in time,
is not looked up again for FAILED_S; callers get the last known addresses meanwhile, as a host
seldom changes its address (RFC 8767, "Serving Stale Data"). When SILENT_NAMES names in a row got no
answer, the name servers are taken to be silent: for SILENT_S callers wait for SILENT_WAIT_S only,
which is enough for /etc/hosts and for a server that is back.

Invariants: a caller never waits for longer than LOOKUP_S; an address in numbers takes no look-up;
look-ups that hang hold no thread that other work needs.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

from p2pdist.model.address import Vicinity

LOOKUP_S = 2.0
"""As long as opening a connection may take."""

LOOKUPS_MAX = 32
FRESH_S = 5.0
FAILED_S = 5.0
SILENT_NAMES = 2
SILENT_S = 30.0
SILENT_WAIT_S = 0.2
NAMES_MAX = 4096

Addresses = tuple[tuple[socket.AddressFamily, str], ...]
"""Families and addresses, in the resolver's order."""


class Unresolved(OSError):
    """A name has no address, or none was found in time; the text says which."""

    def __init__(self, why: str) -> None:
        super().__init__(socket.EAI_AGAIN, why)

    def __str__(self) -> str:
        return str(self.strerror)


class Names:
    """Looks names up and remembers addresses and failures. Thread-safe; threads call `find`, event
    loops `find_soon`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, Future[Addresses]] = {}
        self._found: OrderedDict[str, tuple[float, Addresses]] = OrderedDict()
        self._failed: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._unanswered: dict[str, float] = {}
        """Names for which no answer came in time, and when (time.monotonic)."""

    @property
    def silent(self) -> bool:
        """Whether the name servers do not answer at present."""
        with self._lock:
            return self._is_silent()

    def find(self, host: str) -> Addresses:
        """The addresses of a host. Raises Unresolved within LOOKUP_S."""
        addresses, future, wait_s = self._begin(host)
        if future is None:
            return addresses
        try:
            return future.result(wait_s)
        except NotInTime:
            return self._gave_up(host, wait_s)

    async def find_soon(self, host: str) -> Addresses:
        """The addresses of a host, for a caller on an event loop. Raises Unresolved within
        LOOKUP_S."""
        addresses, future, wait_s = self._begin(host)
        if future is None:
            return addresses
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.shield(asyncio.wrap_future(future))
        except TimeoutError:
            return self._gave_up(host, wait_s)

    def _begin(self, host: str) -> tuple[Addresses, Future[Addresses] | None, float]:
        """The known addresses, or else the look-up to wait for and how many seconds. Raises
        Unresolved for a name that failed a moment ago."""
        if (numeric := _numeric(host)) is not None:
            return numeric, None, 0.0
        now = time.monotonic()
        with self._lock:
            since, addresses = self._found.get(host, (-FRESH_S, ()))
            if addresses and now - since < FRESH_S:
                return addresses, None, 0.0
            failed_at, why = self._failed.get(host, (-FAILED_S, ""))
            if now - failed_at < FAILED_S:
                if addresses:
                    return addresses, None, 0.0
                raise Unresolved(why)
            future = self._running.get(host)
            if future is None:
                if len(self._running) >= LOOKUPS_MAX:
                    if addresses:
                        return addresses, None, 0.0
                    raise Unresolved(f"{host} is not looked up: {LOOKUPS_MAX} names wait for the name servers")
                future = Future()
                thread = threading.Thread(target=self._look_up, args=(host, future), name=f"name-{host}", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # as many threads run as this process may have
                    raise Unresolved(f"{host} is not looked up: {error}") from None
                self._running[host] = future  # which the thread takes off with the lock that is held here
            return (), future, SILENT_WAIT_S if self._is_silent() else LOOKUP_S

    def _gave_up(self, host: str, waited_s: float) -> Addresses:
        """Note that no answer came for a name in time; returns its last known addresses, else
        raises Unresolved."""
        why = f"the name servers did not answer for {host} within {waited_s:g} s"
        with self._lock:
            if host in self._running:
                self._unanswered = {**self._still_unanswered(), host: time.monotonic()}
                _remember(self._failed, host, (time.monotonic(), why))
            _, addresses = self._found.get(host, (0.0, ()))
        if addresses:
            return addresses
        raise Unresolved(why)

    def _is_silent(self) -> bool:
        return len(self._still_unanswered()) >= SILENT_NAMES

    def _still_unanswered(self) -> dict[str, float]:
        oldest = time.monotonic() - SILENT_S
        return {name: at for name, at in self._unanswered.items() if at > oldest}

    def _look_up(self, host: str, future: Future[Addresses]) -> None:
        """Look a name up, in a thread of its own, for as long as the resolver takes."""
        began = time.monotonic()
        addresses: Addresses = ()
        try:
            rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            addresses = _addresses(rows)
            error = None
        except (OSError, UnicodeError) as failure:
            error = Unresolved(f"{host} has no address: {getattr(failure, 'strerror', None) or failure}")
        now = time.monotonic()
        with self._lock:
            del self._running[host]
            if now - began < LOOKUP_S and error is None:
                self._unanswered.clear()
            if error is None:
                self._failed.pop(host, None)
                _remember(self._found, host, (now, addresses))
            else:
                _remember(self._failed, host, (now, str(error)))
        if error is None:
            future.set_result(addresses)
        else:
            future.set_exception(error)


def require_near(host: str, addresses: Addresses, vicinity: Vicinity) -> Addresses:
    """Those of a host's addresses to which a process with this vicinity may connect. Raises
    Unresolved where there is none."""
    problems = [vicinity.problem(host, address) for _, address in addresses]
    allowed = tuple(entry for entry, problem in zip(addresses, problems, strict=True) if not problem)
    if not allowed:
        raise Unresolved(next(iter(problems), f"{host} has no address"))
    return allowed


class Resolver(AbstractResolver):
    """Looks names up for aiohttp's clients. With `vicinity` it gives no address to which a process
    there may not connect; aiohttp asks it nothing of a host in numbers."""

    def __init__(self, names: Names, vicinity: Callable[[], Vicinity] | None = None) -> None:
        self._names, self._vicinity = names, vicinity

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_UNSPEC) -> list[ResolveResult]:
        addresses = await self._names.find_soon(host)
        if self._vicinity is not None:
            addresses = require_near(host, addresses, self._vicinity())
        return [
            ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST)
            for kind, address in addresses
            if family in (socket.AF_UNSPEC, kind)
        ]

    async def close(self) -> None:
        """Nothing is held."""


NAMES = Names()
"""The names of this process, since the state of the name servers concerns all of it."""


def _numeric(host: str) -> Addresses | None:
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return None
    return _addresses(rows)


def _addresses(rows: list[Any]) -> Addresses:
    """The addresses in getaddrinfo's result, with the interface where an address needs one."""
    return tuple(
        (family, f"{address[0]}%{address[3]}" if family == socket.AF_INET6 and address[3] else str(address[0]))
        for family, _, _, _, address in rows
    )


def _remember(table: OrderedDict[str, Any], host: str, value: Any) -> None:
    table[host] = value
    table.move_to_end(host)
    while len(table) > NAMES_MAX:
        table.popitem(last=False)
