"""How an agent ends (whole processes: tests/system/test_drain.py)."""

from __future__ import annotations

import asyncio

from p2pdist.agent.drain import Drain
from p2pdist.agent.uplink import Uplink


async def test_who_asks_before_the_agent_has_started_is_answered_when_it_ends() -> None:
    """Its socket listens before its store is open; a second one who asks is answered as well."""
    said: list[str] = []

    async def stop_fetching() -> None:
        said.append("no more")

    drain = Drain(Uplink(), lambda: said.append("leaving"))
    drain.ask(5.0)
    asking = [asyncio.create_task(drain.over()) for _ in range(2)]
    await asyncio.sleep(0)
    drained = await asyncio.wait_for(drain.run(stop_fetching), 60)
    assert await asyncio.gather(*asking) == [drained] * 2
    assert drained.streams == 0 and said == ["leaving", "no more"]
