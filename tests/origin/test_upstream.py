"""Images of upstream registries: a real one with and without token authentication, and one that
behaves badly."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from image_rig import Made, Odd, docker_config, make_image, make_index, odd_registry, push_image
from registry_rig import PASSWORD, USER, Realm, Registry, needs_registry, running_registry
from waits import LIMIT_S, LoopClock, until
from yarl import URL

from p2pdist.agent.images.credentials import upstream_lets
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, NotFound, Refused, Unavailable, UsageError
from p2pdist.model.image import image_name
from p2pdist.model.image_manifest import INDEX_TYPE, ImageIndex, ImageManifest, decode_image
from p2pdist.model.platform import parse_platform
from p2pdist.model.upstream import UpstreamSettings, parse_upstream
from p2pdist.origin.registry.accounts import Account, Fixed, docker_accounts
from p2pdist.origin.registry.addresses import AllowedAddresses, kind_of
from p2pdist.origin.registry.authentication import Authentication, PullToken
from p2pdist.origin.registry.client import RegistryClient, redirect_target
from p2pdist.origin.registry.upstream import UpstreamRegistry

LAYER = {"bin/hello": b"#!/bin/sh\necho hello\n", "data": bytes(range(256)) * 400}
Opens = Callable[..., UpstreamRegistry]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("guarded"), Realm()) as running:
        yield running


@pytest.fixture
async def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Opens]:
    """Opens registries by address, without credentials of this machine."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    registries: list[UpstreamRegistry] = []

    def start(address: str, **more: Any) -> UpstreamRegistry:
        settings = parse_upstream(address)
        source = more.pop("source", None)
        settings = UpstreamSettings(settings.name, settings.url, **more)
        registries.append(UpstreamRegistry(settings, source=source))
        return registries[-1]

    yield start
    for registry in registries:
        await registry.close()


@pytest.fixture
async def odd() -> AsyncIterator[Odd]:
    async with odd_registry() as running:
        yield running


def login(tmp_path: Path, text: str) -> None:
    (tmp_path / "docker").mkdir(exist_ok=True)
    (tmp_path / "docker" / "config.json").write_text(text)


# -- a real registry


@needs_registry
@pytest.mark.parametrize("docker", [False, True])
async def test_an_image_is_read_as_it_was_pushed(registry: Registry, opened: Opens, docker: bool) -> None:
    images = {
        architecture: make_image(LAYER, {"more": b"m"}, docker=docker, architecture=architecture)
        for architecture in ("amd64", "arm64")
    }
    index = make_index(images, docker=docker)
    name = f"read/{'docker' if docker else 'oci'}"
    push_image(registry, name, "v1", *images.values(), index)
    repository = opened(registry.address).repository(name)
    found = await repository.manifest("v1")
    assert found is not None and (found.data, found.media_type, found.digest) == (
        index.data,
        index.media_type,
        index.digest,
    )
    assert await repository.manifest("v1", known=index.digest) is None
    assert await repository.head("v1") == (index.digest, len(index.data), index.media_type)
    document = decode_image(found.data, found.media_type)
    assert isinstance(document, ImageIndex)
    chosen = document.choose(parse_platform("linux/arm64")[0])
    manifest = await repository.manifest(chosen.digest)
    assert manifest is not None and manifest.data == images["arm64"].data
    parts = decode_image(manifest.data, manifest.media_type)
    assert isinstance(parts, ImageManifest) and not parts.foreign
    assert {blob.digest for blob in parts.blobs} == set(images["arm64"].blobs)
    for blob in parts.blobs:
        data = images["arm64"].blobs[blob.digest]
        assert await repository.blob_size(blob.digest) == blob.size == len(data)
        assert await repository.read_range(blob.digest, 0, blob.size) == data
        assert await repository.read_range(blob.digest, 1, 3) == data[1:4]
    assert repository.ranges


@needs_registry
async def test_what_is_not_there_is_said_to_be_so(registry: Registry, opened: Opens) -> None:
    image, absent = make_image(LAYER), digest_of(b"absent")
    push_image(registry, "absent/app", "v1", image)
    upstream = opened(registry.address)
    for name in ("absent/app", "absent/other"):
        repository = upstream.repository(name)
        for attempt in (repository.manifest("v2"), repository.manifest(absent), repository.read_range(absent, 0, 1)):
            with pytest.raises(NotFound):
                await attempt
        assert await repository.head("v2") is None
        assert await repository.blob_size(absent) is None
    with pytest.raises(NotFound):
        await upstream.repository("absent/other").tags()
    with pytest.raises(Corrupt):
        await upstream.repository("absent/app").read_range(next(iter(image.blobs)), 0, 1 << 20)


@needs_registry
async def test_tags_come_in_pages(registry: Registry, opened: Opens) -> None:
    image = make_image(LAYER)
    for tag in ("a", "b", "c", "d", "e"):
        push_image(registry, "pages/app", tag, image)
    repository = opened(registry.address).repository("pages/app")
    page = await repository.tags()
    assert (page.names, page.more) == (("a", "b", "c", "d", "e"), False)
    page = await repository.tags(2)
    assert (page.names, page.more) == (("a", "b"), True)
    page = await repository.tags(2, "b")
    assert (page.names, page.more) == (("c", "d"), True)
    page = await repository.tags(2, "d")
    assert (page.names, page.more) == (("e",), False)
    assert (await repository.tags(0)).names == ()


@needs_registry
async def test_referrers_are_found_under_the_tag_of_the_specification(registry: Registry, opened: Opens) -> None:
    image = make_image(LAYER)
    push_image(registry, "refer/app", "v1", image)
    repository = opened(registry.address).repository("refer/app")
    none = await repository.referrers(image.digest)
    assert json.loads(none.data)["manifests"] == [] and none.media_type == INDEX_TYPE
    signature = make_image({"signature": b"s"}, subject={"digest": image.digest})
    entries = [
        {
            "mediaType": signature.media_type,
            "digest": signature.digest,
            "size": len(signature.data),
            "artifactType": kind,
        }
        for kind in ("application/x-one", "application/x-two")
    ]
    data = json.dumps({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries}).encode()
    push_image(registry, "refer/app", image.digest.replace(":", "-"), signature, Made(data, INDEX_TYPE, {}))
    assert json.loads((await repository.referrers(image.digest)).data)["manifests"] == entries
    filtered = await repository.referrers(image.digest, "application/x-two")
    assert json.loads(filtered.data)["manifests"] == entries[1:]


# -- credentials


@needs_registry
async def test_a_private_image_needs_an_account_and_a_public_one_none(
    guarded: Registry, opened: Opens, tmp_path: Path
) -> None:
    image = make_image(LAYER)
    for name in ("private/app", "public/app"):
        push_image(guarded, name, "v1", image)
    with pytest.raises(Refused, match="docker login"):
        await opened(guarded.address).repository("private/app").manifest("v1")
    assert await opened(guarded.address).repository("public/app").manifest("v1") is not None
    login(tmp_path, docker_config(guarded))
    assert await opened(guarded.address).repository("private/app").manifest("v1") is not None
    file = tmp_path / "other.json"
    file.write_text(docker_config(guarded, password="wrong"))
    with pytest.raises(Refused) as caught:
        await opened(guarded.address, credentials=str(file)).repository("private/app").manifest("v1")
    assert "wrong" not in str(caught.value)


async def test_a_login_that_is_renewed_counts_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "config.json"

    def write(text: str) -> None:
        file.with_suffix(".new").write_text(text)
        file.with_suffix(".new").replace(file)

    def login_as(password: str) -> str:
        auth = base64.b64encode(f"user:{password}".encode()).decode()
        return json.dumps({"auths": {"quay.io": {"auth": auth}}})

    write(login_as("first"))
    accounts = docker_accounts("quay.io", file)
    assert await accounts.account() == Account("user", "first")
    write(login_as("second"))
    assert await accounts.account() == Account("user", "second")
    write("{")
    assert await accounts.account() == Account("user", "second")
    file.unlink()
    assert await accounts.account() == Account("user", "second")
    write('{"auths": {}}')
    assert await accounts.account() is None
    for text in (
        "{",
        "[]",
        '{"auths": 5}',
        '{"auths": {"quay.io": {"auth": "%"}}}',
        '{"auths": {"quay.io": {"user": 1}}}',
    ):
        write(text)
        with pytest.raises(UsageError):
            docker_accounts("quay.io", file)
    with pytest.raises(UsageError):
        docker_accounts("quay.io", tmp_path / "absent")


@needs_registry
@pytest.mark.parametrize("form", ["credHelpers", "credsStore"])
async def test_credential_helpers_are_asked(
    guarded: Registry, opened: Opens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    image = make_image(LAYER)
    push_image(guarded, "private/helped", "v1", image)
    program, asked = tmp_path / "docker-credential-of-test", tmp_path / "asked"
    answer = json.dumps({"Username": USER, "Secret": PASSWORD})
    program.write_text(f"#!/bin/sh\ncat >> {asked}\nprintf '%s' '{answer}'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    login(tmp_path, json.dumps({form: {guarded.address: "of-test"} if form == "credHelpers" else "of-test"}))
    repository = opened(guarded.address).repository("private/helped")
    for _ in range(3):
        assert await repository.manifest("v1") is not None
    assert asked.read_text() == guarded.address
    program.unlink()
    with pytest.raises(UsageError, match="docker-credential-of-test"):
        await opened(guarded.address).repository("private/helped").manifest("v1")


async def test_a_helper_is_named_and_not_a_path(opened: Opens, tmp_path: Path) -> None:
    login(tmp_path, json.dumps({"credsStore": "../../bin/sh"}))
    with pytest.raises(UsageError):
        opened("127.0.0.1:1")


@needs_registry
async def test_a_token_of_the_tracker_lets_a_host_without_an_account_read(
    guarded: Registry, opened: Opens, tmp_path: Path
) -> None:
    """The account stays where it is: the token is for one repository, and for reading."""
    image = make_image(LAYER)
    for name in ("private/one", "private/two"):
        push_image(guarded, name, "v1", image)
    file = tmp_path / "account.json"
    file.write_text(docker_config(guarded))
    tracker = opened(guarded.address, credentials=str(file))
    token = await tracker.pull_token("private/one")
    assert token.token and 0 < token.lasts_s <= 300 and PASSWORD not in token.token

    async def source(scope: str) -> PullToken | None:
        return token

    host = opened(guarded.address, source=source)
    digest = next(iter(image.blobs))
    assert await host.repository("private/one").read_range(digest, 0, 10) == image.blobs[digest][:10]
    with pytest.raises(Refused):
        await host.repository("private/two").read_range(digest, 0, 10)


async def test_what_would_give_the_account_away_is_not_passed_on(odd: Odd, opened: Opens, tmp_path: Path) -> None:
    """A registry that takes an account alone, and a realm whose token is the account."""
    auth = base64.b64encode(b"user:secret-word").decode()
    login(tmp_path, json.dumps({"auths": {odd.address: {"auth": auth}}}))
    challenge = "Basic realm=x"

    async def guarded(request: web.Request) -> web.StreamResponse:
        if "Authorization" not in request.headers:
            return web.Response(status=401, headers={"WWW-Authenticate": challenge})
        return web.json_response({"tags": ["v1"]})

    given = ""

    async def realm(request: web.Request) -> web.StreamResponse:
        return web.json_response({"token": given})

    odd.answers |= {"tags/list": guarded, "realm": realm}
    with pytest.raises(Refused, match="not passed on"):
        await opened(odd.address).pull_token("team/app")
    challenge = f'Bearer realm="http://{odd.address}/realm",service="x"'
    for token in (base64.b64encode(b"secret-word").decode(), "x.secret-word.y", auth):
        given = token
        with pytest.raises(Refused, match="not passed on"):
            await opened(odd.address).pull_token("team/app")
    given = "harmless"
    assert (await opened(odd.address).pull_token("team/app")).token == given


async def test_many_requests_fetch_one_token(odd: Odd, opened: Opens) -> None:
    odd.put("team/app", "v1", image := make_image(LAYER))
    asked = 0

    async def realm(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.05)
        return web.json_response({"access_token": "good", "expires_in": 300})

    async def guarded(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer good":
            challenge = f'Bearer realm="http://{odd.address}/realm", service=x, Basic realm="y"'
            return web.Response(status=401, headers={"WWW-Authenticate": challenge})
        return await odd._blob(request, image.blobs[digest])

    digest = next(iter(image.blobs))
    odd.answers |= {"realm": realm, digest: guarded}
    repository = opened(odd.address).repository("team/app")
    await asyncio.gather(*(repository.read_range(digest, number, 1) for number in range(20)))
    assert asked == 1


# -- registries that behave badly


def document(body: bytes, kind: str = "application/vnd.oci.image.manifest.v1+json", **headers: str) -> Any:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, headers={"Content-Type": kind, **headers})

    return answer


async def test_a_manifest_that_is_not_what_it_is_called_is_corrupt(odd: Odd, opened: Opens) -> None:
    image, other = make_image(LAYER), make_image({"x": b"y"})
    repository = opened(odd.address).repository("team/app")
    odd.answers[image.digest] = document(other.data)
    with pytest.raises(Corrupt):
        await repository.manifest(image.digest)
    odd.answers["v1"] = document(other.data, **{"Docker-Content-Digest": image.digest})
    with pytest.raises(Corrupt):
        await repository.manifest("v1")


AMBIGUOUS = json.dumps(
    {"schemaVersion": 2, "config": {"digest": "x", "size": 1}, "layers": [], "manifests": []}
).encode()
PLAIN = make_image(LAYER)
BAD_DOCUMENTS = {
    "no JSON": (b"<html>", "application/vnd.oci.image.manifest.v1+json"),
    "empty": (b"", "application/vnd.oci.image.manifest.v1+json"),
    "both at once": (AMBIGUOUS, "application/vnd.oci.image.manifest.v1+json"),
    "called an index": (PLAIN.data, INDEX_TYPE),
    "deep": (b'{"a":' * 100_000, "application/json"),
    "too large": (b" " * ((4 << 20) + 1), "application/vnd.oci.image.manifest.v1+json"),
    "encoded": (PLAIN.data, "application/vnd.oci.image.manifest.v1+json"),
    "negative size": (PLAIN.data.replace(b'"size": ', b'"size": -'), "application/json"),
    "huge size": (PLAIN.data.replace(b'"size": ', b'"size": 9' + b"0" * 15), "application/json"),
    "no config": (b'{"schemaVersion":2,"layers":[]}', "application/json"),
}


@pytest.mark.parametrize("kind", BAD_DOCUMENTS)
async def test_documents_that_are_no_manifests_are_refused(odd: Odd, opened: Opens, kind: str) -> None:
    body, media_type = BAD_DOCUMENTS[kind]
    odd.answers["v1"] = document(body, media_type, **({"Content-Encoding": "gzip"} if kind == "encoded" else {}))
    with pytest.raises(Corrupt):
        await opened(odd.address).repository("team/app").manifest("v1")


async def test_schema_1_is_refused_in_words(odd: Odd, opened: Opens) -> None:
    odd.answers["v1"] = document(b'{"schemaVersion":1,"fsLayers":[],"history":[]}')
    with pytest.raises(Refused, match="schema 1"):
        await opened(odd.address).repository("team/app").manifest("v1")


async def test_media_types_that_are_none_are_found_in_the_document(odd: Odd, opened: Opens) -> None:
    image = make_image(LAYER, docker=True)
    odd.answers["v1"] = document(image.data, "text/plain; charset=utf-8")
    repository = opened(odd.address).repository("team/app")
    found = await repository.manifest("v1")
    assert found is not None and found.media_type == image.media_type
    assert await repository.head("v1") == (image.digest, len(image.data), image.media_type)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/../b",
        "a//b",
        "/a",
        "a/",
        "A/b",
        "a%2Fb",
        "a?b",
        "a#b",
        "a\nb",
        "a b",
        "",
        ".",
        "a" * 300,
        "a/b:c",
        "ä",
    ],
)
async def test_names_that_could_leave_the_path_are_refused(odd: Odd, opened: Opens, name: str) -> None:
    with pytest.raises(UsageError):
        opened(odd.address).repository(name)
    repository = opened(odd.address).repository("team/app")
    for target in (f"{name}/x", f"..{name}/", "sha256:../" + "a" * 61):
        for attempt in (repository.manifest(target), repository.head(target)):
            with pytest.raises(UsageError):
                await attempt
    assert odd.requests == []


async def test_redirects_that_storage_would_not_send_are_not_followed(odd: Odd, opened: Opens) -> None:
    digest, target = digest_of(b"x"), ""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": target} if target else {})

    odd.answers[digest] = answer
    repository = opened(odd.address).repository("team/app")
    for location in (
        "",
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "http://[::1",
        "http://u:p@127.0.0.1/x",
        f"/v2/team/app/blobs/{digest}",
        "//",
        "http:///x",
    ):
        target, before = location, len(odd.requests)
        with pytest.raises((Refused, NotFound)):
            await repository.read_range(digest, 0, 1)
        assert len(odd.requests) - before <= 6


def test_a_registry_elsewhere_cannot_send_this_machine_to_its_own_services() -> None:
    client = RegistryClient("r", URL("https://registry.example.org"), Fixed(None))
    at = URL("https://registry.example.org/v2/x")
    assert (
        redirect_target(client.url, client.base, at, "https://storage.example.org/a?b=%2F").host
        == "storage.example.org"
    )
    for inner in (
        "https://127.0.0.1/",
        "https://localhost/",
        "https://[::1]/",
        "https://169.254.169.254/latest",
        "https://2852039166/latest",
        "https://0xa9fea9fe/latest",
        "https://169.254.43518/latest",
        "https://[::ffff:169.254.169.254]/latest",
        "https://[::ffff:127.0.0.1]/",
        "https://[fd00:ec2::254]/latest",
        "https://metadata.google.internal/x",
        "https://127.1/",
        "https://localhost./",
        "https://LOCALHOST/",
        "https://a.localhost/",
        "https://0/",
        "http://a.b/",
    ):
        with pytest.raises(Refused):
            redirect_target(client.url, client.base, at, inner)


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("8.8.8.8", "public"),
        ("2001:4860:4860::8888", "public"),
        ("10.1.2.3", "private"),
        ("192.168.0.1", "private"),
        ("100.64.0.1", "private"),
        ("fd12::1", "private"),
        ("::ffff:10.1.2.3", "private"),
        ("64:ff9b::a00:1", "private"),
        ("2002:a00:1::", "private"),
        ("169.254.169.254", "link"),
        ("64:ff9b::a9fe:a9fe", "link"),
        ("fe80::1", "link"),
        ("127.0.0.2", "machine"),
        ("0.0.0.0", "machine"),
        ("::1", "machine"),
    ],
)
def test_addresses_are_public_or_of_some_network(address: str, kind: str) -> None:
    assert kind_of(ipaddress.ip_address(address)) == kind


@pytest.mark.parametrize(
    ("home", "listed", "may", "may_not"),
    [
        ((), (), ("8.8.8.8",), ("10.0.0.1", "127.0.0.1", "169.254.1.1", "100.100.100.200")),
        (("8.8.8.8",), (), ("9.9.9.9",), ("10.0.0.1", "127.0.0.1")),
        (("10.0.0.9",), (), ("10.1.0.1", "192.168.1.1"), ("127.0.0.1", "169.254.169.254", "fd00:ec2::254")),
        (("10.0.0.9", "8.8.8.8"), (), ("9.9.9.9",), ("10.1.0.1",)),
        (("127.0.0.1",), (), ("127.0.0.1", "::1"), ("10.0.0.1",)),
        ((), ("10.1.0.0/16", "storage.internal"), ("10.1.9.9",), ("10.2.0.1",)),
        ((), ("169.254.169.254/32",), ("169.254.169.254",), ("169.254.1.1",)),
    ],
)
def test_a_registry_sends_its_readers_where_it_is_or_is_listed(
    home: tuple[str, ...], listed: tuple[str, ...], may: tuple[str, ...], may_not: tuple[str, ...]
) -> None:
    allowed = AllowedAddresses("r", "registry.example.org", listed=listed)
    for address in home:
        allowed.note_home(address)
    for address in may:
        allowed.require("a.b", address)
        allowed.require_literal(address)
    for address in may_not:
        with pytest.raises(Refused, match="redirects"):
            allowed.require("a.b", address)
        if listed and "internal" in listed[-1]:
            allowed.require("storage.internal", address)


async def test_what_a_name_means_is_looked_at_when_it_is_connected_to(odd: Odd) -> None:
    """A name looks like any other, and means an address of this machine."""
    port = odd.address.rpartition(":")[2]
    elsewhere = URL(f"http://localhost:{port}/v2/")
    for base, redirects, asked in (
        ("http://registry.example.org", (), 0),
        ("http://registry.example.org", ("10.0.0.0/8",), 0),
        ("http://registry.example.org", ("localhost",), 1),
        ("http://registry.example.org", ("127.0.0.0/8", "::1/128"), 1),
        (f"http://{odd.address}", (), 1),
    ):
        client, before = RegistryClient("r", URL(base), Fixed(None), redirects=redirects), len(odd.requests)
        try:
            for url in (elsewhere, URL(f"http://127.0.0.1:{int(port)}/other")):
                if redirects == ("localhost",) and url != elsewhere:
                    continue
                if asked:
                    (await client._send("GET", url, {}, None)).release()
                    continue
                with pytest.raises(Refused, match="of this machine or network"):
                    await client._send("GET", url, {}, None)
                with pytest.raises(Refused):
                    await client._ask_realm(url, {}, "", None)
        finally:
            await client.close()
        assert len(odd.requests) - before == (1 if redirects == ("localhost",) else 2) * asked


@pytest.mark.parametrize(
    "realm",
    [
        "https://127.0.0.1/t",
        "https://169.254.169.254/t",
        "https://[::1]/t",
        "http://a.b/t",
        "https://u:p@a.b/t",
        "https://",
        "/t",
        "https://[",
    ],
)
async def test_a_realm_that_cannot_be_trusted_gets_nothing(realm: str) -> None:
    async def fetch(*asked: object) -> tuple[int, bytes]:
        raise AssertionError("it is not asked")

    known = Fixed(Account("user", "secret-word"))
    authentication = Authentication("r", URL("https://registry.example.org"), known, fetch)
    with pytest.raises(Refused) as caught:
        await authentication.answer([f'Bearer realm="{realm}",service="s"'], "repository:a/b:pull", "")
    assert "secret-word" not in str(caught.value)


@pytest.mark.parametrize(
    ("stated", "asked"),
    [
        ("repository:library/debian:pull", "repository:library/debian:pull"),
        ("repository:other/secret:pull", "repository:debian:pull"),
        ("repository:library/debian:pull,push,delete", "repository:library/debian:pull"),
        ("registry:catalog:*", "repository:debian:pull"),
        ("", "repository:debian:pull"),
    ],
)
async def test_a_token_is_asked_for_what_is_read_and_nothing_more(stated: str, asked: str) -> None:
    scopes = []

    async def fetch(realm: URL, query: dict[str, str], *more: object) -> tuple[int, bytes]:
        scopes.append(query["scope"])
        return 200, b'{"token": "t", "expires_in": "nonsense"}'

    authentication = Authentication("r", URL("https://registry.example.org"), Fixed(None), fetch)
    challenge = f'Bearer realm="https://a.b/t",scope="{stated}"'
    assert await authentication.answer([challenge], "repository:debian:pull", "") == "Bearer t"
    assert scopes == [asked]


@pytest.mark.parametrize("lasts", ["1e999", "NaN", "-1", "0", "9" * 400, "-" + "9" * 400, "null", "[]"])
async def test_a_token_lasts_a_time_that_can_be(lasts: str) -> None:
    async def fetch(*asked: object) -> tuple[int, bytes]:
        return 200, f'{{"token": "t", "expires_in": {lasts}}}'.encode()

    authentication = Authentication("r", URL("https://registry.example.org"), Fixed(None), fetch)
    assert await authentication.answer(['Bearer realm="https://a.b/t"'], "repository:debian:pull", "") == "Bearer t"
    assert 0 < (await authentication.token("repository:debian:pull")).lasts_s <= 86400


async def test_a_list_at_storage_does_not_draw_the_token_there(odd: Odd, opened: Opens) -> None:
    """A registry sends a list of tags on to storage, which names a next page of its own."""
    other = odd.address.replace("127.0.0.1", "localhost")
    seen: list[str | None] = []

    async def tags(request: web.Request) -> web.StreamResponse:
        if "Authorization" not in request.headers:
            challenge = f'Bearer realm="http://{odd.address}/realm"'
            return web.Response(status=401, headers={"WWW-Authenticate": challenge})
        return web.Response(status=307, headers={"Location": f"http://{other}/stored"})

    async def stored(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        link = f"<http://{other}/v2/stored>; rel=next"
        return web.json_response({"tags": ["v1"]}, headers={"Link": link})

    async def realm(request: web.Request) -> web.StreamResponse:
        return web.json_response({"token": "t"})

    odd.answers |= {"tags/list": tags, "stored": stored, "realm": realm}
    with pytest.raises(Refused):
        await opened(odd.address).repository("team/app").tags()
    assert seen == [None]
    client = RegistryClient("r", URL(f"http://{odd.address}"), Fixed(None))
    scope = "repository:team/app:pull"
    async with client.request("GET", "/v2/team/app/tags/list", scope):
        pass
    async with client.request("GET", f"http://{other}/stored", scope):
        pass
    await client.close()
    assert seen == [None] * 3


async def test_accounts_of_netrc_are_shown_to_no_registry(
    odd: Odd, opened: Opens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client of the mirror may read is asked with its own credential alone."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login admin password secret-word\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    seen: list[str | None] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="r"'})

    odd.answers["manifests/v1"] = answer
    assert not await upstream_lets(
        parse_upstream(odd.address), image_name(odd.address, "team/app"), "manifests/v1", user="u", secret="wrong"
    )
    assert seen == [None, Account("u", "wrong").basic()]


@pytest.mark.parametrize("asks", [True, False])
async def test_a_credential_counts_where_the_registry_asks_for_one(odd: Odd, asks: bool) -> None:
    """A registry that is open to the hosts of a fleet has not looked at it."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if asks and "Authorization" not in request.headers:
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="r"'})
        return web.Response(headers={"Content-Type": INDEX_TYPE})

    odd.answers["manifests/v1"] = answer
    name = image_name(odd.address, "team/app")
    assert await upstream_lets(parse_upstream(odd.address), name, "manifests/v1", user="u", secret="any") is asks


@pytest.mark.parametrize("allowed", [True, False])
async def test_a_credential_counts_for_a_blob_whose_storage_takes_gets_alone(odd: Odd, allowed: bool) -> None:
    """Addresses of storage are signed for one method. What the registry refuses stays refused."""
    digest = digest_of(blob := b"content of the blob")

    async def storage(request: web.Request) -> web.StreamResponse:
        return web.Response(status=403) if request.method == "HEAD" else await odd._blob(request, blob)

    async def redirects(request: web.Request) -> web.StreamResponse:
        if "Authorization" not in request.headers:
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="r"'})
        if not allowed:
            return web.Response(status=403)
        other = odd.address.replace("127.0.0.1", "localhost")
        return web.Response(status=307, headers={"Location": f"http://{other}/storage"})

    odd.answers |= {"storage": storage, digest: redirects}
    name = image_name(odd.address, "team/app")
    path = f"blobs/{digest}"
    assert await upstream_lets(parse_upstream(odd.address), name, path, user="u", secret="any") is allowed
    assert odd.bytes_sent <= 1


async def test_storage_behind_a_redirect_gets_no_token(odd: Odd, opened: Opens) -> None:
    seen: list[str | None] = []
    digest = digest_of(blob := b"content of the blob")

    async def storage(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        return await odd._blob(request, blob)

    async def redirects(request: web.Request) -> web.StreamResponse:
        if "Authorization" not in request.headers:
            challenge = f'Bearer realm="http://{odd.address}/realm"'
            return web.Response(status=401, headers={"WWW-Authenticate": challenge})
        other = odd.address.replace("127.0.0.1", "localhost")
        return web.Response(status=307, headers={"Location": f"http://{other}/storage"})

    async def realm(request: web.Request) -> web.StreamResponse:
        return web.json_response({"token": "t"})

    odd.answers |= {"storage": storage, digest: redirects, "realm": realm}
    assert await opened(odd.address).repository("team/app").read_range(digest, 0, 7) == blob[:7]
    assert seen == [None]


async def test_a_busy_registry_says_for_how_long(odd: Odd, opened: Opens) -> None:
    async def busy(request: web.Request) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": "77"})

    odd.answers["v1"] = busy
    with pytest.raises(Unavailable) as caught:
        await opened(odd.address).repository("team/app").manifest("v1")
    assert caught.value.details["retry_after"] == 77
    assert odd.count("GET", "v1") == 1

    async def says_nothing(request: web.Request) -> web.StreamResponse:
        return web.Response(status=429)

    odd.answers["v1"] = says_nothing
    with pytest.raises(Unavailable) as caught:
        await opened(odd.address).repository("team/app").manifest("v1")
    assert caught.value.details["retry_after"] > 0


async def test_errors_and_hangs_are_unavailable(odd: Odd, opened: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pdist.origin.registry.upstream.DOCUMENT_TIMEOUT_S", 0.3)
    monkeypatch.setattr("p2pdist.origin.registry.upstream.RANGE_TIMEOUT_S", 0.3)

    async def broken(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500)

    async def hangs(request: web.Request) -> web.StreamResponse:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        return web.Response()

    async def trickles(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=206, headers={"Content-Range": "bytes 0-99/100"})
        await response.prepare(request)
        with suppress(ConnectionError, asyncio.CancelledError):
            for _ in range(300):
                await response.write(b"x")
                await asyncio.sleep(0.1)
        return response

    digest, other = digest_of(b"hangs"), digest_of(b"trickles")
    odd.answers |= {"v1": broken, "v2": hangs, digest: hangs, other: trickles}
    repository = opened(odd.address).repository("team/app")
    attempts: list[Callable[[], Awaitable[object]]] = [
        lambda: repository.manifest("v1"),
        lambda: repository.manifest("v2"),
        lambda: repository.read_range(digest, 0, 10),
        lambda: repository.read_range(other, 0, 100),
        lambda: repository.blob_size(digest),
    ]
    for attempt in attempts:
        with pytest.raises(Unavailable):
            await attempt()
    with pytest.raises(Unavailable):
        await opened("127.0.0.1:1").repository("team/app").manifest("v1")


async def test_what_breaks_off_in_the_middle_is_unavailable(odd: Odd, opened: Opens) -> None:
    """Also the first range of all, of which a failure of another kind ended the pull; and a
    manifest, which was called damaged."""

    async def broken(request: web.Request) -> web.StreamResponse:
        ranged = {"Content-Range": "bytes 0-99/100"} if "Range" in request.headers else {}
        response = web.StreamResponse(status=206 if ranged else 200, headers={"Content-Length": "100", **ranged})
        await response.prepare(request)
        await response.write(b"x" * 50)
        assert request.transport is not None
        request.transport.close()
        return response

    digest = digest_of(b"x")
    odd.answers |= {digest: broken, "v1": broken}
    repository = opened(odd.address).repository("team/app")
    for attempt in (repository.read_range(digest, 0, 100), repository.manifest("v1")):
        with pytest.raises(Unavailable, match="broke the connection"):
            await attempt


async def test_ranges_that_were_not_asked_for_are_corrupt(odd: Odd, opened: Opens) -> None:
    digest, stated = digest_of(b"x"), ""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=206, body=b"0123456789", headers={"Content-Range": stated})

    odd.answers[digest] = answer
    repository = opened(odd.address).repository("team/app")
    for wrong in (
        "",
        "bytes 0-9/100",
        "bytes 20-29/100",
        "bytes 10-99/100",
        "bytes 10-9/100",
        "items 10-19/100",
        "bytes */100",
    ):
        stated = wrong
        with pytest.raises(Corrupt):
            await repository.read_range(digest, 10, 10)
    stated = "bytes 10-19/*"
    assert await repository.read_range(digest, 10, 10) == b"0123456789"
    with pytest.raises(Corrupt):
        await repository.read_range(digest, 10, 5)


async def test_a_registry_without_ranges_sends_a_blob_once_to_all_readers(odd: Odd, opened: Opens) -> None:
    blob = b"".join(number.to_bytes(4, "big") for number in range(1 << 19))
    odd.blobs[digest := digest_of(blob)] = blob
    odd.ranges = False
    repository = opened(odd.address).repository("team/app")
    step = 1 << 16
    starts = iter(range(0, len(blob), step))
    found: dict[int, bytes] = {}

    async def read_some() -> None:
        for start in starts:
            found[start] = await repository.read_range(digest, start, step)

    await asyncio.gather(*(read_some() for _ in range(4)))
    assert b"".join(found[start] for start in sorted(found)) == blob
    assert repository.ranges is False
    assert odd.count("GET", "blobs") == 1
    assert await repository.read_range(digest, 5, 10) == blob[5:15]
    with pytest.raises(Corrupt):
        await repository.read_range(digest, len(blob) - 5, 10)


async def test_a_response_that_is_whole_waits_for_readers_that_keep_to_a_limit(
    odd: Odd, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host with a small share of the origin asked for a piece in more than five seconds, and had
    the blob begin again for each. Once all has come the response waits shortly."""
    monkeypatch.setattr("p2pdist.origin.registry.whole_read.IDLE_S", 0.05)
    blob = b"".join(number.to_bytes(4, "big") for number in range(1 << 20))
    odd.blobs[digest := digest_of(blob)] = blob
    odd.ranges = False
    registry = opened(odd.address)
    repository, half = registry.repository("team/app"), len(blob) // 2
    assert await repository.read_range(digest, 0, 100) == blob[:100]
    await until(lambda: registry._parked)
    assert await repository.read_range(digest, half, 100) == blob[half : half + 100]
    assert odd.count("GET", "blobs") == 1
    assert await repository.read_range(digest, len(blob) - 100, 100) == blob[-100:]
    await until(lambda: not registry._whole)


async def test_few_responses_that_are_whole_wait_for_long(
    odd: Odd, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps one of few connections. A host that had read its stripes of many blobs could read
    nothing else for a minute."""
    monkeypatch.setattr("p2pdist.origin.registry.whole_read.IDLE_S", 0.05)
    monkeypatch.setattr("p2pdist.origin.registry.whole_read.PART_IDLE_S", 10 * LIMIT_S)
    monkeypatch.setattr("p2pdist.origin.registry.whole_read.PARKED_MAX", 2)
    odd.ranges = False
    registry = opened(odd.address)
    repository = registry.repository("team/app")
    for number in range(4):
        blob = bytes([number]) * (8 << 20)
        odd.blobs[digest := digest_of(blob)] = blob
        assert await repository.read_range(digest, 0, 100) == blob[:100]
    await until(lambda: len(registry._whole) == len(registry._parked))
    assert len(registry._parked) == 2


async def test_a_response_that_is_whole_begins_again_where_the_server_did_not_wait(
    odd: Odd, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers and proxies end a connection from which a client reads nothing for some time."""
    monkeypatch.setattr("p2pdist.origin.registry.whole_read.IDLE_S", 0.05)
    blob, left = os.urandom(3 << 20), asyncio.Event()

    async def impatient(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = len(blob)
        await response.prepare(request)
        await response.write(blob[: 1 << 20])
        await left.wait()
        if odd.count("GET", "blobs") > 1:
            await response.write(blob[1 << 20 :])
        elif request.transport is not None:
            request.transport.close()
        return response

    odd.answers[digest := digest_of(blob)] = impatient
    registry = opened(odd.address)
    repository = registry.repository("team/app")
    assert await repository.read_range(digest, 0, 100) == blob[:100]
    await until(lambda: registry._parked)
    left.set()
    assert await repository.read_range(digest, 2 << 20, 100) == blob[2 << 20 : (2 << 20) + 100]
    assert odd.count("GET", "blobs") == 2


async def test_a_response_of_no_stated_length_that_has_come_waits_shortly(
    odd: Odd, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pdist.origin.registry.whole_read.IDLE_S", 2 * LIMIT_S)
    monkeypatch.setattr("p2pdist.origin.registry.whole_read.PART_IDLE_S", 4 * LIMIT_S)
    blob = os.urandom(1 << 20)

    async def chunked(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(blob)
        return response

    odd.answers[digest := digest_of(blob)] = chunked
    registry, clock = opened(odd.address), LoopClock(monkeypatch)
    assert await registry.repository("team/app").read_range(digest, len(blob) - 100, 100) == blob[-100:]
    response = registry._whole[digest]._response
    assert response is not None
    await until(response.content.at_eof)
    clock.put_forward(3 * LIMIT_S)
    await until(lambda: registry._parked or not registry._whole)
    assert not registry._parked


async def test_the_reader_that_finds_no_ranges_does_not_keep_others_from_what_has_come(odd: Odd, opened: Opens) -> None:
    """Else the response passes what they want, and has to begin again for them."""
    blob, served = os.urandom(3 << 20), asyncio.Event()

    async def halting(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = len(blob)
        await response.prepare(request)
        await response.write(blob[: 1 << 20])
        await served.wait()
        await response.write(blob[1 << 20 :])
        return response

    odd.answers[digest := digest_of(blob)] = halting
    repository = opened(odd.address).repository("team/app")
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        far = group.create_task(repository.read_range(digest, 2 << 20, 10))
        near = group.create_task(repository.read_range(digest, 1000, 10))
        assert await near == blob[1000:1010]
        served.set()
        assert await far == blob[2 << 20 : (2 << 20) + 10]


async def test_readers_of_one_blob_for_two_images_share_a_response_that_is_whole(odd: Odd, opened: Opens) -> None:
    """Both find out at one moment that the registry ignores ranges."""
    blob = os.urandom(3 << 20)
    odd.blobs[digest := digest_of(blob)] = blob
    odd.ranges, registry = False, opened(odd.address)
    images = [registry.repository(name) for name in ("team/app", "team/other")]
    parts = await asyncio.gather(*(image.read_range(digest, 1000, 5000) for image in images))
    assert parts == [blob[1000:6000]] * 2
    assert [await image.read_range(digest, 2 << 20, 10) for image in images] == [blob[2 << 20 : (2 << 20) + 10]] * 2


async def test_a_registry_that_ignored_a_range_once_is_asked_for_ranges_again(
    odd: Odd, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been a proxy on the way, or one machine of many."""
    blobs = {digest_of(blob): blob for blob in (os.urandom(1 << 20), os.urandom(1 << 20))}
    odd.blobs |= blobs
    odd.ranges, repository = False, opened(odd.address).repository("team/app")
    for digest, blob in blobs.items():
        assert await repository.read_range(digest, 5000, 10) == blob[5000:5010]
    assert repository.ranges is False and odd.count("GET", "blobs") == 2
    odd.ranges = True
    for digest, blob in blobs.items():  # responses that are under way go on
        assert await repository.read_range(digest, 7000, 10) == blob[7000:7010]
    assert repository.ranges is False and odd.count("GET", "blobs") == 2
    monkeypatch.setattr("p2pdist.origin.registry.upstream.RANGES_AGAIN_S", 0.0)
    for digest, blob in blobs.items():
        assert await repository.read_range(digest, 9000, 10) == blob[9000:9010]
    assert repository.ranges is True and odd.count("GET", "blobs") == 4


async def test_a_registry_without_ranges_that_stops_in_the_middle_is_said_to(
    odd: Odd, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pdist.origin.registry.client.READ_TIMEOUT_S", 0.3)
    digest, over = digest_of(b"stops"), asyncio.Event()

    async def stops(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = 100_000
        await response.prepare(request)
        await response.write(bytes(1000))
        await over.wait()
        return response

    odd.answers[digest] = stops
    with pytest.raises(Unavailable, match="broke off: no answer in time") as caught:
        await opened(odd.address).repository("team/app").read_range(digest, 0, 5000)
    assert caught.value.remedy
    over.set()


async def test_the_size_of_a_blob_is_found_where_head_is_not_allowed(odd: Odd, opened: Opens) -> None:
    """Storage behind a redirect may take signed GETs alone."""
    digest = digest_of(blob := bytes(5000))

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "HEAD":
            return web.Response(status=403)
        return await odd._blob(request, blob)

    odd.answers[digest] = answer
    assert await opened(odd.address).repository("team/app").blob_size(digest) == 5000


async def test_lists_have_limits_and_stay_at_the_registry(odd: Odd, opened: Opens) -> None:
    link = ""

    async def tags(request: web.Request) -> web.StreamResponse:
        return web.json_response({"tags": ["a", "b", "../c", 7, "d" * 200]}, headers={"Link": link} if link else {})

    odd.answers["tags/list"] = tags
    repository = opened(odd.address).repository("team/app")
    assert (await repository.tags()).names[:2] == ("a", "b")
    assert "../c" not in (await repository.tags()).names
    for following in (
        "<http://192.0.2.1/v2/x>; rel=next",
        "<https://example.org/v2/x>; rel=next",
        "</elsewhere>; rel=next",
    ):
        link = following
        with pytest.raises(Refused):
            await repository.tags()
    link = f"<http://{odd.address}/v2/team/app/tags/list>; rel=next"
    before = len(odd.requests)
    page = await repository.tags(50)  # the same page for ever
    assert len(page.names) <= 50 and len(odd.requests) - before <= 100
    for body in (b"[]", b'{"tags": 5}', b"{", b"7"):
        odd.answers["tags/list"] = document(body, "application/json")
        with pytest.raises(Corrupt):
            await repository.tags()
    for body in (b"[]", b'{"manifests": 5}', b'{"manifests": [5]}', b"{"):
        odd.answers[digest_of(b"s")] = document(body, INDEX_TYPE)
        with pytest.raises(Corrupt):
            await repository.referrers(digest_of(b"s"))


async def test_a_list_of_referrers_is_followed_page_by_page(odd: Odd, opened: Opens) -> None:
    subject = digest_of(b"subject")
    entries = [{"digest": digest_of(bytes([number])), "size": 1, "mediaType": "m"} for number in range(4)]

    async def answer(request: web.Request) -> web.StreamResponse:
        at = int(request.query.get("at", "0"))
        following = f'</v2/team/app/referrers/{subject}?at={at + 2}>; rel="next"'
        body = json.dumps({"schemaVersion": 2, "manifests": entries[at : at + 2]}).encode()
        return web.Response(body=body, headers={"Content-Type": INDEX_TYPE, **({"Link": following} if at < 2 else {})})

    odd.answers[subject] = answer
    found = await opened(odd.address).repository("team/app").referrers(subject)
    assert json.loads(found.data)["manifests"] == entries
    assert odd.count("GET", "referrers") == 2
