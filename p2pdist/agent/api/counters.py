"""Counters of interfaces as metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric


def counter_family(name: str, text: str, labels: Sequence[str], counter: Mapping[Any, int]) -> Metric:
    """A counter by the values of its labels, which may be growing; called in a thread."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, number in sorted(dict(counter).items()):
        family.add_metric([values] if isinstance(values, str) else values, number)
    return family
