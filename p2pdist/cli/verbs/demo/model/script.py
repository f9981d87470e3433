"""The demo's second act, in order: a model and its hub, agents, downloads on all of them at once,
tensors in memory."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import sys
import time
from pathlib import Path

import aiohttp
from blake3 import blake3

from p2pdist.cli.verbs.demo.cluster import CALL_S, Cluster, Host
from p2pdist.cli.verbs.demo.figures import megabytes
from p2pdist.cli.verbs.demo.ingredients import install
from p2pdist.cli.verbs.demo.model.figures import Load, ModelFigures
from p2pdist.cli.verbs.demo.model.weights import write_model
from p2pdist.cli.verbs.demo.script import Script
from p2pdist.model.errors import Corrupt, DiskFull, P2PDistError, UsageError

REPOSITORY = "demo/model"
FILES, TENSORS = 4, 16
MODEL_BYTES, MODEL_BYTES_SMALL = 1 << 30, 64 << 20
MODEL_BYTES_MAX = 1 << 38
CLIENT = ("huggingface_hub", "safetensors", "numpy")
"""What the program of a host imports, and how pip calls it."""


async def play_model(script: Script) -> ModelFigures:
    """Everything, in order. Raises P2PDistError for the first failure, after tidying up."""
    options = script.options
    size = options.size or (MODEL_BYTES_SMALL if options.small else MODEL_BYTES)
    if not FILES * TENSORS * 4 <= size <= MODEL_BYTES_MAX:
        raise UsageError(f"a model of {size} bytes is not one of 256 bytes to {MODEL_BYTES_MAX}", remedy="See --size")
    async with script.place() as cluster:
        needed, free = size * (1 + 2 * options.agents), shutil.disk_usage(cluster.place).free
        if free < needed:
            raise DiskFull(str(cluster.place), needed=needed, free=free)
        timeout, connector = aiohttp.ClientTimeout(total=30), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
            places = await _client(script, cluster)
            figures = await _model(script, cluster, size)
            script.say(f"Starting a hub, a tracker and {options.agents} agents")
            began = time.monotonic()
            await cluster.start_with_hub(client, cluster.place / "model", REPOSITORY)
            script.say(f"  ready after {time.monotonic() - began:.1f} s")
            script.say(f"snapshot_download of {REPOSITORY} on {options.agents} hosts at once")
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_load(cluster, client, host, places)) for host in cluster.hosts]
            figures.loads = [task.result() for task in tasks]
            counted = await cluster.counted(client)
            figures.sent, figures.heads = dict(counted["sent"]), dict(counted["heads"])
    figures.untidy = cluster.untidy
    return figures


async def _client(script: Script, cluster: Cluster) -> list[str]:
    """Where a host's program finds what this Python lacks, which is installed for the demo
    alone."""
    missing = [name for name in CLIENT if importlib.util.find_spec(name) is None]
    if not missing:
        return []
    script.say(f"Client: installing {', '.join(missing)} with pip")
    target = cluster.place / "client"
    await install(cluster.processes, target, tuple(missing))
    return [str(target)]


async def _model(script: Script, cluster: Cluster, size: int) -> ModelFigures:
    """The files that the hub has."""
    began, digest, directory = time.monotonic(), blake3(), cluster.place / "model"
    for _ in write_model(directory, files=FILES, file_bytes=size // FILES, tensors=TENSORS, hear=digest.update):
        await asyncio.sleep(0)  # here the demo can be interrupted
    files = [path for path in directory.iterdir() if path.is_file()]
    total = sum(path.stat().st_size for path in files)
    script.say(f"Model: {len(files)} files, {megabytes(total)}, {FILES * TENSORS} tensors")
    return ModelFigures(
        script.options.agents, len(files), total, FILES * TENSORS, digest.hexdigest(), time.monotonic() - began
    )


async def _load(cluster: Cluster, client: aiohttp.ClientSession, host: Host, places: list[str]) -> Load:
    """Download and load on one host."""
    home = Path(cluster.place / "homes" / host.name)
    variables = {"HF_ENDPOINT": f"http://{host.mirror}/hf", "HF_HOME": str(home), "no_proxy": "127.0.0.1"}
    variables |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    what = f"snapshot_download on {host.name}"
    before = await cluster.received(client, host)
    done = await cluster.processes.call(
        what,
        [sys.executable, "-m", "p2pdist.cli.verbs.demo.model.loader", REPOSITORY, *places],
        timeout_s=CALL_S,
        variables=variables,
    )
    if done.code != 0:
        raise P2PDistError(
            f"{what} ended with exit code {done.code}: {done.last_words()}",
            remedy="Run the demo again with --keep: its directory has the logs",
        )
    after = await cluster.received(client, host)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise Corrupt(
            f"{what} printed no report: {done.last_words()}",
            remedy="Run the demo again with --keep: its directory has the logs",
        )
    report = json.loads(lines[-1])
    return Load(
        host.name,
        float(report["began"]),
        float(report["there"]),
        float(report["load_s"]),
        str(report["loader"]),
        int(report["tensors"]),
        str(report["digest"]),
        after.origin - before.origin,
        after.peers - before.peers,
    )
