"""What a pusher of one namespace, or of a namespace that a host reads, cannot do to others by
encrypted packages, on real parts."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from sealed_rig import SealedSite, sealed_site
from test_client import serving

from p2pdist.agent.api.server import make_apps
from p2pdist.agent.buckets.package import BucketContext, PackageBucket
from p2pdist.gateway.s3.failures import S3Failure
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, Refused, UsageError
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
from p2pdist.package.modelpack import pack_model
from p2pdist.package.pack import pack
from p2pdist.package.repository import sealed as sealed_push
from p2pdist.package.repository.push import Pushed
from p2pdist.package.repository.sealed import push_encrypted
from p2pdist.store.store import redundant_parts


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[SealedSite]:
    async with sealed_site(tmp_path) as made:
        yield made


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
