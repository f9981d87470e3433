"""A Slurm cluster on loopback beside a site: munged, slurmctld and one slurmd for each agent, with
p2pdist's prolog and epilog.

Everything is below one directory, with a key, sockets and ports of its own, and belongs to this
process: daemons stay in the foreground, and what they leave behind (a slurmstepd outlives its
slurmd) is found by the configuration file that it was started with.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import programs
from site_rig import P2PDIST, Site, free_port, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "sinfo", "scancel")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy" / "slurm"
END_S_MAX = 10.0


def lacking() -> str:
    """Which of Slurm's programs are not installed."""
    return ", ".join(name for name in PROGRAMS if shutil.which(name, path=PATH) is None)


class Slurm:
    """A cluster whose nodes have the names of `nodes`, and an agent's socket each at
    <site>/<node>.sock. Packages of jobs are shown below <directory>/jobs/<node>, since the nodes
    share one machine."""

    def __init__(self, site: Site, directory: Path, nodes: list[str]) -> None:
        self.site, self.directory, self.nodes = site, directory, nodes
        self.jobs = directory / "jobs"
        self.log = directory / "p2pdist.log"
        self.configuration = directory / "slurm.conf"
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.configuration)}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        munge = self.directory / "munge"
        munge.mkdir(mode=0o711)
        key = munge / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        for folder in ("state", "spool", "jobs"):
            (self.directory / folder).mkdir()
        self._write_scripts()
        self.configuration.write_text(self._configuration(munge / "socket"))
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        # --force: only this user may enter the socket's folders, and only this user does.
        words = [f"--{option}={munge / name}" for option, name in files.items()]
        self._spawn("munged", "--foreground", "--force", "--num-threads=2", *words)
        until((munge / "socket").is_socket)
        self._spawn("slurmctld", "-D")
        for node in self.nodes:
            self._spawn("slurmd", "-D", "-N", node)
        until(lambda: self.states() == dict.fromkeys(self.nodes, "idle"))

    def options(self, node: str) -> list[str]:
        """Where a node's agent, tracker and directory are. The node may be named by a variable of
        the shell."""
        agent = f"{self.site.directory}/{node}.sock"
        return ["--tracker", self.site.tracker_url, "--socket", agent, "--jobs-dir", f"{self.jobs}/{node}"]

    def _write_scripts(self) -> None:
        """The scripts of deploy/slurm with the places of this cluster."""
        common = " ".join([*self.options("$SLURMD_NODENAME"), "--agent-wait", "0.5"])
        changes = {
            # The tracker of this cluster asks for no token.
            "export P2PDIST_TOKEN_FILE=/etc/p2pdist/slurm.token\n": "",
            "/opt/p2pdist/bin/p2pdist": " ".join(P2PDIST),
            " 2>>/var/log/p2pdist-slurm.log": f" {common} 2>>{self.log}",
        }
        for name in ("prolog.sh", "epilog.sh"):
            text = (DEPLOY / name).read_text()
            for old, new in changes.items():
                assert old in text
                text = text.replace(old, new)
            script = self.directory / name
            script.write_text(text)
            script.chmod(0o755)

    def _configuration(self, munge_socket: Path) -> str:
        here, host = self.directory, socket.gethostname().split(".")[0]
        settings = {
            "ClusterName": "p2pdist",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": free_port(),
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={munge_socket}",
            "CredType": "cred/munge",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "StateSaveLocation": here / "state",
            "SlurmdSpoolDir": here / "spool/%n",
            "SlurmctldPidFile": here / "slurmctld.pid",
            "SlurmdPidFile": here / "slurmd-%n.pid",
            "SlurmctldLogFile": here / "slurmctld.log",
            "SlurmdLogFile": here / "slurmd-%n.log",
            "ProctrackType": "proctrack/pgid",
            "TaskPlugin": "task/none",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "ReturnToService": 2,
            "KillWait": 1,
            "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,sched_min_interval=0",
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        lines += (DEPLOY / "slurm.conf").read_text().replace("/etc/slurm", str(here)).splitlines()
        for node in self.nodes:
            place = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()}"
            lines.append(f"NodeName={node} {place} CPUs=1 RealMemory=64 State=UNKNOWN")
        return "\n".join([*lines, "PartitionName=all Nodes=ALL Default=YES MaxTime=5 State=UP", ""])

    def _spawn(self, *words: str) -> None:
        with (self.directory / f"{words[0]}.out").open("ab") as output:
            program = shutil.which(words[0], path=PATH)
            assert program is not None
            process = subprocess.Popen(
                [program, *words[1:]],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                cwd=self.directory,
            )
        self._processes.append(process)

    # -- using it

    def run(
        self, *words: str, timeout_s: float = 40.0, variables: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command of Slurm, or of p2pdist, with this cluster, and with more variables."""
        environment = self.environment | (variables or {})
        if words[0] == "p2pdist":
            return programs.run(*words[1:], env=environment, cwd=self.directory, timeout=timeout_s)
        return subprocess.run(
            words, capture_output=True, text=True, env=environment, cwd=self.directory, timeout=timeout_s, check=False
        )

    def ask(self, *words: str) -> str:
        """What a command printed that must succeed."""
        done = self.run(*words)
        assert done.returncode == 0, f"{words}: {done.stderr}\n{self.story()}"
        return done.stdout.strip()

    def states(self) -> dict[str, str]:
        """Node to its state."""
        rows = self.run("sinfo", "-h", "-N", "-o", "%N %T").stdout.split("\n")
        return {name: state for name, _, state in (row.partition(" ") for row in rows if row)}

    def story(self) -> str:
        """What prologs, epilogs and the controller said last."""
        texts = [
            path.read_text(errors="replace")[-1500:]
            for path in (self.log, self.directory / "slurmctld.log")
            if path.exists()
        ]
        return "\n--\n".join(texts)

    # -- ending it

    def close(self) -> None:
        """End all of it, by id: jobs first, then daemons, then whatever still runs with this
        configuration."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            for job in self.run("squeue", "-h", "-o", "%A", timeout_s=5).stdout.split():
                self.run("scancel", "--signal=KILL", job, timeout_s=5)
        for process in reversed(self._processes):
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(END_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        deadline = time.monotonic() + END_S_MAX
        while (left := self._left()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def _left(self) -> list[int]:
        """Processes whose environment or command line names something of this cluster."""
        mark, found = os.fsencode(self.directory), []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return found


@contextlib.contextmanager
def running_slurm(site: Site, nodes: list[str]) -> Iterator[Slurm]:
    directory = site.directory / "slurm"
    directory.mkdir()
    slurm = Slurm(site, directory, nodes)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.close()
