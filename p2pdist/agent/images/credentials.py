"""What an upstream lets the bearer of a credential read, who asked this agent for an image.

The upstream is asked once, with HEAD, and with that credential alone: this agent's own are not
mixed in. For a blob it is asked for a byte as well where HEAD is refused: storage behind a redirect
may take signed GETs alone. Nothing is kept of it here.
"""

from __future__ import annotations

from contextlib import suppress

from yarl import URL

from p2pdist.model.errors import Refused
from p2pdist.model.image import ImageName
from p2pdist.model.image_manifest import ACCEPTED_TYPES
from p2pdist.model.upstream import UpstreamSettings
from p2pdist.origin.registry.accounts import Account, Fixed
from p2pdist.origin.registry.authentication import PullToken
from p2pdist.origin.registry.client import RegistryClient

BEARER_S = 60.0
"""How long a token is used that a client has shown: for the one question."""


async def upstream_lets(upstream: UpstreamSettings, name: ImageName, path: str, *, user: str, secret: str) -> bool:
    """Whether the registry gives `path` of a repository, such as `manifests/v1`, to the bearer of a
    credential, a user and a password, or without a user a token, and asked for one: what it gives
    unasked it gives to this agent's address, at which the client is not. Raises NotFound,
    Unavailable."""

    async def token(scope: str) -> PullToken | None:
        return PullToken(secret, BEARER_S)

    account = Account(user, secret) if user else None
    client = RegistryClient(
        f"the registry {upstream.name}",
        URL(upstream.url),
        Fixed(account),
        None if user else token,
        tries_max=1,
        redirects=upstream.redirects,
    )
    scope = f"repository:{name.repository}:pull"
    plain, byte = {"Accept": ", ".join(ACCEPTED_TYPES)}, {"Range": "bytes=0-0"}
    questions = [("GET" if path.startswith("tags/") else "HEAD", plain)]
    if path.startswith("blobs/"):
        questions.append(("GET", byte))
    try:
        for method, headers in questions:
            with suppress(Refused):
                async with client.request(
                    method, f"/v2/{name.repository}/{path}", scope, headers=headers, expect=frozenset({200, 206, 416})
                ):
                    return bool(client.authentication.header(scope))
        return False
    finally:
        await client.close()
