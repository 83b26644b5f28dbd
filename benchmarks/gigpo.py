"""GiGPO and HGPO at 960 to 102,400 turns against the algorithm of the authors' code, which looks for every turn's
rollout in the whole batch.

Equal results first, then both take turns in one process, one thread: minimum and median CPU time. The reference gets
whole numbers as ids where the authors have texts (faster), and is timed three times where it takes more than a second.
Growth is CPU time per turn and binary digit of their number, which is constant for n log n. Memory is the largest
tensor any operation makes, in numbers per turn, on a batch in which one rollout has half of all turns, so that padding
to rollouts x turns would show. Similar texts: seconds and difflib comparisons against comparing every text with the
first text of every cluster.

    python benchmarks/gigpo.py --repeat 9
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import defaultdict
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from groups import in_turns
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_plugins.core.rollouts import Rollouts
from rl_plugins.methods.gigpo import Gigpo, _Clusters
from rl_plugins.methods.hgpo import Hgpo
from rl_plugins.testing import make_rollouts, make_turns

SIZES = (960, 3840, 6400, 12800, 25600, 51200, 102400)
GAMMA = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gigpo, hgpo = Gigpo(Gigpo.Params(mode="mean_std_norm")), Hgpo()
    cases: list[dict[str, Any]] = []
    for turns in SIZES:
        rollouts = make_batch(turns)
        inputs = plain(rollouts)
        arms: dict[str, Any] = {
            "gigpo": lambda r=rollouts: gigpo.advantages(r),
            "hgpo": lambda r=rollouts: hgpo.advantages(r),
            "reference": lambda i=inputs: reference(*i),
        }
        difference = float((arms["gigpo"]() - arms["reference"]()).abs().max())
        assert difference <= 1e-5, difference
        timed = in_turns(arms, arguments.repeat)
        cases.append({"turns": turns, "largest_difference": difference, "arms": timed})
        line = "".join(
            f"  {name} {1e3 * a['min']:9.1f} / {1e3 * a['median']:9.1f} ms ({a['ratio']:7.1f}x)"
            for name, a in timed.items()
        )
        print(f"{turns:>7}{line}")
    growth = {m.name: measure_growth(m, arguments.repeat) for m in (gigpo, hgpo)}
    for name, by_turns in growth.items():
        print(f"{name}, ns of CPU time per n log2 n: " + ", ".join(f"{n}: {ns:.0f}" for n, ns in by_turns.items()))
        assert by_turns[102400] <= 1.5 * by_turns[12800], f"{name} grows faster than n log n"
    uneven = make_batch(20_000, longest=10_000)
    memory = {m.name: largest_tensor(m, uneven) / 20_000 for m in (gigpo, hgpo)}
    print(f"largest tensor, numbers per turn: {memory}")
    assert max(memory.values()) <= 2
    similar = measure_similar(arguments.repeat)
    arguments.out.write_text(
        json.dumps(
            {
                "repeat": arguments.repeat,
                "cases": cases,
                "ns_per_n_log_n": growth,
                "largest_tensor": memory,
                "similar": similar,
            },
            indent=1,
        )
    )


def make_batch(turns: int, longest: int | None = None) -> Rollouts:
    """Groups of 8 rollouts of about 20 turns, 30 states each, a reward at the end; texts of about 120 letters."""
    rng = np.random.default_rng(turns)
    lengths = [longest] if longest else []
    while sum(lengths) < turns:
        lengths.append(min(int(rng.integers(10, 31)), turns - sum(lengths)))
    texts = [
        f"You are in room {i}. Looking quickly around you, you see " + "a cabinet, " * (5 + i % 4) for i in range(30)
    ]
    anchors = [
        ["".join((texts[i][:-1], texts[i][-1])) for i in rng.integers(0, 30, size=n)] for n in lengths
    ]  # new ones
    success = rng.integers(0, 2, size=len(lengths))
    rewards = [[0.0] * (n - 1) + [10.0 * s] for n, s in zip(lengths, success, strict=True)]
    group = np.arange(len(lengths)) // 8
    return make_rollouts(10.0 * success, group, lengths=lengths, turns=make_turns(anchors, rewards))


# ---- growth


def measure_growth(method: Gigpo | Hgpo, repeat: int) -> dict[int, float]:
    """Smallest CPU time per turn and binary digit, ns. Sizes take turns, so that a machine whose speed drifts treats
    them alike."""
    batches = {turns: make_batch(turns) for turns in SIZES}
    seconds: dict[int, list[float]] = {turns: [] for turns in SIZES}
    for _ in range(repeat):
        for turns, rollouts in batches.items():
            start = time.thread_time()
            method.advantages(rollouts)
            seconds[turns].append(time.thread_time() - start)
    return {turns: 1e9 * min(s) / (turns * math.log2(turns)) for turns, s in seconds.items()}


# ---- the reference: the algorithm of the authors' code, written anew


def plain(rollouts: Rollouts) -> tuple[Any, ...]:
    """What the reference takes: group, rollout, observation, reward of each turn and of its rollout, in time order."""
    steps = rollouts.turns
    assert steps is not None
    rollout = (rollouts.group * 8 + rollouts.rollout)[steps.row].numpy()
    return rollouts.group[steps.row].numpy(), rollout, steps.anchor, steps.reward.numpy(), rollouts.reward[steps.row]


def reference(group: np.ndarray, rollout: np.ndarray, anchor: Any, reward: np.ndarray, outcome: Tensor) -> Tensor:
    returns_of = {}
    for number in np.unique(rollout):
        of_rollout = reward[rollout == number]
        returns, running = np.zeros_like(of_rollout), 0.0
        for t in range(len(of_rollout) - 1, -1, -1):
            returns[t] = running = of_rollout[t] + GAMMA * running
        returns_of[number] = returns
    everything = np.zeros_like(reward)
    for i, number in enumerate(rollout):  # B passes over B rows
        rows = np.where(rollout == number)[0]
        everything[i] = returns_of[number][np.where(rows == i)[0][0]]
    states = np.empty(len(group), dtype=np.int64)
    count = 0
    for g in np.unique(group):
        clusters = defaultdict(list)
        for i in np.where(group == g)[0]:
            clusters[anchor[i]].append(i)
        for rows in clusters.values():
            states[rows] = count
            count += 1
    return centered(outcome, group) + centered(torch.from_numpy(everything), states)


def centered(scores: Tensor, ids: np.ndarray) -> Tensor:
    members, out = defaultdict(list), scores.clone()
    for i, key in enumerate(ids):
        members[key].append(scores[i])
    mean = {k: torch.stack(v).mean() for k, v in members.items()}
    std = {k: torch.stack(v).std() if len(v) > 1 else torch.ones(()) for k, v in members.items()}
    for i, key in enumerate(ids):
        out[i] = (scores[i] - mean[key]) / (std[key] + 1e-6)
    return out


# ---- memory


class _Largest(TorchDispatchMode):
    """Numbers in the largest tensor an operation made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.numel())
        return result


def largest_tensor(method: Gigpo | Hgpo, rollouts: Rollouts) -> int:
    with _Largest() as seen:
        method.advantages(rollouts)
    return seen.largest


# ---- similar texts


def measure_similar(repeat: int) -> list[dict[str, Any]]:
    out = []
    for n in (100, 200):
        texts = observations(n)
        arms = {"ours": lambda t=texts: ours(t), "every_pair": lambda t=texts: every_pair(t)}
        results, compared = {}, {}
        for name, arm in arms.items():
            with mock.patch.object(SequenceMatcher, "ratio", autospec=True, side_effect=SequenceMatcher.ratio) as ratio:
                results[name] = arm()
            compared[name] = ratio.call_count
        assert results["ours"] == results["every_pair"]
        timed, clusters = in_turns(arms, repeat), len(set(results["ours"]))
        out.append({"texts": n, "clusters": clusters, "compared": compared, "arms": timed})
        print(
            f"{n} texts, {clusters} clusters, {compared['ours']} of {compared['every_pair']} comparisons: "
            + ", ".join(f"{name} {1e3 * a['min']:.1f} / {1e3 * a['median']:.1f} ms" for name, a in timed.items())
        )
    return out


def observations(n: int) -> list[str]:
    """Different texts of up to 190 letters, two thirds of which have one that differs in a number."""
    rng = random.Random(n)
    things = [f"{kind} {i}" for kind in ("mug", "plate", "drawer", "cabinet", "lamp") for i in range(9)]
    texts: dict[str, None] = {}
    while len(texts) < n:
        text = f"You see {', '.join(rng.sample(things, rng.randint(4, 12)))}."[:190]
        texts |= dict.fromkeys([text] if rng.random() < 0.5 else [text, text.replace("1", "7", 1)])
    return list(texts)[:n]


def ours(texts: list[str]) -> list[int]:
    clusters = _Clusters(0.95, autojunk=True)
    return [clusters.join(t) for t in texts]


def every_pair(texts: list[str]) -> list[int]:
    first: list[str] = []
    numbers = []
    for text in texts:
        found = next((i for i, f in enumerate(first) if SequenceMatcher(None, text, f).ratio() >= 0.95), None)
        numbers.append(len(first) if found is None else found)
        if found is None:
            first.append(text)
    return numbers


if __name__ == "__main__":
    main()
