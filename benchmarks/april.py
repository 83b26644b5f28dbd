"""APRIL against waiting for the longest rollout: a simulation of the schedule, and (--real) TRL trainers on the CPU.

The simulation (`rl_plugins.testing.generation`) drives the real method and the real queue: 32 groups of 8, lengths
log-normal (half of the variance of their logarithm between prompts), cut at 16 medians. Three engines: `free`, where a
token takes as long whatever the number of rollouts; `slots`, which decodes at most 256 at once, as many as plain
training needs; `busy`, where a token takes 1 + rollouts / 128 and reading one of a resumed rollout 0.01. Only
generation is timed.

--real trains a policy of 78 thousand parameters, which was taught completions with a long tail, with TRL's `generate`,
8 groups of 8; arms take turns. `decode` is the CPU time (one thread) inside `generate`, `step` that of a training step.
`april 1` must train the very completions of `methods: []`.

    python benchmarks/april.py --seeds 3 --real
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import numpy as np
from cpu_runs import cpu_run

from rl_plugins.lab.compare.report import Interval
from rl_plugins.methods.april import April
from rl_plugins.testing.generation import Simulation, summary

GROUPS, SIZE, MEDIAN, BATCHES, SKIP = 32, 8, 24, 36, 8
SIGMAS = (0.5, 1.0, 1.5)
ENGINES: dict[str, dict[str, Any]] = {
    "free": {},
    "slots": {"slots": GROUPS * SIZE},
    "busy": {"token_time": lambda n: 1 + n / 128, "prefill": 0.01},
}
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"over_sampling": 1.0},
    "1.25": {"over_sampling": 1.25},
    "1.5": {"over_sampling": 1.5},
    "2": {"over_sampling": 2.0},
    "3": {"over_sampling": 3.0},
    "2, restart after 2": {"over_sampling": 2.0, "max_staleness": 2},
    "2, drop after 2": {"over_sampling": 2.0, "max_staleness": 2, "stale": "drop"},
    "2, rest discarded": {"over_sampling": 2.0, "max_staleness": 0, "stale": "drop"},
}
REAL_ARMS = {"methods: []": None, "april 1": 1.0, "april 1.25": 1.25, "april 1.5": 1.5, "april 2": 2.0}
CLASSES = {"a": (0.35, 5), "b": (0.3, 10), "c": (0.2, 24), "d": (0.1, 60), "e": (0.05, 140)}  # share, median length
LIMIT, REAL_GROUPS, REAL_SIZE = 220, 8, 8


# ---- simulation


def log_normal(sigma: float, seed: int) -> Callable[[int, int], np.ndarray]:
    def lengths(prompt: int, drawn: int) -> np.ndarray:
        of_prompt = np.random.default_rng([seed, prompt]).normal()
        own = np.random.default_rng([seed, prompt, drawn, 1]).normal(size=SIZE)
        return 1 + (MEDIAN * np.exp(sigma * (of_prompt + own) / np.sqrt(2))).astype(np.int64)

    return lengths


def simulated(arm: dict[str, Any], sigma: float, engine: dict[str, Any], seed: int, lose: bool = False) -> Any:
    run = Simulation(
        April(April.Params(**arm)),
        log_normal(sigma, seed),
        groups=GROUPS,
        group_size=SIZE,
        max_tokens=16 * MEDIAN,
        lose_surplus=lose,
        **engine,
    )
    return summary([run.batch() for _ in range(BATCHES)], SKIP)


def simulate(seeds: int) -> list[dict[str, Any]]:
    table = []
    for name, engine in ENGINES.items():
        for sigma in SIGMAS:
            plain = [simulated(ARMS["plain"], sigma, engine, s) for s in range(seeds)]
            for arm, params in ARMS.items():
                found = plain if arm == "plain" else [simulated(params, sigma, engine, s) for s in range(seeds)]
                for mine, base in zip(found, plain, strict=True):
                    mine["speedup"] = mine["throughput"] / base["throughput"]
                    mine["relative_length"] = mine["length"] / base["length"]
                row: dict[str, Any] = {"engine": name, "sigma": sigma, "arm": arm}
                for key in sorted({k for f in found for k in f}):
                    values = [f.get(key, 0.0) for f in found]
                    row[key] = round(statistics.mean(values), 4)
                    if key in ("speedup", "stale", "relative_length") and seeds > 1:
                        row[f"{key}_ci95"] = round(Interval.of(values).half, 4)
                table.append(row)
    return table


def show(table: list[dict[str, Any]]) -> None:
    print("engine sigma arm                  speed-up     stale  oldest  waiting   read  wasted  length  tokens by age")
    for r in table:
        ages = " ".join(f"{r.get(f'age_{k}', 0):.2f}" for k in range(5))
        print(
            f"{r['engine']:6} {r['sigma']:4} {r['arm']:20} {r['speedup']:5.2f} +- {r.get('speedup_ci95', 0):.2f}"
            f"  {r['stale']:.2f}  {r['oldest']:5.1f}  {r['waiting']:6.2f}  {r['read']:6.2f}  {r['wasted']:.2f}"
            f"    {r['relative_length']:.2f}   {ages}"
        )


# ---- TRL


def teach(folder: Path, seed: int = 0) -> None:
    """A policy whose completions are digits, as many as the letter of the prompt says, more or less."""
    from rl_plugins.lab.demo.policy import Fit, build_model, build_tokenizer, fit, labeled

    model, tokenizer, rng = build_model(seed), build_tokenizer(), random.Random(seed)

    def batch() -> Any:
        texts = []
        for _ in range(24):
            letter = rng.choice("abcde")  # all are learned alike
            n = min(LIMIT, max(1, round(CLASSES[letter][1] * rng.lognormvariate(0, 0.5))))
            digits = "".join(rng.choices("0123456789", k=n))
            texts.append(f"<user>{prompt(rng, letter)}<asst>{digits}<eos>")
        return labeled(tokenizer, texts)

    fit(model, batch, Fit(steps=250, learning_rate=3e-3))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prompt(rng: random.Random, letter: str) -> str:
    return f"{letter}:{''.join(rng.choices('0123456789', k=5))}"


def rows(n: int) -> Any:
    from datasets import Dataset

    rng = random.Random(1)
    letters = rng.choices(list(CLASSES), [share for share, _ in CLASSES.values()], k=n)
    return Dataset.from_list([{"prompt": [{"role": "user", "content": prompt(rng, c)}]} for c in letters])


def measure(over_sampling: float | None, policy: Path, folder: Path, batches: int, seed: int) -> dict[str, Any]:
    import torch

    trained: list[list[list[int]]] = []

    def reward(completion_ids: Any = None, **kwargs: Any) -> list[float]:
        trained.append([list(c) for c in completion_ids])
        return [sum(c) % 7 / 7 for c in completion_ids]

    given: dict[str, Any] = {"methods": [] if over_sampling is None else ["april"]}
    if over_sampling is not None:
        given["method_params"] = {"april": {"over_sampling": over_sampling}}
    trainer = cpu_run(
        folder,
        REAL_GROUPS * REAL_SIZE,
        batches,
        reward,
        model=policy,
        dataset=rows(4000),
        num_generations=REAL_SIZE,
        learning_rate=1e-7,  # lengths shall stay what they are
        max_completion_length=LIMIT,
        logging_steps=1,
        seed=seed,
        **given,
    )
    decode, steps = [0.0], []
    generate, step = trainer.model.generate, trainer.training_step

    def timed_generate(*a: Any, **k: Any) -> Any:
        start = time.process_time()
        out = generate(*a, **k)
        decode[-1] += time.process_time() - start
        return out

    def timed_step(*a: Any, **k: Any) -> Any:
        start = time.process_time()
        out = step(*a, **k)
        steps.append(time.process_time() - start)
        decode.append(0.0)
        return out

    trainer.model.generate, trainer.training_step = timed_generate, timed_step
    torch.manual_seed(seed)
    trainer.train()
    stale = [h["april/stale_tokens"] for h in trainer.state.log_history if "april/stale_tokens" in h]
    return {"decode": decode[:batches], "step": steps, "trained": trained, "stale": stale}


def real(repeat: int, batches: int, skip: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in REAL_ARMS}
    lengths: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy"
        teach(policy)
        for seed in range(repeat):
            made = {}
            for name, over_sampling in REAL_ARMS.items():
                found = measure(over_sampling, policy, Path(folder) / "out", batches, seed)
                made[name] = found.pop("trained")
                tokens = sum(len(c) for b in made[name][skip:] for c in b)
                mean = tokens / sum(len(b) for b in made[name][skip:])
                results[name].append(
                    {
                        "decode": sum(found["decode"][skip:]),
                        "step": sum(found["step"][skip:]),
                        "tokens": tokens,
                        "length": mean,
                        "stale": statistics.mean(found["stale"][skip:]) if found["stale"] else 0.0,
                    }
                )
            lengths += [len(c) for b in made["methods: []"] for c in b]
            if made["methods: []"] != made["april 1"]:
                raise SystemExit("april with over_sampling 1 did not train the completions of `methods: []`.")
    q = [int(x) for x in np.percentile(lengths, [50, 90, 99])]
    print(f"\nTRL, completions of `methods: []`: mean {np.mean(lengths):.0f}, median {q[0]}, 90 % {q[1]}, 99 % {q[2]}")
    print("arm           decode s/batch   step s/batch   tokens per second of decode (ratio)   of step (ratio)   stale")
    table = {}
    for name, runs in results.items():
        base = results["methods: []"]
        per = {k: [r["tokens"] / r[k] for r in runs] for k in ("decode", "step")}
        ratio = {k: [x * b[k] / b["tokens"] for x, b in zip(per[k], base, strict=True)] for k in ("decode", "step")}
        n = batches - skip
        row = {
            "decode_s": statistics.median(r["decode"] for r in runs) / n,
            "step_s": statistics.median(r["step"] for r in runs) / n,
            "tokens_per_s_decode": statistics.median(per["decode"]),
            "tokens_per_s_step": statistics.median(per["step"]),
            "ratio_decode": statistics.median(ratio["decode"]),
            "ratio_step": statistics.median(ratio["step"]),
            "ratios_decode": [round(x, 3) for x in ratio["decode"]],
            "ratios_step": [round(x, 3) for x in ratio["step"]],
            "length": statistics.mean(r["length"] for r in runs),
            "stale": statistics.mean(r["stale"] for r in runs),
        }
        table[name] = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        print(
            f"{name:12} {row['decode_s']:12.3f} {row['step_s']:15.3f} {row['tokens_per_s_decode']:17.0f}"
            f" ({row['ratio_decode']:.2f}) {row['tokens_per_s_step']:22.0f} ({row['ratio_step']:.2f})"
            f" {row['stale']:14.2f}"
        )
    shape = {"mean": round(float(np.mean(lengths)), 1), "median": q[0], "p90": q[1], "p99": q[2]}
    return {"repeat": repeat, "batches": batches, "skip": skip, "lengths": shape, "arms": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="of the simulation; 0: none")
    parser.add_argument("--real", action="store_true", help="train with TRL, too")
    parser.add_argument("--repeat", type=int, default=3, help="real: runs of every arm")
    parser.add_argument("--batches", type=int, default=40, help="real: of a run")
    parser.add_argument("--skip", type=int, default=8, help="real: batches at the start that are not counted")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/april.json"))
    args = parser.parse_args()
    content: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.seeds:
        table = simulate(args.seeds)
        show(table)
        settings = dict(groups=GROUPS, size=SIZE, median=MEDIAN, batches=BATCHES, skip=SKIP, seeds=args.seeds)
        content["simulation"] = {"settings": settings, "table": table}
    if args.real:
        content["trl"] = real(args.repeat, args.batches, args.skip)
    args.out.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
