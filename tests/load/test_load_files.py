"""Loading complete files: tensors as safetensors has them, and one copy in memory for all
processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from late_modules import late_module

from p2pdist.load import safetensors
from p2pdist.model.errors import Corrupt, NotFound

CHILD = Path(__file__).with_name("load_child.py")
torch, reference = late_module("torch"), late_module("safetensors.torch")
pytestmark = pytest.mark.slow


def tensors_of_all_types() -> dict[str, object]:
    types = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8]
    made = {str(kind): torch.arange(24).reshape(2, 3, 4).to(kind) for kind in types}
    made |= {"bool": torch.tensor([True, False, True]), "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4)}
    kinds = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
    made |= {str(kind): torch.ones(3).to(kind) for kind in kinds}
    made |= {"odd": torch.ones(7, dtype=torch.uint8)}
    return made


def test_tensors_equal_those_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    reference.save_file(tensors_of_all_types(), path, metadata={"format": "pt"})
    expected = reference.load_file(path)
    found = dict(safetensors(path))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].float(), tensor.float()), name
    with pytest.raises(Corrupt):
        list(safetensors(CHILD))
    with pytest.raises(NotFound):
        list(safetensors(tmp_path / "missing.safetensors"))


def test_files_of_a_directory_come_by_name_and_tensors_in_file_order(tmp_path: Path) -> None:
    for number in (2, 1):
        reference.save_file(
            {f"b{number}": torch.ones(4), f"a{number}": torch.zeros(2, dtype=torch.int8)},
            tmp_path / f"model-{number}.safetensors",
        )
    assert [name for name, _ in safetensors(tmp_path)] == ["b1", "a1", "b2", "a2"]


def test_only_chosen_files_are_loaded(tmp_path: Path) -> None:
    for name in ("model", "consolidated"):
        reference.save_file({name: torch.ones(4)}, tmp_path / f"{name}.safetensors")
    assert [name for name, _ in safetensors(tmp_path, chosen=lambda path: path == "model.safetensors")] == ["model"]
    with pytest.raises(NotFound):
        list(safetensors(tmp_path, chosen=lambda path: False))


def test_what_is_written_to_a_tensor_stays_with_the_program(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    reference.save_file({"layer": torch.zeros(1 << 12), "other": torch.zeros(1 << 12)}, path)
    before, loaded = path.read_bytes(), dict(safetensors(path))
    loaded["layer"].add_(1)
    assert float(loaded["layer"].sum()) == 1 << 12 and not loaded["other"].any()
    assert not dict(safetensors(path))["layer"].any()
    assert path.read_bytes() == before


def test_four_processes_have_the_weights_in_memory_once(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    reference.save_file({f"layer{number}": torch.rand(1 << 20) for number in range(8)}, path)
    size_kib = path.stat().st_size >> 10
    children = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    try:
        sums = {_line(child) for child in children}
        assert len(sums) == 1
        counted = []
        for child in children:
            _tell(child)
            counted.append(int(_line(child)))
        assert 0.95 * size_kib <= sum(counted) <= 1.05 * size_kib, "once for all"
        assert max(counted) <= 0.3 * size_kib, "a fourth for each"
    finally:
        for child in children:
            _tell(child)
            child.communicate(timeout=60)


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def _tell(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()
