"""The Helm chart, rendered by Helm: without values it is what the manifests of `base` say, and with
them it stays valid, with flags that the commands have."""

from __future__ import annotations

import base64
import functools
import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from kubernetes_programs import program
from test_kubernetes import MANIFESTS, SCHEMAS, Document, containers, documents, of_kind, parsed, pods

CHART = MANIFESTS.parent / "helm" / "p2pdist"
HELM = program("helm")

pytestmark = pytest.mark.skipif(HELM is None, reason="needs helm (make setup-all)")

SEVERAL = {"tracker.count": 3, "tracker.settings.origin-limit": "2GB/s"}
EVERYTHING = {
    "tracker.count": 2,
    "agent.mounting": True,
    "agent.drainSeconds": 90,
    "agent.settings.capacity": "500GiB",
    "agent.nodeSelector.accelerator": "yes",
    "mirror.upstreams": ["docker.io", "ghcr.io"],
    "network.nodes": ["10.1.0.0/16", "fd00::/8"],
    "podMonitor.enabled": True,
    "podMonitor.labels.release": "monitoring",
    "image.pullSecrets": ["registry"],
    "image.tag": "1.2.3",
    "secrets.create.join.token": "word",
}
CHOICES = {"nothing": {}, "several": SEVERAL, "everything": EVERYTHING}


def helm(*words: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    chosen = [word for name, value in (values or {}).items() for word in ("--set-json", f"{name}={json.dumps(value)}")]
    return subprocess.run([HELM, *words, *chosen], capture_output=True, text=True, timeout=60, check=False)


@functools.cache
def template(chosen: str, namespace: str) -> str:
    done = helm("template", "fleet", str(CHART), "--namespace", namespace, values=json.loads(chosen))
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(values: dict[str, Any], namespace: str = "p2pdist") -> list[Document]:
    """What `helm install` would send."""
    return documents(template(json.dumps(values), namespace))


def config(found: list[Document]) -> str:
    text: str = of_kind(found, "ConfigMap")["p2pdist"]["data"]["p2pdist.toml"]
    return text


def plain(value: Any) -> Any:
    """A document without what only a chart or only a kustomization says: the release's labels, the
    namespace, and where the image is."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    ours = {
        name: plain(each)
        for name, each in value.items()
        if name not in ("imagePullPolicy", "namespace", "helm.sh/chart", "helm.sh/resource-policy")
        and not re.fullmatch(r"app\.kubernetes\.io/(instance|managed-by|version)", name)
    }
    if "image" in ours:
        ours["image"] = "p2pdist"
    return {name: each for name, each in ours.items() if (name, each) != ("annotations", {})}


def test_helm_finds_nothing_to_complain_of() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0 and "0 chart(s) failed" in done.stdout, done.stdout + done.stderr


def test_without_values_it_is_the_manifests_of_base() -> None:
    """So that neither is forgotten when the other changes."""
    chart = {(each["kind"], each["metadata"]["name"]): each for each in rendered({})}
    base = {
        (each["kind"], each["metadata"]["name"]): each
        for name in ("config", "tracker", "agent", "network")
        for each in documents((MANIFESTS / "base" / f"{name}.yaml").read_text())
    }
    assert chart.keys() == base.keys()
    settings = ("ConfigMap", "p2pdist")
    assert tomllib.loads(config([chart.pop(settings)])) == tomllib.loads(config([base.pop(settings)]))
    policy = base["NetworkPolicy", "p2pdist-trackers"]["spec"]["podSelector"]["matchExpressions"][1]
    assert policy["values"] == ["tracker", "standby"]
    policy["values"] = ["tracker"]  # the chart's trackers are all of one component
    for key, document in base.items():
        assert plain(chart[key]) == plain(document), key


@pytest.mark.parametrize("values", CHOICES.values(), ids=CHOICES)
def test_what_is_rendered_agrees_with_the_schemas(values: dict[str, Any]) -> None:
    found = rendered(values)
    for document in found:
        assert document["metadata"]["namespace"] == "p2pdist"
        if document["kind"] != "PodMonitor":  # of an operator, which publishes no schema with Kubernetes'
            kubernetes_validate.validate(document, SCHEMAS[-1], strict=True)
    tag = values.get("image.tag", "0.1.0")
    for _, spec, _ in pods(found):
        assert {each["image"] for each in containers(spec)} == {f"registry.example.com/p2pdist:{tag}"}


@pytest.mark.parametrize("values", CHOICES.values(), ids=CHOICES)
def test_commands_settings_and_volumes_exist(values: dict[str, Any], tmp_path: Path) -> None:
    found = rendered(values)
    for name, spec, _ in pods(found):
        assert {each["name"] for each in spec["volumes"]} == {
            mount["name"] for container in containers(spec) for mount in container["volumeMounts"]
        }, name
        for container in containers(spec):
            context = parsed(container["args"], config(found), tmp_path)
            known = {name for option in context.command.params for name in (option.envvar or [])}
            assert {each["name"] for each in container.get("env", []) if each["name"].startswith("P2PDIST")} <= known


def test_agents_find_each_of_several_trackers_which_share_a_database() -> None:
    found = rendered(SEVERAL, "elsewhere")
    urls = tomllib.loads(config(found))["agent"]["tracker"].split(",")
    names = ["p2pdist-tracker", "p2pdist-tracker-2", "p2pdist-tracker-3"]
    assert urls == [f"https://{name}.elsewhere.svc:7070" for name in names]
    for name in names:
        selector = of_kind(found, "Service")[name]["spec"]["selector"]
        assert [pod for pod, _, labels in pods(found) if selector.items() <= labels.items()] == [name]
        (container,) = of_kind(found, "Deployment")[name]["spec"]["template"]["spec"]["containers"]
        assert container["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "p2pdist-state", "key": "url"}
        assert not any("--state" in word for word in container["args"])
    assert of_kind(found, "PodDisruptionBudget")["p2pdist-trackers"]["spec"]["minAvailable"] == 2
    assert not of_kind(found, "PersistentVolumeClaim")


def test_everything_that_can_be_chosen(tmp_path: Path) -> None:
    found = rendered(EVERYTHING)
    agent = of_kind(found, "DaemonSet")["p2pdist-agent"]["spec"]["template"]["spec"]
    (container,) = agent["containers"]
    assert container["securityContext"]["privileged"] and agent["nodeSelector"] == {"accelerator": "yes"}
    assert "--drain-seconds=90" in container["args"] and agent["terminationGracePeriodSeconds"] == 120
    (store,) = [each for each in container["volumeMounts"] if each["name"] == "store"]
    assert store["mountPropagation"] == "Bidirectional"
    assert agent["initContainers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert agent["imagePullSecrets"] == [{"name": "registry"}]
    settings = tomllib.loads(config(found))
    upstreams = ["docker.io", "ghcr.io"]
    assert settings["tracker"]["upstream"] == settings["mirror"]["install"]["upstream"] == upstreams
    assert settings["agent"]["capacity"] == "500GiB"
    sources = of_kind(found, "NetworkPolicy")["p2pdist-trackers"]["spec"]["ingress"][0]["from"]
    assert [each["ipBlock"]["cidr"] for each in sources[:-1]] == ["10.1.0.0/16", "fd00::/8"]
    monitor = of_kind(found, "PodMonitor")["p2pdist"]
    (published, _) = documents((MANIFESTS / "pod-monitor.yaml").read_text())
    assert plain(monitor)["spec"] == published["spec"] and monitor["metadata"]["labels"]["release"] == "monitoring"
    secrets = of_kind(found, "Secret")
    assert {name: each["data"] for name, each in secrets.items()} == {
        "p2pdist-join": {"token": base64.b64encode(b"word").decode()}
    }


def test_secrets_come_from_files_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "access.toml").write_text('[networks]\n# "quoted", and\ttabs\n')
    name = r"secrets.create.access.access\.toml"
    done = helm("template", "fleet", str(CHART), "--set-file", f"{name}={tmp_path / 'access.toml'}")
    assert done.returncode == 0, done.stderr
    secret = of_kind(documents(done.stdout), "Secret")["p2pdist-access"]
    assert base64.b64decode(secret["data"]["access.toml"]) == (tmp_path / "access.toml").read_bytes()


@pytest.mark.parametrize(
    "values",
    [{"orgin": "s3://b"}, {"tracker.count": 0}, {"agent.settings.labels": {"a": 1}}, {"network.nodes": ["10.0.0.1"]}],
)
def test_values_that_mean_nothing_are_refused(values: dict[str, Any]) -> None:
    done = helm("template", "fleet", str(CHART), values=values)
    assert done.returncode != 0 and "schema" in done.stderr
