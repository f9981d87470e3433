"""What people type for a package or a file, with whole processes: several at once, patterns, the
first digits of a digest, names of files, and names that are nearly right."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest
from site_rig import Agent, Site, running_site

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    """An agent whose origin has team/a with two tags, team/b, and three files."""
    with tempfile.TemporaryDirectory(prefix="p2pdist-") as directory, running_site(Path(directory)) as site:
        yield _filled(site)


def _filled(site: Site) -> Agent:
    layout = ("--layout", str(site.directory / "layout"))
    for name in ("team/a:v1", "team/a:v2", "team/b:v1"):
        source = site.directory / name.replace(":", "-").replace("/", "-")
        source.mkdir()
        (source / "content").write_text(name)
        for words in (("pack", str(source), "-t", name), ("push", name, "--origin", f"file://{site.layout}")):
            code, _, errors = site.command(*words, *layout)
            assert code == 0, errors
    for name in ("model-1.bin", "model-2.bin", "config.json"):
        (site.directory / name).write_text(name)
    files = [str(site.directory / name) for name in ("model-1.bin", "model-2.bin", "config.json")]
    assert site.command("blob", "push", *files, "--origin", f"file://{site.layout}")[0] == 0
    (agent,) = site.agents(1)
    return agent


def run(agent: Agent, *words: str, code: int = 0, **variables: str) -> tuple[str, str]:
    """What a command for people wrote on standard output and standard error."""
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(agent.site.directory)}
    environ |= {"P2PDIST_SOCKET": str(agent.socket), "P2PDIST_ORIGIN": f"file://{agent.site.layout}"}
    done = programs.run(*words, env=environ | variables)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def test_several_packages_and_a_pattern_come_with_one_command(agent: Agent) -> None:
    stdout, _ = run(agent, "pull", "team/a:*", "team/b:v1")
    lines = stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[::2]] == ["team/a:v1", "team/a:v2", "team/b:v1"]
    documents = json.loads(run(agent, "pull", "team/*", "--json")[0])
    assert [document["reference"] for document in documents] == ["team/a:v1", "team/a:v2", "team/b:v1"]
    assert all(document["bytes_cached"] == document["bytes_total"] for document in documents)


def test_a_failure_among_several_keeps_the_others_and_gives_the_exit_code(agent: Agent) -> None:
    stdout, stderr = run(agent, "pull", "team/b:v1", "team/a:v3", "-q", code=3)
    assert stdout.startswith("team/b:v1  sha256:") and stdout.count("\n") == 1
    assert "team/a:v3 is not at" in stderr and "Its tags there: v1, v2" in stderr
    documents = json.loads(run(agent, "pull", "team/b:v1", "team/a:v3", "--json", code=3)[0])
    assert [document.get("status", 0) for document in documents] == [0, 404]


def test_a_digest_or_its_first_digits_name_a_package(agent: Agent) -> None:
    digest = json.loads(run(agent, "resolve", "team/a:v2", "--json")[0])["digest"]
    for word in (digest, digest[:19]):
        pulled = json.loads(run(agent, "pull", word, "--json")[0])
        assert [document["digest"] for document in pulled] == [digest]
    assert "no package has the digest" in run(agent, "pull", "sha256:" + "0" * 12, code=3)[1]


def test_what_is_packed_here_and_not_pushed_is_said(agent: Agent) -> None:
    """Where P2PDIST_LAYOUT has it packed, `ls --local` lists it. Torrents, which are at the origin
    for each file, are no packages that a pattern means."""
    layout = agent.site.directory / "layout"
    source = agent.site.directory / "team-b-v1"
    assert agent.site.command("pack", str(source), "-t", "team/new:v1", "--layout", str(layout))[0] == 0
    _, stderr = run(agent, "pull", "team/new:v1", code=3, P2PDIST_LAYOUT=str(layout))
    assert "It was packed on this host, but not pushed there: p2pdist push team/new:v1 --origin URL\n" in stderr
    _, stderr = run(agent, "pull", "team/new:v2", code=3, P2PDIST_LAYOUT=str(layout))
    assert "Tags of team/new on this host: v1." in stderr
    assert "team/new:v1" in run(agent, "ls", "--local", "-q", P2PDIST_LAYOUT=str(layout))[0].split()
    stdout, _ = run(agent, "pull", "*", "-q")
    assert [line.split()[0] for line in stdout.splitlines()] == ["team/a:v1", "team/a:v2", "team/b:v1"]


def test_what_matches_nothing_says_where_it_looked(agent: Agent) -> None:
    _, stderr = run(agent, "pull", "other/*", code=3)
    assert "no package matches other/*" in stderr and f"at file://{agent.site.layout}" in stderr


def test_a_mistyped_name_and_verb_are_answered_with_the_near_one(agent: Agent) -> None:
    run(agent, "pull", "team/a:v1")
    assert "Did you mean team/a:v1?" in run(agent, "pull", "taem/a:v1", code=3)[1]
    assert "Did you mean team/b:v1?" in run(agent, "inspect", "team/bb:v1", code=3)[1]
    assert "Did you mean pull?" in run(agent, "pul", code=2)[1]
    assert "Did you mean ls?" in run(agent, "images", code=2)[1]
    assert "Did you mean" not in run(agent, "xyzzy", code=2)[1]


def test_files_come_by_their_names_into_a_directory(agent: Agent) -> None:
    target = agent.site.directory / "model"
    stdout, _ = run(agent, "blob", "pull", "model-*.bin", "config.json", "-d", str(target))
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model-1.bin", "model-2.bin"]
    assert all(path.read_text() == path.name for path in target.iterdir())
    assert stdout.splitlines()[0].startswith(f"{target}/")
    _, stderr = run(agent, "blob", "pull", "modle-1.bin", "-d", str(target), code=3)
    assert "Did you mean model-1.bin?" in stderr
    run(agent, "blob", "pull", "model-*.bin", "-o", str(target / "one"), code=2)


def test_pushing_a_file_prints_its_digest_and_on_standard_error_what_was_sent(agent: Agent) -> None:
    file = str(agent.site.directory / "config.json")
    stdout, stderr = run(agent, "blob", "push", file)
    assert stdout.startswith("sha256:") and stdout.count("\n") == 1
    assert "already there" in stderr
    assert run(agent, "blob", "push", file, "--quiet") == (stdout, "")


def test_what_is_here_is_pinned_and_removed_by_pattern_or_first_digits(agent: Agent) -> None:
    run(agent, "pull", "team/*")
    entries = json.loads(run(agent, "ls", "--json")[0])
    digest = next(entry["digest"] for entry in entries if entry["reference"] == "team/b:v1")
    assert run(agent, "pin", digest[:19])[0].startswith("pinned pin:team/b:v1  ")
    assert "is pinned" in run(agent, "rm", digest[:19], code=1)[1]
    run(agent, "pin", "--remove", digest[:19])
    assert "begins 0" not in run(agent, "rm", "sha256:" + "0" * 12, code=3)[1]
    stdout, _ = run(agent, "rm", digest[:19], "team/a:*")
    assert [line.split(" ")[0] for line in stdout.splitlines()] == ["team/b:v1", "team/a:v1", "team/a:v2"]
    assert "team/" not in run(agent, "ls")[0]


def test_what_must_stay_keeps_no_other_from_being_removed(agent: Agent) -> None:
    run(agent, "pull", "team/*")
    run(agent, "pin", "team/a:v1")
    documents = json.loads(run(agent, "rm", "team/*", "team/c:v1", "--json", code=1)[0])
    assert [document.get("status", 0) for document in documents] == [0, 0, 409, 404]
    listed = [entry["reference"] for entry in json.loads(run(agent, "ls", "--json")[0])]
    assert [reference for reference in listed if not reference.startswith("blob:")] == ["team/a:v1"]
    assert "team/a:v1 is pinned" in run(agent, "rm", "team/c:v1", "team/a:*", code=3)[1]
    run(agent, "pin", "--remove", "team/a:v1")
    run(agent, "rm", "team/a:v1")


def test_the_brackets_of_an_address_are_no_pattern(agent: Agent) -> None:
    assert "is not on this host" in run(agent, "rm", "docker://[::1]:5000/team/a:v1", code=3)[1]
    assert "registries are not searched" in run(agent, "rm", "docker://[::1]:5000/team/*", code=2)[1]


def test_a_name_of_a_file_leads_out_of_no_directory(agent: Agent, tmp_path: Path) -> None:
    """Whoever may write at the origin chooses the names."""
    index = agent.site.layout / "index.json"
    index.write_text(index.read_text().replace('"config.json"', '"../../out"'))
    run(agent, "blob", "pull", "../../out", "-d", str(tmp_path / "a" / "b" / "c"))
    (file,) = (tmp_path / "a" / "b" / "c").iterdir()
    assert len(file.name) == 64 and not (tmp_path / "a" / "out").exists()
