"""PS-GRPO (arXiv 2510.04392): what sampling the comparisons costs, and what keeps a policy from one answer for all.

1. 20 sets of 6 wordings with 4 rollouts each. A rollout is a sentence of 10 words, most of them those of its wording,
   which shares most of its words with its question. The reward with `kappa` other wordings and `s` rollouts of each is
   drawn 200 times for every rollout and compared with the exact one: mean error, root mean square error, and how
   often a rollout's advantage in its group has the sign that it has with exact rewards.
2. 8 questions in 6 wordings, 8 rollouts each, 10 possible answers, each the right one of at most one question. A
   softmax policy has a logit per wording and answer, and one per answer that all questions share, as in a model with a
   habit: one of the answers is 2, 4 or 8 times as likely as other wrong ones from the start, and right for no question.
   The right one is 4.5 times as likely. 200 batches, one step of Adam each, GRPO's advantages. Measured at the end:
   chance that two wordings of a question get the same answer, chance of the right answer, and different most likely
   answers of all questions, divided by the questions. Arms: similarity alone (gamma 0), with two coefficients of a KL
   term to the first policy, similarity and accuracy, accuracy alone.

    python examples/evidence/ps_grpo.py --seeds 10 --out evidence-results
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from common import arguments, interval, named, points, record, runs_band, save
from matplotlib.figure import Figure
from torch import Tensor

from rl_plugins.core.params import build_params
from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.methods.ps_grpo import PsGrpo
from rl_plugins.methods.ps_grpo.sets import weights
from rl_plugins.methods.ps_grpo.texts import Texts, Vocabulary
from rl_plugins.runtime.metrics import combine
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack
from rl_plugins.testing.contract.dataset import StoredDataset

SETS, WORDINGS, GROUP, WORDS, DRAWS = 20, 6, 4, 10, 200
SAMPLES = [(kappa, s) for s in (1, 2, 4) for kappa in (1, 2, 3, 5)]

QUESTIONS, ROLLOUTS, ANSWERS, BATCHES, RATE = 8, 8, 10, 200, 0.05
HABITS = (2, 4, 8)
SIZE = QUESTIONS * WORDINGS
ARMS: dict[str, tuple[dict[str, Any], float]] = {
    "gamma 0": ({"gamma": 0}, 0.0),
    "gamma 0, KL 0.05": ({"gamma": 0}, 0.05),
    "gamma 0, KL 0.5": ({"gamma": 0}, 0.5),
    "alpha 1, gamma 1": ({"answer_column": "answer"}, 0.0),
    "alpha 0, gamma 1": ({"alpha": 0, "answer_column": "answer"}, 0.0),
}


# ---- 1. the sample


def sentences(rng: np.random.Generator) -> list[str]:
    """(WORDINGS * GROUP) rollouts of one set."""

    def near(words: np.ndarray, share: float) -> np.ndarray:
        return np.where(rng.random(WORDS) < share, words, rng.integers(0, 40, WORDS))

    question = rng.integers(0, 40, WORDS)
    wordings = [near(question, 0.6) for _ in range(WORDINGS)]
    return [" ".join(f"w{i}" for i in near(w, 0.7)) for w in wordings for _ in range(GROUP)]


def sampled(seed: int) -> dict[str, dict[str, float]]:
    """Errors of every size of the sample."""
    rng = np.random.default_rng(seed)
    wording = np.repeat(np.arange(WORDINGS), GROUP)
    errors: dict[str, list[tuple[float, float, float]]] = {f"{k}, {s}": [] for k, s in SAMPLES}
    for _ in range(SETS):
        number = Vocabulary()
        similarity = Texts([number(text) for text in sentences(rng)]).similarity("bleu2")
        exact = (weights(wording) * similarity).sum(1)

        def centered(r: np.ndarray) -> np.ndarray:
            groups = r.reshape(*r.shape[:-1], WORDINGS, GROUP)
            return groups - groups.mean(-1, keepdims=True)

        for kappa, s in SAMPLES:
            drawn = np.stack([(weights(wording, kappa, s, rng) * similarity).sum(1) for _ in range(DRAWS)])
            error = drawn - exact
            agree = np.sign(centered(drawn).round(12)) == np.sign(centered(exact).round(12))
            errors[f"{kappa}, {s}"].append((error.mean(), (error**2).mean(), agree.mean()))
    means = {name: np.mean(several, axis=0) for name, several in errors.items()}
    return {name: {"bias": m[0], "rmse": float(np.sqrt(m[1])), "sign": m[2]} for name, m in means.items()}


# ---- 2. the collapse


def facts(logits: Tensor, right: Tensor) -> tuple[float, float, float]:
    """Exact, of a policy (questions, wordings, answers): agreement of two wordings, right answers, different ones."""
    p = logits.softmax(-1)
    total = p.sum(1)
    pairs = (total * total - (p * p).sum(1)).sum(-1) / (WORDINGS * (WORDINGS - 1))
    accuracy = p[torch.arange(QUESTIONS), :, right].mean()
    return float(pairs.mean()), float(accuracy), len(set(total.argmax(-1).tolist())) / QUESTIONS


def trained(seed: int, habit: int, params: Mapping[str, Any], kl: float) -> tuple[np.ndarray, float]:
    """(batches + 1, 3) `facts` over training, and `collapsed` in the last batch."""
    draw = torch.Generator().manual_seed(seed)
    right = 1 + torch.randperm(ANSWERS - 1, generator=draw)[:QUESTIONS]
    own = torch.randn(QUESTIONS, WORDINGS, ANSWERS, generator=draw, dtype=torch.float64) * 0.5
    own[torch.arange(QUESTIONS), :, right] += 1.5
    shared = torch.zeros(ANSWERS, dtype=torch.float64)
    shared[0] = np.log(habit)
    first = (own + shared).log_softmax(-1)
    own.requires_grad_(), shared.requires_grad_()
    optimizer = torch.optim.Adam([own, shared], lr=RATE)
    sets = [i // WORDINGS for i in range(SIZE)]
    dataset = StoredDataset({"prompt": [""] * SIZE, "paraphrase_set_id": sets})
    method = PsGrpo(build_params(PsGrpo.Params, {"similarity": "em", **params}, "ps_grpo"))
    run = make_run(dataset=dataset, dataset_size=SIZE, group_size=ROLLOUTS, total_batches=BATCHES)
    stack = start_stack(method, seed=seed, run=run)
    prompts = [i for i in range(SIZE) for _ in range(ROLLOUTS)]
    meta = {"paraphrase_set_id": [sets[i] for i in prompts], "answer": [f"a{right[sets[i]]}" for i in prompts]}
    curve, logged = [facts((own + shared).detach(), right)], dict[str, float]()
    for batch in range(BATCHES):
        log = (own + shared).log_softmax(-1)
        answers = torch.multinomial(log.detach().exp().reshape(SIZE, ANSWERS), ROLLOUTS, True, generator=draw)
        text = [f"a{a}" for a in answers.flatten().tolist()]
        rollouts = make_rollouts([0.0] * len(text), prompts, prompt_index=prompts, text=text, meta=meta, batch=batch)
        advantages = one_step(stack, rollouts).row_advantages
        logged = combine([stack.metrics.take()])
        loss = -(advantages.reshape(SIZE, ROLLOUTS) * log.reshape(SIZE, ANSWERS).gather(1, answers)).mean()
        loss = loss + kl * (log.exp() * (log - first)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(facts((own + shared).detach(), right))
    return np.array(curve), logged["ps_grpo/collapsed"]


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "ps_grpo",
        "share of advantages with the right sign, the paper's sample, simulated",
        "higher",
        r["sample"]["3, 1"]["sign"],
        {"mean": 1.0, "ci95": 0.0},
        baseline="exact rewards",
    )
    yield record(
        "ps_grpo",
        "right answers where a wrong habit leads, `gamma` 0 against `gamma` 1",
        "higher",
        r["arms"]["habit 8, gamma 0"]["right"],
        r["arms"]["habit 8, alpha 1, gamma 1"]["right"],
    )
    yield record(
        "ps_grpo",
        "right answers and agreement of wordings, both parts against the accuracy alone",
        "higher",
        r["arms"]["habit 8, alpha 1, gamma 1"]["right"],
        r["arms"]["habit 8, alpha 0, gamma 1"]["right"],
    )


def main() -> None:
    args, start = arguments(__doc__, seeds=10), time.time()
    seeds = range(args.seeds)
    errors = [sampled(seed) for seed in seeds]
    sample = {
        name: {what: interval([e[name][what] for e in errors]) for what in ("bias", "rmse", "sign")}
        for name in errors[0]
    }
    for name, row in sample.items():
        print(f"kappa, s = {name}", {k: f"{v['mean']:.5f} ± {v['ci95']:.5f}" for k, v in row.items()})
    names = ("agreement", "right", "distinct")
    arms, curves = dict[str, Any](), dict[int, dict[str, list[np.ndarray]]]()
    for habit in HABITS:
        curves[habit] = {}
        for arm, (params, kl) in ARMS.items():
            runs = [trained(seed, habit, params, kl) for seed in seeds]
            curves[habit][arm] = [curve for curve, _ in runs]
            begin, end = (np.stack([curve[i] for curve, _ in runs]) for i in (0, -1))
            row: dict[str, Any] = {name: interval(end[:, i]) for i, name in enumerate(names)}
            row |= {f"{name} at the start": interval(begin[:, i]) for i, name in enumerate(names)}
            row["collapsed in the last batch"] = f"{sum(x == 1 for _, x in runs)} of {len(runs)}"
            arms[f"habit {habit}, {arm}"] = row
            print(
                habit,
                arm,
                {k: v if isinstance(v, str) else f"{v['mean']:.3f} ± {v['ci95']:.3f}" for k, v in row.items()},
            )
    save(
        args.out,
        "ps_grpo",
        {"sample": sample, "arms": arms},
        lambda: plot(sample, curves),
        start,
        records=records({"sample": sample, "arms": arms}),
        where="ps_grpo-10-seeds",
    )


def plot(sample: Mapping[str, Any], curves: Mapping[int, Mapping[str, Sequence[np.ndarray]]]) -> Figure:
    figure, axes = panels(2, 3.2)
    for i, s in enumerate((1, 2, 4)):
        points(axes[0], (1, 2, 3, 5), [sample[f"{k}, {s}"]["rmse"] for k in (1, 2, 3, 5)], f"s = {s}", i)
    named(axes[0], "kappa (other wordings)", "root mean square error", "Error of the sampled reward")
    habit = HABITS[-1]
    for i, (arm, runs) in enumerate(curves[habit].items()):
        runs_band(axes[1], np.arange(BATCHES + 1), [curve[:, 1] for curve in runs], arm, i)
    named(axes[1], "batches", "chance of the right answer", f"Right answers, habit {habit}")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
