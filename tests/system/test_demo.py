"""The whole job once, end to end, as `make demo` runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tidiness import mounts_below

COMMAND = [str(Path(sys.executable).with_name("p2pdist")), "demo", "--small"]
TIMEOUT_S, MODEL_TIMEOUT_S = 170, 280


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    return subprocess.Popen(
        [*COMMAND, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.long
def test_every_claim_of_the_demo_holds(tmp_path: Path) -> None:
    """The origin is read about once, the second version costs its app layer, every program runs,
    nothing is left."""
    demo = start(tmp_path, "--agents", "4", "--json")
    out, err = demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 0, err + out
    told = json.loads(out)
    assert told["ok"] is True
    assert [len(one["pulls"]) for one in told["rounds"]] == [4, 4]
    assert told["rounds"][0]["origin_ratio"] <= 1.05
    second = told["rounds"][1]
    assert all(pull["bytes_origin"] + pull["bytes_peers"] <= second["app_bytes"] + 65_536 for pull in second["pulls"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("line", ["Pulling demo/trainer:v1", "Running demo/trainer:v1"])
def test_ctrl_c_leaves_nothing(tmp_path: Path, line: str) -> None:
    """While pulls or programs run: exit code 130, and no file or mount stays (processes are looked
    for by conftest.py)."""
    demo = start(tmp_path, "--agents", "3")
    try:
        assert demo.stdout
        for said in demo.stdout:
            if said.startswith(line):
                break
        time.sleep(0.5)
        demo.send_signal(signal.SIGINT)
        out, err = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 130, err + out
    assert mounts_below(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_the_second_act_ends_with_tensors_in_memory(tmp_path: Path) -> None:
    """All hosts have the model's tensors, by one HEAD a file, from one copy of the hub and what a
    busy machine reads again; nothing is left."""
    demo = start(tmp_path, "--model", "--agents", "3", "--json")
    out, err = demo.communicate(timeout=MODEL_TIMEOUT_S)
    assert demo.returncode in (0, 1), err + out
    told = json.loads(out)
    claims = {claim["text"]: claim["held"] for claim in told["claims"]}
    del claims["bytes that the hub sent / bytes of the model"]
    assert len(claims) == 3 and all(claims.values()), err + out
    assert told["hub_ratio"] < 2, err + out
    assert [load["tensors"] for load in told["loads"]] == [told["tensors"]] * 3
    assert list(tmp_path.iterdir()) == []
