"""What `rl-plugins fuse` prints."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_plugins.commands.fuse.plan import FusionPlan
from rl_plugins.commands.fuse.write import Told


def print_plan(console: Console, plan: FusionPlan) -> None:
    rule, fused = plan.rule, plan.fused
    rows = [
        ("base", f"{plan.base.path}"),
        *((f"expert {expert.name}", str(expert.path)) for expert in plan.experts),
        ("normalize", "L2 norm of each tensor's delta to the experts' mean" if rule.normalize else "no"),
        ("dropout", f"keep {rule.keep:g}, seed {rule.seed}" if rule.keep < 1 else "no"),
        ("select", f"{rule.select_topk:g} of each tensor's elements" if rule.select_topk < 1 else "no"),
        ("erase", "signs against the majority" if rule.erase else "no"),
        ("weights", rule.weights),
        ("fused", f"{len(fused)} tensors, {sum(plan.base.tensors[n].size for n in fused):,} numbers"),
        ("copied", f"{len(plan.base.tensors) - len(fused)} tensors of integers"),
        ("tied", ", ".join(f"{a} = {b}" for a, b in plan.base.shared.items()) or "none stored twice"),
        ("files", ", ".join(path.name for path in plan.copied) or "no config, no tokenizer"),
        ("left out", ", ".join(plan.skipped) or "nothing"),
        ("memory", f"{plan.memory / 1e6:,.1f} MB for deltas"),
        ("writes", f"{plan.out}: {plan.writes / 1e9:,.3f} GB in {len(plan.base.files)} files"),
    ]
    table = Table(show_header=False, box=None)
    for what, value in rows:
        table.add_row(what, Text(value))
    console.print(table)


def print_told(console: Console, plan: FusionPlan, told: dict[str, Told], differing: list[str]) -> None:
    total = sum(plan.base.tensors[name].size for name in plan.fused) or 1
    table = Table("expert", "L2 norm of its delta", "share of the numbers it changes", box=None)
    for name, found in told.items():
        table.add_row(Text(name), f"{math.sqrt(found.squares):.4g}", f"{found.survivors / total:.1%}")
    console.print(table)
    if differing:
        print(f"Warning: {len(differing)} tensors of integers differ between the folders, for example {differing[0]}. "
              f"The base's were copied.")  # fmt: skip
    print(f"Written: {plan.out}")
