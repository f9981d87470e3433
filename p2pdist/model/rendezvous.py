"""Rendezvous hashing (Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates",
IEEE/ACM Transactions on Networking 1998): hosts that know the same names agree on an order of them
for each key, without a message between them.

Every name has a weight for the key, a hash of both; the highest comes first. When a name comes or
goes the others keep their order: of the first k of n names, adding one changes one at most, and
does so with probability k / (n + 1).
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from heapq import nlargest

_WEIGHT_BYTES = 8


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


def _prefix(key: bytes) -> blake2b:
    # The length keeps key and name apart.
    return blake2b(len(key).to_bytes(8, "big") + key, digest_size=_WEIGHT_BYTES)


def _weight(prefix: blake2b, name: bytes) -> bytes:
    state = prefix.copy()
    state.update(name)
    return state.digest()
