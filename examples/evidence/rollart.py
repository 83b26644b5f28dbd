"""RollArt (arXiv 2512.22560): which way each of its numbers goes in a simulation, and what independent rollouts save.

1. `rl_plugins.tools.disaggregated.simulator`, with the real queue and router. No model runs. 16 groups of 8 rollouts
   make a batch; 16 steps, the first 4 left out. Two tasks: "agent" has 8 turns that read 3,000 and write 150 tokens,
   and its environment acts for 5 s; "math" reads 300 and writes 3,000 tokens at once. A server of the pool "compute"
   reads 20,000 tokens/s and writes 16 answers at 50 tokens/s each; one of "bandwidth" reads 3,000 and writes 20 at 60.
   These are about the ratios of peak compute, memory bandwidth and memory of H800 and H20. A compute server costs as
   much as two others, which is a price of ours. Ratios are of step times, paired by seed.
2. Wall time of one group of 8 in real time, with threads and asyncio on an engine that sleeps: 6 turns of 10 ms of
   generation and an environment of 40 ms (mean of a log-normal). Lockstep is what programs do on TRL's engine,
   independent what they do on verl's; redundant begins 10 and keeps the first 8 (`together(first=8)`). In "one hangs"
   the first environment takes 1.5 s longer in its third turn. "Best possible" follows from the drawn times alone.

    python examples/evidence/rollart.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from common import across, arguments, grouped, interval, named, points, save
from matplotlib.figure import Figure

from rl_plugins.core.method import Method
from rl_plugins.core.requests import Generate, Generated, Prompt, Trajectory, together
from rl_plugins.kit.agents import Observation, play
from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.runtime.programs import Running, drive, run
from rl_plugins.testing.engine import TableEngine, make_prompt
from rl_plugins.tools.disaggregated.simulator import Pool, Reward, Setup, Task, Weights, simulate, summary

STEPS, SKIP = 16, 4
COMPUTE, BANDWIDTH = Pool("compute", 16, 20_000, 50), Pool("bandwidth", 20, 3_000, 60)
AGENT = Task("agent", 8, 3_000, 150, seconds=5.0, spread=0.5, written_spread=0.5)
MATH = Task("math", 1, 300, 3_000, seconds=0.1, written_spread=0.5)
LISTS = {"agent": ["compute", "bandwidth"], "math": ["bandwidth", "compute"]}


def servers(compute: int, bandwidth: int) -> dict[str, str]:
    return {f"c{i}": "compute" for i in range(compute)} | {f"b{i}": "bandwidth" for i in range(bandwidth)}


BASE = Setup([COMPUTE, BANDWIDTH], servers(2, 4), [AGENT, MATH], LISTS, train_seconds=40.0, weights=Weights(2.0, 1.0))
BLIND = [replace(COMPUTE, prefill_rate=1.0, decode_rate=1.0), replace(BANDWIDTH, prefill_rate=1.0, decode_rate=1.0)]
AGENTS = replace(BASE, servers=servers(8, 0), tags=None, tasks=[AGENT])  # a place for each rollout
STRAGGLING = replace(AGENTS, tasks=[replace(AGENT, spread=1.0)], close_spare=True)
FAULTS: dict[str, Any] = {"fails": 0.005, "hangs": 0.001, "timeout": 120.0, "restart": 10.0}
JUDGE = Reward(2.0, 0.5)
DEDICATED = replace(BASE, servers=servers(2, 2), reward=replace(JUDGE, workers=32, overlapped=False))
SLOW_WEIGHTS = Weights(15.0, 2.0)
SYNC = replace(
    DEDICATED, servers=servers(3, 0), tags=None, staleness=0, lockstep=True, weights=SLOW_WEIGHTS
)  # a quarter of the machines compute rewards
SPREADS = (0.0, 0.25, 0.5, 1.0)

ARMS: dict[str, dict[str, Setup]] = {  # the first arm of each table is what the others are compared with
    "affinity": {
        "2 compute + 4 bandwidth, by list": BASE,
        "2 + 4, by list without a second choice": replace(BASE, tags={"agent": ["compute"], "math": ["bandwidth"]}),
        "2 + 4, by measurement": replace(BASE, tags=None),
        "2 + 4, by load alone": replace(BASE, tags=None, believed=BLIND),
        "4 compute": replace(BASE, servers=servers(4, 0), tags=None),
        "8 bandwidth": replace(BASE, servers=servers(0, 8), tags=None),
    },
    "affinity, a price of 1.5": {
        "2 compute + 3 bandwidth, by list": replace(BASE, servers=servers(2, 3)),
        "4 compute": replace(BASE, servers=servers(4, 0), tags=None),
        "6 bandwidth": replace(BASE, servers=servers(0, 6), tags=None),
    },
    "affinity, a price of 3": {
        "2 compute + 6 bandwidth, by list": replace(BASE, servers=servers(2, 6)),
        "4 compute": replace(BASE, servers=servers(4, 0), tags=None),
        "12 bandwidth": replace(BASE, servers=servers(0, 12), tags=None),
    },
    **{
        f"lockstep, spread {spread:g}": {
            "independent": replace(AGENTS, tasks=[replace(AGENT, spread=spread)]),
            "lockstep": replace(AGENTS, tasks=[replace(AGENT, spread=spread)], lockstep=True),
        }
        for spread in SPREADS
    },
    **{
        f"redundancy, {name}": {f"x = {x}": replace(setup, redundancy=x) for x in (0, 1, 2)}
        for name, setup in {
            "no faults": STRAGGLING,
            "faults": replace(STRAGGLING, **FAULTS),
            "faults, a = 0": replace(STRAGGLING, staleness=0, **FAULTS),
            "faults, spare run on": replace(STRAGGLING, close_spare=False, **FAULTS),
            "faults, 2 + 4 servers": replace(STRAGGLING, servers=servers(2, 4), tags=LISTS, **FAULTS),
        }.items()
    },
    "reward": {
        "service of 2 s": replace(BASE, reward=JUDGE),
        "service of 10 s": replace(BASE, reward=replace(JUDGE, seconds=10.0)),
        "2 servers for it, overlapped": replace(DEDICATED, reward=replace(JUDGE, workers=32)),
        "2 servers for it, inline": DEDICATED,
    },
    "weights": {
        "asynchronous": replace(BASE, weights=replace(SLOW_WEIGHTS, blocking=False)),
        "blocking": replace(BASE, weights=SLOW_WEIGHTS),
    },
    "staleness": {f"a = {a}": replace(BASE, staleness=a) for a in (0, 1, 2)},
    "all": {
        "all of it": replace(
            BASE, redundancy=1, close_spare=True, reward=JUDGE, weights=replace(SLOW_WEIGHTS, blocking=False)
        ),
        "synchronous, 3 compute + 1 for rewards": SYNC,
    },
}
PAPER = {  # table, slower arm, faster arm: what the paper says
    "affinity against bandwidth only": ("affinity", "8 bandwidth", "2 compute + 4 bandwidth, by list", "1.30 to 1.68"),
    "affinity against compute only": ("affinity", "4 compute", "2 compute + 4 bandwidth, by list", "1.12 to 1.37"),
    "independent, least spread": ("lockstep, spread 0", "lockstep", "independent", "1.23"),
    "independent, most spread": ("lockstep, spread 1", "lockstep", "independent", "2.27"),
    "redundancy, x = 2": ("redundancy, faults", "x = 0", "x = 2", "up to 1.62"),
    "reward as a service": ("reward", "2 servers for it, inline", "service of 2 s", "2.05 (rollout)"),
    "asynchronous weights": ("weights", "blocking", "asynchronous", "1.10 to 1.16"),
    "staleness 1 against 0": ("staleness", "a = 0", "a = 1", "1.35 to 2.05, with all"),
    "staleness 2 against 1": ("staleness", "a = 1", "a = 2", "1 is advised"),
    "all against synchronous": ("all", "synchronous, 3 compute + 1 for rewards", "all of it", "2.65 to 4.58"),
}


def simulated(seeds: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of each arm its summary, and its step time for that of the first arm; and of each of the paper's numbers ours."""
    tables: dict[str, Any] = {}
    times: dict[tuple[str, str], np.ndarray] = {}
    for table, arms in ARMS.items():
        tables[table] = {}
        for arm, setup in arms.items():
            found = [summary(simulate(setup, STEPS, seed), SKIP) for seed in seeds]
            times[table, arm] = np.array([f["step_time"] for f in found])
            names = dict.fromkeys(name for f in found for name in f)
            row = {name: interval([f.get(name, 0.0) for f in found]) for name in names}
            row["relative"] = interval(times[table, arm] / times[table, next(iter(arms))])
            tables[table][arm] = row
            shown = [n for n in row if n.split()[0] in ("relative", "step_time", "places", "environments", "rewards")]
            shown += ["lag", "oldest", "expired", "late", "failed"]
            print(table, "|", arm, {n: f"{row[n]['mean']:.3f} ± {row[n]['ci95']:.3f}" for n in shown}, flush=True)
    ours = {
        name: {"paper": paper, **interval(times[table, slow] / times[table, fast])}
        for name, (table, slow, fast, paper) in PAPER.items()
    }
    return tables, ours


# ---- wall time

SIZE, SPARE, TURNS, GENERATION, ACTING, HANG, PER_SEED = 8, 2, 6, 0.01, 0.04, 1.5, 3


class Sleeping:
    """An environment that takes the given times."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = iter(seconds)

    def reset(self, columns: Any) -> Observation:
        return Observation("go")

    def act(self, action: str) -> Observation:
        time.sleep(next(self.seconds))
        return Observation("on", reward=1.0)

    def close(self) -> None:
        pass


class Group(Method):
    """Rollouts of a group whose environments take drawn times; `first` are kept."""

    name = "group"

    def __init__(self, seconds: np.ndarray, first: int | None) -> None:
        super().__init__()
        self.seconds, self.first = seconds, first

    def rollout(self, prompt: Prompt) -> Any:
        one = [play(prompt, lambda s=s: Sleeping(s), TURNS, turn_tokens=1) for s in self.seconds]
        return (yield from together(one, first=self.first))


class SleepingEngine:
    """Makes one token per request and takes the same time for each, however many there are."""

    def __init__(self) -> None:
        self.engine = TableEngine(lambda text: {"a": 1.0})

    async def generate(self, prompt: Prompt, request: Generate) -> list[Generated]:
        await asyncio.sleep(GENERATION)
        return self.engine.generate([(prompt, request)])[0]

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Any:
        return self.engine.score([(prompt, trajectory)])[0]


class Batched(TableEngine):
    """The same with TRL's interface: one batch at a time."""

    def generate(self, requests: Sequence[tuple[Prompt, Generate]]) -> list[list[Generated]]:
        time.sleep(GENERATION)
        return super().generate(requests)


def wall(arm: str, seconds: np.ndarray) -> float:
    """Seconds that a group takes."""
    redundant = arm == "redundant"
    engine = SleepingEngine()
    prompt = make_prompt(engine.engine.chat, "a", n=SIZE, max_tokens=500)
    group = Group(seconds if redundant else seconds[:SIZE], SIZE if redundant else None)
    begin = time.perf_counter()
    if arm == "lockstep":
        program = Running(group, prompt)
        run([program], Batched(lambda text: {"a": 1.0}))
        rows = program.rows or []
    else:
        rows = asyncio.run(drive(Running(group, prompt), engine))
    took = time.perf_counter() - begin
    assert len(rows) == SIZE and all(row.meta["turns"] == TURNS for (row,) in rows)
    return took


BEST: dict[str, Callable[[np.ndarray], float]] = {
    "lockstep": lambda s: float((GENERATION + s[:SIZE].max(0)).sum()),
    "independent": lambda s: float((GENERATION + s[:SIZE]).sum(1).max()),
    "redundant": lambda s: float(np.sort((GENERATION + s).sum(1))[SIZE - 1]),
}


def measured(seeds: Sequence[int]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    gc.collect()
    gc.freeze()  # A full collection of all imported modules takes as long as a group.
    for name, spread, hang in (("spread 0.5", 0.5, 0.0), ("spread 1", 1.0, 0.0), ("spread 0.5, one hangs", 0.5, HANG)):
        took: dict[str, list[float]] = {arm: [] for arm in BEST}
        best: dict[str, list[float]] = {arm: [] for arm in BEST}
        for seed in seeds:
            rng = np.random.default_rng([seed, 29])
            drawn = [
                ACTING * np.exp(spread * rng.standard_normal((SIZE + SPARE, TURNS)) - spread**2 / 2)
                for _ in range(PER_SEED)
            ]
            for seconds in drawn:
                seconds[0, 2] += hang
            found = {arm: [wall(arm, seconds) for seconds in drawn] for arm in BEST}
            for arm, of in BEST.items():
                took[arm].append(float(np.mean(found[arm])))
                best[arm].append(float(np.mean([of(seconds) for seconds in drawn])))
        base = np.array(took["lockstep"])
        results[name] = {
            arm: {
                "seconds": interval(took[arm]),
                "best possible": interval(best[arm]),
                "relative": interval(took[arm] / base),
            }
            for arm in BEST
        }
        for arm, row in results[name].items():
            print(name, "|", arm, {n: f"{c['mean']:.3f} ± {c['ci95']:.3f}" for n, c in row.items()}, flush=True)
    return results


def main() -> None:
    args, start = arguments(__doc__, seeds=5), time.time()
    tables, ours = simulated(range(args.seeds))
    for name, row in ours.items():
        print(f"{name}: {row['mean']:.2f} ± {row['ci95']:.2f}, paper {row['paper']}")
    results = {"tables": tables, "ours": ours, "wall": measured(range(args.seeds))}
    save(args.out, "rollart", results, lambda: plot(results), start)


def plot(results: dict[str, Any]) -> Figure:
    figure, (ratios, spreads, walls, ages) = panels(4, 3.0)
    ours = {n: r for n, r in results["ours"].items() if "spread" not in n}
    across(ratios, list(ours), list(ours.values()), "step time, slower for faster")
    ratios.axvline(1.0, color="grey", lw=0.8)
    named(ratios, "step time, slower for faster", "", "what each part brings")
    for i, arm in enumerate(("lockstep", "independent")):
        cells = [results["tables"][f"lockstep, spread {s:g}"][arm]["step_time"] for s in SPREADS]
        points(spreads, SPREADS, cells, arm, i)
    named(spreads, "spread of the environment's time", "step time (s)", "simulated")
    cases = list(results["wall"])
    grouped(walls, cases, {arm: [results["wall"][c][arm]["seconds"] for c in cases] for arm in BEST})
    walls.set_xticks(range(len(cases)), ["0.5", "1", "0.5, one hangs"])
    named(walls, "spread of the environment's time", "a group (s)", "measured")
    rows = results["tables"]["staleness"]
    zero = {"mean": 0.0, "ci95": 0.0}
    lags = {arm: [row.get(f"lag_{k}", zero) for k in range(3)] for arm, row in rows.items()}
    grouped(ages, ["0", "1", "2"], lags)
    named(ages, "updates since the first token", "share of rollouts", "staleness")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
