"""What all hosts together read from the origin in a second."""

from collections.abc import Iterable

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Advance, Hello, Holding, OriginShare, Report
from p2pdist.model.ownership import Ownership, Tracker
from tracker.core.events import Command, Followed, Received, Send, SessionClosed, SessionOpened, Tick
from tracker.core.fleet import Fleet

PIECE, PIECES = 65536, 64
LIMIT_BYTES_S = 100e6


class Control:
    """A fleet with a limit; `shares` is what each session was told last, and
    `ended` what it was to give back."""

    def __init__(self, limit_bytes_s: float) -> None:
        self.fleet, self.now = Fleet(-100.0, origin_bytes_s=limit_bytes_s), 0.0
        self.shares: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.told = 0

    def do(self, event: object) -> None:
        self.take(self.fleet.handle(event, now=self.now))  # type: ignore[arg-type]

    def take(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, OriginShare):
                shares = self.ended if command.message.ended else self.shares
                shares[command.session] = command.message.bytes_s
                self.told += 1

    def joins(self, session: int, blob: Digest) -> None:
        self.comes(session, blob, (None, None))
        self.go()

    def comes(self, session: int, blob: Digest, reads: tuple[str | None, str | None]) -> None:
        """A host opens its session; "" for each stripe that it reads from the origin already."""
        self.do(SessionOpened(session, Hello(PROTOCOL_VERSION, f"h{session}", f"h{session}:1")))
        self.do(Received(session, Holding(blob, PIECES * PIECE, PIECE, (0, 0), reads)))

    def go(self) -> None:
        for _ in range(8):
            self.now += 0.05
            self.do(Tick())


def test_each_lease_is_an_equal_part() -> None:
    """The first swarm has two leases, one for each stripe; so has the second, and every host gets
    less."""
    control = Control(LIMIT_BYTES_S)
    control.joins(1, digest_of(b"one"))
    assert control.shares == {1: LIMIT_BYTES_S}
    control.joins(2, digest_of(b"two"))
    assert control.shares == {1: LIMIT_BYTES_S / 2, 2: LIMIT_BYTES_S / 2}


def test_a_host_with_more_leases_reads_more() -> None:
    control = Control(LIMIT_BYTES_S)
    control.joins(1, digest_of(b"one"))
    control.comes(2, digest_of(b"two"), ("", None))
    control.comes(3, digest_of(b"two"), (None, ""))
    control.go()
    assert control.shares == {1: LIMIT_BYTES_S / 2, 2: LIMIT_BYTES_S / 4, 3: LIMIT_BYTES_S / 4}


def test_a_host_is_told_once() -> None:
    control = Control(LIMIT_BYTES_S)
    control.joins(1, digest_of(b"one"))
    assert control.told == 1
    control.joins(2, digest_of(b"one"))
    assert control.shares == {1: LIMIT_BYTES_S} and control.told == 1


def test_what_is_free_again_goes_to_the_others() -> None:
    control = Control(LIMIT_BYTES_S)
    one, two = digest_of(b"one"), digest_of(b"two")
    control.joins(1, one)
    control.joins(2, two)
    control.do(Received(1, Report((Advance(one, (PIECES // 2, PIECES // 2)),))))
    control.joins(3, two)
    assert control.shares[2] == LIMIT_BYTES_S


def test_a_new_session_is_told_again() -> None:
    control = Control(LIMIT_BYTES_S)
    blob = digest_of(b"one")
    control.joins(1, blob)
    control.do(SessionClosed(1))
    control.shares.clear()
    control.do(SessionOpened(9, Hello(PROTOCOL_VERSION, "h1", "h1:1")))
    control.do(Received(9, Holding(blob, PIECES * PIECE, PIECE, (3, 3), ("", ""))))
    control.go()
    assert control.shares == {9: LIMIT_BYTES_S}


def test_of_several_trackers_each_takes_its_share_back_with_the_last_lease() -> None:
    """A host reads at the sum of what they let it. One that reads what another tracker owns would
    do so at this one's rate besides, which others have by now."""
    control = Control(LIMIT_BYTES_S)
    ownership = Ownership(1, (Tracker("a", ("http://a:1",)),))
    control.do(Followed(ownership, "a"))
    for _ in range(30):
        control.go()  # until it grants leases
    one, two = digest_of(b"one"), digest_of(b"two")
    control.joins(1, one)
    control.joins(2, two)
    assert not control.ended
    control.do(Received(1, Report((Advance(one, (PIECES // 2, PIECES // 2)),))))
    control.go()
    assert control.ended == {1: LIMIT_BYTES_S / 2} and control.shares[2] == LIMIT_BYTES_S
    three = digest_of(b"three")
    control.do(Received(1, Holding(three, PIECES * PIECE, PIECE, (0, 0), (None, None))))
    control.go()
    assert control.shares == {1: LIMIT_BYTES_S / 2, 2: LIMIT_BYTES_S / 2} and len(control.ended) == 1


def test_a_tracker_alone_takes_no_rate_back() -> None:
    """Where it does not answer any more, hosts that read by themselves go by it."""
    control = Control(LIMIT_BYTES_S)
    one = digest_of(b"one")
    control.joins(1, one)
    control.do(Received(1, Report((Advance(one, (PIECES // 2, PIECES // 2)),))))
    control.joins(2, digest_of(b"two"))
    assert not control.ended


def test_without_a_limit_no_host_is_told_anything() -> None:
    control = Control(0.0)
    control.joins(1, digest_of(b"one"))
    assert control.shares == {}
