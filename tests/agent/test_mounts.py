"""The agent's table of mounts: claims are held exactly as long as something is shown."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pdist.agent.mounts import Mounts
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, Corrupt, NotFound, UsageError
from p2pdist.model.messages import MountRequest, MountStatus
from p2pdist.model.package import Config
from p2pdist.mount import kernel
from p2pdist.mount.layers import SquashfsLayer

DIGEST = Digest("sha256:" + "ab" * 32)
CONFIG = Config(("python", "-m", "train"), ("A=1",), "/app")


class Claims:
    """Counts what is held."""

    def __init__(self) -> None:
        self.count = 0

    def hold(self) -> Callable[[], None]:
        self.count += 1
        return self.release

    def release(self) -> None:
        self.count -= 1


@pytest.fixture
def claims() -> Claims:
    return Claims()


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """A base and an app layer."""
    made = []
    for name in ("base", "app"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
        made.append(tmp_path / f"{name}.squashfs")
        subprocess.run(
            ["mksquashfs", tmp_path / name, made[-1], "-quiet", "-no-progress"], check=True, capture_output=True
        )
    return made


async def shown(mounts: Mounts, images: list[Path], claims: Claims, path: Path | str = "", **how: str) -> MountStatus:
    request = MountRequest("app:v1", str(path), **how)
    layers = [SquashfsLayer(image) for image in images]
    return await mounts.show("app:v1", DIGEST, layers, CONFIG, request, claims.hold)


async def test_shown_listed_and_gone(tmp_path: Path, images: list[Path], claims: Claims) -> None:
    """A status says all that a runner needs; the claim is held until the package is gone."""
    mounts = Mounts(tmp_path / "mounts")
    status = await shown(mounts, images, claims, tmp_path / "view", how="unpack")
    assert status.how == "unpack"
    assert (status.reference, status.digest, status.path) == ("app:v1", DIGEST, str(tmp_path / "view"))
    assert (status.entrypoint, status.env, status.working_dir) == (CONFIG.entrypoint, CONFIG.env, CONFIG.working_dir)
    assert sorted(path.name for path in (tmp_path / "view").iterdir()) == ["app", "base"]
    assert mounts.list() == [status]
    assert claims.count == 1
    with pytest.raises(Conflict, match="already"):
        await shown(mounts, images, claims, tmp_path / "view")
    assert await mounts.unshow(str(tmp_path / "view")) == status
    assert mounts.list() == []
    assert claims.count == 0
    with pytest.raises(NotFound):
        await mounts.unshow(str(tmp_path / "view"))


async def test_without_a_path_the_agent_chooses_one(tmp_path: Path, images: list[Path], claims: Claims) -> None:
    """Each time another, below its own directory."""
    mounts = Mounts(tmp_path / "mounts")
    found = await asyncio.gather(*(shown(mounts, images, claims, how="unpack") for _ in range(3)))
    assert len({status.path for status in found}) == 3
    assert all(status.path.startswith(f"{tmp_path}/mounts/shown/") for status in found)
    await mounts.close()
    assert claims.count == 0
    assert not list((tmp_path / "mounts" / "shown").iterdir())
    with pytest.raises(Conflict, match="stopping"):
        await shown(mounts, images, claims)


async def test_a_failure_holds_nothing(tmp_path: Path, images: list[Path], claims: Claims) -> None:
    """Corrupt layers and bad requests leave neither a claim nor an entry."""
    mounts = Mounts(tmp_path / "mounts")
    images[1].write_bytes(b"x" * 5000)
    with pytest.raises(Corrupt):
        await shown(mounts, images, claims, tmp_path / "view")
    with pytest.raises(UsageError, match="absolute"):
        await shown(mounts, images, claims, "view")
    with pytest.raises(UsageError, match="no way"):
        await shown(mounts, images[:1], claims, tmp_path / "view", how="magic")
    assert claims.count == 0
    assert mounts.list() == []
    assert not (tmp_path / "view").exists()


async def test_images_are_handed_out_and_held(tmp_path: Path, images: list[Path], claims: Claims) -> None:
    """For a caller that shows them to itself; the name that it gets ends the claim."""
    mounts = Mounts(tmp_path / "mounts")
    status = await shown(mounts, images, claims, how="userns")
    assert status.how == "images"
    assert status.images == tuple(map(str, images))
    assert claims.count == 1
    await mounts.unshow(status.path)
    assert claims.count == 0
    await shown(mounts, images, claims, how="userns")
    await mounts.close()
    assert claims.count == 0


@pytest.mark.root
async def test_root_mounts_rather_than_hand_out_images(tmp_path: Path, images: list[Path], claims: Claims) -> None:
    """`images` is what a caller without root asks for; an agent with root does better."""
    mounts = Mounts(tmp_path / "mounts")
    assert (await shown(mounts, images, claims, how="images")).how == "overlay"
    await mounts.close()


@pytest.mark.root
async def test_a_caller_that_goes_away_leaves_nothing_unknown(
    tmp_path: Path, images: list[Path], claims: Claims
) -> None:
    """A cancelled request either shows nothing or is listed, and a stop waits for it."""
    mounts = Mounts(tmp_path / "mounts")
    task = asyncio.create_task(shown(mounts, images, claims, tmp_path / "view"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await mounts.close()
    assert claims.count == 0
    assert kernel.mounted_at(tmp_path / "view") is None


@pytest.mark.root
async def test_a_stop_unmounts_what_is_in_use(tmp_path: Path, images: list[Path], claims: Claims) -> None:
    """A clean stop leaves no mount, whoever uses it; the user keeps its open file."""
    mounts = Mounts(tmp_path / "mounts")
    await shown(mounts, images, claims, tmp_path / "view")
    with (tmp_path / "view" / "app").open() as file:
        with pytest.raises(Conflict, match="in use"):
            await mounts.unshow(str(tmp_path / "view"))
        assert claims.count == 1
        await mounts.close()
        assert kernel.mounted_at(tmp_path / "view") is None
        assert file.read() == "app"
    assert claims.count == 0


_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from p2pdist.agent.mounts import Mounts
from p2pdist.model.messages import MountRequest
from p2pdist.model.package import Config
from p2pdist.mount.layers import SquashfsLayer
async def main():
    mounts = Mounts(Path(sys.argv[1]))
    layers = [SquashfsLayer(Path(name)) for name in sys.argv[3:]]
    await mounts.show("app:v1", "sha256:" + "ab" * 32, layers, Config(), MountRequest("app:v1", sys.argv[2]), lambda: lambda: None)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@pytest.mark.root
@pytest.mark.parametrize("in_use", [False, True])
async def test_a_restart_after_kill_cleans_up(tmp_path: Path, images: list[Path], in_use: bool) -> None:
    """What the killed agent showed is removed, or, in use, is listed under its name and can be removed later."""
    target = tmp_path / "view"
    killed = subprocess.run([sys.executable, "-c", _KILLED, tmp_path / "mounts", target, *images])
    assert killed.returncode == -signal.SIGKILL
    user = os.open(target, os.O_RDONLY) if in_use else -1
    mounts = Mounts(tmp_path / "mounts")
    assert [(left.path, left.removed) for left in mounts.leftovers] == [(target, not in_use)]
    if in_use:
        assert [(status.reference, status.digest, status.how) for status in mounts.list()] == [
            ("app:v1", DIGEST, "overlay")
        ]
        os.close(user)
        await mounts.unshow(str(target))
    assert mounts.list() == []
    assert not target.exists()
