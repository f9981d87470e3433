"""A site of real processes for each test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from site_rig import Site, running_site


@pytest.fixture
def site() -> Iterator[Site]:
    # Not tmp_path: a Unix socket's path may have 107 bytes only.
    with tempfile.TemporaryDirectory(prefix="p2pdist-") as directory, running_site(Path(directory)) as running:
        yield running
