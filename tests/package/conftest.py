"""Where the tests of packing pack to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from p2pdist.origin.layout import LocalLayout


@pytest.fixture
async def layout(tmp_path: Path) -> AsyncIterator[LocalLayout]:
    """A local layout, closed after the test."""
    opened = LocalLayout(tmp_path / "layout")
    yield opened
    await opened.close()
