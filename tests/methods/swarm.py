"""What tests of `swarm_sapo` share: a tokenizer of letters, exchanges in memory, packages, and a small host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import PlanRow, Rollouts
from rl_plugins.methods.swarm_sapo import Package, SwarmSapo
from rl_plugins.methods.swarm_sapo.packages import written_files
from rl_plugins.runtime.decide import Decision
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.testing import make_rollouts, make_run, make_tokens, one_step, start_stack

SIZE, GROUPS, PROMPTS, LONGEST = 4, 6, 12, 16
END, BEGIN = 1, 2  # special tokens


class Letters:
    """A token per character; `|` and `^` are special tokens, which are not part of a decoded text. Characters beyond
    ASCII are unknown."""

    eos = (END,)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple({"|": END, "^": BEGIN}.get(c, ord(c) if ord(c) < 128 else 0) for c in text)

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        return "".join(chr(t) for t in tokens if t > BEGIN)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return (BEGIN, *self.encode("\n".join(str(m["content"]) for m in messages)))

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return self.prompt(messages)


class Memory:
    """An exchange in memory, shared by all that are made for one place."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = {} if files is None else files

    def put(self, name: str, data: bytes) -> None:
        self.files[name] = data

    def names(self) -> list[str]:
        return list(self.files)

    def get(self, name: str, most: int) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name][:most]

    def remove(self, name: str) -> None:
        self.files.pop(name, None)


def package(question: str = "3+4", answer: str = "7", completions: Sequence[str] = ("7", "8", "7", "9"), **more: Any):
    finished = more.pop("finished", (True,) * len(completions))
    return Package(question, {"answer": answer, **more}, tuple(completions), tuple(finished))


def send(exchange: Any, sender: str, *packages: Package, batch: int = 0) -> list[str]:
    """Writes packages as a node does; the names of the files."""
    files = written_files(sender, batch, packages, 4_000_000)
    for name, data in files.items():
        exchange.put(name, data)
    return list(files)


class Rows:
    """A dataset of rows with an attribute of their columns."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows, self.column_names = [dict(row) for row in rows], list(rows[0])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return dict(self.rows[i])


def questions(n: int = PROMPTS) -> Rows:
    return Rows([{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(n)])


def accuracy(text: str, columns: Mapping[str, Any]) -> float:
    return float(text == columns["answer"])


def built(shared: Any = None, node: str = "me", **params: Any) -> SwarmSapo:
    values: dict[str, Any] = {"exchange": "swarm", "node": node, "external_groups": 2, **params}
    if shared is not None:
        values["transport"] = lambda where: shared
    return SwarmSapo(build_params(SwarmSapo.Params, values, "swarm_sapo"))


class Node:
    """A host around one method: plans, answers and decides, batch after batch.

    Args:
        shared: the exchange; None: that of the parameter `exchange`.
        answer: (columns, generator) -> text of a completion to an own prompt.
    """

    def __init__(
        self,
        shared: Any,
        node: str = "me",
        answer: Callable[[Mapping[str, Any], np.random.Generator], str] | None = None,
        reward: Callable[[str, Mapping[str, Any]], float] = accuracy,
        seed: int = 0,
        groups: int = GROUPS,
        size: int = SIZE,
        data: Rows | None = None,
        run: Mapping[str, Any] | None = None,
        others: Sequence[Any] = (),
        **params: Any,
    ) -> None:
        self.data, self.size, self.groups, self.reward = data or questions(), size, groups, reward
        self.answer = answer or (lambda columns, rng: str(rng.integers(0, 24)))
        self.method = built(shared, node, **params)
        facts = dict(dataset=self.data, dataset_size=len(self.data), columns=tuple(self.data.column_names))
        facts |= dict(group_size=size, max_completion_length=LONGEST, chat=Letters()) | dict(run or {})
        self.stack = start_stack(self.method, *others, seed=seed, run=make_run(**facts))

    @property
    def state(self) -> dict[str, Any]:
        return self.method.state

    def plan(self) -> list[PlanRow]:
        proposal = [(self.stack.batch * self.groups + i) % len(self.data) for i in range(self.groups)]
        budget = self.groups * self.size
        return list(first_plan(self.stack, proposal, self.size, budget, len(self.data), self.data).rows)

    def generate(self, plan: Sequence[PlanRow]) -> Rollouts:
        rows, texts, rewards, lengths = [], [], [], []
        for row in plan:
            columns = dict(row.edit) if row.prompt_index < 0 else {**self.data[row.prompt_index], **(row.edit or {})}
            rng = np.random.default_rng([self.stack.seed, self.stack.batch, row.group])
            for i in range(row.n + row.spare):
                given = row.given[i] if i < len(row.given) else None
                text = self.answer(columns, rng) if given is None else Letters().decode(given.tokens)
                rows.append((row, columns))
                texts.append(text)
                rewards.append(self.reward(text, columns))
                lengths.append(len(text) + 1 if given is None else len(given.tokens))
        return make_rollouts(
            rewards,
            [row.group for row, _ in rows],
            lengths=lengths,
            prompt_index=[row.prompt_index for row, _ in rows],
            payload=[row.payload for row, _ in rows],
            text=texts,
            meta={"prompt": [columns["prompt"] for _, columns in rows]},
            batch=self.stack.batch,
        )

    def decide(self, rollouts: Rollouts) -> Decision:
        return one_step(self.stack, rollouts, make_tokens(rollouts), budget=self.groups * self.size)

    def batch(self) -> tuple[list[PlanRow], Decision, dict[str, float]]:
        plan = self.plan()
        decision = self.decide(self.generate(plan))
        return plan, decision, combine([self.stack.metrics.take()])


def external(plan: Sequence[PlanRow]) -> list[PlanRow]:
    return [row for row in plan if row.prompt_index < 0]


def trained_groups(decision: Decision) -> list[int]:
    return sorted(set(decision.rollouts.group[decision.trained].tolist()))


def is_external(decision: Decision) -> torch.Tensor:
    return decision.rollouts.prompt_index < 0
