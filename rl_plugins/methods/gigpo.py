"""GiGPO (arXiv 2505.10978): compares turns that start in the same state, in addition to whole rollouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl_plugins import Groups, Method, MethodError, MethodParams, Rollouts, param
from rl_plugins.core.params import GIVEN, above
from rl_plugins.kit.agents.turns import Turns, joint, normalized, state_ids

_STATES = {"step_advantage_w": above(0)}
_FUZZY = {"similarity": GIVEN}
Mode = Literal["mean_norm", "mean_std_norm"]


class Gigpo(Method):
    """Adds a per-turn advantage to that of the rollout, from turns of its group that start in the same state.

    For turn t of a rollout with the rewards r_1 .. r_T of its turns and the reward R:

        g_t   = r_t + gamma g_(t+1)                                     discounted return
        A^E_t = R_t - mean_E(R)                                         over the turns of the group
        A^S_t = g_t - mean_S(g)                                         over the turns S of the group with t's state
        A_t   = A^E_t + step_advantage_w A^S_t

    With `mode: mean_std_norm` both differences are divided by std + eps of the same turns (divisor n - 1). R_t is R.
    `invalid_action_penalty_coef` is subtracted from R_t and g_t, after returns, if the action was not understood.

    Turns have the same state if their observations (`anchor`) are equal by value: texts, numbers, arrays, nested lists
    and mappings; an observation of None equals no other. With `similarity` the texts of a group, earliest turn first,
    join the first cluster whose first text has a difflib ratio of at least `similarity`, else they open one.

    Symbols: advantages and everything above are (turns,) float64 over `rollouts.turns`.

    Special cases: turns of rows without a reward (NaN) count in no statistic and have A = 0. A state that no other turn
    shares has A^S = 0. A group with a single entry has A^E = 0, and a warning. If an environment gives no rewards, R
    counts as that of the last turn.

    Raises:
        MethodError: an observation that cannot be compared, or one that is no text with `similarity`.

    Source: arXiv 2505.10978, Eq. 3 to 8; `gigpo/core_gigpo.py` of the authors' code.
    """

    name = "gigpo"
    fidelity = "code"
    does = "Adds an advantage per turn by comparing turns that start in the same state"
    problems = ("agents",)
    needs = frozenset({"turns"})
    advantages_per = "turn"

    @dataclass(frozen=True)
    class Params(MethodParams):
        gamma: float = param(0.95, "discount of later rewards, per turn", ge=0, le=1, only_if=_STATES)
        step_advantage_w: float = param(1.0, "weight of the comparison of states; 0: only rollouts are compared", ge=0)
        mode: Mode = param("mean_norm", "differences from the mean, or also divided by std + eps")
        statistics: Literal["turns", "rollouts"] = param("turns", "units of the statistics of R (code: turns)")
        single_group: Literal["zero", "reward"] = param("zero", "A^E of a group with one entry: 0 or its reward")
        similarity: float | None = param(
            None, "difflib ratio of one state; none: equal texts", gt=0, lt=1, only_if=_STATES
        )
        autojunk: bool = param(True, "difflib's neglect of frequent letters in texts of 200 or more", only_if=_FUZZY)
        invalid_action_penalty_coef: float = param(0.1, "penalty of a turn whose action was not understood", ge=0)
        eps: float = param(1e-6, "constant added to the standard deviation", gt=0, only_if={"mode": "mean_std_norm"})

    def advantages(self, rollouts: Rollouts) -> Tensor:
        p, turns = self.params, Turns(rollouts)
        penalty = p.invalid_action_penalty_coef * (~turns.table.valid).double()
        by_std = p.mode == "mean_std_norm"

        reward, groups = turns.outcome - penalty, Groups(turns.group)
        entries = torch.where(turns.before == 0, reward, torch.nan) if p.statistics == "rollouts" else reward
        episode = normalized(reward, groups, by_std, p.eps, of=entries)
        single = groups.rows(groups.n(entries) == 1)
        alone = torch.zeros_like(reward)
        if p.single_group == "reward":
            alone = reward / (1 + p.eps) if by_std else reward
        episode = torch.where(single, alone, episode)

        states = Groups(self._states(turns))
        returns = turns.returns(p.gamma) - penalty
        by_state = p.step_advantage_w * normalized(returns, states, by_std, p.eps)
        if self.traced:
            self.note_turns("state", states.index, states.rows(states.n(returns)), by_state)
        self._report(returns, states, episode, by_state, single)
        return (episode + by_state).nan_to_num(nan=0.0)

    def _states(self, turns: Turns) -> Tensor:
        """(turns,) the same number for turns of a group that began in the same state."""
        if self.params.similarity is None:
            return joint(turns.group, state_ids(turns.table.anchor))
        return _similar(turns, self.params.similarity, self.params.autojunk)

    def _report(self, returns: Tensor, states: Groups, episode: Tensor, by_state: Tensor, single: Tensor) -> None:
        scored = ~torch.isnan(returns)
        if not bool(scored.any()):
            return
        members = states.n(returns)
        self.log("compared", (states.rows(members) > 1)[scored].double().mean())
        self.log("states", float((members > 0).sum()))
        self.log("abs_episode", episode[scored].abs().mean())
        self.log("abs_step", by_state[scored].abs().mean())
        if bool(single[scored].any()):
            self.warn(
                "a group has a single rollout or turn, so there is nothing to compare its reward with; its advantage "
                + ("is 0." if self.params.single_group == "zero" else "is its reward.")
            )
        if not bool((members > 1).any()):
            self.warn(
                "no two turns of a group began in the same state, so only rollouts are compared. Let the environment "
                "give what it shows without history, time or numbering as `anchor`, or set the parameter `similarity`."
            )


def _similar(turns: Turns, threshold: float, autojunk: bool) -> Tensor:
    """(turns,) clusters of similar texts inside each group. Clusters are greedy, so their texts come one by one."""
    table, scored = turns.table, (~torch.isnan(turns.outcome)).tolist()
    texts: list[tuple[int, str] | None] = []  # with the group; None: like no other
    earliest: dict[tuple[int, str], int] = {}  # different texts of each group, and their earliest turn
    for g, text, t, s in zip(turns.group.tolist(), table.anchor, table.turn.tolist(), scored, strict=True):
        if text is None or not s:
            texts.append(None)
            continue
        if not isinstance(text, str):
            raise MethodError(
                f"`similarity` compares texts, and the observation (`anchor`) of a turn is {type(text).__name__}. Let "
                f"the environment give text, or set `similarity` to none for equal observations only."
            )
        texts.append((g, text))
        earliest[g, text] = min(t, earliest.get((g, text), t))
    clusters: dict[int, _Clusters] = {}
    cluster: dict[tuple[int, str], int] = {}
    for g, text in sorted(earliest, key=lambda key: (earliest[key], key[1])):
        cluster[g, text] = clusters.setdefault(g, _Clusters(threshold, autojunk)).join(text)
    numbers = [-1 - i if key is None else cluster[key] for i, key in enumerate(texts)]
    return joint(turns.group, torch.tensor(numbers, dtype=torch.int64))


class _Clusters:
    """The clusters of one group, each with the text that opened it."""

    def __init__(self, threshold: float, autojunk: bool) -> None:
        self.threshold, self.autojunk = threshold, autojunk
        self.of_length: dict[int, list[int]] = {}  # length of a cluster's text -> clusters
        self.matchers: list[SequenceMatcher[str]] = []  # with what difflib prepares of that text
        self.letters = np.zeros((16, _BINS), dtype=np.int32)  # how often a letter is in it, letters binned

    def join(self, text: str) -> int:
        """The first cluster whose text is similar, or a new one."""
        letters = _letters(text)
        for i in self._candidates(text, letters):
            self.matchers[i].set_seq1(text)
            if self.matchers[i].ratio() >= self.threshold:
                return i
        new = len(self.matchers)
        if new == len(self.letters):
            self.letters = np.concatenate([self.letters, np.zeros_like(self.letters)])
        self.letters[new] = letters
        self.matchers.append(SequenceMatcher(None, "", text, self.autojunk))
        self.of_length.setdefault(len(text), []).append(new)
        return new

    def _candidates(self, text: str, letters: np.ndarray[Any, Any]) -> list[int]:
        """Clusters whose ratio, 2 matching letters / (sum of lengths), can reach the threshold, in order: no more
        letters match than the shorter text has, nor than both texts have of each letter."""
        found: list[int] = []
        for length, members in self.of_length.items():
            both = length + len(text)
            if not both or 2.0 * min(length, len(text)) / both >= self.threshold:
                shared = np.minimum(self.letters[members], letters).sum(axis=1)
                possible = 2.0 * shared / both >= self.threshold if both else shared == 0
                found += [members[i] for i in np.flatnonzero(possible)]
        return sorted(found)


_BINS = 128


def _letters(text: str) -> np.ndarray[Any, Any]:
    counts = np.zeros(_BINS, dtype=np.int32)
    for letter, n in Counter(text).items():
        counts[ord(letter) % _BINS] += n  # a bin of several letters only makes the bound looser
    return counts
