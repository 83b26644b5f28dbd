"""`check_method`: the contract every method keeps, tested without a host.

    from rl_plugins.testing import check_method
    print(check_method(MyMethod, some_parameter=3))

What is checked follows from the hooks the class claims. Rollouts are made by hand (regular, ragged, interleaved,
unscorable, with turns, ..), and a small host plans, "generates" and decides several steps. A method gets only what its
`needs` name, so a signal it forgot is found here and not in a training run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import random
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

from rl_plugins import registry
from rl_plugins.driver import Decision, decide, first_plan, next_plan
from rl_plugins.errors import ConfigError
from rl_plugins.estimators import grpo_advantages
from rl_plugins.losses import Aggregation, aggregate
from rl_plugins.method import HOOKS, SIGNALS, Method, Paper
from rl_plugins.metrics import combine
from rl_plugins.params import MethodParams, build_params
from rl_plugins.rollouts import GroupSoFar, Plan, PlanRow, PromptPool, Rollouts, Steps, Terms, Tokens, Update
from rl_plugins.stack import MethodStack
from rl_plugins.state import load_state, save_state
from rl_plugins.testing.data import make_plan, make_rollouts, make_rows, make_run, make_tokens

# Hooks that need an engine or an asynchronous queue; they are tested with those, not here.
NOT_CHECKED = {"rollout": "it needs an engine", "admit": "it needs an asynchronous host"}
TOKEN_SIGNALS = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "entropies")
GROUPS, GROUP_SIZE, PROMPTS = 4, 4, 16
BUDGET = GROUPS * GROUP_SIZE
MAX_ROUNDS = 64
RTOL, ATOL = 1e-5, 1e-6
NAN = float("nan")


@dataclass(frozen=True)
class Report:
    """What was checked of a method that keeps the contract.

    Attributes:
        name: of the method.
        hooks: it claims.
        checks: what was checked, one line each.
        not_checked: hooks this test does not reach, with the reason.
    """

    name: str
    hooks: tuple[str, ...]
    checks: tuple[str, ...]
    not_checked: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.name} keeps the contract. Hooks: {', '.join(self.hooks) or 'none'}."]
        lines += [f"  ok           {check}" for check in self.checks]
        lines += [f"  not checked  {hook}" for hook in self.not_checked]
        return "\n".join(lines)


def check_method(
    cls: type[Method], /, *, prepare: Callable[[Rollouts], Rollouts] | None = None, **params: Any
) -> Report:
    """Tests a method class against the contract, in about a second and without a host.

    Args:
        cls: the class; it need not be registered.
        prepare: adds to rollouts what cannot be guessed from `needs`, e.g. the values of a dataset column:
            `lambda rollouts: rollouts.replace(meta={"answer": ["4"] * len(rollouts)})`.
        params: parameters to test with; needed where one has no default (a judge, say).

    Returns:
        What was checked.

    Raises:
        AssertionError: a list of everything that breaks the contract.
    """
    kit = _Kit(cls, params, prepare)
    checked = []
    for check in CHECKS:
        with kit.at(""):
            if kit.usable and check(kit) is not False:
                checked.append(check)
    if kit.problems:
        listed = "\n".join(f"  - {what}{_places(where)}" for what, where in kit.problems.items())
        raise AssertionError(f"`{cls.name or cls.__name__}` breaks the contract of a method:\n{listed}")
    hooks = cls.claims()
    lines = [" ".join((check.__doc__ or "").split()) for check in checked]
    not_checked = tuple(f"`{hook}`: {why}" for hook, why in NOT_CHECKED.items() if hook in hooks)
    return Report(cls.name, hooks, tuple(lines), not_checked)


def _places(where: Sequence[str]) -> str:
    shown = ", ".join(where[:4]) + (f" and {len(where) - 4} more" if len(where) > 4 else "")
    return f" [{shown}]" if where else ""


class _Kit:
    """A method under test: fresh instances, data as its `needs` say, and the problems found so far."""

    def __init__(self, cls: type[Method], params: Mapping[str, Any], prepare: Any) -> None:
        self.cls, self.params, self.prepare = cls, dict(params), prepare
        self.problems: dict[str, list[str]] = {}  # what is wrong -> where it was seen
        self.place = ""
        self.usable = True  # False: it does not run at all; further checks would repeat the same error
        self.turns = False  # the method wants `rollouts.steps`
        self.needs: frozenset[str] = frozenset()
        self.rows_per_rollout = 1
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []  # of the last stack

    # ---- problems

    def fail(self, what: str) -> None:
        places = self.problems.setdefault(what, [])
        if self.place and self.place not in places:
            places.append(self.place)

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Problems found inside are noted with this place; an exception is a problem."""
        before, self.place = self.place, place
        try:
            yield
        except Exception as e:
            self.fail(_short(e))
        finally:
            self.place = before

    # ---- instances

    def build(self) -> Method:
        method = self.cls(build_params(self.cls.Params, self.params, self.cls.name))
        self.needs, self.rows_per_rollout = frozenset(method.needs), method.rows_per_rollout
        for hook in method.claims():
            if hook not in NOT_CHECKED:
                setattr(method, hook, partial(self._watched, hook, getattr(method, hook)))
        return method

    def stack(self, *before: Method) -> MethodStack:
        """A started stack of a fresh instance, behind other methods."""
        method = self.build()
        stack = _QuietStack([*before, method])
        data = self.dataset
        columns = tuple(data.column_names)
        stack.start(make_run(dataset=data, dataset_size=PROMPTS, columns=columns, group_size=GROUP_SIZE))
        self.calls = []
        return stack

    @property
    def columns(self) -> list[str]:
        return sorted(n.removeprefix("column:") for n in self.needs if n.startswith("column:"))

    @property
    def dataset(self) -> _Table:
        names = ("prompt", "answer", *self.columns)
        return _Table({name: [_column_value(name, i) for i in range(PROMPTS)] for name in names})

    def _watched(self, hook: str, function: Callable[..., Any], *args: Any) -> Any:
        """One call of a hook: input unchanged, global generators untouched, a result of the right kind."""
        before, generators = _copy(args), _global_generators()
        result = function(*args)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        for changed in [path for old, new in zip(before, args, strict=True) for path in _differences(old, new)]:
            self.fail(f"`{hook}` changes its input (`{changed}`); return new values, with `replace` or new tensors.")
        for library, state in _global_generators().items():
            if generators[library] != state:
                self.fail(f"`{hook}` uses the global random generator of {library}; use `self.rng(purpose)`.")
        self.calls.append((hook, args, result))
        if hook == "advantages" and isinstance(result, Tensor):
            self._check_advantages(args[0], result)
        if hook in ("policy_loss", "regularize"):
            self._check_loss(hook, args[0], result)
        return result

    def _check_advantages(self, rollouts: Rollouts, given: Tensor) -> None:
        if given.dtype != torch.float64:
            self.fail(f"`advantages` returns {given.dtype}; numbers of rows are float64, like `rollouts.reward`.")
        n = rollouts.groups.rows(rollouts.groups.n(rollouts.reward))
        scored = ~torch.isnan(rollouts.reward) & (n > 1)
        if rollouts.steps is not None and len(given) == len(rollouts.steps.row) != len(rollouts):
            scored = scored[rollouts.steps.row]
        if given.shape == scored.shape and bool(torch.isnan(given[scored]).any()):
            self.fail(
                "`advantages` gives NaN to rows that have a reward: unscorable rows (reward NaN) must stay out of "
                "every statistic; those of `rollouts.groups` leave them out."
            )

    def _check_loss(self, hook: str, terms: Terms, given: Any) -> None:
        wanted = tuple(terms.mask.shape)
        if not isinstance(given, Tensor) or tuple(given.shape) != wanted:
            shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            self.fail(f"`{hook}` returns {shape}; it must be (rows, time), one value per token.")
        elif hook == "policy_loss" and not given.requires_grad:
            self.fail("`policy_loss` has no gradient; it must depend on `terms.logprobs` without `detach`.")

    # ---- data

    def rollouts(
        self, rewards: Any, group: Sequence[int] | None = None, turns: bool = False, **changes: Any
    ) -> Rollouts:
        """Rollouts with everything the method needs, and nothing else."""
        rewards = torch.as_tensor(rewards, dtype=torch.float64)
        if rewards.ndim == 1 and "several_rewards" in self.needs:
            second = (torch.arange(len(rewards)) % 3 == 0).double()
            rewards = torch.stack([rewards, torch.where(torch.isnan(rewards), NAN, second)], dim=1)
        made = make_rollouts(rewards, group, GROUP_SIZE, **changes)
        texts = [f"step {i} so the answer is {i % 3}" for i in made.rollout.tolist()]
        fields: dict[str, Any] = {}
        if "text" in self.needs:
            fields["text"] = texts
        if "raw_text" in self.needs:
            fields["raw_text"] = [f"{t} <answer>{t[-1]}</answer><|im_end|>" for t in texts]
        if "messages" in self.needs:
            fields["messages"] = [[{"role": "assistant", "content": t}] for t in texts]
        meta = {c: [_column_value(c, p) for p in made.prompt_index.tolist()] for c in self.columns}
        made = made.replace(meta={**meta, **made.meta}, **fields)
        if turns or self.turns:
            made = made.replace(steps=_turns(made))
        return self.prepare(made) if self.prepare else made

    def tokens(self, rollouts: Rollouts, **changes: Any) -> Tokens:
        tokens = make_tokens(rollouts, **changes)
        if rollouts.steps is not None:
            first = torch.searchsorted(rollouts.steps.row, tokens.row)
            late = tokens.position >= (rollouts.length[tokens.row] + 1) // 2
            tokens = tokens.replace(step=first + late.long())
        return tokens.replace(**{name: None for name in TOKEN_SIGNALS if name not in self.needs})

    def decide(self, stack: MethodStack, rollouts: Rollouts, tokens: Tokens, budget: int | None = None) -> Decision:
        budget = len(rollouts) if budget is None else budget
        decision = decide(stack, rollouts, tokens, None, grpo_advantages, budget)
        stack.stats.update(combine([stack.metrics.take()]))
        return decision


class _QuietStack(MethodStack):
    """Rollouts here are odd on purpose; what methods warn of is not news."""

    def warn_once(self, message: str) -> None:
        pass


class _Table:
    """A dataset: rows by number, columns by name."""

    def __init__(self, columns: Mapping[str, list[Any]]) -> None:
        self._columns = dict(columns)
        self.column_names = list(columns)

    def __len__(self) -> int:
        return PROMPTS

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        return {name: values[key] for name, values in self._columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))


def _column_value(column: str, prompt: int) -> Any:
    """Something plausible: numbers in [0, 1] for columns that sound like one, text with a digit for others."""
    if re.search("difficult|rate|score|prior|level|value|weight", column):
        return (prompt % 5) / 4
    return f"question {prompt}" if column == "prompt" else str(prompt % 3)


def _turns(rollouts: Rollouts) -> Steps:
    """Two turns for every row of two or more tokens, else one; the first observation is the same in the whole group."""
    count = 1 + (rollouts.length > 1).long()
    row = torch.repeat_interleave(torch.arange(len(rollouts)), count)
    turn = torch.arange(len(row)) - (torch.cumsum(count, 0) - count)[row]
    number = rollouts.rollout[row]
    return Steps(
        row=row,
        turn=turn,
        anchor=[f"observation {t} {n % 2 if t else ''}" for t, n in zip(turn.tolist(), number.tolist(), strict=True)],
        reward=torch.where(turn == 1, (number % 3).double() / 2, NAN),
        valid=(number + turn) % 4 != 3,
    )


# ---------------------------------------------------------------------------------------------------------- the checks


def _documentation(kit: _Kit) -> None:
    """documentation: name, hook signatures, source, docstring, when to use and when not"""
    cls = kit.cls
    with kit.at(""):  # the lines below are checked all the same
        registry.check_class(cls, cls.name, "check_method")
    doc = inspect.cleandoc(cls.__doc__ or "")
    lines = [line for line in doc.splitlines() if line.strip()]
    if len(lines) < 5:
        kit.fail(
            f"the docstring has {len(lines)} lines; it must open with the update rule and name symbols, shapes, errors "
            "and the source."
        )
    paper = getattr(cls, "paper", None)
    if not isinstance(paper, Paper) or not re.fullmatch(r"\d{4}\.\d{4,5}", paper.arxiv):
        kit.fail("`paper` must be a Paper(arxiv, title, authors, year) with an arXiv id such as 2402.03300.")
    elif paper.arxiv not in doc + (getattr(sys.modules.get(cls.__module__), "__doc__", None) or ""):
        kit.fail(f"the docstring does not name its source, arXiv {paper.arxiv}.")
    if getattr(cls, "fidelity", None) == "reconstruction" and "reconstruct" not in "\n".join(lines[:4]).lower():
        kit.fail('fidelity is "reconstruction", so the docstring must say in its first lines what was not published.')
    for attribute in ("use_when", "avoid_when"):
        if not getattr(cls, attribute, "").strip():
            kit.fail(f"`{attribute}` is empty; one sentence helps users choose.")


def _parameters(kit: _Kit) -> None:
    """parameters: documented, strict, limits enforced"""
    cls = kit.cls
    params = cls.Params
    dataclass_params = getattr(params, "__dataclass_params__", None)
    if not issubclass(params, MethodParams) or dataclass_params is None or not dataclass_params.frozen:
        kit.fail("`Params` must be a frozen dataclass that inherits from MethodParams.")
        return
    try:
        build_params(params, kit.params, cls.name)
    except ConfigError as e:
        kit.fail(f"it cannot be built: {e} Give what has no default: check_method({cls.__name__}, parameter=..).")
        kit.usable = False
        return

    def refused(name: str, value: Any) -> bool:
        try:
            build_params(params, {**kit.params, name: value}, cls.name)
        except ConfigError:
            return True
        return False

    method = kit.build()
    for signal in method.needs:
        if signal not in SIGNALS and not re.match("column:.|engine:.", signal):
            kit.fail(f"`needs` has {signal!r}; known: {', '.join(SIGNALS)}, column:NAME, engine:logprobs=N.")
    for hook in set(method.in_eval) - set(HOOKS):
        kit.fail(f"`in_eval` has {hook!r}, which is no hook.")
    if not refused("no_such_parameter", 1):
        kit.fail("an unknown parameter is accepted.")
    hints = get_type_hints(params)
    for f in dataclasses.fields(params):
        if not f.metadata.get("help"):
            kit.fail(f"parameter `{f.name}` has no help; declare it with `param(default, help)`.")
        types = {hints[f.name], *get_args(hints[f.name])}
        if not types & {int, float}:
            continue
        illegal = [_beyond(k, v, float not in types) for k, v in f.metadata.get("limits", {}).items()]
        for value in [*illegal, NAN]:
            if not refused(f.name, (value,) if Ellipsis in types else value):
                kit.fail(f"parameter `{f.name}` accepts {value!r}, which is out of its range.")


def _beyond(limit: str, bound: float, whole: bool) -> float:
    """A number just outside of a limit."""
    if limit in ("gt", "lt"):
        return int(bound) if whole else bound
    step = 1 if whole else max(1.0, abs(bound)) * 1e-6
    value = bound - step if limit == "ge" else bound + step
    return int(value) if whole else value


def _decides(kit: _Kit) -> None:
    """decisions on ordinary rollouts"""
    rewards = [1.0, 0, 0, 1] * GROUPS

    def attempt() -> None:
        stack = kit.stack()
        rollouts = kit.rollouts(rewards)
        kit.decide(stack, rollouts, kit.tokens(rollouts))

    try:
        attempt()
    except Exception as e:
        kit.turns = True  # a method for agents may want turns; if they do not help, the first error tells more
        try:
            attempt()
        except Exception:
            kit.fail(_short(e))
            kit.usable = False


def _every_kind(kit: _Kit) -> None:
    """rollouts of every kind: ragged, interleaved, single, constant, unscorable, several rewards, turns, no tokens"""
    for name, rollouts, tokens in _scenarios(kit):
        with kit.at(name):
            kit.decide(kit.stack(), rollouts, tokens)
    with kit.at("every row left"):
        rollouts = kit.rollouts([1.0, 0, 0, 1])
        kit.decide(kit.stack(_LeaveAll()), rollouts, kit.tokens(rollouts))


class _LeaveAll(Method):
    """Another method that takes every row out."""

    name = "leave_all"

    def select(self, rollouts: Rollouts) -> Tensor:
        return torch.zeros(len(rollouts), dtype=torch.bool)


def _scenarios(kit: _Kit) -> Iterator[tuple[str, Rollouts, Tokens]]:
    graded = np.random.default_rng(0).random(64).round(3).tolist()
    binary = [float(x > 0.5) for x in graded]
    ragged = [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4]
    mixed = [7, 3, 7, 9, 3, 3, 9, 7, 9, 3, 9, 7, 3, 7]
    made = {
        "regular groups": kit.rollouts(binary[:BUDGET]),
        "graded rewards": kit.rollouts(graded[:BUDGET]),
        "ragged groups": kit.rollouts(binary[: len(ragged)], ragged),
        "interleaved groups": kit.rollouts(graded[: len(mixed)], mixed),
        "single-row groups": kit.rollouts(binary[:5], range(5)),
        "groups of equal rewards": kit.rollouts([0.0] * 4 + [1.0] * 4 + [0.1] * 4),
        "partly NaN groups": kit.rollouts([1, NAN, 0, 1, NAN, NAN, 1, 0, 0, 0, 1, NAN]),
        "NaN groups": kit.rollouts([NAN] * 4 + [1.0, 0, 0, 1] + [NAN] * 4 + [NAN, NAN, NAN, 1]),
        "one row": kit.rollouts([1.0]),
        "several reward functions": kit.rollouts(
            torch.tensor([[1, 0.5], [0, NAN], [NAN, NAN], [1, 1], [0, 0], [0, 0.2], [NAN, 0.1], [1, 0]]),
            weights=[1.0, 0.5],
        ),
        "turns": kit.rollouts(graded[:BUDGET], turns=True, lengths=[1, 2, 3, 4] * 4),
        "rollouts of two rows": kit.rollouts(
            np.repeat(binary[:8], 2).tolist(),
            np.repeat([0, 1], 8).tolist(),
            rollout=torch.arange(4).repeat_interleave(2).repeat(2),
            index=torch.arange(16) % 2,
        ),
        "rows without tokens": kit.rollouts(binary[:BUDGET], lengths=[0, 3, 2, 1] * 3 + [0] * 4),
        "foreign prompts": kit.rollouts(
            binary[:BUDGET],
            prompt_index=[-1] * 4 + [2] * 4 + [-1] * 4 + [5] * 4,
            truncated=torch.arange(BUDGET) % 3 == 0,
        ),
    }
    for name, rollouts in made.items():
        yield name, rollouts, kit.tokens(rollouts)
    rollouts = made["foreign prompts"]
    tokens = make_tokens(rollouts)
    assert tokens.rollout_logprobs is not None
    forced = (tokens.row % 5 == 0) | (tokens.position == 0)
    unknown = torch.where(forced, torch.nan, tokens.rollout_logprobs)
    yield "forced tokens", rollouts, kit.tokens(rollouts, forced=forced, rollout_logprobs=unknown)


def _unscorable(kit: _Kit) -> bool:
    """unscorable rows are out of every statistic"""
    if "advantages" not in kit.cls.claims():
        return False
    rewards = torch.tensor([0.9, NAN, 0.1, 0.4, NAN, 0.2, 0.3, NAN, 0.8, 0.7, NAN, 0.6, 0.5, 0.0, 0.25, 0.65])
    rollouts = kit.rollouts(rewards)
    found = []
    with kit.at("partly NaN groups"):
        for rows in (rollouts, rollouts.subset(~torch.isnan(rollouts.reward))):
            stack = kit.stack()
            kit.decide(stack, rows, kit.tokens(rows))
            for hook, args, result in kit.calls:
                if hook == "advantages":
                    found.append(_by_rollout(args[0], torch.as_tensor(result)))
        with_nan, without = found
        if with_nan.keys() == without.keys() and any(
            _differences(with_nan[k], without[k], close=True) for k in without
        ):
            kit.fail("`advantages` of rows that have a reward change when unscorable rows (reward NaN) are added.")
    return True


def _by_rollout(rollouts: Rollouts, advantages: Tensor) -> dict[Any, list[float]]:
    """Advantages of the scored rows by group and rollout."""
    row = torch.arange(len(rollouts))
    if rollouts.steps is not None and len(advantages) == len(rollouts.steps.row) != len(rollouts):
        row = rollouts.steps.row
    out: dict[Any, list[float]] = {}
    for i, a in zip(row.tolist(), advantages.tolist(), strict=True):
        if not torch.isnan(rollouts.reward[i]):
            out.setdefault((int(rollouts.group[i]), int(rollouts.rollout[i])), []).append(a)
    return out


def _row_order(kit: _Kit) -> None:
    """decisions do not depend on the order of the rows"""
    rng = np.random.default_rng(1)
    group = [0, 1, 1, 2, 2, 2, 0, 0, 0, 3, 3, 3, 3, 3, 1, 1]
    distinct = (rng.permutation(BUDGET) / 10).tolist()
    order = torch.from_numpy(rng.permutation(BUDGET))
    with kit.at("graded rewards"):
        rollouts = kit.rollouts(distinct, group)
        tokens = kit.tokens(rollouts)
        moved, moved_tokens, token_order = _permute(rollouts, tokens, order)
        one = _fields(kit.decide(kit.stack(), rollouts, tokens), order, token_order)
        two = _fields(kit.decide(kit.stack(), moved, moved_tokens))
        for changed in _differences(one, two, close=True):
            kit.fail(f"decisions depend on the order of the rows (`{changed}`).")
    with kit.at("rewards 0 and 1"):  # which of several equal rows stays may depend on it, how many may not
        rollouts = kit.rollouts([float(i % 3 == 0) for i in range(BUDGET)], group)
        tokens = kit.tokens(rollouts)
        moved, moved_tokens, _ = _permute(rollouts, tokens, order)
        if _kept(kit.decide(kit.stack(), rollouts, tokens)) != _kept(kit.decide(kit.stack(), moved, moved_tokens)):
            kit.fail("how many rows of each group and reward stay depends on the order of the rows.")


def _kept(decision: Decision) -> list[tuple[float, float]]:
    r = decision.rollouts
    return sorted(zip(r.group[r.kept].tolist(), r.reward[r.kept].tolist(), strict=True))


def _fields(decision: Decision, rows: Tensor | None = None, tokens: Tensor | None = None) -> dict[str, Any]:
    """What was decided, by name, in another order of rows and tokens if given."""

    def of(x: Any, order: Tensor | None) -> Any:
        return x if x is None or order is None else x[order]

    return {
        "reward": of(decision.rollouts.reward, rows),
        "kept": of(decision.rollouts.kept, rows),
        "trained": of(decision.trained, rows),
        "keep_tokens": of(decision.keep_tokens, tokens),
        "advantages": of(decision.advantages, tokens),
        "old_logprobs": of(decision.old_logprobs, tokens),
        "row_columns": {k: of(v, rows) for k, v in decision.row_columns.items()},
        "token_columns": {k: of(v, tokens) for k, v in decision.token_columns.items()},
    }


def _permute(rollouts: Rollouts, tokens: Tokens, order: Tensor) -> tuple[Rollouts, Tokens, Tensor]:
    """Rows in another order, and the order of the tokens that follows from it."""
    place = torch.argsort(order)  # old row -> new row
    changes: dict[str, Any] = {}
    for f in dataclasses.fields(rollouts):
        value = getattr(rollouts, f.name)
        if isinstance(value, Tensor) and len(value) == len(rollouts) and f.name != "reward_weights":
            changes[f.name] = value[order]
        elif isinstance(value, (list, tuple)) and len(value) == len(rollouts) and f.name != "reward_names":
            changes[f.name] = [value[i] for i in order]
    changes["meta"] = {k: [v[i] for i in order] for k, v in rollouts.meta.items()}
    token_order = torch.sort(place[tokens.row], stable=True).indices
    moved = tokens.subset(token_order, place)
    if rollouts.steps is not None:
        s = rollouts.steps
        step_order = torch.sort(place[s.row], stable=True).indices
        anchors = [s.anchor[i] for i in step_order]
        changes["steps"] = Steps(
            place[s.row[step_order]], s.turn[step_order], anchors, s.reward[step_order], s.valid[step_order]
        )
        moved = moved.replace(step=torch.argsort(step_order)[moved.step])
    return rollouts.replace(**changes), moved, token_order


def _plans(kit: _Kit) -> bool:
    """plans: prompts kept, whole numbers of rollouts within the budget, nothing accumulates"""
    if "plan" not in kit.cls.claims():
        return False
    uneven = tuple(PlanRow(i, i, n) for i, n in enumerate((2, 4, 6, 4)))
    for name, plan in (
        ("the host's plan", make_plan(GROUPS, GROUP_SIZE)),
        ("a plan with room", make_plan(GROUPS, GROUP_SIZE, budget=2 * BUDGET)),
        ("an uneven plan", make_plan(GROUPS, GROUP_SIZE).replace(rows=uneven)),
    ):
        with kit.at(name):
            stack = kit.stack()
            planned = [stack.call("plan", stack.methods[-1], plan) or plan for _ in range(3)]
            for p in planned:
                given = {row.prompt for row in plan.rows}
                foreign = sorted({row.prompt for row in p.rows} - given - {-1})
                if foreign:
                    kit.fail(
                        f"`plan` has the prompts {foreign}, which were not chosen; those given are {sorted(given)}."
                    )
                if any(row.n < 0 or row.spare < 0 for row in p.rows):
                    kit.fail("`plan` has a negative number of rollouts.")
                if p.trained > plan.budget:
                    kit.fail(f"`plan` trains {p.trained} rows of a budget of {plan.budget}; others must be `spare`.")
            made = [p.generated for p in planned]
            if made[-1] > made[0]:
                kit.fail(f"`plan` accumulates: called with the same plan again it makes {made} rollouts.")
    return True


def _chooses_prompts(kit: _Kit) -> bool:
    """prompts chosen: as many as asked for, all different, in range, none taken"""
    if "select_prompts" not in kit.cls.claims():
        return False
    for n, taken in ((GROUPS, ()), (GROUPS, (0, 5, 6)), (1, ()), (PROMPTS, ()), (3, tuple(range(PROMPTS - 3)))):
        with kit.at(f"{n} of {PROMPTS} prompts, {len(taken)} taken"):
            stack = kit.stack()
            free = [i for i in range(PROMPTS) if i not in taken]
            pool = PromptPool(PROMPTS, () if taken else tuple(free[:n]), taken, kit.dataset, 0)
            chosen = [int(i) for i in stack.one("select_prompts", pool, n)]
            if len(chosen) != n or len(set(chosen)) != n or not set(chosen) <= set(free):
                kit.fail(f"`select_prompts` must return n different prompts that are not taken; it gave {chosen}.")
    return True


# ---- several steps


@dataclass
class _Batch:
    """One generation batch of the small host below: what was planned, generated and decided."""

    plan: list[PlanRow]
    rollouts: Rollouts
    tokens: Tokens
    decision: Decision


def _batch(kit: _Kit, stack: MethodStack) -> _Batch:
    """Plans, generates and decides once."""
    proposal = [(GROUPS * stack.step + i) % PROMPTS for i in range(GROUPS)]
    plan = first_plan(stack, proposal, GROUP_SIZE, BUDGET, PROMPTS, kit.dataset)
    rows = list(plan.rows)
    rollouts, forced = _generate(kit, rows, stack.step)
    for number in range(1, MAX_ROUNDS) if any(m.rounds for m in stack.methods) else ():
        first = {row.group: row for row in reversed(rows)}
        so_far = tuple(GroupSoFar(row, rollouts.reward[rollouts.group == g]) for g, row in sorted(first.items()))
        rest = BUDGET - sum(row.n for row in rows)
        later = next_plan(stack, Plan((), GROUP_SIZE, rest, number, so_far, stack.step))
        if not later.rows:
            break
        rows += later.rows
        rollouts, forced = _generate(kit, rows, stack.step)
    else:
        if any(m.rounds for m in stack.methods):
            kit.fail(f"`plan` still asks for rollouts after {MAX_ROUNDS} rounds.")
    tokens = kit.tokens(rollouts, forced=forced, seed=stack.step)
    decision = kit.decide(stack, rollouts, tokens, BUDGET * kit.rows_per_rollout)
    return _Batch(rows, rollouts, tokens, decision)


def _generate(kit: _Kit, plan: Sequence[PlanRow], step: int) -> tuple[Rollouts, Tensor]:
    """The rollouts of a plan, which depend on step, prompt and number alone; and which tokens are forced."""
    made = [(row, i) for row in plan for i in range(row.n + row.spare)]
    group = [row.group for row, _ in made]
    number = [group[:i].count(g) for i, g in enumerate(group)]
    rewards, lengths, forced = [], [], []
    for (row, i), k in zip(made, number, strict=True):
        given = row.given[i].tokens if i < len(row.given) else row.prefix
        length = len(given) if i < len(row.given) else len(row.prefix) + 1 + (3 * row.prompt + 2 * k) % 4
        chance = np.random.default_rng([step, row.prompt + 1, k]).random()
        rewards.append(NAN if chance > 0.97 else float(chance < 0.2 + 0.3 * (row.prompt % 3)))
        lengths.append(length)
        forced += [j < len(given) for j in range(length)]
    per_rollout = kit.rows_per_rollout
    repeat = torch.arange(len(made)).repeat_interleave(per_rollout).tolist()
    dataset = kit.dataset
    edits = [{**dataset[max(row.prompt, 0)], **(row.edit or {})} for row, _ in made]
    rollouts = kit.rollouts(
        [rewards[i] for i in repeat],
        [group[i] for i in repeat],
        lengths=[lengths[i] for i in repeat],
        prompt_index=[made[i][0].prompt for i in repeat],
        rollout=torch.tensor([number[i] for i in repeat], dtype=torch.int64),
        index=torch.arange(len(repeat)) % per_rollout,
        payload=[made[i][0].payload for i in repeat],
        meta={c: [edits[i].get(c) for i in repeat] for c in kit.columns},
        step=step,
    )
    return rollouts, torch.tensor(forced if per_rollout == 1 else [False] * int(rollouts.length.sum()))


def _deterministic(kit: _Kit) -> None:
    """the same seed and data give the same decisions"""
    runs: list[list[Any]] = []
    for _ in range(2):
        stack = kit.stack()
        runs.append([_trace(_batch(kit, stack)) for _ in range(2)] + [stack.methods[-1]._state])
    for changed in {path.split(".", 1)[-1] for path in _differences(runs[0], runs[1])}:
        kit.fail(f"two runs with the same seed and data differ (`{changed}`); draw from `self.rng(purpose)` only.")


def _resumes(kit: _Kit) -> None:
    """state is plain data, and a resumed run decides like one that was not interrupted"""
    first = kit.stack()
    for _ in range(2):
        _batch(kit, first)
    saved = first.state_dict("dataset")
    with tempfile.TemporaryDirectory() as folder:
        save_state(folder, saved)
        loaded = load_state(folder) or {}
    for changed in _differences(saved, loaded):
        kit.fail(f"saving and loading changes the state (`{changed}`).")
    second = kit.stack()
    second.load_state_dict(loaded, "dataset")
    runs = [[_trace(_batch(kit, s)) for _ in range(2)] + [s.methods[-1]._state] for s in (first, second)]
    for changed in {path.split(".", 1)[-1] for path in _differences(runs[0], runs[1])}:
        kit.fail(
            f"a resumed run decides otherwise than one that was not interrupted (`{changed}`): whatever must survive "
            "belongs into `self.state`."
        )


def _trace(batch: _Batch) -> dict[str, Any]:
    return {"plan": batch.plan, **_fields(batch.decision)}


def _observes_twice(kit: _Kit) -> bool:
    """the same feedback twice does no harm, and the state stays plain data"""
    if "observe" not in kit.cls.claims():
        return False
    with kit.at("observe twice"), tempfile.TemporaryDirectory() as folder:
        stack = kit.stack()
        batch = _batch(kit, stack)
        for _ in range(2):
            stack.call("observe", stack.methods[-1], batch.decision.rollouts, batch.tokens, dict(stack.stats))
        save_state(folder, stack.state_dict("dataset"))
    return True


# ---- update


def _before_update(kit: _Kit) -> bool:
    """before_update does not depend on the order of the rows"""
    if "before_update" not in kit.cls.claims():
        return False
    with kit.at("before_update"):
        step = _UpdateStep(kit)
        one = step.update
        order = torch.from_numpy(np.random.default_rng(2).permutation(len(step.rows.length)))
        moved = {
            f.name: None if (v := getattr(step.rows, f.name)) is None else v[order]
            for f in dataclasses.fields(step.rows)
            if f.name != "columns"
        }
        rows = step.rows.replace(**moved, columns={k: v[order] for k, v in step.rows.columns.items()})
        two = step.stack.call("before_update", step.method, rows) or Update()
        for update in (one, two):
            if not isinstance(update, Update) or not np.isfinite(update.lr_scale) or update.lr_scale < 0:
                kit.fail(f"`before_update` returns {update!r}; it must be an Update with a finite lr_scale >= 0.")
                return True
        columns = {k: v[order] for k, v in one.columns.items()}
        for changed in _differences(Update(one.lr_scale, columns), two, close=True):
            kit.fail(f"`before_update` depends on the order of the rows (`{changed}`).")
    return True


def _losses(kit: _Kit) -> bool:
    """losses: same value and gradient for every split into micro-batches and every padding; masked tokens are out"""
    hooks = [hook for hook in ("policy_loss", "regularize") if hook in kit.cls.claims()]
    for hook in hooks:
        with kit.at(hook):
            step = _UpdateStep(kit)
            before = len(kit.problems)
            for how in ("sum",) if step.method.aggregation == "sum" else ("token-mean", "seq-mean-token-mean"):
                if len(kit.problems) == before:
                    _check_loss_invariance(kit, step, hook, how)
    return bool(hooks)


def _check_loss_invariance(kit: _Kit, step: _UpdateStep, hook: str, how: str) -> None:
    everything, empty = list(range(step.size)), step.empty
    whole = step.loss(hook, how, [everything])
    if not all(bool(torch.isfinite(x).all()) for x in whole):
        kit.fail(f"`{hook}` or its gradient is not finite.")
        return
    if any(bool((g[step.mask == 0] != 0).any()) for g in whole[1:]):
        kit.fail(f"`{hook}` has a gradient at masked tokens; leave out what `terms.mask` says is out.")
    splits = {
        "depends on the split into micro-batches": [[[i] for i in everything], _pairs(everything)],
        "depends on the order of the rows": [[np.random.default_rng(6).permutation(everything).tolist()]],
    }
    others = {what: [step.loss(hook, how, split) for split in several] for what, several in splits.items()}
    others["depends on the width of the padding"] = [step.loss(hook, how, [everything], padding=3)]
    others["depends on values at masked tokens"] = [step.loss(hook, how, [everything], noise=True)]
    for what, losses in others.items():
        different = [loss for loss in losses if not _same_loss(whole, loss)]
        if different:
            kit.fail(
                f"`{hook}` {what}: losses are {float(whole[0]):.6g} and {float(different[0][0]):.6g}, or gradients "
                "differ. Return one value per token that depends on its own row only; what rows share comes as a "
                "column, `num_tokens` or `num_rows`."
            )
    nothing = step.loss(hook, how, [empty])
    if any(bool((x != 0).any()) or bool(torch.isnan(x).any()) for x in nothing):
        kit.fail(f"`{hook}` of rows without a token is {float(nothing[0]):.6g}; it must be 0, with gradient 0.")


def _pairs(rows: list[int]) -> list[list[int]]:
    return [rows[i : i + 2] for i in range(0, len(rows), 2)]


def _same_loss(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Equal up to the rounding of float32 sums."""
    return all(torch.allclose(x, y, 1e-4, 1e-5 * (1e-3 + float(x.abs().max()))) for x, y in zip(a, b, strict=True))


class _UpdateStep:
    """One optimizer step on what the method decided, padded as hosts do, with two rows that have no token."""

    def __init__(self, kit: _Kit) -> None:
        self.stack = kit.stack()
        self.method = self.stack.methods[-1]
        group = [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2]
        rollouts = kit.rollouts(np.random.default_rng(3).random(len(group)).round(2), group)
        tokens = kit.tokens(rollouts)
        decision = kit.decide(self.stack, rollouts, tokens)
        everything = make_tokens(rollouts)  # the update has log-probs whether the driver asked for them or not
        live = decision.keep_tokens
        trained = rollouts.subset(decision.trained)
        self.rows = make_rows(
            trained.replace(length=torch.bincount(tokens.row[live], minlength=len(rollouts))[decision.trained]),
            everything.subset(live, torch.cumsum(decision.trained, 0) - 1),
            columns={k: v[decision.trained] for k, v in decision.row_columns.items()},
        )
        wanted = {
            "logprobs": "current_logprobs",
            "old_logprobs": "old_logprobs",
            "rollout_logprobs": "rollout_logprobs",
        }
        self.rows = self.rows.replace(**{name: None for name, signal in wanted.items() if signal not in kit.needs})
        self.update = Update()
        if self.stack.claims["before_update"]:
            self.update = self.stack.call("before_update", self.method, self.rows) or Update()

        n, self.size, time = len(trained), len(trained) + 2, int(tokens.position.max()) + 1
        self.empty = [n, n + 1]
        place = torch.cumsum(decision.trained, 0) - 1
        at = place[tokens.row[live]], tokens.position[live]

        def dense(x: Tensor) -> Tensor:
            out = torch.zeros(self.size, time)
            out[at] = x[live].float()
            return out

        def column(x: Tensor) -> Tensor:
            return torch.cat([x.float(), torch.zeros(2)])[:, None]

        noise = torch.from_numpy(np.random.default_rng(4).normal(size=len(tokens)) * 0.2)
        assert everything.old_logprobs is not None and everything.entropies is not None
        old = everything.old_logprobs if decision.old_logprobs is None else decision.old_logprobs
        self.mask = dense(torch.ones(len(tokens))).long()
        self.dense = {
            "logprobs": dense(everything.old_logprobs + noise),
            "entropies": dense(everything.entropies),
            "advantages": dense(decision.advantages),
            "old_logprobs": dense(old),
        }
        for name in ("rollout_logprobs", "ref_logprobs"):
            if name in kit.needs:
                self.dense[name] = dense(getattr(everything, name))
        self.token_columns = {k: dense(v) for k, v in decision.token_columns.items()}
        row_columns = {k: v[decision.trained] for k, v in decision.row_columns.items()} | dict(self.update.columns)
        self.row_columns = {k: column(v) for k, v in row_columns.items()}

    def loss(
        self, hook: str, how: str, micro_batches: list[list[int]], padding: int = 0, noise: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and gradients of the whole step, for log-probs and entropies (rows, time).

        Args:
            micro_batches: the rows of each.
            padding: masked columns added at the end.
            noise: other values at masked tokens.
        """
        dense, token_columns = dict(self.dense), dict(self.token_columns)
        if noise:
            rng = np.random.default_rng(5)
            for values in (dense, token_columns):
                for name, value in values.items():
                    other = torch.from_numpy(rng.normal(size=value.shape)).float() * 5
                    other = -other.abs() if name.endswith("logprobs") else other.abs() if name == "entropies" else other
                    values[name] = torch.where(self.mask > 0, value, other)
        leaves = [dense[name].clone().requires_grad_() for name in ("logprobs", "entropies")]
        dense["logprobs"], dense["entropies"] = leaves
        shares = []
        for rows in micro_batches:

            def cut(x: Tensor, rows: list[int] = rows) -> Tensor:
                return torch.nn.functional.pad(x[rows], (0, padding))

            columns = {k: cut(v) for k, v in token_columns.items()} | {k: v[rows] for k, v in self.row_columns.items()}
            terms = Terms(
                mask=cut(self.mask),
                num_tokens=self.mask.sum().float(),
                num_rows=(self.mask.sum(1) > 0).sum().float(),
                max_length=self.mask.shape[1],
                columns=columns,
                **{name: cut(value) for name, value in dense.items()},
            )
            shares.append(_share(self.stack.call(hook, self.method, terms), terms, how))
        total = torch.stack(shares).sum()
        if not total.requires_grad:
            return total, torch.zeros_like(leaves[0]), torch.zeros_like(leaves[1])
        gradients = torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True)
        return total.detach(), gradients[0], gradients[1]


def _share(per_token: Tensor, terms: Terms, how: str) -> Tensor:
    """A micro-batch's share of the loss of the step."""
    if how == "sum":
        return torch.where(terms.mask > 0, per_token, 0.0).sum()
    kind: Aggregation = "token-mean" if how == "token-mean" else "seq-mean-token-mean"
    return aggregate(
        per_token,
        terms.mask,
        kind,
        num_tokens=terms.num_tokens,
        num_rows=terms.num_rows,
        max_length=terms.max_length,
    )


CHECKS: tuple[Callable[[_Kit], bool | None], ...] = (
    _documentation,
    _parameters,
    _decides,
    _every_kind,
    _unscorable,
    _row_order,
    _plans,
    _chooses_prompts,
    _deterministic,
    _resumes,
    _observes_twice,
    _before_update,
    _losses,
)


# ------------------------------------------------------------------------------------------------------------- helpers


def _copy(value: Any) -> Any:
    """A copy of plain data and of records; other objects as they are."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: _copy(getattr(value, f.name)) for f in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {k: _copy(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_copy(v) for v in value])
    return value


def _differences(a: Any, b: Any, close: bool = False, path: str = "") -> list[str]:
    """Where two values differ: names of fields joined by dots. NaN equals NaN; a list equals a tuple.

    Args:
        close: numbers need only agree to rounding.
    """
    here = [path or "value"]
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        a, b = torch.from_numpy(a), torch.from_numpy(b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return here
        if close and a.is_floating_point():
            same = torch.allclose(a, b, RTOL, ATOL, equal_nan=True)
        else:
            same = bool(((a == b) | ((a != a) & (b != b))).all())
        return [] if same else here
    if dataclasses.is_dataclass(a) and not isinstance(a, type) and type(a) is type(b):
        names = [f.name for f in dataclasses.fields(a)]
        pairs = {name: (getattr(a, name), getattr(b, name)) for name in names}
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            return here
        pairs = {str(k): (a[k], b[k]) for k in a}
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return here
        pairs = {str(i): pair for i, pair in enumerate(zip(a, b, strict=True))}
    elif isinstance(a, float) and isinstance(b, float):
        same = a == b or (a != a and b != b) or (close and abs(a - b) <= ATOL + RTOL * abs(b))
        return [] if same else here
    else:
        try:
            return [] if a is b or (type(a) is type(b) and bool(a == b)) else here
        except Exception:  # objects that cannot be compared
            return []
    return [p for name, pair in pairs.items() for p in _differences(*pair, close, f"{path}.{name}" if path else name)]


def _global_generators() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (name, np.asarray(keys).tobytes(), *rest),
        "random": random.getstate(),
    }


def _short(e: BaseException) -> str:
    """The first line of an error, and the line of code it comes from."""
    text = str(e).splitlines()[0] if str(e) else type(e).__name__
    origin = e
    while origin.__cause__ is not None:
        origin = origin.__cause__
    frames = traceback.extract_tb(origin.__traceback__)
    where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames and e.__cause__ else ""
    return text + where
