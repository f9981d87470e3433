"""One host's job in a yardstick run: asks the local agent for a blob as soon as it is told to, and
marks the end.

It is started with the agent and connected before the run begins, as the agents of the other methods
are: programs that start at the same moment on two cores would be what is measured. For the same
reason it ends without taking its interpreter apart, which takes longer than all that it does, while
other hosts are at their last pieces. It waits at the FIFO go in DIR; that the run has begun stands
in the file GO beside it, for a host that is started anew meanwhile.

Usage: pull.py DIR SHA256 OUT DONE [wait]
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import sys
import time
from pathlib import Path

RETRY_S = 0.2


class LocalAgent(http.client.HTTPConnection):
    """HTTP over the agent's Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("agent")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def wait_to_go(directory: Path) -> None:
    """Return when the run has begun."""
    fifo = directory / "go"
    with contextlib.suppress(FileExistsError):
        os.mkfifo(fifo)
    (directory / "READY").touch()
    if not (directory / "GO").exists():
        fifo.read_bytes()


def pull(agent: LocalAgent, sha256: str, output: str) -> bool:
    """Whether the agent has given the blob."""
    body = json.dumps({"blob": f"sha256:{sha256}", "output": output, "wait": True})
    try:
        agent.request("POST", "/v1/pulls", body)
        answer = agent.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException):  # an agent that is restarted
        agent.close()
        return False
    return answer.status == 200


def main(directory: str, sha256: str, output: str, done: str, wait: str = "") -> None:
    agent = LocalAgent(Path(directory) / "sock")
    agent.connect()
    if wait:
        wait_to_go(Path(directory))
    while not pull(agent, sha256, output):
        time.sleep(RETRY_S)
    Path(done).touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
