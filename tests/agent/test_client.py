"""The client of the local API, and the verbs that use it, against a small agent on a real Unix
socket."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import socket as sockets
import subprocess
import sys
import tempfile
import time
from asyncio import to_thread
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import programs
import pytest
from aiohttp import web
from mount_agent import DIGEST, MountAgent, answer
from msgspec.structs import replace
from programs import PROGRAM, Program

from p2pdist.agent.api import client as api_client
from p2pdist.agent.api.client import LOST_MAX, LocalClient
from p2pdist.agent.pull.blob import agent_stops
from p2pdist.cli.services import check_seen
from p2pdist.cli.verbs import mount as mount_verb
from p2pdist.model.errors import Conflict, NotFound, Unavailable, UsageError
from p2pdist.model.messages import (
    BlobFile,
    LazyStatus,
    ModelFiles,
    MountRequest,
    MountStatus,
    PullRequest,
    PullStatus,
    Verified,
)
from p2pdist.mount.squashfs import missing
from p2pdist.transfer.problems import problems

SCRIPT = """
if [ "$1" = count ]; then printf %s "$2" | wc -c; exit 6; fi
if [ "$1" = wait ]; then trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done; fi
if [ "$1" = linger ]; then cd /; echo ready; while [ ! -e "$2" ]; do sleep 0.02; done; cat "$P2PDIST_ROOT/app"; exit; fi
if [ "$1" = leave ]; then (cd /; while [ ! -e "$2" ]; do sleep 0.02; done; cat "$P2PDIST_ROOT/app") & exit 5; fi
cat base app
echo "$@" "$GREETING"
test -d "$P2PDIST_ROOT" && exit 7
"""
NOBODY = 65534


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name, which sockets need, open to everybody, with the layers `base`
    and `app`."""
    path = Path(tempfile.mkdtemp(prefix="p2pd-", dir="/tmp"))
    path.chmod(0o755)
    for name in ("base", "app"):
        (path / name).mkdir()
        (path / name / name).write_text(f"{name}\n")
        argv = ["mksquashfs", path / name, path / f"{name}.squashfs", "-quiet", "-no-progress", "-all-root"]
        subprocess.run(argv, check=True, capture_output=True)
    for name in ("home", "hold"):
        (path / name).mkdir()
    yield path
    left = subprocess.run(["findmnt", "-rn", "-o", "TARGET"], capture_output=True, text=True).stdout
    mounts = [line for line in left.splitlines() if line.startswith(f"{path}/")]
    for point in reversed(mounts):
        subprocess.run(["umount", "-l", point], check=False)
    shutil.rmtree(path, ignore_errors=True)
    assert not mounts


def images(place: Path) -> list[Path]:
    return [place / "base.squashfs", place / "app.squashfs"]


@asynccontextmanager
async def serving(app: web.Application, socket: Path) -> AsyncIterator[LocalClient]:
    """A client of `app`, served on `socket`."""
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    try:
        yield LocalClient(socket)
    finally:
        await runner.cleanup()


async def test_a_pull_is_followed_to_its_end(place: Path) -> None:
    """Progress is told each time; what the agent cannot find is raised with its remedy and
    details."""
    agent = MountAgent(place / "mounts", images(place), SCRIPT)
    async with serving(agent.app(), place / "s") as client:
        seen: list[PullStatus] = []
        status = await to_thread(client.pull, PullRequest(package="app:v1"), seen.append)
        assert status.state == "done"
        assert [each.bytes_done for each in seen] == [0, 300, 600, 900]
        with pytest.raises(NotFound, match="none:v1 is not at") as failure:
            await to_thread(client.pull, PullRequest(package="none:v1"))
        assert failure.value.remedy == "Push it first"
        assert failure.value.details == {"origin": "file:///origin"}


async def test_mounts_packages_and_status(place: Path) -> None:
    """Each call of the local API."""
    agent = MountAgent(place / "mounts", images(place), SCRIPT)
    async with serving(agent.app(), place / "s") as client:
        target = place / "a view&force=1"
        shown = await to_thread(client.mount, MountRequest("app:v1", str(target), how="unpack"))
        assert (target / "app").read_text() == "app\n"
        assert await to_thread(client.mounts) == [shown]
        with pytest.raises(Conflict):
            await to_thread(client.mount, MountRequest("app:v1", str(target)))
        with (target / "app").open():
            with pytest.raises(Conflict, match="in use"):
                await to_thread(client.unmount, str(target))
            await to_thread(client.unmount, str(target), force=True)
        assert await to_thread(client.mounts) == []
        assert (await to_thread(client.packages))[0]["reference"] == "app:v1"
        assert (await to_thread(client.status))["host"] == "h1"
        with pytest.raises(UsageError, match="UTF-8"):
            await to_thread(client.mount, MountRequest("app:v1", "/\udcff"))
        with pytest.raises(UsageError, match="UTF-8"):
            await to_thread(client.unmount, "/\udcff")
        assert agent.held == 0


def test_nobody_answers(place: Path) -> None:
    """A missing socket, one that nobody listens on, one that is a file, and one with too long a
    name."""
    stale = sockets.socket(sockets.AF_UNIX)
    stale.bind(str(place / "stale"))
    stale.close()
    (place / "file").write_text("x")
    for name in ("missing", "stale", "file"):
        with pytest.raises(Unavailable, match=f"no agent answers on {place / name}") as failure:
            LocalClient(place / name).status()
        assert "--socket" in failure.value.remedy
        assert failure.value.exit_code == 5
    LocalClient(Path("/" + "x" * 106))
    with pytest.raises(UsageError, match="108 bytes; Unix sockets allow 107"):
        LocalClient(Path("/" + "x" * 107))


ASKING = """
import asyncio, sys
from pathlib import Path
from aiohttp import web
from p2pdist.agent.api import client as api_client
from p2pdist.agent.api.client import LOST_MAX, LocalClient
from p2pdist.agent.pull.blob import agent_stops
from p2pdist.cli.daemon import listen_unix
from p2pdist.cli.main import main
from p2pdist.model.errors import P2PDistError
for name in sys.argv[1:]:
    try:
        LocalClient(Path(name)).status()
    except P2PDistError as error:
        print(error.exit_code, error)
try:
    asyncio.run(listen_unix(web.Application(), Path(sys.argv[1])))
except P2PDistError as error:
    print(error.exit_code, error)
sys.argv[1:] = ["ls", "--socket", sys.argv[1]]
main()
"""


@pytest.mark.root
def test_who_may_not_use_the_socket_is_told_whose_it_is(place: Path) -> None:
    """A socket of a group, one of root's own, one in a directory that is closed to others, and no
    directory at all."""
    place.chmod(0o755)
    listening = []
    for name, owner in (("group", 1), ("root", 0), ("closed/agent", 1)):
        (place / name).parent.mkdir(mode=0o755, exist_ok=True)
        listening.append(sockets.socket(sockets.AF_UNIX))
        listening[-1].bind(str(place / name))
        os.chown(place / name, 0, owner)
        (place / name).chmod(0o660)
    os.chown(place / "closed", 0, 1)
    (place / "closed").chmod(0o750)
    names = [str(place / name) for name in ("group", "root", "closed/agent", "missing/agent")]
    asked = subprocess.run(
        [sys.executable, "-c", ASKING, *names],
        user=65534,
        group=65534,
        extra_groups=[],
        text=True,
        capture_output=True,
    )
    for each in listening:
        each.close()
    assert asked.returncode == 4 and asked.stderr.startswith("p2pdist: this user may not use"), (
        "no verb calls it wrong usage"
    )
    group, root, closed, missing, second = asked.stdout.splitlines()
    may_not = "4 this user may not use the agent's socket"
    asks = "Ask to be let into the group daemon (usermod -aG daemon nobody), then log in anew"
    assert group == f"{may_not} {names[0]}: the socket {names[0]} belongs to root:daemon. {asks}"
    assert root.startswith(f"{may_not} {names[1]}: the socket {names[1]} belongs to root:root. Use sudo")
    assert closed == f"{may_not} {names[2]}: the directory {place}/closed belongs to root:daemon. {asks}"
    assert missing.startswith(f"5 no agent answers on {names[3]} (there is no directory {place}/missing). Start")
    assert second.startswith(f"4 this user may not make the socket {names[0]}") and (place / "group").is_socket()


async def test_answers_that_are_none(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed pull, a server error without a problem document, other JSON, an answer that is cut
    off, and none at all."""
    monkeypatch.setattr(api_client, "LOADS_AWAY_S_MAX", 0.5)
    problem = NotFound("gone", remedy="Pull again").problem()

    async def failed(request: web.Request) -> web.Response:
        return answer(PullStatus("p1", "failed", "app:v1", error=problem))

    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"host":')
        assert request.transport is not None
        request.transport.close()
        return response

    async def leaves(request: web.Request) -> web.Response:
        raise asyncio.CancelledError

    async def page(request: web.Request) -> web.Response:
        return web.Response(status=500, text="<html>no</html>")

    async def other(request: web.Request) -> web.Response:
        return answer({"mounts": 3})

    app = web.Application()
    app.add_routes(
        [
            web.get("/v1/mounts", other),
            web.post("/v1/pulls", failed),
            web.get("/v1/status", cut),
            web.get("/v1/models", leaves),
            web.get("/v1/packages", page),
        ]
    )
    async with serving(app, place / "s") as client:
        with pytest.raises(NotFound, match="gone"):
            await to_thread(client.pull, PullRequest(package="app:v1"))
        with pytest.raises(Unavailable, match="its answer was cut off") as failure:
            await to_thread(client.status)
        assert "still runs" in failure.value.remedy
        with pytest.raises(Unavailable, match="it closed the connection") as failure:
            await to_thread(client.model_files, "m:v1")
        assert "still runs" in failure.value.remedy
        for call in (client.packages, client.mounts):
            with pytest.raises(Unavailable, match="does not speak as an agent"):
                await to_thread(call)


async def test_a_file_that_the_agent_writes_elsewhere_is_missed(place: Path) -> None:
    """An agent whose paths lead elsewhere says that it is done, and the caller has nothing, or what
    it had before."""
    shared = place / "shared"

    async def pulled(request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=PullRequest)
        if shared.exists():
            Path(str(wanted.output)).write_text("new")
        return answer(PullStatus("1", "done", str(wanted.blob), DIGEST, 3, 3, output="copy"))

    app = web.Application()
    app.add_routes([web.post("/v1/pulls", pulled)])
    words = ["blob", "pull", DIGEST, "-o", place / "file", "--socket", place / "s"]
    async with serving(app, place / "s"):
        for expected, prepare in (
            (1, lambda: None),
            (1, lambda: (place / "file").write_text("old")),
            (0, shared.mkdir),
        ):
            prepare()
            done = await to_thread(programs.run, *words)
            assert (done.returncode, "this process does not see it" in done.stderr) == (expected, expected == 1)


async def test_a_pull_outlives_a_pause_of_the_agent(place: Path) -> None:
    """While the agent does not answer for a moment it is asked again."""
    agent = MountAgent(place / "mounts", images(place), SCRIPT)
    runner = web.AppRunner(agent.app())
    await runner.setup()
    await web.UnixSite(runner, str(place / "s")).start()
    client = LocalClient(place / "s")
    pull = asyncio.create_task(to_thread(client.pull, PullRequest(package="app:v1")))
    await asyncio.sleep(0.1)
    await runner.cleanup()
    await asyncio.sleep(0.5)
    assert not pull.done()
    runner = web.AppRunner(agent.app())
    await runner.setup()
    await web.UnixSite(runner, str(place / "s")).start()
    assert (await pull).state == "done"
    await runner.cleanup()


@pytest.mark.parametrize("answers", [True, False], ids=["running", "hanging"])
async def test_a_signal_ends_pulls_of_several_packages(place: Path, answers: bool) -> None:
    """Soon, and the command does not wait for its threads: their pulls go on for ever, or the agent
    does not even answer."""
    asked: set[str] = set()
    over = asyncio.Event()

    async def pull(request: web.Request) -> web.Response:
        package = str((await request.json())["package"])
        asked.add(package)
        if not answers:
            await over.wait()
        return answer(PullStatus("p1", "running", package, DIGEST, 900, 300, 100, 200, 0, 0.5), 202)

    async def pulled(request: web.Request) -> web.Response:
        await asyncio.sleep(float(request.query["wait_s"]))
        return answer(PullStatus("p1", "running", "app:v1", DIGEST, 900, 300, 100, 200, 0, 0.5))

    app = web.Application()
    app.add_routes([web.post("/v1/pulls", pull), web.get("/v1/pulls/{id}", pulled)])
    names = [f"app:v{number}" for number in range(6)]
    async with serving(app, place / "s"):
        words = [*PROGRAM, "pull", *names, "--socket", place / "s"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                async with asyncio.timeout(60):
                    while len(asked) < 4:
                        await asyncio.sleep(0.01)
                process.send_signal(signal.SIGINT)
                said, complained = await to_thread(process.communicate, timeout=20)
            finally:
                process.kill()
                over.set()  # else the server waits for its handlers for a minute
    assert (process.returncode, said) == (130, "") and "p2pdist: interrupted" in complained.splitlines()
    assert len(asked) == 4, "those behind them are not begun"


@pytest.mark.parametrize("words", [("pull", "app:v1"), ("blob", "pull", DIGEST, "-o", "/dev/null")])
async def test_who_interrupts_a_pull_hears_that_it_goes_on(place: Path, words: tuple[str, ...]) -> None:
    running = PullStatus("p1", "running", "app:v1", DIGEST, 900, 300, 100, 200, 0, 0.5)
    followed = asyncio.Event()

    async def pull(_: web.Request) -> web.Response:
        return answer(running, 202)

    async def pulled(request: web.Request) -> web.Response:
        followed.set()
        await asyncio.sleep(float(request.query["wait_s"]))
        return answer(running)

    app = web.Application()
    app.add_routes([web.post("/v1/pulls", pull), web.get("/v1/pulls/{id}", pulled)])
    async with serving(app, place / "s"):
        command = [*PROGRAM, *words, "--socket", str(place / "s")]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                await asyncio.wait_for(followed.wait(), 60)
                process.send_signal(signal.SIGINT)
                _, complained = await to_thread(process.communicate, timeout=20)
            finally:
                process.kill()
    name = words[1] if words[0] == "pull" else DIGEST
    said = [f"{name}: the agent goes on to pull it; p2pdist status says how far it is", "p2pdist: interrupted"]
    assert (process.returncode, list(filter(None, complained.splitlines()))) == (130, said)


async def test_what_could_not_be_repaired_is_told_in_one_json_document(place: Path) -> None:
    """And with its exit code, also where nothing was to be repaired."""
    usage = {"bytes_complete": 3, "bytes_objects": 0, "bytes_variants": 0}
    failed = ("app:v1: the origin is away",)
    found = [Verified(1, 3, ("sha256:1",), True, (), failed), Verified(1, 3, ("sha256:1",), True)]

    async def verify(request: web.Request) -> web.Response:
        repairs = (await request.json())["repair"]
        return web.Response(body=msgspec.json.encode(found[0] if repairs else found[1]) + b"\n")

    async def status(request: web.Request) -> web.Response:
        return answer({"store": {"usage": usage}})

    app = web.Application()
    app.add_routes([web.post("/v1/verify", verify), web.get("/v1/status", status)])
    async with serving(app, place / "s"):
        for words, named in ((("verify",), failed), (("verify", "--no-repair"), ())):
            done = await to_thread(programs.run, *words, "--json", "--socket", place / "s")
            assert (done.returncode, tuple(json.loads(done.stdout)["failed"])) == (6, named), done.stdout
            assert "1 things in the store were wrong" in done.stderr and done.stderr.count("\n") == 1
            assert (await to_thread(programs.run, *words, "--socket", place / "s")).returncode == 6


async def test_a_pull_goes_on_at_an_agent_that_was_killed_and_runs_again(place: Path) -> None:
    """It knows the pull no more. One that the pull kills each time is not asked for ever."""
    asked: list[PullRequest] = []
    ends_at = 2

    async def begin(request: web.Request) -> web.Response:
        asked.append(msgspec.json.decode(await request.read(), type=PullRequest))
        state: Literal["done", "running"] = "done" if len(asked) == ends_at else "running"
        return answer(PullStatus("1", state, "app:v1", DIGEST, 3, 3))

    async def lost(_: web.Request) -> web.Response:
        raise NotFound("there is no pull '1'; the agent may have been restarted")

    app = web.Application(middlewares=[problems])
    app.add_routes([web.post("/v1/pulls", begin), web.get("/v1/pulls/1", lost)])
    async with serving(app, place / "s"):
        wanted = PullRequest(package="app:v1", priority="preseed")
        assert (await to_thread(LocalClient(place / "s").pull, wanted)).state == "done"
        assert asked == [wanted, wanted]
        ends_at = 0
        with pytest.raises(NotFound, match="restarted"):
            await to_thread(LocalClient(place / "s").pull, wanted)
        assert len(asked) == 2 + 1 + LOST_MAX


@pytest.mark.slow
async def test_loading_goes_on_after_agents_that_stop_or_end(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One hands over to other hosts for as long as it was told to, and serves nobody meanwhile; one
    ends while it waits for bytes, and so does the next."""
    monkeypatch.setattr(api_client, "LOADS_AWAY_S_MAX", 0.5)
    monkeypatch.setattr(api_client, "POLL_S", 0.01)
    ends, until = [*["stop"] * 3, "end", "end", "answer"], [0.3, 0.3, 0.3, 0.8, 0.8, 0.0]

    async def serve(request: web.Request) -> web.Response:
        await asyncio.sleep(until.pop(0))
        match ends.pop(0):
            case "stop":
                raise agent_stops()
            case "end":
                assert request.transport is not None
                request.transport.abort()
        if "file" in request.path:
            return answer(BlobFile("/x", 3, 3, 1))
        return answer(ModelFiles("image", None, []))

    app = web.Application(middlewares=[problems])
    app.add_routes([web.get("/v1/blobs/{digest}/file", serve), web.get("/v1/models", serve)])
    async with serving(app, place / "s"):
        assert (await to_thread(LocalClient(place / "s").blob_file, DIGEST, 0, 3)).path == "/x"
        ends, until = ["end", "answer"], [0.0, 0.0]
        assert (await to_thread(LocalClient(place / "s").model_files, "image")).reference == "image"
        ends, until = ["end"] * 10_000, [0.0] * 10_000
        with pytest.raises(Unavailable, match="no agent"):
            await to_thread(LocalClient(place / "s").blob_file, DIGEST, 0, 3)


# -- the verbs, as processes


class Verbs:
    """Runs verbs against a small agent in a process of its own, both as the same user."""

    def __init__(self, place: Path, prefix: list[str]) -> None:
        self.place, self.prefix = place, prefix
        self.env = {**os.environ, "TMPDIR": str(place / "home"), "P2PDIST_SOCKET": str(place / "home" / "s")}

    def start(self, *argv: str | Path) -> subprocess.Popen[str]:
        """A process of that user."""
        return subprocess.Popen([*self.prefix, *map(str, argv)], **self._streams())

    def script(self, path: Path, *words: str | Path) -> Program | subprocess.Popen[str]:
        """A script as a process of that user."""
        if self.prefix:
            return self.start(sys.executable, path, *words)
        return programs.start(*words, script=path, **self._streams())

    def _streams(self) -> dict[str, Any]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return {"env": self.env, "cwd": "/", **pipes}

    def program(self, *words: str) -> Program | subprocess.Popen[str]:
        """`p2pdist` as a process of that user."""
        if self.prefix:
            return self.start(*PROGRAM, *words)
        return programs.start(*words, **self._streams())

    def verb(self, *words: str) -> tuple[int, str, str]:
        """Exit code, output, errors."""
        with self.program(*words) as process:
            said, complained = process.communicate(timeout=60)
        assert process.returncode is not None
        return process.returncode, said, complained


@pytest.fixture(params=[pytest.param("root", marks=pytest.mark.root), "user"])
def verbs(request: pytest.FixtureRequest, place: Path) -> Iterator[Verbs]:
    """Verbs and agent as root and as a user without rights; "own" is whoever runs the tests."""
    prefix: list[str] = []
    if request.param == "user" and os.geteuid() == 0:
        from unprivileged import as_nobody

        os.chown(place / "home", NOBODY, NOBODY)
        prefix = as_nobody(place / "hold", "env")
    made = Verbs(place, prefix)
    script = Path(__file__).parent / "mount_agent.py"
    words = (place / "home" / "s", place / "home" / "mounts", SCRIPT, *images(place))
    with made.script(script, *words) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "ready\n"
        yield made
        agent.send_signal(signal.SIGTERM)
        _said, complained = agent.communicate(timeout=60)
        assert agent.returncode == 0, complained
    assert not list((place / "home" / "mounts" / "shown").glob("*/*"))  # each user has a directory there


def namespaces(verbs: Verbs) -> bool:
    """Whether a package can be shown in a user namespace. Where the tests are root's, /dev/fuse is
    opened for the user."""
    return shutil.which("squashfuse") is not None if verbs.prefix else not missing()


def test_run_shows_runs_and_takes_away(verbs: Verbs) -> None:
    """Exit code, arguments and environment; standard error says which way and why; nothing is shown
    afterwards."""
    code, said, complained = verbs.verb("run", "app:v1", "--", "--epochs", "3", "--", "x")
    assert code == 7, complained
    lines = said.splitlines()
    assert lines[:2] == ["base", "app"]
    assert lines[2].startswith("--epochs 3 -- x from /")
    unprivileged = "userns" if namespaces(verbs) else "unpack"
    assert complained.splitlines()[-1].split(":")[0] == (unprivileged if verbs.prefix or os.geteuid() else "overlay")
    assert verbs.verb("status", "--json")[1].count('"mounts":[]') == 1
    assert not [path for path in (verbs.place / "home").iterdir() if path.name not in ("s", "mounts")]


def test_words_that_are_no_text_reach_a_program_that_is_shown_lazily(verbs: Verbs) -> None:
    code, said, complained = verbs.verb("run", "--lazy", "app:v1", "--", "count", "caf\udce9")
    assert (code, said.strip()) == (6, "4"), complained


@pytest.mark.slow
@pytest.mark.parametrize("how", ["unpack", "userns"])
def test_run_can_be_told_how(verbs: Verbs, how: str) -> None:
    """--how forces a way, whoever runs it."""
    if how == "userns" and not namespaces(verbs):
        pytest.skip("needs squashfuse and an open /dev/fuse: apt-get install squashfuse fuse3")
    code, said, complained = verbs.verb("run", "--how", how, "app:v1")
    assert code == 7, complained
    assert said.splitlines()[:2] == ["base", "app"]
    assert complained.splitlines()[-1].startswith(f"{how}: ")


def test_run_unpacks_where_nothing_else_works(verbs: Verbs) -> None:
    """Without squashfuse on the PATH a user's package is unpacked, and it is said why."""
    if not verbs.prefix and os.geteuid() == 0:
        pytest.skip("root mounts")
    tools = verbs.place / "tools"
    tools.mkdir()
    for tool in ("sh", "cat", "unsquashfs", "env", "setpriv", "unshare", "mount", "mkdir", "mknod", "chmod", "rm"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    verbs.env["PATH"] = str(tools)
    code, said, complained = verbs.verb("run", "app:v1")
    assert code == 7, complained
    assert said.splitlines()[:2] == ["base", "app"]
    assert "unpack: not root" in complained
    assert "squashfuse is not installed" in complained


@pytest.mark.slow
def test_mount_and_umount(verbs: Verbs) -> None:
    """A package at a directory, by people and by scripts."""
    target = verbs.place / "home" / "the view\x1b[2J"
    code, said, complained = verbs.verb("mount", "app:v1", str(target), "--json")
    assert code == 0, complained
    found = json.loads(said)
    assert (found["path"], found["digest"]) == (str(target), DIGEST)
    assert found["how"] == ("unpack" if verbs.prefix or os.geteuid() else "overlay")
    shown = verbs.verb("status")[1]
    assert str(target).replace("\x1b", "\\x1b") in shown and "\x1b" not in shown
    assert verbs.verb("mount", "app:v1", str(target))[0] == 1
    assert verbs.verb("umount", str(target)) == (0, "", "")
    assert not target.exists()
    code, said, complained = verbs.verb("mount", "app:v1", str(target), "-q")
    assert (code, said.count("\n"), complained) == (0, 1, "")
    assert verbs.verb("umount", str(target)) == (0, "", "")
    assert verbs.verb("umount", str(target))[0] == 3


@pytest.mark.slow
@pytest.mark.parametrize("verbs", ["own"], indirect=True)
def test_pull_and_ls(verbs: Verbs) -> None:
    """What scripts read, and exit codes."""
    code, said, _complained = verbs.verb("pull", "app:v1", "--json")
    assert code == 0
    expected = {"reference": "app:v1", "digest": DIGEST, "bytes_origin": 100, "bytes_peers": 600, "bytes_cached": 0}
    assert expected.items() <= json.loads(said).items()
    assert "600 B from peers, 100 B from the origin" in verbs.verb("pull", "app:v1")[1]
    assert json.loads(verbs.verb("ls", "--json")[1])[0]["reference"] == "app:v1"
    heads, row = verbs.verb("ls")[1].splitlines()[:2]
    assert heads.split()[:3] == ["PACKAGE", "DIGEST", "SIZE"] and row.startswith("app:v1  ")
    assert f"  {DIGEST[:19]}  " in row
    code, said, _complained = verbs.verb("pull", "none", "--json")
    assert code == 3
    assert json.loads(said)["origin"] == "file:///origin"
    assert verbs.verb("pull", "UPPER CASE")[0] == 2
    assert verbs.verb("pull", "app:v1", "--priority", "later")[0] == 2


def test_no_agent_is_exit_5(place: Path) -> None:
    """Every verb that needs one says so."""
    lonely = Verbs(place, [])
    for words in (["pull", "a"], ["umount", "/x"], ["run", "a"], ["status"]):
        code, said, complained = lonely.verb(*words)
        assert (code, said) == (5, "")
        assert "no agent answers on" in complained


def test_a_stopped_run_takes_its_mount_away(verbs: Verbs) -> None:
    """SIGTERM reaches the program; when it ends of it nothing stays shown."""
    with verbs.program("run", "app:v1", "--", "wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 9
    assert json.loads(verbs.verb("status", "--json")[1])["mounts"] == []


class Elsewhere:
    """Verbs in a mount namespace that was made before anything was shown, as jobs have it under
    PrivateTmp or in a container."""

    def __init__(self, verbs: Verbs, prepare: str = "true") -> None:
        self.verbs, self.prepare = verbs, prepare

    def verb(self, *words: str) -> tuple[int, str, str]:
        """Exit code, output, errors."""
        script = f"{self.prepare} && exec {sys.executable} -m p2pdist.cli.main {shlex.join(words)}"
        argv = ("unshare", "--mount", "--propagation", "private", "sh", "-c", script)
        with self.verbs.start(*argv) as process:
            said, complained = process.communicate(timeout=60)
        return process.returncode, said, complained

    def shown(self) -> list[str]:
        """What the agent shows."""
        return [mount["path"] for mount in json.loads(self.verbs.verb("status", "--json")[1])["mounts"]]


@pytest.mark.root
@pytest.mark.parametrize("verbs", ["root"], indirect=True)
def test_a_program_does_not_start_where_its_package_is_not_seen(verbs: Verbs) -> None:
    """It would start in the empty directory under the mount. Plain files are seen; nothing stays
    shown."""
    elsewhere = Elsewhere(verbs)
    code, said, complained = elsewhere.verb("run", "app:v1")
    assert (code, said) == (1, "")
    assert "it has mounts or a root of its own" in complained
    assert elsewhere.verb("run", "--how", "unpack", "app:v1")[0] == 7
    assert elsewhere.shown() == []


@pytest.mark.root
@pytest.mark.parametrize("verbs", ["root"], indirect=True)
@pytest.mark.parametrize("how", ["overlay", "unpack"])
def test_a_package_is_not_mounted_where_the_caller_does_not_see_it(verbs: Verbs, how: str) -> None:
    """Below a file system of the caller's own the agent sees another directory, or none. Neither a
    mount nor a directory stays."""
    shared = verbs.place / "home" / "shared"
    shared.mkdir()
    own = f"mount -t tmpfs own {shared}"
    elsewhere = Elsewhere(verbs, f"{own} && mkdir {shared}/below")
    code, said, complained = elsewhere.verb("mount", "app:v1", f"{shared}/view", "--how", how)
    assert (code, said) == (1, "")
    assert "Name a directory that the agent and this process share" in complained
    code, said, complained = elsewhere.verb("mount", "app:v1", f"{shared}/below/view", "--how", how)
    assert (code, said) == (3, "")
    assert "does not exist where the agent runs, only here" in complained
    assert elsewhere.shown() == []
    assert not list(shared.iterdir())


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("verbs", ["root"], indirect=True)
def test_another_s_mount_of_the_same_name_is_not_taken_away(verbs: Verbs) -> None:
    """umount in a namespace where the path is another directory; --force does it all the same."""
    view = str(verbs.place / "home" / "view")
    assert verbs.verb("mount", "app:v1", view)[0] == 0
    elsewhere = Elsewhere(verbs, f"umount {view}")
    code, said, complained = elsewhere.verb("umount", view)
    assert (code, said) == (1, "")
    assert "not what the caller sees there" in complained
    assert elsewhere.shown() == [view]
    assert Elsewhere(verbs).verb("umount", view)[0] == 0  # the same mount, seen from a copy of its namespace
    assert verbs.verb("mount", "app:v1", view)[0] == 0
    assert elsewhere.verb("umount", "--force", view)[0] == 0
    assert elsewhere.shown() == []


def test_layers_that_are_not_seen_are_not_said_to_be_missing(place: Path) -> None:
    """An agent without root hands out images of its store, which a caller in a container may not
    see."""
    shown = MountStatus("app:v1", DIGEST, "images/1", "images", images=(str(place / "app.squashfs"), "/store/of/agent"))
    with pytest.raises(Conflict, match="/store/of/agent, where this process does not see it"):
        check_seen(shown, "")
    check_seen(replace(shown, images=shown.images[:1]), "")


def mounts(verbs: Verbs) -> list[MountStatus]:
    return LocalClient(verbs.place / "home" / "s").mounts()


def until_nothing_is_shown(verbs: Verbs) -> None:
    deadline = time.monotonic() + 30
    while mounts(verbs) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert mounts(verbs) == []


@pytest.mark.slow
def test_the_view_of_a_killed_run_goes_when_its_program_ends(verbs: Verbs) -> None:
    """kill -9 of `run` alone: the program, which has nothing open of its view, goes on with it, and
    nobody need take it away."""
    stop, how = verbs.place / "stop", ("--how", "unpack") if verbs.prefix or os.geteuid() else ()
    with verbs.program("run", *how, "app:v1", "--", "linger", str(stop)) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        (shown,) = mounts(verbs)
        os.kill(shown.pid, signal.SIGKILL)
        code, _, complained = verbs.verb("umount", shown.path)
        assert code == 1 and "is in use" in complained
        stop.touch()
        assert run.communicate(timeout=30)[0] == "app\n"
    until_nothing_is_shown(verbs)


@pytest.mark.slow
def test_the_view_of_a_run_stays_for_what_it_leaves_behind(verbs: Verbs) -> None:
    """`run` ends with its program, and says that a process in the background goes on with the
    view."""
    stop, how = verbs.place / "stop", ("--how", "unpack") if verbs.prefix or os.geteuid() else ()
    with verbs.program("run", *how, "app:v1", "--", "leave", str(stop)) as run:
        assert run.wait(30) == 5
        assert len(mounts(verbs)) == 1
        stop.touch()
        said, complained = run.communicate(timeout=30)
    assert said == "app\n"
    assert "the package stays shown until they end" in complained
    until_nothing_is_shown(verbs)


@pytest.mark.slow
def test_images_that_a_killed_run_was_given_are_let_go(verbs: Verbs) -> None:
    """In a user namespace the program ends with `run`, and the agent keeps nothing for it."""
    if not namespaces(verbs):
        pytest.skip("needs squashfuse and an open /dev/fuse: apt-get install squashfuse fuse3")
    with verbs.program("run", "--how", "userns", "app:v1", "--", "wait") as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        (shown,) = mounts(verbs)
        os.kill(shown.pid, signal.SIGKILL)
        run.communicate(timeout=30)
    until_nothing_is_shown(verbs)


def test_a_wait_for_a_lazy_view_goes_on_over_a_restart_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next agent answers before it has taken the view over."""
    monkeypatch.setattr(mount_verb, "FILL_POLL_S", 0.001)
    view = MountStatus("app:v1", DIGEST, "/v", "lazy", lazy=LazyStatus(bytes_total=2, bytes_filled=1))
    whole = replace(view, lazy=LazyStatus(whole=True, bytes_total=2, bytes_filled=2))
    answers: list[Any] = [[view], Unavailable("away"), Unavailable("away"), [replace(view, lazy=None)], [whole]]

    def mounts(client: LocalClient) -> list[MountStatus]:
        said = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(said, Unavailable):
            raise said
        return list(said)

    monkeypatch.setattr(LocalClient, "mounts", mounts)
    assert mount_verb._filled(view, tmp_path / "s", quiet=True) == whole
    monkeypatch.setattr(mount_verb, "AWAY_S_MAX", 0.05)
    answers[:] = [[replace(view, lazy=None)]]
    with pytest.raises(Unavailable, match="stays mounted"):
        mount_verb._filled(view, tmp_path / "s", quiet=True)
    answers[:] = [[]]
    with pytest.raises(NotFound, match="was unmounted"):
        mount_verb._filled(view, tmp_path / "s", quiet=True)
