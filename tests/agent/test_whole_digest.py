"""A blob is checked against its own digest while it arrives."""

from __future__ import annotations

import contextlib
import io
import random
from pathlib import Path

import pytest

from p2pdist.agent.pull.pulls import check_whole
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Corrupt
from p2pdist.model.pieces import PieceList
from p2pdist.store.store import BlobStore

DATA = random.Random(1).randbytes((9 << 20) + 12345)


async def check(root: Path, digest: Digest, output: Path | None = None) -> list[int]:
    """Check DATA, stored under `digest`, whose pieces come when they are waited for; returns them
    in the order in which they were. A copy at `output` is written meanwhile."""
    pieces = PieceList.of_stream(io.BytesIO(DATA), len(DATA))
    waited: list[int] = []
    with contextlib.closing(BlobStore(root)) as store:
        blob = store.begin_held(digest, pieces)

        async def piece(number: int) -> None:
            waited.append(number)
            start = blob.layout.offset(number)
            assert blob.write(number, DATA[start : start + blob.layout.length(number)])

        copy = blob.begin_copy(output) if output is not None else None
        assert (copy is None) == (output is None)
        try:
            await check_whole(blob, piece, copy)
            if copy is not None:
                copy.publish()
        finally:
            blob.release()
    assert sorted(waited) == list(range(blob.layout.count)) and len(waited) > 100
    return waited


async def test_only_the_last_piece_is_left_to_be_hashed_when_it_arrives(tmp_path: Path) -> None:
    waited = await check(tmp_path, digest_of(DATA))
    assert waited[-1] == max(waited)


async def test_a_copy_is_written_of_what_is_hashed(tmp_path: Path) -> None:
    """So next to nothing of it is left to be written either when the last piece arrives."""
    await check(tmp_path / "store", digest_of(DATA), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == DATA


async def test_content_that_is_not_what_the_name_says_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(Corrupt, match="hashes to"):
        await check(tmp_path, digest_of(b"something else"))
