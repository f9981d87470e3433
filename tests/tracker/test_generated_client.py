"""A client that openapi-python-client (https://github.com/openapi-generators/openapi-python-client)
makes from the served descriptions: it is made without a warning about them, and asks a real tracker
and a real agent."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import aiohttp
import pytest
from test_preseeds_http import blobs, connected, layout, package, tracker

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.api.server import make_apps
from p2pdist.model.digest import Digest
from p2pdist.transfer.openapi import DOCUMENT_PATH, INTERFACE

GENERATOR = Path(sys.executable).parent.parent / "api-generator" / "bin"
CONFIG = """
content_type_overrides:
  application/vnd.msgpack: application/octet-stream
  application/x-ndjson: application/octet-stream
  application/x-pem-file: application/octet-stream
  application/vnd.p2pdist.bundle.v1+msgpack: application/octet-stream
  application/vnd.p2pdist.trace: application/octet-stream
post_hooks: []
"""
"""Kinds of content that the generator does not know are bytes to it."""

CALLS = """
import sys
from made.tracker import Client
from made.tracker.api.default import (
    get_v1_hosts, get_v1_preseeds, get_v1_preseeds_id, get_v1_swarms, post_v1_preseeds, post_v1_evictions,
)
from made.tracker.models import EvictRequest, PreseedRequest, Problem, Progress

client = Client(sys.argv[1])
assert sorted(host.host for host in get_v1_hosts.sync(client=client)) == ["h1", "h2"]
made = post_v1_preseeds.sync(client=client, body=PreseedRequest(package=sys.argv[2], id="night", hosts=["h1", "h2"]))
assert isinstance(made, Progress) and made.hosts_total == 2, made
ended = get_v1_preseeds_id.sync("night", client=client, wait_s="30", quorum="1")
assert isinstance(ended, Progress) and ended.hosts_done == 2, ended
assert [summary.id for summary in get_v1_preseeds.sync(client=client)] == ["night"]
assert len(get_v1_swarms.sync(client=client)) <= 1
refused = post_v1_evictions.sync(client=client, body=EvictRequest(package="team/a:v1", selector="zone=z9"))
assert isinstance(refused, Problem) and refused.status == 404, refused
print("done")
"""

__all__ = ["blobs", "layout"]  # fixtures
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not GENERATOR.is_dir(), reason="needs the generator of clients that make setup-all installs"),
]


async def run(*words: str, within: Path) -> str:
    """What a program prints; it ends well."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = await asyncio.create_subprocess_exec(
        *words, cwd=within, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    printed = (await process.communicate())[0].decode()
    assert process.returncode == 0, printed
    return printed


async def make_client(document: bytes, name: str, within: Path) -> None:
    """Make the package `made.<name>` from a description. A warning fails."""
    (within / "config.yaml").write_text(CONFIG)
    (within / f"{name}.json").write_bytes(document)
    (within / "made").mkdir(exist_ok=True)
    words = ("generate", "--path", f"{name}.json", "--output-path", f"made/{name}", "--meta", "none")
    printed = await run(
        str(GENERATOR / "openapi-python-client"), *words, "--config", "config.yaml", "--fail-on-warning", within=within
    )
    assert "WARNING" not in printed, printed


async def test_a_generated_client_orders_a_preseed_and_waits_for_it(
    layout: Path, blobs: list[Digest], tmp_path: Path
) -> None:
    async with tracker(layout) as at, connected(at, "a/r/h1", "b/r/h2"), aiohttp.ClientSession() as http:
        async with http.get(at.url + DOCUMENT_PATH) as answer:
            await make_client(await answer.read(), "tracker", tmp_path)
        printed = await run(str(GENERATOR / "python"), "-c", CALLS, at.url, package(blobs[0]), within=tmp_path)
        assert printed == "done\n"


async def test_clients_of_an_agent_are_generated(tmp_path: Path) -> None:
    agent = Agent(AgentSettings((), "h1", "127.0.0.1:7071", tmp_path / "store"))
    try:
        for name, app in zip(("public", "local"), make_apps(agent), strict=True):
            await make_client(app[INTERFACE].encoded, name, tmp_path)
            await run(str(GENERATOR / "python"), "-c", f"import made.{name}, made.{name}.models", within=tmp_path)
    finally:
        await agent.stop()
