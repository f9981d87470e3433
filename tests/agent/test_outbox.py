"""Messages gathered: fewer of them, and a tracker that hears them knows the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pdist.agent.tracker.connection import gathered
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.messages import (
    BLOBS_PER_MESSAGE_MAX,
    Advance,
    Complaint,
    FromAgent,
    Holding,
    Holdings,
    Left,
    Report,
)

BLOBS = [digest_of(bytes([number])) for number in range(4)]
PIECE = 64 << 10

blobs = st.sampled_from(BLOBS)
counts = st.integers(0, 8).map(lambda count: (count,))
holdings = st.builds(lambda blob, have: holding(blob, *have), blobs, counts)
messages: st.SearchStrategy[FromAgent] = st.one_of(
    holdings,
    st.builds(
        lambda found, sent: Report(tuple(Advance(*each) for each in found.items()), sent, sent / 8),
        st.dictionaries(blobs, counts, max_size=3),
        st.integers(0, 100),
    ),
    st.builds(Left, blobs),
    st.builds(Complaint, blobs, st.just(0), st.just("h9"), st.just("stalled")),
    st.builds(lambda found: Holdings(tuple(found)), st.lists(holdings, min_size=1, max_size=3)),
)


def holding(blob: Digest, count: int = 0) -> Holding:
    return Holding(blob, 8 * PIECE, PIECE, (count,))


def understood(said: list[FromAgent]) -> tuple[object, ...]:
    """What a tracker knows after these messages: counts by blob, what was complained of and when,
    bytes sent."""
    known: dict[Digest, tuple[int, ...]] = {}
    complaints, sent = [], 0
    for message in said:
        match message:
            case Holding(blob):
                known[blob] = message.counts
            case Holdings(found):
                known |= {each.blob: each.counts for each in found}
            case Report(advances):
                known |= {each.blob: each.counts for each in advances if each.blob in known}
                sent += message.sent_bytes
            case Left(blob):
                known.pop(blob, None)
            case Complaint():
                complaints.append((message, dict(known)))
    return known, complaints, sent


@given(st.lists(messages, max_size=30))
def test_the_same_is_understood(said: list[FromAgent]) -> None:
    fewer = gathered(said)
    assert understood(fewer) == understood(said)
    assert len(fewer) <= len(said)
    assert sum(each.busy_s for each in fewer if isinstance(each, Report)) == sum(
        each.busy_s for each in said if isinstance(each, Report)
    )


def test_joins_of_a_moment_are_one_message_and_their_ends_another() -> None:
    said: list[FromAgent] = []
    for blob in BLOBS:
        said += [holding(blob), Report((Advance(blob, (8,)),), 10, 0.5)]
    joins, ends = gathered(said)
    assert joins == Holdings(tuple(holding(blob) for blob in BLOBS))
    assert ends == Report(tuple(Advance(blob, (8,)) for blob in BLOBS), 40, 2.0)


def test_one_message_stays_as_it_is() -> None:
    for message in (holding(BLOBS[0]), Report((), 5, 0.1), Left(BLOBS[0])):
        assert gathered([message]) == [message]
    assert gathered([]) == []


def test_no_message_names_too_many_blobs() -> None:
    many = [digest_of(b"%d" % number) for number in range(2 * BLOBS_PER_MESSAGE_MAX + 1)]
    assert [len(each.blobs) for each in gathered(map(holding, many[:-1])) if isinstance(each, Holdings)] == [
        BLOBS_PER_MESSAGE_MAX
    ] * 2
    reports = gathered(Report((Advance(blob, (1,)),)) for blob in many)
    assert [len(each.blobs) for each in reports if isinstance(each, Report)] == [BLOBS_PER_MESSAGE_MAX] * 2 + [1]


def test_that_a_pull_yielded_is_not_lost_behind_a_later_report() -> None:
    said = [
        Report((Advance(BLOBS[0], (count,), None, yields),)) for count, yields in ((1, False), (2, True), (3, False))
    ]
    assert gathered(said) == [Report((Advance(BLOBS[0], (3,), None, True),))]
    assert gathered([said[0], said[2]]) == [said[2]]


def test_a_blob_joined_anew_is_joined_after_what_was_reported_of_it() -> None:
    """The report counts for the former membership: behind the join it would undo what that said."""
    said = [holding(BLOBS[0], 1), Report((Advance(BLOBS[0], (5,)),)), holding(BLOBS[0])]
    assert understood(gathered(said)) == understood(said) == ({BLOBS[0]: (0,)}, [], 0)
