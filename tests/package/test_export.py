"""Self-mounting files and tars."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

from p2pdist.model.errors import P2PDistError, UsageError
from p2pdist.model.manifest import Config
from p2pdist.package.archive.export import (
    BLOCK,
    HOLE_BYTES_MIN,
    make_readable,
    new_file,
    write_tar,
    write_xar,
    xar_header,
)
from p2pdist.package.archive.import_ import unpack_source
from p2pdist.package.image.squashfs import build_image

GO = """#!/bin/sh
echo "$A|$P2PDIST_ROOT|$(pwd)|$*"
cat "$P2PDIST_ROOT/data"
exit 3
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    made = tmp_path / "tree"
    (made / "bin").mkdir(parents=True)
    (made / "sub dir").mkdir()
    (made / "bin/go").write_text(GO)
    (made / "bin/wait").write_text('#!/bin/sh\ntouch "$1"; read line; cat "$P2PDIST_ROOT/data"\n')
    (made / "bin/leave").write_text('#!/bin/sh\n(sleep 1.5; cat "$P2PDIST_ROOT/data" > "$1") >/dev/null 2>&1 &\n')
    for path in (made / "bin").iterdir():
        path.chmod(0o755)
    (made / "data").write_text("data\n")
    (made / "link").symlink_to("data")
    os.link(made / "data", made / "sub dir/again")
    for path in sorted(made.rglob("*")):
        os.utime(path, (1_600_000_000, 1_600_000_000), follow_symlinks=False)
    return made


def mounts(place: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {place}/" in line]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where self-mounting files mount; nothing stays mounted there."""
    made = tmp_path / "runtime"
    made.mkdir()
    yield made
    assert unmounted(made)


def unmounted(place: Path) -> bool:
    deadline = time.monotonic() + 60
    while mounts(place) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not mounts(place)


async def xar_of(tree: Path, output: Path, config: Config) -> Path:
    image = output.with_suffix(".image")
    await build_image(tree, image)
    write_xar(image, config, output)
    return output


def by_fuse(directory: Path) -> dict[str, str]:
    """An environment in which mount(8) is not to be had, so that squashfuse has to do."""
    directory.mkdir()
    for name in os.listdir("/usr/bin"):
        if name != "mount":
            (directory / name).symlink_to(f"/usr/bin/{name}")
    return {"PATH": str(directory)}


CONFIG = Config(
    ("go", "it's", "${P2PDIST_ROOT}/x", "$HOME `no`", ""), ("A=a 'b' \"c\" $d ${P2PDIST_ROOT}",), "/sub dir"
)


@pytest.mark.root
@pytest.mark.parametrize("way", ["kernel", "fuse"])
async def test_it_mounts_itself_and_runs(tree: Path, tmp_path: Path, place: Path, way: str) -> None:
    """With arguments, environment and working directory as p2pdist run has them, and the program's
    exit code."""
    if way == "fuse" and not (shutil.which("squashfuse") and os.access("/dev/fuse", os.W_OK)):
        pytest.skip("needs squashfuse")
    environ = {"PATH": "/usr/bin:/bin"} if way == "kernel" else by_fuse(tmp_path / "path")
    file = await xar_of(tree, tmp_path / "a program", CONFIG)
    done = subprocess.run(
        [file, "1", "2 3"], env={**environ, "XDG_RUNTIME_DIR": str(place)}, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (3, "")
    first, data = done.stdout.splitlines()
    value, root, directory, words = first.split("|")
    assert Path(root).parent == place / f"p2pdist-xar-{os.geteuid()}"
    assert value == f"a 'b' \"c\" $d {root}"
    assert directory == f"{root}/sub dir"
    assert words == f"it's {root}/x $HOME `no`  1 2 3"
    assert data == "data"
    assert unmounted(place)
    assert stat.S_IMODE(Path(root).parent.stat().st_mode) == 0o700


@pytest.mark.root
@pytest.mark.parametrize("shell", ["sh", "bash"])
async def test_a_shell_that_is_given_its_name_runs_it(tree: Path, tmp_path: Path, place: Path, shell: str) -> None:
    """sh FILE, which need not be executable, and not another program of that name in PATH."""
    file = await xar_of(tree, tmp_path / "program", Config(("echo", "this one")))
    file.chmod(0o644)
    (tmp_path / "bin").mkdir()
    await xar_of(tree, tmp_path / "bin/program", Config(("echo", "the other one", "x" * BLOCK)))
    environ = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "XDG_RUNTIME_DIR": str(place)}
    command = [shell, "program", "given"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "this one given\n", "")


@pytest.mark.root
async def test_runs_share_a_mount_until_the_last_ends(tree: Path, tmp_path: Path, place: Path) -> None:
    """Also what a program left behind counts, and a run after everything was taken away mounts
    again."""
    file = await xar_of(tree, tmp_path / "program", Config(("sh", "-c", 'exec "$@"', "sh")))
    environ = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(place)}
    running = []
    for number in range(3):
        started = tmp_path / f"started{number}"
        process = subprocess.Popen([file, "wait", started], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
        running.append(process)
        deadline = time.monotonic() + 60
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert started.exists()
    assert len(mounts(place)) == 1
    for process in running:
        assert len(mounts(place)) == 1
        out, _ = process.communicate(b"go\n", timeout=60)
        assert (process.returncode, out) == (0, b"data\n")
    assert unmounted(place)
    left = tmp_path / "left"
    subprocess.run([file, "leave", left], env=environ, check=True, timeout=60)
    assert len(mounts(place)) == 1
    assert unmounted(place)
    assert left.read_text() == "data\n"


CHILD = """#!/usr/bin/env python3
import os, subprocess, sys
os.chdir("/")
command = 'touch "$1.started"; sleep 1; cat "$P2PDIST_ROOT/data" > "$1.new" 2>&1; mv "$1.new" "$1"'
subprocess.Popen(["/bin/sh", "-c", command, "sh", sys.argv[1]], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
"""


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("how", ["environment", "in use"])
async def test_children_without_the_lock_keep_the_mount(tree: Path, tmp_path: Path, place: Path, how: str) -> None:
    """They are known by their environment; without it the mount stays while it is in use, and goes
    later."""
    text = (
        CHILD
        if how == "environment"
        else CHILD.replace("DEVNULL, stdout", 'DEVNULL, env={"P": os.environ["P2PDIST_ROOT"]}, stdout')
    )
    text = text if how == "environment" else text.replace("P2PDIST_ROOT/", "P/").replace("'touch", '\'cd "$P"; touch')
    (tree / "bin/child").write_text(text)
    (tree / "bin/child").chmod(0o755)
    file = await xar_of(tree, tmp_path / "program", Config(("child",)))
    environ = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(place)}
    left = tmp_path / "left"
    subprocess.run([file, left], env=environ, check=True, timeout=60)
    deadline = time.monotonic() + 60
    while not left.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left.read_text() == "data\n"
    assert unmounted(place)


@pytest.mark.root
async def test_no_variable_of_the_package_or_the_user_is_in_the_way(tree: Path, tmp_path: Path, place: Path) -> None:
    """Also those whose values look like parts of the script."""
    names = ("root", "lock", "user", "IFS", "P2PDIST_ROOT", "_")
    env = tuple(f"{name}=1@OFFSET@ @ID@ @ENVIRONMENT@" for name in names)
    file = await xar_of(tree, tmp_path / "program", Config(("${P2PDIST_ROOT}/bin/go", "@OFFSET@"), ("A=@ID@", *env)))
    environ = {
        "PATH": "/usr/bin:/bin",
        "XDG_RUNTIME_DIR": str(place),
        "P2PDIST_ROOT": "/",
        "place": "mine",
        "self": "me",
    }
    done = subprocess.run([file], env=environ, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (3, "")
    value, root, directory, words = done.stdout.splitlines()[0].split("|")
    assert (value, directory, words) == ("@ID@", root, "@OFFSET@")
    assert Path(root).parent.parent == place
    other = await xar_of(tree, tmp_path / "another", Config(("sh", "-c", 'echo "$place $self $root"'), ("root=mine",)))
    done = subprocess.run([other], env=environ, capture_output=True, text=True, timeout=30)
    assert done.stdout == "mine me mine\n"


@pytest.mark.root
async def test_many_runs_at_once(tree: Path, tmp_path: Path, place: Path) -> None:
    """None of them finds the mount gone."""
    file = await xar_of(tree, tmp_path / "program", Config(("go",)))
    environ = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(place)}
    for _ in range(3):
        running = [subprocess.Popen([file], env=environ, stdout=subprocess.PIPE) for _ in range(12)]
        for process in running:
            out, _ = process.communicate(timeout=30)
            assert process.returncode == 3
            assert out.endswith(b"data\n")


@pytest.mark.root
async def test_a_directory_of_somebody_else_is_not_used(tree: Path, tmp_path: Path, place: Path) -> None:
    file = await xar_of(tree, tmp_path / "program", Config(("go",)))
    target = place / f"p2pdist-xar-{os.geteuid()}"
    environ = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(place)}
    (tmp_path / "elsewhere").mkdir()
    target.symlink_to(tmp_path / "elsewhere")
    done = subprocess.run([file], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "not a directory of this user" in done.stderr
    target.unlink()
    target.mkdir()
    os.chown(target, 12345, 12345)
    done = subprocess.run([file], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "not a directory of this user" in done.stderr


@pytest.mark.root
@pytest.mark.parametrize(
    "owner, mode, where", [(12345, 0o700, ""), (0, 0o777, ""), (0, 0o775, ""), (0, 0o700, "theirs")]
)
async def test_a_mount_is_where_no_other_user_can_rename_it(
    tree: Path, tmp_path: Path, place: Path, owner: int, mode: int, where: str
) -> None:
    """XDG_RUNTIME_DIR may be the directory of another user, or below one; root then uses /run."""
    file = await xar_of(tree, tmp_path / "program", Config(("go", str(tmp_path))))
    theirs = place / "theirs"
    theirs.mkdir(mode=0o755)
    os.chown(theirs, 12345 if where else 0, -1)
    runtime = theirs / "runtime"
    runtime.mkdir()
    runtime.chmod(mode)
    os.chown(runtime, owner, -1)
    (place / "link").symlink_to(runtime)
    for named in (runtime, place / "link"):
        done = subprocess.run(
            [file], env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(named)}, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (3, "")
        assert Path(done.stdout.split("|")[1]).parent == Path("/run/p2pdist-xar-0")
    assert not any(runtime.iterdir())
    assert unmounted(Path("/run/p2pdist-xar-0"))


@pytest.mark.root
async def test_no_program_of_the_host_runs_in_place_of_the_package_s(tmp_path: Path, place: Path) -> None:
    """One that cannot start is named; absolute paths, links, first lines and PATH of an image lead
    into it."""
    tree, host = tmp_path / "root", tmp_path / "host"
    for directory in (tree / "bin", tree / "opt/bin", host):
        directory.mkdir(parents=True)
    says = '#!/bin/sh\necho "{} ${{0##*/}} $*"\n'
    texts = {
        "bin/lost": "#!/build/python3\n",
        "bin/sleepy": "#!/usr/bin/env gone\n",
        "bin/split": "#!/usr/bin/env -S gone -u\n",
    }
    texts |= {"bin/plain": "", "opt/bin/tool": says.format("package"), "opt/bin/script": "#!/opt/bin/tool -x y\n"}
    for name, text in texts.items():
        (tree / name).write_text(text)
        (tree / name).chmod(0o644 if name == "bin/plain" else 0o755)
    (tree / "bin/gone").symlink_to("/build/python3")
    (tree / "bin/directory").mkdir()
    (tree / "bin/linked").symlink_to("/opt/bin/tool")
    for name in ("lost", "sleepy", "split", "plain", "gone", "directory", "tool", "linked", "other"):
        (host / name).write_text(says.format("host"))
        (host / name).chmod(0o755)
    file = await xar_of(tree, tmp_path / "app", Config((), (f"PATH=/opt/bin:{host}:/usr/bin:/bin",)))

    def run(*words: str) -> tuple[int, str, str]:
        environ = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(place)}
        done = subprocess.run([file, *words], env=environ, capture_output=True, text=True, timeout=30, check=False)
        return done.returncode, done.stdout, done.stderr

    for name, reason in {
        "lost": "is a script for /build/python3, which does not exist",
        "sleepy": "bin/gone is a link to a file that does not exist",
        "split": "bin/gone is a link to a file that does not exist",
        "gone": "is a link to a file that does not exist",
        "plain": "may not be executed",
        "directory": "is not a program",
    }.items():
        for words in (name, f"bin/{name}", f"/bin/{name}"):
            code, said, complained = run(words)
            assert (code, said) == (1, "")
            assert reason in complained
    assert run("tool", "a b") == (0, "package tool a b\n", "")
    assert run("/opt/bin/tool") == run("linked") == (0, "package tool \n", "")
    code, said, _ = run("/opt/bin/script", "z")
    assert said.startswith("package tool -x y /") and said.endswith("/opt/bin/script z\n")
    assert run("other") == (0, "host other \n", "")


async def test_equal_packages_give_equal_files(tree: Path, tmp_path: Path) -> None:
    """Which begin with whole blocks of script, and hold the image behind it."""
    first = await xar_of(tree, tmp_path / "first", CONFIG)
    second = await xar_of(tree, tmp_path / "second", CONFIG)
    assert first.read_bytes() == second.read_bytes()
    assert os.access(first, os.X_OK)
    assert first.read_bytes()[2 * BLOCK : 2 * BLOCK + 4] == b"hsqs"
    other = await xar_of(tree, tmp_path / "other", Config(("go",)))
    assert other.read_bytes()[:BLOCK] != first.read_bytes()[:BLOCK]


def test_long_settings_take_more_blocks() -> None:
    header = xar_header(Config(("go", "x" * 7_000)), "id")
    assert len(header) == 4 * BLOCK
    assert b"offset=16384" in header
    assert len(xar_header(Config(("go",)), "id")) == 2 * BLOCK
    with pytest.raises(UsageError):
        xar_header(Config(("go", "x" * (1 << 20))), "id")
    with pytest.raises(UsageError, match="outside"):
        xar_header(Config(("go",), working_dir="../up"), "id")
    with pytest.raises(UsageError, match="A-B"):
        xar_header(Config(("go",), ("A-B=1",)), "id")


def test_a_tar_is_in_order_and_the_same_each_time(tree: Path, tmp_path: Path) -> None:
    out = BytesIO()
    assert write_tar(tree, out) == 8
    with tarfile.open(fileobj=BytesIO(out.getvalue())) as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == [
        "bin", "bin/go", "bin/leave", "bin/wait", "data", "link", "sub dir", "sub dir/again",
    ]  # fmt: skip
    assert {(member.uid, member.gid, member.uname, member.mtime) for member in members} == {(0, 0, "", 1_600_000_000)}
    assert (members[5].linkname, members[7].linkname) == ("data", "data")
    assert members[7].islnk() and members[1].mode == 0o755
    shutil.copytree(tree, tmp_path / "copy", symlinks=True)
    (tmp_path / "copy/sub dir/again").unlink()
    os.link(tmp_path / "copy/data", tmp_path / "copy/sub dir/again")
    os.utime(tmp_path / "copy/sub dir", (1_600_000_000, 1_600_000_000))
    again = BytesIO()
    write_tar(tmp_path / "copy", again)
    assert again.getvalue() == out.getvalue()


def test_times_and_attributes_come_back_from_a_tar(tmp_path: Path) -> None:
    """A time before 1970 is no time in the header of old; pax records hold it, and attributes."""
    made = tmp_path / "made"
    (made / "directory").mkdir(parents=True)
    times = {"early": -86_400 * 10**9 - 1, "first": -1, "epoch": 0, "late": 2**33 * 10**9 + 5}
    for name, time_ns in times.items():
        (made / name).touch()
        os.utime(made / name, ns=(time_ns, time_ns))
    attributes = {"user.plain": b"value", "user.a=b%": b"\xff\0\n", "user.empty": b""}
    try:
        for name, value in attributes.items():
            os.setxattr(made / "early", name, value)
            os.setxattr(made / "directory", name, value)
    except OSError:
        attributes = {}
    with (tmp_path / "tar").open("wb") as file:
        write_tar(made, file)
    (tmp_path / "work").mkdir()
    unpacked = unpack_source(tmp_path / "tar", tmp_path / "work")
    assert (unpacked.notes, unpacked.seen.dropped) == ((), [])
    assert {name: (unpacked.root / name).stat().st_mtime_ns for name in times} == times
    for name in ("early", "directory"):
        file = unpacked.root / name
        assert {key: os.getxattr(file, key) for key in os.listxattr(file) if key.startswith("user.")} == attributes


def test_an_output_that_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    """-o of a FIFO or /dev/stdout must not put a file in its place; a link is followed."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "fifo link").symlink_to("fifo")
    reader = subprocess.Popen(["cat", tmp_path / "fifo"], stdout=subprocess.PIPE)
    with new_file(tmp_path / "fifo link", needed=3, mode=0o666) as file:
        file.write(b"new")
    assert reader.communicate(timeout=20)[0] == b"new"
    assert (tmp_path / "fifo").is_fifo()
    with new_file(tmp_path / "link", needed=3, mode=0o666) as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


@pytest.mark.root
def test_what_is_killed_leaves_nothing_of_its_output(tmp_path: Path) -> None:
    """A file system without unnamed files would keep a part, under another name."""
    script = (
        "import os, signal, pathlib; from p2pdist.package.archive.export import new_file\n"
        f"with new_file(pathlib.Path({str(tmp_path / 'out')!r}), needed=1, mode=0o666) as file:\n"
        "    file.write(b'x' * 100_000); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_an_output_may_have_the_longest_name(tmp_path: Path) -> None:
    output = tmp_path / ("x" * 255)
    for data in (b"first", b"second"):
        with new_file(output, needed=len(data), mode=0o640) as file:
            file.write(data)
        assert (output.read_bytes(), list(tmp_path.iterdir())) == (data, [output])
    assert stat.S_IMODE(output.stat().st_mode) == 0o640
    with pytest.raises(ZeroDivisionError), new_file(output, needed=1, mode=0o666) as file:
        raise ZeroDivisionError
    assert (output.read_bytes(), list(tmp_path.iterdir())) == (b"second", [output])


def test_an_output_that_is_a_device_stays_one(tmp_path: Path) -> None:
    full = tmp_path / "full"
    os.mknod(full, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
    with pytest.raises(P2PDistError, match="No space left"), new_file(full, needed=3, mode=0o666) as file:
        file.write(b"new")
    assert full.is_char_device()


def holed(path: Path, parts: dict[int, bytes], size: int) -> None:
    with path.open("wb") as file:
        for begin, data in parts.items():
            file.seek(begin)
            file.write(data)
        file.truncate(size)


HOLED: dict[str, tuple[dict[int, bytes], int]] = {
    "between": ({0: b"begin", 50 << 20: b"end"}, (50 << 20) + 3),
    "at the end": ({5000: b"x" * 5000}, 3 << 30),
    "at the beginning": ({(1 << 40) - 7: b"at last"}, 1 << 40),
    "nothing else": ({}, 1 << 40),
    "short": ({0: b"a", 900_000: b"b"}, 1_800_000),
    "just long enough": ({0: b"a", HOLE_BYTES_MIN + 4096: b"b"}, HOLE_BYTES_MIN + 5000),
    "many": ({number * (2 << 20) + number: b"%d" % number for number in range(1000)}, 3 << 30),
}


@pytest.mark.parametrize("reader", ["tar", "import"])
def test_holes_stay_holes_in_a_tar(tmp_path: Path, reader: str) -> None:
    """Written in the room that the content takes, and read by GNU tar and by import."""
    tree, out = tmp_path / "tree", tmp_path / "out"
    (tree / "sub").mkdir(parents=True)
    out.mkdir()
    for name, (parts, size) in HOLED.items():
        holed(tree / "sub" / f"{name} \udce9", parts, size)
    with (tmp_path / "a.tar").open("wb") as file:
        write_tar(tree, file)
    assert (tmp_path / "a.tar").stat().st_size < 8 << 20
    if reader == "tar":
        subprocess.run(["tar", "-xf", tmp_path / "a.tar", "-C", out], check=True)
    else:
        out = unpack_source(tmp_path / "a.tar", out).root
    for name, (parts, size) in HOLED.items():
        made = out / "sub" / f"{name} \udce9"
        assert made.stat().st_size == size
        assert made.stat().st_blocks * 512 < 8 << 20
        with made.open("rb") as file:
            for begin, data in parts.items():
                file.seek(max(0, begin - 10))
                assert file.read(min(begin, 10) + len(data)) == bytes(min(begin, 10)) + data


def test_how_a_file_is_stored_leaves_no_mark_in_a_tar(tmp_path: Path) -> None:
    parts = {0: b"a", 3 << 20: b"b", (5 << 20) + 100: b"c", 7 << 20: bytes(5000)}
    tars = []
    for name in ("holes", "zeros"):
        (tmp_path / name).mkdir()
        holed(tmp_path / name / "file", parts, 9 << 20)
        if name == "zeros":
            data = (tmp_path / name / "file").read_bytes()
            (tmp_path / name / "file").write_bytes(data)
        os.utime(tmp_path / name / "file", (1, 1))
        out = BytesIO()
        write_tar(tmp_path / name, out)
        tars.append(out.getvalue())
    assert tars[0] == tars[1]
    assert len(tars[0]) < 1 << 20


def test_what_its_owner_may_not_read_keeps_its_mode_in_a_tar(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "d/e").mkdir(parents=True)
    for name, mode in (("a", 0), ("b", 0o111), ("d/f", 0o200), ("c", 0o644)):
        (tree / name).write_text(name)
        (tree / name).chmod(mode)
    os.link(tree / "a", tree / "z")
    (tree / "d").chmod(0o311)
    (tree / "d/e").chmod(0)
    modes = make_readable(tree)
    assert modes == {b"a": 0, b"b": 0o111, b"d": 0o311, b"d/e": 0, b"d/f": 0o200, b"z": 0}
    assert all(path.stat().st_mode & 0o400 for path in tree.rglob("*"))
    out = BytesIO()
    write_tar(tree, out, modes=modes)
    with tarfile.open(fileobj=BytesIO(out.getvalue())) as archive:
        assert {member.name: member.mode for member in archive} == {
            "a": 0, "b": 0o111, "c": 0o644, "d": 0o311, "d/e": 0, "d/f": 0o200, "z": 0,
        }  # fmt: skip


@pytest.mark.root
def test_a_tar_is_the_same_whoever_writes_it(entered_path: Path) -> None:
    """Files of a tree may be written to by their owner, also where another user exports them. Equal
    files stay files of their own, as in --reproducible packages, where all have one time."""
    (entered_path / "source").mkdir()
    for name in ("equal", "file"):
        (entered_path / "source" / name).write_text("data")
        (entered_path / "source" / name).chmod(0o644)
        os.utime(entered_path / "source" / name, (1, 1))
    (entered_path / "source/link").hardlink_to(entered_path / "source/file")
    command = [sys.executable, "-m", "p2pdist"]
    layout = ["--layout", str(entered_path / "layout")]
    subprocess.run(
        [*command, "pack", entered_path / "source", "-t", "a:1", "--format", "tree", *layout], check=True, timeout=60
    )
    for path in (entered_path, entered_path / "layout", *(entered_path / "layout").rglob("*")):
        os.chown(path, 65534, 65534)
    tars = []
    for user in (0, 65534):
        output = entered_path / f"{user}.tar"
        words = ["export", "a:1", "--tar", "-o", str(output), *layout]
        subprocess.run([*command, *words], user=user, group=user, extra_groups=[], check=True, timeout=60)
        tars.append(output.read_bytes())
    assert tars[0] == tars[1]
    with tarfile.open(entered_path / "0.tar") as archive:
        assert [(member.name, member.linkname) for member in archive] == [("equal", ""), ("file", ""), ("link", "file")]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("closed", ["directory", "mount point"])
def test_a_file_whose_place_none_can_take_is_written_to(tmp_path: Path, closed: str) -> None:
    """As in containers: a directory that may only be read, and a file that is mounted."""
    (tmp_path / "place").mkdir()
    for name in ("place/out", "other"):
        (tmp_path / name).write_text("before, and longer")
    script = "import sys; from pathlib import Path; from p2pdist.package.archive.export import new_file\n"
    script += "with new_file(Path(sys.argv[1]), needed=5, mode=0o666) as file: file.write(b'after')"
    mount = f"mount --bind {tmp_path}/other {tmp_path}/place/out"
    if closed == "directory":
        mount += f"; mount --bind {tmp_path}/place {tmp_path}/place; mount -o remount,ro,bind {tmp_path}/place"
        mount += f"; {mount.split(';')[0]}"
    words = ["unshare", "-m", "sh", "-ec", f'{mount}; exec "$@"', "sh", sys.executable, "-c", script]
    subprocess.run([*words, tmp_path / "place/out"], check=True)
    assert (tmp_path / "other").read_text() == "after"
    assert os.listdir(tmp_path / "place") == ["out"]
