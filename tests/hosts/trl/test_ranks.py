"""Two gloo ranks decide and train like one; errors end all of them: a rank that went on waiting for the others would
wait for half an hour, longer than a launch may take."""

from __future__ import annotations

import pytest
import torch
from rank_runs import ADAM, CORRIDOR, QUEUE, SHARDED, check_sharded, launch, resumed_alike, same

pytestmark = [pytest.mark.host, pytest.mark.ranks]

ROWS = dict(loss_type="grpo", beta=0.04, max_steps=2, learning_rate=0.05)
OFF = dict(num_iterations=2, max_steps=4, learning_rate=0.05)
REAL = {"real": True, "max_completion_length": 130}
PASSES = dict(rows=30, max_steps=6, learning_rate=0.05)  # three steps a pass
REPLAY = {**OFF, "max_steps": 6, "resume": 4, "method_params": {"rollout_replay": {"start_batch": 1}}}
POOL = dict(  # a seventh of the rollouts is a success
    **dict(rows=10, max_steps=5, resume=3, learning_rate=0.05),
    method_params={"dart_pool": {"success_threshold": 0.8, "give_below": 1.0}},
)
SEEDS = {"max_steps": 3, "learning_rate": 0.05, "method_params": {"xrpo_seeds": {"second_round": False}}}
CUTS = {"action": "shrink", "window": 4, "alpha": 1e-6, "kl_share": 0.0}  # whatever the reward, a plateau
STAGES = {"sizes": [1.0, 6], "batches": [1], "rollouts": [8, 16], "max_tokens": [14, 6]}
CASES = [
    ["probing", ["probing"], dict(max_steps=2, learning_rate=0.05)],
    ["helpings", ["helpings"], dict(max_steps=2, learning_rate=0.05)],
    ["seeds", ["xrpo_allocate", "xrpo_seeds"], SEEDS],
    ["drive", ["drive"], dict(max_steps=3, learning_rate=0.05, resume=2, method_params={"drive": STAGES})],
    ["mc_grpo", ["mc_grpo"], dict(max_steps=2, learning_rate=0.05, gradient_accumulation_steps=2)],
    ["counter", ["counter"], dict(max_steps=3, learning_rate=0.05)],
    ["filter", ["filter", "ppo"], {**OFF, "trace": {"signals": ["old_logprobs", "ratio"]}}],
    ["softmax", ["softmax"], OFF],
    ["million", ["ppo_million"], {**OFF, "max_steps": 12, "method_params": {"ppo_million": CUTS}}],
    ["uneven", ["uneven"], ROWS],
    ["over first", ["over"], ROWS],
    ["over last", ["over"], {**ROWS, "method_params": {"over": {"first": False}}, "num_iterations": 2}],
    ["odd", ["odd"], ROWS],
    ["small", ["small"], ROWS],
    ["per token", ["per_token", "corridor"], {**ROWS, "loss_type": "dapo"}],
    ["minpro", ["vade", "minpro"], OFF],
    ["talk", ["talk", "gigpo"], dict(max_steps=2, learning_rate=0.05)],
    ["talk scored", ["talk"], {**ROWS, "method_params": {"talk": {"score": True}}}],
    ["rows", ["rows"], ROWS],
    ["labels", ["labels"], ROWS],
    ["zero", ["zero"], ROWS],
    ["walk", ["walk", "epo"], {**ROWS, **REAL, "method_params": CORRIDOR}],
    ["idle", ["idle"], {**ROWS, "optim": "adamw_torch"}],
    ["passes", ["mc_grpo"], {**PASSES, "resume": 4, "trace": True}],
    ["replay", ["rollout_replay", "minpro"], REPLAY],
    ["pool", ["dart_pool", "dart_tis"], POOL],
    ["sets", ["ps_grpo"], {**ADAM, **dict(rows=30, sets=3, max_steps=4, resume=2)}],
    ["swarm", ["swarm_sapo"], dict(max_steps=4, learning_rate=0.05, resume=2, swarm=24)],
]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    code, text, results = launch(tmp_path_factory.mktemp("one"), CASES + SHARDED, 1)
    assert code == 0, text
    return results


def sets_of(found):
    """The sets of all batches, each once a batch: two whole ones, 6 of 8 prompts."""
    batches = [set(d["prompt"].tolist()) for d in found["decisions"]]
    sets = [{i % 10 for i in prompts} for prompts in batches]
    assert [len(names) for names in sets] == [2] * 4, "two sets a batch"
    for prompts, names in zip(batches, sets, strict=True):
        assert prompts == {name + 10 * k for name in names for k in range(3)}, "a set was torn apart"
    return [name for names in sets for name in names]


def close(one, two, path=""):
    """Records that are equal, numbers up to rounding."""
    if isinstance(one, float):
        assert two == pytest.approx(one, rel=1e-4, abs=1e-5, nan_ok=True), path
    elif isinstance(one, dict):
        assert one.keys() == two.keys(), path
        for key in one:
            close(one[key], two[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), path
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            close(a, b, f"{path}[{i}]")
    else:
        assert one == two, path


def test_two_ranks_are_one(tmp_path, one_rank):
    """Ragged groups, fillers, rounds, rows that leave on one rank only, one rank keeping more than its share."""
    code, text, results = launch(tmp_path, CASES, 2)
    assert code == 0, text
    for name, _, _ in CASES:
        same(one_rank[name], results[name], 2e-7)
    close(one_rank["filter"]["trace"], results["filter"]["trace"])
    for run in (one_rank, results):  # resumed in the second pass over the dataset
        resumed_alike(run["passes"], batches=2)
        assert repr(run["passes"]["resumed"]["trace"]) == repr(run["passes"]["trace"]), "batches are written again"
        resumed_alike(run["drive"], batches=1)  # in the middle of a phase
        resumed_alike(run["replay"], batches=1)  # the stored groups lie in the checkpoint
        resumed_alike(run["swarm"], batches=2)  # so does the inbox
        resumed_alike(run["pool"], batches=2)  # so do stored successes
        assert max(run["pool"]["logs"]["dart_pool/replaced"]) > 0
        resumed_alike(run["sets"], batches=2)  # in the middle of an epoch, with the moments of Adam
        assert sorted(sets_of(run["sets"])) == sorted(set(sets_of(run["sets"]))), "every set once"
        assert [int((d["prompt"] < 0).sum()) for d in run["swarm"]["decisions"]] == [64, 64, 64, 0]
    assert results["replay"]["logs"]["rl_plugins/staleness_mean"][-1] > 0
    million = results["million"]["logs"]
    assert min(million["ppo_million/kl"][1::2]) > 0 and million["ppo_million/lr_scale"] == [1.0] * 10 + [0.5] * 2
    corridor = results["walk"]["logs"]
    assert corridor["epo/covered"] == [0, 1] and corridor["epo/within"][0] == 1 > corridor["epo/within"][1] > 0
    uneven = results["uneven"]["decisions"][0]["trained"]
    assert uneven[:32].sum() == 8 and uneven[32:].sum() == 32
    over = results["over first"]["decisions"][0]["trained"]
    helpings = results["helpings"]["decisions"][0]
    assert sorted(torch.bincount(helpings["group"]).tolist()) == [4] * 4 + [16] * 4, "rounds with edits"
    assert over[:48].sum() == 48, "the first rank keeps more rows than its 32 slots"


def test_fsdp2_is_one_rank(tmp_path, one_rank):
    """With its checkpoints, which every rank writes and reads its part of, and evaluation."""
    code, text, results = launch(tmp_path, SHARDED + QUEUE, 2, "fsdp2")
    assert code == 0, text
    check_sharded(one_rank, results, "FSDP", ("pytorch_model_fsdp_0/__1_0.distcp", "optimizer_0/__1_0.distcp"))


def test_an_error_of_the_driver_ends_all_ranks(tmp_path):
    message = "Method `boom` failed in `observe`: ValueError: the driver hook went wrong"
    case = [["boom", ["boom"], dict(max_steps=3, method_params={"boom": {"where": "driver"}})]]
    code, text, _ = launch(tmp_path, case, 2)
    assert code != 0 and "Remove `boom` from `methods`" in text
    assert text.count("rl_plugins.core.errors.MethodError: " + message) >= 2, "both ranks must say why"


def test_an_error_in_the_loss_of_one_rank_ends_all(tmp_path, plugin_path):
    """A method of another package, found through its entry point; only the loss of rank 1 raises."""
    case = [["dummy", ["dummy_fails"], {"max_steps": 3, "method_params": {"dummy_fails": {"hook": "policy_loss"}}}]]
    code, text, _ = launch(
        tmp_path,
        case,
        2,
        PYTHONPATH=str(plugin_path),
        DUMMY_FAILS_ON_RANK="1",
    )
    assert code != 0
    assert (
        "Method `dummy_fails` failed in `policy_loss`: ZeroDivisionError: asked to fail in policy_loss on rank 1"
        in text
    )
    assert "on rank 0" not in text
