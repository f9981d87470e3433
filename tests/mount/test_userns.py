"""Without root: a package shown to one program in a user namespace, and unpacked."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from unprivileged import NOBODY, as_nobody

Layer = Callable[..., Path]

pytestmark = [
    pytest.mark.root,  # to become somebody else
    pytest.mark.skipif(shutil.which("squashfuse") is None, reason="needs squashfuse: apt-get install squashfuse fuse3"),
]

_RUN = """
import os, sys
from pathlib import Path
from p2pdist.model.errors import P2PDistError
from p2pdist.mount.program import Program
from p2pdist.mount.userns import run_inside

def describe(root):
    return Program(tuple(sys.argv[2].split("\x1f")), {**os.environ, "ROOT": str(root)}, str(root))

try:
    code = run_inside([Path(name) for name in sys.argv[3:]], describe, writable=sys.argv[1] == "writable",
                      announce=lambda line: print(line, flush=True))
except P2PDistError as error:
    print(type(error).__name__, error)
    sys.exit(99)
sys.exit(code)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of NOBODY's, for its temporary files too, that is empty but for what a test puts
    there."""
    path = Path(tempfile.mkdtemp(prefix="p2pdist-test-", dir="/tmp"))
    path.chmod(0o755)
    for name in ("hold", "home"):
        (path / name).mkdir()
    os.chown(path / "home", NOBODY, NOBODY)
    yield path
    shutil.rmtree(path)


def command(place: Path, images: list[Path], script: str, *, writable: bool = False, fuse: bool = True) -> list[str]:
    """The command that runs a shell script with the view of `images` in front of it."""
    copies = [shutil.copy(image, place / image.name) for image in images]
    mode = "writable" if writable else "read-only"
    return as_nobody(place / "hold", sys.executable, "-c", _RUN, mode, f"sh\x1f-c\x1f{script}", *copies, fuse=fuse)


def run_script(
    place: Path, images: list[Path], script: str, *, writable: bool = False, fuse: bool = True
) -> tuple[int, str]:
    """Exit code and output of such a script."""
    done = subprocess.run(
        command(place, images, script, writable=writable, fuse=fuse),
        env={**os.environ, "TMPDIR": str(place / "home")},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def fuse_processes(place: Path) -> list[str]:
    """squashfuse processes that serve images of `place`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "squashfuse" in text.split(" ")[0] and str(place) in text:
            found.append(text)
    return found


def test_a_program_sees_the_merged_view(place: Path, layer: Layer) -> None:
    """App over base, whiteouts hide; the program is the user it was, has no rights, and its exit
    code comes through."""
    images = [layer("base", {"a": "base", "b": "base", "gone": "x"}), layer("app", {"a": "app", "gone": "whiteout"})]
    code, said = run_script(
        place, images, "cat a b; ls | xargs; id -u; test $PWD = $ROOT; umount $ROOT 2>/dev/null || exit 7"
    )
    lines = said.splitlines()
    assert lines[0].startswith("userns: not root, 2 layers")
    assert lines[1:] == ["appbasea b", str(NOBODY)], said
    assert code == 7
    assert not list((place / "home").iterdir())
    assert not fuse_processes(place)


def test_one_layer_needs_no_overlay(place: Path, layer: Layer) -> None:
    """Read-only, straight from squashfuse."""
    assert run_script(place, [layer("l", {"a": "1"})], "cat a; touch a 2>/dev/null || exit 3")[0] == 3


def test_sixty_layers(place: Path, layer: Layer) -> None:
    """Sixty squashfuse processes come up and go."""
    images = [layer(f"l{number}", {f"f{number}": "x"}) for number in range(60)]
    code, said = run_script(place, images, "ls | wc -l")
    assert (code, said.splitlines()[1:]) == (0, ["60"])
    assert not fuse_processes(place)


@pytest.mark.parametrize("count", [1, 2])
def test_a_writable_view_forgets(place: Path, layer: Layer, count: int) -> None:
    """Writing, replacing and removing work; afterwards nothing of it is left."""
    images = [layer("base", {"a": "1", "d/x": "1"}), layer("app", {"b": "2"})][:count]
    code, said = run_script(place, images, "echo new > a; rm -r d; echo y > c; cat a; ls | xargs", writable=True)
    assert (code, said.splitlines()[1]) == (0, "new"), said
    assert not list((place / "home").iterdir())


def test_what_does_not_work_here_is_said(place: Path, layer: Layer) -> None:
    """A closed /dev/fuse is unavailable; a program that does not exist, and a damaged image, are
    named. A directory in PATH that may not be searched changes nothing."""
    image = layer("l", {"a": "1"})
    if not os.stat("/dev/fuse").st_mode & 0o002:
        code, said = run_script(place, [image], "true", fuse=False)
        assert (code, said.split()[0]) == (99, "Unavailable")
        assert "/dev/fuse" in said
    argv = as_nobody(place / "hold", sys.executable, "-c", _RUN, "x", "no-such-program", shutil.copy(image, place))
    closed = place / "closed"
    closed.mkdir(mode=0o000)
    env = {**os.environ, "TMPDIR": str(place / "home"), "PATH": f"{closed}:{os.environ['PATH']}"}
    done = subprocess.run(argv, env=env, cwd="/", capture_output=True, text=True)
    assert done.returncode == 99
    assert "NotFound no-such-program" in done.stdout
    assert not list((place / "home").iterdir())


@pytest.mark.parametrize("damage", ["garbage", "tables"])
def test_a_damaged_image_stops_it_before_the_program(place: Path, layer: Layer, damage: str) -> None:
    """What is no squashfs is corrupt; one that squashfuse cannot read is unavailable this way.
    Nothing stays."""
    image = layer("l", {"a": "1"})
    data = image.read_bytes()
    image.chmod(0o644)
    image.write_bytes(os.urandom(9000) if damage == "garbage" else data[:96] + bytes(len(data) - 96))
    code, said = run_script(place, [layer("good", {"b": "1"}), image], "echo ran")
    assert code == 99
    assert "ran" not in said.split()
    assert ("Corrupt" if damage == "garbage" else "Unavailable") in said
    assert not list((place / "home").iterdir())
    assert not fuse_processes(place)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_program_inside(place: Path, layer: Layer, number: signal.Signals) -> None:
    """Through the guardian, once."""
    script = f"n=0; trap 'n=$((n+1))' {number.name[3:]}; echo ready; i=0; while [ $i -lt 10 ]; do sleep 0.05; i=$((i+1)); done; exit $n"
    runner = subprocess.Popen(
        command(place, [layer("l", {"a": "1"})], script),
        env={**os.environ, "TMPDIR": str(place / "home")},
        cwd="/",
        stdout=subprocess.PIPE,
    )
    assert runner.stdout is not None
    with runner.stdout:
        runner.stdout.readline()
        assert runner.stdout.readline() == b"ready\n"
        runner.send_signal(number)
        assert runner.wait(60) == 1
    assert not list((place / "home").iterdir())


def test_ctrl_c_leaves_the_view_to_the_program(place: Path, layer: Layer) -> None:
    """A terminal's signal ends neither squashfuse nor us: the program may still read, and
    decides."""
    script = "trap 'cat a; exit 5' INT; echo ready; while :; do sleep 0.05; done"
    argv = command(place, [layer("l", {"a": "still here"})], script)
    pid, terminal = os.forkpty()
    if pid == 0:
        os.chdir("/")
        os.execvpe(argv[0], argv, {**os.environ, "TMPDIR": str(place / "home")})
    said = b""
    try:
        while b"ready" not in said:
            said += os.read(terminal, 1000)
        os.write(terminal, b"\x03")
        while b"still here" not in said:
            said += os.read(terminal, 1000)  # OSError when all of it has ended
    except OSError as error:
        pytest.fail(f"the program could not read: {error}, {said!r}")
    finally:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        os.close(terminal)
    assert not list((place / "home").iterdir())


def guardian(parent: int) -> int:
    """The child of `parent`."""
    return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])


@pytest.mark.parametrize("who", ["caller", "guardian"])
def test_when_one_is_killed_all_of_it_ends(place: Path, layer: Layer, who: str) -> None:
    """kill -9 of the process that asked, or of the one in between, ends the program and every
    squashfuse; the kernel removes the mounts."""
    runner = subprocess.Popen(
        command(place, [layer("l", {"a": "1"}), layer("m", {"b": "1"})], "echo ready; exec sleep 60"),
        env={**os.environ, "TMPDIR": str(place / "home")},
        cwd="/",
        stdout=subprocess.PIPE,
    )
    assert runner.stdout is not None
    with runner.stdout:
        runner.stdout.readline()
        assert runner.stdout.readline() == b"ready\n"
        assert len(fuse_processes(place)) == 2
        os.kill(runner.pid if who == "caller" else guardian(runner.pid), signal.SIGKILL)
        runner.wait(60)
        deadline = time.monotonic() + 60
        while fuse_processes(place) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not fuse_processes(place)
        runner.communicate(timeout=60)  # which waits until the program no longer has our output open


_SHOW = """
import sys
from pathlib import Path
from p2pdist.model.errors import P2PDistError
from p2pdist.mount.views import mount_view, unmount_view
work, target = Path(sys.argv[1]) / "records", Path(sys.argv[1]) / "view"
work.mkdir()
try:
    done = mount_view([Path(name) for name in sys.argv[2:]], target, work=work)
except P2PDistError as error:
    print(type(error).__name__, error)
    sys.exit(99)
print(done.method, "|", done.why)
print(*sorted(f"{path.name}={path.read_text()}" for path in target.rglob("*") if path.is_file()))
unmount_view(target, work=work)
print(target.exists(), list(work.iterdir()))
"""


def show_as_nobody(place: Path, images: list[Path]) -> tuple[int, list[str]]:
    copies = [shutil.copy(image, place / image.name) for image in images]
    argv = as_nobody(place / "hold", sys.executable, "-c", _SHOW, place / "home", *copies)
    done = subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=60)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_without_root_a_package_is_unpacked(place: Path, layer: Layer) -> None:
    """Whiteouts, which only root could create as files, hide all the same; closed directories are
    merged and removed."""
    base = layer("base", {"a": "1", "gone": "1", "closed/x": "1"}, "closed m 555 0 0")
    app = layer("app", {"b": "2", "gone": "whiteout", "closed/y": "2"}, "closed m 555 0 0", "null c 666 0 0 1 3")
    code, said = show_as_nobody(place, [base, app])
    assert code == 0, said
    assert said[0].startswith("unpack | unpack: not root")
    assert said[1:] == ["a=1 b=2 x=1 y=2", "False []"]
    assert [path.name for path in (place / "home").iterdir()] == ["records"]


def test_attributes_that_only_root_can_read_are_refused(place: Path, layer: Layer) -> None:
    """An upper layer with extended attributes may hide things by them: no view rather than a wrong
    one."""
    source = place / "upper"
    (source / "d").mkdir(parents=True)
    try:
        os.setxattr(source / "d", "trusted.overlay.opaque", b"y")
    except OSError as error:
        pytest.skip(f"the temporary directory keeps no trusted attributes: {error}")
    image = place / "upper.squashfs"
    subprocess.run(["mksquashfs", source, image, "-quiet", "-no-progress", "-xattrs"], check=True, capture_output=True)
    (place / "moved").mkdir()
    shutil.move(image, place / "moved" / image.name)
    code, said = show_as_nobody(place, [layer("base", {"d/old": "1"}), place / "moved" / image.name])
    assert code == 99
    assert "extended attributes" in said[0]
