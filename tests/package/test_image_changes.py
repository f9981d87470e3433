"""Images of what somebody writes to meanwhile: none is made, and the first entry that differs is
named."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest
from test_image import stand_in

from p2pdist.model.errors import Corrupt, NotFound, UsageError
from p2pdist.model.manifest import parse_reference
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.image.squashfs import MTIME_MAX
from p2pdist.package.layers import Layer, PackOptions, pack_layers
from p2pdist.package.pack import pack

V1 = parse_reference("trainer:v1")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Old enough for every change to show."""
    made = tmp_path / "source"
    (made / "sub").mkdir(parents=True)
    for number in range(20):
        (made / f"sub/{number:02}").write_bytes(b"%d" % number)
    (made / "sub/zz").write_bytes(random.Random(5).randbytes(300_000))
    while time.time_ns() - max(path.lstat().st_ctime_ns for path in [made, *made.rglob("*")]) < 50_000_000:
        time.sleep(0.01)
    return made


async def check_nothing_is_packed(layout: LocalLayout) -> None:
    with pytest.raises(NotFound):
        await layout.resolve(V1)
    assert await layout.blobs() == [] if (layout.directory / "blobs").exists() else True
    assert list((layout.directory / ".incoming").iterdir()) == []


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("meddle", "named"),
    [
        ("printf more >> sub/zz", "sub/zz changed"),
        ("truncate -s 10 sub/zz", "sub/zz changed"),
        ("head -c 300000 /dev/zero > sub/zz; touch -d @1000 sub/zz", "sub/zz changed"),
        ("cp -p sub/zz sub/new; mv sub/new sub/zz", "sub/zz changed"),
        ("chmod 600 sub/zz", "sub/zz changed"),
        ("rm sub/zz; mkfifo sub/zz", "sub/zz changed"),
        ("rm sub/zz; ln -s 00 sub/zz", "sub/zz changed"),
        ("rm sub/zz", "sub/zz vanished"),
        ("rm -r sub", "sub vanished"),
        ("touch sub/new", "sub/new appeared"),
        ("touch new; rm new", "source changed"),
        ("touch sub/new; rm sub/new", "sub changed"),
        ("cat sub/zz", ""),
    ],
)
async def test_what_changes_meanwhile_is_named(
    layout: LocalLayout,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    meddle: str,
    named: str,
    when: str,
) -> None:
    """Right before mksquashfs looks, or after it has read everything. Reading is no change."""
    real = f'{shutil.which("mksquashfs")} "$@"'
    meddle = f"(cd {source}; {meddle}) > /dev/null"
    script = f"{meddle}; exec {real}" if when == "before" else f"{real}; code=$?; {meddle}; exit $code"
    stand_in(tmp_path / "bin", script, monkeypatch)
    if not named:
        await pack(source, V1, layout)
        return
    with pytest.raises(Corrupt, match=f"/{named} while it was packed"):
        await pack(source, V1, layout)
    await check_nothing_is_packed(layout)


@pytest.mark.slow
async def test_a_file_that_is_written_to_all_the_time_is_named(layout: LocalLayout, source: Path) -> None:
    """As by a program that writes a checkpoint: in the midst of reading."""
    (source / "zz").write_bytes(os.urandom(24 << 20))
    meddled = False

    def meddle(_what: str, _done: int, _total: int) -> None:
        nonlocal meddled
        meddled = True
        with (source / "zz").open("r+b") as file:
            file.write(bytes(1000))

    with pytest.raises(Corrupt, match="zz changed"):
        await pack(source, V1, layout, level=22, on_progress=meddle)
    assert meddled
    await check_nothing_is_packed(layout)


@pytest.mark.parametrize(
    ("change", "named"),
    [("appears", "new appeared"), ("grows", "00 changed"), ("vanishes", "zz vanished"), ("log", "")],
)
async def test_what_changes_while_a_part_is_copied_is_named(
    layout: LocalLayout, source: Path, change: str, named: str
) -> None:
    """An image of a part is made of a copy. What is left out may come and go."""
    looks = 0

    def ignore(path: bytes, _is_directory: bool) -> bool:
        nonlocal looks
        if path == b"sub/zz":
            looks += 1
            if looks == 2:  # what is above is listed already
                if change == "vanishes":
                    (source / "sub/zz").unlink()
                elif change == "grows":
                    (source / "00").write_bytes(b"more")
                else:
                    (source / ("new" if change == "appears" else "new.log")).touch()
        return path.endswith(b".log")

    (source / "00").write_bytes(b"0")
    packing = pack_layers([Layer(source, "squashfs", ignore=ignore)], V1, layout, PackOptions())
    if not named:
        await packing
        return
    with pytest.raises(Corrupt, match=f"/{named} while it was packed"):
        await packing
    await check_nothing_is_packed(layout)


@pytest.mark.parametrize("seconds", [-1, MTIME_MAX + 1])
@pytest.mark.parametrize("kind", ["file", "directory", "link"])
async def test_times_that_an_image_cannot_hold_are_refused(
    layout: LocalLayout, source: Path, kind: str, seconds: int
) -> None:
    """mksquashfs would write another time, 1969 as 2106. With one time for all, and in a tree, any
    will do."""
    path = source / "sub/odd"
    if kind == "file":
        path.touch()
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("zz")
    for good in (0, MTIME_MAX):
        os.utime(path, (good, good), follow_symlinks=False)
        await pack(source, parse_reference(f"good:{good}"), layout)
    os.utime(path, (0, seconds), follow_symlinks=False)
    if path.lstat().st_mtime != seconds:
        pytest.skip("the file system holds no such time")
    with pytest.raises(UsageError, match="sub/odd was modified at a time"):
        await pack(source, V1, layout)
    with pytest.raises(NotFound):
        await layout.resolve(V1)
    await pack(source, V1, layout, mtime=0)
    await pack(source, V1, layout, format="tree")
