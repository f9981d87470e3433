"""What must hold of vouched lists, and which hosts lie in a simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from p2pdist.model.digest import Digest
from p2pdist.model.messages import Listed
from p2pdist.simulate.faults import LyingVoucher
from p2pdist.simulate.vouching.listing import Lie
from tracker.core.events import Broadcast, Command, ListMatched, WrongHashes

LIAR_VERSION = 1000


class ListChecks:
    """The checks of one run. `require` ends it unless its condition holds."""

    __slots__ = ("_require", "blamed", "first_readers", "hashes", "liars", "misled", "rounds")

    def __init__(self, require: Callable[[bool, str], None]) -> None:
        self._require = require
        #: By blob the hashes of its pieces, where hosts vouch for them.
        self.hashes: dict[Digest, list[bytes]] = {}
        #: Lies that wait for the first reader of a stripe, by stripe.
        self.first_readers: dict[int, LyingVoucher] = {}
        #: Hosts that lie of what they read.
        self.liars: dict[str, None] = {}
        #: Hosts that stated a hash that is not the blob's.
        self.misled: dict[str, None] = {}
        #: Hosts that trackers blamed for wrong hashes, and the last round of any list.
        self.blamed: dict[str, None] = {}
        self.rounds = 0

    def lies(self, host: Any, fault: LyingVoucher) -> None:
        """A host lies from now on."""
        self.liars[host.name] = None
        for pull in host.pulls.values():
            if pull.listing is not None:
                version = LIAR_VERSION + len(self.liars)
                pull.listing.lie = Lie(version, fault.share, fault.stores, fault.judges)

    def reading(self, host: Any, stripe: int) -> None:
        """A host begins to read a stripe from the origin."""
        if stripe in self.first_readers:
            self.lies(host, self.first_readers.pop(stripe))

    def stated(self, name: str, right: bool) -> None:
        """A host states a hash."""
        if not right:
            self.misled[name] = None

    def completed(self, name: str, listing: Any) -> None:
        """A host takes a blob for whole: all its bytes are right."""
        self._require(not listing.versions or name in self.liars, f"{name} takes wrong bytes for the whole blob")

    def commanded(self, command: Command) -> None:
        """A tracker's core commands something: what is held is right where at most one host lies,
        and only hosts that stated wrong hashes are blamed."""
        match command:
            case Broadcast(_, Listed(_, number, _, _)):
                self.rounds = max(self.rounds, number)
            case ListMatched(blob, pieces):
                right = pieces.hashes == b"".join(self.hashes[blob])
                self._require(right or len(self.liars) > 1, "a wrong list is held")
            case WrongHashes(name, _, _):
                self.blamed[name] = None
                self._require(name in self.misled, f"{name} is blamed, and stated nothing wrong")
