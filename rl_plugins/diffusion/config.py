"""`DiffusionConfig`: the options of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from rl_plugins.core.errors import ConfigError, shown
from rl_plugins.core.estimators import Scale
from rl_plugins.core.losses import TRL_AGGREGATION, Aggregation
from rl_plugins.runtime.stack import MAX_UNREWARDED_BATCHES, check_max_unrewarded_batches

Precision = Literal["no", "bf16"]


def option(default: Any, help: str, **limits: float) -> Any:
    """A field with its help, and `ge`, `gt`, `le` where it is a number."""
    metadata = {"help": help, "limits": limits}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class DiffusionConfig:
    """Options of a run of the diffusion trainer. Defaults are those of BranchGRPO's flat baseline where it has them.

    Raises:
        ConfigError: a value that is not allowed; all of them at once.
    """

    output_dir: str = option("diffusion-output", "folder of checkpoints, metrics and images")
    methods: Sequence[str] = option([], "methods, in order; empty: GRPO")
    method_params: Mapping[str, Mapping[str, Any]] = option({}, "parameters of the methods, by method")
    max_unrewarded_batches: int = option(
        MAX_UNREWARDED_BATCHES, "batches in a row that may have no reward; they are skipped, one more ends the run"
    )
    objective: str = option("ppo", "what is minimized: ppo, the clipped surrogate on transitions; or nft, DiffusionNFT")
    objective_params: Mapping[str, Any] = option(
        {}, "parameters of nft: beta, decay, stochastic; those of ppo are options of their own"
    )

    batches: int = option(100, "generation batches of the run", ge=1)
    prompts_per_batch: int = option(4, "prompts of a generation batch", ge=1)
    group_size: int = option(8, "n, samples per prompt that are trained", ge=1)
    updates_per_batch: int = option(1, "optimizer steps on each batch; its rows are divided among them", ge=1)
    steps: int = option(20, "T, denoising steps of a sample", ge=1)
    shift: float | None = option(
        3.0, "shift a of the noise levels, a s / (1 + (a - 1) s); None: the levels of the scheduler", gt=0
    )
    timestep_scale: float | None = option(
        None, "factor from a noise level to the model's timestep; None: num_train_timesteps of the scheduler", gt=0
    )
    eta: float = option(0.3, "noise of a stochastic step, std = eta sqrt(-d)", gt=0)
    rows_per_call: int = option(64, "latents in one call of the model while samples are made", ge=1)

    learning_rate: float = option(1e-5, "learning rate of AdamW", ge=0)
    warmup_steps: int = option(0, "optimizer steps over which the learning rate rises to its value", ge=0)
    weight_decay: float = option(1e-4, "weight decay of AdamW", ge=0)
    max_grad_norm: float = option(1.0, "norm to which gradients are clipped", gt=0)
    clip_range: float = option(1e-3, "c of the clip range [1 - c, 1 + c] of the ratio", gt=0)
    advantage_clip: float = option(5.0, "bound of the advantages in the loss", gt=0)
    scale_rewards: str = option("group", "deviation that rewards are divided by: group, batch or none")
    loss_aggregation: str = option("token-mean", f"average over transitions: {', '.join(get_args(Aggregation))}")
    beta: float = option(0.0, "weight of the KL divergence to the reference policy", ge=0)
    rows_per_pass: int = option(8, "samples whose transitions are in one term of the loss", ge=1)
    transitions_per_pass: int | None = option(
        None, "transitions whose graph is held at once; below the number in a term each takes a forward pass more", ge=1
    )
    lora_rank: int | None = option(None, "rank of the LoRA adapters; None: all weights are trained", ge=1)
    lora_alpha: float | None = option(None, "alpha of LoRA; None: twice the rank", gt=0)
    lora_targets: Sequence[str] = option(["to_q", "to_k", "to_v", "to_out.0"], "modules that get adapters")
    mixed_precision: str = option("no", f"autocast: {', '.join(get_args(Precision))}")
    use_cpu: bool = option(False, "whether to train on the CPU although there is a GPU")
    seed: int = option(0, "seed of samples, prompts and adapters")
    reward_weights: Sequence[float] | None = option(None, "weights of the reward functions; None: 1 each")

    logging_steps: int = option(1, "generation batches between two lines of metrics", ge=1)
    report_to: str = option("none", "further place of metrics: none or tensorboard")
    progress: bool = option(True, "whether to show a progress bar")
    save_every: int = option(0, "generation batches between two checkpoints; 0: only the last", ge=0)
    keep_checkpoints: int = option(2, "checkpoints that are kept", ge=1)
    accept_changed_checkpoint: bool = option(
        False, "whether to resume from a checkpoint whose files or seed are not those of its save"
    )
    sheet_every: int = option(0, "generation batches between two sheets of samples from fixed seeds; 0: none", ge=0)
    sheet_columns: int = option(8, "samples per prompt on a sheet", ge=1)
    sheet_prompts: int = option(4, "prompts on a sheet", ge=1)

    def __post_init__(self) -> None:
        problems = [p for f in fields(self) if (p := self._problem(f.name, f.metadata["limits"]))]
        choices: dict[str, Sequence[str]] = {
            "scale_rewards": get_args(Scale),
            "loss_aggregation": sorted(set(TRL_AGGREGATION.values())),
            "mixed_precision": get_args(Precision),
            "report_to": ("none", "tensorboard"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                problems.append(f"{name}={shown(getattr(self, name))} is given; allowed: {', '.join(allowed)}.")
        if self.updates_per_batch > self.prompts_per_batch * self.group_size:
            problems.append(
                f"updates_per_batch={self.updates_per_batch} is given, and a batch has "
                f"{self.prompts_per_batch * self.group_size} rows. Make it smaller."
            )
        if problems:
            raise ConfigError("\n".join(problems))
        check_max_unrewarded_batches(self.max_unrewarded_batches, "max_unrewarded_batches")

    def _problem(self, name: str, limits: Mapping[str, float]) -> str:
        value = getattr(self, name)
        if not limits or value is None:
            return ""
        whole = isinstance(self.__dataclass_fields__[name].default, int)
        fits = isinstance(value, int) if whole else isinstance(value, int | float) and math.isfinite(value)
        fits = fits and not isinstance(value, bool)
        for kind, bound in limits.items():
            fits = fits and (value > bound if kind == "gt" else value >= bound)
        told = " and ".join(f"{'above' if kind == 'gt' else 'at least'} {bound:g}" for kind, bound in limits.items())
        number = "a whole number" if whole else "a finite number"
        return "" if fits else f"{name}={shown(value)} is given; it must be {number} {told}."

    @property
    def batch_rows(self) -> int:
        """Rows that a generation batch trains."""
        return self.prompts_per_batch * self.group_size

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.batches * self.updates_per_batch
