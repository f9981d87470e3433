"""The files of container runtimes with the mirror, and without it: functions over texts.

What is added to TOML stands between two comments, so that it can be taken away again from a file
that was edited since. JSON has no comments; there the mirror's URL says what is ours.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from p2pdist.model.errors import Conflict, Corrupt
from p2pdist.model.image import path_of_upstream

BEGIN = "# p2pdist mirror: begin. `p2pdist mirror uninstall` takes this away."
END = "# p2pdist mirror: end"
DIAL_TIMEOUT = "1s"
"""How long containerd waits for a mirror that takes no connection, for each blob."""

MIRRORS = "registry-mirrors"
REGISTRY_KEYS = frozenset(["prefix", "location", "insecure", "blocked", "mirror-by-digest-only", "mirror"])
MIRROR_KEYS = frozenset(["location", "insecure", "pull-from-mirror"])

_BLOCK = re.compile(
    rf"^[ \t]*{re.escape(BEGIN)}[ \t]*\r?\n.*?^[ \t]*{re.escape(END)}[ \t]*(?:\r?\n|\Z)(?:[ \t]*\r?\n)?",
    re.MULTILINE | re.DOTALL,
)
"""Editors may have changed the ends of lines, and how far they are indented."""

_TABLE = re.compile(r"^[ \t]*\[", re.MULTILINE)


def without_block(text: str) -> str:
    """A TOML file without what was added to it."""
    return _BLOCK.sub("", text)


def names_mirror(text: str, urls: Iterable[str]) -> bool:
    """Whether a file names one of these mirrors in any way."""
    hosts = {urlsplit(url).netloc for url in urls}
    return any(host in text for host in hosts | {host.replace("127.0.0.1", "localhost") for host in hosts})


def parse_toml(text: str, path: str) -> dict[str, Any]:
    """Raises Corrupt."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise Corrupt(f"{path} is not valid TOML: {error}", remedy="Mend it or move it away, then try again") from error


# -- hosts.toml, of containerd and of Docker with its image store


def with_host(text: str, url: str, path: str, *, dial_timeout: bool) -> str:
    """A hosts.toml in which the mirror at `url` is asked first, and everything else is as in
    `text`; that itself where it names the mirror already. Raises Corrupt, Conflict."""
    before = parse_toml(text, path)
    hosts = before.get("host", {})
    if isinstance(hosts, dict) and url in hosts:
        return text
    lines = [BEGIN, f"[host.{_quoted(url)}]", '  capabilities = ["pull", "resolve"]']
    lines += [f"  dial_timeout = {_quoted(DIAL_TIMEOUT)}"] if dial_timeout else []
    block = "\n".join([*lines, END, ""])
    for match in _TABLE.finditer(text):
        after = f"{text[: match.start()]}{block}\n{text[match.start() :]}"
        if _adds_first(after, before, url):
            return after
    after = f"{_ended(text)}{block}"
    if _adds_first(after, before, url):
        return after
    raise Conflict(
        f"{path} is written in a way to which no mirror can be added",
        remedy=f'Write its hosts as tables of their own, [host."https://..."], or add by hand before the first of them:\n{block}',
    )


def _adds_first(after: str, before: dict[str, Any], url: str) -> bool:
    """Whether a text says what `before` did, and names `url` before all other hosts."""
    try:
        parsed = tomllib.loads(after)
    except (tomllib.TOMLDecodeError, RecursionError):
        return False
    hosts = parsed.pop("host", None)
    if not isinstance(hosts, dict) or next(iter(hosts), None) != url:
        return False
    del hosts[url]
    return hosts == before.get("host", {}) and parsed == {key: before[key] for key in before if key != "host"}


def certificates_of(directory: str, names: Iterable[str]) -> str:
    """The lines of a hosts.toml that go on using the certificates in its directory: what containerd
    reads there by the names alone, it no longer does where there is a hosts.toml."""
    present = sorted(names)
    authorities = [f"{directory}/{name}" for name in present if name.endswith(".crt")]
    pairs = [
        [f"{directory}/{name}", f"{directory}/{name.removesuffix('.cert')}.key"]
        for name in present
        if name.endswith(".cert") and f"{name.removesuffix('.cert')}.key" in present
    ]
    lines = [f"ca = {_value(authorities)}"] if authorities else []
    lines += [f"client = {_value(pairs)}"] if pairs else []
    return "".join(f"{line}\n" for line in lines)


def with_absolute_files(text: str, directory: str, path: str) -> str:
    """A hosts.toml that names the same certificates when it lies elsewhere than in `directory`.
    Raises Corrupt."""
    for name in set(_certificate_files(parse_toml(text, path))):
        if not name.startswith("/"):
            for quote in ('"', "'"):
                text = text.replace(f"{quote}{name}{quote}", f"{quote}{directory}/{name}{quote}")
    return text


def _certificate_files(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _certificate_files(value)
        elif key in ("ca", "client"):
            yield from _strings(value)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for entry in value if isinstance(value, list) else []:
        yield from _strings(entry)


# -- daemon.json, of Docker


def with_registry_mirror(text: str | None, url: str, path: str) -> str:
    """A daemon.json whose first registry mirror is `url`, with all its other settings. Raises
    Corrupt."""
    body, mirrors = _daemon(text, path)
    if url in (mirror.rstrip("/") for mirror in mirrors):
        return text or ""
    return _json(body | {MIRRORS: [url, *mirrors]}, text)


def without_registry_mirror(text: str, urls: Iterable[str], path: str) -> str:
    """A daemon.json without these registry mirrors. Raises Corrupt."""
    body, mirrors = _daemon(text, path)
    gone = set(urls)
    left = [mirror for mirror in mirrors if mirror.rstrip("/") not in gone]
    if left == mirrors:
        return text
    rest = {key: value for key, value in body.items() if key != MIRRORS or left}
    return _json(rest | ({MIRRORS: left} if left else {}), text)


def _daemon(text: str | None, path: str) -> tuple[dict[str, Any], list[str]]:
    try:
        body = json.loads(text) if text and text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{path} is not valid JSON: {error}", remedy="Mend it or move it away, then try again") from error
    mirrors = body.get(MIRRORS, []) if isinstance(body, dict) else None
    if not isinstance(mirrors, list) or not all(isinstance(mirror, str) for mirror in mirrors):
        what = (
            f'"{MIRRORS}" in {path} is not a list of URLs' if isinstance(body, dict) else f"{path} is not a JSON object"
        )
        raise Corrupt(what, remedy="Mend it or move it away, then try again")
    return body, mirrors


def _json(body: dict[str, Any], like: str | None) -> str:
    """As text, indented as `like` is."""
    indent = re.search(r"\n([ \t]+)\S", like or "")
    return json.dumps(body, indent=indent[1] if indent else 2, ensure_ascii=False) + "\n"


# -- registries.conf, of podman, skopeo, buildah and CRI-O


def with_registries(text: str | None, wanted: Mapping[str, tuple[str, dict[str, Any]]], path: str) -> str:
    """A drop-in of registries.conf in which each upstream of `wanted` is asked at a mirror first.
    The values are the mirror's URL, and what other files say of that upstream, which this
    one replaces and so repeats. Raises Corrupt."""
    text = text or ""
    parse_toml(text, path)
    lines = [BEGIN]
    for upstream, (url, known) in wanted.items():
        lines += [
            "[[registry]]",
            f"prefix = {_quoted(upstream)}",
            f"location = {_quoted(known.get('location') or upstream)}",
        ]
        lines += [
            f"{key} = {_value(known[key])}" for key in ("insecure", "blocked", "mirror-by-digest-only") if key in known
        ]
        lines += ["[[registry.mirror]]", f"location = {_quoted(mirror_location(url, upstream))}"]
        lines += ["insecure = true"] if url.startswith("http:") else []
        for mirror in known.get("mirror", []):
            lines += ["[[registry.mirror]]", *(f"{key} = {_value(value)}" for key, value in mirror.items())]
        lines.append("")
    after = _ended(text) + "\n".join([*lines[:-1], END, ""])
    parse_toml(after, path)
    return after


def registry_of(text: str, upstream: str, path: str) -> dict[str, Any] | None:
    """What a registries.conf says of exactly this upstream; None for nothing. Raises Corrupt, and
    Conflict for a setting that is not known here and would be lost."""
    registries = parse_toml(text, path).get("registry", [])
    for registry in registries if isinstance(registries, list) else []:
        if not isinstance(registry, dict) or (registry.get("prefix") or registry.get("location")) != upstream:
            continue
        mirrors = registry.get("mirror", [])
        plain = isinstance(mirrors, list) and all(
            isinstance(mirror, dict) and mirror.keys() <= MIRROR_KEYS and _is_plain(mirror) for mirror in mirrors
        )
        if not plain or not registry.keys() <= REGISTRY_KEYS or not _is_plain(registry, "mirror"):
            raise Conflict(
                f"{path} says more of {upstream} than can be repeated with a mirror",
                remedy="Add the mirror there by hand, as its first [[registry.mirror]]",
            )
        return registry
    return None


def _is_plain(table: Mapping[str, Any], *others: str) -> bool:
    """Whether all values but those of `others` are strings or booleans."""
    return all(isinstance(value, str | bool) for key, value in table.items() if key not in others)


def mirror_location(url: str, upstream: str) -> str:
    """Where images of an upstream are at a mirror, as references name it."""
    return f"{urlsplit(url).netloc.replace('127.0.0.1', 'localhost')}/{path_of_upstream(upstream)}"


def _ended(text: str) -> str:
    """A text whose last line has an end."""
    return text if not text or text.endswith("\n") else f"{text}\n"


def _quoted(text: str) -> str:
    """A TOML string: what JSON escapes, TOML does."""
    return json.dumps(text)


def _value(value: str | bool | Sequence[Any]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _quoted(value) if isinstance(value, str) else f"[{', '.join(_value(entry) for entry in value)}]"
