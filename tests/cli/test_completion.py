"""Completion in real shells: a key press is answered with verbs, options and references."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAMS = Path(sys.executable).parent


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a user whose layout has two packages; `p2pdist` is on the path."""
    layout = tmp_path / "data" / "p2pdist" / "layout"
    layout.mkdir(parents=True)
    entries = [
        {
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": f"sha256:{number:064x}",
            "size": 10,
            "annotations": {"org.opencontainers.image.ref.name": name},
        }
        for number, name in enumerate(["team/trainer:v1", "team/trainer:v2", "other:latest"])
    ]
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
    return {
        "PATH": f"{PROGRAMS}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "TERM": "dumb",
        "P2PDIST_SOCKET": str(tmp_path / "no.sock"),
        "LC_ALL": "C.UTF-8",
    }


def offered_by_bash(line: str, environment: dict[str, str]) -> list[str]:
    """What bash is offered for the word at the end of a line, words broken as bash breaks them."""
    script = f"""
    source <(p2pdist completion bash)
    COMP_LINE={line!r} COMP_POINT={len(line)}
    complete -p p2pdist >/dev/null || exit 1
    _p2pdist_completion p2pdist
    printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    errors = [each for each in done.stderr.splitlines() if "compopt" not in each]  # only within a key press
    assert (done.returncode, errors) == (0, [])
    return done.stdout.split()


def test_verbs_options_and_choices(environment: dict[str, str]) -> None:
    assert offered_by_bash("p2pdist pu", environment) == ["push", "pull"]
    assert offered_by_bash("p2pdist simulate --oversub", environment) == ["--oversubscription"]
    assert offered_by_bash("p2pdist agent --transport ", environment) == ["trees", "swarm", "auto"]
    assert offered_by_bash("p2pdist agent --log-format=j", environment) == ["json"]
    assert offered_by_bash("p2pdist completion ", environment) == ["bash", "zsh", "fish"]


def test_references_of_the_layout_behind_a_colon_too(environment: dict[str, str]) -> None:
    """bash replaces what comes after the colon alone."""
    assert offered_by_bash("p2pdist push te", environment) == ["team/trainer:v1", "team/trainer:v2"]
    assert offered_by_bash("p2pdist push team/trainer:", environment) == ["v1", "v2"]
    assert offered_by_bash("p2pdist diff team/trainer:v1 o", environment) == ["other:latest"]
    assert offered_by_bash("p2pdist run nothing", environment) == []


def test_verbs_that_ask_a_tracker_offer_the_same_references(environment: dict[str, str], tmp_path: Path) -> None:
    """They have no options for layout and agent; the variables count."""
    (tmp_path / "data").rename(tmp_path / "moved")
    environment["P2PDIST_LAYOUT"] = str(tmp_path / "moved/p2pdist/layout")
    for verb in ("rank", "preseed", "evict", "report", "trace show"):
        assert offered_by_bash(f"p2pdist {verb} o", environment) == ["other:latest"]
    del environment["HOME"], environment["P2PDIST_LAYOUT"], environment["XDG_DATA_HOME"]
    assert offered_by_bash("p2pdist rank o", environment) == []


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        ("p2pdist trace ", ["plain,export", "plain,import", "plain,ls", "plain,show", "file,"]),
        ("p2pdist trace python3 s", ["file,s"]),
        ("p2pdist run other:latest -- ./s", ["file,./s"]),
        ("p2pdist run ./a", ["dir,./a"]),
        ("p2pdist import arch", ["file,arch"]),
    ],
)
def test_paths_and_subcommands(line: str, kinds: list[str], environment: dict[str, str]) -> None:
    variables = {**environment, "_P2PDIST_COMPLETE": "bash_complete", "COMP_LINE": line}
    done = subprocess.run(
        [PROGRAMS / "p2pdist"], env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == kinds


def test_another_layout(environment: dict[str, str], tmp_path: Path) -> None:
    """An empty one, or what is none, offers nothing, and says nothing."""
    for content in (None, b"", b"{}", b'{"manifests": 3}', b'{"manifests": [3]}', b"\xff"):
        if content is not None:
            (tmp_path / "index.json").write_bytes(content)
        assert offered_by_bash(f"p2pdist push --layout {tmp_path} t", environment) == []


class _Typist:
    """Somebody at a terminal."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self.shown = ""

    def type(self, keys: str, until: str) -> None:
        """Press keys, then read until the terminal shows something new that matches."""
        self.shown = ""
        os.write(self._terminal, keys.encode())
        deadline = time.monotonic() + 30
        while not re.search(until, self.shown):
            assert time.monotonic() < deadline, self.shown
            if select.select([self._terminal], [], [], 0.5)[0]:
                self.shown += os.read(self._terminal, 65536).decode(errors="replace")


@contextmanager
def terminal(words: list[str], environment: dict[str, str]) -> Iterator[_Typist]:
    """A shell in a terminal of its own; it ends with the block."""
    process, descriptor = pty.fork()
    if not process:
        os.execvpe(words[0], words, environment)
    try:
        yield _Typist(descriptor)
    finally:
        os.close(descriptor)  # hangs up
        os.kill(process, 9)
        os.waitpid(process, 0)


def test_a_key_press_in_bash(environment: dict[str, str]) -> None:
    with terminal(["bash", "--norc", "--noprofile", "-i"], environment) as typist:
        typist.type("source <(p2pdist completion bash); echo rea''dy\r", r"ready\r")
        typist.type("p2pdist inspect team/trainer:v\t\t", r"v1 +v2")
        typist.type("\x15p2pdist resol\t", r"resolve ")
        typist.type("\x15p2pdist push oth\t", r"other:latest ")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_a_key_press_in_zsh(environment: dict[str, str]) -> None:
    with terminal(["zsh", "-f", "-i"], environment) as typist:
        typist.type(
            "autoload -U compinit; compinit -u -D; eval \"$(p2pdist completion zsh)\"; echo rea''dy\r", r"ready\r"
        )
        typist.type("p2pdist resol\t", r"resolve")
        typist.type("\x15p2pdist push oth\t", r"other:latest")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish(environment: dict[str, str]) -> None:
    def offered(line: str) -> list[str]:
        script = f"p2pdist completion fish | source; complete -C {line!r}"
        done = subprocess.run(
            ["fish", "--no-config", "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return [each.partition("\t")[0] for each in done.stdout.splitlines()]

    assert offered("p2pdist preseed --quo") == ["--quorum"]
    assert offered("p2pdist resol") == ["resolve"]
    assert offered("p2pdist push team/trainer:") == ["team/trainer:v1", "team/trainer:v2"]
