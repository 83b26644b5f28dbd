"""Losses for rollouts of an older policy, in a real trainer: the first group of the first batch is trained again in the
second, two published weights later, with the log-probs it was sampled with. Each optimizer step is compared with
autograd of the formula, written as loops over rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import history, make, stub_sampling
from messages import raises
from transformers import TrainerCallback

from rl_plugins.core.errors import ConfigError
from rl_plugins.trl.trainer import GRPOTrainer

pytestmark = pytest.mark.host
RATE = 0.3
OPTIONS: dict[str, Any] = dict(
    num_iterations=2, max_steps=4, learning_rate=RATE, max_grad_norm=0.0, lr_scheduler_type="linear"
)


class Watch(TrainerCallback):
    """Weights before and after every optimizer step, and the learning rate behind it."""

    def __init__(self) -> None:
        self.weights, self.rates, self.scheduled = [], [], []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.weights:
            self.weights.append(_flat(model))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights.append(_flat(model))
        self.rates.append([g["lr"] for g in kwargs["optimizer"].param_groups])
        self.scheduled.append(kwargs["lr_scheduler"].get_last_lr())


def _flat(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


class Run:
    """Four optimizer steps on two batches."""

    def __init__(self, folder: Any, method: str, **params: Any) -> None:
        watch, self.batches = Watch(), []
        t = make(folder, ["replayed", method], method_params={method: params}, callbacks=[watch], **OPTIONS)
        inside = GRPOTrainer._generate_and_score_completions
        made = self.batches

        def spy(self: Any, inputs: Any) -> Any:
            made.append(inside(self, inputs))
            return made[-1]

        t._generate_and_score_completions = spy.__get__(t)
        with stub_sampling():
            t.train()
        self.trainer, self.watch = t, watch

    def logged(self, name: str) -> list[float]:
        return history(self.trainer, name)

    def step(self, number: int) -> torch.Tensor:
        """What an optimizer step changed, over the learning rate of the schedule: the gradient, if nothing scales."""
        rate = RATE * (4 - number) / 4
        return (self.watch.weights[number] - self.watch.weights[number + 1]) / rate

    def logprobs(self, number: int) -> torch.Tensor:
        """Of the batch of an optimizer step, at the weights before it, with gradient."""
        torch.nn.utils.vector_to_parameters(self.watch.weights[number].clone(), self.trainer.model.parameters())
        self.trainer.model.zero_grad()
        b = self.batches[number // 2]
        ids = torch.cat([b["prompt_ids"], b["completion_ids"]], 1)
        attention = torch.cat([b["prompt_mask"], b["completion_mask"]], 1)
        return self.trainer._get_per_token_logps_and_entropies(
            self.trainer.model, ids, attention, b["completion_ids"].size(1)
        )[0]

    def columns(self, number: int) -> tuple[list[list[int]], torch.Tensor, torch.Tensor, torch.Tensor]:
        """Trained places of every row, old and rollout log-probs, advantages."""
        b = self.batches[number // 2]
        mask = b["completion_mask"] * b.get("tool_mask", torch.ones_like(b["completion_mask"]))
        places = [m.nonzero()[:, 0].tolist() for m in mask]
        return places, b["old_per_token_logps"], b["rlp_rollout_logprobs"], b["advantages"]

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        return torch.cat([p.grad.flatten() for p in self.trainer.model.parameters()])


def close(step: torch.Tensor, grad: torch.Tensor) -> bool:
    return bool((step - grad).norm() / grad.norm() < 2e-4)


PPO_CASES: dict[str, dict[str, Any]] = {
    "token, mask": {"upper": 1.02, "clip_low": 0.01, "clip_high": 0.01},
    "sequence, clamp": {"level": "sequence", "action": "clamp", "upper": 1.001, "dual_clip": 1.01},
    "loglinear": {"proximal": "loglinear", "action": "none", "clip_low": 0.01, "clip_high": 0.01},
}


@pytest.mark.parametrize("name", PPO_CASES)
def test_decoupled_ppo_is_its_formula(tmp_path, name):
    p = {"clip_low": 0.2, "clip_high": 0.2, **PPO_CASES[name]}
    t = Run(tmp_path, "decoupled_ppo", **PPO_CASES[name])
    places, old, rollout, advantages = t.columns(3)
    lp, tokens = t.logprobs(3), sum(len(x) for x in places)
    total, outside, omegas, clipped = 0.0, 0, [], 0
    for i, row in enumerate(places):
        prox = old[i]
        if p.get("proximal") == "loglinear":  # the stored group is two published weights older than the others
            prox = rollout[i] + (2 / 3 if i < 8 else 0.0) * (lp[i].detach() - rollout[i])
        mean = sum(float(prox[k] - rollout[i, k]) for k in row) / len(row)
        for k in row:
            omega = math.exp(mean if p.get("level") == "sequence" else float(prox[k] - rollout[i, k]))
            out = omega > p.get("upper", math.inf)
            outside += out
            omega = omega if not out else min(omega, p["upper"]) if p.get("action") == "clamp" else 0.0
            a, u = advantages[i], torch.exp(lp[i, k] - prox[k])
            ppo = torch.maximum(-a * u, -a * u.clamp(1 - p["clip_low"], 1 + p["clip_high"]))
            clipped += bool(-a * u < ppo) and omega > 0
            if "dual_clip" in p and a < 0:
                ppo = torch.minimum(ppo, -p["dual_clip"] * a)
            total = total + omega * ppo / tokens  # rejected tokens stay in the divisor
            omegas.append((i, omega))
    assert close(t.step(3), t.gradient(total))
    fresh = [w for i, w in omegas if i >= 8]
    stale = [w for i, w in omegas if i < 8]
    assert max(abs(w - 1) for w in stale) > 1e-3, "the stored group was sampled by another policy"
    if name != "loglinear":
        assert max(abs(w - 1) for w in fresh) < 1e-4, "the others by the proximal one"
        assert outside > 0
    assert t.logged("decoupled_ppo/weight_mean")[3] == pytest.approx(sum(w for _, w in omegas) / tokens, abs=1e-5)
    assert t.logged("decoupled_ppo/filtered")[3] == pytest.approx(outside / tokens, abs=1e-6)
    assert t.logged("decoupled_ppo/clipfrac")[3] == pytest.approx(clipped / tokens, abs=2e-3)
    if name == "token, mask":
        assert t.logged("decoupled_ppo/clipfrac")[3] > 0.05
        assert t.logged("decoupled_ppo/clipfrac")[::2] == [0, 0], "at the start of a batch u is 1"


VCPO_CASES: dict[str, dict[str, Any]] = {
    "opob": {"base_ess_ratio": 0.9},
    "proxy": {"gradnorm": "proxy", "weight_power": "code", "truncation": 1.01},
    "group": {"baseline": "group", "lr_scale": "linear"},
}


@pytest.mark.parametrize("name", VCPO_CASES)
def test_vcpo_is_its_formula(tmp_path, name):
    """The learning rate of a step follows the weights, is the schedule's again to the last bit, and the baseline of a
    group is the one that the weights at that step give."""
    p = VCPO_CASES[name]
    t = Run(tmp_path, "vcpo", **p)
    places, old, rollout, _ = t.columns(3)
    lp = t.logprobs(3)
    rewards = [float(x) for x in t.batches[1]["rlp_row_column:vcpo_reward"]]  # centred and scaled on the driver
    length = [len(row) for row in places]
    rows = len(places)
    assert all(length)
    logs = [sum(float(lp[i, k] - rollout[i, k]) for k in row) for i, row in enumerate(places)]
    w = [math.exp(x) for x in logs]
    ratio = sum(w) ** 2 / sum(x * x for x in w) / rows
    bound = p.get("truncation", 8.0)
    power = 1.0 if p.get("lr_scale") == "linear" else 0.5
    scale = min(1.0, ratio / p.get("base_ess_ratio", 1.0)) ** power
    square = t.batches[1].get("rlp_row_column:vcpo_norm") if name == "proxy" else length
    group = t.batches[1]["rlp_group"].tolist()
    total = 0.0
    for i, row in enumerate(places):
        peers = [j for j in range(rows) if group[j] == group[i]]
        big = [w[j] ** 2 * (min(w[j], bound) ** 2 if name == "proxy" else 1.0) * float(square[j]) for j in peers]
        b = sum(x * rewards[j] for x, j in zip(big, peers, strict=True)) / sum(big)
        a = rewards[i] - (0.0 if name == "group" else b)
        total = total - a * min(w[i], bound) * sum(lp[i, k] for k in row) / (rows * length[i])
    assert close(t.step(3), scale * t.gradient(total))
    assert t.logged("vcpo/ess_ratio")[3] == pytest.approx(ratio, abs=1e-5)
    assert t.logged("vcpo/lr_scale")[3] == pytest.approx(scale, abs=1e-5)
    first, *later = t.logged("vcpo/ess_ratio")
    assert first == pytest.approx(1, abs=1e-6) and max(later) < 1 - 1e-6, "only the first step is on-policy"
    assert min(later) < 0.999
    assert len({round(x, 4) for x in w[:8]}) > 4, "the stored rows have weights of their own"
    # the schedule: bit-equal to one that nobody touched
    wanted = [[RATE * ((4 - n) / 4)] * 2 for n in range(1, 5)]  # two groups of parameters
    assert t.watch.rates == t.watch.scheduled == wanted


def test_vcpo_on_policy_keeps_the_learning_rate(tmp_path):
    """The first step of the run has weights of 1: GRPO with a population deviation, a mean over rows of means."""
    t = Run(tmp_path, "vcpo", baseline="group")
    lp, (places, *_) = t.logprobs(0), t.columns(0)
    b = t.batches[0]
    rewards, group = b["rlp_row_column:vcpo_reward"].tolist(), b["rlp_group"].tolist()
    for g in set(group):
        mine = [r for r, h in zip(rewards, group, strict=True) if h == g]
        assert sum(mine) == pytest.approx(0, abs=1e-5) and sum(r * r for r in mine) / len(mine) == pytest.approx(
            1, abs=1e-4
        )
    total = -sum(rewards[i] * lp[i, row].mean() for i, row in enumerate(places)) / len(places)
    assert close(t.step(0), t.gradient(total))


def test_what_is_refused(tmp_path):
    def refused(match: str, methods: list[str], **options: Any) -> None:
        with raises(ConfigError, match=match):
            make(tmp_path, methods, **{"num_iterations": 2, **options})

    refused(
        "(?s)`vcpo` needs whole groups.*Set steps_per_generation=1.*come from num_iterations, use_vllm",
        ["vcpo"],
        steps_per_generation=2,
        gradient_accumulation_steps=1,
        per_device_train_batch_size=32,
    )
    refused(
        "`vcpo`.*num_iterations=2.*use_vllm",
        ["vcpo"],
        num_iterations=1,
    )
    refused("`decoupled_ppo`", ["decoupled_ppo"], num_iterations=1)
    refused("`decoupled_ppo`.*top_p=0.9", ["decoupled_ppo"], top_p=0.9)
    make(
        tmp_path,
        ["vcpo"],
        num_iterations=1,
        steps_per_generation=2,
        per_device_train_batch_size=32,
        method_params={"vcpo": {"baseline": "group"}},
    )
