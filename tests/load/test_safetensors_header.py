"""What the head of a safetensors file may say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from p2pdist.load.header import Place, decode_header, header_length
from p2pdist.model.errors import Corrupt


def head(**tensors: Any) -> bytes:
    return json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_come_in_file_order() -> None:
    data = head(b=tensor("F32", [2, 2], 0, 16), a=tensor("BF16", [3], 16, 22), empty=tensor("I64", [0], 0, 0))
    base = 8 + len(data)
    assert decode_header(data, base + 22) == [
        Place("empty", "I64", (0,), base, base),
        Place("b", "F32", (2, 2), base, base + 16),
        Place("a", "BF16", (3,), base + 16, base + 22),
    ]


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (head(a=tensor("F32", [2], 0, 4)), 4),  # too few bytes for its shape
        (head(a=tensor("F32", [1], 4, 8)), 8),  # a gap in front
        (head(a=tensor("U8", [4], 0, 4), b=tensor("U8", [4], 2, 6)), 6),  # one over the other
        (head(a=tensor("F32", [1], 0, 4)), 5),  # bytes behind the last one
        (head(a=tensor("F32", [1], 0, 4)), 3),  # cut off
        (head(a=tensor("F99", [1], 0, 4)), 4),
        (head(a=tensor("F32", [-1, -1], 0, 4)), 4),
        (head(a={"dtype": "F32"}), 0),
        (b"[]", 0),
        (b"\xff", 0),
    ],
)
def test_what_cannot_be_is_refused(data: bytes, size: int) -> None:
    with pytest.raises(Corrupt):
        decode_header(data, 8 + len(data) + size)


@pytest.mark.parametrize(
    ("length", "size"), [(0, 100), (1, 100), (93, 100), (1 << 63, 1 << 62), (100_000_001, 1 << 40)]
)
def test_the_length_has_a_limit(length: int, size: int) -> None:
    with pytest.raises(Corrupt):
        header_length(length.to_bytes(8, "little"), size)
    assert header_length((92).to_bytes(8, "little"), 100) == 92
