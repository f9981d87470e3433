"""A systemd of its own that runs the project's units, and a script among them that looks at what
they do.

It is the first process of new PID, mount, network, IPC, UTS and cgroup namespaces, over a copy of
this machine's files that is gone afterwards; its own units are all it starts. Nothing of it is seen
outside, nor are its mounts. Needs root and systemd.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from docker_rig import copy_python, libraries_of, packages_of, remove_cgroups, remove_files

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = Path("/opt/p2pdist")
RUN_S = 150.0
SYSTEMD = "/lib/systemd/systemd"
HIERARCHIES = ("systemd", "unified")
ENTRY = f"""#!{INSTALLED}/bin/python{sys.version_info.major}.{sys.version_info.minor}
import sys
from p2pdist.cli.main import main
sys.exit(main())
"""
# A tmpfs holds what changes of /, but for the agent's store: EROFS images cannot be mounted from a
# tmpfs.
BOOT = """
place=$1 root=$1/root
mount -t tmpfs none "$place/changes"
mkdir "$place/changes/upper" "$place/changes/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$place/changes/upper,workdir=$place/changes/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t tmpfs none "$root/sys/fs/cgroup"
mkdir "$root/sys/fs/cgroup/systemd" "$root/sys/fs/cgroup/unified"
mount -t cgroup -o none,name=systemd cgroup "$root/sys/fs/cgroup/systemd"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup/unified"
mount --rbind /dev "$root/dev"
mount -t tmpfs none "$root/run"
mount --bind "$place/lib" "$root/var/lib"
rm -rf "$root"/etc/systemd/system/*
mkdir -p "$root/opt/p2pdist" "$root/srv/told" "$root/srv/origin"
mount --bind "$place/opt" "$root/opt/p2pdist"
mount --bind "$place/told" "$root/srv/told"
cp -a "$place/files/." "$root/"
ip link set lo up
cd "$root"
pivot_root . tmp
umount -l /tmp
mount -t tmpfs none /tmp
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit=looked-at.target --log-target=console
"""
LOOK = """[Unit]
After=p2pdist-tracker.service p2pdist-agent.service
[Service]
Type=oneshot
ExecStart=-/bin/sh /srv/look.sh
ExecStopPost=/bin/systemctl exit 0
StandardOutput=append:/srv/told/out
StandardError=append:/srv/told/out
"""
TARGET = """[Unit]
Requires=basic.target
Wants=p2pdist-tracker.service p2pdist-agent.service look.service
AllowIsolate=yes
"""


def missing() -> str:
    """What keeps systemd from being run here, or ""."""
    if os.geteuid() != 0:
        return "needs root"
    lacking = [name for name in ("systemctl", "unshare", "ip", "pivot_root") if shutil.which(name) is None]
    if lacking or not Path(SYSTEMD).exists():
        return f"needs {', '.join([*lacking, SYSTEMD])} (Debian packages systemd, util-linux, iproute2)"
    if not all(Path("/sys/fs/cgroup", name).is_dir() for name in HIERARCHIES):
        return "needs the control groups of systemd's hybrid layout"
    return ""


def run_units(files: Mapping[str, str], script: str) -> str:
    """Start the tracker's and the agent's unit and run `script`, a shell script, beside them;
    returns all that it says. `files` are more files of that machine, by their paths without the
    first slash."""
    place = Path(tempfile.mkdtemp(prefix="p2pd-systemd-"))
    cgroup = f"p2pd-{secrets.token_hex(4)}"
    try:
        for name in ("changes", "root", "lib", "told", "opt", "files"):
            (place / name).mkdir()
        _install(place / "opt", place / "files")
        units = "etc/systemd/system"
        whole = {**files, f"{units}/look.service": LOOK, f"{units}/looked-at.target": TARGET, "srv/look.sh": script}
        for name, text in whole.items():
            path = place / "files" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        _boot(place, cgroup)
        told = place / "told" / "out"
        assert told.exists(), f"the script was not run: {(place / 'console').read_text(errors='replace')[-3000:]}"
        return told.read_text()
    finally:
        remove_cgroups(cgroup)
        remove_files(place)


def _boot(place: Path, cgroup: str) -> None:
    groups = [Path("/sys/fs/cgroup", hierarchy, cgroup) for hierarchy in HIERARCHIES]
    for group in groups:
        group.mkdir()
    join = "".join(f"echo $$ > {group}/cgroup.procs; " for group in groups)
    spaces = "--mount --pid --net --uts --ipc --cgroup --fork --kill-child"
    words = ["sh", "-ec", f'{join} exec unshare {spaces} sh -ec "$1" boot "$2"', "start", BOOT, str(place)]
    with (place / "console").open("wb") as console:
        machine = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=console, stderr=console)
        try:
            machine.wait(RUN_S)
        finally:
            machine.kill()
            machine.wait()


def _install(target: Path, files: Path) -> None:
    """This Python with the project and what it needs, where the units look for it; other users
    cannot read where it lies here."""
    binaries = copy_python(target)
    packages = packages_of(target)
    for name in ("p2pdist", "tracker"):
        shutil.copytree(ROOT / name, packages / name, ignore=shutil.ignore_patterns("__pycache__"))
    ours = importlib.metadata.distribution("p2pdist")
    for distribution in (ours, *_needed("p2pdist")):
        for file in distribution.files or ():
            installed = distribution is not ours or file.parts[0].endswith(".dist-info")  # what p2pdist's version reads
            if installed and ".." not in file.parts and "__pycache__" not in file.parts:
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), packages / file)
    program = target / "bin" / "p2pdist"
    program.write_text(ENTRY)
    program.chmod(0o755)
    folder = files / "usr" / "lib" / "x86_64-linux-gnu"
    folder.mkdir(parents=True)
    for library in libraries_of(binaries[0]):
        if library.name.startswith("libpython"):
            shutil.copy(library, folder)


def _needed(name: str) -> list[importlib.metadata.Distribution]:
    """The distributions that `name` needs, with theirs, without `name` itself; extras are left
    out."""
    found: dict[str, importlib.metadata.Distribution] = {}
    left = [name]
    while left:
        for requirement in importlib.metadata.requires(left.pop()) or ():
            wanted = re.match(r"[\w.-]+", requirement)
            assert wanted is not None
            if "extra ==" in requirement or wanted[0] in found:
                continue
            try:
                found[wanted[0]] = importlib.metadata.distribution(wanted[0])
            except importlib.metadata.PackageNotFoundError:
                continue  # for another Python or another system
            left.append(wanted[0])
    return list(found.values())
