"""What the documents say exists: commands, options, metrics and exit codes."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from p2pdist.cli.main import VERBS, main
from p2pdist.model import errors

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bench/README.md", "deploy/kubernetes/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
INLINE = re.compile(r"`(p2pdist [^`]+)`")
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
METRIC = re.compile(r"\bp2pdist_(?:agent|tracker)_[a-z0-9_]+")
DEFINED = re.compile(r'"(p2pdist_(?:agent|tracker)_[a-z0-9_]+)"')


def commands(text: str) -> Iterator[list[str]]:
    """The words of every p2pdist command in a document's fenced blocks, without what follows
    `--`."""
    for block in FENCED.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("p2pdist "):
                words = shlex.split(line, comments=True)[1:]
                yield words[: words.index("--")] if "--" in words else words


def unknown(words: list[str]) -> list[str]:
    """What of a command does not exist; a verb that is not built yet is not looked into."""
    verb, *rest = words
    if verb not in VERBS:
        return [verb]
    if importlib.util.find_spec(f"p2pdist.cli.verbs.{verb}") is None:
        return []
    command = main.get_command(click.Context(main), verb)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        command, rest = command.commands.get(rest[0]), rest[1:]
    if rest and rest[0] in getattr(command, "subcommands", {}):
        command, rest = command.subcommands[rest[0]], rest[1:]
    if command is None:
        return [" ".join(words)]
    known = {flag for option in command.params if isinstance(option, click.Option) for flag in option.opts} | {"--help"}
    return [word for word in rest if word.startswith("-") and word.partition("=")[0] not in known]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_in_a_document_exists(document: Path) -> None:
    """With the options that it is shown with."""
    wrong = [(words, unknown(words)) for words in commands(document.read_text())]
    assert [found for found in wrong if found[1]] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_within_a_sentence_exists(document: Path) -> None:
    """With its options, also where a line ends within it."""
    prose = FENCED.sub("", document.read_text())
    named = [" ".join(text.split()).split(" -- ")[0].split()[1:] for text in INLINE.findall(prose)]
    assert [found for found in ((words, unknown(words)) for words in named) if found[1]] == []


def test_a_wrong_command_is_noticed() -> None:
    """The check above can fail: an unknown verb, verb of a group, or option."""
    text = "```\np2pdist conjure x\np2pdist blob lose x\np2pdist pack . --magic \\\n  --base a -- --kept\n```"
    assert [unknown(words) for words in commands(text)] == [["conjure"], ["blob lose x"], ["--magic"]]


PATH = re.compile(r"`([\w./-]+\.(?:py|sh|js|toml|yml))`")
PLACES = ("", "p2pdist", "p2pdist/package", "p2pdist/transfer/stream", "tracker", "tracker/core", "bench")
"""Where a path that a document names may begin."""

OF_USERS = ("p2pdist.toml", "access.toml", "access/access.toml")
"""Files of users, which documents name and the project does not have."""


def lost(text: str) -> list[str]:
    """Paths of a document that lead to no file."""
    return [path for path in PATH.findall(text) if not any((ROOT / place / path).exists() for place in PLACES)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_in_a_document_exists(document: Path) -> None:
    """A module that moves takes its name in the documents along."""
    assert [path for path in lost(document.read_text()) if path.rpartition("/")[2] not in OF_USERS] == []
    assert lost("`core/there_is_none.py` and `core/uplink.py`") == ["core/there_is_none.py"]


EXAMPLES = {"train.py", "t.py"}
"""Programs of users in help texts."""


def missing(text: str, modules: list[str]) -> list[str]:
    """Modules that a text names, by the end of a path, and that are not among these."""
    found = re.findall(r"(?<![\w/.<>])[\w/]+\.py\b", text)
    return [name for name in found if name not in EXAMPLES and not any(each.endswith(f"/{name}") for each in modules)]


def test_every_module_that_code_names_exists() -> None:
    """Docstrings and comments say "(pieces.py)": a module that moves takes its name along there."""
    places = {place: sorted((ROOT / place).rglob("*.py")) for place in ("p2pdist", "tracker", "tests", "bench")}
    modules = [f"/{path.relative_to(ROOT)}" for paths in places.values() for path in paths]
    code = [path for place in ("p2pdist", "tracker") for path in places[place]]
    assert {path.name: wrong for path in code if (wrong := missing(path.read_text(), modules))} == {}
    assert missing("as (core/uplink.py) and (there_is_none.py) do", modules) == ["there_is_none.py"]


def test_metrics_and_their_documentation_agree() -> None:
    """Every metric has its row in operations.md, and every name there is a metric."""
    sources = [*(ROOT / "p2pdist" / "agent").rglob("*.py"), *(ROOT / "tracker").rglob("*.py")]
    defined = {name for source in sources for name in DEFINED.findall(source.read_text())}
    text = (ROOT / "docs" / "operations.md").read_text()
    named = {name.removesuffix("_total") for name in METRIC.findall(text)}
    assert named == {name.removesuffix("_total") for name in defined}


def test_exit_codes_and_their_documentation_agree() -> None:
    """The README's table names the code of every failure."""
    rows = {
        int(code): text
        for code, text in re.findall(r"^\| (\d) \| (.*?) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    }
    kinds = {
        errors.P2PDistError: "failed",
        errors.UsageError: "usage",
        errors.NotFound: "not found",
        errors.Refused: "refused",
        errors.Unavailable: "unavailable",
        errors.Corrupt: "corrupt",
    }
    assert sorted(rows) == [0, *sorted(kind.exit_code for kind in kinds)]
    assert all(word in rows[kind.exit_code] for kind, word in kinds.items())
