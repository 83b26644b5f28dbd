"""DRPO (arXiv 2510.04474): prefers short answers among the right ones only, in a discriminative objective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import ConfigError, Groups, Idle, Method, Rollouts, Rows, Run, Shape, Terms, Tokens, Update
from rl_plugins.core.params import MethodParams, above, param


class Drpo(Method):
    """Decoupled Reward Policy Optimization: length never makes a right answer worse than a wrong one.

    For every question q with right answers P and wrong answers N:

        s_i     = (1/L_i) sum_t log pi(o_it)                                                  mean log-prob of answer i
        omega_i = exp((1 - L_i/C) / lambda) / sum_{j in P} exp((1 - L_j/C) / lambda)          for i in P
        J_q     = sum_P omega_i s_i - tau log mean_{j in N} exp(s_j / tau)
        J       = sum of J_q over the questions that have both / number of all questions
        K       = mean over all tokens of (log pi_old - log pi)
        loss    = -J + (beta / 2) max(K - delta, 0)^2

    There is no importance ratio and no clipping; the hinge on K keeps the policy near the old one. The softmax over N
    and the hinge need all rows of an optimizer step, so `before_update` computes a factor per row from one pass without
    gradient, and the loss is linear in the log-probs:

        c_i       = (omega_i - softmax_N(s / tau)_i) / (questions L_i) + beta max(K - delta, 0) / tokens
        loss_it   = -c_i (log pi(o_it) - stop_gradient(log pi(o_it))) + loss / tokens

    Its sum over the step has the value and the gradient of the loss above, however the step is split.

    Symbols: L_i tokens of answer i; C the configured completion length; lambda `length_temperature`, tau
    `score_temperature`, beta `kl_weight`, delta `kl_limit`. Rewards, weights and sums per row are float64, log-probs in
    nats. `advantages` are omega_i for right answers, -1/|N| for wrong ones and 0 elsewhere, for logs and selectors.

    Special cases: a reward of exactly 1 is right and exactly 0 wrong; any other, NaN included, is neither. Rows that
    are neither, and questions with only one kind, have a gradient through K alone. Rows that leave and rows without a
    token count nowhere. A rollout of several rows counts as several answers.

    Raises:
        MethodError: `reward` is not a reward function of the run.

    Source: arXiv 2510.04474; `compute_policy_loss_drpo` in `verl/verl/trainer/ppo/core_algos.py` of the authors' code.
    """

    name = "drpo"
    fidelity = "code"
    does = "Prefers short answers among the right ones only, so length never makes a right answer bad"
    problems = ("length",)
    needs = frozenset({"old_logprobs", "current_logprobs", "several_rollouts", "whole_groups"})
    host_options = {"trl": {"vllm_importance_sampling_correction": False}}
    aggregation = "sum"
    idle = (Idle({"mixed": 0}, "no group has both right and wrong completions. Look at `reward` and `threshold`."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        length_temperature: float = param(0.1, "lambda, temperature of omega; inf: DisCO", gt=0, allow_inf=True)
        score_temperature: float = param(
            10.0, "tau, temperature over wrong answers: smaller stresses the likeliest", gt=0
        )
        kl_weight: float = param(1e3, "beta, weight of the hinge on K", ge=0)
        kl_limit: float = param(
            1e-4, "delta, K without penalty, in nats per token", ge=0, only_if={"kl_weight": above(0)}
        )
        reward: str | None = param(None, "reward function that says right or wrong; none: the weighted sum of all")
        threshold: float | None = param(None, "lowest reward that counts as right; none: 1 is right and 0 is wrong")

    def check(self, run: Run) -> None:
        if run.reward_names and self.params.reward not in (None, *run.reward_names):
            raise ConfigError(
                f"the parameter `reward` is {self.params.reward!r}, but the reward functions of this run are: "
                f"{', '.join(run.reward_names)}. Name one of them, or none for their weighted sum."
            )

    def start(self, run: Run) -> None:
        self._max_length = run.max_completion_length

    def advantages(self, rollouts: Rollouts) -> Tensor:
        outcome, groups, length = self._outcome(rollouts), rollouts.groups, rollouts.length.double()
        right, wrong = outcome > 0, outcome < 0
        both = (groups.sum(right.double()) > 0) & (groups.sum(wrong.double()) > 0)
        self.log("mixed", both.double().mean())
        self.log("length_right", length[right].mean())
        self.log("length_wrong", length[wrong].mean())
        weight, _ = self._objective(groups, outcome, self._length_reward(rollouts), torch.zeros_like(length))
        return weight

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        """What the update needs to know of a row besides its log-probs."""
        columns = {"drpo_outcome": self._outcome(rollouts), "drpo_length_reward": self._length_reward(rollouts)}
        return Shape(row_columns=columns)

    def before_update(self, rows: Rows) -> Update:
        assert rows.logprobs is not None and rows.old_logprobs is not None  # in `needs`
        p, groups, length = self.params, Groups(rows.group), rows.length.double()
        score = rows.logprobs / length
        weight, value = self._objective(
            groups, rows.columns["drpo_outcome"].double(), rows.columns["drpo_length_reward"].double(), score
        )
        questions, tokens = groups.count, length.sum()
        kl = (rows.old_logprobs - rows.logprobs).sum() / tokens
        excess = (kl - p.kl_limit).clamp(min=0)
        objective = value.sum() / questions
        loss = -objective + p.kl_weight / 2 * excess**2
        self.log("objective", objective)
        self.log("kl", kl)
        self.log("kl_active", float(excess > 0))
        return Update(
            columns={
                "drpo_coefficient": weight / (questions * length) + p.kl_weight * excess / tokens,
                "drpo_loss": (loss / tokens).expand(len(length)),
            }
        )

    def policy_loss(self, terms: Terms) -> Tensor:
        change = terms.logprobs - terms.logprobs.detach()  # 0, with gradient: the value comes from `before_update`
        return terms.columns["drpo_loss"] - terms.columns["drpo_coefficient"] * change

    def _outcome(self, rollouts: Rollouts) -> Tensor:
        """(rows,) float64: 1 right, -1 wrong, 0 neither."""
        name, threshold, reward = self.params.reward, self.params.threshold, rollouts.reward
        if name is not None:
            said = rollouts.rewards[:, rollouts.reward_names.index(name)]
            reward = torch.where(torch.isnan(reward), reward, said)  # a row that was withdrawn stays so
        right, wrong = (reward == 1, reward == 0) if threshold is None else (reward >= threshold, reward < threshold)
        scored = ~torch.isnan(reward)
        if bool((scored & ~right & ~wrong).any()):
            self.warn(
                f"a reward is neither 0 nor 1 (here {float(reward[scored & ~right & ~wrong][0]):g}), so its row is "
                "neither right nor wrong and teaches nothing. Set the parameter `threshold`, or `reward` to the name "
                "of the reward function that says what is right."
            )
        return (right.double() - wrong.double()) * (rollouts.length > 0)

    def _length_reward(self, rollouts: Rollouts) -> Tensor:
        return 1 - rollouts.length.double() / self._max_length

    def _objective(
        self, groups: Groups, outcome: Tensor, length_reward: Tensor, score: Tensor
    ) -> tuple[Tensor, Tensor]:
        """dJ_q / ds_i of every row, (rows,), and J_q of every question, (questions,); 0 where one kind is missing."""
        tau = self.params.score_temperature
        right = torch.where(outcome > 0, length_reward / self.params.length_temperature, torch.nan)
        wrong = torch.where(outcome < 0, score / tau, torch.nan)
        omega, _ = _softmax(groups, right)
        share, log_mean = _softmax(groups, wrong)
        value = groups.sum(omega * score) - tau * log_mean
        both = (groups.n(right) > 0) & (groups.n(wrong) > 0)
        return torch.where(groups.rows(both), omega - share, 0.0), torch.where(both, value, 0.0)


def _softmax(groups: Groups, x: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the values of each group that are not NaN, (rows,), 0 at NaN; and log mean exp of them, (count,)."""
    largest = groups.max(x)
    e = torch.exp(x - groups.rows(largest))
    total = groups.sum(e)
    return torch.nan_to_num(e / groups.rows(total), nan=0.0), largest + torch.log(total / groups.n(e))
