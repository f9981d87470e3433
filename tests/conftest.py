"""What holds for every test: root tests are skipped visibly without root, and nothing is left
behind (tidiness.py)."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import effort
import pytest
from programs import PROGRAMS
from tidiness import TOKEN_VARIABLE, leftovers, namespaces, namespaces_left, remove_leftovers

if TYPE_CHECKING:
    from image_rig import Odd


def pytest_configure(config: pytest.Config) -> None:
    """`kill -USR1 <pid>` prints what every thread of a run that hangs is doing. What a test stops
    with Ctrl-C must not ignore it because the run was started in the background of a script, as
    shells have it."""
    # With PYTHONDONTWRITEBYTECODE each worker of each run would compile all tests anew, and what
    # prepares their assertions takes it 20 seconds; `make clean` removes what is kept.
    sys.dont_write_bytecode = False
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    effort.set_default()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as under nohup(1)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def entered_path() -> Iterator[Path]:
    """A directory that any user may enter. Those of pytest are its user's alone, and each pytest
    that starts sees to that."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No source is too late for a host: for tests that count what is read from the centre, where a
    host that gets nothing for a moment turns, and of which a busy machine may make many."""
    from p2pdist.core.download import download, stillness
    from p2pdist.core.download.stripe import Stripe

    for judgement, never in (("silent", None), ("stalled", False), ("starved", ()), ("is_slow", False)):
        monkeypatch.setattr(Stripe, judgement, lambda *_, never=never, **__: never)
    monkeypatch.setattr(stillness, "STARVED_STILLS", 1e9)
    for module in (stillness, download):
        monkeypatch.setattr(module, "STALL_FIRST_S", 60.0)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--turn 3/10`: every tenth of the selected tests, beginning with the fourth; `0,1/3`: two of
    three."""
    parser.addoption("--turn", metavar="N[,N]/K", help="run parts N (from 0) of K of the selected tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `root` are skipped, with the reason in the report, when they could not pass."""
    if turn := config.getoption("--turn"):
        numbers, _, count = turn.partition("/")
        parts = {int(number) % int(count) for number in numbers.split(",")}
        config.hook.pytest_deselected(
            items=[each for place, each in enumerate(items) if place % int(count) not in parts]
        )
        items[:] = [each for place, each in enumerate(items) if place % int(count) in parts]
    if os.geteuid() == 0:
        return
    skip = pytest.mark.skip(reason="needs root (mounts, network namespaces): run the tests as root to include it")
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of collected tests, and what they import, live to the end of a run: the collector
    need not walk them, neither while they become more nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the last test of a run that leaves a mount, a process or a network namespace."""
    directory = tmp_path_factory.getbasetemp()
    token = f"{os.getpid()}-{time.monotonic_ns()}"
    before = namespaces()
    outer = os.environ.get(TOKEN_VARIABLE)
    os.environ[TOKEN_VARIABLE] = token
    os.environ["P2PDIST_AGENT_MIRROR"] = "off"  # only one agent of a machine can have the usual port
    yield
    PROGRAMS.close()
    # Another worker of this run may be using a namespace of its own right now, and looks after it
    # itself.
    ours = before if "PYTEST_XDIST_WORKER" not in os.environ else namespaces()
    found = leftovers(directory, token, ours)
    if found:
        remove_leftovers(directory, token)
    if outer is None:
        del os.environ[TOKEN_VARIABLE]
    else:
        os.environ[TOKEN_VARIABLE] = outer
    assert not found, "left behind by the tests:\n" + "\n".join(found)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember, in the process that leads a run, the namespaces that were there before."""
    session.config.stash[_before] = namespaces()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With several workers, namespaces are checked once all of them have finished."""
    if hasattr(session.config, "workerinput"):
        return
    left = namespaces_left(session.config.stash.get(_before, namespaces()))
    if left:
        print(f"\nleft behind by the tests: network namespaces {', '.join(sorted(left))}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


_before: pytest.StashKey[set[str]] = pytest.StashKey()


@pytest.fixture
async def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Odd]:
    """A registry of images that can be told to misbehave, for clients without credentials."""
    from image_rig import odd_registry

    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    async with odd_registry() as running:
        yield running
