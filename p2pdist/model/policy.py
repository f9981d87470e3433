"""A package's policy: how a tracker wants an agent to move and keep the package.

It comes as one JSON document in the header `P2pdist-Policy` of the tracker's response about the
package (GET /v1/packages), or alone (GET /v1/policies?reference=). For a field that is left out,
and without the header, the agent's own settings hold.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pdist.model.errors import UNDECODABLE, Corrupt
from p2pdist.model.messages import Priority

POLICY_HEADER = "P2pdist-Policy"
POLICY_BYTES_MAX = 4096
PATTERN_CHARACTERS_MAX = 255
SECONDS_MAX = 10 * 365 * 86400.0

Transport = Literal["trees", "swarm", "auto"]
Keeping = Literal["lru", "pin", "ttl", "none"]
"""How a store keeps a package: until room is needed, least recently used first; always; for a time
after its last use; not at all once it is out of use."""

RATE_BYTES_S_MAX = 1e15
Rate = Annotated[float, Meta(gt=0, le=RATE_BYTES_S_MAX)]


class PackagePolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """The policy of one package. `match` is the policy's pattern, "" for none: packages of one
    policy share its rates. `ttl_s` is set when `cache` is "ttl", and only then. `lazy`: whether the
    package is shown before its contents are here; None where users say."""

    match: Annotated[str, Meta(max_length=PATTERN_CHARACTERS_MAX)] = ""
    priority: Priority | None = None
    upload_bytes_s: Rate | None = None
    download_bytes_s: Rate | None = None
    transport: Transport | None = None
    cache: Keeping = "lru"
    ttl_s: Annotated[float, Meta(gt=0, le=SECONDS_MAX)] | None = None
    lazy: bool | None = None


NO_POLICY = PackagePolicy()

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(PackagePolicy)


def encode_policy(policy: PackagePolicy) -> str:
    """One line of ASCII, as patterns are (tracker/core/policy/table.py)."""
    return _encoder.encode(policy).decode()


def decode_policy(text: str | bytes) -> PackagePolicy:
    """Raises Corrupt when `text` is no policy."""
    if len(text) > POLICY_BYTES_MAX:
        raise Corrupt(f"a policy of {len(text)} bytes is over the limit of {POLICY_BYTES_MAX}")
    try:
        policy = _decoder.decode(text)
    except UNDECODABLE as error:
        raise Corrupt(f"what was sent is no policy: {' '.join(str(error).split())[:300]}") from error
    if (policy.cache == "ttl") != (policy.ttl_s is not None):
        raise Corrupt("what was sent is no policy: it keeps for a time that it does not name, or the other way round")
    return policy
