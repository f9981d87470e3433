"""Each way to fill a lazy view: whatever is killed meanwhile, no byte is wrong."""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lazy_view_rig import LIMIT_S, Show, cat, until

from p2pdist.mount import kernel
from p2pdist.mount.lazy.fill_method import FANOTIFY, FUSE, FillMethod, supervise
from p2pdist.mount.lazy.fuse import Filled
from p2pdist.mount.lazy.trial import attempt, choose
from p2pdist.mount.supervisor.protocol import connect
from p2pdist.mount.views import unmount_view

KILLS = 12 if os.environ.get("P2PDIST_EXAMPLES") != "many" else 200


def test_a_read_waits_and_holds_up_no_other(show: Show) -> None:
    view = show()
    shared = {cell for name in view.files if name != "weights" for cell in view.cells_of[name]}
    held = set(view.cells_of["weights"]) - shared
    view.held = lambda offset: offset // view.cell_bytes in held
    view.serve()
    first = cat(view.path / "weights")
    until(lambda: any(view.held(offset) for offset, _ in view.asked), "the agent does not hear of the reader")
    others = [name for name in view.files if name != "weights"]
    assert view.wrong(others) == []
    assert first.poll() is None
    view.held = lambda offset: False
    assert first.communicate()[0] == view.files["weights"]


def test_once_all_is_filled_nothing_stands_between(show: Show) -> None:
    view = show()
    reader = cat(view.path / "weights")
    view.fill()
    assert reader.communicate()[0] == view.files["weights"]
    until(lambda: not view.processes(), "what supervised it goes on")
    assert view.wrong() == []
    view.forget()
    assert view.wrong() == []
    unmount_view(view.path, work=view.work)


def test_readers_wait_while_no_agent_runs_and_the_next_one_serves_them(show: Show) -> None:
    view = show()
    view.held = lambda offset: True
    view.serve()
    reader = cat(view.path / "weights")
    until(lambda: view.asked, "the agent does not hear of the reader")
    view.leave()
    late = cat(view.path / "small3")
    assert reader.poll() is None
    view.held = lambda offset: False
    view.serve()
    assert reader.communicate()[0] == view.files["weights"]
    assert late.communicate()[0] == view.files["small3"]


def test_an_agent_is_let_in_while_readers_have_all_descriptors(way: FillMethod, show: Show) -> None:
    """Else nothing would answer them. A reader of FUSE has none. Nor is there a descriptor more for
    a guard than the one that was killed leaves."""
    if way is FUSE:
        pytest.skip("its readers have no descriptors")
    view = show()
    supervisor, guard = view.pair()
    until(lambda: not accepted(supervisor), "it keeps the connection of whoever looked whether it answers")
    before = len(descriptors(supervisor))
    reader = cat(view.path / "weights")
    until(lambda: len(descriptors(supervisor)) > before, "it does not hear of the reader")
    until(lambda: free_descriptor(supervisor) == len(descriptors(supervisor)), "a number is left free")
    for pid in (supervisor, guard):
        free = free_descriptor(pid)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, free))
    assert view.answers()
    assert view.pair() == (supervisor, guard)
    os.kill(guard, signal.SIGKILL)
    until(lambda: guard not in view.processes(), "it is not dead")
    assert view.pair()[0] == supervisor
    reader.kill()
    reader.communicate()


def descriptors(pid: int) -> set[int]:
    return set(map(int, os.listdir(f"/proc/{pid}/fd")))


def accepted(pid: int) -> list[str]:
    """The connections that it has accepted at a socket with a path (unix(7), /proc/net/unix)."""
    mine = set[str]()
    for number in descriptors(pid):
        with suppress(FileNotFoundError):  # it has closed it
            mine.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    rows = (line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines())
    return [row[6] for row in rows if len(row) == 8 and f"socket:[{row[6]}]" in mine and row[3] == "00000000"]


def free_descriptor(pid: int) -> int:
    """The number that the next one gets."""
    used = descriptors(pid)
    return next(number for number in itertools.count() if number not in used)


def test_a_supervisor_goes_on_where_no_guard_can_be_started_and_has_one_once_it_can(
    way: FillMethod, show: Show
) -> None:
    """Its end would let all readers go. A view of FUSE has its guard in another way."""
    if way is FUSE:
        pytest.skip("the process that serves it is its own guard")
    view = show()
    supervisor, guard = view.pair()
    soft, hard = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (5, hard))  # what it has open stays so
    os.kill(guard, signal.SIGKILL)
    until(lambda: "no guard can be started" in view.log(), "it does not say so")
    assert view.processes() == [supervisor]
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (soft, hard))
    assert view.pair()[0] == supervisor
    view.serve()
    assert view.wrong() == []
    assert view.log().count("no guard can be started") == 1


def test_a_reader_for_whom_nothing_comes_gets_an_error_and_a_later_one_what_came(show: Show) -> None:
    view = show(limit_s=0.3)
    got, errors = cat(view.path / "weights").communicate()
    assert got == b"" and b"Input/output error" in errors
    greeting = connect(view.directory)
    assert greeting.refused >= 1
    greeting.connection.close()
    os.close(greeting.filler)
    os.close(greeting.group)
    assert "gets EIO" in view.log()
    view.serve()
    assert view.wrong() == []


def test_readers_are_let_go_when_the_view_is_unmounted(show: Show) -> None:
    view = show()
    view.held = lambda offset: True
    view.serve()
    reader = cat(view.path / "weights")
    until(lambda: view.asked, "the agent does not hear of the reader")
    unmount_view(view.path, work=view.work, force=True)
    assert list(view.path.parent.glob("view*")) == []
    view.held = lambda offset: False
    assert reader.communicate()[0] == view.files["weights"]


def test_what_waits_can_be_killed(show: Show) -> None:
    view = show()
    view.held = lambda offset: True
    view.serve()
    readers = [cat(view.path / name) for name in view.files]
    until(lambda: len(view.asked) >= 3, "the agent does not hear of the readers")
    for reader in readers:  # all of them: one may wait for what another is reading
        reader.kill()
    for reader in readers:
        reader.communicate()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_random_kills_leave_no_wrong_byte(way: FillMethod, show: Show) -> None:
    """Of one process, or for FUSE of both; each time with readers that wait."""
    view, drawn = show(), random.Random(11)
    view.serve()
    names = list(view.files)
    readers: list[tuple[str, subprocess.Popen[bytes]]] = []
    for _ in range(KILLS):
        view.forget()
        readers += [(name, cat(view.path / name)) for name in drawn.choices(names, k=6)]
        time.sleep(drawn.random() / 50)
        before = set(view.processes())
        victims = before if way is FUSE and drawn.random() < 0.3 else set(drawn.sample(sorted(before), k=1))
        for victim in victims:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        if way is FANOTIFY:
            until(lambda: len(set(view.processes()) - victims) >= 2, "nothing guards")  # noqa: B023
        else:
            until(lambda: not victims & set(view.processes()), "it is not dead")  # noqa: B023
            if not view.processes():
                supervise(view.directory, LIMIT_S)
            until(view.answers, "nothing serves")
    for name, reader in readers:
        got, errors = reader.communicate()
        assert view.files[name].startswith(got), name
        assert got == view.files[name] or b"Input/output error" in errors, name
    assert view.wrong() == []


def test_the_trial_says_what_works_and_why_not(way: FillMethod, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attempt(way, work) == ""
    assert choose(work, [way.name]).method is way
    assert list(work.iterdir()) == []
    if way is FUSE:
        monkeypatch.setenv("FUSE_LIBRARY_NAME", "nothing-of-this-name")
        choice = choose(work, [way.name])
        assert choice.method is None and "libfuse 3 is not installed" in choice.line


@given(
    st.integers(1, 40_000), st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 20_000)), max_size=6), st.data()
)
def test_filled_is_what_was_marked_in_whole_blocks(
    size: int, marks: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Compared with a set of bytes. Of a block that is marked in part nothing is filled."""
    filled, marked = Filled(size), set()
    for offset, count in marks:
        if offset < size:
            count = min(count, size - offset)
            filled.mark(offset, count)
            marked.add((offset, offset + count))
    blocks = {
        block
        for block in range(-(-size // 4096))
        for begin, end in marked
        if begin <= block * 4096 and min(size, block * 4096 + 4096) <= end
    }
    offset = data.draw(st.integers(0, size - 1))
    count = data.draw(st.integers(1, size - offset))
    wanted = range(offset // 4096, -(-(offset + count) // 4096))
    assert filled.has(offset, count) == all(block in blocks for block in wanted)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: loop devices")
def test_a_loop_device_of_another_name_is_left_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() * 8192)
    with kernel.loop_device(tmp_path / "a", name=b"mine") as device:
        with pytest.raises(OSError, match="another"):
            kernel.change_backing(device, b"yours", tmp_path / "b")
        assert Path(device).read_bytes() == b"a" * 8192
        kernel.change_backing(device, b"mine", tmp_path / "b")
        assert Path(device).read_bytes() == b"b" * 8192


def test_a_guard_that_takes_over_gives_each_reader_its_bytes(way: FillMethod, show: Show) -> None:
    """A reader may have the number of a descriptor that the supervisor had and let go since the
    guard began, such as that of an agent."""
    if way is FUSE:
        pytest.skip("its readers have no descriptors")
    view = show()
    supervisor, guard = view.pair()  # which connects, as an agent that goes away again
    reader = cat(view.path / "weights")
    until(lambda: event_descriptors(supervisor), "it does not wait")
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: guard in view.processes() and len(view.processes()) == 2, "nothing guards")
    view.serve()
    assert reader.communicate() == (view.files["weights"], b"")
    assert view.wrong() == []
    assert view.pair()[0] == guard and view.log().count("takes its place") == 1


def event_descriptors(pid: int) -> list[int]:
    """Those that came to it with readers."""
    found = []
    for number in descriptors(pid):
        with suppress(OSError):
            flags = int(Path(f"/proc/{pid}/fdinfo/{number}").read_text().split("flags:")[1].split()[0], 8)
            device = os.readlink(f"/proc/{pid}/fd/{number}").endswith("/device")
            found += [number] if device and flags & os.O_ACCMODE == os.O_RDONLY else []
    return found


def test_a_view_out_of_sight_ends_with_its_last_user(way: FillMethod, show: Show) -> None:
    """Also where no agent is there to say so."""
    view = show()
    view.serve()
    user = subprocess.Popen(["sleep", "100"], cwd=view.path)
    try:
        assert view.wrong(["small3"]) == []
        unmount_view(view.path, work=view.work, force=True)
        view.leave()
        time.sleep(1.5)
        assert len(view.processes()) == 2
    finally:
        user.kill()
        user.wait()
    until(lambda: not view.processes(), "what served it goes on")
