"""The commands of the README, run as they are written there, in its order, on one machine.

Only names of machines, paths and sizes are replaced, by the table below. `docker compose` is tried
by test_compose.py, Slurm by test_slurm.py, Kubernetes by test_kubernetes.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_pair, free_port, free_ports
from site_rig import wait_for
from waits import wait_until

ROOT = Path(__file__).resolve().parents[2]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FIRST_STEPS = "p2pdist up "
"""What only the block of the first steps has."""

COMMAND_S = 60.0
READY_S = 150.0
"""Three processes start, one after the other."""
AT_WORK = ("p2pdist tracker ", "p2pdist agent ")
"""Commands that run until they are ended."""

MAY_FAIL = (
    "p2pdist doctor",
    "p2pdist mirror check",
    "p2pdist mount docker://registry.example.org/",
    "p2pdist report",
    "p2pdist cache save",
)
"""They end with 1 where this machine lacks something, which is not the README's fault: a registry
of that name, a second host that received the package, a program that compiled something."""

PACKAGES = {
    "team/weights:v3": "weights --format tree",
    "team/weights:v7": "weights",
    "team/reader:v1": "reader",
    "team/base:v7": "base",
    "team/trainer:v1": "app",
}
"""What commands name and no block packs, with its source."""


def blocks() -> list[tuple[str, str]]:
    """Language and text of the README's fenced blocks."""
    return FENCED.findall((ROOT / "README.md").read_text())


def commands(*, access: bool) -> list[str]:
    """Every p2pdist command of the README, in its order, without comments: of the block about
    access control, or of all others."""
    text = "\n".join(text for _language, text in blocks() if ("--access" in text) == access and FIRST_STEPS not in text)
    lines = text.replace("\\\n", " ").splitlines()
    return [line.partition(" # ")[0].rstrip() for line in lines if line.startswith("p2pdist ")]


class Machine:
    """A directory in which the README's paths and addresses mean something."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        port, agent_port = free_port(), free_pair()
        self.replaced = {
            "s3://packages/prod": f"file://{directory}/origin",
            "http://tracker:7070": f"http://127.0.0.1:{port}",
            "0.0.0.0:7070": f"127.0.0.1:{port}",
            "0.0.0.0:7071": f"127.0.0.1:{agent_port}",
            "/var/lib/p2pdist": f"{directory}/store",
            "/srv/trainer": f"{directory}/shown",
            "mirror install containerd": f"mirror install containerd --root {directory}/root",
            "/etc/p2pdist": f"{directory}/etc",
            "https://tracker:7070": f"https://127.0.0.1:{port}",
            "--count 200": "--count 1",
            "--count 64": "--count 1",
            "trainer 64": "trainer 1",
            "reader 8": "reader 1",
            "--hosts 2600 --size 3GB": "--hosts 26 --size 3MB",
            "p2pdist top": "p2pdist top --once",
            "--s3 7074": f"--s3 {free_port()}",
        }
        (directory / "p2pdist").write_text(f'#!/bin/sh\nexec {sys.executable} -m p2pdist.cli.main "$@"\n')
        (directory / "p2pdist").chmod(0o755)
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("P2PDIST_")} | {
            "PATH": f"{directory}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "P2PDIST_SOCKET": f"{directory}/agent.sock",
            "P2PDIST_LAYOUT": f"{directory}/layout",
            "XDG_CACHE_HOME": f"{directory}/cache",
        }
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, command: str, said: str = "") -> None:
        """Run a command that goes on until the test ends, from when it is ready: where it listens,
        or once it has `said` so."""
        log = self.directory / f"{len(self.running)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["sh", "-c", f"exec {self.here(command)}"],
                env=self.environ,
                cwd=self.directory,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )
        self.running.append(process)
        if said:
            wait_until(lambda: said in log.read_text() or process.poll() is not None, said, within_s=READY_S)
            assert process.poll() is None, log.read_text()
            return
        address = re.findall(r"--(?:probe-)?listen (\S+)", self.here(command))[-1]
        wait_for(f"http://{address}/readyz", process, log)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", self.here(command)],
            env=self.environ,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def here(self, command: str) -> str:
        """The command with what only exists elsewhere replaced."""
        for name, value in self.replaced.items():
            command = command.replace(name, value)
        return command

    def stop(self) -> None:
        """End what still runs, the agent before the tracker."""
        for process in reversed(self.running):
            process.terminate()
            process.wait(30)


@pytest.fixture
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("m"))
    sources = {"environment/site-packages/dep.py": "N = 3", "venv/dep.py": "N = 4", "weights/w": "w", "reader/r": "r"}
    sources |= {"llama/config.json": "{}", "base/b": "b"}
    sources["app/app/train.py"] = "import sys, dep\nprint('epochs', *sys.argv[2:], 'dep', dep.N)"
    (made.directory / "root").mkdir()
    for name, text in sources.items():
        path = made.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for reference, source in PACKAGES.items():
        for command in (f"pack {source} -t {reference}", f"push {reference} --origin s3://packages/prod"):
            done = made.run(f"p2pdist {command}")
            assert done.returncode == 0, done.stderr
    try:
        yield made
    finally:
        made.stop()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_command_of_the_readme_works(machine: Machine) -> None:
    """In the order of the README; the trainer says that it got its argument and its base."""
    ended = {}
    for command in commands(access=False):
        if command.startswith(AT_WORK):
            if "--s3" in command:
                own = f"--name third --listen 127.0.0.1:{free_pair()} --store third --socket third.sock"
                machine.start(f"{command} {own}")
                continue
            machine.start(command)
            if command.startswith("p2pdist agent "):  # a ranking by roles needs a host for each
                machine.start(
                    f"{command} --name other --listen 127.0.0.1:{free_pair()} --store other --socket other.sock"
                )
            continue
        if "rm team/trainer:v1" in command:
            assert machine.run("p2pdist pull team/trainer:v1").returncode == 0
        ended[command] = machine.run(command)
        if "-t team/trainer:v4" in command:
            ended["push v4"] = machine.run("p2pdist push team/trainer:v4 --origin s3://packages/prod")
    wrong = {
        command: f"{done.returncode}: {done.stdout[-500:]}{done.stderr[-1000:]}"
        for command, done in ended.items()
        if done.returncode != 0 and not command.startswith(MAY_FAIL)
    }
    assert not wrong, json.dumps(wrong, indent=1)
    assert ended["p2pdist run team/trainer:v3 -- --epochs 3"].stdout == "epochs 3 dep 3\n"
    assert len(ended) > 20


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_commands_of_access_control_work(machine: Machine) -> None:
    """With a copy of the join token that the tracker makes, and a package to order."""
    (machine.directory / "etc").mkdir()
    for command in ("pack app -t team/trainer:v3", "push team/trainer:v3 --origin s3://packages/prod"):
        assert machine.run(f"p2pdist {command}").returncode == 0
    wrong = {}
    for command in commands(access=True):
        if command.startswith("p2pdist tracker "):
            machine.start(f"{command} --listen 0.0.0.0:7070 --probe-listen 127.0.0.1:{free_port()}")
            shutil.copy(machine.directory / "etc" / "join-default.token", machine.directory / "etc" / "join.token")
        elif command.startswith("p2pdist agent "):
            probe = f"--probe-listen 127.0.0.1:{free_port()}"
            machine.start(f"{command} --listen 0.0.0.0:7071 --store /var/lib/p2pdist {probe}")
        else:
            done = machine.run(command)
            if done.returncode != 0:
                wrong[command] = done.stderr
    assert not wrong, json.dumps(wrong, indent=1)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_first_steps_lead_to_a_program_on_a_second_agent(machine: Machine) -> None:
    """In five commands, the first of which installs."""
    (text,) = (text for _language, text in blocks() if FIRST_STEPS in text)
    install, *steps = [line.partition(" # ")[0].rstrip() for line in text.replace("\\\n", " ").splitlines()]
    assert install == "pip install ." and len(steps) == 4
    port, second = free_ports(4), free_pair()
    machine.replaced = {
        "/tmp/": f"{machine.directory}/",
        ":7070": f":{port}",
        ":7081": f":{second}",
        "p2pdist up ": f"p2pdist up --port {port} ",
    }
    (machine.directory / "app" / "main.py").write_text('print("hello")')
    ended = None
    for step in steps:
        if step.startswith("p2pdist up "):
            machine.start(step, "Ctrl-C ends it")
        elif step.startswith("p2pdist agent "):
            machine.start(step)
        else:
            ended = machine.run(step)
            assert ended.returncode == 0, ended.stderr
    assert ended is not None and ended.stdout == "hello\n"
    assert "echo 'print(\"hello\")' > app/main.py" in (ROOT / "README.md").read_text()
    assert text.splitlines()[-1].endswith("  # hello")


def test_the_other_blocks_hold() -> None:
    """Targets of make exist, the settings are TOML whose keys are options, and no other kind of
    block is there that no test would run."""
    kinds = {language: text for language, text in blocks() if language}
    assert sorted(kinds) == ["python", "toml"]
    compile(kinds["python"], "README.md", "exec")  # tests/load runs what it shows
    settings = tomllib.loads(kinds["toml"])
    shown = subprocess.run(
        [sys.executable, "-m", "p2pdist.cli.main", "agent", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert all(f"--{name} " in shown for name in ("origin", *settings["agent"]))
    plain = [text for language, text in blocks() if not language]
    lines = [line for text in plain[1:] for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    assert [
        line
        for line in lines
        if not line.startswith(("p2pdist ", "make ", "pip install ", "export HF_ENDPOINT=", "AWS_ENDPOINT_URL="))
    ] == []
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert {line.split()[1] for line in lines if line.startswith("make ")} <= set(phony[1].split())
