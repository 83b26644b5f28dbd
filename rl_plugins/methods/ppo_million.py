"""PPO's outer step (arXiv 2603.06009): how far a batch moves the policy for its samples, and a cut on a plateau."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import ConfigError, Method, MethodParams, Rollouts, Rows, Run, Shape, Terms, Tokens, Update, param
from rl_plugins.core.losses import LOG_RATIO_LIMIT, Live, finite, widest

Action = Literal["none", "shrink", "grow", "anchor"]
CUTS = "ppo_million_cuts"  # row column: cuts of the learning rate so far
LEAST_KL = 1e-8  # nats; the ratio of samples to KL is finite at KL = 0
SHRINK = {"action": "shrink"}
REFUSED = {
    "grow": "more samples in a run, and neither host can change its batch: use rl-plugins scale CONFIG --by 2",
    "anchor": "a second set of weights as centre, which neither host has: use `action: shrink`",
}
_SLOPE = {"action": "shrink", "test": "slope"}


class PpoMillion(Method):
    """Watches a batch's updates as one noisy outer step, and makes that step smaller once the reward stops rising.

    Reconstruction: no code was published. Of the paper's data-to-divergence ratio only the words are known, samples per
    unit of KL; the estimator, the plateau test and the cut are ours. This method logs what a batch's updates did:

        r_t     = exp(lp_t - lp_old_t)
        kl      = mean_t (r_t - 1 - log r_t)                    k3 estimate of KL(old policy || policy), nats per token
        clipped = share of tokens with A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low
        samples_per_nat = samples of the batch / max(kl, 1e-8)

    The loss gets a term of 0. With `action: shrink` the learning rate of every optimizer step is multiplied by

        lr_scale = factor^-cuts

    and `cuts` grows by 1 (up to `max_cuts`) after a plateau. A plateau is a window of the last `window` batches, all of
    them after the cut before. Its mean reward does not rise, and the policy still moves: kl of the newer half >=
    kl_share * kl of the older half > 0. `test: slope` takes the reward as rising if the slope of its least-squares line
    has a one-sided t-test below `alpha`; `halves` if the mean of the newer half is larger.

    Symbols: lp, lp_old log-probs in nats of the live policy and of the policy at the start of the batch, A advantages,
    all (rows, time), over trained tokens; samples are the trainable tokens of the rows that `select` left. Log-ratios
    are limited to 20 nats.

    Special cases: a log-ratio that is not finite counts as 0. A batch without any reward is NaN in the window, and no
    cut is made until it has left. The kl of a batch is known one batch later: in TRL that of its last optimizer step,
    in verl the mean over its optimizer steps.

    State: the last `window` triples of mean reward, kl and ratio; samples of the newest batch; batches since the last
    cut; cuts.

    Raises:
        ConfigError: `action` is `grow` or `anchor`.

    Source: arXiv 2603.06009, abstract, and notes of others on its sections 3 to 5.
    """

    name = "ppo_million"
    fidelity = "reconstruction"
    does = "Measures how far each batch moves the policy, and cuts the learning rate on a plateau"
    problems = ("exploration",)
    needs = frozenset({"several_updates"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        action: Action = param("none", "answer to a plateau: none, or a smaller learning rate")
        clip_low: float = param(0.2, "lower clip range of the run's own loss, for `clipped`", ge=0, le=1)
        clip_high: float = param(0.2, "upper clip range of the run's own loss", ge=0, allow_inf=True)
        window: int = param(20, "w, number of batches of the moving average and of the plateau test", ge=4, le=10_000)
        test: Literal["slope", "halves"] = param("slope", "test of whether the mean reward rises", only_if=SHRINK)
        alpha: float = param(0.05, "level of the t-test", gt=0, lt=1, only_if=_SLOPE)
        kl_share: float = param(0.5, "share of the older half's kl that the newer half reaches", ge=0, only_if=SHRINK)
        factor: float = param(2.0, "s, divisor of the learning rate at each cut", gt=1, only_if=SHRINK)
        max_cuts: int = param(4, "largest number of cuts in a run", ge=1, le=64, only_if=SHRINK)

        def check(self) -> None:
            if self.action in REFUSED:
                raise ConfigError(f"parameter `action` is {self.action!r}, which means {REFUSED[self.action]}.")

    def start(self, run: Run) -> None:
        self.state = {"window": torch.zeros((0, 3), dtype=torch.float64), "samples": 0, "since_cut": 0, "cuts": 0}

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape | None:
        """With `shrink`: the number of cuts, which travels to the optimizer steps with the rows."""
        if self.params.action != "shrink":
            return None
        cuts = self.state["cuts"]
        self.log("cuts", cuts)
        return Shape(row_columns={CUTS: torch.full((len(rollouts),), float(cuts), dtype=torch.float64)})

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        p, state = self.params, self.state
        kl = stats.get(f"{self.name}/kl")
        if kl is not None and state["samples"]:
            ratio = state["samples"] / max(kl, LEAST_KL)
            entry = torch.tensor([[float(torch.nanmean(rollouts.per_rollout.reward)), kl, ratio]], dtype=torch.float64)
            state["window"] = torch.cat([state["window"], entry])[-p.window :]
            state["since_cut"] += 1
            self.log("samples_per_nat", ratio)
            self.log("samples_per_nat_mean", state["window"][:, 2].mean())
        state["samples"] = int(rollouts.length[rollouts.kept].sum())
        self.log("samples", state["samples"])
        if p.action == "shrink" and state["since_cut"] >= p.window:
            reward, moved, _ = state["window"].unbind(1)
            stuck = plateau(reward, moved, p.test, p.alpha, p.kl_share)
            self.log("plateau", float(stuck))
            if stuck and state["cuts"] < p.max_cuts:
                state["cuts"], state["since_cut"] = state["cuts"] + 1, 0

    def before_update(self, rows: Rows) -> Update | None:
        if self.params.action != "shrink" or not len(rows.length):
            return None
        scale = self.params.factor ** -float(rows.columns[CUTS][0])
        self.log("lr_scale", scale)
        return Update(scale)

    def regularize(self, terms: Terms) -> Tensor:
        """(rows, time) zeros."""
        p, wide = self.params, widest(terms.logprobs.device)
        log_ratio = finite(terms.logprobs.detach().to(wide) - terms.old_logprobs.detach().to(wide))
        log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        change, adv = torch.expm1(log_ratio), terms.advantages  # r - 1
        clipped = ((adv > 0) & (change > p.clip_high)) | ((adv < 0) & (change < -p.clip_low))
        Live(terms).log_means(self, kl=change - log_ratio, clipped=clipped.to(wide))
        return torch.zeros_like(terms.logprobs)


def plateau(reward: Tensor, kl: Tensor, test: str, alpha: float, kl_share: float) -> bool:
    """Whether the reward of a window does not rise while the policy keeps moving.

    Args:
        reward: (batches,) mean rewards in time order; False if one is NaN.
        kl: (batches,) nats per token of the updates before each.
        test, alpha, kl_share: as of `PpoMillion`.
    """
    half = len(reward) // 2
    older, newer = float(kl[:half].mean()), float(kl[len(kl) - half :].mean())
    if not bool(torch.isfinite(reward).all()) or not older > 0 or newer < kl_share * older:
        return False
    if test == "halves":
        return float(reward[len(reward) - half :].mean()) <= float(reward[:half].mean())
    return not slope_is_positive(reward, alpha)


def slope_is_positive(y: Tensor, alpha: float) -> bool:
    """One-sided t-test of the slope of the least-squares line through (0, y_0), (1, y_1), and so on; `y` has at least
    three values. Where the line is exact, the sign of its slope decides."""
    from scipy.special import stdtrit  # takes longer to load than all methods

    y = y.double() - y.double().mean()
    x = torch.arange(len(y), dtype=torch.float64) - (len(y) - 1) / 2
    spread = float((x * x).sum())
    slope = float((x * y).sum()) / spread
    error = math.sqrt(float(((y - slope * x) ** 2).sum()) / (len(y) - 2) / spread)
    return slope > error * float(stdtrit(len(y) - 2, 1 - alpha))
