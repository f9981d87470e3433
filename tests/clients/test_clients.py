"""Real clients pull through real agents: the same digests, images that run, each blob read once
from the registry, and pulls that go on when agent or tracker is gone.

What each client asks is noted in calls/*.json, and the agent is asked the same there without the
client, so that a machine without them sees a change too. P2PDIST_RECORD=1 writes these files anew.
P2PDIST_LAYER_MIB=1024 gives the images of the first test a layer as large as real ones have.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from clients_rig import CLIENTS, Client, Skopeo, running_machine
from door_rig import HUB, Door, blob_bytes, running_door
from images_rig import SAYS, Image, Kind, make_image, push_image, runs_here
from registry_rig import needs_registry
from site_rig import Background, until
from watch_rig import CALLS, Watch, filled, names_of, rows_of, watching

from p2pdist.model.image import path_of_upstream

pytestmark = [pytest.mark.slow, pytest.mark.root, needs_registry, pytest.mark.xdist_group("clients")]
DEAD_S_MAX = 2.0
RECORDS = bool(os.environ.get("P2PDIST_RECORD"))
LAYER_MIB = int(os.environ.get("P2PDIST_LAYER_MIB", "3"))


@pytest.fixture
def door() -> Iterator[Door]:
    with tempfile.TemporaryDirectory(prefix="p2pdist-") as directory, running_door(Path(directory)) as running:
        yield running


@pytest.fixture(params=CLIENTS, ids=lambda client: client.name)
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    kind: type[Client] = request.param
    if kind.lacking():
        pytest.skip(kind.lacking())
    with running_machine() as machine:
        client = kind(machine)
        yield client


def upstream_of(client: Client, door: Door) -> str:
    return HUB if client.docker_hub else door.upstream.address


def installed(client: Client, door: Door, address: str) -> str:
    """Have the client ask the mirror, and start it; returns the name of the upstream."""
    upstream = upstream_of(client, door)
    client.machine.mirror("install", client.runtime, "--upstream", upstream, "--address", address)
    client.start()
    return upstream


def published(door: Door, repository: str, kind: Kind = "oci", **more: object) -> Image:
    image = make_image(kind, **more)  # type: ignore[arg-type]
    push_image(door.upstream, repository, "v1", image)
    return image


@pytest.mark.parametrize(
    ("kind", "compressions", "index"),
    [("oci", ("gzip",) * 3, True), ("docker", ("gzip",) * 3, False), ("oci", ("gzip", "zstd", "zstd"), False)],
    ids=["oci index", "docker", "zstd"],
)
def test_images_come_whole_through_the_agent(
    client: Client, door: Door, kind: Kind, compressions: tuple[str, ...], index: bool
) -> None:
    if "zstd" in compressions and not client.zstd:
        pytest.skip(f"{client.name} of this version knows no zstd")
    image = published(door, "public/app", kind, size=LAYER_MIB << 20, compressions=compressions, index=index)
    agent = door.agent("h1")
    with watching(agent.mirror) as watch:
        upstream = installed(client, door, watch.address)
        reference = f"{upstream}/public/app:v1"
        said = client.pull(reference)
        assert said == (image.manifest if client.name == "skopeo" else image.top).digest
        if runs_here() and client.name != "skopeo":
            assert client.run(reference).strip() == SAYS
        note(client, watch, names_of(image, upstream, path_of_upstream(upstream), "public/app", "v1"), kind, index)
    for blob in image.blobs:
        sent = blob_bytes(door.upstream, blob.digest)
        assert sent == len(blob.data), f"the registry sent {sent} bytes of a blob of {len(blob.data)}"


def note(client: Client, watch: Watch, names: dict[str, str], kind: str, index: bool) -> None:
    """Write or compare the fixture of a client: of an OCI image with an index."""
    if not index:
        return
    path, rows = CALLS / f"{client.name}.json", rows_of(watch.calls, names)
    if RECORDS:
        CALLS.mkdir(exist_ok=True)
        path.write_text(json.dumps({"client": client.name, "kind": kind, "calls": rows}, indent=1) + "\n")
    assert {str(row["path"]) for row in rows} == {str(row["path"]) for row in json.loads(path.read_text())["calls"]}


def test_two_hosts_read_the_registry_once(client: Client, door: Door) -> None:
    """The second host's client gets what the first host's agent holds."""
    image = published(door, "public/app", "docker")
    first, second = door.agent("h1"), door.agent("h2")
    upstream = installed(client, door, first.mirror)
    digest = client.pull(f"{upstream}/public/app:v1")
    client.remove(f"{upstream}/public/app:v1")
    client.machine.mirror("install", client.runtime, "--upstream", upstream, "--address", second.mirror)
    client.reload()
    until_reloaded(client, second.mirror)
    assert client.pull(f"{upstream}/public/app:v1") == digest
    assert second.received() > 0
    for blob in image.blobs:
        assert blob_bytes(door.upstream, blob.digest) == len(blob.data)


def until_reloaded(client: Client, address: str) -> None:
    mirrors = getattr(client, "mirrors", None)
    if mirrors is not None:
        until(lambda: mirrors() == [f"http://{address}/"])


def test_what_peers_hold_comes_without_a_tracker(client: Client, door: Door) -> None:
    image = published(door, "public/app", "docker")
    agent = door.agent("h1")
    upstream = installed(client, door, agent.mirror)
    client.pull(f"{upstream}/public/app:v1")
    client.remove(f"{upstream}/public/app:v1")
    door.kill_tracker()
    client.pull(f"{upstream}/public/app:v1")
    for blob in image.blobs:
        assert blob_bytes(door.upstream, blob.digest) == len(blob.data)


def test_pulls_go_on_when_the_tracker_dies_in_the_middle(door: Door) -> None:
    """Two hosts that receive at once go on with each other and the registry."""
    if Skopeo.lacking():
        pytest.skip(Skopeo.lacking())
    image = published(door, "public/app", size=16 << 20)
    agents = [door.agent(name, download_limit="4MB/s") for name in ("h1", "h2")]
    reference = f"{path_of_upstream(door.upstream.address)}/public/app:v1"
    with running_machine() as machine:
        clients = [Skopeo(machine), Skopeo(machine)]
        pulls = [
            Background(partial(client.pull, f"{agent.mirror}/{reference}"))
            for client, agent in zip(clients, agents, strict=True)
        ]
        until(lambda: all(agent.received() > 2 << 20 for agent in agents))
        assert all(agent.received() < 12 << 20 for agent in agents), "too late to be in the middle"
        door.kill_tracker()
        assert [pull.result(120.0) for pull in pulls] == [image.manifest.digest] * 2


def test_a_dead_agent_costs_little(client: Client, door: Door) -> None:
    """Compared with the same pull by a client that knows no mirror."""
    if client.docker_hub:
        pytest.skip("the registry behind Docker Hub's name cannot be reached from here")
    published(door, "public/app", "docker")
    agent = door.agent("h1")
    reference = f"{door.upstream.address}/public/app:v1"
    client.start()

    def seconds() -> float:
        began = time.monotonic()
        client.pull(reference)
        took = time.monotonic() - began
        client.remove(reference)
        return took

    seconds()  # whatever a first pull sets up
    without = min(seconds() for _ in range(2))
    agent.kill()
    client.machine.mirror("install", client.runtime, "--upstream", door.upstream.address, "--address", agent.mirror)
    assert min(seconds() for _ in range(2)) <= without + DEAD_S_MAX


# -- without the clients


@pytest.mark.parametrize("path", sorted(CALLS.glob("*.json")), ids=lambda path: path.stem)
def test_the_agent_answers_what_clients_ask(door: Door, path: Path) -> None:
    fixture = json.loads(path.read_text())
    image = published(door, "public/app", fixture["kind"], index=True)
    agent = door.agent("h1")
    upstream = HUB if fixture["client"] == "docker" else door.upstream.address
    names = names_of(image, upstream, path_of_upstream(upstream), "public/app", "v1")
    known = {document.digest: document for document in (image.top, image.manifest, *image.blobs)}
    for row in fixture["calls"]:
        method, target, headers = filled(row, names)
        request = urllib.request.Request(f"http://{agent.mirror}{target}", headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            body, got = answer.read(), answer.headers
        if target == "/v2/":
            continue
        digest = got["Docker-Content-Digest"]
        document = known[digest]
        assert int(got["Content-Length"]) == (len(document.data) if answer.status == 200 else len(body))
        if "/manifests/" in target:
            assert got["Content-Type"] == document.media_type
        if method == "GET" and answer.status == 200:
            assert f"sha256:{hashlib.sha256(body).hexdigest()}" == digest


@pytest.mark.parametrize("path", sorted(CALLS.glob("*.json")), ids=lambda path: path.stem)
def test_a_broken_stream_goes_on_where_it_broke(door: Door, path: Path) -> None:
    """Clients ask for the rest of a blob by Range, and compare Content-Range strictly."""
    fixture = json.loads(path.read_text())
    image = published(door, "public/app", fixture["kind"], index=True)
    agent = door.agent("h1")
    upstream = HUB if fixture["client"] == "docker" else door.upstream.address
    names = names_of(image, upstream, path_of_upstream(upstream), "public/app", "v1")
    [row] = [row for row in fixture["calls"] if row["path"].endswith("{layer1}")]
    _, target, headers = filled(row, names)
    layer = image.layers[1].data
    request = urllib.request.Request(f"http://{agent.mirror}{target}", headers=headers | {"Range": "bytes=1000000-"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 206
        assert answer.headers["Content-Range"] == f"bytes 1000000-{len(layer) - 1}/{len(layer)}"
        assert answer.read() == layer[1_000_000:]


ENROOT = r"""
set -eu -o pipefail
registry=$1 image=$2 tag=$3 out=$4
base="http://${registry}/v2/${image}"
get() { curl --proto =http,https --retry 0 --connect-timeout 30 --max-time 0 -sS -f "$@"; }
# The permission: a registry that asks for none sends no challenge.
curl -s -I -- "$base/manifests/$tag" > "$out/head"
! grep -qi '^www-authenticate:' "$out/head"
# A list of platforms, where there is one; 404 is taken for "there is none".
get -H 'Accept: application/vnd.docker.distribution.manifest.list.v2+json' -H 'Accept: application/vnd.oci.image.index.v1+json' \
    -- "$base/manifests/$tag" > "$out/list" || true
digest=$(python3 -c 'import json,sys; print(next((m["digest"] for m in json.load(open(sys.argv[1])).get("manifests", [])
    if m["platform"]["architecture"] == "amd64"), ""))' "$out/list")
get -H 'Accept: application/vnd.docker.distribution.manifest.v2+json' -H 'Accept: application/vnd.oci.image.manifest.v1+json' \
    -- "$base/manifests/${digest:-$tag}" > "$out/manifest"
python3 -c 'import json,sys; m = json.load(open(sys.argv[1])); print(*[d["digest"] for d in (m["config"], *m["layers"])], sep="\n")' \
    "$out/manifest" > "$out/digests"
xargs -P 4 -I{} curl -sS -f -L --retry 0 -o "$out/{}" -- "$base/blobs/{}" < "$out/digests"
curl -s -I -H 'Accept: application/vnd.docker.distribution.manifest.v2+json' -- "$base/manifests/$tag" \
    | tr -d '\r' | sed -n 's/^[Dd]ocker-[Cc]ontent-[Dd]igest: //p' > "$out/digest"
"""
"""What enroot asks by curl for `enroot import docker://REGISTRY#IMAGE:TAG`, in its order."""


@pytest.mark.parametrize("index", [False, True])
def test_enroot_gets_an_image_by_its_address(door: Door, tmp_path: Path, index: bool) -> None:
    """enroot knows no mirrors: `docker://localhost:PORT#UPSTREAM/REPOSITORY:TAG`."""
    image = published(door, "public/app", "docker", index=index)
    agent = door.agent("h1")
    place = f"{path_of_upstream(door.upstream.address)}/public/app"
    words = ["bash", "-c", ENROOT, "enroot", f"localhost:{agent.mirror_port}", place, "v1", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "manifest").read_bytes() == image.manifest.data
    for blob in image.blobs:
        assert (tmp_path / blob.digest).read_bytes() == blob.data
    assert (tmp_path / "digest").read_text().strip() == image.top.digest


def test_what_is_not_there_is_said_at_once(door: Door) -> None:
    """A client then goes on to the registry itself."""
    agent = door.agent("h1")
    url = f"http://{agent.mirror}/v2/public/none/manifests/v1?ns={door.upstream.address}"
    with pytest.raises(urllib.error.HTTPError) as failure:
        urllib.request.urlopen(url, timeout=30)
    assert failure.value.code == 404 and json.loads(failure.value.read())["errors"]
