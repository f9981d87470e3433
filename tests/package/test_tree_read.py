"""Which files are read again although their times are the same."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from p2pdist.model.package import parse_reference
from p2pdist.model.tree import WHOLE_MAX
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.pack import pack

V1 = parse_reference("app:v1")
MEMORY = Path("/dev/shm")


@pytest.fixture
async def layout(tmp_path: Path) -> AsyncIterator[LocalLayout]:
    opened = LocalLayout(tmp_path / "layout")
    yield opened
    await opened.close()


@pytest.mark.parametrize("size", [8192, WHOLE_MAX + 1])
@pytest.mark.parametrize("where", [MEMORY, None])
async def test_a_store_through_a_mapping_is_noticed(layout: LocalLayout, where: Path | None, size: int) -> None:
    """In memory, where nothing is written back, it gives no new times at all; on a disk none until it has been written back."""
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
