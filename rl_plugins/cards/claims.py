"""What papers say of their methods, and what became of it on the bench (`rl-plugins bench`).

A claim is in the card of its method, as a difference that the bench measures; it was written before its runs. What was
measured is in `claims.json`, which `rl-plugins bench --publish` writes. :func:`decide` is the only rule for verdicts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from rl_plugins.core.errors import ConfigError
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file

# What the metrics of claims mean.
MEASURES: Mapping[str, str] = {
    "right": "right answers on held-out prompts (share)",
    "clean": "right answers, each step right and nothing superfluous, held out (share)",
    "tidy": "held-out answers without a superfluous mark (share)",
    "steps": "right steps on held-out prompts (share)",
    "solved": "held-out prompts solved in at least one of 4 tries (share)",
    "solved_8": "held-out prompts solved in at least one of 8 tries (share)",
    "agree": "held-out answers equal to those to other wordings (share of pairs)",
    "length": "characters per held-out answer",
    "no_signal": "rollouts in groups of equal rewards (share)",
    "entropy": "entropy per token in training (nats)",
    "score": "score of agents in held-out episodes (0 to 1)",
    "tokens": "tokens decoded until the end",
    "rows": "rows made until the end",
}
Verdict = Literal["helps", "harmful", "within", "cannot be seen here", "failed", "not run", "not tested"]


@dataclass(frozen=True)
class PaperClaim:
    """One claim. Tasks, metrics, variants and cost units are those of `rl-plugins bench`, which checks their names.

    Args:
        method: the method or bundle it is about.
        says: what the paper says, with its own figure where it gives one.
        task: where it should show; empty: the bench cannot test it.
        metric: what is measured.
        better: the direction that the paper promises.
        least: smallest difference that matters, in units of the metric.
        budget: cost unit that is equal in both.
        than: variant that it is compared with.
        variant: variant that is run; empty: the method.
        control: variant that is the host's own way to the same thing; with " in TASK" if it is one of another task.
        no_control: why there is none.
        untested: why no task tests it.
        written: day from which on the claim reads so, if it was written anew after runs of an earlier wording.

    Raises:
        ConfigError: neither a task nor a reason, or both; a task without a control and without a reason, or with both.
    """

    method: str
    says: str
    task: str = ""
    metric: str = "right"
    better: Literal["higher", "lower"] = "higher"
    least: float = 0.02
    budget: str = "steps"
    than: str = "grpo"
    variant: str = ""
    control: str = ""
    no_control: str = ""
    untested: str = ""
    written: str = ""

    def __post_init__(self) -> None:
        if bool(self.task) == bool(self.untested):
            raise ConfigError(f"The claim of {self.method} needs a task, or `untested` with the reason; one of both.")
        if self.task and bool(self.control) == bool(self.no_control):
            raise ConfigError(
                f"The claim of {self.method} in {self.task} needs a `control`, the host's own way to the same thing, "
                f"or `no_control` with the reason; one of both."
            )

    @property
    def label(self) -> str:
        """The variant that is run."""
        return self.variant or self.method

    @property
    def control_place(self) -> tuple[str, str]:
        """Variant and task of the control."""
        variant, _, task = self.control.partition(" in ")
        return variant, task or self.task


def decide(told: Mapping[str, Any]) -> tuple[Verdict, str]:
    """The verdict on an entry of `claims.json`, and which of its differences decides, or would if it were run.

    A difference has a `mean` and the ends `low` and `high` of its 95 % interval, in the unit and with the sign of the
    metric, and the size of the effect that would have been `seen` in four of five cases. The entry's own, "", is to the
    variant that the claim is compared with. A method that is ahead there, by `least` or more, has to be ahead of its
    controls, too, those in `against`: "tokens", the same variant at equal tokens decoded, and "control", the host's own
    way to the same thing. The difference in which it does worst then decides.

    Returns:
        "helps": above zero in all. "harmful": below zero, by `least` or more. "within": neither, and `least` would have
        been seen. "cannot be seen here": everything else, and a method that is ahead and whose control was not run.
        Three are facts and no verdicts: "failed", "not run", "not tested".
    """
    if "mean" not in told:
        return "not tested" if told.get("untested") else "failed" if told.get("error") else "not run", ""
    least, turned = told["least"], {name: _turned(d, told["better"]) for name, d in measured(told).items()}
    by = ""
    if turned[""][0] > 0 and turned[""][1] >= least:
        by = min(turned, key=lambda name: turned[name][0])
        if turned[by][0] > 0:
            lacking = "control" in told and "control" not in turned
            return ("cannot be seen here", "control") if lacking else ("helps", by)
    _, mean, high = turned[by]
    if high < 0 and mean <= -least:
        return "harmful", by
    return "within" if measured(told)[by]["seen"] <= least else "cannot be seen here", by


def ahead(told: Mapping[str, Any]) -> bool:
    """Whether the whole interval to what the claim names is on the side that the paper promises."""
    return _turned(told, told["better"])[0] > 0


def measured(told: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The differences of an entry: its own, "", and those to its controls; empty if it was not run."""
    return {"": told, **told.get("against", {})} if "mean" in told else {}


def _turned(d: Mapping[str, Any], better: str) -> tuple[float, float, float]:
    """Low, mean and high, positive where the method is the better one."""
    return (d["low"], d["mean"], d["high"]) if better == "higher" else (-d["high"], -d["mean"], -d["low"])


@cache
def claims() -> tuple[PaperClaim, ...]:
    """All claims, by method."""
    return tuple(claim for name in registry.all_names() for claim in claims_of(name))


def claims_of(method: str) -> list[PaperClaim]:
    """Those of a method or bundle."""
    return [PaperClaim(method, **claim) for claim in card_file(method).claims]


@cache
def outcomes() -> tuple[Mapping[str, Any], ...]:
    """The claims with our figures, as the package carries them."""
    return tuple(json.loads(files("rl_plugins.cards").joinpath("claims.json").read_text(encoding="utf-8")))


def outcomes_of(method: str) -> list[Mapping[str, Any]]:
    """Those of a method or bundle."""
    return [told for told in outcomes() if told["method"] == method]


# ---- as text


def size(x: float, sign: str = "") -> str:
    """A size in the unit of a metric: shares with three digits, tokens with none."""
    return f"{x:{sign}.{3 if abs(x) < 10 else 0}f}"


def moved(metric: str, change: float) -> str:
    """A metric and where it went: "fewer rollouts in groups of equal rewards (share)".

    Args:
        change: above 0 where it went up.
    """
    words = ("lower", "higher") if metric in ("entropy", "score") else ("fewer", "more")
    return f"{words[change > 0]} {MEASURES[metric]}"


def promised(told: Mapping[str, Any]) -> str:
    """The metric of a claim in the direction that the paper promises."""
    return moved(told["metric"], 1 if told["better"] == "higher" else -1)


def numbers(d: Mapping[str, Any]) -> str:
    """ "+0.061 (+0.022 to +0.100)", in the unit and with the sign of the metric."""
    return f"{size(d['mean'], '+')} ({size(d['low'], '+')} to {size(d['high'], '+')})"


def name_of(told: Mapping[str, Any], difference: str) -> str:
    """What a difference is to: "`grpo`", "`grpo` at equal tokens", "its control `rloo`"."""
    if difference == "control":
        variant, _, task = told["control"].partition(" in ")
        return f"its control `{variant}`" + (f" in `{task}`" if task else "")
    return f"`{told['than']}`" + (" at equal tokens" if difference else "")


def verdict_text(told: Mapping[str, Any]) -> str:
    """The verdict, how far it reaches, and why it is not better: "within ± 0.013 of its control `rloo`"."""
    verdict, by = decide(told)
    if "mean" not in told or verdict == "helps":
        return verdict
    ahead, to = (f": ahead of {name_of(told, '')}, ", name_of(told, by)) if by else ("", "")
    if by not in measured(told):
        return f"{verdict}{ahead}{to} was not run"
    d = measured(told)[by]
    if verdict == "harmful":
        return verdict + (f"{ahead}behind {to}" if by else "")
    if verdict == "within":
        bound = size(max(abs(d["low"]), abs(d["high"])))
        return f"within ± {bound}" + (f" of {to}{ahead.removesuffix(', ')}" if by else "")
    return f"{verdict}{f'{ahead}not of {to};' if by else ':'} {size(d['seen'])} would have been seen"


def claim_lines(method: str) -> list[str]:
    """What the paper says, and what became of it, a line each."""
    told = outcomes_of(method) or [asdict(claim) for claim in claims_of(method)]  # those of a plugin are not measured
    return [f"{one['says']} {_became(one)}" for one in told]


def _became(told: Mapping[str, Any]) -> str:
    if told.get("untested"):
        return f"Not tested: {told['untested']}"
    lower = ", lower is better" if told["better"] == "lower" else ""
    where = f"{told['metric']} in {told['task']} at equal {told['budget'].replace('_', ' ')}{lower}"
    found = [f"{numbers(d)} to {name_of(told, name)}" for name, d in measured(told).items()]
    seeds = [f"{told['seeds']} seeds"] if found else []
    return f"Here ({where}): {'; '.join([verdict_text(told), *found, *seeds])}."
