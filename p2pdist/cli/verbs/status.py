"""`p2pdist status`: what the agent of this host is doing, or a tracker."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from p2pdist.cli import output
from p2pdist.cli.services import note_unanswered, socket_option, tracker_client
from p2pdist.cli.tracker_access import token_option
from p2pdist.model.errors import Unavailable
from p2pdist.model.messages import LazyStatus, MountStatus

PULLS_SHOWN = 5
"""Packages that were pulled last."""

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
    output.say(f"store    {_store_line(store)}")
    if (disk := store.get("disk", "ok")) != "ok":
        output.say(f"disk     {disk}; see dmesg")
    if scrub := status.get("scrub"):
        output.say(f"scrub    {_scrub_line(scrub)}")
    _show_pulls(status.get("pulls") or [])
    _show_images(status.get("images") or [])
    _show_mounts(mounts)


def _store_line(store: dict[str, Any]) -> str:
    """The store in the words of its user; --json has the bytes by kind."""
    usage = store.get("usage")
    if usage is None:
        return f"{store.get('path', '')}"
    files = sum(usage.get(f"bytes_{kind}", 0) for kind in ("complete", "objects", "variants", "images", "small"))
    arriving = usage.get("bytes_partial", 0) + usage.get("bytes_expected", 0)
    limit = f" of {output.amount(usage['capacity'])}" if usage.get("capacity") else ""
    parts = [f"{output.amount(files)}{limit} used"]
    parts += [f"{output.amount(arriving)} reserved for what arrives"] if arriving else []
    parts += [f"{output.amount(usage.get('disk_free', 0))} free on the disk"]
    return f"{store.get('path', '')}  {', '.join(parts)}"


def _show_pulls(pulls: list[dict[str, Any]]) -> None:
    """Running pulls, then the last ones that ended, each package once for each outcome."""
    rows = []
    ended: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for pull in pulls:
        if pull.get("state") in ("waiting", "running"):
            rows.append(_running_row(pull))
        else:
            ended.setdefault((pull.get("reference", ""), pull.get("state", "")), []).append(pull)
    last = sorted(ended.values(), key=lambda group: min(map(_ended_ago, group)))
    rows += [_ended_row(group) for group in last[:PULLS_SHOWN]]
    if rows:
        output.say("")
        output.table(("PULL", "STATE", "BYTES", "SINCE", "NOTE"), rows)
    if len(last) > PULLS_SHOWN:
        output.say(f"{len(last) - PULLS_SHOWN} more ended; --json has all")


def _running_row(pull: dict[str, Any]) -> tuple[str, ...]:
    done, total = output.amount(pull.get("bytes_done", 0)), output.amount(pull.get("bytes_total", 0))
    since = output.age(pull.get("age_s", pull.get("seconds", 0.0)))
    return _package(pull), pull.get("state", ""), f"{done} of {total}", since, pull.get("note", "")


def _ended_row(group: list[dict[str, Any]]) -> tuple[str, ...]:
    """A package that was pulled once or several times with the same outcome; of the last time."""
    pull = min(group, key=_ended_ago)
    times = f"{len(group)} times" if len(group) > 1 else ""
    problem = (pull.get("error") or {}).get("detail", "")
    note = ", ".join(filter(None, (problem, times)))
    return (
        _package(pull),
        pull.get("state", ""),
        output.amount(pull.get("bytes_total", 0)),
        f"{output.age(_ended_ago(pull))} ago",
        note,
    )


def _ended_ago(pull: dict[str, Any]) -> float:
    return float(max(0.0, pull.get("age_s", 0.0) - pull.get("seconds", 0.0)))


def _package(pull: dict[str, Any]) -> str:
    """Tag first, then the first digits of the digest."""
    reference = str(pull.get("reference", ""))
    if pull.get("digest") and "@" not in reference and not reference.startswith("sha256:"):
        return f"{reference} {output.hexes(pull['digest'])}"
    return _short(reference)


def _short(reference: str) -> str:
    """A reference of which a digest has only its first digits."""
    name, at, digest = reference.rpartition("sha256:")
    return f"{name}{at}{output.hexes(digest)}" if at else reference


def _show_images(images: list[dict[str, Any]]) -> None:
    if images:
        rows = [
            (
                image["image"],
                str(image["blobs"]),
                f"{output.amount(image['bytes_done'])} of {output.amount(image['bytes_total'])}",
            )
            for image in images
        ]
        output.say("")
        output.table(("IMAGE ON ITS WAY", "BLOBS", "BYTES"), rows)


def _show_mounts(mounts: list[MountStatus]) -> None:
    if mounts:
        rows = [
            (
                f"{mount.tags[0]} {output.hexes(mount.digest)}" if mount.tags else _short(mount.reference),
                mount.path,
                f"{mount.how}{', writable' if mount.writable else ''}",
                _fill_line(mount.lazy),
            )
            for mount in mounts
        ]
        output.say("")
        output.table(("MOUNT", "PATH", "METHOD", "CONTENTS"), rows)


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
    if problem := (answers.get("origin") or {}).get("problem"):
        output.say(f"origin   cannot be read: {problem}")
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
        for why in each.get("waiting", {}).values():
            output.say(f"         {why}")
    output.say(f"preseeds {len(preseeds)}")
    for each in [each for each in preseeds if each["state"] in ("pending", "running")][-SHOWN_MAX:]:
        output.say(f"preseed  {each['id']}  {each['state']}  {each['hosts_done']} of {each['hosts_total']} hosts")
    problem = answers["policies"].get("problem")
    if problem:
        output.say(f"policies stale: {problem}")


async def _ask(urls: str) -> dict[str, Any]:
    from p2pdist.client.access import NoTracker

    async with tracker_client(urls) as client:
        health = await client.ask("GET", "/readyz", fields=["policies"])
        rows = list[dict[str, Any]]
        hosts = await client.send("GET", "/v1/hosts", rows)
        note_unanswered(client)
        swarms = await client.send("GET", "/v1/swarms", rows)
        preseeds: list[dict[str, Any]] = []
        with suppress(NoTracker):  # a tracker that takes none
            preseeds = await client.send("GET", "/v1/preseeds", rows)
        answered = client.answered
    return {"tracker": answered, **health, "hosts": hosts, "swarms": swarms, "preseeds": preseeds}
