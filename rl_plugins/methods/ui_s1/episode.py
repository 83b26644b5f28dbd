"""UI-S1 (arXiv 2509.11543): a recorded trajectory as an environment with the patch module, its reward and its metric.

A rollout program, an agent loop or an environment of a host calls this; nothing here generates, waits or draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_plugins import MethodError


@dataclass(frozen=True)
class ExpertStep:
    """One turn of a recorded trajectory (a step in the paper).

    Args:
        observation: what the policy sees before it acts.
        response: the expert's action as the policy would write it, with or without a thought (the paper's final model:
            without). It replaces a wrong response in the history.
    """

    observation: Any
    response: Any


@dataclass(frozen=True)
class RecordedTurn:
    """One turn of a rollout on a recording, as a row reports it: the columns of `rollouts.turns` and the patch."""

    turn: int
    anchor: Any
    reward: float
    valid: bool
    patched: bool


class SemiOnlineEpisode:
    """A recorded trajectory as an environment: the rollout of UI-S1 with its patch module. No I/O, no randomness.

        episode = SemiOnlineEpisode(expert, max_patches=1)
        while not episode.done:
            prompt = write(instruction, episode.history, episode.observation)
            response = ...                                   # of the policy: a training row of its own
            turn = episode.act(response, matched, reward)    # your matcher and reward; `turn` goes with the row

    Args:
        expert: the recorded turns, at least one.
        max_patches: wrong responses that are replaced; at the next one the rollout ends. None: all are replaced.
            0 in evaluation (`semi_online_performance`).

    Attributes:
        history: responses so far, the policy's own or what replaced them. Of the observations an agent keeps what fits
            (the authors: the last two images).
        turns: what `act` returned.
        patches: wrong responses replaced so far.
        done: no further turn.
    """

    def __init__(self, expert: Sequence[ExpertStep], max_patches: int | None = 1) -> None:
        if not expert or (max_patches is not None and max_patches < 0):
            raise MethodError(
                f"an episode of {len(expert)} recorded turns with max_patches={max_patches}: at least one turn is "
                f"needed, and max_patches must be 0 or more, or None for no limit."
            )
        self.expert, self.max_patches = tuple(expert), max_patches
        self.history: list[Any] = []
        self.turns: list[RecordedTurn] = []
        self.patches, self.done = 0, False

    @property
    def observation(self) -> Any:
        """What the policy sees now."""
        return self.expert[self._number()].observation

    def act(self, response: Any, matched: bool, reward: float, patch: Any = None) -> RecordedTurn:
        """Takes the policy's response to the current observation.

        Args:
            matched: whether its action is the expert's.
            reward: of this turn.
            patch: what replaces a wrong response instead of the recorded one (with a newly written thought, say).
        """
        number = self._number()
        expert = self.expert[number]
        may = self.max_patches is None or self.patches < self.max_patches
        patched = not matched and may and number + 1 < len(self.expert)  # after the last turn nothing reads it
        self.patches += patched
        replacement = expert.response if patch is None else patch
        self.history.append(replacement if patched else response)
        self.done = number + 1 == len(self.expert) or not (matched or patched)
        self.turns.append(RecordedTurn(number, expert.observation, float(reward), bool(matched), patched))
        return self.turns[-1]

    @property
    def progress(self) -> float:
        """Share of the recorded turns done before the first mismatch."""
        return next((t.turn for t in self.turns if not t.valid), len(self.turns)) / len(self.expert)

    def _number(self) -> int:
        if self.done:
            raise MethodError("the episode is over; start a new one (`done` tells).")
        return len(self.turns)


def semi_online_performance(progress: Sequence[float]) -> dict[str, float]:
    """The paper's evaluation of a policy on its own history without patches (SOP).

    Args:
        progress: of one episode with max_patches=0 per task.

    Returns:
        `progress` (mean), `success` (share of the tasks done to the end) and `score`, the mean of both.
    """
    mean = sum(progress) / len(progress)
    success = sum(p == 1 for p in progress) / len(progress)
    return {"progress": mean, "success": success, "score": (mean + success) / 2}


def gui_step_reward(well_formed: bool, action: Literal["exact", "type", "wrong", "unreadable"]) -> float:
    """The authors' reward of a GUI step (a turn), 0.1 for the format and 0.9 for the action: exact 1, right type but
    wrong arguments 0.5, wrong type 0.1, unreadable 0."""
    return 0.1 * well_formed + 0.9 * {"exact": 1.0, "type": 0.5, "wrong": 0.1, "unreadable": 0.0}[action]
