"""`p2pdist slurm place`: the nodes on which a job's packages are, for sbatch --nodelist."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from p2pdist.cli import output
from p2pdist.cli.services import tracker_client, tracker_option
from p2pdist.cli.verbs.slurm import controller
from p2pdist.model.errors import Conflict, UsageError
from p2pdist.model.manifest import parse_reference


@click.command("place")
@click.argument("references", metavar="[REF...]", nargs=-1)
@click.option("--count", type=click.IntRange(1), metavar="N", help="So many nodes.")
@click.option(
    "--role",
    "roles",
    multiple=True,
    metavar="NAME=N:REF,REF",
    help="N nodes for a part of the job that needs other packages; may be repeated.",
)
@click.option("--partition", default="", help="Only nodes of this partition.")
@click.option("--coherent", type=click.Choice(["rack"]), help="Take the nodes from as few racks as possible.")
@tracker_option
@output.json_option
def place(
    references: tuple[str, ...],
    count: int | None,
    roles: tuple[str, ...],
    partition: str,
    coherent: str | None,
    tracker: str,
    as_json: bool,
) -> None:
    """Print idle nodes that lack the fewest bytes of the packages REF, as a list for sbatch
    --nodelist; of --role, one line for each.

    Nodes that Slurm does not call idle now and nodes without an agent are left out. Agents must
    have the names of their nodes.

    \b
    Examples:
      sbatch -N 4 --nodelist "$(p2pdist slurm place team/trainer:v3 --count 4)" train.sh
      p2pdist slurm place --role trainer=4:team/trainer:v3 --role reader=1:team/reader:v1
    """
    if bool(roles) == bool(references) or (count is None) != bool(roles):
        raise UsageError(
            "it is not said which nodes are wanted",
            remedy="Name packages and --count, or give a --role for each part of the job",
        )
    request: dict[str, Any] = {"roles": [_role(role) for role in roles]} if roles else {}
    if not roles:
        request = {"packages": [str(parse_reference(reference)) for reference in references], "count": count}
    if coherent is not None:
        request["coherent"] = coherent
    needed = sum(role["count"] for role in request["roles"]) if roles else count or 0
    idle = controller.idle_nodes(partition)
    if len(idle) < needed:
        raise _too_few(needed, len(idle), "idle nodes")
    ranking = asyncio.run(_ask(tracker, request | {"hosts": idle}))
    if roles:
        placed = {part["role"]: [host["host"] for host in part["hosts"]] for part in ranking["assignment"]}
        _print(list(placed.items()), as_json=as_json)
        return
    hosts = [row["host"] for row in ranking if row["present"]]
    if len(hosts) < needed:
        raise _too_few(needed, len(hosts), "idle nodes with a connected agent")
    _print([("", hosts)], as_json=as_json)


def _print(placed: list[tuple[str, list[str]]], *, as_json: bool) -> None:
    if as_json:
        output.print_json([{"role": role, "nodes": nodes} for role, nodes in placed])
        return
    for role, nodes in placed:
        click.echo(f"{role}  {','.join(nodes)}" if role else ",".join(nodes))


def _role(text: str) -> dict[str, Any]:
    """trainer=4:team/trainer:v3,team/weights:v7. Raises UsageError."""
    name, _, rest = text.partition("=")
    number, _, packages = rest.partition(":")
    if not name or not number.isdecimal() or len(number) > 9 or int(number) < 1 or not packages:
        raise UsageError(
            f"{text[:200]!r} is no role", remedy="Write NAME=NODES:PACKAGE, as in trainer=4:team/trainer:v3"
        )
    return {
        "name": name,
        "count": int(number),
        "packages": [str(parse_reference(package)) for package in packages.split(",")],
    }


def _too_few(needed: int, there: int, what: str) -> Conflict:
    return Conflict(f"{needed} nodes are asked for and there are {there} {what}", remedy="Ask for fewer, or wait")


async def _ask(tracker: str, request: dict[str, Any]) -> Any:
    async with tracker_client(tracker) as client:
        return await client.ask("POST", "/v1/rank", request)
