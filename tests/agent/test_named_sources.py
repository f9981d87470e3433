"""The hosts that trackers named, on a real disk: kept over a new start, limited, private, and gone
once they are of no use."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest
from waits import until

from p2pdist.agent.tracker import sources
from p2pdist.agent.tracker.sources import HOSTS_MAX, NamedHosts, NamedSources
from p2pdist.core.trackerless import plan_from_memory
from p2pdist.model.digest import digest_of
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.plan import ORIGIN, Plan, Source, StripePlan

BLOB, OTHER = digest_of(b"blob"), digest_of(b"other")
A, B, C, ME = (Source(name, f"{name}:7071") for name in ("a", "b", "c", "me"))


def plan(parent: Source | None, *alternates: Source, superpeers: tuple[Source, ...] = ()) -> Plan:
    return Plan(BLOB, (StripePlan(0, parent, alternates),), superpeers)


async def test_what_plans_name_outlasts_the_agent(tmp_path: Path) -> None:
    named = NamedSources(tmp_path / "sources", "me")
    named.planned(plan(A, B), "ticket")
    named.planned(plan(ORIGIN, C, superpeers=(ME, A)), "")
    expected = NamedHosts((C, A, B), "ticket")
    assert await named.recall(BLOB) == expected, "the latest first, and neither the origin nor this host"
    await named.stop()
    (file,) = (tmp_path / "sources").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert await NamedSources(tmp_path / "sources", "me").recall(BLOB) == expected
    assert await NamedSources(tmp_path / "sources", "me").recall(OTHER) == NamedHosts()


async def test_a_host_that_moved_has_its_latest_address(tmp_path: Path) -> None:
    named = NamedSources(tmp_path, "me")
    named.planned(plan(A), "")
    named.planned(plan(moved := Source("a", "elsewhere:7071")), "")
    assert (await named.recall(BLOB)).hosts == (moved,)


async def test_files_go_with_their_blobs_and_the_oldest_of_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "WRITE_PAUSE_S", 0.0)
    monkeypatch.setattr(sources, "BLOBS_MAX", 3)
    named = NamedSources(tmp_path, "me")
    blobs = [digest_of(bytes([number])) for number in range(5)]
    for age, blob in enumerate(blobs):
        named.planned(Plan(blob, (StripePlan(0, A),)), "")
        path = tmp_path / f"{blob.removeprefix('sha256:')}.json"
        await until(path.exists)
        os.utime(path, (age, age))
    await until(lambda: len(list(tmp_path.iterdir())) == 3)
    named.forget(blobs[4])
    await until(lambda: len(list(tmp_path.iterdir())) == 2)
    await named.stop()


async def test_a_pull_that_is_over_soon_leaves_no_file(tmp_path: Path) -> None:
    named = NamedSources(tmp_path, "me")
    named.planned(plan(A), "")
    named.forget(BLOB)
    await named.stop()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"hosts":[{"host":"a b","address":"x"}]}', b"\0" * 4096])
async def test_a_damaged_file_counts_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"{BLOB.removeprefix('sha256:')}.json").write_bytes(content)
    assert await NamedSources(tmp_path, "me").recall(BLOB) == NamedHosts()


async def test_a_directory_that_cannot_be_written_is_told_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sources").write_bytes(b"")
    named = NamedSources(tmp_path / "sources", "me")
    named.planned(plan(A), "")
    await asyncio.wait_for(named.stop(), 60)
    assert "is not remembered" in caplog.text and (await named.recall(BLOB)).hosts == (A,)


async def test_hosts_are_limited(tmp_path: Path) -> None:
    named = NamedSources(tmp_path, "me")
    for number in range(2 * HOSTS_MAX):
        named.planned(plan(Source(f"h{number}", "h:1")), "")
    hosts = (await named.recall(BLOB)).hosts
    assert len(hosts) == HOSTS_MAX and hosts[0].host == f"h{2 * HOSTS_MAX - 1}"
    await named.stop()


def test_a_plan_from_memory_asks_all_hosts_for_each_stripe() -> None:
    layout = PieceLayout(64 << 20, 65536)
    made = plan_from_memory(BLOB, layout, "me", (A, B, C))
    assert [stripe.stripe for stripe in made.stripes] == list(range(layout.stripes))
    assert all({stripe.parent, *stripe.alternates} == {A, B, C} for stripe in made.stripes)
    assert len({plan_from_memory(BLOB, layout, f"h{n}", (A, B, C)).stripes[0].parent for n in range(20)}) == 3
