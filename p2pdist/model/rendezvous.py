"""Rendezvous hashing (Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates",
IEEE/ACM Transactions on Networking 1998): hosts that know the same names agree on an order of them
for each key, without a message between them.

Every name has a weight for the key, a hash of both; the highest comes first. When a name comes or
goes the others keep their order: of the first k of n names, adding one changes one at most, and
does so with probability k / (n + 1).

Where names have weights (Schindelhauer and Schomaker, "Weighted Distributed Hash Tables", SPAA
2005), a name comes first for a share of the keys that is its weight over the sum of all. Each name
draws from the exponential distribution of this rate, and the smallest comes first: when one weight
changes the others keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from heapq import nlargest
from math import inf, log
from typing import TypeVar

_WEIGHT_BYTES = 8

_Named = TypeVar("_Named")


def ranked(key: bytes, names: Iterable[str], count: int) -> list[str]:
    """The `count` names (all, where there are fewer) of the highest weights for `key`, highest
    first: the same in every process and in whatever order the names come. O(n log count) time."""
    prefix = _prefix(key)
    return [name for _, name in nlargest(count, ((_weight(prefix, name.encode()), name) for name in set(names)))]


def fraction(key: bytes, name: str) -> float:
    """A number above 0 and up to 1, evenly spread, that is always the same for `key` and `name`:
    chance for code that must be deterministic."""
    weight = _weight(_prefix(b"fraction" + key), name.encode())
    return (int.from_bytes(weight, "big") + 1) / (1 << 8 * _WEIGHT_BYTES)


def first_weighted(key: bytes, items: Iterable[_Named], weight: Callable[[_Named], tuple[str, float]]) -> _Named:
    """The first of `ranked_weighted`. Raises ValueError when there are no items."""
    prefix = _prefix(b"weighted" + key)
    return min(items, key=lambda item: _draw(prefix, *weight(item)))


def ranked_weighted(key: bytes, items: Iterable[_Named], weight: Callable[[_Named], tuple[str, float]]) -> list[_Named]:
    """The items in their order for `key`: the same in every process and in whatever order they
    come. `weight` says the name of an item and its weight; those of weight 0 come last, in an order
    that depends on the names alone."""
    prefix = _prefix(b"weighted" + key)
    return sorted(items, key=lambda item: _draw(prefix, *weight(item)))


def _draw(prefix: blake2b, name: str, weight: float) -> tuple[float, float, str]:
    drawn = -log((int.from_bytes(_weight(prefix, name.encode()), "big") + 1) / (1 << 8 * _WEIGHT_BYTES))
    return drawn / weight if weight > 0 else inf, drawn, name


def _prefix(key: bytes) -> blake2b:
    # The length keeps key and name apart.
    return blake2b(len(key).to_bytes(8, "big") + key, digest_size=_WEIGHT_BYTES)


def _weight(prefix: blake2b, name: bytes) -> bytes:
    state = prefix.copy()
    state.update(name)
    return state.digest()
