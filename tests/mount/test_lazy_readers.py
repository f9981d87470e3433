"""Whatever reads a lazy view, in each way to fill it: it gets what the file has, of which nothing
is here when it begins."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from lazy_view_rig import MIB, Show, View, cat

AT, COUNT = 1_234_567, 300_000
READS = "import os, sys; path, at, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]); fd = os.open(path, 0)\n"

BOMB = """
import os, random, sys
path, want, deep = sys.argv[1], sys.argv[2], int(sys.argv[3])
def reads():
    drawn = random.Random(os.getpid())
    with open(path, "rb") as got, open(want, "rb") as right:
        for _ in range(4):
            at = drawn.randrange(os.path.getsize(want))
            got.seek(at), right.seek(at)
            if got.read(9_000) != right.read(9_000):
                return 1
    return 0
children = []
while deep:
    deep -= 1
    child = os.fork()
    if child == 0:
        children.clear()
    else:
        children.append(child)
wrong = reads()
for child in children:
    wrong |= os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
os._exit(wrong)
"""
"""Doubles as often as it is told, and each process reads; ends with 1 where one read something
wrong."""

BOMB_DOUBLES = 7


def output(*words: object) -> bytes:
    ended = subprocess.run(list(map(str, words)), capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout


def python(code: str, *words: object) -> bytes:
    return output(sys.executable, "-c", code, *words)


def part(code: str) -> Callable[[View, Path], None]:
    """A reader that writes COUNT bytes from AT on of the file to its standard output."""

    def read(view: View, place: Path) -> None:
        got = python(READS + code, view.path / "weights", AT, COUNT)
        assert got == view.files["weights"][AT : AT + COUNT]

    return read


def direct(view: View, place: Path) -> None:
    """open(2) refuses O_DIRECT where the file system has none, and says so."""
    code = "import mmap, os, sys; fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)\n"
    code += "m = mmap.mmap(-1, 1 << 20); count = os.preadv(fd, [m], 2 << 20); sys.stdout.buffer.write(m[:count])"
    try:
        os.close(os.open(view.path / "small1", os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        assert error.errno == errno.EINVAL
    else:
        assert python(code, view.path / "weights") == view.files["weights"][2 * MIB : 3 * MIB]


def executed(view: View, place: Path) -> None:
    """By a shell: a child of this process holds up the thread that fills."""
    assert output("sh", "-c", f"exec {view.path}/program") == b""


def linked(view: View, place: Path) -> None:
    python("import ctypes, sys; ctypes.CDLL(sys.argv[1])", view.path / "library.so")


def bomb(view: View, place: Path) -> None:
    (place / "weights").write_bytes(view.files["weights"])
    python(BOMB, view.path / "weights", place / "weights", BOMB_DOUBLES)


def many(view: View, place: Path) -> None:
    """The same file from its begin, at the same moment."""
    readers = [cat(view.path / "weights") for _ in range(50)]
    assert {reader.communicate()[0] for reader in readers} == {view.files["weights"]}


def namespaced(view: View, place: Path) -> None:
    assert output("unshare", "-m", "cat", view.path / "weights") == view.files["weights"]


def contained(view: View, place: Path) -> None:
    """A container has a bind mount of the view, and of /usr."""
    if shutil.which("runc") is None or not Path("/bin").is_symlink():
        pytest.skip("needs runc, and programs below /usr alone")
    root = place / "bundle/rootfs"
    root.mkdir(parents=True)
    for name in filter(Path.is_symlink, map(Path, ("/bin", "/lib", "/lib64"))):
        (root / name.name).symlink_to(os.readlink(name))
    output("runc", "spec", "--bundle", place / "bundle")
    config = json.loads((place / "bundle/config.json").read_text())
    config["process"] |= {"terminal": False, "args": ["cat", "/mnt/weights", "/mnt/small1"]}
    config["mounts"] = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    config["mounts"] += [
        {"destination": to, "type": "bind", "source": str(source), "options": ["rbind", "ro"]}
        for to, source in (("/usr", "/usr"), ("/mnt", view.path))
    ]
    config["linux"] = {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]}
    (place / "bundle/config.json").write_text(json.dumps(config))
    run = ("runc", "--root", place / "state", "run", "--bundle", place / "bundle", f"p2pdist-test-{os.getpid()}")
    assert output(*run) == view.files["weights"] + view.files["small1"]


READERS: dict[str, Callable[[View, Path], None]] = {
    "pread": part("sys.stdout.buffer.write(os.pread(fd, count, at))"),
    "mmap": part("import mmap; sys.stdout.buffer.write(mmap.mmap(fd, 0, prot=1)[at : at + count])"),
    "sendfile": part("while count: n = os.sendfile(1, fd, at, count); at += n; count -= n"),
    "splice": part("while count: n = os.splice(fd, 1, count, offset_src=at); at += n; count -= n"),
    "O_DIRECT": direct,
    "exec": executed,
    "dlopen": linked,
    "fork bomb": bomb,
    "many at once": many,
    "mount namespace": namespaced,
    "container": contained,
}


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_each_reader_gets_what_the_file_has(show: Show, reader: str, tmp_path: Path) -> None:
    view = show().serve()
    READERS[reader](view, tmp_path)
    assert view.asked or reader == "O_DIRECT", "nothing had to be filled for it"
    assert view.wrong() == []
