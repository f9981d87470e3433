"""The descriptions of the HTTP interfaces of tracker and agent: they are valid, name all routes
that are served, and real answers are as described."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fleet_rig import BLOB, fleet_of, join_all
from jsonschema import Draft202012Validator
from late_modules import late_module

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.api.s3 import make_s3_app
from p2pdist.agent.api.server import make_apps
from p2pdist.agent.buckets.settings import S3Settings
from p2pdist.model.errors import NotFound, UsageError
from p2pdist.model.messages import Hello, Report, encode
from p2pdist.transfer.openapi import DOCUMENT_PATH, INTERFACE, Answer, Query, Route, serve
from tracker.content import Content
from tracker.core.policy.table import read_table
from tracker.http.app import make_app
from tracker.preseed_service import PreseedService
from tracker.service import Service
from tracker.state.preseeds import PreseedDatabase

openapi = late_module("openapi_spec_validator")
Document = dict[str, Any]
POLICIES: Document = {"policy": [{"match": "team/*", "readers": 4, "download": "5MB/s", "zones": ["z0"]}]}


def routes_served(app: web.Application) -> set[tuple[str, str]]:
    """Methods and paths of an application's router, where HEAD comes with GET."""
    routes = {
        (route.method.lower(), route.resource.canonical) for route in app.router.routes() if route.resource is not None
    }
    headed = {path for method, path in routes if method == "head"}
    assert headed == {path for method, path in routes if method == "get"}
    return {(method, path) for method, path in routes if method != "head"}


def routes_described(document: Document) -> set[tuple[str, str]]:
    return {(method, path) for path, operations in document["paths"].items() for method in operations}


def fits(document: Document, method: str, path: str, status: int, body: object) -> None:
    """Fails unless `body` is as the document describes it."""
    content = document["paths"][path][method]["responses"][str(status)]["content"]
    (schema,) = [media["schema"] for kind, media in content.items() if "json" in kind]
    validator = Draft202012Validator({"components": document["components"], **schema})
    assert [error.message for error in validator.iter_errors(body)] == []


@asynccontextmanager
async def listening(app: web.Application, directory: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of an application, over a Unix socket."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    path = str(directory / "socket")
    await web.UnixSite(runner, path).start()
    try:
        async with aiohttp.ClientSession("http://host", connector=aiohttp.UnixConnector(path)) as http:
            yield http
    finally:
        await runner.cleanup()


@pytest.fixture
async def tracker() -> AsyncIterator[web.Application]:
    """A tracker that takes preseeds, with a policy and hosts of which one has left."""
    hosts = fleet_of(4)
    join_all(hosts)
    hosts.complain("h1", "h0")
    hosts.close("h3")
    table, mistakes = read_table(POLICIES)
    assert not mistakes
    hosts.fleet.policies.replace(table)
    service = Service(hosts.fleet, Content(None))
    preseeds = PreseedService(service, PreseedDatabase(""))
    await preseeds.load()
    yield make_app(service, preseeds)
    await preseeds.stop()


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[tuple[web.Application, web.Application]]:
    agent = Agent(AgentSettings((), "h1", "127.0.0.1:7071", tmp_path / "store"))
    yield make_apps(agent)
    await agent.stop()


async def described(app: web.Application, tmp_path: Path) -> Any:
    async with listening(app, tmp_path) as http, http.get(DOCUMENT_PATH) as answer:
        assert answer.content_type == "application/json"
        return await answer.json()


@pytest.mark.slow
async def test_descriptions_are_valid(
    tracker: web.Application, agent: tuple[web.Application, web.Application], tmp_path: Path
) -> None:
    for app in (tracker, *agent):
        openapi.validate(await described(app, tmp_path))


async def test_descriptions_name_all_routes(
    tracker: web.Application, agent: tuple[web.Application, web.Application], tmp_path: Path
) -> None:
    for app in (tracker, *agent):
        document = await described(app, tmp_path)
        assert routes_described(document) == routes_served(app)
        for operations in document["paths"].values():
            assert all(operation["summary"] and len(operation["summary"]) < 100 for operation in operations.values())


async def test_the_description_of_the_s3_interface_is_valid(tmp_path: Path) -> None:
    agent = Agent(AgentSettings((), "h1", "127.0.0.1:7071", tmp_path / "store"))
    try:
        app = make_s3_app(agent, S3Settings())
        async with listening(app, tmp_path) as http, http.get(DOCUMENT_PATH) as answer:
            document = await answer.json()
        openapi.validate(document)
        assert routes_described(document) == routes_served(app)
        async with listening(app, tmp_path) as http, http.get("/none") as answer:
            assert (answer.status, answer.content_type) == (404, "application/xml")
    finally:
        await agent.stop()


async def test_a_tracker_without_preseeds_does_not_describe_them() -> None:
    app = make_app(Service(fleet_of(1).fleet, Content(None)))
    document = app[INTERFACE].document
    assert routes_described(document) == routes_served(app)
    assert "/v1/preseeds" not in document["paths"] and "/v1/swarms" in document["paths"]


async def test_answers_of_a_tracker_are_as_described(tracker: web.Application, tmp_path: Path) -> None:
    document = tracker[INTERFACE].document
    described = {
        "/healthz": "/healthz",
        "/v1/hosts": "/v1/hosts",
        "/v1/hosts/h0": "/v1/hosts/{name}",
        "/v1/swarms": "/v1/swarms",
        f"/v1/swarms/{BLOB}": "/v1/swarms/{digest}",
        f"/v1/swarms/{BLOB}/story": "/v1/swarms/{digest}/story",
        "/v1/policies": "/v1/policies",
        "/v1/policies?reference=team/a:1&zone=z0": "/v1/policies",
        "/v1/preseeds": "/v1/preseeds",
    }
    async with listening(tracker, tmp_path) as http:
        for url, path in described.items():
            async with http.get(url) as answer:
                assert answer.status == 200, url
                fits(document, "get", path, 200, await answer.json())
        for url, path, status in (
            ("/v1/hosts/other", "/v1/hosts/{name}", 404),
            ("/v1/swarms/other", "/v1/swarms/{digest}", 400),
            ("/v1/policies?reference=team/a:1&zone=z1", "/v1/policies", 403),
        ):
            async with http.get(url) as answer:
                assert answer.status == status and answer.content_type == "application/problem+json"
                fits(document, "get", path, status, await answer.json(content_type=None))


async def test_answers_of_an_agent_are_as_described(
    agent: tuple[web.Application, web.Application], tmp_path: Path
) -> None:
    for app, paths in zip(agent, (["/healthz", "/readyz"], ["/v1/pulls", "/v1/mounts", "/v1/packages"]), strict=True):
        document = app[INTERFACE].document
        async with listening(app, tmp_path) as http:
            for path in paths:
                async with http.get(path) as answer:
                    assert answer.status == 200
                    fits(document, "get", path, 200, await answer.json())
    local = agent[1][INTERFACE].document
    async with listening(agent[1], tmp_path) as http:
        async with http.get("/v1/status") as answer:
            status = await answer.json()
            fits(local, "get", "/v1/status", 200, status)
            assert status["host"] == "h1" and status["store"]["usage"]["bytes_complete"] == 0
        async with http.get("/v1/pulls/none") as answer:
            fits(local, "get", "/v1/pulls/{id}", 404, await answer.json(content_type=None))


async def test_messages_of_a_session_are_described(tracker: web.Application) -> None:
    document = tracker[INTERFACE].document
    schema = document["paths"]["/v1/session"]["get"]["x-messages"]["agent"]
    validator = Draft202012Validator({"components": document["components"], **schema})
    hello = Hello(1, "h1", "10.0.0.1:7071")
    for message in (hello, Report()):
        assert validator.is_valid(json.loads(encode(message)))
    assert not validator.is_valid({"type": "hello", "protocol": 1, "host": "white space", "address": "10.0.0.1:7071"})


def test_a_route_is_described_from_its_declaration() -> None:
    """Summary and description come from the docstring, errors are grouped by status."""

    async def handler(_: web.Request) -> web.Response:
        """Say how far it is. The answer is
        a number."""
        return web.Response()

    app = web.Application()
    query = (Query("unit", "bytes or pieces"),)
    route = Route("GET", "/v1/{name:.+}/{part}", handler, (Answer(int),), query, errors=(NotFound, UsageError))
    serve(app, [route], title="a title")
    (operation,) = app[INTERFACE].document["paths"]["/v1/{name}/{part}"].values()
    assert (operation["summary"], operation["description"]) == ("Say how far it is", "The answer is a number.")
    assert [(field["name"], field["in"]) for field in operation["parameters"]] == [
        ("name", "path"),
        ("part", "path"),
        ("unit", "query"),
    ]
    assert set(operation["responses"]) == {"200", "400", "404", "default"}
