"""A lazy view that lacks nothing is covered by plain images: readers see the same before, while and
after, and whatever is killed the view stays right."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lazy_marks import needs_events
from lazy_view_rig import View
from waits import wait_until

from p2pdist.model.errors import Conflict, P2PDistError
from p2pdist.mount import kernel
from p2pdist.mount import records as mount_records
from p2pdist.mount.lazy import plain
from p2pdist.mount.lazy.fill_method import FANOTIFY
from p2pdist.mount.lazy.view import is_filled, mark_filled
from p2pdist.mount.records import records, views_at
from p2pdist.mount.views import clean_leftovers, unmount_view

HOLDER = """
import ctypes, mmap, sys
library = ctypes.CDLL(sys.argv[1]) if sys.argv[2] == "library" else open(sys.argv[1], "rb")
if sys.argv[2] == "map":
    weights = mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ)
    library.close()
print("here", flush=True)
sys.stdin.read()
if sys.argv[2] == "file":
    sys.stdout.buffer.write(library.read())
"""
"""Loads a library, or maps or opens a file, and lets go, or reads it, once its input ends."""

READER = """
import os, sys
path, want = sys.argv[1], sys.argv[2]
print("here", flush=True)
sys.stdin.read()
for name in sorted(os.listdir(want)):
    with open(f"{path}/{name}", "rb") as got, open(f"{want}/{name}", "rb") as right:
        assert got.read() == right.read(), name
print(os.stat(path).st_dev)
"""
"""Compares the files of two directories once its standard input ends, and says the device."""

MS_SHARED = 1 << 20
KILLS, KILL_S_MAX = int(os.environ.get("P2PDIST_KILLS", "100")), 0.1

pytestmark = [
    needs_events,
    pytest.mark.skipif(not plain.sees_all_processes(), reason="covers need to see all processes of the host"),
]


@pytest.fixture
def whole(work: Path, tmp_path: Path) -> Iterator[View]:
    """A view that lacks nothing, and has plain images."""
    made = filled(View(FANOTIFY, work, tmp_path / "view"))
    yield made
    made.close()


def filled(view: View) -> View:
    plain.write_plain(view.directory, (view.entries,), view.layout)
    view.fill()
    mark_filled(view.directory)
    return view


def shown(view: View) -> list[kernel.Mounted]:
    """The view, and what covers it."""
    (record,) = records(view.work)
    return views_at(record)


def started(code: str, *words: object, before: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """A program that has begun, and waits."""
    command = (*before, sys.executable, "-c", code, *map(str, words))
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdout is not None and program.stdout.readline() == b"here\n"
    return program


def test_readers_see_the_same_while_a_view_is_covered(whole: View) -> None:
    before = os.stat(whole.path / "weights")
    early = started(HOLDER, whole.path / "weights", "file")
    wrong: list[str] = []
    covered, seen_late = threading.Event(), threading.Event()

    def read() -> None:
        while not seen_late.is_set():
            if covered.is_set():
                seen_late.set()
            wrong.extend(whole.wrong())

    reader = threading.Thread(target=read)
    reader.start()
    outcome = plain.cover(whole.directory)
    covered.set()
    reader.join()
    assert outcome == "covered" and len(shown(whole)) == 2 and not wrong
    assert early.communicate()[0] == whole.files["weights"]
    after = os.stat(whole.path / "weights")
    assert after.st_dev != before.st_dev and after.st_mtime_ns == before.st_mtime_ns
    assert (after.st_mode, after.st_nlink, after.st_size) == (before.st_mode, before.st_nlink, before.st_size)
    assert plain.cover(whole.directory) == "covered" and len(shown(whole)) == 2


@pytest.mark.parametrize("use", ["program", "library", "map"])
def test_a_view_is_not_covered_while_something_of_it_is_mapped(whole: View, use: str) -> None:
    if use == "program":
        program = subprocess.Popen([whole.path / "sleep", "600"])
        (view,) = shown(whole)
        while not plain.is_used(view):
            assert program.poll() is None
    else:
        program = started(HOLDER, whole.path / ("library.so" if use == "library" else "weights"), use)
    assert plain.cover(whole.directory) == "used" and len(shown(whole)) == 1
    program.kill()
    program.communicate()
    assert plain.cover(whole.directory) == "covered" and not whole.wrong()


@pytest.mark.parametrize("step", ["write_image_to", "_maps"])
def test_an_unmount_waits_for_nothing_that_can_take_long(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    view, begun, go_on = View(FANOTIFY, work, tmp_path / "view"), threading.Event(), threading.Event()
    actual, outcome = getattr(plain, step), []

    def hang(*words: object) -> object:
        begun.set()
        assert go_on.wait(60)
        return actual(*words)

    def change() -> None:
        try:
            plain.cover(filled(view).directory)
        except OSError as error:
            outcome.append(type(error))

    monkeypatch.setattr(plain, step, hang)
    thread = threading.Thread(target=change)
    thread.start()
    try:
        assert begun.wait(60)
        unmount_view(view.path, work=work)
        assert not kernel.mounted_at(view.path) and not list(work.iterdir())
    finally:
        go_on.set()
        thread.join()
        view.close()
    assert outcome == [FileNotFoundError] and not list(work.iterdir())


def test_an_unmount_does_not_wait_for_ever(whole: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_records, "CHANGE_S_MAX", 0.1)
    with mount_records.changing(whole.directory):
        with pytest.raises(P2PDistError, match=r"has been changed for 0\.1 s"):
            unmount_view(whole.path, work=whole.work)
        assert len(shown(whole)) == 1
    unmount_view(whole.path, work=whole.work)
    assert not list(whole.work.iterdir())


def test_images_that_two_threads_write_are_whole(work: Path, tmp_path: Path) -> None:
    view = View(FANOTIFY, work, tmp_path / "view")
    try:
        with ThreadPoolExecutor(4) as threads:
            for written in [
                threads.submit(plain.write_plain, view.directory, (view.entries,), view.layout) for _ in range(8)
            ]:
                written.result()
        assert os.listdir(view.directory / plain.PLAIN) == ["1.erofs"]
        assert plain.cover(filled(view).directory) == "covered" and not view.wrong()
    finally:
        view.close()


def test_a_mount_of_others_over_a_view_is_left_alone(whole: View) -> None:
    kernel.mount("others", whole.path, "tmpfs")
    try:
        with pytest.raises(OSError, match="something else is there"):
            plain.cover(whole.directory)
        with pytest.raises(OSError, match="something else is there"):
            plain.identity(whole.directory)
        for force in (False, True):
            with pytest.raises(Conflict, match=r"others .tmpfs. is mounted over"):
                unmount_view(whole.path, work=whole.work, force=force)
        (leftover,) = clean_leftovers(whole.work)
        assert not leftover.removed and len(shown(whole)) == 1
    finally:
        kernel.unmount(whole.path)
    assert not whole.wrong() and plain.cover(whole.directory) == "covered"


def test_a_view_that_is_mounted_at_itself_is_not_covered_by_that(whole: View) -> None:
    kernel.mount(whole.path, whole.path, "", kernel.MS_BIND)
    below = os.stat(whole.path)
    assert plain.identity(whole.directory) == (below.st_dev, below.st_ino)
    assert plain.cover(whole.directory) == "covered"
    cover = os.stat(whole.path)
    assert cover.st_dev != below.st_dev and not whole.wrong()
    assert plain.identity(whole.directory) == (cover.st_dev, cover.st_ino)
    unmount_view(whole.path, work=whole.work)
    assert not kernel.mounted_at(whole.path) and not list(whole.work.iterdir())


def unmounted(point: Path) -> bool:
    """Unmount what nothing uses any more; a supervisor ends in its own time."""
    try:
        kernel.unmount(point)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


@pytest.mark.slow
def test_a_view_that_the_kernel_mounts_twice_is_covered(tmp_path: Path, shared: Path) -> None:
    """A directory that is mounted at itself in the same peer group gives each mount twice."""
    kernel.mount(shared, shared, "", kernel.MS_BIND)
    view = View(FANOTIFY, shared / "records", shared / "view")
    try:
        before = os.stat(view.path).st_dev
        assert len(shown(filled(view))) == 2
        assert plain.cover(view.directory) == "covered" and os.stat(view.path).st_dev != before
        assert not view.wrong()
        unmount_view(view.path, work=view.work)
        assert not kernel.mounted_at(view.path) and not list(view.work.iterdir())
    finally:
        view.close()
        wait_until(lambda: unmounted(shared), "the end of what still used the view")


def test_files_of_others_among_the_images_are_left_alone(whole: View) -> None:
    for name in ("old.erofs", "-1.erofs", "1.erofs.erofs", "\u0663.erofs"):
        (whole.directory / name).touch()
    assert plain.cover(whole.directory) == "covered" and not whole.wrong()


@pytest.mark.parametrize("number", [2, 3])
def test_a_view_with_a_layer_that_has_no_plain_image_is_left(whole: View, number: int) -> None:
    (whole.directory / f"{number}.erofs").touch()
    assert plain.cover(whole.directory) == "left" and len(shown(whole)) == 1


def test_a_view_that_is_written_to_or_lacks_something_is_left(work: Path, tmp_path: Path) -> None:
    view = View(FANOTIFY, work, tmp_path / "written", writable=True)
    try:
        assert plain.cover(filled(view).directory) == "left" and len(shown(view)) == 1
        assert not (view.directory / plain.PLAIN).exists()
    finally:
        view.close()
    view = View(FANOTIFY, work, tmp_path / "lacking")
    try:
        plain.write_plain(view.directory, (view.entries,), view.layout)
        assert plain.cover(view.directory) == "left" and len(shown(view)) == 1
    finally:
        view.close()


def test_a_view_without_plain_images_is_left(whole: View) -> None:
    (whole.directory / plain.PLAIN / "1.erofs").unlink()
    assert plain.cover(whole.directory) == "left" and len(shown(whole)) == 1 and not whole.wrong()


@pytest.mark.slow
@pytest.mark.parametrize("step", ["write_image_to", "mount_image", "merge", "unmount_layers"])
def test_a_view_is_right_whenever_its_agent_is_killed(work: Path, tmp_path: Path, step: str) -> None:
    view = View(FANOTIFY, work, tmp_path / "view")
    try:
        assert killed_at(step, "before", lambda: plain.cover(filled(view).directory)) == -signal.SIGKILL
        if not is_filled(view.directory):
            filled(view)
        assert not view.wrong()
        ended = killed_at(step, "after", lambda: plain.cover(view.directory))
        assert ended == (0 if step == "write_image_to" else -signal.SIGKILL)
        assert not view.wrong()
        (leftover,) = clean_leftovers(work)
        assert not leftover.removed and plain.cover(view.directory) == "covered"
        assert len(shown(view)) == 2 and not view.wrong()
        assert not [entry for entry in kernel.mounted() if view.directory / plain.PLAIN in entry.point.parents]
        unmount_view(view.path, work=work)
        assert not list(work.iterdir())
    finally:
        view.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_view_is_right_whenever_its_agent_is_killed_at_random(whole: View) -> None:
    """While others read it, and from its mark on that nothing is missing."""
    drawn, covered, over, wrong = random.Random(5), 0, threading.Event(), []

    def read() -> None:
        while not over.is_set():
            wrong.extend(whole.wrong())
            whole.forget()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(KILLS):
            shutil.rmtree(whole.directory / plain.PLAIN)
            child = os.fork()
            if not child:
                try:
                    plain.write_plain(whole.directory, (whole.entries,), whole.layout)
                    plain.cover(whole.directory)
                finally:
                    os._exit(0)
            time.sleep(drawn.uniform(0, KILL_S_MAX))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            covered += len(shown(whole)) > 1
            plain.write_plain(whole.directory, (whole.entries,), whole.layout)
            assert plain.cover(whole.directory) == "covered" and len(shown(whole)) == 2
            assert not [entry for entry in kernel.mounted() if whole.directory / plain.PLAIN in entry.point.parents]
            assert not whole.wrong() and not wrong
            kernel.unmount(whole.path, lazily=True)
    finally:
        over.set()
        reader.join()
    assert not wrong and 0 < covered < KILLS, "the kills came too early or too late"


def killed_at(step: str, when: str, work: Callable[[], object]) -> int:
    """Do this in a process that is killed before or after its first `step`; returns how it ends."""
    child = os.fork()
    if not child:
        first = getattr(plain, step)

        def last(*words: object, **options: object) -> None:
            if when == "after":
                first(*words, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(plain, step, last)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_what_uses_the_view_below_keeps_both(whole: View) -> None:
    reader = started(HOLDER, whole.path / "weights", "file")
    assert plain.cover(whole.directory) == "covered"
    with pytest.raises(Conflict):
        unmount_view(whole.path, work=whole.work)
    assert len(shown(whole)) == 2 and not whole.wrong()
    unmount_view(whole.path, work=whole.work, force=True)
    assert not kernel.mounted_at(whole.path) and not list(whole.work.iterdir())
    assert reader.communicate()[0] == whole.files["weights"]


def test_what_uses_the_cover_keeps_both(whole: View) -> None:
    assert plain.cover(whole.directory) == "covered"
    reader = started(HOLDER, whole.path / "weights", "file")
    with pytest.raises(Conflict):
        unmount_view(whole.path, work=whole.work)
    assert len(shown(whole)) == 2
    assert reader.communicate()[0] == whole.files["weights"]
    unmount_view(whole.path, work=whole.work)
    assert not kernel.mounted_at(whole.path) and not list(whole.work.iterdir())


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A directory whose mounts are seen in other namespaces as well, unless these want none."""
    place = tmp_path / "shared"
    place.mkdir()
    kernel.mount(place, place, "", kernel.MS_BIND)
    kernel.mount("none", place, "", MS_SHARED)
    (place / "records").mkdir()
    yield place
    kernel.unmount(place)


@pytest.mark.slow
@pytest.mark.parametrize("propagation", ["private", "slave"])
def test_another_namespace_keeps_the_view_or_sees_the_cover(tmp_path: Path, shared: Path, propagation: str) -> None:
    view = filled(View(FANOTIFY, shared / "records", shared / "view"))
    want = tmp_path / "want"
    want.mkdir()
    for name, data in view.files.items():
        (want / name).write_bytes(data)
    try:
        elsewhere = ("unshare", "--mount", f"--propagation={propagation}")
        reader = started(READER, view.path, want, before=elsewhere)
        below = os.stat(view.path).st_dev
        assert plain.cover(view.directory) == "covered"
        cover = os.stat(view.path).st_dev
        out, _ = reader.communicate()
        assert reader.returncode == 0 and below != cover
        assert int(out) == (below if propagation == "private" else cover)
        assert plain.cover(view.directory) == "covered"
        unmount_view(view.path, work=view.work)
        assert not list(view.work.iterdir())
    finally:
        view.close()
