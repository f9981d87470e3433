"""Access at an agent, put together: its identity and contexts for TLS, what it knows of others, the
tickets that it holds, and the rules for processes of its host."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from p2pdist.agent.access.identity import Membership
from p2pdist.agent.access.local import LocalCallers
from p2pdist.agent.access.names import PackageNames
from p2pdist.agent.access.peers import Peers
from p2pdist.agent.access.spiffe import WorkloadIdentity
from p2pdist.agent.access.tickets import Tickets
from p2pdist.agent.tasks import Tasks
from p2pdist.credentials.authority import TRACKER_DNS
from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError, UsageError
from p2pdist.model.messages import Access, Priority
from p2pdist.store.store import BlobStore
from p2pdist.transfer.stream.connections import prepare
from p2pdist.transfer.tls import Tls, TlsFiles

WATCH_S = 10.0
"""How often an agent looks whether its certificate files have changed."""

IDENTITY_DIRECTORY = "identity"

logger = logging.getLogger(__name__)


class AgentAccess:
    """What an agent and its routes ask about access. `identity`: the fleet that the agent has
    joined, or its SVID; else `files` are certificates of its own, and without either access is off,
    whatever a tracker says. On the event loop."""

    def __init__(
        self,
        host: str,
        directory: Path,
        identity: Membership | WorkloadIdentity | None,
        files: TlsFiles | None,
        *,
        alone: Callable[[], bool],
        clock_ahead_s: Callable[[], float],
    ) -> None:
        self._membership = membership = identity if isinstance(identity, Membership) else None
        self._workload = workload = identity if isinstance(identity, WorkloadIdentity) else None
        self.tls: Tls | None = identity.tls if identity is not None else None
        if identity is None and files is not None:
            self.tls = Tls(files)
        if self.tls is not None:
            prepare(self.tls)
        self.tickets = Tickets()
        self.callers = LocalCallers()
        self.peers = Peers(
            directory,
            host,
            fleet=membership.fleet if membership is not None else "",
            join=membership.join if membership is not None else "",
            trust_domain=workload.trust_domain if workload is not None else "",
            required=membership is not None,
            secured=self.tls is not None,
            clock=lambda: time.time() - clock_ahead_s(),
            alone=alone,
        )
        self._read_names()
        self.names = PackageNames()
        self._tasks = Tasks(logger, "access: a task failed")

    @property
    def joined(self) -> bool:
        """Whether the agent has joined a fleet: nothing of it is told in plain."""
        return self._membership is not None

    @property
    def tracker_name(self) -> str | None:
        """What the certificate of a tracker must be made out to; None: the host in its URL."""
        return TRACKER_DNS if self._membership is not None else None

    def start(self, store: BlobStore) -> None:
        """Learn what packages the store holds, and keep certificates fresh until `stop`."""
        self._tasks.spawn(asyncio.to_thread(self.names.load, store))
        if self.tls is None:
            return
        if self._membership is not None:
            self._tasks.spawn(self._membership.run())
            return
        if self._workload is not None:
            self._tasks.spawn(self._workload.run())
        self._tasks.spawn(self._watch(self.tls))

    async def stop(self) -> None:
        """End what `start` began."""
        await self._tasks.stop()
        await self.peers.stop()
        if self._workload is not None:
            self._workload.close()

    def learn(self, access: Access) -> None:
        """Take in what a tracker says of access."""
        if self.tls is None:
            logger.warning("the tracker has access on, and this agent no certificate. Give it --join-file")
            return
        try:
            self.peers.learn(access)
        except UsageError as error:
            logger.warning("the tracker says of access what cannot be used: %s", error)
            return
        self._read_names()
        self._tasks.spawn(self._trust(access.authorities))

    def admit(self, blob: Digest, text: str, host: str, asked: Priority, *, join: str | None = None) -> Priority:
        """The priority at which a peer may receive a blob. Raises Refused."""
        if not self.peers.on:
            return asked
        return self.peers.admit(blob, text, host, join=join, public=self.is_public(blob), asked=asked)

    def is_public(self, blob: Digest) -> bool:
        """Whether a blob belongs to a public package."""
        if self.peers.public.everything:
            return True
        names = self.names.of(blob)
        return bool(names) and self.peers.public.match_any(names)

    def mount_roots(self) -> tuple[str, ...]:
        """The directories below which users of this host may have views; none for no limit."""
        return self.peers.local.mount_roots

    def may_swarm(self, blob: Digest) -> bool:
        """Whether a blob may come and go by BitTorrent, whose peers show neither certificates nor
        tickets."""
        return not self.peers.on or self.is_public(blob)

    def _read_names(self) -> None:
        """With access on, and with SVIDs, which name no addresses, have the certificate of a peer
        name the host of the plan."""
        if self.tls is not None and (self.peers.on or self._workload is not None):
            self.tls.host_in = self.peers.source_in

    async def _trust(self, authorities: str) -> None:
        try:
            if self._membership is not None:
                await asyncio.to_thread(self._membership.trust, authorities)
            elif self.tls is not None:
                await asyncio.to_thread(self.tls.trust, authorities)
        except (P2PDistError, OSError) as error:
            logger.warning("the fleet's authorities stay as they were: %s", error)

    async def _watch(self, tls: Tls) -> None:
        """Read certificates of one's own again when their files change. An SVID is in memory, and
        only the further authorities beside it in a file."""
        files = tls.files
        own = (files.certificate, files.key, files.authority) if self._workload is None else ()
        paths = [*own, *filter(None, (files.further,))]
        before = await asyncio.to_thread(_stamps, paths)
        while True:
            await asyncio.sleep(WATCH_S)
            now = await asyncio.to_thread(_stamps, paths)
            if now == before:
                continue
            try:
                await asyncio.to_thread(tls.reload)
            except UsageError as error:  # the other file may still be on its way
                logger.warning("the certificates stay as they were: %s", error)
            else:
                before = now
                logger.info("certificates were read again")


def _stamps(paths: Iterable[Path]) -> tuple[tuple[int, int] | None, ...]:
    stamps: list[tuple[int, int] | None] = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((status.st_mtime_ns, status.st_ino))
    return tuple(stamps)
