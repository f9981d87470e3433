"""A scanner that asks for everything in the agent's tables of routes, over TCP and on the Unix
socket, as each kind of client that has no right to it."""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, TCPConnector
from joined_rig import AccessSite, certificate_of, push_package, until
from test_access_local import GROUP, LocalSite

from p2pdist.agent.api.server import LOCAL_ROUTES, PUBLIC_ROUTES
from p2pdist.credentials.authority import agent_dns
from p2pdist.credentials.tokens import create_token
from p2pdist.model.digest import digest_of
from p2pdist.transfer.openapi import DOCUMENT_PATH, Route

SECRET = os.urandom(1 << 18)
NAME = "team-b/y"
OPEN = {route.path for route in PUBLIC_ROUTES if route.right == "open"} | {DOCUMENT_PATH}


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[LocalSite]:
    async with AsyncExitStack() as stack:
        site = AccessSite(tmp_path, stack)
        stack.push_async_callback(site.origin.close)
        site.tracker.local = {f"group:{GROUP}": ("team-a/*",)}
        site.tracker.roles = {"scheduler": ("preseed", "rank"), "scraper": ("metrics",)}
        manifests = {NAME: await push_package(site.origin, f"{NAME}:v1", SECRET)}
        await site.tracker.start()
        stack.push_async_callback(site.tracker.stop)
        running = await site.agent("h0")
        running.socket.chmod(0o666)
        await until(lambda: running.agent.access.peers.local.by_subject)
        await running.agent.pulls.package(f"{NAME}:v1")
        yield LocalSite(site, running, manifests)


def token(local: LocalSite, role: str) -> str:
    tracker = local.site.tracker
    text, _ = create_token(
        tracker.signing[0], "test", tracker.authorities[0].fingerprint, role, name=role, now=time.time(), lasts_s=600.0
    )
    return text


def request_of(local: LocalSite, route: Route) -> tuple[str, Any]:
    """Path and body of a request of a route that is about the package, or its blob."""
    digest = digest_of(SECRET)
    path = route.described_path.replace("{digest}", digest).replace("{id}", "1")
    query = {"reference": f"{NAME}:v1", "package": f"{NAME}:v1", "owner": f"pin:{NAME}:v1", "host": "h9", "path": "/x"}
    fields = [f"{field.name}={query[field.name]}" for field in route.query if field.name in query]
    body: Any = None
    if route.request is not None or route.method == "POST":
        body = {
            "/v1/streams": {"blob": digest, "stripe": 0, "stripes": 1, "have": "AA==", "host": "h9"},
            "/v1/pulls": {"package": f"{NAME}:v1", "wait": True},
            "/v1/verify": {},
            "/v1/drain": {"seconds": 0},
        }.get(route.path, {"package": f"{NAME}:v1"})
    return path + ("?" + "&".join(fields) if fields else ""), body


@pytest.mark.root
async def test_over_tcp_nobody_without_the_right_gets_anything(local: LocalSite, tmp_path: Path) -> None:
    tls, address = local.running.agent.tls, local.running.settings.address
    assert tls is not None
    stranger = certificate_of(local.site.tracker, tmp_path / "peer", "h9", join="other")
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    plain.load_verify_locations(cadata=local.site.tracker.authorities[0].pem.decode())
    clients = {
        "stranger": (plain, ""),
        "agent without a ticket": (stranger.client, ""),
        "scheduler": (plain, token(local, "scheduler")),
        "scraper": (plain, token(local, "scraper")),
        "damaged token": (plain, token(local, "scraper")[:-4] + "AAAA"),
    }
    seen = set()
    for who, (context, bearer) in clients.items():
        async with ClientSession(connector=TCPConnector(ssl=context)) as http:
            for route in (*PUBLIC_ROUTES, *LOCAL_ROUTES):
                path, body = request_of(local, route)
                headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
                async with http.request(
                    route.method,
                    f"https://{address}{path}",
                    json=body,
                    headers=headers,
                    server_hostname=agent_dns("h0"),
                ) as answer:
                    data, status = await answer.read(), answer.status
                where = f"{route.method} {path} as {who}: {status} {data[:100]!r}"
                assert SECRET[:64] not in data, where
                metrics = route.right == "metrics" and who == "scraper"
                if who == "damaged token":
                    assert status == 401 or route.path not in {each.path for each in PUBLIC_ROUTES}, where
                elif route.path in OPEN or metrics:
                    assert status == 200, where
                else:
                    assert status in (401, 403, 404), where
                    assert status != 401 or who not in ("agent without a ticket",), where
                seen.add((who, status))
    assert {("stranger", 401), ("stranger", 404), ("agent without a ticket", 403), ("scraper", 200)} <= seen


@pytest.mark.root
@pytest.mark.parametrize("user", [(65534, GROUP), (999, 999)], ids=["of another namespace", "outside all groups"])
async def test_on_the_socket_a_user_without_the_right_gets_nothing(local: LocalSite, user: tuple[int, int]) -> None:
    uid, gid = user
    digest, manifest = digest_of(SECRET), local.manifests[NAME]
    before = len(local.running.agent.pulls.list())
    for route in LOCAL_ROUTES:
        path, body = request_of(local, route)
        status, answer = await local.ask(uid, route.method, path, body, gid=gid)
        where = f"{route.method} {path}: {status} {str(answer)[:200]}"
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        assert SECRET[:64] not in text, where
        if route.right == "local-admin":
            assert status == 403, where
        elif status == 200 and route.right == "local":
            for told in (NAME, digest, manifest):
                assert told.encode() not in text, where
        else:
            assert status in (400, 403, 404) or (status == 200 and route.right in ("open", "metrics")), where
    assert len(local.running.agent.pulls.list()) == before and local.running.agent.store.get(digest) is not None


def test_every_route_of_the_agent_names_its_right() -> None:
    rights = {(route.method, route.path): route.right for route in (*PUBLIC_ROUTES, *LOCAL_ROUTES)}
    assert None not in rights.values()
    assert {route.right for route in PUBLIC_ROUTES} == {"open", "metrics", "ticket"}
    assert {route.right for route in LOCAL_ROUTES} == {"open", "metrics", "local", "local-admin"}
