"""What is ordered and cancelled so that hosts hold what tags mean."""

from __future__ import annotations

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.preseed import canonical
from tracker.core.policy.warm import PREFIX, REST_S, Changes, Warm, changes, rest_s

FIRST, SECOND = digest_of(b"first"), digest_of(b"second")
WARM = Warm(("app:prod",), "zone=a", 3)


def ordered(*warms: Warm, **known: object) -> tuple[list[str], list[str]]:
    found = changes(warms, known["means"], known["live"])  # type: ignore[arg-type]
    for request in found.order:
        canonical(request)  # raises for an order that could not be given
    return [str(request.id) for request in found.order], list(found.cancel)


def test_a_tag_is_ordered_once_and_replaced_when_it_moves() -> None:
    (first,), cancel = ordered(WARM, means={"app:prod": FIRST}, live={})
    assert first.startswith(PREFIX) and cancel == []
    assert ordered(WARM, means={"app:prod": FIRST}, live={first: True}) == ([], [])
    (second,), cancel = ordered(WARM, means={"app:prod": SECOND}, live={first: True})
    assert cancel == [first] and second != first
    assert ordered(WARM, means={"app:prod": SECOND}, live={first: False, second: True}) == ([], [])
    (third,), cancel = ordered(WARM, means={"app:prod": FIRST}, live={first: False, second: True})
    assert third == f"{first}-2" and cancel == [second], "an order that ended is not taken up again"
    assert ordered(WARM, means={"app:prod": FIRST}, live={first: False, second: False, third: True}) == ([], [])


def test_an_order_names_the_package_by_digest() -> None:
    (request,) = changes([WARM], {"app:prod": FIRST}, {}).order
    assert (request.package, request.selector, request.count) == (f"app@{FIRST}", "zone=a", 3)
    assert request.priority == "preseed"


def test_while_nobody_can_say_what_a_tag_means_its_order_stays() -> None:
    (first,), _ = ordered(WARM, means={"app:prod": FIRST}, live={})
    assert ordered(WARM, means={}, live={first: True}) == ([], [])


def test_other_hosts_are_another_order_and_what_no_policy_says_ends() -> None:
    (first,), _ = ordered(WARM, means={"app:prod": FIRST}, live={})
    more = Warm(("app:prod",), "zone=a", 4)
    (fresh,), cancel = ordered(more, means={"app:prod": FIRST}, live={first: True})
    assert fresh != first and cancel == [first]
    assert ordered(means={}, live={first: True}) == ([], [first])
    others = {"p1": True, "warmth": True, "warm-up-for-monday": True, f"{first}-x": True, "warm-": True}
    assert ordered(means={}, live=others) == ([], []), "orders of others are not touched"


def test_policies_do_not_share_orders() -> None:
    both = Warm(("app:prod", "web:prod"), None, 2)
    names, cancel = ordered(WARM, both, means={"app:prod": FIRST, "web:prod": FIRST}, live={})
    assert len(set(names)) == 3 and cancel == []


class Trackers:
    """Trackers of one database that all look at it every 0.5 s."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ended_at: dict[str, float | None] = {}

    def step(self, warms: list[Warm], means: dict[str, Digest]) -> Changes:
        """One of them looks and does what is to be done."""
        ended = {name: at for name, at in self.ended_at.items() if at is not None}
        resting = {name for name, at in ended.items() if self.now - at < rest_s(name)}
        found = changes(warms, means, {name: name not in ended for name in self.ended_at}, resting)
        self.ended_at |= {str(request.id): None for request in found.order}
        self.ended_at |= dict.fromkeys(found.cancel, self.now)
        self.now += 0.5
        return found

    @property
    def live(self) -> list[str]:
        return [name for name, at in self.ended_at.items() if at is None]


def test_a_tracker_that_asked_earlier_what_a_tag_means_asks_again_before_it_undoes_anything() -> None:
    """One has seen the tag move, the other asks once a day."""
    trackers, stale = Trackers(), {"app:prod": FIRST}
    trackers.step([WARM], stale)
    for _ in range(40):
        trackers.step([WARM], {"app:prod": SECOND})
        before = dict(trackers.ended_at)
        if trackers.step([WARM], stale).doubtful:
            trackers.ended_at, stale = before, {"app:prod": SECOND}
    assert stale == {"app:prod": SECOND} and len(trackers.live) == 1
    assert len(trackers.ended_at) == 2, "one order for each meaning"


def test_trackers_with_other_policies_do_not_fill_the_list_of_preseeds() -> None:
    """One keeps a tag warm of which the policies of the other say nothing."""
    trackers = Trackers()
    for _ in range(2 * 3600):
        trackers.step([WARM], {"app:prod": FIRST})
        trackers.step([], {})
    assert len(trackers.ended_at) < 15


def test_an_order_that_somebody_ended_rests_before_it_is_given_anew() -> None:
    (first,), _ = ordered(WARM, means={"app:prod": FIRST}, live={})
    found = changes([WARM], {"app:prod": FIRST}, {first: False}, [first])
    assert (found.order, found.cancel) == ((), ())
    found = changes([WARM], {"app:prod": FIRST}, {first: False})
    assert [request.id for request in found.order] == [f"{first}-2"] and found.doubtful == ("app:prod",)
    assert rest_s(first) == REST_S and rest_s(f"{first}-2") == 2 * REST_S and rest_s(f"{first}-999") == 3600.0
