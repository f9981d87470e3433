"""Sizes as options take them (p2pdist/model/quantities.py)."""

from __future__ import annotations

from p2pdist.model.quantities import parse_size

__all__ = ["parse_size"]
