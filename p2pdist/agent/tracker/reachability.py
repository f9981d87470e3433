"""The check whether other hosts can reach this agent: its tracker connects to the address that the
agent gave.

Where other hosts cannot, the blobs of this host are of no use to them, and each of them reads
central storage, which the program is to prevent; nothing else shows that. So the agent asks after a
session opens and now and then, and reports the result in the log, in `p2pdist doctor`, by
`p2pdist pull` and as a metric.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from urllib.parse import quote

import msgspec

from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.model.errors import UNDECODABLE, NotFound, P2PDistError
from p2pdist.model.messages import Reachability

FIRST_S = 1.0
"""The longest pause after a session opens: all agents of a restarted tracker ask within this
time."""

AGAIN_S, AGAIN_UNREACHED_S = 300.0, 60.0
BUSY_S = 15.0
REMEDY = (
    "Let it --listen on an address that others reach ([::] is IPv6 as well, 0.0.0.0 is not), --advertise that one if it is "
    "another, and open the port in firewalls"
)

logger = logging.getLogger(__name__)


class ReachabilityCheck:
    """Asks the tracker whether other hosts reach this one. On the event loop."""

    def __init__(self, host: str, session: TrackerSession) -> None:
        self._host, self._session = host, session
        self._opened = asyncio.Event()
        self.problem = ""
        """Why other hosts cannot reach this one, "" while they can or nothing is known."""

    def connected(self) -> None:
        """Ask soon: a session has opened, perhaps from another address than before."""
        self._opened.set()

    def warning(self) -> str:
        """Why other hosts cannot reach this agent, in words for the user; "" while they can."""
        return f"other hosts cannot reach this agent at {self._session.address}: {self.problem}" if self.problem else ""

    async def run(self) -> None:
        """Ask until cancelled."""
        pause_s = AGAIN_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._opened.wait()
            self._opened.clear()
            if self._session.connected:
                await asyncio.sleep(FIRST_S * random.random())
                pause_s = await self._ask()

    async def _ask(self) -> float:
        """Ask once; returns after how many seconds to ask again."""
        try:
            body = await self._session.get(f"/v1/hosts/{quote(self._host, safe='')}/reachability", {})
            result = msgspec.json.decode(body, type=Reachability)
        except NotFound:  # a tracker of an earlier version, or the session has just ended
            self.problem = ""
            return AGAIN_S
        except (P2PDistError, *UNDECODABLE) as error:
            logger.debug("the tracker does not say whether this host can be reached: %s", error)
            return BUSY_S * random.uniform(0.5, 1.5)
        self._note(result)
        return AGAIN_UNREACHED_S if self.problem else AGAIN_S

    def _note(self, result: Reachability) -> None:
        problem = f"{result.problem}{result.hint}" if result.problem else ""
        if problem and problem != self.problem:
            logger.warning(
                "other hosts cannot reach this agent at %s: %s. They read storage instead of receiving from it. %s",
                result.address,
                problem,
                REMEDY,
            )
        elif self.problem and not problem:
            logger.info("other hosts can reach this agent at %s", result.address)
        self.problem = problem
