"""Directories as trees: what goes in, that equal trees are equal, and that a change costs what
changed."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tree_rig import listed, read_back

from p2pdist.model import tree
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, UsageError
from p2pdist.model.manifest import CATALOG_TYPE, PACK_TYPE, TREE_TYPE, parse_reference
from p2pdist.model.tree import WHOLE_MAX, Directory, File, HardLink, Symlink, Whiteout
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.pack import Packed, Settings, pack
from p2pdist.package.tree import builder
from p2pdist.package.tree.reader import BATCH_FILES, WORKERS_MAX

V1, V2, V3 = (parse_reference(text) for text in ("trainer:v1", "trainer:v2", "trainer:v3"))
TIME_NS = 1_600_000_000_123_456_789


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = tmp_path / "source"
    made.mkdir()
    return made


def age(root: Path) -> None:
    """Wait until every change below `root` is old enough to be told from a later one."""
    while time.time_ns() - max(path.lstat().st_ctime_ns for path in [root, *root.rglob("*")]) < 150_000_000:
        time.sleep(0.01)


def blobs(layout: LocalLayout) -> dict[str, int]:
    """What lies in the layout, tags and files caches included, with a size that changes when it is
    written again."""
    return {str(path): path.stat().st_mtime_ns for path in layout.directory.rglob("*") if path.is_file()}


async def pack_tree(source: Path, reference: Any, layout: LocalLayout, **options: Any) -> Packed:
    return await pack(source, reference, layout, format="tree", **options)


# -- what goes in


async def test_pages_are_no_longer_than_hosts_take(
    layout: LocalLayout, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long names and extended attributes are."""
    for number in range(100):
        (source / f"{number:03}{'n' * 200}").touch()
    for module in (tree, builder):
        monkeypatch.setattr(module, "PAGE_BYTES_MAX", 3000)
    found = await read_back(layout, packed := await pack_tree(source, V1, layout))
    assert found.trees == [listed(source)]
    assert len(found.catalogs[0].pages) > 10
    (source / "zz").write_text("more")
    again = await read_back(layout, await pack_tree(source, V2, layout))
    assert again.trees == [listed(source)]
    (source / "zz").unlink()
    assert (await pack_tree(source, V3, layout)).layers == packed.layers


async def test_a_tree_holds_what_the_directory_holds(layout: LocalLayout, source: Path) -> None:
    (source / "b").mkdir(mode=0o750)
    (source / "b/file").write_bytes(b"content")
    (source / "b.txt").write_bytes(b"")
    (source / "b-link").symlink_to("/nowhere/../at all")
    (source / "large").write_bytes(random.Random(1).randbytes(WHOLE_MAX + 1))
    (source / "large").chmod(0o555)
    (source / "whole").write_bytes(random.Random(2).randbytes(WHOLE_MAX))
    os.link(source / "large", source / "also large")
    os.utime(source / "b/file", ns=(1, TIME_NS))
    packed = await pack_tree(source, V1, layout, settings=Settings(["./run"]))
    package = await read_back(layout, packed)
    found = package.entries
    assert list(found) == [b"also large", b"b", b"b/file", b"b-link", b"b.txt", b"large", b"whole"]
    assert found[b"b"] == Directory(b"b", 0o750, (source / "b").stat().st_mtime_ns)
    assert found[b"large"] == HardLink(b"large", b"also large")
    link = found[b"b-link"]
    assert isinstance(link, Symlink)
    assert link.target == b"/nowhere/../at all"
    file = found[b"b/file"]
    assert isinstance(file, File)
    assert (file.mtime_ns, file.size, file.chunks) == (TIME_NS, 7, b"")
    for path in (b"b/file", b"b.txt", b"also large", b"whole"):
        assert package.content(path) == (source / os.fsdecode(path)).read_bytes()
    assert found[b"also large"].mode == 0o555
    assert packed.layers[0].media_type == TREE_TYPE
    assert [part.media_type for part in packed.parts] == [CATALOG_TYPE, PACK_TYPE]
    assert (packed.files, packed.bytes_total) == (4, 2 * WHOLE_MAX + 8)
    assert packed.bytes_written == sum(path.stat().st_size for path in (layout.directory / "blobs/sha256").iterdir())


async def test_an_empty_directory_is_a_tree(layout: LocalLayout, source: Path) -> None:
    packed = await pack_tree(source, V1, layout)
    assert (packed.files, packed.parts) == (0, ())
    assert (await read_back(layout, packed)).trees == [[]]


async def test_what_a_tree_cannot_carry_is_told(layout: LocalLayout, source: Path) -> None:
    """The second time too, when nothing is looked at again."""
    os.mkfifo(source / "fifo")
    (source / "program").write_bytes(b"x")
    (source / "program").chmod(0o6755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(source / "socket"))
        for _ in range(2):
            packed = await pack_tree(source, V1, layout)
            assert [(item.path, item.what) for item in packed.dropped] == [
                ("fifo", "FIFO"),
                ("program", "setgid bit"),
                ("program", "setuid bit"),
                ("socket", "socket"),
            ]
            assert packed.dropped_total == 4
            age(source)
    (entry,) = (await read_back(layout, packed)).trees[0]
    assert isinstance(entry, File)
    assert entry.mode == 0o755


@pytest.mark.root
async def test_whiteouts_and_opaque_directories_are_kept(layout: LocalLayout, source: Path) -> None:
    os.mknod(source / "gone", 0o020000, 0)
    (source / "anew").mkdir()
    os.setxattr(source / "anew", "trusted.overlay.opaque", b"y")
    alone = await pack_tree(source, V1, layout)  # there is nothing that it could hide
    assert [(item.path, item.what) for item in alone.dropped] == [("gone", "character device")]
    assert b"gone" not in (await read_back(layout, alone)).entries
    upper = await read_back(layout, await pack_tree(source, V2, layout, base=V1))
    (found,) = ({entry.path: entry for entry in tree} for tree in upper.trees[1:])
    assert found[b"gone"] == Whiteout(b"gone")
    assert found[b"anew"] == Directory(b"anew", 0o755, (source / "anew").stat().st_mtime_ns, opaque=True)
    os.mknod(source / "null", 0o020000, os.makedev(1, 3))
    packed = await pack_tree(source, V2, layout, base=V1)
    assert [item.what for item in packed.dropped] == ["character device"]


@pytest.mark.root
@pytest.mark.parametrize("form", ["tree", "squashfs"])
async def test_capabilities_of_a_program_are_left_out_and_named(
    layout: LocalLayout, source: Path, form: Literal["tree", "squashfs"]
) -> None:
    """They give rights as the setuid bit does, which is named."""
    program = source / "ping"
    program.write_bytes(b"x")
    program.chmod(0o755)
    raw = bytes.fromhex("0100000200200000000000000000000000000000")  # cap_net_raw=ep
    try:
        os.setxattr(program, "security.capability", raw)
    except OSError:
        pytest.skip("the file system of tests has no capabilities")
    packed = await pack(source, V1, layout, format=form)
    assert [(item.path, item.what) for item in packed.dropped] == [("ping", "file capabilities")]


async def test_extended_attributes_come_along_when_asked_for(layout: LocalLayout, source: Path) -> None:
    (source / "file").write_bytes(b"x")
    (source / "directory").mkdir()
    try:
        for name in ("user.b", "user.a"):
            os.setxattr(source / "file", name, name.encode())
        os.setxattr(source / "directory", "user.d", b"")
    except OSError:
        pytest.skip("no extended attributes here")
    found = (await read_back(layout, await pack_tree(source, V1, layout))).entries
    assert found[b"file"].xattrs == found[b"directory"].xattrs == ()
    found = (await read_back(layout, await pack_tree(source, V2, layout, xattrs=True))).entries
    assert found[b"file"].xattrs == ((b"user.a", b"user.a"), (b"user.b", b"user.b"))
    assert found[b"directory"].xattrs == ((b"user.d", b""),)
    os.setxattr(source / "file", "user.a", b"other")
    found = (await read_back(layout, await pack_tree(source, V3, layout, xattrs=True))).entries
    assert found[b"file"].xattrs[0] == (b"user.a", b"other")


async def test_ignored_and_chosen_paths(layout: LocalLayout, source: Path) -> None:
    for name in ("a/one", "a/two", "b/c/three", "b/d/four"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    asked: list[tuple[bytes, bool]] = []

    def ignore(path: bytes, is_directory: bool) -> bool:
        asked.append((path, is_directory))
        return path in (b"a/two", b"b/d")

    package = await read_back(layout, await pack_tree(source, V1, layout, ignore=ignore))
    assert list(package.entries) == [b"a", b"a/one", b"b", b"b/c", b"b/c/three"]
    assert (b"b/d", True) in asked
    assert (b"b/d/four", False) not in asked
    chosen = await pack_tree(source, V2, layout, only={b"b/c/three", b"a"})
    assert list((await read_back(layout, chosen)).entries) == [b"a", b"b", b"b/c", b"b/c/three"]
    none = await pack_tree(source, V3, layout, only=set())
    assert (await read_back(layout, none)).trees == [[]]
    with pytest.raises(UsageError, match="tree"):
        await pack(source, V3, layout, xattrs=True)


async def test_later_times_are_clamped(layout: LocalLayout, source: Path) -> None:
    for name, seconds in (("old", 5), ("new", 50)):
        (source / name).write_text(name)
        os.utime(source / name, (seconds, seconds))
    (source / "link").symlink_to("old")
    found = (await read_back(layout, await pack_tree(source, V1, layout, mtime=10))).entries
    assert [entry.mtime_ns // 10**9 for entry in found.values()] == [10, 10, 5]
    with pytest.raises(UsageError, match="modification time"):
        await pack_tree(source, V1, layout, mtime=-1)


async def test_what_is_no_directory_is_refused(layout: LocalLayout, source: Path) -> None:
    with pytest.raises(NotFound):
        await pack_tree(source / "absent", V1, layout)
    (source / "file").write_bytes(b"")
    with pytest.raises(UsageError):
        await pack_tree(source / "file", V1, layout)
    inside = LocalLayout(source / "layout")
    with pytest.raises(UsageError, match="within the source"):
        await pack_tree(source, V1, inside)
    await inside.close()


# -- equal trees are equal

NAMES = st.binary(min_size=1, max_size=12).map(lambda name: name.replace(b"/", b"_").replace(b"\0", b"0")).filter(
    lambda name: name not in (b".", b"..")
) | st.sampled_from([b"a", b"a.b", b"a-", b"\xff\xfe", b"new\nline", b" ", b"x" * 255, "ä".encode()])
NODES = st.recursive(
    st.one_of(
        st.tuples(st.just("file"), st.binary(max_size=40), st.sampled_from([0o644, 0o755, 0o600, 0o1444])),
        st.tuples(st.just("holes"), st.integers(0, 3), st.binary(max_size=9)),
        st.tuples(st.just("symlink"), st.sampled_from([b".", b"../..", b"/", b"gone", b"\xff"])),
        st.tuples(st.just("link"), st.integers(0, 3)),
    ),
    lambda node: st.dictionaries(NAMES, node, max_size=5),
    max_leaves=25,
)
TREES = st.dictionaries(NAMES, NODES, max_size=6)


def build(root: Path, tree: dict[bytes, Any], seed: int) -> None:
    """Make a tree, its entries, times and links in an order that depends on `seed`. Leaves `link`
    are names of a few shared files."""
    order = random.Random(seed)
    links: dict[int, list[bytes]] = {}
    made: list[bytes] = []

    def make(path: bytes, node: Any) -> None:
        if isinstance(node, dict):
            os.mkdir(path)
            for name in order.sample(sorted(node), len(node)):
                make(path + b"/" + name, node[name])
        elif node[0] == "file":
            with open(path, "wb") as stream:
                stream.write(node[1])
            os.chmod(path, node[2])
        elif node[0] == "holes":
            with open(path, "wb") as stream:
                if seed % 2:
                    stream.write(bytes(node[1] * 8192) + node[2])
                else:
                    stream.truncate(node[1] * 8192)
                    stream.seek(0, 2)
                    stream.write(node[2])
            os.chmod(path, 0o644)
        elif node[0] == "symlink":
            os.symlink(node[1], path)
        else:
            links.setdefault(node[1], []).append(path)
            return
        made.append(path)

    make(os.fsencode(root), tree)
    for number, paths in links.items():
        first, *others = order.sample(sorted(paths), len(paths))
        with open(first, "wb") as stream:
            stream.write(b"shared %d" % number)
        os.chmod(first, 0o640)
        for path in others:
            os.link(first, path)
        made += paths
    shared = {path for paths in links.values() for path in paths}
    for path in sorted(made, reverse=True):
        relative = path[len(os.fsencode(root)) :]
        os.chmod(path, 0o750) if os.path.isdir(path) and not os.path.islink(path) else None
        ns = TIME_NS + sum(relative) * 1_000_001 if path not in shared else TIME_NS
        os.utime(path, ns=(1, ns), follow_symlinks=False)


@given(tree=TREES, seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)))
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_one_tree_one_root(tree: dict[bytes, Any], seeds: tuple[int, int], tmp_path: Path) -> None:
    """Creation order, which link was first, holes, source path, umask, time zone, layout and what
    it knows leave no mark; and the entries are those of an obvious walk."""
    where = tmp_path / random.randbytes(8).hex()
    first, second = where / "a", where / "elsewhere/b"
    second.parent.mkdir(parents=True)
    build(first, tree, seeds[0])
    zone, mask = os.environ.get("TZ"), os.umask(0o077)
    os.environ["TZ"] = "Pacific/Kiritimati"
    time.tzset()
    one, other = LocalLayout(where / "layout"), LocalLayout(where / "other")
    try:
        build(second, tree, seeds[1])
        packed = await pack_tree(first, V1, one)
        again = await pack_tree(second, V2, one)
        alone = await pack_tree(second, V1, other)
        cached = await pack_tree(second, V1, other)
        package = await read_back(one, packed)
    finally:
        os.umask(mask)
        os.environ.pop("TZ") if zone is None else os.environ.update(TZ=zone)
        time.tzset()
        await one.close()
        await other.close()
    assert package.trees[0] == listed(first)
    assert packed.layers == again.layers == alone.layers
    assert packed.digest == again.digest == alone.digest == cached.digest
    assert packed.parts == again.parts
    for path, entry in package.entries.items():
        if isinstance(entry, File):
            assert package.content(path) == (first / os.fsdecode(path)).read_bytes()
    shutil.rmtree(where)


@pytest.mark.root
async def test_owners_leave_no_mark(layout: LocalLayout, source: Path) -> None:
    (source / "sub").mkdir()
    (source / "sub/file").write_text("x")
    packed = await pack_tree(source, V1, layout)
    for path in (source / "sub", source / "sub/file"):
        os.chown(path, 1234, 65534)
    assert (await pack_tree(source, V2, layout)).digest == packed.digest


# -- contents that are large, or hollow


async def test_a_sparse_file_is_what_it_reads_as(layout: LocalLayout, tmp_path: Path) -> None:
    """The same bytes with holes, with other holes and without any; also where a hole ends within a
    chunk."""
    noise = random.Random(3).randbytes(300_000)
    size = 20 << 20
    spots = [0, 700_001, 5 << 20, (5 << 20) + 350_000, size - 10]
    full = bytearray(size)
    for spot in spots:
        full[spot : spot + 300_000] = noise[: size - spot]
    roots = []
    for name in ("dense", "sparse", "odd"):
        root = tmp_path / name
        root.mkdir()
        with (root / "file").open("wb") as stream:
            if name == "dense":
                stream.write(full)
            else:
                stream.truncate(size)
                for spot in spots:
                    stream.seek(spot)
                    stream.write(full[spot : spot + 300_000])
            if name == "odd":
                stream.seek(12 << 20)
                stream.write(bytes(1 << 20))
        os.utime(root / "file", ns=(1, TIME_NS))
        assert (root / "file").stat().st_blocks * 512 < size or name == "dense"
        packed = await pack_tree(root, parse_reference(f"{name}:1"), layout)
        roots.append(packed.layers[0].digest)
    assert len(set(roots)) == 1
    assert (await read_back(layout, packed)).content(b"file") == full


@pytest.mark.slow
async def test_holes_are_not_read(layout: LocalLayout, source: Path) -> None:
    """5 GiB of nothing with something in it take a few windows."""
    with (source / "file").open("wb") as stream:
        stream.truncate(5 << 30)
        stream.seek(3 << 30)
        stream.write(b"something")

    def count() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = count()
    packed = await pack_tree(source, V1, layout)
    assert count() - before < 40 << 20
    assert packed.bytes_total == 5 << 30
    assert packed.bytes_written < 1 << 20


async def test_an_insertion_into_a_large_file_costs_little(layout: LocalLayout, source: Path) -> None:
    data = random.Random(4).randbytes(24 << 20)
    (source / "file").write_bytes(data)
    await pack_tree(source, V1, layout)
    (source / "file").write_bytes(data[: 9 << 20] + b"inserted" + data[9 << 20 :])
    packed = await pack_tree(source, V2, layout)
    assert packed.bytes_written < 1 << 20
    assert (await read_back(layout, packed)).content(b"file") == (source / "file").read_bytes()


# -- what changes meanwhile


@pytest.mark.slow
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    "how", ["grows", "shrinks", "is rewritten", "is replaced", "vanishes", "appears", "is a FIFO", "is a link"]
)
async def test_a_file_that_changes_meanwhile_is_named(layout: LocalLayout, source: Path, how: str, large: bool) -> None:
    """No tag, no manifest, and nothing left lying about."""
    size = (WHOLE_MAX * 8) if large else 1_000_000
    # So many that the first are done before the last is handed out.
    for number in range((2 * min(os.cpu_count() or 1, WORKERS_MAX) + 2) * BATCH_FILES):
        (source / f"{number:04}").write_bytes(b"%d" % number)
    victim = source / "zz"
    victim.write_bytes(random.Random(5).randbytes(size))
    age(source)
    done = threading.Event()

    def meddle(_what: str, _count: int, _total: int) -> None:
        if done.is_set():
            return
        done.set()
        if how == "grows":
            with victim.open("ab") as stream:
                stream.write(b"more")
        elif how == "shrinks":
            os.truncate(victim, 10)
        elif how == "is rewritten":
            victim.write_bytes(bytes(size))
        elif how == "vanishes":
            victim.unlink()
        elif how == "appears":
            (source / "zz-new").write_bytes(b"")
        else:
            victim.unlink()
            if how == "is a FIFO":
                os.mkfifo(victim)
            elif how == "is a link":
                victim.symlink_to("00")
            else:
                victim.write_bytes(bytes(size))

    with pytest.raises(P2PDistError, match="zz") as caught:
        await pack_tree(source, V1, layout, on_progress=meddle)
    assert done.is_set()
    assert isinstance(caught.value, Corrupt)
    with pytest.raises(NotFound):
        await layout.resolve(V1)
    assert not list(layout.scratch().iterdir())
    await pack_tree(source, V1, layout)


@pytest.mark.slow
async def test_what_no_host_would_take_is_not_packed(layout: LocalLayout, source: Path) -> None:
    """Paths that are long and alike: their catalog becomes so small that hosts would take it for a
    trap."""
    deep = source.joinpath(*["d" * 250] * 14)
    deep.mkdir(parents=True)
    for number in range(7000):
        (deep / f"{number:04}").touch()
        os.utime(deep / f"{number:04}", (0, 0))
    with pytest.raises(UsageError, match=r"no host would take the package: catalogs of .* over the limit"):
        await pack_tree(source, V1, layout)
    with pytest.raises(NotFound):
        await layout.resolve(V1)


async def test_a_cancelled_packing_leaves_nothing(layout: LocalLayout, source: Path) -> None:
    for number in range(64):
        (source / str(number)).write_bytes(random.Random(number).randbytes(1 << 20))
    running = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(
        pack_tree(source, V1, layout, on_progress=lambda *_: loop.call_soon_threadsafe(running.set))
    )
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not list(layout.scratch().iterdir())
    assert not (layout.directory / "blobs").exists()


@pytest.mark.parametrize("what", ["file", "directory"])
async def test_what_cannot_be_read_is_named(layout: LocalLayout, source: Path, what: str) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    (source / "secret").mkdir() if what == "directory" else (source / "secret").write_bytes(b"x")
    (source / "secret").chmod(0)
    with pytest.raises(P2PDistError, match="secret"):
        await pack_tree(source, V1, layout)
    (source / "secret").chmod(0o700)
