"""Numbers of methods on 49,152 words, with prompts of unequal length: signals against float64, other padding and
micro-batches, LoRA, bfloat16 and checkpointing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "hosts" / "trl"))

import probes
from harness import history, stub_sampling
from test_real_text import SIGNS, dataset
from trl_arms import Arm, layers, make

from rl_plugins.runtime import registry
from rl_plugins.trl.generation import batches as module

pytestmark = [pytest.mark.real, pytest.mark.host]

WORDS = 49_152


@pytest.fixture(autouse=True, scope="module")
def _probes() -> Iterator[None]:
    entry_points = registry._entry_points
    probes.register()
    yield
    registry._entry_points = entry_points


class Trained:
    """One batch of a stack on completions that depend on the prompts alone."""

    def __init__(self, folder: Path, methods: list[str], monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        arm = Arm(rewards=("solved", "brief"), options={"learning_rate": 0.1})
        self.trainer = make(folder, methods, arm, dataset=dataset(False), **options)
        assert len(self.trainer._tokenizer) == WORDS == self.trainer.model.config.vocab_size
        decide, self.decisions, self.tokens = module.decide, [], []

        def watched(*args: Any) -> Any:
            self.tokens.append(args[2])
            self.decisions.append(decide(*args))
            return self.decisions[-1]

        pool = self.trainer._tokenizer.encode(f"{SIGNS} 7 = \n The answer is 1. 2 3 4")
        before = layers(self.trainer.model)
        with stub_sampling(8, pool), monkeypatch.context() as patch:
            patch.setattr(module, "decide", watched)
            self.trainer.train()
        self.update = layers(self.trainer.model) - before
        self.loss = history(self.trainer, "loss")
        (self.decision,) = self.decisions

    @property
    def advantages(self) -> Tensor:
        return self.decision.advantages


def truth(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """(tokens, words) log-probs of a row alone, in float64 from the logits on."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits, -1)


def test_signals_are_those_of_float64(tmp_path: Path) -> None:
    """In a batch padded on the left, beside the same rows alone."""
    arm = Arm(options={"beta": 0.04, "learning_rate": 0.0})
    trainer = make(tmp_path, ["signals", "squares"], arm, dataset=dataset(False))
    trainer.train()
    model = trainer.model.eval()
    ((rollouts, tokens),), (_, squared) = probes.Signals.seen, probes.Squares.seen
    lengths = {len(rollouts.token_ids.prompt[i]) for i in range(len(rollouts))}
    assert len(lengths) >= 3, "prompts of unequal length"
    compared = 0
    for i in range(len(rollouts)):
        ids = rollouts.token_ids.completion[i].tolist()
        of_row = tokens.row == i
        if not of_row.any():
            continue
        own = truth(model, rollouts.token_ids.prompt[i].tolist(), ids)
        logprobs = own.gather(1, torch.tensor(ids)[:, None])[:, 0]
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
            torch.testing.assert_close(getattr(tokens, name)[of_row].double(), logprobs, rtol=0, atol=2e-4)
        entropies = -(own.exp() * own).sum(1)
        torch.testing.assert_close(tokens.entropies[of_row].double(), entropies, rtol=0, atol=2e-4)
        squares = (2 * own).exp().sum(1)
        torch.testing.assert_close(squared.sum_squared_probs[squared.row == i].double(), squares, rtol=2e-4, atol=1e-7)
        compared += len(ids)
    assert compared > 32


STACK = ["gdpo", "aepo_advantages"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    patch = pytest.MonkeyPatch()
    return Trained(tmp_path_factory.mktemp("plain"), STACK, patch)


def test_other_padding_and_micro_batches_change_nothing(
    plain: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "pad_to_multiple_of": 96}
    other = Trained(tmp_path, STACK, monkeypatch, **small)
    assert other.decision.rollouts.text == plain.decision.rollouts.text
    torch.testing.assert_close(other.tokens[0].entropies, plain.tokens[0].entropies, rtol=0, atol=2e-4)
    torch.testing.assert_close(other.advantages, plain.advantages, rtol=0, atol=1e-4)
    assert float(plain.advantages.std()) > 0.1
    assert float((other.update - plain.update).norm() / plain.update.norm()) < 1e-3


def test_checkpointing_changes_nothing(plain: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Trained(tmp_path, STACK, monkeypatch, gradient_checkpointing=True)
    torch.testing.assert_close(other.advantages, plain.advantages, rtol=0, atol=1e-6)
    assert other.loss == pytest.approx(plain.loss, abs=1e-5)
    assert float((other.update - plain.update).norm() / plain.update.norm()) < 1e-4


def test_bfloat16_leaves_rewards_and_moves_entropies_little(
    plain: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Trained(tmp_path, STACK, monkeypatch, bf16=True)
    assert torch.equal(other.decision.rollouts.reward, plain.decision.rollouts.reward)
    assert torch.equal(other.decision.trained, plain.decision.trained)
    assert float((other.tokens[0].entropies - plain.tokens[0].entropies).abs().max()) < 0.2
    torch.testing.assert_close(other.advantages, plain.advantages, rtol=0, atol=0.1)
    assert other.loss == pytest.approx(plain.loss, abs=0.02)


def test_lora_decides_as_the_whole_model_and_moves_adapters_alone(
    plain: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig

    other = Trained(tmp_path, STACK, monkeypatch, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    torch.testing.assert_close(other.advantages, plain.advantages, rtol=0, atol=1e-4)
    assert other.loss == pytest.approx(plain.loss, abs=1e-4), "an adapter begins as the model"
    names = [(name, p.numel()) for name, p in other.trainer.model.named_parameters() if "embed" not in name]
    parts = dict(zip((name for name, _ in names), other.update.split([size for _, size in names]), strict=True))
    moved = {name for name, change in parts.items() if bool(change.any())}
    assert moved and all("lora_B" in name for name in moved), "A moves from the second step on"
