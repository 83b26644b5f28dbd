"""The answer as a person reads it: a table, a line for each verdict, a figure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from scipy import stats

from rl_plugins.core.errors import printable, shortened
from rl_plugins.lab.probe.answer import ALIKE, Line, ProbeAnswer
from rl_plugins.lab.quality.variants import BASELINE

CALIBRATION = Path(__file__).with_name("calibration.json")  # made by benchmarks/probe_calibration.py
RANKS = "rank correlation"
VERDICTS = {
    "more": "more progress per rollout",
    "alike": f"no difference beyond a factor of {ALIKE}",
    "less": "less progress per rollout",
    "harmful": "a step in the wrong direction",
    "unclear": "not to be told with this pool",
}
CANNOT = (
    "It cannot see what needs many steps (entropy, plateaus, curricula, old rollouts, clips), nor the KL term, and it "
    "holds for this policy: ask again later in a run, or give --checkpoints."
)


def print_answer(console: Console, answer: ProbeAnswer, host: str) -> None:
    """
    Args:
        host: what the baseline is, in words.
    """
    first, last = answer.targets[0], answer.targets[-1]
    console.print(f"Progress per rollout, relative to {host}; at {answer.rollouts} with its 95 % interval.\n")
    _table(console, answer)
    for target in answer.unclear:
        console.print(
            f"\n{target}: these rollouts do not tell {BASELINE}'s own progress from 0, so there is no ratio. Draw more "
            f"prompts."
        )
    for target in (first, last):
        _sentences(console, answer, target)
    console.print(
        f"\nOne line in twenty is told apart by chance alone. Batches of {answer.measured} rollouts were measured; for "
        f"other sizes, noise falls with the number of rollouts. "
        f"{CANNOT}",
        highlight=False,
    )
    c = json.loads(CALIBRATION.read_text())
    shown = "" if c["low"] > 0 else ", which does not show that it predicts the order of methods"
    console.print(
        f"\nHow far this predicts: over {c['pairs']} pairs of checkpoint and variant, of small policies, the {RANKS} "
        f"between progress here and gain in training was {c['correlation']:.2f} ({c['low']:.2f} to {c['high']:.2f})"
        f"{shown}. Of {c['told']} told to make more or less progress, training agreed in {c['agreed']}. docs/probe.md",
        highlight=False,
    )
    print_absent(console, answer.lines)


def print_later(console: Console, answers: Sequence[ProbeAnswer], names: Sequence[str]) -> None:
    """How far the first policy speaks for later ones.

    Args:
        names: of the later policies.
    """
    if not names:
        return
    target = answers[0].targets[0]
    lines = [{line.name: line for line in in_order(answer.lines, target)} for answer in answers]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "first policy", *names):
        table.add_column(name, justify="left" if not name else "right")
    for name in lines[0]:
        of = [later.get(name) for later in lines]
        table.add_row(name, *("" if x is None else _cell(x, target, answers[0].rollouts, False) for x in of))
    ahead = [{name: line.ahead[target].value for name, line in of.items() if name != BASELINE} for of in lines]
    ranks = [_correlation(ahead[0], later) for later in ahead[1:]]
    table.add_row(RANKS, "", *(f"{r:.2f}" for r in ranks))
    console.print(f"\nProgress for {target} at the first policy and later:\n", markup=False, highlight=False)
    console.print(table)


def _correlation(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    both = [name for name in one if name in other]
    return float(stats.spearmanr([one[n] for n in both], [other[n] for n in both])[0]) if len(both) > 1 else math.nan


def in_order(lines: Sequence[Line], target: str) -> list[Line]:
    """Those with figures, most progress first."""
    return sorted((line for line in lines if line.ahead), key=lambda line: -line.ahead[target].value)


def _table(console: Console, answer: ProbeAnswer) -> None:
    first, *others = answer.targets
    lines = in_order(answer.lines, first)
    sizes = next((list(of) for of in lines[0].ratios.values()), [])
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", *(f"{first}, {n:,}" for n in sizes), *others, "rollouts", "tokens", "signal"):
        table.add_column(name, justify="left" if not name else "right")
    for line in lines:
        cells = [_cell(line, first, n, n == answer.rollouts) for n in sizes]
        cells += [_cell(line, t, answer.rollouts, False) for t in others]
        shown = Text(line.name + (f" ({line.setting})" if line.setting else ""))
        table.add_row(shown, *cells, *_cost(line, answer.lines[0]))
    console.print(table)


def _cell(line: Line, target: str, at: int, whole: bool) -> str:
    if target not in line.ratios:
        return ""
    of = line.ratios[target][at]
    return f"{of.value:.2f}" + (f" ({of.low:.2f} to {of.high:.2f})" if whole else "")


def _sentences(console: Console, answer: ProbeAnswer, target: str) -> None:
    console.print(f"\nFor {target}, at {answer.rollouts} rollouts a batch:", markup=False, highlight=False)
    for word, said in VERDICTS.items():
        found = [x for x in in_order(answer.lines, target) if x.verdict[target] == word and x.name != BASELINE]
        names = [
            x.name + (f" {_cell(x, target, answer.rollouts, False)} x" if target in x.ratios else "") for x in found
        ]
        if names:
            console.print(f"- {said}: {', '.join(names)}.", markup=False, highlight=False)


def print_absent(console: Console, lines: Sequence[Line]) -> None:
    """Why there is nothing to say of the others."""
    if absent := [line for line in lines if line.why_not]:
        console.print(f"\nNot compared ({len(absent)}):")
    for line in absent:
        why = printable(shortened(line.why_not, 160))
        console.print(f"- {line.name}: {why}", markup=False, highlight=False, soft_wrap=True)


def print_replay(console: Console, lines: Sequence[Line]) -> None:
    """The figures of a trace."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "variance of advantages", "effective rows", "rollouts", "tokens", "groups with signal"):
        table.add_column(name, justify="left" if not name else "right")
    for x in lines:
        if x.shares is not None:
            shown = f"{x.shares.spread:.3g}", f"{100 * x.shares.effective:.0f} %"
            table.add_row(x.name, *shown, *_cost(x, lines[0]))
    console.print(table)
    print_absent(console, lines)


def _cost(line: Line, base: Line) -> tuple[str, str, str]:
    """Rollouts and tokens of a batch relative to the baseline, and groups with signal."""
    own, than = line.shares, base.shares
    assert own is not None and than is not None
    rollouts, tokens = own.rollouts / than.rollouts, own.tokens / than.tokens
    return f"{rollouts:.2f}", f"{tokens:.2f}", f"{100 * own.signal:.0f} %"


def draw(answer: ProbeAnswer, target: str, file: Path) -> None:
    """A forest plot, for light and dark pages."""
    from matplotlib.figure import Figure

    from rl_plugins.lab.compare.figures import WIDTH, color, save

    lines = in_order(answer.lines, target)

    def forest() -> Any:
        figure = Figure(figsize=(WIDTH, 1.1 + 0.24 * len(lines)), layout="constrained")
        axis = figure.subplots()
        for i, line in enumerate(lines):
            of, own = line.ratios[target][answer.rollouts], color(0 if line.name == BASELINE else 2)
            axis.plot([of.low, of.high], [i, i], color=own, linewidth=1.6)
            axis.plot(of.value, i, "o", color=own, markersize=4.5)
        axis.axvline(1, color=color(0), linewidth=0.8, linestyle=":")
        axis.set_xlabel(f"progress per rollout for {target}, relative to {BASELINE}, {answer.rollouts:,} rollouts")
        axis.set_yticks(range(len(lines)), [line.name for line in lines], fontsize=7.5)
        axis.invert_yaxis()
        return figure

    save(file, forest)
