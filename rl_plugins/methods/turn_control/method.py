"""Turn control (arXiv 2510.16786): limits an agent's turns, reminds it of the limit, extends unfinished rollouts."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rl_plugins import Call, Method, Program, Prompt, Trajectory
from rl_plugins.core.rollouts import Plan, Rollouts, Run, Shape, Tokens
from rl_plugins.kit.agents import Episode, Opened, episodes, finish, go_on, turn
from rl_plugins.kit.start_checks import refuse_beyond_completion
from rl_plugins.methods.turn_control.params import TurnControlParams

CUT = ("limit", "extended_limit", "length", "aborted")  # the agent would have gone on

# where parameters have an effect


class TurnControl(Method):
    """Agent loop with a turn limit L that the agent is told, and an extension E for rollouts that are not done at L.

        used = 0
        while used < L and not done:
            the latest message the agent reads ends with "<L - used> turns left"
            the agent generates a turn, the environment takes it, used += 1
            if used = L < L_max, not done, extensions left, should_extend:
                L = min(L + E, L_max), and the agent is told

        unlimited   L = hard_cap, nothing is told: the plain agent loop
        fixed       L = T_75
        dynamic     L = T_50, L_max = T_75, E = ceil((L_max - L) / max_extensions)

        T_q = ceil(percentile_q of the turns of the unrestricted agent), linear interpolation, solved or not

    Without a `limit`, rollouts are unrestricted (`hard_cap`, no reminders) for `calibration_episodes`; then T_q is
    computed from them, once (`freeze`) or again every `update_every` batches from the last `window` episodes
    (`rolling`). Evaluation uses the limits and reminders of the next batch. Reminders carry no gradient. With an
    `extension`, or a `limit` and no calibration, L_max is L + E max_extensions, and never above hard_cap.

    Symbols: `meta` of a row has `turns` used, `limit_final`, `extended` (bool), `stop_reason`, and `score`, `done`,
    `error` of the environment. stop_reason: "done", "limit", "extended_limit", "length" (truncated), "aborted" (no
    token), "error" (of the environment; the turn is invalid).

    Special cases: an episode that was cut off counts as longer than every other. If T_q is among the cut episodes, it
    is one more than the longest length seen. Episodes with a broken environment do not count. A rollout whose
    environment cannot be made or reset is a row without tokens and reward (NaN).

    State: turns and cut (whether cut off) of the episodes of the window, and the limits.

    Raises:
        ConfigError: no environment, a reminder that cannot be filled in.

    Source: arXiv 2510.16786, its abstract and documents of others that quote it; no code was found (2026-11-26).
    """

    name = "turn_control"
    fidelity = "abstract"
    does = "Limits an agent's turns, tells it how many are left, and extends unfinished rollouts"
    problems = ("agents", "length")
    needs = frozenset({"chat_template", "column:turns", "column:stop_reason", "column:extended"})
    brings = frozenset({"column:turns", "column:stop_reason", "column:extended", "redundancy"})
    in_eval = ("plan", "rollout")
    state_version = 2  # the last limit of an episode
    Params = TurnControlParams

    # ---- the driver: limits

    def check(self, run: Run) -> None:
        refuse_beyond_completion(run, "turn_tokens", self.params.turn_tokens, "this limit has no effect")

    def start(self, run: Run) -> None:
        if self.params.how != "off":
            self.state = {"turns": [], "cut": [], "batches": 0, "limits": {}}

    def plan(self, plan: Plan) -> Plan | None:
        if not self.state.get("limits"):
            return None
        limits = dict(self.state["limits"])
        return plan.replace(rows=tuple(row.marked(self.name, limits) for row in plan.rows))

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        columns = (rollouts.meta["turns"], rollouts.meta["stop_reason"], rollouts.meta["extended"])
        first = (rollouts.index == 0).tolist()
        episodes = [e for e, is_first in zip(zip(*columns, strict=True), first, strict=True) if is_first and e[1]]
        if episodes:
            turns = [int(t) for t, _, _ in episodes]
            reasons = [reason for _, reason, _ in episodes]
            self.log("turns", float(np.mean(turns)))
            self.log("extended", float(np.mean([bool(e) for _, _, e in episodes])))
            for name, of in (("done", ("done",)), ("limited", CUT[:2]), ("length", CUT[2:]), ("failed", ("error",))):
                self.log(name, sum(r in of for r in reasons) / len(reasons))
            cut = [reason in CUT for reason in reasons]
            counted = [i for i, reason in enumerate(reasons) if reason != "error"]
            turns, cut = [turns[i] for i in counted], [cut[i] for i in counted]
            for q in (25, 50, 75) if turns else ():
                self.log(f"turns_{q}", turns_at(q, turns, cut))
            self._calibrate(turns, cut)
        limits = self._limits(self.state.get("limits"))
        self.log("limit", limits["limit"])
        self.log("last_limit", limits["last"])

    def _calibrate(self, turns: Sequence[int], cut: Sequence[bool]) -> None:
        """Adds the episodes of a batch to the window, and computes the limit where it is time to."""
        p, state = self.params, self.state
        if p.how == "off" or (p.how == "freeze" and state["limits"]):
            return
        window = {"turns": [*state["turns"], *turns][-p.window :], "cut": [*state["cut"], *cut][-p.window :]}
        batches = state["batches"] + 1
        self.state = {**state, **window, "batches": batches}
        due = not state["limits"] or batches % p.update_every == 0
        if due and len(window["turns"]) >= p.calibration_episodes:
            first, last = (
                min(max(turns_at(q, **window), p.min_turns), p.hard_cap)
                for q in (p.first_percentile, p.last_percentile)
            )
            self.state = {**self.state, "limits": self._bounded(first, last)}

    def _limits(self, calibrated: Mapping[str, int] | None) -> Mapping[str, int]:
        """`limit`, `extension` and `last` limit: of a calibration, of the parameters, or none but the cap."""
        p = self.params
        if calibrated:
            return calibrated
        if p.strategy == "unlimited" or p.limit is None:
            return {"limit": p.hard_cap, "extension": 0, "last": p.hard_cap}
        return self._bounded(p.limit, p.limit + math.ceil(p.limit / 2) * p.max_extensions)

    def _bounded(self, first: int, last: int) -> dict[str, int]:
        """Limits that begin with `first` and end, where the extension is not given, with `last`."""
        p = self.params
        if p.strategy != "dynamic" or not p.max_extensions:
            return {"limit": first, "extension": 0, "last": first}
        extension = -(-(last - first) // p.max_extensions)  # rounded up
        if p.extension is not None:
            extension, last = p.extension, first + p.extension * p.max_extensions
        return {"limit": first, "extension": extension, "last": min(last, p.hard_cap)}

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape | None:
        if self.params.unfinished == "grade":
            return None
        whole = torch.tensor([reason not in CUT for reason in rollouts.meta["stop_reason"]])
        self.note(~whole, "the agent was stopped: {}", list(map(str, rollouts.meta["stop_reason"])))
        return Shape(keep_rows=whole)

    # ---- the rollouts

    def rollout(self, prompt: Prompt) -> Program:
        p, given = self.params, prompt.mark(self.name)
        limits = self._limits(given)
        limit, last = prompt.turns(limits["limit"]), prompt.turns(limits["last"])
        told = p.strategy != "unlimited" and (bool(given) or p.limit is not None)  # not while turns are calibrated

        def play(episode: Episode, number: int, opened: Opened) -> Generator[Any, Any, Trajectory]:
            most, extensions = limit, 0
            while not episode.stop:
                episode = yield from turn(prompt, episode, p.turn_tokens, p.timeout)
                more, news = min(limits["extension"], last - most), ""  # 0 where no extension is left
                if not episode.stop and episode.turns >= most and more > 0 and (yield from self._extend(episode)):
                    extensions, most, news = extensions + 1, most + more, p.extension_text.format(extension=more)
                reminder = self._reminder(episode.turns, most) if told else ""
                episode = go_on(prompt, episode, most, "\n".join(filter(None, (news, reminder))), p.role)
            if extensions and episode.stop == "limit":
                episode = replace(episode, stop="extended_limit")
            return (yield from finish(episode, p.timeout, limit_final=most, extended=extensions > 0))

        return (yield from episodes(self, prompt, play, self._reminder(0, limit) if told else ""))

    def _reminder(self, used: int, limit: int) -> str:
        p, remaining = self.params, limit - used
        if p.remind_from is not None and remaining > p.remind_from:
            return ""
        return str(p.reminder.format(remaining=remaining, used=used, limit=limit))

    def _extend(self, episode: Episode) -> Generator[Any, Any, bool]:
        if self.params.should_extend is None:
            return True
        called = yield Call(self.params.should_extend, (episode.environment,), self.params.timeout, "should_extend")
        if called.error:
            self.warn(f"`should_extend` failed, which counts as no: {called.error}")
        return bool(called.value)


def turns_at(q: float, turns: Sequence[int], cut: Sequence[bool]) -> int:
    """T_q: percentile q (0 to 100) of the turns, linearly interpolated and rounded up.

    Episodes that were cut off are longer than all others by an unknown amount; where q lies among them the answer is
    one more than the longest of all.

    Args:
        turns: of each episode, at least one.
        cut: whether it was cut off.
    """
    known = np.sort(np.where(cut, np.inf, np.asarray(turns, dtype=float)))
    place = (len(known) - 1) * q / 100
    low, high = known[math.floor(place)], known[math.ceil(place)]
    if math.isinf(high):
        return max(turns) + 1
    return math.ceil(low + (place - math.floor(place)) * (high - low) - 1e-9)
