"""The S3 interface of an agent, for reading (Amazon S3 API reference, 2006-03-01; path style):
programs that load from object storage read packages and blobs through it.

Theory. A range of an object is answered as its verified bytes come, and bytes that a client waits
for come before the rest, so a program loads while the swarm still brings the package. A body that
ends early breaks its connection: clients see that it is truncated and ask again. A request for
which nothing comes in BEGIN_S is answered 503, which clients repeat.

Nothing is written, so whatever would is 405 (MethodNotAllowed). Signatures are not looked at unless
the agent was given access keys; then every request must be signed with one of them.

Where objects and bytes come from is the agent's: see contract.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from p2pdist.gateway.answers import Answers, Interface, Sent, answer_by
from p2pdist.gateway.s3.contract import Bucket, Buckets, ObjectInfo, Objects
from p2pdist.gateway.s3.counts import S3Counts
from p2pdist.gateway.s3.documents import (
    XML_TYPE,
    buckets_document,
    failure_response,
    listing_document,
    location_document,
)
from p2pdist.gateway.s3.failures import S3Failure, as_failure, no_such_bucket, no_such_key
from p2pdist.gateway.s3.listing import After, page_of
from p2pdist.gateway.s3.names import S3Request, page_size, parse_request
from p2pdist.gateway.s3.signatures import AccessKey, SignedRequest, verify
from p2pdist.model.errors import NotFound, Unavailable

BEGIN_S = 30.0
"""How long a client waits for the head of an answer, at most: half of what clients wait."""

REQUESTS_MAX = 256
"""Requests answered at once. Each may hold a chunk of a content in memory."""


class Facade:
    """Answers requests of S3 clients. With `keys`, by id, requests must be signed. On the event
    loop."""

    def __init__(self, buckets: Buckets, keys: Mapping[str, AccessKey], counts: S3Counts) -> None:
        self._buckets, self._keys, self._counts = buckets, keys, counts
        self._answers: Answers[S3Request] = Answers(
            Interface(REQUESTS_MAX, _busy, lambda asked: asked.operation, counts.answered, self._failed)
        )

    @web.middleware
    async def failures(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware that answers failures as S3 does, those of the router and the guard
        included."""
        try:
            return await handler(request)
        except Exception as error:
            failure = as_failure(error)
            self._counts.answered("other", failure.status, "none")
            return failure_response(failure, request.rel_url.raw_path)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """List buckets or objects, or serve an object or a range of it. HEAD says whether a bucket
        or an object is there. Listings are XML, in pages of up to 1,000 keys."""
        return await self._answers.answer(request, _asked, self._answer)

    def _failed(self, request: web.Request, error: Exception, asked: S3Request | None) -> web.Response:
        return failure_response(as_failure(error), request.rel_url.raw_path)

    async def _answer(self, request: web.Request, asked: S3Request) -> Sent:
        buckets = {bucket.name: bucket for bucket in self._readable(request)}
        if asked.operation == "ListBuckets":
            return _document(buckets_document(sorted(buckets)))
        bucket = buckets.get(asked.bucket)
        if bucket is None:
            raise no_such_bucket(asked.bucket)
        if asked.operation == "HeadBucket":
            return Sent(web.Response(headers={"x-amz-bucket-region": "us-east-1"}))
        if asked.operation == "GetBucketLocation":
            return _document(location_document())
        deadline = asyncio.get_running_loop().time() + BEGIN_S
        try:
            objects = await answer_by(deadline, bucket.objects(asked.key))
        except NotFound as error:  # what the bucket shows is nowhere
            raise S3Failure(404, "NoSuchBucket", str(error)) from error
        if asked.operation in ("ListObjectsV2", "ListObjects"):
            return _document(_listing(request, bucket, objects, version_2=asked.operation == "ListObjectsV2"))
        if objects.describe(asked.key) is None:
            raise no_such_key(asked.key)
        return await bucket.send(request, objects, asked.key, deadline)

    def _readable(self, request: web.Request) -> list[Bucket]:
        """The buckets that the client may read. Raises S3Failure where it shows no access key that
        it must."""
        buckets = list(self._buckets.readable(request))
        if not self._keys:
            return buckets
        key = verify(_signed(request), self._keys, now_s=time.time())
        return [bucket for bucket in buckets if not key.buckets or bucket.name in key.buckets]


def _busy() -> Unavailable:
    return Unavailable("this agent answers as many requests of S3 clients as it may", remedy="Ask again")


def _asked(request: web.Request) -> S3Request:
    return parse_request(request.method, request.rel_url.raw_path, request.query)


def _signed(request: web.Request) -> SignedRequest:
    fields: dict[str, list[str]] = {}
    for name, value in request.headers.items():
        fields.setdefault(name.lower(), []).append(value)
    raw_path, _, raw_query = request.raw_path.partition("?")
    return SignedRequest(request.method, raw_path, raw_query, fields)


def _document(body: bytes) -> Sent:
    return Sent(web.Response(body=body, content_type=XML_TYPE))


def _listing(request: web.Request, bucket: Bucket, objects: Objects, *, version_2: bool) -> bytes:
    query, count = request.query, page_size(request.query)
    encoding = query.get("encoding-type", "")
    if encoding not in ("", "url"):
        raise S3Failure(400, "InvalidArgument", "encoding-type is url, or not given")
    prefix, delimiter = query.get("prefix", "").encode(), query.get("delimiter", "").encode()
    token, start = query.get("continuation-token"), query.get("start-after" if version_2 else "marker", "").encode()
    after: After | None = After(start, common=not version_2 and bool(delimiter) and start.endswith(delimiter))
    if version_2 and token is not None:
        after = After.parse(token)
    if after is None:
        raise S3Failure(400, "InvalidArgument", "the continuation token is none of this agent's")
    page = page_of(objects.keys, prefix=prefix, delimiter=delimiter, after=after, count=count)
    more = {"IsTruncated": "true" if page.after is not None else "false", "MaxKeys": str(count)}
    fields, texts = {"Name": bucket.name, **more}, {"Prefix": prefix}
    if encoding:
        fields["EncodingType"] = encoding
    if delimiter:
        texts["Delimiter"] = delimiter
    if version_2:
        fields["KeyCount"] = str(len(page.keys) + len(page.prefixes))
        if token is not None:
            fields["ContinuationToken"] = token
        if page.after is not None:
            fields["NextContinuationToken"] = page.after.token
        if start:
            texts["StartAfter"] = start
    else:
        texts["Marker"] = start
        if page.after is not None:
            texts["NextMarker"] = page.after.text

    def describe(key: bytes) -> ObjectInfo:
        info = objects.describe(key)
        assert info is not None, "a key that is listed is described"
        return info

    return listing_document(fields, texts, page, describe, url=bool(encoding))
