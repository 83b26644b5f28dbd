"""Hooks that misbehave, driven through the runtime: each must be refused with the names of the method and of the hook,
or be legal.

    python tests/faults/hooks.py            # the table
    python tests/faults/hooks.py --others   # and every case that is neither refused by name nor known to be legal

A case is one hook that does one wrong thing: it returns something else than it should, raises something, logs nonsense,
or changes one of the things it was given.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import math
import random
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.errors import MethodError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.groups import Groups
from rl_plugins.core.method import HOOKS, Method
from rl_plugins.core.requests import Call, Generate, Generated, Score, Scored, Trajectory, together
from rl_plugins.core.rollouts import Admission, Completion, Plan, PlanRow, Rows, Shape, TurnTable, Update
from rl_plugins.runtime.carry_over import Group, admit, to_plain
from rl_plugins.runtime.decide import decide, select_rows, teacher_prompts
from rl_plugins.runtime.immutability import checking
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import evaluation_plan, first_plan
from rl_plugins.runtime.programs import Running, run
from rl_plugins.runtime.rounds import Rounds
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.update import before_update, check_gradient, regularizer, surrogate
from rl_plugins.testing import make_rollouts, make_run, make_terms, make_tokens
from rl_plugins.testing.engine import make_prompt

NAN, INF = math.nan, math.inf
ROWS = 8
Hook = Callable[..., Any]


# ---- one call of each hook, as the adapters make it


def bad(hook: str, function: Hook) -> MethodStack:
    """A started stack with one method whose `hook` is `function(self, *args)`."""
    cls = type("Bad", (Method,), {"name": "bad", "needs": {"tokens"}, hook: function})
    stack = MethodStack([cls()])
    stack.vocabulary = 50
    return stack


def batch() -> Any:
    """Rollouts with everything in them that a host can give."""
    n = torch.arange(ROWS)
    turns = TurnTable(n, torch.zeros(ROWS, dtype=torch.int64), [{"at": [i]} for i in range(ROWS)], n.double(), n >= 0)
    return make_rollouts(
        [0.0, 1.0, 0.5, 0.25] * 2,
        turns=turns,
        text=[f"text {i}" for i in range(ROWS)],
        raw_text=[f"raw {i}" for i in range(ROWS)],
        messages=[[{"role": "assistant", "content": "x"}] for _ in range(ROWS)],
        meta={"answer": ["a"] * ROWS, "numbers": [[1, 2] for _ in range(ROWS)]},
        payload=[{"hint": [i]} for i in range(ROWS)],
    )


def drive_batch(stack: MethodStack) -> None:
    rollouts = batch()
    tokens = make_tokens(rollouts)
    stack.stats = {"x": 1.0}
    d = decide(stack, rollouts, tokens, None, grpo_advantages, ROWS)
    for value in (d.advantages, d.row_advantages, *d.row_columns.values(), *d.token_columns.values()):
        assert bool(value.float().isfinite().all()), "NaN or infinity goes on to the host"
    combine([stack.metrics.take()])


def drive_teacher(stack: MethodStack) -> None:
    for prompt in teacher_prompts(stack, select_rows(stack, batch())) or ():
        for message in prompt if isinstance(prompt, list) else ():
            message["role"].lower(), message["content"]
        assert prompt is None or len(prompt) > 0
    combine([stack.metrics.take()])


def drive_plan(stack: MethodStack) -> None:
    plan = first_plan(stack, range(4), 2, ROWS, 20, None)
    assert plan.generated <= 64 * ROWS, "more is generated than a machine holds"
    torch.tensor([[r.group, r.prompt_index] for r in plan.rows])


def drive_round(stack: MethodStack) -> None:
    stack.methods[0].rounds = True  # type: ignore[misc]
    rounds = Rounds(stack, [PlanRow(i, i, 1, payload={"p": [i]}) for i in range(4)], 2, ROWS, 20)
    rows = rounds.more(torch.arange(4), torch.arange(4).double())
    assert sum(r.n + r.spare for r in rows) <= 64 * ROWS, "more is generated than a machine holds"


def drive_evaluation(stack: MethodStack) -> None:
    type(stack.methods[0]).in_eval = ("plan",)
    evaluation_plan(stack, [PlanRow(-1, i, 2, edit={"prompt": "p", "list": [i]}) for i in range(4)])


def drive_admit(stack: MethodStack) -> None:
    begun = Trajectory((1, 2), (3,), (0,), (-1.0,), (0,), "abort")
    stack.carried = [to_plain(Group(PlanRow(10 + i, i, 2), 0, (begun, begun))) for i in range(3)]
    groups = admit(stack, range(4), 4, 2, 20, None)
    assert len(groups) <= 64, "more is generated than a machine holds"
    combine([stack.metrics.take()])


def update_rows() -> Rows:
    n = torch.arange(4)
    return Rows(n // 2, n + 1, -n.double(), -n.double(), -n.double(), {"mine": n.double()})


def drive_before_update(stack: MethodStack) -> None:
    asked = before_update(stack, [update_rows()], 0)
    assert math.isfinite(asked.lr_scale * 1e-3 * 1e30), "the weights become infinite"
    for column in asked.columns.values():
        assert column.dtype == torch.float32 and bool(column.isfinite().all()), "NaN or infinity goes on to the loss"


def loss(of: Callable[[MethodStack, Any], Tensor | None]) -> Callable[[MethodStack], None]:
    def drive(stack: MethodStack) -> None:
        terms = make_terms(columns={"mine": torch.ones(4, 6)})
        value = of(stack, terms)
        assert value is not None
        total = torch.where(terms.mask > 0, value, 0.0).sum() + 0.0 * terms.logprobs.sum()
        total.backward()
        assert terms.logprobs.grad is not None
        check_gradient(stack, float(terms.logprobs.grad.norm()))
        combine([stack.metrics.take()])

    return drive


class Engine:
    """Answers every request at once."""

    def generate(self, requests: Any) -> list[list[Generated]]:
        for prompt, r in requests:
            torch.tensor([*r.trajectory.context, int(r.max_tokens), int(r.top)])
            assert isinstance(r.n, int) and all(isinstance(s, str) for s in r.stop)
            assert r.temperature is None or float(r.temperature) >= 0
            assert len(r.trajectory.tokens) <= prompt.max_tokens and r.n <= 1000
        return [[Generated((7, 8), (-1.0, -2.0), "eos")] * r.n for _, r in requests]

    def score(self, requests: Any) -> list[Scored]:
        for _, trajectory in requests:
            torch.tensor(trajectory.context)
        return [Scored({"r": 1.0}, 1.0) for _ in requests]

    def anybody(self, wants: bool) -> bool:
        return wants


class Chat:
    eos = (1,)

    def prompt(self, messages: Any) -> tuple[int, ...]:
        return (5, 6)


def drive_rollout(stack: MethodStack) -> None:
    prompt = make_prompt(Chat(), "x", n=2, max_tokens=8, columns={"prompt": [{"content": "x"}], "list": [1]})
    prompt = dataclasses.replace(prompt, payload={"hint": [1]}, reward_names=("r",))
    program = Running(stack.methods[0], prompt, stack.vocabulary)
    run([program], Engine())
    for row in (row for rows in program.rows or () for row in rows):
        for name, values in (("tokens", row.tokens), ("kinds", row.kinds), ("versions", row.versions)):
            torch.tensor(values, dtype=torch.int64) if values else name
        torch.tensor([float(p) for p in row.logprobs])
        assert all(0 <= t < 50 for t in row.tokens) and row.finish in ("", "eos", "stop", "length", "abort")
        hash(row.group)
        dict(row.meta)
        assert row.rewards is None or all(isinstance(v, float) for v in row.rewards.values())


DRIVES: dict[str, tuple[str, Callable[[MethodStack], None]]] = {
    "start": ("start", lambda stack: stack.start(make_run(dataset=[{"prompt": "x"}]))),
    "select_prompts": ("select_prompts", drive_plan),
    "plan": ("plan", drive_plan),
    "plan, round 1": ("plan", drive_round),
    "plan, evaluation": ("plan", drive_evaluation),
    "admit": ("admit", drive_admit),
    "rollout": ("rollout", drive_rollout),
    "rewards": ("rewards", drive_batch),
    "select": ("select", drive_batch),
    "teacher_prompts": ("teacher_prompts", drive_teacher),
    "advantages": ("advantages", drive_batch),
    "shape": ("shape", drive_batch),
    "observe": ("observe", drive_batch),
    "before_update": ("before_update", drive_before_update),
    "policy_loss": ("policy_loss", loss(surrogate)),
    "regularize": ("regularize", loss(regularizer)),
}


# ---- what a hook may do


@dataclass(frozen=True)
class Case:
    """One misbehaving hook.

    Args:
        place: key of `DRIVES`.
        what: it does.
        function: the hook.
    """

    place: str
    what: str
    function: Hook


class Hostile:
    """Raises wherever somebody looks at it."""

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)

    def __len__(self) -> int:
        raise ZeroDivisionError("len")

    def __iter__(self) -> Any:
        raise ZeroDivisionError("iter")

    def __repr__(self) -> str:
        raise ZeroDivisionError("repr")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("array")

    def __float__(self) -> float:
        raise ZeroDivisionError("float")

    def __reduce__(self) -> Any:
        raise ZeroDivisionError("pickle")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def lazy() -> Iterator[int]:
    yield 1
    raise ZeroDivisionError("lazy")


async def later() -> int:
    return 1


async def stream() -> Any:
    yield 1


def full(value: float, n: int = ROWS, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.full((n,), value, dtype=dtype)


ANYTHING: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "a number": lambda: 3.5,
    "NaN": lambda: NAN,
    "a large integer": lambda: 10**400,
    "text": lambda: "good",
    "bytes": lambda: b"good",
    "an empty list": list,
    "a list of text": lambda: ["a"] * ROWS,
    "a list of None": lambda: [None] * ROWS,
    "nested lists": lambda: [[[1.0]]] * ROWS,
    "ragged lists": lambda: [[1.0], [1.0, 2.0]] * 4,
    "a list of large integers": lambda: [10**400] * ROWS,
    "a dict": lambda: {"reward": 1.0},
    "a set": lambda: {1, 2},
    "a class": lambda: Plan,
    "a function": lambda: full,
    "a generator": lazy,
    "an async generator": stream,
    "a coroutine of a number": later,
    "an object that raises": Hostile,
    "a scalar tensor": lambda: torch.tensor(1.0),
    "an empty tensor": lambda: torch.zeros(0),
    "a tensor one too long": lambda: full(0.5, ROWS + 1),
    "a tensor one too short": lambda: full(0.5, ROWS - 1),
    "a column": lambda: full(0.5)[:, None],
    "a complex tensor": lambda: full(0.5, dtype=torch.complex64),
    "a sparse tensor": lambda: full(0.5).to_sparse(),
    "a tensor on no device": lambda: torch.empty(ROWS, device="meta"),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "a numpy array of objects": lambda: np.array([object()] * ROWS),
    "a numpy array of text": lambda: np.array(["a"] * ROWS),
    "an exception": lambda: ValueError("returned, not raised"),
}
NUMBERS: dict[str, Callable[[], Any]] = {
    "NaN in one": lambda: torch.where(torch.arange(ROWS) == 3, NAN, 1.0).double(),
    "all NaN": lambda: full(NAN),
    "infinity": lambda: full(INF),
    "one minus infinity": lambda: torch.where(torch.arange(ROWS) == 3, -INF, 1.0).double(),
    "1e38": lambda: torch.arange(ROWS).double() * 1e38,
    "1e300": lambda: torch.arange(ROWS).double() * 1e300,
    "negative": lambda: full(-1.0),
    "float16": lambda: full(0.5, dtype=torch.float16),
    "integers": lambda: torch.arange(ROWS),
    "bool": lambda: torch.arange(ROWS) > 3,
    "with a graph": lambda: full(1.0).requires_grad_() * 2,
    "a list of numbers": lambda: [0.5] * ROWS,
    "a numpy array": lambda: np.ones(ROWS),
}

row = PlanRow
ROW_CHANGES: dict[str, dict[str, Any]] = {
    "prompt None": {"prompt_index": None},
    "prompt NaN": {"prompt_index": NAN},
    "prompt text": {"prompt_index": "0"},
    "prompt of another dataset": {"prompt_index": 20},
    "prompt -2": {"prompt_index": -2},
    "a foreign prompt without columns": {"prompt_index": -1},
    "prompt 10**30": {"prompt_index": 10**30},
    "group None": {"group": None},
    "group text": {"group": "a"},
    "group a list": {"group": [1]},
    "group 10**30": {"group": 10**30},
    "group -1": {"group": -1},
    "n None": {"n": None},
    "n -1": {"n": -1},
    "n 2.5": {"n": 2.5},
    "n NaN": {"n": NAN},
    "n text": {"n": "2"},
    "n huge": {"n": 10**12},
    "n zero": {"n": 0},
    "spare -1": {"spare": -1},
    "spare text": {"spare": "1"},
    "spare huge": {"spare": 10**12},
    "edit text": {"edit": "prompt"},
    "edit a list": {"edit": ["prompt"]},
    "edit with a number as key": {"edit": {1: "x"}},
    "edit that cannot travel": {"edit": {"prompt": lambda: 0}},
    "edit without a role": {"edit": {"prompt": [{"content": "x"}]}},
    "edit without a role behind one": {"edit": {"prompt": [{"role": "user", "content": "x"}, {"from": "gpt"}]}},
    "edit with a role that is none": {"edit": {"raw_prompt": ({"role": None, "content": "x"},)}},
    "edit with a role without a text": {"edit": {"prompt": np.array([{"role": "", "content": "x"}])}},
    "edit with texts for messages": {"edit": {"prompt": ["x"]}},
    "edit without a message": {"edit": {"prompt": []}},
    "edit with a prompt None": {"edit": {"prompt": None}},
    "edit with messages": {"edit": {"prompt": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}},
    "redundant 1": {"redundant": 1},
    "max_turns 3": {"max_turns": 3},
    "edit that raises": {"edit": {"prompt": Hostile()}},
    "payload that cannot travel": {"payload": lazy()},
    "payload that raises": {"payload": Hostile()},
    "prefix text": {"prefix": "abc"},
    "prefix None": {"prefix": None},
    "prefix a number": {"prefix": 3},
    "prefix of text": {"prefix": ("a",)},
    "prefix negative": {"prefix": (-1,)},
    "prefix out of the vocabulary": {"prefix": (50,)},
    "prefix NaN": {"prefix": (NAN,)},
    "prefix a generator": {"prefix": lazy()},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens text": {"max_tokens": "many"},
    "max_tokens NaN": {"max_tokens": NAN},
    "max_tokens -3": {"max_tokens": -3},
    "given None": {"given": None},
    "given text": {"given": "ab"},
    "given tokens": {"given": (1, 2)},
    "given without tokens": {"given": (Completion(()),)},
    "given of text": {"given": (Completion(("a",)),)},  # type: ignore[arg-type]
    "given out of the vocabulary": {"given": (Completion((99,)),)},
    "given more than n": {"given": (Completion((1,)),) * 9},
    "given log-probs too few": {"given": (Completion((1, 2), (-1.0,)),)},
    "given log-probs NaN": {"given": (Completion((1,), (NAN,)),)},
    "given log-probs text": {"given": (Completion((1,), ("a",)),)},  # type: ignore[arg-type]
    "given log-probs positive": {"given": (Completion((1,), (3.0,)),)},
    "given versions too few": {"given": (Completion((1, 2), versions=(0,)),)},
    "given versions text": {"given": (Completion((1,), versions=("a",)),)},  # type: ignore[arg-type]
    "given versions a number": {"given": (Completion((1,), versions=3),)},  # type: ignore[arg-type]
    "given versions 10**30": {"given": (Completion((1,), versions=(10**30,)),)},
    "given observed text": {"given": (Completion((1,), observed=("a",)),)},  # type: ignore[arg-type]
    "given all observed": {"given": (Completion((1,), observed=(True,)),)},
    "given rewards text": {"given": (Completion((1,), rewards="ab"),)},  # type: ignore[arg-type]
    "given rewards of text": {"given": (Completion((1,), rewards={"r": "ab"}),)},  # type: ignore[dict-item]
    "given rewards infinite": {"given": (Completion((1,), rewards={"r": INF}),)},
}


def planned(change: Callable[[Plan], Any]) -> Hook:
    """A hook that answers with a changed plan, in whatever round."""

    def plan(self: Method, given: Plan) -> Any:
        base = given if given.rows else given.replace(rows=(PlanRow(0, 0, 1),))
        return change(base)

    return plan


PLANS: dict[str, Callable[[Plan], Any]] = {
    **{
        name: lambda p, c=changes: p.replace(rows=(p.rows[0].replace(**c), *p.rows[1:]))
        for name, changes in ROW_CHANGES.items()
    },
    "rows None": lambda p: p.replace(rows=None),
    "rows a list": lambda p: p.replace(rows=list(p.rows)),
    "rows a generator": lambda p: p.replace(rows=lazy()),
    "rows of text": lambda p: p.replace(rows=("a", "b")),
    "rows text": lambda p: p.replace(rows="ab"),
    "rows of None": lambda p: p.replace(rows=(None,)),
    "rows a dict": lambda p: p.replace(rows={0: p.rows[0]}),
    "no rows": lambda p: p.replace(rows=()),
    "a million rows": lambda p: p.replace(rows=p.rows[:1] * 100_000),
    "budget text": lambda p: p.replace(budget="all"),
    "group_size None": lambda p: p.replace(group_size=None),
}

SHAPES: dict[str, Callable[[int], Shape]] = {}
for _field, _rows in (("advantages", False), ("old_logprobs", False), ("keep_rows", True), ("keep_tokens", False)):
    for _name, _value in {
        "text": lambda n: "x",
        "a number": lambda n: 1.0,
        "too long": lambda n: torch.zeros(n + 1),
        "NaN": lambda n: torch.full((n,), NAN),
        "infinity": lambda n: torch.full((n,), INF),
        "1e38": lambda n: torch.full((n,), 1e38, dtype=torch.float64),
        "1e300": lambda n: torch.full((n,), 1e300, dtype=torch.float64),
        "complex": lambda n: torch.zeros(n, dtype=torch.complex64),
        "bool": lambda n: torch.ones(n, dtype=torch.bool),
        "integers": lambda n: torch.ones(n, dtype=torch.int64),
        "a list": lambda n: [True] * n,
        "negative": lambda n: torch.full((n,), -0.5),
        "slightly positive": lambda n: torch.where(torch.arange(n) == 1, 0.01, -0.5),
        "a dict": lambda n: {0: 1},
        "a generator": lambda n: lazy(),
        "an object that raises": lambda n: Hostile(),
    }.items():
        SHAPES[f"{_field} {_name}"] = lambda n, f=_field, v=_value, r=_rows: Shape(**{f: v(ROWS if r else n)})
for _field, _rows in (("row_columns", True), ("token_columns", False)):
    for _name, _value in {
        "None": lambda n: None,
        "a list": lambda n: [1],
        "text": lambda n: "x",
        "of text": lambda n: {"a": "x"},
        "too long": lambda n: {"a": torch.zeros(n + 1)},
        "NaN": lambda n: {"a": torch.full((n,), NAN)},
        "1e300": lambda n: {"a": torch.full((n,), 1e300, dtype=torch.float64)},
        "with a number as name": lambda n: {1: torch.zeros(n)},
        "complex": lambda n: {"a": torch.zeros(n, dtype=torch.complex64)},
        "bool": lambda n: {"a": torch.ones(n, dtype=torch.bool)},
        "a generator": lambda n: lazy(),
    }.items():
        SHAPES[f"{_field} {_name}"] = lambda n, f=_field, v=_value, r=_rows: Shape(**{f: v(ROWS if r else n)})

UPDATES: dict[str, Callable[[], Any]] = {
    **{f"lr_scale {name}": (lambda v=value: Update(v)) for name, value in {
        "NaN": NAN, "infinite": INF, "negative": -1.0, "text": "1", "None": None, "1e300": 1e300, "huge": 10**400,
        "a complex number": 1j, "a list": [1.0], "True": True, "zero": 0.0, "an object that raises": Hostile(),
        "a tensor of two": torch.ones(2), "a complex tensor": torch.tensor(1j), "a NaN tensor": torch.tensor(NAN),
    }.items()},
    **{f"columns {name}": (lambda v=value: Update(columns=v)) for name, value in {
        "None": None, "a list": [1], "text": "x", "of text": {"a": "x"}, "too long": {"a": torch.zeros(5)},
        "NaN": {"a": torch.full((4,), NAN)}, "1e300": {"a": torch.full((4,), 1e300, dtype=torch.float64)},
        "complex": {"a": torch.zeros(4, dtype=torch.complex64)}, "with a number as name": {1: torch.zeros(4)},
        "an object that raises": Hostile(), "of what raises": {"a": Hostile()},
    }.items()},
}  # fmt: skip

ADMISSIONS: dict[str, Callable[[], Any]] = {
    name: (lambda v=value: Admission(*v))
    for name, value in {
        "too few": (0,), "fresh text": ("4",), "fresh None": (None,), "fresh NaN": (NAN,),
        "fresh negative": (-1, (0, 1)),
        "fresh huge": (10**9,), "resume text": (4, "ab"), "resume None": (4, None), "resume a number": (4, 1),
        "resume beyond": (4, (3,)), "resume negative": (4, (-1,)), "resume twice": (4, (0, 0)),
        "the same in two": (4, (0,), (0,)), "drop beyond": (4, (), (), (9,)), "resume a generator": (4, lazy()),
        "resume that raises": (4, Hostile()), "fresh 2.5": (2.5,), "legal": (4, (0,), (1,), (2,)),
    }.items()
}  # fmt: skip

SELECTIONS: dict[str, Callable[[], Any]] = {
    "too few": lambda: [1], "too many": lambda: range(9), "twice the same": lambda: [1, 1, 2, 3],
    "beyond the dataset": lambda: [0, 1, 2, 20], "negative": lambda: [-1, 0, 1, 2],
    "floats": lambda: [0.0, 1.0, 2.0, 3.0],
    "NaN": lambda: [NAN, 1, 2, 3], "text inside": lambda: ["0", 1, 2, 3], "an array": lambda: np.arange(4),
    "a tensor": lambda: torch.arange(4), "float tensor": lambda: torch.arange(4.0), "10**30": lambda: [10**30, 1, 2, 3],
    "without an end": lambda: iter(int, 1),
}  # fmt: skip

LOSSES: dict[str, Callable[[Any], Any]] = {
    "per row": lambda t: t.logprobs.sum(1),
    "one number": lambda t: t.logprobs.sum(),
    "one column": lambda t: t.logprobs.sum(1, keepdim=True),
    "transposed": lambda t: t.logprobs.T,
    "detached": lambda t: t.logprobs.detach(),
    "NaN": lambda t: t.logprobs * NAN,
    "infinite": lambda t: t.logprobs / 0,
    "NaN at one token": lambda t: torch.where(t.logprobs == t.logprobs[0, 0], NAN, t.logprobs),
    "NaN at masked tokens": lambda t: torch.where(t.mask > 0, t.logprobs, NAN),
    "NaN gradient": lambda t: (0 * t.logprobs).abs().sqrt(),
    "NaN gradient at masked tokens": lambda t: torch.where(t.mask > 0, t.logprobs, (0 * t.logprobs).abs().sqrt()),
    "1e38": lambda t: t.logprobs * 1e38,
    "complex": lambda t: t.logprobs * 1j,
    "float64": lambda t: t.logprobs.double(),
    "float16": lambda t: t.logprobs.half(),
    "integers": lambda t: t.mask,
    "bool": lambda t: t.mask > 0,
    "numpy": lambda t: t.logprobs.detach().numpy(),
    "a list": lambda t: t.logprobs.tolist(),
    "sparse": lambda t: t.logprobs.to_sparse(),
    "on no device": lambda t: t.logprobs.to("meta"),
    "another graph": lambda t: torch.ones(t.logprobs.shape, requires_grad=True) * 1.0,
    "negative": lambda t: -t.logprobs,
    "a constant": lambda t: 0.1 * t.mask,
    "of advantages": lambda t: t.advantages.abs() + 1.0,
    "zero": lambda t: 0.0 * t.mask,
}


def program(*asked: Any, returns: Any = ()) -> Hook:
    """A program that yields these (or what they make of the prompt) and returns something."""

    def rollout(self: Method, prompt: Any) -> Any:
        for request in asked:
            yield request(prompt) if isinstance(request, types.FunctionType) else request
        return returns(prompt) if isinstance(returns, types.FunctionType) else returns

    return rollout


def changed_row(**changes: Any) -> Hook:
    def returns(prompt: Any) -> Any:
        good = prompt.start().add(Generated((7, 8), (-1.0, -2.0), "eos"))
        return [dataclasses.replace(good, **changes)]

    return program(returns=returns)


T = Trajectory((5, 6))


def endless(ask: Callable[[Any], Any]) -> Hook:
    def rollout(self: Method, prompt: Any) -> Any:
        while True:
            yield ask(prompt)

    return rollout


def endless_side_by_side(self: Method, prompt: Any) -> Any:
    return (yield from together([endless(lambda p: Generate(p.start()))(self, prompt) for _ in range(3)]))


def endless_and_empty_side_by_side(self: Method, prompt: Any) -> Any:
    return (yield from together([endless(lambda p: [])(self, prompt)]))


PROGRAMS: dict[str, Hook] = {
    "a list instead of a generator": lambda self, prompt: [prompt.start()],
    "None instead of a generator": lambda self, prompt: None,
    "a coroutine": lambda self, prompt: later(),
    "an async generator": lambda self, prompt: stream(),
    "an iterator": lambda self, prompt: iter([1]),
    "something with send": lambda self, prompt: Hostile(),
    **{
        f"yields {name}": program(value)
        for name, value in {
            "None": None, "text": "generate", "a number": 1, "a trajectory": T, "a list of text": ["a"],
            "a list of lists": [[Generate(T)]], "a tuple": (Generate(T),), "a class": Generate,
            "Generate of None": Generate(None), "Generate of text": Generate("abc"),
            "Generate of tokens": lambda p: Generate(Trajectory(("a", "b"))), "n text": Generate(T, "2"),
            "n 0": Generate(T, 0),
            "n None": Generate(T, None), "n NaN": Generate(T, NAN), "n 2.5": Generate(T, 2.5),
            "n huge": Generate(T, 10**9), "max_tokens 0": Generate(T, 1, 0), "max_tokens text": Generate(T, 1, "4"),
            "max_tokens NaN": Generate(T, 1, NAN), "max_tokens 2.5": Generate(T, 1, 2.5),
            "max_tokens huge": Generate(T, 1, 10**9), "stop text": Generate(T, 1, 4, "end"),
            "stop of numbers": Generate(T, 1, 4, (1,)), "stop None": Generate(T, 1, 4, None),
            "stop empty text": Generate(T, 1, 4, ("",)), "temperature -1": Generate(T, 1, 4, (), -1.0),
            "temperature NaN": Generate(T, 1, 4, (), NAN), "temperature infinite": Generate(T, 1, 4, (), INF),
            "temperature text": Generate(T, 1, 4, (), "hot"), "top -1": Generate(T, top=-1),
            "top text": Generate(T, top="2"), "top None": Generate(T, top=None), "top NaN": Generate(T, top=NAN),
            "tokens out of the vocabulary": lambda p: Generate(p.start().force((99,))),
            "Score of None": Score(None), "Score of text": Score("abc"), "Call of None": Call(None),
            "Call of text": Call("abc"), "Call with args text": Call(len, "abc"),
            "Call with args None": Call(len, None),
            "Call timeout text": Call(len, ("a",), "1"), "Call timeout NaN": Call(len, ("a",), NAN),
            "Call timeout -1": Call(len, ("a",), -1.0), "Call name None": Call(len, ("a",), 1.0, None),
            "an object that raises": Hostile(), "a generator": lazy(),
        }.items()
    },
    **{
        f"for ever yields {name}": endless(ask)
        for name, ask in {
            "nothing": lambda p: [], "a request": lambda p: Generate(p.start()), "scores": lambda p: Score(p.start()),
            "two requests": lambda p: [Generate(p.start(), n=2)] * 2, "calls": lambda p: Call(len, ("a",)),
            "requests without room": lambda p: Generate(p.start().force((7,) * 8)),
        }.items()
    },
    "for ever yields side by side": endless_side_by_side,
    "for ever yields nothing side by side": endless_and_empty_side_by_side,
    **{
        f"returns {name}": program(returns=value)
        for name, value in {
            "None": None, "text": "abc", "a number": 3, "a dict": {0: T}, "a trajectory": T, "numbers": [1, 2],
            "None inside": [None], "text inside": ["a"], "text in a rollout": [["a"]], "too many": [T] * 3,
            "an object that raises": Hostile(), "a generator": lazy(), "nothing": (),
            "a trajectory with nothing": [T], "an empty rollout": [[]],
        }.items()
    },
    **{
        f"a row with {name}": changed_row(**value)
        for name, value in {
            "tokens None": {"tokens": None}, "tokens of text": {"tokens": ("a", "b")}, "tokens text": {"tokens": "ab"},
            "tokens out of the vocabulary": {"tokens": (7, 99)}, "tokens negative": {"tokens": (7, -1)},
            "tokens NaN": {"tokens": (7, NAN)}, "tokens beyond": {"tokens": (7, 10**30)},
            "too many tokens": {"tokens": (7,) * 9, "kinds": (1,) * 9, "logprobs": (NAN,) * 9, "versions": (0,) * 9},
            "kinds wrong": {"kinds": (9, 9)}, "kinds text": {"kinds": ("a", "b")}, "kinds too few": {"kinds": (0,)},
            "kinds None": {"kinds": None}, "log-probs NaN": {"logprobs": (NAN, NAN)},
            "log-probs infinite": {"logprobs": (INF, -INF)}, "log-probs text": {"logprobs": ("a", "b")},
            "log-probs positive": {"logprobs": (3.0, 1.0)}, "versions text": {"versions": ("a", "b")},
            "versions None": {"versions": (None, None)}, "versions 10**30": {"versions": (10**30, 0)},
            "finish text": {"finish": "done"}, "finish None": {"finish": None}, "prompt None": {"prompt": None},
            "another prompt": {"prompt": (1, 2, 3)}, "prompt text": {"prompt": "ab"}, "turns text": {"turns": "ab"},
            "turns of numbers": {"turns": (1,)}, "rewards text": {"rewards": "ab"},
            "rewards of text": {"rewards": {"r": "ab"}}, "rewards infinite": {"rewards": {"r": INF}},
            "rewards of another function": {"rewards": {"nobody": 1.0}}, "rewards a list": {"rewards": [1.0]},
            "meta a list": {"meta": [1]}, "meta None": {"meta": None}, "meta with a number as key": {"meta": {1: 2}},
            "meta that cannot travel": {"meta": {"a": lazy()}}, "group a list": {"group": [1]},
            "group that raises": {"group": Hostile()},
        }.items()
    },
}  # fmt: skip

ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("wrong"),
    "an exception without a text": Unprintable,
    "a text of 10 MB": lambda: ValueError("x" * 10_000_000),
    "SystemExit": lambda: SystemExit(0),
    "StopIteration": lambda: StopIteration(1),
    "StopAsyncIteration": StopAsyncIteration,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "RecursionError": lambda: RecursionError("deep"),
    "MemoryError": MemoryError,
    "an exception group": lambda: ExceptionGroup("both", [ValueError("a"), TypeError("b")]),
    "KeyboardInterrupt": KeyboardInterrupt,
}


def raising(error: Callable[[], BaseException]) -> Hook:
    def hook(self: Method, *args: Any) -> Any:
        raise error()

    return hook


def raising_program(error: Callable[[], BaseException]) -> Hook:
    def hook(self: Method, prompt: Any) -> Any:
        yield []
        raise error()

    return hook


def raising_coroutine(error: Callable[[], BaseException]) -> Hook:
    async def hook(self: Method, *args: Any) -> Any:
        await asyncio.sleep(0)
        raise error()

    return hook


LOGS: dict[str, Hook] = {
    "logs text": lambda self, *args: self.log("x", "text"),
    "logs None": lambda self, *args: self.log("x", None),
    "logs many numbers": lambda self, *args: self.log("x", torch.ones(3)),
    "logs complex": lambda self, *args: self.log("x", torch.tensor(1j)),
    "logs 10**400": lambda self, *args: self.log("x", 10**400),
    "logs with another reduction": lambda self, *args: self.log("x", 1.0, reduce="median"),
    "logs with a NaN weight": lambda self, *args: self.log("x", 1.0, weight=NAN),
    "logs with an infinite weight": lambda self, *args: self.log("x", 1.0, weight=INF),
    "logs what raises": lambda self, *args: self.log("x", Hostile()),
    "asks for unclaimed": lambda self, *args: Method.advantages(self, None),  # type: ignore[arg-type]
}


DRAWS: dict[str, Callable[[], Any]] = {
    "draws from torch": lambda: torch.randperm(3),
    "draws into a tensor": lambda: torch.empty(2).normal_(),
    "seeds torch": lambda: torch.seed(),
    "draws from numpy": lambda: np.random.permutation(3),
    "seeds numpy": lambda: np.random.seed(),
    "draws from random": lambda: random.choice("ab"),
    "seeds random": lambda: random.seed(),
}


def circle() -> Any:
    made: dict[str, Any] = {"in": []}
    made["in"].append(made)
    return made


def wide_circle() -> Any:
    made: list[Any] = []
    made.extend([made] * 3)
    return made


UNSAVED: dict[str, Callable[[], Any]] = {
    "a circle": circle,
    "a list of itself": wide_circle,
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "a tensor of rows": lambda: torch.eye(3).to_sparse_csr(),
    "a tensor on no device": lambda: torch.empty(3, device="meta"),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "complex128": lambda: torch.ones(2, dtype=torch.complex128),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
    "a set": lambda: {1},
    "an array": lambda: np.ones(2),
    "a complex number": lambda: 1j,
    "a number of 5,000 digits": lambda: -(10**5000),
    "a number as key": lambda: {1: 2},
    "what raises": Hostile,
}


def doing(place: str, act: Callable[[Method], Any]) -> Hook:
    """A hook that does something and is good otherwise."""

    def hook(self: Method, *args: Any) -> Any:
        act(self)
        return GOOD[place](*args)

    def in_program(self: Method, prompt: Any) -> Any:
        yield []
        act(self)
        return [prompt.start()]

    return in_program if place == "rollout" else hook


# ---- changes of what was given


def mutables(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Everything in a hook's arguments that can be changed, with how to reach it."""
    if depth > 7 or isinstance(value, (str, bytes, int, float, type(None), types.FunctionType)):
        return
    if isinstance(value, (Tensor, np.ndarray)):
        if (value.numel() if isinstance(value, Tensor) else value.size) > 0:
            yield path, value
    elif isinstance(value, Mapping):
        if isinstance(value, dict):
            yield path, value
        for k, v in value.items():
            yield from mutables(v, f"{path}[{k}]", depth + 1)
    elif isinstance(value, (list, tuple)):
        if isinstance(value, list) and value:
            yield path, value
        for i, v in enumerate(value[:2]):
            yield from mutables(v, f"{path}[{i}]", depth + 1)
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            yield from mutables(getattr(value, f.name), f"{path}.{f.name}", depth + 1)
        if hasattr(type(value), "groups"):
            yield from mutables(value.groups, f"{path}.groups", depth + 1)
    elif isinstance(value, Groups):
        yield from ((f"{path}.{n}", x) for n, x in (("ids", value.ids), ("size", value.size), ("index", value.index)))


def tensor_change(x: Tensor) -> None:
    x.logical_not_() if x.dtype == torch.bool else x.add_(1)


def behind_torch(x: Tensor) -> None:
    """Without a trace in torch's own count."""
    a = x.detach().cpu().numpy()
    a.flat[0] = not a.flat[0] if a.dtype == bool else a.flat[0] + 1


def change(x: Any) -> None:
    if isinstance(x, Tensor):
        with torch.no_grad():
            tensor_change(x)
    elif isinstance(x, np.ndarray):
        x.flat[0] = 0
    elif isinstance(x, dict):
        x["new"] = 1
    else:
        x[0] = "other"


def changes_of(place: str) -> Iterator[Case]:
    """For everything a hook is given: a hook that changes that."""
    hook, drive = DRIVES[place]
    found: list[tuple[str, type]] = []

    def look(self: Method, *args: Any) -> Any:
        found.extend((path, type(x)) for i, a in enumerate(args) for path, x in mutables(a, f"argument {i}"))
        raise ValueError

    with contextlib.suppress(MethodError):
        drive(bad(hook, look))

    def changer(path: str, how: Callable[[Any], None]) -> Hook:
        def changed(self: Method, *args: Any) -> Any:
            how(dict(p for i, a in enumerate(args) for p in mutables(a, f"argument {i}"))[path])
            return GOOD[place](*args)

        def in_program(self: Method, prompt: Any) -> Any:
            how(dict(mutables(prompt, "argument 0"))[path])
            yield []
            return [prompt.start()]

        return in_program if place == "rollout" else changed

    for path, kind in dict(found).items():
        yield Case(place, f"changes {path}", changer(path, change))
        if issubclass(kind, Tensor) and place not in ("policy_loss", "regularize"):
            yield Case(place, f"changes {path} behind torch", changer(path, behind_torch))


TEACHER_PROMPTS: dict[str, Callable[[], Any]] = {
    "messages": lambda: [[{"role": "user", "content": "a"}]] * ROWS,
    "one too few": lambda: ["a"] * (ROWS - 1),
    "one empty": lambda: ["a"] * (ROWS - 1) + [""],
    "no messages": lambda: [[]] * ROWS,
    "a message without a role": lambda: [[{"content": "a"}]] * ROWS,
    "a message without content": lambda: [[{"role": "user"}]] * ROWS,
    "a role that is no text": lambda: [[{"role": 1, "content": "a"}]] * ROWS,
    "token ids": lambda: [[1, 2]] * ROWS,
}

GOOD: dict[str, Hook] = {
    **dict.fromkeys(("start", "observe", "rewards", "select", "shape", "plan", "before_update"), lambda *args: None),
    **dict.fromkeys(("plan, round 1", "plan, evaluation"), lambda *args: None),
    "select_prompts": lambda pool, n: list(pool.proposal),
    "admit": lambda queue: Admission(4),
    "teacher_prompts": lambda rollouts: [None] * ROWS,
    "advantages": lambda rollouts: torch.zeros(ROWS),
    "policy_loss": lambda terms: terms.logprobs,
    "regularize": lambda terms: terms.logprobs,
}


def cases() -> Iterator[Case]:
    """Every case."""
    for place in DRIVES:
        for name, make in ANYTHING.items():
            yield Case(place, f"returns {name}", lambda self, *args, make=make: make())
            if name in ("a number", "text", "None"):

                async def waits(self: Method, *args: Any, make: Callable[[], Any] = make) -> Any:
                    await asyncio.sleep(0)
                    return make()

                yield Case(place, f"async, returns {name}", waits)
        for name, error in ERRORS.items():
            yield Case(place, f"raises {name}", raising(error))
            if place == "rollout":
                yield Case(place, f"program raises {name}", raising_program(error))
            elif name != "KeyboardInterrupt":  # asyncio itself handles it
                yield Case(place, f"coroutine raises {name}", raising_coroutine(error))
        for name, function in LOGS.items():
            if place != "rollout":
                yield Case(place, name, lambda self, *args, f=function, p=place: (f(self, *args), GOOD[p](*args))[1])
        for name, draw in DRAWS.items():
            yield Case(place, name, doing(place, lambda self, draw=draw: draw()))
        for name, make in UNSAVED.items():

            def keep(self: Method, make: Callable[[], Any] = make) -> None:
                self.state["x"] = [{"y": make()}]

            yield Case(place, f"keeps {name}", doing(place, keep))
        yield from changes_of(place)
    for place in ("rewards", "select", "advantages"):
        yield from (Case(place, f"returns {n}", lambda self, r, v=v: v()) for n, v in NUMBERS.items())
    for place in ("plan", "plan, round 1", "plan, evaluation"):
        yield from (Case(place, f"plans {n}", planned(v)) for n, v in PLANS.items())
    yield from (Case("shape", n, lambda self, r, t, v=v: v(len(t))) for n, v in SHAPES.items())
    yield from (Case("before_update", n, lambda self, r, v=v: v()) for n, v in UPDATES.items())
    yield from (Case("admit", n, lambda self, q, v=v: v()) for n, v in ADMISSIONS.items())
    yield from (Case("teacher_prompts", n, lambda self, r, v=v: v()) for n, v in TEACHER_PROMPTS.items())
    yield from (Case("select_prompts", n, lambda self, p, k, v=v: v()) for n, v in SELECTIONS.items())
    for place in ("policy_loss", "regularize"):
        yield from (Case(place, n, lambda self, t, v=v: v(t)) for n, v in LOSSES.items())
    yield from (Case("rollout", n, v) for n, v in PROGRAMS.items())


# ---- what becomes of it

NAMED, ACCEPTED, PASSED_ON = "named", "accepted", "passed on"


def outcome(case: Case) -> str:
    """`NAMED` (an error that names the method and the hook, and is not longer than a page), `ACCEPTED`, `PASSED_ON`
    (the user's own interrupt), or what else happened."""
    hook, drive = DRIVES[case.place]
    try:
        with checking():
            drive(bad(hook, case.function))
    except MethodError as e:
        text = str(e)
        named = "`bad`" in text and (f"`{hook}`" in text or f"({hook})" in text or "The plan of" in text)
        return NAMED if named and len(text) < 6000 else f"MethodError that names nobody: {text[:200]}"
    except KeyboardInterrupt:
        return PASSED_ON if "KeyboardInterrupt" in case.what else "KeyboardInterrupt"
    except BaseException as e:
        return f"{type(e).__name__}: {str(e)[:200]}"
    return ACCEPTED


def legal(case: Case) -> bool:
    """Whether it may be accepted."""
    place, what = case.place, case.what
    if what in LEGAL.get(place, ()) or what in LEGAL["everywhere"]:
        return True
    if what.endswith("returns None") and place in MAY_RETURN_NONE:
        return True
    if ".groups" in what:  # statistics of the hook's own record
        return True
    return place in ("start", "observe") and what.startswith(("returns ", "async, returns")) and "generator" not in what


_NUMBERS = {"integers", "bool", "float16", "negative", "with a graph", "a list of numbers", "a numpy array"}
MAY_RETURN_NONE = ("plan", "plan, round 1", "plan, evaluation", "rewards", "select", "shape", "before_update")
LEGAL: dict[str, set[str]] = {
    "everywhere": {"logs with a NaN weight", "logs with an infinite weight"},  # such a value is left out
    "start": {"changes argument 0.dataset", "changes argument 0.dataset[0]"},  # it may have a million rows
    "select_prompts": {"an array", "a tensor"},
    "admit": {"legal"},
    "rewards": {"NaN in one"} | _NUMBERS,
    "select": {"returns bool"},
    "teacher_prompts": {"returns a list of text", "returns a list of None", "messages"},
    "advantages": set(_NUMBERS),
    "shape": {
        *(f"advantages {kind}" for kind in ("bool", "integers", "a list", "negative", "slightly positive")),
        "old_logprobs negative",
        *(f"{field} {kind}" for field in ("keep_rows", "keep_tokens") for kind in ("bool", "a list")),
        "row_columns bool",
        "token_columns bool",
    },
    "before_update": {"lr_scale True", "lr_scale zero"},
    "policy_loss": {"NaN at masked tokens", "float64", "float16", "negative"},
    "regularize": {"NaN at masked tokens", "float64", "float16", "negative", "zero"},
    "rollout": {
        "yields max_tokens huge",  # the room is the limit
        "returns nothing",
        "returns a trajectory with nothing",
        "returns an empty rollout",
        "a row with another prompt",
    },
}
for _place in ("plan", "plan, round 1", "plan, evaluation"):
    LEGAL[_place] = {"plans rows a list", "plans edit with messages"}
LEGAL["plan"] |= {"plans group -1", "plans n zero"}
LEGAL["plan, round 1"] |= {"plans group -1", "plans n zero", "plans no rows"}
LEGAL["plan, evaluation"] |= {"plans a foreign prompt without columns"}  # it is one, and keeps its columns
LEGAL["rewards"] = {f"returns {n}" for n in LEGAL["rewards"]}
LEGAL["advantages"] = {f"returns {n}" for n in LEGAL["advantages"]}


def attack(chosen: list[Case]) -> dict[str, Counter[str]]:
    """Place -> how many of its cases came out how; a hole is any other outcome, or what is accepted and not legal."""
    table: dict[str, Counter[str]] = {place: Counter() for place in DRIVES}
    for case in chosen:
        found = outcome(case)
        fine = found in (NAMED, PASSED_ON) or (found == ACCEPTED and legal(case))
        table[case.place][found if fine else "hole"] += 1
        if not fine:
            HOLES.append((case, found))
    return table


HOLES: list[tuple[Case, str]] = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--others", action="store_true")
    arguments = parser.parse_args()
    table = attack(list(cases()))
    kinds = (NAMED, ACCEPTED, PASSED_ON, "hole")
    print(f"{'':18}" + "".join(f"{k:>12}" for k in kinds))
    for place, counts in table.items():
        print(f"{place:18}" + "".join(f"{counts[k]:12}" for k in kinds))
    total = sum(table.values(), Counter())
    print(f"{'all':18}" + "".join(f"{total[k]:12}" for k in kinds))
    if arguments.others:
        for case, found in HOLES:
            print(f"{case.place} | {case.what} | {found}")
    assert set(HOOKS) | {"start"} == {hook for hook, _ in DRIVES.values()}


if __name__ == "__main__":
    main()
