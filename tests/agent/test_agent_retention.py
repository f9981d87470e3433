"""What an agent does of the policies of packages: pins, what goes and when, limits of blobs; and
what it remembers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from waits import until

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.upkeep import retention as module
from p2pdist.core import eviction
from p2pdist.model.digest import Digest
from p2pdist.model.manifest import Manifest, blob_reference, decode_manifest
from p2pdist.model.plan import ORIGIN, Plan, StripePlan
from p2pdist.model.policy import NO_POLICY, PackagePolicy
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.repository.push import push_blob

PIECE = 64 << 10
NONE = PackagePolicy("x:*", cache="none")
PIN = PackagePolicy("x:*", cache="pin")
TTL = PackagePolicy("x:*", cache="ttl", ttl_s=0.2)
RATES = PackagePolicy("x:*", upload_bytes_s=1e6, download_bytes_s=2e6, priority="preseed", transport="swarm")


class Rig:
    """An agent without a tracker, an origin, and policies given by hand."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.layout = LocalLayout(directory / "origin")
        self.layout.scratch()
        self.open()

    def open(self) -> None:
        store = self.directory / "store"
        settings = AgentSettings((), "h1", "127.0.0.1:7071", store, origin=self.layout.url, capacity_bytes=16 * PIECE)
        self.agent = Agent(settings)

    async def publish(self, pieces: int = 4) -> Digest:
        file = self.directory / "content"
        file.write_bytes(os.urandom(pieces * PIECE))
        return (await push_blob(file, self.layout)).digest

    async def say(self, digest: Digest, policy: PackagePolicy) -> None:
        """A tracker says this of the package under which a blob was pushed alone."""
        reference = blob_reference(digest)
        package = (await self.layout.resolve(reference)).digest
        manifest = decode_manifest(await self.layout.read(package))
        await self.agent.policy_pins.learned(str(reference), package, manifest, policy)

    async def pull(self, digest: Digest) -> None:
        pulling = asyncio.create_task(self.agent.pulls.package(str(blob_reference(digest))))
        await until(lambda: digest in self.agent.registry._fetching or pulling.done())
        if not pulling.done():
            self.agent.registry._fetching[digest].planned(Plan(digest, (StripePlan(0, ORIGIN),)))
        await pulling

    def here(self, digest: Digest) -> bool:
        return self.agent.store.get(digest) is not None


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(module, "SWEEP_S", 0.05)
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    monkeypatch.setattr(eviction, "NONE_S", 0.2)
    made = Rig(tmp_path)
    try:
        yield made
    finally:
        await made.agent.stop()
        await made.layout.close()


@pytest.mark.parametrize("policy", [NONE, TTL], ids=["none", "ttl"])
async def test_a_package_goes_when_its_time_is_over_and_not_while_it_is_used(rig: Rig, policy: PackagePolicy) -> None:
    going, staying = await rig.publish(), await rig.publish()
    await rig.say(going, policy)
    await rig.pull(going)
    await rig.pull(staying)
    await rig.agent.start()
    blob = rig.agent.store.get(going)
    assert blob is not None
    with blob.held():
        await asyncio.sleep(0.5)
        assert rig.here(going)
    await until(lambda: not rig.here(going))
    assert rig.here(staying)
    await until(lambda: rig.agent.policies.packages == {}, "forgetting what is gone")


async def test_a_clock_that_was_set_back_keeps_a_package_for_its_time_and_no_longer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From when that is noticed, since it may be right again soon."""
    digest, policy = await rig.publish(), PackagePolicy("x:*", cache="ttl", ttl_s=50.0)
    await rig.say(digest, policy)
    await rig.pull(digest)
    agent, blob, begin = rig.agent, rig.agent.store.get(digest), time.time()
    assert blob is not None
    now, count, right = begin, 500.0, begin + 1e6
    (reference,) = agent.policies.packages
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: now, monotonic=lambda: count))

    def is_due(at: float, counted: float) -> bool:
        nonlocal now, count
        now, count = at, counted
        return reference in eviction.due(agent.retention._stored(agent.policies.packages), now=now)

    blob.last_used = right
    assert not is_due(begin + 100, 500.0) and not is_due(begin + 149, 549.0)
    assert is_due(begin + 151, 551.0)
    assert not is_due(right + 1, 560.0), "the clock is right again"
    assert not is_due(begin + 100, 600.0) and is_due(begin + 151, 651.0)
    blob.last_used = begin + 151
    assert not is_due(begin + 200, 700.0) and is_due(begin + 202, 702.0)


async def test_pins_follow_the_policy(rig: Rig) -> None:
    digest = await rig.publish()
    owner = f"policy:{blob_reference(digest)}"
    await rig.say(digest, PIN)
    assert rig.agent.store.pins.owners(digest) == {owner}, "before it is fetched"
    await rig.pull(digest)
    await rig.say(digest, PIN)
    assert rig.agent.store.pins.owners(digest) == {owner}
    await rig.say(digest, NO_POLICY)
    assert rig.agent.store.pins.owners(digest) == set()


async def test_a_pin_moves_with_the_tag(rig: Rig) -> None:
    first, second = await rig.publish(), await rig.publish()

    async def manifest(digest: Digest) -> tuple[Digest, Manifest]:
        found = (await rig.layout.resolve(blob_reference(digest))).digest
        return found, decode_manifest(await rig.layout.read(found))

    await rig.agent.policy_pins.learned("app:prod", *await manifest(first), PIN)
    await rig.agent.policy_pins.learned("app:prod", *await manifest(second), PIN)
    assert rig.agent.store.pins.by_owner() == {"policy:app:prod": {second}}


async def test_what_is_not_kept_makes_room_first(rig: Rig) -> None:
    older, passing, newer = [await rig.publish(5) for _ in range(3)]
    await rig.say(passing, PackagePolicy("x:*", cache="none"))
    for digest in (older, passing):
        await rig.pull(digest)
    await rig.agent.retention._sweep()  # it is used this very moment, so it stays
    assert rig.here(passing)
    await rig.pull(newer)
    await rig.pull(await rig.publish(5))
    assert rig.here(older) and rig.here(newer) and not rig.here(passing)


async def test_rates_priority_and_transport_of_a_blob(rig: Rig) -> None:
    digest, other = await rig.publish(), await rig.publish()
    policies = rig.agent.policies
    free = policies.pacer(digest)
    await rig.say(digest, RATES)
    await rig.say(other, RATES)
    limit = policies.upload_limit(digest)
    assert limit is not None and limit.limit_bytes_s == 1e6
    assert policies.upload_limit(other) is limit, "packages of one policy share its rates"
    assert policies.pacer(digest) is policies.pacer(other) is not free
    assert (policies.priority(digest, "start"), policies.transport(digest)) == ("preseed", "swarm")
    await rig.say(digest, PackagePolicy("x:*", upload_bytes_s=5e6))
    assert limit.limit_bytes_s == 5e6
    assert policies.pacer(digest) is free and policies.priority(digest, "start") == "start"
    await rig.say(digest, NO_POLICY)
    assert policies.upload_limit(digest) is None and policies.upload_limit(other) is limit


async def test_policies_are_remembered(rig: Rig) -> None:
    digest = await rig.publish()
    await rig.pull(digest)
    await rig.say(digest, RATES)
    await rig.agent.stop()
    rig.open()
    assert rig.agent.policies.priority(digest, "start") == "preseed"
    limit = rig.agent.policies.upload_limit(digest)
    assert limit is not None and limit.limit_bytes_s == 1e6
    await rig.agent.stop()
    (rig.directory / "store" / "policies.json").write_text('{"x": {"policy": {"upload_bytes_s": -1}}}')
    rig.open()
    assert rig.agent.policies.of(digest) == NO_POLICY, "what is damaged is learnt anew"
