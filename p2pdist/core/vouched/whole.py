"""When a host compares a vouched blob as a whole with its digest, and what follows from that.

Theory. Pieces of a vouched blob match a list that other hosts have stated, and only the SHA-256 of
the whole tells whether that list is right (p2pdist/model/vouched_list.py). So a pull
whose pieces are all stored is not complete yet:

    Open      -> Checking   all pieces are stored: CheckWhole
    Checking  -> Matches    the digest matches: Judge(True), and the pull is complete
    Checking  -> Wrong      it does not
    Wrong                   the round's list is complete: Judge(False), once in each round
    any       -> Open       pieces are lost, since another round lists other hashes for them

The whole is compared as soon as all pieces are there, whatever is still to be listed: a digest that
matches is right, whichever hosts stated the hashes. That it does not match says something of a
round only once the round has stated every hash, and the pieces are stored as it states them.

While the whole is wrong the host waits for the tracker's next round. If none has begun after
VERIFY_S the others may have what matches, and this host's disk be at fault: it verifies its pieces
once (VerifyPieces). It gives up ROUND_WAIT_S after the last news of the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt

VERIFY_S = 5.0
ROUND_WAIT_S = 60.0
ALONE_WAIT_S = 120.0
"""The same while no tracker answers, which alone begins rounds."""

# -- events


@dataclass(frozen=True, slots=True)
class ListChanged:
    """The list has grown, or another round has begun. `complete`: the round has stated the hash of
    every piece. The pieces in `lost` were stored and are gone from the store, since they did not
    match; they come again. Also answers VerifyPieces."""

    complete: bool
    lost: tuple[int, ...] = ()
    round: int = 0


@dataclass(frozen=True, slots=True)
class WholeChecked:
    """Answers CheckWhole: whether the SHA-256 of the whole matches the digest. `check` is the
    command's."""

    matches: bool
    check: int = 0


# -- commands


@dataclass(frozen=True, slots=True)
class CheckWhole:
    """All pieces are stored: compare the SHA-256 of the whole with the digest; WholeChecked
    answers. `check` counts these commands."""

    check: int = 0


@dataclass(frozen=True, slots=True)
class Judge:
    """Tell the tracker (`Judged`) whether the whole matches as this round lists it."""

    matches: bool
    round: int = 0


@dataclass(frozen=True, slots=True)
class VerifyPieces:
    """Read all pieces from the disk and compare them with the list; ListChanged says which were
    lost."""


Command = CheckWhole | Judge | VerifyPieces
State = Literal["open", "checking", "wrong"]


@dataclass(slots=True)
class Whole:
    """The judgement of one pull. `stored` must be told whenever all pieces are stored."""

    blob: Digest
    state: State = "open"
    list_complete: bool = False
    """Whether the present round has stated every hash. `list_changed`."""
    round: int = 0
    """The present round. `list_changed`, `tracker_changed`."""
    alone: bool = False
    """Whether no tracker answers. `tracker_changed`."""
    _judged_round: int = -1
    """The last round that was judged to be wrong."""
    _checks: int = 0
    """How often the whole was compared."""
    _news_at: float = 0.0
    """When the list grew or changed last, or the whole turned out wrong."""
    _verified: bool = False
    """Whether the pieces were verified since the last news."""

    def stored(self, *, now: float) -> list[Command]:
        """All pieces are stored."""
        if self.state == "open":
            self.state, self._checks = "checking", self._checks + 1
            return [CheckWhole(self._checks)]
        return self._judge(now)

    def list_changed(self, event: ListChanged, *, now: float) -> bool:
        """Take news of the list; returns whether another round has begun."""
        another = event.round != self.round
        # A round that is under way is news with each message: an arbiter reads a large blob for
        # longer than ROUND_WAIT_S, and most of what it states was listed so before.
        if another or event.lost or not event.complete or not self.list_complete:
            self._news_at, self._verified = now, self._verified and not another
        self.round, self.list_complete = event.round, event.complete
        if event.lost:
            self.state = "open"
        return another

    def checked(self, event: WholeChecked, *, now: float) -> bool:
        """Take the answer to a CheckWhole; returns whether the blob is whole. An answer that came
        too late says nothing: pieces were lost meanwhile."""
        if self.state != "checking" or event.check != self._checks:
            return False
        if not event.matches:
            self.state, self._news_at = "wrong", now
        return event.matches

    def tracker_changed(self, present: bool, *, now: float) -> None:
        """A tracker answers from now on, or none does. One that has just started counts rounds
        anew, and hears every judgement again."""
        self.alone, self._news_at = not present, now
        if present:
            self.round, self._judged_round, self.list_complete = 0, -1, False

    def tick(self, *, now: float) -> list[Command]:
        """Time has passed. Raises Corrupt when the wait for another round was in vain."""
        if self.state != "wrong":
            return []
        waited_s = now - self._news_at
        if waited_s > (ALONE_WAIT_S if self.alone else ROUND_WAIT_S):
            raise _hopeless(self.blob, self.alone)
        if waited_s > VERIFY_S and not self._verified:
            self._verified = True
            return [VerifyPieces()]
        return []

    def _judge(self, now: float) -> list[Command]:
        if self.state != "wrong" or not self.list_complete or self._judged_round >= self.round:
            return []
        self._judged_round, self._news_at = self.round, now
        return [Judge(False, self.round)]


def _hopeless(blob: Digest, alone: bool) -> Corrupt:
    return Corrupt(
        f"what came for {blob} does not match its digest{', and no tracker answers' if alone else ''}",
        remedy="Pull again: upstream may have sent other bytes for a while"
        + (", and a tracker finds out which host sent them" if alone else ""),
    )
