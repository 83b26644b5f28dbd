"""`rl-plugins fuse`: prints the plan, then writes the fused model into a folder that appears when it is whole."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rl_plugins.commands.fuse.folder import FLOATS, ModelFolder, StoredTensor
from rl_plugins.commands.fuse.plan import FusionPlan
from rl_plugins.core.errors import ConfigError
from rl_plugins.tools.fusion import Floats, FusionRule, TensorFusion, delta, spans


@dataclasses.dataclass
class Told:
    """What one expert brought, over all tensors."""

    squares: float = 0.0
    survivors: int = 0


def fuse_folders(base: Path, experts: Sequence[str], out: Path, rule: FusionRule, dry_run: bool) -> None:
    """Fuses model folders and says what was done.

    Raises:
        ConfigError: folders that do not fit, before anything is written; weights that are not finite, after which
            nothing is left of the output.
    """
    console, plan = Console(), FusionPlan.of(base, experts, out, rule)
    _print_plan(console, plan)
    if dry_run:
        print("Nothing was written (--dry-run).")
        return
    bar = Progress(TextColumn("fusing"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console)
    with bar:
        task = bar.add_task("fusing", total=plan.writes)
        told, differing = write(plan, lambda done: bar.advance(task, done))
    _print_told(console, plan, told, differing)


def write(plan: FusionPlan, progress: Callable[[int], None] = lambda _: None) -> tuple[dict[str, Told], list[str]]:
    """Writes the fused model into a hidden folder and renames that when it is whole.

    Returns:
        What each expert brought, and the tensors of integers that differ between base and experts.
    """
    told = {expert.name: Told() for expert in plan.experts}
    differing: list[str] = []
    plan.out.absolute().parent.mkdir(parents=True, exist_ok=True)
    hidden = Path(tempfile.mkdtemp(prefix=f".{plan.out.name}.", dir=plan.out.absolute().parent))
    try:
        for file in plan.base.files:
            _write_file(plan, file, hidden / file.name, told, differing, progress)
        for path in [*plan.copied, *([plan.base.index] if plan.base.index else [])]:
            shutil.copyfile(path, hidden / path.name)
        (hidden / "fusion.json").write_text(json.dumps(_provenance(plan), indent=2) + "\n", encoding="utf-8")
        hidden.chmod(0o777 & ~_umask())
        os.replace(hidden, plan.out)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return told, differing


def _provenance(plan: FusionPlan) -> dict[str, object]:
    return {"experts": [expert.name for expert in plan.experts], **dataclasses.asdict(plan.rule)}


def _umask() -> int:
    os.umask(found := os.umask(0))
    return found


def _write_file(
    plan: FusionPlan,
    source: Path,
    target: Path,
    told: dict[str, Told],
    differing: list[str],
    progress: Callable[[int], None],
) -> None:
    """One file of the base with the same header and other numbers."""
    tensors = {name: tensor for name, tensor in plan.base.tensors.items() if tensor.file == source}
    begin = min((tensor.start for tensor in tensors.values()), default=source.stat().st_size)
    with source.open("rb") as old, target.open("wb") as new:
        new.write(old.read(begin))
        for name, tensor in tensors.items():
            if tensor.dtype in FLOATS:
                _write_fused(plan, name, new, told, progress)
            else:
                _copy(tensor, new, progress)
                if any(_differs(tensor, expert.tensors[name]) for expert in plan.experts):
                    differing.append(name)
        new.flush()
        os.fsync(new.fileno())


def _write_fused(
    plan: FusionPlan, name: str, new: BinaryIO, told: dict[str, Told], progress: Callable[[int], None]
) -> None:
    base = plan.base.tensors[name]
    deltas = {expert.name: _delta(name, expert, base) for expert in plan.experts}
    fusion = TensorFusion(deltas, plan.rule, plan.base.shared.get(name, name))  # tied weights get the same dropout
    dtype = FLOATS[base.dtype]
    for span in spans(base.size):
        fused = torch.from_numpy(fusion.added(start := base.floats(span), span)).to(dtype)
        if not bool((torch.isfinite(fused) | torch.from_numpy(~np.isfinite(start))).all()):
            raise ConfigError(
                f"the fused tensor {name} has numbers beyond the range of {base.dtype}. Nothing was written. Look at "
                f"--normalize and --keep, or save the base in BF16 or F32."
            )
        new.write(fused.view(torch.uint8).numpy().tobytes())
        progress(len(fused) * dtype.itemsize)
    for expert, norm in fusion.norms.items():
        told[expert].squares += norm**2
        told[expert].survivors += fusion.survivors[expert]


def _delta(name: str, expert: ModelFolder, base: StoredTensor) -> Floats:
    found = np.empty(base.size, np.float32)
    for span in spans(base.size):
        found[span] = delta(expert.tensors[name].floats(span), base.floats(span))
        if not np.isfinite(found[span]).all():
            raise ConfigError(
                f"the tensor {name} of `{expert.name}` or of the base has numbers that are not finite. Nothing was "
                f"written. Look at the training run of `{expert.name}`."
            )
    return found


def _copy(tensor: StoredTensor, new: BinaryIO, progress: Callable[[int], None]) -> None:
    for span in spans(tensor.length):
        new.write(tensor.raw(span.start, span.stop - span.start))
        progress(span.stop - span.start)


def _differs(a: StoredTensor, b: StoredTensor) -> bool:
    return any(a.raw(s.start, s.stop - s.start) != b.raw(s.start, s.stop - s.start) for s in spans(a.length))


def _print_plan(console: Console, plan: FusionPlan) -> None:
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


def _print_told(console: Console, plan: FusionPlan, told: dict[str, Told], differing: list[str]) -> None:
    total = sum(plan.base.tensors[name].size for name in plan.fused) or 1
    table = Table("expert", "L2 norm of its delta", "share of the numbers it changes", box=None)
    for name, found in told.items():
        table.add_row(Text(name), f"{math.sqrt(found.squares):.4g}", f"{found.survivors / total:.1%}")
    console.print(table)
    if differing:
        print(f"Warning: {len(differing)} tensors of integers differ between the folders, for example {differing[0]}. "
              f"The base's were copied.")  # fmt: skip
    print(f"Written: {plan.out}")
