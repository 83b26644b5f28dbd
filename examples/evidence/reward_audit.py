"""`reward_audit`: which rewards that are turned around does it find, and how often does it cry wolf?

No model is run. Three parts, all through the real method.

During training. Prompts of 20 words with Zipf frequencies and groups of 8 rollouts, whose accuracy is drawn from
Beta(2, 2) and whose wrong answers spread over 6 values. A share of the prompts has one more word, and there the reward
is turned around. C1 needs no right answers and only warns; C2 asks a verifier about a share of the rollouts and
convicts. A false flag is a feature most of whose prompts are healthy.

Hard topics. The reward is right, but in a share of the prompts, which have a word in common, the policy's most
frequent answer is wrong. C1 must be expected to flag them; nothing may be quarantined.

Before training. 1,000 sums, and five rewards: a right one, one with a wrong sign for one source of data, one that is
turned around where the prompt has a word (2 % of the rows), one that obeys a length limit in the prompt, one that is
constant.

Measured: runs with a flag on the word, with a conviction, and with any false flag. Before training: rows found, rows
called wrong that are right, calls of the reward.

Found (20 seeds): with 20 marked groups C1 flags the word in 20 of 20 runs, with 10 groups in 10 or 12. A verifier of
5 % of the rollouts convicts in at most 10 of 20. With right rewards there is a false warning in 2 of 80 runs, and
nothing is quarantined. Before training every wrong row is found, and no right one.

    python examples/evidence/reward_audit.py --seeds 20 --out evidence-results
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from common import arguments, grouped, named, record, save
from matplotlib.figure import Figure
from scipy import stats

from rl_plugins.core.rollouts import RewardFunction, Rollouts, Run
from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.methods.reward_audit import RewardAudit
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, make_run, start_stack
from rl_plugins.tools.audit import Options, preflight

GROUP, WORDS, BATCH, ROWS = 8, 300, 100, 1000
SIZES = ((500, 0.02), (1000, 0.02), (1000, 0.01), (2000, 0.01), (4000, 0.005))
SHARES = (0.05, 0.2, 1.0)  # of the rollouts, that the verifier judges
Row = dict[str, Any]


# ---- during training


def prompts(n: int, share: float, rng: np.random.Generator) -> list[Row]:
    """Rows of random words; a share of them has the word `zebra`."""
    p = 1 / np.arange(1, WORDS + 1)
    rows: list[Row] = []
    marked = set(rng.choice(n, round(share * n), replace=False).tolist())
    for i in range(n):
        words = [f"w{k}" for k in rng.choice(WORDS, 20, p=p / p.sum())]
        if i in marked:
            words.insert(int(rng.integers(20)), "zebra")
        rows.append({"prompt": " ".join(words), "answer": str(i), "data_source": "abc"[i % 3]})
    return rows


def marked(row: Row) -> bool:
    return "zebra" in row["prompt"].split()


def batch(rows: list[Row], numbers: range, kind: str, rng: np.random.Generator) -> Rollouts:
    """A batch of groups; `kind` says what is the matter with marked rows."""
    rewards, texts = [], []
    for n in numbers:
        odd = marked(rows[n])
        hard = odd and kind == "hard"
        right = rng.random(GROUP) < (0.15 if hard else rng.beta(2, 2))
        wrong = rng.integers(10**6, 10**6 + (1 if hard else 6), GROUP)  # hard: they agree on one wrong answer
        texts += [f"#### {rows[n]['answer'] if good else other}" for good, other in zip(right, wrong, strict=True)]
        rewards += (right != (odd and kind == "turned")).astype(float).tolist()
    index = [n for n in numbers for _ in range(GROUP)]
    asked = [rows[n]["prompt"] for n in index]
    return make_rollouts(rewards, group_size=GROUP, prompt_index=index, text=texts, meta={"prompt": asked})


def right_answer(row: Row, text: str) -> float:
    return float(text.split()[-1] == row["answer"])


def watched(n: int, share: float, kind: str, verify_share: float, seed: int) -> dict[str, float]:
    """One run of n groups: what was flagged."""
    rng = np.random.default_rng([seed, n, int(1e4 * share), len(kind)])
    rows = prompts(n, share, rng)
    options = dict(preflight=False, on_training="quarantine", every_n_batches=max(1, n // BATCH))
    if verify_share:
        options |= dict(verifier=right_answer, verify_share=verify_share)
    method = RewardAudit(RewardAudit.Params(**options))
    stack: MethodStack = start_stack(method, run=make_run(dataset=rows, dataset_size=n), seed=seed)
    for start in range(0, n, BATCH):
        stack.batch += 1
        made = batch(rows, range(start, min(n, start + BATCH)), kind, rng)
        stack.call("rewards", method, made)
        stack.call("observe", method, made, None, {})
    found = [f for f in method.state["findings"] if "feature" in f["details"]]
    by = {
        "C1": [f["details"]["feature"] for f in found if f["part"] == "majority sign"],
        "C2": [f["details"]["feature"] for f in found if f["part"] == "shadow check" and f["severity"] == "critical"],
    }
    quarantined = list(method.state["features"].values())
    return {
        "C1": float("zebra" in by["C1"]),
        "C2": float("zebra" in by["C2"]),
        "false": float(any(is_false(rows, name) for name in by["C1"] + by["C2"])),
        "out": float(bool(quarantined)),
        "falsely out": float(any(is_false(rows, name) for name in quarantined)),
    }


def is_false(rows: list[Row], feature: str) -> bool:
    """Whether most prompts with a feature are as they should be."""
    mine = [marked(row) for row in rows if feature in row["prompt"] or feature.startswith(("<", "data_source"))]
    return sum(mine) <= len(mine) / 2


def share_of(values: list[float]) -> dict[str, Any]:
    """Runs with it: their share with a 95 % interval (Clopper and Pearson), as a mean and the larger half of it."""
    k, n = int(sum(values)), len(values)
    low, high = stats.binomtest(k, n).proportion_ci(0.95)
    half = max(k / n - low, high - k / n)
    return {"runs": k, "of": n, "low": float(low), "high": float(high), "mean": k / n, "ci95": float(half)}


# ---- before training


def sums(seed: int) -> list[Row]:
    """Sums; 2 % of them ask kindly, and half of them give a limit of characters."""
    rng = np.random.default_rng([seed, 7])
    rows = []
    for i in range(ROWS):
        a, b = rng.integers(10, 1000, 2)
        text = f"What is {a} + {b}?"
        if rng.random() < 0.02:
            text = f"Kindly tell me: {text}"
        limit = int(rng.integers(5, 30)) if rng.random() < 0.5 else 0
        if limit:
            text += f" Answer in at most {limit} characters."
        rows.append({"prompt": text, "answer": str(a + b), "data_source": "abc"[i % 3]})
    return rows


def plain(row: Row, text: str) -> float:
    numbers = re.findall(r"-?\d+", text)
    return float(bool(numbers) and numbers[-1] == row["answer"])


def within_limit(row: Row, text: str) -> float:
    limit = re.search(r"at most (\d+) characters", row["prompt"])
    return plain(row, text) - (0.3 if limit and len(text) > int(limit[1]) else 0.0)


REWARDS: dict[str, tuple[Callable[[Row, str], float], Callable[[Row], bool]]] = {
    "right": (plain, lambda row: False),
    "a sign per source": (
        lambda row, text: 1 - plain(row, text) if row["data_source"] == "b" else plain(row, text),
        lambda row: row["data_source"] == "b",
    ),
    "a word": (
        lambda row, text: 1 - plain(row, text) if "Kindly" in row["prompt"] else plain(row, text),
        lambda row: "Kindly" in row["prompt"],
    ),
    "a length limit": (within_limit, lambda row: False),
    "constant": (lambda row, text: 0.5, lambda row: False),
}


def audited(name: str, seed: int) -> dict[str, float]:
    """One audit before training: rows that are wrong and found, rows that are right and called wrong, calls."""
    reward, wrong = REWARDS[name]
    calls = [0]

    def score(rows: list[Row], texts: list[str]) -> list[float]:
        calls[0] += len(texts)
        return [reward(row, text) for row, text in zip(rows, texts, strict=True)]

    rows = sums(seed)
    run: Run = make_run(
        dataset=rows,
        dataset_size=len(rows),
        reward_names=("accuracy",),
        reward_functions=(RewardFunction("accuracy", 1.0, score, reward),),
    )
    began = time.perf_counter()
    found = preflight(run, Options(seed=seed))
    seconds = time.perf_counter() - began
    bad = {n for n, row in enumerate(rows) if wrong(row)}
    called = set(found.inverted)
    return {
        "wrong": len(bad),
        "found": len(bad & called),
        "called wrongly": len(called - bad),
        "critical": float(bool(found.report.critical)),
        "warned": float(any(f.severity == "warn" for f in found.report.findings)),
        "calls per row": calls[0] / len(rows),
        "milliseconds per row": 1000 * seconds / len(rows),
    }


# ---- all of it


def records(during: Any, clean: Any, before: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    signs, word = before["a sign per source"], before["a word"]
    called = sum(b["called wrongly"] for b in before.values())
    found = (
        f"{signs['found']:.0f} of {signs['wrong']:.0f} with a wrong sign for one source, {word['found']:.0f} of "
        f"{word['wrong']:.0f} with a word, {called:.0f} right rows called wrong"
    )
    rows = "wrong rows found before training (planted faults, 20 data sets)"
    yield record("reward_audit", rows, "higher", note=found)
    seen = during["1000 groups, 2.0%"]
    convicted = seen["C2 at 5%"]
    yield record(
        "reward_audit",
        "a fault in 20 of 1,000 groups, seen during training (simulation)",
        "higher",
        difference=(seen["C1"]["mean"], seen["C1"]["low"], seen["C1"]["high"]),
        baseline="no audit",
        note=f"a verifier of 5 % of the rollouts convicts in {convicted['runs']} of {convicted['of']} runs",
    )
    alarms, out = (sum(c[k]["runs"] for c in clean.values()) for k in ("flag", "out"))
    runs = sum(c["flag"]["of"] for c in clean.values())
    alarm = f"a warning in {alarms} of {runs} runs, rows taken out in {out}"
    yield record("reward_audit", "false alarms on right rewards (simulation)", "lower", note=alarm)


def main() -> None:
    args, start = arguments(__doc__, seeds=20), time.time()
    logging.getLogger("rl_plugins").setLevel(logging.ERROR)  # findings are counted here

    during: dict[str, Any] = {}
    print(f"{'groups':>7s}{'share':>8s}{'marked':>8s}{'C1':>20s}" + "".join(f"{f'C2 at {s:.0%}':>20s}" for s in SHARES))
    for n, share in SIZES:
        arms = {s: [watched(n, share, "turned", s, seed) for seed in range(args.seeds)] for s in SHARES}
        row = {"C1": share_of([run["C1"] for run in arms[1.0]])}
        row |= {f"C2 at {s:.0%}": share_of([run["C2"] for run in runs]) for s, runs in arms.items()}
        row |= {"false": share_of([run["false"] for run in arms[1.0]])}
        row |= {"falsely out": share_of([run["falsely out"] for run in arms[1.0]])}
        during[f"{n} groups, {share:.1%}"] = row
        print(f"{n:7d}{share:8.1%}{round(n * share):8d}" + "".join(text(row[k]) for k in list(row)[:4]))

    clean: dict[str, Any] = {}
    for n in sorted({n for n, _ in SIZES}):
        runs = [watched(n, 0.0, "turned", 1.0, seed) for seed in range(args.seeds)]
        hard = [watched(n, 0.05, "hard", 1.0, seed) for seed in range(args.seeds)]
        clean[str(n)] = {
            "flag": share_of([run["false"] for run in runs]),
            "out": share_of([run["out"] for run in runs]),
            "hard topic flagged by C1": share_of([run["C1"] for run in hard]),
            "hard topic out": share_of([run["out"] for run in hard]),
        }
        cells = "  ".join(f"{k} {v['runs']}/{v['of']}" for k, v in clean[str(n)].items())
        print(f"right rewards, {n} groups: {cells}")

    before: dict[str, Any] = {}
    for name in REWARDS:
        runs = [audited(name, seed) for seed in range(args.seeds)]
        before[name] = {k: float(np.sum([run[k] for run in runs])) for k in ("wrong", "found", "called wrongly")}
        before[name] |= {k: share_of([run[k] for run in runs]) for k in ("critical", "warned")}
        costs = ("calls per row", "milliseconds per row")
        before[name] |= {k: float(np.mean([run[k] for run in runs])) for k in costs}
        b = before[name]
        print(
            f"{name:20s} rows found {b['found']:.0f} of {b['wrong']:.0f}, called wrongly {b['called wrongly']:.0f}, "
            f"critical in {b['critical']['runs']} of {b['critical']['of']}, warned in {b['warned']['runs']}, "
            f"{b['calls per row']:.2f} calls and {b['milliseconds per row']:.2f} ms per row"
        )
    settings = dict(group=GROUP, words=WORDS, batch=BATCH, rows=ROWS, seeds=args.seeds)
    content = {"method": "reward_audit", "settings": settings, "during": during, "clean": clean, "before": before}
    where = "reward_audit-20-seeds"
    save(args.out, "reward_audit", content, lambda: plot(during, clean), start, records(during, clean, before), where)


def text(cell: dict[str, Any]) -> str:
    return f"{cell['runs']:4d} [{cell['low']:.2f}, {cell['high']:.2f}]".rjust(20)


def plot(during: dict[str, Any], clean: dict[str, Any]) -> Figure:
    figure, (left, right) = panels(2)
    names = [name.replace(" groups, ", "\n") for name in during]
    columns = ["C1", *(f"C2 at {s:.0%}" for s in SHARES)]
    grouped(left, names, {c: [row[c] for row in during.values()] for c in columns})
    named(left, "groups, and share of them turned around", "share of the runs", "Turned around, and found")
    columns = ["flag", "hard topic flagged by C1", "hard topic out"]
    shown = {
        "flag": "any flag",
        "hard topic flagged by C1": "hard topic, C1 warns",
        "hard topic out": "hard topic, out",
    }
    grouped(right, list(clean), {shown[c]: [row[c] for row in clean.values()] for c in columns})
    named(right, "groups", "share of the runs", "Right rewards, and flagged")
    for axis in (left, right):
        axis.set_ylim(0, 1.02)
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
