"""Runs of `ranks_script.py`; what is trained with sharded parameters (FSDP2, DeepSpeed), and what must come of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from waiting import NEVER

SCRIPT = Path(__file__).parent / "ranks_script.py"
FSDP2 = {  # options of `accelerate launch`, as users write them
    "use_fsdp": "",
    "fsdp_version": "2",
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer",
    "fsdp_reshard_after_forward": "true",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": "false",
    "num_machines": "1",
    "mixed_precision": "no",
    "dynamo_backend": "no",
}

_ROWS: dict[str, Any] = dict(loss_type="grpo", beta=0.04)
ADAM: dict[str, Any] = dict(optim="adamw_torch", adam_epsilon=1e-3, learning_rate=1e-3)
_SAVED: dict[str, Any] = dict(max_steps=4, resume=2, evaluate=2)
CORRIDOR: dict[str, Any] = {  # a narrow one around the entropy of each turn of a program
    "walk": {"greedy": True, "uneven": True},
    "epo": {"entropy_coeff": 0.1, "corridor": "turn", "kl": 0.999, "kr": 1.001, "rho": 2.0, "phase": "none"},
}
_REAL: dict[str, Any] = dict(real=True, max_completion_length=130, top_k=1)  # TRL's own samples are greedy, too

# Hooks of the driver with a surrogate; rows that leave, on one rank only; a loss of whole groups with micro-batches and
# a factor on a schedule; every row leaves, so nothing may move; no step at all; a program that generates, with a
# corridor for the entropy of its turns, evaluated by TRL's own generation; a program that evaluates; LoRA with layers
# that are computed again in the backward pass.
SHARDED: list[Any] = [
    ["surrogate", ["vade", "minpro"], {**_SAVED, **ADAM, "num_iterations": 2}],
    ["rows leave", ["over"], {**_SAVED, **ADAM, **_ROWS, "method_params": {"over": {"first": False}}}],
    [
        "whole groups",
        ["drpo"],
        {**ADAM, "max_steps": 2, "gradient_accumulation_steps": 2, "method_params": {"drpo": {"threshold": 0.5}}},
    ],
    [
        "half rate",
        ["softmax"],
        dict(max_steps=3, learning_rate=0.05, lr_scheduler_type="linear", method_params={"softmax": {"lr_scale": 0.5}}),
    ],
    ["none left", ["none_left"], {**ADAM, "max_steps": 3}],
    ["no step", ["idle"], {**ADAM, **_ROWS}],
    [
        "program",
        ["walk", "epo"],
        {**_SAVED, **_ROWS, **_REAL, "learning_rate": 0.05, "method_params": CORRIDOR},
    ],
    ["evaluated", ["evaluated"], dict(max_steps=2, learning_rate=0.05, evaluate=2)],
    [
        "lora",
        ["vade", "minpro"],
        {**_SAVED, **ADAM, "num_iterations": 2, "lora": True, "gradient_checkpointing": True},
    ],
]
# What is sampled depends on the ranks, so only the resumed run can be compared: groups wait while a checkpoint is made.
QUEUE: list[Any] = [
    ["queue", ["over_begin"], {**_SAVED, **ADAM, "real": True, "num_generations": 2, "max_completion_length": 40}]
]
TOLERANCE = 3e-7  # largest difference of a weight to those of one process


def launch(tmp_path, cases, ranks, *flags, **environment):
    """(return code, output, results) of a run of the script on this many ranks."""
    out = tmp_path / f"out{ranks}{''.join(flags)}.pt"
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, str(SCRIPT), str(out), str(tmp_path / "cases.json"), *flags]
    if "fsdp2" in flags:
        options = [text for name, value in FSDP2.items() for text in (f"--{name}", value) if text]
        command[1:1] = ["-m", "accelerate.commands.launch", *options, f"--num_processes={ranks}"]
    elif ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=NEVER, env=variables)
    text = done.stdout + done.stderr
    return done.returncode, text, torch.load(out, weights_only=False) if out.exists() else None


def same(one: Any, two: Any, tolerance: float) -> None:
    """The same decisions, weights within the tolerance, the same numbers logged."""
    for a, b in zip(one["decisions"], two["decisions"], strict=True):
        for key in ("prompt", "group", "trained", "reward"):
            assert torch.equal(a[key], b[key]), key
        torch.testing.assert_close(a["advantages"], b["advantages"], rtol=1e-6, atol=1e-9)
    assert (one["weights"] - two["weights"]).abs().max() < tolerance
    for key, values in one["logs"].items():
        atol = 1e-3 if key == "epo/within" else 1e-5  # rounding may take a token across a bound
        torch.testing.assert_close(torch.tensor(two["logs"][key]), torch.tensor(values), rtol=1e-4, atol=atol, msg=key)


def resumed_alike(found: Any, batches: int) -> None:
    """The resumed run made the last batches of the uninterrupted one, and has its weights bit for bit."""
    resumed, whole = found["resumed"], found["decisions"]
    assert len(resumed["decisions"]) == batches > 0
    for a, b in zip(resumed["decisions"], whole[-batches:], strict=True):
        assert torch.equal(a["prompt"], b["prompt"]) and torch.equal(a["advantages"], b["advantages"])
    assert torch.equal(resumed["weights"], found["weights"])


def check_sharded(one: Any, results: Any, kind: str, sharded_files: tuple[str, str]) -> None:
    """The results of two sharded ranks beside those of one process.

    Args:
        kind: what the model must be wrapped in.
        sharded_files: ends of files of a checkpoint, one of each rank.
    """
    for name, _, options in SHARDED + QUEUE:
        found = results[name]
        assert found["kind"].startswith(kind), name
        assert (found["weights"] - found["begin"]).abs().max() > 100 * TOLERANCE or name == "no step", name
        if name in one:
            if kind.endswith(" 3"):  # without a gradient ZeRO-3 logs the norm of the step before
                told, norms = found["logs"]["grad_norm"], one[name]["logs"]["grad_norm"]
                found["logs"]["grad_norm"] = [a if b else 0.0 for a, b in zip(told, norms, strict=True)]
            same(one[name], found, TOLERANCE)
        if "resume" in options:
            resumed_alike(found, batches=len(found["decisions"]) // 2)
            assert "rl_plugins/state.json" in found["files"]
            for end in sharded_files:
                assert any(file.endswith(end) for file in found["files"]), (name, end)
        if "evaluate" in options:
            assert len(found["logs"]["eval_reward"]) == options["max_steps"] / options["evaluate"]
    within = results["program"]["logs"]["epo/within"]
    assert within[0] == 1 and min(within[1:]) > 0 and max(within[1:]) < 1
    assert within[2:] == results["program"]["resumed"]["logs"]["epo/within"][-2:], "the corridor is in the checkpoint"
    assert max(results["program"]["read"]) < 0.3, "contexts are known to sharded ranks, too"
    assert len(results["queue"]["waiting"]) == 32
