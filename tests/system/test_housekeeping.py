"""Whole processes: pins, removal, collection, verification."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import programs
import pytest
from site_rig import Agent, Background, Site, until

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture
def agent(site: Site) -> Agent:
    """An agent with two packages: trees that share a file of 2 MiB and have one of their own of 1
    MiB."""
    shared = random.Random(1).randbytes(2 * MIB)
    for number in (1, 2):
        source = site.directory / f"source{number}"
        source.mkdir()
        (source / "shared").write_bytes(shared)
        (source / "own").write_bytes(random.Random(number + 5).randbytes(MIB))
        layout = ("--layout", str(site.directory / "layout"))
        assert site.command("pack", str(source), "-t", f"app:v{number}", "--format", "tree", *layout)[0] == 0
        assert site.command("push", f"app:v{number}", "--origin", f"file://{site.layout}", *layout)[0] == 0
    (agent,) = site.agents(1)
    agent.pull(package="app:v1")
    agent.pull(package="app:v2")
    return agent


def call(agent: Agent, *words: str, code: int = 0) -> Any:
    found, document, errors = agent.site.command(*words, "--socket", str(agent.socket))
    assert found == code, errors
    return document


def objects(agent: Agent) -> list[Path]:
    return [path for path in agent.store.glob("objects/*/*") if path.is_file() and len(path.parent.name) == 2]


def test_a_package_is_removed_with_what_no_other_needs(agent: Agent) -> None:
    assert len(objects(agent)) == 3
    removed = call(agent, "rm", "app:v1")
    assert removed["reference"] == "app:v1" and MIB <= removed["bytes_freed"] < 3 * MIB
    assert sorted(path.stat().st_size for path in objects(agent)) == [MIB, 2 * MIB]
    assert [package["reference"] for package in call(agent, "ls")] == ["app:v2"]
    call(agent, "rm", "app:v1", code=3)
    assert agent.pull(package="app:v2").bytes_origin == 0
    call(agent, "rm", "app:v2")
    assert objects(agent) == [] and not list(agent.store.glob("blobs/sha256/*"))
    assert agent.pull(package="app:v2").state == "done"


def test_what_is_pinned_stays(agent: Agent) -> None:
    call(agent, "pin", "app:v1")
    refused = call(agent, "rm", "app:v1", code=1)
    assert "pin:app:v1" in refused["detail"]
    assert [pin["owner"] for pin in call(agent, "pin", "--list")] == ["pin:app:v1"]
    agent.kill()
    agent.start()
    call(agent, "rm", "app:v1", code=1)
    call(agent, "pin", "--remove", "app:v1")
    call(agent, "pin", "--remove", "app:v1", code=3)
    call(agent, "rm", "app:v1")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_what_is_shown_stays(agent: Agent) -> None:
    target = agent.site.directory / "shown"
    call(agent, "mount", "app:v1", str(target))
    try:
        refused = call(agent, "rm", "app:v1", code=1)
        assert "in use" in refused["detail"]
        call(agent, "gc")
        assert (target / "own").read_bytes() == random.Random(6).randbytes(MIB)
    finally:
        call(agent, "umount", str(target))
    call(agent, "rm", "app:v1")


def test_a_flipped_bit_is_found_and_fetched_again_from_a_peer(agent: Agent) -> None:
    site = agent.site
    peer = Agent(site, "peer").start()
    peer.pull(package="app:v1")
    peer.pull(package="app:v2")
    site.origin.stop()
    victim = next(path for path in objects(agent) if path.stat().st_size == 2 * MIB)
    blob = max(agent.store.glob("blobs/sha256/*"), key=lambda path: path.stat().st_size)
    for path in (victim, blob):
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.seek(MIB)
            byte = file.read(1)
            file.seek(MIB)
            file.write(bytes([byte[0] ^ 1]))
    found = call(agent, "verify")
    assert set(found["wrong"]) == {f"sha256:{blob.name}", victim.parent.name + victim.name}
    assert set(found["repaired"]) == {"app:v1", "app:v2"} and not found["failed"]
    assert call(agent, "verify")["wrong"] == []
    assert victim.read_bytes() == random.Random(1).randbytes(2 * MIB)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("how", ["erofs", "hardlink"])
def test_what_shows_wrong_bytes_on_is_named(agent: Agent, how: str) -> None:
    """What was read before stays in a mount, and a hard link is the old file; what has nothing of
    it is not named."""
    one, other = (agent.site.directory / f"shown{number}" for number in (1, 2))
    right = random.Random(6).randbytes(MIB)
    for number, target in enumerate((one, other)):
        call(agent, "mount", f"app:v{number + 1}", str(target), "--how", how)
    try:
        assert (one / "own").read_bytes() == right
        victim = next(path for path in objects(agent) if path.read_bytes() == right)
        with victim.open("r+b") as file:
            file.write(b"damage")
        found = call(agent, "verify")
        assert "app:v1" in found["repaired"] and "app:v2" not in found["repaired"]
        assert found["shown"] == [str(one)]
        assert (one / "own").read_bytes()[:6] == b"damage"
        call(agent, "umount", str(one))
        call(agent, "mount", "app:v1", str(one), "--how", how)
        assert (one / "own").read_bytes() == right
        assert call(agent, "verify")["shown"] == []
        shared = next(path for path in objects(agent) if path.stat().st_size == 2 * MIB)
        with shared.open("r+b") as file:
            file.write(b"damage")
        told = programs.run("verify", "--no-repair", "--socket", agent.socket)
        for target in (one, other):
            assert f"shown at {target}: unmount it and mount it again" in told.stdout
    finally:
        for target in (one, other):
            call(agent, "umount", str(target))


def test_collection_beside_pulls_takes_nothing_that_is_needed(agent: Agent) -> None:
    call(agent, "rm", "app:v1")
    agent.site.origin.rate_bytes_s = 4 * MIB
    pull = agent.start_pull(package="app:v1")
    for _ in range(3):
        call(agent, "gc")
    assert pull.result().state == "done"
    assert call(agent, "verify")["wrong"] == []
    assert len(objects(agent)) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("signal_sent", ["SIGTERM", "SIGKILL"])
def test_what_an_earlier_agent_shows_stays(agent: Agent, signal_sent: str) -> None:
    """Nothing of it is open just then: the kernel looks objects up when they are first read,
    perhaps much later."""
    target = agent.site.directory / "shown"
    call(agent, "mount", "app:v1", str(target))
    try:
        agent.kill() if signal_sent == "SIGKILL" else agent.stop()
        agent.start()
        assert "in use" in call(agent, "rm", "app:v1", code=1)["detail"]
        call(agent, "gc")
        assert (target / "own").read_bytes() == random.Random(6).randbytes(MIB)
    finally:
        call(agent, "umount", str(target))
    call(agent, "rm", "app:v1")


def test_what_a_tag_meant_before_goes_with_the_package(agent: Agent) -> None:
    """The tag has moved, and both versions draw on one catalog: removing the package by its tag
    leaves nothing behind."""
    site, layout = agent.site, ("--layout", str(agent.site.directory / "layout"))
    for number in (1, 2):
        assert site.command("tag", f"app:v{number}", "app:now", "--origin", f"file://{site.layout}")[0] == 0
        until(lambda: agent.pull(package="app:now").state == "done")
        call(agent, "rm", f"app:v{number}")
    until(lambda: site.command("resolve", "app:now", "--origin", f"file://{site.layout}", *layout)[0] == 0)
    time.sleep(1.2)  # a tracker believes a tag for a second
    agent.pull(package="app:now")
    call(agent, "rm", "app:now")
    call(agent, "gc")
    assert objects(agent) == [] and not list(agent.store.glob("blobs/sha256/*"))


def test_one_tree_from_two_layouts(agent: Agent) -> None:
    site = agent.site
    fresh = ("--layout", str(site.directory / "fresh"))
    assert site.command("pack", str(site.directory / "source1"), "-t", "same:v1", "--format", "tree", *fresh)[0] == 0
    assert site.command("push", "same:v1", "--origin", f"file://{site.layout}", *fresh)[0] == 0
    agent.pull(package="same:v1")
    call(agent, "rm", "app:v1")
    assert agent.pull(package="same:v1").state == "done"
    call(agent, "rm", "same:v1")
    call(agent, "rm", "app:v2")
    call(agent, "gc")
    assert objects(agent) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_tree_in_use_outlives_a_clean_stop(agent: Agent) -> None:
    target = agent.site.directory / "shown"
    call(agent, "mount", "app:v1", str(target))
    program = subprocess.Popen(["sleep", "100"], cwd=target)
    try:
        assert agent.stop() == 0
        agent.start()
        assert "in use" in call(agent, "rm", "app:v1", code=1)["detail"]
        assert (target / "own").read_bytes() == random.Random(6).randbytes(MIB)
        call(agent, "umount", "--force", str(target))
        call(agent, "rm", "app:v1", code=1)
    finally:
        program.kill()
        program.wait()
    assert agent.stop() == 0
    agent.start()
    call(agent, "rm", "app:v1")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_many_mounts_of_one_package_at_once(site: Site) -> None:
    source = site.directory / "source"
    for number in range(3000):
        (source / f"d{number % 30}").mkdir(parents=True, exist_ok=True)
        (source / f"d{number % 30}/f{number}").write_text(str(number))
    layout = ("--layout", str(site.directory / "layout"))
    assert site.command("pack", str(source), "-t", "app:v1", "--format", "tree", *layout)[0] == 0
    assert site.command("push", "app:v1", "--origin", f"file://{site.layout}", *layout)[0] == 0
    (agent,) = site.agents(1)
    targets = [site.directory / f"shown{number}" for number in range(4)]
    mounts = [Background(lambda target=target: call(agent, "mount", "app:v1", str(target))) for target in targets]
    pulls = [agent.start_pull(package="app:v1") for _ in range(3)]
    try:
        assert [pull.result().state for pull in pulls] == ["done"] * 3
        assert {mount.result()["how"] for mount in mounts} == {"erofs"}
        assert {len(list(target.rglob("f*"))) for target in targets} == {3000}
    finally:
        for target in targets:
            call(agent, "umount", str(target))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_damaged_image_is_found_and_made_again(agent: Agent) -> None:
    target = agent.site.directory / "shown"
    for number, offset in enumerate((1152, -100)):  # the root directory; something in the end
        image = sorted(agent.store.glob("images/*"))[number]
        data = bytearray(image.read_bytes())
        data[offset] ^= 0xFF
        image.write_bytes(data)
    if agent.site.command("mount", "app:v1", str(target), "--socket", str(agent.socket))[0] == 0:
        call(agent, "umount", str(target))
    found = call(agent, "verify")
    assert all(name.startswith("image ") for name in found["wrong"]) and not found["failed"]
    assert call(agent, "verify")["wrong"] == []
    for number in (1, 2):
        call(agent, "mount", f"app:v{number}", str(target))
        assert (target / "own").read_bytes() == random.Random(number + 5).randbytes(MIB)
        call(agent, "umount", str(target))


def test_disk_use_tells_shared_bytes_apart(agent: Agent) -> None:
    """Each package has a file of its own of 1 MiB, and the pack that it came in; both have the file
    of 2 MiB. What a package has alone is what its removal frees, but for some documents."""
    use = call(agent, "du")
    alone = {package["references"][0]: package["bytes_alone"] for package in use["packages"]}
    assert alone.keys() == {"app:v1", "app:v2"}
    assert all(size >= MIB for size in alone.values())
    assert all(package["bytes_here"] == package["bytes_alone"] + use["bytes_shared"] for package in use["packages"])
    assert use["bytes_shared"] >= 2 * MIB
    assert use["bytes_nameless"] == 0
    assert [package["kept_by"] for package in use["packages"]] == [["tag"], ["tag"]]
    total = sum(alone.values()) + use["bytes_shared"] + use["bytes_documents"]
    assert total == use["bytes_total"]
    freed = call(agent, "rm", "app:v1")["bytes_freed"]
    assert alone["app:v1"] <= freed < alone["app:v1"] + MIB // 4
    (left,) = call(agent, "du")["packages"]
    assert left["bytes_alone"] == left["bytes_here"] >= 3 * MIB


def test_pruning_removes_what_nothing_keeps_and_says_it_before(agent: Agent) -> None:
    digests = {package["reference"]: package["digest"] for package in call(agent, "ls")}
    agent.pull(package=f"app@{digests['app:v1']}")
    call(agent, "pin", "app:v2")
    assert call(agent, "prune")["packages"] == []
    call(agent, "prune", "--all", "--unused-for", "1w")
    would = call(agent, "prune", "--all")
    assert would["dry_run"] and [package["references"][0] for package in would["packages"]] == ["app:v1"]
    assert would["bytes_freed"] >= MIB
    assert len(call(agent, "ls")) == 3
    done = call(agent, "prune", "--all", "--yes")
    assert not done["dry_run"] and done["stayed"] == [] and done["bytes_freed"] >= MIB
    assert [package["reference"] for package in call(agent, "ls")] == ["app:v2"]
    call(agent, "pin", "--remove", "app:v2")
    assert agent.pull(package="app:v2").bytes_origin == 0


def test_a_package_that_was_asked_for_by_digest_alone_is_pruned(agent: Agent) -> None:
    digest = next(entry["digest"] for entry in call(agent, "ls") if entry["reference"] == "app:v1")
    call(agent, "rm", "app:v1")
    agent.pull(package=f"app@{digest}")
    assert [entry["references"] for entry in call(agent, "prune", "--yes")["packages"]] == [[f"app@{digest}"]]
    assert [entry["reference"] for entry in call(agent, "ls")] == ["app:v2"]


def test_a_single_blob_is_pruned_and_a_pinned_one_stays(agent: Agent) -> None:
    loose, kept = agent.site.publish(MIB), agent.site.publish(MIB + 1)
    agent.pull(blob=loose)
    call(agent, "pin", kept)
    pruned = call(agent, "prune", "--yes")
    assert [package["digest"] for package in pruned["packages"]] == [loose] and pruned["bytes_freed"] >= MIB
    assert {entry["digest"] for entry in call(agent, "ls") if entry["reference"].startswith("blob:")} == {kept}


def test_pins_name_packages_after_a_restart(agent: Agent) -> None:
    """An agent that was started anew knows whose layers they are, before the package is used."""
    call(agent, "pin", "app:v1")
    before = call(agent, "pin", "--list")
    agent.stop()
    agent.start()
    until(lambda: call(agent, "pin", "--list") == before, "the names of what is pinned")


def test_pins_and_mounts_name_packages(agent: Agent) -> None:
    call(agent, "pin", "app:v1")
    (pin,) = call(agent, "pin", "--list")
    assert pin["packages"] == ["app:v1"] and pin["size"] >= 3 * MIB
    digest = next(entry["digest"] for entry in call(agent, "ls") if entry["reference"] == "app:v1")
    target = agent.site.directory / "seen"
    call(agent, "mount", "app:v1", str(target))
    try:
        (mount,) = call(agent, "status")["mounts"]
        assert mount["tags"] == ["app:v1"] and mount["reference"] == f"app@{digest}"
        shown = programs.run("status", "--socket", str(agent.socket)).stdout
        assert f"app:v1 {digest[7:19]}  {target}" in shown
        assert "  done  " in shown and " ago" in shown
    finally:
        call(agent, "umount", str(target))
