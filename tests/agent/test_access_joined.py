"""Agents in a fleet with access on: they join, show each other certificates and tickets, and refuse
what the tracker did not allow. Real TLS, real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import stat
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientConnectionError, ClientSession, TCPConnector, web
from joined_rig import FLEET, AccessSite, AccessTracker, Running, access_site, certificate_of, free_port, until
from waits import LIMIT_S

from p2pdist.agent.access import service as service_module
from p2pdist.agent.access.identity import read_join_file
from p2pdist.agent.agent import Agent, AgentSettings, membership_of
from p2pdist.agent.bittorrent.service import SwarmSettings
from p2pdist.credentials import exchange
from p2pdist.credentials.authority import TRACKER_DNS, Authority, agent_dns, begins_at, expires_at
from p2pdist.credentials.join import JoinToken
from p2pdist.credentials.signing import SigningKey
from p2pdist.credentials.tokens import create_token
from p2pdist.model.access import SKEW_S, TICKET_HEADER, TICKET_S, Ticket, encode_ticket, joined_with
from p2pdist.model.errors import Refused, Unavailable, UsageError
from p2pdist.model.messages import Access, Joined, JoinRequest
from p2pdist.transfer.names import NAMES, Resolver
from p2pdist.transfer.openssl import contexts
from p2pdist.transfer.tls import Tls, TlsFiles

DATA = os.urandom(1 << 20)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[AccessSite]:
    async with access_site(tmp_path) as made:
        yield made


# -- joining


async def test_an_agent_joins_and_opens_its_session_with_its_certificate(site: AccessSite) -> None:
    running = await site.agent("h0")
    await until(lambda: site.tracker.hellos)
    hello, host = site.tracker.hellos[0]
    assert (hello.host, host, hello.tls) == ("h0", "h0", True)
    (join,) = site.tracker.joins
    assert join.addresses == ("127.0.0.1",)
    identity = running.settings.store / "identity"
    assert stat.S_IMODE(identity.stat().st_mode) == 0o700
    await until(lambda: (identity / "access.json").exists())
    names = {path.name for path in identity.iterdir()}
    assert names == {"agent.pem", "authorities.pem", "member.json", "access.json"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in identity.iterdir())


async def test_the_secret_is_not_sent_to_a_tracker_of_another_authority(site: AccessSite) -> None:
    other = Authority.create("test", now=time.time())
    site.join_file.write_text(str(JoinToken.create(other.fingerprint, "default")))
    membership = membership_of(site.settings("h0"))
    assert membership is not None
    with pytest.raises(Refused, match="pins"):
        await membership.enter()
    assert not site.tracker.joins


async def test_the_secret_is_not_sent_to_a_tracker_that_only_repeats_the_pinned_authority(
    site: AccessSite, tmp_path: Path
) -> None:
    """It states the right authority, which is public, and has no certificate of it."""
    liar = AccessTracker(tmp_path / "liar")
    liar.token = site.tracker.token
    right = site.tracker.authorities[0]
    wrong, liar.authorities = liar.authorities, [right]
    context = liar.context
    liar.authorities = wrong
    made = context()
    liar.authorities = [right]
    liar.context = lambda: made  # type: ignore[method-assign]
    await liar.start()
    try:
        settings = site.settings("h0")
        membership = membership_of(settings)
        assert membership is not None
        membership.trackers = lambda: [liar.url]
        assert not await membership._joined()
        assert not liar.joins
    finally:
        await liar.stop()


async def test_a_wrong_secret_is_told_and_is_not_tried_for_ever(site: AccessSite) -> None:
    site.join_file.write_text(str(JoinToken.create(site.tracker.token.pin, "default")))
    membership = membership_of(site.settings("h0"))
    assert membership is not None
    with pytest.raises(Refused, match="not one of this fleet"):
        await asyncio.wait_for(membership.enter(), 60)


async def test_an_agent_waits_for_its_first_tracker(site: AccessSite) -> None:
    await site.tracker.stop()
    starting = asyncio.create_task(site.agent("h0"))
    await asyncio.sleep(0.2)
    assert not starting.done()
    await site.tracker.start()
    await asyncio.wait_for(starting, 60)


async def test_what_streams_need_is_made_before_the_first_one(site: AccessSite) -> None:
    host = await site.agent("h0")
    tls = host.agent.access.tls
    assert tls is not None
    await until(lambda: tls.credentials in contexts._clients and tls.credentials in contexts._servers)


@pytest.mark.parametrize("ahead_s", [3600.0, 2 * 86400.0])
async def test_a_host_whose_clock_is_an_hour_behind_joins_and_one_that_is_days_behind_hears_of_the_clock(
    site: AccessSite, ahead_s: float
) -> None:
    """As from the host: the fleet was made, and the tracker has its certificate, by clocks that are
    ahead."""
    await site.tracker.stop()
    site.tracker.clock = lambda: time.time() + ahead_s
    site.tracker.authorities = [Authority.create(FLEET, now=site.tracker.clock())]
    site.tracker.token = JoinToken.create(site.tracker.authorities[0].fingerprint, "default")
    site.join_file.write_text(str(site.tracker.token))
    await site.tracker.start()
    if ahead_s == 3600.0:
        host = await site.agent("h0")
        await until(lambda: site.tracker.hellos and host.agent.session.connected)
        return
    authority = site.tracker.authorities[0].pem.decode()
    request = JoinRequest(str(site.tracker.token), "", "h0", ())
    with pytest.raises(Unavailable, match="not yet valid") as failure:
        await exchange.post(
            f"{site.tracker.url}/v1/join", request, Joined, exchange.trusting(authority), TRACKER_DNS, Resolver(NAMES)
        )
    assert "by the clock of this host" in failure.value.remedy


def test_a_join_file_that_others_may_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = JoinToken.create("ab" * 32, "default")
    path = tmp_path / "join"
    path.write_text(f"{token}\n")
    path.chmod(0o600)
    assert read_join_file(path) == token and not caplog.records
    path.chmod(0o640)
    read_join_file(path)
    assert "chmod 600" in caplog.text and token.secret not in caplog.text
    path.write_text("p2pj1.nonsense")
    with pytest.raises(UsageError, match="no join token"):
        read_join_file(path)


async def test_plain_trackers_are_refused_with_a_join_file(site: AccessSite) -> None:
    settings = site.settings("h0")
    object.__setattr__(settings, "trackers", ("http://127.0.0.1:7070",))
    with pytest.raises(UsageError, match="over TLS"):
        membership_of(settings)


# -- what is kept


async def test_an_agent_starts_again_without_a_tracker_and_serves(site: AccessSite) -> None:
    seed, digest = await site.seeded(DATA)
    child = await site.agent("h1")
    await until(lambda: len(site.tracker.hellos) == 2)
    await site.pull(child, digest)
    ticket = child.agent.access.tickets.get(digest)
    await site.tracker.stop()
    await seed.stop()
    await seed.start()
    assert len(site.tracker.joins) == 2, "the kept certificate is used"
    async with client(child.agent.tls) as http:
        url = f"https://{seed.settings.address}/v1/blobs/{digest}"
        async with http.get(url, headers={TICKET_HEADER: ticket}, server_hostname=agent_dns("h0")) as answer:
            assert answer.status == 200 and await answer.read() == DATA
        async with http.get(url, server_hostname=agent_dns("h0")) as answer:
            assert answer.status == 404, "and what it heard of access still holds"


async def test_an_expired_certificate_is_replaced_by_joining_again(site: AccessSite) -> None:
    site.tracker.lasts_s = 30.0  # less than is worth using
    running = await site.agent("h0")
    site.tracker.lasts_s = 86400.0
    membership = running.agent.access._membership
    assert membership is not None and await membership._renewed()
    assert len(site.tracker.joins) == 2 and not site.tracker.renewals
    assert expires_at((running.settings.store / "identity" / "agent.pem").read_bytes()) > time.time() + 3600


async def test_a_certificate_is_renewed_at_half_its_life(site: AccessSite) -> None:
    site.tracker.lasts_s = 125.0  # its second half is too short to wait for, and long enough to use
    running = await site.agent("h0")
    pem = running.settings.store / "identity" / "agent.pem"
    before = pem.read_bytes()
    membership = running.agent.access._membership
    assert membership is not None and membership._left_s() > 0
    site.tracker.lasts_s = 86400.0
    assert await membership._renewed()
    assert site.tracker.renewals == ["h0"] and len(site.tracker.joins) == 1
    assert pem.read_bytes() != before and membership._left_s() > 3600


async def test_a_certificate_that_is_not_valid_yet_is_replaced_by_joining_again(site: AccessSite) -> None:
    """The clock of the tracker that gave it was ahead for a while: it is of no use for days."""
    running = await site.agent("h0")
    membership = running.agent.access._membership
    assert membership is not None
    site.tracker.clock = lambda: time.time() + 5 * 86400
    assert await membership._renewed()
    assert membership._left_s() <= 0
    site.tracker.clock = time.time
    assert await membership._renewed()
    assert len(site.tracker.joins) == 2 and membership._left_s() > 3600
    begins = begins_at((running.settings.store / "identity" / "agent.pem").read_bytes())
    assert begins < time.time()


async def test_a_host_of_another_name_or_fleet_joins_anew(site: AccessSite) -> None:
    running = await site.agent("h0")
    settings = running.settings
    await running.stop()
    object.__setattr__(settings, "host", "h9")
    membership = membership_of(settings)
    assert membership is not None
    await membership.enter()
    assert [join.host for join in site.tracker.joins] == ["h0", "h9"]


# -- tickets


def client(tls: Tls | None) -> ClientSession:
    return ClientSession(connector=TCPConnector(ssl=tls.client if tls is not None else False))


async def test_a_child_receives_with_the_ticket_of_its_plan(site: AccessSite) -> None:
    seed, digest = await site.seeded(DATA)
    child = await site.agent("h1")
    await until(lambda: len(site.tracker.hellos) == 2)
    status = await site.pull(child, digest)
    assert status.state == "done" and (status.bytes_peers, status.bytes_origin) == (len(DATA), 0)
    # The last block of a stream counts only where the sender hears that it went before the
    # receiver, which has everything, closes the connection.
    await asyncio.wait_for(seed.agent.uplink.idle(), LIMIT_S)
    assert seed.agent.uplink.sent_bytes_total > 0


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["none", "expired", "foreign", "another blob", "another host", "garbage"])
async def test_nothing_is_sent_for_a_wrong_ticket_and_the_parent_keeps_its_reputation(
    site: AccessSite, wrong: str, tmp_path: Path
) -> None:
    from p2pdist.model.access import Ticket, encode_ticket

    seed, digest = await site.seeded(DATA)
    right = site.tracker.sign
    key, stranger = site.tracker.signing[0], SigningKey.create()
    other = await site.publish(b"other")
    later = time.time() + TICKET_S
    bad = {
        "none": "",
        "expired": right(digest, "h1", "start", until=time.time() - SKEW_S - 1),
        "foreign": encode_ticket(Ticket(key.name, digest, "h1", "start", later), stranger.sign),
        "another blob": right(other, "h1", "start"),
        "another host": encode_ticket(Ticket(key.name, digest, "h7", "start", later), key.sign),
        "garbage": "A" * 200,
    }[wrong]
    site.tracker.ticket = lambda blob, host, priority: bad
    child = await site.agent("h1")
    await until(lambda: len(site.tracker.hellos) == 2)
    pull = asyncio.create_task(site.pull(child, digest))
    asked = [host for host, holding in site.tracker.holdings if host == "h1"]
    await until(lambda: len([host for host, _ in site.tracker.holdings if host == "h1"]) > len(asked) + 1, "asking")
    assert seed.agent.uplink.sent_bytes_total == 0
    assert not [
        said for said in site.tracker.said if type(said).__name__ == "Complaint" and said.source and not said.starved
    ]
    site.tracker.ticket = right
    status = await pull
    assert status.state == "done" and status.bytes_peers == len(DATA)


async def test_over_tcp_what_is_not_public_looks_as_if_it_were_not_here(site: AccessSite, tmp_path: Path) -> None:
    seed, digest = await site.seeded(DATA)
    ticket = site.tracker.sign(digest, "h1", "start")
    tls = certificate_of(site.tracker, tmp_path / "h1", "h1")
    name = agent_dns("h0")
    base = f"https://{seed.settings.address}"
    anonymous = ssl.create_default_context(cadata=site.tracker.authorities[0].pem.decode())

    async def get(http: ClientSession, path: str, **headers: str) -> int:
        async with http.get(base + path, headers=headers, server_hostname=name) as answer:
            await answer.read()
            return answer.status

    blob, holding, pieces = f"/v1/blobs/{digest}", f"/v1/blobs/{digest}/holding", f"/v1/blobs/{digest}/pieces"
    absent = f"/v1/blobs/sha256:{'ab' * 32}"
    async with ClientSession(connector=TCPConnector(ssl=anonymous)) as http:
        assert [await get(http, path) for path in (blob, holding, pieces, absent)] == [404, 404, 404, 404]
        assert await get(http, blob, **{TICKET_HEADER: ticket}) == 404, "a ticket alone is of no use"
        assert await get(http, "/healthz") == 200 and await get(http, "/metrics") == 401
        async with http.post(base + "/v1/streams", server_hostname=name, data=b"{}") as answer:
            assert answer.status == 401
    async with client(tls) as http:
        assert [await get(http, path) for path in (blob, holding, pieces, absent)] == [404, 404, 404, 404]
        assert await get(http, blob, **{TICKET_HEADER: ticket}) == 200
        assert await get(http, pieces, **{TICKET_HEADER: ticket}) == 200
        assert await get(http, holding, **{TICKET_HEADER: ticket}) == 200
        assert await get(http, "/metrics") == 403
    site.tracker.public = ("blob",)
    await site.tracker.push_access()
    await until(lambda: seed.agent.access.is_public(digest))
    async with ClientSession(connector=TCPConnector(ssl=anonymous)) as http:
        assert [await get(http, path) for path in (blob, holding, pieces)] == [200, 200, 200]


@pytest.mark.parametrize("join", ["default", "a", "elsewhere"])
async def test_a_ticket_counts_for_the_join_token_in_the_certificate(
    site: AccessSite, tmp_path: Path, join: str
) -> None:
    """What a host learns from the tickets of others is of no use to one that may read less; another
    authority may write what it likes where the fleet's names the join token."""
    seed, digest = await site.seeded(DATA)
    signing = site.tracker.signing[-1]
    ticket = encode_ticket(
        Ticket(signing.name, digest, joined_with("default"), "start", time.time() + TICKET_S), signing.sign
    )
    other = Authority.create("elsewhere", now=time.time())
    site.tracker.others = other.pem.decode()
    await site.tracker.push_access()
    trusted = seed.settings.store / "identity" / "authorities.pem"
    await until(lambda: trusted.read_bytes().count(b"BEGIN") == 2)
    outside = join == "elsewhere"
    tls = certificate_of(
        site.tracker, tmp_path / "h1", "h1", other if outside else None, join="default" if outside else join
    )
    fetched = f"https://{seed.settings.address}/v1/blobs/{digest}"

    async def served() -> bool:
        shown = {TICKET_HEADER: ticket}
        async with client(tls) as http, http.get(fetched, headers=shown, server_hostname=agent_dns("h0")) as answer:
            return answer.status == 200

    async def served_in_the_end() -> bool:
        """The listener breaks connections until it trusts the authority, later than the file."""
        while True:
            with contextlib.suppress(ClientConnectionError):
                return await served()

    assert await asyncio.wait_for(served_in_the_end(), 60) == (join == "default")


async def test_a_ticket_caps_the_priority(site: AccessSite) -> None:
    seed, digest = await site.seeded(DATA)
    access = seed.agent.access
    preseed, start = (site.tracker.sign(digest, "h1", priority) for priority in ("preseed", "start"))  # type: ignore[arg-type]
    assert access.admit(digest, preseed, "h1", "start") == "preseed"
    assert access.admit(digest, start, "h1", "start") == "start"
    assert access.admit(digest, start, "h1", "preseed") == "preseed"


async def test_a_plan_names_a_host_and_no_other_answers_for_it(site: AccessSite) -> None:
    """Another host of the fleet at the same address shows its own certificate, and is refused."""
    seed, digest = await site.seeded(DATA)
    site.tracker._whole[digest] = ["h7"]
    site.tracker._addresses["h7"] = seed.settings.address
    child = await site.agent("h1")
    await until(lambda: len(site.tracker.hellos) == 2)
    pull = asyncio.create_task(site.pull(child, digest))
    await until(lambda: [said for said in site.tracker.said if type(said).__name__ == "Complaint"])
    assert seed.agent.uplink.sent_bytes_total == 0
    site.tracker._whole[digest] = ["h0"]
    await child.agent.session._connection._socket.close()  # type: ignore[union-attr]
    assert (await pull).state == "done"


async def test_a_certificate_of_another_authority_is_no_certificate(site: AccessSite, tmp_path: Path) -> None:
    seed, digest = await site.seeded(DATA)
    stranger = certificate_of(site.tracker, tmp_path / "x", "h1", Authority.create("test", now=time.time()))
    ticket = site.tracker.sign(digest, "h1", "start")
    async with client(stranger) as http:
        with pytest.raises((OSError, Exception)):
            url = f"https://{seed.settings.address}/v1/blobs/{digest}"
            async with http.get(url, headers={TICKET_HEADER: ticket}, server_hostname=agent_dns("h0")) as answer:
                assert answer.status == 200


# -- others


async def test_metrics_are_for_bearers_of_the_right(site: AccessSite) -> None:
    running = await site.agent("h0")
    site.tracker.roles = {"scraper": ("metrics",), "slurm": ("preseed", "rank")}
    key, pin, now = site.tracker.signing[0], site.tracker.token.pin, time.time()
    scraper, record = create_token(key, FLEET, pin, "scraper", now=now, lasts_s=60)
    scheduler, _ = create_token(key, FLEET, pin, "slurm", now=now, lasts_s=60)
    expired, _ = create_token(key, FLEET, pin, "scraper", now=now - 3600, lasts_s=60)
    stranger, _ = create_token(SigningKey.create(), FLEET, pin, "scraper", now=now, lasts_s=60)
    elsewhere, _ = create_token(key, "other", pin, "scraper", now=now, lasts_s=60)
    await site.tracker.push_access()
    access = running.agent.access
    await until(lambda: access.peers.access is not None and access.peers.access.roles)
    trusting = ssl.create_default_context(cadata=site.tracker.authorities[0].pem.decode())

    async def status(token: str) -> int:
        url, headers = f"https://{running.settings.address}/metrics", {"Authorization": f"Bearer {token}"}
        async with (
            ClientSession(connector=TCPConnector(ssl=trusting)) as http,
            http.get(url, headers=headers, server_hostname=agent_dns("h0")) as answer,
        ):
            return answer.status

    tokens = (scraper, scraper.split(".", 2)[2], scheduler, expired, stranger, elsewhere)
    assert [await status(token) for token in tokens] == [200, 200, 403, 401, 401, 401]
    assert await status("nonsense") == 400
    site.tracker.revoked = (f"token:{record.id}",)
    await site.tracker.push_access()
    await until(lambda: access.peers.access.revoked)  # type: ignore[union-attr]
    assert await status(scraper) == 401


async def test_every_route_of_an_agent_names_its_right() -> None:
    from p2pdist.agent.api.server import LOCAL_ROUTES, PUBLIC_ROUTES

    for routes, rights in ((PUBLIC_ROUTES, {"open", "metrics", "ticket"}), (LOCAL_ROUTES, None)):
        for route in routes:
            assert route.right is not None, f"{route.method} {route.path}"
            assert rights is None or route.right in rights
    assert {route.path for route in PUBLIC_ROUTES if route.right == "open"} == {"/healthz", "/readyz"}
    assert {route.right for route in LOCAL_ROUTES} == {"open", "metrics", "local", "local-admin"}


async def test_pages_of_other_sites_change_nothing(site: AccessSite, tmp_path: Path) -> None:
    """Whether access is on or off."""
    plain = Running(AgentSettings((), "open", f"127.0.0.1:{free_port()}", tmp_path / "open"))
    await plain.start()
    site.stack.push_async_callback(plain.stop)
    async with ClientSession() as http:
        url = f"http://{plain.settings.address}/v1/streams"
        async with http.post(url, data=b"{}", headers={"Origin": "http://evil.example"}) as answer:
            assert answer.status == 403
        async with http.post(url, data=b"{}") as answer:
            assert answer.status == 400


async def test_what_a_plain_tracker_says_of_access_is_not_believed(tmp_path: Path) -> None:
    """Neither by an agent without a certificate, nor by one that speaks to trackers in plain."""
    access = Access({}, "", revoked=("host:h0",))
    (tmp_path / "x").mkdir()
    sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))
    from authority import Authority as Own

    for number, tls in enumerate((None, Own(tmp_path / "x").issue("h0"))):
        running = Running(AgentSettings((), "h0", f"127.0.0.1:{free_port()}", tmp_path / f"s{number}", tls=tls))
        await running.start()
        try:
            running.agent._on_message(access)
            assert not running.agent.access.peers.on
        finally:
            await running.stop()


# -- certificates of one's own


async def test_certificates_of_ones_own_are_read_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "WATCH_S", 0.02)
    sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))
    from authority import Authority as Own

    own = Own(tmp_path)
    files, peer = own.issue("h0"), Tls(own.issue("peer"))
    settings = AgentSettings((), "h0", f"127.0.0.1:{free_port()}", tmp_path / "store", tls=files)
    running = Running(settings)
    await running.start()

    async def shown() -> object:
        host, _, port = settings.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=peer.client, server_hostname="127.0.0.1")
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return certificate

    try:
        before = await shown()
        renewed = own.issue("renewed")
        os.replace(renewed.certificate, files.certificate)  # its key comes a moment later
        await asyncio.sleep(0.1)
        assert await shown() == before
        os.replace(renewed.key, files.key)
        for _ in range(6000):
            if await shown() != before:
                break
            await asyncio.sleep(0.01)
        assert await shown() != before
    finally:
        await running.stop()


async def test_torrents_are_for_public_packages(site: AccessSite) -> None:
    port = free_port()
    running = await site.agent("h0", swarm=SwarmSettings("auto", ("127.0.0.1", port)))
    digest = await site.publish(DATA)
    await site.pull(running, digest)
    swarming = running.agent.swarming
    assert swarming is not None and swarming.policy_of(digest) == "trees"
    site.tracker.public = ("blob",)
    await site.tracker.push_access()
    await until(lambda: running.agent.access.is_public(digest))
    assert swarming.policy_of(digest) == "auto"


async def test_hosts_with_certificates_of_another_authority_feed_those_that_joined_and_are_fed(
    site: AccessSite, tmp_path: Path
) -> None:
    """The first DNS name is the host, which has to be that of the plan."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))
    from authority import Authority as Own

    (tmp_path / "own").mkdir()
    own, tracker = Own(tmp_path / "own"), site.tracker
    tracker.others = own.path.read_text()
    await tracker.stop()
    await tracker.start()
    bundle = tmp_path / "own" / "bundle.pem"
    bundle.write_text(tracker.others + tracker.authorities[0].pem.decode())

    def files(host: str) -> TlsFiles:
        made = own.issue(f"cert-{host}", host=host)
        return TlsFiles(made.certificate, made.key, bundle)

    digest = await site.publish(DATA)
    first = await site.agent("h0", tls=files("h0"), join_file=None)
    await until(lambda: first.agent.access.peers.on)
    assert (await site.pull(first, digest)).state == "done"
    await until(lambda: "h0" in tracker._whole.get(digest, []))
    joined = await site.agent("h1")
    other = await site.agent("h2", tls=files("h2"), join_file=None)
    await until(lambda: len(tracker.hellos) == 3 and other.agent.access.peers.on)
    assert (await site.pull(joined, digest)).bytes_peers == len(DATA)
    tracker._whole[digest] = ["h1"]
    assert (await site.pull(other, digest)).bytes_peers == len(DATA)
    # A block counts once the sender has seen that it went: the receiver may be sooner.
    await asyncio.wait_for(first.agent.uplink.idle(), LIMIT_S)
    tracker._whole[digest], tracker._addresses["h7"] = ["h7"], first.settings.address
    sent = first.agent.uplink.sent_bytes_total
    late = await site.agent("h3")
    await until(lambda: len(tracker.hellos) == 4)
    pull = asyncio.create_task(site.pull(late, digest))
    await until(lambda: [said for said in tracker.said if type(said).__name__ == "Complaint"])
    assert first.agent.uplink.sent_bytes_total == sent, "h0 is not h7"
    pull.cancel()


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_an_agent_without_a_join_file_says_what_a_tracker_with_access_wants(
    site: AccessSite, tmp_path: Path, scheme: str
) -> None:
    url = site.tracker.url.replace("https", scheme)
    agent = Agent(AgentSettings((url,), "h7", "127.0.0.1:9", tmp_path / "h7", tracker_wait_s=5))
    await agent.start()
    try:
        await until(lambda: agent.session.problem)
        assert "--join-file" in agent.session.problem, agent.session.problem
        assert ("https://" in agent.session.problem) == (scheme == "http")
    finally:
        await agent.stop()


async def test_an_agent_with_a_join_file_says_that_a_tracker_speaks_no_tls() -> None:
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        with pytest.raises(Unavailable, match="no TLS: start the tracker with --access"):
            await exchange.authorities(f"https://127.0.0.1:{runner.addresses[0][1]}", Resolver(NAMES))
    finally:
        await runner.cleanup()
