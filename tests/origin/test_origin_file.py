"""A directory as an origin."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from origin_rig import store_file

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import NotFound, Refused
from p2pdist.model.manifest import Reference, parse_reference
from p2pdist.origin.drivers import open_origin
from p2pdist.origin.layout import LayoutOrigin, LocalLayout, blob_key


async def test_a_missing_directory_is_said_with_a_remedy(tmp_path: Path) -> None:
    origin = open_origin((tmp_path / "absent").as_uri())
    for attempt in (
        origin.resolve(parse_reference("app:v1")),
        origin.tags(),
        origin.read(digest_of(b"")),
        origin.read_range(digest_of(b""), 0, 1),
    ):
        with pytest.raises(NotFound, match="there is no directory") as caught:
            await attempt
        assert caught.value.remedy
    assert await origin.size(digest_of(b"")) is None
    await origin.close()


async def test_only_the_last_directory_is_made(tmp_path: Path) -> None:
    """A path below a file system that is not mounted is not filled in by accident."""
    origin = open_origin((tmp_path / "absent/origin").as_uri())
    with pytest.raises(NotFound, match="there is no directory"):
        await origin.write_document(b"data")
    assert not (tmp_path / "absent").exists()
    await origin.close()


async def test_names_with_spaces_and_odd_bytes(tmp_path: Path) -> None:
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a b%\xff"))
    origin = LocalLayout(root)
    root.mkdir()
    digest = await origin.write_document(b"data")
    again = open_origin(origin.url)
    assert again.url == origin.url
    assert await again.read(digest) == b"data"
    assert await origin.read(digest) == b"data"
    await origin.close()
    await again.close()


async def test_nothing_unfinished_stays_and_old_leftovers_go(tmp_path: Path, payload: Path) -> None:
    origin = open_origin(tmp_path.as_uri())
    assert isinstance(origin, LayoutOrigin)
    incoming = tmp_path / ".incoming"
    incoming.mkdir()
    (incoming / "old").write_bytes(b"x")
    (incoming / "new").write_bytes(b"x")
    os.utime(incoming / "old", (time.time() - 90_000,) * 2)
    await store_file(origin, payload, "app:v1")
    assert [entry.name for entry in incoming.iterdir()] == ["new"]
    await origin.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
async def test_an_unreadable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(b"{}")
    (tmp_path / "index.json").chmod(0)
    origin = open_origin(tmp_path.as_uri())
    with pytest.raises(Refused):
        await origin.resolve(parse_reference("app:v1"))
    await origin.close()


async def test_a_digest_never_leaves_the_directory() -> None:
    """Keys are made of hexadecimal digits only."""
    digest = digest_of(b"")
    assert blob_key(digest) == "blobs/sha256/" + digest.removeprefix("sha256:")


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo")
async def test_skopeo_copies_a_package_there_and_back(tmp_path: Path, payload: Path) -> None:
    """Another tool reads the layout, and what it writes is read back unchanged, blob for blob."""
    first = LocalLayout(tmp_path / "a")
    first.scratch()
    digest, manifest = await store_file(first, payload, "team/trainer:v1")
    inspected = subprocess.run(
        ["skopeo", "inspect", "--raw", f"oci:{tmp_path}/a:team/trainer:v1"], capture_output=True, check=True
    )
    assert inspected.stdout == await first.read(manifest.digest)
    for here, there in (("a", "b"), ("b", "c")):
        subprocess.run(
            ["skopeo", "copy", f"oci:{tmp_path}/{here}:team/trainer:v1", f"oci:{tmp_path}/{there}:team/trainer:v1"],
            capture_output=True,
            check=True,
        )
    third = LocalLayout(tmp_path / "c")
    found = await third.resolve(parse_reference("team/trainer:v1"))
    assert (found.digest, found.size) == (manifest.digest, manifest.size)
    assert await third.read(digest) == payload.read_bytes()
    blobs = sorted(path.name for path in (tmp_path / "a/blobs/sha256").iterdir())
    assert sorted(path.name for path in (tmp_path / "c/blobs/sha256").iterdir()) == blobs
    await third.tag(Reference("team/trainer", "v2"), found)
    subprocess.run(["skopeo", "inspect", "--raw", f"oci:{tmp_path}/c:team/trainer:v2"], capture_output=True, check=True)
    await first.close()
    await third.close()
