"""The house rules of docs/architecture.md and CONTRIBUTING.md, enforced.

Every rule is a function from a module's path and text to a list of violations. It is applied to the
tree, and to a snippet that breaks it, so that a rule which can no longer fail is noticed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
Rule = Callable[[PurePosixPath, str], list[str]]

FUNCTION_LINES_MAX = 60
CLASS_LINES_MAX = 300
CLASS_METHODS_MAX = 25
CLASSES_OF_MANY_METHODS = {"p2pdist/store/index.py", "p2pdist/transfer/torrent/transfer.py"}
"""Where each method is a statement of SQL, or answers one kind of libtorrent's alerts."""

METHOD_LINES_SILENT = 25
FOLDER_MODULES_MAX = 12
ROOMY = ("p2pdist/cli/verbs", "p2pdist/model")
"""Folders that may hold more modules: one for each verb, one for each kind of value."""

MODULE_LINES_WARN = 800

PURE = ("p2pdist.model", "p2pdist.core", "tracker.core")
"""Packages that decide: events in, commands out, the time handed in. The same code is live and
simulated."""

# fmt: off
IMPURE_MODULES = frozenset([
    "aiohttp", "asyncio", "concurrent", "ctypes", "datetime", "fcntl", "glob", "io", "logging", "mmap",
    "multiprocessing", "obstore", "os", "pathlib", "random", "requests", "sched", "secrets", "select", "selectors",
    "shutil", "signal", "socket", "socketserver", "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading",
    "time", "urllib", "uuid", "uvloop",
])
# fmt: on
IMPURE_CALLS = frozenset(["open", "print", "input", "exec", "eval", "hash", "id", "breakpoint"])
"""hash and id differ from process to process (PYTHONHASHSEED), and would make two runs of one seed
differ."""

VAGUE_NAMES = frozenset(
    ["utils", "util", "helpers", "helper", "common", "manager", "managers", "base", "misc", "tools"]
)

# fmt: off
PRIVATE_WORDS = frozenset([
    "around", "attended", "blamed", "caching", "deal", "deals", "dealt", "departure", "depot", "descent", "dial",
    "dialled", "doorbell", "draft", "drafts", "housekeeping", "hurry", "intake", "keeper", "keepers", "kept", "lack",
    "lacks", "leaving", "ledger", "light", "pace", "seat", "seats", "settle", "settled", "showing", "shown", "shunned",
    "small", "spare", "spares", "standing", "survey", "surroundings", "tell", "telling", "told", "way", "ways",
])
# fmt: on
"""Words that named parts of this program once and mean nothing to a newcomer: textbooks, RFCs, BEPs
and the OCI specification have others for them."""

ON_THE_WIRE = PurePosixPath("p2pdist/model/messages.py")
"""Messages keep their names as long as the protocol keeps its version."""

# -- reading the tree


def tracked() -> list[PurePosixPath]:
    """Files of the project: those under version control and those about to be; without git, every
    file outside hidden folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        names = [name for name in listed.stdout.decode().split("\0") if name]
        return [PurePosixPath(name) for name in names if (ROOT / name).is_file()]
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [PurePosixPath(path) for path in found if not any(part[0] == "." and part != ".ci" for part in path.parts)]


FILES = tracked()
MODULES = [path for path in FILES if path.suffix == ".py" and path.parts[0] in ("p2pdist", "tracker")]
PROGRAMS = [
    path for path in FILES if path.suffix == ".py" and path.parts[0] in ("p2pdist", "tracker", "tests", "bench")
]
DOCUMENTS = [path for path in FILES if path.suffix == ".md"]


def module_name(path: PurePosixPath) -> str:
    """`p2pdist/core/pull.py` is p2pdist.core.pull; a package is named by its folder."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, name: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a module imports. `from a import b` yields `a.b`, which
    is at least as precise."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parents = name.split(".")
                kept = parents[: len(parents) - node.level + (1 if is_package else 0)]
                origin = ".".join([*kept, origin] if origin else kept)
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements, and what else has a body, at any depth: a tenth of all nodes, since
    expressions are left out."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, field, ()):
            yield node
            yield from statements(node)


@lru_cache(maxsize=1)
def parsed(text: str) -> ast.Module:
    """The tree of a module; all rules look at one module before the next."""
    return ast.parse(text)


# -- the rules


def purity(path: PurePosixPath, text: str) -> list[str]:
    """Cores and model touch no clock, randomness, log, thread, file or socket."""
    name = module_name(path)
    if not within(name, PURE):
        return []
    tree = parsed(text)
    found = [
        f"{path}:{line} imports {target}, which a pure package may not"
        for line, target in imported(tree, name, is_package=path.name == "__init__.py")
        if target.split(".")[0] in IMPURE_MODULES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            found.append(f"{path}:{node.lineno} calls {node.func.id}(), which a pure package may not")
    return found


def function_size(path: PurePosixPath, text: str) -> list[str]:
    """Functions of about 40 lines, 60 at the most, in the product."""
    if path.parts[0] not in ("p2pdist", "tracker"):
        return []
    return [
        f"{path}:{node.lineno} {node.name} has {size} lines, over the limit of {FUNCTION_LINES_MAX}"
        for node in statements(parsed(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (size := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]


def class_size(path: PurePosixPath, text: str) -> list[str]:
    """A class of the product is one noun: 300 lines and 25 methods at the most."""
    if path.parts[0] not in ("p2pdist", "tracker"):
        return []
    found = []
    for node in statements(parsed(text)):
        if isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            methods = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
            many = methods > CLASS_METHODS_MAX and str(path) not in CLASSES_OF_MANY_METHODS
            if lines > CLASS_LINES_MAX or many:
                found.append(f"{path}:{node.lineno} {node.name} has {lines} lines and {methods} methods")
    return found


def telling_names(path: PurePosixPath, _text: str) -> list[str]:
    """No module is named after the absence of a noun."""
    vague = [part for part in path.with_suffix("").parts if part in VAGUE_NAMES]
    return [f"{path} is named {part}: name it after what it holds" for part in vague]


def words_of_the_field(path: PurePosixPath, text: str) -> list[str]:
    """Modules, classes and public functions of the product have names that a newcomer knows."""
    names = [(1, path.stem)]
    if path != ON_THE_WIRE:
        names += [
            (node.lineno, node.name)
            for node in statements(parsed(text))
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_"
        ]
    return [
        f"{path}:{line} {name} has a word of our own, {word}"
        for line, name in names
        for word in re.findall(r"[A-Z]?[a-z]+", name)
        if word.lower() in PRIVATE_WORDS
    ]


def docstrings(path: PurePosixPath, text: str) -> list[str]:
    """Modules, public classes and public functions state their contract. A function of one
    statement and a class of fields alone are their own; a method that is not a core's handle()
    needs one when it fills a screen."""
    if path.parts[0] not in ("p2pdist", "tracker") or not text.strip():
        return []
    tree = parsed(text)
    found = [] if ast.get_docstring(tree) else [f"{path} has no docstring"]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            behaves = any(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
            if behaves and not ast.get_docstring(node):
                found.append(f"{path}:{node.lineno} class {node.name} has no docstring")
            found += [
                f"{path}:{method.lineno} {node.name}.{method.name} has no docstring"
                for method in node.body
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
                and not method.name.startswith("_")
                and (method.end_lineno or 0) - method.lineno >= METHOD_LINES_SILENT
                and method.name != "handle"
                and not ast.get_docstring(method)
            ]
        elif (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and not node.name.startswith("_")
            and len(node.body) > 1
            and not ast.get_docstring(node)
        ):
            found.append(f"{path}:{node.lineno} {node.name} has no docstring")
    return found


BROAD = re.compile(r"except\b[\s*(]*(:|(Base)?Exception\b)")
"""What a text has that may break the next rule; most have none of it, and need not be parsed."""


def silence_on_failure(path: PurePosixPath, text: str) -> list[str]:
    """No bare `except:` and no `except Exception: pass`: a failure is handled, shown or passed
    on."""
    found = []
    for node in statements(parsed(text)) if BROAD.search(text) else ():
        if not isinstance(node, ast.ExceptHandler):
            continue
        broad = node.type is None or (
            isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
        )
        if node.type is None or (broad and all(isinstance(part, ast.Pass) for part in node.body)):
            found.append(f"{path}:{node.lineno} swallows every failure")
    return found


FAILURES = frozenset(
    (
        *("Conflict", "Corrupt", "NotFound", "P2PDistError", "Refused", "TooLarge"),
        *("Unauthenticated", "Unavailable", "Unsuitable", "UsageError"),
    )
)
ADVISED = ("p2pdist.cli", "p2pdist.package")
"""Packages whose failures people at a terminal meet as they were raised."""

NOT_ADVISED = re.compile(r"\Aerror\.format_message\(\)\Z|was cancelled|\Af?.it (is not JSON|is not a JSON|lists )")
"""Click's own words, what nobody sees, and what is a part of another failure."""


def remedies(path: PurePosixPath, text: str) -> list[str]:
    """What fails says what to do about it."""
    found = []
    for node in ast.walk(parsed(text)) if within(module_name(path), ADVISED) else ():
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in FAILURES:
            continue
        advised = any(keyword.arg in ("remedy", None) for keyword in node.keywords)
        if node.args and not advised and not NOT_ADVISED.search(ast.unparse(node.args[0])):
            found.append(f"{path}:{node.lineno} {node.func.id} has no remedy")
    return found


LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+\s+(.*?)\s*$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors that headings get: lower case, punctuation dropped, spaces as hyphens."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


def links(path: PurePosixPath, text: str) -> list[str]:
    """Links of a document to files, and to headings in them, lead somewhere."""
    found = []
    for target in LINK.findall(text):
        name, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (ROOT / path).parent / name if name else ROOT / path
        if not file.exists():
            found.append(f"{path} links to {target}, which does not exist")
        elif anchor and anchor not in anchors(text if not name else file.read_text()):
            found.append(f"{path} links to {target}, which has no such heading")
    return found


# -- the tree obeys


RULES: dict[Rule, list[PurePosixPath]] = {
    purity: MODULES,
    function_size: MODULES,
    class_size: MODULES,
    docstrings: MODULES,
    telling_names: PROGRAMS,
    words_of_the_field: MODULES,
    silence_on_failure: PROGRAMS,
    remedies: MODULES,
    links: DOCUMENTS,
}
"""Each rule, and the files that have to obey it."""


@cache
def violations() -> dict[Rule, list[str]]:
    """What breaks each rule. A file is read and parsed once, for all rules."""
    found: dict[Rule, list[str]] = {rule: [] for rule in RULES}
    places = {rule: frozenset(paths) for rule, paths in RULES.items()}
    for path in dict.fromkeys(path for paths in RULES.values() for path in paths):
        text = (ROOT / path).read_text(encoding="utf-8")
        for rule, paths in places.items():
            if path in paths:
                found[rule] += rule(path, text)
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_obeys(rule: Rule) -> None:
    """No file breaks the rule."""
    assert RULES[rule], "the rule was applied to nothing"
    assert not violations()[rule], "\n" + "\n".join(violations()[rule])


def test_a_folder_holds_a_dozen_modules() -> None:
    """What is in a folder can be read at a glance."""
    folders = Counter(str(path.parent) for path in MODULES if path.name != "__init__.py")
    found = {name: count for name, count in folders.items() if count > FOLDER_MODULES_MAX and name not in ROOMY}
    assert not found


def test_long_modules_are_told() -> None:
    """No limit on length cuts a noun apart; a module of more than 800 lines is worth a look."""
    for path in MODULES:
        lines = len((ROOT / path).read_text().splitlines())
        if lines > MODULE_LINES_WARN:
            warnings.warn(f"{path} has {lines} lines", stacklevel=1)


# -- each rule can fail


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (purity, "tracker/core/x.py", "import time"),
        (purity, "p2pdist/core/x.py", "from asyncio import sleep"),
        (purity, "p2pdist/core/x.py", "import os.path"),
        (purity, "p2pdist/model/x.py", "def f(path):\n    return open(path)"),
        (purity, "tracker/core/x.py", "order = sorted(hosts, key=lambda name: hash(name))"),
        (function_size, "p2pdist/core/x.py", "async def f():\n" + "    a = 1\n" * 60),
        (class_size, "p2pdist/core/x.py", "class A:\n" + "    a = 1\n" * 300),
        (class_size, "tracker/x.py", "class A:\n" + "    def f(self): ...\n" * 26),
        (telling_names, "p2pdist/core/utils.py", ""),
        (telling_names, "tests/common/test_x.py", ""),
        (words_of_the_field, "tracker/core/draft.py", ""),
        (words_of_the_field, "tracker/core/x.py", "class HostKeeper: ..."),
        (words_of_the_field, "p2pdist/x.py", "class Host:\n    def settle_name(self): ..."),
        (docstrings, "p2pdist/core/x.py", "a = 1"),
        (docstrings, "p2pdist/core/x.py", '"""Doc."""\ndef f(a):\n    a += 1\n    return a'),
        (docstrings, "p2pdist/core/x.py", '"""Doc."""\nclass A:\n    def f(self):\n        return 1'),
        (
            docstrings,
            "tracker/x.py",
            '"""Doc."""\nclass A:\n    """Doc."""\n    def f(self):\n' + "        self.a()\n" * 25,
        ),
        (silence_on_failure, "p2pdist/core/x.py", "try:\n    f()\nexcept:\n    g()"),
        (silence_on_failure, "p2pdist/core/x.py", "try:\n    f()\nexcept Exception:\n    pass"),
        (remedies, "p2pdist/cli/x.py", "raise NotFound(f'there is no {name}')"),
        (links, "README.md", "[there](docs/there-is-no-such-file.md)"),
        (links, "README.md", "[there](#no-such-heading)\n# Another heading"),
        (links, "docs/x.md", "[there](../README.md#no such-heading)".replace("no such", "no-such")),
    ],
)
def test_a_rule_can_fail(rule: Rule, path: str, text: str) -> None:
    """The rule names exactly one violation in a snippet with one."""
    assert len(rule(PurePosixPath(path), text)) == 1


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (purity, "p2pdist/agent/x.py", "import asyncio, time\nprint(hash('a'))"),
        (purity, "p2pdist/core/x.py", "import hashlib\ndigest = hashlib.sha256(b'').hexdigest()"),
        (docstrings, "p2pdist/core/__init__.py", ""),
        (
            docstrings,
            "p2pdist/core/x.py",
            '"""Doc."""\ndef twice(a):\n    return 2 * a\ndef _f(a):\n    a += 1\n    return a',
        ),
        (silence_on_failure, "p2pdist/x.py", "try:\n    f()\nexcept OSError:\n    pass"),
        (remedies, "p2pdist/cli/x.py", "raise NotFound('a', remedy='b')"),
        (links, "README.md", "[a](LICENSE) [b](https://example.org/none) [c](#a-heading)\n## A heading"),
    ],
)
def test_a_rule_lets_good_code_pass(rule: Rule, path: str, text: str) -> None:
    """The rule does not forbid what it need not."""
    assert rule(PurePosixPath(path), text) == []


def test_test_modules_have_names_of_their_own() -> None:
    """pytest imports them by their base names alone."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(name for name, count in Counter(names).items() if count > 1) == []
