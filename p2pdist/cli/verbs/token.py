"""`p2pdist token`: tokens for schedulers, operators and people, made on a tracker's machine."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli import output
from p2pdist.cli.services import filled
from p2pdist.cli.verbs.access import access_option

if TYPE_CHECKING:
    from tracker.access.directory import AccessDirectory


@click.group("token")
def command() -> None:
    """Make tokens, with which schedulers, operators and people show to trackers what they may do.
    Clients read one from --token-file or P2PDIST_TOKEN.

    \b
    Examples:
      p2pdist token create --role scheduler --ttl 30d > /etc/p2pdist/token
      p2pdist token list
      p2pdist token revoke 7f3a0c5d9b1e2468
    """


@command.command("create")
@click.option("--role", required=True, metavar="NAME", help="A role of the access file.")
@click.option(
    "--ttl", default="30d", show_default=True, metavar="TIME", help="How long it is good, such as 30d or 12h."
)
@click.option(
    "--name", metavar="NAME", callback=filled, help="Its owner's name; tokens of one name own the same preseeds."
)
@access_option
@output.json_option
def create(role: str, ttl: str, name: str | None, access: Path, as_json: bool) -> None:
    """Print a new token. It is shown this once, and kept nowhere.

    \b
    Example:
      p2pdist token create --role scheduler --ttl 30d --name nightly > token
    """
    from p2pdist.credentials.tokens import create_token
    from p2pdist.model.errors import NotFound
    from p2pdist.model.units import parse_duration

    directory = _directory(access)
    now = time.time()
    state = directory.load(now=now)
    if role not in state.rules.roles:
        raise NotFound(f"there is no role {role[:80]!r}", remedy=f"Roles are {', '.join(sorted(state.rules.roles))}")
    token, record = create_token(
        state.signing[0],
        state.rules.fleet,
        state.authorities[0].fingerprint,
        role,
        name=name or "",
        now=now,
        lasts_s=parse_duration(ttl),
    )
    directory.note_token(record)
    if as_json:
        output.print_json(
            {"token": token, "id": record.id, "role": role, "name": record.name, "expires": record.expires}
        )
        return
    output.line(f"token {record.id} of {record.name}, role {role}, until {_date(record.expires)}")
    output.say(token)


@command.command("list")
@access_option
@output.json_option
def listing(access: Path, as_json: bool) -> None:
    """Print the tokens that were made and are good: id, role, owner, end, and whether it is
    revoked.

    \b
    Example:
      p2pdist token list
    """
    directory = _directory(access)
    now = time.time()
    state = directory.load(now=now)
    rows = [
        {
            "id": record.id,
            "role": record.role,
            "name": record.name,
            "expires": record.expires,
            "revoked": f"token:{record.id}" in state.rules.revoked,
            "superseded": record.key != state.signing[0].name,
        }
        for record in directory.tokens()
        if record.expires > now and record.key in state.public_keys
    ]
    if as_json:
        output.print_json(rows)
        return
    for row in rows:
        state_of = "revoked" if row["revoked"] else "ends with its key" if row["superseded"] else ""
        output.say(
            f"{row['id']}  {row['role']}  {row['name']}  {_date(float(str(row['expires'])))}  {state_of}".rstrip()
        )


@command.command("revoke")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@access_option
def revoke(ids: tuple[str, ...], access: Path) -> None:
    """Make tokens useless. Trackers notice within a second or so.

    \b
    Example:
      p2pdist token revoke 3f2a9c0d
    """
    from p2pdist.model.errors import NotFound

    directory = _directory(access)
    known = {record.id for record in directory.tokens()}
    for identifier in ids:
        if identifier not in known:
            raise NotFound(f"no token {identifier[:80]!r} was made here", remedy="p2pdist token list names them")
    directory.change_revoked(lambda revoked: [*revoked, *(f"token:{identifier}" for identifier in ids)])
    output.say(f"revoked {' '.join(ids)}")


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="minutes").replace("+00:00", "Z")


def _directory(access: Path) -> AccessDirectory:
    from tracker.access.directory import AccessDirectory

    return AccessDirectory(access)
