"""Wire messages: what is sent is what arrives, and what is malformed is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, DiskFull, P2PDistError, Unavailable, Unsuitable, UsageError, from_problem
from p2pdist.model.messages import (
    Advance,
    Assign,
    Complaint,
    EpochSeen,
    FromAgent,
    FromTracker,
    Hello,
    Holding,
    Holdings,
    Keep,
    Kept,
    Left,
    NotOwner,
    OwnershipChanged,
    PullRequest,
    Reject,
    Release,
    Report,
    StreamRequest,
    VerifyRequest,
    Welcome,
    decode_from_agent,
    decode_from_tracker,
    encode,
)
from p2pdist.model.ownership import Ownership, Tracker
from p2pdist.model.pieces import PieceSet
from p2pdist.model.plan import KEEPERS_MAX, ORIGIN, Plan, Source, StripePlan
from p2pdist.store.blobs.vouched_pieces import Unlisted

BLOB = digest_of(b"x")
OWNERSHIP = Ownership(3, (Tracker("a", ("http://a:7070",)), Tracker("b", (), 0.1)), {BLOB: "b"})
HOLDING = Holding(BLOB, 1 << 40, 1 << 16, (3, 4), ("", None))

FROM_AGENT: list[FromAgent] = [
    Hello(1, "h1", "10.0.0.1:7000", "z", "r"),
    HOLDING,
    Holdings((HOLDING, Holding(BLOB, 0, 1 << 16, ()))),
    Holding(BLOB, 1, 1 << 16, (0,), priority="preseed"),
    Report((Advance(BLOB, (1, 2)),), 5, 0.25),
    Report(),
    Complaint(BLOB, 1, "h2", "corrupt", 7),
    Complaint(BLOB, 0, "", "unavailable"),
    Left(BLOB),
    Kept("p1", "pulling", 1, 2),
    Kept("p1", "failed", reason="disk-full: no room"),
    Kept("p1", "done", 2, 2, package="a@sha256:" + 64 * "0"),
    EpochSeen(3),
]
FROM_TRACKER: list[FromTracker] = [
    Welcome(1, 0.5, "file:///origin"),
    Assign(
        Plan(
            BLOB, (StripePlan(0, ORIGIN), StripePlan(1, None), StripePlan(2, Source("h", "a:1"), (Source("i", "b:2"),)))
        )
    ),
    Assign(Plan(BLOB, (StripePlan(0, ORIGIN),), (Source("h", "a:1"), Source("i", "b:2")))),
    Reject(UsageError("no", remedy="do").problem(), BLOB),
    Keep("p1", f"a@{BLOB}"),
    Keep("p1", f"a@{BLOB}", "start", 1.5),
    Release("p1"),
    Welcome(1, 0.5, ownership=OWNERSHIP, tracker="a"),
    Assign(Plan(BLOB, (StripePlan(0, ORIGIN),), epoch=3)),
    OwnershipChanged(OWNERSHIP),
    NotOwner((BLOB,), OWNERSHIP),
]


@pytest.mark.parametrize("message", FROM_AGENT)
def test_messages_of_agents_come_back_as_they_were(message: FromAgent) -> None:
    assert decode_from_agent(encode(message)) == message
    assert decode_from_agent(encode(message).decode()) == message


@pytest.mark.parametrize("message", FROM_TRACKER)
def test_messages_of_trackers_come_back_as_they_were(message: FromTracker) -> None:
    assert decode_from_tracker(encode(message)) == message


def test_each_side_refuses_the_other_sides_messages() -> None:
    for message in FROM_AGENT:
        with pytest.raises(UsageError):
            decode_from_tracker(encode(message))
    for reply in FROM_TRACKER:
        with pytest.raises(UsageError):
            decode_from_agent(encode(reply))


def test_the_form_is_as_documented() -> None:
    """Written out by hand, so that a change of the protocol cannot pass unnoticed."""
    assert encode(Left(BLOB)) == b'{"type":"left","blob":"%s"}' % BLOB.encode()
    assert (
        encode(Report((Advance(BLOB, (1, 2)),)))
        == b'{"type":"report","blobs":[["%s",[1,2],null,false]],"sent_bytes":0,"busy_s":0.0}' % BLOB.encode()
    )


class FormerAdvance(msgspec.Struct, frozen=True, array_like=True):
    """What trackers knew of before `yields`."""

    blob: str
    counts: tuple[int, ...]
    origin_bytes: int | None = None


def test_an_advance_of_another_release_is_understood() -> None:
    """Earlier agents send fewer elements, later ones more; earlier trackers ignore the last one."""
    for more, yields in (("", False), (",null", False), (",7", False), (",7,true", True), (",7,true,[1]", True)):
        report = decode_from_agent(b'{"type":"report","blobs":[["%s",[1,2]%s]]}' % (BLOB.encode(), more.encode()))
        assert isinstance(report, Report)
        (advance,) = report.blobs
        assert (advance.counts, advance.yields) == ((1, 2), yields)
    sent = msgspec.json.encode(Advance(BLOB, (1, 2), 7, True))
    assert msgspec.json.decode(sent, type=FormerAdvance) == FormerAdvance(BLOB, (1, 2), 7)


@pytest.mark.parametrize("decode", [decode_from_agent, decode_from_tracker])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"type": "unheard-of"}',
        b'{"type": 1}',
        b'{"type": "hello"}',
        b'{"type": "hello", "protocol": "1", "host": "h", "address": "a"}',
        b'{"type": "hello", "protocol": 1, "host": null, "address": "a"}',
        b'{"type": "hello", "protocol": 1, "host": "\xff", "address": "a"}',
        b'{"type": "welcome", "protocol": 1, "report_interval_s": "soon"}',
        b'{"type": "assign", "plan": {"blob": "x", "stripes": [1]}}',
        b'{"type": "complaint", "blob": "x", "stripe": 0, "source": "h", "reason": "mood"}',
        b'{"type": "report", "blobs": [["x"]]}',
        b'{"type": "holding", "blob": "%s", "size": 1, "piece_size": 1, "counts": [0], "priority": "later"}'
        % BLOB.encode(),
        b'{"type": "left", "blob": "x"} trailing',
        b'{"type": "left", "blob":' + b"[" * 100_000,
        b'{"type": "left", "blob": "x", "more":' + b"[" * 100_000,
        b'{"type": "reject", "problem": {"a":' + b"[" * 100_000,
    ],
)
def test_malformed_messages_are_refused(decode: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(UsageError):
        decode(data)


@given(st.binary(max_size=100))
def test_noise_is_refused_not_a_crash(data: bytes) -> None:
    for decode in (decode_from_agent, decode_from_tracker):
        with pytest.raises(UsageError):
            decode(data)


def test_keepers_are_limited_and_need_not_be_named() -> None:
    keeper = '{"host":"h","address":"a:1"}'
    for count, fits in ((0, True), (KEEPERS_MAX, True), (KEEPERS_MAX + 1, False)):
        keepers = ",".join([keeper] * count)
        text = f'{{"type":"assign","plan":{{"blob":"{BLOB}","stripes":[],"keepers":[{keepers}]}}}}'
        if fits:
            message = decode_from_tracker(text)
            assert isinstance(message, Assign) and message.plan.keepers == (Source("h", "a:1"),) * count
        else:
            with pytest.raises(UsageError):
                decode_from_tracker(text)
    older = decode_from_tracker(f'{{"type":"assign","plan":{{"blob":"{BLOB}","stripes":[]}}}}')
    assert older == Assign(Plan(BLOB, ()))


def test_who_knows_nothing_of_priorities_is_waited_for() -> None:
    """What older agents and callers send."""
    holding = decode_from_agent(
        b'{"type":"holding","blob":"%s","size":1,"piece_size":65536,"counts":[0]}' % BLOB.encode()
    )
    assert isinstance(holding, Holding) and holding.priority == "start"
    stream = msgspec.json.decode(b'{"blob":"x","stripe":0,"stripes":1,"have":""}', type=StreamRequest)
    assert stream.priority == msgspec.json.decode(b'{"package":"x"}', type=PullRequest).priority == "start"
    for kind, body in (
        (StreamRequest, b'{"blob":"x","stripe":0,"stripes":1,"have":"","priority":"x"}'),
        (PullRequest, b'{"priority":1}'),
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(body, type=kind)


@given(st.integers(0, 100), st.data())
def test_stream_requests_carry_the_bitmap(count: int, data: st.DataObject) -> None:
    have = PieceSet(count)
    for piece in data.draw(st.lists(st.integers(0, max(0, count - 1)), max_size=count)):
        have.add(piece)
    request = StreamRequest(BLOB, 1, 4, have.to_bytes(), "h1")
    arrived = msgspec.json.decode(msgspec.json.encode(request), type=StreamRequest)
    assert arrived == request
    assert list(PieceSet(count, arrived.have)) == list(have)


def test_failures_survive_the_wire() -> None:
    """A problem document (RFC 9457) becomes the failure it was, with its numbers; an unknown one
    becomes a plain failure."""
    full = [DiskFull("/store", needed=10, free=3, short_of=what) for what in ("space", "inodes", "quota")]
    never = DiskFull("/store", needed=10, free=7, capacity=7)
    for failure in (UsageError("a", remedy="b"), Corrupt("c", blob=BLOB), Unsuitable("d"), *full, never):
        again = from_problem(failure.problem())
        assert type(again) is type(failure)
        assert (again.what, again.remedy, again.details) == (failure.what, failure.remedy, failure.details)
        assert again.exit_code == failure.exit_code
    assert type(from_problem({"type": "urn:other", "title": "t"})) is P2PDistError


@pytest.mark.parametrize(
    ("inodes", "left", "blocks", "short_of"),
    [
        (500, 0, 9, "inodes"),
        (500, 3, 9, "inodes"),  # another thread removed a file meanwhile
        (500, 3, 0, "space"),
        (500, 100, 9, "space"),
        (0, 0, 9, "space"),  # Btrfs has no fixed number
        (0, 0, 0, "space"),
    ],
)
def test_what_a_full_disk_lacks(inodes: int, left: int, blocks: int, short_of: str) -> None:
    space = SimpleNamespace(f_bavail=blocks, f_frsize=4096, f_files=inodes, f_favail=left)
    failure = DiskFull.on("/store", space, needed=400)
    assert failure.details.get("short_of", "space") == short_of and f"lacks {short_of}" in failure.what
    assert type(from_problem({})) is P2PDistError


def test_a_failure_that_only_its_process_tells_apart_arrives_as_its_kind() -> None:
    """The store's `Unlisted` is `Unavailable` to others, whose failures never become `Unlisted`."""
    for failure in (Unavailable("a"), Unlisted("b")):
        assert type(from_problem(failure.problem())) is Unavailable


@pytest.mark.parametrize("rate", [0, -1])
def test_a_verification_reads_at_some_rate(rate: int) -> None:
    """At none it divided by it, after the head of its answer had gone out."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"bytes_s": %d}' % rate, type=VerifyRequest)
