"""The house rules of docs/architecture.md and CONTRIBUTING.md, enforced.

Every rule is a function from a module's path and text to a list of violations. It is applied to the
tree, and to a snippet that breaks it, so that a rule which can no longer fail is noticed.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
Rule = Callable[[PurePosixPath, str], list[str]]

MODULE_LINES_MAX = 800
TEST_LINES_MAX = 800
FUNCTION_LINES_MAX = 60
METHOD_LINES_SILENT = 25

MODEL = "p2pdist.model"
ADAPTERS = ("p2pdist.store", "p2pdist.transfer", "p2pdist.origin", "p2pdist.package", "p2pdist.mount")

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "p2pdist.model": (MODEL,),
    "p2pdist.core": (MODEL, "p2pdist.core"),
    **{adapter: (MODEL, adapter) for adapter in ADAPTERS},
    "p2pdist.agent": (MODEL, "p2pdist.core", *ADAPTERS, "p2pdist.agent"),
    "p2pdist.simulate": (MODEL, "p2pdist.core", "tracker.core", "p2pdist.simulate"),
    "p2pdist.cli": ("p2pdist", "tracker"),
    "p2pdist.__main__": ("p2pdist.cli",),
    "tracker.core": (MODEL, "tracker.core"),
    "tracker.state": (MODEL, "tracker.state"),
    "tracker.content": (MODEL, "p2pdist.origin", "tracker.state", "tracker.content"),
    "tracker.preseed_service": (MODEL, "tracker.core", "tracker.state", "tracker.content", "tracker.preseed_service"),
    "tracker.policies": (MODEL, "tracker.core", "tracker.content", "tracker.policies"),
    "tracker.warm_tags": (MODEL, "tracker.core", "tracker.content", "tracker.preseed_service", "tracker.warm_tags"),
    "tracker.http": (
        MODEL,
        "p2pdist.transfer.openapi",
        "p2pdist.transfer.problems",
        "tracker.core",
        "tracker.http",
        "tracker.policies",
        "tracker.preseed_service",
        "tracker.service",
    ),
    "tracker.reach": (
        MODEL,
        "p2pdist.transfer.stream.connect",
        "p2pdist.transfer.names",
        "tracker.core",
        "tracker.reach",
    ),
    "tracker.service": (MODEL, "tracker.core", "tracker.state", "tracker.content", "tracker.reach", "tracker.http"),
}
"""Which of our packages a package may import. The longest prefix of a module's name decides; what
is not named may import nothing of ours. A core and an adapter never meet; only the shells (agent,
tracker.service with its handlers, simulate, cli) see both."""

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

FORBIDDEN_WORDS: tuple[str, ...] = (
    *(
        re.escape(first + second)
        for first, second in (
            ("/wo", "rk/"),
            ("/opt/", "pypi"),
            ("/opt/", "wheels"),
            ("pypi", ".org"),
            ("pythonhosted", ".org"),
            ("npmjs", ".org"),
            ("crates", ".io"),
            ("open", "ai"),
            ("anthro", "pic"),
            ("clau", "de"),
            ("chat", "gpt"),
            ("co", "pilot"),
        )
    ),
    r"\bissues? #?\d",
    r"\bas an ai\b",
    r"\bai assist",
)
"""The project speaks of itself alone: no path of one machine, no package index, no tool that had a
hand in it."""

TEXT_SUFFIXES = frozenset(
    [
        ".py",
        ".md",
        ".toml",
        ".yml",
        ".yaml",
        ".json",
        ".sh",
        ".cfg",
        ".txt",
        ".ini",
        ".html",
        ".css",
        ".js",
        ".sql",
        ".service",
        ".conf",
        ".example",
    ]
)
TEXT_NAMES = frozenset(["Makefile", "LICENSE", ".gitignore", "run", "Dockerfile"])


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
TEXTS = [path for path in FILES if path.suffix in TEXT_SUFFIXES or path.name in TEXT_NAMES]


def module_name(path: PurePosixPath) -> str:
    """`p2pdist/core/download.py` is p2pdist.core.download; a package is named by its folder."""
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


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


# -- the rules


def import_directions(path: PurePosixPath, text: str) -> list[str]:
    """The arrows of MAY_IMPORT; type-checking imports count."""
    name = module_name(path)
    key = max((known for known in MAY_IMPORT if within(name, (known,))), key=len, default="")
    allowed = MAY_IMPORT.get(key, ())
    return [
        f"{path}:{line} imports {target}; {key or name} may import {', '.join(allowed) or 'nothing of ours'}"
        for line, target in imported(ast.parse(text), name, is_package=path.name == "__init__.py")
        if within(target, ("p2pdist", "tracker")) and not within(target, allowed)
    ]


def purity(path: PurePosixPath, text: str) -> list[str]:
    """Cores and model touch no clock, randomness, log, thread, file or socket."""
    name = module_name(path)
    if not within(name, PURE):
        return []
    tree = ast.parse(text)
    found = [
        f"{path}:{line} imports {target}, which a pure package may not"
        for line, target in imported(tree, name, is_package=path.name == "__init__.py")
        if target.split(".")[0] in IMPURE_MODULES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            found.append(f"{path}:{node.lineno} calls {node.func.id}(), which a pure package may not")
    return found


def module_size(path: PurePosixPath, text: str) -> list[str]:
    """One module, one noun, whole: a limit on length must not cut a noun apart; 800 lines at the
    most."""
    limit = MODULE_LINES_MAX if path.parts[0] in ("p2pdist", "tracker") else TEST_LINES_MAX
    lines = len(text.splitlines())
    return [f"{path} has {lines} lines, over the limit of {limit}: split it"] if lines > limit else []


def function_size(path: PurePosixPath, text: str) -> list[str]:
    """Functions of about 40 lines, 60 at the most, in the product."""
    if path.parts[0] not in ("p2pdist", "tracker"):
        return []
    sizes = ((node, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions(ast.parse(text)))
    return [
        f"{path}:{node.lineno} {node.name} has {size} lines, over the limit of {FUNCTION_LINES_MAX}"
        for node, size in sizes
        if size > FUNCTION_LINES_MAX
    ]


def telling_names(path: PurePosixPath, _text: str) -> list[str]:
    """No module is named after the absence of a noun."""
    vague = [part for part in path.with_suffix("").parts if part in VAGUE_NAMES]
    return [f"{path} is named {part}: name it after what it holds" for part in vague]


def docstrings(path: PurePosixPath, text: str) -> list[str]:
    """Modules, public classes and public functions state their contract. A function of one
    statement and a class of fields alone are their own; a method that is not a core's handle()
    needs one when it fills a screen."""
    if path.parts[0] not in ("p2pdist", "tracker") or not text.strip():
        return []
    tree = ast.parse(text)
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


def silence_on_failure(path: PurePosixPath, text: str) -> list[str]:
    """No bare `except:` and no `except Exception: pass`: a failure is handled, shown or passed
    on."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        broad = node.type is None or (
            isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
        )
        if node.type is None or (broad and all(isinstance(part, ast.Pass) for part in node.body)):
            found.append(f"{path}:{node.lineno} swallows every failure")
    return found


def speaks_of_itself(path: PurePosixPath, text: str) -> list[str]:
    """No forbidden word, in any spelling of case."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        found += [f"{path}:{number} says {match.group()!r}" for match in FORBIDDEN.finditer(line)]
    return found


FORBIDDEN = re.compile("|".join(FORBIDDEN_WORDS), re.IGNORECASE)
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


def cycles(modules: dict[str, str]) -> list[str]:
    """Chains of imports that come back to where they began, from module name to text. Imports for
    type checking and within functions do not count: they do not keep a module from being loaded."""
    graph: dict[str, set[str]] = {}
    for name, text in modules.items():
        tree = ast.parse(text)
        for node in ast.walk(tree):
            guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            if guarded or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = [ast.Pass()]  # type: ignore[attr-defined]
        targets = (target for _line, target in imported(tree, name, is_package=False))
        graph[name] = {
            max((known for known in modules if within(target, (known,))), key=len, default="") for target in targets
        }
    found: list[str] = []
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            found.append(" -> ".join([*trail[trail.index(name) :], name]))
        elif name not in done:
            for target in sorted(graph[name] - {"", name}):
                visit(target, [*trail, name])
            done.add(name)

    for name in sorted(modules):
        visit(name, [])
    return found


# -- the tree obeys


@pytest.mark.parametrize(
    ("rule", "paths"),
    [
        (import_directions, MODULES),
        (purity, MODULES),
        (function_size, MODULES),
        (docstrings, MODULES),
        (module_size, PROGRAMS),
        (telling_names, PROGRAMS),
        (silence_on_failure, PROGRAMS),
        (speaks_of_itself, TEXTS),
        (links, DOCUMENTS),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_tree_obeys(rule: Rule, paths: list[PurePosixPath]) -> None:
    """No file breaks the rule."""
    assert paths, "the rule was applied to nothing"
    violations = [line for path in paths for line in rule(path, (ROOT / path).read_text(encoding="utf-8"))]
    assert not violations, "\n" + "\n".join(violations)


def test_no_import_goes_in_a_circle() -> None:
    """The modules of the product can be loaded in some order, each after what it needs."""
    found = cycles({module_name(path): (ROOT / path).read_text() for path in MODULES})
    assert not found, "\n" + "\n".join(found)


def test_every_package_has_its_place() -> None:
    """A new folder under p2pdist or tracker says in MAY_IMPORT what it may see."""
    homeless = {
        name
        for name in map(module_name, MODULES)
        if name not in ("p2pdist", "tracker") and not any(within(name, (known,)) for known in MAY_IMPORT)
    }
    assert not homeless


# -- each rule can fail


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (import_directions, "p2pdist/model/x.py", "from p2pdist.core import download"),
        (import_directions, "p2pdist/core/x.py", "import p2pdist.store.store"),
        (import_directions, "p2pdist/core/x.py", "def f():\n    from p2pdist import store"),
        (import_directions, "p2pdist/core/x.py", "from ..store import blobs"),
        (import_directions, "p2pdist/core/__init__.py", "from ..store import blobs"),
        (import_directions, "p2pdist/store/x.py", "from p2pdist.core.download import Download"),
        (import_directions, "p2pdist/store/x.py", "from p2pdist.origin import store"),
        (import_directions, "p2pdist/agent/x.py", "from tracker.core import swarm"),
        (import_directions, "p2pdist/simulate/x.py", "from tracker.service import Service"),
        (import_directions, "tracker/core/x.py", "from tracker.state import traces"),
        (import_directions, "tracker/http/x.py", "from tracker.state import traces"),
        (import_directions, "tracker/x.py", "from p2pdist.model import digest"),
        (purity, "tracker/core/x.py", "import time"),
        (purity, "p2pdist/core/x.py", "from asyncio import sleep"),
        (purity, "p2pdist/core/x.py", "import os.path"),
        (purity, "p2pdist/model/x.py", "def f(path):\n    return open(path)"),
        (purity, "tracker/core/x.py", "order = sorted(hosts, key=lambda name: hash(name))"),
        (module_size, "p2pdist/core/x.py", "a = 1\n" * 801),
        (module_size, "tests/test_x.py", "a = 1\n" * 801),
        (function_size, "p2pdist/core/x.py", "async def f():\n" + "    a = 1\n" * 60),
        (telling_names, "p2pdist/core/utils.py", ""),
        (telling_names, "tests/common/test_x.py", ""),
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
        (speaks_of_itself, "README.md", "cd /wo" + "rk/main"),
        (speaks_of_itself, "docs/x.md", "see iss" + "ue 12"),
        (speaks_of_itself, "docs/x.md", "from PyPI" + ".org"),
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
        (import_directions, "p2pdist/core/x.py", "from p2pdist.model.digest import Digest\nimport heapq"),
        (import_directions, "p2pdist/cli/verbs/tracker.py", "from tracker.service import Service"),
        (
            import_directions,
            "p2pdist/simulate/x.py",
            "from tracker.core.swarm import Swarm\nfrom p2pdist.core import download",
        ),
        (import_directions, "p2pdist/store/__init__.py", "from .blobs import Blobs"),
        (import_directions, "tracker/service.py", "from tracker.core import swarm\nfrom tracker.state import traces"),
        (purity, "p2pdist/agent/x.py", "import asyncio, time\nprint(hash('a'))"),
        (purity, "p2pdist/core/x.py", "import hashlib\ndigest = hashlib.sha256(b'').hexdigest()"),
        (docstrings, "p2pdist/core/__init__.py", ""),
        (
            docstrings,
            "p2pdist/core/x.py",
            '"""Doc."""\ndef twice(a):\n    return 2 * a\ndef _f(a):\n    a += 1\n    return a',
        ),
        (silence_on_failure, "p2pdist/x.py", "try:\n    f()\nexcept OSError:\n    pass"),
        (links, "README.md", "[a](LICENSE) [b](https://example.org/none) [c](#a-heading)\n## A heading"),
    ],
)
def test_a_rule_lets_good_code_pass(rule: Rule, path: str, text: str) -> None:
    """The rule does not forbid what it need not."""
    assert rule(PurePosixPath(path), text) == []


def test_a_circle_is_found_and_named() -> None:
    """Two modules that import each other are a circle; for type checking only they are not."""
    back = "from p2pdist import a"
    assert cycles({"p2pdist.a": "import p2pdist.b", "p2pdist.b": back}) == ["p2pdist.a -> p2pdist.b -> p2pdist.a"]
    assert cycles({"p2pdist.a": "import p2pdist.b", "p2pdist.b": f"def f():\n    {back}"}) == []
    guarded = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {back}"
    assert cycles({"p2pdist.a": "import p2pdist.b", "p2pdist.b": guarded}) == []


def test_test_modules_have_names_of_their_own() -> None:
    """pytest imports them by their base names alone."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(name for name, count in Counter(names).items() if count > 1) == []
