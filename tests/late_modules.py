"""Modules that take long to import: torch takes two seconds, which each worker of a run would spend
though few tests use it."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class LateModule:
    """Imports a module when something of it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


def late_module(name: str) -> Any:
    """For a module of tests: skips all of them where `name` is not installed."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return LateModule(name)
