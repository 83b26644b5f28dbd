"""The kit every check works with: fresh instances of the method under test, data as its `needs` say, problems found."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rl_plugins.core.method import TOKEN_SIGNALS, Method
from rl_plugins.core.rollouts import Rollouts, Run, Tokens, TurnTable
from rl_plugins.runtime import registry
from rl_plugins.runtime.decide import Decision
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing.contract.compare import copy_of, differences
from rl_plugins.testing.contract.dataset import StoredDataset, column_value
from rl_plugins.testing.contract.results import wrong_result
from rl_plugins.testing.data import make_rollouts, make_run, make_step_rewards, make_token_ids, make_tokens, one_step
from rl_plugins.testing.engine import CharChat

OURS = "rl_plugins."  # modules of this package
TOKEN_FIELDS = {name: name for name in TOKEN_SIGNALS} | {"token_versions": "version"}
GROUPS, GROUP_SIZE, PROMPTS = 4, 4, 16
BUDGET = GROUPS * GROUP_SIZE
NAN = float("nan")


class Kit:
    """A method under test: fresh instances, data as its `needs` say, and the problems found so far."""

    def __init__(
        self, cls: type[Method], params: Mapping[str, Any], prepare: Any, rows: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.cls, self.params, self.prepare, self.given_rows = cls, dict(params), prepare, list(rows)
        self.facts: dict[str, Any] = {}  # of the run, see `make_run`
        self.problems: dict[str, list[str]] = {}  # what is wrong -> where it was seen
        self.warnings: list[str] = []
        self.place = ""
        self.usable = True  # False: it does not run at all; further checks would repeat the same error
        self.needs: frozenset[str] = frozenset()
        self.rows_per_rollout = 1
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []  # of the last stack

    @property
    def is_ours(self) -> bool:
        """Whether the method is one of this package."""
        return self.cls.__module__.startswith(OURS)

    # ---- problems

    def warn(self, what: str) -> None:
        self.warnings.append(what)

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
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # an exit, too
            self.fail(short_error(e))
        finally:
            self.place = before

    # ---- instances

    def build(self) -> Method:
        method = registry.build(self.cls, self.params, self.cls.name)
        self.needs, self.rows_per_rollout = frozenset(method.needs), method.rows_per_rollout
        for hook in method.claims():
            if hook != "rollout":  # a generator; `programs` watches it
                setattr(method, hook, partial(self._watched, hook, getattr(method, hook)))
        return method

    def stack(self, *before: Method) -> MethodStack:
        """A started stack of a fresh instance, behind other methods."""
        method = self.build()
        stack = _QuietStack([*before, method])
        stack.start(self.run)
        self.calls = []
        return stack

    @property
    def run(self) -> Run:
        data = self.dataset
        columns = tuple(data.column_names)
        facts = dict(dataset=data, dataset_size=PROMPTS, columns=columns, group_size=GROUP_SIZE) | self.facts
        return make_run(**{"chat": CharChat(), **facts})

    @property
    def columns(self) -> list[str]:
        return sorted(n.removeprefix("column:") for n in self.needs if n.startswith("column:"))

    @property
    def dataset(self) -> StoredDataset:
        names = ("prompt", "answer", *self.columns)
        columns = {name: [column_value(name, i) for i in range(PROMPTS)] for name in names}
        for name in self.given_rows[0] if self.given_rows else ():
            columns[name] = [self.given_rows[i % len(self.given_rows)][name] for i in range(PROMPTS)]
        return StoredDataset(columns)

    def _watched(self, hook: str, function: Callable[..., Any], *args: Any) -> Any:
        """One call of a hook: input unchanged, a result of the right kind."""
        before = copy_of(args)
        result = function(*args)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        for changed in [path for old, new in zip(before, args, strict=True) for path in differences(old, new)]:
            self.fail(f"`{hook}` changes its input (`{changed}`); return new values, with `replace` or new tensors.")
        self.calls.append((hook, args, result))
        for problem in wrong_result(self.cls, hook, args, result):
            self.fail(problem)
        return result

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
        meta = {c: [column_value(c, p) for p in made.prompt_index.tolist()] for c in self.columns}
        made = made.replace(meta={**meta, **made.meta}, **fields)
        if "token_ids" in self.needs:
            made = made.replace(token_ids=make_token_ids(made))
        if "step_rewards" in self.needs:
            made = made.replace(step_rewards=make_step_rewards(made))
        if turns or "turns" in self.needs:
            made = made.replace(turns=_turns(made))
        return self.prepare(made) if self.prepare else made

    def tokens(self, rollouts: Rollouts, **changes: Any) -> Tokens:
        tokens = make_tokens(rollouts, **changes)
        return tokens.replace(**{name: None for signal, name in TOKEN_FIELDS.items() if signal not in self.needs})

    def decide(self, stack: MethodStack, rollouts: Rollouts, tokens: Tokens, budget: int | None = None) -> Decision:
        decision = one_step(stack, rollouts, tokens, budget)
        stack.stats.update(combine([stack.metrics.take()]))
        return decision


class _QuietStack(MethodStack):
    """Rollouts here are odd on purpose; what methods warn of is not news."""

    def warn_once(self, message: str) -> None:
        pass


def _turns(rollouts: Rollouts) -> TurnTable:
    """One to three turns per row, as long as it has tokens; one if a rollout is several rows. All rollouts begin in the
    same state, go to one of two, and come back."""
    count = torch.ones_like(rollouts.length) if bool(rollouts.index.any()) else rollouts.length.clamp(1, 3)
    row = torch.repeat_interleave(torch.arange(len(rollouts)), count)
    turn = rollouts.index[row] + torch.arange(len(row)) - (torch.cumsum(count, 0) - count)[row]
    number = rollouts.rollout[row]
    return TurnTable(
        row=row,
        turn=turn,
        anchor=[f"room {1 + n % 2 if t == 1 else 0}" for t, n in zip(turn.tolist(), number.tolist(), strict=True)],
        reward=torch.where(turn == 1, (number % 3).double() / 2, NAN),
        valid=(number + turn) % 4 != 3,
    )


def short_error(e: BaseException) -> str:
    """The first line of an error, and the line of code it comes from."""
    text = str(e).splitlines()[0] if str(e) and isinstance(e, Exception) else repr(e)
    origin = e
    while origin.__cause__ is not None:
        origin = origin.__cause__
    frames = traceback.extract_tb(origin.__traceback__)
    where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames and e.__cause__ else ""
    return text + where
