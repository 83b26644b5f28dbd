"""From names to classes: the files of `rl_plugins/methods/` and the entry points of other packages.

Nothing is scanned or imported before a name is asked for. A name with two origins is an error that shows both. Methods
can be vetoed: `RL_PLUGINS_VETO="name,dist:some-package"` in the environment forbids them, `methods: [..., "-name"]` in
a config takes a part out of a bundle, and `"-dist:some-package"` there ignores what a package offers.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, cast, get_args

from rl_plugins.core.errors import ConfigError, did_you_mean, shortened, shown, told
from rl_plugins.core.method import BRINGS, HOOKS, Aggregation, Bundle, Fidelity, Idle, Method, OldPolicy
from rl_plugins.core.params import MethodParams, build_params, declaration_problems
from rl_plugins.runtime.config_text import read_json_or_yaml
from rl_plugins.runtime.papers import no_method
from rl_plugins.tools.supervised import not_a_method

ENTRY_POINT_GROUP = "rl_plugins.methods"
VETO_VARIABLE = "RL_PLUGINS_VETO"
BASELINES = ("grpo",)  # what a run without methods is called in `demo` and `compare`


@dataclass(frozen=True)
class Origin:
    """Where a name comes from, without importing it."""

    name: str
    distribution: str  # "" for the methods of this package
    where: str
    load: Callable[[], Any] = field(compare=False)

    def __str__(self) -> str:
        return f"`{self.where}`" + (f" of the package {self.distribution}" if self.distribution else " of rl-plugins")


@dataclass(frozen=True)
class NamedMethods:
    """What `methods` and `method_params` came to: classes in order, their parameters, the bundles they are from."""

    classes: Mapping[str, type[Method]]
    params: Mapping[str, Mapping[str, Any]]
    bundle_of: Mapping[str, str]


def parse_methods(value: Any) -> list[str]:
    """`methods` as it comes from Python, YAML or a command line: a list, one name, or names with commas."""
    if value is None:
        return []
    if isinstance(value, (set, frozenset)):
        raise ConfigError(
            f"`methods` is the set {shown(value)}, which has no order, and the order of methods counts. Write a list: "
            f"[vade, mc_grpo]."
        )
    items: list[Any] = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [None]
    if isinstance(value, Mapping) or not all(isinstance(i, str) for i in items):
        raise ConfigError(
            f"`methods` is {shown(value)}; it must be a list of method names, e.g. [vade, mc_grpo]. A class gets a "
            f"name by an entry point, which `rl-plugins new` writes."
            + _written_apart([value] if isinstance(value, Mapping) else items)
        )
    names = [part.strip() for item in items for part in re.split(r"[,\s]+", item.strip().strip("[]")) if part.strip()]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"`methods` names `{shortened(name, 80)}` {names.count(name)} times; name every method once."
            )
    return names


def _written_apart(items: Iterable[Any]) -> str:
    """How to write methods that were given with their parameters; empty if that is not what was given."""
    names: list[str] = []
    params: dict[str, Any] = {}
    for item in items:
        if isinstance(item, str):
            names.append(item)
        elif isinstance(item, Mapping) and all(isinstance(k, str) for k in item):
            names += item
            params |= {name: values for name, values in item.items() if values}
        else:
            return ""
    if not all(isinstance(values, Mapping) for values in params.values()):
        return ""
    try:
        lines = f"methods: {json.dumps(names)}\nmethod_params: {json.dumps({k: dict(v) for k, v in params.items()})}"
    except (TypeError, ValueError, RecursionError):
        return ""
    if not params:
        lines = lines.splitlines()[0]
    return f" Parameters stand apart. Write:\n{lines}" if len(lines) <= 400 else " Parameters go into `method_params`."


def parse_method_params(value: Any) -> dict[str, dict[str, Any]]:
    """`method_params` as a mapping of mappings; on a command line it is JSON or YAML text."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        value = read_json_or_yaml(value, "`method_params`")
    good = isinstance(value, Mapping) and all(isinstance(v, Mapping) or v is None for v in value.values())
    if not good or not all(isinstance(name, str) for name in value):
        raise ConfigError(
            f"`method_params` is {shown(value)}; it must map method names to parameters, "
            'e.g. {"mc_grpo": {"mad_eps": 0.001}}.'
        )
    return {k: dict(v or {}) for k, v in value.items()}


def select(methods: Any, method_params: Any = None, problems: list[str] | None = None) -> NamedMethods:
    """Expands bundles and vetoes, and checks that every parameter belongs to a method that is enabled.

    Args:
        problems: gets what is wrong, in place of an error; what can be used is then returned.

    Raises:
        ConfigError: unknown or vetoed name, a name with two origins, a bundle named together with its part, parameters
            of a method that is not enabled. Parameters themselves are checked when the method is built.
    """
    named, params = list[str](), dict[str, dict[str, Any]]()
    found_wrong: list[str] = []
    with told(found_wrong):
        named = parse_methods(methods)
    with told(found_wrong):
        params = parse_method_params(method_params)
    vetoed = {n[1:] for n in named if n.startswith("-")}
    named = [n for n in named if not n.startswith("-")]
    names: dict[str, type[Method]] = {}
    bundle_of: dict[str, str] = {}
    values: dict[str, dict[str, Any]] = {}
    used_vetoes: set[str] = {v for v in vetoed if v.startswith("dist:")}
    loaded: dict[str, type[Method] | Bundle] = {}
    for name in named:
        with told(found_wrong):
            loaded[name] = load(name, vetoed)
    unknown = [name for name in named if name not in loaded]
    for name, found in loaded.items():
        parts = found.parts if isinstance(found, Bundle) else {name: {}}
        if vetoed.issuperset(parts):
            found_wrong.append(
                f"`methods` names `{name}` and takes out {', '.join(f'`-{p}`' for p in parts)}, so nothing of it is "
                f"left. Remove `{name}` or keep a part of it."
            )
        for part, preset in parts.items():
            if part in vetoed:
                used_vetoes.add(part)
                continue
            if part in names:
                other = bundle_of.get(part)
                found_wrong.append(
                    f"`methods` names `{part}` twice: "
                    + (
                        f"it is a part of the bundle `{other or name}`, which is named too."
                        if other or name != part
                        else "name it once."
                    )
                    + f" Remove one of them; the parameters of `{part}` go under `method_params.{part}`."
                )
                continue
            cls: type[Method] | Bundle | None = None if isinstance(found, Bundle) else found
            if isinstance(found, Bundle):
                bundle_of[part] = name
                with told(found_wrong):
                    cls = load(part, vetoed)
            if isinstance(cls, Bundle):
                found_wrong.append(f"The bundle `{name}` names the bundle `{part}`; parts must be methods.")
            elif cls is not None:
                names[part] = cls
                values[part] = {**preset, **params.get(part, {})}
    if vetoed - used_vetoes and not unknown:  # which might bring it
        unused = shortened(", ".join(f"`-{v}`" for v in sorted(vetoed - used_vetoes)))
        found_wrong.append(f"`methods` takes out {unused}, but no bundle that is named brings it. Remove that entry.")
    for name in params:
        if name not in names and name not in unknown and not did_you_mean(name, unknown):
            bundled = [p for p in names if bundle_of.get(p) == name] if name in named else None
            found_wrong.append(_parameters_of_none(name, names, bundled))
    if problems is None and found_wrong:
        raise ConfigError("\n".join(found_wrong))
    if problems is not None:
        problems += found_wrong
    return NamedMethods(names, values, bundle_of)


def _parameters_of_none(name: str, names: Collection[str], bundled: Sequence[str] | None) -> str:
    """What to say of parameters under the name of a bundle, whose parts are `bundled`, or of no method of the run."""
    if bundled is not None:
        return (
            f"`method_params` has parameters for the bundle `{name}`; give them under the names of its parts: "
            f"{', '.join(f'`{p}`' for p in bundled)}."
        )
    enabled = f"enabled: {', '.join(names)}" if names else "no method is enabled"
    return (
        f"`method_params` has parameters for `{shortened(name, 80)}`, which is not among the methods of this run "
        f"({enabled}).{did_you_mean(name, names)} Add it to `methods` or remove its parameters."
    )


def load(name: str, vetoed: Collection[str] = ()) -> type[Method] | Bundle:
    """The class (or bundle) of a name.

    Raises:
        ConfigError: no such name (with the nearest ones), two origins, vetoed by the environment, or a package whose
            code cannot be imported or does not fit the contract.
    """
    if name in BASELINES:
        raise ConfigError(f"`{name}` is the host's own algorithm, not a method: leave `methods` empty to run it alone.")
    if elsewhere := not_a_method(name):
        raise ConfigError(elsewhere)
    environment = {v.strip() for v in os.environ.get(VETO_VARIABLE, "").split(",") if v.strip()}
    if name in environment:
        raise ConfigError(
            f"The method `{name}` is vetoed by the environment variable "
            f"{VETO_VARIABLE}={shown(os.environ[VETO_VARIABLE])}. Remove it there or from `methods`."
        )
    blocked = {_normalized(v.removeprefix("dist:")) for v in environment | set(vetoed) if v.startswith("dist:")}
    everywhere = _origins(name)
    origins = [o for o in everywhere if _normalized(o.distribution) not in blocked]
    if not origins:
        hidden = [o for o in everywhere if o not in origins]
        if hidden:
            raise ConfigError(f"The method `{name}` comes from {hidden[0]}, which is vetoed. Lift the veto to use it.")
        if why := no_method(name):
            raise ConfigError(why)
        known = all_names()
        if ":" in name:
            raise ConfigError(
                f"`{shortened(name, 80)}` names a class. `methods` takes names, and a name comes from the entry point "
                f"of an installed package, because every process of a run builds its own. `rl-plugins new NAME` writes "
                f"such a package; install it with pip install -e, and give its name."
            )
        raise ConfigError(
            f"There is no method `{shortened(name, 80)}`.{did_you_mean(name, known)} `rl-plugins list` has all; "
            f"`rl-plugins suggest --for ...` finds them, and options of the hosts, by what you see in a run."
        )
    if len(origins) > 1:
        third = next(o for o in origins if o.distribution)
        raise ConfigError(
            f"The method name `{name}` has {len(origins)} origins: {' and '.join(map(str, origins))}. Uninstall one or "
            f'veto it: add "-dist:{third.distribution}" to `methods` or set {VETO_VARIABLE}=dist:{third.distribution}.'
        )
    origin = origins[0]
    try:
        found: Any = origin.load()
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as e:  # a module that exits when it is imported, too
        moved = isinstance(e, ModuleNotFoundError) and str(e.name).startswith("rl_plugins.")
        where = " Methods import from `rl_plugins` itself; CHANGELOG.md lists modules that moved." if moved else ""
        raise ConfigError(
            f"The method `{name}` from {origin} cannot be loaded: {type(e).__name__}: {shortened(e)}.{where} Repair or "
            f"uninstall that package, or remove `{name}` from `methods`."
        ) from e
    if isinstance(found, Bundle):
        _check_bundle(found, name, str(origin))
    else:
        check_class(found, name, str(origin))
    return cast(type[Method] | Bundle, found)


class _Unbuilt(ConfigError):
    """Code of a class that raises when an instance is made, or makes one that does not fit."""


def build(cls: type[Method], values: Mapping[str, Any] | None, name: str) -> Method:
    """An instance with these parameters.

    Raises:
        ConfigError: a parameter that is not known or out of range (see `build_params`), or code of the class that
            raises something else.
    """
    try:
        params = build_params(cls.Params, values, name)
        made = cls(params)
        why = _uninitialized(made, params) or _unfit(made)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as e:  # an exit, too: it would end the run without a word
        raise _Unbuilt(
            f"`{cls.__name__}` cannot be built: {type(e).__name__}: {shortened(e)} (in {_raised_in(e)}). "
            f"`Params.check` must raise ConfigError, and `__init__` nothing."
        ) from e
    if why:
        raise _Unbuilt(why)
    return made


def _uninitialized(made: Any, params: MethodParams) -> str:
    if vars(made).get("params") is params and "_state" in vars(made):
        return ""
    return (
        f"`{type(made).__name__}.__init__` must call `super().__init__(params)` with the parameters that it is given."
    )


def _raised_in(e: BaseException) -> str:
    trace = e.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "?" if trace is None else f"`{trace.tb_frame.f_code.co_name}`, line {trace.tb_lineno}"


def all_names() -> list[str]:
    """Every name there is, built in and installed, without importing other packages."""
    return sorted({*_built_in(), *(e.name for e in _entry_points())})


def origins_of(name: str) -> list[Origin]:
    """Where a name comes from; more than one is a clash."""
    return _origins(name)


def check_class(cls: Any, name: str, origin: str) -> None:
    """Refuses a class that does not fit the contract.

    Raises:
        ConfigError: not a Method, another name than it is registered under, no source, unknown fidelity, no hook, a
            hook with another signature, a public function that looks like a hook with a typing error, a class attribute
            with a value that is not allowed, an `only_if` that names no parameter, or, where no parameter must be
            given, code that raises when an instance is made.
    """

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"The method `{name}` from {origin} does not fit the contract: {why} See `rl-plugins new`.")

    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise refuse(f"it is {shown(cls)}, not a subclass of rl_plugins.Method.")
    if cls.name != name:
        raise refuse(f"its class says name = {shown(cls.name)}, it is registered as {name!r}; they must agree.")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise refuse("a name has lower-case letters, digits and underscores only.")
    if cls.fidelity not in get_args(Fidelity):
        raise refuse(f"`fidelity` is {shown(cls.fidelity)}; it must be one of {', '.join(get_args(Fidelity))}.")
    if not (isinstance(cls.Params, type) and issubclass(cls.Params, MethodParams)) or _undecorated(cls.Params):
        raise refuse(
            f"`{cls.__name__}.Params` is {shown(cls.Params)}; `Params` must be a frozen dataclass that inherits from "
            f"MethodParams."
        )
    why = " ".join(declaration_problems(cls.Params)) or _unfit(cls) or _no_hooks(cls)
    if why:
        raise refuse(why)
    if not cls.claims() and not cls.host_options:
        raise refuse(
            f"`{cls.__name__}` overrides no hook and sets no option of a host, so it changes nothing. The hooks are: "
            f"{', '.join(HOOKS)}."
        )
    try:
        build(cls, None, name)
    except _Unbuilt as e:
        raise refuse(str(e)) from e
    except ConfigError:
        pass  # it has a parameter that must be given


def _no_hooks(cls: type[Method]) -> str:
    """What is wrong with a function or a hook of a class; empty if nothing is."""
    for attribute, value in vars(cls).items():
        if attribute in HOOKS and not callable(value):
            return f"`{cls.__name__}.{attribute}` is {shown(value)}; a hook must be a function."
        if attribute.startswith("_") or not inspect.isfunction(value):
            continue
        if attribute in HOOKS or attribute in ("check", "start"):
            wanted = list(inspect.signature(getattr(Method, attribute)).parameters)
            given = list(inspect.signature(value).parameters)
            if len(given) != len(wanted):
                return f"`{attribute}({', '.join(given)})` must take ({', '.join(wanted)})."
        elif not hasattr(Method, attribute) and did_you_mean(attribute, HOOKS):
            return f"`{attribute}` is no hook.{did_you_mean(attribute, HOOKS)} Start a helper's name with `_`."
    return ""


def _undecorated(params: type[MethodParams]) -> bool:
    """Whether a class on the way to MethodParams has fields of its own and is no dataclass of its own."""
    bases = [base for base in params.__mro__ if issubclass(base, MethodParams)]
    return any(inspect.get_annotations(base) and "__dataclass_params__" not in vars(base) for base in bases)


# attribute of a method -> whether its value is allowed, and what is
_ATTRIBUTES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "advantages_per": (lambda v: v in ("row", "turn"), '"row" or "turn"'),
    "aggregation": (lambda v: v in get_args(Aggregation), '"host", "sum" or "none"'),
    "teacher": (lambda v: v is None or isinstance(v, str), "None, or the path or name of a model"),
    "old_policy": (lambda v: v in get_args(OldPolicy), '"host", "proximal" or "generating"'),
    "rounds": (lambda v: isinstance(v, bool), "True or False"),
    "keeps_batch_size": (lambda v: isinstance(v, bool), "True or False"),
    "rows_per_rollout": (lambda v: _whole(v) and v >= 1, "a whole number of at least 1"),
    "state_version": (lambda v: _whole(v) and v >= 1, "a whole number of at least 1"),
    "needs": (lambda v: isinstance(v, Set) and _texts(v), 'a set of signals, e.g. frozenset({"text"})'),
    "brings": (
        lambda v: isinstance(v, Set) and _texts(v) and all(b in BRINGS or b.startswith("column:") for b in v),
        f"a set of: {', '.join(BRINGS)}, column:NAME",
    ),
    "in_eval": (lambda v: _texts(v) and set(v) <= set(HOOKS), 'names of hooks, e.g. ("plan",)'),
    "host_options": (
        lambda v: isinstance(v, Mapping) and all(isinstance(options, Mapping) for options in v.values()),
        'a mapping of mappings, {"trl": {"option": value}}',
    ),
    "idle": (
        lambda v: isinstance(v, (tuple, list)) and all(isinstance(i, Idle) and _signs(i.signs) for i in v),
        'a tuple of Idle({"metric": number}, "advice")',
    ),
}


def _unfit(method: Any) -> str:
    """What is wrong with an attribute of a method, a class or an instance; empty if nothing is."""
    cls = method if isinstance(method, type) else type(method)
    for attribute, (fits, allowed) in _ATTRIBUTES.items():
        value = getattr(method, attribute)
        if not isinstance(value, property) and not fits(value):  # a property has its value in the instance
            return f"`{cls.__name__}.{attribute}` is {shown(value)}; it must be {allowed}."
    return ""


def _signs(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(v, (int, float)) for v in value.values())


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _texts(value: Any) -> bool:
    return isinstance(value, (set, frozenset, list, tuple)) and all(isinstance(v, str) for v in value)


def _check_bundle(bundle: Bundle, name: str, origin: str) -> None:
    """Raises ConfigError for a bundle that does not fit the contract."""
    if bundle.name != name:
        raise ConfigError(f"The bundle from {origin} is called `{shown(bundle.name)}` but registered as `{name}`.")
    parts = bundle.parts
    if not isinstance(parts, Mapping) or not parts or not all(isinstance(p, Mapping) for p in parts.values()):
        raise ConfigError(
            f"The bundle `{name}` from {origin} has the parts {shown(parts)}; it must map methods to parameters."
        )


def _origins(name: str) -> list[Origin]:
    found = [Origin(name, "", f"rl_plugins.methods.{name}", partial(_member, name))] if name in _built_in() else []
    seen = set()
    for e in _entry_points():
        distribution = e.dist.name if e.dist is not None else "?"
        if e.name == name and (distribution, e.value) not in seen:
            seen.add((distribution, e.value))
            found.append(Origin(name, distribution, e.value, e.load))
    return found


def _normalized(distribution: str) -> str:
    """Names of distributions are equal up to case, `-`, `_` and `.` (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@cache
def _built_in() -> frozenset[str]:
    """Names of the methods and bundles of this package: one file or folder of `methods/` each, called as it is."""
    folder = Path(__file__).parent.parent / "methods"
    return frozenset(m.name for m in pkgutil.iter_modules([str(folder)]) if not m.name.startswith("_"))


def _member(name: str) -> Any:
    module = importlib.import_module(f"rl_plugins.methods.{name}")
    return next(
        value
        for value in vars(module).values()
        if (isinstance(value, Bundle) or (isinstance(value, type) and issubclass(value, Method))) and value.name == name
    )


def _entry_points() -> Any:
    """What is installed now: read again when a folder of `sys.path` has changed, for it takes reading every package."""
    return _read_entry_points(tuple((folder, _changed(folder)) for folder in sys.path))


def _changed(folder: str) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _read_entry_points(folders: tuple[tuple[str, int], ...]) -> Any:
    from importlib.metadata import entry_points

    return entry_points(group=ENTRY_POINT_GROUP)
