"""What trees see of the store they are in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from p2pdist.model.digest import Digest
from p2pdist.store.blob import Blob
from p2pdist.store.index import Index
from p2pdist.store.paths import Paths


@dataclass(frozen=True, slots=True)
class Surroundings:
    """`settle` brings objects to the disk in the background."""

    lock: threading.RLock
    paths: Paths
    index: Index
    get: Callable[[Digest], Blob | None]
    owners: Callable[[Digest], set[str]]
    make_room: Callable[[int], object]
    settle: Callable[[], None]
