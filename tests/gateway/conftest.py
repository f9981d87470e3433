"""Fixtures for the registry interface. The rigs of agents and registries are those of their own
tests."""

import sys
from pathlib import Path

for folder in ("origin", "agent"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
