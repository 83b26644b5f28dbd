"""A masked language model that can be enumerated: answers of 4 tokens, decoded by the package's own `decode`.

A state is an answer with masks, and has logits of its own for each place. The value of a prompt is a sum over all
choices of tokens in all steps. Its gradient holds where no two places are equally confident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_plugins.kit.masked import Decoding, MaskedOptions, decode, state_at, step_weights
from rl_plugins.tools.gradient_quality import Answers, ExactWorld, targets_of

Array = NDArray[Any]
LENGTH, END, MASK = 4, 2, 3  # tokens 0 and 1 are letters
BASE = (MASK + 1) ** torch.arange(LENGTH)
EVERY = torch.tensor(list(product(range(MASK + 1), repeat=LENGTH))).flip(
    1
)  # (states, places): the number is EVERY @ BASE
CHOICES = torch.tensor(list(product(range(MASK), repeat=LENGTH)))


def values(logits: Tensor, right: Tensor, how: Decoding) -> Tensor:
    """(prompts,) chance of a right answer, with its gradient.

    Args:
        logits: (prompts, states, places, tokens). right: (prompts, states) of whole answers.
    """
    value, left, prob = right, 0, logits.softmax(-1)
    for step, in_block, end, count in reversed(list(how.plan())):
        left += count
        states = ((EVERY == MASK).sum(1) == left).nonzero()[:, 0]
        free = EVERY[states] == MASK
        told = torch.nn.functional.one_hot(EVERY[states].clamp(max=END), MASK).double()
        chance = torch.where(free[..., None], prob[:, states], told)[:, :, torch.arange(LENGTH), CHOICES]
        confidence = chance.detach() * torch.where(CHOICES == END, how.end_factor(step, in_block), 1.0)
        confidence = confidence.masked_fill(~(free & (torch.arange(LENGTH) < end))[:, None], -1.0)
        best = torch.zeros_like(confidence, dtype=torch.bool).scatter(-1, confidence.topk(count).indices, True)
        after = (torch.where(best, CHOICES, EVERY[states][:, None]) * BASE).sum(-1)
        found = (chance.prod(-1) * value.gather(1, after.flatten(1)).reshape(after.shape)).sum(-1)
        value = torch.zeros_like(value).index_copy(1, states, found)
    return value[:, -1]  # the state of masks alone


@dataclass
class Masked(ExactWorld):
    """An `ExactWorld` of masked answers.

    Args:
        offset: (prompts, states, places, tokens) logits. features: with a dimension more.
        wanted: (prompts, 2) right letters of the first two places.
        options: how answers are decoded, and in which states their log-probs are taken.
    """

    offset: Array
    features: Array
    wanted: Array
    options: MaskedOptions = field(default_factory=MaskedOptions)
    name: str = "masked"
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    reward_names: Sequence[str] = ("reward",)
    reward_weights: Sequence[float] = (1.0,)
    max_length: int = LENGTH
    old: str = "trained"

    def __post_init__(self) -> None:
        self.how = self.options.decoding(LENGTH, 1.0)
        logits = torch.from_numpy(self.offset).requires_grad_()
        right = (EVERY[:, :2] == torch.from_numpy(self.wanted)[:, None]).all(-1).double()
        value = values(logits, right, self.how)
        (slope,) = torch.autograd.grad(value.sum(), logits)
        self.slope, self.pass_rate = slope.numpy(), value.detach().numpy()
        logprobs = logits.detach().log_softmax(-1)
        self.logprobs, prob = logprobs.numpy(), logprobs.exp().numpy()
        mean = np.einsum("pslt,psltd->psld", prob, self.features)
        self.scores = (self.features - mean[:, :, :, None]).reshape(-1, self.features.shape[-1])
        self.entropies = np.repeat(-(prob * self.logprobs).sum(-1).ravel(), MASK)
        self.sum_squared_probs = np.repeat((prob**2).sum(-1).ravel(), MASK)

    @cached_property
    def targets(self) -> Mapping[str, Array]:  # type: ignore[override]  # made once
        """The mean reward, which is pass@1, and those of `targets_of`."""
        prompts, dims = len(self.offset), self.features.shape[-1]
        of_pass = np.einsum("pn,pnd->pd", self.slope.reshape(prompts, -1), self.features.reshape(prompts, -1, dims))
        return targets_of(self.pass_rate, of_pass, {"reward": of_pass.mean(0)})

    def draw(self, prompt: Array, group: Array, rng: np.random.Generator) -> Answers:
        rows, steps = torch.from_numpy(prompt)[:, None], self.how.number_of_steps
        logits = torch.nn.functional.pad(torch.from_numpy(self.offset), (0, 1), value=-torch.inf)

        def model(ids: Tensor) -> Tensor:
            made = logits[ids[:, 0], ids[:, 1:] @ BASE]
            return torch.cat([torch.zeros_like(made[:, :1]), made], dim=1)

        stream = torch.Generator().manual_seed(int(rng.integers(2**62)))
        answer, when = decode(model, rows, self.how, MASK, END, stream)
        state = torch.full_like(answer, len(EVERY) - 1)
        if self.options.logprobs_from == "trajectory":
            before = torch.stack([state_at(answer, when, step, MASK) @ BASE for step in range(steps)], dim=1)
            state = before.gather(1, when)
        piece = ((rows * len(EVERY) + state) * LENGTH + torch.arange(LENGTH)) * MASK + answer
        logprobs = self.logprobs.ravel()[piece.numpy()]
        right = (answer[:, :2] == torch.from_numpy(self.wanted)[prompt]).all(1)
        return Answers(
            piece=piece.numpy(),
            mask=np.ones(piece.shape, bool),
            length=np.full(len(prompt), LENGTH),
            rewards=right.double().numpy()[:, None],
            logprobs=logprobs,
            sampled=logprobs,
            weight=step_weights(when, steps).numpy() if self.options.step_weight == "equal" else None,
        )

    def texts(self, prompt: Array, answers: Answers) -> list[str]:
        return ["".join("ab."[t] for t in row).split(".")[0] for row in (answers.piece % MASK).tolist()]


def masked(seed: int, prompts: int = 128, dims: int = 16) -> Masked:
    """Two places decide, ends are likely while much is masked, and good choices share what a skill teaches."""
    rng = np.random.default_rng([seed, 4])
    prompts = min(prompts, 128)  # each has 3,072 choices of a token
    shape = (prompts, len(EVERY), LENGTH, MASK)
    wanted = rng.integers(2, size=(prompts, 2))
    offset = rng.normal(size=shape) * 0.7
    for place in (0, 1):
        offset[:, :, place] += rng.normal(0.5, 1.2, (prompts, 1, 1)) * (np.arange(MASK) == wanted[:, None, [place]])
    offset[..., END] += (EVERY == MASK).sum(1).numpy()[:, None] / 4
    slope = Masked(offset, np.zeros((*shape, 1)), wanted).slope
    good = slope / np.abs(slope).max((1, 2, 3), keepdims=True)
    skills = rng.normal(size=(6, dims))
    shared = 0.25 * skills[rng.integers(6, size=prompts)] + 0.25 * skills.mean(0)
    noise = rng.standard_normal((*shape, dims), dtype=np.float32)
    features = (noise + good[..., None] * shared[:, None, None, None]) / np.sqrt(dims)
    return Masked(offset, features.astype(np.float32), wanted)
