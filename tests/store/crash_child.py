"""Processes that are killed while they use a store; run by test_store_crash.

crash_child.py write ROOT SIZE THREADS
    writes the pieces of sample(50, SIZE), prints each once it is held
crash_child.py steps ROOT
    runs LIFE in ROOT/0, ROOT/1, ...: the n-th process dies at the n-th change of the disk
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from store_rig import PIECE, fill, flip, sample

from p2pdist.store.blobs.blob import check_whole, require_vouched, unmark, vouch
from p2pdist.store.blobs.vouched_pieces import Listing
from p2pdist.store.store import BlobStore

CHANGES = {"open", "os.rename", "os.remove", "os.chmod", "os.truncate", "os.mkdir", "sqlite3.connect"}
"""Audit events (library reference, "Audit events table") around each of which a process is killed
once."""

FIRST = sample(60, 3 * PIECE + 1)
SECOND = sample(61, 2 * PIECE)
EMPTY = sample(62, 0)
SINGLE = sample(64, PIECE - 7)
VOUCHED = sample(66, 3 * PIECE + 9)
LIFE = (FIRST, SECOND, EMPTY, SINGLE, VOUCHED)


def write(root: Path, size: int, threads: int) -> None:
    found = sample(50, size)
    blob = BlobStore(root).begin(found.digest, found.pieces)

    def run(first: int) -> None:
        for piece in range(first, found.count, threads):
            assert blob.write(piece, found.piece(piece))
            os.write(1, f"{piece}\n".encode())
            time.sleep(0.001)  # or all would be written before the parent can kill

    started = [threading.Thread(target=run, args=(first,)) for first in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    os.write(1, b"end\n")
    signal.pause()


def live(root: Path) -> None:
    """Everything that changes a store, once."""
    store = BlobStore(root)
    blob = fill(store.begin(FIRST.digest, FIRST.pieces), FIRST)
    (root / "flipped").touch()
    flip(blob.path, PIECE + 5)
    assert blob.verify(drop=True) == [1]
    (root / "dropped").touch()
    blob.write(1, FIRST.piece(1))
    blob.finish()
    partial = store.begin(SECOND.digest, SECOND.pieces)
    partial.write(1, SECOND.piece(1))
    store.close()
    store = BlobStore(root)
    again = store.get(SECOND.digest)
    assert again is not None
    fill(again, SECOND)
    fill(store.begin(EMPTY.digest, EMPTY.pieces), EMPTY)
    single = store.begin(SINGLE.digest, SINGLE.pieces)
    single.write(0, SINGLE.piece(0))
    single.finish()
    store.remove(FIRST.digest)
    listed = store.begin_vouched(VOUCHED.digest, len(VOUCHED.data))
    vouch(listed, 2, VOUCHED.piece(2))
    vouch(listed, 0, VOUCHED.piece(1))
    unmark(listed, require_vouched(listed).put(Listing(1, (0,), VOUCHED.pieces.hashes[:32])))
    for piece in (0, 1, 3):
        vouch(listed, piece, VOUCHED.piece(piece))
    assert check_whole(listed).matches
    listed.finish()
    listed.release()
    store.close()


def steps(root: Path) -> None:
    """Print how many processes were started; the last lived to the end."""
    number = 0
    while True:
        child = os.fork()
        if child == 0:
            _die_at(number)
            live(root / str(number))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        number += 1
        if not os.WIFSIGNALED(status):
            print(number, status)
            return


def _die_at(number: int) -> None:
    main, left = threading.get_ident(), number

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in CHANGES and threading.get_ident() == main:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(hook)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        steps(Path(sys.argv[2]))
