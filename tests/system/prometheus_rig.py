"""A Prometheus of its own on loopback, with the project's rules at a pace that tests can wait
for."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from site_rig import free_port, wait_for

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "grafana" / "prometheus" / "p2pdist.rules.yml"
PROMETHEUS = shutil.which("prometheus")
WINDOW = "8s"
PAUSE = "1s"
INTERVAL = "1s"

CONFIG = """
global: {scrape_interval: INTERVAL, scrape_timeout: INTERVAL, evaluation_interval: 1s}
rule_files: [rules.yml]
scrape_configs:
  - job_name: p2pdist-tracker
    file_sd_configs: [{files: [trackers.json], refresh_interval: 1s}]
  - job_name: p2pdist-agent
    file_sd_configs: [{files: [agents.json], refresh_interval: 1s}]
"""


def hurried(rules: str, window: str = WINDOW, pause: str = PAUSE) -> str:
    """The rules with windows and pauses of seconds; everything else as it is."""
    return re.sub(r"for: \d+[ms]", f"for: {pause}", re.sub(r"\[\d+m\]", f"[{window}]", rules))


class Prometheus:
    """Asks it."""

    def __init__(self, directory: Path, port: int) -> None:
        self._directory, self._port = directory, port

    def watch(self, trackers: Sequence[str], agents: Sequence[str]) -> None:
        """Scrape these addresses from now on."""
        for name, targets in (("trackers", trackers), ("agents", agents)):
            new = self._directory / f"{name}.new"
            new.write_text(json.dumps([{"targets": list(targets)}]))
            new.rename(self._directory / f"{name}.json")

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an expression now."""
        query = urllib.parse.urlencode({"query": expr})
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/query?{query}", timeout=60) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def fired(self) -> dict[str, set[str]]:
        """Alerts that have fired since its start, each with the instances that it was about."""
        return self._instances('count_over_time(ALERTS{alertstate="firing"}[1d])')

    def firing(self) -> dict[str, set[str]]:
        """Alerts that fire, each with the instances that it is about."""
        return self._instances('ALERTS{alertstate="firing"}')

    def _instances(self, expr: str) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for sample in self.query(expr):
            found.setdefault(sample["metric"]["alertname"], set()).add(sample["metric"].get("instance", ""))
        return found


@contextlib.contextmanager
def running_prometheus(
    trackers: Sequence[str] = (),
    agents: Sequence[str] = (),
    *,
    interval: str = INTERVAL,
    window: str = WINDOW,
    pause: str = PAUSE,
) -> Iterator[Prometheus]:
    """One that scrapes these addresses every `interval` and waits as long for an answer, with
    windows and pauses of rules as given."""
    assert PROMETHEUS is not None
    with tempfile.TemporaryDirectory(prefix="p2pdist-prometheus-", ignore_cleanup_errors=True) as name:
        directory, port = Path(name), free_port()
        (directory / "prometheus.yml").write_text(CONFIG.replace("INTERVAL", interval))
        (directory / "rules.yml").write_text(hurried(RULES.read_text(), window, pause))
        rig = Prometheus(directory, port)
        rig.watch(trackers, agents)
        words = [PROMETHEUS, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
        words += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
        log = directory / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(words, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=directory)
        try:
            wait_for(f"http://127.0.0.1:{port}/-/ready", process, log)
            yield rig
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
