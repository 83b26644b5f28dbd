"""Runs cases in one process, under torchrun or `accelerate launch`, and saves what came out:
`ranks_script.py OUT CASES [MODE]`.

MODE is how the training is sharded: fsdp2, zero2 or zero3 (DeepSpeed). CASES is JSON: [[name, methods, options], ..].
Options beside those of the config: "real" lets the policy generate; "resume" saves at this step and trains once more
from that checkpoint; "rows" is the size of the dataset, "sets" that of the sets of its rows; "evaluate" evaluates
every so many steps; "lora" trains adapters alone; "swarm" puts so many packages of another node into an exchange. The
main rank writes {name: {weights, decisions, logs, resumed, ..}}.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path

MODE = sys.argv[3] if len(sys.argv) > 3 else ""
if MODE.startswith("zero"):
    AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    ZERO = {"stage": int(MODE[-1]), "stage3_param_persistence_threshold": 0}  # by default none of so small a model
    Path(sys.argv[1]).with_suffix(".json").write_text(
        json.dumps({"zero_optimization": ZERO, **dict.fromkeys(AUTO, "auto")})
    )
    os.environ.update(
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_DEEPSPEED_CONFIG_FILE=str(Path(sys.argv[1]).with_suffix(".json")),
        DS_ACCELERATOR="cpu",
    )
sys.path.insert(0, str(Path(__file__).parent))

import probes
import pyarrow.parquet as pq
import torch
from harness import WORLD, history, make, policy, stub_sampling
from peft import LoraConfig
from swarm_packages import fill
from torch.distributed.tensor import DTensor

from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.trl.generation import batches as module

probes.register()
if MODE.startswith("zero"):
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled here, in two minutes

LOGGED = (
    "loss",
    "grad_norm",
    "reward",
    "ppo/ratio",
    "ppo/rows",
    "completions/mean_length",
    "frac_reward_zero_std",
    "softmax/groups",
    "rl_plugins/staleness_mean",
    "minpro/weight_mean",
    "ppo_million/kl",
    "ppo_million/lr_scale",
    "clip_ratio/region_mean",
    "talk/talked",
    "epo/covered",
    "epo/within",
    "epo/penalty",
    "dart_pool/replaced",
    "dart_tis/weight_mean",
    "ps_grpo/consistency",
    "ps_grpo/distinct_answers",
    "learning_rate",
    "eval_reward",
    "eval_completions/mean_length",
)


def full_weights(trainer):
    parts = list(trainer.model.parameters())
    if MODE == "zero3":
        with deepspeed.zero.GatheredParameters(parts):
            return torch.cat([p.detach().float().flatten() for p in parts])
    return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).detach().float().flatten() for p in parts])


def kind(trainer):
    """What the model is wrapped in, and how far it is sharded."""
    wrapped = trainer.model_wrapped
    if MODE.startswith("zero"):
        return f"{type(wrapped).__name__} {wrapped.zero_optimization_stage()}"
    return type(wrapped).__name__ if MODE else ""


def run(folder, name, methods, options):
    options = {"output_dir": str(folder / f"out-{name}"), **options}
    real, resume, evaluate, rows, swarm, sets, lora = (
        options.pop(k, 0) for k in ("real", "resume", "evaluate", "rows", "swarm", "sets", "lora")
    )
    if swarm:
        if os.environ.get("RANK", "0") == "0":
            fill(folder / name, swarm)
        options["method_params"] = {"swarm_sapo": {"exchange": str(folder / name / "swarm"), "node": "me"}}
    if rows:
        options["dataset"] = build_dataset(rows, seed=1)
    if sets:
        names = [i % (rows // sets) for i in range(rows)]
        options["dataset"] = options["dataset"].add_column("paraphrase_set_id", names)
    if resume:
        options |= dict(save_strategy="steps", save_steps=resume)
    if evaluate:
        options |= dict(
            eval_strategy="steps",
            eval_steps=evaluate,
            per_device_eval_batch_size=16 // WORLD,
            more={"eval_dataset": build_dataset(4, seed=9)},
        )
    if lora:
        adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        options["more"] = options.get("more", {}) | {"peft_config": adapters}
    result = train(folder, methods, options, real)
    if resume:
        checkpoint = Path(options["output_dir"]) / f"checkpoint-{resume}"
        result["files"] = sorted(str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*"))
        result["resumed"] = train(folder, methods, options, real, str(checkpoint))
    return result


def train(folder, methods, options, real, checkpoint=None):
    decisions, sizes, in_host = [], [], []
    finish, decided_in_host = module.finish, module.decided_in_host

    def spy(trainer, batch, out):
        out = finish(trainer, batch, out)
        if batch.driver is not None:
            d = batch.driver.decision
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

    module.decided_in_host = lambda *given: in_host.append(1) or decided_in_host(*given)
    module.finish = spy
    try:
        with contextlib.nullcontext() if real else stub_sampling():
            t = make(folder, methods, **options)
            begin = full_weights(t)
            t.train(resume_from_checkpoint=checkpoint)
    finally:
        module.finish, module.decided_in_host = finish, decided_in_host
    assert set(sizes) == {64 // WORLD}, sizes
    return dict(
        begin=begin,
        weights=full_weights(t),
        decisions=decisions,
        logs={n: history(t, n) for n in LOGGED if history(t, n)},
        read=history(t, "rl_plugins/contexts_read"),
        kind=kind(t),
        waiting=t.methods.carried,
        decided_in_host=bool(in_host),
        trace=traced(Path(t.args.output_dir) / "trace") if t.args.trace else [],
    )


def traced(folder):
    """Records of all batches of a trace, without what tells one run from another."""
    names = ("rollouts", "batches", "updates")
    tables = [pq.read_table(p).to_pylist() for n in names for p in sorted((folder / n).iterdir())]
    records = [{k: v for k, v in record.items() if k != "time"} for table in tables for record in table]
    for record in records:
        if record.get("ratios"):  # of ranks, in no order of rows
            record["ratios"].sort(key=lambda r: r["row"])
    return records


def main(out, cases):
    folder = Path(out).parent
    policy(Path(folder) / "policy")
    results = {name: run(folder, name, methods, options) for name, methods, options in cases}
    if os.environ.get("RANK", "0") == "0":
        torch.save(results, out)


if __name__ == "__main__":
    try:
        main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
    except Exception:
        traceback.print_exc()
        raise
    if torch.distributed.is_initialized():  # else gloo sometimes aborts a process that is done
        torch.distributed.destroy_process_group()
