"""Whole processes: every route of tracker and agent answers what no client should send, and none of
it is the service's fault (5xx)."""

from __future__ import annotations

import contextlib
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from site_rig import Site

from p2pdist.agent.api.server import LOCAL_ROUTES, PUBLIC_ROUTES
from p2pdist.transfer.openapi import Route
from tracker.http.app import ROUTES
from tracker.http.scheduler import PRESEED_ROUTES

pytestmark = pytest.mark.slow

WAITS_S = 0.5
"""An answer that comes later is missed, and proves nothing."""

PARAMETER = re.compile(r"\{\w+(:[^{}]*)?\}")
DEEP = b"[" * 100_000 + b"]" * 100_000
BODIES = (
    b"",
    b"null",
    b"[]",
    b"NaN",
    b'{"a":NaN}',
    b'{"a":1e999}',
    b"\xff\xfe\x00",
    b'{"blob":"\\ud800","package":"\\u0000"}',
    b'{"seconds":1e400,"wait_s":-1,"count":99999999999999999999999999}',
    b'{"seconds":"NaN","package":{},"packages":[1],"hosts":"h"}',
    b'{"package":"a:b","hosts":["' + b"x" * 70_000 + b'"]}',
    b'{"package":"..:..","selector":{"":""},"count":-1,"ttl_s":-5,"priority":"x"}',
    b'{"package":"a:b","path":"/a\\u0000b","output":"/a\\u0000b","owner":"\\u0000"}',
    b'{"package":"a:b","path":"/' + b"a/" * 5000 + b'","how":"nonsense"}',
    b'{"blob":"sha256:' + b"0" * 64 + b'","output":"/a\\u0000b","wait":true}',
    b'{"packages":["a:b"],"count":1e300,"selector":"zone=a"}',
    b'{"blob":"sha256:' + b"0" * 64 + b'","stripe":0,"stripes":1,"have":"!!!!","host":"h"}',
    b'{"blob":"sha256:' + b"0" * 64 + b'","stripe":-1,"stripes":99999,"have":"","host":"h"}',
    b'{"blob":"sha512:zz","stripe":0,"stripes":1,"have":"AA==","host":"h"}',
    DEEP,
    b'{"a":' * 100_000,
)
WORDS = (
    *("x", "%00", "%ff%fe", "%", "%zz", "..%2f..%2fetc", "a" * 5000, "%F0%9F%92%A9", "-1", "1e999", "NaN"),
    *("sha256:", "sha256:" + "0" * 64, "sha256:" + "G" * 64),
)
FIELDS = (
    b"Content-Encoding: gzip\r\n",
    b"Content-Encoding: br\r\n",
    b"Content-Encoding: deflate\r\n",
    b"Content-Encoding: nonsense\r\n",
    b"Content-Type: application/json; charset=nonsense\r\n",
    b"Content-Type: multipart/form-data\r\n",
    b"Content-Type: \xff\xff\r\n",
    b"Range: bytes=99999999999999999999-\r\n",
    b"Range: bytes=5-1\r\n",
    b"Range: " + b"bytes=0-0," * 500 + b"\r\n",
    b"If-Match: nonsense\r\n",
    b'If-None-Match: W/"\xff"\r\n',
    b"If-Modified-Since: yesterday\r\n",
    b"Accept-Encoding: \x80\r\n",
    b"X-Request-ID: \xff\r\n",
    b"Cookie: a=\xff;;;=\r\n",
    b"Expect: 100-continue\r\n",
    b"Expect: nonsense\r\n",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: !\r\n",
    b"Host: \r\nHost: b\r\n",
    b"X: " + b"y" * 20_000 + b"\r\n",
    b"".join(b"X%d: y\r\n" % number for number in range(500)),
)
FRAMINGS = (
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nabc",
    b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc",
    b"Transfer-Encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"Content-Length: -1\r\n\r\n",
    b"Content-Length: 99999999999999999999\r\n\r\n{}",
    b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"Content-Length: \xb2\r\n\r\n{}",
)


class Target:
    """A service, by its TCP port or its Unix socket."""

    def __init__(self, name: str, where: int | Path, routes: tuple[Route, ...]) -> None:
        self.name, self.where, self.routes = name, where, routes

    def statuses(self, data: bytes) -> list[int]:
        """What it answers to these bytes; nothing where it waits for more, streams or hangs up."""
        family = socket.AF_UNIX if isinstance(self.where, Path) else socket.AF_INET
        address = str(self.where) if isinstance(self.where, Path) else ("127.0.0.1", self.where)
        answer = b""
        with socket.socket(family) as connection, contextlib.suppress(OSError):
            connection.settimeout(WAITS_S)
            connection.connect(address)
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            while len(answer) < 1 << 20 and (part := connection.recv(1 << 16)):
                answer += part
        return [int(status) for status in re.findall(rb"^HTTP/1\.[01] (\d{3})", answer, re.MULTILINE)]


def request(method: str, path: str, fields: bytes = b"", body: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n".encode("latin-1")
    return head + fields + b"Content-Length: %d\r\n\r\n" % len(body) + body


def hostile(route: Route) -> Iterator[bytes]:
    """What no client should send to a route, and nothing that the service may well carry out."""
    filled = PARAMETER.sub("x", route.path)
    for word in WORDS:
        if route.parameters:
            yield request(route.method, PARAMETER.sub(word, route.path))
        for query in route.query:
            yield request(route.method, f"{filled}?{query.name}={word}&{query.name}={word}")
    if route.request is not None:
        for body in BODIES:
            if not (route.path == "/v1/drain" and body.startswith((b"{", b"null", b""))):
                yield request(route.method, filled, body=body)
        yield request(route.method, filled, b"Content-Type: text/plain\r\n", b"\x80")
    for fields in FIELDS:
        yield request(route.method, filled, fields, b"nonsense")
    for framing in FRAMINGS:
        yield f"{route.method} {filled} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n".encode() + framing
    for method in ("PATCH", "OPTIONS", "TRACE", "get", "G\xffT", "A" * 9000):
        yield request(method, filled)
    yield f"{route.method} {filled} HTTP/9.9\r\n\r\n".encode()
    yield f"{route.method} {filled}\r\n\r\n".encode()
    yield f"{route.method} {filled}?{'q=1&' * 5000} HTTP/1.1\r\nHost: a\r\n\r\n".encode()


def test_no_request_is_the_services_fault(site: Site) -> None:
    """Every route, over TCP and on the Unix socket; and both processes work on."""
    digest = site.publish(1000)
    (agent,) = site.agents(1)
    agent.pull(blob=digest)
    targets = (
        Target("tracker", site.tracker_port, (*ROUTES, *PRESEED_ROUTES)),
        Target("agent", agent.port, PUBLIC_ROUTES),
        Target("socket", agent.socket, LOCAL_ROUTES),
    )
    faults, count, answered = [], 0, 0
    for target in targets:
        for route in target.routes:
            for data in hostile(route):
                statuses = target.statuses(data)
                count, answered = count + 1, answered + bool(statuses)
                faults += [(target.name, status, data[:300]) for status in statuses if status >= 500]
    assert not faults, (len(faults), faults[:20])
    assert answered > count // 2
    for log in (agent.log, site.directory / "tracker.log"):
        assert "Traceback" not in log.read_text()
    assert urllib.request.urlopen(f"{agent.url}/healthz", timeout=60).status == 200
    assert agent.pull(blob=digest, wait=True).state == "done"
