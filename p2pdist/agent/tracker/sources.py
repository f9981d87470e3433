"""The hosts that trackers named as sources of blobs, remembered until the blob is whole: a pull
that begins while no tracker answers asks them.

Plans name parents, alternates and superpeers. Of each blob the latest HOSTS_MAX are kept in a file
below the store, with the ticket that came with them, which other hosts take for a day after its end
while no tracker answers. A pull that is over soon writes nothing.

Invariants: at most BLOBS_MAX files, the oldest go first; a file that cannot be read counts as none;
a ticket is read by the agent's user alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdist.agent.access.files import make_private, read
from p2pdist.model.digest import Digest, hex_of, parse_digest
from p2pdist.model.errors import UNDECODABLE
from p2pdist.model.messages import TicketText
from p2pdist.model.plan import Plan, Source

HOSTS_MAX = 16
BLOBS_MAX, NAMED_MAX = 1000, 10_000
WRITE_PAUSE_S = 1.0
"""What plans say is written so long after it came, so that short pulls cost nothing."""

logger = logging.getLogger(__name__)


class NamedHosts(msgspec.Struct, frozen=True):
    """What is remembered of a blob: hosts, the latest first, and this host's ticket."""

    hosts: Annotated[tuple[Source, ...], Meta(max_length=HOSTS_MAX)] = ()
    ticket: TicketText = ""


_decoder = msgspec.json.Decoder(NamedHosts)


class NamedSources:
    """The hosts that trackers named, in files of `directory`; `host` is this one. On the event
    loop; threads read and write the files."""

    def __init__(self, directory: Path, host: str) -> None:
        self._directory, self._host = directory, host
        self._named: dict[Digest, NamedHosts] = {}
        """Of the blobs that were pulled last and are not whole; at most NAMED_MAX."""
        self._changed: dict[Digest, NamedHosts | None] = {}
        """What is not written yet; None where a file is to go."""
        self._writing: asyncio.Task[None] | None = None

    def planned(self, plan: Plan, ticket: str) -> None:
        """A tracker has planned."""
        before = self._named.get(plan.blob, NamedHosts())
        parents = [stripe.parent for stripe in plan.stripes]
        others = [source for stripe in plan.stripes for source in stripe.alternates]
        named = NamedHosts(self._latest([*parents, *others, *plan.keepers, *before.hosts]), ticket or before.ticket)
        if named != before:
            self._named[plan.blob] = named
            if len(self._named) > NAMED_MAX:
                del self._named[next(iter(self._named))]
            self._change(plan.blob, named)

    async def recall(self, blob: Digest) -> NamedHosts:
        """What trackers named when they last spoke of a blob; no hosts where nothing is known."""
        if blob not in self._named:
            self._named[blob] = await asyncio.to_thread(self._read, blob)
        return self._named[blob]

    def forget(self, blob: Digest) -> None:
        """A blob is whole, or wrong."""
        if self._named.pop(blob, None) is not None:
            self._change(blob, None)

    async def stop(self) -> None:
        """Write what is not written yet."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        await asyncio.to_thread(self._store, self._take())

    def _latest(self, sources: Iterable[Source | None]) -> tuple[Source, ...]:
        by_name = {
            source.host: source
            for source in reversed([source for source in sources if source is not None])
            if not source.is_origin and source.host != self._host
        }
        return tuple(reversed(by_name.values()))[:HOSTS_MAX]

    # -- files

    def _change(self, blob: Digest, named: NamedHosts | None) -> None:
        self._changed[blob] = named
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        while self._changed:
            await asyncio.sleep(WRITE_PAUSE_S)
            await asyncio.to_thread(self._store, self._take())
        self._writing = None

    def _take(self) -> dict[Digest, NamedHosts | None]:
        """What is to be written now."""
        changed, self._changed = self._changed, {}
        return changed

    def _store(self, changed: dict[Digest, NamedHosts | None]) -> None:
        try:
            for blob, named in changed.items():
                path = self._path(blob)
                if named is None:
                    path.unlink(missing_ok=True)
                    continue
                make_private(self._directory)
                fresh = path.with_suffix(".new")
                fresh.unlink(missing_ok=True)
                with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                    file.write(msgspec.json.encode(named))  # a lost one costs little: no fsync
                fresh.replace(path)
            if any(changed.values()):
                self._limit()
        except OSError as error:
            logger.warning("what trackers named is not remembered in %s: %s", self._directory, error.strerror)

    def _limit(self) -> None:
        """Remove the oldest files of too many."""
        files = [entry for entry in os.scandir(self._directory) if entry.name.endswith(".json")]
        if len(files) > BLOBS_MAX:
            for entry in sorted(files, key=lambda entry: entry.stat().st_mtime)[:-BLOBS_MAX]:
                os.unlink(entry.path)

    def _read(self, blob: Digest) -> NamedHosts:
        try:
            data = read(self._path(blob))
            named = _decoder.decode(data) if data else NamedHosts()
        except (OSError, *UNDECODABLE) as error:
            logger.warning("what trackers named of %s cannot be read: %s", blob, error)
            return NamedHosts()
        return NamedHosts(self._latest(named.hosts), named.ticket)

    def _path(self, blob: Digest) -> Path:
        return self._directory / f"{hex_of(parse_digest(blob))}.json"
