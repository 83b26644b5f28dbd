"""ECHO's mechanisms, measured: what the tree finds, what its rules cut, and whether shaping and clip range help.

    python examples/evidence/echo.py --seeds 3 --out evidence-results

Tree. 200 prompts of a known model: an uncertain token of 8 values decides the answer, one of them is right and more
likely than the others on average. 8 rollouts per prompt, independent or from the tree. Shown are different
answers per prompt, whether the right one was among them, whether the majority is right, and tokens generated.

Cutting. Texts of 200 tokens whose entropies are drawn at random with the long tail that language models have: how many
responses the authors' only effective rule (entropy_spike) cuts, and how much of them is left.

Learning. Test-time training without labels: a softmax policy over answers of two tokens for each of 64 prompts, whose
most likely answer is right on most prompts. 8 prompts a batch with 32 votes of which 8 are trained, 8 updates per batch
with a high learning rate, so that clipping acts. Arms: labels with plain PPO; with the shaping; with the clip range;
with both; and the true rewards with plain PPO.

Everything is the methods themselves, through the fake engine or through the driver. Intervals are 95 % Student
intervals over seeds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import arguments, corner_legend, grouped, named, record, save, summary
from matplotlib.figure import Figure

from rl_plugins.core.losses import ppo_clip
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Terms
from rl_plugins.lab.compare.figures import line, panels
from rl_plugins.methods.echo.controller import prune_at, statistics
from rl_plugins.methods.echo_tree import EchoTree
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import make_rollouts, make_run, make_tokens, one_step
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program

ANSWERS, TREE_PROMPTS, ROLLOUTS = "pqrstuvw", 200, 8
TREE = {"logprob_top_k": 8, "entropy_high": 1.2, "delta_upper": None, "max_branches": 4}
PROMPTS, VALUES, BATCH, VOTES, TRAINED, UPDATES, STEPS = 64, 6, 8, 32, 8, 8, 80
ARMS: dict[str, list[str]] = {
    "labels": ["echo_labels"],
    "labels, shaping": ["echo_labels", "echo_shaping"],
    "labels, clip range": ["echo_labels", "echo_clip"],
    "labels, both": ["echo_labels", "echo_shaping", "echo_clip"],
    "true rewards": [],
}


# ---- the tree


def shares(rng: np.random.Generator) -> dict[str, float]:
    """Probabilities of the answers of a prompt; the first letter is right."""
    weight = np.exp(rng.normal(size=len(ANSWERS)) * 0.9)
    weight[0] *= 2
    return dict(zip(ANSWERS, (weight / weight.sum()).tolist(), strict=True))


def grow(tree: bool, seed: int) -> dict[str, float]:
    rng = np.random.default_rng([seed, 1])
    found: dict[str, list[float]] = {"answers": [], "right among them": [], "majority right": [], "tokens": []}
    method = EchoTree(build_params(EchoTree.Params, TREE if tree else {"max_branches": 1}, "echo_tree"))
    for i in range(TREE_PROMPTS):
        answers = shares(rng)

        def model(text: str, answers: dict[str, float] = answers) -> dict[str, float]:
            said = text.rsplit(">", 1)[-1]
            if len(said) == 6:
                return answers
            best = EOS if len(said) > 8 else "-"
            return {best: 0.96, **dict.fromkeys("abcdefg", 0.04 / 7)}

        engine = TableEngine(model, seed=1000 * seed + i)
        rows = run_program(method, make_prompt(engine.chat, f"{i}", n=ROLLOUTS), engine)
        given = [engine.chat.decode(row.tokens)[6:7] for (row,) in rows]
        counts = {a: given.count(a) for a in given}
        best = max(counts, key=lambda a: (counts[a], -given.index(a)))
        found["answers"].append(len(counts))
        found["right among them"].append(100 * ("p" in counts))
        found["majority right"].append(100 * (best == "p"))
        found["tokens"].append(engine.decoded)
    return {name: float(np.mean(values)) for name, values in found.items()}


def cut(spread: float, seed: int) -> tuple[float, float]:
    """Share of responses that the rule cuts, and share of their tokens that stays, in percent."""
    rng = np.random.default_rng([seed, 2])
    p = EchoTree.Params(delta_upper=0.5)
    cuts, kept = [], []
    for _ in range(200):
        sharpness = np.exp(spread * rng.normal(size=200) + 1.0)
        logits = -np.arange(10)[None] * sharpness[:, None] * 0.5
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        s = statistics([[(j, float(x)) for j, x in enumerate(row)] for row in logprobs], p)
        found = prune_at(s, p)
        cuts.append(100 * (found is not None))
        kept.append(100 * ((found[0] + 1) / 200 if found else 1.0))
    return float(np.mean(cuts)), float(np.mean(kept))


# ---- learning


def learn(arm: str, seed: int) -> tuple[list[float], list[float]]:
    """Success over all prompts, and share of them whose most likely answer is right, in percent, over batches."""
    rng = np.random.default_rng([seed, 3])
    right = rng.integers(0, VALUES, size=(PROMPTS, 2))
    names = ARMS[arm]
    params = {"echo_labels": {"n_votes": VOTES, "extract": str, "label_column": "truth"}}
    stack = build_stack(names, {n: v for n, v in params.items() if n in names}, seed)
    stack.start(make_run(dataset_size=PROMPTS, group_size=TRAINED, columns=("prompt", "truth")))
    first = torch.from_numpy(rng.normal(size=(PROMPTS, VALUES)) * 0.6)
    second = torch.from_numpy(rng.normal(size=(PROMPTS, VALUES, VALUES)) * 0.6)
    rows = torch.arange(PROMPTS)
    first[rows, right[:, 0]] += 1.8
    second[rows, right[:, 0], right[:, 1]] += 1.8
    first.requires_grad_(), second.requires_grad_()
    adam = torch.optim.Adam([first, second], lr=0.1)
    success, best_right = [], []
    answer = torch.from_numpy(right @ [VALUES, 1])

    def measure() -> None:
        with torch.no_grad():
            joint = (torch.softmax(first, 1)[:, :, None] * torch.softmax(second, 2)).flatten(1)
            success.append(100 * float(joint[rows, answer].mean()))
            best_right.append(100 * float((joint.argmax(1) == answer).double().mean()))

    measure()
    for step in range(STEPS):
        plan = first_plan(stack, rng.choice(PROMPTS, BATCH, replace=False).tolist(), TRAINED, BATCH * TRAINED, PROMPTS)
        made = [row for row in plan.rows for _ in range(row.n + row.spare)]
        prompt = torch.tensor([row.prompt_index for row in made])
        with torch.no_grad():
            p1 = torch.softmax(first[prompt], 1)
            a = torch.from_numpy((rng.random((len(made), 1)) > p1.cumsum(1).numpy()).sum(1)).clamp(max=VALUES - 1)
            p2 = torch.softmax(second[prompt, a], 1)
            b = torch.from_numpy((rng.random((len(made), 1)) > p2.cumsum(1).numpy()).sum(1)).clamp(max=VALUES - 1)
            old = torch.stack([p1.gather(1, a[:, None])[:, 0], p2.gather(1, b[:, None])[:, 0]], 1).log()
            entropies = torch.stack([-(p * p.log()).sum(1) for p in (p1, p2)], 1)
        truth = torch.from_numpy(right)[prompt]
        correct = ((a == truth[:, 0]) & (b == truth[:, 1])).double()
        rollouts = make_rollouts(
            correct,
            [row.group for row in made],
            lengths=[2] * len(made),
            prompt_index=prompt.tolist(),
            text=[f"{x} {y}" for x, y in zip(a.tolist(), b.tolist(), strict=True)],
            payload=[row.payload for row in made],
            meta={"truth": [f"{x} {y}" for x, y in truth.tolist()]},
            batch=step,
        )
        tokens = make_tokens(rollouts, old_logprobs=old.flatten().float(), entropies=entropies.flatten().float())
        decision = one_step(stack, rollouts, tokens, budget=BATCH * TRAINED)
        stays = decision.stays
        advantages = decision.advantages.view(-1, 2)[stays]
        columns = {k: v[stays][:, None] for k, v in decision.row_columns.items()}
        for _ in range(UPDATES):
            lp1 = torch.log_softmax(first, 1)[prompt, a]
            lp2 = torch.log_softmax(second, 2)[prompt, a, b]
            lp = torch.stack([lp1, lp2], 1)[stays]
            if stack.claims["policy_loss"]:
                ones = torch.ones_like(lp)
                count = torch.tensor(float(lp.numel()))
                terms = Terms(ones, lp, advantages, old[stays], count, count / 2, 2, columns=columns)
                loss = stack.one("policy_loss", terms)
            else:
                loss = ppo_clip(lp, old[stays], advantages, 0.2, 0.2, 3.0)
            adam.zero_grad()
            loss.mean().backward()
            adam.step()
        stack.metrics.take()
        measure()
    return success, best_right


# ---- report


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "echo_clip",
        "right answers with the clip range, labels by vote",
        "higher",
        difference=r["learning"]["labels, clip range"]["more than labels"],
        unit="points",
    )
    yield record(
        "echo_labels",
        "right answers after training on majority labels",
        "higher",
        r["learning"]["labels"]["success"],
        r["learning"]["true rewards"]["success"],
        baseline="true rewards",
        unit="%",
    )
    yield record(
        "echo_shaping",
        "right answers with shaping, labels by vote",
        "higher",
        difference=r["learning"]["labels, shaping"]["more than labels"],
        unit="points",
    )
    yield record(
        "echo_tree",
        "prompts with a right answer among 8 rollouts",
        "higher",
        r["tree"]["tree"]["right among them"],
        r["tree"]["independent"]["right among them"],
        baseline="independent rollouts",
        unit="%",
    )


def main() -> None:
    args = arguments(__doc__.splitlines()[0], seeds=3)
    start, seeds = time.time(), range(args.seeds)
    result: dict = {"seeds": args.seeds, "tree": {}, "cutting": {}, "learning": {}, "curves": {}}
    for name, tree in (("independent", False), ("tree", True)):
        runs = [grow(tree, seed) for seed in seeds]
        result["tree"][name] = {key: summary([run[key] for run in runs]) for key in runs[0]}
        cells = (f"{key} {c['mean']:.2f} +-{c['ci95']:.2f}" for key, c in result["tree"][name].items())
        print(f"{name:14}" + ",  ".join(cells))
    print(f"\n{'spread of entropies':22}{'responses cut %':>18}{'tokens left %':>18}")
    for spread in (0.5, 1.0, 1.5):
        runs = [cut(spread, seed) for seed in seeds]
        cells = [summary([run[k] for run in runs]) for k in (0, 1)]
        result["cutting"][str(spread)] = {"cut": cells[0], "left": cells[1]}
        print(f"{spread:<22}" + "".join(f"{c['mean']:>13.1f} +-{c['ci95']:<3.1f}" for c in cells))
    all_runs: dict[str, list[tuple[list[float], list[float]]]] = {}
    print(f"\n{'arm':22}{'success %':>18}{'best answer right %':>24}{'success less labels alone':>28}")
    for arm in ARMS:
        runs = all_runs[arm] = [learn(arm, seed) for seed in seeds]
        cells = [summary([run[k][-1] for run in runs]) for k in (0, 1)]
        paired = [run[0][-1] - plain[0][-1] for run, plain in zip(runs, all_runs["labels"], strict=True)]
        cells.append(summary(paired))
        result["learning"][arm] = {"success": cells[0], "best answer right": cells[1], "more than labels": cells[2]}
        result["curves"][arm] = np.mean([run[0] for run in runs], axis=0).tolist()
        print(f"{arm:22}" + "".join(f"{c['mean']:>14.1f} +-{c['ci95']:<4.1f}" for c in cells))
    at_start = [summary([run[k][0] for run in all_runs["labels"]]) for k in (0, 1)]
    result["learning"]["at the start"] = {"success": at_start[0], "best answer right": at_start[1]}
    print(f"{'at the start':22}" + "".join(f"{c['mean']:>14.1f} +-{c['ci95']:<4.1f}" for c in at_start))
    save(args.out, "echo", result, lambda: plot(result), start, records=records(result), where="echo-aepo-3-seeds")


def plot(result: dict) -> Figure:
    figure, (tree, learning, cutting) = panels(3)
    keys = ("right among them", "majority right")
    trees = {f"{arm}: {cells['tokens']['mean']:.0f} tokens": cells for arm, cells in result["tree"].items()}
    grouped(tree, keys, {arm: [cells[key] for key in keys] for arm, cells in trees.items()})
    tree.set_ylim(0, 100)
    named(tree, "", "prompts (%)", f"The tree, {ROLLOUTS} rollouts per prompt")
    tree.legend(loc="upper right")
    for i, arm in enumerate(ARMS):
        learning.plot(result["curves"][arm], label=arm, **line(i))
    named(learning, f"batches of {UPDATES} updates", "success rate over all prompts (%)", "Learning")
    learning.legend()
    words = {"cut": "responses that are cut", "left": "tokens that are left"}
    grouped(
        cutting,
        map(str, result["cutting"]),
        {word: [of[key] for of in result["cutting"].values()] for key, word in words.items()},
    )
    named(cutting, "spread of the log sharpness of tokens", "share (%)", "The rule entropy_spike, 200 tokens")
    corner_legend(figure, cutting)
    return figure


if __name__ == "__main__":
    main()
