"""Traces of pulls: what a collector receives by OTLP from a real agent, decoded with the messages
of OpenTelemetry."""

from __future__ import annotations

import gzip
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from site_rig import Site, until

from p2pdist.agent.api.client import LocalClient
from p2pdist.model.errors import P2PDistError
from p2pdist.model.messages import MountRequest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
pytestmark = pytest.mark.slow

MIB = 1 << 20


class Collector:
    """Takes traces at /v1/traces."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.received = received = list[ExportTraceServiceRequest]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                received.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list:  # type: ignore[type-arg]
        return [
            span
            for request in self.received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    yield made
    made.server.shutdown()
    made.server.server_close()


def attributes(of: object) -> dict[str, object]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}  # type: ignore[attr-defined]


def test_a_pull_and_its_mount_are_one_trace(collector: Collector, site: Site) -> None:
    source = site.directory / "source"
    source.mkdir()
    (source / "weights").write_bytes(os.urandom(2 * MIB))
    layout = ("--layout", str(site.directory / "layout"))
    assert site.command("pack", str(source), "-t", "team/app:v1", "--format", "tree", *layout)[0] == 0
    assert site.command("push", "team/app:v1", "--origin", f"file://{site.layout}", *layout)[0] == 0
    (agent,) = site.agents(1)
    agent.pull(package="team/app:v1")
    with pytest.raises(P2PDistError):
        agent.pull(package="team/none:v1")
    client = LocalClient(agent.socket)
    shown = client.mount(MountRequest("team/app:v1", str(site.directory / "view"), how="copy"))
    until(lambda: "mount" in {span.name for span in collector.spans()})
    client.unmount(shown.path)
    spans = collector.spans()
    first, failed = next(s for s in spans if s.name == "pull"), [s for s in spans if s.name == "pull"][1]
    below = {span.name: span for span in spans if span.parent_span_id == first.span_id}
    assert set(below) == {"resolve", "join", "first byte", "complete"}
    ordered = [below[name] for name in ("resolve", "join", "first byte", "complete")]
    assert first.start_time_unix_nano == ordered[0].start_time_unix_nano
    assert first.end_time_unix_nano == ordered[-1].end_time_unix_nano
    for before, after in itertools.pairwise(ordered):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    said = attributes(first)
    assert said["p2pdist.reference"] == "team/app:v1" and said["p2pdist.bytes.origin"] >= 2 * MIB  # type: ignore[operator]
    assert failed.status.code == 2 and attributes(failed)["error.type"] == "not-found"
    assert failed.trace_id != first.trace_id
    (mount,) = [span for span in spans if span.name == "mount"]
    assert attributes(mount)["p2pdist.way"] == "copy"
    pulls = {span.span_id: span for span in spans if span.name == "pull"}
    assert str(attributes(pulls[mount.parent_span_id])["p2pdist.reference"]).startswith("team/app")
    resource = attributes(collector.received[0].resource_spans[0].resource)
    assert (resource["service.name"], resource["host.name"]) == ("p2pdist-agent", "h0")


def test_without_an_endpoint_nothing_of_the_library_is_loaded() -> None:
    words = ("-c", "import sys, p2pdist.agent.spans as s; print(s.spans('h'), 'opentelemetry' in sys.modules)")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["None", "False"], done.stderr
