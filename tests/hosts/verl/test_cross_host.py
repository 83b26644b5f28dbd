"""The same stored rollouts through both adapters: equal advantages, masks, columns and losses per token.

TRL's real trainer makes one batch of stubbed completions; its rows are then put into verl's form and go through the
verl adapter. Group statistics without a standard deviation, because the hosts add another epsilon to it.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "trl"))
os.environ.setdefault("VERL_PLATFORM", "cpu")

pytest.importorskip("trl", reason="TRL is not installed")

import harness
import probes
from memory_queue import MemoryQueue
from registering import registered
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerSync, trainer_base
from verl.utils.config import omega_conf_to_dataclass

from rl_plugins.core.rollouts import Completion
from rl_plugins.runtime import update
from rl_plugins.runtime.update import surrogate
from rl_plugins.trl.capabilities import known_of, run_of
from rl_plugins.trl.generation import batches, columns
from rl_plugins.trl.loss import micro_batch as trl_loss
from rl_plugins.verl import batch as verl_batch
from rl_plugins.verl import loss as verl_loss
from rl_plugins.verl.batch import Decisions
from rl_plugins.verl.config import Settings, compose
from rl_plugins.verl.loss import MethodsLoss, flat
from rl_plugins.verl.prompts import COLUMN, VERSIONS
from rl_plugins.verl.rows import ROW_COLUMN, TOKEN_COLUMN

pytestmark = pytest.mark.host

STACKS = [
    "mc_grpo",
    "gdpo",
    "grpo_roc",
    "minpro",
    "mc_grpo+minpro",
    "half+per_token",
    "filter+corridor",
    "judge",
    "fapo:judge=probes:flaw,reward_high=1.5",
    "odd",
    "reshaped",
    "decoupled_ppo",
    "vcpo",
    "ppo_million:action=shrink,window=4",
    "helpings",
    "dars:n_first=4",
    "xrpo_allocate+xrpo_novelty",
    "brorl",
    "epo:average=host,rho=2.0,phase=none,include_current=true,entropy_coeff=0.3,kl=0.9,kr=1.1",
    "aged+minpro+epo:average=host,rho=2.0,phase=none,include_current=true,entropy_coeff=0.3,kl=0.5,kr=1.5,mode=seq",
    "linear_ts:column=task",
    "best_perm:hints_column=answer,n_first=4",
    "aged+minpro",
    "aged+vcpo",
    "aged+dora_loss",
    "aged+dora_data:pure=drop+dora_loss",
    "aged+decoupled_ppo",
    "aged+decoupled_ppo:proximal=loglinear,action=clamp,upper=2.0",
    "aged+decoupled_ppo:proximal=linear,level=sequence,lower=0.5",
]
NOW = 5  # the newest published weights where stored rollouts come


@pytest.fixture(autouse=True, scope="module")
def _probes():
    with registered(Reshaped, Aged):
        yield


class Aged(probes.Probe):
    """The first two groups are stored rollouts of mixed versions, with log-probs of policies that are far away."""

    name = "aged"
    brings = {"off_policy"}

    def plan(self, plan):
        rng = random.Random(3)

        def stored():
            n = rng.randrange(3, 12)
            tokens = (*(rng.randrange(5, 20) for _ in range(n)), 1)
            logprobs = tuple(-rng.random() * 4 for _ in tokens)
            return Completion(tokens, logprobs, tuple(sorted(rng.choices(range(1, NOW + 1), k=len(tokens)))))

        rows = [r.replace(given=tuple(stored() for _ in range(r.n))) if i < 2 else r for i, r in enumerate(plan.rows)]
        return plan.replace(rows=tuple(rows))


def named(stack: str) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Methods and their parameters, written as `a+b:name=value,..`."""
    methods, params = [], {}
    for part in stack.split("+"):
        name, _, given = part.partition(":")
        methods.append(name)
        if given:
            params[name] = {k: yaml.safe_load(v) for k, v in (pair.split("=") for pair in given.split(","))}
    return methods, params


class Reshaped(probes.Probe):
    """Columns per row and per token reach the loss."""

    name = "reshaped"
    needs = frozenset({"tokens", "old_logprobs", "entropies", "rollout_logprobs"})

    def shape(self, rollouts, tokens):
        from rl_plugins.core.rollouts import Shape

        return Shape(
            row_columns={"hardness": 1 - rollouts.groups.rows(rollouts.groups.mean(rollouts.reward))},
            token_columns={"surprise": tokens.entropies - tokens.old_logprobs},
            old_logprobs=tokens.old_logprobs - 0.01 * tokens.position.float(),
        )

    def policy_loss(self, terms):
        from rl_plugins.core.losses import ppo_clip

        weight = terms.columns["hardness"] * (1 + terms.columns["surprise"])
        return ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages) * weight


def through_trl(folder: Path, methods: list[str], params: dict[str, Any]) -> dict[str, Any]:
    """One batch in TRL: what the driver saw and the losses per token at weights that moved since."""
    seen: dict[str, Any] = {}
    decide, with_columns, sampled = batches.decide, batches.with_columns, columns.rollout_logprobs

    def older(work, out):
        """As if a policy of some updates ago had sampled: weights of 0.3 to 3."""
        value = sampled(work, out)
        return value + 0.4 * torch.randn(value.shape, generator=torch.Generator().manual_seed(2))

    def watched(stack, rollouts, tokens, *more):
        seen.update(rollouts=rollouts, tokens=tokens)
        seen["decision"] = decide(stack, rollouts, tokens, *more)
        return seen["decision"]

    def watched_columns(trainer, scored, out):
        out, found = with_columns(trainer, scored, out)
        prompts = [ids[mask.bool()].tolist() for ids, mask in zip(out["prompt_ids"], out["prompt_mask"], strict=True)]
        seen.update(prompts=prompts, completions=scored.rows.ids, rows=scored.work.rows[0])
        seen["raw"] = {k: v.clone() for k, v in out.items() if isinstance(v, torch.Tensor)}
        if "entropies" in found:
            seen["raw"]["entropies"] = found["entropies"].clone()
        return out, found

    reward = [harness.score, harness.length]
    options: dict[str, Any] = dict(scale_rewards="none", reward_weights=[1.0, 0.5], num_iterations=2)  # two: off-policy
    trainer = harness.make(folder, methods, reward=reward, method_params=params or None, **options)
    trainer.state.global_step = seen["now"] = NOW if "aged" in methods else 0
    batches.decide, batches.with_columns, columns.rollout_logprobs = watched, watched_columns, older
    try:
        trainer.model.train()
        with harness.stub_sampling():
            loader = iter(trainer.get_train_dataloader())
            seen["run"] = run_of(known_of(trainer))
            trainer.methods.start(seen["run"])
            out = trainer._generate_and_score_completions(next(loader))
    finally:
        batches.decide, batches.with_columns, columns.rollout_logprobs = decide, with_columns, sampled
    torch.manual_seed(1)
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(torch.randn_like(p) * 0.02)

    def kept(stack, terms):
        seen["surrogate"] = surrogate(stack, terms)
        return seen["surrogate"]

    update.surrogate = kept
    trainer.current_gradient_accumulation_steps = 1
    if trainer.methods.claims["before_update"]:
        trainer._buffered_inputs, trainer._step = [out], 0
        seen["lr_scale"] = trl_loss.before_update(trainer)
    try:
        seen["loss"] = float(trainer.compute_loss(trainer.model, out))
    finally:
        update.surrogate = surrogate
    return {**seen, "out": out, "model": trainer.model, "tokenizer": trainer.processing_class}


def through_verl(monkeypatch: Any, trl: dict[str, Any], methods: list[str], params: dict[str, Any]) -> dict[str, Any]:
    """The same rows as verl's trainer hands them to the adapter, and its loss at the same weights."""
    queue = MemoryQueue()
    monkeypatch.setattr(verl_batch, "tq", queue)
    monkeypatch.setattr(trainer_base, "tq", queue)
    config = compose(
        [
            "algorithm.adv_estimator=grpo",
            "algorithm.norm_adv_by_std_in_grpo=False",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.actor.strategy=fsdp2",
            "actor_rollout_ref.actor.clip_ratio_c=1000",  # a second clip, which TRL has not
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
            "data.max_response_length=14",
            "+rl_plugins.methods=[]",
        ]
    )
    settings = Settings(tuple(methods), params, {"score": 1.0, "length": 0.5})
    stack = settings.stack()
    stack.start(trl["run"])
    raw, rollouts = trl["raw"], trl["rollouts"]
    rows: dict[str, dict[str, Any]] = {}
    now = trl["now"]
    versions: dict[str, list[int]] = {}
    waves: dict[int, list[int]] = {}  # group -> ids of its plan rows, in the order of the rounds
    for i, row in enumerate(trl["rows"]):
        if row.plan is None:
            continue
        response = torch.tensor(trl["completions"][i])
        n = len(response)
        mask = torch.ones(n, dtype=torch.int64)
        prompt = torch.tensor(trl["prompts"][i])
        scores = torch.zeros(n)
        scores[-1] = float(rollouts.reward[len(rows)])
        of_group = waves.setdefault(row.plan.group, [])
        if id(row.plan) not in of_group:
            of_group.append(id(row.plan))
        wave = of_group.index(id(row.plan))
        uid = f"uid{row.plan.group}" + (f"r{wave}" if wave else "")
        key = f"{uid}_{row.number}_0"
        versions[key] = list(row.versions or [now] * n)
        rows[key] = {
            "prompts": prompt,
            "responses": response,
            "input_ids": torch.cat([prompt, response]),
            "response_mask": mask,
            "loss_mask": mask.clone(),
            "rm_scores": scores,
            "uid": uid,
            **{name: values[len(rows)] for name, values in rollouts.meta.items()},
            "extra_fields": {
                "reward_extra_info": {
                    name: float(rollouts.rewards[len(rows), k]) for k, name in enumerate(("score", "length"))
                },
                VERSIONS: [[[v, 1] for v in versions[key]]],
            },
            COLUMN: {
                "prompt_index": row.plan.prompt_index,
                "wave": "w",
                "group": row.plan.group,
                "place": row.plan.group,
                "round": wave,
                "prefix": [],
                "max_tokens": None,
                "given": [],
                "payload": (rollouts.payload or [None] * len(rollouts))[len(rows)],
            },
            **{
                ours: raw[theirs][i, :n].float()
                for ours, theirs in (
                    ("old_log_probs", "old_per_token_logps"),
                    (
                        "rollout_log_probs",
                        "rlp_rollout_logprobs" if "rlp_rollout_logprobs" in raw else "old_per_token_logps",
                    ),
                    ("entropy", "entropies"),
                )
                if theirs in raw
            },
        }
    # verl hands rows over in the order they finished
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    keys = [list(rows)[i] for i in order]
    queue.put_rows(rows)
    tags = [
        {
            "global_steps": now + 1,
            "min_global_steps": min(versions[k]),
            "max_global_steps": max(versions[k]),
            "seq_len": len(rows[k]["input_ids"]),
        }
        for k in keys
    ]
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=tags)
    mine = Decisions(stack, config, settings.rewards, trl["tokenizer"], 64, now)
    selected = mine.select(batch)
    batch = selected.batch
    host = object.__new__(PPOTrainerSync)
    host.config = config
    tags = batch.tags
    host._compute_advantage(batch, {})
    decided = mine.decide_advantages(KVBatchMeta(partition_id="train", keys=batch.keys, tags=tags), selected)
    batch = decided.batch

    data = queue.kv_batch_get(batch.keys)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    loss = MethodsLoss(actor, settings, config)
    loss._published = now
    full, entropies = _full(trl["model"], data)
    from verl.utils import tensordict_utils as tu

    tokens = int(flat(data["loss_mask"]).sum())
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(batch))
    output = {"log_probs": full, "entropy": entropies}
    scale = 1.0
    if stack.claims["before_update"]:
        monkeypatch.setattr(verl_loss, "_gather", lambda value, group: [value])
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
        monkeypatch.setattr("verl.utils.device.get_device_id", lambda: "cpu")
        engine: Any = SimpleNamespace(infer_batch=lambda data: {"model_output": output})
        scale = loss._before_update(engine, data, None)
    value, _ = loss(output, data)
    per_token = surrogate(loss.stack, loss._terms(output, data)) if stack.claimed("policy_loss") else None
    return {"decision": decided.decision, "data": data, "loss": float(value), "surrogate": per_token, "lr_scale": scale}


def _nested(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def _full(model: Any, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of whole sequences, as verl's engine gives them: those of the next token."""
    full, entropies = [], []
    with torch.no_grad():
        for ids in data["input_ids"].unbind():
            logits = model(ids[None]).logits[0].log_softmax(-1)
            lp = torch.zeros(len(ids))
            lp[:-1] = logits[:-1].gather(1, ids[1:, None])[:, 0]
            full.append(lp)
            entropies.append(-(logits.exp() * logits).sum(-1))
    return _nested(full), _nested(entropies)


def by_row(trl: dict[str, Any], verl: dict[str, Any]) -> list[tuple[int, int]]:
    """Rows that are trained in both, matched by prompt and completion: (row of TRL's batch, row of verl's)."""
    out, data = trl["out"], verl["data"]
    theirs: dict[Any, list[int]] = {}
    for j, (p, r) in enumerate(zip(data["prompts"].unbind(), data["responses"].unbind(), strict=True)):
        theirs.setdefault((tuple(p.tolist()), tuple(r.tolist())), []).append(j)
    pairs = []
    mask = out["completion_mask"] * out.get("tool_mask", torch.ones_like(out["completion_mask"]))
    for i in range(len(mask)):
        if not int(mask[i].sum()):
            continue
        prompt = tuple(out["prompt_ids"][i][out["prompt_mask"][i].bool()].tolist())
        completion = tuple(out["completion_ids"][i][out["completion_mask"][i].bool()].tolist())
        pairs.append((i, theirs[(prompt, completion)].pop(0)))
    assert not any(theirs.values()), "verl trains rows that TRL does not"
    return pairs


@pytest.mark.parametrize("stack", STACKS)
def test_both_hosts_agree(tmp_path: Path, monkeypatch: Any, stack: str) -> None:
    methods, params = named(stack)
    trl = through_trl(tmp_path, methods, params)
    verl = through_verl(monkeypatch, trl, methods, params)
    ours, theirs = trl["decision"], verl["decision"]
    old, new = trl["rollouts"], verl["decision"].rollouts
    assert torch.equal(old.staleness, new.staleness) and torch.equal(old.newest_version, new.newest_version)
    assert int(old.staleness.max()) == (NOW - 1 if "aged" in methods else 0)
    assert torch.equal(ours.stays, theirs.stays) and torch.equal(ours.trained, theirs.trained)
    assert torch.allclose(ours.rollouts.reward, theirs.rollouts.reward, atol=1e-6, equal_nan=True)
    assert torch.allclose(ours.row_advantages, theirs.row_advantages, atol=1e-6)

    out, data = trl["out"], verl["data"]
    pairs = by_row(trl, verl)
    assert pairs
    for i, j in pairs:
        n = int(out["completion_mask"][i].sum())
        mask = (out["completion_mask"] * out.get("tool_mask", torch.ones_like(out["completion_mask"])))[i, :n]
        assert mask.tolist() == data["response_mask"][j].tolist() == data["loss_mask"][j].tolist()
        advantages = out["advantages"][i]
        advantages = (advantages if advantages.ndim else advantages.expand(n))[:n]
        assert torch.allclose((advantages * mask).float(), data["advantages"][j] * mask, atol=1e-6)
        for key, value in out.items():
            if key.startswith("rlp_row_column:"):
                assert float(value[i]) == pytest.approx(float(data[ROW_COLUMN + key[15:]][j]), abs=1e-6)
            if key.startswith("rlp_token_column:"):
                assert torch.allclose(value[i, :n], data[TOKEN_COLUMN + key[17:]][j], atol=1e-6)
        if verl["surrogate"] is not None:
            a, b = trl["surrogate"][i, :n] * mask, verl["surrogate"][j, :n] * mask
            assert torch.allclose(a, b, atol=1e-6, rtol=1e-5)
    assert trl["loss"] == pytest.approx(verl["loss"], abs=1e-6, rel=1e-5)
    assert trl.get("lr_scale", 1.0) == pytest.approx(verl["lr_scale"], rel=1e-6)
    if "fapo" in methods:
        lost = trl["rollouts"].reward - ours.rollouts.reward
        odd = torch.tensor([len(text) % 2 == 1 for text in trl["rollouts"].text])
        assert torch.equal(lost > 0, odd & (trl["rollouts"].reward >= 0.5)) and 0 < int((lost > 0).sum()) < len(lost)
        assert torch.allclose(lost[lost > 0], torch.tensor(0.75).double())
    if stack == "vcpo":
        assert verl["lr_scale"] < 0.9
