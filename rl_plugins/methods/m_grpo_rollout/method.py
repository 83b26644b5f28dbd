"""M-GRPO (arXiv 2511.13288): rollouts of a main agent that delegates, with one row for it and one for every call."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from torch import Tensor, tensor

from rl_plugins import (
    Call,
    ConfigError,
    Method,
    MethodParams,
    Program,
    Prompt,
    Rollouts,
    Run,
    Trajectory,
    from_params,
    signals,
)
from rl_plugins.core.errors import shown
from rl_plugins.core.redundancy import independent
from rl_plugins.core.requests import Called
from rl_plugins.kit.agents import Episode, Observation, generate, go_on
from rl_plugins.kit.start_checks import refuse_beyond_completion
from rl_plugins.kit.texts import between
from rl_plugins.methods.m_grpo_rollout.params import MGrpoRolloutParams
from rl_plugins.methods.m_grpo_rollout.team import Team
from rl_plugins.tools.messages.contracts import Contract
from rl_plugins.tools.messages.guard import LineageGuard
from rl_plugins.tools.messages.logs import write_log
from rl_plugins.tools.messages.metrics import message_density, redundancy


class MGrpoRollout(Method):
    """Makes rollouts of a main agent and its sub-agents with one policy. Name it before `m_grpo`, which trains them.

    Reconstruction: the authors' loop runs on two servers; here both agents are the policy of the run.

    The main agent M writes turn by turn. Each turn may call sub-agents, at most `max_calls` in a rollout: `parse` finds
    their tasks in its text (default: <tool_call> tags). A sub-agent S reads its own conversation, `sub_prompt` with the
    task in it, and its completion is a row. The text in <result> tags, or else all of it, goes back to M, which reads
    it without training. The rollout ends with a turn without a call, after `max_turns`, or when nothing more fits.

    Symbols: rows of a rollout are S's in the order of the calls, and M's last (the row an evaluation grades);
    `meta["agent"]` is `main_agent` or `sub_agent`. S's result appears in M's row as observed text. With `expert`,
    `meta["expert"]` of S's row is its judgment of the task and the result, None for M and where it failed.

    What M reads of a result can be checked first (docs/agents_safety.md). S's own tokens stay as sampled. `contract`
    validates it, repairs it once, or replaces it by the errors; `invalid_penalty` times the share of rejected results
    is taken from the reward. `guard` checks its claims: a result with a rejected claim goes back to S with the evidence
    at most `guard_retries` times, and S's next answer is a further turn of S's row. After that the rejected claims are
    dropped. If the check itself fails, the results of this rollout are released with a tag.

    Raises:
        ConfigError: `contract` makes no contract.

    Source: arXiv 2511.13288; `MrlX-DeepResearch` of the authors' code for the tags.
    """

    name = "m_grpo_rollout"
    fidelity = "reconstruction"
    does = "Makes rollouts of a main agent that delegates, with one row for it and one per call"
    problems = ("agents",)
    brings = from_params(
        lambda p: signals("column:agent", "column:invalid", "redundancy", columns=("expert" if p.expert else "",))
    )
    in_eval = ("rollout",)
    needs = from_params(
        lambda p: signals("chat_template", columns=("invalid" if p.invalid_penalty else "", p.guard_facts))
    )
    rows_per_rollout = from_params(lambda p: 1 + p.max_calls)
    Params = MGrpoRolloutParams

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        p = self.params
        self._contract: Contract | None = None
        if p.contract is not None:
            self._contract = p.contract()
            if not isinstance(self._contract, Contract):
                raise ConfigError(
                    f"`contract` of m_grpo_rollout returned {shown(self._contract)}. It must return a "
                    f"rl_plugins.tools.messages.Contract."
                )
        self._guard: LineageGuard | None = None
        if p.guard != "off":
            self._guard = LineageGuard(
                p.guard,
                splitter=p.guard_splitter,
                entailment=p.guard_entailment,
                verifier=p.guard_verifier,
                retries=p.guard_retries,
                timeout=p.timeout / 2,
            )

    def rewards(self, rollouts: Rollouts) -> Tensor | None:
        """The reward minus `invalid_penalty` times the share of rejected results."""
        if not self.params.invalid_penalty:
            return None
        invalid = tensor([float(v) for v in rollouts.meta["invalid"]], dtype=rollouts.reward.dtype)
        return rollouts.reward - self.params.invalid_penalty * invalid

    def check(self, run: Run) -> None:
        refuse_beyond_completion(run, "sub_tokens", self.params.sub_tokens, "this limit has no effect")

    def rollout(self, prompt: Prompt) -> Program:
        return (yield from independent(prompt, lambda k: self._one(prompt, k)))

    def _one(self, prompt: Prompt, number: int) -> Generator[Any, Any, list[Trajectory]]:
        """One rollout: an episode of the main agent, whose environment is its team."""
        p, chat = self.params, prompt.chat
        team = Team(p, self._contract, self._guard, prompt)
        episode, text = Episode(team, prompt.start(), Observation("")), ""
        while not episode.stop:
            spoken, turns = len(episode.trajectory), episode.turns + 1
            main = yield from generate(episode.trajectory)
            text = chat.decode(main.tokens[spoken:])
            team.tokens += len(main) - spoken
            if len(main) > spoken:
                main = main.turn(spoken if episode.turns else 0)
            tasks = (yield from self._tasks(text))[: p.max_calls - len(team.rows)]
            episode = replace(episode, trajectory=main, turns=turns)
            if not tasks or main.finish != "eos":
                episode = replace(episode, stop="done")
            elif turns < prompt.turns(p.max_turns):
                read = yield from team.work(tasks, turns)
                said = "\n".join(p.reply.replace("{result}", result) for result in read)
                episode = replace(episode, observation=Observation(said))
            episode = go_on(prompt, episode, p.max_turns)
        self._report(episode, team, text)
        if p.guard_log and team.guard is not None:
            entry = {"batch": prompt.batch, "training": prompt.training, "prompt": chat.decode(prompt.tokens)}
            entry |= {"rollout": number, "records": [*team.guard.log]}
            written: Called = yield Call(write_log, (p.guard_log, entry), p.timeout, "the guard's log")
            self.log("log_failed", float(bool(written.error)))
        agents = [*(row.noted(agent=p.sub_agent) for row in team.rows), episode.trajectory.noted(agent=p.main_agent)]
        if p.expert is not None:
            judged = yield from self._judgments(team)
            agents = [row.noted(expert=e) for row, e in zip(agents, [*judged, None], strict=True)]
        if self._contract is None:
            return agents
        share = sum(team.invalid) / max(len(team.rows), 1)
        return [row.noted(invalid=v) for row, v in zip(agents, [*team.invalid, share], strict=True)]

    def _judgments(self, team: Team) -> Generator[Any, Any, list[float | None]]:
        """The expert's judgment of each call; None where it failed or is no number."""
        p, found = self.params, list[float | None]()
        asked = [Call(p.expert, pair, p.timeout, "the expert") for pair in zip(team.tasks, team.results, strict=True)]
        for called in (yield asked) if asked else ():
            number = called.value if isinstance(called.value, (int, float)) and not called.error else math.nan
            found.append(float(number) if math.isfinite(number) else None)
            self.log("expert_failed", float(found[-1] is None))
        return found

    def _tasks(self, text: str) -> Generator[Any, Any, list[Any]]:
        """The tasks that a turn delegates; none if that cannot be told."""
        called: Called = yield Call(self.params.parse or delegated, (text,), self.params.timeout, "`parse`")
        found = called.value if called.value is not None else []
        failed = bool(called.error) or not isinstance(found, (list, tuple))
        self.log("parse_failed", float(failed))
        return [] if failed else list(found)

    def _report(self, episode: Episode, team: Team, text: str) -> None:
        turns = episode.turns + team.turns
        for name, value in {
            "calls": len(team.rows),
            "turns": episode.turns,
            "agent_turns": turns,
            "agent_tokens": team.tokens,
            "messages": team.messages,
            "message_density": message_density(team.messages, turns),
            "redundancy": redundancy([*team.results, text]),
            **team.measured(),
        }.items():
            if not math.isnan(value):
                self.log(name, value)


def delegated(text: str) -> list[str]:
    """Tasks in <tool_call> tags."""
    return [task.strip() for task in between(text, "<tool_call>", "</tool_call>")]
