"""Recovery of blobs when a store is opened: which of the bytes that a stopped, killed or lost
process left can be trusted.

What can be believed: a piece marked under the running boot (its bytes are at least in the page
cache); every mark of a bitmap left clean; a complete blob that is durable, or was completed under
the running boot. All else is verified against its piece list, or against the hashes that are stored
beside it where it has none; wrong pieces are dropped. A bitmap,
where there is one, is believed before the index, since finish() removes it last and dropping pieces
writes it first. A blob of one piece has none, and is verified unless it was complete.

What is believed of a partial blob is believed so that a start need not read everything: its pieces
are read again before more are added (Blob.recheck). Of a blob that is complete the size is
compared, no more.
"""

from __future__ import annotations

import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt
from p2pdist.model.pieces import PIECE_SIZE_MAX, PIECE_SIZE_MIN, PIECES_LIMIT, PieceLayout, PieceSet
from p2pdist.store.blobs.bitmap import has_bitmap, read_bitmap
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.blobs.files import BlobContext
from p2pdist.store.blobs.hashes import VOUCHED, read_hashes
from p2pdist.store.disk import failures, forget
from p2pdist.store.index import Entry

logger = logging.getLogger(__name__)

_THREADS = min(4, os.cpu_count() or 1)


def recover(context: BlobContext) -> dict[Digest, Blob]:
    """All blobs of a store that is locked but not yet in use. Removes what belongs to none. Raises
    P2PDistError."""
    blobs: dict[Digest, Blob] = {}
    entries, wholes = context.index.entries(), context.index.wholes()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="store-recovery") as pool:
        for entry, blob in zip(entries, pool.map(lambda entry: _recover_blob(context, entry), entries), strict=True):
            if blob is None:
                context.index.delete(entry.digest)
            else:
                blobs[entry.digest] = blob
                blob.whole = (blob.digest, blob.pieces_digest) in wholes
    _remove_strays(context, blobs)
    return blobs


def _recover_blob(context: BlobContext, entry: Entry) -> Blob | None:
    paths = context.paths
    with failures(paths.root):
        location = _locate(context, entry.digest)
        if location is None:
            return None
        if not _is_possible(context, entry):
            logger.warning("%s is dropped: the index and its piece list say different things of it", entry.digest)
            return None
        complete, size = location
        count = -(-entry.size // entry.piece_size)
        bitmap = read_bitmap(paths.bitmap(entry.digest), count) if count > 1 else None
        if bitmap is not None:
            have, trusted = bitmap.pieces, bitmap.clean or bitmap.boot == context.boot
        else:
            have = PieceSet.full(count)
            trusted = complete and entry.complete and (entry.durable or entry.boot == str(context.boot))
        trusted = trusted and size == entry.size
        if size > entry.size:
            _shorten(context.paths.complete(entry.digest) if complete else context.paths.data(entry.digest), entry.size)
        stored = read_hashes(paths.hashes(entry.digest), count) if entry.pieces_digest == VOUCHED else None
        if entry.pieces_digest == VOUCHED and (stored is None or complete):
            logger.warning("%s is dropped: the hashes of its pieces are lost", entry.digest)
            return None
        if stored is not None:
            have = PieceSet(count)
            for piece in stored if bitmap is None else bitmap.pieces:
                if piece in stored:
                    have.add(piece)
        unread = trusted and not complete and len(have) > 0
        blob = Blob(context, entry, have, complete=complete, vouched=stored, unread=unread)
        if complete and entry.complete and trusted and bitmap is None:
            if not entry.durable:
                context.sync(blob.digest, blob.pieces_digest)
            return blob
        try:
            before = len(have)
            _reconcile(context, blob, trusted=trusted)
        except Corrupt as error:
            logger.warning("%s is dropped: %s", entry.digest, error)
            blob.retire()
            return None
        if len(have) < before:
            logger.warning(
                "%s: %d of %d pieces did not survive and are dropped", entry.digest, before - len(have), before
            )
        return blob


def _reconcile(context: BlobContext, blob: Blob, *, trusted: bool) -> None:
    """Bring `have`, index and files in line. Unless `trusted`, every piece of `have` is verified
    first. Raises OSError."""
    files = blob.files
    if not trusted:
        forget(files.path)  # the disk may have failed to take what the kernel still has
        wrong = blob.verify()
        if blob.vouched is not None:
            blob.vouched.drop(wrong)
        else:
            for piece in wrong:
                blob.have.discard(piece)
    elif not blob.complete and blob.have.complete:
        blob.recheck()
    with files.disk:
        if blob.complete and not blob.have.complete:
            files.reopen(blob.have)
            blob.complete = False
        elif blob.complete:
            files.confirm()
            context.sync(blob.digest, blob.pieces_digest)
        elif not trusted:
            files.rewrite_bitmap(blob.have)
    if not blob.complete and blob.have.complete and blob.vouched is None:
        blob.finish()


def _is_possible(context: BlobContext, entry: Entry) -> bool:
    """Whether a row is about a blob cut as its piece list says. A blob that is complete may have
    lost its list."""
    power = entry.piece_size & (entry.piece_size - 1) == 0 and PIECE_SIZE_MIN <= entry.piece_size <= PIECE_SIZE_MAX
    if not power or not 0 <= entry.size <= PIECES_LIMIT * entry.piece_size:
        return False
    if entry.pieces_digest == VOUCHED:
        return not entry.complete
    try:
        return context.load(entry.pieces_digest).layout == PieceLayout(entry.size, entry.piece_size)
    except Corrupt:
        return entry.complete


def _shorten(path: Path, size: int) -> None:
    mode = path.stat().st_mode
    path.chmod(mode | stat.S_IWUSR)
    os.truncate(path, size)
    path.chmod(mode)


def _locate(context: BlobContext, digest: Digest) -> tuple[bool, int] | None:
    """Whether the content stands where complete blobs do, and its size in bytes; None when there is
    none."""
    for complete, path in ((True, context.paths.complete(digest)), (False, context.paths.data(digest))):
        try:
            return complete, path.stat().st_size
        except FileNotFoundError:
            continue
    return None


def _remove_strays(context: BlobContext, blobs: dict[Digest, Blob]) -> None:
    paths = context.paths
    expected: set[Path] = set()
    for digest, blob in blobs.items():
        expected.add(blob.path)
        if has_bitmap(blob.layout) and not blob.complete:
            expected.add(paths.bitmap(digest))
        if blob.vouched is not None:
            expected.add(paths.hashes(digest))
    for directory in (paths.blobs, paths.partial, paths.temporary):
        for path in directory.iterdir():
            if path not in expected:
                with failures(path):
                    path.unlink()
