"""Looks over the shoulder of a trainer with vLLM: what the engine was asked and answered, and whether it is true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins.trl.generation import batches


@dataclass
class Call:
    """One request to the engine. Of each completion the engine's log-probs, and the policy's own at that moment."""

    work: Any  # None without methods
    num_generations: int
    prompts: list[list[int]]
    completions: list[list[int]]
    logprobs: list[list[float]]
    policy: list[list[float]]


@dataclass
class Batch:
    """What TRL trains on: its tensors, the policy's own log-probs (rows, time) when it was made, and the decision of
    the methods, if there are any."""

    tensors: dict[str, Any]
    policy: Tensor
    decision: Any

    @property
    def mask(self) -> Tensor:
        return (self.tensors["completion_mask"] * self.tensors.get("tool_mask", 1)).bool()

    @property
    def error(self) -> Tensor:
        """(tokens,) |log-prob TRL holds for what was sampled - the policy's own|. It is small only if completions stand
        with their prompts, log-probs with their tokens, and the engine has the trainer's weights."""
        return (self.tensors["sampling_per_token_logps"] - self.policy)[self.mask].abs()


class Watch:
    """`Watch(trainer)` before training; then `calls` of the engine and `batches` that were made from them."""

    def __init__(self, trainer: Any) -> None:
        self.calls: list[Call] = []
        self.batches: list[Batch] = []
        generate, make_batch = trainer.vllm_generation.generate, trainer._generate_and_score_completions

        def watched_generate(prompts: Any, images: Any, num_generations: int, **kwargs: Any) -> Any:
            result = generate(prompts=prompts, images=images, num_generations=num_generations, **kwargs)
            completions = [list(c) for c in result[1]]
            self.calls.append(
                Call(
                    trainer.batch_phase,
                    num_generations,
                    prompts,
                    completions,
                    [[p[0] for p in row] for row in result[2]],
                    [policy_logprobs(trainer, p, c) for p, c in zip(prompts, completions, strict=True)],
                )
            )
            return result

        def watched_batch(inputs: Any) -> Any:
            decisions, decide = [None], batches.decide
            batches.decide = lambda *given: decisions.append(decide(*given)) or decisions[-1]  # type: ignore
            try:
                out = make_batch(inputs)
            finally:
                batches.decide = decide
            rows = zip(out["prompt_ids"], out["prompt_mask"], out["completion_ids"], strict=True)
            policy = [policy_logprobs(trainer, ids[mask > 0].tolist(), c.tolist()) for ids, mask, c in rows]
            self.batches.append(Batch(out, torch.tensor(policy), decisions[-1]))
            return out

        trainer.vllm_generation.generate = watched_generate
        trainer._generate_and_score_completions = watched_batch


def policy_logprobs(trainer: Any, prompt: list[int], completion: list[int]) -> list[float]:
    """Log-probs of one completion by a plain forward pass of the trainer's model, without padding before it."""
    with torch.no_grad():
        logits = trainer.model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    result: list[float] = (
        (logits / trainer.temperature).log_softmax(-1)[torch.arange(len(completion)), completion].tolist()
    )
    return result
