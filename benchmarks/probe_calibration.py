"""Does `rl-plugins probe` predict what training does? Progress measured at checkpoints, and gains of the next steps.

    python benchmarks/probe_calibration.py             # the missing parts; about 25 minutes of a core for everything
    python benchmarks/probe_calibration.py --seeds 1   # fewer training runs of the embedded policy
    python benchmarks/probe_calibration.py --table     # what is there, in docs/probe.md and for the command

Written down before the first run (2026-11-27); what a run gave changes none of it:

- A pair is a checkpoint in a task, and a variant that acts on its pool. The prediction is the progress of one batch of
  the run's size relative to GRPO's, at equal steps, for what was trained ("reward") and for right answers ("pass@1").
- The gain is the held-out value of the variant minus that of GRPO with the same seed.
- Bench's policy: the stored runs in benchmarks/bench, 4 to 20 seeds each, of tasks of chains. The checkpoint is the
  policy that all start from. The gain is the mean over the two evaluations of the first half: after 10 and 20 steps.
- Embedded policy: the rewards of the demo, at the first policy and after 40 steps of GRPO. Every variant trains the
  next 20 steps with a new optimizer, and is evaluated on 320 held-out prompts x 4 tries.
- The figure that counts is Spearman's correlation over all pairs, with an interval from drawing pairs again. Pairs of a
  checkpoint share GRPO's runs, so it is too narrow. Besides, how often the side was right where the probe told one.
- Where the pool does not tell GRPO's own progress from 0, the command gives no ratio, and the pair does not count.

Amended on the same day, before any gain of the embedded policy was looked at: its pools have 256 prompts, because 64
did not tell GRPO's own progress from 0.

Everything is stored as it comes, in probe_calibration.json, and what is there is not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_suffix(".json")
FIGURE = ROOT / "docs" / "figures" / "probe_calibration.png"
OF_COMMAND = ROOT / "rl_plugins" / "lab" / "probe" / "calibration.json"
CHAINS = ("neutral", "difficulty=tail", "difficulty=repeated", "group=4", "noise=graded", "rewards=10x")
WEIGHTS = [0.0, 1.0, 1.0]  # of exact, digits, careful
EMBEDDED = (
    "dr_grpo",
    "grpo@num_generations=2",
    "grpo@num_generations=16",
    "gdpo",
    "mc_grpo",
    "dars",
    "vade",
    "variance_filter",
)
OPTIONS = {"num_generations", "scale_rewards", "loss_type"}  # of the host, that a pool can tell of
PROMPTS, EMBEDDED_PROMPTS, ROLLOUTS, K = 64, 256, 32, 8
FIRST, NEXT, TRIES = 40, 20, 4
TARGETS = ("reward", "pass@1")  # the first one counts


def stored() -> dict[str, Any]:
    empty: dict[str, Any] = {"predicted": {}, "gains": {}, "cpu_seconds": {}}
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else empty


def keep(found: Mapping[str, Any]) -> None:
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


# ---- predictions


def predictions(
    config: Mapping[str, Any], solved_by: str, labels: Sequence[str], prompts: int, folder: Path
) -> dict[str, Any]:
    """Targets for which GRPO's own progress is told from 0, and the progress of variants that act relative to it."""
    from rl_plugins.core.errors import RLPluginsError
    from rl_plugins.lab.bench.tasks import BenchTask
    from rl_plugins.lab.bench.variants import BenchVariant
    from rl_plugins.lab.probe.answer import FOLDS, batch_of, measure
    from rl_plugins.lab.probe.candidates import HostBatch
    from rl_plugins.lab.probe.pool import PoolPlan, RunPool
    from rl_plugins.lab.probe.runs import ProbedRun
    from rl_plugins.tools.gradient_quality.pools import along, ratio

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(dict(config)))
    run = ProbedRun.of([str(file)])
    drawn, host = RunPool(run, PoolPlan(prompts, ROLLOUTS, solved_by=solved_by), folder / "probe"), run.host
    drawn.draw()
    pool = drawn.read()
    folds = [pool.part(range(j, len(pool.prob), FOLDS)) for j in range(FOLDS)]
    rollouts = batch_of(pool, host)
    base = measure(folds, host.variant("grpo"), rollouts, K)
    clear = [t for t in TARGETS if along(base.crossed, t, range(FOLDS)).low > 0]
    found = {}
    for label in labels:
        variant = BenchVariant.of(label)
        if variant.is_rloo or not {*variant.options} <= OPTIONS:
            continue
        given = variant.config(BenchTask("", ""), config)
        scale, loss = given.get("scale_rewards", host.scale), given.get("loss_type", host.loss)
        own = HostBatch(given["num_generations"], host.rollouts, scale, loss)
        methods = {name: variant.params.get(name, {}) for name in variant.parts}
        try:
            made = measure(folds, own.variant(label, methods), rollouts, K)
        except RLPluginsError as e:
            print(f"  {label}: {str(e)[:100]}", flush=True)
            continue
        if made.idle(base):
            continue
        step = dataclasses.replace(made.crossed, rollouts=base.crossed.rollouts)
        told = {t: ratio(step, base.crossed, t, host.rollouts, range(FOLDS)) for t in TARGETS}
        found[label] = {t: dataclasses.asdict(x) for t, x in told.items()}
        print(f"  {label}: {told['pass@1'].value:.2f}", flush=True)
    return {"clear": clear, "variants": found}


def of_chains(task: str, folder: Path) -> dict[str, Any]:
    from rl_plugins.lab.bench.policy import load_policy
    from rl_plugins.lab.bench.tasks import task_of

    bench = task_of(task)
    config = bench.config(load_policy(), bench.write_data(folder / "data"))
    return predictions(config, "right", list(gains_of_chains(task)), PROMPTS, folder)


def of_embedded(step: int, folder: Path) -> dict[str, Any]:
    return predictions(embedded(policy(step, folder), folder), "exact", EMBEDDED, EMBEDDED_PROMPTS, folder / str(step))


# ---- gains


def gains_of_chains(task: str) -> dict[str, list[dict[str, float]]]:
    """Variant -> of each seed, target -> gain over GRPO in the first half of a stored run."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from rl_plugins.lab.bench.tasks import task_of

    table = pq.read_table(RESULTS.parent / "bench" / "curves.parquet")
    for column, value in (("task", task), ("host", "trl")):
        table = table.filter(pc.equal(table[column], value))
    names = {f"eval_rewards/{name}/mean": name for name in ("right", "tidy", "clean", "steps")}
    points: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in table.to_pylist():
        if row["name"] in names and row["step"] in (10, 20):
            points[row["variant"], row["seed"]][names[row["name"]]].append(row["value"])
    trained = {name: weight for name, weight in task_of(task).rewards.items() if weight}
    # a reward of ten times the size has no curve of its own, and `graded` has none at all
    sizes = {"right": ("right", 1.0), "tidy_10": ("tidy", 10.0)}

    def values(of: Mapping[str, list[float]]) -> dict[str, float]:
        mean = {name: float(np.mean(x)) for name, x in of.items()}
        told = {"pass@1": mean["right"]}
        if trained.keys() <= sizes.keys():
            told["reward"] = sum(w * sizes[n][1] * mean[sizes[n][0]] for n, w in trained.items())
        return told

    mean = {key: values(of) for key, of in points.items()}
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for (variant, seed), of in mean.items():
        if variant != "grpo" and (base := mean.get(("grpo", seed))):
            found[variant].append({t: of[t] - base[t] for t in of})
    return {variant: seeds for variant, seeds in found.items() if len(seeds) > 3}


def embedded(model: Path, folder: Path) -> dict[str, Any]:
    """The demo's config, for the next steps from a policy."""
    from rl_plugins.lab.demo import settings

    settings.write_data(folder / "data")
    next_steps = {"reward_weights": WEIGHTS, "max_steps": NEXT, "warmup_steps": 5, "eval_strategy": "no"}
    evaluated = {"num_generations_eval": TRIES, "per_device_eval_batch_size": 320 * TRIES, "eval_on_start": False}
    return {**settings.config(model, folder / "data", [], long=False), **next_steps, **evaluated}


def policy(step: int, folder: Path) -> Path:
    from rl_plugins.lab.demo.policy import load_policy

    kept = folder / f"policy-{step}"
    if step and not kept.exists():
        train({**embedded(load_policy(), folder), "max_steps": FIRST, "seed": 100}, folder, kept)
    return kept if step else load_policy()


def train(values: Mapping[str, Any], folder: Path, kept: Path | None = None) -> dict[str, float]:
    """One run; the policy goes to `kept`, or its held-out values are returned."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    from rl_plugins.lab.demo import rewards
    from rl_plugins.lab.demo.settings import REWARDS
    from rl_plugins.trl import GRPOConfig, GRPOTrainer

    options = dict(values)
    model, dtype = options.pop("model_name_or_path"), options.pop("dtype")
    data = load_dataset(options.pop("dataset_name"))
    del options["reward_funcs"]
    args = GRPOConfig(output_dir=str(folder / "trainer"), model_init_kwargs={"dtype": dtype}, **options)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[getattr(rewards, name) for name in REWARDS],
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    if kept is not None:
        trainer.save_model(str(kept))
        return {}
    held_out = trainer.evaluate()
    return {"reward": held_out["eval_reward"], "pass@1": held_out["eval_rewards/exact/mean"]}


def gain_of_embedded(step: int, label: str, seed: int, folder: Path) -> dict[str, float]:
    """Held-out values after the next steps."""
    from rl_plugins.lab.bench.tasks import BenchTask
    from rl_plugins.lab.bench.variants import BenchVariant

    config = embedded(policy(step, folder), folder)
    values = BenchVariant.of(label).config(BenchTask("", ""), config)
    return train({**values, "seed": seed}, folder)


# ---- the result


def pairs(found: Mapping[str, Any], target: str) -> list[dict[str, Any]]:
    """Of each checkpoint and variant the prediction, and the mean gain with its standard error over seeds."""
    made = []
    for place, told in found["predicted"].items():
        task, _, step = place.partition(" ")
        of_task = {} if step else gains_of_chains(task)
        runs = found["gains"].get(place, {})
        base = runs.get("grpo", {})
        for label, predicted in told["variants"].items() if target in told["clear"] else ():
            if step:
                seeds = [of[target] - base[s][target] for s, of in runs.get(label, {}).items() if s in base]
            else:
                seeds = [of[target] for of in of_task[label] if target in of]
            if seeds:
                error = float(np.std(seeds, ddof=1) / np.sqrt(len(seeds))) if len(seeds) > 1 else None
                gain = {"gain": float(np.mean(seeds)), "error": error, "seeds": len(seeds)}
                made.append({"checkpoint": place, "variant": label, **predicted[target], **gain})
    return made


def calibration(of: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Spearman's correlation of predictions and gains, and how often a side that was told is that of the gain."""
    from scipy import stats

    x, y = (np.array([p[name] for p in of]) for name in ("value", "gain"))
    drawn = np.random.default_rng(0).integers(len(x), size=(2000, len(x)))
    low, high = np.nanquantile([stats.spearmanr(x[i], y[i])[0] for i in drawn], [0.025, 0.975])
    told = [p for p in of if p["low"] > 1 or p["high"] < 1]
    return {
        "pairs": len(of),
        "correlation": float(stats.spearmanr(x, y)[0]),
        "low": float(low),
        "high": float(high),
        "told": len(told),
        "agreed": sum((p["value"] > 1) == (p["gain"] > 0) for p in told),
    }


def page(found: Mapping[str, Any]) -> str:
    """The tables of docs/probe.md."""
    lines = [
        "| target | pairs | rank correlation | told to be more or less | training agreed |",
        "|---|---|---|---|---|",
    ]
    for target in TARGETS:
        c = calibration(pairs(found, target))
        between = f"{c['correlation']:.2f} ({c['low']:.2f} to {c['high']:.2f})"
        lines.append(f"| {target} | {c['pairs']} | {between} | {c['told']} | {c['agreed']} |")
    whole = calibration(pairs(found, TARGETS[0]))
    said = (
        "is above 0" if whole["low"] > 0 else "reaches 0, so this does not show that the order of methods is predicted"
    )
    lines += [
        "",
        f"The interval of {TARGETS[0]} {said}.",
        "",
        f"Of {TARGETS[0]}, with the gain as a difference to GRPO in the same seeds:",
        "",
        "| checkpoint | variant | progress of a step | gain | seeds |",
        "|---|---|---|---|---|",
    ]
    for p in sorted(pairs(found, TARGETS[0]), key=lambda p: -p["value"]):
        error = "" if p["error"] is None else f" ± {p['error']:.3f}"
        progress = f"{p['value']:.2f} ({p['low']:.2f} to {p['high']:.2f})"
        lines.append(f"| {p['checkpoint']} | {p['variant']} | {progress} | {p['gain']:+.3f}{error} | {p['seeds']} |")
    absent = [place for place, told in found["predicted"].items() if TARGETS[0] not in told["clear"]]
    if absent:
        lines += ["", f"Without a ratio, because GRPO's own progress was not told from 0: {', '.join(absent)}."]
    return "\n".join(lines)


def figure(found: Mapping[str, Any]) -> None:
    from matplotlib.figure import Figure

    from rl_plugins.lab.compare.figures import WIDTH, color, save

    of = pairs(found, TARGETS[0])
    places = list(dict.fromkeys(p["checkpoint"] for p in of))

    def scatter() -> Any:
        made = Figure(figsize=(WIDTH, 3.6), layout="constrained")
        axis = made.subplots()
        for i, place in enumerate(places):
            mine = [p for p in of if p["checkpoint"] == place]
            x, y = [p["value"] for p in mine], [p["gain"] for p in mine]
            across = [[p["value"] - p["low"] for p in mine], [p["high"] - p["value"] for p in mine]]
            up, own = [p["error"] or 0 for p in mine], color(i + 1)
            axis.errorbar(x, y, up, across, fmt="o", color=own, label=place, linewidth=0.8, markersize=4)
        axis.axvline(1, color=color(0), linewidth=0.8, linestyle=":")
        axis.axhline(0, color=color(0), linewidth=0.8, linestyle=":")
        axis.set_xlabel("measured progress of a step, relative to GRPO's")
        axis.set_ylabel("gain in training over GRPO's")
        axis.legend()
        return made

    save(FIGURE, scatter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="of the training runs of the embedded policy")
    parser.add_argument(
        "--out", type=Path, default=Path("build/probe_calibration"), help="folder of pools and policies"
    )
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("rl_plugins").setLevel(logging.ERROR)
    found = stored()
    if args.table:
        from real_learning import write_on_page

        write_on_page("probe_calibration.py", page(found), "probe.md")
        figure(found)
        OF_COMMAND.write_text(json.dumps(calibration(pairs(found, TARGETS[0])), indent=1) + "\n")
        return

    def timed(name: str, made: Any, *given: Any) -> Any:
        began = time.process_time()
        value = made(*given)
        found["cpu_seconds"][name] = found["cpu_seconds"].get(name, 0) + round(time.process_time() - began, 1)
        return value

    out = args.out.absolute()

    def probe(place: str, made: Any, *given: Any) -> None:
        if place not in found["predicted"]:
            print(place, flush=True)
            found["predicted"][place] = timed("probes", made, *given)
            keep(found)

    for step in (0, FIRST):
        probe(f"embedded {step}", of_embedded, step, out / "embedded")
    for task in CHAINS:
        probe(task, of_chains, task, out / task)
    for seed in range(args.seeds):
        for step in (0, FIRST):
            place = f"embedded {step}"
            if not found["predicted"][place]["clear"]:
                continue
            for label in ("grpo", *found["predicted"][place]["variants"]):
                runs = found["gains"].setdefault(place, {}).setdefault(label, {})
                if str(seed) not in runs:
                    runs[str(seed)] = timed("runs", gain_of_embedded, step, label, seed, out / "embedded")
                    print(place, label, seed, runs[str(seed)], flush=True)
                    keep(found)


if __name__ == "__main__":
    main()
