"""The diffusion adapter: a trainer for flow-matching models of diffusers with `methods` and `method_params`.

from rl_plugins.diffusion import DiffusionConfig, DiffusionTrainer
"""
