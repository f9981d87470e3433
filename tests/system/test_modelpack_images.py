"""Models (ModelPack) with real processes: from a directory to hosts, to and from oras through a
real registry, and files that two models share, which move once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import oras.provider
import pytest
from image_rig import make_image, push_image, reads
from registry_rig import Registry, needs_registry, running_registry
from site_rig import Agent, Site, running_site, wait_for

from p2pdist.agent.api.client import LocalClient
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import UsageError
from p2pdist.model.messages import MountRequest
from p2pdist.model.modelpack import ARTIFACT_TYPE, CONFIG_TYPE, FILE_PATH
from p2pdist.package.archive.import_ import this_platform

pytestmark = pytest.mark.slow
RAW = "application/vnd.cncf.model.weight.v1.raw"
WEIGHTS = os.urandom(3 << 20)
FILES = {
    "model.safetensors": WEIGHTS,
    "config.json": b'{"layers": 2}',
    "tokenizer/merges.txt": b"a b\n" * 1000,
    "empty.json": b"",
    "README.md": b"# A model\n",
}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "none"))
    with running_site(tmp_path, tracker=False) as running:
        yield running


def write(directory: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def shown(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def packed(site: Site, source: Path, reference: str, *words: str) -> str:
    layout = str(site.directory / "layout")
    code, made, errors = site.command(
        "pack", str(source), "-t", reference, "--format", "modelpack", "--layout", layout, *words
    )
    assert code == 0, errors
    return str(made["digest"])


def pushed(site: Site, reference: str, origin: str) -> None:
    layout = str(site.directory / "layout")
    code, _, errors = site.command("push", reference, "--layout", layout, "--origin", origin)
    assert code == 0, errors


@pytest.fixture
def agent(site: Site, registry: Registry) -> Agent:
    """An agent whose tracker knows the registry."""
    file = site.directory / "upstreams.toml"
    file.write_text(f'[[upstream]]\nhost = "{registry.address}"\n')
    words = ["tracker", "--listen", f"127.0.0.1:{site.tracker_port}", "--state", str(site.directory / "state")]
    log = site.directory / "tracker.log"
    site.tracker_process = site.spawn([*words, "--upstreams", str(file), "--origin", site.origin.url], log)
    wait_for(site.tracker_url + "/readyz", site.tracker_process, log)
    return Agent(site, "h0").start()


def mounted(site: Site, agent: Agent, reference: str, name: str, expected: dict[str, bytes]) -> str:
    """Mount a reference and compare what is seen; returns the method."""
    place = site.directory / name
    code, status, errors = site.command("mount", reference, str(place), "--socket", str(agent.socket))
    assert code == 0, errors
    try:
        assert shown(place) == expected
    finally:
        code, _, errors = site.command("umount", str(place), "--socket", str(agent.socket))
        assert code == 0, errors
    return str(status["how"])


def oras_push(registry: Registry, target: str, directory: Path, files: dict[str, str]) -> None:
    """Push files, path and media type each, as oras does."""
    directory.mkdir(exist_ok=True)
    named = {str(directory / name): {FILE_PATH: name} for name in files}
    (directory / "annotations.json").write_text(json.dumps(named))
    (directory / "model-config.json").write_text("{}")
    client = oras.provider.Registry(registry.address, insecure=True)
    answer = client.push(
        target=f"{registry.address}/{target}",
        files=[f"{directory / name}:{kind}" for name, kind in files.items()],
        annotation_file=str(directory / "annotations.json"),
        manifest_config=f"{directory / 'model-config.json'}:{CONFIG_TYPE}",
        disable_path_validation=True,
    )
    assert answer.status_code == 201


def test_a_model_is_packed_pulled_by_the_swarm_and_mounted(site: Site, agent: Agent) -> None:
    source = write(site.directory / "model", FILES)
    digest = packed(site, source, "models/tiny:v1")
    assert packed(site, source, "models/tiny:again") == digest, "equal files make equal models"
    pushed(site, "models/tiny:v1", f"file://{site.layout}")
    manifest = json.loads((site.layout / "blobs" / "sha256" / digest[7:]).read_bytes())
    assert manifest["artifactType"] == ARTIFACT_TYPE and manifest["config"]["mediaType"] == CONFIG_TYPE
    assert {layer["mediaType"] for layer in manifest["layers"] if layer["digest"] == digest_of(WEIGHTS)} == {RAW}
    how = mounted(site, agent, "models/tiny:v1", "seen", FILES)
    if os.geteuid() == 0:
        assert how in ("erofs", "reflink", "copy")
    # Another model with the same weights: they are here.
    more = {**FILES, "config.json": b'{"layers": 3}'}
    packed(site, write(site.directory / "other", more), "models/other:v1")
    pushed(site, "models/other:v1", f"file://{site.layout}")
    code, pulled, errors = site.command("pull", "models/other:v1", "--socket", str(agent.socket))
    assert code == 0, errors
    assert pulled["bytes_origin"] + pulled["bytes_peers"] == len(more["config.json"])
    assert site.origin_bytes(digest_of(WEIGHTS)) == len(WEIGHTS)
    mounted(site, agent, "models/other:v1", "seen-too", more)
    out = site.directory / "exported"
    layout = str(site.directory / "layout")
    code, _, errors = site.command("export", "models/other:v1", "--dir", "-o", str(out), "--layout", layout)
    assert code == 0 and shown(out) == more, errors


@needs_registry
@pytest.mark.root
def test_a_view_of_a_model_outlives_the_agent_and_keeps_its_blobs(site: Site, agent: Agent, registry: Registry) -> None:
    model, place = site.directory / "pushed", site.directory / "seen"
    write(model, {"model.safetensors": WEIGHTS})
    oras_push(registry, "public/kept:v1", model, {"model.safetensors": RAW})
    reference = f"docker://{registry.address}/public/kept:v1"
    code, _, errors = site.command("mount", reference, str(place), "--socket", str(agent.socket))
    assert code == 0, errors
    agent.stop()
    agent.start()
    try:
        assert shown(place) == {"model.safetensors": WEIGHTS}
        code, _, errors = site.command("rm", reference, "--socket", str(agent.socket))
        assert code != 0 and "in use" in errors, errors
    finally:
        code, _, errors = site.command("umount", str(place), "--socket", str(agent.socket))
    assert code == 0, errors
    code, _, errors = site.command("rm", reference, "--socket", str(agent.socket))
    assert code == 0, errors


@needs_registry
def test_oras_pulls_what_was_packed_here(site: Site, registry: Registry) -> None:
    files = {name: data for name, data in FILES.items() if data}
    packed(site, write(site.directory / "model", files), "tiny:v1")
    pushed(site, "tiny:v1", registry.url("models/tiny"))
    client = oras.provider.Registry(registry.address, insecure=True)
    target = f"{registry.address}/models/tiny:v1"
    client.pull(target=target, outdir=str(site.directory / "pulled"))
    pulled = shown(site.directory / "pulled")
    assert {name: pulled.get(name) for name in files} == files
    assert all(name.startswith("sha256:") for name in pulled.keys() - files.keys()), "piece lists"
    # As a model alone, also from a package of another kind.
    layout, origin = str(site.directory / "layout"), site.directory / "out"
    code, _, errors = site.command("export", "tiny:v1", "--modelpack", "-o", str(origin), "--layout", layout)
    assert code == 0, errors
    code, _, errors = site.command(
        "pack", str(site.directory / "model"), "-t", "models/tree:v1", "--format", "tree", "--layout", layout
    )
    assert code == 0, errors
    second = site.directory / "out-of-tree"
    code, _, errors = site.command("export", "models/tree:v1", "--modelpack", "-o", str(second), "--layout", layout)
    assert code == 0, errors
    for place in (origin, second):
        (entry,) = json.loads((place / "index.json").read_text())["manifests"]
        manifest = json.loads((place / "blobs" / "sha256" / entry["digest"][7:]).read_bytes())
        named = {layer["annotations"][FILE_PATH]: layer["digest"] for layer in manifest["layers"]}
        assert named == {name: digest_of(data) for name, data in files.items()}
        code, made, errors = site.command("import", str(place), "-t", "models/back:v1", "--layout", layout)
        assert code == 0 and made["kind"] == "model", errors
        back = site.directory / f"back-{place.name}"
        code, _, errors = site.command("export", "models/back:v1", "--dir", "-o", str(back), "--layout", layout)
        assert code == 0 and shown(back) == files, errors


@needs_registry
def test_what_oras_pushed_is_mounted_and_equal_files_move_once(site: Site, agent: Agent, registry: Registry) -> None:
    model = site.directory / "pushed"
    write(model, {"model.safetensors": WEIGHTS, "config.json": b"{}\n"})
    kinds = {"model.safetensors": RAW, "config.json": RAW.replace("weight", "weight.config")}
    oras_push(registry, "public/one:v1", model, kinds)
    before = reads(registry, "GET", f"/public/one/blobs/{digest_of(WEIGHTS)}")
    reference = f"docker://{registry.address}/public/one:v1"
    expected = {"model.safetensors": WEIGHTS, "config.json": b"{}\n"}
    mounted(site, agent, reference, "seen", expected)
    assert reads(registry, "GET", f"/public/one/blobs/{digest_of(WEIGHTS)}") > before
    # The same weights in another repository: the registry is not asked for them.
    write(model, {"config.json": b'{"other": 1}'})
    oras_push(registry, "public/two:v1", model, kinds)
    second = f"docker://{registry.address}/public/two:v1"
    code, pulled, errors = site.command("pull", second, "--socket", str(agent.socket))
    assert code == 0, errors
    assert pulled["bytes_cached"] >= len(WEIGHTS) and pulled["bytes_upstream"] < 1000
    assert reads(registry, "GET", f"/public/two/blobs/{digest_of(WEIGHTS)}") == 0
    # And a package of ours with the same file.
    packed(site, write(site.directory / "model", {"model.safetensors": WEIGHTS}), "models/tiny:v1")
    pushed(site, "models/tiny:v1", f"file://{site.layout}")
    mounted(site, agent, "models/tiny:v1", "seen-too", {"model.safetensors": WEIGHTS})
    assert site.origin_bytes(digest_of(WEIGHTS)) == 0


@needs_registry
def test_what_a_model_must_not_say_is_refused_by_name(site: Site, agent: Agent, registry: Registry) -> None:
    place = site.directory / "seen"
    directory = write(site.directory / "bad", {"model.safetensors": b"data"})
    for number, path in enumerate(("../escape", "/etc/escape", "a\nb")):
        (directory / "annotations.json").write_text(
            json.dumps({str(directory / "model.safetensors"): {FILE_PATH: path}})
        )
        (directory / "model-config.json").write_text("{}")
        client = oras.provider.Registry(registry.address, insecure=True)
        client.push(
            target=f"{registry.address}/public/bad{number}:v1",
            files=[f"{directory / 'model.safetensors'}:{RAW}"],
            annotation_file=str(directory / "annotations.json"),
            manifest_config=f"{directory / 'model-config.json'}:{CONFIG_TYPE}",
            disable_path_validation=True,
        )
        reference = f"docker://{registry.address}/public/bad{number}:v1"
        code, _, errors = site.command("mount", reference, str(place), "--socket", str(agent.socket))
        assert code == 6 and path.splitlines()[0] in errors and "Traceback" not in errors, errors
        code, _, errors = site.command(
            "import", reference, "-t", "models/bad:v1", "--layout", str(site.directory / "layout")
        )
        assert code == 6 and digest_of(b"data") in errors, errors
    assert not place.exists() and not (site.directory / "escape").exists()
    code, _, errors = site.command("pack", str(directory), "-t", "a:b", "--format", "modelpack", "--base", "x:1")
    assert code == 2 and "--base" in errors
    # An image is not shown as it is, and does not come to find that out.
    image = make_image({"data": b"of an image"}, architecture=this_platform().architecture)
    push_image(registry, "public/image", "v1", image)
    with pytest.raises(UsageError, match="is not shown as it is"):
        LocalClient(agent.socket).mount(MountRequest(f"docker://{registry.address}/public/image:v1"))
    assert all(reads(registry, "GET", f"/public/image/blobs/{digest}") == 0 for digest in image.blobs)
