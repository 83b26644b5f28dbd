"""Gradients of a pool without bias, ratios with their intervals, a planted answer, sketches of batches, a trace."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from messages import raises
from scipy.stats import binom
from traces import a_row, named, write_batch
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from rl_plugins.commands.cli import app
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.method import Method
from rl_plugins.core.rollouts import weighted_reward
from rl_plugins.lab.probe import answer as answers
from rl_plugins.lab.probe.candidates import HostBatch, ProbedCandidate
from rl_plugins.lab.quality import drive
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.tools.gradient_quality import AnswerTable
from rl_plugins.tools.gradient_quality.pools import RolloutPool, along, crossed, ratio
from rl_plugins.tools.gradient_quality.sketch import score_sketches


def pool_of(world, answer):
    """The pool whose prompts, the first ones of a world, gave these answers."""
    answer = np.asarray(answer)
    at = np.arange(len(answer))[:, None], answer
    return RolloutPool(
        name="pool",
        prob=np.full(answer.shape, 1 / answer.shape[1]),
        rewards=world.rewards[at],
        right=world.right[at],
        score=world.score[at],
        length=np.ones(answer.shape, np.int64),
        reward_names=world.reward_names,
        reward_weights=world.reward_weights,
        columns={"number": list(range(len(answer)))},
    )


def drawn_from(world, rollouts, seed):
    prompts = np.arange(len(world.prob)).repeat(rollouts)
    made = world.draw(prompts, prompts, np.random.default_rng(seed))
    return pool_of(world, (made.piece[:, 0] % world.prob.shape[1]).reshape(-1, rollouts))


def toy(seed, prompts=64, answers=8, dims=12):
    """What makes an answer right is the same in all prompts; one reward of five is extreme."""
    rng = np.random.default_rng(seed)
    prob = rng.dirichlet(np.ones(answers), prompts)
    right = rng.random(prob.shape) < 0.4
    features = rng.normal(size=(*prob.shape, dims)) + 2 * right[..., None] * np.eye(dims)[0]
    reward = right + rng.choice([0.0, 4.0, -4.0], p=[0.8, 0.1, 0.1], size=prob.shape)
    score = features - np.einsum("pk,pkd->pd", prob, features)[:, None]
    return AnswerTable("toy", prob, reward[..., None], right, score)


# ---- the figures


def test_gradients_of_a_pool_have_the_exact_ones_as_their_mean():
    """Over all 4^4 pools of one prompt with four rollouts, weighted by their probability."""
    world = toy(1, prompts=1, answers=4, dims=3)
    world.rewards = np.random.default_rng(0).normal(size=(1, 4, 3))
    world.reward_names, world.reward_weights = ("a", "b", "c"), (1.0, 0.5, 2.0)
    world.right = np.array([[True, False, True, False]])
    total: dict[str, np.ndarray] = {}
    for rollouts in itertools.product(range(4), repeat=4):
        chance = np.prod(world.prob[0, list(rollouts)])
        for name, gradient in pool_of(world, [rollouts]).gradients(3).items():
            total[name] = total.get(name, 0) + chance * gradient

    def exact(value):
        return (world.prob[0] * value) @ world.score[0]

    p = (world.prob * world.right).sum()
    want = {name: exact(world.rewards[0, :, i]) for i, name in enumerate("abc")}
    want["reward"] = exact(world.rewards[0] @ [1.0, 0.5, 2.0])
    want["pass@1"] = exact(world.right[0])
    want["pass@3"] = 3 * (1 - p) ** 2 * want["pass@1"]
    assert total.keys() == want.keys()
    for name, gradient in want.items():
        np.testing.assert_allclose(total[name], gradient, atol=1e-12, err_msg=name)


def test_no_group_gets_a_rollout_twice_and_each_is_as_likely():
    pool = drawn_from(toy(0, prompts=3, dims=4), 6, 0)
    prompt, group = np.array([2, 0, 2, 0, 2, 1]), np.array([7, 3, 7, 3, 7, 5])
    counts = np.zeros(6)
    for seed in range(600):
        piece = pool.draw(prompt, group, np.random.default_rng(seed)).piece[:, 0]
        assert (piece // 6).tolist() == prompt.tolist() and len(set(piece[group == 7])) == 3
        np.add.at(counts, piece % 6, 1)
    assert counts == pytest.approx(600, abs=100)
    with raises(ConfigError, "7 rollouts of a prompt"):
        pool.draw(np.zeros(7, int), np.zeros(7, int), np.random.default_rng(0))
    part = pool.part([2, 0])
    np.testing.assert_array_equal(part.scores, pool.score[[2, 0]].reshape(12, 4))
    assert part.columns["number"] == [2, 0] and part.pass_rate[1] == pool.pass_rate[0]


def test_a_ratio_is_that_of_the_closed_form_and_its_interval_covers_it():
    """Two estimates of a known gradient, one with half the noise and a direction that is off by 37 degrees."""
    rng, g = np.random.default_rng(0), np.eye(12)[0]
    off = 0.8 * np.eye(12)[0] + 0.6 * np.eye(12)[1]
    found = []
    for _ in range(60):
        exact = [{"x": g + 0.3 * rng.normal(size=12)} for _ in range(8)]
        a, b = (
            crossed([m + s * rng.normal(size=(30, 12)) for _ in range(8)], [64] * 8, exact)
            for m, s in ((g, 1.0), (off, 0.5))
        )
        found.append([ratio(b, a, "x", at, range(8)) for at in (64, 640)])
        assert along(b, "x", range(8)).low > 0
    for at, noise in ((0, 1.0), (1, 0.1)):
        want = 0.8**2 * (1 + 12 * noise) / (1 + 12 * noise / 4)
        values = [f[at] for f in found]
        assert np.median([v.value for v in values]) == pytest.approx(want, rel=0.1)
        covered = sum(v.low <= want <= v.high for v in values)
        assert covered >= binom.ppf(0.005, 60, 0.95)


class Useful(Method):
    """GRPO on rewards without their outliers."""

    name, paper, version, fidelity = "useful", "none", "1", "own"
    sign = 1.0

    def advantages(self, rollouts):
        reward = weighted_reward(rollouts.rewards, rollouts.reward_weights).clamp(0, 1)
        return self.sign * grpo_advantages(rollouts.replace(reward=reward), "none")


class Harmful(Useful):
    """The same, with the wrong sign."""

    name, sign = "harmful", -1.0


def test_planted_methods_are_ranked_in_nineteen_of_twenty_seeds(monkeypatch):
    """Rewards with outliers: of 64 prompts with 16 rollouts each, GRPO lies between the two, for what counts."""
    planted = {"useful": Useful, "harmful": Harmful}
    monkeypatch.setattr(drive, "build_stack", lambda names, params, seed: MethodStack([planted[n]() for n in names], 0))
    monkeypatch.setattr(answers, "BATCHES", 2)
    host, ranked, told, more = HostBatch(8, 32), 0, 0, 0
    named_so = [ProbedCandidate(n, [host.variant(n, {n: {}}, warm=0)]) for n in planted]
    for seed in range(20):
        pool = drawn_from(toy(seed), 16, seed)
        found = answers.answer(pool, host, [ProbedCandidate("grpo", [host.variant("grpo", warm=0)]), *named_so])
        _, good, bad = found.lines
        ranked += good.ahead["pass@1"].value > 0 > bad.ahead["pass@1"].value
        told += bad.verdict["pass@1"] == "harmful" and good.verdict["pass@1"] in ("more", "unclear")
        more += good.verdict["pass@1"] == "more"
    assert ranked >= 19 and told >= 19 and more >= 5


# ---- sketches


@pytest.mark.parametrize("lora", [False, True])
def test_a_batch_of_sketches_is_that_of_single_passes_and_keeps_cosines(lora):
    torch.manual_seed(0)
    size = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    config = Qwen3Config(vocab_size=31, num_hidden_layers=2, tie_word_embeddings=True, **size)
    model = Qwen3ForCausalLM(config).eval()
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)).eval()
    stream = torch.Generator().manual_seed(0)
    rows = [torch.randint(31, (n,), generator=stream).tolist() for n in (3, 2, 5, 4, 9, 7)]
    prompts = [[1, 2, 3], [4], [1, 2, 3], [5, 6], [4], [7, 8, 9, 10]]
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    single = score_sketches(model, prompts, rows, 3000, temperature=0.7)
    assert len(calls) == 6
    batch = score_sketches(model, prompts, rows, 3000, temperature=0.7, batch=6)
    assert len(calls) == 7
    torch.testing.assert_close(batch, single, rtol=1e-3, atol=1e-3)

    parameters = [p for p in model.parameters() if p.requires_grad]
    exact = []
    for prompt, row in zip(prompts, rows, strict=True):
        logits = model(torch.tensor([prompt + row])).logits[0, len(prompt) - 1 : -1] / 0.7
        logprob = logits.log_softmax(-1)[range(len(row)), row].sum()
        exact.append(torch.cat([g.flatten() for g in torch.autograd.grad(logprob, parameters)]))
    units = (torch.nn.functional.normalize(x, dim=1) for x in (torch.stack(exact), batch))
    cosines, sketched = (u @ u.T for u in units)
    assert (cosines - sketched).abs().max() < 4 * (2 / 3000) ** 0.5


# ---- a run


KILLED = """
import os, signal
from pathlib import Path
from types import SimpleNamespace
import pyarrow.parquet as pq
from rl_plugins.lab.probe import pool
from rl_plugins.lab.probe.pool import PoolPlan, RunPool
from rl_plugins.lab.probe.runs import ProbedRun

written = []
def killed(table, file, **options):
    pq.write_table(table, file, **options)
    written.append(file)
    if len(written) == 6:
        os.truncate(file, os.path.getsize(file) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

pool.pq = SimpleNamespace(write_table=killed)
RunPool(ProbedRun.of({words}), {plan}, Path({folder!r})).draw()
"""
"""A process that is killed while it writes its sixth file."""


@pytest.mark.long
def test_a_pool_that_was_killed_goes_on_and_is_answered(tmp_path, monkeypatch):
    from rl_plugins.lab.demo.trl_data import write
    from rl_plugins.lab.probe.pool import PoolPlan, RunPool
    from rl_plugins.lab.probe.runs import ProbedRun

    monkeypatch.setattr(answers, "BATCHES", 2)
    words = [str(write(tmp_path)), "--per_device_train_batch_size", "8"]
    plan = PoolPlan(prompts=16, rollouts=4, accuracy=0.2, solved_by="exact")
    run = ProbedRun.of(words)
    cut = RunPool(run, plan, tmp_path / "cut")
    code = KILLED.format(words=words, plan=plan, folder=str(tmp_path / "cut"))
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    whole = RunPool(run, plan, tmp_path / "whole")
    whole.draw()

    drawn, seen = len(cut.missing), []
    cut.draw(lambda missing: seen.extend(missing) or missing)
    assert drawn == len(seen) == 11 and not cut.missing
    one, other = whole.read(), cut.read()
    np.testing.assert_array_equal(one.score, other.score)
    np.testing.assert_array_equal(one.rewards, other.rewards)
    assert one.said.tolist() == other.said.tolist() and len({*one.said.ravel()}) > 20
    # Stored rewards are those of the texts, and each row's sketch is that of its own tokens.
    solved = [t.lstrip("=?") == a for texts, a in zip(one.said, one.columns["answer"], strict=True) for t in texts]
    np.testing.assert_array_equal(one.rewards[..., 0].ravel(), solved)
    np.testing.assert_array_equal(one.right.ravel(), solved)
    for texts, scores in zip(one.said, one.score, strict=True):
        assert len({*texts}) == len(np.unique(scores, axis=0))

    command = ["probe", *words, "--prompts", "16", "--rollouts", "4", "--accuracy", "0.2", "--solved-by", "exact"]
    command += ["--out", str(tmp_path / "cut"), "--methods", "gdpo", "--methods", "gigpo"]
    plan_text = CliRunner().invoke(app, [*command, "--dry-run"]).stdout
    assert "0 of 16 prompts" in plan_text and "8 rollouts, 4 per prompt" in plan_text and "gigpo" in plan_text
    later = shutil.copytree(tmp_path / "policy", tmp_path / "later")
    told = CliRunner().invoke(app, [*command, "--checkpoints", str(later)])
    assert told.exit_code == 0, told.output
    found, same = (json.loads((tmp_path / "cut" / name).read_text()) for name in ("probe.json", "1-later/probe.json"))
    assert found["targets"] == ["reward", "exact", "digits", "careful", "pass@1", "pass@3"]
    assert found["lines"][0]["verdict"].keys() == set(found["targets"]) and "turns" in found["lines"][-1]["why_not"]
    assert "For pass@3, at 8 rollouts a batch:" in told.stdout
    assert same == found and re.search(r"^rank correlation +1\.00", told.stdout, re.M)
    other_model = CliRunner().invoke(app, [*command, "--temperature", "0.7"])
    assert other_model.exit_code == 2 and "another generation" in other_model.stderr


def test_a_checkpoint_of_an_adapter_has_the_gradients_of_that_adapter(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    from rl_plugins.lab.demo.trl_data import write
    from rl_plugins.lab.probe.pool import PoolPlan, RunPool
    from rl_plugins.lab.probe.runs import ProbedRun

    run = ProbedRun.of(
        [str(write(tmp_path)), "--use_peft", "--lora_r", "2", "--lora_target_modules", "q_proj", "v_proj"]
    )
    base = Qwen3ForCausalLM.from_pretrained(tmp_path / "policy")
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    plan = PoolPlan(prompts=1, rollouts=3, accuracy=0.2)
    first, later = RunPool(run, plan, tmp_path / "first"), RunPool(run.at(tmp_path / "adapter"), plan, tmp_path / "at")
    for pool in (first, later):
        pool.draw()
    table = pq.read_table(tmp_path / "at" / "pool" / "prompt-000000.parquet")
    base = Qwen3ForCausalLM.from_pretrained(tmp_path / "policy")
    model = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True).eval()
    prompt = run.sampler().encode([run.rows.dataset[first.prompts[0]]["prompt"]])["input_ids"][0].tolist()
    want = score_sketches(model, [prompt] * 3, table["completion_ids"].to_pylist(), plan.dims)
    np.testing.assert_allclose(later.read().score[0], want, rtol=1e-3, atol=1e-4)
    assert np.abs(first.read().score).max() > 0  # a new adapter has gradients in its second matrices
    with raises(ConfigError, "neither a model nor an adapter"):
        run.at(tmp_path)


def test_a_run_with_vllm_samples_by_trls_own_engine(tmp_path, monkeypatch):
    """Without vLLM: a stand-in for the engine, made with TRL's own signature."""
    from trl.generation import vllm_generation

    from rl_plugins.lab.demo.trl_data import write
    from rl_plugins.lab.probe.pool import PoolPlan, RunPool
    from rl_plugins.lab.probe.runs import ProbedRun

    class StandIn(vllm_generation.VLLMGeneration):
        def _init_vllm(self):
            self.calls = []

        def sync_weights(self):
            self.calls.append("weights")

        def generate(self, prompts, images, num_generations, profiler=None):
            said = self.mode, self.server_port, self.temperature, self.max_completion_length, num_generations
            assert said == ("server", 8123, 0.9, 5, 3) and self.calls == ["weights"] and len(prompts) == 3
            return prompts, [[7 + i, 8, 1] for i in range(3)], None, None

    monkeypatch.setattr(vllm_generation, "VLLMGeneration", StandIn)
    options = ["--use_vllm", "--vllm_mode", "server", "--vllm_server_port", "8123", "--temperature", "0.9"]
    run = ProbedRun.of([str(write(tmp_path)), *options, "--max_completion_length", "5"])
    pool = RunPool(run, PoolPlan(prompts=2, rollouts=3, accuracy=0.2), tmp_path / "pool")
    pool.draw()
    table = pq.read_table(tmp_path / "pool" / "pool" / "prompt-000001.parquet")
    assert table["completion_ids"].to_pylist() == [[7, 8, 1], [8, 8, 1], [9, 8, 1]]


def test_a_command_line_of_verl_is_probed(tmp_path, monkeypatch):
    from rl_plugins.lab.demo import verl_data
    from rl_plugins.lab.demo.policy import load_policy
    from rl_plugins.lab.probe.runs import ProbedRun

    monkeypatch.setattr(answers, "BATCHES", 2)
    verl_data.write(tmp_path)
    words = verl_data.overrides(tmp_path, load_policy(), tmp_path)
    words += ["data.train_batch_size=2", "+rl_plugins.rewards.digits=1", "+rl_plugins.rewards.careful=0.5"]
    options = [
        "--prompts",
        "16",
        "--rollouts",
        "4",
        "--accuracy",
        "0.2",
        "--methods",
        "gdpo",
        "--out",
        str(tmp_path / "out"),
    ]
    command = ["probe", *options, "--json", "--", "python", "-m", "verl.trainer.main_ppo", *words]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["rollouts"] == 8 and found["targets"] == ["reward", "digits", "careful", "pass@1", "pass@3"]
    assert found["lines"][-1]["name"] == "gdpo" and found["lines"][-1]["ratios"].keys() | {*found["unclear"]}
    run = ProbedRun.of([*words, "actor_rollout_ref.model.lora_rank=4", "algorithm.norm_adv_by_std_in_grpo=False"])
    assert run.adapter.r == 4 and run.host == HostBatch(4, 8, "none", "dapo")
    with raises(ConfigError, "adv_estimator=gae"):
        ProbedRun.of([*words, "algorithm.adv_estimator=gae"])


# ---- a trace


def test_a_trace_tells_signal_and_variance_without_gradients(tmp_path):
    """Of eight groups two have equal rewards; the others have advantages of one size."""
    for number in (0, 1):
        rewards = [[1, 1, 1, 1], *[[0, 1, 1, 0]] * 3]
        rows = [(g, r) for g, group in enumerate(rewards) for r in group]
        made = [a_row(i, g, [1, 2], raw_reward=2.0 * r, rewards=named(right=r)) for i, (g, r) in enumerate(rows)]
        write_batch(tmp_path / "trace", number, made)
    call = ["probe", "--trace", str(tmp_path), "--methods", "variance_filter", "--methods", "d3s", "--json"]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    lines = {line["name"]: line for line in json.loads(result.stdout)}
    grpo, none, kept = (lines[n]["shares"] for n in ("grpo", "Dr. GRPO, RLOO", "variance_filter"))
    assert grpo["rollouts"] == 16 and grpo["tokens"] == 32
    assert grpo["signal"] == pytest.approx(0.75, abs=0.1) and grpo["effective"] == pytest.approx(grpo["signal"])
    assert grpo["spread"] / grpo["signal"] == pytest.approx(3 / 4, rel=1e-3)
    assert none["spread"] / none["signal"] == pytest.approx(1, rel=1e-6)  # of rewards 0 and 2
    assert kept["spread"] == pytest.approx(3 / 4, rel=1e-3)  # the others are trained alone
    assert "reads tokens" in lines["d3s"]["why_not"]
    table = CliRunner().invoke(app, call[:-1]).stdout
    assert "8 recorded groups of 4 rollouts, in batches of 16" in table and "- d3s: " in table
    for words, said in ((["x.yaml", "--trace", str(tmp_path)], "Give one of them"), (["x.yaml"], "command line")):
        refused = CliRunner().invoke(app, ["probe", *words])
        assert refused.exit_code == 2 and said in refused.stderr
