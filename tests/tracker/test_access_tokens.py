"""Tokens at a tracker with access control: those that are forged, old, foreign or revoked give
nothing."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import jwt
import pytest
from access_rig import LOOK_S, AccessSite, access_site, ask
from cryptography.hazmat.primitives import serialization

from p2pdist.credentials.authority import TRACKER_DNS
from p2pdist.credentials.signing import SigningKey
from p2pdist.credentials.tokens import split_token
from p2pdist.model.errors import NotFound, Refused, Unauthenticated, UsageError


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[AccessSite]:
    async with access_site(tmp_path) as found:
        yield found


def part(document: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(document).encode()).decode().rstrip("=")


def claims(**more: object) -> dict[str, object]:
    now = int(time.time())
    return {"iss": "prod", "sub": "me", "role": "ops", "jti": "0123456789abcdef", "exp": now + 600} | more


async def refused(site: AccessSite, header: str) -> None:
    http = await site.stranger()
    async with http.get("/v1/hosts", headers={"Authorization": header}, server_hostname=TRACKER_DNS) as answer:
        assert answer.status == 401, await answer.text()
        assert site.control.state.signing[0].pem.decode() not in await answer.text()


async def test_a_token_opens_what_its_role_may(site: AccessSite) -> None:
    token = site.token("ops")
    for text in (token, split_token(token)[1]):
        http = await site.stranger(text)
        assert await ask(http, "GET", "/v1/hosts") == b"[]"
        assert b"p2pdist_tracker_sessions" in await ask(http, "GET", "/metrics")
    scraper = await site.stranger(site.token("scraper"))
    await ask(scraper, "GET", "/metrics")
    for path in ("/v1/hosts", "/v1/preseeds", "/v1/packages?reference=team-a/x:v1"):
        with pytest.raises(Refused) as failure:
            await ask(scraper, "GET", path)
        assert not isinstance(failure.value, Unauthenticated)


async def test_tampered_tokens_are_refused(site: AccessSite) -> None:
    head, body, signature = split_token(site.token("scraper"))[1].split(".")
    key = site.control.state.signing[0]
    wanted = part(claims())
    public = key.private.public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    raw = base64.b64decode(key.public)
    other = SigningKey.create()
    forged = [
        f"{head}.{wanted}.{signature}",
        f"{head}.{body}.{signature[:-4]}AAAA",
        f"{head}.{body}.",
        f"{part({'alg': 'none', 'kid': key.name})}.{wanted}.",
        f"{part({'alg': 'none', 'kid': key.name})}.{wanted}.AAAA",
        f"{part({'alg': 'NONE', 'kid': key.name})}.{wanted}.{signature}",
        jwt.encode(claims(), raw + b" " * 32, algorithm="HS256", headers={"kid": key.name}),
        jwt.encode(claims(), other.private, algorithm="EdDSA", headers={"kid": key.name}),
        jwt.encode(claims(), other.private, algorithm="EdDSA", headers={"kid": other.name}),
        jwt.encode(claims(), other.private, algorithm="EdDSA"),
        jwt.encode(claims(), key.private, algorithm="EdDSA"),
        f"{part({'alg': 'EdDSA', 'kid': ['x']})}.{wanted}.{signature}",
        f"{part({'alg': 'EdDSA', 'kid': key.name, 'crit': ['x']})}.{wanted}.{signature}",
        f"{part([])}.{wanted}.{signature}",
        f"{head}.{part([])}.{signature}",
        "a.b.c",
        "[" * 3000,
        "x" * 4000,
    ]
    # HS256 with the public key in its usual forms, which PyJWT itself refuses to make.
    import hashlib
    import hmac

    for secret in (pem, raw, key.public.encode()):
        said = f"{part({'alg': 'HS256', 'typ': 'JWT', 'kid': key.name})}.{wanted}"
        mac = hmac.new(secret, said.encode(), hashlib.sha256).digest()
        forged.append(f"{said}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}")
    for text in forged:
        await refused(site, f"Bearer {text}")
    for header in (
        "Basic dXNlcjpwdw==",
        "Bearer",
        "Bearer ",
        "x",
        "Bearer " + site.token("ops")[:-1] + "é".encode().hex(),
    ):
        await refused(site, header)


@pytest.mark.parametrize(
    "wrong",
    [
        {"exp": int(time.time()) - 3600},
        {"exp": None},
        {"exp": "soon"},
        {"iss": "other"},
        {"iss": None},
        {"role": "root"},
        {"role": None},
        {"role": ["ops"]},
        {"sub": ""},
        {"sub": "a b"},
        {"sub": "x" * 100},
        {"jti": None},
        {"jti": "../x"},
        {"nbf": int(time.time()) + 3600},
    ],
)
async def test_claims_that_are_not_good_are_refused(site: AccessSite, wrong: dict[str, object]) -> None:
    key = site.control.state.signing[0]
    said = {name: value for name, value in claims(**wrong).items() if value is not None}
    try:
        text = jwt.encode(said, key.private, algorithm="EdDSA", headers={"kid": key.name})
    except TypeError:
        head = part({"alg": "EdDSA", "kid": key.name})
        signed = f"{head}.{part(said)}"
        text = f"{signed}.{base64.urlsafe_b64encode(key.sign(signed.encode())).decode().rstrip('=')}"
    await refused(site, f"Bearer {text}")
    good = jwt.encode(claims(), key.private, algorithm="EdDSA", headers={"kid": key.name})
    assert await ask(await site.stranger(good), "GET", "/v1/hosts") == b"[]"


async def test_a_revoked_token_ends_and_others_of_its_name_go_on(site: AccessSite) -> None:
    first, second = site.token("ops", name="me"), site.token("ops", name="me")
    record = site.control.directory.tokens()[0]
    site.control.directory.set_revoked([f"token:{record.id}"])
    site.control.reload()
    http = await site.stranger(first)
    for _ in range(400):
        try:
            await ask(http, "GET", "/v1/hosts")
        except Unauthenticated as error:
            assert "revoked" in error.what
            break
    else:
        raise AssertionError("the token is good")
    assert await ask(await site.stranger(second), "GET", "/v1/hosts") == b"[]"


async def test_what_is_watched_ends_with_the_token(site: AccessSite) -> None:
    http = await site.stranger(site.token("ops"))
    async with http.get("/v1/events", server_hostname=TRACKER_DNS) as events:
        await events.content.readuntil(b"\n\n")
        site.control.directory.set_revoked([f"token:{site.control.directory.tokens()[0].id}"])
        async with asyncio.timeout(30):
            await events.content.read()


async def test_what_is_watched_ends_when_its_role_reads_less(
    site: AccessSite, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tracker.http.history.routes.SILENCE_S", LOOK_S)
    http = await site.stranger(site.token("ops"))
    async with (
        http.get("/v1/events", server_hostname=TRACKER_DNS) as events,
        http.get("/v1/history/events", server_hostname=TRACKER_DNS) as history,
    ):
        await events.content.readuntil(b"\n\n")
        await history.content.readuntil(b"\n\n")
        site.path.write_text(site.path.read_text().replace('public = ["public/*"]', 'public = ["public/*", "other"]'))
        async with asyncio.timeout(30):
            while len(site.control.state.rules.public.patterns) < 2:
                await asyncio.sleep(LOOK_S)
        before = await events.content.readuntil(b"\n\n")
        assert before and not events.content.at_eof(), "one that reads more goes on"
        text = site.path.read_text()
        role = text[text.index("[role.ops]") : text.index("[role.reader]")]
        site.path.write_text(text.replace(role, role.replace('read = ["*"]', 'read = ["team-a/*"]')))
        async with asyncio.timeout(30):
            await events.content.read()
            await history.content.read()
    assert "unexpected failure" not in caplog.text


async def test_a_huge_header_is_the_clients_fault(site: AccessSite) -> None:
    async with (await site.stranger()).get(
        "/v1/hosts", headers={"Authorization": "Bearer " + "x" * 20_000}, server_hostname=TRACKER_DNS
    ) as answer:
        assert answer.status == 400


async def test_a_page_of_another_site_changes_nothing(site: AccessSite) -> None:
    agent, ops = await site.join("h1"), await site.stranger(site.token("ops"))
    for origin in ("http://evil.example", "null", "https://127.0.0.1", f"https://127.0.0.1:{site.port}.evil.example"):
        for method, path in (
            ("POST", "/v1/preseeds"),
            ("PUT", "/v1/preseeds/a"),
            ("DELETE", "/v1/preseeds/a"),
            ("POST", "/v1/rank"),
        ):
            with pytest.raises(Refused, match="another site"):
                await ask(ops, method, path, {"package": "team-a/x:v1", "count": 1}, headers={"Origin": origin})
        with pytest.raises(aiohttp.WSServerHandshakeError) as failure:
            await agent.http.ws_connect("/v1/session", headers={"Origin": origin}, server_hostname=TRACKER_DNS)
        assert failure.value.status == 403
    own = {"Origin": f"https://127.0.0.1:{site.port}"}
    await ask(ops, "POST", "/v1/preseeds", {"package": "team-a/x:v1", "count": 1}, headers=own)
    with pytest.raises((NotFound, UsageError)):
        await ask(ops, "DELETE", "/v1/preseeds/none", headers=own)
