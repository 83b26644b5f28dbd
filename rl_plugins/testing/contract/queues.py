"""Over-provisioned generation, simulated: what `admit` does to the groups that wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl_plugins.testing.contract.kit import GROUP_SIZE, GROUPS, Kit
from rl_plugins.testing.generation import SimulatedBatch, Simulation

MAX_TOKENS, BATCHES = 64, 12


def check_admission(kit: Kit) -> bool:
    """admission, simulated: batches fill, no group is lost, the queue does not grow without end, the same again"""
    if "admit" not in kit.cls.claims():
        return False
    with kit.at("simulated generation"):
        runs = [_batches(kit) for _ in range(2)]
        first = runs[0]
        if [_prompts(b) for b in first] != [_prompts(b) for b in runs[1]]:
            kit.fail("`admit` decides differently when it is asked the same again; use `self.rng(purpose)`.")
        drawn = sum(b.fresh for b in first)
        ends = sum(len(b.trained) + b.dropped for b in first) + len(first[-1].waiting)
        if drawn != ends:
            kit.fail(f"of {drawn} groups begun {ends} were trained, dropped or wait.")
        waiting = [len(b.waiting) for b in first]
        if waiting[2] < waiting[5] < waiting[8] < waiting[11] and waiting[11] > 4 * GROUPS:
            kit.fail(
                f"more and more groups wait ({waiting[2]}, {waiting[5]}, {waiting[8]}, {waiting[11]} after batch 2, 5, "
                f"8, 11). Name them in `resume`, `restart` or `drop`, or begin fewer."
            )
    return True


def _batches(kit: Kit) -> list[SimulatedBatch]:
    def lengths(prompt: int, drawn: int) -> Sequence[int]:
        drawn_lengths = np.random.default_rng([prompt, drawn]).lognormal(2.5, 1.0, 8 * GROUP_SIZE)
        return [int(n) + 1 for n in drawn_lengths]

    method = kit.build()
    simulation = Simulation(method, lengths, groups=GROUPS, group_size=GROUP_SIZE, max_tokens=MAX_TOKENS)
    simulation.stack.start(kit.run)
    return [simulation.batch() for _ in range(BATCHES)]


def _prompts(batch: SimulatedBatch) -> list[int]:
    return [group.row.prompt_index for group in batch.trained]
