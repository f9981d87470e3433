"""Writes the dashboards below grafana/dashboards: python grafana/generate.py

They are written down here, where one can read them, with the types of the Grafana Foundation SDK
(Grafana 11); the JSON is what Grafana loads. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import VizLegendOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

DASHBOARDS = Path(__file__).parent / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
SPAN, HEIGHT, STAT_SPAN, STAT_HEIGHT = 12, 8, 6, 4


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; with `large` a number instead of lines over time. `text` says what to watch
    for."""

    title: str
    unit: str
    queries: Sequence[Query]
    text: str = ""
    large: bool = False


def q(expr: str, legend: str = "") -> Query:
    return Query(expr, legend)


FLEET = [
    Panel("Hosts connected", "short", [q('sum(p2pdist_tracker_hosts{state="present"})')], large=True),
    Panel("Running swarms", "short", [q('sum(p2pdist_tracker_swarms{state="running"})')], large=True),
    Panel("Running swarms are complete to", "percentunit", [q("p2pdist:swarms_done:ratio")], large=True),
    Panel(
        "Alerts", "short", [q('count(ALERTS{alertname=~"P2PDist.+", alertstate="firing"}) or vector(0)')], large=True
    ),
    Panel(
        "Origin egress against bytes delivered",
        "Bps",
        [
            q("p2pdist:delivered_bytes:rate1m", "delivered to hosts"),
            q("p2pdist:origin_read_bytes:rate1m", "read from the origin"),
            q(
                'sum(rate(p2pdist_agent_received_bytes_total{source="upstream"}[1m]))',
                "read from registries of images",
            ),
            q("max(p2pdist_tracker_origin_budget_bytes_per_second)", "budget of the origin (0: none)"),
        ],
        "The origin gives each byte about once for each zone, however many hosts there are.",
    ),
    Panel(
        "Share of the origin",
        "percentunit",
        [q("p2pdist:origin_share:ratio5m", "of all that hosts get")],
        "With N hosts that want the same, 1 / N for each zone.",
    ),
    Panel(
        "Completion of running swarms",
        "percentunit",
        [q("p2pdist:swarms_done:ratio", "complete")],
    ),
    Panel(
        "Hosts by zone",
        "short",
        [q("sum by (zone, state) (p2pdist_tracker_hosts)", "{{zone}} {{state}}")],
    ),
    Panel(
        "Slow hosts",
        "short",
        [
            q("sum(p2pdist_tracker_slow_hosts)", "slow uplink or downlink"),
            q("sum(p2pdist_tracker_shunned_hosts)", "shunned: several others blame them"),
            q("sum(p2pdist_tracker_unreachable_hosts)", "others cannot reach them"),
            q('sum(p2pdist_tracker_hosts{state="absent"})', "absent"),
            q("sum(p2pdist_agent_tracker_connected == bool 0)", "agents without a tracker"),
        ],
        "The tracker's health page names them and says why.",
    ),
    Panel(
        "Failures",
        "short",
        [
            q(
                "sum by (reason) (increase(p2pdist_agent_pieces_rejected_total[$__rate_interval]))",
                "pieces: {{reason}}",
            ),
            q('sum(p2pdist_tracker_swarms{state="stalled"})', "swarms that stand still"),
            q('sum(p2pdist_tracker_preseeds{state="failed"})', "preseeds that failed"),
        ],
    ),
    Panel("Preseeds", "short", [q("sum by (state) (p2pdist_tracker_preseeds)", "{{state}}")]),
    Panel(
        "Events",
        "short",
        [
            q("sum by (kind) (increase(p2pdist_tracker_events_total[$__rate_interval]))", "{{kind}}"),
            q(
                "sum by (reason) (increase(p2pdist_tracker_events_left_out_total[$__rate_interval]))",
                "left out: {{reason}}",
            ),
        ],
        "p2pdist events names hosts, packages and reasons.",
    ),
    Panel(
        "Time of broadcasts",
        "s",
        [
            q(
                "histogram_quantile(0.5, sum by (le, share) (rate(p2pdist_tracker_broadcast_seconds_bucket[1h])))",
                "until a share of {{share}} of the hosts",
            )
        ],
        "Of those of the last hour, the median. p2pdist report tells of one of them.",
    ),
    Panel(
        "Traces of lazy starts",
        "short",
        [
            q("max(p2pdist_tracker_trace_entries)", "entry points"),
            q("max(p2pdist_tracker_trace_recordings)", "recordings"),
        ],
        "Trackers with one database keep the same ones.",
    ),
    Panel("Bytes of recordings", "bytes", [q("max(p2pdist_tracker_trace_bytes)", "bytes")]),
    Panel(
        "Requests for traces",
        "ops",
        [
            q("sum by (result) (rate(p2pdist_tracker_trace_requests_total[$__rate_interval]))", "{{result}}"),
            q("sum(rate(p2pdist_tracker_traces_merged_total[$__rate_interval]))", "made of recordings"),
        ],
        "none: hosts that start such packages state nothing.",
    ),
    Panel(
        "Images given to container runtimes",
        "Bps",
        [q("sum by (source) (rate(p2pdist_agent_mirror_bytes_total[$__rate_interval]))", "{{source}}")],
        "store: they were there. swarm: they came while they were read.",
    ),
    Panel(
        "Requests to mirrors",
        "ops",
        [
            q("sum by (kind) (rate(p2pdist_agent_mirror_requests_total[$__rate_interval]))", "{{kind}}"),
            q("sum by (reason) (rate(p2pdist_agent_mirror_fallbacks_total[$__rate_interval]))", "left: {{reason}}"),
        ],
        "left: the mirror had nothing to give, and the client went to the registry.",
    ),
    Panel(
        "Objects given to S3 clients",
        "Bps",
        [q("sum by (source) (rate(p2pdist_agent_s3_bytes_total[$__rate_interval]))", "{{source}}")],
        "store: they were there. swarm: they came while they were read.",
    ),
    Panel(
        "Requests of S3 clients",
        "ops",
        [q("sum by (result) (rate(p2pdist_agent_s3_requests_total[$__rate_interval]))", "{{result}}")],
    ),
    Panel(
        "Model files given to clients",
        "Bps",
        [q("sum by (source) (rate(p2pdist_agent_hub_bytes_total[$__rate_interval]))", "{{source}}")],
        "store: they were there. swarm: they came while they were read. tracker: small ones.",
    ),
    Panel(
        "Requests of clients of model hubs",
        "ops",
        [q("sum by (result) (rate(p2pdist_agent_hub_requests_total[$__rate_interval]))", "{{result}}")],
        "unavailable: the hub limits or does not answer. broken: bodies that ended early.",
    ),
    Panel(
        "Time of pulls",
        "s",
        [
            q(
                "histogram_quantile(0.5, sum by (le) (rate(p2pdist_agent_pull_seconds_bucket[$__rate_interval])))",
                "median",
            ),
            q("p2pdist:pull_seconds:p99_5m", "99 of 100"),
        ],
        "A growing distance between the two: some hosts are held up.",
    ),
]

SWARMS = [
    Panel("Swarms", "short", [q("sum by (state) (p2pdist_tracker_swarms)", "{{state}}")]),
    Panel("Bytes of running swarms", "bytes", [q("sum by (state) (p2pdist_tracker_swarm_bytes)", "{{state}}")]),
    Panel(
        "Delivery",
        "Bps",
        [
            q("sum(p2pdist_tracker_delivery_bytes_per_second)", "as the trackers hear"),
            q("p2pdist:delivered_bytes:rate1m", "as the agents count"),
        ],
    ),
    Panel(
        "Time left",
        "s",
        [
            q(
                'sum(p2pdist_tracker_swarm_bytes{state="missing"}) '
                "/ clamp_min(sum(p2pdist_tracker_delivery_bytes_per_second), 1)",
                "at the present rate",
            )
        ],
    ),
    Panel(
        "Origin leases",
        "short",
        [
            q("sum(p2pdist_tracker_origin_leases)", "out"),
            q("sum(p2pdist_tracker_origin_leases_limit)", "limit"),
        ],
        "At the limit for long: raise --origin-streams, or the origin is too slow.",
    ),
    Panel("Streams served", "short", [q("sum(p2pdist_agent_streams)", "by all agents")]),
    Panel(
        "Plans made anew",
        "ops",
        [q("sum by (reason) (rate(p2pdist_tracker_replans_total[$__rate_interval]))", "{{reason}}")],
        "A reason that grows without joins.",
    ),
    Panel(
        "Time to plan",
        "s",
        [
            q(
                "histogram_quantile(0.5, sum by (le) (rate(p2pdist_tracker_plan_seconds_bucket[$__rate_interval])))",
                "median",
            ),
            q("p2pdist:plan_seconds:p99_5m", "99 of 100"),
        ],
    ),
    Panel(
        "Delay of the tracker's event loop", "s", [q("max by (instance) (p2pdist_tracker_lag_seconds)", "{{instance}}")]
    ),
    Panel("Sessions", "short", [q("sum by (instance) (p2pdist_tracker_sessions)", "{{instance}}")]),
    Panel(
        "Share of the blobs by tracker", "percentunit", [q("max by (instance) (p2pdist_tracker_share)", "{{instance}}")]
    ),
    Panel(
        "Since the trackers' database answered",
        "s",
        [q("max by (instance) (p2pdist_tracker_database_age_seconds)", "{{instance}}")],
    ),
    Panel("Epoch by tracker", "short", [q("max by (instance) (p2pdist_tracker_epoch)", "{{instance}}")]),
    Panel(
        "Late sites",
        "short",
        [q("sum(p2pdist_tracker_late_sites)", "less than half of what another site has")],
    ),
]

HOST = [
    Panel("Others cannot reach it", "short", [q('max(p2pdist_agent_unreachable{instance=~"$instance"})')], large=True),
    Panel(
        "Clock ahead of the tracker's",
        "s",
        [q('max(p2pdist_agent_clock_ahead_seconds{instance=~"$instance"})')],
        large=True,
    ),
    Panel("Tracker", "short", [q('min(p2pdist_agent_tracker_connected{instance=~"$instance"})')], large=True),
    Panel("Streams served", "short", [q('sum(p2pdist_agent_streams{instance=~"$instance"})')], large=True),
    Panel(
        "Pieces that did not verify",
        "short",
        [q('sum(p2pdist_agent_pieces_rejected_total{instance=~"$instance"})')],
        large=True,
    ),
    Panel(
        "Store that may not be evicted",
        "percentunit",
        [q('max(p2pdist:store_held:ratio{instance=~"$instance"})')],
        large=True,
    ),
    Panel(
        "Received",
        "Bps",
        [
            q(
                'sum by (source) (rate(p2pdist_agent_received_bytes_total{instance=~"$instance"}[$__rate_interval]))',
                "{{source}}",
            )
        ],
    ),
    Panel(
        "Sent",
        "Bps",
        [
            q(
                'sum by (transport) (rate(p2pdist_agent_sent_bytes_total{instance=~"$instance"}[$__rate_interval]))',
                "{{transport}}",
            )
        ],
        "A host that receives but never sends has a slow uplink, or is a leaf.",
    ),
    Panel(
        "Store",
        "bytes",
        [
            q('sum by (state) (p2pdist_agent_store_bytes{instance=~"$instance"})', "{{state}}"),
            q('sum(p2pdist_agent_store_held_bytes{instance=~"$instance"})', "may not be evicted"),
            q('sum(p2pdist_agent_store_capacity_bytes{instance=~"$instance"})', "capacity"),
        ],
    ),
    Panel(
        "Time of pulls",
        "s",
        [
            q(
                "histogram_quantile(0.5, sum by (le) "
                '(rate(p2pdist_agent_pull_seconds_bucket{instance=~"$instance"}[$__rate_interval])))',
                "median",
            ),
            q(
                "histogram_quantile(0.99, sum by (le) "
                '(rate(p2pdist_agent_pull_seconds_bucket{instance=~"$instance"}[$__rate_interval])))',
                "99 of 100",
            ),
        ],
    ),
    Panel(
        "Reads of lazy views that waited",
        "s",
        [
            q(
                "histogram_quantile(0.5, sum by (le) "
                '(rate(p2pdist_agent_lazy_stall_seconds_bucket{instance=~"$instance"}[$__rate_interval])))',
                "median",
            ),
            q(
                "histogram_quantile(0.99, sum by (le) "
                '(rate(p2pdist_agent_lazy_stall_seconds_bucket{instance=~"$instance"}[$__rate_interval])))',
                "99 of 100",
            ),
        ],
        "How long a program stood still for bytes that had not come.",
    ),
    Panel(
        "Lazy views",
        "short",
        [
            q('sum by (state) (p2pdist_agent_lazy_views{instance=~"$instance"})', "{{state}}"),
            q(
                'sum(increase(p2pdist_agent_lazy_refused_total{instance=~"$instance"}[$__rate_interval]))',
                "failed reads",
            ),
        ],
    ),
    Panel(
        "Awaited in lazy views",
        "bytes",
        [q('sum(p2pdist_agent_lazy_awaited_bytes{instance=~"$instance"})', "bytes")],
    ),
    Panel(
        "Filled by traces",
        "Bps",
        [
            q(
                "sum by (state) "
                '(rate(p2pdist_agent_lazy_prefetched_bytes_total{instance=~"$instance"}[$__rate_interval]))',
                "{{state}}",
            )
        ],
        "What was filled ahead of programs, and how much of it they read since.",
    ),
    Panel(
        "Pulls done",
        "ops",
        [q('sum(rate(p2pdist_agent_pull_seconds_count{instance=~"$instance"}[$__rate_interval]))', "a second")],
    ),
]


def _targets(panel: Panel) -> list[prometheus.Dataquery]:
    made = []
    for number, query in enumerate(panel.queries):
        target = prometheus.Dataquery().ref_id(chr(ord("A") + number)).expr(query.expr).datasource(SOURCE)
        made.append(target.instant() if panel.large else target.range().legend_format(query.legend))
    return made


def _built(panel: Panel) -> stat.Panel | timeseries.Panel:
    kind = stat.Panel().span(STAT_SPAN).height(STAT_HEIGHT) if panel.large else _lines()
    made = kind.title(panel.title).unit(panel.unit).datasource(SOURCE).targets(_targets(panel))  # type: ignore[arg-type]
    return made.description(panel.text) if panel.text else made


def _lines() -> timeseries.Panel:
    below = VizLegendOptions().show_legend(True).placement(LegendPlacement.BOTTOM).display_mode(LegendDisplayMode.LIST)
    return timeseries.Panel().span(SPAN).height(HEIGHT).min(0).fill_opacity(8).legend(below)


def _dashboard(uid: str, title: str, panels: Sequence[Panel]) -> dashboard.Dashboard:
    made = (
        dashboard.Dashboard(title).uid(uid).tags(["p2pdist"]).refresh("10s").time("now-1h", "now").timezone("browser")
    )
    made = made.readonly().with_variable(
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    )
    if uid == "p2pdist-host":
        hosts = dashboard.QueryVariable("instance").label("Host").datasource(SOURCE).include_all(True).multi(True)
        hosts = hosts.query("label_values(p2pdist_agent_streams, instance)").refresh(
            VariableRefresh.ON_TIME_RANGE_CHANGED
        )
        made = made.with_variable(hosts)
    for panel in panels:
        made = made.with_panel(_built(panel))
    return made


def documents() -> dict[str, str]:
    """The dashboards as JSON, by file name."""
    made = {
        "fleet.json": _dashboard("p2pdist-fleet", "p2pdist: fleet", FLEET),
        "swarms.json": _dashboard("p2pdist-swarms", "p2pdist: swarms", SWARMS),
        "host.json": _dashboard("p2pdist-host", "p2pdist: host", HOST),
    }
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {name: encoder.encode(each.build()) + "\n" for name, each in made.items()}


if __name__ == "__main__":
    for name, text in documents().items():
        (DASHBOARDS / name).write_text(text)
