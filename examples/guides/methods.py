"""A method for each hook. The guide docs/guides/hooks.md shows this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import (
    Admission,
    Generate,
    Method,
    MethodParams,
    Plan,
    Program,
    Prompt,
    PromptPool,
    Queue,
    Rollouts,
    Rows,
    Score,
    Shape,
    Terms,
    Tokens,
    Update,
    param,
    ppo_clip,
)


class Shuffled(Method):
    """Takes the prompts in random order, a new one for each batch."""

    name = "shuffled"
    needs = frozenset({"prompt_index"})

    def select_prompts(self, pool: PromptPool, n: int) -> list[int]:
        order = self.rng("prompts").permutation(pool.size).tolist()
        return [i for i in order if i not in pool.taken][:n]


class Shorter(Method):
    """Limits the length of completions."""

    name = "shorter"

    @dataclass(frozen=True)
    class Params(MethodParams):
        max_tokens: int = param(256, "longest completion, in tokens", ge=1)

    def plan(self, plan: Plan) -> Plan:
        limit = self.params.max_tokens
        rows = [row.replace(max_tokens=min(limit, row.max_tokens or limit)) for row in plan.rows]
        return plan.replace(rows=tuple(rows))


class Ahead(Method):
    """Begins one and a half times as many groups as are trained. Those that are late wait for a later batch."""

    name = "ahead"

    def admit(self, queue: Queue) -> Admission:
        total = queue.groups + queue.groups // 2
        resume = tuple(range(len(queue.carried)))[:total]
        return Admission(fresh=total - len(resume), resume=resume)


class Retry(Method):
    """Makes rollouts without reward once more."""

    name = "retry"

    def rollout(self, prompt: Prompt) -> Program:
        start = prompt.start()
        made = yield Generate(start, n=prompt.n)
        rows = [start.add(generated) for generated in made]
        scores = yield [Score(row) for row in rows]
        failed = [i for i, score in enumerate(scores) if score.reward <= 0]
        if failed:
            again = yield Generate(start, n=len(failed))
            for i, generated in zip(failed, again, strict=True):
                rows[i] = start.add(generated)
        return rows


class CutOff(Method):
    """Lowers the reward of rollouts that hit the length limit."""

    name = "cut_off"

    def rewards(self, rollouts: Rollouts) -> Tensor:
        return rollouts.reward - 0.5 * rollouts.truncated.double()


class Mixed(Method):
    """Leaves out groups whose rewards are all equal."""

    name = "mixed"

    def select(self, rollouts: Rollouts) -> Tensor:
        groups, reward = rollouts.groups, rollouts.reward
        return groups.rows(groups.max(reward) > groups.min(reward))


class Cheating(Method):
    """Shows the policy the answer, and asks again how likely each token is."""

    name = "cheating"
    needs = frozenset({"tokens", "teacher_logprobs", "column:answer"})

    def teacher_prompts(self, rollouts: Rollouts) -> list[str]:
        return [f"The answer is {answer}. Derive it." for answer in rollouts.meta["answer"]]


class LeaveOneOut(Method):
    """Compares a rollout with the mean of the others of its group."""

    name = "leave_one_out"

    def advantages(self, rollouts: Rollouts) -> Tensor:
        others = rollouts.groups.leave_one_out(rollouts.reward)
        return torch.nan_to_num(rollouts.reward - others, nan=0.0)


class Gentle(Method):
    """Halves negative advantages."""

    name = "gentle"
    needs = frozenset({"tokens"})

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        a = tokens.advantages
        return Shape(advantages=torch.where(a < 0, 0.5 * a, a))


class Average(Method):
    """Logs a running mean of the rewards."""

    name = "average"

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        rewards = rollouts.reward[~torch.isnan(rollouts.reward)]
        if len(rewards):
            new = float(rewards.mean())
            self.state["mean"] = 0.9 * self.state.get("mean", new) + 0.1 * new
            self.log("mean", self.state["mean"])


class FewTokens(Method):
    """Lowers the learning rate of optimizer steps with few tokens."""

    name = "few_tokens"

    def before_update(self, rows: Rows) -> Update:
        return Update(lr_scale=min(1.0, float(rows.length.sum()) / 1024))


class ClipHigher(Method):
    """Clips importance ratios further away above 1 than below."""

    name = "clip_higher"

    def policy_loss(self, terms: Terms) -> Tensor:
        return ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages, 0.2, 0.28)


class Entropy(Method):
    """Rewards entropy of the policy at every token."""

    name = "entropy"
    needs = frozenset({"current_entropies"})

    def regularize(self, terms: Terms) -> Tensor:
        return -0.001 * terms.entropies
