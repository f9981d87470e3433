"""Which files are read again although their times are the same."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tree_rig import read_back

from p2pdist.model.manifest import parse_reference
from p2pdist.model.tree import WHOLE_MAX, Symlink
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.image.squashfs import build_image
from p2pdist.package.pack import pack

V1 = parse_reference("app:v1")
MEMORY = Path("/dev/shm")


@pytest.mark.parametrize("size", [8192, WHOLE_MAX + 1])
@pytest.mark.parametrize("where", [MEMORY, None])
async def test_a_store_through_a_mapping_is_noticed(layout: LocalLayout, where: Path | None, size: int) -> None:
    """In memory, where nothing is written back, it gives no new times at all; on a disk none until
    it has been written back."""
    if where is not None and not os.access(where, os.W_OK):
        pytest.skip("needs a tmpfs")
    with tempfile.TemporaryDirectory(dir=where) as place:
        path = Path(place, "file")
        path.write_bytes(bytes(size))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
            mapped[:3] = b"one"
            before = path.stat()
            while time.time_ns() - before.st_ctime_ns < 250_000_000:
                time.sleep(0.01)
            first = await pack(Path(place), V1, layout, format="tree")
            mapped[:3] = b"two"
            second = await pack(Path(place), V1, layout, format="tree")
    assert first.layers != second.layers


@contextlib.contextmanager
def mounted(how: str, image: Path, place: Path) -> Iterator[Path]:
    """What is in an image, by squashfuse, by the kernel, or by an overlay above what the kernel
    shows."""
    inner, outer = place / "inner", place / "outer"
    for directory in (inner, outer, place / "empty"):
        directory.mkdir(exist_ok=True)
    mounts: list[list[str]] = [["mount", "-t", "squashfs", "-o", "loop,ro", str(image), str(inner)]]
    if how == "fuse":
        mounts = [["squashfuse", str(image), str(inner)]]
    if how == "overlay":
        mounts.append(["mount", "-t", "overlay", "-o", f"ro,lowerdir={inner}:{place / 'empty'}", "overlay", str(outer)])
    with contextlib.ExitStack() as stack:
        for command in mounts:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            if done.returncode:
                pytest.skip(f"{command[0]} does not mount images here: {done.stderr[:200]}")
            unmount = ["fusermount3", "-u"] if how == "fuse" else ["umount"]
            stack.callback(subprocess.run, [*unmount, command[-1]], check=True, timeout=30)
        yield outer if how == "overlay" else inner


@pytest.mark.parametrize(
    "how", ["fuse", pytest.param("kernel", marks=pytest.mark.root), pytest.param("overlay", marks=pytest.mark.root)]
)
async def test_a_ctime_that_follows_the_mtime_does_not_count(layout: LocalLayout, tmp_path: Path, how: str) -> None:
    """As on sshfs, SMB and rclone, and where one image is mounted in the place of another: equal
    lengths and times, another content; a link that leads elsewhere."""
    if how == "fuse" and not (shutil.which("squashfuse") and os.access("/dev/fuse", os.W_OK)):
        pytest.skip("needs squashfuse and /dev/fuse")
    found, links = [], []
    for version in ("1.0.1", "1.0.2"):
        source = tmp_path / version
        (source / "package").mkdir(parents=True)
        (source / "package/version.py").write_text(f"version = {version!r}\n")
        (source / "links").mkdir()
        (source / "links/link").symlink_to(f"to-{version}")
        await build_image(source, tmp_path / f"{version}.image", mtime=315_532_800)
    for version in ("1.0.1", "1.0.1", "1.0.2"):
        with mounted(how, tmp_path / f"{version}.image", tmp_path) as shown:
            packed = await pack(shown, V1, layout, format="tree")
        package = await read_back(layout, packed)
        found.append(package.content(b"package/version.py"))
        link = package.entries[b"links/link"]
        assert isinstance(link, Symlink)
        links.append(link.target)
        assert packed.files == 1
    assert found == [b"version = '1.0.1'\n"] * 2 + [b"version = '1.0.2'\n"]
    assert links == [b"to-1.0.1", b"to-1.0.1", b"to-1.0.2"]
