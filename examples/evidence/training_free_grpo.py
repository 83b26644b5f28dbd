"""Training-Free GRPO (arXiv 2510.08191): does the update of the library work, and how good must the advice be?

A simulation without a model. There are 8 kinds of tasks; each is solved by one of 4 approaches. The policy takes an
approach at random, unless its prompt has an experience "Kind k: approach a", which it follows 9 times in 10. The
scripted language model answers the real questions of the real method (through plan and driver): it reads in the
summaries which approach was rewarded, and with a probability of 1 - accuracy takes a random attempt for the good one.
So this measures the plumbing, the filter and their limits; how well real models advise it cannot tell.

Arms: both variants with accuracy 1, `practice` with accuracy 0.7 and 0.3, all groups compared without ground truth
(the advisor then sees no rewards and takes a random attempt), and no library. Measured: mean reward per step, calls of
the language model, and the share of kinds whose experience is wrong at the end.

Found (10 seeds, 12 steps, 95 %): both variants reach .913 +- .022 from .25 in three steps; .9 is what followed advice
gives. With accuracy 0.7 it is .709 +- .086, for wrong experiences stay: a group that follows one fails as a whole, is
not compared any more, and nobody corrects it (.237 +- .107 of the kinds end so; .487 +- .166 with accuracy 0.3, which
still pays with .473 +- .155). Without ground truth this blind advisor gains nothing (.287 +- .093 against .253 +- .037)
at 2.6 times the calls; a real one would have to tell right from wrong by reading.

    python examples/evidence/training_free_grpo.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from common import arguments, interval, named, record, runs_band, save
from matplotlib.figure import Figure

from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.methods.training_free_grpo import TrainingFreeGrpo, texts
from rl_plugins.runtime.metrics import combine
from rl_plugins.testing import make_plan, make_rollouts, make_run, one_step, start_stack
from rl_plugins.testing.contract.dataset import StoredDataset

KINDS, APPROACHES, GROUP, STEPS, FOLLOWED = 8, 4, 5, 12, 0.9
ARMS: dict[str, dict[str, Any]] = {
    "practice, accuracy 1": {"accuracy": 1.0},
    "paper, accuracy 1": {"accuracy": 1.0, "variant": "paper"},
    "practice, accuracy 0.7": {"accuracy": 0.7},
    "practice, accuracy 0.3": {"accuracy": 0.3},
    "no ground truth": {"accuracy": 0.0, "ground_truth": False},
    "no library": {},
}


class Advisor:
    """The scripted language model. Deterministic: what is random comes from the question."""

    def __init__(self, accuracy: float, seed: int) -> None:
        self.accuracy, self.seed = accuracy, seed

    def __call__(self, question: str) -> str:
        if question.startswith(texts.SUMMARY[:60]):
            return re.search(r"kind \d+ approach \d+", question.split("[Attempt]")[1])[0]  # type: ignore[index]
        if question.startswith(texts.CRITIQUE[:60]):
            return f"<Experiences>{self.advice(question)}</Experiences>"
        if question.startswith(texts.GROUP[:60]):
            found = re.search(r"\[New findings\]\n(Kind \d+):(.*)\n", question)
            assert found is not None
            known = re.search(rf"\[(G\d+)\]\. {found[1]}:(.*)", question)
            content = f"{found[1]}:{found[2]}"
            kind = "ADD" if known is None else "NONE" if known[2] == found[2] else "UPDATE"
            return fenced([{"operation": kind, "id": known and known[1], "content": content}])
        if question.startswith(texts.PAPER_CRITIQUE[:60]):
            advice = self.advice(question)
            known = re.search(rf"\[(G\d+)\]\. {advice.split(':')[0]}:(.*)", question)
            if known is None:
                return fenced([{"option": "add", "experience": advice}])
            return fenced([{"option": "modify", "experience": advice, "modified_from": known[1]}])
        # the revision: what was proposed is carried out, one operation for each kind
        proposed = [json.loads(o) for o in re.findall(r"\{\n.*?\n\}", question.split("Answer with")[0], re.DOTALL)]
        by_kind = {(o.get("content") or o["experience"]).split(":")[0]: o for o in proposed}
        return fenced(list(by_kind.values()))

    def advice(self, question: str) -> str:
        shown = re.findall(r"Attempt \d+ \((.*?)\):\nkind (\d+) approach (\d+)", question)
        digest = hashlib.sha256(f"{self.seed} {question}".encode()).digest()
        rng = np.random.default_rng(list(digest))
        good = [s for s in shown if s[0] in ("reward 1", "correct")]
        among = good if good and rng.random() < self.accuracy else shown
        _, kind, approach = among[rng.integers(len(among))]
        return f"Kind {kind}: approach {approach}"


def fenced(operations: list[dict[str, Any]]) -> str:
    return f"```json\n{json.dumps(operations)}\n```"


def train(arm: str, seed: int) -> dict[str, Any]:
    """Mean reward of each step, calls, and the share of kinds with wrong advice at the end."""
    options = dict(ARMS[arm])
    rng = np.random.default_rng([seed, 0])
    right = rng.integers(APPROACHES, size=KINDS)
    dataset = StoredDataset({"prompt": [f"a task of kind {k}" for k in range(KINDS)]})
    method = None
    if options:
        params = TrainingFreeGrpo.Params(llm=Advisor(options.pop("accuracy"), seed), **options)
        method = TrainingFreeGrpo(params)
    stack = start_stack(*([method] if method else []), seed=seed, run=make_run(dataset=dataset, group_size=GROUP))
    rng = np.random.default_rng([seed, 1])
    curve, calls = [], 0.0
    for step in range(STEPS):
        plan = make_plan(KINDS, GROUP, batch=step)
        if method:
            plan = stack.call("plan", method, plan) or plan
        told = [advice_in((row.edit or {}).get("prompt", ""), k) for k, row in enumerate(plan.rows)]
        approach = rng.integers(APPROACHES, size=(KINDS, GROUP))
        for k, advised in enumerate(told):
            if advised is not None:
                approach[k, rng.random(GROUP) < FOLLOWED] = advised
        reward = (approach == right[:, None]).astype(float)
        curve.append(reward.mean())
        text = [f"kind {k} approach {a}" for k in range(KINDS) for a in approach[k]]
        rollouts = make_rollouts(reward.ravel(), group_size=GROUP, batch=step)
        rollouts = rollouts.replace(text=text, meta={"prompt": ["?"] * len(text)})
        one_step(stack, rollouts)
        calls += combine([stack.metrics.take()]).get("training_free_grpo/calls", 0.0)
    wrong = float(np.mean([t is not None and t != r for t, r in zip(told, right, strict=True)]))
    return {"curve": np.array(curve), "calls": calls, "wrong": wrong}


def advice_in(prompt: str, kind: int) -> int | None:
    found = re.findall(rf"\]\. Kind {kind}: approach (\d+)", prompt)
    return int(found[-1]) if found else None


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "training_free_grpo",
        "reward with advice that is always right",
        "higher",
        r["practice, accuracy 1"]["reward, last 3 steps"],
        r["no library"]["reward, last 3 steps"],
        baseline="no library",
    )
    yield record(
        "training_free_grpo",
        "reward with advice that is right in 70 %",
        "higher",
        r["practice, accuracy 0.7"]["reward, last 3 steps"],
        r["no library"]["reward, last 3 steps"],
        baseline="no library",
    )
    yield record(
        "training_free_grpo",
        "reward with advice that is right in 30 %",
        "higher",
        r["practice, accuracy 0.3"]["reward, last 3 steps"],
        r["no library"]["reward, last 3 steps"],
        baseline="no library",
    )


def main() -> None:
    args = arguments(__doc__, seeds=5)

    results, curves = {}, {}
    for arm in ARMS:
        runs = [train(arm, seed) for seed in range(args.seeds)]
        curves[arm] = np.stack([run["curve"] for run in runs])
        results[arm] = {
            "reward, last 3 steps": interval(curves[arm][:, -3:].mean(1)),
            "wrong experiences": interval([run["wrong"] for run in runs]),
            "calls": interval([run["calls"] for run in runs]),
        }
    constants = dict(kinds=KINDS, approaches=APPROACHES, group=GROUP, steps=STEPS, followed=FOLLOWED, seeds=args.seeds)
    content = {"method": "training_free_grpo", "settings": constants, "results": results}
    save(
        args.out,
        "training_free_grpo",
        content,
        lambda: plot(curves),
        records=records(results),
        where="training_free_grpo-rtv_pdr-10-seeds",
    )
    columns = list(next(iter(results.values())))
    print(f"{'':26s}" + "".join(f"{name:>24s}" for name in columns))
    for arm, found in results.items():
        cells = [f"{found[c]['mean']:.3f} +- {found[c]['ci95']:.3f}" for c in columns]
        print(f"{arm:26s}" + "".join(f"{cell:>24s}" for cell in cells))


def plot(curves: dict[str, np.ndarray]) -> Figure:
    figure, (axis,) = panels(1, 3.4)
    for i, (arm, runs) in enumerate(curves.items()):
        runs_band(axis, range(runs.shape[1]), runs, arm, i)
    axis.set_ylim(0, 1)
    named(axis, "step (one update of the library)", "mean reward (0 to 1)")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
