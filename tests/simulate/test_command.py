"""`p2pdist simulate` from outside."""

import json
import subprocess
from pathlib import Path

import programs
import pytest


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return programs.run("simulate", *arguments)


def test_json_has_the_fields_that_scripts_use() -> None:
    """One document on standard output and nothing else; the same seed prints the same figures."""
    arguments = ("--hosts", "20", "--size", "8MiB", "--nic", "10MB/s", "--seed", "5", "--json")
    done, again = simulate(*arguments), simulate(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    body, same = json.loads(done.stdout), json.loads(again.stdout)
    assert body["bound_s"] == pytest.approx((8 << 20) / 10e6)
    assert body["ratio"] == pytest.approx(body["makespan_s"] / body["bound_s"])
    assert body["origin_ratio"] == 1.0
    assert body["p50_s"] <= body["p99_s"] <= body["p999_s"] <= body["makespan_s"]
    assert (body["hosts"], body["complete"], body["size"], body["piece_size"]) == (20, 20, 8 << 20, 65536)
    assert body["fingerprint"] == same["fingerprint"]
    last = body["late"][0]
    assert last["completed_s"] == body["makespan_s"] and len(body["late"]) == 10
    assert (last["site"], last["crossings"], last["streams"]) == ("", [0, 0], 2) and max(last["levels"]) > 1


def test_people_get_a_table() -> None:
    done = simulate("--hosts", "5", "--size", "2MB", "--nic", "80Mbit/s", "--origin-rate", "10MB/s", "--latency", "1ms")
    assert done.returncode == 0
    assert "makespan" in done.stdout and "x the bound" in done.stdout and "origin sent     1.000 x" in done.stdout
    assert "\nlast host       h0" in done.stdout and "hosts below the origin's readers, by 2 streams" in done.stdout


def test_several_runs_with_faults() -> None:
    """The figures are those of the slowest run; each run is listed."""
    done = simulate("--hosts", "12", "--size", "4MiB", "--nic", "1MB/s", "--faults", "any", "--runs", "3", "--json")
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert [each["seed"] for each in body["each"]] == [1, 2, 3]
    assert body["ratio"] == max(each["ratio"] for each in body["each"])


def test_a_tracker_that_is_lost_and_hosts_that_are_cut_off() -> None:
    """Trees and swarms together: all hosts end with everything, and the table says how much came by
    BitTorrent."""
    arguments = ["--hosts", "24", "--size", "6MiB", "--nic", "1MB/s", "--transport", "auto", "--latency", "1ms"]
    done = simulate(*arguments, "--cut-half", "2s", "--lose-tracker", "3s:20s", "--json")
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert body["complete"] == 24 and body["moved"] > 0 and 0 < body["swarm_ratio"] < 1
    done = simulate(*arguments[:-4], "--transport", "swarm")
    assert "\nby BitTorrent   100.0% of all bytes; 0 pulls" in done.stdout, done.stderr
    wrong = simulate("--lose-tracker", "soon")
    assert wrong.returncode == 2


def test_racks_shares_and_arrivals(tmp_path: Path) -> None:
    """Everything at once; the file has what --json prints, and people are told of racks, zones and
    healthy hosts."""
    target = tmp_path / "out.json"
    links = ["--nic", "2MB/s,1MB/s:10%", "--racks", "4", "--oversubscription", "2:1", "--zones", "2"]
    events = ["--arrivals", "uniform:1", "--slow", "5%:0.1", "--crash", "5%", "--kill-tracker-every", "6.5s"]
    arguments = ["--hosts", "40", "--size", "4MiB", *links, *events]
    done = simulate(*arguments, "--report", str(target))
    assert done.returncode == 0, done.stderr
    for line in ("rack received", "origin to zones", "healthy hosts", "own time"):
        assert f"\n{line}" in done.stdout
    body = json.loads(target.read_text())
    again = json.loads(simulate(*arguments, "--json").stdout)
    assert {**body, "seconds": 0} == {**again, "seconds": 0}
    assert (body["complete"], body["lost"]) == (38, 2)
    assert 36 <= body["healthy"] <= 38
    assert 1.0 <= body["rack_rx_ratio_mean"] <= body["rack_rx_ratio_max"]
    assert set(body["zone_origin_ratios"]) <= {"z0", "z1"}
    assert len(body["curve_s"]) == 100 and body["curve_s"][94] == body["makespan_s"] and body["curve_s"][95] is None
    assert body["healthy_p99_s"] > 0 and body["own_ratio_max"] >= 1.0 and "completions" not in body


def test_oversubscription_is_said_of_the_hosts_of_a_rack() -> None:
    """Ten hosts of 2 MB/s in a rack, 20:1: 1 MB/s, as --rack-rate says it."""
    common = ("--hosts", "20", "--size", "4MiB", "--nic", "2MB/s", "--racks", "2", "--json")
    one, other = simulate(*common, "--oversubscription", "20:1"), simulate(*common, "--rack-rate", "1MB/s")
    assert json.loads(one.stdout)["fingerprint"] == json.loads(other.stdout)["fingerprint"]
    assert json.loads(one.stdout)["bound_s"] == pytest.approx((4 << 20) / 1e6)
    assert json.loads(simulate(*common).stdout)["bound_s"] == pytest.approx((4 << 20) / 2e6)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--size", "many"),
        ("--size", "0"),
        ("--nic", "fast"),
        ("--nic", "0MB/s"),
        ("--latency", "5"),
        ("--latency", "2s"),
        ("--sites", "3", "--rtt", "100s"),
        ("--hosts", "0"),
        ("--faults", "gremlins"),
        ("--piece-size", "100kB"),
        ("--nic", "300MB/s,100MB/s"),
        ("--racks", "201"),
        ("--racks", "2", "--zones", "3"),
        ("--rack-rate", "1GB/s"),
        ("--racks", "2", "--rack-rate", "1GB/s", "--oversubscription", "4:1"),
        ("--racks", "2", "--oversubscription", "4:none"),
        ("--arrivals", "flood:3"),
        ("--arrivals", "burst:3"),
        ("--arrivals", "ramp"),
        ("--slow", "5%"),
        ("--slow", "5%:0"),
        ("--slow-both",),
        ("--slow-downlinks",),
        ("--crash", "half"),
        ("--kill-tracker-every", "0s"),
        ("--plot", "out.txt"),
    ],
)
def test_bad_usage_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    done = simulate(*arguments)
    assert done.returncode == 2
    assert done.stdout == "" and "p2pdist: " in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("outage", [("--lose-tracker", "0s"), ("--lose-tracker", "0s:119s"), ("--cut-half", "0s")])
def test_an_outage_that_lasts_is_no_defect(outage: tuple[str, str]) -> None:
    """Pulls that give up in it are told as that; a shorter outage they survive."""
    words = ("--hosts", "5", "--size", "4MiB")
    done = simulate(*words, *outage)
    assert (done.returncode, done.stdout) == (1, "") and "gave up (seed 1): nothing of sha256:" in done.stderr
    assert "defect" not in done.stderr and "say when it ends" in done.stderr
    assert simulate(*words, outage[0], "0s:10s").returncode == 0


def test_a_slow_share_without_a_factor_is_told_how_to_write_both() -> None:
    assert "Write a share and a factor, such as 5%:0.1" in simulate("--slow", "5%").stderr


def test_a_vouched_list_and_a_liar() -> None:
    """The table and the document say how many rounds the list took and which host lied; what cannot
    be vouched for is refused, and so is a lie where hosts have a list."""
    arguments = ["--hosts", "8", "--size", "2MiB", "--nic", "40Mbit/s", "--vouched"]
    done = simulate(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert (body["complete"], body["origin_ratio"], body["rounds"], body["blamed"]) == (8, 1.0, 0, [])
    body = json.loads(simulate(*arguments, "--faults", "lie", "--json").stdout)
    assert body["complete"] == 8
    assert body["rounds"] == len(body["blamed"]) == 1
    assert "\nvouched list    2 rounds; blamed: h" in simulate(*arguments, "--faults", "lie").stdout
    assert simulate(*arguments[:-1], "--faults", "lie").returncode == 2
    assert simulate(*arguments, "--piece-size", "1MiB").returncode == 2
    assert simulate(*arguments, "--transport", "swarm").returncode == 2
