"""Access to packages and images: which manifest an identity may read under which name.

Any manifest could be asked for by its digest under any name. So a digest counts as one of a name
only when a tag of that name led to it, or a preseed was ordered of it, which outlives the tracker.

An image is a package named `upstream/repository`. Its registry says what is in a repository: a
manifest, and each blob that the manifest names, counts as one of that name when the registry has it
there. A manifest alone would not do, as its author may name blobs of others in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from p2pdist.model.access import Identity
from p2pdist.model.digest import Digest, is_digest
from p2pdist.model.errors import NotFound
from p2pdist.model.image import ImageName
from p2pdist.model.image_manifest import ImageDocument, ImageManifest, decode_image
from p2pdist.model.manifest import Descriptor, Reference, blob_reference
from tracker.access.control import AccessControl
from tracker.content import Content
from tracker.core.policy.book import PolicyBook
from tracker.policies import bind_package
from tracker.upstreams.upstreams import Upstreams


class PackageAccess:
    """Access to the packages of one tracker."""

    def __init__(self, control: AccessControl, book: PolicyBook, content: Content) -> None:
        self._control, self._book, self._content = control, book, content
        self.ordered: Callable[[str], bool] = lambda package: False
        """Whether a preseed was ordered of a package, by `name@digest`."""

    @property
    def stranger(self) -> Identity:
        """Reads what is public."""
        return Identity("anonymous", read=self._control.state.rules.public)

    def public(self, names: Iterable[str]) -> bool:
        """Whether a package of one of these names is public."""
        return self._control.state.rules.public.match_any(names)

    async def find(self, identity: Identity, reference: Reference) -> Descriptor:
        """The manifest that a reference names. Raises NotFound where the identity may not read it,
        as for what does not exist."""
        names, blob = {reference.name}, _blob_of(reference)
        if blob is not None:
            names.update(self._book.readers_of(blob))
        identity.require_read(names, str(reference))
        await self.require_found(identity, reference)
        found = await self._content.resolve(reference)
        if reference.digest is None or not identity.reads_everything:
            await self.vouch(reference.name, found.digest)
        return found

    async def require_found(self, identity: Identity, reference: Reference) -> None:
        """Raises NotFound where an identity that may read packages of a name names a digest by it
        that was not found under this name. Storage is not asked: its answer would tell whether the
        digest exists."""
        if not identity.reads_everything and not await self._vouched(reference):
            raise NotFound(f"{reference} is not known here", remedy="Ask for it by a tag")

    async def vouch(self, name: str, digest: Digest) -> None:
        """The manifest `digest` is a package of this name. Raises NotFound, Corrupt,
        Unavailable."""
        if name not in self._book.readers_of(digest):
            await bind_package(self._book, self._content, name, digest)
            await self._content.vouch(Reference(name, digest=digest))

    async def _vouched(self, reference: Reference) -> bool:
        digest = reference.digest
        if digest is None or reference.name in self._book.readers_of(digest):
            return True
        return self.ordered(str(reference)) or await self._content.vouched(reference)


class ImageAccess:
    """Access to the images of one tracker's upstreams."""

    def __init__(self, book: PolicyBook, upstreams: Upstreams) -> None:
        self._book, self._upstreams = book, upstreams

    def require(self, identity: Identity, name: ImageName) -> None:
        """Raises NotFound, as for what does not exist, where an identity may not read images of
        this name. Upstream is asked for nothing before."""
        identity.require_read([str(name)], str(name))

    async def bind(self, name: ImageName, found: ImageDocument) -> None:
        """The registry served a document under this name: note that identities which may read the
        name may read it, and the blobs that it names. Raises Refused, Unavailable."""
        if str(name) in self._book.readers_of(found.digest):
            return
        document = decode_image(found.data, found.media_type)
        parts: set[Digest] = set()
        if isinstance(document, ImageManifest):
            named = (*document.blobs, *document.foreign)
            parts = await self._upstreams.confirmed(name, [blob.digest for blob in named], found.digest)
        self._book.bind(str(name), found.digest, sorted(parts))

    async def bind_blob(self, name: ImageName, digest: Digest) -> None:
        """The registry has a blob under this name: note that identities which may read the name may
        read it. Raises Refused, Unavailable."""
        if str(name) not in self._book.readers_of(digest) and await self._upstreams.has_blob(name, digest):
            self._book.bind(str(name), digest, ())


def _blob_of(reference: Reference) -> Digest | None:
    """The blob whose own reference this is (`blob:sha256-...`)."""
    text = reference.tag.replace("-", ":", 1)
    return Digest(text) if is_digest(text) and reference == blob_reference(Digest(text)) else None
