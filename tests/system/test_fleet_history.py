"""The fleet's history with real processes: a broadcast that ends, a pull that fails, a host that is
killed, and what `p2pdist events` and `p2pdist report` say of them, also after a restart."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
from site_rig import Site, running_site, until

from p2pdist.model.errors import NotFound, P2PDistError

pytestmark = pytest.mark.slow

PACKAGE = "team/app:v1"
MIB = 1 << 20


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Four agents have received a package, one could not pull another, one was killed."""
    with running_site(tmp_path_factory.mktemp("site"), tracker=False) as site:
        site.start_tracker("--log-level", "info", "--origin-limit", "20MB/s")
        source = site.directory / "source"
        source.mkdir()
        (source / "weights").write_bytes(os.urandom(6 * MIB))
        layout = ("--layout", str(site.directory / "layout"))
        code, _, errors = site.command("pack", str(source), "-t", PACKAGE, "--format", "tree", *layout)
        assert code == 0, errors
        code, _, errors = site.command("push", PACKAGE, "--origin", f"file://{site.layout}", *layout)
        assert code == 0, errors
        agents = site.agents(4)
        pulls = [agent.start_pull(package=PACKAGE) for agent in agents]
        assert [pull.result().state for pull in pulls] == ["done"] * 4
        with pytest.raises(P2PDistError):
            agents[1].pull(package="team/none:v1")
        agents[3].kill()
        agents[2].stop()
        until(lambda: {"broadcast", "pull-failed", "host-lost"} <= {kind for kind, _ in told(site)})
        yield site


def events(site: Site, *options: str) -> list[dict[str, Any]]:
    done = programs.run("events", "--tracker", site.tracker_url, "--json", *options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def told(site: Site) -> list[tuple[str, str]]:
    return [(record["event"]["kind"], record["event"]["text"]) for record in events(site)]


def test_events_name_hosts_packages_and_reasons(site: Site) -> None:
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for record in events(site):
        by_kind.setdefault(record["event"]["kind"], []).append(record["event"])
    (lost,) = by_kind["host-lost"]
    assert (lost["host"], lost["reason"]) == ("h3", "its connection broke") and lost["address"].startswith("127.0.0.1:")
    (failed,) = by_kind["pull-failed"]
    assert (failed["host"], failed["package"]) == ("h1", "team/none:v1") and failed["reason"].startswith("not-found: ")
    (ended,) = by_kind["broadcast"]
    assert ended["package"] == PACKAGE and ended["broadcast"]["complete"] == ended["broadcast"]["hosts"] == 4
    # What a host read before its lease went on and reported after that is not counted.
    assert 0.0 < ended["broadcast"]["origin_copies"] <= 4.0
    # The origin's limit and F are known, so the bound is, too: nothing is faster.
    assert ended["broadcast"]["bound_s"] == pytest.approx(ended["broadcast"]["bytes"] / 20e6, rel=0.01)
    assert any("has started" in change["text"] for change in by_kind["change"])


def test_filters_and_lines_for_people(site: Site) -> None:
    done = programs.run("events", "--tracker", site.tracker_url, "--kind", "host-lost,pull-failed", "--since", "1h")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 2
    assert any("pull-failed     h1 could not pull team/none:v1: not-found" in line for line in lines)
    assert [record["event"]["host"] for record in events(site, "--host", "h3")] == ["h3"]
    assert events(site, "--package", "team/none")[0]["event"]["host"] == "h1"
    wrong = programs.run("events", "--tracker", site.tracker_url, "--kind", "hosts")
    assert wrong.returncode == 2 and "there is no kind of event 'hosts'" in wrong.stderr


def test_the_log_has_a_line_for_each(site: Site) -> None:
    log = (site.directory / "tracker.log").read_text()
    for _, text in told(site):
        assert text in log, text


def test_the_metrics_count_them(site: Site) -> None:
    import urllib.request

    text = urllib.request.urlopen(site.tracker_url + "/metrics", timeout=60).read().decode()
    for kind in ("broadcast", "pull-failed", "host-lost"):
        assert f'p2pdist_tracker_events_total{{kind="{kind}"}} 1.0' in text
    assert 'p2pdist_tracker_broadcast_seconds_count{share="1"} 1.0' in text


def test_a_report_of_the_broadcast(site: Site, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.svg"
    done = programs.run("report", PACKAGE, "--tracker", site.tracker_url, "--plot", picture)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 complete" in done.stdout and "from the origin" in done.stdout and "100 % |" in done.stdout
    assert "<svg" in picture.read_text()
    code, document, _ = site.command("report", "team/app", "--tracker", site.tracker_url)
    assert code == 0 and document["broadcasts"][0]["event"]["broadcast"]["hosts"] == 4
    digest = document["broadcasts"][0]["event"]["digest"]
    assert site.command("report", digest[7:19], "--tracker", site.tracker_url)[1] == document
    none = programs.run("report", "team/none", "--tracker", site.tracker_url)
    assert none.returncode == NotFound.exit_code and "no broadcast of team/none is remembered" in none.stderr


def test_followers_hear_what_happens_also_over_a_restart(site: Site) -> None:
    before = [record for record in events(site) if record["event"]["kind"] != "change"]
    words = ("events", "--follow", "--json", "--tracker", site.tracker_url, "--kind", "change", "--since", "1h")
    with programs.running(*words, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        first = json.loads(program.stdout.readline())
        site.kill_tracker()
        site.start_tracker("--log-level", "info")
        second = json.loads(program.stdout.readline())
        assert all("has started" in record["event"]["text"] for record in (first, second))
        assert second["number"] > first["number"] and second["at"] > first["at"]
    after = [record for record in events(site) if record["event"]["kind"] != "change"]
    assert after[: len(before)] == before, "a restart keeps what happened"


def test_a_preseed_that_fails_is_remembered_once(site: Site) -> None:
    words = ("--host", "nobody", "--deadline", "1s", "--id", "p1", "--wait", "--tracker", site.tracker_url)
    assert programs.run("preseed", PACKAGE, *words).returncode == 1
    until(lambda: [record for record in events(site) if record["event"]["kind"] == "preseed-failed"])
    (record,) = events(site, "--kind", "preseed-failed")
    assert record["event"]["text"].startswith("preseed p1 of team/app@") and "nobody (" in record["event"]["text"]
    assert record["at"] - record["since"] >= 1.0
