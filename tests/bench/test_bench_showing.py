"""The benchmark of ways to show a package: every way that it knows is taken on a small tree, or
said to be refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.place import NoRoom
from bench.showing import WAYS, check_room

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.root
def test_every_way_is_taken_or_refused(tmp_path: Path) -> None:
    """Also where the path of TMPDIR is longer than that of a socket may be."""
    words = ["--tree", "generated", "--files", "60", "--size-mib", "2", "--repeat", "1", "--json"]
    place = tmp_path / ("long" * 20)
    place.mkdir()
    env = {**os.environ, "TMPDIR": str(place), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "bench.showing", *words]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = {row["how"]: row for row in json.loads(ended.stdout)["rows"]}
    assert set(rows) == set(WAYS)
    for way in ("erofs", "hardlink", "copy"):
        row = rows[way]
        assert row["refused"] == "" and row["shown_s"] > 0.0 and row["walk_s"] > 0.0
        assert row["entries"] == 60 + 3, "the files, two directories and the root"
    assert (rows["reflink"]["shown_s"] is None) == bool(rows["reflink"]["refused"]), "ext4 knows none"
    assert not any(place.iterdir())


def test_a_tree_too_large_for_the_memory_is_refused() -> None:
    with pytest.raises(NoRoom, match="choose a smaller tree"):
        check_room(1 << 50, 1000, ["btrfs"])
    assert check_room(1 << 30, 1000, ["here"]) > 3 << 30
