"""Rollouts of ADHint (arXiv 2512.13095): some of them begin with a part of a reference solution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal

from rl_plugins import ConfigError, Idle, Method, MethodError, Run, from_params, param, signals
from rl_plugins.core.errors import shown
from rl_plugins.core.requests import Generate, Program, Prompt, Score, Scored, Trajectory
from rl_plugins.kit.prompt_memory import SuccessParams
from rl_plugins.kit.texts import tokens_before
from rl_plugins.methods.adhint.hints import COLUMN


class AdhintRollouts(Method):
    """Begins some rollouts of a prompt with a hint: a part of a reference solution, the longer the harder it is.

    Reconstruction: the linear ratio with noise is from a note about the paper, the rest is ours (last look 2026-11-26:
    of v2 only the beginning is stored). Of n rollouts:

        n - m are sampled and scored, m = floor(hinted_share n);   D = 1 - share of successes among those with a reward
        w = clip((w_max - w_min) D + w_min + xi, 0, w_max),   xi ~ normal(0, sigma), a draw per hinted rollout
        hint = the first floor(w L) tokens of the reference,   L its tokens;   the rest is sampled

    A hint ends before the answer of `answer_column` begins in the reference. Its tokens are trained; with `hint_loss:
    false` only read. Symbols: column `adhint` of a row: first token of its hint, and the position after the last one.

    Special cases: with D = 0, without a reward, and for an empty reference or hint the rollout has no hint. At least
    one token is left for the policy. A prefix of the plan stands before the hint. Evaluation has no hints.

    Raises:
        ConfigError, MethodError: w_min above w_max; no such column; a reference that is neither text nor token ids.

    Source: arXiv 2512.13095, abstract; the ratio as a third party reports it."""

    name = "adhint_rollouts"
    fidelity = "reconstruction"
    does = "Begins rollouts of hard prompts with a part of a reference solution, long where the prompt is hard"
    problems = ("too_hard", "no_signal", "exploration")
    needs = from_params(
        lambda p: signals(f"column:{COLUMN}", f"column:{p.reference_column}", columns=[p.answer_column])
    )
    brings = from_params(lambda p: signals(columns=[COLUMN], forced_tokens=p.hint_loss))
    idle = (Idle({"hinted": 0}, "no rollout had a hint. Look at adhint_rollouts/difficulty and /missing."),)

    @dataclass(frozen=True)
    class Params(SuccessParams):
        reference_column: str = param("reference", "dataset column of the reference solution, a text or token ids")
        answer_column: str = param("", "dataset column of the answer that no hint may contain; empty: not looked for")
        hinted_share: float = param(0.5, "share of a prompt's rollouts that may have a hint", ge=0, lt=1)
        w_min: float = param(0.1, "smallest hint ratio of a prompt that is not solved each time", ge=0, lt=1)
        w_max: float = param(0.7, "largest hint ratio", ge=0, lt=1)
        sigma: float = param(0.05, "standard deviation of the noise on the ratio", ge=0)
        noise_per: Literal["rollout", "prompt"] = param("rollout", "unit that has a draw of the noise of its own")
        hint_loss: bool = param(True, "training of the hint's tokens; false: they are only read")

        def check(self) -> None:
            if self.w_min > self.w_max:
                raise ConfigError(f"`w_min` is {self.w_min} and `w_max` {self.w_max}. Give w_min at most w_max.")

    def check(self, run: Run) -> None:
        p = self.params
        if p.hinted_share and not int(p.hinted_share * run.group_size + 1e-9):
            raise ConfigError(
                f"`hinted_share` is {p.hinted_share:g}, which is no whole rollout of the {run.group_size} of a prompt, "
                f"so none ever has a hint. Raise it to {1 / run.group_size:.3g} or more, or raise the group size."
            )
        for name in filter(None, (p.reference_column, p.answer_column)):
            if run.columns and name not in run.columns:
                option = "reference_column" if name == p.reference_column else "answer_column"
                raise ConfigError(
                    f"`{option}` is {name!r}, and the dataset has no such column (it has: "
                    f"{', '.join(sorted(run.columns))}). Set method_params.adhint_rollouts.{option} to one of them."
                )

    def rollout(self, prompt: Prompt) -> Program:
        p = self.params
        many = int(p.hinted_share * prompt.n + 1e-9) if prompt.training else 0
        naive: list[Trajectory] = yield from self._naive(prompt, prompt.n - many)
        if not many:
            return naive
        scores: list[Scored] = yield [Score(row) for row in naive]
        naive = [row.scored(s) for row, s in zip(naive, scores, strict=True)]
        hints = self._hints(prompt, self._difficulty(scores), many)
        begun = [self._begun(prompt, hint) for hint in hints]
        made = yield [Generate(row) for row in begun]
        self.log("hinted", sum(map(bool, hints)) / prompt.n)
        return naive + [row.add(g) for row, (g,) in zip(begun, made, strict=True)]

    def _naive(self, prompt: Prompt, n: int) -> Any:
        made = (yield Generate(prompt.start(), n=n)) if n else []
        return [prompt.start().add(g).noted(**{COLUMN: [0, 0]}) for g in made]

    def _begun(self, prompt: Prompt, hint: Sequence[int]) -> Trajectory:
        start = prompt.start()
        if not hint:
            return start.noted(**{COLUMN: [0, 0]})
        row = start.force(hint) if self.params.hint_loss else start.observe(hint)
        return row.noted(**{COLUMN: [len(start), len(row)]})

    def _difficulty(self, scores: Sequence[Scored]) -> float:
        """1 - share of successes; 0 if no rollout has a reward, so that nobody has a hint."""
        known = [s.reward >= self.params.success_threshold for s in scores if s.reward == s.reward]
        difficulty = 1 - sum(known) / len(known) if known else 0.0
        self.log("difficulty", difficulty, weight=float(bool(known)))
        return difficulty

    def _hints(self, prompt: Prompt, difficulty: float, n: int) -> list[tuple[int, ...]]:
        """The tokens of n hints."""
        p = self.params
        reference = _tokens_of(prompt, p.reference_column)
        self.log("missing", float(not reference), "sum")
        if not reference or difficulty <= 0:
            return [()] * n
        safe, room = self._before_answer(prompt, reference), max(0, prompt.room(prompt.start()) - 1)
        hints = []
        for i in range(n):
            xi = prompt.rng("hint", i if p.noise_per == "rollout" else 0).normal(0.0, p.sigma) if p.sigma else 0.0
            ratio = hint_ratio(difficulty, p.w_min, p.w_max, float(xi))
            wanted = min(int(ratio * len(reference) + 1e-9), room)
            hints.append(reference[: min(wanted, safe)])
            self.log("ratio", ratio)
            self.log("cut", float(wanted > safe))
            self.log("hint_tokens", len(hints[-1]))
        return hints

    def _before_answer(self, prompt: Prompt, reference: Sequence[int]) -> int:
        """The tokens of the reference before its answer; all of them if no answer is in it or none is looked for."""
        column = self.params.answer_column
        answer = prompt.columns.get(column) if column else None
        text = "" if answer is None else str(answer).strip()
        at = prompt.chat.decode(reference).find(text) if text else -1
        return len(reference) if at < 0 else tokens_before(reference, prompt.chat.decode, at)


def hint_ratio(difficulty: float, w_min: float, w_max: float, noise: float) -> float:
    """w = (w_max - w_min) D + w_min + noise, from 0 to w_max; 0 for a prompt without difficulty."""
    if not difficulty > 0:
        return 0.0
    return min(max((w_max - w_min) * difficulty + w_min + noise, 0.0), w_max)


def _tokens_of(prompt: Prompt, column: str) -> tuple[int, ...]:
    """The reference solution as token ids."""
    value = prompt.columns.get(column)
    if value is None:
        return ()
    if isinstance(value, str):
        return prompt.chat.encode(value)
    try:
        return tuple(map(index, value))
    except TypeError:
        raise MethodError(
            f"The reference of a prompt is {shown(value, 80)}. It must be a text or a list of token ids. Change column "
            f"`{column}` of the dataset, or set method_params.adhint_rollouts.reference_column."
        ) from None
