"""vLLM itself, on processors, loads a model of the hub by `--load-format p2pdist`: its answer is
that of the model as transformers loads it from files."""

from __future__ import annotations

import ast
import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from door_rig import MirrorAgent
from hub_clients_rig import ENVIRONMENTS, HubClientSite, environment
from hub_rig import running_hub

PYTHON = ENVIRONMENTS / "vllm" / "bin" / "python"
LIMIT_S = 900.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.xdist_group("hub-clients"),
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM: make setup-vllm"),
]

MAKE = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(1)
sizes = dict(vocab_size=256, hidden_size=128, intermediate_size=256, max_position_embeddings=128)
heads = dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False)).float().eval()
model.save_pretrained(sys.argv[1], max_shard_size="1MB")
answer = model.generate(torch.tensor([[5, 9, 100, 7]]), max_new_tokens=8, do_sample=False, pad_token_id=0)
print(answer[0, 4:].tolist())
"""
SERVE = """
import sys
from vllm import LLM, SamplingParams
options = dict(dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=2)
settings = {"socket": sys.argv[2]}
model = LLM(sys.argv[1], load_format="p2pdist", model_loader_extra_config=settings, **options)
sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
print(list(model.generate({"prompt_token_ids": [5, 9, 100, 7]}, sampling)[0].outputs[0].token_ids))
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[HubClientSite]:
    with running_hub() as hub:
        site = HubClientSite(tmp_path, hub)
        try:
            site.start_tracker()
            yield site
        finally:
            site.close()


def last_line(program: str, *words: str, env: dict[str, str]) -> list[int]:
    """The list of numbers that a program prints last."""
    done = subprocess.run(
        [PYTHON, "-c", program, *words], env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    numbers: list[int] = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    return numbers


def test_vllm_loads_a_model_of_the_hub(site: HubClientSite, tmp_path: Path) -> None:
    agent = MirrorAgent(site, "h1").start()
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    variables |= {"VLLM_CACHE_ROOT": str(tmp_path / "cache"), "VLLM_PLUGINS": "p2pdist"}
    env = environment(agent, tmp_path / "home", **variables)
    expected = last_line(MAKE, str(tmp_path / "model"), env=env)
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    shards = {name: data for name, data in files.items() if name.endswith(".safetensors")}
    assert len(shards) > 1 and "model.safetensors.index.json" in files
    other = {"consolidated.safetensors": b"none of the index's", "original/model.safetensors": b"nor this"}
    site.hub.repository("org/llama").commit({**files, **other})
    assert last_line(SERVE, "org/llama", str(agent.socket), env=env) == expected
    sent = {name for name in site.hub.sent if len(name) == 64}
    assert sent == {hashlib.sha256(data).hexdigest() for data in shards.values()}
