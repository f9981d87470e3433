"""The typed client (p2pdist.client) and real trackers: its documentation's example as a program,
every call, waiting, tokens over TLS, and failures."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest
from access_rig import access_site
from ports import free_port
from test_preseeds_http import SIZE, blobs, connected, layout, package, tracker
from waits import until

from p2pdist.client import (
    Conflict,
    NotFound,
    PreseedRequest,
    Progress,
    RankRequest,
    Refused,
    Role,
    SyncTracker,
    Tracker,
    Unauthenticated,
    Unavailable,
    UsageError,
)
from p2pdist.client import tracker as module
from p2pdist.model.digest import Digest
from p2pdist.model.fleet import EvictRequest
from p2pdist.model.messages import Condition
from tracker.http.keys import SERVICE

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"

__all__ = ["blobs", "layout"]  # fixtures


async def test_the_example_of_the_documentation_runs(layout: Path, blobs: list[Digest]) -> None:
    (example,) = re.findall(r"```python\n(from p2pdist\.client.*?)```", OPERATIONS.read_text(), re.DOTALL)
    async with tracker(layout) as at, connected(at, "a/r/h1", "b/r/h2"):
        program = example.replace("http://tracker:7070", at.url).replace("team/trainer:v4", package(blobs[0]))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
    assert (process.returncode, err.decode(), out.decode()) == (0, "", "done 2 {}\n")


async def test_the_calls_of_the_documentation_work(layout: Path, blobs: list[Digest]) -> None:
    """In their order: the preseed is ordered, waited for and let go."""
    (text,) = re.findall(r"```\n(curl .*?)```", OPERATIONS.read_text(), re.DOTALL)
    async with tracker(layout) as at, connected(at, "a/r/h1", "a/r/h2"):
        script = text.replace("http://tracker:7070", at.url).replace("team/trainer:v4", package(blobs[0]))
        process = await asyncio.create_subprocess_exec(
            "sh", "-ec", script.replace("--fail ", "--fail --silent --show-error --noproxy '*' --write-out '\\n' "),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        assert (process.returncode, err.decode()) == (0, "")
        ranked, ordered, done, _, ended = (json.loads(line) for line in out.splitlines() if line)
    assert len(ranked) == 2 and ordered["state"] in ("running", "done")
    assert (done["state"], done["hosts_done"], ended["state"]) == ("done", 2, "cancelled")


async def test_answers_are_typed_values(layout: Path, blobs: list[Digest]) -> None:
    name = package(blobs[0])
    async with tracker(layout) as at, connected(at, "a/r/h1", "b/r/h2"), Tracker(at.url) as client:
        hosts = {host.host: host for host in await client.hosts()}
        assert (hosts["h1"].zone, hosts["h1"].present) == ("a", True)
        assert (await client.host("h2")).swarms == [] and await client.swarms() == []
        ranked = await client.rank(RankRequest(packages=(name,)))
        assert {row.host: row.bytes_missing for row in ranked} == {"h1": SIZE, "h2": SIZE}
        roles = await client.assign(RankRequest(roles=(Role("read", (name,), 1),)))
        assert [len(role.hosts) for role in roles.assignment] == [1]

        heard: list[Progress] = []
        order = PreseedRequest(name, id="p.1", selector={"zone": "a"})
        made = await client.preseed(order)
        assert (await client.preseed(order)).id == made.id
        done = await client.wait(made.id, told=heard.append)
        assert (done.state, done.hosts_done, done.replicas) == ("done", 1, {"a": 1}) and heard[-1] == done
        async with asyncio.timeout(60):  # lists of all preseeds are of what is stored, a moment later
            while [(each.id, each.state) for each in await client.preseeds()] != [("p.1", "done")]:
                await asyncio.sleep(0.05)
        assert (await client.brief(made.id)).package == done.package
        assert (await client.cancel(made.id)).state == "cancelled"


async def test_an_answer_may_be_waited_for_as_long_as_a_question_may_take(
    layout: Path, blobs: list[Digest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And longer: the tracker answers at the end of that time."""
    monkeypatch.setattr(module, "REQUEST_S_MAX", 0.5)
    async with tracker(layout) as at, Tracker(at.url) as client, connected(at, "a/r/h1") as [host]:
        made = await client.preseed(PreseedRequest(package(blobs[0]), hosts=("nobody",)))
        assert (await client.progress(made.id, wait_s=1.0)).state == "pending"
        await host.say(Condition("9.9", 0, None, 0, 0, ()))
        await until(lambda: "h1" in at.app[SERVICE].desk._conditions)
        silent = await client.evict(EvictRequest(package(blobs[0]), everywhere=True, wait_s=1.0))
        assert silent.silent_hosts == ["h1"]


async def test_failures_are_those_of_the_product(layout: Path, blobs: list[Digest]) -> None:
    async with tracker(layout) as at, Tracker([f"http://127.0.0.1:{free_port()}", at.url]) as client:
        with pytest.raises(NotFound, match="no preseed 'none'"):
            await client.progress("none")
        with pytest.raises(UsageError, match="names no hosts"):
            await client.preseed(PreseedRequest(package(blobs[0])))
        await client.preseed(PreseedRequest(package(blobs[0]), id="p1", count=1))
        with pytest.raises(Conflict):
            await client.preseed(PreseedRequest(package(blobs[0]), id="p1", count=2))
        assert client.answered == at.url
    with pytest.raises(UsageError, match="no address of a tracker"):
        SyncTracker("tracker:7070")
    async with Tracker(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(Unavailable, match="connection refused"):
            await client.hosts()


async def test_waiting_without_asyncio_is_bounded(layout: Path, blobs: list[Digest]) -> None:
    """Its own loop; the time is over while no host comes."""
    async with tracker(layout) as at:

        def order() -> Progress:
            with SyncTracker(at.url) as client:
                made = client.preseed(PreseedRequest(package(blobs[0]), hosts=("h1",)))
                with pytest.raises(TimeoutError):
                    client.wait(made.id, timeout_s=0.3)
                assert client.hosts() == [] and client.swarms() == []
                assert [each.id for each in client.preseeds()] == [made.id]
                return client.cancel(made.id)

        assert (await asyncio.to_thread(order)).state == "cancelled"


async def test_a_token_is_shown_over_tls_to_its_own_fleet(tmp_path: Path) -> None:
    async with access_site(tmp_path) as site:
        async with Tracker(site.url, token=site.token("slurm")) as client:
            made = await client.preseed(PreseedRequest("team-a/x:v1", hosts=("h1",)))
            assert made.package == f"team-a/x@{site.manifests['team-a/x:v1']}"
            with pytest.raises(NotFound):
                await client.preseed(PreseedRequest("team-b/y:v1", hosts=("h1",)))
            with pytest.raises(Refused):
                await client.hosts()
        with pytest.raises(Unauthenticated, match="expired"):
            Tracker(site.url, token=site.token("slurm", now=1.0))


async def test_a_wait_tells_that_no_tracker_answers() -> None:
    """It goes on, as trackers start anew; nobody needs to guess what it waits for."""
    heard: list[str] = []
    async with Tracker(f"http://127.0.0.1:{free_port()}") as client:
        waiting = asyncio.ensure_future(client.wait("one", away=lambda error: heard.append(error.what)))
        while not heard:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        waiting.cancel()
    assert "does not answer" in heard[0]
