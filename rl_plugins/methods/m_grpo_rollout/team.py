"""The sub-agents of a rollout of M-GRPO: what they answer, and what the main agent reads of it."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from typing import Any

from rl_plugins import Call, Generate, Prompt, Trajectory
from rl_plugins.core.requests import Called
from rl_plugins.kit.texts import between
from rl_plugins.tools.messages.contracts import Contract, Contracts
from rl_plugins.tools.messages.guard import GuardDecision, LineageGuard
from rl_plugins.tools.messages.lineage import TAG


class Team:
    """The sub-agents of one rollout.

    Args:
        params: of `MGrpoRollout`.
        contract: of a result; None: any text.
        guard: whose settings this team's own guard has; None: no guard.
        prompt: what the rollout answers.

    Attributes:
        rows: of each call, in order. results: what each said last, before any check.
        invalid: 1.0 for a call whose result the contract rejected.
        turns, tokens: of the sub-agents. messages: between them and the main agent.
        guard: of this rollout. guard_failed: it raised or hung, and is not asked any more.
    """

    def __init__(self, params: Any, contract: Contract | None, guard: LineageGuard | None, prompt: Prompt) -> None:
        self.params, self.contract, self.prompt, self.chat = params, contract, prompt, prompt.chat
        self.rows: list[Trajectory] = []
        self.results: list[str] = []
        self.invalid: list[float] = []
        self.turns = self.tokens = self.messages = 0
        self.guard, self.guard_failed = None if guard is None else guard.fresh(), False
        if self.guard is not None:
            facts = prompt.columns.get(params.guard_facts) if params.guard_facts else None
            self.guard.confirm([facts] if isinstance(facts, str) else [str(f) for f in facts or ()])
        self.contracts = Contracts({} if contract is None else {"sub": (contract,)})

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
        said = [result_of(chat.decode(row.tokens)) for row in rows]
        self._count([len(answer.tokens) for (answer,) in answers])
        packets = [self._packet(text) for text in said]
        read = [text for text, _ in packets]
        if self.guard is not None:
            waiting = [i for i, (_, valid) in enumerate(packets) if valid]
            for attempt in range(p.guard_retries + 1):
                decisions = yield from self._check({i: read[i] for i in waiting}, attempt, turn)
                back: dict[int, Trajectory] = {}  # those that answer again
                closed = []  # those that cannot
                for i, decision in zip(waiting, decisions, strict=True):
                    if decision.released is not None:
                        read[i] = decision.released
                    elif (asked := self._asked_again(rows[i], decision.feedback)) is not None:
                        back[i] = asked
                    else:
                        closed.append(i)
                last = yield from self._check({i: read[i] for i in closed}, p.guard_retries, turn)
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
                    said[i] = result_of(chat.decode(answer.tokens))
                    packets[i] = self._packet(said[i])
                    read[i] = packets[i][0]
                    if packets[i][1]:
                        waiting.append(i)
                self._count([len(answer.tokens) for (answer,) in answers])
        self.rows += rows
        self.results += said
        self.invalid += [float(not valid) for _, valid in packets]
        return read

    def _count(self, tokens: Sequence[int]) -> None:
        """Turns of these lengths: each answers a message and is one."""
        self.turns += len(tokens)
        self.tokens += sum(tokens)
        self.messages += 2 * len(tokens)

    def _packet(self, text: str) -> tuple[str, bool]:
        """What the contract lets through, and whether it is the result."""
        if self.contract is None:
            return text, True
        checked = self.contracts.check("sub", self.contract.name, text)
        if checked.outcome == "rejected":
            return f"[rejected: {'; '.join(checked.errors)}]", False
        packet = checked.packet
        return packet if isinstance(packet, str) else json.dumps(packet, ensure_ascii=False), True

    def _check(self, results: dict[int, str], attempt: int, turn: int) -> Generator[Any, Any, list[GuardDecision]]:
        """What becomes of results, by their place among those of this turn."""
        if not results:
            return []
        if not self.guard_failed:
            p, first = self.params, len(self.rows) + 1
            messages = [(f"{p.sub_agent} {first + i}", text) for i, text in results.items()]
            arguments = (self.guard, p.main_agent, messages, attempt, turn)
            called: Called = yield Call(_checked, arguments, p.timeout * len(messages), "the guard")
            if not called.error:
                return list(called.value)
            self.guard_failed = True  # its thread may still be at work, so this guard is not used again
        return [GuardDecision(f"{TAG} {text}", "", {}) for text in results.values()]

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
