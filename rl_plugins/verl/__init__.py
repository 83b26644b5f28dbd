"""The verl adapter. verl loads `rl_plugins.verl.plugin` by its entry point; nothing here needs to be imported by hand.

python -m verl.trainer.main_ppo ... trainer.v1.trainer_mode=rl_plugins_sync "+rl_plugins.methods=[vade,mc_grpo]"
"""

from __future__ import annotations

METHODS_VARIABLE, TEACHER_VARIABLE = "RL_PLUGINS_METHODS", "RL_PLUGINS_TEACHER"
"""Set in the worker processes of a run that names methods, and a teacher (see `start.apply`)."""
