"""On PYTHONPATH of verl's runs: the rewards of reasoning-gym, and the score of an agent's episode, if it has one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rl_plugins.environments import reasoning_gym


def reward(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any], **more: Any
) -> dict[str, float]:
    parts = reasoning_gym.compute_score(data_source, solution_str, ground_truth, extra_info)
    noted = extra_info.get("score")
    if noted is not None and not math.isnan(noted):
        parts["score"] = parts["solved"] = float(noted)
    return parts
