"""Pulls of trees that are cut off: nothing wrong is left under the name of an object, and the next
pull goes on."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_rig import pretend_other_boot
from store_tree_rig import Packed, check, pull
from tree_crash_child import trees

from p2pdist.model.tree import content_hash
from p2pdist.store.store import BlobStore

CHILD = Path(__file__).parent / "tree_crash_child.py"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is possible: each of many stores is brought to the disk when it is
    closed."""
    memory = Path("/dev/shm")
    made = tempfile.mkdtemp(prefix="p2pdist-trees-", dir=memory if os.access(memory, os.W_OK) else tmp_path)
    yield Path(made)
    shutil.rmtree(made)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["alone", "together"])
def test_a_process_may_be_killed_at_every_step_of_a_pull(directory: Path, way: str) -> None:
    """Each time the store opens, every object is what its name says, trees that are complete have
    all of theirs, and both trees can be pulled; and also when the machine was lost with the
    process, and half of what was not synchronised."""
    done = subprocess.run([sys.executable, str(CHILD), str(directory), way], capture_output=True, text=True, check=True)
    count, status = map(int, done.stdout.split())
    assert status == 0 and count > 60, done.stdout
    packed = trees()
    for number in range(count):
        root, lost = directory / str(number), directory / "lost"
        if root.exists():
            shutil.copytree(root, lost)
            _recover(root, packed, whole=number % 4 == 0)
            _lose_machine(lost, number)
            _recover(lost, packed, whole=number % 4 == 1)
            shutil.rmtree(lost)
            shutil.rmtree(root)


def _recover(root: Path, packed: tuple[Packed, Packed], *, whole: bool) -> None:
    store = BlobStore(root)
    try:
        files = [path for path in (root / "objects").rglob("*") if path.is_file()]
        names = {bytes.fromhex(path.parent.name + path.name) for path in files}
        assert names == set(store.objects.contents())
        assert all(content_hash(path.read_bytes()).hex() == path.parent.name + path.name for path in files)
        assert list((root / "tmp").iterdir()) == []
        for tree in packed:
            if store.trees.complete(tree.root):
                check(store, tree)
        assert {path.name for path in (root / "images").iterdir()} <= {tree.root[7:] for tree in store.trees.list()}
        if whole:
            for tree in packed:
                pull(store, tree)
                check(store, tree)
    finally:
        store.close()


def _lose_machine(root: Path, seed: int) -> None:
    """Another boot, and of the objects some are empty, and some have blocks of zeros."""
    if not (root / "index.sqlite").exists():
        return
    with sqlite3.connect(root / "index.sqlite") as database:
        tables = database.execute("SELECT count(*) FROM sqlite_master WHERE name='trees'").fetchone()[0]
    database.close()
    for path in (root / "partial").glob("*.have"):
        if path.stat().st_size < 64:
            path.unlink()
    if tables:
        pretend_other_boot(root)
    choice = random.Random(seed)
    for path in sorted((root / "objects").rglob("*")):
        if path.is_file() and choice.random() < 0.4:
            path.chmod(0o644)
            with path.open("r+b") as file:
                if choice.random() < 0.5:
                    file.truncate(0)
                else:
                    file.write(bytes(min(50, path.stat().st_size)))
            path.chmod(0o444)
