"""`p2pdist mirror install` and `uninstall`: the files of each runtime below a root, whatever is
there before, and that nothing but the mirror's lines comes or goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from test_cli_main import run

from p2pdist.cli.runtimes import edits
from p2pdist.cli.runtimes.files import HostFiles
from p2pdist.cli.runtimes.installation import Outcome, install, uninstall
from p2pdist.cli.runtimes.record import RECORD, Installation, load_record
from p2pdist.cli.verbs.mirror import mirror_url
from p2pdist.gateway.registry.names import parse_request
from p2pdist.model.errors import Conflict, Corrupt, P2PDistError, Refused, TooLarge, UsageError
from p2pdist.model.image import path_of_upstream

MIRROR = "http://127.0.0.1:7073"
HUB, QUAY, LOCAL = "docker.io", "quay.io", "127.0.0.1:5000"
HOSTS = "etc/containerd/certs.d/docker.io/hosts.toml"
DROP_IN = "etc/containers/registries.conf.d/99-p2pdist.conf"
DAEMON = "etc/docker/daemon.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "host" / "etc").mkdir(parents=True)
    return tmp_path / "host"


def put(root: Path, path: str, text: str, mode: int = 0o644) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(mode)
    return file


def everything(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every path below a root, with mode and content."""
    return {
        str(path.relative_to(root)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(root.rglob("*"))
    }


def installed(root: Path, name: str, *upstreams: str, address: str = MIRROR, **more: Any) -> Outcome:
    return install(HostFiles(root), name, Installation(address, upstreams), **more)


def changes(outcome: Outcome) -> dict[str, str]:
    return {change.path.lstrip("/"): change.change for change in outcome.changes}


def toml(root: Path, path: str) -> dict[str, Any]:
    return tomllib.loads((root / path).read_text())


# -- every runtime


FORMER = {
    "nothing": {},
    "empty files": {HOSTS: "", DAEMON: "", "etc/containers/registries.conf": ""},
    "files of the host": {
        HOSTS: 'server = "https://registry-1.docker.io"\n\n# ours\n[host."https://cache.example"]\n  ca = "/etc/ca.crt"\n',
        DAEMON: '{\n\t"log-driver": "journald",\n\t"registry-mirrors": ["https://cache.example"]\n}\n',
        "etc/containers/registries.conf": '[[registry]]\nlocation = "docker.io"\n[[registry.mirror]]\nlocation = "cache.example/hub"\n',
        "etc/docker/certs.d/docker.io/ca.crt": "PEM",
    },
}


@pytest.mark.parametrize("former", FORMER.values(), ids=FORMER)
@pytest.mark.parametrize("name", ["containerd", "docker", "podman", "crio"])
def test_uninstalling_leaves_what_was_there_before(root: Path, name: str, former: dict[str, str]) -> None:
    for path, text in former.items():
        put(root, path, text, mode=0o640)
    before = everything(root)
    assert "unchanged" not in changes(installed(root, name, HUB, QUAY, LOCAL)).values()
    written = everything(root)
    assert written != before
    assert set(changes(installed(root, name, HUB, QUAY, LOCAL)).values()) == {"unchanged"}
    assert everything(root) == written
    uninstall(HostFiles(root), name)
    assert everything(root) == before
    assert uninstall(HostFiles(root), name).changes == ()


@pytest.mark.parametrize("name", ["containerd", "docker", "podman", "crio"])
def test_a_dry_run_writes_nothing_and_says_all(root: Path, name: str) -> None:
    planned = installed(root, name, HUB, dry_run=True)
    assert everything(root).keys() == {"etc"}
    installed(root, name, HUB)
    for change in planned.changes:
        assert (root / change.path.lstrip("/")).read_text() == change.after


def test_upstreams_are_added_and_taken_away_one_by_one(root: Path) -> None:
    installed(root, "containerd", HUB)
    assert changes(installed(root, "containerd", QUAY)) == {
        HOSTS: "unchanged",
        "etc/containerd/certs.d/quay.io/hosts.toml": "created",
    }
    assert changes(uninstall(HostFiles(root), "containerd", (HUB,)))[HOSTS] == "removed"
    assert not (root / HOSTS).parent.exists() and (root / "etc/containerd/certs.d/quay.io/hosts.toml").exists()


def test_another_address_takes_the_place_of_the_first(root: Path) -> None:
    put(root, DAEMON, '{"debug": false}')
    for name in ("containerd", "docker", "podman"):
        installed(root, name, HUB)
        installed(root, name, HUB, address="http://127.0.0.1:9999")
    assert list(toml(root, HOSTS)["host"]) == ["http://127.0.0.1:9999"]
    assert json.loads((root / DAEMON).read_text()) == {"debug": False, "registry-mirrors": ["http://127.0.0.1:9999"]}
    assert toml(root, DROP_IN)["registry"][0]["mirror"] == [{"location": "localhost:9999/docker.io", "insecure": True}]


def test_a_file_that_was_edited_since_loses_our_lines_alone(root: Path) -> None:
    installed(root, "containerd", HUB)
    installed(root, "podman", HUB)
    put(root, DAEMON, '{"debug": true}')
    installed(root, "docker", HUB)
    (root / HOSTS).write_text((root / HOSTS).read_text() + '\n[host."https://later.example"]\n')
    (root / DROP_IN).write_text('unqualified-search-registries = ["quay.io"]\n' + (root / DROP_IN).read_text())
    daemon = json.loads((root / DAEMON).read_text())
    daemon["registry-mirrors"].append("https://later.example")
    (root / DAEMON).write_text(json.dumps(daemon | {"debug": False}))
    for name in ("containerd", "podman", "docker"):
        uninstall(HostFiles(root), name)
    assert toml(root, HOSTS) == {"host": {"https://later.example": {}}}
    assert toml(root, DROP_IN) == {"unqualified-search-registries": ["quay.io"]}
    assert json.loads((root / DAEMON).read_text()) == {"debug": False, "registry-mirrors": ["https://later.example"]}
    assert not (root / RECORD.lstrip("/")).exists()


def test_a_file_that_was_removed_since_stays_away(root: Path) -> None:
    installed(root, "containerd", HUB)
    (root / HOSTS).unlink()
    uninstall(HostFiles(root), "containerd")
    assert not (root / HOSTS).exists() and not (root / RECORD.lstrip("/")).exists()


def test_without_its_record_installing_finds_its_own_lines(root: Path) -> None:
    installed(root, "containerd", HUB)
    (root / RECORD.lstrip("/")).unlink()
    installed(root, "containerd", HUB)
    assert list(toml(root, HOSTS)["host"]) == [MIRROR]
    uninstall(HostFiles(root), "containerd")
    assert not (root / HOSTS).exists()


# -- hosts.toml


def test_the_mirror_is_the_first_host_and_may_resolve(root: Path) -> None:
    put(root, HOSTS, 'server = "https://hub.example"\n[host."https://cache.example"]\ncapabilities = ["pull"]\n')
    installed(root, "containerd", HUB)
    after = toml(root, HOSTS)
    assert list(after["host"]) == [MIRROR, "https://cache.example"]
    assert after["host"][MIRROR] == {"capabilities": ["pull", "resolve"], "dial_timeout": "1s"}
    assert after["server"] == "https://hub.example" and after["host"]["https://cache.example"] == {
        "capabilities": ["pull"]
    }


def test_without_a_server_containerd_goes_on_to_the_registry_itself(root: Path) -> None:
    """`server` would have to say what containerd knows: that Docker Hub is registry-1.docker.io."""
    installed(root, "containerd", HUB)
    assert toml(root, HOSTS).keys() == {"host"}


@pytest.mark.parametrize(
    ("version", "knows"),
    [("1.6.20~ds1", False), ("v2.0.5", False), ("v2.1.0-rc.1", True), ("2.3.1", True), ("odd", True)],
)
def test_dial_timeout_is_written_where_the_version_knows_it(root: Path, version: str, knows: bool) -> None:
    put(
        root,
        "usr/bin/containerd",
        f"#!/bin/sh\necho containerd github.com/containerd/containerd {version} abc\n",
        0o755,
    )
    installed(root, "containerd", HUB)
    assert ("dial_timeout" in toml(root, HOSTS)["host"][MIRROR]) == knows


def test_arrays_over_several_lines_are_no_tables(root: Path) -> None:
    put(root, HOSTS, 'client = [\n  ["/a.cert", "/a.key"],\n]\n[host."https://b"]\n')
    installed(root, "containerd", HUB)
    assert list(toml(root, HOSTS)["host"]) == [MIRROR, "https://b"] and toml(root, HOSTS)["client"]


@pytest.mark.parametrize("text", ['host = {"https://b" = {}}\n', 'host."https://b".capabilities = ["pull"]\n'])
def test_hosts_that_cannot_be_put_second_are_a_conflict(root: Path, text: str) -> None:
    put(root, HOSTS, text)
    with pytest.raises(Conflict, match="no mirror can be added") as failure:
        installed(root, "containerd", HUB)
    assert f'[host."{MIRROR}"]' in failure.value.remedy


def test_a_mirror_that_an_administrator_wrote_stays_when_ours_goes(root: Path) -> None:
    put(root, HOSTS, f'[host."{MIRROR}"]\ncapabilities = ["pull"]\n')
    before = everything(root)[HOSTS]
    installed(root, "containerd", HUB)
    uninstall(HostFiles(root), "containerd")
    assert everything(root)[HOSTS] == before


def test_certificates_beside_a_new_file_are_still_used(root: Path) -> None:
    """containerd reads *.crt by their names only where there is no hosts.toml."""
    place = "etc/containerd/certs.d/quay.io"
    for name in ("ca.crt", "client.cert", "client.key", "alone.cert"):
        put(root, f"{place}/{name}", "PEM")
    installed(root, "containerd", QUAY)
    after = toml(root, f"{place}/hosts.toml")
    assert after["ca"] == [f"/{place}/ca.crt"]
    assert after["client"] == [[f"/{place}/client.cert", f"/{place}/client.key"]]


def test_what_counts_for_all_registries_counts_on(root: Path) -> None:
    general = "etc/containerd/certs.d/_default"
    put(root, f"{general}/hosts.toml", '[host."https://cache.example"]\nca = "ca.crt"\n')
    installed(root, "containerd", QUAY)
    after = toml(root, "etc/containerd/certs.d/quay.io/hosts.toml")["host"]
    assert list(after) == [MIRROR, "https://cache.example"]
    assert after["https://cache.example"]["ca"] == f"/{general}/ca.crt"


def test_the_spelling_of_a_port_that_is_there_is_used(root: Path) -> None:
    put(root, "etc/containerd/certs.d/127.0.0.1_5000_/ca.crt", "PEM")
    assert "etc/containerd/certs.d/127.0.0.1_5000_/hosts.toml" in changes(installed(root, "containerd", LOCAL))


CONFIG = "etc/containerd/config.toml"


@pytest.mark.parametrize(
    ("config", "directory"),
    [
        (
            'version = 2\n[plugins."io.containerd.grpc.v1.cri".registry]\nconfig_path = "/etc/c/certs.d"\n',
            "etc/c/certs.d",
        ),
        (
            "version = 3\n[plugins.'io.containerd.cri.v1.images'.registry]\nconfig_path = '/a/b:/etc/docker/certs.d'\n",
            "a/b",
        ),
    ],
)
def test_hosts_files_are_where_containerd_reads_them(root: Path, config: str, directory: str) -> None:
    put(root, CONFIG, config)
    outcome = installed(root, "containerd", HUB)
    assert changes(outcome) == {f"{directory}/docker.io/hosts.toml": "created"} and not outcome.notes


@pytest.mark.parametrize("config", [None, "", "version = 2\n", 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\n'])
def test_a_containerd_that_reads_no_hosts_files_is_told_of(root: Path, config: str | None) -> None:
    if config is not None:
        put(root, CONFIG, config)
    [note] = installed(root, "containerd", HUB).notes
    assert 'config_path = "/etc/containerd/certs.d"' in note and "restart" in note


def test_imported_files_of_containerd_count(root: Path) -> None:
    put(root, CONFIG, 'imports = ["/etc/containerd/conf.d/*.toml"]\n')
    put(root, "etc/containerd/conf.d/a.toml", '[plugins."io.containerd.grpc.v1.cri".registry]\nconfig_path = "/x"\n')
    assert changes(installed(root, "containerd", HUB)) == {"x/docker.io/hosts.toml": "created"}


def test_older_settings_with_which_containerd_does_not_start_are_told_of(root: Path) -> None:
    table = '[plugins."io.containerd.grpc.v1.cri".registry'
    put(
        root,
        CONFIG,
        f'{table}]\nconfig_path = "/etc/containerd/certs.d"\n{table}.mirrors."docker.io"]\nendpoint = ["https://x"]\n',
    )
    [note] = installed(root, "containerd", HUB).notes
    assert "registry.mirrors" in note


# -- daemon.json


def test_settings_of_docker_stay(root: Path) -> None:
    put(root, DAEMON, '{\n    "data-root": "/düne",\n    "registry-mirrors": ["https://cache.example"]\n}')
    installed(root, "docker", HUB)
    text = (root / DAEMON).read_text()
    assert json.loads(text) == {"data-root": "/düne", "registry-mirrors": [MIRROR, "https://cache.example"]}
    assert '\n    "data-root": "/düne"' in text


def test_docker_asks_by_hosts_files_too_and_by_registry_mirrors_for_the_hub_alone(root: Path) -> None:
    outcome = installed(root, "docker", QUAY)
    assert changes(outcome) == {"etc/docker/certs.d/quay.io/hosts.toml": "created"}
    assert any("localhost:7073/quay.io/" in note for note in outcome.notes)
    assert DAEMON in changes(installed(root, "docker", HUB))
    assert changes(uninstall(HostFiles(root), "docker", (HUB,)))[DAEMON] == "removed"


@pytest.mark.parametrize(
    "text", ["{", "[]", '"a"', '{"registry-mirrors": "https://x"}', '{"registry-mirrors": [1]}', "[" * 100_000]
)
def test_a_daemon_json_that_docker_would_not_take_is_left_alone(root: Path, text: str) -> None:
    put(root, DAEMON, text)
    before = everything(root)
    with pytest.raises(Corrupt, match=r"daemon\.json"):
        installed(root, "docker", HUB)
    assert everything(root) == before


# -- registries.conf


def test_the_drop_in_names_the_upstream_in_the_path(root: Path) -> None:
    installed(root, "podman", HUB, LOCAL)
    assert toml(root, DROP_IN)["registry"] == [
        {"prefix": HUB, "location": HUB, "mirror": [{"location": "localhost:7073/docker.io", "insecure": True}]},
        {
            "prefix": LOCAL,
            "location": LOCAL,
            "mirror": [{"location": "localhost:7073/127.0.0.1__5000", "insecure": True}],
        },
    ]


@pytest.mark.parametrize("upstream", [HUB, LOCAL, "localhost:5000", "a-b.example", "[::1]:5000"])
def test_an_upstream_comes_back_from_its_path(upstream: str) -> None:
    path = f"/v2/{path_of_upstream(upstream)}/team/app/manifests/v1"
    assert str(parse_request(path, [], ()).name) == f"{upstream}/team/app"
    assert ":" not in path_of_upstream(upstream) or upstream.startswith("[")


def test_what_other_files_say_of_an_upstream_is_repeated(root: Path) -> None:
    """Of two files that name an upstream the later one counts whole."""
    put(root, "etc/containers/registries.conf", '[[registry]]\nprefix = "quay.io"\nlocation = "old.example"\n')
    put(
        root,
        "etc/containers/registries.conf.d/10-site.conf",
        '[[registry]]\nprefix = "quay.io"\nlocation = "site.example/quay"\ninsecure = true\nmirror-by-digest-only = true\n'
        '[[registry.mirror]]\nlocation = "cache.example/quay"\npull-from-mirror = "digest-only"\n',
    )
    installed(root, "podman", QUAY)
    [registry] = toml(root, DROP_IN)["registry"]
    assert registry == {
        "prefix": "quay.io",
        "location": "site.example/quay",
        "insecure": True,
        "mirror-by-digest-only": True,
        "mirror": [
            {"location": "localhost:7073/quay.io", "insecure": True},
            {"location": "cache.example/quay", "pull-from-mirror": "digest-only"},
        ],
    }


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("etc/containers/registries.conf", '[[registry]]\nlocation = "quay.io"\nnew-setting = 1\n'),
        (
            "etc/containers/registries.conf",
            '[[registry]]\nlocation = "quay.io"\n[[registry.mirror]]\nnew-setting = 1\n',
        ),
        ("etc/containers/registries.conf", '[[registry]]\nprefix = "quay.io"\nlocation = 5\n'),
        ("etc/containers/registries.conf", '[[registry]]\nlocation = "quay.io"\n[[registry.mirror]]\ninsecure = 1\n'),
        ("etc/containers/registries.conf.d/zz.conf", '[[registry]]\nprefix = "quay.io"\n'),
    ],
)
def test_what_cannot_be_repeated_is_a_conflict(root: Path, path: str, text: str) -> None:
    put(root, path, text)
    before = everything(root)
    with pytest.raises(Conflict):
        installed(root, "podman", QUAY)
    assert everything(root) == before


def test_podman_and_crio_share_the_file(root: Path) -> None:
    installed(root, "podman", HUB)
    installed(root, "crio", QUAY)
    assert [entry["prefix"] for entry in toml(root, DROP_IN)["registry"]] == [HUB, QUAY]
    uninstall(HostFiles(root), "podman")
    assert [entry["prefix"] for entry in toml(root, DROP_IN)["registry"]] == [QUAY]
    uninstall(HostFiles(root), "crio")
    assert everything(root).keys() == {"etc"}


def test_settings_of_some_of_an_upstreams_images_are_told_of(root: Path) -> None:
    put(root, "etc/containers/registries.conf", '[[registry]]\nprefix = "docker.io/library"\nlocation = "x.example"\n')
    assert any("docker.io/library" in note for note in installed(root, "podman", HUB).notes)


# -- strange hosts


def test_nothing_is_written_behind_links(root: Path, tmp_path: Path) -> None:
    target = put(tmp_path, "elsewhere", "{}")
    (root / "etc/docker").mkdir()
    (root / DAEMON).symlink_to(target)
    with pytest.raises(Conflict, match=r"daemon\.json is a symbolic link"):
        installed(root, "docker", HUB)
    (root / "etc/containerd").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(Conflict, match="/etc/containerd is a symbolic link"):
        installed(root, "containerd", HUB)
    assert target.read_text() == "{}" and sorted(os.listdir(tmp_path)) == ["elsewhere", "host"]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda path: path.mkdir(), Conflict),
        (lambda path: os.mkfifo(path), Conflict),
        (lambda path: path.write_bytes(b"\xff\xfe{}"), Corrupt),
        (lambda path: path.write_bytes(b" " * (2 << 20)), TooLarge),
    ],
)
def test_what_is_no_text_is_left_alone(root: Path, make: Any, kind: type[P2PDistError]) -> None:
    (root / "etc/docker").mkdir()
    make(root / DAEMON)
    with pytest.raises(kind) as failure:
        installed(root, "docker", HUB)
    assert failure.value.remedy and not (root / RECORD.lstrip("/")).exists()


@pytest.mark.root
def test_when_one_file_cannot_be_written_none_is(root: Path) -> None:
    """A file on which another is mounted cannot be replaced."""
    daemon = put(root, DAEMON, "{}")
    before = everything(root)
    subprocess.run(["mount", "--bind", str(daemon), str(daemon)], check=True)
    try:
        with pytest.raises(P2PDistError, match="something is mounted there") as failure:
            installed(root, "docker", HUB)
    finally:
        subprocess.run(["umount", str(daemon)], check=True)
    assert "--dry-run" in failure.value.remedy
    assert everything(root) == before


@pytest.mark.root
def test_a_read_only_etc_is_said_to_be_one(root: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(root / "etc")], check=True)
    try:
        with pytest.raises(P2PDistError, match="read-only") as failure:
            installed(root, "containerd", HUB)
        assert installed(root, "containerd", HUB, dry_run=True).changes
    finally:
        subprocess.run(["umount", str(root / "etc")], check=True)
    assert "--dry-run" in failure.value.remedy


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_user_without_rights_is_told_to_be_root(root: Path) -> None:
    for path in (root, *root.parents):
        if path != Path("/"):
            path.chmod(path.stat().st_mode | 0o005)
    words = [
        sys.executable,
        "-m",
        "p2pdist.cli.main",
        "mirror",
        "install",
        "containerd",
        "--upstream",
        HUB,
        "--root",
        str(root),
    ]
    done = subprocess.run(words, user=65534, group=65534, extra_groups=[], capture_output=True, text=True, check=False)
    assert done.returncode == Refused.exit_code and "root" in done.stderr and not (root / "etc/containerd").exists()


def test_a_root_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="not the root of a host"):
        installed(tmp_path / "none", "containerd", HUB)


def test_a_spoilt_record_is_named(root: Path) -> None:
    put(root, RECORD.lstrip("/"), '{"runtimes": []}')
    with pytest.raises(Corrupt, match=r"mirror\.json"):
        load_record(HostFiles(root))


def test_the_record_is_for_root_alone(root: Path) -> None:
    """It repeats files that may hold passwords of proxies."""
    installed(root, "docker", HUB)
    assert (root / RECORD.lstrip("/")).stat().st_mode & 0o777 == 0o600


# -- the command


def test_the_command_says_what_it_changed(root: Path) -> None:
    words = ("mirror", "install", "containerd", "--upstream", HUB, "--root", root, "--json")
    document = json.loads(run(*words).stdout)
    assert document["changes"] == [{"path": f"/{HOSTS}", "change": "created"}] and document["runtime"] == "containerd"
    status = json.loads(run("mirror", "status", "--root", root, "--json").stdout)
    assert status["files"] == {f"/{HOSTS}": "as written"}
    assert [(row["runtime"], row["upstreams"]) for row in status["runtimes"]] == [("containerd", [HUB])]
    shown = run("mirror", "uninstall", "containerd", "--root", root, "--dry-run").stdout
    assert f"would be removed  /{HOSTS}" in shown and f'-[host."{MIRROR}"]' in shown
    assert json.loads(run("mirror", "uninstall", "containerd", "--root", root, "--json").stdout)["changes"] == [
        {"path": f"/{HOSTS}", "change": "removed"}
    ]


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["install", "rkt", "--upstream", HUB], 2, "containerd, docker, podman, crio"),
        (["install", "kubernetes", "--upstream", HUB], 2, "runtime of its nodes"),
        (["install", "enroot", "--upstream", HUB], 2, "docker://localhost:7073#"),
        (["install", "containerd"], 2, "--upstream docker.io"),
        (["install", "containerd", "--upstream", "https://docker.io"], 2, "not the name of a registry"),
        (["install", "containerd", "--upstream", "../../x"], 2, "not the name of a registry"),
        (["install", "podman", "--upstream", HUB, "--certs-dir", "/x"], 2, "--certs-dir"),
        (["install", "containerd", "--upstream", HUB, "--address", "10.0.0.1:7073"], 2, "loopback"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_remedy(root: Path, words: list[str], code: int, hint: str) -> None:
    done = run("mirror", *words, "--root", root)
    assert done.returncode == code and hint in done.stderr, done.stderr
    assert everything(root).keys() == {"etc"}


def test_upstreams_may_stand_in_one_option(root: Path) -> None:
    document = json.loads(
        run("mirror", "install", "containerd", "--upstream", f"{HUB}, {QUAY}", "--root", root, "--json").stdout
    )
    assert [change["change"] for change in document["changes"]] == ["created", "created"]


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:7073", MIRROR),
        ("http://localhost:7073/", "http://localhost:7073"),
        ("[::1]:7073", "http://[::1]:7073"),
        ("https://mirror.example:443", "https://mirror.example:443"),
    ],
)
def test_addresses_of_mirrors(text: str, url: str) -> None:
    assert mirror_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1",
        ":7073",
        "127.0.0.1:x",
        "127.0.0.1:99999",
        "ftp://127.0.0.1:1",
        "http://u:p@127.0.0.1:1",
        "http://127.0.0.1:1/v2",
    ],
)
def test_what_is_no_address_of_a_mirror(text: str) -> None:
    with pytest.raises(UsageError):
        mirror_url(text)


@pytest.mark.parametrize("name", ["containerd", "podman"])
def test_lines_that_an_editor_has_reshaped_go_as_well(root: Path, name: str) -> None:
    path = HOSTS if name == "containerd" else DROP_IN
    for reshape in (
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "".join(f"\t{line} \n" for line in text.splitlines()),
        lambda text: text.rstrip("\n"),
    ):
        installed(root, name, HUB)
        (root / path).write_bytes(("# mine\n" + reshape((root / path).read_text())).encode())
        assert not uninstall(HostFiles(root), name).notes
        assert (root / path).read_text().strip() == "# mine"
        (root / path).unlink()


@pytest.mark.parametrize("name", ["containerd", "podman"])
def test_lines_that_cannot_be_told_any_more_are_told_of(root: Path, name: str) -> None:
    path = HOSTS if name == "containerd" else DROP_IN
    installed(root, name, HUB)
    text = "".join(f"{line}\n" for line in (root / path).read_text().splitlines() if not line.startswith("#"))
    (root / path).write_text(text)
    outcome = uninstall(HostFiles(root), name)
    assert (root / path).read_text() == text
    assert len(outcome.notes) == 1 and f"/{path}" in outcome.notes[0] and "by hand" in outcome.notes[0]


def test_blocks_are_taken_out_wherever_they_are() -> None:
    text = f"a = 1\n{edits.BEGIN}\n[x]\n{edits.END}\n\n[y]\n"
    assert edits.without_block(text) == "a = 1\n[y]\n"
