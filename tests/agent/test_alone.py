"""An agent that no tracker answers and that looks for no neighbours: alone it reads its own origin;
with a tracker that is away it waits, says so, and gives up. What can never fit into its store it
refuses before it evicts anything; and what it does with single blobs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from test_many_blobs import push

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.pull.pulls import Pull
from p2pdist.agent.upkeep.maintenance import VERIFICATIONS_MAX
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Conflict, DiskFull, NotFound, P2PDistError, Unavailable, UsageError
from p2pdist.model.manifest import parse_reference
from p2pdist.model.messages import PruneRequest, PullRequest
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.layers import PackOptions, pack_layers, plain_layer
from p2pdist.package.repository.push import push_blob

Start = Callable[..., Awaitable[Agent]]
TAG = parse_reference("app:v1")
PIECE = 64 << 10
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
async def start(tmp_path: Path, origin: LocalLayout) -> AsyncIterator[Start]:
    """Starts agents that look for nobody; they end with the test."""
    async with AsyncExitStack() as agents:

        async def make(*trackers: str, tracker_wait_s: float = 60.0, capacity: int | None = None) -> Agent:
            made = Agent(
                AgentSettings(
                    trackers,
                    "h1",
                    "127.0.0.1:1",
                    tmp_path / "store",
                    origin=origin.url,
                    tracker_wait_s=tracker_wait_s,
                    capacity_bytes=capacity,
                )
            )
            agents.push_async_callback(made.stop)
            await made.start()
            return made

        yield make


async def ended(pull: Pull) -> Pull:
    assert pull.task is not None
    await asyncio.wait([pull.task], timeout=30)
    return pull


async def pulled(agent: Agent, **what: str) -> Pull:
    return await ended(agent.pulls.start(PullRequest(**what)))


async def pack_tree(place: Path, origin: LocalLayout, contents: list[bytes]) -> None:
    source = place / "source"
    source.mkdir()
    for number, content in enumerate(contents):
        (source / f"f{number}").write_bytes(content)
    await pack_layers([plain_layer(source, "tree", ())], TAG, origin, PackOptions())


async def test_alone_it_reads_its_own_origin(start: Start, origin: LocalLayout, tmp_path: Path) -> None:
    """A blob of many stripes, and a tree with its packs; without a tracker nothing else can bring
    them."""
    (tmp_path / "weights").write_bytes(os.urandom(64 * PIECE + 1))
    blob = (await push_blob(tmp_path / "weights", origin)).digest
    await pack_tree(tmp_path, origin, [os.urandom(3 * PIECE), b"small"])
    agent = await start()
    for what in ({"blob": blob}, {"package": str(TAG)}):
        status = (await pulled(agent, **what)).status()
        assert status.state == "done" and status.bytes_origin == status.bytes_total > 0, status


async def test_with_a_tracker_that_is_away_it_waits_and_leaves_the_origin_alone(
    start: Start, origin: LocalLayout, tmp_path: Path
) -> None:
    """Thousands of agents may wait like it. It says for what, and ends as a new pull does that
    waits for a tracker."""
    (tmp_path / "weights").write_bytes(os.urandom(PIECE))
    blob = (await push_blob(tmp_path / "weights", origin)).digest
    agent = await start(NOBODY, tracker_wait_s=1.0)
    pull = agent.pulls.start(PullRequest(blob=blob))
    notes = set()
    while pull.seconds is None:
        notes.add(pull.status().note)
        await asyncio.sleep(0.02)
    assert any(note.startswith(f"waiting for a tracker ({NOBODY}") for note in notes), notes
    assert isinstance(pull.error, Unavailable) and "no tracker answered for 1 s" in pull.error.what
    status = pull.status()
    assert (status.bytes_origin, status.note) == (0, "") and not agent.resources.received_bytes


@pytest.mark.parametrize("form", ["blob", "layers", "tree"])
async def test_what_can_never_fit_is_told_from_what_does_not_fit_now(
    start: Start, origin: LocalLayout, tmp_path: Path, form: str
) -> None:
    """Each part would fit by itself, and what is here already stays: it would be evicted to no
    avail."""
    (tmp_path / "kept").write_bytes(os.urandom(2 * PIECE))
    kept = (await push_blob(tmp_path / "kept", origin)).digest
    what = {"package": str(TAG)}
    if form == "blob":
        (tmp_path / "weights").write_bytes(os.urandom(17 * PIECE))
        what = {"blob": (await push_blob(tmp_path / "weights", origin)).digest}
    elif form == "layers":
        await push(origin, TAG, [os.urandom(6 * PIECE) for _ in range(3)])
    else:
        await pack_tree(tmp_path, origin, [bytes([number]) * (1 << 20) for number in range(17)])
    agent = await start(capacity=16 * PIECE)
    assert (await pulled(agent, blob=kept)).error is None
    error = (await pulled(agent, **what)).error
    assert isinstance(error, DiskFull) and error.never_fits, error
    assert error.details["needed"] > error.details["capacity"] == 16 * PIECE
    assert agent.store.get(kept) is not None


async def test_what_others_keep_from_fitting_may_fit_later(start: Start, origin: LocalLayout, tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(os.urandom(10 * PIECE))
    kept = (await push_blob(tmp_path / "kept", origin)).digest
    await push(origin, TAG, [os.urandom(5 * PIECE) for _ in range(2)])
    agent = await start(capacity=16 * PIECE)
    assert (await pulled(agent, blob=kept)).error is None
    agent.store.pins.pin(kept, "somebody")
    error = (await pulled(agent, package=str(TAG))).error
    assert isinstance(error, DiskFull) and not error.never_fits, error
    agent.store.pins.unpin("somebody")
    assert (await pulled(agent, package=str(TAG))).error is None


@pytest.mark.parametrize(
    ("owner", "way"),
    [
        ("preseed:nightly-42", "p2pdist preseed --cancel nightly-42"),
        ("policy:app:v1", "have the tracker's policies keep app:v1 no more"),
        ("slurm-77", "p2pdist slurm epilog --job 77"),
        ("scheduler", "wait for scheduler to unpin it"),
    ],
)
async def test_what_ends_a_pin_is_said_of_each_kind(start: Start, origin: LocalLayout, owner: str, way: str) -> None:
    """`p2pdist pin --remove` ends an operator's pins alone."""
    await push(origin, TAG, [os.urandom(2 * PIECE)])
    agent = await start()
    package = (await pulled(agent, package=str(TAG))).package
    assert package is not None
    agent.store.pins.pin(package.manifest.layers[0].digest, owner)
    with pytest.raises(Conflict, match="is pinned by") as pinned:
        await agent.maintenance.remove(str(TAG))
    assert pinned.value.remedy == f"Unpin it first: {way}"


async def test_a_blob_by_itself_is_listed_pinned_verified_and_removed(
    start: Start, origin: LocalLayout, tmp_path: Path
) -> None:
    """One that was pulled by its digest has no package here; one of a package is removed with that
    alone."""
    await push(origin, TAG, [os.urandom(2 * PIECE)])
    digests = []
    for name in ("one", "two", "three"):
        (tmp_path / name).write_bytes(os.urandom(3 * PIECE))
        digests.append((await push_blob(tmp_path / name, origin)).digest)
    one, two, three = digests
    agent = await start()
    tidy = agent.maintenance
    package = (await pulled(agent, package=str(TAG))).package
    assert package is not None
    layer = package.manifest.layers[0].digest
    for digest in (one, two, three):
        assert (await pulled(agent, blob=digest)).error is None
    listed = {each.reference: each for each in await agent.inventory.packages()}
    assert list(listed) == [str(TAG), *sorted(f"blob:{each.replace(':', '-')}" for each in digests)]
    assert all(each.complete and not each.pinned for each in listed.values())

    kept = await tidy.pin(two)
    assert kept.layers == (two,) and kept.owner == f"pin:blob:{two.replace(':', '-')}"
    with pytest.raises(Conflict, match="is pinned") as pinned:
        await tidy.remove(two)
    assert pinned.value.remedy == f"p2pdist pin --remove {two}"
    for digest, what in ((layer, "is a part of the package app:v1"), (package.digest, "is the package app:v1")):
        with pytest.raises(Conflict, match=what) as part:
            await tidy.remove(digest)
        assert part.value.remedy == "p2pdist rm app:v1"

    assert (await tidy.remove(one)).bytes_freed >= 3 * PIECE
    with pytest.raises(NotFound, match="is not on this host"):
        await tidy.remove(f"blob:{one.replace(':', '-')}")
    path = agent.store.get(three).path  # type: ignore[union-attr]
    path.chmod(0o600)
    path.write_bytes(bytes(3 * PIECE))
    *_, found = [each async for each in agent.verification.verify(repair=True)]
    assert (found.wrong, found.repaired, found.failed) == ((three,), (three,), ())

    await tidy.collect()
    assert agent.store.get(three) is None and agent.store.get(layer) is not None and agent.store.get(two) is not None
    await tidy.unpin(two)
    await tidy.remove(two)
    assert [each.reference for each in await agent.inventory.packages()] == [str(TAG)]


async def test_a_pin_that_fails_takes_no_others_of_its_owner(
    start: Start, origin: LocalLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a job pins several packages by one name."""
    (tmp_path / "kept").write_bytes(os.urandom(PIECE))
    kept = (await push_blob(tmp_path / "kept", origin)).digest
    agent = await start()
    await agent.maintenance.pin(kept, "job")
    for most in (1000, 0):  # its pull fails, or does not begin
        monkeypatch.setattr("p2pdist.agent.pull.pulls.PULLS_MAX", most)
        with pytest.raises(P2PDistError):
            await agent.maintenance.pin(digest_of(b"nowhere"), "job")
    assert agent.store.pins.by_owner() == {"job": {kept}}
    assert agent.store._index.pins() == [(kept, "job")]


async def test_a_layer_of_what_a_tag_meant_before_is_a_blob_by_itself(start: Start, origin: LocalLayout) -> None:
    """It takes room that no package accounts for, until it is collected; what a pull is about to
    need stays."""
    await push(origin, TAG, [os.urandom(2 * PIECE)])
    agent = await start()
    before = (await pulled(agent, package=str(TAG))).package
    await push(origin, TAG, [os.urandom(2 * PIECE)])
    after = (await pulled(agent, package=str(TAG))).package
    assert before is not None and after is not None
    old, new = before.manifest.layers[0].digest, after.manifest.layers[0].digest
    assert [each.digest for each in await agent.inventory.packages()] == [after.digest, old]
    with agent.store.get(old).held():  # type: ignore[union-attr]
        await agent.maintenance.collect()
        assert agent.store.get(old) is not None
    await agent.maintenance.collect()
    assert agent.store.get(old) is None and agent.store.get(new) is not None


async def test_pruning_removes_only_what_it_found_and_what_was_agreed_to(start: Start, origin: LocalLayout) -> None:
    """A tag may move to another package after a user has seen what would go."""
    await push(origin, TAG, [os.urandom(2 * PIECE)])
    agent = await start()
    before = (await pulled(agent, package=str(TAG))).package
    await push(origin, TAG, [os.urandom(2 * PIECE)])
    after = (await pulled(agent, package=str(TAG))).package
    assert before is not None and after is not None
    with pytest.raises(Conflict, match="names another package by now"):
        await agent.maintenance.remove(str(TAG), before.digest)
    pruned = await agent.disk_use.prune(PruneRequest(False, True, only=(before.digest,)), lambda name, digest: True)
    assert pruned.packages == () and agent.store.packages.get(str(TAG)) is not None
    pruned = await agent.disk_use.prune(PruneRequest(False, True, only=(after.digest,)), lambda name, digest: True)
    assert [package.digest for package in pruned.packages] == [after.digest]
    assert agent.store.packages.get(str(TAG)) is None


async def test_disk_use_names_only_what_may_be_read(start: Start, origin: LocalLayout) -> None:
    """One package under two names, and one that shares its layer."""
    open_tag, private = parse_reference("open/app:v1"), parse_reference("private/app:v1")
    layer = os.urandom(2 * PIECE)
    await push(origin, private, [layer])
    await push(origin, open_tag, [layer])
    await push(origin, parse_reference("private/other:v1"), [layer, os.urandom(PIECE)])
    agent = await start()
    for name in (open_tag, private, "private/other:v1"):
        assert (await pulled(agent, package=str(name))).error is None
    await agent.maintenance.pin("private/other:v1")
    use = await agent.disk_use.use(lambda name, digest: name.startswith("open/"))
    assert [(package.references, package.kept_by) for package in use.packages] == [(("open/app:v1",), ("tag", "pin"))]


def test_a_digest_alone_names_no_package() -> None:
    with pytest.raises(UsageError, match="is a digest without the name of a package") as refused:
        parse_reference("sha256:" + "a" * 64)
    assert "name@sha256" in refused.value.remedy and "blob pull" in refused.value.remedy


async def test_slow_verifications_hold_nothing_up_and_end_with_their_clients(
    start: Start, origin: LocalLayout, tmp_path: Path
) -> None:
    (tmp_path / "blob").write_bytes(os.urandom(4 * PIECE))
    digest = (await push_blob(tmp_path / "blob", origin)).digest
    agent = await start()
    assert (await pulled(agent, blob=digest)).error is None
    verify = agent.verification.verify
    slow = [asyncio.ensure_future(anext(verify(repair=False, bytes_s=1e-9))) for _ in range(VERIFICATIONS_MAX)]
    while agent.verification._running < VERIFICATIONS_MAX:
        await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match="are running"):
        await anext(verify(repair=False))
    with pytest.raises(Unavailable):
        agent.verification.require_room()
    async with asyncio.timeout(60):
        for client in slow:
            client.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
    *_, found = [each async for each in verify(repair=False)]
    assert found.done and found.checked and not found.wrong and not agent.verification._running
