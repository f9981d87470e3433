"""`p2pdist mirror`: container runtimes of this host that ask its agent before a registry."""

from __future__ import annotations

import difflib
import socket as sockets
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
import msgspec

from p2pdist.cli import output
from p2pdist.cli.services import socket_option
from p2pdist.model.address import on_this_machine
from p2pdist.model.errors import P2PDistError, UsageError
from p2pdist.model.image import MIRROR_PORT, image_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from p2pdist.cli.runtimes.installation import Outcome

CONNECT_S = 2.0
RUNTIMES = ("containerd", "docker", "podman", "crio")
OTHERS = {
    "cri-o": "It is called crio here",
    "dockerd": "It is called docker here",
    "skopeo": "skopeo reads the same files as podman: name podman",
    "buildah": "buildah reads the same files as podman: name podman",
    "nerdctl": "nerdctl pulls by containerd: name containerd",
    "ctr": "ctr pulls by containerd: name containerd, and give ctr --hosts-dir",
    "kubernetes": "Kubernetes pulls by the runtime of its nodes: name containerd or crio",
    "k3s": "k3s has a containerd of its own: name containerd, with --certs-dir /var/lib/rancher/k3s/agent/etc/containerd/certs.d",
    "enroot": "enroot has no settings for mirrors: write docker://localhost:7073#UPSTREAM/REPOSITORY:TAG (docs/operations.md)",
    "pyxis": "pyxis pulls by enroot, which has no settings for mirrors: see docs/operations.md",
}
"""What users may name instead, and what to do."""


class RuntimeName(click.Choice[str]):
    """One of RUNTIMES; says what to do for programs that are none."""

    def __init__(self) -> None:
        super().__init__(RUNTIMES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The name; raises UsageError for another one."""
        if value not in RUNTIMES:
            known = f"Runtimes are {', '.join(RUNTIMES)}"
            raise UsageError(
                f"{str(value)[:80]!r} is no container runtime that p2pdist can set up",
                remedy=OTHERS.get(str(value), known),
            )
        return value


def root_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """--root, of the host."""
    return click.option(
        "--root",
        default="/",
        show_default=True,
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Where the root of the host is, as in a container that has it mounted.",
    )(function)


@click.group("mirror")
def command() -> None:
    """Have the container runtimes of this host ask its agent before a registry, and take that
    back. The agent serves images of the registries that the tracker knows (--upstream); where it
    does not answer, a runtime goes on to the registry itself.

    \b
    Examples:
      p2pdist mirror install containerd --upstream docker.io --upstream ghcr.io
      p2pdist mirror check
      p2pdist mirror uninstall containerd
    """


@command.command("install")
@click.argument("runtime", type=RuntimeName(), metavar="containerd|docker|podman|crio")
@click.option(
    "--upstream",
    "upstreams",
    multiple=True,
    metavar="HOST[:PORT]",
    help="A registry whose images come through the mirror, such as docker.io; may be repeated [default: those that the agent knows].",
)
@click.option(
    "--address",
    default="",
    metavar="HOST:PORT or URL",
    help=f"Where the mirror is [default: what the agent says, else 127.0.0.1:{MIRROR_PORT}].",
)
@click.option(
    "--certs-dir",
    default="",
    metavar="DIR",
    help="Where containerd or Docker reads hosts.toml files [default: config_path of containerd's config.toml, /etc/docker/certs.d].",
)
@root_option
@click.option("--dry-run", is_flag=True, help="Print what would be written, and write nothing.")
@socket_option
@output.json_option
def install(
    runtime: str,
    upstreams: tuple[str, ...],
    address: str,
    certs_dir: str,
    root: Path,
    dry_run: bool,
    socket: Path,
    as_json: bool,
) -> None:
    """Write the files by which a runtime asks the mirror first. Everything else in them stays; what
    is installed already is added to, and installing it twice changes nothing.

    \b
    Examples:
      p2pdist mirror install docker --upstream docker.io --dry-run
      p2pdist mirror install podman --upstream registry.example:5000
    """
    from p2pdist.cli.runtimes.files import HostFiles
    from p2pdist.cli.runtimes.installation import install as carry_out
    from p2pdist.cli.runtimes.record import Installation

    if certs_dir and (runtime not in ("containerd", "docker") or not certs_dir.startswith("/")):
        raise UsageError("--certs-dir is an absolute path that containerd or Docker reads", remedy="Leave it out")
    url = mirror_url(address) if address else ""
    asked = _ask_agent(socket) if root == Path("/") and not (url and upstreams) else {}
    upstreams = _names(upstreams) or tuple(asked.get("upstreams", ()))
    if not upstreams:
        raise UsageError(
            "no --upstream is given, and no agent says for which registries there is a mirror",
            remedy="Name the registries: --upstream docker.io",
        )
    told = str((asked.get("mirror") or {}).get("address") or f"127.0.0.1:{MIRROR_PORT}")
    installation = Installation(url or mirror_url(told), upstreams, certs_dir.rstrip("/"))
    outcome = carry_out(HostFiles(root), runtime, installation, dry_run=dry_run)
    if root == Path("/") and not _answers(installation.address):
        note = f"nothing answers at {installation.address} yet: start the agent, and see its --mirror"
        outcome = msgspec.structs.replace(outcome, notes=(*outcome.notes, note))
    _print(runtime, outcome, dry_run=dry_run, as_json=as_json)


@command.command("uninstall")
@click.argument("runtime", type=RuntimeName(), metavar="containerd|docker|podman|crio")
@click.option(
    "--upstream", "upstreams", multiple=True, metavar="HOST[:PORT]", help="Only for this registry; may be repeated."
)
@root_option
@click.option("--dry-run", is_flag=True, help="Print what would be written, and write nothing.")
@output.json_option
def uninstall(runtime: str, upstreams: tuple[str, ...], root: Path, dry_run: bool, as_json: bool) -> None:
    """Take back what `install` wrote. A file that was not touched since becomes what it was before;
    from one that was, the lines of the mirror are taken.

    \b
    Example:
      p2pdist mirror uninstall containerd
    """
    from p2pdist.cli.runtimes.files import HostFiles
    from p2pdist.cli.runtimes.installation import uninstall as carry_out

    outcome = carry_out(HostFiles(root), runtime, _names(upstreams), dry_run=dry_run)
    _print(runtime, outcome, dry_run=dry_run, as_json=as_json)


@command.command("status")
@root_option
@output.json_option
def status(root: Path, as_json: bool) -> None:
    """Print which runtimes ask the mirror for which registries, whether their files are still as
    they were written, and what keeps a runtime from reading them.

    \b
    Example:
      p2pdist mirror status --json
    """
    from p2pdist.cli.runtimes.files import HostFiles
    from p2pdist.cli.runtimes.record import load_record, text_digest
    from p2pdist.cli.runtimes.runtimes import all_notes, runtime_of

    files = HostFiles(root)
    record = load_record(files)
    states = {}
    for path, kept in record.files.items():
        text = files.read(path)
        same = text is not None and text_digest(text) == kept.wrote
        states[path] = "gone" if text is None else "as written" if same else "edited since"
    rows = [
        {
            "runtime": name,
            "address": installation.address,
            "upstreams": installation.upstreams,
            "notes": all_notes(files, runtime_of(name), installation),
        }
        for name, installation in record.runtimes.items()
    ]
    if as_json:
        output.print_json({"runtimes": rows, "files": states})
        return
    if not rows:
        output.say("no runtime was told to ask the mirror: p2pdist mirror install does that")
    for row in rows:
        output.say(f"{row['runtime']}  {row['address']}  {', '.join(row['upstreams'])}")
        for note in row["notes"]:
            output.say(f"  note: {note}")
    for path, state in states.items():
        output.say(f"{path}  {state}")


@command.command("check")
@click.argument("runtimes", type=RuntimeName(), nargs=-1, metavar="[RUNTIME]...")
@click.option(
    "--image", default="", metavar="REF", help="A small image to pull, such as docker.io/library/busybox:latest."
)
@socket_option
@output.json_option
def check(runtimes: tuple[str, ...], image: str, socket: Path, as_json: bool) -> int:
    """Have each runtime that was set up pull something, and see whether the mirror was asked. Ends
    with 1 when it was not. What is pulled is removed again; without --image it is a few kilobytes,
    or the attempt to pull an image that does not exist.

    \b
    Example:
      p2pdist mirror check containerd --image docker.io/library/busybox:latest
    """
    from p2pdist.cli.runtimes.check import mirrors

    findings = mirrors(socket.absolute(), runtimes, image)
    failed = any(finding.state == "failed" for finding in findings)
    if as_json:
        output.print_json({"ok": not failed, "checks": findings})
        return int(failed)
    if not findings:
        output.say("no runtime was told to ask the mirror: p2pdist mirror install does that")
    for finding in findings:
        output.say(f"{finding.state:8} {finding.name:18} {finding.detail}")
        if finding.remedy:
            output.say(f"{'':8} {'':18} {finding.remedy}")
    return int(failed)


def mirror_url(text: str) -> str:
    """The URL of a mirror as people name it, HOST:PORT or a URL. Plain HTTP is for loopback alone.
    Raises UsageError."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise UsageError(
            f"{text[:200]!r} is not an address: {error}", remedy=f"Write 127.0.0.1:{MIRROR_PORT}"
        ) from error
    rest = parts.path.strip("/") or parts.query or parts.fragment or parts.username or parts.password
    if parts.scheme not in ("http", "https") or not host or port is None or rest:
        raise UsageError(f"{text[:200]!r} is not the address of a mirror", remedy=f"Write 127.0.0.1:{MIRROR_PORT}")
    if parts.scheme == "http" and not on_this_machine(host):
        raise UsageError(
            f"a mirror at {host} would be asked in plain HTTP, over the network",
            remedy="Name the one on this host's loopback, or an https:// URL",
        )
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _names(texts: Sequence[str]) -> tuple[str, ...]:
    """Upstreams as options name them, also several in one with commas between. Raises
    UsageError."""
    names = (name.strip() for text in texts for name in text.split(","))
    return tuple(dict.fromkeys(image_name(name, "x").upstream for name in names))


def _answers(url: str) -> bool:
    """Whether something takes connections there."""
    parts = urlsplit(url)
    try:
        sockets.create_connection((parts.hostname or "", parts.port or 0), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def _ask_agent(socket: Path) -> dict[str, Any]:
    """The agent's status; nothing when none answers."""
    from p2pdist.agent.api.client import LocalClient

    try:
        return LocalClient(socket, answer_s=5.0).status()
    except P2PDistError:
        return {}


def _print(runtime: str, outcome: Outcome, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        changes = [
            {"path": c.path, "change": c.change, **({"text": c.after} if dry_run else {})} for c in outcome.changes
        ]
        output.print_json(
            {"runtime": runtime, "dry_run": dry_run, "changes": changes, "notes": outcome.notes, "next": outcome.after}
        )
        return
    if not outcome.changes:
        output.say(f"{runtime} was not told to ask the mirror: nothing to do")
    for change in outcome.changes:
        output.say(f"{'would be ' if dry_run and change.change != 'unchanged' else ''}{change.change}  {change.path}")
        for row in _difference(change.before, change.after) if dry_run else ():
            output.say(f"    {row}")
    for note in outcome.notes:
        output.line(f"note: {note}")
    for step in outcome.after:
        output.line(f"next: {step}")


def _difference(before: str | None, after: str | None) -> Sequence[str]:
    return [
        row.rstrip("\n")
        for row in difflib.unified_diff((before or "").splitlines(), (after or "").splitlines(), lineterm="", n=1)
        if not row.startswith(("---", "+++"))
    ]
