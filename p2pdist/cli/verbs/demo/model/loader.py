"""The program that each host of the demo's second act runs: downloads a model as any user of
huggingface_hub does, then has its tensors in memory.

`python -m p2pdist.cli.verbs.demo.model.loader ORG/NAME [DIRECTORY]`, with HF_ENDPOINT and HF_HOME;
in the directory is installed what this Python lacks, as commands do not go by PYTHONPATH. Tensors
come by p2pdist.load where torch is installed, else by safetensors and numpy. Its last line is a
JSON document: when it began and had the files, in seconds of the machine's monotonic clock, how
long loading took, by what, how many tensors there are, and the BLAKE3 of all their bytes in order.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3


def arrays(directory: Path) -> Iterator[Any]:
    """The tensors of the model, by file and place, as bytes."""
    if importlib.util.find_spec("torch") is not None:
        from p2pdist.load import safetensors

        yield from (tensor.numpy() for _, tensor in safetensors(directory))
        return
    from safetensors import safe_open  # type: ignore[import-not-found, unused-ignore]

    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            yield from (file.get_tensor(name) for name in file.offset_keys())


def main() -> None:
    """Download, load, and report."""
    sys.path += sys.argv[2:]
    from huggingface_hub import snapshot_download  # type: ignore[import-not-found, unused-ignore]

    began = time.monotonic()
    place = Path(snapshot_download(sys.argv[1]))
    there = time.monotonic()
    loaded = list(arrays(place))
    load_s = time.monotonic() - there
    found = blake3()
    for array in loaded:
        found.update(memoryview(array).cast("B"))
    loader = "p2pdist.load" if importlib.util.find_spec("torch") is not None else "safetensors, numpy"
    report = {"began": began, "there": there, "load_s": load_s, "loader": loader}
    print(json.dumps({**report, "tensors": len(loaded), "digest": found.hexdigest()}), flush=True)
    os._exit(0)  # nothing is to be written any more, and taking numpy or torch apart takes long


if __name__ == "__main__":
    main()
