"""Whole processes at the edges: wrong settings, odd sizes, name clashes, stops in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import programs
import pytest
from site_rig import Agent, Site, free_port, until

from p2pdist.model.errors import NotFound, P2PDistError
from p2pdist.model.manifest import Descriptor, Manifest, decode_manifest, encode_manifest, parse_reference
from p2pdist.origin.layout import LocalLayout

MIB = 1 << 20
PIECE = 64 << 10


def refused(*words: str) -> tuple[int, str]:
    """Run a service that cannot start: its exit code and what it says."""
    done = programs.run(*words)
    assert "Traceback" not in done.stderr, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("p2pdist: ")]
    assert len(said) == 1, done.stderr
    return done.returncode, said[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "names"),
    [
        (["agent", "--tracker", "nonsense"], 2, "nonsense"),
        (["agent", "--tracker", "http://host:99999"], 2, "99999"),
        (["agent", "--tracker", "ftp://user:hidden@host"], 2, "ftp://host"),
        (["agent", "--origin", "nowhere"], 2, "nowhere"),
        (["agent", "--capacity", "-5GiB"], 2, "-5GiB"),
        (["agent", "--capacity", "nan"], 2, "nan"),
        (["agent", "--capacity", "0"], 2, "'0'"),
        (["agent", "--tracker-wait", "nan"], 2, "tracker-wait"),
        (["agent", "--name", "two words"], 2, "two words"),
        (["agent", "--name", "x" * 256], 2, "xxx"),
        (["agent", "--advertise", "nonsense"], 2, "nonsense"),
        (["agent", "--zone", "a\nb"], 2, "zone"),
        (["agent", "--listen", "nonsense"], 2, "nonsense"),
        (["agent", "--listen", "no..such:7071"], 1, "no..such"),
        (["tracker", "--listen", "127.0.0.1:0"], 2, "127.0.0.1:0"),
        (["tracker", "--origin", "http://user:hidden@"], 2, "http://"),
        (["tracker", "--origin-streams", "0"], 2, "origin-streams"),
        (["tracker", "--report-interval", "nan"], 2, "report-interval"),
        (["tracker", "--state", "/dev/null/state"], 1, "/dev/null/state"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_service_with_a_wrong_setting_says_so_in_one_line(
    tmp_path: Path, words: list[str], code: int, names: str
) -> None:
    more = []
    if words[0] == "agent":
        more = ["--store", str(tmp_path / "store"), "--socket", str(tmp_path / "s")]
    if "--listen" not in words:
        more += ["--listen", f"127.0.0.1:{free_port()}"]
    got, said = refused(*words, *more)
    assert got == code and names in said and "hidden" not in said, said


@pytest.mark.slow
def test_an_agent_that_cannot_start_leaves_the_running_one_alone(site: Site) -> None:
    """Neither a port nor a socket that is in use may cost its owner the socket."""
    (agent,) = site.agents(1)
    common = ["agent", "--store", str(site.directory / "other"), "--socket", str(agent.socket), "--listen"]
    for listen in (f"127.0.0.1:{agent.port}", f"127.0.0.1:{free_port()}"):
        code, said = refused(*common, listen)
        assert code == 1 and (str(agent.socket) in said or str(agent.port) in said)
        assert site.command("status", "--socket", str(agent.socket))[0] == 0


def test_a_second_tracker_on_the_port_is_told(site: Site) -> None:
    code, said = refused("tracker", "--listen", f"127.0.0.1:{site.tracker_port}")
    assert code == 1 and str(site.tracker_port) in said


def test_a_store_that_is_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    code, said = refused(
        "agent",
        "--store",
        str(tmp_path / "file"),
        "--socket",
        str(tmp_path / "s"),
        "--listen",
        f"127.0.0.1:{free_port()}",
    )
    assert code == 1 and str(tmp_path / "file") in said


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 16 * PIECE])
def test_blobs_of_odd_sizes_reach_every_agent(site: Site, size: int) -> None:
    digest = site.publish(size)
    first, second = site.agents(2)
    for agent in (first, second):
        out = site.directory / agent.name
        status = agent.pull(blob=digest, output=str(out))
        assert (status.state, status.bytes_total) == ("done", size)
        assert out.read_bytes() == (site.directory / "content").read_bytes()
    assert site.origin_bytes(digest) == size
    with urllib.request.urlopen(f"{second.url}/v1/blobs/{digest}", timeout=60) as answer:
        assert answer.headers["Content-Length"] == str(size)


@pytest.mark.slow
def test_an_empty_blob_does_not_keep_others_from_the_tracker(site: Site) -> None:
    """After the tracker's restart the agent says all it holds; a blob without pieces is not among
    it."""
    empty, whole = site.publish(0), site.publish(4 * PIECE)
    first, second = site.agents(2)
    first.pull(blob=empty)
    first.pull(blob=whole)
    site.kill_tracker()
    site.start_tracker()
    until(lambda: first.metric("p2pdist_agent_tracker_connected") == 1)
    before = site.origin_bytes(whole)
    assert second.pull(blob=whole).bytes_peers == 4 * PIECE and site.origin_bytes(whole) == before
    assert "rejects" not in first.log.read_text()


@pytest.mark.slow
def test_two_agents_of_one_name_are_told_and_do_not_drive_each_other_out(site: Site) -> None:
    first = Agent(site, "twin").start()
    second = Agent(site, "twin2")
    second.name = "twin"
    second.start(ready=False)
    until(lambda: "another agent named twin is connected" in second.log.read_text())
    with pytest.raises(urllib.error.HTTPError) as failure:
        urllib.request.urlopen(second.url + "/readyz", timeout=60)
    assert failure.value.code == 503
    assert "another agent named twin" in json.loads(failure.value.read())["problem"]
    time.sleep(2)
    assert first.metric("p2pdist_agent_tracker_connected") == 1
    assert "is away" not in first.log.read_text()
    assert second.log.read_text().count("another agent named twin") <= 2, "said once, not at every try"
    assert first.stop() == 0
    until(lambda: second.metric("p2pdist_agent_tracker_connected") == 1)


def test_an_agent_whose_store_was_removed_is_not_ready(site: Site) -> None:
    """Until it is back: the agent writes to files that nobody finds."""
    agent = Agent(site, "bereft").start()
    away = agent.store.rename(agent.store.with_name("away"))

    def readiness() -> tuple[int, dict[str, str]]:
        try:
            with urllib.request.urlopen(agent.url + "/readyz", timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as failure:
            return failure.code, json.loads(failure.read())

    until(lambda: "was removed" in readiness()[1]["disk"])
    code, found = readiness()
    assert (code, found["status"]) == (503, "waiting for the disk")
    away.rename(agent.store)
    until(lambda: readiness()[0] == 200)


@pytest.mark.slow
def test_an_agent_that_was_killed_comes_back_under_its_name_at_once(site: Site) -> None:
    agent = Agent(site, "phoenix").start()
    agent.kill()
    agent.start()
    log = agent.log.read_text()
    assert "another agent named phoenix" not in log and "rejects" not in log, "the tracker did not refuse its name"


@pytest.mark.slow
def test_credentials_never_show(site: Site) -> None:
    """Neither of the origin nor of the tracker, in logs, status or failures."""
    port = free_port()
    tracker = site.spawn(
        [
            "tracker",
            "--listen",
            f"127.0.0.1:{port}",
            "--origin",
            "http://user:hidden@127.0.0.1:9",
            "--log-level",
            "debug",
        ],
        site.directory / "t.log",
    )
    agent = Agent(
        site, "h", tracker=f"http://user:hidden@127.0.0.1:{port}", tracker_wait="1", log_level="debug"
    ).start()
    with pytest.raises(P2PDistError) as failure:
        agent.pull(package="a:b")
    _, status, _ = site.command("status", "--socket", str(agent.socket))
    tracker.terminate()
    tracker.wait(60)
    until(lambda: "is away" in agent.log.read_text())
    with pytest.raises(P2PDistError) as later:
        agent.pull(package="a:b")
    told = [agent.log.read_text(), (site.directory / "t.log").read_text(), json.dumps(status)]
    for text in (*told, str(failure.value), str(later.value)):
        assert "hidden" not in text
    assert status["tracker"]["url"] == f"http://127.0.0.1:{port}"


class SilentOrigin:
    """Takes connections and never answers."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.taken: list[socket.socket] = []
        threading.Thread(target=self._take, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def _take(self) -> None:
        while True:
            try:
                self.taken.append(self.listener.accept()[0])
            except OSError:
                return

    def close(self) -> None:
        self.listener.close()
        for each in self.taken:
            each.close()


@pytest.mark.slow
def test_services_stop_at_once_though_their_origin_never_answers(site: Site) -> None:
    origin = SilentOrigin()
    port = free_port()
    log = site.directory / "t.log"
    tracker = site.spawn(["tracker", "--listen", f"127.0.0.1:{port}", "--origin", origin.url], log)
    agent = Agent(site, "patient", tracker=f"http://127.0.0.1:{port}", origin=origin.url).start()
    try:
        pull = agent.start_pull(package="a:b")
        until(lambda: origin.taken)
        assert agent.stop() == 0
        tracker.terminate()
        assert tracker.wait(60) == 0
        with pytest.raises(P2PDistError):
            pull.result()
    finally:
        origin.close()
    for text in (agent.log.read_text(), log.read_text()):
        assert "Traceback" not in text


@pytest.mark.slow
def test_an_agent_stops_in_the_middle_of_everything(site: Site) -> None:
    """While it fetches, serves a peer and feeds a client: within seconds, with 0, and what it had
    is still there."""
    digest = site.publish(16 * MIB)
    site.origin.rate_bytes_s = 2 * MIB
    first, second = site.agents(2)
    pulls = [agent.start_pull(blob=digest) for agent in (first, second)]
    client = socket.create_connection(("127.0.0.1", first.port))
    client.sendall(f"GET /v1/blobs/{digest} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    until(lambda: first.received() > MIB and second.received() > MIB)
    assert first.stop() == 0
    assert "Traceback" not in first.log.read_text()
    site.origin.rate_bytes_s = 0
    assert pulls[1].result().state == "done"
    with pytest.raises(P2PDistError):
        pulls[0].result()
    client.close()
    first.start()
    status = first.pull(blob=digest)
    assert status.state == "done" and status.bytes_cached >= MIB


@pytest.mark.slow
def test_clients_that_leave_cost_nothing_and_others_still_get_the_blob(site: Site) -> None:
    digest = site.publish(4 * MIB)
    site.origin.rate_bytes_s = MIB
    (agent,) = site.agents(1)
    assert agent.process is not None
    descriptors = Path(f"/proc/{agent.process.pid}/fd")
    for number in range(30):
        client = socket.create_connection(("127.0.0.1", agent.port))
        client.sendall(f"GET /v1/blobs/{digest} HTTP/1.1\r\nHost: a\r\nRange: bytes={number}-\r\n\r\n".encode())
        client.close()
    with urllib.request.urlopen(f"{agent.url}/v1/blobs/{digest}", timeout=30) as answer:
        assert answer.read() == (site.directory / "content").read_bytes()
    _, document, _ = site.command("status", "--socket", str(agent.socket))
    assert len(document["pulls"]) == 1, "one pull serves all readers"
    until(lambda: len(list(descriptors.iterdir())) < 40)
    assert "Traceback" not in agent.log.read_text()


@pytest.mark.slow
def test_a_head_request_tells_the_size_and_fetches_nothing(site: Site) -> None:
    digest = site.publish(MIB)
    (agent,) = site.agents(1)
    request = urllib.request.Request(f"{agent.url}/v1/blobs/{digest}", method="HEAD")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["Content-Length"] == str(MIB) and answer.headers["ETag"] == f'"{digest}"'
    assert site.origin_bytes(digest) == 0


@pytest.mark.slow
def test_outputs_that_cannot_be_written_fail_with_a_reason(site: Site) -> None:
    digest = site.publish(1000)
    (agent,) = site.agents(1)
    with pytest.raises(NotFound, match="missing"):
        agent.pull(blob=digest, output=str(site.directory / "missing" / "out"))
    for output in ("/proc/out", str(site.directory / ("n" * 300)), "/dev/null/out", str(site.directory / "a\0b")):
        with pytest.raises(P2PDistError) as failure:
            agent.pull(blob=digest, output=output)
        assert "the agent failed" not in str(failure.value), output
    assert "Traceback" not in agent.log.read_text()


@pytest.mark.slow
def test_an_output_on_another_filesystem_is_a_copy(site: Site) -> None:
    digest = site.publish(MIB)
    (agent,) = site.agents(1)
    out = Path("/dev/shm") / f"p2pdist-{os.getpid()}"
    try:
        assert agent.pull(blob=digest, output=str(out)).output == "copy"
        assert out.read_bytes() == (site.directory / "content").read_bytes()
    finally:
        out.unlink(missing_ok=True)


@pytest.mark.slow
def test_a_store_too_small_for_a_package_fails_the_pull(site: Site) -> None:
    """One layer must not be put in the place of another of the same package."""
    layout = site.directory / "layout"
    for number in range(2):
        source = site.directory / f"source{number}"
        source.mkdir()
        (source / f"file{number}").write_bytes(os.urandom(MIB))
        base = ["--base", "p:0"] if number else []
        code, _, errors = site.command("pack", str(source), "-t", f"p:{number}", "--layout", str(layout), *base)
        assert code == 0, errors
    code, _, errors = site.command("push", "p:1", "--layout", str(layout), "--origin", f"file://{site.layout}")
    assert code == 0, errors
    code, _, errors = site.command("push", "p:0", "--layout", str(layout), "--origin", f"file://{site.layout}")
    assert code == 0, errors
    agent = Agent(site, "small", capacity="1800KiB").start()
    assert agent.pull(package="p:0").state == "done"
    with pytest.raises(P2PDistError, match="lacks space"):
        agent.pull(package="p:1")


@pytest.mark.slow
@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_services_listen_on_both_families(site: Site) -> None:
    port = free_port()
    tracker = site.spawn(
        ["tracker", "--listen", f"[::]:{port}", "--origin", site.origin.url], site.directory / "six.log"
    )
    agent = Agent(site, "six", tracker=f"http://[::1]:{port}")
    agent.port = free_port()
    agent.start()
    digest = site.publish(1000)
    assert agent.pull(blob=digest).state == "done"
    for host in ("[::1]", "127.0.0.1"):
        with urllib.request.urlopen(f"http://{host}:{port}/readyz", timeout=60) as answer:
            assert answer.status == 200
    assert tracker.poll() is None


MALFORMED = (
    b"\x16\x03\x01garbage\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/streams HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
)


@pytest.mark.slow
def test_what_is_no_http_gets_a_400_and_one_line_in_the_log(site: Site) -> None:
    (agent,) = site.agents(1)
    for port in (agent.port, site.tracker_port):
        for text in MALFORMED:
            with socket.create_connection(("127.0.0.1", port), timeout=60) as stranger:
                stranger.sendall(text)
                assert stranger.recv(100).split()[1] == b"400"
    for log in (agent.log, site.directory / "tracker.log"):
        text = log.read_text()
        assert "Traceback" not in text and "xxxx" not in text


@pytest.mark.slow
def test_a_package_whose_layers_are_one_blob_is_pulled_once_and_shown(site: Site) -> None:
    async def craft() -> None:
        origin = LocalLayout(site.layout)
        described = await origin.resolve(parse_reference("a:1"))
        manifest = decode_manifest(await origin.read(described.digest))
        for tag, layers, lists in (("zero:1", (), ()), ("twice:1", manifest.layers * 2, manifest.piece_lists)):
            body = encode_manifest(Manifest(manifest.config, layers, lists))
            digest = await origin.write_document(body)
            await origin.tag(parse_reference(tag), Descriptor(described.media_type, digest, len(body)))
        await origin.close()

    source, layout = site.directory / "source", site.directory / "layout"
    source.mkdir()
    (source / "file").write_bytes(os.urandom(MIB))
    assert site.command("pack", str(source), "-t", "a:1", "--layout", str(layout))[0] == 0
    assert site.command("push", "a:1", "--layout", str(layout), "--origin", f"file://{site.layout}")[0] == 0
    asyncio.run(craft())
    (agent,) = site.agents(1)
    status = agent.pull(package="twice:1")
    assert status.bytes_origin == status.bytes_total > MIB
    shown = site.directory / "shown"
    code, _, errors = site.command("mount", "twice:1", str(shown), "--socket", str(agent.socket))
    assert code == 0, errors
    assert (shown / "file").read_bytes() == (source / "file").read_bytes()
    assert agent.pull(package="zero:1").state == "done"
    code, _, errors = site.command("mount", "zero:1", str(site.directory / "none"), "--socket", str(agent.socket))
    assert code == 2 and "0 layers" in errors
    code, _, errors = site.command("umount", str(shown), "--socket", str(agent.socket))
    assert code == 0, errors
    assert not shown.exists() or not any(shown.iterdir())
    assert agent.stop() == 0
