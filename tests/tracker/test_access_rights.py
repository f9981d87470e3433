"""What each kind of client reads and changes at a tracker with access control: the table of answers
follows from the right that each route names."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from access_rig import ACCESS, LOOK_S, SIZE, AccessSite, Agent, Session, access_site, ask
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from waits import until
from yarl import URL

from p2pdist.credentials.authority import TRACKER_DNS
from p2pdist.model.access import decode_ticket
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Conflict, NotFound, Refused
from p2pdist.model.fleet import EvictRequest
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Advance,
    Assign,
    Condition,
    Evict,
    Hello,
    Holding,
    Holdings,
    Reject,
    Report,
    Selected,
    Welcome,
    encode,
    instance_proof,
)
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.plan import Plan
from p2pdist.model.selection import selection_digest
from p2pdist.transfer.openapi import Route
from tracker.http.app import ROUTES, make_probe_app
from tracker.http.scheduler import PRESEED_ROUTES

TABLE = (*ROUTES, *PRESEED_ROUTES)
PIECE = 65536
LAYOUT = PieceLayout(SIZE, PIECE)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[AccessSite]:
    async with access_site(tmp_path) as found:
        yield found


async def test_an_operator_evicts_no_package_that_it_may_not_read(tmp_path: Path) -> None:
    """Hosts evict what a digest names, so it must be one of the name: whatever the request calls
    it, and whether or not the package exists."""
    role = '\n[role.team]\nmay = ["hosts"]\nread = ["team-a/*"]\n'
    async with access_site(tmp_path, ACCESS + role) as site:
        session = await (await site.join("h1")).session()
        await session.hear(Welcome)
        await session.say(Condition("1", 0, None, 0))
        await until(lambda: site.service.desk.conditions)
        ours = await site.stranger(site.token("team"))
        mine, theirs = site.manifests["team-a/x:v1"], site.manifests["team-b/y:v1"]
        for package, digest in (
            ("team-b/y:v1", ""),
            ("team-a/x:v1", theirs),
            (f"team-a/x@{theirs}", ""),
            (f"team-a/x@{mine}", theirs),
            ("team-a/x:v1", "sha256:" + "ab" * 32),
        ):
            with pytest.raises(NotFound):
                await ask(ours, "POST", "/v1/evictions", EvictRequest(package, digest, everywhere=True, wait_s=0))
        assert site.service.desk._waiting == {}
        await ask(ours, "GET", "/v1/resolve?reference=team-a/x:v1")
        for package, digest in (("team-a/x:v1", ""), ("team-a/x:v1", mine), (f"team-a/x@{mine}", "")):
            await ask(ours, "POST", "/v1/evictions", EvictRequest(package, digest, everywhere=True, wait_s=0))
            heard = await session.hear(Evict)
            assert (heard.package, heard.digest) == (package, digest), "of those before it heard nothing"


def test_every_route_names_its_right() -> None:
    assert [route.path for route in TABLE if route.right is None] == []


def path_of(site: AccessSite, route: Route, name: str) -> str:
    """A request of a route that is about the package `name` and the host h1, where it names one."""
    blob = site.layers[name]
    path = route.described_path.replace("{digest}", blob).replace("{name}", "h1").replace("{id}", "order")
    path = path.replace("{reference}", name).replace("{upstream}", "registry.test").replace("{target}", "v1")
    repository = name.partition(":")[0]
    path = path.replace("{kind}", "models").replace(
        "{repository}", repository.replace("/", "%2F") if "/hub/" in path else repository
    )
    if any(query.name == "reference" for query in route.query):
        path += f"?reference={name}"
    return path


async def status(http: aiohttp.ClientSession, method: str, path: str, body: object = None) -> int:
    data = msgspec.json.encode(body) if body is not None else None
    async with http.request(method, path, data=data, server_hostname=TRACKER_DNS) as answer:
        return answer.status


FOR_TRACKERS = ("/v1/trackers/known", "/v1/trackers/pool", "/v1/trackers/view")
JUDGED_BY_HANDLER = ("/v1/policies", *FOR_TRACKERS)
"""Routes that say no themselves: it depends on the request, or on which tracker asks."""


async def test_a_scanner_finds_nothing_that_the_rights_do_not_give(site: AccessSite) -> None:
    agents = {name: await site.join(f"host-{name}", name) for name in ("default", "a")}
    roles = ("slurm", "other", "ops", "reader", "scraper")
    clients = {"stranger": await site.stranger()} | {role: await site.stranger(site.token(role)) for role in roles}
    clients |= {f"agent-{name}": agent.http for name, agent in agents.items()}
    rights = {role: site.control.state.rules.roles[role].rights for role in roles}
    rights |= {"stranger": frozenset({"open"})} | {
        f"agent-{name}": frozenset({"open", "agent", "read"}) for name in agents
    }
    await ask(clients["ops"], "PUT", "/v1/preseeds/order", {"package": "team-b/y:v1", "count": 1})
    bodies = {"/v1/preseeds": {"package": "team-b/y:v1", "count": 1}, "/v1/rank": {"packages": ["team-b/y:v1"]}}
    bodies["/v1/preseeds/{id}"] = bodies["/v1/preseeds"]
    for route, (client, http) in itertools.product(TABLE, clients.items()):
        if route.path in ("/v1/session", "/v1/events", "/v1/join") or (route.method == "DELETE" and client == "ops"):
            continue  # a scanner says no hello; join tokens have tests of their own
        got = await status(http, route.method, path_of(site, route, "team-b/y:v1"), bodies.get(route.path))
        allowed = any(right in rights[client] for right in (route.right, *route.also))
        where = f"{route.method} {route.path} as {client}: {got}"
        if not allowed:
            assert got == (401 if client == "stranger" else 403), where
        else:
            assert got not in (401, 403) or route.path in JUDGED_BY_HANDLER, where
        if route.path in FOR_TRACKERS:
            assert got == 403, f"{where}, and it is no tracker"
        about = "{digest}" in route.path or "reference" in route.path + str(route.query) or "/v1/preseeds" in route.path
        reads = client in ("agent-default", "ops", "other")
        listed = (route.method, route.path) == ("GET", "/v1/preseeds")
        if allowed and about and route.right != "watch" and not reads and route.path != "/v1/policies" and not listed:
            assert got == 404, where
    assert await ask(clients["slurm"], "GET", "/v1/preseeds") == b"[]"


def holding(blob: Digest, counts: tuple[int, ...] = (0,), **more: object) -> Holding:
    return Holding(blob, SIZE, PIECE, counts, **more)  # type: ignore[arg-type]


async def session_of(agent: Agent) -> Session:
    session = await agent.session()
    await session.hear(Welcome)
    return session


async def test_names_that_one_may_not_read_are_as_names_that_do_not_exist(site: AccessSite) -> None:
    agent = await site.join("h1", "a")
    mine, theirs, nothing = "team-a/x:v1", "team-b/y:v1", "team-b/none:v1"
    assert len(await ask(agent.http, "GET", f"/v1/packages?reference={mine}")) > 100
    problems = []
    for name in (theirs, nothing):
        for path in ("/v1/packages", "/v1/resolve", "/v1/policies"):
            with pytest.raises(NotFound) as failure:
                await ask(agent.http, "GET", f"{path}?reference={name}")
            problems.append(failure.value.what.replace(name, "NAME"))
    assert len(set(problems)) == 1
    everything = await site.join("h2")
    await ask(everything.http, "GET", f"/v1/packages?reference={theirs}")
    shared = set(site.documents[mine])
    for digest in (site.manifests[theirs], site.layers[theirs], *set(site.documents[theirs]) - shared):
        for path in (f"/v1/content/{digest}", f"/v1/layers/{digest}", f"/v1/content/{digest}?as=manifest"):
            with pytest.raises(NotFound):
                await ask(agent.http, "GET", path)
    for digest in (site.manifests[mine], *site.documents[mine]):
        await ask(agent.http, "GET", f"/v1/content/{digest}")


async def test_a_digest_is_no_package_of_a_name_that_its_tags_do_not_have(site: AccessSite) -> None:
    """Else any manifest could be read under a name that one may read."""
    agent, everything = await site.join("h1", "a"), await site.join("h2")
    theirs = site.manifests["team-b/y:v1"]
    await ask(everything.http, "GET", f"/v1/packages?reference=team-a/z@{theirs}")
    for name in ("team-a/x", "team-a/z"):
        with pytest.raises(NotFound):
            await ask(agent.http, "GET", f"/v1/packages?reference={name}@{theirs}")
    told = set()
    for digest in (theirs, site.layers["team-b/y:v1"], digest_of(b"nothing has it")):
        with pytest.raises(NotFound) as failure:
            await ask(agent.http, "GET", f"/v1/resolve?reference=team-a/x@{digest}")
        told.add((failure.value.what.replace(digest, "DIGEST"), failure.value.remedy))
    assert len(told) == 1, "answers tell whether a digest exists"
    mine = f"team-a/x@{site.manifests['team-a/x:v1']}"
    with pytest.raises(NotFound):
        await ask(agent.http, "GET", f"/v1/packages?reference={mine}")  # no tag was asked for yet
    await ask(agent.http, "GET", "/v1/resolve?reference=team-a/x:v1")
    await ask(agent.http, "GET", f"/v1/packages?reference={mine}")


async def test_a_host_joins_the_swarms_of_what_it_may_read(site: AccessSite) -> None:
    everything, agent = await site.join("h2"), await site.join("h1", "a")
    for name in ("team-a/x:v1", "team-b/y:v1"):
        await ask(everything.http, "GET", f"/v1/packages?reference={name}")
    mine, theirs = site.layers["team-a/x:v1"], site.layers["team-b/y:v1"]
    unknown = digest_of(b"unknown")
    session, other = await session_of(agent), await session_of(everything)
    await session.say(Holdings((holding(theirs), holding(unknown), holding(mine))))
    rejected = {(await session.hear(Reject)).blob for _ in range(2)}
    assert rejected == {theirs, unknown}
    plan = await session.hear(Assign)
    assert plan.plan.blob == mine
    state = site.control.state
    ticket = decode_ticket(plan.ticket, lambda name, message, signature: name == state.signing[0].name)
    assert (ticket.blob, ticket.receiver, ticket.priority) == (mine, "join:a", "start")
    await other.say(holding(theirs, priority="preseed"))
    given = await other.hear(Assign)
    assert given.plan.blob == theirs and decode_ticket(given.ticket, lambda *_: True).priority == "preseed"
    # A ticket that another host lets it have opens no swarm of what it may not read.
    await session.say(holding(theirs, ticket=given.ticket))
    assert (await session.hear(Reject)).blob == theirs
    assert set(site.service.fleet.swarms[theirs].members) == {"h2"}


async def test_a_ticket_shows_a_tracker_that_has_just_started_what_a_host_may(tmp_path: Path) -> None:
    async with access_site(tmp_path) as site:
        agent = await site.join("h1", "a")
        await ask(agent.http, "GET", "/v1/packages?reference=team-a/x:v1")
        session = await session_of(agent)
        await session.say(holding(site.layers["team-a/x:v1"]))
        ticket = (await session.hear(Assign)).ticket
    async with access_site(tmp_path) as site:
        agent = await site.join("h1", "a")
        session = await session_of(agent)
        mine, theirs = site.layers["team-a/x:v1"], site.layers["team-b/y:v1"]
        for blob, shown in ((mine, ""), (theirs, ticket), (mine, ticket[:-6] + "AAAAAA"), (mine, "x")):
            await session.say(holding(blob, ticket=shown))
            assert (await session.hear(Reject)).blob == blob
        await session.say(holding(mine, ticket=ticket))
        assert (await session.hear(Assign)).plan.blob == mine


async def test_a_ticket_is_of_use_to_hosts_of_its_join_token_alone(tmp_path: Path) -> None:
    """Hosts show tickets to each other, and a parent may read less than its child."""
    async with access_site(tmp_path) as site:
        everything = await site.join("h2")
        session = await session_of(everything)
        theirs = site.layers["team-b/y:v1"]
        await session.say(holding(theirs))
        ticket = (await session.hear(Assign)).ticket
    assert decode_ticket(ticket, lambda *_: True).receiver == "join:default"
    async with access_site(tmp_path) as site:  # it knows no packages yet
        agent, again = await site.join("h1", "a"), await site.join("h3")
        session, other = await session_of(agent), await session_of(again)
        await session.say(holding(theirs, ticket=ticket))
        assert (await session.hear(Reject)).blob == theirs
        await other.say(holding(theirs, ticket=ticket))
        assert (await other.hear(Assign)).plan.blob == theirs


async def test_a_host_whose_join_token_reads_less_now_gets_no_more_tickets(tmp_path: Path) -> None:
    access = ACCESS.replace('[join.default]\nread = ["*"]', '[join.default]\nread = ["team-b/*"]')
    async with access_site(tmp_path, access) as site:
        agent, everything = await site.join("h1"), site.token("ops")
        for name in ("team-a/x:v1", "team-b/y:v1"):
            await ask(await site.stranger(everything), "GET", f"/v1/resolve?reference={name}")
        blob, session = site.layers["team-b/y:v1"], await session_of(agent)
        await session.say(holding(blob))
        assert (await session.hear(Assign)).ticket
        changed = asyncio.Event()
        site.control.changed.append(changed.set)
        site.path.write_text(access.replace('["team-b/*"]\n\n[join.a]', '["team-a/*"]\n\n[join.a]'))
        async with asyncio.timeout(60):
            await changed.wait()
        number = site.service.fleet.hosts["h1"].session
        plan = site.service.access.with_ticket(number, "h1", Assign(Plan(blob, ())))
        assert plan.ticket == ""


async def test_a_whole_blob_of_no_known_package_is_served_and_not_received(site: AccessSite) -> None:
    """So the seeds of a restricted fleet outlive their tracker, and nobody reads more by it."""
    agent, everything = await site.join("h1", "a"), await site.join("h2")
    seed, other = await session_of(agent), await session_of(everything)
    for name in ("team-a/x:v1", "team-b/y:v1"):
        blob = site.layers[name]
        await seed.say(holding(blob, (LAYOUT.count,)))
        await other.say(holding(blob))
        plan = await other.hear(Assign)
        assert plan.plan.blob == blob and plan.plan.stripes[0].parent.host == "h1" and plan.ticket
        await other.say(holding(blob, (LAYOUT.count,)))
        await seed.say(Report((Advance(blob, (0,)),)))  # it says that it lost everything
        assert (await seed.hear(Assign)).ticket == ""
        await seed.say(holding(blob))
        assert (await seed.hear(Reject)).blob == blob
    for name in ("team-a/x:v1", "team-b/y:v1"):
        await ask(everything.http, "GET", f"/v1/packages?reference={name}")
    await seed.say(holding(site.layers["team-b/y:v1"], (LAYOUT.count,)))
    assert (await seed.hear(Reject)).blob == site.layers["team-b/y:v1"]
    await seed.say(holding(site.layers["team-a/x:v1"]))
    assert (await seed.hear(Assign)).ticket


async def test_a_host_that_is_revoked_while_its_name_is_disputed_gets_no_session(
    site: AccessSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracker.names.ANSWER_S", 20.0)
    agent, changed = await site.join("h1"), asyncio.Event()
    site.control.changed.append(changed.set)

    async def prove(request: web.Request) -> web.Response:
        """The host's new agent, which answers when the host has been revoked."""
        await asyncio.to_thread(site.control.directory.set_revoked, ["host:h1"])
        site.control.reload()
        await changed.wait()
        proof = instance_proof("new", "h1", request.query["nonce"])
        return web.json_response({"status": "ok", "host": "h1", "disk": "", "proof": proof})

    app = web.Application()
    app.router.add_get("/healthz", prove)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"127.0.0.1:{runner.addresses[0][1]}"
        first = await agent.session(address="127.0.0.1:9")
        await first.hear(Welcome)
        socket = await agent.http.ws_connect("/v1/session", server_hostname=TRACKER_DNS)
        await socket.send_str(encode(Hello(PROTOCOL_VERSION, "h1", address, "z1", instance="new")).decode())
        assert (await Session(socket).hear(Reject)).problem["status"] == 403
        await Session(socket).ended()
        await first.ended()
    finally:
        await runner.cleanup()


async def test_a_repeated_holding_gets_a_fresh_ticket(site: AccessSite, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, blob = await site.join("h1"), site.layers["team-a/x:v1"]
    session = await session_of(agent)
    await session.say(holding(blob))
    first = (await session.hear(Assign)).ticket
    later = decode_ticket(first, lambda *_: True).until - 100
    monkeypatch.setattr("tracker.access.sessions.time.time", lambda: later)
    await session.say(holding(blob, ticket=first))
    renewed = await session.hear(Assign)
    assert renewed.plan.blob == blob and renewed.plan.stripes == ()
    assert decode_ticket(renewed.ticket, lambda *_: True).until >= later + 300


async def test_a_selection_belongs_to_the_packages_of_its_pack(site: AccessSite) -> None:
    agent, everything = await site.join("h1", "a"), await site.join("h2")
    for name in ("team-a/x:v1", "team-b/y:v1"):
        await ask(everything.http, "GET", f"/v1/packages?reference={name}")
    mine, theirs, pieces = site.layers["team-a/x:v1"], site.layers["team-b/y:v1"], digest_of(b"pieces")
    session = await session_of(agent)
    good, bad = selection_digest(mine, pieces, b"\x80"), selection_digest(theirs, pieces, b"\x80")
    claims = ((bad, theirs), (bad, mine), (theirs, mine), (good, theirs))
    for blob, pack in claims:
        await session.say(holding(blob, selected=Selected(pack, pieces, b"\x80")))
        assert (await session.hear(Reject)).blob == blob
    await session.say(holding(good, selected=Selected(mine, pieces, b"\x80")))
    assert (await session.hear(Assign)).plan.blob == good


async def test_preseeds_have_owners(site: AccessSite) -> None:
    mine, theirs = await site.stranger(site.token("slurm", name="slurm")), await site.stranger(site.token("other"))
    ops = await site.stranger(site.token("ops"))
    order = {"package": "team-a/x:v1", "count": 1}
    created = msgspec.json.decode(await ask(mine, "PUT", "/v1/preseeds/job-1", order))
    assert created["owner"] == "token:slurm"
    for method, path in (("GET", "/v1/preseeds/job-1"), ("DELETE", "/v1/preseeds/job-1"), ("GET", "/v1/preseeds/x")):
        with pytest.raises(NotFound):
            await ask(theirs, method, path)
    assert msgspec.json.decode(await ask(theirs, "GET", "/v1/preseeds")) == []
    with pytest.raises(NotFound):
        await ask(theirs, "POST", "/v1/preseeds", order)
    with pytest.raises(NotFound):
        await ask(theirs, "POST", "/v1/rank", {"roles": [{"name": "r", "packages": ["team-a/x:v1"], "count": 1}]})
    with pytest.raises(Conflict):
        await ask(ops, "PUT", "/v1/preseeds/job-1", order)
    renewed = await site.stranger(site.token("slurm", name="slurm"))
    assert msgspec.json.decode(await ask(renewed, "PUT", "/v1/preseeds/job-1", order))["id"] == "job-1"
    assert [each["owner"] for each in msgspec.json.decode(await ask(ops, "GET", "/v1/preseeds"))] == ["token:slurm"]
    scraper = await site.stranger(site.token("scraper"))
    with pytest.raises(Refused):
        await ask(scraper, "DELETE", "/v1/preseeds/job-1")
    assert msgspec.json.decode(await ask(ops, "DELETE", "/v1/preseeds/job-1"))["state"] == "cancelled"
    await ask(mine, "DELETE", "/v1/preseeds/job-1")


async def test_the_id_of_anothers_preseed_is_free_to_those_who_do_not_see_it(site: AccessSite) -> None:
    """A conflict would tell that it exists; and an id could be taken from its job beforehand."""
    mine, theirs = await site.stranger(site.token("slurm", name="slurm")), await site.stranger(site.token("other"))
    ops = await site.stranger(site.token("ops"))
    await ask(theirs, "PUT", "/v1/preseeds/job-1", {"package": "team-b/y:v1", "count": 1})
    order = {"package": "team-a/x:v1", "count": 1}
    for method, path, body in (
        ("PUT", "/v1/preseeds/job-1", order),
        ("POST", "/v1/preseeds", {"id": "job-1", **order}),
    ):
        made = msgspec.json.decode(await ask(mine, method, path, body))
        assert (made["id"], made["owner"]) == ("job-1", "token:slurm") and made["package"].startswith("team-a/x@")
    for path in ("/v1/preseeds/job-1", "/v1/preseeds/job-1?brief=1"):
        found = msgspec.json.decode(await ask(mine, "GET", path))
        assert found["id"] == "job-1" and found["package"].startswith("team-a/x@")
    assert [each["id"] for each in msgspec.json.decode(await ask(mine, "GET", "/v1/preseeds"))] == ["job-1"]
    listed = {each["id"]: each["owner"] for each in msgspec.json.decode(await ask(ops, "GET", "/v1/preseeds"))}
    assert sorted(listed.values())[1] == "token:slurm" and len(listed) == 2 and "job-1" in listed
    with pytest.raises(Conflict):  # its own it may not order otherwise
        await ask(mine, "PUT", "/v1/preseeds/job-1", {"package": "team-a/x:v1", "count": 2})
    ended = msgspec.json.decode(await ask(mine, "DELETE", "/v1/preseeds/job-1"))
    assert (ended["id"], ended["state"]) == ("job-1", "cancelled")
    assert msgspec.json.decode(await ask(theirs, "GET", "/v1/preseeds/job-1"))["state"] != "cancelled"


async def test_an_identity_asks_in_its_own_zones_alone(site: AccessSite) -> None:
    agent, ops = await site.join("h1", "a"), await site.stranger(site.token("ops"))
    for path in ("/v1/packages", "/v1/policies"):
        for zone, allowed in (("z1", True), ("z2", True), ("", True), ("z3", False), ("z1 ", False)):
            url = URL(path).with_query(reference="team-a/x:v1", zone=zone)
            if allowed:
                await ask(agent.http, "GET", url)
            else:
                with pytest.raises(Refused):
                    await ask(agent.http, "GET", url)
        await ask(ops, "GET", f"{path}?reference=team-a/x:v1&zone=z3")


async def test_an_identity_asks_for_images_in_its_own_zones_alone(tmp_path: Path) -> None:
    roles = ACCESS.replace('[join.a]\nread = ["team-a/*"]', '[join.a]\nread = ["registry.example/*"]')
    async with access_site(tmp_path, roles) as site:
        agent, path = await site.join("h1", "a"), "/v1/images/registry.example/team%2Fapp/manifests/v1"
        for zone, failure in (("z1", NotFound), ("", NotFound), ("z3", Refused)):  # of an upstream that is not there
            with pytest.raises(failure):
                await ask(agent.http, "GET", URL(f"{path}?zone={zone}", encoded=True))


async def test_a_policy_is_told_of_a_digest_that_is_one_of_the_names_packages(site: AccessSite) -> None:
    """Policies go by tags, so what holds for a digest tells under which tags others have it."""
    agent, ops = await site.join("h1", "a"), await site.stranger(site.token("ops"))
    await ask(ops, "GET", "/v1/packages?reference=team-b/y:v1")
    theirs, mine = site.manifests["team-b/y:v1"], site.manifests["team-a/x:v1"]
    with pytest.raises(NotFound):
        await ask(agent.http, "GET", f"/v1/policies?reference=team-a/x@{theirs}")
    with pytest.raises(NotFound):
        await ask(agent.http, "GET", f"/v1/policies?reference=team-a/x@{digest_of(b'nothing')}")
    await ask(agent.http, "GET", "/v1/packages?reference=team-a/x:v1")
    await ask(agent.http, "GET", f"/v1/policies?reference=team-a/x@{mine}")


async def test_a_watcher_sees_the_swarms_of_what_it_may_read(tmp_path: Path) -> None:
    roles = ACCESS + '\n[role.watcher]\nmay = ["watch"]\nread = ["team-a/*"]\n'
    async with access_site(tmp_path, roles) as site:
        agent = await site.join("h1")
        for name in ("team-a/x:v1", "team-b/y:v1"):
            await ask(agent.http, "GET", f"/v1/packages?reference={name}")
        mine, theirs = site.layers["team-a/x:v1"], site.layers["team-b/y:v1"]
        session = await session_of(agent)
        await session.say(Holdings((holding(mine), holding(theirs))))
        plans = [await session.hear(Assign) for _ in range(2)]
        assert {plan.plan.blob for plan in plans} == {mine, theirs}
        watcher, ops = await site.stranger(site.token("watcher")), await site.stranger(site.token("ops"))
        for http, seen in ((watcher, {mine}), (ops, {mine, theirs})):
            listed = msgspec.json.decode(await ask(http, "GET", "/v1/swarms"))
            assert {row["digest"] for row in listed} == seen
            assert set(msgspec.json.decode(await ask(http, "GET", "/v1/hosts/h1"))["swarms"]) == seen
            async with http.get("/v1/events", server_hostname=TRACKER_DNS) as events:
                text = await events.content.readuntil(b"\n\n")
            assert (theirs.encode() in text) == (theirs in seen) and mine.encode() in text
        for path in (f"/v1/swarms/{theirs}", f"/v1/swarms/{theirs}/story", f"/v1/events?swarm={theirs}"):
            with pytest.raises(NotFound):
                await ask(watcher, "GET", path)
        await ask(watcher, "GET", f"/v1/swarms/{mine}/story")


async def test_a_preseed_lets_its_hosts_have_the_package_by_digest_after_a_restart(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with access_site(tmp_path, state=state) as site:
        scheduler = await site.stranger(site.token("slurm"))
        await ask(scheduler, "PUT", "/v1/preseeds/job-1", {"package": "team-a/x:v1", "count": 1})
    async with access_site(tmp_path, state=state) as site:
        agent = await site.join("h1", "a")
        await ask(agent.http, "GET", f"/v1/packages?reference=team-a/x@{site.manifests['team-a/x:v1']}")
        with pytest.raises(NotFound):
            await ask(agent.http, "GET", f"/v1/packages?reference=team-a/x@{site.manifests['team-b/y:v1']}")


async def test_watchers_and_strangers_are_told_no_names_that_they_may_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracker.http.pages.WATCHED_S", LOOK_S)
    roles = ACCESS + '\n[role.watcher]\nmay = ["watch"]\nread = ["team-a/*"]\n'
    async with access_site(tmp_path, roles) as site:
        ops = await site.stranger(site.token("ops"))
        await ask(ops, "PUT", "/v1/preseeds/job-1", {"package": "team-b/y:v1", "count": 1})
        site.service.fleet.policies.problem = "the policy 'team-b/y:*' is wrong"
        for role, told in (("ops", True), ("watcher", False)):
            http = await site.stranger(site.token(role))
            async with http.get("/v1/events", server_hostname=TRACKER_DNS) as events:
                text = b""
                for _ in range(4):
                    text += await events.content.readuntil(b"\n\n")
            assert (b"team-b" in text) == told and b"event: change" in text
            listed = msgspec.json.decode(await ask(http, "GET", "/v1/preseeds"))
            assert [summary["id"] for summary in listed] == (["job-1"] if told else [])
            for path in ("/healthz", "/v1/policies"):
                assert (b"team-b" in await ask(http, "GET", path)) == told
        assert b"team-b" not in await ask(await site.stranger(), "GET", "/healthz")
        assert b"team-b" in await ask(ops, "GET", "/healthz")
        async with TestClient(TestServer(make_probe_app(site.app))) as probe:
            for path in ("/healthz", "/readyz"):
                answer = await probe.get(path)
                assert answer.status == 200 and b"team-b" not in await answer.read()


async def test_bittorrent_is_for_public_packages(site: AccessSite) -> None:
    http, agent = await site.stranger(), await site.join("h1")
    for name in ("team-a/x:v1", "public/z:v1"):
        await ask(agent.http, "GET", f"/v1/packages?reference={name}")
    for path in (f"/v1/blobs/{site.layers['team-a/x:v1']}/torrent", "/v1/packages/team-a/x:v1/torrent"):
        for client in (http, agent.http):
            with pytest.raises(NotFound):
                await ask(client, "GET", path)
    with pytest.raises(NotFound):
        named = f"public/z@{site.manifests['team-a/x:v1']}"
        await ask(http, "GET", f"/v1/packages/{named}/torrent")
    for path in (f"/v1/blobs/{site.layers['public/z:v1']}/torrent", "/v1/packages/public/z:v1/torrent"):
        assert (await ask(http, "GET", path)).startswith(b"d8:announce")
    peer = "info_hash=" + "%01" * 20 + "&peer_id=" + "%02" * 20 + "&port=1&left=1"
    for kind, digest in (("blob", site.layers["team-a/x:v1"]), ("package", site.manifests["team-a/x:v1"])):
        assert b"failure reason" in await ask(http, "GET", f"/announce?{peer}&{kind}={digest}")
    public = site.layers["public/z:v1"]
    assert b"another torrent" in await ask(http, "GET", f"/announce?{peer}&blob={public}")
    link = msgspec.json.decode(await ask(http, "GET", f"/v1/blobs/{public}/torrent?format=magnet"))
    own = "%".join(["", *(link["info_hash_v1"][at : at + 2] for at in range(0, 40, 2))])
    announced = f"/announce?{peer.replace('%01' * 20, own)}&blob={public}"
    assert b"interval" in await ask(http, "GET", URL(announced, encoded=True))
    site.path.write_text(site.path.read_text().replace('public = ["public/*"]', "public = []"))
    while b"interval" in await ask(http, "GET", URL(announced, encoded=True)):
        await asyncio.sleep(0.05)


async def test_an_agent_asks_whether_it_is_reached_itself_alone(site: AccessSite) -> None:
    agent = await site.join("h1")
    sessions = [await session_of(agent), await session_of(await site.join("h2"))]
    await ask(agent.http, "GET", "/v1/hosts/h1/reachability")
    with pytest.raises(NotFound):
        await ask(agent.http, "GET", "/v1/hosts/h2/reachability")
    assert len(sessions) == site.service.sessions


async def test_without_access_every_request_may_do_everything_but_pages_of_other_sites() -> None:
    from test_sessions import serving

    async with serving() as found:
        async with found.http.get(f"{found.url}/v1/hosts") as answer:
            assert answer.status == 200
        async with found.http.get(f"{found.url}/v1/access/authorities") as answer:
            assert answer.status == 404
        async with found.http.post(f"{found.url}/v1/join", data=b"{}") as answer:
            assert answer.status == 404
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await found.http.ws_connect(f"{found.url}/v1/session", headers={"Origin": "http://evil.example"})
