"""A loader of weights reads a model through an agent's S3 interface while a broadcast brings it
(Run:ai Model Streamer; `pip install 'runai-model-streamer[s3]'`, which brings torch)."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from site_rig import Agent, Site
from test_s3_processes import MIB, agent_of, client_of, publish
from waits import wait_until

TENSORS, TENSOR_BYTES = 12, 2 * MIB
RATE_BYTES_S = 1e6
"""Of the origin, until the first tensor is here."""
LOAD = """
import hashlib, json, sys
from runai_model_streamer import SafetensorsStreamer, list_safetensors
print("ready", flush=True)
sys.stdin.readline()
files = list_safetensors("s3://models/")
with SafetensorsStreamer() as streamer:
    streamer.stream_files(files)
    for name, tensor in streamer.get_tensors():
        print(json.dumps([name, hashlib.sha256(tensor.numpy().tobytes()).hexdigest()]), flush=True)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("runai_model_streamer", "runai_model_streamer_s3")),
        reason="needs runai-model-streamer[s3]",
    ),
]


def safetensors(tensors: dict[str, bytes]) -> bytes:
    """A file of one-dimensional tensors of 32-bit integers (the format of safetensors)."""
    header, at = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "I32", "shape": [len(data) // 4], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(tensors.values())


def test_tensors_come_while_the_broadcast_brings_them(site: Site, tmp_path: Path) -> None:
    drawn = random.Random(3)
    tensors = {f"layer.{number:02}": drawn.randbytes(TENSOR_BYTES) for number in range(TENSORS)}
    half = TENSORS // 2
    parts = [dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])]
    names = [f"model-{number}-of-2.safetensors" for number in (1, 2)]
    publish(site, {name: safetensors(part) for name, part in zip(names, parts, strict=True)}, "team/model:v1")
    site.origin.rate_bytes_s = RATE_BYTES_S
    reader = agent_of(site, "h0", bucket="models=team/model:v1")
    others = [Agent(site, f"o{number}").start() for number in range(2)]
    assert len(client_of(reader).list_objects_v2(Bucket="models")["Contents"]) == 2
    environment = {
        **os.environ,
        "AWS_ENDPOINT_URL": f"http://{reader.options['s3']}",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "RUNAI_STREAMER_CONCURRENCY": "1",
        "no_proxy": "127.0.0.1",
    }
    with (tmp_path / "errors").open("wb") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        loader = subprocess.Popen([sys.executable, "-c", LOAD], env=environment, text=True, **pipes)
        assert loader.stdin is not None and loader.stdout is not None
        assert loader.stdout.readline() == "ready\n", (tmp_path / "errors").read_text()[-3000:]
        pulls = [agent.start_pull(package="team/model:v1") for agent in others]
        wait_until(lambda: sum(site.origin.sent.values()) > MIB)
        loader.stdin.write("go\n")
        loader.stdin.flush()
        first = loader.stdout.readline()
        here = reader.received()
        site.origin.rate_bytes_s = 0.0
        rest = loader.stdout.read()
        assert loader.wait() == 0, (tmp_path / "errors").read_text()[-3000:]
    found = dict(json.loads(line) for line in (first + rest).splitlines())
    assert found == {name: hashlib.sha256(data).hexdigest() for name, data in tensors.items()}
    assert here < 0.8 * TENSORS * TENSOR_BYTES
    for pull in pulls:
        assert pull.result().state == "done"
    assert sum(site.origin.sent.values()) < 1.1 * TENSORS * TENSOR_BYTES
