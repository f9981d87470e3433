"""A model of noise, as hubs have them: a description, and weights in several safetensors files
(github.com/huggingface/safetensors, "Format")."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

CHUNK = 1 << 20
ALIGNMENT = 8
VALUE_BYTES = 4


def write_model(
    directory: Path,
    *,
    files: int,
    file_bytes: int,
    tensors: int,
    seed: int = 1,
    hear: Callable[[bytes], object] = lambda part: None,
) -> Iterator[None]:
    """Write a model whose `files` files have so many tensors of 32-bit integers with `file_bytes`
    together each. `hear` gets the bytes of the tensors, in order of files and places. Between two
    steps a part is written: the caller may go on with other things, or end it."""
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)]
    shape = [file_bytes // tensors // VALUE_BYTES]
    length = shape[0] * VALUE_BYTES
    places: dict[str, str] = {}
    source = random.Random(seed)
    for number, name in enumerate(names):
        layers = [f"model.layers.{number * tensors + layer:03d}.weight" for layer in range(tensors)]
        places |= dict.fromkeys(layers, name)
        with (directory / name).open("wb") as file:
            file.write(header(layers, shape))
            for start in range(0, length * tensors, CHUNK):
                part = source.randbytes(min(CHUNK, length * tensors - start))
                file.write(part)
                hear(part)
                yield
    index = {"metadata": {"total_size": files * tensors * length}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (directory / "config.json").write_text(json.dumps({"model_type": "noise", "num_layers": len(places)}) + "\n")


def header(names: list[str], shape: list[int]) -> bytes:
    """What a file with these tensors of one shape, one behind the other, begins with."""
    length = shape[0] * VALUE_BYTES
    entries = {
        name: {"dtype": "I32", "shape": shape, "data_offsets": [number * length, (number + 1) * length]}
        for number, name in enumerate(names)
    }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
