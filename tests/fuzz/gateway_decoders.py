"""More decoders for hostile_bytes.py: requests of clients of registries, hubs and S3, settings of
these, callbacks, history, identities of SPIFFE, and what trackers say to each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from access_decoders import AUTHORITY, CERTIFICATE, NOW, Call, _file, _text
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from p2pdist.agent.access.spiffe import SpiffeSettings, _host_in
from p2pdist.agent.buckets.settings import parse_bucket, s3_settings
from p2pdist.credentials.authority import UNREADABLE
from p2pdist.gateway.registry.credentials import parse_credential
from p2pdist.gateway.registry.failures import RegistryFailure
from p2pdist.gateway.registry.names import parse_request as parse_image_request
from p2pdist.gateway.s3.failures import S3Failure
from p2pdist.gateway.s3.listing import After
from p2pdist.gateway.s3.names import page_size
from p2pdist.gateway.s3.names import parse_request as parse_object_request
from p2pdist.gateway.s3.signatures import UNSIGNED, AccessKey, SignedRequest, _Signature, signature, verify
from p2pdist.model.callback import SIGNATURE_HEADER, TIME_HEADER, check_callback
from p2pdist.model.callback import signature as callback_signature
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import UNDECODABLE, Corrupt, P2PDistError, Refused, Unauthenticated, UsageError
from p2pdist.model.history import HistoryPage, digest_prefix, parse_kinds, parse_since, short_name
from p2pdist.model.hub import HubLocation, check_listing, hub_name
from p2pdist.model.image_lists import decode_list, encode_list
from p2pdist.model.image_manifest import TagPage
from p2pdist.model.ownership import Ownership
from p2pdist.model.preseed import Progress
from p2pdist.model.upstream import parse_redirects, parse_upstream
from p2pdist.origin.answer import failure, read_answer
from p2pdist.origin.huggingface.hub import _decoded, _Entry, _listing
from p2pdist.transfer.stream.ranges import Unsatisfiable, parse_ranges
from tracker.callbacks import CallbackSettings, read_callbacks
from tracker.cluster.siblings import Held, HeldRequest, Known
from tracker.upstreams.settings import read_upstreams

KEY = AccessKey("AKEXAMPLE", "a secret of many letters")
DAY, DATE, DATE_S = "20260102", "20260102T030405Z", 1767323045.0
SCOPE = f"{DAY}/eu-1/s3/aws4_request"
CALLBACK_KEY = "k" * 40
BLOB = digest_of(b"blob")
PLAIN: tuple[type[BaseException], ...] = (P2PDistError,)
JSON: tuple[type[BaseException], ...] = (P2PDistError, *UNDECODABLE)


def _signed(text: str) -> SignedRequest:
    """A request whose path, query and fields stand on lines of their own."""
    path, query, *lines = [*text.split("\n"), "", ""][: text.count("\n") + 2]
    fields: dict[str, list[str]] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        fields.setdefault(name.lower(), []).append(value)
    return SignedRequest("GET", path, query, fields)


def _example(*, presigned: bool) -> bytes:
    """A request with a right signature."""
    query, lines = "list-type=2&prefix=a%2Fb", ["host: s3.example", f"x-amz-date: {DATE}", "x-amz-content-sha256: "]
    lines[2] += UNSIGNED
    names = ("host",)
    if presigned:
        query = f"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential={KEY.id}/{SCOPE}&X-Amz-Date={DATE}"
        query += "&X-Amz-Expires=600&X-Amz-SignedHeaders=host"
    shown = _Signature(KEY.id, SCOPE, names, "", DATE, UNSIGNED)
    value = signature(_signed("\n".join(["/weights/a%20b", query, *lines])), shown, KEY)
    if presigned:
        query += f"&X-Amz-Signature={value}"
    else:
        credential = f"Credential={KEY.id}/{SCOPE}, SignedHeaders=host, Signature={value}"
        lines.append(f"authorization: AWS4-HMAC-SHA256 {credential}")
    return "\n".join(["/weights/a%20b", query, *lines]).encode()


def _s3_signature(text: str) -> None:
    verify(_signed(text), {KEY.id: KEY}, now_s=DATE_S)


def _s3_request(text: str) -> None:
    """As the door reads path and query, which the HTTP server has split."""
    path, _, query = text.partition("?")
    fields = dict(part.partition("=")[::2] for part in query.split("&") if part)
    for method in ("GET", "HEAD"):
        parse_object_request(method, path, fields)
    page_size(fields)


def _image_request(text: str) -> None:
    path, _, namespace = text.partition("?ns=")
    parse_image_request(path, [namespace] if namespace else [], {"registry.example:5000"})


def _credential(text: str) -> None:
    found = parse_credential(text)
    assert found.authorization.isprintable() or not found.authorization.isascii()
    parse_credential(f"Bearer {found.carried}")


def _owners_alone(decode: Callable[[Path], object]) -> Callable[[Path], object]:
    """Calls a decoder of a file that only its owner may read."""

    def call(path: Path) -> object:
        path.chmod(0o600)
        return decode(path)

    return call


def _callback(body: bytes) -> Progress:
    """A callback that is signed, whatever it holds."""
    time = str(int(NOW))
    headers = {TIME_HEADER: time, SIGNATURE_HEADER: callback_signature(CALLBACK_KEY, time, body)}
    return check_callback(CALLBACK_KEY, headers, body, now=NOW)


def _callback_head(text: str) -> Progress:
    """Time and signature as a stranger sends them."""
    time, _, value = text.partition("\n")
    return check_callback(CALLBACK_KEY, {TIME_HEADER: time, SIGNATURE_HEADER: value}, PROGRESS, now=NOW)


def _history(text: str) -> None:
    parse_since(text, now=NOW)
    digest_prefix(text)
    short_name(text, text)


def _hub_listing(data: bytes) -> None:
    """What a hub lists, as the tracker takes it."""
    name = hub_name("models", "org/name")
    check_listing(name, _listing(name, "a" * 40, _decoded(data, list[_Entry], "https://hub.example")))


def _storage(text: str) -> P2PDistError:
    """What central storage answers, as the user is told."""
    return failure(read_answer(Exception(text)), "read index.json", "s3://b/p", "s3", "read")


def _svid(data: bytes) -> str:
    return _host_in(x509.load_der_x509_certificate(data), "prod")


def _from_json(kind: type) -> Callable[[bytes], object]:
    return lambda data: msgspec.json.decode(data, type=kind)


PROGRESS = msgspec.json.encode(
    {
        "id": "p1",
        "state": "done",
        "settled": True,
        "package": "a:b",
        "priority": "start",
        "hosts_total": 1,
        "hosts_done": 1,
        "hosts_absent": 0,
        "bytes_total": 5,
        "bytes_done": 5,
        "eta_s": None,
        "failures": [],
        "failures_by_reason": {},
        "replicas": {},
        "picked": [],
        "created_at": 1.0,
        "deadline_at": None,
        "expires_at": None,
    }
)
RECORD = (
    b'{"number":1,"at":5.0,"since":4.0,"tracker":"","event":{"kind":"host-lost","text":"t","host":"h1","zone":"z","rack":"r",'
    b'"reason":"x","began_s":1.0}}'
)
STORAGE = (
    b"Generic S3 error: Error performing GET https://s3.example/b/p?sig=T in 5ms - Server returned non-2xx status code: "
    b"403 Forbidden: <Error><Code>AccessDenied</Code><Message>no</Message><Region>eu-1</Region></Error>"
)
ENTRIES = msgspec.json.encode(
    [
        {"type": "file", "path": "a/b", "oid": "b" * 40, "size": 3, "lfs": {"oid": "c" * 64, "size": 3}},
        {"type": "directory", "path": "a", "oid": "d" * 40},
    ]
)


def calls() -> tuple[Call, ...]:
    """All of them."""
    buckets = f'[[bucket]]\nname = "weights"\nblobs = {{"a/b" = "{BLOB}"}}\n[[key]]\nid = "AK"\nsecret = "{"s" * 40}"\n'
    upstreams = (
        b'[[upstream]]\nhost = "registry.example"\nurl = "https://r.example"\ntags_ttl = "5m"\nnamespaces = ["a/*"]\n'
    )
    callbacks = f'hosts = ["*.example:443"]\nkey = "{CALLBACK_KEY}"\n'.encode()
    tags = encode_list(TagPage(("v1", "v2"), False)) or b""
    known = msgspec.json.encode(Known("team/app", BLOB))
    der = x509.load_pem_x509_certificate(CERTIFICATE).public_bytes(Encoding.DER)
    authority = x509.load_pem_x509_certificate(AUTHORITY.pem).public_bytes(Encoding.DER)
    allowed = CallbackSettings(("*.example:443",), CALLBACK_KEY)
    return (
        (
            "request for an object",
            _text(_s3_request),
            (S3Failure,),
            (b"/weights/a%2Fb?versionId=null", b"/weights?list-type=2"),
        ),
        (
            "signature of a request",
            _text(_s3_signature),
            (S3Failure,),
            (_example(presigned=False), _example(presigned=True)),
        ),
        ("continuation token", _text(After.parse), (), (After(b"a/b", False).token.encode(),)),
        ("bucket", _text(parse_bucket), (UsageError,), (b"weights=team/weights:v3",)),
        ("buckets file", _file(_owners_alone(lambda path: s3_settings((), path))), PLAIN, (buckets.encode(),)),
        (
            "request for an image",
            _text(_image_request),
            (RegistryFailure,),
            (b"/v2/team/app/manifests/v1?ns=registry.example", b"/v2/registry.example__5000/a/blobs/" + BLOB.encode()),
        ),
        (
            "credential of a registry client",
            _text(_credential),
            (Unauthenticated,),
            (b"Basic YTpi", b"Bearer basic.YTpi"),
        ),
        ("kept list of a registry", decode_list, (), (tags,)),
        ("upstream", _text(parse_upstream), (UsageError,), (b"registry.example:5000=http://10.0.0.1:5000",)),
        ("redirects", _text(lambda text: parse_redirects(text.split(","))), (UsageError,), (b"10.0.0.0/8,a.example",)),
        ("upstreams file", _file(read_upstreams, "upstreams.toml"), (UsageError,), (upstreams,)),
        ("listing of a hub", _hub_listing, (Corrupt, Refused, UsageError), (ENTRIES,)),
        (
            "location of a hub",
            _from_json(HubLocation),
            JSON,
            (b'{"url":"https://h.example/a","hub":"https://h.example"}',),
        ),
        ("callback", _callback, (Refused,), (PROGRESS,)),
        ("head of a callback", _text(_callback_head), (Refused,), (_callback_example(),)),
        ("URL of a callback", _text(allowed.check), (UsageError, Refused), (b"https://a.example/x?y=1",)),
        ("callbacks file", _file(_owners_alone(read_callbacks)), (UsageError,), (callbacks,)),
        ("kinds of history", _text(parse_kinds), (UsageError,), (b"host-lost",)),
        ("filter of history", _text(_history), (UsageError,), (b"2h", b"1767323045", BLOB.encode())),
        (
            "page of history",
            _from_json(HistoryPage),
            JSON,
            (b'{"records":[],"next":0}', b'{"records":[' + RECORD + b"]}"),
        ),
        ("answer of storage", _text(_storage), (), (STORAGE,)),
        ("address of a Workload API", _text(SpiffeSettings.parse), (UsageError,), (b"unix:///run/spire/api.sock",)),
        ("SVID", _svid, (*UNREADABLE, x509.ExtensionNotFound), (der, authority)),
        (
            "ranges",
            _text(lambda text: parse_ranges(text, 100_000, ranges_max=16)),
            (Unsatisfiable,),
            (b"bytes=0-99,200-299",),
        ),
        ("package that a tracker tells", _from_json(Known), JSON, (known,)),
        ("question of a tracker", _from_json(HeldRequest), JSON, (msgspec.json.encode(HeldRequest((BLOB,))),)),
        ("answer of a tracker", _from_json(Held), JSON, (msgspec.json.encode(Held((), {BLOB: {"h1": 5}}, {})),)),
        ("ownership", _from_json(Ownership), JSON, (_ownership(),)),
    )


def _callback_example() -> bytes:
    time = str(int(NOW))
    return f"{time}\n{callback_signature(CALLBACK_KEY, time, PROGRESS)}".encode()


def _ownership() -> bytes:
    return b'{"epoch":3,"trackers":[{"id":"t1","urls":["http://10.0.0.1:7070"],"share":1.0}],"pins":{}}'
