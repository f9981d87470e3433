"""A mirror in a fleet with access control, as operators set it up: what processes of a host read at
its port on loopback, with nothing to show, with a token of the fleet, and with an account at the
registry."""

from __future__ import annotations

import base64
import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_rig import docker_config, make_image, push_image
from registry_rig import PASSWORD, USER, Realm, Registry, needs_registry, running_registry
from site_rig import Agent, free_port, running_site, until

from p2pdist.model.digest import digest_of
from p2pdist.package.archive.import_ import this_platform

pytestmark = needs_registry


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry"), Realm()) as running:
        yield running


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not tmp_path: a Unix socket's path may have 107 bytes only.
    with tempfile.TemporaryDirectory(prefix="p2pdist-") as made:
        yield Path(made)


def get(url: str, given: str = "") -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers={"Authorization": given} if given else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_processes_of_a_host_read_what_is_theirs(
    registry: Registry, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(directory / "none"))
    (directory / "account.json").write_text(docker_config(registry))
    upstreams, access = directory / "upstreams.toml", directory / "access" / "access.toml"
    upstreams.write_text(f'[[upstream]]\nhost = "{registry.address}"\ncredentials = "account.json"\n')
    access.parent.mkdir(mode=0o700)
    name = registry.address
    access.write_text(
        f'fleet = "prod"\npublic = ["{name}/open/*"]\n[join.default]\nread = ["*"]\n'
        f'[role.builder]\nread = ["{name}/secret/*"]\n[local]\n"mirror" = ["{name}/team/*"]\n'
    )
    access.chmod(0o600)
    image = make_image({"data": bytes(range(256)) * 5000}, architecture=this_platform().architecture)
    repositories = ("open/app", "team/app", "secret/app")
    for repository in repositories:
        push_image(registry, repository, "v1", image)
    with running_site(directory, tracker=False) as site:
        words = ["tracker", "--listen", f"127.0.0.1:{site.tracker_port}", "--state", str(directory / "state")]
        words += ["--access", str(access), "--upstreams", str(upstreams)]
        site.tracker_process = site.spawn(words, directory / "tracker.log")
        until(lambda: (access.parent / "join-default.token").exists())
        url, port = site.tracker_url.replace("http:", "https:"), free_port()
        join = str(access.parent / "join-default.token")
        Agent(site, "h0", tracker=url, join_file=join, mirror=str(port)).start()
        code, token, errors = site.command("token", "create", "--access", str(access), "--role", "builder")
        assert code == 0, errors
        base = f"http://127.0.0.1:{port}/v2"

        def status(repository: str, given: str = "") -> int:
            return get(f"{base}/{repository}/manifests/v1?ns={name}", given)[0]

        def basic(user: str, password: str) -> str:
            return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

        assert [status(each) for each in repositories] == [200, 200, 401]
        for given in (f"Bearer {token['token']}", basic("any", token["token"])):
            assert [status(each, given) for each in repositories] == [200, 200, 200]
        assert [status("secret/app", given) for given in (basic(USER, PASSWORD), basic(USER, "wrong"))] == [200, 404]
        (layer,) = [blob for blob, data in image.blobs.items() if len(data) == max(map(len, image.blobs.values()))]
        code, body = get(f"{base}/team/app/blobs/{layer}?ns={name}")
        assert code == 200 and digest_of(body) == layer
        code, body = get(f"{base}/secret/app/blobs/{layer}?ns={name}")
        assert code == 401 and json.loads(body)["errors"][0]["code"] == "UNAUTHORIZED"
        logs = "".join(path.read_text() for path in directory.glob("*.log"))
        assert PASSWORD not in logs and token["token"] not in logs
