"""What a request to a hub asks for, read from its path.

Clients put whatever they are given as HF_ENDPOINT before their paths, which are those of the hub:
`/api/models/ORG/NAME/tree/REVISION`, `/ORG/NAME/resolve/REVISION/PATH`, and with `datasets/` or
`spaces/` before the name for other kinds. A name may have one part or two. A revision is one part
of the path, with its slashes encoded. A path is split as it was sent: a slash that is encoded
elsewhere is part of no name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

from p2pdist.model.errors import NotFound, UsageError
from p2pdist.model.hub import KINDS, MAIN, HubName, check_path, check_revision, hub_name

PREFIX = "/hf"
PATH_CHARACTERS_MAX = 8192

Wanted = Literal["info", "tree", "paths-info", "refs", "auth-check", "file", "raw"]
WANTED: tuple[Wanted, ...] = ("info", "tree", "paths-info", "refs", "auth-check", "file", "raw")

_WITH_REVISION: dict[str, Wanted] = {"revision": "info", "tree": "tree", "paths-info": "paths-info"}
_FILES: dict[str, Wanted] = {"resolve": "file", "raw": "raw"}
_PLAIN: dict[str, Wanted] = {"refs": "refs", "auth-check": "auth-check"}


@dataclass(frozen=True, slots=True)
class HubRequest:
    """What a request asks for; raw: a file as git keeps it. `path` is that of a file, or of the
    directory that a tree lists, "" for all of it."""

    wanted: Wanted
    name: HubName
    revision: str = MAIN
    path: str = ""


def parse_request(raw_path: str) -> HubRequest:
    """What the path of a request, percent-encoded as it was sent and without PREFIX, asks for.
    Raises UsageError for names that nothing can have, NotFound for what is not served here."""
    if len(raw_path) > PATH_CHARACTERS_MAX:
        raise UsageError(f"a path of {len(raw_path)} characters names nothing")
    parts = raw_path.strip("/").split("/")
    found = _api(parts[1], parts[2:]) if parts[0] == "api" and len(parts) > 2 else _file(parts)
    if found is None:
        raise NotFound("that is not served here: this door gives models, data sets and spaces, and takes nothing")
    return found


def _api(kind: str, parts: list[str]) -> HubRequest | None:
    if kind not in KINDS:
        return None
    for length in (1, 2):
        name, rest = "/".join(parts[:length]), parts[length:]
        if not rest and length == len(parts):
            return HubRequest("info", hub_name(kind, _plain(name)))
        if not rest:
            continue
        if rest[0] in _PLAIN and len(rest) == 1:
            return HubRequest(_PLAIN[rest[0]], hub_name(kind, _plain(name)))
        if rest[0] in _WITH_REVISION and len(rest) > 1:
            wanted, path = _WITH_REVISION[rest[0]], "/".join(map(_segment, rest[2:]))
            if path and wanted != "tree":
                return None
            return HubRequest(
                wanted, hub_name(kind, _plain(name)), _revision(rest[1]), check_path(path) if path else ""
            )
    return None


def _file(parts: list[str]) -> HubRequest | None:
    kind, rest = (parts[0], parts[1:]) if parts[0] in KINDS and parts[0] != "models" else ("models", parts)
    for length in (1, 2):
        if len(rest) > length + 2 and rest[length] in _FILES:
            path = check_path("/".join(map(_segment, rest[length + 2 :])))
            name = hub_name(kind, _plain("/".join(rest[:length])))
            return HubRequest(_FILES[rest[length]], name, _revision(rest[length + 1]), path)
    return None


def _plain(name: str) -> str:
    if "%" in name:
        raise UsageError(f"{name[:100]!r} is not the name of a repository of a hub")
    return name


def _revision(part: str) -> str:
    return check_revision(unquote(part, errors="surrogateescape"))


def _segment(part: str) -> str:
    """One part of a file's path."""
    text = unquote(part, errors="surrogateescape")
    if "/" in text:
        raise UsageError("the path has slashes in disguise")
    return text
