"""The benchmark of packages says in its table where another tool takes less, and why."""

from __future__ import annotations

from dataclasses import replace

from bench.packages import Row, table

OWN = Row("generated", "p2pdist", 5.0, 1000, 1.0, 0, 1.0, 500)


def notes(*others: Row) -> list[str]:
    return [line for line in table([OWN, *others]).splitlines() if "takes less" in line]


def test_each_figure_in_which_another_tool_is_ahead_has_a_line() -> None:
    worse = Row("generated", "restic", 6.0, 1001, 2.0, 1, 2.0, 501)
    assert notes(worse) == []
    assert notes(replace(worse, tree="large", stored_bytes=1)) == []
    (line,) = notes(replace(worse, stored_bytes=999))
    assert line.startswith("generated, stored: restic takes less: each file")
    assert len(notes(replace(worse, stored_bytes=999, edited_bytes=1), replace(worse, tool="casync", again_s=0.5))) == 3
