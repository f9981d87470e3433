"""`p2pdist completion`: what a shell needs to complete the command's verbs, options and references.

click has the scripts for zsh and fish: a shell asks `p2pdist` itself, by a variable, for the words
that may follow. click's script for bash takes the words as bash splits them, at the colons of
references too. The script here hands over the whole line, and each answer lacks the part before the
last break.
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
    """Completion for bash from the whole line."""

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
    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(click.get_current_context().find_root().command, {}, PROGRAM, VARIABLE).source())
