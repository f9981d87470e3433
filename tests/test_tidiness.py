"""The look-out for leftovers sees what it is there to see."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tidiness import (
    NETNS_PREFIX,
    TOKEN_VARIABLE,
    leftovers,
    mounts_below,
    namespaces_left,
    processes_with,
    remove_leftovers,
)

DETACHED = "import os, sys, time; os.fork() and sys.exit(); os.setsid(); time.sleep(60)"


def test_a_detached_process_is_found_and_ended(tmp_path: Path) -> None:
    """A grandchild that left its parent's session is named, ended and then no longer named."""
    token = f"tidiness-{os.getpid()}"
    environment = {**os.environ, TOKEN_VARIABLE: token}
    subprocess.run([sys.executable, "-c", DETACHED], env=environment, check=True)
    found = leftovers(tmp_path, token, set(), settle_s=0.2)
    assert len([line for line in found if line.startswith("process")]) == 1
    remove_leftovers(tmp_path, token)
    deadline = time.monotonic() + 60
    while processes_with(token) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not processes_with(token)


@pytest.mark.root
def test_a_mount_is_found_and_removed(tmp_path: Path) -> None:
    """A mount below the run's directory is named, also when its path holds a space, and removed."""
    place = tmp_path / "a place"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], check=True)
    try:
        assert mounts_below(tmp_path) == [str(place)]
        assert leftovers(tmp_path, "nobody", set(), settle_s=0.1)[0] == f"mount {place}"
    finally:
        remove_leftovers(tmp_path, "nobody")
    assert mounts_below(tmp_path) == []


@pytest.mark.root
def test_a_namespace_in_which_another_run_works_is_not_named(tmp_path: Path) -> None:
    """It is named once nobody is in it any more, and so is the one beside it of the same set."""
    name, beside = f"{NETNS_PREFIX}-tidy{os.getpid()}-a", f"{NETNS_PREFIX}-tidy{os.getpid()}-b"
    made = {name, beside}
    for each in made:
        subprocess.run(["ip", "netns", "add", each], check=True)
    try:
        told = f"network namespace {name}"
        environment = {**os.environ, TOKEN_VARIABLE: "another"}
        with subprocess.Popen(
            ["ip", "netns", "exec", name, "sh", "-c", "echo in; read -r _"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "in\n"
            assert told not in leftovers(tmp_path, "nobody", set(), settle_s=0)
            assert not namespaces_left(set(), settle_s=0) & made
            process.communicate("\n")
        assert told in leftovers(tmp_path, "nobody", set(), settle_s=0)
        assert namespaces_left(set(), settle_s=0) >= made
        assert not namespaces_left(made, settle_s=0) & made
    finally:
        for each in made:
            subprocess.run(["ip", "netns", "delete", each], check=True)


def test_a_tidy_run_leaves_nothing(tmp_path: Path) -> None:
    """Without mounts and processes nothing is named."""
    assert not [line for line in leftovers(tmp_path, "nobody", set(), settle_s=0) if not line.startswith("network")]
