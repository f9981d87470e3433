"""The demo's hub: what clients of hubs ask for, and exact counts; the model is one that safetensors
reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from blake3 import blake3
from safetensors import safe_open

from p2pdist.cli.verbs.demo.model.hub import ModelHub
from p2pdist.cli.verbs.demo.model.loader import arrays
from p2pdist.cli.verbs.demo.model.weights import write_model
from p2pdist.cli.verbs.demo.origin import SERVED_PATH
from p2pdist.model.hub import HubName
from p2pdist.origin.huggingface.hub import UpstreamHub

FILES, FILE_BYTES, TENSORS = 2, 3 << 16, 4
NAME = HubName("models", "org/noise")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    list(write_model(tmp_path / "model", files=FILES, file_bytes=FILE_BYTES, tensors=TENSORS))
    return tmp_path / "model"


@pytest.fixture
async def url(model: Path) -> AsyncIterator[str]:
    """A running hub with a model."""
    runner = web.AppRunner(ModelHub(model, "org/noise").application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_our_own_reader_of_hubs_reads_it(url: str, model: Path) -> None:
    """By what trackers and agents read hubs with: documents, small files, places, ranges."""
    hub = UpstreamHub(url)
    try:
        await hub.admit(NAME, "")
        found = await hub.revision(NAME, "main")
        listing = await hub.listing(NAME, found.commit)
        files = {file.path: file for file in listing.files}
        assert files.keys() == {path.name for path in model.iterdir()}
        assert await hub.plain_file(NAME, found.commit, files["config.json"]) == (model / "config.json").read_bytes()
        name = "model-00002-of-00002.safetensors"
        data = (model / name).read_bytes()
        assert files[name].sha256 == hashlib.sha256(data).hexdigest() and files[name].size == len(data)
        location = await hub.location(NAME, found.commit, files[name])
        assert await hub.read_range(location, 5, 70_000) == data[5:70_005]
    finally:
        await hub.close()
    async with aiohttp.ClientSession() as client, client.get(url + SERVED_PATH) as response:
        counted = await response.json()
    small = (model / "config.json").stat().st_size
    assert counted["heads"] == {name: 1}
    assert counted["sent"] == {name: 70_000, "config.json": small} and counted["bytes"] == 70_000 + small


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/api/models/org/other", "RepoNotFound"),
        ("/org/other/resolve/main/config.json", "RepoNotFound"),
        ("/api/models/org/noise/revision/v1", "RevisionNotFound"),
        ("/api/models/org/noise/tree/v1", "RevisionNotFound"),
        ("/org/noise/resolve/v1/config.json", "RevisionNotFound"),
        ("/org/noise/resolve/main/none.json", "EntryNotFound"),
        ("/org/noise/resolve/main/..%2Fsecret", "EntryNotFound"),
    ],
)
async def test_what_is_absent_says_which_part_is(url: str, path: str, code: str) -> None:
    from yarl import URL

    async with aiohttp.ClientSession() as client, client.get(URL(url + path, encoded=True)) as response:
        assert (response.status, response.headers["X-Error-Code"]) == (404, code)


def test_the_model_is_what_safetensors_reads(tmp_path: Path) -> None:
    """Tensors in the order of files and places are the bytes that were heard of, and the index
    names the file of each."""
    heard = blake3()
    list(write_model(tmp_path, files=FILES, file_bytes=FILE_BYTES, tensors=TENSORS, hear=heard.update))
    loaded = list(arrays(tmp_path))
    found = blake3()
    for array in loaded:
        found.update(memoryview(array).cast("B"))
    assert len(loaded) == FILES * TENSORS and found.hexdigest() == heard.hexdigest()
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in places.items():
        with safe_open(tmp_path / file, framework="numpy") as opened:
            assert opened.get_tensor(name).nbytes == FILE_BYTES // TENSORS


async def test_entries_are_given_by_path(url: str, model: Path) -> None:
    name = "model-00001-of-00002.safetensors"
    paths = {"paths": ["config.json", name, "none"]}
    async with aiohttp.ClientSession() as client:
        async with client.post(f"{url}/api/models/org/noise/paths-info/main", data=paths) as response:
            entries = {entry["path"]: entry for entry in await response.json()}
        assert entries.keys() == {"config.json", name}
        assert entries[name]["lfs"]["oid"] == hashlib.sha256((model / name).read_bytes()).hexdigest()
        for path in ("/api/models/org/noise/tree/main", "/org/noise/resolve/main/config.json"):
            async with client.post(url + path) as response:
                assert response.status == 405
