"""The package of the lazy benchmarks is made once, and stays for the next run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench.lazy_package import MADE, prepared
from p2pdist.model.trace import Trace, encode_trace


@pytest.mark.slow
def test_a_package_is_made_once_and_an_interrupted_attempt_is_none(tmp_path: Path) -> None:
    wheels, directory = tmp_path / "wheels", tmp_path / "package"
    wheels.mkdir()
    (wheels / "module.py").write_text("x = 1\n")
    (directory / "source").mkdir(parents=True)
    (directory / "source" / "left").write_text("of an attempt that was interrupted")
    made = prepared(directory, wheels, files=10)
    assert made.files == 10 and not (made.source / "left").exists()
    assert prepared(directory, tmp_path / "nothing") == made
    (directory / MADE).unlink()
    with pytest.raises(subprocess.CalledProcessError):
        prepared(directory, tmp_path / "nothing")
    order = tmp_path / "start.trace"
    order.write_bytes(encode_trace(Trace()))
    assert prepared(tmp_path / "ordered", wheels, files=10, order=order).files == 10
