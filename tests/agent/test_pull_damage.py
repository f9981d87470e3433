"""Pulls of an agent over a store whose bytes changed on the disk after they had verified: what is
wrong comes again from the origin; a disk that goes on is named."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path

import pytest

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.pull.pulls import Pull, check_whole
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Corrupt, Damaged
from p2pdist.model.manifest import CATALOG_TYPE, PACK_TYPE, TREE_TYPE, Manifest, decode_manifest, parse_reference
from p2pdist.model.messages import PullRequest
from p2pdist.model.pieces import PieceList
from p2pdist.model.tree import WHOLE_MAX
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.layers import PackOptions, pack_layers, plain_layer
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.extraction import Extracted
from p2pdist.store.trees.missing_contents import Missing

TAG = parse_reference("app:v1")
LARGE = WHOLE_MAX + (1 << 20)


def flip(path: Path, at: int) -> None:
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


@pytest.fixture
async def layout(tmp_path: Path) -> AsyncIterator[LocalLayout]:
    """An origin with a package of one tree: small files and a large one."""
    made = LocalLayout(tmp_path / "origin")
    made.scratch()
    source, dice = tmp_path / "source", random.Random(1)
    source.mkdir()
    for number in range(60):
        (source / f"f{number}").write_bytes(dice.randbytes(20_000))
    (source / "large").write_bytes(dice.randbytes(LARGE))
    await pack_layers([plain_layer(source, "tree", ())], TAG, made, PackOptions())
    yield made
    await made.close()


@pytest.fixture
async def agent(tmp_path: Path, layout: LocalLayout) -> AsyncIterator[Agent]:
    made = Agent(AgentSettings((), "h1", "127.0.0.1:1", tmp_path / "store", origin=layout.url, scrub_s=0.0))
    await made.start()
    yield made
    await made.stop()


async def manifest_of(layout: LocalLayout) -> Manifest:
    return decode_manifest(await layout.read((await layout.resolve(TAG)).digest))


def part_of(manifest: Manifest, media_type: str) -> Digest:
    return next(blob.digest for blob in manifest.blobs if blob.media_type == media_type)


async def pulled(agent: Agent, package: str) -> Pull:
    pull = agent.pulls.start(PullRequest(package=package))
    assert pull.task is not None
    await asyncio.wait([pull.task])
    return pull


def complete(store: BlobStore, digest: Digest, pieces: PieceList, data: bytes) -> Blob:
    """A blob, all of whose pieces have verified."""
    blob = store.begin(digest, pieces)
    for piece in range(pieces.layout.count):
        start = pieces.layout.offset(piece)
        assert blob.write(piece, data[start : start + pieces.layout.length(piece)])
    blob.finish()
    return blob


def shows_everything(agent: Agent, manifest: Manifest, source: Path) -> None:
    entries = agent.store.trees.entries(part_of(manifest, TREE_TYPE))
    files = {entry.path.decode(): agent.store.objects.path(entry.content).read_bytes() for entry in entries}  # type: ignore[union-attr]
    assert files == {path.name: path.read_bytes() for path in source.iterdir()}


@pytest.mark.parametrize("media_type", [PACK_TYPE, CATALOG_TYPE, TREE_TYPE], ids=["pack", "catalog", "root"])
async def test_a_package_comes_again_where_the_disk_changed_a_part(
    agent: Agent, layout: LocalLayout, tmp_path: Path, media_type: str
) -> None:
    """The part is complete before the package is pulled; many of its pieces are wrong."""
    manifest = await manifest_of(layout)
    digest = part_of(manifest, media_type)
    data = layout.blob_path(digest).read_bytes()
    blob = complete(agent.store, digest, PieceList.of_stream(BytesIO(data), len(data)), data)
    for piece in range(0, blob.layout.count, 2):
        flip(blob.path, blob.layout.offset(piece) + blob.layout.length(piece) // 2)
    pull = await pulled(agent, str(TAG))
    assert pull.error is None, pull.error
    await asyncio.to_thread(shows_everything, agent, manifest, tmp_path / "source")
    assert blob.complete and not await asyncio.to_thread(blob.verify)
    assert agent.store.integrity.damaged["blob"] >= 1  # a reader may meet it while another one reads all of it


@pytest.mark.slow
async def test_a_disk_that_goes_on_is_named(
    agent: Agent, layout: LocalLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is not blamed, and the next pull over a sound disk brings it."""
    manifest = await manifest_of(layout)
    digest, fill = part_of(manifest, PACK_TYPE), agent.store.trees.fill

    def over_bad_disk(missing: Missing) -> Extracted:
        blob = agent.store.get(digest)
        if blob is not None and blob.complete:
            flip(blob.path, blob.size // 2)
        return fill(missing)

    with monkeypatch.context() as bad:
        bad.setattr(agent.store.trees, "fill", over_bad_disk)
        pull = await pulled(agent, str(TAG))
    assert isinstance(pull.error, Corrupt) and str(tmp_path / "store") in pull.error.what, pull.error
    assert "dmesg" in pull.error.remedy and "Pack" not in pull.error.remedy
    assert (await pulled(agent, str(TAG))).error is None
    await asyncio.to_thread(shows_everything, agent, manifest, tmp_path / "source")


@pytest.mark.slow
async def test_an_older_object_that_is_damaged_costs_another_attempt(
    agent: Agent, layout: LocalLayout, tmp_path: Path
) -> None:
    """The next version takes the chunks of the large file from it, while nothing told of the
    damage."""
    assert (await pulled(agent, str(TAG))).error is None
    source, second = tmp_path / "source", parse_reference("app:v2")
    with (source / "large").open("ab") as file:
        file.write(b"more")
    await pack_layers([plain_layer(source, "tree", ())], second, layout, PackOptions())
    large = next(content for content, size in agent.store.objects.sizes.items() if size == LARGE)
    flip(agent.store.objects.path(large), 100_000)
    assert (await pulled(agent, str(second))).error is None
    manifest = decode_manifest(await layout.read((await layout.resolve(second)).digest))
    await asyncio.to_thread(shows_everything, agent, manifest, source)
    assert large not in agent.store.objects
    assert agent.store.integrity.damaged["object"] >= 1


@pytest.mark.parametrize("liar", ["disk", "origin"])
async def test_the_sum_of_a_blob_says_whether_disk_or_origin_is_at_fault(tmp_path: Path, liar: str) -> None:
    store, data = BlobStore(tmp_path / "store"), random.Random(3).randbytes(10 * 65536)
    pieces = PieceList.of_stream(BytesIO(data), len(data))
    blob = complete(store, digest_of(data if liar == "disk" else b"other"), pieces, data)
    if liar == "disk":
        flip(blob.path, 5 * 65536 + 7)
    expected: type[Exception] = Damaged if liar == "disk" else Corrupt

    async def here(_: int) -> None:
        """Every piece is."""

    with pytest.raises(expected):
        await check_whole(blob, here)
    assert len(blob.have) == pieces.layout.count - (liar == "disk")
    store.close()
