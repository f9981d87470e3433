"""Compile caches that travel: what one host has compiled another one like it need not compile, by
the compiler's own count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest
from late_modules import late_module
from site_rig import Agent, Site, running_site
from waits import wait_until

from p2pdist.agent.api.client import LocalClient

late_module("numba")
pytestmark = pytest.mark.slow

PROGRAM = """
import json
import numba

@numba.njit(cache=True)
def total(count):
    found = 0.0
    for number in range(count):
        found += number * 0.5
    return found

assert total(1000) == 249750.0
hits, misses = (sum(found.values()) for found in (total.stats.cache_hits, total.stats.cache_misses))
print(json.dumps({"loaded": hits, "compiled": misses}))
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name in ("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "program.py").write_text(PROGRAM)
    with running_site(tmp_path) as running:
        yield running


def counted(site: Site, env: dict[str, str]) -> dict[str, int]:
    """Run the program; what it says of its cache."""
    done = subprocess.run(
        [sys.executable, str(site.directory / "program.py")],
        env={**os.environ, **env},
        capture_output=True,
        check=True,
        timeout=120,
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


def restored(site: Site, agent: Agent, directory: str, namespace: str = "cache") -> dict[str, object]:
    words = ("--dir", str(site.directory / directory), "--python", sys.executable, "--socket", str(agent.socket))
    code, found, errors = site.command("cache", "restore", namespace, *words)
    assert code == 0, errors
    return found


def saved(site: Site, directory: str) -> dict[str, object]:
    words = ("--dir", str(site.directory / directory), "--python", sys.executable)
    places = ("--layout", str(site.directory / "layout"), "--origin", f"file://{site.layout}")
    code, found, errors = site.command("cache", "save", "cache", *words, *places)
    assert code == 0, errors
    return found


def wait_until_found(site: Site, agent: Agent) -> None:
    """For a second the tracker remembers that there was no cache."""
    wait_until(lambda: restored(site, agent, "seen")["found"], "that the cache is found")


def test_the_second_host_starts_without_compiling(site: Site) -> None:
    first, second = site.agents(2)
    begun = restored(site, first, "caches-first")
    assert begun["found"] is False and str(begun["reference"]).startswith("cache/")
    env = begun["env"]
    assert isinstance(env, dict)
    assert counted(site, env) == {"loaded": 0, "compiled": 1}
    assert counted(site, env) == {"loaded": 1, "compiled": 0}
    (site.directory / "caches-first" / "private").write_text("no cache")
    made = saved(site, "caches-first")
    assert made["reference"] == begun["reference"] and made["files"] == 2
    wait_until_found(site, first)
    found = restored(site, second, "caches-second")
    assert found["found"] is True and (found["files"], found["key"]) == (2, begun["key"])
    assert not (site.directory / "caches-second" / "private").exists(), "caches alone travel"
    there = found["env"]
    assert isinstance(there, dict) and there["NUMBA_CACHE_DIR"].startswith(str(site.directory / "caches-second"))
    assert counted(site, there) == {"loaded": 1, "compiled": 0}
    assert restored(site, second, "caches-second")["files"] == 0, "what is there is left alone"
    assert LocalClient(second.socket).mounts() == [], "nothing stays shown"


def test_run_leads_the_program_to_its_caches(site: Site) -> None:
    (agent,) = site.agents(1)
    source = site.directory / "app"
    source.mkdir()
    (source / "name").write_text("app")
    entry = json.dumps([sys.executable, str(site.directory / "program.py")])
    layout = ("--layout", str(site.directory / "layout"))
    for words in (
        ("pack", str(source), "-t", "team/app:v1", "--entrypoint", entry, *layout),
        ("push", "team/app:v1", *layout, "--origin", f"file://{site.layout}"),
    ):
        code, _, errors = site.command(*words)
        assert code == 0, errors

    def run(directory: str) -> tuple[dict[str, int], str]:
        words = ("--cache", "cache", "--cache-dir", site.directory / directory, "--socket", agent.socket)
        done = programs.run("run", *words, "team/app:v1")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    found, said = run("one")
    assert found == {"loaded": 0, "compiled": 1} and "there is no cache" in said
    saved(site, "one")
    wait_until_found(site, agent)
    found, said = run("two")
    assert found == {"loaded": 1, "compiled": 0} and "there is no cache" not in said, said


def test_an_interpreter_that_is_a_script_is_asked_itself(site: Site) -> None:
    """As those of pyenv are: not the shell that runs it."""
    (agent,) = site.agents(1)
    source = site.directory / "app"
    source.mkdir()
    (source / "python3").write_text(f'#!/usr/bin/env sh\nexec {sys.executable} "$@"\n')
    (source / "python3").chmod(0o755)
    layout = ("--layout", str(site.directory / "layout"))
    origin = ("--origin", f"file://{site.layout}")
    assert site.command("pack", str(source), "-t", "team/app:v1", "--env", "PATH=${P2PDIST_ROOT}:/bin", *layout)[0] == 0
    assert site.command("push", "team/app:v1", *layout, *origin)[0] == 0
    words = ("--cache", "cache", "--cache-dir", site.directory / "one", "--socket", agent.socket)
    done = programs.run("run", *words, "team/app:v1", "--", "sh", "-c", "echo $TRITON_CACHE_DIR")
    assert done.stdout.strip() == str(site.directory / "one" / "triton"), done.stderr


def test_caches_that_others_could_write_to_are_refused(site: Site) -> None:
    (agent,) = site.agents(1)
    place = site.directory / "open"
    place.mkdir()
    place.chmod(0o777)
    words = ("--dir", str(place), "--python", sys.executable)
    code, _, errors = site.command("cache", "restore", "cache", *words, "--socket", str(agent.socket))
    assert code == 4 and "other users can write" in errors
    places = ("--layout", str(site.directory / "layout"), "--origin", f"file://{site.layout}")
    code, _, errors = site.command("cache", "save", "cache", *words, *places)
    assert code == 3 and "there is no cache" in errors
    code, _, errors = site.command("cache", "save", "../cache", *words, *places)
    assert code == 2
    code, _, errors = site.command("cache", "key", "cache", "--python", "/no/python")
    assert code == 3 and "/no/python" in errors


def test_the_key_differs_where_a_version_does(tmp_path: Path) -> None:
    from p2pdist.cli.verbs.cache.key import CacheKey, cache_key

    here = cache_key("cache", sys.executable)
    assert here.facts["numba"] and here.facts["python"] and here.facts["machine"]
    assert cache_key("cache", sys.executable).digits == here.digits
    for fact in here.facts:
        assert CacheKey("cache", {**here.facts, fact: "other"}).digits != here.digits
