"""Which hosts need not fetch a blob, as they say it."""

from __future__ import annotations

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import Spares
from tracker.core import affinity as module
from tracker.core.affinity import RedundantPacks

A, B, C = (digest_of(name.encode()) for name in "abc")


def test_a_new_word_replaces_the_last_one_unless_it_says_more() -> None:
    redundant = RedundantPacks()
    redundant.note("h1", Spares((A,)))
    redundant.note("h1", Spares((B,), more=True))
    redundant.note("h2", Spares((B,)))
    assert redundant.hosts == {A: {"h1": None}, B: {"h1": None, "h2": None}}
    redundant.note("h1", Spares((C,)))
    assert redundant.hosts == {B: {"h2": None}, C: {"h1": None}}
    redundant.note("h2", Spares(()))
    redundant.forget("h1")
    redundant.forget("h1")
    assert redundant.hosts == {}


def test_a_host_names_so_many_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PER_HOST_MAX", 2)
    redundant = RedundantPacks()
    redundant.note("h1", Spares((A,)))
    redundant.note("h1", Spares((B, C), more=True))
    redundant.note("h1", Spares((C,), more=True))
    assert set(redundant.hosts) == {A, B}
