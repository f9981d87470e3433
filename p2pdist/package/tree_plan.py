"""Which catalogs and packs of the pool a tree draws on, and what is written anew.

By itself a tree would draw on all that knows a page or chunk of it, and each version adds one
catalog and one pack. Two rules keep manifests small, and keep hosts that begin from nothing from
loading dead bytes:

- Of a pack of which less than a quarter is still needed, the needed chunks are written anew.
- When there would be more than CATALOGS_MAX catalogs, those of which the tree needs least are
  written anew as one, with the chunks of their packs, until CATALOGS_KEPT are left. So this happens
  once in many versions, and the large catalogs stay.

The base's catalogs and packs stay as they are: the package draws on them anyhow. What is written
anew comes from packs, not from files, and goes into packs and a catalog of its own, behind what is
new in the manifest: hosts that have the earlier version have all of it, and can leave it alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from p2pdist.package.pool import Pool

CATALOGS_MAX = 48
CATALOGS_KEPT = 24
LIVE_DIVISOR = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of catalogs and packs of the pool that the tree draws on, and of packs whose needed
    chunks are written anew; pages and chunk lists that the catalogs must carry that are written."""

    catalogs: frozenset[int]
    packs: frozenset[int]
    rewritten: frozenset[int]
    pages: frozenset[bytes]
    chunk_lists: frozenset[bytes]


def choose(
    pool: Pool, live: Mapping[int, int], pages: Collection[bytes], chunk_lists: Collection[bytes], *, adds: bool
) -> Plan:
    """The plan of a tree with these pages and chunk lists, that needs `live` stored bytes of packs,
    by number; `adds`: new chunks were written, so there will be a new catalog."""
    rewritten = {
        number
        for number, count in live.items()
        if not pool.packs[number].part.of_base and count * LIVE_DIVISOR < pool.packs[number].size
    }
    weight = _weights(pool, live, rewritten, pages, chunk_lists)
    own = sorted((count, number) for number, count in weight.items() if not pool.catalogs[number].of_base)
    adds = adds or any(name not in pool.pages for name in pages)
    adds = adds or any(name not in pool.chunk_lists for name in chunk_lists)
    fresh = adds + bool(rewritten)
    merged: set[int] = set()
    if len(own) + fresh > CATALOGS_MAX:
        merged = {number for _, number in own[: len(own) - CATALOGS_KEPT]}
    rewritten |= {
        number for number in live if pool.packs[number].catalog in merged and not pool.packs[number].part.of_base
    }
    kept = frozenset(weight) - merged
    return Plan(
        kept,
        frozenset(live) - rewritten,
        frozenset(rewritten),
        frozenset(name for name in pages if pool.pages.get(name, -1) not in kept),
        frozenset(name for name in chunk_lists if pool.chunk_lists.get(name, -1) not in kept),
    )


def _weights(
    pool: Pool,
    live: Mapping[int, int],
    rewritten: Collection[int],
    pages: Collection[bytes],
    chunk_lists: Collection[bytes],
) -> Counter[int]:
    """Bytes that the tree needs of each catalog and its packs."""
    weight: Counter[int] = Counter()
    for number, count in live.items():
        if number not in rewritten:
            weight[pool.packs[number].catalog] += count
    for name in pages:
        if name in pool.pages:
            weight[pool.pages[name]] += pool.sizes[name]
    for name in chunk_lists:
        if name in pool.chunk_lists:
            weight[pool.chunk_lists[name]] += pool.sizes[name]
    return weight
