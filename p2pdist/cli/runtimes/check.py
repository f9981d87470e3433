"""Whether the runtimes of this host really ask the mirror: each is told to pull an image whose name
was made up for this check, which is nowhere, and the agent says whether it was asked for it. Then
an image is pulled that is somewhere.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2pdist.cli.diagnosis import ANSWER_S, Finding
from p2pdist.cli.runtimes.files import HostFiles
from p2pdist.cli.runtimes.record import RECORD, Installation, load_record
from p2pdist.cli.runtimes.runtimes import CONTAINERD_CERTS, all_notes, certs_directory, runtime_of
from p2pdist.gateway.registry.counts import CHECK_REPOSITORY
from p2pdist.model.errors import P2PDistError
from p2pdist.model.image import DOCKER_HUB, parse_image

if TYPE_CHECKING:
    from collections.abc import Sequence

PULL_S = 60.0
HELLO = "docker.io/library/hello-world:latest"
"""A few kilobytes at Docker Hub."""

NAMESPACE = "p2pdist-check"
"""Of containerd: what is pulled into it is removed with it."""

SAID_CHARACTERS_MAX = 300

Words = list[str]


def mirrors(socket: Path, names: Sequence[str] = (), image: str = "") -> list[Finding]:
    """A finding for each runtime of `names`, by default for all that were installed: none when
    there are none. `image` is what is pulled by the runtimes that ask for its registry."""
    files = HostFiles(Path("/"))
    if not names and not os.access(files.place(RECORD), os.R_OK):
        hidden = files.exists(RECORD)
        remedy = "Run it as root"
        return (
            [Finding("mirror", "warning", "takes root to see which runtimes ask the mirror", remedy)] if hidden else []
        )
    try:
        installed = load_record(files).runtimes
    except P2PDistError as error:
        return [Finding("mirror", "failed", error.what, error.remedy)]
    findings = []
    for name in names or sorted(installed):
        installation = installed.get(name)
        if installation is None:
            why = f"{name} was not told to ask the mirror"
            findings.append(Finding(f"mirror {name}", "failed", why, f"p2pdist mirror install {name}"))
        else:
            findings.append(_mirror(files, socket, name, installation, image))
    return findings


def _mirror(files: HostFiles, socket: Path, name: str, installation: Installation, image: str) -> Finding:
    subject = f"mirror {name}"
    try:
        before = mirror_status(socket)
    except P2PDistError as error:
        return Finding(subject, "failed", f"the agent does not say: {error.what}", error.remedy)
    if before is None:
        return Finding(
            subject,
            "failed",
            "the agent has no mirror",
            "Start it with --mirror 127.0.0.1:7073, unless its log says that the port is taken",
        )
    probe = _probe_reference(name, installation, image)
    words = _pull(files, name, installation, probe)
    if not words:
        remedy = f"Install {'crictl' if name == 'crio' else runtime_of(name).program}, or see p2pdist mirror status"
        return Finding(subject, "warning", f"not checked: no program of {name} is there to pull with", remedy)
    done = _run(words)
    for remove in _removal(name, probe):
        _run(remove)
    try:
        after = mirror_status(socket) or before
    except P2PDistError as error:
        return Finding(subject, "failed", f"the agent does not say any more: {error.what}", error.remedy)
    if not _was_asked(before, after, probe):
        notes = all_notes(files, runtime_of(name), installation)
        remedy = "; ".join(
            [*notes, f"see p2pdist mirror status, and let {name} read its files again: {runtime_of(name).after}"]
        )
        return Finding(subject, "failed", f"{name} pulled {probe} and did not ask the mirror ({_said(done)})", remedy)
    reference = _reference(installation, image)
    if reference and (failure := _failure(files, name, installation, reference)):
        why = f"{name} asks the mirror, but {reference} did not come: {failure}"
        return Finding(subject, "failed", why, "See the agent's log, and whether the registry has the image")
    # ctr reads the files by itself: that says nothing of the CRI.
    notes = all_notes(files, runtime_of(name), installation) if words[0] == "ctr" else []
    detail = f"{name} asks the mirror at {installation.address} (for {reference or probe})"
    return Finding(subject, "ok", "; ".join([detail, *notes]))


def _was_asked(before: dict[str, Any], after: dict[str, Any], probe: str) -> bool:
    """Whether the mirror was asked for what nothing but this check had a runtime pull. An agent of
    an earlier version counts requests alone."""
    if "checks" not in after:
        return int(after.get("requests", 0)) > int(before.get("requests", 0))
    return parse_image(probe).name.repository in after["checks"]


def _failure(files: HostFiles, name: str, installation: Installation, reference: str) -> str:
    """Have a runtime pull an image; returns what it says where that fails."""
    present = _present(name, reference)
    here = bool(present) and _run(present).returncode == 0
    done = _run(_pull(files, name, installation, reference))
    if not here:
        for remove in _removal(name, reference):
            _run(remove)
    return "" if done.returncode == 0 else _said(done)


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or ["it failed"])[-1][:SAID_CHARACTERS_MAX]


def mirror_status(socket: Path) -> dict[str, Any] | None:
    """What the agent says of its mirror: `address` and `requests`; None when it has none. Raises
    what the call raises."""
    from p2pdist.agent.api.client import LocalClient

    status = LocalClient(socket, answer_s=ANSWER_S).status()
    mirror = status.get("mirror")
    return mirror if isinstance(mirror, dict) else None


def _probe_reference(name: str, installation: Installation, image: str) -> str:
    """An image that is nowhere, and of which nothing but this check knows."""
    upstreams = installation.upstreams
    named = parse_image(image).name.upstream if image else ""
    # Docker asks the mirror for others than Docker Hub only with one of its two image stores.
    usual = DOCKER_HUB if name == "docker" and DOCKER_HUB in upstreams else upstreams[0]
    return f"{named if named in upstreams else usual}/{CHECK_REPOSITORY}{secrets.token_hex(8)}:none"


def _reference(installation: Installation, image: str) -> str:
    """What is to come whole: the image when the mirror is asked for its registry; "" for
    nothing."""
    if image:
        parsed = parse_image(image)
        return str(parsed).removeprefix("docker://") if parsed.name.upstream in installation.upstreams else ""
    return HELLO if DOCKER_HUB in installation.upstreams else ""


def _pull(files: HostFiles, name: str, installation: Installation, reference: str) -> Words:
    """The command that has a runtime pull; empty when there is none. The CRI's own client comes
    first, since it sees what Kubernetes does."""
    crictl: Words = ["crictl", "pull", reference] if shutil.which("crictl") else []
    directory = certs_directory(files, installation) if name == "containerd" else CONTAINERD_CERTS
    ctr = ["ctr", "--namespace", NAMESPACE, "content", "fetch", "--hosts-dir", directory, reference]
    podman = (
        ["podman", "pull", reference]
        if shutil.which("podman")
        else ["skopeo", "inspect", "--raw", f"docker://{reference}"]
    )
    words = {"containerd": crictl or ctr, "docker": ["docker", "pull", reference], "podman": podman, "crio": crictl}[
        name
    ]
    return words if words and shutil.which(words[0]) else []


def _present(name: str, reference: str) -> Words:
    """The command that succeeds when an image was there before; empty where pulling leaves
    nothing."""
    tests: dict[str, Callable[[], Words]] = {
        "docker": lambda: ["docker", "image", "inspect", reference],
        "podman": lambda: ["podman", "image", "exists", reference] if shutil.which("podman") else [],
    }
    return tests[name]() if name in tests else []


def _removal(name: str, reference: str) -> list[Words]:
    """The commands that take away what was pulled."""
    if name == "containerd" and not shutil.which("crictl"):
        listing = _run(["ctr", "--namespace", NAMESPACE, "content", "ls", "--quiet"]).stdout.split()
        removals = [["ctr", "--namespace", NAMESPACE, "content", "rm", *listing]] if listing else []
        images = ["ctr", "--namespace", NAMESPACE, "images", "rm", reference]
        return [images, *removals, ["ctr", "namespaces", "rm", NAMESPACE]]
    tool = {"docker": ["docker", "image", "rm"], "podman": ["podman", "image", "rm"]}.get(name, ["crictl", "rmi"])
    return [[*tool, reference]] if shutil.which(tool[0]) else []


def _run(words: Words) -> subprocess.CompletedProcess[str]:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return subprocess.run(
            words, capture_output=True, text=True, timeout=PULL_S, check=False, stdin=subprocess.DEVNULL
        )
    return subprocess.CompletedProcess(
        words, 1, "", f"{words[0]} did not end within {PULL_S:.0f} s, or could not be run"
    )
