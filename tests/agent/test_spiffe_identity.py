"""Agents whose certificates come from a SPIFFE Workload API: names, trust domains, rotation under a
listener that goes on, and an API that goes away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from joined_rig import Running, access_site
from ports import free_port
from waits import until
from workload_api import TrustDomain, WorkloadApi

from p2pdist.agent.access import spiffe as module
from p2pdist.agent.access.peers import Peers
from p2pdist.agent.access.spiffe import SpiffeSettings, WorkloadIdentity
from p2pdist.agent.agent import AgentSettings
from p2pdist.model.address import parse_address
from p2pdist.model.errors import Refused, Unavailable, UsageError
from p2pdist.model.plan import Source
from p2pdist.transfer.openssl.server import ServerContext
from p2pdist.transfer.stream.connections import Unreachable, secure

DATA = os.urandom(3 << 20)


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path, for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="spiffe-") as name:
        yield Path(name)


@pytest.fixture
def domain() -> TrustDomain:
    return TrustDomain("test")


@pytest.fixture
def api(place: Path, domain: TrustDomain) -> Iterator[WorkloadApi]:
    made = WorkloadApi(place / "api.sock", domain.svid("agent/h0")).start()
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_FIRST_S", 0.02)
    monkeypatch.setattr(module, "RETRY_MAX_S", 0.1)


@pytest.fixture
async def running(api: WorkloadApi, place: Path) -> AsyncIterator[Running]:
    """An agent h0 without a tracker."""
    settings = AgentSettings(
        (), "h0", f"127.0.0.1:{free_port()}", place / "store", spiffe=SpiffeSettings.parse(api.address)
    )
    made = Running(settings)
    await made.start()
    yield made
    await made.stop()


class Peer:
    """Another host, with an SVID of its own."""

    def __init__(self, path: Path, domain: TrustDomain, host: str = "h1") -> None:
        self.api = WorkloadApi(path, domain.svid(f"agent/{host}")).start()
        self.identity = WorkloadIdentity(SpiffeSettings.parse(self.api.address), host)

    async def __aenter__(self) -> Peer:
        self.tls = await self.identity.enter()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.identity.close()
        await asyncio.to_thread(self.api.stop)

    async def connect(self, running: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = running.settings.address.rpartition(":")
        self.tls.client.check_hostname = False  # the host in its SPIFFE ID counts
        return await asyncio.open_connection(host, int(port), ssl=self.tls.client, server_hostname="h0")

    async def shown(self, running: Running) -> bytes:
        """The certificate of an agent that answers."""
        reader, writer = await self.connect(running)
        await asked(reader, writer)
        certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return certificate

    async def refused(self, running: Running) -> bool:
        """Whether no connection comes to an answer."""
        try:
            await self.shown(running)
        except (OSError, EOFError):
            return True
        return False


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: agent\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"200 OK" in head
    await reader.readexactly(int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]))


async def test_an_svid_is_exchanged_under_a_listener_that_goes_on(
    running: Running, api: WorkloadApi, domain: TrustDomain, place: Path
) -> None:
    async with Peer(place / "peer.sock", domain) as peer:
        reader, writer = await peer.connect(running)
        await asked(reader, writer)
        renewed = domain.svid("agent/h0")
        assert await peer.shown(running) == api._response.svids[0].x509_svid
        api.give(renewed)
        for _ in range(6000):
            if (shown := await peer.shown(running)) == renewed.x509_svid:
                break
            await asyncio.sleep(0.01)
        assert shown == renewed.x509_svid
        await asked(reader, writer)  # the connection of before the exchange
        writer.close()
    assert not list((place / "store" / "identity").rglob("*.pem")), "keys are on no disk"


async def test_an_authority_that_left_the_domain_counts_no_more(
    running: Running, api: WorkloadApi, domain: TrustDomain, place: Path
) -> None:
    async with Peer(place / "peer.sock", domain) as former:
        assert not await former.refused(running)
        domain.rotate()
        api.give(domain.svid("agent/h0"))
        async with Peer(place / "newer.sock", domain, "h2") as newer:
            for _ in range(6000):
                if not await newer.refused(running):
                    break
                await asyncio.sleep(0.01)
            assert not await newer.refused(running)
            assert await former.refused(running)


async def test_without_access_control_too_a_certificate_must_name_the_host_of_the_plan(
    running: Running, domain: TrustDomain, place: Path
) -> None:
    """SVIDs name no addresses."""
    assert not running.agent.access.peers.on
    async with Peer(place / "peer.sock", domain) as peer:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0, ssl=ServerContext(peer.tls))
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

        def connect(host: str) -> None:
            plain = socket.create_connection(parse_address(address))
            with contextlib.closing(plain):
                secure(plain, Source(host, address), running.agent.tls, lambda _: None, timeout_s=60).close()

        async with server:
            await asyncio.to_thread(connect, "h1")
            with pytest.raises(Unreachable, match="a certificate of h1"):
                await asyncio.to_thread(connect, "h2")


async def test_a_peer_of_another_trust_domain_is_refused(running: Running, api: WorkloadApi, place: Path) -> None:
    """Also where the two domains are federated."""
    other = TrustDomain("other")
    before = api._response.svids[0]
    der = other.svid("x").bundle
    api.give(before, federated={"other": der})
    async with Peer(place / "peer.sock", other) as peer:
        assert await peer.refused(running)


@pytest.mark.parametrize(
    ("path", "dns", "trust_domain", "told"),
    [
        ("agent/h0", (), "prod", "another trust domain than prod"),
        ("agent/h7", (), "", "names the host 'h7', not 'h0'"),
        ("ns/x/sa/y", (), "", "names the host '', not 'h0'"),
        ("ns/x/sa/y", ("h7",), "", "names the host 'h7', not 'h0'"),
        ("agent/h7", ("h0",), "", "names the host 'h7', not 'h0'"),
    ],
)
async def test_an_svid_that_is_not_for_this_host_is_refused(
    place: Path, domain: TrustDomain, path: str, dns: tuple[str, ...], trust_domain: str, told: str
) -> None:
    api = WorkloadApi(place / "api.sock", domain.svid(path, *dns)).start()
    try:
        with pytest.raises(Refused, match=told) as caught:
            await WorkloadIdentity(SpiffeSettings.parse(api.address, trust_domain), "h0").enter()
        assert "/agent/h0" in (caught.value.remedy or "")
    finally:
        api.stop()


async def test_of_several_svids_the_one_of_this_host_counts(place: Path, domain: TrustDomain) -> None:
    svids = [TrustDomain("other").svid("agent/h0"), domain.svid("agent/h7"), domain.svid("ns/x/sa/y", "h0")]
    api = WorkloadApi(place / "api.sock", *svids).start()
    try:
        identity = WorkloadIdentity(SpiffeSettings.parse(api.address, "test"), "h0")
        await identity.enter()
        assert identity._svid is not None and identity._svid.id == "spiffe://test/ns/x/sa/y"
        assert "PRIVATE" not in repr(identity._svid)
        identity.close()
    finally:
        api.stop()


async def test_an_svid_of_another_domain_does_not_replace_the_one_in_use(
    running: Running, api: WorkloadApi, domain: TrustDomain, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Peer(place / "peer.sock", domain) as peer:
        before = await peer.shown(running)
        for wrong, told in (
            (TrustDomain("other").svid("agent/h0"), "another trust domain than test"),
            (domain.svid("agent/h1"), "names the host 'h1'"),
            (domain.svid("agent/h0", lasts_s=-5.0), "has ended"),
        ):
            caplog.clear()
            api.give(wrong)
            await until(lambda told=told: told in caplog.text)
            assert await peer.shown(running) == before


async def test_without_an_api_the_agent_does_not_start(place: Path) -> None:
    with pytest.raises(Unavailable, match="no Workload API at") as caught:
        await WorkloadIdentity(SpiffeSettings.parse(f"unix://{place}/none.sock"), "h0").enter()
    assert "--spiffe" in (caught.value.remedy or "")


async def test_a_process_that_the_api_does_not_know_does_not_start(place: Path) -> None:
    api = WorkloadApi(place / "api.sock").start()
    try:
        with pytest.raises(Unavailable, match="no identity issued") as caught:
            await WorkloadIdentity(SpiffeSettings.parse(api.address), "h0").enter()
        assert "an entry" in (caught.value.remedy or "")
    finally:
        api.stop()


async def test_the_last_svid_stays_while_the_api_is_away(
    running: Running,
    api: WorkloadApi,
    domain: TrustDomain,
    place: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await until(lambda: api.streams == 2)  # the first answer, and the stream

    def told(what: str) -> int:
        return sum(what in record.getMessage() for record in caplog.records)

    attempts: list[float] = []
    client = WorkloadIdentity._client
    monkeypatch.setattr(WorkloadIdentity, "_client", lambda self: attempts.append(time.time()) or client(self))
    async with Peer(place / "peer.sock", domain) as peer:
        before = await peer.shown(running)
        await asyncio.to_thread(api.stop)
        await until(lambda: told("is away, and spiffe://test/agent/h0 stays in use until") == 1)
        count = len(attempts)
        await until(lambda: len(attempts) > count + 3)
        assert told("is away") == 1, "it is said once"
        assert await peer.shown(running) == before
        with monkeypatch.context() as later:
            later.setattr(module, "expires_at", lambda pem: time.time() - 1.0)
            await until(lambda: told("is away, and spiffe://test/agent/h0 ended at") == 1)
        renewed = domain.svid("agent/h0")
        api.give(renewed)
        api.start()
        for _ in range(6000):
            if (shown := await peer.shown(running)) == renewed.x509_svid:
                break
            await asyncio.sleep(0.02)
        assert shown == renewed.x509_svid


async def test_an_svid_that_ends_on_a_silent_stream_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, running: Running, api: WorkloadApi
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    monkeypatch.setattr(module, "expires_at", lambda pem: time.time() - 1.0)
    api.give(TrustDomain("other").svid("agent/h0"))  # wakes the agent, which waits for longer
    await until(lambda: "spiffe://test/agent/h0 has ended, and the Workload API at" in caplog.text)


def test_the_address_of_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIFFE_ENDPOINT_SOCKET", "unix:/run/a.sock")
    assert SpiffeSettings.parse("").socket == "unix:///run/a.sock"
    assert SpiffeSettings.parse("/run/b.sock").path == "/run/b.sock"
    with pytest.raises(UsageError, match="no address"):
        SpiffeSettings.parse("tcp://127.0.0.1:8000")
    monkeypatch.delenv("SPIFFE_ENDPOINT_SOCKET")
    with pytest.raises(UsageError, match="SPIFFE_ENDPOINT_SOCKET, which is not set"):
        SpiffeSettings.parse("")


def test_a_name_under_another_trust_domain_is_no_host(tmp_path: Path) -> None:
    """Also with a DNS name, which counts for certificates without an SPIFFE ID."""

    def named(*names: tuple[str, str]) -> str:
        issuer = ((("organizationName", "SPIRE"),),)
        return peers.host_in({"subjectAltName": names, "issuer": issuer})

    def clock() -> float:
        return 0.0

    peers = Peers(tmp_path, "h0", trust_domain="test", required=False, secured=True, clock=clock, alone=lambda: False)
    assert named(("URI", "spiffe://test/agent/h1")) == "h1"
    assert named(("URI", "spiffe://test/ns/x"), ("DNS", "h1")) == "h1"
    assert named(("DNS", "h1")) == "h1"
    assert named(("URI", "spiffe://other/agent/h1"), ("DNS", "h1")) == ""
    assert named(("URI", "spiffe://test.other/agent/h1"), ("DNS", "h1")) == ""


@pytest.mark.slow
async def test_hosts_with_svids_and_hosts_that_joined_feed_each_other(
    tmp_path: Path, place: Path, domain: TrustDomain
) -> None:
    async with access_site(tmp_path) as site:
        tracker = site.tracker
        tracker.others = domain.pem
        await tracker.stop()
        await tracker.start()
        further = place / "tracker.pem"
        further.write_bytes(tracker.authorities[0].pem)
        apis = [WorkloadApi(place / f"{name}.sock", domain.svid(f"agent/{name}")).start() for name in ("h0", "h2")]
        try:
            first, other = [SpiffeSettings.parse(api.address, further=further) for api in apis]
            digest = await site.publish(DATA)
            seed = await site.agent("h0", spiffe=first, join_file=None)
            await until(lambda: seed.agent.access.peers.on)
            assert (await site.pull(seed, digest)).state == "done"
            await until(lambda: "h0" in tracker._whole.get(digest, []))
            joined = await site.agent("h1")
            assert (await site.pull(joined, digest)).bytes_peers == len(DATA)
            tracker._whole[digest] = ["h1"]
            late = await site.agent("h2", spiffe=other, join_file=None)
            async with asyncio.timeout(120):
                assert (await site.pull(late, digest)).bytes_peers == len(DATA)
        finally:
            for api in apis:
                await asyncio.to_thread(api.stop)
