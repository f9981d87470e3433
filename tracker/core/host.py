"""What the tracker knows of one host."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from p2pdist.model.digest import Digest

BAN_REPORTERS_MIN = 2
"""So many hosts must blame a host before it is shunned: one alone may be at fault itself."""

PENALTY_S = 60.0
CORRUPT_PENALTY_S = 600.0


@dataclass(slots=True)
class Host:
    """One host: where others reach it, its session (None while absent), its swarms by key, those of
    them in which it still lacks pieces, and who blames it for what; `keys` are those of its swarms
    that are not the blob's digest, by blob; `origin_limit_bytes_s` is what it was told in its session that
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
    penalties: dict[str, tuple[str, float]] = field(default_factory=dict)
    origin_limit_bytes_s: float = 0.0
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
    def banned(self) -> bool:
        """Whether several hosts found it sending wrong bytes or refusing to serve."""
        return len(self.penalties) >= BAN_REPORTERS_MIN

    def penalise(self, by: str, reason: str, *, now: float) -> bool:
        """Another host met a failure here; returns whether this host is shunned from now on."""
        before = self.banned
        self.penalties[by] = (reason, now + (CORRUPT_PENALTY_S if reason == "corrupt" else PENALTY_S))
        return self.banned and not before

    def expire_penalties(self, *, now: float, started_anew: bool = False) -> None:
        """Forget blame that is old, and after a new start of the agent all but wrong bytes."""
        self.penalties = {
            by: (reason, until)
            for by, (reason, until) in self.penalties.items()
            if until > now and (reason == "corrupt" or not started_anew)
        }
