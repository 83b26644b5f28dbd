"""Rollouts that a program makes, in the trees of `sequences`: the engine of the tests serves it from their exact
probabilities. Letters are tokens, and the end is token 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.requests import Kind, Trajectory
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.runtime.programs import Running, run
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt
from rl_plugins.tools.gradient_quality import Answers

END = 2  # the action


class Player:
    """Plays the program of a stack.

    Args:
        world: a tree of texts, of one version: `sequences`.

    Raises:
        ConfigError: another world.
    """

    def __init__(self, stack: MethodStack, world: Any, seed: int) -> None:
        if not world.is_tree:
            raise ConfigError(f"{world.name} serves no programs; sequences does.")
        self.stack, self.world, self.seed = stack, world, seed
        self.prob = np.exp(world.logprobs_at(world.thetas[-1]))
        self.engine = TableEngine(self._next, self._reward, seed)

    def play(self, rows: Sequence[PlanRow]) -> tuple[list[PlanRow], Answers, Mapping[str, list[Any]]]:
        """The rollouts of a plan: the plan row of each, the rollouts, and what the program noted of each."""
        method, world = self.stack.claims["rollout"][0], self.world
        programs = []
        for row in rows:
            columns = {"row": row.prompt_index, **{n: v[row.prompt_index] for n, v in world.columns.items()}}
            prompt = make_prompt(
                self.engine.chat,
                str(row.prompt_index),
                row.n + row.spare,
                world.horizon,
                columns=columns,
                payload=row.payload,
                batch=self.stack.batch,
                reward_names=tuple(world.reward_names),
                seed=f"{self.seed}|{self.stack.batch}|{row.group}",
            )
            programs.append(Running(method, replace(prompt, columns=columns)))
        run(programs, self.engine)
        made = [(row, t) for row, p in zip(rows, programs, strict=True) for (t,) in p.rows or ()]
        names = [n[7:] for n in self.stack.needs if n.startswith("column:")]
        notes = {n: [t.meta.get(n) for _, t in made] for n in names if n not in world.columns}
        return [row for row, _ in made], self._answers([(row.prompt_index, t) for row, t in made]), notes

    def _next(self, text: str) -> Mapping[str, float]:
        prompt, _, letters = text.rpartition(">")
        a, b, end = self.prob[int(prompt.rpartition("<")[2]), _states(letters)[-1]].tolist()
        return {"a": a, "b": b, EOS: end}

    def _reward(self, text: str, columns: Mapping[str, Any]) -> float:
        *_, state = _states(text[: self.world.horizon - 1])
        action = "ab".index(text[-1]) if len(text) == self.world.horizon else END
        return float(self.world.gain[columns["row"], state, action, 0])

    def _answers(self, made: Sequence[tuple[int, Trajectory]]) -> Answers:
        world, shape = self.world, (len(made), self.world.horizon)
        state, action, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, bool)
        forced, prompt = np.zeros(shape, bool), np.array([p for p, _ in made])
        for i, (_, t) in enumerate(made):
            n = len(t)
            if int(Kind.OBSERVED) in tuple(t.kinds):
                raise ConfigError("A program added tokens that are only read; trees have none.")
            mask[i, :n] = True
            action[i, :n] = [END if token == 0 else token - ord("a") for token in t.tokens]
            state[i, :n] = _states("ab"[k] for k in action[i, : n - 1])
            forced[i, :n] = np.asarray(t.kinds) == int(Kind.FORCED)
        piece = (prompt[:, None] * world.offset.shape[1] + state) * world.offset.shape[2] + action
        last = np.maximum(mask.sum(1) - 1, 0)
        each = np.arange(len(made))
        logprobs = world.logprobs_at(world.thetas[-1]).ravel()[piece]
        return Answers(
            piece=piece,
            mask=mask,
            length=mask.sum(1),
            rewards=world.gain[prompt, state[each, last], action[each, last], 0][:, None],
            logprobs=logprobs,
            sampled=np.where(forced, np.nan, logprobs),
            forced=forced,
        )


def _states(letters: Any) -> list[int]:
    """States on the way of these letters, the first included."""
    found = [0]
    for letter in letters:
        found.append(2 * found[-1] + 1 + "ab".index(letter))
    return found
