"""The agent's table of mounts: claims are held exactly as long as something is shown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waits import until, wait_until

from p2pdist.agent import mounts as agent_mounts
from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.caller import Caller
from p2pdist.agent.mounts import Mounts
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, Corrupt, NotFound, TooLarge, UsageError
from p2pdist.model.manifest import Config, parse_reference
from p2pdist.model.messages import MountRequest, MountStatus
from p2pdist.mount import kernel
from p2pdist.mount import views as mount_views
from p2pdist.mount.layers import SquashfsLayer
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.layers import PackOptions, pack_layers, plain_layer

DIGEST = Digest("sha256:" + "ab" * 32)
CONFIG = Config(("python", "-m", "train"), ("A=1",), "/app")


class Claims:
    """Counts what is held."""

    def __init__(self) -> None:
        self.count = 0

    def hold(self) -> Callable[[], None]:
        self.count += 1
        return self.release

    def release(self) -> None:
        self.count -= 1


@pytest.fixture
def claims() -> Claims:
    return Claims()


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """A base and an app layer."""
    made = []
    for name in ("base", "app"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
        made.append(tmp_path / f"{name}.squashfs")
        subprocess.run(
            ["mksquashfs", tmp_path / name, made[-1], "-quiet", "-no-progress"], check=True, capture_output=True
        )
    return made


async def shown(
    mounts: Mounts, images: list[Path], claims: Claims, path: Path | str = "", pid: int = 0, **how: Any
) -> MountStatus:
    request = MountRequest("app:v1", str(path), until_exit=bool(pid), **how)
    layers = [SquashfsLayer(image) for image in images]
    caller = replace(Caller.agent(), pid=pid)
    return await mounts.mount("app:v1", DIGEST, layers, CONFIG, request, claims.hold, caller)


async def test_shown_listed_and_gone(tmp_path: Path, images: list[Path], claims: Claims) -> None:
    """A status says all that a runner needs; the claim is held until the package is gone."""
    mounts = Mounts(tmp_path / "mounts")
    status = await shown(mounts, images, claims, tmp_path / "view", how="unpack")
    assert status.how == "unpack"
    assert (status.reference, status.digest, status.path) == ("app:v1", DIGEST, str(tmp_path / "view"))
    assert (status.entrypoint, status.env, status.working_dir) == (CONFIG.entrypoint, CONFIG.env, CONFIG.working_dir)
    assert sorted(path.name for path in (tmp_path / "view").iterdir()) == ["app", "base"]
    assert mounts.list() == [status]
    assert claims.count == 1
    with pytest.raises(Conflict, match="already"):
        await shown(mounts, images, claims, tmp_path / "view")
    assert await mounts.unmount(str(tmp_path / "view")) == status
    assert mounts.list() == []
    assert claims.count == 0
    with pytest.raises(NotFound):
        await mounts.unmount(str(tmp_path / "view"))


async def test_without_a_path_the_agent_chooses_one(tmp_path: Path, images: list[Path], claims: Claims) -> None:
    """Each time another, below its own directory."""
    mounts = Mounts(tmp_path / "mounts")
    found = await asyncio.gather(*(shown(mounts, images, claims, how="unpack") for _ in range(3)))
    assert len({status.path for status in found}) == 3
    assert all(status.path.startswith(f"{tmp_path}/mounts/shown/") for status in found)
    for status in found:
        await mounts.unmount(status.path)
    assert claims.count == 0
    assert not list((tmp_path / "mounts" / "shown").glob("*/*"))
    await mounts.close()
    with pytest.raises(Conflict, match="stopping"):
        await shown(mounts, images, claims)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
async def test_a_view_without_a_path_is_for_its_user_alone(images: list[Path], claims: Claims) -> None:
    place = Path(tempfile.mkdtemp(prefix="p2pdist-views-"))  # other users enter no directory of pytest
    try:
        place.chmod(0o755)
        mounts = Mounts(place / "mounts")
        owner, stranger = 65533, 65534
        for uid in (owner, 0):
            layers, request = [SquashfsLayer(image) for image in images], MountRequest("app:v1", how="unpack")
            status = await mounts.mount("app:v1", DIGEST, layers, CONFIG, request, claims.hold, Caller(uid, uid))
            view = Path(status.path)
            assert sorted(path.name for path in view.iterdir()) == ["app", "base"]
            assert readable(view / "app", uid)
            for other in {owner, stranger} - {uid}:
                assert not readable(view / "app", other)
                assert (
                    not readable(view, other)
                    and not readable(view.parent, other)
                    and not readable(view.parent.parent, other)
                )
            # Its user could otherwise lead a mount elsewhere by a link.
            assert view.parent.stat().st_uid == 0 and not writable(view.parent, owner)
        assert not readable(place / "mounts" / "records", owner)
        for status in mounts.list():
            await mounts.unmount(status.path)
        await mounts.close()
    finally:
        shutil.rmtree(place)


def as_user(uid: int, code: str, path: Path) -> bool:
    """Whether a process of another user can do something with a path."""
    program = f"import os, sys; os.setgroups([]); os.setgid({uid}); os.setuid({uid}); {code}"
    return subprocess.run([sys.executable, "-c", program, path], capture_output=True, check=False).returncode == 0


def readable(path: Path, uid: int) -> bool:
    return as_user(uid, "os.listdir(sys.argv[1]) if os.path.isdir(sys.argv[1]) else open(sys.argv[1]).read()", path)


def writable(path: Path, uid: int) -> bool:
    return as_user(uid, "os.mkdir(sys.argv[1] + '/x')", path)


@pytest.mark.root
async def test_one_user_leaves_views_to_others(
    tmp_path: Path, images: list[Path], claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_mounts, "MOUNTS_OF_USER_MAX", 2)
    mounts = Mounts(tmp_path / "mounts")
    layers = [SquashfsLayer(image) for image in images]

    async def mounted(uid: int) -> str:
        request, caller = MountRequest("app:v1", ""), Caller(uid, uid)
        return (await mounts.mount("app:v1", DIGEST, layers, CONFIG, request, claims.hold, caller)).path

    try:
        for uid in (12345, 12345, 0, 0, 0):
            await mounted(uid)
        with pytest.raises(TooLarge, match="user 12345"):
            await mounted(12345)
        await mounted(12346)
        assert claims.count == 6
    finally:
        for status in mounts.list():
            await mounts.unmount(status.path)


async def test_a_failure_holds_nothing(tmp_path: Path, images: list[Path], claims: Claims) -> None:
    """Corrupt layers and bad requests leave neither a claim nor an entry."""
    mounts = Mounts(tmp_path / "mounts")
    images[1].write_bytes(b"x" * 5000)
    with pytest.raises(Corrupt):
        await shown(mounts, images, claims, tmp_path / "view")
    with pytest.raises(UsageError, match="absolute"):
        await shown(mounts, images, claims, "view")
    with pytest.raises(UsageError, match="no way"):
        await shown(mounts, images[:1], claims, tmp_path / "view", how="magic")
    assert claims.count == 0
    assert mounts.list() == []
    assert not (tmp_path / "view").exists()


async def test_images_are_handed_out_and_held(tmp_path: Path, images: list[Path], claims: Claims) -> None:
    """For a caller that shows them to itself; the name that it gets ends the claim."""
    mounts = Mounts(tmp_path / "mounts")
    status = await shown(mounts, images, claims, how="userns")
    assert status.how == "images"
    assert status.images == tuple(map(str, images))
    assert claims.count == 1
    await mounts.unmount(status.path)
    assert claims.count == 0
    await shown(mounts, images, claims, how="userns")
    await mounts.close()
    assert claims.count == 0


@pytest.mark.root
async def test_root_mounts_rather_than_hand_out_images(tmp_path: Path, images: list[Path], claims: Claims) -> None:
    """`images` is what a caller without root asks for; an agent with root does better."""
    mounts = Mounts(tmp_path / "mounts")
    status = await shown(mounts, images, claims, how="images")
    assert status.how == "overlay"
    await mounts.unmount(status.path)


@pytest.mark.root
async def test_a_caller_that_goes_away_leaves_nothing_unknown(
    tmp_path: Path, images: list[Path], claims: Claims
) -> None:
    """A cancelled request either shows nothing or is known to the next agent, and a stop waits for
    it."""
    mounts = Mounts(tmp_path / "mounts")
    task = asyncio.create_task(shown(mounts, images, claims, tmp_path / "view"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await mounts.close()
    assert claims.count == 0
    later = Mounts(tmp_path / "mounts")
    for status in later.list():
        await later.unmount(status.path)
    assert kernel.mounted_at(tmp_path / "view") is None


KINDS = [
    pytest.param(1, {}, "squashfs", marks=pytest.mark.root),
    pytest.param(2, {}, "overlay", marks=pytest.mark.root),
    pytest.param(2, {"writable": True}, "overlay", marks=pytest.mark.root),
    pytest.param(2, {"how": "unpack"}, "unpack"),
]


@pytest.mark.parametrize(("layers", "asked", "how"), KINDS)
async def test_a_stop_leaves_what_is_shown_to_the_next_agent(
    tmp_path: Path, images: list[Path], claims: Claims, layers: int, asked: dict[str, str], how: str
) -> None:
    """A program that reads it may have nothing open just then. The next agent lists it, keeps its
    blobs and can take it away."""
    mounts, view = Mounts(tmp_path / "mounts"), tmp_path / "view"
    before = await shown(mounts, images[-layers:], claims, view, **asked)
    await mounts.close()
    assert (view / "app").read_text() == "app"
    assert claims.count == 0
    later = Mounts(tmp_path / "mounts")
    later.hold_inherited(lambda digest: claims.hold())
    assert claims.count == 1
    (after,) = later.list()
    assert (after.reference, after.digest, after.path, after.how) == ("app:v1", DIGEST, str(view), how)
    assert after.writable == before.writable
    if before.writable:
        (view / "new").write_text("x")
    assert (view / "app").read_text() == "app"
    await later.unmount(str(view))
    assert not view.exists()
    assert claims.count == 0


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts processes that last; with `view`, as programs that were started from it and have
    nothing of it open."""
    started: list[subprocess.Popen[bytes]] = []

    def start(view: str = "") -> subprocess.Popen[bytes]:
        environ = {**os.environ, **({"P2PDIST_ROOT": view} if view else {})}
        started.append(subprocess.Popen(["sleep", "100"], cwd="/", env=environ))
        # Popen returns before /proc shows the environment: execve(2) closes files first.
        shown = Path(f"/proc/{started[-1].pid}/environ")
        wait_until(lambda: f"P2PDIST_ROOT={view}".encode() in shown.read_bytes() if view else shown.read_bytes())
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("layers", "asked", "how"), KINDS)
async def test_the_view_of_a_process_goes_with_its_last_program(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    images: list[Path],
    claims: Claims,
    processes: Callable[..., subprocess.Popen[bytes]],
    layers: int,
    asked: dict[str, str],
    how: str,
) -> None:
    """SIGKILL of the process leaves nothing behind; what it started from the view keeps it, also
    over a restart of the agent."""
    monkeypatch.setattr(agent_mounts, "LOOK_S", 0.02)
    mounts = Mounts(tmp_path / "mounts")
    mounts.start()
    owner = processes()
    status = await shown(mounts, images[-layers:], claims, pid=owner.pid, **asked)
    assert (status.how, status.pid) == (how, owner.pid)
    program = processes(status.path)
    owner.kill()  # and not waited for: a process that has ended is no user, whether or not its parent has asked
    with pytest.raises(Conflict, match="in use") as refused:
        await mounts.unmount(status.path)
    assert f"sleep (pid {program.pid})" in refused.value.remedy
    await mounts.close()
    later = Mounts(tmp_path / "mounts")
    later.hold_inherited(lambda digest: claims.hold())
    later.start()
    assert [(kept.path, kept.how, kept.pid) for kept in later.list()] == [(status.path, how, owner.pid)]
    assert (Path(status.path) / "app").read_text() == "app"
    program.kill()
    await until(lambda: not later.list())
    assert not Path(status.path).exists()
    assert claims.count == 0
    await later.close()


async def test_what_ended_while_no_agent_ran_is_gone_at_once(
    tmp_path: Path, images: list[Path], claims: Claims, processes: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """Also when another process has got the number since; images that were handed out go the same
    way."""
    mounts = Mounts(tmp_path / "mounts")
    ended, alive = processes(), processes()
    gone = await shown(mounts, images, claims, pid=ended.pid, how="unpack")
    reused = await shown(mounts, images, claims, pid=alive.pid, how="unpack")
    await shown(mounts, images, claims, pid=ended.pid, how="userns")
    stays = await shown(mounts, images, claims, pid=alive.pid, how="userns")
    await shown(mounts, images, claims, how="userns")
    await mounts.close()
    ended.kill()
    ended.wait()
    (record,) = (path for path in (tmp_path / "mounts/records").glob("*.json") if reused.path in path.read_text())
    record.write_text(re.sub(r'"owner": "(\d+):\d+"', r'"owner": "\1:1"', record.read_text()))
    later = Mounts(tmp_path / "mounts")
    assert [(kept.path, kept.images) for kept in later.list()] == [(stays.path, stays.images)]
    assert not Path(gone.path).exists() and not Path(reused.path).exists()
    await later.unmount(stays.path)
    assert later.list() == []


@pytest.mark.root
async def test_what_an_agent_had_not_mounted_again_after_a_reboot_is_forgotten(
    tmp_path: Path, images: list[Path], claims: Claims
) -> None:
    """The machine has started anew: records are there, and mounts are not. Unpacked files are."""
    mounts = Mounts(tmp_path / "mounts")
    for name, how in (("mounted", ""), ("unpacked", "unpack")):
        await shown(mounts, images, claims, tmp_path / name, how=how)
    await mounts.close()
    kernel.unmount(tmp_path / "mounted")
    later = Mounts(tmp_path / "mounts")
    assert [kept.path for kept in later.list()] == [str(tmp_path / "unpacked")]
    assert not (tmp_path / "mounted").exists()
    await later.unmount(str(tmp_path / "unpacked"))
    assert not list((tmp_path / "mounts/records").iterdir())


_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from p2pdist.agent.mounts import Mounts
from p2pdist.model.messages import MountRequest
from p2pdist.model.manifest import Config
from p2pdist.mount.layers import SquashfsLayer
async def main():
    mounts = Mounts(Path(sys.argv[1]))
    layers = [SquashfsLayer(Path(name)) for name in sys.argv[3:]]
    await mounts.mount("app:v1", "sha256:" + "ab" * 32, layers, Config(), MountRequest("app:v1", sys.argv[2]), lambda: lambda: None)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@pytest.mark.root
async def test_a_restart_after_kill_takes_over(tmp_path: Path, images: list[Path]) -> None:
    """What the killed agent showed is listed under its name and can be removed."""
    target = tmp_path / "view"
    killed = subprocess.run([sys.executable, "-c", _KILLED, tmp_path / "mounts", target, *images])
    assert killed.returncode == -signal.SIGKILL
    mounts = Mounts(tmp_path / "mounts")
    assert [(left.path, left.removed) for left in mounts.leftovers] == [(target, False)]
    assert [(each.reference, each.digest, each.how) for each in mounts.list()] == [("app:v1", DIGEST, "overlay")]
    assert (target / "app").read_text() == "app"
    await mounts.unmount(str(target))
    assert mounts.list() == []
    assert not target.exists()


async def test_paths_that_users_name_are_looked_at_in_threads(
    tmp_path: Path, images: list[Path], claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One on a file system that hangs would stop the whole agent."""
    looked: list[threading.Thread] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def look(*words: Any, **options: Any) -> Any:
            looked.append(threading.current_thread())
            return function(*words, **options)

        return look

    monkeypatch.setattr(os.path, "realpath", watched(os.path.realpath))
    monkeypatch.setattr(agent_mounts, "seen", watched(agent_mounts.seen))
    mounts = Mounts(tmp_path / "mounts")
    (tmp_path / "link").symlink_to(tmp_path)
    looked.clear()
    status = await shown(mounts, images, claims, tmp_path / "view", how="unpack")
    await mounts.unmount(str(tmp_path / "link/view"), caller_sees=(status.device, status.inode))
    assert len(looked) >= 4 and threading.main_thread() not in looked


async def test_views_without_a_path_wait_for_no_path_of_others(
    tmp_path: Path, images: list[Path], claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try at one that hangs keeps a thread until the file system answers."""
    answers = threading.Event()
    with ThreadPoolExecutor(1) as paths:
        paths.submit(answers.wait)
        monkeypatch.setattr(agent_mounts, "_paths", paths)
        mounts = Mounts(tmp_path / "mounts")
        try:
            async with asyncio.timeout(60):
                status = await shown(mounts, images, claims, how="unpack")
                await mounts.unmount(status.path)
        finally:
            answers.set()
    assert claims.count == 0


async def packed(origin: LocalLayout, source: Path, content: bytes) -> None:
    """The tree `app:v1` with two files, one of them with this content."""
    source.mkdir(exist_ok=True)
    (source / "version").write_bytes(content)
    (source / "same").write_bytes(b"same" * 1000)
    await pack_layers([plain_layer(source, "tree", ())], parse_reference("app:v1"), origin, PackOptions())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of its own."""
    image, root = tmp_path / "disk.image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    root.mkdir()
    subprocess.run(["mount", "-o", "loop", image, root], check=True)
    yield root
    subprocess.run(["umount", "-l", root], check=True)


class Lazy:
    """Stands in the place of LazyViews, and notes which views are said to be gone."""

    def __init__(self) -> None:
        self.gone: list[str] = []

    def status(self, path: str) -> None:
        return None

    cover_at = status

    async def unmounted(self, path: str, *, in_use: bool) -> None:
        assert not in_use
        self.gone.append(path)


@pytest.mark.root
async def test_a_directory_on_a_disk_that_hangs_holds_up_no_agent(
    tmp_path: Path, images: list[Path], claims: Claims, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of NFS without its server, when the machine has started anew. Once the disk answers what
    was left there goes, and is listed no more."""
    monkeypatch.setattr(mount_views, "HANGS_S", 0.5)
    mounts = Mounts(tmp_path / "mounts")
    for path in (disk / "a", disk / "b", tmp_path / "c"):
        await shown(mounts, images, claims, path)
        kernel.unmount(path)
    await mounts.close()
    subprocess.run(["fsfreeze", "-f", disk], check=True)
    lazy, hanging = Lazy(), [str(disk / "a"), str(disk / "b")]
    try:
        later = Mounts(tmp_path / "mounts")
        later.lazy = lazy  # type: ignore[assignment]
        assert {*hanging} <= {status.path for status in later.list()}
        notes = {str(leftover.path): leftover.note for leftover in later.leftovers}
        assert all(notes[path] == "its file system does not answer" for path in hanging)
        (other,) = [leftover for leftover in later.leftovers if str(leftover.path) not in hanging]
        # A busy machine may take longer than a disk is given that comes after one that hangs.
        assert (other.later.result(60) if other.later is not None else other).removed
    finally:
        subprocess.run(["fsfreeze", "-u", disk], check=True)
    later.start()
    await until(lambda: not later.list())
    assert {*hanging} <= {*lazy.gone}
    assert not list((tmp_path / "mounts" / "records").iterdir()) and not (disk / "a").exists()
    await later.close()


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("damaged", [False, True])
async def test_what_a_view_shows_stays_where_its_tag_has_moved_and_agents_change(
    tmp_path: Path, origin: LocalLayout, damaged: bool
) -> None:
    """The tag names another version for more than a day when the next agent takes the view over,
    also where an object of it was damaged and is not here again: then the other ones stay."""

    def agent() -> Agent:
        return Agent(AgentSettings((), "h1", "127.0.0.1:1", tmp_path / "store", origin=origin.url, scrub_s=0.0))

    await packed(origin, tmp_path / "source", b"first" * 1000)
    first = agent()
    await first.start()
    view = await first.package_mounts.mount(MountRequest("app:v1", str(tmp_path / "view")))
    (root,) = [tree.root for tree in first.store.trees.list()]
    contents = first.store.trees.records.contents(root)
    await packed(origin, tmp_path / "source", b"second" * 1000)
    assert (await first.pulls.package("app:v1")).digest != view.digest
    if damaged:
        same = [one for one in contents if first.store.objects.path(one).read_bytes().startswith(b"same")]
        await asyncio.to_thread(first.store.trees.drop_objects, set(same))
    await first.stop()
    with sqlite3.connect(tmp_path / "store" / "index.sqlite") as database:
        database.execute("UPDATE smalls SET stored=0")
    database.close()
    second = agent()
    try:
        await second.start()
        with pytest.raises(Conflict, match="in use"):  # as eviction, or rm of the other version, would do
            await asyncio.to_thread(second.store.trees.remove, root)
        await asyncio.to_thread(second.store.collect)
        Path("/proc/sys/vm/drop_caches").write_text("2")
        assert (tmp_path / "view" / "version").read_bytes() == b"first" * 1000
        await second.pulls.package(f"app@{view.digest}")
        assert second.store.trees.complete(root), "what is damaged comes again below the view"
        await second.mounts.unmount(view.path)
        await asyncio.to_thread(second.store.trees.remove, root)
    finally:
        with contextlib.suppress(NotFound):
            await second.mounts.unmount(view.path, force=True)
        await second.stop()
