"""The worlds by name, each made from a seed; a path of an .npz file is a stored pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from rl_plugins.core.errors import ConfigError, did_you_mean
from rl_plugins.lab.quality.worlds.masked import masked
from rl_plugins.lab.quality.worlds.processes import agents, delayed, sequences, team
from rl_plugins.lab.quality.worlds.tables import KINDS, table
from rl_plugins.tools.gradient_quality import ExactWorld, read_pool

WORLDS: Mapping[str, Callable[..., ExactWorld]] = {
    **{kind: partial(table, kind) for kind in KINDS},
    "sequences": sequences,
    "updates=4": partial(sequences, updates=4),
    "updates=16": partial(sequences, updates=16),
    "agents": agents,
    "team": team,
    "masked": masked,
    **{f"delay={lag}": partial(delayed, lag=lag) for lag in (0, 16, 64, 128)},
}
ABOUT: Mapping[str, str] = {
    "binary": "one-token answers, right or wrong; skills are shared by all prompts",
    "graded": "parts of an answer count, and a mark that says nothing is rewarded",
    "outliers": "one answer of twelve has an extreme reward of either sign",
    "skills": "as binary, but hard prompts need other skills than easy ones",
    "judged": "the reward is a judge's, who likes a mark; half of the right answers have a flaw",
    "rewards": "three reward functions: right, format, brevity, the last with ten times the range",
    "sequences": "texts of up to 6 letters with an end",
    "updates=4": "sequences, 4 optimizer steps after the batch was sampled",
    "updates=16": "sequences, 16 optimizer steps after the batch was sampled",
    "agents": "graphs of 5 places and 8 turns; states repeat",
    "team": "the graphs of agents; in two of the places a sub-agent acts, which shares the policy",
    "masked": "a masked language model of 4 places and 2 steps; the target of a variant is that of its own decoding",
    "delay=0": "chains of up to 24 tokens, rollouts of the newest policy",
    "delay=16": "the same chains; groups are 0 to 16 versions old",
    "delay=64": "the same chains; groups are 0 to 64 versions old",
    "delay=128": "the same chains; groups are 0 to 128 versions old",
}


def is_pool(name: str) -> bool:
    """Whether this is the path of a pool, not the name of a world."""
    return name.endswith((".npz", ".parquet"))


def shown(name: str) -> str:
    """The name on pages: that of a pool says its file, or its folder and step."""
    path = Path(name)
    return path.stem.replace("rollouts", path.parent.name) if is_pool(name) else name


def world_of(name: str, seed: int, rollouts: int = 0) -> ExactWorld:
    """A world by its name, or a pool by its path.

    Args:
        rollouts: of a batch; a world has at least twice the prompts that a batch of groups of 8 takes.

    Raises:
        ConfigError: no such world.
    """
    if is_pool(name):
        return read_pool(Path(name))
    if name not in WORLDS:
        raise ConfigError(f"There is no world {name!r}; there are {', '.join(WORLDS)}.{did_you_mean(name, WORLDS)}")
    return WORLDS[name](seed, prompts=max(512, rollouts // 4))
