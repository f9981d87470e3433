"""Images of a private registry, by the commands of users and with real processes: pull, preseed,
rank and import."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from image_rig import docker_config, make_image, make_index, push_image, reads
from registry_rig import PASSWORD, Realm, Registry, needs_registry, running_registry
from site_rig import Agent, Site, running_site, until, wait_for

from p2pdist.package.archive.import_ import this_platform

pytestmark = [needs_registry, pytest.mark.slow]
HERE = this_platform().architecture
LAYERS = ({"bin/hello": b"#!/bin/sh\necho hello of the image\n"}, {"data": bytes(range(256)) * 20_000})


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry"), Realm()) as running:
        yield running


@pytest.fixture
def site(tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A tracker that has an account at the registry; nothing else has one."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "none"))
    (tmp_path / "account.json").write_text(docker_config(registry))
    file = tmp_path / "upstreams.toml"
    file.write_text(f'[[upstream]]\nhost = "{registry.address}"\ncredentials = "account.json"\n')
    with running_site(tmp_path, tracker=False) as running:
        log = tmp_path / "tracker.log"
        words = ["tracker", "--listen", f"127.0.0.1:{running.tracker_port}", "--state", str(tmp_path / "state")]
        running.tracker_process = running.spawn([*words, "--upstreams", str(file)], log)
        wait_for(running.tracker_url + "/readyz", running.tracker_process, log)
        yield running
        assert PASSWORD not in log.read_text()


def test_pull_preseed_and_rank_take_an_image_for_a_package(site: Site, registry: Registry) -> None:
    image = make_image(*LAYERS, compressions=("zstd", "gzip"), architecture=HERE)
    index = make_index({HERE: image})
    push_image(registry, "private/tools", "v1", image, index)
    reference = f"docker://{registry.address}/private/tools:v1"
    agents = [Agent(site, f"h{number}").start() for number in range(3)]
    code, ranked, errors = site.command("rank", reference, "--tracker", site.tracker_url)
    assert code == 0, errors
    assert [row["bytes_missing"] for row in ranked] == [image.size] * 3
    code, pulled, errors = site.command("pull", reference, "--socket", str(agents[0].socket))
    assert code == 0, errors
    assert (pulled["reference"], pulled["digest"]) == (reference, index.digest)
    assert (pulled["bytes_upstream"], pulled["bytes_peers"], pulled["bytes_origin"]) == (image.size, 0, 0)
    words = ("preseed", reference, "--host", "h1", "--host", "h2", "--wait", "--tracker", site.tracker_url)
    code, preseed, errors = site.command(*words)
    assert code == 0, errors
    assert (preseed["hosts_done"], preseed["package"]) == (2, f"{reference}@{index.digest}")
    code, pulled, errors = site.command("pull", reference, "--socket", str(agents[2].socket))
    assert code == 0 and pulled["bytes_cached"] == image.size, errors
    code, ranked, errors = site.command("rank", reference, "--tracker", site.tracker_url)
    assert [row["bytes_missing"] for row in ranked] == [0, 0, 0]
    for blob in image.blobs:
        assert 1 <= reads(registry, "GET", f"/v2/private/tools/blobs/{blob}") <= 2, "once without a token at the most"
    for reference, expected in (
        (f"docker://{registry.address}/private/absent:v1", 3),
        ("docker://registry.test/team/app:v1", 3),
        ("docker://registry.test/UPPER:v1", 2),
    ):
        for words in (
            ("pull", reference, "--socket", str(agents[0].socket)),
            ("rank", reference, "--tracker", site.tracker_url),
            ("preseed", reference, "--count", "1", "--tracker", site.tracker_url),
        ):
            code, _, errors = site.command(*words)
            assert code == expected and "Traceback" not in errors, (words, errors)


@pytest.mark.parametrize("docker", [False, True])
def test_an_image_becomes_a_package(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, docker: bool
) -> None:
    (tmp_path / "docker").mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    compressions = ("gzip",) if docker else ("gzip", "zstd", "plain")
    layers = (*LAYERS, {"more/file": b"m" * 5000})
    images = {
        name: make_image(*layers, compressions=compressions, docker=docker, architecture=name, entrypoint=("hello",))
        for name in ("arm64" if HERE != "arm64" else "amd64", HERE)
    }
    push_image(registry, "private/import", "v1", *images.values(), make_index(images, docker=docker))
    source = f"docker://{registry.address}/private/import:v1"
    site = Site(tmp_path)
    layout = ("--layout", str(tmp_path / "layout"))
    code, _, errors = site.command("import", source, "-t", "team/app:v1", *layout)
    assert code == 4 and "docker login" in errors
    (tmp_path / "docker" / "config.json").write_text(docker_config(registry))
    code, made, errors = site.command("import", source, "-t", "team/app:v1", *layout)
    assert code == 0, errors
    assert (made["reference"], made["files"]) == ("team/app:v1", 3)
    code, again, errors = site.command("import", source, "team/app:v2", "--platform", f"linux/{HERE}", *layout)
    assert code == 0 and [layer["digest"] for layer in again["layers"]] == [layer["digest"] for layer in made["layers"]]
    code, _, errors = site.command("import", source, "-t", "team/app:v3", "--platform", "linux/s390x", *layout)
    assert code == 3 and "s390x" in errors
    code, _, errors = site.command("import", source, *layout)
    assert code == 2
    code, _, errors = site.command("import", source, "-t", "a:b", "--upstream", "other.example", *layout)
    assert code == 2
    left = [path for path in (tmp_path / "layout").rglob("*") if "downloaded" in path.name]
    assert left == []


def test_with_access_control_hosts_get_the_images_that_they_may_read(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "none"))
    (tmp_path / "account.json").write_text(docker_config(registry))
    upstreams, access = tmp_path / "upstreams.toml", tmp_path / "access" / "access.toml"
    upstreams.write_text(f'[[upstream]]\nhost = "{registry.address}"\ncredentials = "account.json"\n')
    access.parent.mkdir(mode=0o700)
    rules = (f'[join.{name}]\nread = ["{registry.address}/team-{name}/*"]\n' for name in "ab")
    access.write_text('fleet = "prod"\n' + "".join(rules))
    access.chmod(0o600)
    image = make_image(*LAYERS, architecture=HERE)
    push_image(registry, "team-a/app", "v1", image)
    reference = f"docker://{registry.address}/team-a/app:v1"
    with running_site(tmp_path, tracker=False) as site:
        words = ["tracker", "--listen", f"127.0.0.1:{site.tracker_port}", "--state", str(tmp_path / "state")]
        words += ["--access", str(access), "--upstreams", str(upstreams)]

        def start_tracker() -> None:
            site.tracker_process = site.spawn(words, tmp_path / "tracker.log")
            until(lambda: (access.parent / "join-b.token").exists())

        def agent(name: str, join: str) -> Agent:
            file = str(access.parent / f"join-{join}.token")
            url = site.tracker_url.replace("http:", "https:")
            return Agent(site, name, tracker=url, join_file=file).start()

        def pull(at: Agent) -> tuple[int, dict[str, Any], str]:
            return site.command("pull", reference, "--socket", str(at.socket))

        start_tracker()
        first, second, stranger = agent("a0", "a"), agent("a1", "a"), agent("b0", "b")
        code, pulled, errors = pull(first)
        assert code == 0 and pulled["bytes_upstream"] == image.size, errors
        code, _, errors = pull(stranger)
        assert code == 3, errors
        code, pulled, errors = pull(second)
        assert code == 0 and (pulled["bytes_upstream"], pulled["bytes_peers"]) == (0, image.size), errors
        site.kill_tracker()
        start_tracker()
        code, pulled, errors = pull(agent("a2", "a"))
        # It may have asked before the others had come back to the tracker.
        assert code == 0 and pulled["bytes_upstream"] + pulled["bytes_peers"] == image.size, errors
        assert pull(stranger)[0] == 3
        assert PASSWORD not in "".join(path.read_text() for path in tmp_path.glob("*.log"))
