"""A proxy in front of a mirror or a registry that notes each request, and notes as fixtures: what
real clients ask, in words that fit any image."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from images_rig import Image

CALLS = Path(__file__).parent / "calls"
KEPT_HEADERS = ("Accept", "Accept-Encoding", "Range", "If-Range", "If-None-Match")
HOP = frozenset(["connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host"])


@dataclass(frozen=True)
class Call:
    """One request, and how it was answered."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...]
    headers: tuple[tuple[str, str], ...]
    status: int
    sent: int
    """Bytes of the body that went to the client."""


@dataclass
class Watch:
    """A running proxy."""

    address: str
    calls: list[Call] = field(default_factory=list)

    def bytes_of(self, digest: str) -> int:
        return sum(call.sent for call in self.calls if call.path.endswith(digest) and call.method == "GET")


@contextmanager
def watching(target: str) -> Iterator[Watch]:
    """A proxy before `target`, HOST:PORT."""
    watch = Watch("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def relay(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length) if length else None
            given = [(name, value) for name, value in self.headers.items() if name.lower() not in HOP]
            sent, status = 0, 502
            try:
                behind = http.client.HTTPConnection(target, timeout=60)
                # Locations and realms of an answer name the address that the client used.
                behind.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in [("Host", self.headers.get("Host", target)), *given]:
                    behind.putheader(name, value)
                behind.endheaders(body)
                answer = behind.getresponse()
                status = answer.status
                self.send_response_only(status)
                known = answer.getheader("Content-Length") is not None or self.command == "HEAD" or status in (204, 304)
                for name, value in answer.getheaders():
                    if name.lower() not in HOP:
                        self.send_header(name, value)
                if not known:
                    self.send_header("Connection", "close")
                    self.close_connection = True
                self.end_headers()
                while self.command != "HEAD" and (data := answer.read1(1 << 16)):
                    sent += len(data)
                    self.wfile.write(data)
                behind.close()
            except OSError:
                self.close_connection = True
                if not sent:
                    self.send_error(502)
            finally:
                parts = urlsplit(self.path)
                # Some send a line for each type that they take, in any order.
                lines = {name: sorted(self.headers.get_all(name, [])) for name in KEPT_HEADERS}
                kept = tuple((name, ", ".join(values)) for name, values in lines.items() if values)
                query = tuple(parse_qsl(parts.query, keep_blank_values=True))
                watch.calls.append(Call(self.command, parts.path, query, kept, status, sent))

        do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = relay

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    watch.address = f"127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield watch
    finally:
        server.shutdown()
        server.server_close()


# -- fixtures

Row = dict[str, object]


def names_of(image: Image, upstream: str, path_upstream: str, repository: str, tag: str) -> dict[str, str]:
    """What stands in a fixture for what a test made up."""
    names = {f"{{layer{number}}}": layer.digest for number, layer in enumerate(image.layers)} | {
        "{config}": image.config.digest,
        "{manifest}": image.manifest.digest,
    }
    if image.index is not None:
        names["{index}"] = image.index.digest
    return names | {"{upstream}": upstream, "{path_upstream}": path_upstream, "{repository}": repository, "{tag}": tag}


def rows_of(calls: list[Call], names: dict[str, str]) -> list[Row]:
    """Calls as a fixture has them: digests, repository and upstream by their names, and in an order
    that does not depend on which layer comes first."""
    rows = []
    for call in calls:
        path = call.path
        for name in ("{path_upstream}", "{upstream}", "{repository}", *names):
            path = path.replace(names[name], name) if name != "{tag}" else path
        path = path.removesuffix(f"/{names['{tag}']}") + ("/{tag}" if path.endswith(f"/{names['{tag}']}") else "")
        query = {key: "{upstream}" if value == names["{upstream}"] else value for key, value in call.query}
        rows.append({"method": call.method, "path": path, "query": query, "headers": dict(call.headers)})
    return sorted({json.dumps(row, sort_keys=True): row for row in rows}.values(), key=_order)


def _order(row: Row) -> tuple[int, str, str]:
    path = str(row["path"])
    place = 0 if path == "/v2/" else 1 if "/manifests/{tag}" in path else 2 if "/manifests/" in path else 3
    return place, path, str(row["method"])


def filled(row: Row, names: dict[str, str]) -> tuple[str, str, dict[str, str]]:
    """Method, path with query, and headers of a row with these names."""
    path, query = str(row["path"]), row["query"]
    assert isinstance(query, dict) and isinstance(row["headers"], dict)
    for name, value in names.items():
        path = path.replace(name, value)
        query = {key: str(said).replace(name, value) for key, said in query.items()}
    text = "&".join(f"{key}={value}" for key, value in query.items())
    return str(row["method"]), f"{path}?{text}" if text else path, dict(row["headers"])
