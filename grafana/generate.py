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
from grafana_foundation_sdk.models.dashboard import DashboardLinkType, DataSourceRef, VariableRefresh

DASHBOARDS = Path(__file__).parent / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
BOARDS = {"p2pdist-fleet": "p2pdist: fleet", "p2pdist-swarms": "p2pdist: swarms", "p2pdist-host": "p2pdist: host"}
"""Titles by identifier; each board links to the others."""

VARIABLES = {
    "p2pdist-fleet": [("zone", "Zone", "p2pdist_tracker_hosts, zone")],
    "p2pdist-swarms": [("tracker", "Tracker", "p2pdist_tracker_sessions, instance")],
    "p2pdist-host": [("instance", "Host", "p2pdist_agent_streams, instance")],
}
"""What may be chosen on a board: name, title, and the metric and label that have its values."""

SPAN, HEIGHT, STAT_SPAN, STAT_HEIGHT = 12, 8, 6, 4


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `text` is its description: what it shows, or what to watch for. With `large` it is
    a number instead of lines over time."""

    title: str
    unit: str
    queries: Sequence[Query]
    text: str
    large: bool = False


def q(expr: str, legend: str = "") -> Query:
    return Query(expr, legend)


FLEET = [
    Panel(
        "Hosts connected",
        "short",
        [q('sum(p2pdist_tracker_hosts{state="present"})')],
        text="Agents with a session at a tracker. Fewer than there are machines: see the hosts that are absent.",
        large=True,
    ),
    Panel(
        "Running swarms",
        "short",
        [q('sum(p2pdist_tracker_swarms{state="running"})')],
        text="Blobs that some host still lacks.",
        large=True,
    ),
    Panel(
        "Running swarms are complete to",
        "percentunit",
        [q("p2pdist:swarms_done:ratio")],
        text="Of all bytes that hosts of running swarms want, how many are there.",
        large=True,
    ),
    Panel(
        "Alerts",
        "short",
        [q('count(ALERTS{alertname=~"P2PDist.+", alertstate="firing"}) or vector(0)')],
        text="Alerts of p2pdist that fire now; each says what to do.",
        large=True,
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
        text="Flat for minutes while swarms run: see the stalled ones under Failures.",
    ),
    Panel(
        "Hosts by zone",
        "short",
        [q('sum by (zone, state) (p2pdist_tracker_hosts{zone=~"$zone"})', "{{zone}} {{state}}")],
        text="Absent hosts ended without a word within the last hour: p2pdist events --kind host-lost says why.",
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
        text="Any: p2pdist events names host, package and cause.",
    ),
    Panel(
        "Pulls that fail",
        "short",
        [
            q(
                "sum by (reason) (increase(p2pdist_agent_pulls_failed_total[$__rate_interval])) > 0 or vector(0)",
                "{{reason}}",
            )
        ],
        "By the kind of the failure. p2pdist events --kind pull-failed names hosts, packages and causes.",
    ),
    Panel(
        "Pulls in flight",
        "short",
        [q("sum by (state) (p2pdist_agent_pulls)", "{{state}}")],
        "waiting: nothing was asked of others yet. That grows: the tracker or the origin does not answer.",
    ),
    Panel(
        "Bytes of packages by where they were",
        "Bps",
        [q("sum by (source) (rate(p2pdist_agent_pulled_bytes_total[$__rate_interval]))", "{{source}}")],
        "store: they were on the host already.",
    ),
    Panel(
        "Origin",
        "short",
        [q("min by (instance, origin) (p2pdist_tracker_origin_reachable)", "{{origin}} from {{instance}}")],
        "0: the tracker cannot read it, which agents will meet as well. p2pdist events --kind origin says why.",
    ),
    Panel(
        "Clocks",
        "s",
        [q("max(p2pdist_tracker_clock_skew_seconds)", "the farthest off")],
        "Over 30 s: p2pdist events --kind clock-off names the host.",
    ),
    Panel(
        "Hosts with a clock that is off",
        "short",
        [q("sum(p2pdist_tracker_clock_off_hosts)", "over 30 s off")],
        "Run chrony or systemd-timesyncd there.",
    ),
    Panel(
        "Versions of agents",
        "short",
        [q("sum by (version) (p2pdist_tracker_agents)", "{{version}}")],
        "Several for longer than an upgrade takes: hosts were left out.",
    ),
    Panel(
        "Processes by version",
        "short",
        [q("count by (job, version) (p2pdist_build_info)", "{{job}} {{version}}")],
        "Trackers and agents that are scraped.",
    ),
    Panel(
        "Fullest disks",
        "percentunit",
        [q("topk(5, p2pdist:disk_used:ratio)", "{{instance}}")],
        "Of stores. Over 95 %: what else fills the disk makes pulls fail.",
    ),
    Panel(
        "Preseeds",
        "short",
        [q("sum by (state) (p2pdist_tracker_preseeds)", "{{state}}")],
        text="p2pdist events --kind preseed-failed names those that failed, and the hosts that lack the package.",
    ),
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
    Panel("Bytes of recordings", "bytes", [q("max(p2pdist_tracker_trace_bytes)", "bytes")], text="64 MiB at most."),
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
        text="unavailable and broken: the log of the agent says why.",
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
    Panel(
        "Swarms",
        "short",
        [q("sum by (state) (p2pdist_tracker_swarms)", "{{state}}")],
        text="stalled: hosts lack pieces, and for 30 s none got any.",
    ),
    Panel(
        "Bytes of running swarms",
        "bytes",
        [q("sum by (state) (p2pdist_tracker_swarm_bytes)", "{{state}}")],
        text="Over all hosts: what is there, and what is still to come.",
    ),
    Panel(
        "Delivery",
        "Bps",
        [
            q("sum(p2pdist_tracker_delivery_bytes_per_second)", "as the trackers hear"),
            q("p2pdist:delivered_bytes:rate1m", "as the agents count"),
        ],
        text="Trackers hear of it seconds later than agents count.",
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
        text="Of all running swarms together, were nothing else to begin.",
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
    Panel(
        "Streams served",
        "short",
        [q("sum(p2pdist_agent_streams)", "by all agents")],
        text="Streams that hosts receive from other hosts.",
    ),
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
        text="Over 0.1 s: the tracker needs a faster core, or fewer agents.",
    ),
    Panel(
        "Delay of the tracker's event loop",
        "s",
        [q('max by (instance) (p2pdist_tracker_lag_seconds{instance=~"$tracker"})', "{{instance}}")],
        text="Over 0.5 s: the tracker needs a faster core, or fewer agents.",
    ),
    Panel(
        "Sessions",
        "short",
        [q('sum by (instance) (p2pdist_tracker_sessions{instance=~"$tracker"})', "{{instance}}")],
        text="Agents connected, by tracker.",
    ),
    Panel(
        "Share of the blobs by tracker",
        "percentunit",
        [q('max by (instance) (p2pdist_tracker_share{instance=~"$tracker"})', "{{instance}}")],
        text="0: it drains, or went out of the ownership.",
    ),
    Panel(
        "Since the trackers' database answered",
        "s",
        [q('max by (instance) (p2pdist_tracker_database_age_seconds{instance=~"$tracker"})', "{{instance}}")],
        text="Over 10 s: nothing stops, and no tracker that dies is replaced.",
    ),
    Panel(
        "Epoch by tracker",
        "short",
        [q('max by (instance) (p2pdist_tracker_epoch{instance=~"$tracker"})', "{{instance}}")],
        text="Trackers that differ for more than seconds go by different ownerships.",
    ),
    Panel(
        "Late sites",
        "short",
        [q("sum(p2pdist_tracker_late_sites)", "less than half of what another site has")],
        text="Above 0 for minutes: the link to the WAN of a site is full or slow.",
    ),
    Panel(
        "Over the WAN of sites with a budget",
        "Bps",
        [
            q(
                'sum by (site) (rate(p2pdist_tracker_wan_bytes_total{instance=~"$tracker"}[$__rate_interval]))',
                "{{site}}",
            )
        ],
        text="What hosts report; a site with a rate keeps below it.",
    ),
    Panel(
        "Budget of the last hour",
        "bytes",
        [q('sum by (site, kind) (p2pdist_tracker_wan_hour_bytes{instance=~"$tracker"})', "{{site}} {{kind}}")],
        text="A site that has used what is allowed waits until a part of it is an hour old.",
    ),
    Panel(
        "Swarms that wait for a site's budget",
        "short",
        [q('sum by (site) (p2pdist_tracker_wan_waiting{instance=~"$tracker"})', "{{site}}")],
        text="They go on by themselves: at the hours of the site, or when its last hour has room.",
    ),
]

HOST = [
    Panel(
        "Others cannot reach it",
        "short",
        [q('max(p2pdist_agent_unreachable{instance=~"$instance"})')],
        text="1: others read storage instead. p2pdist doctor on this host says why.",
        large=True,
    ),
    Panel(
        "Clock ahead of the tracker's",
        "s",
        [q('max(p2pdist_agent_clock_ahead_seconds{instance=~"$instance"})')],
        text="More than 5 s either way: run chrony or systemd-timesyncd there.",
        large=True,
    ),
    Panel(
        "Tracker",
        "short",
        [q('min(p2pdist_agent_tracker_connected{instance=~"$instance"})')],
        text="0: no tracker answers this host. What runs goes on, what is new waits.",
        large=True,
    ),
    Panel(
        "Streams served",
        "short",
        [q('sum(p2pdist_agent_streams{instance=~"$instance"})')],
        text="Streams that hosts receive from other hosts.",
        large=True,
    ),
    Panel(
        "Pieces that did not verify",
        "short",
        [q('sum(p2pdist_agent_pieces_rejected_total{instance=~"$instance"})')],
        text="Any increase: its source has a bad disk, memory or link. p2pdist events --kind wrong-bytes names it.",
        large=True,
    ),
    Panel(
        "Store that may not be evicted",
        "percentunit",
        [q('max(p2pdist:store_held:ratio{instance=~"$instance"})')],
        text="Over 90 %: the next pull may find no room.",
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
        text="By where the bytes came from.",
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
        text="By kind. Partial bytes that stay: pulls that do not end.",
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
        text="Of pulls that succeeded on this host.",
    ),
    Panel(
        "Pulls",
        "short",
        [
            q('sum by (state) (p2pdist_agent_pulls{instance=~"$instance"})', "{{state}}"),
            q(
                'sum by (reason) (increase(p2pdist_agent_pulls_failed_total{instance=~"$instance"}[$__rate_interval])) > 0'
                " or vector(0)",
                "failed: {{reason}}",
            ),
        ],
        "What is pulled now, and what failed. p2pdist status there says why.",
    ),
    Panel(
        "Bytes of packages by where they were",
        "Bps",
        [
            q(
                'sum by (source) (rate(p2pdist_agent_pulled_bytes_total{instance=~"$instance"}[$__rate_interval]))',
                "{{source}}",
            )
        ],
        "store: they were on the host already.",
    ),
    Panel(
        "Disk of the store",
        "bytes",
        [q('sum by (state) (p2pdist_agent_disk_bytes{instance=~"$instance"})', "{{state}}")],
        "Free without falling store bytes: something else fills the disk.",
    ),
    Panel(
        "Evictions",
        "short",
        [q('sum(increase(p2pdist_agent_evictions_total{instance=~"$instance"}[$__rate_interval]))', "blobs and trees")],
        "Many: the store is too small for what its jobs need.",
    ),
    Panel(
        "Mounts",
        "short",
        [q('sum by (way) (p2pdist_agent_mounts{instance=~"$instance"}) > 0 or vector(0)', "{{way}}")],
        "copy and hardlink: this host can mount nothing better. p2pdist doctor there says why.",
    ),
    Panel(
        "Agent process",
        "bytes",
        [q('sum(process_resident_memory_bytes{instance=~"$instance"})', "resident memory")],
        "Grows without end: report it.",
    ),
    Panel(
        "Processor of the agent",
        "percentunit",
        [q('sum(rate(process_cpu_seconds_total{instance=~"$instance"}[$__rate_interval]))', "of one core")],
        "Near 1 for long: its event loop is late.",
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
        text="filling: contents still come while programs read. Failed reads: nothing came in time.",
    ),
    Panel(
        "Awaited in lazy views",
        "bytes",
        [q('sum(p2pdist_agent_lazy_awaited_bytes{instance=~"$instance"})', "bytes")],
        text="Above 0 for long: nothing comes, and programs stand still.",
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
        text="Pulls that succeeded.",
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
    return made.description(panel.text)


def _lines() -> timeseries.Panel:
    below = VizLegendOptions().show_legend(True).placement(LegendPlacement.BOTTOM).display_mode(LegendDisplayMode.LIST)
    return timeseries.Panel().span(SPAN).height(HEIGHT).min(0).fill_opacity(8).legend(below)


def _dashboard(uid: str, panels: Sequence[Panel]) -> dashboard.Dashboard:
    made = (
        dashboard.Dashboard(BOARDS[uid])
        .uid(uid)
        .tags(["p2pdist"])
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
    )
    made = made.readonly().with_variable(
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    )
    for other, title in BOARDS.items():
        if other != uid:
            link = dashboard.DashboardLink(title).type(DashboardLinkType.LINK).url(f"/d/{other}").keep_time(True)
            made = made.link(link.include_vars(False).tooltip(f"Open {title}"))
    for name, label, values in VARIABLES.get(uid, ()):
        variable = dashboard.QueryVariable(name).label(label).datasource(SOURCE).include_all(True).multi(True)
        variable = variable.query(f"label_values({values})").refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        made = made.with_variable(variable.all_value(".*"))
    for panel in panels:
        made = made.with_panel(_built(panel))
    return made


def documents() -> dict[str, str]:
    """The dashboards as JSON, by file name."""
    made = {
        "fleet.json": _dashboard("p2pdist-fleet", FLEET),
        "swarms.json": _dashboard("p2pdist-swarms", SWARMS),
        "host.json": _dashboard("p2pdist-host", HOST),
    }
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {name: encoder.encode(each.build()) + "\n" for name, each in made.items()}


if __name__ == "__main__":
    for name, text in documents().items():
        (DASHBOARDS / name).write_text(text)
