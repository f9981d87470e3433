"""Policies in a file: read at the start, and again whenever the file changes or SIGHUP says so. And
what packages consist of, noted for them.

A file with a mistake never counts: at the start the tracker does not run, later the policies that
were in force stay, and logs, /healthz and metrics say that they are old.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from p2pdist.files import decoded, read_content
from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError, UsageError
from p2pdist.model.image import ImageName, ImageReference
from p2pdist.model.image_manifest import ImageDocument, ImageIndex, decode_image
from p2pdist.model.manifest import Reference, decode_manifest
from p2pdist.model.units import doubt_of_rate
from tracker.content import Content
from tracker.core.policy.book import PolicyBook
from tracker.core.policy.section import Mistake
from tracker.core.policy.table import PolicyTable, read_table

POLL_S = 1.0
BYTES_MAX = 4 << 20
NAMED_MAX = 3
RATES = frozenset(["upload", "download", "rate"])
"""Keys of rates, see tracker/core/policy/rules.py and budget.py."""

Stamp = tuple[int, int, int] | None
logger = logging.getLogger(__name__)


def check_policies(path: Path) -> tuple[PolicyTable, list[Mistake]]:
    """The policies in a file, and every mistake in it. Never raises: a file that cannot be read is
    a mistake, too."""
    try:
        data = read_content(path, BYTES_MAX).data
    except OSError as error:
        return PolicyTable(), [Mistake("", "", f"it cannot be read: {error.strerror}", "Name a file that is there")]
    if len(data) > BYTES_MAX:
        return PolicyTable(), [Mistake("", "", f"it has more than {BYTES_MAX} bytes", "Name a file of policies")]
    try:
        document = tomllib.loads(decoded(data))
    except (ValueError, RecursionError) as error:
        said = " ".join(str(error).split())[:300]
        return PolicyTable(), [Mistake("", "", f"it is no TOML: {said}", "Correct that place; see https://toml.io")]
    for doubt in _doubts(document):
        logger.warning("the policies in %s: %s", path, doubt)
    return read_table(document)


def _doubts(document: dict[str, Any]) -> Iterator[str]:
    """What the author should hear of rates that may be bits or bytes, by table and key."""
    for name, tables in document.items():
        for table in tables if isinstance(tables, list) else ():
            for key in RATES & table.keys() if isinstance(table, dict) else ():
                if isinstance(value := table[key], str) and (doubt := doubt_of_rate(value)):
                    yield f"[[{name}]], {key}: {doubt}"


class PolicyFile:
    """Keeps a book at what a file says."""

    def __init__(self, path: Path, book: PolicyBook, changed: Callable[[str], None] = lambda text: None) -> None:
        """`changed` hears in words for people what holds from now on, or why nothing changes."""
        self._path, self._book, self._changed = path, book, changed
        self._stamp: Stamp = None
        self._asked = asyncio.Event()

    def load(self) -> None:
        """Read the file and put it in force. Raises UsageError, after which nothing has changed."""
        self._stamp = self._look()
        self._take(*check_policies(self._path))

    def _take(self, table: PolicyTable, mistakes: list[Mistake]) -> None:
        if mistakes:
            more = f"; and {len(mistakes) - NAMED_MAX} more" if len(mistakes) > NAMED_MAX else ""
            raise UsageError(
                f"the policies in {self._path} cannot be used: {'; '.join(map(str, mistakes[:NAMED_MAX]))}{more}",
                remedy=f"p2pdist doctor --policies {self._path} names every mistake",
            )
        self._book.replace(table)
        logger.info("%d policies of %s hold", len(table.policies), self._path)
        self._changed(f"{len(table.policies)} policies of {self._path} hold")

    def reload(self) -> None:
        """Read the file again soon, whether or not it looks changed."""
        self._asked.set()

    async def watch(self) -> None:
        """Read the file again when it has changed, until cancelled."""
        while True:
            asked = await self._woken()
            try:
                stamp = await asyncio.to_thread(self._look)
                if asked or stamp != self._stamp:
                    self._stamp = stamp
                    self._take(*await asyncio.to_thread(check_policies, self._path))
            except UsageError as error:
                self._book.problem = error.what
                logger.warning("the policies stay as they were: %s", error)
                self._changed(f"the policies stay as they were: {error.what}")
            except Exception:
                logger.exception("the policies in %s are not watched", self._path)

    async def _woken(self) -> bool:
        """Wait for the time to look; whether `reload` asked for it."""
        try:
            async with asyncio.timeout(POLL_S):
                await self._asked.wait()
        except TimeoutError:
            return False
        self._asked.clear()
        return True

    def _look(self) -> Stamp:
        """What changes with the file."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


async def bind_package(book: PolicyBook, content: Content, name: str, digest: Digest) -> None:
    """Note that an identity which may read packages of this name may read the manifest `digest` and
    all that it names. Raises NotFound, Corrupt, Unavailable."""
    if name not in book.readers_of(digest):
        manifest = decode_manifest(await content.manifest(digest))
        book.bind(name, digest, [part.digest for part in (*manifest.blobs, *manifest.documents())])


async def note_package(book: PolicyBook, content: Content, reference: Reference, digest: Digest) -> None:
    """Note which blobs a package has, if it is not known: that it is asked for may be all that this
    tracker hears of it. Where that cannot be found out now, its blobs go by no policy until it is
    asked for again."""
    if book.known(reference, digest):
        return
    try:
        manifest = decode_manifest(await content.manifest(digest))
    except P2PDistError as error:
        logger.debug("what %s consists of is not known: %s", reference, error)
        return
    book.note(reference, digest, [blob.digest for blob in manifest.blobs])


def note_image(book: PolicyBook, name: ImageName, tag: str, found: ImageDocument) -> None:
    """Note which blobs an image has, which its tag, "" for none, or its digest was asked for. Each
    manifest of an index is of the tag as well."""
    reference = ImageReference(name, tag, None if tag else found.digest).package
    if book.known(reference, found.digest):
        return
    document = decode_image(found.data, found.media_type)
    if isinstance(document, ImageIndex):
        book.note(reference, found.digest, ())
        for entry in document.entries if tag else ():
            book.note(reference, entry.descriptor.digest, ())
    else:
        book.note(reference, found.digest, [blob.digest for blob in (*document.blobs, *document.foreign)])
