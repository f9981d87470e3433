"""BitTorrent clients of others as processes, and the torrents that they are given."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from site_rig import Agent, Site

from p2pdist.model.bencode import decode, encode


def right(file: Path, digest: str) -> bool:
    return "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest() == digest


def output(site: Site, agent: Agent) -> Path:
    return site.directory / f"out-{agent.name}"


@contextlib.contextmanager
def running(*words: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another program, until the context ends."""
    with log.open("wb") as stream:
        process = subprocess.Popen(words, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, cwd=log.parent)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def fetch(site: Site, path: str) -> bytes:
    with urllib.request.urlopen(site.tracker_url + path, timeout=60) as answer:
        return bytes(answer.read())


def torrent_file(site: Site, path: str, *, web_seeds: bool = True) -> Path:
    """A .torrent of the tracker's, in a file; without its web seeds there are only BitTorrent peers
    to fetch from."""
    body = decode(fetch(site, path))
    assert isinstance(body, dict)
    if not web_seeds:
        body.pop(b"url-list", None)
    file = site.directory / "wanted.torrent"
    file.write_bytes(encode(body))
    return file
