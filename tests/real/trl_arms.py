"""Runs of every method of the registry in TRL on the shallow copy of the real model, beside the same run without it.

An arm is found by the method's name; a method that is not in `ARMS` runs alone with the parameters of its card's
example, so a new one is in the table by itself."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import reasoning_helpers as helpers
import torch
from datasets import Dataset
from shallow_policy import LAYERS, TOOL, shallow_policy
from transformers import AutoModelForCausalLM, set_seed
from transformers.trainer_callback import PrinterCallback

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Idle
from rl_plugins.environments import reasoning_gym
from rl_plugins.lab.real.model import model_path
from rl_plugins.methods.swarm_sapo import Files, Package
from rl_plugins.methods.swarm_sapo.packages import written_files
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file
from rl_plugins.trl import GRPOConfig, GRPOTrainer

PROMPTS, GROUP = 4, 4
TEXT: dict[str, Any] = {
    "per_device_train_batch_size": PROMPTS * GROUP,
    "num_generations": GROUP,
    "max_steps": 1,
    "max_completion_length": 8,
    "learning_rate": 0.3,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": 0,
}
UPDATES = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.5}
AGENT = {"max_completion_length": 44, "per_device_train_batch_size": 2 * GROUP}
WHOLE = {"per_device_train_batch_size": PROMPTS * GROUP}
PLAY = {"turn_control": {"environment": helpers.Tool, "limit": 3, "turn_tokens": 16, "remind_from": 0}}


@dataclass(frozen=True)
class Arm:
    """How a method is run.

    Args:
        beside: methods named before it, in the run that it is compared with, too.
        after: methods named after it, in its run only.
        params: of all of them.
        options: of the config, for both runs.
        rewards: of both runs.
        in_steps: rewards of the method's own run in their place: the same sums, as lists.
        tool: whether the system prompt asks for the tool.
        size: rows of the dataset; few, where a method has to meet a prompt again.
        watches: why it changes no weight in this run.
        refused: words of the error that is expected, empty if the run shall go.
        why: the reason, for the table.
        not_applicable: it is for another kind of policy.
    """

    beside: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    rewards: tuple[str, ...] = ("solved",)
    in_steps: tuple[str, ...] = ()
    tool: bool = False
    size: int = 24
    watches: str = ""
    refused: str = ""
    why: str = ""
    not_applicable: bool = False

    @property
    def key(self) -> Any:
        """What a run without the method shares with others."""
        return self.beside, tuple(sorted(self.options.items())), self.rewards, self.tool, self.size


def replayed(**more: Any) -> Arm:
    return Arm(
        beside=("rollout_replay",), params={"rollout_replay": {"start_batch": 1}}, options={"max_steps": 3}, **more
    )


def agent(*beside: str, params: Any = None, **more: Any) -> Arm:
    return Arm(
        beside=("turn_control", *beside),
        params=PLAY | (params or {}),
        options={**AGENT, **more.pop("options", {})},
        rewards=("episode_score", "worked"),
        tool=True,
        **more,
    )


MASKED = Arm(refused="masked", why="decodes masked diffusion models, and this one is causal", not_applicable=True)
IMAGES = Arm(refused="diffusion", why="makes samples of diffusion policies", not_applicable=True)
AHEAD = Arm(refused="areal_admission", why="generation runs ahead of training in verl's asynchronous modes only")
EPISODES = dict(options=AGENT, rewards=("episode_score", "worked"), tool=True)
BINS = {"edges": [0.1], "hysteresis": 0.0}
BRANCHES = {
    "aepo_rollout": {"environment": helpers.Tool, "turn_tokens": 16, "initial_rollouts": 2, "branch_probability": 0.5}
}
SLICES = {"difficulty_slices": {"heads": 2, "refresh": 1}}
TREE = {"branch_text_rollout": {"places": [0, 1, 2]}}
TEAM = {"m_grpo_rollout": {"parse": helpers.blocks, "max_calls": 1, "max_turns": 2}, "m_grpo": {"sub_per_rollout": 1}}
STEPS = {
    "ui_s1_rollout": {"match": helpers.same_answer, "max_steps": 2},
    "ui_s1": {"rows_per_rollout": 2, "filter_by": "none"},
}
UPDATED = Arm(options=UPDATES, rewards=("solved", "brief"))
ARMS: dict[str, Arm] = {
    "adhint_advantages": Arm(beside=("adhint_rollouts",)),
    "adhint_gradients": Arm(beside=("adhint_rollouts",)),
    "aepo": Arm(params=BRANCHES, **{**EPISODES, "options": {**AGENT, **UPDATES}}),
    "aepo_clip": UPDATED,
    "aepo_rollout": Arm(params=BRANCHES, **EPISODES),
    "april": Arm(params={"april": {"over_sampling": 2.0}}, options={"max_steps": 2}),
    "areal": AHEAD,
    "areal_admission": AHEAD,
    "arrol": Arm(
        params={"arrol": {"detect_tokens": 2, "cold_start": 1, "fit_steps": 5, "success_threshold": 1.5}},
        options={"max_steps": 3},
        rewards=("solved", "brief"),
    ),
    "ass": MASKED,
    "best_perm": Arm(params={"best_perm": {"hints_column": "hints"}}),
    "branch_advantages": Arm(beside=("branch_text_rollout",), params=TREE),
    "branch_grpo": IMAGES,
    "branch_pruning": Arm(beside=("branch_text_rollout",), params=TREE),
    "branch_rollout": IMAGES,
    "branch_text_rollout": Arm(params=TREE),
    "brorl": Arm(params={"brorl": {"ramp": [[0, 8]], "base_rows": 8}}),
    "brpo": Arm(params={"brpo": {"judge": helpers.shorter}}),
    "cj_grpo": MASKED,
    "cleaner": Arm(
        params={"cleaner": {"environment": helpers.Tool, "marker": "```python", "turn_tokens": 16, "max_turns": 4}},
        **EPISODES,
    ),
    "dars": Arm(params={"dars": {"n_first": 2, "n_max": 8}}),
    "dars_b": Arm(params={"dars": {"n_first": 2, "n_max": 8}}, options={"max_steps": 2}),
    "dars_breadth": Arm(options={"max_steps": 2}),
    "dart": agent(options={"max_steps": 3}, size=2),
    "dart_advantages": agent(),
    "dart_entropy": agent(),
    "dart_length": agent(
        options={"max_steps": 3}, size=2, watches="no rollout takes more turns than the longest success of its prompt"
    ),
    "dart_pool": Arm(options={"max_steps": 3}, size=4),
    "dart_rollouts": Arm(
        params={"dart_rollouts": {"success_threshold": 0.1}},
        options={"max_steps": 3},
        rewards=("solved", "brief"),
        size=4,
    ),
    "dart_tis": replayed(),
    "decoupled_ppo": replayed(),
    "d3s": Arm(options={"max_steps": 2}),
    "difficulty_slices": Arm(params=SLICES, options={"max_steps": 3}, rewards=("solved", "brief")),
    "dora": replayed(),
    "dora_length": Arm(params={"dora_length": {"shares": [0.5, 1.0], "window": 8}}),
    "dora_loss": replayed(),
    "dora_reuse": Arm(options={"max_steps": 3}, rewards=("solved", "brief")),
    "dots": Arm(params={"dots": {"embeddings": helpers.embeddings, "references": 4}}),
    "dots_rr": Arm(
        params={
            "dots": {"embeddings": helpers.embeddings, "references": 4},
            "rollout_replay": {"start_batch": 1},
        },
        options={"max_steps": 3},
    ),
    "dppo": replayed(),
    "drive": Arm(params={"drive": {"sizes": [1.0, 0.5], "batches": [1]}}, rewards=("solved", "brief")),
    "echo": Arm(
        params={
            "echo_labels": {"n_votes": 6, "extract": reasoning_gym.answer_of},
            "echo_tree": {"entropy_delta_threshold": -9.0},
        },
        options=UPDATES,
    ),
    "echo_clip": UPDATED,
    "echo_labels": Arm(params={"echo_labels": {"n_votes": 6, "extract": reasoning_gym.answer_of}}),
    "echo_tree": Arm(params={"echo_tree": {"entropy_delta_threshold": -9.0}}),
    "econprover": Arm(params=SLICES, options={"max_steps": 3}, rewards=("solved", "brief")),
    "eoser": MASKED,
    "epo": agent(options={"max_steps": 2}),
    "fapo": Arm(params={"fapo": {"judge": helpers.divisors}}),
    "fission_grpo": Arm(
        params={"fission_grpo": {"role": "user", "correctness": "solved"}}, rewards=("solved", "brief")
    ),
    "fission_grpo_reward": Arm(
        params={"fission_grpo_reward": {"format": "brief", "correctness": "solved"}},
        rewards=("solved", "brief"),
    ),
    "gdpo": Arm(rewards=("solved", "brief")),
    "gdro_prompt": Arm(params={"gdro_prompt": BINS}, options={"max_steps": 3}, rewards=("solved", "brief"), size=6),
    "gdro_rollout": Arm(
        params={"gdro_rollout": {"n_min": 2, "n_max": 8, "tie": "first", "success_threshold": 1.5, **BINS}},
        options={"max_steps": 4, "learning_rate": 0.05},
        rewards=("solved", "brief"),
        size=4,
    ),
    "gigpo": agent(),
    "grpo_roc": Arm(params={"grpo_roc": {"penalty": helpers.length_penalty}}),
    "hgpo": agent(),
    "kl_cov": UPDATED,
    "latr": Arm(params={"latr": {"lookahead": [1, 2], "tau_abs": 0.1, "tau_rel": 0.6}}),
    "linear_ts": Arm(params={"linear_ts": {"column": "task", "draws": 4}}),
    "m_grpo": Arm(
        beside=("m_grpo_rollout",),
        params=TEAM,
        options=AGENT | WHOLE,
        rewards=("solved", "worked"),
        tool=True,
    ),
    "m_grpo_ratio": UPDATED,
    "m_grpo_rollout": Arm(
        after=("m_grpo",),
        params=TEAM,
        options=AGENT | WHOLE,
        rewards=("solved", "worked"),
        tool=True,
    ),
    "mdlm": MASKED,
    "minpro": replayed(),
    "mssr": Arm(options={"beta": 0.04}),
    "mssr_baseline": Arm(options={"beta": 0.04}),
    "mssr_prompts": Arm(options={"beta": 0.04}),
    "opd": Arm(params={"opd": {"teacher": str(model_path(layers=LAYERS))}}),
    "ppo_million": replace(UPDATED, watches="it lowers the learning rate at a plateau, and only if `action` says so"),
    "process_supervision": Arm(params={"process_supervision": {"separator": " "}}, in_steps=("first_word",)),
    "ps_grpo": Arm(),
    "reward_audit": Arm(watches="it takes rows out only where it finds a fault of the reward"),
    "rollart": AHEAD,
    "rollart_redundancy": agent(),
    "rollout_replay": Arm(params={"rollout_replay": {"start_batch": 1}}, options={"max_steps": 3}),
    "rtv_pdr": Arm(
        params={
            "rtv_pdr": {
                "training": "refined",
                "attempts": 4,
                "keep": 2,
                "votes": 2,
                "summary_tokens": 8,
                "judge_tokens": 8,
            }
        },
    ),
    "rubric": Arm(params={"rubric": {"judge": helpers.fulfils, "criteria": ("2: short", "1: a number")}}),
    "scope": Arm(
        params={
            "scope": {
                "prm": helpers.last_is_wrong,
                "corrector": helpers.right_answer,
                "separator": " = ",
                "min_step": 1,
                "min_prefix": 0.0,
            }
        },
        options={"max_completion_length": 12},
    ),
    "sol_rl": IMAGES,
    "sol_rl_explore": IMAGES,
    "swarm_sapo": Arm(params={"swarm_sapo": {"node": "me", "external_groups": 2}}),
    "training_free_grpo": Arm(params={"training_free_grpo": {"llm": helpers.advise}}),
    "turn_control": Arm(params=PLAY, **EPISODES),
    "ui_s1": Arm(
        beside=("ui_s1_rollout",),
        params=STEPS,
        options={"max_completion_length": 16},
        rewards=("solved", "worked"),
        tool=True,
    ),
    "ui_s1_rollout": Arm(
        after=("ui_s1",),
        params=STEPS,
        options={"max_completion_length": 16},
        rewards=("solved", "worked"),
        tool=True,
    ),
    "vcpo": replayed(),
    "v0": Arm(options={"max_steps": 3, "learning_rate": 0.05}, size=4),
    "v0_5": Arm(size=4),
    "xrpo": Arm(),
    "xrpo_novelty": Arm(options={"max_steps": 2}),
}


def arm_of(name: str) -> Arm:
    """Two batches where a method learns from one for the next, else one."""
    parts = registry.select([name]).classes
    arm = ARMS.get(name) or Arm(params={part: dict(card_file(cls).example_params) for part, cls in parts.items()})
    if "max_steps" in arm.options or not any(
        {"observe", "select_prompts"} & set(cls.claims()) for cls in parts.values()
    ):
        return arm
    return replace(arm, options={**arm.options, "max_steps": 2})


@dataclass
class Run:
    """What a run left: layers of the model before and after it, and what it logged."""

    before: torch.Tensor
    after: torch.Tensor
    log: list[dict[str, float]]
    seconds: float

    @property
    def update(self) -> torch.Tensor:
        return self.after - self.before

    def of(self, method: str) -> dict[str, list[float]]:
        """Metrics of a method, their values over the steps."""
        found: dict[str, list[float]] = {}
        for entry in self.log:
            for key, value in entry.items():
                if key.startswith(f"{method}/"):
                    found.setdefault(key.partition("/")[2], []).append(float(value))
        return found


def layers(model: Any) -> torch.Tensor:
    """All weights but the embedding."""
    return torch.cat([p.detach().flatten() for name, p in model.named_parameters() if "embed" not in name]).clone()


def rewards_of(names: Sequence[str]) -> list[Any]:
    return [getattr(helpers, name, None) or getattr(reasoning_gym, name) for name in names]


def make(folder: Path, methods: Sequence[str], arm: Arm, **changes: Any) -> Any:
    """The trainer of an arm."""
    parts = registry.select(list(methods), {}).classes if methods else {}
    params = {name: dict(values) for name, values in arm.params.items() if name in parts}
    if "swarm_sapo" in params:
        params["swarm_sapo"]["exchange"] = str(swarm(folder))
    more = {name: changes.pop(name) for name in ("peft_config", "model") if name in changes}
    rows = changes.pop("dataset", None) or Dataset.from_list(
        helpers.with_columns(arm.size, TOOL if arm.tool else reasoning_gym.SYSTEM)
    )
    if "model" not in more:
        more["model"] = AutoModelForCausalLM.from_pretrained(shallow_policy())
        more["model"].get_input_embeddings().weight.requires_grad_(False)  # half of the time of a step
    args = GRPOConfig(
        output_dir=str(folder / "out"),
        methods=list(methods),
        method_params=params,
        **{**TEXT, **arm.options, **changes},
    )
    set_seed(0)
    trainer = GRPOTrainer(
        reward_funcs=rewards_of(arm.in_steps if arm.in_steps and methods else arm.rewards),
        args=args,
        train_dataset=rows,
        **more,
    )
    trainer.remove_callback(PrinterCallback)
    set_seed(0)
    return trainer


def train(folder: Path, methods: Sequence[str], arm: Arm, **changes: Any) -> Run:
    began = time.process_time()
    trainer = make(folder, methods, arm, **changes)
    before = layers(trainer.model)
    trainer.train()
    run = Run(before, layers(trainer.model), trainer.state.log_history, time.process_time() - began)
    del trainer
    gc.collect()
    return run


def swarm(folder: Path) -> Path:
    """An exchange with packages of another node."""
    packages = []
    for row in helpers.with_columns(8):
        answer = row["answer"]
        texts = (answer, f"{answer} é 日本 🙂", f"The answer is {answer}.", "none")
        columns = {k: v for k, v in row.items() if k != "prompt"}
        packages.append(Package(row["prompt"], columns, texts, (True, False, True, True)))
    for name, data in written_files("other", 0, packages, 10**6).items():
        Files(folder / "swarm").put(name, data)
    return folder / "swarm"


def outcome(name: str, folder: Path, baselines: dict[Any, Run]) -> dict[str, Any]:
    """One line of the table. Products of matrices are in bfloat16 where the processor has them: half of the time."""
    torch.set_float32_matmul_precision("medium")
    try:
        return _outcome(name, folder, baselines)
    finally:
        torch.set_float32_matmul_precision("highest")


def _outcome(name: str, folder: Path, baselines: dict[Any, Run]) -> dict[str, Any]:
    arm = arm_of(name)
    methods = [*arm.beside, name, *arm.after]
    if arm.refused:
        try:
            make(folder, methods, arm)
        except ConfigError as error:
            kind = "not applicable" if arm.not_applicable else "refused"
            return {"method": name, "outcome": kind, "why": arm.why, "error": str(error)}
        return {"method": name, "outcome": "not refused"}
    run = train(folder, methods, arm)
    parts = registry.select([name]).classes
    own = {f"{part}/{key}": v for part in parts for key, v in run.of(part).items()}
    moved = {key: v for key, v in own.items() if any(x and math.isfinite(x) for x in v)}
    idle = [part for part, cls in parts.items() if any(_idle(sign, run.of(part)) for sign in cls.idle)]
    if arm.key not in baselines:
        baselines[arm.key] = train(folder / "baseline", arm.beside, arm)
    base = baselines[arm.key]
    size = float(base.update.norm())
    difference = float((run.after - base.after).norm())
    said = "idle" if (idle and len(idle) == len(parts)) or (own and not moved) else "acted"  # some log nothing
    if said == "acted" and difference <= 1e-4 * max(size, float(run.update.norm())):
        said = "watched" if arm.watches else "no other weights"
    return {
        "method": name,
        "outcome": said,
        "why": arm.watches,
        "beside": list(arm.beside),
        "idle": idle,
        "metrics": {key: round(sum(v) / len(v), 6) for key, v in moved.items()},
        "silent": sorted(set(own) - set(moved)),
        "update": float(run.update.norm()),
        "baseline_update": size,
        "difference": difference,
        "seconds": round(run.seconds, 1),
    }


def _idle(sign: Idle, metrics: Mapping[str, Sequence[float]]) -> bool:
    """Whether all batches showed the sign."""
    columns = [metrics.get(name, []) for name in sign.signs]
    return (
        bool(columns)
        and all(columns)
        and all(all(v == wanted for v in values) for values, wanted in zip(columns, sign.signs.values(), strict=True))
    )
