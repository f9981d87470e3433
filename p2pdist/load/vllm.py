"""The load format `p2pdist` of vLLM: `vllm serve org/model --load-format p2pdist`.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). Weights then
come by `p2pdist.load.safetensors`: tensors are loaded as their files arrive, and all ranks of a
host map the same pages. Where they come from:

- `--model-loader-extra-config '{"source": "team/weights:v3"}'`: what `safetensors` takes, beside a
  model that has the configuration and tokenizer;
- a model that is a directory: its files;
- any other one, the name of a repository: the fleet's hub, through the agent. The repository must
  be open. With HF_ENDPOINT=http://localhost:7073/hf the configuration comes through it as well.

`"socket"` there names the agent's socket. Files below the top directory are left out, and those
that model.safetensors.index.json does not name where there is one, as vLLM itself does it.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from p2pdist.load.tensors import safetensors
from p2pdist.model.errors import Corrupt, NotFound

FORMAT = "p2pdist"
INDEX = "model.safetensors.index.json"
SETTINGS = frozenset({"source", "socket"})


def register() -> None:
    """Make the load format known to the vLLM of this process."""
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    if FORMAT not in getattr(loaders, "_LOAD_FORMAT_TO_MODEL_LOADER", {}):  # it warns of a second time
        loaders.register_model_loader(FORMAT)(loader_class(loaders.BaseModelLoader))


def loader_class(base: type[Any]) -> type[Any]:
    """The loader as a subclass of vLLM's BaseModelLoader, which exists only where vLLM does."""

    class P2PDistModelLoader(base):  # type: ignore[misc]
        """Loads weights by p2pdist.load."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            settings = load_config.model_loader_extra_config or {}
            if unknown := sorted(set(settings) - SETTINGS):
                raise ValueError(
                    f"the load format {FORMAT} has no setting {', '.join(unknown)}: it has source and socket"
                )
            if wrong := [name for name, value in settings.items() if not isinstance(value, str) or not value]:
                raise ValueError(f"the setting {wrong[0]} of the load format {FORMAT} is no text")
            self._source, self._socket = settings.get("source", ""), settings.get("socket")

        def download_model(self, model_config: Any) -> None:
            """Nothing: files come as they are loaded."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Load the weights into a model. Raises Corrupt where some are nowhere, which would be
            whatever the memory held."""
            loaded = model.load_weights(self.get_all_weights(model_config, model))
            if loaded is not None and getattr(model_config, "quantization", None) is None:
                _require_all({name for name, _ in model.named_parameters()} - set(loaded), self._source)

        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
            """Names and tensors, on the CPU."""
            name = getattr(model_config, "model_weights", "") or model_config.model
            source, chosen = weights_of(self._source, name, model_config.revision)
            return safetensors(source, socket=self._socket, chosen=chosen)

    return P2PDistModelLoader


def _require_all(missing: set[str], source: str) -> None:
    """Raises Corrupt where parameters of a model have got no weights. As in vLLM's own loader, not
    of a quantized model, some of whose parameters are computed, nor where the model does not say
    what it has loaded."""
    if missing:
        raise Corrupt(
            f"{source or 'the model'} has no weights for {len(missing)} parameters, such as {min(missing)[:200]}",
            remedy="See that all its files are there, and that it is one of this model",
        )


def weights_of(source: str, model: str, revision: str | None) -> tuple[str | Path, Callable[[str], bool]]:
    """What `safetensors` is to load, and which files of it. Raises Corrupt for an index that is
    none, NotFound where a file that it names is not there."""
    if source:
        return source, lambda path: True
    if os.path.isdir(model):
        index = Path(model, INDEX)
        if not index.is_file():
            return Path(model), _chosen(None)
        if absent := sorted(name for name in _names_in(index) if not Path(model, name).is_file()):
            raise NotFound(f"{index} names {absent[0][:200]}, which is not there", remedy="Download it again")
        return Path(model), _chosen(index)
    return f"hf://{model}@{revision}" if revision else f"hf://{model}", _chosen(_hub_index(model, revision))


def _hub_index(model: str, revision: str | None) -> Path | None:
    """The index of a repository; None where it has none."""
    hub, errors = (importlib.import_module(name) for name in ("huggingface_hub", "huggingface_hub.errors"))
    try:
        return Path(hub.hf_hub_download(model, INDEX, revision=revision))
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise  # nothing could be asked
        return None


def _chosen(index: Path | None) -> Callable[[str], bool]:
    if index is None:
        return lambda path: "/" not in path
    names = _names_in(index)
    return lambda path: path in names


def _names_in(index: Path) -> frozenset[str]:
    """The files that an index names."""
    try:
        names = frozenset(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Corrupt(f"{index} is no index of files", remedy="Download it again") from error
    if not all(isinstance(name, str) for name in names):
        raise Corrupt(f"{index} is no index of files", remedy="Download it again")
    return names
