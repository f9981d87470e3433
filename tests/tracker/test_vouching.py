"""Vouched lists in the tracker's core: which hosts are believed, what is sent to which hosts and
how often, how rounds follow each other, and what becomes of a liar."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.messages import (
    LISTED_MAX,
    PROTOCOL_VERSION,
    Assign,
    Complaint,
    FromTracker,
    Hello,
    Holding,
    Judged,
    Left,
    Listed,
    Recall,
    Reject,
    Reread,
    Vouched,
)
from p2pdist.model.pieces import HASH_SIZE, PieceLayout, PieceList, piece_size_for
from tracker.core.events import (
    Broadcast,
    Command,
    Described,
    ListFound,
    ListMatched,
    ListWanted,
    Received,
    Send,
    SessionClosed,
    SessionOpened,
    Tick,
    WrongHashes,
)
from tracker.core.fleet import Fleet
from tracker.core.host import Host
from tracker.core.vouching import vouching
from tracker.core.vouching.liars import PENALTY_S
from tracker.core.vouching.pause import PAUSE_MIN_S, PAUSE_S_PER_HOST, pause_s
from tracker.core.vouching.statements import ARBITER_S, JUDGES_WAIT_S
from tracker.core.vouching.vouching import FAILED_S

BLOB, OTHER_BLOB = digest_of(b"blob"), digest_of(b"other")
COUNT = 8
SIZE = COUNT * 65536
RIGHT, WRONG = b"r" * HASH_SIZE, b"w" * HASH_SIZE
ALL = tuple(range(COUNT))


class Control:
    """A fleet, its hosts' sessions, and its time. `heard` has by host what it was sent."""

    def __init__(self, *hosts: str) -> None:
        self.fleet, self.now = Fleet(-100.0), 0.0
        self.numbers: dict[str, int] = {}
        self.heard: dict[str, list[FromTracker]] = {}
        self.commands: list[Command] = []
        for host in hosts:
            self.open(host)

    def open(self, host: str, source: str = "", *, certified: bool = False) -> None:
        self.numbers[host] = len(self.heard) + len(self.commands) + 1000
        self.heard[host] = []
        hello = Hello(PROTOCOL_VERSION, host, f"{host}:1")
        self.do(SessionOpened(self.numbers[host], hello, source, certified))

    def close(self, host: str) -> None:
        self.do(SessionClosed(self.numbers.pop(host)))

    def do(self, event: object) -> list[Command]:
        commands = self.fleet.handle(event, now=self.now)  # type: ignore[arg-type]
        names = {number: host for host, number in self.numbers.items()}
        for command in commands:
            match command:
                case Send(session, message) if session in names:
                    self.heard[names[session]].append(message)
                case Broadcast(sessions, message):
                    for session in sessions:
                        self.heard[names[session]].append(message)
        self.commands += commands
        return commands

    def hold(self, *hosts: str, blob: Digest = BLOB, count: int = 0, size: int = SIZE, **more: Any) -> None:
        layout = PieceLayout(size, piece_size_for(size))
        counts = (count, *[0] * (layout.stripes - 1))
        for host in hosts:
            holding = Holding(blob, size, layout.piece_size, counts, vouched=True, **more)
            self.do(Received(self.numbers[host], holding))

    def vouch(
        self,
        host: str,
        pieces: Iterable[int],
        found: bytes = RIGHT,
        *,
        round_: int = 0,
        basis: str = "read",
        blob: Digest = BLOB,
    ) -> list[Command]:
        pieces = tuple(pieces)
        message = Vouched(blob, round_, pieces, found * len(pieces), basis)  # type: ignore[arg-type]
        return self.do(Received(self.numbers[host], message))

    def judge(self, *hosts: str, matches: bool, round_: int = 0) -> None:
        for host in hosts:
            self.do(Received(self.numbers[host], Judged(BLOB, round_, matches)))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            self.do(Tick())

    def reader(self, blob: Digest = BLOB) -> str:
        """The host that has the lease of the one stripe."""
        (root,) = self.fleet.swarms[blob].edges.roots[0]
        return root

    def listed(self, host: str, round_: int = 0) -> dict[int, bytes]:
        """What a host was sent of a round."""
        found = {}
        for message in self.heard[host]:
            if isinstance(message, Listed) and message.round == round_:
                for index, piece in enumerate(message.pieces):
                    found[piece] = message.hashes[index * HASH_SIZE : (index + 1) * HASH_SIZE]
        return found

    def arbiter(self, round_: int) -> str:
        (found,) = [host for host, heard in self.heard.items() if Reread(BLOB, round_) in heard]
        return found

    def blamed(self) -> list[str]:
        return [command.host for command in self.commands if isinstance(command, WrongHashes)]


def swarm(hosts: int = 5) -> tuple[Control, str, list[str]]:
    """A swarm that has just begun: its reader and the others."""
    control = Control(*(f"h{number}" for number in range(hosts)))
    control.hold(*control.numbers)
    control.run(0.5)
    reader = control.reader()
    return control, reader, [host for host in control.numbers if host != reader]


# -- what is believed, and sent


def test_what_the_reader_states_goes_to_all() -> None:
    control, reader, others = swarm()
    commands = control.vouch(reader, [0, 1])
    assert len([command for command in commands if isinstance(command, Broadcast)]) == 1
    for host in (reader, *others):
        assert control.listed(host) == {0: RIGHT, 1: RIGHT}


def test_what_other_hosts_state_is_ignored() -> None:
    control, _, others = swarm()
    control.vouch(others[0], ALL)
    control.vouch(others[0], ALL, basis="told")
    control.vouch(others[0], ALL, basis="whole")
    control.run(1.0)
    assert control.listed(others[1]) == {}


def test_a_reader_is_believed_after_its_lease_has_moved() -> None:
    """What it stated may be on its way while the tracker gives the lease to another host; no other
    host would ever read a piece of which it says that it has it."""
    control, reader, others = swarm()
    stripe_read_elsewhere = Complaint(BLOB, 0, "", "unavailable")
    control.do(Received(control.numbers[reader], stripe_read_elsewhere))
    control.run(0.5)
    assert control.reader() != reader
    control.vouch(reader, [0])
    assert control.listed(others[0]) == {0: RIGHT}


def test_a_host_that_is_no_member_is_ignored() -> None:
    control, reader, _ = swarm()
    control.open("stranger")
    assert control.vouch("stranger", ALL) == []
    control.do(Received(control.numbers[reader], Left(BLOB)))
    assert control.vouch(reader, ALL) == []


@pytest.mark.parametrize(
    "message",
    [
        Vouched(BLOB, 0, (0, 1), RIGHT),
        Vouched(BLOB, 0, (0,), RIGHT * 2),
        Vouched(BLOB, 0, (COUNT,), RIGHT),
        Vouched(BLOB, 0, (1 << 40,), RIGHT),
    ],
)
def test_statements_that_cannot_be_are_refused(message: Vouched) -> None:
    control, reader, _ = swarm()
    control.do(Received(control.numbers[reader], message))
    assert isinstance(control.heard[reader][-1], Reject)


def test_a_blob_that_is_cut_otherwise_has_no_vouched_list() -> None:
    control = Control("h0")
    control.do(Received(control.numbers["h0"], Holding(BLOB, SIZE, 2 * 65536, (0,), vouched=True)))
    assert isinstance(control.heard["h0"][-1], Reject)


def test_a_late_host_is_sent_what_is_listed_once() -> None:
    control, reader, _ = swarm()
    control.vouch(reader, [0, 1])
    control.run(0.2)
    control.vouch(reader, [2, 3])
    control.open("late")
    control.hold("late")
    assert control.listed("late") == dict.fromkeys(range(4), RIGHT)
    messages = len([message for message in control.heard["late"] if isinstance(message, Listed)])
    control.hold("late")
    assert len([message for message in control.heard["late"] if isinstance(message, Listed)]) == messages
    control.vouch(reader, [4])
    control.run(0.2)
    assert control.listed("late")[4] == RIGHT
    control.close("late")
    control.open("late")
    control.hold("late")
    assert len(control.listed("late")) == 5, "in its new session it starts with an empty list"


def test_a_host_that_has_matched_or_left_is_sent_no_more() -> None:
    control, reader, others = swarm()
    control.vouch(reader, ALL[:-1])
    control.judge(others[0], matches=True)
    control.do(Received(control.numbers[others[1]], Left(BLOB)))
    control.hold(others[2], count=COUNT, matched=True)
    control.run(1.0)
    control.vouch(reader, ALL[-1:])
    assert [len(control.listed(host)) for host in others] == [COUNT - 1, COUNT - 1, COUNT - 1, COUNT]


def test_news_gather_in_proportion_to_the_hosts_and_the_end_comes_at_once() -> None:
    few, many = ((control := swarm(hosts)[0], control.reader()) for hosts in (3, 600))
    sent = []
    for control, reader in (few, many):
        before = len(control.commands)
        for piece in range(COUNT - 1):
            control.vouch(reader, [piece])
            control.run(0.05)
        found = [command for command in control.commands[before:] if isinstance(command, Broadcast)]
        sent.append(len(found))
        commands = control.vouch(reader, [COUNT - 1])
        assert any(isinstance(command, Broadcast) for command in commands)
        assert len(control.listed(reader)) == COUNT
    assert sent[0] >= COUNT - 2
    assert 2 <= sent[1] < COUNT - 2


def test_pauses_grow_with_the_hosts_and_with_the_list() -> None:
    assert pause_s(16, 100.0) == PAUSE_MIN_S
    assert pause_s(10_000, 100.0) == 10_000 * PAUSE_S_PER_HOST
    begun = [pause_s(10_000, passed) for passed in (0.0, 0.5, 1.0, 2.0, 4.0)]
    assert begun == sorted(begun)
    assert begun[0] < begun[-1] / 4


def test_a_long_list_is_sent_in_parts() -> None:
    size = 16 * 1024 * 1024 * (LISTED_MAX + 10)
    control = Control("h0", "h1")
    control.hold("h0", "h1", size=size)
    control.run(0.5)
    swarm = control.fleet.swarms[BLOB]
    for stripe in range(swarm.stripes):
        (root,) = swarm.edges.roots[stripe]
        pieces = range(stripe, swarm.layout.count, swarm.stripes)
        for start in range(0, len(pieces), LISTED_MAX):
            control.vouch(root, pieces[start : start + LISTED_MAX])
    control.open("late")
    control.hold("late", size=size)
    parts = [message for message in control.heard["late"] if isinstance(message, Listed)]
    assert [len(part.pieces) for part in parts] == [LISTED_MAX, 10]
    assert len(control.listed("h1")) == LISTED_MAX + 10


def test_lists_take_so_much_memory_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    control, reader, _ = swarm()
    monkeypatch.setattr(vouching, "LISTS_BYTES_MAX", COUNT * 64 * 2)
    control.vouch(reader, ALL)
    assert len(control.listed(reader)) == COUNT
    control.hold(reader, blob=OTHER_BLOB)
    control.run(0.5)
    control.vouch(reader, ALL, blob=OTHER_BLOB)
    (reject,) = [message for message in control.heard[reader] if isinstance(message, Reject)]
    assert reject.blob == OTHER_BLOB
    for host in list(control.numbers):
        control.do(Received(control.numbers[host], Left(BLOB)))
    control.run(10.0)
    control.vouch(reader, ALL, blob=OTHER_BLOB)
    assert control.heard[reader][-1] == Listed(OTHER_BLOB, 0, ALL, RIGHT * COUNT)


def test_made_up_blobs_leave_room_for_lists_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any host can speak of blobs of many pieces that no upstream has."""
    control, reader, others = swarm()
    monkeypatch.setattr(vouching, "LISTS_BYTES_MAX", COUNT * 64 * 2)
    control.vouch(reader, ALL)
    control.do(Described(((OTHER_BLOB, PieceLayout(SIZE, 65536)),)))
    control.hold(others[0], blob=OTHER_BLOB)
    control.run(0.5)
    control.vouch(others[0], ALL, blob=OTHER_BLOB)
    assert control.heard[others[0]][-1] == Listed(OTHER_BLOB, 0, ALL, RIGHT * COUNT)


# -- rounds


def lied(hosts: int = 5) -> tuple[Control, str, list[str]]:
    """The reader has stated a wrong hash for piece 3, and two hosts have found out."""
    control, reader, others = swarm(hosts)
    control.vouch(reader, [piece for piece in ALL if piece != 3])
    control.vouch(reader, [3], WRONG)
    control.hold(*control.numbers, count=COUNT)
    control.judge(*others[:2], matches=False)
    return control, reader, others


def test_a_mismatch_makes_another_host_read_again() -> None:
    control, reader, others = lied()
    arbiter = control.arbiter(1)
    assert arbiter != reader
    for host in (reader, *others):
        assert Listed(BLOB, 1, (), b"") in control.heard[host], "all hear that a round has begun"
    control.vouch(arbiter, ALL, round_=1)
    assert control.listed(others[0], 1) == dict.fromkeys(ALL, RIGHT)


def test_the_liar_is_named_and_reads_no_more() -> None:
    """Its lease goes to another host at once, and no blob of this kind is read by it for an
    hour."""
    control, reader, others = lied()
    arbiter = control.arbiter(1)
    control.vouch(arbiter, ALL, round_=1)
    control.hold(reader, blob=OTHER_BLOB)
    control.hold(*others, blob=OTHER_BLOB)
    control.run(0.5)
    leased = control.reader(OTHER_BLOB) == reader
    matched = [host for host in others if host != arbiter][:2]
    control.judge(*matched, matches=True, round_=1)
    assert control.blamed() == [reader]
    (found,) = [command for command in control.commands if isinstance(command, ListMatched)]
    assert found.pieces == PieceList(PieceLayout(SIZE, 65536), RIGHT * COUNT)
    control.run(0.3)
    assert control.reader(OTHER_BLOB) != reader
    if leased:
        assert any(
            isinstance(message, Assign) and message.plan.blob == OTHER_BLOB
            for message in control.heard[control.reader(OTHER_BLOB)]
        )
    assert control.vouch(reader, ALL, blob=OTHER_BLOB) == []
    blob = digest_of(b"third")
    control.hold(reader, blob=blob)
    control.hold(*others, blob=blob)
    control.run(0.5)
    assert control.reader(blob) != reader
    control.now += PENALTY_S
    control.run(10.0)
    assert control.fleet.vouching.liars.until == {}


def test_a_liar_alone_with_a_host_that_is_done_has_it_not_blamed() -> None:
    """The host follows no list any more, so the liar is arbiter and the only judge."""
    control = Control("honest")
    control.hold("honest")
    control.run(0.5)
    control.vouch("honest", ALL)
    control.judge("honest", matches=True)
    control.hold("honest", count=COUNT, matched=True)
    control.open("liar")
    control.hold("liar")
    control.judge("liar", matches=False)
    assert control.arbiter(1) == "liar"
    control.vouch("liar", ALL, WRONG, round_=1)
    control.judge("liar", matches=True, round_=1)
    control.run(1.0)
    assert control.blamed() == []


def test_a_liar_that_is_alone_may_read() -> None:
    """No other host could; the digest tells what comes of it."""
    control, reader, others = lied()
    arbiter = control.arbiter(1)
    control.vouch(arbiter, ALL, round_=1)
    control.judge(*[host for host in others if host != arbiter], matches=True, round_=1)
    assert control.blamed() == [reader]
    control.hold(reader, blob=OTHER_BLOB)
    control.run(0.5)
    assert control.reader(OTHER_BLOB) == reader


def test_two_readers_that_differ_begin_a_round_at_once() -> None:
    """As where the first one lies, and sends bytes that no child can store: none could judge."""
    control, reader, others = swarm()
    control.vouch(reader, [0], WRONG)
    control.do(Received(control.numbers[others[0]], Complaint(BLOB, 0, reader, "corrupt", 0)))
    control.do(Received(control.numbers[reader], Complaint(BLOB, 0, "", "unavailable")))
    control.run(3.0)
    second = control.reader()
    assert second != reader
    control.vouch(second, [0])
    arbiter = control.arbiter(1)
    assert arbiter not in (reader, second)
    control.vouch(arbiter, ALL, round_=1)
    control.judge(*[host for host in others if host != arbiter][:2], matches=True, round_=1)
    assert control.blamed() == [reader]


def test_complaints_of_wrong_bytes_are_withdrawn_with_the_list() -> None:
    """A host that sent the right bytes was complained of by two others, since a liar had stated
    another hash."""
    control, reader, others = swarm()
    honest, plaintiffs = others[0], others[1:3]
    for plaintiff in plaintiffs:
        member = control.fleet.swarms[BLOB].members[plaintiff]
        control.fleet.swarms[BLOB].edges.notify(plaintiff, 0)
        control.run(0.2)
        member.told = (tuple(name for names in member.told for name in names),)
    control.fleet.reputation.penalise(control.fleet.hosts[honest], "v1", "corrupt", now=control.now)
    control.fleet.vouching.accused(control.fleet.swarms[BLOB], honest, "v1")
    control.fleet.reputation.penalise(control.fleet.hosts[honest], "v2", "corrupt", now=control.now)
    control.fleet.vouching.accused(control.fleet.swarms[BLOB], honest, "v2")
    assert control.fleet.hosts[honest].banned
    assert control.fleet.swarms[BLOB].members[honest].slots == 0
    control.vouch(reader, ALL, WRONG)
    control.judge(*others[2:4], matches=False)
    assert not control.fleet.hosts[honest].banned
    assert control.fleet.swarms[BLOB].members[honest].slots > 0


@pytest.mark.parametrize("leaves", ["silent", "gone"])
def test_an_arbiter_that_is_gone_is_replaced(leaves: str) -> None:
    control, reader, _ = lied()
    first = control.arbiter(1)
    if leaves == "gone":
        control.close(first)
        control.run(0.2)
    else:
        control.run(ARBITER_S + 0.2)
    second = control.arbiter(2)
    assert second not in (first, reader)
    control.run(ARBITER_S / 2)
    control.vouch(second, ALL[:4], round_=2)
    control.run(ARBITER_S / 2 + 1)
    assert control.fleet.vouching.liars.until == {}
    assert all(Reread(BLOB, 3) not in heard for heard in control.heard.values()), "it goes on"


def test_an_arbiter_that_comes_back_is_told_again() -> None:
    control, _, _ = lied()
    arbiter = control.arbiter(1)
    control.close(arbiter)
    control.open(arbiter)
    control.hold(arbiter, count=COUNT)
    assert Reread(BLOB, 1) in control.heard[arbiter]


def test_an_arbiter_that_has_become_whole_states_the_rest() -> None:
    control, reader, others = lied()
    arbiter = control.arbiter(1)
    control.vouch(arbiter, ALL[:5], round_=1)
    control.judge(arbiter, matches=True, round_=1)
    assert control.heard[arbiter][-1] == Recall(BLOB)
    control.vouch(arbiter, ALL, round_=1, basis="whole")
    control.judge(*[host for host in others if host != arbiter][:2], matches=True, round_=1)
    assert control.blamed() == [reader]


class Lookups(dict[str, Host]):
    """Hosts by name, and how often one was looked up."""

    count = 0

    def get(self, name: str, default: Host | None = None) -> Host | None:  # type: ignore[override]
        self.count += 1
        return super().get(name, default)


def test_judgements_do_not_each_look_at_all_hosts() -> None:
    """Ten thousand hosts judge at one moment."""
    count = 100
    control, reader, others = swarm(count)
    control.vouch(reader, ALL)
    case = control.fleet.vouching._cases[BLOB]
    hosts = Lookups(control.fleet.hosts)
    for host in others:
        case.statements.judge(host, host, False, now=control.now)
        assert not case.all_judged(hosts)
    assert hosts.count < 10 * count
    case.statements.judge(reader, reader, False, now=control.now)
    assert case.all_judged(hosts)


def test_the_next_arbiter_had_no_part_in_what_failed() -> None:
    control, reader, others = lied()
    first = control.arbiter(1)
    control.vouch(first, ALL, WRONG, round_=1)
    control.judge(*[host for host in others if host != first][:2], matches=False, round_=1)
    second = control.arbiter(2)
    assert second not in (first, reader)
    control.vouch(second, ALL, round_=2)
    control.judge(*[host for host in others if host not in (first, second)], matches=True, round_=2)
    assert sorted(control.blamed()) == sorted([first, reader])


def test_an_arbiter_that_dawdles_is_replaced() -> None:
    """It states something now and then, which keeps it from being taken for gone."""
    control, reader, _ = swarm()
    for piece in ALL[:-1]:
        control.vouch(reader, [piece])
        control.run(0.5)
    control.vouch(reader, ALL[-1:], WRONG)
    control.judge(*(host for host in control.numbers if host != reader), matches=False)
    control.run(JUDGES_WAIT_S + 0.1)
    first, begun_at = control.arbiter(1), control.now
    for piece in ALL:
        if control.fleet.vouching._cases[BLOB].statements.round.number == 1:
            control.vouch(first, [piece], round_=1)
            control.run(ARBITER_S - 1)
    assert control.arbiter(2) not in (first, reader)
    assert control.now - begun_at < COUNT * ARBITER_S / 2


def test_an_arbiter_that_reads_as_slowly_as_the_first_readers_did_goes_on() -> None:
    control, reader, _ = swarm()
    for piece in ALL:
        control.vouch(reader, [piece], WRONG if piece == 3 else RIGHT)
        control.run(ARBITER_S - 1)
    control.judge(*(host for host in control.numbers if host != reader), matches=False)
    control.run(JUDGES_WAIT_S + 0.1)
    arbiter = control.arbiter(1)
    for piece in ALL[:-1]:
        control.vouch(arbiter, [piece], round_=1)
        control.run(ARBITER_S - 1)
    assert all(Reread(BLOB, 2) not in heard for heard in control.heard.values())


def test_strangers_that_claim_everything_are_not_the_first_arbiters() -> None:
    """They come late, and from one address."""
    control, reader, others = swarm()
    strangers = [f"stranger{number}" for number in range(8)]
    for stranger in strangers:
        control.open(stranger, "192.0.2.1")
        control.hold(stranger, count=COUNT)
    control.vouch(reader, ALL, WRONG)
    control.judge(*others[:2], matches=False)
    assert control.arbiter(1) in others


def test_strangers_of_one_address_are_arbiters_once_while_others_are_there() -> None:
    control = Control()
    strangers = [f"stranger{number}" for number in range(8)]
    for stranger in strangers:
        control.open(stranger, "192.0.2.1")
        control.hold(stranger, count=1)
    for honest in ("h1", "h2", "h3"):
        control.open(honest)
        control.hold(honest)
    control.run(0.5)
    reader = control.reader()
    control.vouch(reader, ALL, WRONG)
    control.judge("h1", "h2", "h3", matches=False)
    control.run(JUDGES_WAIT_S + 0.1)
    first = control.arbiter(1)
    if first in strangers:
        control.vouch(first, ALL, WRONG, round_=1)
        control.judge("h1", "h2", "h3", matches=False, round_=1)
        control.run(JUDGES_WAIT_S + 0.1)
        first = control.arbiter(2)
    assert first.startswith("h")


@pytest.mark.parametrize("certified", [False, True])
def test_hosts_behind_one_address_have_one_voice_unless_certificates_name_them(certified: bool) -> None:
    control = Control()
    for number in range(5):
        control.open(f"h{number}", "192.0.2.1", certified=certified)
        control.hold(f"h{number}")
    control.run(0.5)
    reader = control.reader()
    others = [host for host in control.numbers if host != reader]
    control.open("elsewhere", "198.51.100.1")
    control.hold("elsewhere")  # and has not judged
    control.vouch(reader, ALL)
    control.judge(*others[:2], matches=True)
    held = any(isinstance(command, ListMatched) for command in control.commands)
    assert held == certified


def test_judgements_of_an_earlier_round_count_no_more() -> None:
    control, _, others = lied()
    control.vouch(control.arbiter(1), ALL, round_=1)
    control.judge(*others, matches=False, round_=0)
    assert control.fleet.vouching.liars.until == {}
    assert all(Reread(BLOB, 2) not in heard for heard in control.heard.values())


def test_where_upstream_is_wrong_all_are_told_and_may_try_again_later() -> None:
    control, reader, others = swarm()
    control.vouch(reader, ALL, WRONG)
    control.judge(*others[:2], matches=False)
    control.vouch(control.arbiter(1), ALL, WRONG, round_=1)
    control.judge(*others, matches=False, round_=1)
    control.run(JUDGES_WAIT_S + 0.2)
    for host in (reader, *others):
        rejects = [message for message in control.heard[host] if isinstance(message, Reject)]
        assert [reject.blob for reject in rejects] == [BLOB]
        assert "upstream" in str(rejects[0].problem)
    assert control.blamed() == []
    control.open("late")
    control.hold("late")
    assert isinstance(control.heard["late"][-1], Reject)
    control.run(FAILED_S + 6.0)
    control.open("later")
    control.hold("later")
    control.run(0.3)
    assert not any(isinstance(message, Reject) for message in control.heard["later"])


def test_what_upstream_lacks_is_not_asked_to_be_pushed() -> None:
    control, reader, _ = swarm()
    control.do(Received(control.numbers[reader], Complaint(BLOB, 0, "", "missing")))
    control.run(0.5)
    control.do(Received(control.numbers[control.reader()], Complaint(BLOB, 0, "", "missing")))
    rejects = [message for message in control.heard[reader] if isinstance(message, Reject)]
    assert len(rejects) == 1
    assert "upstream" in str(rejects[0].problem)
    assert "ush" not in str(rejects[0].problem)


# -- a tracker that has just started


def restarted(held: dict[str, int]) -> Control:
    """A tracker to which these hosts say that they hold so many pieces."""
    control = Control(*held)
    for host, count in held.items():
        control.hold(host, count=count)
    return control


def test_hosts_say_again_what_they_read() -> None:
    control = restarted({"a": 5, "b": 4})
    control.vouch("a", [0, 2, 4])
    assert control.listed("b") == {0: RIGHT, 2: RIGHT, 4: RIGHT}


def test_a_reader_is_believed_though_others_named_it_first() -> None:
    """A host that receives from it may speak first after a tracker's start. Once its hashes were
    ignored then, it was not asked, and the others waited for the list until they asked each
    other."""
    control = Control("reader", "below")
    control.hold("below", count=4, parents=("reader",))
    assert "reader" in control.fleet.swarms[BLOB].members
    control.now += 0.05
    control.hold("reader", count=6)
    control.vouch("reader", range(6))
    assert len(control.listed("below")) == 6
    control.run(1.0)
    assert Recall(BLOB) in control.heard["reader"], "for what it did not read itself"


def test_gaps_are_asked_for_one_host_after_the_other() -> None:
    """The host with the most pieces first; what it was told names no host."""
    control = restarted({"a": 5, "b": 7, "c": 0})
    control.vouch("a", [0, 2])
    assert not any(Recall(BLOB) in heard for heard in control.heard.values()), "readers speak first"
    control.run(0.5)
    assert [host for host, heard in control.heard.items() if Recall(BLOB) in heard] == ["b"]
    control.vouch("b", ALL[:7], basis="told")
    assert len(control.listed("c")) == 7, "with the pieces that were stated before"
    control.run(1.0)
    assert [host for host, heard in control.heard.items() if Recall(BLOB) in heard] == ["a", "b"]
    control.vouch("a", [7], basis="told")
    control.run(10.0)
    assert [host for host, heard in control.heard.items() if Recall(BLOB) in heard] == ["a", "b"]


def test_told_hashes_that_were_wrong_are_no_fault_of_the_teller() -> None:
    control = restarted({"a": 5, "b": 7, "c": 0, "d": 0, "e": 0})
    control.run(0.5)
    control.vouch("b", ALL, WRONG, basis="told")
    control.judge("c", "d", matches=False)
    arbiter = control.arbiter(1)
    control.vouch(arbiter, ALL, round_=1)
    control.judge(*[host for host in "abcde" if host != arbiter], matches=True, round_=1)
    assert control.blamed() == []


def test_a_host_that_has_everything_gives_the_list_and_answers_for_it() -> None:
    """As when a blob was pulled long ago, and the tracker keeps nothing."""
    control = Control("seed", "a", "b", "c")
    control.hold("seed", count=COUNT, matched=True)
    control.hold("a", "b", "c")
    control.run(0.5)
    assert Recall(BLOB) in control.heard["seed"]
    control.vouch("seed", ALL, WRONG, basis="whole")
    assert len(control.listed("a")) == COUNT
    control.judge("a", "b", matches=False)
    arbiter = control.arbiter(1)
    control.vouch(arbiter, ALL, round_=1)
    control.judge(*[host for host in "abc" if host != arbiter], matches=True, round_=1)
    assert control.blamed() == ["seed"]


def test_a_seed_alone_is_asked_for_nothing() -> None:
    control = Control("seed")
    control.hold("seed", count=COUNT, matched=True)
    control.run(10.0)
    assert Recall(BLOB) not in control.heard["seed"]
    control.open("late")
    control.hold("late")
    control.run(6.0)
    assert Recall(BLOB) in control.heard["seed"]


def test_a_list_that_was_kept_is_asked_for_and_given() -> None:
    control = Control("a")
    control.hold("a")
    assert ListWanted(BLOB) in control.commands
    pieces = PieceList(PieceLayout(SIZE, 65536), RIGHT * COUNT)
    control.do(ListFound(BLOB, pieces))
    assert len(control.listed("a")) == COUNT
    control.open("b")
    control.hold("b")
    assert len(control.listed("b")) == COUNT
    assert [command for command in control.commands if isinstance(command, ListWanted)] == [ListWanted(BLOB)]


@pytest.mark.parametrize(("voters", "rereads"), [((), True), (("x",), True), (("x", "y"), False)])
def test_a_kept_list_counts_for_as_much_as_before(voters: tuple[str, ...], rereads: bool) -> None:
    """One host that says otherwise has all read again only where few had confirmed the list."""
    control, reader, _ = swarm()
    control.do(ListFound(BLOB, PieceList(PieceLayout(SIZE, 65536), RIGHT * COUNT), voters))
    control.vouch(reader, [1], WRONG)
    heard = [message for host in control.heard.values() for message in host]
    assert (Reread(BLOB, 1) in heard) == rereads


def test_voters_that_come_later_are_kept_with_the_list() -> None:
    control = Control(*"ab")
    control.hold(*"ab")
    control.run(0.5)
    reader = control.reader()
    control.vouch(reader, ALL)
    other = "a" if reader == "b" else "b"
    control.judge(other, reader, matches=True)
    control.open("c")
    control.hold("c")
    control.judge("c", matches=True)
    found = [command.voters for command in control.commands if isinstance(command, ListMatched)]
    assert found == [(other,), (other, "c")]


def test_a_kept_list_comes_too_late_where_hashes_were_stated() -> None:
    control, reader, others = swarm()
    control.vouch(reader, [0])
    control.do(ListFound(BLOB, PieceList(PieceLayout(SIZE, 65536), WRONG * COUNT)))
    control.run(0.5)
    assert control.listed(others[0]) == {0: RIGHT}


def test_a_kept_list_that_is_wrong_after_all_is_replaced() -> None:
    control = Control(*"abcd")
    control.hold(*"abcd")
    control.do(ListFound(BLOB, PieceList(PieceLayout(SIZE, 65536), WRONG * COUNT)))
    control.judge("a", "b", matches=False)
    arbiter = control.arbiter(1)
    control.vouch(arbiter, ALL, round_=1)
    control.judge(*[host for host in "abcd" if host != arbiter], matches=True, round_=1)
    (found,) = [command for command in control.commands if isinstance(command, ListMatched)]
    assert found.pieces.hashes == RIGHT * COUNT
    assert control.blamed() == []


def test_a_kept_list_that_no_bytes_match_is_replaced() -> None:
    """No host can store a piece by it, so none judges it: what the reader finds counts."""
    control, reader, others = swarm()
    control.do(ListFound(BLOB, PieceList(PieceLayout(SIZE, 65536), WRONG * COUNT)))
    control.vouch(others[0], ALL)
    assert all(Reread(BLOB, 1) not in heard for heard in control.heard.values()), "it reads nothing"
    control.vouch(reader, [0], WRONG)
    assert all(Reread(BLOB, 1) not in heard for heard in control.heard.values()), "as the list has it"
    control.vouch(reader, [1])
    arbiter = control.arbiter(1)
    control.vouch(arbiter, ALL, round_=1)
    control.judge(*[host for host in others if host != arbiter][:2], matches=True, round_=1)
    (found,) = [command for command in control.commands if isinstance(command, ListMatched)]
    assert found.pieces.hashes == RIGHT * COUNT
    assert control.blamed() == []


def test_a_list_that_a_liar_held_alone_is_replaced() -> None:
    """It was first and alone, so its own word was enough; it is blamed in the end."""
    control = Control("liar")
    control.hold("liar")
    control.run(0.5)
    control.vouch("liar", ALL, WRONG)
    control.judge("liar", matches=True)
    for host in "abcd":
        control.open(host)
    control.hold(*"abcd")
    control.fleet.swarms[BLOB].edges.detach(0, "liar")
    control.fleet.swarms[BLOB].origin.bar("liar")
    control.hold(*"abcd")
    control.close("liar")
    control.run(30.0)
    control.vouch(control.reader(), [0])
    arbiter = control.arbiter(1)
    control.vouch(arbiter, ALL, round_=1)
    control.judge(*[host for host in "abcd" if host != arbiter][:2], matches=True, round_=1)
    assert control.blamed() == ["liar"]


def test_a_list_that_several_hosts_matched_is_read_again_for_no_reader() -> None:
    control, reader, others = swarm()
    control.do(ListFound(BLOB, PieceList(PieceLayout(SIZE, 65536), RIGHT * COUNT)))
    control.judge(*others[:2], matches=True)
    control.vouch(reader, ALL, WRONG)
    assert all(Reread(BLOB, 1) not in heard for heard in control.heard.values())


def test_a_reader_contradicts_a_held_list_once() -> None:
    """It could have all read again without an end."""
    control, reader, others = swarm()
    control.do(ListFound(BLOB, PieceList(PieceLayout(SIZE, 65536), RIGHT * COUNT)))
    control.vouch(reader, ALL, WRONG)
    arbiter = control.arbiter(1)
    control.vouch(arbiter, ALL, round_=1)
    control.judge(*[host for host in others if host != arbiter][:2], matches=True, round_=1)
    control.fleet.vouching.liars.until.clear()
    control.fleet.vouching._cases[BLOB].statements.round.matching.clear()
    control.vouch(reader, ALL, WRONG, round_=1)
    assert all(Reread(BLOB, 2) not in heard for heard in control.heard.values())


def test_a_kept_list_comes_too_late_for_a_later_round() -> None:
    """Its hosts have begun that round, and would not hear of an earlier one."""
    control, reader, others = swarm()
    control.vouch(reader, ALL, WRONG)
    control.judge(*others[:2], matches=False)
    control.do(ListFound(BLOB, PieceList(PieceLayout(SIZE, 65536), RIGHT * COUNT)))
    control.vouch(control.arbiter(1), ALL, round_=1)
    assert control.listed(others[0], 1) == dict.fromkeys(ALL, RIGHT)


def test_an_arbiter_that_repeats_itself_is_replaced() -> None:
    control, _, _ = lied()
    first = control.arbiter(1)
    for _ in range(5):
        control.vouch(first, [0], round_=1)
        control.run(ARBITER_S / 4)
    assert control.arbiter(2) != first


def test_a_swarm_without_a_vouched_list_costs_nothing() -> None:
    control = Control("a", "b")
    for host in "ab":
        control.do(Received(control.numbers[host], Holding(BLOB, SIZE, 65536, (0,))))
    control.run(1.0)
    assert control.fleet.vouching._cases == {}
    assert control.vouch("a", ALL) == []


def test_a_blob_that_comes_again_has_a_list_of_its_own() -> None:
    """Its swarm is another one, even where all hosts of the first left a moment ago."""
    control, reader, others = swarm()
    control.vouch(reader, ALL)
    for host in (reader, *others):
        control.do(Received(control.numbers[host], Left(BLOB)))
    control.hold(*others)
    control.run(0.5)
    before = len(control.heard[others[1]])
    control.vouch(control.reader(), [0], WRONG)
    assert Listed(BLOB, 0, (0,), WRONG) in control.heard[others[1]][before:]


def test_a_swarm_that_gets_another_key_keeps_its_list() -> None:
    """A manifest says how the blob is cut, after a host had said otherwise."""
    control = Control("liar", "a", "b")
    control.do(Received(control.numbers["liar"], Holding(BLOB, SIZE + 1, 65536, (0,), vouched=True)))
    control.hold("a", "b")
    control.run(0.5)
    swarm = next(each for each in control.fleet.swarms.values() if each.layout.size == SIZE)
    (root,) = swarm.edges.roots[0]
    control.vouch(root, [0])
    control.do(Described(((BLOB, PieceLayout(SIZE, 65536)),)))
    assert control.fleet.swarms[BLOB] is swarm
    control.run(0.2)
    control.vouch(root, [1])
    assert control.listed("a") == control.listed("b") == {0: RIGHT, 1: RIGHT}
