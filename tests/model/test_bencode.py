"""Bencoding: the canonical form comes out and nothing else goes in."""

from __future__ import annotations

import libtorrent
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model import bencode
from p2pdist.model.bencode import DEPTH_MAX, INTEGER_MAX, INTEGER_MIN, Value, decode, encode
from p2pdist.model.errors import Corrupt

VALUES: st.SearchStrategy[Value] = st.recursive(
    st.integers(INTEGER_MIN, INTEGER_MAX) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.binary(max_size=8), inner, max_size=5),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (0, b"i0e"),
        (-7, b"i-7e"),
        (b"", b"0:"),
        (b"spam", b"4:spam"),
        ([b"a", 1, []], b"l1:ai1elee"),
        ({b"b": 1, b"a": {}}, b"d1:ade1:bi1ee"),
        (INTEGER_MAX, b"i18446744073709551615e"),
        (INTEGER_MIN, b"i-9223372036854775808e"),
    ],
)
def test_the_canonical_form(value: Value, data: bytes) -> None:
    assert encode(value) == data
    assert decode(data) == value


@pytest.mark.parametrize(
    "data",
    [
        b"", b"i", b"ie", b"i-e", b"i-0e", b"i00e", b"i01e", b"i-01e", b"i+1e", b"i 1e", b"i1 e", b"i1_0e", b"i1", b"1e",
        b"i18446744073709551616e", b"i-9223372036854775809e", b"i" + b"9" * 5000 + b"e", "i\u0661e".encode(),
        b"1:", b"01:a", b"-1:a", b"00:", b"2:a", b":", b"99999999999999999999:a", b"x", b"e",
        b"l", b"li1e", b"d", b"d1:a", b"d1:ae", b"di1ei1ee", b"d1:bi1e1:ai1ee", b"d1:ai1e1:ai1ee", b"dlee",
        b"i1ei2e", b"lee", b"i1e ", b" i1e",
    ],
)  # fmt: skip
def test_another_form_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupt, match="bencoding"):
        decode(data)


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Depth, bytes and items each have one, and what lies just below passes."""
    nested = b"l" * DEPTH_MAX + b"i1e" + b"e" * DEPTH_MAX
    assert encode(decode(nested)) == nested
    with pytest.raises(Corrupt, match="deeply"):
        decode(b"l" + nested + b"e")
    with pytest.raises(Corrupt, match="deeply"):
        decode(b"d0:" * 100_000)
    assert decode(b"3:abc", bytes_max=5) == b"abc"
    with pytest.raises(Corrupt, match="limit"):
        decode(b"3:abc", bytes_max=4)
    monkeypatch.setattr(bencode, "ITEMS_MAX", 4)
    assert decode(b"d1:ali1eee") == {b"a": [1]}
    with pytest.raises(Corrupt, match="items"):
        decode(b"d1:ali1e0:ee")


@pytest.mark.parametrize("value", [True, "text", 1.0, None, {"a": 1}, bytearray(b"a"), memoryview(b"a"), [b"a", "a"]])
def test_what_has_no_form_is_a_bug_of_the_caller(value: object) -> None:
    with pytest.raises(TypeError):
        encode(value)  # type: ignore[arg-type]


def test_an_integer_out_of_range_is_not_written() -> None:
    with pytest.raises(Corrupt):
        encode(INTEGER_MAX + 1)


@given(VALUES)
def test_what_is_written_is_read_and_a_known_reader_agrees(value: Value) -> None:
    data = encode(value)
    assert decode(data) == value
    # Their integers are signed, and the smallest one is none of them.
    if all(abs(number) < 1 << 63 for number in integers(value)):
        assert libtorrent.bdecode(data) == value


def integers(value: Value) -> list[int]:
    if isinstance(value, int):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [number for part in parts for number in integers(part)]


@given(st.binary(max_size=60) | st.text("ilde0123456789:-a", max_size=60).map(str.encode))
def test_whatever_is_read_is_canonical(data: bytes) -> None:
    try:
        value = decode(data)
    except Corrupt:
        return
    assert encode(value) == data


@given(VALUES, st.data())
def test_one_wrong_byte_is_refused_or_means_something_else(value: Value, draw: st.DataObject) -> None:
    data = bytearray(encode(value))
    at = draw.draw(st.integers(0, len(data) - 1))
    data[at] ^= draw.draw(st.integers(1, 255))
    try:
        found = decode(bytes(data))
    except Corrupt:
        return
    assert found != value and encode(found) == data
