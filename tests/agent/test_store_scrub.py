"""The background reading of a store: it finds what changed on the disk, has it fetched again, and
goes on after a restart where it was. Virtual time: `wait` says how long it would have waited."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from test_alone import TAG, ended, pack_tree, pulled
from test_many_blobs import push
from waits import until

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.pull import pulls
from p2pdist.agent.upkeep import scrub as scrub_module
from p2pdist.agent.upkeep.scrub import NOTE, StoreScrub
from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError, Unavailable
from p2pdist.model.messages import PullRequest
from p2pdist.origin.layout import LocalLayout
from p2pdist.store.store import BlobStore

PIECE = 64 << 10
WEEK = 7 * 86400.0


class Clock:
    """Time that passes by waiting alone. `busy` is how often the scrub is told that pulls run."""

    def __init__(self) -> None:
        self.now, self.waits, self.busy, self.ends_after = 1e9, list[float](), 0, 10**9

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        return len(self.waits) > self.ends_after

    def is_busy(self) -> bool:
        self.busy -= 1
        return self.busy >= 0


def scrub_of(agent: Agent, clock: Clock, period_s: float = WEEK) -> StoreScrub:
    return StoreScrub(agent.store, agent.verification, clock.is_busy, period_s=period_s, clock=clock, wait=clock.wait)


def turn_at_rest(path: Path) -> None:
    """Turn one bit of a file, which also tells the kernel: see `forget`."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def forget(store: BlobStore) -> None:
    """Have the store not know what the kernel said, as for a bit that the disk turned."""
    integrity = store.integrity
    integrity.look_at_all(lambda: False)
    integrity._written.clear()
    integrity._changed.clear()
    integrity._unseen.clear()


@pytest.fixture
async def agent(tmp_path: Path, origin: LocalLayout) -> AsyncIterator[Agent]:
    async with AsyncExitStack() as stack:
        settings = AgentSettings((), "h1", "127.0.0.1:1", tmp_path / "store", origin=origin.url, scrub_s=0.0)
        made = Agent(settings)
        stack.push_async_callback(made.stop)
        await made.start()
        yield made


@pytest.fixture(autouse=True)
def takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has no lower priority: beside other work it would get next to nothing."""
    monkeypatch.setattr(scrub_module, "yield_to_others", lambda: None)


def read_all(scrub: StoreScrub, until: Callable[[], bool]) -> list[str]:
    """Step until a round has ended; what was wrong."""
    wrong = []
    for _ in range(2000):
        wrong += scrub.step()
        if until():
            return wrong
    raise AssertionError("no round ends")


async def test_a_turned_bit_is_found_and_fetched_again(agent: Agent, origin: LocalLayout, tmp_path: Path) -> None:
    """In a layer image and in an object."""
    await push(origin, TAG, [os.urandom(5 * PIECE)])
    package = (await pulled(agent, package=str(TAG))).package
    assert package is not None
    layer = package.manifest.layers[0].digest
    path = agent.store.get(layer).path  # type: ignore[union-attr]
    before = path.read_bytes()
    turn_at_rest(path)
    forget(agent.store)
    clock = Clock()
    scrub = scrub_of(agent, clock)
    assert await asyncio.to_thread(read_all, scrub, lambda: bool(scrub.round.ended and scrub.round.checked)) == [layer]
    assert scrub.round.wrong == scrub.wrong == 1
    assert not agent.store.get(layer).complete  # type: ignore[union-attr]
    assert await agent.verification.repair([layer]) == ([str(TAG)], [])
    assert agent.store.get(layer).path.read_bytes() == before  # type: ignore[union-attr]
    assert scrub.status().damaged == {"blob": 1} and scrub.status().ended > 0


@pytest.mark.slow
async def test_damage_that_cannot_be_fetched_again_at_once_does_not_end_the_scrub(
    agent: Agent, origin: LocalLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the agent has as many pulls as it may have."""
    await push(origin, TAG, [os.urandom(5 * PIECE)])
    package = (await pulled(agent, package=str(TAG))).package
    assert package is not None
    turn_at_rest(agent.store.get(package.manifest.layers[0].digest).path)  # type: ignore[union-attr]
    forget(agent.store)
    monkeypatch.setattr(pulls, "PULLS_MAX", 0)
    scrub = scrub_of(agent, Clock())
    running = asyncio.create_task(scrub.run())
    try:
        await until(lambda: scrub.wrong == 1)
        began = scrub.round.began
        await until(lambda: scrub.round.began > began)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_an_object_is_found_and_its_package_fetched_again(
    agent: Agent,
    origin: LocalLayout,
    tmp_path: Path,
) -> None:
    await pack_tree(tmp_path, origin, [os.urandom(3000 + number) for number in range(6)])
    assert (await pulled(agent, package=str(TAG))).error is None
    content = sorted(agent.store.objects.contents())[2]
    before = agent.store.objects.path(content).read_bytes()
    turn_at_rest(agent.store.objects.path(content))
    forget(agent.store)
    scrub = scrub_of(agent, Clock())
    wrong = await asyncio.to_thread(read_all, scrub, lambda: bool(scrub.round.ended and scrub.round.checked))
    assert wrong == [content.hex()]
    assert await agent.verification.repair(wrong) == ([str(TAG)], [])
    assert agent.store.objects.path(content).read_bytes() == before


async def test_what_was_evicted_is_not_fetched_for_what_is_damaged(
    agent: Agent,
    origin: LocalLayout,
    tmp_path: Path,
) -> None:
    """A package that is incomplete for another reason is left alone."""
    await push(origin, TAG, [os.urandom(5 * PIECE)])
    package = (await pulled(agent, package=str(TAG))).package
    assert package is not None
    agent.store.remove(package.manifest.layers[0].digest)
    assert await agent.verification.repair(["sha256:" + "0" * 64]) == ([], [])
    assert agent.store.get(package.manifest.layers[0].digest) is None


async def test_it_goes_on_after_a_restart_and_stands_still_while_pulls_run(
    agent: Agent,
    origin: LocalLayout,
) -> None:
    await push(origin, TAG, [os.urandom(5 * PIECE) for _ in range(3)])
    assert (await pulled(agent, package=str(TAG))).error is None
    clock = Clock()
    first = scrub_of(agent, clock)
    while not first.round.checked:
        assert first.step() == []
    began, checked = first.round.began, first.round.checked
    clock.now += 31.0
    clock.busy, waited = 5, len(clock.waits)
    first.step()
    assert clock.waits[waited : waited + 5] == [1.0] * 5
    again = scrub_of(agent, clock)
    assert again.round.began == began and again.round.checked > checked
    read_all(again, lambda: bool(again.round.ended))
    assert again.round.checked == len([blob for blob in agent.store.blobs() if blob.complete])
    total = agent.store.usage().bytes_total
    assert agent.store.note(NOTE) is not None and total > 0


async def test_a_stop_in_the_middle_loses_the_part_alone(agent: Agent, origin: LocalLayout) -> None:
    await push(origin, TAG, [os.urandom(80 * PIECE)])
    assert (await pulled(agent, package=str(TAG))).error is None
    clock = Clock()
    scrub = scrub_of(agent, clock)
    while clock.now < scrub.round.began + WEEK:
        scrub.step()  # it waits for its first round
    clock.ends_after = len(clock.waits) + 1
    assert scrub.step() == []
    assert not scrub.round.ended and not scrub.round.checked and not scrub.round.after
    clock.ends_after = 10**9
    read_all(scrub, lambda: bool(scrub.round.ended))
    assert scrub.round.checked


@pytest.mark.parametrize("note", ["", "{", "[]", '{"began": "x"}', '{"began": 1e300}', '{"began": -5, "after": "zz"}'])
async def test_a_damaged_note_begins_anew(agent: Agent, note: str) -> None:
    agent.store.set_note(NOTE, note)
    scrub = scrub_of(agent, Clock())
    read_all(scrub, lambda: bool(scrub.round.ended and scrub.round.began > 0))


async def test_the_agent_runs_it_and_ends_it(tmp_path: Path, origin: LocalLayout) -> None:
    """What is wrong is whole again without a request; the end of the agent waits for no round."""
    await push(origin, TAG, [os.urandom(5 * PIECE)])
    settings = AgentSettings((), "h1", "127.0.0.1:1", tmp_path / "store", origin=origin.url, scrub_s=0.5)
    agent = Agent(settings)
    try:
        await agent.start()
        package = (await ended(agent.pulls.start(PullRequest(package=str(TAG))))).package
        assert package is not None
        layer = package.manifest.layers[0].digest
        path = agent.store.get(layer).path  # type: ignore[union-attr]
        before = path.read_bytes()
        turn_at_rest(path)
        async with asyncio.timeout(60):
            while not agent.store.integrity.damaged["blob"]:
                await asyncio.sleep(0.05)
            while not agent.store.get(layer).complete:  # type: ignore[union-attr]
                await asyncio.sleep(0.05)
        assert path.read_bytes() == before
    finally:
        await agent.stop()


async def test_what_was_dropped_before_a_failure_is_told_after_it(
    agent: Agent, origin: LocalLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the index or the disk fails between two losses, or no more pulls may begin."""
    await push(origin, TAG, [os.urandom(5 * PIECE), os.urandom(5 * PIECE)])
    package = (await pulled(agent, package=str(TAG))).package
    assert package is not None
    layers = [layer.digest for layer in package.manifest.layers]
    for layer in layers:
        turn_at_rest(agent.store.get(layer).path)  # type: ignore[union-attr]
    integrity, clock = agent.store.integrity, Clock()
    scrub = scrub_of(agent, clock)

    def fails(going: Callable[[], bool]) -> list[str]:
        integrity.look(layers[:1])
        raise Unavailable("the index cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(integrity, "look_at_all", fails)
        assert scrub.step() == [] and clock.waits == [scrub_module.RETRY_S]
    assert scrub.step() == layers[:1]
    with monkeypatch.context() as patch:
        patch.setattr(pulls, "PULLS_MAX", 0)
        await scrub._repair(layers[:1])
    assert scrub.step() == layers[1:], "the other one is asked for too early"
    clock.now += scrub_module.RETRY_S
    assert sorted(scrub.step()) == sorted(layers)
    await scrub._repair(layers)
    assert agent.store.lost() == []


@pytest.mark.parametrize("lost", ["layer", "root", "catalog", "object"])
async def test_what_was_dropped_before_a_kill_is_fetched_again_after_it(
    tmp_path: Path, origin: LocalLayout, lost: str
) -> None:
    """As by a kill between the loss and its repair. What is not complete for another reason, as by
    a pull that was ended, is left alone."""
    if lost == "layer":
        await push(origin, TAG, [os.urandom(5 * PIECE)])
    else:
        await pack_tree(tmp_path, origin, [os.urandom(3000 + number) for number in range(6)])
    settings = AgentSettings((), "h1", "127.0.0.1:1", tmp_path / "store", origin=origin.url, scrub_s=0.0)
    agent = Agent(settings)
    await agent.start()
    try:
        package = (await pulled(agent, package=str(TAG))).package
        assert package is not None
        layer, store = package.manifest.layers[0].digest, agent.store
        if lost == "object":
            content = sorted(store.objects.contents())[2]
            turn_at_rest(store.objects.path(content))
            assert store.integrity.look([layer]) == [content.hex()] and not store.trees.complete(layer)
        else:
            digest = store.trees.list()[0].catalogs[0] if lost == "catalog" else layer
            turn_at_rest(store.get(digest).path)  # type: ignore[union-attr]
            assert store.integrity.look([digest]) == [digest] and store.lost() == [digest]
        store.begin_vouched(Digest("sha256:" + "1" * 64), PIECE)
    finally:
        await agent.stop()
    agent = Agent(replace(settings, scrub_s=WEEK))
    await agent.start()
    try:
        await until(lambda: not agent.store.lost())
        await until(lambda: all(map(agent.inventory.is_here, package.manifest.layers)))
        assert [pull.reference for pull in agent.pulls.list()] == [str(TAG)]
    finally:
        await agent.stop()


@pytest.mark.root
async def test_a_disk_that_became_read_only_hides_nothing(tmp_path: Path, origin: LocalLayout) -> None:
    """As ext4 does after an error: what is wrong stays wrong until the disk can be written to, and
    is not taken for right because it was read."""
    image, root = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    root.mkdir()
    subprocess.run(["mount", "-o", "loop,errors=remount-ro", image, root], check=True)
    try:
        device = Path(os.path.realpath(subprocess.check_output(["findmnt", "-no", "SOURCE", root], text=True).strip()))
        trigger = Path("/sys/fs/ext4") / device.name / "trigger_fs_error"
        if not trigger.exists():
            pytest.skip("this kernel makes no error of ext4 on request")
        settings = AgentSettings((), "h1", "127.0.0.1:1", root / "store", origin=origin.url, scrub_s=0.0)
        await push(origin, TAG, [os.urandom(5 * PIECE)])
        agent = Agent(settings)
        await agent.start()
        try:
            package = (await pulled(agent, package=str(TAG))).package
            assert package is not None
            layer = package.manifest.layers[0].digest
            path = agent.store.get(layer).path  # type: ignore[union-attr]
            turn_at_rest(path)
            forget(agent.store)
            trigger.write_text("test")
            with pytest.raises(OSError):
                (root / "x").touch()
            scrub = scrub_of(agent, Clock())
            for _ in range(20):
                try:
                    await asyncio.to_thread(scrub.step)
                except P2PDistError:
                    continue
            for _ in range(2):
                with pytest.raises(P2PDistError, match="read-only"):  # rather than wrong bytes
                    agent.store.integrity.look([layer])
        finally:
            await agent.stop()  # in order, though the index can no longer be written to
    finally:
        subprocess.run(["umount", "-l", root], check=False)
