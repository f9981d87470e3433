"""deploy/compose/three-trackers.yml beside docker-compose.yml: commands with flags that exist,
names and volumes that are there, one access directory, and no password in a command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from test_kubernetes import parsed

ROOT = Path(__file__).resolve().parents[1]
BASE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
MORE = yaml.safe_load((ROOT / "deploy" / "compose" / "three-trackers.yml").read_text())
TRACKERS = ("tracker", "tracker2", "tracker3")


def filled(text: str) -> str:
    """A text with the defaults of its variables."""
    return re.sub(r"\$\{\w+:?[-?]([^}]*)\}", r"\1", text)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_has_a_name_of_its_own_and_what_the_others_have(name: str, tmp_path: Path) -> None:
    service = {**BASE["services"].get(name, {}), **MORE["services"][name]}
    params = parsed([filled(word) for word in service["command"]], "", tmp_path).params
    assert params["advertise"] == f"{name}:7070"
    assert str(params["access"]) == "/var/lib/p2pdist/access/access.toml"
    assert [each.split(":")[:2] for each in service["volumes"]] == [["tracker", "/var/lib/p2pdist"]]
    assert not any("--state" in word or "postgresql" in word for word in service["command"])
    state = urlsplit(filled(service["environment"]["P2PDIST_TRACKER_STATE"]))
    assert (state.scheme, state.hostname) == ("postgresql", "postgresql")
    assert service["healthcheck"]["test"][-1].endswith("'http://127.0.0.1:7079/readyz', timeout=9)")


def test_services_that_are_waited_for_and_volumes_are_there() -> None:
    services, volumes = BASE["services"] | MORE["services"], BASE["volumes"] | MORE["volumes"]
    for name, service in MORE["services"].items():
        assert set(service.get("depends_on", {})) <= set(services), name
        named = {each.partition(":")[0] for each in service.get("volumes", ()) if not each.startswith(".")}
        assert named <= set(volumes), name
        for path in (each.partition(":")[0] for each in service.get("volumes", ()) if each.startswith(".")):
            assert (ROOT / path).is_file()
    targets = json.loads((ROOT / "deploy" / "compose" / "three-trackers.json").read_text())
    assert [each.partition(":")[0] for group in targets for each in group["targets"]] == list(TRACKERS)
