"""Runs cases in one process or under torchrun and saves what came out: `ranks_script.py OUT CASES [fsdp2]`.

CASES is JSON: [[name, methods, options], ..]; the option "real" lets the policy generate. The main rank writes
{name: {weights, prompts, advantages, logs}}.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path

if "fsdp2" in sys.argv:
    os.environ.update(
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION="2",
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_TRANSFORMER_CLS_TO_WRAP="Qwen3DecoderLayer",
        FSDP_RESHARD_AFTER_FORWARD="true",
        FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT",
        FSDP_CPU_RAM_EFFICIENT_LOADING="false",
    )
sys.path.insert(0, str(Path(__file__).parent))

import probes
import torch
from harness import WORLD, history, make, policy, stub_sampling

from rl_plugins.demo.tasks import build_dataset

probes.register()


def full_weights(trainer):
    from torch.distributed.tensor import DTensor

    parts = [p.detach() for p in trainer.model.parameters()]
    return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).float().flatten() for p in parts])


def run(folder, methods, options):
    from rl_plugins.trl import generation as module

    decisions = []
    finish = module.GenerationBatch.finish

    def spy(self, out):
        out = finish(self, out)
        if self.decided.decision is not None:
            d = self.decided.decision
            decisions.append(
                dict(
                    prompt=d.rollouts.prompt_index,
                    group=d.rollouts.group,
                    trained=d.trained,
                    advantages=d.row_advantages,
                    reward=d.rollouts.reward,
                )
            )
        sizes.append(len(out["advantages"]))
        return out

    sizes, in_host = [], []
    decide_in_host = module.GenerationBatch.decide_in_host
    module.GenerationBatch.decide_in_host = lambda self, a: in_host.append(1) or decide_in_host(self, a)
    module.GenerationBatch.finish = spy
    try:
        options = dict(options)
        if rows := options.pop("rows", None):
            options["dataset"] = build_dataset(rows, seed=1)
        resume = options.pop("resume", None)
        with contextlib.nullcontext() if options.pop("real", False) else stub_sampling():
            t = make(folder, methods, **options)
            t.train(resume_from_checkpoint=resume and str(folder / "out" / f"checkpoint-{resume}"))
    finally:
        module.GenerationBatch.finish, module.GenerationBatch.decide_in_host = finish, decide_in_host
    assert set(sizes) == {64 // WORLD}, sizes
    kind = type(t.model_wrapped).__name__ if "fsdp2" in sys.argv else ""
    names = [
        n
        for n in (
            "loss",
            "grad_norm",
            "reward",
            "ppo/ratio",
            "ppo/rows",
            "completions/mean_length",
            "frac_reward_zero_std",
            "softmax/groups",
            "clip_ratio/region_mean",
            "talk/talked",
        )
        if history(t, n)
    ]
    return dict(
        weights=full_weights(t),
        decisions=decisions,
        logs={n: history(t, n) for n in names},
        read=history(t, "rl_plugins/contexts_read"),
        kind=kind,
        decided_in_host=bool(in_host),
    )


def main(out, cases):
    folder = Path(out).parent
    policy(Path(folder) / "policy")
    results = {}
    for name, methods, options in cases:
        results[name] = run(folder, methods, options)
    if os.environ.get("RANK", "0") == "0":
        torch.save(results, out)


if __name__ == "__main__":
    try:
        main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
    except Exception:
        traceback.print_exc()
        raise
