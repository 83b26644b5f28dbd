"""A trace where others look: a table in the tracker of the run, and its files in a dataset of the Hugging Face Hub."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAME = "rl_plugins/rollouts"
COLUMNS = (
    "batch",
    "group",
    "prompt_index",
    "prompt",
    "completion",
    "raw_reward",
    "reward",
    "grpo",
    "advantage",
    "trained",
)
DATASET_CARD = """\
---
configs:
{configs}
tags: [rl-plugins]
---
The trace of a run with rl-plugins: what was generated, what each method did with it, and why.
"""


def table_rows(records: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Records of `rollouts` as rows of `COLUMNS`, and the notes of methods as one text."""
    notes = ("\n".join(f"{n['method']}: {n['text']}" for n in r["notes"]) for r in records)
    return [[*(r[c] for c in COLUMNS), said] for r, said in zip(records, notes, strict=True)]


def log_table(rows: list[list[Any]]) -> None:
    """Logs rows to every tracker that has a run in this process: W&B, trackio. Without one, or without rows, it does
    nothing."""
    if not rows:
        return
    columns = [*COLUMNS, "notes"]
    wandb, trackio = sys.modules.get("wandb"), sys.modules.get("trackio")
    if wandb is not None and wandb.run is not None:
        wandb.run.log({NAME: wandb.Table(columns=columns, data=rows)}, commit=False)  # the host's next log commits
    if trackio is not None and trackio.context_vars.current_run.get() is not None:
        # at the batch, or trackio would count a step more and stretch the host's curves
        trackio.log({NAME: trackio.Table(columns=columns, data=rows)}, step=rows[-1][0])


def push(folder: Path, repository: str) -> None:
    """Uploads the tables of a trace into a dataset repository, which is made, private, where there is none."""
    from huggingface_hub import HfApi

    api = HfApi()
    where: dict[str, Any] = {"repo_id": repository, "repo_type": "dataset"}
    tables = sorted(table.name for table in folder.iterdir() if any(table.glob("*.parquet")))
    configs = "\n".join(f"- {{config_name: {name}, data_files: {name}/*.parquet}}" for name in tables)
    api.create_repo(**where, private=True, exist_ok=True)
    api.upload_folder(**where, folder_path=folder, allow_patterns="*/*.parquet")
    api.upload_file(**where, path_or_fileobj=DATASET_CARD.format(configs=configs).encode(), path_in_repo="README.md")
