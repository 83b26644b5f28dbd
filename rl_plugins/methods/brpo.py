"""BRPO (arXiv 2506.00103): a judge compares each rollout with one rollout of its own group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rl_plugins import ConfigError, Method, MethodError, Rollouts, Run, from_params, param
from rl_plugins.core.params import GIVEN
from rl_plugins.kit.judges import JudgeParams, make_judge
from rl_plugins.kit.services import Endpoint, Failure, NotAsked, Service, failures, number, prompt_text
from rl_plugins.kit.start_checks import refuse_whole_group

TEMPLATE = """Compare two answers to the same request. First name the principles that matter for this request, then
weigh both answers by them. The order in which the answers are shown means nothing, and neither does their length.

[Request]
{prompt}

[Answer A]
{a}

[Answer B]
{b}

End with one line that scores both answers from 0 to 10: Scores: A=<number>, B=<number>"""
_ENDPOINT = {"judge_url": GIVEN}
SCORES = r"A\s*=\s*(\d+(?:\.\d+)?)\s*,\s*B\s*=\s*(\d+(?:\.\d+)?)"


class Brpo(Method):
    """Bootstrapped relative policy optimization: +1 for beating a random rollout of the same group, otherwise -1.

    For tasks without a checkable answer. Per prompt with G rollouts o_1 .. o_G:

        ref ~ Uniform{1..G}
        every o_i, i != ref, is judged against o_ref under m = 2 votes conditions: `votes` times in each order
        A_i = +1  if the judge prefers o_i in all m conditions
              tie_value  if it does in some, -1 if in none           (tie_value -1: all or nothing)
        A_ref = 0
        the group leaves if |sum_i A_i| / G > filter_tau             (the reference was an outlier)

    A_i is the advantage: no mean is subtracted, and nothing is divided.

    `judge(prompt, a, b)`, which may be `async def`, takes three texts and returns two scores (of a, of b), "A", "B", or
    None for no verdict. A completion is preferred if its score is higher by more than `min_margin`, or if the judge
    names its letter. Without a `judge` an endpoint replies with "A=<number>, B=<number>" (see `TEMPLATE`).

    Symbols: rewards and advantages (rows,) float64, A itself, in place of the host's rewards. The reference is drawn
    from `self.rng`, per group number.

    Special cases: a judge that raises, hangs or cannot be read after all retries prefers nobody, which counts as a
    loss. A group without any verdict leaves. A completion equal to the reference loses without a question, and equal
    questions are asked once per vote. A row without a reward (NaN) is not compared, so a dummy reward function must
    return 0. A group of one has A = 0. A rollout of several rows counts once, by the text of its last row.

    Raises:
        ConfigError: no judge or two, a parameter without effect.
        MethodError: no verdict for any pair of a batch.

    Source: arXiv 2506.00103, without code: steps 1-5 as three independent notes tell them, which agree with a public
    re-implementation on TRL, whose aggregation the golden cases are.
    """

    name = "brpo"
    fidelity = "paper"
    does = "Replaces the reward by a judge's comparison with one random rollout of the same group"
    problems = ("no_verifier",)
    needs = from_params(lambda p: {"text", "several_rollouts", f"column:{p.prompt_column}"})

    @dataclass(frozen=True)
    class Params(JudgeParams):
        asked: ClassVar[tuple[str, ...]] = ("prompt", "a", "b")
        example_judge: ClassVar[str] = "rl_plugins.lab.demo.judges:digits"

        judge: Callable[..., Any] | None = param(None, 'function judge(prompt, a, b) -> two scores, "A", "B" or None')
        judge_template: str = param(TEMPLATE, "message with {prompt}, {a} and {b}", only_if=_ENDPOINT)
        judge_reply: Literal["marked", "json", "last"] = param("marked", "format of the verdict", only_if=_ENDPOINT)
        votes: int = param(1, "number of votes in each of the two orders", ge=1)
        filter_tau: float = param(0.6, "largest |sum A| / G at which a group stays; 1 keeps all", ge=0, le=1)
        tie_value: Literal[-1, 0] = param(-1, "advantage of a rollout that wins only some conditions")
        min_margin: float = param(0.0, "margin by which a score must be higher to win (ours)", ge=0)
        reference: int | None = param(None, "position of the reference in its group; none: random", ge=0)
        prompt_column: str = param("prompt", "dataset column with the prompt")

        def check(self) -> None:
            super().check()
            if self.judge_url is not None and self.votes > 1 and not self.judge_temperature:
                raise ConfigError(
                    f"`votes` is {self.votes} and `judge_temperature` is 0, so every vote would be the same. "
                    f"Raise the temperature or set `votes: 1`."
                )

    _judge: Service

    def check(self, run: Run) -> None:
        self._endpoint()
        refuse_whole_group(run, "reference", self.params.reference, "no rollout has that position")

    def _endpoint(self) -> Endpoint | None:
        """Who judges, if it is no function."""
        p = self.params
        if p.judge is not None:
            return None
        return Endpoint(
            p.judge_url,
            p.judge_model,
            p.judge_template,
            SCORES,
            reply=p.judge_reply,
            keys=("a", "b"),
            **p.endpoint_options,
        )

    def start(self, run: Run) -> None:
        # a question ends with the number of its vote, which only tells it from equal ones
        self._judge = make_judge(self.params, self._endpoint(), partial(_verdict, min_margin=self.params.min_margin))

    def rewards(self, rollouts: Rollouts) -> Tensor:
        """A of every row; NaN for rows without a reward and for groups without a verdict."""
        p = self.params
        reward = torch.full((len(rollouts),), torch.nan, dtype=torch.float64)  # stays for what nobody was asked about
        duels: list[_Duel] = []
        questions: list[_Question] = []
        for group, members in rollouts.per_rollout.members(rollouts, ~torch.isnan(rollouts.reward)).items():
            reference = members.pop(self._reference(group, len(members)))
            reward[reference] = 0.0
            if not members:
                self.warn("a group has a single rollout; there is nothing to compare it with, so its advantage is 0.")
            prompt, theirs = self._prompt(rollouts, reference), _text(rollouts, reference)
            for rows in members:
                ours, first = _text(rollouts, rows), len(questions)
                if ours != theirs:
                    for vote in range(p.votes):
                        questions += [(prompt, ours, theirs, vote), (prompt, theirs, ours, vote)]
                duels.append(_Duel(group, rows, slice(first, len(questions))))

        verdicts = self._judge.ask(questions, strict=False)
        self._check(verdicts)
        outcomes = [_outcome(verdict, "AB"[i % 2]) for i, verdict in enumerate(verdicts)]  # ours is shown first, second
        decided, wins = set[int](), 0
        judged = [d for d in duels if not any(isinstance(v, NotAsked) for v in verdicts[d.questions])]
        for duel in judged:
            found = outcomes[duel.questions]
            won = found.count("won")
            reward[duel.rows] = 1.0 if found and won == len(found) else float(p.tie_value) if won else -1.0
            wins += found != [] and won == len(found)
            if not found or any(found):
                decided.add(duel.group)
            if found:
                self.log("agree", len(set(found)) == 1 and found[0] in ("won", "lost"))
        if judged:
            self.log("win", wins / len(judged))
        if self.traced:
            for duel in judged:
                found = outcomes[duel.questions]
                self.note(
                    duel.rows,
                    "won {won} of {votes} votes against the reference",
                    won=found.count("won"),
                    votes=len(found),
                )
        undecided = {duel.group for duel in duels} - decided
        reward[torch.isin(rollouts.group, torch.tensor(sorted(undecided), dtype=torch.int64))] = torch.nan
        return reward

    def select(self, rollouts: Rollouts) -> Tensor:
        """Groups that nearly all won or lost leave, and those without a verdict."""
        skew = _skew(rollouts)
        kept = skew <= self.params.filter_tau  # not for NaN
        self.log("skew", skew[~torch.isnan(skew)].mean())
        self.log("dropped", (~kept).double().mean())
        if self.traced:
            text = "the group's rewards have the skew {skew:.2f}; at most {most:g} stays"
            self.note(rollouts.groups.rows(~kept), text, skew=rollouts.groups.rows(skew), most=self.params.filter_tau)
        if not bool(kept.any()):
            if bool(torch.isnan(skew).any()):
                self.warn(
                    "every group of a batch left, some of them without a verdict or a reward. Watch brpo/judge_failed."
                )
            else:
                self.warn(
                    "every group of a batch left: the reference was an outlier, or the judge "
                    "prefers a position. Watch brpo/agree; a larger `filter_tau` keeps more groups."
                )
        return rollouts.groups.rows(kept)

    def advantages(self, rollouts: Rollouts) -> Tensor:
        return rollouts.reward

    def _reference(self, group: int, size: int) -> int:
        """The place of the reference in its group, in the order of the rollouts' numbers."""
        fixed = self.params.reference
        return int(self.rng(f"reference of group {group}").integers(size)) if fixed is None else min(fixed, size - 1)

    def _prompt(self, rollouts: Rollouts, rows: list[int]) -> str:
        return prompt_text(rollouts.meta[self.params.prompt_column][rows[-1]])

    def _check(self, verdicts: list[str | Failure | None]) -> None:
        """Logs and warns of what failed.

        Raises:
            MethodError: there is no verdict at all.
        """
        failed = failures(verdicts)
        unasked = [v for v in verdicts if isinstance(v, NotAsked)]
        asked = len(verdicts) - len(unasked)
        self.log("judged", asked, "sum")
        if not verdicts:
            return
        self.log("judge_failed", len(failed) / asked)
        if all(v is None or isinstance(v, Failure) for v in verdicts):
            why = f"Its first error: {failed[0].error.rstrip('.')}." if failed else "It answered None each time."
            of = f" that it was asked, spread over the {len(verdicts)}" if unasked else ""
            raise MethodError(
                f"The judge gave no verdict on any of the {asked} questions{of} of this batch, so nothing can be "
                f"learned from it. {why} Check that the judge works by itself; if it is only slow, raise "
                f"`judge_timeout`."
            )
        if failed:
            self.warn(f"the judge failed on some questions; they count as not won. Error: {failed[0].error}")
        if unasked:
            self.warn("the judge seems to be down. Further questions were not asked, and their rollouts are left out.")


_Question = tuple[str, str, str, int]  # prompt, completion shown as A, as B, number of the vote


@dataclass(frozen=True)
class _Duel:
    """A rollout against the reference of its group; no questions where both texts are equal."""

    group: int
    rows: list[int]
    questions: slice


def _verdict(given: Any, min_margin: float) -> str | None:
    """What a judge answered, as A, B, tie or None."""
    if given is None or (isinstance(given, str) and given in ("A", "B")):
        return given
    if isinstance(given, (str, bytes)) or not hasattr(given, "__len__") or len(given) != 2:
        raise ValueError(f'{given!r} is no verdict; it must be two scores (of a, of b), "A", "B" or None.')
    a, b = (number()(score) for score in given)
    return "A" if a - b > min_margin else "B" if b - a > min_margin else "tie"


def _outcome(verdict: str | Failure | None, ours: str) -> str:
    """What became of the one shown as `ours`: won, lost or tie; empty without a verdict."""
    if verdict is None or isinstance(verdict, Failure):
        return ""
    return "tie" if verdict == "tie" else "won" if verdict == ours else "lost"


def _text(rollouts: Rollouts, rows: list[int]) -> str:
    assert rollouts.text is not None  # it is in `needs`
    return rollouts.text[rows[-1]]


def _skew(rollouts: Rollouts) -> Tensor:
    """(groups,) |sum of A| / rollouts, each rollout once; NaN without a reward."""
    groups, reward = rollouts.groups, rollouts.reward
    share = torch.where(torch.isnan(reward), torch.nan, rollouts.per_rollout.row_weight(reward))
    return groups.sum(share * reward).abs() / groups.sum(share)
