"""verl's SFT trainer with the loss of OTR: `torchrun -m rl_plugins.verl.otr`, then the options of verl's own.

`+otr.NAME=VALUE` sets a parameter of rl_plugins.tools.supervised.otr. verl's FSDP engine has a hook for distillation:
with two flags on the batch it hands its logits to the loss object before it calls that for the loss. So verl is not
changed, and its log-probs are not computed. Validation has no flags and stays verl's cross-entropy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import hydra
import torch
from torch import Tensor
from verl.trainer import sft_trainer
from verl.utils import tensordict_utils as tu
from verl.utils.device import auto_set_device
from verl.workers.utils.losses import sft_loss

from rl_plugins.core.errors import ConfigError, shown
from rl_plugins.core.params import build_params
from rl_plugins.tools.supervised.otr import Drawing, OtrParams, generator, logits_loss, sequence_weights
from rl_plugins.verl.compat import check_verl

ENGINES = ("fsdp", "fsdp2")
LOSS = "otr_loss"  # of each token, in the outputs of the engine


class OtrLoss:
    """What the engine calls: with `student_logits` for a term per token, then with `model_output` for the loss.

    Args:
        params: of the loss.
        seed: of the run.
        vocabulary: size of the tokenizer.
    """

    def __init__(self, params: OtrParams, seed: int, vocabulary: int) -> None:
        self.params, self.seed, self.vocabulary = params, seed, vocabulary
        self.step = self.rank = self.micro = 0
        self.sequences = 0.0
        self.sums = torch.zeros(3, dtype=torch.float64)

    def begin(self, step: int, rank: int, sequences: float) -> None:
        """Of an optimizer step: its number, the data-parallel rank, and how many sequences of all ranks are trained."""
        self.step, self.rank, self.micro, self.sequences = step, rank, 0, sequences
        self.sums = torch.zeros(3, dtype=torch.float64)

    def __call__(
        self, model_output: Any = None, data: Any = None, dp_group: Any = None, student_logits: Tensor | None = None
    ) -> Any:
        if student_logits is not None:
            return self._of_tokens(student_logits.squeeze(0), data)
        if LOSS not in model_output:
            return sft_loss(config=None, model_output=model_output, data=data, dp_group=dp_group)
        divisor = data["batch_num_tokens"] if self.params.reduction == "token" else self.sequences
        return model_output[LOSS].values().sum() / max(divisor, 1) * data["dp_size"], {}

    def _of_tokens(self, logits: Tensor, data: Any) -> dict[str, Tensor]:
        """(1, tokens) each, as the engine expects them; 0 where there is no target."""
        target, rows, sequence = targets(data)
        stream = generator(self.params, self.seed, self.step, self.rank, self.micro, logits.device)
        self.micro += 1
        found = logits_loss(logits, target, rows, Drawing(self.params, stream, self.vocabulary), in_place=True)
        loss = found.loss
        if self.params.reduction == "sequence":
            loss = loss * sequence_weights(sequence)[0]
        sums = torch.stack([found.share.sum(), found.nll.sum(), found.nll.new_tensor(len(rows))])
        self.sums += sums.detach().double().cpu()
        return {LOSS: loss.new_zeros(len(logits)).index_put((rows,), loss)[None]}


def targets(data: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of a ragged micro-batch: the id after each token, the places that are trained, and of which sequence they are.

    Returns:
        (tokens,) ids, (targets,) places, (targets,) sequences.
    """
    ids = data["input_ids"]
    offsets = ids.offsets()
    mask = torch.roll(data["loss_mask"].values(), -1).bool()
    mask[offsets[1:] - 1] = False  # what follows is another sequence
    rows = mask.nonzero().squeeze(-1)
    number = torch.arange(len(offsets) - 1, device=offsets.device)
    sequence = torch.repeat_interleave(number, offsets.diff())
    return torch.roll(ids.values(), -1), rows, sequence[rows]


class OtrSFTTrainer(sft_trainer.SFTTrainer):
    """verl's `SFTTrainer` with OTR.

    Raises:
        ConfigError: an unknown or illegal parameter, or an engine option that was not shown to work.
    """

    def __init__(self, config: Any) -> None:
        params = check(config)
        super().__init__(config)
        self.otr = OtrLoss(params, int(config.trainer.seed), len(self.model_config.tokenizer))
        self.otr_steps = 0
        client = self.training_client
        client.set_loss_fn(loss_fn=self.otr)
        client.train_batch = functools.partial(self._train_batch, client.train_batch)

    def _train_batch(self, host: Callable[..., Any], data: Any) -> Any:
        tu.assign_non_tensor(data, distillation_use_topk=True, distillation_only=True)
        self.otr_steps += 1
        group = self.engine.get_data_parallel_group()
        _, _, sequence = targets(data)
        sequences = _summed(torch.tensor([float(len(torch.unique(sequence)))], device=sequence.device), group)
        step = self.resume_global_step + self.otr_steps
        self.otr.begin(step, self.engine.get_data_parallel_rank(), sequences.item())
        output = host(data=data)
        share, nll, tokens = _summed(self.otr.sums.float().to(self.device_name), group).tolist()
        if output is not None:
            metrics = tu.get(output, "metrics")
            metrics.update({"otr/share": share / max(tokens, 1.0), "otr/nll": nll / max(tokens, 1.0)})
        return output


def _summed(value: Tensor, group: Any) -> Tensor:
    value = value.to(sft_trainer.get_device_name())
    torch.distributed.all_reduce(value, group=group)
    return value


def check(config: Any) -> OtrParams:
    """The parameters in a config of verl's SFT trainer.

    Raises:
        ConfigError: see `OtrSFTTrainer`.
    """
    check_verl()
    if config.get("rl_plugins") is not None:
        raise ConfigError("The config has `rl_plugins`. Methods act on rollouts, and SFT has none: remove that node.")
    given = config.get("otr") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"`otr` is {shown(given)}; write parameters, e.g. +otr.beta=-0.1.")
    params = cast(OtrParams, build_params(OtrParams, dict(given), "otr"))
    engine, model = config.engine, config.model
    size = engine.get("ulysses_sequence_parallel_size", 1)
    refused = {
        "engine.strategy": (engine.get("strategy"), engine.get("strategy") in ENGINES, " or ".join(ENGINES)),
        "model.use_fused_kernels": (
            model.get("use_fused_kernels"),
            not model.get("use_fused_kernels"),
            "False: they make no logits",
        ),
        "engine.pad_to_length": (
            engine.get("pad_to_length"),
            not engine.get("pad_to_length"),
            "False: the hook takes no padding",
        ),
        "engine.ulysses_sequence_parallel_size": (size, size == 1, "1: it was not tested with more"),
    }
    for option, (given, fine, wanted) in refused.items():
        if not fine:
            raise ConfigError(f"`{option}` is {given!r}. OTR needs {wanted}.")
    return params


@hydra.main(  # type: ignore[untyped-decorator]
    config_path="pkg://verl.trainer.config", config_name="sft_trainer_engine", version_base=None
)
def main(config: Any) -> None:
    """One process of a run that torchrun has started."""
    auto_set_device(config)
    sft_trainer.SFTTrainer = OtrSFTTrainer
    sft_trainer.run_sft(config)


if __name__ == "__main__":
    main()
