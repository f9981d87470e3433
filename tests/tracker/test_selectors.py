"""Selectors: what they match, and what is none."""

from __future__ import annotations

import pytest

from p2pdist.model.errors import UsageError
from tracker.core.host import Host
from tracker.core.preseeds.selectors import parse_selector

HOSTS = [Host("h1", zone="a", rack="r1"), Host("h2", zone="a", rack="r2"), Host("h3", zone="b", rack="r1"), Host("h4")]


@pytest.mark.parametrize(
    ("text", "matched"),
    [
        ("zone=a", ["h1", "h2"]),
        ("zone=a,rack=r1", ["h1"]),
        (" zone = a , rack = r1 ", ["h1"]),
        ("rack=r1,rack=r2", ["h1", "h2", "h3"]),
        ("host=h4,host=h1", ["h1", "h4"]),
        ("zone=none", []),
        ({"zone": "b", "rack": "r1"}, ["h3"]),
    ],
)
def test_what_a_selector_matches(text: str | dict[str, str], matched: list[str]) -> None:
    selector = parse_selector(text)
    assert [host.name for host in HOSTS if selector.matches(host)] == matched


@pytest.mark.parametrize(
    "text", ["", "zone", "zone=", "planet=earth", "zone=a,,rack=b", "zone=a b", {}, {"zone": ""}, "zone=a," * 65]
)
def test_what_selects_nothing_is_refused(text: str | dict[str, str]) -> None:
    with pytest.raises(UsageError):
        parse_selector(text)
