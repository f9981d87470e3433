"""The demo's claims hold for good figures, and each can be broken."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from p2pdist.cli.verbs.demo.figures import Figures, Pull, Round, Run, as_document, claims, megabytes, show
from p2pdist.cli.verbs.demo.ingredients import Base

PACKAGE, APP = 50_000_000, 1_000_000


def good(agents: int = 2) -> Figures:
    """Figures of a demo in which everything went well."""
    hosts = [f"host{number}" for number in range(1, agents + 1)]
    first = tuple(Pull(host, "d1", 2.0, PACKAGE // 2, PACKAGE // 2, 0, PACKAGE + 9_000) for host in hosts)
    second = tuple(Pull(host, "d2", 0.2, 0, APP, PACKAGE - APP, APP + 9_000) for host in hosts)
    runs = [
        Run(host, 1.0, 1, 0.7, 0.01, "/shown/x/app/train.py", "/shown/x/site-packages/numpy/a.py") for host in hosts
    ]
    rounds = [
        Round(1, "demo/trainer:v1", "d1", PACKAGE, APP, 50_400_000, 2.1, first, tuple(runs)),
        Round(
            2, "demo/trainer:v2", "d2", PACKAGE, APP, APP, 0.3, second, tuple(replace(run, version=2) for run in runs)
        ),
    ]
    return Figures(agents, Base(Path("base"), ("numpy",), 1000, 57_000_000, 2.2), rounds=rounds)


def change(figures: Figures, version: int, **changes: object) -> Figures:
    figures.rounds[version - 1] = replace(figures.rounds[version - 1], **changes)  # type: ignore[arg-type]
    return figures


def broken(figures: Figures) -> list[str]:
    return [claim.text for claim in claims(figures) if not claim.held]


def test_good_figures_break_no_claim() -> None:
    """Seven promises are judged, and all hold."""
    assert len(claims(good())) == 7
    assert broken(good()) == []


def test_a_piece_of_each_layer_may_leave_the_origin_twice() -> None:
    """Of a small package that is more than the usual share."""
    assert broken(change(good(), 1, origin_bytes=54_597_152)) == []


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (change(good(), 1, origin_bytes=54_597_153), "origin bytes / package bytes"),
        (change(good(), 1, pulls=good().rounds[0].pulls[:1]), "version 1: every agent holds"),
        (change(good(), 1, pulls=tuple(replace(p, digest="d3") for p in good().rounds[0].pulls)), "every agent holds"),
        (
            change(good(), 2, pulls=tuple(replace(p, bytes_cached=0) for p in good().rounds[1].pulls)),
            "every agent holds",
        ),
        (change(good(), 2, runs=good().rounds[1].runs[:1]), "version 2: the program ran"),
        (change(good(), 2, runs=good().rounds[0].runs), "version 2: the program ran"),
        (change(good(), 1, runs=tuple(replace(r, loss_last=0.8) for r in good().rounds[0].runs)), "the program ran"),
        (
            change(good(), 1, runs=tuple(replace(r, numpy="/usr/numpy.py") for r in good().rounds[0].runs)),
            "the program ran",
        ),
        (
            change(good(), 2, pulls=tuple(replace(p, received=APP + 65_537) for p in good().rounds[1].pulls)),
            "bytes received",
        ),
        (replace(good(), untidy=["x was left mounted"]), "left behind"),
        (replace(good(), rounds=good().rounds[:1]), "both versions"),
    ],
)
def test_each_claim_can_be_broken(bad: Figures, text: str) -> None:
    """One wrong figure breaks one promise, by name."""
    assert len(broken(bad)) == 1
    assert text in broken(bad)[0]


def test_the_limit_of_the_second_version_is_exact() -> None:
    """The app layer and 64 KiB are allowed, to the byte."""
    pulls = tuple(replace(pull, received=APP + 65_536) for pull in good().rounds[1].pulls)
    assert broken(change(good(), 2, pulls=pulls)) == []


def test_what_is_shown_names_every_agent_claim_and_figure() -> None:
    """People and scripts are told the same."""
    figures = good()
    out = io.StringIO()
    show(Console(file=out, width=160), figures, claims(figures))
    for text in ("host1", "host2", "50.40 MB", "1.008", "makespan 2.10 s", "held", "2.2 s with pip"):
        assert text in out.getvalue()
    document = json.loads(json.dumps(as_document(figures, claims(figures))))
    assert document["ok"] is True
    assert document["rounds"][0]["origin_ratio"] == pytest.approx(1.008)
    assert document["base"]["bytes"] == 57_000_000


def test_bytes_are_shown_in_decimal_units() -> None:
    """As network people count them."""
    assert [megabytes(1_500_000), megabytes(65_536)] == ["1.50 MB", "65.5 kB"]
