"""Which file runs: that of the package where it has one, else the host's; never the host's in place
of one that cannot start."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pdist.model.errors import NotFound, P2PDistError
from p2pdist.model.manifest import Config
from p2pdist.mount.executable import Search
from p2pdist.mount.program import program, run

Given = dict[str, str | bytes | tuple[str, str] | None]


class Stage:
    """A package at `root` and directories of this host, where every program says which one it
    is."""

    def __init__(self, place: Path) -> None:
        self.root, self.host, self.said = place / "root", place / "host", place / "said"
        for directory in (self.root, self.host):
            directory.mkdir()

    def host_has(self, *names: str) -> None:
        for name in names:
            self.put(self.host / name, f"#!/bin/sh\necho host {name} > {self.said}\n")

    def put(self, path: Path, text: str | bytes, mode: int = 0o755) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(mode)

    def pack(self, name: str, text: str | bytes = "", mode: int = 0o755) -> None:
        """A file of the package; without text a script that says who it is and what it was
        given."""
        self.put(self.root / name, text or f'#!/bin/sh\necho "package {name} ${{0##*/}} $*" > {self.said}\n', mode)

    def link(self, name: str, target: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).symlink_to(target)

    def run(self, *words: str, entrypoint: tuple[str, ...] = (), env: tuple[str, ...] = (), cwd: str = "") -> str:
        """What the program said of itself."""
        self.said.unlink(missing_ok=True)
        environ = {"PATH": f"{self.host}:/usr/bin:/bin"}
        code = run(program(Config(entrypoint, env, cwd), words, root=self.root, environ=environ))
        assert code == 0
        return self.said.read_text().strip()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    made = Stage(tmp_path)
    made.host_has("tool", "python3")
    return made


def elf(loader: bytes = b"/lib/ld-of-elsewhere.so.1", machine: int = 62) -> bytes:
    """The head of a program of 64 bits with one program header, PT_INTERP (elf(5))."""
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += (2).to_bytes(2, "little") + machine.to_bytes(2, "little") + (1).to_bytes(4, "little")
    header += (0x1000).to_bytes(8, "little") + (64).to_bytes(8, "little") + bytes(8) + bytes(4)
    header += b"".join(value.to_bytes(2, "little") for value in (64, 56, 1, 0, 0, 0))
    words = (120, 0, 0, len(loader) + 1, len(loader) + 1, 1)
    header += (3).to_bytes(4, "little") + (4).to_bytes(4, "little")
    return header + b"".join(value.to_bytes(8, "little") for value in words) + loader + b"\0"


BROKEN: dict[str, tuple[Callable[[Stage], None], type[P2PDistError], str]] = {
    "script of a lost interpreter": (
        lambda s: s.pack("bin/tool", "#!/build/venv/bin/python3\n"),
        NotFound,
        "script for /build/venv/bin/python3, which does not exist",
    ),
    "dangling link": (lambda s: s.link("bin/tool", "/build/cpython/bin/tool"), NotFound, "link to /build/cpython"),
    "dangling through a link": (
        lambda s: (s.link("bin/tool", "tool3"), s.link("bin/tool3", "../lost/tool"))[0],
        NotFound,
        "link to ../lost/tool",
    ),
    "link to itself": (lambda s: s.link("bin/tool", "tool"), NotFound, "does not exist"),
    "env and a dangling interpreter": (
        lambda s: (s.pack("bin/tool", "#!/usr/bin/env python3\n"), s.link("bin/python3", "/build/python3"))[0],
        NotFound,
        "bin/tool is a script, and .*bin/python3 cannot be run: it is a link to /build/python3",
    ),
    "env -S and a dangling interpreter": (
        lambda s: (s.pack("bin/tool", "#!/usr/bin/env -S python3 -u\n"), s.link("bin/python3", "/build/python3"))[0],
        NotFound,
        "link to /build/python3",
    ),
    "env -S, a variable and a dangling interpreter": (
        lambda s: (s.pack("bin/tool", "#!/usr/bin/env -S A=1 python3\n"), s.link("bin/python3", "/build/python3"))[0],
        NotFound,
        "link to /build/python3",
    ),
    "not executable": (lambda s: s.pack("bin/tool", "#!/bin/sh\n", 0o644), P2PDistError, "may not execute it"),
    "a directory": (lambda s: (s.root / "bin" / "tool").mkdir(parents=True), P2PDistError, "it is a directory"),
    "no first line": (lambda s: s.pack("bin/tool", "echo me\n"), P2PDistError, "neither a program nor a script"),
    "empty": (lambda s: (s.pack("bin/tool"), (s.root / "bin/tool").write_text(""))[0], P2PDistError, "neither a"),
    "another processor": (lambda s: s.pack("bin/tool", elf(machine=0xFEED)), P2PDistError, "another processor"),
    "no loader": (lambda s: s.pack("bin/tool", elf()), NotFound, "loader /lib/ld-of-elsewhere.so.1 does not exist"),
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("named", ["tool", "bin/tool", "${P2PDIST_ROOT}/bin/tool", "/bin/tool"])
def test_a_program_that_cannot_start_is_named(stage: Stage, how: str, named: str) -> None:
    """The host has programs of the same names in PATH; none of them runs."""
    make, kind, words = BROKEN[how]
    make(stage)
    with pytest.raises(kind, match=words) as failed:
        stage.run(named)
    assert type(failed.value) is kind
    assert failed.value.remedy
    assert not stage.said.exists()


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may search every directory")
def test_a_directory_that_may_not_be_searched_is_said(stage: Stage) -> None:
    """The package's own bin: without the right to look, nobody knows whether the program is
    there."""
    stage.pack("bin/tool")
    script = (
        "import sys; from pathlib import Path\n"
        "from p2pdist.model.manifest import Config; from p2pdist.mount.program import program, run\n"
        "path = sys.argv[1]; (Path(path) / 'bin').chmod(0)\n"
        "if __import__('os').geteuid() == 0: __import__('os').setresuid(65534, 65534, 65534)\n"
        "run(program(Config(), ['tool'], root=Path(path), environ={'PATH': '/usr/bin'}))"
    )
    for directory in (stage.root, *stage.root.parents):
        if directory != Path("/") and directory.stat().st_uid == os.geteuid():
            directory.chmod(directory.stat().st_mode | 0o011)
    done = subprocess.run([sys.executable, "-c", script, stage.root], capture_output=True, text=True, check=False)
    (stage.root / "bin").chmod(0o755)
    assert "may not be searched by this user" in done.stderr


def test_what_the_package_lacks_is_the_host_s(stage: Stage) -> None:
    """In PATH, by an absolute path, and behind a link or first line of the package's that names
    it."""
    assert stage.run("tool") == "host tool"
    assert stage.run(str(stage.host / "tool")) == "host tool"
    stage.link("bin/other", str(stage.host / "tool"))
    assert stage.run("other") == "host tool"
    stage.pack("bin/script", f"#!{stage.host}/tool\n")
    assert stage.run("script") == "host tool"
    with pytest.raises(NotFound, match="neither the package nor PATH of this host has a program of that name"):
        stage.run("nothing-of-that-name")
    with pytest.raises(NotFound, match=r"working directory .*/gone does not exist"):
        stage.run("tool", cwd="/gone")


@pytest.mark.parametrize("named", ["tool", "/usr/local/bin/tool", "/opt/tool"])
def test_an_image_s_program_is_its_own(stage: Stage, named: str) -> None:
    """PATH, absolute paths, absolute links and first lines of a package that was made as a root
    lead to what is in it."""
    env = (f"PATH=/usr/local/bin:{stage.host}:/usr/bin:/bin",)
    stage.pack("usr/local/bin/tool")
    stage.link("opt", "/usr/local/bin")  # as absolute as in the image
    assert stage.run("a b", entrypoint=(named,), env=env, cwd="/opt/..") == "package usr/local/bin/tool tool a b"


def test_an_image_s_links_and_interpreters_are_its_own(stage: Stage) -> None:
    """A program behind an absolute link is called by the name of the link; a script's interpreter
    is given option and script."""
    stage.pack("bin/busybox", elf())
    stage.link("bin/applet", "/bin/busybox")
    found = Search({"PATH": f"{stage.root}/bin"}, str(stage.root), str(stage.root)).executable(["applet", "x"])
    assert (found.path, found.argv) == (f"{stage.root}/bin/busybox", (f"{stage.root}/bin/applet", "x"))
    stage.pack("usr/bin/interpreter")
    stage.pack("app/main", "#!/usr/bin/interpreter -x y\n")
    stage.host_has("interpreter")
    assert stage.run("/app/main", "z").endswith(f"interpreter -x y {stage.root}/app/main z")
    stage.pack("app/second", "#!/usr/bin/env interpreter\n")
    env = (f"PATH=/usr/bin:{stage.host}:/bin",)
    assert stage.run("/app/second", env=env).endswith(f"interpreter {stage.root}/app/second")


def test_a_link_out_of_the_package_ends_at_its_root(stage: Stage) -> None:
    """`..` beyond the root stays there, as it does in an image."""
    stage.pack("lib/tool")
    stage.link("bin/tool", "../../../../../../../../lib/tool")
    assert stage.run("tool").startswith("package lib/tool")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_the_caller_ignores_the_program_ignores(number: signal.Signals) -> None:
    """As under nohup(1), and in the background of a shell without job control."""
    script = (
        "import os, signal, sys\n"
        f"signal.signal({int(number)}, signal.SIG_IGN)\n"
        "from p2pdist.mount.program import Program, run\n"
        f"sys.exit(run(Program(('sh', '-c', 'kill -{int(number)} $$; exit 7'), os.environ, '/')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7


@pytest.mark.parametrize("number", [signal.SIGPIPE, signal.SIGXFSZ])
def test_what_python_ignores_the_program_does_not(number: signal.Signals) -> None:
    """The one ends what writes to a pipe that nobody reads, the other what writes more than
    `ulimit -f` allows."""
    script = (
        "import os, sys\n"
        "from p2pdist.mount.program import Program, run\n"
        f"sys.exit(run(Program(('sh', '-c', 'kill -{int(number)} $$; exit 7'), os.environ, '/')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 128 + number


@pytest.mark.parametrize("line", ["#!/bin/sh\r\n", "#!/usr/bin/env sh\r\n"])
def test_lines_of_windows_are_called_so(stage: Stage, line: str) -> None:
    """The name of the interpreter ends with a character that no screen shows."""
    stage.pack("bin/tool", line + "echo me\r\n")
    with pytest.raises(NotFound) as failed:
        stage.run("tool")
    assert "Windows" in failed.value.remedy


def test_exit_codes_come_through_where_sigchld_is_ignored() -> None:
    """The kernel keeps no exit code for a caller that ignores SIGCHLD; the program has the default
    again."""
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "from p2pdist.mount.program import Program, run\n"
        "code = run(Program(('sh', '-c', 'exit 7'), os.environ, '/'))\n"
        "assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN\n"
        "sys.exit(code)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7
