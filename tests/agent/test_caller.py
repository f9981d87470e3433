"""What is done for a process that asks over the Unix socket is done with its rights. Needs root, to
be another user as well."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from p2pdist.agent.caller import Caller
from p2pdist.agent.mounts import Mounts, PackageMounts
from p2pdist.agent.pull.pulls import Pulls
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, NotFound, P2PDistError, Refused, UsageError
from p2pdist.model.manifest import Config
from p2pdist.model.messages import MountRequest, MountStatus, PullRequest
from p2pdist.mount import kernel
from p2pdist.mount.layers import SquashfsLayer

DIGEST = Digest("sha256:" + "ab" * 32)
USER, GROUP = 65534, 4242
STRANGER = Caller(USER, GROUP)
ROOT = Caller(0, 0)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can reach; those of a test are root's alone. In it `mine` is the
    user's."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        directory.chmod(0o755)
        owned(directory / "mine", USER)
        yield directory


def owned(path: Path, uid: int, mode: int = 0o755, gid: int | None = None) -> Path:
    path.mkdir()
    os.chown(path, uid, uid if gid is None else gid)
    path.chmod(mode)
    return path


def write(path: Path) -> None:
    path.write_bytes(b"written")


@pytest.mark.root
def test_the_kernel_says_who_asks(place: Path) -> None:
    """User, group and further groups of the process that connected, many groups too."""
    groups = (4343, *range(10_000, 10_400))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "s"))
        listener.listen()
        (place / "s").chmod(0o666)
        child = os.fork()
        if child == 0:
            try:
                os.setgroups(groups)
                os.setresgid(GROUP, GROUP, GROUP)
                os.setresuid(USER, USER, USER)
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(str(place / "s"))
                    client.recv(1)
            finally:
                os._exit(0)
        connection, _ = listener.accept()
        with connection:
            found = Caller.of(connection)
        os.waitpid(child, 0)
    assert found == Caller(USER, GROUP, groups, child)
    assert not found.trusted and ROOT.trusted and Caller.agent().trusted
    with pytest.raises(Refused, match="may not drain"):
        found.require_trusted("drain")


@pytest.mark.root
@pytest.mark.parametrize(
    ("name", "groups", "allowed"),
    [
        ("mine/new", (), True),
        ("shared/new", (4343,), True),
        ("shared/new", (), False),
        ("sticky/new", (), True),
        ("sticky/link", (), False),
        ("mine/aside/new", (), False),
        ("other/new", (), False),
        ("closed/below/new", (), False),
    ],
)
async def test_files_are_written_where_the_user_may(
    place: Path, name: str, groups: tuple[int, ...], allowed: bool
) -> None:
    """Also by what a further group allows; never through a link of the user's to where the user may
    not write."""
    owned(place / "shared", 0, 0o770, 4343)
    owned(place / "sticky", 0, 0o1777)
    owned(place / "other", 1234)
    owned(owned(place / "closed", 0, 0o700) / "below", USER)
    (place / "sticky" / "link").symlink_to(place / "other" / "file")
    (place / "mine" / "aside").symlink_to(place / "other")
    path = place / name
    acting = Caller(USER, GROUP, groups).act(partial(write, path), f"write {path}")
    if allowed:
        await acting
        assert path.read_bytes() == b"written" and (path.stat().st_uid, path.stat().st_gid) == (USER, GROUP)
    else:
        with pytest.raises(Refused, match=f"user {USER} may not write"):
            await acting
        assert list((place / "other").iterdir()) == [] == list((place / "closed" / "below").iterdir())


@pytest.mark.root
async def test_the_agent_keeps_its_own_rights(place: Path) -> None:
    """The thread that has the user's is never used again, and has no capability."""
    (place / "secret").touch(0o600)

    def look() -> tuple[int, str]:
        status = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text()
        return threading.get_native_id(), next(line.split()[1] for line in status.splitlines() if "CapEff" in line)

    thread, capabilities = await STRANGER.act(look, "look")
    assert int(capabilities, 16) == 0
    for _ in range(3):
        assert await asyncio.to_thread((place / "secret").read_bytes) == b""
        assert (await ROOT.act(look, "look"))[0] != thread
    with pytest.raises(P2PDistError, match="cannot look"):
        await STRANGER.act(partial(os.stat, place / "absent"), "look")


@pytest.mark.root
def test_what_is_of_others_is_refused_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is not root cannot take on the rights of another user."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    pulls = Pulls(None, None, None)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="the agent is not root"):
        pulls.start(PullRequest(blob=DIGEST, output="/tmp/out"), STRANGER)
    assert pulls.list() == []


@pytest.mark.parametrize("output", ["out", "/tmp/out\0", "/" + 4095 * "x"])
def test_what_is_no_path_is_refused_before_anything_is_fetched(output: str) -> None:
    pulls = Pulls(None, None, None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the output"):
        pulls.start(PullRequest(blob=DIGEST, output=output), ROOT)
    assert pulls.list() == []


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("content")
    made = tmp_path / "image.squashfs"
    subprocess.run(["mksquashfs", tmp_path / "source", made, "-quiet", "-no-progress"], check=True, capture_output=True)
    return made


async def shown(mounts: Mounts, image: Path, path: Path | str, caller: Caller, how: str = "") -> MountStatus:
    def hold() -> Callable[[], None]:
        return lambda: None

    request = MountRequest("app:v1", str(path), how=how)
    return await mounts.mount("app:v1", DIGEST, [SquashfsLayer(image)], Config(), request, hold, caller)


@pytest.mark.root
async def test_packages_are_shown_where_the_user_may_write(place: Path, image: Path, tmp_path: Path) -> None:
    """In a directory that is made for it with the user's rights, or in an empty one that is the
    user's; and by nobody else taken away."""
    mounts = Mounts(tmp_path / "mounts")
    owned(place / "sticky", 0, 0o1777)
    owned(place / "other", 1234)
    owned(place / "mine" / "of-root", 0)
    owned(place / "mine" / "empty", USER)
    (place / "mine" / "aside").symlink_to(place / "other")
    try:
        for name in ("other", "other/new", "sticky", "mine/of-root", "mine/aside", "mine/aside/new"):
            with pytest.raises(Refused, match="may not show"):
                await shown(mounts, image, place / name, STRANGER)
        with pytest.raises(NotFound):
            await shown(mounts, image, place / "mine" / "no" / "new", STRANGER)
        with pytest.raises(Conflict):
            await shown(mounts, image, place / "mine", STRANGER)
        with pytest.raises(Refused, match="plain files"):
            await shown(mounts, image, place / "mine" / "new", STRANGER, "unpack")
        assert mounts.list() == [] and not (place / "mine" / "new").exists()
        for name in ("mine/new", "mine/empty", "sticky/new"):
            status = await shown(mounts, image, place / name, STRANGER)
            assert (place / name / "file").read_text() == "content" and status.path == str(place / name)
            with pytest.raises(Refused, match="shown for another user"):
                await mounts.unmount(str(place / name), True, Caller(1234, 1234))
            await mounts.unmount(str(place / name), False, STRANGER)
        assert not (place / "mine" / "new").exists() and (place / "mine" / "empty").exists()
        status = await shown(mounts, image, "", STRANGER)
        await mounts.unmount(status.path, False, ROOT)
        await shown(mounts, image, tmp_path / "view", ROOT)
        with pytest.raises(Refused):
            await mounts.unmount(str(tmp_path / "view"), False, STRANGER)
    finally:
        for left in mounts.list():
            await mounts.unmount(left.path, True)
        await mounts.close()


@pytest.mark.root
async def test_a_place_that_moves_leads_nowhere_else(place: Path, image: Path, tmp_path: Path) -> None:
    """The user renames what the path went through and puts a link there: what is mounted elsewhere
    is not taken away."""
    mounts = Mounts(tmp_path / "mounts")
    elsewhere = owned(place / "elsewhere", 0)
    (elsewhere / "view").mkdir()
    kernel.mount("tmpfs", elsewhere / "view", "tmpfs")
    try:
        await shown(mounts, image, place / "mine" / "view", STRANGER)
        (place / "mine").rename(place / "moved")
        (place / "mine").symlink_to(elsewhere)
        with pytest.raises(OSError, match="leads elsewhere"):
            kernel.unmount_here(place / "mine" / "view")
        with pytest.raises(NotFound):
            await mounts.unmount(str(place / "mine" / "view"), True, STRANGER)
        assert kernel.mounted_at(elsewhere / "view") is not None
        (place / "mine").unlink()
        (place / "moved").rename(place / "mine")
        await mounts.unmount(str(place / "mine" / "view"), True, STRANGER)
    finally:
        kernel.unmount(elsewhere / "view")
        await mounts.close()


@pytest.mark.root
async def test_the_next_agent_knows_for_whom_a_package_is_shown(place: Path, image: Path, tmp_path: Path) -> None:
    first = Mounts(tmp_path / "mounts")
    await shown(first, image, place / "mine" / "view", STRANGER)
    with (place / "mine" / "view" / "file").open():
        second = Mounts(tmp_path / "mounts")
    try:
        (status,) = second.list()
        assert (status.reference, status.digest) == ("app:v1", DIGEST)
        with pytest.raises(Refused):
            await second.unmount(status.path, False, Caller(1234, 1234))
        await second.unmount(status.path, False, STRANGER)
    finally:
        await second.close()


@pytest.mark.root
async def test_a_user_hears_of_no_link_that_the_agent_alone_may_follow(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no path of a user is looked at by the event loop: it may be on a file system that
    hangs."""
    private = owned(place / "private", 0, 0o700)
    (private / "link").symlink_to("/a/secret")
    (place / "mine" / "link").symlink_to("/a/place")
    threads, real = set[threading.Thread](), os.path.realpath

    def noted(path: str | Path, **more: bool) -> str:
        threads.add(threading.current_thread())
        return real(path, **more)

    mounts, nothing = Mounts(tmp_path / "mounts"), cast(Any, None)
    packages = PackageMounts(nothing, nothing, mounts, nothing, roots=lambda: ("/allowed",))
    monkeypatch.setattr(os.path, "realpath", noted)
    try:
        for path, hidden in ((private / "link" / "view", True), (place / "mine" / "link" / "view", False)):
            with pytest.raises(NotFound) as missing:
                await mounts.unmount(str(path), False, STRANGER)
            with pytest.raises(Refused) as refused:
                await packages.mount(MountRequest("app:v1", str(path)), STRANGER)
            for error in (missing.value, refused.value):
                assert ("/a/" not in error.what) == hidden, error.what
        with pytest.raises(NotFound, match="/a/secret"):
            await mounts.unmount(str(private / "link"), False, ROOT)
    finally:
        await mounts.close()
    assert threads and threading.main_thread() not in threads


@pytest.mark.root
async def test_paths_that_hang_take_no_more_threads_than_a_user_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where who asked has gone; others wait for none of them."""
    monkeypatch.setattr("p2pdist.agent.caller.THREADS_OF_USER", 2)
    monkeypatch.setattr("p2pdist.agent.caller._rooms", {})
    begun, go_on = threading.Semaphore(0), threading.Event()

    def hang() -> bool:
        begun.release()
        return go_on.wait(60)

    hanging = [asyncio.create_task(STRANGER.act(hang, "look")) for _ in range(2)]
    for _ in hanging:
        await asyncio.to_thread(begun.acquire)
    for task in hanging:
        task.cancel()
    await asyncio.wait(hanging)
    third = asyncio.create_task(STRANGER.act(hang, "look"))
    async with asyncio.timeout(60):
        await asyncio.wait([third], timeout=0.2)
        assert await Caller(USER - 1, GROUP).act(os.getpid, "look") == os.getpid()
        assert not begun.acquire(blocking=False), "a third thread of the user looks"
        go_on.set()
        assert await third
