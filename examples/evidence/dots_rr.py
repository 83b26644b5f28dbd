"""DOTS + RR (arXiv 2506.05316): are pass rates predicted, are more prompts useful, and what does replay save?

1. Selection. 2,000 questions have one of 12 skills each and a difficulty of their own; embeddings of 24 numbers tell
   the skill and the difficulty among noise that is twice as large. The policy's ability in each skill is random; the
   pass rate is sigmoid(ability - difficulty). 20 cycles of 2 batches of 64 prompts, groups of 8, 32 reference prompts
   (the paper's ratio); a question whose group was mixed raises the ability in its skill by 0.005. Arms: the host's
   order, `dots` on raw embeddings, and with an adapter that was trained on the pass rates of 6 other policies.
   Measured: correlation of the predicted and the true pass rate over all questions, share of groups with unequal
   rewards, the same per rollout generated (the references count), and the mean pass rate of all questions at the end.
2. Replay. A tabular policy answers 400 questions of 20 kinds with one of 32 answers, one right per kind; Adam-free
   gradient ascent, 16 groups of 8 per batch. Arms: all fresh (GRPO); half replayed with the paper's loss
   (`decoupled_ppo`, `action: none`); half replayed as if it were fresh. The buffer holds 16 groups (one to two batches
   old) or 256 (very old). Measured at a small and a large learning rate: expected reward after the same number of
   generated rollouts, and after the same number of optimizer steps.

Found (5 seeds): the predicted pass rate correlates with the true one by .61 on raw embeddings and .80 with the adapter;
groups with unequal rewards .56 -> .73 and .76. Per generated rollout, references included, the gain is within the
interval. Replay needs far fewer rollouts for the same reward, and fewer steps, because stored groups always have a
gradient; the correction is ahead at the small learning rate until late, and within the interval at the large one.

    python examples/evidence/dots_rr.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import arguments, interval, named, record, save
from matplotlib.figure import Figure

from rl_plugins.core.losses import ppo_clip
from rl_plugins.core.rollouts import PlanRow, TokenIds
from rl_plugins.lab.compare.figures import line, name_lines, panels
from rl_plugins.methods.decoupled_ppo import DecoupledPpo
from rl_plugins.methods.dots import Dots, save_adapter, train_adapter
from rl_plugins.methods.rollout_replay import RolloutReplay
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.rounds import Rounds
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, make_run, make_terms, make_tokens, one_step, start_stack

QUESTIONS, SKILLS, SIZE = 2000, 12, 24
PROMPTS, GROUP, BATCHES, REFERENCES, GAIN = 64, 8, 40, 32, 0.005


# ---- selection


class Policy:
    """Pass rates of all questions."""

    def __init__(self, seed: int) -> None:
        world = np.random.default_rng(0)  # the same questions for every policy
        self.skill = world.integers(0, SKILLS, QUESTIONS)
        self.difficulty = world.normal(0, 1, QUESTIONS)
        self.ability = np.random.default_rng([seed, 1]).normal(0, 3, SKILLS)

    @property
    def rates(self) -> np.ndarray:
        return 1 / (1 + np.exp(self.difficulty - self.ability[self.skill]))


def embeddings() -> np.ndarray:
    world, policy = np.random.default_rng(1), Policy(0)
    centers = world.normal(0, 1, (SKILLS, SIZE))
    centers[:, 0], centers[:, SIZE // 2 :] = 0, 0
    noise = world.normal(0, 1, (QUESTIONS, SIZE))
    noise[:, SIZE // 2 :] *= 2
    noise[:, 0] = 3 * policy.difficulty
    return (centers[policy.skill] * 2 + noise).astype(np.float32)


def adapter(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "dots_adapter.safetensors"
    rows = torch.arange(QUESTIONS)
    tables = {f"policy {s}": (rows, torch.from_numpy(Policy(1000 + s).rates)) for s in range(6)}
    made, _ = train_adapter(embeddings(), tables, references=REFERENCES, epochs=10, hidden=64)
    save_adapter(path, made)
    return str(path)


def answered(stack: MethodStack, rows: list[PlanRow], rates: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Group and reward of every rollout of a plan, the same whenever they are asked for in a batch."""
    group, reward = [], []
    for row in rows:
        rng = np.random.default_rng([stack.seed, stack.batch, row.group])
        right = rng.random(row.n + row.spare) < rates[row.prompt_index]
        group += [row.group] * len(right)
        reward += right.astype(float).tolist()
    return torch.tensor(group), torch.tensor(reward, dtype=torch.float64)


def selection(arm: str, seed: int, trained: str) -> dict[str, float]:
    policy, methods = Policy(seed), []
    if arm != "host's order":
        file = trained if arm == "dots, adapter" else None
        p = Dots.Params(embeddings=lambda data: embeddings(), adapter=file, references=REFERENCES)
        methods = [Dots(p)]
    stack = start_stack(*methods, seed=seed, run=make_run(dataset_size=QUESTIONS, group_size=GROUP))
    order = np.random.default_rng([seed, 2])
    mixed, made, correlation = [], 0, []
    for _ in range(BATCHES):
        proposal = order.permutation(QUESTIONS)[:PROMPTS].tolist()
        rates = policy.rates
        plan = first_plan(stack, proposal, GROUP, PROMPTS * GROUP, QUESTIONS)
        books = Rounds(stack, plan.rows, GROUP, PROMPTS * GROUP, QUESTIONS)
        while methods and books.more(*answered(stack, books.rows, rates)):
            pass
        group, reward = answered(stack, books.rows, rates)
        each = [row for row in books.rows for _ in range(row.n + row.spare)]
        rollouts = make_rollouts(
            reward,
            group.tolist(),
            lengths=[1] * len(each),
            prompt_index=[row.prompt_index for row in each],
            payload=[row.payload for row in each],
            batch=stack.batch,
        )
        references = any(row.n == 0 for row in books.rows)
        kept = one_step(stack, rollouts, budget=PROMPTS * GROUP).rollouts.subset
        decided = kept(torch.tensor([row.n > 0 for row in each]))
        useful = decided.groups.max(decided.reward) > decided.groups.min(decided.reward)
        mixed.append(float(useful.double().mean()))
        made += len(each)
        if methods and references:
            told = methods[0].state["predicted"].numpy()
            correlation.append(np.corrcoef(told, rates)[0, 1])
        prompt = decided.groups.max(decided.prompt_index.double()).long()[useful].numpy()
        np.add.at(policy.ability, policy.skill[prompt], GAIN)
        stack.metrics.take()
    return {
        "correlation": float(np.mean(correlation)) if correlation else 0.0,
        "useful": float(np.mean(mixed)),
        "useful groups per 1,000 rollouts": 1000 * PROMPTS * sum(mixed) / made,
        "mean pass rate at the end": float(policy.rates.mean()),
    }


# ---- replay

KINDS, ANSWERS, ASKED, REPLAY_GROUPS = 20, 32, 400, 16
RATES, TRAINED = {"small": 10.0, "large": 80.0}, 40
REPLAY_ARMS = {
    "all fresh": None,
    "replay, corrected, 16 groups": (16, True),
    "replay, as if fresh, 16 groups": (16, False),
    "replay, corrected, 256 groups": (256, True),
    "replay, as if fresh, 256 groups": (256, False),
}
LOSS = DecoupledPpo(DecoupledPpo.Params(action="none"))
start_stack(LOSS)


def replay(arm: str, rate: float, seed: int) -> np.ndarray:
    """(batches, 2): generated rollouts and expected reward after each batch."""
    spec, rng = REPLAY_ARMS[arm], np.random.default_rng([seed, 7])
    right = torch.from_numpy(np.random.default_rng(seed).integers(0, ANSWERS, KINDS))
    kind = torch.arange(ASKED) % KINDS
    theta = torch.zeros(KINDS, ANSWERS, dtype=torch.float64)
    methods = [RolloutReplay(RolloutReplay.Params(buffer_groups=spec[0]))] if spec else []
    stack = start_stack(*methods, seed=seed, run=make_run(dataset_size=ASKED, group_size=GROUP))
    curve, made = [], 0
    while made < TRAINED * REPLAY_GROUPS * GROUP:
        proposal = rng.permutation(ASKED)[:REPLAY_GROUPS].tolist()
        plan = first_plan(stack, proposal, GROUP, REPLAY_GROUPS * GROUP, ASKED)
        policy = torch.log_softmax(theta, 1)
        answers, sampled, versions, rewards, prompts = [], [], [], [], []
        for row in plan.rows:
            k = int(kind[row.prompt_index])
            if row.given:
                answers += [c.tokens[0] for c in row.given]
                sampled += [c.logprobs[0] for c in row.given]
                versions += [c.versions[0] for c in row.given]
                rewards += [c.rewards["reward_0"] for c in row.given]
            else:
                drawn = (policy[k] + torch.from_numpy(rng.gumbel(size=(GROUP, ANSWERS)))).argmax(1)
                answers += drawn.tolist()
                sampled += policy[k][drawn].tolist()
                versions += [stack.batch] * GROUP
                rewards += (drawn == right[k]).double().tolist()
                made += GROUP
            prompts += [row.prompt_index] * GROUP
        payload = [row.payload for row in plan.rows for _ in range(GROUP)]
        tokens = torch.tensor(answers)
        rollouts = make_rollouts(
            rewards,
            group_size=GROUP,
            lengths=[1] * len(answers),
            prompt_index=prompts,
            payload=payload,
            version=torch.tensor(versions),
            current_version=stack.batch,
            token_ids=TokenIds.cat([torch.tensor([p]) for p in prompts], list(tokens[:, None])),
        )
        flat = make_tokens(
            rollouts, rollout_logprobs=torch.tensor(sampled), version=torch.tensor(versions), old_logprobs=None
        )
        advantages = one_step(stack, rollouts, flat).advantages
        live = theta.clone().requires_grad_()
        logprobs = torch.log_softmax(live, 1)[kind[torch.tensor(prompts)], tokens][:, None]
        terms = make_terms(
            len(answers),
            1,
            mask=torch.ones(len(answers), 1),
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),
            rollout_logprobs=torch.tensor(sampled, dtype=torch.float64)[:, None],
            advantages=advantages.reshape(-1, 1),
        )
        corrected = spec is not None and spec[1]
        per_token = (
            LOSS.policy_loss(terms) if corrected else ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages)
        )
        per_token.mean().backward()
        assert live.grad is not None
        theta = theta - rate * live.grad
        reward = float(torch.softmax(theta, 1)[torch.arange(KINDS), right].mean())
        curve.append((made, reward))
        stack.metrics.take()
    return np.array(curve)


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "dots",
        "share of groups with unequal rewards, simulated, raw embeddings",
        "higher",
        r["selection"]["dots, raw embeddings"]["useful"],
        r["selection"]["host's order"]["useful"],
        baseline="host's order",
    )
    yield record(
        "dots",
        "such groups per 1,000 rollouts, reference rollouts counted",
        "higher",
        r["selection"]["dots, raw embeddings"]["useful groups per 1,000 rollouts"],
        r["selection"]["host's order"]["useful groups per 1,000 rollouts"],
        baseline="host's order",
    )
    yield record(
        "dots",
        "mean pass rate at the end, simulated",
        "higher",
        r["selection"]["dots, raw embeddings"]["mean pass rate at the end"],
        r["selection"]["host's order"]["mean pass rate at the end"],
        baseline="host's order",
    )
    yield record(
        "rollout_replay",
        "expected reward after 2,560 rollouts, small learning rate, simulated, with correction",
        "higher",
        r["replay"]["small"]["replay, corrected, 16 groups"]["2560 rollouts"],
        r["replay"]["small"]["all fresh"]["2560 rollouts"],
        baseline="all fresh",
    )
    yield record(
        "rollout_replay",
        "expected reward after 2,560 rollouts, large learning rate, simulated, with correction",
        "higher",
        r["replay"]["large"]["replay, corrected, 16 groups"]["2560 rollouts"],
        r["replay"]["large"]["all fresh"]["2560 rollouts"],
        baseline="all fresh",
    )
    yield record(
        "rollout_replay",
        "expected reward after 5,120 rollouts, small learning rate, with correction against replay as if fresh",
        "higher",
        r["replay"]["small"]["replay, corrected, 16 groups"]["5120 rollouts"],
        r["replay"]["small"]["replay, as if fresh, 16 groups"]["5120 rollouts"],
    )


def main() -> None:
    args, start = arguments(__doc__, seeds=5), time.time()
    seeds, trained = range(args.seeds), adapter(args.out)
    arms = ("host's order", "dots, raw embeddings", "dots, adapter")
    found = {arm: [selection(arm, s, trained) for s in seeds] for arm in arms}
    results: dict[str, Any] = {
        "selection": {a: {k: interval([f[k] for f in found[a]]) for k in found[a][0]} for a in arms}
    }
    for arm, row in results["selection"].items():
        print(arm, {k: f"{v['mean']:.3f} ± {v['ci95']:.3f}" for k, v in row.items()})

    budgets, steps = [TRAINED * REPLAY_GROUPS * GROUP // k for k in (4, 2, 1)], (TRAINED // 2, TRAINED)
    results["replay"] = {}
    for name, rate in RATES.items():
        curves = {arm: [replay(arm, rate, s) for s in seeds] for arm in REPLAY_ARMS}
        results["replay"][name] = {
            arm: {
                **{f"{n} rollouts": interval([c[np.searchsorted(c[:, 0], n), 1] for c in curve]) for n in budgets},
                **{f"{n} steps": interval([c[n - 1, 1] for c in curve]) for n in steps},
            }
            for arm, curve in curves.items()
        }
        for arm, row in results["replay"][name].items():
            print(name, arm, {k: f"{v['mean']:.3f} ± {v['ci95']:.3f}" for k, v in row.items()}, flush=True)

    save(
        args.out,
        "dots_rr",
        results,
        lambda: plot(curves),
        start,
        records=records(results),
        where="dots_rr-5-seeds",
    )


def plot(curves: dict[str, Any]) -> Figure:
    figure, (axis,) = panels(1, 3.2)
    for i, (arm, several) in enumerate(curves.items()):
        n = min(len(c) for c in several)
        axis.plot(several[0][:n, 0], np.mean([c[:n, 1] for c in several], 0), label=arm, **line(i))
    named(axis, "rollouts generated", "expected reward")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
