"""A real registry (Debian's docker-registry), open or with token authentication; the realm of its
tokens is a server of this process that gives them as the token specification says."""

from __future__ import annotations

import base64
import datetime
import json
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import jwt
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from ports import free_port

needs_registry = pytest.mark.skipif(shutil.which("docker-registry") is None, reason="needs docker-registry")
USER, PASSWORD = "someone", "pass:word/with?signs"


@dataclass
class Realm:
    """Gives tokens to USER for what is asked, and to everybody else for nothing but `public/`."""

    lasts_s: int = 300
    asked: list[dict[str, list[str]]] = field(default_factory=list)
    accounts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "realm")])
        now = datetime.datetime.now(datetime.UTC)
        self.certificate = (
            x509.CertificateBuilder(name, name, self._key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .sign(self._key, hashes.SHA256())
        )

    def token(self, scopes: list[str], known: bool) -> str:
        access = []
        for scope in scopes:
            kind, name, actions = scope.split(":")
            if known or name.startswith("public/"):
                access.append({"type": kind, "name": name, "actions": actions.split(",") if known else ["pull"]})
        der = self.certificate.public_bytes(serialization.Encoding.DER)
        at = int(time.time())
        claims = {"iss": "realm", "sub": USER, "aud": "registry", "nbf": at - 10, "iat": at, "exp": at + self.lasts_s}
        claims |= {"jti": str(len(self.asked)), "access": access}
        return jwt.encode(claims, self._key, "ES256", headers={"x5c": [base64.b64encode(der).decode()]})

    def handler(self) -> type[BaseHTTPRequestHandler]:
        realm = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                query = parse_qs(urlsplit(self.path).query)
                given = self.headers.get("Authorization", "")
                known = given == "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
                realm.asked.append(query)
                realm.accounts.append(given)
                if given and not known:
                    self.send_error(401)
                    return
                body = json.dumps({"token": realm.token(query["scope"], known), "expires_in": realm.lasts_s}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        return Handler


@dataclass
class Registry:
    """A running registry, and its files."""

    address: str
    root: Path
    realm: Realm | None
    log: Path

    def url(self, repository: str, user: str = "") -> str:
        return f"oci://{user + '@' if user else ''}{self.address}/{repository}"

    def requests(self, method: str) -> int:
        """How many requests of a method it has logged."""
        return sum(f'"{method} ' in line for line in self.log.read_text().splitlines())


@contextmanager
def running_registry(place: Path, realm: Realm | None = None) -> Iterator[Registry]:
    """Start a registry below `place`, and end it."""
    place.mkdir(parents=True, exist_ok=True)
    port = free_port()
    config = {
        "version": 0.1,
        "log": {"level": "warn", "accesslog": {"disabled": False}},
        "storage": {"filesystem": {"rootdirectory": str(place / "data")}, "delete": {"enabled": True}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    server = None
    if realm is not None:
        server = ThreadingHTTPServer(("127.0.0.1", 0), realm.handler())
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        (place / "realm.pem").write_bytes(realm.certificate.public_bytes(serialization.Encoding.PEM))
        address = f"http://127.0.0.1:{server.server_port}/token"
        token = {"realm": address, "service": "registry", "issuer": "realm", "rootcertbundle": str(place / "realm.pem")}
        config["auth"] = {"token": token}
    (place / "config.yml").write_text(yaml.safe_dump(config))
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(place / "config.yml")], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=2).close()
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.05)
        yield Registry(f"127.0.0.1:{port}", place / "data", realm, place / "log")
    finally:
        process.terminate()
        process.wait(60)
        if server is not None:
            server.shutdown()
            server.server_close()
