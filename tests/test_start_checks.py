"""What arithmetic rules out before a run starts: a method refuses it, and takes the next run that is large enough."""

import contextlib
import dataclasses

import pytest
from messages import raises

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Bundle
from rl_plugins.runtime import registry
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing.data import make_run

ENVIRONMENT = "rl_plugins.lab.demo.environments.calculator:Calculator"
JUDGE = "rl_plugins.lab.demo.judges:digits"
SWARM = {"exchange": "swarm", "node": "me"}


def rows(prompts, size=4):
    """A batch of so many groups."""
    return {"batch_rows": prompts * size, "group_size": size}


def longest(tokens):
    return {"max_completion_length": tokens}


def group(size):
    return {"group_size": size}


# Method, parameters, a run that is refused, and the smallest change of it that is taken.
CASES = {
    # tokens and the completion length
    "latr looks ahead too far": ("latr", {}, longest(49), longest(50)),
    "latr looks ahead beyond its tree": ("latr", {"lookahead": [5, 9], "max_tree_tokens": 8}, longest(64), None),
    "arrol detects too late": ("arrol", {}, longest(512), longest(513)),
    "echo_tree branches too late": ("echo_tree", {"min_depth": 16}, longest(16), longest(17)),
    "dora_data looks for a long loop": ("dora_data", {"loop_tokens": 65}, longest(64), longest(65)),
    "dora_length begins with no token": ("dora_length", {"shares": [0.1, 1.0]}, longest(9), longest(10)),
    "drive has a phase of long ones": ("drive", {"max_tokens": [8, 8, 8, 33]}, longest(32), longest(33)),
    "branch_text_rollout splits too late": ("branch_text_rollout", {"places": [0, 6]}, longest(6), longest(7)),
    "turns of turn_control": ("turn_control", {"turn_tokens": 17, "limit": 3}, longest(16), longest(17)),
    "turns of cleaner": ("cleaner", {"turn_tokens": 17}, longest(16), longest(17)),
    "turns of aepo_rollout": ("aepo_rollout", {"turn_tokens": 17}, longest(16), longest(17)),
    "turns of rtv_pdr": ("rtv_pdr", {"turn_tokens": 17, "environment": ENVIRONMENT}, longest(16), longest(17)),
    "answers of sub-agents": ("m_grpo_rollout", {"sub_tokens": 17}, longest(16), longest(17)),
    "turns of ui_s1_rollout": ("ui_s1_rollout", {"step_tokens": 17}, longest(16), longest(17)),
    "scope has one step": ("scope", {"prm": JUDGE, "min_step": 16}, longest(16), longest(17)),
    "blocks of ass": ("ass", {"blocks": 17}, longest(16), longest(17)),
    "steps of sol_rl_explore": ("sol_rl_explore", {"steps": 9}, longest(8), longest(9)),
    # hosts without a masked policy
    **{f"{name} in verl": (name, {}, {"host": "verl"}, {}) for name in ("ass", "eoser", "cj_grpo")},
    # rollouts and the group size
    "aepo_rollout begins all": ("aepo_rollout", {"initial_rollouts": 8}, group(8), group(9)),
    "arrol keeps all": ("arrol", {"min_keep": 4, "detect_tokens": 2}, group(4), group(5)),
    "adhint_rollouts hints none": ("adhint_rollouts", {"hinted_share": 0.2}, group(4), group(5)),
    "latr grows one row": ("latr", {"eta": [0.3], "eta_steps": [0], "lookahead": [2]}, group(4), group(6)),
    "v0 has nothing to take away": ("v0", {"min_rollouts": 4}, group(4), group(5)),
    "v0 has nothing to give": ("v0", {"max_rollouts": 4}, group(4), group(3)),
    "v0_5 has no room": ("v0_5", {"k_init": 5}, group(4), group(5)),
    "gdro_rollout has nothing to take away": ("gdro_rollout", {"n_min": 4}, group(4), group(5)),
    "gdro_rollout has nothing to give": ("gdro_rollout", {"n_max": 4}, group(4), group(3)),
    "xrpo_allocate gives all at first": ("xrpo_allocate", {"n_first": 4}, group(4), group(5)),
    "xrpo_allocate with pairs": ("xrpo_allocate", {}, group(2), group(3)),
    "best_perm has no room for hints": ("best_perm", {"templates": ["{prompt} 1"], "n_first": 4}, group(4), group(5)),
    "dart_rollouts takes none away": ("dart_rollouts", {"n_min": 4}, group(4), group(5)),
    "dars has no room": ("dars", {"n_first": 5}, group(4), group(5)),
    "grpo_roc keeps more than there are": ("grpo_roc", {"min_wrong": 3}, group(4), group(5)),
    "brpo compares with nobody": ("brpo", {"judge": JUDGE, "reference": 4}, group(4),
                                  group(5)),
    "branch_text_rollout has few leaves": ("branch_text_rollout", {"places": [0]}, group(3), group(2)),
    # prompts of a batch
    "v0 and one prompt": ("v0", {}, rows(1), rows(2)),
    "gdro_rollout and one prompt": ("gdro_rollout", {}, rows(1), rows(2)),
    "gdro_prompt and one prompt": ("gdro_prompt", {}, rows(1), rows(2)),
    "xrpo_allocate and one prompt": ("xrpo_allocate", {}, rows(1), rows(2)),
    "swarm_sapo and one prompt": ("swarm_sapo", SWARM, rows(1), rows(2)),
    "fission_grpo and one prompt": ("fission_grpo", {"share": 0.5, "group_size": 2}, rows(1), rows(2)),
    "brorl's ramp is above the batch": ("brorl", {"ramp": [[0, 16]]}, rows(3), rows(4)),
    # shares of a batch that come to no group
    "fission_grpo serves none": ("fission_grpo", {}, rows(2), rows(4)),
    "fission_grpo with larger groups": ("fission_grpo", {"group_size": 8}, rows(4), rows(8)),
    "rollout_replay replays none": ("rollout_replay", {"fresh_share": 0.75}, rows(3), rows(4)),
    "rollout_replay and one prompt": ("rollout_replay", {}, rows(1), rows(2)),
    "dora_reuse reuses none": ("dora_reuse", {"spare_share": 1.0}, rows(3), rows(4)),
    "dora_reuse makes none to spare": ("dora_reuse", {"reuse_ratio": 0.5}, rows(3), rows(4)),
    "april begins no other": ("april", {"over_sampling": 1.5}, rows(1), rows(2)),
}  # fmt: skip


def check(name, params, **facts):
    host = "diffusion" if name in ("branch_rollout", "sol_rl_explore") else "trl"
    given = (
        {"environment": ENVIRONMENT} if name in ("turn_control", "cleaner", "aepo_rollout", "m_grpo_rollout") else {}
    )
    fields = {f.name for f in dataclasses.fields(registry.load(name).Params)}
    given = {key: value for key, value in given.items() if key in fields}
    columns = ("prompt", "answer", "reference", "expert")
    run = make_run(**{"host": host, "max_completion_length": 64, "columns": columns, "dataset_size": 16, **facts})
    build_stack([name], {name: {**given, **params}}).check(run)


@pytest.mark.parametrize("case", CASES)
def test_what_arithmetic_rules_out_is_refused(case):
    name, params, small, large = CASES[case]
    with raises(ConfigError, match=f"`{name}`"):
        check(name, params, **small)
    if large is not None:
        check(name, params, **large)


def test_defaults_fit_a_run_of_usual_size():
    """16 prompts with 8 rollouts of up to 1,024 tokens."""
    run = make_run(batch_rows=128, group_size=8, max_completion_length=1024, dataset_size=512)
    refused = set()
    for name in registry.all_names():
        cls = registry.load(name)
        if isinstance(cls, Bundle):
            continue
        with contextlib.suppress(ConfigError):  # parameters that must be given
            method = cls()
            try:
                method.check(run)
            except ConfigError:
                refused.add(name)
    assert refused == {"adhint_rollouts", "areal_admission", "branch_rollout", "fission_grpo_reward"}


@pytest.mark.parametrize(
    ("name", "params", "facts"),
    [
        ("v0", {"allocation": "uniform"}, rows(1)),
        ("arrol", {"keep_ratio": 1.0}, longest(16)),
        ("latr", {"tau_ed": None, "stop_when_full": False}, longest(16)),
        ("latr", {"eta": [0.0], "eta_steps": [0]}, longest(16)),
        ("echo_tree", {"max_branches": 1}, longest(2)),
        ("dora_data", {}, longest(16)),
        ("swarm_sapo", {**SWARM, "external_groups": 0}, rows(1)),
        ("fission_grpo", {"share": 1.0}, rows(1)),
        ("gdro_prompt", {"weight_form": "paper"}, rows(1)),
        ("rollout_replay", {"fresh_share": 1.0}, rows(1)),
        ("dora_reuse", {"reuse_ratio": 0.0, "spare_share": 0.0}, rows(1)),
        ("april", {"over_sampling": 1.0}, rows(1)),
        ("april", {"over_sampling": 1.5}, {**rows(1), "host": "verl"}),
        ("v0", {}, {"buffered": True, **rows(1)}),
        ("fission_grpo", {}, {"buffered": True, **rows(2)}),
        ("fission_grpo", {}, {"batch_rows": None}),
    ],
)
def test_a_part_that_is_off_rules_nothing_out(name, params, facts):
    check(name, params, **facts)
