"""When hosts start: all at once, or spread over a time."""

from __future__ import annotations

from math import sqrt
from random import Random

KINDS = ("burst", "uniform", "poisson", "ramp")


def start_times(kind: str, span_s: float, hosts: int, seed: int) -> list[float]:
    """The start of each host in seconds, drawn from the seed; the first starts at 0. `kind` is one
    of KINDS.

    burst: all at 0. uniform: independently, evenly over `span_s`. poisson: with exponential gaps
    that add up to `span_s` on average. ramp: ever more of them until `span_s`, the rate growing
    from nothing in proportion to the time.
    """
    if kind == "burst" or not span_s:
        return [0.0] * hosts
    random = Random(f"arrivals {seed}")
    times: list[float] = []
    for _ in range(hosts):
        match kind:
            case "uniform":
                times.append(random.uniform(0, span_s))
            case "poisson":
                times.append((times[-1] if times else 0.0) + random.expovariate(hosts / span_s))
            case "ramp":
                times.append(span_s * sqrt(random.random()))
            case _:
                raise ValueError(f"there are no arrivals of the kind {kind!r}")
    first = min(times)
    random.shuffle(times)
    return [time - first for time in times]
