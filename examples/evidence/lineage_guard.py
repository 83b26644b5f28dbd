"""Do claims that are planted in one agent reach the answer of a team, and what does the lineage guard change?

No model runs. Six agents have two facts each, the weights of two boxes. One agent, drawn for each task, misreports
one of its boxes: a false claim that is harmless and easy to find. In each of 6 rounds every agent sends all that it
holds to its readers; the answer is what one agent holds at the end. In a star this is the hub, and the false claim
begins in a leaf; in a chain it is the last agent, and the claim begins in another one. A reader takes a claim about a
box it knows nothing of with probability 0.9, and forgets a claim that is not its own with probability 0.1 a round. A
sender that gets a claim back drops it with probability 0.8.

Every message goes through the real guard. Three of ten boxes are confirmed from the start. The verifier cannot tell
for one claim in ten and is wrong in one answer in fifty. Policies: none; strict, but the message is delivered as it
was written ("found, not blocked"); speed; balanced, with the hub of the star, and the chain's third agent, as hub;
strict; and strict with a verifier that cannot tell for half of the claims. Readers ignore the tag of unverified
claims; in "tags count" they take a tagged claim half as often.

Shown: share of tasks whose answer has the false claim; share of true facts in the answer; calls of the verifier per
message and messages sent back per message. The marker in the logs of the unguarded runs gives adoption and
correction, and the propagation model with these rates is compared with the runs of other seeds. Intervals are 95 %
Student intervals over seeds.

    python examples/evidence/lineage_guard.py --seeds 10 --out evidence-results
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from common import arguments, grouped, interval, named, save
from matplotlib.figure import Figure

from rl_plugins.lab.compare.figures import panels
from rl_plugins.tools.messages import LineageGuard, estimate_rates, find_hubs, marker_run, propagate, risk

AGENTS, BOXES, ROUNDS, TASKS = 6, 12, 6, 50
ADOPT, FORGET, DROP, KNOWN = 0.9, 0.1, 0.8, 0.3
NAMES = [f"agent {i}" for i in range(AGENTS)]
_CLAIM = re.compile(r"(\[unverified\] )?Box (\d+) weighs (\d+) kg\.")

STAR = np.zeros((AGENTS, AGENTS))
STAR[0, 1:] = STAR[1:, 0] = 1
CHAIN = np.eye(AGENTS, k=-1)
TOPOLOGIES: Mapping[str, tuple[np.ndarray, int]] = {"star": (STAR, 0), "chain": (CHAIN, AGENTS - 1)}  # answering agent


@dataclass
class Arm:
    """How messages are guarded: policy ("" for none), share of claims the verifier can tell, whether it blocks."""

    policy: str = ""
    coverage: float = 0.9
    blocks: bool = True


ARMS = {
    "none": Arm(),
    "found, not blocked": Arm("strict", blocks=False),
    "speed": Arm("speed"),
    "balanced": Arm("balanced"),
    "strict": Arm("strict"),
    "strict, verifier knows half": Arm("strict", coverage=0.5),
}


def sentence(box: int, weight: int) -> str:
    return f"Box {box} weighs {weight} kg."


class Verifier:
    """Knows the true weights, but cannot tell for some claims and is wrong in some: the same answer each time."""

    def __init__(self, truth: list[int], coverage: float, rng: np.random.Generator) -> None:
        self.truth, self.tells, self.errs = truth, rng.random(BOXES) < coverage, rng.random(BOXES) < 0.02

    def __call__(self, fields: Mapping[str, Any]) -> bool | None:
        _, box, weight = _CLAIM.search(fields["claim"]).groups()
        if not self.tells[int(box)]:
            return None
        return (self.truth[int(box)] == int(weight)) != bool(self.errs[int(box)])


@dataclass
class Agent:
    own: dict[int, int]
    rng: np.random.Generator
    holds: dict[int, int] = field(default_factory=dict)

    def message(self) -> str:
        return " ".join(sentence(b, w) for b, w in sorted(self.holds.items()))

    def write_again(self, feedback: str) -> str:
        for _, box, _ in _CLAIM.findall(feedback):
            if self.rng.random() < DROP:
                self.holds.pop(int(box), None)
                self.own.pop(int(box), None)
        return self.message()


async def play(arm: Arm, topology: str, tag_trust: float, seed: int, task: int) -> dict[str, Any]:
    """One task; its draws are the same for all arms until the guard acts."""
    reads, answering = TOPOLOGIES[topology]
    rng = np.random.default_rng([seed, task])
    truth = rng.permutation(np.arange(100, 1000))[: BOXES + 1].tolist()
    given = [sentence(b, truth[b]) for b in np.flatnonzero(rng.random(BOXES) < KNOWN)]
    boxes = rng.permutation(BOXES)
    agents = [
        Agent({int(b): truth[b] for b in boxes[2 * i : 2 * i + 2]}, np.random.default_rng([seed, task, i]))
        for i in range(AGENTS)
    ]
    planted = int(rng.choice([i for i in range(AGENTS) if i != answering]))
    wrong = int(boxes[2 * planted])
    agents[planted].own[wrong] = truth[BOXES]
    marker = sentence(wrong, truth[BOXES])
    for agent in agents:
        agent.holds = dict(agent.own)
    hubs = find_hubs(reads, NAMES) or [NAMES[2]]
    guard = LineageGuard(
        arm.policy or "speed",
        verifier=Verifier(truth, arm.coverage, rng),
        hubs=hubs,
        given=given,
        retries=1,
    )
    for now in range(ROUNDS):
        sent = {}
        for i, agent in enumerate(agents):
            if not reads[:, i].any():
                continue
            wrote = agent.message()
            if arm.policy and arm.blocks:
                sent[i], _ = await guard.process(NAMES[i], "readers", wrote, agent.write_again, round=now)
            else:  # the guard sees it, and the readers get what was written
                await guard.process(NAMES[i], "readers", wrote, round=now)
                sent[i] = wrote
        for i, agent in enumerate(agents):
            forgets = {b: agent.rng.random() < FORGET for b in sorted(agent.holds)}
            agent.holds = {b: w for b, w in agent.holds.items() if b in agent.own or not forgets[b]}
            for j in np.flatnonzero(reads[i]):
                for tag, box, weight in _CLAIM.findall(sent[j]):
                    takes = agent.rng.random() < ADOPT * (tag_trust if tag else 1.0)
                    if takes and int(box) not in agent.holds:
                        agent.holds[int(box)] = int(weight)
    answer = agents[answering].holds
    right = sum(answer.get(b) == truth[b] for b in range(BOXES) if b != wrong)
    used = guard.counts if arm.policy else {}
    return {
        "false": answer.get(wrong) == truth[BOXES],
        "true": right / (BOXES - 1),
        "calls": used.get("verified", 0) / max(guard.counts["messages"] - guard.counts["sent_back"], 1),
        "again": used.get("sent_back", 0) / max(guard.counts["messages"] - guard.counts["sent_back"], 1),
        "run": marker_run(guard.log, NAMES, marker),
        "planted": planted,
    }


def seeds_of(arm: Arm, topology: str, tag_trust: float, seeds: int) -> list[list[dict[str, Any]]]:
    return [[asyncio.run(play(arm, topology, tag_trust, s, t)) for t in range(TASKS)] for s in range(seeds)]


def model(topology: str, plays: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Rates from the markers of the first half of the seeds; prevalence predicted and seen in the other half. Only
    agents that write are in the logs: the last one of the chain is not."""
    reads = TOPOLOGIES[topology][0]
    writers = np.flatnonzero(reads.any(0))
    reads = reads[np.ix_(writers, writers)]
    half = max(1, len(plays) // 2)
    rates = estimate_rates([p["run"][:, writers] for of in plays[:half] for p in of], reads)
    seen, predicted = [], []
    for of in plays[half:] or plays:
        seen.append(float(np.mean([p["run"][-1, writers].mean() for p in of])))
        starts = [np.eye(AGENTS)[p["planted"], writers] for p in of]
        rounds = len(of[0]["run"]) - 1
        ends = [propagate(reads, s, rates.adoption, rates.correction, rounds)[-1].mean() for s in starts]
        predicted.append(float(np.mean(ends)))
    return {
        "adoption": rates.adoption,
        "correction": rates.correction,
        "risk": risk(reads, rates.adoption, rates.correction),
        "seen": interval(seen),
        "predicted": interval(predicted),
    }


MEASURES = ("false", "true", "calls", "again")


def draw(results: dict[str, Any]) -> Figure:
    figure, axes = panels(2)
    ignored = results["arms"]["tags ignored"]
    arms = [a for a in ARMS if a != "strict, verifier knows half"]
    for axis, (measure, title) in zip(axes, {"false": "false claim", "true": "true facts"}.items(), strict=True):
        short = [a.replace("found, not", "not") for a in arms]
        grouped(axis, short, {t: [of[a][measure] for a in arms] for t, of in ignored.items()})
        axis.tick_params(axis="x", rotation=20)
        named(axis, "", "share", f"{title} in the answer")
    axes[0].legend(loc="upper right", handlelength=2.6)
    return figure


def main() -> None:
    args = arguments(__doc__, 10)
    start = time.time()
    results: dict[str, Any] = {"tasks_per_seed": TASKS, "arms": {}, "model": {}}
    for trust, readers in ((1.0, "tags ignored"), (0.5, "tags count")):
        for topology in TOPOLOGIES:
            for name, arm in ARMS.items():
                if trust < 1 and not (arm.policy and arm.blocks):
                    continue
                plays = seeds_of(arm, topology, trust, args.seeds)
                cell = {m: interval([float(np.mean([p[m] for p in of])) for of in plays]) for m in MEASURES}
                results["arms"].setdefault(readers, {}).setdefault(topology, {})[name] = cell
                told = "  ".join(f"{m} {v['mean']:.3f} ± {v['ci95']:.3f}" for m, v in cell.items())
                print(f"{readers:13} {topology:6} {name:28} {told}", flush=True)
                if name == "none":
                    results["model"][topology] = found = model(topology, plays)
                    print(f"{'':13} {topology:6} {found}", flush=True)

    save(args.out, "lineage_guard", results, lambda: draw(results), start)


if __name__ == "__main__":
    main()
