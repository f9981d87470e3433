"""Files caches of packings that run side by side in one layout: a packing never fails for them, and
what it finds is whole."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import DiskFull
from p2pdist.model.manifest import Descriptor
from p2pdist.package.tree.cache import CacheBuilder, CacheFile, FilesCache, Head, Index, Outcome

ROUNDS = 40
HEAD = Head(b"", "", Outcome(Descriptor("a/tree", digest_of(b""), 0), (), (), 0, 0, (), 0))


def save(cache_file: CacheFile, files_cache: FilesCache, data: bytes, *, anew: bool) -> None:
    """What a packing does at its end; `files_cache` is the one that it began with."""
    cache_builder = CacheBuilder(files_cache, anew=anew)
    block = cache_builder.add(data)
    cache_file.save(
        HEAD, Index(files_cache.index.volume, files_cache.index.length, chunk_lists={b"data": block}), cache_builder
    )


def side_by_side(*works: Callable[[], None]) -> None:
    """Run some functions at once; raises what one of them raises."""
    failed: list[BaseException] = []
    ready = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        ready.wait()
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def test_the_volume_of_a_cache_is_there_whichever_packing_saved_last(tmp_path: Path) -> None:
    """Two packings of one directory end at the same time: neither takes away the volume that the
    other names."""

    def packing(data: bytes) -> Callable[[], None]:
        def work() -> None:
            cache_file = CacheFile(tmp_path, ("one",))
            for _ in range(ROUNDS):
                with contextlib.closing(cache_file.load()) as files_cache:
                    save(cache_file, files_cache, data, anew=True)

        return work

    datas = [b"%d" % number * 200_000 for number in range(3)]
    side_by_side(*map(packing, datas))
    with contextlib.closing(CacheFile(tmp_path, ("one",)).load()) as files_cache:
        assert files_cache.read(files_cache.index.chunk_lists[b"data"]) in datas
    assert len(list((tmp_path / ".pack").iterdir())) == 2


def test_a_cache_that_appears_while_it_is_looked_for_is_not_read_without_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first packing of another makes the folder just after this one found none to lock: the
    next one could take the volume away that this one is about to open."""
    cache_file, opened = CacheFile(tmp_path, ("one",)), os.open

    def open_late(path: Path, flags: int) -> int:
        try:
            return opened(path, flags)
        except FileNotFoundError:
            save(cache_file, FilesCache(), b"of another", anew=True)
            raise

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_late)
        with contextlib.closing(cache_file.load()) as files_cache:
            assert not files_cache.index.volume
    with contextlib.closing(cache_file.load()) as files_cache:
        assert files_cache.read(files_cache.index.chunk_lists[b"data"]) == b"of another"


def test_a_cache_whose_volume_was_replaced_meanwhile_is_not_saved(tmp_path: Path) -> None:
    cache_file = CacheFile(tmp_path, ("one",))
    save(cache_file, FilesCache(), b"first", anew=True)
    with contextlib.closing(cache_file.load()) as early:
        with contextlib.closing(cache_file.load()) as late:
            save(cache_file, late, b"second", anew=True)
        save(cache_file, early, b"third", anew=False)
    with contextlib.closing(cache_file.load()) as files_cache:
        assert files_cache.read(files_cache.index.chunk_lists[b"data"]) == b"second"


def test_drafts_of_others_come_and_go_while_a_cache_is_saved(tmp_path: Path) -> None:
    """As they do where nothing can be locked."""
    folder, ended = tmp_path / ".pack", threading.Event()
    folder.mkdir()

    def others() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            path = folder / f"draft-{threading.get_ident()}-{number}"
            path.touch()
            path.unlink(missing_ok=True)

    def packing() -> None:
        try:
            cache_file = CacheFile(tmp_path, ("one",))
            for _ in range(10 * ROUNDS):
                save(cache_file, FilesCache(), b"data", anew=True)
        finally:
            ended.set()

    side_by_side(packing, others, others)


@pytest.mark.root
def test_a_disk_without_room_for_a_cache_is_called_full(tmp_path: Path) -> None:
    """What it needs is room, and not another mode."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], check=True)
    try:
        with pytest.raises(DiskFull, match="lacks space"):
            save(CacheFile(tmp_path, ("one",)), FilesCache(), bytes(100_000), anew=True)
        assert list((tmp_path / ".pack").iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)
