"""Parameters of a method: a frozen dataclass whose fields carry help, range and the paper's default.

    @dataclass(frozen=True)
    class Params(MethodParams):
        scale: Literal["mad", "none"] = param("mad", "divisor of the advantages")
        mad_eps: float = param(1e-3, "added to the median absolute deviation", gt=0, only_if={"scale": "mad"})

Values arrive from Python, YAML and the command line. They are parsed strictly by the declared type, because YAML gives
`1e-3` as a string and a command line gives everything as one; what does not fit is an error that names the parameter.
So is a parameter that has no effect with the others: `only_if` says when it has one.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from rl_plugins.core.errors import ConfigError, did_you_mean, shortened, shown

_LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


@dataclass(frozen=True)
class Is:
    """What `only_if` asks of another parameter beyond being one of several values.

    Args:
        text: how messages and docs say it, after "is".
        holds: whether a value is that.
    """

    text: str
    holds: Callable[[Any], bool]


GIVEN = Is("given", lambda value: value not in (None, ""))
FUNCTION = Is("a function", callable)


def above(bound: float) -> Is:
    """A number larger than this."""
    return Is(f"above {bound:g}", lambda value: value is not None and value > bound)


def below(bound: float) -> Is:
    """A number smaller than this."""
    return Is(f"below {bound:g}", lambda value: value is not None and value < bound)


Condition = Mapping[str, Any]
"""Other parameters -> what each must be: a value, an `Is`, or several of these in a tuple."""


def param(
    default: Any,
    help: str,
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    allow_inf: bool = False,
    only_if: Condition | Sequence[Condition] = (),
    example: str = "",
) -> Any:
    """Declares one parameter.

    Args:
        default: the paper's (or the argued) default.
        help: one line, shown by `rl-plugins info`.
        gt, ge, lt, le: limits of a number, or of every number of a tuple.
        allow_inf: infinity is a legal value (NaN never is).
        only_if: with which other parameters this one has an effect: `{"scale": ("mad", "std"), "clip": GIVEN}` (all
            of them), or a sequence of such mappings (any of them). Where that does not hold, a value other than the
            default is refused. The default is not, because it asks for nothing that does not happen.
        example: "module:attribute" of a function that serves, shown by `rl-plugins info`.
    """
    limits = {k: v for k, v in (("gt", gt), ("ge", ge), ("lt", lt), ("le", le)) if v is not None}
    conditions = (only_if,) if isinstance(only_if, Mapping) else tuple(only_if)
    return field(
        default=default,
        metadata={"help": help, "limits": limits, "allow_inf": allow_inf, "only_if": conditions, "example": example},
    )


@dataclass(frozen=True)
class MethodParams:
    """Base of every method's `Params`. Values are checked on construction, so no method sees an illegal one.

    Raises:
        ConfigError: a value of the wrong type or out of range, or one that has no effect with the others; the
            message names the parameter, the value given and what is allowed. `check()` may be overridden for further
            conditions between parameters.
    """

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for f in dataclasses.fields(self):
            value = parse_value(getattr(self, f.name), hints[f.name], f.name, **_rules(f))
            object.__setattr__(self, f.name, value)
        without = "".join(_without_effect(self, f, hints[f.name]) for f in dataclasses.fields(self))
        if without:
            raise ConfigError(without.strip())
        self.check()

    def check(self) -> None:
        """Conditions between parameters; raise ConfigError."""


def has_effect(params: MethodParams, name: str) -> bool:
    """Whether a parameter can change anything with the others, as its `only_if` says."""
    conditions = type(params).__dataclass_fields__[name].metadata.get("only_if", ())
    return not conditions or any(_holds(params, condition) for condition in conditions)


def _without_effect(params: MethodParams, f: dataclasses.Field[Any], hint: Any) -> str:
    """What to say of a parameter that was set and cannot change anything; empty if it can, or was not set."""
    value = getattr(params, f.name)
    if has_effect(params, f.name) or _same(value, f.default):
        return ""
    if _same(value, parse_value(f.default, hint, f.name, **_rules(f))):  # a callable declared as text, say
        return ""
    others = list(dict.fromkeys(name for condition in f.metadata["only_if"] for name in condition))
    now = " and ".join(f"`{name}` is {_said(getattr(params, name))}" for name in others)
    return (
        f" `{f.name}` has no effect: it is {shown(value)}, and acts only if "
        f"{condition_text(f, type(params))}; {now}. Remove `{f.name}`, or "
        f"change {' or '.join(f'`{name}`' for name in others)}."
    )


def condition_text(f: dataclasses.Field[Any], cls: type[MethodParams]) -> str:
    """The `only_if` of a parameter of `cls` as words; empty without one. Values that only other subclasses of its base
    allow are left out."""
    hints, fields = get_type_hints(cls), cls.__dataclass_fields__

    def allowed(name: str, value: Any) -> bool:
        try:
            _ = isinstance(value, Is) or parse_value(value, hints[name], name, **_rules(fields[name]))
        except ConfigError:
            return False
        return True

    def said(name: str, wanted: Any) -> str:
        several = _several(wanted)
        return " or ".join(map(_said, [v for v in several if allowed(name, v)] or several))

    return ", or ".join(
        " and ".join(f"`{name}` is {said(name, wanted)}" for name, wanted in condition.items())
        for condition in f.metadata.get("only_if", ())
    )


def _why_not(value: Any, hint: Any, name: str, f: dataclasses.Field[Any]) -> str:
    """Why a parameter cannot have this value; empty if it can."""
    try:
        _ = isinstance(value, Is) or parse_value(value, hint, name, **_rules(f))
    except ConfigError as e:
        return str(e)
    return ""


def declaration_problems(cls: type[MethodParams]) -> list[str]:
    """What is wrong with the `only_if` of parameters: names that do not exist, values that the other cannot have."""
    hints, fields = get_type_hints(cls), {f.name: f for f in dataclasses.fields(cls)}

    problems = []
    for f in fields.values():
        for condition in f.metadata.get("only_if", ()):
            if not isinstance(condition, Mapping) or not condition:
                problems.append(f"`only_if` of `{f.name}` is {shown(condition)}; it must map parameters to values.")
                continue
            for name, wanted in condition.items():
                if name == f.name or name not in fields:
                    what = "itself" if name == f.name else f"`{name}`, which is no parameter"
                    hint = did_you_mean(str(name), [n for n in fields if n != f.name])
                    problems.append(f"`only_if` of `{f.name}` names {what}.{hint}")
                    continue
                wrong = list(
                    filter(None, (_why_not(value, hints[name], name, fields[name]) for value in _several(wanted)))
                )
                # a base may name values that only some of its subclasses have
                inherited = f.name not in inspect.get_annotations(cls) and len(wrong) < len(_several(wanted))
                problems += [f"`only_if` of `{f.name}` can never hold: {e}" for e in wrong if not inherited]
    return problems


def _holds(params: MethodParams, condition: Condition) -> bool:
    return all(holds(getattr(params, name, None), wanted) for name, wanted in condition.items())


def holds(value: Any, wanted: Any) -> bool:
    """Whether a value is what `only_if` asks for: a value, an `Is`, or one of several."""
    if isinstance(wanted, tuple):
        return any(holds(value, one) for one in wanted)
    if isinstance(wanted, Is):
        return wanted.holds(value)
    return _same(value, wanted) and isinstance(value, bool) == isinstance(wanted, bool)


def _several(wanted: Any) -> tuple[Any, ...]:
    return wanted if isinstance(wanted, tuple) else (wanted,)


def _said(value: Any) -> str:
    if isinstance(value, Is):
        return value.text
    return str(value).lower() if value is None or isinstance(value, bool) else shown(_plain(value), 80)


def _same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:  # values that cannot be compared, such as arrays
        return False


def _rules(f: dataclasses.Field[Any]) -> dict[str, Any]:
    return {"limits": f.metadata.get("limits", {}), "allow_inf": f.metadata.get("allow_inf", False)}


def build_params(cls: type[MethodParams], values: Mapping[str, Any] | None, method: str) -> MethodParams:
    """`values` as an instance of `cls`; every error names the method.

    Raises:
        ConfigError: unknown parameter (with the nearest names), wrong type, out of range.
    """
    values = dict(values or {})
    known = [f.name for f in dataclasses.fields(cls)]
    for name in values:
        if name not in known:
            named = shortened(name if isinstance(name, str) else shown(name), 80)
            allowed = f"It has: {', '.join(known)}." if known else "It has no parameters."
            raise ConfigError(
                f"Method `{method}` has no parameter `{named}`.{did_you_mean(named, known)} {allowed} "
                f"See `rl-plugins info {method}`."
            )
    try:
        return cls(**values)
    except ConfigError as e:
        raise ConfigError(f"Method `{method}`: {e} See `rl-plugins info {method}`.") from None


def parse_value(
    value: Any, hint: Any, name: str, limits: Mapping[str, float] | None = None, allow_inf: bool = False
) -> Any:
    """`value` as the declared type `hint`, within `limits`: one rule a type, in `_RULES`.

    Understood: bool, int, float, str, Literal, `X | None`, tuple[X, ...], Callable (an object, or the text
    "module:attribute"), and Any, which is taken as it is. Text is converted only where it is an exact spelling of the
    type.
    """
    rule = _RULES.get(_kind(hint))
    if rule is None:
        raise ConfigError(
            f"parameter `{name}` is declared as {hint}, which cannot be parsed; declare bool, int, float, str, "
            f"Literal, X | None, tuple[X, ...] or Callable."
        )
    return rule(value, _Declared(name, hint, limits or {}, allow_inf))


@dataclass(frozen=True)
class _Declared:
    """A parameter as its field declares it."""

    name: str
    hint: Any
    limits: Mapping[str, float]
    allow_inf: bool

    def parsed(self, value: Any, hint: Any) -> Any:
        """A value of a part of the type."""
        return parse_value(value, hint, self.name, self.limits, self.allow_inf)


def _kind(hint: Any) -> Any:
    """The key of a type in `_RULES`."""
    origin = get_origin(hint)
    if origin is types.UnionType:
        return Union
    if origin is tuple and get_args(hint)[1:] != (...,):
        return None
    return origin or hint


def _union(value: Any, d: _Declared) -> Any:
    choices = [a for a in get_args(d.hint) if a is not type(None)]
    is_none = value is None or (isinstance(value, str) and value.strip().lower() in {"none", "null"})
    if is_none and len(choices) < len(get_args(d.hint)):
        return None
    errors = []
    for choice in choices:
        try:
            return d.parsed(value, choice)
        except ConfigError as e:
            errors.append(e)
    if len(errors) == 1:
        raise errors[0]
    raise _wrong(d.name, value, f"{_type_text(d.hint)} {_range_text(d.limits)}".strip())


def _literal(value: Any, d: _Declared) -> Any:
    choices = get_args(d.hint)
    for choice in choices:
        if value == choice and isinstance(value, bool) == isinstance(choice, bool):
            return choice
        if isinstance(value, str) and value == str(choice):
            return choice
    raise ConfigError(
        f"parameter `{d.name}` is {shown(value)}; allowed: {', '.join(map(repr, choices))}."
        f"{did_you_mean(value if isinstance(value, str) else shown(value), [str(a) for a in choices])}"
    )


def _tuple(value: Any, d: _Declared) -> tuple[Any, ...]:
    items = [v.strip() for v in value.split(",") if value.strip()] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise _wrong(d.name, value, _type_text(d.hint))
    return tuple(d.parsed(v, get_args(d.hint)[0]) for v in items)


def _bool(value: Any, d: _Declared) -> bool:
    word = str(value).strip().lower()
    if not isinstance(value, (bool, str)) or word not in _TRUE | _FALSE:
        raise _wrong(d.name, value, "true or false")
    return word in _TRUE


def _int(value: Any, d: _Declared) -> Any:
    number = _spelled(value, int, d, "a whole number")
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if not isinstance(number, int):
        raise _wrong(d.name, value, "a whole number")
    return _within(number, d.name, d.limits)


def _float(value: Any, d: _Declared) -> Any:
    number = float(_spelled(value, float, d, "a number"))
    if math.isnan(number) or (math.isinf(number) and not d.allow_inf):
        raise _wrong(d.name, value, "a finite number")
    return _within(number, d.name, d.limits)


def _spelled(value: Any, kind: type[int] | type[float], d: _Declared, wanted: str) -> int | float:
    """A number, or what a text spells."""
    try:
        number = kind(value.strip()) if isinstance(value, str) else value
    except ValueError:
        raise _wrong(d.name, value, wanted) from None
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise _wrong(d.name, value, wanted)
    return number


def _str(value: Any, d: _Declared) -> str:
    if not isinstance(value, str):
        raise _wrong(d.name, value, "text")
    return value


_RULES: Mapping[Any, Callable[[Any, _Declared], Any]] = {
    Union: _union,
    Literal: _literal,
    tuple: _tuple,
    Callable: lambda value, d: resolve_callable(value, d.name),
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    Any: lambda value, d: value,
}


def resolve_callable(value: Any, name: str) -> Callable[..., Any]:
    """A callable given as an object or as "module:attribute".

    Raises:
        ConfigError: not callable, no such module, no such attribute.
    """
    if callable(value):
        return cast(Callable[..., Any], value)
    if not isinstance(value, str) or value.count(":") != 1:
        raise _wrong(name, value, 'a callable or the text "module:attribute"')
    module_name, attribute = value.split(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where TRL and `python -m` find modules, too
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # whatever the module raises while it is imported, SystemExit too
        raise ConfigError(
            f"parameter `{name}` is {shown(value)}, but it cannot be loaded: {type(e).__name__}: {shortened(e)}. Give "
            f'an importable "module:attribute", with the module in this folder or on PYTHONPATH.'
        ) from e
    if not callable(found):
        raise _wrong(name, value, "a callable")
    return cast(Callable[..., Any], found)


def describe_params(cls: type[MethodParams]) -> list[dict[str, str]]:
    """Name, type, default, range, help, `only_if` and example of every parameter, as text, for `info` and the docs."""
    hints = get_type_hints(cls)
    rows = []
    for f in dataclasses.fields(cls):
        limits = f.metadata.get("limits", {})
        rows.append(
            {
                "name": f.name,
                "type": _type_text(hints[f.name]),
                "default": _default_text(f.default),
                "range": _range_text(limits, ", "),
                "help": f.metadata.get("help", ""),
                "only_if": condition_text(f, cls),
                "example": f.metadata.get("example", ""),
            }
        )
    return rows


def params_to_dict(params: MethodParams) -> dict[str, Any]:
    """Plain values for a state file; a callable becomes "module:name"."""
    return {f.name: _plain(getattr(params, f.name)) for f in dataclasses.fields(params)}


def _plain(value: Any) -> Any:
    if callable(value):
        return f"{getattr(value, '__module__', '?')}:{getattr(value, '__qualname__', type(value).__qualname__)}"
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _default_text(value: Any) -> str:
    return str(_plain(value)) if callable(value) else f"{value:g}" if isinstance(value, float) else str(value)


def _within(number: Any, name: str, limits: Mapping[str, float]) -> Any:
    tests = {"gt": lambda x, y: x > y, "ge": lambda x, y: x >= y, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y}
    for key, bound in limits.items():
        if not tests[key](number, bound):
            raise ConfigError(f"parameter `{name}` is {shown(number)}; it must be {_range_text(limits)}.")
    return number


def _range_text(limits: Mapping[str, float], separator: str = " and ") -> str:
    return separator.join(f"{_LIMITS[k]} {v:g}" for k, v in limits.items())


def _wrong(name: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"parameter `{name}` is {shown(value)} ({type(value).__name__}); it must be {wanted}.")


def _type_text(hint: Any) -> str:
    kind, args = _kind(hint), get_args(hint)
    if kind is Union:
        return " or ".join("none" if a is type(None) else _type_text(a) for a in args)
    if kind is Literal:
        return " | ".join(map(repr, args))
    if kind is tuple:
        return f"list of {_type_text(args[0])}"
    names = {Callable: '"module:attribute"', bool: "true/false", int: "int", float: "float", str: "text"}
    return names.get(kind, getattr(hint, "__name__", str(hint)))
