"""OTR (arXiv 2509.26313): a new task learned from demonstrations, and what is forgotten of the old ones.

The demo's policy (78,272 parameters) is warm-started on three tasks on digit lists, then fine-tuned on a fourth one
that it never saw, to write the list backwards (`r:472` -> `=274`), with nothing of the old tasks in the data. Compared
at equal steps and demonstrations, from the same weights, with the same batches:

    SFT             cross-entropy
    DFT             cross-entropy times the probability of the target
    OTR             the real loss with its defaults: 256 draws, kappa 1.3, beta -0.1
    OTR, expected   the same with the exact mean over all draws

Measured on prompts that were not trained: the share of answers that greedy decoding gets right to the last digit, given
the mark `=`, of the new task and of the three old ones (levels 1 and 2), every 25 steps.

Found (5 seeds): OTR learns the new task more slowly than SFT and forgets no less of the old ones; DFT is slower still.
Draws and exact mean are no significant difference.

Seeds differ in the batches, the draws and the prompts; the warm-started policy is the same.

    python examples/evidence/otr.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from common import arguments, band, interval, named, record, save
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.lab.demo.policy import build_tokenizer, labeled, load_policy
from rl_plugins.lab.demo.tasks import random_prompt, solve
from rl_plugins.tools.supervised.otr import Drawing, OtrParams, generator, logits_loss

STEPS, EVERY, BATCH, RATE, ASKED = 150, 25, 32, 1e-3, 200
OTR = {"OTR": OtrParams(), "OTR, expected": OtrParams(expected=True)}
ARMS = ("SFT", "DFT", *OTR)
TOKENIZER = build_tokenizer()


def text(prompt: str, answer: str) -> str:
    return f"<user>{prompt}<asst>={answer}<eos>"


def new_prompt(rng: random.Random) -> str:
    return "r:" + "".join(rng.choice("0123456789") for _ in range(rng.choice((2, 4))))


def backwards(prompt: str) -> str:
    return prompt[:1:-1]


def held_out(rng: random.Random, count: int, old: bool, trained: set[str]) -> list[tuple[str, str]]:
    pairs = []
    while len(pairs) < count:
        prompt = random_prompt(rng, rng.choice((1, 2)), "held_out") if old else new_prompt(rng)
        if prompt not in trained:
            pairs.append((prompt, solve(prompt) if old else backwards(prompt)))
    return pairs


def right(model: Any, pairs: list[tuple[str, str]]) -> float:
    """Greedy decoding is right where each token is the most probable one behind the right ones."""
    with torch.no_grad():
        inputs = labeled(TOKENIZER, [text(*pair) for pair in pairs])
        labels = inputs.pop("labels")[:, 1:]
        hit = model(**inputs).logits[:, :-1].argmax(-1) == labels
    asked = labels != -100
    first = asked & (asked.cumsum(-1) == 1)  # the mark is given
    return (hit | ~asked | first).all(-1).float().mean().item()


def loss_of(arm: str, logits: Tensor, labels: Tensor, seed: int, step: int) -> Tensor:
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    rows = (labels != -100).nonzero()[:, 0]
    if arm in OTR:
        stream = generator(OTR[arm], seed, step, 0, 0, "cpu")
        return logits_loss(logits, labels, rows, Drawing(OTR[arm], stream, len(TOKENIZER))).loss.mean()
    log_p = logits[rows].log_softmax(-1).gather(-1, labels[rows, None])
    return -(log_p * (log_p.exp().detach() if arm == "DFT" else 1.0)).mean()


def run(start: Any, arm: str, seed: int) -> dict[str, list[float]]:
    rng = random.Random(seed)
    prompts = [new_prompt(rng) for _ in range(1500)]
    asked = {kind: held_out(rng, ASKED, kind == "old", set(prompts)) for kind in ("new", "old")}
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    curves = {kind: [right(model, pairs)] for kind, pairs in asked.items()}
    for step in range(STEPS):
        inputs = labeled(TOKENIZER, [text(p, backwards(p)) for p in rng.sample(prompts, BATCH)])
        labels = inputs.pop("labels")
        loss = loss_of(arm, model(**inputs).logits, labels, seed, step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % EVERY == 0:
            for kind, pairs in asked.items():
                curves[kind].append(right(model, pairs))
    return curves


def draw(results: dict[str, Any]) -> Figure:
    figure, axes = panels(2)
    steps = list(range(0, STEPS + 1, EVERY))
    for axis, kind in zip(axes, ("new", "old"), strict=True):
        for i, arm in enumerate(ARMS):
            band(axis, steps, results["curves"][arm][kind], arm, i)
        named(axis, "optimizer step", "right answers", f"{kind} task{'s' if kind == 'old' else ''}")
    name_lines(figure)
    return figure


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "otr",
        "a task never seen, right answers after 150 steps",
        "higher",
        r["curves"]["OTR"]["new"][-1],
        r["curves"]["SFT"]["new"][-1],
        difference=r["paired"]["OTR - SFT"]["new"],
        baseline="SFT",
    )
    yield record(
        "otr",
        "old tasks, right answers after that",
        "higher",
        r["curves"]["OTR"]["old"][-1],
        r["curves"]["SFT"]["old"][-1],
        difference=r["paired"]["OTR - SFT"]["old"],
        baseline="SFT",
    )


def main() -> None:
    args = arguments(__doc__ or "", seeds=5)
    begin = time.time()
    start = AutoModelForCausalLM.from_pretrained(load_policy())
    found: dict[str, list[dict[str, list[float]]]] = {arm: [] for arm in ARMS}
    for seed in range(args.seeds):
        for arm in ARMS:
            found[arm].append(run(start, arm, seed))
            end = {kind: curve[-1] for kind, curve in found[arm][-1].items()}
            print(f"seed {seed} {arm:14s} new {end['new']:.3f} old {end['old']:.3f}", flush=True)
    curves = {
        arm: {kind: [interval(values) for values in zip(*(r[kind] for r in runs), strict=True)] for kind in runs[0]}
        for arm, runs in found.items()
    }
    paired = {
        f"{arm} - SFT": {
            kind: interval([a[kind][-1] - b[kind][-1] for a, b in zip(found[arm], found["SFT"], strict=True)])
            for kind in ("new", "old")
        }
        for arm in ARMS[1:]
    }
    results = {"arms": list(ARMS), "steps": STEPS, "curves": curves, "paired": paired}
    save(args.out, "otr", results, lambda: draw(results), begin, records=records(results), where="otr-5-seeds")


if __name__ == "__main__":
    main()
