"""Blobs and packages as BitTorrent sees them: metainfo for versions 1 and 2 of the protocol at once
("hybrid", BEP 3 and BEP 52).

Theory. A hybrid torrent states the same content twice. Version 1 has the SHA-1 of every piece, over
all files in a row; BEP 47 padding lets each file begin at a piece. Version 2 has one hash tree for
each file: SHA-256 over blocks of 16 KiB, joined in pairs, where what is missing up to a power of
two counts as zero hashes. Its root stands in the file tree, and the layer of the tree in which a
node covers one piece in `piece layers`, for files of more than one piece. The torrent is named by
the hash of its info dictionary: SHA-1 and SHA-256, the latter cut to 20 bytes where a tracker or a
peer has no room for more.

The publisher reads the content once for all of this, and pushes the result to the origin as a small
blob, the torrent document: a bencoded dictionary of `info` and `piece layers`. A tag leads from the
blob, or the manifest of a package, to its torrent document (`torrent_reference`). With `announce`
and `url-list` (BEP 19) a document is a `.torrent`.

A document is valid only if it is, byte for byte, what this module would have made of the hashes in
it, and if its trees are right. Whether the hashes are the blob's cannot be seen without the
content; the agents verify by the piece list in any case.

aria2 up to 1.36 forgets the empty keys that BEP 52 puts into the file tree, and so gives a hybrid
torrent an info hash of its own. For such clients the keys of version 2 can be left out (`v1_only`):
another torrent, with peers of its own and the same web seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha1, sha256

from p2pdist.model.bencode import Encodable, Value, decode, encode
from p2pdist.model.digest import Digest, hex_of
from p2pdist.model.errors import Corrupt, UsageError
from p2pdist.model.manifest import Reference
from p2pdist.model.pieces import PIECE_SIZE_MAX, PIECE_SIZE_MIN, PIECES_LIMIT

TORRENT_TYPE = "application/vnd.p2pdist.torrent.v1"
PACKAGE_NAME = "sha256"
"""The name of a package's torrent. Its files are named by the hexadecimal digits of their digests,
so the torrent, brought to the folder `blobs` of an OCI image layout, is in its place there, and
that folder of an origin is a web seed as it stands."""

BLOCK_SIZE = 16 << 10
FILES_MAX = 2048
NAME_BYTES_MAX = 255

_ZERO = bytes(32)


def torrent_reference(subject: Digest) -> Reference:
    """The tag of the torrent document of a blob, or of the package with this manifest."""
    return Reference("torrent", f"sha256-{hex_of(subject)}")


@dataclass(frozen=True, slots=True)
class FileHashes:
    """What one file adds to a torrent: the SHA-1 of each piece, 20 bytes each; the SHA-1 of the
    last piece padded with zeros, for a file before others; the root of the hash tree; the tree's
    layer of pieces, 32 bytes each, empty where there is one piece."""

    size: int
    piece_size: int
    pieces: bytes
    padded_end: bytes
    root: bytes
    layer: bytes


class TorrentHasher:
    """Hashes a file that comes in parts of any length."""

    def __init__(self, piece_size: int) -> None:
        """Raises UsageError for a piece size that torrent documents do not have."""
        if not _possible(piece_size):
            raise UsageError(f"a torrent cannot have pieces of {piece_size} bytes")
        self._piece_size = piece_size
        self._size = 0
        self._piece = sha1(usedforsecurity=False)
        self._block = sha256()
        self._leaves: list[bytes] = []
        self._pieces: list[bytes] = []
        self._roots: list[bytes] = []

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes of the file."""
        view = memoryview(data)
        while view:
            part = view[: BLOCK_SIZE - self._size % BLOCK_SIZE]
            view = view[len(part) :]
            self._piece.update(part)
            self._block.update(part)
            self._size += len(part)
            if not self._size % BLOCK_SIZE:
                self._end_block()
            if not self._size % self._piece_size:
                self._end_piece()

    def finish(self) -> FileHashes:
        """The hashes of the file, which ends here. Raises UsageError for an empty one."""
        if not self._size:
            raise UsageError("an empty file cannot be in a torrent")
        if self._size % BLOCK_SIZE:
            self._end_block()
        width = self._piece_size // BLOCK_SIZE
        padded_end = self._pieces[-1] if self._pieces else b""
        if self._leaves:
            padded = self._piece.copy()
            padded.update(bytes(-self._size % self._piece_size))
            padded_end = padded.digest()
            if not self._roots:
                width = _power_of_two(len(self._leaves))
            self._end_piece(width)
        layer = b"".join(self._roots) if len(self._roots) > 1 else b""
        root = _layer_root(layer, self._piece_size) if layer else self._roots[0]
        return FileHashes(self._size, self._piece_size, b"".join(self._pieces), padded_end, root, layer)

    def _end_block(self) -> None:
        self._leaves.append(self._block.digest())
        self._block = sha256()

    def _end_piece(self, width: int = 0) -> None:
        self._roots.append(_root(self._leaves, width or len(self._leaves), _ZERO))
        self._pieces.append(self._piece.digest())
        self._leaves = []
        self._piece = sha1(usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class Torrent:
    """A valid torrent document. `files` are (name, size), in the torrent's order; a torrent of one
    blob has one, named as the torrent is. `info` and `layers` are bencoded; in a torrent of version
    1 alone `layers` is empty."""

    name: str
    piece_size: int
    files: tuple[tuple[str, int], ...]
    info: bytes
    layers: bytes

    @property
    def size(self) -> int:
        """Bytes of content, without padding."""
        return sum(size for _, size in self.files)

    @property
    def info_hash_v1(self) -> bytes:
        """20 bytes."""
        return sha1(self.info, usedforsecurity=False).digest()

    @property
    def info_hash_v2(self) -> bytes:
        """32 bytes; meaningless for a torrent of version 1 alone."""
        return sha256(self.info).digest()

    def v1_only(self) -> Torrent:
        """A torrent of version 1 alone with this content, for clients that stumble over the keys of
        version 2."""
        info = _dictionary(decode(self.info))
        kept = {key: value for key, value in info.items() if key not in (b"file tree", b"meta version")}
        return replace(self, info=encode(kept), layers=b"")

    def __len__(self) -> int:
        return len(self.info) + len(self.layers)

    def metainfo(self, announce: str, web_seeds: Sequence[str] = ()) -> bytes:
        """The `.torrent` file, with the addresses of a tracker and of web seeds (BEP 19), either of
        which may be missing."""
        out = [b"d"]
        if announce:
            out += (encode(b"announce"), encode(announce.encode()))
        out += (encode(b"info"), self.info)
        if self.layers:
            out += (encode(b"piece layers"), self.layers)
        if web_seeds:
            out += (encode(b"url-list"), encode([url.encode() for url in web_seeds]))
        return b"".join((*out, b"e"))


# -- making documents


def blob_torrent(hashes: FileHashes, name: str) -> bytes:
    """The torrent document of one file. Raises UsageError."""
    _check_names([name])
    file = _File(name, hashes.size, hashes.root)
    return _document(_info(name, hashes.piece_size, [file], hashes.pieces, single=True), {hashes.root: hashes.layer})


def package_torrent(files: Sequence[tuple[str, FileHashes]], name: str = PACKAGE_NAME) -> bytes:
    """The torrent document of a folder of files that were hashed with one piece size. Raises
    UsageError."""
    ordered = sorted(files, key=lambda item: item[0].encode())
    names = [file for file, _ in ordered]
    sizes = {hashes.piece_size for _, hashes in ordered}
    if not 0 < len(names) <= FILES_MAX or len(set(names)) != len(names) or len(sizes) != 1:
        raise UsageError(f"a torrent has up to {FILES_MAX} files with different names and one piece size")
    _check_names([name, *names])
    padded = [hashes.pieces[:-20] + hashes.padded_end for _, hashes in ordered[:-1]]
    pieces = b"".join([*padded, ordered[-1][1].pieces])
    info = _info(name, sizes.pop(), [_File(file, hashes.size, hashes.root) for file, hashes in ordered], pieces)
    return _document(info, {hashes.root: hashes.layer for _, hashes in ordered})


# -- reading documents


def decode_torrent(document: bytes) -> Torrent:
    """Parse and check a torrent document. Raises Corrupt."""
    body = _dictionary(decode(document))
    if body.keys() != {b"info", b"piece layers"}:
        raise _malformed("it has other parts than info and piece layers")
    info, layers = _dictionary(body[b"info"]), _dictionary(body[b"piece layers"])
    piece_size, pieces = info.get(b"piece length"), info.get(b"pieces")
    if not isinstance(piece_size, int) or not _possible(piece_size) or not isinstance(pieces, bytes):
        raise _malformed("its pieces are impossible")
    name = _text(info.get(b"name"))
    files = [_file(key, node) for key, node in _dictionary(info.get(b"file tree", {})).items()]
    counts = [-(-file.size // piece_size) for file in files]
    if not 0 < len(files) <= FILES_MAX or sum(counts) > PIECES_LIMIT or len(pieces) != 20 * sum(counts):
        raise _malformed("its files do not fit its pieces")
    for file, count in zip(files, counts, strict=True):
        layer = layers.get(file.root)
        if count > 1 and (
            not isinstance(layer, bytes) or len(layer) != 32 * count or _layer_root(layer, piece_size) != file.root
        ):
            raise _malformed(f"the hash tree of {file.name!r} is wrong")
    try:
        _check_names([name, *(file.name for file in files)])
    except UsageError as error:
        raise _malformed(error.what) from error
    single = b"length" in info
    if single and [file.name for file in files] != [name]:
        raise _malformed("one file has two names")
    long = {file.root: layers[file.root] for file, count in zip(files, counts, strict=True) if count > 1}
    if info != _info(name, piece_size, files, pieces, single=single) or layers != long:
        raise _malformed("it is not what its hashes make")
    return Torrent(name, piece_size, tuple((file.name, file.size) for file in files), encode(info), encode(layers))


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    size: int
    root: bytes


def _info(
    name: str, piece_size: int, files: Sequence[_File], pieces: bytes, *, single: bool = False
) -> dict[bytes, Encodable]:
    """The info dictionary, with the keys of both versions. `files` are in order of their names."""
    info: dict[bytes, Encodable] = {
        b"file tree": {file.name.encode(): {b"": {b"length": file.size, b"pieces root": file.root}} for file in files},
        b"meta version": 2,
        b"name": name.encode(),
        b"piece length": piece_size,
        b"pieces": pieces,
    }
    if single:
        return info | {b"length": files[0].size}
    listed: list[Encodable] = []
    for number, file in enumerate(files, start=1):
        listed.append({b"length": file.size, b"path": [file.name.encode()]})
        pad = -file.size % piece_size
        if pad and number < len(files):
            listed.append({b"attr": b"p", b"length": pad, b"path": [b".pad", b"%d" % pad]})
    return info | {b"files": listed}


def _document(info: dict[bytes, Encodable], layers: Mapping[bytes, bytes]) -> bytes:
    return encode({b"info": info, b"piece layers": {root: layer for root, layer in layers.items() if layer}})


def _file(key: bytes, node: Value) -> _File:
    leaf = _dictionary(_dictionary(node).get(b"", {}))
    size, root = leaf.get(b"length"), leaf.get(b"pieces root")
    if not isinstance(size, int) or not 0 < size < 1 << 62 or not isinstance(root, bytes) or len(root) != 32:
        raise _malformed("a file has no size or no root")
    return _File(_text(key), size, root)


def _dictionary(value: Value) -> dict[bytes, Value]:
    if not isinstance(value, dict):
        raise _malformed("a dictionary is missing")
    return value


def _text(value: Value | None) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else ""
    except UnicodeDecodeError as error:
        raise _malformed("a name is not UTF-8") from error


def _malformed(why: str) -> Corrupt:
    return Corrupt(f"what was read is not a torrent document: {why}", remedy="Push the content again")


def _check_names(names: Sequence[str]) -> None:
    """Names that are one component of a path everywhere."""
    for name in names:
        if not name or not name.isprintable() or name.startswith(".") or len(name.encode()) > NAME_BYTES_MAX:
            raise UsageError(f"a torrent cannot have a file named {name[:100]!r}")
        if "/" in name or "\\" in name:
            raise UsageError(f"a torrent cannot have a file named {name[:100]!r}", remedy="Give it one without slashes")


# -- hash trees


def _possible(piece_size: int) -> bool:
    return not piece_size & (piece_size - 1) and PIECE_SIZE_MIN <= piece_size <= PIECE_SIZE_MAX


def _power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


def _root(nodes: Sequence[bytes], width: int, pad: bytes) -> bytes:
    """The root of the tree over `width` nodes, a power of two; missing nodes are `pad`."""
    while width > 1:
        if len(nodes) % 2:
            nodes = [*nodes, pad]
        nodes = [sha256(left + right).digest() for left, right in zip(nodes[::2], nodes[1::2], strict=True)]
        pad = sha256(pad + pad).digest()
        width //= 2
    return nodes[0]


def _layer_root(layer: bytes, piece_size: int) -> bytes:
    """The root of the tree of a file whose layer of pieces this is."""
    empty_piece = _root([_ZERO], piece_size // BLOCK_SIZE, _ZERO)
    nodes = [layer[start : start + 32] for start in range(0, len(layer), 32)]
    return _root(nodes, _power_of_two(len(nodes)), empty_piece)
