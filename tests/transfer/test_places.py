"""Places of which one address takes a share alone."""

from __future__ import annotations

from contextlib import ExitStack

from p2pdist.transfer.places import Places


def test_an_address_takes_its_share_and_the_others_the_rest() -> None:
    places = Places(4, 2)
    with ExitStack() as held:
        # The last 64 bits of an IPv6 address are the host's to choose.
        remotes = ["192.0.2.1", "192.0.2.1", "192.0.2.1", "2001:db8::1", "2001:db8::2", "2001:db8::3", "192.0.2.2"]
        taken = [held.enter_context(places.place(remote)) for remote in remotes]
        assert taken == [True, True, False, True, True, False, False]
    with places.place("192.0.2.1") as room:
        assert room
