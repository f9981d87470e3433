"""Real clients of model hubs, in three versions, read through real agents: byte-equal, from one
copy, and by their own retry after the agent was killed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from door_rig import MirrorAgent
from hub_clients_rig import ENVIRONMENTS, HubClientSite, Relay, call, environment, killed_between, large_bytes
from hub_rig import running_hub
from ports import free_port

VERSIONS = ("0.36.0", "1.29.0", "2.4.0")
FILES = {
    "config.json": b'{"model_type": "tiny"}\n',
    "nested/vocab.txt": b"a\nb\n",
    "model-1.safetensors": os.urandom(3 << 20),
    "nested/model-2.safetensors": os.urandom((1 << 20) + 17),
}
LARGE = sum(len(data) for path, data in FILES.items() if path.endswith(".safetensors"))

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("hub-clients")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubClientSite]:
    with running_hub() as hub:
        hub.repository("org/tiny").commit(FILES)
        site = HubClientSite(tmp_path_factory.mktemp("hub"), hub)
        try:
            site.start_tracker()
            yield site
        finally:
            site.close()


@pytest.fixture
def agent(site: HubClientSite, request: pytest.FixtureRequest) -> Iterator[MirrorAgent]:
    agent = MirrorAgent(site, f"h{free_port()}")
    agent.start()
    yield agent
    agent.stop()


@pytest.fixture(params=VERSIONS)
def python(request: pytest.FixtureRequest) -> str:
    python = ENVIRONMENTS / request.param / "bin" / "python"
    if not python.exists():
        pytest.skip(f"needs huggingface_hub {request.param}: make setup-all")
    return str(python)


def same(place: Path) -> bool:
    return all((place / path).read_bytes() == data for path, data in FILES.items())


SNAPSHOT = "from huggingface_hub import snapshot_download; print(snapshot_download('org/tiny'))"
ERRORS = """
from huggingface_hub import hf_hub_download, HfApi
from huggingface_hub.utils import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError
for arguments, expected in [
    (dict(repo_id='org/tiny', filename='no.json'), EntryNotFoundError),
    (dict(repo_id='org/tiny', filename='config.json', revision='no'), RevisionNotFoundError),
    (dict(repo_id='org/none', filename='config.json'), RepositoryNotFoundError),
    (dict(repo_id='org/gated', filename='config.json'), GatedRepoError),
]:
    try:
        hf_hub_download(**arguments)
    except expected:
        continue
    raise SystemExit(f'{arguments} raised nothing')
api = HfApi()
print(sorted(api.list_repo_files('org/tiny')))
print([found.path for found in api.get_paths_info('org/tiny', ['config.json', 'nope'])])
print([branch.name for branch in api.list_repo_refs('org/tiny').branches])
print(api.model_info('org/tiny', files_metadata=True).sha)
"""


def test_a_snapshot_is_whole_and_the_second_call_takes_nothing(
    python: str, agent: MirrorAgent, site: HubClientSite, tmp_path: Path
) -> None:
    started = large_bytes(site.hub)
    place = Path(call([python, "-c", SNAPSHOT], agent, tmp_path))
    assert same(place)
    before = dict(site.hub.sent)
    assert large_bytes(site.hub) - started < 2 * LARGE  # one copy, and what a busy machine takes again
    assert Path(call([python, "-c", SNAPSHOT], agent, tmp_path)) == place
    assert dict(site.hub.sent) == before


def test_failures_are_those_of_the_hub(python: str, agent: MirrorAgent, site: HubClientSite, tmp_path: Path) -> None:
    gated = site.hub.repository("org/gated")
    if not gated.commits:
        gated.gated = True
        gated.commit({"config.json": b"{}"})
    files, paths, branches, sha = call([python, "-c", ERRORS], agent, tmp_path).splitlines()
    assert files == str(sorted(FILES)) and paths == "['config.json']" and branches == "['main']"
    assert sha == site.hub.repository("org/tiny").refs["main"]


def test_a_client_goes_on_after_its_agent_was_killed(
    python: str, agent: MirrorAgent, site: HubClientSite, tmp_path: Path
) -> None:
    data, hub = os.urandom(6 << 20), site.hub
    name = f"org/killed-{tmp_path.name[:40].strip('0123456789_')}-{free_port()}"
    hub.repository(name).commit({"model.safetensors": data})
    digest = hashlib.sha256(data).hexdigest()
    program = f"from huggingface_hub import hf_hub_download; print(hf_hub_download({name!r}, 'model.safetensors'))"
    relay = Relay(agent.mirror_port)
    more = {"HF_ENDPOINT": f"http://127.0.0.1:{relay.port}/hf"}
    patient = {"HF_HUB_DOWNLOAD_TIMEOUT": "120", "HF_HUB_ETAG_TIMEOUT": "120"}
    try:
        variables = environment(agent, tmp_path, **more, **patient)
        code, printed, errors = killed_between([python, "-c", program], agent, hub, digest, variables)
        if "0.36" in python:  # it asks again by itself only where a connection cannot be made
            assert code != 0
            printed = call([python, "-c", program], agent, tmp_path, **more)
        else:
            assert code == 0, errors[-3000:]
        assert Path(printed).read_bytes() == data
        assert hub.sent[digest] < 2 * len(data)  # what the agent had verified was not read again
    finally:
        relay.close()
