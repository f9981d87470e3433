"""Sending blobs and manifests to a repository of a registry (OCI distribution specification 1.1,
"Push")."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass

from yarl import URL

from p2pdist.model.digest import Digest
from p2pdist.model.errors import NotFound, P2PDistError, Unavailable, Unsuitable
from p2pdist.origin.registry.client import RegistryClient
from p2pdist.origin.registry.names import RepositoryNames

_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,18})\Z")


@dataclass(frozen=True, slots=True)
class Upload:
    """Sends to one repository."""

    client: RegistryClient
    names: RepositoryNames
    mounts: tuple[str, ...] = ()
    """Other repositories of the registry that may have a blob already."""

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

    async def send_all(
        self, digest: Digest, size: int, read: Callable[[int], bytes], on_bytes: Callable[[int], None]
    ) -> URL | None:
        """Send the `size` bytes of a blob; `read`, which may block, returns some from an offset on.
        A request that fails for a while is repeated from where the registry says that it stands,
        or, where it does not, from the beginning. Returns where the upload is ended, None as
        `begin`. Raises what requests do."""
        upload = await self.begin(digest)
        at = told = failed = 0
        while upload is not None and at < size:
            chunk = await asyncio.to_thread(read, at)
            try:
                upload = await self.send(upload, at, chunk)
                at += len(chunk)
            except Unavailable as error:
                failed += 1
                pause_s = error.details.get("retry_after", 0.2 * 2**failed)
                if failed >= self.client.tries_max or pause_s > self.client.pause_max_s:
                    raise
                await asyncio.sleep(pause_s)
                try:
                    upload, at = await self.position(upload)
                except P2PDistError:  # distribution says it of no upload that has got part of a request
                    upload, at = await self.begin(digest), 0
            if at > told:
                on_bytes(at - told)
                told, failed = at, 0
        return upload

    async def send(self, upload: URL, start: int, data: bytes) -> URL:
        """Send bytes from `start`; returns where the next ones go."""
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
            expect=frozenset({202}),
            retry=False,
        ) as response:
            return self.names.location(response.headers.get("Location", ""))

    async def position(self, upload: URL) -> tuple[URL, int]:
        """Where the next bytes go, and how many the registry has of an upload that was broken off.
        Raises Unsuitable where it does not say that, NotFound where it gave the upload up."""
        async with self.client.request(
            "GET", upload, self.names.scope("pull,push"), expect=frozenset({204})
        ) as response:
            location, stated = response.headers.get("Location", ""), response.headers.get("Range", "")
        match = _RANGE.match(stated)
        if not location or match is None:
            raise Unsuitable(f"{self.names.shown} does not say how much it has of an upload")
        last = int(match[1])
        # Of nothing registries say 0-0, as of a single byte, which no request sends alone.
        return self.names.location(location), last + 1 if last else 0

    async def end(self, upload: URL, digest: Digest) -> None:
        """All bytes are sent; the registry verifies them."""
        scope, headers = self.names.scope("pull,push"), {"Content-Length": "0"}
        params = {"digest": str(digest)}
        try:
            async with self.client.request(
                "PUT", upload, scope, params=params, headers=headers, expect=frozenset({201})
            ):
                pass
        except NotFound:
            # It may have ended when it was asked for the first time, and the answer was lost.
            try:
                async with self.client.request("HEAD", self.names.path(f"blobs/{digest}"), scope):
                    return
            except NotFound:
                pass
            raise

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
