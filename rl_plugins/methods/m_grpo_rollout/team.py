"""The sub-agents of a rollout of M-GRPO: what they answer, and what the main agent reads of it."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plugins import Call, Generate, Prompt, Trajectory
from rl_plugins.core.requests import Called
from rl_plugins.kit.prompts import as_text
from rl_plugins.kit.texts import between
from rl_plugins.tools.messages.contracts import Contract, Contracts
from rl_plugins.tools.messages.guard import GuardDecision, LineageGuard
from rl_plugins.tools.messages.lineage import TAG


@dataclass
class _Result:
    """What a sub-agent was asked and answers.

    Args:
        sender: its name.
        row: its conversation.
        said: what it said last.
        read: what the main agent reads of that.
        valid: the contract lets it through.
    """

    sender: str
    row: Trajectory
    said: str = ""
    read: str = ""
    valid: bool = True


class Team:
    """The sub-agents of one rollout.

    Args:
        params: of `MGrpoRollout`.
        contract: of a result; None: any text.
        guard: whose settings this team's own guard has; None: no guard.
        prompt: what the rollout answers.

    Attributes:
        rows: of each call, in order. tasks: of each. results: what each said last, before any check.
        invalid: 1.0 for a call whose result the contract rejected.
        turns: of the sub-agents. tokens: of all agents. messages: between the sub-agents and the main agent.
        guard: of this rollout. guard_failed: it raised or hung, and is not asked any more.
    """

    def __init__(self, params: Any, contract: Contract | None, guard: LineageGuard | None, prompt: Prompt) -> None:
        self.params, self.contract, self.prompt, self.chat = params, contract, prompt, prompt.chat
        self.rows: list[Trajectory] = []
        self.tasks: list[str] = []
        self.results: list[str] = []
        self.invalid: list[float] = []
        self.turns = self.tokens = self.messages = 0
        self.guard, self.guard_failed = None if guard is None else guard.fresh(), False
        if self.guard is not None:
            facts = prompt.columns.get(params.guard_facts) if params.guard_facts else None
            self.guard.confirm([as_text(f) for f in ([facts] if isinstance(facts, (str, bytes)) else facts or ())])
        self.contracts = Contracts({} if contract is None else {"sub": (contract,)})

    def work(self, tasks: Sequence[Any], turn: int) -> Generator[Any, Any, list[str]]:
        """What the main agent reads of the results of these tasks."""
        p, results = self.params, []
        for number, task in enumerate(tasks, start=len(self.rows) + 1):
            asked = {"role": "user", "content": p.sub_prompt.replace("{task}", as_text(task))}
            results.append(_Result(f"{p.sub_agent} {number}", Trajectory(self.chat.prompt([asked]))))
        yield from self._answer(results)
        if self.guard is not None:
            yield from self._guarded(results, turn)
        self.rows += [r.row for r in results]
        self.tasks += [as_text(task) for task in tasks]
        self.results += [r.said for r in results]
        self.invalid += [float(not r.valid) for r in results]
        return [r.read for r in results]

    def _answer(self, results: Sequence[_Result]) -> Generator[Any, Any, None]:
        """Each sub-agent speaks: its answer to a message is a turn of its row."""
        answers = yield [Generate(r.row, max_tokens=self.params.sub_tokens) for r in results]
        for r, (answer,) in zip(results, answers, strict=True):
            start, r.row = len(r.row), r.row.add(answer)
            if answer.tokens:
                r.row = r.row.turn(start)
            r.said = result_of(self.chat.decode(answer.tokens))
            r.read, r.valid = self._packet(r.said)
            self.tokens += len(answer.tokens)
        self.turns += len(results)
        self.messages += 2 * len(results)

    def _guarded(self, results: Sequence[_Result], turn: int) -> Generator[Any, Any, None]:
        """The guard checks valid results. What it sends back is answered again, at most `guard_retries` times."""
        waiting, last = [r for r in results if r.valid], self.params.guard_retries
        for attempt in range(last + 1):
            back, closed = [], []
            decisions = yield from self._check(waiting, attempt, turn)
            for r, decision in zip(waiting, decisions, strict=True):
                if decision.released is not None:
                    r.read = decision.released
                elif (asked := self._asked_again(r.row, decision.feedback)) is not None:
                    r.row = asked
                    back.append(r)
                else:
                    closed.append(r)
            for r, decision in zip(closed, (yield from self._check(closed, last, turn)), strict=True):
                r.read = decision.released or ""
            if not back:
                return
            yield from self._answer(back)
            waiting = [r for r in back if r.valid]

    def _packet(self, text: str) -> tuple[str, bool]:
        """What the contract lets through, and whether it is the result."""
        if self.contract is None:
            return text, True
        checked = self.contracts.check("sub", self.contract.name, text)
        if checked.outcome == "rejected":
            return f"[rejected: {'; '.join(checked.errors)}]", False
        packet = checked.packet
        return packet if isinstance(packet, str) else json.dumps(packet, ensure_ascii=False), True

    def _check(self, results: Sequence[_Result], attempt: int, turn: int) -> Generator[Any, Any, list[GuardDecision]]:
        """What becomes of results."""
        if not results:
            return []
        if not self.guard_failed:
            p, messages = self.params, [(r.sender, r.read) for r in results]
            arguments = (self.guard, p.main_agent, messages, attempt, turn)
            called: Called = yield Call(_checked, arguments, p.timeout * len(messages), "the guard")
            if not called.error:
                return list(called.value)
            self.guard_failed = True  # its thread may still be at work, so this guard is not used again
        return [GuardDecision(f"{TAG} {r.read}", "", {}) for r in results]

    def _asked_again(self, row: Trajectory, feedback: str) -> Trajectory | None:
        """The row with the feedback; None if the sub-agent cannot answer it."""
        if row.finish != "eos":
            return None
        following = row.observe(self.chat.reply([{"role": "user", "content": feedback}]))
        return following if self.prompt.room(following) else None

    def measured(self) -> dict[str, float]:
        """What the contract and the guard did, for the logs."""
        found: dict[str, float] = {}
        if self.contract is not None and self.rows:
            found["invalid"] = sum(self.invalid) / len(self.rows)
        if self.guard is not None:
            counts = self.guard.counts
            found |= {"guard_failed": float(self.guard_failed), "verified": counts["verified"]}
            found |= {"calls_failed": counts["failed"], "sent_back": counts["sent_back"]}
            found |= {"rejected": counts["red"], "unverified": counts["yellow"]}
        return found


async def _checked(
    guard: LineageGuard, receiver: str, messages: list[tuple[str, str]], attempt: int, turn: int
) -> list[GuardDecision]:
    return [await guard.check(sender, receiver, text, attempt=attempt, round=turn) for sender, text in messages]


def result_of(text: str) -> str:
    found = between(text, "<result>", "</result>")
    return found[-1].strip() if found else text
