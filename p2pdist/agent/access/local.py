"""What the processes of this host may read through the agent: by user and groups of the process at
the Unix socket, and the rules that the tracker sent."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import pwd
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from p2pdist.agent.caller import Caller
from p2pdist.model.access import EVERYTHING, Identity, LocalRules, Right
from p2pdist.model.errors import Unavailable

NAMES_S = 60.0
"""How long the names of a caller are believed: a directory service may be asked for them."""

NAMES_WAIT_S, KNOWN_WAIT_S = 10.0, 1.0
"""How long callers wait for a look-up from its beginning; and one that was known, which then goes
by its last names. While the directory service hangs, only the first request waits."""

LOOKUPS_MAX = 4
"""Callers that are looked up at once, in threads of their own: a directory service that hangs must
not take those of the agent."""

CALLERS_MAX = 1024
GROUPS_MAX = 1024
_USER: frozenset[Right] = frozenset({"open", "local", "read", "metrics"})
_TRUSTED: frozenset[Right] = _USER | {"local-admin"}


class LocalCallers:
    """The identities of processes. On the event loop."""

    def __init__(self) -> None:
        self._subjects: OrderedDict[tuple[int, int, tuple[int, ...]], tuple[float, tuple[str, ...]]] = OrderedDict()
        """When they were looked up (time.monotonic), and what a caller goes by."""
        self._looking: dict[tuple[int, int, tuple[int, ...]], tuple[float, asyncio.Task[tuple[str, ...]]]] = {}
        """Callers that are being looked up, and since when."""
        self._threads = ThreadPoolExecutor(LOOKUPS_MAX, thread_name_prefix="names")

    async def identity(self, caller: Caller, rules: LocalRules) -> Identity:
        """What a process is and may do. Root and the agent's own user may do everything. Raises
        Unavailable where it is not known in time what the process goes by."""
        if caller.trusted:
            return Identity("local", str(caller.uid), _TRUSTED, EVERYTHING)
        read = rules.patterns(await self._of(caller)) if rules.by_subject else EVERYTHING
        return Identity("local", str(caller.uid), _USER, read)

    async def _of(self, caller: Caller) -> tuple[str, ...]:
        key = (caller.uid, caller.gid, caller.groups)
        now = time.monotonic()
        since, known = self._subjects.get(key, (0.0, ()))
        if known and now - since < NAMES_S:
            return known
        if key not in self._looking:
            self._looking[key] = now, asyncio.create_task(self._look_up(key, caller))
        began, looking = self._looking[key]
        left_s = began + (KNOWN_WAIT_S if known else NAMES_WAIT_S) - now
        done, _ = await asyncio.wait([looking], timeout=max(0.0, left_s))
        if done:
            return looking.result()
        if known:
            return known
        raise Unavailable(
            f"the names of user {caller.uid} and its groups are not found within {NAMES_WAIT_S:.0f} s",
            remedy="See that the directory service of this host answers: getent passwd",
        )

    async def _look_up(self, key: tuple[int, int, tuple[int, ...]], caller: Caller) -> tuple[str, ...]:
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, subjects, caller)
        finally:
            del self._looking[key]
        self._subjects.pop(key, None)
        self._subjects[key] = time.monotonic(), found
        if len(self._subjects) > CALLERS_MAX:
            self._subjects.popitem(last=False)
        return found


def subjects(caller: Caller) -> tuple[str, ...]:
    """What rules may call a process: user and groups, by number and by name. Blocks."""
    named = [f"user:{caller.uid}"]
    with contextlib.suppress(KeyError):
        named.append(f"user:{pwd.getpwuid(caller.uid).pw_name}")
    for gid in dict.fromkeys((caller.gid, *caller.groups[:GROUPS_MAX])):
        named.append(f"group:{gid}")
        with contextlib.suppress(KeyError):
            named.append(f"group:{grp.getgrgid(gid).gr_name}")
    return tuple(named)
