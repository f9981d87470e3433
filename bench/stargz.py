"""From the pull of an image to its program's first line with containerd: the image pulled whole,
and as eStargz lazily by the stargz-snapshotter, as it is and optimised for this start.

    make setup-stargz
    sudo python -m bench.stargz --package /srv/lazy --images /srv/stargz --modules torch

DIR of `--package` is what lazy_package.py makes, the program is that of bench.lazy. The image has
two layers: this interpreter with its standard library and the shared libraries that ldd names, and
the package's files below /site. With `--images DIR` its three forms stay in DIR, which is the
storage of docker-registry, and each is made once; that takes minutes. The optimised form is made by
`ctr-remote image optimize`, which records a start; its tag has the modules in it. All forms are
compressed at the same `--level` of gzip, which their tags name too; ctr-remote's own default is 9.

The registry is in one network namespace, containerd and the snapshotter in another, behind a link
of the given rate (tbf). Every start has a containerd and a snapshotter with empty directories, and
begins with an empty page cache, but for the blobs of the registry, which is another host. All three
ways pull with `ctr-remote image rpull`, which unpacks a layer once that has come, and run with
`ctr-remote run`. What runs lies below TMPDIR and is removed afterwards, mounts and namespaces too,
also after SIGINT and SIGTERM.

Debian's stargz-snapshotter has ctr-remote and no containerd-stargz-grpc. `make setup-stargz` builds
a daemon, stargz_daemon.go, around the library of the same version that Debian has, with the default
configuration. Where it is not there, lazy ways are left out.

Columns: seconds from the command (pull and run) to the first line, their least, seconds until the
pull had ended, and bytes that came over the link until the first line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.lazy import FAR, NEAR, NEAR_ADDRESS, end_when_asked, forget_pages, link, received_bytes, within
from bench.lazy_package import MADE, MIB, PROGRAM, Made
from bench.stargz_image import write_layout
from bench.table import figure, median, render

DAEMON = Path(sys.prefix) / "stargz" / "stargz-daemon"
PROGRAMS = {"containerd": "containerd", "docker-registry": "docker-registry", "ctr-remote": "stargz-snapshotter"}
"""What must be there, each with the Debian package that brings it."""
REGISTRY = f"{NEAR_ADDRESS}:5000"
SPACE = f"p2pstargz-{os.getpid()}"
"""The namespace of containers, which names what runc and cgroups have outside of our directory."""
READY_S, ENDED_S = 60.0, 30.0
RECORD_S = 300
"""A recorded start may take so long."""
WHOLE, LAZY, OPTIMISED = "image pulled whole", "eStargz, lazy", "eStargz optimised for this start, lazy"
WAYS = (WHOLE, LAZY, OPTIMISED)


@dataclass(frozen=True, slots=True)
class Row:
    """One start; seconds are from the command on."""

    way: str
    first_line_s: float
    pulled_s: float
    first_line_bytes: int


@dataclass(frozen=True, slots=True)
class Image:
    """What the images hold: a package, for a program that imports `modules`, at a level of gzip."""

    source: Path
    modules: str
    level: int

    def tag(self, way: str) -> str:
        """The tag of the form that a way pulls."""
        optimised = "optimised-" + re.sub(r"[^A-Za-z0-9_]+", "-", self.modules)
        form = {WHOLE: "plain", LAZY: "estargz", OPTIMISED: optimised}[way]
        return f"{form}-gzip{self.level}"

    def name(self, way: str) -> str:
        """Where the registry has it."""
        return f"{REGISTRY}/app:{self.tag(way)}"


def command(modules: str) -> list[str]:
    """The program, in the image."""
    return [os.path.realpath(sys.executable), "-I", "-S", "-c", PROGRAM, modules]


@contextmanager
def daemon(space: str, log: Path, words: Sequence[str], ready: Callable[[], bool]) -> Iterator[None]:
    """A process that is awaited, and stopped in the end."""
    with log.open("ab") as output:
        process = subprocess.Popen(within(space, words), stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + READY_S
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{words[0]} does not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def registry(place: Path, images: Path) -> Any:
    """A registry that has its blobs in `images`."""
    config = {"version": 0.1, "storage": {"filesystem": {"rootdirectory": str(images)}}, "http": {"addr": REGISTRY}}
    (place / "registry.yml").write_text(json.dumps(config))
    log = place / "registry.log"
    words = ["docker-registry", "serve", str(place / "registry.yml")]
    return daemon(NEAR, log, words, lambda: "listening on" in log.read_text())


def manifest(images: Path, name: str) -> dict[str, Any] | None:
    """What a tag of the registry names; None where it is not there."""
    tags = images / "docker/registry/v2/repositories/app/_manifests/tags"
    try:
        digest = (tags / name / "current" / "link").read_text()
    except FileNotFoundError:
        return None
    return dict(json.loads(blob(images, digest).read_text()))


def blob(images: Path, digest: str) -> Path:
    """Where the registry has a blob."""
    sha256 = digest.partition(":")[2]
    return images / "docker/registry/v2/blobs/sha256" / sha256[:2] / sha256 / "data"


class Host:
    """A containerd with all that it has below `directory`, and a stargz-snapshotter where `lazy`
    names its daemon."""

    def __init__(self, directory: Path, space: str, lazy: Path | None = None) -> None:
        self._directory, self._space, self._lazy = directory, space, lazy
        self._socket, self._stargz = directory / "c.sock", directory / "s.sock"

    def words(self, *words: str) -> list[str]:
        """A command of ctr-remote."""
        return within(self._space, ["ctr-remote", "-a", str(self._socket), "-n", SPACE, *words])

    def do(self, *words: str, **options: Any) -> None:
        """Have a command of ctr-remote done; what it prints stays in a log."""
        env, log = os.environ | {"TMPDIR": str(self._directory)}, self._directory.with_suffix(".log")
        with log.open("ab") as output:
            done = subprocess.run(self.words(*words), stdout=output, stderr=output, env=env, check=False, **options)
        if done.returncode:
            raise SystemExit(f"ctr-remote {' '.join(words)} failed: {log.read_text()[-2000:]}")

    def run(self, image: str, snapshotter: str, modules: str) -> subprocess.Popen[str]:
        """Start the program in a container."""
        words = ("run", "--rm", "--snapshotter", snapshotter, "--runc-root", str(self._directory / "runc"))
        run = self.words(*words, image, "program", *command(modules))
        return subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Until the block ends; then nothing of it is left but logs."""
        self._directory.mkdir()
        config, log = self._directory / "config.toml", self._directory.with_suffix(".log")
        unused = [f"io.containerd.snapshotter.v1.{name}" for name in ("aufs", "btrfs", "devmapper", "zfs")]
        unused += ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]
        lines = ["version = 2", f'root = "{self._directory}/root"', f'state = "{self._directory}/state"']
        lines += [f"disabled_plugins = {json.dumps(unused)}", "[grpc]", f'address = "{self._socket}"']
        lines += ["[proxy_plugins.stargz]", 'type = "snapshot"', f'address = "{self._stargz}"'] if self._lazy else []
        config.write_text("\n".join(lines))
        stargz = [str(self._lazy), "--address", str(self._stargz), "--root", str(self._directory / "stargz")]
        containerd = ["containerd", "--config", str(config)]
        with ExitStack() as stack:
            stack.callback(self._clear)
            if self._lazy is not None:
                stack.enter_context(daemon(self._space, log, stargz, self._stargz.exists))
            stack.callback(self._end_containers)
            stack.enter_context(daemon(self._space, log, containerd, self._socket.exists))
            yield

    def _end_containers(self) -> None:
        """End containers and their shims, which outlive containerd."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended meanwhile
                words = (process / "cmdline").read_text().split("\0")
                if str(self._socket) not in words or "-id" not in words:
                    continue
                children = (process / "task" / process.name / "children").read_text().split()
                for number in (process.name, *children):
                    os.kill(int(number), signal.SIGKILL)
                name = f"{self._socket}/{SPACE}/{words[words.index('-id') + 1]}"  # as containerd makes it
                Path("/run/containerd/s", hashlib.sha256(name.encode()).hexdigest()).unlink()
                deadline = time.monotonic() + ENDED_S
                while any(Path("/proc", number).exists() for number in children) and time.monotonic() < deadline:
                    time.sleep(0.05)

    def _clear(self) -> None:
        """Unmount and remove what is left."""
        points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for point in reversed([point for point in points if self._directory in Path(point).parents]):
            subprocess.run(["umount", "--lazy", point], check=False)
        for group in (*Path("/sys/fs/cgroup").glob(f"*/{SPACE}"), Path("/sys/fs/cgroup", SPACE)):
            with suppress(OSError):
                for path in (*group.glob("*/"), group):  # directories of cgroups have files, yet go
                    path.rmdir()
        shutil.rmtree(Path("/run/containerd/runc", SPACE), ignore_errors=True)
        shutil.rmtree(self._directory, ignore_errors=True)


def make_images(place: Path, images: Path, image: Image, ways: Sequence[str]) -> None:
    """Have the registry hold the forms of the image that are missing."""
    missing = [way for way in (WHOLE, *ways) if not manifest(images, image.tag(way))]
    if not missing:
        return
    plain, host = image.name(WHOLE), Host(place / "maker", NEAR)
    with host.running():
        if WHOLE in missing:
            write_layout(place / "layout", image.source, plain, image.level)
            with subprocess.Popen(["tar", "-c", "-C", str(place / "layout"), "."], stdout=subprocess.PIPE) as tar:
                host.do("image", "import", "--no-unpack", "-", stdin=tar.stdout)
            shutil.rmtree(place / "layout")
            host.do("image", "push", "--plain-http", plain)
        else:
            host.do("content", "fetch", "--plain-http", plain)
        first, *rest = command(image.modules)
        record = ("--entrypoint", json.dumps([first]), "--args", json.dumps(rest), "--period", str(RECORD_S))
        level = ("--oci", "--estargz-compression-level", str(image.level))
        for way, options in ((LAZY, ("--no-optimize",)), (OPTIMISED, record)):
            if way in missing:
                host.do("image", "optimize", *level, *options, plain, image.name(way))
                host.do("image", "push", "--plain-http", image.name(way))


def start(place: Path, images: Path, way: str, image: Image, lazy: Path) -> Row:
    """One start on a host that has nothing."""
    snapshotter, name = "overlayfs" if way == WHOLE else "stargz", image.name(way)
    layers = (manifest(images, image.tag(way)) or {})["layers"]
    host = Host(place / "cold", FAR, None if way == WHOLE else lazy)
    with host.running():
        forget_pages()
        for layer in layers:  # the registry is another host
            with blob(images, layer["digest"]).open("rb", buffering=0) as file:
                while file.read(MIB):
                    pass
        before, began = received_bytes(), time.monotonic()
        host.do("image", "rpull", "--plain-http", "--snapshotter", snapshotter, name)
        pulled_s = time.monotonic() - began
        with host.run(name, snapshotter, image.modules) as program:
            assert program.stdin is not None and program.stdout is not None
            try:
                line = program.stdout.readline()
                row = Row(way, time.monotonic() - began, pulled_s, received_bytes() - before)
            except BaseException:
                program.kill()
                raise
            program.stdin.close()
        if line != "ready\n" or program.returncode:
            raise SystemExit(f"the program ended with {program.returncode}: {way}")
    return row


def table(rows: Sequence[Row], made: Made, stored: dict[str, int], rate_mbit: float) -> str:
    """The medians, and what the images take in the registry."""
    lines = []
    for way in WAYS:
        runs = [row for row in rows if row.way == way]
        if runs:
            came = median(row.first_line_bytes / MIB for row in runs)
            cells = [median(row.first_line_s for row in runs), min(row.first_line_s for row in runs)]
            cells += [median(row.pulled_s for row in runs)]
            lines.append((way, *map(figure, cells), figure(came, 1), figure(stored[way] / MIB, 1)))
    heads = ("way", "first line s", "best s", "pulled s", "MiB by then", "image MiB")
    notes = [f"not measured: {way}" for way in WAYS if way not in stored]
    title = f"{made.files:,} files, {made.bytes_source / MIB:,.0f} MiB, at {rate_mbit:g} Mbit/s"
    return render(title, heads, lines, notes)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.stargz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", type=Path, required=True, metavar="DIR", help="that lazy_package.py made")
    parser.add_argument("--images", type=Path, metavar="DIR", help="where images stay [a new one below TMPDIR]")
    parser.add_argument("--modules", default="numpy,aiohttp,zstandard", help="what is imported [%(default)s]")
    parser.add_argument("--level", type=int, default=6, help="of gzip, for all forms [%(default)s]")
    parser.add_argument("--rate-mbit", type=float, default=400.0, help="of the link [%(default)s]")
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the median is told [%(default)s]")
    parser.add_argument("--daemon", type=Path, default=DAEMON, help="of the snapshotter [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    chosen = parser.parse_args(words)
    if not (chosen.package / MADE).exists():
        parser.error(f"{chosen.package} is no package of bench.lazy_package")
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if missing:
        parser.error(f"install {' '.join(missing)}")
    if os.geteuid() != 0:
        parser.error("namespaces and mounts need root")
    return chosen


def main() -> int:
    chosen = arguments()
    end_when_asked()
    directory = chosen.package.resolve()
    made = Made(directory, **json.loads((directory / MADE).read_text()))
    ways = WAYS if chosen.daemon.exists() else (WHOLE,)
    if ways != WAYS:
        print(f"{chosen.daemon} is not there (make setup-stargz): no lazy starts", file=sys.stderr)
    place = Path(tempfile.mkdtemp(prefix="p2pstargz-"))
    images = chosen.images.absolute() if chosen.images else place / "images"
    image = Image(made.source, chosen.modules, chosen.level)
    rows: list[Row] = []
    try:
        with link(chosen.rate_mbit), registry(place, images):
            make_images(place, images, image, ways)
            for _ in range(chosen.repeat):
                for way in ways:
                    rows.append(start(place, images, way, image, chosen.daemon))
                    print(rows[-1], file=sys.stderr, flush=True)
        manifests = {way: manifest(images, image.tag(way)) or {"layers": []} for way in ways}
        stored = {way: sum(layer["size"] for layer in manifests[way]["layers"]) for way in ways}
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if chosen.json:
        package = asdict(made) | {"directory": os.fspath(made.directory)}
        print(json.dumps({"package": package, "stored": stored, "rows": [asdict(row) for row in rows]}))
    else:
        print(table(rows, made, stored, chosen.rate_mbit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
