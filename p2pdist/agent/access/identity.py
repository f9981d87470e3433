"""The agent's identity in its fleet: a certificate that a tracker gives for a join token, kept
beside the store, and renewed for as long as the agent runs.

Theory. The first contact needs no trust. The agent asks a tracker for its authorities without
believing it, looks for the one that the join token pins, and sends the token's secret only over a
connection whose certificate leads to that authority (as in k3s). The private key is made here and
never leaves the host. After a restart the kept certificate is used while it is valid, so an agent
starts without a tracker. At half its life the agent has it renewed, over a connection that it opens
with the old one; where that has expired, the agent joins again.

The certificate and its key are one file, which is replaced whole: one without the other is of no
use. Connections that are open go on with what they were opened with.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import random
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from p2pdist.agent.access.files import make_private, read, replace
from p2pdist.credentials import exchange
from p2pdist.credentials.authority import (
    TRACKER_DNS,
    agent_dns,
    begins_at,
    encode_key,
    expires_at,
    fingerprint,
    make_key,
    make_request,
    owner_of,
    renews_at,
    split_pem,
)
from p2pdist.credentials.join import TOKEN_BYTES_MAX, JoinToken
from p2pdist.files import read_content
from p2pdist.model.errors import UNDECODABLE, Corrupt, P2PDistError, Refused, Unavailable, UsageError
from p2pdist.model.messages import Joined, JoinRequest, RenewRequest
from p2pdist.model.url import redacted
from p2pdist.transfer.names import NAMES, Resolver
from p2pdist.transfer.tls import Tls, TlsFiles

LOOK_S = 60.0
"""How often the agent looks whether its certificate is to be renewed: the clock may jump."""

RETRY_FIRST_S, RETRY_MAX_S = 1.0, 300.0
EXPIRES_SOON_S = 60.0
"""A certificate that ends sooner is of no use any more."""

logger = logging.getLogger(__name__)


class _Record(msgspec.Struct, frozen=True):
    """How the kept identity came: `pin` and `token` are the pin and the id of the join token."""

    fleet: str
    host: str
    pin: str
    token: str


def read_join_file(path: Path) -> JoinToken:
    """The join token in a file; warns where other users may read it. Raises UsageError."""
    try:
        data, mode = read_content(path, TOKEN_BYTES_MAX)
    except OSError as error:
        raise UsageError(
            f"the join file {path} cannot be read: {error.strerror}",
            remedy="Copy the join token of the tracker there, readable for the agent's user alone",
        ) from error
    if mode & 0o077:
        logger.warning(
            "the join file %s may be read by other users (mode %04o), which lets them join the fleet: chmod 600 it",
            path,
            stat.S_IMODE(mode),
        )
    return JoinToken.parse(data.removeprefix(codecs.BOM_UTF8).decode("ascii", "replace"))


class Membership:
    """The identity of `host` in the fleet of a join token, in `directory`. `read_token` reads the
    token, and raises UsageError where it cannot be read. `trackers` are the URLs
    of trackers that are known now; `addresses` gives, for the agent's own end of a connection to a
    tracker, the addresses under which others reach the agent. On the event loop."""

    def __init__(
        self,
        directory: Path,
        host: str,
        read_token: Callable[[], JoinToken],
        trackers: Callable[[], Sequence[str]],
        addresses: Callable[[str], Sequence[str]],
    ) -> None:
        self.host, self.fleet = host, ""
        self._directory, self._read_token, self._addresses = directory, read_token, addresses
        self.trackers = trackers
        self._token = read_token()
        self._authorities, self._certificate = directory / "authorities.pem", directory / "agent.pem"
        self._problem = ""
        """Why no tracker gave a certificate, as it was logged last."""
        self.tls: Tls | None = None
        """Set by `enter`."""

    @property
    def join(self) -> str:
        """The id of the join token."""
        return self._token.id

    async def enter(self, *, patient: bool = False) -> Tls:
        """Take the kept certificate, or join, which may wait for a tracker; returns the contexts
        for all connections of the agent. Raises Refused where all trackers refuse the token, or
        none leads to the pinned authority, and UsageError; not when `patient`: trackers that
        announce themselves may be of any fleet."""
        make_private(self._directory)
        if not self._take_kept():
            pause_s = RETRY_FIRST_S
            while not await self._joined(patient=patient):
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(30.0, 2 * pause_s)
        self.tls = Tls(
            TlsFiles(self._certificate, self._certificate, self._authorities),
            peer_name=lambda host, called: agent_dns(host),
            strangers=True,
            keeps_former=False,
        )
        return self.tls

    async def run(self) -> None:
        """Renew the certificate until cancelled."""
        pause_s = RETRY_FIRST_S
        while True:
            left_s = await asyncio.to_thread(self._left_s)
            if left_s > 0:
                await asyncio.sleep(min(LOOK_S, left_s * random.uniform(1.0, 1.1)))
            elif await self._renewed() and await asyncio.to_thread(self._left_s) > 0:
                pause_s = RETRY_FIRST_S
            else:
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(RETRY_MAX_S, 2 * pause_s)

    def _left_s(self) -> float:
        """For how long the certificate need not be renewed; one that is not valid yet is of no
        use."""
        try:
            pem, now = read(self._certificate), time.time()
            return renews_at(pem) - now if begins_at(pem) <= now else 0.0
        except (ValueError, OSError) as error:
            logger.error("the certificate %s cannot be read, and is made anew: %s", self._certificate, error)
            return 0.0

    def trust(self, authorities: str) -> None:
        """Take the fleet's authorities (PEM), as a tracker of the fleet states them. Raises
        UsageError, and changes nothing, for what are none. Blocks."""
        assert self.tls is not None
        before = read(self._authorities)
        if before.decode() == authorities:
            return
        replace(self._authorities, authorities.encode())
        try:
            self.tls.reload()
        except UsageError:
            replace(self._authorities, before)
            raise
        logger.info("the fleet's authorities have changed")

    # -- what is kept

    def _take_kept(self) -> bool:
        """Whether what an earlier agent kept can still be used."""
        try:
            record = msgspec.json.decode(read(self._directory / "member.json"), type=_Record)
            pem = read(self._certificate)
            now, owner = time.time(), owner_of(pem)
            left_s, early = expires_at(pem) - now, begins_at(pem) > now
            fits = self._fits(record)
        except (ValueError, OSError, P2PDistError, *UNDECODABLE):
            return False
        if owner != (record.fleet, "agent", self.host) or not fits:
            logger.info("the kept certificate is of another host, fleet or join token: joining anew")
            return False
        if early:
            logger.info("the kept certificate is not valid yet by the clock of this host: joining again")
            return False
        if left_s < EXPIRES_SOON_S:
            logger.info("the kept certificate has expired: joining again")
            return False
        self.fleet = record.fleet
        return True

    def _fits(self, record: _Record) -> bool:
        """Whether the kept identity came by the join token, or by an earlier one of its name that
        pins an authority which has been superseded since."""
        token = self._token
        return (record.host, record.token) == (self.host, token.id) and (
            record.pin == token.pin or token.pin in map(fingerprint, split_pem(read(self._authorities)))
        )

    def _keep(self, joined: Joined, key: bytes) -> None:
        """Store a new identity. Raises Corrupt where it is not for this host."""
        certificate = joined.certificate.encode()
        try:
            owner = owner_of(certificate)
        except ValueError as error:
            raise Corrupt(f"the tracker sent a certificate that cannot be read: {error}") from error
        if owner != (joined.fleet, "agent", self.host):
            raise Corrupt(f"the tracker sent a certificate that is not for {self.host}")
        split_pem(joined.authorities.encode())  # raises for what are none
        replace(self._authorities, joined.authorities.encode())
        record = _Record(joined.fleet, self.host, self._token.pin, self._token.id)
        replace(self._directory / "member.json", msgspec.json.encode(record))
        replace(self._certificate, key + certificate)
        self.fleet = joined.fleet

    # -- joining and renewing

    async def _joined(self, *, patient: bool = False) -> bool:
        """Join at one of the trackers; False when none can now. Raises Refused and UsageError when
        all refuse, unless `patient`."""
        refusals: list[P2PDistError] = []
        for url in (urls := list(self.trackers())):
            try:
                await self._join_at(url)
                return True
            except (Unavailable, Corrupt) as error:
                self._note(url, error)
            except (Refused, UsageError) as error:
                self._note(url, error)
                refusals.append(error)
        if refusals and len(refusals) == len(urls) and not patient:
            raise refusals[0]
        return False

    async def _join_at(self, url: str) -> None:
        self._token = await asyncio.to_thread(self._read_token)  # a rotation may have brought another
        stated, own_end = await exchange.authorities(url, Resolver(NAMES))
        context = exchange.trusting(exchange.pinned_authority(stated, self._token.pin))
        key = make_key()
        body = JoinRequest(str(self._token), self.host, make_request(key).decode(), tuple(self._addresses(own_end)))
        joined = await exchange.post(url + "/v1/join", body, Joined, context, TRACKER_DNS, Resolver(NAMES))
        await asyncio.to_thread(self._keep, joined, encode_key(key))
        logger.info("joined the fleet %s at %s as %s", joined.fleet, redacted(url), self.host)

    async def _renewed(self) -> bool:
        """Renew the certificate, or join again where it has expired; False when that failed."""
        assert self.tls is not None
        for url in self.trackers():
            try:
                if await asyncio.to_thread(self._take_kept):
                    await self._renew_at(url, self.tls)
                else:
                    await self._join_at(url)
                await asyncio.to_thread(self.tls.reload)
                return True
            except P2PDistError as error:
                self._note(url, error)
        return False

    async def _renew_at(self, url: str, tls: Tls) -> None:
        key = make_key()
        _, own_end = await exchange.authorities(url, Resolver(NAMES))
        body = RenewRequest(make_request(key).decode(), tuple(self._addresses(own_end)))
        joined = await exchange.post(url + "/v1/renew", body, Joined, tls.client, TRACKER_DNS, Resolver(NAMES))
        await asyncio.to_thread(self._keep, joined, encode_key(key))
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires_at(joined.certificate.encode())))
        logger.info("the certificate of %s was renewed at %s, until %s", self.host, redacted(url), until)

    def _note(self, url: str, error: P2PDistError) -> None:
        """Log why a tracker gave no certificate, once for as long as it stays the same."""
        text = f"tracker {redacted(url)} gives this host no certificate: {error}"
        logger.log(logging.DEBUG if text == self._problem else logging.WARNING, "%s", text)
        self._problem = text


def check_secure(urls: Sequence[str]) -> None:
    """Raises UsageError for a tracker that an agent with an identity must not speak to."""
    for url in urls:
        if urlsplit(url).scheme != "https":
            raise UsageError(
                f"with --join-file the tracker {redacted(url)} must be spoken to over TLS",
                remedy="Write https://host:7070, the address of a tracker with --access",
            )
