"""What a request to a registry asks for, read from its path and its `ns` (OCI distribution
specification 1.1, and what clients of mirrors add to it).

containerd and its kin keep the repository in the path and name the upstream as `?ns=HOST`. Clients
of containers/image (podman, skopeo, buildah, CRI-O) know no `ns`: the upstream comes first in the
path, with `__` before its port, as no colon may stand there (`registry.example__5000`). The Docker
daemon sends neither, and means Docker Hub. A path is compared as it was sent: a
slash or a dot that is written in another way than as itself is part of no name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

from p2pdist.gateway.registry.failures import RegistryFailure
from p2pdist.model.digest import is_digest
from p2pdist.model.errors import UsageError
from p2pdist.model.image import DOCKER_HUB, ImageName, image_name, is_tag

PATH_CHARACTERS_MAX = 2048
PREFIX = "/v2/"

Kind = Literal["manifest", "blob", "tags", "referrers"]

_KINDS: dict[str, Kind] = {"manifests": "manifest", "blobs": "blob", "referrers": "referrers"}
_HUB_HOSTS = frozenset(["index.docker.io", "registry-1.docker.io", "registry.hub.docker.com"])
"""Other hosts of Docker Hub, by which some clients name it."""

_HIDDEN = re.compile(r"%(?:2[eEfF]|5[cC]|0|1|7[fF])")
"""Slashes, dots, backslashes and control characters in disguise."""


_PORT = re.compile(r"([^_]+)__([0-9]{1,5})\Z")
_HOST = re.compile(r"[.:]|\Alocalhost\Z")
"""Where the first part of a path is a host, as Docker tells it."""


@dataclass(frozen=True, slots=True)
class RegistryRequest:
    """What a request asks for. `target`: the tag or digest of a manifest, the digest of a blob or
    of what referrers refer to; "" for tags."""

    kind: Kind
    name: ImageName
    target: str = ""


def parse_request(raw_path: str, namespaces: Sequence[str], upstreams: Collection[str]) -> RegistryRequest:
    """What the path of a request below /v2/, percent-encoded as it was sent, and the values of its
    `ns` ask for. `upstreams` are names of known upstreams, which may stand first in a path without
    looking like hosts. Raises RegistryFailure."""
    if len(raw_path) > PATH_CHARACTERS_MAX:
        raise RegistryFailure(400, "NAME_INVALID", f"a path of {len(raw_path)} characters names no image")
    if _HIDDEN.search(raw_path):
        raise RegistryFailure(400, "NAME_INVALID", "the path has slashes, dots or control characters in disguise")
    repository, kind, target = _parts(unquote(raw_path, errors="replace").removeprefix(PREFIX))
    name = _name(repository, namespaces, upstreams)
    if kind in ("blob", "referrers") and not is_digest(target):
        raise RegistryFailure(400, "DIGEST_INVALID", f"{target[:100]!r} is no SHA-256 digest")
    if kind == "manifest" and not (is_digest(target) or is_tag(target)):
        code, status = ("DIGEST_INVALID", 400) if ":" in target else ("MANIFEST_UNKNOWN", 404)
        raise RegistryFailure(status, code, f"{target[:100]!r} is neither a tag nor a SHA-256 digest")
    return RegistryRequest(kind, name, target)


def _parts(path: str) -> tuple[str, Kind, str]:
    """Repository, kind and target of a path below /v2/."""
    head, _, target = path.rpartition("/")
    repository, _, word = head.rpartition("/")
    if word == "tags" and target == "list" and repository:
        return repository, "tags", ""
    kind = _KINDS.get(word)
    if kind is None or not repository:
        raise RegistryFailure(404, "UNSUPPORTED", "this mirror serves manifests, blobs, tags and referrers of images")
    return repository, kind, target


def _name(repository: str, namespaces: Sequence[str], upstreams: Collection[str]) -> ImageName:
    if len(namespaces) > 1:
        raise RegistryFailure(400, "NAME_INVALID", "a request names one upstream as ns, not several")
    if namespaces:
        upstream = namespaces[0]
    else:
        first, slash, rest = repository.partition("/")
        first = _PORT.sub(r"\1:\2", first)
        if slash and (first in upstreams or _HOST.search(first)):
            upstream, repository = first, rest
        else:
            upstream = DOCKER_HUB
    if upstream.lower() in _HUB_HOSTS:
        upstream = DOCKER_HUB
    if upstream.lower() == DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    try:
        return image_name(upstream, repository)
    except UsageError as error:
        raise RegistryFailure(400, "NAME_INVALID", error.what) from error
