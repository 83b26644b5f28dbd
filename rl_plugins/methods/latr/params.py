"""Parameters of LATR."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rl_plugins import ConfigError, MethodParams, param
from rl_plugins.core.params import GIVEN
from rl_plugins.methods.latr.similarity import common_subsequence, edit_distance, suffix_match


@dataclass(frozen=True)
class LatrParams(MethodParams):
    eta: tuple[float, ...] = param(
        (1.0, 0.75, 0.5, 0.25, 0.0),
        "eta, shares of the rollouts that come from the tree, one per entry of `eta_steps`",
        ge=0,
        le=1,
    )
    eta_steps: tuple[int, ...] = param(
        (0, 10, 20, 80, 200), "first generation batch of each share, counted from 0", ge=0
    )
    candidates: int = param(2, "m, number of most likely tokens examined in each place", ge=2)
    tau_abs: float = param(0.25, "probability above which a candidate may branch", ge=0, le=1)
    tau_rel: float = param(
        0.15, "distance from the most likely token's probability that `rel_test` compares with", ge=0, le=1
    )
    rel_test: Literal["close", "far"] = param(
        "close", "required distance: close, below tau_rel; far, above tau_rel (the code before January 2026)"
    )
    lookahead: tuple[int, ...] = param(
        (20, 30, 50),
        "ages in tokens at which a branch is compared with its parent",
        ge=1,
        only_if=({"tau_ed": GIVEN}, {"tau_sm": GIVEN}, {"tau_rl": GIVEN}, {"stop_when_full": True}),
    )
    tau_ed: float | None = param(
        0.4, "edit distance / age below which a branch is pruned; none: not tested", ge=0, le=1
    )
    tau_sm: float | None = param(
        None, "suffix match / age above which a branch is pruned; none: not tested", ge=0, le=1
    )
    tau_rl: float | None = param(None, "ROUGE-L above which a branch is pruned; none: not tested", ge=0, le=1)
    sample_nk: Literal["none", "full", "always"] = param(
        "none", "replacement of argmax by sampled tokens where nothing branches: never, only in a full tree, or always"
    )
    stop_when_full: bool = param(True, "end of the tree when it is full and all branches are older than any lookahead")
    full_share: float = param(
        0.98, "share of the wanted branches that counts as a full tree", ge=0, le=1, only_if={"stop_when_full": True}
    )
    full_decay: float = param(
        0.05, "decrease of that share over the length of a completion", ge=0, le=1, only_if={"stop_when_full": True}
    )
    max_tree_tokens: int | None = param(512, "largest length of the tree, in tokens; none: the completion length", ge=1)
    decode_ahead: int = param(
        16, "number of tokens per request; it changes the cost and not the tree: 1 asks the engine at every token", ge=1
    )

    def check(self) -> None:
        if len(self.eta) != len(self.eta_steps) or not self.eta:
            raise ConfigError(
                f"`eta` has {len(self.eta)} shares and `eta_steps` {len(self.eta_steps)} batches; give one batch for "
                f"each share."
            )
        if self.eta_steps[0] != 0 or any(b <= a for a, b in itertools.pairwise(self.eta_steps)):
            raise ConfigError(f"`eta_steps` is {list(self.eta_steps)}; it must begin with 0 and increase.")
        if not self.lookahead:
            raise ConfigError("`lookahead` is empty. Give at least one age, or turn off the tests (`tau_ed=none`).")

    def eta_at(self, batch: int) -> float:
        """The share that holds in a generation batch."""
        return [e for e, first in zip(self.eta, self.eta_steps, strict=True) if first <= batch][-1]

    def branches(self, best: float, other: float) -> bool:
        """Whether a candidate of probability `other`, next to the most likely one of `best`, opens a branch."""
        distance = best - other
        near = distance < self.tau_rel if self.rel_test == "close" else distance > self.tau_rel
        return other > self.tau_abs and near

    def likeness(self, a: Sequence[int], b: Sequence[int]) -> tuple[float, str] | None:
        """How a branch `a` is nearly a copy of its parent `b`, by their tokens since the branch started: the value of
        the test that found it, and its name; None if it is no copy."""
        r = len(a)
        if self.tau_ed is not None and (value := edit_distance(a, b) / r) < self.tau_ed:
            return value, f"edit distance / age below {self.tau_ed:g}"
        if self.tau_sm is not None and (value := suffix_match(a, b) / r) > self.tau_sm:
            return value, f"suffix match / age above {self.tau_sm:g}"
        if self.tau_rl is not None and (value := common_subsequence(a, b) / r) > self.tau_rl:  # F1 of equal lengths
            return value, f"ROUGE-L above {self.tau_rl:g}"
        return None

    def full(self, branches: int, n: int, progress: float) -> bool:
        """Whether so many branches of n count as all of them; `progress` is the finished share of the completion."""
        return branches >= round(n * (self.full_share - self.full_decay * progress))

    def samples(self, branches: int, n: int) -> bool:
        """Whether a row that does not branch takes a sampled token."""
        return self.sample_nk == "always" or (self.sample_nk == "full" and branches == n)
