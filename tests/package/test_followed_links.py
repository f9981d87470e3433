"""Links of a source that lead elsewhere on a host, and permissions that shut users out there: what
is said, followed and widened."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tree_rig import read_back

from p2pdist.model.digest import Digest
from p2pdist.model.errors import UsageError
from p2pdist.model.manifest import parse_reference
from p2pdist.model.tree import Directory, File
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.layers import Layer, PackOptions, pack_layers, plain_layer
from p2pdist.package.pack import Packed, pack
from p2pdist.package.source.links import NOWHERE, OUT, strange_links
from p2pdist.package.source.scan import Link

REFERENCE = parse_reference("model:v1")
FORMATS = ["squashfs", "tree"]


async def modes(layout: LocalLayout, packed: Packed, work: Path) -> dict[str, int]:
    """Of a package of one layer, the permissions of files and directories."""
    (layer,) = packed.layers
    if layer.media_type.endswith("tree"):
        entries = (await read_back(layout, packed)).entries
        return {os.fsdecode(path): entry.mode for path, entry in entries.items() if isinstance(entry, File | Directory)}
    image = layout.blob_path(Digest(layer.digest))
    subprocess.run(["unsquashfs", "-q", "-n", "-d", work, image], check=True, capture_output=True, timeout=60)
    return {
        str(path.relative_to(work)): stat.S_IMODE(path.stat().st_mode)
        for path in work.rglob("*")
        if not path.is_symlink()
    }


def test_what_leads_elsewhere_is_told_from_what_does_not(tmp_path: Path) -> None:
    """A link may lead into another layer of its package where its own appears below a directory,
    and to the system's own files."""
    source = tmp_path / "source"
    (source / "deep/er").mkdir(parents=True)
    (source / "file").write_text("")
    targets = {
        "deep/er/in": "../../file",
        "deep/er/up": "../../../beside",
        "out": "../beside",
        "roundabout": "deep/../../source/file",
        "system": "/usr/bin/python3",
        "mine": "/home/nobody/model",
        "here": str(source / "file"),
        "gone": "deep/missing",
        "up": "..",
    }
    for path, target in targets.items():
        (source / path).symlink_to(target)
    paths = [os.fsencode(path) for path in targets]
    found = {link.path: link.what for link in strange_links(source, paths)}
    out = ["deep/er/up", "out", "roundabout", "mine", "here", "up"]
    assert found == {**dict.fromkeys(out, OUT), "gone": NOWHERE}
    below = {link.path: link.what for link in strange_links(source, paths, target="app")}
    assert below == {"mine": OUT, "here": OUT, "gone": NOWHERE}
    assert not [link for link in strange_links(source, paths, whole=False) if link.what == NOWHERE]


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A Hugging Face cache with one model; its snapshot."""
    snapshot = tmp_path / "hub/models--org--model/snapshots/0123abcd"
    (snapshot / "onnx").mkdir(parents=True)
    blobs = tmp_path / "hub/models--org--model/blobs"
    blobs.mkdir()
    for name in ("config", "weights"):
        (blobs / name).write_text(name)
    (snapshot / "config.json").symlink_to("../../blobs/config")
    (snapshot / "onnx/model.bin").symlink_to("../../../blobs/weights")
    return snapshot


@pytest.mark.parametrize("form", FORMATS)
async def test_a_snapshot_is_packed_as_what_it_shows(layout: LocalLayout, hub: Path, tmp_path: Path, form: Any) -> None:
    """By any name of it; other links out of it stay links, and are named."""
    (tmp_path / "secret").write_text("secret")
    (hub / "secret").symlink_to("../../../../secret")
    (tmp_path / "model").symlink_to(hub)
    packed, notes = await pack_layers([plain_layer(tmp_path / "model", form)], REFERENCE, layout, PackOptions())
    assert (packed.files, packed.bytes_total) == (2, len("configweights"))
    assert [link.path for link in packed.followed] == ["config.json", "onnx/model.bin"]
    assert packed.links == (Link("secret", "../../../../secret", OUT),)
    assert any("config.json -> ../../blobs/config" in note for note in notes)
    assert any("secret -> " in warning and "--follow-links" in warning for warning in packed.warnings)


@pytest.mark.parametrize("form", FORMATS)
async def test_links_out_of_a_package_are_named_or_followed(layout: LocalLayout, tmp_path: Path, form: Any) -> None:
    """Each time, also when nothing has changed and nothing is read."""
    (tmp_path / "data").write_text("weights")
    source = tmp_path / "source"
    source.mkdir()
    (source / "model").symlink_to("../data")
    (source / "own").symlink_to("model")
    for _ in range(2):
        packed, _ = await pack_layers([plain_layer(source, form)], REFERENCE, layout, PackOptions())
        assert (packed.files, packed.links) == (0, (Link("model", "../data", OUT),))
        assert len(packed.warnings) == 1
    packed, _ = await pack_layers([plain_layer(source, form)], REFERENCE, layout, PackOptions(follow_links=True))
    assert (packed.files, packed.bytes_total, packed.links, packed.warnings) == (1, 7, (), ())
    assert packed.followed[0].path == "model"
    (source / "directory").symlink_to("..")
    with pytest.raises(UsageError, match=r"directory -> \.\. leads to a directory"):
        await pack_layers([plain_layer(source, form)], REFERENCE, layout, PackOptions(follow_links=True))


async def test_a_link_into_another_layer_is_none_of_these(layout: LocalLayout, tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/file").write_text("")
    (tmp_path / "src").mkdir()
    (tmp_path / "src/link").symlink_to("../venv/file")
    layers = [Layer(tmp_path / name, "squashfs", target=target) for name, target in (("venv", "venv"), ("src", "app"))]
    packed, _ = await pack_layers(layers, REFERENCE, layout, PackOptions())
    assert (packed.links, packed.warnings) == ((), ())


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """What an umask of 077 leaves."""
    made = tmp_path / "private"
    (made / "package").mkdir(parents=True)
    (made / "package/module.py").write_text("")
    (made / "program").write_text("")
    (made / "open").write_text("")
    (made / "link").symlink_to("open")
    for path, mode in (("package/module.py", 0o600), ("package", 0o700), ("program", 0o750), ("open", 0o4644)):
        (made / path).chmod(mode)
    made.chmod(0o700)
    return made


@pytest.mark.parametrize("form", FORMATS)
async def test_who_will_be_shut_out_is_said(layout: LocalLayout, private: Path, tmp_path: Path, form: Any) -> None:
    """Each time, also when nothing has changed; with a right for all nobody is."""
    for _ in range(2):
        packed = await pack(private, REFERENCE, layout, format=form)
        assert packed.narrow == ("package", "package/module.py", "program")
        assert "--world-readable" in packed.warnings[0]
    packed = await pack(private, REFERENCE, layout, format=form, world_readable=True)
    assert (packed.narrow, packed.warnings) == ((), ())
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert await modes(layout, packed, tmp_path / "unpacked") == {
        "package": 0o755,
        "package/module.py": 0o644,
        "program": 0o755,
        "open": 0o644,
    }


@pytest.mark.parametrize("form", FORMATS)
async def test_a_source_that_is_closed_itself(layout: LocalLayout, private: Path, form: Any) -> None:
    """Where it appears below a directory its own permissions count as well."""
    layer = Layer(private, form, target="app")
    packed, _ = await pack_layers([layer], REFERENCE, layout, PackOptions())
    assert "app" in packed.narrow
    packed, _ = await pack_layers([layer], REFERENCE, layout, PackOptions(world_readable=True))
    assert packed.narrow == ()
    packed, _ = await pack_layers([layer], REFERENCE, layout, PackOptions(reproducible=True))
    assert packed.narrow == ()
