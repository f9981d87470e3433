"""Rendezvous hashing: the same order everywhere, and little moves when names come and go."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model.rendezvous import fraction, ranked

KEYS = st.binary(max_size=80)
NAMES = st.lists(st.text(min_size=1, max_size=12), unique=True, max_size=40)


@given(KEYS, NAMES, st.randoms())
def test_the_order_depends_on_key_and_names_alone(key: bytes, names: list[str], random: object) -> None:
    """Not on the order in which names come, nor on how often each does."""
    mixed = names * 2
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert ranked(key, mixed, 50) == ranked(key, names, 50)
    assert sorted(ranked(key, names, 50)) == sorted(names)


@given(KEYS, NAMES, st.integers(0, 45))
def test_the_first_few_are_a_prefix_of_all(key: bytes, names: list[str], count: int) -> None:
    assert ranked(key, names, count) == ranked(key, names, len(names))[:count]


@given(KEYS, NAMES, st.text(min_size=1, max_size=12), st.integers(1, 10))
def test_one_name_moves_one_place(key: bytes, names: list[str], name: str, count: int) -> None:
    """Who comes takes one place at most, who goes leaves one, and the others keep their order."""
    others = [each for each in names if each != name]
    without, with_it = ranked(key, others, count), ranked(key, [*others, name], count)
    assert [each for each in with_it if each != name] == without[: count - (name in with_it)]


def test_places_fall_to_all_names_alike() -> None:
    """Over many keys each of 20 names is first about as often, and a newcomer takes its part from
    all of them."""
    names = [f"h{number}" for number in range(20)]
    keys = [f"blob {number}".encode() for number in range(4000)]
    first = [ranked(key, names, 1)[0] for key in keys]
    counts = Counter(first)
    assert set(counts) == set(names)
    assert max(counts.values()) < 2 * min(counts.values())
    moved = [key for key, name in zip(keys, first, strict=True) if ranked(key, [*names, "new"], 1) != [name]]
    assert 0.5 < len(moved) / (len(keys) / 21) < 1.5


def test_key_and_name_are_kept_apart() -> None:
    assert fraction(b"ab", "c") != fraction(b"a", "bc")
    weights = {fraction(key, name) for key in (b"", b"k", b"key") for name in ("a", "b", "ab")}
    assert len(weights) == 9


@given(KEYS, st.text(max_size=20))
def test_a_fraction_is_above_zero_and_never_above_one(key: bytes, name: str) -> None:
    assert 0 < fraction(key, name) <= 1


def test_fractions_are_spread_evenly() -> None:
    found = sorted(fraction(b"key", f"h{number}") for number in range(1000))
    assert all(abs(value - (place + 0.5) / 1000) < 0.06 for place, value in enumerate(found))


def test_the_order_is_the_same_in_every_version() -> None:
    """Hosts of two versions must agree: what is written here may not change."""
    assert ranked(b"sha256:00/0", [f"h{number}" for number in range(9)], 4) == ["h7", "h5", "h1", "h0"]
