"""Finding trackers and agents on the same links, and being found, by multicast DNS (RFC 6762) and
DNS-SD (RFC 6763).

Services are `_p2pdist-tracker._tcp.local.` and `_p2pdist-agent._tcp.local.`; core/trackerless.py
defines their TXT records. Each link, that is an address of an interface, has a responder of its
own, which announces only the address that is valid there and accepts only announcements with an
address there: interfaces of the same range at different hosts, as container bridges have, do not
become one network. A running process follows links that come and go.

Questions ask for multicast answers from the first one on. A unicast answer reaches one process of a
host, and there may be several, such as the system's own responder.

Names in conflict: a tracker takes another name where one on the link has its own (RFC
6762, 9). An agent's name is its identity, so it stays unannounced, logs that and tries again. Where
both began at once, the process with the lower address keeps the name.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from ipaddress import ip_address
from itertools import islice
from typing import Any

from zeroconf import DNSQuestionType, Error, NonUniqueNameException, ServiceInfo, ServiceStateChange
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from p2pdist.agent.discovery.links import DiscoverySettings, Link, addresses_of, check_interfaces, find_links
from p2pdist.core.trackerless import Announcement, Kind, LinkPeers, address_on, label_of, read_text, text_of
from p2pdist.model.errors import UsageError

TYPES: dict[Kind, str] = {"tracker": "_p2pdist-tracker._tcp.local.", "agent": "_p2pdist-agent._tcp.local."}
KINDS: dict[str, Kind] = {name: kind for kind, name in TYPES.items()}

RESCAN_S = 5.0
"""Between two scans of the interfaces and of zeroconf's cache: zeroconf reports no record a second
time, although another record that contradicted it may have gone."""

RETRY_S = 30.0
"""Pause before another try to claim a name that is taken."""

DEFEND_S = 2.0
"""Between two announcements that defend a name."""

GATHER_S = 0.05
"""Changes within this time are reported as one."""

LOOKUP_MS = 3000
LOOKUPS_MAX = 32
STRANGERS_MAX = 1024
"""Malformed announcements that are remembered, so that each is logged once."""

TTL_S = 1200
"""How long other processes keep the announcement of a process that was killed; browsers ask again
before that."""

logger = logging.getLogger(__name__)


class Discovery:
    """Announces this process as `own`, one of `kind`, and collects the processes of the kinds in
    `browse` in `neighbours`; calls `on_change` when these have changed. With `silent` it only
    collects. Raises UsageError for an announcement that does not fit and for interfaces that do not
    exist."""

    def __init__(
        self,
        kind: Kind,
        own: Announcement,
        settings: DiscoverySettings,
        *,
        browse: Iterable[Kind] = (),
        on_change: Callable[[], None] = lambda: None,
        silent: bool = False,
    ) -> None:
        text_of(own)
        check_interfaces(settings.interfaces)
        self.kind, self.own, self.settings = kind, own, settings
        self.browse = tuple(browse)
        self.neighbours = LinkPeers(own)
        self._on_change, self._silent = on_change, silent
        self._responders: dict[Link, _Responder] = {}
        self._reporting: asyncio.TimerHandle | None = None
        """The next call of `on_change`."""
        self._task: asyncio.Task[None] | None = None
        """Scans the interfaces every RESCAN_S."""
        self._strangers: dict[tuple[str, str], None] = {}
        """Link and name of malformed announcements that were logged."""
        self._failed: set[Link] = set()
        """Links that could not be opened, which was logged."""
        self._listens: frozenset[str] | None = None
        """The addresses on which the service listens; empty means all of them, None not yet
        known."""

    async def start(self) -> None:
        """Open the links; a link that fails is logged and tried again later."""
        logging.getLogger("zeroconf").setLevel(logging.WARNING)  # below that it logs every packet
        await self._rescan()
        if not self._responders and not self._failed:
            logger.info("no network to discover others on: listening on %s only", self.settings.listen[0])
        self._task = asyncio.create_task(self._follow(), name="discovery")

    async def stop(self) -> None:
        """Withdraw the announcements (RFC 6762, 10.1) and stop listening."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._reporting is not None:
            self._reporting.cancel()
        await asyncio.gather(*(responder.stop() for responder in self._responders.values()))
        self._responders.clear()

    @property
    def links(self) -> list[Link]:
        """The links that are open."""
        return list(self._responders)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(RESCAN_S)
            try:
                await self._rescan()
                for responder in self._responders.values():
                    responder.look_again()
            except Exception:
                logger.exception("looking for network interfaces failed")

    async def _rescan(self) -> None:
        if self._listens is None:
            self._listens = await asyncio.to_thread(addresses_of, self.settings.listen[0])
        links = await asyncio.to_thread(find_links, self.settings.interfaces, self._listens)
        for link in self._responders.keys() - set(links):
            logger.info("%s on %s is gone", link.address, link.interface)
            await self._responders.pop(link).stop()
            if self.neighbours.cut_off(link.address):
                self.changed()
        self._failed &= set(links)
        for link in links:
            if link not in self._responders:
                await self._open(link)

    async def _open(self, link: Link) -> None:
        announced = link.address in self._listens if self._listens else self._hears(link)
        responder = _Responder(self, link, announced=announced and not self._silent)
        try:
            await responder.start()
        except (OSError, Error) as error:
            await responder.stop()
            if link not in self._failed:
                self._failed.add(link)
                logger.warning("no discovery on %s (%s): %s", link.interface, link.address, error or repr(error))
            return
        self._failed.discard(link)
        self._responders[link] = responder
        logger.info(
            "discovery on %s (%s) network=%s%s",
            link.interface,
            link.address,
            self.own.network,
            "" if announced else "; not announced, as it does not listen there",
        )

    def _hears(self, link: Link) -> bool:
        """Whether a service that listens on all addresses listens on this one: 0.0.0.0 means those
        of IPv4, :: those of both families."""
        return self.settings.listen[0] != "0.0.0.0" or link.range.version == 4

    def changed(self) -> None:
        """Report a change of `neighbours` soon."""
        if self._reporting is None:
            self._reporting = asyncio.get_running_loop().call_later(GATHER_S, self._report)

    def _report(self) -> None:
        self._reporting = None
        self._on_change()

    def strange(self, link: Link, instance: str, why: object) -> None:
        """Log a malformed announcement, once."""
        stranger = (link.address, instance)
        if stranger not in self._strangers and len(self._strangers) < STRANGERS_MAX:
            self._strangers[stranger] = None
            logger.debug("ignoring %r on %s: %s", instance[:100], link.interface, why)


class _Responder:
    """Multicast DNS on one link."""

    def __init__(self, discovery: Discovery, link: Link, *, announced: bool) -> None:
        self._discovery, self._link, self._claims = discovery, link, announced
        # Its own kind is browsed in any case, for another process of the same name.
        self._kinds: set[Kind] = {*discovery.browse, *([discovery.kind] if announced else [])}
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._info: ServiceInfo | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._lookups: dict[str, asyncio.Task[None]] = {}
        self._conflict_logged = False
        self._defended = False
        self._defend_again = False
        """Whether the name is to be defended once what is announced now has been."""

    async def start(self) -> None:
        """Begin to listen and to ask. Raises OSError and zeroconf's errors."""
        self._zeroconf = AsyncZeroconf(interfaces=[self._link.address])
        await self._zeroconf.zeroconf.async_wait_for_start()
        if self._kinds:
            self._browser = AsyncServiceBrowser(
                self._zeroconf.zeroconf,
                [TYPES[kind] for kind in sorted(self._kinds)],
                handlers=[self._changed],
                question_type=DNSQuestionType.QM,
            )
        if self._claims:
            self._begin(self._announce())

    async def stop(self) -> None:
        tasks = [*self._lookups.values(), *([self._announcing] if self._announcing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._browser is not None:
            await self._browser.async_cancel()
        if self._zeroconf is not None:
            await self._zeroconf.async_close()

    # -- announcing

    @property
    def announced(self) -> bool:
        return self._info is not None

    def _begin(self, announcing: Coroutine[Any, Any, None]) -> None:
        self._announcing = asyncio.create_task(announcing, name=f"announce-{self._link.address}")
        self._announcing.add_done_callback(self._ended)

    def _ended(self, announcing: asyncio.Task[None]) -> None:
        if self._defend_again and not announcing.cancelled():
            self._defend_again = False
            self._defend(DEFEND_S)

    async def _announce(self) -> None:
        """Claim the name, and announce it once no other process has it."""
        own, kind = self._discovery.own, self._discovery.kind
        assert self._zeroconf is not None
        name = f"{label_of(own.host)}.{TYPES[kind]}"
        while True:
            info = ServiceInfo(
                TYPES[kind],
                name,
                port=self._discovery.settings.listen[1],
                parsed_addresses=[self._link.address],
                properties=text_of(own),
                other_ttl=TTL_S,
            )
            try:
                sent = await self._zeroconf.async_register_service(info, allow_name_change=kind == "tracker")
            except NonUniqueNameException:
                self._log_conflict("another process on the network")
                await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.5))
                continue
            except (OSError, Error) as error:
                logger.warning("cannot announce %s on %s: %s", own.host, self._link.interface, error or repr(error))
                await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.5))
                continue
            self._info, self._conflict_logged = info, False
            if info.name != name:
                logger.warning(
                    "another %s is announced as %s; this one is as %s", kind, label_of(own.host), _instance(info.name)
                )
            with suppress(OSError, Error):
                await sent
            return

    def _log_conflict(self, rival: str) -> None:
        if not self._conflict_logged:
            self._conflict_logged = True
            logger.warning(
                "the name %s is used by %s: this %s is not announced on %s. Give each its own --name",
                self._discovery.own.host,
                rival,
                self._discovery.kind,
                self._link.interface,
            )

    def _meet_own_name(self, info: AsyncServiceInfo) -> None:
        """Compare an announcement under this process's name: it is this one's own, or a conflict
        that probing did not find."""
        assert self._info is not None and self._zeroconf is not None
        here = (ip_address(self._link.address), self._discovery.settings.listen[1])
        rivals = [(ip_address(address), info.port or 0) for address in info.parsed_addresses() if "%" not in address]
        rival = next((other for other in rivals if other != here), None)
        if rival is None:
            return
        if (here[0].packed, here[1]) < (rival[0].packed, rival[1]):
            self._defend()
            return
        # Not a goodbye, which would remove the other process's records from all caches.
        self._zeroconf.zeroconf.registry.async_remove(self._info)
        self._info = None
        self._log_conflict(f"{rival[0]} port {rival[1]}")
        if self._announcing is not None:
            self._announcing.cancel()
        self._begin(self._announce_later())

    async def _announce_later(self) -> None:
        await asyncio.sleep(GATHER_S if self._discovery.kind == "tracker" else RETRY_S)
        await self._announce()

    def _defend(self, pause_s: float = 0.0) -> None:
        """Announce the name again, after a pause, since another process announced or withdrew it;
        every DEFEND_S at most."""
        if self._info is None or self._zeroconf is None:
            return
        if self._announcing and not self._announcing.done():
            self._defend_again = True  # the other one may have spoken after the last packet of this one
            return
        if not self._defended:
            logger.warning(
                "another process on %s uses the name %s, too", self._link.interface, _instance(self._info.name)
            )
        pause_s, self._defended = DEFEND_S if self._defended else pause_s, True
        self._begin(self._announce_again(self._zeroconf, self._info, pause_s))

    async def _announce_again(self, zeroconf: AsyncZeroconf, info: ServiceInfo, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        with suppress(OSError, Error):
            await (await zeroconf.async_update_service(info))

    # -- browsing

    def _changed(self, **event: Any) -> None:
        """Handle zeroconf's report of an instance."""
        name, change = str(event["name"]), event["state_change"]
        kind = KINDS.get(event["service_type"])
        if kind is None or self._zeroconf is None:
            return
        if change is ServiceStateChange.Removed:
            if self._info is not None and name.lower() == self._info.name.lower():
                self._defend()
            lookup = self._lookups.pop(name, None)
            if lookup is not None:
                lookup.cancel()
            if self._discovery.neighbours.gone(kind, self._link.address, name):
                self._discovery.changed()
            return
        info = AsyncServiceInfo(event["service_type"], name)
        if info.load_from_cache(self._zeroconf.zeroconf):
            self._heard(kind, info)
        elif name not in self._lookups and len(self._lookups) < LOOKUPS_MAX:
            lookup = self._lookups[name] = asyncio.create_task(self._look_up(self._zeroconf, kind, info))
            lookup.add_done_callback(
                lambda done: self._lookups.pop(name, None) if self._lookups.get(name) is done else None
            )

    def look_again(self) -> None:
        """Read the cache as if its records had just come."""
        assert self._zeroconf is not None
        for kind in self._kinds:
            for record in islice(self._zeroconf.zeroconf.cache.async_entries_with_name(TYPES[kind]), STRANGERS_MAX):
                info = AsyncServiceInfo(TYPES[kind], str(getattr(record, "alias", TYPES[kind])))
                if info.load_from_cache(self._zeroconf.zeroconf):
                    self._heard(kind, info)

    async def _look_up(self, zeroconf: AsyncZeroconf, kind: Kind, info: AsyncServiceInfo) -> None:
        if await info.async_request(zeroconf.zeroconf, LOOKUP_MS, DNSQuestionType.QM):
            self._heard(kind, info)

    def _heard(self, kind: Kind, info: AsyncServiceInfo) -> None:
        discovery, link = self._discovery, self._link
        if kind == discovery.kind and self._info is not None and info.name.lower() == self._info.name.lower():
            self._meet_own_name(info)
            return
        if kind not in discovery.browse:
            return
        address = address_on(link.range, info.parsed_addresses())
        if address is None or not info.port:
            discovery.strange(link, info.name, "it has no address and port on this link")
            return
        try:
            announced = read_text(info.properties, _joined(address, info.port))
        except UsageError as error:
            discovery.strange(link, info.name, error)
            return
        if discovery.neighbours.heard(kind, link.address, info.name, announced):
            logger.debug("%s %s at %s on %s", kind, announced.host, announced.address, link.interface)
            discovery.changed()


def _instance(name: str) -> str:
    return name.split("._p2pdist-", 1)[0]


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
