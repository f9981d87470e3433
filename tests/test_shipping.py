"""What the project ships for containers and for systemd says what is so: options, programs, ports,
volumes, targets, and few rights."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from p2pdist.cli.daemon import SHUTDOWN_S, THREADS_S
from p2pdist.cli.main import VERBS, main
from p2pdist.model.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
UNITS = ROOT / "deploy" / "systemd"
SERVICES = sorted(UNITS.glob("*.service"))
INSTALLED = "/opt/p2pdist/bin/p2pdist"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
RUNNING: dict[str, dict[str, Any]] = {
    name: service for name, service in COMPOSE["services"].items() if service["restart"] != "no"
}
"""Services; the others are jobs."""
OURS = {name: service for name, service in COMPOSE["services"].items() if "build" in service}
AGENT_CAPABILITIES = ["SYS_ADMIN", "SETFCAP", "CHOWN", "DAC_OVERRIDE", "FOWNER", "SETUID", "SETGID"]
# fmt: off
OWN_MOUNT_NAMESPACE = frozenset([
    "BindPaths", "BindReadOnlyPaths", "DynamicUser", "ExecPaths", "InaccessiblePaths", "MountAPIVFS", "MountFlags",
    "NoExecPaths", "PrivateDevices", "PrivateIPC", "PrivateMounts", "PrivateTmp", "ProcSubset", "ProtectControlGroups",
    "ProtectHome", "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables", "ProtectProc",
    "ProtectSystem", "ReadOnlyPaths", "ReadWritePaths", "RootDirectory", "RootImage", "TemporaryFileSystem",
])
# fmt: on
"""Settings of systemd.exec(5) that put a service into a mount namespace of its own, where the host
does not see what it mounts."""


# -- options


def options_of(*verb: str) -> dict[str, click.Option]:
    """Every flag of a verb, such as --listen; a verb that does not exist has none."""
    command = main.get_command(click.Context(main), verb[0]) if verb[0] in VERBS else None
    assert command is not None, f"there is no p2pdist {verb[0]}"
    return {flag: option for option in command.params if isinstance(option, click.Option) for flag in option.opts}


def wrong_words(words: list[str]) -> list[str]:
    """What of a command's words, the verb first, the command does not take. A value follows its
    flag after "=" or as the next word."""
    verb, *rest = words
    if verb not in VERBS:
        return [verb]
    known, wrong = options_of(verb), []
    while rest:
        flag, equals, _value = rest.pop(0).partition("=")
        option = known.get(flag)
        if option is None:
            wrong.append(flag)
        elif not option.is_flag and not equals:
            rest = rest[1:]
    return wrong


def plain(word: str) -> str:
    """A word of the compose file with the defaults of its variables."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", word)


def command_of(name: str) -> list[str]:
    return [plain(word) for word in COMPOSE["services"][name].get("command", [])]


@pytest.mark.parametrize("name", [name for name, service in OURS.items() if "entrypoint" not in service])
def test_a_service_of_ours_is_a_command_that_exists(name: str) -> None:
    assert wrong_words(command_of(name)) == []


def test_an_option_that_does_not_exist_is_noticed() -> None:
    assert wrong_words(["agent", "--store", "/x", "--stor=/x", "--listen=:1", "--magic"]) == ["--stor", "--magic"]
    assert wrong_words(["agnet", "--store=/x"]) == ["agnet"]


@pytest.mark.parametrize(
    ("name", "program"), [("origin", "p2pdist/cli/verbs/demo/origin.py"), ("demo", "deploy/compose/demo.py")]
)
def test_a_service_with_a_program_of_its_own_gives_it_options_that_it_has(name: str, program: str) -> None:
    service = COMPOSE["services"][name]
    assert (
        program.removesuffix(".py").replace("/", ".") in service["entrypoint"]
        or f"./{program}:/demo.py:ro" in service["volumes"]
    )
    taken = {
        node.args[0].value
        for node in ast.walk(ast.parse((ROOT / program).read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("add_argument")
        and isinstance(node.args[0], ast.Constant)
    }
    given = {word.partition("=")[0] for word in command_of(name) if word.startswith("--")}
    assert given and given <= taken


def test_every_verb_that_the_demo_job_uses_exists() -> None:
    tree = ast.parse((ROOT / "deploy" / "compose" / "demo.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "p2pdist"]
    assert len(calls) >= 5
    for call in calls:
        words = [word.value for word in call.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        flags = {word for word in words if word.startswith("-")}
        assert {*flags, "--json"} <= set(options_of(words[0])), words


# -- compose


def test_every_service_says_whether_it_is_well_and_what_happens_when_it_ends() -> None:
    assert len(RUNNING) == 9
    for name, service in RUNNING.items():
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["restart"] == "unless-stopped", name
        assert service["logging"]["options"]["max-size"], name
    for name, profiles in (("demo", ["demo"]), ("join", None)):
        job = COMPOSE["services"][name]
        assert job["restart"] == "no" and job["healthcheck"] == {"disable": True} and job.get("profiles") == profiles


def test_nobody_is_privileged_and_only_agents_that_mount_may_mount() -> None:
    for name, service in COMPOSE["services"].items():
        assert "privileged" not in service and service["cap_drop"] == ["ALL"], name
        assert not {"network_mode", "pid", "ipc", "userns_mode"} & set(service), name
        assert "no-new-privileges:true" in service["security_opt"], name
        if re.fullmatch(r"agent\d", name):
            assert service["cap_add"] == AGENT_CAPABILITIES and service["devices"] == ["/dev/fuse"]
            assert set(service["security_opt"]) >= {"apparmor:unconfined", "seccomp:unconfined"}
        else:
            assert not {"cap_add", "devices", "user"} & set(service), name
            assert service["security_opt"] == ["no-new-privileges:true"], name


def test_every_health_check_asks_a_port_on_which_its_service_listens() -> None:
    ports = {"prometheus": "9090", "grafana": "3000"}
    for name, service in RUNNING.items():
        asked = re.search(r"http://127\.0\.0\.1:(\d+)/", " ".join(service["healthcheck"]["test"]))
        assert asked, name
        words = " ".join(command_of(name))
        listened = re.search(r"--probe-listen[= ]\S*?:(\d+)", words) or re.search(r"--listen[= ]\S*?:(\d+)", words)
        assert asked[1] == (listened[1] if listened else ports[name]), name


def test_ports_are_open_on_this_machine_only() -> None:
    published = {name: service["ports"] for name, service in RUNNING.items() if "ports" in service}
    assert set(published) == {"tracker", "prometheus", "grafana"}
    for name, ports in published.items():
        for port in ports:
            address, outside, inside = port.split(":")
            assert address == "127.0.0.1" and outside == inside, name


def test_volumes_are_named_used_and_apart() -> None:
    """Each agent has a store of its own, and every file that is mounted from here exists and cannot
    be written."""
    used: dict[str, set[str]] = {}
    for name, service in COMPOSE["services"].items():
        for volume in service.get("volumes", []):
            source, target, *mode = volume.split(":")
            if source.startswith("./"):
                assert (ROOT / source).exists() and mode == ["ro"], volume
            else:
                used.setdefault(source, set()).add(f"{name}:{target}")
    assert set(used) == set(COMPOSE["volumes"])
    agents = ("seed", "agent1", "agent2", "agent3", "agent4")
    for name in agents:
        assert used[name] == {f"{name}:/var/lib/p2pdist"}
    assert used["tracker"] == {"tracker:/var/lib/p2pdist", "join:/tracker"}, "its keys are nobody's but its own"
    assert used["join"] == {"join:/var/lib/p2pdist", *(f"{name}:/join" for name in agents)}
    sockets = [word for name in OURS for word in command_of(name) if name != "demo" and word.startswith("--socket=")]
    assert len(sockets) == len(set(sockets)) == 5
    told = {word for word in command_of("demo") if word.startswith("/run/")}
    assert {f"--socket={word}" for word in told} == set(sockets) - {"--socket=/run/p2pdist/seed.sock"}


def test_services_are_found_under_the_names_that_others_call_them() -> None:
    for name, service in COMPOSE["services"].items():
        assert service.get("hostname", name) == name
        called = re.findall(
            r"https?://([a-z0-9]+):(\d+)",
            " ".join([*command_of(name), *map(str, service.get("environment", {}).values())]),
        )
        for host, port in called:
            assert host in RUNNING, f"{name} calls {host}"
            assert f":{port}" in " ".join(command_of(host)) or (host, port) == ("prometheus", "9090"), (
                f"{name} calls {host}:{port}"
            )
        assert set(service.get("depends_on", {})) <= {*RUNNING, "join"}


def test_prometheus_scrapes_every_service_of_ours() -> None:
    def targets(name: str) -> set[str]:
        groups = json.loads((ROOT / "deploy" / "compose" / name).read_text())
        return {target for group in groups for target in group["targets"]}

    agents = {name for name in RUNNING if command_of(name)[:1] == ["agent"]}
    assert len(agents) == 5
    assert targets("agents.json") == {f"{name}:7079" for name in agents}
    assert targets("trackers.json") == {"tracker:7079"}
    mounted = {Path(volume.split(":")[1]).name for volume in RUNNING["prometheus"]["volumes"]}
    text = (ROOT / "grafana" / "prometheus" / "prometheus.yml").read_text()
    config = yaml.safe_load(text)
    wanted = {
        *config["rule_files"],
        *(file for job in config["scrape_configs"] for sd in job["file_sd_configs"] for file in sd["files"]),
    }
    assert wanted <= mounted


def test_grafana_finds_what_is_provisioned() -> None:
    grafana = RUNNING["grafana"]
    provider = yaml.safe_load((ROOT / "grafana" / "provisioning" / "dashboards" / "p2pdist.yml").read_text())[
        "providers"
    ][0]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in grafana["volumes"]
    source = yaml.safe_load((ROOT / "grafana" / "provisioning" / "datasources" / "p2pdist.yml").read_text())[
        "datasources"
    ][0]
    assert source["url"].strip("${}") in grafana["environment"]
    assert grafana["environment"]["GF_AUTH_BASIC_ENABLED"] == "false", (
        "nobody may log in with a password that everybody knows"
    )


def has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    return (
        subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60, check=False).returncode == 0
    )


@pytest.mark.skipif(not has_compose(), reason="needs docker with its compose plugin")
def test_docker_compose_reads_the_file() -> None:
    words = ["docker", "compose", "--profile", "demo", "config", "--format", "json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["services"]) == set(COMPOSE["services"])
    assert "variable is not set" not in done.stderr and "obsolete" not in done.stderr


# -- the image


def instructions() -> list[tuple[str, str]]:
    """Word and rest of each line of the Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def test_the_image_copies_what_exists_and_what_is_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*", "only what is named goes into the image"
    sources = [
        word for name, rest in instructions() if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]
    ]
    assert {source.rstrip("*") for source in sources} == kept
    assert all((ROOT / name).exists() for name in kept - {"wheels"})


def test_the_image_ends_as_nobody_special_without_what_built_it() -> None:
    last = instructions()[max(number for number, (name, _) in enumerate(instructions()) if name == "FROM") :]
    assert ("USER", "10001:10001") in last
    assert not any("pip " in rest for name, rest in last if name == "RUN")
    packages = set(shlex.split(dict(last)["ARG"].partition("=")[2])[0].split())
    known = set(
        re.findall(
            r"=([a-z0-9-]+)",
            re.search(r"^PROGRAMS := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1],
        )
    )  # type: ignore[index]
    assert packages - {"ca-certificates"} <= known
    assert packages >= {"squashfs-tools", "squashfuse", "fuse3", "mount"}


# -- systemd


def unit(path: Path) -> dict[str, list[str]]:
    """Settings of a unit or drop-in: name to values, in order; an empty value takes back what was
    said before."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line and line[0] not in "#;[":
            name, _, value = line.partition("=")
            found[name] = [*found.get(name, []), value] if value else []
    return found


def files_of_variables() -> list[Path]:
    return [*SERVICES, *sorted(UNITS.glob("*.env.example"))]


@pytest.mark.parametrize("path", files_of_variables(), ids=lambda path: path.name)
def test_every_variable_of_a_unit_is_one_that_its_service_reads(path: Path) -> None:
    verb = "tracker" if "tracker" in path.name else "agent"
    known = {name for option in options_of(verb).values() for name in option.envvar or ()}
    named = set(re.findall(r"^(?:#|Environment=)?(P2PDIST_\w+)=", path.read_text(), re.MULTILINE))
    assert named and named <= known


def test_both_services_have_a_unit_that_starts_them_and_stops_them_cleanly() -> None:
    assert [path.name for path in SERVICES] == ["p2pdist-agent.service", "p2pdist-tracker.service"]
    for path in SERVICES:
        said = unit(path)
        verb = path.stem.removeprefix("p2pdist-")
        assert said["ExecStart"] == [f"{INSTALLED} {verb}"]
        assert (
            said["KillSignal"] == ["SIGTERM"] and said["Restart"] == ["always"] and int(said["TimeoutStopSec"][0]) >= 15
        )
        assert said["RestartPreventExitStatus"] == [str(UsageError.exit_code)]
        assert said["EnvironmentFile"] == [f"/etc/p2pdist/{verb}.env"]
        assert (UNITS / f"{verb}.env.example").exists()
        assert {
            "StateDirectory",
            "LimitNOFILE",
            "TasksMax",
            "NoNewPrivileges",
            "CapabilityBoundingSet",
            "SystemCallFilter",
        } <= set(said)


def test_an_agent_that_mounts_shares_the_mounts_of_the_host() -> None:
    """In a mount namespace of its own nobody would see what it shows. The tracker, and an agent
    that mounts nothing, have one."""
    assert OWN_MOUNT_NAMESPACE & set(unit(UNITS / "p2pdist-agent.service")) == set()
    assert unit(UNITS / "p2pdist-agent.service")["SystemCallFilter"] == ["@system-service @mount"]
    for name in ("p2pdist-tracker.service", "no-mounts.conf"):
        assert unit(UNITS / name)["ProtectSystem"] == ["strict"] and unit(UNITS / name)["CapabilityBoundingSet"] == []


needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (Debian package systemd)"
)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units as they are installed, but for a program and a file of settings that exist here."""
    for path in SERVICES:
        text = path.read_text().replace(INSTALLED, str(Path(sys.executable).with_name("p2pdist")))
        (tmp_path / path.name).write_text(text)
    return tmp_path


def analyzed(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, timeout=60, check=False)


def exposure(path: Path) -> float:
    """What systemd makes of the rights of a service: 0 for none, 10 for all."""
    said = analyzed("security", "--offline=true", "--no-pager", str(path))
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", said.stdout)
    assert found, said.stdout + said.stderr
    return float(found[1])


def test_services_are_given_the_time_that_a_clean_stop_takes() -> None:
    """To hand over, to end what is being answered and what waits for a disk, and for an agent to
    unmount."""
    ends_s = SHUTDOWN_S + THREADS_S
    drains_s = float(options_of("agent")["--drain-seconds"].default)
    assert int(unit(UNITS / "p2pdist-tracker.service")["TimeoutStopSec"][0]) >= 2 * ends_s
    assert int(unit(UNITS / "p2pdist-agent.service")["TimeoutStopSec"][0]) >= drains_s + 2 * ends_s
    for name in OURS:
        assert int(COMPOSE["services"][name]["stop_grace_period"].removesuffix("s")) >= drains_s + 2 * ends_s, name


@needs_systemd
@pytest.mark.parametrize("name", [path.name for path in SERVICES])
def test_systemd_takes_the_unit(installed: Path, name: str) -> None:
    done = analyzed("verify", "--man=no", str(installed / name))
    assert done.returncode == 0, done.stderr
    assert name not in done.stderr, done.stderr


@needs_systemd
def test_systemd_notices_a_unit_that_is_wrong(installed: Path) -> None:
    wrong = installed / "p2pdist-tracker.service"
    wrong.write_text(wrong.read_text().replace("ProtectSystem=", "ProtectSytem="))
    assert "ProtectSytem" in analyzed("verify", "--man=no", str(wrong)).stderr


@needs_systemd
def test_services_have_few_rights(installed: Path) -> None:
    assert exposure(installed / "p2pdist-tracker.service") <= 1.5
    agent = installed / "p2pdist-agent.service"
    assert exposure(agent) <= 5.5
    added = installed / "p2pdist-agent.service.d"
    added.mkdir()
    shutil.copy(UNITS / "no-mounts.conf", added)
    assert exposure(agent) <= 2.5, "the drop-in for agents that mount nothing closes what it can"


def test_the_least_aiohttp_that_is_asked_for_has_what_sessions_use() -> None:
    """An environment may be held to it by another package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (least,) = [found[1] for text in project["dependencies"] if (found := re.match(r"aiohttp>=([0-9.]+)", text))]
    sources = [(ROOT / path).read_text() for path in ("p2pdist/transfer/input.py", "tracker/http/sessions.py")]
    since_3_14 = ("WSMessageTextBytes", "decode_text")
    assert all(any(name in source for source in sources) for name in since_3_14), "then an earlier one may do"
    assert tuple(map(int, least.split("."))) >= (3, 14)
