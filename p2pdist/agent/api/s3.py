"""The S3 interface of this agent: its routes, which buckets a client may read, and its metrics.

It has a port of its own, on loopback: a client is a process of this host, and what it asks for is
fetched as for the host's own pulls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aiohttp import web
from prometheus_client.core import Metric

from p2pdist.agent.agent import Agent
from p2pdist.agent.api.counters import counter_family
from p2pdist.agent.bodies import BYTES_TYPE, counting
from p2pdist.agent.buckets.blobs import BlobBucket, OriginBlobs
from p2pdist.agent.buckets.package import BucketContext, PackageBucket
from p2pdist.agent.buckets.settings import BucketSettings, S3Settings
from p2pdist.gateway.s3.contract import Bucket
from p2pdist.gateway.s3.counts import S3Counts
from p2pdist.gateway.s3.documents import XML_TYPE
from p2pdist.gateway.s3.facade import Facade
from p2pdist.model.access import OPEN, Identity
from p2pdist.transfer.documents import large_answers
from p2pdist.transfer.guard import Identify, OwnNames, guard, identity_of
from p2pdist.transfer.openapi import Answer, Query, Route, serve
from p2pdist.transfer.problems import name_request, problems


class AgentBuckets:
    """The buckets that settings name, for the clients that may read them. While access is on, a
    client that no access key was given for may read what any process of this host may: public
    packages, and those that the rule for mirrors lists."""

    def __init__(self, agent: Agent, settings: S3Settings) -> None:
        count = counting(agent.s3_counts.bytes)
        context = BucketContext(agent.store, agent.packages, agent.pulls, agent.registry, count)
        self._keyed = bool(settings.keys)
        self._buckets = [_bucket(bucket, context) for bucket in sorted(settings.buckets, key=lambda each: each.name)]

    def readable(self, request: web.Request) -> Sequence[Bucket]:
        """Those that the client may read, by name. Where access keys are given, they say that."""
        identity = identity_of(request)
        return [bucket for bucket in self._buckets if self._keyed or identity.may_read(bucket.names)]


def _bucket(settings: BucketSettings, context: BucketContext) -> PackageBucket | BlobBucket:
    if settings.package is not None:
        return PackageBucket(settings.name, settings.package, context)
    return BlobBucket(settings.name, OriginBlobs(dict(settings.blobs), context), context)


def _identities(agent: Agent) -> Identify:
    async def identify(request: web.Request) -> Identity:
        peers = agent.access.peers
        if not peers.on:
            return OPEN
        peers.require_here()
        return Identity("anonymous", read=peers.public.joined(peers.local.mirror))

    return identify


def s3_routes(facade: Facade) -> tuple[Route, ...]:
    """The routes of the S3 interface."""
    errors = tuple(
        Answer(status=status, media_type=XML_TYPE) for status in (400, 403, 404, 405, 412, 416, 500, 501, 503)
    )
    documents, content = (
        Answer(media_type=XML_TYPE),
        (Answer(media_type=BYTES_TYPE), Answer(status=206, media_type=BYTES_TYPE)),
    )
    listing = (
        Query("list-type", "2 for ListObjectsV2"),
        Query("prefix", "what keys begin with"),
        Query("delimiter", "what ends a common prefix"),
        Query("max-keys", "entries of a page"),
        Query("continuation-token", "from the page before"),
        Query("start-after", "the key before the page"),
        Query("marker", "the key before the page, of ListObjects"),
        Query("encoding-type", "url for keys that are percent-encoded"),
        Query("location", "the region of the bucket instead"),
    )
    return (
        Route("GET", "/", facade.answer, (documents, *errors), right="object"),
        Route("GET", r"/{path:[\s\S]+}", facade.answer, (documents, *content, *errors), listing, right="object"),
    )


def make_s3_app(agent: Agent, settings: S3Settings) -> web.Application:
    """The application for the port of the S3 interface on loopback, in plain."""
    keys = {key.id: key for key in settings.keys}
    facade = Facade(AgentBuckets(agent, settings), keys, agent.s3_counts)
    middlewares = [problems, facade.failures, guard(_identities(agent), names=OwnNames()), large_answers()]
    app = web.Application(middlewares=middlewares, client_max_size=1 << 16)
    app.on_response_prepare.append(name_request)
    serve(app, s3_routes(facade), title="p2pdist agent, as an object store for reading")
    return app


def s3_metrics(counts: S3Counts) -> Iterator[Metric]:
    """What the S3 interface has counted; called in a thread."""
    yield counter_family("p2pdist_agent_s3_requests", "Requests of S3 clients", ("kind", "result"), counts.requests)
    yield counter_family("p2pdist_agent_s3_bytes", "Bytes of objects given to S3 clients", ("source",), counts.bytes)
