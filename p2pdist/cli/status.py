"""`p2pdist status`: what the agent of this host is doing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

import click

from p2pdist.cli import output
from p2pdist.cli.local import socket_option

PULLS_SHOWN = 5
"""When none is running, the last ones are shown."""


@click.command("status")
@socket_option
@output.json_option
def command(socket: Path, as_json: bool) -> None:
    """Print what the agent of this host is doing: its tracker, store, pulls and mounts.

    \b
    Example:
      p2pdist status --socket /run/p2pdist/agent.sock
    """
    from p2pdist.agent.client import LocalClient

    client = LocalClient(socket)
    status, mounts = client.status(), client.mounts()
    if as_json:
        output.print_json({**status, "mounts": mounts})
        return
    tracker, store = status.get("tracker") or {}, status.get("store") or {}
    reached = "connected" if tracker.get("connected") else "away"
    output.say(f"agent    {status.get('host', '')} at {status.get('address', '')}")
    output.say(f"tracker  {tracker.get('url') or 'none'} ({reached})")
    usage = {**store, **(store.get("usage") or {})}
    counts = [
        f"{name.removeprefix('bytes_').replace('_', ' ')} {output.amount(count)}"
        for name, count in usage.items()
        if _is_count(count)
    ]
    output.say(f"store    {store.get('path', '')}  {', '.join(counts)}")
    if (disk := store.get("disk", "ok")) != "ok":
        output.say(f"disk     {disk}; see dmesg")
    pulls = status.get("pulls") or []
    for pull in [each for each in pulls if each.get("state") in ("waiting", "running")] or pulls[-PULLS_SHOWN:]:
        output.say(f"pull     {_pull_line(pull)}")
    for mount in mounts:
        output.say(f"mount    {mount.path}  {mount.reference}  {mount.how}{', writable' if mount.writable else ''}")


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _pull_line(pull: dict[str, Any]) -> str:
    done, total = output.amount(pull.get("bytes_done", 0)), output.amount(pull.get("bytes_total", 0))
    problem = (pull.get("error") or {}).get("detail", "")
    words = [pull.get("reference", ""), pull.get("state", ""), f"{done} of {total}", pull.get("note", ""), problem]
    return "  ".join(str(word) for word in words if word)
