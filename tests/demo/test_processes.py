"""What the demo starts, it ends: services, calls, their children, and those that hid."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waits import wait_until

from p2pdist.cli.verbs.demo.processes import Processes, strays
from p2pdist.model.errors import Unavailable

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)
HIDING = """
import os, time
if os.fork(): time.sleep(60)
os.setsid()
if os.fork(): os._exit(0)
print('hidden', flush=True)
time.sleep(60)
"""

OBEDIENT = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (open('order', 'a').write({!r}), sys.exit(0)))
print('up', flush=True)
time.sleep(60)
"""

ENDLESS = """
import asyncio, sys
from rich.console import Console
from p2pdist.cli.verbs.demo.script import Interrupted, Options, Script, play

class Endless(Script):
    async def play(self):
        async with self.place() as cluster:
            await cluster.processes.start("host1", [sys.executable, "-c", "import time; time.sleep(60)"])
            await cluster.processes.start("origin", [sys.executable, "-c", {hiding!r}])
            (cluster.place / "stores").mkdir()
            (cluster.place / "stores" / "locked").mkdir(mode=0o500)
            await asyncio.sleep(0.5)
            print("PLACE", cluster.place, flush=True)
            if {fails}:
                raise ValueError("on purpose")
            await cluster.processes.call("pull", [sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=60)

try:
    endless = Endless(Options(), Console(stderr=True))
    asyncio.run(play(endless, endless.play))
except Interrupted as interrupted:
    sys.exit(128 + interrupted.number)
"""


async def test_services_and_calls_are_ended_and_the_order_is_kept(tmp_path: Path) -> None:
    """Agents end before what they talk to; a call that still runs ends first; nothing that obeys is
    reported."""
    processes = Processes(tmp_path)
    for name in ("origin", "host1"):
        service = await processes.start(name, [sys.executable, "-c", OBEDIENT.format(name + " ")])
        while service.last_words() != "up":
            await asyncio.sleep(0.02)
    call = asyncio.create_task(processes.call("pull", SLEEP, timeout_s=60))
    while not processes.calls:
        await asyncio.sleep(0.02)
    assert await processes.stop() == []
    assert (await call).code == -signal.SIGTERM
    assert (tmp_path / "order").read_text() == "host1 origin "
    assert strays(str(tmp_path)) == {}


async def test_a_process_that_hides_is_found_ended_and_reported(tmp_path: Path) -> None:
    """A grandchild in a session of its own does not survive, and its survival so far is said."""
    processes = Processes(tmp_path)
    service = await processes.start("origin", [sys.executable, "-c", HIDING])
    while service.last_words() != "hidden" or len(strays(str(tmp_path))) > 2:  # the one between goes away
        await asyncio.sleep(0.02)
    untidy = await processes.stop()
    assert len(untidy) == 1
    assert "was left running" in untidy[0]
    assert strays(str(tmp_path)) == {}


async def test_a_deaf_service_is_killed_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that ignores SIGTERM does not hold up the end for longer than the limit."""
    monkeypatch.setattr("p2pdist.cli.verbs.demo.processes.STOP_S", 0.5)
    processes = Processes(tmp_path)
    service = await processes.start("host1", [sys.executable, "-c", STUBBORN])
    while service.last_words() != "deaf":
        await asyncio.sleep(0.02)
    untidy = await processes.stop()
    assert untidy == ["host1 did not stop within 0 s of SIGTERM"]
    assert strays(str(tmp_path)) == {}


async def test_a_service_that_died_is_named_with_its_last_words(tmp_path: Path) -> None:
    """Waiting for the others stops at once, and the end of the demo reports it too."""
    processes = Processes(tmp_path)
    service = await processes.start("tracker", [sys.executable, "-c", "raise SystemExit('no port for me')"])
    await service.process.wait()
    with pytest.raises(Unavailable, match=r"tracker ended with exit code 1: no port for me"):
        processes.check_running()
    assert await processes.stop() == ["tracker ended with 1: no port for me"]


async def test_a_call_has_a_limit_and_an_outcome(tmp_path: Path) -> None:
    """Output and exit code are told apart; a call that takes too long is ended."""
    processes = Processes(tmp_path)
    done = await processes.call("it", [sys.executable, "-c", "print('out'); raise SystemExit('why')"], timeout_s=30)
    assert (done.code, done.stdout, done.last_words()) == (1, "out\n", "why")
    with pytest.raises(Unavailable, match="did not end within"):
        await processes.call("it", SLEEP, timeout_s=0.3)
    assert strays(str(tmp_path)) == {}


async def test_settings_of_the_callers_own_installation_do_not_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P2PDIST_* variables and data directories of the user stay out of the demo."""
    monkeypatch.setenv("P2PDIST_SOCKET", "/run/p2pdist/agent.sock")
    code = "import os; print(os.environ.get('P2PDIST_SOCKET'), os.environ['XDG_DATA_HOME'])"
    done = await Processes(tmp_path).call("it", [sys.executable, "-c", code], timeout_s=30)
    assert done.stdout.split() == ["None", str(tmp_path / "home" / "data")]


def play_endless(tmp_path: Path, *, fails: bool) -> tuple[subprocess.Popen[str], Path]:
    """A demo with stand-ins for the services, once all of them run; and its directory."""
    program = ENDLESS.format(hiding=HIDING, fails=fails)
    demo = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout
    return demo, Path(demo.stdout.readline().split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_demo_tidily(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, also pressed twice: no process and no file stays, and the exit code names the
    signal."""
    demo, place = play_endless(tmp_path, fails=False)
    wait_until(lambda: len(strays(str(place))) >= 3, "the demo's processes")
    time.sleep(0.3)
    demo.send_signal(number)
    time.sleep(0.1)
    demo.send_signal(number)
    demo.communicate(timeout=30)
    assert demo.returncode == 128 + number
    assert strays(str(place)) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_failure_ends_the_demo_tidily(tmp_path: Path) -> None:
    """An exception in the middle leaves as little as a signal."""
    demo, place = play_endless(tmp_path, fails=True)
    _out, err = demo.communicate(timeout=30)
    assert demo.returncode == 1
    assert "on purpose" in err
    assert strays(str(place)) == {}
    assert list(tmp_path.iterdir()) == []


def test_services_do_not_survive_a_demo_that_is_killed(tmp_path: Path) -> None:
    """kill -9 leaves files, but the services hear of it and end (PR_SET_PDEATHSIG)."""
    demo, place = play_endless(tmp_path, fails=False)
    while any(name == "setpriv" for name in strays(str(place)).values()) or len(strays(str(place))) < 4:
        time.sleep(0.05)
    demo.kill()
    demo.communicate(timeout=30)
    wait_until(lambda: len(strays(str(place))) <= 1, "the end of the services")
    left = strays(str(place))
    for pid in left:  # the one that hid from its parent on purpose
        os.kill(pid, signal.SIGKILL)
