"""Layer images made by mksquashfs, and nothing left mounted after any test."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lazy_view_rig import Show, View, lacking
from shown_trees import Store

from p2pdist.mount import kernel
from p2pdist.mount.lazy.fill_method import METHODS, FillMethod

LOOPS_WAIT_S = 5.0

Layer = Callable[..., Path]


@pytest.fixture(autouse=True)
def no_mounts_left(tmp_path: Path) -> Iterator[None]:
    """Whatever a test mounts below its directory is gone when it ends, and so are loop devices over
    its files."""
    yield
    left = [entry.point for entry in kernel.mounted() if tmp_path in entry.point.parents]
    for point in reversed(left):
        kernel.unmount(point, lazily=True)
    assert not left, "still mounted"
    # A mount namespace that another process made meanwhile keeps a copy of a mount until it ends.
    deadline = time.monotonic() + LOOPS_WAIT_S
    while (loops := _loops_over(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not loops, "loop devices in use"


def _loops_over(directory: Path) -> list[str]:
    return [name for name, file in _loop_devices() if file.startswith(f"{directory}/")]


def _loop_devices() -> Iterator[tuple[str, str]]:
    """All loop devices and their files. Those of other tests come and go meanwhile."""
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            yield path.parent.parent.name, path.read_text(errors="replace")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A work directory."""
    path = tmp_path / "records"
    path.mkdir()
    return path


@pytest.fixture
def layer(tmp_path: Path) -> Layer:
    """Makes layer images: names to contents; None is a directory, "whiteout" a whiteout; `nodes`
    are pseudo-file lines of mksquashfs(1)."""

    def make(name: str, files: dict[str, str | None], *nodes: str, options: tuple[str, ...] = ()) -> Path:
        source = tmp_path / "sources" / name
        source.mkdir(parents=True)
        for path, content in files.items():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                (source / path).mkdir()
            elif content == "whiteout":
                os.mknod(source / path, stat.S_IFCHR | 0o644, 0)
            else:
                (source / path).write_text(content)
        image = tmp_path / f"{name}.squashfs"
        pseudo = [word for node in nodes for word in ("-p", node)]
        subprocess.run(
            ["mksquashfs", source, image, "-quiet", "-no-progress", "-all-root", "-comp", "gzip", *pseudo, *options],
            check=True,
            capture_output=True,
        )
        image.chmod(0o444)
        return image

    return make


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store, on the file system of the temporary directory."""
    return Store(tmp_path / "store")


@pytest.fixture
def view(tmp_path: Path) -> Path:
    return tmp_path / "view"


@pytest.fixture(params=METHODS, ids=lambda way: way.name)
def way(request: pytest.FixtureRequest) -> FillMethod:
    if reason := lacking(request.param):
        pytest.skip(reason)
    chosen: FillMethod = request.param
    return chosen


@pytest.fixture
def show(way: FillMethod, work: Path, tmp_path: Path) -> Iterator[Show]:
    views = []

    def make(**options: float) -> View:
        views.append(View(way, work, tmp_path / f"view{len(views)}", **options))
        return views[-1]

    yield make
    for view in views:
        view.close()
