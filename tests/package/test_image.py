"""A directory as a squashfs image: the same tree gives the same bytes, and what cannot go in is
said."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from p2pdist.model.errors import DiskFull, NotFound, P2PDistError, UsageError, printable
from p2pdist.package.image.preflight import preflight
from p2pdist.package.image.squashfs import build_image
from p2pdist.package.source.scan import Scan, scan_tree

TIME = 1_600_000_000


def scan(source: Path, **chosen: Any) -> Scan:
    return preflight(scan_tree(source, **chosen), times_kept=True)


def fill(root: Path, *, backwards: bool = False, links: bool = False) -> None:
    """The same tree, made in different ways: entries created in another order, equal files as hard
    links of one another."""
    root.mkdir(parents=True)
    (root / "empty").mkdir(mode=0o750)
    (root / "sub").mkdir()
    names = [f"file{number:03}" for number in range(300)]
    for name in reversed(names) if backwards else names:
        path = root / "sub" / name
        path.write_bytes(name.encode() * (int(name[4:]) * 37))
        path.chmod(0o755 if name.endswith("7") else 0o644)
    (root / "large").write_bytes(bytes(range(256)) * 8192)
    if links:
        os.link(root / "large", root / "twin")
    else:
        shutil.copyfile(root / "large", root / "twin")
    (root / "link").symlink_to("../outside")
    for directory, _, files in os.walk(root, topdown=False):
        for name in files:
            os.utime(Path(directory) / name, (TIME, TIME + name.startswith("file")), follow_symlinks=False)
        os.utime(directory, (TIME, TIME))


async def digest(source: Path, output: Path, **more: int | None) -> str:
    await build_image(source, output, **more)  # type: ignore[arg-type]
    found = hashlib.sha256(output.read_bytes()).hexdigest()
    output.unlink()
    return found


async def test_one_tree_one_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Path, creation order, hard links, processors, time zone, umask, SOURCE_DATE_EPOCH and the
    source's own mode leave no mark."""
    fill(tmp_path / "a")
    expected = await digest(tmp_path / "a", tmp_path / "image")
    assert await digest(tmp_path / "a", tmp_path / "image", processors=1) == expected
    fill(tmp_path / "some/other place", backwards=True, links=True)
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1234567890")
    (tmp_path / "some/other place").chmod(0o700)
    os.utime(tmp_path / "some/other place", (5, 5))
    old = os.umask(0o077)
    try:
        assert await digest(tmp_path / "some/other place", tmp_path / "image") == expected
    finally:
        os.umask(old)


@pytest.mark.root
async def test_another_user_packs_the_same(tmp_path: Path) -> None:
    """The packer's user and the files' owner leave no mark."""
    temporary = Path(tempfile.gettempdir())
    above = (*Path(sys.executable).parents, temporary, *temporary.parents)
    if closed := [path for path in above if not path.stat().st_mode & 0o001]:
        pytest.skip(f"another user cannot reach what is below {closed[-1]}")
    fill(tmp_path / "a")
    expected = await digest(tmp_path / "a", tmp_path / "image")
    for directory, _, files in os.walk(tmp_path / "a"):
        os.chown(directory, 65534, 65534)
        for name in files:
            os.chown(Path(directory) / name, 1234, 65534, follow_symlinks=False)
    (tmp_path / "out").mkdir(mode=0o777)
    (tmp_path / "out").chmod(0o777)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_mode & 0o055 != 0o055 and temporary in parent.parents:
            parent.chmod(parent.stat().st_mode | 0o055)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # the modules are loaded, so the new user needs no access to the installation
        os.close(reader)
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            asyncio.run(build_image(tmp_path / "a", tmp_path / "out/image"))
            code = 0
        except BaseException as error:
            os.write(writer, repr(error).encode()[:4000])
        finally:
            os._exit(code)
    os.close(writer)
    said = os.read(reader, 4000)
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    assert (status, said) == (0, b"")
    assert hashlib.sha256((tmp_path / "out/image").read_bytes()).hexdigest() == expected


async def test_contents_modes_and_times_make_the_digest(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    seen = {await digest(tmp_path / "a", tmp_path / "image")}
    (tmp_path / "a/sub/file001").chmod(0o600)
    seen.add(await digest(tmp_path / "a", tmp_path / "image"))
    os.utime(tmp_path / "a/sub/file002", (1, 1))
    seen.add(await digest(tmp_path / "a", tmp_path / "image"))
    (tmp_path / "a/sub/file003").write_bytes(b"x")
    seen.add(await digest(tmp_path / "a", tmp_path / "image"))
    assert len(seen) == 4


async def test_modification_times_are_kept_or_set(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    await build_image(tmp_path / "a", tmp_path / "image")
    assert unpack(tmp_path / "image", tmp_path / "kept").joinpath("large").stat().st_mtime == TIME
    await build_image(tmp_path / "a", tmp_path / "image2", mtime=1000)
    out = unpack(tmp_path / "image2", tmp_path / "set")
    assert {path.lstat().st_mtime for path in out.rglob("*") if not path.is_symlink()} == {1000}


def unpack(image: Path, target: Path) -> Path:
    subprocess.run(["unsquashfs", "-q", "-n", "-d", target, image], check=True, capture_output=True)
    return target


async def test_what_is_packed_comes_out_again(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    odd = os.fsencode(tmp_path / "a") + b"/caf\xe9 \xff\n'\"\\*"
    with open(odd, "wb") as file:
        file.write(b"odd")
    await build_image(tmp_path / "a", tmp_path / "image")
    out = unpack(tmp_path / "image", tmp_path / "out")
    assert sorted(os.listdir(os.fsencode(out))) == sorted(os.listdir(os.fsencode(tmp_path / "a")))
    with open(os.fsencode(out) + b"/caf\xe9 \xff\n'\"\\*", "rb") as file:
        assert file.read() == b"odd"
    for path in (tmp_path / "a").rglob("*"):
        there = out / path.relative_to(tmp_path / "a")
        assert there.lstat().st_mode == path.lstat().st_mode
        if path.is_symlink():
            assert os.readlink(there) == os.readlink(path)
        elif path.is_file():
            assert there.read_bytes() == path.read_bytes()


async def test_sockets_fifos_and_setuid_bits_are_dropped_and_said(tmp_path: Path) -> None:
    root = tmp_path / "a"
    root.mkdir()
    (root / "su id").write_bytes(b"x")
    (root / "su id").chmod(0o6755)
    (root / "shared").mkdir()
    (root / "shared").chmod(0o2775)
    os.mkfifo(root / "shared/fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(root)
        try:
            listener.bind("sock")
        finally:
            os.chdir(here)
    found = scan(root)
    assert [(item.path, item.what) for item in found.dropped] == [
        ("shared", "setgid bit"),
        ("shared/fifo", "FIFO"),
        ("sock", "socket"),
        ("su id", "setgid bit"),
        ("su id", "setuid bit"),
    ]
    assert (found.files, found.bytes_total, found.dropped_total) == (1, 1, 5)
    await build_image(root, tmp_path / "image")
    out = unpack(tmp_path / "image", tmp_path / "out")
    assert sorted(path.name for path in out.rglob("*")) == ["shared", "su id"]
    assert (out / "su id").stat().st_mode & 0o7777 == 0o755
    assert (out / "shared").stat().st_mode & 0o7777 == 0o775


@pytest.mark.root
async def test_device_nodes_are_dropped_and_said(tmp_path: Path) -> None:
    root = tmp_path / "a"
    root.mkdir()
    try:
        os.mknod(root / "null", 0o20666, os.makedev(1, 3))
        os.mknod(root / "loop", 0o60660, os.makedev(7, 0))
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        pytest.skip("this container may not make device nodes")
    assert [(item.path, item.what) for item in scan(root).dropped] == [
        ("loop", "block device"),
        ("null", "character device"),
    ]
    await build_image(root, tmp_path / "image", exclude=scan(root).excluded)
    assert list(unpack(tmp_path / "image", tmp_path / "out").iterdir()) == []


@pytest.mark.root
async def test_whiteouts_are_carried_where_something_is_below_and_opaque_marks_are_said(tmp_path: Path) -> None:
    root = tmp_path / "a"
    (root / "opaque").mkdir(parents=True)
    try:
        os.mknod(root / "gone", 0o20000, os.makedev(0, 0))
        os.mknod(root / "null", 0o20666, os.makedev(1, 3))
        os.setxattr(root / "opaque", "trusted.overlay.opaque", b"y")
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP):
            raise
        pytest.skip("this container may not make whiteouts")
    mark = ("opaque", "opaque mark, which trees carry")
    for whiteouts, dropped in (
        (False, [("gone", "character device"), ("null", "character device"), mark]),
        (True, [("null", "character device"), mark]),
    ):
        found = preflight(scan_tree(root), whiteouts=whiteouts)
        assert [(item.path, item.what) for item in found.dropped] == dropped
        image = tmp_path / f"image{whiteouts}"
        await build_image(root, image, exclude=found.excluded)
        out = unpack(image, tmp_path / f"out{whiteouts}")
        assert sorted(path.name for path in out.iterdir()) == (["gone"] if whiteouts else []) + ["opaque"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("name", ["file", "directory"])
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "directory").mkdir()
    (tmp_path / name).chmod(0)
    try:
        with pytest.raises(P2PDistError, match=f"{name}: permission denied") as caught:
            scan(tmp_path)
        assert caught.value.remedy
    finally:
        (tmp_path / name).chmod(0o700)


@pytest.mark.root
def test_what_another_user_cannot_read_is_named() -> None:
    """As the test above, for a run as root: a child gives its rights up."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        (Path(place) / "secret").write_bytes(b"x")
        (Path(place) / "secret").chmod(0o600)
        assert b"secret: permission denied" in _said_to_nobody(Path(place))


def _said_to_nobody(source: Path) -> bytes:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            scan(source)
        except P2PDistError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    said = os.read(reader, 4000)
    os.close(reader)
    os.waitpid(pid, 0)
    return said


def test_a_source_must_be_a_directory(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        scan(tmp_path / "absent")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError):
        scan(tmp_path / "file")


async def test_the_output_may_not_lie_in_the_source(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "way").symlink_to(tmp_path / "a")
    for output in (tmp_path / "a/image", tmp_path / "way/deep/image"):
        with pytest.raises(UsageError, match="within the source"):
            await build_image(tmp_path / "a", output)


async def test_without_mksquashfs_one_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "a").mkdir()
    with pytest.raises(P2PDistError, match="squashfs-tools"):
        await build_image(tmp_path / "a", tmp_path / "image")


@pytest.mark.parametrize("arguments", [{"level": 0}, {"level": 23}, {"mtime": -1}, {"mtime": 1 << 32}])
async def test_impossible_settings_are_refused(tmp_path: Path, arguments: dict[str, int]) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(UsageError):
        await build_image(tmp_path / "a", tmp_path / "image", **arguments)  # type: ignore[arg-type]


def stand_in(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name which behaves as the real one does on a bad day."""
    directory.mkdir()
    program = directory / "mksquashfs"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


async def test_a_failure_leaves_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that fails half-way: its words are passed on, its output is gone."""
    (tmp_path / "a").mkdir()
    stand_in(tmp_path / "bin", "echo half > $2\necho 'FATAL ERROR: source went away' >&2\nexit 1", monkeypatch)
    with pytest.raises(P2PDistError, match="source went away"):
        await build_image(tmp_path / "a", tmp_path / "image")
    assert not (tmp_path / "image").exists()


async def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    stand_in(tmp_path / "bin", "echo 'Write failed because No space left on device' >&2\nexit 1", monkeypatch)
    with pytest.raises(DiskFull, match="5000 bytes needed") as full:
        await build_image(tmp_path / "a", tmp_path / "image", size_estimate=5000)
    assert "kept" not in full.value.remedy  # the draft is gone


async def test_cancelling_ends_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    stand_in(tmp_path / "bin", "echo half > $2\nexec sleep 60", monkeypatch)
    task = asyncio.create_task(build_image(tmp_path / "a", tmp_path / "image"))
    while not (tmp_path / "image").exists():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    assert not (tmp_path / "image").exists()


def test_names_are_printable() -> None:
    assert printable(os.fsdecode(b"caf\xe9\n")) == "caf\\xe9\\n"
    assert sys.getfilesystemencoding() == "utf-8"


ODD = [
    "a*b",
    "aXb",
    "x[1]",
    "x1",
    " lead",
    "lead",
    "#hash",
    "back\\slash",
    "trail ",
    "trail",
    "new\nline",
    "newXline",
    "!",
    "~t",
    "q?",
]


@pytest.mark.parametrize("odd", [*ODD, "hard", "sub", "sub/q?", os.fsdecode(b"\xff\xfe")])
async def test_left_out_paths_are_left_out_and_no_others(tmp_path: Path, odd: str) -> None:
    """Whatever is in a name, and also one of several names of a file."""
    source, names = tmp_path / "a", [*ODD, os.fsdecode(b"\xff\xfe")]
    (source / "sub").mkdir(parents=True)
    for name in names:
        (source / name).write_bytes(b"x")
        (source / "sub" / name).write_bytes(b"x")
    os.link(source / "lead", source / "hard")
    found = scan(source, ignore=lambda path, _: path == os.fsencode(odd))
    assert found.excluded == [os.fsencode(odd)]
    await build_image(source, tmp_path / "image", exclude=found.excluded)
    subprocess.run(["unsquashfs", "-d", tmp_path / "out", tmp_path / "image"], check=True, capture_output=True)
    shown = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")}
    everything = {str(path.relative_to(source)) for path in source.rglob("*")}
    assert everything - shown == {path for path in everything if path == odd or path.startswith(odd + "/")}
    assert shown < everything
    assert found.files == len([path for path in shown if path != "sub"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "image", "out"]
    chosen = scan(source, only={os.fsencode(odd)})
    await build_image(source, tmp_path / "other", exclude=chosen.excluded)
    shutil.rmtree(tmp_path / "out")
    subprocess.run(["unsquashfs", "-d", tmp_path / "out", tmp_path / "other"], check=True, capture_output=True)
    shown = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")}
    assert shown == {odd, odd.rpartition("/")[0]} - {""}
