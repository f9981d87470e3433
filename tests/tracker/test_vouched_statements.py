"""What follows from statements and judgements: which list is held, which does not hold, when
upstream itself is wrong, and which hosts are to blame."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdist.model.pieces import HASH_SIZE, PieceLayout, PieceList
from tracker.core.vouching.statements import DISPUTE_S, JUDGES_WAIT_S, ROUNDS_MAX, TRUST, Decision, Statements

COUNT = 4
LAYOUT = PieceLayout(COUNT * 65536, 65536)
RIGHT, WRONG, THIRD = b"r" * HASH_SIZE, b"w" * HASH_SIZE, b"t" * HASH_SIZE


class Book:
    """Statements, and the hosts that could judge it."""

    def __init__(self, *judges: str) -> None:
        self.statements, self.judges, self.now = Statements(LAYOUT), dict.fromkeys(judges), 0.0

    def state(self, host: str, *hashes: bytes, first: int = 0, named: bool = True) -> bool:
        conflicts = [
            self.statements.state(host, first + i, each, named=named, now=self.now) for i, each in enumerate(hashes)
        ]
        return True in conflicts

    def judge(self, *hosts: str, matches: bool) -> Decision:
        for host in hosts:
            self.statements.judge(host, host, matches, now=self.now)
        return self.decide()

    def decide(self) -> Decision:
        here = self.statements.round
        votes = here.matching | here.own | here.against
        return self.statements.decide(lambda: all(each in votes for each in self.judges), now=self.now)

    def round(self, arbiter: str, *hashes: bytes) -> None:
        self.statements.begin(arbiter, failed=True, now=self.now)
        assert not self.state(arbiter, *hashes)


def stated(*hashes: bytes, judges: Sequence[str] = ("a", "b", "c", "d", "e")) -> Book:
    """Hosts a and b have stated a hash for each piece."""
    book = Book(*judges)
    for piece, each in enumerate(hashes):
        assert not book.state("ab"[piece % 2], each, first=piece)
    return book


# -- round 0


def test_the_first_statement_counts() -> None:
    book = Book("a", "b")
    assert not book.state("a", RIGHT)
    assert not book.state("b", RIGHT)
    assert book.state("b", WRONG), "two readers differ"
    assert book.statements.round.hashes is not None
    assert book.statements.round.hashes.hash_of(0) == RIGHT


def test_a_list_with_gaps_is_not_decided() -> None:
    book = stated(RIGHT, RIGHT, RIGHT)
    assert book.judge("c", "d", "e", matches=True) == "wait"
    assert book.judge("c", "d", "e", matches=False) == "wait"


def test_several_hosts_hold_a_list_and_one_does_not() -> None:
    book = stated(*[RIGHT] * COUNT)
    assert book.judge("c", matches=True) == "wait", f"{TRUST} are needed, as one may lie"
    assert book.judge("d", matches=True) == "held"


def test_what_vouchers_say_of_their_own_list_weighs_little() -> None:
    book = stated(*[WRONG] * COUNT)
    assert book.judge("a", "b", matches=True) == "wait"
    assert book.judge("c", matches=False) == "wait"
    book.now += JUDGES_WAIT_S
    assert book.decide() == "next"


def test_where_all_have_judged_one_word_is_enough() -> None:
    assert stated(*[RIGHT] * COUNT, judges=["a", "b"]).judge("a", "b", matches=True) == "held"
    assert stated(*[RIGHT] * COUNT, judges=["a", "b", "c"]).judge("a", "b", "c", matches=True) == "held"


def test_two_hosts_that_find_a_mismatch_begin_the_next_round() -> None:
    book = stated(RIGHT, WRONG, RIGHT, WRONG)
    assert book.judge("c", matches=False) == "wait", "its disk may be at fault"
    assert book.judge("d", matches=False) == "next"


def test_one_mismatch_among_matches_changes_nothing() -> None:
    book = stated(*[RIGHT] * COUNT)
    assert book.judge("c", matches=False) == "wait"
    assert book.judge("d", "e", matches=True) == "held"


def test_a_host_that_says_otherwise_later_is_heard_once() -> None:
    book = stated(*[RIGHT] * COUNT)
    assert book.judge("c", matches=False) == "wait"
    assert book.judge("c", matches=True) == "wait"
    assert book.judge("d", matches=True) == "held"


def test_what_a_host_says_again_is_no_news() -> None:
    """Each judgement has the tracker look at all hosts of the swarm, and one host could send them
    without an end."""
    statements = stated(*[RIGHT] * COUNT).statements
    said = [statements.judge("c", "c", matches, now=0.0) for matches in (False, False, True, True, False)]
    assert said == [True, False, True, False, False]
    assert list(statements.round.matching) == ["c"]


def test_more_mismatches_than_matches_undo_a_list_that_was_held() -> None:
    """Two liars may be the first to judge."""
    book = stated(*[WRONG] * COUNT, judges=[*"abcdefg"])
    assert book.judge("c", "d", matches=True) == "held"
    book.statements.hold()
    assert book.judge("e", "f", "g", matches=False) == "next"


# -- later rounds


def test_only_the_arbiter_states_hashes_in_its_round() -> None:
    book = stated(*[WRONG] * COUNT)
    book.statements.begin("c", failed=True, now=0.0)
    assert not book.state("d", RIGHT)
    assert book.statements.round.hashes is None
    assert not book.state("c", RIGHT)
    assert book.statements.round.order == [0]


@pytest.mark.parametrize("reader_first", [True, False])
def test_a_reader_without_a_part_in_earlier_rounds_can_object(reader_first: bool) -> None:
    """An arbiter may lie such that no host can store what it sends, and so none can judge."""
    book = stated(*[WRONG] * COUNT)
    book.statements.begin("c", failed=True, now=0.0)
    if reader_first:
        assert not book.state("d", RIGHT)
        assert book.state("c", WRONG)
    else:
        book.state("c", WRONG)
        assert book.state("d", RIGHT)


def test_a_voucher_of_an_earlier_round_cannot_object() -> None:
    """It would defend itself: a liar could burn round after round."""
    book = stated(*[WRONG] * COUNT)
    book.statements.begin("c", failed=True, now=0.0)
    book.state("c", RIGHT)
    assert not book.state("a", WRONG)


def test_an_arbiter_that_contradicts_itself_is_not_believed() -> None:
    book = stated(*[WRONG] * COUNT)
    book.statements.begin("c", failed=True, now=0.0)
    book.state("c", RIGHT)
    assert book.state("c", WRONG)


def test_upstream_is_wrong_where_two_rounds_agree_and_nothing_matches() -> None:
    book = stated(*[WRONG] * COUNT)
    book.judge("d", "e", matches=False)
    book.round("c", *[WRONG] * COUNT)
    assert book.judge("d", matches=False) == "wait"
    assert book.judge("e", matches=False) == "wait", "they may hear from others"
    book.now += JUDGES_WAIT_S
    assert book.decide() == "wait", "not without the arbiter's word"
    assert book.judge("c", matches=False) == "failed"


def test_upstream_is_wrong_although_the_arbiter_says_nothing() -> None:
    book = stated(*[WRONG] * COUNT)
    book.judge("d", "e", matches=False)
    book.round("c", *[WRONG] * COUNT)
    assert book.judge("d", "e", matches=False) == "wait"
    book.now += DISPUTE_S
    assert book.decide() == "failed"


def test_two_liars_that_judge_first_do_not_make_upstream_wrong() -> None:
    """They have no pieces, and need none to say so."""
    book = stated(*[RIGHT] * COUNT, judges=[*"abcde", "liar", "other"])
    assert book.judge("liar", "other", matches=False) == "next"
    book.round("c", *[RIGHT] * COUNT)
    assert book.judge("liar", "other", matches=False) == "wait"
    book.now += JUDGES_WAIT_S
    assert book.judge("c", matches=True) == "wait"
    assert book.judge("d", matches=True) == "wait"
    assert book.judge("e", matches=True) == "held"


def test_an_arbiter_that_repeats_a_wrong_list_is_followed_by_another() -> None:
    book = stated(*[WRONG] * COUNT)
    book.judge("d", "e", matches=False)
    book.round("liar", *[WRONG] * COUNT)
    book.judge("liar", matches=True)
    assert book.judge("d", "e", matches=False) == "wait"
    book.now += DISPUTE_S
    assert book.decide() == "next"


def test_one_liar_does_not_make_upstream_wrong() -> None:
    """It says that a right list does not match, twice."""
    book = stated(*[RIGHT] * COUNT, judges=["a", "b", "liar"])
    book.judge("a", "b", matches=True)
    assert book.judge("liar", matches=False) == "next"
    book.round("a", *[RIGHT] * COUNT)
    book.judge("a", "b", matches=True)
    assert book.judge("liar", matches=False) == "held"


def test_one_liar_does_not_hold_a_wrong_list() -> None:
    book = stated(*[WRONG] * COUNT)
    book.round("c", *[WRONG] * COUNT)
    assert book.judge("liar", matches=True) == "wait"
    assert book.judge("c", "d", matches=False) in ("failed", "wait")
    book.now += JUDGES_WAIT_S
    assert book.decide() == "failed"


def test_rounds_end() -> None:
    book = stated(*[WRONG] * COUNT)
    for number in range(ROUNDS_MAX):
        assert book.statements.may_begin()
        book.statements.begin(f"x{number}", failed=True, now=0.0)
    assert not book.statements.may_begin()


def test_arbiters_that_go_away_cost_no_round() -> None:
    book = stated(*[WRONG] * COUNT)
    book.statements.begin("x", failed=True, now=0.0)
    for number in range(ROUNDS_MAX):
        book.statements.begin(f"x{number}", failed=False, now=0.0)
    assert book.statements.may_begin()
    while len(book.statements.rounds) < 100 and book.statements.may_begin():
        book.statements.begin("y", failed=False, now=0.0)
    assert len(book.statements.rounds) < 100


# -- blame


def test_the_hosts_that_stated_otherwise_are_guilty() -> None:
    book = stated(RIGHT, WRONG, RIGHT, THIRD)  # b lies
    book.round("c", *[RIGHT] * COUNT)
    assert book.judge("d", "e", matches=True) == "held"
    assert book.statements.hold()[0] == PieceList(LAYOUT, RIGHT * COUNT)
    assert book.statements.guilty() == {"b": 2}


def test_a_lying_arbiter_is_guilty_and_the_vouchers_before_it_are_not() -> None:
    book = stated(*[RIGHT] * COUNT)
    book.round("c", WRONG, RIGHT, RIGHT, RIGHT)
    book.round("d", *[RIGHT] * COUNT)
    assert book.judge("e", "a", matches=True) == "held"
    book.statements.hold()
    assert book.statements.guilty() == {"c": 1}


def test_an_objection_that_was_right_is_no_guilt() -> None:
    book = stated(*[WRONG] * COUNT)  # a and b lie
    book.statements.begin("c", failed=True, now=0.0)
    book.state("c", WRONG)
    assert book.state("d", RIGHT)
    book.round("e", *[RIGHT] * COUNT)
    assert book.statements.guilty() == {}, "the arbiter's word alone names no host"
    book.judge("d", matches=True)
    book.statements.hold()
    assert set(book.statements.guilty()) == {"a", "b", "c"}


def test_what_a_host_was_told_is_not_its_guilt() -> None:
    book = Book("a", "b", "c")
    book.state("a", *[WRONG] * COUNT, named=False)
    book.round("b", *[RIGHT] * COUNT)
    book.statements.hold()
    assert book.statements.guilty() == {}


def test_a_host_that_corrects_itself_is_not_blamed() -> None:
    """Alone in its swarm it is the arbiter of its own list: upstream sent it other bytes."""
    book = Book("a")
    book.state("a", *[WRONG] * COUNT)
    assert book.judge("a", matches=False) == "next"
    book.round("a", *[RIGHT] * COUNT)
    assert book.judge("a", matches=True) == "held"
    book.statements.hold()
    assert book.statements.guilty() == {}


def test_a_list_that_was_kept_is_held_until_hosts_say_otherwise() -> None:
    statements = Statements.from_held(PieceList(LAYOUT, WRONG * COUNT))
    assert statements.phase == "held"
    for host in "abc":
        statements.judge(host, host, False, now=0.0)
    assert statements.decide(lambda: True, now=0.0) == "next"
    statements.begin("a", failed=True, now=0.0)
    for piece in range(COUNT):
        statements.state("a", piece, RIGHT, named=True, now=0.0)
    statements.hold()
    assert statements.guilty() == {}


HOSTS = [f"h{number}" for number in range(8)]


@settings(max_examples=examples(500), deadline=None)
@given(st.data())
def test_one_liar_of_eight_is_found_and_no_other_host_is(data: st.DataObject) -> None:
    """Whatever it states, whichever way it votes, whenever it is the arbiter: the list that is held
    is right, comes within the rounds, and at most the liar is blamed."""
    liar = data.draw(st.sampled_from(HOSTS))
    statements, lied = Statements(LAYOUT), False

    def hash_for(host: str) -> bytes:
        nonlocal lied
        found = data.draw(st.sampled_from([RIGHT, WRONG, THIRD])) if host == liar else RIGHT
        lied = lied or found != RIGHT
        return found

    conflict = False
    for piece in range(COUNT):
        for host in data.draw(st.lists(st.sampled_from(HOSTS), min_size=1, max_size=2)):
            conflict |= statements.state(host, piece, hash_for(host), named=True, now=0.0)
    now = 0.0
    while True:
        decision: Decision = "next" if conflict else "wait"
        conflict, left = False, list(HOSTS)
        order = data.draw(st.permutations(HOSTS))
        hashes = statements.round.hashes
        right = hashes is not None and hashes.complete and hashes.piece_list().hashes == RIGHT * COUNT
        for host in order if decision == "wait" else ():
            statements.judge(host, host, data.draw(st.booleans()) if host == liar else right, now=now)
            left.remove(host)
            decision = statements.decide(lambda left=left: not left, now=now)  # type: ignore[misc]
            if decision != "wait":
                break
        if decision == "wait":
            now += JUDGES_WAIT_S
            decision = statements.decide(lambda: True, now=now)
        assert decision != "failed"
        if decision == "held":
            break
        assert decision == "next"
        assert statements.may_begin()
        fit = [host for host in HOSTS if host not in statements.involved | statements.round.authors()] or HOSTS
        statements.begin(data.draw(st.sampled_from(fit)), failed=True, now=now)
        for piece in range(COUNT):
            arbiter = statements.round.arbiter or ""
            conflict |= statements.state(arbiter, piece, hash_for(arbiter), named=True, now=now)
    assert statements.hold()[0].hashes == RIGHT * COUNT
    assert set(statements.guilty()) <= {liar}
