"""What a pusher of one namespace, or of a namespace that a host reads, cannot do to others by
encrypted packages, on real parts."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from asyncio import to_thread
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import ClientSession, TCPConnector, web
from joined_rig import Running, free_port, until
from sealed_rig import (
    SealedSite,
    site_with_keys,  # noqa: F401
)
from test_client import serving

import tracker.access.sealed_keys
from p2pdist.agent import sealed_packages as sealed_agent
from p2pdist.agent.api import server
from p2pdist.agent.api.server import make_apps
from p2pdist.agent.bittorrent.service import SwarmService, SwarmSettings
from p2pdist.agent.buckets.package import BucketContext, PackageBucket
from p2pdist.agent.sealed_packages import Opening, ask_keys
from p2pdist.agent.tracker.connection import Handlers
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.credentials.authority import agent_dns
from p2pdist.gateway.s3.failures import S3Failure
from p2pdist.model.access import TICKET_HEADER
from p2pdist.model.digest import Digest, digest_of, hex_of
from p2pdist.model.errors import Corrupt, Refused, Unavailable, UsageError
from p2pdist.model.manifest import (
    MANIFEST_BYTES_MAX,
    MANIFEST_TYPE,
    Descriptor,
    Manifest,
    Reference,
    decode_manifest,
    encode_manifest,
    parse_reference,
)
from p2pdist.model.messages import PROTOCOL_VERSION, Hello
from p2pdist.model.pieces import PieceList
from p2pdist.package.modelpack import pack_model
from p2pdist.package.pack import pack
from p2pdist.package.repository import sealed_push
from p2pdist.package.repository.push import Pushed, push
from p2pdist.package.repository.sealed_push import push_encrypted
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import redundant_parts


async def tag(site: SealedSite, name: str, pushed: Pushed) -> None:
    """Name a package at the origin once more."""
    await site.origin.tag(parse_reference(name), Descriptor(MANIFEST_TYPE, pushed.digest, pushed.size))


async def test_a_name_of_another_namespace_opens_nothing_on_a_host_that_has_it_open(site: SealedSite) -> None:
    pushed = await site.push("team-a/secret:v1", site.source())
    h = await site.agent("h0")
    assert (await site.pull(h, "team-a/secret:v1")).error is None
    await tag(site, "team-b/mine:v1", pushed)
    await tag(site, "team-a/again:v1", pushed)
    for _ in range(2):
        stolen = await site.pull(h, "team-b/mine:v1")
        assert isinstance(stolen.error, Refused) and stolen.package is None
        await h.stop()
        await h.start()
    assert (await site.pull(h, "team-a/again:v1")).error is None, "whose keys the tracker gives"
    await site.stop_tracker()
    assert (await site.pull(h, f"team-a/secret@{pushed.digest}")).error is None, "which needs no tracker"
    await site.start_tracker()


async def fat(site: SealedSite, reference: Reference) -> Manifest:
    """Pack a package whose manifest is within its limit, and over it with encrypted blobs."""
    await pack(site.source(), reference, site.layout, level=1)
    manifest = decode_manifest(await site.layout.read((await site.layout.resolve(reference)).digest))
    layer = manifest.layers[0]
    room = MANIFEST_BYTES_MAX - len(encode_manifest(manifest)) - 20
    manifest = replace(manifest, layers=(replace(layer, annotations={**layer.annotations, "x": "y" * room}),))
    data = encode_manifest(manifest)
    site.layout.blob_path(digest_of(data)).write_bytes(data)
    await site.layout.tag(reference, Descriptor(MANIFEST_TYPE, digest_of(data), len(data)))
    return manifest


async def test_a_manifest_that_is_too_large_when_open_harms_no_other_package(
    site: SealedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = parse_reference("team-a/fat:v1")
    await fat(site, reference)
    with pytest.raises(UsageError, match="over the limit"):
        await push_encrypted(reference, site.layout, site.origin, site.recipients["team-a"])
    with monkeypatch.context() as patch:  # as a pusher that does not look
        patch.setattr(sealed_push, "opened_manifest", lambda plain, sealed: sealed)
        await push_encrypted(reference, site.layout, site.origin, site.recipients["team-a"])
    await site.push("team-a/good:v1", site.source("good"))
    h = await site.agent("h0")
    pull = await site.pull(h, "team-a/fat:v1")
    assert isinstance(pull.error, Corrupt) and "over the limit" in str(pull.error)
    assert not h.agent.store.opened.manifests()
    assert (await site.pull(h, "team-a/good:v1")).error is None


async def test_a_record_of_what_is_no_manifest_is_left_out(site: SealedSite) -> None:
    await site.push("team-a/good:v1", site.source("good"))
    h = await site.agent("h0")
    store = h.agent.store
    store.opened.record_manifest(store.put_document(b"sealed"), store.put_document(b"{}"), "team-a/bad")
    assert (await site.pull(h, "team-a/good:v1")).error is None
    assert len(store.opened.packages()) == 1
    store.candidates(), redundant_parts(store)


async def test_a_bucket_of_an_encrypted_package_says_why_it_has_no_objects(site: SealedSite) -> None:
    await site.push("team-a/t:v1", site.source(), format="tree")
    h = await site.agent("h0")
    agent = h.agent
    context = BucketContext(agent.store, agent.packages, agent.pulls, agent.registry, lambda _, __: None)
    for _ in range(2):
        with pytest.raises(S3Failure, match="encrypted") as failure:
            await PackageBucket("bucket", parse_reference("team-a/t:v1"), context).objects()
        assert failure.value.status == 501
        assert (await site.pull(h, "team-a/t:v1")).error is None, "and once it is open"


async def test_a_program_loads_an_encrypted_model(site: SealedSite, tmp_path: Path) -> None:
    source = site.directory / "model"
    source.mkdir()
    weights = bytes(range(256)) * 1000
    (source / "model.safetensors").write_bytes(weights)
    (source / "config.json").write_bytes(b"{}")
    reference = parse_reference("team-a/model:v1")
    await pack_model(source, reference, site.layout)
    await push_encrypted(reference, site.layout, site.origin, site.recipients["team-a"])
    h = await site.agent("h0")
    async with serving(make_apps(h.agent)[1], tmp_path / "s") as client:
        files = await to_thread(client.model_files, "team-a/model:v1")
        found = {file.path: file.digest for file in files.files}
        blob = await to_thread(client.blob_file, found["model.safetensors"], 0, 10)
    assert Path(blob.path).read_bytes() == weights


async def plain_copy(site: SealedSite, source: Path, name: str = "team-b/plain:v1") -> None:
    """Push what is in an encrypted package as it is, too."""
    await pack(source, parse_reference(name), site.layout, level=1)
    await push(parse_reference(name), site.layout, site.origin)


async def test_a_manifest_that_names_what_is_open_makes_no_host_serve_it(site: SealedSite) -> None:
    source = site.source()
    await site.push("team-a/secret:v1", source)
    h = await site.agent("h0")
    pull = await site.pull(h, "team-a/secret:v1")
    assert pull.package is not None
    layer = pull.package.manifest.layers[0].digest
    await plain_copy(site, source)
    site.origin_path.joinpath("blobs", "sha256", hex_of(layer)).unlink()  # only documents need be pushed
    for _ in range(2):
        assert (await site.pull(h, "team-b/plain:v1")).error is None
        assert layer in h.agent.store.opened and not h.agent.registry.serves(layer)
        await h.stop()
        await h.start()


async def test_what_is_decrypted_in_part_is_no_part_of_a_pull_for_others(site: SealedSite) -> None:
    """A pull of the same blob, not encrypted, begins anew once the opening has ended."""
    source = site.source(size=2_000_000)
    await site.push("team-a/p:v1", source)
    await plain_copy(site, source)
    h = await site.agent("h0")

    async def cut(self: Opening, *_: object) -> None:
        raise Unavailable("cut")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Opening, "_follow", cut)
        assert (await site.pull(h, "team-a/p:v1")).error is not None
    store, registry = h.agent.store, h.agent.registry
    (layer,) = [digest for digest in store.opened.encrypted() if store.get(digest) is not None]
    written = store.get(layer)
    assert written is not None
    data = site.layout.blob_path(layer).read_bytes()
    with written.held():
        assert written.write(0, data[: written.layout.length(0)])
    content = site.origin_path / "blobs" / "sha256" / hex_of(layer)
    content.rename(site.directory / "aside")  # nothing comes from there for now
    manifest = decode_manifest(
        await site.layout.read((await site.layout.resolve(parse_reference("team-b/plain:v1"))).digest)
    )
    blob, fetching = await registry.fetch(manifest.layers[0])
    assert len(blob.have) == 0 and layer not in store.opened
    assert fetching is not None
    fetching.reject(Unavailable("ended"))
    (site.directory / "aside").rename(content)
    pull = await site.pull(h, "team-b/plain:v1")
    assert pull.error is None and layer not in store.opened and h.agent.registry.serves(layer)
    both = await site.agent("h1")
    done = await asyncio.gather(site.pull(both, "team-a/p:v1"), site.pull(both, "team-b/plain:v1"))
    assert [pull.error for pull in done] == [None, None]
    assert both.agent.registry.serves(layer) != (layer in both.agent.store.opened)


async def test_an_opening_does_not_write_into_what_others_get(
    site: SealedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = site.source()
    await site.push("team-a/p:v1", source)
    await plain_copy(site, source)
    manifest = decode_manifest(
        await site.layout.read((await site.layout.resolve(parse_reference("team-b/plain:v1"))).digest)
    )
    layer = manifest.layers[0]
    h = await site.agent("h0")
    lists = PieceList.decode(await site.layout.read(layer.pieces_digest))
    monkeypatch.setattr(sealed_agent, "PLAIN_WAIT_S", 0.0)
    serving = h.agent.store.begin_held(layer.digest, lists)  # as a pull for team-b that waits for storage
    pull = await site.pull(h, "team-a/p:v1")
    assert isinstance(pull.error, Unavailable) and "is being pulled" in pull.error.what
    assert len(serving.have) == 0
    serving.release()
    assert (await site.pull(h, "team-a/p:v1")).error is None and layer.digest in h.agent.store.opened


async def test_a_blob_that_is_evicted_while_it_is_begun_keeps_its_mark(site: SealedSite) -> None:
    await site.push("team-a/p:v1", site.source())
    h = await site.agent("h0")
    store = h.agent.store
    begin = Opening._begin

    def evicted(self: Opening, blob: Descriptor, part: Descriptor) -> Blob | None:
        partial = begin(self, blob, part)
        assert partial is not None
        partial.release()
        get, armed = store.get, [True]

        def get_and_evict(digest: Digest) -> Blob | None:
            found = get(digest)
            if digest == blob.digest and armed and armed.pop():
                store._discard(partial)  # as what makes room for another pull does
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "get", get_and_evict)
            return begin(self, blob, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Opening, "_begin", evicted)
        pull = await site.pull(h, "team-a/p:v1")
    assert pull.error is None and pull.package is not None
    layer = pull.package.manifest.layers[0].digest
    for _ in range(2):
        assert layer in h.agent.store.opened and not h.agent.registry.serves(layer)
        await h.stop()
        await h.start()


async def test_a_store_that_lost_its_marks_is_not_opened(site: SealedSite) -> None:
    await site.push("team-a/p:v1", site.source())
    h = await site.agent("h0")
    assert (await site.pull(h, "team-a/p:v1")).error is None
    await h.stop()
    with closing(sqlite3.connect(h.settings.store / "index.sqlite")) as database:
        database.execute("DROP TABLE opened")
    with pytest.raises(Corrupt, match="what was decrypted"):
        await h.start()


async def test_a_package_that_is_encrypted_in_part_is_none(site: SealedSite) -> None:
    pushed = await site.push("team-a/p:v1", site.source())
    sealed = decode_manifest(await site.origin.read(pushed.digest))
    await plain_copy(site, site.source("plain"), "team-a/plain:v1")
    plain = decode_manifest(
        await site.origin.read((await site.origin.resolve(parse_reference("team-a/plain:v1"))).digest)
    )
    data = encode_manifest(replace(plain, parts=sealed.parts, piece_lists=(*plain.piece_lists, *sealed.piece_lists)))
    await site.origin.write_document(data)
    await site.origin.tag(parse_reference("team-a/mixed:v1"), Descriptor(MANIFEST_TYPE, digest_of(data), len(data)))
    pull = await site.pull(await site.agent("h0"), "team-a/mixed:v1")
    assert isinstance(pull.error, Corrupt) and "encrypted in part" in pull.error.what


async def test_a_tracker_decodes_manifests_beside_its_loop(site: SealedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for the form of a package once, however many agents ask."""
    threads = []

    def decode(data: bytes) -> Manifest:
        threads.append(threading.current_thread())
        return decode_manifest(data)

    monkeypatch.setattr(tracker.access.sealed_keys, "decode_manifest", decode)
    await site.push("team-a/p:v1", site.source())
    await plain_copy(site, site.source("plain"), "public/p:v1")
    h = await site.agent("h0")
    for name in ("team-a/p:v1", "public/p:v1") * 3:
        assert (await site.pull(h, name)).error is None
    assert len(threads) == 3 and threading.main_thread() not in threads, "the form of two, the keys of one"


def parts_of(site: SealedSite, h: Running) -> Digest:
    """The blob that was decrypted on a host, the only one."""
    (blob,) = [digest for digest in h.agent.store.opened.encrypted() if h.agent.store.get(digest) is not None]
    return blob


async def test_a_blob_that_is_decrypted_while_another_host_asks_for_it_is_not_given(
    site: SealedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = site.source()
    await plain_copy(site, source, "team-a/plain:v1")
    h, other = await site.agent("h0"), await site.agent("h1")
    pull = await site.pull(h, "team-a/plain:v1")
    assert pull.package is not None and other.agent.tls is not None
    layer = pull.package.manifest.layers[0].digest
    url, headers = f"https://{h.settings.address}/v1/blobs/{layer}", {TICKET_HEADER: site.ticket(layer, "h1")}
    read = server._read_or_look

    async def status() -> int:
        assert other.agent.tls is not None
        async with (
            ClientSession(connector=TCPConnector(ssl=other.agent.tls.client)) as http,
            http.get(url, headers=headers, server_hostname=agent_dns("h0")) as answer,
        ):
            return answer.status

    def evicted_and_opened(*arguments: object) -> object:
        found = read(*arguments)  # type: ignore[arg-type]
        h.agent.store.opened.record({layer: layer})
        return found

    assert await status() == 200
    monkeypatch.setattr(server, "_read_or_look", evicted_and_opened)
    assert await status() == 404


async def test_what_was_served_is_not_once_it_was_decrypted(site: SealedSite) -> None:
    """A blob that came as it is, was evicted, and came again encrypted before the next report."""
    source = site.source()
    await site.push("team-a/p:v1", source)
    await plain_copy(site, source)
    h = await site.agent("h0")
    store, registry = h.agent.store, h.agent.registry
    pull = await site.pull(h, "team-b/plain:v1")
    assert pull.package is not None
    layer = pull.package.manifest.layers[0].digest
    store.remove(layer)
    assert (await site.pull(h, "team-a/p:v1")).error is None
    registry.served.add(layer)  # as long as no report has looked
    assert layer in store.opened and not registry.serves(layer)
    assert layer not in {holding.blob for holding in registry.holdings(lambda _: True)}
    registry.report("test", lambda _: True)
    assert layer not in registry.served


async def test_no_torrent_is_asked_for_of_what_was_decrypted(site: SealedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by an agent whose fleet has gone without access since, where all may swarm."""
    await site.push("team-a/p:v1", site.source())
    h = await site.agent("h0", swarm=SwarmSettings("auto", ("127.0.0.1", free_port())))
    assert (await site.pull(h, "team-a/p:v1")).error is None
    asked: list[Digest] = []

    async def look_up(self: SwarmService, blob: Blob) -> None:
        asked.append(blob.digest)

    assert h.agent.swarming is not None
    monkeypatch.setattr(SwarmService, "_look_up", look_up)
    h.agent.swarming._context.allowed = lambda blob: True
    await h.agent.swarming._seed()
    assert asked and parts_of(site, h) not in asked


async def test_no_key_is_asked_for_without_tls() -> None:
    """Also where the session is not open, and its URL leads to a server without TLS."""
    asked: list[str] = []

    async def keys(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({"keys": {"0" * 16: "A" * 43 + "="}})

    app = web.Application()
    app.router.add_get("/v1/keys", keys)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    session = TrackerSession((url,), Hello(PROTOCOL_VERSION, "h0", "127.0.0.1:7071"))
    runs = asyncio.create_task(session.run(Handlers(list, lambda: None, lambda _: None, lambda _: None)))
    try:
        await until(lambda: session.problem)
        with pytest.raises(Unavailable):
            await ask_keys(session, Reference("team-a/p", digest=digest_of(b"")))
        assert not asked
    finally:
        runs.cancel()
        await asyncio.gather(runs, return_exceptions=True)
        await runner.cleanup()


async def test_what_is_no_key_is_told(site: SealedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    await site.push("team-a/p:v1", site.source())
    h = await site.agent("h0")
    get: Callable[..., object] = TrackerSession.get

    async def short(self: TrackerSession, path: str, query: dict[str, str]) -> bytes:
        data = await get(self, path, query)  # type: ignore[misc]
        return b'{"keys":{"0000000000000000":"AAAA"}}' if path == "/v1/keys" else data  # type: ignore[no-any-return]

    monkeypatch.setattr(TrackerSession, "get", short)
    pull = await site.pull(h, "team-a/p:v1")
    assert isinstance(pull.error, Corrupt) and "sent no keys" in pull.error.what
