"""What a run with a dataset of 10^6 rows costs before its first step: doctor, dry run, the trainer, TRL's beside them.

    python benchmarks/scale_start.py --rows 1000000

CPU seconds of this process, and rows that Python took from the dataset, by whomever. Reading the dataset's file, which
`datasets` does once and keeps, is a line of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import datasets
import pyarrow.parquet
import torch
import trl
import typer
import yaml
from datasets import arrow_dataset
from scale_state import dataset_of

from rl_plugins.commands.doctor import dry_run, examine
from rl_plugins.lab.demo.policy import build_model, build_tokenizer
from rl_plugins.lab.demo.rewards import format as rewarded
from rl_plugins.trl import GRPOConfig, GRPOTrainer

METHODS: dict[str, dict[str, Any]] = {"vade": {}, "mc_grpo": {"mad_eps": 0.1}}
SMALL: dict[str, Any] = dict(
    use_cpu=True,
    bf16=False,
    report_to="none",
    save_strategy="no",
    max_steps=1,
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=4,
    disable_tqdm=True,
    logging_steps=1,
)


@contextlib.contextmanager
def rows_read() -> Iterator[list[int]]:
    """How many rows of a `datasets.Dataset` were taken from its table, a column's values included."""
    count, query, walk = [0], arrow_dataset.query_table, arrow_dataset.table_iter

    def queried(*args: Any, **kwargs: Any) -> Any:
        found = query(*args, **kwargs)
        count[0] += found.num_rows
        return found

    def walked(*args: Any, **kwargs: Any) -> Any:
        for found in walk(*args, **kwargs):
            count[0] += found.num_rows
            yield found

    arrow_dataset.query_table, arrow_dataset.table_iter = queried, walked
    try:
        yield count
    finally:
        arrow_dataset.query_table, arrow_dataset.table_iter = query, walk


def measured(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    start = time.process_time()
    with rows_read() as count, contextlib.redirect_stdout(io.StringIO()) as text:
        made = work()
    if made == 1:  # a command that found a problem
        raise RuntimeError(text.getvalue())
    return made, {"seconds": round(time.process_time() - start, 3), "rows": count[0]}


def main(rows: int = 10**6) -> None:
    """Prints a line for each part."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        datasets.config.HF_DATASETS_CACHE = folder / "cache"
        policy, data, config = folder / "policy", folder / "data", folder / "run.yaml"
        build_model(0).save_pretrained(policy)
        build_tokenizer().save_pretrained(policy)
        data.mkdir()
        pyarrow.parquet.write_table(dataset_of(rows).data.table, data / "train.parquet")
        run = {**SMALL, "model_name_or_path": str(policy), "dataset_name": str(data), "output_dir": str(folder / "out")}
        run |= {"reward_funcs": ["rl_plugins.lab.demo.rewards.format"], "methods": [*METHODS], "method_params": METHODS}
        config.write_text(yaml.safe_dump(run))
        argv = ["--config", str(config)]
        found = {"reading the file, once": measured(lambda: datasets.load_dataset(str(data)))[1]}
        found["dry run"] = measured(lambda: dry_run(argv))[1]
        found["doctor"] = measured(lambda: examine(config, [], None, None))[1]
        dataset = datasets.load_dataset(str(data))["train"]
        for who, trainer, args in (
            ("TRL", trl.GRPOTrainer, trl.GRPOConfig(output_dir=str(folder / "a"), **SMALL)),
            (
                "ours",
                GRPOTrainer,
                GRPOConfig(output_dir=str(folder / "b"), methods=[*METHODS], method_params=METHODS, **SMALL),
            ),
        ):
            made, found[f"trainer, {who}"] = measured(
                lambda trainer=trainer, args=args: trainer(
                    model=str(policy), reward_funcs=rewarded, args=args, train_dataset=dataset
                )
            )
            found[f"one step, {who}"] = measured(made.train)[1]
        for part, cost in found.items():
            print(json.dumps({"part": part, **cost}))


if __name__ == "__main__":
    typer.run(main)
