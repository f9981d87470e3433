"""The manifests for Kubernetes: valid by its published schemas, with flags that the commands have,
and few rights."""

from __future__ import annotations

import functools
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import kubernetes_validate
import pytest
import yaml
from kubernetes_programs import program

from p2pdist.cli.daemon import SHUTDOWN_S, THREADS_S
from p2pdist.cli.main import VERBS, main
from p2pdist.cli.runtimes.files import HostFiles
from p2pdist.cli.runtimes.installation import install
from p2pdist.cli.runtimes.record import RECORD, Installation

MANIFESTS = Path(__file__).resolve().parents[1] / "deploy" / "kubernetes"
BUILDS = ("base", "mounting", "mirror", "two-trackers", "three-trackers")
SCHEMAS = ("1.28", "1.31", kubernetes_validate.latest_version())
UNMOUNT_S = 10.0

Document = dict[str, Any]


def documents(text: str) -> list[Document]:
    return [each for each in yaml.safe_load_all(text) if each is not None]


@functools.cache
def kustomized(kubectl: str, directory: str) -> str:
    done = subprocess.run(
        [kubectl, "kustomize", str(MANIFESTS / directory)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def built(directory: str) -> list[Document]:
    """What `kubectl apply -k` would send."""
    kubectl = program("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    return documents(kustomized(kubectl, directory))


def pods(found: list[Document]) -> Iterator[tuple[str, Document, dict[str, str]]]:
    """Name, specification and labels of each Pod, and of each template of some."""
    for document in found:
        if document["kind"] == "Pod":
            yield document["metadata"]["name"], document["spec"], document["metadata"].get("labels", {})
        elif document["kind"] in ("Deployment", "DaemonSet"):
            template = document["spec"]["template"]
            yield document["metadata"]["name"], template["spec"], template["metadata"]["labels"]


def containers(spec: Document) -> list[Document]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def everything() -> list[Document]:
    return [each for directory in BUILDS for each in built(directory)] + documents(
        (MANIFESTS / "example-job.yaml").read_text()
    )


def of_kind(found: list[Document], kind: str) -> dict[str, Document]:
    return {each["metadata"]["name"]: each for each in found if each["kind"] == kind}


# -- valid


@pytest.mark.parametrize("version", SCHEMAS)
@pytest.mark.parametrize(
    "name",
    [
        "base/namespace",
        "base/config",
        "base/tracker",
        "base/agent",
        "base/network",
        "example-job",
        "two-trackers/standby",
        "three-trackers/third",
        "three-trackers/postgresql",
    ],
)
def test_manifests_agree_with_the_schemas(name: str, version: str) -> None:
    """Strictly: a field that does not exist is an error."""
    found = documents((MANIFESTS / f"{name}.yaml").read_text())
    assert found
    for document in found:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("directory", BUILDS)
def test_what_is_put_together_agrees_with_the_schemas(directory: str) -> None:
    found = built(directory)
    for document in found:
        kubernetes_validate.validate(document, SCHEMAS[-1], strict=True)
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == "p2pdist"
    for _, spec, _ in pods(found):
        assert all(re.fullmatch(r"registry\.example\.com/p2pdist:[\d.]+", each["image"]) for each in containers(spec))


@pytest.mark.parametrize("directory", BUILDS)
def test_what_monitors_pods_finds_ports_of_all_trackers_and_agents(directory: str) -> None:
    """The kinds are those of operators, for which no schema is published with Kubernetes'."""
    scraped = [
        (name, {port["name"] for each in containers(spec) for port in each.get("ports", [])}, labels)
        for name, spec, labels in pods(built(directory))
        if labels.get("app.kubernetes.io/component") in ("agent", "tracker")
    ]
    assert scraped
    for monitor in documents((MANIFESTS / "pod-monitor.yaml").read_text()):
        spec = monitor["spec"]
        (endpoint,) = spec["podMetricsEndpoints" if monitor["kind"] == "PodMonitor" else "endpoints"]
        assert monitor["metadata"]["namespace"] == "p2pdist" and endpoint["path"] == "/metrics"
        for name, ports, labels in scraped:
            assert spec["selector"]["matchLabels"].items() <= labels.items(), name
            assert endpoint["port"] in ports, name


def test_a_wrong_field_would_be_found() -> None:
    (daemon_set,) = documents((MANIFESTS / "base" / "agent.yaml").read_text())
    daemon_set["spec"]["template"]["spec"]["hostNetwrok"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(daemon_set, SCHEMAS[-1], strict=True)


# -- what is run


def parsed(words: list[str], config: str, directory: Path) -> click.Context:
    """A command's words and the configuration file, as the command itself takes them. Raises
    click.UsageError."""
    file = directory / "p2pdist.toml"
    file.write_text(config)
    verb, *rest = [re.sub(r"\$\(\w+\)", "x", word).replace("/etc/p2pdist/p2pdist.toml", str(file)) for word in words]
    assert verb in VERBS
    context = click.Context(main)
    command = main.get_command(context, verb)
    while isinstance(command, click.Group):
        verb, *rest = rest
        command = command.get_command(context, verb)
    assert command is not None
    return command.make_context(verb, rest, parent=click.Context(main))


@pytest.mark.parametrize("directory", BUILDS)
def test_commands_flags_and_settings_exist(directory: str, tmp_path: Path) -> None:
    found = built(directory)
    config = of_kind(found, "ConfigMap")["p2pdist"]["data"]["p2pdist.toml"]
    for name, spec, _ in pods(found):
        for container in containers(spec):
            context = parsed(container["args"], config, tmp_path)
            assert context.params.get("log_format", "json") == "json", name
            known = {name for option in context.command.params for name in (option.envvar or [])}
            ours = {each["name"] for each in container.get("env", []) if each["name"].startswith("P2PDIST")}
            assert ours <= known
            used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
            assert used <= {each["name"] for each in container.get("env", [])}


def test_the_example_is_what_the_commands_take(tmp_path: Path) -> None:
    (pod,) = documents((MANIFESTS / "example-job.yaml").read_text())
    pull, run = containers(pod["spec"])
    assert parsed(pull["args"], "", tmp_path).params["references"] == ("team/trainer:v3",)
    context = parsed(run["args"], "", tmp_path)
    assert (context.params["reference"], context.params["how"]) == ("team/trainer:v3", "unpack")
    assert [each for each in context.params["arguments"] if each != "--"] == ["--epochs", "3"]


def test_a_wrong_flag_would_be_found(tmp_path: Path) -> None:
    with pytest.raises(click.UsageError):
        parsed(["agent", "--no-such-flag"], "", tmp_path)
    with pytest.raises(click.UsageError):
        parsed(["agent", "--config=/etc/p2pdist/p2pdist.toml"], "[agent]\nno-such-key = 1", tmp_path)


@pytest.mark.parametrize("directory", BUILDS)
def test_an_agent_has_time_to_hand_over(directory: str, tmp_path: Path) -> None:
    agent = of_kind(built(directory), "DaemonSet")["p2pdist-agent"]["spec"]["template"]["spec"]
    (container,) = agent["containers"]
    (drain,) = [float(each.partition("=")[2]) for each in container["args"] if each.startswith("--drain-seconds=")]
    assert drain + SHUTDOWN_S + THREADS_S + UNMOUNT_S <= agent["terminationGracePeriodSeconds"]


# -- what fits together


@pytest.mark.parametrize("directory", BUILDS)
def test_ports_probes_and_volumes_are_there(directory: str) -> None:
    for name, spec, _ in pods(built(directory)):
        volumes = {each["name"] for each in spec["volumes"]}
        mounted = [{each["name"] for each in container["volumeMounts"]} for container in containers(spec)]
        assert set().union(*mounted) == volumes, name
        for container in spec["containers"]:
            ports = {each["name"]: each["containerPort"] for each in container["ports"]}
            listens = [each for each in container["args"] if each.startswith(("--listen=", "--probe-listen="))]
            assert list(ports.values()) == [int(each.rpartition(":")[2]) for each in listens]
            probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
            assert {kind: each["path"] for kind, each in probes.items()} == {
                "startup": "/healthz", "readiness": "/readyz", "liveness": "/healthz"
            }  # fmt: skip
            assert {each["port"] for each in probes.values()} == {"probes"}, "probes have no certificate"


@pytest.mark.parametrize(
    ("directory", "count"), [("base", 1), ("mounting", 1), ("two-trackers", 2), ("three-trackers", 3)]
)
def test_agents_find_their_trackers(directory: str, count: int, tmp_path: Path) -> None:
    """Each URL is that of a Service, each Service leads to one tracker, and no two of them to the
    same."""
    found = built(directory)
    config = of_kind(found, "ConfigMap")["p2pdist"]["data"]["p2pdist.toml"]
    urls = parsed(["agent", "--config=/etc/p2pdist/p2pdist.toml"], config, tmp_path).params["tracker"].split(",")
    services = {name: each for name, each in of_kind(found, "Service").items() if name != "p2pdist-postgresql"}
    assert len(urls) == count == len(services)
    led: list[str] = []
    for url in urls:
        parts = urlsplit(url)
        service = services[str(parts.hostname).removesuffix(".p2pdist.svc")]["spec"]
        assert [each["port"] for each in service["ports"]] == [parts.port]
        led += [name for name, _, labels in pods(found) if service["selector"].items() <= labels.items()]
    assert len(set(led)) == len(led) == count
    deployments = of_kind(found, "Deployment")
    assert all(deployments[name]["spec"]["replicas"] == 1 for name in led)


@pytest.mark.parametrize(("directory", "count"), [("two-trackers", 2), ("three-trackers", 3)])
def test_trackers_share_a_database_and_are_not_taken_down_together(directory: str, count: int) -> None:
    found = built(directory)
    (budget,) = of_kind(found, "PodDisruptionBudget").values()
    (wanted,) = budget["spec"]["selector"]["matchExpressions"]
    trackers = [spec for _, spec, labels in pods(found) if labels.get(wanted["key"]) in wanted["values"]]
    assert (len(trackers), budget["spec"]["minAvailable"]) == (count, count - 1)
    for spec in trackers:
        (container,) = containers(spec)
        (state,) = [each for each in container["env"] if each["name"] == "P2PDIST_TRACKER_STATE"]
        assert state["valueFrom"]["secretKeyRef"] == {"name": "p2pdist-state", "key": "url"}
        assert not any("--state" in each for each in container["args"])


def test_postgresql_answers_trackers_alone_and_has_no_rights() -> None:
    """Its Service leads to it, its password comes from the Secret with the trackers' URL, and its
    data outlive its Pod."""
    found = built("three-trackers")
    (database,) = of_kind(found, "StatefulSet").values()
    template = database["spec"]["template"]
    (container,) = template["spec"]["containers"]
    service = of_kind(found, "Service")["p2pdist-postgresql"]["spec"]
    assert service["selector"].items() <= template["metadata"]["labels"].items()
    assert [each["targetPort"] for each in service["ports"]] == [each["name"] for each in container["ports"]]
    (password,) = [each for each in container["env"] if each["name"] == "POSTGRES_PASSWORD"]
    assert password["valueFrom"]["secretKeyRef"] == {"name": "p2pdist-state", "key": "password"}
    (claim,) = database["spec"]["volumeClaimTemplates"]
    data = claim["metadata"]["name"]
    (mount,) = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == data]
    (kept,) = [each["value"] for each in container["env"] if each["name"] == "PGDATA"]
    assert kept.startswith(f"{mount}/")
    rights = container["securityContext"]
    assert rights["capabilities"] == {"drop": ["ALL"]} and rights["readOnlyRootFilesystem"]
    assert template["spec"]["securityContext"]["runAsNonRoot"] and not rights["allowPrivilegeEscalation"]
    policy = of_kind(found, "NetworkPolicy")["p2pdist-postgresql"]["spec"]
    assert _selected(policy["podSelector"], template["metadata"]["labels"])
    ((source,),) = [each["from"] for each in policy["ingress"]]
    allowed = {name for name, _, labels in pods(found) if _selected(source["podSelector"], labels)}
    assert allowed == {"p2pdist-tracker", "p2pdist-standby", "p2pdist-third"}


def test_nodes_ask_their_agent_for_images(tmp_path: Path) -> None:
    """Without kubectl: the patch says what the command takes, and the command writes where the node
    is mounted."""
    (patch,) = documents((MANIFESTS / "mirror" / "agent.yaml").read_text())
    (settings,) = documents((MANIFESTS / "mirror" / "config.yaml").read_text())
    spec = patch["spec"]["template"]["spec"]
    (container,) = spec["initContainers"]
    config = settings["data"]["p2pdist.toml"]
    context = parsed(container["args"], config, tmp_path)
    assert context.params["runtime"] == "containerd"
    assert set(context.params["upstreams"]) == set(tomllib.loads(config)["tracker"]["upstream"])
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    paths = {each["name"]: each["hostPath"]["path"] for each in spec["volumes"]}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"] if each["name"] in paths}
    assert mounts == {name: f"/host{path}" for name, path in paths.items()}
    files = HostFiles(tmp_path / "host")
    for path in paths.values():
        files.place(path).mkdir(parents=True)
    outcome = install(files, "containerd", Installation("http://127.0.0.1:7073", context.params["upstreams"]))
    written = [*(change.path for change in outcome.changes), RECORD]
    assert all(any(path.startswith(f"{place}/") for place in paths.values()) for path in written)
    (agent,) = spec["containers"]
    assert {each["name"]: each["value"] for each in agent["env"]} == {"P2PDIST_AGENT_MIRROR": "127.0.0.1:7073"}


# -- rights


def test_only_what_mounts_is_privileged() -> None:
    """Kubernetes refuses Bidirectional to others; nobody else has it, and all drop what they need
    not."""
    for directory in BUILDS:
        for name, spec, _ in pods(built(directory)):
            assert all(
                each["securityContext"]["capabilities"] == {"drop": ["ALL"]} for each in spec.get("initContainers", [])
            )
            for container in spec["containers"]:
                rights = container["securityContext"]
                bidirectional = any(
                    each.get("mountPropagation") == "Bidirectional" for each in container["volumeMounts"]
                )
                mounting = directory == "mounting" and name == "p2pdist-agent"
                assert bidirectional == rights.get("privileged", False) == mounting
                assert rights["capabilities"]["drop"] == ["ALL"] and rights["readOnlyRootFilesystem"]
                assert rights["allowPrivilegeEscalation"] == mounting
                assert "SYS_ADMIN" not in rights["capabilities"].get("add", [])
            assert spec["automountServiceAccountToken"] is False


def test_the_example_needs_no_rights() -> None:
    (pod,) = documents((MANIFESTS / "example-job.yaml").read_text())
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    agent = of_kind(documents((MANIFESTS / "base" / "agent.yaml").read_text()), "DaemonSet")["p2pdist-agent"]
    group = agent["spec"]["template"]["spec"]["securityContext"]["runAsGroup"]
    assert pod["spec"]["securityContext"]["runAsGroup"] == group, "the socket is its group's"
    paths = {each["name"]: each["hostPath"]["path"] for each in pod["spec"]["volumes"]}
    for container in containers(pod["spec"]):
        assert all(each["readOnly"] and each["mountPath"] == paths[each["name"]] for each in container["volumeMounts"])
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("directory", BUILDS)
def test_nobody_gets_in_without_a_secret(directory: str) -> None:
    """Trackers have the access file and its keys, agents the join token alone."""
    found = built(directory)
    policies = of_kind(found, "NetworkPolicy").values()
    for name, spec, labels in pods(found):
        secrets = {each["secret"]["secretName"] for each in spec["volumes"] if "secret" in each}
        (container,) = spec["containers"]
        words = " ".join(container["args"])
        if name == "p2pdist-agent":
            assert secrets == {"p2pdist-join"} and "--join-file=" in words
        else:
            assert secrets == {"p2pdist-access"} and "--access=" in words
            assert any(_selected(each["spec"]["podSelector"], labels) for each in policies), name


def _selected(selector: Document, labels: dict[str, str]) -> bool:
    return all(labels.get(each["key"]) in each["values"] for each in selector["matchExpressions"])


def test_no_secret_lies_in_a_manifest() -> None:
    for path in MANIFESTS.rglob("*.yaml"):
        text = re.sub(r"#.*", "", path.read_text())
        assert not re.search(r"://[^/\s\"]*:[^/\s\"]*@", text), path
        assert "kind: Secret\n" not in text, path
