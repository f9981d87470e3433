"""The hub of a fleet, for agents: repositories that a client may read, their revisions, the files
of commits, and where large ones are read.

A repository is a package named `hf.co/` and its path, and rights are compared with that name before
anything is asked upstream. The token of the agent's own client comes in the field
P2pdist-Hub-Token; it goes to the hub, and nowhere else.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from p2pdist.model.errors import Corrupt, NotFound, Refused, Unavailable, UsageError
from p2pdist.model.hub import (
    CLIENT_HEADER,
    HubAdmission,
    HubFile,
    HubListing,
    HubLocation,
    HubName,
    HubRevision,
    check_path,
    check_revision,
    check_token,
    hub_name,
    is_commit,
)
from p2pdist.transfer.guard import identity_of
from p2pdist.transfer.openapi import Answer, Query, Route
from tracker.cluster.siblings import Known
from tracker.http.keys import SERVICE
from tracker.http.trackers import announce
from tracker.joined_reads import ASKER
from tracker.upstreams.hubs import BYTES_TYPE, Hubs

STALE_CHARACTERS_MAX = 8192


def _json(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json", charset="utf-8")


def _repository(request: web.Request) -> tuple[Hubs, HubName, str]:
    """The hub, asked on account of the address that asks, the repository, which the identity may
    read, and the token of its client. Raises NotFound, UsageError."""
    service, info = request.app[SERVICE], request.match_info
    # Agents encode the slash, so that no name of a repository looks like another path.
    name = hub_name(info["kind"], info["repository"].replace("%2F", "/").replace("%2f", "/"))
    identity_of(request).require_read([str(name)], str(name))
    ASKER.set(request.remote or "")
    return service.hubs, name, check_token(request.headers.get(CLIENT_HEADER, ""))


def _commit(request: web.Request) -> str:
    commit = request.query.get("commit", "")
    if not is_commit(commit):
        raise UsageError(f"{commit[:50]!r} is no commit")
    return commit


def _path(request: web.Request) -> str:
    return check_path(request.query.get("path", ""))


async def admission(request: web.Request) -> web.Response:
    """Say whether a repository may be read: by every client, or by the bearer of the token."""
    hubs, name, token = _repository(request)
    return _json(HubAdmission(await hubs.admit(name, token)))


async def revision(request: web.Request) -> web.Response:
    """Say which commit a branch, tag or commit names, and what the hub says of it."""
    hubs, name, token = _repository(request)
    return _json(await hubs.revision(name, check_revision(request.query.get("revision", "")), token))


async def files(request: web.Request) -> web.Response:
    """List everything in a commit."""
    hubs, name, token = _repository(request)
    data = await hubs.listing(name, _commit(request), token)
    return web.Response(body=data, content_type="application/json", charset="utf-8")


async def file(request: web.Request) -> web.Response:
    """Describe one file of a commit. A file that LFS keeps may be fetched as a blob from then
    on."""
    hubs, name, token = _repository(request)
    found = await hubs.file(name, _commit(request), _path(request), token)
    service = request.app[SERVICE]
    if found.sha256 and service.access is not None and not identity_of(request).reads_everything:
        service.fleet.policies.bind(str(name), found.digest, ())
    if found.sha256 and found.size:
        await announce(request, Known(str(name), found.digest, size=found.size))
    return _json(found)


async def content(request: web.Request) -> web.Response:
    """Serve the content of a file that LFS does not keep."""
    hubs, name, token = _repository(request)
    data = await hubs.content(name, _commit(request), _path(request), token)
    return web.Response(body=data, content_type=BYTES_TYPE)


async def location(request: web.Request) -> web.Response:
    """Say where a file that LFS keeps is read, for a while. `stale` is the address that is not
    taken any more."""
    hubs, name, token = _repository(request)
    stale = request.query.get("stale", "")
    if len(stale) > STALE_CHARACTERS_MAX:
        raise UsageError(f"an address of {len(stale)} characters was not given here")
    response = _json(await hubs.location(name, _commit(request), _path(request), token, stale=stale))
    response.headers["Cache-Control"] = "no-store"
    return response


async def refs(request: web.Request) -> web.Response:
    """List the branches and tags of a repository, as its hub does."""
    hubs, name, token = _repository(request)
    data = await hubs.refs(name, token)
    return web.Response(body=data, content_type="application/json", charset="utf-8")


_REPOSITORY = "/v1/hub/{kind}/{repository:[^/]+}"
_ERRORS = (UsageError, NotFound, Refused, Corrupt, Unavailable)
_COMMIT, _FILE = Query("commit", "40 hex digits", required=True), Query("path", "of the file", required=True)

ROUTES = (
    Route("GET", _REPOSITORY, admission, (Answer(HubAdmission),), errors=_ERRORS, right="read"),
    Route(
        "GET",
        _REPOSITORY + "/revision",
        revision,
        (Answer(HubRevision),),
        (Query("revision", "a branch, tag or commit", required=True),),
        errors=_ERRORS,
        right="read",
    ),
    Route("GET", _REPOSITORY + "/files", files, (Answer(HubListing),), (_COMMIT,), errors=_ERRORS, right="read"),
    Route("GET", _REPOSITORY + "/file", file, (Answer(HubFile),), (_COMMIT, _FILE), errors=_ERRORS, right="read"),
    Route(
        "GET",
        _REPOSITORY + "/content",
        content,
        (Answer(media_type=BYTES_TYPE),),
        (_COMMIT, _FILE),
        errors=_ERRORS,
        right="read",
    ),
    Route(
        "GET",
        _REPOSITORY + "/location",
        location,
        (Answer(HubLocation),),
        (_COMMIT, _FILE, Query("stale", "the address that is not taken any more")),
        errors=_ERRORS,
        right="agent",
    ),
    Route("GET", _REPOSITORY + "/refs", refs, (Answer(dict[str, Any]),), errors=_ERRORS, right="read"),
)
