"""Traces of real runs under strace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from environments import install, make_environment, make_wheel, site_of

from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, UsageError
from p2pdist.package.source.strace import read_logs, run
from p2pdist.package.source.trace import Trace, encode_trace, make_trace, merge, read_trace, select

PYTHON = os.path.realpath(sys.executable)


def may_trace() -> bool:
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not may_trace(), reason="needs strace and ptrace")


def traced(root: Path, *command: str | Path, code: int = 0) -> Trace:
    logs = root.parent / "logs"
    logs.mkdir()
    try:
        assert run([*map(str, command)], logs) == code
        return make_trace(root, read_logs(logs, os.fsencode(os.getcwd())))
    finally:
        shutil.rmtree(logs)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with files of odd names, and one that is never used."""
    made = tmp_path / "root"
    (made / "sub/deep").mkdir(parents=True)
    for name in ("used", "unused", 'a "b" <c> \\x41, = 3', "line\nbreak", "sub/deep/file", "checked"):
        (made / name).write_text(name)
    Path(os.fsdecode(os.fsencode(made) + b"/\xff\xfe")).write_text("x")
    (made / "link").symlink_to("sub")
    (made / "absolute").symlink_to(made / "link/deep")
    return made


def test_what_children_open_wherever_they_are(root: Path, tmp_path: Path) -> None:
    """By absolute and relative paths, from directories that were changed to and descriptors of
    directories, over symbolic links."""
    script = """
import os, subprocess
os.chdir(%r)
open("used").close()
os.chdir("sub")
child = subprocess.run(["cat", "deep/file"], check=True, stdout=subprocess.DEVNULL)
handle = os.open("..", os.O_RDONLY)
os.open('a "b" <c> \\\\x41, = 3', os.O_RDONLY, dir_fd=handle)
os.chdir("/")
os.fchdir(handle)
assert os.access("checked", os.R_OK)
os.open(b"\\xff\\xfe", os.O_RDONLY)
subprocess.run(["cat", "line\\nbreak"], check=True, stdout=subprocess.DEVNULL)
try: open("absent")
except FileNotFoundError: pass
"""
    trace = traced(root, PYTHON, "-S", "-c", script % str(root))
    assert "checked" in trace.files
    assert set(trace.files) >= {
        "used",
        "sub",
        "sub/deep/file",
        'a "b" <c> \\x41, = 3',
        "line\nbreak",
        os.fsdecode(b"\xff\xfe"),
    }
    assert not {"unused", "absent", "link", "absolute"} & set(trace.files)
    assert trace.root == str(root)


def test_links_on_the_way_are_kept(root: Path) -> None:
    trace = traced(root, "cat", root / "absolute/file")
    assert trace.files == ("absolute", "link", "sub/deep/file")


def test_what_a_program_makes_itself_is_not_needed(root: Path) -> None:
    """Files, directories and renamed files that were not there before; what it appends to is."""
    script = "cd %s; cat new 2>/dev/null; echo x > new; mkdir dir; echo y > dir/inner; echo z >> made; cat used; mv dir/inner unused"
    trace = traced(root, "sh", "-c", script % root)
    assert "used" in trace.files
    assert not {"new", "dir/inner", "made"} & set(trace.files)


def test_the_interpreter_of_a_script_is_needed(root: Path) -> None:
    (root / "bin").mkdir()
    (root / "bin/shell").symlink_to("/bin/sh")
    (root / "go").write_text(f"#!{root}/bin/shell -e\ntrue\n")
    (root / "go").chmod(0o755)
    assert traced(root, root / "go").files == ("bin/shell", "go")


def test_exit_codes_and_signals(root: Path) -> None:
    traced(root, "sh", "-c", "exit 7", code=7)
    traced(root, "sh", "-c", "kill -TERM $$", code=143)


def test_what_cannot_be_run(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no-such-program"):
        run(["no-such-program"], tmp_path)
    with pytest.raises(UsageError):
        run([], tmp_path)
    (tmp_path / "broken").write_text("\x7fELF")
    (tmp_path / "broken").chmod(0o755)
    logs = tmp_path / "logs"
    logs.mkdir()
    try:
        assert run([str(tmp_path / "broken")], logs) != 0
    except P2PDistError as failure:
        assert "broken" in str(failure)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trace")
    made = make_environment(place / "venv")
    used = {"usedlib/__init__.py": "", "usedlib/part.py": "x = 1\n", "usedlib/spare.py": ""}
    install(made, make_wheel(place, "usedlib", used), make_wheel(place, "sparelib", {"sparelib/__init__.py": ""}))
    return made


def test_a_package_of_what_was_used_runs(environment: Path, tmp_path: Path) -> None:
    """The used module, its metadata and the environment's own files are enough to do it again;
    nothing else is there."""
    script = "import usedlib.part, importlib.metadata as m; print(m.version('usedlib'))"
    trace = traced(environment, environment / "bin/python", "-c", "import usedlib.part")
    site = site_of(environment).relative_to(environment)
    assert {"usedlib", "usedlib.part"} <= set(trace.modules)
    assert not {"usedlib.spare", "sparelib"} & set(trace.modules)
    chosen = select(environment, trace)
    assert os.fsencode(site / "usedlib-1.0.dist-info/METADATA") in chosen.paths
    assert b"pyvenv.cfg" in chosen.paths
    assert chosen.missing == 0
    slim = tmp_path / "slim"
    for path in sorted(chosen.paths):
        here, there = environment / os.fsdecode(path), slim / os.fsdecode(path)
        if here.is_dir() and not here.is_symlink():
            there.mkdir(parents=True, exist_ok=True)
        else:
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(here, there, follow_symlinks=False)
    assert not (slim / site / "sparelib").exists()
    done = subprocess.run([slim / "bin/python", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1.0\n"


def test_traces_are_merged(root: Path) -> None:
    first, second = traced(root, "cat", root / "used"), traced(root, "cat", root / "sub/deep/file")
    merged = merge([first, second])
    assert merged.files == ("sub/deep/file", "used")
    assert select(root, merged).paths == {b"sub", b"sub/deep", b"sub/deep/file", b"used"}


def test_a_trace_file_is_read_back_as_it_was(root: Path, tmp_path: Path) -> None:
    trace = traced(root, "sh", "-c", f"cat {root}/* >/dev/null 2>&1; true")
    assert os.fsdecode(b"\xff\xfe") in trace.files
    file = tmp_path / "trace.json"
    file.write_bytes(encode_trace(trace))
    assert read_trace(file) == trace
    assert json.loads(file.read_bytes())["version"] == 1
    (root / "unused").unlink()
    assert select(root, trace).missing == 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", Corrupt),
        ("[]", Corrupt),
        ('{"version": 1, "root": "/", "files": [1], "modules": []}', Corrupt),
        ('{"version": 1, "root": "/", "files": ["../x"], "modules": []}', Corrupt),
        ('{"version": 1, "root": "/", "files": ["/x"], "modules": []}', Corrupt),
        ('{"version": 2, "root": "/", "files": [], "modules": []}', UsageError),
        ("[" * 100_000, Corrupt),
    ],
)
def test_a_wrong_trace_is_refused(tmp_path: Path, text: str, error: type[Exception]) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(error):
        read_trace(tmp_path / "t")
    with pytest.raises(NotFound):
        read_trace(tmp_path / "absent")


def test_a_trace_of_something_else_is_noticed(root: Path, tmp_path: Path) -> None:
    trace = traced(root, "cat", root / "used")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="nothing in"):
        select(tmp_path / "empty", trace)
