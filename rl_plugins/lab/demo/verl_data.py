"""The demo for verl: its tasks as parquet files, its rewards as one function, and settings proven on a CPU.

`python -m rl_plugins.lab.demo.verl_data FOLDER [METHOD...]` writes the files and prints the hydra overrides of
`python -m verl.trainer.main_ppo`, one per line (see examples/verl/laptop.sh). On stderr it says which of them are
choices of the demo that a run of your own may make otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rl_plugins.cards.catalog import example_of
from rl_plugins.core.errors import RLPluginsError, missing_package
from rl_plugins.core.files import claim, whole
from rl_plugins.lab.compare.verl import quoted
from rl_plugins.lab.demo import rewards
from rl_plugins.lab.demo.settings import (
    BINARY,
    GRADED,
    REWARDS,
    TEST_PROMPTS,
    TRAIN_PROMPTS,
    demo_params,
    needing,
    wants_binary,
)
from rl_plugins.runtime import registry

SOURCE = "digit_lists"
# Of every run; examples/verl/laptop.sh has the same.
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "OMP_NUM_THREADS": "1",
    "TQ_NUM_THREADS": "1",  # TransferQueue's 8 are more than there are cores, which it reports 130 times per step
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it ends the run where all programs together fill 95 % of the memory
}
STEPS = 40
SHORT_STEPS, LONG_STEPS = 30, 120  # of `rl-plugins demo --host verl`
SECONDS_TO_START, SECONDS_PER_STEP = 70, 1.5  # on two idle cores; the first with three evaluations
PROMPTS, SAMPLES = 24, 4  # on a quiet machine, generated before verl looks for them after 2 s


def write(folder: Path) -> Path:
    """train.parquet and test.parquet (held-out prompts) in verl's format; returns the folder."""
    import pyarrow
    import pyarrow.parquet

    from rl_plugins.lab.demo.tasks import build_rows

    for name, split, n in (("train", "train", TRAIN_PROMPTS), ("test", "held_out", TEST_PROMPTS)):
        rows = [
            {
                "data_source": SOURCE,
                "prompt": row["prompt"],
                "ability": row["task"],
                "reward_model": {"style": "rule", "ground_truth": row["answer"]},
                "extra_info": {"index": index, "split": name, "level": row["level"], "answer": row["answer"]},
            }
            for index, row in enumerate(build_rows(n, seed=0, split=split))
        ]
        with whole(folder / f"{name}.parquet") as part:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), part)
    return folder


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    binary: bool = False,
    **kwargs: Any,
) -> dict[str, float]:
    """Reward of one completion, with its parts, as `reward.custom_reward_function` calls it.

    Args:
        data_source: Of the row; not used.
        solution_str: The completion without special tokens, so one that was cut off counts as ended.
        ground_truth: The digits asked for.
        extra_info: Of the row; not used.
        binary: `reward.custom_reward_function.reward_kwargs.binary`: the score is `exact`, else `digits` + `careful`.
        **kwargs: What verl passes besides.

    Returns:
        "score" and the parts "exact", "digits", "format" and "careful" of :mod:`rl_plugins.lab.demo.rewards`.
    """
    completion, answer = [solution_str], [ground_truth]
    parts = {
        "exact": rewards.exact(None, completion, answer=answer)[0],
        "digits": rewards.digits(None, completion, answer=answer)[0],
        "format": rewards.format(None, completion, answer=answer)[0],
        "careful": rewards.careful(completion)[0],
    }
    return {"score": parts["exact"] if binary else parts["digits"] + parts["careful"], **parts}


def overrides(
    data: Path, model: Path, out: Path, *, methods: Iterable[str] = (), steps: int = STEPS, test_every: int = 20
) -> list[str]:
    """Hydra overrides of a run of the demo on verl and a CPU.

    Args:
        data: Folder with train.parquet and test.parquet.
        model: Folder of the policy.
        out: Where the run may write.
        methods: Methods to train with, with the rewards and parameters they have in the demo; without any, verl's own
            trainer `sync`.
        steps: Training steps.
        test_every: Steps from one evaluation on the held-out prompts to the next.
    """
    methods = list(methods)
    rows = PROMPTS * SAMPLES
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    lines = [
        # What is trained
        "algorithm.adv_estimator=grpo",
        f"data.train_files={quoted(data / 'train.parquet')}",
        f"data.val_files={quoted(data / 'test.parquet')}",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=16",
        "data.max_response_length=14",
        "data.dataloader_num_workers=0",
        "data.seed=1",
        f"actor_rollout_ref.model.path={quoted(model)}",
        f"{rollout}.n={SAMPLES}",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.val_kwargs.do_sample=True",
        f"{rollout}.val_kwargs.temperature=1.0",
        f"{actor}.ppo_mini_batch_size={PROMPTS}",
        f"{actor}.optim.lr=6e-4",
        f"{actor}.optim.lr_warmup_steps=10",
        f"{actor}.optim.weight_decay=0",
        "reward.custom_reward_function.path=pkg://rl_plugins.lab.demo.verl_data",
        "reward.custom_reward_function.name=compute_score",
        # A CPU instead of GPUs: our platform and rollout backend, float32, no kernels that need a GPU
        "trainer.device=cpu",
        f"{rollout}.name=hf_cpu",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.dtype=float32",
        f"{actor}.strategy=fsdp2",
        f"+{actor}.fsdp_config.mixed_precision.param_dtype=fp32",
        "+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=fp32",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        # Few processes: every one imports torch and verl
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        f"{rollout}.agent.num_workers=1",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=8",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.object_store_memory=300000000",
        f"{actor}.ppo_micro_batch_size_per_gpu={rows}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={rows}",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={rows}",
        # The run
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1000",
        f"trainer.test_freq={test_every}",
        "trainer.val_before_train=True",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        'trainer.logger=["console","file"]',
        "trainer.project_name=rl-plugins",
        "trainer.experiment_name=laptop",
        f"trainer.default_local_dir={quoted(out / 'checkpoints')}",
        f"hydra.run.dir={quoted(out / 'hydra')}",
    ]
    if not methods:
        return lines
    lines += ["trainer.v1.trainer_mode=rl_plugins_sync", f"+rl_plugins.methods=[{','.join(methods)}]", *suited(methods)]
    for method in methods:
        for name, value in demo_params(method).items():
            lines.append(f"+rl_plugins.method_params.{method}.{name}={quoted(value)}")
    return lines


def reward_weights(methods: Iterable[str]) -> tuple[float, ...]:
    """Weights of `REWARDS` that give methods something to act on."""
    return BINARY if any(map(wants_binary, methods)) else GRADED


def suited(methods: Iterable[str]) -> list[str]:
    """Overrides that give methods something to act on: the rewards they are for, and two updates per batch for one that
    corrects for off-policy updates. Runs that are compared must share them."""
    methods = list(methods)
    weights = reward_weights(methods)
    lines = [f"+reward.custom_reward_function.reward_kwargs.binary={weights == BINARY}"]
    for name, weight in zip(REWARDS, weights, strict=True):
        lines.append(f"+rl_plugins.rewards.{name}={weight}")
    if _several_updates(methods):
        lines.append("actor_rollout_ref.actor.ppo_epochs=2")
    return lines


def reasons(methods: Iterable[str]) -> list[str]:
    """What `suited` sets for all variants because of single methods, a sentence each."""
    methods, lines = list(methods), []
    if binary := [name for name in methods if wants_binary(name)]:
        lines.append(
            f"The reward is `exact` alone in all variants, because {needing(binary)} a reward that only tells right "
            f"from wrong."
        )
    if several := _several_updates(methods):
        lines.append(
            f"`actor_rollout_ref.actor.ppo_epochs` is 2 in all variants, because {needing(several)} several updates "
            f"per batch."
        )
    return lines


def _several_updates(methods: Iterable[str]) -> list[str]:
    classes = {name: registry.select([name]).classes.values() for name in methods}
    return [
        n
        for n, found in classes.items()
        if any({"off_policy", "several_updates"} & set(example_of(c).needs) for c in found)
    ]


def choices(lines: Iterable[str]) -> dict[str, list[str]]:
    """Reason -> the overrides that the demo chooses for the user. What a CPU needs is not among them."""
    why = {
        "trainer.resume_mode": "every run begins at step 0, also when the folder holds checkpoints",
        "+reward.custom_reward_function.reward_kwargs": "the score is graded, or right or wrong, as the methods need",
        "+rl_plugins.rewards": "parts of the score that the methods see, with their weights",
        "actor_rollout_ref.actor.ppo_epochs": "two updates per batch, for methods that correct for off-policy updates",
        "+rl_plugins.method_params": "parameters that suit the demo's few levels of reward and groups of 4",
    }
    found: dict[str, list[str]] = {}
    for line in lines:
        for key, reason in why.items():
            if line.startswith((f"{key}=", f"{key}.")):
                found.setdefault(reason, []).append(line)
    return found


def replaced(lines: Sequence[str], own: Sequence[str]) -> list[str]:
    """Overrides of the demo, those of the user's in their places: a key that both give has the user's value."""
    keys = {line.partition("=")[0].lstrip("+"): line for line in lines}
    given = [word for word in own if not word.startswith("~") and word.partition("=")[0].lstrip("+") in keys]
    gone = {word.partition("=")[0].lstrip("+") for word in given}
    kept = [line for key, line in keys.items() if key not in gone]
    # hydra takes `++` for a key that its config has and for one that it does not have
    return kept + [f"++{word.lstrip('+')}" if word in given else word for word in own]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rl_plugins.lab.demo.verl_data",
        description="Write the demo's data and print the overrides of a run of verl on a CPU, one per line.",
    )
    parser.add_argument("folder", type=Path, help="folder for data and results")
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="methods to train with")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    parser.epilog = "Overrides of yours may follow `--`; they replace those of the demo."
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:end])
    try:
        lines = _prepared(arguments.folder, arguments.methods, arguments.steps)
    except RLPluginsError as e:
        sys.exit(f"rl-plugins: {e}")
    except ImportError as e:
        if told := missing_package(e):
            sys.exit(f"rl-plugins: {told}")
        raise
    all_lines = replaced(lines, words[end + 1 :])
    print("\n".join(all_lines))
    print("Set for you by the demo; an override of your own after `--` replaces it:", file=sys.stderr)
    for reason, found in choices(line for line in lines if line in all_lines).items():
        print("\n".join(f"  {line}" for line in found), f"\n      {reason}", file=sys.stderr)


def _prepared(folder: Path, methods: Sequence[str], steps: int) -> list[str]:
    """Writes the data and returns the overrides of the demo. A name that is no method writes nothing."""
    from rl_plugins.lab.demo.policy import load_policy

    lines = overrides(folder / "data", load_policy(), folder, methods=methods, steps=steps)
    claim(folder / "data", "demo")
    write(folder / "data")
    return lines


if __name__ == "__main__":
    main()
