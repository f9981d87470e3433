"""What else a process that has proved nothing can say to the tracker, and what it costs the pull of
a good host, in virtual time: with a good seed of the blob, and with none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from starved_lab import BLOB, LAYOUT, STEP_S, STRIPES, Lab, usual_s

from p2pdist.core.download.events import Planned
from p2pdist.model.digest import Digest
from p2pdist.model.messages import Advance, Complaint, Holding, Left, Reason, Report
from tracker.core.repair.lease_turnover import DEADLINE_MIN_S, PATIENCE

FULL = tuple(len(range(stripe, LAYOUT.count, STRIPES)) for stripe in range(STRIPES))
NONE = (0,) * STRIPES
EVERY_S = 0.1


class Strangers:
    """Twenty sessions that say the same."""

    def __init__(self, lab: Lab, count: int = 20) -> None:
        self.lab, self.names = lab, [f"s{number}" for number in range(count)]
        lab.gets_on = False

    def join(self, counts: tuple[int, ...] = NONE, *, blob: Digest = BLOB, parents: tuple[str, ...] = ()) -> None:
        for name in self.names:
            if name not in self.lab.numbers:
                self.lab.open(name)
            if blob == BLOB:
                self.lab.said[name] = list(counts)
            self.say(name, Holding(blob, LAYOUT.size, LAYOUT.piece_size, counts, parents))

    def say(self, name: str, message: object) -> None:
        self.lab.tell(name, message)

    def when(self, said: Callable[[], None], *, every_s: float = EVERY_S) -> None:
        """Have them say something again and again."""
        steps = round(every_s / STEP_S)
        self.lab.habit = lambda: said() if round(self.lab.now / STEP_S) % steps == 0 else None

    def during_the_pull(self, said: Callable[[], None]) -> None:
        """Have them say something once the good host has begun."""
        begun = False

        def once() -> None:
            nonlocal begun
            if not begun and "h1" in self.lab.hosts and self.lab.now - self.lab.hosts["h1"].joined_at > 0.1:
                begun = True
                said()

        self.lab.habit = once

    def of_sources(self, complaint: Callable[[Digest, int, str], Iterator[Complaint]]) -> None:
        """Have them complain of every host that a plan names."""

        def harm(name: str, planned: Planned) -> None:
            for choice in planned.plan.stripes:
                for source in (choice.parent, *choice.alternates):
                    if source is not None and not source.is_origin:
                        for each in complaint(planned.plan.blob, choice.stripe, source.host):
                            self.say(name, each)

        self.lab.harm = harm


def complains(strangers: Strangers) -> None:
    reasons: tuple[Reason, ...] = ("corrupt", "stalled", "refused")
    strangers.of_sources(lambda blob, stripe, host: (Complaint(blob, stripe, host, reason) for reason in reasons))
    strangers.join()


def complains_of_rates(strangers: Strangers) -> None:
    strangers.of_sources(lambda blob, stripe, host: iter([Complaint(blob, stripe, host, "slow")]))
    strangers.join()


def complains_of_names(strangers: Strangers) -> None:
    strangers.of_sources(lambda blob, stripe, host: iter([Complaint(blob, stripe, host, "reset", nameless=True)]))
    strangers.join()


def complains_of_the_origin(strangers: Strangers) -> None:
    def harm(name: str, planned: Planned) -> None:
        for choice in planned.plan.stripes:
            if choice.parent is not None and choice.parent.is_origin:
                for reason in ("stalled", "unavailable"):
                    strangers.say(name, Complaint(BLOB, choice.stripe, "", reason))

    strangers.lab.harm = harm
    strangers.join()


def starves(strangers: Strangers) -> None:
    strangers.of_sources(lambda blob, stripe, host: iter([Complaint(blob, stripe, host, "slow", starved=True)]))
    strangers.join()


def idles(strangers: Strangers) -> None:
    strangers.join()


def waits(strangers: Strangers) -> None:
    strangers.lab.how = "waits"
    strangers.join()


def flaps(strangers: Strangers) -> None:
    def again() -> None:
        for name in strangers.names:
            strangers.say(name, Left(BLOB))
        strangers.join(FULL if round(strangers.lab.now / EVERY_S) % 2 else NONE)

    strangers.join()
    strangers.when(again)


def opens_sessions(strangers: Strangers) -> None:
    def again() -> None:
        for name in strangers.names:
            strangers.lab.open(name)
        strangers.join()

    strangers.join()
    strangers.when(again)


def claims_late(strangers: Strangers) -> None:
    strangers.during_the_pull(lambda: strangers.join(FULL))


def says_that_it_reads(strangers: Strangers) -> None:
    strangers.during_the_pull(lambda: strangers.join(tuple(count - 1 for count in FULL), parents=("",) * STRIPES))


def says_that_it_has_read(strangers: Strangers) -> None:
    strangers.join((1,) * STRIPES, parents=("",) * STRIPES)


def says_that_it_receives(strangers: Strangers) -> None:
    strangers.during_the_pull(lambda: strangers.join(parents=("h1",) * STRIPES))


def has_one_piece(strangers: Strangers) -> None:
    strangers.join()
    strangers.when(lambda: [strangers.say(name, Report((Advance(BLOB, (1,) * STRIPES),))) for name in strangers.names])  # type: ignore[func-returns-value]


def changes_its_mind(strangers: Strangers) -> None:
    def again() -> None:
        for number, name in enumerate(strangers.names):
            counts = tuple((round(strangers.lab.now / EVERY_S) + number) % most for most in FULL)
            strangers.lab.said[name] = list(counts)
            strangers.say(name, Report((Advance(BLOB, counts),)))

    strangers.join()
    strangers.when(again)


KINDS = [
    complains,
    complains_of_rates,
    complains_of_names,
    complains_of_the_origin,
    starves,
    idles,
    waits,
    flaps,
    opens_sessions,
    claims_late,
    says_that_it_reads,
    says_that_it_has_read,
    says_that_it_receives,
    has_one_piece,
    changes_its_mind,
]


def prove(lab: Lab) -> None:
    """A seed that has given the blob to a host, which is gone."""
    lab.seed("seed")
    lab.until_complete(lab.pull("other"))
    lab.run(1.0)
    lab.tell("other", Left(BLOB))
    del lab.hosts["other"]


@pytest.mark.parametrize("ahead_s", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("count", [2, 20])
@pytest.mark.parametrize("kind", [idles, starves], ids=["idles", "starves"])
def test_strangers_that_come_with_a_host_cost_it_half_a_second(
    kind: Callable[[Strangers], None], count: int, ahead_s: float
) -> None:
    """It is too early to hold it against them when the host first says that they give nothing, and
    it does not say so again: its word counts once it is not. Two leave it one of two leases."""
    lab = Lab()
    lab.measure()
    kind(Strangers(lab, count))
    lab.run(ahead_s)
    host = lab.pull("h1")
    assert lab.until_complete(host) <= usual_s() + 0.5
    assert host.from_origin == LAYOUT.count


@pytest.mark.parametrize("ahead_s", [0.0, 0.1, 0.3])
def test_strangers_that_wait_cost_a_host_seconds_whatever_parents_it_gets_meanwhile(ahead_s: float) -> None:
    """They say nothing to the tracker, which has the host change from one to the next: what it said
    of the first one holds. The origin may be as slow, so that hosts are given some seconds."""
    lab = Lab()
    lab.measure()
    waits(Strangers(lab))
    lab.run(ahead_s)
    assert lab.until_complete(lab.pull("h1")) <= usual_s() + DEADLINE_MIN_S * (PATIENCE + 1)


def test_what_is_said_sooner_than_any_agent_would_gives_no_lease() -> None:
    """Else strangers have all leases of starved hosts before the first host can say so."""
    lab = Lab()
    lab.measure()
    starves(Strangers(lab))
    lab.run(1.0)
    assert not any(member.rescued for member in lab.fleet.swarms[BLOB].members.values())


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_a_pull_takes_as_long_again_at_most(kind: Callable[[Strangers], None], seeded: bool) -> None:
    lab = Lab()
    lab.measure()
    if seeded:
        prove(lab)
    kind(Strangers(lab))
    lab.run(1.0)
    took_s = lab.until_complete(lab.pull("h1"))
    assert took_s <= 2 * usual_s()
