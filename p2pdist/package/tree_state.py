"""What a packing of a tree leaves behind for the next one of the same directory: the contents of its files by inode, size and times, so
that files that have not changed are not read, and the result, so that a directory that has not changed costs one look.

A state is a hint that may be deleted: one file for each source, layout and set of options in `.pack` of the layout, replaced at once, of
the newest STATES_MAX. It is the magic, the length of the head, BLAKE3 of head and body, the head, and the body; the head alone is
read where nothing has changed. A state that does not match its hashes is not believed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from pathlib import Path
from typing import BinaryIO

import msgspec
from blake3 import blake3

from p2pdist.model.errors import P2PDistError
from p2pdist.model.package import Descriptor
from p2pdist.model.tree import Entry

STATES_MAX = 32
_MAGIC = b"p2pdist-pack-state-1\n"
_SIZES = struct.Struct("<QQ32s32s")


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """A packed tree as the manifest names it. `parts` are the catalogs and packs of its own, those of the base not among them; `lists`
    are the piece lists of root and parts. `dropped` holds the first paths, and kinds, of the `dropped_total` things that were dropped."""

    root: Descriptor
    parts: tuple[Descriptor, ...]
    lists: tuple[Descriptor, ...]
    files: int
    bytes_total: int
    dropped: tuple[tuple[bytes, str], ...]
    dropped_total: int


class Head(msgspec.Struct, frozen=True, array_like=True):
    """`fingerprint` of the scan, empty when something in it was too new to be told from a later change; digest of the base's manifest."""

    fingerprint: bytes
    base: str
    outcome: Outcome


class Stamp(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a file whose content is known looked like. Its size is in the entry."""

    inode: int
    device: int
    mtime_ns: int
    ctime_ns: int


class Remembered(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A directory: BLAKE3 of its rows, empty when its entries may not be taken over as they are; its encoded entries, and the stamps of
    those of them that are files, None where a file has to be read again; what was dropped in it; the positions of entries behind which a
    page ends, None in states of earlier releases."""

    path: bytes
    fingerprint: bytes
    entries: bytes
    stamps: bytes
    dropped: tuple[tuple[bytes, str], ...] = ()
    ends: tuple[int, ...] | None = None


encode_entries = msgspec.msgpack.Encoder().encode
decode_entries = msgspec.msgpack.Decoder(list[Entry]).decode
decode_stamps = msgspec.msgpack.Decoder(list[Stamp | None]).decode
_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_body = msgspec.msgpack.Decoder(list[Remembered]).decode


class Damaged(Exception):
    """A state that is not to be believed."""


class StateFile:
    """The state of packing with the options `key` into the layout at `directory`."""

    def __init__(self, directory: Path, key: tuple[object, ...]) -> None:
        self._folder = directory / ".pack"
        self.path = self._folder / blake3(repr(key).encode()).hexdigest()[:32]

    def head(self) -> Head | None:
        """None when there is no state. Raises Damaged."""
        opened = self._open()
        return None if opened is None else opened[0]

    def directories(self) -> dict[bytes, Remembered]:
        """What is remembered of each directory, by path; nothing when there is no state. Raises Damaged."""
        opened = self._open(body=True)
        return {} if opened is None else {found.path: found for found in opened[1]}

    def save(self, head: Head, directories: list[Remembered]) -> None:
        """Replace the state, and delete the oldest ones over STATES_MAX. Raises P2PDistError."""
        first, body = encode_entries(head), encode_entries(directories)
        sizes = _SIZES.pack(len(first), len(body), blake3(first).digest(), blake3(body).digest())
        draft = self.path.with_name(f"draft-{secrets.token_hex(8)}")
        try:
            self._folder.mkdir(exist_ok=True)
            try:
                with draft.open("xb") as stream:
                    stream.writelines((_MAGIC, sizes, first, body))
                draft.replace(self.path)
            finally:
                draft.unlink(missing_ok=True)
            self._forget_oldest()
        except OSError as error:
            raise P2PDistError(
                f"cannot write {self.path}: {error.strerror}", remedy="Make the layout's directory writable"
            ) from error

    def _open(self, *, body: bool = False) -> tuple[Head, list[Remembered]] | None:
        try:
            with self.path.open("rb") as stream:
                return _read(stream, body)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, ValueError) as error:
            raise Damaged(str(error)) from error

    def _forget_oldest(self) -> None:
        with os.scandir(self._folder) as entries:
            known = sorted(((entry.stat().st_mtime_ns, entry.path) for entry in entries), reverse=True)
        for _, path in known[STATES_MAX:]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _read(stream: BinaryIO, wants_body: bool) -> tuple[Head, list[Remembered]]:
    if stream.read(len(_MAGIC)) != _MAGIC:
        raise Damaged("it is of another format")
    sizes = stream.read(_SIZES.size)
    if len(sizes) != _SIZES.size:
        raise Damaged("it is cut short")
    length, body_length, hash_of_head, hash_of_body = _SIZES.unpack(sizes)
    if length + body_length != os.fstat(stream.fileno()).st_size - stream.tell():
        raise Damaged("it has another length than it states")
    data = stream.read(length)
    if blake3(data).digest() != hash_of_head:
        raise Damaged("its head does not match its hash")
    head = _decode_head(data)
    if not wants_body:
        return head, []
    body = stream.read(body_length)
    if blake3(body).digest() != hash_of_body:
        raise Damaged("its body does not match its hash")
    return head, _decode_body(body)
