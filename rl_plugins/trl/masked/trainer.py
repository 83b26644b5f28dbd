"""GRPO of masked diffusion language models: TRL's trainer with another way to sample and to take log-probs.

An answer has L tokens, those after the first end token included. `unmasked_at` holds the step in which each of them was
unmasked; every state of the decoding follows from it, so it travels with the rows of TRL's batch through cut, shuffle,
split and ranks. Ratio, clip range, KL, aggregation and metrics are TRL's own.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor
from transformers import GenerationConfig, ProcessorMixin
from trl.models import unwrap_model_for_generation
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer as HostTrainer
from trl.trainer.utils import pad

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.kit.masked import decode, step_weights, trajectory_logprobs
from rl_plugins.runtime.preflight import HostCapabilities
from rl_plugins.trl.capabilities import KnownRun
from rl_plugins.trl.changes import changed
from rl_plugins.trl.compat import HEAD, missing
from rl_plugins.trl.generation import costs
from rl_plugins.trl.host import HostBatch
from rl_plugins.trl.masked.capabilities import masked_capabilities, problems_of
from rl_plugins.trl.masked.config import MaskedGRPOConfig
from rl_plugins.trl.trainer import MethodsMixin

UNMASKED_AT, PROMPT_HIDDEN = "unmasked_at", "prompt_hidden"


class MaskedAnswer(list[int]):
    """Tokens of an answer, and the step in which each of them was unmasked."""

    unmasked_at: list[int]


class States(NamedTuple):
    """Of the rows whose log-probs are taken next.

    Args:
        unmasked_at: (rows, tokens) step in which each token was unmasked.
        prompt_hidden: (rows, prompt tokens) bool, prompt tokens that one-step log-probs do not see; None: all are seen.
    """

    unmasked_at: Tensor
    prompt_hidden: Tensor | None


class MaskedTrainer(HostTrainer):  # type: ignore[misc]
    """`trl.GRPOTrainer` of a bidirectional model that gives logits of masked tokens.

    The log-prob of a token, with x the prompt and the answer in some state, M the mask:

        lp_t = log softmax_{v != M}(model(x)_{t,v}) of the token at t

    "one_step": x is an answer of masks after a prompt with some tokens masked. "trajectory": x is the state in which
    the token was unmasked. The mask itself has no probability, because decoding never chooses it; temperature is
    not applied, as in the authors' code.

    Raises:
        ConfigError: another config than `MaskedGRPOConfig`, no mask token, tools, environments, a `rollout_func`, a
            processor of images, a mixture of experts with an auxiliary loss, or a model in which a later token does
            not change an earlier logit.
    """

    loss_like: ClassVar[str | None] = "host"
    args: MaskedGRPOConfig
    _states: States | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        config = given.get("args")
        if not isinstance(config, MaskedGRPOConfig):
            raise ConfigError(
                f"The config is a {type(config).__name__}. Take rl_plugins.trl.masked.MaskedGRPOConfig, which has the "
                f"options of masked diffusion models."
            )
        for name in ("tools", "environment_factory", "rollout_func"):
            if given.get(name):
                raise ConfigError(
                    f"`{name}` continues an answer or makes it elsewhere, and a masked diffusion model decodes it as a "
                    f"whole. Remove it."
                )
        if not config.methods:
            config.check_masked()
        if not isinstance(given.get("model"), str):
            _with_generation_config(given["model"])
        load = grpo_trainer.create_model_from_path
        # the fused head computes shifted log-probs
        head = {} if missing(HEAD) else {"add_fused_lm_head": lambda *model, **options: None}
        with changed(
            grpo_trainer,
            **head,
            create_model_from_path=lambda *path, **options: _with_generation_config(load(*path, **options)),
        ):
            super().__init__(*args, **kwargs)
        images = isinstance(self.processing_class, ProcessorMixin)
        if images or self.aux_loss_enabled:
            what = "a processor of images" if images else "an auxiliary loss of experts"
            raise ConfigError(f"The trainer of masked diffusion models does not serve {what}. Remove it.")
        self.mask_id = config.mask_token_id if config.mask_token_id is not None else self.processing_class.mask_token_id
        if self.mask_id is None:
            raise ConfigError("The tokenizer has no mask token. Set `mask_token_id` to its id in the vocabulary.")
        self.decoding = config.decoding(self.max_completion_length, self.temperature)
        if not self.is_deepspeed_enabled:  # there a rank may not hold the whole model
            self._check_bidirectional()

    @torch.no_grad()
    def _check_bidirectional(self) -> None:
        training = self.model.training
        self.model.eval()
        ids = torch.full((2, 4), int(self.mask_id), device=self.model.device)
        ids[:, 1], ids[1, -1] = self.eos_token_ids[0], self.eos_token_ids[0]
        first, second = self._model(self.model, torch.ones_like(ids))(ids)[:, 0]
        self.model.train(training)
        if torch.equal(first, second):
            raise ConfigError(
                "The model is causal: a later token does not change the logits of an earlier one, so it cannot fill in "
                "masks in any order. Take a model that attends both ways (a masked language model)."
            )

    def _model(self, model: Any, attention_mask: Tensor) -> Any:
        """Token ids (rows, prompt + answer) -> logits, with everything else of these rows fixed."""
        inputs = {"attention_mask": attention_mask}
        if "position_ids" in self._forward_names:  # a prompt is padded on the left, and places begin after that
            inputs["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)

        def logits(ids: Tensor) -> Tensor:
            with self.accelerator.autocast():
                found: Tensor = model(input_ids=ids, **inputs).logits
            return found

        return logits

    @property
    def _forward_names(self) -> Mapping[str, Any]:
        base = self.accelerator.unwrap_model(self.model)
        return inspect.signature(getattr(base, "get_base_model", lambda: base)().forward).parameters

    # ---- sampling

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, fields: Any, num_generations: int, *more: Any
    ) -> tuple[list[list[int]], None]:
        answers: list[list[int]] = []
        size = self.args.per_device_train_batch_size  # as many rows as the loss takes at once
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            torch.no_grad(),
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            for start in range(0, len(prompt_ids), size):
                answers += self.decoded(model, prompt_ids[start : start + size])
        return answers, None

    def decoded(self, model: Any, prompts: list[list[int]]) -> list[MaskedAnswer]:
        device, how = self.accelerator.device, self.decoding
        tensors = [torch.tensor(ids, device=device) for ids in prompts]
        ids = pad(tensors, padding_value=self.processing_class.pad_token_id, padding_side="left")
        seen = pad([torch.ones_like(t) for t in tensors], padding_value=0, padding_side="left")
        whole = pad_tensor(seen, (0, how.length), value=1)
        found = decode(self._model(model, whole), ids, how, int(self.mask_id), self.eos_token_ids)
        answers = []
        for tokens, steps in zip(found.answer.tolist(), found.unmasked_at.tolist(), strict=True):
            answers.append(MaskedAnswer(tokens))
            answers[-1].unmasked_at = steps
        return answers

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        made: tuple[Any, ...] = super()._generate(prompts)
        steps = []
        for tokens in made[1]:
            if not isinstance(tokens, MaskedAnswer) and len(tokens) > 1:  # one token fills the place of a row
                raise MethodError(
                    "A method gives a completion without the order in which its tokens were unmasked, so its states "
                    "cannot be rebuilt. Remove the method that plans given completions or prefixes."
                )
            when = getattr(tokens, "unmasked_at", [0] * len(tokens))
            steps.append(torch.tensor(when, dtype=torch.int16, device=self.accelerator.device))
        unmasked_at = torch.nn.utils.rnn.pad_sequence(steps, batch_first=True)
        hidden = None
        if self.args.logprobs_from == "one_step":
            width = max(len(ids) for ids in made[0])
            hidden = torch.rand(len(steps), width, device=unmasked_at.device) < self.args.prompt_masking
        self._states = States(unmasked_at, hidden)
        return made

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> HostBatch:
        try:
            out: HostBatch = super()._generate_and_score_completions(inputs)
            assert self._states is not None
            made, width = self._states, out["completion_ids"].size(1)
            states = self._padded(made, out["prompt_ids"].size(1), width)
        finally:
            self._states = None
        out = {**out, UNMASKED_AT: states.unmasked_at}
        if states.prompt_hidden is not None:
            out[PROMPT_HIDDEN] = states.prompt_hidden
        if self.args.step_weight == "equal":  # TRL multiplies everything with this mask: surrogate, KL and metrics
            weights = step_weights(made.unmasked_at, self.decoding.number_of_steps)
            out["tool_mask"] = pad_tensor(weights, (0, width - weights.size(1)))
        return out

    # ---- log-probs

    def compute_loss(self, model: Any, inputs: HostBatch, *args: Any, **kwargs: Any) -> Tensor:
        with self._in_states(inputs[UNMASKED_AT], inputs.get(PROMPT_HIDDEN)):
            loss: Tensor = super().compute_loss(model, inputs, *args, **kwargs)
        return loss

    @contextlib.contextmanager
    def _in_states(self, unmasked_at: Tensor, hidden: Tensor | None) -> Iterator[None]:
        self._states = States(unmasked_at, hidden)
        try:
            yield
        finally:
            self._states = None

    @staticmethod
    def _padded(states: States, prompt: int, answer: int) -> States:
        """Wide as TRL's batch: prompts are padded on the left, answers on the right."""
        unmasked_at, hidden = states
        unmasked_at = pad_tensor(unmasked_at, (0, answer - unmasked_at.size(1)))
        return States(unmasked_at, None if hidden is None else pad_tensor(hidden, (prompt - hidden.size(1), 0)))

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        unmasked_at: Tensor | None = None,
        prompt_hidden: Tensor | None = None,
        **other: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Log-probs and entropies (rows, tokens) of the answers, each in its state."""
        states = States(unmasked_at, prompt_hidden) if unmasked_at is not None else self._states
        assert states is not None, "log-probs of rows whose order of unmasking nobody gave"
        width = input_ids.size(1) - logits_to_keep
        states = self._padded(states, width, logits_to_keep)
        one_step = states.prompt_hidden is not None
        size = batch_size or len(input_ids)
        logprobs, entropies = [], []
        for start in range(0, len(input_ids), size):
            rows = slice(start, start + size)
            prompt, answer = input_ids[rows, :width], input_ids[rows, width:]
            steps = states.unmasked_at[rows]
            if states.prompt_hidden is not None:
                prompt, steps = prompt.masked_fill(states.prompt_hidden[rows], int(self.mask_id)), steps * 0
            found = trajectory_logprobs(
                self._model(model, attention_mask[rows]),
                prompt,
                answer,
                steps,
                1 if one_step else self.decoding.number_of_steps,
                int(self.mask_id),
                entropies=compute_entropy,
                recompute=self.args.recompute_states and torch.is_grad_enabled(),
                without_mask=True,
            )
            logprobs.append(found[0])
            entropies += [] if found[1] is None else [found[1]]
        return torch.cat(logprobs), torch.cat(entropies) if entropies else None, None


def _with_generation_config(model: Any) -> Any:
    """TRL writes token ids into the generation config, which a model that cannot `generate` has none of."""
    if getattr(model, "generation_config", None) is None:
        model.generation_config = GenerationConfig(eos_token_id=model.config.eos_token_id)
    return model


class MaskedGRPOTrainer(MethodsMixin, MaskedTrainer):
    """`trl.GRPOTrainer` of a masked diffusion language model, with methods. See `MaskedTrainer`."""

    def before_host(self, given: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
        inside = super().before_host(given)
        if isinstance(given.get("args"), MaskedGRPOConfig):
            given["args"].check_masked()
        return inside

    def capabilities_of(self, known: KnownRun) -> HostCapabilities:
        self.methods.problems += problems_of(self.methods)
        config = known.args
        assert isinstance(config, MaskedGRPOConfig)
        return masked_capabilities(super().capabilities_of(known), self.methods, config)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> HostBatch:
        out = super()._generate_and_score_completions(inputs)
        if self.args.step_weight == "equal":
            tokens = out["completion_mask"].bool()
            trained = (out["tool_mask"] > 0) & tokens
            if bool((trained.any(1) & (trained != tokens).any(1)).any()):
                raise MethodError(
                    "A method takes single tokens out of the loss, and with step_weight='equal' the weights are those "
                    "of whole answers. Set step_weight='tokens' (of the method `cj_grpo`, if it is named), or remove "
                    "the method."
                )
        return out

    def decoded(self, model: Any, prompts: list[list[int]]) -> list[MaskedAnswer]:
        if not (self._counts_costs and self.model.training):
            return super().decoded(model, prompts)
        with self.meter.busy():
            answers = super().decoded(model, prompts)
        costs.count(self.meter, sum(map(len, prompts)), sum(map(len, answers)))
        return answers


__all__ = ["MaskedGRPOTrainer", "MaskedTrainer"]
