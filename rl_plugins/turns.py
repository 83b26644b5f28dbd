"""Where `Turns` is found since the first version; it is defined in `rl_plugins.agents.turns`."""

from __future__ import annotations

from rl_plugins.agents.turns import Turns, canonical_form, joint, normalized, state_ids

__all__ = ["Turns", "canonical_form", "joint", "normalized", "state_ids"]
