"""BitTorrent at an agent: the one session, the port before it runs, the torrents that are known,
and the complete blobs that are seeded.

Theory. libtorrent costs an agent 20 MB and several threads, and most agents never need it. So the
session starts when it is first needed: a pull takes part in a swarm, a peer connects to the port,
or no tracker has answered for a while, and other agents may be looking for what is here. Where all
blobs are to come from swarms that is at once. From then on it stays. Until then a LazyListener
listens at the port. At the first connection it gives the port free, has the session started there,
and relays from socket to socket the connections that came before; all later ones reach the session
itself. A peer never notices, but it may see another port at the other end.

While the session runs the complete blobs that were used last are seeded, as far as they have a
torrent, and the last few of them as torrents of version 1, too, which aria2 and transmission need.
A peer is an agent at the port next to the one where other agents reach it, or a peer that a
tracker's /announce names; trackers know agents with complete blobs by their sessions there, so only
seeds of version 1 announce themselves.

Invariants: what is remembered is limited. At most RELAYS_MAX connections are relayed; each holds
RELAY_BYTES at most in either direction. A blob that is chosen for eviction is released first
(`release`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from p2pdist.agent.bittorrent.torrents import Torrents
from p2pdist.agent.discovery.trackerless import Neighbourhood
from p2pdist.agent.tasks import Tasks
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.agent.uplink import Uplink
from p2pdist.core.eviction import choose
from p2pdist.core.transport import AWAY_S, Policy
from p2pdist.model.address import Vicinity, parse_address
from p2pdist.model.candidate import Candidate, Share
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, P2PDistError, Unavailable
from p2pdist.model.url import redacted
from p2pdist.origin.contract import Origin
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore
from p2pdist.transfer.names import NAMES, require_near
from p2pdist.transfer.torrent.seeds import SEEDS_MAX, Seed, TorrentSeeds
from p2pdist.transfer.torrent.session import TorrentSession
from p2pdist.transfer.torrent.settings import TorrentSettings
from p2pdist.transfer.torrent.swarm import PEERS_MAX, Address, Swarm
from p2pdist.transfer.torrent.transfer import TorrentTransfer

logger = logging.getLogger(__name__)

RELAYS_MAX = 16
RELAY_BYTES = 64 << 10
CONNECT_S = 5.0
ACCEPT_PAUSE_S = 1.0
"""After a connection could not be taken, with which the kernel waits."""


class LazyListener:
    """Listens at the BitTorrent port until a peer connects. Raises Conflict when the address is
    taken."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=RELAYS_MAX)
        except OSError as error:
            raise Conflict(
                f"BitTorrent cannot listen on {host} port {port}: {error.strerror or error}",
                remedy="Give another --bt-listen, or --transport trees",
            ) from error
        self._socket.setblocking(False)
        self.host = host
        self.port = int(self._socket.getsockname()[1])
        self._waiting: asyncio.Task[None] | None = None
        self._relays: set[asyncio.Task[None]] = set()

    def wait(self, start: Callable[[], Awaitable[object]]) -> None:
        """Await `start` when a peer connects: it closes this, and has the session listen there. It
        may raise P2PDistError."""
        self._waiting = asyncio.create_task(self._wait(start), name="bittorrent-listener")

    def close(self) -> None:
        """Give the port free; relays go on."""
        self._socket.close()
        if self._waiting is not None and self._waiting is not asyncio.current_task():
            self._waiting.cancel()

    async def stop(self) -> None:
        """Give the port free and end the relays."""
        self._socket.close()
        tasks = [*self._relays, *([self._waiting] if self._waiting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _first(self) -> socket.socket | None:
        """The first connection; None once this is closed."""
        warned = False
        while self._socket.fileno() >= 0:
            try:
                return (await asyncio.get_running_loop().sock_accept(self._socket))[0]
            except OSError as error:  # no descriptor or no memory is left, or it is closed
                if self._socket.fileno() >= 0:
                    if not warned:  # Linux says so also while there is no peer
                        logger.warning("no BitTorrent peer can be taken for now: %s", error.strerror or error)
                    warned = True
                    await asyncio.sleep(ACCEPT_PAUSE_S)
        return None

    async def _wait(self, start: Callable[[], Awaitable[object]]) -> None:
        if (first := await self._first()) is None:
            return
        connections = [first]
        with suppress(OSError):
            while len(connections) < RELAYS_MAX:
                connections.append(self._socket.accept()[0])
        try:
            await start()
        except P2PDistError as error:
            logger.warning("a BitTorrent peer cannot be served: %s", error)
            for connection in connections:
                connection.close()
            return
        for connection in connections:
            connection.setblocking(False)
            relay = asyncio.create_task(self._relay(connection))
            self._relays.add(relay)
            relay.add_done_callback(self._relays.discard)

    async def _relay(self, connection: socket.socket) -> None:
        """Join a connection with one to the session, which listens at the port now."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        writers = []
        with suppress(OSError, TimeoutError):
            try:
                outer, to_outer = await asyncio.open_connection(sock=connection, limit=RELAY_BYTES)
                writers.append(to_outer)
                async with asyncio.timeout(CONNECT_S):
                    inner, to_inner = await asyncio.open_connection(host, self.port, limit=RELAY_BYTES)
                writers.append(to_inner)
                pumps = [asyncio.create_task(_pump(outer, to_inner)), asyncio.create_task(_pump(inner, to_outer))]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
            finally:
                for writer in writers:
                    writer.close()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(RELAY_BYTES):
        target.write(data)
        await target.drain()


SEEDED_MAX = SEEDS_MAX // 2
SEEDED_V1_MAX = 16
SEEDS_S = 5.0
"""How often the service looks what there is to seed, if nothing happens before."""

LOOKUPS_FIRST, LOOKUPS = 4, 1
"""Torrents that are asked for in the first look and in each later one: all agents of a fleet may be
looking."""

START_AGAIN_S = 30.0
ANNOUNCES_MAX = 8
MET_MAX = 16
SHARE_S = 0.5
SHARE_MIN = 1 / 16
"""The part of a limit that BitTorrent has in any case."""


@dataclass(frozen=True, slots=True)
class SwarmSettings:
    """How an agent takes part in BitTorrent."""

    policy: Policy
    listen: tuple[str, int]
    """An IP address and the port for BitTorrent peers."""
    required: bool = False
    """The agent does not start where that address is taken; else it does without BitTorrent."""
    forced: bool = False
    """The transport was given to this agent, and the policies of packages change nothing."""


class Limits(Protocol):
    """What the service needs of the agent's settings: the URLs of trackers that it was given, and
    how fast it may send and receive."""

    @property
    def trackers(self) -> tuple[str, ...]: ...
    @property
    def upload_bytes_s(self) -> float | None: ...
    @property
    def download_bytes_s(self) -> float | None: ...


@dataclass(slots=True)
class ServiceContext:
    """What BitTorrent needs of its agent."""

    settings: Limits
    store: BlobStore
    session: TrackerSession
    own_origin: Origin | None
    neighbourhood: Neighbourhood | None
    uplink: Uplink
    received_bytes: Counter[str]
    """Bytes of verified pieces, by "origin", "peer" and "bittorrent"."""
    allowed: Callable[[Digest], bool] = lambda blob: True
    """Whether a blob may come and go by BitTorrent, whose peers show no tickets."""


def open_listener(settings: SwarmSettings | None) -> LazyListener | None:
    """Listen for BitTorrent peers; None where blobs come by trees only. Where nobody named the port
    and it is taken, as by another agent of this machine, a free one does, which trackers tell
    peers. Raises Conflict when the port is required and taken."""
    if settings is None or settings.policy == "trees":
        return None
    host, port = settings.listen
    try:
        return LazyListener(host, port)
    except Conflict as error:
        if settings.required:
            raise
        try:
            listener = LazyListener(host, 0)
        except Conflict:
            logger.warning("%s; blobs come by trees only", error)
            return None
        logger.info("BitTorrent listens on port %d of %s, since port %d is taken", listener.port, host, port)
        return listener


class SeededFiles:
    """The files of complete blobs that libtorrent has open for seeding. The methods block, and any
    thread may call them."""

    def __init__(self) -> None:
        self.seeds: TorrentSeeds | None = None
        """Set by SwarmService when its session opens."""

    def choose(self, candidates: Sequence[Candidate], needed: int, shares: Sequence[Share] = ()) -> list[Digest] | None:
        """The blobs that the store is to evict (see Chooser), released by BitTorrent."""
        chosen = choose(candidates, needed, shares)
        for digest in chosen or ():
            self.release(digest)
        return chosen

    def release(self, digest: Digest) -> None:
        """Close the file of a blob that is about to go."""
        if self.seeds is not None and not self.seeds.release(digest):
            logger.warning("libtorrent does not let go of %s; its room is free later", digest)


class SwarmService:
    """An agent's part in all its swarms. Lives on the event loop, but for `release`."""

    def __init__(
        self,
        settings: SwarmSettings,
        context: ServiceContext,
        listener: LazyListener,
        files: SeededFiles,
        wanted_for: Callable[[Digest], Policy | None],
    ) -> None:
        self.policy = settings.policy
        self.wanted_for = wanted_for
        """What the policy of a blob's package asks for."""
        self._settings, self._context = settings, context
        self._listener, self._files = listener, files
        self._session: TorrentSession | None = None
        self._opening = asyncio.Lock()
        self._failed: tuple[float, P2PDistError] | None = None
        self.torrents = Torrents(context)
        self._met: OrderedDict[Digest, tuple[Address, ...]] = OrderedDict()  # peers of swarms that were left
        self._due, self._seeded = asyncio.Event(), asyncio.Event()
        self._tasks = Tasks(logger, "BitTorrent at this agent fails")
        self._alone: asyncio.TimerHandle | None = None

    @property
    def sent_bytes(self) -> int:
        """Bytes sent by BitTorrent."""
        return self._session.sent_bytes if self._session is not None else 0

    def policy_of(self, blob: Digest) -> Policy:
        """By which transports a blob may come."""
        if not self._context.allowed(blob):
            return "trees"
        asked_for = self.wanted_for(blob) if not self._settings.forced else None
        return asked_for or self.policy

    def start(self) -> None:
        """Wait for peers."""
        self._listener.wait(self._open_with_seeds)
        if self.policy == "swarm":
            self._tasks.spawn(self._open_quietly())

    async def stop(self) -> None:
        """Leave all swarms, and close all files."""
        if self._alone is not None:
            self._alone.cancel()
        await self._tasks.stop()
        await self._listener.stop()
        if self._session is not None and not await asyncio.to_thread(self._session.close):
            logger.warning("libtorrent does not end")

    async def open(self) -> TorrentSession:
        """The session, started if need be. Raises Unavailable."""
        async with self._opening:
            if self._session is not None and self._session.call(lambda: None):
                return self._session
            now = asyncio.get_running_loop().time()
            if self._failed is not None and now < self._failed[0] + START_AGAIN_S:
                raise self._failed[1]
            self._listener.close()
            host, _ = self._settings.listen
            first = self._files.seeds is None
            self._session = session = TorrentSession(TorrentSettings(host, self._listener.port))
            try:
                await asyncio.to_thread(session.start)
            except P2PDistError as error:
                self._session, self._failed = None, (now, error)
                raise
            logger.info("BitTorrent listens on %s port %d", host, session.port)
            self._files.seeds = TorrentSeeds(session)
            self._share(session, (0, 0))
            if first:
                self._tasks.spawn(self._keep_seeding())
                if any(self._limits()):
                    self._tasks.spawn(self._keep_sharing())
            self._due.set()
            return session

    def tracker_changed(self, present: bool) -> None:
        """Start the session once trackers have been away for AWAY_S: other agents may look for what
        is here, and no tracker tells them that it is."""
        if self._alone is not None:
            self._alone.cancel()
        if not present:
            self._alone = asyncio.get_running_loop().call_later(AWAY_S, lambda: self._tasks.spawn(self._open_quietly()))

    def left(self, blob: Blob, peers: tuple[Address, ...], done: TorrentTransfer | None) -> None:
        """Take in that a pull has left a swarm, whose peers are not to wait for it if it comes back
        as a seed; or that it is done, and its transfer stays as one."""
        self._met[blob.digest] = peers
        if done is not None and self._files.seeds is not None:
            seed = Seed(blob.digest, blob.path, done.torrent, blob.last_used, Swarm(peers=peers))
            self._files.seeds.take_over(seed, done)
        if len(self._met) > MET_MAX:
            self._met.popitem(last=False)

    def changed(self) -> None:
        """Look for more to seed: a blob has become complete."""
        self._due.set()

    def release(self, digest: Digest) -> None:
        """Close the file of a blob that is about to go. Blocks; from any thread."""
        self._files.release(digest)

    # -- what a pull asks

    def announces(self, digest: Digest) -> tuple[str, ...]:
        """The announce URLs of a blob's torrents: the trackers, the present one first."""
        given = {redacted(url.rstrip("/")): url.rstrip("/") for url in self._context.settings.trackers}
        urls = sorted(self._context.session.urls, key=lambda url: url != self._context.session.url)
        return tuple(f"{given.get(url, url)}/announce?blob={digest}" for url in urls[:ANNOUNCES_MAX])

    async def peers(self, addresses: Iterable[str]) -> tuple[Address, ...]:
        """The BitTorrent addresses of the agents at these `addresses` (host:port) and of discovered
        agents."""
        neighbourhood = self._context.neighbourhood
        discovered = (agent.address for agent in neighbourhood.agents()) if neighbourhood is not None else ()
        agents = dict.fromkeys((*addresses, *discovered))
        vicinity = self._context.session.vicinity
        peers = await asyncio.gather(*(_next_port(address, vicinity) for address in list(agents)[:PEERS_MAX]))
        return tuple(dict.fromkeys(peer for peer in peers if peer is not None))

    # -- seeds

    async def _keep_seeding(self) -> None:
        while True:
            self._due.clear()
            try:
                await self._seed()
            except P2PDistError as error:
                logger.warning("what is here cannot be seeded: %s", error)
            self._seeded.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(SEEDS_S):
                    await self._due.wait()

    async def _seed(self) -> None:
        allowed, opened = self._context.allowed, self._context.store.opened
        blobs = [blob for blob in self._context.store.blobs() if blob.complete and blob.size and allowed(blob.digest)]
        blobs = [blob for blob in blobs if blob.digest not in opened]  # what was decrypted here goes to no other
        blobs.sort(key=lambda blob: blob.last_used, reverse=True)
        lookups = LOOKUPS if self._seeded.is_set() else LOOKUPS_FIRST
        for blob in [blob for blob in blobs[:SEEDED_MAX] if self.torrents.open_question(blob.digest)][:lookups]:
            await self._look_up(blob)
        seeds: list[Seed] = []
        torrents = ((blob, self.torrents.known(blob.digest)) for blob in blobs[:SEEDED_MAX])
        pairs = [(blob, torrent) for blob, torrent in torrents if torrent is not None]
        for number, (blob, torrent) in enumerate(pairs):
            seeds.append(
                Seed(blob.digest, blob.path, torrent, blob.last_used, Swarm(peers=self._met.get(blob.digest, ())))
            )
            if number < SEEDED_V1_MAX:
                swarm = Swarm(trackers=self.announces(blob.digest))
                seeds.append(Seed(blob.digest, blob.path, torrent.v1_only(), blob.last_used, swarm))
        if self._files.seeds is not None:
            self._files.seeds.keep(seeds)

    async def _look_up(self, blob: Blob) -> None:
        """Ask for the torrent of a blob. Central storage is not asked by a fleet that has lost its
        trackers."""
        session = self._context.session
        try:
            await self.torrents.find(blob.digest, blob.layout, at_origin=not (session.urls or session.searching))
        except Unavailable as error:
            logger.debug("%s is not seeded yet: %s", blob.digest, error)
        except P2PDistError as error:
            logger.warning("%s is not seeded: %s", blob.digest, error)
            self.torrents.forget(blob.digest)

    # -- limits

    async def _keep_sharing(self) -> None:
        """Both transports together keep to the agent's limits: what trees took in the last moment
        BitTorrent goes without in the next."""
        before = self._moved_by_trees()
        while True:
            await asyncio.sleep(SHARE_S)
            now = self._moved_by_trees()
            if self._session is not None:
                self._share(self._session, (now[0] - before[0], now[1] - before[1]))
            before = now

    def _limits(self) -> tuple[float | None, float | None]:
        return self._context.settings.upload_bytes_s, self._context.settings.download_bytes_s

    def _moved_by_trees(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        received = self._context.received_bytes
        return self._context.uplink.sent_bytes_total, received["origin"] + received["peer"]

    def _share(self, session: TorrentSession, moved: tuple[int, int]) -> None:
        left = [
            int(max(limit * SHARE_MIN, limit - count / SHARE_S)) if limit else 0
            for limit, count in zip(self._limits(), moved, strict=True)
        ]
        session.set_limits(left[0], left[1])

    # -- opening

    async def _open_with_seeds(self) -> None:
        """Start the session for a peer that has connected, once it has blobs to ask for."""
        session = await self.open()
        with suppress(TimeoutError):
            async with asyncio.timeout(SEEDS_S):
                await self._seeded.wait()
        loop, added = asyncio.get_running_loop(), asyncio.Event()

        def reached() -> None:
            loop.call_soon_threadsafe(added.set)

        if session.call(reached):
            await added.wait()

    async def _open_quietly(self) -> None:
        try:
            await self.open()
        except P2PDistError as error:
            logger.warning("%s", error)


async def _next_port(address: str, vicinity: Vicinity) -> Address | None:
    """The BitTorrent address of the agent at `address`, None where that does not resolve, or to
    what a host with this vicinity may not connect to."""
    try:
        host, port = parse_address(address)
        return require_near(host, await NAMES.find_soon(host), vicinity)[0][1], port + 1
    except (OSError, ValueError, OverflowError):
        return None
