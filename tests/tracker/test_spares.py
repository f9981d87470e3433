"""Which hosts need not fetch a blob, as they say it."""

from __future__ import annotations

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import Spares
from tracker.core import affinity as module
from tracker.core.affinity import SparedBlobs

A, B, C = (digest_of(name.encode()) for name in "abc")


def test_a_new_word_replaces_the_last_one_unless_it_says_more() -> None:
    spared = SparedBlobs()
    spared.said("h1", Spares((A,)))
    spared.said("h1", Spares((B,), more=True))
    spared.said("h2", Spares((B,)))
    assert spared.hosts == {A: {"h1": None}, B: {"h1": None, "h2": None}}
    spared.said("h1", Spares((C,)))
    assert spared.hosts == {B: {"h2": None}, C: {"h1": None}}
    spared.said("h2", Spares(()))
    spared.forget("h1")
    spared.forget("h1")
    assert spared.hosts == {}


def test_a_host_names_so_many_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PER_HOST_MAX", 2)
    spared = SparedBlobs()
    spared.said("h1", Spares((A,)))
    spared.said("h1", Spares((B, C), more=True))
    spared.said("h1", Spares((C,), more=True))
    assert set(spared.hosts) == {A, B}
