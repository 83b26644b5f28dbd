"""The page of a method on the site: what became of its claims, its curves, its costs, and how to rerun it."""

from __future__ import annotations

from rl_plugins.cards.claims import decide, outcomes_of
from rl_plugins.lab.bench.claims import claims_of
from rl_plugins.lab.bench.page import CLAIM_HEAD, PLACES_HEAD, claim_row, place_row
from rl_plugins.lab.bench.published import published


def method_page(method: str, does: str) -> str:
    """The page.

    Args:
        does: what the method does, a line of its card.
    """
    tested = [c for c in outcomes_of(method) if decide(c)[0] != "not tested"]
    untested = [f"- {c['says']} {c['untested']}" for c in outcomes_of(method) if c not in tested]
    variants = [method, *(c.label for c in claims_of(method))]
    places = [place_row(p, f"`{p['variant']}`") for p in published()["places"] if p["variant"] in variants]
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
        *(f"| {c['says']} | {claim_row(c)}" for c in tested),
        "",
        *(["Not tested:", "", *untested, ""] if untested else []),
        "## In each task",
        "",
        "Difference from GRPO in the metric of the task, and totals over GRPO's at equal steps.",
        "",
        PLACES_HEAD,
        *places,
        "",
        "## Run it again",
        "",
        f"    rl-plugins bench {method} --dry-run                       # which runs, and how long they take",
        f"    rl-plugins bench {method} --against benchmarks/bench      # run, and compare with our raw results",
        "",
    ]
    return "\n".join(lines)
