"""Joins, renewals and sessions of a tracker with access control, over real TLS."""

from __future__ import annotations

import asyncio
import ssl
import stat
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec
import pytest
from access_rig import ACCESS, AccessSite, Agent, access_site, ask
from waits import until

from p2pdist.credentials.authority import (
    TRACKER_DNS,
    Authority,
    Kind,
    agent_dns,
    encode_key,
    make_key,
    make_request,
    name_in,
    pinned,
)
from p2pdist.credentials.join import JoinToken
from p2pdist.model.errors import NotFound, Refused, Unauthenticated, Unavailable, UsageError
from p2pdist.model.messages import Access, Joined, JoinRequest, Reject, RenewRequest, Welcome, decode_from_tracker
from tracker.access.control import AccessControl
from tracker.access.directory import AccessState
from tracker.networks import parse_networks
from tracker.state.joins import JoinEntry, JoinRecords


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[AccessSite]:
    async with access_site(tmp_path) as found:
        yield found


def request(token: JoinToken, host: str, *addresses: str) -> JoinRequest:
    return JoinRequest(str(token), host, make_request(make_key()).decode(), addresses)


async def test_a_host_joins_opens_its_session_and_renews(site: AccessSite) -> None:
    agent = await site.join("r1n1", addresses=("127.0.0.1", "r1n1.example"))
    session = await agent.session()
    await session.hear(Welcome)
    told = await session.hear(Access)
    assert told.fleet == "prod" and told.keys == site.control.state.public_keys and told.public == ("public/*",)
    renewed = msgspec.json.decode(
        await ask(agent.http, "POST", "/v1/renew", RenewRequest(make_request(make_key()).decode(), ("127.0.0.1",))),
        type=Joined,
    )
    assert renewed.certificate != agent.joined.certificate and renewed.authorities == agent.joined.authorities


async def test_a_strangers_connection_serves_open_routes_alone(site: AccessSite) -> None:
    http = await site.stranger()
    await ask(http, "GET", "/healthz")
    for path in ("/v1/hosts", "/v1/packages?reference=public/z:v1", "/v1/preseeds", "/metrics"):
        with pytest.raises(Unauthenticated):
            await ask(http, "GET", path)
    with pytest.raises(aiohttp.WSServerHandshakeError):
        await http.ws_connect("/v1/session", server_hostname=TRACKER_DNS)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2])
async def test_older_tls_and_plain_text_are_not_spoken(site: AccessSite, version: ssl.TLSVersion) -> None:
    context = site.trusting(await site.authorities())
    context.maximum_version = version
    with pytest.raises(aiohttp.ClientError):
        await ask(site.client(context), "GET", "/healthz")
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"http://127.0.0.1:{site.port}/healthz")


async def test_wrong_join_tokens_give_nothing_and_are_limited(site: AccessSite) -> None:
    http, right = await site.stranger(), site.join_token()
    other = replace(right, secret="0" * 64)
    for _ in range(20):
        with pytest.raises(Unauthenticated):
            await ask(http, "POST", "/v1/join", request(other, "h1", "127.0.0.1"))
    with pytest.raises(Unavailable):
        await ask(http, "POST", "/v1/join", request(other, "h1", "127.0.0.1"))
    assert site.control.audit.refused["join"] == 20
    # Other hosts may be behind the same address.
    await ask(http, "POST", "/v1/join", request(right, "h1", "127.0.0.1"))


@pytest.mark.parametrize(
    "token", ["", "p2pj1", "p2pj1.x.default.y", "é" * 30, "p2pj1." + "a" * 64 + ".gone." + "b" * 64]
)
async def test_what_is_no_join_token_is_refused(site: AccessSite, token: str) -> None:
    body = JoinRequest(token, "h1", make_request(make_key()).decode())
    with pytest.raises(Unauthenticated):
        await ask(await site.stranger(), "POST", "/v1/join", body)


@pytest.mark.parametrize(
    "address",
    [
        *("tracker.p2pdist", "TRACKER.P2PDIST", "*.p2pdist", "*", agent_dns("h2"), "p2pdist", "h1.agent.p2pdist"),
        *(
            "10.0.0.1",
            "::2",
            "h2",
            "h10",
            "h2.example",
            "h1.*.example",
            "h1..example",
            "h1.ex ample",
            "0.0.0.0",
            "h1.é",
        ),
    ],
)
async def test_no_certificate_is_made_for_an_address_that_is_not_the_hosts(site: AccessSite, address: str) -> None:
    with pytest.raises((Refused, UsageError)):
        await ask(await site.stranger(), "POST", "/v1/join", request(site.join_token(), "h1", address))


async def test_addresses_in_the_networks_of_the_access_file_are_taken(tmp_path: Path) -> None:
    access = 'fleet = "prod"\nnetworks = ["10.0.0.0/8", "fd00::/8"]\n[join.default]\n'
    async with access_site(tmp_path, access) as site:
        await site.join("h1", addresses=("10.1.2.3", "fd00::1", "127.0.0.1"))
        with pytest.raises(Refused):
            await site.join("h2", addresses=("11.1.2.3",))


@pytest.mark.parametrize("host", ["a/b", "../x", "spiffe://prod/tracker/tracker", "ünï", "x" * 255, "%2e", "a,b=c"])
async def test_strange_names_of_hosts_stay_names(site: AccessSite, host: str) -> None:
    agent = await site.join(host, addresses=())
    assert agent.joined.fleet == "prod"
    session = await agent.session()
    await session.hear(Welcome)


@pytest.mark.parametrize("host", ["", "a b", "a\nb", "x" * 256, "a\0"])
async def test_names_that_no_host_may_have_are_refused(site: AccessSite, host: str) -> None:
    with pytest.raises(UsageError):
        await ask(await site.stranger(), "POST", "/v1/join", request(site.join_token(), host))


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff", b"[" * 100_000, b'{"token":1}', b"x" * 70_000])
async def test_bodies_that_are_no_request_are_the_clients_fault(site: AccessSite, body: bytes) -> None:
    agent = await site.join("h1")
    for http, path in ((await site.stranger(), "/v1/join"), (agent.http, "/v1/renew")):
        async with http.post(path, data=body, server_hostname=TRACKER_DNS) as answer:
            assert answer.status in (400, 413)


async def test_a_request_that_is_signed_by_no_key_of_its_own_is_refused(site: AccessSite) -> None:
    token, agent = site.join_token(), await site.join("h1")
    good = make_request(make_key()).decode()
    for bad in ("", "x", good.replace("A", "B"), agent.joined.certificate):
        with pytest.raises(UsageError):
            await ask(await site.stranger(), "POST", "/v1/join", JoinRequest(str(token), "h2", bad))


async def test_the_pin_tells_another_fleets_tracker_before_the_secret_is_sent(site: AccessSite) -> None:
    with pytest.raises(Refused):
        pinned(await site.authorities(), "0" * 64)


async def test_a_name_with_a_certificate_is_joined_again_with_its_own_token_alone(site: AccessSite) -> None:
    await site.join("h1")
    await site.join("h1")
    with pytest.raises(Refused):
        await site.join("h1", "a")


@pytest.mark.parametrize("kept", [True, False], ids=["in the state", "by its session"])
async def test_a_name_stays_that_of_its_token_after_a_restart(tmp_path: Path, kept: bool) -> None:
    where = str(tmp_path / "state") if kept else ""
    path = tmp_path / "access" / "access.toml"
    async with access_site(tmp_path) as site:  # makes the access file
        pass

    def control() -> AccessControl:
        return AccessControl(path, ["127.0.0.1"], state=where)

    async with access_site(tmp_path, control=control()) as site:
        agent = await site.join("h1")
        site.control.joins.close()
    async with access_site(tmp_path, control=control()) as site:
        if not kept:
            again = Agent(site, "h1", agent.joined, site.client(agent.context), agent.context)
            await (await again.session()).hear(Welcome)
        with pytest.raises(Refused, match="another token"):
            await site.join("h1", "a")
        await site.join("h2", "a")
        await site.join("h1")
        site.control.directory.set_revoked(["join:default"])
        while "join:default" not in site.control.state.rules.revoked:
            await asyncio.sleep(0.05)
        await site.join("h1", "a")  # what is revoked holds no name
        site.control.joins.close()


def test_the_record_of_joins_forgets_what_has_ended(tmp_path: Path) -> None:
    records = JoinRecords(str(tmp_path / "state"))
    assert records.take([JoinEntry("h1", "a", 100.0)], now=0.0, holds=bool) == ["a"]
    assert records.take([JoinEntry("h1", "b", 200.0)], now=50.0, holds=bool) == ["a"]
    assert records.take([JoinEntry("h1", "b", 200.0)], now=100.0, holds=bool) == ["b"]
    records.close()
    again = JoinRecords(str(tmp_path / "state"))
    assert again.take([JoinEntry("h1", "a", 300.0)], now=150.0, holds=bool) == ["b"]
    assert again.take([JoinEntry("h1", "a", 300.0)], now=150.0, holds=lambda token: token != "b") == ["a"]
    again.close()
    files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "state").iterdir()}
    assert set(files.values()) == {0o600} and stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


async def test_a_name_that_a_clock_ahead_gave_away_is_free_once_the_clock_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate that was made then is not valid yet, so it holds no name: not for the years
    until then, and neither in the record of joins nor at the tracker that made it."""
    path, where, right = tmp_path / "access" / "access.toml", str(tmp_path / "state"), time.time
    async with access_site(tmp_path) as site:  # makes the access file
        pass
    async with access_site(tmp_path, control=AccessControl(path, ["127.0.0.1"], state=where)) as site:
        with monkeypatch.context() as ahead:
            ahead.setattr(time, "time", lambda: right() + 10 * 365 * 86400)
            ask, made = request(site.join_token(), "h1", "127.0.0.1"), site.join_token("a")
            await site.control.joins.join(ask, "127.0.0.1")
        await site.control.joins.join(request(made, "h1", "127.0.0.1"), "127.0.0.1")
        with pytest.raises(Refused, match="another token"):
            await site.control.joins.join(ask, "127.0.0.1")
        site.control.joins.close()


@pytest.mark.parametrize("host", ["tracker", "tracker.example.com", "node1", "localhost", "a.localhost", "TRACKER"])
async def test_no_host_gets_a_certificate_for_the_name_of_a_tracker(tmp_path: Path, host: str) -> None:
    """With one it could pass for the tracker, or for a server on each machine."""
    async with access_site(tmp_path):
        pass
    control = AccessControl(tmp_path / "access" / "access.toml", ["127.0.0.1", "tracker.example.com", "node1"])
    async with access_site(tmp_path, control=control) as site:
        first = await site.join(host, addresses=("127.0.0.1",))
        names = [host, f"{host}.", *([f"{host}.example.com"] if "." not in host and host != "localhost" else [])]
        for name in names:
            with pytest.raises((Refused, UsageError)):
                await site.join(host, addresses=(name,))
            with pytest.raises((Refused, UsageError)):
                renewal = RenewRequest(make_request(make_key()).decode(), (name,))
                await ask(first.http, "POST", "/v1/renew", renewal)
        await site.join("node10", addresses=("node10", "node10.example.com"))


async def test_addresses_outside_the_networks_of_the_tracker_get_no_certificate(tmp_path: Path) -> None:
    access = 'fleet = "prod"\nnetworks = ["10.0.0.0/8", "11.0.0.0/8"]\n[join.default]\n'
    async with access_site(tmp_path, access):
        pass
    control = AccessControl(
        tmp_path / "access" / "access.toml", ["127.0.0.1"], networks=parse_networks("10.0.0.0/8,fd00::/8")
    )
    async with access_site(tmp_path, access, control=control) as site:
        await site.join("h1", addresses=("10.1.2.3", "127.0.0.1"))
        for address in ("11.1.2.3", "fe80::1"):
            with pytest.raises(Refused):
                await site.join("h2", addresses=(address,))


async def test_a_session_is_that_of_the_certificates_host_address_and_zone(site: AccessSite) -> None:
    agent = await site.join("h1", "a")
    for told in ({"host": "h2"}, {"address": "10.0.0.1:7071"}, {"address": "h2:7071"}, {"zone": "z9"}, {"zone": ""}):
        session = await agent.session(**told)
        problem = (await session.hear(Reject)).problem
        assert problem["type"] == "urn:p2pdist:problem:refused", problem
        await session.ended()
    session = await agent.session(zone="z2")
    await session.hear(Welcome)
    assert site.service.fleet.hosts.keys() == {"h1"}


async def test_a_revoked_host_loses_its_session_and_gets_no_other(site: AccessSite) -> None:
    agent, other = await site.join("h1"), await site.join("h2")
    session, kept = await agent.session(), await other.session()
    await session.hear(Welcome)
    site.control.directory.set_revoked(["host:h1"])
    while not (await session.hear(Access)).revoked:  # else it would go on to serve
        pass
    assert "revoked" in (await session.hear(Reject)).problem["detail"]
    await session.ended()
    while (await kept.hear(Access)).revoked != ("host:h1",):  # it may have been revoked before the first one went
        pass
    for path in ("/v1/renew", "/v1/join"):
        with pytest.raises(Refused):
            body = RenewRequest(make_request(make_key()).decode())
            token = site.join_token()
            await ask(agent.http, "POST", path, body if path == "/v1/renew" else request(token, "h1"))
    site.control.directory.set_revoked([])
    await kept.hear(Access)
    await (await agent.session()).hear(Welcome)


async def test_what_changes_while_the_access_file_is_read_is_read_as_well(
    site: AccessSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await (await site.join("h1")).session()
    await session.hear(Access)
    directory, revoked = site.control.directory, [["host:h2"]]
    load = directory.load

    def changed_meanwhile(**time: float) -> AccessState:
        state = load(**time)
        while revoked:
            directory.set_revoked(revoked.pop())
        return state

    monkeypatch.setattr(directory, "load", changed_meanwhile)
    site.control.reload()
    while (await session.hear(Access)).revoked != ("host:h2",):
        pass


async def test_a_join_token_that_is_gone_from_the_file_takes_its_hosts_along(site: AccessSite) -> None:
    agent = await site.join("h1", "a")
    session = await agent.session()
    await session.hear(Welcome)
    site.path.write_text(site.path.read_text().replace("[join.a]", "[join.b]"))
    await session.hear(Reject)
    await session.ended()
    with pytest.raises(NotFound):
        site.control.directory._files.read(site.path.parent / "join-c.token")
    assert site.join_token("b").id == "b"


async def test_a_certificate_that_ended_opens_nothing(site: AccessSite, tmp_path: Path) -> None:
    key = make_key()
    then = time.time() - 90_000
    certificate = site.control.state.authorities[0].issue(
        make_request(key), "agent", "h1", ["127.0.0.1"], now=then, join="default"
    )
    (tmp_path / "old.pem").write_bytes(encode_key(key) + certificate)
    context = site.trusting(await site.authorities())
    context.load_cert_chain(tmp_path / "old.pem")
    with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
        await ask(site.client(context), "GET", "/healthz")


async def test_trackers_name_themselves_in_their_certificate(site: AccessSite) -> None:
    context = site.trusting(await site.authorities())
    _, writer = await asyncio.open_connection("127.0.0.1", site.port, ssl=context, server_hostname=TRACKER_DNS)
    peer = writer.get_extra_info("peercert")
    writer.close()
    assert name_in(peer, "prod", "tracker") == "tracker" and not name_in(peer, "prod", "agent")


async def test_certificates_of_another_authority_name_their_hosts(tmp_path: Path) -> None:
    """As cert-manager and SPIRE issue them: by a DNS name, or by the URI of the fleet."""
    (tmp_path / "access").mkdir()
    other, stranger = Authority.create("other", now=time.time()), Authority.create("prod", now=time.time())
    (tmp_path / "access" / "ca.pem").write_bytes(other.pem)
    table = '[certificates]\nauthorities = ["ca.pem"]\nread = ["team-a/*"]\n'
    async with access_site(tmp_path, ACCESS + table) as site:
        key = make_key()

        async def shown(authority: Authority, kind: Kind, name: str, *names: str, join: str = "") -> Agent:
            certificate = authority.issue(make_request(key), kind, name, names, now=time.time(), join=join)
            file = tmp_path / f"own-{len(list(tmp_path.iterdir()))}.pem"
            file.write_bytes(encode_key(key) + certificate)
            context = site.trusting(await site.authorities())
            context.load_cert_chain(file)
            joined = Joined("prod", certificate.decode(), "")
            return Agent(
                site,
                names[0] if kind == "tracker" or authority.fleet != "prod" else name,
                joined,
                site.client(context),
                context,
            )

        agent = await shown(other, "agent", "any", "node1.example", "127.0.0.1")
        session = await agent.session()
        told = [await session.hear(Welcome), await session.hear(Access)]
        assert other.pem.decode() in told[1].authorities and other.pem not in await site.authorities()
        await ask(agent.http, "GET", "/v1/packages?reference=team-a/x:v1")
        with pytest.raises(NotFound):
            await ask(agent.http, "GET", "/v1/packages?reference=team-b/y:v1")
        named = Authority("prod", other.certificate, other.key)
        by_uri = await shown(named, "agent", "node2", "elsewhere.example", "127.0.0.1", join="default")
        await (await by_uri.session(host="node2")).hear(Welcome)
        with pytest.raises(NotFound):  # another authority's word about join tokens is worth nothing
            await ask(by_uri.http, "GET", "/v1/packages?reference=team-b/y:v1")
        with pytest.raises(Refused, match="another authority"):
            await ask(agent.http, "POST", "/v1/renew", RenewRequest(make_request(key).decode()))
        session = await agent.session(host="node2")
        await session.hear(Reject)
        with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
            await ask((await shown(stranger, "agent", "h1", "127.0.0.1", join="default")).http, "GET", "/healthz")
        own = site.control.state.authorities[0]
        for kind, join in (("tracker", "default"), ("agent", "")):
            nobody = await shown(own, kind, "tracker", "127.0.0.1", join=join)
            with pytest.raises(Refused):
                await ask(nobody.http, "GET", "/v1/resolve?reference=team-a/x:v1")
        site.control.directory.set_revoked(["host:node1.example"])
        for _ in range(400):
            try:
                await ask(agent.http, "GET", "/v1/resolve?reference=team-a/x:v1")
            except Refused:
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError("the host is not revoked")


def test_another_authority_may_not_have_the_fleets_name(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(Authority.create("prod", now=time.time()).pem)
    (tmp_path / "access.toml").write_text('fleet = "prod"\n[certificates]\nauthorities = ["ca.pem"]\n')
    with pytest.raises(UsageError, match="the fleet's own"):
        AccessControl(tmp_path / "access.toml")


@pytest.mark.parametrize("number", [20, 200])
def test_agents_take_whatever_authorities_an_access_file_may_name(number: int, tmp_path: Path) -> None:
    """All that a system trusts are too many: each agent would end its session at the message."""
    (tmp_path / "ca.pem").write_bytes(Authority.create("other", now=time.time()).pem * number)
    (tmp_path / "access.toml").write_text('fleet = "prod"\n[certificates]\nauthorities = ["ca.pem"]\n')
    try:
        told = AccessControl(tmp_path / "access.toml").encoded
    except UsageError as error:
        assert "ca.pem" in error.what and number == 200
    else:
        message = decode_from_tracker(told)
        assert isinstance(message, Access) and message.authorities.count("BEGIN") == number + 1


def test_joins_that_are_written_together_count_one_after_the_other(tmp_path: Path) -> None:
    """No token takes the name of a host that lives, but that of one which came by a revoked one."""
    records, random = JoinRecords(str(tmp_path / "state")), Random(7)
    known: dict[str, JoinEntry] = {}

    def holds(token: str) -> bool:
        return token != "c"

    def slowly(entry: JoinEntry, now: float) -> str:
        last = known.get(entry.host)
        if last is not None and last.token != entry.token and last.until > now and holds(last.token):
            return last.token
        known[entry.host] = entry
        return entry.token

    for number in range(10):
        now = 40.0 * number
        entries = [
            JoinEntry(f"h{random.randrange(6)}", random.choice("abc"), now + random.choice((20.0, 60.0, 90.0)))
            for _ in range(20)
        ]
        assert records.take(entries, now=now, holds=holds) == [slowly(entry, now) for entry in entries]
    records.close()


async def test_joins_that_come_while_one_is_written_share_a_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[list[str]] = []
    take, going_on = JoinRecords.take, threading.Event()

    def slow(self: JoinRecords, entries: Sequence[JoinEntry], **more: Any) -> list[str]:
        written.append([entry.host for entry in entries])
        assert going_on.wait(60)
        return take(self, entries, **more)

    monkeypatch.setattr(JoinRecords, "take", slow)
    async with access_site(tmp_path) as site:
        first = asyncio.create_task(site.join("h0"))
        await until(lambda: written)
        others = [asyncio.create_task(site.join(f"h{number}")) for number in range(1, 9)]
        await until(lambda: len(site.control.joins._records._waiting) == len(others))
        assert not first.done(), "a host gets its certificate when its join is written down"
        going_on.set()
        for agent in await asyncio.gather(first, *others):
            assert agent.joined.certificate
        assert written[0] == ["h0"] and sorted(written[1]) == [f"h{number}" for number in range(1, 9)]


async def test_a_record_that_does_not_answer_fails_all_joins_that_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with access_site(tmp_path) as site:
        with monkeypatch.context() as away:

            def fails(self: JoinRecords, entries: Sequence[JoinEntry], **more: Any) -> list[str]:
                raise Unavailable("the database does not answer", remedy="Check it")

            away.setattr(JoinRecords, "take", fails)
            ends = await asyncio.gather(*(site.join(f"h{number}") for number in range(3)), return_exceptions=True)
            assert [type(end) for end in ends] == [Unavailable] * 3
        assert (await site.join("h0")).joined.certificate
