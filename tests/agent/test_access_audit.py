"""The audit of an agent: what local processes change, and what is refused, one line each."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, TCPConnector, UnixConnector
from joined_rig import AccessSite, Running, access_site, certificate_of, until

from p2pdist.credentials.authority import agent_dns
from p2pdist.model.access import TICKET_HEADER
from p2pdist.transfer.audit import REFUSALS_MAX, audit_to

DATA = os.urandom(1 << 20)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[AccessSite]:
    async with access_site(tmp_path) as made:
        yield made


@pytest.fixture
def audit(tmp_path: Path) -> AsyncIterator[Path]:
    """A file to which audits of this process are written."""
    logger = logging.getLogger("p2pdist.audit")
    before = logger.handlers, logger.level, logger.propagate
    handler = audit_to(tmp_path / "audit")
    yield tmp_path / "audit"  # type: ignore[misc]
    handler.close()
    logger.handlers, logger.level, logger.propagate = before


def lines(audit: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in audit.read_text().splitlines()]


async def request(running: Running, method: str, path: str, **body: Any) -> int:
    """A request of this process at the agent's Unix socket; returns the status of the answer."""
    async with ClientSession(connector=UnixConnector(str(running.socket))) as http:
        extra = {"json": body} if body else {}
        async with http.request(method, f"http://agent{path}", **extra) as answer:
            await answer.read()
            return answer.status


async def test_what_processes_change_is_noted_once_it_is_done(site: AccessSite, audit: Path) -> None:
    digest, running = await site.publish(DATA), await site.agent("h0")
    assert await request(running, "GET", "/v1/status") == 200
    assert await request(running, "POST", "/v1/pulls", blob=digest, wait=True) == 200
    assert await request(running, "DELETE", f"/v1/packages?reference=blob:{digest.replace(':', '-')}") == 200
    assert await request(running, "DELETE", "/v1/packages?reference=team/none:v1") == 404
    assert await request(running, "POST", "/v1/collect") == 200
    await until(lambda: len(lines(audit)) >= 4)
    pull, removal, failure, collect = lines(audit)
    own = f"local:{os.getuid()}"
    for line in (pull, removal, failure, collect):
        assert (line["identity"], line["address"], line["right"]) == (own, f"uid:{os.getuid()}", "local")
        assert line["request_id"]
    assert (pull["event"], pull["object"], pull["outcome"]) == ("pull", f"blob={digest}", "done")
    assert (removal["event"], removal["outcome"]) == ("remove", "done")
    assert failure["object"] == "reference=team/none:v1" and "team/none:v1" in failure["outcome"]
    assert collect["event"] == "collect" and collect["object"] == "POST /v1/collect"
    assert stat.S_IMODE(audit.stat().st_mode) == 0o600


async def test_refusals_are_noted_ten_a_minute_and_address(site: AccessSite, audit: Path, tmp_path: Path) -> None:
    seed, digest = await site.seeded(DATA)
    await until(lambda: seed.agent.access.peers.access)
    tls = certificate_of(site.tracker, tmp_path / "h9", "h9")
    url, before = f"https://{seed.settings.address}/v1/streams", len(lines(audit))
    headers = {TICKET_HEADER: site.tracker.sign(digest, "h8", "start")}
    stripes = seed.agent.store.get(digest).layout.stripes  # type: ignore[union-attr]
    body = {"blob": digest, "stripe": 0, "stripes": stripes, "have": "", "host": "h9", "priority": "start"}
    async with ClientSession(connector=TCPConnector(ssl=tls.client)) as http:
        for _ in range(REFUSALS_MAX + 5):
            async with http.post(url, headers=headers, json=body, server_hostname=agent_dns("h0")) as answer:
                assert answer.status == 403
    await until(lambda: len(lines(audit)) - before >= REFUSALS_MAX)
    refusals = lines(audit)[before:]
    assert len(refusals) == REFUSALS_MAX
    assert {(line["event"], line["identity"], line["right"]) for line in refusals} == {
        ("refusal", "agent:h9", "ticket")
    }
    assert all(line["object"] == "POST /v1/streams" and line["address"] == "127.0.0.1" for line in refusals)
    assert headers[TICKET_HEADER] not in audit.read_text(), "no secret is written"


@pytest.mark.parametrize("named", [False, True])
async def test_without_access_the_audit_is_for_those_that_name_a_file(
    site: AccessSite, audit: Path, named: bool
) -> None:
    digest = await site.publish(DATA)
    settings = site.settings("h0", join_file=None, audited=named)
    object.__setattr__(settings, "trackers", ())
    running = Running(settings)
    await running.start()
    try:
        assert await request(running, "POST", "/v1/pulls", blob=digest, wait=True) == 200
    finally:
        await running.stop()
    if named:
        await until(lambda: lines(audit))
    assert [line["event"] for line in lines(audit)] == ["pull"] * named
