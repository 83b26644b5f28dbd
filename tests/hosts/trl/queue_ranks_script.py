"""Three steps with a queue on several ranks: `queue_ranks_script.py OUT`, under torchrun.

The main rank writes what was drawn, trained and left waiting, and the weights of every rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import probes
import torch
from accelerate.utils import gather_object
from harness import history, make, policy, weights

from rl_plugins.trl.generation import queue


def main(out: Path) -> None:
    probes.register()
    policy(out.parent / "policy")
    steps: list[dict[str, Any]] = []
    ranks: list[dict[str, int]] = []
    admit, decide_advantages, decode = queue.admit, queue.requeue, queue.decode

    def watched_admit(*args: Any) -> Any:
        groups = admit(*args)
        steps.append({"fresh": [g.row.prompt_index for g in groups if not g.rollouts]})
        return groups

    def watched_settle(stack: Any, groups: Any, order: Any, enough: int) -> Any:
        found = decide_advantages(stack, groups, order, enough)
        steps[-1]["after"] = {g.row.prompt_index: g.rollouts for g in groups}
        steps[-1]["trained"] = [g.row.prompt_index for g in found[0]]
        return found

    def watched_decode(trainer: Any, groups: Any, enough: int, row_of: Any) -> Any:
        found = decode(trainer, groups, enough, row_of)
        tokens = sum(len(t) for g in found[0] for t in g.rollouts) - sum(len(t) for g in groups for t in g.rollouts)
        ranks.append({"wanted": enough, "complete": sum(g.complete for g in found[0]), "decoded": tokens})
        return found

    queue.admit, queue.requeue, queue.decode = watched_admit, watched_settle, watched_decode
    trainer = make(
        out.parent, ["over_begin"], max_steps=3, learning_rate=0.05, num_generations=2, max_completion_length=120
    )
    begin = weights(trainer).clone()
    trainer.train()
    of_ranks, after = gather_object([ranks]), gather_object([weights(trainer)])
    if trainer.accelerator.is_main_process:
        for k, step in enumerate(steps):
            step["decoded"] = [of[k]["decoded"] for of in of_ranks]
        torch.save(
            {
                "steps": steps,
                "ranks": [r for of in of_ranks for r in of],
                "waiting": [g["row"]["prompt_index"] for g in trainer.methods.carried],
                "costs": {n: history(trainer, f"rl_plugins/{n}") for n in ("tokens_decoded", "rows_made")},
                "begin": begin,
                "weights": after,
            },
            out,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    if torch.distributed.is_initialized():  # else gloo sometimes aborts a process that is done
        torch.distributed.destroy_process_group()
