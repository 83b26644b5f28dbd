"""The page of a method on the site: what became of its claims, its curves, its costs, and how to rerun it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_plugins.cards.claims import numbers, outcomes_of
from rl_plugins.lab.bench.claims import claims_of
from rl_plugins.lab.bench.page import CLAIM_HEAD, SIGN, claim_row
from rl_plugins.lab.bench.published import COSTS, place_of, published
from rl_plugins.lab.bench.tasks import TASKS


def method_page(method: str, does: str) -> str:
    """The page.

    Args:
        does: what the method does, a line of its card.
    """
    claims = [c for c in outcomes_of(method) if c["verdict"] != "not tested"]
    lines = [
        f"# `{method}` on the bench",
        "",
        f"{does}. Its [card](../methods.md#{method}) has the rule; "
        "[the page of the bench](../bench.md) says how tasks are made and verdicts are reached. Policies have 0.6 "
        "million parameters and tasks are generated.",
        "",
        f"![Curves of {method}](../figures/bench/{method}.png)",
        "",
        "Mean over seeds with the 95 % interval of the mean. Verdicts read the paired difference, whose interval is "
        "narrower.",
        "",
        "## Claims",
        "",
        "| the paper says | " + CLAIM_HEAD.removesuffix("---|"),
        *(f"| {c['says']} | {claim_row(c)}" for c in claims),
        "",
    ]
    untested = [c for c in outcomes_of(method) if c["verdict"] == "not tested"]
    if untested:
        lines += ["Not tested:", "", *(f"- {c['says']} {c['untested']}" for c in untested), ""]
    return "\n".join([*lines, *_places(method), *_rerun(method)])


def _places(method: str) -> list[str]:
    variants = dict.fromkeys([method, *(c.label for c in claims_of(method))])
    found = [(variant, task, p) for variant in variants for task in TASKS if (p := place_of(variant, task))]
    if not found:
        return []
    costs = {(c["variant"], c["task"]): c for c in published()["costs"]}
    lines = [
        "## In each task",
        "",
        "Difference from GRPO in the metric of the task at equal steps, and totals over GRPO's.",
        "",
        "| variant | task | difference | seeds | | " + " | ".join(COSTS.values()) + " |",
        "|---|---|---|---|---|" + "---|" * len(COSTS),
    ]
    for variant, task, place in found:
        cost = " | ".join(_ratio(costs.get((variant, task), {}), name) for name in COSTS)
        word = f"{SIGN[place['mark']]} {place['mark']}"
        told = numbers(place) or place.get("error", "")
        lines.append(f"| `{variant}` | {task} | {told} | {place.get('seeds', '')} | {word} | {cost} |")
    return [*lines, ""]


def _ratio(cost: Mapping[str, Any], name: str) -> str:
    return f"{cost[name]:.2f}" if name in cost else ""


def _rerun(method: str) -> list[str]:
    return [
        "## Run it again",
        "",
        f"    rl-plugins bench {method} --dry-run                       # which runs, and how long they take",
        f"    rl-plugins bench {method} --against benchmarks/bench      # run, and compare with our raw results",
        "",
    ]
