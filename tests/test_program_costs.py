"""Every built-in rollout program on the fake engine: the rows and tokens the runtime counts are those of the engine's
own record of what it was asked for and what it gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from cases import case_of
from test_contract import BUILT_IN

from rl_plugins.core.method import Bundle, Method
from rl_plugins.core.requests import Generate, Generated, Prompt
from rl_plugins.runtime import registry
from rl_plugins.runtime.programs import Running
from rl_plugins.testing.contract import programs as contract
from rl_plugins.testing.contract.kit import Kit
from rl_plugins.testing.engine import TableEngine, make_prompt


def programs() -> list[str]:
    found = [(name, registry.load(name)) for name in BUILT_IN]
    text = [(name, cls) for name, cls in found if not isinstance(cls, Bundle) and {*cls.hosts} & {"trl", "verl"}]
    return [name for name, cls in text if "rollout" in cls.claims()]


@dataclass
class Record:
    """What an engine did for one prompt: (length of the trajectory's prompt, context, new tokens) of every sample."""

    samples: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Found by looking for a beginning, without the books of the trajectories: a sample continues the longest
        earlier end of a row that its context begins with, not inside of its prompt, if no other has continued that."""
        ends: list[tuple[int, ...]] = []
        count = 0
        for prompt, context, new in self.samples:
            own = [e for e in ends if len(e) >= prompt and context[: len(e)] == e]
            if own:
                ends.remove(max(own, key=len))
            else:
                count += 1
            ends.append((*context, *new))
        return count


class Recorded(TableEngine):
    """Writes down what it did."""

    def generate(self, requests: Sequence[tuple[Prompt, Generate]]) -> list[list[Generated]]:
        made = super().generate(requests)
        for (prompt, request), many in zip(requests, made, strict=True):
            record = RECORDS.setdefault(id(prompt), Record())
            begun = request.trajectory
            record.samples += [(len(begun.prompt), begun.context, one.tokens) for one in many]
        return made


RECORDS: dict[int, Record] = {}


@pytest.mark.parametrize("name", programs())
def test_rows_of_every_program_are_those_of_the_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ordinary batches, and in those where rewards are missing, room is scarce or the engine is interrupted."""
    run, seen = contract.run, []

    def watched(running: Any, engine: Any) -> None:
        RECORDS.clear()
        run(running, engine)
        for program in running:
            record = RECORDS.get(id(program.prompt), Record())
            returned = sum(map(len, program.rows))
            seen.append((program.rows_made, record.rows, returned, len(record.samples)))

    monkeypatch.setattr(contract, "run", watched)
    monkeypatch.setattr(contract, "TableEngine", Recorded)
    cls = registry.load(name)
    assert isinstance(cls, type) and issubclass(cls, Method)
    case = case_of(name)
    kit = Kit(cls, case.params, case.prepare, case.rows or ())
    for check in (contract.check_programs, contract.check_odd_engines):
        check(kit)
    assert not kit.problems and len(seen) > 10
    assert [made for made, _, _, _ in seen] == [own for _, own, _, _ in seen]
    assert all(made <= samples for made, _, _, samples in seen)
    assert sum(made for made, *_ in seen) > 0


def test_every_program_is_among_them() -> None:
    assert {"latr", "echo_tree", "aepo_rollout", "cleaner", "scope", "rtv_pdr", "turn_control", "arrol"} <= {
        *programs()
    }
    assert {"m_grpo_rollout", "ui_s1_rollout"} <= {*programs()}


class Twice(Method):
    """Samples twice as many as it keeps."""

    name = "twice"

    def rollout(self, prompt: Prompt) -> Any:
        made = yield Generate(prompt.start(), n=2 * prompt.n)
        return [prompt.start().add(g) for g in made[: prompt.n]]


def test_what_is_thrown_away_was_made() -> None:
    engine = TableEngine({">": {"a": 1.0}, "a": {"a": 0.5, "<eos>": 0.5}})
    program = Running(Twice(), make_prompt(engine.chat, "x", n=4))
    contract.run([program], engine)
    assert program.rows is not None and len(program.rows) == 4
    assert program.rows_made == 8 and engine.decoded > sum(len(row) for (row,) in program.rows)
