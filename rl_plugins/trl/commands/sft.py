"""TRL's `SFTConfig` and `SFTTrainer` with `loss_type: otr`, the loss of `tools.supervised.otr`, and their script.

TRL's fused head makes log-probs of the targets from hidden states, a tile of logits at a time. While our trainer
computes the loss of a micro-batch, that function of TRL is ours: it returns minus OTR's loss in the place of log-probs.
So there is one forward pass, no tensor of (tokens, vocabulary), and everything else is TRL's: the normalizer over
accumulation and ranks, the auxiliary loss of experts, sharded heads, metrics. Evaluation stays TRL's cross-entropy.

`accelerate launch -m rl_plugins.trl.commands.sft --config run.yaml` runs the script under any launcher.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import trl
from torch import Tensor
from trl.trainer import utils as head_utils

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.params import build_params
from rl_plugins.tools.supervised.otr import Drawing, Head, OtrParams, TokenLoss, generator, head_loss, sequence_weights
from rl_plugins.trl.changes import changed
from rl_plugins.trl.commands.script import SFT, main_of, run_script
from rl_plugins.trl.compat import OTR, check_part

LOSS = "otr"
_PARAMS = {f.name: f for f in dataclasses.fields(OtrParams)}


def _option(name: str, **more: Any) -> Any:
    """A field of the config for one parameter of OTR."""
    f = _PARAMS[name]
    return dataclasses.field(default=f.default, metadata={"help": f"OTR: {f.metadata['help']}.", **more})


@dataclass
class SFTConfig(trl.SFTConfig):
    """`trl.SFTConfig` with a third `loss_type`.

    Args:
        loss_type: "nll" and "dft" of TRL, or "otr".
        otr_samples, otr_kappa, otr_beta, otr_expected, otr_reduction, otr_seed: see
            `rl_plugins.tools.supervised.otr.OtrParams`; they act with `loss_type="otr"` only.

    Raises:
        ConfigError: a value out of range, an `otr_*` that has no effect, or another option that OTR cannot honor.
    """

    loss_type: str = dataclasses.field(
        default="nll",
        metadata={
            "help": "Loss: 'nll', 'dft' (arXiv:2508.05629), or 'otr' (arXiv:2509.26313).",
            "choices": ["nll", "dft", "chunked_nll", LOSS],
        },
    )
    otr_samples: int = _option("samples")
    otr_kappa: float = _option("kappa")
    otr_beta: float = _option("beta")
    otr_expected: bool = _option("expected")
    otr_reduction: str = _option("reduction", choices=["token", "sequence"])
    otr_seed: int = _option("seed")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.otr_options()
        if self.loss_type != LOSS:
            idle = [name for name, value in given.items() if value != _PARAMS[name].default]
            if idle:
                raise ConfigError(
                    f"`otr_{idle[0]}` has no effect: `loss_type` is {self.loss_type!r}. Set `loss_type: otr`, or "
                    f"remove `otr_{idle[0]}`."
                )
            return
        check_part(OTR)
        build_params(OtrParams, given, LOSS)
        if self.label_smoothing_factor > 0:
            raise ConfigError(
                f"`label_smoothing_factor` is {self.label_smoothing_factor:g}, and OTR has no target to smooth. Set it "
                f"to 0, or `loss_type: nll`."
            )
        if given["reduction"] == "sequence" and self.packing and self.packing_strategy == "wrapped":
            raise ConfigError(
                "`otr_reduction: sequence` needs whole sequences, and `packing_strategy: wrapped` cuts them. Take "
                "another `packing_strategy`, or `otr_reduction: token`."
            )

    def otr_options(self) -> dict[str, Any]:
        return {name: getattr(self, f"otr_{name}") for name in _PARAMS}


class SFTTrainer(trl.SFTTrainer):
    """`trl.SFTTrainer` that knows `loss_type="otr"` of our `SFTConfig`; with any other it is TRL's.

    Logged next to TRL's metrics: `otr/share`, of the draws that are the target (with `expected` its probability at
    temperature kappa), and `otr/nll`, the cross-entropy, both means over target tokens.

    Raises:
        ConfigError: with "otr": `compute_loss_func`, prompt learning of PEFT with `otr_reduction: sequence`, or
            context, sequence or tensor parallelism, which were not tested.
    """

    otr: Any = None  # OtrParams, with that loss

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        config = given.get("args")
        if getattr(config, "loss_type", None) != LOSS:
            super().__init__(*args, **kwargs)
            return
        if not isinstance(config, SFTConfig):
            raise ConfigError(
                f"`loss_type` is 'otr' in a {type(config).__name__}. Take the config of rl_plugins.trl.commands.sft, "
                f"which has its options."
            )
        self.otr = otr = build_params(OtrParams, config.otr_options(), LOSS)
        self._check(given, otr)
        with changed(config, loss_type="nll"):  # TRL's constructor knows its own losses only
            super().__init__(*args, **kwargs)
        parallel = self.accelerator.parallelism_config
        for kind in ("cp", "sp", "tp"):
            if parallel is not None and getattr(parallel, f"{kind}_enabled", False):
                raise ConfigError(f"`loss_type: otr` was not tested with `{kind}_size` above 1. Set it to 1.")
        tokenizer: Any = getattr(self.processing_class, "tokenizer", self.processing_class)
        self._vocabulary = len(tokenizer)
        self._micro = (-1, 0)  # optimizer step, micro-batches of it so far

    def _check(self, given: dict[str, Any], otr: Any) -> None:
        if given.get("compute_loss_func") is not None:
            raise ConfigError("`compute_loss_func` and `loss_type: otr` are two losses. Remove one of them.")
        if otr.reduction == "sequence" and getattr(given.get("peft_config"), "is_prompt_learning", False):
            raise ConfigError(
                "Prompt learning of PEFT moves the targets of a sequence, so `otr_reduction: sequence` cannot weigh "
                "them. Take `otr_reduction: token`, or another `peft_config`."
            )

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.otr is None or not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        head = _OtrHead(self._drawing(inputs["labels"].device), self._weights(inputs, num_items_in_batch))
        with changed(head_utils, _ChunkedLogProbFunction=head, _use_triton=lambda device: True):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._log_draws(head.result)
        return loss

    def _drawing(self, device: Any) -> Drawing:
        step = self.state.global_step
        micro = self._micro[1] if self._micro[0] == step else 0
        self._micro = (step, micro + 1)
        made = generator(self.otr, self.args.seed, step, self.accelerator.process_index, micro, device)
        return Drawing(self.otr, made, self._vocabulary)

    def _weights(self, inputs: dict[str, Any], items: Any) -> Tensor | None:
        """Of the target tokens, in their order; None: all alike."""
        if self.otr.reduction == "token":
            return None
        valid, sequence = _targets(inputs)
        weights, sequences = sequence_weights(sequence[valid])
        # without `items` TRL divides by the tokens of the micro-batch
        return weights if items is not None else weights * (len(weights) / sequences.clamp(min=1))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """With `otr_reduction: sequence` the sequences of an optimizer step are what TRL's sum is divided by."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if items is not None and self.otr is not None and self.otr.reduction == "sequence":
            items = torch.stack([_sequences(batch) for batch in batches]).sum().to(device)
            items = self.accelerator.gather(items).sum() if self.args.average_tokens_across_devices else items
        return batches, items

    def _log_draws(self, result: TokenLoss | None) -> None:
        if result is None:
            return
        sums = torch.stack([result.share.sum(), result.nll.sum(), result.share.new_tensor(len(result.share))])
        share, nll, tokens = self.accelerator.gather_for_metrics(sums.detach()[None]).sum(0).tolist()
        for name, value in (("share", share), ("nll", nll)):
            self._metrics["train"][f"otr/{name}"].append(value / max(tokens, 1.0))


class _OtrHead:
    """What TRL's fused head calls in the place of its own function, for one micro-batch.

    Args:
        weights: (tokens,) factor on the loss of each target token, None: 1.
    """

    def __init__(self, drawing: Drawing, weights: Tensor | None) -> None:
        self.drawing, self.weights = drawing, weights
        self.result: TokenLoss | None = None

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        """Arguments and results of TRL's `ChunkedLogProbFunction`; minus OTR's loss stands for the log-probs."""
        head = Head(float(logit_scale), softcap, 1 / temperature, head_utils.maybe_gather_lm_head_ctx)
        self.result = found = head_loss(hidden, weight, bias, targets, self.drawing, head)
        loss = found.loss if self.weights is None else found.loss * self.weights
        return -loss, found.entropy, None, None, found.top1


def _targets(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Which places of `labels[:, 1:]` are targets, and of which sequence each place is: (rows, time - 1) both."""
    labels = inputs["labels"][:, 1:]
    sequence = torch.arange(len(labels), device=labels.device)[:, None].expand_as(labels)
    if "attention_mask" not in inputs and "position_ids" in inputs:  # without padding: sequences one after the other
        sequence = (inputs["position_ids"] == 0).cumsum(-1)[:, 1:].to(labels.device)
    return labels != -100, sequence


def _sequences(inputs: dict[str, Any]) -> Any:
    """How many sequences have a target."""
    valid, sequence = _targets(inputs)
    return torch.tensor(len(torch.unique(sequence[valid])), device=valid.device)


def run(argv: Sequence[str]) -> None:
    """Trains in this process, one of those a launcher has started.

    Raises:
        ConfigError: see `rl_plugins.trl.commands.script.run_script`.
    """
    run_script(SFT, argv, lambda args, model: {"SFTTrainer": SFTTrainer} if args.loss_type == LOSS else {})


def main() -> None:
    """The script of `rl-plugins trl sft`."""
    main_of(run)


if __name__ == "__main__":
    main()
