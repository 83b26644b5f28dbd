"""Sol-RL on text in real trainers: a large pool drawn by a cheap copy, its best and worst trained, corrected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import history, make
from messages import raises
from torch import Tensor

from rl_plugins.core.errors import ConfigError
from rl_plugins.runtime.cheap import CheapCopy, CheapOptions
from rl_plugins.trl.generation.precision import CheapRollouts
from rl_plugins.trl.host import model_input

pytestmark = pytest.mark.host
TEMPERATURE = 0.8


def spread(trainer: Any) -> None:
    """Makes the untrained policy prefer some tokens, so that rounding its weights shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(0.15 * torch.randn(p.shape, generator=generator))


def logprobs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """(rows, time) of the completions, by a plain pass."""
    ids, mask, n = model_input(batch)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=places).logits[:, -n - 1 : -1] / TEMPERATURE
    return torch.log_softmax(logits.float(), -1).gather(2, batch["completion_ids"][..., None])[..., 0]


class Spy:
    """Of each batch: what the loss gets, and what the policy and a copy of it say then."""

    def __init__(self, trainer: Any, precision: Any) -> None:
        self.batches, self.pools = [], []
        inside, score = trainer._generate_and_score_completions, trainer._calculate_rewards

        def generate(inputs: Any) -> Any:
            batch = inside(inputs)
            copied = CheapCopy(trainer.model, CheapOptions(precision)).module
            self.batches.append((batch, logprobs(trainer.model, batch), logprobs(copied, batch)))
            return batch

        def rewards(*args: Any) -> Any:
            self.pools.append(score(*args))
            return self.pools[-1]

        trainer._generate_and_score_completions, trainer._calculate_rewards = generate, rewards


def test_a_pool_of_the_copy_is_cut_to_its_extremes_and_corrected(tmp_path):
    t = make(
        tmp_path,
        ["sol_rl_select", "sol_rl_advantages", "dart_tis"],
        method_params={"sol_rl_select": {"oversample": 2}, "dart_tis": {"cap": 3.0}},
        rollout_precision="fp4",
        temperature=TEMPERATURE,
        learning_rate=0.05,
    )
    spread(t)
    seen = Spy(t, "fp4")
    weights = []
    t.train()
    for (batch, policy, copied), pool in zip(seen.batches, seen.pools, strict=True):
        inside = batch["completion_mask"].bool()
        assert batch["completion_ids"].shape[0] == 64
        sampled, old = batch["rlp_rollout_logprobs"], batch["old_per_token_logps"]
        torch.testing.assert_close(sampled[inside], copied[inside], rtol=0, atol=2e-3)
        torch.testing.assert_close(old[inside], policy[inside], rtol=0, atol=1e-4)
        assert (sampled - old)[inside].abs().mean() > 0.02  # the copy is another policy
        # the 4 best and the 4 worst of each 16
        ordered = pool.view(8, 16).sort(1).values
        expected = torch.cat([ordered[:, :4], ordered[:, -4:]], 1)
        # advantages, each token weighted
        rewards = expected.double()
        sigma = rewards.std(correction=0) + 1e-4
        wanted = ((rewards - rewards.mean(1, keepdim=True)) / sigma).sort(1).values
        ratio = (old - sampled).exp().clamp(max=3.0)
        found = torch.stack([(a / r)[m].mean() for a, r, m in zip(batch["advantages"], ratio, inside, strict=True)])
        torch.testing.assert_close(found.double().view(8, 8).sort(1).values, wanted, rtol=1e-4, atol=1e-4)
        weights.append(ratio[inside].mean().item())
    assert history(t, "dart_tis/weight_mean") == pytest.approx(weights, rel=1e-4)
    assert history(t, "sol_rl_select/left") == [64, 64]
    assert min(history(t, "sol_rl_select/kept_std")) > max(history(t, "sol_rl_select/pool_std"))
    assert len(history(t, "rl_plugins/cheap_refresh_seconds")) == 2
    assert history(t, "rl_plugins/rows_made") == [128, 256]
    assert "by a copy of the policy with fp4 linear layers" in t.describe_methods()


def test_a_plan_with_limits_keeps_the_log_probs(tmp_path):
    """The second phase of `drive` cuts completions to three tokens."""
    params = {"drive": {"sizes": [1.0, 4], "batches": [1], "rollouts": [8, 8], "max_tokens": [14, 3]}}
    t = make(tmp_path, ["drive", "dart_tis"], method_params=params, rollout_precision="fp4", temperature=TEMPERATURE)
    spread(t)
    seen = Spy(t, "fp4")
    t.train()
    batch, policy, copied = seen.batches[1]
    inside = batch["completion_mask"].bool()
    assert batch["completion_ids"].size(1) == 3
    torch.testing.assert_close(batch["rlp_rollout_logprobs"][inside], copied[inside], rtol=0, atol=2e-3)
    assert (copied - policy)[inside].abs().mean() > 0.02


def test_programs_are_served_by_the_copy_too(tmp_path):
    t = make(tmp_path, ["plain", "dart_tis"], rollout_precision="int8", temperature=TEMPERATURE, max_steps=1)
    spread(t)
    seen = Spy(t, "int8")
    t.train()
    ((batch, policy, copied),) = seen.batches
    inside = batch["completion_mask"].bool()
    sampled = batch["rlp_rollout_logprobs"]
    # what a layer reads is rounded, so a last bit can become a step
    of_copy, of_policy = ((sampled - x)[inside].abs().mean() for x in (copied, policy))
    assert of_policy > 1e-3 and of_copy < of_policy / 20
    assert history(t, "dart_tis/weight_max") == [1.0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rollout_precision": "fp8"}, "rollout_precision='fp8'"),
        ({"methods": []}, "rollout_precision=int8"),
        ({"use_vllm": True}, "use_vllm=True.*use_vllm=False"),
        ({"use_transformers_continuous_batching": True}, "continuous batching reports no log-probs"),
        (
            {"more": {"tools": [len]}},
            "each completion in one call, and the trainer has tools or environments",
        ),
    ],
)
def test_a_copy_that_could_not_take_effect_is_refused(tmp_path, changes, text):
    options = {"methods": ["dart_tis"], "rollout_precision": "int8", "num_iterations": 2} | changes
    with raises(ConfigError, match=text):
        make(tmp_path, options.pop("methods"), **options)


@pytest.mark.parametrize(
    ("sharded", "quantized", "text"),
    [(True, False, "shared between processes"), (False, True, "was loaded quantized")],
)
def test_a_policy_that_cannot_be_copied_is_refused(sharded, quantized, text):
    trainer = SimpleNamespace(
        args=SimpleNamespace(rollout_precision="int8"),
        is_deepspeed_enabled=False,
        is_fsdp_enabled=sharded,
        model=SimpleNamespace(is_quantized=quantized),
    )
    with raises(ConfigError, match=f"rollout_precision=int8.*{text}"):
        CheapRollouts(trainer)
