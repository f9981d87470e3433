"""A site of real processes for each test."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from site_rig import Site, running_site


@pytest.fixture
def site() -> Iterator[Site]:
    # Not tmp_path: a Unix socket's path may have 107 bytes only.
    with tempfile.TemporaryDirectory(prefix="p2pdist-") as directory, running_site(Path(directory)) as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """The report of a test that failed has the logs of its site, which is gone when it is read."""
    report = yield
    for value in getattr(item, "funcargs", {}).values():
        if report.when == "call" and report.failed and isinstance(value, Site):
            report.sections.append(("site", value.story()))
    return report
