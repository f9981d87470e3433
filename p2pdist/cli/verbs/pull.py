"""`p2pdist pull`: packages into the store of this host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.globals import pop_context, push_context

from p2pdist.cli import output
from p2pdist.cli.services import add_hint, default_layout, follow_pull, origin_option, socket_option
from p2pdist.model.errors import NotFound, P2PDistError
from p2pdist.model.image import is_image
from p2pdist.model.messages import Priority, PullStatus

AT_ONCE = 4
"""So many of several packages are pulled at the same time."""

STOP_S = 1.0
"""How long the threads may take to end after a signal."""


@click.command("pull")
@click.argument("references", metavar="REF...", nargs=-1, required=True)
@click.option(
    "--priority",
    type=click.Choice(["start", "preseed"]),
    default="start",
    show_default=True,
    help="start: a program or user waits for this pull. preseed: it gives way to starts.",
)
@origin_option
@socket_option
@output.quiet_options
@output.json_option
def command(references: tuple[str, ...], priority: Priority, origin: str | None, socket: Path, as_json: bool) -> None:
    """Bring the packages or images REF into the store of this host through its agent.

    REF may also be a digest (sha256:...), of which the first 12 digits are enough, or a
    pattern: these are looked up in the local layout, at the agent, and at the origin if one is
    named. With several packages --json prints a list, and the first failure gives the exit
    code.

    \b
    Examples:
      p2pdist pull team/trainer:v3 team/weights:v7
      p2pdist pull 'team/*:v3' --origin s3://packages/prod
      p2pdist pull sha256:9f86d081884c --priority preseed
      p2pdist pull docker://registry.example.org/team/trainer:v3
      p2pdist pull hf://org/model@main
    """
    from p2pdist.agent.api.client import LocalClient
    from p2pdist.cli.references.search import chosen, is_part

    client = LocalClient(socket)
    names = chosen(references, client, default_layout(), origin)
    several = len(references) > 1 or any(map(is_part, references))
    statuses, failures = _pull_all(client, names, priority, as_json=as_json)
    if as_json and (statuses or several):
        documents = [_document(status) for status in statuses]
        output.print_json([*documents, *(failure.problem() for failure in failures)] if several else documents[0])
    elif not as_json:
        for status in statuses:
            _show(status)
    if failures:
        for failure in failures[1:]:
            output.line(f"p2pdist: {failure}")
        raise failures[0] if not several or not as_json else output.Listed(failures[0])


def _pull_all(
    client: Any, names: Sequence[str], priority: Priority, *, as_json: bool
) -> tuple[list[PullStatus], list[P2PDistError]]:
    """Pull AT_ONCE packages at a time; returns what has come, and the failures, in the order of
    `names`."""

    stopped = threading.Event()

    with output.Progress(quiet=as_json) as bars:

        def pull(name: str) -> PullStatus | P2PDistError:
            try:
                return follow_pull(client, name, quiet=as_json, priority=priority, beside=bars, stopped=stopped)
            except P2PDistError as error:
                return error

        outcomes = [pull(names[0])] if len(names) == 1 else _in_threads(pull, names, stopped)
    for name, outcome in zip(names, outcomes, strict=True):
        if isinstance(outcome, NotFound) and not is_image(name):
            _hint(outcome, name, client)
    statuses = [outcome for outcome in outcomes if isinstance(outcome, PullStatus)]
    return statuses, [outcome for outcome in outcomes if isinstance(outcome, P2PDistError)]


def _in_threads(
    pull: Callable[[str], PullStatus | P2PDistError], names: Sequence[str], stopped: threading.Event
) -> list[PullStatus | P2PDistError]:
    """What `pull` returns for each name, AT_ONCE at a time. A signal ends this soon: threads of an
    executor would be waited for, also at the end of the process, however long their pulls take."""
    context = click.get_current_context()
    left = enumerate(names)  # the threads share it
    outcomes: dict[int, PullStatus | P2PDistError] = {}
    failures: list[BaseException] = []

    def work() -> None:
        push_context(context)  # by which --quiet is known; each thread has its own
        try:
            for place, name in left:
                if stopped.is_set():
                    return
                outcomes[place] = pull(name)
        except BaseException as failure:
            failures.append(failure)
            stopped.set()
        finally:
            pop_context()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, len(names)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        stopped.set()
        until = time.monotonic() + STOP_S  # in which they take their bars off the terminal
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        raise
    if failures:
        raise failures[0]
    return [outcomes[place] for place in range(len(names))]


def _hint(error: NotFound, name: str, client: Any) -> None:
    """Say that the package was packed here and not pushed, or name what is on this host and was
    perhaps meant."""
    from p2pdist.cli.references.search import names_here

    error.details.setdefault("reference", name)
    names = names_here(client, default_layout())
    if error.details["reference"] in names:
        origin = str(error.details.get("origin", ""))
        origin = "URL" if not origin or origin.startswith("http") else origin  # web servers take no pushes
        error.remedy = f"It was packed on this host, but not pushed there: p2pdist push {name} --origin {origin}"
    else:
        add_hint(error, names, "on this host")


def _document(status: PullStatus) -> dict[str, Any]:
    return {
        "reference": status.reference,
        "digest": status.digest,
        "bytes_total": status.bytes_total,
        "bytes_origin": status.bytes_origin,
        "bytes_peers": status.bytes_peers,
        "bytes_upstream": status.bytes_upstream,
        "bytes_cached": status.bytes_cached,
        "seconds": round(status.seconds, 3),
        "tag_age_s": status.tag_age_s,
    }


def _show(status: PullStatus) -> None:
    output.say(f"{status.reference}  {status.digest}")
    if output.is_quiet():
        return
    sources = (
        ("peers", status.bytes_peers),
        ("the origin", status.bytes_origin),
        ("its registry", status.bytes_upstream),
        ("the store", status.bytes_cached),
    )
    parts = ", ".join(f"{output.amount(count)} from {source}" for source, count in sources if count)
    output.say(f"{output.amount(status.bytes_total)} in {status.seconds:.1f} s{': ' if parts else ''}{parts}")
