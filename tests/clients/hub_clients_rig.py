"""Programs of other projects that read models and data sets through an agent: their environments,
and a site whose tracker reads a hub."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from door_rig import MirrorAgent
from hub_rig import Hub
from site_rig import Site, wait_for
from waits import wait_until

ENVIRONMENTS = Path(sys.prefix) / "hub-clients"


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


def call(words: Sequence[str], agent: MirrorAgent, home: Path, **more: str) -> str:
    """What a client prints; its errors where it fails."""
    done = subprocess.run(
        words,
        env=environment(agent, home, **more),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def large_bytes(hub: Hub) -> int:
    """Bytes of files of LFS that were sent."""
    return sum(length for name, length in list(hub.sent.items()) if len(name) == 64)


def killed_between(
    words: Sequence[str], agent: MirrorAgent, hub: Hub, digest: str, variables: Mapping[str, str]
) -> tuple[int, str, str]:
    """The exit code, output and errors of a client whose agent is killed and started again while a
    file comes, of which the hub has sent more than a MiB."""
    hub.rate_bytes_s = 512 << 10  # the agent is killed long before it has everything
    client = subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: hub.sent[digest] > 1 << 20, "some of the file was read", within_s=180)
        assert agent.process is not None
        agent.process.send_signal(signal.SIGKILL)
        agent.process.wait()
        agent.start()
        hub.rate_bytes_s = 0.0
        printed, errors = client.communicate(timeout=240)
        return client.returncode, printed.strip(), errors
    finally:
        hub.rate_bytes_s = 0.0
        client.kill()
        client.wait()
