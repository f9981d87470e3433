"""Whole processes: packages of trees, their second version, and selections of packs."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest
from site_rig import Agent, Site

from p2pdist.model.errors import Corrupt

KIB = 1 << 10
MIB = 1 << 20
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


class Source:
    """A directory to pack, in one layout."""

    def __init__(self, site: Site) -> None:
        self.site, self.path = site, site.directory / "source"
        self.path.mkdir()

    def write(self, name: str, data: bytes) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def publish(self, reference: str, *more: str) -> int:
        """Pack and push; returns the bytes that were sent."""
        layout = ("--layout", str(self.site.directory / "layout"))
        code, _, errors = self.site.command("pack", str(self.path), "-t", reference, "--format", "tree", *layout, *more)
        assert code == 0, errors
        code, pushed, errors = self.site.command("push", reference, "--origin", f"file://{self.site.layout}", *layout)
        assert code == 0, errors
        return int(pushed["bytes_sent"])


@pytest.fixture
def source(site: Site) -> Source:
    source, drawn = Source(site), random.Random(1)
    for number in range(400):
        source.write(f"lib/package{number % 7}/module{number}.py", b"x = %d\n" % number * drawn.randrange(1, 900))
    source.write("weights.bin", drawn.randbytes(12 * MIB))
    source.write("empty", b"")
    os.link(source.path / "empty", source.path / "also-empty")
    os.symlink("../nowhere", source.path / "lib/dangling")
    return source


def compare(shown: Path, source: Path) -> None:
    found = subprocess.run(["diff", "-r", "--no-dereference", str(source), str(shown)], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def shown(agent: Agent, reference: str, source: Path, *options: str) -> str:
    """Mount a package, compare it with its source, unmount it; returns how it was shown."""
    target = agent.site.directory / f"mount-{agent.name}"
    site = agent.site
    code, status, errors = site.command("mount", reference, str(target), "--socket", str(agent.socket), *options)
    assert code == 0, errors
    try:
        compare(target, source)
    finally:
        assert site.command("umount", str(target), "--socket", str(agent.socket))[0] == 0
    return str(status["how"])


@pytest.mark.slow
def test_every_way_can_be_forced(site: Site, source: Source, tmp_path: Path) -> None:
    """And one that does not work here, or is none, is refused with what to do."""
    source.publish("app:v1")
    (agent,) = site.agents(1)
    for how, came in (("overlay", "erofs"), ("erofs", "erofs"), ("hardlink", "hardlink"), ("copy", "copy")):
        assert shown(agent, "app:v1", source.path, "--how", how) == came
    assert shown(agent, "app:v1", source.path, "--how", "unpack") in ("reflink", "copy")
    where = ("mount", "app:v1", str(tmp_path / "view"), "--socket", str(agent.socket), "--how")
    code, _, errors = site.command(*where, "hardlink", "--writable")
    assert code == 1 and "may be written to" in errors
    assert site.command(*where, "nonsense")[0] == 2


@pytest.mark.slow
def test_a_tree_and_its_second_version_reach_every_agent(site: Site, source: Source) -> None:
    source.publish("app:v1")
    agents = site.agents(4)
    for pull in [agent.start_pull(package="app:v1") for agent in agents]:
        pull.result()
    total = sum(site.origin.sent.values())
    size = sum(path.stat().st_size for path in site.layout.glob("blobs/sha256/*"))
    assert total <= 1.05 * size + 64 * KIB
    assert {shown(agent, "app:v1", source.path) for agent in agents} == {"erofs"}

    source.write("lib/package3/module3.py", b"changed\n" * 2000)
    with (source.path / "weights.bin").open("r+b") as weights:
        weights.seek(5 * MIB)
        weights.write(b"changed")
    sent = source.publish("app:v2")
    assert sent < 16_000 + 2 * 512 * KIB + 128 * KIB
    pulls = [agent.start_pull(package="app:v2") for agent in agents]
    moved = [status.bytes_origin + status.bytes_peers for status in (pull.result() for pull in pulls)]
    assert max(moved) <= sent
    layout = ("--layout", str(site.directory / "layout"))
    code, told, _ = site.command("diff", "app:v1", "app:v2", *layout)
    assert (code, told["added"], told["removed"]) == (0, [], [])
    assert told["changed"] == ["lib/package3/module3.py", "weights.bin"]
    assert max(moved) == told["bytes_to_move"]
    for agent in agents:
        shown(agent, "app:v2", source.path)
    assert agents[0].pull(package="app:v1").bytes_peers == 0  # the first version is still here


@pytest.mark.slow
def test_of_a_pack_of_which_little_is_lacking_only_that_is_moved(site: Site, source: Source) -> None:
    """The second version was packed by somebody who did not know of the first: hosts that have that
    lack little of its packs."""
    source.publish("app:v1")
    late, early = site.agents(2)
    early.pull(package="app:v1")
    source.write("new.bin", (source.path / "weights.bin").read_bytes()[: 8 * MIB] + random.Random(3).randbytes(3 * MIB))
    # Packed where nothing is known of the first version, so that all of it is in new packs.
    layout = ("--layout", str(site.directory / "fresh"))
    assert site.command("pack", str(source.path), "-t", "app:v2", "--format", "tree", *layout)[0] == 0
    assert site.command("push", "app:v2", "--origin", f"file://{site.layout}", *layout)[0] == 0
    status = early.pull(package="app:v2")
    assert status.bytes_origin + status.bytes_peers < 6 * MIB
    assert status.bytes_total == status.bytes_cached + status.bytes_origin + status.bytes_peers
    shown(early, "app:v2", source.path)
    # A second host with the same lack gets the same selection from the first one.
    late.pull(package="app:v1")
    read = sum(site.origin.sent.values())
    status = late.pull(package="app:v2")
    assert status.bytes_origin == 0 and 0 < status.bytes_peers < 6 * MIB
    assert sum(site.origin.sent.values()) - read < 64 * KIB
    shown(late, "app:v2", source.path)


@pytest.mark.slow
def test_a_killed_agent_goes_on_with_a_tree(site: Site, source: Source) -> None:
    source.publish("app:v1")
    site.origin.rate_bytes_s = 4 * MIB
    agent = Agent(site, "h0").start()
    pull = agent.start_pull(package="app:v1")
    deadline = time.monotonic() + 30
    while agent.received() < 5 * MIB and time.monotonic() < deadline:
        time.sleep(0.02)
    agent.kill()
    with pytest.raises(Exception, match=r"agent|pull"):
        pull.result()
    agent.start()
    status = agent.pull(package="app:v1")
    assert status.bytes_origin + status.bytes_peers < 10 * MIB
    shown(agent, "app:v1", source.path)
    agent.kill()
    agent.start()
    assert agent.pull(package="app:v1").bytes_origin == 0
    shown(agent, "app:v1", source.path)


@pytest.mark.slow
def test_a_catalog_that_lies_shows_nothing(site: Site, source: Source) -> None:
    """A pack that does not hold what its catalog says, although every piece of it verifies."""
    from p2pdist.model.catalog import Catalog, decode_catalog, encode_catalog
    from p2pdist.model.digest import digest_of
    from p2pdist.model.manifest import CATALOG_TYPE, decode_manifest, encode_manifest
    from p2pdist.package.repository.contract import read_content

    source.publish("app:v1")
    code, found, _ = site.command(
        "inspect", "app:v1", "--origin", f"file://{site.layout}", "--layout", str(site.layout)
    )
    assert code == 0
    blobs = site.layout / "blobs/sha256"
    manifest = decode_manifest((blobs / found["digest"][7:]).read_bytes())
    (catalog,) = [part for part in manifest.parts if part.media_type == CATALOG_TYPE]
    plain = decode_catalog((blobs / catalog.digest[7:]).read_bytes())
    (pack,) = plain.packs
    records = bytearray(pack.records)
    records[:32], records[40:72] = records[40:72], records[:32]  # two chunks have changed their places
    lying = encode_catalog(
        Catalog(plain.pages, plain.chunk_lists, (type(pack)(pack.digest, pack.size, bytes(records)),))
    )
    file = site.directory / "lying"
    file.write_bytes(lying)
    content = read_content(file)
    for data in (lying, content.pieces.encode()):
        (blobs / digest_of(data)[7:]).write_bytes(data)
    parts = tuple(part for part in manifest.parts if part is not catalog)
    lists = tuple(item for item in manifest.piece_lists if item.digest != catalog.pieces_digest)
    body = encode_manifest(
        type(manifest)(
            manifest.config,
            manifest.layers,
            (*lists, content.pieces_descriptor()),
            (*parts, content.descriptor(CATALOG_TYPE)),
        )
    )
    (blobs / digest_of(body)[7:]).write_bytes(body)
    (agent,) = site.agents(1)
    with pytest.raises(Corrupt, match=pack.digest):
        agent.pull(package=f"app@{digest_of(body)}")
    code, document, _ = site.command(
        "mount", f"app@{digest_of(body)}", str(site.directory / "m"), "--socket", str(agent.socket)
    )
    assert code == 6 and document["type"].endswith(":corrupt")
    assert not (site.directory / "m").exists()
    agent.pull(package="app:v1")
    shown(agent, "app:v1", source.path)
