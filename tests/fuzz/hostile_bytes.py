"""Every decoder of bytes that come from a network or lay on a disk, by name, with examples of what
it decodes and the failures that it may raise; and a loop that gives it random and mutated bytes.

A decoder that raises anything else, or takes far longer or far more memory than its input explains,
is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import random
import socket
import tarfile
import tempfile
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes
from uuid import UUID

import access_decoders
import gateway_decoders
import msgspec
import sealed_decoders

from p2pdist.gateway.huggingface.names import parse_request as parse_hub_request
from p2pdist.load.header import decode_header
from p2pdist.model import bencode, manifest, messages, policy, torrent, tree
from p2pdist.model.access import Ticket, decode_ticket, encode_ticket
from p2pdist.model.address import parse_address
from p2pdist.model.bootstrap import decode_bootstrap, encode_bootstrap
from p2pdist.model.catalog import Catalog, ChunkEncoder, Pack, decode_catalog, decode_chunk, encode_catalog, record
from p2pdist.model.device import DeviceLayout
from p2pdist.model.digest import digest_of, parse_digest
from p2pdist.model.errors import (
    UNDECODABLE,
    Corrupt,
    NotFound,
    P2PDistError,
    Refused,
    TooLarge,
    UsageError,
    from_problem,
)
from p2pdist.model.hub import HubFile, HubListing, check_listing, decode_listing, hub_name, parse_hub
from p2pdist.model.image import parse_image
from p2pdist.model.image_manifest import decode_image
from p2pdist.model.messages import STREAM_END, StreamRequest
from p2pdist.model.modelpack import decode_model, model_entries
from p2pdist.model.pieces import PieceLayout, PieceList, PieceSet
from p2pdist.model.plan import Plan, Source, StripePlan
from p2pdist.model.platform import parse_platform
from p2pdist.model.preseed import PreseedRequest, decode_request
from p2pdist.model.trace import Span, Trace, Traced, decode_trace, encode_trace
from p2pdist.model.units import parse_duration, parse_rate, parse_size
from p2pdist.mount import executable, squashfs
from p2pdist.mount.erofs.patch import patch_image
from p2pdist.mount.erofs.writer import is_image, write_image
from p2pdist.package.archive.untar import Applied, apply_tar
from p2pdist.store.blobs.bitmap import BitmapFile, read_bitmap
from p2pdist.store.blobs.hashes import HashesFile, StoredHash, read_hashes
from p2pdist.store.trees.reader import KnownPage
from p2pdist.transfer.connections import address_key
from p2pdist.transfer.stream.frames import FRAME, CutShort, FrameReader
from p2pdist.transfer.stream.ranges import Unsatisfiable, parse_range
from p2pdist.transfer.stream.response import EndOfConnection, MalformedResponse, parse_head, read_head, read_problem
from tracker.core.policy.table import read_table
from tracker.core.preseeds.selectors import parse_selector
from tracker.http.bittorrent import announce_of, parse_query

_PART = b'{"mediaType":"a/b","digest":"sha256:%s","size":5,"platform":{"os":"linux","architecture":"arm"}}' % (
    b"0" * 64
)
IMAGE_MANIFESTS = (
    b'{"schemaVersion":2,"config":%s,"layers":[%s]}' % (_PART, _PART),
    b'{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[%s,%s]}' % (_PART, _PART),
)
MODEL = (
    b'{"artifactType":"application/vnd.cncf.model.manifest.v1+json","config":%s,"layers":[{"mediaType":'
    b'"application/vnd.cncf.model.weight.v1.raw","digest":"sha256:%s","size":4,"annotations":{"org.cncf.model.filepath":"a/b",'
    b'"org.cncf.model.file.metadata+json":"{\\"mode\\":420}"}}]}' % (_PART, b"1" * 64)
)
HEADER = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
SECONDS_MAX = 2.0
MEMORY_A_BYTE, MEMORY_SPARE = 600, 48 << 20
"""Most memory that an input may take while it is decoded."""

PROGRESS_S = 10.0
WARM_INPUTS, KEPT_MAX = 1000, 128 << 20
"""After so many inputs a decoder has what it keeps, and takes no more than KEPT_MAX beyond that."""

RANDOM_BYTES_MAX = 600
"""Longest random input; mutated ones are as long as their examples or a little longer."""

LOUD = (
    *(b"\x00", b"\xff", b"\x7f\xff\xff\xff", b"\xff" * 8, b"\x80", b"\xdf\xff\xff\xff\xff"),
    *(b"-1", b"99999999999999999999", b"NaN", b"1e999", b'"', b"{", b"[", b"\\u0000", b"\r\n", b"..", b"/"),
    *(b"e", b"i0e", b"d"),
)
"""Bytes that mean something to some decoder."""


@dataclass(frozen=True)
class Decoder:
    """One decoder: how it is called, what it may raise, and inputs that it accepts."""

    name: str
    decode: Callable[[bytes], object]
    raises: tuple[type[BaseException], ...]
    examples: tuple[bytes, ...]


def inputs(decoder: Decoder, count: int, seed: int) -> Iterator[bytes]:
    """The examples, then `count` inputs: a fifth of them random, the rest mutated examples."""
    yield from decoder.examples
    chance = random.Random(f"{decoder.name}/{seed}")
    for _ in range(count):
        if chance.random() < 0.2:
            yield chance.randbytes(chance.randrange(RANDOM_BYTES_MAX))
        else:
            yield mutated(chance.choice(decoder.examples), chance)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """An example with one to eight changes."""
    changed = bytearray(data)
    for _ in range(1 + int(8 * chance.random() ** 2)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(7):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << chance.randrange(8)
            case 1 if changed:
                changed[at % len(changed)] = chance.randrange(256)
            case 2:
                del changed[at : at + chance.choice((1, 2, 4, 30, len(changed)))]
            case 3:
                changed[at:at] = chance.choice(LOUD)
            case 4:
                changed[at : at + chance.randrange(8)] = chance.choice(LOUD)
            case 5:
                begin = chance.randrange(len(changed) + 1)
                changed[at:at] = changed[begin : begin + chance.randrange(1, 40)]
            case 6:
                changed[at:at] = chance.randbytes(chance.randrange(1, 9))
    return bytes(changed)


def try_one(decoder: Decoder, data: bytes) -> None:
    """Decode `data`. Raises what the decoder must not raise, and AssertionError over the time."""
    began = time.thread_time()  # what a busy machine does to it does not count
    with contextlib.suppress(*decoder.raises):
        decoder.decode(data)
    assert time.thread_time() - began < SECONDS_MAX, f"{decoder.name} took too long for {len(data)} bytes"


def check_memory(decoder: Decoder, data: bytes) -> None:
    """Raises AssertionError where decoding takes more memory than the input explains."""
    tracemalloc.start()
    try:
        try_one(decoder, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    limit = MEMORY_SPARE + MEMORY_A_BYTE * len(data)
    assert peak < limit, f"{decoder.name} took {peak} bytes for an input of {len(data)}"


# -- how some decoders are called


def in_file(decode: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Calls a decoder of a file."""
    directory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    path = directory / f"p2pdist-fuzz-{os.getpid()}-{id(decode)}"

    def call(data: bytes) -> object:
        path.write_bytes(data)
        try:
            return decode(path)
        finally:
            path.unlink()

    return call


def as_text(decode: Callable[[str], object]) -> Callable[[bytes], object]:
    """Calls a decoder of text, as the HTTP server decodes header fields and queries."""
    return lambda data: decode(data.decode("utf-8", "surrogateescape"))


def over_socket(read: Callable[[socket.socket], object]) -> Callable[[bytes], object]:
    """Calls a reader of a connection whose peer sends the bytes and hangs up."""

    def call(data: bytes) -> object:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(60)
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            theirs.settimeout(60)
            theirs.sendall(data[: 128 << 10])
            theirs.shutdown(socket.SHUT_WR)
            return read(ours)

    return call


def read_frames(connection: socket.socket) -> None:
    """Read frames as a receiver does, which checks each head before it reads the data."""
    reader = FrameReader(connection, 4096)
    for _ in range(64):
        piece, length = reader.head(0, 5.0)
        if length > 4096 or piece == STREAM_END:
            return
        reader.data(length)
        reader.done()


def read_response(connection: socket.socket) -> None:
    head = read_head(connection)
    if head.status != 200:
        read_problem(connection, head)


def decode_json(kind: Any) -> Callable[[bytes], object]:
    return lambda data: msgspec.json.decode(data, type=kind)


def decode_stream_request(data: bytes) -> None:
    """As read_stream_request and its handler do."""
    request = msgspec.json.decode(data, type=StreamRequest)
    parse_digest(request.blob)
    if len(request.have) == 5:
        PieceSet(40, request.have)


def decode_root_and_page(data: bytes) -> None:
    """A tree of one page: its root is right, its page is not."""
    name = tree.content_hash(data)
    tree.decode_tree(tree.Root(2, 1, 5, (name,)), {name: data})


def patch(old: Path) -> None:
    """Patch an image into one with another time of a file."""
    new = old.with_suffix(".new")
    try:
        patch_image(old, new, [tree.File(b"bin/tool", 0o755, 11, 5, tree.content_hash(b"hello"))])
    finally:
        new.unlink(missing_ok=True)


def search(path: Path) -> None:
    """Find what a script of a package is executed with."""
    path.chmod(0o755)
    where = str(path.parent)
    executable.Search({"PATH": where}, where, where).executable([str(path)])


def _read_model(data: bytes) -> None:
    """Decode the manifest of a model, and place its files."""
    found = decode_model(data)
    for entry in model_entries(found.layers) if found is not None else ():
        assert not entry.path.startswith(b"/") and b".." not in entry.path.split(b"/")


def decode_program(data: bytes) -> None:
    """Decode a config, and find the program that it names."""
    config = manifest.decode_config(data)
    if config.entrypoint:
        executable.Search({"PATH": "/bin"}, "/", "").executable(config.entrypoint)
    for text in (*config.entrypoint, *config.env, config.working_dir):
        assert "\0" not in text, "execve and chdir take no zero bytes"


def unpack(data: bytes) -> None:
    """Apply a tar to a directory that a lower layer has filled, and see that nothing beside it
    changed."""
    with tempfile.TemporaryDirectory(prefix="p2pdist-fuzz-", dir=IN_MEMORY) as directory:
        target = Path(directory) / "target"
        (target / "usr/lib").mkdir(parents=True)
        (target / "lib").symlink_to("usr/lib")
        (target / "old").write_bytes(b"old")
        try:
            apply_tar(io.BytesIO(data), target, Applied())
        finally:
            assert os.listdir(directory) == ["target"], f"written beside the directory: {os.listdir(directory)}"
            for parent, directories, _ in os.walk(target):
                for name in directories:
                    path = os.path.join(parent, name)
                    if not os.path.islink(path):
                        os.chmod(path, 0o700)


def read_policies(data: bytes) -> None:
    """A table of policies, as the tracker reads it from TOML; JSON gives the same shapes."""
    document = msgspec.json.decode(data, type=dict[str, Any])
    read_table(document)


# -- examples

IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _manifest() -> tuple[bytes, bytes]:
    pieces = PieceList(PieceLayout(100_000, 65536), bytes(64)).encode()
    described = manifest.Descriptor(manifest.PIECES_TYPE, digest_of(pieces), len(pieces))
    annotations = {manifest.PIECES_DIGEST: described.digest, manifest.PIECES_SIZE: "65536"}
    layer = manifest.Descriptor("application/vnd.p2pdist.layer.squashfs", digest_of(b"layer"), 100_000, annotations)
    config = manifest.encode_config(manifest.Config(("sh", "-c", "x"), ("A=1",), "/"))
    described_config = manifest.Descriptor(manifest.CONFIG_TYPE, digest_of(config), len(config))
    return manifest.encode_manifest(manifest.Manifest(described_config, (layer,), (described,))), config


ENTRIES: list[tree.Entry] = [
    tree.Directory(b"bin", 0o755, 10),
    tree.File(b"bin/tool", 0o755, 10, 5, tree.content_hash(b"hello")),
]
PAGE = msgspec.msgpack.encode(ENTRIES)
CHUNKS = tree.ChunkList(((tree.content_hash(b"a"), 1 << 17), (tree.content_hash(b"b"), 1 << 17)))
BLOB = digest_of(b"blob")
MANIFEST, CONFIG = _manifest()
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.p2pdist.stream\r\nContent-Length: 12\r\n\r\n"
PROBLEM = b'{"type":"urn:p2pdist:problem:disk-full","title":"x","status":507,"needed":5,"free":"x","detail":"no room"}'
REFUSAL = (
    b"HTTP/1.1 503 No\r\nContent-Type: application/problem+json\r\nContent-Length: %d\r\n\r\n" % len(PROBLEM) + PROBLEM
)
SQUASHFS = b"hsqs" + bytes(24) + b"\x04\x00\x00\x00" + bytes(8) + (96).to_bytes(8, "little") + bytes(48)
ELF = b"\x7fELF\x02\x01\x01" + bytes(25) + (64).to_bytes(8, "little") + bytes(14) + b"\x38\x00\x01\x00" + bytes(70)


def _catalog() -> bytes:
    stored = b"x" * 50
    pack = Pack(digest_of(stored), 50, record(tree.content_hash(b"c"), 100, 50))
    return encode_catalog(Catalog((PAGE,), (CHUNKS.encode(),), (pack,)))


def _bootstrap() -> bytes:
    layer = manifest.Descriptor(manifest.TREE_TYPE, digest_of(b"tree"), 4)
    content = tree.content_hash(b"content")
    cut = tree.ChunkList(((tree.content_hash(b"a"), tree.CHUNK_LEAST), (tree.content_hash(b"b"), 9)))
    layout = DeviceLayout({tree.content_hash(b"c"): 70_000, content: tree.CHUNK_LEAST + 9}, {content: cut.encode()})
    places = {chunk.chunk: (digest_of(b"pack"), 100 * number, 9) for number, chunk in enumerate(layout.chunks())}
    package = replace(manifest.decode_manifest(MANIFEST), layers=(layer,))
    encoded = encode_bootstrap(package, [b"image " * 100], layout, places)
    assert encoded is not None
    return encoded


def _read_bootstrap(data: bytes) -> object:
    """All that an agent reads of one; it writes images to files."""
    found = decode_bootstrap(data)
    for image in found.images:
        for _ in image.parts():
            pass
    layout, placed = found.contents()
    return list(layout.chunks()), placed


def _torrent() -> bytes:
    hasher = torrent.TorrentHasher(65536)
    hasher.update(bytes(100_000))
    return torrent.blob_torrent(hasher.finish(), "sha256-x")


def _bitmap() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "b"
        BitmapFile.create(path, PieceSet.full(40), UUID(int=5)).close()
        return path.read_bytes()


def _hashes() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "h"
        file = HashesFile.create(path, 40)
        for piece in range(0, 40, 3):
            file.store(piece, StoredHash(bytes([piece]) * 32, own=piece % 2 == 0))
        file.close()
        return path.read_bytes()


def _image() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "image"
        write_image(ENTRIES, path)
        return path.read_bytes()


def _tars() -> tuple[bytes, bytes]:
    """A layer in both formats, with all kinds of entries, whiteouts and names that need headers of
    their own; mutations reach the check sums of most headers, so the entries are few and small."""
    made = []
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=form, pax_headers={"comment": "x"}) as archive:
            for name, kind, target in (
                ("bin", tarfile.DIRTYPE, ""),
                ("bin/tool", tarfile.REGTYPE, ""),
                ("lib/x", tarfile.SYMTYPE, "/bin/tool"),
                ("bin/same", tarfile.LNKTYPE, "bin/tool"),
                (".wh.old", tarfile.REGTYPE, ""),
                ("usr/.wh..wh..opq", tarfile.REGTYPE, ""),
                ("n" * 120, tarfile.REGTYPE, ""),
                ("pipe", tarfile.FIFOTYPE, ""),
            ):
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname, entry.mode, entry.mtime = kind, target, 0o755, 1.5
                entry.size = 5 if kind == tarfile.REGTYPE and ".wh." not in name else 0
                archive.addfile(entry, io.BytesIO(b"hello"))
        made.append(buffer.getvalue().rstrip(b"\0") + bytes(2048))
    return made[0], made[1]


def _resealed(data: bytes) -> bytes:
    """A tar whose headers have right check sums again: else tarfile looks at nothing else."""
    changed = bytearray(data)
    for at in range(0, len(changed) - 511, 512):
        header = changed[at : at + 512]
        if header[257:262] == b"ustar":
            header[148:156] = b" " * 8
            changed[at + 148 : at + 156] = b"%06o\0 " % sum(header)
    return bytes(changed)


def _encode(message: msgspec.Struct) -> bytes:
    return messages.encode(message)


AGENT_MESSAGES = (
    _encode(messages.Hello(1, "h1", "10.0.0.1:7071", "z", "r")),
    _encode(messages.Holding(BLOB, 100_000, 65536, (1,), ("",))),
    _encode(messages.Report((messages.Advance(BLOB, (1, 2)),))),
    _encode(messages.Complaint(BLOB, 0, "h2", "stalled")),
    _encode(messages.Hello(1, "h1", "10.0.0.1:7071", "z", "r", site="s", partial=True)),
    _encode(messages.Vouched(BLOB, 1, (5,), bytes(32))),
    _encode(messages.PullFailed("a:b", "disk-full: no room", BLOB, 1.5)),
)
TRACKER_MESSAGES = (
    _encode(messages.Assign(Plan(BLOB, (StripePlan(0, Source("h2", "10.0.0.2:7071")),)))),
    _encode(messages.Listed(BLOB, 1, (5,), bytes(32))),
)
QUERY = f"info_hash={quote_from_bytes(bytes(range(20)))}&peer_id={'a' * 20}&port=6881&left=0&event=started&numwant=50"
PLAIN: tuple[type[BaseException], ...] = (P2PDistError,)
JSON: tuple[type[BaseException], ...] = (P2PDistError, *UNDECODABLE)


def decoders() -> tuple[Decoder, ...]:
    """All of them; their examples are made when this is called."""
    image = _image()
    chunk = bytes(range(256)) * 600
    encoded = ChunkEncoder().encode(chunk)
    return (
        Decoder("manifest", manifest.decode_manifest, (Corrupt,), (MANIFEST,)),
        Decoder("config", decode_program, PLAIN, (CONFIG,)),
        Decoder("manifest of a model", _read_model, (Corrupt, UsageError), (MODEL,)),
        Decoder(
            "header of a safetensors file", lambda data: decode_header(data, 8 + len(data) + 4), (Corrupt,), (HEADER,)
        ),
        Decoder("manifest of an image", decode_image, (Corrupt, Refused), IMAGE_MANIFESTS),
        Decoder(
            "name of an image",
            lambda data: parse_image(data.decode("utf-8", "surrogateescape")),
            (UsageError,),
            (b"docker://registry.example:5000/team/app:v1", b"docker://debian@sha256:" + b"0" * 64),
        ),
        Decoder(
            "name of a repository of a hub",
            lambda data: parse_hub(data.decode("utf-8", "surrogateescape")),
            (UsageError,),
            (b"hf://org/name@refs/pr/1", b"hf://datasets/org/name"),
        ),
        Decoder(
            "files of a commit",
            lambda data: check_listing(hub_name("models", "org/name"), decode_listing(data)),
            (Corrupt, Refused),
            (msgspec.json.encode(HubListing("a" * 40, (HubFile("a/b", 1, "b" * 40, "c" * 64),))),),
        ),
        Decoder(
            "request of a client of a hub",
            lambda data: parse_hub_request(data.decode("latin-1")),
            (UsageError, NotFound),
            (b"/api/datasets/org/name/tree/main/a%20b", b"/org/name/resolve/main/a/b.json"),
        ),
        Decoder(
            "bundle",
            manifest.decode_bundle,
            (Corrupt,),
            (manifest.encode_bundle(manifest.Bundle(digest=BLOB, documents=(MANIFEST, CONFIG))),),
        ),
        Decoder("reference", as_text(manifest.parse_reference), (UsageError,), (b"team/app:v1", b"a@" + BLOB.encode())),
        Decoder("digest", as_text(parse_digest), (UsageError,), (BLOB.encode(),)),
        Decoder(
            "piece list",
            PieceList.decode,
            (Corrupt,),
            (PieceList(PieceLayout(100_000, 65536), bytes(64)).encode(),),
        ),
        Decoder("root", tree.decode_root, (Corrupt,), (tree.encode_root(tree.Root(2, 1, 5, (b"x" * 32,))),)),
        Decoder("page", KnownPage.decode, (Corrupt,), (PAGE,)),
        Decoder("tree", decode_root_and_page, (Corrupt,), (PAGE,)),
        Decoder("chunk list", tree.ChunkList.decode, (Corrupt,), (CHUNKS.encode(),)),
        Decoder(
            "trace",
            decode_trace,
            (Corrupt,),
            (encode_trace(Trace((Traced(b"x" * 32, b"a"),), (Span(0, 1, 2, 3),), 4)),),
        ),
        Decoder("catalog", decode_catalog, (Corrupt,), (_catalog(),)),
        Decoder("bootstrap", _read_bootstrap, (Corrupt, TooLarge), (_bootstrap(),)),
        Decoder("chunk of a pack", lambda data: decode_chunk(data, len(chunk)), (Corrupt,), (encoded, encoded[:40])),
        Decoder("bencode", bencode.decode, (Corrupt,), (b"d1:ai5e1:bl1:x2:yyee", b"l" * 20 + b"e" * 20)),
        Decoder("torrent", torrent.decode_torrent, (Corrupt,), (_torrent(),)),
        Decoder(
            "policy",
            policy.decode_policy,
            PLAIN,
            (policy.encode_policy(policy.PackagePolicy("a/*", "start")).encode(),),
        ),
        Decoder(
            "policies",
            read_policies,
            JSON,
            (b'{"policy":[{"match":"a/*","priority":"start","cache":"ttl","ttl":"3d","upload_limit":"5MB/s"}]}',),
        ),
        Decoder("message of an agent", messages.decode_from_agent, (UsageError,), AGENT_MESSAGES),
        Decoder("message of a tracker", messages.decode_from_tracker, (UsageError,), TRACKER_MESSAGES),
        Decoder(
            "stream request",
            decode_stream_request,
            JSON,
            (_encode(StreamRequest(BLOB, 0, 1, b"\x00" * 5, "h1", "start")),),
        ),
        Decoder(
            "preseed",
            lambda data: decode_request(data, PreseedRequest),
            PLAIN,
            (b'{"package":"a:b","hosts":["h1"],"priority":"start"}', b'{"package":"a:b","count":5}'),
        ),
        Decoder("selector", as_text(parse_selector), PLAIN, (b"zone=a,rack=r1",)),
        Decoder("ticket", as_text(lambda text: decode_ticket(text, lambda *_: True)), PLAIN, (_ticket(),)),
        Decoder("problem", lambda data: from_problem(msgspec.json.decode(data, type=dict[str, Any])), JSON, (PROBLEM,)),
        Decoder("head of a response", parse_head, (MalformedResponse,), (RESPONSE,)),
        Decoder(
            "response",
            over_socket(read_response),
            (MalformedResponse, EndOfConnection, P2PDistError, OSError),
            (RESPONSE, REFUSAL),
        ),
        Decoder(
            "frames",
            over_socket(read_frames),
            (CutShort, OSError),
            (FRAME.pack(0, 40) + bytes(40) + FRAME.pack(0xFFFFFFFF, 0),),
        ),
        Decoder(
            "range",
            as_text(lambda text: parse_range(text, 100_000)),
            (Unsatisfiable,),
            (b"bytes=0-99", b"bytes=-5", b"bytes=5-"),
        ),
        Decoder("address", as_text(parse_address), (ValueError,), (b"10.0.0.1:7071", b"[::1]:80")),
        Decoder("client address", as_text(address_key), (), (b"10.0.0.1", b"fe80::1%eth0", b"::ffff:1.2.3.4")),
        Decoder("announce", as_text(lambda text: announce_of(parse_query(text), bytes(4))), PLAIN, (QUERY.encode(),)),
        Decoder("size", as_text(parse_size), PLAIN, (b"200GiB",)),
        Decoder("rate", as_text(parse_rate), PLAIN, (b"2Gbit/s",)),
        Decoder("duration", as_text(parse_duration), PLAIN, (b"3d", b"1.5h")),
        Decoder("platform", as_text(parse_platform), PLAIN, (b"linux/arm64/v8",)),
        Decoder("bitmap", in_file(lambda path: read_bitmap(path, 40)), (), (_bitmap(),)),
        Decoder("hashes", in_file(lambda path: read_hashes(path, 40)), (), (_hashes(),)),
        Decoder("squashfs", in_file(squashfs.inspect), (Corrupt,), (SQUASHFS,)),
        Decoder("EROFS superblock", in_file(is_image), (), (image,)),
        Decoder("EROFS image", in_file(patch), (), (image,)),
        Decoder("tar", unpack, PLAIN, _tars()),
        Decoder("resealed tar", lambda data: unpack(_resealed(data)), PLAIN, _tars()),
        Decoder("ELF", in_file(lambda path: executable._loader(str(path))), (), (ELF,)),
        Decoder("script", in_file(search), PLAIN, (b"#!/bin/sh -e\n", b"#!/usr/bin/env -S sh 'b c'\n", b"#!tool\n")),
        *(Decoder(*call) for call in (*access_decoders.calls(), *gateway_decoders.calls(), *sealed_decoders.calls())),
    )


def _ticket() -> bytes:
    ticket = Ticket("k", BLOB, "join:a", "start", 5.0)
    return encode_ticket(ticket, lambda _: bytes(64)).encode()


def resident_bytes() -> int:
    """What this process has in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """The most that this process has had in memory since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def try_all(decoder: Decoder, count: int, seed: int, limit_s: float = inf) -> None:
    """Try `count` inputs, fewer where they take more than `limit_s` seconds of the processor, and
    say every PROGRESS_S how far it is. Raises what `try_one` and `check_memory` raise, and
    AssertionError where memory stays taken; the input is printed before."""
    began, told_at = time.process_time(), time.monotonic()
    first_bytes, tried = 0, 0
    forget_peak()
    for number, data in enumerate(inputs(decoder, count, seed)):
        try:
            (check_memory if number % 1000 == 0 else try_one)(decoder, data)
        except BaseException:
            print(f"{decoder.name}, input {number}: {data!r}", flush=True)
            raise
        tried = number + 1 - len(decoder.examples)
        if number == WARM_INPUTS:
            first_bytes = resident_bytes()
        took_s = time.process_time() - began
        if time.monotonic() - told_at >= PROGRESS_S:
            told_at = time.monotonic()
            memory = resident_bytes() >> 20
            print(f"  {decoder.name}: {number} of {count}, {took_s:.0f} s, {memory} MiB", flush=True)
        if took_s > limit_s:
            break
    memory, took_s = resident_bytes(), time.process_time() - began
    figures = f"{memory >> 20} MiB, {peak_bytes() >> 20} MiB at most"
    print(f"{decoder.name}: {tried} inputs in {took_s:.1f} s of the processor, {figures}", flush=True)
    kept = memory - first_bytes if first_bytes else 0
    assert kept < KEPT_MAX, f"{decoder.name} keeps {kept} bytes"


def main() -> int:
    """Try `--count` inputs for each decoder. A decoder that fails is named with its input, and the
    run goes on with the next one; 1 if any failed."""
    parser = argparse.ArgumentParser(description="Random and mutated bytes for every decoder.")
    parser.add_argument("--count", type=int, default=10_000, help="inputs for each decoder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these decoders alone")
    parser.add_argument("--from", dest="first", metavar="NAME", help="leave out the decoders before this one")
    parser.add_argument(
        "--seconds", type=float, default=inf, help="of the processor for each decoder, after which the next one follows"
    )
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)  # damaged files of one's own are logged
    everything = {decoder.name: decoder for decoder in decoders()}
    unknown = [name for name in (*chosen.only, chosen.first) if name and name not in everything]
    if unknown:
        parser.error(f"no decoder is named {unknown[0]!r}; there are {', '.join(everything)}")
    names = chosen.only or list(everything)
    names = names[names.index(chosen.first) :] if chosen.first in names else names
    failed = []
    for name in names:
        try:
            try_all(everything[name], chosen.count, chosen.seed, chosen.seconds)
        except Exception:
            traceback.print_exc()
            failed.append(name)
    print(f"{len(names) - len(failed)} decoders as expected; failed: {', '.join(failed) or 'none'}", flush=True)
    return bool(failed)
