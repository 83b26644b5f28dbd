"""AEPO's rollouts: some chains of an agent start from the prompt, the others branch after uncertain turns."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rl_plugins import Call, Generate, Idle, Method, Program, Prompt, Run, from_params, param
from rl_plugins.core.params import above
from rl_plugins.core.requests import BranchOrigin, Called, Generated, together
from rl_plugins.kit.agents import AgentParams, Episode, Opened, Subprogram, act, finish, go_on, open_episode
from rl_plugins.kit.start_checks import refuse_beyond_completion, refuse_whole_group

# where the entropy of a turn has an effect
_COPIES, _PROBE = {"beam_size": above(1)}, {"probe": True}
_ENTROPY = ({**_COPIES, "entropy_weight": above(0)}, _PROBE)


class AepoRollout(Method):
    """Branches chains of an agent after turns that are more uncertain than their first turn, with a growing penalty.

    The entropy of a turn is a sum, not a mean:

        H = -sum over the first entropy_tokens tokens and their top_logprobs log-probs l of exp(l) l / ln |V|

    A prompt has k rollouts; m of them start from the prompt. Then all unfinished chains take a turn together, and the
    environment answers. While there are fewer than k chains, every unfinished chain is copied together with its
    environment, up to beam_size - 1 times, each time if

        p = clip((u + entropy_weight (H_now - H_first)) max(0, 1 - penalty c), 0, 1) >= branch_probability

    If all chains have ended and some are missing, one new chain per round starts from the prompt. m is
    `initial_rollouts`, half of k by default, or with `probe: true`

        m = clip(int(k sigmoid(probe_weight (H_root - H_tool))) + 1, 1, k)

    where H_root is the entropy of `probe_tokens` tokens from the prompt, and H_tool the mean over the turns of one
    whole rollout; both are discarded. Evaluation plays plain rollouts.

    Symbols: |V| is the size of the tokenizer's vocabulary; u is uniform in [0, 1), from the prompt's own generator;
    H_first is the entropy of the chain's first turn, for a copy of its own; c counts consecutive rounds in which the
    prompt got a new chain (20 end branching). Shared tokens are trained in each chain; text of the environment is not.
    Rows have `score`, `turns`, `done`, `error` and `aepo_branch` (turns at the copy, None for those from the prompt) in
    `rollouts.meta`.

    Special cases: if an environment cannot be copied (`copy.deepcopy`), missing chains start from the prompt. A chain
    ends if its environment raises or hangs, at `max_turns`, or if the environment's reply does not fit. One whose
    environment cannot be made or reset is a row without tokens and reward (NaN).

    Raises:
        ConfigError: no environment.

    Source: arXiv 2510.14545, dynamic entropy-balanced rollout; `vllm_rollout_with_tools.py` in
    `AEPO/verl_aepo_entropy/verl/workers/rollout/vllm_rollout` of the authors' code.
    """

    name = "aepo_rollout"
    fidelity = "code"
    does = "Branches an agent's rollout after turns that are more uncertain than its first one"
    problems = ("agents", "exploration")
    in_eval = ("rollout",)
    needs = from_params(lambda p: {"several_rollouts", "chat_template", f"engine:logprobs={p.top_logprobs}"})
    idle = (Idle({"branches": 0}, "no chain branched: see `branch_probability` and `initial_rollouts`."),)

    @dataclass(frozen=True)
    class Params(AgentParams):
        initial_rollouts: int | None = param(None, "m; none: half of the rollouts", ge=1, only_if={"probe": False})
        probe: bool = param(False, "search for m by a probe, which costs one rollout per prompt")
        probe_tokens: int = param(50, "number of tokens of the probe's short generation", ge=1, only_if=_PROBE)
        probe_weight: float = param(0.5, "weight of H_root - H_tool in the sigmoid", ge=0, only_if=_PROBE)
        beam_size: int = param(2, "most chains that one chain becomes in a round", ge=1)
        branch_probability: float = param(0.5, "lowest p at which a chain is copied", ge=0, le=1, only_if=_COPIES)
        entropy_weight: float = param(0.2, "weight of H_now - H_first in p", ge=0, only_if=_COPIES)
        penalty: float = param(0.05, "penalty per consecutive round with a new chain", ge=0, le=1, only_if=_COPIES)
        entropy_tokens: int = param(20, "first tokens of a turn that count for its entropy", ge=1, only_if=_ENTROPY)
        top_logprobs: int = param(10, "number of most likely tokens that the engine reports", ge=1, only_if=_ENTROPY)
        max_turns: int = param(7, "most turns of a chain (default: the authors' 6 tool calls and an answer)", ge=1)

    def check(self, run: Run) -> None:
        refuse_beyond_completion(run, "turn_tokens", self.params.turn_tokens, "this limit of a turn has no effect")
        refuse_whole_group(run, "initial_rollouts", self.params.initial_rollouts, "no chain would branch")

    def rollout(self, prompt: Prompt) -> Program:
        opened = Opened(self.params.timeout, self.warn)
        return (yield from opened.during(self._whole(prompt, opened)))

    def _whole(self, prompt: Prompt, opened: Opened) -> Subprogram:
        if not prompt.training:
            return (yield from self._chains(prompt, opened, prompt.n))
        m = (yield from self._probe(prompt, opened)) if self.params.probe else self._initial(prompt.n)
        self.log("initial", m)
        return (yield from self._chains(prompt, opened, m))

    def _initial(self, k: int) -> int:
        given = self.params.initial_rollouts
        return (k + 1) // 2 if given is None else min(given, k)

    def _probe(self, prompt: Prompt, opened: Opened) -> Subprogram:
        """How many chains start from the prompt, from a short generation and one whole rollout."""
        p = self.params
        (chain,) = yield from self._roots(prompt, opened, 1)
        if chain.episode.stop:
            return self._initial(prompt.n)
        (short,) = yield Generate(chain.episode.trajectory, max_tokens=p.probe_tokens, top=p.top_logprobs)
        turns = []
        while not chain.episode.stop:
            chain = yield from self._turn(prompt, chain)
            turns.append(chain.entropy)
        return initial_rollouts(prompt.n, self._entropy(prompt, short), sum(turns) / len(turns), p.probe_weight)

    def _chains(self, prompt: Prompt, opened: Opened, m: int) -> Subprogram:
        """All chains of a prompt, in the order they ended; m start at once."""
        p, rng = self.params, prompt.rng("branch")
        new: list[_Chain] = yield from self._roots(prompt, opened, m)
        active: list[_Chain] = []
        ended: list[_Chain] = []
        made, streak, branches, entropies, attempts = 0, 0, 0, [], []
        copies = True
        while True:
            new = [replace(chain, number=made + k) for k, chain in enumerate(new)]
            made += len(new)
            ended += [chain for chain in new if chain.episode.stop]
            active += [chain for chain in new if not chain.episode.stop]
            if not active and made == prompt.n:
                break
            moved = yield from together([self._turn(prompt, chain) for chain in active])
            entropies += [chain.entropy for chain in moved]
            ended += [chain for chain in moved if chain.episode.stop]
            active = [chain for chain in moved if not chain.episode.stop]
            parents: list[_Chain] = []
            for chain in active:
                for _ in range(min(p.beam_size - 1, prompt.n - made - len(parents)) if copies else 0):
                    attempts.append(streak)
                    if branch_chance(rng.random(), chain.rise, streak, p) >= p.branch_probability:
                        parents.append(chain)
            new = yield from self._copies(parents, opened)
            copies = copies and len(new) == len(parents)
            branches += len(new)
            if not active and made < prompt.n:  # all at once where not even one environment could be had
                new = yield from self._roots(prompt, opened, 1 if moved else prompt.n - made)
            streak = streak + 1 if new else 0
        if prompt.training:
            self.log("branches", branches)
            self.log("restarts", made - m - branches)
            if entropies:
                self.log("turn_entropy", float(np.mean(entropies)))
            if attempts:
                self.log("penalized", float(np.mean(attempts)))
        return (yield from self._rows(prompt, ended))

    def _roots(self, prompt: Prompt, opened: Opened, n: int) -> Subprogram:
        """Chains that start from the prompt."""
        p = self.params
        begun = yield from together([open_episode(prompt, p.environment, opened, p.timeout) for _ in range(n)])
        return [_Chain(episode) for episode in begun]

    def _turn(self, prompt: Prompt, chain: _Chain) -> Subprogram:
        """The chain after another turn; if it goes on it ends with the observation."""
        p, before = self.params, chain.episode
        (made,) = yield Generate(before.trajectory, max_tokens=p.turn_tokens, top=p.top_logprobs)
        entropy = self._entropy(prompt, made)
        episode = yield from act(prompt, before, before.trajectory.add(made), p.timeout)
        first = entropy if chain.first is None else chain.first
        episode = go_on(prompt, episode, p.max_turns, role=p.role)
        return replace(chain, episode=episode, entropy=entropy, first=first)

    def _copies(self, parents: Sequence[_Chain], opened: Opened) -> Subprogram:
        """Copies of these chains, fewer if an environment cannot be copied."""
        timeout, name = self.params.timeout, "copying an environment"
        copied = [partial(copy.deepcopy, parent.episode.environment) for parent in parents]
        called: list[Called] = yield [Call(opened.make, (one,), timeout, name) for one in copied]
        new = []
        for parent, made in zip(parents, called, strict=True):
            if made.error:
                self.warn(
                    f"the environment {type(parent.episode.environment).__name__} cannot be copied ({made.error}), "
                    f"so chains start from the prompt instead of branching. Give it `__deepcopy__`, or leave out "
                    f"`{self.name}`."
                )
                continue
            episode = replace(parent.episode, environment=made.value)
            origin = BranchOrigin(parent.number, len(episode.trajectory), parent.rise, "rise of the entropy of a turn")
            new.append(_Chain(episode, branched=episode.turns, origin=origin))
        return new

    def _rows(self, prompt: Prompt, chains: Sequence[_Chain]) -> Subprogram:
        timeout = self.params.timeout
        rows = yield from together([finish(c.episode, timeout, aepo_branch=c.branched) for c in chains])
        for error in {row.meta["error"]: None for row in rows if row.meta["error"]}:
            self.warn(f"an episode has no score: {error}")
        if not prompt.traced:
            return rows
        places: dict[int | None, int] = {chain.number: place for place, chain in enumerate(chains)}
        origins = [replace(o, parent=places.get(o.parent)) for o in (c.origin or BranchOrigin() for c in chains)]
        return [replace(row, origin=origin) for row, origin in zip(rows, origins, strict=True)]

    def _entropy(self, prompt: Prompt, made: Generated) -> float:
        p = self.params
        return turn_entropy(made.top[: p.entropy_tokens], prompt.chat.vocabulary)


@dataclass(frozen=True)
class _Chain:
    """A rollout in the making.

    Attributes:
        entropy: of its last turn.
        first: of its own first one, None before it.
        branched: turns at the copy; None: it started from the prompt.
        number: of the prompt's chains, in the order they began.
        origin: for the trace; its parent is the number of a chain.
    """

    episode: Episode
    entropy: float = 0.0
    first: float | None = None
    branched: int | None = None
    number: int = 0
    origin: BranchOrigin | None = None

    @property
    def rise(self) -> float:
        """Of the entropy, from its first turn to its last."""
        return self.entropy - (self.first or 0.0)


def turn_entropy(top: Sequence[Sequence[tuple[int, float]]], vocabulary: int) -> float:
    """-sum of exp(l) l over all log-probs, in units of ln vocabulary; 0 without any."""
    logprobs = np.array([logprob for place in top for _, logprob in place])
    return float(-(np.exp(logprobs) * logprobs).sum() / math.log(vocabulary))


def initial_rollouts(k: int, root: float, tool: float, weight: float) -> int:
    """Number of the k chains that start from the prompt, from the entropies of the prompt and of the turns after it."""
    return max(1, min(k, int(k / (1 + math.exp(-weight * (root - tool)))) + 1))


def branch_chance(u: float, risen: float, streak: int, p: Any) -> float:
    """What is compared with `branch_probability`: the entropy has `risen`, `streak` rounds in a row had a new chain."""
    return max(0.0, min(1.0, (u + p.entropy_weight * risen) * max(0.0, 1 - p.penalty * streak)))
