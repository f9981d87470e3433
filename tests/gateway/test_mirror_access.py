"""Which images clients of a mirror may read while access is on: at the port on loopback and at the
one for the network, with a token of the fleet, a credential for the registry itself, or nothing."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from joined_rig import FLEET, AccessSite, Running, certificate_of, free_port, until
from late_modules import late_module
from mirror_rig import GivenImages, Image, Rig, make_layer, push_image
from registry_rig import PASSWORD, USER, Realm, Registry, needs_registry, running_registry

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.api.mirror import make_mirror_app
from p2pdist.agent.api.server import make_apps
from p2pdist.cli.daemon import listen
from p2pdist.credentials.signing import SigningKey
from p2pdist.credentials.tokens import create_token
from p2pdist.gateway.registry import admission as module
from p2pdist.gateway.registry.admission import Admission
from p2pdist.gateway.registry.credentials import Credential, parse_credential
from p2pdist.gateway.registry.names import RegistryRequest
from p2pdist.model.access import Patterns
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Unauthenticated, Unavailable
from p2pdist.model.image import image_name
from p2pdist.model.upstream import upstream_of
from p2pdist.transfer.openapi import INTERFACE

openapi = late_module("openapi_spec_validator")
pytestmark = needs_registry


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Registry]]:
    """A registry that everybody may read, for the agent's own reading, and one of the same files
    that asks for tokens, as which clients know it."""
    place = tmp_path_factory.mktemp("registry")
    with running_registry(place) as plain, running_registry(place, Realm()) as locked:
        yield plain.address, locked


@pytest.fixture(scope="module")
def registry(locked: tuple[str, Registry]) -> str:
    return locked[0]


@pytest.fixture
def realm(locked: tuple[str, Registry]) -> Realm:
    realm = locked[1].realm
    assert realm is not None
    realm.accounts.clear()
    return realm


@pytest.fixture(scope="module")
def images(registry: str) -> dict[str, Image]:
    names = ("open/app", "team/app", "other/app")
    return {name: push_image(registry, name, "v1", [make_layer(1000)]) for name in names}


class Fleet:
    """A joined agent with a mirror, in a fleet of which `open/*` is public, hosts' mirrors give
    `team/*` to any process, and the role `reader` may read `other/*`."""

    def __init__(self, site: AccessSite, running: Running, rig: Rig) -> None:
        self.site, self.running, self.rig = site, running, rig

    def token(self, role: str = "reader", *, lasts_s: float = 60.0, fleet: str = FLEET) -> str:
        key, pin = self.site.tracker.signing[0], self.site.tracker.token.pin
        return create_token(key, fleet, pin, role, now=time.time(), lasts_s=lasts_s)[0]


@pytest.fixture
async def fleet(
    tmp_path: Path, registry: str, locked: tuple[str, Registry], images: dict[str, Image]
) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        site = AccessSite(tmp_path, stack)
        stack.push_async_callback(site.origin.close)
        tracker = site.tracker
        tracker.public, tracker.local = (f"{registry}/open/*",), {"mirror": (f"{registry}/team/*",)}
        tracker.roles, tracker.reads = {"reader": ("metrics",)}, {"reader": (f"{registry}/other/*",)}
        await tracker.start()
        stack.push_async_callback(tracker.stop)
        running = await site.agent("h0")
        agent = running.agent
        given = GivenImages(agent, registry, f"http://{locked[1].address}")
        agent.images = given  # type: ignore[assignment]
        for image in images.values():
            given.data.update(image.blobs)
        port = free_port()
        runner = await listen(make_mirror_app(agent), ("127.0.0.1", port))
        stack.push_async_callback(runner.cleanup)
        await until(lambda: agent.access.peers.access)
        rig = Rig(agent, given, registry, f"http://127.0.0.1:{port}", f"https://{running.settings.address}")
        yield Fleet(site, running, rig)


@pytest.fixture
async def local(fleet: Fleet) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(fleet.rig.url) as session:
        yield session


async def status(http: aiohttp.ClientSession, rig: Rig, repository: str, given: str = "") -> int:
    headers = {"Authorization": given} if given else {}
    async with http.get(rig.path(repository, "manifests/v1"), headers=headers) as answer:
        return answer.status


async def test_a_local_client_reads_what_is_listed_for_it(local: aiohttp.ClientSession, fleet: Fleet) -> None:
    seen = [await status(local, fleet.rig, name) for name in ("open/app", "team/app", "other/app", "none/app")]
    assert seen == [200, 200, 401, 401]


@pytest.mark.parametrize("form", ["bearer", "basic", "jwt"])
async def test_a_token_of_the_fleet_reads_what_its_role_may(
    local: aiohttp.ClientSession, fleet: Fleet, form: str
) -> None:
    token = fleet.token()
    given = {"bearer": f"Bearer {token}", "basic": basic("p2pdist", token), "jwt": f"Bearer {token.split('.', 2)[2]}"}
    names = ("open/app", "other/app", "none/app")
    assert [await status(local, fleet.rig, name, given[form]) for name in names] == [200, 200, 404]


async def test_tokens_that_do_not_count_are_401(local: aiohttp.ClientSession, fleet: Fleet, realm: Realm) -> None:
    stranger = create_token(SigningKey.create(), FLEET, "ab" * 32, "reader", now=time.time(), lasts_s=60)[0]
    expired = create_token(
        fleet.site.tracker.signing[0], FLEET, "ab" * 32, "reader", now=time.time() - 3600, lasts_s=60
    )[0]
    for token in (stranger, expired, "p2pt1.x"):
        for given in (f"Bearer {token}", basic("me", token)):
            assert await status(local, fleet.rig, "other/app", given) in (400, 401)
    assert not realm.accounts, "a token of a fleet was shown to the registry"
    for given in ("Digest x", "Basic !", "Bearer " + "x" * 9000):
        assert await status(local, fleet.rig, "other/app", given) in (400, 401)


async def test_a_registry_client_gets_its_credential_as_a_token(local: aiohttp.ClientSession, fleet: Fleet) -> None:
    """As podman login and docker pull go about it: a challenge, a token of its realm, the image."""
    async with local.get("/v2/") as answer:
        assert answer.status == 401
        challenge = answer.headers["WWW-Authenticate"]
    assert f'realm="{fleet.rig.url}/v2/token"' in challenge and challenge.startswith("Bearer ")
    async with local.get("/v2/", headers={"Host": "mirror_1:7073"}) as answer:  # as compose files name containers
        assert 'realm="http://mirror_1:7073/v2/token"' in answer.headers["WWW-Authenticate"]
    for given, expected in (("", [200, 401]), (basic("me", fleet.token()), [200, 200])):
        headers = {"Authorization": given} if given else {}
        async with local.get("/v2/token?service=p2pdist&scope=repository:x:pull", headers=headers) as answer:
            assert answer.status == 200 and answer.headers["Cache-Control"] == "no-store"
            token = (await answer.json())["token"]
        bearer = f"Bearer {token}"
        async with local.get("/v2/", headers={"Authorization": bearer}) as answer:
            assert answer.status == 200
        names = ("open/app", "other/app")
        assert [await status(local, fleet.rig, name, bearer) for name in names] == expected
    async with local.get("/v2/token", headers={"Authorization": basic("me", "p2pt1.x")}) as answer:
        assert answer.status in (400, 401)


async def test_a_credential_for_the_registry_is_asked_about_once(
    local: aiohttp.ClientSession, fleet: Fleet, realm: Realm
) -> None:
    good, bad = basic(USER, PASSWORD), basic(USER, "wrong")
    for _ in range(3):
        assert await status(local, fleet.rig, "other/app", good) == 200
        assert await status(local, fleet.rig, "other/app", bad) == 404
    assert sorted(set(realm.accounts)) == sorted([good, bad])
    asked = len(realm.accounts)
    assert await status(local, fleet.rig, "none/app", good) == 404
    assert len(realm.accounts) > asked, "what counts for one repository was taken for another"
    async with local.get("/v2/token", headers={"Authorization": good}) as answer:
        carried = (await answer.json())["token"]
    assert await status(local, fleet.rig, "other/app", f"Bearer {carried}") == 200


async def test_a_token_of_the_registry_counts_for_what_it_is_for(
    local: aiohttp.ClientSession, fleet: Fleet, realm: Realm
) -> None:
    token = realm.token(["repository:other/app:pull"], True)
    assert await status(local, fleet.rig, "other/app", f"Bearer {token}") == 200
    other = realm.token(["repository:open/app:pull"], True)
    assert await status(local, fleet.rig, "other/app", f"Bearer {other}") == 404


async def test_what_the_registry_does_not_say_is_503(local: aiohttp.ClientSession, fleet: Fleet) -> None:
    rig = fleet.rig
    rig.images.upstreams = (upstream_of(rig.registry, f"http://127.0.0.1:{free_port()}"),)
    assert await status(local, rig, "other/app", basic("someone", "secret")) == 503


async def test_clients_of_the_network_read_public_images_and_by_tokens(fleet: Fleet) -> None:
    """The rule for mirrors is for the port on loopback alone; a host's certificate is no token."""
    tracker, rig = fleet.site.tracker, fleet.rig
    tls = certificate_of(tracker, fleet.site.directory / "other", "h9", join=tracker.token.id)
    context = tls.client
    context.check_hostname = False
    connector = aiohttp.TCPConnector(ssl=context)
    async with aiohttp.ClientSession(rig.public, connector=connector) as http:
        for given, expected in (("", [200, 404, 404]), (f"Bearer {fleet.token()}", [200, 404, 404])):
            names = ("open/app", "team/app", "other/app")
            assert [await status(http, rig, name, given) for name in names] == expected


async def test_a_client_of_the_network_tries_few_credentials_through_an_agent(
    local: aiohttp.ClientSession, fleet: Fleet, realm: Realm
) -> None:
    """One that is known to be good goes on to count, and processes of the host may try any."""
    rig, good = fleet.rig, basic(USER, PASSWORD)
    async with aiohttp.ClientSession(rig.public, connector=aiohttp.TCPConnector(ssl=False)) as http:
        assert await status(http, rig, "other/app", good) == 200
        for number in range(20):
            assert await status(http, rig, "other/app", basic(USER, f"wrong{number}")) == 404
        asked = len(realm.accounts)
        assert await status(http, rig, "other/app", basic(USER, "another")) == 503
        assert await status(http, rig, "open/app", basic(USER, "another")) == 200
        assert await status(http, rig, "other/app", good) == 200
        assert len(realm.accounts) == asked
    for number in range(21):
        assert await status(local, rig, "other/app", basic(USER, f"wrong{number}")) == 404
    assert await status(local, rig, "other/app", good) == 200


async def test_a_credential_counts_of_which_the_client_does_not_await_the_answer() -> None:
    """It could come back for the answer, which is kept."""
    answers, wrong, asked = asyncio.Event(), [], 0

    class Registry:
        async def lets(self, asked_for: RegistryRequest, credential: Credential) -> bool:
            nonlocal asked
            asked += 1
            await answers.wait()
            return False

    class Wrong:
        def full(self, request: Any) -> bool:
            return len(wrong) >= 2

        def add(self, request: Any) -> None:
            wrong.append(request)

    admission = Admission(lambda request: None, Registry(), lambda: 0.0, Wrong())  # type: ignore[arg-type, return-value]
    wanted, request = RegistryRequest("manifest", image_name("up.example", "a"), "v1"), cast(Any, "request")
    leaving = [
        asyncio.create_task(admission._upstream_lets(Credential("basic", f"wrong{number}", "a"), wanted, request))
        for number in (0, 0, 1)
    ]
    async with asyncio.timeout(60):
        while asked < 2:
            await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        answers.set()
        while admission._asking:
            await asyncio.sleep(0)
    assert wrong == ["request"] * 2, "each credential once"
    with pytest.raises(Unavailable, match="too many"):
        await admission._upstream_lets(Credential("basic", "wrong2", "a"), wanted, request)


async def test_blobs_are_judged_by_the_name_under_which_they_are_asked_for(
    local: aiohttp.ClientSession, fleet: Fleet, images: dict[str, Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A public name does not open the blobs of another image."""
    monkeypatch.setattr("p2pdist.gateway.registry.mirror.BEGIN_S", 60.0)
    secret = images["other/app"].layers[0]
    for path in (f"blobs/{secret}", f"manifests/{images['other/app'].digest}"):
        async with local.get(fleet.rig.path("open/app", path)) as answer:
            assert answer.status == 404
        async with local.get(fleet.rig.path("other/app", path)) as answer:
            assert answer.status == 401
    assert secret not in fleet.rig.images.fetched
    mine = images["open/app"].layers[0]
    fleet.rig.images.flowing = True
    async with local.get(fleet.rig.path("open/app", f"blobs/{mine}")) as answer:
        assert answer.status == 200 and digest_of(await answer.read()) == mine
    assert fleet.rig.images.confirmed.asked == [secret, mine], "a manifest may name blobs of other images"


async def test_every_route_names_its_right_and_is_described(tmp_path: Path) -> None:
    agent = Agent(AgentSettings((), "h1", "127.0.0.1:7071", tmp_path / "store"))
    try:
        for app in (make_mirror_app(agent), make_apps(agent)[0]):
            routes = [route for route in app[INTERFACE].routes if route.path.startswith("/v2")]
            assert {route.right for route in routes} == {"image"} and len(routes) == 3
            openapi.validate(app[INTERFACE].document)
        served = {route.resource.canonical for route in app.router.routes() if route.resource is not None}
        assert {route.described_path for route in routes} < served
    finally:
        await agent.stop()


# -- credentials by themselves


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Credential()),
        ("Bearer anonymous", Credential()),
        ("Basic Og==", Credential()),
        ("Bearer abc.def", Credential("bearer", "abc.def")),
        ("bearer  abc", Credential("bearer", "abc")),
        (basic("a", "b:c"), Credential("basic", "b:c", "a")),
        (f"Bearer {Credential('basic', 'b', 'a').carried}", Credential("basic", "b", "a")),
    ],
)
def test_credentials_are_read(text: str, expected: Credential) -> None:
    assert parse_credential(text) == expected
    if expected.kind != "none":
        assert parse_credential(expected.authorization) == expected
    assert parse_credential(f"Bearer {expected.carried}") == expected


@pytest.mark.parametrize("text", ["Digest a", "Basic", "Basic \xe4", "Bearer a b", "Bearer \x00", "Bearer basic.!"])
def test_other_credentials_are_refused(text: str) -> None:
    if text == "Basic":
        assert parse_credential(text) == Credential()
        return
    with pytest.raises(Unauthenticated) as failed:
        parse_credential(text)
    assert text[-3:] not in str(failed.value)


async def test_an_answer_of_a_registry_counts_for_a_while() -> None:
    """In virtual time: what it allows, longer than what it denies."""
    now, asked = 0.0, []

    class Registry:
        allows = True

        async def lets(self, wanted: RegistryRequest, credential: Credential) -> bool:
            asked.append(wanted)
            return self.allows

    registry = Registry()
    admission = Admission(lambda request: None, registry, lambda: now)  # type: ignore[arg-type, return-value]
    wanted = RegistryRequest("manifest", image_name("up.example", "a"), "v1")
    request: Any = None  # wrong credentials are not counted here
    for allows, lasts_s in ((True, module.ALLOWED_S), (False, module.DENIED_S)):
        registry.allows, now = allows, now + 10_000
        before = len(asked)
        assert await admission._upstream_lets(Credential("basic", "b", "a"), wanted, request) is allows
        now += lasts_s - 1
        assert await admission._upstream_lets(Credential("basic", "b", "a"), wanted, request) is allows
        assert len(asked) == before + 1
        now += 2
        await admission._upstream_lets(Credential("basic", "b", "a"), wanted, request)
        assert len(asked) == before + 2
    assert Patterns.parse(["up.example/*"], "x").match("up.example/a")
