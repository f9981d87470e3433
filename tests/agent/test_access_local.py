"""What processes of the host may read through the agent's Unix socket, by user and group. Real
processes of other users."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from joined_rig import AccessSite, Running, access_site, push_package, until

from p2pdist.agent.access.local import LOOKUPS_MAX, LocalCallers, subjects
from p2pdist.agent.access.peers import Peers
from p2pdist.agent.caller import Caller
from p2pdist.agent.mounts import MOUNTS_OF_USER_MAX, Mounts, check_below
from p2pdist.agent.pull.pulls import PULLS_MAX, PULLS_OF_USER_MAX, PULLS_OF_USERS_MAX
from p2pdist.agent.upkeep.maintenance import VERIFICATIONS_MAX
from p2pdist.model.access import LocalRules, Patterns
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Refused, Unavailable
from p2pdist.model.manifest import Config
from p2pdist.model.messages import MountRequest
from p2pdist.mount.layers import SquashfsLayer

USER, GROUP = 65534, 4242
MINE, THEIRS = b"mine" * 30_000, b"theirs" * 30_000
RULES = {f"group:{GROUP}": ("team-a/*",), "user:1234": ("team-b/y",)}


class LocalSite:
    """An agent with a package of each of two teams."""

    def __init__(self, site: AccessSite, running: Running, manifests: dict[str, Digest]) -> None:
        self.site, self.running, self.manifests = site, running, manifests

    async def ask(self, uid: int, method: str, path: str, body: Any = None, *, gid: int = GROUP) -> tuple[int, Any]:
        """Status and JSON (or bytes) of an answer to a process of a user."""
        words = ["setpriv", "--reuid", str(uid), "--regid", str(gid), "--clear-groups"]
        words += ["curl", "-s", "-w", "\n%{http_code}", "--unix-socket", str(self.running.socket), "-X", method]
        if body is not None:
            words += ["-d", json.dumps(body)]
        process = await asyncio.create_subprocess_exec(
            *words, f"http://agent{path}", stdout=asyncio.subprocess.PIPE, cwd="/"
        )
        out, _ = await asyncio.wait_for(process.communicate(), 60)
        data, _, status = out.rpartition(b"\n")
        try:
            return int(status), json.loads(data)
        except ValueError:
            return int(status), data


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[LocalSite]:
    async with access_site(tmp_path) as site:
        site.tracker.local = RULES
        manifests = {
            "team-a/x": await push_package(site.origin, "team-a/x:v1", MINE),
            "team-b/y": await push_package(site.origin, "team-b/y:v1", THEIRS),
        }
        running = await site.agent("h0")
        running.socket.chmod(0o666)
        await until(lambda: running.agent.access.peers.local.by_subject)
        for name in manifests:
            await running.agent.pulls.package(f"{name}:v1")
        yield LocalSite(site, running, manifests)


@pytest.mark.root
async def test_before_the_rules_are_known_users_have_nothing(local: LocalSite) -> None:
    """An agent whose kept rules are damaged or gone, and whose trackers are away, knows none."""
    peers, path = local.running.agent.access.peers, f"/v1/blobs/{digest_of(THEIRS)}"
    kept = local.running.settings.store / "identity" / "access.json"
    await until(kept.exists)
    for damage in (kept.unlink, lambda: kept.write_bytes(b"{")):
        damage()
        fresh = Peers(kept.parent, "h0", required=True, secured=True, clock=time.time, alone=lambda: True)
        local.running.agent.access.peers = fresh
        for method, where in (("GET", path), ("GET", "/v1/packages"), ("GET", "/v1/status"), ("POST", "/v1/collect")):
            assert (await local.ask(USER, method, where))[0] == 503, where
        assert (await local.ask(USER, "GET", "/healthz"))[0] == 200
        assert await local.ask(0, "GET", path) == (200, THEIRS)
    local.running.agent.access.peers = peers
    assert (await local.ask(USER, "GET", path))[0] == 404


@pytest.mark.root
async def test_a_user_has_what_the_rules_say_and_the_rest_looks_absent(local: LocalSite) -> None:
    ask = local.ask
    theirs, manifest = digest_of(THEIRS), local.manifests["team-b/y"]
    assert (await ask(USER, "GET", "/v1/packages"))[1]["packages"][0]["reference"] == "team-a/x:v1"
    assert len((await ask(USER, "GET", "/v1/packages"))[1]["packages"]) == 1
    assert len((await ask(0, "GET", "/v1/packages"))[1]["packages"]) == 2
    assert [pull["reference"] for pull in (await ask(USER, "GET", "/v1/pulls"))[1]["pulls"]] == ["team-a/x:v1"]
    assert [pull["reference"] for pull in (await ask(USER, "GET", "/v1/status"))[1]["pulls"]] == ["team-a/x:v1"]
    assert await ask(USER, "GET", f"/v1/blobs/{digest_of(MINE)}") == (200, MINE)
    refused = [
        ("GET", f"/v1/blobs/{theirs}", None),
        ("GET", f"/v1/blobs/{manifest}", None),
        ("POST", "/v1/pulls", {"package": "team-b/y:v1", "wait": True}),
        ("POST", "/v1/pulls", {"package": f"team-b/y@{manifest}", "wait": True}),
        ("POST", "/v1/pulls", {"package": f"team-a/x@{manifest}", "wait": True}),
        ("POST", "/v1/pulls", {"blob": theirs, "wait": True}),
        ("POST", "/v1/mounts", {"package": "team-b/y:v1"}),
        ("POST", "/v1/mounts", {"package": f"team-a/other@{manifest}"}),
        ("POST", "/v1/pins", {"package": "team-b/y:v1"}),
        ("POST", "/v1/pins", {"package": theirs}),
        ("POST", "/v1/pins", {"package": "blob:sha256-" + theirs.removeprefix("sha256:")}),
        ("DELETE", "/v1/packages?reference=team-b/y:v1", None),
        ("DELETE", f"/v1/packages?reference={theirs}", None),
        ("DELETE", "/v1/pins?package=team-b/y:v1", None),
    ]
    for method, path, body in refused:
        status, answer = await ask(USER, method, path, body)
        assert status == 404, (method, path, body, answer)
    identifier = next(pull.id for pull in local.running.agent.pulls.list() if pull.reference == "team-b/y:v1")
    assert (await ask(USER, "GET", f"/v1/pulls/{identifier}"))[0] == 404
    assert (await ask(0, "GET", f"/v1/pulls/{identifier}"))[0] == 200
    assert (await ask(0, "GET", f"/v1/blobs/{theirs}"))[1] == THEIRS
    assert (await ask(1234, "POST", "/v1/pulls", {"package": "team-b/y:v1", "wait": True}, gid=99))[0] == 200
    assert (await ask(1234, "POST", "/v1/pulls", {"package": f"team-b/y@{manifest}", "wait": True}, gid=99))[0] == 200
    assert (await ask(1234, "POST", "/v1/pulls", {"package": "team-a/x:v1"}, gid=99))[0] == 404
    assert (await ask(999, "GET", "/v1/packages", gid=999))[1] == {"packages": []}
    assert (await ask(USER, "POST", "/v1/drain", {"seconds": 0}))[0] == 403


@pytest.mark.root
async def test_pins_of_others_are_neither_seen_nor_removed(local: LocalSite) -> None:
    assert (await local.ask(0, "POST", "/v1/pins", {"package": "team-b/y:v1"}))[0] == 200
    assert (await local.ask(USER, "POST", "/v1/pins", {"package": "team-a/x:v1"}))[0] == 200
    assert [pin["owner"] for pin in (await local.ask(USER, "GET", "/v1/pins"))[1]["pins"]] == ["pin:team-a/x:v1"]
    assert len((await local.ask(0, "GET", "/v1/pins"))[1]["pins"]) == 2
    assert (await local.ask(USER, "DELETE", "/v1/pins?owner=pin:team-b/y:v1"))[0] == 404
    assert (await local.ask(USER, "DELETE", "/v1/pins?owner=pin:team-a/x:v1"))[0] == 200


@pytest.mark.root
async def test_a_collection_removes_nothing_that_a_user_may_not_read(local: LocalSite) -> None:
    """As for other requests, single blobs are those of the packages that they came with."""
    store = local.running.agent.store
    for record in store.packages.list():
        store.packages.forget(record.reference)
    for uid, left in ((999, [MINE, THEIRS]), (USER, [THEIRS]), (0, [])):
        assert (await local.ask(uid, "POST", "/v1/collect", gid=GROUP if uid == USER else 999))[0] == 200
        assert [blob for blob in (MINE, THEIRS) if store.get(digest_of(blob)) is not None] == left, uid


@pytest.mark.root
@pytest.mark.parametrize("owner", ["preseed:p1", "policy:team-a/x:v1", "slurm-7"])
async def test_no_user_changes_what_the_system_pins(local: LocalSite, owner: str) -> None:
    assert (await local.ask(0, "POST", "/v1/pins", {"package": "team-a/x:v1", "owner": owner}))[0] == 200
    for method, path, body in (
        ("POST", "/v1/pins", {"package": "team-a/x:v1", "owner": owner}),
        ("DELETE", f"/v1/pins?owner={owner}", None),
    ):
        status, answer = await local.ask(USER, method, path, body)
        assert status == 403 and "root" in answer["remedy"], (method, answer)
    assert (await local.ask(0, "DELETE", f"/v1/pins?owner={owner}"))[0] == 200


@pytest.mark.root
async def test_a_verification_names_nothing_that_a_user_may_not_read(
    local: LocalSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The scrub hears of a file that is written, and may have repaired it before it is verified.
    monkeypatch.setattr(local.running.agent.scrub, "step", lambda: time.sleep(0.05) or [])

    async def verified(uid: int, content: bytes) -> dict[str, Any]:
        blob = local.running.agent.store.get(digest_of(content))
        assert blob is not None
        blob.path.chmod(0o600)
        blob.path.write_bytes(bytes(len(content)))
        status, lines = await local.ask(uid, "POST", "/v1/verify", {"repair": True})
        assert status == 200
        return json.loads(lines.splitlines()[-1])  # type: ignore[no-any-return]

    for uid, content, name in ((0, THEIRS, "team-b/y:v1"), (USER, MINE, "team-a/x:v1"), (USER, THEIRS, "")):
        last = await verified(uid, content)
        assert last["done"] and last["repaired"] == ([name] if name else []), (uid, last)
        assert last["wrong"] == ([digest_of(content)] if name else [])
    assert (await local.ask(0, "GET", f"/v1/blobs/{digest_of(THEIRS)}"))[1] == THEIRS


@pytest.mark.root
async def test_no_more_verifications_run_than_may(local: LocalSite) -> None:
    """Users leave room for one of root."""
    for running, uid, room in (
        (VERIFICATIONS_MAX, 0, False),
        (VERIFICATIONS_MAX - 1, USER, False),
        (VERIFICATIONS_MAX - 1, 0, True),
        (VERIFICATIONS_MAX - 2, USER, True),
    ):
        local.running.agent.verification._running = running
        status, answer = await local.ask(uid, "POST", "/v1/verify", {})
        said = answer.decode() if isinstance(answer, bytes) else json.dumps(answer)
        assert (status, '"done":true' in said.replace(" ", "")) == ((200, True) if room else (503, False)), said
        assert room or "verifications" in answer["detail"]


@pytest.mark.root
async def test_pulls_of_users_leave_room_for_others(local: LocalSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulls that get no plan do not end. One user has so many, all users have so many, and root has
    the rest, whichever request began them."""
    assert MOUNTS_OF_USER_MAX <= PULLS_OF_USER_MAX < PULLS_OF_USERS_MAX < PULLS_MAX
    for name, most in (("PULLS_OF_USER_MAX", 2), ("PULLS_OF_USERS_MAX", 3), ("PULLS_MAX", 5)):
        monkeypatch.setattr(f"p2pdist.agent.pull.pulls.{name}", most)
    other, tracker = 5000, local.site.tracker
    tracker.planning, tracker.local = False, {f"user:{USER}": ("*",), f"user:{other}": ("*",)}
    await tracker.push_access()
    await until(lambda: f"user:{other}" in local.running.agent.access.peers.local.by_subject)
    for number in range(6):
        await push_package(local.site.origin, f"team-a/p{number}:v1", b"%d" % number * 30_000)

    async def pulled(uid: int, number: int) -> tuple[int, str]:
        status, answer = await local.ask(uid, "POST", "/v1/pulls", {"package": f"team-a/p{number}:v1"})
        return status, answer.get("detail", "")

    assert [(await pulled(USER, number))[0] for number in (0, 1)] == [202, 202]
    last = {"package": "team-a/p5:v1"}
    for method, path, body in (
        ("POST", "/v1/pulls", last),
        ("POST", "/v1/pins", last),
        ("POST", "/v1/mounts", last),
        ("POST", "/v1/pins", {"package": digest_of(b"5" * 30_000)}),
        ("GET", f"/v1/blobs/{digest_of(b'5' * 30_000)}", None),
        ("GET", f"/v1/blobs/{digest_of(b'5' * 30_000)}/file", None),
    ):
        status, answer = await local.ask(USER, method, path, body)
        assert status == 503 and f"of user {USER}" in answer["detail"], (method, path, answer)
    assert not local.running.agent.store.pins.by_owner()
    assert (await pulled(other, 2))[0] == 202
    assert await pulled(other, 3) == (503, "3 pulls of users are running")
    assert [(await pulled(0, number))[0] for number in (3, 4)] == [202, 202]
    assert await pulled(0, 5) == (503, "5 pulls are running")


@pytest.mark.root
async def test_rules_reach_a_running_agent(local: LocalSite) -> None:
    local.site.tracker.local = {f"user:{USER}": ("*",)}
    await local.site.tracker.push_access()
    await until(lambda: f"user:{USER}" in local.running.agent.access.peers.local.by_subject)
    assert len((await local.ask(USER, "GET", "/v1/packages"))[1]["packages"]) == 2
    local.site.tracker.local = {}
    await local.site.tracker.push_access()
    await until(lambda: not local.running.agent.access.peers.local.by_subject)
    assert len((await local.ask(999, "GET", "/v1/packages", gid=999))[1]["packages"]) == 2


@pytest.mark.root
async def test_views_of_users_are_below_the_mount_roots(local: LocalSite) -> None:
    with tempfile.TemporaryDirectory() as made:
        inside, outside = Path(made) / "inside", Path(made) / "outside"
        Path(made).chmod(0o755)
        for directory in (inside, outside):
            directory.mkdir()
            os.chown(directory, USER, GROUP)
        (inside / "link").symlink_to(outside)
        local.site.tracker.mount_roots = (str(inside),)
        await local.site.tracker.push_access()
        await until(lambda: local.running.agent.access.peers.local.mount_roots)
        for path in (outside / "view", inside / "link" / "view", inside / ".." / "outside" / "view", inside):
            status, answer = await local.ask(USER, "POST", "/v1/mounts", {"package": "team-a/x:v1", "path": str(path)})
            assert status == 403 and "below" in answer["remedy"], (path, answer)
        assert list(outside.iterdir()) == []


@pytest.mark.root
async def test_a_directory_that_was_moved_out_of_the_roots_is_not_covered(tmp_path: Path) -> None:
    """The path is compared again once the directory is open: before that it may have become
    another."""
    with tempfile.TemporaryDirectory() as made:
        inside, outside = Path(made) / "inside", Path(made) / "outside"
        Path(made).chmod(0o755)
        for directory in (inside, outside):
            directory.mkdir()
            os.chown(directory, USER, GROUP)
        mounts = Mounts(tmp_path / "mounts")
        try:
            with pytest.raises(Refused, match="not shown at"):
                await mounts.mount(
                    "team-a/x:v1",
                    Digest("sha256:" + "ab" * 32),
                    [SquashfsLayer(tmp_path / "absent")],
                    Config(),
                    MountRequest("team-a/x:v1", str(outside / "view")),
                    lambda: lambda: None,
                    Caller(USER, GROUP),
                    roots=(str(inside),),
                )
            assert list(outside.iterdir()) == [], "what was made for the view is removed"
        finally:
            await mounts.close()


def test_below_means_below(tmp_path: Path) -> None:
    check_below(tmp_path / "anywhere", ())
    check_below(tmp_path / "a" / "b", (str(tmp_path), "/nowhere"))
    for path in (tmp_path, tmp_path.parent / f"{tmp_path.name}-other" / "x"):
        with pytest.raises(Refused):
            check_below(path, (str(tmp_path),))


async def test_a_caller_goes_by_numbers_and_names() -> None:
    named = subjects(Caller(0, 0, (0, 54321)))
    assert named[:4] == ("user:0", "user:root", "group:0", "group:root") and "group:54321" in named
    rules = LocalRules({"user:54321": Patterns(("a/*",)), "group:root": Patterns(("b",))})
    callers = LocalCallers()
    if os.geteuid() == 0:
        identity = await callers.identity(Caller(54321, 54322, (0,)), rules)
        assert identity.may_read(["a/x"]) and identity.may_read(["b"]) and not identity.may_read(["c"])
        assert not identity.may("local-admin") and (await callers.identity(Caller(0, 0), rules)).may("local-admin")


async def test_a_directory_service_that_hangs_takes_no_threads_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    rules, go_on, asked = LocalRules({"group:root": Patterns(("b",))}), threading.Event(), list[int]()
    callers, known = LocalCallers(), Caller(54321, 54322, (0,))
    before = await callers.identity(known, rules)

    def hanging(caller: Caller) -> tuple[str, ...]:
        asked.append(caller.uid)
        go_on.wait(60)
        return subjects(caller)

    for name, value in (("subjects", hanging), ("NAMES_S", 0.0), ("NAMES_WAIT_S", 0.2), ("KNOWN_WAIT_S", 0.1)):
        monkeypatch.setattr(f"p2pdist.agent.access.local.{name}", value)
    others = [
        asyncio.create_task(callers.identity(Caller(60000 + number % 8, 54322, (0,)), rules)) for number in range(64)
    ]
    async with asyncio.timeout(60):
        assert await callers.identity(known, rules) == before, "it goes by its names of before"
        await asyncio.to_thread(os.getpid)
        failures = await asyncio.gather(*others, return_exceptions=True)
        assert {type(failure) for failure in failures} == {Unavailable} and len(asked) == LOOKUPS_MAX
        for name in ("NAMES_WAIT_S", "KNOWN_WAIT_S"):  # those that come later wait no more
            monkeypatch.setattr(f"p2pdist.agent.access.local.{name}", 600.0)
        for caller in [*callers._looking]:
            callers._looking[caller] = time.monotonic() - 600.0, callers._looking[caller][1]
        assert await callers.identity(known, rules) == before
        with pytest.raises(Unavailable):
            await callers.identity(Caller(60000, 54322, (0,)), rules)
        go_on.set()
        while callers._looking:
            await asyncio.sleep(0.01)
        assert (await callers.identity(Caller(60000, 54322, (0,)), rules)).may_read(["b"])
