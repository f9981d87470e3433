"""`p2pdist completion`: what a shell needs to complete the command's verbs, options and references.

click brings the scripts and the machinery: a shell asks `p2pdist` itself, by a variable, what may
follow. Its script for bash reads the words as bash splits them, at colons too, which references
have; so that one is ours: it hands over the line, and of what may follow only that is given back
which comes after the last break.
"""

from __future__ import annotations

import os
import re
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "p2pdist"
VARIABLE = "_P2PDIST_COMPLETE"
WORD_BREAKS = ":="

_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' kind value
    COMPREPLY=()
    while IFS=',' read -r kind value; do
        case $kind in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done < <(COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" %(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class _Bash(BashComplete):
    """See the module's text."""

    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ.get("COMP_LINE", "")
        words = split_arg_string(line)[1:]
        unfinished = words.pop() if words and not line[-1:].isspace() else ""
        return words, unfinished

    def format_completion(self, item: CompletionItem[Any]) -> str:
        _, unfinished = self.get_completion_args()
        breaks = "".join(set(WORD_BREAKS) & set(os.environ.get("COMP_WORDBREAKS", "")))
        shown = re.split(f"[{breaks}]", unfinished)[-1] if breaks else unfinished
        before = unfinished[: len(unfinished) - len(shown)]
        return f"{item.type},{item.value.removeprefix(before)}"


add_completion_class(_Bash)


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the script with which SHELL completes verbs, options and references.

    \b
    Examples:
      source <(p2pdist completion bash)                                    # in ~/.bashrc
      p2pdist completion zsh > "${fpath[1]}/_p2pdist"
      p2pdist completion fish > ~/.config/fish/completions/p2pdist.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(click.get_current_context().find_root().command, {}, PROGRAM, VARIABLE).source())
