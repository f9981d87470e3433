"""How soon a lazy view is seen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from p2pdist.model.messages import PullStatus
from p2pdist.mount.sight import Identity


@dataclass(slots=True)
class Sight:
    """How soon a view was seen, by the monotonic clock. On the event loop."""

    begun: float = field(default_factory=time.monotonic)
    """When the view was asked for, or taken over."""
    steps: dict[str, float] = field(default_factory=dict)
    """After how many seconds each step of the start had ended first."""
    pull: Callable[[], PullStatus] | None = None
    """Says how far the pull of the package is."""
    bytes_metadata: int = 0
    """What had come of the package when its metadata was here."""
    shown_s: float = 0.0
    """How much later it was mounted; 0 until then, and where an earlier agent did so."""
    identity: Identity | None = None
    """That of what covers it; None where nothing does, or this is not known yet."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is mounted, or will not be."""
    traced: bool = False
    """Whether there is a trace of its start."""
    prepared: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once what the trace names has come, or a reader waits for what the pull is to compute."""
    unforeseen: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a reader waits for what the pull is to compute, or will where one comes."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its readers are served no more."""
    _known_at: float = 0.0

    def end(self, step: str) -> None:
        """A step of the start has ended."""
        self.steps.setdefault(step, round(time.monotonic() - self.begun, 4))

    def await_pull(self) -> None:
        """A reader waits for what the pull is to compute."""
        self.prepared.set()
        self.unforeseen.set()

    def know(self, bytes_metadata: int = 0) -> None:
        """The metadata is here: so many bytes of it, or what the pull has brought."""
        self.end("listed")
        self._known_at, self.bytes_metadata = time.monotonic(), bytes_metadata
        if self.pull is not None:
            status = self.pull()
            self.bytes_metadata += status.bytes_peers + status.bytes_origin

    def show(self) -> None:
        """The view is mounted."""
        self.end("mounted")
        self.shown_s = time.monotonic() - self._known_at
        self.over.set()
