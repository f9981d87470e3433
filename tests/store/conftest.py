"""Stores in real directories."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from p2pdist.store.blobs import BlobStore

MIB = 1 << 20
OpenStore = Callable[..., BlobStore]


@pytest.fixture
def open_store() -> Iterator[OpenStore]:
    """Opens stores that are closed at the end of the test."""
    opened: list[BlobStore] = []

    def start(root: Path, **options: object) -> BlobStore:
        opened.append(BlobStore(root, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield start
    for store in opened:
        store.close()


@pytest.fixture
def store(tmp_path: Path, open_store: OpenStore) -> BlobStore:
    return open_store(tmp_path / "store")


@pytest.fixture
def btrfs(tmp_path: Path) -> Iterator[Path]:
    """A Btrfs of 512 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts")
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("mkfs.btrfs is not installed")
    image, target = tmp_path / "image", tmp_path / "btrfs"
    target.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(512 * MIB)
        subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(target)], check=True, capture_output=True)
        yield target
    finally:
        if target.is_mount():
            # Lazily: a failed test may have files open, and neither mount nor loop device may stay.
            subprocess.run(["umount", "-l", str(target)], check=True)
        image.unlink(missing_ok=True)
