"""The results of docs/quality.md on the site, and their figures, from `cards/quality.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rl_plugins.cards.quality import ahead, measured, places, targets_of
from rl_plugins.lab.quality.train import ABOUT as TRAINED_ABOUT
from rl_plugins.lab.quality.train import CHOOSING, MEASURED, RATES, STEPS, TRAINED, TRAINED_ROLLOUTS
from rl_plugins.lab.quality.variants import ABSENT, BASELINE
from rl_plugins.lab.quality.worlds import ABOUT
from rl_plugins.tools.gradient_quality import progress_at

FIGURES = "docs/figures/quality"
_POOL = "stored rollouts of a policy, with sketched score functions"
Sizes = Mapping[int, Mapping[str, Any]]


def results() -> str:
    """What docs/quality.md shows on the site."""
    told = measured()
    batches = ", ".join(f"{n} batches of {int(size):,} rollouts" for size, n in told["batches"].items())
    twice, wide = told["replication"], told["spread"]
    parts = [
        f"## Figures\n\nOf each world and seed at most {batches}; {told['hours']:.1f} hours of one core. "
        "Progress is in percent of that of a step along the exact gradient. The ratio is that to GRPO with 8 "
        "rollouts per prompt in the same worlds. The last columns take direction and noise of the largest "
        "batch, and let noise fall with its rollouts.\n",
        f"Replication: of {twice['figures']} ratios, {twice['agree']} agree in worlds of two seeds within 1.96 errors "
        f"over batches. Of {twice['clear']} that differ from 1 in the one, {twice['same']} are on the same side in the "
        "other. Intervals are as many errors over batches as make 95 of 100 figures agree: "
        f"{', '.join(f'{v} for {k}' for k, v in wide.items())}.\n",
    ]
    found = places(told)
    parts += [_proportion(found)]
    parts += [_world(world, found) for world in _worlds(found)]
    parts += [_training(world, told["trainings"]) for world in TRAINED]
    absent = [f"- `{name}`: {why}." for name, why in sorted(ABSENT.items())]
    return "\n".join([*parts, "## Methods that act in no world", "", *absent, ""])


def worlds() -> str:
    """A table of the worlds."""
    about = {**{world: ABOUT.get(world, _POOL) for world in _worlds(places(measured()))}, **TRAINED_ABOUT}
    return "\n".join(["| world | what it is |", "|---|---|", *(f"| {name} | {text} |" for name, text in about.items())])


def _training(world: str, trainings: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"### {world}, trained",
        "",
        f"{TRAINED_ABOUT[world].capitalize()}. {STEPS} steps of {TRAINED_ROLLOUTS} rollouts, plain gradient ascent. "
        f"Each variant has the best of {len(RATES)} rates ({', '.join(map(str, RATES))}) by {CHOOSING} seeds; the "
        f"figures are exact mean rewards after the last step, of {MEASURED} other seeds.",
        "",
        f"| variant | rate | reward | difference to GRPO | rollouts of the run / {STEPS} |",
        "|---|---|---|---|---|",
    ]
    for t in sorted((t for t in trainings if t["world"] == world), key=lambda t: -t["reward"][0]):
        name = f"`{t['variant']}`" if t["methods"] else t["variant"]
        apart = "" if t["variant"] == BASELINE else _interval(t.get("difference"), "+.3f")
        lines.append(f"| {name} | {t['rate']} | {_interval(t['reward'], '.3f')} | {apart} | {t['generated']:.0f} |")
    return "\n".join([*lines, ""])


def _proportion(found: Mapping[tuple[str, str], Sizes]) -> str:
    """How far it holds that noise falls with the number of rollouts."""
    misses = []
    for (world, _), of in found.items():
        small, large, target = min(of), max(of), targets_of(world)[0]
        if small == large or "noise" not in of[small] or "noise" not in of[large]:
            continue
        told = progress_at(of[large]["direction"][target][0], of[large]["noise"][0], large, small)
        misses.append(abs(told - of[small]["progress"][target][0]))
    if not misses:
        return ""
    half, most = (100 * np.quantile(misses, q) for q in (0.5, 0.9))
    return (
        f"Progress in the smallest batch, predicted in this way from the largest, is off by {half:.1f} points in the "
        f"median of {len(misses)} variants, and by at most {most:.1f} in nine of ten.\n"
    )


def _worlds(found: Mapping[tuple[str, str], Sizes]) -> list[str]:
    there = {world for world, _ in found}
    return [*(w for w in ABOUT if w in there), *sorted(there - set(ABOUT))]


def _variants(found: Mapping[tuple[str, str], Sizes], world: str) -> list[tuple[str, Sizes]]:
    """Of a world, what was measured, without refusals; most progress in the smallest batch first."""
    first, smallest = targets_of(world)[0], min(found[world, BASELINE])
    every = {v: {n: p for n, p in of.items() if "noise" in p} for (w, v), of in found.items() if w == world}
    shown = [(v, of) for v, of in every.items() if smallest in of]
    return sorted(shown, key=lambda of: -of[1][min(of[1])]["progress"][first][0])


def _world(world: str, found: Mapping[tuple[str, str], Sizes]) -> str:
    targets, base = targets_of(world), found[world, BASELINE]
    sizes = list(base)
    head = [
        "variant",
        *(f"{targets[0]}, {n:,}" for n in sizes),
        *(f"ratio for {targets[0]}, {n:,}" for n in sizes),
        *(f"direction, {t}" for t in targets),
        "noise",
        *(f"for {t}, than GRPO" for t in targets),
    ]
    lines = [
        f"### {world}",
        "",
        f"{ABOUT.get(world, _POOL)}.".capitalize() + f" Seeds: {base[sizes[0]]['seeds']}.",
        "",
    ]
    lines += [f"![Progress in {world}](figures/quality/{_file(world)})", "", f"| {' | '.join(head)} |"]
    lines.append("|---|" + "---|" * (len(head) - 1))
    for variant, of in _variants(found, world):
        last = of[max(of)]
        cells = [f"`{variant}`" if last["methods"] else variant]
        cells += [f"{100 * of[n]['progress'][targets[0]][0]:.1f}" if n in of else "" for n in sizes]
        cells += [_interval(of[n]["ratio"].get(targets[0])) if n in of else "" for n in sizes]
        cells += [f"{last['direction'][t][0]:.2f}" for t in targets]
        cells.append(f"{last['noise'][0] / base[max(of)]['noise'][0]:.2f}")
        cells += ["" if variant == BASELINE else ahead(of, base, t) for t in targets]
        lines.append(f"| {' | '.join(cells)} |")
    refused = {v: (n, p) for (w, v), of in found.items() if w == world for n, p in of.items() if "refused" in p}
    lines += ["", *(f"- {v}, {n:,} rollouts, was refused: {p['refused']}" for v, (n, p) in refused.items())]
    return "\n".join([*lines, ""])


def _interval(of: Sequence[float] | None, form: str = ".2f") -> str:
    return f"{of[0]:{form}} ({of[1]:{form}} to {of[2]:{form}})" if of else ""


def _file(world: str) -> str:
    return f"{world.replace('=', '_')}.png"


def draw(told: Mapping[str, Any], folder: Path) -> None:
    """A forest plot for each world, for light and dark pages."""
    from rl_plugins.lab.compare import figures

    found = places(told)
    for world in _worlds(found):
        figures.save(folder / _file(world), partial(_forest, found, world))


def _forest(found: Mapping[tuple[str, str], Sizes], world: str) -> Any:
    from matplotlib.figure import Figure

    from rl_plugins.lab.compare.figures import WIDTH, color

    variants, target = _variants(found, world), targets_of(world)[0]
    figure = Figure(figsize=(WIDTH, 1.1 + 0.24 * len(variants)), layout="constrained")
    axes = figure.subplots(1, len(sizes := list(found[world, BASELINE])), sharey=True, squeeze=False)[0]
    for axis, n in zip(axes, sizes, strict=True):
        for i, (variant, of) in enumerate(variants):
            if n not in of:
                continue
            mean, low, high = (100 * x for x in of[n]["progress"][target])
            own = color(2 if of[n]["methods"] else 0)
            axis.plot([low, high], [i, i], color=own, linewidth=1.6)
            axis.plot(mean, i, "o", color=own, markersize=4.5)
            if variant == BASELINE:
                axis.axvline(mean, color=own, linewidth=0.8, linestyle=":")
        axis.set_xlabel(f"progress for {target} (%)\n{n:,} rollouts")
        axis.set_yticks(range(len(variants)), [v for v, _ in variants], fontsize=7.5)
    axes[0].invert_yaxis()
    return figure
