"""How a lazy view is filled once its package is here, and what reads count as: with a real store
and files; the limit of file sizes of the process stands for a full disk."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import random
import resource
import socket
import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from failing_disk import failing_disks
from lazy_rig import FetchedPack

from p2pdist.agent.lazy import filler, readahead, views
from p2pdist.agent.lazy import view as lazy_view
from p2pdist.agent.lazy.chunks import Chunks
from p2pdist.agent.lazy.images import LazyImages
from p2pdist.agent.lazy.readers import Stalls
from p2pdist.agent.lazy.traces import Start, Traces
from p2pdist.agent.lazy.view import LazyView
from p2pdist.agent.lazy.views import LazySettings, LazyViews
from p2pdist.agent.pull.blob import BlobPull
from p2pdist.agent.pull.packages import Package
from p2pdist.model.device import CELL_BYTES, Cells, DeviceLayout
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Conflict, DiskFull, Unavailable
from p2pdist.model.manifest import Config, Descriptor, Manifest, parse_reference
from p2pdist.model.messages import Priority, PullRequest, PullStatus
from p2pdist.model.pieces import PieceLayout, PieceList
from p2pdist.model.selection import Selection
from p2pdist.model.trace import Trace
from p2pdist.model.tree import File, content_hash
from p2pdist.mount.lazy import fill_method
from p2pdist.mount.lazy.fuse import IMAGE
from p2pdist.mount.lazy.view import ARRANGED, is_filled
from p2pdist.mount.records import CHANGE_S_MAX, changing
from p2pdist.mount.supervisor.process import LOG
from p2pdist.mount.supervisor.protocol import ANSWER, DEVICE, GREETING, NOTICE, ORDER, READ, SOCKET, WHOLE
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore

CONTENTS = [random.Random(number).randbytes(100_000) for number in range(8)]
CELLS = Cells(headed=True)
Absent: Any = None


def whole_view(directory: Path) -> LazyView:
    """A view of a package that is here, whose device is empty."""
    store = BlobStore(directory / "store")
    for data in CONTENTS:
        assert store.objects.add(content_hash(data), data)
    view = LazyView(store, Absent, Absent, "app:v1", 60.0, Stalls(), CELLS)
    view.layout = view._filler.layout = DeviceLayout({content_hash(data): len(data) for data in CONTENTS}, {})
    view._arranged.set()
    view._located.set()
    view._pulled.set()
    with (directory / DEVICE).open("xb") as device:
        device.truncate(CELLS.file_size(view.layout.size))
    view._filler.device.take(os.open(directory / DEVICE, os.O_RDWR), os.open(os.devnull, os.O_RDONLY))
    return view


async def test_a_view_is_filled_once_a_full_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(filler, "AGAIN_S", 0.01)
    view = whole_view(tmp_path)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setblocking(False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with here, there:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * CELL_BYTES, limits[1]))
        try:
            filling = asyncio.create_task(view._fill(tmp_path, here))
            while not filling.done() and "still lacks something" not in caplog.text:
                await asyncio.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        await filling
    assert view.whole and is_filled(tmp_path)
    check_device(tmp_path)
    await view.close()


def check_device(directory: Path) -> None:
    """The device of a view holds all contents."""
    device, at = (directory / DEVICE).read_bytes(), 0
    for data in CONTENTS:
        places = CELLS.places(at, len(data))
        assert b"".join(device[offset : offset + end - begin] for offset, begin, end in places) == data
        at += -(-len(data) // 4096) * 4096


@pytest.mark.root
async def test_a_view_whose_disk_lost_what_it_was_given_is_filled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next flush succeeds, and programs would read zeros once the kernel lets go of the
    pages."""
    monkeypatch.setattr(filler, "AGAIN_S", 0.01)
    place = tmp_path / "view"
    for name in ("view", "elsewhere"):
        (tmp_path / name).mkdir()
    with failing_disks(tmp_path) as make:
        disk = make(place)
        (place / "store").symlink_to(tmp_path / "elsewhere")
        view = whole_view(place)
        disk.zero(place / DEVICE)
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here.setblocking(False)
        with here, there:
            with disk.failing():
                filling = asyncio.create_task(view._fill(place, here))
                while not filling.done() and "still lacks something" not in caplog.text:
                    await asyncio.sleep(0.01)
            await filling
        assert view.whole and is_filled(place)
        await view.close()
        disk.forget()
        check_device(place)


async def test_what_was_being_written_as_a_flush_failed_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that wrote it says so only after the flush has failed, which may have been about
    it. A caller that came afterwards waits for the second time, too."""
    view, loop = whole_view(tmp_path), asyncio.get_running_loop()
    filling, device = view._filler, view._filler.device
    assert view.layout is not None
    cells, wrote, failed = CELLS.holding(0, view.layout.size), asyncio.Event(), threading.Event()
    finish = device.finish

    def finish_late(finished: Iterable[int]) -> None:
        finish(finished)
        loop.call_soon_threadsafe(wrote.set)
        assert failed.wait(60.0)

    def lose() -> None:
        os.pwrite(device.held[0], bytes(CELLS.file_size(view.layout.size)), 0)
        raise OSError(errno.EIO, "lost")

    writers = {
        cells[0]: filling.fill_in_order(cells[:2], {}),
        cells[2]: filling.fill_from_objects(cells[2:4]),
        cells[4]: filling.fill_cell(cells[4]),
    }
    with monkeypatch.context() as patched:
        patched.setattr(device, "finish", finish_late)
        patched.setattr(device, "flush", lose)
        for cell, writer in writers.items():
            wrote.clear()
            task = asyncio.ensure_future(writer)
            await wrote.wait()
            with pytest.raises(OSError):
                await filling.flush()
            joined = asyncio.create_task(filling.fill_cell(cell))
            await asyncio.sleep(0)
            failed.set()
            await asyncio.gather(task, joined)
            offset, head = CELLS.head(cell)
            assert filling.has_cell(cell) and os.pread(device.held[0], len(head), offset) == head
            failed.clear()
    await filler.fill_all(filling, cells)
    check_device(tmp_path)
    await view.close()


async def test_a_read_that_found_everything_is_no_miss(tmp_path: Path) -> None:
    """Also of an image behind the device, and of what an earlier agent has filled."""
    view = whole_view(tmp_path)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setblocking(False)
    with here:
        listening = asyncio.create_task(view.readers.listen(here))
        with there:
            there.send(NOTICE.pack(READ, 0, 0, 4096))
            there.send(NOTICE.pack(READ, 0, 1 << 30, 4096))
        await listening
    status = await asyncio.to_thread(view.status)  # as metrics ask for it
    assert status.misses == 0 and status.age_s >= 0.0 and status.steps == {}
    await view.close()


class _Store:
    """Fetches blobs of a store that are begun there, and of which nothing comes."""

    def __init__(self, store: BlobStore, pieces: PieceList) -> None:
        self.store, self.pieces = store, pieces

    async def fetch(
        self, layer: Descriptor, priority: Priority, selection: Selection | None
    ) -> tuple[Blob, BlobPull | None]:
        return self.store.begin(layer.digest, self.pieces), None


async def test_an_image_that_was_evicted_under_its_view_is_not_taken_for_another_file(tmp_path: Path) -> None:
    """While no agent ran, or before it held it: what comes now is not in the file of the view."""
    data = CONTENTS[0]
    layout = PieceLayout(len(data), 1 << 16)
    cuts = [data[layout.offset(piece) :][: layout.length(piece)] for piece in range(layout.count)]
    pieces = PieceList(layout, b"".join(map(content_hash, cuts)))
    store = BlobStore(tmp_path / "store")
    layer = Descriptor("image", digest_of(data), len(data))
    (tmp_path / "view").mkdir()

    async def images() -> LazyImages:
        found = LazyImages(_Store(store, pieces))
        await found.begin([layer], 4096)
        return found

    before = await images()
    os.link(os.readlink(before.paths()[0]), tmp_path / f"view/{IMAGE}1")
    before.directory = tmp_path / "view"
    await before.bring(4096, 100, [])
    before.close()

    again = await images()  # of the next agent
    again.directory = tmp_path / "view"
    await again.bring(4096, 100, [])
    again.close()

    store.drop_partial(layer.digest)
    late = await images()
    late.directory = tmp_path / "view"
    with pytest.raises(Conflict):
        await late.bring(4096, 100, [])
    (tmp_path / f"view/{IMAGE}1").unlink()  # out of sight
    with pytest.raises(Conflict):
        late.check()
    late.close()
    store.close()


async def test_a_view_that_is_whole_keeps_no_trees(tmp_path: Path) -> None:
    """It may be shown for months: served over the supervisor's protocol until that has ended."""
    view = whole_view(tmp_path)
    layout = weakref.ref(view.layout)
    assert view.layout is not None
    entries = tuple(File(b"%d" % at, 0o644, 0, len(data), content_hash(data)) for at, data in enumerate(CONTENTS))
    view.layers, view._bytes_content = [entries], view.layout.bytes_content
    view._start = Start(Traces(Absent), "app:v1", "train")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener:
        listener.bind(str(tmp_path / SOCKET))
        listener.listen(1)
        view.serve(tmp_path)
        supervisor, _ = await asyncio.to_thread(listener.accept)
    with supervisor, (tmp_path / DEVICE).open("r+b") as device:
        socket.send_fds(supervisor, [NOTICE.pack(GREETING, 0, 0, 0)], [device.fileno(), device.fileno()])
        assert await asyncio.to_thread(supervisor.recv, ORDER.size) == ORDER.pack(WHOLE, 0, 0)
    while layout() is not None:
        gc.collect()
        await asyncio.sleep(0.01)
    assert view.layers == []
    total = sum(map(len, CONTENTS))
    assert (view.status().whole, view.status().bytes_total, view.status().bytes_filled) == (True, total, total)
    await view.close()


async def test_views_that_go_while_the_agent_stops_do_not_end_its_stop(tmp_path: Path) -> None:
    lazy = LazyViews(Absent, Absent, Absent, Absent, Traces(Absent), tmp_path, LazySettings())
    for number in range(3):
        (tmp_path / f"{number}").mkdir()
        lazy.handed_out(f"/{number}", whole_view(tmp_path / f"{number}"))
    await asyncio.gather(lazy.close(), *(lazy.unmounted(f"/{number}", in_use=False) for number in (0, 1, 2)))
    assert lazy.all() == []


class _Pulls:
    """Pulls that plan and fail, one after the other."""

    def __init__(self, package: Package) -> None:
        self.package, self.asked = package, list[str]()

    def start(self, request: PullRequest, *, planned: Any) -> Any:
        self.asked.append(request.package or "")
        planned(self.package, (), {})
        task = asyncio.create_task(asyncio.sleep(0))
        status = PullStatus("1", "failed", "team/app:v1")
        error = Unavailable("storage does not answer")
        return SimpleNamespace(task=task, error=error, package=None, status=lambda: status)


async def test_a_pull_that_is_tried_again_is_of_the_version_that_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tag may have moved meanwhile."""
    monkeypatch.setattr(lazy_view, "PULL_AGAIN_S", 0.01)
    layer = Descriptor("image", digest_of(CONTENTS[0]), len(CONTENTS[0]))
    package = Package(parse_reference("team/app:v1"), digest_of(b""), Manifest(Absent, (layer,), ()), Config())
    pulls: Any = _Pulls(package)
    view = LazyView(BlobStore(tmp_path), pulls, Absent, "team/app:v1", 60.0, Stalls(), CELLS)
    view.begin()
    while len(pulls.asked) < 3:
        await asyncio.sleep(0.01)
    pinned = f"team/app@{package.digest}"
    assert pulls.asked[:3] == ["team/app:v1", pinned, pinned]
    await view.close()


async def test_a_view_of_an_earlier_version_is_filled_as_it_lies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says by which rule; what another version alone knows is not filled."""
    package = Package(parse_reference("team/app:v1"), digest_of(b""), Manifest(Absent, (), ()), Config())
    pulls: Any = _Pulls(package)
    lazy = LazyViews(BlobStore(tmp_path / "store"), Absent, pulls, Absent, Traces(Absent), tmp_path, LazySettings())
    for name, file, text in (
        ("1", "", ""),
        ("2", ARRANGED, "2"),
        ("9", ARRANGED, "9"),
        ("way", fill_method.METHOD_FILE, "other"),
    ):
        (tmp_path / name).mkdir()
        if file:
            (tmp_path / name / file).write_text(text)
        lazy.resume(f"/{name}", "team/app:v1", tmp_path / name)
    assert {path: view.arrangement for path, view in lazy._views.items()} == {"/1": 1, "/2": 2}
    assert "/9 is not filled" in caplog.text and "/way is not filled" in caplog.text
    await lazy.close()


async def test_a_host_without_a_way_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk may have been full, or its records not there yet."""
    monkeypatch.setattr(views, "TRIED_AGAIN_S", 0.01)
    work = tmp_path / "none" / "records"
    lazy = LazyViews(Absent, Absent, Absent, Absent, Traces(Absent), work, LazySettings(ways=("fanotify",)))
    manifest = Manifest(Absent, (), ())
    reasons = set[str]()
    for _ in range(2):
        with pytest.raises(Conflict) as refused:
            await lazy.fill_method(manifest)
        reasons.add(str(refused.value))
        assert len(lazy._choices) == 1
        while lazy._choices:
            await asyncio.sleep(0.01)
    assert len(reasons) == 1
    await lazy.close()


def test_a_supervisor_that_does_not_begin_in_time_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host with too much to do: the package is shown without it."""
    monkeypatch.setattr(fill_method, "READY_S", 0.0001)
    with pytest.raises(Unavailable, match="has not begun"):
        fill_method.supervise(tmp_path, 5.0)


async def test_views_that_are_opened_count_from_the_beginning(tmp_path: Path) -> None:
    never: asyncio.Future[Package] = asyncio.get_running_loop().create_future()
    packages: Any = SimpleNamespace(find=lambda *_: never)
    lazy = LazyViews(Absent, packages, Absent, Absent, Traces(Absent), tmp_path, LazySettings())
    opened = [asyncio.create_task(lazy.open("app:v1")) for _ in range(views.VIEWS_MAX + 5)]
    while sum(task.done() for task in opened) < 5:
        await asyncio.sleep(0.01)
    assert all(isinstance(task.exception(), Conflict) for task in opened if task.done())
    never.set_exception(Unavailable("storage does not answer"))
    await asyncio.gather(*opened, return_exceptions=True)
    assert not lazy._opening


class _Repair:
    """Pulls that bring one content back."""

    def __init__(self, store: BlobStore, data: bytes) -> None:
        self.store, self.data, self.asked = store, data, list[str]()

    def start(self, request: PullRequest, *, planned: Any) -> Any:
        self.asked.append(request.package or "")
        assert self.store.objects.add(content_hash(self.data), self.data)
        package = Package(parse_reference("app:v1"), digest_of(b""), Manifest(Absent, (), ()), Config())
        status = PullStatus("1", "done", "app:v1")
        task = asyncio.create_task(asyncio.sleep(0))
        return SimpleNamespace(task=task, error=None, package=package, status=lambda: status)


async def test_an_object_that_is_damaged_after_the_pull_is_pulled_again(tmp_path: Path) -> None:
    """An earlier agent mounted the view, so no pack is known that holds the content."""
    view = whole_view(tmp_path)
    pulls = _Repair(view._store, CONTENTS[3])
    view._pulls = pulls  # type: ignore[assignment]
    path = view._store.objects.path(content_hash(CONTENTS[3]))
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(bytes([CONTENTS[3][0] ^ 1]))
    assert view.layout is not None
    cells = view._filler.device.cells.holding(0, view.layout.size)
    async with asyncio.timeout(60):
        await filler.keep_filling(view._filler, cells, lambda: None, "app:v1")
        await view._pulled.wait()
    assert pulls.asked == ["app:v1"]
    assert all(map(view._filler.has_cell, cells))
    await view.close()


class _Lists:
    """A pull whose lists of files are here, and which then computes what is missing."""

    def __init__(self, package: Package) -> None:
        self.package, self.planned_at_last = package, asyncio.Event()

    def start(self, request: PullRequest, *, planned: Any) -> Any:
        pull = SimpleNamespace(error=None, package=None, status=lambda: PullStatus("1", "running", "app:v1"))

        async def run() -> None:
            await pull.listed(self.package)
            planned(self.package, (Absent,), {})
            self.planned_at_last.set()
            await asyncio.Event().wait()

        pull.task = asyncio.create_task(run())
        return pull


@pytest.mark.parametrize("ends", ["shown", "closed", "late", "prepared"])
async def test_a_view_is_shown_before_what_is_missing_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Which takes as long again, but waits neither for a view that will not be shown nor for
    ever. Where contents can be filled in before, it waits for what the trace names, too."""
    monkeypatch.setattr(lazy_view.Whereabouts, "of", lambda *_: lazy_view.Whereabouts())
    monkeypatch.setattr(lazy_view, "SHOWN_S_MAX", 0.01 if ends == "late" else 600.0)
    layer = Descriptor("image", digest_of(CONTENTS[0]), len(CONTENTS[0]))
    pulls: Any = _Lists(Package(parse_reference("app:v1"), digest_of(b""), Manifest(Absent, (layer,), ()), Config()))
    view = LazyView(BlobStore(tmp_path), pulls, Absent, "app:v1", 60.0, Stalls(), CELLS)
    view.begin()
    assert await view.known == pulls.package
    assert ends == "late" or not pulls.planned_at_last.is_set()
    if ends in ("shown", "prepared"):
        if ends == "prepared":
            view._located.set()
            view.sight.traced = True
        view.sight.show()
        if ends == "prepared":
            for _ in range(5):
                await asyncio.sleep(0)
            assert not pulls.planned_at_last.is_set()
            view.sight.prepared.set()
    elif ends == "closed":
        await view.close()
    async with asyncio.timeout(60):
        await pulls.planned_at_last.wait()
    assert view._located.is_set() and not view._arranged.is_set()
    await view.close()


class _FullDisk(_Lists):
    """A pull that does not fit, which is known once it is computed what is missing."""

    def start(self, request: PullRequest, *, planned: Any) -> Any:
        pull = super().start(request, planned=lambda *_: None)
        pull.task.cancel()
        pull.error = DiskFull("/store", needed=9, free=1, capacity=5)

        async def run() -> None:
            await pull.listed(self.package)

        pull.task = asyncio.create_task(run())
        return pull


async def test_a_reader_of_what_does_not_fit_is_told_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The view is shown by then."""
    layer = Descriptor("image", digest_of(CONTENTS[0]), len(CONTENTS[0]))
    package = Package(parse_reference("app:v1"), digest_of(b""), Manifest(Absent, (layer,), ()), Config())
    view = LazyView(BlobStore(tmp_path), _FullDisk(package), Absent, "app:v1", 0.01, Stalls(), CELLS)  # type: ignore[arg-type]
    view.begin()
    await view.known
    view.sight.show()
    while "does not come" not in caplog.text:
        await asyncio.sleep(0.01)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        await view.readers.serve(here, 7, 0, 4096)
        assert there.recv(ORDER.size) == ORDER.pack(ANSWER, 7, errno.EIO)
    (line,) = [record.getMessage() for record in caplog.records if "gets EIO" in record.getMessage()]
    assert DiskFull("/store", needed=9, free=1, capacity=5).what in line
    await view.close()


async def test_what_lies_behind_a_miss_is_filled_and_the_next_window_is_fetched(tmp_path: Path) -> None:
    """Around a miss what came with it, without a request; then a window that a reader has come to
    the middle of is followed by one of twice its length."""
    count = 200
    contents = [random.Random(number).randbytes(CELL_BYTES) for number in range(count)]
    view = whole_view(tmp_path)
    layout = DeviceLayout({content_hash(data): len(data) for data in contents}, {})
    os.truncate(tmp_path / DEVICE, CELLS.file_size(layout.size))
    view.layout = view._filler.layout = layout
    packs = FetchedPack(view._store, contents)
    view._filler.chunks = Chunks(view._store, packs)
    view._filler.chunks.whereabouts = packs.whereabouts

    async def ahead() -> set[int]:
        await asyncio.gather(*view.readers.ahead._tasks)
        return {cell for cell in range(count) if view._filler.has_cell(cell)}

    with packs.blob.held():
        near = readahead.NEAR
        for piece in range(CELL_BYTES * (1 + near) // (1 << 16) + 1):
            packs.blob.write(piece, packs.cuts[piece])
        await view._filler.fill_cell(3)
        view.readers.ahead.missed([3])
        assert await ahead() == set(range(1 + near)) and packs.asked == []
        view.readers.ahead.missed([0])
        view.readers.read(range(1 + near // 2, 2 + near // 2))
        assert await ahead() == set(range(1 + 3 * near))
        assert {prefetch for prefetch, _ in packs.asked} == {True}
        view.readers.read(range(1 + near // 2, 2 + near // 2))  # again: nothing more
        assert await ahead() == set(range(1 + 3 * near))
        cell = 150
        await view._filler.fill_cell(cell)
        assert packs.asked[-1][0] is False, "a reader waits for it"
        for _ in range(10):
            view.readers.ahead.missed([count - 1])
        assert await ahead() == {*range(1 + 3 * near), cell}
        view.readers.ahead.fetches, asked = False, len(packs.asked)
        view.readers.ahead.missed([cell])
        view.readers.read(range(cell + 1 + near // 2, cell + 2 + near // 2))
        assert await ahead() == {*range(1 + 3 * near), cell} and len(packs.asked) == asked
    device = (tmp_path / DEVICE).read_bytes()
    for number in (*range(1 + 3 * near), cell):
        begin = number * CELLS.file_bytes + CELLS.file_bytes - CELL_BYTES
        assert device[begin : begin + CELL_BYTES] == contents[number]
    await view.close()


async def test_beside_a_trace_nothing_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What readers come to is in the trace; what lies behind that would come before it."""
    view, fetches = whole_view(tmp_path), []

    async def fill(view: LazyView, trace: Trace) -> None:
        fetches.append(view.readers.ahead.fetches)
        if len(fetches) == 2:
            raise Unavailable("the view is gone", remedy="")

    monkeypatch.setattr(lazy_view, "_fill_in_order_of", fill)
    view.layers = [()]
    view._arranged.set()
    for trace, wanted in ((None, []), (Trace(), [False]), (Trace(), [False, False])):
        start = Start(Traces(Absent), "app:v1", "train")
        start.trace.set_result(trace)
        with suppress(Unavailable):
            await lazy_view._fill_ahead(view, start)
        assert (fetches, view.readers.ahead.fetches) == (wanted, True)
    await view.close()


async def test_a_view_that_is_being_unmounted_gets_no_other_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Removing what programs wrote to it may take long, after the supervisor has ended."""
    monkeypatch.setattr(lazy_view, "TRY_S", 0.01)
    started: list[Path] = []
    monkeypatch.setattr(lazy_view, "supervise", lambda directory, *_, **options: started.append(directory))
    connects, connect = [0], lazy_view.protocol.connect

    def counted(directory: Path) -> Any:
        connects[0] += 1
        return connect(directory)

    monkeypatch.setattr(lazy_view.protocol, "connect", counted)
    view = whole_view(tmp_path)
    directory = tmp_path / "view"
    directory.mkdir()
    with changing(directory):
        view.serve(directory)
        while connects[0] <= lazy_view.TRIES:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert started == []
        directory.rmdir()
    while not view.sight.gone.is_set():
        await asyncio.sleep(0.01)
    assert started == [] and not directory.exists() and "supervis" not in caplog.text
    await view.close()


async def test_a_supervisor_that_does_not_begin_keeps_no_unmount_from_its_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unmount waits for the view as long as anything may change it."""
    assert lazy_view.REVIVED_S < CHANGE_S_MAX
    monkeypatch.setattr(lazy_view, "REVIVED_S", 0.5)
    slow, directory = tmp_path / "slow", tmp_path / "view"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    directory.mkdir()
    monkeypatch.setattr(sys, "executable", str(slow))
    reviving = asyncio.create_task(asyncio.to_thread(lazy_view._revive, directory, OSError("it is gone"), 5.0, ()))
    while not (directory / LOG).exists():
        await asyncio.sleep(0.01)

    def change() -> None:
        with changing(directory):
            pass

    await asyncio.to_thread(change)
    await reviving


async def test_a_view_out_of_sight_counts_until_nothing_serves_it(tmp_path: Path) -> None:
    lazy = LazyViews(Absent, Absent, Absent, Absent, Traces(Absent), tmp_path, LazySettings())
    view, released = whole_view(tmp_path), asyncio.Event()
    view.images._holds.callback(released.set)
    directory = tmp_path / "view"
    directory.mkdir()
    lazy._serve("/v", view, directory)
    await lazy.unmounted("/v", in_use=True)
    assert len(lazy.all()) == 1 and lazy.status("/v") is None and not released.is_set()
    directory.rmdir()
    while lazy.all():
        await asyncio.sleep(0.01)
    assert released.is_set()  # its images may be evicted
    await lazy.close()


async def test_what_fails_after_its_reader_was_refused_leaves_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reader's line in the log says why; asyncio writes of each failure that no caller waits
    for."""
    view = whole_view(tmp_path)
    cells, began, fail = view._filler, asyncio.Event(), asyncio.Event()

    async def failing(*_: object) -> bytes:
        began.set()
        await fail.wait()
        raise Unavailable("nothing comes")

    monkeypatch.setattr(cells.chunks, "in_pack", lambda chunk: False)
    monkeypatch.setattr(cells.chunks, "read", failing)
    reader = asyncio.create_task(filler.keep_trying(cells, 0, []))
    await began.wait()
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    fail.set()
    while cells._finishing or cells._filling:
        await asyncio.sleep(0)
    del reader  # whose traceback leads to the task
    gc.collect()
    assert "never retrieved" not in caplog.text
    await view.close()


async def test_views_that_are_open_and_not_mounted_yet_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = LazyViews(Absent, Absent, Absent, Absent, Traces(Absent), tmp_path, LazySettings())
    made: list[LazyView] = []

    async def opened(*_: object) -> tuple[LazyView, Any]:
        (tmp_path / f"{len(made)}").mkdir()
        made.append(whole_view(tmp_path / f"{len(made)}"))
        return made[-1], Absent

    monkeypatch.setattr(lazy, "_open", opened)
    for _ in range(views.VIEWS_MAX):
        await lazy.open("app:v1")
    with pytest.raises(Conflict):
        await lazy.open("app:v1")
    made[1]._pulled.clear()  # it stays one that is filled
    lazy.handed_out("/1", made[1])
    with pytest.raises(Conflict):
        await lazy.open("app:v1")
    await made[0].close()
    await lazy.open("app:v1")
    with pytest.raises(Conflict):
        await lazy.open("app:v1")
    await asyncio.gather(lazy.close(), *(view.close() for view in made))
