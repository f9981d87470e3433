"""Files that are named on the command line and in settings may be anything: reading one ends, in
little memory, with its bytes or with a message."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from p2pdist.agent.access.identity import read_join_file
from p2pdist.agent.buckets.settings import s3_settings
from p2pdist.credentials.join import JoinToken
from p2pdist.files import NotRegular, open_regular, read_content
from p2pdist.package.source.project import read_project
from tracker.access.file import read_rules
from tracker.callbacks import read_callbacks
from tracker.policies import check_policies
from tracker.upstreams.settings import read_upstreams

SPARSE_BYTES = 10 << 30
MEMORY_BYTES = 3 << 30
"""What a reader may have in all; the address space, so that no machine is in danger."""

KINDS = ("fifo", "zero", "sparse", "socket", "directory")


def odd_file(directory: Path, kind: str) -> Path:
    """A file that no reader of settings expects."""
    path = directory / kind
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        return Path("/dev/zero")
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(SPARSE_BYTES)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    else:
        path.mkdir()
    return path


READERS = """
import sys
from pathlib import Path

from p2pdist import files
from p2pdist.package.source import trace as traces

files.PIPE_S = 0.5  # before others take it from there
traces.TRACE_BYTES_MAX = 64 << 20

def accounts(path):
    from p2pdist.origin.registry.accounts import docker_accounts
    docker_accounts("registry.example", path)

def tls(path):
    from p2pdist.transfer.tls import Tls, TlsFiles
    Tls(TlsFiles(path, path, path))

def policies(path):
    from tracker.policies import check_policies
    table, mistakes = check_policies(path)
    if mistakes:
        raise ValueError("; ".join(map(str, mistakes)))

def access(path):
    from tracker.access.directory import AccessDirectory
    AccessDirectory(path).load(now=0.0)

def upstreams(path):
    from tracker.upstreams.settings import read_upstreams
    read_upstreams(path)

def join(path):
    from p2pdist.agent.access.identity import read_join_file
    read_join_file(path)

def token(path):
    from p2pdist.cli.tracker_access import _read
    _read(path)

def config(path):
    from p2pdist.cli.main import _read_config
    _read_config(path)

def project(path):
    from p2pdist.package.source.project import read_project
    read_project(path)

def trace(path):
    from p2pdist.package.source.trace import read_trace
    read_trace(path)

def layout(path):
    from p2pdist.origin.directory import Directory
    Directory(path.parent).read(path.name, 1 << 20)

for name, read in [(name, read) for name, read in globals().items() if callable(read) and name != "Path" and name[0] != "_"]:
    try:
        read(Path(sys.argv[1]))
        print(f"{name}: read")
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_named_file_is_reading_it_ends_with_a_message(tmp_path: Path, kind: str) -> None:
    path = odd_file(tmp_path, kind)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    done = subprocess.run(
        [sys.executable, "-c", READERS, str(path)], capture_output=True, text=True, timeout=100, preexec_fn=limit
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line.partition(": ")[::2] for line in done.stdout.splitlines())
    assert len(lines) == 11, done.stdout
    for name, said in lines.items():
        assert said.split(":")[0] not in ("read", "MemoryError", "UnboundLocalError", "TypeError"), f"{name}: {said}"
        assert said.split(":")[0].isidentifier(), f"{name}: {said}"


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = odd_file(tmp_path, kind)
    if kind == "sparse":
        assert len(read_content(path, 1000).data) == 1001, "a byte more says that it is larger"
        open_regular(path).close()
        return
    for read in (open_regular, lambda path: read_content(path, 1000)):
        with pytest.raises(NotRegular):
            read(path)


def test_a_pipe_is_read_to_its_end_where_a_secret_may_come_from_a_command(tmp_path: Path) -> None:
    fifo = odd_file(tmp_path, "fifo")
    with pytest.raises(TimeoutError):
        read_content(fifo, 100, pipe_s=0.2)
    with subprocess.Popen(["sh", "-c", "echo one; sleep 0.2; echo two"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        name = Path(f"/dev/fd/{writer.stdout.fileno()}")
        assert read_content(name, 100, pipe_s=60.0).data == b"one\ntwo\n"
    with subprocess.Popen(["sh", "-c", "echo endless; exec sleep 60"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        name = Path(f"/dev/fd/{writer.stdout.fileno()}")
        with pytest.raises(TimeoutError):
            read_content(name, 100, pipe_s=0.2)
        writer.kill()
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert len(read_content(Path(f"/dev/fd/{writer.stdout.fileno()}"), 100, pipe_s=60.0).data) == 101
        writer.kill()


def test_settings_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As editors on Windows write it."""
    file = tmp_path / "settings.toml"

    def written(text: str) -> Path:
        file.write_bytes(f"\ufeff{text}".encode())
        file.chmod(0o600)
        return file

    assert read_project(written('name = "a"')).project.name == "a"
    assert read_upstreams(written('[[upstream]]\nhost = "ghcr.io"'))[0].name == "ghcr.io"
    assert check_policies(written("policy = []"))[1] == []
    assert read_callbacks(written(f'hosts = ["a.example.org"]\nkey = "{"k" * 64}"')).key == "k" * 64
    assert s3_settings((), written('[[bucket]]\nname = "abc"\npackage = "a:v1"')).buckets[0].name == "abc"
    assert read_rules(written('fleet = "f"').read_bytes(), "it").fleet == "f"
    token = JoinToken.create("0" * 64, "agents")
    assert read_join_file(written(str(token))) == token
