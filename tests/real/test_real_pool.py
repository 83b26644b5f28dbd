"""The pool of the real model: how it samples, on the shallow copy, and what the stored files hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_plugins.environments import reasoning_gym
from rl_plugins.lab.real.model import model_folder

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import real_pool

pytestmark = pytest.mark.real
FILES = sorted(real_pool.POOL.glob("rollouts-*.parquet"))


@pytest.fixture(scope="module")
def shallow():
    folder = model_folder("float32", layers=2)
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def passed(model, prompt: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of completions in one pass over prompt and completion."""
    logits = model(torch.cat([prompt.expand(len(ids), -1), ids], 1), logits_to_keep=ids.shape[1] + 1).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(2, ids[..., None])[..., 0]


def test_samples_are_of_the_policy(shallow, monkeypatch):
    model, tokenizer = shallow
    prompt = tokenizer("2 + 2 =", return_tensors="pt")["input_ids"]
    end = int(model(prompt).logits[0, -1].argmax())  # a token that comes often, so that rows end
    ids, logprobs = real_pool.sample(model, prompt, 16, end, 3)
    ended = (ids == end).cumsum(1) - (ids == end).int() > 0  # behind the first end
    assert ended.any() and (ids[ended] == end).all()
    torch.testing.assert_close(logprobs[~ended], passed(model, prompt, ids)[~ended], atol=2e-4, rtol=0)
    assert torch.equal(real_pool.sample(model, prompt, 16, end, 3)[0], ids)
    monkeypatch.setattr(real_pool, "LENGTH", 1)
    _, first = real_pool.sample(model, prompt, 500, end, 0)
    logp = model(prompt).logits[0, -1].float().log_softmax(-1).detach()
    mean = (logp * logp.exp()).sum()
    deviation = ((logp - mean).square() * logp.exp()).sum().sqrt()
    assert abs(first.mean() - mean) < 4 * deviation / 500**0.5


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_stored_file_is_whole_and_its_rewards_are_those_of_the_text(file):
    rollouts, prompts = pq.read_table(file).to_pylist(), pq.read_table(real_pool.POOL / "prompts.parquet").to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    keys = {(row["prompt"], row["rollout"]) for row in rollouts}
    assert len(keys) == len(rollouts) == real_pool.PROMPTS * real_pool.ROLLOUTS
    assert [row["prompt_ids"] for row in prompts] == [
        real_pool.encode(tokenizer, [row])["input_ids"][0].tolist() for row in real_pool.questions()[0][: len(prompts)]
    ]
    for row in rollouts:
        assert len(row["completion_ids"]) == len(row["logprobs"]) <= real_pool.LENGTH and max(row["logprobs"]) <= 0
        assert row["ended"] == (row["completion_ids"][-1] == tokenizer.eos_token_id)
        assert row["text"] == tokenizer.decode(row["completion_ids"], skip_special_tokens=True)
    texts = [row["text"] for row in rollouts]
    columns = {key: [prompts[row["prompt"]][key] for row in rollouts] for key in ("task", "entry", "answer")}
    for reward in (reasoning_gym.correct, reasoning_gym.solved, reasoning_gym.brief):
        assert [row[reward.__name__] for row in rollouts] == pytest.approx(reward(texts, **columns), abs=1e-6)


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_stored_log_probs_are_those_of_the_policy(file):
    table = pq.read_table(file).slice(0, 16)
    model, adapter = real_pool.policy(table["step"][0].as_py(), Path())
    assert json.loads(pq.read_schema(file).metadata[b"pool"])["adapter_sha256"] == adapter
    prompt = torch.tensor(pq.read_table(real_pool.POOL / "prompts.parquet")["prompt_ids"][0].as_py())[None]
    rows = zip(*(table[name].to_pylist() for name in ("completion_ids", "logprobs")), strict=True)
    apart = torch.cat([passed(model, prompt, torch.tensor([ids]))[0] - torch.tensor(stored) for ids, stored in rows])
    assert apart.abs().mean() < 0.08 and abs(apart.mean()) < 0.03  # bfloat16 rounds
