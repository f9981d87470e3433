"""Where contents lie in the device of a lazy view, compared with a slow look at every chunk."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model.device import BLOCK_BYTES, CELL_BYTES, Cells, DeviceLayout, has_own_cells
from p2pdist.model.tree import CHUNK_LEAST, ChunkList, content_hash

LENGTHS = st.one_of(
    st.lists(st.integers(1, 3 * BLOCK_BYTES), min_size=1, max_size=1),
    st.lists(st.integers(CHUNK_LEAST, CHUNK_LEAST + 3 * BLOCK_BYTES), min_size=2, max_size=4),
)
CONTENTS = st.lists(LENGTHS, max_size=8)

Piece = tuple[int, int, bytes, bytes]


def layout_of(contents: list[list[int]]) -> tuple[DeviceLayout, list[Piece]]:
    """A layout of contents whose chunks have these lengths; and of each chunk, in order, begin and
    end in the device, content and name."""
    sizes: dict[bytes, int] = {}
    lists: dict[bytes, bytes] = {}
    pieces: list[Piece] = []
    at = 0
    for number, lengths in enumerate(contents):
        content = content_hash(b"content %d" % number)
        names = [content] if len(lengths) == 1 else [content_hash(b"%d %d" % (number, n)) for n in range(len(lengths))]
        sizes[content] = sum(lengths)
        own = has_own_cells(sizes[content])
        at += -at % (CELL_BYTES if own else BLOCK_BYTES)
        if len(lengths) > 1:
            lists[content] = ChunkList(tuple(zip(names, lengths, strict=True))).encode()
        for name, length in zip(names, lengths, strict=True):
            pieces.append((at, at + length, content, name))
            at += length
        at += -at % (CELL_BYTES if own else BLOCK_BYTES)
    return DeviceLayout(sizes, lists), pieces


@given(CONTENTS, st.data())
def test_the_chunks_of_a_range_are_those_that_have_bytes_in_it(contents: list[list[int]], data: st.DataObject) -> None:
    layout, pieces = layout_of(contents)
    begin = data.draw(st.integers(0, layout.size))
    end = data.draw(st.integers(begin, layout.size + BLOCK_BYTES))
    found = [(chunk.at, chunk.at + chunk.length, chunk.content, chunk.chunk) for chunk in layout.chunks(begin, end)]
    assert found == [piece for piece in pieces if max(begin, piece[0]) < min(end, piece[1])]


@given(CONTENTS)
def test_all_chunks_lie_where_the_image_says(contents: list[list[int]]) -> None:
    layout, pieces = layout_of(contents)
    firsts = layout.first_blocks()
    chunks = list(layout.chunks())
    assert [(chunk.at, chunk.content, chunk.chunk) for chunk in chunks] == [(at, *names) for at, _, *names in pieces]
    assert all(chunk.at == firsts[chunk.content] * BLOCK_BYTES + chunk.offset for chunk in chunks)
    assert layout.bytes_content == sum(map(sum, contents)) and layout.size % BLOCK_BYTES == 0


def test_views_of_earlier_versions_lie_as_their_images_say() -> None:
    """What changes here needs another number: an agent goes on filling what the one before it
    mounted, and bytes elsewhere would be read as other files."""
    sizes = {bytes([number]): size for number, size in enumerate((5000, 2 << 20, 1, (1 << 20) + 1, 70_000))}
    first = DeviceLayout(sizes, {}, 1)
    assert [*first.first_blocks().values(), first.blocks] == [0, 2, 514, 515, 772, 790]
    second = DeviceLayout(sizes, {}, 2)
    assert [*second.first_blocks().values(), second.blocks] == [0, 15, 540, 555, 825, 843]
    assert DeviceLayout(sizes, {}).first_blocks() == second.first_blocks()


@given(st.booleans(), st.integers(0, 5 * CELL_BYTES), st.integers(1, 4 * CELL_BYTES))
def test_bytes_of_contents_lie_in_their_cells_and_never_in_a_head(headed: bool, at: int, length: int) -> None:
    """Compared with a look at each block."""
    cells, places = Cells(headed), []
    for offset, begin, end in Cells(headed).places(at, length):
        assert begin == (places[-1][2] if places else 0) and end > begin
        places.append((offset, begin, end))
        cell = (at + begin) // CELL_BYTES
        head_at, head = cells.head(cell)
        assert cells.covering(offset, end - begin) == range(cell, cell + 1)
        assert offset >= head_at + len(head) or not headed
        assert offset - cell * cells.file_bytes - headed * BLOCK_BYTES == (at + begin) % CELL_BYTES
        assert (offset - at - begin) % BLOCK_BYTES == 0
    assert places[-1][2] == length
    assert [(at + begin) // CELL_BYTES for _, begin, _ in places] == list(cells.holding(at, length))
    assert cells.file_size(at + length) >= places[-1][0] + places[-1][2] - places[-1][1]


def test_a_head_is_that_of_a_stored_block_which_is_the_last_one() -> None:
    """zlib takes the head and the bytes of a cell for what they are; zeros it does not."""
    _, head = Cells(headed=True).head(0)
    contents = bytes(range(256)) * (CELL_BYTES // 256)
    assert zlib.decompress(head + contents, -15) == contents
    with pytest.raises(zlib.error):
        zlib.decompress(bytes(len(head)) + contents, -15)
