"""The words of a command of verl, and other values in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError, shown


def words_of(file: Path) -> list[str]:
    """The words of a file with a command of verl or with its overrides."""
    try:
        words = shlex.split(file.read_text(encoding="utf-8").replace("\\\n", " "), comments=True)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{file} cannot be read: {e}. Give a YAML file, or a file with overrides.") from None
    variables = [word for word in words if "$" in word and word != "$@"]
    if variables:
        raise ConfigError(
            f"{file} is a shell script with variables ({shown(variables[0])}). Only a plain command or its overrides "
            f"can be read. Give the words that the shell makes of them: --host verl -- OVERRIDES"
        )
    return words


def with_overrides(words: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Overrides of hydra with other values: the last one of a name is replaced, a new name comes last."""
    new = list(words)
    for name, value in values.items():
        places = [i for i, word in enumerate(new) if re.match(rf"\+{{0,2}}{re.escape(name)}=", word)]
        if places:
            new[places[-1]] = f"{new[places[-1]].partition('=')[0]}={value}"
        else:
            new.append(f"{name}={value}")
    return new
