"""Unpacking: the same view as an overlay gives, without any right, and no way out of the
directory."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pdist.model.errors import Conflict, Corrupt, DiskFull, P2PDistError
from p2pdist.mount import kernel
from p2pdist.mount.squashfs import inspect
from p2pdist.mount.views import mount_view, unmount_view
from p2pdist.removal import remove_tree

Layer = Callable[..., Path]
OVERLAY_OPAQUE = "trusted.overlay.opaque"


def tree(top: Path) -> dict[str, tuple[str, object]]:
    """What is below a directory: kind, mode and content by relative name."""
    found: dict[str, tuple[str, object]] = {}
    for directory, directories, files in os.walk(top):
        for name in directories + files:
            path = Path(directory, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                value: object = os.readlink(path)
            elif stat.S_ISDIR(mode):
                value = int(path.lstat().st_mtime)
            else:
                value = path.read_bytes()
            found[os.fsencode(path.relative_to(top)).decode("latin-1")] = (stat.filemode(mode), value)
    return found


def layers_that_differ(layer: Layer) -> list[Path]:
    """Every kind of replacement between two layers, and awkward names."""
    base = layer(
        "base",
        {
            "file": "1",
            "gone": "1",
            "dir/kept": "1",
            "dir/gone": "1",
            "file-dir": "1",
            "dir-file/x": "1",
            "closed/x": "1",
        },
        "link s 777 0 0 dir",
        "link-dir s 777 0 0 dir",
        "closed m 555 0 0",
    )
    app = layer(
        "app",
        {
            "file": "2",
            "dir/new": "2",
            "file-dir/y": "2",
            "dir-file": "2",
            "link-dir/z": "2",
            "closed/y": "2",
            "\udcff": "2",
        },
        "gone c 644 0 0 0 0",
        "dir/gone c 644 0 0 0 0",
        "link c 644 0 0 0 0",
        "whole c 644 0 0 0 0",
        "never-there c 644 0 0 0 0",
        "dir m 711 0 0",
    )
    return [base, app]


@pytest.mark.root
def test_unpacking_shows_what_an_overlay_shows(layer: Layer, tmp_path: Path, work: Path) -> None:
    """The kernel's overlay is the obvious implementation; modes, times, links and names agree."""
    images = layers_that_differ(layer)
    mounted = mount_view(images, tmp_path / "mounted", work=work, method="overlay").path
    unpacked = mount_view(images, tmp_path / "unpacked", work=work, method="unpack").path
    assert tree(unpacked) == tree(mounted)
    assert tree(unpacked)["dir/new"][1] == b"2"
    assert "gone" not in tree(unpacked)
    unmount_view(mounted, work=work)
    unmount_view(unpacked, work=work)
    assert not unpacked.exists()
    assert not list(work.iterdir())


@pytest.mark.root
def test_opaque_directories_hide_what_is_below(tmp_path: Path, layer: Layer, work: Path) -> None:
    """trusted.overlay.opaque, as the upper directory of an overlay has it, is honoured and not left
    behind."""
    source = tmp_path / "upper"
    (source / "dir").mkdir(parents=True)
    (source / "dir" / "new").write_text("2")
    try:
        os.setxattr(source / "dir", OVERLAY_OPAQUE, b"y")
    except OSError as error:
        pytest.skip(f"the temporary directory keeps no trusted attributes: {error}")
    app = tmp_path / "app.squashfs"
    subprocess.run(["mksquashfs", source, app, "-quiet", "-no-progress", "-xattrs"], check=True, capture_output=True)
    images = [layer("base", {"dir/old": "1"}), app]
    mounted = mount_view(images, tmp_path / "mounted", work=work, method="overlay").path
    unpacked = mount_view(images, tmp_path / "unpacked", work=work, method="unpack").path
    assert set(tree(unpacked)) == set(tree(mounted)) == {"dir", "dir/new"}
    assert os.listxattr(unpacked / "dir") == []
    unmount_view(mounted, work=work)
    unmount_view(unpacked, work=work)


def test_rights_are_not_unpacked(layer: Layer, tmp_path: Path, work: Path) -> None:
    """Set-uid and set-gid bits and device nodes are dropped."""
    image = layer("l", {"tool": "x", "kept": "x"}, "tool m 6755 0 0", "null c 666 0 0 1 3", "disk b 660 0 0 8 0")
    done = mount_view([image], tmp_path / "view", work=work, method="unpack")
    assert {name: entry[0] for name, entry in tree(done.path).items()} == {"tool": "-rwxr-xr-x", "kept": "-rw-r--r--"}
    assert done.why.startswith("unpack: as asked for")
    unmount_view(done.path, work=work)


def renamed(image: Path, old: bytes, new: bytes) -> Path:
    """The image with a name in its directory table replaced by another of the same length."""
    data = image.read_bytes()
    assert data.count(old) == 1
    image.chmod(0o644)
    image.write_bytes(data.replace(old, new))
    return image


@pytest.mark.parametrize("name", [b"../evil", b"/abcdef", b"a/../../"[:7]])
def test_names_that_lead_outside_are_refused(layer: Layer, tmp_path: Path, work: Path, name: bytes) -> None:
    """An image whose directory says "../evil" is corrupt, and nothing is written anywhere."""
    image = renamed(layer("l", {"aa_evil": "x"}, options=("-noI", "-noD", "-noF")), b"aa_evil", name)
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(Corrupt, match=r"l\.squashfs cannot be unpacked"):
        mount_view([image], tmp_path / "view", work=work, method="unpack")
    assert {path.name for path in tmp_path.iterdir()} == before
    assert not list(work.iterdir())


def test_a_link_below_does_not_lead_writes_outside(layer: Layer, tmp_path: Path, work: Path) -> None:
    """A lower layer's link to a directory outside is replaced by the upper layer's directory;
    neither its files nor its whiteouts reach through the link."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("x")
    base = layer("base", {}, f"trap s 777 0 0 {outside}")
    app = layer("app", {"trap/new": "2"}, "trap/victim c 644 0 0 0 0")
    done = mount_view([base, app], tmp_path / "view", work=work, method="unpack")
    assert [path.name for path in outside.iterdir()] == ["victim"]
    assert set(tree(done.path)) == {"trap", "trap/new"}
    unmount_view(done.path, work=work)


def test_a_listing_cannot_be_forged_by_a_name(layer: Layer, tmp_path: Path, work: Path) -> None:
    """A file whose name looks like a whiteout's line of the listing hides nothing."""
    forged = "x\ncrw-r--r-- 0/0                   0,  0 2026-01-01 00:00 squashfs-root"
    base, app = layer("base", {"kept": "1"}), layer("app", {f"{forged}/kept": "2"})
    done = mount_view([base, app], tmp_path / "view", work=work, method="unpack")
    assert (done.path / "kept").read_text() == "1"
    unmount_view(done.path, work=work)


@pytest.mark.root
def test_a_full_disk_is_said_before_anything_is_written(layer: Layer, tmp_path: Path, work: Path) -> None:
    """The listing tells how much is needed: an image may hold far more than its own size."""
    image = layer("big", {"zeros": "0" * 1_000_000})
    small = tmp_path / "small"
    small.mkdir()
    kernel.mount("small", small, "tmpfs", options="size=256k")
    try:
        with pytest.raises(DiskFull) as failure:
            mount_view([image], small / "view", work=work, method="unpack")
        assert failure.value.details["needed"] == 1_000_000
        assert failure.value.details["free"] <= 256 << 10
        assert not list(small.iterdir())
        assert not list(work.iterdir())
    finally:
        kernel.unmount(small)


def test_a_signal_from_outside_is_no_damage(layer: Layer, tmp_path: Path, work: Path) -> None:
    """The limit on file sizes, as the kernel's want of memory, says nothing of the image."""
    image = layer("big", {"data": "0" * 1_000_000})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(P2PDistError, match=r"signal 25 .* ended unsquashfs") as failure:
            mount_view([image], tmp_path / "view", work=work, method="unpack")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not isinstance(failure.value, Corrupt)
    assert "ulimit -f" in failure.value.remedy


def test_a_tree_in_use_is_not_removed_unasked(layer: Layer, tmp_path: Path, work: Path) -> None:
    """As with a mount: a process inside is named, and force removes the files all the same."""
    done = mount_view([layer("l", {"a": "1"})], tmp_path / "view", work=work, method="unpack")
    user = subprocess.Popen(["sleep", "60"], cwd=done.path)
    try:
        with pytest.raises(Conflict, match="in use"):
            unmount_view(done.path, work=work)
        assert (done.path / "a").exists()
        unmount_view(done.path, work=work, force=True)
        assert not done.path.exists()
    finally:
        user.kill()
        user.wait()


def test_removing_a_tree_stays_inside_it(tmp_path: Path) -> None:
    """Closed directories are opened, links are removed and not followed, and deep trees are no
    problem."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    top = tmp_path / "top"
    deep = top.joinpath(*["d"] * 1100)
    os.makedirs(top)
    for depth in range(1, 1101, 100):
        os.makedirs(top.joinpath(*["d"] * depth), exist_ok=True)
    os.makedirs(deep, exist_ok=True)
    (top / "link").symlink_to(outside)
    top.chmod(0o500)
    remove_tree(top)
    assert not top.exists()
    assert (outside / "kept").exists()
    remove_tree(top)


def test_the_superblock_tells_size_and_attributes(layer: Layer) -> None:
    """What is read from the superblock is what mksquashfs wrote."""
    image = inspect(layer("l", {"a": "1", "b": "2"}, options=("-no-xattrs",)))
    assert (image.inodes, image.has_xattrs) == (3, False)
