"""`p2pdist status`: what the agent of this host is doing, or a tracker."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

import click

from p2pdist.cli import output
from p2pdist.cli.connect import TrackerClient, socket_option
from p2pdist.cli.tracker_access import token_option
from p2pdist.model.errors import NotFound, Unavailable
from p2pdist.model.messages import LazyStatus, MountStatus

PULLS_SHOWN = 5
"""When none is running, the last ones are shown."""

SHOWN_MAX = 20
"""Absent hosts, swarms and preseeds that are shown; --json has all."""


@click.command("status")
@click.option("--tracker", metavar="URL[,URL]", help="Of the first of these trackers that answers instead.")
@token_option
@socket_option
@output.json_option
@click.pass_context
def command(ctx: click.Context, tracker: str | None, socket: Path, as_json: bool) -> None:
    """Print what the agent of this host is doing: its tracker, store, pulls and mounts. With
    --tracker on the command line print what a tracker is doing: its hosts, swarms and preseeds. No
    agent is needed for that.

    \b
    Example:
      p2pdist status --socket /run/p2pdist/agent.sock
      p2pdist status --tracker http://tracker:7070
    """
    # A variable or file that names the tracker for other verbs does not change what this verb is
    # about.
    if tracker is not None and ctx.get_parameter_source("tracker") is click.core.ParameterSource.COMMANDLINE:
        _tracker(tracker, as_json=as_json)
    else:
        _agent(socket, tracker, as_json=as_json)


def _agent(socket: Path, tracker_url: str | None, *, as_json: bool) -> None:
    from p2pdist.agent.api.client import LocalClient

    client = LocalClient(socket)
    try:
        status, mounts = client.status(), client.mounts()
    except Unavailable as error:
        error.remedy += f"; p2pdist status --tracker {tracker_url or 'URL'} asks a tracker"
        raise
    if as_json:
        output.print_json({**status, "mounts": mounts, "views": [_view(mount) for mount in mounts]})
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
    if scrub := status.get("scrub"):
        output.say(f"scrub    {_scrub_line(scrub)}")
    pulls = status.get("pulls") or []
    for pull in [each for each in pulls if each.get("state") in ("waiting", "running")] or pulls[-PULLS_SHOWN:]:
        output.say(f"pull     {_pull_line(pull)}")
    for mount in mounts:
        written = ", writable" if mount.writable else ""
        output.say(f"mount    {mount.path}  {mount.reference}  {mount.how}{written}  {_fill_line(mount.lazy)}")


def _view(mount: MountStatus) -> dict[str, Any]:
    """What a script asks of a view: whether it is lazy, and how long its readers waited."""
    lazy = mount.lazy or LazyStatus(whole=True)
    return {
        "path": mount.path,
        "reference": mount.reference,
        "how": mount.how,
        "lazy": mount.lazy is not None,
        "bytes_awaited": lazy.bytes_awaited,
        "stalls": lazy.stalls,
        "stall_p50_s": lazy.stall_p50_s,
        "stall_p99_s": lazy.stall_p99_s,
    }


def _fill_line(lazy: LazyStatus | None) -> str:
    """How the contents of a view come, and how long readers waited for them."""
    if lazy is None:
        return "eager"
    filled = "all filled" if lazy.whole else f"{output.amount(lazy.bytes_filled)} of {output.amount(lazy.bytes_total)}"
    waits = f"awaited {output.amount(lazy.bytes_awaited)} by {lazy.readers}, " if lazy.readers else ""
    stalls = f"{lazy.stalls} stalls p50 {1000 * lazy.stall_p50_s:.0f} ms p99 {1000 * lazy.stall_p99_s:.0f} ms"
    return f"lazy, {filled}, {waits}{stalls}{f', {lazy.refused} refused' if lazy.refused else ''}"


def _scrub_line(scrub: dict[str, Any]) -> str:
    """What the background reading of the store does, and what was found to be wrong."""

    def day(seconds: float) -> str:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))

    read = f"{scrub['checked']} things, {output.amount(scrub['bytes_checked'])}, {scrub['wrong']} wrong"
    if not scrub["period_s"]:
        words = "switched off"
    elif scrub["running"]:
        words = f"{100 * scrub['share']:.0f} % since {day(scrub['began'])}: {read}"
    else:
        words = f"ended {day(scrub['ended'])}: {read}" if scrub["ended"] else "not yet"
    damaged = ", ".join(f"{kind} {count}" for kind, count in sorted(scrub["damaged"].items()) if count)
    return words + (f"; damaged since the agent was started: {damaged}" if damaged else "")


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _pull_line(pull: dict[str, Any]) -> str:
    done, total = output.amount(pull.get("bytes_done", 0)), output.amount(pull.get("bytes_total", 0))
    problem = (pull.get("error") or {}).get("detail", "")
    words = [pull.get("reference", ""), pull.get("state", ""), f"{done} of {total}", pull.get("note", ""), problem]
    return "  ".join(str(word) for word in words if word)


# -- a tracker


def _tracker(urls: str, *, as_json: bool) -> None:
    answers = asyncio.run(_ask(urls))
    if as_json:
        output.print_json(answers)
        return
    hosts, swarms, preseeds = answers["hosts"], answers["swarms"], answers["preseeds"]
    absent = [each for each in hosts if not each["present"]]
    zones = sorted({each["zone"] for each in hosts} - {""})
    # A tracker of an older version says less of itself.
    output.say(
        f"tracker  {answers['tracker']}  version {answers.get('version', '-')}  {1000 * answers.get('lag_s', 0.0):.0f} ms late"
    )
    where = f" in zones {', '.join(zones[:SHOWN_MAX])}" if zones else ""
    output.say(f"hosts    {len(hosts) - len(absent)} connected, {len(absent)} absent{where}")
    for each in absent[:SHOWN_MAX]:
        since = f" for {each['absent_s']:.0f} s" if each.get("absent_s") is not None else ""
        output.say(f"absent   {each['host']}{since}")
    running = [each for each in swarms if each["complete"] < each["hosts"]]
    output.say(
        f"swarms   {len(swarms)}, {len(running)} running, {sum(each['origin_leases'] for each in swarms)} leases"
    )
    for each in running[:SHOWN_MAX]:
        done = f"{each['complete']} of {each['hosts']} hosts done, {100 * each['progress']:.1f} %"
        output.say(f"swarm    {each['digest']}  {output.amount(each['size'])}  {done}")
    output.say(f"preseeds {len(preseeds)}")
    for each in [each for each in preseeds if each["state"] in ("pending", "running")][-SHOWN_MAX:]:
        output.say(f"preseed  {each['id']}  {each['state']}  {each['hosts_done']} of {each['hosts_total']} hosts")
    problem = answers["policies"].get("problem")
    if problem:
        output.say(f"policies stale: {problem}")


async def _ask(urls: str) -> dict[str, Any]:
    async with TrackerClient(urls) as client:
        health = await client.ask("GET", "/readyz")
        hosts, swarms = await client.ask("GET", "/v1/hosts"), await client.ask("GET", "/v1/swarms")
        preseeds: list[dict[str, Any]] = []
        with suppress(NotFound):  # a tracker that takes none
            preseeds = await client.ask("GET", "/v1/preseeds")
        answered = client.answered
    return {"tracker": answered, **health, "hosts": hosts, "swarms": swarms, "preseeds": preseeds}
