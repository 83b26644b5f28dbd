"""How the problems of a run show in its logs: a value, what it is compared with, and what cannot be told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rl_plugins.cards.problems import PROBLEMS
from rl_plugins.commands.suggest.run_logs import RunLogs


@dataclass(frozen=True)
class Sign:
    """One reading of the logs.

    Attributes:
        problem: key of `PROBLEMS`.
        what: what was read, with the names of the logged values.
        value, threshold: the problem is there if the value is at least the threshold (at most, where `below`).
        option: of the host, that answers it without a method.
    """

    problem: str
    what: str
    value: float
    threshold: float
    below: bool = False
    option: str = ""

    @property
    def holds(self) -> bool:
        return self.value <= self.threshold if self.below else self.value >= self.threshold

    @property
    def strength(self) -> float:
        """How far beyond the threshold the value is."""
        return self.threshold / max(self.value, 1e-9) if self.below else self.value / self.threshold

    @property
    def text(self) -> str:
        read = f"{self.what}: {self.value:.3g} (a problem {'up to' if self.below else 'from'} {self.threshold:g})"
        return f"{read}. {self.option}" if self.option and self.holds else read


# What a problem needs in the logs, said where the logs lack it; of the others no log of a host tells.
NEEDS = {
    "no_signal": "`frac_reward_zero_std` (TRL), or `rl_plugins/frac_reward_zero_std` (verl with methods)",
    "long_tail": "`completions/max_length` and `completions/mean_length`, or verl's `response_length/..`",
    "several_rewards": "`rewards/NAME/std` of two or more reward functions; verl logs their sum only",
    "agents": "`tools/call_frequency`, `num_turns/mean`, or turns of a method; TRL logs none without tools",
    "stale": "`rl_plugins/staleness_mean`, verl's `trajectory_staleness/mean`, or a clipped share of tokens",
    "length": "the clipped share of completions, or ten logged steps of their mean length",
    "few_prompts": "`epoch`, or `training/epoch`",
    "exploration": "ten logged steps of `entropy`, or `actor/entropy`",
    "forgetting": "`kl`, or `actor/kl_loss`: set beta, or use_kl_loss",
}


def signs_of(logs: RunLogs) -> list[Sign]:
    """Every sign that these logs allow to read, those of no problem included. Thresholds are rules of thumb."""
    return [*_groups(logs), *_length(logs), *_rewards(logs), *_agents(logs), *_age(logs), *_course(logs)]


def not_told(signs: list[Sign], logs: RunLogs) -> dict[str, str]:
    """Problem -> why these logs say nothing of it."""
    read = {sign.problem for sign in signs}
    why = {key: f"the logs lack {NEEDS[key]}" if key in NEEDS else "no log shows it" for key in PROBLEMS}
    if constant := [name for name in _deviations(logs) if not logs.mean(name)]:
        listed = ", ".join(f"`{name}`" for name in constant)
        why["several_rewards"] = f"{listed} is 0 in every step: a reward that never varies teaches nothing"
    return {key: text for key, text in why.items() if key not in read}


def _first(logs: RunLogs, *names: str) -> tuple[str, float] | None:
    """The first of these values that the run has, with its mean."""
    return next(((name, value) for name in names if (value := logs.mean(name)) is not None), None)


def _groups(logs: RunLogs) -> Iterator[Sign]:
    if (kept := logs.mean("dynamic_sampling/signal")) is not None:  # what it trains has signal, whatever was generated
        yield Sign(
            "no_signal", "share of generated groups of equal rewards (1 - `dynamic_sampling/signal`)", 1 - kept, 0.3
        )
    elif found := _first(logs, "frac_reward_zero_std", "rl_plugins/frac_reward_zero_std"):
        yield Sign("no_signal", f"share of groups of equal rewards (`{found[0]}`)", found[1], 0.3)


def _length(logs: RunLogs) -> Iterator[Sign]:
    prefix = "response_length" if logs.host == "verl" else "completions"
    longest, mean = ("max", "mean") if logs.host == "verl" else ("max_length", "mean_length")
    most, usual = logs.mean(f"{prefix}/{longest}"), logs.mean(f"{prefix}/{mean}")
    if most is not None and usual:
        yield Sign("long_tail", f"longest over mean completion (`{prefix}/{longest}`)", most / usual, 4)
    if found := _first(logs, "completions/clipped_ratio", "response_length/clip_ratio"):
        room = "data.max_response_length" if logs.host == "verl" else "max_completion_length"
        option = f"A completion that is cut off seldom gets its reward: if answers need the length, raise {room}"
        yield Sign("length", f"share of completions cut off (`{found[0]}`)", found[1], 0.2, option=option)
    growth = logs.first_and_last(f"{prefix}/{mean}")
    if growth and growth[0]:
        yield Sign(
            "length", f"mean length, last fifth of the run over first (`{prefix}/{mean}`)", growth[1] / growth[0], 2
        )


def _rewards(logs: RunLogs) -> Iterator[Sign]:
    stds = {n: v for n in _deviations(logs) if (v := logs.mean(n))}
    weights = _weights(logs, [n.removesuffix("std") + "mean" for n in stds])
    if weights is not None:
        stds = {n: v * abs(w) for (n, v), w in zip(stds.items(), weights, strict=True)}
        stds = {n: v for n, v in stds.items() if v > 1e-4 * max(stds.values())}  # a weight of 0 is one to watch only
    if len(stds) >= 2:
        large, small = max(stds, key=lambda n: stds[n]), min(stds, key=lambda n: stds[n])
        how = "before weights" if weights is None else "with their weights"
        what = f"standard deviation of `{large}` over that of `{small}`, {how}"
        yield Sign("several_rewards", what, stds[large] / stds[small], 3)


def _deviations(logs: RunLogs) -> list[str]:
    return [n for n in logs.series if n.startswith("rewards/") and n.endswith("/std")]


def _weights(logs: RunLogs, means: list[str]) -> list[float] | None:
    """Weights of reward functions, read from the logs: TRL logs the mean of each and the mean of their weighted sum.

    None where the logs do not determine them: too few steps, means that move together, completions without a reward.
    """
    import numpy as np

    columns = [logs.series.get(name, ()) for name in means]
    total = logs.series.get("reward", ())
    if not means or len(total) < len(means) + 2 or any(len(column) != len(total) for column in columns):
        return None
    x, y = np.array(columns).T, np.array(total)
    size = np.abs(x).max(axis=0) + 1e-12
    found, _, rank, _ = np.linalg.lstsq(x / size, y, rcond=1e-6)
    if rank < len(means) or np.abs(x / size @ found - y).max() > 1e-4 * np.abs(y).max():
        return None
    return [float(w) for w in found / size]


def _agents(logs: RunLogs) -> Iterator[Sign]:
    if found := _first(logs, "tools/call_frequency"):
        yield Sign("agents", "calls of tools per completion (`tools/call_frequency`)", found[1], 0.5)
    if found := _first(logs, "num_turns/mean", "training/num_turns/mean"):
        yield Sign("agents", f"messages per rollout (`{found[0]}`; 2 is a single turn)", found[1], 3)
    if found := _first(logs, "turn_control/turns", "tool_call_counts/mean"):
        yield Sign("agents", f"turns or calls per rollout (`{found[0]}`)", found[1], 2)


def _age(logs: RunLogs) -> Iterator[Sign]:
    names = ("rl_plugins/staleness_mean", "training/off_policy/trajectory_staleness/mean")
    if found := _first(logs, *names):
        yield Sign("stale", f"updates between sampling and training (`{found[0]}`)", found[1], 1)
    if found := _first(logs, "clip_ratio/region_mean", "actor/pg_clipfrac"):
        yield Sign("stale", f"share of tokens clipped (`{found[0]}`)", found[1], 0.1)


def _course(logs: RunLogs) -> Iterator[Sign]:
    for name in ("entropy", "actor/entropy"):
        if (ends := logs.first_and_last(name)) and ends[0] > 0:
            what = f"entropy, last fifth of the run over first (`{name}`: {ends[0]:.3g} to {ends[1]:.3g})"
            yield Sign("exploration", what, ends[1] / ends[0], 0.5, below=True)
    for name in ("epoch", "training/epoch"):
        if values := logs.series.get(name):
            yield Sign("few_prompts", f"passes over the dataset (`{name}`)", max(values), 3)
    if found := _first(logs, "kl", "actor/kl_loss"):
        yield Sign("forgetting", f"KL to the reference policy per token (`{found[0]}`)", found[1], 0.1)
