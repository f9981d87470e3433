"""Trees in the index: which contents each has, kept page by page, so that a version costs what
differs."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from store_tree_rig import Publisher, bring, pull

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import P2PDistError
from p2pdist.model.tree import content_hash
from p2pdist.store.index import Index, TreeRecord
from p2pdist.store.store import BlobStore

MANY = {b"d%02d/f%04d" % (number // 100, number): b"content %d" % number for number in range(4000)}
ONE, TWO, THREE = (TreeRecord(digest_of(b"%d" % number), (), (), True, 0.0) for number in range(3))
A, B, C, D = (content_hash(b"%d" % number) for number in range(4))
P, Q, R = (content_hash(b"page %d" % number) for number in range(3))


def stored(path: Path, what: str) -> int:
    with sqlite3.connect(path) as database:
        (found,) = database.execute(what).fetchone()
    database.close()
    return int(found)


def test_pages_go_with_the_last_tree_that_has_them(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    index = Index(path)
    index.add_tree(ONE, {P: [A, B], Q: [C]})
    index.add_tree(TWO, {P: [A, B], R: [D, C]})
    assert stored(path, "SELECT COUNT(*) FROM tree_pages") == 3
    assert index.tree_contents(ONE.root) == {A, B, C} and index.tree_contents(TWO.root) == {A, B, C, D}
    index.remove_tree(ONE.root)
    assert index.tree_contents(ONE.root) == set() and index.tree_contents(TWO.root) == {A, B, C, D}
    assert stored(path, "SELECT COUNT(*) FROM tree_pages") == 2
    index.remove_tree(TWO.root)
    assert stored(path, "SELECT COUNT(*) FROM tree_pages") == 0
    index.add_tree(ONE, {P: [A, B]})
    index.add_tree(ONE, {P: [A, B]})
    assert index.trees() == [ONE] and index.tree_contents(ONE.root) == {A, B}
    index.close()


def test_a_page_that_is_gone_is_no_tree_without_contents(tmp_path: Path) -> None:
    """Its objects would be taken for garbage."""
    index = Index(tmp_path / "index.sqlite")
    index.add_tree(ONE, {P: [A, B], Q: [C]})
    with sqlite3.connect(tmp_path / "index.sqlite") as database:
        database.execute("DELETE FROM tree_pages WHERE name=?", (Q,))
    database.close()
    with pytest.raises(P2PDistError, match="lacks the page"):
        index.tree_contents(ONE.root)
    index.close()


def test_trees_of_the_last_release_are_read(tmp_path: Path) -> None:
    """There the names of all contents stood in the row of the tree."""
    path = tmp_path / "index.sqlite"
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE trees (root TEXT PRIMARY KEY, catalogs TEXT NOT NULL, packs TEXT NOT NULL, complete INTEGER NOT NULL, "
            "last_used REAL NOT NULL, contents BLOB NOT NULL)"
        )
        database.execute("INSERT INTO trees VALUES (?,'','',1,0,?)", (ONE.root, A + B))
        database.execute("PRAGMA user_version=3")
    database.close()
    for _ in range(2):
        index = Index(path)
        assert index.trees() == [ONE] and index.tree_contents(ONE.root) == {A, B}
        index.close()
    index = Index(path)
    index.add_tree(TWO, {P: [B, C]})
    index.add_tree(ONE, {P: [B, C], Q: [A]})
    assert index.tree_contents(TWO.root) == {B, C} and index.tree_contents(ONE.root) == {A, B, C}
    index.remove_tree(ONE.root)
    assert index.tree_contents(TWO.root) == {B, C}
    index.close()


def test_a_version_costs_what_differs(store: BlobStore) -> None:
    """Of the second version one page is written; when the first one goes, what the second needs
    stays."""
    publisher = Publisher()
    first = publisher.pack(MANY)
    second = publisher.pack({**MANY, b"d07/f0700": b"edited"})
    index = store.root / "index.sqlite"
    pull(store, first)
    before = stored(index, "SELECT SUM(LENGTH(contents)) FROM tree_pages")
    bring(store, second, [*second.small, *second.packs])
    with store.trees.missing(second.root, second.catalogs) as missing:
        store.trees.fill(missing)
        store.trees.finish(missing)
    pages = stored(index, "SELECT COUNT(*) FROM tree_pages")
    assert 0 < stored(index, "SELECT SUM(LENGTH(contents)) FROM tree_pages") - before <= 32 * 2100
    store.trees.remove(first.root)
    assert stored(index, "SELECT COUNT(*) FROM tree_pages") == pages - 1
    assert set(store.objects.contents()) == second.contents.keys() and store.trees.complete(second.root)
