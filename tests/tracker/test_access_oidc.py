"""People with tokens of an OpenID Connect issuer: a real one on loopback, with a discovery document
and keys."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jwt
import pytest
from access_rig import ACCESS, AccessSite, access_site, ask
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from ports import free_port

from p2pdist.model.errors import NotFound, Unauthenticated, Unavailable
from tracker.access import oidc

STRANGE: dict[str, list[Any]] = {
    "no key": [["no", "key"]],
    "no value": [{"kty": "oct", "kid": "rsa"}],
    "no name": [{"kty": "oct", "kid": ["rsa"], "k": "YWJj"}],
}


class Issuer:
    """An issuer with keys of three kinds."""

    def __init__(self) -> None:
        self.keys: dict[str, tuple[str, Any]] = {
            "rsa": ("RS256", rsa.generate_private_key(65537, 2048)),
            "ec": ("ES256", ec.generate_private_key(ec.SECP256R1())),
            "ed": ("EdDSA", ed25519.Ed25519PrivateKey.generate()),
        }
        self.url, self.named, self.keys_url, self.redirect = "", "", "", ""
        self.asked = 0
        self.slow: asyncio.Event | None = None
        self.waits = False
        """Whether somebody waits for `slow`."""
        self.fault = ""
        """How it fails: "away", "broken" or "slow", or with the keys of STRANGE of that name."""

    def token(self, key: str = "rsa", *, algorithm: str = "", **more: Any) -> str:
        default, private = self.keys[key]
        said = {"iss": self.url, "aud": "p2pdist", "sub": "ada", "exp": int(time.time()) + 600, "groups": ["ml-team"]}
        said = {name: value for name, value in (said | more).items() if value is not None}
        return jwt.encode(said, private, algorithm=algorithm or default, headers={"kid": key})

    async def discovery(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if self.fault in ("broken", "slow"):
            return await self.break_off(request)
        if self.fault == "away":
            raise web.HTTPServiceUnavailable
        return web.json_response({"issuer": self.named or self.url, "jwks_uri": self.keys_url or f"{self.url}/keys"})

    async def break_off(self, request: web.Request) -> web.StreamResponse:
        """Answer in chunks, slowly if need be, and not to the end."""
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for _ in range(1000 if self.fault == "slow" else 1):
            await response.write(b" ")
            await asyncio.sleep(0.01)
        assert request.transport is not None
        request.transport.abort()
        return response

    async def jwks(self, request: web.Request) -> web.Response:
        if self.fault in STRANGE:
            return web.json_response({"keys": STRANGE[self.fault]})
        if self.slow is not None:
            self.waits = True
            await self.slow.wait()
        if self.redirect and "127.0.0.1" in request.host:
            raise web.HTTPFound(self.redirect)
        algorithms = jwt.algorithms.get_default_algorithms()
        found = []
        for name, (algorithm, private) in self.keys.items():
            document = json.loads(algorithms[algorithm].to_jwk(private.public_key()))
            found.append({**document, "kid": name, "use": "sig"})
        return web.json_response({"keys": found})


@asynccontextmanager
async def issuing() -> AsyncIterator[Issuer]:
    issuer, app = Issuer(), web.Application()
    app.router.add_get("/.well-known/openid-configuration", issuer.discovery)
    app.router.add_get("/keys", issuer.jwks)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await web.TCPSite(runner, "127.0.0.2", port).start()
    issuer.url = f"http://127.0.0.1:{port}"
    try:
        yield issuer
    finally:
        await runner.cleanup()


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    async with issuing() as found:
        yield found


@pytest.fixture
async def site(tmp_path: Path, issuer: Issuer) -> AsyncIterator[AccessSite]:
    map_ = '{ groups = { ml-team = "slurm", admins = "ops" }, email = { "root@example" = "ops" } }'
    table = f'[oidc]\nissuer = "{issuer.url}"\naudience = "p2pdist"\nmap = {map_}\n'
    async with access_site(tmp_path, ACCESS + table) as found:
        yield found


async def hosts(site: AccessSite, token: str) -> bytes:
    return await ask(await site.stranger(token), "GET", "/v1/hosts")


@pytest.mark.parametrize("key", ["rsa", "ec", "ed"])
async def test_a_person_has_the_role_that_a_claim_gives(site: AccessSite, issuer: Issuer, key: str) -> None:
    http = await site.stranger(issuer.token(key))
    order = json.loads(await ask(http, "PUT", "/v1/preseeds/mine", {"package": "team-a/x:v1", "count": 1}))
    assert order["owner"] == "person:ada"
    assert await hosts(site, issuer.token(key, groups="admins")) == b"[]"
    assert await hosts(site, issuer.token(key, groups=None, email="root@example")) == b"[]"
    assert issuer.asked == 1


async def test_a_person_reads_what_is_public_as_the_bearer_of_a_token_does(site: AccessSite, issuer: Issuer) -> None:
    for token in (issuer.token(), site.token("slurm")):
        http = await site.stranger(token)
        await ask(http, "GET", "/v1/resolve?reference=public/z:v1")
        with pytest.raises(NotFound):
            await ask(http, "GET", "/v1/resolve?reference=team-b/y:v1")


async def test_tokens_that_are_not_for_this_fleet_are_refused(site: AccessSite, issuer: Issuer) -> None:
    admin = {"groups": "admins"}
    _, stolen = issuer.keys["rsa"]
    public = stolen.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    other = Issuer()
    other.url = issuer.url
    wrong = [
        issuer.token(**admin, aud="another"),
        issuer.token(**admin, aud=None),
        issuer.token(**admin, exp=int(time.time()) - 3600),
        issuer.token(**admin, exp=None),
        issuer.token(**admin, sub=None),
        issuer.token(**admin, sub="a b\n"),
        issuer.token(**admin, iss=f"{issuer.url}/"),
        issuer.token(**admin, algorithm="RS512"),
        issuer.token(groups=["others"]),
        issuer.token(groups=None),
        issuer.token(groups={"admins": 1}),
        other.token(**admin),
        other.token("ed", **admin),
    ]
    head, body, signature = issuer.token(**admin).split(".")
    wrong += [f"{head}.{body}.", f"{head}.{issuer.token().split('.')[1]}.{signature}"]
    none = jwt.encode({"iss": issuer.url, "groups": "admins", "sub": "x", "aud": "p2pdist"}, None, algorithm="none")
    wrong.append(none + "AA")
    assert public
    for token in wrong:
        with pytest.raises(Unauthenticated):
            await hosts(site, token)
    assert await hosts(site, issuer.token(**admin)) == b"[]"


async def test_a_revoked_person_is_refused(site: AccessSite, issuer: Issuer) -> None:
    site.path.write_text(site.path.read_text().replace('fleet = "prod"', 'fleet = "prod"\nrevoked = ["token:ada"]'))
    with pytest.raises(Unauthenticated, match="revoked"):
        for _ in range(1000):
            await hosts(site, issuer.token(groups="admins"))


async def test_new_keys_of_the_issuer_are_read_and_strange_ones_ask_it_seldom(
    site: AccessSite, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hosts(site, issuer.token(groups="admins"))
    issuer.keys["new"] = ("ES256", ec.generate_private_key(ec.SECP256R1()))
    for _ in range(5):
        with pytest.raises(Unauthenticated):
            await hosts(site, issuer.token("new", groups="admins"))
    assert issuer.asked == 1
    monkeypatch.setattr(oidc, "REFRESH_S", 0.0)
    assert await hosts(site, issuer.token("new", groups="admins")) == b"[]"


@pytest.mark.parametrize("fault", ["away", "broken", "slow", *STRANGE])
async def test_no_token_is_called_wrong_while_the_issuer_does_not_state_its_keys(
    site: AccessSite, issuer: Issuer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(oidc, "READ_S_MAX", 0.3 if fault == "slow" else oidc.READ_S_MAX)
    issuer.fault = fault
    for _ in range(3):
        with pytest.raises(Unavailable, match="does not state its keys"):
            await hosts(site, issuer.token(groups="admins"))
    assert issuer.asked == 1
    issuer.fault = ""
    monkeypatch.setattr(oidc, "REFRESH_S", 0.0)
    assert await hosts(site, issuer.token(groups="admins")) == b"[]"


async def test_a_key_that_was_withdrawn_ends_when_the_issuer_is_back(
    site: AccessSite, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is away, what it stated last holds, and it is asked again soon."""
    await hosts(site, issuer.token(groups="admins"))
    token, asked, issuer.fault = issuer.token(groups="admins"), issuer.asked, "away"
    monkeypatch.setattr(oidc, "KEPT_S", 0.0)
    monkeypatch.setattr(oidc, "REFRESH_S", 0.0)
    for _ in range(2):
        assert await hosts(site, token) == b"[]"
    assert issuer.asked == asked + 2
    del issuer.keys["rsa"]
    issuer.fault = ""
    with pytest.raises(Unauthenticated, match="does not state"):
        await hosts(site, token)


@pytest.mark.parametrize(
    ("keys", "redirected"),
    [
        ("http://127.0.0.2:{port}/keys", False),  # as for any address but loopback's own
        ("http://127.0.0.1.localhost:{port}/keys", False),
        ("http://127.0.0.1:80@127.0.0.2:{port}/keys", False),
        ("http://127.0.0.2:{port}/keys", True),
    ],
)
async def test_keys_that_come_in_plain_are_not_believed(
    site: AccessSite, issuer: Issuer, keys: str, redirected: bool
) -> None:
    """Of the issuer's own words and of redirects, whoever is on the way could change them."""
    url = keys.format(port=issuer.url.rpartition(":")[2])
    issuer.keys_url, issuer.redirect = ("", url) if redirected else (url, "")
    with pytest.raises(Unavailable, match="not encrypted"):
        await hosts(site, issuer.token(groups="admins"))


async def test_a_strange_key_keeps_nobody_waiting_whose_key_is_known(
    site: AccessSite, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can name one, and the issuer may be slow."""
    await hosts(site, issuer.token(groups="admins"))
    monkeypatch.setattr(oidc, "REFRESH_S", 0.0)
    issuer.keys["strange"] = ("ES256", ec.generate_private_key(ec.SECP256R1()))
    token, asked, issuer.slow = issuer.token("strange", groups="admins"), issuer.asked, asyncio.Event()
    strange = asyncio.create_task(hosts(site, token))
    async with asyncio.timeout(60):
        while issuer.asked == asked:
            await asyncio.sleep(0.01)
        await hosts(site, issuer.token(groups="admins"))
        assert not strange.done()
        issuer.slow.set()
        assert await strange == b"[]"


async def test_a_client_that_leaves_has_no_token_of_others_called_wrong(site: AccessSite, issuer: Issuer) -> None:
    """It may be the first that shows one, and the issuer is asked seldom."""
    issuer.slow = asyncio.Event()
    leaving = asyncio.create_task(hosts(site, issuer.token(groups="admins")))
    async with asyncio.timeout(60):
        while not issuer.waits:
            await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await asyncio.sleep(0.3)  # its connection breaks
        issuer.slow.set()
        assert await hosts(site, issuer.token(groups="admins")) == b"[]"
    assert issuer.asked == 1


async def test_an_issuer_that_names_itself_otherwise_is_not_believed(site: AccessSite, issuer: Issuer) -> None:
    issuer.named = "https://other.example"
    with pytest.raises(Unavailable):
        await hosts(site, issuer.token(groups="admins"))
