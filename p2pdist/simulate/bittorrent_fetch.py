"""What a simulated host brings from the origin into a swarm, as core/origin_seeding.py decides.

A piece that was read and has verified is held at once: the second that libtorrent may keep it in
memory is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pdist.core.origin_seeding import LOOK_S, Feed
from p2pdist.model.messages import Complaint, Reason
from p2pdist.model.plan import ORIGIN
from p2pdist.simulate.network import Stream

if TYPE_CHECKING:
    from p2pdist.simulate.bittorrent import Member
    from p2pdist.simulate.context import Surroundings
    from p2pdist.simulate.host import Host, Pull

SWARM = -1
"""The number of a transfer in the events of a download core, which no stream has."""


class SwarmFeed:
    """See the module's text."""

    def __init__(self, host: Host, pull: Pull, member: Member, around: Surroundings) -> None:
        self._host, self._pull, self._member, self._around = host, pull, member, around
        self._world = around.world
        self._core = Feed(pull.blob.digest, host.name, pull.have, self._world.now)
        self._stream: Stream | None = None
        self._over = False
        self._world.after(self._world.random.uniform(0, LOOK_S), self._look)

    @property
    def stripes(self) -> set[int]:
        """The stripes that this host alone reads."""
        download = self._pull.download
        if download is None or download.readers().dealt:
            return set()
        return {piece % self._pull.blob.stripes for piece in self._core.under_way}

    def stop(self) -> None:
        """End; what is being read is dropped."""
        self._over = True
        if self._stream is not None:
            self._forget(self._stream)

    def held(self, piece: int) -> None:
        """A piece has been stored."""
        if self._core.held(piece):
            self._read_more()

    def arrived(self, piece: int, length: int, good: bool) -> None:
        """The origin has sent a piece."""
        pull, now = self._pull, self._world.now
        if self._over:
            pull.bytes_again += length
            return
        if not good:
            pull.rejected += 1
            self._core.failed(piece, now=now)
            self._complain(piece % pull.blob.stripes, "corrupt")
        elif pull.proof[piece]:
            self._core.dropped(piece)
            pull.duplicates += 1
            pull.bytes_again += length
        else:
            self._core.brought(piece, now=now)
            pull.bytes_origin += length
            pull.bytes_swarm += length
            self._host.keep(pull, SWARM, piece)
        self._read_more()

    def ended(self) -> None:
        """The origin does not answer, or the path to it is cut."""
        if self._stream is not None:
            self._forget(self._stream)
        for piece in list(self._core.under_way):
            self._core.failed(piece, now=self._world.now)
            self._complain(piece % self._pull.blob.stripes, "unavailable")

    def _look(self) -> None:
        download = self._pull.download
        if self._over or download is None:
            return
        readers = download.readers()
        if readers.any:
            self._core.look(readers, self._member.counts, now=self._world.now)
            self._read_more()
        self._world.after(LOOK_S, self._look)

    def _read_more(self) -> None:
        download = self._pull.download
        if self._over or download is None:
            return
        while (piece := self._core.next(download.readers(), now=self._world.now)) is not None:
            self._around.checks.feeding(self._host, self._pull, piece)
            if self._stream is None:
                self._stream = Stream(self._host, None, self._pull, SWARM, 0, feed=self)
            self._around.origin.ask(self._stream, piece)

    def _forget(self, stream: Stream) -> None:
        stream.child_open = False
        self._around.origin.closed(stream)
        self._around.network.streams.pop(stream, None)
        self._stream = None

    def _complain(self, stripe: int, reason: Reason) -> None:
        self._host.session.tell(Complaint(self._pull.blob.digest, stripe, ORIGIN.host, reason))
