"""Trees that are mounted: EROFS images under an overlay. All of this needs root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shown_trees import Store

from p2pdist.model.errors import P2PDistError
from p2pdist.model.tree import Entry
from p2pdist.mount import kernel
from p2pdist.mount.layers import SquashfsLayer, TreeLayer
from p2pdist.mount.views import mount_view, unmount_view

pytestmark = pytest.mark.root


def test_a_mounted_view_is_read_only_and_grants_nothing(store: Store, view: Path, work: Path) -> None:
    """Also by its flags."""
    mount_view([store.layer("tree", [store.file(b"a", b"1")])], view, work=work)
    flags = os.statvfs(view).f_flag
    assert flags & os.ST_NOSUID and flags & os.ST_NODEV and flags & os.ST_RDONLY
    with pytest.raises(OSError, match="Read-only"):
        (view / "a").write_bytes(b"2")
    unmount_view(view, work=work)


def test_checked_objects_are_not_looked_at(store: Store, view: Path, work: Path) -> None:
    """With the image in place not even the entries are asked for."""
    layer = store.layer("tree", [store.file(b"a", b"1")])
    mount_view([layer], view, work=work)
    unmount_view(view, work=work)

    def never() -> list[Entry]:
        raise AssertionError

    mount_view([TreeLayer(never, layer.image, layer.objects)], view, work=work, checked=True)
    assert (view / "a").read_bytes() == b"1"
    unmount_view(view, work=work)


_FALLS_BACK = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from shown_trees import Store
from p2pdist.mount.views import mount_view, unmount_view
place = Path(sys.argv[2])
store = Store(place / "store")
done = mount_view([store.layer("tree", [store.file(b"a", b"1")])], place / "view", work=place / "records")
print(done.why)
unmount_view(place / "view", work=place / "records")
"""


def test_root_without_the_right_to_mount(tmp_path: Path, work: Path) -> None:
    """As in a container: the next best way is taken, and told."""
    command = [
        "setpriv",
        "--bounding-set=-sys_admin",
        sys.executable,
        "-c",
        _FALLS_BACK,
        str(Path(__file__).parent),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.partition(":")[0] in ("copy", "reflink")
    assert "mounting is not possible here (Operation not permitted)" in done.stdout
    assert not list(work.iterdir())


def test_an_image_where_the_kernel_cannot_mount_it(store: Store, tmp_path: Path, view: Path, work: Path) -> None:
    """On a tmpfs, and with kernels that are too old: plain files unless the mount is forced."""
    memory = tmp_path / "memory"
    memory.mkdir()
    kernel.mount("memory", memory, "tmpfs")
    try:
        tree = store.layer("tree", [store.file(b"a", b"1")])
        tree = TreeLayer(tree.entries, memory / "image", tree.objects)
        with pytest.raises(P2PDistError, match="memory/image: this kernel mounts no EROFS image"):
            mount_view([tree], view, work=work, method="erofs")
        done = mount_view([tree], view, work=work)
        assert done.method in ("copy", "reflink")
        assert "mounting is not possible here (this kernel mounts no EROFS image from a file there)" in done.why
        unmount_view(view, work=work)
    finally:
        kernel.unmount(memory)
    assert not list(work.iterdir())


def test_a_squashfs_cannot_show_any_object(store: Store, tmp_path: Path, view: Path, work: Path) -> None:
    """By the attributes with which trees are made: they would lead to what another package has in
    the store."""
    content = store.put(b"secret").hex()
    source = tmp_path / "source"
    source.mkdir()
    (source / "stolen").write_bytes(bytes(6))
    os.setxattr(source / "stolen", "trusted.overlay.metacopy", b"")
    os.setxattr(source / "stolen", "trusted.overlay.redirect", f"/{content[:2]}/{content[2:]}".encode())
    image = tmp_path / "evil.squashfs"
    subprocess.run(["mksquashfs", source, image, "-quiet", "-no-progress", "-xattrs"], check=True, capture_output=True)
    layers = [store.layer("base", [store.file(b"f", b"base")]), SquashfsLayer(image)]
    for method in ("erofs", "overlay"):
        with pytest.raises(P2PDistError, match="extended attributes"):
            mount_view(layers, view, work=work, method=method)
    done = mount_view(layers, view, work=work)
    assert (view / "stolen").read_bytes() == bytes(6) and "extended attributes" in done.why
    unmount_view(view, work=work)
    assert not list(work.iterdir())
