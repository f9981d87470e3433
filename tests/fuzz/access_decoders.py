"""More decoders for hostile_bytes.py: those of access control, of an agent's and a tracker's own
files, and of what other programs wrote."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from p2pdist.agent.access.identity import _Record
from p2pdist.agent.access.peers import Peers
from p2pdist.agent.tracker.policies import _read as read_remembered
from p2pdist.cli.verbs.slurm.job import is_job
from p2pdist.client.access import _check_expiry
from p2pdist.core.trackerless import read_text
from p2pdist.credentials.authority import (
    Authority,
    expires_at,
    make_key,
    make_request,
    owner_of,
    pinned,
    renews_at,
    split_pem,
)
from p2pdist.credentials.join import JoinToken
from p2pdist.credentials.signing import SigningKey
from p2pdist.credentials.tokens import create_token, split_token, unverified, verify_token
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import UNDECODABLE, P2PDistError, Unauthenticated, UsageError
from p2pdist.model.messages import Access, Joined, JoinRequest, RenewRequest, encode
from p2pdist.model.preseed import RankRequest, decode_request
from p2pdist.model.url import redacted, secrets_in
from p2pdist.mount.records import _parse as parse_record
from p2pdist.mount.records import parse_process
from p2pdist.origin.registry.accounts import docker_accounts
from p2pdist.origin.registry.client import _reason
from p2pdist.package.repository.gc import read_document
from p2pdist.package.source.project import read_project
from p2pdist.package.source.trace import read_trace
from p2pdist.store.watch import _events
from p2pdist.transfer.guard import _plain
from tracker.access.file import TEMPLATE, check_revoked, read_rules
from tracker.core.policy.table import parse_pattern
from tracker.networks import parse_networks
from tracker.policies import check_policies

Call = tuple[str, Callable[[bytes], object], tuple[type[BaseException], ...], tuple[bytes, ...]]
"""Name, call, failures and examples, as Decoder has them."""

PLAIN: tuple[type[BaseException], ...] = (P2PDistError,)
NOW = time.time()
AUTHORITY = Authority.create("prod", now=NOW)
KEY = SigningKey.create()
REQUEST = make_request(make_key())
CERTIFICATE = AUTHORITY.issue(REQUEST, "agent", "h1", ["127.0.0.1", "h1.example"], now=NOW, join="default")
TOKEN, _ = create_token(KEY, "prod", AUTHORITY.fingerprint, "reader", name="x", now=NOW, lasts_s=3600.0)
ACCESS = encode(
    Access(
        {KEY.name: KEY.public},
        AUTHORITY.pem.decode(),
        ("host:h2", "join:a"),
        ("public/*",),
        {"group:a": ("a/*",)},
        ("/srv",),
        fleet="prod",
        roles={"reader": ("watch",)},
    )
)


def _text(decode: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: decode(data.decode("utf-8", "surrogateescape"))


def _file(decode: Callable[[Path], object], name: str = "file") -> Callable[[bytes], object]:
    directory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    path = directory / f"p2pdist-fuzz-{os.getpid()}-{id(decode)}" / name

    def call(data: bytes) -> object:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        try:
            return decode(path)
        finally:
            path.unlink()
            path.parent.rmdir()

    return call


def _bearer(data: bytes) -> None:
    """As the tracker takes the token of an Authorization field."""
    _, jwt = split_token(data.decode("latin-1"))
    unverified(jwt)
    verify_token(jwt, {KEY.name: KEY.public}, "prod")


def _own_token(data: bytes) -> None:
    """As a command looks at its own token."""
    _, jwt = split_token(data.decode("ascii", "replace").strip())
    _check_expiry(jwt)


def _access(data: bytes) -> None:
    """As an agent takes what a tracker says, or it kept, of access."""
    peers = Peers(Path("/nonexistent"), "h1", required=True, secured=False, clock=lambda: NOW, alone=lambda: False)
    peers._take(msgspec.json.decode(data, type=Access))
    peers.is_revoked("h1", "a")


def _certificate(data: bytes) -> None:
    owner_of(data)
    expires_at(data)
    renews_at(data)


def _join(data: bytes) -> None:
    """As a tracker takes a join."""
    request = decode_request(data, JoinRequest)
    JoinToken.parse(request.token)
    AUTHORITY.issue(request.request.encode(), "agent", request.host, request.addresses, now=NOW, join="default")


def _announced(data: bytes) -> None:
    """As the TXT record of a neighbour is read."""
    pairs = (entry.partition(b"=") for entry in data.split(b"\0"))
    read_text({key: value if mark else None for key, mark, value in pairs}, "10.0.0.1:7071")


def _url(text: str) -> None:
    redacted(text)
    secrets_in(text)


def _revoked(data: bytes) -> None:
    for line in data.decode(errors="replace").splitlines():
        check_revoked(line.strip())


def _json(kind: Any) -> Callable[[bytes], object]:
    return lambda data: decode_request(data, kind)


def calls() -> tuple[Call, ...]:
    """All of them."""
    join = JoinToken.create(AUTHORITY.fingerprint, "default")
    record = b'{"id":"%s","target":"/v","how":"overlay","images":["/a"],"owner":"12:34","label":"a b 0"}' % (b"ab" * 8)
    undecodable = (P2PDistError, *UNDECODABLE)
    manifest = b'{"schemaVersion":2,"config":{"digest":"%s","size":5,"mediaType":"x"},"layers":[]}'
    txt = b"txtvers=1\0net=default\0host=h1\0zone=z\0rack=r\0proto=1\0tls=0\0origin=1"
    policies = b'[[policy]]\nmatch = "a/*"\npriority = "start"\ncache = "ttl"\nttl = "3d"\n'
    joining = msgspec.json.encode(JoinRequest(str(join), "h1", REQUEST.decode(), ("127.0.0.1",)))
    joined = msgspec.json.encode(Joined("prod", CERTIFICATE.decode(), AUTHORITY.pem.decode()))
    member = msgspec.json.encode(_Record("prod", "h1", join.pin, "default"))
    remembered = b'{"a:b":{"policy":{"match":"a"},"manifest":"%s"}}' % digest_of(b"m").encode()
    return (
        ("join token", _text(JoinToken.parse), (UsageError,), (str(join).encode(),)),
        ("bearer", _bearer, (Unauthenticated, UsageError), (TOKEN.encode(),)),
        ("token of a command", _own_token, (Unauthenticated, UsageError), (TOKEN.encode(),)),
        ("access file", lambda data: read_rules(data, "f"), (UsageError,), (TEMPLATE.encode(),)),
        ("revocations", _revoked, (UsageError,), (b"host:h1\ntoken:abc\n",)),
        ("access message", _access, undecodable, (ACCESS,)),
        ("certificate", _certificate, (P2PDistError, ValueError), (CERTIFICATE,)),
        ("authorities", lambda data: pinned(data, AUTHORITY.fingerprint), PLAIN, (AUTHORITY.pem,)),
        ("certificates", split_pem, PLAIN, (AUTHORITY.pem + CERTIFICATE,)),
        ("join request", _join, PLAIN, (joining,)),
        (
            "renewal request",
            _json(RenewRequest),
            PLAIN,
            (msgspec.json.encode(RenewRequest(REQUEST.decode(), ("::1",))),),
        ),
        ("joined", lambda data: msgspec.json.decode(data, type=Joined), undecodable, (joined,)),
        ("kept identity", lambda data: msgspec.json.decode(data, type=_Record), undecodable, (member,)),
        ("signing key", SigningKey.load, PLAIN, (KEY.pem,)),
        ("rank request", _json(RankRequest), PLAIN, (b'{"packages":["a:b"],"hosts":["h1"],"coherent":"rack"}',)),
        ("networks", _text(parse_networks), (UsageError,), (b"10.0.0.0/8, fd00::/8",)),
        ("pattern", _text(parse_pattern), (UsageError, ValueError), (b"team/*:v1",)),
        ("policies file", _file(check_policies), (), (policies,)),
        ("policies that were heard", _file(read_remembered), (), (remembered,)),
        ("announced text", _announced, (P2PDistError, ValueError), (txt,)),
        ("record of a view", _file(parse_record, f"{'ab' * 8}.json"), (), (record,)),
        ("process of a view", _text(parse_process), (ValueError,), (b"12:34",)),
        (
            "project",
            _file(read_project, "p2pdist.toml"),
            PLAIN,
            (b'name = "a/b"\n[env]\nA = "1"\n[[layer]]\nsource = "x"\n',),
        ),
        ("trace", _file(read_trace), PLAIN, (b'{"version":1,"root":"/a","files":["a"],"modules":["m"]}',)),
        ("Slurm job", _text(is_job), (), (b"1234_5",)),
        ("document of a collection", _collected, PLAIN, (manifest % digest_of(b"c").encode(),)),
        ("error of a registry", lambda data: _reason(data, "x"), (), (b'{"errors":[{"code":"A","message":"b"}]}',)),
        ("account of a registry", _account, PLAIN, (b'{"auths":{"r.example":{"auth":"YTpi"}}}',)),
        ("changes of files", _changes, (), (b"\1\0\0\0\2\0\0\0\0\0\0\0\4\0\0\0abc\0",)),
        ("host field", _text(_plain), (), (b"[::1]:7070", b"a.example:80")),
        ("URL", _text(_url), (), (b"https://u:secret@h/p?sig=TOKEN", b"s3://b/p")),
    )


def _collected(data: bytes) -> object:
    return read_document(data, "application/vnd.oci.image.manifest.v1+json")


_account = _file(lambda path: docker_accounts("r.example", path), "config.json")


def _changes(data: bytes) -> list[Any]:
    """What the kernel says, cut to whole events as it always is."""
    whole, at = b"", 0
    while at + 16 <= len(data):
        length = int.from_bytes(data[at + 12 : at + 16], "little")
        if at + 16 + length > len(data):
            break
        whole, at = whole + data[at : at + 16 + length], at + 16 + length
    return list(_events(whole))
