"""A Docker daemon of its own for a test, and a base image made from this machine instead of a
registry.

The daemon lives in new PID, mount, network and IPC namespaces, with all its files in one directory:
whatever becomes of a test, ending one process ends every container and every mount, and the
machine's own daemon, bridges and firewall are not touched. Containers reach each other and nothing
else. Needs root, dockerd, runc and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

READY_S = 60.0
CALL_S = 300.0
NEEDED = ("docker", "dockerd", "runc", "ip", "unshare")
# /run and /etc/docker are hidden from the daemon, which keeps sockets and a key there whatever its
# options say.
DAEMON = """
ip link set lo up
mount -t tmpfs none /run
[ ! -d /etc/docker ] || mount -t tmpfs none /etc/docker
echo '{}' > "$1/daemon.json"
exec dockerd --config-file "$1/daemon.json" --data-root "$1/data" --exec-root "$1/exec" --pidfile "$1/pid" \
    -H "unix://$1/sock" --bridge none --cgroup-parent "/$2" >"$1/log" 2>&1
"""
BASE_PROGRAMS = (
    *("sh", "cat", "chmod", "chown", "env", "id", "install", "ls", "mkdir", "rm", "sleep", "groupadd", "useradd"),
    *("mount", "umount", "unshare", "mksquashfs", "unsquashfs", "squashfuse", "fusermount3", "wget"),
)
BASE_LIBRARIES = (
    *(
        "librt.so.1",
        "libpthread.so.0",
        "libdl.so.2",
        "libutil.so.1",
        "libresolv.so.2",
        "libgcc_s.so.1",
        "libstdc++.so.6",
    ),
    *("libnss_files.so.2", "libnss_dns.so.2"),
)
"""What every Debian has and wheels rely on, though no program here loads it."""
NOT_OF_PYTHON = ("__pycache__", "test", "tests", "idlelib", "config-*", "*.a", "*.pyc", "lib2to3", "tkinter")


def missing() -> str:
    """What keeps a daemon from being started here, or ""."""
    if os.geteuid() != 0:
        return "needs root"
    lacking = [name for name in (*NEEDED, *BASE_PROGRAMS) if shutil.which(name) is None]
    return (
        f"needs {', '.join(lacking)} (Debian packages docker.io, squashfs-tools, squashfuse, fuse3)" if lacking else ""
    )


class Docker:
    """The command line client, talking to that daemon."""

    def __init__(self, place: Path, cgroup: str) -> None:
        self.place, self.cgroup = place, cgroup
        self.environ = {**os.environ, "DOCKER_HOST": f"unix://{place}/sock", "DOCKER_BUILDKIT": "0"}

    def call(
        self, *words: str, cwd: Path | None = None, check: bool = True, timeout_s: float = CALL_S
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["docker", *words],
            cwd=cwd,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, (
            f"docker {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        return done

    def import_image(self, root: Path, name: str, *changes: str) -> None:
        """Make the files below `root` an image of one layer."""
        archive = self.place / "image.tar"
        subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True, timeout=CALL_S)
        options = [word for change in changes for word in ("--change", change)]
        self.call("import", *options, str(archive), name)
        archive.unlink()


@contextlib.contextmanager
def running_docker() -> Iterator[Docker]:
    """A daemon that answers; afterwards nothing of it is left."""
    place = Path(tempfile.mkdtemp(prefix="p2pd-docker-"))  # not below pytest's directory: paths of sockets are short
    docker = Docker(place, f"p2pd-{secrets.token_hex(4)}")
    words = ["unshare", "--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    daemon = subprocess.Popen([*words, "sh", "-ec", DAEMON, "daemon", str(place), docker.cgroup])
    try:
        deadline = time.monotonic() + READY_S
        while docker.call("version", check=False).returncode != 0:
            log = place / "log"
            said = log.read_text()[-2000:] if log.exists() else ""
            assert daemon.poll() is None and time.monotonic() < deadline, f"dockerd does not answer: {said}"
            time.sleep(0.3)
        yield docker
    finally:
        daemon.kill()
        daemon.wait()
        remove_cgroups(docker.cgroup)
        remove_files(place)


def remove_cgroups(name: str) -> None:
    """Delete the daemon's control groups, innermost first, as soon as the processes in them have
    ended."""
    deadline = time.monotonic() + 60
    tops = [Path("/sys/fs/cgroup") / name, *Path("/sys/fs/cgroup").glob(f"*/{name}")]
    for top in tops:
        for folder, _folders, _files in os.walk(top, topdown=False):
            while os.path.isdir(folder):
                try:
                    os.rmdir(folder)
                except OSError:
                    assert time.monotonic() < deadline, f"the control group {folder} is still in use"
                    time.sleep(0.1)


def remove_files(place: Path) -> None:
    """Delete the daemon's files; its mounts go with the namespace, a moment after its processes."""
    deadline = time.monotonic() + 60
    while place.exists():
        try:
            shutil.rmtree(place)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


# -- a base image


def make_base(root: Path, programs: Sequence[str] = BASE_PROGRAMS) -> None:
    """Files of this machine that stand in for a Python image: `programs`, this Python with pip as
    /usr/local, and their libraries."""
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for name in ("etc", "dev", "proc", "sys", "run", "var/lib", "var/tmp", "srv", "opt", "root", "tmp"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n")
    (root / "etc" / "group").write_text("root:x:0:\nnogroup:x:65534:\n")
    (root / "etc" / "shadow").write_text("root:*:19000:0:99999:7:::\n")
    (root / "etc" / "ssl" / "certs").mkdir(parents=True)
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", root / "etc" / "ssl" / "certs")
    binaries = [Path(str(shutil.which(name))) for name in programs]
    for binary in binaries:
        shutil.copy(binary, root / "usr" / "bin" / binary.name)
    binaries += copy_python(root / "usr" / "local")
    libraries = {library for binary in binaries for library in libraries_of(binary)}
    home = next(library for library in libraries if library.name == "libc.so.6").parent
    libraries |= {home / name for name in BASE_LIBRARIES}
    for library in libraries:
        folder = "lib64" if library.name.startswith("ld-linux-x86-64") else "lib/x86_64-linux-gnu"
        (root / "usr" / folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / "usr" / folder / library.name)


def copy_python(target: Path) -> list[Path]:
    """Copy the Python that the tests' environment is made from, with pip and without other
    packages; returns what has libraries."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    source = Path(sys.base_prefix)
    (target / "bin").mkdir(parents=True)
    shutil.copy(source / "bin" / version, target / "bin" / version)
    for name in ("python", "python3"):
        (target / "bin" / name).symlink_to(version)
    ignore = shutil.ignore_patterns(*NOT_OF_PYTHON, "site-packages", "dist-packages")
    shutil.copytree(source / "lib" / version, target / "lib" / version, ignore=ignore, symlinks=True)
    pip = Path(subprocess.check_output([sys.executable, "-c", "import pip; print(pip.__path__[0])"], text=True).strip())
    shutil.copytree(pip, packages_of(target) / "pip", ignore=shutil.ignore_patterns("__pycache__"))
    run_pip = target / "bin" / "pip"
    run_pip.write_text(
        f"#!/usr/local/bin/{version}\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
    )
    run_pip.chmod(0o755)
    return [source / "bin" / version, *(source / "lib" / version).glob("lib-dynload/*.so")]


def packages_of(prefix: Path) -> Path:
    """Where this Python, copied to `prefix`, looks for packages: `site-packages`, or Debian's
    `dist-packages`."""
    return Path(site.getsitepackages([str(prefix)])[-1])


def libraries_of(binary: Path) -> list[Path]:
    """What the dynamic linker would load for `binary`."""
    said = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, timeout=30, check=False).stdout
    return [Path(path) for path in re.findall(r"(?:=> |^\s+)(/\S+) \(0x", said, re.MULTILINE)]
