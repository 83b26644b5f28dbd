"""On-policy self-distillation (OPSD, arXiv 2601.18734): the policy that has seen the solution teaches itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_plugins import ConfigError, Method, Rollouts, Shape, Tokens, from_params, param, signals
from rl_plugins.core.errors import shown
from rl_plugins.kit.distillation import TeacherParams, taught, told

TEMPLATE = """Here is a reference solution to this problem:
=== Reference Solution Begin ===
{answer}
=== Reference Solution End ===
Make sure that you understand every step of it. Then answer in your own words."""


class Opsd(Method):
    """Lowers the reverse KL divergence to the policy itself, where that has read the solution.

    For a token y_t that the policy sampled for prompt x, whose dataset row has the solution s:

        A_t = w A + log pi_T(y_t | x, s, y_<t) - log pi_old(y_t | x, y_<t)

    with A the advantage that rewards make. The teacher pi_T reads the solution behind the problem (`template`); it is
    the policy at the start of the step, or the model that `teacher` names (the initial policy, say).

    Symbols: A, A_t (tokens,) float64.

    Special cases: a row without a solution (None or empty) keeps w A. A log-ratio beyond 20 nats counts as 20. A reward
    function must be there; one that returns 0 serves.

    Raises:
        ConfigError: `template` has no place for the solution.

    Source: arXiv 2601.18734; the sampled-token objective of the authors' `opsd_trainer.py`.
    """

    name = "opsd"
    fidelity = "code"
    does = "Lets the policy that has read the solution grade its own tokens"
    problems = ("too_hard", "no_signal")
    needs = from_params(
        lambda p: signals("tokens", "old_logprobs", "teacher_logprobs", columns=[p.prompt_column, p.answer_column])
    )
    teacher = from_params(lambda p: p.teacher)

    @dataclass(frozen=True)
    class Params(TeacherParams):
        prompt_column: str = param("prompt", "dataset column with the prompt")
        answer_column: str = param("answer", "dataset column with the solution, or what else only the teacher reads")
        template: str = param(TEMPLATE, "what follows the prompt; {answer} is the solution")

        def check(self) -> None:
            if "{answer}" not in self.template:
                raise ConfigError(f"`template` is {shown(self.template)}; it must have a place for {{answer}}.")

    def teacher_prompts(self, rollouts: Rollouts) -> list[Any]:
        p, meta = self.params, rollouts.meta
        rows = zip(meta[p.prompt_column], meta[p.answer_column], strict=True)
        return [
            told(prompt, p.template.replace("{answer}", str(answer))) if answer not in (None, "") else None
            for prompt, answer in rows
        ]

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        return taught(self, tokens)
