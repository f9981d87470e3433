"""`p2pdist simulate` from outside."""

import json
import subprocess
import sys

import pytest


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "p2pdist.cli.main", "simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


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


def test_people_get_a_table() -> None:
    done = simulate("--hosts", "5", "--size", "2MB", "--nic", "80Mbit/s", "--origin-rate", "10MB/s", "--latency", "1ms")
    assert done.returncode == 0
    assert "makespan" in done.stdout and "x the bound" in done.stdout and "origin sent     1.000 x" in done.stdout


def test_several_runs_with_faults() -> None:
    """The figures are those of the slowest run; each run is listed."""
    done = simulate("--hosts", "12", "--size", "4MiB", "--nic", "1MB/s", "--faults", "any", "--runs", "3", "--json")
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert [each["seed"] for each in body["each"]] == [1, 2, 3]
    assert body["ratio"] == max(each["ratio"] for each in body["each"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--size", "many"),
        ("--size", "0"),
        ("--nic", "fast"),
        ("--nic", "0MB/s"),
        ("--latency", "5"),
        ("--hosts", "0"),
        ("--faults", "gremlins"),
        ("--piece-size", "100kB"),
    ],
)
def test_bad_usage_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    done = simulate(*arguments)
    assert done.returncode == 2
    assert done.stdout == "" and "p2pdist: " in done.stderr and "Traceback" not in done.stderr
