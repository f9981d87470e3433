"""Which weights the load format for vLLM takes, and what settings it has."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pdist.load import vllm
from p2pdist.load.vllm import INDEX, loader_class, weights_of
from p2pdist.model.errors import Corrupt, NotFound


@dataclass
class Settings:
    """vLLM's LoadConfig, as far as a loader reads it."""

    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)


class Base:
    """vLLM's BaseModelLoader, as far as a loader calls it."""

    def __init__(self, load_config: Settings) -> None:
        self.load_config = load_config


def test_vllm_finds_the_format() -> None:
    (found,) = (entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "p2pdist")
    assert found.load() is vllm.register


def test_a_directory_gives_the_files_of_its_index(tmp_path: Path) -> None:
    source, chosen = weights_of("", str(tmp_path), None)
    assert source == tmp_path and chosen("model.safetensors") and not chosen("original/model.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    (tmp_path / "model-1.safetensors").touch()
    with pytest.raises(NotFound, match="names model-2"):
        weights_of("", str(tmp_path), None)
    (tmp_path / "model-2.safetensors").touch()
    _, chosen = weights_of("", str(tmp_path), None)
    assert chosen("model-1.safetensors") and chosen("model-2.safetensors")
    assert not chosen("consolidated.safetensors")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": ["b"]}}', '{"weight_map": {"a": 1}}']
)
def test_an_index_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(Corrupt, match=INDEX):
        weights_of("", str(tmp_path), None)


def test_a_model_is_not_served_with_parameters_that_got_no_weights(tmp_path: Path) -> None:
    """They would be whatever the memory held, and the model would answer all the same."""
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file

    class Model(torch.nn.Module):  # type: ignore[misc]
        """A model of vLLM, as far as a loader calls it."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.empty(4)) for _ in range(2))

        def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
            own, loaded = dict(self.named_parameters()), set()
            for name, tensor in weights:
                own[name].data.copy_(tensor)
                loaded.add(name)
            return loaded

    loader, config = loader_class(Base)(Settings()), SimpleNamespace(model=str(tmp_path), revision=None)
    save_file({"a": torch.ones(4)}, tmp_path / "model-1.safetensors")
    with pytest.raises(Corrupt, match="no weights for 1 parameters, such as b"):
        loader.load_weights(Model(), config)
    loader.load_weights(Model(), SimpleNamespace(**vars(config), quantization="fp8"))
    save_file({"b": torch.zeros(4)}, tmp_path / "model-2.safetensors")
    model = Model()
    loader.load_weights(model, config)
    assert model.a.tolist() == [1.0] * 4 and model.b.tolist() == [0.0] * 4


def test_a_source_that_is_named_counts(tmp_path: Path) -> None:
    source, chosen = weights_of("team/weights:v3", str(tmp_path), None)
    assert source == "team/weights:v3" and chosen("any/file.safetensors")


@pytest.mark.parametrize("settings", [{"sources": "a"}, {"source": 5}, {"socket": ""}])
def test_a_wrong_setting_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        loader_class(Base)(Settings(settings))
    loader_class(Base)(Settings({"source": "team/weights:v3", "socket": "/run/p2pdist.sock"}))
