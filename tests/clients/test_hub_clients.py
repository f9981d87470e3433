"""Real clients of model hubs, in three versions, read through real agents: byte-equal, from one
copy, and by their own retry after the agent was killed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from door_rig import MirrorAgent
from hub_rig import Hub, running_hub
from ports import free_port
from site_rig import Site, wait_for
from waits import wait_until


class Relay:
    """A port that leads to an agent, and lets connections wait while that is not there: clients try
    again for five seconds, and an agent may take longer to start."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        serving = asyncio.start_server(self._carry, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result(30)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                inner, outer = await asyncio.open_connection("127.0.0.1", self._target)
                break
            except OSError:
                await asyncio.sleep(0.1)
        await asyncio.gather(_pump(reader, outer), _pump(inner, writer))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()


ENVIRONMENTS = Path(sys.prefix) / "hub-clients"
VERSIONS = ("0.36.0", "1.29.0", "2.4.0")
FILES = {
    "config.json": b'{"model_type": "tiny"}\n',
    "nested/vocab.txt": b"a\nb\n",
    "model-1.safetensors": os.urandom(3 << 20),
    "nested/model-2.safetensors": os.urandom((1 << 20) + 17),
}
LARGE = sum(len(data) for path, data in FILES.items() if path.endswith(".safetensors"))

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("hub-clients")]


class HubClientSite(Site):
    """A site whose tracker reads a hub."""

    def __init__(self, directory: Path, hub: Hub) -> None:
        super().__init__(directory)
        self.hub = hub

    def start_tracker(self) -> None:
        words = ["tracker", "--listen", f"127.0.0.1:{self.tracker_port}", "--state", str(self.directory / "state")]
        log = self.directory / "tracker.log"
        self.tracker_process = self.spawn([*words, "--hub", self.hub.base, "--no-discovery"], log)
        wait_for(self.tracker_url + "/healthz", self.tracker_process, log)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubClientSite]:
    with running_hub() as hub:
        hub.repository("org/tiny").commit(FILES)
        site = HubClientSite(tmp_path_factory.mktemp("hub"), hub)
        try:
            site.start_tracker()
            yield site
        finally:
            site.close()


@pytest.fixture
def agent(site: HubClientSite, request: pytest.FixtureRequest) -> Iterator[MirrorAgent]:
    agent = MirrorAgent(site, f"h{free_port()}")
    agent.start()
    yield agent
    agent.stop()


@pytest.fixture(params=VERSIONS)
def python(request: pytest.FixtureRequest) -> Path:
    python = ENVIRONMENTS / request.param / "bin" / "python"
    if not python.exists():
        pytest.skip(f"needs huggingface_hub {request.param}: make setup-all")
    return python


def environment(agent: MirrorAgent, home: Path, **more: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("HF_") and "proxy" not in name.lower()
    }
    return {
        **kept,
        "HF_ENDPOINT": f"http://{agent.mirror}/hf",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    } | more


def call(python: Path, agent: MirrorAgent, home: Path, program: str, **more: str) -> str:
    """What a program of a client prints; its errors where it fails."""
    done = subprocess.run(
        [str(python), "-c", program],
        env=environment(agent, home, **more),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def same(place: Path) -> bool:
    return all((place / path).read_bytes() == data for path, data in FILES.items())


def large_bytes(hub: Hub) -> int:
    """Bytes of files of LFS that were sent."""
    return sum(length for name, length in list(hub.sent.items()) if len(name) == 64)


SNAPSHOT = "from huggingface_hub import snapshot_download; print(snapshot_download('org/tiny'))"
ERRORS = """
from huggingface_hub import hf_hub_download, HfApi
from huggingface_hub.utils import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError
for arguments, expected in [
    (dict(repo_id='org/tiny', filename='no.json'), EntryNotFoundError),
    (dict(repo_id='org/tiny', filename='config.json', revision='no'), RevisionNotFoundError),
    (dict(repo_id='org/none', filename='config.json'), RepositoryNotFoundError),
    (dict(repo_id='org/gated', filename='config.json'), GatedRepoError),
]:
    try:
        hf_hub_download(**arguments)
    except expected:
        continue
    raise SystemExit(f'{arguments} raised nothing')
api = HfApi()
print(sorted(api.list_repo_files('org/tiny')))
print([found.path for found in api.get_paths_info('org/tiny', ['config.json', 'nope'])])
print([branch.name for branch in api.list_repo_refs('org/tiny').branches])
print(api.model_info('org/tiny', files_metadata=True).sha)
"""


def test_a_snapshot_is_whole_and_the_second_call_takes_nothing(
    python: Path, agent: MirrorAgent, site: HubClientSite, tmp_path: Path
) -> None:
    started = large_bytes(site.hub)
    place = Path(call(python, agent, tmp_path, SNAPSHOT))
    assert same(place)
    before = dict(site.hub.sent)
    assert large_bytes(site.hub) - started < 2 * LARGE  # one copy, and what a busy machine takes again
    assert Path(call(python, agent, tmp_path, SNAPSHOT)) == place
    assert dict(site.hub.sent) == before


def test_failures_are_those_of_the_hub(python: Path, agent: MirrorAgent, site: HubClientSite, tmp_path: Path) -> None:
    gated = site.hub.repository("org/gated")
    if not gated.commits:
        gated.gated = True
        gated.commit({"config.json": b"{}"})
    files, paths, branches, sha = call(python, agent, tmp_path, ERRORS).splitlines()
    assert files == str(sorted(FILES)) and paths == "['config.json']" and branches == "['main']"
    assert sha == site.hub.repository("org/tiny").refs["main"]


def test_a_client_goes_on_after_its_agent_was_killed(
    python: Path, agent: MirrorAgent, site: HubClientSite, tmp_path: Path
) -> None:
    data, hub = os.urandom(6 << 20), site.hub
    name = f"org/killed-{tmp_path.name[:40].strip('0123456789_')}-{free_port()}"
    hub.repository(name).commit({"model.safetensors": data})
    digest = hashlib.sha256(data).hexdigest()
    hub.rate_bytes_s = 512 << 10  # the agent is killed long before it has everything
    program = f"from huggingface_hub import hf_hub_download; print(hf_hub_download({name!r}, 'model.safetensors'))"
    relay = Relay(agent.mirror_port)
    endpoint = f"http://127.0.0.1:{relay.port}/hf"
    patient = environment(
        agent, tmp_path, HF_ENDPOINT=endpoint, HF_HUB_DOWNLOAD_TIMEOUT="120", HF_HUB_ETAG_TIMEOUT="120"
    )
    client: subprocess.Popen[Any] = subprocess.Popen(
        [str(python), "-c", program], env=patient, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        wait_until(lambda: hub.sent[digest] > 1 << 20, "some of the file was read", within_s=180)
        assert agent.process is not None
        agent.process.send_signal(signal.SIGKILL)
        agent.process.wait()
        agent.start()
        hub.rate_bytes_s = 0.0
        printed, errors = client.communicate(timeout=240)
        if "0.36" in str(python):  # it asks again by itself only where a connection cannot be made
            assert client.returncode != 0
            again = call(python, agent, tmp_path, program, HF_ENDPOINT=endpoint)
            assert Path(again).read_bytes() == data
        else:
            assert client.returncode == 0, errors.decode()[-3000:]
            assert Path(printed.decode().strip()).read_bytes() == data
        assert hub.sent[digest] < 2 * len(data)  # what the agent had verified was not read again
    finally:
        hub.rate_bytes_s = 0.0
        client.kill()
        client.wait()
        relay.close()
