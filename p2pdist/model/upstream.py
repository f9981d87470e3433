"""Upstreams: registries that are not ours, by the names under which references know them, and where
they are reached.

Only upstreams that were named to a tracker or an agent are ever asked. `docker.io` is the name of
Docker Hub, which is reached elsewhere; every other one is reached under its own name, unless a URL
says otherwise. Plain HTTP is spoken to this machine itself, and where the URL says so.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdist.model.address import on_this_machine
from p2pdist.model.errors import UsageError
from p2pdist.model.image import DOCKER_HUB, image_name

UPSTREAMS_MAX = 100
TAGS_TTL_S = 30.0
DOCKER_HUB_URL = "https://registry-1.docker.io"

REDIRECTS_MAX = 100

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?\Z")
_URL = re.compile(r"(https?)://((?:[A-Za-z0-9.-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?)/?\Z")


class Upstream(msgspec.Struct, frozen=True, omit_defaults=True):
    """An upstream: the name under which references know it, and the URL of its registry, without
    credentials. `redirects` are hosts and networks of private addresses to which it may send its
    readers."""

    name: Annotated[str, Meta(min_length=1, max_length=255)]
    url: Annotated[str, Meta(min_length=1, max_length=512)]
    redirects: Annotated[tuple[Annotated[str, Meta(max_length=255)], ...], Meta(max_length=100)] = ()


class UpstreamSettings(Upstream, frozen=True, kw_only=True):
    """How an upstream is used. `credentials` is the path of a file in the form of Docker's
    config.json, "" for the user's own. A tag is asked for again after `tags_ttl_s`; with
    `serve_stale` the last known meaning holds while the upstream does not answer. `namespaces`
    are patterns of repositories, as in fnmatch, of which one must match."""

    credentials: str = ""
    tags_ttl_s: float = TAGS_TTL_S
    serve_stale: bool = True
    namespaces: tuple[str, ...] = ("*",)


def parse_upstream(text: str) -> UpstreamSettings:
    """An upstream as the command line names it, NAME or NAME=URL. Raises UsageError."""
    name, _, url = text.strip().partition("=")
    return upstream_of(name.strip(), url.strip())


def upstream_of(name: str, url: str = "", *, insecure: bool = False) -> UpstreamSettings:
    """The upstream `name`, reached at `url`, "" for where its name says. `insecure`: its name
    stands for plain HTTP. Raises UsageError."""
    known = image_name(name.lower(), "library/x").upstream
    if not url and known == DOCKER_HUB:
        url = DOCKER_HUB_URL
    elif not url:
        url = f"{'http' if insecure or on_this_machine(_host_of(known)) else 'https'}://{known}"
    match = _URL.match(url)
    port = match[2].rpartition("]")[2].rpartition(":")[2] if match else ""
    if not match or (port.isdecimal() and not 0 < int(port) < 1 << 16):
        shown = url.rpartition("@")[2][:100]
        raise UsageError(
            f"{shown!r} is not the URL of a registry",
            remedy="Write NAME=https://host:port, without a path; credentials belong in Docker's config.json",
        )
    return UpstreamSettings(known, url.rstrip("/"))


def parse_redirects(listed: Iterable[str]) -> tuple[str, ...]:
    """Hosts, without ports, and networks such as 10.0.0.0/8 to which an upstream may send its
    readers. Raises UsageError."""
    found = tuple(listed)
    if len(found) > REDIRECTS_MAX:
        raise UsageError(f"{len(found)} redirects are listed, more than {REDIRECTS_MAX}")
    for text in found:
        try:
            ipaddress.ip_network(text, strict=False)
        except ValueError:
            if not _HOST.match(text):
                raise UsageError(
                    f"{text[:80]!r} is neither a host nor a network",
                    remedy='Write "storage.internal" or "10.0.0.0/8"',
                ) from None
    return found


def unique(upstreams: tuple[UpstreamSettings, ...]) -> tuple[UpstreamSettings, ...]:
    """The upstreams, of which no two may have one name. Raises UsageError."""
    if len(upstreams) > UPSTREAMS_MAX:
        raise UsageError(f"there are {len(upstreams)} upstreams, more than {UPSTREAMS_MAX}")
    names = [upstream.name for upstream in upstreams]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"the upstream {twice} is named twice", remedy="Name it once, with its URL")
    return upstreams


def _host_of(name: str) -> str:
    """The host of a registry that references name as `name`, without a port and brackets."""
    return name[1 : name.index("]")] if name.startswith("[") else name.partition(":")[0]
