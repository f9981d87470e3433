"""Tensors of a model of the hub by p2pdist.load, through a real agent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from door_rig import MirrorAgent
from hub_clients_rig import HubClientSite
from hub_rig import running_hub
from late_modules import late_module

from p2pdist.load import safetensors
from p2pdist.model.errors import Corrupt, NotFound, UsageError

torch, reference = late_module("torch"), late_module("safetensors.torch")
pytestmark = pytest.mark.slow


@cache
def shards() -> dict[str, dict[str, Any]]:
    return {
        f"model-{shard}.safetensors": {f"{shard}.layer{number}": torch.rand(1 << 16) for number in range(4)}
        for shard in range(5)
    }


@pytest.fixture
def site(tmp_path: Path) -> Iterator[HubClientSite]:
    with running_hub() as hub:
        site = HubClientSite(tmp_path, hub)
        try:
            site.start_tracker()
            yield site
        finally:
            site.close()


def test_the_files_that_are_chosen_come_and_no_others(site: HubClientSite) -> None:
    files = {name: reference.save(tensors) for name, tensors in shards().items()}
    old = {"pytorch_model.bin": b"pickle" * 1000, "original/model.safetensors": reference.save({"a": torch.ones(9)})}
    commit = site.hub.repository("org/model").commit({**files, **old, "config.json": b"{}"})
    agent = MirrorAgent(site, "h1").start()
    expected = {name: tensor for tensors in shards().values() for name, tensor in tensors.items()}
    for reference_ in ("hf://org/model", f"hf://org/model@{commit}"):
        found = dict(safetensors(reference_, socket=agent.socket, chosen=lambda path: "/" not in path))
        assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)
    sent = {name for name in site.hub.sent if len(name) == 64}
    assert sent == {hashlib.sha256(data).hexdigest() for data in files.values()}
    for data in files.values():
        assert site.hub.sent[hashlib.sha256(data).hexdigest()] < 2 * len(data)


def test_what_cannot_be_loaded_is_named(site: HubClientSite) -> None:
    data = reference.save({"layer": torch.rand(1 << 18)})
    site.hub.repository("org/wrong").commit({"model.safetensors": data})
    site.hub.repository("org/small").commit({"model.safetensors": data})
    site.hub.repository("org/small").lfs = lambda path: False
    site.hub.repository("org/none").commit({"config.json": b"{}"})
    agent = MirrorAgent(site, "h1").start()
    site.hub.change = lambda path, content: bytes(len(content))
    for name, error, said in (
        ("org/wrong", Corrupt, "model.safetensors"),
        ("org/small", UsageError, "not kept in LFS"),
        ("org/none", NotFound, "safetensors"),
        ("org/absent", NotFound, "org/absent"),
    ):
        with pytest.raises(error, match=said):
            list(safetensors(f"hf://{name}", socket=agent.socket))
