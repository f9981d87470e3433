"""Which objects of trees become free with which trees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from p2pdist.model.candidate import Share
from p2pdist.model.digest import Digest


def shared_bytes(
    trees: Mapping[Digest, Iterable[bytes]], staying: Iterable[bytes], sizes: Mapping[bytes, int]
) -> tuple[dict[Digest, int], list[Share]]:
    """Bytes of the contents that one tree alone names, and of those that several do. `trees` are
    the contents of each, without repetition; `staying` stay whichever of them go; what has no size
    here counts nothing."""
    owners: dict[bytes, int] = {}
    roots = list(trees)
    for number, root in enumerate(roots):
        bit = 1 << number
        for content in trees[root]:
            owners[content] = owners.get(content, 0) | bit
    for content in staying:
        owners.pop(content, None)
    totals: dict[int, int] = {}
    for content, mask in owners.items():
        totals[mask] = totals.get(mask, 0) + sizes.get(content, 0)
    own: dict[Digest, int] = {}
    shares = []
    for mask, size in totals.items():
        named = [root for number, root in enumerate(roots) if mask >> number & 1]
        if len(named) == 1:
            own[named[0]] = size
        else:
            shares.append(Share(frozenset(named), size))
    return own, shares
