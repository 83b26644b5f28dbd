"""Which of three methods brought what? `rl-plugins compare --attribute` on the demo, in TRL's real trainer.

The embedded policy of 78,272 parameters learns to sort digits. The methods are `vade` (prompts), `mc_grpo`
(advantages) and `minpro` (loss); the 8 variants are all subsets, the empty one is TRL's GRPO. A run has 40 optimizer
steps of 128 rollouts, 4 per prompt, two updates per batch, and the binary reward. The score is the share of right
answers on 320 held-out prompts, 4 answers each, after the last step. All variants have the same number of optimizer
steps.

Shown: the Shapley value of each method, with the interval of the command (bootstrap over seeds) and a Student
interval over the values of the seeds; what a method brings alone; what it brings to the other two; and how far the
values are from summing to what all three bring.

    python examples/evidence/attribution.py --seeds 5 --out evidence-results

The runs are kept in the folder `attribution-runs` there; the same command goes on where it was cut off.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from common import across, arguments, interval, save
from matplotlib.figure import Figure

from rl_plugins.lab.compare.attribution import Cube
from rl_plugins.lab.compare.comparison import RunOptions
from rl_plugins.lab.compare.figures import panels
from rl_plugins.lab.compare.user_runs import compare_trl
from rl_plugins.lab.demo import settings
from rl_plugins.lab.demo.policy import load_policy
from rl_plugins.tools.attribution import attribute

METHODS = ("vade", "mc_grpo", "minpro")
STEPS, METRIC = 40, "eval_rewards/exact/mean"


def train(seeds: int, out: Path) -> dict[str, Any]:
    """`rl-plugins compare run.yaml vade mc_grpo minpro --attribute`, with the demo's parameters of the methods."""
    os.environ.update(settings.environment(out))
    policy, data = load_policy().absolute(), settings.write_data(out / "data").absolute()
    values = settings.config(policy, data, METHODS, long=False) | {
        "max_steps": STEPS,
        "eval_steps": STEPS,
        "eval_on_start": False,
        "num_generations_eval": 4,
        "per_device_eval_batch_size": 640,
    }
    run = out / "run.yaml"
    run.write_text(yaml.safe_dump(values))
    params = {m: dict(given) for m in METHODS if (given := settings.demo_params(m))}
    words = [str(run), *METHODS]
    compare_trl(words, RunOptions(out, range(seeds)), [METRIC], json.dumps(params), attribute=True)
    return {name: json.loads((out / f"{name}.json").read_text()) for name in ("summary", "attribution")}


def evaluated(found: dict[str, Any]) -> dict[str, Any]:
    cube, variants = Cube(METHODS), found["summary"]["variants"]
    score = {s: np.array(variants[cube.label(s) or "grpo"]["metrics"][METRIC]["end"]) for s in cube.subsets}
    none, whole = frozenset(), frozenset(METHODS)
    per_seed = [
        attribute({s: of[k] for s, of in score.items()}, METHODS).values for k in range(len(score[none]))
    ]  # fmt: skip
    told: dict[str, Any] = {
        "variants": {cube.label(s) or "grpo": interval(of) for s, of in score.items()},
        "steps": STEPS,
        "total": interval(score[whole] - score[none]),
        "methods": {},
    }
    for i, m in enumerate(METHODS):
        command = found["attribution"]["methods"][m]
        told["methods"][m] = {
            "shapley": interval([v[i] for v in per_seed]),
            "command": command,
            "alone": interval(score[frozenset([m])] - score[none]),
            "last": interval(score[whole] - score[whole - {m}]),
        }
    values = sum(of["command"]["value"] for of in told["methods"].values())
    told["unexplained"] = found["attribution"]["total"] - values
    return told


def draw(results: dict[str, Any]) -> Figure:
    figure, axes = panels(2)
    across(axes[0], results["variants"], results["variants"].values(), "right answers, held out (share)")
    cells = {f"{m}, {what}": of[what] for m, of in results["methods"].items() for what in ("shapley", "alone", "last")}
    across(axes[1], cells, cells.values(), "brought (share of right answers)")
    axes[1].axvline(0, color="gray", linewidth=0.8)
    return figure


def main() -> None:
    args = arguments(__doc__, 5)
    start = time.time()
    results = evaluated(train(args.seeds, args.out / "attribution-runs"))
    for name, cell in results["variants"].items():
        print(f"{name:24} {cell['mean']:.3f} ± {cell['ci95']:.3f}")
    for m, of in results["methods"].items():
        told = "  ".join(f"{w} {of[w]['mean']:+.3f} ± {of[w]['ci95']:.3f}" for w in ("shapley", "alone", "last"))
        print(f"{m:10} {told}  command {of['command']}")
    total = results["total"]
    print(f"all {total['mean']:+.3f} ± {total['ci95']:.3f}, not explained {results['unexplained']:.1e}")
    save(args.out, "attribution", results, lambda: draw(results), start)


if __name__ == "__main__":
    main()
