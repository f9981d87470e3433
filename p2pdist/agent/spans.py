"""Traces of pulls and mounts for OpenTelemetry, sent by OTLP over HTTP.

A pull is a span, with one below it for each phase: `resolve` (from the request until the package's
manifest is known), `join` (until the first blob is asked of others), `first byte` (until a piece of
it verified) and `complete`. The `mount` of a package is a span below that of its last pull.

The extra p2pdist[otel] brings the library. It is loaded only where OTEL_EXPORTER_OTLP_ENDPOINT or
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT says where traces go, and OTEL_SDK_DISABLED does not forbid it;
all else is set by the variables of OpenTelemetry, too. Spans are made when a pull has ended, from
moments that it noted anyway: a pull waits for none of this. A collector that does not answer costs
the spans alone, and the library logs that.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING

from p2pdist.agent.pull.pulls import Pull
from p2pdist.model.errors import UsageError
from p2pdist.model.messages import MountStatus

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PULLS_MAX = 100
"""Pulls whose packages may be mounted, in the trace of the pull."""


class Spans:
    """Sends what it hears of pulls and mounts of the agent with this name. Raises UsageError where
    the environment asks for traces, and the extra is not installed."""

    def __init__(self, host: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise UsageError(
                f"{' or '.join(ENDPOINTS)} is set, and this installation cannot send traces: {error}",
                remedy="Install p2pdist[otel], or unset the variable",
            ) from error
        named = {"service.name": "p2pdist-agent", "service.version": version("p2pdist"), "host.name": host}
        if "OTEL_SERVICE_NAME" in os.environ:
            del named["service.name"]
        self._provider = TracerProvider(resource=Resource.create(named))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer: Tracer = self._provider.get_tracer("p2pdist.agent")
        self._pulls: OrderedDict[str, Context] = OrderedDict()

    def pulled(self, pull: Pull) -> None:
        """A pull has ended."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        status = pull.status()
        end = pull.started + (pull.seconds or 0.0)
        wall_ns = _wall_ns()
        span = self._begin("pull", wall_ns(pull.started), None)
        span.set_attributes(
            {
                "p2pdist.reference": pull.reference,
                "p2pdist.digest": pull.digest,
                "p2pdist.priority": pull.request.priority,
                "p2pdist.bytes": status.bytes_total,
                "p2pdist.bytes.store": status.bytes_cached,
                "p2pdist.bytes.peers": status.bytes_peers,
                "p2pdist.bytes.origin": status.bytes_origin + status.bytes_upstream,
            }
        )
        below = set_span_in_context(span)
        first_byte = min((at for blob in pull.blobs if (at := blob.receipts.first_at) is not None), default=None)
        before = pull.started
        for name, ended in (
            ("resolve", pull.resolved_at),
            ("join", pull.joined_at),
            ("first byte", first_byte),
            ("complete", end if pull.error is None else None),
        ):
            if ended is not None:
                moment = min(end, max(before, ended))
                self._begin(name, wall_ns(before), below).end(wall_ns(moment))
                before = moment
        if pull.error is not None:
            span.set_attribute("error.type", pull.error.slug)
            span.set_status(Status(StatusCode.ERROR, str(pull.error)))
        span.end(wall_ns(end))
        self._pulls[pull.digest] = below
        self._pulls.move_to_end(pull.digest)
        if len(self._pulls) > PULLS_MAX:
            self._pulls.popitem(last=False)

    def mounted(self, shown: MountStatus, began: float) -> None:
        """A package is shown; that began at this time of the monotonic clock."""
        wall_ns = _wall_ns()
        span = self._begin("mount", wall_ns(began), self._pulls.get(shown.digest))
        span.set_attributes({"p2pdist.reference": shown.reference, "p2pdist.way": shown.how})
        span.end(wall_ns(time.monotonic()))

    def stop(self) -> None:
        """Send what waits; blocks while the collector takes it."""
        self._provider.shutdown()

    def _begin(self, name: str, began_ns: int, below: Context | None) -> Span:
        from opentelemetry.context import Context

        return self._tracer.start_span(name, below if below is not None else Context(), start_time=began_ns)


def spans(host: str) -> Spans | None:
    """Those of the agent with this name; None where the environment does not ask for traces."""
    asked = any(os.environ.get(name) for name in ENDPOINTS)
    return Spans(host) if asked and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true" else None


def _wall_ns() -> Callable[[float], int]:
    """Gives times of the monotonic clock in nanoseconds since the epoch, all by one look at the
    clocks."""
    ahead_ns = time.time_ns() - time.monotonic_ns()
    return lambda moment: ahead_ns + int(moment * 1e9)
