"""Programs that load models and data sets, read through real agents: transformers, datasets and the
JavaScript client. What they load is what was pushed, a second call takes nothing from the hub, and
they go on after their agent was killed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from door_rig import MirrorAgent
from hub_clients_rig import ENVIRONMENTS, HubClientSite, Relay, call, environment, killed_between
from hub_rig import running_hub
from ports import free_port

PYTHON = str(ENVIRONMENTS / "loaders" / "bin" / "python")
NODE_MODULES = ENVIRONMENTS / "node"

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("hub-clients")]
python = pytest.mark.skipif(not Path(PYTHON).exists(), reason="needs transformers and datasets: make setup-all")
node = pytest.mark.skipif(
    not (NODE_MODULES / "node_modules").exists() or not shutil.which("node"),
    reason="needs Node and @huggingface/hub: make setup-all",
)


def safetensors(**tensors: tuple[list[int], bytes]) -> bytes:
    """A file of 32-bit floats: the length of its head, the head, the tensors."""
    head: dict[str, Any] = {}
    end = 0
    for name, (shape, data) in tensors.items():
        head[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, data in tensors.values())


VOCABULARY = {"[UNK]": 0, "swarm": 1, "of": 2, "hosts": 3}
MODEL = {
    "config.json": json.dumps(
        {"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 4}
    ).encode(),
    "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}',
    "tokenizer.json": json.dumps(
        {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
            "model": {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "[UNK]"},
        }
    ).encode(),
    "nested/notes.txt": b"of a model\n",
    "model.safetensors": safetensors(
        a=([2, 3], struct.pack("<6f", *range(6))), b=([1 << 19], struct.pack("<f", 0.5) * (1 << 19))
    ),
}  # fmt: skip
SUMS = {path: hashlib.sha256(data).hexdigest() for path, data in MODEL.items()}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubClientSite]:
    with running_hub() as hub:
        hub.repository("org/bert").commit(MODEL)
        site = HubClientSite(tmp_path_factory.mktemp("hub"), hub)
        try:
            site.start_tracker()
            yield site
        finally:
            site.close()


@pytest.fixture
def agent(site: HubClientSite) -> Iterator[MirrorAgent]:
    agent = MirrorAgent(site, f"h{free_port()}")
    agent.start()
    yield agent
    agent.stop()


TRANSFORMERS = """
import hashlib, json, sys
from pathlib import Path
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import cached_file
config, tokenizer = AutoConfig.from_pretrained('org/bert'), AutoTokenizer.from_pretrained('org/bert')
files = {name: cached_file('org/bert', name) for name in sys.argv[1:]}
weights = {name: [list(tensor.shape), float(tensor.sum())] for name, tensor in load_file(files['model.safetensors']).items()}
sums = {name: hashlib.sha256(Path(path).read_bytes()).hexdigest() for name, path in files.items()}
print(json.dumps([config.hidden_size, tokenizer('swarm of hosts')['input_ids'], weights, sums]))
"""


@python
def test_transformers_loads_a_model(agent: MirrorAgent, site: HubClientSite, tmp_path: Path) -> None:
    words = [PYTHON, "-c", TRANSFORMERS, *MODEL]
    size, tokens, weights, sums = json.loads(call(words, agent, tmp_path))
    assert (size, tokens, sums) == (8, [1, 2, 3], SUMS)
    assert weights == {"a": [[2, 3], 15.0], "b": [[1 << 19], float(1 << 18)]}
    before = dict(site.hub.sent)
    assert json.loads(call(words, agent, tmp_path))[3] == SUMS
    assert json.loads(call(words, agent, tmp_path / "another"))[3] == SUMS
    assert dict(site.hub.sent) == before, "the second call takes nothing from the hub"


MAKE_TABLE = """
import sys, pyarrow, pyarrow.parquet
table = pyarrow.table({'number': list(range(5000)), 'text': ['row %d' % number for number in range(5000)]})
pyarrow.parquet.write_table(table, sys.argv[1])
"""
DATASETS = """
import json, sys
from datasets import load_dataset
rows = load_dataset(sys.argv[1])
print(json.dumps({split: [len(part), part[len(part) - 1]] for split, part in rows.items()}))
"""


@python
def test_datasets_loads_tables_and_lines(agent: MirrorAgent, site: HubClientSite, tmp_path: Path) -> None:
    table = tmp_path / "table.parquet"
    subprocess.run([PYTHON, "-c", MAKE_TABLE, str(table)], check=True, timeout=240)
    lines = "".join(json.dumps({"number": number}) + "\n" for number in range(100)).encode()
    readme = {"README.md": b"# Rows\n"}
    site.hub.repository("org/table", "datasets").commit(
        {**readme, "data/train-00000-of-00001.parquet": table.read_bytes()}
    )
    site.hub.repository("org/lines", "datasets").commit({**readme, "train.jsonl": lines})
    expected = {
        "org/table": {"train": [5000, {"number": 4999, "text": "row 4999"}]},
        "org/lines": {"train": [100, {"number": 99}]},
    }
    for name, rows in expected.items():
        words = [PYTHON, "-c", DATASETS, name]
        assert json.loads(call(words, agent, tmp_path / "first").splitlines()[-1]) == rows
        before = dict(site.hub.sent)
        assert json.loads(call(words, agent, tmp_path / "first").splitlines()[-1]) == rows
        assert json.loads(call(words, agent, tmp_path / "second").splitlines()[-1]) == rows
        assert dict(site.hub.sent) == before, "the second call takes nothing from the hub"


NODE = """
import { createHash } from "node:crypto";
import { createRequire } from "node:module";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
const hub = createRequire(process.env.MODULES + "/")("@huggingface/hub");
const repo = process.argv[1], hubUrl = process.env.HF_ENDPOINT, cacheDir = process.env.CACHE;
const sum = data => createHash("sha256").update(data).digest("hex");
console.debug = () => {};
const sums = {}, kept = {};
for await (const file of hub.listFiles({ repo, hubUrl, recursive: true }))
  if (file.type === "file")
    sums[file.path] = sum(Buffer.from(await (await hub.downloadFile({ repo, hubUrl, path: file.path })).arrayBuffer()));
const directory = await hub.snapshotDownload({ repo, hubUrl, cacheDir });
for (const path of Object.keys(sums)) kept[path] = sum(await readFile(join(directory, path)));
const exists = [];
for (const path of [Object.keys(sums)[0], "none.json"]) exists.push(await hub.fileExists({ repo, hubUrl, path }));
console.log(JSON.stringify([sums, kept, exists]));
"""


def node_words(repository: str) -> list[str]:
    return ["node", "--input-type=module", "-e", NODE, repository]


@node
def test_the_javascript_client_reads_a_model(agent: MirrorAgent, site: HubClientSite, tmp_path: Path) -> None:
    more = {"MODULES": str(NODE_MODULES), "CACHE": str(tmp_path / "cache")}
    assert json.loads(call(node_words("org/bert"), agent, tmp_path, **more)) == [SUMS, SUMS, [True, False]]
    before = dict(site.hub.sent)
    assert json.loads(call(node_words("org/bert"), agent, tmp_path, **more)) == [SUMS, SUMS, [True, False]]
    assert dict(site.hub.sent) == before, "the second call takes nothing from the hub"


LARGE = """
import hashlib, sys
from pathlib import Path
from transformers.utils import cached_file
print(hashlib.sha256(Path(cached_file(sys.argv[1], 'model.safetensors')).read_bytes()).hexdigest())
"""


@pytest.mark.parametrize("client", [pytest.param("transformers", marks=python), pytest.param("node", marks=node)])
def test_a_loader_goes_on_after_its_agent_was_killed(
    client: str, agent: MirrorAgent, site: HubClientSite, tmp_path: Path
) -> None:
    data, hub, name = os.urandom(6 << 20), site.hub, f"org/killed-{client}"
    hub.repository(name).commit({"model.safetensors": data})
    digest = hashlib.sha256(data).hexdigest()
    words = [PYTHON, "-c", LARGE, name] if client == "transformers" else node_words(name)
    relay = Relay(agent.mirror_port)
    more = {
        "HF_ENDPOINT": f"http://127.0.0.1:{relay.port}/hf", "HF_HUB_DOWNLOAD_TIMEOUT": "120", "HF_HUB_ETAG_TIMEOUT": "120",
        "MODULES": str(NODE_MODULES), "CACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    try:
        variables = environment(agent, tmp_path, **more)
        code, printed, errors = killed_between(words, agent, hub, digest, variables)
        if client == "node":  # it asks again only when it is called again
            assert code != 0
            printed = call(words, agent, tmp_path, **more)
        else:
            assert code == 0, errors[-3000:]
        assert digest in printed
        assert hub.sent[digest] < 2 * len(data)  # what the agent had verified was not read again
    finally:
        relay.close()
