"""Several layers as one package, and the contents of trees out of packs again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2pdist.model.errors import Corrupt, NotFound, UsageError
from p2pdist.model.manifest import Manifest, decode_manifest, parse_reference
from p2pdist.model.tree import WHOLE_MAX, File
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.archive.extraction import read_entries, read_packs, write_objects
from p2pdist.package.layers import Layer, PackOptions, pack_layers, plain_layer, project_layers
from p2pdist.package.source.project import read_project

REFERENCE = parse_reference("app:v1")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = tmp_path / "source"
    (made / "sub").mkdir(parents=True)
    (made / "small").write_text("small")
    (made / "empty").write_text("")
    (made / "sub/large").write_bytes(os.urandom(WHOLE_MAX + 300_000))
    return made


async def manifest_of(layout: LocalLayout) -> Manifest:
    return decode_manifest(await layout.read((await layout.resolve(REFERENCE)).digest))


async def test_no_tag_moves_before_the_last_layer(layout: LocalLayout, source: Path, tmp_path: Path) -> None:
    layers = [Layer(source, "tree"), Layer(tmp_path / "absent", "tree")]
    with pytest.raises(NotFound):
        await pack_layers(layers, REFERENCE, layout, PackOptions())
    assert await layout.tags() == []
    with pytest.raises(UsageError):
        await pack_layers([], REFERENCE, layout, PackOptions())
    done, _ = await pack_layers([Layer(source, "tree"), Layer(source, "squashfs")], REFERENCE, layout, PackOptions())
    assert [name for name, _ in await layout.tags()] == ["app:v1"]
    assert done.layers == (await manifest_of(layout)).layers
    assert (done.files, done.bytes_total) == (6, 2 * (WHOLE_MAX + 300_005))


async def test_a_layer_below_a_target_is_the_same_each_time(layout: LocalLayout, source: Path) -> None:
    layer = Layer(source, "squashfs", target="deep/er")
    first, _ = await pack_layers([layer], REFERENCE, layout, PackOptions())
    again, _ = await pack_layers([layer], REFERENCE, layout, PackOptions())
    assert first.digest == again.digest


async def test_patterns_come_from_three_places_and_flags_win(source: Path) -> None:
    (source / "p2pdist.toml").write_text('ignore = ["small", "empty"]')
    (source / ".p2pdistignore").write_text("!small\nsub\n")
    (layer,) = project_layers(read_project(source / "p2pdist.toml"), "tree", ["!sub"])
    assert layer.ignore is not None
    assert [layer.ignore(name, name == b"sub") for name in (b"small", b"empty", b"sub")] == [False, True, False]
    assert plain_layer(source, "tree").ignore is not None


async def test_contents_come_out_of_packs_again(layout: LocalLayout, source: Path, tmp_path: Path) -> None:
    """Each once, verified, also those of many chunks; a pack that was damaged or is gone is
    named."""
    (source / "same").write_text("small")
    with (source / "holes").open("wb") as file:
        file.write(b"begin")
        file.truncate(16 << 20)
    await pack_layers([Layer(source, "tree")], REFERENCE, layout, PackOptions())
    manifest = await manifest_of(layout)
    packs = await read_packs(manifest, layout)
    entries = await read_entries(manifest.layers[0], packs, layout)
    objects = tmp_path / "objects"
    objects.mkdir()
    write_objects(entries, packs, layout, objects)
    assert len([path for path in objects.rglob("*") if path.is_file()]) == 3
    assert sum(path.stat().st_blocks * 512 for path in objects.rglob("*") if path.stat().st_size == 16 << 20) < 64 << 10
    for entry in entries:
        if isinstance(entry, File) and entry.size:
            name = entry.content.hex()
            assert (objects / name[:2] / name[2:]).read_bytes() == (source / os.fsdecode(entry.path)).read_bytes()
    blob = layout.blob_path(next(iter(packs.chunks.values()))[0])
    data = bytearray(blob.read_bytes())
    for position in range(100, len(data), 10_000):
        data[position] ^= 1
    blob.write_bytes(data)
    (tmp_path / "other").mkdir()
    with pytest.raises(Corrupt, match="damaged"):
        write_objects(entries, packs, layout, tmp_path / "other")
    blob.unlink()
    (tmp_path / "third").mkdir()
    with pytest.raises(NotFound, match="pack"):
        write_objects(entries, packs, layout, tmp_path / "third")
