"""Packing and pushing, from directories to an origin."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Corrupt, NotFound, TooLarge, UsageError
from p2pdist.model.manifest import (
    SQUASHFS_TYPE,
    Manifest,
    blob_reference,
    decode_config,
    decode_manifest,
    parse_reference,
)
from p2pdist.model.pieces import PieceList
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.modelpack import pack_model
from p2pdist.package.pack import Packed, Settings, pack
from p2pdist.package.repository.contract import Content, read_content
from p2pdist.package.repository.push import compare, push, push_blob

BASE, V1, V2 = (parse_reference(text) for text in ("team/env:1", "trainer:v1", "trainer:v2"))


@pytest.fixture
async def layout(tmp_path: Path) -> AsyncIterator[LocalLayout]:
    opened = LocalLayout(tmp_path / "data/layout")
    yield opened
    await opened.close()


@pytest.fixture
async def origin(tmp_path: Path) -> AsyncIterator[LocalLayout]:
    opened = LocalLayout(tmp_path / "origin")
    yield opened
    await opened.close()


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    """Two directories: an environment and an application."""
    made = {}
    for name, size in (("env", 3_000_000), ("app", 5_000)):
        made[name] = tmp_path / name
        made[name].mkdir()
        (made[name] / "content").write_bytes(os.urandom(size))
        (made[name] / "name").write_text(name)
    return made


async def manifest_of(layout: LocalLayout, packed: Packed) -> Manifest:
    return decode_manifest(await layout.read(Digest(packed.digest)))


async def test_a_layer_is_trusted_through_the_manifest(layout: LocalLayout, sources: dict[str, Path]) -> None:
    """Manifest, descriptor, piece list, piece: each names the next by its hash."""
    packed = await pack(sources["env"], BASE, layout)
    described = await layout.resolve(BASE)
    assert described.digest == packed.digest
    manifest = await manifest_of(layout, packed)
    (layer,) = manifest.layers
    assert layer.media_type == SQUASHFS_TYPE
    image = layout.blob_path(layer.digest).read_bytes()
    assert hashlib.sha256(image).hexdigest() == layer.digest[7:]
    pieces = PieceList.decode(await layout.read(layer.pieces_digest))
    assert pieces.layout == layer.layout
    assert pieces.layout.size == len(image)
    for piece in range(pieces.layout.count):
        start = pieces.layout.offset(piece)
        data = image[start : start + pieces.layout.length(piece)]
        assert pieces.hashes[piece * 32 : piece * 32 + 32] == blake3(data).digest()
    assert (packed.files, packed.bytes_total) == (2, 3_000_003)
    assert packed.layers == (layer,)


async def test_packing_twice_gives_the_same_package(
    layout: LocalLayout, origin: LocalLayout, sources: dict[str, Path]
) -> None:
    settings = Settings(["./run"], ["A=1"], "/x")
    first = await pack(sources["env"], BASE, layout, settings=settings)
    again = await pack(sources["env"], V1, origin, settings=settings)
    assert first.digest == again.digest


async def test_a_base_is_stacked_on_untouched(layout: LocalLayout, sources: dict[str, Path]) -> None:
    base = await pack(sources["env"], BASE, layout, settings=Settings(["base"], ["A=1", "B=2"], "/w"))
    packed = await pack(sources["app"], V1, layout, base=BASE, settings=Settings(env=["B=3", "C=4"]))
    assert packed.layers[0] == base.layers[0]
    assert len(packed.layers) == 2
    manifest = await manifest_of(layout, packed)
    config = decode_config(await layout.read(manifest.config.digest))
    assert config.entrypoint == ("base",)
    assert config.env == ("A=1", "B=3", "C=4")
    assert config.working_dir == "/w"
    other = await pack(sources["app"], V2, layout, base=BASE, settings=Settings([], working_dir=""))
    manifest = await manifest_of(layout, other)
    config = decode_config(await layout.read(manifest.config.digest))
    assert (config.entrypoint, config.working_dir) == ((), "")


async def test_a_base_at_the_origin_is_not_copied(
    layout: LocalLayout, origin: LocalLayout, tmp_path: Path, sources: dict[str, Path]
) -> None:
    """Its layers stay where they are; piece lists and config come along, and the push finds the
    layers there."""
    first = await pack(sources["env"], BASE, layout)
    await push(BASE, layout, origin)
    fresh = LocalLayout(tmp_path / "fresh")
    packed = await pack(sources["app"], V1, fresh, base=BASE, origin=origin)
    assert await fresh.size(first.layers[0].digest) is None
    assert await fresh.size(first.layers[0].pieces_digest) is not None
    pushed = await push(V1, fresh, origin)
    assert pushed.digest == packed.digest
    assert pushed.bytes_sent < 20_000
    assert pushed.bytes_skipped >= 3_000_000
    with pytest.raises(NotFound, match="trainer:v9"):
        await pack(sources["app"], V1, fresh, base=parse_reference("trainer:v9"), origin=origin)
    await fresh.close()


async def test_a_push_sends_what_is_lacking_and_only_once(
    layout: LocalLayout, origin: LocalLayout, sources: dict[str, Path]
) -> None:
    await pack(sources["env"], BASE, layout)
    packed = await pack(sources["app"], V1, layout, base=BASE)
    seen: list[tuple[str, int, int]] = []
    first = await push(V1, layout, origin, on_progress=lambda *step: seen.append(step))
    stored = sum(path.stat().st_size for path in (origin.directory / "blobs/sha256").iterdir())
    assert (first.bytes_sent, first.bytes_skipped) == (stored, 0)
    assert seen[-1] == ("pushing", stored, stored)
    again = await push(V1, layout, origin)
    assert (again.bytes_sent, again.bytes_skipped) == (0, stored)
    assert (await origin.resolve(V1)).digest == packed.digest
    changed = sources["app"] / "name"
    changed.write_text("changed")
    await pack(sources["app"], V2, layout, base=BASE)
    second = await push(V2, layout, origin)
    assert second.bytes_sent < 20_000


async def test_a_failed_push_shows_no_tag(layout: LocalLayout, origin: LocalLayout, sources: dict[str, Path]) -> None:
    """The tag comes last: while any content is missing or altered the reference stays unknown, and
    so does the manifest."""
    packed = await pack(sources["env"], BASE, layout)
    path = layout.blob_path(packed.layers[0].digest)
    data = path.read_bytes()
    path.write_bytes(b"\0" + data[1:])
    with pytest.raises(Corrupt, match=packed.layers[0].digest):
        await push(BASE, layout, origin)
    path.unlink()
    with pytest.raises(NotFound, match=packed.layers[0].digest):
        await push(BASE, layout, origin)
    with pytest.raises(NotFound):
        await origin.resolve(BASE)
    assert await origin.size(Digest(packed.digest)) is None
    path.write_bytes(data)
    await push(BASE, layout, origin)
    assert (await origin.resolve(BASE)).digest == packed.digest


async def test_a_reference_that_was_never_packed(layout: LocalLayout, origin: LocalLayout) -> None:
    with pytest.raises(NotFound):
        await push(V1, layout, origin)
    layout.scratch()
    with pytest.raises(NotFound, match="trainer:v1"):
        await push(V1, layout, origin)


@pytest.mark.parametrize("size", [0, 1, 65_536, 300_001])
async def test_a_single_file_is_a_package_of_its_own(origin: LocalLayout, tmp_path: Path, size: int) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(size))
    pushed = await push_blob(path, origin)
    assert (pushed.digest, pushed.size) == (digest_of(path.read_bytes()), size)
    described = await origin.resolve(blob_reference(pushed.digest))
    manifest = decode_manifest(await origin.read(described.digest))
    (layer,) = manifest.layers
    assert (layer.digest, layer.size) == (pushed.digest, size)
    pieces = PieceList.decode(await origin.read(layer.pieces_digest))
    assert pieces.layout == layer.layout
    assert (await push_blob(path, origin)).bytes_sent == 0


async def test_what_is_no_file_is_not_pushed(origin: LocalLayout, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        await push_blob(tmp_path / "absent", origin)
    with pytest.raises(UsageError):
        await push_blob(tmp_path, origin)


async def test_a_file_that_grows_meanwhile_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "growing"
    path.write_bytes(bytes(100_000))

    def grow(count: int) -> None:
        with path.open("ab") as file:
            file.write(b"more")

    with pytest.raises(Corrupt, match="grew"):
        read_content(path, on_bytes=grow)


async def test_a_file_that_shrinks_meanwhile_is_named(tmp_path: Path) -> None:
    path = tmp_path / "shrinking"
    path.write_bytes(bytes(200_000))

    def shrink(count: int) -> None:
        os.truncate(path, 0)

    with pytest.raises(Corrupt, match=f"{path} became shorter.*Try again when"):
        read_content(path, on_bytes=shrink)


@pytest.mark.parametrize("how", ["blob", "model"])
async def test_a_file_that_changes_before_it_is_sent_stays(
    origin: LocalLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It belongs to the user, who is not told to delete it."""
    path = tmp_path / "model/changing"
    path.parent.mkdir()
    path.write_bytes(b"before")

    def write(path: Path, **more: Any) -> Content:
        content = read_content(path, **more)
        path.write_bytes(b"behind")
        return content

    monkeypatch.setattr("p2pdist.package.repository.push.read_content", write)
    monkeypatch.setattr("p2pdist.package.modelpack.read_content", write)
    with pytest.raises(Corrupt, match=f"{path} .*Try again when nothing writes to it"):
        await (push_blob(path, origin) if how == "blob" else pack_model(path.parent, V1, origin))


async def test_a_layout_within_the_source_is_refused(tmp_path: Path, sources: dict[str, Path]) -> None:
    inside = LocalLayout(sources["app"] / "layout")
    with pytest.raises(UsageError, match="within the source"):
        await pack(sources["app"], V1, inside)
    assert not inside.directory.exists()
    await inside.close()


async def test_odd_requests_are_refused(layout: LocalLayout, sources: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="digest"):
        await pack(sources["app"], parse_reference(f"app@{digest_of(b'')}"), layout)
    for entry in ("NAME", "=x", "A=\0"):
        with pytest.raises(UsageError, match="environment"):
            await pack(sources["app"], V1, layout, settings=Settings(env=[entry]))
    for settings in (Settings(entrypoint=["a", "\0"]), Settings(working_dir="\0")):
        with pytest.raises(UsageError, match="zero byte"):
            await pack(sources["app"], V1, layout, settings=settings)
    for outside in ("..", "/app/../../..", "${P2PDIST_ROOT}/.."):
        with pytest.raises(UsageError, match="outside the package"):
            await pack(sources["app"], V1, layout, settings=Settings(working_dir=outside))
    assert not list(layout.scratch().iterdir())


async def test_what_no_host_would_take_is_not_packed(
    layout: LocalLayout, sources: dict[str, Path], tmp_path: Path
) -> None:
    """Of many files with long paths, or with a long config: no tag names it."""
    deep = (tmp_path / "model").joinpath(*["x" * 240] * 15)
    deep.mkdir(parents=True)
    for number in range(1000):
        (deep / f"{number:0200d}").write_bytes(b"x")
    with pytest.raises(TooLarge, match="manifest"):
        await pack_model(tmp_path / "model", V1, layout)
    long = [f"V{number}={'x' * 100_000}" for number in range(42)]
    with pytest.raises(TooLarge, match="config"):
        await pack(sources["app"], V1, layout, settings=Settings(env=long))
    with pytest.raises(NotFound):
        await layout.resolve(V1)


async def test_differences_are_told_layer_by_layer(layout: LocalLayout, sources: dict[str, Path]) -> None:
    base = await manifest_of(layout, await pack(sources["env"], BASE, layout))
    first = await manifest_of(layout, await pack(sources["app"], V1, layout, base=BASE))
    (sources["app"] / "more").write_bytes(b"x")
    second = await manifest_of(layout, await pack(sources["app"], V2, layout, base=BASE))
    assert compare(first, first).bytes_to_move == 0
    added = compare(base, first)
    assert (added.added, added.changed, added.removed) == ((first.layers[1].digest,), (), ())
    removed = compare(first, base)
    assert (removed.bytes_to_move, removed.removed) == (0, (first.layers[1].digest,))
    changed = compare(first, second)
    assert (changed.added, changed.changed, changed.removed) == ((), (second.layers[1].digest,), ())
    assert changed.bytes_to_move == second.layers[1].size
