"""Sending blobs and manifests to a repository of a registry (OCI distribution specification 1.1,
"Push")."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from yarl import URL

from p2pdist.model.digest import Digest
from p2pdist.model.errors import NotFound, P2PDistError
from p2pdist.origin.registry.client import RegistryClient
from p2pdist.origin.registry.names import RepositoryNames


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

    async def end(self, upload: URL, digest: Digest) -> None:
        """All bytes are sent; the registry verifies them, which may take longer than the client or
        a proxy waits: an upload that it does not know any more may have ended."""
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
        except NotFound:
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
