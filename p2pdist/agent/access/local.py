"""What the processes of this host may read through the agent: by user and groups of the process at
the Unix socket, and the rules that the tracker sent."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import pwd
import time
from collections import OrderedDict

from p2pdist.agent.caller import Caller
from p2pdist.model.access import EVERYTHING, Identity, LocalRules, Right

NAMES_S = 60.0
"""How long the names of a caller are believed: a directory service may be asked for them."""

CALLERS_MAX = 1024
GROUPS_MAX = 1024
_USER: frozenset[Right] = frozenset({"open", "local", "read", "metrics"})
_TRUSTED: frozenset[Right] = _USER | {"local-admin"}


class LocalCallers:
    """The identities of processes. On the event loop."""

    def __init__(self) -> None:
        self._subjects: OrderedDict[tuple[int, int, tuple[int, ...]], tuple[float, tuple[str, ...]]] = OrderedDict()
        """When they were looked up (time.monotonic), and what a caller goes by."""

    async def identity(self, caller: Caller, rules: LocalRules) -> Identity:
        """What a process is and may do. Root and the agent's own user may do everything."""
        if caller.trusted:
            return Identity("local", str(caller.uid), _TRUSTED, EVERYTHING)
        read = rules.patterns(await self._of(caller)) if rules.by_subject else EVERYTHING
        return Identity("local", str(caller.uid), _USER, read)

    async def _of(self, caller: Caller) -> tuple[str, ...]:
        key, now = (caller.uid, caller.gid, caller.groups), time.monotonic()
        since, known = self._subjects.get(key, (0.0, ()))
        if known and now - since < NAMES_S:
            return known
        found = await asyncio.to_thread(subjects, caller)
        self._subjects.pop(key, None)
        self._subjects[key] = now, found
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
