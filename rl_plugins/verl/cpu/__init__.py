"""verl on a machine without an accelerator: a debugging tool, active only with VERL_PLATFORM=cpu in the environment.

It works with verl's own trainers, whether methods are named or not. See docs/verl_cpu.md. `activate.py` switches it on.
"""

from __future__ import annotations

ROLLOUT = "hf_cpu"
"""Name of the rollout backend: `actor_rollout_ref.rollout.name=hf_cpu`."""
CHECKPOINT_ENGINE = "cpu_file"
"""Name of the weight transfer: `actor_rollout_ref.rollout.checkpoint_engine.backend=cpu_file`."""
