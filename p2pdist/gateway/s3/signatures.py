"""Signatures of requests, Signature Version 4 (AWS Signature Version 4 for API requests; for S3:
"Authenticating Requests"), in the Authorization field or in the query of a presigned URL.

A signature covers method, path, query, the fields that it names, and the digest of the body that
the request states, which for a request without a body is the only thing said of it. Region is
whatever the client has. A date may differ from this host's by SKEW_S, and a presigned URL is valid
for as long as it says, a week at most.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, unquote_to_bytes

from p2pdist.gateway.s3.failures import S3Failure

ALGORITHM = "AWS4-HMAC-SHA256"
SKEW_S = 900.0
EXPIRES_S_MAX = 7 * 86400
FIELDS_MAX = 64
UNSIGNED = "UNSIGNED-PAYLOAD"

_CREDENTIAL = re.compile(r"(?P<id>[^/\s]{1,128})/(?P<day>[0-9]{8})/(?P<region>[A-Za-z0-9-]{1,64})/s3/aws4_request\Z")
_SIGNATURE = re.compile(r"[0-9a-f]{64}\Z")
_DATE = re.compile(r"[0-9]{8}T[0-9]{6}Z\Z")
_SPACES = re.compile(" +")


@dataclass(frozen=True, slots=True)
class AccessKey:
    """A key that clients sign with. `buckets` are those that it may read; none: all."""

    id: str
    secret: str
    buckets: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"AccessKey({self.id!r})"


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """What of a request signatures are about. `raw_path` and `raw_query` are as they were sent,
    `fields` has the head's fields by name in lower case."""

    method: str
    raw_path: str
    raw_query: str
    fields: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class _Signature:
    """A signature as a request shows it."""

    id: str
    scope: str
    """<day>/<region>/s3/aws4_request."""
    names: tuple[str, ...]
    """The fields that it covers."""
    value: str
    date: str
    body: str
    """The digest of the body that it states."""
    expires_s: int | None = None
    """Of a presigned URL."""


def verify(request: SignedRequest, keys: Mapping[str, AccessKey], *, now_s: float) -> AccessKey:
    """The key with which a request is signed; `now_s` in seconds since the epoch. Raises S3Failure,
    with the codes that clients know."""
    shown = _in_query(request) if "X-Amz-Algorithm=" in request.raw_query else _in_fields(request)
    _check_date(shown, now_s)
    key = keys.get(shown.id)
    if key is None:
        raise S3Failure(403, "InvalidAccessKeyId", "this agent knows no access key of that id")
    if "host" not in shown.names or not hmac.compare_digest(signature(request, shown, key), shown.value):
        raise S3Failure(403, "SignatureDoesNotMatch", "the signature of the request is not that of its access key")
    return key


def signature(request: SignedRequest, shown: _Signature, key: AccessKey) -> str:
    """The signature that `key` gives a request, in the form of the one that it shows."""
    canonical = "\n".join(
        [
            request.method,
            quote(_bytes(request.raw_path), safe="/~"),
            _canonical_query(request.raw_query),
            *(f"{name}:{_value(request.fields.get(name, ()))}" for name in shown.names),
            "",
            ";".join(shown.names),
            shown.body,
        ]
    )
    text = "\n".join(
        [ALGORITHM, shown.date, shown.scope, hashlib.sha256(canonical.encode("utf-8", "surrogateescape")).hexdigest()]
    )
    derived = f"AWS4{key.secret}".encode()
    for part in shown.scope.split("/"):
        derived = hmac.digest(derived, part.encode(), "sha256")
    return hmac.digest(derived, text.encode(), "sha256").hex()


def _in_fields(request: SignedRequest) -> _Signature:
    text = _one(request, "authorization")
    if not text and "AWSAccessKeyId=" in request.raw_query:
        raise S3Failure(400, "InvalidRequest", f"URLs are presigned with {ALGORITHM} here")
    if not text:
        raise S3Failure(403, "AccessDenied", "this agent wants requests that are signed with an access key")
    algorithm, _, rest = text.partition(" ")
    if algorithm != ALGORITHM:
        raise S3Failure(400, "InvalidRequest", f"requests are signed with {ALGORITHM} here")
    parts = dict(part.strip().partition("=")[::2] for part in rest.split(","))
    date, body = _one(request, "x-amz-date"), _one(request, "x-amz-content-sha256")
    return _signature(
        parts.get("Credential", ""), parts.get("SignedHeaders", ""), parts.get("Signature", ""), date, body
    )


def _in_query(request: SignedRequest) -> _Signature:
    fields: dict[str, str] = {}
    for part in request.raw_query.split("&"):
        name, _, value = part.partition("=")
        if name.startswith("X-Amz-"):
            fields[name] = _bytes(value).decode(errors="replace")
    expires = fields.get("X-Amz-Expires", "")
    if fields.get("X-Amz-Algorithm") != ALGORITHM or not re.fullmatch("[0-9]{1,7}", expires):
        raise S3Failure(400, "AuthorizationQueryParametersError", "the URL is not presigned as it should be")
    credential, names = fields.get("X-Amz-Credential", ""), fields.get("X-Amz-SignedHeaders", "")
    value, date = fields.get("X-Amz-Signature", ""), fields.get("X-Amz-Date", "")
    body = _one(request, "x-amz-content-sha256") or UNSIGNED
    return _signature(credential, names, value, date, body, min(int(expires), EXPIRES_S_MAX))


def _signature(
    credential: str, names: str, value: str, date: str, body: str, expires_s: int | None = None
) -> _Signature:
    match, fields = _CREDENTIAL.match(credential), tuple(names.split(";"))
    if match is None or not _SIGNATURE.match(value) or not _DATE.match(date) or len(fields) > FIELDS_MAX:
        raise S3Failure(400, "AuthorizationHeaderMalformed", "the signature is not written as it should be")
    if match["day"] != date[:8]:
        raise S3Failure(403, "SignatureDoesNotMatch", "the scope of the signature is of another day than its date")
    return _Signature(match["id"], credential.partition("/")[2], fields, value, date, body, expires_s)


def _check_date(shown: _Signature, now_s: float) -> None:
    try:
        signed_s = datetime.strptime(shown.date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise S3Failure(400, "AuthorizationHeaderMalformed", "the date of the signature is none") from None
    late_s = now_s - signed_s
    if shown.expires_s is not None and late_s > shown.expires_s:
        raise S3Failure(403, "AccessDenied", "the presigned URL is no longer valid")
    if late_s < -SKEW_S or (shown.expires_s is None and late_s > SKEW_S):
        raise S3Failure(403, "RequestTimeTooSkewed", "the date of the request is not near the time of this host")


def _one(request: SignedRequest, name: str) -> str:
    values = request.fields.get(name, ())
    return values[0] if values else ""


def _value(values: Sequence[str]) -> str:
    return ",".join(_SPACES.sub(" ", value.strip()) for value in values)


def _canonical_query(raw: str) -> str:
    """The query without the signature itself, its names and values encoded in one way, in order."""
    fields = []
    for part in raw.split("&") if raw else ():
        name, _, value = part.partition("=")
        if name != "X-Amz-Signature":
            fields.append((_encoded(name), _encoded(value)))
    return "&".join(f"{name}={value}" for name, value in sorted(fields))


def _encoded(text: str) -> str:
    return quote(_bytes(text), safe="~")


def _bytes(text: str) -> bytes:
    """The bytes of a part of a URL. What is no UTF-8 in a request is decoded with surrogates by the
    HTTP server."""
    return unquote_to_bytes(text.encode("utf-8", "surrogateescape"))
