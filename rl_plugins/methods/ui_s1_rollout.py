"""UI-S1 (arXiv 2509.11543): semi-online rollouts on recorded trajectories, with a row per turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plugins import (
    Call,
    Generate,
    Idle,
    Method,
    MethodError,
    MethodParams,
    Program,
    Prompt,
    Run,
    Trajectory,
    from_params,
    param,
)
from rl_plugins.core.redundancy import independent
from rl_plugins.core.requests import Called
from rl_plugins.kit.prompts import as_messages, as_text
from rl_plugins.kit.start_checks import refuse_beyond_completion
from rl_plugins.methods.ui_s1.episode import ExpertStep, SemiOnlineEpisode

Function = Callable[..., Any] | None


class UiS1Rollout(Method):
    """Makes semi-online rollouts on recorded expert trajectories. Name it before `ui_s1`.

    A task is a dataset row with the recorded turns (observation o_k, expert's response e_k). At turn k the policy reads
    prompt, history and o_k, and responds y_k:

        m_k, r_k = match(y_k, e_k)                       its action is the expert's; its reward
        history  = history + (o_k, y_k)                  if m_k, or the last turn
                   history + (o_k, e_k)                  else, and the rollout continues: a patch, at most `max_patches`
        the rollout ends                                 at the first wrong action without a patch left

    The history is messages of user (o) and assistant (y), or what `write` makes of it. Evaluation has no patches.

    Symbols: every turn is a row: its prompt has the patched history, its completion is y_k. A patch is never trained. A
    `match` that fails ends the rollout, without a reward (NaN) for its last turn. `turns` has k, o_k, r_k and m_k.
    `meta["progress"]`: share of turns before the first mismatch.

    Raises:
        MethodError: no recorded turns in the row, or more than `max_steps`.

    Source: arXiv 2509.11543, section 3; `verl/utils/dataset/universal_multiround.py` of the authors' code.
    """

    name = "ui_s1_rollout"
    fidelity = "code"
    does = "Plays recorded expert trajectories as an environment and patches wrong actions"
    problems = ("agents",)
    needs = frozenset({"chat_template"})
    brings = frozenset({"redundancy"})
    in_eval = ("rollout",)
    rows_per_rollout = from_params(lambda p: p.max_steps)
    idle = (Idle({"patches": 0}, "no step was patched. All steps matched, `match` failed, or `max_patches` is 0."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        column: str = param("expert", "column with the recorded turns: [observation, response] pairs or mappings")
        match: Function = param(None, "function match(response, expert, columns): (matched, reward); none: equal")
        write: Function = param(None, "function write(messages, history, observation): messages; none: in turn")
        max_patches: int = param(1, "most wrong responses of a rollout that are replaced by the expert's", ge=0)
        max_steps: int = param(16, "most turns of a task, each a row of the batch", ge=1)
        step_tokens: int | None = param(None, "most tokens of a response; none: the completion length", ge=1)
        timeout: float = param(30.0, "time limit of one call of `match`, in seconds", gt=0)

    def check(self, run: Run) -> None:
        refuse_beyond_completion(run, "step_tokens", self.params.step_tokens, "this limit has no effect")

    def rollout(self, prompt: Prompt) -> Program:
        if prompt.prefix:
            raise MethodError(
                "another method forces a prefix on completions, but recorded turns have no "
                "place for it. Remove that method or `ui_s1_rollout`."
            )
        expert = recorded_turns(prompt.columns, self.params.column, self.params.max_steps)
        return (yield from independent(prompt, lambda k: self._one(prompt, expert)))

    def _one(self, prompt: Prompt, expert: Sequence[ExpertStep]) -> Any:
        p = self.params
        episode = SemiOnlineEpisode(expert, p.max_patches if prompt.training else 0)
        rows: list[Trajectory] = []
        while not episode.done:
            observation = episode.observation
            done = list(zip([s.observation for s in expert], episode.history, strict=False))
            start = Trajectory(prompt.chat.prompt(self._messages(prompt, done, observation)))
            (made,) = yield Generate(start, max_tokens=p.step_tokens)
            response = prompt.chat.decode(made.tokens)
            wanted = expert[len(episode.turns)].response
            called: Called = yield Call(p.match or same_text, (response, wanted, prompt.columns), p.timeout, "`match`")
            matched, reward = _verdict(called)
            row = start.add(made)
            self.log("match_failed", float(math.isnan(reward)))
            if made.tokens:
                row = row.turn(0, observation, reward, matched)
            rows.append(row)
            if math.isnan(reward):
                break
            episode.act(response, matched, reward)
        self.log("steps", len(rows))
        self.log("patches", episode.patches)
        return [row.noted(progress=episode.progress) for row in rows]

    def _messages(self, prompt: Prompt, history: list[tuple[Any, Any]], observation: Any) -> list[dict[str, Any]]:
        begun = as_messages(prompt.messages)
        if self.params.write is not None:
            return list(self.params.write(begun, history, observation))
        for seen, response in history:
            begun += [{"role": "user", "content": as_text(seen)}, {"role": "assistant", "content": as_text(response)}]
        return [*begun, {"role": "user", "content": as_text(observation)}]


def recorded_turns(columns: Mapping[str, Any], column: str, most: int) -> list[ExpertStep]:
    """The recorded turns of a dataset row.

    Raises:
        MethodError: none, too many, or in another form.
    """
    found = columns.get(column)
    if not found:
        raise MethodError(f"the row has no recorded turns in the column `{column}` (columns: {', '.join(columns)}).")
    if len(found) > most:
        raise MethodError(f"a task has {len(found)} recorded turns, `max_steps` is {most}. Set it to the longest task.")
    turns = []
    for turn in found:
        pair = (turn.get("observation"), turn.get("response")) if isinstance(turn, Mapping) else tuple(turn)
        if len(pair) != 2 or pair[1] is None:
            raise MethodError(f"a recorded turn needs an observation and a response, it is {turn!r}.")
        turns.append(ExpertStep(*pair))
    return turns


def same_text(response: str, expert: Any, columns: Mapping[str, Any]) -> tuple[bool, float]:
    """Whether the response is the expert's, white space at its ends aside; reward 1 or 0."""
    matched = response.strip() == as_text(expert).strip()
    return matched, float(matched)


def _verdict(called: Called) -> tuple[bool, float]:
    """(matched, reward) of a call of `match`; NaN where it gave none."""
    try:
        matched, reward = called.value
        return bool(matched), float(reward)
    except (TypeError, ValueError):
        return False, math.nan
