"""The process that serves images which an agent is fetching as files of FUSE, without root: in the
user namespace of one program, where squashfuse mounts them.

A read is a request for a range at the agent's Unix socket, which the agent fetches before
everything else (GET /v1/blobs in docs/protocol.md). The kernel keeps what was read. A read whose
bytes do not come within a limit gets EIO, also while no agent answers.
"""

from __future__ import annotations

import errno
import http.client
import os
import queue
import re
import signal
import socket
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from p2pdist.mount.lazy.fuse import ATTRIBUTES_S, binding
from p2pdist.mount.squashfs import RemoteImage

LIMIT_S = 60.0
"""How long a read waits."""

PAUSE_S = 0.2
"""Between two requests for the same range, where the first one failed."""

CONNECTIONS_KEPT = 32
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")


class _Connection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("agent")
        self._path = path

    def connect(self) -> None:
        """Connect. Raises OSError."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)

    def limit(self, seconds: float) -> None:
        """Wait no longer than that for what comes next."""
        self.timeout = seconds
        if self.sock is not None:
            self.sock.settimeout(seconds)


class _Files:
    """The file system, as mfusepy asks for it: a directory with the images, by their number from
    1 on."""

    use_ns = True

    def __init__(self, path: str, images: Sequence[RemoteImage]) -> None:
        self._path = path
        self._images = {f"/{number}": image for number, image in enumerate(images, 1)}
        self._kept: queue.LifoQueue[_Connection] = queue.LifoQueue(CONNECTIONS_KEPT)

    def getattr(self, path: str, _handle: Any = None) -> dict[str, int]:
        """What stat(2) says."""
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o500, "st_nlink": 2}
        return {"st_mode": stat.S_IFREG | 0o400, "st_nlink": 1, "st_size": self._image(path).size}

    def readdir(self, _path: str, _handle: Any) -> list[str]:
        """The names."""
        return [".", "..", *(path[1:] for path in self._images)]

    def open(self, path: str, _flags: int) -> int:
        """Reading is allowed; the mount is read-only."""
        self._image(path)
        return 0

    def read(self, path: str, size: int, offset: int, _handle: Any) -> bytes:
        """What an image has there, however often the agent has to be asked. Raises OSError."""
        image = self._image(path)
        end = min(offset + size, image.size)
        if offset >= end:
            return b""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            with suppress(OSError, http.client.HTTPException):
                return self._fetch(image, offset, end, deadline)
            time.sleep(PAUSE_S)
        raise OSError(errno.EIO, "it has not come")

    def _fetch(self, image: RemoteImage, start: int, end: int, deadline: float) -> bytes:
        """Raises OSError, HTTPException for what is no whole answer by the deadline."""
        try:
            connection = self._kept.get_nowait()
        except queue.Empty:
            connection = _Connection(self._path)
        connection.limit(max(PAUSE_S, deadline - time.monotonic()))
        try:
            connection.request("GET", f"/v1/blobs/{image.digest}", headers={"Range": f"bytes={start}-{end - 1}"})
            answer = connection.getresponse()
            data = b""
            while part := answer.read1(end - start + 1 - len(data)):
                data += part
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                connection.limit(left_s)  # of each part; else an answer in bits takes a limit for each
            answer.close()
            whole = answer.status == http.client.OK and (start, end) == (0, image.size)
            if len(data) != end - start or not (whole or answer.status == http.client.PARTIAL_CONTENT):
                raise http.client.HTTPException(f"{answer.status} with {len(data)} bytes")
        except BaseException:
            connection.close()
            self._forget_kept()
            raise
        try:
            self._kept.put_nowait(connection)
        except queue.Full:
            connection.close()
        return data

    def _forget_kept(self) -> None:
        """Keep none of the connections: an agent that ended one that was idle, or began anew, has
        ended the others, and each would cost a pause."""
        with suppress(queue.Empty):
            while True:
                self._kept.get_nowait().close()

    def _image(self, path: str) -> RemoteImage:
        if path not in self._images:
            raise OSError(errno.ENOENT, path)
        return self._images[path]


def main() -> None:
    """`python -m p2pdist.mount.lazy.remote POINT SOCKET DIGEST SIZE ...`: serve the images of the
    agent at SOCKET below the directory POINT until that is unmounted."""
    point, path, *words = sys.argv[1:]
    images = [RemoteImage(digest, int(size)) for digest, size in zip(words[::2], words[1::2], strict=True)]
    assert all(_DIGEST.match(image.digest) for image in images)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    try:
        module = binding()
        options = {"fsname": "p2pdist-lazy", "ro": True, "nosuid": True, "nodev": True, "kernel_cache": True}
        options |= {"attr_timeout": ATTRIBUTES_S, "entry_timeout": ATTRIBUTES_S}
        module.FUSE(_Files(path, images), os.fspath(point), foreground=True, **options)
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"{getattr(error, 'strerror', None) or error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
