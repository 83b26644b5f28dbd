"""What rollout methods cost and give on TRL's transformers engine: tokens, wall time, and how groups differ.

Two parts, both on one CPU thread:

1. Plain sampling, LATR, ARRoL and APRIL make rollouts of the warm-started demo policy for the same data, arms taking
   turns in one process. The learning rate is 0, so that every batch of every arm is made by the same policy.
2. How much of generation is reading contexts again that were read before: what keeping keys and values between requests
   could save at most. Measured for the demo policy and for a wider one, whose time is arithmetic and not Python.

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
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.trainer_callback import PrinterCallback

from rl_plugins.demo.policy import build_model, load_policy
from rl_plugins.demo.rewards import exact
from rl_plugins.demo.tasks import build_dataset
from rl_plugins.queue import from_plain
from rl_plugins.trl import GRPOConfig, GRPOTrainer
from rl_plugins.trl.engine import TrlEngine
from rl_plugins.trl.step import GenerationStep

LOOSE = {"tau_abs": 0.1, "tau_rel": 0.5, "lookahead": [4]}  # for completions of 3 to 12 tokens
WIDE = {"tau_abs": 0.01, "tau_rel": 1.0, "tau_ed": None}  # whatever is not excluded branches, nothing is pruned
ARMS: dict[str, dict[str, Any]] = {
    "TRL": {},
    "latr, eta 0": {"latr": {"eta": [0.0]}},
    "latr, eta 1, defaults": {"latr": {"eta": [1.0]}},
    "latr, eta 1, loose": {"latr": {"eta": [1.0], **LOOSE}},
    "latr, eta 1, wide": {"latr": {"eta": [1.0], **WIDE}},
    "latr, eta 1, wide, decode_ahead 2": {"latr": {"eta": [1.0], **WIDE, "decode_ahead": 2}},
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
        passes, read, stepped: forward passes of the engine, positions read in the first of each call, and positions of
            the others, padding and rows that have ended included.
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
    read: int = 0
    stepped: int = 0
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

        def counted(*args: Any, **kwargs: Any) -> Any:
            rows, width = kwargs["input_ids"].shape
            out, batch = generate(*args, **kwargs), self.batches[-1]
            batch.calls += 1
            batch.passes += out.size(1) - width
            batch.read += rows * width
            batch.stepped += rows * (out.size(1) - width - 1)
            return out

        trainer._generate_and_score_completions, trainer.model.generate = timed, counted

    def decoded(self, context: Tokens, tokens: Sequence[int]) -> None:
        self._made += [(*context, *tokens[:i]) for i in range(1, len(tokens) + 1)]

    def kept(self, trainer: Any, step: GenerationStep) -> None:
        self._kept = [row.made.trajectory.context for part in step.rows for row in part if row.made]
        self._kept += [t.context for g in trainer.methods.carried for t in from_plain(g).rollouts]


class Engine:
    """Tells a watch what requests the engine serves, while it is open."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.host = watch, (TrlEngine.generate, TrlEngine.race, GenerationStep.finish)

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

        def finished(step: GenerationStep, out: Any) -> Any:
            watch.kept(step.trainer, step)
            return finish(step, out)

        self._set(served, raced, finished)

    def __exit__(self, *error: Any) -> None:
        self._set(*self.host)

    @staticmethod
    def _set(generate: Any, race: Any, finish: Any) -> None:
        TrlEngine.generate, TrlEngine.race, GenerationStep.finish = generate, race, finish  # type: ignore[method-assign]


def run(arm: dict[str, Any], folder: Path, rows: int, batches: int, seed: int) -> list[Batch]:
    """The batches of an arm that count."""
    params = {name: {"eta_steps": [0], **p} if name == "latr" else p for name, p in arm.items()}
    watch = Watch()
    args = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=rows,
        num_generations=GROUP,
        max_steps=WARM + batches,
        learning_rate=0.0,
        max_completion_length=14,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_steps=1000,
        seed=seed,
        methods=list(arm),
        method_params=params,
    )
    trainer = GRPOTrainer(
        model=str(load_policy()), reward_funcs=watch.reward, args=args, train_dataset=build_dataset(2000, seed=1)
    )
    trainer.remove_callback(PrinterCallback)
    watch.attach(trainer)
    with Engine(watch):
        trainer.train()
    return watch.batches[WARM:]


# ---- reading contexts again


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


class Reading:
    """Seconds of the thread for pieces of generation: the least of `repeat` takes."""

    def __init__(self, model: Any, repeat: int) -> None:
        self.model, self.repeat = model, repeat
        self._known: dict[tuple[Any, ...], float] = {}

    def least(self, key: tuple[Any, ...], work: Callable[[], Any]) -> float:
        if key not in self._known:
            work()
            takes = []
            for _ in range(self.repeat):
                start = time.thread_time()
                work()
                takes.append(time.thread_time() - start)
            self._known[key] = min(takes)
        return self._known[key]

    def generate(self, rows: int, context: int, tokens: int) -> float:
        """A call of the engine: `tokens` new ones for each row."""
        ids = _ids(rows, context)
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "pad_token_id": 0}
        return self.least(
            ("generate", rows, context, tokens),
            lambda: self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options),
        )

    def read(self, rows: int, context: int, known: int = 0) -> float:
        """The pass that reads a context, of which the first `known` tokens' keys and values are there."""
        ids = _ids(rows, context)
        if not known:
            return self.least(("read", rows, context), lambda: self.model(ids, use_cache=True, logits_to_keep=1))
        cache = self.model(ids[:, :known], use_cache=True).past_key_values

        def rest() -> None:
            self.model(ids[:, known:], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.crop(known)

        return self.least(("read", rows, context, known), rest)


def _ids(rows: int, length: int) -> Any:
    return torch.randint(6, 60, (rows, length), generator=torch.Generator().manual_seed(rows * 1000 + length))


def patterns(reading: Reading, rows: int, contexts: Sequence[int]) -> dict[str, dict[str, float]]:
    """Pattern -> seconds in all, seconds of reading again what was read before (what a cache without any cost of its
    own would save), the share, and the share by arithmetic (positions, attention left out)."""
    found = {}

    def add(name: str, total: float, again: float, positions: float, positions_again: float) -> None:
        found[name] = {
            "seconds": total,
            "again": again,
            "share": again / total,
            "share_of_positions": positions_again / positions,
        }

    one = rows // GROUP
    for context in contexts:
        for tokens in (16, 64):
            if context + tokens <= 256:
                again = reading.read(rows, context) - reading.read(one, context)
                add(
                    f"{GROUP} continuations, context {context}, {tokens} new",
                    reading.generate(rows, context, tokens),
                    again,
                    rows * (context + tokens),
                    (rows - one) * context,
                )
    # an agent's turn: 4 tokens, then 19 of the environment
    turns = [16 + 23 * k for k in range((contexts[-1] - 16) // 23 + 1)]
    total = sum(reading.generate(rows, context, 4) for context in turns)
    again = reading.read(rows, 16) - reading.read(one, 16)
    again += sum(reading.read(rows, c) - reading.read(rows, c, known=c - 19) for c in turns[1:])
    add(
        f"turns of 4 tokens, contexts 16 to {turns[-1]}",
        total,
        again,
        rows * sum(c + 4 for c in turns),
        (rows - one) * 16 + rows * sum(c - 19 for c in turns[1:]),
    )
    for chunk in (64, 16):  # LATR: `decode_ahead` tokens per request
        length = contexts[-1] - 16
        starts = list(range(0, length, chunk))
        total = sum(reading.generate(rows, 16 + s, min(chunk, length - s)) for s in starts)
        again = reading.read(rows, 16) - reading.read(one, 16)
        again += sum(reading.read(rows, 16 + s) - reading.read(rows, 16 + s, known=16 + s - 1) for s in starts[1:])
        add(
            f"a tree of {length} tokens in chunks of {chunk}",
            total,
            again,
            rows * (length + sum(16 + s for s in starts)),
            (rows - one) * 16 + rows * sum(16 + s - 1 for s in starts[1:]),
        )
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
    columns = ("decoded", "thrown", "calls", "passes", "read", "stepped", "rows", "length", "equal", "distinct")
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
        for name, model, rows, contexts in (
            ("demo policy", build_model(0).eval(), 64, (16, 50, 100, 200)),
            ("5 million parameters", wide_model(), 8, (16, 100, 200)),
        ):
            reading[name] = patterns(Reading(model, args.takes), rows, contexts)
            print(f"\n{name}, {rows} rows: seconds of generation, of reading again, share, share of positions")
            for pattern, r in reading[name].items():
                print(
                    f"  {pattern:44} {r['seconds'] * 1e3:7.0f}ms {r['again'] * 1e3:7.0f}ms {r['share']:6.0%}"
                    f" {r['share_of_positions']:6.0%}"
                )
    settings = {"rows": args.rows, "batches": args.batches, "repeat": args.repeat, "takes": args.takes}
    args.out.write_text(json.dumps({**settings, "arms": arms, "reading_again": reading}, indent=1) + "\n")


if __name__ == "__main__":
    main()
