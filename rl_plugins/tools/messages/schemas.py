"""The part of JSON Schema that message contracts use: check a value, and mend it where that needs no guess."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rl_plugins.core.errors import ConfigError, shown

KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "array": (list, tuple),
    "object": Mapping,
}
_KEYWORDS = {
    "type", "enum", "minimum", "maximum", "maxLength", "maxItems", "items", "properties", "required",
    "additionalProperties", "description",
}  # fmt: skip


def mended(value: Any, schema: Mapping[str, Any]) -> Any:
    """The value brought within its schema where that needs no guess; see `contracts.repaired`."""
    kind = schema.get("type")
    numeric = kind in ("number", "integer")
    if numeric and isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d{1,15}(\.\d{1,15})?\s*", value):
        value = float(value)
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    if numeric and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = max(value, schema.get("minimum", value))
        value = min(value, schema.get("maximum", value))
    if kind == "array" and isinstance(value, str):
        value = [value]
    if isinstance(value, str) and "maxLength" in schema:
        value = value[: schema["maxLength"]]
    if isinstance(value, (list, tuple)) and kind == "array":
        value = [mended(v, schema.get("items", {})) for v in value[: schema.get("maxItems", len(value))]]
    if isinstance(value, Mapping) and kind == "object":
        known, extra = schema.get("properties", {}), schema.get("additionalProperties", True)
        value = {k: mended(v, known.get(k, {})) for k, v in value.items() if k in known or extra}
    return value


def schema_errors(  # noqa: C901  # a branch a keyword of JSON Schema
    value: Any, schema: Mapping[str, Any], path: str
) -> Iterator[str]:
    """What is wrong with a value, in the order of the schema."""
    kind = schema.get("type")
    if kind is not None:
        fits = isinstance(value, KINDS[kind])
        if isinstance(value, bool) and kind != "boolean":
            fits = False
        if isinstance(value, float) and not math.isfinite(value):
            fits = False
        if not fits:
            yield f"{path} is {shown(value, 60)}, not of type {kind}"
            return
    if "enum" in schema and not any(
        v == value and isinstance(v, bool) == isinstance(value, bool) for v in schema["enum"]
    ):
        yield f"{path} is {shown(value, 60)}; it must be one of {shown(list(schema['enum']), 100)}"
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and "minimum" in schema and value < schema["minimum"]:
        yield f"{path} is {value}; it must be at least {schema['minimum']}"
    if number and "maximum" in schema and value > schema["maximum"]:
        yield f"{path} is {value}; it must be at most {schema['maximum']}"
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        yield f"{path} has {len(value)} characters; {schema['maxLength']} are allowed"
    if isinstance(value, (list, tuple)):
        if len(value) > schema.get("maxItems", len(value)):
            yield f"{path} has {len(value)} entries; {schema['maxItems']} are allowed"
        for i, entry in enumerate(value):
            yield from schema_errors(entry, schema.get("items", {}), f"{path}[{i}]")
    if isinstance(value, Mapping):
        known = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{path} has no field {name}"
        for name, entry in value.items():
            if name in known:
                yield from schema_errors(entry, known[name], f"{path}.{name}")
            elif not schema.get("additionalProperties", True):
                yield f"{path} has the field {shown(name, 60)}, which is not allowed"


def check_schema(schema: Any, path: str) -> None:
    """Refuses what is no schema of these keywords.

    Raises:
        ConfigError: another keyword or type.
    """
    if not isinstance(schema, Mapping):
        raise ConfigError(f"The schema of {path} is {shown(schema)}. It must be a JSON Schema as a dictionary.")
    unknown = sorted(set(schema) - _KEYWORDS)
    if unknown:
        raise ConfigError(f"The schema of {path} has {unknown[0]}. It may have {', '.join(sorted(_KEYWORDS))}.")
    if schema.get("type", "string") not in KINDS:
        raise ConfigError(f"The type in {path} is {shown(schema['type'])}. It must be one of {', '.join(KINDS)}.")
    if not isinstance(schema.get("additionalProperties", True), bool):
        raise ConfigError(f"`additionalProperties` in {path} must be true or false.")
    for name, inner in schema.get("properties", {}).items():
        check_schema(inner, f"{path}.{name}")
    if "items" in schema:
        check_schema(schema["items"], f"{path}[]")
