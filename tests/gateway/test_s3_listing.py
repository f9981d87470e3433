"""Pages of listings, names of requests and signatures of the S3 interface: pure, and against a slow
and obvious listing and the canonical signing of botocore."""

from __future__ import annotations

import datetime
from urllib.parse import parse_qsl, urlsplit

import pytest
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.gateway.s3.failures import S3Failure
from p2pdist.gateway.s3.listing import After, page_of
from p2pdist.gateway.s3.names import S3Request, parse_request
from p2pdist.gateway.s3.signatures import AccessKey, SignedRequest, verify

KEYS = {"reader": AccessKey("reader", "not-a-secret-of-anyone")}
NAMES = st.text("ab/\U0001f600", min_size=1, max_size=6).map(str.encode)


def slow_listing(keys: list[bytes], prefix: bytes, delimiter: bytes) -> list[tuple[bytes, bool]]:
    """All entries in order: keys, and common prefixes."""
    entries = dict.fromkeys(
        (key, False)
        if not delimiter or (cut := key.find(delimiter, len(prefix))) < 0
        else (key[: cut + len(delimiter)], True)
        for key in keys
        if key.startswith(prefix)
    )
    return list(entries)


@given(
    st.sets(NAMES, max_size=30),
    st.sampled_from([b"", b"a", b"a/", b"b/a"]),
    st.sampled_from([b"", b"/", b"/a"]),
    st.integers(1, 4),
)
def test_pages_make_up_the_listing(names: set[bytes], prefix: bytes, delimiter: bytes, count: int) -> None:
    keys, after, entries = sorted(names), After(), []
    while True:
        page = page_of(keys, prefix=prefix, delimiter=delimiter, after=after, count=count)
        assert len(page.keys) + len(page.prefixes) <= count
        entries += sorted([(key, False) for key in page.keys] + [(key, True) for key in page.prefixes])
        if page.after is None:
            break
        parsed = After.parse(page.after.token)
        assert parsed == page.after
        after = parsed
    assert entries == sorted(slow_listing(keys, prefix, delimiter))


def test_a_page_behind_a_key_that_is_gone_goes_on_there() -> None:
    page = page_of([b"a", b"c", b"d"], prefix=b"", delimiter=b"", after=After(b"b"), count=1)
    assert page.keys == (b"c",) and page.after == After(b"c")
    assert page_of([b"a"], prefix=b"", delimiter=b"", after=After(), count=0).after is None


@pytest.mark.parametrize("token", ["", "!", "eA==", "\u00fc", "a3g=\x01", "a3g"])
def test_a_token_of_others_is_none(token: str) -> None:
    assert After.parse(token) is None


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/models/a%2Fb", b"a/b"),
        ("/models/a//b", b"a//b"),
        ("/models/../x", b"../x"),
        ("/models/a+b%20%F0%9F%98%80", "a+b \U0001f600".encode()),
    ],
)
def test_a_key_is_what_was_sent(path: str, key: bytes) -> None:
    assert parse_request("GET", path, {}) == S3Request("GetObject", "models", key)


@pytest.mark.parametrize(
    ("path", "query", "code"),
    [
        ("/Models", {}, "InvalidBucketName"),
        ("//a", {}, "InvalidBucketName"),
        ("/models", {"acl": ""}, "NotImplemented"),
        ("/models/a", {"uploads": ""}, "NotImplemented"),
        ("/models/a", {"versionId": "7"}, "NoSuchVersion"),
        ("/models/a", {"partNumber": "2"}, "InvalidPartNumber"),
        ("/models/" + "a" * 1025, {}, "KeyTooLongError"),
        ("/models/" + "a" * 5000, {}, "KeyTooLongError"),
    ],
)
def test_what_is_not_served_is_named(path: str, query: dict[str, str], code: str) -> None:
    with pytest.raises(S3Failure) as failure:
        parse_request("GET", path, query)
    assert failure.value.code == code


# -- signatures

URL = "http://127.0.0.1:7074/models/a%20b/%C3%BC~%2B?prefix=x%2Fy&list-type=2&empty="


def signed(auth: type, secret: str = KEYS["reader"].secret, id: str = "reader", url: str = URL) -> SignedRequest:
    """A GET as botocore signs it."""
    request = AWSRequest("GET", url, headers={"X-Amz-Meta": "a   b "})
    more = {"expires": 60} if auth is S3SigV4QueryAuth else {}
    auth(Credentials(id, secret), "s3", "eu-central-7", **more).add_auth(request)
    parts = urlsplit(request.url)
    fields = {name.lower(): [value] for name, value in request.headers.items()} | {"host": [parts.netloc]}
    return SignedRequest("GET", parts.path, parts.query, fields)


def now_s() -> float:
    return datetime.datetime.now(datetime.UTC).timestamp()


@pytest.mark.parametrize("auth", [S3SigV4Auth, S3SigV4QueryAuth])
def test_signatures_of_botocore_are_verified(auth: type) -> None:
    assert verify(signed(auth), KEYS, now_s=now_s()) == KEYS["reader"]


def test_a_url_that_is_presigned_as_boto3_does_by_default_is_read_where_no_keys_are_and_named_where_they_are() -> None:
    query = "AWSAccessKeyId=reader&Signature=x%2By%3D&Expires=1795867200"
    assert parse_request("GET", "/models/a", dict(parse_qsl(query))) == S3Request("GetObject", "models", b"a")
    with pytest.raises(S3Failure, match="AWS4-HMAC-SHA256") as failure:
        verify(SignedRequest("GET", "/models/a", query, {"host": ["x"]}), KEYS, now_s=now_s())
    assert (failure.value.status, failure.value.code) == (400, "InvalidRequest")


@pytest.mark.parametrize("auth", [S3SigV4Auth, S3SigV4QueryAuth])
def test_what_differs_from_what_was_signed_is_refused(auth: type) -> None:
    request = signed(auth)
    changes = [
        SignedRequest("HEAD", request.raw_path, request.raw_query, request.fields),
        SignedRequest("GET", request.raw_path + "x", request.raw_query, request.fields),
        SignedRequest("GET", request.raw_path, request.raw_query + "&max-keys=1", request.fields),
        SignedRequest("GET", request.raw_path, request.raw_query, {**request.fields, "host": ["elsewhere"]}),
        signed(auth, secret="another-secret-of-16"),
    ]
    for changed in changes:
        with pytest.raises(S3Failure) as failure:
            verify(changed, KEYS, now_s=now_s())
        assert (failure.value.status, failure.value.code) == (403, "SignatureDoesNotMatch")
    with pytest.raises(S3Failure) as failure:
        verify(signed(auth, id="stranger"), KEYS, now_s=now_s())
    assert failure.value.code == "InvalidAccessKeyId"
    for late_s, code in (
        (-3600, "RequestTimeTooSkewed"),
        (3600, "AccessDenied" if auth is S3SigV4QueryAuth else "RequestTimeTooSkewed"),
    ):
        with pytest.raises(S3Failure) as failure:
            verify(request, KEYS, now_s=now_s() + late_s)
        assert failure.value.code == code


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Basic eA==",
        "AWS4-HMAC-SHA256 ",
        "AWS4-HMAC-SHA256 Credential=a/b, Signature=c",
        "AWS4-HMAC-SHA256 " + "," * 500,
    ],
)
def test_what_is_no_signature_is_refused(text: str) -> None:
    with pytest.raises(S3Failure) as failure:
        verify(SignedRequest("GET", "/models", "", {"authorization": [text]}), KEYS, now_s=now_s())
    assert failure.value.status in (400, 403)


def test_a_secret_is_not_shown() -> None:
    assert KEYS["reader"].secret not in repr(KEYS)
