"""Ownership: every process names the same owner, and little moves when trackers come and go."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.ownership import PINS_MAX, TRACKERS_MAX, Ownership, Tracker, order, owner

DIGESTS = st.binary(max_size=8).map(digest_of)
IDS = st.lists(st.from_regex(r"\A[a-z0-9]{1,6}\Z"), unique=True, min_size=1, max_size=12)
SHARES = st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.9, 1.0])
BLOBS = [digest_of(b"%d" % number) for number in range(3000)]


def trackers(ids: list[str], shares: list[float] | None = None) -> tuple[Tracker, ...]:
    return tuple(Tracker(name, (), share) for name, share in zip(ids, shares or [1.0] * len(ids), strict=True))


@given(IDS, DIGESTS, st.randoms(), st.data())
def test_all_processes_name_the_same_owner(ids: list[str], blob: Digest, random: object, data: st.DataObject) -> None:
    """In whatever order the list has the trackers; and the owner is the first of the order."""
    listed = trackers(ids, data.draw(st.lists(SHARES, min_size=len(ids), max_size=len(ids))))
    mixed = list(listed)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    one, other = Ownership(1, listed), Ownership(1, tuple(mixed))
    assert order(one, blob) == order(other, blob)
    assert owner(one, blob) == order(one, blob)[0]
    assert sorted(tracker.id for tracker in order(one, blob)) == sorted(ids)


@given(IDS, DIGESTS, st.data())
def test_a_tracker_that_leaves_moves_its_blobs_alone(ids: list[str], blob: Digest, data: st.DataObject) -> None:
    """The others keep their order, so each of its blobs goes to the next one."""
    listed = trackers(ids, data.draw(st.lists(SHARES, min_size=len(ids), max_size=len(ids))))
    gone = data.draw(st.sampled_from(listed))
    left = tuple(tracker for tracker in listed if tracker is not gone)
    before = [tracker for tracker in order(Ownership(1, listed), blob) if tracker is not gone]
    assert not left or list(order(Ownership(2, left), blob)) == before


@given(IDS, DIGESTS, SHARES, SHARES, st.data())
def test_a_share_that_grows_takes_and_gives_nothing(
    ids: list[str], blob: Digest, share: float, more: float, data: st.DataObject
) -> None:
    """Blobs go to the tracker that grows; between any two others nothing moves."""
    name = data.draw(st.sampled_from(ids))
    others = data.draw(st.lists(SHARES, min_size=len(ids), max_size=len(ids)))
    low, high = (
        Ownership(1, trackers(ids, [size if each == name else other for each, other in zip(ids, others, strict=True)]))
        for size in sorted((share, more))
    )
    before, after = owner(low, blob).id, owner(high, blob).id
    assert after in (before, name)


def test_blobs_are_spread_by_share() -> None:
    """Each of three equal trackers owns about a third; one with a tenth of a share a tenth of what
    it would, and one without a share nothing as long as another has one."""
    counts = Counter(owner(Ownership(1, trackers(["a", "b", "c"])), blob).id for blob in BLOBS)
    assert all(0.8 < count / (len(BLOBS) / 3) < 1.2 for count in counts.values()) and len(counts) == 3
    small = Counter(owner(Ownership(1, trackers(["a", "b", "c"], [1.0, 1.0, 0.1])), blob).id for blob in BLOBS)
    assert 0.6 < small["c"] / (len(BLOBS) * 0.1 / 2.1) < 1.4
    none = Counter(owner(Ownership(1, trackers(["a", "b"], [1.0, 0.0])), blob).id for blob in BLOBS)
    assert none == {"a": len(BLOBS)}
    assert len({owner(Ownership(1, trackers(["a", "b"], [0.0, 0.0])), blob).id for blob in BLOBS}) == 2


def test_a_pin_names_the_owner_while_that_tracker_is_listed() -> None:
    blob = BLOBS[0]
    hashed = order(Ownership(1, trackers(["a", "b", "c"])), blob)
    last = hashed[-1]
    pinned = Ownership(2, trackers(["a", "b", "c"]), {blob: last.id})
    assert [tracker.id for tracker in order(pinned, blob)] == [last.id, hashed[0].id, hashed[1].id]
    assert owner(pinned, blob).id == last.id
    gone = Ownership(3, tuple(tracker for tracker in pinned.trackers if tracker.id != last.id), pinned.pins)
    assert owner(gone, blob).id == hashed[0].id
    drained = Ownership(3, tuple(Tracker(t.id, (), 0.0 if t.id == last.id else 1.0) for t in hashed), pinned.pins)
    assert owner(drained, blob).id == hashed[0].id


OWNERS = ["t1", "t1", "t0", "t1", "t0", "t3", "t1", "t1"]


def test_the_owner_is_the_same_in_every_version() -> None:
    """Agents and trackers of two versions must agree: what is written here may not change."""
    listed = Ownership(1, trackers([f"t{number}" for number in range(5)], [1.0, 1.0, 0.5, 0.1, 0.0]))
    assert [owner(listed, Digest(f"sha256:{number:064x}")).id for number in range(8)] == OWNERS


MANY_TRACKERS = ", ".join(f'{{"id": "t{number}"}}' for number in range(TRACKERS_MAX + 1))
MANY_PINS = ", ".join(f'"sha256:{number:064x}": "a"' for number in range(PINS_MAX + 1))


@pytest.mark.parametrize(
    "text",
    [
        '{"epoch": -1, "trackers": [{"id": "a"}]}',
        '{"epoch": 9007199254740993, "trackers": [{"id": "a"}]}',
        '{"epoch": 1, "trackers": []}',
        '{"epoch": 1, "trackers": [{"id": "a"}, {"id": "a"}]}',
        '{"epoch": 1, "trackers": [{"id": ""}]}',
        '{"epoch": 1, "trackers": [{"id": "a b"}]}',
        '{"epoch": 1, "trackers": [{"id": "a", "share": 1.5}]}',
        '{"epoch": 1, "trackers": [{"id": "a", "share": -0.1}]}',
        '{"epoch": 1, "trackers": [{"id": "a", "urls": ["file:///x"]}]}',
        '{"epoch": 1, "trackers": [{"id": "a", "urls": ["http://user:secret@x"]}]}',
        '{"epoch": 1, "trackers": [{"id": "a"}], "pins": {"x": "a"}}',
        f'{{"epoch": 1, "trackers": [{MANY_TRACKERS}]}}',
        f'{{"epoch": 1, "trackers": [{{"id": "a"}}], "pins": {{{MANY_PINS}}}}}',
    ],
)
def test_what_is_no_ownership_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Ownership)


def test_an_ownership_comes_back_as_it_was() -> None:
    sent = Ownership(7, (Tracker("a", ("http://10.0.0.1:7070", "https://[::1]:7070/"), 0.3),), {BLOBS[0]: "a"})
    assert msgspec.json.decode(msgspec.json.encode(sent), type=Ownership) == sent
