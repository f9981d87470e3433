"""The names of packages to which blobs and documents of this host belong, since rules for reading
name packages."""

from __future__ import annotations

import threading

from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError
from p2pdist.model.manifest import Manifest, parse_reference
from p2pdist.model.messages import CHOSEN_BYTES_MAX, Selected
from p2pdist.model.pieces import PieceSet
from p2pdist.model.selection import Selection
from p2pdist.store.store import BlobStore, stored_manifest

SELECTIONS_MAX = 10_000


class PackageNames:
    """Names by digest, of all packages that were found on this host. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[Digest, tuple[str, ...]] = {}
        self._references: dict[Digest, str] = {}
        """A reference of the package of each blob and document, for people: by tag if one is known,
        and the one that was found last."""
        self._selections: dict[Digest, Selected] = {}
        """What each selection was selected from."""

    def load(self, store: BlobStore) -> None:
        """Learn the packages of the store. Blocks."""
        for record in store.packages.list():
            try:
                manifest = stored_manifest(store, record.manifest_digest)
                if manifest is not None:
                    self.learn(record.reference, record.manifest_digest, manifest)
            except P2PDistError:
                continue  # a verification reports it
        for image in store.images.list():
            self.learn_name(image.name, (image.digest,))

    def learn(self, reference: str, digest: Digest, manifest: Manifest) -> None:
        """Note that a package was found: what belongs to it has its name from now on."""
        parts = (digest, *(part.digest for part in (*manifest.blobs, *manifest.documents())))
        self.learn_name(parse_reference(reference).name, parts)
        with self._lock:
            for part in parts:
                if "@" not in reference or part not in self._references:
                    self._references[part] = reference

    def learn_name(self, name: str, parts: tuple[Digest, ...]) -> None:
        """Note that these blobs and documents belong to a package or image of this name."""
        with self._lock:
            for part in parts:
                names = self._names.get(part, ())
                if name not in names:
                    self._names[part] = (*names, name)

    def select(self, digest: Digest, selection: Selection) -> None:
        """Note that a blob is a selection of the pieces of another one, and belongs where that
        does."""
        bitmap = PieceSet(selection.whole.layout.count)
        for piece in selection.chosen:
            bitmap.add(piece)
        selected = Selected(selection.blob.digest, selection.whole.digest, bitmap.to_bytes())
        if len(selected.chosen) > CHOSEN_BYTES_MAX:
            return
        with self._lock:
            self._selections[digest] = selected
            if len(self._selections) > SELECTIONS_MAX:
                del self._selections[next(iter(self._selections))]

    def selected(self, digest: Digest) -> Selected | None:
        """What a blob was selected from; None where it is no selection, as far as is known."""
        return self._selections.get(digest)

    def reference(self, digest: Digest) -> str:
        """A reference of a package to which a blob or document belongs, for people; empty where
        none is known here. From any thread."""
        selected = self._selections.get(digest)
        return self._references.get(selected.blob if selected is not None else digest, "")

    def of(self, digest: Digest) -> tuple[str, ...]:
        """The packages to which a blob or document belongs, as far as they are known here."""
        selected = self._selections.get(digest)
        return self._names.get(selected.blob if selected is not None else digest, ())
