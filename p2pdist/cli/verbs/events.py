"""`p2pdist events`: what has happened in a fleet, and what happens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import click
import msgspec

from p2pdist.cli import output
from p2pdist.cli.services import filled, tracker_client, tracker_option
from p2pdist.model.errors import UNDECODABLE, Unavailable, UsageError, from_problem, unreached
from p2pdist.model.history import KINDS, RECORDS_PER_PAGE_MAX, HistoryPage, HistoryRecord, parse_kinds, parse_since
from p2pdist.model.url import tracker_urls

if TYPE_CHECKING:
    import aiohttp

RETRY_S = 2.0
CONNECT_S_MAX = 5.0
SILENCE_S_MAX = 30.0
"""A tracker says something every 10 s."""

REMEMBERED_MAX = 10_000
OVERLAP_S = 60.0
"""After a break the events of so long before it are asked for again."""


@click.command("events")
@tracker_option
@click.option("--follow", "-f", is_flag=True, help="Go on with what happens from now on, until interrupted.")
@click.option("--kind", metavar="KIND[,KIND]", callback=filled, help=f"Only these kinds: {', '.join(KINDS)}.")
@click.option("--package", metavar="REF", callback=filled, help="Only of this package: by reference, name or digest.")
@click.option("--host", metavar="NAME", callback=filled, help="Only of this host.")
@click.option(
    "--since",
    metavar="TIME",
    callback=filled,
    help="From when on, such as 2h ago, or in seconds since the epoch [default: 1d; with --follow none].",
)
@click.option(
    "--limit", default=1000, show_default=True, type=click.IntRange(1, 100_000), help="How many at most, the latest."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON documents, one a line.")
def command(
    tracker: str,
    follow: bool,
    kind: str | None,
    package: str | None,
    host: str | None,
    since: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """Print what has happened in a fleet: hosts that were lost, pulls and preseeds that failed,
    broadcasts that ended, settings that changed. The latest come last.

    \b
    Examples:
      p2pdist events --since 2h --kind pull-failed,host-lost
      p2pdist events --follow
      p2pdist events --package team/trainer:v3 --json
    """
    parse_kinds(kind or "")
    now = time.time()
    begin = parse_since(since, now=now) if since else now if follow else now - 86400.0
    named = {"kind": kind, "package": package, "host": host}
    query = {name: value for name, value in named.items() if value}
    if not follow:
        for record in asyncio.run(read(tracker, query | {"since": f"{begin:.3f}"}, limit)):
            _show(record, as_json=as_json)
        return
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_follow(tracker, query, begin, limit, as_json=as_json))


def _show(record: HistoryRecord, *, as_json: bool) -> None:
    if as_json:
        output.print_json(record)
        return
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.at))
    output.say(f"{moment}  {record.event.kind:14}  {record.event.text}")


async def read(tracker: str, query: dict[str, str], limit: int) -> list[HistoryRecord]:
    """The latest records that match, at most `limit` of them, the oldest first. Raises
    Unavailable, UsageError and what the tracker says."""
    records: list[HistoryRecord] = []
    before = 0
    async with tracker_client(tracker) as client:
        while len(records) < limit:
            asked = query | {"limit": str(min(limit - len(records), RECORDS_PER_PAGE_MAX))}
            asked |= {"before": str(before)} if before else {}
            answer = await client.ask("GET", f"/v1/history?{urlencode(asked)}")
            try:
                page = msgspec.convert(answer, HistoryPage)
            except msgspec.ValidationError as error:
                raise Unavailable(
                    f"the tracker {client.answered} does not answer as this version does: {error}",
                    remedy="Use the same version everywhere",
                ) from error
            records += page.records
            before = page.next
            if not before:
                break
    return records[::-1]


async def _follow(tracker: str, query: dict[str, str], begin: float, limit: int, *, as_json: bool) -> None:
    """Print what happens at the first tracker that answers, for ever, each record once. Raises
    what goes wrong before anything was heard."""
    from p2pdist.cli.tracker_access import TrackerAccess
    from p2pdist.client.pulse import Pulse

    urls = tracker_urls(tracker.split(","))
    if not urls:
        raise UsageError("--tracker names no tracker", remedy="Write http://host:7070")
    shown: OrderedDict[tuple[str, int, float], None] = OrderedDict()
    heard, number = False, 0
    async with Pulse(TrackerAccess.current()) as pulse:
        while True:
            url = urls[number % len(urls)]
            told = _told(url, query, begin, limit)
            try:
                async for records in pulse.each(url, told) if len(urls) > 1 else told:
                    heard = True
                    for each in records:
                        key = each.tracker, each.number, each.at
                        if key not in shown:
                            shown[key] = None
                            begin = max(begin, each.at - OVERLAP_S)
                            _show(each, as_json=as_json)
                    while len(shown) > REMEMBERED_MAX:
                        shown.popitem(last=False)
            except Unavailable as error:
                number += 1
                if not heard and number >= len(urls):
                    raise
                output.line(f"p2pdist: {error}")
                await asyncio.sleep(RETRY_S if heard else 0)


async def _told(url: str, query: dict[str, str], begin: float, limit: int) -> AsyncGenerator[list[HistoryRecord], None]:
    """What happened since `begin`, once the tracker at `url` is connected, then each record as it
    comes. Raises what _stream and read raise."""
    async for record in _stream(url, query):
        yield [record] if record is not None else await read(url, query | {"since": f"{begin:.3f}"}, limit)


async def _stream(url: str, query: dict[str, str]) -> AsyncIterator[HistoryRecord | None]:
    """None once the tracker answers, then records as they come. Raises Unavailable when it does
    not answer, or no more."""
    import aiohttp

    from p2pdist.cli.tracker_access import TrackerAccess, with_hint
    from p2pdist.model.url import redacted
    from p2pdist.transfer.server_events import events_of

    access = TrackerAccess.current()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S_MAX, sock_read=SILENCE_S_MAX)
    where = f"{url}/v1/history/events" + (f"?{urlencode(query)}" if query else "")
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.get(where, **await access.request(url)) as answer,
        ):
            if answer.status >= 400:
                raise with_hint(from_problem(await _problem(answer)), url)
            yield None
            async for kind, data in events_of(answer.content):
                if kind == "record":
                    yield msgspec.json.decode(data, type=HistoryRecord)
    except UNDECODABLE as error:
        raise Unavailable(
            f"what answers at {redacted(url)} does not speak as a tracker of this version does: {error}",
            remedy="Name the tracker with --tracker, and use the same version",
        ) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = unreached(error).replace(url, redacted(url))
        raise Unavailable(
            f"the tracker {redacted(url)} does not answer: {reason}", remedy=access.remedy(url, error)
        ) from error
    raise Unavailable(f"the tracker {redacted(url)} has stopped", remedy="Start it again")


async def _problem(answer: aiohttp.ClientResponse) -> dict[str, object]:
    return msgspec.json.decode(await answer.content.read(1 << 20), type=dict[str, object])
