"""HTTP interfaces that describe themselves as OpenAPI 3.1 documents
(https://spec.openapis.org/oas/v3.1.1.html).

Each application has one table of routes. `serve` adds them to the application and describes them
under DOCUMENT_PATH, so nothing is served that is not described. Schemas are those of the types that
handlers decode and encode. A summary is the first sentence of the handler's docstring, the rest of
the docstring follows as the description.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from importlib.metadata import version
from inspect import getdoc
from typing import Any, Literal

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from p2pdist.model.access import Right
from p2pdist.model.digest import WireDigest
from p2pdist.model.errors import P2PDistError
from p2pdist.transfer.problems import PROBLEM_TYPE

DOCUMENT_PATH = "/v1/openapi.json"
JSON_TYPE = "application/json"
_REFERENCE = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::[^{}]*)?\}")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request failed (RFC 9457). `type` is `urn:p2pdist:problem:<slug>`, `detail` what
    happened, `remedy` what to do about it; some problems have further members."""

    type: str
    title: str
    status: int
    detail: str
    remedy: str = ""
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a route; several of one status and media type are alternatives. `body` is the
    type of a JSON document, None for other content and for none; `media_type` is empty for an
    answer without a body."""

    body: Any = None
    status: int = 200
    media_type: str = JSON_TYPE


@dataclass(frozen=True, slots=True)
class Query:
    """One field of a route's query."""

    name: str
    text: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path, as aiohttp writes paths. A GET answers HEAD as well (RFC 9110,
    9.3.2). `right` is what the route asks of the identity that requests it; a route that names none
    is not served while access is on."""

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    handler: Handler
    answers: tuple[Answer, ...] = (Answer(),)
    query: tuple[Query, ...] = ()
    request: Any = None
    """The type of the body, None for a request without one."""

    errors: tuple[type[P2PDistError], ...] = ()
    """What the handler raises; any route may fail otherwise as well."""

    messages: dict[str, Any] = field(default_factory=dict)
    """Types of WebSocket messages, by sender."""

    right: Right | None = None
    also: tuple[Right, ...] = ()
    """Rights that do as well; the handler then decides by the identity what it answers."""

    @property
    def described_path(self) -> str:
        """The path without the patterns of its parameters."""
        return _PARAMETER.sub(r"{\1}", self.path)

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters in the path."""
        return _PARAMETER.findall(self.path)

    def types(self) -> list[Any]:
        """All types whose schemas the description of this route needs."""
        bodies = [answer.body for answer in self.answers if answer.body is not None]
        request = [self.request] if self.request is not None else []
        return [*bodies, *request, *self.messages.values(), *([WireDigest] if "digest" in self.parameters else [])]


class Interface:
    """An application's table of routes and its description, which is made when it is first asked
    for."""

    def __init__(self, routes: Sequence[Route], *, title: str) -> None:
        self.routes = routes
        self.by_path: dict[tuple[str, str], Route] = {(route.method, route.described_path): route for route in routes}
        self._title = title
        self._schemas: list[tuple[Any, dict[str, Any]]] = []
        """Types and their schemas; a list, as not every type can be hashed."""

    @cached_property
    def encoded(self) -> bytes:
        """The document as JSON."""
        return msgspec.json.encode(self.document)

    @cached_property
    def document(self) -> dict[str, Any]:
        """The OpenAPI document."""
        types = [Problem, *(kind for route in self.routes for kind in route.types())]
        schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
        self._schemas = [(kind, _portable(schema)) for kind, schema in zip(types, schemas, strict=True)]
        paths: dict[str, dict[str, Any]] = {}
        for route in self.routes:
            paths.setdefault(route.described_path, {})[route.method.lower()] = self._operation(route)
        return {
            "openapi": "3.1.0",
            "info": {"title": self._title, "version": version("p2pdist")},
            "paths": paths,
            "components": {"schemas": _portable(components)},
        }

    def _schema(self, kind: Any) -> dict[str, Any]:
        return next(schema for known, schema in self._schemas if known is kind)

    def _operation(self, route: Route) -> dict[str, Any]:
        summary, description = _texts(route.handler)
        operation: dict[str, Any] = {
            "operationId": "_".join([route.method.lower(), *re.findall(r"\w+", route.described_path)]),
            "summary": summary,
        }
        if description:
            operation["description"] = description
        if route.right is not None:
            operation["x-right"] = [route.right, *route.also]
        parameters = [self._path_parameter(name) for name in route.parameters]
        parameters += [
            {
                "name": query.name,
                "in": "query",
                "description": query.text,
                "required": query.required,
                "schema": {"type": "string"},
            }
            for query in route.query
        ]
        if parameters:
            operation["parameters"] = parameters
        if route.request is not None:
            content = {JSON_TYPE: {"schema": self._schema(route.request)}}
            operation["requestBody"] = {"required": True, "content": content}
        operation["responses"] = self._responses(route)
        if route.messages:
            operation["x-messages"] = {sender: self._schema(kind) for sender, kind in route.messages.items()}
        return operation

    def _path_parameter(self, name: str) -> dict[str, Any]:
        schema = self._schema(WireDigest) if name == "digest" else {"type": "string"}
        return {"name": name, "in": "path", "required": True, "schema": schema}

    def _responses(self, route: Route) -> dict[str, Any]:
        responses: dict[str, Any] = {}
        for answer in route.answers:
            response = responses.setdefault(str(answer.status), {"description": HTTPStatus(answer.status).phrase})
            if answer.media_type:
                media = response.setdefault("content", {}).setdefault(answer.media_type, {})
                if answer.body is not None:
                    schema = self._schema(answer.body)
                    media["schema"] = {"anyOf": [media["schema"], schema]} if "schema" in media else schema
        problem = {PROBLEM_TYPE: {"schema": self._schema(Problem)}}
        titles: dict[str, list[str]] = {}
        for error in route.errors:
            titles.setdefault(str(error.http_status), []).append(error.title)
        for status, texts in titles.items():
            response = responses.setdefault(status, {"description": "; ".join(texts)})
            response.setdefault("content", {}).update(problem)
        responses["default"] = {"description": "Any other failure", "content": problem}
        return responses


INTERFACE: web.AppKey[Interface] = web.AppKey("interface", Interface)


def route_of(request: web.Request) -> Route | None:
    """The route that serves a request; None where none does."""
    resource = request.match_info.route.resource
    if resource is None:
        return None
    method = "GET" if request.method == "HEAD" else request.method
    return request.app[INTERFACE].by_path.get((method, resource.canonical))


async def _describe(request: web.Request) -> web.Response:
    """Describe this interface as an OpenAPI document."""
    return web.Response(body=request.app[INTERFACE].encoded, content_type=JSON_TYPE)


class RouteLine(msgspec.Struct, frozen=True):
    """A route in short. `right` is what it asks of an identity where access control is on."""

    method: str
    path: str
    summary: str
    right: str


class Index(msgspec.Struct, frozen=True):
    """The routes of an interface, and where their full description is."""

    routes: list[RouteLine]
    openapi: str = DOCUMENT_PATH


async def index(request: web.Request) -> web.Response:
    """List the routes of this interface, each in a line."""
    lines = [
        RouteLine(route.method, route.described_path, _texts(route.handler)[0], route.right or "")
        for route in request.app[INTERFACE].routes
    ]
    return web.Response(body=msgspec.json.encode(Index(lines)), content_type=JSON_TYPE)


def serve(app: web.Application, routes: Iterable[Route], *, title: str) -> None:
    """Add routes to an application, and the one that describes them all."""
    table = (*routes, Route("GET", DOCUMENT_PATH, _describe, (Answer(dict[str, Any]),), right="open"))
    app[INTERFACE] = Interface(table, title=title)
    for route in table:
        if route.method == "GET":
            app.router.add_get(route.path, route.handler)
        else:
            app.router.add_route(route.method, route.path, route.handler)


def _texts(handler: Handler) -> tuple[str, str]:
    """The first sentence of a handler's docstring, without its full stop, and the rest."""
    first, *rest = _SENTENCE_END.split(" ".join((getdoc(handler) or "").split()), maxsplit=1)
    return first.rstrip("."), " ".join(rest)


def _portable(schema: Any) -> Any:
    """A schema whose patterns are those of ECMA 262, as JSON Schema demands, and whose descriptions
    are single lines."""
    if isinstance(schema, list):
        return [_portable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    portable = {name: _portable(part) for name, part in schema.items()}
    fixed = portable.get("prefixItems")
    if fixed and portable.get("items") is False and portable.get("maxItems") == len(fixed):
        del portable["items"]  # says nothing more, and some generators of clients stumble over it
    if isinstance(pattern := portable.get("pattern"), str):
        portable["pattern"] = pattern.replace(r"\A", "^").replace(r"\Z", "$")
    if isinstance(description := portable.get("description"), str):
        portable["description"] = " ".join(description.split())
    return portable
