"""What a blob of the store holds and does not match what names it: the fault of the disk, or of the
package.

The pieces of a blob verified before they counted, so bytes that are wrong later changed on the
disk, or were packed wrongly. The piece list tells: pieces that do not verify any more are dropped,
as the scrub drops them, and Damaged says so, since the next pull brings them again. Only what
verifies once more and still does not match contradicts itself.
"""

from __future__ import annotations

import logging

from p2pdist.model.errors import Damaged, NotFound, P2PDistError
from p2pdist.store.blobs.audit import wrong_pieces
from p2pdist.store.blobs.blob import Blob

logger = logging.getLogger(__name__)


def drop_wrong(blob: Blob, start: int, length: int) -> bool:
    """Read the pieces of a range of a blob once more, and drop those that are wrong or cannot be
    read. Returns whether the range is damaged: a piece was dropped, just now or before. Raises
    P2PDistError, Corrupt where the store has lost the piece list."""
    with blob.held():
        pieces = blob.layout.covering(start, start + length)
        held = [piece for piece in pieces if piece in blob.have]
        wrong = wrong_pieces(blob.fileno(), blob.layout, held, lambda: blob.pieces)
        if wrong:
            logger.error("%s: %d of its %d pieces are damaged", blob.digest, len(wrong), blob.layout.count)
            blob.drop(wrong)
    return bool(wrong) or len(held) < len(pieces)


def damaged(blob: Blob) -> Damaged:
    """The failure of a use of a blob of which pieces were dropped."""
    return Damaged(
        f"{blob.digest} changed on the disk after it had verified; what is wrong was dropped",
        remedy="Pull again",
        blob=blob.digest,
    )


def blame(blob: Blob, start: int, length: int, failure: P2PDistError) -> P2PDistError:
    """What a use of a range of a blob is to raise that ended with `failure`: Damaged where the disk
    is at fault, else `failure`. Raises what `drop_wrong` raises."""
    return damaged(blob) if drop_wrong(blob, start, length) else failure


def read_again(blob: Blob, start: int, length: int) -> bytes:
    """Bytes of a complete blob, the pieces of which are verified once more. Raises Damaged, and
    what Blob.read_range raises."""
    layout, parts = blob.layout, []
    with blob.held():
        pieces = layout.covering(start, start + length)
        for piece in pieces:
            try:
                data = blob.read_range(layout.offset(piece), layout.length(piece))
            except NotFound as gone:  # it was dropped by another
                raise damaged(blob) from gone
            except P2PDistError as error:
                raise blame(blob, layout.offset(piece), layout.length(piece), error) from error
            if not blob.pieces.verify(piece, data):
                drop_wrong(blob, layout.offset(piece), layout.length(piece))
                raise damaged(blob)
            parts.append(data)
        skipped = start - layout.offset(pieces[0]) if pieces else 0
    return b"".join(parts)[skipped : skipped + length]
