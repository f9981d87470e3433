"""Processes that are killed while they pull and remove trees; run by test_trees_crash.

tree_crash_child.py ROOT WAY
    pulls and removes trees in ROOT/0, ROOT/1, ...: the n-th process dies at the n-th change of
    the disk. Prints how many processes were started; the last lived to the end. With WAY
    "together" contents are written together, under their names, as on Btrfs; else "alone".
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from store_tree_rig import Packed, Publisher, noise, pull, text

from p2pdist.model.tree import WHOLE_MAX
from p2pdist.store.store import BlobStore
from p2pdist.store.trees import extraction

CHANGES = {"open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.truncate"}
"""Audit events (library reference, "Audit events table") around each of which a process is killed
once."""


def trees() -> tuple[Packed, Packed]:
    """Two versions of a package with a large file."""
    publisher = Publisher()
    big = text(1, 200_000) + bytes(WHOLE_MAX)
    files = {b"f%d" % number: noise(number, 100) for number in range(4)}
    return publisher.pack({**files, b"big": big}), publisher.pack({**files, b"big": big + b"more", b"f1": b"new"})


def live(root: Path, first: Packed, second: Packed, *, together: bool) -> None:
    """Everything that trees do to a disk, once."""
    store = BlobStore(root)
    store.objects.named_at_once = together
    pull(store, first)
    store.trees.images.path(first.root).write_bytes(b"image")
    pull(store, second)
    store.trees.remove(first.root)
    store.close()
    store = BlobStore(root)
    store.trees.remove(second.root)
    store.close()


def steps(root: Path, *, together: bool) -> None:
    number, packed = 0, trees()
    while True:
        for content in packed[0].contents if together else ():
            (root / str(number) / "objects" / content.hex()[:2]).mkdir(parents=True, exist_ok=True)
        child = os.fork()
        if child == 0:
            _die_at(number)
            live(root / str(number), *packed, together=together)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        number += 1
        if not os.WIFSIGNALED(status):
            print(number, status)
            return


def _die_at(number: int) -> None:
    left, lock = number, threading.Lock()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in CHANGES and threading.current_thread().name != "store-sync":
            with lock:
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

    sys.addaudithook(hook)


if __name__ == "__main__":
    extraction._THREADS = 1  # so that the n-th change is the same one each time
    steps(Path(sys.argv[1]), together=sys.argv[2] == "together")
