"""The head of a safetensors file (github.com/huggingface/safetensors, "Format"): eight bytes with
the length of a JSON object, little-endian, and the object, which says of each tensor its type,
shape and place behind it. Tensors lie one behind the other without gaps, to the end of the file."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdist.model.errors import UNDECODABLE, Corrupt, printable

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000
"""As safetensors has it."""
BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip
"""Bytes of a value by type. Types of less than a byte are not loaded."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor: its name, type and shape, and the bytes of the file that it is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Tensor(msgspec.Struct):
    dtype: str
    shape: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=64)]
    data_offsets: tuple[int, int]


def header_length(data: bytes, size: int) -> int:
    """The length of the JSON object, from the first bytes of a file of `size` bytes. Raises
    Corrupt."""
    length = int.from_bytes(data, "little")
    if len(data) != LENGTH_BYTES or not 2 <= length <= min(HEADER_BYTES_MAX, size - LENGTH_BYTES):
        raise Corrupt(f"a file of {size} bytes with a header of {length} bytes is no safetensors file")
    return length


def decode_header(data: bytes, size: int) -> list[Place]:
    """The tensors of a file of `size` bytes, in file order; `data` is the JSON object. Raises
    Corrupt naming the tensor that cannot be."""
    try:
        listed = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        listed.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in listed.items()}
    except UNDECODABLE as error:
        raise Corrupt(f"this is no safetensors file: {' '.join(str(error).split())[:200]}") from error
    base = at = LENGTH_BYTES + len(data)
    found = []
    for name, tensor in sorted(tensors.items(), key=lambda item: (*item[1].data_offsets, item[0])):
        begin, end = tensor.data_offsets
        width = BYTES.get(tensor.dtype)
        if width is None:
            raise Corrupt(f"the tensor {printable(name[:200])} is of type {printable(tensor.dtype[:50])}")
        if base + begin != at or end - begin != width * prod(tensor.shape) or base + end > size:
            raise Corrupt(f"the tensor {printable(name[:200])} lies where it cannot lie: {begin} to {end}")
        at = base + end
        found.append(Place(name, tensor.dtype, tuple(tensor.shape), base + begin, at))
    if at != size:
        raise Corrupt(f"the tensors of the file end at {at} of {size} bytes")
    return found
