"""What a compile cache depends on, and the name that follows from it.

Compilers write code for one processor, one GPU and driver, and one version of themselves. Hosts
that agree in all of these can use each other's caches; the others must not meet in one directory.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from p2pdist.model.errors import UNDECODABLE, NotFound, P2PDistError
from p2pdist.model.manifest import Reference, parse_reference

PYTHON_S_MAX, GPU_S_MAX = 60.0, 30.0
ANSWER_BYTES_MAX = 64 << 10
KEY_DIGITS = 32
ENGINES = ("torch", "triton", "vllm", "sglang", "numba", "llvmlite", "jax", "jaxlib")
"""Distributions whose versions count."""

VARIABLES: Mapping[str, str] = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "NUMBA_CACHE_DIR": "numba",
    "CUDA_CACHE_PATH": "cuda",
}
"""Environment variables that say where caches are, and the directory of each in a package."""

_ASK = """
import importlib.metadata as found, json, sys
versions = {"python": sys.implementation.cache_tag + "-" + sys.version.split()[0]}
for name in sys.argv[1:]:
    try:
        versions[name] = found.version(name)
    except found.PackageNotFoundError:
        pass
print(json.dumps(versions))
"""


@dataclass(frozen=True, slots=True)
class CacheKey:
    """The name of the cache for this host and an interpreter, and the facts behind it."""

    namespace: str
    facts: Mapping[str, str]

    @property
    def digits(self) -> str:
        """Hexadecimal digits that differ wherever a fact does."""
        data = msgspec.json.encode(dict(self.facts), order="deterministic")
        return hashlib.sha256(data).hexdigest()[:KEY_DIGITS]

    @property
    def reference(self) -> Reference:
        """The package that the cache is."""
        return parse_reference(f"{self.namespace}/{self.digits}:latest")

    def variables(self, directory: Path) -> dict[str, str]:
        """What a program's environment says of caches in `directory`."""
        return {name: str(directory / part) for name, part in VARIABLES.items()}


def cache_key(namespace: str, *python: str) -> CacheKey:
    """The key for this host and the interpreter `python`: its path, or that of a script, such as
    one of pyenv, behind the program and words that run it. Raises UsageError for a namespace that
    cannot be the beginning of a package's name, NotFound and P2PDistError where the interpreter
    does not say its versions."""
    parse_reference(f"{namespace}/key:latest")
    return CacheKey(namespace, {**_machine(), **_gpu(), **_versions(*python)})


def _machine() -> dict[str, str]:
    """The processor: what compilers take for `native`."""
    wanted = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    found: dict[str, str] = {}
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        first = ""
    for line in first.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            found[name.strip()] = " ".join(sorted(value.split()))
    data = msgspec.json.encode(found, order="deterministic")
    return {"machine": platform.machine(), "cpu": hashlib.sha256(data).hexdigest()[:16]}


def _gpu() -> dict[str, str]:
    """GPU models and driver; none where the driver's tool is missing."""
    words = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=GPU_S_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {"gpu": "none"}
    lines = sorted({line.strip() for line in done.stdout[:ANSWER_BYTES_MAX].splitlines() if line.strip()})
    return {"gpu": "; ".join(lines) if done.returncode == 0 and lines else "none"}


def _versions(*words: str) -> dict[str, str]:
    python = words[-1]
    try:
        done = subprocess.run(
            [*words, "-c", _ASK, *ENGINES], capture_output=True, timeout=PYTHON_S_MAX, check=False, cwd="/"
        )
    except FileNotFoundError as error:
        raise NotFound(f"there is no interpreter {python}", remedy="Name one with --python") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise P2PDistError(
            f"the interpreter {python} does not answer: {error}", remedy="Name another one with --python"
        ) from error
    try:
        return msgspec.json.decode(done.stdout[:ANSWER_BYTES_MAX], type=dict[str, str])
    except UNDECODABLE as error:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise P2PDistError(
            f"the interpreter {python} does not say its versions: {lines[-1][:200] if lines else 'it says nothing'}",
            remedy="Name another one with --python",
        ) from error
