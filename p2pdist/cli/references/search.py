"""What a user means by part of a reference: the package of a digest, the packages that a pattern
matches, and the name that was nearly typed.

The names come from where this user can look: the store of this host's agent, the local layout and
the origin that is named. A tracker is not asked: it says of each package only to those that may
read it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from p2pdist.cli import output
from p2pdist.cli.services import BLOB_PREFIX, TORRENT_PREFIX
from p2pdist.model.digest import is_digest
from p2pdist.model.errors import NotFound, P2PDistError, UsageError
from p2pdist.model.image import SCHEME, is_image

if TYPE_CHECKING:
    from p2pdist.agent.api.client import LocalClient

MATCHES_MAX = 1000
"""A pattern that matches more packages than this is refused."""

HEX_DIGITS_MIN = 12
"""So many digits of a digest are printed, and name a package."""

_DIGEST = re.compile(rf"sha256:[0-9a-f]{{{HEX_DIGITS_MIN},64}}\Z")
_PATTERN = re.compile(r"[*?\[]")
_ADDRESS = re.compile(rf"\A{re.escape(SCHEME)}\[[0-9A-Fa-f:.]+\]")
"""A registry by its IPv6 address: these brackets are no pattern."""


@dataclass(frozen=True, slots=True)
class Named:
    """A package by the name under which it was found. `reference` has a tag, or names a digest
    where the agent was asked for it by digest alone."""

    reference: str
    digest: str

    @property
    def is_blob(self) -> bool:
        """Whether it is a single file."""
        return self.reference.startswith(BLOB_PREFIX)

    @property
    def fixed(self) -> str:
        """The reference by digest, which stays the same when the tag moves."""
        if self.is_blob:
            return self.reference
        name = self.reference.partition("@")[0] if "@" in self.reference else self.reference.rpartition(":")[0]
        return f"{name}@{self.digest}"


def is_part(text: str) -> bool:
    """Whether a word names packages by a digest alone or by a pattern, and has to be looked up."""
    return bool(_DIGEST.match(text)) or _is_pattern(text)


def _is_pattern(text: str) -> bool:
    return bool(_PATTERN.search(_ADDRESS.sub("", text)))


def chosen(words: Sequence[str], client: LocalClient, layout: Path, origin: str | None) -> list[str]:
    """References of packages, in the order of `words`, each once: words that are references as they
    are; for `sha256:` and at least HEX_DIGITS_MIN digits the package with that digest; for a
    pattern (`*`, `?`, `[]`) all that it matches. Raises NotFound where a word matches nothing,
    UsageError where it is ambiguous, and what asking agent and origin raises."""
    references: dict[str, None] = {}
    known, places = list[Named](), ""
    if any(map(is_part, words)):
        import asyncio  # most words are references, and a start of many pulls waits for no module

        output.silence_event_loop()
        known, places = asyncio.run(_known(client, layout, origin))
    for word in words:
        found = [word] if not is_part(word) else _matching(word, known, places)
        references.update(dict.fromkeys(found))
    return list(references)


def here(words: Sequence[str], client: LocalClient) -> list[str]:
    """References and digests of what is on this host, in the order of `words`, each once: words
    that are references or whole digests as they are, else what patterns and first digits mean in
    the agent's store. Raises what `chosen` raises."""
    found: dict[str, None] = {}
    known: list[Named] = []
    if any(is_part(word) and not is_digest(word) for word in words):
        known = [Named(str(package["reference"]), str(package["digest"])) for package in client.packages()]
    for word in words:
        if not is_part(word) or is_digest(word):
            found[word] = None
            continue
        if _is_pattern(word):
            found.update(dict.fromkeys(_matching(word, known, "on this host")))
            continue
        matching = {one.digest: one.reference for one in reversed(known) if one.digest.startswith(word)}
        if len(matching) > 1:
            raise UsageError(f"{word} begins {len(matching)} digests", remedy="Write more of its digits")
        if not matching:
            raise NotFound(f"nothing on this host has the digest {word}", remedy="p2pdist ls says what is there")
        found.update(dict.fromkeys(matching.values()))
    return list(found)


async def _known(client: LocalClient, layout: Path, origin: str | None) -> tuple[list[Named], str]:
    """All names, those of the origin first since they are what an agent can bring, and the places
    that were asked."""
    import asyncio

    from p2pdist.cli.services import opened_layout, opened_origin

    names: list[Named] = []
    places = [f"on this host, in {layout}"]
    async with opened_origin(origin) as central, opened_layout(layout) as local:
        if central is not None:
            names += [Named(name, described.digest) for name, described in await central.tags()]
            places.append(f"at {central.url}")
        with contextlib.suppress(NotFound):  # nothing was packed yet
            names += [Named(name, described.digest) for name, described in await local.tags()]
    packages = await asyncio.to_thread(client.packages)
    names += [Named(str(package["reference"]), str(package["digest"])) for package in packages]
    packages_only = [
        name for name in names if not is_image(name.reference) and not name.reference.startswith(TORRENT_PREFIX)
    ]
    return packages_only, " or ".join(places)


def _matching(word: str, known: Sequence[Named], places: str) -> list[str]:
    """The references that a pattern or a digest means."""
    import fnmatch

    if is_image(word):
        raise UsageError(f"{word} is a pattern, and registries are not searched", remedy="Name each image")
    if not _DIGEST.match(word):
        found = [
            one.reference for one in known if "@" not in one.reference and fnmatch.fnmatchcase(one.reference, word)
        ]
        found = sorted(name for name in set(found) if not name.startswith(BLOB_PREFIX) or word.startswith("blob:"))
        if not found:
            raise _nothing(f"no package matches {word}", places)
        if len(found) > MATCHES_MAX:
            raise UsageError(f"{word} matches {len(found)} packages, over {MATCHES_MAX}", remedy="Write a narrower one")
        return found
    matching = {
        one.digest: one
        for one in reversed(known)
        if one.digest.startswith(word) or one.reference.startswith(word.replace("sha256:", BLOB_PREFIX))
    }
    if not matching:
        raise _nothing(f"no package has the digest {word}", places)
    if len(matching) > 1:
        raise UsageError(f"{word} begins {len(matching)} digests", remedy="Write more of its digits")
    return [one.fixed for one in matching.values()]


def _nothing(what: str, places: str) -> NotFound:
    return NotFound(
        f"{what} {places}", remedy="Name the origin with --origin, or write name@sha256:<hex>; p2pdist ls lists names"
    )


def names_here(client: LocalClient, layout: Path) -> list[str]:
    """The names in the layout and at this host's agent, none where these cannot be asked."""
    import asyncio

    output.silence_event_loop()

    async def work() -> list[str]:
        from p2pdist.cli.services import opened_layout

        try:
            async with opened_layout(layout) as local:
                return [name for name, _ in await local.tags()]
        except P2PDistError:
            return []

    names = asyncio.run(work())
    try:
        return names + [str(package["reference"]) for package in client.packages()]
    except P2PDistError:
        return names
