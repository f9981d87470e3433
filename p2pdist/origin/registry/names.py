"""Names of packages as tags of one repository, and its paths and scopes.

A registry's tag names one thing in one repository, and our references have a name besides:
`team/trainer:v3` is the tag `team--trainer---v3`. Names of packages hold no two dashes in a row, so
the tag can be read back. A package of the repository's own last name goes by its plain tag:
`trainer:v3` at `oci://registry/team/trainer` is what other tools call `registry/team/trainer:v3`;
and a tag that other tools made is a package of that name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from yarl import URL

from p2pdist.model.errors import Refused, UsageError
from p2pdist.model.manifest import Reference, parse_reference

TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*\Z")
"""As the distribution specification writes names of repositories."""


@dataclass(frozen=True, slots=True)
class RepositoryNames:
    """The names of one repository at one registry."""

    repository: str
    base: URL
    shown: str
    """The origin's URL, for messages."""

    def tag_of(self, reference: Reference) -> str:
        """The tag of a package. Raises UsageError for names that are too long together."""
        own = self.repository.rpartition("/")[2]
        plain = reference.name in (own, self.repository) and "---" not in reference.tag
        tag = reference.tag if plain else f"{reference.name.replace('/', '--')}---{reference.tag}"
        if not TAG.match(tag):
            raise UsageError(
                f"{reference} is too long for a tag of {self.shown}",
                remedy="Name and tag may have 125 characters together there",
            )
        return tag

    def reference_of(self, tag: str) -> Reference | None:
        """The package that a tag names; None where no reference could name it."""
        name, separator, rest = tag.partition("---")
        own = self.repository.rpartition("/")[2]
        try:
            return parse_reference(f"{name.replace('--', '/')}:{rest}" if separator else f"{own}:{tag}")
        except UsageError:
            return None

    def path(self, rest: str) -> str:
        """Where something of the repository is."""
        return f"/v2/{self.repository}/{rest}"

    def scope(self, actions: str) -> str:
        """What a token must allow."""
        return f"repository:{self.repository}:{actions}"

    def location(self, location: str) -> URL:
        """An address that the registry names, on itself. Raises Refused for another one."""
        url = self.base.join(URL(location, encoded=True))
        if url.origin() != self.base.origin():
            raise Refused(f"{self.shown} sends requests on to {url.origin()}", remedy="Name that registry instead")
        return url
