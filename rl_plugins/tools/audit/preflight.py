"""The audit before training: parts A (reward functions) and B (dataset) on a run that is not started."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.rollouts import Run
from rl_plugins.tools.audit import contrast, duplicates, lint, metamorphic, stability
from rl_plugins.tools.audit.answers import Corrupter, Renderer, WrongAnswers, kind_of, text_answer
from rl_plugins.tools.audit.contrast import Contrast
from rl_plugins.tools.audit.findings import AuditReport, Finding, Severity
from rl_plugins.tools.audit.rows import DatasetRows, answer_column, columns_of, spread
from rl_plugins.tools.audit.scoring import RewardCaller

SAMPLE = 32  # rows for the parts that need many calls per row


@dataclass(frozen=True)
class Options:
    """What an audit is told.

    Args:
        answer_column: of the right answer; empty: the first of `rows.ANSWER_COLUMNS`.
        gold_renderer: (answer, row) -> completion; None: one of `answers.TEMPLATES`.
        corrupter: (answer, row, rng) -> wrong answers; None: `answers.WrongAnswers`.
        wrong_answers: of each row, with the default corrupter.
        max_rows: of the dataset that are looked at; more are sampled.
        tol: difference of rewards that is none, as a share of their span.
        tol_stochastic: the same for two calls with the same completion; 0: they must agree.
        tau: Jaccard index from which two prompts are nearly equal.
        delta: difference of two rewards that is told, as a share of their span.
        declared_prompt_features: names of `metamorphic.FEATURES` that the reward may depend on.
        seed: of samples and wrong answers.
    """

    answer_column: str = ""
    gold_renderer: Renderer | None = None
    corrupter: Corrupter | None = None
    wrong_answers: int = 2
    max_rows: int = 10_000
    tol: float = 1e-6
    tol_stochastic: float = 0.0
    tau: float = 0.85
    delta: float = 0.5
    declared_prompt_features: tuple[str, ...] = ()
    seed: int = 0


@dataclass
class Preflight:
    """What an audit before training found.

    Args:
        report: all of it.
        contrast: of the rows that were looked at; None where no reward function or answer could be had.
    """

    report: AuditReport
    contrast: Contrast | None = None
    inverted: tuple[int, ...] = field(default_factory=tuple)


def preflight(run: Run, options: Options, progress: Callable[[str, int], None] = lambda part, n: None) -> Preflight:
    """Audits the reward functions and the dataset of a run.

    Args:
        progress: called with the part of the audit and the completions that were scored.
    """
    began = time.perf_counter()
    rng = np.random.default_rng([options.seed, 18])
    found: list[Finding] = []
    not_served = {f"reward function {name}": why for name, why in run.unreachable_rewards}
    facts: dict[str, Any] = {"reward functions": [f.name for f in run.reward_functions]}
    facts["columns they take"] = [f"{f.name}: {columns_taken(f.source, run.columns)}" for f in run.reward_functions]
    for f in run.reward_functions:
        found += lint.findings(f.name, f.source)
    if run.dataset is None or not run.dataset_size:
        for part in (contrast.PART, metamorphic.PART, stability.PART, duplicates.PART):
            not_served[part] = "the dataset is a stream, or not on this machine"
        return Preflight(AuditReport.of(found, not_served, facts, looked=False))
    rows = DatasetRows(run.dataset, options.max_rows, rng)
    facts |= {"dataset rows": rows.size, "rows looked at": len(rows)}
    golds, c, scorer = _golds(rows, options, not_served), None, None
    part = contrast.PART
    if not run.reward_functions:
        for name in (contrast.PART, metamorphic.PART, stability.PART):
            not_served[name] = "no reward function can be called here"
    elif golds:
        scorer = RewardCaller(run.reward_functions, lambda n: progress(part, n))
        column = answer_column(rows[rows.numbers[0]], options.answer_column)
        corrupter = options.corrupter or WrongAnswers(golds, options.wrong_answers)
        c = contrast.contrast(rows, column, scorer, options.gold_renderer, corrupter, rng)
        found += contrast.findings(rows, c, scorer, column, options.tol)
        facts |= {"answer column": column, "answers are": kind_of(golds), "answers were written as": c.template}
        part = metamorphic.PART
        places = spread(range(len(rows)), SAMPLE)
        found += metamorphic.findings(rows, c, scorer, places, options.tol, options.declared_prompt_features)
        part = stability.PART
        found += stability.findings(rows, c, scorer, places, rng, options.tol_stochastic)
        found += _errors(scorer)
        facts["completions scored"] = scorer.calls
    found += duplicates.findings(rows, c, golds, scorer, options.tau, options.delta, options.seed)
    facts["seconds"] = round(time.perf_counter() - began, 2)
    inverted = () if c is None else tuple(c.rows[c.inverted(options.tol)].tolist())
    return Preflight(AuditReport.of(found, not_served, facts, c is not None), c, inverted)


def _golds(rows: DatasetRows, options: Options, not_served: dict[str, str]) -> Sequence[str]:
    """Right answers of the rows; none where the dataset has no column of them."""
    try:
        column = answer_column(rows[rows.numbers[0]], options.answer_column)
        return [text_answer(columns_of(row)[column]) for row in rows]
    except ConfigError as e:
        if options.answer_column:
            raise
        for part in (contrast.PART, metamorphic.PART, stability.PART):
            not_served[part] = str(e)
        return []


def _errors(scorer: RewardCaller) -> list[Finding]:
    return _without_reward(scorer) + [
        Finding(
            "warn",
            "reward functions",
            "raised",
            f"A reward function raised {times} times: {message}.",
            (),
            {"n": times},
        )
        for message, times in scorer.errors.items()
    ]


def _without_reward(scorer: RewardCaller) -> list[Finding]:
    """Functions that gave no completion a reward. It is critical if they raised, or if there is no other function."""
    if not scorer.calls:
        return []
    found = []
    for name, scored, raised in zip(scorer.names, scorer.scored, scorer.raised, strict=True):
        if scored:
            continue
        how = f"raised on {raised} of them" if raised else "answered None or NaN"
        severity: Severity = "critical" if raised or not scorer.scored.any() else "warn"
        text = f"`{name}` gave none of the completions a reward: it {how}."
        found.append(Finding(severity, "reward functions", "no_reward", text, (), {"raised": int(raised)}))
    return found


def columns_taken(function: Callable[..., Any], columns: Sequence[str]) -> str:
    """The dataset columns that a reward function names as arguments, or that it takes them all."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return "not known"
    named = [name for name in parameters if name in columns]
    rest = [f"**{p.name}" for p in parameters.values() if p.kind == p.VAR_KEYWORD]
    return " ".join(named or (f"all, as {name}" for name in rest)) or "none"
