"""What storage that says no is said to have said: real HTTP servers that answer as S3, Google,
Azure, web servers and proxies do."""

from __future__ import annotations

import base64
import http.server
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from origin_rig import free_port, store_file

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import NotFound, P2PDistError, Refused, Unavailable, UsageError
from p2pdist.model.manifest import parse_reference
from p2pdist.origin.answer import proxy_for
from p2pdist.origin.drivers import open_origin
from p2pdist.origin.layout import LayoutOrigin

V1 = parse_reference("app:v1")
DIGEST = digest_of(b"content")
Reply = tuple[int, str, dict[str, str]]


class Storage(http.server.ThreadingHTTPServer):
    """Keeps what is PUT, but first asks `fault`, given method, path and headers, whether it says
    something else. `asked`: the paths."""

    daemon_threads = True

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.fault: Callable[[str, str, Any], Reply | None] = lambda method, path, headers: None
        super().__init__(("127.0.0.1", 0), _Answering)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def says(self, status: int, body: str, **headers: str) -> None:
        """Answer everything so."""
        self.fault = lambda method, path, given: (status, body, headers)

    def says_code(self, status: int, code: str, message: str = "", more: str = "") -> None:
        """Answer everything with an error as S3 and Azure write it."""
        self.says(status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message>{more}</Error>")


class _Answering(http.server.BaseHTTPRequestHandler):
    server: Storage
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append(self.path)
        objects, path = self.server.objects, self.path.partition("?")[0]
        reply = self.server.fault(self.command, self.path, self.headers)
        if reply is not None:
            self._send(reply[0], reply[1].encode(), reply[2])
        elif self.command == "PUT":
            objects[path] = body
            self._send(200, b"", {"ETag": '"1"'})
        elif path in objects:
            dates = {"ETag": '"1"', "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"}
            self._send(200, objects[path], dates)
        else:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>", {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_CONNECT = _answer


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """A server that s3:// URLs reach; nothing else of the environment concerns the origin."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    server = Storage()
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    serving.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-key")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield server
    server.shutdown()
    serving.join()
    server.server_close()


async def _failure(url: str, *, read: bool = False) -> P2PDistError:
    """What listing the tags at `url`, or reading a part of a blob there, raises."""
    origin = open_origin(url)
    try:
        with pytest.raises(P2PDistError) as caught:
            await (origin.read_range(DIGEST, 0, 7) if read else origin.tags())
    finally:
        await origin.close()
    return caught.value


@pytest.mark.parametrize(
    ("status", "code", "more", "kind", "words"),
    [
        (400, "ExpiredToken", "", Refused, "expired"),
        (403, "ExpiredToken", "", Refused, "expired"),
        (400, "TokenRefreshRequired", "", Refused, "expired"),
        (400, "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>", Refused, "region.*eu-west-1.*AWS_REGION"),
        (301, "PermanentRedirect", "<Endpoint>b.s3.eu-west-1.amazonaws.com</Endpoint>", Refused, "region.*AWS_REGION"),
        (403, "RequestTimeTooSkewed", "", Refused, "clock"),
        (403, "InvalidAccessKeyId", "", Refused, "AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", "", Refused, "secret key"),
        (403, "QuotaExceeded", "", Refused, "quota"),
        (403, "AccessDenied", "", Refused, "AccessDenied.*s3:GetObject.*agent or tracker"),
        (403, "InvalidObjectState", "", Refused, "archive"),
        (400, "SomethingNew", "", Refused, "SomethingNew"),
        (404, "NoSuchBucket", "", NotFound, "does not exist"),
        (503, "SlowDown", "", Unavailable, "SlowDown"),
        (400, "RequestTimeout", "", Unavailable, "RequestTimeout"),
        (429, "TooManyRequests", "", Unavailable, "TooManyRequests"),
    ],
)
async def test_the_code_of_s3_decides(
    storage: Storage, status: int, code: str, more: str, kind: type[P2PDistError], words: str
) -> None:
    """Whether to wait is not for the status to say, and the reason reaches the user."""
    storage.says_code(status, code, "It says so.", more)
    for read in (False, True):
        error = await _failure("s3://b/p", read=read)
        assert type(error) is kind
        _matches(words, error)
        assert "s3://b/p" in error.what
        assert "secret-of-the-key" not in str(error)


def _matches(words: str, error: P2PDistError) -> None:
    assert re.search(words, str(error), re.DOTALL), str(error)


async def test_what_head_may_not_say_is_asked_again(storage: Storage) -> None:
    """An answer to HEAD has no body, so a push, which begins with one, would hear `400 Bad
    Request`."""
    storage.says_code(400, "ExpiredToken")
    origin = open_origin("s3://b/p")
    with pytest.raises(Refused, match="expired"):
        await origin.size(DIGEST)
    await origin.close()


async def test_without_the_right_to_list_it_is_named(storage: Storage) -> None:
    """S3 then answers 403 also for what is missing."""
    storage.says_code(403, "AccessDenied")
    origin = open_origin("s3://b/p")
    with pytest.raises(Refused, match="s3:ListBucket"):
        await origin.notes()
    with pytest.raises(Refused, match=r"s3:ListBucket.*missing"):
        await origin.size(DIGEST)
    with pytest.raises(Refused, match=r"s3:PutObject|s3:ListBucket"):
        await origin.write_document(b"content")
    await origin.close()


async def test_storage_without_conditional_writes(
    storage: Storage, payload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(method: str, path: str, headers: Any) -> Reply | None:
        conditional = method == "PUT" and (headers.get("If-None-Match") or headers.get("If-Match"))
        return (501, "<Error><Code>NotImplemented</Code></Error>", {}) if conditional else None

    storage.fault = fault
    origin = open_origin("s3://b/p")
    assert isinstance(origin, LayoutOrigin)
    with pytest.raises(Refused, match="AWS_CONDITIONAL_PUT=disabled"):
        await store_file(origin, payload, "app:v1")
    await origin.close()
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")  # the user pushes alone
    origin = open_origin("s3://b/p")
    assert isinstance(origin, LayoutOrigin)
    _, first = await store_file(origin, payload, "app:v1")
    await store_file(origin, payload, "app:v2")
    assert [name for name, _ in await origin.tags()] == ["app:v1", "app:v2"]
    assert await origin.resolve(V1) == first
    await origin.close()


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (401, {"message": "Invalid Credentials", "errors": [{"reason": "authError"}]}, Refused, "not accepted"),
        (403, {"message": "no access", "errors": [{"reason": "forbidden"}]}, Refused, "storage.objects.get"),
        (403, {"message": "slower", "errors": [{"reason": "rateLimitExceeded"}]}, Unavailable, "rateLimitExceeded"),
        (404, {"message": "The specified bucket does not exist.", "status": "NOT_FOUND"}, NotFound, "does not exist"),
    ],
)
async def test_google_says_why(
    storage: Storage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    body: dict[str, Any],
    kind: type[P2PDistError],
    words: str,
) -> None:
    account = tmp_path / "account.json"
    account.write_text(
        json.dumps(
            {
                "gcs_base_url": storage.url,
                "disable_oauth": True,
                "client_email": "",
                "private_key": "",
                "private_key_id": "",
            }
        )
    )
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
    storage.says(status, json.dumps({"error": body}))
    error = await _failure("gs://b/p")
    assert type(error) is kind
    _matches(words, error)


@pytest.mark.parametrize(
    ("status", "code", "more", "kind", "words"),
    [
        (403, "AuthenticationFailed", "", Refused, "not accepted"),
        (
            403,
            "AuthenticationFailed",
            "<AuthenticationErrorDetail>Request date header too old</AuthenticationErrorDetail>",
            Refused,
            "clock",
        ),
        (403, "AuthorizationPermissionMismatch", "", Refused, "takes Read"),
        (404, "ContainerNotFound", "", NotFound, "container"),
        (503, "ServerBusy", "", Unavailable, "ServerBusy"),
    ],
)
async def test_azure_says_why(
    storage: Storage,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
    more: str,
    kind: type[P2PDistError],
    words: str,
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"key").decode())
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", storage.url)
    storage.says_code(status, code, "It says so", more)
    error = await _failure("az://container/p")
    assert type(error) is kind
    _matches(words, error)


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (401, Refused, "user:password@"),
        (403, Refused, "403 Forbidden"),
        (407, Refused, "407.*proxy"),
        (451, Refused, "451.*legal"),
        (400, Refused, "400"),
        (302, Refused, "redirects to nowhere"),
        (500, Unavailable, "500"),
        (503, Unavailable, "503"),
    ],
)
async def test_a_web_server_says_no(storage: Storage, status: int, kind: type[P2PDistError], words: str) -> None:
    storage.says(status, "<!DOCTYPE html><title>no</title>")
    error = await _failure(f"{storage.url}/p")
    assert type(error) is kind
    _matches(words, error)


@pytest.mark.parametrize("status", [404, 410])
async def test_what_a_web_server_lacks_is_missing(storage: Storage, status: int) -> None:
    storage.says(status, "")
    error = await _failure(f"{storage.url}/p", read=True)
    assert type(error) is NotFound


async def test_a_web_address_without_a_layout_is_no_empty_one(storage: Storage) -> None:
    """Nothing can be pushed there, so it is a mistake in the address."""
    error = await _failure(f"{storage.url}/mistyped")
    assert type(error) is NotFound
    assert f"no image layout at {storage.url}/mistyped" in error.what


async def test_a_login_page_is_no_layout(storage: Storage) -> None:
    """A captive portal answers everything with 200 and its own page."""
    storage.says(
        200,
        "  <!DOCTYPE html><title>Welcome to the hotel</title>",
        **{"Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"},
    )
    error = await _failure(f"{storage.url}/p")
    assert type(error) is Unavailable
    _matches("web page.*login page", error)


async def test_the_query_of_a_web_origin_goes_with_every_request(storage: Storage) -> None:
    """It may be a signature, so it is used, and shown to nobody."""
    storage.says(403, "")
    for read in (False, True):
        error = await _failure(f"{storage.url}/p?sig=abc&sp=r", read=read)
        assert type(error) is Refused
        assert "sig" not in str(error)
    assert storage.asked
    assert all(path.endswith("?sig=abc&sp=r") for path in storage.asked)


@pytest.mark.parametrize("url", ["s3://b/p?versionId=1", "gs://b/p?x=y", "http://host/p#part"])
def test_a_part_of_a_url_that_would_not_be_used_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="not used"):
        open_origin(url)


async def test_a_proxy_that_is_down_is_named(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://user:hidden@127.0.0.1:{free_port()}")
    error = await _failure(f"{storage.url}/p")
    assert type(error) is Unavailable
    _matches(r"through the proxy http://127\.0\.0\.1:\d+: connection refused.*NO_PROXY", error)
    assert "hidden" not in str(error)
    monkeypatch.setenv("no_proxy", "127.0.0.0/8")
    origin = open_origin(f"{storage.url}/p")
    assert await origin.size(DIGEST) is None
    await origin.close()


async def test_a_proxy_that_says_no_is_named(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", storage.url)
    monkeypatch.setenv("https_proxy", storage.url)
    storage.says(403, "")
    for scheme, kind in (("http", Refused), ("https", Unavailable)):
        error = await _failure(f"{scheme}://storage.invalid/p")
        assert type(error) is kind
        _matches(f"proxy {storage.url}", error)


@pytest.mark.parametrize(
    ("uri", "used"),
    [
        ("http://a.example/x", True),
        ("http://b.inside/x", False),
        ("http://inside/x", False),
        ("http://notinside/x", True),
        ("http://10.1.2.3/x", False),
        ("http://11.1.2.3/x", True),
        ("https://a.example/x", False),
    ],
)
def test_which_requests_go_through_a_proxy(monkeypatch: pytest.MonkeyPatch, uri: str, used: bool) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("http_proxy", "proxy:3128")
    monkeypatch.setenv("no_proxy", ".inside, 10.0.0.0/8")
    assert proxy_for(uri) == ("http://proxy:3128" if used else "")


async def test_a_name_that_nobody_knows(storage: Storage) -> None:
    error = await _failure("http://storage.invalid/p")
    assert type(error) is Unavailable
    _matches("host name is unknown", error)


async def test_a_redirect_in_a_circle_ends_at_once(storage: Storage) -> None:
    storage.says(302, "", Location="/index.json")
    failure = await _failure(storage.url)
    assert (type(failure), "in a circle" in failure.what) == (Refused, True), failure


@pytest.mark.parametrize("status", [400, 418])
async def test_a_web_server_that_refuses_otherwise_asks_for_no_credentials(storage: Storage, status: int) -> None:
    storage.says(status, "no")
    failure = await _failure(storage.url)
    assert (type(failure), "password" in failure.remedy, "log" in failure.remedy) == (Refused, False, True)
