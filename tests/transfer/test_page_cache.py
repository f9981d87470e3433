"""What is sent from a file is sent by the loop only where it need not wait for the disk."""

from __future__ import annotations

import os
from pathlib import Path

from waits import wait_until

from p2pdist.transfer.stream.sendfile import _in_page_cache

SIZE = 1 << 20


def test_what_lies_on_the_disk_is_not_taken_for_what_is_in_memory(tmp_path: Path) -> None:
    """A file system that does not say counts as one that must be waited for."""
    path = tmp_path / "blob"
    path.write_bytes(os.urandom(SIZE))
    with path.open("rb") as file:
        handle = file.fileno()
        os.fsync(handle)

        def is_taken_for_disk() -> bool:
            # Each time anew: what a processor has just touched is not dropped yet.
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            return not _in_page_cache(handle, SIZE - 4096, 4096)

        wait_until(is_taken_for_disk, "the page is dropped")
