"""The documents that S3 clients read (Amazon S3 API reference, 2006-03-01)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from urllib.parse import quote
from xml.etree.ElementTree import Element, SubElement, tostring

from aiohttp import web

from p2pdist.gateway.s3.contract import ObjectInfo
from p2pdist.gateway.s3.failures import S3Failure
from p2pdist.gateway.s3.listing import Page
from p2pdist.model.errors import printable
from p2pdist.model.request_id import REQUEST_ID

XML_TYPE = "application/xml"
MESSAGE_CHARACTERS_MAX = 1000
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_NOT_IN_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no document of XML 1.0 can have (XML, 2.2), and a carriage return, which parsers
replace."""


def instant(modified_s: float) -> str:
    """A time in seconds since the epoch, as listings have it."""
    return datetime.fromtimestamp(max(0.0, modified_s), UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def buckets_document(names: Iterable[str]) -> bytes:
    """The answer to ListBuckets."""
    root = Element("ListAllMyBucketsResult", xmlns=_NAMESPACE)
    _texts(SubElement(root, "Owner"), {"ID": "p2pdist"})
    listed = SubElement(root, "Buckets")
    for name in names:
        _texts(SubElement(listed, "Bucket"), {"Name": name, "CreationDate": instant(0.0)})
    return _encoded(root)


def location_document() -> bytes:
    """The answer to GetBucketLocation: the region that has no name."""
    return _encoded(Element("LocationConstraint", xmlns=_NAMESPACE))


def listing_document(
    fields: Mapping[str, str],
    texts: Mapping[str, bytes],
    page: Page,
    describe: Callable[[bytes], ObjectInfo],
    *,
    url: bool,
) -> bytes:
    """The answer to ListObjects and ListObjectsV2: `fields` as they are; `texts`, keys and common
    prefixes percent-encoded with `url`. Raises S3Failure for a key that XML cannot carry as it
    is."""
    root = Element("ListBucketResult", xmlns=_NAMESPACE)
    _texts(root, fields)
    _texts(root, {name: _key(text, url=url) for name, text in texts.items()})
    for key in page.keys:
        info = describe(key)
        entry = {"Key": _key(key, url=url), "LastModified": instant(info.modified_s), "ETag": f'"{info.tag}"'}
        _texts(SubElement(root, "Contents"), {**entry, "Size": str(info.size), "StorageClass": "STANDARD"})
    for prefix in page.prefixes:
        _texts(SubElement(root, "CommonPrefixes"), {"Prefix": _key(prefix, url=url)})
    return _encoded(root)


def failure_response(failure: S3Failure, resource: str) -> web.Response:
    """The error document of a failure."""
    root = Element("Error")
    message = printable(failure.what)[:MESSAGE_CHARACTERS_MAX]
    _texts(root, {"Code": failure.code, "Message": message, "Resource": printable(resource[:1024])})
    if size := failure.headers.get("Content-Range", "").removeprefix("bytes */"):
        _texts(root, {"ActualObjectSize": size})  # clients of the AWS CRT tell an empty object by it
    _texts(root, {"RequestId": REQUEST_ID.get()})
    return web.Response(status=failure.status, body=_encoded(root), content_type=XML_TYPE, headers=failure.headers)


def _key(key: bytes, *, url: bool) -> str:
    if url:
        return quote(key, safe="/")
    text = key.decode(errors="replace")
    if _NOT_IN_XML.search(text):
        raise S3Failure(
            400, "InvalidArgument", f"XML cannot carry {printable(text[:200])!r}: list with encoding-type=url"
        )
    return text


def _texts(parent: Element, fields: Mapping[str, str]) -> None:
    for name, text in fields.items():
        SubElement(parent, name).text = text


def _encoded(root: Element) -> bytes:
    encoded: bytes = tostring(root, encoding="utf-8", xml_declaration=True)
    return encoded
