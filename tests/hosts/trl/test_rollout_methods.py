"""Every method that makes rollouts takes two real steps in TRL's trainer, with the engine TRL has: what it changes is
checked in the rows that were made, in the batch that was trained, and in the weights after it."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from harness import EngineTruth, history, make, weights
from methods.branch_loops import advantages_by_loops, first_copies, node_of, worse_tails
from torch import Tensor
from waiting import NEVER

from rl_plugins.core.requests import Generate, Kind, Trajectory
from rl_plugins.lab.demo.environments import Calculator, Grid
from rl_plugins.lab.demo.environments.policy import load_agent_policy
from rl_plugins.lab.demo.policy import build_model, load_policy
from rl_plugins.lab.demo.rewards import exact
from rl_plugins.lab.demo.rewards import score as won
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.methods.training_free_grpo import read_library
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.trl.generation import batches as module
from rl_plugins.trl.generation import programs
from rl_plugins.trl.generation import queue as queue_module
from rl_plugins.trl.generation.engine import TrlEngine

pytestmark = pytest.mark.host

EOS, NO_CLIP = 1, 1e9  # of the gradient: an SGD step is then lr times the gradient


# ---- one run, and all that is to be seen of it


@dataclass(eq=False)
class Batch:
    """One generation batch.

    Attributes:
        decision, tokens: of the driver; `tokens` are all generated ones.
        made: rows of a program, in the order of the decision.
        data: TRL's batch with the decision in it.
        model: a copy of the policy that generated.
        payload: of the first prompt's plan.
        engine_tokens: decoded for this batch.
    """

    decision: Any = None
    tokens: Any = None
    made: list[Any] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    model: Any = None
    payload: Any = None
    engine_tokens: int = 0

    @property
    def rollouts(self) -> Any:
        return self.decision.rollouts

    @property
    def groups(self) -> list[list[Trajectory]]:
        """Rows of each group."""
        found: dict[int, list[Trajectory]] = {}
        for row in self.made:
            found.setdefault(row.group, []).append(row.trajectory)
        return list(found.values())


@dataclass
class Seen:
    trainer: Any
    before: Tensor
    after: Tensor
    batches: list[Batch]
    requests: list[Generate]

    def log(self, name: str) -> list[float]:
        return history(self.trainer, name)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Seen]:
    """`train(methods, params, policy=.., **options)`: trains, two steps at a learning rate one can see."""
    batches: list[Batch] = []
    requests: list[Generate] = []
    run_programs, decide, finish = programs.run_programs, module.decide, module.finish
    generate, work_of = TrlEngine.generate, module.work_of

    monkeypatch.setattr(MethodStack, "reads_tokens", True)  # these tests look at tokens, whatever the method

    def watched_work(trainer: Any, prompts: Any) -> Any:
        batches.append(Batch(model=copy_of(trainer.model)))
        return work_of(trainer, prompts)

    def watched_programs(trainer: Any, planned: Any, row_of: Any) -> Any:
        batches[-1].payload = planned[0].payload
        batches[-1].made = run_programs(trainer, planned, row_of)
        return batches[-1].made

    def watched_decide(*args: Any) -> Any:
        batches[-1].tokens, batches[-1].decision = args[2], decide(*args)
        return batches[-1].decision

    def watched_finish(trainer: Any, batch: Any, out: Any) -> Any:
        data = finish(trainer, batch, out)
        batches[-1].data = dict(data)
        return data

    def watched_generate(self: Any, asked: Any) -> Any:
        made = generate(self, asked)
        requests.extend(request for _, request in asked)
        if batches:
            batches[-1].engine_tokens += sum(len(g.tokens) for many in made for g in many)
        return made

    monkeypatch.setattr(programs, "run_programs", watched_programs)
    monkeypatch.setattr(module, "decide", watched_decide)
    monkeypatch.setattr(module, "work_of", watched_work)
    monkeypatch.setattr(module, "finish", watched_finish)
    monkeypatch.setattr(TrlEngine, "generate", watched_generate)

    def run(methods: list[str], params: Any = None, policy: Path | None = None, **options: Any) -> Seen:
        batches.clear()
        requests.clear()
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        if policy is not None:
            (folder / "policy").symlink_to(policy)
        options = {"max_steps": 2, "learning_rate": 0.05, "max_grad_norm": NO_CLIP, **options}
        trainer = make(folder, methods, method_params=params or {}, **options)
        before = weights(trainer).clone()
        with EngineTruth().watching(of_programs=trainer.methods.claimed("rollout", "admit")) as truth:
            trainer.train()
        if methods:
            check_costs(trainer, truth, requests)
        return Seen(trainer, before, weights(trainer), list(batches), list(requests))

    return run


def check_costs(trainer: Any, truth: EngineTruth, requests: list[Generate]) -> None:
    """What the run logs is what was counted in the sampling loop of the engine."""
    logged = {name: history(trainer, f"rl_plugins/{name}")[-1] for name in COSTS}
    assert logged["tokens_decoded"] == truth.decoded > 0 and logged["engine_calls"] == truth.calls > 0
    if {"scope", "adhint_rollouts"} & set(
        trainer.methods.names
    ):  # they ask for rewards, which the engine does not read
        assert logged["tokens_read"] > truth.read
    else:
        assert logged["tokens_read"] == truth.read
    if requests:
        assert logged["rows_made"] <= sum(request.n for request in requests)
    assert 0 < logged["rows_trained_total"] <= sum(history(trainer, "rl_plugins/rows_trained_total"))


COSTS = ("tokens_decoded", "tokens_read", "engine_calls", "rows_made", "rows_trained_total")


def copy_of(model: Any) -> Any:
    """The policy with weights of its own; a deep copy would run the original's `forward`, which accelerate wraps."""
    fresh = build_model(0).eval()
    fresh.load_state_dict(model.state_dict())
    return fresh


def logprobs_of(model: Any, trajectory: Trajectory) -> Tensor:
    """(tokens, vocabulary) of every token in its own context, in one pass without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([trajectory.context])).logits[0].double()
    return torch.log_softmax(logits, -1)[len(trajectory.prompt) - 1 : -1]


def check_books(batch: Batch, sampled_at_least: int = 1) -> None:
    """Sampled tokens have the log-probs of the policy in exactly their context, others none; the driver and TRL see
    the same kinds in the same places."""
    assert len(batch.made) == len(batch.rollouts)
    of_row = batch.tokens.row
    sampled = 0
    for i, row in enumerate(batch.made):
        t = row.trajectory
        kinds, reported = torch.tensor(t.kinds), torch.tensor(t.logprobs).double()
        assert len(t.tokens) == len(t.kinds) == len(t.logprobs) == len(t.versions)
        assert torch.equal(torch.isnan(reported), kinds != Kind.SAMPLED)
        if len(t):
            true = logprobs_of(batch.model, t).gather(1, torch.tensor([t.tokens]).T)[:, 0]
            own = kinds == Kind.SAMPLED
            assert torch.allclose(reported[own], true[own], atol=2e-5)
            sampled += int(own.sum())
        mine = of_row == i
        trained = (kinds != Kind.OBSERVED).nonzero()[:, 0]
        assert batch.tokens.position[mine].tolist() == trained.tolist()
        assert batch.tokens.forced[mine].tolist() == (kinds[trained] == Kind.FORCED).tolist()
    assert sampled >= sampled_at_least


def sgd_step(model: Any, batch: dict[str, Any], surrogate: Callable[..., Tensor], lr: float = 0.05) -> Tensor:
    """One step by hand of plain SGD on `surrogate`(log-probs), aggregated as `dapo` does; the weights after it."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, batch["prompt_ids"].size(1) - 1 : -1]
    logprobs = torch.log_softmax(logits, -1).gather(2, batch["completion_ids"][:, :, None])[:, :, 0]
    live = (batch["completion_mask"] * batch.get("tool_mask", 1)).float()
    model.zero_grad()
    ((surrogate(logprobs) * live).sum() / live.sum()).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= lr * p.grad
    return flat(model)


def flat(model: Any) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def host_advantages(rollouts: Any) -> Tensor:
    """(rows,) of GRPO, as TRL scales them."""
    groups, reward = rollouts.groups, rollouts.reward
    return (reward - groups.rows(groups.mean(reward))) / (groups.rows(groups.std(reward)) + 1e-4)


def right(completion_ids: Any = None, **kwargs: Any) -> list[float]:
    """Right or wrong, from the token ids alone."""
    return [float(sum(c) % 3 == 0) for c in completion_ids]


def shared(a: Trajectory, b: Trajectory) -> int:
    """Tokens two rows begin with."""
    same = [x == y for x, y in zip(a.tokens, b.tokens, strict=False)]
    return same.index(False) if False in same else len(same)


# ---- LATR

TREE = {"tau_abs": 0.1, "tau_rel": 0.6, "lookahead": [3], "tau_ed": 0.4, "max_tree_tokens": 5, "decode_ahead": 2}


def test_latr_grows_trees_and_samples_their_tails(train):
    params = {"latr": {**TREE, "eta": [1.0, 0.5], "eta_steps": [0, 1]}}
    seen = train(["latr"], params, policy=load_policy())
    for step, batch in enumerate(seen.batches):
        check_books(batch, 64)
        k = 8 if step == 0 else 4
        branched = choices = 0
        for group in batch.groups:
            assert len(group) == 8
            tree, plain = group[:k], group[k:]
            assert all(Kind.FORCED not in t.kinds for t in plain)
            greedy = tree[0]
            for t in tree:
                forced = t.kinds.count(Kind.FORCED)
                assert t.kinds == (Kind.FORCED,) * forced + (Kind.SAMPLED,) * (len(t) - forced), "forced, then sampled"
                assert forced == 5 or (forced == len(t) <= 5 and t.tokens[-1] == EOS)
                # a forced token is the argmax of its context, or a second choice the thresholds let open a branch
                p = logprobs_of(batch.model, t).exp()[:forced]
                best, second = p.topk(2, -1).values.T
                chosen = p.gather(1, torch.tensor([t.tokens[:forced]]).T)[:, 0]
                assert bool(((chosen == best) | ((chosen == second) & (second > 0.1) & (best - second < 0.6))).all())
                assert t is not greedy or bool((chosen == best).all())
                choices += int((chosen != best).sum())
            heads = {t.tokens[: t.kinds.count(Kind.FORCED)] for t in tree}
            branched += len(heads) - 1
            for head in heads:  # where a row last took a second choice, the row it grew from took the argmax
                p = logprobs_of(batch.model, Trajectory(greedy.prompt, head))
                born = [i for i, token in enumerate(head) if token != int(p[i].argmax())]
                if born:
                    parent = (*head[: born[-1]], int(p[born[-1]].argmax()))
                    assert any(other[: len(parent)] == parent for other in heads)
        assert branched >= 8 and choices >= branched, "second choices opened branches"
        assert batch.payload["latr"] == [1.0, 0.5][step]
    assert seen.log("latr/eta") == [1.0, 0.5]
    assert (seen.after - seen.before).abs().max() > 1e-4


def test_latr_without_a_tree_is_plain_sampling(train):
    """eta 0: same requests in the same order, so the same random numbers, rollouts and weights as TRL itself."""
    ours = train(["latr"], {"latr": {"eta": [0.0], "eta_steps": [0]}})
    assert all(Kind.FORCED not in row.trajectory.kinds for b in ours.batches for row in b.made)
    plain = train(["plain"])
    assert torch.equal(ours.after, plain.after)
    stock = train([])
    assert torch.allclose(stock.after, ours.after, atol=2e-7)


# ---- agents


def rows_of(environment: Any, n: int = 40) -> Dataset:
    return Dataset.from_list(environment.rows(n, seed=1))


def actions(t: Trajectory, decode: Callable[..., str]) -> list[str]:
    return [decode(t.tokens[turn.start : turn.stop], skip_special_tokens=True) for turn in t.turns]


def replayed(environment: Any, columns: Any, acted: list[str]) -> tuple[float, list[str]]:
    """Score and texts of an episode when these actions are taken again in a fresh environment."""
    agent = environment.unwatched()
    agent.reset(columns)
    texts = [agent.act(a).text for a in acted]
    return agent.score(), texts


def test_turn_control_limits_and_reminds(train):
    params = {
        "environment": Grid,
        "strategy": "dynamic",
        "limit": 3,
        "extension": 2,
        "turn_tokens": 4,
        "reminder": "left {remaining}.",
        "extension_text": "more {extension}.",
    }
    seen = train(
        ["turn_control"],
        {"turn_control": params},
        policy=load_agent_policy("Grid"),
        dataset=rows_of(Grid),
        reward=won,
        max_completion_length=180,
    )
    decode = seen.trainer._tokenizer.decode
    stopped: Counter[str] = Counter()
    for batch in seen.batches:
        check_books(batch, 128)
        loss_mask = batch.data["completion_mask"] * batch.data["tool_mask"]
        for i, row in enumerate(batch.made):
            t, used = row.trajectory, len(row.trajectory.turns)
            stopped[t.meta["stop_reason"]] += 1
            assert t.meta["turns"] == used <= 5 and t.meta["extended"] == (
                used > 3 or "extended" in t.meta["stop_reason"]
            )
            read = decode([x for x, k in zip(t.tokens, t.kinds, strict=True) if k == Kind.OBSERVED])
            assert decode(t.prompt).endswith("left 3.<asst>"), "the first reminder is in the prompt"
            told = ["left 2.", "left 1.", "more 2.\nleft 2.", "left 1."][: max(0, used - 1)]
            assert read.count("left ") == len(told) and all(text in read for text in told)
            masked = [bool(m) for m in loss_mask[i, : len(t)]]
            assert masked == [k == Kind.SAMPLED for k in t.kinds], "what is read has no gradient"
            assert (
                replayed(Grid, seen.trainer.train_dataset[row.plan.prompt_index], actions(t, decode))[0]
                == t.meta["score"]
            )
        assert batch.rollouts.reward.tolist() == [row.trajectory.meta["score"] for row in batch.made]
    assert stopped["extended_limit"] > 8 and stopped["done"] > 8 and set(stopped) == {"extended_limit", "done"}
    turns = [len(row.trajectory.turns) for row in seen.batches[0].made]
    assert seen.log("turn_control/turns")[0] == pytest.approx(np.mean(turns))
    assert (seen.after - seen.before).abs().max() > 1e-5


def test_turn_control_learns_its_limit_from_a_batch_also_for_evaluation(train):
    limits = []

    def reward(limit_final, **kwargs):
        limits.append(limit_final)
        return won(**kwargs)

    params = {"environment": Grid, "strategy": "fixed", "percentile": 50, "calibration_episodes": 64, "turn_tokens": 4}
    seen = train(
        ["turn_control"],
        {"turn_control": {**params, "remind_from": 0}},
        policy=load_agent_policy("Grid"),
        dataset=rows_of(Grid),
        reward=reward,
        max_completion_length=180,
    )
    first, second = [[row.trajectory.meta for row in b.made] for b in seen.batches]
    limit = math.ceil(np.percentile([m["turns"] for m in first], 50))
    assert all(m["limit_final"] == 50 for m in first) and all(m["limit_final"] == limit for m in second)
    assert max(m["turns"] for m in first) > limit == max(m["turns"] for m in second)
    assert seen.batches[1].payload == {"turn_control": {"limit": limit, "extension": 0, "last": limit}}
    assert seen.log("turn_control/limit") == [limit, limit]
    limits.clear()
    seen.trainer.evaluate(rows_of(Grid).select(range(8)))
    assert {x for batch in limits for x in batch} == {limit}


class Recorded(Calculator):
    """A calculator that remembers what it was asked."""

    episodes: list[Recorded] = []

    def reset(self, columns: Any) -> Any:
        self.taken: list[tuple[str, bool]] = []
        Recorded.episodes.append(self)
        return super().reset(columns)

    def act(self, action: str) -> Any:
        said = super().act(action)
        self.taken.append((action, said.valid))
        return said


def test_cleaner_erases_failed_calls(train):
    Recorded.episodes.clear()
    seen = train(
        ["cleaner"],
        {"cleaner": {"environment": Recorded, "marker": "[", "turn_tokens": 14, "max_turns": 6}},
        policy=load_agent_policy("Calculator"),
        dataset=rows_of(Calculator),
        reward=won,
        max_completion_length=160,
    )
    decode = seen.trainer._tokenizer.decode
    made = [row.trajectory for batch in seen.batches for row in batch.made]
    assert len(Recorded.episodes) == len(made) == 128
    repaired = 0
    for t, agent in zip(made, Recorded.episodes, strict=True):
        m, acted = t.meta, actions(t, decode)
        failed = [a for a, valid in agent.taken if not valid and "[" in a]
        assert m["failed_calls"] + m["retries"] >= len(failed)
        if m["given_up"]:
            continue
        errors = [a for a, valid in agent.taken if not valid and "[" not in a]  # no call: nothing to repair
        assert acted == [a for a, valid in agent.taken if valid or a in errors], "only what worked is left"
        assert decode(t.tokens).count("<user>err") <= len(errors)
        if m["repairs"]:
            repaired += 1
            assert Kind.FORCED in t.kinds and m["recovered"] == m["failed_calls"] == len(m["error_types"])
        else:
            assert Kind.FORCED not in t.kinds
    assert repaired >= 4, "the policy makes mistakes that are repaired"
    for batch in seen.batches:
        check_books(batch, 256)
    calls, failed, grafted, trained = [
        sum(f(row.trajectory) for row in seen.batches[0].made)
        for f in (
            lambda t: t.meta["calls"],
            lambda t: t.meta["failed_calls"],
            lambda t: t.kinds.count(Kind.FORCED),
            lambda t: sum(t.trained),
        )
    ]
    assert seen.log("cleaner/failed_calls")[0] == pytest.approx(failed / calls)
    assert seen.log("cleaner/grafted")[0] == pytest.approx(grafted / trained)


def test_aepo_branches_with_copies_of_the_environment(train):
    params = {
        "environment": Calculator,
        "initial_rollouts": 4,
        "branch_probability": 0.3,
        "turn_tokens": 14,
    }
    seen = train(
        ["aepo_rollout"],
        {"aepo_rollout": params},
        policy=load_agent_policy("Calculator"),
        dataset=rows_of(Calculator),
        reward=won,
        max_completion_length=160,
    )
    decode = seen.trainer._tokenizer.decode
    for batch in seen.batches:
        check_books(batch, 256)
        rows = seen.trainer.train_dataset
        branches = restarts = 0
        for group, row in zip(batch.groups, batch.made[::8], strict=True):
            assert len(group) == 8 and row.plan.n == 8
            copies = [t for t in group if t.meta["aepo_branch"] is not None]
            branches += len(copies)
            restarts += 8 - 4 - len(copies)
            for t in group:
                result, texts = replayed(Calculator, rows[row.plan.prompt_index], actions(t, decode))
                assert result == t.meta["score"]
                read = decode([x for x, k in zip(t.tokens, t.kinds, strict=True) if k == Kind.OBSERVED])
                shown = texts if t.meta["turns"] > len(t.turns) or not t.meta["done"] else texts[:-1]
                assert all(text in read for text in shown[: len(t.turns) - 1])
            for t in copies:  # some other chain begins with the same turns, with the same log-probs
                begin = t.turns[t.meta["aepo_branch"] - 1].stop
                parents = [o for o in group if o is not t and shared(t, o) >= begin]
                assert parents and str(parents[0].logprobs[:begin]) == str(t.logprobs[:begin])
        assert branches >= 8
        assert seen.log("aepo_rollout/branches")[seen.batches.index(batch)] == pytest.approx(branches / 8)
        assert seen.log("aepo_rollout/restarts")[seen.batches.index(batch)] == pytest.approx(restarts / 8)
    assert (seen.after - seen.before).abs().max() > 1e-5


def z_scores(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.std()


def test_aepo_scales_advantages_by_entropy(train):
    seen = train(["aepo_advantages"])
    for batch in seen.batches:
        t = batch.tokens
        assert t.entropies.double().std() > 1e-3
        wanted = host_advantages(batch.rollouts)[t.row] * (1 + 0.2 * z_scores(t.entropies.double()))
        assert torch.allclose(batch.decision.advantages, wanted, atol=1e-5)
        assert not batch.decision.uniform


def test_aepo_clip_equals_its_formula_after_two_updates(train):
    seen = train(["aepo_clip"], num_iterations=2, learning_rate=2.0)
    (batch,) = seen.batches
    model, old, adv = copy_of(batch.model), None, batch.data["advantages"][:, None]
    outside = 0
    for _ in range(2):

        def surrogate(lp: Tensor) -> Tensor:
            nonlocal old, outside
            old = lp.detach() if old is None else old
            r = (lp - old).exp()
            upper = torch.where(r > 1.2, 1.2 * r / r.detach(), r)  # its value stays, and so does its gradient
            outside = int(((adv > 0) & (r > 1.2)).sum())
            loss = torch.maximum(-adv * r, -adv * torch.minimum(r, upper).clamp(min=0.8))
            return torch.where(adv < 0, torch.minimum(loss, -3 * adv), loss)

        after = sgd_step(model, batch.data, surrogate, lr=2.0)
    assert outside > 8, "tokens whose gradient PPO would drop"
    assert torch.allclose(seen.after, after, atol=1e-5)
    assert (seen.after - seen.before).abs().max() > 1e-2


def test_dppo_and_kl_cov_equal_their_formulas_after_two_updates(train):
    params = {"dppo": {"bound_low": 0.02, "bound_high": 0.02}, "kl_cov": {"ratio": 0.05, "coef": 2.0}}
    seen = train(["dppo", "kl_cov"], params, num_iterations=2, learning_rate=2.0)
    (batch,) = seen.batches
    model, old, adv, t = copy_of(batch.model), None, batch.data["advantages"][:, None], batch.tokens
    lp, a = t.old_logprobs.double(), batch.decision.advantages
    c = (lp - lp.mean()) * (a - a.mean())
    chosen = torch.zeros(batch.data["completion_mask"].shape)
    chosen[t.row, t.position] = (c >= c.sort().values[-int(0.05 * len(c))]).float()
    left_out = 0
    for _ in range(2):

        def surrogate(lp: Tensor) -> Tensor:
            nonlocal old, left_out
            old = lp.detach() if old is None else old
            moved = (lp.exp() - old.exp()).detach()
            away = torch.where(adv > 0, moved > 0.02, moved < -0.02)
            left_out = int((away * batch.data["completion_mask"]).sum())
            loss = -(lp - old).exp().detach().clamp(max=20.0) * adv * lp
            return torch.where(away, 0.0, loss) + 2.0 * chosen * (lp - old).abs()

        after = sgd_step(model, batch.data, surrogate, lr=2.0)
    assert left_out > 8 and torch.equal(batch.decision.token_columns["kl_cov"], chosen[t.row, t.position])
    assert torch.allclose(seen.after, after, atol=1e-5)


def test_aepo_as_a_bundle(train):
    params = {"aepo_rollout": {"environment": Calculator, "turn_tokens": 14}}
    seen = train(
        ["aepo"],
        params,
        policy=load_agent_policy("Calculator"),
        dataset=rows_of(Calculator),
        reward=won,
        max_completion_length=160,
        num_iterations=2,
        max_steps=4,
    )
    assert len(seen.batches) == 2
    for name in ("aepo_rollout/initial", "aepo_advantages/z_max", "aepo_clip/clipfrac"):
        assert seen.log(name), name
    batch = seen.batches[0]
    live = ~torch.isnan(batch.rollouts.reward)[batch.tokens.row]
    assert bool(live.all()) and not batch.decision.uniform
    check_books(batch)
    assert (seen.after - seen.before).abs().max() > 1e-5


# ---- ECHO


def first_letter(text: str) -> str | None:
    return text[:1] if text[:1].isalpha() else None


def test_echo_labels_reward_the_majority(train):
    seen = train(["echo_labels"], {"echo_labels": {"n_votes": 12, "extract": first_letter}})
    for batch in seen.batches:
        rollouts = batch.rollouts
        assert len(rollouts) == 96 and int(batch.decision.trained.sum()) == 64
        for g in range(8):
            mine = (rollouts.group == g).nonzero()[:, 0].tolist()
            answers = [first_letter(rollouts.text[i]) for i in mine]
            label = Counter(a for a in answers if a).most_common(1)[0][0]
            assert rollouts.reward[mine].tolist() == [float(a == label) for a in answers]
            assert batch.decision.trained[mine].tolist() == [True] * 8 + [False] * 4
    assert 0 < seen.log("echo_labels/majority_ratio")[0] < 1


def test_echo_tree_branches_once(train):
    """The untrained policy is unsure everywhere, so it branches at the first place that may."""
    params = {"entropy_delta_threshold": -9.0, "max_branches": 3, "delta_upper": 0.004, "delta_rise_steps": 1}
    seen = train(["echo_tree"], {"echo_tree": params}, max_completion_length=24)
    branches = cut = 0
    for batch in seen.batches:
        check_books(batch, 256)
        for group in batch.groups:
            assert len(group) == 8
            first, rest = group[0], group[1:]
            own = [t for t in rest if t.meta["echo_branch"] is not None]
            assert len(own) <= 2 and rest[: len(own)] == own
            branches += len(own)
            assert len({t.tokens[t.meta["echo_branch"]] for t in own}) == len(own)
            for t in own:
                at = t.meta["echo_branch"]
                assert t.kinds.count(Kind.FORCED) == 1 and t.kinds[at] == Kind.FORCED
                top = logprobs_of(batch.model, t)[at].topk(3).indices.tolist()
                assert t.tokens[at] in top
                if first.meta["echo_pruned"] is None:
                    assert shared(t, first) == at and t.logprobs[:at] == first.logprobs[:at]
            for t in [first, *own]:
                cut += t.meta["echo_pruned"] is not None
                assert t.meta["echo_pruned"] in (None, "entropy_spike")
                if t.meta["echo_pruned"]:
                    assert t.finish == "length" or t.tokens[-1] == EOS, "cut behind its last token, or before"
    assert branches > 16 and cut > 4


def test_echo_shapes_advantages(train):
    seen = train(["echo_shaping"], {"echo_shaping": {"s_max": None, "beta": 0.5, "add_coeff": 0.2}})
    for batch in seen.batches:
        t, rollouts = batch.tokens, batch.rollouts
        s = z_scores(t.entropies.double()) + 0.5 * z_scores(1 - t.old_logprobs.double().exp())
        of = rollouts.group[t.row]
        mean = torch.stack([s[of == g].mean() for g in range(8)])[of]
        wanted = host_advantages(rollouts)[t.row] * (1 + 0.1 * s) + 0.2 * (s - mean)
        assert torch.allclose(batch.decision.advantages, wanted, atol=1e-4)


def test_echo_clip_equals_its_formula_after_two_updates(train):
    seen = train(["echo_clip"], {"echo_clip": {"kappa": 40.0}}, num_iterations=2, learning_rate=2.0)
    (batch,) = seen.batches
    model, old, adv = copy_of(batch.model), None, batch.data["advantages"][:, None]
    live = batch.data["completion_mask"]
    clipped = 0
    for _ in range(2):

        def surrogate(lp: Tensor) -> Tensor:
            nonlocal old, clipped
            old = lp.detach() if old is None else old
            tail = (old.exp() * live).sum(1) / live.sum(1)  # rows are shorter than the window of 16
            eps = (0.05 + 0.15 * torch.sigmoid(40.0 * (1 - tail)))[:, None]
            r = (lp - old).exp()
            inside = torch.maximum(torch.minimum(r, 1 + eps), 1 - eps)
            clipped = int(((-adv * inside > -adv * r) * live).sum())
            loss = torch.maximum(-adv * r, -adv * inside)
            return torch.where(adv < 0, torch.minimum(loss, -3 * adv), loss)

        after = sgd_step(model, batch.data, surrogate, lr=2.0)
    assert clipped > 8
    assert torch.allclose(seen.after, after, atol=1e-5)


def test_echo_as_a_bundle(train):
    params = {
        "echo_labels": {"n_votes": 12, "extract": first_letter},
        "echo_tree": {"entropy_delta_threshold": -9.0},
    }
    seen = train(["echo"], params, num_iterations=2, max_steps=4, max_completion_length=24)
    assert len(seen.batches) == 2
    for batch in seen.batches:
        assert len(batch.made) == 96 and int(batch.decision.trained.sum()) == 64
        assert all(len(g) == 12 for g in batch.groups)
        assert int(batch.tokens.forced.sum()) == sum(r.trajectory.kinds.count(Kind.FORCED) for r in batch.made) > 4
        assert set(batch.rollouts.reward.tolist()) == {0.0, 1.0} and set(batch.decision.rewarded_by) == {"echo_labels"}
        assert not batch.decision.uniform
        check_books(batch)
    for name in ("labels/majority_ratio", "tree/branches", "shaping/change", "clip/clip_range"):
        assert len(seen.log(f"echo_{name}")) >= 2, name
    assert (seen.after - seen.before).abs().max() > 1e-4


# ---- ARRoL


def test_arrol_trains_fewer_rows(train):
    params = {"detect_tokens": 3, "cold_start": 1, "fit_steps": 5}
    seen = train(["arrol"], {"arrol": params}, policy=load_policy(), reward=exact, dataset=build_dataset(200, seed=1))
    first, second = seen.batches
    assert len(first.rollouts) == 64 and first.payload is None and 0.1 < float(first.rollouts.reward.mean()) < 0.9
    n = len(second.rollouts)
    assert 24 <= n <= 48, "about half of the rollouts go on"
    sizes = second.rollouts.groups.size.tolist()
    assert sum(sizes) == n and min(sizes) >= 2 and len(set(sizes)) > 1
    given = second.payload["arrol"]
    for row in second.made:
        note = row.trajectory.meta["arrol"]
        if note["q"] is not None and len(row.trajectory) > 3:
            rule = min(max(0.5 + given["shift"] + 0.5 * (0.5 - note["q"]), 0.1), 0.9)
            assert note["keep"] == pytest.approx(rule)
    assert seen.log("arrol/stopped") == [pytest.approx(1 - n / 64)]
    trained = (second.data["completion_mask"] * second.data["tool_mask"]).sum(1) > 0
    assert int(trained.sum()) == n and len(trained) == 64, "the others are rows without a token"
    whole = sum(len(row.trajectory) for row in second.made)
    assert second.engine_tokens == whole + 3 * (64 - n), "three tokens of each that was stopped are thrown away"
    check_books(second, 64)
    state = seen.trainer.methods.methods[0].state
    assert len(state["label"]) == len(state["features"]) == 64 + n
    assert state["label"].tolist() == [*first.rollouts.reward.tolist(), *second.rollouts.reward.tolist()]
    sent = torch.tensor(given["head"]["w1"], dtype=torch.float64)
    assert (state["head"]["w1"] - sent).abs().max() > 1e-3, "the head has learned from the second batch, too"


# ---- SCOPE

OK = "ok"


def ends_well(completions: Any = None, **kwargs: Any) -> list[float]:
    return [float(c[0]["content"].endswith(OK)) for c in completions]


def last_is_wrong(messages: Any, steps: list[str], columns: Any) -> list[float]:
    return [1.0] * (len(steps) - 1) + [0.0]


def corrects(messages: Any, text: str, columns: Any) -> str:
    return OK


def test_scope_replaces_rows_and_trains_foreign_tokens_with_their_own_loss(train):
    params = {"prm": last_is_wrong, "corrector": corrects, "separator": "=", "min_step": 1, "min_prefix": 0.0}
    seen = train(
        ["scope"],
        {"scope": {**params, "corrections": 2, "gamma": 0.2}},
        reward=ends_well,
        max_completion_length=30,
    )
    foreign_ids = [*seen.trainer._tokenizer.encode(OK, add_special_tokens=False), EOS]
    own_prefix = 0
    for k, batch in enumerate(seen.batches):
        check_books(batch, 256)
        model = copy_of(batch.model)
        foreign = torch.zeros_like(batch.data["completion_ids"], dtype=torch.bool)
        for i, row in enumerate(batch.made):
            t = row.trajectory
            start, stop = t.meta["scope"]
            if stop:
                assert list(t.tokens[start:stop]) == foreign_ids and stop == len(t)
                assert t.kinds == (Kind.SAMPLED,) * start + (Kind.FORCED,) * (stop - start)
                own_prefix += start > 0
                foreign[i, start:stop] = True
            else:
                assert Kind.FORCED not in t.kinds
        replaced = torch.tensor([row.trajectory.meta["scope"][1] > 0 for row in batch.made])
        assert torch.equal(batch.rollouts.reward == 1, replaced) and 8 <= int(replaced.sum()) <= 16
        assert seen.log("scope/corrected")[k] == pytest.approx(float(replaced.double().mean()))
        adv = batch.data["advantages"][:, None]

        def surrogate(lp: Tensor, foreign: Tensor = foreign, adv: Tensor = adv) -> Tensor:
            own = -adv * (lp - lp.detach()).exp()
            p = lp.exp()
            return torch.where(foreign, -adv * p / (p + 0.2), own)

        after = sgd_step(model, batch.data, surrogate)
        truth = flat(seen.batches[k + 1].model) if k + 1 < len(seen.batches) else seen.after
        assert torch.allclose(truth, after, atol=2e-6)
        nowhere = torch.zeros_like(foreign)
        plain = sgd_step(copy_of(batch.model), batch.data, lambda lp, f=nowhere, s=surrogate: s(lp, f))
        assert (truth - plain).abs().max() > 1e-4, "the loss on foreign tokens is another one"
    assert own_prefix > 8
    assert seen.log("scope/verified") == [1.0, 1.0] and seen.log("scope/eligible") == [1.0, 1.0]


# ---- Fission-GRPO


def complain(item: Any) -> str:
    return f"no {len(item['answer'])}."


def test_fission_turns_errors_into_prompts(train):
    params = {"fission_grpo": {"role": "user", "message": complain, "share": 0.25}}
    seen = train(["fission_grpo"], params, reward=right)
    first, second = seen.batches
    wrong = {
        p for p, r in zip(first.rollouts.prompt_index.tolist(), first.rollouts.reward.tolist(), strict=True) if not r
    }
    assert seen.log("fission_grpo/pool")[0] == seen.log("fission_grpo/pushed")[0] == len(wrong) == 8
    assert bool((first.rollouts.prompt_index >= 0).all())
    rollouts = second.rollouts
    foreign = rollouts.prompt_index == -1
    assert len(rollouts) == 64 and int(foreign.sum()) == 16
    assert sorted(Counter(rollouts.group[foreign].tolist()).values()) == [8, 8]
    assert not set(rollouts.group[foreign].tolist()) & set(rollouts.group[~foreign].tolist())
    prompts = seen.trainer._tokenizer.batch_decode(second.data["prompt_ids"])
    dataset, failed = seen.trainer.train_dataset, {}
    for p, text, r in zip(
        first.rollouts.prompt_index.tolist(), first.rollouts.text, first.rollouts.reward, strict=True
    ):
        if not r:
            failed.setdefault(dataset[p]["prompt"][0]["content"], text)
    for i in foreign.nonzero()[:, 0].tolist():
        text = prompts[i].replace("<pad>", "")
        asked = text.split("<user>")[1].split("<asst>")[0]
        assert text == f"<user>{asked}<asst>{failed[asked]}<eos><user>no {len(failed[asked])}.<asst>"
    wanted = host_advantages(rollouts)
    assert torch.allclose(second.decision.row_advantages, wanted, atol=1e-5), "advantages within each group of its own"
    assert seen.log("fission_grpo/served") == [0.0, 2.0]
    assert seen.log("fission_grpo/reward")[0] == pytest.approx(float(rollouts.reward[foreign].mean()))


# ---- Training-free GRPO

ADVICE = "digits: write one after the other."


def language_model(question: str) -> str:
    operation = json.dumps([{"operation": "ADD", "id": None, "content": ADVICE}])
    return f"<Experiences>\n{ADVICE}\n</Experiences>\n```json\n{operation}\n```"


def test_training_free_grpo_writes_a_library_and_moves_no_weight(train, tmp_path):
    asked: list[tuple[int, str]] = []
    library = tmp_path / "library.json"

    def watched(completion_ids: Any = None, prompts: Any = None, **kwargs: Any) -> list[float]:
        asked.append((len(prompts), prompts[0][0]["content"]))
        return right(completion_ids)

    params = {"llm": language_model, "library": str(library), "prompt_template": "{experiences}|{problem}"}
    seen = train(
        ["training_free_grpo"],
        {"training_free_grpo": params},
        reward=watched,
        optim="adamw_torch",
        weight_decay=0.1,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=6,
        num_generations_eval=2,
        more={"eval_dataset": build_dataset(6, split="held_out")},
    )
    assert torch.equal(seen.before, seen.after), "bit for bit"
    assert list(read_library(library).values()) == [ADVICE, ADVICE]
    assert seen.log("training_free_grpo/experiences") == [1.0, 2.0]
    training = [text for n, text in asked if n == 64]
    evaluation = [text for n, text in asked if n == 6]
    assert training[0].startswith("None|") and training[1].startswith(f"[G0]. {ADVICE}|")
    of_each = len(evaluation) // 2
    assert all(text.startswith(f"[G0]. {ADVICE}|") for text in evaluation[:of_each])
    assert all(text.startswith(f"[G0]. {ADVICE}\n[G1]. {ADVICE}|") for text in evaluation[of_each:])


# ---- RTV and PDR


def test_rtv_pdr_evaluates_with_a_tournament(train):
    """Two waves of 4 attempts, 2 kept, 3 votes: 2 comparisons between the waves and 3 for the answer. The judge wants
    the longest, so it is what is evaluated."""
    votes: list[int] = []
    summaries: list[str] = []

    def summarizer(problem: str, attempt: str) -> str:
        summaries.append(attempt)
        return f"{len(attempt):02d}"

    def judge(problem: str, shown: list[str]) -> int:
        votes.append(len(shown))
        return 1 + max(range(len(shown)), key=shown.__getitem__)

    def letters(completions: Any = None, **kwargs: Any) -> list[float]:
        return [float(len(c[0]["content"].strip())) for c in completions]

    evaluated = build_dataset(6, split="held_out")
    seen = train(
        ["rtv_pdr"],
        {"rtv_pdr": {"attempts": 4, "keep": 2, "votes": 3, "summarizer": summarizer, "judge": judge}},
        reward=letters,
        per_device_train_batch_size=16,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=6,
        num_generations_eval=1,
        more={"eval_dataset": evaluated},
    )
    assert len(votes) == 6 * (2 + 3) * 3 and set(votes) == {2}
    assert len(summaries) == 6 * 8
    last = [max(len(s) for s in summaries[24 + 4 * i : 28 + 4 * i]) for i in range(6)]
    assert seen.log("eval_reward") == [pytest.approx(np.mean(last))]
    waves = [r for r in seen.requests if r.n == 4]
    assert len(waves) == 12 and [len(r.trajectory.prompt) > 250 // 2 for r in waves] == [False] * 6 + [True] * 6
    assert all(len(b.made) == 16 and Kind.FORCED not in b.made[0].trajectory.kinds for b in seen.batches)
    assert (seen.after - seen.before).abs().max() > 1e-5, "training rollouts are plain ones"


# ---- APRIL

LONG = {"num_generations": 2, "max_completion_length": 120, "max_steps": 3, "learning_rate": 0.5}


def test_april_trains_the_first_groups_that_are_complete(train):
    """The untrained policy ends by chance, so lengths have a long tail; the rest of it waits and goes on."""
    plain = train([], **{**LONG, "max_steps": 1})
    seen = train(["april"], {"april": {"correction": "mask", "over_sampling": 1.5}}, **LONG)
    for k, batch in enumerate(seen.batches):
        rollouts, tokens = batch.rollouts, batch.tokens
        assert len(rollouts) == 64 and rollouts.groups.size.tolist() == [2] * 32
        stale = tokens.version < k
        assert torch.equal(batch.decision.keep_tokens, ~stale)
        assert seen.log("april/masked")[k] == pytest.approx(float(stale.double().mean()), abs=1e-6)
        assert (k == 0) == (not bool(stale.any()))
        live = batch.data["completion_mask"] * batch.data.get("tool_mask", 1)
        assert int(live.sum()) == int((~stale).sum()) == int(batch.data["num_items_in_batch"])
        assert seen.log("april/resumed")[k] == (16 if k else 0) and seen.log("april/fresh")[k] == (32 if k else 48)
    assert seen.log("april/waiting") == [0, 16, 16] and len(seen.trainer.methods.carried) == 16
    shortest = seen.log("completions/mean_length")[0]
    assert shortest < 0.9 * plain.log("completions/mean_length")[0], "the first to be complete are the short ones"


def test_april_weighs_tokens_of_older_policies(train):
    seen = train(["april"], {"april": {"correction": "token_tis", "tis_cap": 1.3}}, **LONG)
    capped = 0
    for batch in seen.batches[1:]:
        t = batch.tokens
        weight = (t.old_logprobs.double() - t.rollout_logprobs.double()).exp()
        capped += int((weight > 1.3).sum())
        wanted = host_advantages(batch.rollouts)[t.row] * weight.clamp(max=1.3)
        assert torch.allclose(batch.decision.advantages, wanted, atol=1e-5)
        stale = t.version < t.version.max()
        assert (
            int(stale.sum()) > 64 and (weight[stale] - 1).abs().max() > 0.1 and (weight[~stale] - 1).abs().max() < 1e-3
        )
        sent = batch.data["advantages"]
        assert torch.allclose(sent[t.row, t.position].double(), wanted, atol=1e-5)
    assert capped > 8
    assert (seen.after - seen.before).abs().max() > 1e-3


# ---- redundant rollouts


class Stuck(Grid):
    """Of the five environments of every prompt the second never returns."""

    made, closed = 0, 0
    leave = threading.Event()

    def __init__(self) -> None:
        super().__init__()
        self.stuck = Stuck.made % 5 == 1
        Stuck.made += 1

    def act(self, action: str) -> Any:
        if self.stuck:
            Stuck.leave.wait(60)
        return super().act(action)

    def close(self) -> None:
        Stuck.closed += 1
        super().close()


def test_an_environment_that_never_returns_costs_its_own_rollout(train):
    """TRL goes in lockstep, so the batch waits for the time-out once. The spare rollout takes the hung one's place."""
    play = {"turn_control": {"environment": Stuck, "limit": 3, "turn_tokens": 4, "timeout": 0.3}}
    size = {"per_device_train_batch_size": 20, "num_generations": 5, "max_steps": 1, "max_completion_length": 120}
    options = {"policy": load_agent_policy("Grid"), "dataset": rows_of(Grid), "reward": won}
    try:
        plain = train(["turn_control"], play, **options, **size)
        reasons = [row.trajectory.meta["stop_reason"] for row in plain.batches[0].made]
        assert [i for i, reason in enumerate(reasons) if reason == "error"] == [1, 6, 11, 16]
        redundant = {"num_generations": 4, "per_device_train_batch_size": 16}
        seen = train(["turn_control", "rollart_redundancy"], play, **options, **{**size, **redundant})
    finally:
        Stuck.leave.set()
    (batch,) = seen.batches
    check_books(batch, 16)
    assert batch.rollouts.groups.size.tolist() == [4] * 4
    assert not {row.trajectory.meta["stop_reason"] for row in batch.made} & {"error"}
    assert Stuck.made == Stuck.closed == 40, "hung ones are closed too"
    assert seen.log("rollart_redundancy/failed") == [1.0]
    noted = [row.trajectory.meta["redundancy"] for row in batch.made]
    for name in ("closed", "kept_turns", "kept_tokens"):
        assert seen.log(f"rollart_redundancy/{name}") == [
            pytest.approx(np.mean([note[name] for note in noted]), abs=1e-4)
        ]
    turns = [len(row.trajectory.turns) for row in batch.made]
    assert seen.log("rollart_redundancy/kept_turns") == [pytest.approx(np.mean(turns))]


def test_waiting_groups_with_spare_rollouts_keep_the_first_to_end(train, monkeypatch):
    """24 groups of 2 + 1 begin, and one is complete with 2: the two shortest of it, where nothing was begun before."""
    ended: list[tuple[Any, Any]] = []
    cut = queue_module.without_redundant

    def watched(group: Any, ticks: Any) -> Any:
        after = cut(group, ticks)
        ended.append((group, after[0]))
        return after

    monkeypatch.setattr(queue_module, "without_redundant", watched)
    spare = {"april": {"over_sampling": 1.5}, "rollart_redundancy": {"spare": 1}}
    seen = train(["april", "rollart_redundancy"], spare, **{**LONG, "max_steps": 2, "per_device_train_batch_size": 32})
    for k, batch in enumerate(seen.batches):
        assert batch.rollouts.groups.size.tolist() == [2] * 16
        assert seen.log("rollart_redundancy/closed")[k] == 1.0 and seen.log("rollart_redundancy/failed")[k] == 0.0
        kept = float(batch.rollouts.length.double().mean())
        assert seen.log("rollart_redundancy/kept_tokens")[k] == pytest.approx(kept, abs=1e-3)
    first = [pair for pair in ended if {v for t in pair[0].rollouts for v in t.versions} == {0}]  # of the first batch
    assert len(first) >= 16
    for before, after in first:
        lengths = sorted(map(len, before.rollouts))
        assert sorted(map(len, after.rollouts)) == lengths[:2] and (before.size, after.size) == (3, 2)
        assert lengths[2] == lengths[1], "the third stops with the second"
    waiting = seen.trainer.methods.carried
    assert len(waiting) == 8 and {len(g["rollouts"]) for g in waiting} <= {2, 3}


# ---- two ranks


@pytest.mark.long
def test_a_queue_on_two_ranks_loses_nothing(tmp_path):
    """What both ranks decoded together is trained or waits, whole groups go on bit for bit on whatever rank they come
    to, and both ranks end with the same weights."""
    out = tmp_path / "out.pt"
    script = Path(__file__).parent / "queue_ranks_script.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(script),
        str(out),
    ]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=NEVER, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    found = torch.load(out, weights_only=False)
    assert len(found["steps"]) == 3
    drawn = Counter(p for s in found["steps"] for p in s["fresh"])
    trained = Counter(p for s in found["steps"] for p in s["trained"])
    assert drawn == trained + Counter(found["waiting"])
    assert [len(s["trained"]) for s in found["steps"]] == [32] * 3 and len(found["waiting"]) == 32
    resumed = 0
    for before, now in zip(found["steps"], found["steps"][1:], strict=False):
        for prompt, rollouts in now["after"].items():
            for old, new in zip(before["after"].get(prompt, ()), rollouts, strict=False):
                if prompt not in now["fresh"]:
                    assert new.tokens[: len(old)] == old.tokens and str(new.logprobs[: len(old)]) == str(old.logprobs)
                    resumed += 0 < len(old) < len(new)
    assert resumed > 8
    assert all(sum(s["decoded"][rank] for s in found["steps"]) > 0 for rank in (0, 1)), "both ranks decode"
    decoded = list(itertools.accumulate(sum(s["decoded"]) for s in found["steps"]))
    assert found["costs"]["tokens_decoded"] == decoded, "totals of both ranks"
    assert found["costs"]["rows_made"][0] == 128
    assert [s["complete"] >= s["wanted"] for s in found["ranks"]] == [True] * 6
    assert torch.equal(*found["weights"]) and (found["weights"][0] - found["begin"]).abs().max() > 1e-4


# ---- DART


def test_dart_replaces_the_oldest_failure_of_a_task_it_had_solved(train):
    """Whole bundle on an agent. In the first batch every second rollout succeeds, whatever the policy does, and in the
    third every rollout fails, so tasks solved before get their success."""

    def reward(trainer_state, **kwargs):
        scores = won(**kwargs)
        return {0: [float(i % 2) for i in range(len(scores))], 2: [0.0] * len(scores)}.get(
            trainer_state.global_step, scores
        )

    play = {"environment": Grid, "strategy": "unlimited", "turn_tokens": 4, "hard_cap": 8}
    seen = train(
        ["turn_control", "dart"],
        {"turn_control": play, "dart_pool": {"give_below": 1.0}, "dart_length": {"slack": 1}},
        policy=load_agent_policy("Grid"),
        dataset=rows_of(Grid).select(range(10)),
        reward=reward,
        max_completion_length=180,
        max_steps=3,
    )
    longest: dict[int, int] = {}
    stored: dict[int, list[int]] = {}
    replaced = 0
    for number, batch in enumerate(seen.batches):
        r, d = batch.rollouts, batch.decision
        given = torch.tensor([bool(p and "dart_pool" in p) for p in r.payload]) & (r.rollout == 0)
        turns = torch.bincount(r.turns.row, minlength=len(r))
        own_success, failure = (r.reward >= 0.5) & ~given, (r.reward < 0.5) & ~given
        for group in r.group.unique().tolist():
            rows = (r.group == group).nonzero()[:, 0].tolist()
            task = int(r.prompt_index[rows[0]])
            mine = [i for i in rows if not given[i]]
            assert max(int(turns[i]) for i in mine) <= longest.get(task, 7) + 1
            assert bool(given[rows[0]]) == (task in stored)
            kept, wins = [i for i in rows if r.kept[i]], [i for i in mine if own_success[i]]
            if task in stored:
                assert r.token_ids.completion[rows[0]].tolist() == stored[task] and float(r.reward[rows[0]]) >= 0.5
                assert int(r.version[rows[0]]) < number, "its weights are older"
            if len(wins) == len(mine):
                assert not kept
            elif wins:
                assert kept == mine
            elif task in stored and stored[task] not in [r.token_ids.completion[i].tolist() for i in mine]:
                replaced += 1
                assert kept == [rows[0], *mine[1:]], "of equally old failures the first one leaves"
            else:
                assert not kept
        for i in (own_success & r.kept).nonzero()[:, 0].tolist():
            stored[int(r.prompt_index[i])] = r.token_ids.completion[i].tolist()
        for i in own_success.nonzero()[:, 0].tolist():
            longest[int(r.prompt_index[i])] = max(longest.get(int(r.prompt_index[i]), 0), int(turns[i]))
        check_dart_numbers(batch, turns)
        assert failure.any() or number < 2
        # one step of plain SGD on what is left: -w A log p, at a ratio of 1
        data = batch.data
        if bool(d.trained.any()):
            after = sgd_step(batch.model, data, lambda lp, data=data: -(data["advantages"] * lp))
            told = weights(seen.trainer) if number == len(seen.batches) - 1 else flat(seen.batches[number + 1].model)
            torch.testing.assert_close(after, told, rtol=0, atol=2e-5)
    assert replaced >= 2 and seen.log("dart_pool/replaced")[-1] > 0 and seen.log("dart_length/limited")[-1] > 0
    assert max(seen.log("dart_entropy/kept")) < 1 and seen.log("dart_tis/weight_mean")[-1] < 1


def check_dart_numbers(batch: Batch, turns: Tensor) -> None:
    """Advantages with each step counted, and steps below the lower quantile of their group are not trained."""
    r, tokens, d = batch.rollouts, batch.tokens, batch.decision
    for group in r.group.unique().tolist():
        rows = [i for i in (r.group == group).nonzero()[:, 0].tolist() if r.kept[i]]
        if not rows:
            continue
        flat_rewards = torch.cat([r.reward[i].repeat(int(turns[i])) for i in rows])
        expected = (r.reward[rows] - flat_rewards.mean()) / (flat_rewards.std() + 1e-6)
        if float(flat_rewards.std()) == 0:
            expected = torch.zeros(len(rows)).double()
        mean = {}
        for i in rows:
            for turn in tokens.turn[tokens.row == i].unique().tolist():
                if turn >= 0:
                    mean[turn] = float(tokens.entropies[tokens.turn == turn].double().mean())
        low = sorted(mean.values())[math.floor(0.2 * (len(mean) - 1) + 1e-9)]
        for i, advantage in zip(rows, expected.tolist(), strict=True):
            mine = tokens.row == i
            weight = (tokens.old_logprobs[mine] - tokens.rollout_logprobs[mine]).double().exp().clamp(max=1)
            kept = torch.tensor([t < 0 or mean[t] >= low - 1e-9 for t in tokens.turn[mine].tolist()])
            assert torch.equal(d.keep_tokens[mine], kept)
            torch.testing.assert_close(d.advantages[mine], torch.where(kept, weight * advantage, 0.0))


# ---- ADHint


def test_adhint_begins_failing_prompts_with_their_reference(train):
    """Hints are prefixes of the reference; those of failing rollouts are not trained, and the step is plain SGD's."""
    data = build_dataset(40, seed=1)
    data = data.add_column("reference", [f"I sort: {answer}={answer}" for answer in data["answer"]])
    params = {"adhint_rollouts": {"answer_column": "answer", "w_max": 0.9, "sigma": 0.1}}
    seen = train(["adhint"], params, policy=load_policy(), dataset=data, reward=right)
    encode = seen.trainer._tokenizer.encode
    hinted = left = 0
    for number, batch in enumerate(seen.batches):
        check_books(batch, 64)
        r, d, tokens = batch.rollouts, batch.decision, batch.tokens
        expected = torch.zeros(len(tokens)).double()
        keep = torch.ones(len(tokens), dtype=torch.bool)
        for group in r.group.unique().tolist():
            rows = (r.group == group).nonzero()[:, 0].tolist()
            column = data[int(r.prompt_index[rows[0]])]
            reference = encode(column["reference"], add_special_tokens=False)
            length = {i: batch.made[i].trajectory.meta["adhint"][1] for i in rows}
            wins = [float(r.reward[i]) >= 0.5 for i in rows]
            naive = 1 - sum(wins[:4]) / 4
            assert all(length[i] == 0 for i in rows[:4])
            if naive == 0:
                assert all(length[i] == 0 for i in rows)
            with_hint = [k for k, i in enumerate(rows) if length[i]]
            without = [k for k, i in enumerate(rows) if not length[i]]
            c = 1.0
            if with_hint:
                own, easier = (1 - sum(wins[k] for k in kind) / len(kind) for kind in (without, with_hint))
                c = (1 + own) / (1 + easier)
            a = (r.reward[rows] - r.reward[rows].mean()) / (r.reward[rows].std() + 1e-6)
            for k, i in enumerate(rows):
                t, n = batch.made[i].trajectory, length[i]
                assert list(t.tokens[:n]) == reference[:n] and n <= 0.9 * len(reference)
                assert column["answer"] not in seen.trainer._tokenizer.decode(t.tokens[:n])
                assert t.kinds[:n] == (Kind.FORCED,) * n and Kind.FORCED not in t.kinds[n:]
                advantage = 0.0 if float(r.reward[rows].std()) == 0 else float(a[k])
                advantage *= c if (advantage > 0) != (n > 0) else 1 / c
                mine = (tokens.row == i).nonzero()[:, 0]
                entropy = tokens.entropies[mine].double()
                g = torch.ones(len(mine)).double()
                if n:
                    g[:n] = torch.exp(-(entropy[:n] - entropy[n:].mean()).abs())
                    hinted += 1
                    left += n * (advantage < 0)
                    keep[mine[:n]] = advantage >= 0
                expected[mine] = g * advantage
        assert torch.equal(d.keep_tokens if d.keep_tokens is not None else torch.ones_like(keep), keep)
        torch.testing.assert_close(d.advantages, torch.where(keep, expected, 0.0), rtol=1e-6, atol=1e-8)
        data_of_batch = batch.data
        after = sgd_step(batch.model, data_of_batch, lambda lp, b=data_of_batch: -(b["advantages"] * lp))
        told = weights(seen.trainer) if number == len(seen.batches) - 1 else flat(seen.batches[number + 1].model)
        torch.testing.assert_close(after, told, rtol=0, atol=2e-5)
    assert hinted > 16 and left > 16
    assert seen.log("adhint_rollouts/hinted")[0] == pytest.approx(hinted_share(seen.batches[0]))
    before = history(seen.trainer, "adhint_rollouts/hinted")
    seen.trainer.evaluate(data.select(range(8)))
    assert history(seen.trainer, "adhint_rollouts/hinted") == before, "evaluation has no hints"


def hinted_share(batch: Batch) -> float:
    return sum(row.trajectory.meta["adhint"][1] > 0 for row in batch.made) / len(batch.made)


# ---- BranchGRPO on text


def test_branches_share_tokens_and_train_them_once(train):
    """Trees of 8 completions, advantages of their nodes and the pruned tails as a loop finds them, and the step is
    plain SGD's on each token that stays, once."""
    params = {
        "branch_text_rollout": {"places": [0, 2, 4]},
        "branch_advantages": {"fusion": "levels"},
        "branch_pruning": {"until": 0.5},  # in the first of two batches
    }
    seen = train(
        ["branch_text_rollout", "branch_advantages", "branch_pruning"], params, policy=load_policy(), reward=right
    )
    for number, batch in enumerate(seen.batches):
        check_books(batch, 64)
        r, d, tokens = batch.rollouts, batch.decision, batch.tokens
        assert batch.engine_tokens < 0.85 * int(r.length.sum()), "what rows share was sampled once"
        for group in batch.groups:
            ways = [t.meta["branches"]["nodes"] for t in group]
            levels = [Counter(way[depth] for way in ways if len(way) > depth) for depth in range(3)]
            assert [max(level.values()) for level in levels] == [8, 4, 2] or len(group[0]) < 4
            for (a, x), (b, y) in itertools.combinations(zip(group, ways, strict=True), 2):
                common = sum(p == q for p, q in zip(x, y, strict=False))
                assert shared(a, b) >= a.meta["branches"]["stops"][common - 1]
        wanted = advantages_by_loops(r, tokens, "levels")
        left = worse_tails(r, tokens, wanted) if number == 0 else set()
        nodes = [node_of(r, i, p) for i, p in zip(tokens.row.tolist(), tokens.position.tolist(), strict=True)]
        first = first_copies(r, tokens)
        keep = torch.tensor([once and node not in left for once, node in zip(first, nodes, strict=True)])
        expected = torch.tensor([wanted[node] if stays else 0.0 for node, stays in zip(nodes, keep, strict=True)])
        assert torch.equal(d.keep_tokens, keep) and 0 < int(keep.sum()) < sum(first) + (number == 1) < len(tokens)
        torch.testing.assert_close(d.advantages, expected.double(), rtol=1e-6, atol=1e-8)
        assert int((batch.data["completion_mask"] * batch.data["tool_mask"]).sum()) == int(keep.sum())
        after = sgd_step(batch.model, batch.data, lambda lp, b=batch.data: -(b["advantages"] * lp))
        told = weights(seen.trainer) if number == len(seen.batches) - 1 else flat(seen.batches[number + 1].model)
        torch.testing.assert_close(after, told, rtol=0, atol=2e-5)
    assert seen.log("branch_text_rollout/saved")[0] > 0.15 and seen.log("branch_pruning/pruned")[0] > 0
    assert len(seen.log("branch_pruning/pruned")) == 1
