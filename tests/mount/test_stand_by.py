"""Supervisors that are begun before there is a view: one is used, or ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from lazy_marks import needs_events
from lazy_view_rig import LIMIT_S, contents, until

from p2pdist.model.bootstrap import Bootstrap, PackedImage
from p2pdist.model.device import DeviceLayout
from p2pdist.model.errors import Corrupt, P2PDistError
from p2pdist.model.tree import File, content_hash
from p2pdist.mount.erofs.writer import device_image
from p2pdist.mount.lazy.fill_method import StandBy
from p2pdist.mount.lazy.view import LazyPackage, arrangement_of, mount_lazy, stand_by_for, view_directory
from p2pdist.mount.supervisor.process import LOG, WAIT
from p2pdist.mount.supervisor.protocol import DEVICE, connect
from p2pdist.mount.views import unmount_view

pytestmark = needs_events


def processes(stand_by: StandBy) -> list[list[str]]:
    """The command lines of what stands by or supervises, without those that have ended."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if str(stand_by.directory) in words:
            found.append(words[:-1])
    return found


@pytest.fixture
def stand_by(tmp_path: Path) -> Iterator[StandBy]:
    (tmp_path / "work").mkdir()
    begun = stand_by_for(tmp_path / "work", LIMIT_S)
    assert begun.directory.parent == tmp_path / "work" and not begun.directory.exists()
    yield begun
    begun.close()
    begun.close()
    until(lambda: not processes(begun), "something stays")


@pytest.fixture
def package() -> LazyPackage:
    """By its bootstrap."""
    files = contents()
    entries = [File(name.encode(), 0o755, 0, len(files[name]), content_hash(files[name])) for name in sorted(files)]
    layout = DeviceLayout({entry.content: entry.size for entry in entries}, {})
    image = device_image(entries, layout)
    packed = PackedImage(zstandard.compress(image), len(image))
    stated = Bootstrap(("tree",), (packed,), layout.arrangement, layout.size, layout.bytes_content, b"")
    return LazyPackage((packed,), stated, LIMIT_S)


def test_what_stands_by_supervises_the_view(tmp_path: Path, stand_by: StandBy, package: LazyPackage) -> None:
    """Which has its directory, as a view by entries has."""
    target, work = tmp_path / "target", tmp_path / "work"
    mount_lazy(package, target, work=work, stand_by=stand_by)
    try:
        directory = view_directory(target, work)
        assert directory == stand_by.directory and arrangement_of(directory) == package.layout.arrangement
        assert {path.name for path in target.iterdir()} == contents().keys()
        assert all((target / name).stat().st_size == len(data) for name, data in contents().items())
        assert {words[-1] for words in processes(stand_by)} == {WAIT}
        stand_by.close()  # it supervises: nothing of it ends
        greeting = connect(directory)
        assert os.fstat(greeting.filler).st_ino == (directory / DEVICE).stat().st_ino
        os.close(greeting.filler)
        os.close(greeting.group)
        greeting.connection.close()
        assert (directory / LOG).exists()
    finally:
        unmount_view(target, work=work)


def test_what_stands_by_for_a_mount_that_fails_ends(tmp_path: Path, stand_by: StandBy, package: LazyPackage) -> None:
    """While images are written, when it may supervise already; or before it is told to begin."""
    work = tmp_path / "work"
    (image,) = package.layout.images if isinstance(package.layout, Bootstrap) else ()
    broken = replace(package, layers=(replace(image, frame=image.frame[:-9]),))
    with pytest.raises(Corrupt):
        mount_lazy(broken, tmp_path / "target", work=work, stand_by=stand_by)
    until(lambda: not processes(stand_by), "it stays")
    assert not any(path.is_dir() for path in work.iterdir()) and not os.path.ismount(tmp_path / "target")
    other = stand_by_for(work, LIMIT_S)
    (tmp_path / "file").touch()
    with pytest.raises(P2PDistError):
        mount_lazy(package, tmp_path / "file", work=work, stand_by=other)
    assert other.waits
    until(lambda: processes(other), "it is not seen")  # a program that has just begun has no words yet
    other.close()
    until(lambda: not processes(other), "it stays")


def test_what_stands_by_ends_with_who_began_it(stand_by: StandBy) -> None:
    """Its standard input ends then."""
    assert stand_by._process.stdin is not None
    stand_by._process.stdin.close()
    assert stand_by._process.wait(60) == 0
    assert not stand_by.directory.exists()
