"""`MethodStack`: several methods as one. Order, conflicts, places, state, metrics and randomness live here."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_plugins.core.errors import ConfigError, MethodError, RunStopped, StateError, shortened, shown
from rl_plugins.core.method import HOOKS, TOKEN_SIGNALS, Context, Method, RowNote, TurnNote
from rl_plugins.core.params import params_to_dict
from rl_plugins.core.rollouts import Rollouts, RowRatio, Run
from rl_plugins.kit.threads import finished
from rl_plugins.runtime import registry
from rl_plugins.runtime.immutability import changes, drawn_from, global_generators, is_watching, watched
from rl_plugins.runtime.metrics import Metrics
from rl_plugins.runtime.state import copy_plain, other_version, snapshot

logger = logging.getLogger("rl_plugins")


MAX_UNREWARDED_BATCHES = 3


def build_stack(
    methods: Any,
    method_params: Any = None,
    seed: int = 0,
    max_unrewarded_batches: int = MAX_UNREWARDED_BATCHES,
    watchers: Sequence[Watcher] = (),
    refuse: bool = True,
) -> MethodStack:
    """The methods a run names, with their parameters, as a stack.

    Args:
        max_unrewarded_batches: see `MethodStack`.
        watchers: behind the methods.
        refuse: False: what is wrong is left to `preflight`, which tells it with all else. The stack then has the
            methods that could be built, one whose parameters are wrong with the others of them, or its defaults.

    Raises:
        ConfigError: see `registry.select`, `registry.build` and `MethodStack`.
    """
    problems: list[str] = []
    selection = registry.select(methods, method_params, problems)
    built: list[Method] = []
    unbuilt: list[type[Method]] = []
    for name, cls in selection.classes.items():
        try:
            built.append(registry.build(cls, selection.params[name], name))
        except ConfigError as e:
            problems.append(str(e))
            mended = _without_what_is_wrong(cls, selection.params[name], name)
            (unbuilt.append(cls) if mended is None else built.append(mended))
    stack = MethodStack([*built, *watchers], seed, selection.bundle_of, max_unrewarded_batches, problems, unbuilt)
    if refuse and problems:
        raise ConfigError("\n".join(problems))
    return stack


def _without_what_is_wrong(cls: type[Method], values: Mapping[str, Any], name: str) -> Method | None:
    """The method without one of its parameters, else with none; None if it cannot be built so either."""
    fewer = [{k: v for k, v in values.items() if k != left_out} for left_out in values]
    for rest in (*fewer, {}):
        with contextlib.suppress(ConfigError):
            return registry.build(cls, rest, name)
    return None


def check_max_unrewarded_batches(value: Any, name: str) -> int:
    """The config word, under the name it has in a host.

    Raises:
        ConfigError: no whole number of at least 0.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"{name}={shown(value)} is given; it must be a whole number of at least 0: how many batches in a row may "
            f"have no reward. 0: the first of them ends the run."
        )
    return value


def _conflicts(
    methods: Sequence[Method],
    claims: Mapping[str, list[Method]],
    unbuilt: Sequence[type[Method]],
    parts: Mapping[str, str],
) -> Iterator[str]:
    """Why methods cannot run together.

    Args:
        claims: hook -> methods.
        unbuilt: see `MethodStack`.
        parts: method -> the bundle it is part of.
    """
    for hook, claimants in claims.items():
        if HOOKS[hook].kind == "exclusive":
            yield from _only_one([*claimants, *(c for c in unbuilt if hook in c.claims())], f"`{hook}`", parts)
    yield from _only_one([m for m in methods if m.decides_rollouts], "how many rollouts prompts get", parts)
    yield from _only_one([m for m in methods if "teacher_logprobs" in m.needs], "what the teacher is", parts)
    whole = [m.name for m in methods if "whole_batches" in m.needs]
    for m in claims["admit"] if whole else ():
        yield (
            f"`{whole[0]}` needs the prompts that were planned together in one batch, and `{m.name}` lets groups "
            f"wait for a later batch. Remove `{whole[0]}` or `{m.name}` from `methods`."
        )
    summing = claims["policy_loss"] + claims["regularize"]
    if len({m.aggregation for m in summing}) > 1:
        names = [f"`{m.name}` ({m.aggregation})" for m in summing]
        yield f"{' and '.join(names)} aggregate their losses differently and cannot run together."


def _only_one(methods: Sequence[Method | type[Method]], what: str, bundle_of: Mapping[str, str]) -> Iterator[str]:
    """Refuses several methods that decide the same."""
    if len(methods) > 1:
        names = [f"`{m.name}`" for m in methods]
        parts = [m.name for m in methods if m.name in bundle_of]
        inside = "".join(f" `{name}` is part of `{bundle_of[name]}`: write `-{name}`." for name in parts)
        yield (
            f"The methods {' and '.join(names)} both decide {what}, and only one can. Remove {' or '.join(names)} from "
            f"`methods`.{inside}"
        )


class Watcher(Method):
    """A part of the stack that is told what the driver hooks of all methods return. It decides nothing."""

    def looks(self, batch: int) -> bool:
        """Whether it reads its signals in this generation batch, on every rank alike. Otherwise nobody collects them
        for it, and its `observe` gets tokens only if another method reads them."""
        return True

    def watches(self, methods: Sequence[Method]) -> None:
        """Called with all methods of the stack before their needs are read."""

    def saw(
        self, hook: str, method: str, args: tuple[Any, ...], result: Any, notes: Sequence[RowNote | TurnNote]
    ) -> None:
        """Called after each driver hook, this one's own included.

        Args:
            args: what the hook got.
            result: what it returned, before it was checked.
            notes: of the method in this hook.
        """

    @property
    def wants_ratios(self) -> bool:
        """Whether it wants importance ratios of tokens in `updated`."""
        return False

    def updated(self, scaled: Mapping[str, float] | None, ratios: Sequence[RowRatio]) -> None:
        """Called after each optimizer step, or once after all of a batch, by hosts that can. The values that methods
        logged in it are the stack's `stats`.

        Args:
            scaled: method -> its factor on the learning rate; None: the host does not say it.
            ratios: of all ranks; none unless wanted.
        """

    def ended(self) -> None:
        """Called when training ends, by hosts that can."""


class MethodStack(Context):
    """Methods in the order of the flag.

    Args:
        methods: instances; an empty stack is falsy.
        seed: of the run; every `rng` derives from it.
        max_unrewarded_batches: generation batches in a row in which no completion has a reward (the service that
            makes them is down, say). They are skipped; one more ends the run.
        problems: found before; conflicts of the methods are added, in place of an error.
        unbuilt: named, and without the parameters to be built: they decide what their hooks decide.

    Attributes:
        problems: which `preflight` tells with all else; a stack with some is true, though it may have no methods.
        claims: hook -> methods that override it, in order.
        needs: union of the signals, of the whole run.
        batch: generation batch, counted from 0; part of the saved state.
        extra_prompts: prompts drawn so far from the driver's own permutation to fill batches; part of the saved state.
        vocabulary: number of token ids the policy may sample, set by the adapter; None if it is not known.
        unrewarded: batches of the run in which no completion had a reward; unrewarded_in_a_row: of them the last ones,
            without a batch between. Part of the saved state.
        stats: what was logged in the last updates, for `observe`; part of the saved state.
        carried: groups that wait to go on in a later batch (`rl_plugins.runtime.carry_over`): they are replaced, never
            changed; part of the saved state.
        stop_reason: of a method that wants the run to end; empty: none does. Only the driver's says so.
        watchers: those that are told what driver hooks return (the trace).
        lr_scales: method -> factor on the learning rate of the present optimizer step.
        idle_batches: batches in a row that changed nothing (`rl_plugins.runtime.idle`); not saved.
        draw: plans made since the last decisions. Asynchronous hosts plan several times, and each of these plans must
            draw other random numbers. Part of the saved state.

    Raises:
        ConfigError: two methods claim the same exclusive hook, decide how many rollouts prompts get, need a teacher, or
            aggregate losses differently; one needs whole batches, and another lets groups wait.
    """

    def __init__(
        self,
        methods: list[Method],
        seed: int = 0,
        bundle_of: Mapping[str, str] | None = None,
        max_unrewarded_batches: int = MAX_UNREWARDED_BATCHES,
        problems: list[str] | None = None,
        unbuilt: Sequence[type[Method]] = (),
    ) -> None:
        self.methods = list(methods)
        self.seed = seed
        self.bundle_of = dict(bundle_of or {})
        self.batch = 0
        self.extra_prompts = 0
        self.draw = 0
        self.max_unrewarded_batches = max_unrewarded_batches
        self.unrewarded = self.unrewarded_in_a_row = 0
        self.vocabulary: int | None = None
        self.carried: list[dict[str, Any]] = []
        self.stats: dict[str, float] = {}
        self.metrics = Metrics()
        self.idle_batches: dict[str, int] = {}
        self.watchers = [m for m in methods if isinstance(m, Watcher)]
        for watcher in self.watchers:
            watcher.watches(self.methods)
        self.notes: list[RowNote | TurnNote] | None = [] if self.watchers else None
        self.stop_reason = ""
        self.lr_scales: dict[str, float] = {}
        self._warned: set[str] = set()
        claims = [(m, m.claims()) for m in methods]
        self.claims = {hook: [m for m, claimed in claims if hook in claimed] for hook in HOOKS}
        conflicts = [*_conflicts(self.methods, self.claims, unbuilt, self.bundle_of)]
        if conflicts and problems is None:
            raise ConfigError("\n".join(conflicts))
        self.problems = [] if problems is None else problems
        self.problems += conflicts
        self.needs: set[str] = set().union(*(m.needs for m in methods))
        for m in methods:
            m._context = self

    def __bool__(self) -> bool:
        return bool(self.methods or self.problems)

    @property
    def names(self) -> list[str]:
        """Of the methods; watchers are none."""
        return [m.name for m in self.methods if not isinstance(m, Watcher)]

    def claimed(self, *hooks: str) -> bool:
        """Whether any method claims any of these hooks."""
        return any(self.claims[h] for h in hooks)

    @property
    def needs_now(self) -> set[str]:
        """Signals that somebody reads in the present batch."""
        return set().union(*(m.needs for m in self.methods if self._looks(m)))

    def _looks(self, method: Method) -> bool:
        return not isinstance(method, Watcher) or method.looks(self.batch)

    @property
    def reads_tokens(self) -> bool:
        """Whether the driver needs the tokens of the present batch: a hook reads them, or advantages are of turns."""
        return bool(self._token_readers) or any(m.advantages_per == "turn" for m in self.claims["advantages"])

    @property
    def token_columns(self) -> frozenset[str]:
        """Signals per token that the driver needs in the present batch."""
        return frozenset().union(*(m.needs for m in self._token_readers)) & TOKEN_SIGNALS

    def in_loss(self, signal: str) -> bool:
        """Whether a method in the loss asks for a signal."""
        return any(signal in m.needs for m in self.claims["policy_loss"] + self.claims["regularize"])

    @property
    def _token_readers(self) -> list[Method]:
        return [m for m in self.claims["shape"] + self.claims["observe"] if "tokens" in m.needs and self._looks(m)]

    @property
    def rows_per_rollout(self) -> int:
        """Rows a rollout may become in the batch."""
        return max((m.rows_per_rollout for m in self.methods), default=1)

    @property
    def teacher(self) -> str | None:
        """The model whose log-probs `teacher_logprobs` are; None: the policy, or nobody asks."""
        return next((m.teacher for m in self.methods if "teacher_logprobs" in m.needs), None)

    @property
    def trains(self) -> bool:
        """Whether optimizer steps are taken."""
        return all(m.aggregation != "none" for m in self.methods)

    def stopped(self, checkpoint: str) -> RunStopped:
        """The error that ends a run after a method asked for it."""
        return RunStopped(
            f"The run was stopped. {self.stop_reason} The state is saved in {checkpoint}: look at it before you resume."
        )

    @property
    def aggregation(self) -> str:
        claimants = self.claims["policy_loss"] + self.claims["regularize"]
        return claimants[0].aggregation if claimants else "host"

    # -------------------------------------------------------------------------------------------------------- calling

    def call(self, hook: str, method: Method, *args: Any) -> Any:
        """One hook of one method, in its place. A coroutine is run to its end.

        Raises:
            RunStopped: the hook raised it.
            MethodError: whatever else the hook raised, an exit included, with the method, the hook and the way to go on
                without it; or, where hooks are watched, it changed something it was given, drew from a global random
                generator, or left something in the state that cannot be saved.
        """
        method._place = HOOKS[hook].place if hook in HOOKS else "driver"
        # statistics a hook asks a batch for stay in its own record, where a change of them reaches nobody
        args = tuple(a.replace() if isinstance(a, Rollouts) else a for a in args)
        before, generators = watched(args), global_generators()
        try:
            result = getattr(method, hook)(*args)
            if inspect.iscoroutine(result):
                result = finished(result)
            if hook in ("start", "observe") and (inspect.isgenerator(result) or inspect.isasyncgen(result)):
                raise TypeError("it has a `yield`, so nothing of it was run; this hook returns nothing")
        except (KeyboardInterrupt, RunStopped):
            raise
        except BaseException as e:  # an exit, too: the other ranks would wait for this one
            raise MethodError(
                f"Method `{method.name}` failed in `{hook}`: {type(e).__name__}: {shortened(e, 2000)}\n"
                f"{''.join(traceback.format_tb(e.__traceback__)[1:])}"
                f"Remove `{method.name}` from `methods` to go on without it."
            ) from e
        finally:
            method._place = "driver"
        changed = changes(before)
        if changed:
            names = ", ".join(changed[:8])
            raise MethodError(
                f"Method `{method.name}` changed what it was given in `{hook}`: {names}. "
                f"A hook returns new values; work on a copy (`x.clone()`)."
            )
        if drawn := drawn_from(generators):
            raise MethodError(
                f"Method `{method.name}` uses the global random generator of {', '.join(drawn)} in `{hook}`; use "
                f"`self.rng(purpose)`."
            )
        if is_watching() and method._state:
            try:
                snapshot(method._state, "self.state")
            except StateError as e:
                raise MethodError(f"Method `{method.name}` keeps in `{hook}` what cannot be saved: {e}") from None
        if self.notes is not None and hook in HOOKS and HOOKS[hook].place == "driver":
            for watcher in self.watchers:
                watcher.saw(hook, method.name, args, result, self.notes)
            self.notes = []
        return result

    def one(self, hook: str, *args: Any) -> Any:
        """The exclusive claimant's answer."""
        return self.call(hook, self.claims[hook][0], *args)

    def check(self, run: Run) -> None:
        """What methods find wrong with a run.

        Raises:
            ConfigError: with one paragraph per problem.
        """
        problems = []
        for m in self.methods:
            try:
                m.check(run)
            except ConfigError as e:
                problems.append(f"`{m.name}`: {e}")
            except KeyboardInterrupt:
                raise
            except BaseException as e:  # an exit, too: it would end the run without a word, and with status 0
                problems.append(f"`{m.name}` failed in `check`: {type(e).__name__}: {shortened(e)}. Remove the method.")
        if problems:
            raise ConfigError("\n".join(problems))

    def start(self, run: Run) -> None:
        for m in self.methods:
            self.call("start", m, run)

    # ------------------------------------------------------------------------------------------- what methods may use

    def warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    def rng(self, method: str, purpose: str) -> Any:
        import numpy as np

        key = f"{self.seed}|{method}|{self.batch}|{purpose}{f'|{self.draw}' if self.draw > 1 else ''}".encode()
        return np.random.default_rng(list(hashlib.sha256(key).digest()))

    # ---------------------------------------------------------------------------------------------------------- state

    def state_dict(self, fingerprint: str) -> dict[str, Any]:
        """Everything that must survive, as plain data that later steps do not change. Costs nothing that grows with the
        tensors of a state or with the groups that wait.

        Raises:
            StateError: a method keeps what cannot be saved; names the method and the place.
        """
        return {
            "seed": self.seed,
            "batch": self.batch,
            "extra_prompts": self.extra_prompts,
            "draw": self.draw,
            "unrewarded": self.unrewarded,
            "unrewarded_in_a_row": self.unrewarded_in_a_row,
            "carried": list(self.carried),  # groups are replaced, never changed
            "stats": dict(self.stats),
            "fingerprint": fingerprint,
            "methods": {
                m.name: {
                    "version": m.state_version,
                    "params": params_to_dict(m.params),
                    "state": snapshot(m._state, f"methods.{m.name}.state"),
                }
                for m in self.methods
                if not isinstance(m, Watcher)
            },
        }

    def load_state_dict(self, saved: Mapping[str, Any], fingerprint: str) -> None:
        """Takes over a saved state, after `start`. Adapters call `rl_plugins.runtime.resume`, which calls this.

        State of methods that this run does not name is dropped, and methods that the checkpoint does not know keep what
        they have after `start`.

        Raises:
            StateError: of another version or parameters of a method that keeps state, or another dataset, or not as
                `state_dict` makes it. Nothing is taken over then.
        """
        missing = {*_COUNTS, "carried", "stats", "fingerprint", "methods"} - set(saved)
        if missing:
            raise StateError(
                f"The checkpoint's state lacks {', '.join(f'`{k}`' for k in sorted(missing))}. {other_version(saved)}"
            )
        problem = _field_problem(saved)
        if problem:
            raise StateError(
                f"The checkpoint's state is not as this version of rl-plugins writes it: {problem}. "
                f"{other_version(saved)}"
            )
        for m in self.methods:
            found = saved["methods"].get(m.name)
            if found is None or not (m._state or found["state"]):
                continue
            if found["version"] != m.state_version:
                raise StateError(
                    f"The checkpoint's state of `{m.name}` has version {found['version']}, this code reads "
                    f"{m.state_version}. {other_version(saved)} Or remove `{m.name}` from `methods`: its state is "
                    f"then dropped."
                )
            now = params_to_dict(m.params)
            # a parameter that another version has, and that was not given, is none here
            changed = [k for k in {*found["params"], *now} if found["params"].get(k) != now.get(k)]
            if changed:
                what = ", ".join(f"{k}: {found['params'].get(k)!r} -> {now.get(k)!r}" for k in sorted(changed))
                raise StateError(
                    f"The checkpoint's state of `{m.name}` was made with other parameters ({what}). Resume with the "
                    f"same ones, or start a new run from the weights of the checkpoint, or remove `{m.name}` "
                    f"from `methods`: its state is then dropped."
                )
            if saved["fingerprint"] != fingerprint:
                raise StateError(
                    f"The state of `{m.name}` belongs to another dataset (fingerprint {saved['fingerprint']}, now "
                    f"{fingerprint}). Resume with the dataset of the checkpoint, or start a new run from its weights."
                )
        carried = list(saved["carried"]) if self.claims["admit"] else []
        if carried and saved["fingerprint"] != fingerprint:
            raise StateError(
                f"{len(carried)} groups of the checkpoint wait to go on, and their prompts belong to another "
                f"dataset (fingerprint {saved['fingerprint']}, now {fingerprint}). Resume with the dataset of the "
                f"checkpoint, or start a new run from its weights."
            )
        draws = self.claimed("select_prompts", "plan", "admit") or self.rows_per_rollout > 1
        if saved["extra_prompts"] and draws and saved["fingerprint"] != fingerprint:
            raise StateError(
                f"The run of the checkpoint drew {saved['extra_prompts']} prompts of its own from another dataset "
                f"(fingerprint {saved['fingerprint']}, now {fingerprint}). Resume with the dataset of the checkpoint, "
                f"or start a new run from its weights."
            )
        for m in self.methods:
            if m.name in saved["methods"]:
                m.state = copy_plain(saved["methods"][m.name]["state"])
        for name in _COUNTS:
            setattr(self, name, saved[name])
        self.carried = carried
        self.stats = dict(saved["stats"])


_COUNTS = ("batch", "extra_prompts", "draw", "unrewarded", "unrewarded_in_a_row")  # attributes of the saved state


def _field_problem(saved: Mapping[str, Any]) -> str | None:
    """Which field is not of the type that `state_dict` gives it."""

    def found(name: str, value: Any) -> str:
        return f"`{name}` is {str(value)[:60]!r} ({type(value).__name__})"

    for name in _COUNTS:
        if type(saved[name]) is not int or saved[name] < 0:
            return found(name, saved[name])
    for name, kind in {"carried": list, "stats": dict, "fingerprint": str, "methods": dict}.items():
        if not isinstance(saved[name], kind):
            return found(name, saved[name])
    for i, group in enumerate(saved["carried"]):
        if not isinstance(group, dict):
            return found(f"carried.{i}", group)
    for name, value in saved["stats"].items():
        if not isinstance(value, (int, float)):
            return found(f"stats.{name}", value)
    for name, one in saved["methods"].items():
        if not isinstance(one, dict) or set(one) != {"version", "params", "state"}:
            return found(f"methods.{name}", one)
        if type(one["version"]) is not int:
            return found(f"methods.{name}.version", one["version"])
        for part in ("params", "state"):
            if not isinstance(one[part], dict):
                return found(f"methods.{name}.{part}", one[part])
    return None
