"""The runs of `rl-plugins demo` for masked diffusion language models: all variants decode in the same number of passes.

The baseline is the trainer without methods: equally many tokens per pass, end tokens not held back, and log-probs from
one pass over an answer of masks, as in diffu-GRPO.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_plugins.lab.demo import settings
from rl_plugins.lab.demo.policy import MAX_COMPLETION_LENGTH

PASSES = 3  # floor(log2 14), the number that `ass` has
SHORT_STEPS, LONG_STEPS = 48, 160


def config(policy: Path, data: Path, methods: Iterable[str], long: bool) -> dict[str, Any]:
    """The config of every run, as of `settings.config`."""
    steps = LONG_STEPS if long else SHORT_STEPS
    changes = {"max_steps": steps, "eval_steps": steps // 4, "diffusion_steps": PASSES}
    return settings.config(policy, data, methods, long) | changes


NOTES = (
    "TRL's trainer with the decoding of masked diffusion models (MaskedGRPOTrainer), a bidirectional policy of 247,368 "
    f"parameters, tasks of sorting digits. Every variant decodes an answer of {MAX_COMPLETION_LENGTH} tokens in "
    f"{PASSES} passes of the model, in training and in evaluation.",
    "The baseline unmasks equally many tokens per pass, does not hold end tokens back, and takes log-probs from one "
    "pass over an answer of masks, as diffu-GRPO does. The first evaluation shows what another way to decode changes "
    "by itself.",
)
