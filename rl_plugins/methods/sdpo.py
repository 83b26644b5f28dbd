"""Self-distillation policy optimization (SDPO, arXiv 2601.20802): the policy that has read feedback teaches itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rl_plugins import Method, Rollouts, Shape, Tokens, from_params, param, signals
from rl_plugins.kit.distillation import TeacherParams, taught, told

SOLUTION, FEEDBACK = (
    "Correct solution:\n\n{}\n",
    "The following is feedback from your unsuccessful earlier attempt:\n\n{}\n",
)
END = "\nCorrectly solve the original question."


class Sdpo(Method):
    """Lowers the reverse KL divergence to the policy itself, where that has read a right answer or feedback.

    For a token y_t of rollout y for prompt x, with the first other rollout y* of its group whose reward is at least
    `success`, and what the environment said of y, its feedback f:

        A_t = w A + log pi_T(y_t | x, y*, f, y_<t) - log pi_old(y_t | x, y_<t)

    with A the advantage that rewards make. The teacher pi_T is the policy at the start of the step, or the model that
    `teacher` names.

    Symbols: A, A_t (tokens,) float64. A rollout of several rows (turns) is shown as the texts of all of them.

    Special cases: a rollout with neither y* nor f keeps w A. Right rollouts are taught, too, by another right one. NaN
    rewards are no success. A log-ratio beyond 20 nats counts as 20.

    Source: arXiv 2601.20802; `compute_self_distillation_loss` of the authors' code without logits (reverse KL).
    """

    name = "sdpo"
    fidelity = "code"
    does = "Lets the policy that has read feedback or a right answer grade its own tokens"
    problems = ("no_signal", "agents")
    needs = from_params(
        lambda p: signals(
            *("tokens", "old_logprobs", "teacher_logprobs", "text", "several_rollouts"),
            columns=[p.prompt_column, p.feedback_column],
        )
    )
    teacher = from_params(lambda p: p.teacher)

    @dataclass(frozen=True)
    class Params(TeacherParams):
        success: float = param(1.0, "reward from which on a rollout is shown as a right answer")
        prompt_column: str = param("prompt", "dataset column with the prompt")
        feedback_column: str | None = param(None, "column with feedback on a rollout, which its environment notes")

    def teacher_prompts(self, rollouts: Rollouts) -> list[Any]:
        p, text, meta = self.params, rollouts.text or (), rollouts.meta
        feedback = meta[p.feedback_column] if p.feedback_column else [None] * len(rollouts)
        found: list[Any] = [None] * len(rollouts)
        each = rollouts.per_rollout
        right = (each.reward >= p.success)[each.rows.index].tolist()
        for group in each.members(rollouts, torch.ones(len(rollouts), dtype=torch.bool)).values():
            whole = ["\n\n".join(text[i] for i in rows) for rows in group]
            shown = [k for k, rows in enumerate(group) if right[rows[0]]]
            for k, rows in enumerate(group):
                said = [SOLUTION.format(whole[j]) for j in shown if j != k][:1]
                said += [FEEDBACK.format(feedback[rows[-1]])] if feedback[rows[-1]] else []
                for i in rows if said else ():
                    found[i] = told(meta[p.prompt_column][i], "\n".join([*said, END]))
        return found

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        return taught(self, tokens)
