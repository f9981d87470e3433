"""Where a store keeps what. Names are made from checked digests alone, so no name can leave the directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.digest import Digest, hex_of, parse_digest


@dataclass(frozen=True, slots=True)
class Paths:
    """The files below `root`."""

    root: Path

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def index(self) -> Path:
        return self.root / "index.sqlite"

    @property
    def blobs(self) -> Path:
        return self.root / "blobs" / "sha256"

    @property
    def partial(self) -> Path:
        return self.root / "partial"

    @property
    def smalls(self) -> Path:
        return self.root / "small" / "sha256"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    def complete(self, digest: Digest) -> Path:
        """The content of a complete blob, read-only."""
        return self.blobs / hex_of(parse_digest(digest))

    def data(self, digest: Digest) -> Path:
        """The content of a partial blob, as long as the whole."""
        return self.partial / f"{hex_of(parse_digest(digest))}.data"

    def have(self, digest: Digest) -> Path:
        """Which pieces of a partial blob are verified."""
        return self.partial / f"{hex_of(parse_digest(digest))}.have"

    def small(self, digest: Digest) -> Path:
        return self.smalls / hex_of(parse_digest(digest))

    def make(self) -> None:
        """Create the directories; raises OSError."""
        for directory in (self.blobs, self.partial, self.smalls, self.temporary):
            directory.mkdir(parents=True, exist_ok=True)
