"""What rollout methods cost and give on TRL's transformers engine: tokens, wall time, and how groups differ.

Two parts, both on one CPU thread:

1. Plain sampling, LATR, ARRoL and APRIL make rollouts of the warm-started demo policy for the same data, arms taking
   turns in one process. The learning rate is 0, so that every batch of every arm is made by the same policy.
2. What keeping keys and values between requests (`rl_plugins.trl.generation.context_cache`) saves, for the demo policy
   and for a wider one, whose time is arithmetic and not Python.

    python benchmarks/rollouts.py --repeat 9
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import torch
from cpu_runs import cpu_run
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from rl_plugins.lab.demo.policy import build_model
from rl_plugins.lab.demo.rewards import exact
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.runtime.carry_over import from_plain
from rl_plugins.trl.generation import batches as generation
from rl_plugins.trl.generation.context_cache import ContextCache
from rl_plugins.trl.generation.engine import TrlEngine

LOOSE = {"tau_abs": 0.1, "tau_rel": 0.5, "lookahead": [4]}  # for completions of 3 to 12 tokens
WIDE = {"tau_abs": 0.01, "tau_rel": 1.0, "tau_ed": None}  # whatever is not excluded branches, nothing is pruned
ARMS: dict[str, dict[str, Any]] = {
    "TRL": {},
    "latr, eta 0": {"latr": {"eta": [0.0]}},
    "latr, eta 1, defaults": {"latr": {"eta": [1.0]}},
    "latr, eta 1, loose": {"latr": {"eta": [1.0], **LOOSE}},
    "latr, eta 1, wide": {"latr": {"eta": [1.0], **WIDE}},
    "latr, eta 1, wide, decode_ahead 2": {"latr": {"eta": [1.0], **WIDE, "decode_ahead": 2}},
    "the same, contexts read anew": {"latr": {"eta": [1.0], **WIDE, "decode_ahead": 2}, "rollout_cache_gb": 0.0},
    "latr, eta 0.5, wide, decode_ahead 2": {"latr": {"eta": [0.5], **WIDE, "decode_ahead": 2}},
    "arrol, stops after 4 tokens": {"arrol": {"detect_tokens": 4, "cold_start": 1}},
    "april, 1.25 groups per group": {"april": {"over_sampling": 1.25}},
    "april, 2 groups per group": {"april": {"over_sampling": 2.0}},
}
GROUP, WARM = 8, 4  # batches before the first that counts: ARRoL's head and APRIL's queue are filled
Tokens = tuple[int, ...]


@dataclass
class Batch:
    """One generation batch.

    Attributes:
        seconds, cpu: of TRL's whole method (generation, rewards, decision): on the wall, and of the thread, which other
            work on the machine disturbs less.
        decoded, thrown: tokens the engine made, and those of them that are in no row, trained or waiting.
        passes, positions: forward passes of the model while generating, and what went through it in them, padding and
            rows that have ended included.
        calls: of the engine, one after the other.
        rows, length: trained rows, and their mean length.
        equal, distinct: share of groups with equal rewards, mean number of distinct answers in a group.
    """

    seconds: float = 0.0
    cpu: float = 0.0
    decoded: int = 0
    thrown: int = 0
    calls: int = 0
    passes: int = 0
    positions: int = 0
    rows: int = 0
    length: float = 0.0
    equal: float = 0.0
    distinct: float = 0.0


class Watch:
    """Counts what a trainer's engine does and what comes out of it, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self._made: list[Tokens] = []  # contexts up to each decoded token
        self._kept: list[Tokens] = []

    def reward(self, prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        """The run's reward function, which sees the rows that are trained."""
        rewards, batch = exact(prompts, completions, completion_ids, **columns), self.batches[-1]
        groups: dict[str, list[tuple[str, float]]] = {}
        for prompt, completion, reward in zip(prompts, completions, rewards, strict=True):
            groups.setdefault(prompt[0]["content"], []).append((completion[0]["content"], reward))
        batch.rows, batch.length = len(rewards), statistics.mean(map(len, completion_ids))
        batch.equal = statistics.mean(len({r for _, r in g}) == 1 for g in groups.values())
        batch.distinct = statistics.mean(len({text for text, _ in g}) for g in groups.values())
        if not self._made:
            batch.decoded = sum(map(len, completion_ids))
        return rewards

    def attach(self, trainer: Any) -> None:
        score, generate = trainer._generate_and_score_completions, trainer.model.generate

        def timed(inputs: Any) -> Any:
            self.batches.append(Batch())
            self._made, self._kept = [], []
            start, start_cpu = time.perf_counter(), time.thread_time()
            out = score(inputs)
            batch = self.batches[-1]
            batch.seconds, batch.cpu = time.perf_counter() - start, time.thread_time() - start_cpu
            if self._made:
                batch.decoded = len(self._made)
                kept = Counter(t[:i] for t in self._kept for i in range(len(t) + 1))
                batch.thrown = sum(max(0, n - kept[prefix]) for prefix, n in Counter(self._made).items())
            return out

        def passed(module: Any, args: Any, kwargs: Any) -> None:
            self.batches[-1].passes += 1
            self.batches[-1].positions += kwargs["input_ids"].numel()

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.batches[-1].calls += 1
            hook = trainer.model.register_forward_pre_hook(passed, with_kwargs=True)
            try:
                return generate(*args, **kwargs)
            finally:
                hook.remove()

        trainer._generate_and_score_completions, trainer.model.generate = timed, counted

    def decoded(self, context: Tokens, tokens: Sequence[int]) -> None:
        self._made += [(*context, *tokens[:i]) for i in range(1, len(tokens) + 1)]

    def kept(self, trainer: Any, batch: generation.DecidedWork) -> None:
        self._kept = [row.made.trajectory.context for row in batch.work.flat if row.made]
        self._kept += [t.context for g in trainer.methods.carried for t in from_plain(g).rollouts]


class Engine:
    """Tells a watch what requests the engine serves, while it is open."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.host = watch, (TrlEngine.generate, TrlEngine.race, generation.finish)

    def __enter__(self) -> None:
        watch, (generate, race, finish) = self.watch, self.host

        def served(engine: TrlEngine, requests: Any) -> Any:
            made = generate(engine, requests)
            for (_, request), many in zip(requests, made, strict=True):
                for g in many:
                    watch.decoded(request.trajectory.context, g.tokens)
            return made

        def raced(engine: TrlEngine, requests: Any, group: Any, enough: int) -> Any:
            made = race(engine, requests, group, enough)
            for request, g in zip(requests, made[0], strict=True):
                watch.decoded(request.trajectory.context, g.tokens)
            return made

        def finished(trainer: Any, batch: generation.DecidedWork, out: Any) -> Any:
            watch.kept(trainer, batch)
            return finish(trainer, batch, out)

        self._set(served, raced, finished)

    def __exit__(self, *error: Any) -> None:
        self._set(*self.host)

    @staticmethod
    def _set(generate: Any, race: Any, finish: Any) -> None:
        TrlEngine.generate, TrlEngine.race, generation.finish = generate, race, finish  # type: ignore[method-assign]


def run(arm: dict[str, Any], folder: Path, rows: int, batches: int, seed: int) -> list[Batch]:
    """The batches of an arm that count."""
    cache = {k: v for k, v in arm.items() if k == "rollout_cache_gb"}
    params = {k: {"eta_steps": [0], **v} if k == "latr" else v for k, v in arm.items() if k not in cache}
    watch = Watch()
    trainer = cpu_run(
        folder,
        rows,
        WARM + batches,
        watch.reward,
        dataset=build_dataset(2000, seed=1),
        num_generations=GROUP,
        learning_rate=0.0,
        seed=seed,
        methods=list(params),
        method_params=params,
        **cache,
    )
    watch.attach(trainer)
    with Engine(watch):
        trainer.train()
    return watch.batches[WARM:]


# ---- keys and values between requests


def wide_model() -> Any:
    """A Qwen3 of 6 layers and hidden size 256 with random weights, 5 million parameters."""
    config = build_model(0).config.to_dict() | {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "layer_types": ["full_attention"] * 6,
    }
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**config)).eval()


class Serves:
    """Generation for fixed contexts, with or without the cache; counts what goes through the model."""

    def __init__(self, model: Any, cached: bool) -> None:
        self.model, self.cache = model, ContextCache(4 * 10**9) if cached else None
        self.positions = self.passes = 0
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def __call__(self, ids: Any, tokens: int) -> Any:
        config = GenerationConfig(max_new_tokens=tokens, do_sample=True, eos_token_id=None, pad_token_id=0)
        mask = torch.ones_like(ids)
        if self.cache is None:
            return self.model.generate(generation_config=config, input_ids=ids, attention_mask=mask)
        out = self.cache.generate(self.model.generate, self.model, config, ids, mask)
        self.cache.end_round()
        return out

    def _count(self, module: Any, args: Any, kwargs: Any) -> None:
        self.positions += kwargs["input_ids"].numel()
        self.passes += 1

    def close(self) -> None:
        self._hook.remove()


def _ids(rows: int, length: int) -> Any:
    return torch.randint(6, 60, (rows, length), generator=torch.Generator().manual_seed(rows * 1000 + length))


def continuations(rows: int, context: int, tokens: int) -> Callable[[Serves], None]:
    """Groups of 8 rows with the same context."""
    ids = _ids(rows // GROUP, context).repeat_interleave(GROUP, 0)
    return lambda serve: serve(ids, tokens)


def growing(rows: int, turns: int, tokens: int, reads: int) -> Callable[[Serves], None]:
    """Contexts of 16 tokens that grow by what was generated and by what is read in between."""
    start, more = _ids(rows // GROUP, 16).repeat_interleave(GROUP, 0), _ids(rows, reads)

    def work(serve: Serves) -> None:
        ids = start
        for _ in range(turns):
            ids = torch.cat([serve(ids, tokens), more], 1)

    return work


def patterns(model: Any, rows: int, takes: int) -> dict[str, dict[str, float]]:
    """Pattern -> CPU seconds (least of `takes`, both ways in turns), positions and passes of the model, without the
    cache and with it."""
    works = {
        f"8 continuations, context {context}, {tokens} new": continuations(rows, context, tokens)
        for context in (16, 100, 200)
        for tokens in (16, 64)
        if context + tokens <= 256
    } | {
        "9 turns of 4 tokens, 19 read in between, contexts 16 to 200": growing(rows, 9, 4, 19),
        "4 turns of 32 tokens, 19 read in between, contexts 16 to 169": growing(rows, 4, 32, 19),
        "LATR, 192 tokens in chunks of 64": growing(rows, 3, 64, 0),
        "LATR, 192 tokens in chunks of 16 (the default `decode_ahead`)": growing(rows, 12, 16, 0),
    }
    found = {}
    for name, work in works.items():
        seconds: dict[bool, list[float]] = {False: [], True: []}
        row: dict[str, float] = {}
        for take in range(takes + 1):
            for cached in (False, True):
                serve = Serves(model, cached)
                start = time.thread_time()
                work(serve)
                if take:
                    seconds[cached].append(time.thread_time() - start)
                serve.close()
                suffix = "_cached" if cached else ""
                row |= {f"positions{suffix}": serve.positions, f"passes{suffix}": serve.passes}
        found[name] = {"seconds": min(seconds[False]), "seconds_cached": min(seconds[True]), **row}
    return found


# ---- the report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--batches", type=int, default=2, help="timed generation batches per repetition")
    parser.add_argument("--takes", type=int, default=5, help="of each piece of generation in part 2")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/rollouts.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()
    results: dict[str, list[Batch]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.repeat):
            for name, arm in ARMS.items():
                results[name] += run(arm, Path(folder), args.rows, args.batches, seed)
    arms = {}
    columns = ("decoded", "thrown", "calls", "passes", "positions", "rows", "length", "equal", "distinct")
    print(f"{'arm':36} {'min':>8} {'median':>8} {'cpu min':>8} {'median':>8} " + " ".join(f"{c:>8}" for c in columns))
    for name, batches in results.items():
        seconds = [b.seconds for b in batches]
        cpu = [b.cpu for b in batches]
        row = {"seconds_min": min(seconds), "seconds_median": statistics.median(seconds)}
        row |= {"cpu_min": min(cpu), "cpu_median": statistics.median(cpu)}
        row |= {c: statistics.mean(getattr(b, c) for b in batches) for c in columns}
        row |= {f"{c}_deviation": statistics.stdev(getattr(b, c) for b in batches) for c in ("equal", "distinct")}
        arms[name] = row
        times = "".join(f"{row[k] * 1e3:6.0f}ms " for k in ("seconds_min", "seconds_median", "cpu_min", "cpu_median"))
        print(f"{name:36} {times}" + " ".join(f"{row[c]:8.{0 if row[c] > 100 else 2}f}" for c in columns))
    reading = {}
    with torch.no_grad():
        for name, model, rows in (
            ("demo policy", build_model(0).eval(), 64),
            ("5 million parameters", wide_model(), 8),
            ("5 million parameters", wide_model(), 64),
        ):
            title = f"{name}, {rows} rows"
            reading[title] = patterns(model, rows, args.takes)
            print(f"\n{title}: CPU time, positions and passes, without the cache and with it")
            for pattern, r in reading[title].items():
                print(
                    f"  {pattern:64} {r['seconds'] * 1e3:7.0f} -> {r['seconds_cached'] * 1e3:5.0f} ms "
                    f"{1 - r['seconds_cached'] / r['seconds']:5.0%} {r['positions']:7,} -> {r['positions_cached']:6,} "
                    f"{r['passes']:4} -> {r['passes_cached']}"
                )
    settings = {"rows": args.rows, "batches": args.batches, "repeat": args.repeat, "takes": args.takes}
    args.out.write_text(json.dumps({**settings, "arms": arms, "contexts": reading}, indent=1) + "\n")


if __name__ == "__main__":
    main()
