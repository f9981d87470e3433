"""`p2pdist doctor` for a user without rights: it says what takes root, and what that costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from unprivileged import NOBODY, as_nobody


@pytest.mark.root  # to become somebody else
def test_without_root_it_is_said_what_takes_root(tmp_path: Path) -> None:
    doctor = [
        sys.executable,
        "-m",
        "p2pdist.cli.main",
        "doctor",
        "--json",
        "--listen",
        "127.0.0.1:9",
        "--store",
        "/proc/x",
    ]
    words = as_nobody(tmp_path, *doctor, "--tracker", "http://127.0.0.1:9", "--socket", "/nonexistent/agent.sock")
    with TemporaryDirectory() as place:  # of its own: other programs of this name may run beside it
        os.chown(place, NOBODY, NOBODY)
        environment = {**os.environ, "TMPDIR": place}
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env=environment)
        left = os.listdir(place)
    assert done.returncode == 1, done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    for name in ("root", "overlay", "erofs"):
        assert found[name]["state"] == "warning" and found[name]["remedy"]
    assert found["overlay"]["detail"] == "takes root"
    assert found["store"]["state"] == found["port"]["state"] == found["tracker"]["state"] == "failed"
    assert not left
