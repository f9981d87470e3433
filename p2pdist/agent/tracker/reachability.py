"""Whether other hosts can reach this agent, as its tracker finds by connecting to the address that
the agent gives out.

Where they cannot, what this host holds is of no use to them and each of them reads central storage,
which is what the program is to prevent; nothing else shows it. So it is asked after a session opens
and now and then, and told in the log, in `p2pdist doctor`, by `p2pdist pull` and as a metric.
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
"""After a session opens: at most, since all agents of a tracker that was restarted ask in this
time."""

AGAIN_S, AGAIN_UNREACHED_S = 300.0, 60.0
BUSY_S = 15.0
REMEDY = "Let it --listen on an address that others reach, --advertise that one if it is another, and open the port in firewalls"

logger = logging.getLogger(__name__)


class ReachabilityCheck:
    """What the tracker says of this host. `problem` is why it cannot be reached, "" while it can or
    nothing is known."""

    def __init__(self, host: str, session: TrackerSession) -> None:
        self._host, self._session = host, session
        self._opened = asyncio.Event()
        self.problem = ""

    def connected(self) -> None:
        """A session has opened, perhaps from another address than before."""
        self._opened.set()

    def warning(self) -> str:
        """Why other hosts cannot reach this agent, in words for the user; "" while they can."""
        return f"other hosts cannot reach this agent at {self._session.address}: {self.problem}" if self.problem else ""

    async def run(self) -> None:
        """Ask until cancelled."""
        pause_s = AGAIN_S
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._opened.wait(), pause_s)
            self._opened.clear()
            if self._session.connected:
                await asyncio.sleep(FIRST_S * random.random())
                pause_s = await self._ask()

    async def _ask(self) -> float:
        """Ask once; returns after how many seconds to ask again."""
        try:
            body = await self._session.get(f"/v1/hosts/{quote(self._host, safe='')}/reachability", {})
            found = msgspec.json.decode(body, type=Reachability)
        except NotFound:  # a tracker of an earlier version, or the session has just ended
            self.problem = ""
            return AGAIN_S
        except (P2PDistError, *UNDECODABLE) as error:
            logger.debug("the tracker does not say whether this host can be reached: %s", error)
            return BUSY_S * random.uniform(0.5, 1.5)
        self._note(found)
        return AGAIN_UNREACHED_S if self.problem else AGAIN_S

    def _note(self, found: Reachability) -> None:
        problem = f"{found.problem}{found.hint}" if found.problem else ""
        if problem and problem != self.problem:
            logger.warning(
                "other hosts cannot reach this agent at %s: %s. They read storage instead of receiving from it. %s",
                found.address,
                problem,
                REMEDY,
            )
        elif self.problem and not problem:
            logger.info("other hosts can reach this agent at %s", found.address)
        self.problem = problem
