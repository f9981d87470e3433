"""docker-compose.yml for real: the image is built, the services come up, and the demo job runs in
them to its end.

Without a registry: the base image is made of this machine's programs and its Python, Prometheus of
Debian's; Grafana is left out.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker_rig import BASE_PROGRAMS, Docker, make_base, missing, running_docker
from site_rig import until

ROOT = Path(__file__).resolve().parents[2]
OURS = ("origin", "tracker", "seed", "agent1", "agent2", "agent3", "agent4")
CONTEXT = ("Dockerfile", ".dockerignore", "docker-compose.yml", "LICENSE", "README.md", "pyproject.toml")
FOLDERS = ("p2pdist", "tracker", "deploy", "grafana")
PROMETHEUS_IMAGE = "prometheus:stand-in"
SCRAPED_S = 60.0


def no_compose() -> str:
    """Why no service can be started here, or ""."""
    if missing():
        return missing()
    version = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60, check=False)
    return "" if version.returncode == 0 else "needs the compose plugin of docker, which Debian 12 has not"


pytestmark = [
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(missing()), reason=missing() or "it can run"),
]


def installed(dockerfile: Path) -> str:
    """The project and the extras that the image has of it, such as .[fuse]."""
    (words,) = re.findall(r"'(\.\[[^]]+\])'", dockerfile.read_text())
    return str(words)


@pytest.fixture(scope="module")
def docker() -> Iterator[Docker]:
    with running_docker() as daemon:
        daemon.environ["PROMETHEUS_IMAGE"] = PROMETHEUS_IMAGE
        yield daemon


@pytest.fixture(scope="module")
def project(docker: Docker) -> Path:
    """A copy of what the image and the services are made of, with the wheels that the image needs,
    and the image built from it."""
    context = docker.place / "project"
    context.mkdir()
    for name in CONTEXT:
        shutil.copy(ROOT / name, context / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__"))
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--wheel-dir",
        "wheels",
        installed(context / "Dockerfile"),
        "setuptools>=68",
    ]
    fetched = subprocess.run(words, cwd=context, capture_output=True, text=True, timeout=600, check=False)
    if fetched.returncode != 0:
        pytest.skip(f"the wheels cannot be had: {fetched.stderr[-500:]}")
    shutil.rmtree(context / "build", ignore_errors=True)

    base = docker.place / "base"
    make_base(base)
    docker.import_image(base, "python:3.11-slim", 'CMD ["python3"]', "ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin")
    shutil.rmtree(base)
    offline = ("--network", "none", "--build-arg", "PIP_OPTIONS=--no-index", "--build-arg", "PACKAGES=")
    docker.call("build", *offline, "-t", "p2pdist:local", ".", cwd=context, timeout_s=600)
    return context


@pytest.fixture(scope="module")
def prometheus(docker: Docker) -> bool:
    """Whether there is a stand-in for the image of Prometheus."""
    if not shutil.which("prometheus"):
        return False
    root = docker.place / "prometheus"
    make_base(root, (*BASE_PROGRAMS, "prometheus"))
    for folder in ("prometheus", "etc/prometheus"):
        (root / folder).mkdir()
    (root / "prometheus").chmod(0o777)
    docker.import_image(
        root, PROMETHEUS_IMAGE, 'ENTRYPOINT ["/usr/bin/prometheus"]', "USER 65534", "WORKDIR /prometheus"
    )
    shutil.rmtree(root)
    return True


@pytest.fixture
def fleet(docker: Docker, project: Path, prometheus: bool) -> Iterator[Path]:
    """Everything but Grafana, up and healthy."""
    services = (*OURS, *(("prometheus",) if prometheus else ()))
    try:
        up = ("up", "--detach", "--no-build", "--wait", "--wait-timeout", "120", *services)
        started = docker.call("compose", *up, cwd=project, check=False)
        said = docker.call("compose", "logs", "--tail", "15", cwd=project, check=False).stdout
        assert started.returncode == 0, f"{started.stderr[-2000:]}\n{said}"
        yield project
    finally:
        docker.call("compose", "--profile", "demo", "down", "--volumes", "--timeout", "5", cwd=project, check=False)


def test_the_image_holds_what_is_needed_and_is_nobody_special(docker: Docker, project: Path) -> None:
    def run(*words: str) -> str:
        return docker.call(
            "run", "--rm", "--network", "none", "--entrypoint", words[0], "p2pdist:local", *words[1:]
        ).stdout

    assert run("p2pdist", "--version").startswith("p2pdist, version ")
    assert run("id", "-u").strip() == "10001"
    assert not {"pip", "setuptools"} & set(run("ls", "/opt/p2pdist/lib/python3.11/site-packages").split())
    assert run("ls", "-A", "/srv/origin", "/var/lib/p2pdist", "/run/p2pdist").split() == [
        "/run/p2pdist:",
        "/srv/origin:",
        "/var/lib/p2pdist:",
    ]


@pytest.mark.skipif(bool(no_compose()), reason=no_compose() or "it can run")
def test_the_demo_job_runs_to_its_end(docker: Docker, fleet: Path, prometheus: bool) -> None:
    """Packed, pushed, pulled on four agents and checked; then run in an agent's container, scraped,
    and stopped cleanly."""
    played = docker.call("compose", "run", "--rm", "-T", "demo", cwd=fleet, check=False)
    print(played.stdout)
    logs = docker.call("compose", "logs", "--tail", "15", cwd=fleet).stdout
    assert played.returncode == 0, f"{played.stdout}\n{played.stderr[-2000:]}\n{logs}"
    assert played.stdout.rstrip().endswith("Every claim held")

    ran = docker.call("compose", "exec", "-T", "agent1", "p2pdist", "run", "demo/app:v2", cwd=fleet, check=False)
    print(ran.stdout, ran.stderr)
    assert ran.returncode == 0, f"{ran.stderr}\n{logs}"
    assert ran.stdout.count("shard-") == 8

    if prometheus:
        until(lambda: scraped(docker, fleet) == {"1": 6}, within_s=SCRAPED_S)

    docker.call("compose", "stop", *OURS, cwd=fleet)
    listed = docker.call("compose", "ps", "--all", "--format", "json", *OURS, cwd=fleet).stdout
    ends = {entry["Service"]: entry["ExitCode"] for entry in map(json.loads, listed.splitlines())}
    assert ends == dict.fromkeys(OURS, 0)


def scraped(docker: Docker, project: Path) -> dict[str, int]:
    """What `up` says of the targets: value to how many."""
    ask = ("wget", "-q", "-O", "-", "http://127.0.0.1:9090/api/v1/query?query=count_values('up',up)")
    answer = docker.call("compose", "exec", "-T", "prometheus", *ask, cwd=project).stdout
    return {entry["metric"]["up"]: int(entry["value"][1]) for entry in json.loads(answer)["data"]["result"]}
