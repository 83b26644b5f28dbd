"""The runs whose traces docs/inspect.md shows: small policies in TRL's trainer, as `rl-plugins demo` makes them.

    python docs/figures/inspect/runs.py inspect-runs             # all that are not there yet
    python docs/figures/inspect/runs.py inspect-runs april       # one

Each is one process on one core, and takes about a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rl_plugins.lab.demo import agents, settings
from rl_plugins.lab.demo.environments.policy import agent_policy_path, load_agent_policy
from rl_plugins.lab.demo.policy import load_policy, policy_path

SIGNALS = ("entropies", "old_logprobs", "rollout_logprobs")


@dataclass(frozen=True)
class Shown:
    """A run that is shown.

    Args:
        methods, params: of the run.
        values: options of TRL that differ from the demo's.
        environment: of agents; empty: the tasks of sorting digits.
        signals: of the trace.
    """

    methods: Sequence[str]
    params: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    environment: str = ""
    signals: tuple[str, ...] = SIGNALS


BINARY = {"reward_weights": list(settings.BINARY)}
GRID = ("turn_control", "gigpo")
RUNS = {
    "format": Shown(["gdpo"]),
    # a weight of 0.05 for the right digits, and of 1 for the mark
    "hack": Shown(["gdpo"], {}, {"reward_weights": [0.0, 0.05, 1.0], "num_generations": 8, "learning_rate": 1e-3}),
    "zero": Shown(["grpo_roc"], {"grpo_roc": dict(settings.demo_params("grpo_roc"))}, BINARY),
    "scale": Shown(["mc_grpo"], {}, {"num_generations": 8}),
    "latr": Shown(["latr"], {}, BINARY, "", ("entropies", "old_logprobs")),  # it has no sampling log-probs
    "pruned": Shown(
        ["branch_text_rollout", "branch_advantages", "branch_pruning"],
        {"branch_text_rollout": {"places": [2, 4, 6]}},
        {"num_generations": 8},
    ),
    "april": Shown(["april"], {"april": {"over_sampling": 3.0}}, {}, "", (*SIGNALS, "token_versions")),
    # without a decay, so that no prompt returns to the prior
    "vade": Shown(["vade"], {"vade": {"selected_decay": 1.0, "unselected_decay": 1.0}}, BINARY),
    "linear_ts": Shown(["linear_ts"], {"linear_ts": {"column": "level", "draws": 16}}, BINARY),
    "gigpo": Shown(GRID, {}, {"max_steps": 40}, "Grid", (*SIGNALS, "turns")),
    "aepo": Shown(["aepo_rollout"], {}, {"max_steps": 30}, "Calculator", ("old_logprobs", "turns")),
    "truncated": Shown(["mc_grpo"], {"mc_grpo": {"advantage_clip": 3.0}}, {"max_completion_length": 8}),
}


def make(name: str, out: Path) -> None:
    """Trains a run, unless it is there.

    Raises:
        SystemExit: the run failed; its output is in `log.txt`.
    """
    shown, folder = RUNS[name], out / name
    if (folder / "done").exists():
        return
    data = out / "data" / (shown.environment or "digits")
    if shown.environment:
        load_agent_policy(shown.environment)
        agents.write_data(data, shown.environment)
        values = agents.config(agent_policy_path(shown.environment).absolute(), data.absolute(), long=False)
        params = agents.params(shown.methods, shown.environment)
    else:
        load_policy()
        settings.write_data(data)
        values = settings.config(policy_path().absolute(), data.absolute(), shown.methods, long=False)
        params = {}
    for method, own in shown.params.items():
        params[method] = {**params.get(method, {}), **own}
    values |= {"eval_strategy": "no", "eval_on_start": False, "seed": 1, **shown.values}
    values |= {"output_dir": str(folder), "methods": list(shown.methods), "method_params": json.dumps(params)}
    values["trace"] = json.dumps({"signals": list(shown.signals)})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-m", "rl_plugins.commands.cli", "trl", "grpo", "--config", str(folder / "config.yaml")],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings.environment(out)},
        )
    if done.returncode:
        raise SystemExit(f"{name} failed: {folder / 'log.txt'}")
    (folder / "done").touch()


if __name__ == "__main__":
    for wanted in sys.argv[2:] or RUNS:
        make(wanted, Path(sys.argv[1]))
        print(wanted, flush=True)
