"""Other values in a YAML text; its comments, order and quotes stay.

ruamel.yaml keeps comments, and writes spaces, lists and nulls of all other lines its own way.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.runtime.config_text import read_yaml


def with_values(text: str, values: Mapping[str, Any]) -> str:
    """The text with these values.

    Args:
        text: a YAML mapping.
        values: dotted name -> number, text, list or mapping. A name that is not there is added.

    Raises:
        ConfigError: a value cannot be replaced where it is, because an alias or a merge shares it with others.
    """
    wanted = copy.deepcopy(read_yaml(text) or {})
    for name, value in values.items():
        at = wanted
        *above, last = name.split(".")
        for key in above:
            at[key] = dict(at.get(key) or {})
            at = at[key]
        at[last] = value
        text = _with_value(text, name.split("."), value)
        if not _is(text, wanted):
            raise ConfigError(
                f"`{name}` cannot be changed in the file, because an alias, a merge or an empty mapping is in its "
                f"place. Write {name.replace('.', ': ')}: {value} out, and run the command again."
            )
    return text


def _is(text: str, wanted: Any) -> bool:
    try:
        return bool(read_yaml(text) == wanted)
    except ConfigError:  # an alias lost its anchor
        return False


def _with_value(text: str, path: Sequence[str], value: Any) -> str:
    import yaml

    node = yaml.compose(text, Loader=yaml.SafeLoader)
    path, start = list(path), 0
    while path and isinstance(node, yaml.MappingNode):
        found = next(((k, v) for k, v in node.value if k.value == path[0]), None)
        if found is None:
            break
        (key, node), path = found, path[1:]
        start = key.end_mark.index
    if not path:
        if isinstance(node, yaml.CollectionNode) and not node.flow_style:
            return f"{text[:start]}: {json.dumps(value)}{text[_end(node) :]}"
        start, end = node.start_mark.index, node.end_mark.index
        space = "" if text[:start].endswith((" ", "\n")) else " "
        return text[:start] + space + json.dumps(value) + text[end:]
    if not isinstance(node, yaml.MappingNode) or not node.value:
        return text
    new = json.dumps(value)
    for key in reversed(path[1:]):
        new = f"{{{key}: {new}}}"
    first = node.value[0][0].start_mark
    between = ", " if node.flow_style else "\n" + " " * first.column
    return f"{text[: first.index]}{path[0]}: {new}{between}{text[first.index :]}"


def _end(node: Any) -> int:
    """Where a block ends, without the lines and comments after it."""
    while node.value and not isinstance(node.value, str) and not node.flow_style:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return int(node.end_mark.index)
