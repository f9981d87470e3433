"""Fanout: how many children a host feeds where a blob has but one stripe.

Theory. Such a blob has few pieces, and what counts is how soon they come down the tree. A host
sends a piece to its k children one after the other, so the last one has it after k times what one
takes, and every level costs HOP_S besides. N hosts, of whom each feeds k, make a tree of log_k(1 +
(k - 1) N) - 1 levels: exact where the tree is full, in between where it is not, and N - 1 for the
chain that k = 1 is. Pieces that follow the first come k times what one takes apart. Together

    levels * (k * piece + HOP_S) + (pieces - 1) * k * piece        seconds,

which is tried for every k: small where the uplink is slow or pieces are many, large where the way
counts. More hosts, a shorter piece and fewer pieces never ask for fewer children.
"""

from __future__ import annotations

from math import log

from p2pdist.model.pieces import PieceLayout

HOP_S = 0.0015
"""What a level costs beside the sending: a round trip, and two processes that wake, verify, write
and pass on. Pieces of 64 KiB went through a chain of eight agents on loopback at 1.3 to 1.7 ms a
level, on two busy cores."""

SEND_S = 0.0001
"""What a piece for one child costs the sender's event loop, beside the time on the wire
(profiled)."""

RATE_BYTES_S = 125e6
"""Taken for a typical uplink while none was measured: 1 Gbit/s. On a faster network that costs a
few milliseconds; to take a slow one for fast costs tenths of a second."""

FANOUT_MAX = 64


def fanout(hosts: int, layout: PieceLayout, rate_bytes_s: float) -> int:
    """Children of a host in a swarm of so many hosts that send `rate_bytes_s` each; 0 when that is
    not known."""
    most = max(1, min(FANOUT_MAX, hosts - 1))
    return min(range(1, most + 1), key=lambda children: arrival_s(children, hosts, layout, rate_bytes_s))


def arrival_s(children: int, hosts: int, layout: PieceLayout, rate_bytes_s: float) -> float:
    """Seconds until the last host has everything, where each feeds so many children."""
    piece_s = layout.length(0) / (rate_bytes_s or RATE_BYTES_S) + SEND_S
    return levels(children, hosts) * (children * piece_s + HOP_S) + (layout.count - 1) * children * piece_s


def levels(children: int, hosts: int) -> float:
    """Levels below the root of a tree of so many hosts."""
    if children == 1:
        return hosts - 1.0
    return log(1 + (children - 1) * hosts) / log(children) - 1
