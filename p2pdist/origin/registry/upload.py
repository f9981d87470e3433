"""Sending blobs and manifests to a repository of a registry (OCI distribution specification 1.1,
"Push")."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from yarl import URL

from p2pdist.model.digest import Digest
from p2pdist.model.errors import NotFound, P2PDistError, Refused, Unavailable
from p2pdist.origin.registry.client import RegistryClient
from p2pdist.origin.registry.names import RepositoryNames

CHUNK_TRIES_MAX = 4
CHUNK_PAUSE_S, CHUNK_PAUSE_S_MAX = 0.5, 30.0
"""Before the second try, doubled each time, or as long as the registry asks for; one that asks for
more is left."""

_HELD = re.compile(r"(?:bytes=)?0-([0-9]{1,19})\Z")
"""What of an upload a registry has."""


@dataclass(frozen=True, slots=True)
class Upload:
    """Sends to one repository."""

    client: RegistryClient
    names: RepositoryNames
    mounts: tuple[str, ...] = ()
    """Other repositories of the registry that may have a blob already."""

    async def blob(
        self,
        digest: Digest,
        size: int,
        read: Callable[[int], Awaitable[bytes]],
        on_bytes: Callable[[int], None] = lambda length: None,
    ) -> bool:
        """Send a blob, of which `read` gives the chunk from a byte on; `on_bytes` hears of each
        that the registry has. False where it took the blob from another repository of its own."""
        upload = await self.begin(digest)
        if upload is None:
            return False
        at = told = tries = 0
        unsure = 0  # as far as the registry may have the blob, once the upload has broken off
        while at < size:
            try:
                if unsure:
                    resumed, at = await self.resume(upload, digest, unsure)
                    if resumed is None:  # the registry has it by now
                        on_bytes(size - told)
                        return True
                    upload, unsure = resumed, 0
                else:
                    chunk = await read(at)
                    unsure = at + len(chunk)
                    upload, at, unsure = await self.send(upload, at, chunk), unsure, 0
                    if at > told:  # a registry that loses what it took gets nowhere
                        tries = 0
            except Unavailable as error:
                tries += 1
                pause_s = max(CHUNK_PAUSE_S * 2 ** (tries - 1), error.details.get("retry_after", 0.0))
                if tries == CHUNK_TRIES_MAX or pause_s > CHUNK_PAUSE_S_MAX:
                    raise
                await asyncio.sleep(pause_s)
            on_bytes(max(0, at - told))
            told = max(at, told)
        await self.end(upload, digest)
        return True

    async def begin(self, digest: Digest) -> URL | None:
        """Where to send a blob; None where the registry took it from another repository of its
        own."""
        for source in (*self.mounts, ""):
            params = {"mount": str(digest), "from": source} if source else {}
            scope = self.names.scope("pull,push")
            path = self.names.path("blobs/uploads/")
            async with self.client.request(
                "POST", path, scope, params=params, headers={"Content-Length": "0"}, expect=frozenset({201, 202})
            ) as response:
                if response.status == 201:
                    return None
                location = response.headers.get("Location", "")
            if not source:
                return self.names.location(location)
            with contextlib.suppress(P2PDistError):
                async with self.client.request(
                    "DELETE", self.names.location(location), scope, expect=frozenset({202, 204})
                ):
                    pass
        raise AssertionError("the last source is none")

    async def send(self, upload: URL, start: int, data: bytes) -> URL:
        """Send bytes from `start`; returns where the next ones go. Raises Unavailable where the
        registry has others of the upload: it may still have been taking some when it was asked."""
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Range": f"{start}-{start + len(data) - 1}",
            "Content-Length": str(len(data)),
        }
        async with self.client.request(
            "PATCH",
            upload,
            self.names.scope("pull,push"),
            headers=headers,
            data=data,
            expect=frozenset({202, 416}),
            retry=False,
        ) as response:
            if response.status == 416:
                raise Unavailable(f"{self.client.url} takes no bytes of an upload from {start} on", remedy="Try again")
            return self.names.location(response.headers.get("Location", ""))

    async def resume(self, upload: URL, digest: Digest, sent: int) -> tuple[URL | None, int]:
        """Where an upload that broke off goes on, and from which byte: as far as the registry has
        it, at most `sent`. Where it does not say so, as `begin` does, from the first byte. Raises
        Unavailable."""
        match, location, scope = None, "", self.names.scope("pull,push")
        with contextlib.suppress(NotFound, Refused):
            async with self.client.request("GET", upload, scope, expect=frozenset({200, 204})) as response:
                match, location = _HELD.match(response.headers.get("Range", "")), response.headers.get("Location", "")
        # A registry that has nothing of it says 0-0, too, so of one byte that says nothing.
        held = int(match[1]) + 1 if match is not None and match[1] != "0" else 0
        if match is None or held > sent or (sent == 1 and not held):
            return await self.begin(digest), 0
        return self.names.location(location) if location else upload, held

    async def end(self, upload: URL, digest: Digest) -> None:
        """All bytes are sent; the registry verifies them, which may take longer than the client or
        a proxy waits: an upload that it does not know any more, or does not answer for, may have
        ended."""
        headers = {"Content-Length": "0"}
        try:
            async with self.client.request(
                "PUT",
                upload,
                self.names.scope("pull,push"),
                params={"digest": str(digest)},
                headers=headers,
                expect=frozenset({201}),
            ):
                pass
        except (NotFound, Unavailable):
            if not await self._has(digest):
                raise

    async def _has(self, digest: Digest) -> bool:
        path, expect = self.names.path(f"blobs/{digest}"), frozenset({200, 404})
        async with self.client.request("HEAD", path, self.names.scope("pull,push"), expect=expect) as response:
            return response.status == 200

    async def put_manifest(self, target: str, media_type: str, data: bytes) -> None:
        """Send a manifest under a tag or its digest; what it names must be there."""
        async with self.client.request(
            "PUT",
            self.names.path(f"manifests/{target}"),
            self.names.scope("pull,push"),
            headers={"Content-Type": media_type},
            data=data,
            expect=frozenset({201}),
        ):
            pass

    async def delete(self, path: str) -> None:
        """Delete a manifest, tag or blob; one that is not there is passed over."""
        async with self.client.request(
            "DELETE", self.names.path(path), self.names.scope("pull,push,delete"), expect=frozenset({202, 404})
        ):
            pass
