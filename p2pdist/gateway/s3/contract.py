"""What the S3 interface asks of its agent: which buckets there are, what is in them, and the bytes
of objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from p2pdist.gateway.answers import Sent


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing says of an object: bytes, entity tag (without quotes; equal tags mean equal
    contents), and when it was changed, in seconds since the epoch, 0 where that is not known."""

    size: int
    tag: str
    modified_s: float = 0.0


class Objects(Protocol):
    """The objects of a bucket at one moment."""

    @property
    def keys(self) -> Sequence[bytes]:
        """All keys, UTF-8, in the order of their bytes."""

    def describe(self, key: bytes) -> ObjectInfo | None:
        """What is known of an object; None where there is none."""


class Bucket(Protocol):
    """One bucket. Every method raises P2PDistError, and S3Failure where S3 has a code for it."""

    @property
    def name(self) -> str:
        """Its name."""

    async def objects(self, key: bytes = b"") -> Objects:
        """What is in it now, with a key as far as a request for that object alone needs. Nothing of
        the objects is fetched."""

    async def send(self, request: web.Request, objects: Objects, key: bytes, deadline: float) -> Sent:
        """Answer a GET or HEAD for an object of `objects`, which is there. Raises Unavailable when
        at `deadline` (of the event loop) no byte can be given yet, before the head was sent."""


class Buckets(Protocol):
    """The buckets of an agent."""

    def readable(self, request: web.Request) -> Sequence[Bucket]:
        """Those that the client may read, by name."""
