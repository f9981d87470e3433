"""Packs that are laid out by a trace: what a start reads lies first, in its order, and equal inputs
give equal packs."""

from __future__ import annotations

import os
import random
from pathlib import Path

from tree_rig import read_back

from p2pdist.model.manifest import parse_reference
from p2pdist.model.trace import Part
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.layers import PackOptions, pack_layers, plain_layer
from p2pdist.package.pack import Packed

ORDER = tuple(Part(path, 0, 99) for path in (b"d/zz", b"large", b"no/such", b"b", b"d/zz", b"a"))


def make_source(directory: Path) -> Path:
    source, drawn = directory / "source", random.Random(3)
    for name in ("a", "b", "c", "d/aa", "d/zz", "e"):
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(drawn.randbytes(5000))
    (source / "large").write_bytes(drawn.randbytes(5 << 20))
    (source / "same").write_bytes((source / "c").read_bytes())
    return source


async def packed(source: Path, layout: Path, order: tuple[Part, ...]) -> tuple[Packed, list[bytes]]:
    """The package, and its files in the order in which their first chunks lie in the packs."""
    opened = LocalLayout(layout)
    try:
        options = PackOptions(order=order)
        made, _ = await pack_layers([plain_layer(source, "tree", ())], parse_reference("app:v1"), opened, options)
        package = await read_back(opened, made)
        for path in source.rglob("*"):
            if path.is_file():
                assert package.content(os.fsencode(path.relative_to(source))) == path.read_bytes()
        chunks = [stored.chunk for catalog in package.catalogs for pack in catalog.packs for stored in pack.chunks()]
        lists = {entry.path: entry.content for entry in package.trees[-1] if getattr(entry, "size", 0)}
        paths = [next((path for path, content in lists.items() if content == chunk), b"large") for chunk in chunks]
        return made, list(dict.fromkeys(paths))
    finally:
        await opened.close()


async def test_what_a_trace_names_lies_first(tmp_path: Path) -> None:
    source = make_source(tmp_path)
    plain, as_listed = await packed(source, tmp_path / "plain", ())
    ordered, paths = await packed(source, tmp_path / "ordered", ORDER)
    assert as_listed == [b"a", b"b", b"c", b"d/aa", b"d/zz", b"e", b"large"]
    assert paths == [b"d/zz", b"large", b"b", b"a", b"c", b"d/aa", b"e"]
    assert ordered.layers == plain.layers, "the tree is the same"
    again, _ = await packed(source, tmp_path / "again", ORDER)
    assert again.digest == ordered.digest != plain.digest
    known, _ = await packed(source, tmp_path / "ordered", ORDER)
    assert (known.digest, known.bytes_written) == (ordered.digest, 0)


async def test_what_packs_have_stays_where_it_is(tmp_path: Path) -> None:
    source = make_source(tmp_path)
    plain, as_listed = await packed(source, tmp_path / "layout", ())
    ordered, paths = await packed(source, tmp_path / "layout", ORDER)
    assert paths == as_listed and ordered.parts == plain.parts
    for name in ("f", "g"):
        (source / name).write_bytes(os.urandom(3000))
    _, paths = await packed(source, tmp_path / "layout", (Part(b"g", 0, 1), Part(b"f", 0, 1)))
    assert paths.index(b"g") < paths.index(b"f")
