"""A sample of the tasks in verl: the same prompts, policy, rewards and numbers, on verl's trainer and the CPU.

Each run starts Ray and takes minutes, so this checks that both hosts agree, and is no second bench. Tasks whose options
are those of TRL, and agents, are not made here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import json_lines, whole
from rl_plugins.lab.bench import chains
from rl_plugins.lab.bench.results import BenchRun, Results
from rl_plugins.lab.bench.runs import Waiting
from rl_plugins.lab.bench.tasks import GROUP, LEARNING_RATE, ROWS, STEPS, TASKS, TEST_TRIES, WATCHED, BenchTask, task_of
from rl_plugins.lab.bench.variants import BenchVariant
from rl_plugins.lab.compare.plan import Variant, make_plan
from rl_plugins.lab.compare.runs import read_log, run_all
from rl_plugins.lab.compare.verl import Verl
from rl_plugins.lab.demo import verl_data

PARTS = tuple(name for name in WATCHED if not name.startswith("solved"))  # a score in verl sees one completion


def possible(task: BenchTask) -> bool:
    """Whether verl can train the task as TRL does."""
    return not task.options and not task.environment and set(task.rewards) <= set(PARTS)


def write_data(task: BenchTask, folder: Path) -> Path:
    """train.parquet and test.parquet of the task's prompts in verl's format."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    task.write_data(folder)
    for name in ("train", "test"):
        rows = json_lines(folder / f"{name}.jsonl")
        told = [
            {
                "data_source": "chains",
                "prompt": row["prompt"],
                "ability": row["task"],
                "reward_model": {"style": "rule", "ground_truth": row["chain"]},
                "extra_info": {"index": i, "split": name, **{k: v for k, v in row.items() if k != "prompt"}},
            }
            for i, row in enumerate(rows)
        ]
        with whole(folder / f"{name}.parquet") as part:
            pq.write_table(pa.Table.from_pylist(told), part)
    return folder


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Reward of one completion for `reward.custom_reward_function`: the right answer, and the parts that are watched.

    Args:
        ground_truth: the prompt itself.
    """
    parts = {name: getattr(chains, name)(None, [solution_str], chain=[ground_truth])[0] for name in PARTS}
    return {"score": parts["right"], **parts}


def overrides(task: BenchTask, data: Path, policy: Path, out: Path) -> list[str]:
    """Hydra overrides of every variant: those of the demo, with the numbers of the bench."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    ours: dict[str, Any] = {
        "data.train_batch_size": ROWS // GROUP,
        "data.max_prompt_length": 24,
        "data.max_response_length": 20,
        f"{rollout}.n": GROUP,
        f"{rollout}.val_kwargs.n": TEST_TRIES,
        f"{actor}.ppo_mini_batch_size": ROWS // GROUP,
        f"{actor}.optim.lr": LEARNING_RATE,
        f"{actor}.optim.lr_warmup_steps": 5,
        f"{actor}.ppo_micro_batch_size_per_gpu": ROWS,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": ROWS,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": ROWS,
        "reward.custom_reward_function.path": "pkg://rl_plugins.lab.bench.verl_runs",
        **{f"+rl_plugins.rewards.{name}": weight for name, weight in task.rewards.items()},
    }
    base = verl_data.overrides(data, policy, out, steps=STEPS, test_every=STEPS // 4)
    kept = [line for line in base if line.partition("=")[0] not in ours]
    return [*kept, *(f"{name}={value}" for name, value in ours.items())]


def run_verl(wanted: Sequence[Waiting], out: Path, policy: Path) -> Results:
    """Trains what the results in `out` lack, one run after another.

    Raises:
        ConfigError: a task or a variant that verl cannot train as TRL does.
        RLPluginsError: a run failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    results = Results.read(out)
    for w in dict.fromkeys(wanted):
        if not results.has(w.task, w.variant, w.seed):
            run = BenchRun.of(w.task, w.variant, w.seed, _trained(w, out, policy))
            run.record["host"] = "verl"
            results.add(run)
            results.write(out)
    return results


def _trained(w: Waiting, out: Path, policy: Path) -> list[dict[str, Any]]:
    task, variant = task_of(w.task), BenchVariant.of(w.variant)
    if not possible(task) or variant.options:
        able = [name for name, found in TASKS.items() if possible(found)]
        raise ConfigError(
            f"{w.variant} in {w.task} is not made in verl. Variants without options of the host are, in "
            f"{', '.join(able)}."
        )
    data = out / "data" / f"{w.task}-{task.fingerprint}"
    if not (data / "test.parquet").exists():
        write_data(task, data)
    folder = out / "verl" / w.task
    host = Verl.of(overrides(task, data, policy, folder))
    label = Variant(w.variant, variant.methods)
    plan = make_plan(host, [label], [w.seed], folder, {k: dict(v) for k, v in variant.params.items()})
    run_all(plan, 1, "eval_rewards/right/mean", environment=verl_data.ENVIRONMENT)
    return read_log(plan.runs[0])


def agreement(trl: Results, verl: Results) -> Iterator[Mapping[str, Any]]:
    """For every variant that both hosts ran with two seeds or more: its difference from GRPO in both, and whether they
    agree, that is whether the interval of one minus the other holds zero (Welch)."""
    from scipy import stats

    from rl_plugins.lab.bench.combine import end

    for task, variant in dict.fromkeys((c, a) for c, a, _ in verl.runs if a != "grpo"):
        deltas = []
        for results in (trl, verl):
            seeds = set(results.seeds(task, variant)) & set(results.seeds(task, "grpo"))
            deltas.append([end(results, task, variant, s) - end(results, task, "grpo", s) for s in sorted(seeds)])
        if min(map(len, deltas)) < 2:
            continue
        low, high = stats.ttest_ind(*deltas, equal_var=False).confidence_interval()
        told = [round(sum(d) / len(d), 5) for d in deltas]
        yield {
            "task": task,
            "variant": variant,
            "trl": told[0],
            "verl": told[1],
            "seeds": [len(d) for d in deltas],
            "low": round(float(low), 5),
            "high": round(float(high), 5),
            "agree": bool(low <= 0 <= high),
        }
