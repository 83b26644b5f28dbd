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
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from rl_plugins.errors import ConfigError, did_you_mean
from rl_plugins.method import HOOKS, Bundle, Method
from rl_plugins.params import MethodParams
from rl_plugins.renamed import check_signals

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
    items: list[Any] = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [None]
    if not all(isinstance(i, str) for i in items):
        raise ConfigError(f"`methods` is {value!r}; it must be a list of method names, e.g. [vade, mc_grpo].")
    names = [part.strip() for item in items for part in re.split(r"[,\s]+", item.strip().strip("[]")) if part.strip()]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"`methods` names `{name}` {names.count(name)} times; name every method once.")
    return names


def parse_method_params(value: Any) -> dict[str, dict[str, Any]]:
    """`method_params` as a mapping of mappings; on a command line it is JSON or YAML text."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        value = _parsed(value)
    good = isinstance(value, Mapping) and all(isinstance(v, Mapping) or v is None for v in value.values())
    if not good:
        raise ConfigError(
            f"`method_params` is {value!r}; it must map method names to parameters, "
            'e.g. {"mc_grpo": {"mad_eps": 0.001}}.'
        )
    return {str(k): dict(v or {}) for k, v in value.items()}


def _parsed(text: str) -> Any:
    """JSON first: PyYAML reads it too, but takes a number like 1e-07, which JSON writers make, for text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as e:
            raise ConfigError(f"`method_params` is not readable as JSON or YAML: {e}.") from None


def select(methods: Any, method_params: Any = None) -> NamedMethods:
    """Expands bundles and vetoes, and checks that every parameter belongs to a method that is enabled.

    Raises:
        ConfigError: unknown or vetoed name, a name with two origins, a bundle named beside its part, parameters of a
            method that is not enabled. Parameters themselves are checked when the method is built.
    """
    named, params = parse_methods(methods), parse_method_params(method_params)
    vetoed = {n[1:] for n in named if n.startswith("-")}
    named = [n for n in named if not n.startswith("-")]
    names: dict[str, type[Method]] = {}
    bundle_of: dict[str, str] = {}
    values: dict[str, dict[str, Any]] = {}
    used_vetoes: set[str] = {v for v in vetoed if v.startswith("dist:")}
    for name in named:
        found = load(name, vetoed)
        parts = found.parts if isinstance(found, Bundle) else {name: {}}
        if vetoed.issuperset(parts):
            raise ConfigError(
                f"`methods` names `{name}` and takes out {', '.join(f'`-{p}`' for p in parts)}, so nothing of it is "
                f"left. Remove `{name}` or keep a part of it."
            )
        for part, preset in parts.items():
            if part in vetoed:
                used_vetoes.add(part)
                continue
            if part in names:
                other = bundle_of.get(part)
                raise ConfigError(
                    f"`methods` names `{part}` twice: "
                    + (
                        f"it is a part of the bundle `{other or name}`, which is named too."
                        if other or name != part
                        else "name it once."
                    )
                    + f" Remove one of them; the parameters of `{part}` go under `method_params.{part}`."
                )
            cls = found
            if isinstance(found, Bundle):
                cls, bundle_of[part] = load(part, vetoed), name
            if isinstance(cls, Bundle):
                raise ConfigError(f"The bundle `{name}` names the bundle `{part}`; parts must be methods.")
            names[part] = cls
            values[part] = {**preset, **params.get(part, {})}
    if vetoed - used_vetoes:
        raise ConfigError(
            f"`methods` takes out {', '.join(f'`-{v}`' for v in sorted(vetoed - used_vetoes))}, but no bundle that is "
            f"named brings it. Remove that entry."
        )
    for name in params:
        if name in names:
            continue
        if name in named:
            parts_text = ", ".join(f"`{p}`" for p in names if bundle_of.get(p) == name)
            raise ConfigError(
                f"`method_params` has parameters for the bundle `{name}`; give them under the names of its parts: "
                f"{parts_text}."
            )
        enabled = f"enabled: {', '.join(names)}" if names else "no method is enabled"
        raise ConfigError(
            f"`method_params` has parameters for `{name}`, which is not among the methods of this run ({enabled})."
            f"{did_you_mean(name, names)} Add `{name}` to `methods` or remove its parameters."
        )
    return NamedMethods(names, values, bundle_of)


def load(name: str, vetoed: Collection[str] = ()) -> type[Method] | Bundle:
    """The class (or bundle) of a name.

    Raises:
        ConfigError: no such name (with the nearest ones), two origins, vetoed by the environment, or a package whose
            code cannot be imported or does not fit the contract.
    """
    if name in BASELINES:
        raise ConfigError(f"`{name}` is the host's own algorithm, not a method: leave `methods` empty to run it alone.")
    environment = {v.strip() for v in os.environ.get(VETO_VARIABLE, "").split(",") if v.strip()}
    if name in environment:
        raise ConfigError(
            f"The method `{name}` is vetoed by the environment variable {VETO_VARIABLE}={os.environ[VETO_VARIABLE]!r}. "
            f"Remove it there or from `methods`."
        )
    blocked = {_normalized(v.removeprefix("dist:")) for v in environment | set(vetoed) if v.startswith("dist:")}
    everywhere = _origins(name)
    origins = [o for o in everywhere if _normalized(o.distribution) not in blocked]
    if not origins:
        hidden = [o for o in everywhere if o not in origins]
        if hidden:
            raise ConfigError(f"The method `{name}` comes from {hidden[0]}, which is vetoed. Lift the veto to use it.")
        known = all_names()
        raise ConfigError(
            f"There is no method `{name}`.{did_you_mean(name, known)} Known methods: {', '.join(known) or 'none'}. "
            f"`rl-plugins list` explains them."
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
    except ConfigError:
        raise
    except Exception as e:
        raise ConfigError(
            f"The method `{name}` from {origin} cannot be loaded: {type(e).__name__}: {e}. Repair or uninstall that "
            f"package, or remove `{name}` from `methods`."
        ) from e
    if not isinstance(found, Bundle):
        check_class(found, name, str(origin))
    elif found.name != name:
        raise ConfigError(f"The bundle from {origin} is called `{found.name}` but registered as `{name}`.")
    return cast(type[Method] | Bundle, found)


def all_names() -> list[str]:
    """Every name there is, built in and installed, without importing other packages."""
    builtin = [name for stem in _stems() for name in _names(stem)]
    return sorted({*builtin, *(e.name for e in _entry_points())})


def origins_of(name: str) -> list[Origin]:
    """Where a name comes from; more than one is a clash."""
    return _origins(name)


def check_class(cls: Any, name: str, origin: str) -> None:
    """Refuses a class that does not fit the contract.

    Raises:
        ConfigError: not a Method, another name than it is registered under, no source, unknown fidelity, a hook with
            another signature, or a public function that looks like a hook with a typing error.
    """

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"The method `{name}` from {origin} does not fit the contract: {why} See `rl-plugins new`.")

    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise refuse(f"it is {cls!r}, not a subclass of rl_plugins.Method.")
    if cls.name != name:
        raise refuse(f"its class says name = {cls.name!r}, it is registered as {name!r}; they must agree.")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise refuse("a name has lower-case letters, digits and underscores only.")
    if not hasattr(cls, "paper") or getattr(cls, "fidelity", None) not in ("code", "paper", "reconstruction"):
        raise refuse('it must set `paper` and `fidelity` ("code", "paper" or "reconstruction").')
    if not (isinstance(cls.Params, type) and issubclass(cls.Params, MethodParams)):
        raise refuse("`Params` must be a frozen dataclass that inherits from MethodParams.")
    check_signals(name, cls.needs or ())
    for attribute, value in vars(cls).items():
        if attribute.startswith("_") or not inspect.isfunction(value):
            continue
        if attribute in HOOKS or attribute == "start":
            wanted = list(inspect.signature(getattr(Method, attribute)).parameters)
            given = list(inspect.signature(value).parameters)
            if len(given) != len(wanted):
                raise refuse(f"`{attribute}({', '.join(given)})` must take ({', '.join(wanted)}).")
        elif not hasattr(Method, attribute) and did_you_mean(attribute, HOOKS):
            raise refuse(f"`{attribute}` is no hook.{did_you_mean(attribute, HOOKS)} Start a helper's name with `_`.")


def _origins(name: str) -> list[Origin]:
    found = []
    for stem in _stems():
        if (name == stem or name.startswith(f"{stem}_")) and name in _names(stem):
            found.append(Origin(name, "", f"rl_plugins.methods.{stem}", partial(_member, stem, name)))
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
def _stems() -> tuple[str, ...]:
    folder = Path(__file__).parent.parent / "methods"
    return tuple(m.name for m in pkgutil.iter_modules([str(folder)]) if not m.name.startswith("_"))


@cache
def _members(stem: str) -> dict[str, Any]:
    """The methods and bundles a file of `methods/` defines, by name."""
    module = importlib.import_module(f"rl_plugins.methods.{stem}")
    return {
        value.name: value
        for value in vars(module).values()
        if isinstance(value, Bundle)
        or (isinstance(value, type) and issubclass(value, Method) and value.__module__.startswith(module.__name__))
    }


def _names(stem: str) -> Collection[str]:
    """Names a file of `methods/` defines. One that cannot be imported stands for its own name, and `load` says why."""
    try:
        return _members(stem)
    except Exception:
        return (stem,)


def _member(stem: str, name: str) -> Any:
    return _members(stem)[name]


def _entry_points() -> Any:
    from importlib.metadata import entry_points

    return entry_points(group=ENTRY_POINT_GROUP)
