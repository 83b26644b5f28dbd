"""Measures of coordination in a report: variants with several agents against a variant with one.

Several agents are in a variant whose program logs `<method>/agent_turns`, as `m_grpo_rollout` does, with
`agent_tokens`, `messages` and `redundancy`. Values are read where the budget ends a run, as all values of a report are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from rl_plugins.lab.compare.costs import Course, Cut
from rl_plugins.tools.messages.metrics import AgentMeans, Coordination, coordination

Ends = Callable[[Course, str, str, float], float]  # `report.ends`

TURNS = "/agent_turns"
MEASURES: Mapping[str, str] = {
    "overhead": "turns more than one agent, relative",
    "message_density": "messages per turn",
    "redundancy": "overlap of the agents' outputs",
    "efficiency": "success / relative turns",
    "error_amplification": "errors / errors of one agent, at equal tokens",
    "tokens_ratio": "tokens per rollout / those of one agent",
}


def measure(cut: Cut, metric: str, ends: Ends) -> dict[str, Any]:
    """Measures of every variant with several agents, by seed; empty without such a variant or one of a single agent.

    Args:
        cut: the runs; the baseline's first.
        metric: the success. Measures of success and error are NaN where it is outside of [0, 1].
        ends: reads a value where the budget ends a run.
    """
    labels = list(dict.fromkeys(label for label, _ in cut.courses))
    several = {label: prefix for label in labels if (prefix := _program(cut, label)) is not None}
    single = next((label for label in labels if label not in several), None)
    if single is None or not several:
        return {}
    cost_unit = cut.cost_unit
    tolerance = math.inf if cost_unit == "tokens_decoded" else 0.1
    found: dict[str, Any] = {"one": single, "metric": metric, "cost_unit": cost_unit, "variants": {}}
    for label, prefix in several.items():
        by_seed = []
        for seed, budget in cut.of.items():
            if (label, seed) not in cut.courses or (single, seed) not in cut.courses:
                continue
            mine, theirs = cut.courses[label, seed], cut.courses[single, seed]
            names = ("turns", "tokens")
            turns, tokens = (ends(mine, f"{prefix}/agent_{name}", cost_unit, budget) for name in names)
            messages, redundancy = (
                ends(mine, f"{prefix}/{name}", cost_unit, budget) for name in ("messages", "redundancy")
            )
            success = [_share(ends(course, metric, cost_unit, budget)) for course in (mine, theirs)]
            one = AgentMeans(
                success[1], _turns_of_one(theirs, cost_unit, budget, ends), _tokens_of_one(theirs, cost_unit, budget)
            )
            by_seed.append(
                coordination(AgentMeans(success[0], turns, tokens, messages, redundancy), one, tolerance=tolerance)
            )
        fields = [f.name for f in dataclasses.fields(Coordination)]
        found["variants"][label] = {name: [getattr(c, name) for c in by_seed] for name in fields}
    return found


def text(found: Mapping[str, Any], label: str, cell: Callable[[list[float]], str]) -> list[str]:
    """Lines of Markdown.

    Args:
        label: what the success is called.
        cell: a mean with its interval.
    """
    variants = found["variants"]
    lines = [f"Several agents against one ({found['one']}); success is {label}:", ""]
    lines += ["| | " + " | ".join(variants) + " |", "|---" * (len(variants) + 1) + "|"]
    for name, what in MEASURES.items():
        cells = [_cell(of[name], cell) for of in variants.values()]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    if not any(_known(of["efficiency"]) for of in variants.values()):
        lines += ["", f"Errors are not compared: {label} is not in [0, 1]. Name a share of successes with --metric."]
    elif found["cost_unit"] != "tokens_decoded" and not all(
        _known(of["error_amplification"]) for of in variants.values()
    ):
        lines += [
            "",
            "Errors are not compared where tokens per rollout differ by more than 10 %, or nobody errs. With --budget "
            "tokens_decoded every variant is read where it has decoded as many tokens as the others.",
        ]
    return lines


def _cell(values: list[float], cell: Callable[[list[float]], str]) -> str:
    if any(map(math.isinf, values)):
        return "infinite: one agent makes no error"
    return cell(values) if _known(values) else "-"


def _known(values: list[float]) -> bool:
    return any(not math.isnan(v) for v in values)


def _share(value: float) -> float:
    return value if 0 <= value <= 1 else math.nan


def _program(cut: Cut, label: str) -> str | None:
    """The method of a variant that logs the turns of several agents."""
    for (name, _), course in cut.courses.items():
        if name == label:
            for line in course.lines:
                for key in line:
                    if key.endswith(TURNS):
                        return key.removesuffix(TURNS)
    return None


def _turns_of_one(course: Course, cost_unit: str, budget: float, ends: Ends) -> float:
    """Turns of a rollout of a single agent: as a method or verl logs them, else one; NaN with tools of TRL."""
    names = {name for line in course.lines for name in line}
    logged = sorted(name for name in names if name.endswith("/turns"))
    if logged:
        return ends(course, logged[0], cost_unit, budget)
    for name in ("num_turns/mean", "training/num_turns/mean"):
        if name in names:
            return ends(course, name, cost_unit, budget) / 2  # verl counts what the user says, too
    return math.nan if "tools/call_frequency" in names else 1.0


def _tokens_of_one(course: Course, cost_unit: str, budget: float) -> float:
    """Tokens decoded per row made, in the last tenth of the budget."""
    at, before = course.at(cost_unit, budget), course.at(cost_unit, 0.9 * budget)
    rows = at["rows_made"] - before["rows_made"]
    if rows > 0:
        return (at["tokens_decoded"] - before["tokens_decoded"]) / rows
    return at["tokens_decoded"] / at["rows_made"] if at["rows_made"] > 0 else math.nan
