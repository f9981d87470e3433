"""Real servers for the origin drivers: nginx over a directory, and moto's S3."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from waits import wait_until

from p2pdist.model.digest import Digest
from p2pdist.model.manifest import (
    BLOB_TYPE,
    CONFIG_TYPE,
    MANIFEST_TYPE,
    Config,
    Descriptor,
    Manifest,
    encode_config,
    encode_manifest,
    parse_reference,
)
from p2pdist.origin.drivers import open_origin
from p2pdist.origin.layout import LayoutOrigin, blob_key
from p2pdist.package.repository.contract import read_content

BUCKET = "packages"


@dataclass
class Web:
    """A running nginx: `url` of the directory it serves, and its access log (one line a request:
    connection, method, status, range)."""

    url: str
    log: Path

    def requests(self, count: int) -> list[list[str]]:
        """So many requests at least: nginx writes a line after the answer has gone."""
        wait_until(lambda: len(self.log.read_text().splitlines()) >= count, f"request {count}")
        return [line.split(" ") for line in self.log.read_text().splitlines()]


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Callable[..., Web]]:
    """Starts nginx over a directory; `location` is more configuration for the server block."""
    running: list[subprocess.Popen[bytes]] = []

    def start(directory: Path, location: str = "") -> Web:
        home = tmp_path / f"nginx{len(running)}"
        home.mkdir()
        port = free_port()
        temporary = "".join(
            f"{kind}_temp_path {home}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (home / "nginx.conf").write_text(f"""
            {"user root;" if os.geteuid() == 0 else ""}
            daemon off; pid {home}/pid; error_log {home}/error.log; worker_processes 1; events {{}}
            http {{ {temporary} log_format short '$connection $request_method $status $http_range';
              server {{ listen 127.0.0.1:{port}; access_log {home}/access.log short; root {directory}; {location} }} }}
        """)
        command = ["nginx", "-c", str(home / "nginx.conf"), "-p", str(home), "-e", str(home / "error.log")]
        running.append(subprocess.Popen(command))
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "nginx did not start"
                time.sleep(0.02)
        return Web(f"http://127.0.0.1:{port}", home / "access.log")

    yield start
    for process in running:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    from moto.moto_server import threaded_moto_server as moto  # takes long to import, for every worker

    make_server, turn = moto.make_server, threading.Lock()

    def one_by_one(host: str, port: int, app: Any, *rest: Any, **options: Any) -> Any:
        """moto compares and writes in two steps: of two writes at once both might be taken."""

        def answer(environ: Any, start: Any) -> Any:
            with turn:
                return app(environ, start)

        return make_server(host, port, answer, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moto, "make_server", one_by_one)
        server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A boto3 client of a server with one empty bucket, to which the environment points."""
    import boto3

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-key")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    client = boto3.client("s3", endpoint_url=s3_server, region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)
    yield client
    for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=item["Key"])
    client.delete_bucket(Bucket=BUCKET)


@dataclass
class Place:
    """An origin that can be written to, and `overwrite(key, data)`, which damages it behind its
    back."""

    origin: LayoutOrigin
    url: str
    overwrite: Callable[[str, bytes], None]

    def damage(self, digest: Digest, data: bytes) -> None:
        self.overwrite(blob_key(digest), data)


@pytest.fixture(params=["file", "s3"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """The same expectations hold for every driver that can write."""
    if request.param == "file":
        root = tmp_path / "origin"
        url = root.as_uri()

        def overwrite(key: str, data: bytes) -> None:
            (root / key).write_bytes(data)
    else:
        client = request.getfixturevalue("s3")
        url = f"s3://{BUCKET}/some/prefix"

        def overwrite(key: str, data: bytes) -> None:
            client.put_object(Bucket=BUCKET, Key=f"some/prefix/{key}", Body=data)

    origin = open_origin(url)
    assert isinstance(origin, LayoutOrigin)
    yield Place(origin, url, overwrite)
    await origin.close()


async def store_file(origin: LayoutOrigin, path: Path, tag: str) -> tuple[Digest, Descriptor]:
    """Write a file as a package of one layer; returns the layer's digest and the manifest's
    descriptor."""
    content = read_content(path)
    await origin.write_blob(content.digest, path)
    await origin.write_document(content.pieces.encode())
    config = encode_config(Config())
    described = Descriptor(CONFIG_TYPE, await origin.write_document(config), len(config))
    body = encode_manifest(Manifest(described, (content.descriptor(BLOB_TYPE),), (content.pieces_descriptor(),)))
    manifest = Descriptor(MANIFEST_TYPE, await origin.write_document(body), len(body))
    await origin.tag(parse_reference(tag), manifest)
    return content.digest, manifest


@pytest.fixture
def payload(tmp_path: Path) -> Path:
    path = tmp_path / "payload"
    path.write_bytes(os.urandom(300_000))
    return path
