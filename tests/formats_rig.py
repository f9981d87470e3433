"""Encodes what a publisher makes a piece at a time, in one call: the pages of a tree, and torrent
documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO

from p2pdist.model.errors import Corrupt
from p2pdist.model.pieces import piece_size_for
from p2pdist.model.torrent import PACKAGE_NAME, FileHashes, TorrentHasher, blob_torrent, package_torrent
from p2pdist.model.tree import PAGE_ENTRIES_MAX, Entry, _pack, ends_page

READ_BYTES = 1 << 20


def encode_pages(entries: Iterable[Entry]) -> Iterator[bytes]:
    """The pages of a tree whose entries come in walking order."""
    page: list[Entry] = []
    for entry in entries:
        page.append(entry)
        if len(page) == PAGE_ENTRIES_MAX or ends_page(entry.path):
            yield _pack(page)
            page = []
    if page:
        yield _pack(page)


def hash_file(stream: BinaryIO, size: int, piece_size: int) -> FileHashes:
    """Hash the next `size` bytes of a stream; raises Corrupt if it ends before."""
    hasher, left = TorrentHasher(piece_size), size
    while left:
        data = stream.read(min(left, READ_BYTES))
        if not data:
            raise Corrupt("the content ended before its stated size")
        hasher.update(data)
        left -= len(data)
    return hasher.finish()


def torrent_info(stream: BinaryIO, size: int, name: str) -> bytes:
    """The torrent document of the next `size` bytes of a stream, as one file named `name`. Raises
    Corrupt if the stream ends before, UsageError for an empty file and a name that cannot be."""
    return blob_torrent(hash_file(stream, size, piece_size_for(size)), name)


def package_torrent_info(files: Iterable[tuple[str, int, BinaryIO]], size: int, name: str = PACKAGE_NAME) -> bytes:
    """The torrent document of several files, (name, size, stream) each, of `size` bytes in all, in
    a folder `name`. Raises as `torrent_info` does, and UsageError for names that come twice."""
    piece_size = piece_size_for(size)
    return package_torrent([(file, hash_file(stream, length, piece_size)) for file, length, stream in files], name)
