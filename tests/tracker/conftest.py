"""What tests of the tracker share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from postgresql import binaries, running_server


@pytest.fixture(scope="module")
def postgresql_server() -> Iterator[str]:
    """The URL of a PostgreSQL of this module's own."""
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    with running_server() as url:
        yield url
