"""The trackers of an agent: where several share the blobs of a fleet, it speaks of each blob to the
tracker that owns the blob (p2pdist/model/ownership.py).

Theory. One session, the home, is with any tracker: documents, tags and preseeds go through it. With
each other owner of a blob that this host holds or fetches there is one more session, which is
opened when it is needed and closed some time after. All of them are alike; the home speaks of the
blobs that its tracker owns. While no tracker has told an ownership, the home is the only session
and speaks of every blob.

An ownership of a higher epoch replaces the one before, from whichever session it comes. For each
blob whose owner changed the new owner hears what this host holds and from which hosts it receives;
the streams go on. A tracker that still goes by an older ownership answers NotOwner; what it refused
is told again when it has heard of the newer one, and EpochSeen tells it that there is one.

To a pull its owner alone is the tracker: while that one is away the others help the pull of another
blob only. Plans, lists and rejections of a blob count only if its owner sends them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from p2pdist.agent.tracker.attention import Attention
from p2pdist.agent.tracker.connection import Handlers, OwnershipNews, ToHost
from p2pdist.agent.tracker.session import TrackerSession, is_tracker_url
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Unavailable
from p2pdist.model.messages import (
    BLOBS_PER_MESSAGE_MAX,
    Access,
    Advance,
    Assign,
    Complaint,
    EpochSeen,
    Evict,
    FromAgent,
    Holding,
    Holdings,
    Judged,
    Keep,
    Leaving,
    Left,
    Listed,
    NotOwner,
    OriginShare,
    Recall,
    Reject,
    Release,
    Report,
    Reread,
    Vouched,
    Welcome,
)
from p2pdist.model.ownership import Ownership, Tracker, owner

logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""How long a session stays open with a tracker that owns nothing any more that this host wants."""

TIDY_S = 15.0
LATE_S = 3.0
"""How long a session may take to open until the pulls of its blobs go on as without a tracker."""

REMEMBERED_MAX = 100_000
"""Blobs whose owners are remembered, so that they need not be computed again."""

Owned = Callable[[Digest], bool]
"""Whether a blob is one of those that a session speaks of."""


@dataclass(frozen=True, slots=True)
class HostSide:
    """What the sessions ask the host, and where they deliver what trackers send."""

    blobs: Callable[[], Collection[Digest]]
    """All that the host holds and fetches."""
    holdings: Callable[[Owned], list[Holding]]
    """What it holds and fetches of some blobs."""
    report: Callable[[str, Owned], Report | None]
    """Progress of some blobs since the last report to the tracker with this id; "" is the home."""
    on_message: Callable[[ToHost], None]
    on_home: Callable[[bool], None]
    """Gets True when the home answers and False when its session breaks."""
    on_change: Callable[[bool, Owned], None]
    """Gets True when the owner of some blobs answers and False when it does not."""
    draining: Callable[[], bool]
    """Whether the agent is about to end."""


@dataclass(slots=True)
class _Link:
    """A session with an owner that is not the home."""

    session: TrackerSession
    task: asyncio.Task[None]
    late: asyncio.TimerHandle
    opened_at: float
    """When it was opened; long ago once it has answered and gone."""
    used_at: float
    """When this host last held or wanted a blob of this owner."""


class Trackers:
    """Sends each message to the tracker that it is for. `connect` makes a session with a tracker at
    one of some URLs. `secured`: only trackers that speak TLS are turned to. On the event loop."""

    def __init__(
        self, home: TrackerSession, connect: Callable[[Sequence[str]], TrackerSession], *, secured: bool = False
    ) -> None:
        self.home, self._connect, self._secured = home, connect, secured
        self.ownership: Ownership | None = None
        """Which tracker owns which blobs; None while one tracker owns all of them."""
        self._home_id = ""
        """The tracker that the home is with, or was with last."""
        self._owners: dict[Digest, str] = {}
        """Owners that were computed, by the present ownership."""
        self._links: dict[str, _Link] = {}
        """Sessions by the ids of their trackers."""
        self._closing: set[asyncio.Task[None]] = set()
        self._refused: defaultdict[str, set[Digest]] = defaultdict(set)
        """By tracker, the blobs that it did not own by an older ownership."""
        self._shares: dict[str, float] = {}
        """By tracker, the rate at which it lets this host read the origin, in bytes a second."""
        self._side: HostSide | None = None

    async def run(self, side: HostSide) -> None:
        """Keep the sessions open until cancelled; ends at once where there is no tracker and none
        is searched for."""
        self._side = side
        handlers = self._handlers(side, self.home, "", self._of_home, self._home_changed)
        tidying = asyncio.create_task(self._tidy(side))
        try:
            await self.home.run(handlers)
        finally:
            tidying.cancel()
            for tracker in list(self._links):
                self._close(tracker)
            await asyncio.gather(tidying, *self._closing, return_exceptions=True)
            self._side = None

    @property
    def sessions(self) -> int:
        """Trackers that answer."""
        return self.home.connected + sum(link.session.connected for link in self._links.values())

    def answers(self, blob: Digest) -> bool:
        """Whether the owner of a blob answers, or is about to: the session with it has just been
        opened, by this call if need be."""
        if self.ownership is None:
            return self.home.connected
        session = self._open(self._owner(blob))
        link = self._links.get(self._owner(blob))
        if session is None or session.connected:
            return session is not None
        now = asyncio.get_running_loop().time()
        return link is not None and now - link.opened_at < LATE_S and self.home.connected

    def attention(self, blob: Digest) -> Attention:
        """What is known of whether the owner of a blob hangs."""
        session = self._session(self._owner(blob))
        return session.attention if session is not None else Attention()

    def send(self, message: FromAgent) -> None:
        """Send a message to the tracker that it is for, if that one answers. Never waits."""
        match message:
            case Holding(blob):
                if (session := self._open(self._owner(blob))) is not None:
                    session.send(message)
            case Complaint(blob) | Left(blob) | Vouched(blob) | Judged(blob):
                if (session := self._session(self._owner(blob))) is not None:
                    session.send(message)
            case Report():
                self._send_report(message)
            case Leaving():
                for session in (self.home, *(link.session for link in self._links.values())):
                    session.send(message)
            case _:
                self.home.send(message)

    def _send_report(self, report: Report) -> None:
        parts: dict[str, list[Advance]] = {}
        for advance in report.blobs:
            parts.setdefault(self._owner(advance.blob), []).append(advance)
        for tracker, advances in parts.items():
            if (session := self._session(tracker)) is not None:
                session.send(Report(tuple(advances)))

    # -- which session

    def _owner(self, blob: Digest) -> str:
        """The id of the tracker that owns a blob; "" while one tracker owns all."""
        if self.ownership is None:
            return ""
        tracker = self._owners.get(blob)
        if tracker is None:
            if len(self._owners) >= REMEMBERED_MAX:
                self._owners.clear()
            tracker = self._owners[blob] = owner(self.ownership, blob).id
        return tracker

    def _of_home(self, blob: Digest) -> bool:
        return self._owner(blob) in ("", self.home.tracker)

    def _session(self, tracker: str) -> TrackerSession | None:
        """The session with a tracker, if there is one."""
        if tracker in ("", self.home.tracker):
            return self.home
        link = self._links.get(tracker)
        return link.session if link is not None else None

    def _open(self, tracker: str) -> TrackerSession | None:
        """The session with a tracker, opened if there is none; None where that cannot be."""
        present = self._session(tracker)
        listed = self.ownership.tracker(tracker) if self.ownership is not None else None
        if present is not None or listed is None or self._side is None:
            return present
        urls = _usable(listed, secured=self._secured)
        if not urls:
            return None
        session = self._connect(urls)
        loop, side = asyncio.get_running_loop(), self._side
        owned = partial(self._is_owner, tracker)
        changed = partial(self._link_changed, session, owned)
        handlers = self._handlers(side, session, tracker, owned, changed)
        task = loop.create_task(session.run(handlers), name=f"tracker-{tracker}")
        late = loop.call_later(LATE_S, self._late, session, owned)
        self._links[tracker] = _Link(session, task, late, loop.time(), loop.time())
        return session

    def _close(self, tracker: str) -> None:
        """End the session with a tracker that is not the home."""
        link = self._links.pop(tracker)
        self._refused.pop(tracker, None)
        link.late.cancel()
        link.task.cancel()
        self._closing.add(link.task)
        link.task.add_done_callback(self._closing.discard)
        self._give_back()

    def _give_back(self, fresh: str = "") -> None:
        """Let trackers that were left have their shares of the origin back: others get them. One
        with which a session is `fresh` tells anew what this host may read."""
        left = self._shares.keys() - ({self._home_id, *self._links} - {fresh})
        for tracker in left:
            del self._shares[tracker]
        if left and self._shares and self._side is not None:
            self._side.on_message(OriginShare(sum(self._shares.values())))

    def _is_owner(self, tracker: str, blob: Digest) -> bool:
        return self._owner(blob) == tracker

    def _handlers(
        self, side: HostSide, session: TrackerSession, reader: str, owned: Owned, changed: Callable[[bool], None]
    ) -> Handlers:
        return Handlers(
            lambda: side.holdings(owned),
            lambda: side.report(reader, owned),
            partial(self._deliver, side, session),
            changed,
            partial(self._heard, session, reader),
        )

    async def _tidy(self, side: HostSide) -> None:
        """Close sessions that are needed no more."""
        while True:
            await asyncio.sleep(TIDY_S)
            now = asyncio.get_running_loop().time()
            needed = {self._owner(blob) for blob in side.blobs()} if self._links else set()
            for tracker, link in list(self._links.items()):
                if tracker in needed:
                    link.used_at = now
                elif now - link.used_at >= IDLE_S:
                    self._close(tracker)

    # -- what sessions say

    def _home_changed(self, present: bool) -> None:
        assert self._side is not None
        if self.ownership is None:
            self._side.on_change(present, lambda blob: True)
        else:
            self._side.on_change(present, partial(self._is_owner, self._home_id))
        self._side.on_home(present)

    def _link_changed(self, session: TrackerSession, owned: Owned, present: bool) -> None:
        link = next((link for link in self._links.values() if link.session is session), None)
        if self._side is None or link is None:
            return  # it was closed, and another session speaks of the blobs
        if not present:
            link.opened_at = -inf
        self._side.on_change(present, owned)
        if present and self._side.draining():
            session.send(Leaving())

    def _late(self, session: TrackerSession, owned: Owned) -> None:
        if not session.connected:
            self._link_changed(session, owned, False)

    def _deliver(self, side: HostSide, session: TrackerSession, message: ToHost) -> None:
        """Pass on what a tracker sends, unless it is not this tracker's to say."""
        match message:
            case Assign(plan):
                ours = self._speaks_of(session, plan.blob)
            case Listed(blob) | Reread(blob) | Recall(blob) | Reject(_, blob):
                ours = blob is None or self._speaks_of(session, blob)
            case Access() | Keep() | Evict() | Release():
                ours = session is self.home
            case OriginShare(bytes_s, ended):
                self._shares[session.tracker] = bytes_s
                if ended:
                    del self._shares[session.tracker]
                message, ours = OriginShare(sum(self._shares.values())), bool(self._shares)
        if ours:
            side.on_message(message)

    def _speaks_of(self, session: TrackerSession, blob: Digest) -> bool:
        return self._session(self._owner(blob)) is session

    def _heard(self, session: TrackerSession, expected: str, news: OwnershipNews) -> None:
        """A tracker says which tracker owns which blobs. Raises Unavailable for a welcome of
        another tracker than `expected` ("": any): its URL leads elsewhere, and what answers there
        does not own what this host would speak of."""
        if expected and isinstance(news, Welcome) and news.tracker != expected:
            raise Unavailable(f"{news.tracker or 'a tracker that is alone'} answers at the URL of {expected}")
        told, known = news.ownership, self.ownership
        if session is self.home and isinstance(news, Welcome):
            self._home_id = news.tracker
            if news.tracker in self._links:  # two sessions with one tracker would end each other
                self._close(news.tracker)
            if told is None:
                self._adopt(None, fresh=session)
        if isinstance(news, Welcome):
            self._give_back(news.tracker)
        if isinstance(news, NotOwner):
            self._refused[session.tracker] |= {blob for blob in news.blobs if self._speaks_of(session, blob)}
        if told is None:
            return
        if known is not None and told.epoch < known.epoch:
            session.send(EpochSeen(known.epoch))
        elif known is None or told.epoch > known.epoch:
            self._adopt(told, fresh=session if isinstance(news, Welcome) else None)
        if isinstance(news, Welcome) and session is self.home:
            self._open_needed()
        if self.ownership is not None and told.epoch >= self.ownership.epoch and not isinstance(news, NotOwner):
            self._announce(session, self._refused.pop(session.tracker, set()))

    # -- a new ownership

    def _adopt(self, ownership: Ownership | None, *, fresh: TrackerSession | None) -> None:
        """Go by an ownership from now on: tell each new owner what is here of its blobs. The
        session `fresh` has just opened and hears of all its blobs anyway."""
        assert self._side is not None
        blobs, before = self._side.blobs(), self.ownership
        owners = {blob: self._owner(blob) for blob in blobs}
        self.ownership, self._owners = ownership, {}
        # The home may turn to any tracker that owns blobs.
        trackers = ownership.trackers if ownership is not None else ()
        self.home.know(urls[0] for each in trackers if each.share and (urls := _usable(each, secured=self._secured)))
        for tracker in self._links.keys() - {each.id for each in trackers}:
            self._close(tracker)
        moved: defaultdict[str, set[Digest]] = defaultdict(set)
        for blob, former in owners.items():
            if (now := self._owner(blob)) != former:
                moved[now].add(blob)
        if fresh is not self.home:
            self._open_needed()  # else once the home is known to answer
        for tracker, theirs in moved.items():
            session = self._session(tracker)
            if session is not None and session is not fresh and session.connected:
                self._announce(session, theirs)
        if moved and before is not None and ownership is not None:
            logger.info("epoch %d: %d blobs have other trackers", ownership.epoch, sum(map(len, moved.values())))
        if _shares_blobs(before, self._home_id) and not _shares_blobs(ownership, self._home_id):
            self.home.leave("it owns no blobs any more, and another tracker takes its place")

    def _announce(self, session: TrackerSession, blobs: Iterable[Digest]) -> None:
        """Tell a tracker that answers what is here of some of its blobs."""
        theirs = {blob for blob in blobs if self._speaks_of(session, blob)}
        if not theirs or self._side is None:
            return
        holdings = self._side.holdings(theirs.__contains__)
        for start in range(0, len(holdings), BLOBS_PER_MESSAGE_MAX):
            session.send(Holdings(tuple(holdings[start : start + BLOBS_PER_MESSAGE_MAX])))
        self._side.on_change(True, theirs.__contains__)

    def _open_needed(self) -> None:
        """Open the sessions that are needed for what is here."""
        assert self._side is not None
        for tracker in {self._owner(blob) for blob in self._side.blobs()}:
            self._open(tracker)


def _usable(tracker: Tracker, *, secured: bool) -> list[str]:
    """The URLs at which a host may turn to a tracker; `secured`: by TLS alone."""
    return [
        url.rstrip("/") for url in tracker.urls if is_tracker_url(url) and (url.startswith("https:") or not secured)
    ]


def _shares_blobs(ownership: Ownership | None, tracker: str) -> bool:
    listed = ownership.tracker(tracker) if ownership is not None else None
    return listed is not None and listed.share > 0
