"""Rollout programs at the size people train: 512 prompts x 16 rollouts x 32 turns, without a model.

The engine answers at once, so what is left is ours: `runtime.programs.run`, the programs, and the books of their
trajectories; and, measured apart, the contexts that are handed to the host. Two programs:

    books    Generate and observe, turn after turn
    agent    `agents.play` with an environment: calls in threads, decoding, the chat template's reply

    python benchmarks/scale_programs.py --prompts 512 --turns 32
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1")

from rl_plugins.core.method import Method
from rl_plugins.core.requests import Generate, Generated, Prompt, Trajectory, together
from rl_plugins.kit.agents import Observation
from rl_plugins.kit.agents.loop import play
from rl_plugins.runtime.programs import Running, run
from rl_plugins.testing.engine import CharChat

PROMPT, ACTION, READ = 500, 100, 100  # tokens of a prompt, of a turn, of what is read after it


class Books(Method):
    """Turns without an environment."""

    name = "books"

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.turns = turns

    def rollout(self, prompt: Prompt) -> Any:
        return (yield from together([self._one(prompt) for _ in range(prompt.n)]))

    def _one(self, prompt: Prompt) -> Any:
        read = tuple(range(1000, 1000 + READ))
        t = prompt.start()
        for k in range(self.turns):
            (made,) = yield Generate(t)
            start = len(t)
            t = t.add(made).turn(start)
            if k + 1 < self.turns:
                t = t.observe(read)
        return t


class Echo:
    """An environment that answers at once."""

    def reset(self, columns: Any) -> Observation:
        return Observation("")

    def act(self, action: str) -> Observation:
        return Observation("o" * (READ - 2), 0.0)

    def close(self) -> None:
        pass


class Agent(Books):
    """The loop of an agent."""

    name = "agent"

    def _one(self, prompt: Prompt) -> Any:
        return play(prompt, Echo, max_turns=self.turns)


class Engine:
    """Answers at once. Its time, and that of handing out contexts, is not of the programs.

    Attributes:
        calls: CPU seconds of the programs between two calls of the engine.
        contexts: CPU seconds of making what a host is given, of each call.
        tokens: in all contexts.
    """

    def __init__(self) -> None:
        self.calls: list[float] = []
        self.contexts: list[float] = []
        self.tokens = 0
        self.rows = 0
        self._last = time.process_time()

    def anybody(self, wants: bool) -> bool:
        return wants

    def score(self, requests: Sequence[tuple[Prompt, Trajectory]]) -> list[Any]:
        return []

    def generate(self, requests: Sequence[tuple[Prompt, Generate]]) -> list[list[Generated]]:
        now = time.process_time()
        self.calls.append(now - self._last)
        for _, request in requests:
            self.tokens += len(_context(request.trajectory))
        self.contexts.append(time.process_time() - now)
        self.rows += len(requests)
        # other objects for every row, as an engine makes them
        made = [
            [Generated(tuple(range(2000 + i, 2000 + i + ACTION)), tuple([-0.5 - j for j in range(ACTION)]), "eos")]
            for i, _ in enumerate(requests)
        ]
        self._last = time.process_time()
        return made

    def end(self) -> None:
        self.calls.append(time.process_time() - self._last)


def _context(trajectory: Trajectory) -> Any:
    """As TRL's transformers path gives it to the host."""
    return trajectory.context_array


def measure(method: Method, prompts: int, rollouts: int, turns: int) -> dict[str, Any]:
    """One batch: CPU seconds and memory."""
    chat = CharChat()
    limit = turns * (ACTION + READ)
    asked = [
        Prompt(tuple(range(300, 300 + PROMPT)), "", {}, rollouts, limit, PROMPT + limit, chat) for _ in range(prompts)
    ]
    gc.collect()
    before = _resident()
    engine = Engine()
    start = time.process_time()
    programs = [Running(method, p) for p in asked]
    run(programs, engine)
    engine.end()
    total = time.process_time() - start
    gc.collect()
    held = _resident() - before
    rows = [r for p in programs for (r,) in p.rows or []]
    tokens = sum(map(len, rows))
    calls = len(engine.contexts)
    return {
        "method": method.name,
        "prompts": prompts,
        "rollouts": rollouts,
        "turns": turns,
        "tokens": tokens,
        "engine calls": calls,
        "programs, s per call": sum(engine.calls) / calls,
        "programs, us per row and call": sum(engine.calls) / engine.rows * 1e6,
        "first and last call, s": [engine.calls[1], engine.calls[-2]],
        "after the last call, s": engine.calls[-1],
        "contexts, us per row and call": sum(engine.contexts) / engine.rows * 1e6,
        "total, s": total,
        "held, bytes per token": held / tokens,
        "peak, GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def _resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--turns", type=int, default=32)
    parser.add_argument("--program", choices=["books", "agent"], default="books")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    method = {"books": Books, "agent": Agent}[a.program](a.turns)
    found = measure(method, a.prompts, a.rollouts, a.turns)
    print(json.dumps(found, indent=1))
    if a.out:
        a.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
