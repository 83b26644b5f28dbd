"""YAML and JSON that users write: what cannot be a config is refused, whatever it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError, shortened, shown

LARGEST = 2**20  # bytes of a file or a text


def read_yaml(source: Path | str, what: str = "The config") -> Any:
    """The content of a YAML file (a `Path`) or of a YAML text (a `str`).

    Args:
        what: how messages begin: "The config 'run.yaml'".

    Raises:
        ConfigError: there is no such file, it is no YAML (binary, say), it is larger than a config can be, it has a
            key twice, or a key of the outermost mapping that is no text.
    """
    import yaml

    content = _bytes_of(source, what)
    try:
        loader = _loader()(content)
        try:
            found = loader.get_single_data()
        finally:
            loader.dispose()
    except ConfigError as e:
        raise _unreadable(what, "YAML", str(e)) from None
    except yaml.YAMLError as e:
        raise _unreadable(what, "YAML", shortened(" ".join(str(e).split()), 300)) from None
    except Exception as e:  # PyYAML converts what it has recognized without a look: `!!bool x`, month 13
        raise _unreadable(what, "YAML", f"{type(e).__name__}: {shortened(e)}") from None
    return _checked(found, what, "YAML")


def read_json_or_yaml(text: str, what: str) -> Any:
    """The content of a text from a command line. JSON goes first: PyYAML reads it too, but takes a number like 1e-07,
    which JSON writers make, for text.

    Raises:
        ConfigError: as `read_yaml`.
    """
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError:
        return read_yaml(text, what)
    except (ConfigError, ValueError, RecursionError) as e:
        raise _unreadable(what, "JSON", shortened(e)) from None
    return _checked(found, what, "JSON")


def _bytes_of(source: Path | str, what: str) -> bytes:
    if isinstance(source, str):
        content = source.encode("utf-8", "surrogatepass")
    else:
        try:
            with open(source, "rb") as file:
                content = file.read(LARGEST + 1)  # no more, for it may have no end
        except (OSError, ValueError) as e:
            raise ConfigError(f"{what} cannot be read: {shortened(e)}. Give the path of a YAML file.") from None
    if len(content) > LARGEST:
        raise _unreadable(what, "YAML", f"it is larger than {LARGEST} bytes")
    return content


def _checked(found: Any, what: str, form: str) -> Any:
    """`found`, if its outermost keys are texts."""
    if isinstance(found, Mapping):
        for key in found:
            if not isinstance(key, str):
                raise _unreadable(
                    what, form, f"the key {shown(key, 80)} ({type(key).__name__}) is no text; put it in quotes"
                )
    return found


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"the key {shown(key, 80)} stands twice in one mapping; keep one of them")
        found[key] = value
    return found


def _unreadable(what: str, form: str, why: str) -> ConfigError:
    return ConfigError(f"{what} is not readable as {form}: {why.rstrip('.')}.")


def _loader() -> Any:
    """PyYAML's safe loader, which refuses a key that stands twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen: dict[Any, int] = {}
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                    continue
                name = self.construct_object(key)  # `1` and `0x1` are the same key
                line = key.start_mark.line + 1
                if name in seen:
                    raise ConfigError(
                        f"the key {shown(name, 80)} stands twice in one mapping (lines {seen[name]} and {line}); keep "
                        f"one of them"
                    )
                seen[name] = line
            return node

    return Loader
