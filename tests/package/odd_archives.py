"""Archives as tools made them over the decades, and as transport damages them. Headers are written
byte by byte, so that each field can be what no library would write. The kinds are those that the
test suites of libarchive, umoci, containerd and GNU tar cover."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Iterable

import zstandard

BLOCK = 512
END = bytes(2 * BLOCK)
TIME = 1_600_000_000


def header(
    name: bytes,
    kind: bytes = b"0",
    *,
    size: int | bytes = 0,
    mode: int = 0o644,
    mtime: int | bytes = TIME,
    link: bytes = b"",
    magic: bytes = b"ustar\x0000",
    prefix: bytes = b"",
    tail: bytes = b"",
    signed: bool = False,
) -> bytes:
    """One header block. `size` and `mtime` may be the field itself; `tail` replaces what follows
    the device numbers."""
    fields = (
        name.ljust(100, b"\0"),
        b"%07o\0" % mode,
        b"%07o\0" % 0,
        b"%07o\0" % 0,
        size if isinstance(size, bytes) else b"%011o\0" % size,
        mtime if isinstance(mtime, bytes) else b"%011o\0" % mtime,
        b" " * 8,
        kind,
        link.ljust(100, b"\0"),
        magic.ljust(8, b"\0"),
        bytes(80),
        tail or prefix,
    )
    block = bytearray(b"".join(fields).ljust(BLOCK, b"\0"))
    total = sum(byte - 256 if signed and byte > 127 else byte for byte in block)
    block[148:156] = b"%06o\0 " % total
    return bytes(block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def file(name: bytes, data: bytes = b"data", **more: object) -> bytes:
    return header(name, size=len(data), **more) + padded(data)  # type: ignore[arg-type]


def directory(name: bytes, mode: int = 0o755) -> bytes:
    return header(name, b"5", mode=mode)


def symlink(name: bytes, target: bytes) -> bytes:
    return header(name, b"2", link=target, mode=0o777)


def hardlink(name: bytes, target: bytes) -> bytes:
    return header(name, b"1", link=target)


def gnu_long(kind: bytes, text: bytes) -> bytes:
    """The header of GNU tar that names what follows: L its name, K its target."""
    return header(b"././@LongLink", kind, size=len(text) + 1, magic=b"ustar  ") + padded(text + b"\0")


def pax(*records: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    data = b"".join(record(key, value) for key, value in records)
    return header(b"PaxHeaders/x", kind, size=len(data)) + padded(data)


def record(key: bytes, value: bytes) -> bytes:
    length = len(key) + len(value) + 3
    while len(str(length)) + len(key) + len(value) + 3 != length:
        length = len(str(length)) + len(key) + len(value) + 3
    return b"%d %s=%s\n" % (length, key, value)


def base256(value: int) -> bytes:
    """A number field of 12 bytes as GNU tar writes what octal digits cannot hold."""
    return bytes([0xFF if value < 0 else 0x80]) + value.to_bytes(11, "big", signed=True)


# -- sparse files

GIB = 1 << 30
SPARSE_SIZE = 1 << 40
SPARSE = [*((number * GIB, 512) for number in range(30)), (SPARSE_SIZE, 0)]
"""Parts of a sparse file that ends in a hole: more of them than one header of GNU tar has."""
SPARSE_DATA = b"".join(bytes([65 + number]) * 512 for number in range(30))


def sparse_gnu() -> bytes:
    pieces = [
        (base256(begin) if begin >= 8 * GIB else b"%011o\0" % begin) + b"%011o\0" % length for begin, length in SPARSE
    ]
    tail = bytes(41) + b"".join(pieces[:4]) + b"\1" + base256(SPARSE_SIZE)
    more = b"".join(pieces[4:25]) + b"\1" + bytes(7) + (b"".join(pieces[25:])).ljust(504, b"\0") + bytes(8)
    return header(b"sparse", b"S", size=len(SPARSE_DATA), magic=b"ustar  ", tail=tail) + more + SPARSE_DATA


def sparse_pax(form: bytes, *, told: bool = False) -> bytes:
    """`told`: size and name in the archive stand in records, as they do for 8 GiB and more, and for
    long names."""
    flat = [b"%d" % number for piece in SPARSE for number in piece]
    name, data = b"sparse", SPARSE_DATA
    if form == b"0.0":
        records = [(b"GNU.sparse.size", b"%d" % SPARSE_SIZE), (b"GNU.sparse.numblocks", b"31")]
        for begin, length in SPARSE:
            records += [(b"GNU.sparse.offset", b"%d" % begin), (b"GNU.sparse.numbytes", b"%d" % length)]
    elif form == b"0.1":
        records = [(b"GNU.sparse.size", b"%d" % SPARSE_SIZE), (b"GNU.sparse.numblocks", b"31")]
        records += [(b"GNU.sparse.name", b"sparse"), (b"GNU.sparse.map", b",".join(flat))]
        name = b"GNUSparseFile.1/sparse"
    else:
        records = [(b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0")]
        records += [(b"GNU.sparse.name", b"sparse"), (b"GNU.sparse.realsize", b"%d" % SPARSE_SIZE)]
        name = b"GNUSparseFile.1/sparse"
        data = padded(b"31\n" + b"".join(number + b"\n" for number in flat)) + data
    if told:
        records += [(b"size", b"%d" % len(data)), (b"path", name)]
    return pax(*records) + header(name, size=len(data)) + padded(data)


# -- archives that are taken

LONG = b"/".join([b"long" * 12] * 5)
ODD_NAMES = (
    b"caf\xe9",
    "déjà vu".encode(),
    b"new\nline",
    b"back\\slash",
    b"-dash",
    b" blank ",
    b"tab\t",
    b"*[?",
    b"\x01",
)

TAKEN: dict[str, bytes] = {
    "of 1979": file(b"a", magic=b"") + header(b"d/", b"\0", magic=b"", mode=0o755) + header(b"d/f", b"\0", magic=b"") + END,
    "a name in two parts": file(b"rest/name", prefix=b"the/first/part") + END,
    "long names of GNU": gnu_long(b"L", LONG) + file(LONG[:100]) + gnu_long(b"K", LONG) + symlink(b"s", LONG[:100]) + END,
    "long names of pax": pax((b"path", LONG)) + file(b"short") + pax((b"linkpath", LONG)) + symlink(b"s", b"short") + END,
    "a comment for all": pax((b"comment", b"0" * 40), kind=b"g") + file(b"a") + END,
    "names of any bytes": b"".join(file(name) for name in ODD_NAMES) + END,
    "names of any bytes in pax": b"".join(pax((b"path", name)) + file(b"x") for name in ODD_NAMES) + END,
    "numbers of base 256": header(b"a", size=base256(4), mtime=base256(TIME)) + padded(b"data") + END,
    "blanks about numbers": header(b"a", size=b"         4 \0", mtime=b"%11o " % TIME) + padded(b"data") + END,
    "a sum of signed bytes": file(b"caf\xe9", signed=True) + END,
    "a file that is a directory": header(b"d/", b"0", mode=0o755) + file(b"d/f") + END,
    "a contiguous file": header(b"a", b"7", size=4) + padded(b"data") + END,
    "an incremental archive": header(b"d/", b"D", size=4, mode=0o755, magic=b"ustar  ") + padded(b"Yf\0\0") + file(b"d/f") + END,
    "twice": file(b"a", b"first") + file(b"a", b"second") + END,
    "a link replaced": symlink(b"a", b"b") + file(b"a") + END,
    "a directory behind a link": directory(b"usr/") + symlink(b"lib", b"usr") + file(b"lib/x") + END,
    "hard links": file(b"a") + hardlink(b"b", b"a") + hardlink(b"c", b"./b") + hardlink(b"d", b"/a") + END,
    "a hard link to a link": symlink(b"a", b"nowhere") + hardlink(b"b", b"a") + symlink(b"c", b"/usr/bin") + hardlink(b"d", b"c") + END,
    "a hard link to itself": file(b"a") + hardlink(b"a", b"a") + END,
    "modes": file(b"0", mode=0) + file(b"4111", mode=0o111) + directory(b"d/", 0o311) + file(b"d/f", mode=0o200)
    + hardlink(b"l", b"0") + END,
    "sparse of GNU": sparse_gnu() + file(b"b") + END,
    "sparse of pax 0.0": sparse_pax(b"0.0") + file(b"b") + END,
    "sparse of pax 0.1": sparse_pax(b"0.1") + file(b"b") + END,
    "sparse of pax 1.0": sparse_pax(b"1.0") + file(b"b") + END,
    "sparse with a size in pax": sparse_pax(b"1.0", told=True) + file(b"b") + END,
    "one block of zeros": file(b"a") + bytes(BLOCK),
    "empty": END,
    "something behind": file(b"a") + END + b"signature" * 100,
    "a second archive behind": file(b"a") + END + file(b"b") + END,
}  # fmt: skip

WHOLE = b"".join(file(b"f%d" % number, b"%d" % number * 700) for number in range(8)) + END
HEADERS = [number * (BLOCK + 1024) for number in range(8)]


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def _cut(compressed: bytes) -> bytes:
    return compressed[:-3]


COMPRESSED = {
    "gzip": gzip.compress(WHOLE, mtime=0),
    "zstd": zstandard.ZstdCompressor().compress(WHOLE),
    "xz": lzma.compress(WHOLE),
    "bzip2": bz2.compress(WHOLE),
}
TAKEN |= {
    "gzip, not ended": gzip.compress(file(b"a"), mtime=0),
    "zstd of two frames": zstandard.ZstdCompressor().compress(WHOLE[:1000]) + b"\x50\x2a\x4d\x18\4\0\0\0skip"
    + zstandard.ZstdCompressor().compress(WHOLE[1000:]),
    "xz of two streams": lzma.compress(WHOLE[:1000]) + bytes(8) + lzma.compress(WHOLE[1000:]),
    "gzip of two members": gzip.compress(WHOLE[:1000]) + gzip.compress(WHOLE[1000:]) + bytes(700),
}  # fmt: skip

# -- archives that are refused

DAMAGED: dict[str, bytes] = {
    "not a tar": b"not a tar at all" * 100,
    "nothing": b"",
    **{f"bit in header {n}": flipped(WHOLE, HEADERS[n] + 3) for n in (0, 4, 7)},
    "sum": flipped(WHOLE, HEADERS[2] + 150),
    "zeros for a header": WHOLE[: HEADERS[3]] + bytes(BLOCK) + WHOLE[HEADERS[3] + BLOCK :],
    "cut between files": WHOLE[: HEADERS[5]],
    "cut in a header": WHOLE[: HEADERS[5] + 100],
    "cut in a file": WHOLE[: HEADERS[5] + 900],
    "cut in the padding": WHOLE[: HEADERS[5] + BLOCK + 701],
    "bytes lost": WHOLE[:700] + WHOLE[701:],
    "bytes gained": WHOLE[:700] + b"x" + WHOLE[700:],
    "a long name of nothing": file(b"a") + gnu_long(b"L", LONG) + END,
    "a long name cut": file(b"a") + gnu_long(b"L", LONG * 3)[: BLOCK + 200],
    "a pax header of nothing": file(b"a") + pax((b"path", LONG)) + END,
    "a pax header cut": file(b"a") + pax((b"path", LONG * 3))[: BLOCK + 200],
    "a record too long": header(b"x", b"x", size=10) + padded(b"99 path=a\n") + file(b"a") + END,
    "a size that is none": pax((b"size", b"4x")) + file(b"a") + END,
    "a size beyond all": header(b"a", size=base256(1 << 70)) + padded(b"data") + END,
    "a negative size": header(b"a", size=base256(-4)) + padded(b"data") + END,
    "a number that is none": header(b"a", size=b"0000000000z\0") + padded(b"data") + END,
    "a part of several volumes": header(b"first", b"V") + header(b"large", b"M", size=4) + padded(b"rest") + file(b"b") + END,
    "sparse cut": sparse_gnu()[: BLOCK + 300],
    "sparse data cut": sparse_pax(b"1.0")[:-700],
    "sparse parts beyond": sparse_pax(b"1.0").replace(b"%d\n512\n" % (29 * GIB), b"%d\n512\n" % (99999 * GIB)) + END,
    "sparse parts overlap": pax((b"GNU.sparse.size", b"4096"), (b"GNU.sparse.map", b"0,512,100,512")) + file(b"a", bytes(1024)) + END,
    "sparse parts missing": pax((b"GNU.sparse.size", b"4096"), (b"GNU.sparse.map", b"0,512")) + file(b"a", bytes(1536)) + END,
    **{f"{name} cut": _cut(data) for name, data in COMPRESSED.items()},
    **{f"{name} flipped": flipped(data, len(data) // 2) for name, data in COMPRESSED.items() if name != "zstd"},
    **{f"{name} with garbage": data + b"garbage behind" for name, data in COMPRESSED.items() if name != "bzip2"},
}  # fmt: skip

# -- images of several layers

LAYERS: dict[str, list[list[bytes]]] = {
    "behind a link": [[directory(b"usr/lib"), symlink(b"lib", b"usr/lib")], [file(b"lib/new")]],
    "behind an absolute link": [[directory(b"run"), symlink(b"var/run", b"/run")], [file(b"var/run/pid")]],
    "behind a link that climbs": [[directory(b"run"), symlink(b"a/b", b"../../../../../../run")], [file(b"a/b/x")]],
    "behind a link to nothing": [[symlink(b"lib", b"usr/lib")], [file(b"lib/a/new")]],
    "behind links of links": [[symlink(b"a", b"b/c"), symlink(b"b", b"d"), symlink(b"d/c", b"../e")], [file(b"a/x")]],
    "behind a link of its own layer": [[symlink(b"lib", b"usr"), file(b"lib/x"), symlink(b"r", b"/run"), file(b"r/x")]],
    "hidden behind a link": [[file(b"usr/old"), file(b"usr/kept"), symlink(b"lib", b"usr")], [file(b"lib/.wh.old")]],
    "all hidden behind a link": [[file(b"u/old"), symlink(b"l", b"u")], [file(b"l/new"), file(b"l/.wh..wh..opq")]],
    "a link that is hidden": [[file(b"u/old"), symlink(b"l", b"u")], [file(b".wh.l")]],
    "a directory for a link": [[file(b"u/old"), symlink(b"l", b"u")], [directory(b"l"), file(b"l/x")]],
    "a link for a directory": [[file(b"l/old"), file(b"u/f")], [symlink(b"l", b"u"), file(b"l/x")]],
    "hard links across layers": [[file(b"a")], [hardlink(b"b", b"a")]],
    "a hard link to a file behind a link": [[file(b"u/f"), symlink(b"l", b"u")], [hardlink(b"g", b"l/f")]],
    "a hard link behind a link": [[file(b"u/f"), symlink(b"l", b"u")], [hardlink(b"l/g", b"u/f")]],
    "a hard link to a lower link": [[symlink(b"a", b"/x/y")], [hardlink(b"b", b"a"), hardlink(b"c", b"b")]],
    "modes of several layers": [[file(b"a", mode=0), directory(b"d", 0o311), file(b"e", mode=0)], [file(b"a"), file(b".wh.e")]],
    "nothing": [[file(b"a")], []],
}  # fmt: skip

REFUSED_LAYERS: dict[str, list[list[bytes]]] = {
    "behind links in a circle": [[symlink(b"a", b"b"), symlink(b"b", b"a")], [file(b"a/x")]],
    "behind a link to a file": [[file(b"f"), symlink(b"a", b"f")], [file(b"a/x")]],
    "behind a file": [[file(b"f")], [file(b"f/x")]],
    "behind a link to the top, of its own": [[symlink(b"a", b"/"), file(b"a/x")]],
    "behind a link that climbs, of its own": [[symlink(b"a", b"../etc"), file(b"a/x")]],
    "a hard link to nothing behind a link": [[directory(b"u"), symlink(b"l", b"u")], [hardlink(b"g", b"l/f")]],
    "a hard link to a directory": [[directory(b"u")], [hardlink(b"g", b"u")]],
}  # fmt: skip


def together(cases: Iterable[tuple[str, list[list[bytes]]]]) -> list[bytes]:
    """The layers of one image that has each case below a directory of its own, named by its number.
    Links to / lead there too."""
    layers: list[bytes] = []
    for number, (_, case) in enumerate(cases):
        for position, entries in enumerate(case):
            while len(layers) <= position:
                layers.append(b"")
            for entry in entries:
                layers[position] += _below(b"%d/" % number, entry)
    return [layer + END for layer in layers]


def _below(place: bytes, entry: bytes) -> bytes:
    name, link, kind = entry[:100].rstrip(b"\0"), entry[157:257].rstrip(b"\0"), entry[156:157]
    if kind == b"1":
        link = place + link
    elif link.startswith(b"/"):
        link = b"/" + place.rstrip(b"/") + link
    size, mode = int(entry[124:135], 8), int(entry[100:107], 8)
    return header(place + name, kind, size=size, mode=mode, link=link) + entry[BLOCK:]
