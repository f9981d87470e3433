"""No decoder of bytes from outside fails in a way that its callers do not expect, nor takes more
time or memory than its input explains."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from effort import MANY
from hostile_bytes import Decoder, check_memory, decoders, inputs, mutated, try_one
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

DECODERS = decoders()
each = pytest.mark.parametrize("decoder", DECODERS, ids=[decoder.name for decoder in DECODERS])


@each
def test_examples_are_accepted(decoder: Decoder) -> None:
    """Else a loop over mutations would try nothing but the first check of a decoder."""
    for data in decoder.examples[:1]:
        decoder.decode(data)


@each
def test_mutated_bytes_are_refused_in_the_expected_way(decoder: Decoder) -> None:
    for number, data in enumerate(inputs(decoder, 10_000 if MANY else 300, seed=1)):
        (check_memory if number % 100 == 0 else try_one)(decoder, data)


@each
@hypothesis_settings(max_examples=500 if MANY else 15, deadline=None)
@given(st.data())
def test_any_bytes_are_refused_in_the_expected_way(decoder: Decoder, data: st.DataObject) -> None:
    """What Hypothesis shrinks to the smallest input: bytes, and cuts of an example with bytes
    between."""
    example = data.draw(st.sampled_from(decoder.examples))
    cut = data.draw(st.integers(0, len(example)))
    kept = data.draw(st.integers(cut, len(example)))
    between = data.draw(st.binary(max_size=60))
    try_one(decoder, data.draw(st.sampled_from((between, example[:cut] + between + example[kept:]))))


def test_a_wrong_decoder_is_found() -> None:
    """The loop proves something: one that raises what it should not is named with its input."""
    wrong = Decoder("wrong", lambda data: data[5], (), (b"abcdefgh",))
    with pytest.raises(IndexError):
        for data in inputs(wrong, 1000, seed=0):
            try_one(wrong, data)
    greedy = Decoder("greedy", lambda data: bytes(200 << 20), (), (b"a",))
    with pytest.raises(AssertionError, match="took"):
        check_memory(greedy, b"a")


def test_the_program_runs_by_itself() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--count", "20", "--only", "range"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and "range: 20 inputs" in done.stdout, done.stderr


def test_mutations_differ() -> None:

    chance = random.Random(1)
    assert len({mutated(b"abcdefgh", chance) for _ in range(200)}) > 150
