"""How often a vouched list is sent to the hosts that wait for it.

Theory. Whatever is listed goes to every host of a swarm, and a message costs the tracker about the
same for one hash as for a hundred. So hashes gather for a pause in proportion to the number of
hosts that wait, over all swarms. A piece that waits for its hash waits for half a pause, but the
readers are ahead of their children by what a pause brings (p2pdist/core/vouched/read_ahead.py), so
the pause costs time only where a list begins. It is short there, and grows with what has passed:
what the readers are ahead by grows as fast.
"""

from __future__ import annotations

PAUSE_MIN_S = 0.05
PAUSE_S_PER_HOST = 1e-4
"""A message takes the tracker about a quarter of this, while lists grow."""

FIRST_SHARE = 8
"""The pauses at the beginning are this part of the ones later."""


def pause_s(hosts: int, passed_s: float) -> float:
    """Seconds between two messages to every host, where `hosts` wait for lists in all swarms, and
    `passed_s` have passed since the first message of this list."""
    longest = max(PAUSE_MIN_S, PAUSE_S_PER_HOST * hosts)
    return min(longest, max(PAUSE_MIN_S, longest / FIRST_SHARE, passed_s))
