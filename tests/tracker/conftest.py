"""What tests of the tracker share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from postgresql import binaries, running_server


@pytest.fixture(scope="module")
def postgresql_server() -> Iterator[str]:
    """The URL of a PostgreSQL of this module's own."""
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    with running_server() as url:
        yield url


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each kind of database that keeps what a tracker remembers."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgresql"))
    return str(tmp_path / "state") if request.param == "sqlite" else ""
