"""Container images: what a registry that is not ours names by repository and tag or digest (OCI
distribution specification 1.1), and how this project writes their names.

An **upstream** is such a registry, by the host that references name it by: `docker.io`,
`registry.example:5000`. An image is written as `docker://UPSTREAM/REPOSITORY:TAG` or
`docker://UPSTREAM/REPOSITORY@sha256:...`, as skopeo does; policies and tokens match its name
without the scheme, `UPSTREAM/REPOSITORY`. A reference may have both a tag and a digest: then the
digest says which image it is, and the tag how users call it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from p2pdist.model.digest import Digest, is_digest
from p2pdist.model.errors import UsageError
from p2pdist.model.hub import is_hub, parse_hub
from p2pdist.model.manifest import Reference, parse_reference

SCHEME = "docker://"
NAME_CHARACTERS_MAX = 255
REFERENCE_CHARACTERS_MAX = 1024
DOCKER_HUB = "docker.io"
MIRROR_PORT = 7073
"""Where an agent's mirror listens on loopback unless it is told another port."""

_DOCKER_HUB_NAMES = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})

_UPSTREAM = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?\Z")
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*\Z")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")


@dataclass(frozen=True, slots=True)
class ImageName:
    """A repository at an upstream. Made by `image_name`, which checks both."""

    upstream: str
    repository: str

    def __str__(self) -> str:
        return f"{self.upstream}/{self.repository}"


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image: its name, and a tag, the digest of a manifest or index, or both."""

    name: ImageName
    tag: str = ""
    digest: Digest | None = None

    @property
    def target(self) -> str:
        """What stands last in the path of a request for its manifest."""
        return self.digest or self.tag

    @property
    def package(self) -> Reference:
        """The image as policies, rights and preseeds see it: a package of its name."""
        return Reference(str(self.name), "" if self.digest else self.tag, self.digest)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{SCHEME}{self.name}{tag}@{self.digest}" if self.digest else f"{SCHEME}{self.name}{tag}"


def image_name(upstream: str, repository: str) -> ImageName:
    """Raises UsageError for what no registry and no repository can be called."""
    if not _UPSTREAM.match(upstream) or len(upstream) > NAME_CHARACTERS_MAX:
        raise UsageError(f"{upstream[:100]!r} is not the name of a registry")
    if not _REPOSITORY.match(repository) or len(repository) > NAME_CHARACTERS_MAX:
        raise UsageError(
            f"{repository[:100]!r} is not the name of a repository", remedy="Write docker://REGISTRY/NAME:TAG"
        )
    return ImageName(upstream.lower(), repository)


def path_of_upstream(upstream: str) -> str:
    """An upstream as the first part of a repository's path at a mirror, where references allow no
    colon: a port stands behind two underscores, which no name of a host holds."""
    host, colon, port = upstream.rpartition(":")
    return f"{host}__{port}" if colon and port.isdecimal() else upstream


def is_tag(text: str) -> bool:
    """Whether a registry takes `text` for a tag."""
    return _TAG.match(text) is not None


def is_image(text: str) -> bool:
    """Whether a reference names an image, and not a package of ours."""
    return text.startswith(SCHEME)


def parse_image(text: str) -> ImageReference:
    """The image that `docker://...` names: as Docker does, without a registry it is one of Docker
    Hub, without a tag and digest it is `latest`. Raises UsageError."""
    rest = text.removeprefix(SCHEME)
    if len(rest) > REFERENCE_CHARACTERS_MAX:
        raise UsageError(f"{text[:100]!r}... has {len(text)} characters, and names no image")
    rest, at, digest = rest.partition("@")
    host, slash, path = rest.partition("/")
    if not slash or not ("." in host or ":" in host or host == "localhost"):
        host, path = DOCKER_HUB, rest if slash else f"library/{rest}"
    elif host in _DOCKER_HUB_NAMES:
        host, path = DOCKER_HUB, path if "/" in path else f"library/{path}"
    head, colon, last = path.rpartition(":")
    tagged = bool(colon) and "/" not in last
    repository, tag = (head, last) if tagged else (path, "")
    if at and not is_digest(digest):
        raise UsageError(f"{text[:200]!r} ends in something that is not a digest", remedy="sha256: and 64 hex digits")
    if tagged and not is_tag(tag):
        raise UsageError(f"{text[:200]!r} has a tag that no registry takes")
    known = Digest(digest) if digest else None
    return ImageReference(image_name(host, repository), tag or ("" if known else "latest"), known)


def package_reference(text: str) -> Reference:
    """What a reference names for policies and rights: a package, or an image or a repository of a
    hub as one. Raises UsageError."""
    if is_hub(text):
        return parse_hub(text).package
    return parse_image(text).package if is_image(text) else parse_reference(text)


def canonical_reference(text: str) -> str:
    """A reference to a package, an image or a repository of a hub in its full form. Raises
    UsageError."""
    if is_hub(text):
        return str(parse_hub(text))
    return str(parse_image(text)) if is_image(text) else str(parse_reference(text))
