"""Showing packages with the kernel's own mounts: all of this needs root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shown_trees import Store

from p2pdist.model.errors import Conflict, Corrupt, DiskFull, NotFound, P2PDistError, UsageError
from p2pdist.mount import kernel
from p2pdist.mount.layers import TreeLayer
from p2pdist.mount.records import Process, records
from p2pdist.mount.views import clean_leftovers, mount_view, unmount_view

Layer = Callable[..., Path]
pytestmark = pytest.mark.root


def content(directory: Path) -> dict[str, str]:
    """Files below a directory, by relative name."""
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def test_the_upper_layer_wins_and_its_whiteouts_hide(layer: Layer, tmp_path: Path, work: Path) -> None:
    """A merged view of base and app, read-only, nosuid and nodev; afterwards nothing is left."""
    base = layer("base", {"a": "base", "b": "base", "lib/x": "base"})
    app = layer("app", {"a": "app", "lib/y": "app"}, "b c 644 0 0 0 0")
    done = mount_view([base, app], tmp_path / "view", work=work)
    assert done.method == "overlay"
    assert "2 layers" in done.why
    assert content(done.path) == {"a": "app", "lib/x": "base", "lib/y": "app"}
    flags = os.statvfs(done.path).f_flag
    assert flags & os.ST_NOSUID and flags & os.ST_NODEV and flags & os.ST_RDONLY
    with pytest.raises(OSError, match="Read-only"):
        (done.path / "new").write_text("x")
    unmount_view(tmp_path / "view", work=work)
    assert not (tmp_path / "view").exists()
    assert not list(work.iterdir())


def test_one_layer_is_mounted_straight(layer: Layer, tmp_path: Path, work: Path) -> None:
    """No overlay is needed for one layer, and an existing target directory is kept afterwards."""
    target = tmp_path / "view"
    target.mkdir()
    done = mount_view([layer("only", {"a": "1"})], target, work=work)
    assert done.method == "squashfs"
    assert content(target) == {"a": "1"}
    unmount_view(target, work=work)
    assert target.is_dir() and not list(target.iterdir())


def test_sixty_layers(layer: Layer, tmp_path: Path, work: Path) -> None:
    """Many layers fit into the one page of mount options, also below a directory with a long and
    awkward name."""
    images = [layer(f"l{number}", {f"f{number}": str(number), "last": str(number)}) for number in range(60)]
    deep = work / ("a,b:c\\d " * 25)
    deep.mkdir()
    done = mount_view(images, tmp_path / "view", work=deep)
    found = content(done.path)
    assert len(found) == 61
    assert found["last"] == "59"
    unmount_view(done.path, work=deep)


def test_a_full_number_of_layers_and_no_more(layer: Layer, tmp_path: Path, work: Path) -> None:
    """128 layers are shown; none and 129 are refused."""
    image = layer("l", {"f": "1"})
    done = mount_view([image] * 128, tmp_path / "view", work=work)
    assert content(done.path) == {"f": "1"}
    unmount_view(done.path, work=work)
    for count in (0, 129):
        with pytest.raises(UsageError, match=f"{count} layers"):
            mount_view([image] * count, tmp_path / "view", work=work)


@pytest.mark.parametrize("count", [1, 2])
def test_a_writable_view_keeps_layers_as_they_are(layer: Layer, tmp_path: Path, work: Path, count: int) -> None:
    """Writes go to the upper directory and are gone with the mount."""
    images = [layer("base", {"a": "base"}), layer("app", {"b": "app"})][:count]
    before = [image.read_bytes() for image in images]
    done = mount_view(images, tmp_path / "view", work=work, writable=True)
    (done.path / "a").write_text("changed")
    (done.path / "new").write_text("x")
    assert (done.path / "a").read_text() == "changed"
    unmount_view(done.path, work=work)
    assert [image.read_bytes() for image in images] == before
    assert not list(work.iterdir())


@pytest.mark.parametrize("name", [b"two words", b"a,b:c\\d", b"line\nbreak", b"\xff\xfe", "été".encode(), b"#$%&'\""])
def test_targets_with_awkward_names(layer: Layer, tmp_path: Path, work: Path, name: bytes) -> None:
    """Any name that a directory can have can be shown at, and recorded."""
    target = tmp_path / os.fsdecode(name)
    images = [layer("base", {"a": "1"}), layer("app", {"b": "2"})]
    mount_view(images, target, work=work)
    assert content(target) == {"a": "1", "b": "2"}
    unmount_view(target, work=work)
    assert not os.path.lexists(target)


@pytest.mark.parametrize("method", ["overlay", "unpack"])
@pytest.mark.parametrize("damage", ["garbage", "truncated", "tables", "empty"])
def test_what_is_no_squashfs_is_corrupt(layer: Layer, tmp_path: Path, work: Path, damage: str, method: str) -> None:
    """A damaged layer above a good one is named, and nothing stays mounted, recorded or created."""
    good, bad = layer("good", {"a": "1"}), layer("bad", {"b": "2" * 100000})
    data = bad.read_bytes()
    changed = {
        "garbage": os.urandom(9000),
        "truncated": data[:200],
        "tables": data[:96] + bytes(len(data) - 96),
        "empty": b"",
    }[damage]
    bad.chmod(0o644)
    bad.write_bytes(changed)
    with pytest.raises(Corrupt, match=r"bad\.squashfs"):
        mount_view([good, bad], tmp_path / "view", work=work, method=method)
    # Those of this test alone: other tests mount at the same time.
    assert not [entry for entry in kernel.mounted() if tmp_path in entry.point.parents]
    assert not (tmp_path / "view").exists()
    assert not list(work.iterdir())


def test_a_missing_image_and_bad_targets_are_refused(layer: Layer, tmp_path: Path, work: Path) -> None:
    """Each with its own failure, before anything is done."""
    image = layer("l", {"a": "1"})
    with pytest.raises(NotFound, match="layer image"):
        mount_view([tmp_path / "none"], tmp_path / "view", work=work)
    with pytest.raises(NotFound, match="does not exist"):
        mount_view([image], tmp_path / "none" / "view", work=work)
    with pytest.raises(Conflict, match="not an empty directory"):
        mount_view([image], tmp_path, work=work)
    with pytest.raises(Conflict, match="not a directory"):
        mount_view([image], image, work=work)
    (tmp_path / "loop").symlink_to("loop")
    for target, why in ((tmp_path / "loop", "too many symbolic links"), (tmp_path / ("x" * 300), "too long")):
        with pytest.raises(Conflict, match=why):
            mount_view([image], target, work=work)
    with pytest.raises(UsageError, match="no way"):
        mount_view([image], tmp_path / "view", work=work, method="magic")
    with pytest.raises(NotFound, match="no package is shown"):
        unmount_view(tmp_path / "view", work=work)
    assert not list(work.iterdir())


def test_a_target_is_used_once(layer: Layer, tmp_path: Path, work: Path) -> None:
    """A second package does not cover the first, not even an empty one."""
    image = layer("l", {})
    mount_view([image], tmp_path / "view", work=work)
    with pytest.raises(Conflict):
        mount_view([image], tmp_path / "view", work=work)
    unmount_view(tmp_path / "view", work=work)


def test_a_busy_mount_names_its_users(layer: Layer, tmp_path: Path, work: Path) -> None:
    """Unmounting what is in use is a conflict that names the process; by force it is out of sight
    at once and its user goes on."""
    images = [layer("base", {"a": "1"}), layer("app", {"b": "2"})]
    done = mount_view(images, tmp_path / "view", work=work)
    user = subprocess.Popen(["sleep", "60"], cwd=done.path)
    try:
        with pytest.raises(Conflict, match="in use") as failure:
            unmount_view(done.path, work=work)
        assert f"sleep (pid {user.pid})" in failure.value.remedy
        assert content(done.path) == {"a": "1", "b": "2"}
        unmount_view(done.path, work=work, force=True)
        assert not done.path.exists()
        assert Path(f"/proc/{user.pid}/cwd/a").read_text() == "1"
    finally:
        user.kill()
        user.wait()


_KILLED = """
import os, signal, sys
from pathlib import Path
from p2pdist.mount import views
from p2pdist.mount.files import unsquashfs
images = [Path(name) for name in sys.argv[4:]]
if sys.argv[3] == "half":
    unsquashfs._merge = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
views.mount_view(images, Path(sys.argv[1]), work=Path(sys.argv[2]), method=None if sys.argv[3] == "overlay" else "unpack", label="x")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("method", ["overlay", "unpack", "half"])
@pytest.mark.parametrize("existing", [True, False])
def test_what_a_killed_process_left_is_known(
    layer: Layer, tmp_path: Path, work: Path, method: str, existing: bool
) -> None:
    """After kill -9 the next start finds the mount by its record, keeps it and can remove it; what
    was half unpacked it removes."""
    images = [layer("base", {"a": "1"}), layer("app", {"b": "2"})]
    target = tmp_path / "view"
    if existing:
        target.mkdir()
    killed = subprocess.run([sys.executable, "-c", _KILLED, target, work, method, *images])
    assert killed.returncode == -signal.SIGKILL
    assert any(entry.point == target for entry in kernel.mounted()) == (method == "overlay")
    found = clean_leftovers(work)
    assert [(left.path, left.removed, left.label) for left in found] == [(target, method == "half", "x")]
    if method != "half":
        assert content(target) == {"a": "1", "b": "2"}
        unmount_view(target, work=work)
    assert target.exists() == existing
    assert not existing or not list(target.iterdir())
    assert not list(work.iterdir())
    assert {path.name for path in tmp_path.iterdir()} <= {"view", "records", "sources", "base.squashfs", "app.squashfs"}
    assert clean_leftovers(work) == []


def test_leftovers_in_use_stay_and_can_be_unshown(layer: Layer, tmp_path: Path, work: Path) -> None:
    """A program that outlives its agent and the process for which it was started keeps its view;
    the mount is still known."""
    target = tmp_path / "view"
    mount_view([layer("base", {"a": "1"})], target, work=work, label="job", owner=Process(2**22 + 1))
    with (target / "a").open() as file:
        found = clean_leftovers(work)
        assert [left.removed for left in found] == [False]
        assert "in use" in found[0].note
        assert [left.label for left in records(work)] == ["job"]
        assert file.read() == "1"
    assert clean_leftovers(work)[0].removed


@pytest.mark.parametrize("count", [1, 2])
def test_a_view_that_was_moved_is_not_forgotten(layer: Layer, tmp_path: Path, work: Path, count: int) -> None:
    """The owner of a directory above it may rename that."""
    images = [layer(f"l{number}", {"a": "1"}) for number in range(count)]
    (tmp_path / "old").mkdir()
    mount_view(images, tmp_path / "other", work=work)
    mount_view(images, tmp_path / "old/view", work=work)
    (tmp_path / "old").rename(tmp_path / "new")
    for force in (False, True):
        with pytest.raises(Conflict, match="new/view"):
            unmount_view(tmp_path / "old/view", work=work, force=force)
    assert [left.removed for left in clean_leftovers(work)] == [False, False]
    assert content(tmp_path / "new/view") == {"a": "1"}
    (tmp_path / "new").rename(tmp_path / "old")
    unmount_view(tmp_path / "old/view", work=work)
    unmount_view(tmp_path / "other", work=work)
    assert not list(work.iterdir())


def test_mounts_of_others_are_never_touched(layer: Layer, tmp_path: Path, work: Path) -> None:
    """Where something else is mounted over a recorded target, or the record is all there is, only
    the record goes."""
    image, target = layer("base", {"a": "1"}), tmp_path / "view"
    mount_view([image], target, work=work)
    kernel.unmount(target)
    kernel.mount("other", target, "tmpfs")
    try:
        (target / "precious").write_text("x")
        (work / "notes.json").write_text("{}")
        assert clean_leftovers(work)[0].removed
        assert content(target) == {"precious": "x"}
        assert [path.name for path in work.iterdir()] == ["notes.json"]
    finally:
        kernel.unmount(target)


@pytest.fixture
def over(tmp_path: Path) -> Iterator[Path]:
    """A directory on an overlay, as the store of an agent in a container without a volume."""
    memory, merged = tmp_path / "memory", tmp_path / "merged"
    memory.mkdir()
    merged.mkdir()
    kernel.mount("memory", memory, "tmpfs")
    for name in ("lower", "upper", "work"):
        (memory / name).mkdir()
    kernel.mount("o", merged, "overlay", 0, f"lowerdir={memory}/lower,upperdir={memory}/upper,workdir={memory}/work")
    yield merged
    kernel.unmount(merged)
    kernel.unmount(memory)


@pytest.mark.parametrize("count", [1, 2])
def test_where_an_overlay_cannot_keep_what_is_written_files_are_unpacked(layer: Layer, over: Path, count: int) -> None:
    """And it is said why; what is only read is mounted all the same. The mount point may be
    anywhere."""
    images = [layer("base", {"a": "base"}), layer("app", {"b": "app"})][:count]
    work = over / "records"
    work.mkdir()
    done = mount_view(images, over / "view", work=work, writable=True)
    assert done.method == "unpack"
    assert "an overlay cannot keep there what is written: Invalid argument" in done.why
    (done.path / "a").write_text("changed")
    (done.path / "new").write_text("x")
    unmount_view(done.path, work=work)
    assert mount_view(images, over / "view", work=work).method == ("squashfs" if count == 1 else "overlay")
    assert (over / "view" / "a").read_text() == "base"
    unmount_view(over / "view", work=work)
    with pytest.raises(P2PDistError, match="cannot keep there") as refused:
        mount_view(images, over / "view", work=work, writable=True, method="overlay")
    assert "--store" in refused.value.remedy
    assert not list(work.iterdir()) and not (over / "view").exists()


def test_a_tree_that_is_written_to_is_copied_on_an_overlay(store: Store, over: Path) -> None:
    """No EROFS image is mounted from there."""
    work, entry = over / "records", store.file(b"a", b"1")
    work.mkdir()
    tree = TreeLayer(lambda: [entry], over / "image", store.layer("tree", [entry]).objects)
    done = mount_view([tree], over / "view", work=work, writable=True)
    assert done.method in ("copy", "reflink")
    assert "mounting is not possible here" in done.why
    unmount_view(done.path, work=work)


_WITHOUT_LOOPS = """
import sys
from pathlib import Path
from p2pdist.mount.views import mount_view, unmount_view
done = mount_view([Path(sys.argv[1])], Path(sys.argv[2]), work=Path(sys.argv[3]))
print(done.why)
unmount_view(done.path, work=Path(sys.argv[3]))
"""


def test_without_loop_devices_files_are_unpacked(layer: Layer, tmp_path: Path, work: Path) -> None:
    """In a container, or where all are in use: the reason names them."""
    words = [sys.executable, "-c", _WITHOUT_LOOPS, layer("base", {"a": "1"}), tmp_path / "view", work]
    hide = 'mount --bind /dev/null /dev/loop-control && exec "$@"'
    done = subprocess.run(["unshare", "--mount", "sh", "-c", hide, "sh", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("unpack: mounting is not possible here (no loop device can be had: ")


def test_on_a_tmpfs_a_view_can_be_written_to(layer: Layer, tmp_path: Path) -> None:
    """A store in memory."""
    memory = tmp_path / "memory"
    memory.mkdir()
    kernel.mount("memory", memory, "tmpfs")
    try:
        (memory / "records").mkdir()
        done = mount_view([layer("base", {"a": "1"})], memory / "view", work=memory / "records", writable=True)
        assert done.method == "overlay"
        (done.path / "a").write_text("2")
        unmount_view(done.path, work=memory / "records")
    finally:
        kernel.unmount(memory)


@pytest.mark.parametrize("forgotten", ["by umount", "by the next agent"])
def test_what_has_the_place_of_plain_files_since_is_not_removed(
    layer: Layer, tmp_path: Path, work: Path, forgotten: str
) -> None:
    """Somebody removed them by hand and made another directory there: the file system gives it the
    number of the old one."""
    image, disk = tmp_path / "disk.image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    disk.mkdir()
    subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    owner = Process(2**22 + 1, 1) if forgotten == "by the next agent" else None  # which has ended
    target = disk / "view"
    try:
        mount_view([layer("base", {"a": "base"})], target, work=work, method="unpack", owner=owner)
        number = target.lstat().st_ino
        shutil.rmtree(target)
        target.mkdir()
        for spare in range(1000):
            if target.lstat().st_ino == number:
                break
            target.rename(disk / f"spare{spare}")
            target.mkdir()
        assert target.lstat().st_ino == number
        (target / "mine").write_text("mine")
        if owner is None:
            unmount_view(target, work=work)
        else:
            assert clean_leftovers(work)[0].removed
        assert content(target) == {"mine": "mine"} and not list(work.iterdir())
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("born", ["0", "", "\0" * 19, "now unknown"])
def test_plain_files_are_known_where_the_time_of_their_birth_is_not(
    layer: Layer, tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch, born: str
) -> None:
    """A file system says it since the kernel is a newer one, as NFS, or no longer; or the machine
    was lost while it was written."""
    done = mount_view([layer("base", {"a": "base"})], tmp_path / "view", work=work, method="unpack")
    (record,) = records(work)
    if born == "now unknown":
        monkeypatch.setattr(kernel, "born_ns", lambda path: 0)
    else:
        assert int((record.directory(work) / "born").read_text()) > 0
        (record.directory(work) / "born").write_text(born)
    assert not clean_leftovers(work)[0].removed and content(done.path) == {"a": "base"}
    unmount_view(done.path, work=work)
    assert not done.path.exists() and not list(work.iterdir())


@pytest.mark.parametrize("short_of", ["space", "inodes", "writing"])
def test_a_view_for_which_the_disk_has_no_room_says_so(layer: Layer, tmp_path: Path, short_of: str) -> None:
    """Where its record cannot be written another directory helps nothing; nothing is left of it,
    and it can be shown once there is room."""
    memory, target, image = tmp_path / "memory", tmp_path / "view", layer("base", {"a": "1"})
    memory.mkdir()
    kernel.mount("memory", memory, "tmpfs", 0, "size=256k,nr_inodes=100")
    work, filler = memory / "records", memory / "filler"
    work.mkdir()
    try:
        if short_of == "space":
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, os.statvfs(memory).f_bavail * 4096)
        elif short_of == "inodes":
            for number in range(os.statvfs(memory).f_favail):
                filler.with_name(f"filler{number}").touch()
        else:
            subprocess.run(["mount", "-o", "remount,ro", memory], check=True)
        with pytest.raises(P2PDistError) as refused:
            mount_view([image], target, work=work)
        error = refused.value
        assert isinstance(error, DiskFull) == (short_of != "writing"), error
        assert error.details.get("short_of", "space") == short_of or "mount it writable" in error.remedy
        assert not list(work.iterdir()) and not target.exists()
    finally:
        kernel.unmount(memory, lazily=True)


@pytest.mark.parametrize("method", ["overlay", "unpack"])
def test_a_directory_on_a_disk_that_is_read_only_is_to_be_another_one(
    layer: Layer, tmp_path: Path, work: Path, method: str
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    kernel.mount("memory", memory, "tmpfs", kernel.MS_RDONLY)
    try:
        with pytest.raises(P2PDistError, match="ead-only") as refused:
            mount_view([layer("base", {"a": "1"})], memory / "view", work=work, method=method)
        assert "Name another directory" in refused.value.remedy
    finally:
        kernel.unmount(memory)


@pytest.mark.parametrize("method", ["overlay", "unpack"])
def test_what_is_mounted_below_a_view_keeps_it(layer: Layer, tmp_path: Path, work: Path, method: str) -> None:
    """Whole: plain files are not removed one by one until the mount is in the way."""
    images = [layer("base", {"a": "1", "sub/b": "2", "z/c": "3", "hollow": None}), layer("app", {"d": "4"})]
    view, below, tool = tmp_path / "view", tmp_path / "view/hollow", "umount"
    mount_view(images, view, work=work, method=method)
    if method == "unpack":
        mount_view([layer("other", {"e": "5"})], below, work=work)
        tool = "p2pdist umount"
    else:
        kernel.mount("t", below, "tmpfs")
    before = content(view)
    for force in (False, True) if method == "unpack" else (False,):
        with pytest.raises(Conflict, match=f"{below} is mounted below") as refused:
            unmount_view(view, work=work, force=force)
        assert refused.value.remedy.endswith(f" {tool} {below}")
        assert content(view) == before
    unmount_view(below, work=work) if method == "unpack" else kernel.unmount(below)
    unmount_view(view, work=work)
    assert not view.exists()


def test_the_root_of_a_writable_view_is_open_whatever_the_umask(layer: Layer, tmp_path: Path, work: Path) -> None:
    before = os.umask(0o077)
    try:
        mount_view([layer("base", {"a": "1"})], tmp_path / "view", work=work, writable=True)
    finally:
        os.umask(before)
    assert (tmp_path / "view").stat().st_mode & 0o7777 == 0o755
    unmount_view(tmp_path / "view", work=work)
