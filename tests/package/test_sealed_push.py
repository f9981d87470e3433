"""Pushing packages encrypted: what is sent, what is not sent again, and what cannot be pushed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from p2pdist.encryption import decrypted, new_identity, unwrap
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Conflict, Corrupt, DiskFull, NotFound, P2PDistError, UsageError
from p2pdist.model.manifest import (
    PACK_TYPE,
    SEALED_TYPE,
    Descriptor,
    Manifest,
    decode_config,
    decode_manifest,
    parse_reference,
)
from p2pdist.model.sealed_package import (
    SealedConfig,
    decode_contents,
    decode_sealed_config,
    encode_contents,
    encrypted_by,
    opened_manifest,
)
from p2pdist.origin.drivers import open_origin
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.pack import pack
from p2pdist.package.repository import sealed_push
from p2pdist.package.repository.gc import sweep
from p2pdist.package.repository.push import Pushed
from p2pdist.package.repository.sealed_push import RECORD, push_encrypted, rewrap

REFERENCE = parse_reference("team-a/trainer:v1")
MARK = b"what nobody without the key may see"


class Rig:
    """A layout with a package, and an origin."""

    def __init__(self, directory: Path) -> None:
        self.layout, self.origin = LocalLayout(directory / "layout"), LocalLayout(directory / "origin")
        self.layout.scratch(), self.origin.scratch()
        self.source = directory / "source"
        self.source.mkdir()
        (self.source / "file").write_bytes(MARK + os.urandom(300_000))
        self.identity, self.recipient = new_identity()

    async def push(self, recipient: str = "") -> Pushed:
        return await push_encrypted(REFERENCE, self.layout, self.origin, recipient or self.recipient)

    async def sealed(self) -> tuple[Manifest, SealedConfig]:
        described = await self.origin.resolve(REFERENCE)
        manifest = decode_manifest(await self.origin.read(described.digest))
        return manifest, decode_sealed_config(await self.origin.read(manifest.config.digest), manifest)

    def keys(self, config: SealedConfig) -> dict[str, bytes]:
        return {name: unwrap(key, [self.identity]) for name, key in config.keys.items()}

    def blob(self, digest: Digest) -> bytes:
        return self.origin.blob_path(digest).read_bytes()


@pytest.fixture
async def rig(tmp_path: Path) -> Rig:
    made = Rig(tmp_path)
    await pack(made.source, REFERENCE, made.layout, level=1, format="tree")
    return made


async def test_the_holder_of_the_identity_gets_back_what_was_packed(rig: Rig) -> None:
    pushed = await rig.push()
    sealed, config = await rig.sealed()
    assert sealed.is_sealed and not sealed.layers and {part.media_type for part in sealed.parts} == {SEALED_TYPE}
    assert decode_config(await rig.origin.read(sealed.config.digest)).entrypoint == ()
    keys = rig.keys(config)
    plain = [
        decrypted(rig.blob(part.digest), keys[key], "x") for part, key in zip(sealed.parts, config.parts, strict=True)
    ]
    contents = decode_contents(plain[0], sealed)
    described = await rig.layout.resolve(REFERENCE)
    assert contents.digest == described.digest != pushed.digest
    for blob, data in zip(contents.manifest.blobs, plain[1:], strict=True):
        assert data == rig.layout.blob_path(blob.digest).read_bytes()
    everything = b"".join(path.read_bytes() for path in rig.origin.directory.rglob("*") if path.is_file())
    names = [blob.digest.partition(":")[2].encode() for blob in contents.manifest.blobs]
    assert MARK not in everything and described.digest.partition(":")[2].encode() not in everything
    assert not any(name in everything for name in names), "not even what the digests of plaintext are"


async def test_what_is_there_is_not_encrypted_again(rig: Rig) -> None:
    await rig.push()
    first, _ = await rig.sealed()
    (rig.source / "more").write_bytes(os.urandom(40_000))
    await pack(rig.source, REFERENCE, rig.layout, level=1, format="tree", base=REFERENCE)
    pushed = await rig.push()
    second, config = await rig.sealed()
    assert len({part.digest for part in first.parts} & {part.digest for part in second.parts}) >= 1
    assert pushed.bytes_sent < 120_000 and pushed.bytes_skipped > 300_000
    assert len(config.keys) == 2, "the reused blobs keep their key"
    keys = rig.keys(config)
    for part, key in zip(second.parts, config.parts, strict=True):
        decrypted(rig.blob(part.digest), keys[key], "x")
    record = (rig.layout.directory / RECORD).read_bytes()
    assert not any(key.hex().encode() in record for key in keys.values()) and b"AGE" not in record


@pytest.mark.parametrize("what", ["record", "blob", "tag"])
async def test_what_is_lost_is_encrypted_anew(rig: Rig, what: str) -> None:
    await rig.push()
    before, _ = await rig.sealed()
    match what:
        case "record":
            (rig.layout.directory / RECORD).write_text("{")
        case "blob":
            for part in before.parts:
                rig.origin.blob_path(part.digest).unlink()
        case "tag":
            await rig.origin.untag(REFERENCE)
    await rig.push()
    after, config = await rig.sealed()
    assert not {part.digest for part in before.parts} & {part.digest for part in after.parts}
    assert len(config.keys) == 1


async def test_another_recipient_has_all_encrypted_anew_unless_the_keys_were_wrapped_for_it(rig: Rig) -> None:
    await rig.push()
    before, _ = await rig.sealed()
    other, recipient = new_identity()
    await rig.push(recipient)
    after, config = await rig.sealed()
    assert not {part.digest for part in before.parts} & {part.digest for part in after.parts}
    assert {key.recipient for key in config.keys.values()} == {recipient}
    back = await rewrap(REFERENCE, rig.origin, lambda key: unwrap(key, [other]), rig.recipient)
    assert back is not None
    await rig.push()
    again, config = await rig.sealed()
    assert {part.digest for part in after.parts[1:]} == {part.digest for part in again.parts[1:]}
    rig.keys(config)


async def test_a_collection_keeps_what_a_sealed_package_names(rig: Rig) -> None:
    await rig.push()
    sealed, config = await rig.sealed()
    await sweep(rig.origin, older_than_s=-60.0)
    keys = rig.keys(config)
    for part, key in zip(sealed.parts, config.parts, strict=True):
        decrypted(rig.blob(part.digest), keys[key], "x")


async def test_what_cannot_be_encrypted_is_told(rig: Rig) -> None:
    described = await rig.layout.resolve(REFERENCE)
    with pytest.raises(UsageError, match="which encrypting changes"):
        await push_encrypted(
            parse_reference(f"team-a/trainer@{described.digest}"), rig.layout, rig.origin, rig.recipient
        )
    with pytest.raises(UsageError, match="no recipient"):
        await rig.push("age1nonsense")
    with pytest.raises(UsageError, match="is the layout"):
        await push_encrypted(
            REFERENCE, rig.layout, open_origin(rig.layout.directory.absolute().as_uri()), rig.recipient
        )
    await rig.push()
    sealed = await rig.origin.resolve(REFERENCE)
    for digest in (sealed.digest, decode_manifest(await rig.origin.read(sealed.digest)).config.digest):
        await rig.layout.write_document(await rig.origin.read(digest))
    await rig.layout.tag(parse_reference("team-a/sealed:v1"), sealed)
    with pytest.raises(UsageError, match="encrypted already"):
        await push_encrypted(parse_reference("team-a/sealed:v1"), rig.layout, rig.origin, rig.recipient)
    manifest = decode_manifest(await rig.layout.read(described.digest))
    rig.layout.blob_path(manifest.parts[-1].digest).unlink()
    (rig.layout.directory / RECORD).unlink()
    with pytest.raises(NotFound, match="only what is there can be encrypted"):
        await rig.push()


async def test_a_package_that_contradicts_itself_is_corrupt(rig: Rig) -> None:
    """Whoever pushes may write anything into the documents."""
    await rig.push()
    sealed, config = await rig.sealed()
    data = decrypted(rig.blob(sealed.parts[0].digest), rig.keys(config)[config.parts[0]], "x")
    contents = decode_contents(data, sealed)
    plain, *documents = contents.documents
    assert encrypted_by(opened_manifest(contents.manifest, sealed)).keys() == {
        blob.digest for blob in contents.manifest.blobs
    }
    named = json.loads(plain)
    named["layers"][0]["digest"] = sealed.parts[1].digest
    differing = json.loads(plain)
    differing["layers"].insert(0, {**differing["layers"][0], "size": differing["layers"][0]["size"] + 1})
    twice = json.loads(await rig.origin.read((await rig.origin.resolve(REFERENCE)).digest))
    for manifest, others in (
        (plain, documents[:-1]),
        (plain, [*documents, b"more"]),
        (json.dumps(named).encode(), documents),
        (json.dumps(differing).encode(), documents),
        (json.dumps(twice).encode(), documents),
        (b"{}", documents),
    ):
        with pytest.raises(Corrupt):
            decode_contents(encode_contents(manifest, tuple(others)), sealed)
    with pytest.raises(Corrupt):
        decode_contents(b"\xc1", sealed)
    with pytest.raises(Corrupt):
        decode_contents(data, Manifest(sealed.config, (), sealed.piece_lists, sealed.parts[:-1]))


async def test_what_a_disk_changed_in_the_layout_is_not_encrypted(rig: Rig) -> None:
    described = await rig.layout.resolve(REFERENCE)
    pack_ = max(decode_manifest(await rig.layout.read(described.digest)).blobs, key=lambda blob: blob.size)
    path = rig.layout.blob_path(pack_.digest)
    good = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(good[:1000] + bytes([good[1000] ^ 1]) + good[1001:])
    with pytest.raises(Corrupt, match="was altered"):
        await rig.push()
    assert not (rig.layout.directory / RECORD).exists()
    path.write_bytes(good)
    await rig.push()


async def test_two_pushes_at_once_keep_the_records_of_both(rig: Rig, tmp_path: Path) -> None:
    """Else hosts would fetch the next version of one of them whole."""
    other = parse_reference("team-a/other:v1")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_bytes(os.urandom(200_000))
    await pack(tmp_path / "other", other, rig.layout, level=1, format="tree")
    references = (REFERENCE, other)
    await asyncio.gather(*(push_encrypted(each, rig.layout, rig.origin, rig.recipient) for each in references))
    for reference in references:
        again = await push_encrypted(reference, rig.layout, rig.origin, rig.recipient)
        assert again.bytes_sent < 100_000


@pytest.mark.root
async def test_a_disk_that_is_full_is_named(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", tmp_path / "disk"], check=True)
    try:
        shutil.copytree(rig.layout.directory, tmp_path / "disk/layout")
        layout = LocalLayout(tmp_path / "disk/layout")
        with pytest.raises(DiskFull, match=f"{layout.directory} lacks space"):
            await push_encrypted(REFERENCE, layout, rig.origin, rig.recipient)
        assert list((layout.directory / ".incoming").iterdir()) == []
        await layout.close()
    finally:
        subprocess.run(["umount", tmp_path / "disk"], check=True)


async def test_a_record_that_cannot_be_written_leaves_nothing_and_is_named(rig: Rig) -> None:
    (rig.layout.directory / RECORD / "in the way").mkdir(parents=True)
    with pytest.raises(P2PDistError, match=f"{REFERENCE} was pushed, and .*{RECORD} cannot be written"):
        await rig.push()
    assert [name for name in os.listdir(rig.layout.directory) if RECORD in name] == [RECORD]
    await rig.origin.resolve(REFERENCE)


async def test_a_package_has_no_more_keys_than_hosts_take(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_push, "KEYS_MAX", 1)
    for _ in range(2):
        await rig.push()
        _, config = await rig.sealed()
        assert len(config.keys) == 1


async def test_a_record_keeps_within_its_limit(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.push()
    path = rig.layout.directory / RECORD
    limit = path.stat().st_size - 1
    latest = list(json.loads(path.read_bytes()))[-1]
    monkeypatch.setattr(sealed_push, "RECORD_BYTES_MAX", limit)
    again = await rig.push()
    assert path.stat().st_size <= limit and again.bytes_sent > 300_000, "one over the limit is not read"
    assert latest in json.loads(path.read_bytes())


async def test_blanks_around_a_recipient_mean_nothing(rig: Rig) -> None:
    await rig.push(f" {rig.recipient}\n")
    _, config = await rig.sealed()
    assert {key.recipient for key in config.keys.values()} == {rig.recipient}


async def test_more_documents_than_hosts_take_are_not_pushed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_push, "DOCUMENTS_BYTES_MAX", 100)
    with pytest.raises(UsageError, match="may have 100"):
        await rig.push()


def test_the_encrypted_blobs_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a package with thousands of blobs, each of which is looked up."""

    def described(kind: str, number: int) -> Descriptor:
        return Descriptor(kind, digest_of(f"{kind}{number}".encode()), 100_000 + number)

    plain = tuple(described(PACK_TYPE, number) for number in range(500))
    sealed = tuple(described(SEALED_TYPE, number) for number in range(501))
    looks, encrypted = [], Manifest.encrypted.fget
    assert encrypted is not None
    monkeypatch.setattr(Manifest, "encrypted", property(lambda self: looks.append(1) or encrypted(self)))
    found = encrypted_by(Manifest(described("config", 0), (), (), plain + sealed))
    assert found == {blob.digest: part for blob, part in zip(plain, sealed[1:], strict=True)}
    assert len(looks) == 1


async def test_keys_that_are_wrapped_anew_take_no_tag_from_a_push(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.push()
    _, recipient = new_identity()
    newer: list[Pushed] = []
    size = LocalLayout.size

    async def pushed_meanwhile(self: LocalLayout, digest: Digest) -> int | None:
        if self is rig.origin and not newer:
            monkeypatch.setattr(LocalLayout, "size", size)
            (rig.layout.directory / RECORD).unlink()
            newer.append(await rig.push())
        return await size(self, digest)

    monkeypatch.setattr(LocalLayout, "size", pushed_meanwhile)
    with pytest.raises(Conflict, match="was pushed anew meanwhile"):
        await rewrap(REFERENCE, rig.origin, lambda key: unwrap(key, [rig.identity]), recipient)
    assert (await rig.origin.resolve(REFERENCE)).digest == newer[0].digest
    assert await rewrap(REFERENCE, rig.origin, lambda key: unwrap(key, [rig.identity]), recipient) is not None
