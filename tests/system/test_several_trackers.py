"""Several trackers on one PostgreSQL, with real processes: trackers that are killed, frozen, ended
and cut off from their database while hosts receive."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from postgresql import Server, binaries, server
from site_rig import P2PDIST, Agent, Background, Site, free_port, running_site, until, wait_for

from p2pdist.model.digest import Digest
from p2pdist.model.ownership import Ownership, Tracker, owner

MIB = 1 << 20
pytestmark = pytest.mark.long


class Trackers:
    """Trackers a, b, c of one fleet, which share its blobs evenly."""

    def __init__(self, site: Site, database: Server, count: int = 3) -> None:
        self.site, self.database = site, database
        self.ports = [free_port() for _ in range(count)]
        self.processes: list[subprocess.Popen[bytes]] = []
        for number in range(count):
            self.processes.append(self._spawn(number))
        for number in range(count):
            self._wait(number)
        until(lambda: len(self.owners(0)) == count)
        self.share_evenly()

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.ports[number]}"

    def name(self, number: int) -> str:
        return f"127.0.0.1-{self.ports[number]}"

    def log(self, number: int) -> Path:
        return self.site.directory / f"tracker-{number}.log"

    def urls(self, first: int = 0) -> str:
        """All of them, as --tracker takes them."""
        return ",".join(self.url((first + number) % len(self.ports)) for number in range(len(self.ports)))

    def _spawn(self, number: int) -> subprocess.Popen[bytes]:
        words = ["tracker", "--listen", f"127.0.0.1:{self.ports[number]}", "--origin", self.site.origin.url]
        return self.site.spawn([*words, "--state", self.database.url], self.log(number))

    def _wait(self, number: int) -> None:
        wait_for(self.url(number) + "/readyz", self.processes[number], self.log(number))

    def restart(self, number: int) -> None:
        self.processes[number] = self._spawn(number)
        self._wait(number)

    def signal(self, number: int, which: signal.Signals) -> None:
        self.processes[number].send_signal(which)

    def end(self, number: int) -> None:
        self.signal(number, signal.SIGTERM)
        assert self.processes[number].wait(30) == 0

    def ask(self, number: int, path: str, body: Any = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url(number) + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def swarm(self, number: int, digest: str, query: str = "") -> dict[str, Any]:
        """What a tracker says of a swarm; nothing where it knows none, or the owner is silent."""
        try:
            found: dict[str, Any] = self.ask(number, f"/v1/swarms/{digest}{query}")
        except urllib.error.HTTPError:
            return {}
        return found

    def status(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = self.ask(number, "/v1/trackers")
        return found

    def owners(self, number: int) -> set[str]:
        return {row["id"] for row in self.status(number)["trackers"] if row["share"] > 0}

    def ownership(self) -> Ownership:
        """As their database has it."""
        return ownership_in(self.database)

    def share_evenly(self) -> None:
        """Every tracker has a full share from now on."""
        epoch = share_evenly(self.database)
        until(lambda: all(self.status(number)["epoch"] >= epoch for number in range(len(self.ports))))

    def owner(self, digest: str) -> int:
        """The number of the tracker that owns a blob."""
        names = [self.name(number) for number in range(len(self.ports))]
        return names.index(owner(self.ownership(), Digest(digest)).id)


def ownership_in(database: Server) -> Ownership:
    with psycopg.connect(database.url) as connection:
        row = connection.execute("SELECT body FROM cluster_ownership").fetchone()
    assert row is not None
    return msgspec.json.decode(row[0], type=Ownership)


def share_evenly(database: Server) -> int:
    """A tracker that comes takes its share over minutes; here it has it at once. Returns the
    epoch."""
    while any(tracker.share < 1 for tracker in ownership_in(database).trackers):
        now = ownership_in(database)
        even = tuple(Tracker(tracker.id, tracker.urls) for tracker in now.trackers)
        body = msgspec.json.encode(Ownership(now.epoch + 1, even, now.pins)).decode()
        with psycopg.connect(database.url) as connection:
            connection.execute(
                "UPDATE cluster_ownership SET epoch = epoch + 1, body = %s WHERE epoch = %s", (body, now.epoch)
            )
    return ownership_in(database).epoch


@pytest.fixture
def database() -> Iterator[Server]:
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    with server() as made:
        yield made


@pytest.fixture
def site() -> Iterator[Site]:
    with (
        tempfile.TemporaryDirectory(prefix="p2pdist-") as directory,
        running_site(Path(directory), tracker=False) as made,
    ):
        yield made


def agents_of(site: Site, trackers: Trackers, count: int = 4) -> list[Agent]:
    made = [Agent(site, f"h{number}", tracker=trackers.urls(number)) for number in range(count)]
    for started in [Background(agent.start) for agent in made]:
        started.result()
    return made


def broken_streams(agents: list[Agent]) -> list[str]:
    """What agents logged of streams that ended otherwise than at their end."""
    return [line for agent in agents for line in agent.log.read_text().splitlines() if "stream from" in line]


def broadcast(site: Site, agents: list[Agent], digest: str) -> list[Background]:
    """All agents pull the blob, which goes on for seconds; returns when all of them receive."""
    pulls = [agent.start_pull(blob=digest) for agent in agents]
    until(lambda: all(agent.received() > 0 for agent in agents))
    return pulls


def finish(site: Site, pulls: list[Background], digest: str, size: int) -> None:
    for pull in pulls:
        status = pull.result(90)
        assert status.state == "done", status.error
    assert site.origin_bytes(digest) < 1.5 * size, "but for what stalled, the origin is read once"


def test_each_blob_has_one_tracker_and_any_tracker_answers(site: Site, database: Server) -> None:
    """Two hosts hold nine blobs; each swarm is at its owner, with both hosts, and every tracker
    tells all of it. What a tracker that is gone would say is said to be missing."""
    trackers = Trackers(site, database)
    one, two = agents_of(site, trackers, 2)
    digests = [site.publish(64 << 10) for _ in range(9)]
    for digest in digests:
        assert one.pull(blob=digest).state == two.pull(blob=digest).state == "done"
    for digest in digests:
        home = trackers.owner(digest)
        for number in range(3):
            rows = {row["digest"] for row in trackers.ask(number, "/v1/swarms?local=1")}
            assert (digest in rows) == (number == home)
            until(lambda: trackers.swarm(number, digest).get("complete") == 2)  # noqa: B023
    for number in range(3):
        assert {row["digest"] for row in trackers.ask(number, "/v1/swarms")} == set(digests)
        hosts = {row["host"]: row for row in trackers.ask(number, "/v1/hosts")}
        assert {name: (row["present"], row["blobs"]) for name, row in hosts.items()} == {
            "h0": (True, 9),
            "h1": (True, 9),
        }
    packages = {"packages": [f"blob:{digest.replace(':', '-')}" for digest in digests]}
    for number in range(3):
        ranked = trackers.ask(number, "/v1/rank", packages)
        assert [(row["host"], row["bytes_missing"], row["present"]) for row in ranked] == [
            ("h0", 0, True),
            ("h1", 0, True),
        ]
    status = trackers.status(1)
    assert {row["id"]: row["state"] for row in status["trackers"]} == dict.fromkeys(
        map(trackers.name, range(3)), "owner"
    )
    assert sum(row["hosts"] for row in status["trackers"]) == 2
    code, printed, said = site.command("trackers", "--tracker", trackers.url(2))
    assert code == 0 and printed["epoch"] == trackers.ownership().epoch, said
    trackers.signal(2, signal.SIGSTOP)
    try:
        with urllib.request.urlopen(trackers.url(0) + "/v1/hosts", timeout=60) as answer:
            missing = answer.headers.get("P2PDist-Unanswered", "")
            assert missing == trackers.name(2) or trackers.name(2) not in trackers.owners(0)
    finally:
        trackers.signal(2, signal.SIGCONT)


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_an_owner_goes_under_a_broadcast(site: Site, database: Server, how: str) -> None:
    """Its swarm goes on at the next tracker: hosts that come later join it there. No stream breaks
    and the origin is read once. A frozen one that wakes up undoes nothing."""
    size = 24 * MIB
    trackers = Trackers(site, database)
    agents = agents_of(site, trackers)
    late = Agent(site, "late", tracker=trackers.urls(trackers.owner(digest := site.publish(size)) + 1)).start()
    site.origin.rate_bytes_s = 2 * MIB
    pulls = broadcast(site, agents, digest)
    first = trackers.owner(digest)
    trackers.signal(first, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    others = [number for number in range(3) if number != first]
    until(lambda: all(trackers.name(first) not in trackers.owners(number) for number in others))
    second = trackers.owner(digest)
    assert second != first
    until(lambda: trackers.swarm(second, digest, "?local=1").get("hosts") == len(agents))
    pulls.append(late.start_pull(blob=digest))
    until(lambda: late.received() > 0)
    if how == "frozen":
        trackers.signal(first, signal.SIGCONT)
    finish(site, pulls, digest, size)
    assert broken_streams([*agents, late]) == []


def test_the_database_is_away_for_a_while(site: Site, database: Server) -> None:
    """Longer than a tracker may be silent: the trackers go on as they are, and so do they once it
    is back."""
    size = 24 * MIB
    trackers = Trackers(site, database)
    agents = agents_of(site, trackers, 4)
    digest = site.publish(size)
    site.origin.rate_bytes_s = 2 * MIB
    pulls = broadcast(site, agents, digest)
    before = trackers.ownership()
    database.stop()
    until(lambda: all(trackers.status(number)["age_s"] > 6 for number in range(3)))
    assert all(trackers.status(number)["problem"] for number in range(3))
    late = Agent(site, "late", tracker=trackers.urls()).start()
    pulls.append(late.start_pull(blob=digest))
    until(lambda: late.received() > 0)
    database.start()
    until(lambda: not any(trackers.status(number)["problem"] for number in range(3)))
    finish(site, pulls, digest, size)
    after = trackers.ownership()
    assert (before.epoch, before.trackers) == (after.epoch, after.trackers)
    assert broken_streams([*agents, late]) == []


def test_all_trackers_are_restarted_under_a_broadcast_and_a_preseed(site: Site, database: Server) -> None:
    """One after the other, as for a new version: the pulls and the preseed are done, the preseed
    is there once, hardly a piece comes twice, and the origin is not read by every host."""
    size = 32 * MIB
    trackers = Trackers(site, database)
    agents = agents_of(site, trackers)
    digest, seeded = site.publish(size), site.publish(8 * MIB)
    site.origin.rate_bytes_s = 2 * MIB
    pulls = broadcast(site, agents[:3], digest)
    name = f"blob:{seeded.replace(':', '-')}"
    code, _, said = site.command("preseed", name, "--count", "4", "--id", "p1", "--tracker", trackers.urls())
    assert code == 0, said
    until(lambda: trackers.ask(0, "/v1/preseeds/p1")["bytes_done"] > 0)
    for number in range(3):
        trackers.end(number)
        trackers.restart(number)
    finish(site, pulls, digest, size)

    def done(number: int) -> bool:
        with contextlib.suppress(urllib.error.URLError):
            found = trackers.ask(number, "/v1/preseeds/p1")
            return bool(found["state"] == "done" and found["hosts_done"] == 4)
        return False

    until(lambda: all(done(number) for number in range(3)), 90)
    assert all([each["id"] for each in trackers.ask(number, "/v1/preseeds")] == ["p1"] for number in range(3))
    twice = sum(agent.metric("p2pdist_agent_received_twice_bytes_total") for agent in agents)
    assert twice < (3 * size + 4 * 8 * MIB) / 50, "streams go on, and no piece comes again"
    assert site.origin_bytes(seeded) < 3 * 8 * MIB, "it gives way to starts, stalls, and is read by others"
    assert broken_streams(agents) == []


def test_a_tracker_drains_and_fills(site: Site, database: Server) -> None:
    """It gives away its blobs and its agents, and takes a share again when told to."""
    trackers = Trackers(site, database)
    agents = agents_of(site, trackers, 3)
    digest = site.publish(MIB)
    assert agents[0].pull(blob=digest).state == "done"
    first = trackers.owner(digest)
    other = (first + 1) % 3

    def order(verb: str) -> None:
        words = [*P2PDIST, "trackers", verb, trackers.name(first), "--tracker", trackers.url(other)]
        subprocess.run(words, check=True, capture_output=True)

    order("drain")

    def row() -> dict[str, Any]:
        return next(each for each in trackers.status(other)["trackers"] if each["id"] == trackers.name(first))

    until(lambda: row()["state"] == "drained" and row()["hosts"] == 0)
    assert trackers.owner(digest) != first
    until(lambda: trackers.swarm(other, digest).get("complete") == 1)
    assert agents[1].pull(blob=digest).state == "done"
    order("fill")
    until(lambda: row()["share"] > 0)
    until(lambda: len(trackers.owners(first)) == 3)


def test_a_host_is_drained_at_every_tracker(site: Site, database: Server) -> None:
    """At both, at one that starts anew, and at one that was away when it was said."""
    trackers = Trackers(site, database, 2)
    agents = agents_of(site, trackers, 2)
    owned: set[int] = set()
    while len(owned) < 2:  # a host has a session with each tracker that plans something for it
        digest = site.publish(MIB)
        assert agents[1].pull(blob=digest).state == "done"
        owned.add(trackers.owner(digest))

    def drained(number: int) -> bool | None:
        with contextlib.suppress(urllib.error.HTTPError):
            return bool(trackers.ask(number, "/v1/hosts/h1?local=1")["drained"])
        return None

    def order(verb: str, number: int) -> None:
        words = [*P2PDIST, "hosts", verb, "h1", "--tracker", trackers.url(number)]
        subprocess.run(words, check=True, capture_output=True)

    until(lambda: [drained(0), drained(1)] == [False, False])
    order("drain", 0)
    assert drained(0) and drained(1), "the other one is told at once"
    trackers.end(1)
    trackers.restart(1)
    until(lambda: drained(1))
    trackers.signal(1, signal.SIGKILL)
    trackers.processes[1].wait(30)
    order("fill", 0)
    trackers.restart(1)
    until(lambda: [drained(0), drained(1)] == [False, False])


ACCESS = """
fleet = "prod"
[join.default]
read = ["blob"]
[role.operator]
may = ["watch"]
read = ["*"]
"""
"""Hosts that read packages of one name, and nothing else."""


def test_trackers_with_access_control_share_the_blobs(site: Site, database: Server) -> None:
    """Hosts ask one tracker for a package and another for its blobs: the owner knows which
    hosts may read them, and the hosts take each other's tickets."""
    file = site.directory / "access" / "access.toml"
    file.parent.mkdir()
    file.write_text(ACCESS)
    ports, logs = [free_port(), free_port()], [site.directory / f"tracker-{number}.log" for number in range(2)]
    for port, log in zip(ports, logs, strict=True):
        words = ["tracker", "--listen", f"127.0.0.1:{port}", "--origin", site.origin.url, "--access", str(file)]
        site.spawn([*words, "--state", database.url], log)
        until(lambda: "listening on" in log.read_text())  # noqa: B023
    epoch = share_evenly(database)
    until(lambda: all(f"epoch {epoch} " in log.read_text() for log in logs))
    urls = [f"https://127.0.0.1:{port}" for port in ports]
    join = str(file.parent / "join-default.token")
    agents = [
        Agent(site, f"h{number}", tracker=",".join(urls[number:] + urls[:number]), join_file=join).start()
        for number in range(2)
    ]
    digests = [site.publish(256 << 10) for _ in range(6)]
    owners = {owner(ownership_in(database), Digest(digest)).id for digest in digests}
    for agent in agents:
        for digest in digests:
            status = agent.pull(blob=digest)
            assert status.state == "done", status.error
    assert len(owners) == 2, "each tracker owns some of them"
    assert all(site.origin_bytes(digest) == 256 << 10 for digest in digests)
    code, made, said = site.command("token", "create", "--access", str(file), "--role", "operator", "--ttl", "1d")
    assert code == 0, said
    token = site.directory / "operator.token"
    token.write_text(made["token"])
    token.chmod(0o600)
    for url in urls:
        until(lambda: shown_at(site, url, token) == ({"h0", "h1"}, set(digests), []))  # noqa: B023
    _is_refused_beside_them(site, database)


def shown_at(site: Site, url: str, token: Path) -> tuple[set[str], set[str], list[Any]]:
    """The hosts and blobs that a tracker shows to who watches it, and which trackers it lacks: the
    trackers ask each other by their certificates."""
    code, shown, said = site.command("top", "--once", "--tracker", url, "--token-file", str(token))
    assert code == 0, said
    swarms = {row["digest"] for row in shown["swarms"]}
    return {row["host"] for row in shown["hosts"] if not row["away"]}, swarms, shown["silent"]


def _is_refused_beside_them(site: Site, database: Server) -> None:
    """A tracker with an access directory of its own takes no part, and says why."""
    file = site.directory / "other" / "access.toml"
    file.parent.mkdir()
    file.write_text(ACCESS)
    words = ["tracker", "--listen", f"127.0.0.1:{free_port()}", "--origin", site.origin.url, "--access", str(file)]
    log = site.directory / "stranger.log"
    process = site.spawn([*words, "--state", database.url], log)
    assert process.wait(120) != 0
    assert "another authority than that of the tracker" in log.read_text()
