"""Dashboards, rules and their provisioning: well formed, true to their source, and about metrics
that exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import CollectorRegistry

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.api.metrics import registry as agent_registry
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.core.policy.budget import SiteBudget
from tracker.core.policy.table import PolicyTable
from tracker.core.views.fleet_view import View
from tracker.http.metrics import registry as tracker_registry
from tracker.service import Service

ROOT = Path(__file__).resolve().parents[1]
GRAFANA = ROOT / "grafana"
RULES = GRAFANA / "prometheus" / "p2pdist.rules.yml"
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
PROMTOOL = shutil.which("promtool")
METRIC = re.compile(r"\bp2pdist_[a-z0-9_]+")
RECORD = re.compile(r"\bp2pdist:[a-z0-9_:]+")
OF_THE_INTERFACE = {
    "p2pdist_agent_received_bytes_total": {"source"},
    "p2pdist_agent_sent_bytes_total": {"transport"},
    "p2pdist_agent_pieces_rejected_total": {"reason"},
    "p2pdist_agent_pull_seconds_bucket": {"le"},
    "p2pdist_agent_store_bytes": {"state"},
    "p2pdist_agent_store_capacity_bytes": set(),
    "p2pdist_tracker_hosts": {"zone", "state"},
    "p2pdist_tracker_swarms": {"state"},
    "p2pdist_tracker_origin_leases": set(),
    "p2pdist_tracker_plan_seconds_bucket": {"le"},
    "p2pdist_tracker_preseeds": {"state"},
}

LABELS = {
    "source",
    "transport",
    "reason",
    "state",
    "zone",
    "le",
    "kind",
    "result",
    "share",
    "version",
    "origin",
    "way",
    "site",
}

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian package prometheus)")


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """Every sample that the two services give, with its labels' names."""
    fleet = Fleet(time.monotonic())
    fleet.schedule.replans["join"] = 1
    fleet.policies.replace(PolicyTable((), {"west": SiteBudget("west", hourly_bytes=1)}))
    fleet.imports.look(now=time.monotonic(), utc_s=0.0)
    agent = Agent(AgentSettings((), "h1", "127.0.0.1:1", tmp_path_factory.mktemp("agent") / "store"))
    try:
        service = Service(fleet, Content(None))
        service.content.watch.reachable = True
        yield samples(agent_registry(agent)) | samples(tracker_registry(service, View(fleet)))
    finally:
        agent.store.close()


def samples(registry: CollectorRegistry) -> dict[str, set[str]]:
    return {sample.name: set(sample.labels) for family in registry.collect() for sample in family.samples}


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grafana_generate", GRAFANA / "generate.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def records() -> set[str]:
    return set(re.findall(r"^ +- record: (\S+)$", RULES.read_text(), re.MULTILINE))


def test_the_dashboards_are_what_their_source_says() -> None:
    made = generator().documents()
    assert {file.name for file in DASHBOARDS} == set(made)
    for file in DASHBOARDS:
        assert file.read_text() == made[file.name], "say: python grafana/generate.py"


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_a_dashboard_is_as_grafana_reads_it(file: Path) -> None:
    """Decoded by Grafana's own types and encoded again, nothing is lost; every panel has a place, a
    unit and a source."""
    body = json.loads(file.read_text())
    assert json.loads(JSONEncoder().encode(Dashboard.from_json(body))) == body
    assert body["uid"] == f"p2pdist-{file.stem}" and body["tags"] == ["p2pdist"]
    assert {link["url"] for link in body["links"]} == {
        f"/d/p2pdist-{other.stem}" for other in DASHBOARDS if other != file
    }
    places = set()
    for panel in body["panels"]:
        assert panel["title"] and panel["description"] and panel["targets"] and panel["fieldConfig"]["defaults"]["unit"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        places.add((panel["gridPos"]["x"], panel["gridPos"]["y"]))
    assert len(places) == len(body["panels"])


def test_every_metric_of_dashboards_and_rules_exists(metrics: dict[str, set[str]]) -> None:
    for file in [*DASHBOARDS, RULES]:
        text = file.read_text()
        asked = set(METRIC.findall(text))
        assert asked, f"{file.name} asks for nothing"
        assert asked <= set(metrics), f"{file.name} asks for what nobody measures: {asked - set(metrics)}"
        assert set(RECORD.findall(text)) <= records(), file.name


def test_every_label_that_is_asked_for_exists(metrics: dict[str, set[str]]) -> None:
    for file in [*DASHBOARDS, RULES]:
        for name, inside in re.findall(r"\b(p2pdist_[a-z0-9_]+)\{([^}]*)\}", file.read_text()):
            labels = set(re.findall(r"(\w+)(?:=~|!~|!=|=)", inside)) - {"instance"}
            assert labels <= metrics[name], f"{file.name}: {name} has no {labels - metrics[name]}"


def test_the_metrics_of_the_interface_keep_their_names_and_labels(metrics: dict[str, set[str]]) -> None:
    assert {name: metrics.get(name) for name in OF_THE_INTERFACE} == OF_THE_INTERFACE
    assert metrics["p2pdist_tracker_replans_total"] == {"reason"}
    for name, labels in metrics.items():
        if not name.startswith("p2pdist_"):
            continue  # of the process and the interpreter, as the library names them
        assert labels <= LABELS, f"{name}: labels must stay few"
        assert not name.endswith(("_ms", "_kb", "_percent")), f"{name}: seconds, bytes and ratios only"


@pytest.mark.slow
@needs_promtool
def test_the_rules_pass_their_unit_tests() -> None:
    for words in (("check", "rules", RULES.name), ("test", "rules", "p2pdist.rules.test.yml")):
        done = subprocess.run(
            [str(PROMTOOL), *words], cwd=RULES.parent, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@needs_promtool
@pytest.mark.parametrize("expr", ["vector(0) > 1", "vector(1)"], ids=["never", "always"])
def test_a_rule_that_is_wrong_fails_its_unit_tests(tmp_path: Path, expr: str) -> None:
    """Each alert has a test that notices when it never fires, and when it always does."""
    text = RULES.read_text()
    (tmp_path / "p2pdist.rules.test.yml").write_text((RULES.parent / "p2pdist.rules.test.yml").read_text())
    head, *alerts = text.split("- alert: ")
    assert len(alerts) >= 7
    wrong = [re.sub(r"expr:(?: >-\n(?: {10}.*\n)+| .*\n)", f"expr: {expr}\n", alert, count=1) for alert in alerts]
    (tmp_path / "p2pdist.rules.yml").write_text("- alert: ".join([head, *wrong]))
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", "p2pdist.rules.test.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    noticed = set(re.findall(r"alertname: ?(\w+)", done.stdout + done.stderr))
    assert noticed >= {alert.partition("\n")[0] for alert in alerts}


def test_every_alert_says_what_to_do() -> None:
    for part in RULES.read_text().split("- alert: ")[1:]:
        assert "summary:" in part and "action:" in part and "severity:" in part, part.partition("\n")[0]


def test_the_dashboards_use_the_variables_that_they_declare() -> None:
    for file in DASHBOARDS:
        body = json.loads(file.read_text())
        declared = {variable["name"] for variable in body["templating"]["list"]}
        used = set(re.findall(r"\$\{?([a-z]+)\}?", json.dumps(body["panels"])))
        assert used == declared, file.name


@needs_promtool
def test_the_example_configuration_is_one_that_prometheus_takes() -> None:
    done = subprocess.run(
        [str(PROMTOOL), "check", "config", "prometheus.yml"],
        cwd=RULES.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
