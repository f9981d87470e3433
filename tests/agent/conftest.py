"""What tests of the agent share."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pdist.origin.layout import LocalLayout


@pytest.fixture
def origin(tmp_path: Path) -> LocalLayout:
    """An empty directory of central storage."""
    made = LocalLayout(tmp_path / "origin")
    made.scratch()
    return made
