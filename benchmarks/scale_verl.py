"""What the driver of verl does with one batch, beside verl's own `_compute_advantage`: measured by scale_driver.py.

TransferQueue is replaced by rows in memory for both, so what remains is the work itself, and what it reads and writes.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

os.environ.setdefault("VERL_PLATFORM", "cpu")
sys.path.append(str(Path(__file__).parents[1] / "tests" / "hosts" / "verl"))

from memory_queue import MemoryQueue
from scale_driver import GROUP, PARTS, READ, TURN, ReadsTokens, copied, least

HOST_TOKENS = 5 * 10**7  # more would take verl's own function above 6 GB


class TimedQueue(MemoryQueue):
    """Keeps what it is given, and how long it took to read and to write."""

    def __init__(self) -> None:
        super().__init__()
        self.spent = {"gather": 0.0, "dump": 0.0}

    def kv_batch_get(self, *args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        out = super().kv_batch_get(*args, **kwargs)
        self.spent["gather"] += time.process_time() - start
        return out

    def kv_batch_put(self, *args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        out = super().kv_batch_put(*args, **kwargs)
        self.spent["dump"] += time.process_time() - start
        return out


def measure(method: str, rows: int, tokens: int) -> dict[str, Any]:
    """Seconds and peak memory of one case, in this process."""
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1 import trainer_base

    from rl_plugins.runtime.stack import MethodStack
    from rl_plugins.verl import batch as module
    from rl_plugins.verl.config import Settings, compose

    torch.set_num_threads(1)
    config = compose(
        [
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.rollout.n={GROUP}",
            f"data.max_response_length={2 * tokens}",
            f"data.train_batch_size={rows // GROUP}",
        ]
    )
    own = method != ReadsTokens.name
    settings = Settings((method,) if own else (), rewards={"right": 1.0, "short": 1.0} if method == "gdpo" else {})
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(tokens // 2, tokens * 3 // 2 + 1, (rows,), generator=draw).tolist()
    count = sum(lengths)
    took: dict[str, list[float]] = {part: [] for part in (*PARTS, "host_own")}
    for _ in range(5 if count < 2 * 10**7 else 2):
        queue = TimedQueue()
        module.tq = trainer_base.tq = queue  # type: ignore[attr-defined]
        stack = settings.stack() if own else MethodStack([ReadsTokens()])
        turns = "turns" in stack.needs
        queue.rows = {
            f"u{i // GROUP}_{i % GROUP}_0": _row(i, n, draw, turns, count < HOST_TOKENS) for i, n in enumerate(lengths)
        }
        tags = [{"global_steps": 1, "min_global_steps": 0} for _ in lengths]
        batch = KVBatchMeta(partition_id="train", keys=list(queue.rows), tags=tags)
        mine = module.Decisions(stack, config, settings.rewards, _Tokenizer(), rows)
        mine.stack.start(_run(rows))
        start = time.process_time()
        selected = mine.select(batch)
        ours = time.process_time() - start
        before = dict(queue.spent)
        if count < HOST_TOKENS:
            start = time.process_time()
            trainer_base.PPOTrainer._compute_advantage(SimpleNamespace(config=config), selected.batch, {})
            took["host_own"].append(time.process_time() - start)
        of_host = {part: queue.spent[part] - before[part] for part in before}
        start = time.process_time()
        mine.decide_advantages(selected.batch, selected)
        ours += time.process_time() - start
        for part in of_host:
            took[part].append(queue.spent[part] - of_host[part])
        took["decide"].append(ours - took["gather"][-1] - took["dump"][-1])
        del queue, batch, selected
    found: dict[str, Any] = least({part: values or [0.0] for part, values in took.items()})
    if count >= HOST_TOKENS:
        del found["host_own"]
    found["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    if stack.reads_tokens:
        found["copy"] = copied(count * (8 + 8 + 8 + 1 + 1 + 4 * len(stack.token_columns)))
    return found


def _row(i: int, length: int, draw: torch.Generator, turns: bool = False, columns: bool = True) -> dict[str, Any]:
    """A row as agent-loop workers write it; columns whose values say nothing here take no memory."""
    from rl_plugins.verl.prompts import COLUMN, NUMBERS

    score = float(i % 3 == 0)
    note = {"prompt_index": i // GROUP, "wave": "w", "group": i // GROUP, "place": i // GROUP, "round": 0}
    note |= {"prefix": [], "max_tokens": None, "given": [], "payload": None}
    mask = (
        (torch.arange(length) % TURN < TURN - READ).long() if turns else torch.ones(1, dtype=torch.int64).expand(length)
    )
    extra = {"reward_extra_info": {"right": score, "short": float(i % 2)}}
    extra |= {NUMBERS: (length, int(mask.sum()), 5, score)}
    row = {
        "uid": f"u{i // GROUP}",
        "prompts": torch.full((64,), 4),
        "responses": torch.full((1,), 5).expand(length),
        "response_mask": mask,
        "loss_mask": mask,
        "extra_fields": extra,
        COLUMN: note,
    }
    if columns:  # what verl's own function and token methods read
        scores = torch.zeros(length)
        scores[-1] = score
        row |= {"rm_scores": scores, "old_log_probs": -torch.rand(length, generator=draw)}
        row |= {"entropy": torch.rand(length, generator=draw)}
    return row


class _Tokenizer:
    eos_token_id, pad_token_id = 1, 0

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:
        return [f"state {len(row)}" for row in rows]


def _run(rows: int) -> Any:
    from rl_plugins.core.rollouts import Run

    return Run("verl", "0.9.1", None, rows, (), ("score",), GROUP, 10, 10, 32768)
