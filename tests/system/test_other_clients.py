"""qBittorrent and rtorrent beside agents: each fetches a published package by the tracker's
`.torrent` alone, and gives it to an agent that comes when nobody else has it. qBittorrent takes
part by both versions of the protocol, rtorrent by version 1."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_rig import fetch, right, running, torrent_file
from site_rig import Agent, Site, free_pair, until

from p2pdist.model.digest import hex_of, parse_digest

MIB = 1 << 20
PACKAGE = "trainer:v1"
BY_BITTORRENT = 'p2pdist_agent_received_bytes_total{source="bittorrent"}'

SETTINGS = """
[LegalNotice]
Accepted=true
[Network]
PortForwardingEnabled=false
[Preferences]
WebUI\\Enabled=false
[BitTorrent]
Session\\Port={port}
Session\\Interface=lo
Session\\InterfaceAddress=127.0.0.1
Session\\DHTEnabled=false
Session\\LSDEnabled=false
Session\\PeXEnabled=false
Session\\MultiConnectionsPerIp=true
Session\\QueueingSystemEnabled=false
"""


def publish_package(site: Site) -> dict[str, Any]:
    """Push a package with one layer that hardly shrinks; returns the layer."""
    source, layout = site.directory / "trainer", ("--layout", str(site.directory / "layout"))
    source.mkdir()
    (source / "weights.bin").write_bytes(random.Random("weights").randbytes(4 * MIB))
    assert site.command("pack", str(source), "-t", PACKAGE, "--format", "squashfs", *layout)[0] == 0
    code, _, errors = site.command("push", PACKAGE, "--torrent", *layout, "--origin", f"file://{site.layout}")
    assert code == 0, errors
    code, document, errors = site.command("inspect", PACKAGE, "--origin", f"file://{site.layout}")
    assert code == 0, errors
    (layer,) = document["layers"]
    assert isinstance(layer, dict)
    return layer


@contextlib.contextmanager
def qbittorrent(site: Site, digest: str, target: Path) -> Iterator[None]:
    """By the hybrid torrent."""
    program = shutil.which("qbittorrent-nox")
    if program is None:
        pytest.skip("needs qbittorrent-nox")
    profile = site.directory / "profile"
    settings = profile / "qBittorrent" / "config" / "qBittorrent.conf"
    settings.parent.mkdir(parents=True)
    settings.write_text(SETTINGS.format(port=free_pair()))
    torrent = torrent_file(site, f"/v1/blobs/{digest}/torrent", web_seeds=False)
    words = [program, f"--profile={profile}", f"--save-path={target}", "--skip-dialog=true", str(torrent)]
    with running(*words, log=site.directory / "qbittorrent.log"):
        yield


@contextlib.contextmanager
def rtorrent(site: Site, digest: str, target: Path) -> Iterator[None]:
    """By the hybrid torrent, of which it sees what version 1 has: it announces itself under that
    info hash alone."""
    program = shutil.which("rtorrent")
    if program is None:
        pytest.skip("needs rtorrent")
    torrent = torrent_file(site, f"/v1/blobs/{digest}/torrent", web_seeds=False)
    port = free_pair()
    options = ["system.daemon.set=true", f"directory.default.set={target}", f"session.path.set={target}"]
    options += ["network.bind_address.set=127.0.0.1", f"network.port_range.set={port}-{port}"]
    options += ["dht.mode.set=disable", "protocol.pex.set=no", "trackers.use_udp.set=no"]
    words = [program, "-n", *(word for option in options for word in ("-o", option)), str(torrent)]
    with running(*words, log=site.directory / "rtorrent.log"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("client", [qbittorrent, rtorrent], ids=["qbittorrent", "rtorrent"])
def test_a_client_fetches_a_package_and_gives_it_to_an_agent_that_comes_later(site: Site, client: Any) -> None:
    layer = publish_package(site)
    digest, size = layer["digest"], layer["size"]
    agents = site.agents(2)
    for agent in agents:
        agent.pull(package=PACKAGE)
    fetch(site, f"/v1/blobs/{digest}/torrent")  # the tracker has kept what is small
    read = site.origin_bytes(digest)
    target = site.directory / "client"
    target.mkdir()
    file = target / hex_of(parse_digest(digest))
    with client(site, digest, target):
        until(lambda: file.exists() and file.stat().st_size == size and right(file, digest))
        assert site.origin_bytes(digest) == read
        site.origin.stop()
        for agent in agents:
            assert agent.stop() == 0
        late = Agent(site, "late", transport="swarm").start()
        assert late.pull(package=PACKAGE).state == "done"
        assert late.metric(BY_BITTORRENT) == size
