"""Real clients of registries, each with its own files, in a place apart: mounts, processes and
/etc of their own on the network of this machine. Ending one process ends all of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docker_rig import remove_cgroups, remove_files
from programs import PROGRAM

CALL_S = 180.0
READY_S = 60.0
P2PDIST = PROGRAM
APART = """
mkdir -p "$1/etc/upper" "$1/etc/work" "$1/etc/lower"
mount -t overlay -o "lowerdir=$1/etc/lower:/etc,upperdir=$1/etc/upper,workdir=$1/etc/work" none /etc
mount -t tmpfs none /run
mount -t tmpfs none /dev/shm
mkdir -p /etc/docker /etc/containerd "$1/containers"
[ ! -d /var/lib/containers ] || mount --bind "$1/containers" /var/lib/containers
exec sleep infinity
"""


class Machine:
    """A host as far as container runtimes see one."""

    def __init__(self, place: Path, keeper: subprocess.Popen[bytes]) -> None:
        self.place, self.keeper = place, keeper
        self.cgroup = f"p2pd-{secrets.token_hex(4)}"
        self._pid = 0

    def pid(self) -> int:
        """The first process in there."""
        if not self._pid:
            path = Path(f"/proc/{self.keeper.pid}/task/{self.keeper.pid}/children")
            deadline = time.monotonic() + READY_S
            while not (children := path.read_text().split()) or b"sleep" not in _command(children[0]):
                assert self.keeper.poll() is None and time.monotonic() < deadline, "no machine of its own"
                time.sleep(0.02)
            self._pid = int(children[0])
        return self._pid

    def words(self, *words: str) -> list[str]:
        return ["nsenter", "--target", str(self.pid()), "--mount", "--pid", "--", *words]

    def run(
        self, *words: str, check: bool = True, timeout_s: float = CALL_S, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.words(*words),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            cwd="/",
        )
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done

    def start(self, *words: str, log: str) -> subprocess.Popen[bytes]:
        with (self.place / log).open("ab") as output:
            return subprocess.Popen(self.words(*words), stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd="/")

    def mirror(self, *words: str, check: bool = True) -> dict[str, Any]:
        """`p2pdist mirror`, and the document it prints."""
        done = self.run(*P2PDIST, "mirror", *words, "--json", check=check)
        document = json.loads(done.stdout)
        assert isinstance(document, dict)
        return document


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def running_machine() -> Iterator[Machine]:
    place = Path(tempfile.mkdtemp(prefix="p2pd-m-"))  # short, for the paths of sockets
    words = ["unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    keeper = subprocess.Popen([*words, "sh", "-ec", APART, "machine", str(place)], stdin=subprocess.DEVNULL)
    machine = Machine(place, keeper)
    try:
        machine.pid()
        yield machine
    finally:
        keeper.send_signal(signal.SIGKILL)
        keeper.wait()
        remove_cgroups(machine.cgroup)
        remove_files(place)


class Client(ABC):
    """One program that pulls images. `reference` is HOST/REPOSITORY:TAG."""

    name: str
    runtime: str
    """What `p2pdist mirror install` calls it."""
    needs: tuple[str, ...]
    docker_hub = False
    """Whether it asks mirrors for images of Docker Hub alone."""
    zstd = True
    """Whether it takes layers that zstd compressed."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    @classmethod
    def lacking(cls) -> str:
        """What keeps it from running here, or ""."""
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        absent = [name for name in (*cls.needs, "nsenter", "unshare") if shutil.which(name, path=path) is None]
        return f"needs {', '.join(absent)} (make setup-all)" if absent else ""

    def start(self) -> None:  # noqa: B027 # only daemons do anything
        """Whatever it needs to run."""

    def reload(self) -> None:  # noqa: B027
        """Read its files again."""

    @abstractmethod
    def pull(self, reference: str) -> str:
        """Pull, and return the digest that it says the tag has."""

    @abstractmethod
    def remove(self, reference: str) -> None:
        """Forget an image and its blobs."""

    @abstractmethod
    def run(self, reference: str) -> str:
        """What the image's program prints."""


class Containerd(Client):
    name, runtime = "containerd", "containerd"
    needs = ("containerd", "ctr", "runc")

    def start(self) -> None:
        place = self.machine.place / "containerd"
        place.mkdir()
        (place / "config.toml").write_text(
            f'version = 2\nroot = "{place}/root"\nstate = "{place}/state"\n'
            f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n'
        )
        self.machine.start("containerd", "--config", str(place / "config.toml"), log="containerd.log")
        self._until(lambda: self._ctr("version", check=False).returncode == 0)

    def _until(self, condition: object) -> None:
        assert callable(condition)
        deadline = time.monotonic() + READY_S
        while not condition():
            assert time.monotonic() < deadline, (self.machine.place / f"{self.name}.log").read_text()[-2000:]
            time.sleep(0.1)

    def _ctr(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.machine.run("ctr", *words, check=check)

    def pull(self, reference: str) -> str:
        self._ctr("images", "pull", "--hosts-dir", "/etc/containerd/certs.d", reference)
        rows = self._ctr("images", "ls").stdout.splitlines()
        [row] = [row for row in rows if row.startswith(f"{reference} ")]
        return re.findall(r"sha256:[0-9a-f]{64}", row)[0]

    def remove(self, reference: str) -> None:
        self._ctr("images", "rm", "--sync", reference)
        for digest in self._ctr("content", "ls", "-q").stdout.split():
            self._ctr("content", "rm", digest, check=False)

    def run(self, reference: str) -> str:
        cgroup = ["--cgroup", f"/{self.machine.cgroup}/{secrets.token_hex(4)}"]
        return self._ctr("run", "--rm", *cgroup, reference, f"c{secrets.token_hex(4)}").stdout


class Docker(Client):
    name, runtime = "docker", "docker"
    needs = ("docker", "dockerd", "runc")
    docker_hub = True
    zstd = False  # since 23

    def start(self) -> None:
        place = self.machine.place
        words = [
            "dockerd",
            "--data-root",
            f"{place}/docker",
            "--exec-root",
            f"{place}/exec",
            "--pidfile",
            f"{place}/docker.pid",
        ]
        words += ["--bridge", "none", "--iptables=false", "--ip-forward=false"]
        words += ["--ip-masq=false", "--cgroup-parent", f"/{self.machine.cgroup}"]
        self._daemon = self.machine.start(*words, log="docker.log")
        deadline = time.monotonic() + READY_S
        while self._docker("version", check=False).returncode != 0:
            log = (place / "docker.log").read_text()[-2000:]
            assert self._daemon.poll() is None and time.monotonic() < deadline, f"dockerd does not answer: {log}"
            time.sleep(0.2)

    def reload(self) -> None:
        self.machine.run("sh", "-c", f"kill -HUP $(cat {self.machine.place}/docker.pid)")

    def mirrors(self) -> list[str]:
        """What the daemon says it asks first."""
        said = self._docker("info", "--format", "{{json .RegistryConfig.Mirrors}}").stdout
        return [str(mirror) for mirror in json.loads(said) or []]

    def _docker(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.machine.run("docker", *words, check=check)

    def pull(self, reference: str) -> str:
        said = self._docker("pull", reference).stdout
        return re.findall(r"Digest: (sha256:[0-9a-f]{64})", said)[0]

    def remove(self, reference: str) -> None:
        self._docker("image", "rm", "--force", reference)

    def run(self, reference: str) -> str:
        return self._docker("run", "--rm", "--network", "none", reference).stdout


class Podman(Client):
    name, runtime = "podman", "podman"
    needs = ("podman", "conmon", "runc")

    def _podman(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        place = self.machine.place
        stores = ["--root", f"{place}/podman", "--runroot", f"{place}/podman-run", "--tmpdir", f"{place}/podman-tmp"]
        options = ["--storage-driver", "overlay", "--cgroup-manager", "cgroupfs", "--events-backend", "none"]
        # crun refuses control groups of both versions side by side.
        options += ["--runtime", "runc"]
        return self.machine.run("podman", *stores, *options, *words, check=check)

    def pull(self, reference: str) -> str:
        self._podman("pull", "--quiet", "--tls-verify=false", reference)
        return self._podman("image", "inspect", "--format", "{{.Digest}}", reference).stdout.strip()

    def remove(self, reference: str) -> None:
        self._podman("image", "rm", "--force", reference)

    def run(self, reference: str) -> str:
        limits = ["--cgroup-parent", f"/{self.machine.cgroup}", "--network", "none"]
        return self._podman("run", "--rm", *limits, reference).stdout


class Buildah(Client):
    name, runtime = "buildah", "podman"
    needs = ("buildah",)

    def _buildah(self, *words: str) -> str:
        place = self.machine.place
        stores = ["--root", f"{place}/buildah", "--runroot", f"{place}/buildah-run", "--storage-driver", "overlay"]
        return self.machine.run("buildah", *stores, *words).stdout.strip()

    def pull(self, reference: str) -> str:
        self._buildah("pull", "--quiet", "--tls-verify=false", reference)
        return self._buildah("images", "--format", "{{.Digest}}", reference)

    def remove(self, reference: str) -> None:
        self._buildah("rmi", "--force", reference)

    def run(self, reference: str) -> str:
        container = self._buildah("from", "--pull-never", reference)
        try:
            return self._buildah("run", "--isolation", "chroot", container, "/bin/hello")
        finally:
            self._buildah("rm", container)


class Skopeo(Client):
    name, runtime = "skopeo", "podman"
    needs = ("skopeo",)

    def _directory(self, reference: str) -> Path:
        return self.machine.place / f"skopeo-{re.sub('[^a-z0-9]', '-', reference)}"

    def pull(self, reference: str) -> str:
        target = self._directory(reference)
        self.machine.run(
            "skopeo",
            "--insecure-policy",
            "copy",
            "--quiet",
            "--src-tls-verify=false",
            f"docker://{reference}",
            f"dir:{target}",
        )
        manifest = (target / "manifest.json").read_bytes()
        import hashlib

        for descriptor in (json.loads(manifest)["config"], *json.loads(manifest)["layers"]):
            blob = target / descriptor["digest"].removeprefix("sha256:")
            assert f"sha256:{hashlib.sha256(blob.read_bytes()).hexdigest()}" == descriptor["digest"]
        return f"sha256:{hashlib.sha256(manifest).hexdigest()}"

    def remove(self, reference: str) -> None:
        shutil.rmtree(self._directory(reference))

    def run(self, reference: str) -> str:
        raise NotImplementedError("skopeo runs nothing")


CLIENTS: tuple[type[Client], ...] = (Containerd, Docker, Podman, Buildah, Skopeo)
