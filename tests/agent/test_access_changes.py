"""What changes while a fleet with access on runs: hosts are revoked, authorities and keys rotated,
tickets renewed, trackers go away."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientError, ClientSession, TCPConnector
from joined_rig import FLEET, AccessSite, Running, access_site, certificate_of, until

from p2pdist.agent.access import tickets as tickets_module
from p2pdist.agent.access.files import make_private
from p2pdist.agent.access.peers import Peers
from p2pdist.agent.access.tickets import ASK_S, REFUSED_ASK_S, RENEW_AFTER_S, Tickets
from p2pdist.credentials.authority import Authority, agent_dns, encode_key, expires_at, make_key, make_request
from p2pdist.credentials.signing import SigningKey
from p2pdist.model.access import SKEW_S, TICKET_ALONE_S, TICKET_HEADER
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Refused
from p2pdist.model.messages import Access, Complaint
from p2pdist.model.plan import Plan, Source, StripePlan
from p2pdist.transfer.openssl import contexts
from p2pdist.transfer.openssl.server import ServerContext
from p2pdist.transfer.stream.connections import Unreachable, secure
from p2pdist.transfer.tls import Tls, TlsFiles

DATA = os.urandom(4 << 20)
SLOW_BYTES_S = 200_000.0
"""A stream at this rate outlasts every test."""


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[AccessSite]:
    async with access_site(tmp_path) as made:
        yield made


async def streaming(site: AccessSite) -> tuple[Running, Running, Digest, asyncio.Task[object]]:
    """h0 sends a blob to h1, slowly."""
    digest, seed = await site.publish(DATA), await site.agent("h0", upload_bytes_s=SLOW_BYTES_S)
    assert (await site.pull(seed, digest)).state == "done"
    await until(lambda: "h0" in site.tracker._whole.get(digest, []))
    child = await site.agent("h1")
    await until(lambda: len(site.tracker.hellos) == 2)
    pull = asyncio.create_task(site.pull(child, digest))
    await until(lambda: seed.agent.uplink.sent_bytes_total > 0, "sending")
    return seed, child, digest, pull


async def test_streams_of_a_revoked_host_end_and_it_fetches_nothing_more(site: AccessSite) -> None:
    seed, child, digest, pull = await streaming(site)
    site.tracker.revoked = ("host:h1",)
    await site.tracker._sockets["h0"].send_bytes(_encoded(site))
    await until(lambda: not seed.agent.uplink.streams, "the stream's end")
    tls = child.agent.tls
    assert tls is not None
    async with ClientSession(connector=TCPConnector(ssl=tls.client)) as http:
        url, headers = f"https://{seed.settings.address}", {TICKET_HEADER: site.tracker.sign(digest, "h1", "start")}
        for path in (f"/v1/blobs/{digest}", "/healthz"):
            async with http.get(url + path, headers=headers, server_hostname=agent_dns("h0")) as answer:
                assert answer.status == 403, path
    await site.tracker._sockets["h1"].send_bytes(_encoded(site))
    status = await pull
    assert status.state == "failed" and "revoked" in str(status.error)  # type: ignore[attr-defined]
    again = await site.pull(child, digest)
    assert again.state == "failed" and "revoked" in str(again.error)
    with pytest.raises(Refused, match="revoked"):
        child.agent.access.admit(digest, site.tracker.sign(digest, "h0", "start"), "h0", "start")
    site.tracker.revoked = ()
    await site.tracker.push_access()
    await until(lambda: not child.agent.access.peers.revoked_here)
    child.agent.access.peers.require_here()


@pytest.mark.parametrize("what", ["host:h0", "join:default"])
async def test_what_comes_from_a_revoked_host_ends_as_well(site: AccessSite, what: str) -> None:
    """Its parent may go on to serve it: the tracker may not reach that one."""
    seed, child, digest, pull = await streaming(site)
    site.tracker.planning = False
    received = child.agent.resources.received_bytes
    child.agent.access.peers._join = "another"  # else the child is revoked with its parent
    site.tracker.revoked = (what,)
    assert seed.agent.uplink.streams
    await site.tracker._sockets["h1"].send_bytes(_encoded(site))
    await until(lambda: not seed.agent.uplink.streams, "the stream's end")
    complaint = [said for said in site.tracker.said if isinstance(said, Complaint)]
    assert {(said.source, said.reason) for said in complaint} <= {("h0", "refused")}
    before = received["peer"]
    stripes = child.agent.store.get(digest).layout.stripes  # type: ignore[union-attr]
    plan = Plan(digest, tuple(StripePlan(number, seed.source) for number in range(stripes)))
    await site.tracker.assign("h1", plan, site.tracker.sign(digest, "h1", "start"))
    await until(lambda: [said for said in site.tracker.said if isinstance(said, Complaint)][len(complaint) :])
    assert not seed.agent.uplink.streams and received["peer"] == before
    site.tracker.revoked = ()
    await site.tracker.push_access()
    await until(lambda: not child.agent.access.peers.is_revoked_source("h0"))
    pull.cancel()


def _encoded(site: AccessSite) -> bytes:
    from p2pdist.model.messages import encode

    return encode(site.tracker.access())


@pytest.mark.slow
async def test_rotation_breaks_no_stream_and_the_old_authority_goes(site: AccessSite, tmp_path: Path) -> None:
    seed, child, digest, pull = await streaming(site)
    tracker, flows = site.tracker, set(seed.agent.uplink._flows)
    old, old_key = tracker.authorities[0], tracker.signing[0]
    stale = certificate_of(tracker, tmp_path / "stale", "h9")
    old_tickets = {host: tracker.sign(digest, host, "start") for host in ("h8", "h9")}
    tracker.authorities.append(Authority.create(FLEET, now=time.time()))
    tracker.signing.append(SigningKey.create())
    await tracker.push_access()
    identity = seed.settings.store / "identity" / "authorities.pem"
    await until(lambda: tracker.authorities[1].pem in identity.read_bytes())
    new = certificate_of(tracker, tmp_path / "new", "h8")

    async def get(tls: object, ticket: str) -> int:
        url = f"https://{seed.settings.address}/v1/blobs/{digest}"
        async with (
            ClientSession(connector=TCPConnector(ssl=tls.client)) as http,  # type: ignore[attr-defined]
            http.get(
                url, headers={TICKET_HEADER: ticket, "Range": "bytes=0-9"}, server_hostname=agent_dns("h0")
            ) as answer,
        ):
            await answer.read()
            return answer.status

    async def lets_in(tls: object, host: str) -> bool:
        try:
            return await get(tls, tracker.sign(digest, host, "start")) == 206
        except (OSError, ClientError):
            return False

    async def counts(tls: object, host: str, *, expected: bool) -> None:
        """Authorities are in their file a moment before they count."""
        async with asyncio.timeout(60):
            while await lets_in(tls, host) != expected:
                pass

    await counts(new, "h8", expected=True)
    assert await get(new, tracker.sign(digest, "h8", "start")) == 206
    assert await get(stale, old_tickets["h9"]) == 206, "both count for a while"
    for running in (seed, child):
        membership = running.agent.access._membership
        assert membership is not None and await membership._renewed()
    tracker.authorities.remove(old)
    tracker.signing.remove(old_key)
    await tracker.push_access()
    for running in (seed, child):
        kept = running.settings.store / "identity" / "authorities.pem"
        await until(lambda kept=kept: old.pem not in kept.read_bytes())  # type: ignore[misc]
    await until(lambda: seed.agent.access.peers.access == tracker.access())
    await counts(stale, "h9", expected=False)
    assert await get(new, tracker.sign(digest, "h8", "start")) == 206
    assert await get(new, old_tickets["h8"]) == 404, "its key is gone"
    with pytest.raises((OSError, ClientError)):
        await get(stale, tracker.sign(digest, "h9", "start"))
    assert flows <= set(seed.agent.uplink._flows), "the stream that ran goes on"
    pull.cancel()


async def test_authorities_that_streams_cannot_use_are_told(
    site: AccessSite, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = await site.agent("h0")

    def failing(credentials: object, method: int) -> None:
        raise ValueError("no such curve")

    with monkeypatch.context() as broken:
        broken.setattr(contexts, "_made", failing)
        site.tracker.authorities.append(Authority.create(FLEET, now=time.time()))
        await site.tracker.push_access()
        await until(lambda: "the fleet's authorities stay as they were" in caplog.text)
    assert "no such curve" in caplog.text
    kept = running.settings.store / "identity" / "authorities.pem"
    assert site.tracker.authorities[1].pem not in kept.read_bytes()
    await site.tracker.push_access()
    await until(lambda: site.tracker.authorities[1].pem in kept.read_bytes())


async def test_old_tickets_count_while_no_tracker_answers(site: AccessSite) -> None:
    digest, seed = await site.publish(b"data"), await site.agent("h0")
    await until(lambda: seed.agent.access.peers.access)
    sign, access = site.tracker.sign, seed.agent.access
    old = sign(digest, "h1", "start", until=time.time() - SKEW_S - 10)
    older = sign(digest, "h1", "start", until=time.time() - SKEW_S - TICKET_ALONE_S - 10)
    with pytest.raises(Refused, match="expired"):
        access.admit(digest, old, "h1", "start")
    await site.tracker.stop()
    await until(lambda: not seed.agent.session.connected)
    assert access.admit(digest, old, "h1", "start") == "start"
    with pytest.raises(Refused, match="expired"):
        access.admit(digest, older, "h1", "start")


async def test_a_transfer_outlives_its_tracker(site: AccessSite) -> None:
    seed, child, _digest, pull = await streaming(site)
    flows = set(seed.agent.uplink._flows)
    await site.tracker.stop()
    await until(lambda: not (seed.agent.session.connected or child.agent.session.connected))
    sent = seed.agent.uplink.sent_bytes_total
    await until(lambda: seed.agent.uplink.sent_bytes_total > sent)
    assert flows <= set(seed.agent.uplink._flows)
    pull.cancel()


async def test_a_pull_that_runs_long_has_its_ticket_renewed(site: AccessSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets_module, "RENEW_AFTER_S", 0.0)
    monkeypatch.setattr(tickets_module, "ASK_S", 0.0)
    _, child, digest, pull = await streaming(site)
    first = child.agent.access.tickets.get(digest)
    await until(lambda: child.agent.access.tickets.get(digest) != first, "another ticket")
    holding = [holding for host, holding in site.tracker.holdings if host == "h1"][-1]
    assert holding.ticket and holding.parents == ("h0",) * len(holding.counts)
    assert not [said for said in site.tracker.said if isinstance(said, Complaint)]
    pull.cancel()


async def test_a_tracker_that_has_just_started_is_shown_the_ticket(site: AccessSite) -> None:
    _, child, digest, pull = await streaming(site)
    ticket = child.agent.access.tickets.get(digest)
    await site.tracker.stop()
    site.tracker.holdings.clear()
    site.tracker.planning = False
    await site.tracker.start()
    await until(lambda: [held for host, held in site.tracker.holdings if host == "h1"])
    assert next(held.ticket for host, held in site.tracker.holdings if host == "h1") == ticket
    pull.cancel()


async def test_a_start_that_joins_a_preseed_opens_its_streams_again_with_the_better_ticket(site: AccessSite) -> None:
    digest, seed = await site.publish(DATA), await site.agent("h0", upload_bytes_s=SLOW_BYTES_S)
    assert (await site.pull(seed, digest)).state == "done"
    await until(lambda: "h0" in site.tracker._whole.get(digest, []))
    child = await site.agent("h1")
    await until(lambda: len(site.tracker.hellos) == 2)
    from p2pdist.model.messages import PullRequest

    child.agent.pulls.start(PullRequest(blob=digest, priority="preseed"))
    await until(lambda: seed.agent.uplink.sent_bytes_total > 0, "sending")
    core = seed.agent.uplink._core
    kinds = {id(core._queue.queue(kind)): kind for kind in ("start", "preseed")}

    def kinds_now() -> set[str]:
        return {kinds[id(flow.queue)] for flow in core._flows.values()}

    assert kinds_now() == {"preseed"}
    before = set(core._flows)
    site.tracker.planning = False
    child.agent.pulls.start(PullRequest(blob=digest))
    await until(lambda: core._flows and not before & set(core._flows), "streams opened again")
    assert kinds_now() == {"preseed"}, "by the ticket that the child has"
    site.tracker.planning = True
    stripes = next(len(held.counts) for host, held in site.tracker.holdings if host == "h1")
    plan = Plan(digest, tuple(StripePlan(number, seed.source) for number in range(stripes)))
    await site.tracker.assign("h1", plan, site.tracker.sign(digest, "h1", "start"))
    await until(lambda: kinds_now() == {"start"}, "a start's stream")


async def test_what_a_tracker_said_last_is_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is slow for a moment must not put an older message in the place of one with more
    revoked hosts, by which the agent would go after a new start."""
    started, held = threading.Event(), threading.Event()

    def late(directory: Path) -> None:
        if not started.is_set():  # the thread of the first message alone
            started.set()
            held.wait(60)
        make_private(directory)

    def peers() -> Peers:
        return Peers(tmp_path, "h0", required=False, secured=True, clock=time.time, alone=lambda: False)

    monkeypatch.setattr("p2pdist.agent.access.peers.make_private", late)
    first = peers()
    first.learn(Access({}, "", ()))
    await until(started.is_set)
    first.learn(Access({}, "", ("host:h1",)))
    await asyncio.wait(first._writing, timeout=0.3, return_when=asyncio.FIRST_COMPLETED)
    held.set()
    await first.stop()
    assert peers().is_revoked("h1")


def test_when_another_ticket_is_due() -> None:
    """After half its life, and soon after a sender refused it; never more often than that."""
    tickets, blob = Tickets(), Digest("sha256:" + "ab" * 32)
    assert not tickets.due(blob, now=0.0)
    assert tickets.due(blob, now=0.0, refused=True) and not tickets.due(blob, now=0.5, refused=True)
    assert tickets.due(blob, now=REFUSED_ASK_S, refused=True) and tickets.get(blob) == ""
    assert not tickets.keep(blob, "ticket", now=10.0)
    assert tickets.get(blob) == "ticket"
    assert not tickets.due(blob, now=10.0 + RENEW_AFTER_S - 1)
    assert tickets.due(blob, now=10.0 + RENEW_AFTER_S)
    assert not tickets.due(blob, now=10.0 + RENEW_AFTER_S + ASK_S - 1)
    assert tickets.due(blob, now=10.0 + RENEW_AFTER_S + ASK_S)
    assert not tickets.keep(blob, "", now=20.0) and tickets.get(blob) == "ticket"


async def test_all_hosts_of_a_revoked_join_token_are_revoked(site: AccessSite) -> None:
    seed, child, _digest, pull = await streaming(site)
    site.tracker.revoked = ("join:other",)
    await site.tracker.push_access()
    await until(lambda: seed.agent.access.peers.access and seed.agent.access.peers.access.revoked)
    assert seed.agent.uplink.streams
    site.tracker.revoked = ("join:default",)
    await site.tracker.push_access()
    await until(lambda: not seed.agent.uplink.streams, "the stream's end")
    assert seed.agent.access.peers.revoked_here and child.agent.access.peers.revoked_here
    assert (await pull).state == "failed"  # type: ignore[attr-defined]


async def test_a_certificate_that_has_ended_opens_no_connection(site: AccessSite, tmp_path: Path) -> None:
    """Neither of a host that asks, nor of one that is asked."""
    digest, seed = await site.publish(b"data" * 1000), await site.agent("h0")
    assert (await site.pull(seed, digest)).state == "done"
    authority, key = site.tracker.authorities[-1], make_key()
    ended = time.time() - 90_000
    file, trusted = tmp_path / "ended.pem", tmp_path / "trusted.pem"
    file.write_bytes(encode_key(key) + authority.issue(make_request(key), "agent", "h9", now=ended))
    trusted.write_bytes(authority.pem)
    tls = Tls(TlsFiles(file, file, trusted))
    async with ClientSession(connector=TCPConnector(ssl=tls.client)) as http:
        with pytest.raises((OSError, ClientError)):
            url = f"https://{seed.settings.address}/healthz"
            async with http.get(url, server_hostname=agent_dns("h0")) as answer:
                await answer.read()
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=ServerContext(tls))
    port = server.sockets[0].getsockname()[1]
    connection, source = socket.create_connection(("127.0.0.1", port)), Source("h9", f"127.0.0.1:{port}")
    own = seed.agent.tls
    assert own is not None
    with pytest.raises(Unreachable, match="expired"):
        await asyncio.to_thread(secure, connection, source, own, lambda opened: None, timeout_s=5.0)
    connection.close()
    server.close()


@pytest.mark.parametrize(("ahead_s", "counts"), [(0.0, True), (50.0, True), (-3600.0, True), (70.0, False)])
async def test_a_clock_that_is_wrong_costs_what_it_is_ahead(site: AccessSite, ahead_s: float, counts: bool) -> None:
    """A ticket that has just ended, at a sender whose clock differs from the tracker's by so much
    and that has not heard by how much."""
    digest, seed = await site.publish(b"data"), await site.agent("h0")
    await until(lambda: seed.agent.access.peers.access)
    seed.agent.access.peers._clock = lambda: time.time() + ahead_s
    ticket = site.tracker.sign(digest, "h1", "start", until=time.time())
    if counts:
        assert seed.agent.access.admit(digest, ticket, "h1", "start") == "start"
    else:
        with pytest.raises(Refused, match="expired"):
            seed.agent.access.admit(digest, ticket, "h1", "start")


async def test_tickets_outlast_their_tracker_by_a_day(site: AccessSite) -> None:
    """Trackers are away for an hour, for 23, and for two days: the clock of the host that serves
    says so. What there was no ticket for stays closed all the time."""
    seed, digest = await site.seeded(DATA)
    other = await site.publish(b"another")
    assert (await site.pull(seed, other)).state == "done"
    child = await site.agent("h1")
    assert (await site.pull(child, digest)).state == "done"
    ticket, wrong = child.agent.access.tickets.get(digest), site.tracker.sign(digest, "h2", "start")
    await site.tracker.stop()
    await until(lambda: not seed.agent.session.connected)
    tls = child.agent.tls
    assert tls is not None and ticket

    async def get(blob: Digest, shown: str) -> int:
        url, headers = f"https://{seed.settings.address}/v1/blobs/{blob}", {TICKET_HEADER: shown, "Range": "bytes=0-9"}
        async with (
            ClientSession(connector=TCPConnector(ssl=tls.client)) as http,
            http.get(url, headers=headers, server_hostname=agent_dns("h0")) as answer,
        ):
            await answer.read()
            return answer.status

    for hours, served in ((0, True), (1, True), (23, True), (48, False), (1, True)):
        seed.agent.access.peers._clock = lambda ahead_s=3600.0 * hours: time.time() + ahead_s  # type: ignore[misc]
        assert await get(digest, ticket) == (206 if served else 404), hours
        assert await get(digest, wrong) == await get(other, ticket) == await get(digest, "") == 404, hours
    await site.tracker.start()
    await until(lambda: seed.agent.session.connected)
    seed.agent.access.peers._clock = lambda: time.time() + 3600
    assert await get(digest, ticket) == 404, "a tracker answers, and gives fresh ones"


@pytest.mark.slow
async def test_a_certificate_that_ends_while_no_tracker_answers_is_replaced_once_one_does(site: AccessSite) -> None:
    """Streams that run go on, new ones are refused, and nothing has to be done by hand."""
    digest, seed = await site.publish(DATA), await site.agent("h0", upload_bytes_s=SLOW_BYTES_S)
    assert (await site.pull(seed, digest)).state == "done"
    await until(lambda: "h0" in site.tracker._whole.get(digest, []))
    site.tracker.lasts_s = 8.0
    child = await site.agent("h1")
    pem = child.settings.store / "identity" / "agent.pem"
    ends_at = expires_at(pem.read_bytes())
    await until(lambda: len(site.tracker.hellos) == 2)
    pull = asyncio.create_task(site.pull(child, digest))
    await until(lambda: seed.agent.uplink.sent_bytes_total > 0, "sending")
    flows = set(seed.agent.uplink._flows)
    site.tracker.lasts_s = 86400.0
    await site.tracker.stop()
    await asyncio.sleep(max(0.0, ends_at - time.time()) + 1.1)  # its last second counts (RFC 5280, 4.1.2.5)
    assert expires_at(pem.read_bytes()) == ends_at, "no tracker renewed it"
    sent = seed.agent.uplink.sent_bytes_total
    await until(lambda: seed.agent.uplink.sent_bytes_total > sent)
    assert flows <= set(seed.agent.uplink._flows), "what runs goes on"
    tls = child.agent.tls
    assert tls is not None
    async with ClientSession(connector=TCPConnector(ssl=tls.client)) as http:
        with pytest.raises((OSError, ClientError)):
            url = f"https://{seed.settings.address}/healthz"
            async with http.get(url, server_hostname=agent_dns("h0")) as answer:
                await answer.read()
    joins = len(site.tracker.joins)
    await site.tracker.start()
    await until(lambda: len(site.tracker.joins) > joins, "joined again")
    await until(lambda: child.agent.session.connected and expires_at(pem.read_bytes()) > ends_at)
    async with (
        ClientSession(connector=TCPConnector(ssl=tls.client)) as http,
        http.get(f"https://{seed.settings.address}/healthz", server_hostname=agent_dns("h0")) as answer,
    ):
        assert answer.status == 200
    pull.cancel()
