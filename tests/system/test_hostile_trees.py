"""Whole processes: packages with trees that no packer makes. Their pieces verify; what they say
must not be done."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from site_rig import Site

sys.path.append(str(Path(__file__).parents[1] / "store"))

from store_tree_rig import Packed, Publisher, noise

from p2pdist.model.digest import digest_of
from p2pdist.model.manifest import (
    CATALOG_TYPE,
    CONFIG_TYPE,
    PACK_TYPE,
    TREE_TYPE,
    Config,
    Descriptor,
    Manifest,
    encode_config,
    encode_manifest,
)
from p2pdist.model.tree import DEPTH_MAX, WHOLE_MAX, Directory, Entry, File, Symlink, content_hash
from p2pdist.mount import kernel
from p2pdist.package.repository.contract import read_content

pytestmark = pytest.mark.root

BIG = noise(1, WHOLE_MAX + 1000)
SMALL = b"planted"
PACKED = {b"big": BIG, b"small": SMALL}


def publish(site: Site, packed: Packed) -> str:
    """Put a package into the origin as a push would; returns its reference."""
    blobs = site.layout / "blobs/sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def add(data: bytes) -> Path:
        (blobs / digest_of(data)[7:]).write_bytes(data)
        return blobs / digest_of(data)[7:]

    contents = {digest: read_content(add(packed.blobs[digest])) for digest in packed.blobs}
    for content in contents.values():
        add(content.pieces.encode())
    config = encode_config(Config())
    add(config)
    kinds = ((CATALOG_TYPE, packed.catalogs), (PACK_TYPE, packed.packs))
    body = encode_manifest(
        Manifest(
            Descriptor(CONFIG_TYPE, digest_of(config), len(config)),
            (contents[packed.root].descriptor(TREE_TYPE),),
            tuple(content.pieces_descriptor() for content in contents.values()),
            tuple(contents[digest].descriptor(kind) for kind, digests in kinds for digest in digests),
        )
    )
    add(body)
    return f"app@{digest_of(body)}"


def small(path: bytes, size: int = len(SMALL)) -> File:
    return File(path, 0o644, 0, size, content_hash(SMALL))


def cut_file() -> File:
    """The entry of a file that is cut, as it should be."""
    return next(entry for entry in Publisher().pack(PACKED).entries if isinstance(entry, File) and entry.chunks)


def hostile(outside: Path) -> dict[str, list[Entry]]:
    """Entries, by what is wrong with them, that would plant something in `outside` or cannot be."""
    away = os.fsencode(outside)
    big = cut_file()
    return {
        "leads up": [small(b"../outside/planted")],
        "leads up from within": [Directory(b"d", 0o755, 0), small(b"d/../../outside/planted")],
        "with the directory above": [
            Directory(b"..", 0o755, 0),
            Directory(b"../outside", 0o755, 0),
            small(b"../outside/planted"),
        ],
        "absolute": [small(away + b"/planted")],
        "twice": [small(b"x"), small(b"x")],
        "link and file": [Symlink(b"x", 0, away), small(b"x")],
        "link as directory": [Symlink(b"x", 0, away), small(b"x/planted")],
        "depth": [Directory(b"/".join([b"d"] * depth), 0o755, 0) for depth in range(1, DEPTH_MAX + 3)],
        "size over the limit": [small(b"x", 1 << 60)],
        "size in no catalog": [File(b"x", 0o644, 0, 1 << 46, bytes(32), bytes(32))],
        "size of something else": [File(b"x", 0o644, 0, big.size + 1, bytes(32), big.chunks)],
        "content of other chunks": [File(b"x", 0o644, 0, big.size, bytes(32), big.chunks)],
        "content in no pack": [File(b"x", 0o644, 0, 5, bytes(32))],
    }


@pytest.mark.slow
def test_what_no_packer_makes_is_not_exported(site: Site) -> None:
    """Nor what is in its chunks while it is not what the content's name says."""
    outside, target = site.directory / "outside", site.directory / "exported"
    outside.mkdir()
    (site.layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    cases = hostile(outside)
    for what in ("content of other chunks", "size of something else", "with the directory above", "link as directory"):
        reference = publish(site, Publisher().pack(PACKED, cases[what]))
        for kind in ("--dir", "--tar"):
            words = ("export", reference, kind, "-o", str(target), "--layout", str(site.layout))
            code, document, errors = site.command(*words)
            assert code == 6 and document["type"].endswith(":corrupt"), (what, kind, errors)
            assert not target.exists() and os.listdir(outside) == []


@pytest.mark.slow
def test_what_no_packer_makes_is_corrupt_and_touches_nothing(site: Site) -> None:
    """Exit code 6 from `pull` and from `mount`; no mount, no object of it, nothing beside the
    target; and the agent goes on."""
    (agent,) = site.agents(1)
    outside, views = site.directory / "outside", site.directory / "views"
    outside.mkdir()
    views.mkdir()
    where = ("--socket", str(agent.socket))
    for what, entries in hostile(outside).items():
        reference = publish(site, Publisher().pack(PACKED, entries))
        for words in (("pull", reference), ("mount", reference, str(views / "view"))):
            code, document, errors = site.command(*words, *where)
            assert code == 6 and document["type"].endswith(":corrupt"), (what, words, errors)
            assert "Traceback" not in errors
        assert os.listdir(views) == os.listdir(outside) == []
        assert not [entry for entry in kernel.mounted() if site.directory in entry.point.parents]
    honest = publish(site, Publisher().pack(PACKED))
    assert site.command("mount", honest, str(views / "view"), *where)[0] == 0
    assert (views / "view/big").read_bytes() == BIG
    assert site.command("umount", str(views / "view"), *where)[0] == 0
