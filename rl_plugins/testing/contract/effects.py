"""What each parameter changes: a method runs twice on the same generated inputs, with two values of the parameter."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest.mock import patch

from rl_plugins.core.denoising import Denoise, Sample
from rl_plugins.core.errors import ConfigError, shown
from rl_plugins.core.method import Method
from rl_plugins.core.params import Is, MethodParams, has_effect, holds
from rl_plugins.core.requests import Call, Generate, Score
from rl_plugins.core.rollouts import PlanRow, Rollouts, Tokens
from rl_plugins.kit.services import ChatEndpoint, Endpoint, Service
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.programs import Running, run
from rl_plugins.runtime.samples import RunningSamples, run_samples
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing.contract.compare import differences
from rl_plugins.testing.contract.decisions import decided
from rl_plugins.testing.contract.denoising import makes_samples
from rl_plugins.testing.contract.host import run_batch
from rl_plugins.testing.contract.kit import GROUP_SIZE, GROUPS, Kit
from rl_plugins.testing.contract.scenarios import scenarios
from rl_plugins.testing.contract.update_step import UpdateStep
from rl_plugins.testing.denoiser import FlowEngine, GaussianFlow, make_sample_prompt
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt
from rl_plugins.testing.generation import Simulation

BATCHES = 6  # decided by each trial
TRIED = 8  # values of a parameter that are tried at most


@dataclass(frozen=True)
class World:
    """What generated inputs cannot guess of a method.

    Args:
        prepare: see `check_method`.
        facts: of the run, see `make_run`.
        model: of the fake engine: the text so far -> probability of each next character; default a few letters.
        reward: of the fake engine, a function of the completion's text and the dataset row.
        columns: further columns of the prompts.
        n, max_tokens: of a prompt.
    """

    prepare: Any = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[str], Mapping[str, float]] | None = None
    reward: Callable[[str, Any], float] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    n: int = GROUP_SIZE
    max_tokens: int = 48


class Trial(Kit):
    """One method with these parameters on generated inputs. Each part is worked out when it is asked for; one that
    raises is None."""

    def __init__(self, cls: type[Method], params: MethodParams, world: World) -> None:
        super().__init__(cls, {}, world.prepare)
        self.given, self.world, self.facts = params, world, {"total_batches": BATCHES, **world.facts}

    def build(self) -> Method:
        method = self.cls(self.given)
        self.needs, self.rows_per_rollout = frozenset(method.needs), method.rows_per_rollout
        self.forces_tokens = "forced_tokens" in method.brings
        return method

    def tokens(self, rollouts: Rollouts, **changes: Any) -> Tokens:
        made = super().tokens(rollouts, **changes)
        return made.replace(forced=made.forced | (made.position % 3 == 1)) if self.forces_tokens else made

    @cached_property
    def class_attributes(self) -> Any:
        """What it asks of the run."""
        method = self.build()
        names = ("needs", "brings", "host_options", "rows_per_rollout", "in_eval", "aggregation", "teacher")
        return {name: getattr(method, name) for name in names}

    @cached_property
    def services(self) -> Any:
        """Services and endpoints that it starts with."""
        made: list[Any] = []

        def watched(init: Callable[..., None]) -> Callable[..., None]:
            def noted(service: Any, *args: Any, **options: Any) -> None:
                made.append([*(a for a in args if not callable(a)), _plain(options)])
                init(service, *args, **options)

            return noted

        with ExitStack() as patches:
            for cls in (Service, Endpoint, ChatEndpoint):
                patches.enter_context(patch.object(cls, "__init__", watched(cls.__init__)))
            stack = self.stack()
        return {"made": made, "state": stack.methods[-1]._state}

    @cached_property
    def batches(self) -> Any:
        """A few batches: planned, generated, decided, observed."""
        self.stack_of_batches = stack = self.stack()
        seen = []
        for _ in range(BATCHES):
            batch = run_batch(self, stack)
            self.planned = batch.plan
            seen.append(
                {
                    "plan": batch.plan,
                    **decided(batch.decision),
                    "metrics": dict(stack.stats),
                    "state": dict(stack.methods[-1]._state),
                }
            )
        return seen

    @cached_property
    def kinds(self) -> Any:
        """Decisions on rollouts of every kind."""
        seen = {}
        for name, rollouts, tokens in scenarios(self):
            stack = self.stack()
            seen[name] = {**decided(self.decide(stack, rollouts, tokens)), "metrics": dict(stack.stats)}
        return seen

    @cached_property
    def teacher_prompts(self) -> Any:
        """What a teacher reads."""
        if "teacher_prompts" not in self.cls.claims():
            return None
        return self.stack().one("teacher_prompts", self.rollouts([1.0, 0, 0, 1] * GROUPS))

    @cached_property
    def update(self) -> Any:
        """One optimizer step."""
        claimed = [hook for hook in ("policy_loss", "regularize") if hook in self.cls.claims()]
        if not claimed and "before_update" not in self.cls.claims():
            return None
        step = UpdateStep(self)
        how: Any = "sum" if step.method.aggregation == "sum" else "token-mean"
        losses = [step.loss(hook, how, [list(range(step.size))]) for hook in claimed]
        return {"update": step.update, "losses": losses, "metrics": combine([step.stack.metrics.take()])}

    @cached_property
    def programs(self) -> Any:
        """Rollouts made on a fake engine, with what the plan of the last batch attached, and in evaluation."""
        if "rollout" not in self.cls.claims():
            return None
        rows: Sequence[PlanRow] = (PlanRow(0, 0, GROUP_SIZE), PlanRow(1, 1, GROUP_SIZE))
        stack = self.stack()
        if self._part("batches") is not None:
            rows, stack = self.planned[:2], self.stack_of_batches
        method, requests = stack.methods[-1], list[Any]()
        make = method.rollout
        method.rollout = lambda prompt: _watched(make(prompt), requests)  # type: ignore[method-assign]
        if makes_samples(self.cls):
            return self._samples(method, rows, requests, stack)
        engine = TableEngine(self.world.model or _letters, self.world.reward or _reward)
        made = []
        for row, training in [*((row, True) for row in rows), (rows[0], False)]:
            columns = {**self.dataset[max(row.prompt_index, 0)], **self.world.columns}
            prompt = make_prompt(
                engine.chat,
                f"q{row.prompt_index}",
                n=self.world.n,
                max_tokens=self.world.max_tokens,
                columns=columns,
                payload=row.payload,
                training=training,
                seed=f"{row.prompt_index}",
            )
            program = Running(method, prompt)
            run([program], engine)
            made.append(program.rows)
        return {"rows": made, "requests": requests, "metrics": combine([stack.metrics.take()])}

    def _samples(self, method: Method, rows: Sequence[PlanRow], requests: list[Any], stack: MethodStack) -> Any:
        """The same of a diffusion policy."""
        engine = FlowEngine(GaussianFlow(0.1, 0.8), lambda x, columns: float(x.mean()), cheap=GaussianFlow(0.0, 0.8))
        made = []
        for row in rows:
            columns = {**self.dataset[max(row.prompt_index, 0)], **self.world.columns}
            prompt = make_sample_prompt(
                n=self.world.n, columns=columns, payload=row.payload, has_cheap=True, seed=f"{row.prompt_index}"
            )
            program = RunningSamples(method, prompt)
            run_samples([program], engine)
            made.append([[x.latent, x.meta, x.rewards, len(x.trained), x.group] for x in program.samples])
        return {"rows": made, "requests": requests, "metrics": combine([stack.metrics.take()])}

    @cached_property
    def queue(self) -> Any:
        """Groups that wait and go on."""
        if "admit" not in self.cls.claims():
            return None
        simulated = Simulation(
            self.build(),
            lambda prompt, drawn: [1 + (7 * prompt + 13 * i) % 30 for i in range(GROUP_SIZE)],
            groups=GROUPS,
            group_size=GROUP_SIZE,
            max_tokens=60,
        )
        return [simulated.batch() for _ in range(4 * BATCHES)]

    def _part(self, name: str) -> Any:
        if name not in self.__dict__:
            try:
                getattr(self, name)
            except Exception:  # these inputs do not suit it
                self.__dict__[name] = None
        return self.__dict__[name]


# The longest last.
PARTS = ("class_attributes", "services", "teacher_prompts", "batches", "programs", "update", "queue", "kinds")


def changed(one: Trial, two: Trial, metrics: bool = True) -> str:
    """The first part that differs, with the place; empty if none does."""
    for name in PARTS:
        a, b = one._part(name), two._part(name)
        if a is None or b is None:
            continue
        for path in differences(a, b):
            if metrics or not any(word in path.split(".") for word in ("metrics", "state")):
                return f"{name}.{path}"
    return ""


@dataclass(frozen=True)
class Beside:
    """A value to try that needs others of other parameters, which have no default or exclude each other."""

    value: Any
    others: Mapping[str, Any]


def idle_parameters(
    cls: type[Method],
    world: World | None = None,
    values: Mapping[str, Sequence[Any]] | None = None,
    settings: Sequence[Mapping[str, Any]] = ({},),
    **params: Any,
) -> dict[str, list[Any]]:
    """The parameters that changed nothing, with the values that were tried.

    Args:
        world: what generated inputs cannot guess.
        values: parameter -> values to try (or `Beside`), before those that are guessed; for functions and texts.
        settings: other parameters with which each one is tried, until it changes something.
        params: parameters of every trial, for those without a default.

    Raises:
        ConfigError: a setting that cannot be.
    """
    for setting in settings:
        cls.Params(**{**params, **setting})
    world, values, known = world or World(), values or {}, dict[str, Trial]()
    idle = {}
    for f in dataclasses.fields(cls.Params):
        tried: list[Any] = []
        if not any(_acts(cls, f.name, {**params, **s}, values, world, known, tried) for s in settings):
            idle[f.name] = tried
    return idle


def _acts(
    cls: type[Method],
    name: str,
    params: Mapping[str, Any],
    values: Mapping[str, Sequence[Any]],
    world: World,
    known: dict[str, Trial],
    tried: list[Any],
) -> bool:
    """Whether a value of this parameter changes anything."""
    for setting in settings_for(cls.Params, name, params, values):
        base = _built(cls.Params, setting)
        if base is None:
            continue
        one = known.setdefault(repr(sorted(setting.items())), Trial(cls, base, world))
        for value in [*values.get(name, ()), *alternatives(cls.Params, name)][:TRIED]:
            value, others = (value.value, value.others) if isinstance(value, Beside) else (value, {})
            other = _built(cls.Params, {**setting, name: value, **others})
            if other is None or not has_effect(other, name) or getattr(other, name) == getattr(base, name):
                continue
            tried.append(value)
            if changed(one, Trial(cls, other, world)):
                return True
    return False


def settings_for(
    cls: type[MethodParams], name: str, params: Mapping[str, Any], values: Mapping[str, Sequence[Any]]
) -> Iterator[dict[str, Any]]:
    """Parameters with which this one has an effect: `params`, and what its `only_if` asks for beyond them."""
    conditions: Sequence[Mapping[str, Any]] = cls.__dataclass_fields__[name].metadata.get("only_if") or ({},)
    for condition in conditions:
        setting = dict(params)
        for other, wanted in condition.items():
            if holds(setting.get(other, cls.__dataclass_fields__[other].default), wanted):
                continue
            several = wanted if isinstance(wanted, tuple) else (wanted,)
            choices = [
                *(v for v in several if not isinstance(v, Is)),
                *values.get(other, ()),
                *alternatives(cls, other),
            ]
            fitting = [v for v in choices if holds(v, wanted)]
            setting = next(iter(settings_for(cls, other, setting, values)), setting)
            setting |= {other: fitting[0]} if fitting else {}
        yield setting


def alternatives(cls: type[MethodParams], name: str) -> list[Any]:
    """Values to try for a parameter, by its type, its limits and its default."""
    f = cls.__dataclass_fields__[name]
    return [v for v in _guesses(get_type_hints(cls)[name], f.default, f.metadata.get("limits", {})) if v != f.default]


def _guesses(hint: Any, default: Any, limits: Mapping[str, float]) -> list[Any]:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        found = [g for a in args if a is not type(None) for g in _guesses(a, default, limits)]
        return [*found, None] if type(None) in args else found
    if origin is Literal:
        return list(args)
    if hint is bool:
        return [not default]
    if origin is tuple:
        several = default if isinstance(default, tuple) and default else tuple(_guesses(args[0], None, limits)[:2])
        halves = [tuple(v / 2 for v in several)] if args[0] is float else []
        return [several, several[::-1], *halves, several[:1]]
    if hint is str:
        return [f"{default or ''}other"]
    if hint not in (int, float):
        return []
    x = default if isinstance(default, (int, float)) and not isinstance(default, bool) and math.isfinite(default) else 1
    edges = [limits[k] for k in ("ge", "le") if k in limits]
    edges += [limits[k] + sign * 0.05 for k, sign in (("gt", 1), ("lt", -1)) if k in limits]
    found = [*edges, x + 1, x - 1, 4 * x, x / 4, x + 0.25, x - 0.25, 1, 2, 3, 0.5]
    inside = [v for v in found if _within(v, limits)]
    return [int(v) for v in inside if v == int(v)] if hint is int else [float(v) for v in inside]


def _within(value: float, limits: Mapping[str, float]) -> bool:
    tests = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le}
    return all(tests[k](value, bound) for k, bound in limits.items())


def _built(cls: type[MethodParams], values: Mapping[str, Any]) -> MethodParams | None:
    try:
        return cls(**values)
    except ConfigError:
        return None


# ---- what programs see and ask


def _letters(text: str) -> dict[str, float]:
    """A model that is sure in some places and unsure in others."""
    draw = _draw(text[-4:])
    letters = {letter: 0.05 + draw(letter) ** 4 for letter in "abcd"}
    return {**letters, EOS: 0.04 if len(text) % 7 else 0.4}


def _reward(text: str, columns: Any) -> float:
    return float(_draw(text)("reward") < 0.4)


def _draw(text: str) -> Callable[[str], float]:
    return lambda what: int.from_bytes(hashlib.sha256(f"{what}|{text}".encode()).digest()[:4], "big") / 2**32


def _watched(program: Any, requests: list[Any]) -> Any:
    """The same program; what it asks for is noted."""
    answer = None
    while True:
        try:
            asked = program.send(answer)
        except StopIteration as done:
            return done.value
        requests.append([_noted(request) for request in (asked if isinstance(asked, list) else [asked])])
        answer = yield asked


def _noted(request: Any) -> Any:
    if isinstance(request, Generate):
        t = request.trajectory
        return [t.prompt, t.tokens, request.n, request.max_tokens, request.stop, request.temperature, request.top]
    if isinstance(request, Score):
        return [request.trajectory.seed if isinstance(request.trajectory, Sample) else request.trajectory.tokens]
    if isinstance(request, Denoise):
        names = ("count", "n", "shared_noise", "noisy", "model", "noise_scale", "seed")
        return [request.sample.seed, request.sample.total, *(getattr(request, name) for name in names)]
    return [request.name, request.timeout] if isinstance(request, Call) else shown(request)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if not callable(v)}
