"""Linear Thompson sampling (arXiv 2505.15155): chooses the domain of the next prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_plugins import ConfigError, Groups, Method, MethodParams, PromptPool, Rollouts, Run, Tokens, from_params, param
from rl_plugins.core.errors import did_you_mean, shown
from rl_plugins.kit.columns import categories
from rl_plugins.kit.priors import dataset_of
from rl_plugins.kit.row_sets import shuffled

Array = NDArray[np.float64]

CONSTANT, PROGRESS = "constant", "progress"
OF_BATCH = ("reward", "informative", "length", "truncated")  # values of the last batch that a context may have
MOST_ARMS = 1000  # a column with more values names no domains
MOST_LOGGED = 16  # arms with metrics of their own
THOMPSON, CONTEST = {"rule": "thompson"}, {"rule": "contest"}
Rule = Literal["thompson", "contest"]
Reward = Literal["informative", "gain"]


class LinearTS(Method):
    """A bandit over the values of a dataset column, which draws prompts from the domains that teach the most.

    Every value a of `column` is an arm with the posterior N(m_a, P_a^-1) of a reward that is linear in a context x.
    Before a generation batch

        theta_a ~ N(m_a, P_a^-1)                        `draws` times
        weight of a = share of the draws in which x . theta_a is the largest of all arms

    and after it, for each arm that had prompts, with its reward r, from P_a = I / prior_variance and m_a = 0:

        m_a <- (P_a + x x^T / s2)^-1 (P_a m_a + r x / s2),   P_a <- P_a + x x^T / s2

    The weights become shares of the batch's prompts by largest remainder; what rounding loses is carried over. The
    prompts of an arm come in a shuffled order, all of them before one is repeated.

    `reward` r of an arm: `informative`, the share of its groups whose rewards differ, or `gain`, its mean reward minus
    that of its last visit. `context` x is a list of the following, the last five 0 until known:

        constant      1
        progress      generation batch / batches of the run
        reward        mean reward of the last batch
        informative   share of its groups whose rewards differ
        length        its mean length in tokens, over the longest completion the run allows
        truncated     share of its rollouts that the length limit cut off
        method/name   what a method of the run logs in its optimizer steps: the value of the last one

    `rule: contest` is the score of ContestTrade (arXiv 2508.00554) without its predictor: of the last `window` rewards
    of each arm,

        s_a = (mean_a - mean of all arms' rewards) / max(deviation_a, deviation_floor)
        weight of a = (1 - exploration) max(s_a, 0) / sum_b max(s_b, 0) + exploration / arms

    with equal weights while no score is positive; deviations are population deviations.

    Symbols: m (arms, d), P (arms, d, d), theta, x (d,) float64, d numbers of context; s2 = `noise_variance`.

    Special cases: rows without a reward (NaN) do not count; an arm without any reward is not updated. Rows that
    `select` removed count; foreign prompts do not. A rollout of several rows counts once. `gain` starts with an arm's
    second visit. If an arm has too few prompts left, the other arms share the rest.

    State: precision, mean, last rewards and mean reward per arm, remainders, the position in each arm's order, the
    context.

    Raises:
        ConfigError: no such column, one value, or more than 1000; a parameter out of range.

    Source: arXiv 2505.15155; `rdagent/scenarios/qlib/proposal/bandit.py` of the authors' code for the defaults.
    """

    name = "linear_ts"
    fidelity = "paper"
    does = "Draws prompts from the dataset's domains by a linear Thompson bandit"
    problems = ("few_prompts", "no_signal")
    needs = from_params(lambda p: {"prompt_index", f"column:{p.column}"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        column: str = param("", "dataset column whose values are the arms, for example `domain`; required")
        rule: Rule = param("thompson", "posterior draws, or mean over deviation of the last rewards")
        reward: Reward = param("informative", "share of an arm's groups with unequal rewards, or its gain")
        context: tuple[str, ...] = param(
            (CONSTANT,), "entries of x; method/name: a value logged in optimizer steps", only_if=THOMPSON
        )
        draws: int = param(1, "draws per batch; 1: one arm makes the batch (paper)", ge=1, only_if=THOMPSON)
        prior_variance: float = param(10.0, "prior variance of each entry of theta", gt=0, only_if=THOMPSON)
        noise_variance: float = param(0.5, "s2, noise variance of a reward", gt=0, only_if=THOMPSON)
        window: int = param(5, "number of last rewards of an arm that count", ge=1, only_if=CONTEST)
        deviation_floor: float = param(0.01, "smallest deviation used as divisor", gt=0, only_if=CONTEST)
        exploration: float = param(0.1, "share of the batch that all arms get equally", ge=0, le=1, only_if=CONTEST)

        def check(self) -> None:
            if not self.column:
                raise ConfigError("parameter `column` is missing. Give the dataset column whose values are the arms.")
            if not self.context or len(set(self.context)) < len(self.context):
                raise ConfigError(
                    f"`context` is {shown(list(self.context))}; it needs at least one name, and none twice: constant, "
                    f"progress, values of the batch or logged values."
                )
            known = (CONSTANT, PROGRESS, *OF_BATCH)
            for name in self.context:
                if name not in known and "/" not in name:
                    raise ConfigError(
                        f"`context` has {shown(name)}; allowed: {', '.join(known)}, and method/name of what a method "
                        f"logs in optimizer steps.{did_you_mean(name, known)}"
                    )

    def start(self, run: Run) -> None:
        p = self.params
        values, number = categories(dataset_of(run), p.column, run.dataset_size or 0)
        self._names = sorted(set(values))
        count, d = len(self._names), len(p.context)
        if not 1 < count <= MOST_ARMS:
            raise ConfigError(
                f"the column `{p.column}` has {count} different values (one is {shown(self._names[0])}); it must "
                f"have 2 to {MOST_ARMS}. Name a column of domains."
            )
        place = {name: i for i, name in enumerate(self._names)}
        arm = np.array([place[v] for v in values], dtype=np.int64)[number]
        self._arm = torch.from_numpy(arm)
        order = np.argsort(arm, kind="stable")
        self._prompts = np.split(order, np.cumsum(np.bincount(arm, minlength=count))[:-1])
        self._orders: dict[int, tuple[int, Any]] = {}
        self._batches, self._longest = max(1, run.total_batches), run.max_completion_length
        zero = torch.zeros(count, dtype=torch.float64)
        self.state = {
            "precision": torch.eye(d, dtype=torch.float64).repeat(count, 1, 1) / p.prior_variance,
            "mean": torch.zeros(count, d, dtype=torch.float64),
            "last": [[] for _ in range(count)],
            "level": zero + torch.nan,
            "owed": zero.clone(),
            "place": torch.zeros(count, dtype=torch.int64),
            "seed": torch.full((count,), -1, dtype=torch.int64),
            "values": {},
        }

    def select_prompts(self, pool: PromptPool, n: int) -> Sequence[int]:
        taken = np.array(pool.taken, dtype=np.int64)
        free = np.array([len(prompts) for prompts in self._prompts])
        free = free - np.bincount(self._arm.numpy()[taken], minlength=len(free))
        count, owed = shares(self._weights(pool.batch), n, free, self.state["owed"].numpy())
        self.state["owed"] = torch.from_numpy(owed)
        without = set(taken.tolist())
        chosen = [i for arm, k in enumerate(count.tolist()) if k for i in self._next(arm, k, without)]
        # prompts of one arm side by side would make optimizer steps of one domain
        mixed: list[int] = self.rng("mix").permutation(chosen).tolist()
        if self.traced:
            arm, weight = self._arm[torch.tensor(mixed)].tolist(), self._weights(pool.batch)
            names = [self._names[a] for a in arm]
            self.note(mixed, "arm {} with the share {share:.2f}", names, share=[float(weight[a]) for a in arm])
        return mixed

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        p, state, each = self.params, self.state, rollouts.per_rollout
        known = ~torch.isnan(each.reward) & (each.prompt_index >= 0)
        reward, groups = each.reward[known], Groups(each.group[known])
        arm = self._arm[each.prompt_index[known]]
        of_group = Groups(groups.max(arm.double()).long(), count=len(self._names))
        informative = of_group.mean(informative_of(groups, reward))
        level = Groups(arm, count=len(self._names)).mean(reward)
        value = informative if p.reward == "informative" else level - state["level"]
        state["level"] = torch.where(torch.isnan(level), state["level"], level)
        visited = (~torch.isnan(value)).nonzero()[:, 0]
        x = self._x(rollouts.batch)
        for i in visited.tolist():
            state["precision"][i], state["mean"][i] = posterior(
                state["precision"][i], state["mean"][i], x, float(value[i]), p.noise_variance
            )
            state["last"][i] = [*state["last"][i], float(value[i])][-p.window :]
        self._keep_values(rollouts, informative_of(groups, reward), stats)
        self._report(rollouts, value)

    def _weights(self, batch: int) -> Array:
        """(arms,) that sum to 1."""
        p, state = self.params, self.state
        if p.rule == "contest":
            return contest_weights(state["last"], p.deviation_floor, p.exploration)
        noise = self.rng("theta").normal(size=(p.draws, *state["mean"].shape))
        value = thompson_draws(state["precision"], state["mean"], torch.from_numpy(noise)) @ self._x(batch)
        return np.bincount(value.argmax(1).numpy(), minlength=len(self._names)) / p.draws

    def _x(self, batch: int) -> Tensor:
        """(d,) x for a generation batch."""
        known = {**self.state["values"], CONSTANT: 1.0, PROGRESS: min(batch / self._batches, 1.0)}
        values = [known.get(name, 0.0) for name in self.params.context]
        return torch.tensor(values, dtype=torch.float64)

    def _keep_values(self, rollouts: Rollouts, informative: Tensor, stats: Mapping[str, float]) -> None:
        """What the context of the next batch needs of this one."""
        of_batch = {
            "reward": rollouts.per_rollout.reward.nanmean(),
            "informative": informative.mean(),
            "length": rollouts.length.double().mean() / self._longest,
            "truncated": rollouts.truncated.double().mean(),
        }
        names = [name for name in self.params.context if name not in (CONSTANT, PROGRESS)]
        found = {name: float(of_batch.get(name, stats.get(name, torch.nan))) for name in names}
        finite = {name: value for name, value in found.items() if np.isfinite(value)}
        self.state["values"] = {**self.state["values"], **finite}
        missing = [name for name in names if name not in of_batch and name not in stats]
        if missing and rollouts.batch > 0:  # before the first batch nothing was updated
            self.warn(
                f"no method logs {', '.join(f'`{n}`' for n in missing)} in optimizer steps, so the context has 0 "
                f"there. Logged are: {', '.join(sorted(stats)[:20]) or 'none'}."
            )

    def _next(self, arm: int, k: int, without: set[int]) -> list[int]:
        """The next k prompts of an arm in its order, without those in `without`, to which they are added."""
        place, chosen = self.state["place"], list[int]()
        while len(chosen) < k:
            prompts = self._prompts[arm]
            seed, at = int(self.state["seed"][arm]), int(place[arm])
            if seed < 0 or at >= len(prompts):
                seed, at = int(self.rng(f"order {arm} {seed}").integers(2**31)), 0
                self.state["seed"][arm] = seed
            if self._orders.get(arm, (-1,))[0] != seed:
                self._orders[arm] = seed, shuffled(seed, len(prompts))
            prompt = int(prompts[self._orders[arm][1][at]])
            place[arm] = at + 1
            if prompt not in without:
                without.add(prompt)
                chosen.append(prompt)
        return chosen

    def _report(self, rollouts: Rollouts, value: Tensor) -> None:
        prompts = Groups(rollouts.prompt_index[rollouts.prompt_index >= 0]).ids
        share = torch.bincount(self._arm[prompts], minlength=len(value)).double() / max(1, len(prompts))
        self.log("reward", value.nanmean())
        self.log("largest_share", share.max())
        for i, name in enumerate(self._names[:MOST_LOGGED]):
            self.log(f"share/{name}", share[i])
            self.log(f"reward/{name}", value[i])


def informative_of(groups: Groups, reward: Tensor) -> Tensor:
    """(groups,) 1 where rewards differ, else 0."""
    return (groups.max(reward) > groups.min(reward)).double()


def posterior(
    precision: Tensor, mean: Tensor, x: Tensor, reward: float, noise_variance: float
) -> tuple[Tensor, Tensor]:
    """Precision (d, d) and mean (d,) of theta after a reward x . theta + noise."""
    updated = precision + torch.outer(x, x) / noise_variance
    return updated, torch.linalg.solve(updated, precision @ mean + reward * x / noise_variance)


def thompson_draws(precision: Tensor, mean: Tensor, noise: Tensor) -> Tensor:
    """(draws, arms, d) theta ~ N(mean, precision^-1).

    Args:
        precision: (arms, d, d). mean: (arms, d).
        noise: (draws, arms, d) standard normal.
    """
    upper = torch.linalg.cholesky(precision).mT  # P = L L^T, and L^-T noise has the covariance P^-1
    return mean + torch.linalg.solve_triangular(upper, noise[..., None], upper=True)[..., 0]


def contest_weights(last: Sequence[Sequence[float]], deviation_floor: float, exploration: float) -> Array:
    """(arms,) weights of `rule: contest` from the last rewards of each arm; one without any has the score 0."""
    rewards = [r for of_arm in last for r in of_arm]
    everything = float(np.mean(rewards)) if rewards else 0.0
    score = np.array([(np.mean(x) - everything) / max(float(np.std(x)), deviation_floor) if x else 0.0 for x in last])
    positive = np.maximum(score, 0.0)
    total = positive.sum()
    weights = positive / total if total > 0 else np.full(len(last), 1 / len(last))
    return np.asarray((1 - exploration) * weights + exploration / len(last))


def shares(weights: Array, n: int, free: NDArray[np.int64], owed: Array) -> tuple[NDArray[np.int64], Array]:
    """n split in proportion to the weights, by largest remainder (of equal ones the first).

    Args:
        weights: (arms,) that sum to 1.
        free: (arms,) the most each can give; what an arm lacks the others give in proportion to their weights, and
            alike where these are 0.
        owed: (arms,) what earlier roundings took from each; it is added to its part first.

    Returns:
        (arms,) counts that sum to n, and (arms,) the remainder carried over, in [-1, 1].
    """
    count = np.zeros(len(weights), dtype=np.int64)
    part = np.maximum(weights * n + owed, 0.0)
    while count.sum() < n:
        open_ = count < free
        part = np.where(open_, part, 0.0)
        part = np.where(open_, 1.0, 0.0) if part.sum() <= 0 else part
        quota = part * ((n - count.sum()) / part.sum())
        given = np.floor(quota + 1e-9).astype(np.int64)
        rest = max(0, int(n - count.sum() - given.sum()))
        given[np.argsort(-(quota - given), kind="stable")[:rest]] += 1
        count = np.minimum(count + given, free)
        part = np.where(part > 0, weights, 0.0)
    return count, np.clip(owed + weights * n - count, -1.0, 1.0)
