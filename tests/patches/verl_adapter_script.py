"""What the verl adapter does on the verl that is first on the path: which seams it uses, and its loss."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_PLUGINS="rl_plugins")

import torch
import verl  # noqa: F401  loads the plugin
from tensordict import TensorDict
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass

from rl_plugins.verl import loss as module
from rl_plugins.verl.config import Settings, compose
from rl_plugins.verl.rows import ROW_COLUMN, TOKEN_COLUMN


def batch() -> tuple[TensorDict, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    sizes = [3, 6, 1, 5]

    def nested(make: Any) -> torch.Tensor:
        return torch.nested.as_nested_tensor([make(n) for n in sizes], layout=torch.jagged)

    def column(scale: float) -> torch.Tensor:
        return nested(lambda n: scale * torch.randn(n, generator=g))

    data = TensorDict(
        {
            "prompts": nested(lambda n: torch.ones(2, dtype=torch.int64)),
            "responses": nested(lambda n: torch.ones(n, dtype=torch.int64)),
            "response_mask": nested(lambda n: (torch.arange(n) != 1).long()),
            "advantages": column(1.0),
            "old_log_probs": column(0.3),
            "rollout_log_probs": column(0.3),
            "rollout_is_weights": nested(lambda n: torch.rand(n, generator=g) + 0.5),
            ROW_COLUMN + "scale": torch.nested.as_nested_tensor(
                [torch.full((1,), 1.0 + i) for i in range(4)], layout=torch.jagged
            ),
            TOKEN_COLUMN + "weight": column(1.0),
        },
        batch_size=[4],
    )
    logprobs = 0.3 * torch.randn(sum(n + 2 for n in sizes), generator=g)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=11, global_batch_size=4)
    return data, logprobs


def main(out: Path) -> None:
    result: dict[str, Any] = {}
    for name in ("sync", "colocate_async", "separate_async"):
        cls = get_trainer_cls(f"rl_plugins_{name}")
        result[name] = {"own_property": "trainer_mode" in vars(cls), "base_mode": getattr(cls, "base_mode", None)}
    config = compose(
        [
            "actor_rollout_ref.actor.strategy=fsdp2",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.actor.kl_loss_coef=0.1",
        ]
    )
    calls = []
    own = module._surrogate_of_verl

    def counted(**kwargs: Any) -> Any:
        calls.append(sorted(kwargs))
        return own(**kwargs)

    module._surrogate_of_verl = counted
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    loss = module.MethodsLoss(actor, Settings(("minpro",)), config)
    data, values = batch()
    offsets = (data["responses"].offsets() + 2 * torch.arange(5)).long()
    leaf = values.clone().requires_grad_()
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(leaf, offsets)}
    value, metrics = loss(output, data)
    value.backward()
    result |= {
        "calls": len(calls),
        "keywords": calls[0] if calls else [],
        "loss": value.item(),
        "gradient": leaf.grad.tolist(),
        "metrics": sorted(metrics),
        "loss_mode_of_the_run": actor.policy_loss.loss_mode,
    }
    out.write_text(json.dumps(result))


main(Path(sys.argv[1]))
