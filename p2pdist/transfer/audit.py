"""The audit: one JSON document a line for each event of access, through the logger
`p2pdist.audit`.

Fields: `time` (UTC), `event`, `request_id`, `identity`, `credential` (what showed it), `address`,
`right`, `object`, `outcome`. Refusals of one address are limited to REFUSALS_MAX in WINDOW_S; the
next one after that says how many were left out.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
import time
from collections import Counter
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path

from p2pdist.model.access import Identity
from p2pdist.model.errors import foreseen, printable
from p2pdist.model.request_id import REQUEST_ID

REFUSALS_MAX = 10
WINDOW_S = 60.0
BATCH_S = 0.1
ADDRESSES_MAX = 10_000
FIELD_CHARACTERS_MAX = 300

logger = logging.getLogger("p2pdist.audit")


class Window:
    """Counts events by address in windows of WINDOW_S, for at most ADDRESSES_MAX addresses."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._began_at = time.monotonic()
        self._counts: Counter[str] = Counter()

    def add(self, address: str) -> bool:
        """Note an event; whether it is one of the first `most` of this window."""
        self._turn()
        if len(self._counts) < ADDRESSES_MAX or address in self._counts:
            self._counts[address] += 1
            return self._counts[address] <= self._most
        return False

    def full(self, address: str) -> bool:
        """Whether the address had its events of this window."""
        self._turn()
        return self._counts[address] >= self._most

    def _turn(self) -> None:
        if time.monotonic() - self._began_at > WINDOW_S:
            self._began_at, self._counts = time.monotonic(), Counter()


class Audit:
    """Writes events of access."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        """Requests that were refused, by the right that was needed; a metric."""
        self._refusals = Window(REFUSALS_MAX)
        self._left_out: Counter[str] = Counter()

    def note(
        self,
        event: str,
        *,
        identity: Identity | None = None,
        address: str = "",
        right: str = "",
        subject: str = "",
        outcome: str = "done",
        **more: object,
    ) -> None:
        """Write an event. `subject` is what it is about."""
        fields = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "event": event,
            "request_id": REQUEST_ID.get(),
            "identity": str(identity) if identity is not None else "",
            "credential": identity.credential if identity is not None else "",
            "address": address,
            "right": right,
            "object": subject,
            "outcome": outcome,
            **more,
        }
        plain = {
            name: printable(value)[:FIELD_CHARACTERS_MAX] if isinstance(value, str) else value
            for name, value in fields.items()
            if value != ""
        }
        logger.info("%s", json.dumps(plain))

    def refuse(self, *, identity: Identity | None, address: str, right: str, subject: str, why: str) -> None:
        """Count a refusal, and write it unless its address has had many."""
        self.refused[right or "none"] += 1
        if not self._refusals.add(address):
            if len(self._left_out) < ADDRESSES_MAX:
                self._left_out[address] += 1
            return
        left_out = self._left_out.pop(address, 0)
        self.note(
            "refusal",
            identity=identity,
            address=address,
            right=right,
            subject=subject,
            outcome=why,
            **({"left_out": left_out} if left_out else {}),
        )


class _PrivateFile(logging.handlers.WatchedFileHandler):
    """Makes the file, also again after it was renamed, for its owner alone."""

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.fchmod(descriptor, 0o600)
        return TextIOWrapper(os.fdopen(descriptor, "ab"), encoding=self.encoding)


class _Batches(logging.handlers.QueueListener):
    """Lets lines of BATCH_S come together, so that its thread is not woken for each."""

    def dequeue(self, block: bool) -> logging.LogRecord:
        record: logging.LogRecord = super().dequeue(block)
        if isinstance(self.queue, queue.SimpleQueue) and self.queue.empty():
            time.sleep(BATCH_S)
        return record


class _Queued(logging.handlers.QueueHandler):
    """Hands lines to a thread, and waits until it has written them when logging ends."""

    def __init__(self, file: logging.Handler) -> None:
        waiting: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        super().__init__(waiting)
        self._writer: _Batches | None = _Batches(waiting, file)
        self._writer.start()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.stop()
        super().close()


def audit_to(path: Path) -> logging.Handler:
    """Write the audit to a file from now on instead of the log; closing the result, as
    logging.shutdown does, writes what waits. A thread writes, so that no disk holds up the tracker;
    the file may be renamed, as logrotate(8) does. Raises P2PDistError."""
    try:
        file = _PrivateFile(path, encoding="utf-8")
    except OSError as error:
        raise foreseen(error, str(path)) or error from error
    file.setFormatter(logging.Formatter("%(message)s"))
    handler = _Queued(file)
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return handler
