"""Tables of the benchmarks: medians, figures, columns."""

from __future__ import annotations

import pytest

from bench.table import figure, median, render


def test_median_is_of_the_values_that_are_there() -> None:
    assert median([3.0, None, 1.0, 10.0]) == 3.0
    assert median([1.0, 2.0]) == 1.5
    assert median([None]) is None
    assert median([]) is None


def test_figures_are_rounded_and_what_is_absent_is_not_zero() -> None:
    assert figure(1.0467, 3) == "1.047"
    assert figure(12345.6, 0) == "12,346"
    assert figure(None) == "-"
    assert figure(0.0, 1) == "0.0"


def test_columns_are_aligned() -> None:
    """Names and notes at the left, figures at the right."""
    text = render(
        "links", ("method", "seconds", "note"), [["a", "9.50", "slow"], ["longer", "100.00", ""]], ["a remark"]
    )
    assert text.splitlines() == [
        "",
        "== links",
        "method  seconds  note",
        "---------------------",
        "a          9.50  slow",
        "longer   100.00",
        "a remark",
    ]


def test_a_row_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="has not 2 cells"):
        render("links", ("method", "seconds"), [["a"]])
