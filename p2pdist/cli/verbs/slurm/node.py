"""What prolog and epilog share on a node: the options, its agent, which may just be restarting, and
a limit of their time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from p2pdist.cli.options import Seconds
from p2pdist.model.errors import Unavailable

if TYPE_CHECKING:
    from p2pdist.agent.api.client import LocalClient

AGENT_POLL_S = 0.5

TRACKER_S_MAX = 20.0
"""After this the scripts go on without the tracker."""

Function = TypeVar("Function", bound=Callable[..., Any])


def jobs_dir_option(function: Function) -> Function:
    """--jobs-dir."""
    return click.option(
        "--jobs-dir",
        type=click.Path(path_type=Path),
        default=Path("/run/p2pdist/jobs"),
        show_default=True,
        help="Packages are shown below it, at JOBID/NAME; the same for prolog and epilog.",
    )(function)


def agent_wait_option(function: Function) -> Function:
    """--agent-wait."""
    return click.option(
        "--agent-wait",
        default=20.0,
        show_default=True,
        type=Seconds(0.0, 3600.0),
        metavar="SECONDS",
        help="How long the agent may be away, as when it is being restarted, before that is the node's fault.",
    )(function)


class TimeIsUp(Exception):
    """The time limit has passed. It is no OSError, as a TimeoutError would be, after which some
    code tries again."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Whatever the block waits for, after `seconds` it ends with TimeIsUp. In the main thread
    only."""

    def end(_number: int, _frame: FrameType | None) -> NoReturn:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, end)
    try:
        # Again every second: a callback of an event loop, where it may strike, swallows what it
        # raises.
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def wait_for_agent(client: LocalClient, wait_s: float) -> dict[str, Any]:
    """The agent's status as soon as it answers. Raises Unavailable when that takes longer than
    `wait_s`."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return client.status()
        except Unavailable:
            if time.monotonic() >= deadline:
                raise
        time.sleep(AGENT_POLL_S)
