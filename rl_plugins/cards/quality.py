"""How good the gradients of methods are, as `rl-plugins bench --quality --publish` measured it (`quality.json`)."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from rl_plugins.kit.break_even import break_even

BASELINE = "grpo"
# What is told of a world, the first as a ratio to GRPO.
TARGETS: Mapping[str, Sequence[str]] = {
    "judged": ("pass@1", "sound"),
    "rewards": ("reward", "right", "format", "brevity"),
    "sequences": ("pass@1", "short and right"),
}
USUAL = ("pass@1", "pass@8")


@cache
def measured() -> Mapping[str, Any]:
    """The summary that the package carries."""
    return dict(json.loads(files("rl_plugins.cards").joinpath("quality.json").read_text(encoding="utf-8")))


def targets_of(world: str) -> Sequence[str]:
    """What is told of a world."""
    return TARGETS.get(world, USUAL)


def places(told: Mapping[str, Any]) -> dict[tuple[str, str], dict[int, Mapping[str, Any]]]:
    """(world, variant) -> rollouts of a batch, ascending -> figures."""
    found: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for p in sorted(told["places"], key=lambda p: p["rollouts"]):
        found.setdefault((p["world"], p["variant"]), {})[p["rollouts"]] = p
    return found


def lines_of(told: Mapping[str, Any], method: str) -> list[str]:
    """What a card says of a method, a line for each world and variant."""
    by, lines = places(told), []
    for (world, variant), sizes in by.items():
        if method not in next(iter(sizes.values()))["methods"]:
            continue
        if made := {n: p for n, p in sizes.items() if "refused" not in p}:
            lines.append(f"{world}, {variant}: {sentence(made, by[world, BASELINE], targets_of(world))}")
        else:
            lines.append(f"{world}, {variant}: refused. {sizes[min(sizes)]['refused']}")
    return lines + [f"{t['world']}, {t['variant']}: {trained(t)}." for t in told["trainings"] if method in t["methods"]]


def trainings_of(methods: Collection[str]) -> list[Mapping[str, Any]]:
    """Runs of many steps with exactly these methods."""
    return [t for t in measured()["trainings"] if set(t["methods"]) == set(methods)]


def trained(told: Mapping[str, Any]) -> str:
    """What a run of many steps gave."""
    mean, low, high = told["reward"]
    said = f"after training a mean reward of {mean:.3f} ({low:.3f} to {high:.3f})"
    others = {"to GRPO": told["difference"]} if "difference" in told else {}
    others |= {f"to `{name}` at equal rollouts": apart for name, apart in told.get("at_equal_rollouts", {}).items()}
    for name, (mean, low, high) in others.items():
        said += f", {mean:+.3f} {name} ({low:+.3f} to {high:+.3f})"
    return said


def sentence(sizes: Mapping[int, Any], base: Mapping[int, Any], targets: Sequence[str]) -> str:
    """Progress as a ratio to GRPO at each size, direction, noise, and the batches in which it makes more progress."""
    first, largest = targets[0], max(sizes)
    ratios = [
        f"{ratio[0]:.2f} x GRPO's at {n:,} rollouts ({ratio[1]:.2f} to {ratio[2]:.2f})"
        for n, p in sizes.items()
        if (ratio := p["ratio"].get(first))
    ] or [f"{100 * p['progress'][first][0]:.1f} % at {n:,} rollouts" for n, p in sizes.items()]
    way = sizes[largest]["direction"]
    parts = [f"progress for {first} " + ", ".join(ratios)]
    parts.append("direction " + ", ".join(f"{way[t][0]:.2f} for {t}" for t in targets))
    if largest in base and "noise" in base[largest]:
        more = {t: ahead(sizes, base, t) for t in targets[:2]}
        told = more[first] + "".join(f", for {t} {said}" for t, said in more.items() if said != more[first])
        parts.append(f"{sizes[largest]['noise'][0] / base[largest]['noise'][0]:.1f} x its noise: {told}")
    return "; ".join(parts) + "."


def ahead(sizes: Mapping[int, Any], base: Mapping[int, Any], target: str) -> str:
    """The batches in which it makes more progress than GRPO, from direction and noise of the largest batch measured.
    Directions whose intervals overlap count as equal. Nothing is said unless a measured size shows a difference, and
    only what was measured where a size contradicts the rest: noise that does not fall with the rollouts."""
    seen = {n: sign for n in sizes if n in base and (sign := _sign(sizes[n], base[n], target))}
    if not seen:
        return "no difference was seen"
    n = max(set(sizes) & set(base))
    a, b = sizes[n], base[n]
    (way, *ends), (than, *others) = a["direction"][target], b["direction"][target]
    if ends[0] <= others[1] and others[0] <= ends[1]:
        way = than
    low, high = break_even(way, a["noise"][0], than, b["noise"][0], n)
    if any((low < n < high) != (sign == "more") for n, sign in seen.items()):
        return ", ".join(f"{sign} progress in batches of {n:,} rollouts" for n, sign in seen.items())
    if low == math.inf:
        return "less progress in batches of any size"
    if high < math.inf:
        return f"more progress in batches up to {high:,.0f} rollouts"
    return "more progress in batches " + (f"above {low:,.0f} rollouts" if low > 1 else "of any size")


def _sign(a: Mapping[str, Any], b: Mapping[str, Any], target: str) -> str:
    """Whether "more" or "less" progress was measured; by the ratio, or where there is none by both intervals."""
    _, low, high = a["ratio"].get(target) or a["progress"][target]
    than = (1.0, 1.0) if target in a["ratio"] else b["progress"][target][1:]
    return "more" if low > than[1] else "less" if high < than[0] else ""


def quality_lines(method: str) -> list[str]:
    """What the card of a method says of its gradients."""
    return lines_of(measured(), method)
