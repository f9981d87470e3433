"""Whole processes that fetch by BitTorrent: with a tracker, when it dies, and beside other
clients."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_rig import fetch, output, right, running, torrent_file
from site_rig import Agent, Site, free_pair, until

from p2pdist.model.digest import Digest, hex_of, parse_digest
from p2pdist.model.torrent import Torrent, decode_torrent, torrent_reference
from p2pdist.origin.drivers import open_origin
from p2pdist.transfer.torrent.seeds import Seed, TorrentSeeds
from p2pdist.transfer.torrent.session import TorrentSession
from p2pdist.transfer.torrent.settings import TorrentSettings
from p2pdist.transfer.torrent.swarm import Swarm

CLIENT = Path(__file__).parent.parent / "tracker" / "seed_torrent.py"
MIB = 1 << 20
SIZE = 16 * MIB
BY_BITTORRENT = 'p2pdist_agent_received_bytes_total{source="bittorrent"}'
BY_TREES = 'p2pdist_agent_received_bytes_total{source="peer"}'
FROM_ORIGIN = 'p2pdist_agent_received_bytes_total{source="origin"}'


async def torrent_of(site: Site, digest: str) -> Torrent:
    origin = open_origin(site.layout.as_uri())
    try:
        described = await origin.resolve(torrent_reference(parse_digest(digest)))
        return decode_torrent(await origin.read(described.digest))
    finally:
        await origin.close()


@contextlib.contextmanager
def seeding(site: Site, digest: Digest, torrent: Torrent, peers: list[Agent]) -> Iterator[TorrentSession]:
    """A BitTorrent client that has the whole blob, and that knows the agents' addresses."""
    session = TorrentSession(TorrentSettings("127.0.0.1", 0))
    session.start()
    try:
        swarm = Swarm(peers=tuple(("127.0.0.1", peer.port + 1) for peer in peers))
        TorrentSeeds(session).keep([Seed(digest, site.directory / "content", torrent, 0.0, swarm)])
        yield session
    finally:
        assert session.close()


def aria2(*words: str) -> list[str]:
    program = shutil.which("aria2c")
    if program is None:
        pytest.skip("needs aria2c")
    options = ["--no-conf", "--file-allocation=none", "--summary-interval=0", "--disable-ipv6"]
    options += ["--enable-dht=false", "--bt-enable-lpd=false", f"--listen-port={free_pair()}"]
    return [program, *options, *words]


def two_seeds(site: Site) -> tuple[str, list[Agent]]:
    """A blob that two agents have fetched by trees."""
    digest = site.publish(SIZE // 4)
    agents = site.agents(2)
    for agent in agents:
        agent.pull(blob=digest)
    return digest, agents


@pytest.mark.slow
def test_a_swarm_brings_a_blob_to_all_and_the_origin_is_read_about_once(site: Site) -> None:
    """Pieces come from the origin at the holders of leases only, each for its stripe."""
    digest = site.publish(SIZE)
    agents = site.agents(4, transport="swarm")
    pulls = [agent.start_pull(blob=digest, output=str(output(site, agent))) for agent in agents]
    statuses = [pull.result() for pull in pulls]
    assert all(right(output(site, agent), digest) for agent in agents)
    assert all(status.bytes_origin + status.bytes_peers == SIZE for status in statuses)
    # Where a host with a lease gets no processor for long, another one reads its stripe, too; where
    # each reads for itself, they read four copies.
    assert site.origin_bytes(digest) < 2 * SIZE
    assert sum(agent.metric(BY_BITTORRENT) for agent in agents) >= 2 * SIZE
    assert sum(agent.metric(BY_TREES) for agent in agents) == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_an_agent_that_ends_in_the_middle_of_a_swarm_goes_on_where_it_was(site: Site, how: str) -> None:
    """What had verified is kept, and nothing else; a clean stop leaves libtorrent no time to
    hang."""
    digest = site.publish(SIZE)
    site.origin.rate_bytes_s = 4 * MIB
    agents = site.agents(2, transport="swarm")
    pulls = [agent.start_pull(blob=digest, output=str(output(site, agent))) for agent in agents]
    first, second = agents
    until(lambda: first.received() > SIZE / 4)
    before = first.received()
    if how == "killed":
        first.kill()
    else:
        assert first.stop() == 0
    with contextlib.suppress(Exception):  # its agent is gone
        pulls[0].result()
    status = first.start().pull(blob=digest, output=str(output(site, first)))
    assert before <= status.bytes_cached < SIZE
    assert status.bytes_cached + status.bytes_origin + status.bytes_peers == SIZE
    assert pulls[1].result().state == "done"
    assert right(output(site, first), digest) and right(output(site, second), digest)


@pytest.mark.slow
def test_a_late_agent_fetches_from_the_seeds_and_not_from_the_origin(site: Site) -> None:
    digest = site.publish(SIZE // 4)
    first, second = site.agents(2, transport="swarm")
    first.pull(blob=digest)
    read = site.origin_bytes(digest)
    assert second.pull(blob=digest).bytes_peers == SIZE // 4
    assert second.metric(BY_BITTORRENT) == SIZE // 4
    assert site.origin_bytes(digest) == read


@pytest.mark.long
def test_both_transports_in_one_fleet(site: Site) -> None:
    """Those in trees get the pieces of parents that fetch from the swarm; where trees alone bring a
    stripe, the swarm is left for them."""
    digest = site.publish(SIZE)
    agents = [Agent(site, f"h{number}", transport=("swarm", "trees")[number % 2]).start() for number in range(4)]
    pulls = [agent.start_pull(blob=digest, output=str(output(site, agent))) for agent in agents]
    for pull in pulls:
        assert pull.result().state == "done"
    assert all(right(output(site, agent), digest) for agent in agents)
    assert site.origin_bytes(digest) <= 1.1 * SIZE


@pytest.mark.slow
def test_a_blob_without_a_torrent_comes_by_trees_and_the_log_says_so(site: Site) -> None:
    path = site.directory / "content"
    path.write_bytes(b"x" * 3 * MIB)
    words = ("blob", "push", str(path), "--no-torrent", "--origin", f"file://{site.layout}")
    code, pushed, errors = site.command(*words)
    assert (code, pushed["torrent"]) == (0, None), errors
    agents = site.agents(2, transport="swarm")
    pulls = [agent.start_pull(blob=pushed["digest"]) for agent in agents]
    for agent, pull in zip(agents, pulls, strict=True):
        assert pull.result().state == "done"
        assert agent.metric(BY_BITTORRENT) == 0
        assert "has no torrent: it comes by trees" in agent.log.read_text()


@pytest.mark.slow
async def test_without_tracker_and_origin_the_rest_comes_from_a_swarm(site: Site) -> None:
    """Both die in the middle, and one client of another kind has the whole. Nothing comes twice but
    what was under way."""
    digest = site.publish(SIZE)
    torrent = await torrent_of(site, digest)
    site.origin.rate_bytes_s = 4 * MIB
    agents = site.agents(3)
    pulls = [agent.start_pull(blob=digest, output=str(output(site, agent))) for agent in agents]
    until(lambda: all("torrent" in agent.log.read_text() or agent.received() > 0.6 * SIZE for agent in agents))
    site.kill_tracker()
    site.origin.stop()
    before = {agent.name: agent.received() for agent in agents}
    assert max(before.values()) < SIZE, "killed too late"
    with seeding(site, parse_digest(digest), torrent, agents):
        for agent, pull in zip(agents, pulls, strict=True):
            status = pull.result()
            assert status.state == "done"
            assert right(output(site, agent), digest)
            assert agent.received() == SIZE == status.bytes_origin + status.bytes_peers
        assert sum(agent.metric(BY_BITTORRENT) for agent in agents) > 0


@pytest.mark.long
def test_a_tracker_that_comes_back_finds_a_swarm_under_way(site: Site) -> None:
    """Tracker and roots die; hosts are in the swarm when the next tracker comes, and it plans
    around them."""
    digest = site.publish(SIZE)
    site.origin.rate_bytes_s = 2 * MIB
    agents = site.agents(5)
    pulls = {agent: agent.start_pull(blob=digest, output=str(output(site, agent))) for agent in agents}
    until(lambda: all(agent.received() > 0.4 * SIZE for agent in agents))
    site.kill_tracker()
    roots = [agent for agent in agents if agent.metric(FROM_ORIGIN) > 0]
    rest = [agent for agent in agents if agent not in roots]
    for root in roots:
        root.kill()
    until(lambda: any(agent.metric(BY_BITTORRENT) or agent.received() == SIZE for agent in rest))
    site.start_tracker()
    for agent in rest:
        assert pulls[agent].result().state == "done"
        assert right(output(site, agent), digest)
    assert site.origin_bytes(digest) <= 1.3 * SIZE


@pytest.mark.slow
def test_aria2_downloads_with_the_tracker_s_torrent_alone(site: Site) -> None:
    """Agents are its web seeds."""
    digest, _agents = two_seeds(site)
    target = site.directory / "aria2"
    torrent = torrent_file(site, f"/v1/blobs/{digest}/torrent?version=1")
    with running(*aria2("--seed-time=0", f"--dir={target}", str(torrent)), log=site.directory / "aria2.log") as process:
        assert process.wait(60) == 0, (site.directory / "aria2.log").read_text()[-2000:]
    assert right(target / hex_of(parse_digest(digest)), digest)


@pytest.mark.slow
def test_libtorrent_downloads_from_agents_that_start_bittorrent_when_it_knocks(site: Site) -> None:
    """By version 2, without web seeds: it finds the agents by the tracker's announce."""
    digest, agents = two_seeds(site)
    torrent = torrent_file(site, f"/v1/blobs/{digest}/torrent", web_seeds=False)
    target = site.directory / "libtorrent"
    target.mkdir()
    assert not any("BitTorrent listens" in agent.log.read_text() for agent in agents)
    file = target / hex_of(parse_digest(digest))
    with running(sys.executable, str(CLIENT), str(torrent), str(target), log=site.directory / "libtorrent.log"):
        until(lambda: file.exists() and file.stat().st_size == SIZE // 4 and right(file, digest))
    assert any("BitTorrent listens" in agent.log.read_text() for agent in agents)


@pytest.mark.slow
def test_transmission_downloads_from_agents(site: Site) -> None:
    """By version 1: up to 3.00 it does not read hybrid torrents."""
    program = shutil.which("transmission-cli")
    if program is None:
        pytest.skip("needs transmission-cli")
    digest, _agents = two_seeds(site)
    torrent = torrent_file(site, f"/v1/blobs/{digest}/torrent?version=1")
    target = site.directory / "transmission"
    target.mkdir()
    words = [program, "-w", str(target), "-g", str(target / "settings"), "-p", str(free_pair()), "-M", str(torrent)]
    file = target / hex_of(parse_digest(digest))
    with running(*words, log=site.directory / "transmission.log"):
        until(lambda: file.exists() and file.stat().st_size == SIZE // 4 and right(file, digest))


@pytest.mark.slow
def test_an_agent_downloads_from_a_seed_of_version_1_while_the_origin_is_off(site: Site) -> None:
    """Only aria2 has the blob; the tracker has kept what is small."""
    digest = site.publish(SIZE // 8)
    reference = f"blob:{digest.replace(':', '-')}"
    fetch(site, f"/v1/packages?reference={reference}")
    torrent = torrent_file(site, f"/v1/blobs/{digest}/torrent?version=1", web_seeds=False)
    site.origin.stop()
    folder = site.directory / "seed"
    folder.mkdir()
    shutil.copy(site.directory / "content", folder / hex_of(parse_digest(digest)))
    agent = Agent(site, "late", transport="swarm").start()
    with running(*aria2("--seed-ratio=0", "--check-integrity", f"--dir={folder}", str(torrent)), log=folder / "log"):
        assert agent.pull(blob=digest, output=str(output(site, agent))).state == "done"
    assert right(output(site, agent), digest)
    assert agent.metric(BY_BITTORRENT) == SIZE // 8
