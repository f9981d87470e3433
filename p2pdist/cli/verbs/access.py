"""`p2pdist access`: what a fleet's access is made of, on the machine of a tracker."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from p2pdist.cli import output

if TYPE_CHECKING:
    from tracker.access.directory import AccessDirectory

Function = TypeVar("Function", bound=Callable[..., Any])


def access_option(function: Function) -> Function:
    """--access, of a tracker."""
    return click.option(
        "--access",
        type=click.Path(path_type=Path, dir_okay=False),
        default=Path("/etc/p2pdist/access.toml"),
        show_default=True,
        metavar="FILE",
        help="The tracker's access file. Also from P2PDIST_ACCESS.",
    )(function)


@click.group("access")
def command() -> None:
    """Make, show, rotate and revoke what the access of a fleet is made of: its authority, signing
    keys and join tokens. Trackers notice each change within a second or so.

    \b
    Examples:
      p2pdist access create --access /etc/p2pdist/access.toml
      p2pdist access show
      p2pdist access revoke host:r17n04
      p2pdist access rotate
    """


@command.command("create")
@access_option
@output.json_option
def create(access: Path, as_json: bool) -> None:
    """Make what is missing: the access file, an authority, a signing key and the join tokens. A
    tracker does the same at its first start; this is for directories that trackers cannot write,
    such as a Secret of Kubernetes.

    \b
    Example:
      p2pdist access create --access /etc/p2pdist/access.toml
    """
    directory = _directory(access)
    made = directory.prepare(now=time.time())
    state = directory.load(now=time.time())
    tokens = {name: str(directory.join_token(name)) for name in state.rules.joins}
    if as_json:
        output.print_json({"access": str(directory.path), "join_tokens": tokens, "made": [str(path) for path in made]})
        return
    output.say(f"access file {directory.path}")
    for path in tokens.values():
        output.say(f"hosts join with {path}")


@command.command("show")
@access_option
@output.json_option
def show(access: Path, as_json: bool) -> None:
    """Print authorities, signing keys, join tokens, roles and what is revoked. No secret is
    printed.

    \b
    Example:
      p2pdist access show
    """
    directory = _directory(access)
    state = directory.load(now=time.time())
    rules = state.rules
    document = {
        "fleet": rules.fleet,
        "authorities": [authority.fingerprint for authority in state.authorities],
        "signing_keys": [key.name for key in state.signing],
        "join_tokens": {name: str(directory.join_token(name)) for name in rules.joins},
        "roles": {name: sorted(role.rights - {"open"}) for name, role in rules.roles.items()},
        "public": list(rules.public.patterns),
        "revoked": sorted(rules.revoked),
    }
    if as_json:
        output.print_json(document)
        return
    output.say(f"fleet        {rules.fleet}")
    for name, values in document.items():
        rows = [f"{key}  {_text(value)}" for key, value in values.items()] if isinstance(values, dict) else values
        for number, row in enumerate(rows if name != "fleet" else ()):
            output.say(f"{name.replace('_', ' ') if not number else '':<13}{row}")


@command.command("rotate")
@access_option
@output.json_option
def rotate(access: Path, as_json: bool) -> None:
    """Make a new authority and a new signing key beside the ones in use, which are trusted for 48
    hours more. Join files must be fetched anew within that time, and tokens made anew: the tokens
    that the former key signed end with it.

    \b
    Example:
      p2pdist access rotate
    """
    directory = present_directory(access)
    removed = directory.rotate(now=time.time())
    state = directory.load(now=time.time())
    ending = [
        record.id
        for record in directory.tokens()
        if record.key != state.signing[0].name and record.expires > time.time()
    ]
    if as_json:
        output.print_json({"authority": state.authorities[0].fingerprint, "removed": removed, "tokens_ending": ending})
        return
    output.say(f"authority {state.authorities[0].fingerprint}")
    for name in removed:
        output.say(f"removed {name}")
    if ending:
        output.say(
            f"{len(ending)} tokens end within 48 hours: p2pdist token list names them, p2pdist token create makes others"
        )


@command.command("revoke")
@click.argument("what", nargs=-1, required=True, metavar="host:NAME|join:ID|token:ID...")
@access_option
def revoke(what: tuple[str, ...], access: Path) -> None:
    """Take hosts, join tokens or tokens out of the fleet. Sessions and streams of these hosts end
    within seconds.

    \b
    Example:
      p2pdist access revoke host:r17n04
    """
    directory = _directory(access)
    directory.change_revoked(lambda revoked: [*revoked, *what])
    output.say(f"revoked {' '.join(what)}")
    for entry in _unknown(directory, what):
        output.line(
            f"warning: {entry} is not known beside {directory.path}: see p2pdist access show, p2pdist token list"
        )


def _unknown(directory: AccessDirectory, what: tuple[str, ...]) -> list[str]:
    """The join tokens and tokens among them of which nothing is known here: perhaps misspelt. They
    may also be gone from the access file, or made beside a copy of it. Hosts have any name. Empty
    where the list of tokens cannot be read: what is revoked is revoked all the same."""
    from p2pdist.model.errors import P2PDistError

    try:
        known = {f"join:{name}" for name in directory.rules().joins}
        if any(entry.startswith("token:") for entry in what):
            known |= {f"token:{record.id}" for record in directory.tokens()}
    except P2PDistError:
        return []
    return [entry for entry in what if not entry.startswith("host:") and entry not in known]


@command.command("unrevoke")
@click.argument("what", nargs=-1, required=True, metavar="host:NAME|join:ID|token:ID...")
@access_option
def unrevoke(what: tuple[str, ...], access: Path) -> None:
    """Take revocations back, as far as p2pdist access revoke made them.

    \b
    Example:
      p2pdist access unrevoke host:r17n04
    """
    from p2pdist.model.errors import NotFound

    def without(revoked: list[str]) -> list[str]:
        missing = [entry for entry in what if entry not in revoked]
        if missing:
            raise NotFound(
                f"{missing[0][:100]} was not revoked with this command",
                remedy="See p2pdist access show, and revoked in the access file",
            )
        return [entry for entry in revoked if entry not in what]

    _directory(access).change_revoked(without)
    output.say(f"unrevoked {' '.join(what)}")


def _text(value: object) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


def present_directory(access: Path) -> AccessDirectory:
    """The directory of an access file that is there: what is written elsewhere no tracker reads.
    Raises NotFound."""
    from p2pdist.model.errors import NotFound

    if not access.exists():
        raise NotFound(
            f"there is no access file {access}",
            remedy="Name the tracker's with --access; p2pdist access create makes one",
        )
    return _directory(access)


def _directory(access: Path) -> AccessDirectory:
    from tracker.access.directory import AccessDirectory

    return AccessDirectory(access)
