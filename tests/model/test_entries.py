"""The entries of a tree by pages are a sequence like any other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model.tree import Entries, Symlink


@given(sizes=st.lists(st.integers(0, 4), max_size=5), start=st.integers(-12, 12), stop=st.integers(-12, 12))
def test_pages_are_one_sequence(sizes: list[int], start: int, stop: int) -> None:
    """Length, order, places, slices and comparison are those of a list."""
    numbers = iter(range(100))
    pages = [[Symlink(b"%d" % next(numbers), 0, b"x") for _ in range(size)] for size in sizes]
    plain = [entry for page in pages for entry in page]
    entries = Entries(pages)
    assert (len(entries), list(entries), entries[start:stop]) == (len(plain), plain, plain[start:stop])
    assert all(entries[number] is plain[number] for number in range(-len(plain), len(plain)))
    assert entries == plain and entries == Entries([plain]) and entries != [*plain, Symlink(b"more", 0, b"x")]
    for number in (len(plain), -len(plain) - 1):
        try:
            entries[number]
        except IndexError:
            continue
        raise AssertionError("there is no such place")
    assert not plain or entries != [*plain[:-1], Symlink(b"other", 0, b"x")]
