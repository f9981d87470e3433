"""The table of mutants stays true to the code, and a mutant that cannot be made is an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from mutants import MUTANTS, ROOT, Mutant, break_code


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_can_be_made(tmp_path: Path, mutant: Mutant) -> None:
    """Its old text is in its file exactly once, the result is still Python, and the tests named
    exist."""
    file = tmp_path / mutant.file
    file.parent.mkdir(parents=True)
    file.write_text((ROOT / mutant.file).read_text())
    break_code(tmp_path, mutant)
    assert file.read_text() != (ROOT / mutant.file).read_text()
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests)


@pytest.mark.parametrize("change", [{"old": "no such line"}, {"old": "return"}, {"file": "p2pdist/none.py"}])
def test_a_mutant_that_does_not_fit_is_an_error(tmp_path: Path, change: dict[str, str]) -> None:
    """Text that is absent or there several times, or a file that is gone, is said and not passed
    over."""
    mutant = replace(MUTANTS[0], **change)  # type: ignore[arg-type]
    file = tmp_path / MUTANTS[0].file
    file.parent.mkdir(parents=True)
    file.write_text((ROOT / MUTANTS[0].file).read_text())
    with pytest.raises(ValueError, match=r"not once|does not exist"):
        break_code(tmp_path, mutant)
