"""Rubrics as rewards (arXiv 2507.17746): a judge answers a list of weighted criteria about every rollout."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rl_plugins import GIVEN, ConfigError, Idle, Method, Rollouts, Run, from_params, param, signals
from rl_plugins.core.errors import shown
from rl_plugins.kit.judges import JudgeParams, make_judge
from rl_plugins.kit.services import Endpoint, Failure, Service, number, prompt_text

TEMPLATE = """Judge whether the response meets the criterion: 1 if it does, 0 if not, between them if in part.\n
[Prompt] {prompt}\n[Response] {completion}\n[Criterion] {criterion}"""


class Rubric(Method):
    """Replaces the reward by the weighted share of criteria that a judge finds met.

    For a rollout o of prompt q with criteria d_1 .. d_J of weights w_j (the run's, or those of the prompt's row):

        c_j = judge(q, d_j, o) in [0, 1]
        r   = sum_j w_j c_j / sum_j max(w_j, 0)

    A criterion is a text that begins with its weight: "3: states the dose". One of negative weight is a pitfall:
    meeting it lowers the reward, which may fall below 0.

    Symbols: r (rows,) float64, in place of the run's rewards. The judge gets three texts and returns a number; an
    endpoint is asked for a JSON object with the number `score`.

    Special cases: if one question about a rollout fails after all retries, its reward is NaN. A row without a reward
    (NaN) is not judged, so a dummy reward function must return 0. Equal questions are asked once, and answers are kept
    over batches. A rollout of several rows (turns) is judged once, by the texts of all of them. Evaluation is never
    judged.

    Raises:
        ConfigError: no judge or two, no criteria or two sources of them, a criterion without a weight, none above 0.

    Source: arXiv 2507.17746, equation 1 (explicit aggregation).
    """

    name = "rubric"
    fidelity = "paper"
    does = "Replaces the reward by a judge's answers to weighted criteria"
    problems = ("no_verifier",)
    needs = from_params(lambda p: signals("text", columns=[p.prompt_column, p.criteria_column]))
    idle = (Idle({"judge_failed": 1}, "the judge answers nothing that can be read. Ask it about one rollout by hand."),)

    @dataclass(frozen=True)
    class Params(JudgeParams):
        asked: ClassVar[tuple[str, ...]] = ("prompt", "criterion", "completion")
        example_judge: ClassVar[str] = "rl_plugins.lab.demo.judges:meets"
        judge_template: str = param(TEMPLATE, "message to the endpoint", only_if={"judge_url": GIVEN})
        criteria: tuple[str, ...] = param((), "texts that begin with their weight, for all prompts: '3: polite'")
        criteria_column: str | None = param(None, "dataset column with a list of such texts, instead of `criteria`")
        prompt_column: str = param("prompt", "dataset column with the prompt")

        def check(self) -> None:
            super().check()
            if bool(self.criteria) == bool(self.criteria_column):
                raise ConfigError("Exactly one of `criteria` and `criteria_column` must be given.")
            weighted(self.criteria or ("1: any",))

    def start(self, run: Run) -> None:
        p, endpoint = self.params, None
        if p.judge is None:
            endpoint = Endpoint(p.judge_url, p.judge_model, p.judge_template, reply="json", **p.endpoint_options)
        self._judge: Service = make_judge(p, endpoint, number(0, 1))

    def rewards(self, rollouts: Rollouts) -> Tensor:
        p, text, meta = self.params, rollouts.text or (), rollouts.meta
        members = rollouts.per_rollout.members(rollouts, ~torch.isnan(rollouts.reward)).values()
        judged = [(rows, weighted(p.criteria or meta[p.criteria_column][rows[-1]])) for g in members for rows in g]
        questions = [
            (prompt_text(meta[p.prompt_column][rows[-1]]), criterion, "\n\n".join(text[i] for i in rows))
            for rows, rubric in judged
            for _, criterion in rubric
        ]
        given = self._judge.ask(questions, strict=False)
        met = iter([torch.nan if isinstance(c, Failure) else c for c in given])
        reward = torch.full((len(rollouts),), torch.nan, dtype=torch.float64)
        for rows, rubric in judged:
            reward[rows] = sum(w * next(met) for w, _ in rubric) / sum(max(w, 0.0) for w, _ in rubric)
        self.log("judge_failed", sum(isinstance(c, Failure) for c in given) / max(1, len(given)), weight=len(given))
        self.log("questions", len(given), "sum")
        return reward


def weighted(rubric: tuple[str, ...]) -> list[tuple[float, str]]:
    """Weights and criteria of texts like "3: states the dose".

    Raises:
        ConfigError: a text begins with no weight, or no weight is above 0.
    """
    found = [re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*:(.*)", str(text), re.DOTALL) for text in rubric]
    pairs = [(float(m[1]), m[2].strip()) for m in found if m]
    if len(pairs) < len(found) or not any(weight > 0 for weight, _ in pairs):
        raise ConfigError(f"The criteria {shown(rubric)} need a weight each ('3: polite'), one of them above 0.")
    return pairs
