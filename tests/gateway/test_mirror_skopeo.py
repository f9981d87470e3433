"""skopeo copies images through an agent's mirror, and gets what is in the registry."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from mirror_rig import Image, make_layer, push_image, running_mirror
from registry_rig import needs_registry, running_registry

from p2pdist.model.digest import digest_of

SKOPEO = shutil.which("skopeo")
pytestmark = [needs_registry, pytest.mark.skipif(SKOPEO is None, reason="needs skopeo")]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running.address


@pytest.fixture(scope="module")
def image(registry: str) -> Image:
    return push_image(registry, "team/app", "v1", [make_layer(size, str(size)) for size in (3 << 20, 100_000, 10)])


async def skopeo(*arguments: str) -> tuple[int, bytes, str]:
    process = await asyncio.create_subprocess_exec(
        "skopeo", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, output, errors.decode(errors="replace")


def configuration(directory: Path, registry: str, mirror: str) -> list[str]:
    """The options by which a client of containers/image goes through a mirror."""
    location = mirror.removeprefix("http://")
    conf = directory / "registries.conf"
    conf.write_text(
        f'[[registry]]\nprefix = "{registry}"\nlocation = "{registry}"\ninsecure = true\n'
        f'[[registry.mirror]]\nlocation = "{location}/{registry.replace(":", "__")}"\ninsecure = true\n'
    )
    return ["--registries-conf", str(conf), "--insecure-policy"]


async def test_skopeo_copies_through_a_mirror(tmp_path: Path, registry: str, image: Image) -> None:
    async with running_mirror(tmp_path, registry) as rig:
        rig.images.data.update(image.blobs)
        rig.images.flowing = True
        options = configuration(tmp_path, registry, rig.url)
        source, target = f"docker://{registry}/team/app:v1", tmp_path / "copy"
        code, _, errors = await skopeo(*options, "copy", "--src-tls-verify=false", source, f"dir:{target}")
        assert code == 0, errors
        assert (target / "manifest.json").read_bytes() == image.manifest
        for digest, blob in image.blobs.items():
            assert digest_of((target / digest.removeprefix("sha256:")).read_bytes()) == digest_of(blob)
        assert rig.agent.mirrored.bytes["swarm"] == sum(map(len, image.blobs.values()))
        code, output, errors = await skopeo(*options, "inspect", "--tls-verify=false", source)
        assert code == 0, errors
        assert json.loads(output)["RepoTags"] == ["v1"]


@pytest.mark.slow
async def test_skopeo_goes_to_the_registry_where_the_mirror_has_nothing(
    tmp_path: Path, registry: str, image: Image
) -> None:
    """A mirror that can give nothing costs a moment, and no pull."""
    async with running_mirror(tmp_path, registry) as rig:
        rig.images.silent = True
        options = configuration(tmp_path, registry, rig.url)
        source, target = f"docker://{registry}/team/app:v1", tmp_path / "copy"
        code, _, errors = await skopeo(*options, "copy", "--src-tls-verify=false", source, f"dir:{target}")
        assert code == 0, errors
        assert (target / "manifest.json").read_bytes() == image.manifest
        assert rig.agent.mirrored.fallbacks["unavailable"]
