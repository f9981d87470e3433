"""`p2pdist tracker`: runs a tracker in the foreground."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from p2pdist.cli.quantities import parse_rate
from p2pdist.cli.seconds import Seconds


@click.command("tracker")
@click.option("--listen", default="0.0.0.0:7070", show_default=True, metavar="HOST:PORT", help="Where to answer.")
@click.option("--origin", default="", metavar="URL", help="Central storage, which agents read under lease.")
@click.option("--state", default="", metavar="DIR", help="Where to keep small documents over a restart.")
@click.option(
    "--origin-streams",
    default=64,
    show_default=True,
    type=click.IntRange(1, 100_000),
    help="Origin reads at once, over all swarms.",
)
@click.option(
    "--origin-limit",
    default="",
    metavar="RATE",
    help="What all agents together read from the origin, such as 2GB/s [default: no limit].",
)
@click.option(
    "--report-interval",
    default=0.25,
    show_default=True,
    type=Seconds(0.05, 60.0),
    metavar="SECONDS",
    help="How often agents report at most; large fleets less often.",
)
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="How much to log.",
)
def command(
    listen: str,
    origin: str,
    state: str,
    origin_streams: int,
    origin_limit: str,
    report_interval: float,
    log_level: str,
) -> None:
    """Run a tracker: it decides which agent sends what to whom. Data never passes through it.

    \b
    Example:
      p2pdist tracker --listen 0.0.0.0:7070 --origin s3://packages/prod
    """
    from p2pdist.cli.daemon import listen_address, raise_file_limit, run, set_up_logging

    set_up_logging(log_level)
    raise_file_limit()
    address = listen_address(listen)
    run(
        _serve(
            address, origin, state, origin_streams, parse_rate(origin_limit) if origin_limit else 0.0, report_interval
        )
    )


async def _serve(
    address: tuple[str, int],
    origin_url: str,
    state: str,
    origin_streams: int,
    origin_bytes_s: float,
    report_interval_s: float,
) -> None:
    import logging
    import time

    from p2pdist.cli.daemon import address_text, close, listen, stop_listening, until_stopped
    from p2pdist.origin.origin import open_origin
    from tracker.content import Content
    from tracker.core.fleet import Fleet
    from tracker.http.app import make_app
    from tracker.service import Service
    from tracker.state.documents import Documents

    origin = open_origin(origin_url) if origin_url else None
    fleet = Fleet(
        started_at=time.monotonic(),
        origin=origin_url,
        origin_streams_max=origin_streams,
        origin_bytes_s=origin_bytes_s,
        report_interval_s=report_interval_s,
    )
    documents = Documents(Path(state)) if state else None
    service = Service(fleet, Content(origin, documents))
    runner = await listen(make_app(service), address)
    clock = asyncio.create_task(service.run())
    logging.getLogger("p2pdist.tracker").info(
        "listening on %s origin=%s", address_text(*address), origin.url if origin else "none"
    )
    try:
        await until_stopped()
    finally:
        await stop_listening([runner])
        clock.cancel()
        await close([runner])
        if origin is not None:
            await origin.close()
        if documents is not None:
            documents.close()
