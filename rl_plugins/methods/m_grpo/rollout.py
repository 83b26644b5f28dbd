"""M-GRPO (arXiv 2511.13288): rollouts of a main agent that delegates, with one row for it and one for every call."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_plugins.method import Method
from rl_plugins.methods.m_grpo.method import MGrpo
from rl_plugins.params import MethodParams, param
from rl_plugins.requests import Call, Called, Generate, Program, Prompt, Trajectory, together

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_RESULT = re.compile(r"<result>(.*?)</result>", re.DOTALL)


class MGrpoRollout(Method):
    """Makes rollouts of a main agent and its sub-agents with one policy. Name it before `m_grpo`, which trains them.

    Reconstruction: the authors' loop runs on two servers with their own search tools. Here both agents are the policy
    of the run, and a sub-agent answers in one message.

    The main agent M writes turn by turn. Each turn may call sub-agents, at most `max_calls` in a rollout: `parse` finds
    their tasks in its text (default: the text between <tool_call> and </tool_call>). A sub-agent S reads its own
    conversation, `sub_prompt` with the task in it, and its completion is a row of its own. The text between <result>
    and </result>, or else the whole completion, goes back to M as a message that M reads without training on it. Calls
    of a turn are generated together. The rollout ends with a turn without a call, after `max_turns`, or when nothing
    more fits.

    Symbols: rows of a rollout are S's in the order of the calls, and M's last (the row an evaluation grades);
    `meta["agent"]` is `main_agent` or `sub_agent` (the column `m_grpo` reads, also visible to reward functions). M's
    row never contains S's tokens as its own and vice versa: S's result appears in M's row as observed text.

    Logs: `calls` and `turns` per rollout, `parse_failed`.

    Raises:
        ConfigError: a parameter out of range.

    Source: arXiv 2511.13288; `MrlX-DeepResearch` of the authors' code for the tags.
    """

    name = "m_grpo_rollout"
    paper = MGrpo.paper
    fidelity = "reconstruction"
    brings_columns = ("agent",)
    does = "Makes rollouts of a main agent that delegates, with one row for it and one per call"
    problems = ("agents",)
    goes_with = {
        "m_grpo": "Trains the rows that this rollout makes.",
    }
    use_when = "You use `m_grpo` and have no agent loop of your own that makes the rows of main agent and sub-agents."
    avoid_when = "Sub-agents need tools or another policy: write an agent loop that fills the column `agent` then."
    cost = (
        "One generation per turn of the main agent and one per call. A rollout may take 1 + `max_calls` (5) rows, "
        "so a batch holds that many times fewer rollouts. No feature of the engine is needed."
    )
    needs = frozenset({"chat_template"})
    in_eval = ("rollout",)

    @dataclass(frozen=True)
    class Params(MethodParams):
        main_agent: str = param("main", "name of the main agent in the column `agent`")
        sub_agent: str = param("sub", "name of the sub-agents in the column `agent`")
        parse: Callable[..., Any] | None = param(
            None,
            "function parse(text) that returns the list of tasks a turn delegates, for "
            "example rl_plugins.methods.m_grpo.rollout:delegated (the default: texts in "
            "<tool_call> tags)",
        )
        sub_prompt: str = param("{task}", "user message of the sub-agent; {task} is its task")
        reply: str = param("<tool_response>{result}</tool_response>", "message to the main agent with one {result}")
        max_calls: int = param(4, "most calls of sub-agents in a rollout, each a row", ge=1)
        max_turns: int = param(8, "most turns of the main agent", ge=1)
        sub_tokens: int | None = param(None, "most tokens of a sub-agent; none: the completion length", ge=1)
        timeout: float = param(30.0, "time limit of one call of `parse`, in seconds", gt=0)

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        self.rows_per_rollout = 1 + self.params.max_calls

    def rollout(self, prompt: Prompt) -> Program:
        return (yield from together([self._one(prompt) for _ in range(prompt.n)]))

    def _one(self, prompt: Prompt) -> Any:
        p, chat = self.params, prompt.chat
        main, turns = prompt.start(), 0
        subs: list[Trajectory] = []
        while True:
            start = len(main) if turns else 0
            (made,) = yield Generate(main)
            main, turns = main.add(made), turns + 1
            if made.tokens:
                main = main.turn(start)
            text = chat.decode(made.tokens)
            called: Called = yield Call(p.parse or delegated, (text,), p.timeout, "`parse`")
            self.log("parse_failed", float(bool(called.error)))
            tasks = list(called.value or ())[: p.max_calls - len(subs)]
            if not tasks or turns >= prompt.turns(p.max_turns) or made.finish != "eos":
                break
            contexts = [
                Trajectory(chat.prompt([{"role": "user", "content": p.sub_prompt.replace("{task}", str(t))}]))
                for t in tasks
            ]
            answers = yield [Generate(c, max_tokens=p.sub_tokens) for c in contexts]
            rows = [c.add(a) for c, (a,) in zip(contexts, answers, strict=True)]
            subs += [row.turn(0) if len(row) else row for row in rows]
            results = [p.reply.replace("{result}", _result(chat.decode(row.tokens))) for row in rows]
            following = main.observe(chat.reply([{"role": "user", "content": "\n".join(results)}]))
            if not prompt.room(following):
                break
            main = following
        self.log("calls", len(subs))
        self.log("turns", turns)
        return [*(row.noted(agent=p.sub_agent) for row in subs), main.noted(agent=p.main_agent)]


def delegated(text: str) -> list[str]:
    """Tasks in <tool_call> tags."""
    return [task.strip() for task in _CALL.findall(text)]


def _result(text: str) -> str:
    found = _RESULT.findall(text)
    return found[-1].strip() if found else text
