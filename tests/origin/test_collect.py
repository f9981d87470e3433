"""Collection as it is meant to go: what is kept and what goes, by tag, lease and age; and what
stops it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from collect_rig import backdate, check_contents, holds, make_package, named
from origin_rig import Place, Web

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Conflict, Corrupt, NotFound, Unavailable, UsageError
from p2pdist.model.manifest import MANIFEST_TYPE, Descriptor
from p2pdist.origin import layout as layout_module
from p2pdist.origin.drivers import open_origin
from p2pdist.origin.layout import LayoutOrigin, LocalLayout
from p2pdist.package.repository import gc as collect_module
from p2pdist.package.repository import notes
from p2pdist.package.repository.gc import sweep
from p2pdist.package.repository.notes import LEASE_S, PushLease, encode_note, note_name
from p2pdist.package.repository.push import push, push_blob

ORPHAN = b"nothing leads here"


@pytest.fixture
async def layout(tmp_path: Path) -> AsyncIterator[LocalLayout]:
    opened = LocalLayout(tmp_path / "layout")
    yield opened
    await opened.close()


@pytest.mark.slow
async def test_what_no_tag_leads_to_goes_and_the_rest_stays(place: Place, layout: LocalLayout, tmp_path: Path) -> None:
    """In directories and buckets alike: two packages that share a layer, one of which loses its
    tag."""
    origin = place.origin
    shared, own, other = os.urandom(3000), os.urandom(2000), os.urandom(1000)
    first = await make_package(layout, [shared, own], "app:1")
    second = await make_package(layout, [shared, other], "app:2")
    (tmp_path / "file").write_bytes(b"single")
    for tag in ("app:1", "app:2"):
        await push(named(tag), layout, origin)
    alone = await push_blob(tmp_path / "file", origin)
    assert (await sweep(origin, older_than_s=-1)).blobs_removed == 0
    assert (await origin.untag(named("app:1"))).digest == first[-1]
    with pytest.raises(NotFound, match="app:1"):
        await origin.untag(named("app:1"))
    gone = set(first) - set(second) - {digest_of(b"single")}
    sizes = {digest: size for digest, size, _ in await origin.blobs()}
    assert (await sweep(origin)).blobs_removed == 0, "what is a day old or younger stays"
    counted = await sweep(origin, older_than_s=-1, dry_run=True)
    assert {digest: size for digest, size, _ in await origin.blobs()} == sizes
    done = await sweep(origin, older_than_s=-1)
    assert done == counted
    assert (done.blobs_removed, done.blobs_kept) == (len(gone), len(sizes) - len(gone))
    assert done.bytes_freed == sum(sizes[digest] for digest in gone)
    assert {digest for digest, _, _ in await origin.blobs()} == sizes.keys() - gone
    assert await check_contents(origin) == 2
    assert await origin.size(alone.digest) == 6
    assert await origin.notes() == []
    assert (await push(named("app:1"), layout, origin)).bytes_sent == done.bytes_freed


async def test_age_counts_from_the_last_writing(layout: LocalLayout) -> None:
    digests = await make_package(layout, [b"layer"], "app:1")
    orphan = await layout.write_document(ORPHAN)
    assert (await sweep(layout, older_than_s=3600)).blobs_removed == 0
    backdate(layout.directory, 7200, kind="blobs")
    assert (await sweep(layout, older_than_s=3600)).blobs_removed == 1
    assert not holds(layout.directory, orphan)
    assert all(holds(layout.directory, digest) for digest in digests)


async def test_a_lease_keeps_blobs_until_it_is_given_up_or_void(layout: LocalLayout) -> None:
    await make_package(layout, [b"layer"], "app:1")
    orphan = await layout.write_document(ORPHAN)
    async with PushLease(layout, [orphan]):
        assert (await sweep(layout, older_than_s=-1)).blobs_removed == 0
        backdate(layout.directory, LEASE_S - 60, kind="notes")
        assert (await sweep(layout, older_than_s=-1)).blobs_removed == 0
        backdate(layout.directory, LEASE_S + 60, kind="notes")
        assert (await sweep(layout, older_than_s=-1)).blobs_removed == 1
        assert await layout.notes() == [], "void notes are removed"
    await layout.write_document(ORPHAN)
    async with PushLease(layout, [digest_of(b"something else")]):
        assert (await sweep(layout, older_than_s=-1)).blobs_removed == 1


async def test_a_lease_taken_after_the_marking_still_counts(layout: LocalLayout) -> None:
    """Between marking and deletion leases are read again."""

    class Slow(LocalLayout):
        async def notes(self) -> list[tuple[str, float]]:
            found = await super().notes()
            if any(name.startswith("removal-") for name, _ in found):
                looks.append(found)
                if len(looks) == 2:  # the marking has read the leases
                    await self.write_note(note_name("lease-"), encode_note([orphan]))
            return found

    looks: list[object] = []
    await make_package(layout, [b"layer"], "app:1")
    orphan = await layout.write_document(ORPHAN)
    slow = Slow(layout.directory)
    assert (await sweep(slow, older_than_s=-1)).blobs_removed == 0
    assert len(looks) > 2
    assert holds(layout.directory, orphan)
    await slow.close()


async def test_a_tag_set_after_the_marking_still_counts(layout: LocalLayout) -> None:
    """Between marking and deletion tags are read again."""

    class Slow(LocalLayout):
        rounds = 0

        async def roots(self) -> list[tuple[str, Descriptor]]:
            self.rounds += 1
            found = await super().roots()
            if self.rounds == 2:
                await self.tag(named("app:2"), described)
            return found

    await make_package(layout, [b"layer"], "app:1")
    digests = await make_package(layout, [b"another"], "app:2")
    described = await layout.untag(named("app:2"))
    slow = Slow(layout.directory)
    assert (await sweep(slow, older_than_s=-1)).blobs_removed == 0
    assert slow.rounds > 2
    assert all(holds(layout.directory, digest) for digest in digests)
    await slow.close()


async def test_a_push_sends_again_what_a_removal_under_way_names(place: Place, layout: LocalLayout) -> None:
    """What is there but about to be deleted is not skipped: the push waits, and finds it gone."""
    origin = place.origin
    digests = await make_package(layout, [b"layer"], "app:1", "app:2")
    await push(named("app:1"), layout, origin)
    note = note_name("removal-")
    await origin.write_note(note, encode_note(digests[:1]))
    waiting = asyncio.Event()
    loop = asyncio.get_running_loop()

    def watch(what: str, _done: int, _total: int) -> None:
        if what.startswith("waiting"):
            loop.call_soon_threadsafe(waiting.set)

    pushing = asyncio.create_task(push(named("app:2"), layout, origin, on_progress=watch))
    await asyncio.wait_for(waiting.wait(), 60)
    assert [name for name, _ in await origin.tags()] == ["app:1"]
    await origin.remove(digests[:1])
    await origin.remove_notes([note])
    assert (await asyncio.wait_for(pushing, 60)).bytes_sent == len(b"layer")
    assert await check_contents(origin) == 2
    assert await origin.notes() == []


async def test_a_push_whose_lease_lapsed_looks_at_everything_again(
    layout: LocalLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that slept for an hour may have lost what it had sent; the tag waits until it is
    sent again."""
    slept = 0.0
    awake = notes.clock
    monkeypatch.setattr(notes, "clock", lambda: awake() + slept)
    held: list[bool] = []

    class Watched(LocalLayout):
        async def tag(self, reference: object, descriptor: Descriptor) -> None:
            held.append(holds(self.directory, digests[0]))
            await super().tag(named("app:1"), descriptor)

    digests = await make_package(layout, [b"layer"], "app:1")
    origin = Watched(tmp_path / "origin")

    def sleep(_what: str, done: int, total: int) -> None:
        nonlocal slept
        if done == total and not slept:
            slept = LEASE_S
            origin.blob_path(digests[0]).unlink()

    pushed = await push(named("app:1"), layout, origin, on_progress=sleep)
    assert held == [True]
    assert pushed.bytes_sent > sum(layout.blob_path(digest).stat().st_size for digest in digests)
    await origin.close()


async def test_a_push_looks_once_more_after_the_tag(layout: LocalLayout, tmp_path: Path) -> None:
    """What went although nothing should have removed it is sent again."""

    class Careless(LocalLayout):
        async def tag(self, reference: object, descriptor: Descriptor) -> None:
            await super().tag(named("app:1"), descriptor)
            await self.remove(digests)

    digests = await make_package(layout, [b"layer"], "app:1")
    origin = Careless(tmp_path / "origin")
    await push(named("app:1"), layout, origin)
    assert await check_contents(origin) == 1
    await origin.close()


async def test_a_failed_push_gives_its_lease_up(layout: LocalLayout, tmp_path: Path) -> None:
    digests = await make_package(layout, [b"layer"], "app:1")
    layout.blob_path(digests[0]).unlink()
    origin = LocalLayout(tmp_path / "origin")
    with pytest.raises(NotFound):
        await push(named("app:1"), layout, origin)
    assert await origin.notes() == []
    await origin.close()


async def test_a_failed_deletion_leaves_its_note(layout: LocalLayout) -> None:
    """The request may yet be carried out, so whoever relies on the blob has to wait."""

    class Failing(LocalLayout):
        async def remove(self, digests: object) -> None:
            raise Unavailable("no answer in time")

    await make_package(layout, [b"layer"], "app:1")
    orphan = await layout.write_document(ORPHAN)
    failing = Failing(layout.directory)
    with pytest.raises(Unavailable):
        await sweep(failing, older_than_s=-1)
    ((name, _),) = await layout.notes()
    assert name.startswith("removal-")
    assert await layout.read_note(name) == encode_note([orphan])
    await failing.close()


@pytest.mark.parametrize("data", [None, b"not json"])
async def test_an_unreadable_manifest_of_a_tag_stops_everything(
    place: Place, layout: LocalLayout, data: bytes | None
) -> None:
    origin = place.origin
    await make_package(layout, [b"layer"], "app:1")
    await push(named("app:1"), layout, origin)
    orphan = await origin.write_document(ORPHAN)
    if data is None:
        lost = Descriptor(MANIFEST_TYPE, digest_of(b"gone"), 4)
    else:
        lost = Descriptor(MANIFEST_TYPE, await origin.write_document(data), len(data))
    await origin.tag(named("app:broken"), lost)
    with pytest.raises((NotFound, Corrupt), match="app:broken") as caught:
        await sweep(origin, older_than_s=-1)
    assert caught.value.details["tag"] == "app:broken"
    assert await origin.size(orphan) == len(ORPHAN)
    assert await origin.notes() == []
    await origin.untag(named("app:broken"))
    assert (await sweep(origin, older_than_s=-1)).blobs_removed == (1 if data is None else 2)


async def test_where_there_is_no_layout_nothing_is_removed_or_made(place: Place, tmp_path: Path) -> None:
    orphan = await place.origin.write_document(ORPHAN)
    with pytest.raises(NotFound, match=r"no index\.json"):
        await sweep(place.origin, older_than_s=-1)
    assert await place.origin.size(orphan) == len(ORPHAN)
    absent = open_origin((tmp_path / "absent").as_uri())
    with pytest.raises(NotFound, match="there is no directory"):
        await sweep(absent)
    with pytest.raises(NotFound, match="there is no directory"):
        await absent.untag(named("app:1"))
    assert not (tmp_path / "absent").exists()
    await absent.close()


async def test_a_web_server_is_not_collected_in(web: object, layout: LocalLayout) -> None:
    await make_package(layout, [b"layer"], "app:1")
    served: Web = web(layout.directory)  # type: ignore[operator]
    origin = open_origin(served.url)
    with pytest.raises(UsageError, match="cannot be written to"):
        await sweep(origin)
    await origin.close()


async def test_a_malformed_lease_stops_everything(layout: LocalLayout) -> None:
    await make_package(layout, [b"layer"], "app:1")
    await layout.write_document(ORPHAN)
    await layout.write_note(note_name("lease-"), b"what is this\n")
    with pytest.raises(Corrupt, match="lease-"):
        await sweep(layout, older_than_s=-1)
    assert len(await layout.blobs()) == 5


async def test_files_of_other_tools_are_not_touched(layout: LocalLayout) -> None:
    await make_package(layout, [b"layer"], "app:1")
    for name in ("blobs/sha256/README", "blobs/sha256/" + "A" * 64, "blobs/sha512/" + "0" * 128, "other"):
        path = layout.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    await sweep(layout, older_than_s=-1)
    assert (layout.directory / "blobs/sha512" / ("0" * 128)).exists()
    assert (layout.directory / "blobs/sha256/README").exists()
    assert (layout.directory / "other").exists()
    assert (layout.directory / "blobs/sha256" / ("A" * 64)).exists()


async def test_a_packing_keeps_collections_out_and_the_other_way_round(
    layout: LocalLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_module, "PACKING_WAIT_S", 0.1)
    await make_package(layout, [b"layer"], "app:1")
    await layout.write_document(ORPHAN)
    async with layout.packing(), layout.packing():
        with pytest.raises(Conflict, match="being packed"):
            await sweep(layout, older_than_s=-1)
    async with layout.packing(alone=True):
        with pytest.raises(Conflict, match="being removed"):
            async with layout.packing():
                pass
    assert (await sweep(layout, older_than_s=-1)).blobs_removed == 1


@pytest.mark.slow
async def test_more_blobs_than_one_batch_or_page_holds(
    place: Place, layout: LocalLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listings of S3 come in pages, of 1,000 keys elsewhere."""
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "40")
    monkeypatch.setattr(collect_module, "BATCH_BLOBS", 70)
    await make_package(layout, [b"layer"], "app:1")
    await push(named("app:1"), layout, place.origin)
    orphans = [f"orphan {number}".encode() for number in range(150)]
    if place.url.startswith("file"):
        for data in orphans:
            (Path(place.url.removeprefix("file://")) / "blobs/sha256" / digest_of(data)[7:]).write_bytes(data)
    else:
        for data in orphans:
            place.overwrite(f"blobs/sha256/{digest_of(data)[7:]}", data)
    done = await sweep(place.origin, older_than_s=-1)
    assert (done.blobs_removed, done.blobs_kept) == (150, 4)
    assert await check_contents(place.origin) == 1


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo")
async def test_images_that_skopeo_wrote_stay_whole(tmp_path: Path, layout: LocalLayout) -> None:
    """An index of images for two platforms, and one of its images alone, copied by another tool,
    nested as it does."""
    platforms = []
    for machine in ("amd64", "arm64"):
        layers = [await layout.write_document(f"{machine} layer {number}".encode()) for number in range(2)]
        config = json.dumps(
            {"architecture": machine, "os": "linux", "rootfs": {"type": "layers", "diff_ids": layers}}
        ).encode()
        body = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": describe("application/vnd.oci.image.config.v1+json", config),
            "layers": [
                describe("application/vnd.oci.image.layer.v1.tar", f"{machine} layer {number}".encode())
                for number in range(2)
            ],
        }
        await layout.write_document(config)
        manifest = json.dumps(body).encode()
        await layout.write_document(manifest)
        platform = {"architecture": machine, "os": "linux"}
        platforms.append({**describe(MANIFEST_TYPE, manifest), "platform": platform})
    kind = "application/vnd.oci.image.index.v1+json"
    nested = json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": platforms}).encode()
    await layout.tag(named("multi:1"), Descriptor(kind, await layout.write_document(nested), len(nested)))
    everything = {digest for digest, _, _ in await layout.blobs()}
    for target, options in (("all", ["--all"]), ("one", ["--override-arch", "arm64"])):
        command = ["skopeo", "copy", *options, f"oci:{layout.directory}:multi:1", f"oci:{tmp_path}/{target}:multi:1"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        origin = open_origin((tmp_path / target).as_uri())
        assert isinstance(origin, LayoutOrigin)
        before = {digest for digest, _, _ in await origin.blobs()}
        await origin.write_document(ORPHAN)
        assert (await sweep(origin, older_than_s=-1)).blobs_removed == 1
        assert {digest for digest, _, _ in await origin.blobs()} == before
        kinds = [described.media_type for _, described in await origin.roots()]
        assert kinds == [kind if target == "all" else MANIFEST_TYPE]
        assert len(before) == (len(everything) if target == "all" else 4), (before, everything)
        await origin.close()


def describe(kind: str, data: bytes) -> dict[str, str | int]:
    return {"mediaType": kind, "digest": str(Digest(digest_of(data))), "size": len(data)}
