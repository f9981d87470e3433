"""How a tracker tells a program that a preseed has ended: one POST of the progress, signed.

The signature is HMAC-SHA256 with a key of the operator over `TIME.BODY`, where TIME is in seconds
since the epoch and BODY the bytes of the request; the time keeps a request that was overheard from
being of use later.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

import msgspec

from p2pdist.model.errors import UNDECODABLE, Refused
from p2pdist.model.preseed import Progress

ID_HEADER = "P2pdist-Callback-Id"
"""The same for all attempts to tell of one end of one preseed."""

TIME_HEADER = "P2pdist-Callback-Time"
SIGNATURE_HEADER = "P2pdist-Callback-Signature"
KEY_CHARACTERS_MIN = 32
AGE_S_MAX = 300.0


def signature(key: str, time: str, body: bytes) -> str:
    """The signature of a body that is sent at a time."""
    return "sha256=" + hmac.new(key.encode(), time.encode() + b"." + body, hashlib.sha256).hexdigest()


def check_callback(key: str, headers: Mapping[str, str], body: bytes, *, now: float) -> Progress:
    """What a callback tells. `headers` finds names whatever their case, as those of HTTP libraries
    do; `now` is in seconds since the epoch. Raises Refused for one that is not signed with this
    key, or more than AGE_S_MAX old."""
    time = headers.get(TIME_HEADER, "")
    if not time.isascii():
        raise Refused("the time of the callback is none", remedy="Hand on the header fields as they came")
    given, wanted = headers.get(SIGNATURE_HEADER, ""), signature(key, time, body)
    if not hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode()):
        raise Refused("the callback is not signed with this key", remedy="Compare the key with that of --callbacks")
    if not time.isdigit() or len(time) > 15 or abs(now - int(time)) > AGE_S_MAX:
        raise Refused("the callback is too old, or from the future", remedy="See whether both clocks are right")
    try:
        return msgspec.json.decode(body, type=Progress)
    except UNDECODABLE as error:
        raise Refused("the callback is signed, but holds no progress of a preseed") from error
