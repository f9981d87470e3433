"""Reading the content of a blob back from the disk, to compare it with what it should be."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from p2pdist.model.digest import Digest
from p2pdist.model.pieces import PieceLayout, PieceList

_STEP = 4 << 20
_THREADS = min(4, os.cpu_count() or 1)


def wrong_pieces(fd: int, layout: PieceLayout, pieces: Sequence[int], hashes: Callable[[], PieceList]) -> list[int]:
    """Those of `pieces` whose bytes in the file `fd` are wrong or cannot be read. `hashes`
    gives the piece list, once a piece was read; what it raises is raised on."""
    wrong: list[int] = []
    buffer = memoryview(bytearray(min(layout.piece_size, layout.size)))
    for piece in pieces:
        view = buffer[: layout.length(piece)]
        try:
            count = os.preadv(fd, [view], layout.offset(piece))
        except OSError:
            count = -1
        if count != len(view) or not hashes().verify(piece, view):
            wrong.append(piece)
    return wrong


def wrong_pieces_in_threads(
    fd: int, layout: PieceLayout, pieces: Sequence[int], hashes: Callable[[], PieceList]
) -> list[int]:
    """Those of `pieces` whose bytes are wrong, looked for by several threads; in order."""
    share = -(-len(pieces) // _THREADS) or 1
    shares = [pieces[begin : begin + share] for begin in range(0, len(pieces), share)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="store-recheck") as pool:
        found = pool.map(lambda part: wrong_pieces(fd, layout, part, hashes), shares)
        return [piece for part in found for piece in part]


def sha256_of(fd: int) -> Digest:
    """The SHA-256 of a file in the form of a digest; raises OSError."""
    state = hashlib.sha256()
    buffer = memoryview(bytearray(_STEP))
    offset = 0
    while count := os.preadv(fd, [buffer], offset):
        state.update(buffer[:count])
        offset += count
    return Digest(f"sha256:{state.hexdigest()}")
