"""M-GRPO (arXiv 2511.13288): rollouts of a main agent that delegates, with one row for it and one for every call."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, tensor

from rl_plugins.errors import ConfigError, shown
from rl_plugins.messages.contracts import Contract, Contracts
from rl_plugins.messages.guard import GuardDecision, LineageGuard
from rl_plugins.messages.lineage import TAG
from rl_plugins.messages.metrics import message_density, redundancy
from rl_plugins.method import Method
from rl_plugins.methods.m_grpo.method import MGrpo
from rl_plugins.params import GIVEN, MethodParams, param
from rl_plugins.requests import Call, Called, Generate, Program, Prompt, Trajectory, together
from rl_plugins.rollouts import Rollouts

_GUARDS = ("speed", "strict")
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

    What M reads of a result can be checked first (docs/agents_safety.md). S's own
    tokens, and so its loss, stay as they were sampled. `contract` validates it, repairs it once, or replaces it by
    the errors; `invalid_penalty` times the share of rejected results is taken from the reward (S's row: its own
    result, M's row: all of its rollout). `guard` checks its claims: a result with a rejected claim goes back to S
    with the evidence at most `guard_retries` times, and S's next answer is a further turn of S's row. After that the
    rejected claims are dropped. If the check itself fails, the results of this rollout are released with a tag.

    Logs: `calls` and `turns` per rollout, `parse_failed`; `message_density`, messages (tasks and results) per turn of
    all agents; `redundancy`, overlap of the words of S's results and M's last turn; with `contract`: `invalid`, share
    of rejected results; with `guard`: `sent_back`, `rejected` and `unverified` claims per rollout, `guard_failed`.

    Raises:
        ConfigError: a parameter out of range, or `contract` makes no contract.

    Source: arXiv 2511.13288; `MrlX-DeepResearch` of the authors' code for the tags.
    """

    name = "m_grpo_rollout"
    paper = MGrpo.paper
    fidelity = "reconstruction"
    brings_columns = ("agent", "invalid")
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
        contract: Callable[..., Any] | None = param(
            None,
            "function contract() that returns the rl_plugins.messages.Contract of a sub-agent's result, for example "
            "rl_plugins.messages.contracts:text_result",
        )
        invalid_penalty: float = param(
            0.0, "loss of reward per share of results that the contract rejects", ge=0, only_if={"contract": GIVEN}
        )
        guard: Literal["off", "speed", "strict"] = param(
            "off",
            "policy of the guard of claims: unknown claims are tagged (speed) or verified (strict). `balanced` "
            "verifies hubs, and the hub here is the main agent, which reads the results",
        )
        guard_facts: str = param(
            "", "name of the column with a list of texts that are known to be true", only_if={"guard": _GUARDS}
        )
        guard_verifier: Callable[..., Any] | None = param(
            None,
            "function guard_verifier(fields) that returns green, yellow or red for fields['claim'], for example "
            "rl_plugins.messages.rules:verify_arithmetic (the default)",
            only_if={"guard": "strict"},
        )
        guard_retries: int = param(
            1, "K, most times a result goes back to its sub-agent", ge=0, only_if={"guard": _GUARDS}
        )
        sub_prompt: str = param("{task}", "user message of the sub-agent; {task} is its task")
        reply: str = param("<tool_response>{result}</tool_response>", "message to the main agent with one {result}")
        max_calls: int = param(4, "most calls of sub-agents in a rollout, each a row", ge=1)
        max_turns: int = param(8, "most turns of the main agent", ge=1)
        sub_tokens: int | None = param(None, "most tokens of a sub-agent's answer; none: the completion length", ge=1)
        timeout: float = param(30.0, "time limit of `parse`, and of one check of the guard, in seconds", gt=0)

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        p = self.params
        self.rows_per_rollout = 1 + p.max_calls
        self._contract: Contract | None = None
        if p.contract is not None:
            self._contract = p.contract()
            if not isinstance(self._contract, Contract):
                raise ConfigError(
                    f"`contract` of m_grpo_rollout returned {shown(self._contract)}. It must return a "
                    f"rl_plugins.messages.Contract."
                )
        self._guard: LineageGuard | None = None
        if p.guard != "off":
            self._guard = LineageGuard(
                p.guard, verifier=p.guard_verifier, retries=p.guard_retries, timeout=p.timeout / 2
            )
        if p.invalid_penalty:
            self.needs = self.needs | {"column:invalid"}
        if p.guard_facts:
            self.needs = self.needs | {f"column:{p.guard_facts}"}

    def rewards(self, rollouts: Rollouts) -> Tensor | None:
        """The reward minus `invalid_penalty` times the share of rejected results."""
        if not self.params.invalid_penalty:
            return None
        invalid = tensor([float(v) for v in rollouts.meta["invalid"]], dtype=rollouts.reward.dtype)
        return rollouts.reward - self.params.invalid_penalty * invalid

    def rollout(self, prompt: Prompt) -> Program:
        return (yield from together([self._one(prompt) for _ in range(prompt.n)]))

    def _one(self, prompt: Prompt) -> Any:
        p, chat = self.params, prompt.chat
        main, turns = prompt.start(), 0
        team = _Team(self, prompt)
        while True:
            start = len(main) if turns else 0
            (made,) = yield Generate(main)
            main, turns = main.add(made), turns + 1
            if made.tokens:
                main = main.turn(start)
            text = chat.decode(made.tokens)
            called: Called = yield Call(p.parse or delegated, (text,), p.timeout, "`parse`")
            self.log("parse_failed", float(bool(called.error)))
            tasks = list(called.value or ())[: p.max_calls - len(team.rows)]
            if not tasks or turns >= prompt.turns(p.max_turns) or made.finish != "eos":
                break
            read = yield from team.work(tasks, turns)
            results = [p.reply.replace("{result}", result) for result in read]
            following = main.observe(chat.reply([{"role": "user", "content": "\n".join(results)}]))
            if not prompt.room(following):
                break
            main = following
        subs = team.rows
        self.log("calls", len(subs))
        self.log("turns", turns)
        self.log("message_density", message_density(team.messages, turns + team.turns))
        overlap = redundancy([*team.results, text])
        if not math.isnan(overlap):
            self.log("redundancy", overlap)
        team.report()
        agents = [*(row.noted(agent=p.sub_agent) for row in subs), main.noted(agent=p.main_agent)]
        if self._contract is None:
            return agents
        share = sum(team.invalid) / max(len(subs), 1)
        return [row.noted(invalid=v) for row, v in zip(agents, [*team.invalid, share], strict=True)]


class _Team:
    """The sub-agents of one rollout.

    Attributes:
        rows: of each call, in order. results: what each said last, before any check.
        invalid: 1.0 for a call whose result the contract rejected.
        turns, messages: of the sub-agents, and between them and the main agent.
    """

    def __init__(self, method: MGrpoRollout, prompt: Prompt) -> None:
        self.method, self.params, self.prompt, self.chat = method, method.params, prompt, prompt.chat
        self.rows: list[Trajectory] = []
        self.results: list[str] = []
        self.invalid: list[float] = []
        self.turns = self.messages = 0
        self.guard, self.guard_failed = method._guard, False
        if self.guard is not None:
            self.guard = self.guard.fresh()
            facts = prompt.columns.get(self.params.guard_facts) if self.params.guard_facts else None
            self.guard.confirm([facts] if isinstance(facts, str) else [str(f) for f in facts or ()])
        kinds = {} if method._contract is None else {"sub": (method._contract,)}
        self.contracts = Contracts(kinds)

    def work(self, tasks: Sequence[Any], turn: int) -> Generator[Any, Any, list[str]]:
        """What the main agent reads of the results of these tasks."""
        p, chat = self.params, self.chat
        contexts = [
            Trajectory(chat.prompt([{"role": "user", "content": p.sub_prompt.replace("{task}", str(t))}]))
            for t in tasks
        ]
        answers = yield [Generate(c, max_tokens=p.sub_tokens) for c in contexts]
        made = [c.add(a) for c, (a,) in zip(contexts, answers, strict=True)]
        rows = [row.turn(0) if len(row) else row for row in made]
        said = [_result(chat.decode(row.tokens)) for row in rows]
        self.turns += len(rows)
        self.messages += 2 * len(rows)
        packets = [self._packet(text) for text in said]
        read = [text for text, _ in packets]
        if self.guard is not None:
            waiting = [i for i, (_, valid) in enumerate(packets) if valid]
            for attempt in range(p.guard_retries + 1):
                decisions = yield from self._check([read[i] for i in waiting], attempt, turn)
                back: dict[int, Trajectory] = {}  # those that answer again
                closed = []  # those that cannot
                for i, decision in zip(waiting, decisions, strict=True):
                    if decision.released is not None:
                        read[i] = decision.released
                    elif (asked := self._asked_again(rows[i], decision.feedback)) is not None:
                        back[i] = asked
                    else:
                        closed.append(i)
                last = yield from self._check([read[i] for i in closed], p.guard_retries, turn)
                for i, decision in zip(closed, last, strict=True):
                    read[i] = decision.released or ""
                if not back:
                    break
                answers = yield [Generate(row, max_tokens=p.sub_tokens) for row in back.values()]
                waiting = []
                for (i, row), (answer,) in zip(back.items(), answers, strict=True):
                    rows[i] = row.add(answer)
                    if answer.tokens:
                        rows[i] = rows[i].turn(len(row))
                    said[i] = _result(chat.decode(answer.tokens))
                    packets[i] = self._packet(said[i])
                    read[i] = packets[i][0]
                    if packets[i][1]:
                        waiting.append(i)
                self.turns += len(back)
                self.messages += 2 * len(back)
        self.rows += rows
        self.results += said
        self.invalid += [float(not valid) for _, valid in packets]
        return read

    def _packet(self, text: str) -> tuple[str, bool]:
        """What the contract lets through, and whether it is the result."""
        contract = self.method._contract
        if contract is None:
            return text, True
        checked = self.contracts.check("sub", contract.name, text)
        if checked.outcome == "rejected":
            return f"[rejected: {'; '.join(checked.errors)}]", False
        packet = checked.packet
        return packet if isinstance(packet, str) else json.dumps(packet, ensure_ascii=False), True

    def _check(self, messages: list[str], attempt: int, turn: int) -> Generator[Any, Any, list[GuardDecision]]:
        if not messages:
            return []
        if not self.guard_failed:
            p = self.params
            arguments = (self.guard, p.sub_agent, p.main_agent, messages, attempt, turn)
            called: Called = yield Call(_checked, arguments, p.timeout, "the guard")
            if not called.error:
                return list(called.value)
            self.guard_failed = True  # its thread may still be at work, so this guard is not used again
        return [GuardDecision(f"{TAG} {message}", "", {}) for message in messages]

    def _asked_again(self, row: Trajectory, feedback: str) -> Trajectory | None:
        """The row with the feedback; None if the sub-agent cannot answer it."""
        if row.finish != "eos":
            return None
        following = row.observe(self.chat.reply([{"role": "user", "content": feedback}]))
        return following if self.prompt.room(following) else None

    def report(self) -> None:
        log = self.method.log
        if self.method._contract is not None and self.rows:
            log("invalid", sum(self.invalid) / len(self.rows))
        if self.guard is not None:
            log("guard_failed", float(self.guard_failed))
            log("sent_back", self.guard.counts["sent_back"])
            log("rejected", self.guard.counts["red"])
            log("unverified", self.guard.counts["yellow"])


async def _checked(
    guard: LineageGuard, sender: str, receiver: str, messages: list[str], attempt: int, turn: int
) -> list[GuardDecision]:
    return [await guard.check(sender, receiver, m, attempt=attempt, round=turn) for m in messages]


def delegated(text: str) -> list[str]:
    """Tasks in <tool_call> tags."""
    return [task.strip() for task in _CALL.findall(text)]


def _result(text: str) -> str:
    found = _RESULT.findall(text)
    return found[-1].strip() if found else text
