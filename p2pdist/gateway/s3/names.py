"""What a request of an S3 client asks for, read from its method, path and query (path style; Amazon
S3 API reference, 2006-03-01).

A path is read as it was sent: `%2F` is a slash of the key, `..` and empty segments are parts of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote_to_bytes

from p2pdist.gateway.s3.failures import S3Failure

PATH_CHARACTERS_MAX = 4096
KEY_BYTES_MAX = 1024
KEYS_OF_PAGE_MAX = 1000
"""Keys and common prefixes of one page of a listing."""

Operation = Literal[
    "ListBuckets", "HeadBucket", "GetBucketLocation", "ListObjectsV2", "ListObjects", "GetObject", "HeadObject"
]
OPERATIONS: tuple[Operation, ...] = (
    "ListBuckets", "HeadBucket", "GetBucketLocation", "ListObjectsV2", "ListObjects", "GetObject", "HeadObject",
)  # fmt: skip

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
_NUMBER = re.compile(r"[0-9]{1,9}\Z")

_OF_PAGES = frozenset(
    ["prefix", "delimiter", "max-keys", "marker", "start-after", "continuation-token", "encoding-type"]
)
_OF_BUCKETS = _OF_PAGES | {"list-type", "fetch-owner", "location", "x-id"}
_OF_OBJECTS = frozenset(["partNumber", "versionId", "x-id"])
_OF_OLD_SIGNATURES = frozenset(["AWSAccessKeyId", "Signature", "Expires"])
"""Of URLs that are presigned by Signature Version 2, as boto3 still makes them."""


@dataclass(frozen=True, slots=True)
class S3Request:
    """What a request asks for. `key` is "" for what is no object."""

    operation: Operation
    bucket: str = ""
    key: bytes = b""


def is_bucket(name: str) -> bool:
    """Whether a bucket may have this name."""
    return _BUCKET.match(name) is not None


def parse_request(method: str, raw_path: str, query: Mapping[str, str]) -> S3Request:
    """What a GET or HEAD asks for; the path is percent-encoded as it was sent. Raises S3Failure."""
    if len(raw_path) > PATH_CHARACTERS_MAX:
        raise S3Failure(400, "KeyTooLongError", f"a path of {len(raw_path)} characters names no object")
    bucket, _, raw_key = raw_path.removeprefix("/").partition("/")
    if not bucket:
        if raw_key:
            raise S3Failure(400, "InvalidBucketName", "the path names no bucket")
        return S3Request("ListBuckets")
    if not is_bucket(bucket):
        raise S3Failure(400, "InvalidBucketName", f"{bucket[:100]!r} is no name of a bucket")
    _require_served(query, _OF_OBJECTS if raw_key else _OF_BUCKETS)
    if raw_key:
        return S3Request("HeadObject" if method == "HEAD" else "GetObject", bucket, _key(raw_key, query))
    if method == "HEAD":
        return S3Request("HeadBucket", bucket)
    if "location" in query:
        return S3Request("GetBucketLocation", bucket)
    return S3Request("ListObjectsV2" if query.get("list-type") == "2" else "ListObjects", bucket)


def _require_served(query: Mapping[str, str], served: frozenset[str]) -> None:
    """Raises S3Failure for a subresource, such as ?acl, of which nothing is known here. Fields of
    signatures and of answers (`response-...`) are left to others."""
    for name in query:
        if name not in served | _OF_OLD_SIGNATURES and not name.lower().startswith(("x-amz-", "response-")):
            raise S3Failure(501, "NotImplemented", f"{name[:50]!r} is not served: this is for reading objects")


def _key(raw: str, query: Mapping[str, str]) -> bytes:
    key = unquote_to_bytes(raw.encode("utf-8", "surrogateescape"))  # as the HTTP server decodes
    if len(key) > KEY_BYTES_MAX:
        raise S3Failure(400, "KeyTooLongError", f"a key has at most {KEY_BYTES_MAX} bytes, not {len(key)}")
    if query.get("versionId", "null") != "null":
        raise S3Failure(404, "NoSuchVersion", "objects have no versions here")
    if query.get("partNumber", "1") != "1":
        raise S3Failure(416, "InvalidPartNumber", "objects have one part here")
    return key


def page_size(query: Mapping[str, str]) -> int:
    """How many keys a page of a listing may have. Raises S3Failure."""
    text = query.get("max-keys", "")
    if text and not _NUMBER.match(text):
        raise S3Failure(400, "InvalidArgument", f"{text[:20]!r} is no number of keys")
    return min(int(text or KEYS_OF_PAGE_MAX), KEYS_OF_PAGE_MAX)
