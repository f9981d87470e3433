"""What the tracker knows of one host."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from p2pdist.model.digest import Digest

BLAMERS_MIN = 2
"""So many hosts must blame a host before it is shunned: one alone may be at fault itself."""

BLAME_S = 60.0
CORRUPT_BLAME_S = 600.0


@dataclass(slots=True)
class Host:
    """One host: where others reach it, its session (None while absent), its swarms by key, those of
    them in which it still lacks pieces, and who blames it for what; `keys` are those of its swarms
    that are not the blob's digest, by blob; `origin_share` is what it was told in its session that
    it may read of the origin (bytes/s); `bt_port` is where it answers BitTorrent peers, 0 for
    nowhere; `download_bytes_s` is what it lets itself receive, 0 for no limit; `sent_at` is when it
    last said that it had sent something; `leaving`: it said that it is about to end; `tls`: it
    speaks TLS with others; `instance` names the agent that runs there."""

    name: str
    address: str = ""
    zone: str = ""
    rack: str = ""
    session: int | None = None
    absent_since: float | None = None
    swarms: dict[Digest, None] = field(default_factory=dict)
    keys: dict[Digest, Digest] = field(default_factory=dict)
    receiving: dict[Digest, None] = field(default_factory=dict)
    blamed: dict[str, tuple[str, float]] = field(default_factory=dict)
    origin_share: float = 0.0
    bt_port: int = 0
    download_bytes_s: float = 0.0
    sent_at: float = -inf
    leaving: bool = False
    tls: bool = False
    instance: str = ""

    def key(self, blob: Digest) -> Digest:
        """The key of the host's swarm of a blob, if it is in one."""
        return self.keys.get(blob, blob)

    def enter(self, blob: Digest, key: Digest) -> None:
        """The host is in a swarm of the blob. It is in one at most."""
        self.swarms[key] = None
        if key != blob:
            self.keys[blob] = key

    def leave(self, blob: Digest, key: Digest) -> None:
        """The host is in that swarm no more."""
        self.swarms.pop(key, None)
        self.receiving.pop(key, None)
        if self.keys.get(blob) == key:
            del self.keys[blob]

    @property
    def available(self) -> bool:
        """Whether anything may be asked of the host: it is connected, and not about to end."""
        return self.session is not None and not self.leaving

    @property
    def shunned(self) -> bool:
        """Whether several hosts found it sending wrong bytes or refusing to serve."""
        return len(self.blamed) >= BLAMERS_MIN

    def blame(self, by: str, reason: str, *, now: float) -> bool:
        """Another host met a failure here; returns whether this host is shunned from now on."""
        before = self.shunned
        self.blamed[by] = (reason, now + (CORRUPT_BLAME_S if reason == "corrupt" else BLAME_S))
        return self.shunned and not before

    def forgive(self, *, now: float, started_anew: bool = False) -> None:
        """Forget blame that is old, and after a new start of the agent all but wrong bytes."""
        self.blamed = {
            by: (reason, until)
            for by, (reason, until) in self.blamed.items()
            if until > now and (reason == "corrupt" or not started_anew)
        }
