"""RTV + PDR (arXiv 2604.16529): what do small groups, random orders and a second wave buy, and when do they harm?

A simulation without a model, with the real tournament (`rtv`) and the real method on the fake engine.

Selection: 16 candidates have a latent quality ~ N(0, 1); a judge that is shown m of them picks one with probability
softmax(2 quality). Three judges: that one; one that is less precise the more it is shown, softmax(4/m quality); and one
that prefers what it is shown first, softmax(2 quality + 2 [first]), asked in random orders and in a fixed one. 120
votes in each design: groups of 2 with 8 votes, groups of 4 with 24, one group of 16 with 120, and a random choice.
Measured: how often the best candidate is selected, and the mean quality of what is selected.

Refinement: an attempt is right with probability p of its task (0.05, 0.2 or 0.5); one that reads K = 4 summaries with
probability p + (0.9 - p) g - p (1 - g) / 2, where g is the share of right ones among them: right summaries help, wrong
ones harm. The judge (4 votes) tells right from wrong in a pair 75 % of the time; a misled one 40 %. Measured: the share
of tasks whose answer is right, of one attempt, of RTV alone (T = 1, N = 16, and N = 32 for as many attempts), of
RTV + PDR (T = 2, N = 16), and paired differences.

Found (10 seeds, 95 %): with a judge that is as precise among 16 as in a pair, the flat comparison selects the best most
often (.92 +- .02; groups of 4 .84 +- .03, of 2 .77 +- .02). Small groups win where it is not (.77 +- .02 against
.30 +- .05), which is what they are for. Random orders help: against a judge that prefers the first, groups of 2 select
the best in .61 +- .04 of the trials, in a fixed order in .47 +- .04. The second wave lifts RTV from .31 +- .05 to
.48 +- .05 on the hardest tasks (p = 0.05). One wave of as many attempts has .52 +- .08, so the gain is that of more
attempts. A judge that is right 40 % of the time ruins both: .24 +- .05 and .25 +- .05 at p = 0.5, where one attempt has
.56 +- .08.

    python examples/evidence/rtv_pdr.py --seeds 10 --out evidence-results
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from common import across, arguments, grouped, interval, named, record, save
from matplotlib.figure import Figure

from rl_plugins.lab.compare.figures import panels
from rl_plugins.methods.rtv_pdr import RtvPdr, rtv
from rl_plugins.testing.engine import EOS, CharChat, TableEngine, make_prompt, run_program

N, TRIALS, TASKS = 16, 100, 30
DESIGNS = {"groups of 2": (2, 8), "groups of 4": (4, 24), "one group of 16": (16, 120)}
JUDGES = {  # precision at m candidates, bias for the first, random orders
    "precise": (lambda m: 2.0, 0.0, True),
    "less precise with more": (lambda m: 4.0 / m, 0.0, True),
    "prefers the first": (lambda m: 2.0, 2.0, True),
    "prefers the first, fixed order": (lambda m: 2.0, 2.0, False),
}
DIFFICULTY = (0.05, 0.2, 0.5)
ACCURACY = (0.75, 0.4)


def select(design: str, kind: str, seed: int) -> dict[str, float]:
    """How often the best is selected, mean quality of what is."""
    best, quality_of = [], []
    precision, bias, permute = JUDGES[kind]
    for trial in range(TRIALS):
        rng = np.random.default_rng([seed, trial])
        quality = rng.normal(size=N)
        if design == "random":
            winner = int(rng.integers(N))
        else:
            size, votes = DESIGNS[design]

            def judge(shown: Sequence[int], quality: np.ndarray = quality, rng: Any = rng) -> int:
                score = precision(len(shown)) * quality[list(shown)]
                score[0] += bias
                return int(np.argmax(score + rng.gumbel(size=len(shown)))) + 1  # a draw from the softmax

            draws = np.random.default_rng([seed, trial, 1])
            (winner,) = rtv(N, judge, group_size=size, votes=votes, permute=permute, rng=lambda what, d=draws: d)
        best.append(quality[winner] == quality.max())
        quality_of.append(quality[winner])
    return {"best": float(np.mean(best)), "quality": float(np.mean(quality_of))}


class Judge:
    """Picks a right summary over a wrong one with a given accuracy. Votes are independent, the same in every run."""

    def __init__(self, accuracy: float, seed: int) -> None:
        self.accuracy, self.seed = accuracy, seed
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, problem: str, summaries: Sequence[str]) -> int:
        key = f"{self.seed} {problem} {summaries}"
        with self._lock:
            self._asked[key] += 1
            number = self._asked[key]
        rng = np.random.default_rng(list(hashlib.sha256(f"{key} {number}".encode()).digest()))
        if len(set(summaries)) == 1:
            return int(rng.integers(len(summaries))) + 1
        wanted = "R" if rng.random() < self.accuracy else "W"
        return summaries.index(wanted) + 1


def attempts(p: float) -> Any:
    """A policy whose attempts are R or W."""

    def model(text: str) -> Mapping[str, float]:
        prompt, _, done = text.rpartition(">")
        if done:
            return {EOS: 1.0}
        read = [part[0] for part in prompt.split("]\n")[1:]]
        if not read:
            return {"R": p, "W": 1 - p}
        good = read.count("R") / len(read)
        right = p + (0.9 - p) * good - p * (1 - good) / 2
        return {"R": right, "W": 1 - right}

    return model


def solve(waves: int, attempts_: int, p: float, accuracy: float, seed: int) -> float:
    """Share of the tasks whose answer is right."""
    engine = TableEngine(attempts(p), seed=seed)
    params = RtvPdr.Params(
        attempts=attempts_,
        votes=4,
        waves=waves,
        summarizer=lambda problem, attempt: attempt,
        judge=Judge(accuracy, seed),
    )
    prompts = [
        make_prompt(CharChat(), f"task {i}", n=1, training=False, max_tokens=4, seed=f"{seed}|{i}")
        for i in range(TASKS)
    ]
    rows = run_program(RtvPdr(params), prompts, engine)
    return float(np.mean([CharChat().decode(row[0][0].tokens) == "R" for row in rows]))


def records(r: Any, selection: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "rtv_pdr",
        "right answers of two waves of 16, success rate of .05, simulated",
        "higher",
        r["p = 0.05"]["RTV + PDR, judge 0.75"],
        r["p = 0.05"]["RTV, judge 0.75"],
        baseline="one wave of 16",
    )
    yield record(
        "rtv_pdr",
        "right answers of two waves of 16, success rate of .05, as many attempts, simulated",
        "higher",
        r["p = 0.05"]["RTV + PDR, judge 0.75"],
        r["p = 0.05"]["RTV, 32 attempts, judge 0.75"],
        difference=r["p = 0.05"]["RTV + PDR minus RTV, 32 attempts, judge 0.75"],
        baseline="one wave of 32",
    )
    yield record(
        "rtv_pdr",
        "best attempt found, judge equally precise among 16 and in pairs, groups of 2",
        "higher",
        selection["precise: groups of 2"]["best"],
        selection["precise: one group of 16"]["best"],
        baseline="one flat comparison",
    )
    yield record(
        "rtv_pdr",
        "best attempt found, judge less precise in large groups, groups of 2",
        "higher",
        selection["less precise with more: groups of 2"]["best"],
        selection["less precise with more: one group of 16"]["best"],
        baseline="one flat comparison",
    )
    yield record(
        "rtv_pdr",
        "right answers of two waves, judge right in 40 %, success rate of .5, simulated",
        "higher",
        r["p = 0.5"]["RTV + PDR, judge 0.4"],
        r["p = 0.5"]["one attempt"],
        baseline="one attempt",
    )


def main() -> None:
    args = arguments(__doc__, seeds=10)
    seeds = range(args.seeds)

    selection: dict[str, Any] = {}
    for kind in JUDGES:
        for design in DESIGNS:
            runs = [select(design, kind, seed) for seed in seeds]
            selection[f"{kind}: {design}"] = {key: interval([run[key] for run in runs]) for key in runs[0]}
    runs = [select("random", "precise", seed) for seed in seeds]
    selection["random choice"] = {key: interval([run[key] for run in runs]) for key in runs[0]}
    refinement: dict[str, Any] = {}
    for p in DIFFICULTY:
        found = {"one attempt": interval([solve(1, 1, p, 0.75, seed) for seed in seeds])}
        for accuracy in ACCURACY:
            arms = {"RTV": (1, N), "RTV, 32 attempts": (1, 2 * N), "RTV + PDR": (2, N)}
            runs_ = {a: [solve(waves, n, p, accuracy, seed) for seed in seeds] for a, (waves, n) in arms.items()}
            found |= {f"{arm}, judge {accuracy:g}": interval(values) for arm, values in runs_.items()}
            for arm in list(arms)[:2]:
                gains = [b - a for a, b in zip(runs_[arm], runs_["RTV + PDR"], strict=True)]
                found[f"RTV + PDR minus {arm}, judge {accuracy:g}"] = interval(gains)
        refinement[f"p = {p:g}"] = found

    constants = dict(candidates=N, trials=TRIALS, tasks=TASKS, seeds=args.seeds)
    content = {"method": "rtv_pdr", "settings": constants, "selection": selection, "refinement": refinement}
    save(
        args.out,
        "rtv_pdr",
        content,
        lambda: plot(selection, refinement),
        records=records(refinement, selection),
        where="training_free_grpo-rtv_pdr-10-seeds",
    )
    print(f"{'selection':50s}{'best selected':>20s}{'quality':>20s}")
    for name, values in selection.items():
        cells = [f"{values[c]['mean']:.3f} +- {values[c]['ci95']:.3f}" for c in ("best", "quality")]
        print(f"{name:50s}" + "".join(f"{cell:>20s}" for cell in cells))
    print(f"\n{'share of right answers':45s}" + "".join(f"{name:>20s}" for name in refinement))
    for name in next(iter(refinement.values())):
        cells = [f"{found[name]['mean']:.3f} +- {found[name]['ci95']:.3f}" for found in refinement.values()]
        print(f"{name:45s}" + "".join(f"{cell:>20s}" for cell in cells))


def plot(selection: dict[str, Any], refinement: dict[str, Any]) -> Figure:
    figure, (choice, wave) = panels(2, 3.0, columns=1)
    across(choice, selection, [found["best"] for found in selection.values()], "best of 16 selected (share of trials)")
    choice.set_title("Selection with 120 votes", loc="left")
    arms = [arm for arm in next(iter(refinement.values())) if "minus" not in arm]
    grouped(wave, map(str, refinement), {arm: [found[arm] for found in refinement.values()] for arm in arms})
    wave.set_ylim(0, 1.05)
    title = "Tournament, alone and with a second wave"
    named(wave, "probability that one attempt is right", "right answers (share)", title)
    wave.legend(loc="upper left")
    return figure


if __name__ == "__main__":
    main()
