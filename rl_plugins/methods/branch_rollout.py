"""Trees of samples: the rollouts of BranchGRPO (arXiv 2509.06040) for diffusion policies."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from rl_plugins import ConfigError, Idle, Method, MethodParams, Program, Prompt, Run, param
from rl_plugins.core.denoising import Denoise, Sample, SamplePrompt
from rl_plugins.core.params import GIVEN
from rl_plugins.methods.branch_grpo.trees import COLUMN, note, shares


class BranchRollout(Method):
    """Samples the rollouts of a prompt as a tree: denoising splits at some steps, and samples share what is before.

        begin with the n rollouts in one branch; at step t = 0 .. T - 1 every branch moves with a noise of its own; at a
        split, one of r rollouts gets min(K, r) children of about r / K each (at the last split r), and child b has
            xi_b = (xi_0 + s eta_b) / sqrt(1 + s^2)        xi_0 shared by siblings; xi_0, eta_b ~ N(0, 1)

    xi_b ~ N(0, 1), so each leaf is distributed like the end of an ordinary chain. With `window` W, noise is added where
    t - stride floor(t / stride) < W and in splits; other steps are deterministic and not trained. `code_compat: true`
    moves children with independent noise times s, as the authors' code, so samples are not those of the policy.

    Symbols: splits count steps from 0. A node is one transition, of the depth of its step + 1. Column `branches` of a
    row: the nodes on its way (`rl_plugins.methods.branch_grpo.trees`).

    Special cases: splits beyond the last step are at the last step, and equal ones are one split. `splits: none` takes
    `rounds` splits, at the steps i floor(T / rounds). Evaluation makes independent samples.

    Raises:
        ConfigError: no `splits`; `window` not below `stride`; a language model; too few samples per prompt.

    Source: arXiv 2509.06040; `run_tree_sample_step` in `fastvideo/train_branchgrpo_flux.py` of the authors' code.
    """

    name = "branch_rollout"
    fidelity = "paper"
    does = "Splits denoising at some steps, so that the samples of a prompt form a tree"
    problems = ("few_rollouts",)
    hosts = ("diffusion",)
    needs = frozenset({"several_rollouts", f"column:{COLUMN}"})
    brings = frozenset({f"column:{COLUMN}"})
    idle = (Idle({"saved": 0}, "no pass was shared. Splits at step 0 alone give independent samples."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        splits: tuple[int, ...] | None = param(
            (0, 3, 6, 9), "B, steps that split, from 0; none: `rounds` even ones", ge=0
        )
        rounds: int = param(4, "number of splits at even distances from step 0 on", ge=1, only_if={"splits": None})
        children: int = param(2, "K, number of children at a split", ge=2)
        s: float = param(4.0, "s, part of a child's own noise against that of all siblings", ge=0)
        code_compat: bool = param(False, "noise of children as in the authors' code: independent, times s")
        window: int | None = param(None, "W, first steps of every stride that have noise; none: all steps", ge=1)
        stride: int = param(30, "number of steps from one window to the next", ge=2, only_if={"window": GIVEN})

        def check(self) -> None:
            if self.splits == ():
                raise ConfigError("`splits` is empty. Give the steps at which samples split, for example (0, 3, 6, 9).")
            if self.window is not None and self.window >= self.stride:
                raise ConfigError(
                    f"`window` is {self.window} and `stride` {self.stride}, so every step would have noise. Give a "
                    f"window below the stride, or remove `window`."
                )

    def check(self, run: Run) -> None:
        if run.host != "diffusion":
            raise ConfigError(
                f"`branch_rollout` makes samples of a diffusion policy, and {run.host} trains language models. Take "
                f"`branch_text_rollout` with `branch_advantages` and `branch_pruning` there."
            )
        p = self.params
        count = p.rounds if p.splits is None else len(set(p.splits))
        if run.group_size > p.children**count:
            raise ConfigError(
                f"{count} splits into {p.children} children make {p.children**count} samples, and the run has "
                f"{run.group_size} of a prompt. Give more `splits` or `children`, or fewer samples per prompt."
            )

    def rollout(self, prompt: Prompt) -> Program:
        asked = cast(SamplePrompt, prompt)
        if not asked.training:
            made = yield [Denoise(asked.start(seed)) for seed in asked.seeds(asked.n)]
            return [sample for (sample,) in made]  # type: ignore[misc]
        p, total = self.params, asked.steps
        splits = sorted(set(split_steps(total, p.splits, p.rounds)))
        noisy = noisy_steps(total, splits, p.window, p.stride)
        (seed,) = asked.seeds(1)
        numbers = itertools.count(1)
        open_ = [_Branch(asked.start(seed), asked.n, (0,))]
        passes = 0
        if splits[0]:
            (root,) = yield Denoise(open_[0].sample, steps=splits[0], stochastic=noisy[: splits[0]])
            open_, passes = [open_[0].grown(root, numbers)], splits[0]
        for step, until in itertools.pairwise([*splits, total]):
            widths = [b.rollouts if until == total else min(p.children, b.rollouts) for b in open_]
            asked_for = [
                self._split(b.sample, until - step, k, noisy[step:until]) for b, k in zip(open_, widths, strict=True)
            ]
            passes += sum(1 + k * (until - step - 1) for k in widths)
            answers: list[list[Sample]] = yield asked_for
            open_ = [
                _Branch(child, share, b.nodes).grown(child, numbers)
                for b, made in zip(open_, answers, strict=True)
                for child, share in zip(made, shares(b.rollouts, len(made)), strict=True)
            ]
        self.log("leaves", len(open_))
        self.log("passes", passes / len(open_))
        self.log("saved", 1 - passes / (len(open_) * total))
        self.log("trained", sum(noisy) / total)
        stops = range(total + 1)
        return [b.sample.noted(**{COLUMN: note(b.nodes, stops)}) for b in open_]  # type: ignore[misc]

    def _split(self, sample: Sample, steps: int, children: int, noisy: tuple[bool, ...]) -> Denoise:
        p = self.params
        if children == 1:
            return Denoise(sample, steps=steps, stochastic=noisy)
        if p.code_compat:
            return Denoise(sample, steps=steps, n=children, noise_scale=p.s, stochastic=noisy)
        return Denoise(sample, steps=steps, n=children, shared_noise=p.s, stochastic=noisy)


@dataclass(frozen=True)
class _Branch:
    """A sample in the making, how many rollouts it stands for, and the nodes on its way."""

    sample: Sample
    rollouts: int
    nodes: tuple[int, ...]

    def grown(self, sample: Sample, numbers: itertools.count[int]) -> _Branch:
        """With a node for every new transition."""
        new = sample.steps + 1 - len(self.nodes)
        return _Branch(sample, self.rollouts, (*self.nodes, *itertools.islice(numbers, new)))


def split_steps(total: int, splits: Sequence[int] | None, rounds: int) -> list[int]:
    """The steps at which samples of `total` steps split, ascending; equal ones stay."""
    given = [i * (total // rounds) for i in range(rounds)] if splits is None else splits
    return sorted(min(max(step, 0), total - 1) for step in given)


def noisy_steps(total: int, splits: Sequence[int], window: int | None, stride: int) -> tuple[bool, ...]:
    """(total,) whether noise is added in each step."""
    return tuple(window is None or step % stride < window or step in splits for step in range(total))
