"""Which recordings of starts a tracker keeps, whom it invites to record, and what its database
has."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tracker.core.traces.index import (
    INVITED_MAX,
    INVITED_S,
    KEPT_S,
    RECORDINGS_MAX,
    Key,
    Recording,
    TraceIndex,
)
from tracker.state.traces import TraceRecords

APP, OTHER = Key("team/app", "train"), Key("team/other", "")


def recording(host: str, at_s: float = 0.0, data: bytes = b"data") -> Recording:
    return Recording(host, at_s, data)


def test_a_host_has_one_recording_and_the_newest_hosts_count() -> None:
    index = TraceIndex()
    assert index.recordings(APP, now=0.0) == ()
    for number in range(RECORDINGS_MAX):
        assert index.state(APP, recording(f"h{number}", number, b"%d" % number)) == []
    assert index.recordings(APP, now=9.0) == tuple(b"%d" % number for number in reversed(range(RECORDINGS_MAX)))
    assert index.state(APP, recording("h0", 10.0, b"again")) == []
    assert index.recordings(APP, now=10.0)[0] == b"again" and len(index.recordings(APP, now=10.0)) == RECORDINGS_MAX
    assert index.state(APP, recording("new", 11.0)) == [(APP, "h1")]
    assert index.state(APP, recording("new", 3.0, b"late")) == []
    assert index.recordings(APP, now=11.0)[0] == b"data"
    assert index.recordings(OTHER, now=11.0) == ()


def test_what_is_old_is_forgotten() -> None:
    index = TraceIndex()
    index.state(APP, recording("h0", 0.0))
    index.state(APP, recording("h1", 10.0))
    index.state(OTHER, recording("h0", 0.0))
    assert len(index.recordings(APP, now=KEPT_S)) == 1
    assert sorted(index.forget(now=KEPT_S), key=str) == [(APP, "h0"), (OTHER, "h0")]
    assert [(kept.key, kept.recordings) for kept in index.summaries()] == [(APP, 1)]
    assert index.bytes == 4


def test_over_the_limits_what_was_not_used_goes() -> None:
    index = TraceIndex(bytes_max=10)
    index.state(APP, recording("h0", data=bytes(5)))
    index.state(OTHER, recording("h0", data=bytes(5)))
    index.recordings(APP, now=0.0)
    assert index.state(Key("third", ""), recording("h1", data=bytes(2))) == [(OTHER, "h0")]
    index = TraceIndex(keys_max=2)
    for name in ("a", "b", "c"):
        index.state(Key(name, ""), recording("h"))
    assert [kept.key.name for kept in index.summaries()] == ["b", "c"]


def test_a_trace_is_kept_until_another_recording_comes() -> None:
    index = TraceIndex()
    index.state(APP, recording("h0"))
    of = index.recordings(APP, now=1.0)
    assert index.trace(APP) is None
    index.note_trace(APP, of, b"trace", now=1.0)
    assert index.trace(APP) == b"trace"
    index.state(APP, recording("h1", 1.0, b"other"))
    assert index.trace(APP) is None
    index.note_trace(APP, of, b"trace", now=1.0)  # it was made of what has changed meanwhile
    assert index.trace(APP) is None


def test_few_of_many_hosts_are_to_record() -> None:
    index = TraceIndex()
    assert sum(index.invite(APP, now=number / 1000) for number in range(2600)) == INVITED_MAX
    assert index.invite(OTHER, now=3.0)
    assert not index.invite(APP, now=INVITED_S - 1)
    assert index.invite(APP, now=INVITED_S + 1)
    index.forget(now=3 * INVITED_S)
    assert index.summaries() == []


def test_hosts_that_ask_push_no_recordings_out() -> None:
    """Else what is in the database would be forgotten here alone."""
    index = TraceIndex(keys_max=4)
    index.state(APP, recording("h0"))
    for number in range(20):
        assert index.invite(Key(f"n{number}", ""), now=1.0)
    assert index.recordings(APP, now=1.0) == (b"data",)
    index.forget(now=1.0)
    assert sum(index.invite(Key("n19", ""), now=1.0) for _ in range(20)) == INVITED_MAX - 1


STATED = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["h0", "h1", "h2"]),
        st.integers(0, 50),
        st.binary(min_size=1, max_size=9),
    ),
    max_size=40,
)


@given(STATED)
def test_two_keepers_that_hear_the_same_keep_the_same(stated: list[tuple[str, str, int, bytes]]) -> None:
    """What the first forgets the second forgets, too, and limits hold at every moment."""
    index, rows = TraceIndex(bytes_max=40, keys_max=2), dict[tuple[Key, str], Recording]()
    for name, host, at_s, data in stated:
        key = Key(name, "")
        given_ = recording(host, at_s, data)
        before = rows.get((key, host))
        if before is None or before.stated_at <= at_s:
            rows[key, host] = given_
        for gone in index.state(key, given_):
            del rows[gone]
        kept = index.summaries()
        assert sum(summary.bytes for summary in kept) == index.bytes
        assert sum(summary.recordings for summary in kept) == len(rows)
        assert len(kept) <= 2 and (index.bytes <= 40 or len(kept) == 1)
    again = TraceIndex(bytes_max=40, keys_max=2)
    assert again.restore((key, each) for (key, _), each in rows.items()) == []
    assert again.summaries() == index.summaries()


def test_the_database_outlives_its_tracker(tmp_path: Path) -> None:
    records = TraceRecords(str(tmp_path))
    first, second = ("app", "train", "h0", 1.0, b"\x00one"), ("app", "train", "h1", 2.0, b"two")
    records.write(first)
    records.write(second)
    records.write(("app", "train", "h1", 3.0, b"three"), [("app", "train", "h0")])
    records.close()
    again = TraceRecords(str(tmp_path))
    assert again.read() == [("app", "train", "h1", 3.0, b"three")]
    assert again.read(3.5) == []
    again.remove([("app", "train", "h1")])
    assert again.read() == []
    again.close()
