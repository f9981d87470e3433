"""Ownership: which tracker of several plans the swarm of a blob.

Theory. The live trackers form a list with a number, the epoch. Agents and trackers that know the
list compute the owner of each blob, by weighted rendezvous hashing (rendezvous.py), and look
nothing up. The weight of a tracker is its share: a tracker that comes gets a small one first, and
more with each epoch, so that it takes over a little at a time. A pin names the owner of one blob
in spite of that.

Properties: when a tracker leaves, only its blobs move, each to the next tracker of its order; when
a share grows, blobs move only to that tracker; when it shrinks, only away from it.

An ownership of a higher epoch replaces one of a lower, from whichever tracker it comes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdist.model.digest import Digest, WireDigest
from p2pdist.model.rendezvous import first_weighted, ranked_weighted

TRACKERS_MAX = 64
URLS_MAX = 8
PINS_MAX = 1024
EPOCH_MAX = 1 << 53
"""What every JSON reader can tell from its neighbours."""

TrackerId = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")]
OPTIONAL_TRACKER_ID = r"\A([A-Za-z0-9][A-Za-z0-9._-]{0,62})?\Z"
TrackerUrl = Annotated[str, Meta(max_length=300, pattern=r"\Ahttps?://[^\s\x00-\x1f\x7f-\x9f/?#@]+/?\Z")]
Epoch = Annotated[int, Meta(ge=0, le=EPOCH_MAX)]


class Tracker(msgspec.Struct, frozen=True):
    """A live tracker. Agents reach it at any of `urls`. Its `share` of the blobs is 1 in general,
    less while it takes over, and 0 while it gives all away."""

    id: TrackerId
    urls: Annotated[tuple[TrackerUrl, ...], Meta(max_length=URLS_MAX)] = ()
    share: Annotated[float, Meta(ge=0, le=1)] = 1.0


class Ownership(msgspec.Struct, frozen=True):
    """The live trackers as of an epoch, and the owners of pinned blobs. A pin to a tracker that is
    not listed, or gives all away, does not count."""

    epoch: Epoch
    trackers: Annotated[tuple[Tracker, ...], Meta(min_length=1, max_length=TRACKERS_MAX)]
    pins: Annotated[dict[WireDigest, TrackerId], Meta(max_length=PINS_MAX)] = {}

    def __post_init__(self) -> None:
        if len({tracker.id for tracker in self.trackers}) < len(self.trackers):
            raise ValueError("an ownership lists a tracker twice")

    def tracker(self, tracker_id: str) -> Tracker | None:
        """The tracker of that name, None when it is not listed."""
        return next((tracker for tracker in self.trackers if tracker.id == tracker_id), None)


def owner(ownership: Ownership, digest: Digest) -> Tracker:
    """The tracker that plans the swarm of a blob."""
    pinned = _pinned(ownership, digest)
    return pinned if pinned is not None else first_weighted(_key(digest), ownership.trackers, _weight)


def order(ownership: Ownership, digest: Digest) -> tuple[Tracker, ...]:
    """All trackers, the owner of the blob first; each of the others owns it once the ones before
    it are gone."""
    hashed = ranked_weighted(_key(digest), ownership.trackers, _weight)
    pinned = _pinned(ownership, digest)
    return tuple(hashed) if pinned is None else (pinned, *(other for other in hashed if other is not pinned))


def _pinned(ownership: Ownership, digest: Digest) -> Tracker | None:
    name = ownership.pins.get(digest) if ownership.pins else None
    tracker = ownership.tracker(name) if name is not None else None
    return tracker if tracker is not None and tracker.share else None


def _key(digest: Digest) -> bytes:
    # Apart from the orders of hosts, which blobs alone are the keys of.
    return b"owner " + digest.encode()


def _weight(tracker: Tracker) -> tuple[str, float]:
    return tracker.id, tracker.share
