"""What killed processes left of trees that were shown, and what is in use. All of this needs
root."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from shown_trees import Store, expected, random_tree, walk

from p2pdist.model.errors import Conflict
from p2pdist.mount import kernel
from p2pdist.mount.records import records
from p2pdist.mount.views import clean_leftovers, mount_view, unmount_view

pytestmark = pytest.mark.root


_KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from shown_trees import Store, random_tree
from p2pdist.mount import views
from p2pdist.mount.erofs import writer
from p2pdist.mount.files import tree as tree_files
place, moment = Path(sys.argv[2]), sys.argv[3]
kill = lambda *_, **_more: os.kill(os.getpid(), signal.SIGKILL)
store = Store(place / "store")
layers = [store.layer(str(number), random_tree(number, store)) for number in range(2)]
if moment == "image":
    writer._Writer._finish = kill
elif moment == "mounting":
    views.mount_layers.__globals__["merge"] = kill
elif moment == "writing":
    tree_files._Maker._new_file = kill
elif moment == "finishing":
    tree_files._set_attributes = kill
method = {"image": None, "mounting": None, "erofs": None, "hardlink": "hardlink"}.get(moment, "copy")
views.mount_view(layers, place / "view", work=place / "records", method=method, label="x")
kill()
"""


@pytest.mark.parametrize("moment", ["image", "mounting", "erofs", "writing", "finishing", "copy", "hardlink"])
def test_what_a_killed_process_left_is_known(store: Store, tmp_path: Path, work: Path, moment: str) -> None:
    """Whenever it happens, the next start finds it by its record, and removes what was not
    finished; the same package can be shown then."""
    command = [sys.executable, "-c", _KILLED, str(Path(__file__).parent), str(tmp_path), moment]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    mounts = [entry.point for entry in kernel.mounted() if tmp_path in entry.point.parents]
    assert len(mounts) == {"mounting": 2, "erofs": 3}.get(moment, 0)
    found = clean_leftovers(work)
    finished = moment in ("erofs", "copy", "hardlink")
    assert [(left.path, left.removed, left.label) for left in found] == (
        [(tmp_path / "view", not finished, "x")] if moment != "image" else []
    )
    if finished:
        unmount_view(tmp_path / "view", work=work)
    assert not [entry for entry in kernel.mounted() if tmp_path in entry.point.parents]
    assert {path.name for path in tmp_path.iterdir()} == {"records", "store"}
    assert not list(work.iterdir())
    trees = [random_tree(number, store) for number in range(2)]
    layers = [store.layer(str(number), entries) for number, entries in enumerate(trees)]
    mount_view(layers, tmp_path / "view", work=work)
    assert walk(tmp_path / "view") == expected(trees, store)
    unmount_view(tmp_path / "view", work=work)
    assert {path.name for path in store.path.iterdir()} == {"objects", "0.erofs", "1.erofs"}


@pytest.mark.parametrize("method", ["erofs", "copy"])
def test_what_is_in_use_stays(store: Store, view: Path, work: Path, method: str) -> None:
    """A program that outlives its agent keeps its files; force takes them out of sight."""
    mount_view([store.layer("tree", [store.file(b"a", b"1")])], view, work=work, method=method, label="job")
    user = subprocess.Popen(["sleep", "60"], cwd=view)
    try:
        with pytest.raises(Conflict, match="in use"):
            unmount_view(view, work=work)
        assert [left.removed for left in clean_leftovers(work)] == [False]
        assert [(left.label, left.method) for left in records(work)] == [("job", method)]
        assert (view / "a").read_bytes() == b"1"
        unmount_view(view, work=work, force=True)
        assert not view.exists()
    finally:
        user.kill()
        user.wait()
