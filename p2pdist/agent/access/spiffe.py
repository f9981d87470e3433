"""The agent's identity from the SPIFFE Workload API: an X.509-SVID and the authorities of its trust
domain (https://spiffe.io/docs/latest/spiffe-specs/spiffe_workload_api/).

Theory. An agent of SPIRE, or another program that speaks the API at a Unix socket, decides by the
process at the other end which identity that has. The agent asks for its own once before anything
else starts. Then it keeps a stream open, on which each renewal of the SVID and each change of the
authorities comes; both are exchanged under a listener that goes on. The key never touches a disk.

Invariants. The trust domain never changes while the agent runs: it is the one that was named, else
that of the first SVID. Only that domain's authorities count, never those that are federated with
it. An SVID that is of another domain, names another host or has ended is not taken: the last one
stays in use. It also stays while the API is away, until it ends; peers refuse it then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from p2pdist.credentials.authority import dns_name_in, expires_at, name_in
from p2pdist.model.errors import P2PDistError, Refused, Unavailable, UsageError
from p2pdist.transfer.tls import PEM_BYTES_MAX, Tls, TlsFiles

if TYPE_CHECKING:
    from spiffe import WorkloadApiClient, X509Svid
    from spiffe.workloadapi.x509_context import X509Context

FIRST_S_MAX = 15.0
"""The API has so long for its first answer."""

RETRY_FIRST_S, RETRY_MAX_S = 0.5, 30.0
LOOK_S = 60.0
"""How often the agent looks whether its SVID has ended on a stream that sends nothing."""

SOCKET_VARIABLE = "SPIFFE_ENDPOINT_SOCKET"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SpiffeSettings:
    """Where the Workload API is, and what is expected of it."""

    socket: str
    """`unix:///PATH`."""
    trust_domain: str = ""
    """The domain of the SVID; empty: that of the first one."""
    further: Path | None = None
    """A file of authorities that count as well, PEM: that of trackers with a fleet's authority."""

    @classmethod
    def parse(cls, socket: str, trust_domain: str = "", further: Path | None = None) -> SpiffeSettings:
        """`socket` is `unix:///PATH`, a path, or "" for what SPIFFE_ENDPOINT_SOCKET names. Raises
        UsageError."""
        named = socket or os.environ.get(SOCKET_VARIABLE, "")
        if not named:
            raise UsageError(
                f"--spiffe without an address needs {SOCKET_VARIABLE}, which is not set",
                remedy="Give --spiffe unix:///run/spire/agent/public/api.sock, or set the variable",
            )
        path = named.removeprefix("unix:")
        if not path.startswith("/"):
            raise UsageError(
                f"{named[:200]!r} is no address of a Workload API", remedy="Write unix:///PATH of its Unix socket"
            )
        return cls("unix:///" + path.lstrip("/"), trust_domain, further)

    @property
    def path(self) -> str:
        """The path of the socket."""
        return self.socket.removeprefix("unix://")


@dataclass(frozen=True, slots=True)
class _Svid:
    """An SVID that this host may use, and the authorities of its trust domain. All PEM."""

    id: str
    chain: bytes
    key: bytes
    authorities: bytes

    def __repr__(self) -> str:
        """Without the key: values stand in logs and tracebacks."""
        return f"_Svid({self.id})"


class WorkloadIdentity:
    """The identity that a Workload API gives `host`. On the event loop."""

    def __init__(self, settings: SpiffeSettings, host: str) -> None:
        self.host, self.trust_domain = host, settings.trust_domain
        self.tls: Tls | None = None
        """Set by `enter`."""
        self._settings = settings
        self._svid: _Svid | None = None
        """What `tls` uses."""
        self._memory: tuple[int, ...] = ()
        """Descriptors of the files in memory that `tls` reads."""
        self._problem = ""
        """What was logged last of an API that does not answer, or of an SVID that is not taken."""

    async def enter(self) -> Tls:
        """Take the first SVID; returns the contexts for all connections of the agent. Raises
        UsageError, Unavailable where the API does not answer, Refused for an SVID that is not for
        this host."""
        context = await asyncio.to_thread(self._first)
        svid = self._chosen(context)
        files, self._memory = self._in_memory(svid)
        try:
            self.tls = Tls(files, keeps_former=False)
        except UsageError as error:
            raise UsageError(
                f"the SVID of {self._settings.path} cannot be used: {error.what}", remedy=error.remedy
            ) from error
        self._svid, self.trust_domain = svid, _domain(svid.id)
        logger.info("this host is %s, until %s", svid.id, _until(svid))
        return self.tls

    async def run(self) -> None:
        """Take each SVID and all authorities that the API sends, until cancelled."""
        pause_s = RETRY_FIRST_S
        while True:
            came = asyncio.Event()
            reason = await self._follow(came)
            if came.is_set():
                pause_s = RETRY_FIRST_S
            self._note_away(reason)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(RETRY_MAX_S, 2 * pause_s)

    def close(self) -> None:
        """Give up the files in memory; the contexts that were made of them go on."""
        for descriptor in self._memory:
            os.close(descriptor)
        self._memory = ()

    # -- asking

    def _first(self) -> X509Context:
        """What the API says now. Blocks."""
        from spiffe.errors import PySpiffeError

        client = self._client()
        try:
            return client.fetch_x509_context(timeout=FIRST_S_MAX)
        except PySpiffeError as error:
            raise Unavailable(
                f"the Workload API at {self._settings.path} gives this process no SVID: {error}",
                remedy="See that its agent runs, and that an entry there is for the user and program of this one",
            ) from error
        finally:
            client.close()

    def _client(self) -> WorkloadApiClient:
        try:
            from spiffe import WorkloadApiClient
            from spiffe.errors import ArgumentError
        except ImportError as error:
            raise UsageError(
                "the Workload API needs p2pdist[spiffe]", remedy="Install it: pip install 'p2pdist[spiffe]'"
            ) from error
        try:
            return WorkloadApiClient(self._settings.socket)
        except ArgumentError as error:
            raise Unavailable(
                f"there is no Workload API at {self._settings.path}: {error}",
                remedy=f"Start its agent before this one, or name its socket with --spiffe or {SOCKET_VARIABLE}",
            ) from error

    async def _follow(self, came: asyncio.Event) -> str:
        """Take what comes on one stream; returns why it ended. `came`: set once anything came."""
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[X509Context | Exception] = asyncio.Queue()

        def put(update: X509Context | Exception) -> None:
            loop.call_soon_threadsafe(updates.put_nowait, update)

        try:
            client = await asyncio.to_thread(self._client)
        except P2PDistError as error:
            return error.what
        stream = client.stream_x509_contexts(put, put, retry_connect=False)
        try:
            while True:
                try:
                    async with asyncio.timeout(LOOK_S):
                        update = await updates.get()
                except TimeoutError:
                    self._note_end()
                    continue
                if isinstance(update, Exception):
                    return str(update)
                came.set()
                await self._take(update)
        finally:
            stream.cancel()
            client.close()

    # -- taking

    async def _take(self, context: X509Context) -> None:
        try:
            svid = self._chosen(context)
            if svid != self._svid:
                await asyncio.to_thread(self._exchange, svid)
                logger.info("this host is %s, until %s", svid.id, _until(svid))
            elif self._problem:
                logger.info("the Workload API at %s answers again", self._settings.path)
        except P2PDistError as error:
            self._note(f"the SVID stays as it was: {error}")
        else:
            self._problem = ""

    def _exchange(self, svid: _Svid) -> None:
        """Use another SVID for connections from now on. Raises UsageError, and changes nothing,
        where TLS cannot use it. Blocks."""
        assert self.tls is not None
        files, memory = self._in_memory(svid)
        try:
            self.tls.exchange(files)
        except BaseException:
            for descriptor in memory:
                os.close(descriptor)
            raise
        self.close()
        self._svid, self._memory = svid, memory

    def _chosen(self, context: X509Context) -> _Svid:
        """The first SVID of the trust domain that names this host. Raises Refused where none may be
        used."""
        problems = []
        for svid in context.x509_svids:
            domain, identifier = svid.spiffe_id.trust_domain, str(svid.spiffe_id)
            bundle = context.x509_bundle_set.get_bundle_for_trust_domain(domain)
            if self.trust_domain and domain.name != self.trust_domain:
                problems.append(f"{identifier} is of another trust domain than {self.trust_domain}")
            elif self.host != (named := _host_in(svid.leaf, domain.name)):
                problems.append(f"{identifier} names the host {named!r}, not {self.host!r}")
            elif bundle is None or not bundle.x509_authorities:
                problems.append(f"{identifier} comes without authorities of its trust domain")
            elif svid.leaf.not_valid_after_utc.timestamp() <= time.time():
                problems.append(f"{identifier} has ended")
            else:
                return _svid(svid, bundle.x509_authorities)
        raise Refused(
            f"the Workload API at {self._settings.path} has no SVID for {self.host[:100]}: {'; '.join(problems)[:1000]}",
            remedy=f"Register spiffe://{self.trust_domain or 'DOMAIN'}/agent/{self.host[:100]} there, or an entry with that DNS name",
        )

    def _in_memory(self, svid: _Svid) -> tuple[TlsFiles, tuple[int, ...]]:
        """The files of an SVID, and the descriptors that keep them. Contexts are made of files, and
        these are on no disk."""
        if len(svid.chain) + len(svid.authorities) > PEM_BYTES_MAX:
            raise UsageError(f"{svid.id} comes with more than {PEM_BYTES_MAX} bytes of certificates")
        own, authorities = _memory(svid.key + svid.chain), _memory(svid.authorities)
        paths = Path(f"/proc/self/fd/{own}"), Path(f"/proc/self/fd/{authorities}")
        return TlsFiles(paths[0], paths[0], paths[1], further=self._settings.further), (own, authorities)

    # -- saying

    def _note_away(self, reason: str) -> None:
        if self._svid is None:
            return
        ended = expires_at(self._svid.chain) <= time.time()
        use = f"ended at {_until(self._svid)}" if ended else f"stays in use until {_until(self._svid)}"
        text = f"the Workload API at {self._settings.path} is away, and {self._svid.id} {use}"
        if text != self._problem:
            logger.log(logging.ERROR if ended else logging.WARNING, "%s: %s", text, reason)
        self._problem = text

    def _note_end(self) -> None:
        if self._svid is not None and expires_at(self._svid.chain) <= time.time():
            self._note(f"{self._svid.id} has ended, and the Workload API at {self._settings.path} sends no other")

    def _note(self, text: str) -> None:
        if text != self._problem:
            logger.warning("%s", text)
        self._problem = text


def _host_in(leaf: x509.Certificate, domain: str) -> str:
    """The host that an SVID names, as trackers and peers read it (credentials/authority.py)."""
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    peer = {
        "subjectAltName": [
            *(("URI", uri) for uri in names.get_values_for_type(x509.UniformResourceIdentifier)),
            *(("DNS", name) for name in names.get_values_for_type(x509.DNSName)),
        ]
    }
    return name_in(peer, domain, "agent") or dns_name_in(peer)


def _svid(svid: X509Svid, authorities: Iterable[x509.Certificate]) -> _Svid:
    pem = serialization.Encoding.PEM
    key = svid.private_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    chain = b"".join(certificate.public_bytes(pem) for certificate in svid.cert_chain)
    return _Svid(str(svid.spiffe_id), chain, key, b"".join(sorted(found.public_bytes(pem) for found in authorities)))


def _memory(data: bytes) -> int:
    descriptor = os.memfd_create("svid", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return descriptor


def _domain(identifier: str) -> str:
    return identifier.removeprefix("spiffe://").partition("/")[0]


def _until(svid: _Svid) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires_at(svid.chain)))
