"""Opening directories below one of ours, in walking order, without following a link on the way.

Each step is an openat(2) relative to the directory before it, so neither links that lower layers
left nor the length of a path lead astray. The directories between the last one opened and the top
stay open, up to KEPT_MAX of them.
"""

from __future__ import annotations

import os
from types import TracebackType

KEPT_MAX = 32
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Descent:
    """Opens directories below the descriptor `top`, which stays the caller's. A context: what it
    opened is closed at its end."""

    def __init__(self, top: int) -> None:
        self._opened = [(b"", top)]

    def __enter__(self) -> Descent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while len(self._opened) > 1:
            self._close()

    def _close(self) -> None:
        os.close(self._opened.pop()[1])

    def open(self, path: bytes) -> int:
        """A descriptor of the directory `path`, relative and without dots; good until the next
        call. Raises OSError: ENOENT, ENOTDIR or ELOOP when it, or one above it, is no directory."""
        opened = self._opened
        while opened[-1][0] != path:
            above, descriptor = opened[-1]
            if above and not path.startswith(above + b"/"):
                self._close()
                continue
            begin = len(above) + 1 if above else 0
            name = path[begin:].partition(b"/")[0]
            found = os.open(name, _OPEN, dir_fd=descriptor)
            if len(opened) > KEPT_MAX:
                self._close()
            opened.append((path[: begin + len(name)], found))
        return opened[-1][1]
