"""Whole processes that find each other on a network: hosts are network namespaces on one bridge,
and all traffic stays there."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from site_rig import P2PDIST, Agent, Site, until

from p2pdist.agent.api.client import LocalClient

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))
from authority import Authority

MIB = 1 << 20
SIZE = 6 * MIB
_numbers = itertools.count(1)

pytestmark = pytest.mark.root


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Lan:
    """Hosts on a bridge, which lives in a namespace of its own; everything ends with `close`."""

    def __init__(self, directory: Path) -> None:
        self.site = Site(directory)
        self._prefix = f"pdd-{os.getpid()}-{next(_numbers)}"
        self._bridge = f"{self._prefix}-lan"
        self._namespaces: list[str] = []
        self._hosts = itertools.count(1)

    def open(self) -> None:
        self._add(self._bridge)
        ip("-n", self._bridge, "link", "add", "lan", "type", "bridge", "mcast_snooping", "0")
        ip("-n", self._bridge, "link", "set", "lan", "up")

    def _add(self, namespace: str) -> None:
        ip("netns", "add", namespace)
        self._namespaces.append(namespace)

    def host(self) -> tuple[str, str]:
        """A new host: its namespace and its address."""
        number = next(self._hosts)
        namespace, address = f"{self._prefix}-h{number}", f"10.77.0.{number}"
        self._add(namespace)
        veth = ["link", "add", "eth0", "type", "veth", "peer", "name", f"port{number}", "netns", self._bridge]
        ip("-n", namespace, *veth)
        ip("-n", self._bridge, "link", "set", f"port{number}", "master", "lan", "up")
        ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        ip("-n", namespace, "link", "set", "lo", "up")
        ip("-n", namespace, "link", "set", "eth0", "up")
        return namespace, address

    def spawn(self, namespace: str, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Run p2pdist at a host; logs go to <name>.log."""
        command = ["ip", "netns", "exec", namespace, *P2PDIST, *words]
        with self.log(name).open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        self.site._processes.append(process)
        return process

    def log(self, name: str) -> Path:
        return self.site.directory / f"{name}.log"

    def tracker(self, name: str, *words: str) -> tuple[subprocess.Popen[bytes], str]:
        """A tracker that is told nothing of the network, and its URL."""
        namespace, address = self.host()
        process = self.spawn(
            namespace, name, "tracker", "--origin", f"file://{self.site.layout}", "--name", name, *words
        )
        return process, f"http://{address}:7070"

    def agent(self, name: str, *words: str) -> Member:
        return Member(self, name, *words)

    def close(self) -> None:
        try:
            self.site.close()
        finally:
            for namespace in reversed(self._namespaces):
                subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


class Member(Agent):
    """An agent that is told nothing of the network."""

    def __init__(self, lan: Lan, name: str, *words: str) -> None:
        super().__init__(lan.site, name)
        self.namespace, self.address = lan.host()
        local = ["--store", str(self.store), "--socket", str(self.socket), "--name", name]
        self.process = lan.spawn(self.namespace, name, "agent", *local, *words)

    def tracker(self) -> str:
        """The URL of the tracker that answers; "" when there is none."""
        tracker = LocalClient(self.socket).status()["tracker"]
        return str(tracker["url"]) if tracker["connected"] else ""

    def is_up(self) -> bool:
        return self._local("/healthz") == 200


@pytest.fixture
def lan() -> Iterator[Lan]:
    with tempfile.TemporaryDirectory(prefix="pdd-") as directory:
        made = Lan(Path(directory))
        try:
            try:
                made.open()
            except OSError as error:
                pytest.skip(f"no network namespaces here: {error}")
            yield made
        finally:
            made.close()


def check(path: Path, digest: str) -> None:
    assert "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest() == digest


@pytest.mark.slow
def test_an_agent_with_nothing_but_a_store_finds_the_tracker_and_pulls_and_then_another_one(lan: Lan) -> None:
    first, first_url = lan.tracker("t1")
    h1 = lan.agent("h1")
    digest = lan.site.publish(SIZE)
    until(h1.is_up)
    output = lan.site.directory / "out"
    status = h1.pull(blob=digest, output=str(output))  # waits until a tracker is found
    assert status.bytes_origin == SIZE, "by the tracker's lease"
    check(output, digest)
    assert h1.tracker() == first_url
    h2 = lan.agent("h2")
    until(h2.is_up)
    assert h2.pull(blob=digest).bytes_peers == SIZE, "it is told where h1 is, though nothing resolves its name"
    _, second_url = lan.tracker("t2")
    until(lambda: "discovery on eth0" in lan.log("t2").read_text())
    first.kill()
    until(lambda: h1.tracker() == second_url)


@pytest.mark.slow
def test_an_agent_with_a_join_file_obeys_the_trackers_of_its_fleet_alone(lan: Lan) -> None:
    """Whatever else announces itself: a plain tracker, and one of another fleet."""
    access = lan.site.directory / "access"
    for name in ("ours", "theirs"):
        (access / name).mkdir(parents=True)
    lan.tracker("a-plain")
    lan.tracker("a-theirs", "--access", str(access / "theirs" / "access.toml"))
    until(lambda: (access / "theirs" / "join-default.token").exists())
    _, url = lan.tracker("ours", "--access", str(access / "ours" / "access.toml"))
    token = access / "ours" / "join-default.token"
    until(token.exists)
    member = lan.agent("h1", "--join-file", str(token))
    digest = lan.site.publish(SIZE)
    until(member.is_up)
    assert member.pull(blob=digest).bytes_origin == SIZE
    assert member.tracker() == url.replace("http", "https")


@pytest.mark.slow
def test_networks_with_different_names_do_not_see_each_other(lan: Lan) -> None:
    _, red = lan.tracker("red", "--network-id", "red")
    _, blue = lan.tracker("blue", "--network-id", "blue")
    h1 = lan.agent("h1", "--network-id", "red")
    h2 = lan.agent("h2", "--network-id", "blue")
    green = lan.agent("h3", "--network-id", "green", "--tracker-wait", "2")
    digest = lan.site.publish(SIZE)
    for member, url in ((h1, red), (h2, blue)):
        until(lambda member=member, url=url: member.is_up() and member.tracker() == url)  # type: ignore[misc]
    for member in (h1, h2):
        assert member.pull(blob=digest).bytes_origin == SIZE, "the other network's copy is not seen"
    to_store = ("blob", "pull", digest, "-o", "/dev/null", "--socket")
    code, done, _ = lan.site.command(*to_store, str(h1.socket))
    assert (code, done["bytes_cached"]) == (0, SIZE) and Path("/dev/null").is_char_device()
    failed, _, errors = lan.site.command(*to_store, str(green.socket))
    assert failed == 5 and "no tracker was found" in errors


@pytest.mark.slow
def test_without_any_tracker_agents_find_each_other_and_read_the_origin_about_once(lan: Lan) -> None:
    members = [lan.agent(f"h{number}", "--origin", f"file://{lan.site.layout}") for number in range(3)]
    digest = lan.site.publish(SIZE)
    for member in members:
        until(member.is_up)
    pulls = [
        member.start_pull(blob=digest, output=str(lan.site.directory / f"out-{member.name}")) for member in members
    ]
    done = [pull.result(40) for pull in pulls]
    for member in members:
        check(lan.site.directory / f"out-{member.name}", digest)
    assert sum(status.bytes_origin for status in done) <= 1.3 * SIZE
    assert sum(status.bytes_peers for status in done) >= 1.7 * SIZE
    late = lan.agent("late", "--origin", f"file://{lan.site.layout}")
    until(late.is_up)
    status = late.pull(blob=digest)
    assert status.bytes_origin == 0 and status.bytes_peers == SIZE, "its neighbours have it"


@pytest.mark.slow
def test_agents_that_speak_tls_find_each_other_without_a_tracker(lan: Lan) -> None:
    authority = Authority(lan.site.directory)
    files = authority.issue("agent")
    tls = [
        "--tls-cert",
        files.certificate,
        "--tls-key",
        files.key,
        "--tls-ca",
        files.authority,
        "--tls-name",
        "127.0.0.1",
    ]
    words = ["--origin", f"file://{lan.site.layout}"]
    h1, h2 = (lan.agent(name, *words, *map(str, tls)) for name in ("h1", "h2"))
    plain = lan.agent("plain", *words)
    digest = lan.site.publish(MIB)
    for member in (h1, h2, plain):
        until(member.is_up)
    assert h1.pull(blob=digest).bytes_origin == MIB
    assert h2.pull(blob=digest).bytes_peers == MIB
    assert plain.pull(blob=digest).bytes_origin == MIB, "those who speak otherwise are no neighbours"


@pytest.mark.slow
def test_an_agent_that_is_given_a_tracker_looks_for_none(lan: Lan) -> None:
    """Nor does it open anything for discovery."""
    lan.tracker("t1")
    h1 = lan.agent("h1", "--tracker", "http://10.77.0.200:7070")
    quiet = lan.agent("h2", "--no-discovery")
    until(lambda: h1.is_up() and quiet.is_up())
    until(lambda: "10.77.0.200" in lan.log("h1").read_text())
    for member in (h1, quiet):
        assert member.tracker() == ""
        listening = subprocess.run(
            ["ip", "netns", "exec", member.namespace, sys.executable, "-c", "print(open('/proc/net/udp').read())"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert f":{5353:04X} " not in listening
