"""What other users of the host may read in a store: nothing but the way to views."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from store_rig import PIECE, fill, sample

from p2pdist.store.layout import CONTENT_MODE, FILE_MODE, ROOT_MODE, Paths
from p2pdist.store.store import BlobStore


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def readable_by_others(root: Path) -> list[Path]:
    """What a user outside the group reaches and may read, by the modes of all directories on the
    way."""
    found: list[Path] = []
    waiting = [root]
    while waiting:
        directory = waiting.pop()
        if not mode(directory) & 0o001:
            continue
        for path in directory.iterdir():
            if path.is_dir():
                waiting.append(path)
            elif mode(path) & 0o004 and path.name != "lock":
                found.append(path)
    return found


def filled(root: Path) -> BlobStore:
    store = BlobStore(root)
    content = sample(1, 3 * PIECE)
    fill(store.begin(content.digest, content.pieces), content)
    store.put_document(b"a document")
    return store


def test_other_users_read_nothing(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    try:
        assert mode(tmp_path / "store") == ROOT_MODE
        assert mode(tmp_path / "store" / "index.sqlite") == FILE_MODE
        assert readable_by_others(tmp_path / "store") == []
    finally:
        store.close()


def test_the_index_has_no_mapping_that_a_full_disk_can_end(tmp_path: Path) -> None:
    """A write to a -shm file for which the disk has no block is SIGBUS, the end of the agent."""
    store = filled(tmp_path / "store")
    try:
        mapped = tmp_path / "store" / "index.sqlite-shm"
        assert not mapped.exists()
        store._index.checkpoint()
        assert str(mapped) not in Path("/proc/self/maps").read_text()
    finally:
        store.close()


def test_a_store_of_an_earlier_release_is_tightened(tmp_path: Path) -> None:
    """And one that is closed further stays so."""
    root = tmp_path / "store"
    filled(root).close()
    paths = Paths(root)
    for path in (root, paths.blobs.parent, paths.objects, paths.partial, paths.documents.parent):
        path.chmod(0o755)
    paths.index.chmod(0o644)
    paths.variants.chmod(0o700)
    assert readable_by_others(root)
    BlobStore(root).close()
    assert readable_by_others(root) == []
    assert mode(paths.objects) == CONTENT_MODE
    assert mode(paths.variants) == 0o700


@pytest.mark.root
def test_what_a_link_leads_to_keeps_its_mode(tmp_path: Path) -> None:
    """The directory may come from a variable of another user's environment."""
    (tmp_path / "others").mkdir()
    (tmp_path / "others").chmod(0o777)
    (tmp_path / "store").symlink_to(tmp_path / "others")
    filled(tmp_path / "store").close()
    assert mode(tmp_path / "others") == 0o777 and readable_by_others(tmp_path / "others" / "blobs") == []
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o666)
    index = tmp_path / "others" / "index.sqlite-wal"
    index.unlink(missing_ok=True)
    index.symlink_to(tmp_path / "file")
    Paths(tmp_path / "others").make()
    assert mode(tmp_path / "file") == 0o666


def test_another_user_is_refused_by_the_kernel(tmp_path: Path) -> None:
    """Who passes the root, to a view, reads neither the index nor a blob."""
    root = tmp_path / "store"
    store = filled(root)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == 0 and not mode(parent) & 0o001:
            parent.chmod(mode(parent) | 0o001)
    blob = store.blobs()[0].path
    (root / "view").mkdir(mode=0o755)
    (root / "view" / "file").write_bytes(b"shown")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            refused = 0
            for path in (root / "index.sqlite", blob):
                try:
                    path.read_bytes()
                except PermissionError:
                    refused += 1
            code = 0 if refused == 2 and (root / "view" / "file").read_bytes() == b"shown" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.close()
