"""Real BitTorrent clients against the tracker: aria2 and libtorrent as processes on loopback, an
agent as their web seed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from ports import free_port
from torrent_rig import TorrentSite, content, running, torrent_site
from waits import until

from p2pdist.model.digest import Digest, digest_of, hex_of
from p2pdist.model.manifest import parse_reference

PIECE = 64 << 10
SEED = str(Path(__file__).with_name("seed_torrent.py"))
needs_aria2 = pytest.mark.skipif(shutil.which("aria2c") is None, reason="needs aria2c")


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[TorrentSite]:
    async with torrent_site(tmp_path) as found:
        yield found


async def aria2(site: TorrentSite, path: str) -> Path:
    """Let aria2 fetch the torrent from the tracker, and then what it names; returns the folder with
    it."""
    target = site.directory / "aria2"
    words = [
        *("aria2c", "--no-conf", "--seed-time=0", "--file-allocation=none", f"--dir={target}", "--bt-stop-timeout=25"),
        *("--enable-dht=false", "--enable-dht6=false", "--bt-enable-lpd=false", "--enable-peer-exchange=false"),
        *(f"--listen-port={free_port()}", "--follow-torrent=mem"),
        *("--log-level=info", f"--log={site.directory}/aria2.log"),
    ]
    output = site.directory / "aria2.out"
    async with running(*words, site.url + path, output=output) as process:
        await until(lambda: process.returncode is not None)
        assert process.returncode == 0, output.read_text()[-3000:]
    return target


@asynccontextmanager
async def client(site: TorrentSite, path: str, directory: Path) -> AsyncIterator[Path]:
    """A libtorrent client takes part in the torrent at `path`, with what is in `directory`, until
    the context ends. Yields its log."""
    file, log = site.directory / f"{directory.name}.torrent", site.directory / f"{directory.name}.log"
    file.write_bytes(await site.get(path))
    async with running(sys.executable, SEED, str(file), str(directory), output=log):
        yield log


def answers(log: Path) -> int:
    """How many of its announces a client knows to be answered. One that ends earlier says no
    goodbye."""
    return log.read_text().count("received peers")


def holds(path: Path, digest: Digest) -> bool:
    """Whether a file has this content. A client writes late."""
    return path.is_file() and digest_of(path.read_bytes()) == digest


def peers(site: TorrentSite, *, seeds: bool) -> int:
    """Those known by version 1, of all torrents."""
    return sum(torrent.count(torrent.hashes[0], seeds=seeds) for torrent in site.service.announces._torrents.values())


def seeds_by_hash(site: TorrentSite) -> list[int]:
    """Those of the hybrid torrent."""
    (torrent,) = [each for each in site.service.announces._torrents.values() if len(each.hashes) == 2]
    return [torrent.count(found, seeds=True) for found in torrent.hashes]


@pytest.mark.slow
@needs_aria2
async def test_aria2_downloads_from_a_seed_that_it_knows_from_here(site: TorrentSite, tmp_path: Path) -> None:
    data = content(20 * PIECE + 77)
    digest = await site.publish(data)
    (tmp_path / "seed").mkdir()
    (tmp_path / "seed" / "weights.bin").write_bytes(data)
    path = f"/v1/blobs/{digest}/torrent?version=1"
    async with client(site, path, tmp_path / "seed") as log:
        await until(lambda: peers(site, seeds=True) and answers(log))
        found = (await aria2(site, path)) / "weights.bin"
    assert digest_of(found.read_bytes()) == digest
    await until(lambda: site.service.announces.peers == 0)  # both said goodbye


async def test_libtorrent_downloads_a_hybrid_torrent(site: TorrentSite, tmp_path: Path) -> None:
    """It announces itself under both info hashes, and is one peer."""
    data = content(20 * PIECE + 77)
    digest = await site.publish(data)
    for name in ("seed", "leech"):
        (tmp_path / name).mkdir()
    (tmp_path / "seed" / "weights.bin").write_bytes(data)
    path = f"/v1/blobs/{digest}/torrent"
    async with client(site, path, tmp_path / "seed") as seed:
        await until(lambda: peers(site, seeds=True) and answers(seed) == 2)
        async with client(site, path, tmp_path / "leech") as log:
            await until(lambda: seeds_by_hash(site) == [2, 2] and not peers(site, seeds=False))
            assert site.service.announces.peers == 2
            await until(lambda: holds(tmp_path / "leech" / "weights.bin", digest))
            await until(lambda: answers(log) == 4)  # that it begins and that it has all, by each hash
        await until(lambda: site.service.announces.peers == 1)
    await until(lambda: site.service.announces.peers == 0)


async def test_libtorrent_downloads_a_package(site: TorrentSite, tmp_path: Path) -> None:
    """Several files, with padding between them; what arrives is the `blobs` folder of an image
    layout."""
    blobs = [content(3 * PIECE + 1, 1), content(PIECE, 2), content(10, 3)]
    await site.publish_package(parse_reference("team/trainer:v3"), blobs)
    names = [f"sha256/{hex_of(digest_of(data))}" for data in blobs]
    for name in ("seed", "leech"):
        (tmp_path / name / "sha256").mkdir(parents=True)
    for name, data in zip(names, blobs, strict=True):
        (tmp_path / "seed" / name).write_bytes(data)
    path = "/v1/packages/team/trainer:v3/torrent"
    async with client(site, path, tmp_path / "seed"):
        await until(lambda: peers(site, seeds=True))
        async with client(site, path, tmp_path / "leech"):
            await until(lambda: peers(site, seeds=True) == 2)
            for name, data in zip(names, blobs, strict=True):
                await until(lambda: holds(tmp_path / "leech" / name, digest_of(data)))  # noqa: B023 - here and now


@pytest.mark.slow
@needs_aria2
@pytest.mark.parametrize("version", [1, 2])
async def test_aria2_downloads_from_an_agent_as_a_web_seed(site: TorrentSite, tmp_path: Path, version: int) -> None:
    data = content(20 * PIECE + 77)
    digest = await site.publish(data)
    port = free_port()
    words = [sys.executable, "-m", "p2pdist.cli.main", "agent", "--tracker", site.url, "--name", "h1"]
    words += [
        "--listen",
        f"127.0.0.1:{port}",
        "--store",
        str(tmp_path / "store"),
        "--socket",
        str(tmp_path / "h1.sock"),
    ]
    async with running(*words, output=tmp_path / "agent.log"):
        await until(lambda: "h1" in site.service.fleet.hosts)
        async with site.http.get(f"http://127.0.0.1:{port}/v1/blobs/{digest}") as answer:
            assert digest_of(await answer.read()) == digest
        await until(lambda: seeds(site, digest))
        (tmp_path / "origin" / "blobs" / "sha256" / hex_of(digest)).unlink()  # nobody else has it now
        found = (await aria2(site, f"/v1/blobs/{digest}/torrent?version={version}")) / "weights.bin"
    assert digest_of(found.read_bytes()) == digest


def seeds(site: TorrentSite, digest: Digest) -> int:
    swarm = site.service.fleet.swarms.get(digest)
    return sum(member.seed for member in swarm.members.values()) if swarm is not None else 0
