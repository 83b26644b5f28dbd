"""ppo_million in TRL's trainer: a config of `rl-plugins scale`, weights bit for bit, its KL, and a learning rate that a
plateau cuts, in a resumed run, too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import history, make, stub_sampling, weights
from transformers import TrainerCallback

from rl_plugins.commands.shared.yaml_edit import with_values
from rl_plugins.trl.commands import scale

pytestmark = pytest.mark.host
CONFIG = "per_device_train_batch_size: 16\nnum_generations: 8\nbf16: false\nmodel_name_or_path: policy\nmax_steps: 7\n"


class Seen(TrainerCallback):
    """Weights before every optimizer step, and the learning rate that the optimizer steps with."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.rates: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        optimizer.register_step_post_hook(lambda o, *_: self.rates.append(o.param_groups[0]["lr"]))

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))


def halves(completion_ids: Any = None, **kwargs: Any) -> list[float]:
    """A mean of 0.5 in every batch, however good the policy is."""
    return [float(i % 2) for i in range(len(completion_ids))]


def run(folder: Path, methods: Any = ("ppo_million",), resume: bool = False, **options: Any) -> tuple[Any, Seen]:
    folder.mkdir(exist_ok=True)
    seen = Seen()
    with stub_sampling():
        t = make(folder, list(methods), callbacks=[seen], **{"learning_rate": 0.1, **options})
        t.train(resume_from_checkpoint=resume)
    return t, seen


def test_a_scaled_config_trains_stock_weights_and_logs_its_kl(tmp_path: Path) -> None:
    """4 times the rows of a batch: two batches of 4 optimizer steps, each of 16 rows as before."""
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    new = yaml.safe_load(with_values(CONFIG, scale.scaled(path, 4, 1).values))
    assert (new["steps_per_generation"], new["max_steps"]) == (4, 8)
    options = {k: v for k, v in new.items() if k not in ("bf16", "model_name_or_path")}
    stock, _ = run(tmp_path / "stock", (), stock=True, **options)
    ours, seen = run(tmp_path / "ours", **options)
    assert torch.equal(weights(stock), weights(ours)), "the term of 0 changes nothing"
    kl, clipped = (history(ours, f"ppo_million/{name}") for name in ("kl", "clipped"))
    assert len(kl) == 8 and max(kl[0], kl[4]) < 1e-9 < min(kl[1], kl[3], kl[5]), "0 at the first step of each batch"
    assert min(kl[1:4]) > 1e-7 and clipped[0] == clipped[4] == 0.0
    samples = history(ours, "ppo_million/samples")
    assert len(samples) == 2, "two batches"
    ratio = history(ours, "ppo_million/samples_per_nat")
    assert ratio == pytest.approx([samples[0] / kl[3]], rel=1e-6), "of the first batch, with the KL of its last step"

    # the last step of the second batch, from its rows and the weights at the start of the batch and before the step
    batch = ours._buffered_inputs[3]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    lp = []
    for at in (4, 7):
        torch.nn.utils.vector_to_parameters(seen.weights[at].clone(), ours.model.parameters())
        with torch.no_grad():
            logits = ours.model(input_ids=ids, attention_mask=attention).logits.double()[:, :-1].log_softmax(-1)
        lp.append(logits.gather(2, ids[:, 1:, None])[..., 0][:, -batch["completion_ids"].size(1) :])
    total, outside, tokens = 0.0, 0, 0
    for old, new_, mask, adv in zip(*lp, batch["completion_mask"], batch["advantages"], strict=True):
        for k in mask.nonzero()[:, 0].tolist():
            r = math.exp(float(new_[k] - old[k]))
            total, tokens = total + r - 1 - math.log(r), tokens + 1
            outside += r > 1.2 if adv > 0 else r < 0.8 if adv < 0 else 0
    assert kl[7] == pytest.approx(total / tokens, rel=2e-3) and clipped[7] == pytest.approx(outside / tokens, abs=1e-9)


def test_a_plateau_cuts_the_rate_of_real_steps_also_when_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = dict(
        method_params={"ppo_million": {"action": "shrink", "window": 4, "kl_share": 0.0, "factor": 4.0}},
        reward=halves,
        num_iterations=2,
        learning_rate=0.02,
        save_strategy="steps",
        save_steps=6,
    )
    whole, seen = run(tmp_path / "whole", max_steps=14, **options)
    # a test needs 4 batches with an update before them: the fifth batch finds the plateau, the sixth is trained with it
    assert seen.rates == pytest.approx([0.02] * 10 + [0.005] * 4)
    assert (
        history(whole, "ppo_million/plateau") == [1.0] and history(whole, "ppo_million/cuts") == [0.0] * 5 + [1.0] * 2
    )
    assert whole.methods.methods[0].state["cuts"] == 1
    run(tmp_path / "parts", max_steps=6, **options)
    parts, rest = run(tmp_path / "parts", resume=True, max_steps=14, **options)
    assert rest.rates == pytest.approx([0.02] * 4 + [0.005] * 4) and torch.equal(weights(whole), weights(parts))
