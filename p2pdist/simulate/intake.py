"""How a simulated host takes in what arrives: after each piece its downlink core says for how long
it does not read the stream on."""

from __future__ import annotations

from p2pdist.core.downlink import Downlink
from p2pdist.simulate.network import Network, Stream


class Intake:
    """One life of a host's downlink."""

    __slots__ = ("_downlink", "_network")

    def __init__(self, network: Network) -> None:
        self._network = network
        self._downlink = Downlink()

    def arrived(self, stream: Stream, length: int) -> None:
        """A piece has come in whole: there is room for another once the host reads on."""
        if stream.transit:
            stream.transit.pop(0)
        pause_s = self._downlink.received(stream.pull.blob.priority, length, self._network.world.now)
        if pause_s:
            stream.unread += 1
            self._network.world.after(pause_s, self._look, stream)
        elif stream.held_up:
            self._network.room(stream)

    def _look(self, stream: Stream) -> None:
        world = self._network.world
        pause_s = self._downlink.held_s(stream.pull.blob.priority, world.now)
        if pause_s and stream.child_open:
            world.after(pause_s, self._look, stream)
            return
        stream.unread -= 1
        if stream.held_up:
            self._network.room(stream)
        if stream.parent is None and self._network.origin is not None:
            self._network.origin.go_on([stream])
