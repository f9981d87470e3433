"""What killed processes left of trees that were shown, and what is in use. All of this needs
root."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from shown_trees import MTIME_NS, Store, expected, random_tree, walk

from p2pdist.model.errors import Conflict
from p2pdist.model.tree import Directory, Entry
from p2pdist.mount import kernel
from p2pdist.mount.records import records
from p2pdist.mount.views import clean_leftovers, mount_view, unmount_view

pytestmark = pytest.mark.root

MS_SHARED = 0x100000


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


@contextmanager
def another_namespace(propagation: str, *script: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a mount namespace of its own, once it has done the script there."""
    words = [
        "unshare",
        "--mount",
        f"--propagation={propagation}",
        "sh",
        "-ec",
        f"{'; '.join(script) or ':'}; echo; exec sleep 60",
    ]
    user = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        assert user.stdout is not None and user.stdout.readline() == b"\n"
        yield user
    finally:
        user.kill()
        user.communicate()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A directory whose mounts and unmounts other namespaces hear of, unless they want none."""
    place = tmp_path / "sha red"
    place.mkdir()
    kernel.mount(place, place, "", kernel.MS_BIND)
    kernel.mount("none", place, "", MS_SHARED)
    yield place
    kernel.unmount(place)


@pytest.mark.parametrize("propagation", ["private", "slave"])
def test_what_another_namespace_uses_of_a_view_stays(store: Store, shared: Path, work: Path, propagation: str) -> None:
    """What the store lets go would be lost there. A copy that nobody uses is nobody's concern: a
    namespace gets one of all that is mounted."""
    view = shared / "view"
    mount_view([store.layer("tree", [store.file(b"a", b"1")])], view, work=work)
    with another_namespace(propagation, f"cd '{view}'") as user:
        with pytest.raises(Conflict, match="in use") as caught:
            unmount_view(view, work=work)
        assert f"(pid {user.pid})" in str(caught.value.remedy)
    with another_namespace(propagation):
        unmount_view(view, work=work)
    assert not view.exists() and not list(work.iterdir())


def test_a_container_that_has_the_directory_above_a_view_need_not_use_the_view(
    store: Store, view: Path, work: Path, tmp_path: Path
) -> None:
    """As pods with a hostPath, and units whose directories are mounted at themselves. What they use
    of the view has another path there."""
    data = tmp_path / "data"
    data.mkdir()
    mount_view([store.layer("tree", [store.file(b"a", b"1")])], view, work=work)
    bind = f"mount --rbind '{view.parent}' {data}", f"mount --rbind '{view.parent}' '{view.parent}'"
    with another_namespace("private", *bind, f"cd {data / view.name}") as user:
        with pytest.raises(Conflict, match="in use") as caught:
            unmount_view(view, work=work)
        assert f"(pid {user.pid})" in str(caught.value.remedy)
    with another_namespace("private", *bind):
        unmount_view(view, work=work)
    assert not view.exists() and not list(work.iterdir())


@pytest.mark.parametrize("method", ["erofs", "copy"])
def test_a_view_that_is_gone_is_cleaned_though_a_container_has_its_directory(
    store: Store, work: Path, tmp_path: Path, method: str
) -> None:
    """After a restart of the machine containers may begin before the agent."""
    view, data = tmp_path / "view", tmp_path / "data"
    view.mkdir()
    data.mkdir()
    mount_view([store.layer("tree", [store.file(b"a", b"1")])], view, work=work, method=method)
    if method == "erofs":
        kernel.unmount(view)
    else:
        view.rename(tmp_path / "away")
        view.mkdir()
    with another_namespace("private", f"mount --bind '{view}' {data}"):
        assert [leftover.removed for leftover in clean_leftovers(work)] == [True]
    assert not list(work.iterdir())


def test_plain_files_are_in_use_where_they_are_bound(store: Store, view: Path, work: Path, tmp_path: Path) -> None:
    """Whatever they are on is mounted at its root."""
    data = tmp_path / "data"
    data.mkdir()
    mount_view([store.layer("tree", [store.file(b"a", b"1")])], view, work=work, method="copy")
    with another_namespace("private", f"mount --bind '{view}' {data}") as user:
        with pytest.raises(Conflict, match="in use") as caught:
            unmount_view(view, work=work)
        assert f"(pid {user.pid}) at {data}" in str(caught.value.remedy)
    unmount_view(view, work=work)
    assert not view.exists() and not list(work.iterdir())


@pytest.mark.parametrize("inside", ["", "/below"])
@pytest.mark.parametrize("method", ["erofs", "copy"])
def test_a_view_that_is_bound_elsewhere_is_in_use(
    store: Store, shared: Path, work: Path, tmp_path: Path, method: str, inside: str
) -> None:
    """As containers have it, and as it is seen at two paths of this namespace."""
    view, data = shared / "view", tmp_path / "data"
    data.mkdir()
    entries: list[Entry] = [store.file(b"a", b"1"), Directory(b"below", 0o755, MTIME_NS), store.file(b"below/b", b"2")]
    mount_view([store.layer("tree", entries)], view, work=work, method=method)
    with another_namespace("slave", f"mount --bind '{view}{inside}' {data}") as user:
        with pytest.raises(Conflict, match="in use") as caught:
            unmount_view(view, work=work)
        assert f"(pid {user.pid})" in str(caught.value.remedy)
    kernel.mount(f"{view}{inside}", data, "", kernel.MS_BIND)
    try:
        with pytest.raises(Conflict, match="in use") as caught:
            unmount_view(view, work=work)
        assert f"the mount at {data}." in str(caught.value.remedy)
        assert [path.name for path in data.iterdir()]
    finally:
        kernel.unmount(data)
    unmount_view(view, work=work)
    assert not view.exists() and not list(work.iterdir())
