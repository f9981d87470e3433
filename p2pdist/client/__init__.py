"""A typed client of trackers, for job schedulers and other programs: `Tracker` for asyncio,
`SyncTracker` for the rest.

    from p2pdist.client import PreseedRequest, SyncTracker

    with SyncTracker("https://tracker:7070", token=token) as tracker:
        order = PreseedRequest("team/trainer:v4", selector="zone=a", deadline=600.0)
        progress = tracker.wait(tracker.preseed(order).id, quorum=0.99)
        print(progress.state, progress.hosts_done, progress.failures_by_reason)

All that it takes and answers are the values of p2pdist.model; failures are those of
p2pdist.model.errors, as the tracker reports them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2pdist.client.access import Access
    from p2pdist.client.sync import SyncTracker
    from p2pdist.client.tracker import Tracker
    from p2pdist.model.callback import check_callback
    from p2pdist.model.errors import (
        Conflict,
        NotFound,
        P2PDistError,
        Refused,
        TooLarge,
        Unauthenticated,
        Unavailable,
        UsageError,
    )
    from p2pdist.model.fleet import (
        Assignment,
        EvictedHost,
        Eviction,
        EvictRequest,
        HostDetail,
        HostStatus,
        Me,
        Ranked,
        RoleHosts,
        StayedHost,
        StoryEvent,
        SwarmDetail,
        SwarmStatus,
    )
    from p2pdist.model.preseed import Failure, PreseedRequest, PreseedSummary, Progress, RankRequest, Role

__all__ = [
    "Access",
    "Assignment",
    "Conflict",
    "EvictRequest",
    "EvictedHost",
    "Eviction",
    "Failure",
    "HostDetail",
    "HostStatus",
    "Me",
    "NotFound",
    "P2PDistError",
    "PreseedRequest",
    "PreseedSummary",
    "Progress",
    "RankRequest",
    "Ranked",
    "Refused",
    "Role",
    "RoleHosts",
    "StayedHost",
    "StoryEvent",
    "SwarmDetail",
    "SwarmStatus",
    "SyncTracker",
    "TooLarge",
    "Tracker",
    "Unauthenticated",
    "Unavailable",
    "UsageError",
    "check_callback",
]

_HOMES = (
    "client.access",
    "client.sync",
    "client.tracker",
    "model.callback",
    "model.errors",
    "model.fleet",
    "model.preseed",
)


def __getattr__(name: str) -> Any:
    """A name is imported when it is first used (PEP 562): most commands need `client.access` alone,
    and what asks trackers takes a fifth of their start."""
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"p2pdist.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
