"""Access control of a tracker: what the access file and the keys beside it say now, and
which parts of the tracker hear when they change.

The directory is looked at every POLL_S and at SIGHUP. What cannot be read, or is gone, changes
nothing: what was in force stays, and the log says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from p2pdist.model.address import ip_of
from p2pdist.model.errors import P2PDistError
from p2pdist.model.messages import Access, encode
from p2pdist.transfer.audit import Audit
from tracker.access.directory import AccessDirectory, AccessState
from tracker.access.identities import Identities
from tracker.access.joins import Joins
from tracker.access.tickets import Tickets
from tracker.access.tls import TrackerTls
from tracker.networks import Network
from tracker.state.joins import JoinRecords

POLL_S = 1.0
LOOK_AGAIN_S = 600.0
"""How often the keys are looked at without a change: one may have ended."""

logger = logging.getLogger(__name__)


class AccessControl:
    """Access of one fleet, in force. `addresses`: where clients reach this tracker. `networks`:
    where agents may be reached, none for anywhere. `state`: where the record of joins is kept, ""
    for as long as the object."""

    def __init__(
        self,
        path: Path,
        addresses: Iterable[str] = (),
        *,
        audit: Audit | None = None,
        networks: Sequence[Network] = (),
        state: str = "",
    ) -> None:
        addresses = tuple(addresses)
        self.directory = AccessDirectory(path)
        self.audit = audit or Audit()
        self.changed: list[Callable[[], None]] = []
        """Called on the event loop after anything changed."""
        self.made = self.directory.prepare(now=time.time())
        """Join tokens that were made at the start."""
        self._stamp = self.directory.stamp()
        self.state = self.directory.load(now=time.time())
        self.identities = Identities(self.state)
        self.tickets = Tickets(self.state)
        names = [address for address in addresses if ip_of(address) is None]
        self.joins = Joins(self.state, self.audit, JoinRecords(state), names=names, networks=networks)
        self.tls = TrackerTls(addresses)
        self.tls.use(self.state, now=time.time())
        self.message = _message(self.state)
        """What agents are told."""
        self.encoded = encode(self.message)
        """The same as it is sent: each session gets it first."""
        self._asked = asyncio.Event()

    def reload(self) -> None:
        """Read everything again soon, whether or not it looks changed."""
        self._asked.set()

    async def watch(self) -> None:
        """Follow the directory, and renew the tracker's certificate, until cancelled."""
        looked_at = time.monotonic()
        while True:
            asked = await self._woken()
            try:
                self.tls.renew(self.state, now=time.time())
                stamp = await asyncio.to_thread(self.directory.stamp)
                if asked or stamp != self._stamp or time.monotonic() - looked_at > LOOK_AGAIN_S:
                    looked_at, self._stamp = time.monotonic(), stamp
                    await self._read()
            except P2PDistError as error:
                logger.warning("access stays as it was: %s", error)
                self.audit.note("change", subject=str(self.directory.path), outcome=error.what)
            except Exception:
                logger.exception("the access file %s is not watched", self.directory.path)

    async def _read(self) -> None:
        try:
            made = await asyncio.to_thread(self.directory.add_tokens, now=time.time())
        except P2PDistError as error:
            logger.warning("what is missing beside the access file cannot be made: %s", error)
            made = []
        for path in made:
            logger.info("hosts join with the token in %s", path)
        stamp = await asyncio.to_thread(self.directory.stamp)  # of what is read, not of what comes meanwhile
        self._use(await asyncio.to_thread(self.directory.load, now=time.time(), before=self.state))
        self._stamp = stamp

    def _use(self, state: AccessState) -> None:
        message = _message(state)
        before, self.state = self.state, state
        self.identities.use(state)
        self.joins.use(state)
        if message == self.message and state.rules == before.rules:
            return
        if message.keys != self.message.keys or state.signing[0].name != before.signing[0].name:
            self.tickets.use(state)
        if message.authorities != self.message.authorities:
            self.tls.use(state, now=time.time())
        self.message, self.encoded = message, encode(message)
        logger.info("the access file %s holds as it is now", self.directory.path)
        self.audit.note("change", subject=str(self.directory.path))
        for hear in self.changed:
            hear()

    async def _woken(self) -> bool:
        """Wait for the time to look; whether `reload` asked for it."""
        try:
            async with asyncio.timeout(POLL_S):
                await self._asked.wait()
        except TimeoutError:
            return False
        self._asked.clear()
        return True


def _message(state: AccessState) -> Access:
    rules = state.rules
    return Access(
        keys=dict(state.public_keys),
        authorities=state.trusted.decode(),
        revoked=tuple(sorted(rules.revoked)),
        public=rules.public.patterns,
        local={subject: patterns.patterns for subject, patterns in rules.local.by_subject.items()},
        mount_roots=rules.local.mount_roots,
        fleet=rules.fleet,
        roles={name: tuple(sorted(role.rights)) for name, role in rules.roles.items()},
        reads={name: role.read.patterns for name, role in rules.roles.items() if role.read.patterns},
    )
