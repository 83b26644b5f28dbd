"""What independent rollouts save and cost, and what a decision of the affinity router costs. Arms take turns.

1. `together` over n programs of 20 turns on an engine that sleeps: a request takes a log-normal time (mean 20 ms,
   spread 0.5 or 1). In lockstep a turn takes as long as its slowest request, independently each program goes on at
   once. Wall time of both, in turns, with the same times.
2. CPU time per request in the same runs, and on an engine that takes no time: what `together` and its driver cost.
3. 10^5 requests of 10^4 trajectories with 10 turns each and 512 requests under way: CPU time of a choice and its
   release. The baseline is verl's own balancer, sticky and least-loaded, as a plain class.

    python benchmarks/rollart.py --out benchmarks/rollart.json
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from rl_plugins.core.method import Method
from rl_plugins.core.requests import Generate, Generated, Prompt, Trajectory, together
from rl_plugins.runtime.programs import Running, drive, run
from rl_plugins.testing.engine import TableEngine, make_prompt
from rl_plugins.tools.disaggregated.router import AffinityRouter, Pool
from rl_plugins.verl.router import AffinityLoadBalancer

TURNS, MEAN = 20, 0.02
REQUESTS, TRAJECTORIES, UNDER_WAY = 10**5, 10**4, 512


# ---- 1 and 2


def one(prompt: Prompt, k: int) -> Generator[Any, Any, Trajectory]:
    trajectory = prompt.start().observe((ord("a") + k,))
    for _ in range(TURNS):
        (made,) = yield Generate(trajectory, max_tokens=1)
        trajectory = trajectory.add(made)
    return trajectory


class Programs(Method):
    """n programs side by side."""

    name = "programs"

    def rollout(self, prompt: Prompt) -> Any:
        return (yield from together([one(prompt, k) for k in range(prompt.n)]))


ANSWER = [Generated((1,), (0.0,), "length", 0)]


class Independent:
    """Each request takes its own time. `seconds`: program x turn; None: no time."""

    def __init__(self, seconds: np.ndarray | None) -> None:
        self.seconds = seconds

    def wait(self, request: Generate) -> float:
        assert self.seconds is not None
        tokens = request.trajectory.tokens
        return float(self.seconds[tokens[0] - ord("a"), len(tokens) - 1])

    async def generate(self, prompt: Prompt, request: Generate) -> list[Generated]:
        if self.seconds is not None:
            await asyncio.sleep(self.wait(request))
        return ANSWER

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Any:
        raise NotImplementedError


class Lockstep(TableEngine):
    """A list of requests takes as long as its slowest."""

    def __init__(self, seconds: np.ndarray | None) -> None:
        super().__init__({})
        self.times = Independent(seconds)

    def generate(self, requests: Sequence[tuple[Prompt, Generate]]) -> list[list[Generated]]:
        if self.times.seconds is not None:
            time.sleep(max(self.times.wait(request) for _, request in requests))
        return [ANSWER for _ in requests]


def driven(arm: str, n: int, seconds: np.ndarray | None) -> tuple[float, float]:
    """Seconds of wall time, and microseconds of CPU time per request."""
    engine = Lockstep(seconds)
    program = Running(Programs(), make_prompt(engine.chat, "x", n=n, max_tokens=1000))
    begin, worked = time.perf_counter(), time.process_time()
    if arm == "lockstep":
        run([program], engine)
    else:
        asyncio.run(drive(program, Independent(seconds)))
    took, work = time.perf_counter() - begin, time.process_time() - worked
    assert program.rows is not None and [len(row) for (row,) in program.rows] == [TURNS + 1] * n
    return took, 1e6 * work / (n * TURNS)


def side_by_side(n: int, spread: float | None, repetitions: int) -> dict[str, Any]:
    """Both arms, without a spread on an engine that takes no time."""
    found: dict[str, list[tuple[float, float]]] = {"lockstep": [], "independent": []}
    for repetition in range(repetitions):
        seconds = None
        if spread is not None:
            rng = np.random.default_rng([n, repetition])
            seconds = MEAN * np.exp(spread * rng.standard_normal((n, TURNS)) - spread**2 / 2)
        for arm, took in found.items():
            took.append(driven(arm, n, seconds))
    results: dict[str, Any] = {}
    for i, unit in enumerate(("seconds", "CPU microseconds per request")):
        if spread is None and i == 0:
            continue
        arms = {arm: [pair[i] for pair in took] for arm, took in found.items()}
        ratios = [b / a for a, b in zip(*arms.values(), strict=True)]
        results[unit] = {arm: round(median(took), 3) for arm, took in arms.items()} | {
            "ratio": round(median(ratios), 3)
        }
    return results


# ---- 3


def routed(
    choose: Callable[[str, str, int, float], str], release: Callable[[str, str, float], None], tags: Sequence[str]
) -> float:
    """Microseconds of a request: a choice and its release."""
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(TRAJECTORIES), REQUESTS // TRAJECTORIES)).tolist()
    names = [f"{tag}|{i}" for i, tag in enumerate(tags)]
    seen, line = [0] * TRAJECTORIES, deque[tuple[str, str]]()
    begin = time.process_time()
    for i, t in enumerate(order):
        seen[t] += 500
        line.append((choose(names[t], tags[t], seen[t], 0.001 * i), names[t]))
        if len(line) > UNDER_WAY:
            server, name = line.popleft()
            release(server, name, 0.001 * i)
    return 1e6 * (time.process_time() - begin) / REQUESTS


def routers(servers: int, repetitions: int) -> dict[str, Any]:
    names = [f"s{i}" for i in range(servers)]
    half = dict.fromkeys(names[: servers // 2], "a") | dict.fromkeys(names[servers // 2 :], "b")
    two = [Pool("a", 256, 20_000, 50), Pool("b", 256, 3_000, 60)]
    lists = {"agent": ["a", "b"], "math": ["b", "a"]}
    tags = ["agent" if i % 2 else "math" for i in range(TRAJECTORIES)]

    def own() -> float:
        balancer = GlobalRequestLoadBalancer(dict.fromkeys(names))
        return routed(lambda name, *_: balancer.acquire_server(name)[0], lambda s, *_: balancer.release_server(s), tags)

    def affinity(pools: Sequence[Pool], places: dict[str, str], allowed: Any) -> Callable[[], float]:
        def timed() -> float:
            r = AffinityRouter(pools, places, allowed)
            return routed(
                lambda name, tag, tokens, now: r.assign(name, tag, tokens, 0, now) or "",
                lambda server, name, now: r.release(server, name, now=now),
                tags,
            )

        return timed

    def plugin() -> float:
        pools = [{"name": p.name, "servers": [s for s in names if half[s] == p.name], "capacity": 256} for p in two]
        balancer = AffinityLoadBalancer(dict.fromkeys(names), {"pools": pools})
        return routed(
            lambda name, *_: balancer.acquire_server(name, (), None)[0],
            lambda server, name, _: balancer.release_server(server, name),
            tags,
        )

    arms = {
        "verl's own balancer": own,
        "one pool": affinity([Pool("a", 10**6)], dict.fromkeys(names, "a"), None),
        "two pools, by list": affinity(two, half, lists),
        "two pools, by measurement": affinity(two, half, None),
        "two pools, by measurement, as verl's plug-in": plugin,
    }
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(repetitions):
        for arm, timed in arms.items():
            times[arm].append(timed())
    base = times["verl's own balancer"]
    return {
        arm: {
            "microseconds per request": round(median(took), 2),
            "least": round(min(took), 2),
            "ratio": round(median(x / y for x, y in zip(took, base, strict=True)), 2),
        }
        for arm, took in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    gc.collect()
    gc.freeze()  # A full collection of all imported modules would be counted for one arm.
    results: dict[str, Any] = {"turns": TURNS, "mean seconds": MEAN, "repetitions": args.repetitions}
    results["programs"] = {
        f"{n} programs, {'no time' if spread is None else f'spread {spread:g}'}": side_by_side(
            n, spread, args.repetitions
        )
        for n in (8, 64, 256)
        for spread in (None, 0.5, 1.0)
    }
    results["router"] = {f"{servers} servers": routers(servers, args.repetitions) for servers in (8, 64)}
    text = json.dumps(results, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
