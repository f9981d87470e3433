"""Sealed packages on their whole way: packed, pushed encrypted, moved between hosts, opened where
that may be, and refused where not. The tracker is the real one, with its access file."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from aiohttp import ClientSession, TCPConnector
from joined_rig import Running, until
from sealed_rig import (
    MARK,
    SealedSite,
    holds_mark,
    site_with_keys,  # noqa: F401
)

from p2pdist.agent.pull.packages import Package
from p2pdist.agent.sealed_packages import Opening, Sealed, ask_keys
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.credentials.authority import agent_dns
from p2pdist.encryption import encrypted as encrypt
from p2pdist.encryption import new_key, recipient_of, unwrap
from p2pdist.model.access import TICKET_HEADER
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, DiskFull, NotFound, P2PDistError, Refused, Unavailable
from p2pdist.model.manifest import (
    MANIFEST_TYPE,
    PACK_TYPE,
    Descriptor,
    Manifest,
    Reference,
    decode_manifest,
    encode_manifest,
    parse_reference,
)
from p2pdist.model.messages import MountRequest, PullRequest
from p2pdist.model.modelpack import FILE_PATH
from p2pdist.model.pieces import PieceList
from p2pdist.model.policy import PackagePolicy
from p2pdist.model.preseed import PreseedRequest
from p2pdist.package.modelpack import pack_model
from p2pdist.package.pack import Settings, pack
from p2pdist.package.repository.push import push
from p2pdist.package.repository.sealed_push import push_encrypted, rewrap
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore, redundant_parts
from tracker.content import TAG_FRESH_S


async def test_an_image_is_opened_on_hosts_and_nowhere_else(site: SealedSite) -> None:
    pushed = await site.push("team-a/trainer:v1", site.source())
    assert not holds_mark(site.origin_path), "storage sees ciphertext"
    first = await site.agent("h0", "a")
    pull = await site.pull(first, "team-a/trainer:v1")
    assert pull.error is None, pull.error
    status = pull.status()
    assert (status.digest, status.bytes_cached) == (pushed.digest, 0)
    assert status.bytes_origin == status.bytes_total == status.bytes_done
    assert pull.package is not None
    (layer,) = pull.package.manifest.layers
    path = first.agent.store.get(layer.digest).path
    assert digest_of(path.read_bytes()) == layer.digest
    assert path.read_bytes() == site.layout.blob_path(layer.digest).read_bytes()
    assert holds_mark(first.settings.store) == [path], "what it serves is ciphertext"
    site.layout.blob_path(layer.digest).unlink()  # peers alone have it now; small documents may still come from storage
    second = await site.agent("h1", "a")
    pull = await site.pull(second, "team-a/trainer:v1")
    assert pull.error is None and pull.status().bytes_peers >= layer.size


async def opened(site: SealedSite, running: Running, reference: str) -> Package:
    pull = await site.pull(running, reference)
    assert pull.error is None, pull.error
    assert pull.package is not None
    return pull.package


@pytest.mark.root
@pytest.mark.parametrize("form", ["squashfs", "tree"])
async def test_a_package_is_shown_as_it_was_packed(site: SealedSite, form: Literal["squashfs", "tree"]) -> None:
    source = site.source()
    await site.push("team-a/trainer:v1", source, format=form, settings=Settings(entrypoint=["cat", "small"]))
    running = await site.agent("h0", "a")
    shown = await running.agent.package_mounts.mount(MountRequest("team-a/trainer:v1"))
    try:
        names = sorted(path.name for path in source.iterdir())
        assert sorted(os.listdir(shown.path)) == names
        for name in names:
            assert (Path(shown.path) / name).read_bytes() == (source / name).read_bytes()
        assert shown.entrypoint == ("cat", "small")
        (mount,) = running.agent.mounts.list()
        assert mount.digest == shown.digest
    finally:
        await running.agent.mounts.unmount(shown.path)


async def test_a_tree_takes_the_packs_that_it_needs(site: SealedSite) -> None:
    source = site.source()
    await site.push("team-a/data:v1", source, format="tree")
    assert not holds_mark(site.origin_path)
    running = await site.agent("h0", "a")
    first = await opened(site, running, "team-a/data:v1")
    (root,) = first.manifest.layers
    assert running.agent.store.trees.complete(root.digest)
    packs = [part for part in first.manifest.parts if part.media_type == PACK_TYPE]
    assert packs and not any(running.agent.store.get(pack.digest) for pack in packs), "objects have what was in them"
    (source / "new").write_bytes(os.urandom(50_000))
    pushed = await site.push("team-a/data:v2", source, format="tree", base=parse_reference("team-a/data:v1"))
    assert pushed.bytes_skipped >= 300_000, "the pack of v1 is there"
    pull = await site.pull(running, "team-a/data:v2")
    assert pull.error is None, pull.error
    assert 50_000 < pull.status().bytes_origin < 100_000


async def test_a_host_without_the_right_gets_nothing(site: SealedSite) -> None:
    pushed = await site.push("team-a/trainer:v1", site.source())
    other = await site.agent("h1", "b")
    for reference in ("team-a/trainer:v1", f"team-a/trainer@{pushed.digest}", f"team-b/trainer@{pushed.digest}"):
        pull = await site.pull(other, reference)
        assert isinstance(pull.error, NotFound), pull.error
    session = other.agent.session
    for name in ("team-a/trainer", "team-b/trainer"):
        with pytest.raises(NotFound):
            await ask_keys(session, Reference(name, digest=pushed.digest))
    assert not other.agent.store.blobs()


async def test_the_key_of_a_namespace_opens_no_package_of_another(site: SealedSite) -> None:
    """Whoever may write at the origin gives team-b a package with the keys of team-a."""
    pushed = await site.push("team-a/trainer:v1", site.source())
    await site.origin.tag(parse_reference("team-b/stolen:v1"), Descriptor(MANIFEST_TYPE, pushed.digest, pushed.size))
    other = await site.agent("h1", "b")
    pull = await site.pull(other, "team-b/stolen:v1")
    assert isinstance(pull.error, Refused) and "none of 1 identities" in pull.error.what
    assert not holds_mark(other.settings.store)


async def test_what_was_opened_goes_to_no_other_host(site: SealedSite) -> None:
    await site.push("team-a/trainer:v1", site.source())
    first, second = await site.agent("h0", "a"), await site.agent("h1")
    package = await opened(site, first, "team-a/trainer:v1")
    plain = [layer.digest for layer in package.manifest.layers]
    plain += [package.manifest.config.digest, package.manifest.layers[0].pieces_digest]
    plain.append(first.agent.store.opened.manifest(package.digest))
    for again in (False, True):
        if again:
            await first.stop()
            await first.start()
        agent = first.agent
        served = {holding.blob for holding in agent.registry.holdings(lambda digest: True)}
        assert served == agent.registry.served == {part.digest for part in package.manifest.encrypted}
        assert all(digest in agent.store.opened for digest in plain)
        for digest in plain:
            assert agent.store.get(digest) or agent.store.read_document(digest)
            assert second.agent.tls is not None
            async with ClientSession(connector=TCPConnector(ssl=second.agent.tls.client)) as http:
                url, name = f"https://{first.settings.address}/v1", agent_dns("h0")
                ticket = {TICKET_HEADER: site.ticket(digest, "h1")}
                async with http.get(f"{url}/blobs/{digest}", headers=ticket, server_hostname=name) as answer:
                    assert answer.status == 404, await answer.text()
                async with http.get(f"{url}/blobs/{digest}/holding", headers=ticket, server_hostname=name) as answer:
                    assert answer.status == 404


async def test_an_open_package_needs_no_key(site: SealedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is revoked keeps what it has, and gets nothing new."""
    await site.push("team-a/trainer:v1", site.source())
    running = await site.agent("h0", "a")
    first = await opened(site, running, "team-a/trainer:v1")
    asked = []

    async def ask(session: TrackerSession, reference: Reference) -> Mapping[str, bytes]:
        asked.append(reference)
        return await ask_keys(session, reference)

    monkeypatch.setattr("p2pdist.agent.pull.packages.ask_keys", ask)
    assert (await opened(site, running, "team-a/trainer:v1")).digest == first.digest
    await site.stop_tracker()
    assert (await opened(site, running, "team-a/trainer:v1")).digest == first.digest
    assert not asked
    await site.start_tracker()


async def test_a_revoked_host_gets_no_key(site: SealedSite) -> None:
    await site.push("team-a/trainer:v1", site.source())
    running = await site.agent("h0", "a")
    await until(lambda: running.agent.session.connected)
    reference = Reference(
        "team-a/trainer", digest=(await running.agent.session.resolve(parse_reference("team-a/trainer:v1"))).digest
    )
    assert await ask_keys(running.agent.session, reference)
    site.control.directory.set_revoked(["host:h0"])
    await until(lambda: "host:h0" in site.control.state.rules.revoked)
    with pytest.raises(P2PDistError):
        await ask_keys(running.agent.session, reference)
    assert (await site.pull(running, "team-a/trainer:v1")).error is not None
    assert not holds_mark(running.settings.store)


async def test_no_key_reaches_disk_or_log(site: SealedSite, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await site.push("team-a/trainer:v1", site.source())
    running = await site.agent("h0", "a")
    await opened(site, running, "team-a/trainer:v1")
    digest = (await running.agent.session.resolve(parse_reference("team-a/trainer:v1"))).digest
    (key,) = (await ask_keys(running.agent.session, Reference("team-a/trainer", digest=digest))).values()
    (identity,) = site.control.directory.identities("team-a")
    secrets = [key, base64.b64encode(key), key.hex().encode(), identity.encode()]
    for path in (path for path in site.directory.rglob("*") if path.is_file()):
        if not path.name.startswith("sealed-team-a"):
            assert not any(secret in path.read_bytes() for secret in secrets), path
    assert not any(secret.decode("latin-1") in caplog.text for secret in secrets)
    other = await site.agent("h1", "b")
    await until(lambda: other.agent.session.connected)
    with pytest.raises(NotFound):
        await ask_keys(other.agent.session, Reference("team-a/trainer", digest=digest))
    noted = [json.loads(record.getMessage()) for record in caplog.records if '"event": "keys"' in record.getMessage()]
    assert {(line["identity"], line["outcome"] == "done") for line in noted} == {
        ("agent:h0", True),
        ("agent:h1", False),
    }
    assert all("team-a/trainer" in line["object"] for line in noted)


# -- keys change


@pytest.mark.slow
async def test_after_a_rotation_only_wraps_change(site: SealedSite) -> None:
    source = site.source()
    first = await site.push("team-a/trainer:v1", source)
    running = await site.agent("h0", "a")
    package = await opened(site, running, "team-a/trainer:v1")
    directory = site.control.directory
    old = directory.identities("team-a")
    recipient = directory.new_identity("team-a", now=time.time())
    identities = directory.identities("team-a")
    assert identities[1:] == old and recipient_of(identities[0]) == recipient
    late = await site.agent("h1", "a")
    await opened(site, late, "team-a/trainer:v1")  # by the identity before
    changed = await rewrap(
        parse_reference("team-a/trainer:v1"), site.origin, lambda key: unwrap(key, identities), recipient
    )
    assert changed not in (None, first.digest)
    again = await rewrap(parse_reference("team-a/trainer:v1"), site.origin, lambda key: unwrap(key, ()), recipient)
    assert again is None
    for path in site.control.directory.directory.glob("sealed-team-a-*.key"):
        if old[0] in path.read_text():
            path.unlink()
    await asyncio.sleep(TAG_FRESH_S + 0.1)
    pull = await site.pull(running, "team-a/trainer:v1")
    assert pull.error is None and pull.status().bytes_cached == pull.status().bytes_total
    assert pull.status().digest == changed and pull.package is not None
    assert pull.package.manifest == package.manifest
    fresh = await site.agent("h2", "a")
    await opened(site, fresh, "team-a/trainer:v1")
    stale = await site.agent("h3", "a")
    pull = await site.pull(stale, f"team-a/trainer@{first.digest}")
    assert isinstance(pull.error, Refused), "the identity that opened it is gone"


async def test_a_command_prints_the_identity(site: SealedSite) -> None:
    """As one that asks a key management service for it."""
    calls, (identity,) = site.directory / "calls", site.control.directory.identities("team-a")
    command = site.directory / "kms"
    command.write_text(f"#!/bin/sh\necho x >> {calls}\necho {identity}\n")
    command.chmod(0o755)
    text = site.control.directory.path.read_text()
    site.write_access(text.replace('key = "team-a"', f'identity-command = ["{command}"]'))
    for path in site.control.directory.directory.glob("sealed-team-a-*"):
        path.unlink()
    await until(lambda: site.control.state.rules.sealed["team-a/*"].identity_command)
    await site.push("team-a/trainer:v1", site.source())
    for host in ("h0", "h1"):
        await opened(site, await site.agent(host, "a"), "team-a/trainer:v1")
    assert calls.read_text() == "x\n", "it runs once"


@pytest.mark.parametrize(
    ("script", "what"), [("exit 3", "exit code 3"), ("true", "printed no identity"), (None, "No such file")]
)
async def test_a_command_that_fails_is_told(site: SealedSite, script: str | None, what: str) -> None:
    command = site.directory / "kms"
    if script is not None:
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
    text = site.control.directory.path.read_text()
    site.write_access(text.replace('key = "team-a"', f'identity-command = ["{command}"]'))
    await until(lambda: site.control.state.rules.sealed["team-a/*"].identity_command)
    await site.push("team-a/trainer:v1", site.source())
    pull = await site.pull(await site.agent("h0", "a", tracker_wait_s=0.1), "team-a/trainer:v1")
    assert isinstance(pull.error, Unavailable) and what in pull.error.what and str(command) in pull.error.what


async def test_a_name_without_a_key_says_what_to_do(site: SealedSite) -> None:
    await site.push("team-c/x:v1", site.source())
    pull = await site.pull(await site.agent("h0"), "team-c/x:v1")
    assert isinstance(pull.error, NotFound) and "p2pdist key create" in pull.error.remedy


async def test_a_namespace_may_require_encryption(site: SealedSite) -> None:
    source = site.source()
    for reference in ("team-a/x:v1", "team-b/x:v1"):
        await pack(source, parse_reference(reference), site.layout, level=1)
        await push(parse_reference(reference), site.layout, site.origin)
    await site.push("team-a/y:v1", source)
    text = site.control.directory.path.read_text()
    site.write_access(text.replace('key = "team-a"', 'key = "team-a"\nrequired = true'))
    await until(lambda: site.control.state.rules.requires_sealed("team-a/x"))
    running = await site.agent("h0")
    pull = await site.pull(running, "team-a/x:v1")
    assert isinstance(pull.error, Refused) and "--encrypt-to" in pull.error.remedy
    assert not running.agent.store.blobs()
    for reference in ("team-a/y:v1", "team-b/x:v1"):
        await opened(site, running, reference)


async def test_an_agent_of_before_is_told_to_be_upgraded(site: SealedSite) -> None:
    await site.push("team-a/trainer:v1", site.source())
    running = await site.agent("h0", "a")
    await until(lambda: running.agent.session.connected)
    with pytest.raises(Refused) as caught:
        await running.agent.session.get("/v1/packages", {"reference": "team-a/trainer:v1"})
    assert "encrypted" in caught.value.what and "Upgrade" in caught.value.remedy


async def test_a_blob_is_decrypted_while_it_arrives(tmp_path: Path) -> None:
    data, (_, key) = os.urandom((10 << 20) + 5), new_key()
    encrypted = b"".join(encrypt(io.BytesIO(data), len(data), key))
    store = BlobStore(tmp_path / "store")
    plain, whole = (
        store.begin_held(digest_of(each), PieceList.of_stream(io.BytesIO(each), len(each)))
        for each in (data, encrypted)
    )
    seen = []

    async def come(piece: int) -> None:
        seen.append(len(plain.have))
        start = whole.layout.offset(piece)
        whole.write(piece, encrypted[start : start + whole.layout.length(piece)])

    nothing = ExitStack()
    opening = Opening(Sealed(store), "team-a/x", plain.digest, Manifest(DESCRIPTOR, (), ()), no_fetch, no_keys, nothing)
    await opening._follow(plain, key, whole, come)
    assert plain.complete and digest_of(plain.path.read_bytes()) == plain.digest
    assert len(seen) == whole.layout.count and seen == sorted(seen)
    assert seen[0] == 0 and seen[-1] > plain.layout.count / 2
    for blob in (plain, whole):
        blob.release()
    store.close()


async def no_fetch(part: Descriptor, hold: ExitStack, follow: object) -> Blob:
    raise AssertionError


async def no_keys() -> Mapping[str, bytes]:
    raise AssertionError


DESCRIPTOR = Descriptor("x", digest_of(b""), 0)


async def test_a_package_whose_key_is_wrong_keeps_what_came(site: SealedSite) -> None:
    """The encrypted blobs are what the manifest names: they are not fetched again and again."""
    await site.push("team-a/trainer:v1", site.source())
    running = await site.agent("h0", "a")

    async def other_keys(session: TrackerSession, reference: Reference) -> Mapping[str, bytes]:
        return {name: bytes(32) for name in await ask_keys(session, reference)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("p2pdist.agent.pull.packages.ask_keys", other_keys)
        pull = await site.pull(running, "team-a/trainer:v1")
    assert isinstance(pull.error, Corrupt) and "does not open by its key" in pull.error.what
    assert not holds_mark(running.settings.store)
    assert [blob.complete for blob in running.agent.store.blobs()] == [True], "the documents"
    await opened(site, running, "team-a/trainer:v1")


async def test_blobs_of_one_key_cannot_stand_for_each_other(site: SealedSite) -> None:
    """Whoever may write at the origin changes their places in the manifest: each opens by the key,
    and holds other pieces than its place names."""
    source = site.directory / "model"
    source.mkdir()
    for name in ("one.safetensors", "two.safetensors"):
        (source / name).write_bytes(MARK + os.urandom(200_000))
    reference = parse_reference("team-a/model:v1")
    await pack_model(source, reference, site.layout)
    await push_encrypted(reference, site.layout, site.origin, site.recipients["team-a"])
    manifest = decode_manifest(await site.origin.read((await site.origin.resolve(reference)).digest))
    documents, one, two = manifest.parts
    body = encode_manifest(replace(manifest, parts=(documents, two, one)))
    digest = await site.origin.write_document(body)
    await site.origin.tag(reference, Descriptor(MANIFEST_TYPE, digest, len(body)))
    running = await site.agent("h0", "a")
    pull = await site.pull(running, "team-a/model:v1")
    assert isinstance(pull.error, Corrupt) and "does not hold piece 0" in pull.error.what, pull.error
    assert not holds_mark(running.settings.store)


async def test_wrong_bytes_of_storage_are_told_and_dropped(site: SealedSite) -> None:
    await site.push("team-a/trainer:v1", site.source())
    running = await site.agent("h0", "a")
    await until(lambda: running.agent.session.connected)
    found = await running.agent.session.resolve(parse_reference("team-a/trainer:v1"))
    part = decode_manifest(await site.origin.read(found.digest)).parts[1]
    path = site.origin_path / "blobs" / "sha256" / part.digest.partition(":")[2]
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    pull = await site.pull(running, "team-a/trainer:v1")
    assert isinstance(pull.error, Corrupt) and part.digest in pull.error.what, pull.error
    assert not holds_mark(running.settings.store)
    await until(lambda: running.agent.store.get(part.digest) is None)


# -- what a disk does


async def test_opening_goes_on_where_it_was(site: SealedSite) -> None:
    """Blobs that are here in part, as after kill -9, are opened from the piece that is missing."""
    await site.push("team-a/trainer:v1", site.source(size=2_000_000))
    running = await site.agent("h0", "a")
    store = running.agent.store
    package = await opened(site, running, "team-a/trainer:v1")
    (layer,) = package.manifest.layers
    blob = store.get(layer.digest)
    assert blob is not None and layer.layout.count > 5
    blob.drop([1, 3])
    written = []
    write = Blob.write

    def count(self: Blob, piece: int, data: bytes, wait: object = None) -> bool:
        written.append(piece)
        return write(self, piece, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Blob, "write", count)
        pull = await site.pull(running, "team-a/trainer:v1")
    assert pull.error is None and written == [1, 3]
    assert digest_of(blob.path.read_bytes()) == layer.digest


async def test_a_piece_list_that_goes_while_a_package_is_opened_is_read_again(site: SealedSite) -> None:
    """As that of a blob in part, which made room for another one."""
    await site.push("team-a/trainer:v1", site.source())
    running = await site.agent("h0", "a")
    store, begin, gone = running.agent.store, Opening._begin, []

    def without(self: Opening, blob: Descriptor, part: Descriptor) -> Blob | None:
        if not gone:
            gone.append(store._documents.remove(blob.pieces_digest))
        return begin(self, blob, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Opening, "_begin", without)
        await opened(site, running, "team-a/trainer:v1")
    assert gone


@pytest.mark.slow
async def test_an_encrypted_blob_that_changed_on_the_disk_comes_again(site: SealedSite) -> None:
    await site.push("team-a/trainer:v1", site.source())
    running = await site.agent("h0", "a")
    store = running.agent.store
    package = await opened(site, running, "team-a/trainer:v1")
    (layer,), encrypted = package.manifest.layers, store.get(package.manifest.encrypted[1].digest)
    assert encrypted is not None
    store.remove(layer.digest)
    encrypted.path.chmod(0o600)
    with encrypted.path.open("r+b") as file:
        file.seek(100_000)
        file.write(bytes(100))
    pull = await site.pull(running, "team-a/trainer:v1")
    assert pull.error is None, pull.error
    restored = store.get(layer.digest)
    assert restored is not None and digest_of(restored.path.read_bytes()) == layer.digest
    assert pull.status().bytes_origin > 0


async def test_encrypted_blobs_make_room_once_they_are_open(site: SealedSite) -> None:
    """The store has room for a package and its encrypted form, and no more: the next one takes the
    place of what is encrypted."""
    for number in (1, 2):
        await site.push(f"team-a/p{number}:v1", site.source(f"s{number}", 400_000))
    running = await site.agent("h0", "a", capacity_bytes=1_300_000)
    store = running.agent.store
    first = await opened(site, running, "team-a/p1:v1")
    served = store.get(first.manifest.encrypted[1].digest)
    assert served is not None
    with served.held():
        pass  # it was used last
    second = await opened(site, running, "team-a/p2:v1")
    for package in (first, second):
        assert all(store.get(layer.digest) for layer in package.manifest.layers)
    assert store.get(first.manifest.encrypted[1].digest) is None


async def test_a_package_is_opened_blob_by_blob_where_room_is_short(site: SealedSite) -> None:
    """The store has room for two layers, and the encrypted form of one; and a pull that goes on
    does not keep the form of what is open already."""
    await site.push("team-a/p:v1", site.source("s1", 400_000))
    source = site.source("s2", 400_000)
    await site.push("team-a/p:v2", source, base=parse_reference("team-a/p:v1"))
    running = await site.agent("h0", "a", capacity_bytes=1_450_000)
    store, begun = running.agent.store, Opening._begun
    manifest = (await running.agent.packages.find(parse_reference("team-a/p:v2"), lambda text: None)).manifest
    _, first, last = manifest.parts

    async def cut(self: Opening, blob: Descriptor, part: Descriptor) -> Blob:
        if part.digest == last.digest:
            await until(lambda: first.digest in redundant_parts(store))
            raise Unavailable("cut")
        return await begun(self, blob, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Opening, "_begun", cut)
        assert isinstance((await site.pull(running, "team-a/p:v2")).error, Unavailable)
    encrypted = store.get(first.digest)
    assert encrypted is not None and encrypted.complete
    package = await opened(site, running, "team-a/p:v2")
    assert len(package.manifest.layers) == 2 and store.get(first.digest) is None
    await opened(site, await site.agent("h1", "a", capacity_bytes=1_450_000), "team-a/p:v2")


async def test_a_package_that_does_not_fit_open_says_so(site: SealedSite) -> None:
    await site.push("team-a/p:v1", site.source("s", 400_000))
    running = await site.agent("h0", "a", capacity_bytes=600_000)
    pull = await site.pull(running, "team-a/p:v1")
    assert isinstance(pull.error, DiskFull), pull.error
    assert pull.error.never_fits and pull.error.details["capacity"] == running.agent.store.capacity
    assert not holds_mark(running.settings.store)


@pytest.mark.parametrize("form", ["squashfs", "tree"])
async def test_a_package_is_removed_with_what_was_opened(site: SealedSite, form: Literal["squashfs", "tree"]) -> None:
    await site.push("team-a/trainer:v1", site.source(), format=form)
    running = await site.agent("h0", "a")
    package = await opened(site, running, "team-a/trainer:v1")
    (status,) = await running.agent.inventory.packages()
    assert (status.digest, status.complete) == (package.digest, True)
    assert await running.agent.maintenance.evict("team-a/trainer", package.digest) > 0
    assert not running.agent.store.blobs() and not holds_mark(running.settings.store)
    await opened(site, running, "team-a/trainer:v1")


async def test_a_pin_keeps_what_is_open(site: SealedSite) -> None:
    await site.push("team-a/trainer:v1", site.source())
    running = await site.agent("h0", "a")
    pin = await running.agent.maintenance.pin("team-a/trainer:v1")
    package = await opened(site, running, "team-a/trainer:v1")
    assert set(pin.layers) == {layer.digest for layer in package.manifest.layers}


async def test_trackers_hear_which_encrypted_blobs_a_host_does_not_need(site: SealedSite) -> None:
    """It has what is in them, though they went to make room; of what was opened they hear
    nothing."""
    await site.push("team-a/data:v1", site.source(), format="tree")
    running = await site.agent("h0", "a")
    package, store = await opened(site, running, "team-a/data:v1"), running.agent.store
    encrypted = {part.digest for part in package.manifest.encrypted}
    assert redundant_parts(store) == encrypted
    for digest in encrypted & {blob.digest for blob in store.blobs()}:
        store.remove(digest)
    assert redundant_parts(store) == encrypted
    pull = await site.pull(running, "team-a/data:v1")
    assert pull.error is None and pull.status().bytes_cached == pull.status().bytes_total


async def test_a_preseed_opens_a_package_and_keeps_it(site: SealedSite) -> None:
    pushed = await site.push("team-a/trainer:v1", site.source())
    running = await site.agent("h0", "a")
    agent = running.agent
    await until(lambda: agent.session.connected)
    await agent.session.resolve(parse_reference("team-a/trainer:v1"))  # binds the digest to the name
    await site.preseeds.create(PreseedRequest(f"team-a/trainer@{pushed.digest}", id="p1", hosts=("h0",)))
    kept = agent.preseeds._preseeds
    await until(lambda: "p1" in kept and kept["p1"].state in ("done", "failed"))
    assert kept["p1"].state == "done", kept["p1"].reason
    package = await opened(site, running, "team-a/trainer:v1")
    (layer,) = package.manifest.layers
    assert agent.store.pins.owners(layer.digest) == {"preseed:p1"}
    assert not agent.store.pins.owners(package.manifest.encrypted[1].digest), "it may make room"
    await running.stop()
    await running.start()
    assert "p1" in running.agent.preseeds._preseeds


async def test_a_package_that_would_be_shown_lazily_is_brought(site: SealedSite) -> None:
    """As none that is encrypted is shown so."""
    await site.push("team-a/trainer:v1", site.source())
    running = await site.agent("h0", "a")
    running.agent.pulls._lazy = lambda reference: True
    pull = running.agent.pulls.start(PullRequest(package="team-a/trainer:v1", lazy=True))
    assert pull.task is not None
    await asyncio.wait([pull.task])
    assert pull.error is None and not pull.lazy and pull.package is not None
    assert running.agent.sealed.whole(pull.package.manifest)


async def test_what_a_disk_changed_of_an_open_package_is_repaired(site: SealedSite) -> None:
    await site.push("team-a/trainer:v1", site.source())
    running = await site.agent("h0", "a")
    store = running.agent.store
    package = await opened(site, running, "team-a/trainer:v1")
    (layer,) = package.manifest.layers
    blob = store.get(layer.digest)
    assert blob is not None
    blob.path.chmod(0o600)
    with blob.path.open("r+b") as file:
        file.seek(70_000)
        file.write(bytes(100))
    async for verified in running.agent.verification.verify(repair=True):
        last = verified
    assert last.wrong == (layer.digest,) and last.repaired == ("team-a/trainer:v1",), last
    again = store.get(layer.digest)
    assert again is not None and digest_of(again.path.read_bytes()) == layer.digest
    assert layer.digest in store.opened and not running.agent.registry.serves(layer.digest)


async def test_a_policy_that_pins_pins_what_is_open(site: SealedSite) -> None:
    await site.push("team-a/trainer:v1", site.source())
    running = await site.agent("h0", "a")
    agent = running.agent
    package = await agent.packages.find(parse_reference("team-a/trainer:v1"), lambda text: None)
    pinning = replace(package, policy=PackagePolicy("team-a/*", cache="pin"))
    await agent.policy_pins.learned("team-a/trainer:v1", package.digest, package.manifest, pinning.policy)
    assert not agent.store.pins.by_owner(), "nothing is open"
    opening = await opened(site, running, "team-a/trainer:v1")
    await agent.packages.learn_opened(pinning, agent.store.opened.manifest(package.digest), opening.manifest)
    (layer,) = opening.manifest.layers
    assert agent.store.pins.by_owner() == {"policy:team-a/trainer:v1": {layer.digest}}


async def test_a_model_is_opened_file_by_file(site: SealedSite) -> None:
    source = site.directory / "model"
    source.mkdir()
    for name, data in {"model.safetensors": os.urandom(200_000), "config.json": b"{}", "empty.txt": b""}.items():
        (source / name).write_bytes(data)
    reference = parse_reference("team-a/model:v1")
    await pack_model(source, reference, site.layout)
    await push_encrypted(reference, site.layout, site.origin, site.recipients["team-a"])
    running = await site.agent("h0", "a")
    package = await opened(site, running, "team-a/model:v1")
    store = running.agent.store
    for layer in package.manifest.layers:
        data = (source / layer.annotations[FILE_PATH]).read_bytes()
        blob = store.get(layer.digest)
        assert not data or (blob is not None and blob.path.read_bytes() == data)


async def test_pulls_of_one_package_open_it_once(site: SealedSite) -> None:
    pushed = await site.push("team-a/trainer:v1", site.source(size=1_000_000))
    running = await site.agent("h0", "a")
    await site.origin.tag(parse_reference("team-a/trainer:v2"), Descriptor(MANIFEST_TYPE, pushed.digest, pushed.size))
    names = ["team-a/trainer:v1", "team-a/trainer:v2", "team-a/trainer:v1"]
    pulls = await asyncio.gather(*(site.pull(running, name) for name in names))
    assert all(pull.error is None for pull in pulls), [pull.error for pull in pulls]
    (layer,) = pulls[0].package.manifest.layers  # type: ignore[union-attr]
    assert running.agent.sealed.bytes_decrypted == layer.size


async def test_a_start_does_not_wait_at_the_pace_of_a_preseed(site: SealedSite) -> None:
    await site.push("team-a/trainer:v1", site.source())
    running = await site.agent("h0", "a", download_bytes_s=50_000)
    agent = running.agent
    agent.pulls.start(PullRequest(package="team-a/trainer:v1", priority="preseed"))
    large = []

    def found() -> bool:
        large[:] = [pull for pull in agent.registry._fetching.values() if pull.blob.size > 200_000]
        return bool(large)

    await until(found)
    assert large[0].priority == "preseed"
    agent.pulls.start(PullRequest(package="team-a/trainer:v1"))
    await until(lambda: large[0].priority == "start")


@pytest.mark.root
async def test_a_disk_that_is_full_while_it_decrypts_says_so(site: SealedSite) -> None:
    await site.push("team-a/trainer:v1", site.source(size=1_500_000))
    disk = site.directory / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=True)
    try:
        running = await site.agent("h0", "a", store=disk / "store")
        filler = disk / "filler"
        real = Opening._begin

        def fill(self: Opening, blob: Descriptor, part: Descriptor) -> Blob:
            plain = real(self, blob, part)
            free = os.statvfs(disk)
            filler.write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - 100_000)))
            return plain

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Opening, "_begin", fill)
            pull = await site.pull(running, "team-a/trainer:v1")
        assert isinstance(pull.error, DiskFull), pull.error
        filler.unlink()
        await opened(site, running, "team-a/trainer:v1")
        await running.stop()
        await running.start()
        await opened(site, running, "team-a/trainer:v1")
        await running.agent.stop()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
