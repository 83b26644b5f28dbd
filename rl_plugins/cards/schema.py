"""The JSON schema of a YAML config: editors complete `methods` and the parameters of each method from it."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rl_plugins.cards.catalog import cards
from rl_plugins.core.method import Bundle
from rl_plugins.core.params import MethodParams, describe_params

_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def config_schema() -> dict[str, Any]:
    """Schema of what rl-plugins reads in a config; every other key is the host's, and anything goes there."""
    found = {card.name: card for card in cards()}
    name = {"anyOf": [{"enum": list(found)}, {"type": "string", "pattern": "^-", "description": "without this part"}]}
    params = {
        name: {"description": f"{card.does}.", **_params(card.found.Params)}
        for name, card in found.items()
        if not isinstance(card.found, Bundle)
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A run with rl-plugins",
        "type": "object",
        "properties": {
            "methods": {
                "description": "Names of methods and bundles, in their order.",
                "anyOf": [{"type": "array", "items": name}, {"type": "string"}],
            },
            "method_params": {
                "description": "Parameters of the methods, by the name of the method.",
                "anyOf": [
                    {"type": "object", "properties": params, "additionalProperties": False},
                    {"type": "string"},
                ],
            },
        },
    }


def _params(cls: type[MethodParams]) -> dict[str, Any]:
    hints, told = get_type_hints(cls), {row["name"]: row for row in describe_params(cls)}
    properties = {
        f.name: {"description": told[f.name]["help"], **_of_type(hints[f.name], f.metadata.get("limits", {}))}
        for f in dataclasses.fields(cls)
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _of_type(hint: Any, limits: Mapping[str, float]) -> dict[str, Any]:
    """A type as a schema. A function is a text in YAML, and so is a type that has no schema."""
    kind = get_origin(hint)
    if kind is Literal:
        return {"enum": list(get_args(hint))}
    if kind in (Union, types.UnionType):
        return {"anyOf": [_of_type(one, limits) for one in get_args(hint)]}
    if kind in (tuple, list):
        items = next((one for one in get_args(hint) if one is not Ellipsis), Any)
        return {"type": "array", "items": _of_type(items, limits)}
    if kind in (dict, collections.abc.Mapping) or hint is dict:
        return {"type": "object"}
    if hint in (int, float):
        return {"type": _PLAIN[hint], **{_LIMITS[name]: bound for name, bound in limits.items()}}
    return {} if hint is Any else {"type": _PLAIN.get(hint, "string")}
