"""What a verb imports before it asks: schedulers start `run` on every host of a job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LATE = {
    "asyncio",
    "logging",
    "ssl",
    "ctypes",
    "difflib",
    "p2pdist.client.tracker",
    "p2pdist.model.preseed",
    "p2pdist.model.tree",
} | {
    "p2pdist.client.access",
    "p2pdist.model.address",
    "p2pdist.model.hub",
    "p2pdist.model.image",
}
"""What asks trackers, mounts, reads trees or knows references that are not ours: an agent does that
for `run`."""


def test_run_imports_little_before_the_agent_is_asked(tmp_path: Path) -> None:
    script = (
        "import sys; from p2pdist.cli.main import main\n"
        f"try: main(['run', '--socket', {str(tmp_path / 'none')!r}, 'app:v1'])\n"
        f"except SystemExit as end: assert end.code == 5; print(*{LATE!r} & set(sys.modules))"
    )
    plain = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=plain)
    assert (done.returncode, done.stdout.strip()) == (0, "")
    assert "no agent answers" in done.stderr


def test_the_client_has_all_that_it_names() -> None:
    script = "from p2pdist.client import *; import p2pdist.client as c; assert all(hasattr(c, n) for n in c.__all__)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
