"""What is ordered and cancelled so that hosts hold what tags mean."""

from __future__ import annotations

from p2pdist.model.digest import digest_of
from p2pdist.model.preseed import canonical
from tracker.core.policy.warm import PREFIX, Warm, changes

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
    assert ordered(means={}, live={"p1": True, "warmth": True}) == ([], []), "orders of others are not touched"


def test_policies_do_not_share_orders() -> None:
    both = Warm(("app:prod", "web:prod"), None, 2)
    names, cancel = ordered(WARM, both, means={"app:prod": FIRST, "web:prod": FIRST}, live={})
    assert len(set(names)) == 3 and cancel == []
