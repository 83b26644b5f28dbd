"""FAPO (arXiv 2510.22543): a judge reads right rollouts, and those with a wrong step lose a part of their reward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import ConfigError, Idle, Method, Rollouts, Run, from_params, param, signals
from rl_plugins.kit.prompt_memory import SuccessParams
from rl_plugins.kit.services import Failure, NotAsked, Service, failures, prompt_text
from rl_plugins.methods.fapo.judge import FlawParams, is_flaw


class Fapo(Method):
    """Flawed-aware policy optimization: right rollouts with a wrong step lose `penalty` of their reward.

    For every rollout o of prompt q whose reward r is at least success_threshold, with the reference answer a*:

        e = judge(q, a*, o)                     index of the first wrong step, -1: none
        R = r - lambda h [e was read and e != -1]
        h = (reward_high - reward_low) / 2      half the distance of right and wrong; 1 for rewards of -1 and +1

    All other rewards and all advantages stay those of the host or of other methods. At lambda = 1 a flawed rollout is
    reinforced while wrong rollouts outnumber the flawless ones of its group, and suppressed afterwards.

    Symbols: rewards (rows,) float64 of the run after earlier `rewards` hooks; lambda = `penalty`. The judge gets three
    texts and returns a whole number, or a text. Of a text the last 300 characters are read: int() of the content of the
    last \\boxed{}, which is never evaluated.

    Special cases: a judge that raises, hangs, or answers without a readable index finds no flaw (the paper fails
    open); a batch without any answer is a warning. Wrong rollouts and evaluation are never judged. NaN rewards stay
    NaN. A rollout of several rows is right by the mean of their rewards, is judged once by the texts of all of them,
    and all of them lose. Equal questions are asked once. Metrics of the reward functions stay those of the rule.

    Raises:
        ConfigError: no judge or two, a parameter without effect.

    Source: arXiv 2510.22543; `fapo/reward_fn_reasoning.py` of verl-recipe, whose function the golden cases are from.
    """

    name = "fapo"
    fidelity = "code"
    does = "Lowers the reward of right rollouts if a judge finds a wrong step in them"
    problems = ("weak_reward",)
    needs = from_params(lambda p: signals("text", columns=(p.prompt_column, p.answer_column)))
    idle = (
        Idle({"right": 0}, "no rollout counts as right, so nothing is judged. Lower `success_threshold`."),
        Idle({"flawed": 0}, "the judge finds no flaw, so no reward changes. Look at some of its replies."),
        Idle({"judge_failed": 1}, "the judge answers nothing that can be read. Ask it about one rollout by hand."),
    )

    @dataclass(frozen=True)
    class Params(FlawParams, SuccessParams):
        reward_low: float = param(0.0, "reward of a wrong rollout (paper: -1)")
        reward_high: float = param(1.0, "reward of a right rollout (paper: 1)")
        prompt_column: str = param("prompt", "dataset column with the prompt")
        answer_column: str | None = param("answer", "dataset column with the reference answer; none: no text")

        def check(self) -> None:
            super().check()
            if self.reward_low >= self.reward_high:
                raise ConfigError(
                    f"`reward_low` is {self.reward_low:g} and `reward_high` {self.reward_high:g}; the first must be "
                    f"lower. They are the rewards of a wrong and of a right rollout."
                )

    _judge: Service

    def check(self, run: Run) -> None:
        _ = self.params.endpoint

    def start(self, run: Run) -> None:
        self._judge = self.params.service()

    def rewards(self, rollouts: Rollouts) -> Tensor:
        """R of every row."""
        p, once = self.params, rollouts.per_rollout
        half = (p.reward_high - p.reward_low) / 2
        right = p.successes(once.reward) == 1
        scored = ~torch.isnan(once.reward)
        if bool(scored.any()):
            self.log("right", right[scored].double().mean(), weight=int(scored.sum()))
        known = once.reward[scored]
        if bool(((known < p.reward_low - half) | (known > p.reward_high + half)).any()):
            self.warn(
                f"rewards lie between {float(known.min()):g} and {float(known.max()):g}, but `reward_low` is "
                f"{p.reward_low:g} and `reward_high` {p.reward_high:g}. Set them to the rewards of a wrong and of a "
                f"right rollout, because the penalty is measured by their distance."
            )
        members = once.members(rollouts, once.rows.rows(right))
        judged = [rows for of_group in members.values() for rows in of_group]
        verdicts = self._judge.ask([self._question(rollouts, rows) for rows in judged], strict=False)
        self._report(verdicts)
        flaws = [row for rows, verdict in zip(judged, verdicts, strict=True) if is_flaw(verdict) for row in rows]
        flawed = torch.zeros(len(rollouts), dtype=torch.bool)
        flawed[flaws] = True
        if self.traced:
            for rows, verdict in zip(judged, verdicts, strict=True):
                if isinstance(verdict, Failure):
                    self.note(rows, "the judge failed")
                elif verdict is not None:
                    self.note(rows, "wrong step {step}" if is_flaw(verdict) else "no wrong step", step=verdict)
        return torch.where(flawed, rollouts.reward - p.penalty * half, rollouts.reward)

    def _question(self, rollouts: Rollouts, rows: list[int]) -> tuple[str, str, str]:
        """Prompt, reference answer, and the texts of a rollout's rows in their order."""
        p, last = self.params, rows[-1]
        assert rollouts.text is not None  # it is in `needs`
        answer = rollouts.meta[p.answer_column][last] if p.answer_column else ""
        text = "\n\n".join(rollouts.text[row] for row in rows)
        return prompt_text(rollouts.meta[p.prompt_column][last]), str(answer), text

    def _report(self, verdicts: list[int | Failure | None]) -> None:
        """Logs what the judge said, and warns of what failed."""
        failed, unreadable = failures(verdicts), verdicts.count(None)
        answered = [v for v in verdicts if v is not None and not isinstance(v, Failure)]
        asked = len(verdicts) - sum(isinstance(v, NotAsked) for v in verdicts)
        self.log("judged", asked, "sum")
        if answered:
            self.log("flawed", sum(map(is_flaw, answered)) / len(answered), weight=len(answered))
        if asked:
            self.log("judge_failed", (len(failed) + unreadable) / asked, weight=asked)
        why = f" Its first error: {failed[0].error.rstrip('.')}." if failed else ""
        if verdicts and not answered:
            self.warn(
                f"the judge gave no answer about any right rollout of a batch, so none lost anything.{why} Check that "
                f"the judge works by itself. If it is only slow, raise `judge_timeout`."
            )
        elif failed or asked < len(verdicts):
            self.warn(f"the judge failed on some right rollouts, which keep their reward.{why}")
        if unreadable:
            self.warn(
                "some replies of the judge hold no whole number in \\boxed{} in their last 300 characters. Their "
                "rollouts keep their reward. Watch fapo/judge_failed."
            )
