"""Collections beside pushes and packings of other processes, without any age that would spare
blobs; and processes that are killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from collect_rig import backdate, check_contents, holds, make_package, missing, named, start_child
from origin_rig import Place

from p2pdist.origin.layout import NOTES, LocalLayout
from p2pdist.package.repository.gc import sweep
from p2pdist.package.repository.notes import LEASE_S, REMOVAL_S
from p2pdist.package.repository.push import push

PUSHERS = 8


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    """Those that a test started; none outlives it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for child in started:
        child.kill()
        child.communicate()


async def ended(child: subprocess.Popen[str]) -> str:
    """What the child said on standard error, once it has ended well."""
    _, said = await asyncio.to_thread(child.communicate, None, 60)
    assert child.returncode == 0, said
    return said


@pytest.mark.slow
@pytest.mark.parametrize("age_s", [-1.0, 0.2], ids=["any age", "a small grace"])
async def test_no_push_loses_a_blob_to_a_collection(
    place: Place, tmp_path: Path, children: list[subprocess.Popen[str]], age_s: float
) -> None:
    """Eight processes push packages that share blobs, and take their last tag away each time, while
    two collect all the time. Whoever looks meanwhile finds all that a visible tag names."""
    layout = LocalLayout(tmp_path / "layout")
    choice = random.Random(1)
    shared = [os.urandom(choice.randrange(1000, 9000)) for _ in range(6)]
    turns = 12 if place.url.startswith("file") else 4
    for worker in range(PUSHERS):
        tags = [f"app{worker}:{turn}" for turn in range(turns)]
        await make_package(layout, choice.sample(shared, 3), *tags[0::2])
        await make_package(layout, choice.sample(shared, 2), *tags[1::2])
    await push_aside(place, tmp_path)
    pushers = [
        start_child("push", layout.directory, place.url, *(f"app{worker}:{turn}" for turn in range(turns)))
        for worker in range(PUSHERS)
    ]
    stop = tmp_path / "stop"
    collectors = [start_child("collect", place.url, str(age_s), stop) for _ in range(2)]
    children += [*pushers, *collectors]
    deadline = time.monotonic() + 60
    looks = 0
    while any(child.poll() is None for child in pushers):
        assert await missing(place.origin) == []
        assert time.monotonic() < deadline, "the pushes do not come to an end"
        looks += 1
    for child in pushers:
        await ended(child)
    stop.touch()
    removed = [int(await ended(child)) for child in collectors]
    assert looks > 0
    assert sum(removed) > 0, "nothing was ever collected: the test shows nothing"
    assert await missing(place.origin) == []
    assert await check_contents(place.origin) == PUSHERS + 1
    await sweep(place.origin, older_than_s=-1)
    assert await check_contents(place.origin) == PUSHERS + 1
    assert await place.origin.notes() == []
    await layout.close()


async def push_aside(place: Place, tmp_path: Path) -> None:
    """A package that stays as it is, so that there is an index from the start."""
    aside = LocalLayout(tmp_path / "aside")
    await make_package(aside, [b"unrelated"], "unrelated:1")
    await push(named("unrelated:1"), aside, place.origin)
    await aside.close()


@pytest.mark.slow
async def test_no_packing_loses_a_chunk_to_a_collection(tmp_path: Path, children: list[subprocess.Popen[str]]) -> None:
    """Three processes pack two states of their directories in turn, so old packs are drawn on that
    no tag leads to any more."""
    layout = LocalLayout(tmp_path / "layout")
    await make_package(layout, [b"unrelated"], "unrelated:1")
    packers = []
    for worker in range(3):
        source = tmp_path / f"source{worker}"
        source.mkdir()
        (source / "same").write_bytes(os.urandom(50_000))
        packers.append(start_child("pack", layout.directory, source, *(f"app{worker}:{turn}" for turn in range(10))))
    stop = tmp_path / "stop"
    collector = start_child("collect", layout.url, "-1", stop)
    children += [*packers, collector]
    while any(child.poll() is None for child in packers):
        assert await missing(layout) == []
    for child in packers:
        await ended(child)
    stop.touch()
    await ended(collector)
    await sweep(layout, older_than_s=-1)
    assert await check_contents(layout) == 4
    await layout.close()


async def test_what_a_killed_push_leaves_is_removed_its_file_at_once_the_rest_when_its_lease_is_void(
    tmp_path: Path, children: list[subprocess.Popen[str]]
) -> None:
    layout, origin = LocalLayout(tmp_path / "layout"), LocalLayout(tmp_path / "origin")
    await make_package(layout, [b"unrelated"], "unrelated:1")
    await push(named("unrelated:1"), layout, origin)
    small, large = os.urandom(1000), os.urandom(9 << 20)
    await make_package(layout, [small], "app:0")
    digests = await make_package(layout, [small, large], "app:1")
    await push(named("app:0"), layout, origin)
    await origin.untag(named("app:0"))
    child = start_child("push-and-die", layout.directory, origin.directory, "app:1", str(5 << 20))
    children.append(child)
    await asyncio.to_thread(child.wait, 30)
    assert child.returncode == -signal.SIGKILL
    assert len(await origin.notes()) == 1
    # Its lease still holds; its unfinished file is no longer locked.
    counted = await sweep(origin, older_than_s=-1, dry_run=True)
    done = await sweep(origin, older_than_s=-1)
    assert counted == done
    assert done.unfinished >= 1
    assert done.bytes_freed >= 4 << 20
    assert holds(origin.directory, digests[0])
    backdate(origin.directory, LEASE_S + 10, kind="notes")
    done = await sweep(origin, older_than_s=-1)
    assert done.blobs_removed >= 1
    assert done.unfinished == 0
    assert not holds(origin.directory, digests[0])
    assert await origin.notes() == []
    assert list((origin.directory / ".incoming").iterdir()) == []
    await push(named("app:1"), layout, origin)
    assert await check_contents(origin) == 2
    await layout.close()
    await origin.close()


async def test_a_push_waits_for_what_a_killed_collection_may_still_be_deleting(
    tmp_path: Path, children: list[subprocess.Popen[str]]
) -> None:
    """Until the note of the dead collection is void nobody relies on what it names; pushes of other
    blobs go on at once."""
    layout, origin = LocalLayout(tmp_path / "layout"), LocalLayout(tmp_path / "origin")
    await make_package(layout, [b"unrelated"], "unrelated:1", "unrelated:2")
    await push(named("unrelated:1"), layout, origin)
    digests = await make_package(layout, [os.urandom(1000), os.urandom(2000)], "app:1", "app:2")
    await push(named("app:1"), layout, origin)
    await origin.untag(named("app:1"))
    child = start_child("collect-and-die", origin.directory)
    children.append(child)
    await asyncio.to_thread(child.wait, 30)
    assert child.returncode == -signal.SIGKILL
    assert 0 < sum(holds(origin.directory, digest) for digest in digests) < len(digests)
    await push(named("unrelated:2"), layout, origin)
    waiting = asyncio.Event()
    loop = asyncio.get_running_loop()

    def watch(what: str, _done: int, _total: int) -> None:
        if what.startswith("waiting"):
            loop.call_soon_threadsafe(waiting.set)

    pushing = asyncio.create_task(push(named("app:2"), layout, origin, on_progress=watch))
    await asyncio.wait_for(waiting.wait(), 60)
    (left,) = [name for name, _ in await origin.notes() if name.startswith("removal-")]
    assert not pushing.done()
    old = time.time() - REMOVAL_S - 10
    os.utime(origin.directory / NOTES / left, (old, old))
    await asyncio.wait_for(pushing, 60)
    assert await check_contents(origin) == 3
    await sweep(origin, older_than_s=-1)
    assert await origin.notes() == []
    assert await check_contents(origin) == 3
    await layout.close()
    await origin.close()
