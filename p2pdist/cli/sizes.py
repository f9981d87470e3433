"""Sizes as options take them (p2pdist/model/units.py)."""

from __future__ import annotations

from p2pdist.model.units import parse_size

__all__ = ["parse_size"]
