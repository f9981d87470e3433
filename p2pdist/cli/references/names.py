"""References on the command line: text, for which a shell offers what lies in the local layout and
at this host's agent.

Completion must not keep the user waiting: the layout's list of tags is one small file, and the
agent has AGENT_ANSWERS_S to answer. A failure of either offers no names and prints nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

ARGUMENTS = frozenset({"ref", "refs", "reference", "references", "package", "old", "new", "alias"})
"""Arguments of verbs that are references."""

INDEX_BYTES_MAX = 16 << 20
OFFERED_MAX = 1000
AGENT_ANSWERS_S = 0.5


class ReferenceName(click.types.StringParamType):
    """The type of an argument that is a reference; it completes names from layout and agent."""

    name = "reference"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
        """Names that begin with `incomplete`, at most OFFERED_MAX; directories where the argument
        may be one and the word is a path."""
        from click.shell_completion import CompletionItem

        if incomplete.startswith((".", "/", "~")) and "DIRECTORY" in str(param.metavar):
            return [CompletionItem(incomplete, type="dir")]
        names = {name for name in _available(ctx) if name.startswith(incomplete)}
        return [CompletionItem(name) for name in sorted(names)[:OFFERED_MAX]]


def offer_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
    """Have the shell complete a word as the name of a file: `shell_complete` of a parameter."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def _available(ctx: click.Context) -> Iterator[str]:
    """Names of layout and agent, which variables name also for a verb without these options."""
    from p2pdist.agent.api.client import DEFAULT_SOCKET, LocalClient
    from p2pdist.cli.services import default_layout
    from p2pdist.model.errors import P2PDistError

    socket = ctx.params.get("socket") or os.environ.get("P2PDIST_SOCKET") or DEFAULT_SOCKET
    layout = ctx.params.get("layout")
    with suppress(P2PDistError):  # a user without a home directory
        yield from _tags(Path(layout or default_layout()))
    try:
        client = LocalClient(Path(socket), answer_s=AGENT_ANSWERS_S)
        yield from (str(package["reference"]) for package in client.packages())
    except P2PDistError:
        return  # no agent, or one that has no time


def _tags(layout: Path) -> Iterator[str]:
    """The tags of an OCI layout."""
    from p2pdist.files import read_content
    from p2pdist.model.errors import P2PDistError
    from p2pdist.origin.index import Index

    try:
        data = read_content(layout / "index.json", INDEX_BYTES_MAX).data
        yield from (name for name, _ in Index(data, str(layout)).tags())
    except (OSError, P2PDistError):
        return  # there is none, or it is none
