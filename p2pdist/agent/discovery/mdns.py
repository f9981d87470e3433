"""Finding trackers and agents on the same links, and being found, by multicast DNS (RFC 6762) and
DNS-SD (RFC 6763).

Services are `_p2pdist-tracker._tcp.local.` and `_p2pdist-agent._tcp.local.`; what TXT records say
is in core/trackerless.py. Each link, that is an address of an interface, has a responder of its
own, which announces only the address that is valid there and hears only those who have one there:
interfaces of the same range at different hosts, as container bridges have, are not taken for one
network. Links that come and go while the process runs are followed.

Questions ask for multicast answers from the first one on. A unicast answer goes to one process of a
host, and there may be others, such as the system's own responder.

A name that somebody else uses on the link: a tracker takes another one (RFC 6762, 9); an agent's
name is who it is, so it stays unannounced, says so and tries again. Where both began at once, the
one with the higher address gives way.

Links: the networks that a process can be discovered on, one for each interface with an address;
how discovery is set up; and the address that this host gives to others.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from itertools import islice
from typing import Any

import ifaddr
from zeroconf import DNSQuestionType, Error, NonUniqueNameException, ServiceInfo, ServiceStateChange
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from p2pdist.core.trackerless import Announcement, Kind, LinkPeers, address_on, label_of, read_text, text_of
from p2pdist.model.errors import UsageError

LINKS_MAX = 16


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """`network`: those of other networks are not heard. `interfaces`: names or addresses of
    interfaces; none means those that the service listens on, loopback left out. `trackers`: whether
    trackers are looked for."""

    listen: tuple[str, int]
    network: str = "default"
    interfaces: tuple[str, ...] = ()
    trackers: bool = True


@dataclass(frozen=True, slots=True)
class Link:
    """An address of an interface, and the range that is reached through it."""

    interface: str
    address: str
    range: IPv4Network | IPv6Network


def find_links(interfaces: Iterable[str], listens: frozenset[str]) -> list[Link]:
    """The links to use now: of `interfaces` (names or addresses) where some are named, else those
    with one of the addresses in `listens`, of all but loopback when that is empty. One for each
    interface: its first IPv4 address, else its first IPv6 address that is not link-local."""
    named = set(interfaces)
    found = []
    for adapter in ifaddr.get_adapters():
        places = [_place(each) for each in adapter.ips]
        usable = [each for each in places if not each[0].is_link_local and (named or not each[0].is_loopback)]
        if named and adapter.nice_name not in named:
            usable = [each for each in usable if str(each[0]) in named]
        elif not named and listens:
            usable = [each for each in usable if str(each[0]) in listens]
        usable.sort(key=lambda each: each[0].version)
        if usable:
            address, prefix = usable[0]
            found.append(Link(adapter.nice_name, str(address), ip_network(f"{address}/{prefix}", strict=False)))
    return found[:LINKS_MAX]


def _place(each: ifaddr.IP) -> tuple[IPv4Address | IPv6Address, int]:
    return ip_address(each.ip if isinstance(each.ip, str) else each.ip[0]), each.network_prefix


def check_interfaces(interfaces: Iterable[str]) -> None:
    """Raises UsageError for one that is none."""
    adapters = list(ifaddr.get_adapters())
    names = {adapter.nice_name for adapter in adapters}
    known = names | {str(_place(each)[0]) for adapter in adapters for each in adapter.ips}
    for name in interfaces:
        if name not in known:
            raise UsageError(
                f"there is no network interface {name[:100]!r}",
                remedy=f"Give --discovery-interface one of {', '.join(sorted(names))}, or the address of one",
            )


def address_for_others(local: str, listens: str) -> str:
    """The address at which others reach this host, which listens on `listens` (0.0.0.0 or ::) and
    has the address `local` in its session with the tracker. That is `local` itself, unless it means
    something else elsewhere (loopback, link-local of IPv6) or nobody listens on it (IPv6 where IPv4
    alone is listened on): then that of the default route, or else of the first interface. `local`
    where there is no better one."""
    here = ip_address(local.partition("%")[0])
    here = (here.ipv4_mapped or here) if isinstance(here, IPv6Address) else here
    versions = (4,) if listens == "0.0.0.0" else (here.version, 10 - here.version)
    if here.version in versions and _means_one_host(here):
        return str(here)
    routed = (_on_default_route(version) for version in versions)
    every = [_place(each)[0] for adapter in ifaddr.get_adapters() for each in adapter.ips]
    others = [*routed, *(each for version in versions for each in every if each.version == version)]
    return next((str(each) for each in others if each is not None and _means_one_host(each)), str(here))


def _means_one_host(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address stands for the same host elsewhere on the network. Those of IPv6 that are
    link-local need an interface as well, which has another name at each host."""
    return not (address.is_loopback or address.is_unspecified or (address.version == 6 and address.is_link_local))


def _on_default_route(version: int) -> IPv4Address | IPv6Address | None:
    """The address from which this host reaches far ones; None without such a route. No packet is
    sent."""
    family, far = (socket.AF_INET, "192.0.2.1") if version == 4 else (socket.AF_INET6, "2001:db8::1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None


def addresses_of(host: str) -> frozenset[str]:
    """The addresses that listening on `host` means; none stands for all."""
    if host in ("0.0.0.0", "::", ""):
        return frozenset()
    try:
        return frozenset(str(found[4][0]) for found in socket.getaddrinfo(host, None))
    except OSError:
        return frozenset([host])


TYPES: dict[Kind, str] = {"tracker": "_p2pdist-tracker._tcp.local.", "agent": "_p2pdist-agent._tcp.local."}
KINDS: dict[str, Kind] = {name: kind for kind, name in TYPES.items()}

RESCAN_S = 5.0
"""Between two looks at the interfaces, and at what is cached: zeroconf tells of no record that was
there before, although another one that contradicted it may have gone."""

RETRY_S = 30.0
"""How long a name that is taken is left alone."""

DEFEND_S = 2.0

GATHER_S = 0.05
"""Changes of the same moment are told as one."""

LOOKUP_MS = 3000
LOOKUPS_MAX = 32
STRANGERS_MAX = 1024
"""Strange announcements that are remembered, so that each is told once."""

TTL_S = 1200
"""How long others believe an announcement of somebody who vanished without a word; those who look
ask again before that."""

_logger = logging.getLogger(__name__)


class Discovery:
    """See the module's text. `own` is what this process announces as one of `kind`; kinds in
    `browse` are looked for and kept in `neighbours`, and `on_change` hears when something there has
    changed. Raises UsageError for what cannot be announced and for interfaces that do not exist."""

    def __init__(
        self,
        kind: Kind,
        own: Announcement,
        settings: DiscoverySettings,
        *,
        browse: Iterable[Kind] = (),
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        text_of(own)
        check_interfaces(settings.interfaces)
        self.kind, self.own, self.settings = kind, own, settings
        self.browse = tuple(browse)
        self.neighbours = LinkPeers(own)
        self._on_change = on_change
        self._responders: dict[Link, _Responder] = {}
        self._telling: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._strangers: dict[tuple[str, str], None] = {}
        self._failed: set[Link] = set()
        self._listens: frozenset[str] | None = None

    async def start(self) -> None:
        """Open the links; what fails there is told and tried again later."""
        logging.getLogger("zeroconf").setLevel(logging.WARNING)  # below that it tells every packet
        await self._rescan()
        if not self._responders and not self._failed:
            _logger.info("no network to discover anybody on: listening on %s only", self.settings.listen[0])
        self._task = asyncio.create_task(self._follow(), name="discovery")

    async def stop(self) -> None:
        """Take leave (RFC 6762, 10.1) and hear nothing more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._telling is not None:
            self._telling.cancel()
        await asyncio.gather(*(responder.stop() for responder in self._responders.values()))
        self._responders.clear()

    @property
    def announced_on(self) -> list[Link]:
        """Where the name is this one's."""
        return [link for link, responder in self._responders.items() if responder.announced]

    @property
    def links(self) -> list[Link]:
        return list(self._responders)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(RESCAN_S)
            try:
                await self._rescan()
                for responder in self._responders.values():
                    responder.look_again()
            except Exception:
                _logger.exception("looking for network interfaces failed")

    async def _rescan(self) -> None:
        if self._listens is None:
            self._listens = await asyncio.to_thread(addresses_of, self.settings.listen[0])
        wanted = await asyncio.to_thread(find_links, self.settings.interfaces, self._listens)
        for link in self._responders.keys() - set(wanted):
            _logger.info("%s on %s is gone", link.address, link.interface)
            await self._responders.pop(link).stop()
            if self.neighbours.cut_off(link.address):
                self.changed()
        self._failed &= set(wanted)
        for link in wanted:
            if link not in self._responders:
                await self._open(link)

    async def _open(self, link: Link) -> None:
        announced = link.address in self._listens if self._listens else self._hears(link)
        responder = _Responder(self, link, announced=announced)
        try:
            await responder.start()
        except (OSError, Error) as error:
            await responder.stop()
            if link not in self._failed:
                self._failed.add(link)
                _logger.warning("no discovery on %s (%s): %s", link.interface, link.address, error or repr(error))
            return
        self._failed.discard(link)
        self._responders[link] = responder
        _logger.info(
            "discovery on %s (%s) network=%s%s",
            link.interface,
            link.address,
            self.own.network,
            "" if announced else "; not announced, as it does not listen there",
        )

    def _hears(self, link: Link) -> bool:
        """Listening on 0.0.0.0 is on all addresses of IPv4, on :: of both families."""
        return self.settings.listen[0] != "0.0.0.0" or link.range.version == 4

    def changed(self) -> None:
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(GATHER_S, self._tell)

    def _tell(self) -> None:
        self._telling = None
        self._on_change()

    def strange(self, link: Link, instance: str, why: object) -> None:
        """Note, once, an announcement that is not understood."""
        place = (link.address, instance)
        if place not in self._strangers and len(self._strangers) < STRANGERS_MAX:
            self._strangers[place] = None
            _logger.debug("ignoring %r on %s: %s", instance[:100], link.interface, why)


class _Responder:
    """Multicast DNS on one link."""

    def __init__(self, discovery: Discovery, link: Link, *, announced: bool) -> None:
        self._discovery, self._link, self._claims = discovery, link, announced
        # Its own kind is looked at in any case, for another one of its name.
        self._kinds: set[Kind] = {*discovery.browse, *([discovery.kind] if announced else [])}
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._info: ServiceInfo | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._lookups: dict[str, asyncio.Task[None]] = {}
        self._told_of_conflict = False
        self._defended = False

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
            self._announcing = asyncio.create_task(self._announce(), name=f"announce-{self._link.address}")

    async def stop(self) -> None:
        tasks = [*self._lookups.values(), *([self._announcing] if self._announcing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._browser is not None:
            await self._browser.async_cancel()
        if self._zeroconf is not None:
            await self._zeroconf.async_close()

    # -- being found

    @property
    def announced(self) -> bool:
        return self._info is not None

    async def _announce(self) -> None:
        """Claim the name, and announce it once it is this one's."""
        own, kind = self._discovery.own, self._discovery.kind
        assert self._zeroconf is not None
        wanted = f"{label_of(own.host)}.{TYPES[kind]}"
        while True:
            info = ServiceInfo(
                TYPES[kind],
                wanted,
                port=self._discovery.settings.listen[1],
                parsed_addresses=[self._link.address],
                properties=text_of(own),
                other_ttl=TTL_S,
            )
            try:
                sent = await self._zeroconf.async_register_service(info, allow_name_change=kind == "tracker")
            except NonUniqueNameException:
                self._tell_conflict("somebody else on the network")
                await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.5))
                continue
            except (OSError, Error) as error:
                _logger.warning("cannot announce %s on %s: %s", own.host, self._link.interface, error or repr(error))
                await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.5))
                continue
            self._info, self._told_of_conflict = info, False
            if info.name != wanted:
                _logger.warning(
                    "another %s is announced as %s; this one is as %s", kind, label_of(own.host), _instance(info.name)
                )
            with suppress(OSError, Error):
                await sent
            return

    def _tell_conflict(self, rival: str) -> None:
        if not self._told_of_conflict:
            self._told_of_conflict = True
            _logger.warning(
                "the name %s is used by %s: this %s is not announced on %s. Give each its own --name",
                self._discovery.own.host,
                rival,
                self._discovery.kind,
                self._link.interface,
            )

    def _meet_own_name(self, info: AsyncServiceInfo) -> None:
        """What is announced under this one's name is its own, or a conflict that probing did not
        find."""
        assert self._info is not None and self._zeroconf is not None
        here = (ip_address(self._link.address), self._discovery.settings.listen[1])
        rivals = [(ip_address(each), info.port or 0) for each in info.parsed_addresses() if "%" not in each]
        rival = next((each for each in rivals if each != here), None)
        if rival is None:
            return
        if (here[0].packed, here[1]) < (rival[0].packed, rival[1]):
            self._defend()
            return
        # Not a goodbye, which would take the other one's records from everybody's caches.
        self._zeroconf.zeroconf.registry.async_remove(self._info)
        self._info = None
        self._tell_conflict(f"{rival[0]} port {rival[1]}")
        if self._announcing is not None:
            self._announcing.cancel()
        self._announcing = asyncio.create_task(self._announce_later())

    async def _announce_later(self) -> None:
        await asyncio.sleep(GATHER_S if self._discovery.kind == "tracker" else RETRY_S)
        await self._announce()

    def _defend(self) -> None:
        """Announce again what somebody else said otherwise, or took leave for; not more often than
        every DEFEND_S."""
        if self._info is None or self._zeroconf is None or (self._announcing and not self._announcing.done()):
            return
        if not self._defended:
            _logger.warning(
                "somebody else on %s uses the name %s, too", self._link.interface, _instance(self._info.name)
            )
        pause_s, self._defended = DEFEND_S if self._defended else 0.0, True
        self._announcing = asyncio.create_task(self._announce_again(self._zeroconf, self._info, pause_s))

    async def _announce_again(self, zeroconf: AsyncZeroconf, info: ServiceInfo, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        with suppress(OSError, Error):
            await (await zeroconf.async_update_service(info))

    # -- finding others

    def _changed(self, **event: Any) -> None:
        """zeroconf tells of an instance."""
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
        """Take what is cached as if it were told now."""
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
            said = read_text(info.properties, _joined(address, info.port))
        except UsageError as error:
            discovery.strange(link, info.name, error)
            return
        if discovery.neighbours.heard(kind, link.address, info.name, said):
            _logger.debug("%s %s at %s on %s", kind, said.host, said.address, link.interface)
            discovery.changed()


def _instance(name: str) -> str:
    return name.split("._p2pdist-", 1)[0]


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
