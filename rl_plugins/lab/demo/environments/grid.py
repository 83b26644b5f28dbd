"""A grid world of few states, in which rollouts of one task meet the same state again and again."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_plugins.lab.demo.environments.episode import DemoEnvironment

MAZES = {
    "a": ("....", ".##.", "..#.", "#..."),
    "b": (".#..", "....", ".##.", "...."),
    "c": ("...#", ".#..", ".#.#", "...."),
    "d": ("....", "#.#.", "..#.", ".#.."),
}
LONGEST_WAY = 8  # of a row's task
MOVES = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}


@dataclass(frozen=True)
class Table:
    """A task of `Grid` as tables. States and actions are numbered in the order given.

    Attributes:
        states: all that can be reached, the first one the start.
        actions: as the agent writes them.
        next: for each state, the state each action leads to.
        reward: for each state, the reward of each action.
        final: for each state, whether the episode has ended there.
    """

    states: tuple[str, ...]
    actions: tuple[str, ...]
    next: tuple[tuple[int, ...], ...]
    reward: tuple[tuple[float, ...], ...]
    final: tuple[bool, ...]


class Grid(DemoEnvironment):
    """Find the way in a maze of 4 by 4 cells, with a key to fetch first at level 2.

    The prompt `b k12 g33 p01` names the maze, the cells of the key (row and column) and the goal, and where the agent
    stands. A turn is one of the moves `u`, `d`, `l` and `r`, answered with the new position, `11`, or `11k` once the
    agent has the key; a wall leaves it where it is. Any other action is answered with the position, too, and does not
    count as valid. Reaching the goal, with the key if there is one, is rewarded with 1 and ends the episode.

    Args:
        step_reward: Of every move that does not reach the goal.
    """

    LEVELS = (1, 2)
    MAX_TURNS = 12
    MAX_ACTION = 4

    def __init__(self, step_reward: float = 0.0) -> None:
        super().__init__()
        self._step_reward = step_reward
        self._columns: Mapping[str, Any] = {}
        self._here = ""

    @staticmethod
    def describe(columns: Mapping[str, Any]) -> str:
        key = f" k{columns['key']}" if columns["key"] else ""
        return f"{columns['maze']}{key} g{columns['goal']} p{columns['start']}"

    def advise(self) -> str:
        """The first move of a shortest way, of several the one that comes first in `MOVES`."""
        return min(MOVES, key=lambda move: _distance(self._columns, _moved(self._columns, self._here, move)))

    def stumble(self, rng: random.Random) -> str:
        """Any move."""
        return rng.choice(tuple(MOVES))

    @classmethod
    def optimal_steps(cls, columns: Mapping[str, Any]) -> int:
        """Moves of the shortest way from the start to the goal, by way of the key if there is one."""
        return _distance(columns, _start(columns))

    def transition(self, columns: Mapping[str, Any]) -> Table:
        """The task as tables, from which values of any policy follow exactly; the limit on turns is not in them."""
        states = [_start(columns)]
        following: list[tuple[int, ...]] = []
        for state in states:  # grows on the way
            reached = [state if _at_goal(columns, state) else _moved(columns, state, move) for move in MOVES]
            states += [s for s in dict.fromkeys(reached) if s not in states]
            following.append(tuple(states.index(s) for s in reached))
        final = tuple(_at_goal(columns, state) for state in states)
        reward = tuple(
            tuple(0.0 if final[i] else 1.0 if final[j] else self._step_reward for j in after)
            for i, after in enumerate(following)
        )
        return Table(tuple(states), tuple(MOVES), tuple(following), reward, final)

    @staticmethod
    def _draw(rng: random.Random, level: int) -> dict[str, Any]:
        maze = rng.choice(tuple(MAZES))
        cells = [f"{r}{c}" for r, line in enumerate(MAZES[maze]) for c, cell in enumerate(line) if cell == "."]
        while True:
            start, goal, key = rng.sample(cells, 3)
            columns = {"maze": maze, "start": start, "goal": goal, "key": key if level == 2 else ""}
            if 2 <= _distance(columns, start) <= LONGEST_WAY:
                return columns

    def _begin(self, columns: Mapping[str, Any]) -> None:
        self._columns = columns
        self._here = _start(columns)

    def _take(self, action: str) -> tuple[str, float, bool, bool]:
        valid = action in MOVES
        if valid:
            self._here = _moved(self._columns, self._here, action)
        won = _at_goal(self._columns, self._here)
        return self._here, 1.0 if won else self._step_reward, won, valid

    def _state(self) -> str:
        return self._here


def _start(columns: Mapping[str, Any]) -> str:
    return str(columns["start"])


def _moved(columns: Mapping[str, Any], state: str, move: str) -> str:
    """The state a move leads to: the position, and `k` with the key in hand."""
    maze = MAZES[columns["maze"]]
    row, column = int(state[0]) + MOVES[move][0], int(state[1]) + MOVES[move][1]
    inside = 0 <= row < len(maze) and 0 <= column < len(maze[0]) and maze[row][column] == "."
    cell = f"{row}{column}" if inside else state[:2]
    return cell + ("k" if state.endswith("k") or cell == columns["key"] else "")


def _at_goal(columns: Mapping[str, Any], state: str) -> bool:
    return state[:2] == columns["goal"] and (not columns["key"] or state.endswith("k"))


def _distance(columns: Mapping[str, Any], state: str) -> int:
    """Moves to the goal, by breadth-first search."""
    steps = {state: 0}
    queue = deque([state])
    while queue:
        state = queue.popleft()
        if _at_goal(columns, state):
            return steps[state]
        for move in MOVES:
            if (after := _moved(columns, state, move)) not in steps:
                steps[after] = steps[state] + 1
                queue.append(after)
    raise ValueError(
        f"There is no way to the goal {columns['goal']} in maze {columns['maze']!r}. Give cells without a wall."
    )
