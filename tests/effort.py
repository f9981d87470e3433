"""How much a property test tries: few examples by default, many with P2PDIST_EXAMPLES=many, as
`make test-slow` sets it."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

MANY = os.environ.get("P2PDIST_EXAMPLES") == "many"
FEW_SHARE = 0.2
FEW_MIN = 10

_DEFAULT = 100  # what Hypothesis takes where a test says nothing


def examples(many: int) -> int:
    """How many examples a test that is thorough with `many` tries in this run."""
    return many if MANY else max(FEW_MIN, round(FEW_SHARE * many))


def set_default() -> None:
    """Have tests that say nothing try accordingly, however long an example takes."""
    slow = (HealthCheck.too_slow,)
    settings.register_profile("effort", max_examples=examples(_DEFAULT), deadline=None, suppress_health_check=slow)
    settings.load_profile("effort")
