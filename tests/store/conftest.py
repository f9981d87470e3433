"""Stores in real directories."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from btrfs_rig import mounted_btrfs

from p2pdist.store.store import BlobStore

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
    with mounted_btrfs(tmp_path) as target:
        yield target
