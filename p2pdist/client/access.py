"""What a client shows to trackers with access on: the bearer of a token, over TLS to a tracker that
shows a certificate of the authority that the token pins.

A token of the fleet reads `p2pt1.PIN.JWT`. PIN is the fingerprint of the fleet's authority, so a
client needs no file of authorities: it asks the tracker for them without believing it, as a host
does that joins (p2pdist/credentials/join.py), and sends the token over nothing but TLS. A token of
an OIDC issuer is a JWT alone; then the authorities of the system count.
"""

from __future__ import annotations

import base64
import time
from typing import Any

import msgspec

from p2pdist.model.errors import UNDECODABLE, NotFound, P2PDistError, Unauthenticated, Unavailable
from p2pdist.model.url import redacted

NAME_A_TRACKER = "Name a tracker of this version, such as http://tracker:7070; an agent has another port"


class NoTracker(Unavailable):
    """What answers has no such route: it is an agent, or a tracker of another version."""


def failure_of(url: str, problem: P2PDistError) -> P2PDistError:
    """The failure that a problem document of the server at `url` describes. NoTracker for a route
    that it does not have; what a tracker does not know it tells in other words, with a remedy."""
    if isinstance(problem, NotFound) and not problem.remedy and problem.what.endswith(": Not Found"):
        return NoTracker(f"{redacted(url)} is no tracker ({problem.what})", remedy=NAME_A_TRACKER)
    return problem


class Access:
    """How the requests of a client to trackers are secured. Raises UsageError for a token that is
    none, Unauthenticated for one that has expired."""

    def __init__(self, text: str = "") -> None:
        self._token = text.strip()
        self._pin = ""
        self._known: dict[str, dict[str, Any]] = {}
        if self._token:
            from p2pdist.credentials.tokens import split_token

            self._pin, jwt = split_token(self._token)
            _check_expiry(jwt)

    async def request(self, url: str) -> dict[str, Any]:
        """Arguments for a request of aiohttp to the tracker at `url`. Nothing is shown over plain
        HTTP. Raises Refused where the tracker is of another fleet, Unavailable."""
        if not url.startswith("https://"):
            return {}
        if url not in self._known:
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            self._known[url] = {"headers": headers, **(await self._pinned(url) if self._pin else {})}
        return self._known[url]

    async def _pinned(self, url: str) -> dict[str, Any]:
        from p2pdist.credentials import exchange
        from p2pdist.credentials.authority import TRACKER_DNS
        from p2pdist.transfer.names import NAMES, Resolver

        stated, _ = await exchange.authorities(url, Resolver(NAMES))
        return {
            "ssl": exchange.trusting(exchange.pinned_authority(stated, self._pin)),
            "server_hostname": TRACKER_DNS,
        }

    def remedy(self, url: str, error: BaseException) -> str:
        """What to do about a tracker that does not answer."""
        from p2pdist.credentials import exchange

        if hint := exchange.wrong_time(error):
            return hint
        if "certificate" in str(error).lower() and not self._pin:
            return "Give a token of its fleet: it names the tracker's authority"
        if url.startswith("http://") and self._token:
            return "Start it, or write https://: a token is sent over TLS alone"
        return "Start it, or name another tracker"

    def hinted(self, error: P2PDistError, url: str) -> P2PDistError:
        """A failure that the tracker at `url` reports; one for want of a token says how to give
        it."""
        if isinstance(error, Unauthenticated) and url.startswith("http://"):
            error.remedy = "Write https://, and give a token"
        return failure_of(url, error)


def _check_expiry(jwt: str) -> None:
    """Raises Unauthenticated for a token that says that it has expired."""
    body = jwt.split(".")[1]
    try:
        claims = msgspec.json.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=dict[str, Any])
    except (ValueError, *UNDECODABLE):
        return  # the tracker says what is wrong with it
    until = claims.get("exp")
    if isinstance(until, int | float) and time.time() > until:
        raise Unauthenticated(
            f"the token has expired, on {_minute(until)}",
            remedy=f"p2pdist token create makes another; it is {_minute(time.time())} by this machine's clock",
        )


def _minute(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
