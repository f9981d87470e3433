"""Tree packages in the hands of other tools."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tree_rig import read_back

from p2pdist.model.manifest import parse_reference
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.pack import pack
from p2pdist.package.repository.push import push


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo")
async def test_skopeo_copies_a_pushed_package_there_and_back(tmp_path: Path) -> None:
    """Of the second version, which draws on the packs of two; what comes back has the same digests
    and the same files."""
    source = tmp_path / "source"
    (source / "lib").mkdir(parents=True)
    (source / "weights").write_bytes(os.urandom(9_000_000))
    for number in range(50):
        (source / f"lib/module{number}").write_bytes(b"x" * number)
    local, origin = LocalLayout(tmp_path / "local"), LocalLayout(tmp_path / "origin")
    reference = parse_reference("team/trainer:v2")
    await pack(source, parse_reference("team/trainer:v1"), local, format="tree")
    (source / "lib/module7").write_bytes(b"changed")
    packed = await pack(source, reference, local, format="tree")
    await push(reference, local, origin)
    for here, there in (("origin", "b"), ("b", "c")):
        words = ["skopeo", "copy", f"oci:{tmp_path}/{here}:{reference}", f"oci:{tmp_path}/{there}:{reference}"]
        subprocess.run(words, capture_output=True, check=True)
    third = LocalLayout(tmp_path / "c")
    assert (await third.resolve(reference)).digest == packed.digest
    names = sorted(path.name for path in (tmp_path / "origin/blobs/sha256").iterdir())
    assert sorted(path.name for path in (tmp_path / "c/blobs/sha256").iterdir()) == names
    assert (await read_back(third, packed)).content(b"lib/module7") == b"changed"
    for layout in (local, origin, third):
        await layout.close()
