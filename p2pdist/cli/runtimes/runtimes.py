"""The container runtimes that can ask a mirror: which files say so, what each of them is to say,
and what else of the host decides whether the runtime reads them."""

from __future__ import annotations

import glob
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from p2pdist.cli.runtimes import edits
from p2pdist.cli.runtimes.files import HostFiles
from p2pdist.cli.runtimes.record import Installation, Record
from p2pdist.model.errors import Conflict, Corrupt, P2PDistError
from p2pdist.model.image import DOCKER_HUB

VERSION_S = 5.0
DIAL_TIMEOUT_SINCE = (2, 1)
"""The containerd that first knew `dial_timeout`. Earlier ones wait as long as connecting takes."""

CONTAINERD_CONFIG = "/etc/containerd/config.toml"
CONTAINERD_CERTS = "/etc/containerd/certs.d"
DOCKER_CERTS = "/etc/docker/certs.d"
DAEMON_JSON = "/etc/docker/daemon.json"
REGISTRIES = "/etc/containers/registries.conf"
DROP_INS = "/etc/containers/registries.conf.d"
DROP_IN = f"{DROP_INS}/99-p2pdist.conf"
"""The last of its directory: of two files that name an upstream, the later one counts."""

_BINARIES = ("/usr/bin", "/usr/local/bin", "/usr/sbin", "/usr/local/sbin", "/opt/bin")
_CRI_TABLES = {"io.containerd.cri.v1.images": 3, "io.containerd.grpc.v1.cri": 2}
"""The plugins of containerd that hold `registry`, and the version of the file that names them
so."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A file and what it is to say: `add` makes the new text from the one without the mirror, or
    from None where there is no such file."""

    path: str
    add: Callable[[str | None], str]


@dataclass(frozen=True, slots=True)
class Runtime:
    """One runtime. `edits` are its files for a record of what is to be installed, `notes` what
    keeps it from reading them, `after` what makes it read them."""

    name: str
    program: str
    edits: Callable[[HostFiles, Record, Installation], Iterator[Edit]]
    notes: Callable[[HostFiles, Installation], Iterator[str]]
    after: str


def runtime_of(name: str) -> Runtime:
    """One of RUNTIMES."""
    return next(runtime for runtime in RUNTIMES if runtime.name == name)


# -- containerd


def certs_directory(files: HostFiles, installation: Installation) -> str:
    """Where containerd's hosts.toml files belong: what was given, the first directory of
    `config_path`, else the usual place."""
    if installation.certs_dir:
        return installation.certs_dir
    paths = [path for path, _ in _config_paths(files) if path]
    return paths[0].split(":")[0].rstrip("/") if paths else CONTAINERD_CERTS


def _config_paths(files: HostFiles) -> list[tuple[str, bool]]:
    """`config_path` of each CRI plugin in config.toml and what it imports, and whether the older
    settings of mirrors are there as well, with which containerd refuses to start."""
    found = []
    for path in _with_imports(files):
        text = files.read(path)
        body = edits.parse_toml(text, path) if text is not None else {}
        for plugin in _CRI_TABLES:
            registry: Any = body.get("plugins")
            for key in (plugin, "registry"):
                registry = registry.get(key) if isinstance(registry, dict) else None
            if isinstance(registry, dict):
                old = bool(registry.get("mirrors") or registry.get("configs"))
                found.append((str(registry.get("config_path") or ""), old))
    return found


def _with_imports(files: HostFiles) -> Iterator[str]:
    text = files.read(CONTAINERD_CONFIG)
    if text is None:
        return
    yield CONTAINERD_CONFIG
    imports = edits.parse_toml(text, CONTAINERD_CONFIG).get("imports")
    for pattern in imports if isinstance(imports, list) else []:
        if isinstance(pattern, str) and pattern.startswith("/"):
            for place in sorted(glob.glob(str(files.place(pattern)))):
                yield "/" + os.path.relpath(place, files.root)


def _hosts_edits(files: HostFiles, directory: str, installation: Installation, *, timeout: bool) -> Iterator[Edit]:
    names = files.names(directory)
    for upstream in installation.upstreams:
        host, colon, port = upstream.rpartition(":")
        # containerd looks for this spelling of a port first.
        spelt = f"{host}_{port}_" if colon and f"{host}_{port}_" in names else upstream
        place = f"{directory}/{spelt}"
        default = "" if spelt in names else f"{directory}/_default"
        yield Edit(f"{place}/hosts.toml", partial(_with_host, files, place, default, installation.address, timeout))


def _with_host(files: HostFiles, place: str, default: str, url: str, timeout: bool, before: str | None) -> str:
    """A new file goes on with what counted until now: certificates beside it, or what `_default`
    says of registries without a directory of their own."""
    path = f"{place}/hosts.toml"
    if before is None and default and (general := files.read(f"{default}/hosts.toml")) is not None:
        before = edits.with_absolute_files(general, default, f"{default}/hosts.toml")
    elif before is None:
        before = edits.certificates_of(place, files.names(place))
    return edits.with_host(before, url, path, dial_timeout=timeout)


def _containerd(files: HostFiles, _record: Record, installation: Installation) -> Iterator[Edit]:
    version = program_version(files, "containerd")
    timeout = version is None or version >= DIAL_TIMEOUT_SINCE
    yield from _hosts_edits(files, certs_directory(files, installation), installation, timeout=timeout)


def _containerd_notes(files: HostFiles, installation: Installation) -> Iterator[str]:
    directory = certs_directory(files, installation)
    found = _config_paths(files)
    if not any(directory in path.split(":") for path, _ in found):
        table = '[plugins."io.containerd.grpc.v1.cri".registry] (version 3: [plugins."io.containerd.cri.v1.images".registry])'
        yield (
            f'containerd\'s CRI, which Kubernetes uses, does not read {directory}: write config_path = "{directory}" below {table} '
            f"in {CONTAINERD_CONFIG}, and restart containerd. ctr and nerdctl read it as it is"
        )
    if any(path and old for path, old in found):
        yield (
            f"{CONTAINERD_CONFIG} has registry.mirrors or registry.configs beside config_path, and containerd refuses to start "
            "with both: remove them"
        )


# -- Docker


def _docker(files: HostFiles, _record: Record, installation: Installation) -> Iterator[Edit]:
    if DOCKER_HUB in installation.upstreams:

        def add(before: str | None) -> str:
            return edits.with_registry_mirror(before, installation.address, DAEMON_JSON)

        yield Edit(DAEMON_JSON, add)
    yield from _hosts_edits(files, installation.certs_dir or DOCKER_CERTS, installation, timeout=True)


def _docker_notes(files: HostFiles, installation: Installation) -> Iterator[str]:
    others = [upstream for upstream in installation.upstreams if upstream != DOCKER_HUB]
    if others:
        mirror = edits.mirror_location(installation.address, others[0])
        yield (
            "Docker asks a mirror for other registries than Docker Hub only with its containerd image store (the default since 29). "
            f"Without it, write images of {', '.join(others)} as {mirror}/REPOSITORY:TAG"
        )
    if files.root == Path("/") and any(b"--registry-mirror" in words for words in _command_lines("dockerd")):
        yield (
            f"dockerd was started with --registry-mirror, and does not start with that and {DAEMON_JSON} both: "
            "remove the flag from its unit"
        )


def _command_lines(program: str) -> Iterator[bytes]:
    for name in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(name, "rb") as file:
                words = file.read(1 << 16)
        except OSError:
            continue
        if os.path.basename(words.split(b"\0")[0]) == program.encode():
            yield words


# -- podman, skopeo, buildah, CRI-O


def _registries(files: HostFiles, record: Record, _installation: Installation) -> Iterator[Edit]:
    """One file for all programs that read it."""
    wanted: dict[str, tuple[str, dict[str, Any]]] = {}
    for name in REGISTRIES_READERS:
        installation = record.runtimes.get(name)
        if installation is not None:
            known = {upstream: _known_registry(files, upstream) for upstream in installation.upstreams}
            wanted |= {upstream: (installation.address, said) for upstream, said in known.items()}
    yield Edit(DROP_IN, partial(_with_registries, wanted))


def _with_registries(wanted: Mapping[str, tuple[str, dict[str, Any]]], before: str | None) -> str:
    return edits.with_registries(before, wanted, DROP_IN)


def _known_registry(files: HostFiles, upstream: str) -> dict[str, Any]:
    """What the other files say of an upstream, the last of them. Raises Conflict when one of them
    comes after ours."""
    known: dict[str, Any] = {}
    for path in _registries_files(files):
        text = files.read(path)
        registry = edits.registry_of(text, upstream, path) if text is not None else None
        if registry is not None and path > DROP_IN:
            raise Conflict(
                f"{path} says where {upstream} is, and comes after {DROP_IN}",
                remedy="Give it a name that comes before, such as 50-registries.conf",
            )
        known = registry or known
    return known


def _registries_files(files: HostFiles) -> list[str]:
    drop_ins = [f"{DROP_INS}/{name}" for name in files.names(DROP_INS) if name.endswith(".conf")]
    return [REGISTRIES, *(path for path in drop_ins if path != DROP_IN)]


def _registries_notes(files: HostFiles, installation: Installation) -> Iterator[str]:
    for path in _registries_files(files):
        text = files.read(path)
        registries = edits.parse_toml(text, path).get("registry", []) if text is not None else []
        for registry in registries if isinstance(registries, list) else []:
            prefix = str(registry.get("prefix") or registry.get("location") or "") if isinstance(registry, dict) else ""
            for upstream in installation.upstreams:
                if prefix.startswith(f"{upstream}/"):
                    yield f"{path} has settings for {prefix}: images there are not asked for at the mirror"


# -- all


def program_version(files: HostFiles, program: str) -> tuple[int, int] | None:
    """Major and minor version of a program of the host; None where it cannot be told."""
    path = program_path(files, program)
    if path is None:
        return None
    try:
        done = subprocess.run(
            [str(path), "--version"],
            capture_output=True,
            text=True,
            timeout=VERSION_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    match = re.search(r"\bv?([0-9]+)\.([0-9]+)\.[0-9]", done.stdout)
    return (int(match[1]), int(match[2])) if match else None


def program_path(files: HostFiles, program: str) -> Path | None:
    """Where the host has a program."""
    places = (files.place(f"{directory}/{program}") for directory in _BINARIES)
    return next((place for place in places if place.is_file()), None)


def all_notes(files: HostFiles, runtime: Runtime, installation: Installation) -> list[str]:
    """What a user should know of a runtime with the mirror. A file that cannot be read is one of
    the notes."""
    notes = []
    if files.root == Path("/") and program_path(files, runtime.program) is None:
        notes.append(f"there is no {runtime.program} on this host yet: it asks the mirror when it is installed")
    try:
        notes.extend(runtime.notes(files, installation))
    except (Corrupt, Conflict, P2PDistError) as error:
        notes.append(str(error))
    return notes


REGISTRIES_READERS = ("podman", "crio")

RUNTIMES = (
    Runtime("containerd", "containerd", _containerd, _containerd_notes, "containerd reads it at the next pull"),
    Runtime("docker", "dockerd", _docker, _docker_notes, "systemctl reload docker"),
    Runtime("podman", "podman", _registries, _registries_notes, "podman, skopeo and buildah read it at the next pull"),
    Runtime("crio", "crio", _registries, _registries_notes, "systemctl reload crio"),
)
